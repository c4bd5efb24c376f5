"""A run that takes no optimizer step any more says so and stops: it does not end as if it had learned something."""

from __future__ import annotations

import json
import math

import pytest

from sdpo_jax.config import TrainerConfig
from sdpo_jax.evaluation.alarms import ROLLBACK
from sdpo_jax.training import skipped
from tests import tiny


def line(steps: int, left_out: int, norm: float | None = None, **more):
  counts = {'train/optimizer_steps': float(steps), 'train/skipped_steps': float(left_out)}
  return {'step': 1, **counts, 'train/grad_norm': norm, **more}


@pytest.mark.parametrize(
  ('lines', 'count'),
  [
    ([], 0),
    ([{'step': 0, 'eval/x/mean@2': 0.5}], 0),
    ([line(1, 1), line(1, 1)], 2),
    ([line(1, 1), line(1, 0), line(1, 1)], 1),
    ([line(32, 32), line(32, 31)], 0),  # One of its optimizer steps was taken.
    ([line(32, 32), line(32, 32), line(32, 32)], 3),
    ([line(1, 1), line(1, 1, **{ROLLBACK: 1.0})], 0),  # The weights are others now.
    ([line(1, 1, **{ROLLBACK: 1.0}), line(1, 1)], 1),
  ],
)
def test_only_steps_in_a_row_without_any_update_count(lines, count):
  assert skipped.in_a_row(lines) == skipped.Skipped(count, skipped.NOT_FINITE if count else '')


@pytest.mark.parametrize(
  ('norms', 'why', 'remedy'),
  [
    ([0.0, 0.0], skipped.EMPTY, 'see there whether the graders answer'),
    ([None, None], skipped.NOT_FINITE, 'lower optimizer.lr'),
    ([math.nan, 0.0], skipped.NOT_FINITE, 'lower optimizer.lr'),  # As a run has it, before JSON makes it null.
    ([0.0, None], skipped.NOT_FINITE, 'lower optimizer.lr'),
  ],
)
def test_the_cause_is_told_with_its_remedy(norms, why, remedy):
  found = skipped.in_a_row([line(1, 0, 0.5), *(line(2, 2, norm) for norm in norms)])
  assert found == skipped.Skipped(2, why)
  said = skipped.complaint(found, 7, TrainerConfig())
  assert f'2 steps in a row, 6 to 7, because {why}; the weights are those of step 5. Look at the rollouts' in said
  assert remedy in said and 'trainer.max_skipped_steps=3' in said


@pytest.mark.parametrize(
  ('limit', 'total', 'most'), [(3, 100, 2), (1, 100, 0), (0, 100, 100), (3, 2, 1), (3, 3, 2), (3, 1, 0)]
)
def test_how_many_a_run_bears(limit, total, most):
  """`most` and not one more; a run that is shorter than the limit must not learn nothing at all."""
  trainer = TrainerConfig(max_skipped_steps=limit, total_training_steps=total)
  bears = [not skipped.too_many(skipped.Skipped(count, skipped.NOT_FINITE), trainer) for count in (0, most, most + 1)]
  assert bears == [True, True, not limit]
  # An only step without a signal is bad luck.
  assert not skipped.too_many(skipped.Skipped(limit - 1, skipped.EMPTY), trainer)
  assert skipped.too_many(skipped.Skipped(limit, skipped.EMPTY), trainer) == bool(limit)


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

  return folder / 'run', tiny.launch_many([train(4), train(8), train(8)], folder / 'output')


@pytest.mark.slow  # tests/training/test_endings.py has such a run without the resumes.
def test_a_run_that_learns_nothing_stops_with_a_checkpoint_also_after_a_resume(runs):
  workdir, (short, long, again) = runs
  lines = [json.loads(text) for text in (workdir / 'metrics.jsonl').read_text().splitlines()]
  taught = [found['train/skipped_steps'] == 0 for found in lines]
  last = taught.index(False)  # The step up to which the weights survive, 2 or 3 by how the compiler rounds.
  assert last in (2, 3) and taught == [True] * last + [False] * 3
  assert short.returncode == 0, short.stderr
  few = 'last one' if last == 3 else 'last 2'
  assert f'The {few} changed nothing, because {skipped.NOT_FINITE}; the weights are those of' in short.stdout
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
