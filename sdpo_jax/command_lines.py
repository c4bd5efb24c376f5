"""Command lines to print, spelled like the running command was, so that users can paste them."""

from __future__ import annotations

import os
import pkgutil
import re
import shlex
import sys

import sdpo_jax


def command_line(name: str, *arguments: str) -> str:
  """Return a command of `launch/` with its arguments, quoted for a shell.

  It is `sdpo NAME`, `python -m sdpo_jax.launch.NAME` or, in a checkout, `python -m launch.NAME`, depending on how this
  process was started; in other programs, a form that works with this copy of the package.
  """
  spec = sys.modules['__main__'].__spec__  # Of what `python -m` runs; None for a file.
  package = '' if spec is None else spec.name.rpartition('.')[0]
  if package in ('launch', 'sdpo_jax.launch'):
    words = ['python', '-m', f'{package}.{name}']
  elif os.path.basename(sys.argv[0]).startswith('sdpo ') or os.path.isdir(f'{sdpo_jax.__path__[0]}/launch'):
    words = ['sdpo', name]
  else:
    words = ['python', '-m', f'launch.{name}']
  return shlex.join([*words, *arguments])


def as_typed(text: str) -> str:
  """Return a text with `python -m launch.NAME` as `command_line` writes it, and, if installed, `launch.NAME`, too."""
  text = re.sub(r'python -m launch\.(\w+)', lambda found: command_line(found[1]), text)
  if 'launch.' not in text or not command_line('').startswith('sdpo'):
    return text
  names = '|'.join(module.name for module in pkgutil.iter_modules([f'{path}/launch' for path in sdpo_jax.__path__]))
  return re.sub(rf'(?<![\w./])launch\.({names})\b', r'sdpo \1', text)
