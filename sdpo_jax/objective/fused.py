"""The loss from hidden states, its gradient computed in the forward pass: logits exist for one chunk of tokens only.

A chunk passes four stages: the support of the divergence, the student's view of each token, the teacher's view, and the
gradient. A token's terms are computed on the device that owns the token; work on the vocabulary is done for all tokens
of the group of devices that share it. Letters: N tokens; C tokens of a chunk in a group, c of them owned by this
device; K entries of a support; R entries of the vocabulary on this device; D model width.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import chex
import flax.struct
import jax
from jax import lax
import jax.numpy as jnp

from sdpo_jax.objective import divergences, vocabulary
from sdpo_jax.objective.chunks import PassSettings, over_active_tokens
from sdpo_jax.objective.row_numbers import first_entries
from sdpo_jax.objective.sharded import DeviceResult, VocabShard
from sdpo_jax.objective.terms import (
  Auxiliary,
  StudentView,
  TeacherView,
  TermScalars,
  TermSettings,
  TokenInputs,
  alpha_of,
  loss_terms,
)
from sdpo_jax.objective.vocabulary import OfBlock, VocabScan


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusedSettings(PassSettings):
  """Settings of the loss that are fixed at compile time; the top K is the student's."""

  terms: TermSettings


@flax.struct.dataclass
class SharedInputs:
  """Inputs shared by all tokens: scalars [] and the teacher's matrices."""

  scalars: TermScalars  # For tokens without numbers of their own.
  teacher_unembedding: jax.Array | None = None  # [R, D] of an in-mesh teacher.
  mix_unembedding: jax.Array | None = None  # [R, D] of the trust region's student.
  mix_rate: jax.Array | None = None  # [] the trust region's weight of the student.


class Wanted(NamedTuple):
  """Which gradients of the loss to compute."""

  hidden: bool
  unembedding: bool


def fused_loss(
  settings: FusedSettings, hidden: jax.Array, unembedding: jax.Array, tokens: TokenInputs, shared: SharedInputs
) -> tuple[jax.Array, Auxiliary]:
  """Return the loss [], differentiable by hidden states and unembedding, and its auxiliary results.

  Args:
    settings: compile-time settings.
    hidden: [N, D].
    unembedding: [R, D].
    tokens: arrays [N, …].
    shared: scalars, and the teacher's matrices.
  """
  chex.assert_rank([hidden, unembedding], 2)
  chex.assert_type([hidden, unembedding], float)
  chex.assert_tree_shape_prefix(tokens, hidden.shape[:1])
  return _fused_loss(settings, hidden, unembedding, tokens, shared)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused_loss(settings: FusedSettings, hidden, unembedding, tokens, shared):
  loss, aux, _ = _evaluate(settings, Wanted(False, False), hidden, unembedding, tokens, shared)
  return loss, aux


def _fused_loss_fwd(settings: FusedSettings, hidden, unembedding, tokens, shared):
  wanted = Wanted(hidden.perturbed, unembedding.perturbed)
  values = jax.tree.map(lambda x: x.value, (hidden, unembedding, tokens, shared))
  loss, aux, gradients = _evaluate(settings, wanted, *values)
  return (loss, aux), gradients


def _fused_loss_bwd(settings: FusedSettings, gradients, cotangents):
  cotangent, _ = cotangents
  if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
    return None, None, None, None
  by_hidden, by_unembedding = jax.tree.map(lambda x: (cotangent * x).astype(x.dtype), gradients)
  return by_hidden, by_unembedding, None, None


_fused_loss.defvjp(_fused_loss_fwd, _fused_loss_bwd, symbolic_zeros=True)


def _evaluate(settings: FusedSettings, wanted: Wanted, hidden, unembedding, tokens, shared):
  """Return the loss, the auxiliary results and the gradients by (hidden, unembedding), None if not wanted."""
  evaluate = functools.partial(_evaluate_here, settings, wanted)
  result = settings.over_devices(evaluate, hidden, unembedding, tokens, shared)
  (loss, sums), (per_token, by_hidden), by_unembedding = result.sums, result.per_token, result.by_unembedding
  if by_unembedding is not None:
    by_unembedding = by_unembedding.astype(unembedding.dtype)
  return loss, Auxiliary(sums, per_token), (by_hidden, by_unembedding)


