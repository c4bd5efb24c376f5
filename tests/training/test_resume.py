"""A run that is killed at any moment and started again ends as the uninterrupted one, bit for bit."""

import json
import pathlib
import re
import shutil
import signal
import time

from etils import epath
import jax
import pytest

from sdpo_jax.distributed import cluster
from sdpo_jax.inference import runs
from sdpo_jax.training.checkpoint.checkpoints import Checkpoints
from sdpo_jax.training.directory import ownership
from sdpo_jax.training.directory.lines import STATE_DIGEST
from sdpo_jax.training.directory.published_checkpoints import MANIFEST
from sdpo_jax.training.opening import make_session
from sdpo_jax.training.preemption import EXIT_PREEMPTED
from tests import tiny
from tests.forked_commands import Forked, run_together
from tests.resumed_runs import (
  KILLED,
  MOMENTS,
  STEPS,
  assert_same_run,
  final_state,
  lines_without_time,
  places,
  start,
  start_two,
)

# Nothing else saves, and a busy machine has the time to.
SAVED_WHEN_TOLD = ['--config.trainer.save_freq=0', '--config.trainer.preemption_grace_s=300']


# Only with the slow tests: of what is left where there is no checkpoint yet, test_durability.py opens all states.
SLOW_MOMENTS = ('before any checkpoint',)
# A grader that is told to stop in the midst of its work, and never answers.
HANGING = """
import threading

def hang_at(ids, grade=grade):
  def hanging(examples, completions, *, truncated):
    if any(example.id in ids for example in examples):
      os.kill(os.getpid(), signal.SIGTERM)
      threading.Event().wait()
    return grade(examples, completions, truncated=truncated)
  return hanging

registry._FACTORIES['parity'] = lambda settings: hang_at(['train-4'])
"""


@pytest.fixture(scope='module')
def ends(request, tmp_path_factory):
  """Run one experiment three times: undisturbed; killed and started again; stopped while a grader hangs.

  The last is part of the slow tests, which start more runs and compare them with these; all compile as users do.
  """
  folder = tmp_path_factory.mktemp('resume')
  config = tiny.make_experiment(folder)
  flags = [f'--config.trainer.total_training_steps={STEPS}', '--config.trainer.test_freq=2']
  slow = request.config.getoption('slow')
  moments = {moment: where for moment, where in MOMENTS.items() if slow or moment not in SLOW_MOMENTS}
  for number, where in enumerate(moments.values()):
    (folder / f'killed_{number}.py').write_text(config.read_text() + KILLED.format(where=where))
  (folder / 'hanging.py').write_text('import os, signal\n' + config.read_text() + HANGING)

  def train(workdir: str, name: str = config.stem, *more: str) -> tuple[str, list[str]]:
    return 'train', [f'--config={folder}/{name}.py', *flags, *more, f'--workdir={folder}/{workdir}']

  commands = {
    'whole': train('whole'),
    **{moment: train('killed', f'killed_{number}') for number, moment in enumerate(moments)},
    'killed': train('killed'),
  }
  if slow:
    commands['hanging'] = train('hanging', 'hanging', *SAVED_WHEN_TOLD)
  done = tiny.launch_many(list(commands.values()), quick=not slow)
  return folder, [f'--config={config}', *flags], dict(zip(commands, done, strict=True))


@pytest.fixture(scope='module')
def experiment(ends):
  """Return the folder of the runs, and the flags that make them."""
  folder, arguments, done = ends
  assert done['whole'].returncode == 0, done['whole'].stderr
  return folder, arguments


def wait_for(process: Forked, condition) -> bool:
  """Whether the condition came true before the process ended."""
  while process.poll() is None:
    if condition():
      return True
    time.sleep(0.002)
  return condition()


def told_to_stop(process: Forked, moment) -> int:
  """Return how a process ends that gets a SIGTERM at some moment."""
  assert wait_for(process, moment)
  process.send_signal(signal.SIGTERM)
  return process.wait(timeout=300)


def has_step(workdir: pathlib.Path, step: int) -> bool:
  path = workdir / 'metrics.jsonl'
  return path.exists() and f'"step": {step},' in path.read_text()


