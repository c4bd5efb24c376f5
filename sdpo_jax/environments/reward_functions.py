"""Graders from reward functions in the form of TRL's GRPOTrainer.

Such a function takes lists as keyword arguments, `prompts`, `completions` and the columns of the data set, and returns
a reward for each completion: a number, None where it does not apply, or (only here) a dict with `score` and `feedback`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import copy
import dataclasses
import inspect
import logging
import threading
from typing import Any

from sdpo_jax.errors import UserError, short_repr
from sdpo_jax.types import Example, Outcome

NOT_APPLICABLE = 'the reward function returned None'
# Arguments that TRL's trainer passes and a grader does not have.
UNAVAILABLE = ('completion_ids', 'completions_ids')


def is_reward_function(value: Any) -> bool:
  """Return whether a value can be called as a reward function: it takes `completions` and is not a grader."""
  if not callable(value) or isinstance(value, type):
    return False
  try:
    parameters = inspect.signature(value).parameters
  except (TypeError, ValueError):  # Some built-in callables have no signature.
    return False
  return 'completions' in parameters and 'examples' not in parameters


class RewardGrader:
  """Grades with a reward function, which may be a coroutine function.

  The function gets the arguments that its signature names: `prompts`, in the form of the row; `completions`, texts if
  the prompt is a text, otherwise lists with one assistant message; `trainer_state`, None; and all other fields of the
  rows, including `ground_truth`, None in rows that lack them. Feedback comes from its dicts, or from its attribute
  `last_feedback`, a text or None for each completion of the last call.

  A call that was abandoned because it hung may still finish later and set `last_feedback` then. Later calls therefore
  use a shallow copy of the object. A plain function cannot be copied: as long as the abandoned call runs,
  `last_feedback` is not read.
  """

  def __init__(self, function: Callable[..., Any], name: str):
    self.function, self._name = function, name
    self._called = _Called(function)
    self._lock = threading.Lock()
    self._warned = False
    self._known: dict[str, None] = {}  # Fields of all rows of the run, since a batch may lack some.

  def __reduce__(self) -> tuple[Any, ...]:  # Locks cannot be sent to another process.
    return RewardGrader, (self.function, self._name), {'_known': self._known}

  def check_questions(self, examples: Sequence[Example]) -> None:
    """Check that the rows have the function's arguments.

    Raises:
      UserError: the function needs an argument that no row has.
    """
    self._known = _fields(_rows(examples))
    self._arguments(examples, [''] * len(examples))

  def __call__(self, examples: list[Example], completions: list[str], *, truncated: list[bool]) -> list[Outcome]:
    """Grade completions as `registry.Grader` says.

    Raises:
      UserError: the function needs an argument that does not exist, or does not return a reward for each completion.
    """
    with self._calling() as (function, alone):
      rewards = function(**self._arguments(examples, completions))
      if inspect.isawaitable(rewards):
        rewards = asyncio.run(_awaited(rewards))
      feedback = getattr(function, 'last_feedback', None)
    rewards = self._listed(rewards, len(completions), 'return a list with a reward for each completion')
    if feedback is not None and not alone:
      self._warn()
    if feedback is None or not alone:
      feedback = [None] * len(completions)
    feedback = self._listed(feedback, len(completions), 'have in `last_feedback` a text or None for each completion')
    return [self._outcome(*parts) for parts in zip(rewards, feedback, strict=True)]

  @contextlib.contextmanager
  def _calling(self) -> Iterator[tuple[Callable[..., Any], bool]]:
    """Provide the function to call and whether no other call can change its attributes."""
    with self._lock:
      if self._called.running:  # The running call has been abandoned; otherwise there would be no second one.
        with contextlib.suppress(Exception):  # User-defined classes may raise anything.
          fresh = copy.copy(self._called.function)
          if fresh is not self._called.function:  # A plain function is its own copy.
            self._called = _Called(fresh)
      called = self._called
      called.running += 1
      alone = called.running == 1
    try:
      yield called.function, alone
    finally:
      with self._lock:
        called.running -= 1

  def _warn(self) -> None:
    if not self._warned:
      logging.warning(
        'An abandoned call of the reward function %r is still running: its last_feedback is not read until it ends.',
        self._name,
      )
    self._warned = True

  def _arguments(self, examples: Sequence[Example], completions: Sequence[str]) -> dict[str, list[Any] | None]:
    prompts = [example.columns.get('prompt', example.messages) for example in examples]
    said = [
      text if isinstance(prompt, str) else [{'role': 'assistant', 'content': text}]
      for prompt, text in zip(prompts, completions, strict=True)
    ]
    rows = _rows(examples)
    names = _fields(rows) | self._known
    columns = {name: [row.get(name) for row in rows] for name in names}
    there = {'trainer_state': None, **columns, 'prompts': prompts, 'completions': said}
    parameters = inspect.signature(self.function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
      taken = there
    else:
      taken = {parameter.name: there[parameter.name] for parameter in parameters if parameter.name in there}
    for parameter in parameters:
      variable = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
      if not variable and parameter.default is parameter.empty and parameter.name not in taken:
        why = 'graders get no token ids' if parameter.name in UNAVAILABLE else f'the rows have {", ".join(columns)}'
        raise UserError(f'The reward function {self._name!r} needs {parameter.name!r}, but {why}: give it a default.')
    return taken

  def _listed(self, values: Any, count: int, duty: str) -> list[Any]:
    """Convert a sequence or an array to a list; raises UserError unless it has `count` values."""
    values = values.tolist() if hasattr(values, 'tolist') else values
    if not isinstance(values, list | tuple) or len(values) != count:
      raise UserError(f'The reward function {self._name!r} must {duty}, {count} here, not {short_repr(values)}.')
    return list(values)

  def _outcome(self, reward: Any, feedback: Any) -> Outcome:
    rest: dict[str, Any] = {}
    if isinstance(reward, Mapping):
      rest = dict(reward)
      if 'score' not in rest:
        raise UserError(f"The reward function {self._name!r} must give its dicts a 'score', not {short_repr(reward)}.")
      reward, feedback = rest.pop('score'), rest.pop('feedback', feedback)
    return Outcome(reward, feedback, rest) if reward is not None else Outcome.not_applicable(NOT_APPLICABLE)


@dataclasses.dataclass
class _Called:
  """A reward function and the number of its calls that are running."""

  function: Callable[..., Any]
  running: int = 0


def _rows(examples: Sequence[Example]) -> list[dict[str, Any]]:
  return [{'ground_truth': example.ground_truth, **example.columns} for example in examples]


def _fields(rows: Sequence[Mapping[str, Any]]) -> dict[str, None]:
  return dict.fromkeys(name for row in rows for name in row if isinstance(name, str) and name != 'prompt')


async def _awaited(value: Any) -> Any:
  return await value
