"""However a run ends, its last whole state is saved first, and started again it becomes the run that was not ended."""

from __future__ import annotations

from collections.abc import Callable
import functools
import os
import pathlib
import signal
import threading
import time

import chex
from etils import epath
import jax
import numpy as np
import pytest

from sdpo_jax import liveness
from sdpo_jax.config import Config
from sdpo_jax.distributed import cluster
from sdpo_jax.environments import registry
from sdpo_jax.errors import UserError
from sdpo_jax.evaluation import alarms
from sdpo_jax.rollout.slots import Slots
from sdpo_jax.training import around_step, evaluations, loop, preemption, step_records, watchdog
from sdpo_jax.training import step as one_step
from sdpo_jax.training.checkpoint.checkpoints import Checkpoints
from sdpo_jax.training.checkpoint.manifest import read_manifest
from sdpo_jax.training.checkpoint.starting_state import StartingState
from sdpo_jax.training.metrics import MetricsWriter
from sdpo_jax.types import Example, Outcome
from tests import tiny
from tests.resumed_runs import final_state, lines_without_time


class At:
  """Calls `then` the `count`-th time that it is called."""

  def __init__(self, count: int, then: Callable[[], None]):
    self.left, self.then = count, then

  def __call__(self) -> None:
    self.left -= 1
    if self.left == 0:
      self.then()


def before(monkeypatch, owner, name: str, count: int, then: Callable[[], None]) -> None:
  """Has `then` called before the `count`-th call of a function."""
  function, at = getattr(owner, name), At(count, then)

  def call(*arguments, **options):
    at()
    return function(*arguments, **options)

  monkeypatch.setattr(owner, name, call)


def fail(error: BaseException) -> Callable[[], None]:
  def then():
    raise error

  return then


@pytest.fixture(scope='module')
def task():
  def grade(examples, completions, *, truncated):
    scores = [float(sum(text.encode()) % 2) for text in completions]
    return [Outcome(score, '' if score else 'The sum of the bytes must be odd.', {}) for score in scores]

  def questions(split, seed):
    return lambda index: Example(
      f'{split}-{index}', [{'role': 'user', 'content': f'{split} {index}'}], 'odd', None, 'odd'
    )

  registry.register('odd')(grade)
  registry.register_generator('odd')(questions)


@pytest.fixture(scope='module')
def experiment(tmp_path_factory, task):
  """Return a config of 2 optimizer steps per batch, each of 2 micro-batches, and the run that nothing ends."""
  folder = tmp_path_factory.mktemp('endings')
  text = tiny.CONFIG[tiny.CONFIG.index('def get_config') :].replace('{model!r}', repr(str(tiny.make_model(folder))))
  namespace = {'Config': Config}
  exec(text.replace('generator:parity', 'generator:odd'), namespace)

  def make(**changes) -> Config:
    config = namespace['get_config']()
    config.actor.ppo_epochs = 2
    config.trainer.total_training_steps, config.trainer.test_freq, config.trainer.save_freq = 2, 2, 0
    config.trainer.best_metric = 'eval/odd/mean@2'
    for name, value in changes.items():
      setattr(config.trainer, name, value)
    return config

  loop.train(make(), folder / 'whole')
  return make, folder / 'whole'


def steps_on_disk(workdir: pathlib.Path) -> list[int]:
  return sorted(int(path.name) for path in (workdir / 'checkpoints').glob('*') if path.name.isdecimal())


def measured(workdir: pathlib.Path) -> dict[str, float]:
  """Return what the last checkpoint says was measured, by which the best is chosen."""
  found = read_manifest(epath.Path(workdir / 'checkpoints' / '2')).metrics
  assert 'eval/odd/mean@2' in found
  return {name: value for name, value in found.items() if not name.startswith('throughput/')}


def assert_becomes(config: Config, workdir: pathlib.Path, whole: pathlib.Path) -> None:
  """Check that, started again, the run ends as the whole one, bit for bit."""
  result = loop.train(config, workdir)
  assert not result.preempted and result.step == 2
  assert lines_without_time(workdir) == lines_without_time(whole)
  assert measured(workdir) == measured(whole)
  (_, ours, _), (_, theirs, _) = final_state(workdir), final_state(whole)
  chex.assert_trees_all_equal(ours.replace(rng=None), theirs.replace(rng=None))
  np.testing.assert_array_equal(jax.random.key_data(ours.rng), jax.random.key_data(theirs.rng))
  for step in (1, 2):
    name = f'rollouts/{step}.jsonl'
    assert (workdir / name).read_text() == (whole / name).read_text()


