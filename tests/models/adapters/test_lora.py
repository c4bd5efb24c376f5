"""LoRA: factors beside frozen matrices compute the same as merged matrices, and only factors are trained."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdpo_jax.config import Config, LoraConfig
from sdpo_jax.distributed.mesh import make_mesh, put_rows
from sdpo_jax.errors import UserError
from sdpo_jax.models import cache as kv_cache
from sdpo_jax.models import flops, parameters
from sdpo_jax.models.adapters import lora
from tests.models.adapters.lora_policies import make, merged

DEPTHS = {'shallow': 3, 'deep': kv_cache.SHALLOW + 1}


def row(mesh=None):
  made = (
    np.random.default_rng(0).integers(1, 61, (8, 12), dtype=np.int32),
    np.tile(np.arange(12, dtype=np.int32), (8, 1)),
    np.ones((8, 12), np.int32),
  )
  return made if mesh is None else put_rows(mesh, made)


def logits(policy, base, trainable, mesh=None):
  hidden, unembedding, _ = policy.apply(base, trainable, *row(mesh))
  return np.asarray(hidden @ unembedding.T)


@pytest.mark.parametrize('depth', DEPTHS)
def test_factors_compute_what_merged_matrices_do(depth):
  policy, base, factors = make(DEPTHS[depth], target_modules=('attention', 'mlp.down'), alpha_pattern={'layers.1': 3.0})
  plain = policy.base_policy()
  expected = logits(plain, {}, merged(policy, base, factors))
  assert np.abs(expected - logits(plain, base, {})).max() > 0.1
  np.testing.assert_allclose(logits(policy, base, factors), expected, atol=1e-4)
  cast = policy.cast(base, factors)
  np.testing.assert_allclose(logits(policy, *cast), expected, atol=1e-4)
  again = policy.cast(*cast)
  jax.tree.map(np.testing.assert_array_equal, again, cast)

  cache = policy.init_cache(8, 12)
  hidden, unembedding, _ = policy.apply(*cast, *row(), cache)
  np.testing.assert_allclose(np.asarray(hidden @ unembedding.T), expected, atol=1e-4)


def gradient(policy, base, trainable, mesh=None):
  def loss(trainable):
    hidden, unembedding, _ = policy.apply(base, trainable, *row(mesh))
    return jnp.sum(jnp.sin(hidden @ unembedding.T))

  return jax.jit(jax.grad(loss))(trainable)


@pytest.mark.parametrize('mesh', [None, (4, 2)])
def test_gradients_are_those_of_the_merged_matrices_by_the_chain_rule(mesh):
  mesh = mesh and make_mesh(Config().mesh.__class__(*mesh))
  policy, base, factors = make(2, mesh, target_modules=('all-linear',), exclude_modules=('layers.1.mlp',))
  found = gradient(policy, base, factors, mesh)
  plain, _, _ = make(2)
  whole = gradient(plain.base_policy(), {}, merged(policy, base, factors))
  table = {parameter.name: parameter for parameter in policy.parameter_table()}
  assert len(policy.adapter.targets) == 7
  for target in policy.adapter.targets:
    path, shape = table[target.name].path, table[target.name].shape
    names = [(*path[:-1], f'{path[-1]}_lora_{letter}') for letter in 'ab']
    (a, b), (da, db) = ([np.asarray(parameters.get(tree, n), np.float64) for n in names] for tree in (factors, found))
    inputs, outputs = math.prod(a.shape[1:-1]), math.prod(b.shape[2:])
    dw = np.asarray(parameters.get(whole, path), np.float64).reshape(shape[0], inputs, outputs)
    dw = np.asarray(target.scales)[:, None, None] * dw
    a2, b2 = a.reshape(shape[0], inputs, -1), b.reshape(shape[0], -1, outputs)
    close = dict(rtol=1e-3, atol=2e-4 * np.abs(dw).max())
    np.testing.assert_allclose(da.reshape(a2.shape), dw @ b2.swapaxes(1, 2), **close)
    np.testing.assert_allclose(db.reshape(b2.shape), a2.swapaxes(1, 2) @ dw, **close)
    if target.name.startswith('layers.mlp'):
      assert target.scales[1] == 0 and not np.any(da[1]) and not np.any(db[1])


def test_factors_begin_as_peft_has_them_and_change_nothing():
  peft, torch = pytest.importorskip('peft'), pytest.importorskip('torch')
  policy, base, _ = make(rank=4)
  table = lora.factors(policy.parameter_table())
  drawn = parameters.initialise(table, jax.random.key(3), 0.02)
  again = parameters.initialise(table, jax.random.key(3), 0.02)
  jax.tree.map(np.testing.assert_array_equal, drawn, again)
  model = peft.get_peft_model(
    torch.nn.Sequential(torch.nn.Linear(48, 64)), peft.LoraConfig(r=256, target_modules=['0'])
  )
  weights = {name.split('.')[-3]: p.detach().numpy() for name, p in model.named_parameters() if 'lora' in name}
  bound = np.abs(weights['lora_A']).max()
  assert not np.any(weights['lora_B'])
  for parameter in table:
    values = np.asarray(parameters.get(drawn, parameter.path))
    assert values.dtype == np.float32 and values.shape == parameter.shape
    if parameter.name.endswith('_lora_b'):
      assert not np.any(values)
    elif parameter.name == 'layers.mlp.down_lora_a':  # 48 inputs, as there.
      assert np.abs(values).max() == pytest.approx(bound, rel=0.02) and values.std() == pytest.approx(
        bound / 3**0.5, 0.1
      )
  np.testing.assert_array_equal(logits(policy, base, drawn), logits(policy.base_policy(), base, {}))


def test_the_table_says_what_is_trained_and_in_which_dtype():
  policy, _, _ = make(dtype='bfloat16', target_modules=('q_proj', r'layers\.[01]\.mlp'), rank_pattern={'mlp': 2})
  table = policy.parameter_table()
  assert {p.dtype for p in parameters.frozen(table) if p.compute} == {'bfloat16'}
  assert {p.dtype for p in parameters.frozen(table) if not p.compute} == {'float32'}
  factors = {p.name: p for p in parameters.trainable(table)}
  assert tuple(factors.values()) == lora.factors(table) and {p.dtype for p in factors.values()} == {'float32'}
  assert factors['layers.attention.query_lora_a'].shape == (3, 32, 4)
  assert factors['layers.attention.query_lora_b'].shape == (3, 4, 4, 16)
  assert factors['layers.mlp.down_lora_a'].shape == (3, 48, 2)
  assert policy.adapter.by_name['layers.mlp.up'].scales == (3.0, 3.0, 0.0)
  name = factors['layers.mlp.gate_lora_b'].huggingface_name(1)
  assert name == 'base_model.model.model.layers.1.mlp.gate_proj.lora_B.weight'
  stabilised, _, _ = make(target_modules=('o_proj',), use_rslora=True)
  assert stabilised.adapter.by_name['layers.attention.output'].scales == (3.0,) * 3


def test_an_update_with_a_frozen_model_counts_no_products_for_its_gradient():
  policy, _, _ = make()
  plain = policy.base_policy()
  ratio = flops.update_flops(policy, 1, 8, 8) / flops.update_flops(plain, 1, 8, 8)
  assert flops.update_flops(plain, 2, 8, 8) == pytest.approx(3 * flops.forward_flops(plain, 2, 8, 8))
  trained, whole = (parameters.count(part(policy.parameter_table())) for part in (parameters.trainable, tuple))
  assert flops.update_flops_per_token(policy.parameter_table()) == 4 * whole + 2 * trained
  assert 0.66 < ratio < 1


@pytest.mark.parametrize(
  ('settings', 'sentence'),
  [
    (
      dict(target_modules=('qproj',)),
      "target_modules: 'qproj' matches no matrix of the layers 0 to 2; the nearest names are q_proj",
    ),
    (dict(target_modules=('q_pro',)), 'must match whole parts of a name'),
    (dict(target_modules=('lm_head',)), 'is about the embedding or the unembedding, which take no factors'),
    (dict(target_modules=('experts',)), 'is about routers or experts'),
    (dict(target_modules=('mlp_norm',)), 'is layers.mlp_norm, which is no matrix'),
    (dict(target_modules=('q_proj', '(')), r"'\(' is not a regular expression"),
    (dict(target_modules=('mlp',), exclude_modules=('layers',)), 'there would be nothing to train'),
    (dict(rank_pattern={'layers.2': 8}), 'model.layers.0.self_attn.q_proj has rank 4 and model.layers.2.* rank 8'),
    (dict(alpha_pattern={'nothing': 8}), 'alpha_pattern: .nothing. matches no matrix'),
    (
      dict(target_modules=('mlp',), rank_pattern={'q_proj': 8}),
      "rank_pattern: 'q_proj' matches only matrices that have no",
    ),
    (dict(target_modules=('mlp',), alpha_pattern={'attention': 8}), "alpha_pattern: 'attention' matches only matrices"),
    (
      dict(target_modules=('mlp',), exclude_modules=('q_proj',)),
      "exclude_modules: 'q_proj' matches only .* leave it out",
    ),
    (dict(target_modules=('(' * 500 + ')' * 500,)), r"target_modules: '\(*…' is not a regular expression"),
    (dict(alpha=1e300), r'model.lora: alpha of \S* is 1e\+300 and its rank 4, .* which float32 cannot hold'),
    (dict(alpha_pattern={'mlp': 1e-300}), r'alpha of \S*mlp\S* is 1e-300'),
  ],
)
def test_what_cannot_be_an_adapter_is_refused_by_name(settings, sentence):
  with pytest.raises(UserError, match=sentence):
    make(**settings)


@pytest.mark.parametrize(
  ('settings', 'sentence'),
  [
    (dict(rank=0), 'model.lora.rank must be at least 1 or None, not 0: None trains all parameters'),
    (dict(rank=4, alpha=0), 'model.lora.alpha must be positive'),
    (dict(alpha=3.0), 'model.lora.alpha=3.0 has no effect without an adapter: set model.lora.rank'),
    (dict(rank=4, target_modules=()), 'target_modules is empty'),
    (dict(rank=4, exclude_modules=('',)), 'exclude_modules holds an empty pattern'),
    (dict(rank=4, rank_pattern={'mlp': 0}), "rank_pattern: 'mlp': 0 must be a whole number of at least 1"),
    (dict(rank=4, rank_pattern={'mlp': 1.5}), 'must be a whole number'),
    (dict(rank=4, rank_pattern={'mlp': 10**400}), 'must be a whole number'),
    (dict(rank=4, alpha_pattern={'mlp': True}), 'must be positive'),
  ],
)
def test_wrong_settings_are_refused_by_name(settings, sentence):
  config = Config()
  config.model.path, config.model.lora = 'somewhere', LoraConfig(**settings)
  config.data.train_files = ('rows.json',)
  with pytest.raises(UserError, match=sentence):
    config.validate()
