"""Rollout weights that the update takes from its own log-probs: those of a scoring pass over all rows, without the
pass.
"""

from __future__ import annotations

import dataclasses
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdpo_jax.config import MeshConfig
from sdpo_jax.distributed import mesh as meshes
from sdpo_jax.learning import batching
from sdpo_jax.training import step, step_records
from sdpo_jax.training.graded import GradedRollouts
from sdpo_jax.training.specs import batch_spec, objective_spec
from sdpo_jax.types import Example, Outcome
from tests.generation_batches import NO_MEMBERS, make_samples, per_token
from tests.updates import settings, start

THRESHOLD = 1.5
CORRECTION = {'algorithm__rollout_correction__rollout_is_threshold': THRESHOLD, 'actor__ppo_micro_batch_size': 4}


def updated(session, batch):
  _, state = start(session.config)
  state, report = step.run_update(session, state, batch)
  return jax.device_get(state.replace(rng=None)), report


@pytest.mark.parametrize('loss_mode', ['sdpo', pytest.param('vanilla', marks=pytest.mark.slow)])
def test_weights_from_inside_are_those_of_a_scoring_pass(loss_mode):
  config = settings(**CORRECTION, actor__policy_loss__loss_mode=loss_mode)
  session, state = start(config)
  batch = make_samples(config)
  if loss_mode == 'vanilla':
    advantages = per_token([1, -1, 0.5, 0, 0, 0, 2, -2])
    batch = dataclasses.replace(batch, teacher_prompts=None, advantages=advantages)
  silent = [1, 4, 6, 7] if loss_mode == 'sdpo' else [3, 4, 5]
  np.testing.assert_array_equal(batching.left_out(batch, batch_spec(config)), silent)
  mask = batch.rollouts.completion_mask
  scored = step.PolicyLogProbs(session, state.trainable, batch).fetch()
  sampler = (scored + np.random.default_rng(0).normal(size=mask.shape)).astype(np.float32)
  batch.rollouts.sampling_log_probs = sampler
  weights = np.minimum(np.exp(np.clip(scored.astype(np.float64) - sampler, -20, 20)), THRESHOLD).astype(np.float32)
  assert (weights[mask] == THRESHOLD).any() and (weights[mask] < 0.7).any()
  before = dataclasses.replace(batch, distill_weights=weights, policy_weights=weights)
  expected, by_pass = updated(session, before)
  found, inside = updated(session, dataclasses.replace(batch, sampling_log_probs=sampler))
  plain, _ = updated(session, batch)
  assert inside.loss == pytest.approx(by_pass.loss, rel=1e-5)
  chex.assert_trees_all_close(found.trainable, expected.trainable, atol=2e-7)
  moved = max(float(abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, (found, plain)), strict=True))
  assert moved > 1e-5
  if loss_mode == 'vanilla':
    ratio = inside.token_values['ppo_ratio']
    assert (ratio[np.isfinite(ratio) & mask] == 1).all()
  # Metrics are of all rows, those without a signal too.
  np.testing.assert_allclose(inside.log_probs, scored, rtol=1e-5, atol=1e-5)
  metrics = step_records.update_metrics(inside, batch, session)
  _, expected_metrics = step.rollout_correction(session, scored, batch)
  assert {name for name in metrics if name.startswith('rollout_corr/')} == expected_metrics.keys()
  assert expected_metrics['rollout_corr/rollout_is_mean'] == pytest.approx(
    np.exp((scored - sampler)[mask].astype(np.float64)).mean(), rel=1e-5
  )
  for name, value in expected_metrics.items():
    assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize(
  ('changes', 'before', 'inside'),
  [
    ({}, False, True),
    ({'algorithm__rollout_correction__rollout_is': None}, False, False),
    ({'algorithm__rollout_correction__rollout_is_batch_normalize': True}, True, False),
    ({'actor__ppo_mini_batch_size': 2}, True, False),
    ({'actor__ppo_epochs': 2}, True, False),
    ({'actor__ppo_epochs': 2, 'algorithm__rollout_correction__rollout_is': None}, True, False),
  ],
)
def test_all_rows_are_scored_only_where_the_update_cannot_weigh_them(changes, before, inside):
  config = settings(**changes)
  calls = []

  def log_probs(base, trainable, rows, targets):
    calls.append(targets.shape)
    return jnp.full(targets.shape, -2.0, jnp.float32), None

  session = types.SimpleNamespace(
    config=config,
    spec=objective_spec(config),
    base={},
    references={},
    **NO_MEMBERS,
    mesh=meshes.make_mesh(MeshConfig(fsdp=1), jax.devices()[:1]),
    update=types.SimpleNamespace(log_probs=log_probs),
  )
  samples = make_samples(config)
  groups = int(samples.rollouts.group.max()) + 1
  graded = GradedRollouts(
    [Example(str(i), [], 'none', None, 'none') for i in range(groups)],
    samples.prompts[:groups],
    samples.rollouts,
    [Outcome(0.0)] * len(samples),
    np.arange(len(samples)),
    0.0,
  )
  metrics = {}
  batch = step.build_batch(session, types.SimpleNamespace(trainable={}), graded, None, metrics)
  assert bool(calls) == before == bool(metrics)
  assert (batch.sampling_log_probs is not None) == inside
  assert (batch.distill_weights is not None) == (before and session.spec.rollout_weights)
