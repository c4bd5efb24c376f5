"""A test of learning in the service: five users correct twenty answers each about two instructions of the quickstart.

    python -m benchmarks.serve_learning [--output=docs/serving] [--users=5] [--corrections=20] [--only_plot]

The model is the quickstart's after a few hundred more supervised steps in which half of the instructions are read right
(`make_base.DigitRecipe` with `start` and `misread`): so there is something to correct, and something to lose. Each user
has an adapter, asks about two of the misread instructions until an answer is wrong, and sends the right one as its
correction. Each feedback also includes those kept answers about other instructions whose log-prob has fallen most, to
preserve them. Each feedback is one transaction of `Account.feedback`, and the next question goes to the resulting
version.

The control does the same with the corrections of the first run shuffled among its samples. After every correction the
held-out questions are scored: accuracy is the probability of the right answer, the expected accuracy of sampled
answers; at the start and the end, answers are sampled and graded as well. No other adapter may change by a bit, as
digests of all arrays and of log-probs verify. Prints a JSON line for each user and the means; writes learning.json and
learning.png.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import sys
import tempfile
import time
from typing import Any

import numpy as np

from sdpo_jax import extras

MISREAD = ('swap', 'descending', 'right', 'add_two', 'subtract_one')  # One of each pair that the quickstart confuses.
HELD_OUT = 24  # Questions per instruction.
KEPT, SHOWN = 80, 47  # Answers that a user was content with, and how many of them a feedback includes.
UPDATE = {'learning_rate': 2e-4, 'steps': 8}
MOST_ASKED = 500  # Questions after which a user gives up looking for a wrong answer.
BASE_STEPS, BASE_RATE = 400, 2e-3  # For the model's further supervised training.
SEED = 100  # For the first user; settings were chosen with lower ones.

Question = tuple[str, list[int]]  # Instruction and digits.
ARMS = ('corrections', 'shuffled corrections')


@dataclasses.dataclass
class Run:
  """One user's adapter, from its first version to its last."""

  curve: list[list[float]]  # [corrections + 1][instructions], accuracy.
  sampled: list[list[float]]  # [before, after][instructions], accuracy of sampled answers.
  corrections: list[str]  # The texts sent.
  asked: int  # Number of questions until all were corrected.
  rejected: int  # Number of feedbacks that the guards rejected.
  account: Any
  adapter: str  # Its id.


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--output', type=pathlib.Path, default=pathlib.Path('docs/serving'))
  parser.add_argument('--folder', type=pathlib.Path, default=pathlib.Path('runs/serve_learning'), help='for the model')
  parser.add_argument('--users', type=int, default=5)
  parser.add_argument('--corrections', type=int, default=20)
  parser.add_argument('--seed', type=int, default=SEED, help='of the first user')
  parser.add_argument('--only_plot', action='store_true', help='draw what is there')
  args = parser.parse_args()
  args.output.mkdir(parents=True, exist_ok=True)
  results = args.output / 'learning.json'
  if not args.only_plot:
    os.environ.setdefault('JAX_PLATFORMS', 'cpu')
    results.write_text(json.dumps(measure(args), indent=1) + '\n', encoding='utf-8')
  plot(json.loads(results.read_text(encoding='utf-8')), args.output / 'learning.png')


def measure(args: argparse.Namespace) -> dict[str, Any]:
  """Return all data of the figure and the JSON lines."""
  began = time.process_time()
  model = make_model(args.folder / 'model')
  users = []
  with running(model) as service:
    bystander = make_bystander(service)
    known = {bystander[1]: (bystander[0], fingerprint(*bystander))}
    print(json.dumps({'benchmark': 'serve_learning/teacher', **teachers(service)}), flush=True)
    for number in range(args.users):
      pair = MISREAD[number % len(MISREAD)], MISREAD[(number + 1) % len(MISREAD)]
      runs: dict[str, Run] = {}
      for arm in ARMS:
        shuffled = deranged(runs[ARMS[0]].corrections, args.seed + number) if runs else None
        run = correct(service, arm, pair, args.seed + number, args.corrections, shuffled)
        runs[arm] = run
        known[run.adapter] = run.account, fingerprint(run.account, run.adapter)
      users.append(summary(number, pair, runs))
      print(json.dumps({'benchmark': 'serve_learning/user'} | {k: v for k, v in users[-1].items() if k != 'curves'}))
      sys.stdout.flush()
    unchanged = [fingerprint(account, id) == before for id, (account, before) in known.items()]
  mean = {
    arm: {name: round(float(np.mean([user[arm][name] for user in users])), 3) for name in users[0][arm]} for arm in ARMS
  }
  whole = {
    'users': len(users),
    'corrections': args.corrections,
    **mean,
    'adapters_of_others': len(unchanged),
    'unchanged_to_the_bit': sum(unchanged),
    'cpu_s': round(time.process_time() - began),
  }
  print(json.dumps({'benchmark': 'serve_learning/mean', **whole}), flush=True)
  return {'mean': whole, 'users': users}