# Where it is told: before the n-th call of a function. A batch donates the state twice, for its first optimizer step
# and for its second. Slots advance once for the evaluation before the first step, once in each step, once in the last
# evaluation.
STOPS = {
  'the first evaluation': (Slots, 'advance', 1, {}, 0),
  'sampling': (Slots, 'advance', 3, {}, 1),
  'before an optimizer step': (one_step, 'run_update', 2, {}, 1),
  'after an optimizer step': (StartingState, 'donate', 3, {}, 2),
  'after an optimizer step, with a copy': (StartingState, 'donate', 3, {'keep_starting_state': True}, 1),
  'the evaluation': (Slots, 'advance', 4, {}, 2),
}
QUICK = ('after an optimizer step, with a copy',)  # Others are slow.


def some_slow(names) -> list:
  return [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in names]


@pytest.mark.parametrize('where', some_slow(STOPS))
def test_told_to_stop_it_saves_the_last_whole_state(experiment, tmp_path, monkeypatch, where):
  make, whole = experiment
  owner, name, count, changes, saved = STOPS[where]
  with monkeypatch.context() as patch:
    before(patch, owner, name, count, cluster.ask_to_stop)
    result = loop.train(make(**changes), tmp_path)
  assert result.preempted and result.step == saved and steps_on_disk(tmp_path) == ([saved] if saved else [])
  if saved == 2:  # What may yet be rolled back is no candidate for the best checkpoint.
    assert read_manifest(epath.Path(tmp_path / 'checkpoints' / '2')).metrics == {}
  assert_becomes(make(), tmp_path, whole)


class Broken(Exception):
  pass


ENDS = {
  'a device that fails before an optimizer step': (StartingState, 'donate', 3, Broken(), {}, 1),
  'a device that fails after one': (StartingState, 'donate', 4, Broken(), {}, None),
  'a device that fails after one, with a copy': (
    StartingState,
    'donate',
    4,
    Broken(),
    {'keep_starting_state': True},
    1,
  ),
  'Ctrl-C from elsewhere': (one_step, 'build_batch', 2, KeyboardInterrupt(), {}, 1),
  'a full disk for rollouts': (step_records, 'write_rollouts', 2, OSError(28, 'No space left on device'), {}, 2),
  'an evaluation': (evaluations, 'evaluate', 2, UserError('Mend the grader.'), {}, 2),
  'a line that cannot be written': (MetricsWriter, 'write', 3, OSError(28, 'No space left on device'), {}, 2),
}


@pytest.mark.parametrize('what', some_slow(ENDS))
def test_whatever_ends_it_the_last_whole_state_is_saved_and_named(experiment, tmp_path, monkeypatch, what):
  make, whole = experiment
  owner, name, count, error, changes, saved = ENDS[what]
  said = []
  with monkeypatch.context() as patch:
    before(patch, owner, name, count, fail(error))
    with pytest.raises(type(error)) as raised:
      loop.train(make(**changes), tmp_path, announce=said.append)
  assert raised.value is error
  assert steps_on_disk(tmp_path) == ([] if saved is None else [saved])
  there = 'There is no checkpoint yet; the same command starts again.'
  if saved is not None:
    there = f'The checkpoint of step {saved} is on disk; the same command resumes from it.'
  assert said[-1] == there
  if owner is step_records:  # The file of a step that was trained is not written later.
    (tmp_path / 'rollouts' / '2.jsonl').write_text((whole / 'rollouts' / '2.jsonl').read_text())
  assert_becomes(make(), tmp_path, whole)


