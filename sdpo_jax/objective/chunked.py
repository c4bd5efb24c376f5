"""Chunks of tokens: a loop over the tokens that count, and the forward-only log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from sdpo_jax.objective import divergences, vocabulary

Tree = Any


def over_active_tokens(
  mask: jax.Array,
  chunk_size: int,
  operands: Tree,
  outputs: Tree,
  carry: Tree,
  body: Callable[[Tree, Tree, jax.Array], tuple[Tree, Tree]],
) -> tuple[Tree, Tree]:
  """Runs `body` on chunks of the tokens whose mask is not 0; masked ones cost nothing and keep `outputs` as given.

  The number of chunks is decided by the data: ceil(number of active tokens / chunk).

  Args:
    mask: [N].
    chunk_size: C, tokens of a chunk (at most N).
    operands: arrays [N, …].
    outputs: arrays [N, …], overwritten at active tokens.
    carry: what `body` accumulates.
    body: (carry, chunk of operands [C, …], valid [C] bool) -> (carry, chunk of outputs [C, …]).

  Returns:
    carry and outputs.
  """
  tokens = mask.shape[0]
  chunk = min(chunk_size, tokens)
  active = mask != 0
  order = jnp.argsort(~active, stable=True)
  order = jnp.pad(order, (0, -tokens % chunk), constant_values=0)
  count = active.sum()

  def step(index, state):
    carry, outputs = state
    rows = lax.dynamic_slice_in_dim(order, index * chunk, chunk)
    valid = index * chunk + jnp.arange(chunk) < count
    carry, results = body(carry, jax.tree.map(lambda x: x[rows], operands), valid)
    targets = jnp.where(valid, rows, tokens)
    outputs = jax.tree.map(lambda out, new: out.at[targets].set(new.astype(out.dtype), mode='drop'), outputs, results)
    return carry, outputs

  # The name tells the planner, which reads the compiled program, how often the loop runs if every token counts.
  with jax.named_scope(f'at_most_{-(-tokens // chunk)}'):
    return lax.fori_loop(0, (count + chunk - 1) // chunk, step, (carry, outputs))


@functools.partial(jax.jit, static_argnames=('chunk_size', 'vocab_block'))
def token_log_probs(
  hidden: jax.Array,
  unembedding: jax.Array,
  targets: jax.Array,
  temperature: float | jax.Array = 1.0,
  chunk_size: int = 1024,
  mask: jax.Array | None = None,
  vocab_block: int = 1024,
) -> tuple[jax.Array, jax.Array]:
  """Log-probability of each target and entropy of its distribution, forward only: no gradient flows.

  Args:
    hidden: [B, T, D] final hidden states.
    unembedding: [V, D].
    targets: [B, T] int32.
    temperature: divides the logits; positive.
    chunk_size: tokens handled at a time; any size works.
    mask: [B, T], 0 where nothing is wanted (these cost nothing and give 0); None: everywhere.
    vocab_block: vocabulary entries whose logits exist at a time.

  Returns:
    log-probabilities and entropies [B, T] in nats, at least float32. A target of −inf logit has
    `divergences.log_floor`.
  """
  shape = targets.shape
  hidden = lax.stop_gradient(hidden).reshape(-1, hidden.shape[-1])
  unembedding = lax.stop_gradient(unembedding)
  targets = targets.reshape(-1)
  dtype = vocabulary.logits_dtype(hidden)
  mask = jnp.ones(targets.shape, bool) if mask is None else mask.reshape(-1)

  def body(carry, operands, valid):
    hidden, targets = operands
    hidden = jnp.where(valid[:, None], hidden, 0)
    logits_of = lambda start, size: (
      vocabulary.project(hidden, vocabulary.take_rows(unembedding, start, size)) / temperature
    )
    statistics, found, _ = vocabulary.scan_logits(
      logits_of, len(targets), unembedding.shape[0], vocab_block, dtype, ids=targets[:, None]
    )
    log_probs = divergences.floored(found[:, 0] - statistics.log_normaliser)
    return carry, (log_probs, statistics.entropy)

  zeros = jnp.zeros(targets.shape, dtype)
  _, (log_probs, entropy) = over_active_tokens(mask, chunk_size, (hidden, targets), (zeros, zeros), (), body)
  return log_probs.reshape(shape), entropy.reshape(shape)
