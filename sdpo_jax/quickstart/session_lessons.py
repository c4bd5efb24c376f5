"""Lessons of the tiny agent: proposing calls by preference, and understanding feedback on a call.

A lesson is a conversation whose assistant turns are learned. In most lessons the assistant proposes calls, its
favourites most often; some are denied, and the next call follows from the reason. In the others the user's last turn
is a re-prompt as teachers read it, in the configured templates, and the answer is the call that follows from the
correction, the right call or the output in it.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import random

from sdpo_jax.config import SelfDistillationConfig
from sdpo_jax.environments.workspace.tools import TOOLS, denied
from sdpo_jax.quickstart import tool_tasks as tasks
from sdpo_jax.quickstart.tool_tasks import KINDS, ToolTask
from sdpo_jax.teacher.context import reprompt
from sdpo_jax.types import Messages

SYSTEMS = (
  'You are a coding agent.',
  'You are a coding agent. Propose one tool call.',
  'You help with code. Use the tools.',
  'You work in a folder of files. Propose one tool call at a time.',
  'Be brief.',
)
SCHEMAS = [tool.schema() for tool in TOOLS.values()]
DENIALS = 0.25  # Fraction of calls that are denied, unless their task can be done in one way only.
DONE, FAILED = 'Done.', 'That failed.'
_OUTPUTS = (
  '(No output.)',
  '{symbol} = {number}',
  '{file}: {symbol}',
  '{number} lines',
  '{folder}/{file}',
  '{file}\n{symbol}',
)
_FAILURES = ('Exit code {number}.', 'Exit code {number}.\n{file}: {symbol}', 'The command could not be run: {symbol}.')
_MISSING = (
  'Exit code 127.\n/bin/sh: {program}: not found',
  'Exit code 127.\nbash: line 1: {program}: command not found',
  '{program}: command not found',
  'There is no {program} here.',
)


@dataclasses.dataclass(frozen=True)
class SessionLesson:
  """A conversation that ends with an assistant's turn."""

  messages: Messages
  tools: bool  # Whether the template gets the tools.
  learned: Sequence[int]  # Indices of the learned messages.
  rather: str | None = None  # The wanted last message; nothing is learned after the two diverge.


def proposals(rng: random.Random, most: int) -> SessionLesson:
  """Return a conversation of up to `most` tasks with a call for each, as the base proposes it.

  With `most` 0 there is one task and nothing else.
  """
  messages, tools = _begin(rng) if most else ([], False)
  learned: list[int] = []

  def say(text: str) -> None:
    learned.append(len(messages))
    messages.append({'role': 'assistant', 'content': text})

  for number in range(rng.randint(1, most) if most else 1):
    task = _task(rng)
    if number and rng.random() < 0.1:  # Denied calls disappear from conversations.
      messages.append({'role': 'user', 'content': _task(rng).ask})
    messages.append({'role': 'user', 'content': task.ask})
    told = _denial(rng, task) if rng.random() < DENIALS else None
    if told is None:
      say(task.text(tasks.propose(rng, task.kind)))
    else:
      wanted, tried, reason = told
      say(tried)
      messages.append({'role': 'tool', 'content': denied(reason)})
      say(wanted)
    if most and rng.random() < 0.7:
      ok = rng.random() < 0.8
      text = rng.choice(_OUTPUTS if ok else _FAILURES).format(**_task(rng).slots)
      messages.append({'role': 'tool', 'content': text})
      if rng.random() < 0.5:
        say(DONE if ok else FAILED)
  return SessionLesson(messages, tools, learned)


