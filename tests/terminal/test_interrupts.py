"""Ctrl-C at a real terminal while a command runs: it ends with all that it has started, and the session goes on."""

import json
import os
import pathlib
import pty
import re
import select
import subprocess
import sys
import time

import pytest

from sdpo_jax.environments.workspace.shell import Shell
from sdpo_jax.errors import UserError
from tests.terminal.session_server import SessionServer, call

ROOT = pathlib.Path(__file__).parents[2]
SLEEP = f'31.{os.getpid():07}'  # Seconds, by which the processes of these commands are known.
COMMANDS = f'sleep {SLEEP} & (setsid sleep {SLEEP} &); sleep {SLEEP}'


class Terminal:
  """The session program at a terminal of its own."""

  def __init__(self, tmp_path, url, *arguments):
    (tmp_path / 'work').mkdir()
    (tmp_path / 'work' / 'go.sh').write_text(COMMANDS)
    (tmp_path / 'rules').write_text('allow bash bash go.sh\n')
    folders = [f'--{name}={tmp_path / path}' for name, path in (('workspace', 'work'), ('state', 'state'))]
    command = [sys.executable, '-m', 'launch.session', f'--url={url}', *folders, f'--policy={tmp_path / "rules"}']
    self.at, inner = pty.openpty()
    self.process = subprocess.Popen(
      ['setsid', '--ctty', *command, *arguments],
      stdin=inner,
      stdout=inner,
      stderr=inner,
      cwd=ROOT,
      env={**os.environ, 'TERM': 'xterm', 'COLUMNS': '100', 'LINES': '40'},
    )
    os.close(inner)
    self.shown, self.history = '', tmp_path / 'state' / 'ses-1.jsonl'

  def type(self, text):
    os.write(self.at, text.encode())

  def until(self, happened, seconds=30.0):
    """Read what is shown until a function of nothing returns something true; return that."""
    end = time.monotonic() + seconds
    while not (found := happened()):
      assert time.monotonic() < end and self.process.poll() is None, self.shown[-3000:]
      if select.select([self.at], [], [], 0.0005)[0]:
        try:
          read = os.read(self.at, 2**16)
        except OSError:  # It has ended.
          continue
        self.shown += re.sub('\x1b\\[[0-9;?]*[A-Za-z]', '', read.decode(errors='replace').replace('\r', '\n'))
    return found

  def until_written(self, kind, number, seconds=30.0):
    self.until(lambda: len(self.records(kind)) > number, seconds)

  def records(self, kind):
    lines = self.history.read_text().split('\n')[:-1] if self.history.exists() else []
    return [record for record in map(json.loads, lines) if record['kind'] == kind]

  def close(self):
    self.process.kill()
    self.process.wait()
    os.close(self.at)


def left_running():
  """Return the processes of commands that are still there."""
  found = []
  for path in pathlib.Path('/proc').glob('[0-9]*/cmdline'):
    try:
      if SLEEP in path.read_text():
        found.append(path.parent.name)
    except OSError:
      continue
  return found


def press(tmp_path, count):
  """Press Ctrl-C in `count` commands, between 1 ms and 2 s after their start."""
  try:
    Shell(tmp_path)
  except UserError as error:
    pytest.skip(f'commands cannot be run here: {error}')
  with SessionServer(*[call('bash', command='bash go.sh')] * count, 'Done.') as server:
    terminal = Terminal(tmp_path, server.url)
    try:
      terminal.until(lambda: '/help' in terminal.shown)
      terminal.type('Go\r')
      terminal.shown = ''
      for number in range(count):
        terminal.until_written('running', number)
        time.sleep(0.001 * 2000 ** (number / max(1, count - 1)))
        terminal.type('\x03')
        terminal.until_written('reported', number, 5)
        answer = terminal.records('ran')[number]['result']
        assert not answer['ok'] and 'was interrupted by the person' in answer['text'], answer
        terminal.until(lambda: '\n>' in terminal.shown)
        assert not left_running() and 'Traceback' not in terminal.shown
        terminal.shown = ''
        terminal.type('\r')
      terminal.until(lambda: 'Done.' in terminal.shown)
    finally:
      terminal.close()


def test_ctrl_c_ends_a_command_and_the_session_goes_on(tmp_path):
  press(tmp_path, 3)


@pytest.mark.slow
def test_ctrl_c_ends_every_command(tmp_path):
  press(tmp_path, int(os.environ.get('INTERRUPTS', '25')))
