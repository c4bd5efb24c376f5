"""A key-value prefix of a frozen model: with the keys and values of a text, it has the effect of the text itself."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdpo_jax.config import MeshConfig
from sdpo_jax.distributed.mesh import make_mesh, put_rows
from sdpo_jax.models import flops, parameters
from sdpo_jax.models.adapters import kv_prefix
from sdpo_jax.models.adapters.kv_prefix import KVPrefix
from sdpo_jax.models.attention.backend import AttentionBackend
from sdpo_jax.rollout.sampler import Sampler
from tests import tiers
from tests.models.adapters.prefixed_models import DOCUMENT, after_document, logits, model, rows, with_prefix
from tests.models.family_models import MODELS, MORE, TOKENIZER, VOCABULARY

KERNELS = AttentionBackend('splash', interpret=True)


@pytest.mark.parametrize(
  ('name', 'frozen'),
  tiers.cases(
    itertools.product((*MODELS, *MORE), (0, 1, len(DOCUMENT))),
    default=(('qwen3', 1),),
    slow=[('gemma3', 0), ('gemma3', len(DOCUMENT)), *((name, 1) for name in MODELS)],
  ),
)
def test_the_slots_of_a_text_say_what_the_text_says(name, frozen):
  """For whole rows, for a sampler's cache, and with the TPU's kernels; also in layers with windows."""
  policy, params = model(name)
  prefix = KVPrefix(len(DOCUMENT), frozen, within_windows=True)
  student, base, trainable = with_prefix(policy, params, prefix, *kv_prefix.read_text(policy, params, DOCUMENT))
  row = rows()
  real = row[2] > 0
  expected = after_document(policy, params, row)[real]
  without = logits(policy, {}, params, row)[real]
  assert np.abs(without - expected).max() > 0.1
  np.testing.assert_allclose(logits(student, base, trainable, row)[real], expected, atol=5e-5)
  np.testing.assert_allclose(logits(student, *student.cast(base, trainable), row)[real], expected, atol=5e-5)
  if frozen == 1:
    kernels = dataclasses.replace(student, backend=KERNELS)
    np.testing.assert_allclose(logits(kernels, base, trainable, row)[real], expected, atol=5e-5)


TEXTS = (DOCUMENT, DOCUMENT[4:13], DOCUMENT[::-1][:17])


def bank_of(policy, params, mesh=None, parts=None):
  """Return (policy, base) of a model with a bank of the three texts, shorter ones padded."""
  policy = policy.on(mesh)
  bank = KVPrefix(0, 0, within_windows=True, parts=parts, members=len(TEXTS), member_slots=len(DOCUMENT))
  held = dataclasses.replace(policy, adapter=bank)
  base = kv_prefix.empty_slots(policy, bank)
  for member, text in enumerate(TEXTS):
    padded = text + [1] * (len(DOCUMENT) - len(text))
    read = kv_prefix.read_slots(policy, params, padded, parts)
    base = kv_prefix.bank_writer(held)(base, read, np.int32(member), np.int32(len(text)))
  return held, parameters.merge(params, base)


@pytest.mark.parametrize(
  ('name', 'divided'),
  tiers.cases(
    itertools.product((*MODELS, *MORE), (False, True)),
    default=(('gemma3', False),),
    slow=[('qwen3', True)],
  ),
)
def test_every_row_reads_its_own_text_of_a_bank(name, divided):
  """Or none; also with the TPU's kernels, in a sampler, and with the texts divided among devices."""
  policy, params = model(name)
  members = np.array([2, 0, -1, 1, 1, 2, 0, -1], np.int32)
  row, texts = rows(), [*TEXTS, []]
  real, width = row[2] > 0, len(DOCUMENT) + row[0].shape[1]
  whole = [[*texts[member], *row[0][at, real[at]].tolist()] for at, member in enumerate(members)]
  segments = np.array([[at < len(tokens) for at in range(width)] for tokens in whole], np.int32)
  tokens = np.array([tokens + [0] * (width - len(tokens)) for tokens in whole], np.int32)
  said = logits(policy, {}, params, (tokens, np.arange(width, dtype=np.int32) * segments, segments))
  expected = np.concatenate([said[at, len(texts[member]) : len(whole[at])] for at, member in enumerate(members)])
  mesh = make_mesh(MeshConfig(4, 2)) if divided else None
  reader, base = bank_of(policy, params, mesh, 4 if divided else None)

  def found(policy, base):
    placed = row if mesh is None else put_rows(mesh, row)
    own = members if mesh is None else put_rows(mesh, members)
    hidden, unembedding, _ = policy.apply(base, {}, *placed, members=own)
    return np.asarray((hidden @ unembedding.T).astype(jnp.float32))[real]

  np.testing.assert_allclose(found(reader, base), expected, atol=5e-5)
  kernels = dataclasses.replace(reader, backend=dataclasses.replace(reader.backend, kind='splash', interpret=True))
  np.testing.assert_allclose(found(kernels, base), expected, atol=5e-5)
  request = dict(n=2, seed=0, step=0, max_tokens=8, temperature=0.0)
  prompts, own = [[5, 9, 13], [7] * 12, [3]], (1, -1, 0)

  def sample(policy, base, trainable, prompts, longest, **options):
    sampler = Sampler(policy, TOKENIZER, prompt_buckets=(longest,), response_buckets=(8,), decode_chunk=4, **options)
    return functools.partial(sampler.sample, base, trainable, prompts, **request)

  alone = sample(policy, {}, params, [texts[at] + prompt for at, prompt in zip(own, prompts, strict=True)], 36)()
  for one in (reader, kernels)[divided:]:
    drawn = sample(one, base, {}, prompts, 12, mesh=mesh)(members=own)
    np.testing.assert_array_equal(drawn.completion_tokens, alone.completion_tokens)
    np.testing.assert_allclose(drawn.model_log_probs, alone.model_log_probs, atol=5e-5)


