"""Every family against transformers, with tiny random models, texts beyond windows and lengths, in both directions."""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers

from sdpo_jax.config import MeshConfig, ModelConfig
from sdpo_jax.distributed import mesh as meshes
from sdpo_jax.errors import UserError
from sdpo_jax.learning import batching
from sdpo_jax.learning.update import make_update, place_state
from sdpo_jax.models import huggingface, parameters
from sdpo_jax.models.attention.backend import AttentionBackend
from sdpo_jax.rollout.sampler import Sampler
from sdpo_jax.training.specs import batch_spec, update_spec
from tests import updates
from tests.models.family_models import MODELS, MORE, SIZES, TOKENIZER, VOCABULARY, reference, reference_that_sees_images

torch.set_num_threads(1)

FLOAT32 = ModelConfig(dtype='float32', remat='none')
PROMPTS = [np.random.default_rng(n).integers(1, VOCABULARY, n).tolist() for n in (11, 12, 13, 24)]  # Buckets: 12, 24.
STEPS = 32


@dataclasses.dataclass
class Made:
  """The same model in transformers and here."""

  reference: transformers.PreTrainedModel
  folder: str
  policy: huggingface.DecoderPolicy
  params: dict


@pytest.fixture(scope='module')
def made(request, tmp_path_factory):
  model = reference(request.param)
  folder = str(tmp_path_factory.mktemp('model'))
  model.save_pretrained(folder)
  return Made(model, folder, *huggingface.load(folder, FLOAT32))


def families(*default, slow=(), more=False):
  """Test of all families, of which those named run by default or slowly; with `more`, of the other models too."""
  names = [*MODELS, *MORE] if more else list(MODELS)
  marks = dict.fromkeys(slow, pytest.mark.slow) | dict.fromkeys(default, ())
  models = [pytest.param(name, marks=marks.get(name, pytest.mark.campaign)) for name in names]
  return pytest.mark.parametrize('made', models, indirect=True, ids=names)


def logits_of(model, tokens):
  """Return the logits [S, V] float32 of transformers."""
  with torch.no_grad():
    return model(torch.tensor([tokens])).logits[0].float().numpy()


@functools.partial(jax.jit, static_argnums=0)
def our_logits(policy, params, tokens, segment_ids):
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
  hidden, unembedding, _ = policy.apply({}, params, tokens, positions, segment_ids)
  return (hidden @ unembedding.T).astype(jnp.float32)


def padded(sequences):
  width = max(map(len, sequences))
  tokens = np.array([sequence + [0] * (width - len(sequence)) for sequence in sequences], np.int32)
  return tokens, (np.arange(width) < np.array([[len(s)] for s in sequences])).astype(np.int32)


def greedy(policy, params, **settings):
  """Return (two greedy samples of each prompt, number of prompts that were prefilled)."""
  settings = dict(prompt_buckets=(12, 24), decode_chunk=16, resized=False) | settings
  sampler = Sampler(policy, TOKENIZER, response_buckets=(STEPS,), **settings)
  drawn = sampler.sample({}, params, PROMPTS, n=2, seed=0, step=0, max_tokens=STEPS, temperature=0.0)
  return drawn, sampler.stats.prompts


@families(
  'qwen3',
  'gemma3',
  slow=('olmo3', 'llama', 'qwen2', 'mistral', 'qwen3, windows and biases', 'mistral, tanh'),
  more=True,
)
def test_samples_and_logits_are_those_of_transformers(made):
  """Compare greedy tokens, log-probs from the cache on both sides of a bucket's edge, and logits of whole sequences."""
  ours, prefilled = greedy(made.policy, made.params)
  assert prefilled == len(PROMPTS)  # Each once for both of its samples.
  whole = []
  for row, prompt in enumerate(PROMPTS):
    with torch.no_grad():
      generated = made.reference.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=STEPS,
        do_sample=False,
      )[0].tolist()
    for sample in (2 * row, 2 * row + 1):
      assert ours.completion_tokens[sample].tolist() == generated[len(prompt) :]
    whole.append(generated)
  logits = np.asarray(our_logits(made.policy, made.params, *padded(2 * whole)))
  for row, (prompt, sequence) in enumerate(zip(PROMPTS, whole, strict=True)):
    expected = logits_of(made.reference, sequence)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(logits[row, : len(sequence)], expected, atol=1e-4)
    predicting = torch.log_softmax(torch.tensor(expected[len(prompt) - 1 : -1]), dim=-1)
    drawn = predicting[range(STEPS), sequence[len(prompt) :]]
    np.testing.assert_allclose(ours.model_log_probs[2 * row], drawn, atol=1e-4)


