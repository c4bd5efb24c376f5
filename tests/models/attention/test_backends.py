"""Every attention backend against the plain formula in float64, forward and backward; kernels are interpreted."""

import dataclasses
import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from sdpo_jax.config import MeshConfig
from sdpo_jax.distributed.mesh import make_mesh
from sdpo_jax.errors import UserError
from sdpo_jax.models import cache as kv_cache
from sdpo_jax.models import huggingface
from sdpo_jax.models.attention import decode_kernel, dispatch
from sdpo_jax.models.attention.backend import AttentionBackend, choose_backend, distinct_windows
from sdpo_jax.models.cache import SHALLOW, Stores, quantize
from tests.compiling import compile_as_users
from tests.models.attention.attention_cases import (
  HEAD_DIM,
  HEADS,
  KERNELS,
  KV_HEADS,
  PACKED,
  SINGLE,
  XLA,
  tensors,
  whole,
)

# Segments, and the one that each sees beside its own: prompts with completions among others; nothing shared; nothing.
FAMILIES = np.stack(
  [
    np.repeat([1, 2, 3, 4, 5, 0], [6, 5, 7, 11, 9, 2]),
    PACKED[0],
    PACKED[2],
    np.repeat([1, 2, 3, 4, 5], [1, 9, 10, 4, 16]),
  ]
).astype(np.int32)
PARENTS = np.zeros_like(FAMILIES)
for row, child, parent in ((0, 2, 1), (0, 3, 1), (0, 5, 1), (3, 2, 1), (3, 3, 1), (3, 5, 4)):
  PARENTS[row][FAMILIES[row] == child] = parent
UNEVEN, TILES = list(XLA)[-1], ('one tile', 'chunks of queries')


