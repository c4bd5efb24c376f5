"""Factors are never merged for sampling: in bfloat16 a merged matrix would forget what is small beside it."""

import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from sdpo_jax.config import LoraConfig, ModelConfig
from sdpo_jax.models import huggingface, parameters
from sdpo_jax.models.adapters import lora
from sdpo_jax.rollout.sampler import Sampler
from tests.models.adapters.lora_policies import deltas
from tests.models.small_policies import CONFIG

WIDTH, RANK = 128, 1
MODEL = CONFIG | {'num_hidden_layers': 1, 'hidden_size': WIDTH, 'intermediate_size': 2 * WIDTH, 'head_dim': 32}
TOKENIZER = types.SimpleNamespace(decode=lambda tokens, **options: '')


def rounded(values):
  return np.asarray(values, np.float32).astype(ml_dtypes.bfloat16)


def half_ulp(values):
  """Half the distance from bfloat16 values to the next one towards zero, which is the nearer one at powers of two."""
  exponents = np.floor(np.log2(np.abs(np.asarray(values, np.float64))))
  return 2.0 ** (exponents - 9)


@pytest.fixture(scope='module')
def model():
  """(policy, base, factors) in bfloat16, where every scale · A · B is below half an ulp of every weight beside it."""
  draw = np.random.default_rng(0)
  config = ModelConfig(dtype='bfloat16', lora=LoraConfig(rank=RANK, alpha=4.0))
  policy = huggingface.describe(MODEL, config).on(None)
  table = {parameter.name: parameter for parameter in policy.parameter_table()}

  def weights(parameter):
    if not parameter.compute:
      return jnp.ones(parameter.shape, jnp.float32)
    size, sign = draw.uniform(1, 2, parameter.shape), draw.choice([-1, 1], parameter.shape)
    if parameter.name == 'embedding':  # All tokens lie in one direction, beside one of their own.
      return jnp.asarray(rounded(0.5 * size + 0.5 * sign))
    return jnp.asarray(rounded(size * sign / 16))

  base = parameters.map_table(weights, parameters.frozen(policy.parameter_table()))
  factors = {}
  for target in policy.adapter.targets:
    matrix, (a, b) = table[target.name], (table[f'{target.name}_{letter}'] for letter in (lora.A, lora.B))
    # Products of at most `limit`, whose sums over the inputs do not cancel where the inputs have a common part.
    limit = 0.9 * float(half_ulp(parameters.get(base, matrix.path)).min())
    size = np.sqrt(limit / (RANK * max(target.scales)))
    factors[a.path] = jnp.asarray(np.full(a.shape, size, np.float32))
    factors[b.path] = jnp.asarray(np.float32(size) * draw.choice([-1, 1], b.shape).astype(np.float32))
  return policy, base, parameters.nest(factors.items())


def merged(policy, base, factors, dtype):
  changes = deltas(policy, factors)
  table = parameters.frozen(policy.parameter_table())
  return parameters.map_tree(
    lambda p, leaf: jnp.asarray((np.asarray(leaf, np.float64) + changes.get(p.path, 0)).astype(dtype)), table, base
  )


def log_probs(policy, params, tokens, prompt):
  """[N, T] float64 log-probs of completions of a prompt under a model without factors, asked directly."""
  tokens = np.concatenate([np.tile(np.asarray(prompt, np.int32), (len(tokens), 1)), tokens], 1)
  positions = np.tile(np.arange(tokens.shape[1], dtype=np.int32), (len(tokens), 1))
  hidden, unembedding, _ = jax.jit(policy.apply)({}, params, tokens, positions, np.ones_like(tokens))
  logits = np.asarray(hidden, np.float64) @ np.asarray(unembedding, np.float64).T
  said = (
    logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True)) - logits.max(-1)[..., None]
  )
  return np.take_along_axis(said[:, len(prompt) - 1 : -1], tokens[:, len(prompt) :, None], -1)[..., 0]


def test_what_bfloat16_would_round_away_is_sampled_with(model):
  policy, base, factors = model
  plain = policy.base_policy()
  whole = merged(policy, base, factors, ml_dtypes.bfloat16)
  for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(base), strict=True):
    np.testing.assert_array_equal(np.asarray(one), np.asarray(other))  # Merged, nothing of the factors is left.
  assert all(np.abs(change).min() > 0 for change in deltas(policy, factors).values())

  prompt = [3, 4, 5, 6]
  sampler = Sampler(policy, TOKENIZER, prompt_buckets=(8,), response_buckets=(8,), resized=False)
  rollouts = sampler.sample(base, factors, [prompt], n=32, seed=1, step=0, max_tokens=8)
  tokens = rollouts.completion_tokens
  assert rollouts.completion_mask.all()
  exact = huggingface.describe(MODEL, ModelConfig(dtype='float32')).on(None)
  float32 = merged(policy, base, jax.tree.map(jnp.zeros_like, factors), np.float32)
  expected = log_probs(exact, merged(policy, base, factors, np.float32), tokens, prompt) - log_probs(
    exact, float32, tokens, prompt
  )
  found = rollouts.model_log_probs - log_probs(plain, base, tokens, prompt)
  # bfloat16 rounds activations too, so that single tokens differ; together they say what was added.
  assert np.corrcoef(expected.ravel(), found.ravel())[0, 1] > 0.8
  assert (found * expected).sum() / (expected**2).sum() == pytest.approx(1, abs=0.1)
