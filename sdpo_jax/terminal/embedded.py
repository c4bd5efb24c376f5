"""A private service for the terminal program: a child process on a free port, with a random key."""

from __future__ import annotations

from collections.abc import Sequence
import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

import sdpo_jax
from sdpo_jax.errors import UserError, printable
from sdpo_jax.serving.web import keys
from sdpo_jax.terminal.client import ServiceClient

CHILD = pathlib.Path(__file__).with_name('embedded_child.py')
OWNER = 'local'  # The owner in a service without keys, so that `launch.serve` has the same adapters.
_LISTENING = re.compile(r'^Listening on (http://\S+);', re.MULTILINE)
_LOOK_S = 0.1  # Seconds between checks of the log of the service.
_END_S = 10.0  # Seconds within which the service must end after closing its port.
_SHOWN = 30  # The most lines of its log that are shown if it fails.


class Embedded:
  """A service in a child process, which ends with this process even if this is killed. Main thread only."""

  def __init__(self, arguments: Sequence[str], folder: pathlib.Path):
    """Start a service, without waiting until it is ready.

    Args:
      arguments: arguments of launch.serve: the config and its overrides.
      folder: the working directory, to which paths in the config are relative.

    Raises:
      UserError: the service has ended before it listened.
    """
    self._folder = tempfile.TemporaryDirectory(prefix='sdpo_session_')
    inside = pathlib.Path(self._folder.name)
    # A file, not a pipe: if this process is killed, the service must still be able to log that it stops.
    self._log = inside / 'service.log'
    self._key, _ = keys.add(inside / 'keys.jsonl', OWNER, 'session')
    own = {'host': '127.0.0.1', 'port': '0', 'keys': str(inside / 'keys.jsonl'), 'idle_shutdown_s': 'None'}
    command = [sys.executable, '-P', '-m', 'sdpo_jax.launch.serve', *arguments]
    command += [f'--config.serve.http.{name}={value}' for name, value in own.items()]
    checkout = list(sdpo_jax.__path__[1:])  # Its root; what is installed is found by the same Python.
    given = map(os.path.abspath, os.environ.get('PYTHONPATH', '').split(os.pathsep))
    # Without the working directory, which `sdpo_jax.launch` has taken off.
    path = os.pathsep.join([*checkout, *(folder for folder in given if folder in sys.path)])
    with contextlib.ExitStack() as undo:
      undo.callback(self._folder.cleanup)
      with open(self._log, 'wb') as log:
        self._process = subprocess.Popen(
          [sys.executable, '-I', str(CHILD), str(os.getpid()), *command],
          stdin=subprocess.DEVNULL,
          stdout=subprocess.DEVNULL,
          stderr=log,
          cwd=folder,
          env={**os.environ, 'PYTHONPATH': path},
          start_new_session=True,  # So that only the terminal program gets Ctrl-C.
        )
      undo.callback(self.stop)
      self.url = self._address()
      undo.pop_all()

  def client(self) -> ServiceClient:
    """Make a client of the service, with its key."""
    return ServiceClient(self.url, self._key, local=True, lost=self._lost)

  def check(self) -> None:
    """Raise a UserError with the last lines of the log if the service has ended."""
    code = self._process.poll()
    if code is None:
      return
    if code < 0:
      raise UserError(f'The service that this program has started was ended by signal {-code}. Nothing is lost.')
    lines = [printable(line, 1000) for line in self._read().splitlines() if line and not line.startswith('{')]
    why = lines[-1] if code == 2 and lines else '\n'.join(['', *lines[-_SHOWN:]])
    raise UserError(f'The service that this program has started ended with exit code {code}: {why}')

  def stop(self) -> None:
    """Stop the service in order, and wait for its end; an interrupt meanwhile kills it."""
    try:
      if self._process.poll() is None:
        self._process.send_signal(signal.SIGTERM)
      self._process.wait()
    except BaseException:
      self._process.kill()
      self._process.wait()
      raise
    finally:
      self._folder.cleanup()

  def _lost(self) -> None:
    """Wait until the service has ended, since its port is closed, and raise a UserError; return if it goes on."""
    with contextlib.suppress(subprocess.TimeoutExpired):
      self._process.wait(_END_S)
    self.check()

  def _address(self) -> str:
    while True:
      self.check()
      found = _LISTENING.search(self._read())
      if found is not None:
        return found[1]
      time.sleep(_LOOK_S)

  def _read(self) -> str:
    return self._log.read_text(encoding='utf-8', errors='replace')
