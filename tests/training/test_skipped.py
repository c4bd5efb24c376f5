"""A run that takes no optimizer step any more says so and stops: it does not end as if it had learned something."""

from __future__ import annotations

import json
import math
import re

import pytest

from sdpo_jax.config import TrainerConfig
from sdpo_jax.evaluation.alarms import ROLLBACK
from sdpo_jax.training import skipped
from tests import tiny


def line(steps: int, left_out: int, norm: float | None = None, **more):
  counts = {'train/optimizer_steps': float(steps), 'train/skipped_steps': float(left_out)}
  graded = {'rollout/ungraded_fraction': 0.0, 'rollout/score_mean': 0.5}
  return counts | graded | {'train/grad_norm': norm} | more


def numbered(lines):
  return [{'step': step} | found for step, found in enumerate(lines, 1)]


DEAD = {'rollout/ungraded_fraction': 1.0, 'rollout/score_mean': None, 'ungraded_reason': 'the judge is down.'}
TAUGHT, NAN, ALIKE, UNGRADED = line(1, 0, 0.5), line(1, 1), line(1, 1, 0.0), line(1, 1, 0.0, **DEAD)
STEPPED = line(2, 0, 0.0, **DEAD)
WAITING, UNGRADED_WAITING = line(0, 0, **{'gathering/rows': 2}), line(0, 0, **DEAD)
NONE_WAITS = line(0, 0, **{'gathering/rows': 0})


@pytest.mark.parametrize(
  ('lines', 'count'),
  [
    ([], 0),
    ([{'eval/x/mean@2': 0.5}], 0),
    ([line(1, 1), line(1, 1)], 2),
    ([line(1, 1), line(1, 0), line(1, 1)], 1),
    ([line(32, 32), line(32, 31)], 0),  # One of its optimizer steps was taken.
    ([line(32, 32), line(32, 32), line(32, 32)], 3),
    ([line(1, 1), line(1, 1, **{ROLLBACK: 1.0})], 0),  # The weights are others now.
    ([line(1, 1, **{ROLLBACK: 1.0}), line(1, 1)], 1),
  ],
)
def test_only_steps_in_a_row_without_any_update_count(lines, count):
  found = skipped.in_a_row(numbered(lines))
  assert found[:2] == (count, skipped.NOT_FINITE if count else '')


@pytest.mark.parametrize(
  ('lines', 'why', 'count', 'first', 'remedy'),
  [
    ([NAN, NAN], skipped.NOT_FINITE, 2, 2, 'lower optimizer.lr'),
    ([line(1, 1, math.nan)], skipped.NOT_FINITE, 1, 2, 'lower optimizer.lr'),  # Before JSON makes it null.
    ([UNGRADED, UNGRADED], skipped.UNGRADED, 2, 2, 'mend the graders, and raise'),
    ([line(1, 1, 0.0, **DEAD | {'rollout/score_mean': math.nan})], skipped.UNGRADED, 1, 2, 'mend the graders'),
    ([STEPPED, line(2, 1, 0.0, **DEAD)], skipped.UNGRADED, 2, 2, 'mend the graders'),
    # Its optimizer step learned from completions that had waited, or from a teacher that needs no grades.
    ([UNGRADED, line(2, 0, 0.5, **DEAD), UNGRADED], skipped.UNGRADED, 1, 4, 'mend the graders'),
    ([STEPPED, line(2, 0, 0.0), UNGRADED], skipped.UNGRADED, 1, 4, 'mend the graders'),
    ([UNGRADED_WAITING] * 3, skipped.UNGRADED, 3, 2, 'mend the graders'),
    ([ALIKE, UNGRADED, NAN, UNGRADED], skipped.NOT_FINITE, 3, 3, 'lower optimizer.lr'),
    # The weights are still those without a finite gradient, but the graders have worked.
    ([NAN, ALIKE, WAITING, NAN], skipped.NOT_FINITE, 2, 2, 'lower optimizer.lr'),
    ([UNGRADED, ALIKE, UNGRADED], skipped.UNGRADED, 1, 4, 'mend the graders'),
    ([UNGRADED, WAITING, UNGRADED_WAITING], skipped.UNGRADED, 1, 4, 'mend the graders'),
  ],
)
def test_the_cause_is_told_with_its_remedy(lines, why, count, first, remedy):
  found, last = skipped.in_a_row(numbered([TAUGHT, *lines])), 1 + len(lines)
  assert found[:3] == (count, why, first)
  said = skipped.complaint(found, last, TrainerConfig())
  steps = f'step {last}' if first == last else f'{last - first + 1} steps in a row, {first} to {last},'
  reason = f'{why} (the judge is down)' if why == skipped.UNGRADED else why
  weights = 'the weights are those of'
  if lines[-1]['train/skipped_steps'] < lines[-1]['train/optimizer_steps']:
    weights = 'only momentum and weight decay moved the weights after'
  assert said.startswith(f'Nothing was learned in {steps} because {reason}; {weights} step {first - 1}.')
  assert f'Look at the rollouts of step {first};' in said
  assert remedy in said and 'trainer.max_skipped_steps=3' in said


@pytest.mark.parametrize(
  ('batch', 'note'),
  [
    (TAUGHT, ''),
    ({'rollout/score_mean': 0.5}, ''),
    (NAN, '  1 optimizer step skipped: gradient not finite'),
    (line(2, 2, 0.0), '  2 optimizer steps skipped: gradient 0'),
    (UNGRADED, '  1 optimizer step skipped: gradient 0  no completion was graded'),
    (STEPPED, '  no completion was graded'),
    (WAITING | {'gathering/examples': 7.0}, '  no update: 7 examples wait'),
    (UNGRADED_WAITING | {'gathering/examples': 0.0}, '  no update: 0 examples wait  no completion was graded'),
  ],
)
def test_the_note_of_a_step_tells_what_it_lacks(batch, note):
  assert skipped.note(batch) == note


