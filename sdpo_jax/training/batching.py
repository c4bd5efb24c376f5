"""From rollouts, grades and teacher prompts to the device arrays of an update (host side, NumPy)."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses

import chex
import jax
import numpy as np

from models.policy import Policy
from sdpo_jax.config import Config
from sdpo_jax.objective.aggregation import loss_coefficients
from sdpo_jax.objective.spec import COEFFICIENTS, ObjectiveSpec
from sdpo_jax.rollout.buckets import Buckets, bucket
from sdpo_jax.training import packing
from sdpo_jax.types import Batch, Rollouts, TeacherSignal, TokenRows


def shares_prompts(config: Config, *readers: Policy) -> bool:
  """Return whether samples of a row that have the same teacher prompt share one copy of it.

  Args:
    config: settings.
    *readers: every policy that reads the teacher's rows (`Teacher.readers`).
  """
  return config.actor.pack_sequences and all(policy.shares_prefixes for policy in readers)


def mini_batches(config: Config) -> list[np.ndarray]:
  """Return the samples [M] of each optimizer step of a generation batch, in order.

  They are consecutive; with the balanced order, consecutive ones of every partition together, as the reference's ranks
  contribute to each of its steps (fsdp_workers.py:242-243).
  """
  total = config.data.train_batch_size * config.rollout.n
  size = config.actor.ppo_mini_batch_size * config.rollout.n
  partitions = config.trainer.balance_partitions if config.trainer.batch_order == 'balanced' else 1
  by_partition = np.arange(total).reshape(partitions, total // size, size // partitions)
  return [by_partition[:, step].reshape(-1) for step in range(total // size)]


def token_rows(
  prompts: Sequence[Sequence[int]], completions: np.ndarray, mask: np.ndarray, prompt_length: int
) -> TokenRows:
  """Join prompt and completion without a gap, one sample per row, right-padded to `prompt_length` + T.

  Args:
    prompts: B token lists.
    completions: [B, T] int32.
    mask: [B, T] bool, true for the first tokens of a row.
    prompt_length: room for the prompt.

  Returns:
    Rows with S = prompt_length + T; `target_index` points at the state before each completion token.
  """
  chex.assert_rank([completions, mask], 2)
  chex.assert_type([completions, mask], [int, bool])
  chex.assert_equal_shape([completions, mask])
  chex.assert_axis_dimension(completions, 0, len(prompts))
  ends = mask.sum(1)
  rows = [[(prompt, completions[row, : ends[row]])] for row, prompt in enumerate(prompts)]
  return packing.packed_rows(rows, prompt_length + completions.shape[1], completions.shape[1])


@dataclasses.dataclass
class GenerationBatch:
  """A generation batch as the update sees it: N samples, all in batch order.

  What weighs a token lies per token, from here on: a value of a sample is broadcast where it is made.
  """

  prompts: list[list[int]]  # N student prompts.
  teacher_prompts: list[list[int]] | None  # N prompts of an in-mesh teacher; None: there is none.
  rollouts: Rollouts
  distill_mask: np.ndarray  # [N, T] float32, 1 where the teacher knows something; the others count in no denominator.
  graded: np.ndarray | None = None  # [N] bool, samples that have a score; None: all. The others are in no term at all.
  advantages: np.ndarray | None = None  # [N, T] float32; None: no term reads them.
  old_log_probs: np.ndarray | None = None  # [N, T]; None: on-policy.
  # [N, T] float32, factors of a token's terms that denominators do not see; None: 1.
  distill_weights: np.ndarray | None = None
  policy_weights: np.ndarray | None = None
  signal: TeacherSignal | None = None  # Of an external teacher: token_ids and log_probs [N, T, K].

  def __post_init__(self):
    shape = self.rollouts.completion_mask.shape
    names = ('distill_mask', 'advantages', 'old_log_probs', 'distill_weights', 'policy_weights')
    for name in names:
      value = getattr(self, name)
      if value is not None:
        chex.assert_shape(value, shape, custom_message=name)
        chex.assert_type(value, float)
    if self.graded is not None:
      chex.assert_shape(self.graded, shape[:1])
      chex.assert_type(self.graded, bool)
    if self.signal is not None:
      if self.teacher_prompts is not None:
        raise ValueError('A generation batch has teacher prompts or an external signal, not both.')
      chex.assert_type([self.signal.token_ids, self.signal.log_probs], [int, float])
      chex.assert_shape((self.signal.token_ids, self.signal.log_probs), (*shape, None))

  def __len__(self) -> int:
    return len(self.prompts)

  @property
  def taught(self) -> np.ndarray:
    """[N] bool: samples of which the teacher knows something."""
    return (self.distill_mask > 0).any(1)


def coefficients(batch: GenerationBatch, samples: np.ndarray, config: Config) -> dict[str, np.ndarray]:
  """Return the weights of the terms of the loss by their name in `Batch`, [M, T] each.

  Only the terms that the settings ask for are there. Denominators count every graded sample of the step, those without
  a signal too (reference core_algos.py:1027-1082); ungraded ones are as if they were not there.

  Args:
    batch: the generation batch.
    samples: [M] int, those of one optimizer step.
    config: settings.
  """
  chex.assert_rank(samples, 1)
  chex.assert_type(samples, int)
  actor, spec = config.actor, ObjectiveSpec.from_config(config)
  graded = np.ones(len(samples), bool) if batch.graded is None else batch.graded[samples]
  mask = (batch.rollouts.completion_mask[samples] & graded[:, None]).astype(np.float32)
  scale = actor.loss_scale_factor or config.data.max_response_length

  def aggregated(mask: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    values = loss_coefficients(mask, actor.loss_agg_mode, group_size=actor.loss_group_size, scale=scale, counted=graded)
    return values.astype(np.float32) * (np.float32(1) if weights is None else weights[samples])

  terms = {}
  if spec.distillation:
    terms['distill_coef'] = aggregated(mask * batch.distill_mask[samples], batch.distill_weights)
  if spec.policy_gradient:
    terms['policy_coef'] = aggregated(mask, batch.policy_weights)
  if spec.entropy_bonus:
    terms['entropy_coef'] = aggregated(mask) * np.float32(actor.entropy_coeff)
  return terms


def has_signal(batch: GenerationBatch, coef: dict[str, np.ndarray], samples: np.ndarray) -> np.ndarray:
  """Return which samples can move the parameters, [M] bool; the others are left out of every forward pass."""
  chex.assert_rank(samples, 1)
  chex.assert_shape(list(coef.values()), (len(samples), batch.rollouts.completion_mask.shape[1]))
  live = np.zeros(len(samples), bool)
  for name, values in coef.items():
    moves = values != 0
    if name == 'policy_coef':
      moves &= batch.advantages[samples] != 0
    live |= moves.any(1)
  return live


@dataclasses.dataclass
class MicroBatch:
  """Rows of one forward and backward pass, and the samples that they hold."""

  batch: Batch
  samples: list[list[int]]  # Indices in the generation batch of each row's samples; padding rows hold none.
  lengths: np.ndarray  # [N] completion tokens of every sample of the generation batch.

  def scatter(self, values: np.ndarray, target: np.ndarray) -> None:
    """Write per-token values [rows, W] of the rows to the samples' places in `target` [N, T]."""
    chex.assert_rank([values, target], 2)
    chex.assert_axis_dimension(values, 0, len(self.samples))
    chex.assert_axis_dimension(target, 0, len(self.lengths))
    for row, held in enumerate(self.samples):
      start = 0
      for sample in held:
        length = self.lengths[sample]
        target[sample, :length] = values[row, start : start + length]
        start += length

  def tokens(self, side: TokenRows) -> int:
    """Return how many tokens of a side are not padding."""
    chex.assert_rank(side.segment_ids, 2)
    return int((side.segment_ids > 0).sum())


