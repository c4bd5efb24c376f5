"""Registries of graders and question generators, by name.

A grader turns completions into outcomes; `Example.environment` names the one to use. A generator makes endless
questions; `generator:NAME?key=value` in `data.train_files` or `data.val_files` names it. To add either, write a
function with the signature below in a Python file, decorate it, and name the file in `environments.modules`. Reward
functions in TRL's form (reward_functions.py) can be used as graders unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import contextlib
import importlib
import inspect
import sys
from typing import Any, Protocol, TypeVar

from sdpo_jax.config import EnvironmentsConfig, rewards
from sdpo_jax.config.fields import did_you_mean
from sdpo_jax.environments.reward_functions import RewardGrader, is_reward_function
from sdpo_jax.errors import UserError
from sdpo_jax.types import Example, Outcome


class Grader(Protocol):
  """Returns one outcome per completion, in order; a fault of the completion is an outcome, never an exception.

  A grader is called with the completions of a batch that have finished, while the rest is sampled: one call at a time,
  in a process of its own if it can be pickled (grader_process.py), otherwise each in a thread of its own. A call that
  takes longer than `environments.grader_timeout_s` is abandoned: the process is ended; a thread may keep running, even
  during the next call, and its result is dropped. A grader with a true attribute `limits_itself` has time limits of its
  own and is waited for; it and one with a method `close` are never sent to a process.

  The outcome of a completion that cannot be graded is `Outcome.ungraded(why)`; raising an exception has the same
  effect. For a question that is not meant for the grader it is `Outcome.not_applicable(why)`: the row's other graders
  count without it.
  """

  def __call__(
    self,
    examples: list[Example],  # The question of each completion.
    completions: list[str],  # Decoded, without special tokens.
    *,
    truncated: list[bool],  # Whether the completion ended at its token limit instead of at a stop token.
  ) -> list[Outcome]: ...


class GraderFactory(Protocol):
  """Makes a grader from settings, once per run; raises UserError for settings that it cannot use.

  Called in the main thread. Graders may have three more methods. `close()` is called when the run ends, for a grader
  that holds processes or connections. `end_batch()` is called when a whole batch is graded, for one that judges whole
  batches; it may raise UserError. `check_questions(examples)` is called before the run with all of its questions (for
  generators, the first ones), for a grader with requirements on them; it may raise UserError.
  """

  def __call__(self, settings: EnvironmentsConfig) -> Grader: ...


class QuestionGenerator(Protocol):
  """Makes the endless sequence of questions of one split: a pure function from index (0, 1, …) to question.

  `split` is 'train' or 'test'; the splits share no question. Options come from the query string of
  `generator:NAME?key=value`, as strings. Raises UserError for an unknown option or split.
  """

  def __call__(self, split: str, seed: int, **options: Any) -> Callable[[int], Example]: ...


Registered = TypeVar('Registered')

# Name → the module in this folder that registers it. It is imported on first use, so a run loads only the graders that
# it uses, and neither the sandbox nor computer algebra for others.
_BUILT_IN = {
  'environment': {
    'chrf': 'chrf',
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
names_in_run: Sequence[str] = ()  # In a grader's process: of all graders that the run has registered.


class NotImportedError(BaseException):
  """A grader needs one that its process has not imported; not for it to catch. The message goes on after its name."""


def register(name: str) -> Callable[[Grader], Grader]:
  """Return a decorator that registers a grader under `name`; raises ValueError if the name is taken."""

  def add(grader: Grader) -> Grader:
    def factory(settings: EnvironmentsConfig) -> Grader:
      return grader

    factory.made_by = grader
    register_factory(name)(factory)
    return grader

  return add


def register_reward_function(name: str) -> Callable[[Registered], Registered]:
  """Return a decorator that registers a reward function in TRL's form under `name`; raises ValueError if it is taken.

  Files in `environments.modules` need no decorator: their reward functions are registered under their own names.
  """

  def add(function: Registered) -> Registered:
    register(name)(RewardGrader(function, name))
    _REWARD_FUNCTIONS.append(function)
    return function

  return add


@contextlib.contextmanager
def registered(name: str, function: Any) -> Iterator[None]:
  """Register a grader, or a reward function in TRL's form, for the duration of a block; raises as `register`."""
  before = _FACTORIES.get(name)
  register(name)(RewardGrader(function, name) if is_reward_function(function) else function)
  try:
    yield
  finally:
    _FACTORIES.pop(name, None)  # Another run with this grader may have ended before.
    if before is not None:
      _FACTORIES[name] = before


