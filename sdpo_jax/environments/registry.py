"""Graders and question generators by name.

A grader turns completions into outcomes; `Example.environment` names the one that grades it. A generator makes
endless questions; `generator:NAME?key=value` in `data.train_files` or `data.val_files` names it. To add either, write
a function with the signature below under the decorator, and import its module from `sdpo_jax.environments`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from sdpo_jax.errors import UserError
from sdpo_jax.types import Example, Outcome


class Grader(Protocol):
  """One outcome a completion, in order; a fault of the completion is an outcome, never an exception."""

  def __call__(
    self,
    examples: list[Example],  # The question of each completion.
    completions: list[str],  # Decoded, without special tokens.
    *,
    truncated: list[bool],  # The completion ended at its token limit instead of at a stop.
  ) -> list[Outcome]: ...


class Generator(Protocol):
  """Makes the endless list of questions of one split: a pure function from index (0, 1, …) to question.

  `split` is 'train' or 'test'; no question of one split is ever in the other. Options come from the query string of
  `generator:NAME?key=value`, as strings. Raises UserError for an option or a split that it does not know.
  """

  def __call__(self, split: str, seed: int, **options: Any) -> Callable[[int], Example]: ...


Registered = TypeVar('Registered')

_GRADERS: dict[str, Grader] = {}
_GENERATORS: dict[str, Generator] = {}


def register(name: str) -> Callable[[Registered], Registered]:
  """Decorator that makes a grader known by `name`; raises ValueError if the name is taken."""
  return _adder(_GRADERS, 'grader', name)


def get(name: str) -> Grader:
  """The grader of that name; raises UserError listing the known ones."""
  return _find(_GRADERS, 'environment', name)


def names() -> tuple[str, ...]:
  """Names of all graders, sorted."""
  return tuple(sorted(_GRADERS))


def register_generator(name: str) -> Callable[[Registered], Registered]:
  """Decorator that makes a generator known by `name`; raises ValueError if the name is taken."""
  return _adder(_GENERATORS, 'generator', name)


def get_generator(name: str) -> Generator:
  """The generator of that name; raises UserError listing the known ones."""
  return _find(_GENERATORS, 'generator', name)


def generator_names() -> tuple[str, ...]:
  """Names of all generators, sorted."""
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