def _evaluate_here(settings: FusedSettings, wanted: Wanted, hidden, unembedding, tokens, shared) -> DeviceResult:
  """Return this device's sums, (per-token results, gradient by its hidden states [n, D]) and `by_unembedding`."""
  dtype = vocabulary.logits_dtype(hidden)
  shared = shared.replace(scalars=shared.scalars.of_type(dtype))
  evaluate_chunk = functools.partial(_evaluate_chunk, settings, wanted, unembedding, shared)
  accumulator = jnp.zeros(unembedding.shape, dtype) if wanted.unembedding else None

  # The names of a chunk's results.
  size = min(settings.chunk_size, hidden.shape[0])
  operands = jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype), (hidden, tokens))
  outline = jax.eval_shape(evaluate_chunk, accumulator, *operands, jax.ShapeDtypeStruct((size,), bool))
  sums = {name: jnp.zeros((), dtype) for name in outline.aux.sums}
  per_token = {name: jnp.zeros(hidden.shape[:1], dtype) for name in outline.aux.per_token}
  by_hidden = jnp.zeros(hidden.shape, hidden.dtype) if wanted.hidden else None

  def add_chunk(carry, operands, valid):
    loss, sums, accumulator = carry
    chunk = evaluate_chunk(accumulator, *operands, valid)
    sums = {name: total + chunk.aux.sums[name] for name, total in sums.items()}
    return (loss + chunk.loss, sums, chunk.by_unembedding), (chunk.aux.per_token, chunk.by_hidden)

  (loss, sums, accumulator), outputs = over_active_tokens(
    tokens.mask,
    settings.chunk_size,
    (hidden, tokens),
    (per_token, by_hidden),
    (jnp.zeros((), dtype), sums, accumulator),
    add_chunk,
    settings.lockstep_axes,
  )
  return DeviceResult(sums=(loss, sums), per_token=outputs, by_unembedding=accumulator)


# ---------------------------------------------------------------------------------------------------------------------
# One chunk
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Chunk:
  """The inputs shared by the stages of a chunk."""

  settings: FusedSettings
  wanted: Wanted
  unembedding: jax.Array  # [R, D].
  shared: SharedInputs
  hidden: jax.Array  # [C, D] of the group's tokens, 0 where a token is not valid.
  tokens: TokenInputs  # [c, …], own.
  valid: jax.Array  # [c] bool, false for tokens that only fill up the chunk.

  @property
  def shard(self) -> VocabShard:
    return self.settings.shard

  @property
  def dtype(self) -> jnp.dtype:
    return vocabulary.logits_dtype(self.hidden)

  @property
  def entries(self) -> int:
    return self.unembedding.shape[0]

  @property
  def kind(self) -> str:
    return self.settings.terms.kind

  @property
  def scalars(self) -> TermScalars:
    """Scalars [], or [c] for own tokens."""
    return self.shared.scalars.with_own(self.tokens.numbers)

  def _of_group(self, number: jax.Array | float) -> jax.Array | float:
    """Return a scalar unchanged, and numbers [c] of own tokens as [C, 1] of the group's tokens."""
    return self.shard.gather(number)[:, None] if jnp.ndim(number) else number

  @property
  def alpha(self) -> jax.Array | float:
    """Alpha, a scalar or [C, 1] for the group's tokens."""
    return self._of_group(alpha_of(self.settings.terms, self.scalars))

  @property
  def temperature(self) -> jax.Array:
    """Temperature [], or [C, 1] for the group's tokens."""
    return self._of_group(self.scalars.temperature)

  @property
  def own_topk(self) -> jax.Array | None:
    """[c] how many entries of the student's top K count, per own token; None: all."""
    return None if self.tokens.numbers is None else self.tokens.numbers.topk

  @property
  def has_teacher(self) -> bool:
    return self.tokens.distill_coef is not None

  @property
  def has_external_teacher(self) -> bool:
    return self.has_teacher and self.tokens.token_ids is not None

  @property
  def over_vocabulary(self) -> bool:
    """Whether the divergence is over the whole vocabulary."""
    return self.has_teacher and not self.has_external_teacher and self.kind == 'full'

  @property
  def over_own_top_k(self) -> bool:
    """Whether the divergence is over the student's top K."""
    in_mesh = self.has_teacher and not self.has_external_teacher
    return in_mesh and self.kind == 'topk' and self.tokens.support is None

  @property
  def given_support(self) -> jax.Array | None:
    """[c, K] ids of the divergence's support if the caller gives them, negative = none; None otherwise."""
    if self.has_external_teacher and self.kind != 'sampled':
      return self.tokens.token_ids
    return self.tokens.support if self.has_teacher and self.kind == 'topk' else None

  @property
  def told(self) -> jax.Array:
    """[c] bool, own tokens for which an external teacher names a token; false for NaN log-probs of weight 0."""
    named = self.tokens.token_ids >= 0
    broken = (named & jnp.isnan(self.tokens.teacher_log_probs)).any(-1) & (self.tokens.distill_coef == 0)
    return self.valid & named.any(-1) & ~broken

  @property
  def keep_logits(self) -> bool:
    """Whether to keep the student's logits: the gradient needs them again, or is cheaper with them."""
    if self.over_vocabulary:
      return True
    one_block = vocabulary.blocks(self.entries, self.settings.vocab_block)[0] == 1
    needed = self.wanted.unembedding or self.tokens.entropy_coef is not None or one_block
    return any(self.wanted) and needed


