"""A test of learning in sessions: a scripted user with ten hidden preferences works with the tiny agent for 100 turns.

    python -m benchmarks.session_learning [--output=docs/sessions] [--seeds=5] [--turns=100] [--only_plot]

In four of five turns the user asks for one of ten kinds of tasks for which they prefer another way than the agent's
favourite (`PREFERENCES`), otherwise for one of ten other kinds. Every turn is a new task. A call that does the task as
the user prefers is approved, and its tool answers; any other is denied with a correction, such as 'use rg rather than
grep -r', which is learned before the next proposal. That one reads the correction, and is not counted as a turn: it is
approved if it is what the user prefers, and otherwise the session ends, as it does after two tasks.

The configured teacher is compared with the other kinds, and with two controls: the user says the corrections of other
turns, or denies without a word, which teaches nothing. Before and after, the proposals for held-out tasks without a
preference are scored: of the ten kinds that the user sometimes asks for, and of kinds that they never ask for.

Before that, single lessons: in each of 36 fresh tasks, a new adapter proposes, at temperature 1, and its proposal is
denied, or edited. The log-probs of the rejected and the wanted call on the bare prompt are measured before and after
the lesson, and the probability of the wanted call at the next proposal, which is sampled, too.

Prints a JSON line for each run and the means; writes learning.json and learning.png.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
import contextlib
import json
import os
import pathlib
import random
import sys
import tempfile
import time
from typing import Any

import numpy as np

from sdpo_jax import extras

TEACHERS = ('base', 'live', 'ema', 'lagged')  # The configured one first.
SHUFFLED, SILENT = 'shuffled', 'silent'
# Kind of task → the way that the user wants; never the favourite.
PREFERENCES = {
  'find': 'rg',
  'drop': 'the edit tool',
  'list': 'fd',
  'show': 'the read tool',
  'tests': 'pytest',
  'install': 'uv',
  'run': 'uv',
  'delete': 'git',
  'format': 'ruff',
  'switch': 'git switch',
}
# Kinds of tasks without a preference; any way of doing them is right.
OTHERS = ('mention', 'create', 'locate', 'uninstall', 'move', 'clear', 'lint', 'types', 'changes', 'length')
PREFERRED = 0.8  # Fraction of the turns about one of the ten preferences.
TASKS = 2  # Per session at most.
HELD_OUT = 4  # Scored tasks per kind.
SEED = 100  # For the first user; settings were chosen with lower ones.
REHEARSE = 1  # Approved proposals that are trained on together with a correction.
TEMPERATURE = 0.3  # For proposals, as in coding agents.
SYSTEM = 'You are a coding agent.'
RESULT = '(No output.)'  # Of every call: tools are not run.
LESSONS, FRESH = 36, 20  # Single lessons, and those whose probabilities are averaged.
START, END = 20, 30  # Turns at the beginning and at the end over which denials are counted.


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--output', type=pathlib.Path, default=pathlib.Path('docs/sessions'))
  parser.add_argument('--seeds', type=int, default=5, help='users')
  parser.add_argument('--turns', type=int, default=100)
  parser.add_argument('--seed', type=int, default=SEED, help='of the first user')
  parser.add_argument('--arms', default=','.join((TEACHERS[0], SHUFFLED, SILENT, *TEACHERS[1:])), help='which runs')
  parser.add_argument('--update', type=json.loads, default={}, help='how to learn, as JSON, where not by default')
  parser.add_argument('--rehearse', type=int, default=REHEARSE, help='approved proposals beside a correction')
  parser.add_argument('--lessons', type=int, default=LESSONS, help='single lessons')
  parser.add_argument('--only_plot', action='store_true', help='draw what is there')
  args = parser.parse_args()
  args.output.mkdir(parents=True, exist_ok=True)
  results = args.output / 'learning.json'
  if not args.only_plot:
    os.environ.setdefault('JAX_PLATFORMS', 'cpu')
    measure(args, results)
  plot(json.loads(results.read_text(encoding='utf-8')), args.output / 'learning.png')


def measure(args: argparse.Namespace, results: pathlib.Path) -> None:
  """Write all data of the figure and the table, with intermediate results after every run."""
  from sdpo_jax.serving.account import Account

  began, runs = time.process_time(), []
  with running() as service:
    single = lessons(service, args.seed, args.lessons) if args.lessons else {}
    print(json.dumps({'benchmark': 'session_learning/lessons', **single.get('mean', {})}), flush=True)
    seeds = range(args.seed, args.seed + args.seeds)
    untrained = {seed: right(Account(service, 'observer'), 'base', schemas(), held_out(seed)) for seed in seeds}
    for seed in seeds:
      for arm in args.arms.split(','):
        found = work(service, arm, seed, args.turns, args.update, args.rehearse, untrained[seed])
        runs.append({'arm': arm, 'seed': seed, **found})
        said = {name: value for name, value in runs[-1].items() if not isinstance(value, list)}
        print(json.dumps({'benchmark': 'session_learning/run'} | said), flush=True)
        found = {
          'turns': args.turns,
          'update': args.update,
          'rehearse': args.rehearse,
          'lessons': single,
          'mean': means(runs),
          'cpu_s': round(time.process_time() - began),
          'runs': runs,
        }
        results.write_text(json.dumps(found, indent=1) + '\n', encoding='utf-8')
    print(json.dumps({'benchmark': 'session_learning/mean', **means(runs)}), flush=True)


def means(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
  """Return the means over users, by arm."""
  found = {}
  for arm in dict.fromkeys(run['arm'] for run in runs):
    own = [run for run in runs if run['arm'] == arm]
    names = [name for name in own[0] if isinstance(own[0][name], int | float) and name != 'seed']
    found[arm] = {'users': len(own)} | {name: round(float(np.mean([run[name] for run in own])), 4) for name in names}
  return found


@contextlib.contextmanager
def running() -> Iterator[Any]:
  """Provide a running service of the configuration with an empty store; stops it at the end."""
  from sdpo_jax.configs import session_quickstart
  from sdpo_jax.serving.service import Service

  config = session_quickstart.get_config()
  serve = config.serve
  # The sessions are short: one small program of each kind.
  serve.prompt_buckets, serve.response_buckets, serve.teacher_buckets = (208,), (32,), (240,)
  serve.score_buckets, serve.rows, serve.training_rows = (240,), 2, 2
  with tempfile.TemporaryDirectory() as root:
    serve.store.root = root
    service = Service.make(config, announce=lambda line: print(line, file=sys.stderr, flush=True))
    try:
      service.start()
      service.worker.wait()
      yield service
    finally:
      service.stop()


def schemas() -> list[dict[str, Any]]:
  """Return the tools in the template's form."""
  from sdpo_jax.environments.workspace.tools import TOOLS

  return [tool.schema() for tool in TOOLS.values()]


