"""Attention to a shared prefix against the plain formula over the prefix and each row's own keys in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdpo_jax.config import MeshConfig
from sdpo_jax.distributed.mesh import make_mesh
from sdpo_jax.models.attention import decode_kernel, dispatch, prefix, splash
from sdpo_jax.models.attention.backend import AttentionBackend
from sdpo_jax.models.attention.prefix import Prefix
from sdpo_jax.models.cache import Stores
from tests.models.attention.attention_cases import (
  HEAD_DIM,
  HEADS,
  KERNELS,
  KV_HEADS,
  PACKED,
  SINGLE,
  SLOTS,
  XLA,
  first_slots,
  plain,
  shared,
  starts,
  tensors,
  whole,
)

BACKENDS = {
  name: {**XLA, **KERNELS}[name] for name in ('one tile', 'chunks that do not divide the sequence', 'splash', 'cudnn')
}


def differentiable(query, key, value, shared_key, shared_value, segments, window, within):
  """Return the same by one softmax over copies of the prefix in every row."""
  rows, length = segments.shape
  positions = np.arange(length) - starts(segments)
  own = dispatch.visible(positions, segments, positions, segments, window or None)
  seen = np.ones((rows, length, SLOTS), bool)
  if window and within:
    seen = np.arange(SLOTS)[None, None] >= first_slots(segments, window)[:, :, None]
  copies = [jnp.broadcast_to(array[None], (rows, *array.shape)) for array in (shared_key, shared_value)]
  return dispatch.attend(
    query, (Stores(*copies), jnp.asarray(seen)), (Stores(key.swapaxes(1, 2), value.swapaxes(1, 2)), own)
  )


def run(backend, segments, window, within, trained, sampling=False):
  windows = (0, window) if window else (0,)
  first = first_slots(segments, window) if window and within else None

  def attend(query, key, value, shared_key, shared_value):
    given = Prefix(shared_key, shared_value, first, trained)
    options = dict(prefix=given, sampling=sampling)
    return whole(backend, query, key, value, segments, windows, len(windows) - 1, **options)

  return attend


WINDOWS = [(0, False), (6, False), (6, True), (30, True)]
QUICK = {('one tile', (6, True)), ('splash', (0, False)), ('splash', (6, True)), ('cudnn', (6, False))} | {
  ('chunks that do not divide the sequence', (30, True))
}


@pytest.mark.parametrize(
  ('name', 'window', 'within'),
  [
    pytest.param(name, *window, marks=() if (name, window) in QUICK else pytest.mark.campaign)
    for name in BACKENDS
    for window in WINDOWS
  ],
)
def test_every_lowering_is_the_plain_formula_with_gradients(name, window, within):
  segments = PACKED
  real = (segments > 0)[:, :, None, None]
  arrays = *tensors(*segments.shape), *shared()
  weights = np.random.default_rng(9).standard_normal(arrays[0].shape).astype(np.float32) * real

  def with_gradients(function):
    def loss(*arrays):
      out = function(*arrays)
      return jnp.sum(out * weights), out

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, argnums=range(5), has_aux=True))(*arrays)
    assert all(np.isfinite(leaf).all() for leaf in (out, *gradients))
    return np.asarray(out) * real, *gradients

  ours = with_gradients(run(BACKENDS[name], segments, window, within, trained=True))
  np.testing.assert_allclose(ours[0], plain(*arrays, segments, window, within), atol=2e-6)
  expected = with_gradients(lambda *arrays: differentiable(*arrays, segments, window, within))
  for mine, theirs in zip(ours[1:], expected[1:], strict=True):
    np.testing.assert_allclose(mine, theirs, atol=2e-5)


def test_segments_see_what_is_filled_of_their_rows_prefix():
  arrays = tensors(*PACKED.shape)
  draw, real = np.random.default_rng(6), (PACKED > 0)[:, :, None, None]
  own = [draw.standard_normal((len(PACKED), KV_HEADS, SLOTS, HEAD_DIM)).astype(np.float32) for _ in range(2)]
  filled, weights = np.array([21, 3, 1, 10], np.int32), draw.standard_normal(arrays[0].shape).astype(np.float32) * real

  def gradients(name):
    def loss(query, key, value, *own):
      given = Prefix(*own, trained=True, filled=jnp.asarray(filled))
      return jnp.sum(whole(BACKENDS[name], query, key, value, PACKED, prefix=given) * weights)

    return jax.jit(jax.grad(loss, range(5)))(*arrays, *own)

  for ours, theirs in zip(gradients('splash'), gradients('one tile'), strict=True):
    np.testing.assert_allclose(ours, theirs, atol=2e-5)
  wide = np.zeros((1, 65_536 - SLOTS + 1, KV_HEADS, HEAD_DIM), np.float32)
  with pytest.raises(ValueError, match='21 slots before rows of 65516 tokens exceed 65536'):
    splash.attention_after(
      wide, wide, wide, wide[..., 0, 0].astype(int), Prefix(*shared()), window=0, residuals='', interpret=True
    )


@pytest.mark.parametrize(
  ('sampling', 'window', 'within'),
  [
    (False, 0, False),
    (True, 6, True),
    pytest.param(False, 6, True, marks=pytest.mark.slow),
    pytest.param(True, 6, False, marks=pytest.mark.slow),
    pytest.param(True, 0, False, marks=pytest.mark.campaign),
    pytest.param(False, 6, False, marks=pytest.mark.campaign),
  ],
)
def test_a_frozen_prefix_and_that_of_a_sampler_need_no_copies(sampling, window, within):
  backend = BACKENDS['splash']
  arrays = *tensors(*PACKED.shape), *shared()
  attend = run(backend, PACKED, window, within, trained=sampling, sampling=sampling)
  ours = jax.jit(attend)(*arrays) * (PACKED > 0)[:, :, None, None]
  np.testing.assert_allclose(ours, plain(*arrays, PACKED, window, within), atol=2e-6)
  copied = f'{PACKED.shape[0]},{SLOTS}'  # Rows times slots: no array has both.
  assert f'[{copied},' not in str(jax.make_jaxpr(attend)(*arrays)).replace(' ', '')


@pytest.mark.parametrize('name', ['one tile', pytest.param('splash', marks=pytest.mark.slow)])
def test_a_mesh_changes_nothing_but_where_rows_are(name):
  mesh = make_mesh(MeshConfig(4, 2))
  segments = np.concatenate([SINGLE, SINGLE[::-1]])
  arrays = *tensors(*segments.shape), *shared()

  def gradients(backend):
    attend = run(backend, segments, 0, False, trained=True)
    return jax.jit(jax.grad(lambda *arrays: jnp.sum(jnp.sin(attend(*arrays))), argnums=range(5)))(*arrays)

  divided = AttentionBackend(BACKENDS[name].kind, mesh, interpret=True)
  for mine, theirs in zip(gradients(divided), gradients(BACKENDS[name]), strict=True):
    np.testing.assert_allclose(mine, theirs, rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize('first', [15, pytest.param(None, marks=pytest.mark.slow)])
def test_decoding_attends_to_the_prefix_beside_its_cache(first):
  """By the plain path and the TPU's kernel, it equals attention to caches that begin with copies of the prefix."""
  draw, rows, layer = np.random.default_rng(3), 4, 1
  query = draw.standard_normal((rows, 1, HEADS, HEAD_DIM)).astype(np.float32)
  stores = Stores(*(draw.standard_normal((2, rows, KV_HEADS, 9, HEAD_DIM)).astype(np.float32) for _ in range(2)))
  filled = np.array([9, 1, 4, 0], np.int32)
  positions = np.maximum(filled - 1, 0)[:, None]
  key, value = shared()
  firsts = None if first is None else np.full((rows, 1), first, np.int32) + np.arange(rows, dtype=np.int32)[:, None]
  expected = np.zeros(query.shape)
  for row, head in np.ndindex(rows, HEADS):
    at, start = head // (HEADS // KV_HEADS), 0 if first is None else firsts[row, 0]
    keys = np.concatenate([key[at, start:], stores.keys[layer, row, at, : filled[row]]]).astype(np.float64)
    values = np.concatenate([value[at, start:], stores.values[layer, row, at, : filled[row]]])
    weights = np.exp(keys @ query[row, 0, head])
    expected[row, 0, head] = weights @ values / weights.sum()
  given = Prefix(key, value, firsts)
  part = stores, np.zeros_like(filled), filled

  def kernel(query, prefix):
    return decode_kernel.attention(query, positions, [part], jnp.int32(layer), jnp.int32(0), prefix, interpret=True)

  np.testing.assert_allclose(jax.jit(kernel)(query, given), expected, atol=2e-6)
  # The kernel's matrices of queries are filled up to eight rows; the prefix meets the real ones only.
  traced = str(jax.make_jaxpr(kernel)(query, given)).replace(' ', '')
  assert f'[{KV_HEADS},{rows * HEADS // KV_HEADS},{SLOTS}]' in traced and f'[{rows},{KV_HEADS},8,{SLOTS}]' not in traced
  one_layer = Stores(stores.keys[layer], stores.values[layer])
  mask = np.arange(9)[None, None] < filled[:, None, None]
  plainly = jax.jit(lambda query, given: dispatch.attend(query, (one_layer, mask), prefix=given))
  np.testing.assert_allclose(plainly(query, given), expected, atol=2e-6)
  backend = AttentionBackend('splash', make_mesh(MeshConfig(4, 2)), interpret=True)
  divide = jax.jit(functools.partial(dispatch.attend_stacks, backend))
  divided = divide(query, positions, [part], layer, 0, given)
  np.testing.assert_allclose(divided, expected, atol=2e-6)


def test_what_is_not_seen_at_all_is_left_out():
  query = tensors(2, 3)[0]
  key, value = shared()
  blind = Prefix(key, value, np.full((2, 3), SLOTS, np.int32))
  own = jnp.ones_like(query), jnp.zeros(query.shape[:3])
  mixed = prefix.merged(own, prefix.attention(query, blind, 2**20, 'name'))
  np.testing.assert_array_equal(mixed, own[0])