def test_the_run_learns_something_and_writes_what_the_contract_names(experiment):
  folder, _ = experiment
  workdir = folder / 'whole'
  lines = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
  assert [line['step'] for line in lines] == list(range(STEPS + 1))
  assert set(lines[0]) == {
    'step',
    'fencing_epoch',
    'line_digest',
    'programs/compiled',
    *(key for key in lines[0] if key.startswith('eval/parity/')),
  }
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
    'time/grade_s',
    'time/graders_busy_s',
  ):
    assert lines[-1].get(name) is not None, name
  assert lines[-1]['eval/parity/mean@2'] is not None
  assert lines[1]['train/learning_rate'] == 0.0
  assert lines[3]['train/learning_rate'] == pytest.approx(1e-3)
  assert lines[-1]['train/loss'] > 0
  # Sampler and trainer are two programs of one float32 policy; this run asks the update, not a scoring pass.
  assert lines[-1]['rollout_corr/log_prob_difference_max'] < 1e-3
  assert lines[-1]['rollout_corr/log_prob_correlation'] > 0.9999
  rollouts = [json.loads(line) for line in (workdir / 'rollouts' / '1.jsonl').read_text().splitlines()]
  assert len(rollouts) == 8
  taught = [rollout for rollout in rollouts if rollout['teacher_prompt']]
  assert taught and all(value >= 0 for value in taught[0]['divergence'])
  _, state, _ = final_state(workdir)
  _, parameters = make_session(runs.run_config(workdir), workdir)
  moved = max(
    float(abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, (state.trainable, parameters)), strict=True)
  )
  assert moved > 1e-4


def test_killed_at_any_moment_it_ends_as_the_run_that_is_left_in_peace(ends):
  folder, _, done = ends
  killed = {moment: done[moment].returncode for moment in MOMENTS if moment in done}
  assert len(killed) >= 2 and set(killed.values()) == {-signal.SIGKILL}
  assert done['killed'].returncode == 0, done['killed'].stderr
  assert_same_run(folder / 'whole', folder / 'killed')


@pytest.mark.slow
def test_sigterm_saves_first_and_the_same_command_continues(experiment):
  folder, arguments = experiment
  workdir = folder / 'terminated'
  arguments = [*arguments, *SAVED_WHEN_TOLD]
  assert told_to_stop(start(arguments, workdir), lambda: has_step(workdir, 2)) == EXIT_PREEMPTED
  checkpoints = Checkpoints(workdir)
  assert checkpoints.steps() and 2 <= checkpoints.steps()[-1] < STEPS
  checkpoints.close()
  assert start(arguments, workdir).wait() == 0
  assert_same_run(folder / 'whole', workdir)


@pytest.mark.slow  # By default test_endings.py has graders that hang and a signal that the main thread does not hear.
def test_sigterm_does_not_wait_for_a_grader_that_hangs(ends):
  folder, _, done = ends
  assert done['hanging'].returncode == EXIT_PREEMPTED, done['hanging'].stderr
  assert 'ending now' not in done['hanging'].stderr  # Which the deadline says.
  assert settled(folder / 'hanging', 2)


@pytest.mark.slow
def test_sigterm_does_not_wait_for_a_thread_that_python_would_join(experiment, tmp_path):
  """It is cut off by the deadline."""
  folder, arguments = experiment
  workdir, reached, hangs = tmp_path / 'run', tmp_path / 'reached', tmp_path / 'hangs'
  text, place = pathlib.Path(arguments[0].removeprefix('--config=')).read_text(), '  scores = ['
  asked = f"""  if any(example.id == 'train-4' for example in examples) and pathlib.Path({str(hangs)!r}).exists():
    pathlib.Path({str(reached)!r}).touch()
    POOL.submit(threading.Event().wait).result()
"""
  header = 'import concurrent.futures, pathlib, threading\nPOOL = concurrent.futures.ThreadPoolExecutor()\n'
  assert text.count(place) == 1
  config = tmp_path / 'hanging_config.py'
  config.write_text(header + text.replace(place, asked + place))
  hangs.touch()
  arguments = [f'--config={config}', *arguments[1:]]
  settings = ['--config.trainer.save_freq=0', '--config.trainer.preemption_grace_s=20']
  assert told_to_stop(start([*arguments, *settings], workdir), reached.exists) == EXIT_PREEMPTED
  assert settled(workdir, 2)
  hangs.unlink()
  assert start(arguments, workdir).wait() == 0
  assert_same_run(folder / 'whole', workdir)