# Actions of a user.


def work(
  service: Any,
  arm: str,
  seed: int,
  turns: int,
  update: Mapping[str, Any],
  rehearse: int,
  before: np.ndarray,
) -> dict[str, Any]:
  """Return the results of a user's turns with a new adapter.

  Args:
    service: a running service.
    arm: the teacher's kind, or the control.
    seed: the user's seed.
    turns: number of proposals.
    update: update options that differ from the defaults.
    rehearse: approved proposals that are trained on together with a correction.
    before: result of `right` for the model without an adapter.
  """
  from sdpo_jax.serving.account import Account
  from sdpo_jax.serving.sessions.session_records import Decision, SessionSettings, ToolResult
  from sdpo_jax.serving.sessions.sessions import Sessions

  account = Account(service, f'user {seed}, {arm}')
  settings = {'teacher': {'kind': arm if arm in TEACHERS else TEACHERS[0]}}
  adapter, _ = account.create('mine', settings, seed=seed)
  tools = schemas()
  options = SessionSettings(
    system=SYSTEM, tools=tools, update=update, rehearse=rehearse, sampling={'temperature': TEMPERATURE}
  )
  asked, said = script(seed, turns, shuffled=arm == SHUFFLED)
  denied, denied_again, divergence, seconds, rejected = [], [], [], [], 0
  session, tasks = None, 0
  for turn, task in enumerate(asked):
    if session is None or tasks == TASKS:
      (session, _), tasks = Sessions(account).open(adapter.id, options), 0
    [proposed] = Sessions(account).propose(
      adapter.id, session.id, [{'role': 'user', 'content': task.ask}], seed=1000 * seed + turn
    )
    tasks, way = tasks + 1, way_of(task, proposed)
    denied.append(not wanted(task, way))
    if denied[-1]:
      words = None if arm == SILENT else said[turn](way)
      _, learned = Sessions(account).decide(adapter.id, session.id, proposed.n, Decision('deny', words))
      if learned is not None:
        rejected += not learned.accepted
        seconds.append(learned.seconds)
        divergence.append([learned.divergence_before, learned.divergence_after])
      [proposed] = Sessions(account).propose(adapter.id, session.id, seed=1000 * seed + turns + turn)
      denied_again.append(not wanted(task, way_of(task, proposed)))
    if denied[-1] and denied_again[-1]:
      session = None
    else:
      Sessions(account).decide(adapter.id, session.id, proposed.n, Decision('approve'))
      Sessions(account).results(adapter.id, session.id, proposed.n, [ToolResult(True, RESULT)])
  after = right(account, adapter.id, tools, held_out(seed))
  groups = {
    'held_out': [True] * len(before),
    'asked': [task.kind in OTHERS for task in held_out(seed)],
    'never_asked': [task.kind not in OTHERS for task in held_out(seed)],
  }
  found = {'start': np.mean(denied[:START]), 'all': np.mean(denied), 'end': np.mean(denied[-END:])}
  found['again'] = np.mean(denied_again)
  for group, rows in groups.items():
    for column, name in enumerate((group, f'{group}_probability')):
      there, left = before[rows, column].mean(), after[rows, column].mean()
      found |= {f'{name}_before': there, f'{name}_after': left, f'{name}_lost': there - left}
  return {name: round(float(value), 4) for name, value in found.items()} | {
    'rejected': rejected,
    'learn_s_median': round(float(np.median(seconds)), 3) if seconds else 0.0,
    'divergence': [[None if each is None else round(each, 4) for each in pair] for pair in divergence],
    'denied': [int(each) for each in denied],
    'kinds': [task.kind for task in asked],
  }