@families(*MODELS, slow=('qwen3, windows and biases', 'mistral, tanh'), more=True)
def test_what_is_exported_is_the_same_model_in_transformers(made, tmp_path):
  """With a config.json written from the architecture, and with a copied one."""
  tokens = np.random.default_rng(5).integers(1, VOCABULARY, 40).tolist()
  expected = logits_of(made.reference, tokens)
  for name, source in (('written', None), ('copied', made.folder)):
    huggingface.save(tmp_path / name, made.policy, made.params, source=source, dtype='float32')
    model, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, output_loading_info=True)
    assert not any(report.values()), report
    assert type(model) is type(made.reference)
    np.testing.assert_allclose(logits_of(model, tokens), expected, atol=1e-5)
    policy, params = huggingface.load(tmp_path / name, FLOAT32)
    assert policy == made.policy
    jax.tree.map(np.testing.assert_array_equal, params, made.params)


def step(made, mesh):
  """Return the loss, and the parameters after a step of SDPO by plain gradient descent, on the host."""
  config = updates.settings(actor__ppo_micro_batch_size=8)
  samples = updates.samples_for(config)
  _, params = huggingface.load(made.folder, FLOAT32, mesh)
  state = place_state(update_spec(config), params, mesh)
  update = make_update(made.policy.on(mesh), update_spec(config), jax.tree.map(lambda leaf: leaf.sharding, state))
  (micro,) = batching.micro_batches(samples, np.arange(len(samples)), batch_spec(config), mesh.size)
  grads, result = update.accumulate({}, state, update.zero(state.trainable), meshes.put_rows(mesh, micro.batch))
  state, report = update.apply(state, grads)
  assert report['taken'] == 1
  return float(result.loss), jax.device_get(state.trainable)


def one_device():
  return meshes.make_mesh(MeshConfig(fsdp=1), jax.devices()[:1])


@families('gemma3', slow=('olmo3', 'llama'))
def test_a_step_of_sdpo_moves_every_parameter(made):
  loss, moved = step(made, one_device())
  assert 0 < loss < np.inf
  for parameter in made.policy.parameter_table():
    before, after = (np.asarray(parameters.get(tree, parameter.path)) for tree in (made.params, moved))
    assert np.isfinite(after).all()
    changed = (before != after).reshape(parameter.layers, -1).any(axis=1)
    assert changed.all(), (parameter.name, changed)


@families('llama', 'gemma3', slow=('olmo3',))
def test_gradients_are_those_of_torch(made):
  tokens = np.random.default_rng(7).integers(1, VOCABULARY, 24).tolist()
  row = padded([tokens])

  @jax.jit
  @jax.grad
  def gradient(params):
    log_probs = jax.nn.log_softmax(our_logits(made.policy, params, *row)[0, :-1])
    return -jnp.take_along_axis(log_probs, row[0][0, 1:, None], axis=-1).mean()

  made.reference.zero_grad()
  made.reference(torch.tensor([tokens]), labels=torch.tensor([tokens])).loss.backward()
  expected = dict(made.reference.named_parameters())
  ours = gradient(made.params)
  for parameter in made.policy.parameter_table():
    leaf = np.asarray(parameters.get(ours, parameter.path))
    for layer in range(parameter.layers):
      name = parameter.huggingface_name(layer)
      found, exact = (leaf[layer] if parameter.stacked else leaf), expected[name].grad.numpy()
      atol = 1e-4 * np.abs(exact).max() + 1e-6
      np.testing.assert_allclose(parameter.to_huggingface(found), exact, atol=atol, err_msg=name)


