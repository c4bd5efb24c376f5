"""Drawing one token a row from logits: temperature, top-k, top-p and min-p as data, exact, without a sort.

Top-k and top-p are thresholds on the logits, and a threshold is found by bisection over the 32 bits of an
order-preserving integer image of float32: every pass is one elementwise reduction over the vocabulary, which costs the
same for any k and p, needs no candidate limit and stays a reduction (one small all-reduce) where the vocabulary is
sharded. Without truncation nothing of it runs. The draw inverts the cumulative distribution with two uniforms a row
(one chooses a block of the vocabulary, one a token in it), so that noise costs two numbers a token, not V.
"""

from __future__ import annotations

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp

BLOCK = 128  # Tokens of a block of the two-level draw: the lane width of a TPU.


@flax.struct.dataclass
class SamplingParams:
  """How each of B rows is sampled; all of it is data, so that one compiled program serves training and evaluation."""

  temperature: jax.Array  # [B] float32; 0 = greedy, and then nothing below but stop_ids and max_tokens matters.
  top_p: jax.Array  # [B] float32; 1 keeps all.
  top_k: jax.Array  # [B] int32; -1 or 0 keeps all.
  min_p: jax.Array  # [B] float32; 0 keeps all.
  seed: jax.Array  # [B] uint32.
  sample_id: jax.Array  # [B] int32, number of the sample in the generation batch, wherever its row is computed.
  step: jax.Array  # [] int32, number of the generation batch.
  max_tokens: jax.Array  # [B] int32; 0: the row is padding.
  stop_ids: jax.Array  # [B, M] int32, tokens that end the row, padded with -1.


@flax.struct.dataclass
class Draw:
  """One token a row and what was known when it was drawn."""

  token: jax.Array  # [B] int32.
  sampling_log_prob: jax.Array  # [B] float32, of the token under the distribution drawn from; 0 where greedy.
  model_log_prob: jax.Array  # [B] float32, of the token at temperature 1 without truncation.
  entropy: jax.Array  # [B] float32, nats, of the distribution at temperature 1 without truncation.


def row_keys(params: SamplingParams) -> jax.Array:
  """[B] keys, one a sample: the seed with the step and the sample number folded in."""

  def key(seed: jax.Array, sample_id: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed, impl='threefry2x32'), params.step), sample_id)

  return jax.vmap(key)(params.seed, params.sample_id)


def noise(keys: jax.Array, position: jax.Array) -> jax.Array:
  """[B, 2] uint32 random bits of the completion's token `position` ([] int32) for each key [B].

  They are the key with the position folded in: one evaluation of the generator, whose output nothing else uses.
  """
  return jax.vmap(lambda key: jax.random.key_data(jax.random.fold_in(key, position)))(keys)


def sample(logits: jax.Array, params: SamplingParams, keys: jax.Array, position: jax.Array) -> Draw:
  """Draws one token a row.

  The order is that of transformers' warpers: temperature, top-k, top-p, min-p.

  Args:
    logits: [B, V] float32; −inf is a token that cannot be drawn.
    params: of B rows.
    keys: [B] from `row_keys`.
    position: [] int32, index of the token in its completion.

  Returns:
    The tokens with their log-probs.
  """
  logits = logits.astype(jnp.float32)
  shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
  model_weights = jnp.exp(shifted)
  model_total = jnp.sum(model_weights, axis=-1)
  # A token of weight 0 may have a logit of −inf, and contributes nothing.
  moment = jnp.sum(jnp.where(model_weights > 0, model_weights * shifted, 0.0), axis=-1)
  entropy = jnp.log(model_total) - moment / model_total

  greedy = params.temperature <= 0
  temperature = jnp.where(greedy, 1.0, params.temperature)
  scaled = shifted / temperature[:, None]
  weights = truncate(scaled, params.top_k, params.top_p, params.min_p)
  drawn = draw(weights, noise(keys, position))
  token = lax.cond(jnp.any(greedy), lambda: jnp.where(greedy, first_argmax(shifted), drawn), lambda: drawn)
  at = token[:, None]
  shifted_at = jnp.take_along_axis(shifted, at, axis=-1)[:, 0]
  return Draw(
    token=token,
    sampling_log_prob=jnp.where(greedy, 0.0, shifted_at / temperature - jnp.log(jnp.sum(weights, axis=-1))),
    model_log_prob=shifted_at - jnp.log(model_total),
    entropy=entropy,
  )


def first_argmax(values: jax.Array) -> jax.Array:
  """[B] int32, the first index of the largest of values [B, V] (two plain reductions, which vectorise everywhere)."""
  size = values.shape[-1]
  index = jnp.arange(size, dtype=jnp.int32)[None]
  first = jnp.min(jnp.where(values == jnp.max(values, axis=-1, keepdims=True), index, size), axis=-1)
  return jnp.minimum(first, size - 1)


