"""A digest of the code that determines what a grader returns: its definition and all that it needs, across files.

Only the statements of a file that the grader needs count, found by the names in them, so a grader may share a config
file with settings. Not counted are installed packages, which have versions, and the parts of this project that merely
pass questions and answers along. Comments, docstrings, formatting and file names do not count either.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
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
# Modules around the built-in graders that do not affect grading.
MACHINERY = (
  '__init__',
  'grader_child',
  'grader_code',
  'grader_process',
  'grading',
  'helper_process',
  'json_server',
  'outcomes',
  'registry',
  'remote',
  'reward_functions',
  'time_limit',
)
SETTINGS = 'get_config'  # A config file may define graders; its settings are compared separately.
UNKNOWN = 'not known'
_EVERYTHING = '*'  # In place of a name: the whole file.
_NAME_LENGTH = 100  # Longest text that may be a file name.
_NOT_CODE = ('ctx', 'kind', 'type_comment')  # Fields of syntax trees that repeat or annotate others.


def digest(grader: Any) -> str:
  """Return 16 hexadecimal digits that identify the behaviour of a grader or generator.

  Returns `UNKNOWN` for code that is not in a file.
  """
  waiting = definitions(grader)
  if not waiting:
    return UNKNOWN
  seen: set[tuple[pathlib.Path, str]] = set()
  parts: set[str] = set()
  while waiting:
    place = waiting.pop()
    if place not in seen:
      seen.add(place)
      found, needed = _read(*place)
      parts |= found
      waiting += needed
  return _hash('\n'.join(sorted(parts)).encode())


def definitions(grader: Any) -> list[tuple[pathlib.Path, str]]:
  """Return (file, top-level name) for the code of a grader or generator and of the functions that it holds."""
  waiting, seen, places = [grader], set(), []
  while waiting:
    value = waiting.pop()
    if id(value) in seen or not callable(value):
      continue
    seen.add(id(value))
    for holder in (value, vars(type(value)).get('__call__')):
      code = getattr(holder, '__code__', None)
      if isinstance(code, CodeType) and counts(file := pathlib.Path(code.co_filename).resolve()):
        places.append((file, code.co_qualname.partition('.')[0]))
    waiting += _held(value)
  return places


def _held(value: Any) -> list[Any]:
  """Return the values inside a callable that it may call."""
  if isinstance(value, functools.partial):
    return [value.func, *value.args, *value.keywords.values()]
  cells = []
  for cell in getattr(value, '__closure__', None) or ():
    with contextlib.suppress(ValueError):  # The cell is still empty.
      cells.append(cell.cell_contents)
  return [*cells, *(vars(value).values() if hasattr(value, '__dict__') and not isinstance(value, type) else ())]


def counts(file: pathlib.Path) -> bool:
  """Return whether a file's code counts: it is not installed, and of this project only graders count."""
  if file.is_relative_to(PACKAGE_FOLDER):
    return file.parent == ROOM_FOLDER and file.stem not in MACHINERY
  return not _is_installed(file)


def _is_installed(file: pathlib.Path) -> bool:
  """Return whether a file belongs to Python or an installed package, or does not exist."""
  if not file.is_file() or {'site-packages', 'dist-packages'} & set(file.parts):
    return True
  return any(file.is_relative_to(folder) for folder in _libraries())


@functools.cache
def _libraries() -> list[pathlib.Path]:
  return [pathlib.Path(sysconfig.get_path(name)).resolve() for name in ('stdlib', 'platstdlib')]


def _hash(content: bytes) -> str:
  return hashlib.sha256(content).hexdigest()[:16]


def _read(file: pathlib.Path, name: str) -> tuple[set[str], list[tuple[pathlib.Path, str]]]:
  """Return digests of the statements that define a name in a file, and the other definitions they need."""
  content = file.read_bytes()
  statements = _statements(content) if file.suffix == '.py' else None
  if statements is None:
    return {_hash(content)}, []
  known = {bound for statement in statements for bound in _bound(statement)}
  if name not in known:  # For example a lambda, or a whole module.
    name = _EVERYTHING
  parts: set[str] = set()
  needed: list[tuple[pathlib.Path, str]] = []
  for statement in statements:
    if name != _EVERYTHING and name not in _bound(statement):
      continue
    if isinstance(statement, ast.Import | ast.ImportFrom):
      used = [alias for alias in statement.names if name in (_EVERYTHING, _name_of(alias))]
      needed += [place for alias in used for place in _imported(statement, alias, file)]
      continue
    parts.add(_hash('\n'.join(_meaning(statement)).encode()))
    inner = list(ast.walk(statement))
    needed += [(file, node.id) for node in inner if isinstance(node, ast.Name) and node.id in known]
    needed += [place for node in inner for place in (*_late(node, file), *_beside(node, file))]
  return parts, needed