@families(slow=('gemma3',))
def test_the_kernels_of_a_tpu_sample_what_the_plain_path_does(made):
  kernels = dataclasses.replace(made.policy, backend=AttentionBackend('splash', interpret=True))
  drawn, expected = (greedy(policy, made.params)[0] for policy in (kernels, made.policy))
  np.testing.assert_array_equal(drawn.completion_tokens, expected.completion_tokens)
  np.testing.assert_allclose(drawn.model_log_probs, expected.model_log_probs, atol=1e-4)


@families(slow=('olmo3',))
def test_a_step_on_eight_devices_is_that_of_one(made):
  loss, moved = step(made, one_device())
  spread_loss, spread = step(made, meshes.make_mesh(MeshConfig(fsdp=4, tensor=2)))
  assert spread_loss == pytest.approx(loss, rel=1e-5)
  jax.tree.map(lambda one, eight: np.testing.assert_allclose(eight, one, atol=3e-6), moved, spread)


@families('gemma3', slow=('olmo3',))
def test_bfloat16_is_as_near_to_float32_as_that_of_transformers(made):
  tokens = np.random.default_rng(6).integers(1, VOCABULARY, 40).tolist()
  exact = logits_of(made.reference, tokens)
  theirs = logits_of(copy.deepcopy(made.reference).to(torch.bfloat16), tokens)
  half = dataclasses.replace(made.policy, dtype='bfloat16')
  ours = np.asarray(our_logits(half, made.params, *padded([tokens])))[0]
  errors = [np.sqrt(np.mean((logits - exact) ** 2)) for logits in (ours, theirs)]
  assert 0 < errors[0] < 1.5 * errors[1] < 0.3 * exact.std()


def test_the_scale_of_an_embedding_is_rounded_to_compute_dtype_first():
  """The root of 40 is 6.3246, in bfloat16 6.3125; layers whose results are multiplied by 0 leave the rest to see."""
  sizes = SIZES | dict(model_type='gemma3_text', hidden_size=40, num_hidden_layers=1, head_dim=16)
  policy = huggingface.describe(sizes, ModelConfig(dtype='bfloat16', remat='none'))
  weights = {'attention_post_norm': -1.0, 'mlp_post_norm': -1.0, 'final_norm': 0.0}

  def make(parameter):
    drawn = np.random.default_rng(2).normal(size=parameter.shape)
    return np.full(parameter.shape, weights.get(parameter.path[-1], drawn), np.float32)

  params = parameters.map_table(make, policy.parameter_table())
  row = np.arange(VOCABULARY, dtype=np.int32)[None]
  ours = jax.jit(policy.apply)({}, params, row, row, np.ones_like(row))[0][0]
  gemma3 = transformers.models.gemma3.modeling_gemma3
  embedding = gemma3.Gemma3TextScaledWordEmbedding(VOCABULARY, 40, 0, embed_scale=40**0.5)
  embedding.weight.data = torch.tensor(params['embedding'])
  with torch.no_grad():
    theirs = gemma3.Gemma3RMSNorm(40)(embedding.to(torch.bfloat16)(torch.tensor(row[0], dtype=torch.long)))
  # But for sums in another order.
  assert np.mean(np.asarray(ours, np.float32) == theirs.float().numpy()) > 0.99