@pytest.mark.parametrize('name', tiers.cases((*MODELS, *MORE), default=('gemma3',), slow=('qwen3', 'mistral')))
def test_a_sampler_goes_on_after_the_slots(name):
  policy, params = model(name)
  prefix = KVPrefix(len(DOCUMENT), 1, within_windows=True)
  student, base, trainable = with_prefix(policy, params, prefix, *kv_prefix.read_text(policy, params, DOCUMENT))
  prompts = [[5, 9, 13], [7] * 12, [3]]
  request = dict(n=2, seed=0, step=0, max_tokens=8, temperature=0.0)

  def sample(policy, base, trainable, prompts, buckets):
    sampler = Sampler(policy, TOKENIZER, prompt_buckets=buckets, response_buckets=(8,), decode_chunk=4)
    return sampler.sample(base, trainable, prompts, **request)

  expected = sample(policy, {}, params, [DOCUMENT + prompt for prompt in prompts], (36,))
  found = sample(student, base, trainable, prompts, (12,))
  np.testing.assert_array_equal(found.completion_tokens, expected.completion_tokens)
  np.testing.assert_allclose(found.model_log_probs, expected.model_log_probs, atol=5e-5)


def test_layers_with_windows_see_all_slots_unless_told_otherwise():
  policy, params = model('mistral')  # Windows in every layer.
  read = kv_prefix.read_text(policy, params, DOCUMENT)
  row = rows()
  everywhere, within = (
    logits(*with_prefix(policy, params, KVPrefix(len(DOCUMENT), 1, within_windows=w), *read), row)
    for w in (False, True)
  )
  far = row[1] >= 6  # No slot is within the window of these in the first layer.
  assert far.any() and np.abs(everywhere - within)[far].max() > 1e-2


@pytest.mark.parametrize(
  ('kernels', 'mesh'),
  [
    (False, (4, 2)),
    pytest.param(True, None, marks=pytest.mark.slow),
    pytest.param(False, None, marks=pytest.mark.slow),
    pytest.param(True, (4, 2), marks=pytest.mark.slow),
  ],
)
def test_the_gradient_is_that_of_finite_differences(kernels, mesh):
  policy, params = model('gemma3' if mesh is None else 'qwen3')
  mesh = mesh and make_mesh(MeshConfig(*mesh))
  prefix = KVPrefix(len(DOCUMENT), 1)
  read = kv_prefix.read_text(policy, params, DOCUMENT)
  student, base, trainable = with_prefix(policy, params, prefix, *read, mesh)
  if kernels:
    student = dataclasses.replace(student, backend=dataclasses.replace(student.backend, kind='splash', interpret=True))
  row = rows() if mesh is None else put_rows(mesh, rows())
  weights = np.random.default_rng(0).standard_normal((8, 12, VOCABULARY)).astype(np.float32)
  weights *= rows()[2][:, :, None]

  @jax.jit
  def loss(trainable):
    hidden, unembedding, _ = student.apply(base, trainable, *row)
    return jnp.sum(weights * jax.nn.log_softmax((hidden @ unembedding.T).astype(jnp.float32)))

  gradient = jax.jit(jax.grad(loss))(trainable)
  assert {leaf.shape for leaf in jax.tree.leaves(gradient)} == {(2, policy.config.kv_heads, 20, policy.config.head_dim)}
  draw = np.random.default_rng(4)
  direction = jax.tree.map(lambda leaf: draw.standard_normal(leaf.shape).astype(np.float32), trainable)
  step = 2e-3

  def moved(by):
    return loss(jax.tree.map(lambda p, d: p + by * d, trainable, direction))

  along = sum(np.vdot(g, d) for g, d in zip(*map(jax.tree.leaves, (gradient, direction)), strict=True))
  np.testing.assert_allclose(along, (moved(step) - moved(-step)) / (2 * step), rtol=2e-3, atol=0.02)


def test_frozen_and_trained_slots_are_joined_once_for_all_layers():
  """They are joined before the loop over the layers, so that a decode loop does not do it in every step."""
  policy, params = model('qwen3')
  sizes = policy.config
  shape = sizes.layers, sizes.kv_heads, 21, sizes.head_dim
  student, base, trainable = with_prefix(policy, params, KVPrefix(21, 1), *np.ones((2, *shape), np.float32))
  traced = str(jax.make_jaxpr(student.apply)(base, trainable, *rows())).replace(' ', '')
  joined = [','.join(map(str, part)) + ']=concatenate' for part in (shape, shape[1:])]
  assert [traced.count(f'[{text}') for text in joined] == [2, 0]


def test_a_prefix_is_counted_as_keys_and_not_as_matrices():
  policy, _ = model('qwen3')
  student = dataclasses.replace(policy, adapter=KVPrefix(21, 1))
  sizes = policy.config
  more = flops.forward_flops(student, 1, 10, 5) - flops.forward_flops(policy, 1, 10, 5)
  assert more == 4 * 10 * 21 * sizes.layers * sizes.heads * sizes.head_dim
  trained = parameters.trainable(student.parameter_table())
  assert parameters.count(trained) == 2 * sizes.layers * sizes.kv_heads * 20 * sizes.head_dim


@pytest.mark.parametrize(('slots', 'frozen'), [(0, 0), (4, 5), (4, -1)])
def test_impossible_prefixes_are_refused(slots, frozen):
  with pytest.raises(ValueError, match=f'{slots} slots cannot have {frozen} frozen'):
    KVPrefix(slots, frozen)