def micro_batches(
  batch: GenerationBatch, samples: np.ndarray, config: Config, multiple: int = 1, share: bool = False
) -> list[MicroBatch]:
  """Return the micro-batches of one optimizer step.

  Samples with a signal are sorted by length, so that short ones share small buckets, or packed into rows of the largest
  buckets (`actor.pack_sequences`); each micro-batch is padded to `actor.ppo_micro_batch_size` rows (rounded up to
  `multiple`, the number of devices that share them) with rows of coefficient zero.

  Args:
    batch: the generation batch.
    samples: [M] int, those of the optimizer step.
    config: settings.
    multiple: of the rows of a micro-batch.
    share: from `shares_prompts`.
  """
  chex.assert_rank(samples, 1)
  chex.assert_type(samples, int)
  coef = coefficients(batch, samples, config)
  live = np.flatnonzero(has_signal(batch, coef, samples))
  return _split(batch, samples, coef, live, config, multiple, share)


def student_micro_batches(batch: GenerationBatch, config: Config, multiple: int = 1) -> list[MicroBatch]:
  """Return micro-batches of all completions as the student reads them: without a teacher and without coefficients.

  Args:
    batch: the generation batch.
    config: settings.
    multiple: of the rows of a micro-batch.
  """
  chex.assert_rank(batch.rollouts.completion_mask, 2)
  student = dataclasses.replace(batch, teacher_prompts=None, signal=None)
  written = np.flatnonzero(batch.rollouts.completion_mask.any(1))
  return _split(student, np.arange(len(batch)), {}, written, config, multiple, share=False)


