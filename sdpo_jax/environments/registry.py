"""Graders and question generators by name.

A grader turns completions into outcomes; `Example.environment` names the one that grades it. A generator makes
endless questions; `generator:NAME?key=value` in `data.train_files` or `data.val_files` names it. To add either, write
a function with the signature below under the decorator in a Python file, and name the file in `environments.modules`.
Reward functions in TRL's form (reward_functions.py) are graders as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import importlib
import sys
from typing import Any, Protocol, TypeVar

from sdpo_jax.config import EnvironmentsConfig, rewards
from sdpo_jax.environments.reward_functions import RewardGrader, is_reward_function
from sdpo_jax.errors import UserError
from sdpo_jax.types import Example, Outcome


class Grader(Protocol):
  """Returns one outcome per completion, in order; a fault of the completion is an outcome, never an exception.

  Called with whatever has finished of a batch, while the rest is sampled: one call at a time, each from a thread of its
  own. A call that takes longer than `environments.grader_timeout_s` is abandoned: its thread goes on as long as it
  likes, also during the next call, and what it returns is dropped. A grader with an attribute `limits_itself` that is
  true has time limits of its own and is waited for.

  What cannot be graded is `Outcome.ungraded(why)`; raising for it does the same. A question for which the grader is not
  meant is `Outcome.not_applicable(why)`: the other graders of its row count without it.
  """

  def __call__(
    self,
    examples: list[Example],  # The question of each completion.
    completions: list[str],  # Decoded, without special tokens.
    *,
    truncated: list[bool],  # The completion ended at its token limit instead of at a stop.
  ) -> list[Outcome]: ...


class GraderFactory(Protocol):
  """Makes a grader from settings, once per run; raises UserError for settings with which it cannot work.

  Called in the main thread. A grader that holds processes or connections has a method `close()`, called when the run
  ends; one that judges whole batches has a method `end_batch()`, called when all of a batch is graded, which may raise
  UserError; one that wants more of questions than they may have has a method `check_questions(examples)`, called before
  the run with all of its questions (of generators with the first ones), which may raise UserError.
  """

  def __call__(self, settings: EnvironmentsConfig) -> Grader: ...


class QuestionGenerator(Protocol):
  """Makes the endless list of questions of one split: a pure function from index (0, 1, …) to question.

  `split` is 'train' or 'test'; no question of one split is ever in the other. Options come from the query string of
  `generator:NAME?key=value`, as strings. Raises UserError for an option or a split that it does not know.
  """

  def __call__(self, split: str, seed: int, **options: Any) -> Callable[[int], Example]: ...


Registered = TypeVar('Registered')

# Name → the module beside this one that registers it. It is imported when the name is first asked for: a run loads the
# graders that it uses, and no sandbox or computer algebra for the others.
_BUILT_IN = {
  'environment': {
    'code': 'code',
    'digits': 'digits',
    'facts': 'facts',
    'gpqa': 'multiple_choice',
    'http': 'http_grader',
    'judge': 'judge',
    'longhealth': 'longhealth',
    'math': 'mathematics',
    'mcq': 'multiple_choice',
    'mmlu_pro': 'multiple_choice',
    'none': 'no_grader',
    'tooluse': 'tool_use',
  },
  'generator': {'digits': 'digits', 'facts': 'facts'},
}
_FACTORIES: dict[str, GraderFactory] = {}
_GENERATORS: dict[str, QuestionGenerator] = {}
_REWARD_FUNCTIONS: list[Any] = []


def register(name: str) -> Callable[[Grader], Grader]:
  """Return a decorator that registers a grader under `name`; raises ValueError if the name is taken."""

  def add(grader: Grader) -> Grader:
    register_factory(name)(lambda settings: grader)
    return grader

  return add


def register_reward_function(name: str) -> Callable[[Registered], Registered]:
  """Return a decorator that registers a reward function in TRL's form under `name`; raises ValueError if it is taken.

  Reward functions of a file of `environments.modules` need none: they are registered under their own names.
  """

  def add(function: Registered) -> Registered:
    register(name)(RewardGrader(function, name))
    _REWARD_FUNCTIONS.append(function)
    return function

  return add


@contextlib.contextmanager
def registered(name: str, function: Any) -> Iterator[None]:
  """Register a grader, or a reward function in TRL's form, for as long as the block lasts; errors as `register`."""
  register(name)(RewardGrader(function, name) if is_reward_function(function) else function)
  try:
    yield
  finally:
    del _FACTORIES[name]


def is_registered_reward_function(function: Any) -> bool:
  """Return whether `register_reward_function` has been handed this very object."""
  return any(function is known for known in _REWARD_FUNCTIONS)


def register_factory(name: str) -> Callable[[Registered], Registered]:
  """Return a decorator that registers a factory of graders under `name`; raises ValueError if the name is taken."""
  return _adder(_FACTORIES, 'environment', name)


def get(name: str, settings: EnvironmentsConfig | None = None) -> Grader:
  """Return a new grader of that name, made with `settings` (None: defaults); raises UserError if there is none."""
  return _find(_FACTORIES, 'environment', name)(settings or EnvironmentsConfig())


def require(name: str) -> None:
  """Raise UserError listing the known graders if there is none of that name."""
  _find(_FACTORIES, 'environment', name)


def names() -> tuple[str, ...]:
  """Return the names of all graders, sorted."""
  return _names(_FACTORIES, 'environment')


def register_generator(name: str) -> Callable[[Registered], Registered]:
  """Return a decorator that registers a question generator under `name`; raises ValueError if the name is taken."""
  return _adder(_GENERATORS, 'generator', name)


def get_generator(name: str) -> QuestionGenerator:
  """Return the question generator of that name; raises UserError listing the known ones."""
  return _find(_GENERATORS, 'generator', name)


def generator_names() -> tuple[str, ...]:
  """Return the names of all question generators, sorted."""
  return _names(_GENERATORS, 'generator')


def _names(table: dict[str, Any], kind: str) -> tuple[str, ...]:
  return tuple(sorted(table.keys() | _BUILT_IN[kind].keys()))


def _module(kind: str, name: str) -> str:
  return f'{__package__}.{_BUILT_IN[kind][name]}'


def _adder(table: dict[str, Any], kind: str, name: str) -> Callable[[Registered], Registered]:
  if kind == 'environment' and not rewards.is_name(name):
    marks = ' and '.join(map(repr, rewards.RESERVED))
    raise ValueError(f'A grader cannot be called {name!r}: {marks} separate graders and weights in rows.')

  def add(function: Registered) -> Registered:
    # A built-in name is taken before its module is imported, but not for that module.
    reserved = name in _BUILT_IN[kind] and _module(kind, name) not in sys.modules
    if name in table or reserved:
      noun = 'grader' if kind == 'environment' else kind
      raise ValueError(f'The {noun} {name!r} is already registered.')
    table[name] = function
    return function

  return add


def _find(table: dict[str, Any], kind: str, name: str) -> Any:
  if name not in table and name in _BUILT_IN[kind]:
    known = set(table)
    try:
      importlib.import_module(_module(kind, name))
    except BaseException:
      for added in table.keys() - known:  # Or the next attempt would find them taken.
        del table[added]
      raise
  if name not in table:
    raise UserError(f'There is no {kind} {name!r}: choose from {", ".join(_names(table, kind))}.')
  return table[name]
