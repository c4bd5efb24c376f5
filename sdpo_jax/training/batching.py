"""From rollouts, grades and teacher prompts to the device arrays of an update (host side, NumPy)."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses

import numpy as np

from models.policy import Policy
from sdpo_jax.config import Config
from sdpo_jax.errors import UserError
from sdpo_jax.objective.aggregation import loss_coefficients
from sdpo_jax.rollout.engine import buckets, pick
from sdpo_jax.training import packing
from sdpo_jax.types import Batch, Rollouts, TokenRows

COEFFICIENTS = ('distill_coef', 'policy_coef', 'entropy_coef')


def on_policy(config: Config) -> bool:
  """Whether the ratio to the old policy is 1 by construction: one optimizer step a generation batch."""
  return config.actor.ppo_mini_batch_size == config.data.train_batch_size and config.actor.ppo_epochs == 1


def scores_first(config: Config) -> bool:
  """Whether completions are scored by the trainer before the update."""
  return not on_policy(config) or config.algorithm.rollout_correction.rollout_is is not None


def shares_prompts(config: Config, policy: Policy) -> bool:
  """Whether samples of a row that have the same teacher prompt share one copy of it."""
  return config.actor.pack_sequences and policy.shares_prefixes


def mini_batches(config: Config) -> list[np.ndarray]:
  """The rows [M] of each optimizer step of a generation batch, in order.

  Consecutive rows; with the balanced order, consecutive rows of every partition together, as the reference's ranks
  contribute to each of its steps (fsdp_workers.py:242-243).
  """
  total = config.data.train_batch_size * config.rollout.n
  size = config.actor.ppo_mini_batch_size * config.rollout.n
  partitions = config.trainer.balance_partitions if config.trainer.batch_order == 'balanced' else 1
  by_partition = np.arange(total).reshape(partitions, total // size, size // partitions)
  return [by_partition[:, step].reshape(-1) for step in range(total // size)]


def bucket(length: int, lengths: tuple[int, ...], name: str) -> int:
  """The smallest declared length that holds `length`.

  Raises:
    UserError: none does.
  """
  size = pick(lengths, length)
  if size is None:
    raise UserError(f'A length of {length} tokens exceeds the largest bucket of {name}, {max(lengths)}: raise it.')
  return size


@dataclasses.dataclass(frozen=True)
class Buckets:
  """The declared lengths of a run; a micro-batch uses the smallest triple that holds it, and compiles once."""

  prompt: tuple[int, ...]
  response: tuple[int, ...]
  reprompt: tuple[int, ...]

  @classmethod
  def of(cls, config: Config) -> Buckets:
    """Declared in the settings, or powers of two up to the limits."""
    data = config.data
    return cls(
      prompt=buckets(data.prompt_buckets, data.max_prompt_length),
      response=buckets(data.response_buckets, data.max_response_length),
      reprompt=buckets(data.reprompt_buckets, config.actor.self_distillation.max_reprompt_len),
    )

  @classmethod
  def of_update(cls, config: Config) -> Buckets:
    """Those that the update uses: packed rows have the largest lengths, but for declared ones of teacher prompts."""
    declared = cls.of(config)
    if not config.actor.pack_sequences:
      return declared
    reprompt = declared.reprompt if config.data.reprompt_buckets else declared.reprompt[-1:]
    return cls(declared.prompt[-1:], declared.response[-1:], reprompt)


def token_rows(
  prompts: Sequence[Sequence[int]], completions: np.ndarray, mask: np.ndarray, prompt_length: int
) -> TokenRows:
  """Prompt and completion joined without a gap, a sample a row, right-padded to `prompt_length` + T.

  Args:
    prompts: B token lists.
    completions: [B, T] int32.
    mask: [B, T] bool, true for the first tokens of a row.
    prompt_length: room for the prompt.

  Returns:
    rows with S = prompt_length + T; `target_index` points at the state before each completion token.
  """
  ends = mask.sum(1)
  rows = [[(prompt, completions[row, : ends[row]])] for row, prompt in enumerate(prompts)]
  return packing.packed_rows(rows, prompt_length + completions.shape[1], completions.shape[1])


@dataclasses.dataclass
class Samples:
  """A generation batch as the update sees it, all rows in batch order."""

  prompts: list[list[int]]  # N student prompts.
  teacher_prompts: list[list[int]] | None  # N teacher prompts; None: no self-distillation.
  rollouts: Rollouts
  distill_mask: np.ndarray  # [N] float32, 1 where the teacher knows something.
  advantages: np.ndarray  # [N] float32.
  old_log_probs: np.ndarray | None  # [N, T]; None: on-policy.
  rollout_weights: np.ndarray | None  # [N, T] importance weights of sampler against trainer; None: 1.

  def __len__(self) -> int:
    return len(self.prompts)


def coefficients(samples: Samples, rows: np.ndarray, config: Config) -> dict[str, np.ndarray]:
  """[M, T] weights of the terms of the loss for the M `rows` of one optimizer step, by their name in `Batch`.

  Only the terms that the settings ask for are there. Denominators count every row of the step, those without a signal
  too (reference core_algos.py:1027-1082).
  """
  actor = config.actor
  mask = samples.rollouts.completion_mask[rows].astype(np.float32)
  scale = actor.loss_scale_factor or config.data.max_response_length
  group = lambda values: loss_coefficients(
    values, actor.loss_agg_mode, group_size=actor.loss_group_size, scale=scale
  ).astype(np.float32)
  weights = np.float32(1) if samples.rollout_weights is None else samples.rollout_weights[rows]
  if actor.policy_loss.loss_mode == 'sdpo':
    found = {'distill_coef': group(mask * samples.distill_mask[rows][:, None]) * weights}
  else:
    found = {'policy_coef': group(mask) * weights}
  if actor.entropy_coeff:
    found['entropy_coef'] = group(mask) * np.float32(actor.entropy_coeff)
  return found


def has_signal(samples: Samples, coef: dict[str, np.ndarray], rows: np.ndarray) -> np.ndarray:
  """[M] bool: rows that can move the parameters; the others are left out of every forward pass."""
  live = np.zeros(len(rows), bool)
  for name, values in coef.items():
    moves = (values != 0).any(1)
    live |= moves & (samples.advantages[rows] != 0) if name == 'policy_coef' else moves
  return live


@dataclasses.dataclass
class MicroBatch:
  """Rows of one forward and backward pass, and the samples that they hold."""

  batch: Batch
  samples: list[list[int]]  # Of each row the indices of its samples in the generation batch; padding rows hold none.
  lengths: np.ndarray  # [N] completion tokens of every sample of the generation batch.

  def scatter(self, values: np.ndarray, target: np.ndarray) -> None:
    """Writes per-token values [rows, W] of the rows to the samples' places in `target` [N, T]."""
    for row, held in enumerate(self.samples):
      start = 0
      for sample in held:
        length = self.lengths[sample]
        target[sample, :length] = values[row, start : start + length]
        start += length

  def tokens(self, side: TokenRows) -> int:
    """Tokens of a side that are not padding."""
    return int((side.segment_ids > 0).sum())


