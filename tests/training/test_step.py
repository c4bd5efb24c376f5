"""The update: micro-batches, devices and left-out rows change nothing; the teacher moves once a batch; NaN is
skipped.
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
from sdpo_jax.learning.update import MicroResult, make_update, place_state
from sdpo_jax.training import step
from sdpo_jax.training.specs import optimizer_spec, update_spec
from sdpo_jax.types import Example, Outcome
from tests import tiers
from tests.generation_batches import NO_MEMBERS, per_token
from tests.updates import VARIANTS, make_model, policy_shardings, run, samples_for, settings


def thinned() -> list:
  """Return the variants that have programs of their own; frozen and live share the EMA's."""
  campaign = ('full vocabulary', 'sampled token')  # Of these test_loss.py compares chunks.
  names = sorted(VARIANTS.keys() - {'ema', 'frozen', 'live'})
  marked = [pytest.param(name, marks=pytest.mark.campaign if name in campaign else pytest.mark.slow) for name in names]
  return ['ema', *marked]


@pytest.mark.parametrize('name', thinned())
def test_the_micro_batch_size_changes_nothing(name):
  config = settings(**VARIANTS[name])
  samples = samples_for(config)
  whole = run(settings(**VARIANTS[name], actor__ppo_micro_batch_size=8), samples, batches=2)
  parts = run(settings(**VARIANTS[name], actor__ppo_micro_batch_size=1), samples, batches=2)
  assert whole.losses == pytest.approx(parts.losses, rel=1e-5)
  chex.assert_trees_all_close(whole.state.trainable, parts.state.trainable, atol=3e-5)
  chex.assert_trees_all_close(whole.state.teacher, parts.state.teacher, atol=3e-5)
  assert int(whole.state.step) == 2
  assert int(whole.state.optimizer_step) == 2 * len(samples) // (config.actor.ppo_mini_batch_size * config.rollout.n)
  assert any(abs(loss) > 1e-6 for loss in whole.losses)


@pytest.mark.slow  # By default test_step_meshes.py compares both.
@pytest.mark.parametrize('name', ['ema', 'grpo'])
def test_eight_devices_agree_with_one(name):
  config = settings(**VARIANTS[name], actor__ppo_micro_batch_size=8)
  alone = run(config, samples_for(config))
  together = run(config, samples_for(config), devices=8)
  assert alone.losses == pytest.approx(together.losses, rel=1e-5)
  chex.assert_trees_all_close(alone.state.trainable, together.state.trainable, atol=3e-5)


@pytest.mark.parametrize('name', tiers.cases(('ema', 'frozen', 'live'), default=('ema',), slow=('frozen', 'live')))
def test_teachers_move_once_a_generation_batch_as_they_should(name):
  _, start = make_model()
  config = settings(**VARIANTS[name], actor__ppo_mini_batch_size=1)
  samples = samples_for(config)
  state = run(config, samples).state
  if name == 'live':
    assert state.teacher == {}
  elif name == 'frozen':
    chex.assert_trees_all_equal(state.teacher, start)
  else:
    expected = jax.tree.map(lambda t, p: t * 0.95 + p * 0.05, start, state.trainable)
    chex.assert_trees_all_close(state.teacher, expected, atol=1e-7)
    assert float(abs(state.trainable['embedding'] - start['embedding']).max()) > 1e-4


def test_a_gradient_that_is_not_finite_is_skipped_and_counted():
  config = settings(optimizer__name='adamw')
  samples = samples_for(config)

  def poison(grads):
    return jax.tree.map(lambda leaf: leaf.at[(0,) * leaf.ndim].set(jnp.nan), grads)

  outcome = run(config, samples, poison=poison)
  _, start = make_model()
  chex.assert_trees_all_equal(outcome.state.trainable, start)
  chex.assert_trees_all_equal(outcome.state.teacher, start)
  assert outcome.reports[0]['taken'] == 0
  assert int(outcome.state.optimizer_step) == 0
  assert int(outcome.state.step) == 1
  chex.assert_tree_all_finite(outcome.state.opt_state)


def without_signal(skips: bool):
  config = settings(optimizer__name='adamw', optimizer__weight_decay=0.1, optimizer__skip_empty_steps=skips)
  return run(config, dataclasses.replace(samples_for(config), distill_mask=per_token(np.zeros(8))))


def test_no_signal_moves_nothing():
  outcome = without_signal(True)
  _, start = make_model()
  for tree in (outcome.state.trainable, outcome.state.teacher):
    chex.assert_trees_all_equal(tree, start)
  assert outcome.reports[0]['taken'] == 0 and outcome.reports[0]['grad_norm'] == 0
  assert int(outcome.state.optimizer_step) == 0 and int(outcome.state.step) == 1


