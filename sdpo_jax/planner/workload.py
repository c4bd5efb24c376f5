"""The micro-batches of a generation batch: their shapes, and their rows and tokens that are not padding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
import dataclasses

import jax
import numpy as np

from sdpo_jax.config import Config
from sdpo_jax.distributed.programs import Program
from sdpo_jax.learning import batching
from sdpo_jax.models.flops import forward_flops, update_flops
from sdpo_jax.models.policy import Policy
from sdpo_jax.objective.objective_spec import REFERENCES
from sdpo_jax.training.specs import batch_spec, objective_spec
from sdpo_jax.types import Batch, Rollouts, TokenRows

Shape = tuple[int, ...]  # Rows, then tokens per row on each side, then targets.


@dataclasses.dataclass(frozen=True)
class SampleLengths:
  """Lengths in tokens of N samples: those of a generation batch are in batch order."""

  prompt: np.ndarray  # [N] int.
  completion: np.ndarray  # [N] int.
  reprompt: np.ndarray  # [N] int.
  trained: np.ndarray  # [N] bool; samples without a signal take part in no update.

  def __len__(self) -> int:
    return len(self.prompt)

  def of(self, samples: np.ndarray) -> SampleLengths:
    """Return the lengths of some samples, [M] int."""
    return SampleLengths(**{name: values[samples] for name, values in vars(self).items()})


@dataclasses.dataclass(frozen=True)
class Workload:
  """The update and scoring passes of one or several generation batches."""

  updates: tuple[Shape, ...]  # One per micro-batch.
  scores: tuple[Shape, ...]
  references: tuple[Shape, ...]  # Scoring by a reference policy.
  live_rows: int  # Rows in updates that hold a sample.
  rows: int
  live_tokens: int  # Tokens in updates, on the student's and teacher's sides, that are not padding.
  tokens: int
  useful_flops: float  # Operations in updates that live tokens require.
  scored_flops: float  # The same for scoring.
  reference_flops: float  # The same for scoring by a reference policy.
  drawn_flops: float  # The same for sampling: one forward pass over all tokens of a completion and its prompt.
  drawn_tokens: int  # Of completions.
  batches: int = 1

  def __add__(self, other: Workload) -> Workload:
    return Workload(**{name: value + getattr(other, name) for name, value in vars(self).items()})


def of_batch(
  config: Config, policy: Policy, samples: SampleLengths, devices: int, share: bool, teacher: Policy | None = None
) -> Workload:
  """Return the workload of a generation batch with these lengths.

  Args:
    config: settings.
    policy: the model, for its operations.
    samples: lengths.
    devices: number of devices that share the rows of a micro-batch.
    share: from `batching.shares_prompts`.
    teacher: model that reads the teacher's prompts; None: the model itself.
  """
  spec, batch = batch_spec(config), _batch(config, samples)
  parts = [batching.micro_batches(batch, chosen, spec, devices, share) for chosen in batching.mini_batches(spec)]
  micros = [micro for part in parts for micro in part]
  sides = [(micro, side) for micro in micros for side in (micro.batch.student, micro.batch.teacher) if side is not None]
  epochs = config.actor.ppo_epochs
  scored = np.zeros(len(samples), bool)
  if spec.terms.computes_log_probs:
    scored[:] = True
  elif spec.terms.weighs_in_update:
    scored[batching.left_out(batch, spec)] = True
  whole = np.full(len(samples), bool(spec.terms.references))

  def scores(chosen: np.ndarray) -> tuple[Shape, ...]:
    micros = batching.student_micro_batches(batch, spec, devices, np.flatnonzero(chosen))
    return tuple(shape(micro.batch) for micro in micros)

  def forward(
    prompts: np.ndarray, chosen: np.ndarray, flops: Callable[..., float] = forward_flops, reader: Policy = policy
  ) -> float:
    pairs = zip((prompts + samples.completion)[chosen].tolist(), samples.completion[chosen].tolist(), strict=True)
    return sum(flops(reader, 1, whole, completion) for whole, completion in pairs)

  moved = samples.trained | spec.terms.trains_all
  student = forward(samples.prompt, moved, update_flops)
  taught = forward(samples.reprompt, samples.trained, reader=teacher or policy) if spec.terms.reads_teacher else 0.0
  return Workload(
    updates=tuple(shape(micro.batch) for micro in micros) * epochs,
    scores=scores(scored),
    references=scores(whole),
    live_rows=epochs * sum(bool(held) for micro in micros for held in micro.samples),
    rows=epochs * sum(len(micro.samples) for micro in micros),
    live_tokens=epochs * sum(micro.tokens(side) for micro, side in sides),
    tokens=epochs * sum(side.tokens.size for _, side in sides),
    useful_flops=epochs * (student + taught),
    scored_flops=forward(samples.prompt, scored),
    reference_flops=forward(samples.prompt, whole),
    drawn_flops=forward(samples.prompt, np.ones(len(samples), bool)),
    drawn_tokens=int(samples.completion.sum()),
  )


def shape(batch: Batch) -> Shape:
  """Return the shape that selects a micro-batch's program: rows, tokens of the sides, targets."""
  return (*batch.student.tokens.shape, *(() if batch.teacher is None else batch.teacher.tokens.shape[1:])) + (
    batch.targets.shape[1],
  )


