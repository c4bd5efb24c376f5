"""A run that is killed at any moment and started again ends as the uninterrupted one, bit for bit."""

import json
import pathlib
import signal
import socket
import subprocess
import time

import chex
import jax
import numpy as np
import pytest

from sdpo_jax.training import inference
from sdpo_jax.training.checkpoints import Checkpoints
from sdpo_jax.training.loop import EXIT_PREEMPTED
from sdpo_jax.training.session import make_session
from sdpo_jax.training.step import abstract_state
from tests import tiny

STEPS = 5


@pytest.fixture(scope='module')
def experiment(tmp_path_factory):
  folder = tmp_path_factory.mktemp('resume')
  config = tiny.make_experiment(folder)
  arguments = [f'--config={config}', f'--config.trainer.total_training_steps={STEPS}', '--config.trainer.test_freq=2']
  done = tiny.launch('train', *arguments, f'--workdir={folder}/whole', cache=folder / 'cache')
  assert done.returncode == 0, done.stderr
  return folder, arguments


def final_state(workdir: pathlib.Path):
  config = inference.run_config(workdir)
  session, parameters = make_session(config, workdir)
  checkpoints = Checkpoints(workdir, keep=10)
  restored = checkpoints.restore(abstract_state(config, parameters, session.mesh))
  checkpoints.close()
  return restored


def lines_without_time(workdir: pathlib.Path) -> list[dict]:
  lines = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
  return [{key: value for key, value in line.items() if not key.startswith(('time/', 'throughput/'))} for line in lines]


def assert_same_run(left: pathlib.Path, right: pathlib.Path) -> None:
  left_step, left_state, left_host = final_state(left)
  right_step, right_state, right_host = final_state(right)
  assert left_step == right_step == STEPS
  assert left_host == right_host
  chex.assert_trees_all_equal(left_state.replace(rng=None), right_state.replace(rng=None))
  np.testing.assert_array_equal(jax.random.key_data(left_state.rng), jax.random.key_data(right_state.rng))
  assert lines_without_time(left) == lines_without_time(right)
  for step in range(1, STEPS + 1):
    name = f'{step}.jsonl'
    assert (left / 'rollouts' / name).read_text() == (right / 'rollouts' / name).read_text()


def start(arguments, workdir, cache) -> subprocess.Popen:
  return subprocess.Popen(
    tiny.command('train', *arguments, f'--workdir={workdir}'),
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
    cwd=tiny.REPOSITORY,
    env=tiny.environment(cache),
  )


def wait_for(process: subprocess.Popen, condition) -> bool:
  """Whether the condition came true before the process ended."""
  while process.poll() is None:
    if condition():
      return True
    time.sleep(0.002)
  return condition()


def has_step(workdir: pathlib.Path, step: int) -> bool:
  path = workdir / 'metrics.jsonl'
  return path.exists() and f'"step": {step},' in path.read_text()


def being_saved(workdir: pathlib.Path, step: int) -> bool:
  return any((workdir / 'checkpoints').glob(f'{step}*'))


def test_the_run_learns_something_and_writes_what_the_contract_names(experiment):
  folder, _ = experiment
  workdir = folder / 'whole'
  lines = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
  assert [line['step'] for line in lines] == list(range(STEPS + 1))
  assert set(lines[0]) == {'step', *(key for key in lines[0] if key.startswith('eval/parity/'))}
  for name in (
    'train/loss',
    'train/grad_norm',
    'train/learning_rate',
    'rollout/score_mean',
    'rollout/success_rate',
    'rollout/completion_length_mean',
    'rollout/truncated_fraction',
    'rollout/entropy',
    'self_distillation/success_group_fraction',
    'self_distillation/success_sample_fraction',
    'self_distillation/feedback_available_fraction',
    'self_distillation/feedback_used_fraction',
    'self_distillation/reprompt_sample_fraction',
    'teacher/divergence',
    'teacher/entropy',
    'throughput/tokens_per_s',
    'time/sample_s',
  ):
    assert lines[-1].get(name) is not None, name
  assert lines[-1]['eval/parity/mean@2'] is not None
  assert lines[1]['train/learning_rate'] == 0.0
  assert lines[3]['train/learning_rate'] == pytest.approx(1e-3)
  assert lines[-1]['train/loss'] > 0
  rollouts = [json.loads(line) for line in (workdir / 'rollouts' / '1.jsonl').read_text().splitlines()]
  assert len(rollouts) == 8
  taught = [rollout for rollout in rollouts if rollout['teacher_prompt']]
  assert taught and all(value >= 0 for value in taught[0]['divergence'])
  _, state, _ = final_state(workdir)
  _, parameters = make_session(inference.run_config(workdir), workdir)
  moved = max(
    float(abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, (state.trainable, parameters)), strict=True)
  )
  assert moved > 1e-4