def test_an_empty_mini_batch_moves_nothing_beside_one_that_teaches():
  """As if it were not there: not even Adam's momentum of the step before it."""
  config = settings(optimizer__name='adamw', actor__ppo_mini_batch_size=2)
  taught = np.repeat([1.0, 0.0], 4)  # The two mini-batches.
  samples = samples_for(config)
  outcome = run(config, dataclasses.replace(samples, distill_mask=per_token(taught)), batches=2)
  assert [int(report['taken']) for report in outcome.reports] == [1, 0, 1, 0]
  assert int(outcome.state.optimizer_step) == int(outcome.state.opt_state[0].count) == 2
  _, start = make_model()
  assert float(abs(outcome.state.teacher['embedding'] - start['embedding']).max()) > 0


def test_no_signal_decays_the_weights_as_the_reference_if_so_set():
  outcome = without_signal(False)
  _, start = make_model()
  expected = jax.tree.map(lambda leaf: leaf * (1 - 1e-2 * 0.1), start)
  chex.assert_trees_all_close(outcome.state.trainable, expected, atol=1e-7)


def test_the_host_works_ahead_and_fetches_a_step_at_once(monkeypatch):
  """A micro-batch is made after those before it are dispatched, and a step fetched when the next one is under way."""
  config = settings(actor__ppo_mini_batch_size=1, actor__ppo_micro_batch_size=1)
  samples = samples_for(config)
  samples.distill_mask = per_token(np.ones(8))
  events = []

  def accumulate(base, state, grads, batch, teacher_base):
    events.append('dispatch')
    return grads, MicroResult(np.float32(1), {'entropy': np.ones(batch.targets.shape, np.float32)})

  def apply(state, grads):
    events.append('apply')
    return state, {'grad_norm': np.float32(2), 'learning_rate': np.float32(3), 'taken': np.int32(state.pop())}

  def advance_teacher(state, finite):
    events.append(f'teacher {finite}')
    return state

  def make(*arguments, make=batching.MicroBatch):
    events.append('make')
    return make(*arguments)

  def device_get(tree):
    whole = any(isinstance(leaf, np.ndarray) and leaf.ndim for leaf in jax.tree.leaves(tree))
    events.append('fetch' if whole else 'wait')
    return tree

  monkeypatch.setattr(batching, 'MicroBatch', make)
  monkeypatch.setattr(jax, 'device_get', device_get)
  update = types.SimpleNamespace(zero=lambda _: {}, accumulate=accumulate, apply=apply, advance_teacher=advance_teacher)
  session = types.SimpleNamespace(
    config=config,
    policy=make_model()[0],
    base={},
    teacher=None,
    update=update,
    mesh=meshes.make_mesh(MeshConfig(fsdp=1), jax.devices()[:1]),
  )

  class State(list):
    trainable = None

  _, report = step.run_update(session, State([1, 0, 1, 1]), samples)
  one = ['make', 'dispatch', 'make', 'dispatch', 'apply']
  assert events == [*one, *one, 'fetch', *one, 'fetch', *one, 'fetch', 'wait', 'teacher 3', 'fetch']
  assert (report.loss, report.grad_norm, report.skipped, report.optimizer_steps) == (2, 2, 1, 4)
  np.testing.assert_array_equal(np.isfinite(report.token_values['entropy']), samples.rollouts.completion_mask)
  tokens = sum(map(len, samples.prompts)) + samples.rollouts.completion_mask.sum()
  assert (report.student.tokens, report.student.rows, report.student.row_room) == (tokens, 8, 8)


@pytest.mark.parametrize('seconds, most', [(1.0, 2), (0.1, 5), (0.0, 100)])
def test_the_devices_are_handed_half_a_second_of_micro_batches_or_two(monkeypatch, seconds, most):
  """So that a run that is told to stop need not wait for a whole batch."""
  clock, under_way, seen = [0.0], set(), []

  def wait(result):
    clock[0] += seconds
    under_way.discard(result)

  monkeypatch.setattr(jax, 'block_until_ready', wait)
  monkeypatch.setattr(step, 'time', types.SimpleNamespace(monotonic=lambda: clock[0]))
  ahead = step.DispatchLimit()
  for number in range(100):
    ahead.wait()
    under_way.add(number)
    ahead.add(number)
    seen.append(len(under_way))
  assert max(seen) <= most and (seconds > 0 or max(seen) > 90)


def test_the_first_rate_of_a_warm_up_is_zero():
  config = settings(optimizer__lr_warmup_steps=4)
  outcome = run(config, samples_for(config), batches=6)
  rates = [report['learning_rate'] for report in outcome.reports]
  assert rates == pytest.approx([0, 0.0025, 0.005, 0.0075, 0.01, 0.01])