def program_shape(program: Program) -> Shape:
  """Return the `shape` of the micro-batches for a program of kind 'update', 'score' or of `REFERENCES`.

  Raises:
    ValueError: the program takes no micro-batches.
  """
  for argument, following in zip(program.arguments, (*program.arguments[1:], None), strict=True):
    if isinstance(argument, Batch):
      return shape(argument)
    if isinstance(argument, TokenRows) and isinstance(following, jax.ShapeDtypeStruct):
      return *argument.tokens.shape, following.shape[1]
  raise ValueError(f'A program of kind {program.kind!r} takes no micro-batch.')


def used(found: dict[str, Program], work: Workload) -> dict[str, tuple[str, ...]]:
  """Return the registered names of the programs that the micro-batches run, by kind, one per micro-batch.

  Raises:
    ValueError: no program is registered for a micro-batch's shape.
  """
  passes = {'update': work.updates, 'score': work.scores, **dict.fromkeys(REFERENCES, work.references)}
  return {
    kind: _names(kind, {program_shape(p): name for name, p in found.items() if p.kind == kind}, shapes)
    for kind, shapes in passes.items()
  }


def _names(kind: str, registered: dict[Shape, str], shapes: Iterable[Shape]) -> tuple[str, ...]:
  missing = [each for each in shapes if each not in registered]
  if missing:
    raise ValueError(f'No program of kind {kind!r} is registered for micro-batches of {missing[0]}, of {registered}.')
  return tuple(registered[each] for each in shapes)


def _batch(config: Config, samples: SampleLengths) -> batching.GenerationBatch:
  """Return a generation batch with samples of these lengths; the values are arbitrary."""
  spec, count, width = objective_spec(config), len(samples), config.data.max_response_length
  cartridge, group = config.model.cartridge, np.arange(len(samples), dtype=np.int32) // config.rollout.n
  mask = np.arange(width)[None] < samples.completion[:, None]
  zeros = np.zeros((count, width), np.float32)
  signal = np.where(samples.trained[:, None], np.float32(1), np.float32(0)) * np.ones_like(zeros)

  def prompts(lengths: Sequence[int] | np.ndarray) -> list[list[int]]:
    # Prompts of different samples differ in their first token.
    return [[index, *[0] * (int(length) - 1)] for index, length in enumerate(lengths)]

  rollouts = Rollouts.of_completions(group, np.zeros((count, width), np.int32), mask)
  return batching.GenerationBatch(
    prompts=prompts(samples.prompt),
    teacher_prompts=prompts(samples.reprompt) if spec.reads_teacher else None,
    rollouts=rollouts,
    distill_mask=signal,
    advantages=signal if spec.needs_advantages else None,
    old_log_probs=zeros if spec.needs_old_log_probs else None,
    sampling_log_probs=zeros if spec.weighs_in_update else None,
    references=dict.fromkeys(spec.references, zeros),
    # As if no two questions were about the same chunk, or had the same distractors.
    members=group if cartridge.teacher_scope == 'chunk' or cartridge.distractors else None,
  )