def test_killed_while_sampling_while_saving_and_after_a_line_was_written(experiment):
  folder, arguments = experiment
  workdir, cache = folder / 'killed', folder / 'cache'
  moments = [
    lambda: has_step(workdir, 0),  # Before any checkpoint.
    lambda: being_saved(workdir, 2),  # While a checkpoint may be half written.
    lambda: has_step(workdir, 4),  # Between a line and its checkpoint.
  ]
  for moment in moments:
    process = start(arguments, workdir, cache)
    assert wait_for(process, moment)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
  process = start(arguments, workdir, cache)
  assert process.wait() == 0
  assert_same_run(folder / 'whole', workdir)


def test_sigterm_saves_first_and_the_same_command_continues(experiment):
  folder, arguments = experiment
  workdir, cache = folder / 'terminated', folder / 'cache'
  arguments = [*arguments, '--config.trainer.save_freq=0']
  process = start(arguments, workdir, cache)
  assert wait_for(process, lambda: has_step(workdir, 2))
  process.send_signal(signal.SIGTERM)
  assert process.wait() == EXIT_PREEMPTED
  checkpoints = Checkpoints(workdir)
  assert checkpoints.steps() and 2 <= checkpoints.steps()[-1] < STEPS
  checkpoints.close()
  assert start(arguments, workdir, cache).wait() == 0
  assert_same_run(folder / 'whole', workdir)


def test_a_finished_run_can_be_made_longer_but_not_another_run(experiment):
  folder, arguments = experiment
  done = tiny.launch(
    'train', *arguments, '--config.optimizer.lr=0.5', f'--workdir={folder}/whole', cache=folder / 'cache'
  )
  assert done.returncode == 2
  assert 'optimizer.lr was 0.001 and is now 0.5' in done.stderr
  assert 'Traceback' not in done.stderr
  done = tiny.launch('train', *arguments, f'--workdir={folder}/whole', cache=folder / 'cache')
  assert done.returncode == 0
  assert 'mean@2' in done.stdout


def free_port() -> int:
  with socket.socket() as listener:
    listener.bind(('localhost', 0))
    return listener.getsockname()[1]


def start_two(arguments, workdir, cache) -> list[subprocess.Popen]:
  """One run in two processes on this machine (gloo collectives)."""
  cluster = [f'--coordinator_address=localhost:{free_port()}', '--num_processes=2']
  return [start([*arguments, *cluster, f'--process_id={i}'], workdir, cache) for i in range(2)]


def test_two_processes_agree_when_to_save_though_only_one_is_told_to_stop(experiment):
  folder, arguments = experiment
  workdir, cache = folder / 'two', folder / 'cache'
  arguments = [*arguments, '--config.trainer.save_freq=0']
  processes = start_two(arguments, workdir, cache)
  assert wait_for(processes[0], lambda: has_step(workdir, 2))
  processes[1].send_signal(signal.SIGTERM)
  assert [process.wait() for process in processes] == [EXIT_PREEMPTED] * 2
  checkpoints = Checkpoints(workdir)
  assert checkpoints.steps() and 2 <= checkpoints.steps()[-1] < STEPS
  checkpoints.close()
  assert [process.wait() for process in start_two(arguments, workdir, cache)] == [0, 0]
  alone, together = lines_without_time(folder / 'whole'), lines_without_time(workdir)
  assert len(alone) == len(together)
  for left, right in zip(alone, together, strict=True):
    assert left == pytest.approx(right, rel=1e-3, abs=1e-5)