@pytest.mark.parametrize(
  ('limit', 'total', 'most'), [(3, 100, 2), (1, 100, 0), (0, 100, 100), (3, 2, 1), (3, 3, 2), (3, 1, 0)]
)
@pytest.mark.parametrize('why', [skipped.NOT_FINITE, skipped.UNGRADED])
def test_how_many_a_run_bears(limit, total, most, why):
  """`most` and not one more; a run that is shorter than the limit must not learn nothing at all."""
  trainer = TrainerConfig(max_skipped_steps=limit, total_training_steps=total)
  bears = [not skipped.too_many(skipped.Skipped(count, why), trainer) for count in (0, most, most + 1)]
  assert bears == [True, True, not limit]


@pytest.mark.parametrize(
  ('limit', 'total', 'count', 'step'),
  [(3, 100, 3, 3), (3, 4, 3, 3), (3, 3, 3, 3), (3, 2, 2, 2), (3, 4, 3, 4), (1, 1, 1, 1)],
)
def test_what_a_complaint_asks_to_raise_lets_the_run_go_on(limit, total, count, step):
  found = skipped.Skipped(count, skipped.UNGRADED, 1)
  given = {'max_skipped_steps': limit, 'total_training_steps': total}
  assert skipped.too_many(found, TrainerConfig(**given))
  said = skipped.complaint(found, step, TrainerConfig(**given))
  raised = {name: int(value) + 10 for name, value in re.findall(r'trainer\.(\w+)=(\d+)', said)}
  after = TrainerConfig(**given | raised)
  assert not skipped.too_many(found, after) and after.total_training_steps > step
  assert not skipped.too_many(found, TrainerConfig(**given | {'max_skipped_steps': 0}))


@pytest.mark.parametrize('alike', [ALIKE, NONE_WAITS])
@pytest.mark.parametrize('limit', [0, 2, 3])
def test_batches_that_are_graded_but_teach_nothing_never_end_a_run_and_are_warned_of_once_a_streak(limit, alike):
  """Two streaks, of five and of four batches, of which the second has one that waits."""
  trainer, found, warned = TrainerConfig(max_skipped_steps=limit), skipped.Skipped(), {}
  for step, batch in enumerate([TAUGHT, *[alike] * 5, TAUGHT, *[alike] * 2, WAITING, *[alike] * 2], 1):
    before, found = found, skipped.after(found, {'step': step} | batch)
    assert not skipped.too_many(found, trainer)
    if skipped.warns(before, found, trainer):
      warned[step] = skipped.complaint(found, step, trainer)
  assert list(warned) == {0: [], 2: [3, 9], 3: [4, 11]}[limit]
  for first, (step, said) in zip((2, 8), warned.items(), strict=limit > 0):
    assert said.startswith(f'Nothing was learned in {step - first + 1} steps in a row, {first} to {step}, because')
    assert 'every gradient was 0' in said and f'rollouts of step {first}' in said and said.endswith('The run goes on.')
  assert not skipped.warns(skipped.Skipped(), skipped.Skipped(limit, skipped.NOT_FINITE, 1), trainer)


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
  """Return a learning rate that the weights do not survive: after two or three steps there is no finite gradient."""
  folder = tmp_path_factory.mktemp('skipped')
  config = tiny.make_experiment(folder)

  def train(steps: int) -> tuple[str, list[str]]:
    settings = {
      'trainer.total_training_steps': steps,
      'trainer.test_freq': 0,
      'trainer.save_freq': 0,
      'optimizer.lr': 3e38,
      'optimizer.skip_empty_steps': False,  # Such weights may first have gradients of 0.
    }
    flags = [f'--config.{name}={value}' for name, value in settings.items()]
    return 'train', [f'--config={config}', f'--workdir={folder}/run', *flags]

  return folder / 'run', tiny.launch_many([train(4), train(8), train(8)])


@pytest.mark.slow  # tests/training/test_endings.py has such a run without the resumes.
def test_a_run_that_learns_nothing_stops_with_a_checkpoint_also_after_a_resume(runs):
  workdir, (short, long, again) = runs
  lines = [json.loads(text) for text in (workdir / 'metrics.jsonl').read_text().splitlines()]
  taught = [found['train/skipped_steps'] == 0 for found in lines]
  last = taught.index(False)  # The step up to which the weights survive, 2 or 3 by how the compiler rounds.
  assert last in (2, 3) and taught == [True] * last + [False] * 3
  assert short.returncode == 0, short.stderr
  few = 'step 4' if last == 3 else '2 steps in a row, 3 to 4,'
  assert f'Nothing was learned in {few} because {skipped.NOT_FINITE}; the weights are those of' in short.stdout
  assert long.returncode == 2
  said = f'Nothing was learned in 3 steps in a row, {last + 1} to {last + 3}, because no gradient was finite'
  assert said in long.stderr
  assert 'trainer.max_skipped_steps=3' in long.stderr and 'Traceback' not in long.stderr
  assert [found['step'] for found in lines] == list(range(1, last + 4))
  assert (workdir / 'checkpoints' / str(last + 3)).is_dir()
  # Started again as it is, it stays where it is.
  assert again.returncode == 2 and again.stderr.splitlines()[-1] == long.stderr.splitlines()[-1]
  assert f'step {last + 4}/8' not in again.stderr
  assert 'compiled all programs' in long.stderr and 'programs' not in again.stderr  # Nothing is compiled for it.
