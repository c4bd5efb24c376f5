"""Gradients, rows, cache and memory of the decoder, with Qwen3 as the model."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from sdpo_jax.config import ModelConfig
from sdpo_jax.models import cache as kv_cache
from sdpo_jax.models import huggingface, parameters
from sdpo_jax.models.cache import SHALLOW
from sdpo_jax.models.decoder import DecoderPolicy
from sdpo_jax.models.families import known_families
from tests.compiling import compile_as_users

torch.set_num_threads(1)

SIZES = dict(
  vocab_size=61,
  hidden_size=32,
  intermediate_size=48,
  num_hidden_layers=3,
  num_attention_heads=4,
  num_key_value_heads=2,
  head_dim=16,
  initializer_range=0.25,
)


def reference(directory, seed=0, **changes):
  """Return a random transformers model, norms and biases away from their initial values, saved to `directory`."""
  torch.manual_seed(seed)
  model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**SIZES, **changes})).eval()
  with torch.no_grad():
    for name, weight in model.named_parameters():
      if 'norm' in name or 'bias' in name:
        weight.add_(0.3 * torch.randn_like(weight))
  model.generation_config.eos_token_id = None
  model.save_pretrained(directory)
  return model


def rows(tokens):
  """Return (tokens, positions, segment_ids) for tokens [B, S] with one segment per row."""
  batch, length = tokens.shape
  return tokens, np.tile(np.arange(length, dtype=np.int32), (batch, 1)), np.ones((batch, length), np.int32)


@functools.partial(jax.jit, static_argnums=0)
def hidden_states(policy, params, tokens, positions, segment_ids):
  return policy.apply({}, params, tokens, positions, segment_ids)[:2]


@pytest.fixture(scope='module')
def small():
  """Return a policy in float32 with random parameters."""
  policy, params = huggingface.init({**SIZES, 'model_type': 'qwen3', 'tie_word_embeddings': True}, jax.random.key(0))
  return policy, params


def test_gradients_equal_torch(tmp_path):
  model = reference(tmp_path, tie_word_embeddings=True)
  policy, params = huggingface.load(tmp_path, ModelConfig(dtype='float32', remat='dots'))
  tokens = np.random.default_rng(2).integers(0, SIZES['vocab_size'], (2, 9), dtype=np.int32)

  @jax.jit
  def gradient(params):
    def loss(params):
      hidden, unembedding = hidden_states(policy, params, *rows(tokens))
      log_probs = jax.nn.log_softmax(hidden[:, :-1] @ unembedding.T)
      return -jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1).mean()

    return jax.grad(loss)(params)

  inputs = torch.tensor(tokens, dtype=torch.long)
  model(inputs, labels=inputs).loss.backward()
  expected = dict(model.named_parameters())
  ours = gradient(params)
  for parameter in policy.parameter_table():
    for layer in range(parameter.layers):
      name = parameter.huggingface_name(layer)
      leaf = parameters.get(ours, parameter.path)
      tensor = parameter.to_huggingface(np.asarray(leaf[layer] if parameter.stacked else leaf))
      np.testing.assert_allclose(tensor, expected[name].grad.numpy(), atol=2e-5, rtol=2e-4, err_msg=name)


def test_padded_and_packed_rows_equal_sequences_one_by_one(small):
  policy, params = small
  generator = np.random.default_rng(3)
  sequences = [generator.integers(0, policy.vocab_size, length, dtype=np.int32) for length in (5, 9, 3)]
  length = 20
  placements = [  # (row, first slot, segment) of each sequence: right-padded, left-padded, packed with gaps.
    [(0, 0, 1), (1, 0, 1), (2, 0, 1)],
    [(0, 15, 1), (1, 11, 1), (2, 17, 1)],
    [(0, 0, 1), (0, 5, 2), (0, 16, 7)],
  ]
  alone = [np.asarray(hidden_states(policy, params, *rows(sequence[None]))[0][0]) for sequence in sequences]
  for placement in placements:
    tokens = generator.integers(0, policy.vocab_size, (3, length), dtype=np.int32)  # Padding may hold anything.
    positions, segments = np.zeros((3, length), np.int32), np.zeros((3, length), np.int32)
    for sequence, (row, start, segment) in zip(sequences, placement, strict=True):
      part = slice(start, start + len(sequence))
      tokens[row, part], positions[row, part], segments[row, part] = sequence, np.arange(len(sequence)), segment
    hidden = np.asarray(hidden_states(policy, params, tokens, positions, segments)[0])
    assert np.isfinite(hidden).all()
    for expected, (row, start, _) in zip(alone, placement, strict=True):
      np.testing.assert_allclose(hidden[row, start : start + len(expected)], expected, atol=1e-5)


def test_completions_that_share_a_prompt_equal_sequences_one_by_one(small):
  policy, params = small
  generator = np.random.default_rng(6)
  prompt, *completions = (generator.integers(0, policy.vocab_size, n, dtype=np.int32) for n in (5, 4, 7, 1))
  other = generator.integers(0, policy.vocab_size, 3, dtype=np.int32)
  row = np.concatenate([prompt, completions[0], other, *completions[1:]])[None]
  sizes = [5, 4, 3, 7, 1]
  segments = np.repeat([1, 2, 3, 4, 5], sizes)[None].astype(np.int32)
  parents = np.repeat([0, 1, 0, 1, 1], sizes)[None].astype(np.int32)
  positions = np.concatenate([start + np.arange(n) for start, n in zip([0, 5, 0, 5, 5], sizes, strict=True)])
  positions = positions[None].astype(np.int32)
  hidden = np.asarray(policy.apply({}, params, row, positions, segments, parents=parents)[0][0])
  assert policy.shares_prefixes
  for segment, completion in zip((2, 4, 5), completions, strict=True):
    alone = hidden_states(policy, params, *rows(np.concatenate([prompt, completion])[None]))[0][0]
    np.testing.assert_allclose(hidden[segments[0] == 1], alone[:5], atol=1e-5)
    np.testing.assert_allclose(hidden[segments[0] == segment], alone[5:], atol=1e-5)
  np.testing.assert_allclose(
    hidden[segments[0] == 3], hidden_states(policy, params, *rows(other[None]))[0][0], atol=1e-5
  )


@pytest.mark.parametrize(
  ('window', 'layers'),
  [
    pytest.param(None, 2, id='shallow'),
    pytest.param(4, SHALLOW + 1, id='sliding windows, deep'),
    pytest.param(4, 2, id='sliding windows, shallow', marks=pytest.mark.campaign),
    pytest.param(None, SHALLOW + 1, id='deep', marks=pytest.mark.campaign),
  ],
)
def test_one_prefill_serves_a_group_of_rows_of_different_lengths(window, layers):
  """Two right-padded prompts, each continued by two different rows, give the states of the four whole sequences."""
  windows = dict(use_sliding_window=True, sliding_window=window, max_window_layers=1) if window else {}
  values = {**SIZES, 'model_type': 'qwen3', 'num_hidden_layers': layers, **windows}
  policy, params = huggingface.init(values, jax.random.key(1))
  generator = np.random.default_rng(4)
  lengths, width, steps = (3, 6), 6, 4
  prompts = generator.integers(0, policy.vocab_size, (2, width), dtype=np.int32)
  continuations = generator.integers(0, policy.vocab_size, (4, steps), dtype=np.int32)
  segments = (np.arange(width)[None] < np.array(lengths)[:, None]).astype(np.int32)
  apply = jax.jit(lambda params, cache, *row: policy.apply({}, params, *row, cache))
  _, _, cache = apply(params, policy.init_cache(2, width), *rows(prompts)[:2], segments)
  prompt = jnp.array([0, 0, 1, 1])
  cache = kv_cache.copy_rows(policy.init_cache(4, width + steps), cache, prompt, jnp.arange(4), 4)
  assert cache.lengths.tolist() == [3, 3, 6, 6]
  cache = policy.with_recent(cache, 3)
  states = []
  for step in range(steps):
    positions = np.repeat(np.array(lengths, np.int32), 2)[:, None] + np.int32(step)
    hidden, _, cache = apply(params, cache, continuations[:, step : step + 1], positions, np.ones((4, 1), np.int32))
    states.append(np.asarray(hidden[:, 0]))
    if step == 1:  # What was appended so far moves behind each prompt.
      cache = policy.with_recent(kv_cache.commit(cache, jnp.ones(4, bool)), 3)
  whole, row_lengths = np.zeros((4, width + steps), np.int32), np.repeat(lengths, 2) + steps
  for row, end in enumerate(row_lengths):
    whole[row, :end] = np.concatenate([prompts[row // 2, : end - steps], continuations[row]])
  tokens, positions, _ = rows(whole)
  expected = hidden_states(policy, params, tokens, positions, (positions < row_lengths[:, None]).astype(np.int32))[0]
  for row, end in enumerate(row_lengths):
    np.testing.assert_allclose(np.stack(states, axis=1)[row], expected[row, end - steps : end], atol=2e-5)


def _loss(policy, params, row):
  hidden, unembedding, _ = policy.apply({}, params, *row)
  return jnp.mean(jax.nn.logsumexp((hidden @ unembedding.T).astype(jnp.float32), axis=-1))


@pytest.mark.slow
def test_rematerialisation_changes_memory_and_no_gradient(small):
  policy, params = small
  row = rows(np.arange(24, dtype=np.int32).reshape(1, 24))
  gradients, memory = {}, {}
  for remat in ('none', 'full', 'dots'):
    function = functools.partial(_loss, dataclasses.replace(policy, remat=remat))
    compiled = compile_as_users(jax.jit(jax.grad(function)).lower(params, row))
    gradients[remat], memory[remat] = compiled(params, row), compiled.memory_analysis().temp_size_in_bytes
  for remat in ('full', 'dots'):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), gradients[remat], gradients['none'])
  assert memory['full'] < memory['dots'] < memory['none']
  assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(gradients['none']))


def test_the_program_does_not_grow_with_depth():
  sizes = []
  for layers in (2, 24):
    values = {**SIZES, 'model_type': 'qwen3', 'num_hidden_layers': layers}
    policy = DecoderPolicy(known_families.read(values), 'bfloat16', 'full')
    shapes = parameters.map_table(
      lambda row: jax.ShapeDtypeStruct(row.shape, jnp.dtype(row.dtype)), policy.parameter_table()
    )
    row = (jax.ShapeDtypeStruct((2, 16), jnp.int32),) * 3
    sizes.append(len(jax.jit(jax.grad(functools.partial(_loss, policy))).lower(shapes, row).as_text()))
  assert sizes[1] < 1.02 * sizes[0]


def test_bfloat16_stays_near_float32_and_norms_stay_float32(small):
  policy, params = small
  half = dataclasses.replace(policy, dtype='bfloat16')
  row = rows(np.random.default_rng(5).integers(0, policy.vocab_size, (2, 16), dtype=np.int32))
  hidden, unembedding = hidden_states(policy, params, *row)
  near, near_unembedding = hidden_states(half, params, *row)
  assert near.dtype == near_unembedding.dtype == jnp.bfloat16
  assert jnp.abs(near.astype(jnp.float32) - hidden).mean() < 0.02 * jnp.abs(hidden).mean()
  _, cast = half.cast({}, params)
  assert cast['layers'][2]['attention_norm'].dtype == jnp.float32
  assert cast['layers'][2]['mlp']['gate'].dtype == jnp.bfloat16
  assert half.init_cache(1, 4).stores.keys[2].dtype == jnp.bfloat16


def test_the_table_owns_every_shape(small):
  policy, params = small
  table = policy.parameter_table()
  shapes = jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), params)
  assert shapes == parameters.map_table(lambda parameter: (parameter.shape, parameter.dtype), table)
  assert all(len(parameter.axes) == len(parameter.shape) for parameter in table)
  assert parameters.count(table) == sum(leaf.size for leaf in jax.tree.leaves(params))
  norms = [parameter.name for parameter in table if not parameter.compute]
  assert len(norms) == 5 and all(re.search('norm', name) for name in norms)
  assert hash(policy) == hash(dataclasses.replace(policy))