def truncate(scaled: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
  """Unnormalised probabilities after truncation: exp(scaled) where a token is kept, 0 elsewhere.

  Tokens that tie with the k-th are all kept (as in transformers); of tokens that tie at the edge of top-p the first in
  the vocabulary are kept, as many as reach the mass. The most likely token is always kept.

  Args:
    scaled: [B, V] float32, log-probs or logits after temperature, shifted so that each row's largest is 0.
    top_k: [B] int32, -1 or 0 for all.
    top_p: [B] float32, 1 for all.
    min_p: [B] float32, 0 for all.

  Returns:
    [B, V] float32, 1 at the most likely token.
  """
  weights = jnp.exp(scaled)
  size = scaled.shape[-1]
  by_count = (top_k > 0) & (top_k < size)
  by_mass = top_p < 1
  weights = lax.cond(
    jnp.any(by_count), lambda w: jnp.where(by_count[:, None], _top_k(scaled, w, top_k), w), lambda w: w, weights
  )
  weights = lax.cond(
    jnp.any(by_mass), lambda w: jnp.where(by_mass[:, None], _top_p(scaled, w, top_p), w), lambda w: w, weights
  )
  return jnp.where(weights >= min_p[:, None], weights, 0.0)


def draw(weights: jax.Array, bits: jax.Array) -> jax.Array:
  """[B] int32 tokens drawn with probability proportional to weights [B, V] float32 ≥ 0, from bits [B, 2] uint32."""
  rows, size = weights.shape
  if size <= 2 * BLOCK:
    return _invert(weights, bits[:, 0])
  blocks = -(-size // BLOCK)
  if size % BLOCK:
    weights = jnp.pad(weights, ((0, 0), (0, blocks * BLOCK - size)))
  weights = weights.reshape(rows, blocks, BLOCK)
  block = _invert(jnp.sum(weights, axis=-1), bits[:, 0])
  inside = jnp.take_along_axis(weights, block[:, None, None], axis=1)[:, 0]
  return jnp.minimum(block * BLOCK + _invert(inside, bits[:, 1]), size - 1)


def _invert(weights: jax.Array, bits: jax.Array) -> jax.Array:
  """[B] int32: the first index of weights [B, K] at which the cumulative sum passes a uniform share of the total."""
  size = weights.shape[-1]
  cumulative = jnp.cumsum(weights, axis=-1)
  uniform = (bits >> 8).astype(jnp.float32) * 2.0**-24
  index = jnp.arange(size, dtype=jnp.int32)[None]
  positive = weights > 0
  # A parallel cumulative sum need not be monotone to the last bit: a token without weight is never chosen.
  passed = positive & (cumulative > (uniform * cumulative[:, -1])[:, None])
  first = jnp.min(jnp.where(passed, index, size), axis=-1)
  last = jnp.max(jnp.where(positive, index, 0), axis=-1)
  return jnp.where(first < size, first, last)


def _top_k(scaled: jax.Array, weights: jax.Array, top_k: jax.Array) -> jax.Array:
  keys = _sortable(scaled)
  edge = _largest_reaching(keys, jnp.ones_like(weights), top_k.astype(jnp.float32))
  return jnp.where(keys >= edge[:, None], weights, 0.0)


def _top_p(scaled: jax.Array, weights: jax.Array, top_p: jax.Array) -> jax.Array:
  keys = _sortable(scaled)
  # Positive, so that a top_p of 0 keeps the most likely token, whose weight is 1.
  target = jnp.clip(top_p * jnp.sum(weights, axis=-1), min=1e-30)
  edge = _largest_reaching(keys, weights, target)
  above, tied = keys > edge[:, None], keys == edge[:, None]
  tied_weight = jnp.max(jnp.where(tied, weights, 0.0), axis=-1)
  missing = target - jnp.sum(jnp.where(above, weights, 0.0), axis=-1)
  wanted = jnp.maximum(jnp.ceil(missing / jnp.where(tied_weight > 0, tied_weight, 1.0)), 1.0)
  excess = jnp.sum(tied.astype(jnp.float32), axis=-1) > wanted

  def first_tied() -> jax.Array:
    # The same bisection, over reversed token numbers.
    size = scaled.shape[-1]
    rank = (size - 1 - jnp.arange(size, dtype=jnp.int32)).astype(jnp.uint32)[None]
    cut = _largest_reaching(rank, tied.astype(jnp.float32), wanted, bits=max(size - 1, 1).bit_length())
    return tied & (rank >= cut[:, None])

  kept = lax.cond(jnp.any(excess), first_tied, lambda: tied)
  return jnp.where(above | kept, weights, 0.0)


def _sortable(values: jax.Array) -> jax.Array:
  """uint32 in the order of the float32 `values`; the two zeros are one."""
  bits = lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.uint32)
  sign = jnp.uint32(1 << 31)
  return jnp.where(bits >= sign, ~bits, bits | sign)


def _largest_reaching(keys: jax.Array, weights: jax.Array, target: jax.Array, bits: int = 32) -> jax.Array:
  """[B] uint32: the largest t with sum(weights[keys ≥ t]) ≥ target, 0 if there is none, found bit by bit.

  Args:
    keys: [B or 1, V] uint32 below 2 ** bits.
    weights: [B, V] float32 ≥ 0. A sum of them in a fixed order never grows when one of them shrinks, so that the
      rounded sums are monotone and the result is exact for them.
    target: [B] float32.
    bits: static.
  """

  def narrow(i: jax.Array, edge: jax.Array) -> jax.Array:
    trial = edge | (jnp.uint32(1) << (bits - 1 - i).astype(jnp.uint32))
    mass = jnp.sum(jnp.where(keys >= trial[:, None], weights, 0.0), axis=-1)
    return jnp.where(mass >= target, trial, edge)

  return lax.fori_loop(0, bits, narrow, jnp.zeros(target.shape, jnp.uint32))