def script(seed: int, turns: int, *, shuffled: bool) -> tuple[list[Any], list[Any]]:
  """Return a user's tasks, and for each a function from the proposed way to the user's reaction.

  Args:
    seed: the user's seed.
    turns: number of tasks.
    shuffled: whether the user reacts as in another turn about a preference.
  """
  from sdpo_jax.quickstart import tool_tasks

  rng = random.Random(seed)
  kinds = [rng.choice(list(PREFERENCES) if rng.random() < PREFERRED else OTHERS) for _ in range(turns)]
  asked = [tool_tasks.draw(rng, kind) for kind in kinds]
  phrases = [rng.random() for _ in asked]
  about = list(range(turns))
  if shuffled:
    preferred = [turn for turn in about if prefers(asked[turn])]
    order = random.Random(seed + 1).sample(preferred, len(preferred))
    for here, there in zip(order, [*order[1:], order[0]], strict=True):
      about[here] = there

  def words(turn: int, way: str | None) -> str:
    kind = asked[about[turn]].kind
    favourite = tool_tasks.KINDS[kind].ways[0].label
    tried = favourite if shuffled else way
    return tool_tasks.correction(random.Random(phrases[turn]), PREFERENCES.get(kind, favourite), tried)

  return asked, [lambda way, turn=turn: words(turn, way) for turn in range(turns)]


def prefers(task: Any) -> bool:
  """Return whether the user has a preference about a task."""
  return task.kind in PREFERENCES


def wanted(task: Any, way: str | None) -> bool:
  """Return whether the user approves a way of doing a task; None is no way."""
  return way is not None and (not prefers(task) or way == PREFERENCES[task.kind])


def held_out(seed: int) -> list[Any]:
  """Return tasks about which the user has no preference."""
  from sdpo_jax.quickstart import tool_tasks

  rng = random.Random(10_000 + seed)
  kinds = [kind for kind in tool_tasks.KINDS if kind not in PREFERENCES]
  return [tool_tasks.draw(rng, kind) for kind in kinds for _ in range(HELD_OUT)]


# Single lessons.


