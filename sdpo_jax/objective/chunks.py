"""A loop over the tokens that count, in chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import chex
import jax
from jax import lax
import jax.numpy as jnp

from sdpo_jax.types import Tree


def over_active_tokens(
  mask: jax.Array,
  chunk_size: int,
  operands: Tree,
  outputs: Tree,
  carry: Tree,
  body: Callable[[Tree, Tree, jax.Array], tuple[Tree, Tree]],
  lockstep_axes: Sequence[str] = (),
) -> tuple[Tree, Tree]:
  """Run `body` on chunks of the tokens whose mask is not 0; other tokens cost nothing and keep their `outputs`.

  The number of chunks depends on the data: ceil(number of active tokens / chunk).

  Args:
    mask: [N].
    chunk_size: C, tokens of a chunk (at most N).
    operands: arrays [N, …].
    outputs: arrays [N, …], overwritten at active tokens.
    carry: values that `body` accumulates.
    body: (carry, chunk of operands [C, …], valid [C] bool) -> (carry, chunk of outputs [C, …]).
    lockstep_axes: mesh axes over which all devices run as many chunks as the one with the most, because `body`
      exchanges data over them.

  Returns:
    carry and outputs.
  """
  chex.assert_rank(mask, 1)
  chex.assert_tree_shape_prefix((operands, outputs), mask.shape)
  tokens = mask.shape[0]
  chunk = min(chunk_size, tokens)
  active = mask != 0
  order = jnp.argsort(~active, stable=True)
  order = jnp.pad(order, (0, -tokens % chunk), constant_values=0)
  count = active.sum()

  def step(index, state):
    carry, outputs = state
    chosen = lax.dynamic_slice_in_dim(order, index * chunk, chunk)
    valid = index * chunk + jnp.arange(chunk) < count
    carry, results = body(carry, jax.tree.map(lambda x: x[chosen], operands), valid)
    targets = jnp.where(valid, chosen, tokens)
    outputs = jax.tree.map(lambda out, new: out.at[targets].set(new.astype(out.dtype), mode='drop'), outputs, results)
    return carry, outputs

  chunks = (count + chunk - 1) // chunk
  if lockstep_axes:
    chunks = lax.pmax(chunks, tuple(lockstep_axes))
  # The planner reads this name in the compiled program: how often the loop runs if every token is active.
  with jax.named_scope(f'at_most_{-(-tokens // chunk)}'):
    return lax.fori_loop(0, chunks, step, (carry, outputs))
