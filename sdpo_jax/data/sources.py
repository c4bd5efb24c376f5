"""Sources of rows: JSON, CSV, parquet and text files, hub data sets, and generators of endless questions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import csv
import inspect
import io
import json
from typing import Any, Protocol
import urllib.parse

from etils import epath

from sdpo_jax.data import hub_datasets, parquet_rows
from sdpo_jax.data.rows import LARGEST_ROW, RawRow, too_large
from sdpo_jax.errors import UserError, first_line, short_repr
from sdpo_jax.types import Example

GENERATOR_PREFIX = 'generator:'


class Registry(Protocol):
  """The part of `sdpo_jax.environments.registry` that is used here; the caller passes the module in."""

  def require(self, name: str) -> None:
    """Raise UserError if there is no grader of that name."""

  def get_generator(self, name: str) -> Callable[..., Callable[[int], Example]]:
    """Return the generator of that name; raise UserError if there is none."""


def stem(source: str) -> str:
  """Return the base name of a file or hub data set: `rows` for gs://bucket/rows.jsonl and hf:me/rows?split=train."""
  name = hub_datasets.parse(source)[0] if hub_datasets.is_hub(source) else source
  return epath.Path(name).stem or name


def is_generator(source: str) -> bool:
  """Return whether a source names a generator instead of a file."""
  return source.startswith(GENERATOR_PREFIX)


def generator_name(source: str) -> str:
  """Return the NAME in a source `generator:NAME?key=value&…`."""
  return source.removeprefix(GENERATOR_PREFIX).partition('?')[0]


def make_generator(source: str, split: str, seed: int, registry: Registry) -> Callable[[int], Example]:
  """Return the endless questions of `generator:NAME?key=value&…` as a function of their index.

  Options are passed as strings. An option `seed` replaces the argument `seed`.

  Raises:
    UserError: malformed source, unknown generator or option.
  """
  name, query = generator_name(source), source.partition('?')[2]
  try:
    options: dict[str, Any] = dict(urllib.parse.parse_qsl(query, strict_parsing=True, keep_blank_values=True))
    seed = int(options.pop('seed', seed))
  except ValueError as error:
    raise UserError(f'{source!r} is not generator:NAME?key=value&key=value: {error}.') from error
  factory = registry.get_generator(name)
  try:
    inspect.signature(factory).bind(split, seed, **options)
  except TypeError as error:
    raise UserError(f'{source!r}: the generator {name!r} does not take these options: {error}.') from error
  return factory(split, seed, **options)


def read_rows(source: str, setting: str, arrays: bool = False) -> Sequence[RawRow]:
  """Return all rows of a file or a hub data set; only the file's own syntax is checked.

  Names ending in .parquet are parquet files, in .csv CSV files with a header, and in .txt text files, in which every
  line that is not blank is the `prompt` of a row; anything else is a JSON array if it starts with '[', JSON lines
  otherwise. CSV values are strings; an empty cell is a missing field.

  Args:
    source: path, local or any that etils.epath opens (gs://…), or hf:OWNER/NAME?split=… (see `hub_datasets.files`).
    setting: name of the setting that holds the source, for messages.
    arrays: as in `parquet_rows.read`.

  Raises:
    UserError: no such file, not readable, not in one of these formats (the line is named), without rows, or a row is
      larger than `LARGEST_ROW`.
  """
  rows = (_of_hub if hub_datasets.is_hub(source) else _of_file)(source, setting, arrays)
  if not rows:
    raise UserError(f'{setting}: {source!r} holds no rows.')
  return rows


def _of_hub(source: str, setting: str, arrays: bool) -> list[RawRow]:
  values = []
  for files, part in hub_datasets.files(source, setting):
    rows = [row.value for file in files for row in _of_file(str(file), setting, arrays)]
    values += hub_datasets.taken(rows, part)
  return [RawRow(f'{source}, row {number}', number, value) for number, value in enumerate(values, start=1)]


def _of_file(source: str, setting: str, arrays: bool) -> list[RawRow]:
  content = _read(source, setting)
  name = source.lower()
  if name.endswith('.parquet'):
    values = parquet_rows.read(source, content, arrays)
    return [RawRow(f'{source}, row {number}', number, value) for number, value in enumerate(values, start=1)]
  text = _decode(source, content)
  if name.endswith('.csv'):
    return _csv(source, text)
  if name.endswith('.txt'):
    return _prompts(source, text)
  return _array(source, text) if text.lstrip().startswith('[') else _lines(source, text)


def _read(source: str, setting: str) -> bytes:
  try:
    path = epath.Path(source)
    if not path.exists() or path.is_dir():
      raise UserError(f'{setting}: there is no file {source!r}.')
    return path.read_bytes()
  except (OSError, ImportError, ValueError, KeyError, MemoryError) as error:
    reason = f'{error} is not known: name a local file, or gs://…' if isinstance(error, KeyError) else first_line(error)
    raise UserError(f'{setting}: {source!r} cannot be read: {reason}.') from error


