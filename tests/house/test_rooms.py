"""The rooms of the house: a module imports only rooms below its own, also where it imports late."""

import ast
import pathlib

from tests import tiny

ROOT = tiny.REPOSITORY
# From the top down; of two that fit a module, the longer name is its room.
ROOMS = """
  benchmarks tests
  launch
  configs
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
  models
  sdpo_jax.distributed
  sdpo_jax.config
  sdpo_jax.tables sdpo_jax.files sdpo_jax.liveness sdpo_jax.extras sdpo_jax.objective_settings
  sdpo_jax.types
  sdpo_jax.errors sdpo_jax.invisible
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
  for package in ('sdpo_jax', 'models', 'launch', 'configs'):
    for path in sorted((ROOT / package).rglob('*.py')):
      module = '.'.join(path.relative_to(ROOT).with_suffix('').parts)
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
  assert floor_of('sdpo_jax.training.loop') < floor_of('sdpo_jax.rollout.sampler') < floor_of('models.attention.splash')
  assert floor_of('sdpo_jax.types') > floor_of('sdpo_jax.config.schema') and floor_of('numpy') is None
