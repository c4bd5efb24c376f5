"""Times of what the compiler gives no estimate for: scaled from a table of dumped schedules, or rooflines."""

from __future__ import annotations

import math

from sdpo_jax.planner import hlo
from sdpo_jax.planner.topology import CHIPS, Chip

TABLE, ROOFLINE = 'table', 'roofline'

# Static instruction bundles of dumped TPU v5e schedules times their trip counts, at its clock; lower bounds, since they
# know of no stalls. Other chips: scaled by their bf16 FLOP/s.
_TOP_K_SECONDS = 24.7e-3 / (512 * 151936 * 100)  # An element and a pass; the top k take k passes.
_SORT_SECONDS = 1 / 283e9  # A compare-exchange of a bitonic network: 512 rows of 19072 took 3.8 ms, of 2432 0.30 ms.
_SPLASH_FLOP_RATE = {  # Causal, 32 heads of 128, 10240 tokens; FLOPs of the unmasked half ÷ 7.2, 9.9 and 7.4 ms.
  'fwd': 2 * 32 * 128 * 10240**2 / 7.2e-3,
  'dkv': 4 * 32 * 128 * 10240**2 / 9.9e-3,
  'dq': 3 * 32 * 128 * 10240**2 / 7.4e-3,
}
_DECODING = ('cache_attention', 'paged_attention')  # Names of kernels that attend to a cache.
_SPLASH_PRODUCTS = {'fwd': 2, 'dkv': 4, 'dq': 3}  # Matrix products of queries × keys × head_dim.


def seconds(kernel: hlo.Kernel, chip: Chip) -> tuple[float, str]:
  """Seconds of all executions of a kernel, and whether they are from the table or a roofline of HBM traffic."""
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
    pairs = query.size * key.shape[-2]  # Heads × queries × head_dim × keys.
    return kernel.count * _SPLASH_PRODUCTS[part] * pairs / _SPLASH_FLOP_RATE[part] * slower, TABLE
  return kernel.count * kernel.bytes / chip.hbm_bandwidth, ROOFLINE


def splash_part(kernel: hlo.Kernel) -> str | None:
  """Which part of splash attention a Pallas kernel is: fwd, dkv or dq; None: no such kernel."""
  if kernel.kind != 'pallas':
    return None
  name = f'{kernel.op_name} {kernel.name}'
  if 'splash' not in name:
    return None
  return next((part for part in ('dkv', 'dq') if f'_{part}' in name), 'fwd')


def reads_cache(kernel: hlo.Kernel) -> bool:
  """Whether a kernel is decode attention over a cache, of which it reads only what is filled."""
  return kernel.kind == 'pallas' and _decodes(kernel)


def attends_to_cache(instruction: hlo.Instruction) -> bool:
  """Whether an instruction is such a kernel."""
  return instruction.target == 'tpu_custom_call' and _decodes(instruction)


def _decodes(named: hlo.Kernel | hlo.Instruction) -> bool:
  return any(word in f'{named.op_name} {named.name}' for word in _DECODING)