@pytest.mark.slow
def test_a_finished_run_can_be_made_longer_but_not_another_run(experiment):
  folder, arguments = experiment
  same = [*arguments, f'--workdir={folder}/whole']
  other, done = tiny.launch_many([('train', [*same, '--config.optimizer.lr=0.5']), ('train', same)])
  assert other.returncode == 2
  assert 'optimizer.lr was 0.001 and is now 0.5' in other.stderr
  assert 'Traceback' not in other.stderr
  assert done.returncode == 0
  assert 'mean@2' in done.stdout


@pytest.mark.slow
def test_a_run_without_its_checkpoints_begins_anew_only_if_told_to(experiment):
  folder, arguments = experiment
  workdir = folder / 'unmounted'
  shutil.copytree(folder / 'whole', workdir)
  (workdir / 'checkpoints').rename(folder / 'elsewhere')
  results = {path.name: path.read_bytes() for path in workdir.iterdir() if path.is_file() and path.suffix != '.json'}
  for refused in tiny.launch_many([('train', [*arguments, f'--workdir={workdir}'])] * 2):
    assert refused.returncode == 2 and 'Traceback' not in refused.stderr
    assert f'that of step {STEPS} was published' in refused.stderr and '--restart' in refused.stderr
  assert results['metrics.jsonl'] == (workdir / 'metrics.jsonl').read_bytes()
  done = tiny.launch('train', *arguments, f'--workdir={workdir}', '--restart')
  assert done.returncode == 0, done.stderr
  assert_same_run(folder / 'whole', workdir)
  assert results['metrics.jsonl'] == (workdir / 'before_restart' / '1' / 'metrics.jsonl').read_bytes()
  (workdir / 'metrics.jsonl').write_text('')
  longer = f'--config.trainer.total_training_steps={STEPS + 1}'
  done = tiny.launch('train', *arguments, longer, f'--workdir={workdir}', '--restart')
  assert done.returncode == 0 and f'metrics.jsonl has no line of steps 1–{STEPS}, whose numbers are lost' in done.stderr
  assert f'--restart does nothing here: the checkpoint of step {STEPS} is there' in done.stderr
  assert [line['step'] for line in lines_without_time(workdir)] == [STEPS + 1]


@pytest.mark.slow
def test_a_second_start_is_told_who_trains_and_changes_nothing(experiment):
  folder, arguments = experiment
  workdir = folder / 'twice'
  first = start([*arguments, '--config.trainer.total_training_steps=500'], workdir)
  assert wait_for(first, lambda: has_step(workdir, 1))
  second = tiny.launch('train', *arguments, f'--workdir={workdir}')
  assert second.returncode == 2 and f'is training in {workdir} (host ' in second.stderr
  assert f', process {first.pid}, since ' in second.stderr and 'Traceback' not in second.stderr
  first.send_signal(signal.SIGSTOP)
  second = tiny.launch('train', *arguments, f'--workdir={workdir}')
  assert second.returncode == 2 and 'but is suspended: continue it' in second.stderr
  (workdir / '.lock').unlink()  # As a file server that has forgotten the lock of a host.
  steps = 2 + max(line['step'] for line in lines_without_time(workdir))
  assert start([*arguments, f'--config.trainer.total_training_steps={steps}'], workdir).wait() == 0
  after = {path: path.read_bytes() for path in workdir.rglob('*') if path.is_file()}
  first.send_signal(signal.SIGCONT)
  assert first.wait() == 2
  now = {path: path.read_bytes() for path in workdir.rglob('*') if path.is_file()}
  changed = {str(path.relative_to(workdir)) for path in now if now[path] != after.get(path)}
  # What its checkpointer had begun is in a folder of its own, whose name Orbax lengthens until all of it is written.
  others = {name for name in changed if not re.match(r'checkpoints/\d+\.unfinished\.1[./]', name)}
  assert others == set() and after.keys() <= now.keys()
  assert [line['step'] for line in lines_without_time(workdir)] == list(range(steps + 1))


