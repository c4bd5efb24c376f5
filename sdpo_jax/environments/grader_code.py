"""Which code decides what graders say: the files that define them, those that these import, and those that these name.

Not counted are installed packages, which have versions, and of this project what only carries questions and answers to
and fro. Comments, docstrings and formatting do not count either.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
import contextlib
import functools
import hashlib
import importlib.util
import pathlib
import sysconfig
from types import CodeType
from typing import Any

ROOM_FOLDER = pathlib.Path(__file__).resolve().parent  # The built-in graders.
PACKAGE_FOLDER = ROOM_FOLDER.parent
# Packages of this project; of them only the built-in graders count, and of those not the machinery around them.
PROJECT = ('sdpo_jax', 'models', 'configs', 'launch', 'benchmarks')
MACHINERY = ('__init__', 'grader_code', 'grading', 'outcomes', 'registry', 'remote', 'reward_functions', 'time_limit')
SETTINGS = 'get_config'  # A config file may define graders; its settings are compared as such.
_NAMED_FILE = 100  # Characters at most of a text that may be the name of a file.
_NOT_CODE = ('ctx', 'kind', 'type_comment')  # Fields of syntax trees that repeat, or comment on, others.


def digests(graders: Iterable[Any]) -> dict[str, str]:
  """Return a digest of every file that decides what these graders, or generators, say, by the name of the file.

  A grader whose code lies in no file is 'not known', under the name of its type.
  """
  waiting: list[pathlib.Path] = []
  found: dict[str, str] = {}
  for grader in graders:
    files = files_of(grader)
    waiting += files
    if not files:
      found[f'{type(grader).__module__}.{type(grader).__qualname__}'] = 'not known'
  contents: dict[pathlib.Path, str] = {}
  while waiting:
    file = waiting.pop()
    if file not in contents:
      content = file.read_bytes()
      tree = _parsed(file, content)
      contents[file] = _digest(content if tree is None else '\n'.join(_meaning(tree)).encode())
      waiting += [] if tree is None else [*_imported(tree, file), *_named(tree, file)]
  names = [file.name for file in contents]
  for file, digest in contents.items():
    alone = names.count(file.name) == 1 and file.stem != '__init__'
    found[file.name if alone else f'{file.parent.name}/{file.name}'] = digest
  return dict(sorted(found.items()))


def files_of(grader: Any) -> list[pathlib.Path]:
  """Return the files in which a grader, a reward function or a generator is written, and the functions that it holds."""
  waiting, seen, files = [grader], set(), []
  while waiting:
    value = waiting.pop()
    if id(value) in seen or not callable(value):
      continue
    seen.add(id(value))
    codes = [getattr(found, '__code__', None) for found in (value, vars(type(value)).get('__call__'))]
    for code in codes:
      file = pathlib.Path(code.co_filename).resolve() if isinstance(code, CodeType) else None
      if file is not None and file.is_file() and _counts(file) and file not in files:
        files.append(file)
    waiting += _held(value)
  return files


def _held(value: Any) -> list[Any]:
  """What a callable holds that may be called by it."""
  if isinstance(value, functools.partial):
    return [value.func, *value.args, *value.keywords.values()]
  cells = []
  for cell in getattr(value, '__closure__', None) or ():
    with contextlib.suppress(ValueError):  # Nothing is in it yet.
      cells.append(cell.cell_contents)
  return [*cells, *(vars(value).values() if hasattr(value, '__dict__') and not isinstance(value, type) else ())]


def _counts(file: pathlib.Path) -> bool:
  """Whether a file is neither installed nor a part of this project that decides nothing."""
  if file.is_relative_to(PACKAGE_FOLDER):
    return file.parent == ROOM_FOLDER and file.stem not in MACHINERY
  return not _is_installed(file)


def _digest(content: bytes) -> str:
  return hashlib.sha256(content).hexdigest()[:16]


def _parsed(file: pathlib.Path, content: bytes) -> ast.Module | None:
  """The syntax of a Python file, without its settings; None where it is something else."""
  if file.suffix != '.py':
    return None
  try:
    tree = ast.parse(content)
  except (SyntaxError, ValueError):
    return None
  tree.body = [node for node in tree.body if getattr(node, 'name', None) != SETTINGS]
  return tree


def _meaning(node: Any) -> Iterator[str]:
  """What a syntax tree says, line by line, the same in all versions of Python: without empty fields and bare texts."""
  if isinstance(node, ast.AST):
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
      return
    yield type(node).__name__
    for name, value in ast.iter_fields(node):
      if name not in _NOT_CODE and value is not None and value != []:
        yield f'.{name}'
        yield from _meaning(value)
    yield '/'
  elif isinstance(node, list):
    for item in node:
      yield from _meaning(item)
    yield ';'
  else:
    yield repr(node)


def _imported(tree: ast.Module, file: pathlib.Path) -> Iterator[pathlib.Path]:
  """The files that a file imports anywhere in it and that count."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.level:
      folder = file.parents[node.level - 1]
      parts = (node.module or '').split('.') if node.module else []
      yield from _files_of(folder, parts, node.names)
      continue
    elif isinstance(node, ast.ImportFrom) and node.module:
      names = [node.module, *(f'{node.module}.{alias.name}' for alias in node.names)]
    else:
      continue
    for name in names:
      yield from _files(name)


def _files_of(folder: pathlib.Path, parts: list[str], names: list[ast.alias]) -> Iterator[pathlib.Path]:
  for name in ('', *(alias.name for alias in names)):
    yield from _module(folder.joinpath(*parts, *([name] if name else [])))


def _module(path: pathlib.Path) -> list[pathlib.Path]:
  return [file.resolve() for file in (path.with_name(f'{path.name}.py'), path / '__init__.py') if file.is_file()]


def _files(name: str) -> list[pathlib.Path]:
  """The file of a module if it counts; nothing is imported for it."""
  top, *rest = name.split('.')
  if top in PROJECT:
    return [file for file in _module(PACKAGE_FOLDER.parent.joinpath(top, *rest)) if top == 'sdpo_jax' and _counts(file)]
  try:
    spec = importlib.util.find_spec(top)
  except (ImportError, ValueError):
    return []
  if spec is None or spec.origin is None or _is_installed(origin := pathlib.Path(spec.origin).resolve()):
    return []
  if not rest or not spec.submodule_search_locations:
    return [origin]
  return [origin, *_module(origin.parent.joinpath(*rest))]


def _is_installed(file: pathlib.Path) -> bool:
  """Whether a file is of Python itself, of an installed package, or no file at all."""
  if not file.is_file() or {'site-packages', 'dist-packages'} & set(file.parts):
    return True
  return any(file.is_relative_to(folder) for folder in _libraries())


@functools.cache
def _libraries() -> list[pathlib.Path]:
  return [pathlib.Path(sysconfig.get_path(name)).resolve() for name in ('stdlib', 'platstdlib')]


def _named(tree: ast.Module, file: pathlib.Path) -> Iterator[pathlib.Path]:
  """The files beside a file whose names stand in it as texts: what it reads, or hands to a sandbox."""
  for node in ast.walk(tree):
    text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ''
    if '.' in text and len(text) < _NAMED_FILE and text.isprintable() and pathlib.PurePath(text).name == text:
      if (file.parent / text).is_file():
        yield (file.parent / text).resolve()
