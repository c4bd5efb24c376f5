"""Passes over tokens and the vocabulary: their settings, and a loop over unmasked tokens in chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, Self

import chex
import jax
from jax import lax
import jax.numpy as jnp

from sdpo_jax.objective import vocabulary
from sdpo_jax.objective.sharded import DeviceResult, Layout, VocabShard, over_devices
from sdpo_jax.types import Tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassSettings:
  """Settings of a pass over the vocabulary that are fixed at compile time."""

  chunk_size: int  # Tokens of a device whose logits exist at one time.
  vocab_block: int  # Entries handled at one time within a chunk.
  topk: int | None = None  # K; None: the most likely tokens are not computed.
  topk_method: str = 'exact'
  shard: VocabShard
  layout: Layout | None  # None: one device.

  @classmethod
  def of(cls, vocab_size: int, layout: Layout | None, vocab_block: int | None, **settings: Any) -> Self:
    """Return settings for the devices of `layout`; the default of `vocab_block` depends on the platform."""
    shard = VocabShard(vocab_size) if layout is None else layout.shard(vocab_size)
    block = vocab_block or vocabulary.default_block(None if layout is None else layout.platform)
    return cls(shard=shard, layout=layout, vocab_block=block, **settings)

  @property
  def lockstep_axes(self) -> tuple[str, ...]:
    """The axes over which devices exchange data within a chunk."""
    return () if self.layout is None else self.layout.batch_axes

  def padded(self, unembedding: jax.Array) -> jax.Array:
    """Return an unembedding [R, D], padded as `Layout.padded` does if there is a layout."""
    return unembedding if self.layout is None else self.layout.padded(unembedding)

  def over_devices(
    self, local: Callable[..., DeviceResult], hidden: jax.Array, unembedding: jax.Array, tokens: Tree, shared: Tree
  ) -> DeviceResult:
    """Run `local` on all devices as `sharded.over_devices` does, or once without a layout; return its results."""
    if self.layout is None:
      return local(hidden, unembedding, tokens, shared)
    return over_devices(self.layout, self.shard, local, hidden, unembedding, tokens, shared)


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
