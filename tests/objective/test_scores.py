"""Scores of tokens, of ids and the most likely ones: against NumPy in float64, on a mesh too, and what they hold."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np
import pytest

from sdpo_jax.objective.divergences import log_floor
from sdpo_jax.objective.log_probs import log_probs_of_ids, scores, token_log_probs
from sdpo_jax.objective.sharded import Layout
from tests import compiling
from tests.tpu_programs import slice_mesh

B, T, V, D, ROWS = 8, 5, 43, 6, 48  # Five rows of padding.
TEMPERATURES = np.linspace(0.6, 1.5, B)
IDS = np.random.default_rng(1).integers(0, V, (B, T, 4)).astype(np.int32)
IDS[:, 0, :2], IDS[:, 1, 0], IDS[2, 2, 1:], IDS[:, 3, 1] = -1, V, V + 2, IDS[:, 3, 2]  # Left out; twice the same.


@functools.cache
def problem():
  rng = np.random.default_rng(0)
  unembedding = np.concatenate([rng.standard_normal((V, D)), np.full((ROWS - V, D), 50.0)])
  unembedding[7] = unembedding[3]  # Equal logits.
  mask = (np.arange(T)[None] < rng.integers(2, T + 1, B)[:, None]) * 1.0
  mask[5] = 0
  return {
    'hidden': 2 * rng.standard_normal((B, T, D)),
    'unembedding': unembedding,
    'targets': rng.integers(0, V, (B, T)).astype(np.int32),
    'mask': mask,
  }


def log_softmax(x, temperature):
  z = x['hidden'] @ x['unembedding'][:V].T / np.broadcast_to(temperature, B)[:, None, None]
  z = z - z.max(-1, keepdims=True)
  return z - np.log(np.exp(z).sum(-1, keepdims=True))


def placed(shape, x):
  """(layout, arrays) on a mesh of this shape; None: one device."""
  if shape is None:
    return None, jax.tree.map(jnp.asarray, x)
  mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(shape), ('fsdp', 'tensor'))

  def put(name, value):
    spec = jax.P('tensor', 'fsdp' if D % shape[0] == 0 else None) if name == 'unembedding' else jax.P(mesh.axis_names)
    return jax.device_put(value, NamedSharding(mesh, spec))

  return Layout(mesh, mesh.axis_names, 'tensor'), {name: put(name, value) for name, value in x.items()}


# The mesh whose devices have several tokens and parts; the others are a campaign's.
SHAPES = [(2, 4)] + [pytest.param(shape, marks=pytest.mark.campaign) for shape in (None, (1, 8))]


@pytest.mark.parametrize('shape', SHAPES)
def test_scores_are_the_formula(shape):
  """With K of more than one device's part, and a temperature of each row."""
  x, k = problem(), 13
  with jax.enable_x64(True):
    layout, y = placed(shape, x)
    found = scores(
      y['hidden'], y['unembedding'], y['targets'], k, jnp.asarray(TEMPERATURES), 3, y['mask'], 9, vocab_size=V,
      layout=layout,
    )  # fmt: skip
    found = jax.device_get(found)
  expected = log_softmax(x, TEMPERATURES)
  order = np.argsort(-expected, axis=-1, kind='stable')[..., :k]
  asked = x['mask'][..., None]
  np.testing.assert_array_equal(found.top_ids, order * asked.astype(int))
  np.testing.assert_allclose(
    found.top_log_probs, np.take_along_axis(expected, order, -1) * asked, rtol=1e-12, atol=1e-14
  )
  at_targets = np.take_along_axis(expected, x['targets'][..., None], -1)
  np.testing.assert_allclose(found.log_prob[..., None], at_targets * asked, rtol=1e-12, atol=1e-14)
  np.testing.assert_allclose(found.entropy, -(np.exp(expected) * expected).sum(-1) * x['mask'], rtol=1e-12)


@pytest.mark.parametrize('shape', SHAPES)
def test_log_probs_of_ids_and_their_gradient_are_the_formula(shape):
  x = problem()
  weights = np.random.default_rng(2).standard_normal(IDS.shape)
  inside = (IDS >= 0) & (IDS < V)
  expected = log_softmax(x, TEMPERATURES)
  with jax.enable_x64(True):
    layout, y = placed(shape, x | dict(ids=IDS))

    def value(trained):
      found = log_probs_of_ids(
        trained['hidden'], trained['unembedding'], y['ids'], jnp.asarray(TEMPERATURES), 3, y['mask'], 9, vocab_size=V,
        layout=layout,
      )  # fmt: skip
      return (found * weights).sum(), found

    trained = {name: y[name] for name in ('hidden', 'unembedding')}
    (_, found), gradients = jax.device_get(jax.value_and_grad(value, has_aux=True)(trained))
  at_ids = np.take_along_axis(expected, np.where(inside, IDS, 0), -1)
  at_ids = np.where(inside, at_ids, log_floor(np.float64)) * x['mask'][..., None]
  np.testing.assert_allclose(found, at_ids, rtol=1e-12, atol=1e-14)
  # d/d logits = Σ_m w_m·(1[v = id_m] − p_v), over what is asked for and inside.
  slopes = weights * inside * x['mask'][..., None]
  by_logits = -np.exp(expected) * slopes.sum(-1, keepdims=True)
  for at in np.ndindex(IDS.shape):
    if inside[at]:
      by_logits[(*at[:2], IDS[at])] += slopes[at]
  by_logits /= TEMPERATURES[:, None, None]
  np.testing.assert_allclose(gradients['hidden'], by_logits @ x['unembedding'][:V], rtol=1e-10, atol=1e-12)
  by_entries = np.einsum('btv,btd->vd', by_logits, x['hidden'])
  np.testing.assert_allclose(gradients['unembedding'][:V], by_entries, rtol=1e-10, atol=1e-12)
  assert not gradients['unembedding'][V:].any()