def fresh(seed: int, count: int) -> list[tuple[Any, str, float]]:
  """Return tasks, for each a way of the favourite's tool that is not the favourite, and a draw for the phrase."""
  from sdpo_jax.quickstart import tool_tasks

  rng, ways, found = random.Random(20_000 + seed), {}, []
  for name, kind in tool_tasks.KINDS.items():
    ways[name] = [way.label for way in kind.ways[1:] if way.tool == kind.ways[0].tool]
  while len(found) < count:
    for kind in rng.sample([name for name, labels in ways.items() if labels], 20)[: count - len(found)]:
      found.append((tool_tasks.draw(rng, kind), rng.choice(ways[kind]), rng.random()))
  return found


def lessons(service: Any, seed: int, count: int) -> dict[str, Any]:
  """Return measurements of single denials and edits, each by a new adapter, and their means."""
  rows = [lesson(service, seed + number, *each) for number, each in enumerate(fresh(seed, count))]
  names = 'wanted_before', 'wanted_after', 'wanted_next'
  mean = {name: np.exp([row[name] for row in rows[:FRESH]]).mean() for name in names}
  mean |= {name: np.mean([row[name] for row in rows]) for name in ('denied_again', 'word_for_word')}
  for name in ('denial', 'edit', 'direct'):
    moved = np.array([row[name] for row in rows]).T
    for which, (before, after) in zip(('rejected', 'wanted'), np.split(moved, 2), strict=True):
      mean |= {f'{name}_{which}_change': (after - before).mean(), f'{name}_{which}_rose': (after > before).mean()}
  return {'mean': {name: round(float(value), 4) for name, value in mean.items()}, 'rows': rows}


def lesson(service: Any, seed: int, task: Any, label: str, phrase: float) -> dict[str, Any]:
  """Return how a denial, an edit, and one that is learned directly, of an unwanted proposal move answers' log-probs."""
  from sdpo_jax.quickstart import tool_tasks
  from sdpo_jax.serving.account import Account
  from sdpo_jax.serving.sessions.session_records import Decision, SessionSettings
  from sdpo_jax.serving.sessions.sessions import Sessions

  goal = tool_tasks.KINDS[task.kind].way(label).call(task.slots)
  wanted = [*service.tokenizer.encode(task.text(label), add_special_tokens=False), service.tokenizer.eos_token_id]
  found = {'kind': task.kind, 'ask': task.ask, 'wanted': label}
  for kind in ('denial', 'edit', 'direct'):
    account = Account(service, f'{kind} {seed}')
    adapter, _ = account.create('mine', None, seed=seed)
    sessions = Sessions(account)
    options = SessionSettings(system=SYSTEM, tools=schemas(), learn_edits='direct' if kind == 'direct' else 'teacher')
    for attempt in range(100):  # Until it proposes another call of the same tool.
      session, _ = sessions.open(adapter.id, options)
      asked = [{'role': 'user', 'content': task.ask}]
      [turn] = sessions.propose(adapter.id, session.id, asked, seed=1000 * seed + attempt)
      if (call := called(turn)) not in (None, goal) and call['name'] == goal['name']:
        break
    words = tool_tasks.correction(random.Random(phrase), label, task.way_of(call))
    said = Decision('deny', words) if kind == 'denial' else Decision('edit', None, goal['arguments'])
    sessions.decide(adapter.id, session.id, turn.n, said)
    versions = [f'{adapter.id}@0', adapter.id]
    found[kind] = [
      log_prob(account, version, turn.prompt_tokens, answer) for answer in (turn.tokens, wanted) for version in versions
    ]
    if kind == 'denial':
      [again] = sessions.propose(adapter.id, session.id, seed=1000 * seed)
      found |= {'wanted_before': found[kind][2], 'wanted_after': found[kind][3]}
      found |= {'wanted_next': log_prob(account, adapter.id, again.prompt_tokens, wanted)}
      found |= {'denied_again': called(again) != goal, 'word_for_word': again.text == turn.text}
  return found


def way_of(task: Any, turn: Any) -> str | None:
  """Return the way in which a proposal does a task; None: in none."""
  call = called(turn)
  return None if call is None else task.way_of(call)


def called(turn: Any) -> dict[str, Any] | None:
  """Return the name and the arguments of a proposal's only call; None: it is not exactly one valid call."""
  if turn.fault is not None or len(turn.calls) != 1:
    return None
  return {'name': turn.calls[0].name, 'arguments': dict(turn.calls[0].arguments)}


