"""Collapse alarms: the rule language, and what warning, stopping and rolling back do to a run, also to one that is
killed.
"""

from __future__ import annotations

import dataclasses
import json
import re

import chex
import jax
import numpy as np
import pytest

from sdpo_jax.config import Config
from sdpo_jax.errors import UserError
from sdpo_jax.evaluation import alarms
from sdpo_jax.inference import runs
from sdpo_jax.learning.update import abstract_state
from sdpo_jax.training import loop
from sdpo_jax.training.checkpoint.checkpoints import Checkpoints
from sdpo_jax.training.opening import make_session
from sdpo_jax.training.specs import update_spec
from tests import tiny
from tests.resumed_runs import start_two


def watch(*rules: str) -> alarms.AlarmMonitor:
  return alarms.AlarmMonitor([alarms.parse(rule) for rule in rules])


def steps_with_alarm(rule: str, values: list[float | None], name: str = 'm') -> list[int]:
  """Return steps, from 1, at which a rule holds for a metric with these values; None: not measured."""
  watched = watch(rule)
  lines = [{} if value is None else {name: value} for value in values]
  return [step for step, line in enumerate(lines, 1) if watched.observe(step, line)[0]]


@pytest.mark.parametrize(
  'rule, values, expected',
  [
    ('m < 0.5', [1, 0.5, 0.4], [3]),
    ('m>5e-1', [1, 0.5, 0.6], [1, 3]),
    ('m < -2', [-1, -3], [2]),
    ('m < 0.5 for 2', [0.1, 0.9, 0.1, 0.2, 0.3], [4, 5]),
    ('m < 0.5 for 2', [0.1, None, float('nan'), 0.2], [4]),  # What was not measured does not count.
    ('m < 0.5 * best', [10, 20, 9, 11], [3]),  # Best of `<`: the largest.
    ('m > 2 * best', [10, 4, 7, 9], [4]),  # Best of `>`: the smallest.
    ('m < best', [1, 1, 2, 1.5], [4]),
    ('m < 0.5*first', [10, 100, 40, 4], [4]),
    ('m > 3 * last', [1, 2, 7, 7], [3]),
    ('m > best', [5], []),  # Nothing to compare with.
  ],
)
def test_rules(rule, values, expected):
  assert steps_with_alarm(rule, values) == expected


def test_wildcards_stand_for_one_part_of_a_name_or_for_several():
  names = ('eval/a/mean@4', 'eval/b c/mean@4', 'eval/a/acc/mean@4', 'eval/org/set/mean@4', 'xeval/a/mean@4')

  def fits(rule):
    return [name for name in names if steps_with_alarm(rule, [0], name)]

  assert fits('eval/*/mean@4 < 1') == ['eval/a/mean@4', 'eval/b c/mean@4']
  assert fits('eval/**/mean@4 < 1') == list(names[:4])
  assert fits('eval/a/*@4 < 1') == ['eval/a/mean@4']
  assert fits('eval/b c/mean@4<1') == ['eval/b c/mean@4']


def test_every_metric_counts_by_itself_and_rules_have_numbers():
  watched = watch('a/* < 1 for 2', 'never < 1')
  assert watched.observe(1, {'a/x': 0, 'a/y': 2}) == ([], {'alarm/1': 0.0})
  assert watched.observe(2, {'a/x': 2, 'a/y': 0}) == ([], {'alarm/1': 0.0})
  raised, fired = watched.observe(3, {'a/x': 0, 'a/y': 0})
  assert [(alarm.metric, alarm.number, alarm.held, alarm.begins) for alarm in raised] == [('a/y', 1, 2, True)]
  assert fired == {'alarm/1': 1.0}
  assert str(raised[0]) == "a/y = 0 < 1 (2 times in a row), rule 'a/* < 1 for 2'"
  raised, _ = watched.observe(4, {'a/x': 5, 'a/y': 0})
  assert [alarm.begins for alarm in raised] == [False]
  assert watched.observe(5, {'b': 0}) == ([], {})
  assert watched.unmatched() == ['never < 1']


def test_the_evaluation_before_the_first_step_is_a_value_but_no_alarm():
  watched = watch('m < 0.5 * first')
  assert watched.observe(0, {'m': 10}) == ([], {})
  assert watched.observe(1, {'m': 4})[0]
  assert not watch('m < 0.5').observe(0, {'m': 0})[0]


