"""The KL penalty: measured from the weights of the start, which a run keeps beside everything that moves."""

from __future__ import annotations

import shutil
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdpo_jax.config import MeshConfig
from sdpo_jax.config.overrides import Differences
from sdpo_jax.distributed import mesh as meshes
from sdpo_jax.errors import UserError
from sdpo_jax.objective.objective_spec import ObjectiveSpec
from sdpo_jax.preflight.doubtful_settings import odd_settings
from sdpo_jax.training import reference_policies, step, step_records
from sdpo_jax.training.directory import fingerprint, starts
from sdpo_jax.training.graded import GradedRollouts
from sdpo_jax.training.specs import objective_spec
from sdpo_jax.types import Example, Outcome
from tests import tiny
from tests.resumed_runs import lines_without_time
from tests.updates import VARIANTS, make_model, policy_shardings, samples_for, settings, start

PENALISED = VARIANTS['entropy and KL'] | {'actor__ppo_micro_batch_size': 8}  # A program that other tests compile, too.


def test_it_is_a_copy_in_compute_dtype_that_lies_as_the_parameters_do():
  policy, parameters = make_model()
  mesh = meshes.make_mesh(MeshConfig(fsdp=4, tensor=2), jax.devices())
  placed = jax.device_put(parameters, policy_shardings(policy, parameters, mesh))
  spec = ObjectiveSpec(True, False, kl_penalty=True)
  found = reference_policies.of_parameters(spec, policy.parameter_table(), placed, 'bfloat16')['initial']
  assert found['final_norm'].dtype == jnp.float32 and found['layers']['mlp']['up'].dtype == jnp.bfloat16
  jax.tree.map(
    lambda ours, theirs: np.testing.assert_array_equal(ours, np.asarray(theirs).astype(ours.dtype)), found, parameters
  )
  described = reference_policies.abstract(spec, policy.parameter_table(), placed, 'bfloat16')['initial']
  chex.assert_trees_all_equal_shapes_and_dtypes(found, described)
  assert jax.tree.map(lambda leaf: leaf.sharding, placed) == jax.tree.map(lambda leaf: leaf.sharding, described)
  assert all(jax.tree.leaves(jax.tree.map(lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim), found, placed)))


def graded_batch(samples, outcomes) -> GradedRollouts:
  groups = int(samples.rollouts.group.max()) + 1
  examples = [Example(str(group), [], 'none', None, 'none') for group in range(groups)]
  numbers = np.arange(len(samples))
  return GradedRollouts(examples, samples.prompts[:groups], samples.rollouts, outcomes, numbers, 0.0)


@pytest.mark.parametrize('coefficient', [0.0, 0.1])
def test_its_log_probs_are_computed_once_of_what_is_graded_and_only_where_they_are_penalised(coefficient):
  config = settings(actor__kl_loss_coef=coefficient)
  asked = []

  def log_probs(base, trainable, rows, targets):
    asked.append((trainable, int((np.asarray(rows.segment_ids).max(1) > 0).sum())))
    return jnp.full(targets.shape, -2.0, jnp.float32), None

  held = dict.fromkeys(objective_spec(config).references, 'of the start')
  session, state = start(config, references=held)
  session.update = types.SimpleNamespace(log_probs=log_probs)
  samples = samples_for(config)
  outcomes = [Outcome(1.0)] * 7 + [Outcome.ungraded('no answer')]
  batch = step.build_batch(session, state, graded_batch(samples, outcomes), None, {})
  if not coefficient:
    assert batch.references == {} and not asked
    return
  assert {parameters for parameters, _ in asked} == {'of the start'} and sum(rows for _, rows in asked) == 7
  mask = batch.rollouts.completion_mask & (np.arange(8) < 7)[:, None]
  np.testing.assert_array_equal(batch.references['initial'], np.where(mask, np.float32(-2), 0))