def _states_of_group(shard: VocabShard, hidden: jax.Array, valid: jax.Array) -> jax.Array:
  """Return the group's hidden states [C, D] from each device's own [c, D], 0 where a token is not valid."""
  return shard.gather(jnp.where(valid[:, None], hidden, 0))


class _ChunkResult(NamedTuple):
  loss: jax.Array  # [].
  aux: Auxiliary
  by_hidden: jax.Array | None  # [c, D] gradient by own hidden states.
  by_unembedding: jax.Array | None  # [R, D] accumulated gradient, in at least float32.


def _evaluate_chunk(
  settings: FusedSettings,
  wanted: Wanted,
  unembedding: jax.Array,
  shared: SharedInputs,
  accumulator: jax.Array | None,
  hidden: jax.Array,
  tokens: TokenInputs,
  valid: jax.Array,
) -> _ChunkResult:
  """Return the loss of a chunk, its per-token results and its gradients.

  Args:
    settings: compile-time settings.
    wanted: which gradients to compute.
    unembedding: [R, D].
    shared: scalars in the logits' dtype, and the teacher's matrices.
    accumulator: [R, D] to which the gradient by the unembedding is added; None if it is not wanted.
    hidden: [c, D] of own tokens.
    tokens: arrays [c, …].
    valid: [c] bool.
  """
  hidden = _states_of_group(settings.shard, hidden, valid)
  # Invalid tokens may hold anything; 1 is an allowed value of every number.
  tokens = tokens.replace(numbers=jax.tree.map(lambda own: jnp.where(valid, own, 1), tokens.numbers))
  chunk = _Chunk(settings, wanted, unembedding, shared, hidden, tokens, valid)
  student = _scan_student(chunk)
  view, teacher, log_probs_of, slope_sum = student.view, None, None, None
  if chunk.has_external_teacher:
    teacher = _external_teacher(chunk)
  elif chunk.has_teacher:
    teacher, teacher_log_probs = _scan_teacher(chunk, student.ids)
    if chunk.over_vocabulary:
      log_probs_of = _pair_of_blocks(student, teacher_log_probs)
      divergence, slope_sum = _divergence_over_vocabulary(chunk, log_probs_of)
      view = view.replace(divergence=divergence)
  terms = functools.partial(loss_terms, settings.terms, shared.scalars, teacher=teacher, tokens=tokens, active=valid)
  if not any(wanted):
    return _ChunkResult(*terms(view), None, accumulator)
  (loss, aux), slopes = jax.value_and_grad(terms, has_aux=True)(view)
  return _ChunkResult(loss, aux, *_gradients(chunk, student, slopes, log_probs_of, slope_sum, accumulator))


