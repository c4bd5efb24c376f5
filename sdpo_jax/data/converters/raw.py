"""Shared code of the converters: reading fields of a source's rows, and making rows of the raw schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import datetime
from typing import Any

from sdpo_jax.data.rows import RawRow
from sdpo_jax.errors import UserError, short_repr

NONE = '-'  # The reference's value for fields that a data set does not have.


@dataclasses.dataclass(frozen=True)
class ConversionOptions:
  """Options of the conversions; each converter reads its own."""

  domain: str = ''  # SciKnowEval.
  seed: int = 0  # GPQA: seed of the order of choices.
  since: datetime.date = datetime.date(2025, 2, 1)  # LiveCodeBench: contests from this day on …
  until: datetime.date = datetime.date(2025, 5, 1)  # … and before this one.
  patients: tuple[str, ...] = tuple(f'patient_{number:02d}' for number in range(1, 11))  # LongHealth.


Parts = Mapping[str, Sequence[RawRow]]  # Rows of each part that a source consists of.
Splits = dict[str, list[RawRow]]  # Raw rows of 'train' and 'test', or of one of them; origins are the source's.


def make_row(
  origin: RawRow,
  idx: int | str,
  *,
  kind: str,
  dataset: str,
  prompt: str,
  description: str,
  answer: str = NONE,
  tests: str | None = NONE,
  elo: int | str = NONE,
  system: str | None = None,
  environment: str | None = None,
  choices: list[str] | None = None,
) -> RawRow:
  """Return a row in the schema of the reference's data/load_dataset.py, made from the source's row `origin`.

  `environment` names the grader if the reference has none for the data set; `choices` are the choices it grades.
  """
  value: dict[str, Any] = {
    'idx': idx,
    'kind': kind,
    'dataset': dataset,
    'answer': answer,
    'elo': elo,
    'prompt': prompt,
    'description': description,
    'tests': tests,
    'embedding': [],
    'system': system,
  }
  more = {'environment': environment, 'choices': choices}
  value |= {name: given for name, given in more.items() if given is not None}
  return RawRow(origin.origin, origin.number, value)


def described(text: str, kind: str) -> str:
  """Return the description of a question, which the model never sees, in the reference's wording."""
  return f'{text} The solution will be evaluated in a {kind} environment.'


def field(row: RawRow, *path: str, kind: type | tuple[type, ...] = str) -> Any:
  """Return the value at `path` in a source's row.

  Raises:
    UserError: it is missing or not of that kind, so the row is not in the source's schema.
  """
  value = row.value
  for at, name in enumerate(path):
    if not isinstance(value, Mapping) or name not in value:
      raise UserError(f'{row.origin}: field {".".join(path[: at + 1])!r} is missing: is this the right source?')
    value = value[name]
  if not isinstance(value, kind) or isinstance(value, bool):
    kinds = kind if isinstance(kind, tuple) else (kind,)
    wanted = ' or '.join(k.__name__ for k in kinds)
    raise UserError(f'{row.origin}: field {".".join(path)!r} must be of type {wanted}, not {short_repr(value)}.')
  return value
