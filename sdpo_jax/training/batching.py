"""From rollouts, grades and teacher prompts to the device arrays of an update (host side, NumPy)."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses

import numpy as np

from sdpo_jax.config import Config
from sdpo_jax.errors import UserError
from sdpo_jax.objective.aggregation import loss_coefficients
from sdpo_jax.rollout.engine import buckets, pick
from sdpo_jax.types import Batch, Rollouts, TokenRows

COEFFICIENTS = ('distill_coef', 'policy_coef', 'entropy_coef')


def on_policy(config: Config) -> bool:
  """Whether the ratio to the old policy is 1 by construction: one optimizer step a generation batch."""
  return config.actor.ppo_mini_batch_size == config.data.train_batch_size and config.actor.ppo_epochs == 1


def scores_first(config: Config) -> bool:
  """Whether completions are scored by the trainer before the update."""
  return not on_policy(config) or config.algorithm.rollout_correction.rollout_is is not None


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


def token_rows(
  prompts: Sequence[Sequence[int]], completions: np.ndarray, mask: np.ndarray, prompt_length: int
) -> TokenRows:
  """Prompt and completion joined without a gap, right-padded to `prompt_length` + T.

  Args:
    prompts: B token lists.
    completions: [B, T] int32.
    mask: [B, T] bool.
    prompt_length: room for the prompt.

  Returns:
    rows with S = prompt_length + T; `target_index` points at the state before each completion token.
  """
  rows, width = completions.shape
  tokens = np.zeros((rows, prompt_length + width), np.int32)
  segment_ids = np.zeros_like(tokens)
  target_index = np.zeros((rows, width), np.int32)
  for row, prompt in enumerate(prompts):
    start, length = len(prompt), int(mask[row].sum())
    tokens[row, :start] = prompt
    tokens[row, start : start + length] = completions[row, :length]
    segment_ids[row, : start + length] = 1
    target_index[row, :length] = np.arange(start - 1, start - 1 + length)
  positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
  return TokenRows(tokens=tokens, positions=positions * segment_ids, segment_ids=segment_ids, target_index=target_index)


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
  """Rows of one forward and backward pass, and where they stand in the generation batch."""

  batch: Batch
  rows: np.ndarray  # [m] indices into the generation batch; the batch is padded beyond them.


def micro_batches(samples: Samples, rows: np.ndarray, config: Config, multiple: int = 1) -> list[MicroBatch]:
  """The micro-batches of one optimizer step.

  Rows with a signal are sorted by length, so that short ones share small buckets; each micro-batch is padded to
  `actor.ppo_micro_batch_size` rows (rounded up to `multiple`, the number of devices that share them) with rows of
  coefficient zero.
  """
  coef = coefficients(samples, rows, config)
  live = np.flatnonzero(has_signal(samples, coef, rows))
  lengths = samples.rollouts.completion_mask.sum(1)
  prompt_lengths = lambda prompts: np.array([len(prompts[row]) for row in rows])
  key = lengths[rows] + prompt_lengths(samples.teacher_prompts or samples.prompts)
  live = live[np.argsort(key[live], kind='stable')]
  size = -(-config.actor.ppo_micro_batch_size // multiple) * multiple
  return [
    MicroBatch(
      _micro_batch(samples, coef, live[start : start + size], rows, size, config), rows[live[start : start + size]]
    )
    for start in range(0, len(live), size)
  ]


def _micro_batch(
  samples: Samples, coef: dict[str, np.ndarray], picked: np.ndarray, rows: np.ndarray, size: int, config: Config
) -> Batch:
  declared = Buckets.of(config)
  ids = rows[picked]
  rollouts = samples.rollouts
  width = bucket(int(rollouts.completion_mask[ids].sum(1).max()), declared.response, 'data.response_buckets')

  def fit(values: np.ndarray) -> np.ndarray:
    """The picked rows at this width, padded with zero rows."""
    values = values[:, :width]
    padded = np.zeros((size, width), values.dtype)
    padded[: len(values), : values.shape[1]] = values
    return padded

  def side(prompts: list[list[int]], sizes: Sequence[int], name: str, read: np.ndarray) -> TokenRows:
    chosen = [prompts[i] if used else [0] for i, used in zip(ids, read, strict=True)] + [[0]] * (size - len(ids))
    room = bucket(max(map(len, chosen)), sizes, name)
    return token_rows(chosen, fit(rollouts.completion_tokens[ids]), fit(rollouts.completion_mask[ids]), room)

  mask = fit(rollouts.completion_mask[ids]).astype(np.float32)
  return Batch(
    student=side(samples.prompts, declared.prompt, 'data.prompt_buckets', np.ones(len(ids), bool)),
    teacher=None
    if samples.teacher_prompts is None
    else side(samples.teacher_prompts, declared.reprompt, 'data.reprompt_buckets', samples.distill_mask[ids] > 0),
    targets=fit(rollouts.completion_tokens[ids] * rollouts.completion_mask[ids]),
    mask=mask,
    old_log_probs=None if samples.old_log_probs is None else fit(samples.old_log_probs[ids].astype(np.float32)),
    advantages=fit(np.broadcast_to(samples.advantages[ids][:, None], rollouts.completion_mask[ids].shape)).astype(
      np.float32
    )
    * mask,
    **{name: None for name in COEFFICIENTS} | {name: fit(values[picked]) for name, values in coef.items()},
  )