def settled(workdir: pathlib.Path, step: int) -> bool:
  """Whether the checkpoint of `step` is there whole."""
  return (workdir / 'checkpoints' / str(step) / MANIFEST).exists()


@pytest.mark.slow
def test_two_processes_hear_that_their_directory_is_taken(experiment, tmp_path):
  _, arguments = experiment
  with ownership.sole_user(epath.Path(tmp_path)):
    lines = [tiny.command('train', *arguments, *place, f'--workdir={tmp_path}')[1:] for place in places(2)]
    done = run_together(lines, tiny.environment(quick=True))
  assert [process.returncode for process in done] == [2, 2]
  said = [process.stderr for process in done]
  assert all(f'is training in {tmp_path} (host ' in text and 'Traceback' not in text for text in said), said
  assert not (tmp_path / 'metrics.jsonl').exists() and not (tmp_path / 'checkpoints').exists()


# Restores a run's newest checkpoint; prints a digest of every leaf, and the loss and gradient norm of a given batch.
RESTORE = """
import hashlib, json, sys
from absl import flags
import jax
from jax.experimental import multihost_utils
import numpy as np
from sdpo_jax import command
from sdpo_jax.inference import runs
from sdpo_jax.learning import batching
from sdpo_jax.training.checkpoint.checkpoints import Checkpoints
from sdpo_jax.training.opening import make_session
from sdpo_jax.training.specs import update_spec
from sdpo_jax.training.step import run_update
from sdpo_jax.learning.update import abstract_state
from sdpo_jax.types import Rollouts

flags.DEFINE_string('workdir', None, '')
flags.DEFINE_integer('fsdp', -1, '')
flags.DEFINE_integer('tensor', 1, '')
flags.DEFINE_integer('devices', 1, '')
command.define_cluster()


def digest(leaf):
  if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    leaf = jax.random.key_data(leaf)
  whole = multihost_utils.process_allgather(leaf, tiled=True) if not leaf.is_fully_addressable else leaf
  return hashlib.sha256(np.asarray(whole).tobytes()).hexdigest()


def batch():
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, 250, (8, 4)).astype(np.int32)
  mask = np.arange(4)[None] < rng.integers(1, 5, 8)[:, None]
  zeros = np.zeros((8, 4), np.float32)
  rollouts = Rollouts(
    np.repeat(np.arange(2, dtype=np.int32), 4), np.zeros((8, 1), np.int32), np.ones((8, 1), bool), tokens * mask, mask,
    zeros, zeros, zeros, ['stop'] * 8, [''] * 8,
  )
  prompts = [rng.integers(0, 250, 20).tolist() for _ in range(8)]
  teacher = [rng.integers(0, 250, rng.integers(60, 200)).tolist() for _ in range(8)]
  return batching.GenerationBatch(prompts, teacher, rollouts, distill_mask=np.ones_like(zeros), advantages=zeros)


def main():
  values = flags.FLAGS
  jax.config.update('jax_num_cpu_devices', values.devices)
  command.join_cluster()
  config = runs.run_config(values.workdir)
  config.mesh.fsdp, config.mesh.tensor = values.fsdp, values.tensor
  session, parameters = make_session(config, values.workdir)
  checkpoints = Checkpoints(values.workdir, read_only=True)
  step, state, host = checkpoints.restore(abstract_state(update_spec(config), parameters, session.mesh))
  digests = {jax.tree_util.keystr(path): digest(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
  _, report = run_update(session, state, batch())
  if jax.process_index() == 0:
    print(json.dumps([step, host, digests, report.loss, report.grad_norm]))


command.run(main)
"""


def restored(workdir: pathlib.Path, count: int = 1, flags: tuple[str, ...] = ()):
  """Return what RESTORE prints, in `count` processes."""
  lines = [['-c', RESTORE, f'--workdir={workdir}', *place, *flags] for place in places(count)]
  done = run_together(lines, tiny.environment(quick=True))
  assert [process.returncode for process in done] == [0] * count, done
  return json.loads(done[0].stdout.splitlines()[-1])  # Gloo says something first.