def test_a_run_is_measured_from_its_start_and_moves_away_from_it():
  config = settings(**PENALISED)
  session, state = start(config)
  initial = jax.tree.map(jnp.copy, state.trainable)
  samples = samples_for(config)
  measured, before = [], None
  for _ in range(2):
    samples.references['initial'] = step.PolicyLogProbs(session, initial, samples).fetch()
    if before is not None:
      np.testing.assert_array_equal(samples.references['initial'], before)
    before = samples.references['initial']
    state, report = step.run_update(session, state, samples)
    mask = samples.rollouts.completion_mask
    gap = report.token_values['log_prob'][mask].astype(np.float64) - before[mask]
    metrics = step_records.update_metrics(report, samples, session)
    assert metrics['train/kl_loss'] == pytest.approx((np.exp(-gap) + gap - 1).mean(), rel=1e-3, abs=1e-7)
    measured.append(metrics['train/kl_loss'])
  assert abs(measured[0]) < 1e-7 < 5e-6 < measured[1]


def test_other_weights_are_refused_where_they_are_penalised_and_named_elsewhere(tmp_path, monkeypatch):
  parts = {'model': {'layers': '2'}, 'weights': {'spots': 'one'}}
  monkeypatch.setattr(starts, 'read', lambda _: [{'step': 0, 'parts': parts}])
  now = parts | {'weights': {'spots': 'other'}}

  def compare(**changes):
    return fingerprint.compare(tmp_path, settings(**changes), now, 1, Differences([], [], {}, []))

  assert any('model.path holds other weights' in line for line in compare().lines)
  with pytest.raises(
    UserError, match='weights/spots was one and is now other.* insist with .*accept_changes=model[.]$'
  ):
    compare(actor__kl_loss_coef=0.1)
  (line,) = compare(actor__kl_loss_coef=0.1, trainer__accept_changes=('model',)).lines
  assert line.startswith('Accepted, as trainer.accept_changes says: weights/spots was one')


def test_an_estimate_that_holds_nothing_back_is_said_to_be_odd():
  odd = [odd_settings(settings(actor__kl_loss_coef=0.1, actor__kl_loss_type=kind), 1, None) for kind in ('k1', 'k2')]
  assert [any('this estimate is zero on average' in sentence for sentence in found) for found in odd] == [True, False]


@pytest.mark.slow
def test_a_run_with_a_penalty_a_decay_and_another_optimizer_resumes_bit_for_bit_and_only_with_its_weights(tmp_path):
  arguments = [f'--config={tiny.make_experiment(tmp_path)}', '--config.actor.kl_loss_coef=0.2']
  arguments += ['--config.actor.kl_loss_type=k2', '--config.optimizer.name=muon']
  arguments += ['--config.optimizer.lr_scheduler_type=cosine', '--config.optimizer.weight_decay_exclude=norm']

  def train(workdir: str, *more: str):
    return 'train', [*arguments, f'--workdir={tmp_path / workdir}', *more]

  steps = '--config.optimizer.lr_decay_steps=3'
  commands = train('whole'), train('parts', steps, '--config.trainer.total_training_steps=2'), train('parts', steps)
  for done in tiny.launch_many(list(commands), quick=True):
    assert done.returncode == 0, done.stderr
  whole, parts = lines_without_time(tmp_path / 'whole'), lines_without_time(tmp_path / 'parts')
  assert parts == whole and 'state_digest' in whole[-1]
  estimates = [line['train/kl_loss'] for line in whole if 'train/kl_loss' in line]
  assert len(estimates) == 3 and estimates[0] < 1e-8 < 1e-6 < estimates[-1]  # The first rate is 0.
  shutil.rmtree(tmp_path / 'model')
  tiny.make_model(tmp_path / 'model', seed=1)
  name, flags = train('parts', steps, '--config.trainer.total_training_steps=4')
  changed = tiny.launch(name, *flags, quick=True)
  assert changed.returncode == 2 and 'accept_changes=model' in changed.stderr and 'weights/values was' in changed.stderr
