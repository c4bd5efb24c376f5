"""HBM reads in one step of a compiled decode loop: weights, the cache, and everything else."""

from __future__ import annotations

from collections.abc import Collection, Iterable
import dataclasses
import math

from sdpo_jax.models.attention import decode_kernel
from sdpo_jax.planner import hlo, kernels

# Arguments of the program `decode.advance`, by name prefix.
_WEIGHTS, _CACHE = ('base', 'trainable'), 'cache.stores'


@dataclasses.dataclass(frozen=True)
class StepReads:
  """Bytes that a chip reads from HBM to draw one token for each of its rows, excluding arrays kept in VMEM."""

  weights: float  # In compute dtype, as in the sampler's copy.
  recent: float  # Keys and values of the tokens drawn in this chunk of steps.
  rest: float  # Activations, logits, sampling.
  chunk: float  # A step's share of the reads before and after the loop.
  strays: float  # Bytes of the cache read by anything but its attention kernel, for example a copy.
  slot: float  # Bytes that the kernel reads per slot index, over all rows and layers.
  slots: int  # Slots per row.
  block: int  # Slots that the kernel reads at once.

  def cache(self, filled: float) -> float:
    """Return the bytes that the kernel reads if every row holds `filled` tokens: whole blocks, at least one."""
    return self.slot * min(max(math.ceil(filled / self.block), 1) * self.block, self.slots)

  def total(self, filled: float) -> float:
    """Return all bytes read if every row holds `filled` tokens."""
    return self.weights + self.recent + self.rest + self.chunk + self.strays + self.cache(filled)


def of_step(module: hlo.Module, steps: int, cases: Collection[str]) -> StepReads:
  """Return the bytes that a step of a decode loop reads.

  Args:
    module: the compiled program `decode.advance`.
    steps: its maximum number of steps.
    cases: as in `hlo.trace`.
  """
  once, never = (hlo.reads(hlo.trace(module, unknown_trips=trips, cases=cases)) for trips in (1, 0))
  outside = _by_kind(never)
  inside = {kind: size - outside[kind] for kind, size in _by_kind(once).items()}
  # Keys and values are [layers, rows, heads, slots, head_dim], scales [layers, rows, heads, 1, slots].
  slots = max((read.array.shape[3] for read in once if _kind(read) == 'cache'), default=0)
  return StepReads(
    **{kind: inside[kind] for kind in ('weights', 'recent', 'rest')},
    chunk=(outside['weights'] + outside['recent'] + outside['rest']) / steps,
    strays=inside['strays'] + outside['strays'] / steps,
    slot=inside['cache'] / max(slots, 1),
    slots=slots,
    block=max(min(decode_kernel.BLOCK, slots), 1),
  )


def _by_kind(reads: Iterable[hlo.Read]) -> dict[str, float]:
  """Return the bytes read, by kind; kernels read one layer of a stack per execution, for the rows of their results."""
  sums = dict.fromkeys(('weights', 'cache', 'recent', 'strays', 'rest'), 0.0)
  for read in reads:
    kind, size = _kind(read), read.bytes
    if kind in ('cache', 'recent'):
      layers, rows = read.array.shape[:2]
      size = read.array.bytes / layers * read.instruction.arrays[0].shape[0] / rows
    sums[kind] += size * read.count
  return sums


def _kind(read: hlo.Read) -> str:
  argument = read.source.op_name if read.source.opcode == 'parameter' else ''
  if kernels.attends_to_cache(read.instruction) and len(read.array.shape) == 5:
    return 'cache' if argument.startswith(_CACHE) else 'recent'
  if argument.startswith(_CACHE):
    return 'strays'
  return 'weights' if argument.startswith(_WEIGHTS) else 'rest'
