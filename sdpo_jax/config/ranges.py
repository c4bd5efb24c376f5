"""Ranges of numeric settings with their units, for checks and descriptions."""

from __future__ import annotations

import dataclasses
from typing import Any

from sdpo_jax.config.fields import settings, takes_none
from sdpo_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Range:
  """A range of numbers; for a list, of each entry. None is always allowed if the type allows it."""

  at_least: float | None = None
  above: float | None = None
  at_most: float | None = None
  below: float | None = None
  also: tuple[float, ...] = ()  # Further values with a special meaning.
  unit: str = ''
  why: str = ''  # Reason or remedy for the error message.

  def holds(self, value: float) -> bool:
    """Return whether a number is within the range."""
    return value in self.also or (
      (self.at_least is None or value >= self.at_least)
      and (self.above is None or value > self.above)
      and (self.at_most is None or value <= self.at_most)
      and (self.below is None or value < self.below)
    )

  def __str__(self) -> str:
    low, high = (self.at_least, self.above), (self.at_most, self.below)
    if low != (None, None) and high != (None, None):
      opening, closing = '(['[self.above is None], ')]'[self.below is None]
      bounds = f'in {opening}{_written(_one(low))}, {_written(_one(high))}{closing}'
    elif self.above is not None:
      bounds = 'positive' if self.above == 0 else f'above {self.above:g}'
    else:
      bounds = f'at least {self.at_least:g}' if self.at_least is not None else ''
    return ' or '.join(part for part in (bounds, *map(str, self.also)) if part)


def _written(bound: float) -> str:
  return '2^63' if bound == 2**63 else f'{bound:g}'


def _one(pair: tuple[float | None, float | None]) -> float:
  return next(value for value in pair if value is not None)


# Whole numbers and seconds without another upper bound are below this: arrays index with int32, and clocks overflow.
MOST = 2**31
POSITIVE, NOT_NEGATIVE = Range(above=0), Range(at_least=0)
TOKENS, BATCHES, SECONDS, MIB, BYTES, VERSIONS, REQUESTS = (
  Range(above=0, unit=unit)
  for unit in ('tokens', 'generation batches', 'seconds', 'MiB', 'bytes', 'versions', 'requests')
)
EVERY = Range(at_least=0, unit='generation batches')  # 0 stands for never or none.


def check_ranges(config: Any) -> None:
  """Raise UserError for the first setting with a number outside its range; types must have been checked.

  Conditions that depend on another setting are in `checks`.
  """
  for name, value, hint, field in settings(config):
    allowed = field.metadata['range']
    for number in value if isinstance(value, list | tuple) else [value]:
      if allowed is None or number is None:
        continue
      if not allowed.holds(number):
        lie = 'lie' if str(allowed).startswith('in ') else 'be'
        none = ' or None' if takes_none(hint) else ''
        why = f': {allowed.why}' if allowed.why else ''
        raise UserError(f'{name} must {lie} {allowed}{none}, not {number}{why}.')
      bounded = allowed.at_most is not None or allowed.below is not None or allowed.unit == 'bytes'
      if not bounded and (isinstance(number, int) or allowed.unit == 'seconds') and number >= MOST:
        raise UserError(f'{name} must be below 2^31, not {number}.')
