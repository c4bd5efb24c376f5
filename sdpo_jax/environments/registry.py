"""Graders and question generators by name.

A grader turns completions into outcomes; `Example.environment` names the one that grades it. A generator makes
endless questions; `generator:NAME?key=value` in `data.train_files` or `data.val_files` names it. To add either, write
a function with the signature below under the decorator in a Python file, and name the file in `environments.modules`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from sdpo_jax.config import EnvironmentsConfig
from sdpo_jax.errors import UserError
from sdpo_jax.types import Example, Outcome


class Grader(Protocol):
  """Returns one outcome per completion, in order; a fault of the completion is an outcome, never an exception.

  Called with whatever has finished of a batch, while the rest is sampled: one call at a time, from a thread that is not
  the main thread nor, in the next batch, the same.
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
  UserError.
  """

  def __call__(self, settings: EnvironmentsConfig) -> Grader: ...


class QuestionGenerator(Protocol):
  """Makes the endless list of questions of one split: a pure function from index (0, 1, …) to question.

  `split` is 'train' or 'test'; no question of one split is ever in the other. Options come from the query string of
  `generator:NAME?key=value`, as strings. Raises UserError for an option or a split that it does not know.
  """

  def __call__(self, split: str, seed: int, **options: Any) -> Callable[[int], Example]: ...


Registered = TypeVar('Registered')

_FACTORIES: dict[str, GraderFactory] = {}
_GENERATORS: dict[str, QuestionGenerator] = {}


def register(name: str) -> Callable[[Grader], Grader]:
  """Return a decorator that registers a grader under `name`; raises ValueError if the name is taken."""

  def add(grader: Grader) -> Grader:
    register_factory(name)(lambda settings: grader)
    return grader

  return add


def register_factory(name: str) -> Callable[[Registered], Registered]:
  """Return a decorator that registers a factory of graders under `name`; raises ValueError if the name is taken."""
  return _adder(_FACTORIES, 'grader', name)


def get(name: str, settings: EnvironmentsConfig | None = None) -> Grader:
  """Return a new grader of that name, made with `settings` (None: defaults); raises UserError if there is none."""
  return _find(_FACTORIES, 'environment', name)(settings or EnvironmentsConfig())


def require(name: str) -> None:
  """Raise UserError listing the known graders if there is none of that name."""
  _find(_FACTORIES, 'environment', name)


def names() -> tuple[str, ...]:
  """Return the names of all graders, sorted."""
  return tuple(sorted(_FACTORIES))


def register_generator(name: str) -> Callable[[Registered], Registered]:
  """Return a decorator that registers a question generator under `name`; raises ValueError if the name is taken."""
  return _adder(_GENERATORS, 'generator', name)


def get_generator(name: str) -> QuestionGenerator:
  """Return the question generator of that name; raises UserError listing the known ones."""
  return _find(_GENERATORS, 'generator', name)


def generator_names() -> tuple[str, ...]:
  """Return the names of all question generators, sorted."""
  return tuple(sorted(_GENERATORS))


def _adder(table: dict[str, Any], kind: str, name: str) -> Callable[[Registered], Registered]:
  def add(function: Registered) -> Registered:
    if name in table:
      raise ValueError(f'The {kind} {name!r} is already registered.')
    table[name] = function
    return function

  return add


def _find(table: dict[str, Any], kind: str, name: str) -> Any:
  if name not in table:
    raise UserError(
      f'There is no {kind} {name!r}: choose from {", ".join(sorted(table)) or "none (none is registered)"}.'
    )
  return table[name]
