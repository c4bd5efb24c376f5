"""Exact sampling of one token per row from logits, with temperature, top-k, top-p and min-p as data, without a sort.

Top-k and top-p are thresholds on the weights exp(logit − largest), and a threshold is narrowed down over the bits of
float32, from bounds that the weights themselves give, until one token is left between two thresholds: every pass is one
elementwise reduction over the vocabulary, needs no candidate limit and stays a reduction (one small all-reduce) if the
vocabulary is sharded. Ties are broken afterwards, in the rows that have any. Without truncation none of this runs, nor
if the vocabulary is sharded and candidates of every shard, gathered once, prove the same threshold in every row. The
draw inverts the cumulative distribution with two uniforms per row (one chooses a block of tokens, one a token in it),
so that noise costs two numbers per token, not V.
"""

from __future__ import annotations

from collections.abc import Callable
import math
from typing import Any

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from sdpo_jax.distributed.mesh import FSDP, TENSOR

BLOCK = 128  # Tokens of a block of the two-level draw if no number of blocks divides the vocabulary.
BINS, CANDIDATES = 128, 4  # A shard's tokens fall into bins, and the likeliest of each bin are candidates.
SHARDS = 16  # The vocabulary may be sharded over this many devices, or a divisor of it, without splitting a block.


@flax.struct.dataclass
class SamplingParams:
  """Sampling parameters of B rows; all are data, so that training and evaluation share compiled programs."""

  temperature: jax.Array  # [B] float32; 0 = greedy, for which only stop_ids and max_tokens below matter.
  top_p: jax.Array  # [B] float32; 1 keeps all.
  top_k: jax.Array  # [B] int32; -1 or 0 keeps all.
  min_p: jax.Array  # [B] float32; 0 keeps all.
  seed: jax.Array  # [B] uint32.
  sample_id: jax.Array  # [B] int32, number of the sample in the generation batch, independent of its row.
  step: jax.Array  # [B] int32, number of the generation batch.
  max_tokens: jax.Array  # [B] int32; 0: the row is padding.
  stop_ids: jax.Array  # [B, M] int32, tokens that end the row, padded with -1.


@flax.struct.dataclass
class Draw:
  """One token drawn per row, with its log-probs and the entropy."""

  token: jax.Array  # [B] int32.
  sampling_log_prob: jax.Array  # [B] float32, of the token under the distribution drawn from; 0 where greedy.
  model_log_prob: jax.Array  # [B] float32, of the token at temperature 1 without truncation.
  entropy: jax.Array  # [B] float32, nats, of the distribution at temperature 1 without truncation.


def row_keys(params: SamplingParams) -> jax.Array:
  """Return [B] keys, one per sample: the seed with the step and the sample number folded in."""

  def key(seed: jax.Array, step: jax.Array, sample_id: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed, impl='threefry2x32'), step), sample_id)

  return jax.vmap(key)(params.seed, params.step, params.sample_id)


def noise(keys: jax.Array, position: jax.Array) -> jax.Array:
  """Return [B, 2] uint32 random bits for the completion's token `position` ([] or [B] int32), for each key [B].

  They are the key with the position folded in: one evaluation of the generator, whose output is not used elsewhere.
  """
  folded = jax.vmap(jax.random.fold_in)(keys, jnp.broadcast_to(position, keys.shape))
  return jax.random.key_data(folded)


def sample(
  logits: jax.Array,
  params: SamplingParams,
  keys: jax.Array,
  position: jax.Array,
  *,
  mesh: Mesh | None = None,
  live: jax.Array | None = None,
) -> Draw:
  """Draw one token per row.

  The order is that of transformers' warpers: temperature, top-k, top-p, min-p.

  Args:
    logits: [B, V] float32; −inf is a token that cannot be drawn.
    params: parameters of B rows.
    keys: [B] from `row_keys`.
    position: [] or [B] int32, index of the token in its completion.
    mesh: as in `truncate`.
    live: as in `truncate`.

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

  def drawn() -> tuple[jax.Array, jax.Array]:
    scaled = shifted / temperature[:, None]
    # Exponentials are recomputed only if the temperature of a row is not 1.
    weights = _where('tempered', jnp.any(temperature != 1), lambda: jnp.exp(scaled), lambda: model_weights)
    weights = truncate(scaled, params.top_k, params.top_p, params.min_p, weights=weights, mesh=mesh, live=live)
    return draw(weights, noise(keys, position)), jnp.sum(weights, axis=-1)

  def nothing_drawn() -> tuple[jax.Array, jax.Array]:
    return jnp.zeros(greedy.shape, jnp.int32), jnp.ones_like(temperature)

  token, total = _where('drawn', ~jnp.all(greedy), drawn, nothing_drawn)
  token = _where('greedy', jnp.any(greedy), lambda: jnp.where(greedy, first_argmax(shifted), token), lambda: token)
  shifted_at = jnp.take_along_axis(shifted, token[:, None], axis=-1)[:, 0]
  return Draw(
    token=token,
    sampling_log_prob=jnp.where(greedy, 0.0, shifted_at / temperature - jnp.log(total)),
    model_log_prob=shifted_at - jnp.log(model_total),
    entropy=entropy,
  )


def _where(
  case: str, holds: jax.Array, then: Callable[..., Any], otherwise: Callable[..., Any], *operands: jax.Array
) -> Any:
  """Return `lax.cond` in a scope by which the planner knows whether a run's settings make the case hold."""
  with jax.named_scope(f'if_{case}'):
    return lax.cond(holds, then, otherwise, *operands)


