"""The door for models of strangers: a process with little time and memory reads their small files first.

A chat template is a program, and a tokenizer or a config may ask for any amount of work; see reading_child.py.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import signal
import subprocess
import sys

from sdpo_jax.errors import UserError
from sdpo_jax.models.reading_child import LARGE, RENDERED, SMALL, TEMPLATES

CPU_S, MEMORY = 5, 2**30  # Limits of the process: seconds of CPU time, bytes of address space.
WALL_S = 120.0  # Seconds to wait for the process, which shares the machine with others.
_SCRIPT = pathlib.Path(__file__).with_name('reading_child.py')
ANOTHER_TEMPLATE = 'name another template in model.chat_template (launch.sample: --chat_template)'


def check(root: pathlib.Path, *, template: bool = False) -> None:
  """Check that the files of a model or an adapter can be read with little time and memory.

  A directory is read once per process, unless it changes.

  Args:
    root: the directory.
    template: whether to check its chat templates, too, which are not applied if another is named.

  Raises:
    UserError: a file, which the message names, takes more.
  """
  for name, why in _refused(root).items():
    rendered = name.endswith(RENDERED)
    if template or not rendered:
      raise UserError(
        f'{root / name} {why}: {ANOTHER_TEMPLATE if rendered else "get it again, from a source that you trust"}.'
      )


@functools.lru_cache(maxsize=64)
def check_template(text: str, named: str) -> None:
  """Check a chat template that a user names; `named` begins the message."""
  for why in ask(pathlib.Path(), text).values():
    raise UserError(f'{named} {why}: {ANOTHER_TEMPLATE}.')


def _refused(root: pathlib.Path) -> dict[str, str]:
  files = [root / name for name in (*SMALL, *LARGE)] + sorted((root / TEMPLATES).glob('*'))
  stats = [(str(file), os.lstat(file), os.stat(file)) for file in files if os.path.exists(file)]
  key = tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, *both in stats for stat in both)
  return _read(root.absolute(), key)


@functools.lru_cache(maxsize=64)
def _read(root: pathlib.Path, key: tuple) -> dict[str, str]:
  return ask(root) if key else {}


def ask(root: pathlib.Path, template: str | None = None) -> dict[str, str]:
  """Return why files of a directory, or else a template, are refused, by name, according to a new process."""
  path = [place for place in sys.path if place not in ('', os.getcwd())]  # Where libraries are.
  limits = {'RLIMIT_CPU': CPU_S, 'RLIMIT_AS': MEMORY, 'RLIMIT_CORE': 0}
  question = {'root': str(root), 'template': template, 'path': path, 'limits': limits}
  # It parses hostile files: of the owner's environment, it gets only what libraries may need.
  environment = {'TOKENIZERS_PARALLELISM': 'false', 'LD_LIBRARY_PATH': os.environ.get('LD_LIBRARY_PATH', '')}
  try:
    ended = subprocess.run(
      [sys.executable, '-I', '-X', 'utf8', str(_SCRIPT)],
      input=json.dumps(question).encode(),
      capture_output=True,
      env=environment,
      cwd='/',
      start_new_session=True,  # Signals to the owner are not for it.
      timeout=WALL_S,
      check=False,
    )
    output, errors, code = ended.stdout, ended.stderr, ended.returncode
  except subprocess.TimeoutExpired as error:
    output, errors, code = error.stdout or b'', error.stderr or b'', None
  lines = [json.loads(line) for line in output.splitlines()]
  refused = {line[1]: line[2] for line in lines if line[0] == 'refused'}
  if lines[-1:] == [['done']]:
    return refused
  if len(lines) < 2 or code in (1, -signal.SIGTERM, -signal.SIGKILL):
    said = errors.decode(errors='replace').strip().splitlines()[-1:]
    raise RuntimeError(f'The process that reads models first failed ({code}): {"".join(said)}')
  took = {None: f'{WALL_S:.0f} s', -signal.SIGXCPU: f'{CPU_S} s of CPU time'}.get(code, f'{MEMORY >> 20} MiB of memory')
  return refused | {lines[-1][1]: f'takes more than {took}'}
