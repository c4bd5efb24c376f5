"""Rows of Hugging Face hub data sets, read with the `datasets` library."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import contextlib
import logging
import pathlib
from typing import Any
import urllib.parse

from sdpo_jax.data.rows import RawRow
from sdpo_jax.errors import UserError
from sdpo_jax.models import hub as models_hub

PREFIX = 'hf:'
_OPTIONS = ('split', 'config', 'revision')


def is_hub(source: str) -> bool:
  """Return whether a source names a hub data set instead of a file."""
  return source.startswith(PREFIX)


def parse(source: str) -> tuple[str, dict[str, str]]:
  """Return name and options of `hf:OWNER/NAME?split=…&config=…&revision=…`.

  Raises:
    UserError: the source is not of this form.
  """
  name, _, query = source.removeprefix(PREFIX).partition('?')
  try:
    options = dict(urllib.parse.parse_qsl(query, strict_parsing=True)) if query else {}
  except ValueError as error:
    raise UserError(f'{source!r} is not hf:OWNER/NAME?split=…&config=…&revision=…: {error}.') from error
  unknown = [key for key in options if key not in _OPTIONS]
  if not name or unknown:
    wrong = f'there is no option {unknown[0]!r}' if unknown else 'the name is missing'
    raise UserError(f'{source!r} is not hf:OWNER/NAME?split=…&config=…&revision=…: {wrong}.')
  return name, options


def read_rows(source: str, setting: str) -> Sequence[RawRow]:
  """Return all rows of one split of `hf:OWNER/NAME?split=…&config=…&revision=…`; NAME may also be a local folder.

  `split` takes the values of `datasets.load_dataset` (train, test[:100]); it may be left out if there is only one
  split. Data sets downloaded before are read from the cache of `datasets`.

  Raises:
    UserError: malformed source, no such data set, configuration or split, no network, or no rows.
  """
  name, options = parse(source)
  unreachable = None if pathlib.Path(name).exists() else models_hub.unreachable()
  try:
    import datasets
  except ImportError as error:
    raise UserError(f'{source!r} is read with the datasets library: pip install datasets.') from error
  try:
    with _quiet('datasets', 'huggingface_hub'):
      found = datasets.load_dataset(
        name, name=options.get('config'), split=options.get('split'), revision=options.get('revision')
      )
    if isinstance(found, datasets.DatasetDict):
      if len(found) != 1:
        raise UserError(f'{setting}: {source!r} does not name a split: add ?split= with one of {", ".join(found)}.')
      (found,) = found.values()
  except (datasets.exceptions.DatasetsError, OSError, ValueError, RuntimeError) as error:
    if unreachable:
      raise UserError(
        f'{setting}: {source!r} has not been downloaded to this machine, and {unreachable}: connect it, or name a file.'
      ) from error
    raise UserError(
      f'{setting}: {source!r} cannot be loaded: {_reason(error)}. Check name, split and config; a hub data set needs a '
      'network the first time, and `hf auth login` if its owner restricts access.'
    ) from error
  if not len(found):
    raise UserError(f'{setting}: {source!r} holds no rows.')
  return _Rows(source, found)


class _Rows(Sequence):
  """Rows that stay on disk until they are accessed; some data sets are larger than a machine's memory."""

  def __init__(self, source: str, values: Sequence[Any]):
    self._source, self._values = source, values

  def __len__(self) -> int:
    return len(self._values)

  def __getitem__(self, at: int | slice) -> RawRow | list[RawRow]:
    if isinstance(at, slice):
      return [self[index] for index in range(*at.indices(len(self)))]
    number = range(1, len(self) + 1)[at]
    return RawRow(f'{self._source}, row {number}', number, self._values[number - 1])


@contextlib.contextmanager
def _quiet(*names: str) -> Iterator[None]:
  """Silence the log messages of these libraries while they fail; their exceptions hold the same text."""
  levels = {name: logging.getLogger(name).level for name in names}
  for name in names:
    logging.getLogger(name).setLevel(logging.CRITICAL)
  try:
    yield
  finally:
    for name, level in levels.items():
      logging.getLogger(name).setLevel(level)


def _reason(error: BaseException) -> str:
  """Return the first line of the library's error message, or of its cause if the message says nothing."""
  cause: Any = error.__cause__ if str(error).startswith('An error occurred') and error.__cause__ else error
  return str(cause).strip().partition('\n')[0].rstrip('.') or type(cause).__name__
