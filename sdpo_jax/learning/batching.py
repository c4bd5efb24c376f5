"""Device arrays of an update, built on the host from rollouts, grades and teacher prompts (NumPy)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import dataclasses
import functools
import itertools

import chex
import jax
import numpy as np

from sdpo_jax.learning import packing
from sdpo_jax.models.policy import NO_MEMBER, Policy
from sdpo_jax.objective.aggregation import loss_coefficients
from sdpo_jax.objective.objective_spec import ObjectiveSpec
from sdpo_jax.rollout.buckets import Buckets, bucket
from sdpo_jax.types import COEFFICIENTS, Batch, Rollouts, TeacherSignal, TokenRows


@dataclasses.dataclass(frozen=True)
class BatchSpec:
  """How a generation batch becomes optimizer steps and micro-batches, and the weights of its tokens in the loss."""

  terms: ObjectiveSpec
  buckets: Buckets
  samples: int  # N, samples of a generation batch.
  step_samples: int  # Samples of one optimizer step; divides N.
  rows: int  # Rows of a micro-batch, before they are rounded up to a multiple of the devices.
  partitions: int = 1  # Parts of the generation batch of which every optimizer step takes an equal share.
  packs: bool = False  # Whether a row may hold several samples.
  aggregation: str = 'token-mean'  # This and the next two: arguments of `loss_coefficients`.
  group_size: int | None = None
  scale: float | None = None
  weights: tuple[float, ...] = (1.0,) * len(COEFFICIENTS)  # Weights of the loss's terms.


def shares_prompts(spec: BatchSpec, *readers: Policy) -> bool:
  """Return whether samples in a row that have the same teacher prompt share one copy of it.

  Args:
    spec: whether rows are packed.
    *readers: every policy that reads the teacher's rows (`Teacher.readers`).
  """
  return spec.packs and all(policy.shares_prefixes for policy in readers)


def mini_batches(spec: BatchSpec, present: np.ndarray | None = None) -> list[np.ndarray]:
  """Return the samples [M] of each optimizer step of a generation batch, in order.

  `present` [N] bool says which samples exist (None: all); steps without any are left out. The samples of a step are
  consecutive; in the balanced order a step takes consecutive samples of every partition, as each rank of the reference
  contributes to each of its steps (fsdp_workers.py:242-243).
  """
  count, parts = spec.samples // spec.step_samples, spec.partitions
  by_partition = np.arange(spec.samples).reshape(parts, count, spec.step_samples // parts)
  steps = [by_partition[:, step].reshape(-1) for step in range(count)]
  return steps if present is None else [samples for samples in steps if present[samples].any()]


def micro_batch_rows(spec: BatchSpec, devices: int) -> int:
  """Return the rows of a micro-batch, rounded up to a multiple of `devices`."""
  return -(-spec.rows // devices) * devices


def token_rows(
  prompts: Sequence[Sequence[int]], completions: np.ndarray, mask: np.ndarray, prompt_length: int
) -> TokenRows:
  """Join prompt and completion without a gap, one sample per row, right-padded to `prompt_length` + T.

  Args:
    prompts: B token lists.
    completions: [B, T] int32.
    mask: [B, T] bool, true for the completion's tokens, which come first in a row.
    prompt_length: maximum number of prompt tokens.

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
  """A generation batch as the update reads it: N samples, all in batch order.

  All weights are per token from here on: values per sample are broadcast over the tokens when the batch is built.
  """

  prompts: list[list[int]]  # N student prompts.
  teacher_prompts: list[list[int]] | None  # N prompts of an in-mesh teacher; None: there is none.
  rollouts: Rollouts
  distill_mask: np.ndarray  # [N, T] float32, how often a token counts in denominators: where there is no teacher, 0.
  # [N] bool, samples that are learned from; None: all. The others enter no term of the loss.
  graded: np.ndarray | None = None
  # [N] bool, samples of `graded` with a score, which the policy gradient uses. None: all of them.
  scored: np.ndarray | None = None
  advantages: np.ndarray | None = None  # [N, T] float32; None: no term reads them.
  old_log_probs: np.ndarray | None = None  # [N, T]; None: on-policy.
  # [N, T] float32, factors on a token's loss terms that the denominators do not include; None: 1.
  distill_weights: np.ndarray | None = None
  policy_weights: np.ndarray | None = None
  # [N, T] float32, log-probs of the sampler, if the update computes such a factor from them; None: it does not.
  sampling_log_probs: np.ndarray | None = None
  # [N, T] float32 each, log-probs under the policies that terms read, `ObjectiveSpec.references`.
  references: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
  signal: TeacherSignal | None = None  # From an external teacher: token_ids and log_probs [N, T, K].
  present: np.ndarray | None = None  # [N] bool, samples that exist; None: all. The others have no tokens.
  members: np.ndarray | None = None  # [N] int32 of the teacher's rows, see `TokenRows`; None: it needs none.
  mixtures: np.ndarray | None = None  # [N, K] int32, members of the student's rows; None: the same.

  def __post_init__(self):
    shape = self.rollouts.completion_mask.shape
    names = ('distill_mask', 'advantages', 'old_log_probs', 'distill_weights', 'policy_weights', 'sampling_log_probs')
    for name, value in ({name: getattr(self, name) for name in names} | self.references).items():
      if value is not None:
        chex.assert_shape(value, shape, custom_message=name)
        chex.assert_type(value, float)
    for flags in (self.graded, self.scored, self.present):
      if flags is not None:
        chex.assert_shape(flags, shape[:1])
        chex.assert_type(flags, bool)
    if self.signal is not None:
      if self.teacher_prompts is not None:
        raise ValueError('A generation batch has teacher prompts or an external signal, not both.')
      chex.assert_type([self.signal.token_ids, self.signal.log_probs], [int, float])
      chex.assert_shape((self.signal.token_ids, self.signal.log_probs), (*shape, None))

  def __len__(self) -> int:
    return len(self.prompts)

  @functools.cached_property
  def lengths(self) -> np.ndarray:
    """The number of completion tokens of each sample, [N] int."""
    return np.count_nonzero(self.rollouts.completion_mask, axis=1)

  @functools.cached_property
  def taught(self) -> np.ndarray:
    """Samples for which the teacher has extra context, [N] bool."""
    return (self.distill_mask > 0).any(1)

  def scatter(self, samples: Sequence[Sequence[int]], values: np.ndarray, target: np.ndarray) -> None:
    """Write per-token values of rows to their samples' places.

    Args:
      samples: samples of each row, in order.
      values: [rows, W, …], per-token values of the rows.
      target: [N, T, …], array to write to.
    """
    chex.assert_equal_rank([values, target])
    chex.assert_axis_dimension(values, 0, len(samples))
    chex.assert_axis_dimension(target, 0, len(self))
    for row, held in enumerate(samples):
      start = 0
      for sample in held:
        length = self.lengths[sample]
        target[sample, :length] = values[row, start : start + length]
        start += length


