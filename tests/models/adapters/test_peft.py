"""Exchange of adapters with the library PEFT, in both directions, and errors that name what is wrong."""

from __future__ import annotations

import functools
import itertools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
import torch
import transformers

from sdpo_jax.config import LoraConfig, MeshConfig, ModelConfig
from sdpo_jax.distributed.mesh import make_mesh
from sdpo_jax.errors import UserError
from sdpo_jax.models import checksums, huggingface, identity, parameters
from sdpo_jax.models.adapters import peft_config, peft_files
from sdpo_jax.serving.store.store import Store
from sdpo_jax.serving.store.versions import Base
from tests import tiers
from tests.models import family_models

torch.set_num_threads(1)
TOKENS = np.random.default_rng(3).integers(1, family_models.VOCABULARY, (2, 20)).astype(np.int32)
# Which matrices have factors here, and in PEFT's words.
TARGETS = {
  'all': (dict(rank=4, alpha=8.0), dict(r=4, lora_alpha=8, target_modules='all-linear')),
  'attention': (
    dict(rank=3, alpha=5.0, target_modules=('attention',), use_rslora=True),
    dict(r=3, lora_alpha=5, target_modules=['q_proj', 'k_proj', 'v_proj', 'o_proj'], use_rslora=True),
  ),
  'mlp': (
    dict(rank=2, alpha=8.0, target_modules=('mlp',), rank_pattern={'up': 5}, alpha_pattern={'layers.1.mlp.down': 3.5}),
    dict(
      r=2,
      lora_alpha=8,
      target_modules=r'.*\.mlp\..*_proj',
      rank_pattern={'up_proj': 5},
      alpha_pattern={'layers.1.mlp.down_proj': 3.5},
    ),
  ),
  'a layer': (
    dict(rank=4, alpha=4.0, target_modules=('layers.1', 'layers.0.attention.value')),
    dict(
      r=4,
      lora_alpha=4,
      target_modules=['v_proj', 'layers.1.mlp.up_proj'],
      layers_to_transform=[1],
      layers_pattern='layers',
    ),
  ),
}


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Return the model directory of a family, which is made once."""

  @functools.cache
  def make(family):
    path = tmp_path_factory.mktemp(family)
    family_models.reference(family).save_pretrained(path)
    return path

  return make


def peft_model(folder, adapter=None):
  """Return the model of one directory in transformers, with the adapter of another directory."""
  import peft  # Takes three seconds, as in the other tests here.

  model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
  return model if adapter is None else peft.PeftModel.from_pretrained(model, adapter).eval()


def logits_of(model):
  with torch.no_grad():
    return model(torch.tensor(TOKENS)).logits.float().numpy()


@functools.partial(jax.jit, static_argnums=0)
def our_logits(policy, params, tokens=TOKENS):
  base, trainable = parameters.split(policy.parameter_table(), params)
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
  hidden, unembedding, _ = policy.apply(base, trainable, tokens, positions, jnp.ones_like(positions))
  return (hidden @ unembedding.T).astype(jnp.float32)


def load(folder, mesh=None, **settings):
  return huggingface.load(folder, ModelConfig(dtype='float32', remat='none', lora=LoraConfig(**settings)), mesh)


def moved(policy, params, seed=0):
  """Return random factors, and the model with them."""
  generator = np.random.default_rng(seed)
  factors = parameters.map_table(
    lambda p: jnp.asarray(0.2 * generator.standard_normal(p.shape), jnp.float32),
    parameters.trainable(policy.parameter_table()),
  )
  base, _ = parameters.split(policy.parameter_table(), params)
  return factors, parameters.merge(base, factors)


def export(path, folder, policy, factors, use_rslora=False, **options):
  model = ModelConfig(path=str(folder), lora=LoraConfig(use_rslora=use_rslora))
  base = peft_files.AdapterBase.of(model, policy, identity.of_base(folder))
  peft_files.save(path, base, factors, **options)
  return path


def combinations(*default):
  """Return all families with all targets: the given ones run by default, and with --slow one for each family."""
  pairs = itertools.product(family_models.MODELS, TARGETS)
  slow = list(zip(family_models.MODELS, itertools.cycle(TARGETS), strict=False))
  return pytest.mark.parametrize('family, targets', tiers.cases(pairs, default, slow))


@combinations(('qwen3', 'all'), ('llama', 'mlp'))
def test_peft_computes_with_an_adapter_from_here_and_back(family, targets, folder, tmp_path):
  """PEFT is the reference for an adapter written here, for one that it saved again, and for the merged model."""
  settings = TARGETS[targets][0]
  policy, params = load(folder(family), **settings)
  factors, params = moved(policy, params)
  ours = np.asarray(our_logits(policy, params))
  written = export(tmp_path / 'adapter', folder(family), policy, factors, use_rslora=settings.get('use_rslora', False))
  theirs = peft_model(folder(family), written)
  np.testing.assert_allclose(ours, logits_of(theirs), atol=1e-4)
  assert np.abs(ours - logits_of(peft_model(folder(family)))).max() > 0.01
  config = theirs.peft_config['default']
  assert config.use_rslora == settings.get('use_rslora', False) and config.lora_alpha == settings['alpha']
  again, read = load(folder(family), path=str(written))
  assert again == policy
  np.testing.assert_array_equal(np.asarray(our_logits(again, read)), ours)
  huggingface.save_merged(tmp_path / 'merged', policy, factors, folder(family))
  merged = theirs.merge_and_unload()
  for name, tensor in load_file(tmp_path / 'merged' / 'model.safetensors').items():
    np.testing.assert_allclose(tensor, merged.state_dict()[name].numpy(), atol=1e-5)
  np.testing.assert_allclose(logits_of(peft_model(tmp_path / 'merged')), ours, atol=1e-4)


def test_peft_computes_with_a_version_of_the_store(folder, tmp_path):
  policy, params = load(folder('qwen3'), **TARGETS['a layer'][0])
  factors, params = moved(policy, params)
  table = policy.base_policy().parameter_table()
  base = Base(str(folder('qwen3')), identity.of_base(folder('qwen3')), policy.adapter, table)
  arrays = {f'factors/{row.name}': np.asarray(parameters.get(factors, row.path)) for row in base.rows}
  with Store.open(str(tmp_path / 'root'), tmp_path / 'database' / 'store', base=base) as store:
    _, version = store.create('ada', 'mine', {}, arrays)
  [place] = (tmp_path / 'root').glob(f'users/*/adapters/*/versions/00000000-{version.digest[:12]}')
  theirs = peft_model(folder('qwen3'), place)
  np.testing.assert_allclose(np.asarray(our_logits(policy, params)), logits_of(theirs), atol=1e-4)
  assert np.abs(logits_of(theirs) - logits_of(peft_model(folder('qwen3')))).max() > 0.01


@combinations(('mistral', 'a layer'), ('qwen2', 'attention'))
def test_an_adapter_that_peft_trained_goes_on_here(family, targets, folder, tmp_path):
  """After some steps of PEFT and torch, logits, loss and gradients of the factors are equal, hence the next step."""
  import peft

  torch.manual_seed(1)
  model = peft.get_peft_model(
    peft_model(folder(family)), peft.LoraConfig(task_type='CAUSAL_LM', lora_dropout=0.0, **TARGETS[targets][1])
  )
  optimizer = torch.optim.Adam([weight for weight in model.parameters() if weight.requires_grad], lr=0.02)
  tokens = torch.tensor(TOKENS)
  for _ in range(3):
    optimizer.zero_grad()
    model(tokens, labels=tokens.long()).loss.backward()
    optimizer.step()
  model.save_pretrained(tmp_path / 'adapter')
  optimizer.zero_grad()
  result = model(tokens, labels=tokens.long())
  result.loss.backward()
  policy, params = load(folder(family), path=str(tmp_path / 'adapter'))
  np.testing.assert_allclose(np.asarray(our_logits(policy, params)), result.logits.detach().numpy(), atol=1e-4)
  base, factors = parameters.split(policy.parameter_table(), params)

  def loss(factors):
    log_probs = jax.nn.log_softmax(our_logits(policy, parameters.merge(base, factors))[:, :-1])
    return -jnp.take_along_axis(log_probs, TOKENS[:, 1:, None], axis=-1).mean()

  ours, gradients = jax.jit(jax.value_and_grad(loss))(factors)
  np.testing.assert_allclose(ours, result.loss.item(), atol=1e-5)
  expected = {name.replace('.default', ''): w.grad for name, w in model.named_parameters() if w.requires_grad}
  for row in parameters.trainable(policy.parameter_table()):
    leaf = np.asarray(parameters.get(gradients, row.path))
    for layer in range(row.layers):
      exact = expected.pop(row.huggingface_name(layer), None)
      found = row.to_huggingface(leaf[layer])
      np.testing.assert_allclose(found, np.zeros_like(found) if exact is None else exact.numpy(), atol=2e-5)
  assert not expected


@pytest.mark.slow
def test_adapters_of_a_model_that_sees_images_are_those_of_the_part_that_reads(tmp_path, caplog):
  """In both directions; matrices of the vision tower have names like those of layers, so that PEFT adapts them, too."""
  folder = tmp_path / 'model'
  family_models.reference_that_sees_images().save_pretrained(folder)
  policy, params = load(folder, rank=4, alpha=8.0)
  factors, params = moved(policy, params)
  written = export(tmp_path / 'ours', folder, policy, factors)
  theirs = peft_model(folder, written)
  np.testing.assert_allclose(our_logits(policy, params), logits_of(theirs), atol=1e-4)
  assert not [name for name, _ in theirs.named_parameters() if 'vision' in name and 'lora' in name]
  import peft

  torch.manual_seed(2)
  config = peft.LoraConfig(r=4, target_modules=['q_proj', 'up_proj'], init_lora_weights=False)
  model = peft.get_peft_model(peft_model(folder), config)
  model.save_pretrained(tmp_path / 'theirs')
  policy, params = load(folder, path=str(tmp_path / 'theirs'))
  np.testing.assert_allclose(our_logits(policy, params), logits_of(model), atol=1e-4)
  assert '2 tensors adapt the part of the model that reads images, and are left out' in caplog.text


CONFIGS = [
  dict(target_modules=['q_proj', 'up_proj']),
  dict(target_modules=['proj']),
  dict(target_modules=['model.layers.1.self_attn.q_proj', 'layers.0.mlp.down_proj']),
  dict(target_modules=r'.*layers\.[01]\.mlp\.(up|down)_proj'),
  dict(target_modules=r'self_attn'),
  dict(target_modules='all-linear', exclude_modules=['down_proj', 'self_attn.q_proj']),
  dict(target_modules=['q_proj', 'k_proj'], exclude_modules=r'.*\.1\..*'),
  dict(target_modules=['q_proj'], layers_to_transform=1),
  dict(target_modules=['q_proj', 'model.layers.0.mlp.up_proj'], layers_to_transform=[1, 2], layers_pattern='layers'),
  dict(target_modules=['q_proj'], layers_to_transform=[1], layers_pattern=['blocks', 'h']),
  dict(target_modules=['q_proj'], layers_to_transform=[0], layers_pattern=['(h|layers)']),
  dict(
    target_modules=['q_proj', 'v_proj'], rank_pattern={'q_proj': 3, '.*': 5}, alpha_pattern={'^model.layers.1.*': 2}
  ),
  dict(target_modules=['q_proj'], rank_pattern={r'layers\.\d.self_attn.q_proj': 3, 'roj': 4}, alpha_pattern={'roj': 4}),
]


@pytest.mark.parametrize('config', CONFIGS, ids=str)
def test_modules_ranks_and_alphas_are_those_that_peft_finds(config, folder):
  import peft
  from peft.tuners.tuners_utils import check_target_module_exists
  from peft.utils.other import get_pattern_key

  table = huggingface.read_policy(folder('qwen3'), ModelConfig()).parameter_table()
  modules = peft_config.same_names(table)
  theirs = peft.LoraConfig(r=2, lora_alpha=6, **config)
  ours = peft_config.read({'peft_type': 'LORA', 'r': 2, 'lora_alpha': 6, **config}, 'a file')
  if theirs.target_modules == 'all-linear':
    theirs.target_modules = set(modules.values())
  found = [name for name in modules.values() if check_target_module_exists(theirs, name)]
  assert [name for name in modules.values() if ours.targets(name)] == found
  for name in modules.values():
    assert ours.rank_of(name) == theirs.rank_pattern.get(get_pattern_key(theirs.rank_pattern, name), 2)
    assert ours.alpha_of(name) == theirs.alpha_pattern.get(get_pattern_key(theirs.alpha_pattern, name), 6)


@pytest.fixture(scope='module')
def written(folder, tmp_path_factory):
  """Return (model directory, adapter directory), the latter written by PEFT."""
  import peft

  path = tmp_path_factory.mktemp('written') / 'adapter'
  torch.manual_seed(0)
  config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=['q_proj', 'down_proj'], init_lora_weights=False)
  peft.get_peft_model(peft_model(folder('qwen3')), config).save_pretrained(path)
  return folder('qwen3'), path


def rewrite(path, **changes):
  """Change entries of an adapter_config.json; ... removes one."""
  file = path / peft_config.FILE
  values = json.loads(file.read_text()) | changes
  file.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))


@pytest.fixture
def copied(written, tmp_path):
  model, adapter = written
  return model, shutil.copytree(adapter, tmp_path / 'adapter')


WRONG = [
  (dict(peft_type='IA3'), "peft_type is 'IA3', but only LORA"),
  (dict(peft_type=...), 'peft_type is missing'),
  (dict(task_type='SEQ_CLS'), "task_type is 'SEQ_CLS', but only adapters of language models"),
  (dict(use_dora=True), r'use_dora is True, which is not supported \(DoRA'),
  (dict(modules_to_save=['embed_tokens']), 'modules_to_save is .*whole modules'),
  (dict(bias='all'), "bias is 'all', which is not supported"),
  (dict(bias='lora_only'), "bias is 'lora_only'"),
  (dict(lora_bias=True), 'lora_bias is True'),
  (dict(trainable_token_indices=[1]), r'trainable_token_indices is \[1\]'),
  (dict(target_parameters=['experts.down_proj']), 'target_parameters is .*experts'),
  (dict(layer_replication=[[0, 2], [1, 2]]), 'layer_replication is .*another model'),
  (dict(alora_invocation_tokens=[3]), 'alora_invocation_tokens'),
  (dict(use_qalora=True), 'use_qalora'),
  (dict(megatron_config={'a': 1}), 'megatron_config'),
  (dict(kasa_config={'beta': 1}), 'kasa_config'),
  (dict(option_of_the_future='warp'), "option_of_the_future is 'warp', which is not supported: "),
  (dict(init_lora_weights='pissa'), "init_lora_weights is 'pissa', which changes the base model"),
  (dict(init_lora_weights='olora'), "init_lora_weights is 'olora'"),
  (dict(init_lora_weights='loftq'), "init_lora_weights is 'loftq'"),
  (dict(target_modules=['q_proj', 'lm_head']), 'target_modules is .*: adapters of lm_head are not supported'),
  (dict(target_modules=None), 'target_modules is None, but must say'),
  (dict(target_modules=['query_key_value']), 'matches nothing in this model, whose matrices are called down_proj, '),
  (dict(target_modules='q_proj('), r"target_modules holds 'q_proj\(', which is not a regular expression"),
  (dict(target_modules=[3]), r'target_modules is \[3\], but must be'),
  (dict(target_modules=['q_proj']), '2 tensors|4 tensors are of no module.*down_proj'),
  (dict(target_modules=['q_proj', 'down_proj', 'up_proj']), 'tensors are missing, first .*up_proj'),
  (dict(r=...), 'r is missing'),
  (dict(r=0), 'r is 0, but must be a whole number of at least 1'),
  (dict(r=True), 'r is True'),
  (dict(r=2), r'has shape \(4, 48\); adapter_config.json says that the rank is 2'),
  (dict(lora_alpha=0), 'lora_alpha is 0, but must be a number above 0'),
  (dict(lora_alpha=float('nan')), 'lora_alpha is nan'),
  (dict(rank_pattern={'0.self_attn.q_proj': 3}), r'layers\.0\.self_attn\.q_proj has rank 3 and model\.layers\.1'),
  (dict(rank_pattern={'q_proj': 'x'}), 'rank_pattern is .*whole number'),
  (dict(alpha_pattern=[1]), r'alpha_pattern is \[1\], but must be a JSON object'),
  (dict(layers_to_transform='1'), "layers_to_transform is '1'"),
  (dict(use_rslora='yes'), "use_rslora is 'yes', but must be true or false"),
  (dict(lora_alpha=10**400), 'lora_alpha is 10*[.]+0*, but must be a number above 0'),
  (dict(r=10**400), 'r is 10*[.]+0*, but must be a whole number'),
  (dict(lora_alpha=1e300), r'alpha of model\.layers\.0\.\S* is 1e\+300 and its rank 4, .* float32 cannot hold'),
  (dict(alpha_pattern={'1.self_attn.q_proj': 1e-300}), r'alpha of model\.layers\.1\.self_attn\.q_proj is 1e-300'),
  (dict(target_modules='(' * 500 + ')' * 500), 'target_modules holds .*, which is not a regular expression'),
  (dict(alpha_pattern={'q{9999999999999}': 1}), 'alpha_pattern holds .*, which is not a regular expression'),
  ({'\ud800\x1b[2J' + 'x' * 300: True}, r"'\\ud800\\x1b\[2Jx*…' is True, which is not supported"),
]


@pytest.mark.parametrize(
  'changes, sentence', WRONG, ids=lambda value: str(value)[:60] if isinstance(value, dict) else ''
)
def test_what_is_not_supported_is_refused_by_name(changes, sentence, copied):
  model, adapter = copied
  rewrite(adapter, **changes)
  with pytest.raises(UserError, match=sentence) as error:
    load(model, path=str(adapter))
  assert peft_config.FILE in str(error.value) and len(str(error.value)) < 500


def test_a_long_name_of_the_base_is_cut(copied):
  model, adapter = copied
  rewrite(adapter, base_model_name_or_path='x' * 5000, target_modules=['q_proj'])
  with pytest.raises(UserError, match="trained on 'x{200}…'"):
    load(model, path=str(adapter))


def test_what_changes_nothing_is_not_refused(copied):
  """Entries of later versions at their defaults, and those about training and initialisation alone."""
  model, adapter = copied
  before = load(model, path=str(adapter))[1]
  rewrite(adapter, option_of_the_future=None, another=False, more=[], qalora_group_size=16, lora_dropout=0.1)
  rewrite(adapter, init_lora_weights='gaussian', eva_config={'rho': 2}, revision='main', inference_mode=False)
  jax.tree.map(np.testing.assert_array_equal, load(model, path=str(adapter))[1], before)


Q1 = 'base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight'
TENSORS = [
  (lambda tensors: tensors.pop(Q1), r'1 tensors are missing, first .*layers\.1\.self_attn\.q_proj\.lora_A'),
  (lambda tensors: tensors.update({Q1.replace('.1.', '.7.'): tensors[Q1]}), r'of no module that this model has.*\.7\.'),
  (lambda tensors: tensors.update({Q1.replace('_A', '_magnitude'): tensors[Q1]}), 'of no module'),
  (lambda tensors: tensors.update({Q1: tensors[Q1][:, :-1].copy()}), r'shape \(4, 31\); the model needs \(4, 32\)'),
  (lambda tensors: tensors.update({Q1: tensors[Q1][:3].copy()}), 'shape .* says that the rank is 4'),
  (lambda tensors: tensors.update({Q1: tensors[Q1][0].copy()}), r'shape \(32,\); the model needs'),
  (lambda tensors: tensors.update({Q1: tensors[Q1].astype(np.float64)}), 'stored as F64; supported'),
  (
    lambda tensors: tensors.update({Q1: np.full_like(tensors[Q1], np.nan)}),
    'holds 128 values of 128 that are not finite',
  ),
]


@pytest.mark.parametrize('change, sentence', TENSORS)
def test_tensors_that_do_not_fit_are_named(change, sentence, copied):
  model, adapter = copied
  tensors = load_file(adapter / peft_files.WEIGHTS)
  change(tensors)
  save_file(tensors, adapter / peft_files.WEIGHTS)
  with pytest.raises(UserError, match=sentence):
    load(model, path=str(adapter))


def test_files_that_are_damaged_or_missing_are_named(copied):
  model, adapter = copied
  weights, config = adapter / peft_files.WEIGHTS, adapter / peft_config.FILE
  whole, text = weights.read_bytes(), config.read_text()

  def refused(sentence):
    with pytest.raises(UserError, match=sentence):
      load(model, path=str(adapter))

  weights.write_bytes(whole[:-10])
  refused('adapter_model.safetensors .*it was cut off')
  weights.write_bytes(b'\xff' * 64)
  refused('adapter_model.safetensors .*its header should have')
  weights.write_bytes(whole)
  config.write_text(text[:-5])
  refused('adapter_config.json is not JSON')
  config.write_text('[]')
  refused('adapter_config.json does not hold a JSON object')
  config.write_text(text)
  checksums.write(adapter)
  weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
  refused('adapter_model.safetensors is not as it was written: its SHA-256')
  (adapter / checksums.SUMS).unlink()
  weights.rename(adapter / peft_files.PICKLED)
  refused('has no adapter_model.safetensors: adapter_model.bin is not read, because a pickle can run code')
  (adapter / peft_files.PICKLED).unlink()
  refused('has no adapter_model.safetensors: set model.lora.path')
  config.unlink()
  refused('has no adapter_config.json: set model.lora.path')
  shutil.rmtree(adapter)
  refused('The adapter directory .* does not exist: set model.lora.path')


def test_an_adapter_that_is_taken_for_a_model_is_named(written):
  with pytest.raises(UserError, match='because it holds an adapter: set model.path to the model .* as --adapter or in'):
    load(written[1])


def test_an_adapter_of_another_model_is_refused(written, folder):
  """Because of its shapes or names: the base has another width, or fewer layers."""
  _, adapter = written
  with pytest.raises(UserError, match=r'the model needs .*was trained on .*: load the adapter onto its own base model'):
    load(folder('mistral'), path=str(adapter))
  with pytest.raises(UserError, match=r'32 tensors|\d+ tensors are missing, first .*layers\.2\.'):
    load(folder('olmo3'), path=str(adapter))


@pytest.mark.parametrize('shape', [pytest.param((8, 1), marks=pytest.mark.slow), (2, 4)], ids=str)
def test_on_a_mesh_the_factors_are_those_of_one_device(written, shape, tmp_path):
  model, adapter = written
  mesh = make_mesh(MeshConfig(*shape), jax.devices()[:8])
  policy, params = load(model, mesh, path=str(adapter))
  alone, expected = load(model, path=str(adapter))
  jax.tree.map(np.testing.assert_array_equal, params, expected)
  _, factors = parameters.split(policy.parameter_table(), params)
  export(tmp_path / 'again', model, policy, factors)
  ours, theirs = (load_file(path / peft_files.WEIGHTS) for path in (tmp_path / 'again', adapter))
  assert ours.keys() == theirs.keys()
  for name, tensor in ours.items():
    np.testing.assert_array_equal(tensor, theirs[name])


def test_half_precision_is_read_and_written(written, tmp_path):
  model, adapter = written
  policy, params = load(model, path=str(adapter))
  _, factors = parameters.split(policy.parameter_table(), params)
  _, read = load(model, path=str(export(tmp_path / 'half', model, policy, factors, dtype='bfloat16')))
  expected = jax.tree.map(lambda leaf: np.asarray(leaf).astype(jnp.bfloat16).astype(np.float32), factors)
  jax.tree.map(np.testing.assert_array_equal, parameters.split(policy.parameter_table(), read)[1], expected)
  infinite = jax.tree.map(lambda leaf: np.full(leaf.shape, np.inf, np.float32), factors)
  with pytest.raises(UserError, match='holds values that are not finite'):
    export(tmp_path / 'wrong', model, policy, infinite)
  assert not (tmp_path / 'wrong').exists()