# ---------------------------------------------------------------------------------------------------------------------
# Student
# ---------------------------------------------------------------------------------------------------------------------


class _Student(NamedTuple):
  """Results of the scan of the student's logits."""

  scan: VocabScan  # Scan of the group's tokens.
  log_normaliser: jax.Array  # [C] of the group's tokens.
  entropy: jax.Array  # [C] of the group's tokens.
  ids: jax.Array  # [C, K + 1] int32 of the group's tokens: the support, if any, and the target.
  target_log_prob: jax.Array  # [c] of own tokens; −inf where the logit is −inf.
  view: StudentView  # View of own tokens, without the divergence over the vocabulary.


def _scan_student(chunk: _Chunk) -> _Student:
  """Scan the student's logits; choose the support if it is the student's top K."""
  settings, shard = chunk.settings, chunk.shard
  support, ids = chunk.given_support, chunk.tokens.targets[:, None]
  if support is not None:
    ids = jnp.concatenate([support, ids], axis=1)
  scan = vocabulary.scan_vocabulary(
    shard,
    vocabulary.logits_of_blocks(chunk.hidden, chunk.unembedding, chunk.temperature),
    len(chunk.hidden),
    chunk.entries,
    settings.vocab_block,
    chunk.dtype,
    ids=shard.gather(jnp.clip(ids, 0, shard.vocab_size - 1)),
    keep_logits=chunk.keep_logits,
    topk=min(settings.topk, shard.vocab_size) if chunk.over_own_top_k else None,
    topk_method=settings.topk_method,
    averaged=chunk.unembedding if chunk.wanted.hidden and not chunk.keep_logits else None,
  )
  log_normaliser, entropy = scan.statistics.log_normaliser, scan.statistics.entropy
  own_normaliser = shard.own(log_normaliser)[:, None]
  logits = shard.own_total(scan.gathered)
  target_log_prob = logits[:, -1] - own_normaliser[:, 0]
  support_log_probs = None
  if chunk.over_own_top_k:
    largest, support = vocabulary.largest_of_all(shard, scan.largest, min(settings.topk, shard.vocab_size))
    support_log_probs = largest - own_normaliser
    if chunk.own_topk is not None:
      support = first_entries(support, chunk.own_topk)
      support_log_probs = jnp.where(support < 0, -jnp.inf, support_log_probs)
    ids = jnp.concatenate([support, ids], axis=1)
  elif support is not None:
    support_log_probs = jnp.where(support < 0, -jnp.inf, logits[:, :-1] - own_normaliser)
    if chunk.has_external_teacher:
      support_log_probs = _where_told(chunk, support_log_probs)
  view = StudentView(
    log_prob=divergences.floored(target_log_prob),
    entropy=shard.own(entropy),
    support=support_log_probs,
  )
  return _Student(scan, log_normaliser, entropy, shard.gather(ids), target_log_prob, view)


# ---------------------------------------------------------------------------------------------------------------------
# Teacher
# ---------------------------------------------------------------------------------------------------------------------


def lerp(a: jax.Array, b: jax.Array, rate: jax.Array) -> jax.Array:
  """Return (1 − rate)·a + rate·b, exact at both ends: arrays [...] and a rate [] -> [...]."""
  chex.assert_equal_shape([a, b])
  chex.assert_rank(rate, 0)
  return jnp.where(rate < 0.5, a + rate * (b - a), b - (1.0 - rate) * (b - a))


def _teacher_logits_of_blocks(chunk: _Chunk) -> OfBlock:
  """Return a function from a block of entries to the teacher's logits [C, W], divided by the temperature."""
  shared, dtype, temperature = chunk.shared, chunk.dtype, chunk.temperature
  hidden, mix_hidden = _states_of_group(chunk.shard, chunk.tokens.teacher_hidden, chunk.valid), None
  if chunk.tokens.mix_hidden is not None:
    mix_hidden = _states_of_group(chunk.shard, chunk.tokens.mix_hidden, chunk.valid)

  def logits_of(start: jax.Array | int, size: int) -> jax.Array:
    entries = vocabulary.take_entries(shared.teacher_unembedding, start, size)
    logits = vocabulary.project(hidden, entries).astype(dtype)
    if mix_hidden is not None:
      mix = vocabulary.project(mix_hidden, vocabulary.take_entries(shared.mix_unembedding, start, size))
      logits = lerp(logits, mix.astype(dtype), shared.mix_rate.astype(dtype))
    return logits / temperature

  return logits_of