def _split(
  batch: GenerationBatch,
  samples: np.ndarray,
  coef: dict[str, np.ndarray],
  live: np.ndarray,
  config: Config,
  multiple: int,
  share: bool,
) -> list[MicroBatch]:
  """Return micro-batches of the samples `samples[live]`, whose coefficients are `coef[name][live]`."""
  size = -(-config.actor.ppo_micro_batch_size // multiple) * multiple
  lengths = batch.rollouts.completion_mask.sum(1)
  if config.actor.pack_sequences:
    held = [[int(live[i]) for i in row] for row in _packed(batch, samples[live], lengths, config, size, share)]
  else:
    prompts = batch.teacher_prompts or batch.prompts
    key = lengths[samples] + np.array([len(prompts[sample]) for sample in samples])
    held = [[int(i)] for i in live[np.argsort(key[live], kind='stable')]]
  return [
    _micro_batch(batch, coef, held[start : start + size], samples, lengths, size, config, share)
    for start in range(0, len(held), size)
  ]


def _packed(
  batch: GenerationBatch, samples: np.ndarray, lengths: np.ndarray, config: Config, size: int, share: bool
) -> list[list[int]]:
  """Return the places in `samples` of those that share a row, for every row."""
  sizes, prompts, shared = _sizes(batch, samples, lengths), None, None
  if share and batch.teacher_prompts is not None:
    prompts, shared = _teacher_prompts(batch, samples)
  held = packing.pack(sizes, _room(config, batch), size, prompts, shared)

  def teacher_tokens(row: list[int]) -> int:
    return sum(packing.taken(_teacher_parts(batch, samples[row], lengths), share))

  if batch.teacher_prompts is not None:
    # Long teacher rows together, so that the others need no more than a smaller bucket.
    held.sort(key=teacher_tokens, reverse=True)
  return held


def _sizes(batch: GenerationBatch, samples: np.ndarray, lengths: np.ndarray) -> np.ndarray:
  """Return the tokens that each sample takes of a student row, of a teacher row, and of its targets: [M, 3]."""
  taught = batch.taught & (batch.teacher_prompts is not None)
  teacher = [len(batch.teacher_prompts[i]) + lengths[i] if taught[i] else 0 for i in samples]
  student = [len(batch.prompts[i]) + lengths[i] for i in samples]
  return np.stack([np.array(student, np.int64), np.array(teacher, np.int64), lengths[samples].astype(np.int64)], axis=1)


def _teacher_prompts(batch: GenerationBatch, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Return (number of the teacher prompt of each sample, what it takes [M, 3] as in `_sizes`), for `pack`."""
  known: dict[tuple[int, ...] | int, int] = {}
  taught = batch.taught
  prompts = [tuple(batch.teacher_prompts[i]) if taught[i] else () for i in samples]
  # A sample without a teacher shares nothing.
  keys = [known.setdefault(prompt or -place, len(known)) for place, prompt in enumerate(prompts)]
  shared = np.zeros((len(samples), 3), np.int64)
  shared[:, 1] = [len(prompt) for prompt in prompts]
  return np.array(keys, np.int64), shared


def _parts(
  batch: GenerationBatch, prompts: list[list[int]], samples: Sequence[int], lengths: np.ndarray, read: np.ndarray
) -> packing.Parts:
  """Return (prompt, completion) of samples; None for the prompts of those that `read` [len(samples)] leaves out."""
  completions = batch.rollouts.completion_tokens
  return [
    (prompts[i] if is_read else None, completions[i, : lengths[i]]) for i, is_read in zip(samples, read, strict=True)
  ]


def _teacher_parts(batch: GenerationBatch, samples: Sequence[int], lengths: np.ndarray) -> packing.Parts:
  # Of these samples alone: the rows of a batch are many, and its mask is [N, T].
  taught = (batch.distill_mask[np.asarray(samples, np.int64)] > 0).any(1)
  return _parts(batch, batch.teacher_prompts, samples, lengths, taught)


def _room(config: Config, batch: GenerationBatch) -> tuple[int, int, int]:
  """Return the tokens of a packed student row, teacher row and of the targets: those of the largest buckets."""
  declared = Buckets.of_update(config)
  prompt, response, reprompt = declared.prompt[-1], declared.response[-1], declared.reprompt[-1]
  for prompts, limit, name in (
    (batch.prompts, prompt, 'data.prompt_buckets'),
    (batch.teacher_prompts or (), reprompt, 'data.reprompt_buckets'),
  ):
    bucket(max(map(len, prompts), default=0), (limit,), name)
  return prompt + response, reprompt + response, response


def _micro_batch(
  batch: GenerationBatch,
  coef: dict[str, np.ndarray],
  held: list[list[int]],
  samples: np.ndarray,
  lengths: np.ndarray,
  size: int,
  config: Config,
  share: bool,
) -> MicroBatch:
  """Return the micro-batch of `size` rows that hold the samples `samples[i]` for the i of each list of `held`."""
  declared = Buckets.of_update(config)
  rollouts = batch.rollouts
  held = held + [[]] * (size - len(held))
  ids = [[int(samples[i]) for i in row] for row in held]
  needed = max(sum(int(lengths[i]) for i in row) for row in ids)
  width = bucket(needed, declared.response, 'data.response_buckets')

  def fit(values: np.ndarray, sources: list[list[int]] = ids) -> np.ndarray:
    """Return per-token values of the rows' samples, one sample after the other, padded with zeros."""
    filled = np.zeros((size, width, *values.shape[2:]), values.dtype)
    for row, (chosen, places) in enumerate(zip(ids, sources, strict=True)):
      if chosen:
        parts = [values[place, : lengths[sample]] for sample, place in zip(chosen, places, strict=True)]
        joined = np.concatenate(parts)
        filled[row, : len(joined)] = joined
    return filled

  def side(contents: Sequence[packing.Parts], sizes: Sequence[int], name: str, share: bool = False) -> TokenRows:
    taken = np.array([packing.taken(row, share) for row in contents])
    # Room that completions leave is there for the prompts of a packed row.
    needed = taken.sum(1) - width if config.actor.pack_sequences else taken[:, 0]
    room = bucket(max(int(needed.max()), 0), sizes, name)
    return packing.packed_rows(contents, room + width, width, share)

  student = [_parts(batch, batch.prompts, row, lengths, np.ones(len(row), bool)) for row in ids]
  teacher = None
  if batch.teacher_prompts is not None:
    contents = [_teacher_parts(batch, row, lengths) for row in ids]
    teacher = side(contents, declared.reprompt, 'data.reprompt_buckets', share)
  arrays = Batch(
    student=side(student, declared.prompt, 'data.prompt_buckets'),
    teacher=teacher,
    targets=fit(rollouts.completion_tokens),
    mask=fit(rollouts.completion_mask.astype(np.float32)),
    old_log_probs=None if batch.old_log_probs is None else fit(batch.old_log_probs.astype(np.float32)),
    advantages=fit(batch.advantages.astype(np.float32)) if 'policy_coef' in coef else None,
    signal=jax.tree.map(fit, batch.signal),
    **{name: None for name in COEFFICIENTS} | {name: fit(values, held) for name, values in coef.items()},
  )
  return MicroBatch(arrays, ids, lengths)