@functools.lru_cache(maxsize=64)
def _statements(content: bytes) -> tuple[ast.stmt, ...] | None:
  """Return the statements of Python code without its settings; None if the content is not Python."""
  try:
    tree = ast.parse(content)
  except (SyntaxError, ValueError):
    return None
  return tuple(node for node in tree.body if getattr(node, 'name', None) != SETTINGS)


def _bound(statement: ast.stmt) -> set[str]:
  """Return the names that a top-level statement defines or modifies."""
  if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
    return {statement.name}
  if isinstance(statement, ast.Import | ast.ImportFrom):
    return set(map(_name_of, statement.names))
  if isinstance(statement, ast.Expr):
    return {_root(statement.value.func)} if isinstance(statement.value, ast.Call) else set()
  if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Delete):
    targets = getattr(statement, 'targets', None) or [statement.target]
    return {_root(node) for target in targets for node in (getattr(target, 'elts', None) or [target])}
  inner = [node for node in ast.iter_child_nodes(statement) if isinstance(node, ast.stmt)]
  handlers = [node for handler in getattr(statement, 'handlers', []) for node in handler.body]
  return {name for node in (*inner, *handlers) for name in _bound(node)}


def _name_of(alias: ast.alias) -> str:
  return (alias.asname or alias.name).partition('.')[0]


def _root(node: ast.expr) -> str:
  """Return the first name in `name`, `name.attribute` and `name[…]`; '' for anything else."""
  while isinstance(node, ast.Attribute | ast.Subscript | ast.Starred):
    node = node.value
  return node.id if isinstance(node, ast.Name) else ''


def _meaning(node: Any) -> Iterator[str]:
  """Yield a syntax tree as lines that are the same in all Python versions: without empty fields and bare strings."""
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


def _late(node: ast.AST, file: pathlib.Path) -> Iterator[tuple[pathlib.Path, str]]:
  """Yield the definitions that an import nested in a function or another statement needs."""
  if isinstance(node, ast.Import | ast.ImportFrom):
    for alias in node.names:
      yield from _imported(node, alias, file)


def _imported(
  node: ast.Import | ast.ImportFrom, alias: ast.alias, file: pathlib.Path
) -> Iterator[tuple[pathlib.Path, str]]:
  """Yield the definitions that a part of an import needs from counted files."""
  if isinstance(node, ast.Import):
    yield from ((path, _EVERYTHING) for path in _files(alias.name))
    return
  if node.level:
    folder = file.parents[node.level - 1].joinpath(*(node.module.split('.') if node.module else []))
    module, submodule = _module(folder), _module(folder / alias.name)
  else:
    module, submodule = _files(node.module), _files(f'{node.module}.{alias.name}')
  if submodule:
    yield from ((path, _EVERYTHING) for path in submodule)
  else:
    yield from ((path, alias.name) for path in module)


def _module(path: pathlib.Path) -> list[pathlib.Path]:
  return [file.resolve() for file in (path.with_name(f'{path.name}.py'), path / '__init__.py') if file.is_file()]


def _files(name: str) -> list[pathlib.Path]:
  """Return the file of a module if it counts, without importing anything."""
  top, *rest = name.split('.')
  if top == PACKAGE_FOLDER.name:
    return [file for file in _module(PACKAGE_FOLDER.joinpath(*rest)) if counts(file)]
  try:
    spec = importlib.util.find_spec(top)
  except (ImportError, ValueError):
    return []
  if spec is None or spec.origin is None or _is_installed(origin := pathlib.Path(spec.origin).resolve()):
    return []
  return _module(origin.parent.joinpath(*rest)) if rest else [origin]


def _beside(node: ast.AST, file: pathlib.Path) -> Iterator[tuple[pathlib.Path, str]]:
  """Yield files in the same folder whose names occur as strings: files that this one reads or sends to a sandbox."""
  text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ''
  if '.' in text and len(text) < _NAME_LENGTH and text.isprintable() and pathlib.PurePath(text).name == text:
    if (file.parent / text).is_file():
      yield (file.parent / text).resolve(), _EVERYTHING
