"""Prefill and the decode loop as pure functions of a batch of rows, each of its own length.

`prefill` computes the caches of prompts, which `sdpo_jax.models.cache.copy_rows` copies into the rows of their samples;
`extend` computes them from a cached beginning of the prompt; `advance` takes a few steps, each of which draws one token
in every row, and returns the tokens. The host decides which sample a row holds, and when the next sample gets it
(`sdpo_jax.rollout.sampler`).
"""

from __future__ import annotations

from collections.abc import Callable

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import Mesh

from sdpo_jax.models import cache as kv_cache
from sdpo_jax.models.cache import KVCache
from sdpo_jax.models.policy import Policy
from sdpo_jax.rollout import sampling
from sdpo_jax.types import Tree


@flax.struct.dataclass
class DecodeState:
  """State of the samples in B rows between two calls of `advance`, apart from their cache."""

  params: sampling.SamplingParams
  token: jax.Array  # [B] int32, the newest token of prompt or completion, not yet in the cache.
  drawn: jax.Array  # [B] int32, tokens of the completion so far.
  active: jax.Array  # [B] bool; other rows hold no sample.
  members: jax.Array | None = None  # [B] int32, see `Policy.apply`.


@flax.struct.dataclass
class Drawn:
  """The tokens drawn in B rows by at most T steps; only the first `count` entries of each row are defined."""

  steps: jax.Array  # [] int32, steps taken.
  count: jax.Array  # [B] int32, tokens drawn in the row.
  stopped: jax.Array  # [B] bool, the last of them is a stop id.
  # Steps lead, so that a step writes contiguous memory.
  tokens: jax.Array  # [T, B] int32; the stop token, where one was drawn, is part of the completion.
  sampling_log_probs: jax.Array  # [T, B] float32.
  model_log_probs: jax.Array  # [T, B] float32.
  entropy: jax.Array  # [T, B] float32.


@flax.struct.dataclass
class _Loop:
  cache: KVCache
  drawn: Drawn
  token: jax.Array  # [B] int32.
  done: jax.Array  # [B] bool.


def prefill(
  policy: Policy,
  base: Tree,
  trainable: Tree,
  tokens: jax.Array,
  lengths: jax.Array,
  members: jax.Array | None = None,
  *,
  slots: int | None = None,
  quantized: bool = False,
) -> KVCache:
  """Return the caches of prompts, which hold all tokens of a prompt except its last.

  The last token of a prompt is the first input of `advance`, so that tokens are drawn in one place only and a prefill
  needs no logits.

  Args:
    policy: the language model.
    base: frozen parameters.
    trainable: trainable parameters.
    tokens: [G, P] int32, right-padded.
    lengths: [G] int32, at least 1.
    members: [G] int32, see `Policy.apply`.
    slots: static, number of slots of a row of the result, at least P; None: P.
    quantized: static, whether the cache holds int8.

  Returns:
    G rows of `slots` slots.
  """
  base, trainable = policy.cast(base, trainable)
  prompts, width = tokens.shape
  index = jnp.arange(width, dtype=jnp.int32)[None]
  valid = index < lengths[:, None] - 1
  positions, segments = jnp.where(valid, index, 0), valid.astype(jnp.int32)
  empty = policy.init_cache(prompts, width, quantized)
  cache = policy.apply(base, trainable, tokens, positions, segments, empty, **_pooled(members))[2]
  return cache if slots is None else kv_cache.with_slots(cache, slots)