def plain(query, key, value, segment_ids, window, parents=None):
  """Return the formula in float64, token by token; 0 for padding."""
  out = np.zeros(query.shape)
  group = query.shape[2] // key.shape[2]
  for row, slot in np.argwhere(segment_ids > 0):
    ids = {segment_ids[row, slot], segment_ids[row, slot] if parents is None else parents[row, slot]} - {0}
    seen = [i for i in range(slot + 1) if segment_ids[row, i] in ids]
    seen = seen[-window:] if window else seen
    for head in range(query.shape[2]):
      scores = np.float64(key[row, seen, head // group]) @ np.float64(query[row, slot, head])
      weights = np.exp(scores - scores.max())
      out[row, slot, head] = weights @ value[row, seen, head // group] / weights.sum()
  return out


def masked_formula(query, key, value, segment_ids, window, parents=None):
  """Return the same by a differentiable formula."""
  positions = jnp.broadcast_to(jnp.arange(segment_ids.shape[1], dtype=jnp.int32), segment_ids.shape)
  mask = dispatch.visible(positions, segment_ids, positions, segment_ids, window or None)
  if parents is not None:
    mask |= dispatch.visible(positions, parents, positions, segment_ids)
  return dispatch.attend(query, (Stores(key.swapaxes(1, 2), value.swapaxes(1, 2)), mask))


@functools.cache
def lowering(backend, windows=(0,), **options):
  """Return a backend's attention as a function of queries, keys, values, segments and further arrays, made once."""

  def run(query, key, value, segment_ids, window_index=0, parents=None):
    return whole(backend, query, key, value, segment_ids, windows, window_index, parents=parents, **options)

  return run


@functools.cache
def formula(window):
  return functools.partial(masked_formula, window=window)


@functools.partial(jax.jit, static_argnums=0)
def run_with_gradients(function, weights, arrays, more):
  def loss(*arrays):
    out = function(*arrays, **more)
    return jnp.sum(out * weights), out

  return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(*arrays)


def with_gradients(function, real, *arrays, **more):
  """Return the output at tokens that are not padding, and the gradients of a weighted sum of it."""
  weights = np.random.default_rng(9).standard_normal(arrays[0].shape).astype(np.float32) * real[:, :, None, None]
  (_, out), gradients = run_with_gradients(function, weights, arrays, more)
  assert all(np.isfinite(leaf).all() for leaf in (out, *gradients))
  return [np.asarray(out) * real[:, :, None, None], *gradients]


# A lowering has one program for all windows that a model has. Two ways to cut scores into tiles stand for all.
@pytest.mark.parametrize(
  ('name', 'windows'),
  [
    pytest.param(
      name, windows, marks=() if len(windows) == 2 and name not in TILES or name == UNEVEN else pytest.mark.slow
    )
    for name in (*XLA, *KERNELS)
    for windows in ((0,), (0, 6))
  ],
)
def test_every_lowering_is_the_plain_formula(name, windows):
  backend = {**XLA, **KERNELS}[name]
  for segments in (PACKED, SINGLE):
    arrays, real = tensors(*segments.shape), segments > 0
    for index, window in enumerate(windows):
      ours = with_gradients(
        lowering(backend, windows), real, *arrays, segment_ids=segments, window_index=np.int32(index)
      )
      np.testing.assert_allclose(ours[0], plain(*arrays, segments, window), atol=2e-6)
      expected = with_gradients(formula(window), real, *arrays, segment_ids=segments)
      for mine, theirs in zip(ours[1:], expected[1:], strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


def parents_grid():
  """Yield every lowering without a mesh, and on one the kernel by default: a mesh divides rows before a lowering."""
  for name in (*XLA, *KERNELS):
    yield pytest.param(name, None, marks=pytest.mark.slow if name in TILES else ())
    yield pytest.param(name, (4, 1), marks={'splash': (), UNEVEN: pytest.mark.slow}.get(name, pytest.mark.campaign))


@pytest.mark.parametrize(('name', 'mesh'), list(parents_grid()))
def test_a_segment_sees_its_parent_too(name, mesh):
  backend = {**XLA, **KERNELS}[name]
  if mesh is not None:
    backend = dataclasses.replace(backend, mesh=make_mesh(MeshConfig(*mesh), jax.devices()[:4]))
  arrays, real = tensors(*FAMILIES.shape), FAMILIES > 0
  run = jax.jit(lowering(backend))
  out = np.asarray(run(*arrays, FAMILIES, parents=PARENTS))
  assert np.isfinite(out).all()
  np.testing.assert_allclose(out * real[:, :, None, None], plain(*arrays, FAMILIES, 0, PARENTS), atol=2e-6)
  assert np.abs(out - run(*arrays, FAMILIES))[PARENTS > 0].min(axis=(1, 2)).max() > 1e-3
  if name in XLA:
    more = dict(segment_ids=FAMILIES, parents=PARENTS)
    expected = with_gradients(formula(0), real, *arrays, **more)
    for mine, theirs in zip(with_gradients(lowering(backend), real, *arrays, **more), expected, strict=True):
      np.testing.assert_allclose(mine, theirs, atol=1e-5)


def test_windows_are_not_for_parents():
  with pytest.raises(ValueError, match=r'not windows of \(0, 6\)'):
    whole(AttentionBackend(), *tensors(*FAMILIES.shape), FAMILIES, (0, 6), 1, parents=PARENTS)


@pytest.mark.parametrize('heads', [(6, 1), (3, 3)], ids=['one key for all heads', 'one key a head'])
@pytest.mark.parametrize('name', ['chunks of queries', 'splash'])
def test_head_counts_of_any_ratio(name, heads):
  arrays = tensors(2, 23, 1, *heads)
  segments = np.ones((2, 23), np.int32)
  out = jax.jit(lowering({**XLA, **KERNELS}[name]))(*arrays, segments)
  np.testing.assert_allclose(out, plain(*arrays, segments, 0), atol=2e-6)


@pytest.mark.parametrize(
  ('rows', 'name', 'sampling'),
  [
    (8, 'splash', True),  # Rows and heads over the mesh.
    (8, 'several rows a tile', True),
    (3, 'several rows a tile', False),  # Rows over the mesh, which no axis divides.
    pytest.param(3, 'splash', False, marks=pytest.mark.slow),
    pytest.param(8, 'splash', False, marks=pytest.mark.campaign),
    pytest.param(3, 'splash', True, marks=pytest.mark.campaign),
    pytest.param(8, 'several rows a tile', False, marks=pytest.mark.campaign),
    pytest.param(3, 'several rows a tile', True, marks=pytest.mark.campaign),
  ],
)
def test_a_mesh_changes_nothing(rows, name, sampling):
  mesh = make_mesh(MeshConfig(fsdp=4, tensor=2))
  backend = {**XLA, **KERNELS}[name]
  segments = np.resize(PACKED[:, :20], (rows, 20))
  arrays, real = tensors(rows, 20, 2), segments > 0

  def run(backend):
    return with_gradients(lowering(backend, sampling=sampling), real, *arrays, segment_ids=segments)

  for mine, theirs in zip(run(dataclasses.replace(backend, mesh=mesh)), run(backend), strict=True):
    np.testing.assert_allclose(mine, theirs, atol=1e-5)


def test_long_sequences_need_no_array_of_all_scores():
  length = 2048
  arrays = [jax.ShapeDtypeStruct((1, length, heads, HEAD_DIM), jnp.float32) for heads in (HEADS, KV_HEADS, KV_HEADS)]
  segments = np.ones((1, length), np.int32)

  def loss(*arrays):
    return whole(AttentionBackend(), *arrays, segments).sum()

  memory = compile_as_users(jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*arrays)).memory_analysis()
  assert memory.temp_size_in_bytes < HEADS * length * length * 4 / 4


CONFIG = dict(
  model_type='qwen3',
  vocab_size=61,
  hidden_size=32,
  intermediate_size=48,
  num_attention_heads=4,
  num_key_value_heads=2,
  head_dim=16,
  initializer_range=0.25,
)


def in_int8(stores):
  (keys, key_scales), (values, value_scales) = (jax.vmap(quantize)(array) for array in (stores.keys, stores.values))
  return Stores(keys, values, key_scales, value_scales)


def test_quantized_numbers_are_within_half_a_step():
  numbers = np.random.default_rng(0).standard_normal((3, 2, 7, 16)).astype(np.float32) * 10
  numbers[0, 0, 0] = 0
  whole, scales = quantize(jnp.asarray(numbers))
  assert whole.dtype == jnp.int8 and scales.shape == (3, 2, 1, 7)
  steps = np.swapaxes(scales, 2, 3)
  np.testing.assert_allclose(steps[..., 0], np.abs(numbers).max(-1) / 127, rtol=1e-6)
  assert (np.abs(whole * steps - numbers) <= 0.501 * steps).all()


@pytest.mark.parametrize('quantized', [False, True], ids=['float32', 'int8'])
def test_scales_are_folded_into_scores_and_weights(quantized):
  """Attention to int8 keys and values is attention to the numbers that they stand for."""
  generator = np.random.default_rng(1)

  def draw(*shape):
    return jnp.asarray(generator.standard_normal(shape), jnp.float32)

  held = Stores(draw(3, KV_HEADS, 11, HEAD_DIM), draw(3, KV_HEADS, 11, HEAD_DIM))
  query, mask = draw(3, 2, HEADS, HEAD_DIM), jnp.asarray(generator.random((3, 2, 11)) < 0.7)
  if quantized:
    (keys, key_scales), (values, value_scales) = quantize(held.keys), quantize(held.values)

    def number(whole, scales):
      return whole * scales.swapaxes(2, 3)

    plain, held = (
      Stores(number(keys, key_scales), number(values, value_scales)),
      Stores(keys, values, key_scales, value_scales),
    )
  else:
    plain = held
  group = HEADS // KV_HEADS
  keys, values = (np.repeat(np.asarray(array, np.float64), group, axis=1) for array in (plain.keys, plain.values))
  scores = np.einsum('bshd,bhcd->bhsc', np.asarray(query, np.float64), keys)
  weights = np.where(mask[:, None], np.exp(scores), 0)
  weights /= weights.sum(-1, keepdims=True)
  expected = np.einsum('bhsc,bhcd->bshd', weights, values)
  np.testing.assert_allclose(dispatch.attend(query, (held, mask)), expected, atol=2e-6)


@pytest.mark.parametrize(
  ('quantized', 'block'),
  [
    pytest.param(False, 16, id='blocks that do not divide the slots'),
    pytest.param(True, 16, id='blocks that do not divide the slots, int8'),
    pytest.param(False, 1024, id='one block', marks=pytest.mark.slow),
    pytest.param(True, 1024, id='one block, int8', marks=pytest.mark.campaign),
  ],
)
def test_the_decoding_kernel_is_the_plain_formula(quantized, block, monkeypatch):
  """Two queries per row attend to two caches, some empty, some full; one row is not in use."""
  monkeypatch.setattr(decode_kernel, 'BLOCK', block)
  generator = np.random.default_rng(3)

  def draw(*shape):
    return generator.standard_normal(shape).astype(np.float32)

  layers, layer, rows = 3, 1, 6
  query = draw(rows, 2, HEADS, HEAD_DIM)
  lengths = np.array([37, 0, 5, 20, 16, 0], np.int32)
  recent = np.array([1, 2, 21, 4, 2, 0], np.int32)
  positions = np.maximum(lengths + recent, 2)[:, None] - np.array([[2, 1]], np.int32)
  parts = [
    (Stores(*(draw(layers, rows, KV_HEADS, slots, HEAD_DIM) for _ in range(2))), start, filled)
    for slots, start, filled in ((37, np.zeros_like(lengths), lengths), (21, lengths, recent))
  ]
  if quantized:
    parts = [(in_int8(held), *place) for held, *place in parts]
  run = jax.jit(functools.partial(decode_kernel.attention, interpret=True))
  attend = jax.jit(dispatch.attend)
  for window in (0, 9):
    ours = run(query, positions, parts, layer, window)
    masks = [
      dispatch.visible(
        positions, np.ones_like(positions), *dispatch.in_slots(start, filled, held.keys.shape[3]), window or None
      )
      for held, start, filled in parts
    ]
    expected = attend(
      query, *((kv_cache.layer_of(held, layer), mask) for (held, *_), mask in zip(parts, masks, strict=True))
    )
    blind = ~np.concatenate(masks, axis=-1).any(-1)
    assert blind.any(0).all() and blind.sum() == 2
    np.testing.assert_allclose(ours, np.where(blind[:, :, None, None], 0, expected), atol=2e-6)


@pytest.mark.parametrize(
  ('layers', 'mesh'),
  [
    pytest.param(SHALLOW + 1, (4, 2), id='deep, eight devices', marks=pytest.mark.slow),
    pytest.param(SHALLOW + 1, None, id='deep', marks=pytest.mark.slow),
    pytest.param(2, None, id='shallow'),
    pytest.param(2, (4, 2), id='shallow, eight devices', marks=pytest.mark.campaign),
  ],
)
def test_the_kernels_of_a_tpu_sample_the_tokens_of_the_plain_path(layers, mesh):
  """Prefill, rows of different lengths, a commit midway: greedy tokens are equal, log-probs within 1e-5."""
  windows = dict(use_sliding_window=True, sliding_window=7, max_window_layers=1)
  plain, params = huggingface.init(CONFIG | windows | {'num_hidden_layers': layers}, jax.random.key(0))
  mesh = None if mesh is None else make_mesh(MeshConfig(*mesh))
  kernels = dataclasses.replace(plain, backend=AttentionBackend('splash', mesh, interpret=True))
  prompts = np.random.default_rng(4).integers(0, plain.vocab_size, (4, 9), dtype=np.int32)
  lengths = np.array([9, 4, 7, 1], np.int32)

  @functools.partial(jax.jit, static_argnums=0)
  def prefill(policy, params):
    segments = (np.arange(9)[None] < lengths[:, None]).astype(np.int32)
    positions = np.tile(np.arange(9, dtype=np.int32), (4, 1)) * segments
    _, _, filled = policy.apply({}, params, prompts, positions, segments, policy.init_cache(4, 9))
    rows = jnp.arange(8, dtype=jnp.int32)
    cache = kv_cache.copy_rows(policy.init_cache(8, 17), filled, rows // 2, rows, 8)
    return cache, jnp.repeat(prompts[:, :1], 2, 0), jnp.repeat(lengths, 2)[:, None]

  @functools.partial(jax.jit, static_argnums=0)
  def advance(policy, params, state):
    def step(state, _):
      cache, token, position = state
      hidden, matrix, cache = policy.apply({}, params, token, position, jnp.ones_like(token), cache)
      log_probs = jax.nn.log_softmax(hidden[:, 0] @ matrix.T)
      token = jnp.argmax(log_probs, axis=-1).astype(jnp.int32)[:, None]
      # The two rows of a group part: one takes the likeliest token, the other the one behind it.
      token = jnp.where(jnp.arange(8)[:, None] % 2 == 1, (token + 1) % policy.vocab_size, token)
      return (cache, token, position + 1), (token, jnp.take_along_axis(log_probs, token, axis=1))

    (cache, *rest), drawn = lax.scan(step, (policy.with_recent(state[0], 5), *state[1:]), length=4)
    return (kv_cache.commit(cache, jnp.ones(8, bool)), *rest), drawn

  def sample(policy):
    state, first = advance(policy, params, prefill(policy, params))
    return first, advance(policy, params, state)[1]

  for (tokens, log_probs), (expected, expected_log_probs) in zip(sample(kernels), sample(plain), strict=True):
    np.testing.assert_array_equal(tokens, expected)
    np.testing.assert_allclose(log_probs, expected_log_probs, atol=1e-5)


@pytest.mark.slow
def test_saved_attention_is_not_computed_again():
  """With remat='save_attention' the gradient is that of 'none', and attention runs forward once instead of twice.

  This is the XLA path; tests/models/attention/test_tpu.py counts the kernels of splash attention.
  """
  plain, params = huggingface.init(CONFIG | {'num_hidden_layers': SHALLOW + 1}, jax.random.key(1))
  row = np.arange(24, dtype=np.int32)[None], np.arange(24, dtype=np.int32)[None], np.ones((1, 24), np.int32)
  gradients, runs = {}, {}
  for remat in ('none', 'full', 'save_attention'):
    policy = dataclasses.replace(plain, remat=remat)
    traced = jax.jit(jax.grad(lambda params, policy=policy: jnp.sum(jnp.sin(policy.apply({}, params, *row)[0])))).trace(
      params
    )
    gradients[remat] = compile_as_users(traced.lower())(params)
    # What only the forward pass of attention does: the softmax's maximum.
    runs[remat] = str(traced.jaxpr).count('reduce_max')
  for remat in ('full', 'save_attention'):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), gradients[remat], gradients['none'])
  assert runs['none'] == runs['save_attention'] < runs['full']


def test_the_setting_is_resolved_by_the_devices_of_the_mesh():
  assert choose_backend('auto', 'bfloat16', 128).kind == 'xla'
  with pytest.raises(UserError, match="model.attention='splash' needs TPUs, but the devices here are cpu"):
    choose_backend('splash', 'bfloat16', 128)
  with pytest.raises(UserError, match="model.attention='cudnn' needs NVIDIA GPUs"):
    choose_backend('cudnn', 'bfloat16', 128)
  assert distinct_windows((0, 4, 0, 4)) == (0, 4) and distinct_windows(None) == (0,)