def test_a_rollback_forgets_the_undone_steps_and_counts_anew():
  watched = watch('m < 0.5 * best for 2', 'n > 3 * last')
  for step, value in enumerate([5, 10, 100, 4, 4], 1):
    raised, _ = watched.observe(step, {'m': value, 'n': 100.0 / value})
  assert [alarm.rule.text for alarm in raised] == ['m < 0.5 * best for 2']
  watched.roll_back(2)
  assert watched.rollbacks == 1
  assert not watched.observe(6, {'m': 4, 'n': 10})[0]  # Counted anew; the last n is that of step 2.
  assert watched.observe(7, {'m': 4, 'n': 31})[1] == {'alarm/1': 1.0, 'alarm/2': 1.0}  # The best m is 10 again.


def test_a_replay_of_the_lines_is_the_same_watch():
  rng = np.random.default_rng(0)
  rules = ('m < 0.8 * best for 2', 'm > 1.5 * last', 'n > 0.9')
  whole, lines, raised = watch(*rules), [], []
  for step in range(1, 60):
    values = {'m': float(rng.random()), **({'n': float(rng.random())} if step % 3 == 0 else {'n': float('nan')})}
    found, fired = whole.observe(step, values)
    raised.append(found)
    line = {'step': step, **{k: None if v != v else v for k, v in values.items()}, **fired}
    if step in (20, 40):
      whole.roll_back(step - 7)
      line[alarms.ROLLBACK] = float(step - 7)
    lines.append(json.loads(json.dumps(line)))
  assert sum(map(bool, raised)) > 10
  for cut in range(1, 59):
    resumed = watch(*rules)
    assert resumed.replay(lines[:cut]) == ([] if cut in (20, 40) else raised[cut - 1])
    assert resumed.rollbacks == sum(step <= cut for step in (20, 40))
    found, _ = resumed.observe(cut + 1, {k: v for k, v in lines[cut].items() if k != 'step'})
    assert found == raised[cut]


@pytest.mark.parametrize(
  'text',
  ['', 'm', 'm <', '< 1', 'm = 1', 'm < x', 'm < 0.5 * worst', 'm < best * 2', 'm < 1 for', 'm < 1 for 0']
  + ['m < 1 for 2.5', 'm < nan', 'm < 1 < 2', 'm < 1 2', 'm < 1 and n > 2', 'm *** < 1', 'm <= 1'],
)
def test_a_malformed_rule_is_named(text):
  with pytest.raises(UserError, match='alarms.rules: .* is not a rule: write METRIC < VALUE') as error:
    alarms.parse(text)
  assert repr(text) in str(error.value)


def test_the_rules_that_the_documentation_recommends_are_rules():
  text = (tiny.REPOSITORY / 'docs' / 'evaluation.md').read_text()
  table = text.split('### Rules to start with')[1].split('###')[0]
  rules = re.findall(r'^\| `([^`]+)` \|', table, re.MULTILINE)
  assert len(rules) >= 10
  for rule in rules:
    assert alarms.parse(rule).text == rule


def test_settings_of_alarms_are_checked_before_a_run():
  config = Config()
  config.model.path, config.data.train_files, config.data.val_files = 'm', ('x.jsonl',), ('y.jsonl',)
  config.validate()

  def sentence(**changes) -> str:
    changed = dataclasses.replace(
      config,
      alarms=dataclasses.replace(config.alarms, **changes.get('alarms', {})),
      trainer=dataclasses.replace(config.trainer, **changes.get('trainer', {})),
    )
    with pytest.raises(UserError) as error:
      changed.validate()
      alarms.rules(changed.alarms.rules, evaluates=bool(changed.trainer.test_freq))
    return str(error.value)

  best = {'best_metric': 'eval/a/mean@4'}
  assert 'trainer.best_metric' in sentence(alarms={'action': 'rollback'})
  assert 'set trainer.save_freq' in sentence(alarms={'action': 'rollback'}, trainer={**best, 'save_freq': 0})
  assert 'trainer.test_freq=5 a multiple of trainer.save_freq=10' in sentence(
    alarms={'action': 'rollback'}, trainer={**best, 'save_freq': 10}
  )
  assert 'trainer.test_freq=0 makes none' in sentence(alarms={'rules': ('gap/x > 1',)}, trainer={'test_freq': 0})
  assert 'max_rollbacks' in sentence(alarms={'max_rollbacks': -1})
  assert 'empty word' in sentence(alarms={'epistemic_words': ('wait', ' ')})
  assert "'a = 1' is not a rule" in sentence(alarms={'rules': ('a < 1', 'a = 1')})