@families(slow=('gemma3', 'olmo3'))
def test_eight_devices_compute_and_sample_what_one_does(made):
  """Heads that do not divide the devices stay whole: Gemma has one head of keys here."""
  mesh = meshes.make_mesh(MeshConfig(fsdp=4, tensor=2))
  _, sharded = huggingface.load(made.folder, FLOAT32, mesh)
  gate = sharded['layers']['mlp']['gate']
  assert len(gate.sharding.device_set) == 8 and gate.addressable_shards[0].data.shape[1:] == (8, 24)
  jax.tree.map(np.testing.assert_array_equal, made.params, sharded)
  policy = made.policy.on(mesh)
  expected, _ = greedy(made.policy, made.params)
  drawn, _ = greedy(policy, sharded, prompt_buckets=(24,), mesh=mesh)
  np.testing.assert_array_equal(drawn.completion_tokens, expected.completion_tokens)
  np.testing.assert_allclose(drawn.model_log_probs, expected.model_log_probs, atol=1e-4)
  samples = [PROMPTS[row // 2] + tokens.tolist() for row, tokens in enumerate(drawn.completion_tokens)]
  rows = padded(samples)
  logits, spread = (
    our_logits(made.policy, made.params, *rows),
    our_logits(policy, sharded, *meshes.put_rows(mesh, rows)),
  )
  for row, sample in enumerate(samples):
    np.testing.assert_allclose(spread[row, : len(sample)], logits[row, : len(sample)], atol=1e-4)


@pytest.fixture(scope='module')
def sees_images(tmp_path_factory):
  """Return (model of transformers that reads images, its directory)."""
  model = reference_that_sees_images()
  folder = tmp_path_factory.mktemp('sees_images')
  model.save_pretrained(folder)
  return model, folder


SPELLINGS = {
  'transformers 4.50': (
    ('language_model.model.', 'language_model.lm_head.', 'vision_tower.', 'multi_modal_projector.')
  ),
  'transformers 5': ('model.language_model.', 'lm_head.', 'model.vision_tower.', 'model.multi_modal_projector.'),
}


def respelled(folder, target, spelling, **more):
  """Return a copy of a model that sees images whose tensors have other names, and `more` tensors."""
  shutil.copytree(folder, target)
  file = target / 'model.safetensors'
  parts = re.compile(r'(?:model\.)?(language_model\.(?:model\.)?|lm_head\.|vision_tower\.|multi_modal_projector\.)(.*)')
  places = ('language_model.', 'lm_head.', 'vision_tower.', 'multi_modal_projector.')
  tensors = {}
  for name, tensor in safetensors.numpy.load_file(file).items():
    part, rest = parts.fullmatch(name).groups()
    place = next(index for index, start in enumerate(places) if part.startswith(start))
    tensors[SPELLINGS[spelling][place] + rest] = tensor
  safetensors.numpy.save_file(tensors | more, file)
  return target


@pytest.mark.parametrize('spelling', SPELLINGS)
def test_of_a_model_that_sees_images_the_part_that_reads_is_trained_and_exported(sees_images, spelling, tmp_path):
  model, folder = sees_images
  source = respelled(folder, tmp_path / 'model', spelling)
  for name in ('preprocessor_config.json', 'processor_config.json', 'LICENSE'):
    (source / name).write_text('{}')
  policy, params = huggingface.load(source, FLOAT32)
  tokens = PROMPTS[3]
  with torch.no_grad():
    expected = model(torch.tensor([tokens])).logits[0].numpy()
  np.testing.assert_allclose(our_logits(policy, params, *padded([tokens]))[0], expected, atol=1e-4)
  huggingface.save(tmp_path / 'export', policy, params, source=source, dtype='float32')
  written = {file.name for file in (tmp_path / 'export').iterdir()}
  assert written == {'config.json', 'generation_config.json', 'LICENSE', 'model.safetensors', 'SHA256SUMS'}
  exported, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'export', output_loading_info=True)
  assert not any(report.values()) and type(exported) is transformers.Gemma3ForCausalLM
  assert exported.config.eos_token_id == [5, 6]
  np.testing.assert_allclose(logits_of(exported, tokens), expected, atol=1e-5)
  again, _ = huggingface.load(tmp_path / 'export', FLOAT32)
  assert again == policy


def test_a_tensor_that_is_not_about_images_is_not_skipped(sees_images, tmp_path):
  _, folder = sees_images
  extra = {'audio_tower.weight': np.zeros(2, np.float32), 'vision_tower_too.weight': np.zeros(2, np.float32)}
  respelled(folder, tmp_path / 'more', 'transformers 5', **extra)
  with pytest.raises(UserError, match=r"2 tensors do not belong to the model .*, first 'audio_tower.weight'"):
    huggingface.load(tmp_path / 'more', FLOAT32)
  twice = {'language_model.model.norm.weight': np.zeros(32, np.float32)}
  respelled(folder, tmp_path / 'twice', 'transformers 5', **twice)
  with pytest.raises(
    UserError, match=r"'language_model.model.norm.weight' and 'model.language_model.norm.weight' name the same tensor"
  ):
    huggingface.load(tmp_path / 'twice', FLOAT32)
