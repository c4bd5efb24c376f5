"""A PostgreSQL server for tests: made by `initdb` as an unprivileged user, in a temporary folder, behind a socket."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import glob
import os
import pathlib
import pwd
import secrets
import shutil
import subprocess
import tempfile

import pytest

_PROGRAMS = sorted(glob.glob('/usr/lib/postgresql/*/bin'))
_USER = 'nobody'
_SETTINGS = "-c listen_addresses='' -c fsync=off -c full_page_writes=off -c max_connections=200"


class Server:
  """A running server, which `stop` and `start` may take away for a while."""

  def __init__(self, folder: pathlib.Path):
    self._folder, self._data = folder, folder / 'data'
    self.place = f'postgresql://sdpo@/postgres?host={folder}'  # The URL.
    for path in (folder, self._data):
      path.mkdir(exist_ok=True, mode=0o700)
      if os.getuid() == 0:
        shutil.chown(path, _USER)
    self._run('initdb', '-A', 'trust', '-U', 'sdpo', '--no-sync', '-D', self._data)
    self.start()

  def _run(self, program: str, *arguments: object) -> None:
    as_user = {'user': _USER, 'group': pwd.getpwnam(_USER).pw_gid, 'extra_groups': []} if os.getuid() == 0 else {}
    command = [f'{_PROGRAMS[-1]}/{program}', *map(str, arguments)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=self._folder, **as_user)

  def start(self) -> None:
    """Start the server."""
    log = self._folder / 'log'
    self._run('pg_ctl', '-w', '-D', self._data, '-l', log, '-o', f'{_SETTINGS} -k {self._folder}', 'start')

  def stop(self) -> None:
    """Stop the server at once, as a crash does."""
    self._run('pg_ctl', '-w', '-D', self._data, '-m', 'immediate', 'stop')

  def url(self) -> str:
    """Return the URL of a new database, a schema of its own."""
    import psycopg

    name = f't{secrets.token_hex(6)}'
    with psycopg.connect(self.place, autocommit=True) as connection:
      connection.execute(f'CREATE SCHEMA {name}')
    return f'{self.place}&options=-csearch_path%3D{name}'


@contextlib.contextmanager
def serving() -> Iterator[Server]:
  """Run a server."""
  # Not below pytest's folders: other users may not pass these, and paths of sockets are short.
  with tempfile.TemporaryDirectory(prefix='pg') as folder:
    os.chmod(folder, 0o755)
    server = Server(pathlib.Path(folder, 's'))
    try:
      yield server
    finally:
      with contextlib.suppress(subprocess.CalledProcessError):
        server.stop()


@pytest.fixture(scope='session')
def postgres() -> Iterator[Server]:
  """Run a server for all tests of a process; skip where Debian's package `postgresql` is not installed."""
  if not _PROGRAMS:
    pytest.skip('PostgreSQL is not installed (apt-get install postgresql)')
  with serving() as server:
    yield server
