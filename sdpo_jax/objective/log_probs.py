"""Log-probabilities of given tokens, forward only."""

from __future__ import annotations

import functools

import chex
import jax
from jax import lax
import jax.numpy as jnp

from sdpo_jax.objective import divergences, vocabulary
from sdpo_jax.objective.chunks import over_active_tokens
from sdpo_jax.objective.sharded import DeviceResult, Layout, VocabShard, over_devices


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
    temperature: divides the logits; positive.
    chunk_size: tokens handled at a time; any size works.
    mask: [B, T], 0 where nothing is wanted (these cost nothing and give 0); None: everywhere.
    vocab_block: vocabulary entries whose logits exist at a time; None: `vocabulary.default_block`.
    vocab_size: V, entries of the unembedding that are tokens, the first ones; None: all.
    layout: where the arguments lie on a mesh; None: one device.

  Returns:
    log-probabilities and entropies [B, T] in nats, at least float32. A target of −inf logit has
    `divergences.log_floor`.
  """
  chex.assert_rank([hidden, unembedding, targets, temperature], [3, 2, 2, 0])
  chex.assert_equal_shape_prefix([hidden, targets], 2)
  chex.assert_equal_shape_suffix([hidden, unembedding], 1)
  chex.assert_type([hidden, unembedding, targets], [float, float, int])
  if mask is not None:
    chex.assert_equal_shape([targets, mask])
  dtype = vocabulary.logits_dtype(hidden)
  if layout is None:
    shard = VocabShard(vocab_size or unembedding.shape[0])
  else:
    shard = layout.shard(vocab_size or unembedding.shape[0])
    unembedding = layout.padded(unembedding)
  evaluate = functools.partial(
    _evaluate_here,
    shard,
    chunk_size,
    vocab_block or vocabulary.default_block(None if layout is None else layout.platform),
    () if layout is None else layout.batch_axes,
  )
  hidden = lax.stop_gradient(hidden).reshape(-1, hidden.shape[-1])
  tokens = targets.reshape(-1), jnp.ones(targets.size, bool) if mask is None else mask.reshape(-1)
  arguments = hidden, lax.stop_gradient(unembedding), tokens, jnp.asarray(temperature, dtype)
  result = evaluate(*arguments) if layout is None else over_devices(layout, shard, evaluate, *arguments)
  log_probs, entropy = result.per_token
  return log_probs.reshape(targets.shape), entropy.reshape(targets.shape)


def _evaluate_here(shard, chunk_size, block, lockstep_axes, hidden, unembedding, tokens, temperature) -> DeviceResult:
  """Return log-probs and entropies of a device's own tokens: hidden [n, D], tokens (targets [n], mask [n])."""
  targets, mask = tokens
  dtype = vocabulary.logits_dtype(hidden)

  def of_chunk(carry, operands, valid):
    hidden, targets = operands
    hidden, targets = shard.gather(jnp.where(valid[:, None], hidden, 0)), shard.gather(targets)
    scan = vocabulary.scan_vocabulary(
      shard,
      vocabulary.logits_of_blocks(hidden, unembedding, temperature),
      len(targets),
      unembedding.shape[0],
      block,
      dtype,
      ids=targets[:, None],
    )
    logits = shard.own_total(scan.gathered)[:, 0]
    log_probs = divergences.floored(logits - shard.own(scan.statistics.log_normaliser))
    return carry, (log_probs, shard.own(scan.statistics.entropy))

  zeros = jnp.zeros(targets.shape, dtype)
  _, outputs = over_active_tokens(mask, chunk_size, (hidden, targets), (zeros, zeros), (), of_chunk, lockstep_axes)
  return DeviceResult(sums=(), per_token=outputs)
