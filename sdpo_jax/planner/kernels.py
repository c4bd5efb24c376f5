"""Times of kernels that the compiler does not estimate: scaled from dumped schedules, or by rooflines."""

from __future__ import annotations

import dataclasses
import math

from sdpo_jax.models.attention import decode_kernel as decode_attention
from sdpo_jax.models.attention import splash
from sdpo_jax.planner import hlo
from sdpo_jax.planner.topology import CHIPS, Chip

TABLE, ROOFLINE = 'table', 'roofline'

# Static instruction bundles of dumped TPU v5e schedules times their trip counts, at its clock. These are lower bounds:
# only the named stalls are included. Other chips scale by their bf16 FLOP/s; decode attention by the clock.
_TOP_K_SECONDS = 24.7e-3 / (512 * 151936 * 100)  # Per element and pass; the top k take k passes.
_SORT_SECONDS = 1 / 283e9  # Per compare-exchange of a bitonic network: 512 rows of 19072 took 3.8 ms, of 2432 0.30 ms.
# Splash attention, per queries × keys × head_dim of 1024 × 1024 × 128, per grid step and per row of blocks: cycles of a
# computed block in the order of the schedule, with the matrix units busy for 16 cycles per bfloat16 product and 8 per
# float32 product (their peak; the schedule alone would count 4495, 7407 and 5693, the last two less than the products
# take); bundles of the rest of a step; bundles of the start and end of a row of blocks.
_SPLASH = {'fwd': (4681, 190, 1379), 'dkv': (8376, 311, 654), 'dq': (6315, 211, 334)}
_SPLASH_BLOCK = 1024**2 * 128
# Decode attention over a cache, for 16 queries and a head_dim of 128 (padding included): bundles of a grid step that
# computes nothing; of one that computes, without the slots of its block; and of each of these slots. bfloat16: 618
# bundles for a block of 1024, 252 for one of 32; int8: 951 and 266, mostly for conversion to bfloat16.
_DECODE = {False: (131, 240.0, 0.369), True: (200, 244.0, 0.690)}
# Likely seconds of all these kernels per second of their bound: an assumption, as nothing measured is public for v5e. A
# schedule has no stalls for memory or between the steps of a grid, and transfers seldom reach the full bandwidth.
LIKELY = 1.25
_DECODING = ('cache_attention', 'paged_attention')  # Names of kernels that attend to a cache.


@dataclasses.dataclass(frozen=True)
class DecodeKernel:
  """Decode attention over one cache in one step of a decode loop, on one chip."""

  calls: float  # Calls per step.
  rows: int  # Batch rows times key-value heads.
  block: int  # Slots per block.
  blocks: int  # Blocks per row.
  active: float  # Seconds per fetched block: its schedule or its transfer, whichever takes longer.
  skipped: float  # Seconds per skipped block.

  def seconds(self, live: float) -> float:
    """Return the seconds of all calls if `live` blocks per row are fetched on average."""
    return self.calls * self.rows * (live * self.active + (self.blocks - live) * self.skipped)

  def filled(self, tokens: int) -> float:
    """Return the seconds of all calls if every row holds `tokens` tokens."""
    return self.seconds(min(max(math.ceil(tokens / self.block), 1), self.blocks))


def decode_kernel(kernel: hlo.Kernel, chip: Chip) -> DecodeKernel:
  """Return the cost of a kernel that `reads_cache` [table], with transfers at the memory's bandwidth [arithmetic]."""
  stores = [array for array in kernel.operands if len(array.shape) == 5]
  slots = stores[0].shape[3]
  rows, heads = kernel.results[0].shape[:2]
  block = min(decode_attention.BLOCK, slots)
  skipped, computed, each = _DECODE[stores[0].dtype == 's8']
  # Keys, values and scales of one layer, row and head.
  fetched = sum(array.bytes / math.prod(array.shape[:3]) for array in stores) * block / slots
  return DecodeKernel(
    calls=kernel.count,
    rows=rows * heads,
    block=block,
    blocks=math.ceil(slots / block),
    active=max((computed + each * block) / chip.clock, fetched / chip.hbm_bandwidth),
    skipped=skipped / chip.clock,
  )


def seconds(kernel: hlo.Kernel, chip: Chip) -> tuple[float, str]:
  """Return the seconds of all executions of a kernel, and whether they are from the table or a roofline."""
  slower = CHIPS['v5e'].flops / chip.flops
  first = kernel.operands[0] if kernel.operands else None
  if kernel.kind == 'topk' and kernel.results:
    elements, kept = first.size, kernel.results[0].size // (first.size // first.shape[-1])
    return kernel.count * elements * kept * _TOP_K_SECONDS * slower, TABLE
  if kernel.kind == 'sort':
    # Bitonic: L(L + 1)/2 stages for 2^L elements.
    levels = math.log2(max(first.shape[-1], 2))
    return kernel.count * first.size * levels * (levels + 1) / 2 * _SORT_SECONDS * slower, TABLE
  part = splash_part(kernel)
  if part is not None:
    query, key = [array for array in kernel.operands if len(array.shape) >= 3 and array.dtype in ('bf16', 'f32')][:2]
    whole = splash.TO_PREFIX in kernel.op_name
    return kernel.count * _splash_cycles(part, query, key, whole) / CHIPS['v5e'].clock * slower, TABLE
  return kernel.count * kernel.bytes / chip.hbm_bandwidth, ROOFLINE


def _splash_cycles(part: str, query: hlo.Array, key: hlo.Array, whole: bool) -> float:
  """Return the cycles of attention of queries [..., S, head_dim] to keys [..., C, head_dim].

  Args:
    part: part of splash attention, as of `splash_part`.
    query: queries; each leading index is a head of the kernel's grid.
    key: keys; if there are more keys than queries, the additional ones come first.
    whole: all keys are visible; otherwise attention is causal, and blocks on the diagonal are computed completely.
  """
  (length, head_dim), slots = query.shape[-2:], key.shape[-2]
  size, key_size = splash.block_size(length), splash.block_size(slots)
  rows, columns = math.ceil(length / size), math.ceil(slots / key_size)
  last = [slots if whole else slots - length + (row + 1) * size for row in range(rows)]
  blocks = sum(min(math.ceil(seen / key_size), columns) for seen in last)
  computed, step, outer = _SPLASH[part]
  block = computed * size * key_size * head_dim / _SPLASH_BLOCK
  # The gradient of the keys is summed over queries, everything else over keys.
  begun = columns * key_size if part == 'dkv' else rows * size
  heads = query.size // (length * head_dim)
  return heads * (blocks * block + rows * columns * step + begun * outer / 1024)


def splash_part(kernel: hlo.Kernel) -> str | None:
  """Return which part of splash attention a Pallas kernel is: fwd, dkv or dq; None for other kernels."""
  if kernel.kind != 'pallas':
    return None
  name = f'{kernel.op_name} {kernel.name}'
  if 'splash' not in name:
    return None
  return next((part for part in ('dkv', 'dq') if f'_{part}' in name), 'fwd')


def reads_cache(kernel: hlo.Kernel) -> bool:
  """Return whether a kernel is decode attention over a cache, which reads only the filled part."""
  return kernel.kind == 'pallas' and _decodes(kernel)


def attends_to_cache(instruction: hlo.Instruction) -> bool:
  """Return whether an instruction is decode attention over a cache."""
  return instruction.target == 'tpu_custom_call' and _decodes(instruction)


def _decodes(named: hlo.Kernel | hlo.Instruction) -> bool:
  return any(word in f'{named.op_name} {named.name}' for word in _DECODING)