def summary(number: int, pair: Sequence[str], runs: dict[str, Run]) -> dict[str, Any]:
  """Return the results of a user's two runs."""
  groups = groups_of(pair)
  found: dict[str, Any] = {'user': number, 'instructions': list(pair)}
  for arm, run in runs.items():
    curve, sampled = np.asarray(run.curve), np.asarray(run.sampled)
    found[arm] = {}
    for group, columns in groups.items():
      before, *_, after = curve[:, columns].mean(1)
      drawn = sampled[:, columns].mean(1)
      found[arm] |= {
        f'{group}_before': round(float(before), 3),
        f'{group}_after': round(float(after), 3),
        f'{group}_change': round(float(after - before), 3),
        f'{group}_sampled_change': round(float(drawn[1] - drawn[0]), 3),
      }
    found[arm] |= {'asked': run.asked, 'rejected': run.rejected}
  found['curves'] = {
    arm: {group: np.asarray(run.curve)[:, columns].mean(1).round(4).tolist() for group, columns in groups.items()}
    for arm, run in runs.items()
  }
  return found


def groups_of(pair: Sequence[str]) -> dict[str, list[int]]:
  """Return column indices of a curve by group.

  The groups are: corrected, all others, and those of the others that the model reads right.
  """
  names = instructions()
  return {
    'corrected': [names.index(name) for name in pair],
    'post_to_replica': [index for index, name in enumerate(names) if name not in pair],
    'right_before': [index for index, name in enumerate(names) if name not in MISREAD],
  }


def instructions() -> list[str]:
  from sdpo_jax.environments import digits

  return list(digits.INSTRUCTIONS)


# The service and its model.


def make_model(folder: pathlib.Path) -> pathlib.Path:
  """Make the model that misreads some instructions and reads the others right, unless it exists; return its path."""
  if not (folder / 'config.json').exists():
    from sdpo_jax.configs import quickstart
    from sdpo_jax.quickstart import make_base

    config = quickstart.get_config()
    recipe = make_base.DigitRecipe(
      start=config.model.path, misread=MISREAD, steps=BASE_STEPS, learning_rate=BASE_RATE, warmup_steps=30
    )
    make_base.make_base(config, folder, recipe, lambda text: print(text, file=sys.stderr, flush=True))
  return folder


@contextlib.contextmanager
def running(model: pathlib.Path) -> Iterator[Any]:
  """Provide a running service with the quickstart's sizes and an empty store; stops it at the end."""
  from sdpo_jax.configs import quickstart_lora
  from sdpo_jax.serving.service import Service

  config = quickstart_lora.get_config()
  config.model.path = str(model)
  config.model.lora.rank = 16
  serve = config.serve
  serve.prompt_buckets, serve.teacher_buckets, serve.response_buckets = (32,), (96,), (8,)
  serve.rows, serve.training_rows = 64, 16
  serve.snapshots = serve.teachers = serve.slots = 4
  serve.topk = 20
  with tempfile.TemporaryDirectory() as root:
    serve.store.root = root
    service = Service.make(config, announce=lambda line: print(line, file=sys.stderr, flush=True))
    try:
      service.start()
      service.worker.wait()
      yield service
    finally:
      service.stop()


# Actions of a user.


def correct(
  service: Any, arm: str, pair: Sequence[str], seed: int, count: int, texts: Sequence[str] | None = None
) -> Run:
  """Let a user correct `count` answers of a new adapter.

  Args:
    service: a running service.
    arm: part of the owner's name.
    pair: instructions that the user cares for.
    seed: the user's seed.
    count: number of corrections.
    texts: texts to send in place of the right answers; None: the right answers.
  """
  from sdpo_jax.environments import digits
  from sdpo_jax.serving import feedback
  from sdpo_jax.serving.account import Account
  from sdpo_jax.serving.feedback_request import Item, make_request

  account = Account(service, f'user {seed}, {arm}')
  adapter, _ = account.create('mine', {'teacher': {'kind': 'base'}}, seed=seed)
  draw = np.random.default_rng(seed)
  tests = [(name, digits_of(draw, 'test')) for name in instructions() for _ in range(HELD_OUT)]
  kept = content(account, adapter.id, draw)
  run = Run(
    [accuracy(account, adapter.id, tests)], [sampled(account, adapter.id, tests)], [], 0, 0, account, adapter.id
  )
  for number in range(count):
    while True:
      question = str(draw.choice(pair)), digits_of(draw, 'train')
      answer = ask(account, adapter.id, question, seed=1000 * seed + run.asked)
      run.asked += 1
      if answer.text.strip() != digits.answer(*question):
        break
      if run.asked > MOST_ASKED:
        raise RuntimeError(f'{MOST_ASKED} questions, and only {number} wrong answers: nothing is left to correct.')
    text = digits.answer(*question) if texts is None else texts[number]
    run.corrections.append(text)
    items = [Item(sample_id=answer.id, correction=text)]
    items += [Item(sample_id=sample.id) for sample in fading(account, adapter.id, kept)]
    request = make_request(items, UPDATE, service.settings, detail=(), top=0)
    run.rejected += not feedback.learn(account, adapter.id, number - run.rejected, request).said['accepted']
    run.curve.append(accuracy(account, adapter.id, tests))
  run.sampled.append(sampled(account, adapter.id, tests))
  return run


