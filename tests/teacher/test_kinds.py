"""Who may teach: every kind of teacher, and a student with a frozen base, through the real update, alone and on a
mesh.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sdpo_jax.config import ModelConfig
from sdpo_jax.distributed import mesh as meshes
from sdpo_jax.errors import UserError
from sdpo_jax.learning.batching import GenerationBatch
from sdpo_jax.learning.update import make_update, place_state, state_shardings
from sdpo_jax.models import huggingface
from sdpo_jax.models import parameters as parameter_tables
from sdpo_jax.teacher.signal import Teacher
from sdpo_jax.training import step
from sdpo_jax.training.opening import make_session
from sdpo_jax.training.specs import update_spec
from sdpo_jax.types import TeacherSignal, TrainState
from tests import tiny
from tests.generation_batches import make_samples
from tests.updates import MESHES, MODEL, assert_entropy, make_model, settings, update

BASE = {'actor__self_distillation__teacher_regularization': 'base', 'actor__ppo_micro_batch_size': 4}
# Both sides of a comparison compile; on a mesh one of them is that of one device.
both = pytest.mark.parametrize('devices', [pytest.param(1, marks=pytest.mark.slow), 4])


@dataclasses.dataclass(frozen=True)
class Wrapped:
  """A policy made of another one, for `apply` without a cache."""

  inner: object

  def __getattr__(self, name):
    return getattr(self.inner, name)

  @property
  def vocab_size(self) -> int:
    return self.inner.vocab_size


class Frozen(Wrapped):
  """All parameters are in the base, and nothing is trained."""

  def apply(self, base, trainable, *arguments, **options):
    assert trainable == {}
    return self.inner.apply({}, base, *arguments, **options)


class Adapted(Wrapped):
  """All parameters are in the base; what is trained is added to the final states: h + (h·A)·B."""

  def apply(self, base, trainable, *arguments, **options):
    hidden, unembedding, cache = self.inner.apply({}, base, *arguments, **options)
    return hidden + hidden @ trainable['A'] @ trainable['B'], unembedding, cache


class Reading(Wrapped):
  """Reads the tokens `base['context']` [C] before every row; they are part of each row's only segment."""

  shares_prefixes = False

  def apply(self, base, trainable, tokens, positions, segment_ids, **options):
    context = jnp.broadcast_to(base['context'], (len(tokens), len(base['context'])))
    count = context.shape[1]
    hidden, unembedding, _ = self.inner.apply(
      {},
      base['parameters'],
      jnp.concatenate([context, tokens], axis=1),
      jnp.concatenate([jnp.broadcast_to(jnp.arange(count), context.shape), positions + count], axis=1),
      jnp.concatenate([jnp.ones_like(context), segment_ids], axis=1),
      **options,
    )
    return hidden[:, count:], unembedding, None


def adapter():
  width = MODEL['hidden_size']
  rng = np.random.default_rng(1)
  return {'A': rng.normal(size=(width, 2)).astype(np.float32), 'B': rng.normal(size=(2, width)).astype(np.float32) / 8}


def same(one, other, rtol=1e-5, atol=1e-6) -> None:
  (states, reports), (other_states, other_reports) = one, other
  assert abs(reports[0].loss) > 1e-6
  assert reports[0].loss == pytest.approx(other_reports[0].loss, rel=rtol)
  chex.assert_trees_all_close(states[-1].trainable, other_states[-1].trainable, rtol=rtol, atol=atol)
  for name in ('divergence', 'teacher_entropy'):
    np.testing.assert_allclose(
      reports[0].token_values[name], other_reports[0].token_values[name], rtol=20 * rtol, atol=20 * atol
    )