def test_the_same_settings_share_programs_and_a_later_change_does_not_reach_them():
  policy, parameters = make_model()
  config = settings()
  mesh = meshes.make_mesh(MeshConfig(fsdp=1), jax.devices()[:1])
  state = place_state(update_spec(config), jax.device_put(parameters, policy_shardings(policy, parameters, mesh)), mesh)
  shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
  update = make_update(policy, update_spec(config), shardings)
  assert (
    make_update(policy, update_spec(settings(data__val_max_samples=3)), shardings) is update
  )  # The update reads no such thing.
  config.optimizer.lr = 7.0
  changed = make_update(policy, update_spec(config), shardings)
  for name in ('optimizer__lr', 'actor__entropy_coeff', 'rollout__temperature'):
    other = make_update(policy, update_spec(settings(**{name: 0.125})), shardings)
    assert other is not update and other is not changed
  assert make_update(policy, update_spec(settings())) is not update
  assert make_update(dataclasses.replace(policy, remat='full'), update_spec(settings()), shardings) is not update
  gradients = update.zero(state.trainable)
  rates = [
    float(made.apply(jax.tree.map(jnp.copy, state), gradients)[1]['learning_rate']) for made in (update, changed)
  ]
  assert rates == pytest.approx([1e-2, 7.0])


def test_adamw_and_clipping_are_torchs():
  torch = pytest.importorskip('torch')
  from sdpo_jax.learning import optimizer as optimizers

  config = settings(optimizer__name='adamw', optimizer__grad_clip=0.5, optimizer__weight_decay=0.1).optimizer
  rng = np.random.default_rng(0)
  value = rng.normal(size=(3, 4)).astype(np.float32)
  parameter = torch.nn.Parameter(torch.tensor(value))
  adam = torch.optim.AdamW([parameter], lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=0.1)
  transform = optimizers.make_optimizer(optimizer_spec(config, 1))
  clip, updated = jax.jit(optimizers.clip_by_global_norm, static_argnums=1), jax.jit(transform.update)
  ours, opt_state = {'w': jnp.asarray(value)}, transform.init({'w': jnp.asarray(value)})
  for scale in (10.0, 0.01, 1.0):
    grad = rng.normal(size=value.shape).astype(np.float32) * scale
    parameter.grad = torch.tensor(grad)
    norm = torch.nn.utils.clip_grad_norm_([parameter], config.grad_clip)
    adam.step()
    clipped, our_norm = clip({'w': jnp.asarray(grad)}, config.grad_clip)
    updates, opt_state = updated(clipped, opt_state, ours)
    ours = jax.tree.map(lambda p, u: p - config.lr * u, ours, updates)
    assert float(our_norm) == pytest.approx(float(norm), rel=1e-6)
    np.testing.assert_allclose(ours['w'], parameter.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_a_balanced_batch_keeps_each_completion_with_its_outcome(monkeypatch):
  """And a question that stands in it twice is one group, where the settings say so."""
  config = settings(trainer__batch_order='balanced', data__group_duplicates=True)
  drawn = samples_for(config).rollouts
  count, n = len(drawn), config.rollout.n
  drawn = dataclasses.replace(drawn, group=np.arange(count) // n, text=[str(sample) for sample in range(count)])
  asked = ['a', 'b', 'a', 'c']
  examples = [Example('', [{'role': 'user', 'content': text}], 'exact', '', '') for text in asked]

  def sample(*_, on_finished, **__):
    for number, text in enumerate(drawn.text):
      on_finished(types.SimpleNamespace(sample=number, text=text, stopped=True))
    return drawn

  sampler = types.SimpleNamespace(sample=sample, stats=None)
  session = types.SimpleNamespace(config=config, tokenizer=None, writer=lambda _: (sampler, {}, {}), **NO_MEMBERS)
  graders = types.SimpleNamespace(
    prepare=lambda _: None,
    grade_part=lambda _, texts, truncated: [Outcome(0.0, text) for text in texts],
    end_batch=lambda: None,
  )
  monkeypatch.setattr(step, 'prompt_tokens', lambda *_: [1])
  state = types.SimpleNamespace(trainable={}, rng=jax.random.key(0))
  graded = step.rollout_and_grade(session, graders, state, examples, 1, step.Timer())
  texts = [int(text) for text in graded.rollouts.text]
  assert texts != sorted(texts) and sorted(texts) == list(range(count))
  assert [int(outcome.feedback) for outcome in graded.outcomes] == texts == graded.sample_ids.tolist()
  np.testing.assert_array_equal(graded.rollouts.group, np.array([0, 1, 0, 3])[np.array(texts) // n])