def is_registered_reward_function(function: Any) -> bool:
  """Return whether this object itself was passed to `register_reward_function`."""
  return any(function is known for known in _REWARD_FUNCTIONS)


def register_factory(name: str) -> Callable[[Registered], Registered]:
  """Return a decorator that registers a factory of graders under `name`; raises ValueError if the name is taken."""
  return _adder(_FACTORIES, 'environment', name)


def get(name: str, settings: EnvironmentsConfig | None = None) -> Grader:
  """Make the grader of that name with `settings` (None: defaults); raises UserError if there is none to be called."""
  grader = _find(_FACTORIES, 'environment', name)(settings or EnvironmentsConfig())
  try:
    inspect.signature(grader).bind([], [], truncated=[])
  except (TypeError, ValueError) as error:  # ValueError: a callable without a signature, such as `int`.
    way = f'{name}(completions, **_) or {name}(examples, completions, *, truncated)'
    raise UserError(f'The grader {name!r} cannot be called as graders are: define it as {way}.') from error
  return grader


def require(name: str) -> None:
  """Raise a UserError listing the known graders if there is none of that name."""
  _find(_FACTORIES, 'environment', name)


def names() -> tuple[str, ...]:
  """Return the names of all graders, sorted."""
  return _names(_FACTORIES, 'environment')


def is_built_in(name: str) -> bool:
  """Return whether a grader of this name is one of this project's."""
  return name in _BUILT_IN['environment']


def register_generator(name: str) -> Callable[[Registered], Registered]:
  """Return a decorator that registers a question generator under `name`; raises ValueError if the name is taken."""
  return _adder(_GENERATORS, 'generator', name)


def get_generator(name: str) -> QuestionGenerator:
  """Return the question generator of that name; raises UserError listing the known ones."""
  return _find(_GENERATORS, 'generator', name)


def _names(table: dict[str, Any], kind: str) -> tuple[str, ...]:
  return tuple(sorted(table.keys() | _BUILT_IN[kind].keys()))


def _module(kind: str, name: str) -> str:
  return f'{__package__}.{_BUILT_IN[kind][name]}'


def _adder(table: dict[str, Any], kind: str, name: str) -> Callable[[Registered], Registered]:
  if kind == 'environment' and not rewards.is_name(name):
    marks = ' and '.join(map(repr, rewards.RESERVED))
    raise ValueError(f'A grader cannot be called {name!r}: {marks} separate graders and weights in rows.')

  def add(function: Registered) -> Registered:
    # A built-in name is reserved before its module is imported, except for that module.
    reserved = name in _BUILT_IN[kind] and _module(kind, name) not in sys.modules
    if reserved or (name in table and _origin(table[name]) != _origin(function)):
      noun = 'grader' if kind == 'environment' else kind
      raise ValueError(f'The {noun} {name!r} is already registered.')
    table[name] = function
    return function

  return add


def _origin(function: Any) -> Any:
  """Return where something was defined: equal for a config file or a notebook cell that is run again."""
  function = getattr(function, 'made_by', function)  # A grader, behind the factory that `register` makes.
  function = getattr(function, 'function', function)  # A reward function, behind its grader.
  defined = function if hasattr(function, '__qualname__') else type(function)
  return function if '<lambda>' in defined.__qualname__ else (defined.__module__, defined.__qualname__)


def _find(table: dict[str, Any], kind: str, name: str) -> Any:
  if name not in table and name in _BUILT_IN[kind]:
    known = set(table)
    try:
      importlib.import_module(_module(kind, name))
    except BaseException:
      for added in table.keys() - known:  # Otherwise the next attempt would find the names taken.
        del table[added]
      raise
  if name not in table and name in names_in_run:
    raise NotImportedError(f'it uses the grader {name!r}, of another module')
  if name not in table:
    known = _names(table, kind)
    raise UserError(f'There is no {kind} {name!r}: choose from {", ".join(known)}{did_you_mean(name, known)}')
  return table[name]
