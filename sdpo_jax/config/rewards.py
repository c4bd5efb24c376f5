"""Parsing of the graders of a question and their weights, such as 'exact, 0.2*format'.

Rows and `data.environment` name graders in a string, which becomes `Example.environment`; rows may also use a list of
such strings, or an object of weights by name. The default of a weight is that of `environments.reward_weights`, or 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
import dataclasses
import functools
from typing import Any

from sdpo_jax.config.fields import is_number
from sdpo_jax.errors import short_repr

RESERVED = ',*'  # Characters that separate graders and weights, and so cannot be part of names.


class UnreadableRewards(ValueError):
  """A value does not name graders; the message says why and follows the name of a field or setting."""


@dataclasses.dataclass(frozen=True)
class Reward:
  """A grader of a question and its weight."""

  name: str
  weight: float | None = None  # None: that of `environments.reward_weights`, or 1.

  def __str__(self) -> str:
    return self.name if self.weight is None else f'{self.weight!r}*{self.name}'


@functools.lru_cache(maxsize=4096)
def parse(text: str) -> tuple[Reward, ...]:
  """Return the graders that a text names, in its order: names separated by commas, each with an optional 'WEIGHT*'.

  Raises:
    UnreadableRewards: a name is missing or repeated, or a weight is not a finite number.
  """
  return _distinct([_reward(part) for part in text.split(',')])


def written(value: Any) -> str | None:
  """Return the canonical spelling of a row's field `environment`; None if it names no grader.

  Args:
    value: a string, a list of strings, or an object of weights by name. In an object, null means that the row does not
      name the grader, because tables have the same columns in all rows.

  Raises:
    UnreadableRewards: as in `parse`, or the value has another type.
  """
  if isinstance(value, Mapping):
    if wrong := [name for name in value if not is_name(name)]:
      raise UnreadableRewards(f'must hold names of graders, and not {short_repr(wrong[0])} for one')
    rewards = [Reward(name, weight_of(name, weight)) for name, weight in value.items() if weight is not None]
  elif isinstance(value, list | tuple) and all(isinstance(entry, str) for entry in value):
    rewards = [_reward(entry) for entry in value]
  elif isinstance(value, str):
    rewards = parse(value) if value.strip() else []
  elif value is None:
    rewards = []
  else:
    raise UnreadableRewards(
      f'must be the name of a grader, a list of names, or an object of weights by name, not {short_repr(value)}'
    )
  return ','.join(map(str, _distinct(rewards))) or None


def names(environments: Iterable[str]) -> set[str]:
  """Return the names of all graders in strings as `parse` takes them."""
  return {reward.name for environment in environments for reward in parse(environment)}


def is_name(text: Any) -> bool:
  """Return whether a value can be the name of a grader: a stripped string without reserved characters."""
  return isinstance(text, str) and text == text.strip() != '' and not any(mark in text for mark in RESERVED)


def weight_of(name: str, value: Any) -> float:
  """Return a weight as a float; raise UnreadableRewards if it is not a finite number."""
  if not is_number(value):
    raise UnreadableRewards(f'must give {name!r} a finite number as its weight, not {short_repr(value)}')
  return float(value)


def _reward(text: str) -> Reward:
  weight, mark, name = text.rpartition('*')
  name = name.strip()
  if not is_name(name):
    raise UnreadableRewards(
      f'must hold names of graders, separated by commas, and not {short_repr(text.strip())} for one'
    )
  if not mark:
    return Reward(name)
  try:
    return Reward(name, weight_of(name, float(weight)))
  except ValueError as error:
    raise UnreadableRewards(
      f"must give weights as finite numbers before a '*', such as 0.2*{name}, not {short_repr(text.strip())}"
    ) from error


def _distinct(rewards: Iterable[Reward]) -> tuple[Reward, ...]:
  rewards = tuple(rewards)
  seen: set[str] = set()
  for reward in rewards:
    if reward.name in seen:
      raise UnreadableRewards(f'must name the grader {reward.name!r} once, not twice')
    seen.add(reward.name)
  return rewards
