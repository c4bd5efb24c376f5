"""Shared code of the converters: reading fields of a source's rows, and making rows of the raw schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import datetime
import textwrap
from typing import Any

from sdpo_jax.data.rows import RawRow
from sdpo_jax.errors import UserError, short_repr

NONE = '-'  # The reference's value for fields that a data set does not have.
DOCUMENT = 'document.txt'  # The text that the questions of a source are about.


@dataclasses.dataclass(frozen=True)
class ConversionOptions:
  """Options of the conversions; each converter reads its own."""

  domain: str = ''  # SciKnowEval.
  seed: int = 0  # GPQA: seed of the order of choices.
  since: datetime.date = datetime.date(2025, 2, 1)  # LiveCodeBench: contests from this day on …
  until: datetime.date = datetime.date(2025, 5, 1)  # … and before this one.
  patients: tuple[str, ...] = tuple(f'patient_{number:02d}' for number in range(1, 11))  # LongHealth.
  direction: str = 'ke'  # MTOB: 'ke' translates Kalamang into English, 'ek' the reverse.
  documents: tuple[str, ...] = ()  # MTOB: files that make up the document.
  # QASPER: ids of papers at arXiv; by default those about question answering, of the topic 'question' in
  # HazyResearch/cartridges.
  papers: tuple[str, ...] = tuple(
    '1908.06606 1704.05572 1905.08949 1808.09920 1603.01417 1808.03986 1907.08501 1603.07044 1903.00172 1912.01046 '
    '1909.00542 1811.08048 2004.02393 1703.06492 1607.06275 1703.04617'.split()
  )
  rewritten: str = ''  # QASPER: file or hub data set of rewritten questions and answers; '': the original ones.


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


def by_id(source: str, values: Mapping[str, Any]) -> list[RawRow]:
  """Return the objects of a file that holds them by their ids, each as a row with its `id`."""
  return [
    RawRow(f'{source}, {name}', number, {**value, 'id': name})
    for number, (name, value) in enumerate(values.items(), start=1)
    if isinstance(value, Mapping)
  ]


def chosen(rows: Sequence[RawRow], names: Sequence[str], flag: str) -> list[RawRow]:
  """Return the rows with these ids, in the order of the ids; `flag` is that which names them, a plural.

  Raises:
    UserError: none or a repeated id is named, or one that no row or several rows have.
  """
  known: dict[str, RawRow] = {}
  for row in rows:
    if (name := field(row, 'id')) in known and name in names:
      raise UserError(f"{row.origin}: 'id' is {name!r}, as in {known[name].origin}: leave one of them out.")
    known[name] = row
  if missing := [name for name in names if name not in known]:
    there = textwrap.shorten(', '.join(known) or 'none', 300, placeholder=' …')
    raise UserError(f'--{flag}: {", ".join(missing)} are not in this source; there are {there}.')
  if not names or len(set(names)) < len(names):
    raise UserError(f'--{flag}={",".join(names)} must name at least one {flag.removesuffix("s")}, each once.')
  return [known[name] for name in names]


def listed(row: RawRow, name: str) -> list[RawRow]:
  """Return the objects in a list, as rows; data sets of the hub may have an object of lists instead.

  Raises:
    UserError: the field is neither, or the lists have different lengths.
  """
  values = field(row, name, kind=(list, Mapping))
  if isinstance(values, Mapping):
    columns = list(values.values())
    if not all(isinstance(column, list) and len(column) == len(columns[0]) for column in columns):
      raise UserError(f'{row.origin}: the fields of {name!r} must be lists of one length: is this the right source?')
    values = [dict(zip(values, objects, strict=True)) for objects in zip(*columns, strict=True)]
  one = name.removesuffix('s')
  return [RawRow(f'{row.origin}, {one} {number}', number, value) for number, value in enumerate(values, start=1)]


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
  kinds = kind if isinstance(kind, tuple) else (kind,)
  if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
    wanted = ' or '.join(k.__name__ for k in kinds)
    raise UserError(f'{row.origin}: field {".".join(path)!r} must be of type {wanted}, not {short_repr(value)}.')
  return value
