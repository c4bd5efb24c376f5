"""What is typed while the model draws, at a real pseudo-terminal: it decides nothing, and becomes no reason."""

import contextlib
import os
import pathlib
import pty
import random
import re
import subprocess
import sys
import threading
import time

import pytest

from sdpo_jax.terminal import keyboard
from tests import tiers, tiny
from tests.terminal.session_server import SessionServer, call

PATIENCE = 120.0  # Seconds after which a program that shows nothing is given up.
WORDS = (
  'by the way',
  'only try this',
  'yes',
  'no, not that',
  'and now',
  'y',
  'n',
  'a',
  'q',
  '/quit',
  '/undo',
  'easy',
  ' ',
)
CONTROLS = (
  '\r',
  '\r',
  '\n',
  '\x04',
  '\x1b',
  '\x1by',
  '\x1b[A',
  '\x1b[200~y\r\x1b[201~',
  '\x1b[200~n\x1b[201~',
  '\t',
  '\x7f',
  'ÿ',
  '日',
)
BASH = 'ls -la'


def random_text(seed):
  """Return a text of words that contain choices, and of keys that end, edit or quote lines."""
  chance = random.Random(seed)
  return ''.join(chance.choice(WORDS if chance.random() < 0.6 else CONTROLS) for _ in range(chance.randint(1, 8)))


class Typist:
  """The program at a pseudo-terminal, and who types at it."""

  def __init__(self, folder: pathlib.Path, url: str, term: str):
    (folder / 'work').mkdir()
    (folder / 'rules').write_text('never bash')
    options = [f'--url={url}', f'--workspace={folder / "work"}', f'--state={folder}', f'--policy={folder / "rules"}']
    options[2] += '/state'
    self._master, slave = pty.openpty()
    environment = {**os.environ, 'TERM': term, 'PYTHONPATH': str(tiny.REPOSITORY), 'PROMPT_TOOLKIT_NO_CPR': '1'}
    command = [sys.executable, '-m', 'launch.session', *options]
    streams = dict.fromkeys(('stdin', 'stdout', 'stderr'), slave)
    self.program = subprocess.Popen(command, env=environment, cwd=folder, start_new_session=True, **streams)
    os.close(slave)
    self._shown = b''
    threading.Thread(target=self._read, daemon=True).start()

  def _read(self):
    with contextlib.suppress(OSError):  # The end of a pseudo-terminal.
      while more := os.read(self._master, 1 << 16):
        self._shown += more

  @property
  def shown(self) -> str:
    return re.sub(r'\x1b\[[0-9;?]*[A-Za-z]', '', self._shown.decode(errors='replace')).replace('\r', '')

  def type(self, text: str) -> None:
    os.write(self._master, text.encode())

  def wait(self, *texts: str, patience: float = PATIENCE) -> None:
    """Wait until all of these are shown, one after the other."""
    deadline = time.monotonic() + patience
    while not re.search('.*'.join(map(re.escape, texts)), self.shown, re.DOTALL):
      assert time.monotonic() < deadline and self.program.poll() is None, self.shown[-2000:]
      time.sleep(0.01)

  def choose(self, keys: str, shown: str) -> None:
    """Type a choice until it is taken: a busy program may only now read what was typed before, and ignores both."""
    for patience in (PATIENCE / 4, PATIENCE / 2, PATIENCE):
      self.type(keys)
      with contextlib.suppress(AssertionError):
        return self.wait(shown, patience=patience)
    raise AssertionError(self.shown[-2000:])

  def end(self) -> None:
    self.program.kill()
    self.program.wait()
    os.close(self._master)


def type_ahead(typist: Typist, text: str, chance: random.Random) -> None:
  """Type at once, or letter by letter as people do, past the question."""
  if chance.random() < 0.5:
    typist.type(text)
    return
  for letter in text:
    typist.type(letter)
    time.sleep(chance.uniform(0.01, 0.12))


SAMPLE = [('xterm', 0, 3), ('dumb', 3, 3)]
HUNDRED = [(term, 10 * first, 10) for first in range(1, 6) for term in ('xterm', 'dumb')]


@pytest.mark.parametrize('term, first, count', tiers.cases(SAMPLE + HUNDRED, default=SAMPLE, slow=HUNDRED[:2]))
def test_what_is_typed_while_the_model_draws_decides_nothing(tmp_path, term, first, count):
  calls = [call('write', path=f'{number}.py', content='x = 1\n') for number in range(count + 1)]
  with SessionServer(*calls) as server:
    typists, fingers = [], []

    def draw():
      if len(server.turns) == count:
        return
      number = first + len(server.turns)
      typing = typists[0], random_text(number), random.Random(number)
      fingers.append(threading.Thread(target=type_ahead, args=typing))
      fingers[-1].start()
      time.sleep(0.05)

    server.drawing = draw
    typists.append(typist := Typist(tmp_path, server.url, term))
    try:
      typist.wait('lists keys and commands', '>')
      typist.type('Go\r')
      for number in range(count):
        typist.wait(f'++ {number}.py', '[q] quit')
        # Nothing that was typed meanwhile has shifted a row.
        assert re.search(rf'\n│ --- {number}.py\n│ \+\+\+ {number}.py\n', typist.shown)
        fingers[number].join()
        time.sleep(keyboard.PAUSE_S + 0.15)
        assert len(server.decisions()) == number and typist.program.poll() is None, repr(random_text(first + number))
        typist.choose('y\r' if term == 'dumb' else 'y', f'Wrote {number}.py')
    finally:
      typist.end()
    assert server.decisions() == [{'decision': 'approve'}] * count and server.lessons == 0
    assert [len(turn['messages']) for turn in server.turns[:count]] == [1] + [0] * (count - 1)
    assert sorted(path.name for path in (tmp_path / 'work').iterdir()) == sorted(f'{each}.py' for each in range(count))
