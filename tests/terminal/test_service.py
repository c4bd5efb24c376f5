"""The terminal program at a real service: its engine learns, and only what its model says is the test's."""

import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest

from sdpo_jax.config import Config
from sdpo_jax.environments.workspace.tools import TOOLS
from sdpo_jax.terminal import keyboard, program
from tests import tiny
from tests.serving import openai_server, session_world

PATIENCE = 300.0  # Seconds after which a program that does not answer is given up; none is expected to take them.
WRITE_1, WRITE_2 = (
  json.dumps({'name': 'write', 'arguments': {'path': 'a.py', 'content': f'x = {number}\n'}}) for number in (1, 2)
)
# The prompts of the service that tests share are short: of the tools the model is told of one.
RULES = ''.join(f'never {name}\n' for name in TOOLS if name != 'write')


@pytest.fixture(scope='module')
def served(tmp_path_factory):
  """Yield a service behind a port, and what its model says."""
  folder = tmp_path_factory.mktemp('terminal')
  with session_world.world(folder, calls=(WRITE_1, WRITE_2)) as (service, says):
    config = Config(name='terminal')
    config.serve = service.settings
    with openai_server.behind_port(service, config) as running:
      yield running, says


@pytest.fixture
def place(tmp_path):
  """Return a workspace, and a file of rules beside it."""
  (tmp_path / 'work').mkdir()
  (tmp_path / 'rules').write_text(RULES)
  return tmp_path


def say_all(says):
  says.say(session_world.called(WRITE_1), session_world.called(WRITE_2), 'Done.')


@pytest.mark.slow
def test_a_denial_is_learned_and_the_next_proposal_is_of_the_new_version(served, place, capsys):
  running, says = served
  say_all(says)
  (place / 'script').write_text('Go\nn 2\n/learned\ny\n/undo\n/diff\n/retry 0\nq\n')
  says.say('Done.')
  code = program.run(
    program.CommandOptions(
      url=running.url,
      adapter='script',
      workspace=str(place / 'work'),
      script=str(place / 'script'),
      policy=str(place / 'rules'),
      state=str(place / 'state'),
    )
  )
  out = capsys.readouterr().out
  assert code == 0 and (place / 'work' / 'a.py').read_text() == 'x = 2\n'
  assert re.search(r'Learned: version 0 → 1 in \d+\.\d\d s, from turn 0\.', out)
  before, after = map(float, re.search(r'Divergence .*: (\S+) → (\S+) nats', out).groups())
  assert 0 <= after < before
  assert 'Tokens that changed most' in out
  assert re.search(r'Version 2 equals version 0; version 1 \(.*turn 0\) is undone\.', out)
  assert 'From version 0 to 2' in out and 'turn 0, version 0' in out and 'again, version 2\n│ Done.' in out
  adapter = next(each for each in running.account.adapters() if each.name == 'script')
  assert [version.reason for version in running.account.versions(adapter.id)] == ['create', 'feedback', 'undo']


# At a terminal.


class Terminal:
  """A terminal of tmux, with a program in it."""

  def __init__(self, folder: pathlib.Path):
    self._folder, self._starts, self._tmux = folder, 0, ['tmux']

  def start(self, *arguments: str) -> None:
    # A server of its own each time: one that ends would take the next one's socket with it.
    self._starts += 1
    self._tmux = ['tmux', '-u', '-S', str(self._folder / f'tmux{self._starts}'), '-f', os.devnull]
    words = ' '.join(map(shlex.quote, [sys.executable, '-m', 'launch.session', *arguments]))
    environment = {**os.environ, 'LANG': 'C.UTF-8', 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(tiny.REPOSITORY)}
    environment.pop('NO_COLOR', None)
    # What the program has said stays to be read when it has ended.
    shown = f'{words}; echo "exit code $?"; exec cat'
    command = [*self._tmux, 'new-session', '-d', '-x', '110', '-y', '50', shown]
    subprocess.run(command, check=True, env=environment, cwd=self._folder)

  def tell(self, *arguments: str) -> str:
    return subprocess.run([*self._tmux, *arguments], check=True, capture_output=True, text=True).stdout

  def press(self, *keys: str) -> None:
    self.tell('send-keys', *keys)

  def type(self, text: str) -> None:
    self.tell('send-keys', '-l', text)
    self.press('Enter')

  def shows(self, *texts: str) -> str:
    """Return what is to be seen, with its colours, once it has all of these texts, one after the other."""
    deadline = time.monotonic() + PATIENCE
    pattern = re.compile('.*'.join(map(re.escape, texts)), re.DOTALL)
    while not pattern.search(seen := self.tell('capture-pane', '-p', '-J', '-S', '-1000')):
      assert time.monotonic() < deadline, seen
      time.sleep(0.05)
    return self.tell('capture-pane', '-p', '-J', '-e', '-S', '-1000')

  def kill(self) -> None:
    """Kills the program, and nothing else."""
    [shell] = self.tell('list-panes', '-F', '#{pane_pid}').split()
    [child] = pathlib.Path(f'/proc/{shell}/task/{shell}/children').read_text().split()
    os.kill(int(child), signal.SIGKILL)

  def end(self) -> None:
    subprocess.run([*self._tmux, 'kill-server'], check=False, capture_output=True)


@pytest.fixture
def terminal(tmp_path):
  if shutil.which('tmux') is None:
    pytest.skip('tmux is not installed')
  made = Terminal(tmp_path)
  yield made
  made.end()


@pytest.mark.slow
def test_somebody_at_a_terminal_denies_is_killed_goes_on_and_approves(served, place, terminal):
  running, says = served
  say_all(says)
  states = f'--state={place / "state"}'
  options = ['--adapter=typed', f'--workspace={place / "work"}', f'--policy={place / "rules"}']
  terminal.start(f'--url={running.url}', states, *options)
  terminal.shows('at version 0; /help lists keys and commands', '>')
  terminal.type('Go')
  seen = terminal.shows('+x = 1', '[y] approve', '[q] quit')
  assert re.search(r'\x1b\[[0-9;]*32m\+x = 1', seen)  # Green.
  time.sleep(2 * keyboard.PAUSE_S)
  terminal.press('n')
  terminal.shows('Why?')
  terminal.type('2')
  terminal.shows('Learned: version 0 → 1', '+x = 2', '[y] approve')
  terminal.kill()
  terminal.shows('exit code 137')
  assert not (place / 'work' / 'a.py').exists()
  terminal.end()
  terminal.start(states, '--resume')
  terminal.shows('2 turns so far', '+x = 2', '[y] approve')
  terminal.press('x', 'y')
  terminal.shows('What was typed is ignored')
  time.sleep(2 * keyboard.PAUSE_S)
  terminal.press('y')
  terminal.shows('Wrote a.py', 'Done.', '>')
  assert (place / 'work' / 'a.py').read_text() == 'x = 2\n'
  terminal.type('/learned')
  terminal.shows('Divergence from the teacher', 'Tokens that changed most', '>')
  terminal.type('/versions')
  terminal.shows('feedback', 'turn 0', '>')
  terminal.press('C-c')
  terminal.shows('Ctrl-C again leaves')
  terminal.press('C-c')
  terminal.shows('Resume the session with', 'exit code 130')
