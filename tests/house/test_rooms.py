"""The rooms of the house: a module imports only rooms below its own, also where it imports late."""

import ast
import pathlib
import re
import subprocess
import sys

from tests.house import sources

# From the top down; of two that fit a module, the longer name is its room.
ROOMS = """
  benchmarks tests
  sdpo_jax.launch
  sdpo_jax.configs
  sdpo_jax.command sdpo_jax.interface
  sdpo_jax.terminal
  sdpo_jax.serving
  sdpo_jax.planner
  sdpo_jax.preflight
  sdpo_jax.inference
  sdpo_jax.quickstart
  sdpo_jax.training
  sdpo_jax.training.checkpoint
  sdpo_jax.reporting
  sdpo_jax.training.directory
  sdpo_jax.training.specs sdpo_jax.training.documents
  sdpo_jax.learning
  sdpo_jax.evaluation
  sdpo_jax.rollout
  sdpo_jax.teacher
  sdpo_jax.objective
  sdpo_jax.environments
  sdpo_jax.data
  sdpo_jax.models
  sdpo_jax.distributed
  sdpo_jax.config
  sdpo_jax.tables sdpo_jax.files sdpo_jax.liveness sdpo_jax.extras sdpo_jax.objective_settings
  sdpo_jax.types
  sdpo_jax.device_types
  sdpo_jax.errors sdpo_jax.invisible sdpo_jax.command_lines
""".strip().split('\n')
FLOORS = {room: floor for floor, rooms in enumerate(ROOMS) for room in rooms.split()}


def floor_of(module: str) -> int | None:
  """Return the floor of a module's room, 0 at the top; None for other packages."""
  rooms = [room for room in FLOORS if module == room or module.startswith(room + '.')]
  return FLOORS[max(rooms, key=len)] if rooms else None


def imported(path: pathlib.Path):
  """Names of the modules that a file imports, anywhere in it."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
      yield from (f'{node.module}.{alias.name}' for alias in node.names)


def test_every_module_is_in_a_room_and_no_arrow_points_up():
  up, outside, arrows = [], [], 0
  for module, path in sources.files().items():
    floor = floor_of(module)
    if floor is None and path.name != '__init__.py':
      outside.append(module)
    for other in imported(path):
      below = floor_of(other)
      if floor is not None and below is not None:
        arrows += 1
        up += [f'{module} -> {other}'] if below < floor else []
  assert up == [] and outside == []
  assert arrows > 500


def test_an_arrow_that_points_up_is_seen():
  assert (
    floor_of('sdpo_jax.training.loop')
    < floor_of('sdpo_jax.rollout.sampler')
    < floor_of('sdpo_jax.models.attention.splash')
  )
  assert floor_of('sdpo_jax.types') > floor_of('sdpo_jax.config.schema') and floor_of('numpy') is None


def test_every_module_has_one_name():
  """A wheel installs one package: what `models` or `launch` is in a user's environment is the user's."""
  top = re.compile(r'^\s*(?:from|import(?: [\w., ]+,)?) (?:models|launch|configs)\b', re.MULTILINE)
  listed = subprocess.run(
    ['git', 'ls-files', '*.py', '*.pyi', '*.md'], cwd=sources.ROOT, capture_output=True, text=True
  )
  assert [name for name in listed.stdout.split() if top.search((sources.ROOT / name).read_text())] == []
  for text in (
    'from models import huggingface',
    '  import configs.paper',
    'import os.path, models',
    'import a as b, launch',
  ):
    assert top.search(text)
  assert not top.search('from sdpo_jax import models') and not top.search('import sdpo_jax.models')


# The loaded modules of which one file has two; `__main__` is the command, which the console script imports instead.
_TWICE = """
import collections, runpy, sys
sys.argv = ['launch/check.py', '--config=configs/quickstart.py']
try:
  runpy.run_module('launch.check', run_name='__main__')
except SystemExit as ended:
  assert not ended.code, ended.code
files = collections.defaultdict(list)
for name, module in list(sys.modules.items()):
  files[getattr(module, '__file__', None) or name].append(name)
print([names for names in files.values() if len(names) > 1 and any('sdpo' in name for name in names)])
print(sum(name.startswith('sdpo_jax.models.') for name in sys.modules))
"""


def test_no_module_is_loaded_under_two_names():
  done = subprocess.run([sys.executable, '-c', _TWICE], cwd=sources.ROOT, capture_output=True, text=True, check=False)
  *_, twice, count = done.stdout.splitlines()
  assert (twice, done.returncode) == ('[]', 0) and int(count) > 10