def fading(account: Any, model: str, kept: Sequence[Any]) -> list[Any]:
  """Return the kept answers whose probability has fallen most since they were drawn."""
  scored = account.score(account.resolve(model), [(sample.prompt_tokens, sample.tokens) for sample in kept])
  change = [float(np.sum(now.log_probs - sample.log_probs)) for now, sample in zip(scored, kept, strict=True)]
  return [kept[index] for index in np.argsort(change, kind='stable')[:SHOWN]]


def content(account: Any, adapter: str, draw: np.random.Generator) -> list[Any]:
  """Return sampled answers, about instructions that the model reads right, with which a user was content."""
  from sdpo_jax.environments import digits

  right, kept, asked = [name for name in instructions() if name not in MISREAD], [], 0
  while len(kept) < KEPT:
    question = right[len(kept) % len(right)], digits_of(draw, 'train')
    answer = ask(account, adapter, question, seed=asked)
    asked += 1
    if answer.text.strip() == digits.answer(*question):
      kept.append(answer)
  return kept


def ask(account: Any, model: str, question: Question, seed: int) -> Any:
  """Return an answer to the question, sampled as in training and stored by the service."""
  from sdpo_jax.serving.sample_requests import SampleOptions

  messages = asked_in(question)
  [answer] = account.sample(
    account.resolve(model),
    account.service.prompt_of(messages=messages),
    options=SampleOptions(seed=seed),
    messages=messages,
  ).result()
  return answer


def asked_in(question: Question) -> list[dict[str, str]]:
  """Return the conversation of a question."""
  from sdpo_jax.environments import digits

  return [{'role': 'user', 'content': digits.question(*question)}]


def digits_of(draw: np.random.Generator, split: str) -> list[int]:
  """Return random digits of a split, so that corrected questions never occur in the measurement."""
  from sdpo_jax.environments import digits

  while True:
    found = draw.integers(10, size=digits.LENGTH).tolist()
    if digits.split_of(found) == split:
      return found


def deranged(texts: Sequence[str], seed: int) -> list[str]:
  """Return the texts in an order in which none keeps its place."""
  order = np.random.default_rng(seed).permutation(len(texts))
  moved = [''] * len(texts)
  for here, there in zip(order, np.roll(order, 1), strict=True):
    moved[here] = texts[there]
  return moved


# Measurements.


def accuracy(account: Any, model: str, tests: Sequence[Question]) -> list[float]:
  """Return the mean probability of the right answer and its end, by instruction."""
  found = np.exp([scored.log_probs.sum() for scored in score_answers(account, model, tests)])
  return found.reshape(-1, HELD_OUT).mean(1).round(5).tolist()


def score_answers(account: Any, model: str, tests: Sequence[Question], prompts: Sequence[Any] | None = None) -> Any:
  """Return a version's scores of the right answers after the questions or other prompts."""
  from sdpo_jax.environments import digits

  service = account.service
  prompts = prompts or [account.service.prompt_of(messages=asked_in(question)) for question in tests]
  tokens = service.tokenizer([digits.answer(*question) for question in tests], add_special_tokens=False)['input_ids']
  rows = [(prompt, [*own, service.tokenizer.eos_token_id]) for prompt, own in zip(prompts, tokens, strict=True)]
  return account.score(account.resolve(model), rows)


def sampled(account: Any, model: str, tests: Sequence[Question]) -> list[float]:
  """Return the fraction of sampled answers that are right, by instruction."""
  graded = [outcome.score for outcome in grade(account, model, tests)]
  return np.reshape(graded, (-1, HELD_OUT)).mean(1).round(5).tolist()


