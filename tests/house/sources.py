"""What the product's files import and define, read from their text: the house that the ratchet tests measure."""

from __future__ import annotations

import ast
from collections.abc import Mapping
import functools
import pathlib

from tests import tiny

ROOT = tiny.REPOSITORY
PACKAGES = ('sdpo_jax', 'models', 'launch', 'configs')
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DOCUMENTED = (ast.Module, ast.ClassDef, *_FUNCTIONS)


def files(root: pathlib.Path = ROOT) -> dict[str, pathlib.Path]:
  """Return the product's files by the names of their modules."""
  paths = sorted(path for package in PACKAGES for path in (root / package).rglob('*.py'))
  return {module_of(path, root): path for path in paths}


def module_of(path: pathlib.Path, root: pathlib.Path = ROOT) -> str:
  """Return the name under which a file of the product is imported."""
  name = '.'.join(path.relative_to(root).with_suffix('').parts).removesuffix('.__init__')
  return name if name.startswith('sdpo_jax') else f'sdpo_jax.{name}'


@functools.cache
def _tree(path: pathlib.Path) -> ast.Module:
  return ast.parse(path.read_text())


def _for_types_alone(tree: ast.Module) -> set[ast.stmt]:
  """Return the imports under `TYPE_CHECKING`."""
  blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and 'TYPE_CHECKING' in ast.unparse(node.test)]
  return {node for block in blocks for statement in block.body for node in ast.walk(statement)}


@functools.cache
def imports(root: pathlib.Path = ROOT, *, types: bool = False) -> dict[str, set[str]]:
  """Return module → the product's modules that it imports, anywhere in it; with `types` also for type checkers."""
  modules = files(root)
  graph = {}
  for module, path in modules.items():
    found = set()
    left_out = set() if types else _for_types_alone(_tree(path))
    for statement in ast.walk(_tree(path)):
      if statement in left_out:
        continue
      if isinstance(statement, ast.Import):
        found |= {alias.name for alias in statement.names}
      elif isinstance(statement, ast.ImportFrom) and statement.module:
        found |= {statement.module, *(f'{statement.module}.{alias.name}' for alias in statement.names)}
    graph[module] = {name for name in found if name in modules and name != module}
  return graph


def closure(graph: Mapping[str, set[str]], module: str) -> set[str]:
  """Return the modules that are read with one, itself and the packages that they lie in included."""
  seen, waiting = set(), [module]
  while waiting:
    name = waiting.pop()
    if name in graph and name not in seen:
      seen.add(name)
      waiting += [*graph[name], name.rpartition('.')[0]]
  return seen


def circles(graph: Mapping[str, set[str]]) -> list[set[str]]:
  """Return the largest sets of modules that all import one another, directly or not."""
  reached, left = {}, dict(graph)
  while left.keys() != reached.keys():  # What imports nothing that is left, or is imported by nothing, is in no circle.
    wanted, reached = set().union(*left.values()), left
    left = {module: found & wanted & reached.keys() for module, found in reached.items() if module in wanted}
    left = {module: found for module, found in left.items() if found}
  for middle, beyond in left.items():
    for found in left.values():
      if middle in found:
        found |= beyond
  found = {frozenset(other for other in those if module in left[other]) for module, those in left.items()}
  return [set(circle) for circle in found if circle]


def lines(path: pathlib.Path) -> int:
  return len(path.read_text().splitlines())


def code_lines(path: pathlib.Path) -> int:
  """Return the lines of a file that are neither blank nor part of a comment or docstring alone."""
  prose = set()
  for node in ast.walk(_tree(path)):
    if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
      prose |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
  return sum(
    bool(line.strip()) and not line.strip().startswith('#') and number not in prose
    for number, line in enumerate(path.read_text().splitlines(), 1)
  )


def takes(name: str, path: pathlib.Path) -> list[str]:
  """Return the functions of a file with an argument that is annotated with a class of that name."""
  return [
    function.name
    for function in ast.walk(_tree(path))
    if isinstance(function, _FUNCTIONS)
    for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    if argument.annotation is not None
    and any(
      (isinstance(part, ast.Name) and part.id == name) or (isinstance(part, ast.Attribute) and part.attr == name)
      for part in ast.walk(argument.annotation)
    )
  ]


def defined(path: pathlib.Path) -> set[str]:
  """Return the names of a file's classes and functions, also of those in others."""
  return {node.name for node in ast.walk(_tree(path)) if isinstance(node, (ast.ClassDef, *_FUNCTIONS))}


def public_classes(path: pathlib.Path) -> list[str]:
  """Return the names of the classes that a file defines for others."""
  return [node.name for node in _tree(path).body if isinstance(node, ast.ClassDef) and node.name[0] != '_']
