"""The code that README.md and docs/*.md show: its blocks, and a program that runs those of a page in order."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing.connection
import multiprocessing.process
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import traceback

import pytest

from tests import forked_commands, tiny

PAGES = ['README.md', 'CONTRIBUTING.md', *(f'docs/{path.name}' for path in (tiny.REPOSITORY / 'docs').glob('*.md'))]
# Those about a system, whose blocks take about as long as all others.
# A config on the page imports one of ours, which names its model relative to where it was imported from.
IMPORTED_THERE = ('docs/tutorial.md',)
OF_SYSTEMS = tuple(f'docs/{name}.md' for name in ('sessions', 'cartridges', 'lora', 'serving', 'engine', 'teachers'))
LINKED = ('sdpo_jax', 'models', 'launch', 'configs', 'examples', 'benchmarks', 'requirements.txt')
OUTPUT = ('text', 'json', 'bibtex', 'diff')  # Languages of blocks that are not code.
STEPS = 2  # Training steps of a run, whatever the page says.
_EXPORTED = '.exported'  # File with the variables that a command sets for those after it.
_BLOCK = re.compile(r'(?:<!-- not run: ([^\n]*?) -->\n)?^( *)```([^\n]*)\n(.*?)^\2```$', re.MULTILINE | re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Block:
  """A fenced block of a page."""

  page: str
  line: int
  language: str
  text: str
  reason: str | None  # Why it is not run; None: it is.


def blocks(page: str) -> list[Block]:
  """Return the fenced blocks of a page."""
  text = (tiny.REPOSITORY / page).read_text(encoding='utf-8')
  return [
    Block(page, text.count('\n', 0, found.start(2)) + 1, found[3].strip(), _without(found[2], found[4]), found[1])
    for found in _BLOCK.finditer(text)
  ]


def _without(indent: str, text: str) -> str:
  return re.sub(f'^{indent}', '', text, flags=re.MULTILINE)


def commands(text: str) -> list[str]:
  """Return the commands of a block of shell lines, without comments; a `\\` joins lines, and so do open quotes."""
  found, waiting = [], ''
  for line in text.splitlines():
    waiting += line + '\n'
    try:
      words = shlex.split(waiting, comments=True)
    except ValueError:
      continue
    if not waiting.rstrip().endswith('\\') and not (re.search(r"<<'?(\w+)'?", waiting) and not _closed(waiting)):
      found += [waiting.strip()] if words else []
      waiting = ''
  return found + ([waiting.strip()] if waiting.strip() else [])


def _closed(text: str) -> bool:
  """Whether the here-document that a text begins has ended."""
  word = re.search(r"<<'?(\w+)'?", text)[1]
  return text.rstrip().rpartition('\n')[2] == word


class Page:
  """Runs the blocks of a page in order, in the current directory; Python blocks share their names.

  Everything runs in forks, which have the imports done; this process itself computes nothing, so that it can fork.
  """

  def __init__(self):
    self._services: list[int] = []  # Their processes.
    context = multiprocessing.get_context('fork')
    self._python, there = context.Pipe()
    self._interpreter = context.Process(target=_interpret, args=(there,), daemon=True)
    self._interpreter.start()

  def run(self, block: Block) -> None:
    if block.language == 'python':
      self._python.send(block)
      assert self._python.recv(), f'{block.page}:{block.line} failed'
      return
    for command in commands(block.text):
      self._command(command, block)

  def _command(self, command: str, block: Block) -> None:
    print(f'$ {command}', flush=True)
    words = shlex.split(command.replace('\\\n', ' '), comments=True)
    if words[-1] == '&':
      self._serve(words[:-1])
    elif words[:2] == ['python', '-m'] and words[2].startswith('launch.') and not set(words) & {'|', '>', '&&', ';'}:
      code = _forked(words[2], words[3:])
      assert code == 0, f'{block.page}:{block.line}: {command} ended with {code}'
    else:
      text = command.replace('python ', f'{sys.executable} ', 1) if words[0] == 'python' else command
      text = f'[ ! -e {_EXPORTED} ] || . {_EXPORTED}; set -a\n{text}\nexport -p > {_EXPORTED}'
      done = subprocess.run(['bash', '-e', '-o', 'pipefail', '-c', text], check=False)
      assert done.returncode == 0, f'{block.page}:{block.line}: {command} ended with {done.returncode}'

  def _serve(self, words: list[str]) -> None:
    """Start a service, and wait until it is ready."""
    reading, writing = os.pipe()
    service = os.fork()
    if service == 0:
      os.close(reading)
      os.dup2(writing, 2)
      forked_commands.run_as_process(words[1:])
    os.close(writing)
    self._services.append(service)
    said = open(reading)
    for line in said:
      print(line, end='', flush=True)
      if line.startswith('Ready'):
        break
    else:
      raise AssertionError(f'{words} ended before it was ready')
    threading.Thread(target=said.read, daemon=True).start()

  def close(self) -> None:
    self._interpreter.kill()
    for service in self._services:
      os.kill(service, signal.SIGTERM)
      os.waitpid(service, 0)


def _interpret(asked: multiprocessing.connection.Connection) -> None:
  """Execute blocks of Python, all with the same names; say of each whether it went well."""
  names = {'__name__': '__page__'}
  while True:
    block = asked.recv()
    try:
      exec(compile(block.text, f'{block.page}:{block.line}', 'exec'), names)
    except BaseException:
      traceback.print_exc()
      asked.send(False)
      raise
    asked.send(True)


def _forked(module: str, arguments: list[str]) -> int:
  """Run a command in a fork of this process, which has the imports done; return its exit code."""
  child = os.fork()
  if child:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
  forked_commands.run_as_process(['-m', module, *arguments])


def main() -> None:
  """Run the blocks of one page: python -m tests.docs.pages README.md, in a folder with what the page needs."""
  from sdpo_jax.training import loop

  whole = loop.steps_of
  loop.steps_of = lambda config, *arguments, **named: whole(_shortened(config), *arguments, **named)
  page = Page()
  try:
    for block in blocks(sys.argv[1]):
      if block.reason is None and block.language not in OUTPUT:
        began = time.monotonic()
        page.run(block)
        print(f'{block.page}:{block.line}: {time.monotonic() - began:.1f} s', flush=True)
      elif block.language == 'json' and block.reason is None:
        json.loads(block.text)
  finally:
    page.close()


def run_as_shown(page: str, folder: pathlib.Path) -> None:
  """Test the blocks of a page in a folder with what the root of the repository has."""
  if not any(block.reason is None and block.language not in OUTPUT for block in blocks(page)):
    pytest.skip('nothing on it is run')
  for name in LINKED:
    (folder / name).symlink_to(tiny.REPOSITORY / name)
  variables = tiny.environment(quick=True) | {'PYTHONPATH': str(tiny.REPOSITORY), 'NO_COLOR': '1'}
  variables['XDG_STATE_HOME'] = str(folder / 'state')
  variables['PATH'] = f'{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ["PATH"]}'
  line = ['-m', 'tests.docs.pages', page]
  if page in IMPORTED_THERE:
    done = subprocess.run(
      [sys.executable, *line], cwd=folder, env=variables, capture_output=True, text=True, check=False
    )
  else:
    done = forked_commands.run(line, variables, folder)
  print(done.stdout, done.stderr[-20_000:])
  assert done.returncode == 0


def _shortened(config):
  config.trainer.total_training_steps = min(config.trainer.total_training_steps, STEPS)
  return config


if __name__ == '__main__':
  main()
