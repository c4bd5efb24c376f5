"""The file of a prompt pool, and the files beside it until it is complete.

A pool is drawn in rounds. The prompts that a round keeps are written atomically, on a file system and in an object
store, to a file in a folder beside the output; after the last round the output is written and the folder removed. The
same settings draw the same prompts, so two concurrent commands do not harm each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import errno
import io
import json
from typing import Any

from etils import epath
import pyarrow
import pyarrow.parquet

from sdpo_jax.errors import UserError, first_line
from sdpo_jax.files import check_output, is_full, make_directory, read_json_object, write_atomically, write_output

SUFFIXES = ('.jsonl', '.parquet')
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Round:
  """The stored result of one round of a pool."""

  rows: list[Row]  # The kept rows.
  drawn: int  # Messages drawn, kept or not.
  dropped: Mapping[str, int]  # Reason → number of messages dropped for it.


_FIELDS = {field.name for field in dataclasses.fields(Round)}


class PoolFile:
  """The output file of a pool, and the files of its completed rounds."""

  def __init__(self, output: str, settings: Mapping[str, Any]):
    """Define the pool's files without touching them.

    Args:
      output: the file to make, ending in one of SUFFIXES.
      settings: everything that determines the draw, as JSON values; rounds with other settings are not continued.
    """
    self._output = output
    self._settings = dict(settings)

  @property
  def folder(self) -> epath.Path:
    """Return the folder of completed rounds."""
    return epath.Path(f'{self._output}.parts')

  def check(self, overwrite: bool) -> None:
    """Check that the file can be written.

    Raises:
      UserError: the file name has another ending, or as `files.check_output`.
    """
    if not self._output.endswith(SUFFIXES):
      raise UserError(f'--output={self._output} must end in {" or ".join(SUFFIXES)}, which determines the format.')
    check_output(self._output, overwrite=overwrite)

  def rounds(self, overwrite: bool) -> list[Round]:
    """Return the rounds that an interrupted command with the same settings has left, in order.

    Args:
      overwrite: whether rounds of a command with other settings may be removed.

    Raises:
      UserError: such rounds may not be removed, or a round cannot be read.
    """
    found: list[Round] = []
    way_out = f'remove {self.folder}, or add --overwrite to start over'
    while (path := self._part(len(found))).exists():
      part = read_json_object(path, way_out)
      changed = self._changed(part.get('settings'))
      if changed and overwrite:
        self.discard()
        return []
      if changed:
        raise UserError(
          f'{self.folder} holds the rounds of a pool with other settings ({"; ".join(changed)}): repeat that command, '
          f'or {way_out}.'
        )
      if not _FIELDS <= part.keys():
        raise UserError(f'{path} is not a round of a pool: {way_out}.')
      found.append(Round(**{name: part[name] for name in _FIELDS}))
    return found

  def _changed(self, settings: Any) -> list[str]:
    if not isinstance(settings, dict):
      return ['they are missing']
    names = sorted(settings.keys() | self._settings.keys())
    return [
      f'{name} was {settings.get(name)!r} and is {self._settings.get(name)!r}'
      for name in names
      if settings.get(name) != self._settings.get(name)
    ]

  def add(self, number: int, result: Round) -> None:
    """Store a round; numbers count from 0.

    Raises:
      UserError: it cannot be written.
    """
    part = {'settings': self._settings, **dataclasses.asdict(result)}
    with self._writable():
      make_directory(self.folder)
      write_atomically(self._part(number), json.dumps(part, ensure_ascii=False))

  def finish(self, rows: Sequence[Row]) -> None:
    """Write the output file and remove the stored rounds; raises as `add`."""
    with self._writable():
      write_output(self._output, _parquet(rows) if self._output.endswith('.parquet') else _lines(rows))
    self.discard()

  @contextlib.contextmanager
  def _writable(self) -> Iterator[None]:
    try:
      yield
    except OSError as error:
      way_out = 'make room, then start the same command again' if is_full(error) else 'name another file'
      raise UserError(f'--output={self._output} cannot be written ({first_line(error)}): {way_out}.') from error

  def discard(self) -> None:
    """Remove the stored rounds."""
    try:
      if self.folder.exists():
        self.folder.rmtree(missing_ok=True)
    except OSError as error:
      if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
        raise
      # A concurrent equal command stores a round there or removes the rounds too: it will finish after this one.

  def _part(self, number: int) -> epath.Path:
    return self.folder / f'{number:05}.json'


def _lines(rows: Sequence[Row]) -> str:
  return ''.join(json.dumps(row, ensure_ascii=False) + '\n' for row in rows)


def _parquet(rows: Sequence[Row]) -> bytes:
  content = io.BytesIO()
  pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), content)
  return content.getvalue()