def extend(
  policy: Policy,
  base: Tree,
  trainable: Tree,
  cache: KVCache,
  tokens: jax.Array,
  new: jax.Array,
  members: jax.Array | None = None,
  *,
  piece: int,
  commit: Callable[[KVCache, jax.Array], KVCache] = kv_cache.commit,
) -> KVCache:
  """Append tokens to the rows of a cache, in as many pieces as the longest row needs.

  Args:
    policy: the language model.
    base: frozen parameters.
    trainable: trainable parameters.
    cache: cache of G rows, with at least `piece` free slots in every row after its new tokens.
    tokens: [G, P] int32, right-padded.
    new: [G] int32, how many of these tokens each row gets.
    members: [G] int32, see `Policy.apply`.
    piece: static, tokens of a row that go through the model at once.
    commit: `sdpo_jax.models.cache.commit`, or a function that does the same in each shard of a mesh.

  Returns:
    The cache; slots after the tokens of a row are undefined.
  """
  base, trainable = policy.cast(base, trainable)
  tokens = jnp.pad(tokens, ((0, 0), (0, -tokens.shape[1] % piece)))
  index = jnp.arange(piece, dtype=jnp.int32)[None]

  def step(at: jax.Array, cache: KVCache) -> KVCache:
    count = jnp.clip(new - at * piece, 0, piece)
    valid = index < count[:, None]
    grown = policy.apply(
      base,
      trainable,
      lax.dynamic_slice_in_dim(tokens, at * piece, piece, axis=1),
      jnp.where(valid, cache.lengths[:, None] + index, 0),
      valid.astype(jnp.int32),
      policy.with_recent(cache, piece),
      **_pooled(members),
    )[2]
    # Rows with fewer new tokens are written too: they have room, and their lengths do not include these slots.
    return commit(grown, jnp.ones_like(valid[:, 0])).replace(lengths=cache.lengths + count)

  return lax.fori_loop(0, (jnp.max(new) + piece - 1) // piece, step, cache)


def advance(
  policy: Policy,
  base: Tree,
  trainable: Tree,
  cache: KVCache,
  state: DecodeState,
  enough: jax.Array | int,
  *,
  steps: int,
  commit: Callable[[KVCache, jax.Array], KVCache] = kv_cache.commit,
  mesh: Mesh | None = None,
) -> tuple[KVCache, Drawn]:
  """Take decode steps until `steps` are taken, every active row is done, or `enough` rows are done.

  Args:
    policy: the language model.
    base: frozen parameters.
    trainable: trainable parameters.
    cache: cache of the B rows, with `steps` free slots in every active one; if donated, it is updated in place.
    state: state of the B rows.
    enough: [] int32, number of rows that must be done to interrupt the loop.
    steps: static, maximum number of steps.
    commit: `sdpo_jax.models.cache.commit`, or a function that does the same in each shard of a mesh.
    mesh: as in `sdpo_jax.rollout.sampling.truncate`.

  Returns:
    The cache, in which rows that are done are empty, and the tokens drawn.
  """
  base, trainable = policy.cast(base, trainable)
  keys = sampling.row_keys(state.params)
  count = state.active.shape[0]
  empty = jnp.zeros((steps, count), jnp.float32)
  nothing = Drawn(
    steps=jnp.zeros((), jnp.int32),
    count=jnp.zeros(count, jnp.int32),
    stopped=jnp.zeros(count, bool),
    tokens=jnp.zeros((steps, count), jnp.int32),
    sampling_log_probs=empty,
    model_log_probs=empty,
    entropy=empty,
  )
  waiting = jnp.sum(state.active.astype(jnp.int32))

  def unfinished(loop: _Loop) -> jax.Array:
    done = waiting - jnp.sum((~loop.done).astype(jnp.int32))
    return (loop.drawn.steps < steps) & (done < jnp.minimum(enough, waiting))

  def step(loop: _Loop) -> _Loop:
    at = loop.drawn.steps
    hidden, unembedding, cache = policy.apply(
      base,
      trainable,
      loop.token[:, None],
      (loop.cache.lengths + at)[:, None],
      (~loop.done).astype(jnp.int32)[:, None],
      loop.cache,
      **_pooled(state.members),
    )
    new = sampling.sample(
      logits(hidden[:, 0], unembedding, policy.vocab_size),
      state.params,
      keys,
      state.drawn + loop.drawn.count,
      mesh=mesh,
      live=None if mesh is None else ~loop.done,
    )
    return _record(loop.replace(cache=cache), new, state)

  start = _Loop(cache=policy.with_recent(cache, steps), drawn=nothing, token=state.token, done=~state.active)
  loop = lax.while_loop(unfinished, step, start)
  return commit(loop.cache, ~loop.done), loop.drawn


def _pooled(members: jax.Array | None) -> dict[str, jax.Array]:
  """Return the argument of `Policy.apply` that only policies with a pool of adapters accept."""
  return {} if members is None else {'members': members}


def logits(hidden: jax.Array, unembedding: jax.Array, vocab_size: int) -> jax.Array:
  """Return logits [B, V] float32 of hidden [B, D] and unembedding [V, D]; −inf from entry `vocab_size` on."""
  precision = lax.Precision.HIGHEST if hidden.dtype == jnp.float32 else None
  scores = jnp.einsum('bd,vd->bv', hidden, unembedding, precision=precision, preferred_element_type=jnp.float32)
  if unembedding.shape[0] == vocab_size:
    return scores
  return jnp.where(jnp.arange(unembedding.shape[0])[None, :] < vocab_size, scores, -jnp.inf)


def _record(loop: _Loop, new: sampling.Draw, state: DecodeState) -> _Loop:
  """Return the loop with the tokens just drawn; rows that are done keep their count."""
  drawn, at, active = loop.drawn, loop.drawn.steps, ~loop.done
  count = drawn.count + active.astype(jnp.int32)
  stopped = drawn.stopped | (active & jnp.any(new.token[:, None] == state.params.stop_ids, axis=1))

  def write(record: jax.Array, values: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(record, values[None], at, axis=0)

  return loop.replace(
    token=new.token,
    done=loop.done | stopped | (state.drawn + count >= state.params.max_tokens),
    drawn=Drawn(
      steps=at + 1,
      count=count,
      stopped=stopped,
      tokens=write(drawn.tokens, new.token),
      sampling_log_probs=write(drawn.sampling_log_probs, new.sampling_log_prob),
      model_log_probs=write(drawn.model_log_probs, new.model_log_prob),
      entropy=write(drawn.entropy, new.entropy),
    ),
  )
