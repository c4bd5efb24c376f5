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

  @classmethod
  def of_update(cls, config: Config) -> Buckets:
    """Those that the update uses: packed rows have the largest lengths only."""
    declared = cls.of(config)
    if not config.actor.pack_sequences:
      return declared
    return cls(declared.prompt[-1:], declared.response[-1:], declared.reprompt[-1:])


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
  return packed_rows(rows, prompt_length + completions.shape[1], completions.shape[1])


def packed_rows(
  rows: Sequence[Sequence[tuple[Sequence[int] | None, Sequence[int]]]], length: int, width: int
) -> TokenRows:
  """Rows of several samples each, as segments 1, 2, … with positions that restart at 0; padding is segment 0.

  The completion tokens of a row stand in `target_index` one sample after the other.

  Args:
    rows: of each row its samples' (prompt, completion) token ids. A prompt of None: the sample has no tokens in this
      row, but places among the targets (which point at state 0).
    length: S, tokens of a row.
    width: T, targets of a row.
  """
  tokens = np.zeros((len(rows), length), np.int32)
  positions, segment_ids = np.zeros_like(tokens), np.zeros_like(tokens)
  target_index = np.zeros((len(rows), width), np.int32)
  for row, samples in enumerate(rows):
    place = target = segment = 0
    for prompt, completion in samples:
      count = len(completion)
      if prompt is not None:
        segment += 1
        begin, end = place + len(prompt), place + len(prompt) + count
        tokens[row, place:begin], tokens[row, begin:end] = prompt, completion
        positions[row, place:end] = np.arange(end - place)
        segment_ids[row, place:end] = segment
        target_index[row, target : target + count] = np.arange(begin - 1, end - 1)
        place = end
      target += count
  return TokenRows(tokens=tokens, positions=positions, segment_ids=segment_ids, target_index=target_index)


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


def micro_batches(samples: Samples, rows: np.ndarray, config: Config, multiple: int = 1) -> list[MicroBatch]:
  """The micro-batches of one optimizer step.

  Samples with a signal are sorted by length, so that short ones share small buckets, or packed into rows of the largest
  buckets (`actor.pack_sequences`); each micro-batch is padded to `actor.ppo_micro_batch_size` rows (rounded up to
  `multiple`, the number of devices that share them) with rows of coefficient zero.
  """
  coef = coefficients(samples, rows, config)
  live = np.flatnonzero(has_signal(samples, coef, rows))
  size = -(-config.actor.ppo_micro_batch_size // multiple) * multiple
  lengths = samples.rollouts.completion_mask.sum(1)
  if config.actor.pack_sequences:
    held = pack(_sizes(samples, rows[live], lengths), _room(config, samples), size)
    held = [[int(live[i]) for i in row] for row in held]
  else:
    prompts = samples.teacher_prompts or samples.prompts
    key = lengths[rows] + np.array([len(prompts[row]) for row in rows])
    held = [[int(i)] for i in live[np.argsort(key[live], kind='stable')]]
  return [
    _micro_batch(samples, coef, held[start : start + size], rows, lengths, size, config)
    for start in range(0, len(held), size)
  ]


def pack(sizes: np.ndarray, room: Sequence[int], multiple: int) -> list[list[int]]:
  """Items dealt out to few rows.

  As many rows as first-fit decreasing needs, rounded up to `multiple`; then every item, the largest first, goes to the
  emptiest row that has room, so that rows take equally long. Deterministic.

  Args:
    sizes: [M, D] what each item takes of each of D resources; no item takes more than `room`.
    room: D, what a row has of each.
    multiple: of the number of rows.

  Returns:
    the items of each row that has any.
  """
  order = np.argsort(-sizes.sum(1), kind='stable')
  room = np.asarray(room)
  first = _deal(sizes, order, room, None)
  count = -(-len(first) // multiple) * multiple
  return [row for row in _deal(sizes, order, room, count) or first if row]


def _deal(sizes: np.ndarray, order: np.ndarray, room: np.ndarray, count: int | None) -> list[list[int]]:
  """First fit in as many rows as it takes (`count` None), or emptiest fit in `count` rows ([] if that fails)."""
  rows: list[list[int]] = [[] for _ in range(count or 0)]
  used = np.zeros((len(rows), len(room)), np.int64)
  for item in order:
    fits = np.flatnonzero((used + sizes[item] <= room).all(1))
    if not len(fits):
      if count is not None:
        return []
      rows.append([])
      used = np.concatenate([used, np.zeros((1, len(room)), np.int64)])
      fits = np.array([len(rows) - 1])
    row = int(fits[0] if count is None else fits[np.argmin(used[fits].sum(1))])
    rows[row].append(int(item))
    used[row] += sizes[item]
  return rows


def _sizes(samples: Samples, ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
  """[M, 3] tokens that each sample takes of a student row, of a teacher row, and of its targets."""
  taught = samples.teacher_prompts is not None
  teacher = [len(samples.teacher_prompts[i]) + lengths[i] if taught and samples.distill_mask[i] > 0 else 0 for i in ids]
  student = [len(samples.prompts[i]) + lengths[i] for i in ids]
  return np.stack([np.array(student, np.int64), np.array(teacher, np.int64), lengths[ids].astype(np.int64)], axis=1)


def _room(config: Config, samples: Samples) -> tuple[int, int, int]:
  """Tokens of a packed student row, teacher row and of the targets: those of the largest buckets."""
  declared = Buckets.of_update(config)
  (prompt,), (response,), (reprompt,) = declared.prompt, declared.response, declared.reprompt
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

  def side(prompts: list[list[int]], sizes: Sequence[int], name: str, read: np.ndarray) -> TokenRows:
    read_prompt = lambda i: prompts[i] if read[i] else None
    longest = max((len(prompts[i]) for row in ids for i in row if read[i]), default=0)
    room = bucket(longest, sizes, name)
    contents = [[(read_prompt(i), rollouts.completion_tokens[i, : lengths[i]]) for i in row] for row in ids]
    return packed_rows(contents, room + width, width)

  advantages = np.broadcast_to(samples.advantages[:, None], rollouts.completion_mask.shape)
  batch = Batch(
    student=side(samples.prompts, declared.prompt, 'data.prompt_buckets', np.ones(len(samples), bool)),
    teacher=None
    if samples.teacher_prompts is None
    else side(samples.teacher_prompts, declared.reprompt, 'data.reprompt_buckets', samples.distill_mask > 0),
    targets=fit(rollouts.completion_tokens, ids),
    mask=fit(rollouts.completion_mask.astype(np.float32), ids),
    old_log_probs=None if samples.old_log_probs is None else fit(samples.old_log_probs.astype(np.float32), ids),
    advantages=fit(advantages.astype(np.float32), ids),
    **{name: None for name in COEFFICIENTS} | {name: fit(values, held) for name, values in coef.items()},
  )
  return MicroBatch(batch, ids, lengths)
