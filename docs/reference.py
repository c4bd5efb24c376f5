"""The pages that are made from README.md and the code when the documentation is built."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import multiprocessing
import pathlib
import re
from typing import Any

from absl import flags

import sdpo_jax
from sdpo_jax.config import Config
from sdpo_jax.config.fields import settings
from sdpo_jax.config.help import values_of

ROOT = pathlib.Path(__file__).parents[1]
MADE = 'Made from the code when the documentation is built.'


def pages() -> dict[str, str]:
  """Return the made pages by their place on the site."""
  return {
    'index.md': home((ROOT / 'README.md').read_text(encoding='utf-8')),
    'reference/settings.md': settings_page(),
    'reference/commands.md': commands_page(),
    'reference/python.md': interface_page(),
  }


def home(readme: str) -> str:
  """Return README.md with the links that work on the site; what lies outside docs/ is only named there."""

  def link(found: re.Match[str]) -> str:
    text, target = found.groups()
    if target.startswith(('docs/', 'http', '#')):
      return f'[{text}]({target.removeprefix("docs/")})'
    return text

  return re.sub(r'\[([^\]]*)\]\(([^)]*)\)', link, readme)


def settings_page() -> str:
  """Return all settings with their values, default and meaning, a section for each part of a config."""
  parts: dict[str, str] = {}  # A section comes where its first setting is, also if another one interrupts it.
  for name, value, hint, field in settings(Config()):
    section = name.rpartition('.')[0] or 'The run'
    parts.setdefault(section, f'\n## {section}\n\n| setting | values | default | meaning |\n|---|---|---|---|\n')
    default = json.dumps(value, ensure_ascii=False) if not isinstance(value, tuple) else json.dumps(list(value))
    cells = (f'`{name}`', values_of(hint, field.metadata['range']), f'`{default}`', field.metadata['doc'])
    parts[section] += f'| {" | ".join(map(_cell, cells))} |\n'
  intro = f'# Settings\n\n{MADE} Set one with `--config.NAME=VALUE`, or as an attribute in Python.\n'
  return intro + ''.join(parts.values())


def commands_page() -> str:
  """Return what every command does, and its flags."""
  names = sorted(path.stem for path in (ROOT / 'launch').glob('[a-z]*.py'))
  with multiprocessing.get_context('fork').Pool(1, maxtasksperchild=1) as pool:  # Flags of two commands share names.
    return '\n'.join([f'# Commands\n\n{MADE} Installed, they are `sdpo NAME`.\n', *pool.map(command_part, names, 1)])


def command_part(name: str) -> str:
  """Return the part of the page about one command, from its docstring and its flags."""
  module = importlib.import_module(f'sdpo_jax.launch.{name}')
  shared = flags.FLAGS.flags_by_module_dict().get('sdpo_jax.command', [])
  rows = [
    f'| `--{flag.name}` | {_cell(f"`{flag.default}`" if flag.default not in (None, []) else "")} | {_cell(flag.help)} |'
    for flag in [*flags.FLAGS.flags_by_module_dict().get(module.__name__, []), *shared]
  ]
  table = '\n'.join(['| flag | default | |', '|---|---|---|', *rows])
  return f'## {name}\n\n{_with_code(inspect.getdoc(module))}\n\n{table}\n'


def interface_page() -> str:
  """Return the signature and the docstring of everything that `sdpo_jax` offers."""
  parts = [f'# Python interface\n\n{MADE} [The guide](../python.md) shows how it is used.\n']
  for name in sorted({*sdpo_jax.__all__} - {'UserError'}):
    offered = getattr(sdpo_jax, name)
    if name == 'Config':
      parts.append('## sdpo_jax.Config\n\nAll settings of a run, as attributes: see [settings](settings.md).\n')
      continue
    parts.append(_documented(f'sdpo_jax.{name}', offered, '##'))
    if inspect.isclass(offered) and not dataclasses.is_dataclass(offered) or name == 'Step':
      methods = inspect.getmembers(offered, lambda member: inspect.isfunction(member))
      parts += [_documented(f'{name}.{known}', method, '###') for known, method in methods if known[0] != '_']
  return '\n'.join(parts)


def _documented(name: str, offered: Any, heading: str) -> str:
  signature = re.sub(r"'([\w.\[\], |]+)'", r'\1', str(inspect.signature(offered)))
  text = re.sub(r'^(Args|Raises|Returns):$', r'\n**\1**\n', inspect.getdoc(offered) or '', flags=re.MULTILINE)
  text = re.sub(r'^  (\w+): ', r'- `\1`: ', text, flags=re.MULTILINE)
  return f'{heading} {name}\n\n```python\n{name.rpartition(".")[2]}{signature}\n```\n\n{text}\n'


def _with_code(text: str) -> str:
  """Return a docstring with its indented commands as blocks of code."""
  lines, code = [], False
  for line in text.splitlines():
    if line.startswith('  ') != code and line:
      code = not code
      lines.append('```text' if code else '```\n')
    lines.append(line.removeprefix('  ') if code else line)
  return '\n'.join(lines + (['```'] if code else []))


def _cell(text: str) -> str:
  return ' '.join(str(text).split()).replace('|', '\\|').replace('<', '&lt;').replace('*', '\\*')