def log_prob(account: Any, model: str, prompt: Sequence[int], answer: Sequence[int]) -> float:
  """Return the log-prob of a whole answer."""
  [found] = account.score(account.resolve(model), [(prompt, answer)])
  return round(float(found.log_probs.sum()), 4)


# Measurements.


def right(account: Any, model: str, tools: Sequence[Any], tests: Sequence[Any]) -> np.ndarray:
  """Return [N, 2]: whether each task is done in any way, as in `scored`."""
  from sdpo_jax.quickstart import tool_tasks

  return scored(
    account, model, tools, [(task, [way.label for way in tool_tasks.KINDS[task.kind].ways]) for task in tests]
  )


def approval(account: Any, model: str, tools: Sequence[Any], tests: Sequence[Any]) -> np.ndarray:
  """Return [N, 2]: whether each task is done as the user approves, as in `scored`."""
  from sdpo_jax.quickstart import tool_tasks

  ways = [[way.label for way in tool_tasks.KINDS[task.kind].ways if wanted(task, way.label)] for task in tests]
  return scored(account, model, tools, list(zip(tests, ways, strict=True)))


def scored(account: Any, model: str, tools: Sequence[Any], tests: Sequence[tuple[Any, Sequence[str]]]) -> np.ndarray:
  """Score some ways of doing each task when it is requested at the start of a session.

  Args:
    account: the adapter's owner.
    model: the adapter, or 'base'.
    tools: tools in the template's form.
    tests: N tasks with names of ways.

  Returns:
    [N, 2]: whether the proposal at temperature 0 is one of the ways, and the ways' probability.
  """
  service = account.service
  rows, owners = [], []
  for number, (task, labels) in enumerate(tests):
    messages = [{'role': 'system', 'content': SYSTEM}, {'role': 'user', 'content': task.ask}]
    prompt = service.tokenizer.apply_chat_template(
      messages, tools=list(tools), add_generation_prompt=True, tokenize=True, return_dict=False
    )
    for label in labels:
      call = service.tokenizer.encode(task.text(label), add_special_tokens=False)
      rows.append((prompt, [*call, service.tokenizer.eos_token_id]))
      owners.append(number)
  fares = np.zeros((len(tests), 2))
  for owner, (_, tokens), found in zip(owners, rows, account.score(account.resolve(model), rows, topk=1), strict=True):
    fares[owner] += bool((found.top_ids[:, 0] == tokens).all()), np.exp(np.sum(found.log_probs))
  return fares


def plot(results: Mapping[str, Any], target: pathlib.Path) -> None:
  """Plot denials over the turns, by arm: the fraction among the last twenty, mean and range over users."""
  plt = extras.pyplot()

  window = 20
  figure, axes = plt.subplots(1, 2, figsize=(9.5, 3.8), sharey=True, constrained_layout=True)
  names = {SHUFFLED: 'corrections of other turns', SILENT: 'no corrections'} | {
    kind: f'teacher {kind}' for kind in TEACHERS
  }
  arms = list(dict.fromkeys(run['arm'] for run in results['runs']))
  for axis, shown in ((axes[0], (TEACHERS[0], SHUFFLED, SILENT)), (axes[1], TEACHERS)):
    for arm in (arm for arm in shown if arm in arms):
      denied = np.array([run['denied'] for run in results['runs'] if run['arm'] == arm], float)
      share = np.stack([np.convolve(row, np.ones(window) / window, 'valid') for row in denied])
      turns = np.arange(window, denied.shape[1] + 1)
      [line] = axis.plot(turns, share.mean(0), label=names[arm], linewidth=2)
      if axis is axes[0]:
        axis.fill_between(turns, share.min(0), share.max(0), color=line.get_color(), alpha=0.18, linewidth=0)
    axis.set_xlabel('turn')
    axis.set_ylim(0, 1)
    axis.yaxis.set_major_formatter(lambda value, _: f'{value:.0%}')
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, fontsize=9, loc='best')
  axes[0].set_ylabel(f'denied of the last {window}')
  figure.savefig(target, dpi=140)


if __name__ == '__main__':
  main()