def test_what_hangs_in_the_main_thread_does_not_keep_the_last_step_from_being_saved(experiment, tmp_path, monkeypatch):
  make, whole = experiment
  monkeypatch.setattr(preemption, 'HELD_UP', 0.001)

  def hang():  # As a generator of questions may.
    os.kill(os.getpid(), signal.SIGTERM)
    while steps_on_disk(tmp_path) != [1]:
      time.sleep(0.01)

  with monkeypatch.context() as patch:
    before(patch, around_step, 'rollout_and_grade', 2, hang)
    result = loop.train(make(preemption_grace_s=120.0), tmp_path)
  assert result.preempted and result.step == 1
  assert_becomes(make(), tmp_path, whole)


def test_ctrl_c_after_the_last_step_changes_nothing(experiment, tmp_path, monkeypatch, capfd):
  make, _ = experiment

  def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    while not cluster.stop_point().asked():
      time.sleep(0.001)

  before(monkeypatch, MetricsWriter, 'close', 1, interrupt)
  result = loop.train(make(total_training_steps=1, test_freq=0, best_metric=None), tmp_path)
  assert not result.preempted and result.step == 1 and result.exit_code == 0 and steps_on_disk(tmp_path) == [1]
  assert 'SIGINT: all steps are done; ending.' in capfd.readouterr().err


def test_a_failure_of_the_last_save_does_not_hide_what_ended_the_run(experiment, tmp_path, monkeypatch):
  make, _ = experiment
  said = []
  with monkeypatch.context() as patch:
    before(patch, one_step, 'build_batch', 2, fail(Broken('first')))
    before(patch, Checkpoints, 'save', 1, fail(UserError('The disk is full.')))
    with pytest.raises(Broken, match='first'):
      loop.train(make(), tmp_path, announce=said.append)
  assert said[-2:] == [
    'The state of step 1 could not be saved: The disk is full.',
    'There is no checkpoint yet; the same command starts again.',
  ]


def test_graders_that_hang_are_reported_and_end_the_run_where_a_limit_is_set(experiment, tmp_path, monkeypatch):
  make, whole = experiment
  hung, release, said = threading.Event(), threading.Event(), []
  grade = registry.get('odd')

  def sometimes(examples, completions, *, truncated):
    if examples[0].id.startswith('train-2'):
      hung.set()
      release.wait(60)
    return grade(examples, completions, truncated=truncated)

  sometimes.limits_itself = True
  # While it hangs, hours pass; nothing else takes any time.
  clock = functools.partial(watchdog.Watchdog, clock=lambda: liveness.last().at + 7200 * hung.is_set())
  with monkeypatch.context() as patch:
    patch.setattr(loop, 'Watchdog', clock)
    patch.setattr(watchdog, 'LOOKS', 2000)
    patch.setattr(registry, 'get', lambda name, settings: sometimes)
    result = loop.train(make(watchdog_report_s=60.0, watchdog_limit_s=100.0), tmp_path, announce=said.append)
    release.set()
  assert (result.preempted, result.exit_code, result.step) == (True, 70, 1) and steps_on_disk(tmp_path) == [1]
  assert [
    line for line in said if line.startswith("No progress for 7,200 s in the phase 'grade': graders do not answer")
  ]
  # Sampling may go on beside the grader that hangs, which counts as progress, and is followed by another report.
  stacks = [path.read_text() for path in (tmp_path / 'stalls').glob('*.txt')]
  assert any('release.wait(60)' in text for text in stacks)
  assert_becomes(make(accept_changes=('graders',)), tmp_path, whole)


# Holds at every step.
ALWAYS = 'rollout/completion_length_max > 0'


def test_a_run_that_an_alarm_stops_is_saved_and_goes_on_only_with_other_rules(experiment, tmp_path):
  make, _ = experiment

  def train(action: str):
    config, said = make(), []
    config.alarms.rules, config.alarms.action = (ALWAYS,), action
    return loop.train(config, tmp_path, announce=said.append), said

  stopped, said = train('stop')
  assert stopped.step == 1 and ALWAYS in stopped.stopped and steps_on_disk(tmp_path) == [1]
  assert [line for line in said if line.startswith('Alarm at step 1: ') and ALWAYS in line]
  again, said = train('stop')
  assert (again.step, again.stopped) == (1, stopped.stopped)
  assert [line['step'] for line in lines_without_time(tmp_path)] == [0, 1]
  on, _ = train('warn')
  assert (on.step, on.stopped) == (2, None)
  lines = lines_without_time(tmp_path)
  assert [line['step'] for line in lines] == [0, 1, 2]
  assert [line.get(alarms.STOP) for line in lines] == [None, 1, None]
  assert [line.get('alarm/1') for line in lines] == [None, 1, 1]


