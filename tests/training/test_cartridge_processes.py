"""A run of a cartridge in two processes, stopped and resumed, is that of one process."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from sdpo_jax.inference import runs
from tests import tiny
from tests.resumed_runs import lines_without_time, start, start_two

SETTINGS = (
  '--config=configs/cartridge_quickstart.py',
  '--config.optimizer.lr_scheduler_type=constant',  # It does not depend on when the run ends.
  '--config.optimizer.lr_warmup_steps=0',
  '--config.optimizer.lr=0.02',
  '--config.trainer.test_freq=2',
  '--config.trainer.save_freq=2',
  '--config.trainer.tensorboard=false',
  # Two processes have a part of it each; one has no other to share with.
  '--config.model.cartridge.divide_document=true',
)


def steps(count: int) -> list[str]:
  return [*SETTINGS, f'--config.trainer.total_training_steps={count}']


@pytest.mark.campaign  # Runs of two processes that are killed and resumed are tested in test_resume.py.
def test_two_processes_train_stop_resume_and_export_what_one_does(tmp_path):
  """They share the rows of the document's questions; the frozen slots are made anew when they resume."""
  one = start(steps(4), tmp_path / 'one', quick=True)
  assert one.wait() == 0
  assert [process.wait() for process in start_two(steps(2), tmp_path / 'two')] == [0, 0]
  assert [process.wait() for process in start_two(steps(4), tmp_path / 'two')] == [0, 0]
  alone, together = lines_without_time(tmp_path / 'one'), lines_without_time(tmp_path / 'two')
  assert [line['step'] for line in together] == [line['step'] for line in alone] == [0, 1, 2, 3, 4]
  for left, right in zip(alone, together, strict=True):
    assert left.keys() == right.keys()
    for name in ('train/loss', 'train/grad_norm', 'rollout/score_mean', 'eval/facts/mean@4'):
      if name in left:
        assert left[name] == pytest.approx(right[name], rel=1e-4), (left['step'], name)
  slots = []
  for name in ('one', 'two'):
    done = tiny.launch('export', f'--workdir={tmp_path / name}', f'--output={tmp_path / name}_cartridge')
    assert done.returncode == 0, done.stderr
    slots.append(runs.open_run(str(tmp_path / name))[1])
  jax.tree.map(lambda left, right: np.testing.assert_allclose(left, right, atol=1e-4), *slots)