def grade(account: Any, model: str, tests: Sequence[Question]) -> list[Any]:
  """Return the grades of a sampled answer to each question; these answers are not stored."""
  from sdpo_jax.environments import digits
  from sdpo_jax.types import Example

  target, worker, outcomes = account.resolve(model), account.service.worker, []
  for start in range(0, len(tests), 64):
    part = tests[start : start + 64]
    handles = [
      worker.sample(
        target.engine_name,
        account.service.prompt_of(messages=asked_in(question)),
        n=1,
        seed=start + row,
        step=0,
        max_tokens=account.service.max_completion,
      )
      for row, question in enumerate(part)
    ]
    examples = [
      Example('', asked_in(question), digits.NAME, digits.answer(*question), digits.NAME) for question in part
    ]
    done = [handle.result()[0] for handle in handles]
    outcomes += digits.grade(examples, [one.text for one in done], truncated=[not one.stopped for one in done])
  return outcomes


def teachers(service: Any) -> dict[str, Any]:
  """Return the probability of the right answer for the teacher in each context: how much there is to distil."""
  from sdpo_jax.environments import digits
  from sdpo_jax.serving.account import Account
  from sdpo_jax.teacher.context import reprompt

  account, draw = Account(service, 'observer'), np.random.default_rng(1)
  tests = [(name, digits_of(draw, 'train')) for name in MISREAD for _ in range(HELD_OUT)]
  said = [outcome.feedback or None for outcome in grade(account, 'base', tests)]
  right = [digits.answer(*question) for question in tests]
  found = {}
  for name, solutions, feedback in (
    ('nothing', [None] * len(tests), [None] * len(tests)),
    ('feedback', [None] * len(tests), said),
    ('correction', right, [None] * len(tests)),
    ('shuffled_correction', deranged(right, 0), [None] * len(tests)),
  ):
    prompts = [
      account.service.prompt_of(
        messages=reprompt(asked_in(question), solution, text, service.reprompting.config),
        limit=service.sizes.teacher_buckets[-1],
      )
      for question, solution, text in zip(tests, solutions, feedback, strict=True)
    ]
    scored = score_answers(account, 'base', tests, prompts)
    found[name] = round(float(np.mean(np.exp([one.log_probs.sum() for one in scored]))), 3)
  return found


def make_bystander(service: Any) -> tuple[Any, str]:
  """Make a user who has learned one thing and then does nothing."""
  from sdpo_jax.serving import feedback
  from sdpo_jax.serving.account import Account
  from sdpo_jax.serving.feedback_request import Item, make_request

  account = Account(service, 'bystander')
  adapter, _ = account.create('mine', {'teacher': {'kind': 'base'}}, seed=7)
  answer = ask(account, adapter.id, (MISREAD[0], [1, 2, 3, 4, 5]), seed=0)
  request = make_request([Item(sample_id=answer.id, correction='21435')], UPDATE, service.settings)
  feedback.learn(account, adapter.id, 0, request)
  return account, adapter.id


def fingerprint(account: Any, adapter: str) -> str:
  """Return a digest of an adapter's newest version: arrays, stored and in the engine, and log-probs of some tokens."""
  version, service = account.version(adapter), account.service
  digest = hashlib.sha256(version.digest.encode())
  for arrays in (service.store.arrays(version), service.worker.arrays(version.engine_name)):
    for name in sorted(arrays):
      digest.update(name.encode() + np.ascontiguousarray(arrays[name]).tobytes())
  for scored in score_answers(account, adapter, [(name, [9, 0, 2, 1, 0]) for name in instructions()]):
    digest.update(scored.log_probs.tobytes() + scored.top_log_probs.tobytes())
  return digest.hexdigest()


def plot(results: dict[str, Any], target: pathlib.Path) -> None:
  """Plot the accuracy after every correction: mean over users, and range from lowest to highest."""
  plt = extras.pyplot()

  titles = {'corrected': 'the two corrected instructions', 'post_to_replica': 'the eight others'}
  figure, axes = plt.subplots(1, 2, figsize=(9.5, 3.8), sharey=True, constrained_layout=True)
  for axis, (group, title) in zip(axes, titles.items(), strict=True):
    for arm in ARMS:
      curves = np.array([user['curves'][arm][group] for user in results['users']])
      [line] = axis.plot(curves.mean(0), label=arm, linewidth=2)
      axis.fill_between(
        range(curves.shape[1]), curves.min(0), curves.max(0), color=line.get_color(), alpha=0.18, linewidth=0
      )
    axis.set_title(title)
    axis.set_xlabel('corrections')
    axis.set_ylim(0, 1)
    axis.yaxis.set_major_formatter(lambda value, _: f'{value:.0%}')
    axis.grid(alpha=0.25)
    axis.xaxis.get_major_locator().set_params(integer=True)
  axes[0].set_ylabel('held-out accuracy')
  axes[0].legend(frameon=False, fontsize=9, loc='best')
  figure.savefig(target, dpi=140)


if __name__ == '__main__':
  main()