def first_argmax(values: jax.Array) -> jax.Array:
  """Return [B] int32, the first index of the largest of values [B, V], V at most 2 ** 24.

  Two plain reductions, which vectorise everywhere; on a CPU those of float32 far better than those of integers.
  """
  size = values.shape[-1]
  index = jnp.arange(size, dtype=jnp.float32)[None]
  first = jnp.min(jnp.where(values == jnp.max(values, axis=-1, keepdims=True), index, size - 1), axis=-1)
  return first.astype(jnp.int32)


def truncate(
  scaled: jax.Array,
  top_k: jax.Array,
  top_p: jax.Array,
  min_p: jax.Array,
  *,
  weights: jax.Array | None = None,
  mesh: Mesh | None = None,
  live: jax.Array | None = None,
) -> jax.Array:
  """Return unnormalised probabilities after truncation: exp(scaled) where a token is kept, 0 elsewhere.

  Tokens that tie with the k-th are all kept (as in transformers); of tokens that tie at the edge of top-p the first in
  the vocabulary are kept, as many as reach the mass. The most likely token is always kept.

  Args:
    scaled: [B, V] float32, log-probs or logits after temperature, shifted so that each row's largest is 0.
    top_k: [B] int32, -1 or 0 for all.
    top_p: [B] float32, 1 for all.
    min_p: [B] float32, 0 for all.
    weights: [B, V] float32, exp(scaled) if it is known already; None: it is computed.
    mesh: mesh over whose `tensor` axis the vocabulary is sharded, and over whose `fsdp` axis the rows are; None: the
      vocabulary is whole.
    live: [B] bool, rows whose result counts: others are left whole; None: all.

  Returns:
    [B, V] float32, 1 at the most likely token.
  """
  weights = jnp.exp(scaled) if weights is None else weights
  by_count = (top_k > 0) & (top_k < scaled.shape[-1])
  by_mass = top_p < 1
  if live is not None:
    by_count, by_mass = by_count & live, by_mass & live

  def cut(
    weights: jax.Array, target: jax.Array, active: jax.Array, exactly: Callable[[], jax.Array], *, by_mass: bool
  ) -> jax.Array:
    if mesh is None:
      return exactly()
    low, proven = _by_candidates(weights, target.astype(jnp.float32), active, mesh, by_mass=by_mass)
    return _where('unproven', ~jnp.all(proven), exactly, lambda: _from(weights, low, active))

  def first_by_count(weights: jax.Array) -> jax.Array:
    return cut(weights, top_k, by_count, lambda: _top_k(scaled, weights, top_k, by_count), by_mass=False)

  def first_by_mass(weights: jax.Array) -> jax.Array:
    total = jnp.sum(weights, axis=-1)
    # Positive, so that a top_p of 0 keeps the most likely token, whose weight is 1.
    target = jnp.clip(top_p * total, min=1e-30)
    spare = (1 - top_p) * total
    return cut(weights, target, by_mass, lambda: _top_p(scaled, weights, target, spare, by_mass), by_mass=True)

  weights = _where('top_k', jnp.any(by_count), first_by_count, lambda w: w, weights)
  weights = _where('top_p', jnp.any(by_mass), first_by_mass, lambda w: w, weights)
  return jnp.where(weights >= min_p[:, None], weights, 0.0)