def _scan_teacher(chunk: _Chunk, ids: jax.Array) -> tuple[TeacherView, jax.Array | None]:
  """Scan an in-mesh teacher's logits.

  Args:
    chunk: the chunk.
    ids: [C, K + 1] int32, as in `_Student`.

  Returns:
    the teacher's view of own tokens, and its log-probs [C, R] if the divergence is over the vocabulary.
  """
  shard = chunk.shard
  scan = vocabulary.scan_vocabulary(
    shard,
    _teacher_logits_of_blocks(chunk),
    len(ids),
    chunk.shared.teacher_unembedding.shape[0],
    chunk.settings.vocab_block,
    chunk.dtype,
    ids=ids,
    keep_logits=chunk.over_vocabulary,
  )
  log_normaliser, maximum = scan.statistics.log_normaliser, shard.own(scan.statistics.maximum)
  own_normaliser = shard.own(log_normaliser)
  logits = shard.own_total(scan.gathered)
  view = TeacherView(
    entropy=shard.own(scan.statistics.entropy), log_prob=divergences.floored(logits[:, -1] - own_normaliser)
  )
  if ids.shape[1] > 1:
    # With a tolerance: compilers may round the maximum and the gathered logits differently.
    threshold = maximum - 1e-5 * (1.0 + jnp.abs(maximum))
    on_support = logits[:, :-1]
    if chunk.own_topk is not None or chunk.given_support is not None:
      on_support = jnp.where(shard.own(ids)[:, :-1] < 0, -jnp.inf, on_support)
    view = view.replace(
      support=on_support - own_normaliser[:, None],
      top1_in_support=(on_support.max(-1) >= threshold).astype(chunk.dtype),
    )
  log_probs = scan.logits - log_normaliser[:, None] if chunk.over_vocabulary else None
  return view, log_probs


def _where_told(chunk: _Chunk, support_log_probs: jax.Array) -> jax.Array:
  """Return log-probs [c, K], replaced by a constant at tokens where an external teacher gives none.

  There student and teacher agree: the divergence is 0, and no gradient flows.
  """
  return jnp.where(chunk.told[:, None], support_log_probs, -math.log(support_log_probs.shape[1] + 1))


def _external_teacher(chunk: _Chunk) -> TeacherView:
  """Return an external teacher's view of own tokens."""
  tokens, dtype = chunk.tokens, chunk.dtype
  known = jnp.where(tokens.token_ids < 0, -jnp.inf, tokens.teacher_log_probs.astype(dtype))
  known = _where_told(chunk, known)
  distribution = divergences.floored(divergences.with_tail(known))
  view = TeacherView(
    entropy=-(jnp.exp(distribution) * distribution).sum(-1),
    support=known,
    top1_in_support=jnp.ones(known.shape[:1], dtype),
  )
  if chunk.kind != 'sampled':
    return view
  at_target = tokens.token_ids == tokens.targets[:, None]
  return view.replace(
    log_prob=jnp.where(at_target, divergences.floored(known), 0).sum(-1),
    knows_target=at_target.any(-1).astype(dtype),
  )


# ---------------------------------------------------------------------------------------------------------------------
# The divergence over the vocabulary
# ---------------------------------------------------------------------------------------------------------------------


def _pair_of_blocks(student: _Student, teacher_log_probs: jax.Array):
  """Return a function from a block of entries to the log-probs [C, W] of student and teacher."""

  def log_probs_of(start: jax.Array | int, size: int) -> tuple[jax.Array, jax.Array]:
    student_logits = lax.dynamic_slice_in_dim(student.scan.logits, start, size, axis=1)
    return (
      student_logits - student.log_normaliser[:, None],
      lax.dynamic_slice_in_dim(teacher_log_probs, start, size, axis=1),
    )

  return log_probs_of


