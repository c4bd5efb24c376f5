"""Slots that are trained side by side: each as a run would train it alone, and no bit of one changes for another."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdpo_jax.config import Config
from sdpo_jax.learning import training_pool
from sdpo_jax.learning.training_pool import StepSettings
from sdpo_jax.learning.update import apply_gradients, init_state, make_update
from sdpo_jax.models.adapters import lora_pool
from sdpo_jax.teacher.signal import Teacher
from sdpo_jax.training.specs import update_spec
from sdpo_jax.types import Batch, TokenRows
from tests.models.adapters.lora_pools import MEMBERS, make_pool, pooled, stacked

ROWS, PROMPT, LENGTH = 4, 3, 5
ROW_MEMBERS = np.array([2, 0, 2, 0], np.int32)
RATE, DECAY = 3e-3, 0.1


@pytest.fixture(scope='module')
def adapters():
  return make_pool(2)


@pytest.fixture(scope='module')
def config():
  config = Config()
  config.actor.self_distillation.teacher_regularization = 'ema'
  config.actor.self_distillation.distillation_topk = 8
  config.algorithm.rollout_correction.rollout_is = None
  config.optimizer.lr, config.optimizer.lr_warmup_steps = RATE, 0
  config.optimizer.weight_decay, config.optimizer.grad_clip = DECAY, 0.05
  return config


def make_batch(seed, rows, members=None, weight=1 / (2 * LENGTH)):
  """Rows of a student's and of a teacher's prompt with the same completions, as arrays."""
  draw = np.random.default_rng(seed)
  student, teacher = (draw.integers(1, 60, (ROWS, PROMPT + extra)) for extra in (0, 2))
  completion = draw.integers(1, 60, (ROWS, LENGTH))

  def token_rows(prompt):
    tokens = np.concatenate([prompt, completion], 1)[rows].astype(np.int32)
    width = tokens.shape[1]
    return TokenRows(
      tokens=tokens,
      positions=np.tile(np.arange(width, dtype=np.int32), (len(tokens), 1)),
      segment_ids=np.ones_like(tokens),
      target_index=np.tile(np.arange(width - LENGTH - 1, width - 1, dtype=np.int32), (len(tokens), 1)),
      members=members,
    )

  coefficients = np.full((len(rows), LENGTH), weight, np.float32)
  return Batch(
    student=token_rows(student),
    teacher=token_rows(teacher),
    targets=completion[rows].astype(np.int32),
    mask=np.ones((len(rows), LENGTH), np.float32),
    distill_coef=coefficients,
    policy_coef=None,
    entropy_coef=None,
    old_log_probs=None,
    advantages=None,
  )


def settings(**changes):
  values = dict(learning_rate=RATE, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=DECAY, max_grad_norm=0.05) | changes
  return StepSettings(**{name: jnp.broadcast_to(jnp.float32(value), (MEMBERS,)) for name, value in values.items()})


step = jax.jit(training_pool.step)


def gradients(policy, config, base, state, batch):
  """Of a micro-batch whose rows belong to several slots."""
  update = make_update(policy, update_spec(config), None, Teacher(policy))
  whole = init_state(update_spec(config), state.trainable)
  return update.accumulate(base, whole, update.zero(state.trainable), batch)[0]


def test_a_slot_is_trained_as_a_run_trains_an_adapter(adapters, config):
  policy, base, factors = adapters
  state, active = training_pool.fresh(stacked(policy, factors)), np.isin(np.arange(MEMBERS), ROW_MEMBERS)
  alone = {member: init_state(update_spec(config), factors[member]) for member in set(ROW_MEMBERS.tolist())}
  update = make_update(policy, update_spec(config))
  for number in range(3):
    batch = make_batch(number, np.arange(ROWS), ROW_MEMBERS)
    grads = gradients(pooled(policy), config, base, state, batch)
    state, said = step(state, grads, settings(), active)
    for member, own in alone.items():
      # The teacher, an average in a run, is here what the slot itself is.
      own = own.replace(teacher=own.trainable)
      rows = np.flatnonzero(ROW_MEMBERS == member)
      its = update.accumulate(base, own, update.zero(own.trainable), make_batch(number, rows))[0]
      alone[member], metrics = apply_gradients(update_spec(config), own, its)
      np.testing.assert_allclose(said['grad_norm'][member], metrics['grad_norm'], rtol=1e-4)
  assert said['grad_norm'][2] > 0.05  # It is clipped.
  for member, own in alone.items():
    found = training_pool.slot_of(state, member)
    assert int(found.moments.count) == 3
    for one, other in zip(jax.tree.leaves(found.trainable), jax.tree.leaves(own.trainable), strict=True):
      np.testing.assert_allclose(one, other, atol=2e-5 * float(np.abs(other).max()) + 1e-7)


def test_no_bit_of_a_slot_changes_when_another_is_trained(adapters, config):
  policy, base, factors = adapters
  state = training_pool.fresh(stacked(policy, factors))
  grads = gradients(pooled(policy), config, base, state, make_batch(0, np.arange(ROWS), ROW_MEMBERS))
  state, _ = step(state, grads, settings(), np.array([True, True, True]))
  # All of the gradients are there, also of those that do not step; of one they are not finite.
  broken = lora_pool.with_member(grads, 0, jax.tree.map(lambda leaf: leaf + jnp.nan, lora_pool.member(grads, 0)))
  after, said = step(state, broken, settings(weight_decay=0.5, max_grad_norm=np.inf), np.array([True, False, True]))
  assert said['stepped'].tolist() == [False, False, True]
  for member in range(MEMBERS):
    same = [
      bool((one == other).all())
      for one, other in zip(
        jax.tree.leaves(training_pool.slot_of(after, member)),
        jax.tree.leaves(training_pool.slot_of(state, member)),
        strict=True,
      )
    ]
    assert all(same) if member < 2 else not any(same)


def test_slots_step_with_their_own_settings(adapters, config):
  policy, base, factors = adapters
  state = training_pool.fresh(stacked(policy, [factors[0]] * MEMBERS))
  members = np.array([0, 1, 2, 2], np.int32)
  batch = make_batch(0, np.array([0, 0, 0, 0]), members)
  batch = batch.replace(distill_coef=batch.distill_coef * np.array([1, 1, 0.5, 0.5], np.float32)[:, None])
  grads = gradients(pooled(policy), config, base, state, batch)
  own = dataclasses.replace(
    settings(),
    learning_rate=jnp.float32([RATE, 2 * RATE, RATE]),
    weight_decay=jnp.float32([0, 0, DECAY]),
    beta1=jnp.float32([0.9, 0.5, 0.9]),  # The first step of Adam does not depend on it.
  )
  after, _ = step(state, grads, own, np.ones(MEMBERS, bool))

  def moved(slot):
    pairs = zip(jax.tree.leaves(lora_pool.member(after.trainable, slot)), jax.tree.leaves(factors[0]), strict=True)
    return [np.asarray(new) - np.asarray(old) for new, old in pairs]

  for first, second, third, before in zip(*map(moved, range(3)), jax.tree.leaves(factors[0]), strict=True):
    np.testing.assert_allclose(second, 2 * first, rtol=2e-3, atol=1e-6)
    np.testing.assert_allclose(third, first - RATE * DECAY * np.asarray(before), rtol=2e-3, atol=2e-5)


def test_a_slot_is_taken_out_and_put_back_as_it_was(adapters, config):
  policy, base, factors = adapters
  state = training_pool.fresh(stacked(policy, factors))
  grads = gradients(pooled(policy), config, base, state, make_batch(0, np.arange(ROWS), ROW_MEMBERS))
  state, _ = step(state, grads, settings(), np.ones(MEMBERS, bool))
  moved = training_pool.with_slot(state, 1, training_pool.slot_of(state, 2))
  for one, other in ((1, 2), (0, 0), (2, 2)):
    found, expected = training_pool.slot_of(moved, one), training_pool.slot_of(state, other)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