LAST = 6
# Holds at every step; counting anew after a rollback, it raises alarms at steps 3 and 6, of which the second stops.
ALWAYS = 'rollout/completion_length_max > 0 for 3'
# Put behind a config: the process kills itself, as if from outside, right after the line of a step is written.
KILLED = """
import os, signal
from sdpo_jax.training.metrics import MetricsWriter

def write_and_die(self, step, values, write=MetricsWriter.write):
  write(self, step, values)
  if step == {step}:
    os.kill(os.getpid(), signal.SIGKILL)

MetricsWriter.write = write_and_die
"""


@pytest.fixture(scope='module')
def experiment(tmp_path_factory):
  """Run one experiment twice: rolled back, then stopped; the same, killed and started again."""
  folder = tmp_path_factory.mktemp('alarms')
  config = tiny.make_experiment(folder)
  killed = {
    'rolling_back': 3,  # The line says so, but nothing is restored or saved.
    'between': 5,  # After the rollback, with counts under way.
  }
  for name, step in killed.items():
    (folder / f'{name}.py').write_text(config.read_text() + KILLED.format(step=step))

  def train(workdir: str, config: str = 'tiny_config') -> tuple[str, list[str]]:
    settings = {
      'trainer.total_training_steps': 8,
      'trainer.test_freq': 1,
      'trainer.max_ckpt_to_keep': 20,
      'trainer.best_metric': 'eval/parity/mean@2',
      'optimizer.lr_warmup_steps': 0,
      'alarms.rules': ALWAYS,
      'alarms.action': 'rollback',
      'alarms.max_rollbacks': 1,
    }
    flags = [f'--config.{name}={value}' for name, value in settings.items()]
    return 'train', [f'--config={folder}/{config}.py', f'--workdir={folder}/{workdir}', *flags]

  commands = {
    'whole': train('whole'),
    **{name: train('killed', name) for name in killed},
    'killed': train('killed'),
  }
  done = tiny.launch_many(list(commands.values()))
  return folder, dict(zip(commands, done, strict=True)), list(killed)


def lines_of(workdir) -> list[dict]:
  lines = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
  return [
    {
      key: value
      for key, value in line.items()
      if not key.startswith(('time/', 'throughput/', 'fencing_epoch', 'line_digest'))
    }
    for line in lines
  ]


def checkpoint(workdir, step: int):
  """State and host state of a step."""
  config = runs.run_config(workdir)
  session, parameters = make_session(config, workdir)
  checkpoints = Checkpoints(workdir, read_only=True)
  state = checkpoints.restore_step(step, abstract_state(update_spec(config), parameters, session.mesh))
  host = json.loads((checkpoints.directory / str(step) / 'host' / 'metadata').read_text())
  steps = checkpoints.steps()
  checkpoints.close()
  return state, host, steps


@pytest.mark.slow
def test_a_rollback_restores_the_best_weights_and_goes_on_with_other_questions(experiment):
  folder, done, _ = experiment
  assert done['whole'].returncode == loop.EXIT_ALARM, done['whole'].stderr
  lines = lines_of(folder / 'whole')
  assert [line['step'] for line in lines] == list(range(LAST + 1))
  assert [line['step'] for line in lines if line.get('alarm/1')] == [3, 6]
  assert [line['step'] for line in lines if alarms.ROLLBACK in line] == [3]
  assert [line['step'] for line in lines if alarms.STOP in line] == [6]
  score = {line['step']: line['eval/parity/mean@2'] for line in lines}
  best = max((1, 2), key=lambda step: (score[step], step))
  assert lines[3][alarms.ROLLBACK] == best
  wrecked, before, _ = checkpoint(folder / 'whole', 2)
  restored, after, steps = checkpoint(folder / 'whole', 3)
  target, _, _ = checkpoint(folder / 'whole', best)
  assert steps == list(range(1, LAST + 1))
  for part in ('trainable', 'opt_state', 'teacher'):
    chex.assert_trees_all_equal(getattr(restored, part), getattr(target, part))
  assert int(restored.step) == int(restored.optimizer_step) == 3
  assert before['iterator'] != after['iterator']
  moved = checkpoint(folder / 'whole', 4)[0].trainable
  assert any(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (moved, restored.trainable)), strict=True))
  questions = [
    {json.loads(line)['id'] for line in (folder / 'whole' / 'rollouts' / f'{step}.jsonl').read_text().splitlines()}
    for step in range(1, LAST + 1)
  ]
  assert len(set.union(*questions)) == sum(map(len, questions))
  assert f'Rolling back to the weights of step {best}' in done['whole'].stderr
  assert done['whole'].stderr.count(f'rule {ALWAYS!r}') == 2
  assert f'Stopped by an alarm after step {LAST}' in done['whole'].stdout and ALWAYS in done['whole'].stdout
  assert 'alarms.max_rollbacks=1 rollbacks were made. The best checkpoint is that of step' in done['whole'].stdout


