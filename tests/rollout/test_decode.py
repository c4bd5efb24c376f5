"""The decode loop with a real model: transformers' tokens, exact log-probs, rows that know nothing of each other."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from sdpo_jax.config import ModelConfig
from sdpo_jax.models import cache as kv_cache
from sdpo_jax.models import huggingface
from sdpo_jax.rollout import decode, sampling
from tests.compiling import compile_as_users

VOCABULARY, EOS = 61, 7
prefill = jax.jit(decode.prefill, static_argnames='policy')
advance = jax.jit(decode.advance, static_argnames=('policy', 'steps'), donate_argnames='cache')
truncate = jax.jit(sampling.truncate)
STEPS = 32  # Most tests share the shapes, and so one compiled program.


@pytest.fixture(scope='module')
def models(tmp_path_factory):
  """Return the same random Qwen3 in transformers and here."""
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
  def fill(value, dtype):
    return np.array(np.broadcast_to(np.asarray(value, dtype), (rows,)))

  stop_ids = np.asarray(stop_ids, np.int32)
  return sampling.SamplingParams(
    temperature=fill(temperature, np.float32),
    top_p=fill(top_p, np.float32),
    top_k=fill(top_k, np.int32),
    min_p=fill(min_p, np.float32),
    seed=fill(seed, np.uint32),
    sample_id=np.arange(rows, dtype=np.int32),
    step=fill(3, np.int32),
    max_tokens=fill(max_tokens, np.int32),
    stop_ids=np.array(np.broadcast_to(stop_ids, (rows, stop_ids.shape[1]))),
  )


def take(params, rows):
  """Return the parameters of some of the rows."""
  return jax.tree.map(lambda leaf: leaf[rows] if np.ndim(leaf) else leaf, params)


@functools.partial(jax.jit, static_argnames=('policy', 'n', 'slots'))
def cache_of(policy, params, tokens, lengths, *, n, slots):
  """Return the cache in which n consecutive rows hold a prompt each."""
  rows = jnp.arange(len(tokens) * n, dtype=jnp.int32)
  prompts = decode.prefill(policy, {}, params, tokens, lengths)
  return kv_cache.copy_rows(policy.init_cache(len(rows), slots), prompts, rows // n, rows, len(rows))


def generate(policy, params, tokens, lengths, knobs, *, n=2, chunks=(STEPS,)):
  """n completions of each prompt, drawn in some chunks: (tokens, records by name, length, stopped) of the rows."""
  rows = len(tokens) * n
  cache = cache_of(policy, params, tokens, lengths, n=n, slots=tokens.shape[1] + sum(chunks))
  token = np.repeat(tokens[np.arange(len(tokens)), lengths - 1], n)
  length, stopped = np.zeros(rows, np.int32), np.zeros(rows, bool)
  names = ('tokens', 'sampling_log_probs', 'model_log_probs', 'entropy')
  found = {name: np.zeros((rows, sum(chunks)), np.int32 if name == 'tokens' else np.float32) for name in names}
  for steps in chunks:
    active = ~stopped & (length < knobs.max_tokens)
    cache, drawn = advance(
      policy, {}, params, cache, decode.DecodeState(knobs, token, length, active), rows, steps=steps
    )
    for row in np.flatnonzero(active):
      new = slice(length[row], length[row] + drawn.count[row])
      for name, values in found.items():
        values[row, new] = getattr(drawn, name)[: drawn.count[row], row]
    length, stopped = length + np.asarray(drawn.count), stopped | np.asarray(drawn.stopped)
    token = found['tokens'][np.arange(rows), np.maximum(length - 1, 0)]
  return types.SimpleNamespace(**found, length=length, stopped=stopped)


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
    done = generate(policy, params, tokens, lengths, make_params(8, stop_ids=((eos,),)))
    for number, prompt in enumerate(prompts):
      expected = torch_model.generate(
        torch.tensor([prompt]), max_new_tokens=32, do_sample=False, eos_token_id=None if eos < 0 else eos
      )[0, len(prompt) :].tolist()
      for row in (2 * number, 2 * number + 1):
        length = int(done.length[row])
        assert done.tokens[row, :length].tolist() == expected
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
  done = generate(policy, params, tokens, lengths, knobs)
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

      def fill(name, row=row):
        return np.full(32, KNOBS[name][row])

      weights = np.asarray(truncate(scaled, fill('top_k'), fill('top_p'), fill('min_p')))[:length]
      expected = np.log(weights[at] / weights.sum(-1))
      np.testing.assert_allclose(done.sampling_log_probs[row, :length], expected, atol=1e-4)


@pytest.mark.slow
def test_a_row_is_what_it_is_alone(models):
  """Another batch size, place, padding, room, neighbours and group size give the same tokens."""
  _, policy, params = models
  prompts = random_prompts([4, 12, 8, 15], seed=2)
  tokens, lengths = pad(prompts, 16)
  knobs = make_params(8, **KNOBS, stop_ids=((EOS,),))
  together = generate(policy, params, tokens, lengths, knobs)
  again = generate(policy, params, tokens, lengths, knobs)
  jax.tree.map(np.testing.assert_array_equal, vars(together), vars(again))
  order = np.array([5, 0, 7, 2, 1, 6, 3, 4])
  wide, wide_lengths = pad([prompts[row // 2] for row in order], 40)
  apart = generate(policy, params, wide, wide_lengths, take(knobs, order), n=1, chunks=(40,))
  for place, row in enumerate(order):
    np.testing.assert_array_equal(apart.tokens[place, :STEPS], together.tokens[row])
    assert bool(apart.stopped[place]) == bool(together.stopped[row])
    np.testing.assert_allclose(apart.sampling_log_probs[place, :STEPS], together.sampling_log_probs[row], atol=1e-4)
  for row in (1, 6):
    alone = generate(policy, params, *pad([prompts[row // 2]], 16), take(knobs, np.array([row])), n=1)
    np.testing.assert_array_equal(alone.tokens[0], together.tokens[row])


def test_samples_of_a_prompt_differ(models):
  _, policy, params = models
  tokens, lengths = pad(random_prompts([6]) * 4, 16)
  done = generate(policy, params, tokens, lengths, make_params(8, temperature=1.0))
  assert len({tuple(row) for row in np.asarray(done.tokens).tolist()}) == 8


def test_stop_ids_and_lengths_of_each_row(models):
  """A stop id ends its own row only and is kept; rows without a sample draw nothing; the loop ends with the last
  row.
  """
  _, policy, params = models
  tokens, lengths = pad(random_prompts([6]) * 4, 16)
  greedy = generate(policy, params, tokens, lengths, make_params(8)).tokens[0].tolist()
  second = next(token for token in greedy if token != greedy[0])
  knobs = make_params(
    8,
    max_tokens=[32, 32, 0, 3, 0, 0, 0, 0],
    stop_ids=[[second, -1], [-1, greedy[0]], [greedy[0], -1]] + [[-1, -1]] * 5,
  )
  cache = cache_of(policy, params, tokens, lengths, n=2, slots=16 + STEPS)
  state = decode.DecodeState(knobs, np.repeat(tokens[:, 5], 2), np.zeros(8, np.int32), knobs.max_tokens > 0)
  end = greedy.index(second) + 1
  for enough, steps in ((3, max(end, 3)), (2, sorted([end, 1, 3])[1]), (1, 1)):
    after, done = advance(policy, {}, params, jax.tree.map(jnp.copy, cache), state, enough, steps=STEPS)
    counts = [min(count, steps) for count in [end, 1, 0, 3, 0, 0, 0, 0]]
    assert int(done.steps) == steps and done.count.tolist() == counts
    assert done.stopped.tolist() == [end <= steps, True] + [False] * 6
    # Rows that run on hold their prompt and what they drew but for the newest token; the others are free.
    assert after.lengths.tolist() == [5 + steps if end > steps else 0, 0, 0, 5 + steps if steps < 3 else 0, 0, 0, 0, 0]
    assert done.tokens[: counts[0], 0].tolist() == greedy[: counts[0]] and done.tokens[0, 1] == greedy[0]


def test_interrupted_is_uninterrupted(models):
  """Advancing in pieces draws what advancing at once draws, at the same probabilities."""
  _, policy, params = models
  tokens, lengths = pad(random_prompts([4, 12, 5, 5]), 16)
  knobs = make_params(8, temperature=1.0, stop_ids=((EOS,),))
  whole = generate(policy, params, tokens, lengths, knobs)
  pieces = generate(policy, params, tokens, lengths, knobs, chunks=(3, 3, 13, 13))
  assert 0 < whole.stopped.sum() < 8
  for name, values in vars(whole).items():
    np.testing.assert_allclose(getattr(pieces, name), values, atol=1e-5)


@pytest.mark.parametrize(
  'layers',
  [
    pytest.param(2, id='shallow', marks=pytest.mark.campaign),
    pytest.param(kv_cache.SHALLOW + 1, id='deep', marks=pytest.mark.slow),
  ],
)
def test_the_cache_is_updated_in_place(layers):
  """The whole donated cache is aliased, no program copies it, and temporary memory is far below a second one.

  By default tests/models/attention/test_tpu.py says this of the programs of a TPU.
  """
  config = dict(
    model_type='qwen3',
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=layers,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
  )
  policy, params = huggingface.init(config, jax.random.key(0))
  cache = jax.eval_shape(lambda: policy.init_cache(32, 777))
  prompts = jax.eval_shape(lambda: policy.init_cache(4, 256))
  state = decode.DecodeState(make_params(32), np.zeros(32, np.int32), np.zeros(32, np.int32), np.ones(32, bool))
  index = jax.ShapeDtypeStruct((32,), jnp.int32)
  copy = jax.jit(kv_cache.copy_rows, donate_argnums=0).lower(cache, prompts, index, index, 7)
  for lowered in (advance.lower(policy, {}, params, cache, state, 32, steps=8), copy):
    compiled = compile_as_users(lowered)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= size
    # Beside recent tokens and scores there is one layer at most, out of the stack of a deep model.
    assert memory.temp_size_in_bytes < (0.2 if layers == 2 else 1.25 / layers) * size
    shapes = {f'f32[{",".join(map(str, leaf.shape))}]' for leaf in jax.tree.leaves(cache) if leaf.ndim > 1}
    made = [line for line in compiled.as_text().splitlines() if any(f'= {shape}' in line for shape in shapes)]
    assert made and not [line for line in made if ' copy(' in line or ' transpose(' in line]


def test_rows_move_between_caches_and_recent_tokens_are_committed_behind_each():
  """What stands in every slot, for caches of either layout."""
  copy_rows, commit, compact = (jax.jit(each) for each in (kv_cache.copy_rows, kv_cache.commit, kv_cache.compact))
  rng = np.random.default_rng(0)

  def stores(cache):
    return [array for i in range(3) for array in jax.tree.leaves(kv_cache.layer_of(cache.stores, i))]

  for stacked in (False, True):

    def make(rows, length, stacked=stacked):
      return jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32) if leaf.ndim > 1 else leaf,
        kv_cache.init(3, rows, 2, length, 4, jnp.float32, stacked=stacked),
      )

    into, rows = make(5, 9), make(4, 6).replace(lengths=jnp.array([6, 2, 3, 4]))
    moved = copy_rows(into, rows, np.array([2, 0, 1]), np.array([4, 1, 0]), 2)
    assert moved.lengths.tolist() == [0, 6, 0, 0, 3]
    for new, old, source in zip(stores(moved), stores(into), stores(rows), strict=True):
      expected = np.array(old)
      expected[[4, 1], :, :6] = source[np.array([2, 0])]
      np.testing.assert_array_equal(new, expected)
    recent = make(5, 3)
    grown = moved.replace(recent=kv_cache.Recent(recent.stores, jnp.int32(2)))
    committed = commit(grown, np.array([True, True, True, False, True]))
    assert committed.lengths.tolist() == [2, 8, 2, 0, 5] and committed.recent is None
    for new, old, source in zip(stores(committed), stores(moved), stores(recent), strict=True):
      for row, length in ((0, 0), (1, 6), (2, 0), (4, 3)):
        np.testing.assert_array_equal(new[row, :, :length], old[row, :, :length])
        np.testing.assert_array_equal(new[row, :, length : length + 2], source[row, :, :2])
    fewer = compact(committed, np.array([0, 4, 3]))
    assert fewer.lengths.tolist() == [2, 5, 0] and kv_cache.store_rows(fewer) == 5
    for new, old in zip(stores(fewer), stores(committed), strict=True):
      np.testing.assert_array_equal(new, np.array(old)[[0, 4, 3, 3, 4]])
