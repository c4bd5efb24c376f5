"""Runs that are started in processes of their own, killed, started again, and compared bit for bit."""

import json
import os
import pathlib

import chex
import jax
import numpy as np

from sdpo_jax.inference import runs
from sdpo_jax.learning.update import abstract_state
from sdpo_jax.training.checkpoint.checkpoints import Checkpoints
from sdpo_jax.training.opening import make_session
from sdpo_jax.training.specs import update_spec
from tests import forked_commands, tiny
from tests.local_server import free_port

STEPS = 5
# Put behind a config: the process kills itself, as if from outside, at some moment.
KILLED = """
import os, signal
from sdpo_jax.training.checkpoint import checkpoints
from sdpo_jax.training.metrics import MetricsWriter

def die_after(owner, name, now):
  function = getattr(owner, name)
  def act(*arguments, **options):
    result = function(*arguments, **options)
    if now(*arguments):
      os.kill(os.getpid(), signal.SIGKILL)
    return result
  setattr(owner, name, act)

die_after({where})
"""
MOMENTS = {
  'before any checkpoint': "MetricsWriter, 'write', lambda writer, step, values: step == 0",
  'while a checkpoint is half written': (
    "checkpoints, 'sync_tree', lambda folder: folder.name.startswith('2.unfinished')"
  ),
  'between a line and its checkpoint': "MetricsWriter, 'write', lambda writer, step, values: step == 4",
}


def final_state(workdir: pathlib.Path):
  config = runs.run_config(workdir)
  session, parameters = make_session(config, workdir)
  checkpoints = Checkpoints(workdir, keep=10)
  restored = checkpoints.restore(abstract_state(update_spec(config), parameters, session.mesh))
  checkpoints.close()
  return restored


def lines_without_time(workdir: pathlib.Path) -> list[dict]:
  lines = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
  varying = ('time/', 'throughput/', 'fencing_epoch', 'line_digest')  # An epoch counts the starts.
  return [{key: value for key, value in line.items() if not key.startswith(varying)} for line in lines]


def assert_same_run(left: pathlib.Path, right: pathlib.Path, steps: int = STEPS) -> None:
  left_step, left_state, left_host = final_state(left)
  right_step, right_state, right_host = final_state(right)
  assert left_step == right_step == steps
  assert left_host == right_host
  chex.assert_trees_all_equal(left_state.replace(rng=None), right_state.replace(rng=None))
  np.testing.assert_array_equal(jax.random.key_data(left_state.rng), jax.random.key_data(right_state.rng))
  assert lines_without_time(left) == lines_without_time(right)
  for step in range(1, steps + 1):
    name = f'{step}.jsonl'
    assert (left / 'rollouts' / name).read_text() == (right / 'rollouts' / name).read_text()


def start(arguments, workdir, *, quick=False) -> forked_commands.Forked:
  line = tiny.command('train', *arguments, f'--workdir={workdir}')[1:]
  with open(os.devnull, 'w') as nowhere:  # What it says of errors, pytest shows where a test fails.
    return forked_commands.Forked(line, tiny.environment(quick=quick), stdout=nowhere)


def start_two(arguments, workdir) -> list[forked_commands.Forked]:
  """One run in two processes on this machine (gloo collectives)."""
  return [start([*arguments, *place], workdir, quick=True) for place in places(2)]


def places(count: int) -> list[list[str]]:
  """Return the flags that make one run of `count` processes."""
  if count == 1:
    return [[]]
  together = [f'--coordinator_address=localhost:{free_port()}', f'--num_processes={count}']
  return [[*together, f'--process_id={index}'] for index in range(count)]