def reprompted(rng: random.Random, config: SelfDistillationConfig, most: int) -> SessionLesson:
  """Return a conversation that ends with a re-prompt and the answer to it.

  Args:
    rng: source of randomness.
    config: settings with the templates.
    most: maximum number of tasks before the re-prompted one; 0: none, and no system turn.
  """
  while True:
    task = _task(rng)
    told = _told(rng, task)
    if told is not None:
      break
  wanted, tried, solution, feedback = told
  before = proposals(rng, most) if most and rng.random() < 0.35 else None
  messages, tools = (list(before.messages), before.tools) if before else _begin(rng) if most else ([], False)
  messages.append({'role': 'user', 'content': task.ask})
  form = rng.random()
  if form < 0.2:  # In the same turn, as feedback outside of sessions.
    attempt = tried if rng.random() < 0.3 else None
    messages = reprompt(messages, solution, feedback, config, attempt)
  else:
    if form < 0.6:
      messages.append({'role': 'assistant', 'content': tried})
    messages = reprompt([*messages, {'role': 'user', 'content': ''}], solution, feedback, config)
    if rng.random() < 0.5:
      messages[-1]['content'] = messages[-1]['content'].strip()
  stumbles = tried != wanted and rng.random() < 0.35
  messages.append({'role': 'assistant', 'content': tried if stumbles else wanted})
  return SessionLesson(messages, tools, [len(messages) - 1], wanted if stumbles else None)


def _denial(rng: random.Random, task: ToolTask) -> tuple[str, str, str | None] | None:
  """Return (wanted call, denied call, reason), or None if the drawn kind of reason is not possible for the task."""
  if rng.random() < 0.1:
    tried = tasks.propose(rng, task.kind)
    return task.text(tasks.propose(rng, task.kind, avoid=tried)), task.text(tried), None
  told = _told(rng, task)
  return None if told is None or told[3] is None else (told[0], told[1], told[3])


def _told(rng: random.Random, task: ToolTask) -> tuple[str, str, str | None, str | None] | None:
  """Return (wanted call, tried call, demonstration, feedback), with a demonstration or feedback as the correction.

  Returns None if the drawn kind of correction is not possible for the task.
  """
  labels = [way.label for way in KINDS[task.kind].ways]
  tried = tasks.propose(rng, task.kind)
  kind = rng.choices(('wanted', 'demonstration', 'avoid', 'missing', 'slot', 'other'), (50, 18, 5, 5, 6, 16))[0]
  if kind in ('wanted', 'demonstration'):
    wanted = rng.choice([label for label in labels if label != tried] or labels)
    if kind == 'demonstration':
      return task.text(wanted), task.text(tried), task.text(wanted), None
    return task.text(wanted), task.text(tried), None, tasks.correction(rng, wanted, tried)
  if kind == 'other':  # Unrelated feedback, which changes nothing.
    elsewhere = rng.choice([name for name in KINDS if not {w.label for w in KINDS[name].ways} & set(labels)])
    theirs = [way.label for way in KINDS[elsewhere].ways]
    said = tasks.correction(rng, rng.choice(theirs), rng.choice(theirs))
    wanted = tasks.propose(rng, task.kind)
    return task.text(wanted), task.text(tried), None, said
  if kind == 'slot':
    slots = [name for name in ('file', 'folder', 'symbol') if f'{{{name}}}' in str(KINDS[task.kind].ways[0].arguments)]
    if not slots:
      return None
    slot = rng.choice(slots)
    meant = dataclasses.replace(task, slots={**task.slots, slot: tasks.draw(rng, task.kind).slots[slot]})
    said = rng.choice(('I meant {}', 'with {} please', 'it is {}')).format(meant.slots[slot])
    return meant.text(tried), task.text(tried), None, said
  if len(labels) < 2:
    return None
  program = KINDS[task.kind].way(tried).program
  if kind == 'missing' and (program is None or sum(way.program == program for way in KINDS[task.kind].ways) > 1):
    return None
  wanted = tasks.propose(rng, task.kind, avoid=tried)
  said = (
    rng.choice(_MISSING).format(program=program) if kind == 'missing' else rng.choice(tasks.AVOID).format(tried=tried)
  )
  return task.text(wanted), task.text(tried), None, said


def _task(rng: random.Random) -> ToolTask:
  return tasks.draw(rng, rng.choice(list(KINDS)))


def _begin(rng: random.Random) -> tuple[Messages, bool]:
  """Return the start of a conversation and whether there are tools; mostly a system turn, with varying words."""
  draw = rng.random()
  if draw < 0.55:
    return [{'role': 'system', 'content': rng.choice(SYSTEMS)}], True
  if draw < 0.65:
    words = ' '.join(rng.choice(_task(rng).ask.split()) for _ in range(rng.randint(1, 12)))
    return [{'role': 'system', 'content': words}], True
  return [], draw < 0.85