def micro_batches(
  samples: Samples, rows: np.ndarray, config: Config, multiple: int = 1, share: bool = False
) -> list[MicroBatch]:
  """The micro-batches of one optimizer step.

  Samples with a signal are sorted by length, so that short ones share small buckets, or packed into rows of the largest
  buckets (`actor.pack_sequences`); each micro-batch is padded to `actor.ppo_micro_batch_size` rows (rounded up to
  `multiple`, the number of devices that share them) with rows of coefficient zero.

  Args:
    samples: of the generation batch.
    rows: [M] int, samples of the optimizer step.
    config: settings.
    multiple: of the rows of a micro-batch.
    share: from `shares_prompts`.
  """
  coef = coefficients(samples, rows, config)
  live = np.flatnonzero(has_signal(samples, coef, rows))
  size = -(-config.actor.ppo_micro_batch_size // multiple) * multiple
  lengths = samples.rollouts.completion_mask.sum(1)
  if config.actor.pack_sequences:
    sizes, prompts, shared = _sizes(samples, rows[live], lengths), None, None
    if share and samples.teacher_prompts is not None:
      prompts, shared = _teacher_prompts(samples, rows[live])
    held = packing.pack(sizes, _room(config, samples), size, prompts, shared)
    held = [[int(live[i]) for i in row] for row in held]
    if samples.teacher_prompts is not None:
      # Long teacher rows together, so that the others need no more than a smaller bucket.
      taken = lambda row: sum(packing.taken(_teacher_parts(samples, rows[row], lengths), share))
      held.sort(key=taken, reverse=True)
  else:
    prompts = samples.teacher_prompts or samples.prompts
    key = lengths[rows] + np.array([len(prompts[row]) for row in rows])
    held = [[int(i)] for i in live[np.argsort(key[live], kind='stable')]]
  return [
    _micro_batch(samples, coef, held[start : start + size], rows, lengths, size, config, share)
    for start in range(0, len(held), size)
  ]


def _sizes(samples: Samples, ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
  """[M, 3] tokens that each sample takes of a student row, of a teacher row, and of its targets."""
  taught = samples.teacher_prompts is not None
  teacher = [len(samples.teacher_prompts[i]) + lengths[i] if taught and samples.distill_mask[i] > 0 else 0 for i in ids]
  student = [len(samples.prompts[i]) + lengths[i] for i in ids]
  return np.stack([np.array(student, np.int64), np.array(teacher, np.int64), lengths[ids].astype(np.int64)], axis=1)


def _teacher_prompts(samples: Samples, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """(number of the teacher prompt of each sample, what it takes [M, 3] as in `_sizes`), for `pack`."""
  known: dict[tuple[int, ...] | int, int] = {}
  taught = [samples.distill_mask[i] > 0 for i in ids]
  prompts = [tuple(samples.teacher_prompts[i]) if is_taught else () for i, is_taught in zip(ids, taught, strict=True)]
  # A sample without a teacher shares nothing.
  keys = [known.setdefault(prompt or -place, len(known)) for place, prompt in enumerate(prompts)]
  shared = np.zeros((len(ids), 3), np.int64)
  shared[:, 1] = [len(prompt) for prompt in prompts]
  return np.array(keys, np.int64), shared


def _parts(
  samples: Samples, prompts: list[list[int]], ids: Sequence[int], lengths: np.ndarray, read: np.ndarray
) -> packing.Parts:
  return [(prompts[i] if read[i] else None, samples.rollouts.completion_tokens[i, : lengths[i]]) for i in ids]


def _teacher_parts(samples: Samples, ids: Sequence[int], lengths: np.ndarray) -> packing.Parts:
  return _parts(samples, samples.teacher_prompts, ids, lengths, samples.distill_mask > 0)


def _room(config: Config, samples: Samples) -> tuple[int, int, int]:
  """Tokens of a packed student row, teacher row and of the targets: those of the largest buckets."""
  declared = Buckets.of_update(config)
  prompt, response, reprompt = declared.prompt[-1], declared.response[-1], declared.reprompt[-1]
  for prompts, limit, name in (
    (samples.prompts, prompt, 'data.prompt_buckets'),
    (samples.teacher_prompts or (), reprompt, 'data.reprompt_buckets'),
  ):
    bucket(max(map(len, prompts), default=0), (limit,), name)
  return prompt + response, reprompt + response, response


def _micro_batch(
  samples: Samples,
  coef: dict[str, np.ndarray],
  held: list[list[int]],
  rows: np.ndarray,
  lengths: np.ndarray,
  size: int,
  config: Config,
  share: bool,
) -> MicroBatch:
  """The micro-batch of `size` rows that hold the samples `rows[i]` for the i of each list of `held`."""
  declared = Buckets.of_update(config)
  rollouts = samples.rollouts
  held = held + [[]] * (size - len(held))
  ids = [[int(rows[i]) for i in row] for row in held]
  needed = max(sum(int(lengths[i]) for i in row) for row in ids)
  width = bucket(needed, declared.response, 'data.response_buckets')

  def fit(values: np.ndarray, names: list[list[int]]) -> np.ndarray:
    """Per-token values of the rows' samples, one sample after the other, padded with zeros."""
    filled = np.zeros((size, width), values.dtype)
    for row, (chosen, sources) in enumerate(zip(ids, names, strict=True)):
      if chosen:
        parts = [values[source, : lengths[sample]] for sample, source in zip(chosen, sources, strict=True)]
        joined = np.concatenate(parts)
        filled[row, : len(joined)] = joined
    return filled

  def side(contents: Sequence[packing.Parts], sizes: Sequence[int], name: str, share: bool = False) -> TokenRows:
    taken = np.array([packing.taken(row, share) for row in contents])
    # Room that completions leave is there for the prompts of a packed row.
    needed = taken.sum(1) - width if config.actor.pack_sequences else taken[:, 0]
    room = bucket(max(int(needed.max()), 0), sizes, name)
    return packing.packed_rows(contents, room + width, width, share)

  everyone = np.ones(len(samples), bool)
  student = [_parts(samples, samples.prompts, row, lengths, everyone) for row in ids]
  taught = samples.teacher_prompts is not None
  teacher = [_teacher_parts(samples, row, lengths) for row in ids] if taught else None
  advantages = np.broadcast_to(samples.advantages[:, None], rollouts.completion_mask.shape)
  batch = Batch(
    student=side(student, declared.prompt, 'data.prompt_buckets'),
    teacher=side(teacher, declared.reprompt, 'data.reprompt_buckets', share) if taught else None,
    targets=fit(rollouts.completion_tokens, ids),
    mask=fit(rollouts.completion_mask.astype(np.float32), ids),
    old_log_probs=None if samples.old_log_probs is None else fit(samples.old_log_probs.astype(np.float32), ids),
    advantages=fit(advantages.astype(np.float32), ids),
    **{name: None for name in COEFFICIENTS} | {name: fit(values, held) for name, values in coef.items()},
  )
  return MicroBatch(batch, ids, lengths)