def coefficients(batch: GenerationBatch, samples: np.ndarray, spec: BatchSpec) -> dict[str, np.ndarray]:
  """Return the per-token coefficients of the loss terms by their names in `Batch`, [M, T] each.

  Only the loss's own terms are included. Ungraded samples are ignored. A term is averaged over the tokens that have it
  in each group of `actor.loss_group_size` samples, and then over the groups with a graded sample, even those without a
  signal (reference core_algos.py:1027-1082). If one of eight graded samples is taught, it has the weight 1.0 by
  default, as all are one group; 0.25 in groups of two; and 0.125 in groups of one, as in the reference's runs.

  Args:
    batch: the generation batch.
    samples: [M] int, those of one optimizer step.
    spec: settings.
  """
  chex.assert_rank(samples, 1)
  chex.assert_type(samples, int)
  graded = np.ones(len(samples), bool) if batch.graded is None else batch.graded[samples]
  mask = (batch.rollouts.completion_mask[samples] & graded[:, None]).astype(np.float32)

  def aggregated(mask: np.ndarray, weights: np.ndarray | None = None, counted: np.ndarray = graded) -> np.ndarray:
    values = loss_coefficients(mask, spec.aggregation, group_size=spec.group_size, scale=spec.scale, counted=counted)
    return values.astype(np.float32) * (np.float32(1) if weights is None else weights[samples])

  found = {}
  for name in spec.terms.coefficients:
    if name == 'distill_coef':
      values = aggregated(mask * batch.distill_mask[samples], batch.distill_weights)
    elif name == 'policy_coef':
      scored = graded if batch.scored is None else graded & batch.scored[samples]
      values = aggregated(mask * scored[:, None].astype(np.float32), batch.policy_weights, scored)
    else:
      values = aggregated(mask)
    found[name] = values * np.float32(spec.weights[COEFFICIENTS.index(name)])
  return found


