"""The objective with rows and vocabulary split over eight devices: the loss, per-token values and gradients of one."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np
import pytest

from sdpo_jax.objective.log_probs import token_log_probs
from sdpo_jax.objective.loss import ObjectiveConfig, objective
from sdpo_jax.objective.sharded import Layout
from sdpo_jax.types import RowNumbers, TeacherSignal
from tests import tiers
from tests.compiling import compile_as_users
from tests.golden.compiling import quick
from tests.objective.objective_from_logits import objective_from_logits

B, T, V, D, K = 8, 5, 43, 8, 6
ROWS = 48  # Three rows of padding in the last part of eight, and a whole part of four.
SHAPES = [(8, 1), (4, 2), (2, 4), (1, 8)]
# One that divides rows and vocabulary; the others are a sweep.
FEW_SHAPES = [shape if shape == (2, 4) else pytest.param(shape, marks=pytest.mark.campaign) for shape in SHAPES]


def name_of(shape):
  return f'{shape[0]}x{shape[1]}'


TERMS = ('targets', 'mask', 'distill_coef', 'policy_coef', 'entropy_coef', 'old_log_probs', 'advantages')
TERMS += ('kl_coef', 'initial_log_probs')

# (settings of the objective, terms left out, what else is given)
CASES = {
  'topk': (dict(distillation_topk=K, alpha=0.5, temperature=0.7), (), ()),
  'hidden_only': (dict(distillation_topk=K, alpha=0.5, temperature=0.7), ('entropy_coef', 'policy_coef'), ()),
  'renormalised': (dict(distillation_topk=K, distillation_add_tail=False, alpha=0.0, is_clip=None), (), ()),
  'trust_region': (dict(distillation_topk=K, alpha=1.0), (), ('mix',)),
  'full': (dict(distillation_topk=None, alpha=0.5, is_clip=0.8), (), ('mix',)),
  'reverse': (dict(distillation_topk=None, alpha=1.0), ('entropy_coef',), ()),
  'sampled': (dict(full_logit_distillation=False, alpha=1.0), ('old_log_probs',), ()),
  'grpo': (dict(), ('distill_coef',), ()),
  'external': (dict(distillation_topk=K, alpha=0.3), (), ('external',)),
  'support': (dict(distillation_topk=K, alpha=0.3), (), ('support',)),
  'rows': (dict(distillation_topk=K), (), ('numbers',)),
  'rows_full': (dict(distillation_topk=None), (), ('numbers',)),
  'more_than_a_part': (dict(distillation_topk=20, alpha=0.5), (), ()),
  'approx': (dict(distillation_topk=K, alpha=0.5, topk_method='approx'), (), ()),
}


@functools.cache
def problem() -> dict[str, np.ndarray]:
  """Rows of very different lengths (one empty), pads of the vocabulary that would win if they were looked at."""
  rng = np.random.default_rng(0)

  def normal(*shape):
    return rng.standard_normal(shape)

  mask = (np.arange(T)[None] < rng.integers(1, T + 1, B)[:, None]) * 1.0
  mask[2] = 0
  x = {f'{name}hidden': normal(B, T, D) for name in ('', 'teacher_', 'mix_')}
  for name in ('', 'teacher_', 'mix_'):
    x[f'{name}unembedding'] = np.concatenate([normal(V, D), np.full((ROWS - V, D), 50.0)])
  ids = np.argsort(rng.random((B, T, V)), axis=-1)[..., :K].astype(np.int32)
  external = ids.copy()
  external[:, :, 1] = -1
  return x | {
    'targets': rng.integers(0, V, (B, T)).astype(np.int32),
    'mask': mask,
    'distill_coef': rng.random((B, T)),
    'policy_coef': rng.random((B, T)),
    'entropy_coef': rng.random((B, T)) * 0.1,
    'old_log_probs': -3 + normal(B, T),
    'advantages': normal(B, T),
    'kl_coef': rng.random((B, T)) * 0.3,
    'initial_log_probs': -3 + normal(B, T),
    'support': ids,
    'alpha_of_rows': np.array([0.0, 1.0, 0.5, 0.3, 1.0, 0.9, 0.0, 0.7]),
    'is_clip_of_rows': np.array([0.0, 0.7, 2.0, 1.0, 0.0, 0.5, 3.0, 0.9]),
    'temperature_of_rows': np.linspace(0.6, 1.4, B),
    'topk_of_rows': np.array([K, 1, 2, 3, K, 4, 5, 2], np.int32),
    'tail_of_rows': np.array([1.0, 0.0] * 4),
    'token_ids': external,
    'log_probs': np.log(rng.dirichlet(np.ones(K + 1), (B, T))[..., :K]),
  }


def teacher(x, case):
  _, absent, given = CASES[case]
  if 'distill_coef' in absent:
    return None
  if 'external' in given:
    return TeacherSignal(token_ids=x['token_ids'], log_probs=x['log_probs'])
  mix = {}
  if 'mix' in given:
    mix = dict(mix_hidden=x['mix_hidden'], mix_unembedding=x['mix_unembedding'], mix_rate=0.3)
  return TeacherSignal(hidden=x['teacher_hidden'], unembedding=x['teacher_unembedding'], **mix)


def numbers(x, case):
  """Of rows, where the case has them."""
  settings, _, given = CASES[case]
  if 'numbers' not in given:
    return None
  names = ('alpha', 'is_clip', 'temperature')
  names += () if settings['distillation_topk'] is None else ('topk', 'tail')
  return RowNumbers(**{name: x[f'{name}_of_rows'] for name in names})


@functools.cache
def program(case, layout, chunk, block):
  """Return the jitted function of (what is trained, all arrays) whose value is (loss, per-token values), gradients."""
  settings, absent, given = CASES[case]

  def value(trained, x):
    x = x | trained
    data = {'alpha': x['alpha']} if 'alpha' in x else {}
    config = ObjectiveConfig(**settings | data, chunk_size=chunk, vocab_block=block)
    return objective(
      x['hidden'],
      x['unembedding'],
      teacher(x, case),
      **{name: x[name] if name not in absent else None for name in TERMS},
      support=x['support'] if 'support' in given else None,
      config=config,
      vocab_size=V,
      layout=layout,
      numbers=numbers(x, case),
    )

  return jax.jit(jax.value_and_grad(value, has_aux=True), compiler_options=quick())


def evaluate(case, x, layout, chunk, block, names=('hidden', 'unembedding')):
  """(loss, per-token values), gradients"""
  return program(case, layout, chunk, block)({name: x[name] for name in names}, x)


@functools.cache
def layout_of(shape) -> Layout:
  return Layout(
    jax.sharding.Mesh(np.array(jax.devices()).reshape(shape), ('fsdp', 'tensor')), ('fsdp', 'tensor'), 'tensor'
  )


def on_mesh(shape, x) -> tuple[Layout, dict[str, jax.Array]]:
  layout = layout_of(shape)

  def spec(name):
    return jax.P('tensor', 'fsdp') if 'unembedding' in name else jax.P(('fsdp', 'tensor'))

  def put(name, value):
    return jax.device_put(value, NamedSharding(layout.mesh, spec(name)))

  return layout, {name: put(name, value) for name, value in x.items()}


def arrays(dtype) -> dict[str, jax.Array]:
  return {name: jnp.asarray(v, dtype) if v.dtype.kind == 'f' else jnp.asarray(v) for name, v in problem().items()}


def close(ours, theirs, tolerance):
  for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1e-3, float(np.abs(b).max())))


@functools.cache
def alone(case):
  """On one device, without rows of padding and in one piece: what everything else must equal."""
  with jax.enable_x64(True):
    x = arrays(jnp.float64)
    x |= {name: value[:V] for name, value in x.items() if 'unembedding' in name}
    return jax.device_get(evaluate(case, x, None, 1000, 1000))


# How parts are merged, of the top K and of the whole vocabulary, is the same code in all cases of either kind.
DEFAULT = ('topk', 'full', 'rows', 'more_than_a_part')


def grid():
  """Every case on one mesh, those of `DEFAULT` by default and the others slow; on other meshes they are a sweep.

  Meshes alternate, and with them the sizes of blocks. Only where K is larger than a part must it be the mesh of eight
  parts, of which a token needs all entries of one.
  """
  for index, case in enumerate(CASES):
    usual = (1, 8) if case == 'more_than_a_part' else (4, 2) if index % 2 else (2, 4)
    for shape in SHAPES:
      marks = pytest.mark.campaign if shape != usual else () if case in DEFAULT else pytest.mark.slow
      yield pytest.param(case, shape, id=f'{case}-{name_of(shape)}', marks=marks)


@pytest.mark.parametrize(('case', 'shape'), list(grid()))
def test_a_mesh_gives_what_one_device_gives(case, shape):
  """In float64 far below what another order of support or a wrong normaliser would change."""
  (loss, aux), gradients = alone(case)
  with jax.enable_x64(True):
    layout, x = on_mesh(shape, arrays(jnp.float64))
    # Blocks of three of the rows of a device, and all at once; chunks that do not divide its tokens.
    block = 3 if shape[0] in (4, 1) else 1000
    names = ('hidden',) if case == 'hidden_only' else ('hidden', 'unembedding')
    (mesh_loss, mesh_aux), mesh_gradients = jax.device_get(evaluate(case, x, layout, 3, block, names))
  np.testing.assert_allclose(mesh_loss, loss, rtol=1e-12)
  assert set(mesh_aux) == set(aux)
  close(mesh_aux, aux, 1e-10)
  close(mesh_gradients['hidden'], gradients['hidden'], 1e-10)
  if 'unembedding' in names:
    close(mesh_gradients['unembedding'][:V], gradients['unembedding'], 1e-10)
    assert not np.any(mesh_gradients['unembedding'][V:])


# Over a support at 0, over the vocabulary at 1.
@pytest.mark.slow  # `rows` has such numbers by default.
@pytest.mark.parametrize('case', ['renormalised', 'reverse'])
def test_an_alpha_that_is_data_is_at_its_end_on_a_mesh_too(case):
  (loss, _), gradients = alone(case)
  with jax.enable_x64(True):
    layout, x = on_mesh((2, 4), arrays(jnp.float64))
    x['alpha'] = jnp.asarray(CASES[case][0]['alpha'], jnp.float64)
    (mesh_loss, _), mesh_gradients = jax.device_get(evaluate(case, x, layout, 3, 1000))
  np.testing.assert_allclose(mesh_loss, loss, rtol=1e-12)
  close(mesh_gradients['hidden'], gradients['hidden'], 1e-10)
  close(mesh_gradients['unembedding'][:V], gradients['unembedding'], 1e-10)


@pytest.mark.parametrize('shape', FEW_SHAPES, ids=name_of)
def test_in_float32(shape):
  (loss, aux), gradients = alone('topk')
  layout, x = on_mesh(shape, arrays(jnp.float32))
  (mesh_loss, mesh_aux), mesh_gradients = evaluate('topk', x, layout, 3, 1000)
  assert mesh_loss.dtype == mesh_gradients['unembedding'].dtype == jnp.float32
  np.testing.assert_allclose(mesh_loss, loss, rtol=1e-5)
  close(jax.device_get(mesh_aux), aux, 1e-5)
  close(mesh_gradients['hidden'], gradients['hidden'], 1e-5)
  close(mesh_gradients['unembedding'][:V], gradients['unembedding'], 1e-5)
  if shape[1] > 1:
    assert mesh_gradients['unembedding'].sharding.is_equivalent_to(x['unembedding'].sharding, 2)
  assert mesh_gradients['hidden'].sharding.is_equivalent_to(x['hidden'].sharding, 3)


@pytest.mark.parametrize(
  ('shape', 'block'),
  tiers.cases(itertools.product(SHAPES, (2, 1000)), default=[((2, 4), 1000)], slow=[((1, 8), 2)]),
)
def test_equal_logits_at_the_boundary_are_chosen_by_their_index(shape, block):
  """Many entries tie, on both sides of the boundaries of the parts: the support is that of the unsharded formula."""
  x = arrays(jnp.float32)

  def quarters(name):
    return jnp.round(x[name] * 2) / 4

  x |= {name: quarters(name) for name in x if 'hidden' in name or 'unembedding' in name}

  def logits(name):
    return x[f'{name}hidden'] @ x[f'{name}unembedding'][:V].T

  scores = np.sort(np.asarray(logits('')), axis=-1)
  assert (scores[..., -K] == scores[..., -K - 1]).mean() > 0.2
  config = ObjectiveConfig(**CASES['topk'][0])
  plain = jax.jit(functools.partial(objective_from_logits, config=config), compiler_options=quick())
  expected, aux = plain(logits(''), logits('teacher_'), **{name: x[name] for name in TERMS})
  layout, spread = on_mesh(shape, x)
  (loss, mesh_aux), _ = evaluate('topk', spread, layout, 3, block)
  np.testing.assert_allclose(loss, expected, rtol=1e-5)
  close(jax.device_get(mesh_aux['divergence']), np.asarray(aux['divergence']), 2e-5)


@pytest.mark.slow
def test_bfloat16_states_and_unembeddings_sum_in_float32():
  low = {n: v.astype(jnp.bfloat16) if 'hidden' in n or 'unemb' in n else v for n, v in arrays(jnp.float32).items()}
  (loss, _), gradients = evaluate('topk', low | {n: v[:V] for n, v in low.items() if 'unemb' in n}, None, 1000, 1000)
  layout, x = on_mesh((2, 4), low)
  (mesh_loss, _), mesh_gradients = evaluate('topk', x, layout, 2, 1000)
  assert mesh_gradients['unembedding'].dtype == mesh_gradients['hidden'].dtype == jnp.bfloat16
  np.testing.assert_allclose(mesh_loss, loss, rtol=1e-4)
  close(mesh_gradients['unembedding'][:V].astype(jnp.float32), np.asarray(gradients['unembedding'], np.float32), 2e-2)


@pytest.mark.parametrize('shape', FEW_SHAPES, ids=name_of)
def test_scores_of_tokens(shape):
  x = arrays(jnp.float32)
  expected = token_log_probs(x['hidden'], x['unembedding'][:V], x['targets'], 0.7, mask=x['mask'])
  layout, spread = on_mesh(shape, x)
  for block in (None, 1000):
    ours = token_log_probs(
      spread['hidden'],
      spread['unembedding'],
      spread['targets'],
      0.7,
      chunk_size=2,
      mask=spread['mask'],
      vocab_block=block,
      vocab_size=V,
      layout=layout,
    )
    chex.assert_trees_all_close(ours, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_no_device_holds_more_than_its_part_of_the_vocabulary():
  """Neither unembeddings nor logits nor the gradient exist whole on a device, and hidden states travel in chunks."""
  layout, x = on_mesh((2, 4), arrays(jnp.float32))
  config = ObjectiveConfig(distillation_topk=K, chunk_size=2, vocab_block=1000)

  def value(trained, x):
    return objective(
      trained['hidden'],
      trained['unembedding'],
      teacher(x, 'topk'),
      **{n: x[n] for n in TERMS},
      config=config,
      vocab_size=V,
      layout=layout,
    )[0]

  lowered = jax.jit(jax.grad(value)).lower({name: x.pop(name) for name in ('hidden', 'unembedding')}, x)
  text = compile_as_users(lowered).as_text()
  assert f'f32[{ROWS // 4},{D}]' in text and 'reduce-scatter' in text
  assert f'[{ROWS},' not in text and f',{ROWS}]' not in text


def test_a_vocabulary_that_the_devices_do_not_divide():
  (loss, _), gradients = alone('topk')
  x = arrays(jnp.float32)
  layout, spread = on_mesh((1, 8), {name: value for name, value in x.items() if 'unembedding' not in name})
  spread |= {name: value[:V] for name, value in x.items() if 'unembedding' in name}
  (mesh_loss, _), mesh_gradients = evaluate('topk', spread, layout, 3, 1000)
  np.testing.assert_allclose(mesh_loss, loss, rtol=1e-5)
  close(mesh_gradients['unembedding'], gradients['unembedding'], 1e-5)


def test_more_tokens_than_rows_are_refused():
  x = arrays(jnp.float32)
  with pytest.raises(ValueError, match='vocab_size=43'):
    objective(
      x['hidden'],
      x['unembedding'][:40],
      None,
      **{name: x[name] for name in TERMS if name != 'distill_coef'},
      distill_coef=None,
      vocab_size=V,
    )
