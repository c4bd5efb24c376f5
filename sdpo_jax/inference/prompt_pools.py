"""The file of a prompt pool, and what is kept beside it until it is complete.

A pool is drawn in rounds. What each of them kept is a file of its own in a folder beside the output, which appears
whole or not at all, on a file system and in an object store; the output is written once the last round is done, and the
folder goes then. The same settings draw the same prompts, so that two commands at once do not harm each other.
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
  """What a round of a pool has left."""

  rows: list[Row]  # That were kept.
  drawn: int  # Messages, whether kept or not.
  dropped: Mapping[str, int]  # Reason → messages that were not kept.


_FIELDS = {field.name for field in dataclasses.fields(Round)}


class PoolFile:
  """A pool on its way to its file."""

  def __init__(self, output: str, settings: Mapping[str, Any]):
    """Names the file.

    Args:
      output: to be made, ending in one of SUFFIXES.
      settings: all that decides what is drawn, as JSON holds it; a pool that was begun with others is not continued.
    """
    self._output = output
    self._settings = dict(settings)

  @property
  def folder(self) -> epath.Path:
    """Where what was kept lies until the file is complete."""
    return epath.Path(f'{self._output}.parts')

  def check(self, overwrite: bool) -> None:
    """Make sure that the file can be written.

    Raises:
      UserError: another ending, as `files.check_output`.
    """
    if not self._output.endswith(SUFFIXES):
      raise UserError(f'--output={self._output} must end in {" or ".join(SUFFIXES)}, which says how rows are written.')
    check_output(self._output, overwrite=overwrite)

  def rounds(self, overwrite: bool) -> list[Round]:
    """Return what an interrupted command with the same settings has left, in order.

    Args:
      overwrite: whether what a command with other settings has left may go.

    Raises:
      UserError: that may not go, or a part cannot be read.
    """
    found: list[Round] = []
    way_out = f'remove {self.folder}, or add --overwrite to begin anew'
    while (path := self._part(len(found))).exists():
      part = read_json_object(path, way_out)
      changed = self._changed(part.get('settings'))
      if changed and overwrite:
        self.discard()
        return []
      if changed:
        raise UserError(
          f'{self.folder} holds the beginning of a pool that was begun otherwise ({"; ".join(changed)}): repeat that '
          f'command, or {way_out}.'
        )
      if not _FIELDS <= part.keys():
        raise UserError(f'{path} is not what a command has left: {way_out}.')
      found.append(Round(**{name: part[name] for name in _FIELDS}))
    return found

  def _changed(self, settings: Any) -> list[str]:
    if not isinstance(settings, dict):
      return ['it does not say how']
    names = sorted(settings.keys() | self._settings.keys())
    return [
      f'{name} was {settings.get(name)!r} and is {self._settings.get(name)!r}'
      for name in names
      if settings.get(name) != self._settings.get(name)
    ]

  def add(self, number: int, result: Round) -> None:
    """Keep a round, the number of which counts from 0.

    Raises:
      UserError: it cannot be written.
    """
    part = {'settings': self._settings, **dataclasses.asdict(result)}
    with self._writable():
      make_directory(self.folder)
      write_atomically(self._part(number), json.dumps(part, ensure_ascii=False))

  def finish(self, rows: Sequence[Row]) -> None:
    """Write the file, and remove what was kept of its rounds; errors as `add`."""
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
    """Remove what was kept of the rounds."""
    try:
      if self.folder.exists():
        self.folder.rmtree(missing_ok=True)
    except OSError as error:
      if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
        raise
      # The same command runs twice, and the other one keeps a round there, or removes them too: it ends after this one.

  def _part(self, number: int) -> epath.Path:
    return self.folder / f'{number:05}.json'


def _lines(rows: Sequence[Row]) -> str:
  return ''.join(json.dumps(row, ensure_ascii=False) + '\n' for row in rows)


def _parquet(rows: Sequence[Row]) -> bytes:
  content = io.BytesIO()
  pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), content)
  return content.getvalue()