def said(policy, base, trainable, batch: GenerationBatch, sample: int, temperature: float) -> jax.Array:
  """Log-probs [length, V] of a policy that reads a sample's teacher prompt, asked directly."""
  length = int(batch.rollouts.completion_mask[sample].sum())
  read = [*batch.teacher_prompts[sample], *batch.rollouts.completion_tokens[sample, :length]]
  tokens = np.array([[*read, *[0] * (32 - len(read))]], np.int32)
  scores = log_probs_of_all(policy, base, trainable, tokens, np.int32(len(read)), temperature)
  return scores[len(read) - length - 1 : len(read) - 1]


@functools.partial(jax.jit, static_argnums=0)
def log_probs_of_all(policy, base, trainable, tokens, length, temperature) -> jax.Array:
  """Log-probs [32, V] behind each of the first `length` tokens [1, 32]."""
  positions = jnp.arange(32, dtype=jnp.int32)[None]
  segments = (positions < length).astype(jnp.int32)
  hidden, unembedding, _ = policy.apply(base, trainable, tokens, positions * segments, segments)
  return jax.nn.log_softmax(hidden[0] @ unembedding.T / temperature)


@pytest.mark.slow  # By default the model itself teaches as an external signal does, below.
def test_the_model_itself_teaches_unless_another_is_named():
  config = settings(actor__ppo_micro_batch_size=4)
  policy, parameters = make_model()
  batch = make_samples(config)
  _, [report] = update(config, policy, {}, parameters, None, batch)
  for sample in np.flatnonzero(batch.taught):
    assert_entropy(report, said(policy, {}, parameters, batch, sample, config.rollout.temperature), sample)


@pytest.mark.parametrize(
  ('regularization', 'devices'),
  [('restart', 1), ('base', 1)]
  + [
    pytest.param(*case, marks=pytest.mark.slow)
    for case in (
      ('ema', 1),
      ('ema', 4),  # As with LoRA, in test_lora_teachers.py.
      ('restart', 4),
      ('base', 4),
      *itertools.product(('live', 'frozen', 'trust-region'), (1, 4)),
    )
  ],
)
def test_a_student_with_a_frozen_base_learns_from_every_teacher(regularization, devices):
  config = settings(**BASE)
  config.actor.self_distillation.teacher_regularization = regularization
  config.actor.self_distillation.teacher_restart_interval = 2 if regularization == 'restart' else None
  config.validate()
  policy, parameters = make_model()
  start = adapter()
  teacher = Teacher(Frozen(policy) if regularization == 'base' else Adapted(policy))
  batch = make_samples(config)
  states, reports = update(config, Adapted(policy), parameters, start, teacher, batch, devices=devices, batches=3)
  assert abs(reports[0].loss) > 1e-6
  assert float(np.abs(states[0].trainable['A'] - start['A']).max()) > 1e-5
  # What was read in the second and the third update, asked directly.
  temperature, sample = config.rollout.temperature, int(np.flatnonzero(batch.taught)[0])
  for state, report in zip(states, reports[1:], strict=False):
    read = {'live': state.trainable, 'base': {}}.get(regularization, state.teacher)
    log_probs = said(teacher.policy, parameters, read, batch, sample, temperature)
    if regularization == 'trust-region':
      rate = config.actor.self_distillation.teacher_update_rate
      student = said(Adapted(policy), parameters, state.trainable, batch, sample, temperature)
      log_probs = jax.nn.log_softmax((1 - rate) * log_probs + rate * student)
    assert_entropy(report, log_probs, sample)
  teachers = [state.teacher for state in states]
  if regularization in ('live', 'base'):
    assert teachers == [{}, {}, {}]
  elif regularization in ('frozen', 'trust-region'):
    chex.assert_trees_all_equal(teachers[2], start)
  elif regularization == 'restart':
    chex.assert_trees_all_equal(teachers[0], start)
    chex.assert_trees_all_equal(teachers[1], states[1].trainable)
    chex.assert_trees_all_equal(teachers[2], states[1].trainable)
  else:
    rate = config.actor.self_distillation.teacher_update_rate
    expected = jax.tree.map(lambda old, new: (1 - rate) * old + rate * new, start, states[0].trainable)
    chex.assert_trees_all_close(teachers[0], expected, rtol=1e-6)


