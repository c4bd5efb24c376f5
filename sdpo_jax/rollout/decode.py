"""Prefill and the decode loop as pure functions: one prefill a prompt, one in-place cache, a loop that ends early.

`generate` does all of it in one call. The engine calls its parts: `for_decoding` once a batch, `prefill`, and `advance`,
which takes over the state's buffers (donate it) and can be called again where a text has to be looked at in between or
where `grow` has made room for more tokens: a step reads the whole cache, written or not, so that long completions are
given room as they come.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp

from models.policy import Policy
from sdpo_jax.rollout import sampling

Tree = Any


@flax.struct.dataclass
class DecodeState:
  """Everything that a step of the loop reads and writes, of B rows with room for T completion tokens."""

  cache: Tree  # The policy's; holds the prompt and the completion but for the newest token of them.
  keys: jax.Array  # [B] of the rows (`sampling.row_keys`).
  token: jax.Array  # [B] int32, the newest token of prompt and completion.
  position: jax.Array  # [B] int32, its position.
  drawn: jax.Array  # [] int32, tokens drawn so far in rows that have not finished.
  length: jax.Array  # [B] int32, tokens of the completion.
  stopped: jax.Array  # [B] bool, ended by a stop id (or by the caller between calls).
  done: jax.Array  # [B] bool: stopped, or as long as it may be.
  # Step by step, so that a step writes one contiguous row; only the first `length` of a column mean anything.
  tokens: jax.Array  # [T, B] int32.
  sampling_log_probs: jax.Array  # [T, B] float32.
  model_log_probs: jax.Array  # [T, B] float32.
  entropy: jax.Array  # [T, B] float32.


@flax.struct.dataclass
class DecodeResult:
  """B completions, right-padded with zeros."""

  tokens: jax.Array  # [B, T] int32; the stop token, where one was drawn, is part of the completion.
  mask: jax.Array  # [B, T] bool.
  sampling_log_probs: jax.Array  # [B, T] float32.
  model_log_probs: jax.Array  # [B, T] float32.
  entropy: jax.Array  # [B, T] float32.
  length: jax.Array  # [B] int32.
  stopped: jax.Array  # [B] bool: a stop token was drawn; otherwise the row is as long as it may be.


def generate(
  policy: Policy,
  base: Tree,
  trainable: Tree,
  prompt_tokens: jax.Array,
  prompt_lengths: jax.Array,
  params: sampling.SamplingParams,
  *,
  n: int,
  max_new_tokens: int,
) -> DecodeResult:
  """`n` completions of every prompt; jittable with `policy`, `n` and `max_new_tokens` static.

  Args:
    policy: the language model.
    base: frozen parameters.
    trainable: trainable parameters.
    prompt_tokens: [G, P] int32, right-padded.
    prompt_lengths: [G] int32, at least 1.
    params: of B = G·n rows, the n completions of a prompt next to each other.
    n: completions a prompt.
    max_new_tokens: T, an upper bound of `params.max_tokens`.

  Returns:
    The completions [B, T].
  """
  state = prefill(policy, base, trainable, prompt_tokens, prompt_lengths, params, n=n, max_new_tokens=max_new_tokens)
  return result(advance(policy, base, trainable, params, state, max_new_tokens))


def prefill(
  policy: Policy,
  base: Tree,
  trainable: Tree,
  prompt_tokens: jax.Array,
  prompt_lengths: jax.Array,
  params: sampling.SamplingParams,
  *,
  n: int,
  max_new_tokens: int,
  slots: int | None = None,
) -> DecodeState:
  """The state in which nothing has been drawn yet: every prompt but its last token went through the model, once.

  The last token of a prompt is the first that `advance` puts in, so that a token is drawn in one place only and a
  prefill needs no logits. Arguments as in `generate`; the cache has room for `slots` tokens of each completion at
  first (None: for all, that is `max_new_tokens`).
  """
  base, trainable = for_decoding(policy, base, trainable)
  prompts, width = prompt_tokens.shape
  rows, room = prompts * n, max_new_tokens
  last = prompt_lengths - 1
  index = jnp.arange(width, dtype=jnp.int32)[None]
  valid = index < last[:, None]
  _, _, cache = policy.apply(
    base,
    trainable,
    prompt_tokens,
    jnp.where(valid, index, 0),
    valid.astype(jnp.int32),
    policy.init_cache(prompts, width),
  )
  empty = jnp.zeros((room, rows), jnp.float32)
  return DecodeState(
    cache=policy.repeat_cache(cache, n, width + (slots or room)),
    keys=sampling.row_keys(params),
    token=jnp.repeat(jnp.take_along_axis(prompt_tokens, last[:, None], axis=1)[:, 0], n),
    position=jnp.repeat(last, n),
    drawn=jnp.zeros((), jnp.int32),
    length=jnp.zeros(rows, jnp.int32),
    stopped=jnp.zeros(rows, bool),
    done=params.max_tokens <= 0,
    tokens=jnp.zeros((room, rows), jnp.int32),
    sampling_log_probs=empty,
    model_log_probs=empty,
    entropy=empty,
  )


def advance(
  policy: Policy,
  base: Tree,
  trainable: Tree,
  params: sampling.SamplingParams,
  state: DecodeState,
  limit: jax.Array | int,
) -> DecodeState:
  """The state after further steps: until every row is done or `limit` tokens have been drawn in the others.

  Args:
    policy: the language model.
    base: frozen parameters.
    trainable: trainable parameters.
    params: of the B rows, as in `prefill`.
    state: from `prefill` or `advance`; donate it, and the cache is updated in place.
    limit: [] int32, at most what the cache has room for.

  Returns:
    The new state.
  """
  base, trainable = for_decoding(policy, base, trainable)

  def unfinished(state: DecodeState) -> jax.Array:
    return (state.drawn < limit) & ~jnp.all(state.done)

  def step(state: DecodeState) -> DecodeState:
    hidden, unembedding, cache = policy.apply(
      base,
      trainable,
      state.token[:, None],
      state.position[:, None],
      jnp.ones_like(state.token)[:, None],
      state.cache,
    )
    drawn = sampling.sample(logits(hidden[:, 0], unembedding, policy.vocab_size), params, state.keys, state.drawn)
    return _record(state.replace(cache=cache), drawn, params)

  return lax.while_loop(unfinished, step, state)


def grow(policy: Policy, state: DecodeState, length: int) -> DecodeState:
  """The state with room in its cache for prompts and completions of `length` tokens in all."""
  return state.replace(cache=policy.repeat_cache(state.cache, 1, length))


def result(state: DecodeState) -> DecodeResult:
  """The completions as rows, with zeros where there is no token."""
  mask = jnp.arange(state.tokens.shape[0], dtype=jnp.int32)[None] < state.length[:, None]
  rows = lambda columns: jnp.where(mask, columns.T, jnp.zeros((), columns.dtype))
  return DecodeResult(
    tokens=rows(state.tokens),
    mask=mask,
    sampling_log_probs=rows(state.sampling_log_probs),
    model_log_probs=rows(state.model_log_probs),
    entropy=rows(state.entropy),
    length=state.length,
    stopped=state.stopped,
  )


def logits(hidden: jax.Array, unembedding: jax.Array, vocab_size: int) -> jax.Array:
  """[B, V] float32 of hidden [B, D] and unembedding [V, D]; −inf for rows from `vocab_size` on, which are no tokens."""
  precision = lax.Precision.HIGHEST if hidden.dtype == jnp.float32 else None
  scores = jnp.einsum('bd,vd->bv', hidden, unembedding, precision=precision, preferred_element_type=jnp.float32)
  if unembedding.shape[0] == vocab_size:
    return scores
  return jnp.where(jnp.arange(unembedding.shape[0])[None, :] < vocab_size, scores, -jnp.inf)


def for_decoding(policy: Policy, base: Tree, trainable: Tree) -> tuple[Tree, Tree]:
  """The parameters as a loop reads them best, where the policy offers `cast` and nothing is frozen.

  A step of the loop reads every parameter once: cast ahead of the loop, it reads half as many bytes in bfloat16.
  Parameters that have gone through it once come back as they are.
  """
  cast = getattr(policy, 'cast', None)
  return (base, trainable) if cast is None or base else (base, cast(trainable))


def _record(state: DecodeState, new: sampling.Draw, params: sampling.SamplingParams) -> DecodeState:
  """The state with the tokens just drawn; rows that are done keep their length."""
  at = state.drawn
  active = ~state.done
  length = state.length + active.astype(jnp.int32)
  stopped = state.stopped | (active & jnp.any(new.token[:, None] == params.stop_ids, axis=1))
  write = lambda columns, row: lax.dynamic_update_slice_in_dim(columns, row[None], at, axis=0)
  return state.replace(
    token=new.token,
    position=state.position + 1,
    drawn=at + 1,
    length=length,
    stopped=stopped,
    done=state.done | stopped | (length >= params.max_tokens),
    tokens=write(state.tokens, new.token),
    sampling_log_probs=write(state.sampling_log_probs, new.sampling_log_prob),
    model_log_probs=write(state.model_log_probs, new.model_log_prob),
    entropy=write(state.entropy, new.entropy),
  )
