"""Log-probs and entropies of given tokens under any policy, with or without a pool of adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np

from sdpo_jax.distributed import mesh as meshes
from sdpo_jax.errors import UserError
from sdpo_jax.learning import batching
from sdpo_jax.learning.update import layout
from sdpo_jax.models.forward import forward
from sdpo_jax.models.policy import Policy
from sdpo_jax.objective.log_probs import Scores, log_probs_of_ids, scores
from sdpo_jax.rollout.buckets import padded, smallest_bucket
from sdpo_jax.rollout.functions import Keep
from sdpo_jax.types import TokenRows, Tree


@dataclasses.dataclass(frozen=True)
class Scored:
  """The scores of a policy for the T tokens of a row, in nats."""

  log_probs: np.ndarray  # [T] of the tokens.
  entropy: np.ndarray  # [T].
  top_ids: np.ndarray  # [T, K] int32, the most likely first; −1: there are no more.
  top_log_probs: np.ndarray  # [T, K].
  of_ids: np.ndarray | None = None  # [T, M] log-probs of the requested ids.

  def with_top(self, k: int) -> Scored:
    """Return the scores with only the K most likely tokens at each position."""
    return dataclasses.replace(self, top_ids=self.top_ids[:, :k], top_log_probs=self.top_log_probs[:, :k])


@dataclasses.dataclass(frozen=True)
class ScoringFunctions:
  """The jitted functions that score tokens with one policy."""

  states: Callable[..., Any]  # `sdpo_jax.models.forward.forward` without the policy.
  scores: Callable[..., Any]  # (hidden, unembedding, targets, mask): `objective.log_probs.scores`.
  of_ids: Callable[..., Any]  # (hidden, unembedding, ids, mask): `objective.log_probs.log_probs_of_ids`.


@functools.lru_cache(maxsize=16)
def scoring_functions(policy: Policy, topk: int, chunk_size: int, vocab_size: int) -> ScoringFunctions:
  """Return the jitted functions of scoring; equal arguments share them and their compiled programs.

  On a mesh, rows are divided over all devices.
  """
  mesh = mesh_of(policy)
  settings = dict(chunk_size=chunk_size, vocab_size=vocab_size, layout=layout(mesh))

  def of_tokens(hidden: jax.Array, unembedding: jax.Array, targets: jax.Array, mask: jax.Array) -> Scores:
    return scores(hidden, unembedding, targets, topk, mask=mask, **settings)

  def of_ids(hidden: jax.Array, unembedding: jax.Array, ids: jax.Array, mask: jax.Array) -> jax.Array:
    return log_probs_of_ids(hidden, unembedding, ids, mask=mask, **settings)

  rows = None if mesh is None else meshes.batch_sharding(mesh)
  return ScoringFunctions(
    states=jax.jit(functools.partial(forward, policy), compiler_options=meshes.compiler_options(mesh)),
    scores=jax.jit(of_tokens, out_shardings=rows),
    of_ids=jax.jit(of_ids, out_shardings=rows),
  )


def mesh_of(policy: Policy) -> jax.sharding.Mesh | None:
  """Return the mesh that divides the computation of a policy; None: there is one device."""
  return policy.backend.mesh if policy.backend.divided else None


def on_devices(mesh: jax.sharding.Mesh | None, rows: Tree) -> Tree:
  """Return host arrays of rows, placed on the mesh from `mesh_of`."""
  return rows if mesh is None else meshes.put_rows(mesh, rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledSizes:
  """The sizes for which scoring and learning are compiled, apart from lengths."""

  topk: int  # K, the maximum number of tokens in a support.
  rows: int  # Rows of a micro-batch.
  chunk_size: int = 256  # Number of tokens whose logits exist at one time.
  union: bool = False  # Whether the support of a loss may be the union of the teacher's and the student's K tokens.
  # Maps (name, jitted function) to the function to call instead.
  keep: Keep = lambda _, function: function


class Scorer:
  """Scores given tokens with one policy, in programs compiled for fixed lengths."""

  def __init__(
    self,
    policy: Policy,
    base: Tree,
    sizes: CompiledSizes,
    *,
    prompt_buckets: Sequence[int],
    response_buckets: Sequence[int],
    vocab_size: int | None = None,
    name: str = 'teacher',
  ):
    """Create a scorer for one model.

    Args:
      policy: the model.
      base: its frozen parameters.
      sizes: the other sizes.
      prompt_buckets: lengths to which prompts are padded.
      response_buckets: lengths to which the tokens after them are padded.
      vocab_size: V, the size of the vocabulary to score; None: the policy's, which may be larger.
      name: prefix of the functions' names, unique among the scorers with the same `sizes.keep`.
    """
    self._mesh, self._base, self._topk, self._rows = mesh_of(policy), base, sizes.topk, sizes.rows
    self._prompt_buckets, self._response_buckets = prompt_buckets, response_buckets
    functions = scoring_functions(policy, sizes.topk, sizes.chunk_size, vocab_size or policy.vocab_size)
    self._states, self._scores, self._of_ids = (
      sizes.keep(f'{name}_{part.name}', getattr(functions, part.name)) for part in dataclasses.fields(functions)
    )

  def states(self, trainable: Tree, rows: TokenRows) -> tuple[jax.Array, jax.Array]:
    """Return the states that predict the tokens of rows, and the unembedding; see `sdpo_jax.models.forward.forward`."""
    return self._states(self._base, trainable, rows)

  def of_ids(self, hidden: jax.Array, unembedding: jax.Array, ids: jax.Array, mask: jax.Array) -> jax.Array:
    """Return the log-probs [B, T, K] of tokens at states that predict them."""
    return self._of_ids(hidden, unembedding, ids, mask)

  def score(
    self,
    trainable: Tree,
    rows: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    member: int | None = None,
    ids: Sequence[np.ndarray] | None = None,
  ) -> list[Scored]:
    """Return the policy's scores of given tokens, on the host and without padding.

    Args:
      trainable: trainable parameters, such as a pool of adapters.
      rows: the prompt and the tokens after it, for each row; none longer than the largest buckets.
      member: index of the adapter in the pool, for all rows; None: there is no pool.
      ids: [T, M] int32 for each row, with the same M, further tokens whose log-probs to return.
    """
    found: list[Scored] = []
    for start in range(0, len(rows), self._rows):
      picked = list(rows[start : start + self._rows])
      count = len(picked)
      picked += [picked[0]] * (self._rows - count)
      room = smallest_bucket(self._response_buckets, max(len(tokens) for _, tokens in picked))
      tokens, mask = padded([tokens for _, tokens in picked], room)
      mask[count:] = False
      width = smallest_bucket(self._prompt_buckets, max(len(prompt) for prompt, _ in picked))
      token_rows = batching.token_rows([prompt for prompt, _ in picked], tokens, mask, width)
      if member is not None:
        token_rows = token_rows.replace(members=np.full(self._rows, member, np.int32))
      token_rows, placed, shown = on_devices(self._mesh, (token_rows, tokens, mask))
      hidden, unembedding = self.states(trainable, token_rows)
      said = jax.device_get(self._scores(hidden, unembedding, placed, shown))
      of_ids = None
      if ids is not None:
        # In parts of the one size that is compiled, whatever M is.
        count_of_ids = ids[0].shape[1]
        parts = max(1, math.ceil(count_of_ids / self._topk))
        wanted = np.full((*tokens.shape, parts * self._topk), -1, np.int32)
        for row, own in enumerate(ids[start : start + self._rows]):
          wanted[row, : len(own), :count_of_ids] = own
        asked = on_devices(self._mesh, np.split(wanted, parts, axis=2))
        answers = jax.device_get([self._of_ids(hidden, unembedding, part, shown) for part in asked])
        of_ids = np.concatenate(answers, axis=2)[:, :, :count_of_ids]
      for row, (_, own_tokens) in enumerate(picked[:count]):
        at = row, slice(len(own_tokens))
        arrays = (said.log_prob, said.entropy, said.top_ids, said.top_log_probs)
        found.append(Scored(*(array[at] for array in arrays), None if of_ids is None else of_ids[at]))
    return found


def check_ids(what: str, tokens: Sequence[int] | np.ndarray, vocab_size: int) -> None:
  """Raise UserError for a row with an invalid token id; `what` is the subject of the message."""
  try:
    ids = np.asarray(tokens)
  except ValueError:  # Rows of different lengths.
    ids = np.empty((0, 0))
  if (
    ids.ndim != 1 or ids.size and (not np.issubdtype(ids.dtype, np.integer) or ids.min() < 0 or ids.max() >= vocab_size)
  ):
    raise UserError(f'{what} must hold token ids from 0 to {vocab_size - 1} only.')
