"""The decode loop with a real model: transformers' tokens, exact log-probs, rows that know nothing of each other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from models import huggingface
from sdpo_jax.config import ModelConfig
from sdpo_jax.rollout import decode, sampling

VOCABULARY, EOS = 61, 7
generate = jax.jit(decode.generate, static_argnames=('policy', 'n', 'max_new_tokens'))
prefill = jax.jit(decode.prefill, static_argnames=('policy', 'n', 'max_new_tokens'))
advance = jax.jit(decode.advance, static_argnames='policy', donate_argnames='state')
truncate = jax.jit(sampling.truncate)
# Most tests share these shapes, and so one compiled program.
SHAPES = dict(n=2, max_new_tokens=32)


@pytest.fixture(scope='module')
def models(tmp_path_factory):
  """The same random Qwen3 in transformers and here."""
  config = transformers.Qwen3Config(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    tie_word_embeddings=True,
    initializer_range=0.4,
    eos_token_id=EOS,
    pad_token_id=0,
    bos_token_id=1,
  )
  torch.manual_seed(0)
  torch_model = transformers.Qwen3ForCausalLM(config).eval()
  path = tmp_path_factory.mktemp('model')
  torch_model.save_pretrained(path)
  policy, params = huggingface.load(path, ModelConfig(path=str(path), dtype='float32', remat='none'))
  return torch_model, policy, params


def make_params(rows, *, temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0, seed=0, max_tokens=32, stop_ids=((-1,),)):
  fill = lambda value, dtype: np.array(np.broadcast_to(np.asarray(value, dtype), (rows,)))
  stop_ids = np.asarray(stop_ids, np.int32)
  return sampling.SamplingParams(
    temperature=fill(temperature, np.float32),
    top_p=fill(top_p, np.float32),
    top_k=fill(top_k, np.int32),
    min_p=fill(min_p, np.float32),
    seed=fill(seed, np.uint32),
    sample_id=np.arange(rows, dtype=np.int32),
    step=np.int32(3),
    max_tokens=fill(max_tokens, np.int32),
    stop_ids=np.array(np.broadcast_to(stop_ids, (rows, stop_ids.shape[1]))),
  )


def take(params, rows):
  """The parameters of some of the rows."""
  return jax.tree.map(lambda leaf: leaf[rows] if np.ndim(leaf) else leaf, params)


def pad(prompts, width):
  tokens = np.zeros((len(prompts), width), np.int32)
  for row, prompt in zip(tokens, prompts, strict=True):
    row[: len(prompt)] = prompt
  return tokens, np.array([len(prompt) for prompt in prompts], np.int32)


def random_prompts(lengths, seed=0):
  rng = np.random.default_rng(seed)
  return [rng.integers(8, VOCABULARY, length).tolist() for length in lengths]


KNOBS = dict(
  temperature=np.array([1, 1, 0.7, 0, 1.5, 1, 1, 0.6], np.float32),
  top_p=np.array([1, 0.8, 0.95, 1, 1, 1, 0.5, 0.95], np.float32),
  top_k=np.array([-1, -1, 20, -1, 10, -1, -1, 20], np.int32),
  min_p=np.array([0, 0, 0, 0, 0.05, 0.2, 0, 0], np.float32),
  seed=np.array([0, 0, 1, 1, 2, 2, 3, 3], np.uint32),
  max_tokens=np.array([24, 24, 5, 24, 1, 24, 17, 24], np.int32),
)


def test_greedy_is_transformers_greedy(models):
  torch_model, policy, params = models
  prompts = random_prompts([1, 11, 7, 16])
  tokens, lengths = pad(prompts, 16)

  def both(eos):
    done = generate(policy, {}, params, tokens, lengths, make_params(8, stop_ids=((eos,),)), **SHAPES)
    for row in range(8):
      prompt = prompts[row // 2]
      expected = torch_model.generate(
        torch.tensor([prompt]), max_new_tokens=32, do_sample=False, eos_token_id=None if eos < 0 else eos
      )[0, len(prompt) :].tolist()
      length = int(done.length[row])
      assert done.tokens[row, :length].tolist() == expected
      assert done.mask[row].tolist() == [True] * length + [False] * (32 - length)
      assert bool(done.stopped[row]) == (expected[-1] == eos)
    assert not done.sampling_log_probs.any()
    return done

  free = both(-1)
  # Then with an end-of-sequence token that ends some of these rows.
  ends = {token: int((np.asarray(free.tokens) == token).any(axis=1).sum()) for token in range(VOCABULARY)}
  eos = next(token for token, rows in ends.items() if 0 < rows < 8)
  assert both(eos).stopped.any()


def test_log_probs_are_those_of_a_full_forward_pass(models):
  torch_model, policy, params = models
  prompts = random_prompts([4, 12, 8, 15], seed=1)
  tokens, lengths = pad(prompts, 16)
  knobs = make_params(8, **KNOBS)
  done = generate(policy, {}, params, tokens, lengths, knobs, **SHAPES)
  for row in range(8):
    length = int(done.length[row])
    completion = done.tokens[row, :length]
    sequence = prompts[row // 2] + completion.tolist()
    with torch.no_grad():
      logits = torch_model(torch.tensor([sequence])).logits[0, len(prompts[row // 2]) - 1 : -1].numpy()
    plain = torch.log_softmax(torch.tensor(logits).double(), -1).numpy()
    at = np.arange(length), np.asarray(completion)
    np.testing.assert_allclose(done.model_log_probs[row, :length], plain[at], atol=1e-4)
    np.testing.assert_allclose(done.entropy[row, :length], -(np.exp(plain) * plain).sum(-1), atol=1e-4)
    if KNOBS['temperature'][row] > 0:
      scaled = np.zeros((32, VOCABULARY), np.float32)
      scaled[:length] = (logits - logits.max(-1, keepdims=True)) / KNOBS['temperature'][row]
      fill = lambda name, row=row: np.full(32, KNOBS[name][row])
      weights = np.asarray(truncate(scaled, fill('top_k'), fill('top_p'), fill('min_p')))[:length]
      expected = np.log(weights[at] / weights.sum(-1))
      np.testing.assert_allclose(done.sampling_log_probs[row, :length], expected, atol=1e-4)
    assert not np.asarray(done.model_log_probs[row, length:]).any()


def test_a_row_is_what_it_is_alone(models):
  """Another batch size, place, padding, room, neighbours and group size give the same tokens."""
  _, policy, params = models
  prompts = random_prompts([4, 12, 8, 15], seed=2)
  tokens, lengths = pad(prompts, 16)
  knobs = make_params(8, **KNOBS, stop_ids=((EOS,),))
  together = generate(policy, {}, params, tokens, lengths, knobs, **SHAPES)
  again = generate(policy, {}, params, tokens, lengths, knobs, **SHAPES)
  jax.tree.map(np.testing.assert_array_equal, together, again)
  order = np.array([5, 0, 7, 2, 1, 6, 3, 4])
  wide, wide_lengths = pad([prompts[row // 2] for row in order], 40)
  apart = generate(policy, {}, params, wide, wide_lengths, take(knobs, order), n=1, max_new_tokens=40)
  for place, row in enumerate(order):
    np.testing.assert_array_equal(apart.tokens[place, :32], together.tokens[row])
    assert bool(apart.stopped[place]) == bool(together.stopped[row])
    np.testing.assert_allclose(apart.sampling_log_probs[place, :32], together.sampling_log_probs[row], atol=1e-4)
  for row in (1, 6):
    alone = generate(
      policy, {}, params, *pad([prompts[row // 2]], 16), take(knobs, np.array([row])), n=1, max_new_tokens=32
    )
    np.testing.assert_array_equal(alone.tokens[0], together.tokens[row])


def test_samples_of_a_prompt_differ(models):
  _, policy, params = models
  tokens, lengths = pad(random_prompts([6]) * 4, 16)
  done = generate(policy, {}, params, tokens, lengths, make_params(8, temperature=1.0), **SHAPES)
  assert len({tuple(row) for row in np.asarray(done.tokens).tolist()}) == 8


def test_stop_ids_and_lengths_of_each_row(models):
  """A stop id ends its own row only and is kept; a row of no tokens draws none; the loop ends with the last row."""
  _, policy, params = models
  tokens, lengths = pad(random_prompts([6]) * 4, 16)
  greedy = generate(policy, {}, params, tokens, lengths, make_params(8), **SHAPES).tokens[0].tolist()
  second = next(token for token in greedy if token != greedy[0])
  knobs = make_params(
    8,
    max_tokens=[32, 32, 0, 3, 0, 0, 0, 0],
    stop_ids=[[second, -1], [-1, greedy[0]], [greedy[0], -1]] + [[-1, -1]] * 5,
  )
  state = prefill(policy, {}, params, tokens, lengths, knobs, **SHAPES)
  state = advance(policy, {}, params, knobs, state, 32)
  done = decode.result(state)
  end = greedy.index(second) + 1
  assert done.length.tolist() == [end, 1, 0, 3, 0, 0, 0, 0]
  assert done.stopped.tolist() == [True, True] + [False] * 6
  assert done.tokens[0, :end].tolist() == greedy[:end] and done.tokens[1, 0] == greedy[0]
  assert int(state.drawn) == max(end, 3)


def test_interrupted_is_uninterrupted(models):
  """Advancing in pieces draws what advancing at once draws, bit for bit."""
  _, policy, params = models
  tokens, lengths = pad(random_prompts([4, 12, 5, 5]), 16)
  knobs = make_params(8, temperature=1.0, stop_ids=((-1, -1),))
  state = prefill(policy, {}, params, tokens, lengths, knobs, **SHAPES)
  whole = decode.result(advance(policy, {}, params, knobs, state, 32))
  state = prefill(policy, {}, params, tokens, lengths, knobs, **SHAPES)
  for limit in (3, 4, 11, 32):
    state = advance(policy, {}, params, knobs, state, limit)
  jax.tree.map(np.testing.assert_array_equal, whole, decode.result(state))


def test_the_cache_is_updated_in_place(models):
  """The whole donated state is aliased, and the loop's temporary memory is far below a second cache."""
  _, policy, params = models
  knobs = make_params(32, max_tokens=512)
  tokens, lengths = pad(random_prompts([16] * 4), 256)
  state = jax.eval_shape(
    functools.partial(decode.prefill, policy, n=8, max_new_tokens=512), {}, params, tokens, lengths, knobs
  )
  compiled = advance.lower(policy, {}, params, knobs, state, jnp.int32(512)).compile()
  cache = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.cache))
  memory = compiled.memory_analysis()
  assert memory.alias_size_in_bytes >= cache
  assert memory.temp_size_in_bytes < 0.75 * cache
  # No instruction but the loop's own plumbing yields a new buffer of the cache's shape.
  shape = f'f32[{",".join(map(str, jax.tree.leaves(state.cache)[0].shape))}]'
  copies = [line for line in compiled.as_text().splitlines() if f'= {shape}' in line and ' copy(' in line]
  assert not copies