def has_signal(batch: GenerationBatch, coef: dict[str, np.ndarray], samples: np.ndarray) -> np.ndarray:
  """Return which samples can change the parameters, [M] bool; the others are left out of every forward pass."""
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
  """Rows of one forward and backward pass, and the samples they hold."""

  batch: Batch
  samples: list[list[int]]  # Indices in the generation batch of each row's samples; padding rows hold none.

  def tokens(self, side: TokenRows) -> int:
    """Return the number of tokens on one side, student or teacher, without padding."""
    chex.assert_rank(side.segment_ids, 2)
    return int(np.count_nonzero(side.segment_ids))


def micro_batches(
  batch: GenerationBatch, samples: np.ndarray, spec: BatchSpec, multiple: int = 1, share: bool = False
) -> Iterator[MicroBatch]:
  """Yield the micro-batches of one optimizer step; each is built when it is requested.

  Samples with a signal are sorted by length, so that short ones share small buckets, or packed into rows
  (`BatchSpec.packs`). Each micro-batch has the smallest declared lengths that hold it, and is padded with rows of
  coefficient zero to `BatchSpec.rows` rows, rounded up to a multiple of `multiple`.

  Args:
    batch: the generation batch.
    samples: [M] int, the samples of the optimizer step.
    spec: settings.
    multiple: number of devices that share the rows.
    share: result of `shares_prompts`.
  """
  chex.assert_rank(samples, 1)
  chex.assert_type(samples, int)
  coef = coefficients(batch, samples, spec)
  live = np.flatnonzero(has_signal(batch, coef, samples))
  return _split(batch, samples, coef, live, spec, multiple, share)


def student_micro_batches(
  batch: GenerationBatch, spec: BatchSpec, multiple: int = 1, samples: np.ndarray | None = None
) -> Iterator[MicroBatch]:
  """Yield micro-batches of completions as the student reads them, without teacher rows or coefficients.

  Args:
    batch: the generation batch.
    spec: settings.
    multiple: number of devices that share the rows.
    samples: [M] int, the samples to include; None: all.
  """
  chex.assert_rank(batch.rollouts.completion_mask, 2)
  samples = np.arange(len(batch)) if samples is None else samples
  student = dataclasses.replace(batch, teacher_prompts=None, signal=None)
  written = np.flatnonzero(batch.rollouts.completion_mask[samples].any(1))
  return _split(student, samples, {}, written, spec, multiple, share=False)


def reading_micro_batches(
  batch: GenerationBatch, spec: BatchSpec, multiple: int = 1, share: bool = False
) -> Iterator[MicroBatch]:
  """Yield micro-batches of all completions as student and teacher read them, without coefficients.

  Their lengths are among those of `micro_batches`. The arguments are the same; an external teacher's signal is left
  out.
  """
  written = np.flatnonzero(batch.rollouts.completion_mask.any(1))
  read = dataclasses.replace(batch, signal=None, old_log_probs=None)
  return _split(read, np.arange(len(batch)), {}, written, spec, multiple, share)


def left_out(batch: GenerationBatch, spec: BatchSpec) -> np.ndarray:
  """Return the samples [M] that are in no micro-batch of the update."""
  steps = mini_batches(spec)
  signal = [has_signal(batch, coefficients(batch, samples, spec), samples) for samples in steps]
  return np.sort(np.concatenate([samples[~live] for samples, live in zip(steps, signal, strict=True)]))