@pytest.mark.slow
def test_an_alarm_before_there_is_a_checkpoint_stops_the_run(experiment, tmp_path):
  make, _ = experiment
  config = make(save_freq=1, test_freq=1)
  config.alarms.rules, config.alarms.action = (ALWAYS,), 'rollback'
  result = loop.train(config, tmp_path)
  assert result.step == 1 and 'no checkpoint with eval/odd/mean@2 to roll back to' in result.stopped


def without_lessons(make, name: str, grade: Callable[..., list[Outcome]], **changes) -> Config:
  """Return a config whose grader teaches nothing."""
  config = make(test_freq=0, best_metric=None, **changes)
  registry.register(name)(grade)
  registry.register_generator(name)(
    lambda split, seed: lambda index: Example(f'{index}', [{'role': 'user', 'content': f'{index}'}], name, None, name)
  )
  config.data.train_files, config.environments.max_ungraded_fraction = (f'generator:{name}',), 1.0
  return config


@pytest.mark.parametrize(('waits', 'steps', 'left_out'), [(False, 2, 2), (True, 0, 0), (False, 2, 0)])
def test_a_run_whose_graders_are_dead_ends_with_their_reason_and_stays_so(experiment, tmp_path, waits, steps, left_out):
  make, _ = experiment
  name = f'dead {steps} {left_out}'
  config = without_lessons(make, name, lambda *asked, **how: fail(ValueError('No key.'))(), total_training_steps=9)
  told = []
  config.algorithm.min_sdpo_examples = 3 if waits else 0
  config.optimizer.skip_empty_steps = left_out == steps
  for _ in range(2):
    with pytest.raises(UserError) as raised:
      loop.train(config, tmp_path, announce=told.append)
    said = 'Nothing was learned in 3 steps in a row, 1 to 3, because no completion was graded'
    assert str(raised.value).startswith(f"{said} (the grader {name!r} raised ValueError('No key.')")
  lines = lines_without_time(tmp_path)
  assert [(line['step'], line['train/optimizer_steps'], line['train/skipped_steps']) for line in lines] == [
    (step, steps, left_out) for step in (1, 2, 3)
  ]
  assert steps_on_disk(tmp_path) == [3] and 'the same command resumes' not in ''.join(told)


def test_a_run_without_a_success_goes_on_with_one_warning(experiment, tmp_path, caplog):
  make, _ = experiment
  config = without_lessons(make, 'hard', lambda asked, *rest, **how: [Outcome(0.0)] * len(asked))
  for steps in (4, 5):
    config.trainer.total_training_steps = steps
    assert loop.train(config, tmp_path).skipped.count == steps
  assert [line['train/skipped_steps'] for line in lines_without_time(tmp_path)] == [2] * 5
  assert caplog.text.count('Nothing was learned in 3 steps in a row, 1 to 3, because every gradient was 0') == 1
  assert caplog.text.count('Nothing was learned') == 1


@pytest.mark.slow  # By default test_step.py skips such a step and test_skipped.py counts those in a row.
def test_a_run_without_a_finite_gradient_stops_with_a_sentence_and_a_checkpoint(experiment, tmp_path):
  """The weights survive the first update or two, of which rounding decides; `trainer.max_skipped_steps` is three."""
  make, _ = experiment
  config = make(total_training_steps=8, test_freq=0, best_metric=None)
  config.optimizer.lr, config.optimizer.lr_warmup_steps = 3e38, 0
  config.optimizer.skip_empty_steps = False  # Such weights first have gradients of 0.
  with pytest.raises(UserError) as raised:
    loop.train(config, tmp_path)
  skipped = [line.get('train/skipped_steps') for line in lines_without_time(tmp_path) if line['step']]
  last = len(skipped)
  assert skipped[-3:] == [2, 2, 2] and 2 not in skipped[:-3] and last in (4, 5)
  said = f'Nothing was learned in 3 steps in a row, {last - 2} to {last}, because no gradient was finite'
  assert said in str(raised.value)
  assert steps_on_disk(tmp_path) == [last]