def draw(weights: jax.Array, bits: jax.Array) -> jax.Array:
  """Draw [B] int32 tokens with probability proportional to weights [B, V] float32 ≥ 0, from bits [B, 2] uint32."""
  size = weights.shape[1]
  if size <= 2 * BLOCK:
    return _invert(weights, bits[:, 0])
  weights = _blocks(weights)
  block = _invert(jnp.sum(weights, axis=-1), bits[:, 0])
  inside = jnp.take_along_axis(weights, block[:, None, None], axis=1)[:, 0]
  return jnp.minimum(block * weights.shape[2] + _invert(inside, bits[:, 1]), size - 1)


def _blocks(weights: jax.Array) -> jax.Array:
  """Return weights [B, V] as [B, blocks, tokens of a block], padded with zeros if no suitable count divides V."""
  rows, size = weights.shape
  # Of the block counts that divide V, take the one nearest to the square root of V.
  counts = [count for count in range(SHARDS, size // SHARDS + 1, SHARDS) if size % count == 0]
  count = min(counts, key=lambda count: abs(math.log(count * count / size)), default=None)
  if count is None or not 1 / 16 < count * count / size < 16:
    count = -(-size // BLOCK)
    weights = jnp.pad(weights, ((0, 0), (0, count * BLOCK - size)))
  return weights.reshape(rows, count, -1)


def _invert(weights: jax.Array, bits: jax.Array) -> jax.Array:
  """Return [B] int32: the first index of weights [B, K] whose cumulative sum passes a uniform share of the total."""
  size = weights.shape[-1]
  cumulative = jnp.cumsum(weights, axis=-1)
  uniform = (bits >> 8).astype(jnp.float32) * 2.0**-24
  index = jnp.arange(size, dtype=jnp.int32)[None]
  positive = weights > 0
  # A parallel cumulative sum need not be monotone to the last bit; a token of weight 0 must never be chosen.
  passed = positive & (cumulative > (uniform * cumulative[:, -1])[:, None])
  first = jnp.min(jnp.where(passed, index, size), axis=-1)
  last = jnp.max(jnp.where(positive, index, 0), axis=-1)
  return jnp.where(first < size, first, last)


def _top_k(scaled: jax.Array, weights: jax.Array, top_k: jax.Array, active: jax.Array) -> jax.Array:
  """Return weights [B, V] with those that top-k drops set to 0 in the `active` rows; other rows are unchanged."""
  wanted = top_k.astype(jnp.float32)
  maxima = jnp.max(_blocks(weights), axis=-1)
  # At least top_k blocks have a maximum that reaches the bound, hence at least top_k tokens do, and not many more.
  few = active & (top_k <= maxima.shape[1])
  bound, _ = _narrow(maxima, wanted, few, jnp.zeros_like(wanted), by_mass=False)
  low, high = _narrow(weights, wanted, active, bound, by_mass=False)

  def last_by_logit() -> jax.Array:
    above, tied = weights >= high[:, None], _between(weights, low, high)
    keys = _sortable(scaled)
    edge = _largest_reaching(keys, tied.astype(jnp.float32), wanted - _count(above))
    return jnp.where(above | tied & (keys >= edge[:, None]) | ~active[:, None], weights, 0.0)

  # Tokens of weight 0 are never drawn, whether kept or not.
  several = active & (low > 0) & (_count(_between(weights, low, high)) > 1)
  return _where('tied', jnp.any(several), last_by_logit, lambda: _from(weights, low, active))


def _top_p(scaled: jax.Array, weights: jax.Array, target: jax.Array, spare: jax.Array, active: jax.Array) -> jax.Array:
  """Return weights [B, V] with those that top-p drops set to 0 in the `active` rows; other rows are unchanged.

  Target and spare, [B] float32 each, are the mass to keep, and the mass that may be left out.
  """
  size = weights.shape[1]
  # All tokens of less weight than this have together less mass than may be left out.
  bound = spare / size
  low, high = _narrow(weights, target, active, bound, by_mass=True)

  def last_by_number() -> jax.Array:
    edge, _ = _narrow(weights, target, active, low, by_mass=True, to_the_bit=True)
    above, tied = weights > edge[:, None], weights == edge[:, None]
    missing = target - jnp.sum(jnp.where(above, weights, 0.0), axis=-1)
    wanted = jnp.maximum(jnp.ceil(missing / jnp.where(edge > 0, edge, 1.0)), 1.0)
    # The same bisection, over the logits that give one weight and over reversed token numbers.
    keys = _sortable(scaled)
    least = _largest_reaching(keys, tied.astype(jnp.float32), wanted)[:, None]
    likelier, tied = tied & (keys > least), tied & (keys == least)
    rank = (size - 1 - jnp.arange(size, dtype=jnp.int32)).astype(jnp.uint32)[None]
    wanted = wanted - _count(likelier)
    cut = _largest_reaching(rank, tied.astype(jnp.float32), wanted, bits=max(size - 1, 1).bit_length())
    return jnp.where(above | likelier | tied & (rank >= cut[:, None]) | ~active[:, None], weights, 0.0)

  several = active & (_count(_between(weights, low, high)) > 1)
  return _where('tied', jnp.any(several), last_by_number, lambda: _from(weights, low, active))


def _by_candidates(
  weights: jax.Array, target: jax.Array, active: jax.Array, mesh: Mesh, *, by_mass: bool
) -> tuple[jax.Array, jax.Array]:
  """Return [B] float32 and [B] bool: from which weight on tokens are kept, and in which rows this is proven.

  In such a row one token, alone with its weight, decides whether the target is reached, in whatever order weights are
  added up. Hence `_top_k` and `_top_p`, which add up those of the whole vocabulary, keep the same tokens to the last.

  Args:
    weights: [B, V] float32 from 0 to 1, sharded over both axes of the mesh.
    target: [B] float32, see `_narrow`.
    active: [B] bool; other rows need no proof.
    mesh: see `truncate`.
    by_mass: see `_narrow`.
  """

  def in_each_shard(weights: jax.Array, target: jax.Array, active: jax.Array) -> tuple[jax.Array, jax.Array]:
    rows, size = weights.shape
    bins = jnp.pad(weights, ((0, 0), (0, -size % BINS))).reshape(rows, -1, BINS)
    found, missed, largest = [], jnp.zeros((rows, 1, BINS)), jnp.max(bins, axis=1, keepdims=True)
    for _ in range(CANDIDATES):
      found.append(largest)
      several = jnp.sum((bins == largest).astype(jnp.float32), axis=1, keepdims=True) > 1
      missed = jnp.where(several, jnp.maximum(missed, largest), missed)
      largest = jnp.max(jnp.where(bins < largest, bins, 0.0), axis=1, keepdims=True)
    # No token that is not a candidate weighs more than the last of these.
    found.append(jnp.maximum(missed, largest))
    gathered = lax.all_gather(jnp.concatenate(found, axis=1), TENSOR, axis=2)
    candidates, missed = gathered[:, :-1].reshape(rows, -1), jnp.max(gathered[:, -1], axis=(1, 2))

    def reach(chosen: jax.Array) -> jax.Array:
      return jnp.sum(jnp.where(chosen, candidates if by_mass else 1.0, 0.0), axis=-1)

    enough = active & (reach(candidates > missed[:, None]) >= target)
    # The first guess is a common weight at the edge of top-p.
    low, high = _narrow(candidates, target, enough, jnp.full_like(target, 2.0**-10), by_mass=by_mass)
    kept, above = candidates >= low[:, None], candidates >= high[:, None]
    # The rounded sum of n terms ≥ 0, in any order and with any zeros between them, is off by at most (n − 1) · 2 ** -24
    # of the true sum, and two by twice that from each other. The rest is for rounding here. Counts are exact.
    slack = _count(kept) * (2.0**-23 if by_mass else 0.0)
    proven = (reach(kept) * (1 - slack) >= target) & (reach(above) * (1 + slack) < target)
    proven &= (low > missed) & (_count(kept & ~above) == 1)
    return low, proven | ~active

  rows = PartitionSpec(FSDP)
  return jax.shard_map(
    in_each_shard, mesh=mesh, in_specs=(PartitionSpec(FSDP, TENSOR), rows, rows), out_specs=rows, check_vma=False
  )(weights, target, active)


def _between(weights: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
  return (weights >= low[:, None]) & (weights < high[:, None])


def _from(weights: jax.Array, low: jax.Array, active: jax.Array) -> jax.Array:
  return jnp.where(weights >= jnp.where(active, low, 0.0)[:, None], weights, 0.0)


def _narrow(
  weights: jax.Array,
  target: jax.Array,
  active: jax.Array,
  bound: jax.Array,
  *,
  by_mass: bool,
  to_the_bit: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """Return [B] float32 each, low < high: tokens of weight ≥ low reach the target, tokens of weight ≥ high do not.

  Args:
    weights: [B, V] float32 from 0 to 1. Their sum in a fixed order never grows when one of them is left out, so the
      rounded sums are monotone and the result is exact for them.
    target: [B] float32, positive, at most the total of all tokens.
    active: [B] bool, rows to process.
    bound: [B] float32, a first guess of low; most useful if it is large but not too large.
    by_mass: whether the target is a sum of weights; else it is a number of tokens.
    to_the_bit: continue until low is the largest possible value; else until, according to the rounded sums, one token
      lies between the two.
  """

  def as_float(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)

  def as_bits(values: jax.Array) -> jax.Array:  # In the order of floats that are ≥ 0.
    return lax.bitcast_convert_type(values, jnp.int32)

  def reach(low: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(weights >= as_float(low)[:, None], weights if by_mass else 1.0, 0.0), axis=-1)

  def unit(low: jax.Array) -> jax.Array | float:  # Minimum that one token between the two adds.
    return as_float(low) if by_mass else 1.0

  def unfinished(state: tuple[jax.Array, ...]) -> jax.Array:
    low, high, mass_low, mass_high, _ = state
    divisible = high - low > 1
    if not to_the_bit:
      divisible &= mass_low - mass_high > 1.5 * unit(low)
    return active & divisible

  def narrow(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    low, high, mass_low, mass_high, passes = state
    # Many tokens in a short interval are spread evenly, so that the threshold is near the point where a line meets the
    # target; alternate passes try a little below and a little above that point.
    gap, width = mass_low - mass_high, high - low
    near = (mass_low - target) / gap
    doubt = 0.7 * lax.rsqrt(gap / unit(low)) + 0.05 * width.astype(jnp.float32) * 2.0**-23
    aside = jnp.clip(near + jnp.where(passes % 2 == 0, doubt, -doubt), doubt / 2, 1 - doubt / 2)
    on_line = low + (aside * width.astype(jnp.float32)).astype(jnp.int32)
    trial = jnp.where((doubt < 0.25) & (passes < 14), on_line, low + width // 2)
    trial = jnp.clip(jnp.where(passes == 0, as_bits(bound), trial), low + 1, high - 1)
    mass = reach(trial)
    raise_low, lower_high = unfinished(state) & (mass >= target), unfinished(state) & (mass < target)
    return (
      jnp.where(raise_low, trial, low),
      jnp.where(lower_high, trial, high),
      jnp.where(raise_low, mass, mass_low),
      jnp.where(lower_high, mass, mass_high),
      passes + 1,
    )

  nothing = jnp.zeros_like(target)
  low, high = as_bits(nothing), as_bits(jnp.ones_like(target)) + 1
  state = low, high, jnp.full_like(target, jnp.inf), nothing, jnp.zeros((), jnp.int32)
  with jax.named_scope('about_10'):  # Passes, for the planner.
    low, high, *_ = lax.while_loop(lambda state: jnp.any(unfinished(state)), narrow, state)
  return as_float(low), as_float(high)


def _count(chosen: jax.Array) -> jax.Array:
  """Return the number of chosen tokens, [B] float32, exact up to 2 ** 24."""
  return jnp.sum(chosen.astype(jnp.float32), axis=-1)


def _sortable(values: jax.Array) -> jax.Array:
  """Return uint32 keys that sort like the float32 `values`; −0 and 0 are equal."""
  bits = lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.uint32)
  sign = jnp.uint32(1 << 31)
  return jnp.where(bits >= sign, ~bits, bits | sign)


def _largest_reaching(keys: jax.Array, weights: jax.Array, target: jax.Array, bits: int = 32) -> jax.Array:
  """Return [B] uint32: the largest t with sum(weights[keys ≥ t]) ≥ target, 0 if there is none, found bit by bit.

  Args:
    keys: [B or 1, V] uint32 below 2 ** bits.
    weights: [B, V] float32 ≥ 0. Their sum in a fixed order never grows when one of them shrinks, so the rounded sums
      are monotone and the result is exact for them.
    target: [B] float32.
    bits: static, number of bits of the keys.
  """

  def narrow(i: jax.Array, edge: jax.Array) -> jax.Array:
    trial = edge | (jnp.uint32(1) << (bits - 1 - i).astype(jnp.uint32))
    mass = jnp.sum(jnp.where(keys >= trial[:, None], weights, 0.0), axis=-1)
    return jnp.where(mass >= target, trial, edge)

  return lax.fori_loop(0, bits, narrow, jnp.zeros(target.shape, jnp.uint32))
