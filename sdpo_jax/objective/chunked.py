"""Chunks of tokens: a loop over the tokens that count, and the forward-only log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from sdpo_jax.objective import divergences, vocabulary
from sdpo_jax.objective.sharded import Layout, VocabShard, over_devices

Tree = Any


def over_active_tokens(
  mask: jax.Array,
  chunk_size: int,
  operands: Tree,
  outputs: Tree,
  carry: Tree,
  body: Callable[[Tree, Tree, jax.Array], tuple[Tree, Tree]],
  together: Sequence[str] = (),
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
    together: mesh axes over which all devices run as many chunks as the one with the most, because `body` exchanges.

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

  chunks = (count + chunk - 1) // chunk
  if together:
    chunks = lax.pmax(chunks, tuple(together))
  # The name tells the planner, which reads the compiled program, how often the loop runs if every token counts.
  with jax.named_scope(f'at_most_{-(-tokens // chunk)}'):
    return lax.fori_loop(0, chunks, step, (carry, outputs))


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
  """Log-probability of each target and entropy of its distribution, forward only: no gradient flows.

  Args:
    hidden: [B, T, D] final hidden states.
    unembedding: [R, D].
    targets: [B, T] int32.
    temperature: divides the logits; positive.
    chunk_size: tokens handled at a time; any size works.
    mask: [B, T], 0 where nothing is wanted (these cost nothing and give 0); None: everywhere.
    vocab_block: vocabulary entries whose logits exist at a time; None: `vocabulary.default_block`.
    vocab_size: rows of the unembedding that are tokens, the first ones; None: all.
    layout: where the arguments lie on a mesh; None: one device.

  Returns:
    log-probabilities and entropies [B, T] in nats, at least float32. A target of −inf logit has
    `divergences.log_floor`.
  """
  shape = targets.shape
  dtype = vocabulary.logits_dtype(hidden)
  entries = vocab_size or unembedding.shape[0]
  shard = VocabShard(entries)
  if layout is not None:
    shard, unembedding = layout.shard(entries), layout.padded(unembedding)
  block = vocab_block or vocabulary.default_block(None if layout is None else layout.platform)

  def tokens_of(shard, together, hidden, unembedding, operands):
    numbers, tree = operands
    data = tree['data']

    def body(carry, operands, valid):
      hidden, targets = operands
      hidden, targets = shard.gather(jnp.where(valid[:, None], hidden, 0)), shard.gather(targets)
      logits_of = lambda start, size: (
        vocabulary.project(hidden, vocabulary.take_entries(unembedding, start, size)) / numbers['temperature']
      )
      view = vocabulary.scan_vocabulary(
        shard, logits_of, len(targets), unembedding.shape[0], block, dtype, ids=targets[:, None]
      )
      found = shard.own_total(view.gathered)[:, 0]
      log_probs = divergences.floored(found - shard.own(view.statistics.log_normaliser))
      return carry, (log_probs, shard.own(view.statistics.entropy))

    zeros = jnp.zeros(data['targets'].shape, dtype)
    _, (log_probs, entropy) = over_active_tokens(
      data['mask'], chunk_size, (hidden, data['targets']), (zeros, zeros), (), body, together
    )
    return jnp.zeros((), dtype), {'log_probs': log_probs, 'entropy': entropy}, (None, None)

  data = {
    'targets': targets.reshape(-1),
    'mask': jnp.ones(targets.size, bool) if mask is None else mask.reshape(-1),
  }
  arguments = (
    lax.stop_gradient(hidden).reshape(-1, hidden.shape[-1]),
    lax.stop_gradient(unembedding),
    ({'temperature': jnp.asarray(temperature, dtype)}, {'data': data, 'matrices': {}}),
  )
  whole = functools.partial(tokens_of, VocabShard(entries), ())
  if layout is None:
    _, aux, _ = whole(*arguments)
  else:
    _, aux, _ = over_devices(layout, shard, functools.partial(tokens_of, shard, layout.batch_axes), whole, *arguments)
  return aux['log_probs'].reshape(shape), aux['entropy'].reshape(shape)