def _decode(source: str, content: bytes) -> str:
  try:
    return content.decode('utf-8-sig')
  except UnicodeDecodeError as error:
    line = content.count(b'\n', 0, error.start) + 1
    raise UserError(f'{source}, line {line}: the file is not UTF-8 text ({error.reason}): save it as UTF-8.') from error


def _numbered(source: str, text: str) -> Iterator[tuple[int, str]]:
  """Yield the lines that are not blank, with their numbers."""
  # Split at \n alone: JSON strings may hold the other characters at which str.splitlines breaks.
  for number, line in enumerate(text.split('\n'), start=1):
    if len(line) > LARGEST_ROW:
      raise too_large(f'{source}, line {number}', len(line))
    if line.strip():
      yield number, line


def _prompts(source: str, text: str) -> list[RawRow]:
  lines = _numbered(source, text)
  return [RawRow(f'{source}, line {number}', number, {'prompt': line.strip()}) for number, line in lines]


def _lines(source: str, text: str) -> list[RawRow]:
  rows = []
  for number, line in _numbered(source, text):
    origin = f'{source}, line {number}'
    try:
      rows.append(RawRow(origin, number, json.loads(line)))
    except json.JSONDecodeError as error:
      usual = source.lower().endswith(('.json', '.jsonl'))
      why = '' if usual else '; only .csv, .parquet and .txt are not read as JSON'
      raise UserError(f'{origin}: invalid JSON at column {error.colno}: {error.msg}{why}.') from error
    except (RecursionError, ValueError) as error:
      raise UserError(f'{origin}: invalid JSON: {_unreadable(error)}.') from error
  return rows


def _array(source: str, text: str) -> list[RawRow]:
  decoder, rows = json.JSONDecoder(), []
  line, seen = 1, 0

  def skip(position: int) -> int:
    """Return the next position that is not whitespace."""
    while position < len(text) and text[position] in ' \t\r\n':
      position += 1
    return position

  def fail(position: int, reason: str) -> UserError:
    return UserError(f'{source}, line {text.count(chr(10), 0, position) + 1}: invalid JSON: {reason}.')

  position = skip(skip(0) + 1)
  if text[position : position + 1] == ']':
    return rows
  while True:
    line, seen = line + text.count('\n', seen, position), position
    try:
      value, position = decoder.raw_decode(text, position)
    except json.JSONDecodeError as error:
      raise fail(error.pos, error.msg) from error
    except (RecursionError, ValueError) as error:
      raise fail(position, _unreadable(error)) from error
    if position - seen > LARGEST_ROW:
      raise too_large(f'{source}, line {line}', position - seen)
    rows.append(RawRow(f'{source}, line {line}', line, value))
    position = skip(position)
    mark = text[position : position + 1]
    if mark == ']':
      break
    if mark != ',':
      raise fail(position, "expected ',' or ']' after a row")
    position = skip(position + 1)
  if text[position + 1 :].strip():
    raise fail(skip(position + 1), 'text after the end of the array')
  return rows


def _csv(source: str, text: str) -> list[RawRow]:
  csv.field_size_limit(LARGEST_ROW)
  reader = csv.reader(io.StringIO(text, newline=''), strict=True)
  header: list[str] = []
  rows: list[RawRow] = []
  while True:
    line = reader.line_num + 1
    try:
      cells = next(reader, None)
    except csv.Error as error:
      raise UserError(f'{source}, line {line}: invalid CSV: {error}.') from error
    if cells is None:
      return rows
    if (size := sum(map(len, cells))) > LARGEST_ROW:
      raise too_large(f'{source}, line {line}', size)
    if not cells:
      continue
    if not header:
      header = [name.strip() for name in cells]
      if len(header) == 1 and set(header[0]) & set(';\t'):
        raise UserError(f'{source}, line {line}: commas must separate columns, not as in {short_repr(header[0])}.')
      if '' in header or len(set(header)) < len(header):
        raise UserError(
          f'{source}, line {line}: a header must name every column, each differently, not {short_repr(header)}.'
        )
      continue
    if len(cells) != len(header):
      raise UserError(f'{source}, line {line}: {len(cells)} cells, but the header names {len(header)} columns.')
    rows.append(
      RawRow(f'{source}, line {line}', line, {name: cell for name, cell in zip(header, cells, strict=True) if cell})
    )


def _unreadable(error: RecursionError | ValueError) -> str:
  """Return why Python cannot parse some JSON."""
  if isinstance(error, RecursionError):
    return 'nested too deeply'
  return str(error).partition(';')[0]  # An integer of more digits than Python converts.