def _divergence_over_vocabulary(chunk: _Chunk, log_probs_of) -> tuple[jax.Array, jax.Array]:
  """Return the divergence [c] of own tokens, and the sum [C] of its slopes over this device's entries."""

  def add(carry, index, start, size, fresh):
    pair = log_probs_of(start, size)
    summands = divergences.divergence_terms(*pair, chunk.alpha), divergences.divergence_slopes(*pair, chunk.alpha)
    if fresh is not None:
      summands = tuple(jnp.where(fresh[None, :], value, 0) for value in summands)
    return tuple(total + value.sum(-1) for total, value in zip(carry, summands, strict=True))

  zeros = jnp.zeros((len(chunk.hidden),), chunk.dtype)
  limit = chunk.shard.limit(chunk.entries)
  divergence, slope_sum = vocabulary.fold_blocks(chunk.entries, chunk.settings.vocab_block, limit, (zeros, zeros), add)
  return chunk.shard.own_total(divergence), slope_sum


# ---------------------------------------------------------------------------------------------------------------------
# Gradient
# ---------------------------------------------------------------------------------------------------------------------


def _gradients(
  chunk: _Chunk, student: _Student, slopes: StudentView, log_probs_of, slope_sum, accumulator
) -> tuple[jax.Array | None, jax.Array | None]:
  """Return the gradients by own hidden states [c, D] and, added to `accumulator`, by the unembedding [R, D].

  By the chain rule through log-softmax, the gradient by the logit of v is Σ_i slope_i·(1[v = i] − p_v) over the ids i
  whose log-probs the loss reads, −slope·p_v·(log p_v + H) for the entropy, and likewise for the divergence over the
  vocabulary.

  Args:
    chunk: the chunk.
    student: scan and ids.
    slopes: derivatives of the loss by the student's view of own tokens.
    log_probs_of: log-probs of student and teacher by blocks, if the divergence is over the vocabulary; else None.
    slope_sum: [C] from `_divergence_over_vocabulary`, if the divergence is over the vocabulary; else None.
    accumulator: [R, D]; None if the gradient by the unembedding is not wanted.
  """
  shard, scan = chunk.shard, student.scan
  temperature = chunk.temperature
  id_slopes = jnp.where(jnp.isneginf(student.target_log_prob), 0.0, slopes.log_prob)[:, None]
  if slopes.support is not None:
    id_slopes = jnp.concatenate([slopes.support, id_slopes], axis=1)
  id_slopes = shard.gather(id_slopes)
  ids = student.ids - shard.offset(chunk.entries)
  slope_total = id_slopes.sum(-1)
  if not chunk.keep_logits:
    at_ids = vocabulary.weighted_entries(chunk.unembedding, ids, id_slopes)
    by_hidden = at_ids - slope_total[:, None] * scan.mean_entry
    return shard.own_total(by_hidden / temperature), accumulator
  if log_probs_of is not None:
    divergence_slope = shard.gather(slopes.divergence)
    slope_total = slope_total + divergence_slope * shard.total(slope_sum)
  entropy_slope = shard.gather(slopes.entropy) if chunk.tokens.entropy_coef is not None else None

  def gradients_of(start: jax.Array | int, size: int) -> jax.Array:
    logits = lax.dynamic_slice_in_dim(scan.logits, start, size, axis=1)
    log_probs = logits - student.log_normaliser[:, None]
    factor = slope_total[:, None]
    if entropy_slope is not None:
      factor = factor + entropy_slope[:, None] * (jnp.maximum(log_probs, -1e30) + student.entropy[:, None])
    gradients = -jnp.exp(log_probs) * factor
    if log_probs_of is not None:
      block_slopes = divergences.divergence_slopes(*log_probs_of(start, size), chunk.alpha)
      gradients = gradients + block_slopes * divergence_slope[:, None]
    return vocabulary.scatter_add(gradients, ids - start, id_slopes) / temperature

  by_hidden, accumulator = vocabulary.pull_back(
    gradients_of,
    chunk.hidden,
    chunk.unembedding,
    chunk.settings.vocab_block,
    shard.limit(chunk.entries),
    chunk.wanted.hidden,
    accumulator,
  )
  return None if by_hidden is None else shard.own_total(by_hidden), accumulator
