"""Flipped bits and damaged checkpoints: none is silent, and a resume that believed one would be seen."""

import collections
import contextlib
import json
import pathlib
import random
import re

from etils import epath
import pytest

from benchmarks import flips
import sdpo_jax
from sdpo_jax.training.directory import sealed
from tests import tiny
from tests.training import durable_run

STEPS = 3


@pytest.fixture(scope='module')
def restores(tmp_path_factory):
  """Return restores from a run without a model, which has checkpoints of its last two steps."""
  folder = tmp_path_factory.mktemp('restores')
  config, workdir = durable_run.config(), folder / 'run'
  config.trainer.max_ckpt_to_keep = 2
  with contextlib.ExitStack() as stack:
    checkpoints, writer, *_ = durable_run.begin(config, epath.Path(workdir), durable_run.state_of(0), stack)
    for step in range(1, STEPS + 1):
      writer.write(step, {'train/loss': step / 8})
      checkpoints.save(step, durable_run.state_of(step), {}, {}, None, writer.sync())
  return flips.Restores(config, workdir, durable_run.state_of(0), folder)


def total(outcomes) -> collections.Counter:
  return sum(outcomes.values(), collections.Counter())


def test_a_few_damages_of_a_checkpoint(restores):
  manifest = f'checkpoints/{STEPS}/manifest.json'
  assert restores.outcome(manifest, lambda path: None) == 'restored'
  for act in flips.CHANGES.values():
    assert restores.outcome(manifest, act) == 'older'
  flip = restores.outcome('epochs.json', lambda path: flips.flip_bit(path, 77))
  assert flip == 'restored'


def test_what_is_restored_wrongly_is_silent(restores, monkeypatch):
  monkeypatch.setitem(restores.digests, STEPS, 'f' * 64)
  assert restores.outcome('config.json', lambda path: None) == flips.SILENT


@pytest.mark.slow
def test_every_damage_of_a_checkpoint_is_noticed_or_makes_no_difference(restores):
  found = flips.matrix(restores, random.Random(0))
  assert set(total(found)) == {'restored', 'older'}, found
  assert found['flip']['older'] > 100 and all(found[change]['older'] > 8 for change in flips.CHANGES)


@pytest.fixture(scope='module')
def trials(tmp_path_factory):
  folder = tmp_path_factory.mktemp('trials')
  changes = {'trainer.save_freq': 2, 'trainer.test_freq': 2, 'trainer.total_training_steps': 6}
  changes |= {'trainer.rollout_save_freq': 1, 'trainer.max_ckpt_to_keep': 2}
  return flips.Trials(sdpo_jax.load_config(tiny.make_experiment(folder), changes), folder)


@pytest.mark.slow
def test_no_flip_is_silent_to_verify_and_a_resume(trials):
  found = flips.flips(trials, 6, random.Random(0))
  assert set(total(found)) <= {'noticed', 'refused', 'unreferenced'}, found
  assert total(found)['noticed'] > 1


@pytest.mark.slow
def test_a_resume_that_believes_an_altered_line_is_seen(trials, monkeypatch):
  """The score of an evaluation, from which the gap of later steps is computed, loses its seal."""
  copy = trials.copy

  def altered() -> pathlib.Path:
    path = copy() / 'metrics.jsonl'
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    at, name = next((at, name) for at in (4, 2) for name in lines[at] if re.fullmatch('eval/.*/mean@[0-9]+', name))
    lines[at][name] += 0.25
    path.write_text(''.join(json.dumps(line) + '\n' for line in lines))
    return path.parent

  monkeypatch.setattr(trials, 'copy', altered)
  assert trials.flip('rollouts/1.jsonl', 9) == 'refused'
  monkeypatch.setattr(sealed, 'check_line', lambda line, before: (sealed.WHOLE, ''))
  assert trials.flip('rollouts/1.jsonl', 9) == flips.SILENT