def test_the_base_alone_teaches_what_a_model_without_its_adapter_says():
  config = settings(**BASE)
  policy, parameters = make_model()
  nothing = jax.tree.map(np.zeros_like, adapter())
  batch = make_samples(config)
  base_alone = update(config, Adapted(policy), parameters, adapter(), Teacher(Frozen(policy)), batch)
  # An adapter of zeros that never moves says the same.
  frozen = settings(**BASE | {'actor__self_distillation__teacher_regularization': 'frozen'})
  mesh = meshes.make_mesh(MESHES[1], jax.devices()[:1])
  placed = jax.device_put((parameters, adapter()), meshes.replicated(mesh))
  state = place_state(update_spec(frozen), placed[1], mesh).replace(
    teacher=jax.device_put(nothing, meshes.replicated(mesh))
  )
  session = types.SimpleNamespace(
    config=frozen,
    policy=Adapted(policy),
    base=placed[0],
    mesh=mesh,
    teacher=Teacher(Adapted(policy)),
    update=make_update(Adapted(policy), update_spec(frozen), jax.tree.map(lambda leaf: leaf.sharding, state)),
  )
  state, report = step.run_update(session, state, batch)
  same(base_alone, ([jax.device_get(state.replace(rng=None))], [report]))


@pytest.mark.parametrize('devices', [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_larger_model_in_the_same_mesh_teaches(devices):
  config = settings(**BASE)
  policy, parameters = make_model()
  wide = {'hidden_size': 32, 'num_hidden_layers': 3, 'head_dim': 16}
  large, large_parameters = huggingface.init(
    MODEL | wide, jax.random.key(5), ModelConfig(dtype='float32', remat='none')
  )
  teacher = Teacher(Frozen(large), large_parameters)
  batch = make_samples(config)
  states, reports = update(config, policy, {}, parameters, teacher, batch, devices=devices)
  for sample in np.flatnonzero(batch.taught):
    assert_entropy(reports[0], said(large, {}, large_parameters, batch, sample, config.rollout.temperature), sample)
  assert states[0].teacher == {}


def test_a_teacher_that_knows_fewer_tokens_is_refused():
  policy, _ = make_model()
  other, _ = huggingface.init(MODEL | {'vocab_size': 63}, jax.random.key(0))
  with pytest.raises(ValueError, match='A teacher with 63 tokens cannot teach a student with 64'):
    make_update(policy, update_spec(settings()), teacher=Teacher(other))


@pytest.mark.slow
@both
def test_a_teacher_with_a_fixed_context_reads_it_before_its_prompt(devices):
  config = settings(**BASE)
  policy, parameters = make_model()
  context = np.array([7, 11, 13, 5], np.int32)
  batch = make_samples(config)
  reading = Teacher(Reading(policy), {'context': context, 'parameters': parameters})
  longer = settings(**BASE, actor__self_distillation__max_reprompt_len=32)
  told = dataclasses.replace(batch, teacher_prompts=[[*context.tolist(), *prompt] for prompt in batch.teacher_prompts])
  same(
    update(config, policy, {}, parameters, reading, batch, devices=devices),
    update(longer, policy, {}, parameters, Teacher(Frozen(policy), parameters), told),
  )


def everything_that_a_teacher_says(policy, parameters, batch: GenerationBatch, temperature: float) -> TeacherSignal:
  """Return the log-probs [N, T, V] of all tokens, in an order of their own, as an external teacher would send them."""
  shape = (*batch.rollouts.completion_mask.shape, policy.vocab_size)
  ids = np.random.default_rng(3).permutation(np.broadcast_to(np.arange(shape[-1], dtype=np.int32), shape), axis=-1)
  log_probs = np.zeros(shape, np.float32)
  for sample in range(len(batch)):
    spoken = said(policy, {}, parameters, batch, sample, temperature)
    log_probs[sample, : len(spoken)] = spoken
  return TeacherSignal(token_ids=ids, log_probs=np.take_along_axis(log_probs, ids, axis=-1))


@both
@pytest.mark.parametrize('packed', [pytest.param(False, marks=pytest.mark.slow), True], ids=['rows', 'packed'])
def test_an_external_signal_in_the_batch_teaches_as_the_model_that_made_it(packed, devices):
  own = {'distillation_topk': None, 'distillation_add_tail': False}
  changes = {f'actor__self_distillation__{name}': value for name, value in own.items()}
  config = settings(**changes, actor__ppo_micro_batch_size=4, actor__pack_sequences=packed)
  policy, parameters = make_model()
  batch = make_samples(config)
  signal = everything_that_a_teacher_says(policy, parameters, batch, config.rollout.temperature)
  external = dataclasses.replace(batch, teacher_prompts=None, signal=signal)
  topk = settings(
    **changes | {'actor__self_distillation__distillation_topk': 4},
    actor__ppo_micro_batch_size=4,
    actor__pack_sequences=packed,
  )
  same(
    update(topk, policy, {}, parameters, None, external, devices=devices),
    update(settings(**changes, actor__ppo_micro_batch_size=4), policy, {}, parameters, None, batch),
    rtol=2e-5,
    atol=2e-6,
  )


@both
@pytest.mark.slow
@pytest.mark.parametrize('tail', [False, True], ids=['renormalised', 'tail'])
def test_the_teachers_own_top_k_is_what_it_would_name_from_elsewhere(tail, devices):
  """Its most likely tokens by NumPy, handed over as an external signal."""
  k = 5
  changes = {'actor__self_distillation__distillation_topk': k, 'actor__self_distillation__distillation_add_tail': tail}
  more = {'actor__ppo_micro_batch_size': 4, 'actor__self_distillation__teacher_regularization': 'frozen'}
  of_teacher = settings(**changes, **more, actor__self_distillation__distillation_topk_of='teacher')
  policy, parameters = make_model()
  batch = make_samples(of_teacher)
  everything = everything_that_a_teacher_says(policy, parameters, batch, of_teacher.rollout.temperature)
  order = np.argsort(-everything.log_probs, axis=-1, kind='stable')[..., :k]
  signal = TeacherSignal(
    *([None] * 5), *(np.take_along_axis(x, order, -1) for x in (everything.token_ids, everything.log_probs))
  )
  states, reports = update(of_teacher, policy, {}, parameters, None, batch, devices=devices)
  named = update(
    settings(**changes, **more),
    policy,
    {},
    parameters,
    None,
    dataclasses.replace(batch, teacher_prompts=None, signal=signal),
  )
  same((states, reports), named, rtol=2e-5, atol=2e-6)
  students, _ = update(settings(**changes, **more), policy, {}, parameters, None, batch)
  assert any(
    np.abs(np.asarray(one) - np.asarray(other)).max() > 1e-5
    for one, other in zip(jax.tree.leaves(states[0].trainable), jax.tree.leaves(students[0].trainable), strict=True)
  )


def test_arrays_of_another_shape_are_refused_by_name():
  batch = make_samples(settings())
  for name in ('distill_mask', 'advantages', 'distill_weights', 'policy_weights', 'old_log_probs'):
    with pytest.raises(AssertionError, match=name):
      dataclasses.replace(batch, **{name: np.ones(8, np.float32)})
  ids = np.zeros((8, 6, 3), np.int32)
  with pytest.raises(ValueError, match='teacher prompts or an external signal, not both'):
    dataclasses.replace(batch, signal=TeacherSignal(token_ids=ids, log_probs=ids.astype(np.float32)))
  batch = dataclasses.replace(batch, teacher_prompts=None)
  with pytest.raises(AssertionError):
    dataclasses.replace(batch, signal=TeacherSignal(token_ids=ids, log_probs=ids[:, :5].astype(np.float32)))


@pytest.mark.slow
def test_a_packed_teacher_that_knows_no_parents_is_handed_none():
  config = settings(**BASE, actor__pack_sequences=True)
  policy, parameters = make_model()
  batch = make_samples(config)
  alike = dataclasses.replace(batch, teacher_prompts=[batch.teacher_prompts[0]] * len(batch))

  class Childless(Frozen):
    shares_prefixes = False

    def apply(self, base, trainable, *arguments, parents=None):
      assert parents is None
      return super().apply(base, trainable, *arguments)

  assert policy.shares_prefixes
  same(
    update(config, policy, {}, parameters, Teacher(Childless(policy), parameters), alike),
    update(config, policy, {}, parameters, Teacher(Frozen(policy), parameters), alike),
  )


def test_an_equal_update_is_shared_whatever_type_its_numbers_have():
  policy, _ = make_model()
  one, other = settings(), settings()
  other.optimizer.lr = np.float64(one.optimizer.lr)
  other.actor.self_distillation.distillation_topk = np.int64(one.actor.self_distillation.distillation_topk)
  assert make_update(policy, update_spec(one)) is make_update(policy, update_spec(other))


OPTIMIZERS = {
  'adam': optax.adam(1e-3),
  'factored': optax.adafactor(1e-3, min_dim_size_to_factor=2),
  'masked': optax.masked(optax.adam(1e-3), {'layers': {'up': True}, 'up': False}),
  'masked subtree': optax.masked(optax.adam(1e-3), {'layers': False, 'up': True}),
  'chained': optax.chain(optax.trace(0.9), optax.add_decayed_weights(0.1), optax.scale_by_adam()),
}


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_shardings_of_a_state_follow_the_structure_of_its_trees(name):
  mesh = meshes.make_mesh(MESHES[4], jax.devices()[:4])

  def place(*spec):
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))

  # The path of one parameter ends like that of the other, and their ranks differ.
  trainable = {
    'layers': {'up': jax.ShapeDtypeStruct((3, 8, 16), jnp.float32, sharding=place(None, 'fsdp', 'tensor'))},
    'up': jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=place('tensor', 'fsdp')),
  }
  optimizer = OPTIMIZERS[name]
  count = jax.ShapeDtypeStruct((), jnp.int32)
  state = TrainState(
    count, count, trainable, jax.eval_shape(optimizer.init, trainable), trainable, jax.eval_shape(jax.random.key, 0)
  )
  found = state_shardings(state, trainable, mesh)
  assert found.trainable == found.teacher == jax.tree.map(lambda leaf: leaf.sharding, trainable)
  assert found.step == place() and found.rng == place()
  jax.jit(optimizer.init, out_shardings=found.opt_state).lower(trainable).compile()
  by_shape = {leaf.shape: leaf.sharding for leaf in jax.tree.leaves(trainable)}
  leaves = jax.tree.leaves(state.opt_state)
  assert [sharding for sharding in jax.tree.leaves(found.opt_state)] == [by_shape.get(x.shape, place()) for x in leaves]
  assert any(leaf.shape in by_shape for leaf in leaves) or name == 'factored'


def test_the_base_cannot_teach_where_everything_is_trained(tmp_path):
  config = settings(**BASE)
  config.model = ModelConfig(path=str(tiny.make_model(tmp_path / 'model')), dtype='float32')
  with pytest.raises(UserError, match="teacher_regularization='base' needs a model with frozen parameters"):
    make_session(config, tmp_path)


def test_a_table_splits_what_merge_puts_together():
  policy, parameters = make_model()
  partly = dataclasses.replace(policy, frozen=('embedding', 'layers.mlp'))
  base, trainable = parameter_tables.split(partly.parameter_table(), parameters)
  assert set(base) == {'embedding', 'layers'} and set(base['layers']) == {'mlp'}
  assert 'mlp' not in trainable['layers']
  chex.assert_trees_all_equal(parameter_tables.merge(base, trainable), parameters)