def _split(
  batch: GenerationBatch,
  samples: np.ndarray,
  coef: dict[str, np.ndarray],
  live: np.ndarray,
  spec: BatchSpec,
  multiple: int,
  share: bool,
) -> Iterator[MicroBatch]:
  """Yield micro-batches of the samples `samples[live]`, whose coefficients are `coef[name][live]`."""
  size = micro_batch_rows(spec, multiple)
  if spec.packs:
    held = [[int(live[i]) for i in row] for row in _packed(batch, samples[live], spec, size, share)]
  else:
    prompts = batch.teacher_prompts or batch.prompts
    key = batch.lengths[samples] + np.array([len(prompts[sample]) for sample in samples])
    held = [[int(i)] for i in live[np.argsort(key[live], kind='stable')]]
  for start in range(0, len(held), size):
    yield _micro_batch(batch, coef, held[start : start + size], samples, size, spec, share)


def _packed(batch: GenerationBatch, samples: np.ndarray, spec: BatchSpec, size: int, share: bool) -> list[list[int]]:
  """Return, for every row, the indices into `samples` of the samples that it holds.

  Of several arrangements, rows of one sample among them, it is the one whose micro-batches compute the fewest tokens.
  """
  sizes, count = _sizes(batch, samples), len(samples)
  keys, shared = np.arange(count), np.zeros_like(sizes)
  if share and batch.teacher_prompts is not None:
    keys, shared = _teacher_prompts(batch, samples)
  _check_prompts(spec, batch)
  declared = _declared(batch, spec)
  rooms = [(prompt + width, reprompt + width, width) for prompt, reprompt, width in declared]
  alike = _alike(batch, samples)

  @functools.cache
  def taken(row: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the tokens that a row needs on the student's side, on the teacher's side, and as targets."""
    student, _, targets = sizes[list(row)].sum(0).tolist()
    if batch.teacher_prompts is None:
      return student, 0, targets
    return student, sum(packing.taken(_teacher_parts(batch, samples[list(row)]), share)), targets

  def cost(rows: list[tuple[int, ...]]) -> int:
    """Return the total cost (`_cost`) of the bucket lengths of all micro-batches."""
    micros = [rows[start : start + size] for start in range(0, len(rows), size)]
    return sum(_cost(_holding(declared, *map(max, zip(*map(taken, micro), strict=True)))) for micro in micros)

  def long_first(rows: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    # Put long rows together, those of the teacher first, so that the others fit into a smaller bucket.
    return sorted(rows, key=lambda row: taken(row)[1::-1], reverse=True)

  def dealt(
    chosen: np.ndarray, room: tuple[int, int, int], smaller: Sequence[tuple[int, int, int]]
  ) -> list[tuple[int, ...]]:
    """Return rows that have this room and hold the `chosen` [M] bool; see `packing.pack` for `smaller`."""
    parts = [part[chosen[part]] for part in alike]
    multiple = size if len(parts) == 1 else 1
    return [
      tuple(part[row].tolist())
      for part in parts
      for row in packing.pack(sizes[part], room, multiple, keys[part], shared[part], smaller)
    ]

  def arrangements() -> Iterator[list[tuple[int, ...]]]:
    yield long_first([(place,) for place in range(count)])
    for smaller in ((), rooms[:-1]):
      rows = dealt(np.ones(count, bool), rooms[-1], smaller)
      last = max(len(rows) - 1, 0) // size * size
      yield long_first(rows)
      yield long_first(rows[:last]) + rows[last:]
    tried = set()
    for number, room in enumerate(rooms[:-1]):
      # The samples that fit into short rows share these, apart from the others.
      fits = (sizes <= room).all(1)
      if fits.any() and fits.tobytes() not in tried:
        tried.add(fits.tobytes())
        yield long_first(dealt(~fits, rooms[-1], rooms[:-1])) + long_first(dealt(fits, room, rooms[:number]))

  return [list(row) for row in min(arrangements(), key=cost)]


def _alike(batch: GenerationBatch, samples: np.ndarray) -> list[np.ndarray]:
  """Return the indices into `samples` of those that may share a row: they read the same members of every bank."""
  read = [np.zeros((len(samples), 1), np.int32)]
  read += [held.reshape(len(held), -1)[samples] for held in (batch.members, batch.mixtures) if held is not None]
  _, kinds = np.unique(np.concatenate(read, axis=1), axis=0, return_inverse=True)
  return [np.flatnonzero(kinds.reshape(-1) == kind) for kind in range(kinds.max(initial=-1) + 1)]


def _declared(batch: GenerationBatch, spec: BatchSpec) -> list[tuple[int, int, int]]:
  """Return the declared (prompt, teacher prompt, completion) lengths of packed rows, the cheapest first."""
  declared = spec.buckets
  prompts = declared.prompts if batch.teacher_prompts is not None else tuple((length, 0) for length in declared.prompt)
  return sorted(((*pair, width) for pair, width in itertools.product(prompts, declared.response)), key=_cost)


def _cost(lengths: tuple[int, int, int]) -> int:
  """Return the cost of a row, in tokens per pass: the student's backward pass costs twice its forward pass."""
  prompt, reprompt, response = lengths
  return 3 * (prompt + response) + reprompt + response


def _holding(
  declared: Sequence[tuple[int, int, int]], student: int, teacher: int, targets: int
) -> tuple[int, int, int]:
  """Return the first of the `declared` lengths whose packed rows hold this many tokens.

  Prompts may use the room that completions leave.
  """
  return next(
    (prompt, reprompt, width)
    for prompt, reprompt, width in declared
    if width >= targets and prompt + width >= student and reprompt + width >= teacher
  )


def _sizes(batch: GenerationBatch, samples: np.ndarray) -> np.ndarray:
  """Return the tokens that each sample takes in a student row, in a teacher row, and as targets: [M, 3]."""
  teacher = np.zeros(len(samples), np.int64)
  if batch.teacher_prompts is not None:
    read = batch.taught[samples]
    teacher[read] = [len(batch.teacher_prompts[i]) + batch.lengths[i] for i in samples[read]]
  student = [len(batch.prompts[i]) + batch.lengths[i] for i in samples]
  return np.stack([np.array(student, np.int64), teacher, batch.lengths[samples].astype(np.int64)], axis=1)


def _teacher_prompts(batch: GenerationBatch, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Return the id of each sample's teacher prompt, and the tokens it takes ([M, 3] as in `_sizes`), for `pack`."""
  known: dict[tuple[int, ...] | int, int] = {}
  prompts = [tuple(batch.teacher_prompts[i]) if batch.taught[i] else () for i in samples]
  # A sample without a teacher prompt shares nothing.
  keys = [known.setdefault(prompt or -place, len(known)) for place, prompt in enumerate(prompts)]
  shared = np.zeros((len(samples), 3), np.int64)
  shared[:, 1] = [len(prompt) for prompt in prompts]
  return np.array(keys, np.int64), shared


def _parts(batch: GenerationBatch, prompts: list[list[int]], read: np.ndarray, samples: Sequence[int]) -> packing.Parts:
  """Return (prompt, completion) of each of some samples; the prompt is None where `read` [N] is false."""
  completions = batch.rollouts.completion_tokens
  return [(prompts[i] if read[i] else None, completions[i, : batch.lengths[i]]) for i in samples]


def _teacher_parts(batch: GenerationBatch, samples: Sequence[int]) -> packing.Parts:
  return _parts(batch, batch.teacher_prompts, batch.taught, samples)


def _check_prompts(spec: BatchSpec, batch: GenerationBatch) -> None:
  """Raise UserError if a prompt of packed rows is longer than the largest declared length."""
  declared = spec.buckets
  for prompts, limit, name in (
    (batch.prompts, declared.prompt[-1], 'data.prompt_buckets'),
    (batch.teacher_prompts or (), declared.reprompt[-1], 'data.reprompt_buckets'),
  ):
    bucket(max(map(len, prompts), default=0), (limit,), name)


def _lengths(
  batch: GenerationBatch,
  spec: BatchSpec,
  targets: int,
  student: Sequence[tuple[int, int]],
  teacher: Sequence[tuple[int, int]],
) -> tuple[int, int, int]:
  """Return the declared (prompt, teacher prompt, completion) lengths that hold the rows of a micro-batch.

  Args:
    batch: the generation batch.
    spec: settings.
    targets: the largest number of target tokens of a row.
    student: (prompt tokens, completion tokens) of each row.
    teacher: the same for the teacher's rows; empty: there are none.
  """
  if spec.packs:
    needed, reads = (max(map(sum, side), default=0) for side in (student, teacher))
    return _holding(_declared(batch, spec), needed, reads, targets)
  declared = spec.buckets

  width = bucket(targets, declared.response, 'data.response_buckets')
  asked, reads = (max((prompt for prompt, _ in side), default=0) for side in (student, teacher))
  if teacher:
    return *declared.holding(asked, reads), width
  return bucket(asked, declared.prompt, 'data.prompt_buckets'), 0, width


def _micro_batch(
  batch: GenerationBatch,
  coef: dict[str, np.ndarray],
  held: list[list[int]],
  samples: np.ndarray,
  size: int,
  spec: BatchSpec,
  share: bool,
) -> MicroBatch:
  """Return the micro-batch of `size` rows in which row r holds the samples `samples[i]` for i in `held[r]`."""
  rollouts, lengths = batch.rollouts, batch.lengths
  held = held + [[]] * (size - len(held))
  ids = [[int(samples[i]) for i in row] for row in held]
  targets = max(sum(int(lengths[i]) for i in row) for row in ids)
  student = [_parts(batch, batch.prompts, np.ones(len(batch), bool), row) for row in ids]
  teacher = [] if batch.teacher_prompts is None else [_teacher_parts(batch, row) for row in ids]
  prompt, reprompt, width = _lengths(
    batch,
    spec,
    targets,
    [packing.taken(row, False) for row in student],
    [packing.taken(row, share) for row in teacher],
  )

  def fit(values: np.ndarray, sources: list[list[int]] = ids, dtype: np.dtype | None = None) -> np.ndarray:
    """Return per-token values of the rows' samples, concatenated along each row and padded with zeros."""
    filled = np.zeros((size, width, *values.shape[2:]), dtype or values.dtype)
    for row, (chosen, places) in enumerate(zip(ids, sources, strict=True)):
      start = 0
      for sample, place in zip(chosen, places, strict=True):
        stop = start + lengths[sample]
        filled[row, start:stop] = values[place, : lengths[sample]]
        start = stop
    return filled

  def fit_float(values: np.ndarray | None) -> np.ndarray | None:
    return None if values is None else fit(values, dtype=np.dtype(np.float32))

  def of_rows(values: np.ndarray | None) -> np.ndarray | None:
    """Return the values [size, …] of each row's samples, which have the same."""
    if values is None:
      return None
    return np.stack([values[row[0]] if row else np.full_like(values[0], NO_MEMBER) for row in ids])

  members = of_rows(batch.members)
  mixtures = members if batch.mixtures is None else of_rows(batch.mixtures)
  arrays = Batch(
    student=packing.packed_rows(student, prompt + width, width).replace(members=mixtures),
    teacher=packing.packed_rows(teacher, reprompt + width, width, share).replace(members=members) if teacher else None,
    targets=fit(rollouts.completion_tokens),
    mask=fit_float(rollouts.completion_mask),
    old_log_probs=fit_float(batch.old_log_probs),
    sampling_log_probs=fit_float(batch.sampling_log_probs) if coef else None,
    advantages=fit_float(batch.advantages) if 'policy_coef' in coef else None,
    **{f'{name}_log_probs': fit_float(values) if coef else None for name, values in batch.references.items()},
    signal=jax.tree.map(fit, batch.signal),
    **{name: None for name in COEFFICIENTS} | {name: fit(values, held) for name, values in coef.items()},
  )
  return MicroBatch(arrays, ids)