def test_more_than_the_vocabulary_and_what_has_no_probability():
  """−1 and the floor stand where there are no more tokens; a temperature of each row is not needed."""
  hidden, k = jnp.asarray([[[1.0, 0.0], [0.0, 1.0]]]), 5
  unembedding = jnp.asarray([[1.0, 0.0], [3.0, -jnp.inf], [2.0, 1.0]])
  found = scores(hidden, unembedding, jnp.asarray([[1, 0]]), k)
  np.testing.assert_array_equal(found.top_ids[0, 1], [2, 0, -1, -1, -1])
  floor = log_floor(np.float32)
  normaliser = np.log(1 + np.e)
  np.testing.assert_allclose(found.top_log_probs[0, 1], [1 - normaliser, -normaliser, *[floor] * 3], rtol=1e-6)

  def value(hidden, unembedding):
    return log_probs_of_ids(hidden, unembedding, jnp.asarray([[[1, 2], [1, -1]]])).sum()

  finite = unembedding.at[1, 1].set(-1e30)
  for ours in jax.grad(value, argnums=(0, 1))(hidden, finite):
    assert jnp.isfinite(ours).all()
  with pytest.raises(ValueError, match='k must be positive'):
    scores(hidden, unembedding, jnp.asarray([[1, 0]]), 0)


@pytest.mark.slow
def test_bfloat16_states_have_float32_scores():
  rng = np.random.default_rng(3)
  hidden, unembedding = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((2, 3, 8), (50, 8)))
  targets = jnp.asarray(rng.integers(0, 50, (2, 3)), jnp.int32)
  found = scores(hidden, unembedding, targets, 4)
  assert {found.log_prob.dtype, found.entropy.dtype, found.top_log_probs.dtype} == {jnp.dtype('float32')}
  logits = np.float64(hidden) @ np.float64(unembedding).T
  logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
  np.testing.assert_allclose(found.top_log_probs, -np.sort(-logits, -1)[..., :4], rtol=1e-5)
  at_ids = log_probs_of_ids(hidden, unembedding, found.top_ids)
  np.testing.assert_allclose(at_ids, found.top_log_probs, rtol=1e-6)
  gradient = jax.grad(lambda h: log_probs_of_ids(h, unembedding, found.top_ids).sum())(hidden)
  assert gradient.dtype == jnp.bfloat16
  np.testing.assert_allclose(token_log_probs(hidden, unembedding, targets)[0], found.log_prob, rtol=1e-6)


@pytest.mark.parametrize(
  'what', ['scores', *(pytest.param(w, marks=pytest.mark.campaign) for w in ('ids', 'gradient'))]
)
def test_a_long_text_with_a_large_vocabulary_takes_less_than_one_gibibyte(what):
  """T = 8192, V = 152k, K = 100, by the compiler: logits exist for a chunk only."""
  length, vocab, width, k = 8192, 151936, 64, 100
  hidden = jax.ShapeDtypeStruct((1, length, width), jnp.bfloat16)
  unembedding = jax.ShapeDtypeStruct((vocab, width), jnp.bfloat16)
  ids = jax.ShapeDtypeStruct((1, length, k), jnp.int32)

  def gradient(hidden, unembedding, ids):
    return jax.grad(lambda hidden: log_probs_of_ids(hidden, unembedding, ids).sum())(hidden)

  lowered = {
    'scores': lambda: scores.lower(hidden, unembedding, jax.ShapeDtypeStruct((1, length), jnp.int32), k),
    'ids': lambda: log_probs_of_ids.lower(hidden, unembedding, ids),
    'gradient': lambda: jax.jit(gradient).lower(hidden, unembedding, ids),
  }[what]()
  held = compiling.compile_as_users(lowered).memory_analysis().temp_size_in_bytes
  assert held < 2**30 < length * vocab * 4


@pytest.mark.campaign
@pytest.mark.tpu_compiler
@pytest.mark.parametrize('what', ['scores', 'ids', 'gradient'])
def test_so_it_does_on_a_tpu(what):
  """Which takes a chunk's whole vocabulary at once; model width 4096, on one chip of a v5e."""
  layout = Layout(slice_mesh('v5e:1x1', 1, 1), ('fsdp', 'tensor'), 'tensor')

  def array(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(layout.mesh, jax.P()))

  hidden, unembedding = array(jnp.bfloat16, 1, 8192, 4096), array(jnp.bfloat16, 151936, 4096)
  targets, ids = array(jnp.int32, 1, 8192), array(jnp.int32, 1, 8192, 100)

  def gradient(hidden, unembedding, ids):
    return jax.grad(lambda hidden: log_probs_of_ids(hidden, unembedding, ids, layout=layout).sum())(hidden)

  lowered = {
    'scores': lambda: scores.lower(hidden, unembedding, targets, 100, layout=layout),
    'ids': lambda: log_probs_of_ids.lower(hidden, unembedding, ids, layout=layout),
    'gradient': lambda: jax.jit(gradient).lower(hidden, unembedding, ids),
  }[what]()
  held = lowered.compile().memory_analysis().temp_size_in_bytes
  assert held < 2**30
