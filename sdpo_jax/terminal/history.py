"""The log of a session: what was shown and decided, a JSON object per line, each on disk before the next step.

The file holds the session's token, so only its owner may read it. A killed program may leave a partial line at the end,
which is cut off before the next line is appended.
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
from sdpo_jax.files import jsonable, make_directory, sync_directory

_ID = re.compile(r'[A-Za-z0-9][A-Za-z0-9_-]{0,99}')
SUFFIX = '.jsonl'


def state_folder(named: str | None) -> pathlib.Path:
  """Return the folder of histories: that of --state, or the user's state folder."""
  if named is not None:
    return pathlib.Path(named).expanduser()
  base = os.environ.get('XDG_STATE_HOME', '')
  home = pathlib.Path(base) if os.path.isabs(base) else pathlib.Path.home() / '.local' / 'state'
  return home / 'sdpo_jax' / 'sessions'


def find(folder: pathlib.Path, named: str | None) -> pathlib.Path:
  """Return the path of a session's history.

  Args:
    folder: the folder of histories.
    named: the id of the session; None: the most recently written one.

  Raises:
    UserError: there is no such history.
  """
  if named is not None:
    path = folder / f'{named}{SUFFIX}'
    if not _ID.fullmatch(named) or not path.is_file():
      raise UserError(
        f'--resume={printable(named)}: {folder} has no history of such a session; ls {folder} lists them.'
      )
    return path
  found = sorted(folder.glob(f'*{SUFFIX}'), key=lambda path: path.stat().st_mtime_ns) if folder.is_dir() else []
  if not found:
    raise UserError(f'--resume: there is no history in {folder}; start a session without --resume.')
  return found[-1]


class History:
  """The history of one session; only one program at a time can open it."""

  def __init__(self, path: pathlib.Path):
    """Open a history and cut off a partial last line.

    Raises:
      UserError: the file cannot be opened, is open in another program, or has an invalid line.
    """
    self.path, self._synced = path, True
    try:
      flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
      self._file = os.open(path, flags)
    except OSError as error:
      raise UserError(
        f'The history {path} cannot be opened ({first_line(error)}): mend that, or begin anew.'
      ) from error
    try:
      self._lock()
      self.records = self._read()
    except BaseException:
      os.close(self._file)
      raise

  @classmethod
  def begin(cls, folder: pathlib.Path, session: str, opened: Mapping[str, Any]) -> History:
    """Create the history of a newly opened session.

    Raises:
      UserError: the file cannot be written or already exists.
    """
    path = folder / f'{session}{SUFFIX}'
    try:
      if not _ID.fullmatch(session):
        raise ValueError(f'{printable(session)!r} is no id of a session')
      make_directory(folder)
      with contextlib.suppress(PermissionError):
        os.chmod(folder, 0o700)
      os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
      sync_directory(folder)
    except (OSError, ValueError) as error:
      raise UserError(
        f'The history {path} cannot be made ({first_line(error)}): name a folder with --state.'
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
    """Return the record of the session's opening: its id, token and service."""
    if not self.records or self.records[0]['kind'] != 'opened':
      raise UserError(f'The history {self.path} does not say how its session was opened: begin a new one.')
    return self.records[0]

  def add(self, kind: str, **values: Any) -> None:
    """Append a record; it and all earlier ones are on disk when this returns.

    Raises:
      UserError: the file cannot be written.
    """
    self.note(kind, **values)
    self.sync()

  def note(self, kind: str, **values: Any) -> None:
    """Append a record that reaches the disk at the next `sync` or `add`; raises as `add`."""
    record = {'kind': kind, 'time': time.time(), **jsonable(values)}
    line = (json.dumps(record) + '\n').encode()  # In ASCII, so that lone surrogates can be written, too.
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
        f'The history {self.path} cannot be written ({first_line(error)}): make room, then --resume.'
      ) from error

  def last(self, *kinds: str, **values: Any) -> Mapping[str, Any] | None:
    """Return the newest record of one of these kinds with these values; None if there is none."""
    wanted = values.items()
    return next(
      (
        record
        for record in reversed(self.records)
        if record['kind'] in kinds and all(record.get(name) == value for name, value in wanted)
      ),
      None,
    )

  def close(self) -> None:
    os.close(self._file)

  def _lock(self) -> None:
    try:
      fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      raise UserError(f'Another program has the session of {self.path} open: end that one first.') from error
    if os.fstat(self._file).st_mode & 0o077:
      os.fchmod(self._file, 0o600)

  def _read(self) -> list[dict[str, Any]]:
    with open(self._file, 'rb', closefd=False) as file:
      file.seek(0)
      content = file.read()
    whole = content.rfind(b'\n') + 1
    records = []
    for number, line in enumerate(content[:whole].split(b'\n')[:-1], start=1):
      try:
        record = json.loads(line)
      except (ValueError, RecursionError):
        record = None
      if not isinstance(record, dict) or not isinstance(record.get('kind'), str):
        raise UserError(f'{self.path}, line {number}: this is no record of a session: remove the line, or begin anew.')
      records.append(record)
    if whole < len(content):
      os.ftruncate(self._file, whole)
      os.fsync(self._file)
    return records