@pytest.mark.slow
def test_a_rolled_back_run_that_is_killed_ends_as_the_one_that_is_not(experiment):
  folder, done, killed = experiment
  assert [done[name].returncode for name in killed] == [-9] * len(killed), [done[name].stderr for name in killed]
  assert done['killed'].returncode == loop.EXIT_ALARM, done['killed'].stderr
  assert lines_of(folder / 'killed') == lines_of(folder / 'whole')
  left, right = (checkpoint(folder / name, LAST) for name in ('whole', 'killed'))
  assert left[1] == right[1]
  chex.assert_trees_all_equal(left[0].replace(rng=None), right[0].replace(rng=None))
  for step in range(1, LAST + 1):
    name = f'rollouts/{step}.jsonl'
    assert (folder / 'whole' / name).read_text() == (folder / 'killed' / name).read_text()


# Put behind a config: a grader that would judge otherwise in the other process, and that writes down what it judged.
UNSTEADY = """
import jax

def grade_and_tell(examples, completions, *, truncated):
  with open('{folder}/graded_%d.txt' % jax.process_index(), 'a') as file:
    file.writelines(f'{{example.id}} {{text!r}}\\n' for example, text in zip(examples, completions))
  return [
    Outcome(float((sum(text.encode()) + jax.process_index()) % 2), 'The sum must be odd.', {{'pred': text[:4]}})
    for text in completions
  ]

grade_and_tell.limits_itself = True  # So that it runs in the process whose number it reads.
registry._FACTORIES['parity'] = lambda settings: grade_and_tell
"""


@pytest.mark.slow
def test_two_processes_share_the_grading_and_roll_back_together(experiment):
  folder, _, _ = experiment
  config = folder / 'unsteady.py'
  config.write_text((folder / 'tiny_config.py').read_text() + UNSTEADY.format(folder=folder))
  settings = {'test_freq': 1, 'total_training_steps': 2, 'best_metric': 'eval/parity/mean@2'}
  arguments = [
    f'--config={config}',
    *(f'--config.trainer.{name}={value}' for name, value in settings.items()),
    '--config.alarms.rules=rollout/completion_length_max > 0 for 2',
    '--config.alarms.action=rollback',
  ]
  processes = start_two(arguments, folder / 'two')
  assert [process.wait() for process in processes] == [0, 0]
  lines = lines_of(folder / 'two')
  assert [line['step'] for line in lines] == [0, 1, 2]
  assert [line.get(alarms.ROLLBACK) for line in lines] == [None, None, 1]
  graded = [(folder / f'graded_{process}.txt').read_text().splitlines() for process in range(2)]
  assert list(map(len, graded)) == [(3 * 4 + 2 * 8) / 2] * 2
  rollouts = [
    json.loads(line)
    for step in (1, 2)
    for line in (folder / 'two' / 'rollouts' / f'{step}.jsonl').read_text().splitlines()
  ]
  judged = [f'{rollout["id"]} {rollout["completion"]!r}' for rollout in rollouts]
  assert set(judged) <= {*graded[0], *graded[1]}
  by_process = [sum(rollout['completion'].encode(errors='replace')) % 2 != rollout['score'] for rollout in rollouts]
  assert by_process == [False, True] * 8  # Row by row in turns, and what one process said counts for both.


@pytest.mark.slow
def test_the_best_checkpoint_can_be_asked_for_by_its_step(experiment):
  folder, _, _ = experiment
  _, parameters, step = runs.open_run(folder / 'whole', step=2)
  assert step == 2
  chex.assert_trees_all_equal(parameters, checkpoint(folder / 'whole', 2)[0].trainable)
  with pytest.raises(UserError, match=r'--step=9: .* has checkpoints of the steps \[1, 2, 3, 4, 5, 6\]'):
    runs.open_run(folder / 'whole', step=9)
  with pytest.raises(UserError, match='--step is about the checkpoints of a run'):
    runs.open_source(runs.RunOrModel(model='model', step=2), None)