@pytest.mark.slow
def test_one_of_two_processes_is_killed_or_fails_and_two_or_one_continue(experiment):
  """Process 1 is killed behind a checkpoint; resumed, process 0 cannot write the file of a step that both trained."""
  folder, arguments = experiment
  steps = 9
  arguments = [*arguments, f'--config.trainer.total_training_steps={steps}', '--config.trainer.test_freq=0']
  arguments += ['--config.trainer.save_freq=4', '--config.trainer.preemption_grace_s=300']
  assert [process.wait() for process in start_two(arguments, folder / 'together')] == [0, 0]
  workdir = folder / 'bereft'
  processes = start_two(arguments, workdir)
  assert wait_for(processes[0], lambda: settled(workdir, 4))
  processes[1].kill()
  assert processes[1].wait() == -signal.SIGKILL
  assert processes[0].wait() == cluster.EXIT_LOST
  assert not settled(workdir, steps)
  shutil.copytree(workdir, folder / 'alone')

  on_two = restored(workdir, count=2)
  step, _, _, loss, norm = on_two
  assert step == 4 and loss > 0 and norm > 0
  for flags in ((), ('--devices=8', '--fsdp=4', '--tensor=2')):
    on_one = restored(workdir, flags=flags)
    assert on_one[:3] == on_two[:3]
    assert on_one[3:] == pytest.approx([loss, norm], rel=1e-5)

  reached = lines_without_time(workdir)[-1]['step']
  processes = start_two(arguments, workdir)
  assert wait_for(processes[0], lambda: has_step(workdir, reached + 1))
  (workdir / 'rollouts').rename(folder / 'moved')
  (workdir / 'rollouts').touch()
  assert [process.wait(timeout=300) for process in processes] == [cluster.EXIT_ERROR] * 2
  failed = 1 + lines_without_time(workdir)[-1]['step']  # That line is written when the step is finished.
  assert max(int(path.name) for path in (workdir / 'checkpoints').iterdir()) == failed > reached + 1
  (workdir / 'rollouts').unlink()
  (folder / 'moved').rename(workdir / 'rollouts')
  # The file of a step that was trained is not written later.
  assert not (workdir / 'rollouts' / f'{failed}.jsonl').exists()
  shutil.copy(folder / 'together' / 'rollouts' / f'{failed}.jsonl', workdir / 'rollouts')

  assert [process.wait() for process in start_two(arguments, workdir)] == [0, 0]
  assert_same_run(folder / 'together', workdir, steps)
  assert start(arguments, folder / 'alone', quick=True).wait() == 0
  together, alone = lines_without_time(workdir), lines_without_time(folder / 'alone')
  assert alone[:4] == together[:4]  # Up to the checkpoint, two processes wrote both.
  assert [line['step'] for line in alone] == [line['step'] for line in together] == list(range(1, steps + 1))


@pytest.mark.campaign  # Two processes train, are killed and resumed above, and end together below.
def test_two_processes_agree_when_to_save_though_only_one_is_told_to_stop(experiment):
  folder, arguments = experiment
  workdir = folder / 'two'
  arguments = [*arguments, *SAVED_WHEN_TOLD]
  processes = start_two(arguments, workdir)
  assert wait_for(processes[0], lambda: has_step(workdir, 2))
  processes[1].send_signal(signal.SIGTERM)
  assert [process.wait() for process in processes] == [EXIT_PREEMPTED] * 2
  checkpoints = Checkpoints(workdir)
  assert checkpoints.steps() and 2 <= checkpoints.steps()[-1] < STEPS
  checkpoints.close()
  assert [process.wait() for process in start_two(arguments, workdir)] == [0, 0]
  alone, together = lines_without_time(folder / 'whole'), lines_without_time(workdir)
  assert len(alone) == len(together)
  for left, right in zip(alone, together, strict=True):
    # Rounding differs, and so does the digest, which all steps have.
    assert bool(left.pop(STATE_DIGEST, '')) == bool(right.pop(STATE_DIGEST, '')) == (left['step'] > 0)
    assert left == pytest.approx(right, rel=1e-3, abs=1e-5)
