"""The history of a session: what was shown and decided, one JSON object per line, on disk before the next step.

The file has the token of the session, so only its owner may read it. A killed program may leave an incomplete line at
the end, which the next program removes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import contextlib
import fcntl
import json
import os
import pathlib
import re
import time
from typing import Any

from sdpo_jax.errors import UserError, first_line, printable
from sdpo_jax.files import json_object, jsonable, make_directory, sync_directory

_ID = re.compile(r'[A-Za-z0-9][A-Za-z0-9_-]{0,99}')
SUFFIX = '.jsonl'


def state_folder(named: str | None) -> pathlib.Path:
  """Return the folder of histories: the value of --state, or the default within the user's state folder."""
  if named is not None:
    return pathlib.Path(os.path.expanduser(named))
  base = os.environ.get('XDG_STATE_HOME', '')
  home = pathlib.Path(base) if os.path.isabs(base) else pathlib.Path.home() / '.local' / 'state'
  return home / 'sdpo_jax' / 'sessions'


def find(folder: pathlib.Path, named: str | None) -> pathlib.Path:
  """Find the history of a session.

  Args:
    folder: the folder of histories.
    named: the id of the session; None: the one whose history was written last.

  Raises:
    UserError: the folder has no such history.
  """
  if named is not None:
    path = folder / f'{named}{SUFFIX}'
    if not _ID.fullmatch(named) or not os.path.isfile(path):
      raise UserError(
        f'--resume={printable(named)}: there is no history of that session; ls {folder} lists all histories.'
      )
    return path
  found = sorted(folder.glob(f'*{SUFFIX}'), key=lambda path: path.stat().st_mtime_ns) if os.path.isdir(folder) else []
  if not found:
    raise UserError(f'--resume: {folder} has no history; start a session without --resume.')
  return found[-1]


class History:
  """The history of one session, which only one program can have open."""

  def __init__(self, path: pathlib.Path):
    """Open a history, and remove an incomplete last line.

    Raises:
      UserError: the file cannot be opened, is open in another program, or has an invalid record.
    """
    self.path, self._synced = path, True
    try:
      self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW)
    except OSError as error:
      raise UserError(
        f'The history {path} cannot be opened ({first_line(error)}): make it readable, or start a new session.'
      ) from error
    try:
      self._lock()
      self.records = self._read()
    except BaseException:
      os.close(self._file)
      raise

  @classmethod
  def begin(cls, folder: pathlib.Path, session: str, opened: Mapping[str, Any]) -> History:
    """Create the history of a new session.

    Raises:
      UserError: the file cannot be written, or exists already.
    """
    path = folder / f'{session}{SUFFIX}'
    try:
      if not _ID.fullmatch(session):
        raise ValueError(f'{printable(session)!r} is not the id of a session')
      make_directory(folder)
      with contextlib.suppress(PermissionError):
        os.chmod(folder, 0o700)
      os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
      sync_directory(folder)
    except (OSError, ValueError) as error:
      raise UserError(
        f'The history {path} cannot be created ({first_line(error)}): name another folder with --state.'
      ) from error
    history = cls(path)
    try:
      history.add('opened', session=session, **opened)
    except BaseException:
      history.close()
      raise
    return history

  @property
  def opened(self) -> Mapping[str, Any]:
    """The first record, with the id, the token and the service of the session."""
    if not self.records or self.records[0]['kind'] != 'opened':
      raise UserError(f'The history {self.path} lacks its first record: start a new session.')
    return self.records[0]

  def add(self, kind: str, **values: Any) -> None:
    """Append a record; when this returns, it and all earlier ones are on disk.

    Raises:
      UserError: the file cannot be written.
    """
    self.note(kind, **values)
    self.sync()

  def note(self, kind: str, **values: Any) -> None:
    """Append a record, which is on disk after the next `sync` or `add`; raises as `add`."""
    record = {'kind': kind, 'time': time.time(), **jsonable(values)}
    line = (json.dumps(record) + '\n').encode()  # ASCII, since UTF-8 has no lone surrogates.
    with self._told():
      while line:
        line = line[os.write(self._file, line) :]
    self.records.append(record)
    self._synced = False

  def sync(self) -> None:
    """Write all records to disk; raises as `add`."""
    if not self._synced:
      with self._told():
        os.fsync(self._file)
      self._synced = True

  @contextlib.contextmanager
  def _told(self) -> Iterator[None]:
    try:
      yield
    except OSError as error:
      raise UserError(
        f'The history {self.path} cannot be written ({first_line(error)}): make room on its disk, then --resume.'
      ) from error

  def last(self, *kinds: str, **values: Any) -> Mapping[str, Any] | None:
    """Return the newest record that has one of these kinds and these values; None: there is none."""
    found = (record for record in reversed(self.records) if record['kind'] in kinds)
    return next((record for record in found if values.items() <= record.items()), None)

  def close(self) -> None:
    """Close the file, so that another program can open it."""
    os.close(self._file)

  def _lock(self) -> None:
    try:
      fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      raise UserError(f'Another program has the history {self.path} open: end that program first.') from error
    if os.fstat(self._file).st_mode & 0o077:
      os.fchmod(self._file, 0o600)

  def _read(self) -> list[dict[str, Any]]:
    with open(self._file, 'rb', closefd=False) as file:
      file.seek(0)
      content = file.read()
    whole = content.rfind(b'\n') + 1
    records = []
    for number, line in enumerate(content[:whole].split(b'\n')[:-1], start=1):
      record = json_object(line)
      if record is None or not isinstance(record.get('kind'), str):
        raise UserError(f'{self.path}, line {number} is not a record of a session: remove the line, or start anew.')
      records.append(record)
    if whole < len(content):
      os.ftruncate(self._file, whole)
      os.fsync(self._file)
    return records
