"""Throughput counts what is alive, and what padding takes is a number of its own."""

from __future__ import annotations

import types

import jax
import numpy as np
import pytest

from sdpo_jax.distributed import accelerators
from sdpo_jax.learning import batching
from sdpo_jax.rollout.results import SamplingStats
from sdpo_jax.training import step, step_records
from sdpo_jax.training.specs import batch_spec
from tests.generation_batches import make_config, make_samples


def test_throughput_counts_live_tokens_and_fill_the_rest(monkeypatch):
  """By hand from the lengths of the samples; the same tokens in micro-batches with more padding have the same MFU."""
  config = make_config(ppo_micro_batch_size=4)
  samples = make_samples(config)
  lengths = samples.rollouts.completion_mask.sum(1)
  live = [0, 2, 3, 5]
  trained = sum(len(samples.prompts[i]) + lengths[i] for i in live)
  taught = sum(len(samples.teacher_prompts[i]) + lengths[i] for i in live)
  monkeypatch.setattr(accelerators, 'peak_flops', lambda device: 1e6)
  session = types.SimpleNamespace(
    config=config, flops_per_token=10.0, update_flops_per_token=25.0, teacher_flops_per_token=7.0
  )
  prompts = samples.prompts[:4]
  seconds = {'sample': 2.0, 'grade': 0.5, 'train': 1.5}
  graded = types.SimpleNamespace(
    rollouts=samples.rollouts, prompts=prompts, sampling=SamplingStats(tokens=int(lengths.sum()), row_steps=96)
  )
  found = {}
  for padding, multiple in (('little', 1), ('much', 8)):
    student, teacher = step.Filled(), step.Filled()
    for micro in batching.micro_batches(samples, np.arange(8), batch_spec(config), multiple):
      student.add(micro, micro.batch.student)
      teacher.add(micro, micro.batch.teacher)
    report = types.SimpleNamespace(student=student, teacher=teacher)
    found[padding] = step_records.throughput_metrics(session, [graded], report, seconds)
  sampled, devices = lengths.sum(), jax.device_count()
  flops = 10 * (sampled + sum(map(len, prompts))) + 25 * trained + 7 * taught
  expected = {
    'throughput/tokens_per_s': sampled / 4,
    'throughput/tokens_per_s_per_device': sampled / 4 / devices,
    'throughput/sampled_tokens_per_s': sampled / 2,
    'throughput/trained_tokens_per_s': trained / 1.5,
    'throughput/mfu': flops / (4 * devices * 1e6),
    'throughput/fill_sample': sampled / 96,
    # Declared are the limits and powers of two: 8 + 6 tokens of the student's rows, 16 + 6 of the teacher's.
    'throughput/fill_train': trained / (4 * 14),
    'throughput/fill_train_rows': 1.0,
    'throughput/fill_teacher': taught / (4 * 22),
  }
  assert found['little'] == pytest.approx(expected)
  halved = {name: value / 2 if 'fill' in name and 'sample' not in name else value for name, value in expected.items()}
  assert found['much'] == pytest.approx(halved)
  config.actor.pack_sequences = True
  two = types.SimpleNamespace(student=step.Filled(9, 14, rows=2, row_room=2, samples=5), teacher=step.Filled())
  assert step_records.throughput_metrics(session, [graded], two, seconds)['throughput/samples_per_row'] == 2.5


def test_a_step_that_draws_and_learns_nothing_has_no_fill():
  graded = types.SimpleNamespace(rollouts=make_samples(make_config()).rollouts, prompts=[], sampling=SamplingStats())
  report = types.SimpleNamespace(student=step.Filled(), teacher=step.Filled())
  session = types.SimpleNamespace(flops_per_token=1.0, update_flops_per_token=3.0, teacher_flops_per_token=1.0)
  found = step_records.throughput_metrics(session, [graded], report, {'grade': 1.0})
  assert not any('fill_' in name for name in found) and 'throughput/sampled_tokens_per_s' not in found
