"""Log-probabilities of targets, of arbitrary ids and of the most likely tokens, computed in chunks of tokens.

Gradients flow only through `log_probs_of_ids`. Ids outside the vocabulary (negative, or V and more) are left out: they
get `divergences.log_floor`, so that nothing is infinite, and no gradient. Letters: B rows, T tokens, M ids per token,
K most likely tokens, V entries that are tokens among the R of an unembedding, D model width; N tokens of a device; C
tokens of a chunk in a group of devices that share a vocabulary, c of them on each.
"""

from __future__ import annotations

import functools

import chex
import flax.struct
import jax
from jax import lax
import jax.numpy as jnp

from sdpo_jax.objective import divergences, vocabulary
from sdpo_jax.objective.chunks import PassSettings, over_active_tokens
from sdpo_jax.objective.sharded import DeviceResult, Layout

# Tokens handled at a time if the logits of all their K candidates, or the gradient by them, are in memory, too.
CHUNK = 256


@functools.partial(jax.jit, static_argnames=('chunk_size', 'vocab_block', 'vocab_size', 'layout'))
def token_log_probs(
  hidden: jax.Array,
  unembedding: jax.Array,
  targets: jax.Array,
  temperature: float | jax.Array = 1.0,
  chunk_size: int = 1024,
  mask: jax.Array | None = None,
  vocab_block: int | None = None,
  *,
  vocab_size: int | None = None,
  layout: Layout | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Return the log-probability of each target and the entropy of its distribution; no gradient flows.

  Args:
    hidden: [B, T, D] final hidden states.
    unembedding: [R, D].
    targets: [B, T] int32.
    temperature: divides the logits; positive, [] or [B].
    chunk_size: tokens handled at a time; any size works.
    mask: [B, T], 0 at tokens to skip, which cost nothing and give 0; None: no token is skipped.
    vocab_block: vocabulary entries whose logits exist at a time; None: `vocabulary.default_block`.
    vocab_size: V, entries of the unembedding that are tokens, the first ones; None: all.
    layout: where the arguments lie on a mesh; None: one device.

  Returns:
    log-probabilities and entropies [B, T] in nats, at least float32. A target of −inf logit has
    `divergences.log_floor`.
  """
  _check(hidden, unembedding, targets, temperature, mask)
  settings = PassSettings.of(vocab_size or len(unembedding), layout, vocab_block, chunk_size=chunk_size)
  log_probs, entropy = _scores(settings, hidden, unembedding, targets, temperature, mask)
  return log_probs.reshape(targets.shape), entropy.reshape(targets.shape)


@flax.struct.dataclass
class Scores:
  """Log-probs and entropies of a policy, in nats, at least float32; 0 where the mask is 0."""

  log_prob: jax.Array  # [B, T] of the targets.
  entropy: jax.Array  # [B, T].
  top_ids: jax.Array  # [B, T, K] int32, the most likely first, ties in the order of ids; −1: no more tokens.
  top_log_probs: jax.Array  # [B, T, K] of these.


@functools.partial(jax.jit, static_argnames=('k', 'chunk_size', 'vocab_block', 'topk_method', 'vocab_size', 'layout'))
def scores(
  hidden: jax.Array,
  unembedding: jax.Array,
  targets: jax.Array,
  k: int,
  temperature: float | jax.Array = 1.0,
  chunk_size: int = CHUNK,
  mask: jax.Array | None = None,
  vocab_block: int | None = None,
  topk_method: str = 'exact',
  *,
  vocab_size: int | None = None,
  layout: Layout | None = None,
) -> Scores:
  """Return log-probs and entropies as `token_log_probs`, and the K most likely tokens at every position; no gradient.

  A token whose logit is −inf is not among the most likely; as a target, its log-prob is `divergences.log_floor`.

  Args:
    hidden: [B, T, D] final hidden states.
    unembedding: [R, D].
    targets: [B, T] int32.
    k: K, which may exceed the vocabulary.
    temperature: divides the logits; positive, [] or [B].
    chunk_size: tokens handled at a time; any size works.
    mask: [B, T], 0 at tokens to skip, which cost nothing; None: no token is skipped.
    vocab_block: vocabulary entries handled at a time; None: `vocabulary.default_block`.
    topk_method: 'exact' or 'approx': `top_k.top_k`.
    vocab_size: V, entries of the unembedding that are tokens, the first ones; None: all.
    layout: where the arguments lie on a mesh; None: one device.

  Raises:
    ValueError: k is not positive.
  """
  _check(hidden, unembedding, targets, temperature, mask)
  if k <= 0:
    raise ValueError(f'k must be positive, not {k}.')
  vocab_size = vocab_size or len(unembedding)
  settings = PassSettings.of(vocab_size, layout, vocab_block, chunk_size=chunk_size, topk=k, topk_method=topk_method)
  found = _scores(settings, hidden, unembedding, targets, temperature, mask)
  return Scores(*(value.reshape(*targets.shape, *value.shape[1:]) for value in found))


@functools.partial(jax.jit, static_argnames=('chunk_size', 'vocab_block', 'vocab_size', 'layout'))
def log_probs_of_ids(
  hidden: jax.Array,
  unembedding: jax.Array,
  ids: jax.Array,
  temperature: float | jax.Array = 1.0,
  chunk_size: int = CHUNK,
  mask: jax.Array | None = None,
  vocab_block: int | None = None,
  *,
  vocab_size: int | None = None,
  layout: Layout | None = None,
) -> jax.Array:
  """Return the log-probs [B, T, M] of ids, differentiable by hidden states and unembedding, in reverse mode.

  The backward pass recomputes the logits of each chunk. If the unembedding is not differentiated, neither the product
  nor the memory of its gradient is spent.

  Args:
    hidden: [B, T, D] final hidden states.
    unembedding: [R, D].
    ids: [B, T, M] int32; an id may occur more than once. Ids outside the vocabulary are left out.
    temperature: divides the logits; positive, [] or [B]. It gets no gradient.
    chunk_size: tokens handled at a time; any size works.
    mask: [B, T], 0 at tokens to skip, which cost nothing and give 0; None: no token is skipped.
    vocab_block: vocabulary entries handled at a time; None: `vocabulary.default_block`.
    vocab_size: V, entries of the unembedding that are tokens, the first ones; None: all.
    layout: where the arguments lie on a mesh; None: one device.

  Returns:
    nats, at least float32. An id of −inf logit has `divergences.log_floor`, and no gradient.
  """
  chex.assert_rank(ids, 3)
  _check(hidden, unembedding, ids[..., 0], temperature, mask)
  settings = PassSettings.of(vocab_size or len(unembedding), layout, vocab_block, chunk_size=chunk_size)
  tokens = _tokens(ids, temperature, mask)
  unembedding = settings.padded(unembedding)
  found = _of_ids(settings, hidden.reshape(-1, hidden.shape[-1]), unembedding, tokens)
  return found.reshape(ids.shape)


# ---------------------------------------------------------------------------------------------------------------------
# Arguments
# ---------------------------------------------------------------------------------------------------------------------


def _check(hidden, unembedding, targets, temperature, mask) -> None:
  """Check the shapes and types of hidden [B, T, D], unembedding [R, D], targets [B, T], temperature [] or [B]."""
  chex.assert_rank([hidden, unembedding, targets], [3, 2, 2])
  chex.assert_equal_shape_prefix([hidden, targets], 2)
  chex.assert_equal_shape_suffix([hidden, unembedding], 1)
  chex.assert_type([hidden, unembedding, targets], [float, float, int])
  chex.assert_shape(temperature, targets.shape[:1] if jnp.ndim(temperature) else ())
  if mask is not None:
    chex.assert_equal_shape([targets, mask])


@flax.struct.dataclass
class _Tokens:
  """Per-token arguments of the caller."""

  ids: jax.Array  # [N, M] int32.
  mask: jax.Array  # [N].
  temperature: jax.Array  # [N].


def _tokens(ids: jax.Array, temperature: float | jax.Array, mask: jax.Array | None) -> _Tokens:
  """Return per-token arguments [B, T, …] as [B·T, …]."""
  rows, length = ids.shape[:2]
  temperature = jnp.asarray(temperature, jnp.result_type(float))
  each = jnp.broadcast_to(temperature[:, None] if temperature.ndim else temperature, (rows, length))
  mask = jnp.ones(rows * length, bool) if mask is None else mask.reshape(-1)
  return _Tokens(ids.reshape(rows * length, -1), mask, each.reshape(-1))


# ---------------------------------------------------------------------------------------------------------------------
# Tokens and the most likely ones
# ---------------------------------------------------------------------------------------------------------------------


def _scores(settings: PassSettings, hidden, unembedding, targets, temperature, mask) -> tuple[jax.Array, ...]:
  """Return log-probs and entropies [N] of targets, and with `topk` the most likely ids and their log-probs [N, K]."""
  dtype = vocabulary.logits_dtype(hidden)
  unembedding = settings.padded(unembedding)
  hidden = lax.stop_gradient(hidden).reshape(-1, hidden.shape[-1])
  tokens, shared = (targets.reshape(-1), jnp.ones(targets.size, bool) if mask is None else mask.reshape(-1)), ()
  if jnp.ndim(temperature):
    own = jnp.broadcast_to(jnp.asarray(temperature, dtype)[:, None], targets.shape)
    tokens = *tokens, own.reshape(-1)
  else:
    shared = jnp.asarray(temperature, dtype)
  return settings.over_devices(
    functools.partial(_scores_here, settings),
    hidden,
    lax.stop_gradient(unembedding),
    tokens,
    shared,
  ).per_token


def _scores_here(settings: PassSettings, hidden, unembedding, tokens, temperature) -> DeviceResult:
  """Return `_scores` for a device's own tokens: hidden [n, D], tokens (targets [n], mask [n], own temperature [n])."""
  targets, mask, *own_temperature = tokens
  dtype, shard = vocabulary.logits_dtype(hidden), settings.shard

  def of_chunk(carry, operands, valid):
    hidden, targets, *own_temperature = operands
    hidden, targets = shard.gather(jnp.where(valid[:, None], hidden, 0)), shard.gather(targets)
    divisor = temperature
    if own_temperature:
      divisor = shard.gather(jnp.where(valid, own_temperature[0], 1))[:, None]
    scan = vocabulary.scan_vocabulary(
      shard,
      vocabulary.logits_of_blocks(hidden, unembedding, divisor),
      len(targets),
      unembedding.shape[0],
      settings.vocab_block,
      dtype,
      ids=targets[:, None],
      topk=None if settings.topk is None else min(settings.topk, shard.vocab_size),
      topk_method=settings.topk_method,
    )
    logits = shard.own_total(scan.gathered)[:, 0]
    own_normaliser = shard.own(scan.statistics.log_normaliser)
    found = divergences.floored(logits - own_normaliser), shard.own(scan.statistics.entropy)
    if settings.topk is not None:
      found += _most_likely(settings, scan.largest, own_normaliser)
    return carry, found

  zeros = jnp.zeros(targets.shape, dtype)
  outputs = zeros, zeros
  if settings.topk is not None:
    wide = jnp.zeros((len(targets), settings.topk), dtype)
    outputs += wide.astype(jnp.int32), wide
  operands = hidden, targets, *own_temperature
  _, outputs = over_active_tokens(mask, settings.chunk_size, operands, outputs, (), of_chunk, settings.lockstep_axes)
  return DeviceResult(sums=(), per_token=outputs)


def _most_likely(settings: PassSettings, largest, own_normaliser) -> tuple[jax.Array, jax.Array]:
  """Return ids and log-probs [c, K] of the most likely tokens, from the largest logits of each part."""
  values, ids = vocabulary.largest_of_all(settings.shard, largest, min(settings.topk, settings.shard.vocab_size))
  log_probs = values - own_normaliser[:, None]
  ids = jnp.where(jnp.isneginf(values), -1, ids)
  missing = ((0, 0), (0, settings.topk - ids.shape[1]))
  ids, log_probs = jnp.pad(ids, missing, constant_values=-1), jnp.pad(log_probs, missing, constant_values=-jnp.inf)
  return ids, divergences.floored(log_probs)


# ---------------------------------------------------------------------------------------------------------------------
# Ids, and their gradient
# ---------------------------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _of_ids(settings: PassSettings, hidden, unembedding, tokens):
  return _of_ids_and_normaliser(settings, hidden, unembedding, tokens)[0]


def _of_ids_fwd(settings: PassSettings, hidden, unembedding, tokens):
  wanted = hidden.perturbed, unembedding.perturbed
  hidden, unembedding, tokens = jax.tree.map(lambda x: x.value, (hidden, unembedding, tokens))
  log_probs, live, normaliser = _of_ids_and_normaliser(settings, hidden, unembedding, tokens)
  # Residuals must be arrays, so empty ones mark which gradients are wanted.
  flags = tuple(jnp.zeros(0) if each else None for each in wanted)
  return log_probs, (flags, hidden, unembedding, tokens, live, normaliser)


def _of_ids_bwd(settings: PassSettings, residuals, cotangent):
  if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
    return None, None, None
  flags, hidden, unembedding, tokens, live, normaliser = residuals
  evaluate = functools.partial(_gradient_here, settings, tuple(flag is not None for flag in flags))
  slopes = jnp.where(live, cotangent, 0)
  result = settings.over_devices(evaluate, hidden, unembedding, (tokens, slopes, normaliser), ())
  by_unembedding = result.by_unembedding
  return result.per_token, None if by_unembedding is None else by_unembedding.astype(unembedding.dtype), None


_of_ids.defvjp(_of_ids_fwd, _of_ids_bwd, symbolic_zeros=True)


def _of_ids_and_normaliser(settings: PassSettings, hidden, unembedding, tokens) -> tuple[jax.Array, ...]:
  """Return log-probs [N, M], whether each id has a nonzero probability [N, M] bool, and normalisers [N]."""
  evaluate = functools.partial(_of_ids_here, settings)
  return settings.over_devices(evaluate, hidden, unembedding, tokens, ()).per_token


def _logits_of_group(settings: PassSettings, hidden, unembedding, temperature, valid):
  """Return the group's states [C, D] and temperatures [C, 1], and a function that gives logits by blocks."""
  dtype, shard = vocabulary.logits_dtype(hidden), settings.shard
  hidden = shard.gather(jnp.where(valid[:, None], hidden, 0))
  divisor = shard.gather(jnp.where(valid, temperature, 1).astype(dtype))[:, None]
  return hidden, divisor, vocabulary.logits_of_blocks(hidden, unembedding, divisor)


def _of_ids_here(settings: PassSettings, hidden, unembedding, tokens, shared) -> DeviceResult:
  del shared
  dtype, shard = vocabulary.logits_dtype(hidden), settings.shard

  def of_chunk(carry, operands, valid):
    hidden, ids, temperature = operands
    hidden, _, logits_of = _logits_of_group(settings, hidden, unembedding, temperature, valid)
    inside = (ids >= 0) & (ids < shard.vocab_size)
    scan = vocabulary.scan_vocabulary(
      shard,
      logits_of,
      len(hidden),
      unembedding.shape[0],
      settings.vocab_block,
      dtype,
      ids=shard.gather(jnp.where(inside, ids, 0)),
    )
    normaliser = shard.own(scan.statistics.log_normaliser)
    log_probs = jnp.where(inside, shard.own_total(scan.gathered) - normaliser[:, None], -jnp.inf)
    return carry, (divergences.floored(log_probs), ~jnp.isneginf(log_probs), normaliser)

  wide = jnp.zeros(tokens.ids.shape, dtype)
  operands, outputs = (hidden, tokens.ids, tokens.temperature), (wide, wide > 0, jnp.zeros(len(hidden), dtype))
  _, outputs = over_active_tokens(
    tokens.mask, settings.chunk_size, operands, outputs, (), of_chunk, settings.lockstep_axes
  )
  return DeviceResult(sums=(), per_token=outputs)


def _gradient_here(settings: PassSettings, wanted, hidden, unembedding, tokens, shared) -> DeviceResult:
  """Return the gradients by a device's own hidden states [n, D] and by its part of the unembedding, where wanted.

  The gradient by the logit of v is Σ_m slope_m·(1[v = id_m] − p_v).
  """
  del shared
  dtype, shard = vocabulary.logits_dtype(hidden), settings.shard
  tokens, slopes, normaliser = tokens

  def of_chunk(accumulator, operands, valid):
    hidden, ids, temperature, slopes, normaliser = operands
    hidden, divisor, logits_of = _logits_of_group(settings, hidden, unembedding, temperature, valid)
    slopes = shard.gather(jnp.where(valid[:, None], slopes, 0))
    normaliser = shard.gather(jnp.where(valid, normaliser, 0))[:, None]
    places = shard.gather(ids) - shard.offset(unembedding.shape[0])
    total = slopes.sum(-1, keepdims=True)

    def gradients_of(start, size):
      gradients = -jnp.exp(logits_of(start, size) - normaliser) * total
      return vocabulary.scatter_add(gradients, places - start, slopes) / divisor

    by_hidden, accumulator = vocabulary.pull_back(
      gradients_of,
      hidden,
      unembedding,
      settings.vocab_block,
      shard.limit(unembedding.shape[0]),
      wanted[0],
      accumulator,
    )
    return accumulator, None if by_hidden is None else shard.own_total(by_hidden)

  accumulator, by_hidden = over_active_tokens(
    tokens.mask,
    settings.chunk_size,
    (hidden, tokens.ids, tokens.temperature, slopes, normaliser),
    jnp.zeros(hidden.shape, hidden.dtype) if wanted[0] else None,
    jnp.zeros(unembedding.shape, dtype) if wanted[1] else None,
    of_chunk,
    settings.lockstep_axes,
  )
  return DeviceResult(sums=(), per_token=by_hidden, by_unembedding=accumulator)
