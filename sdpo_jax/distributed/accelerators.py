"""What the data sheets say of the chips that programs run on: the one table of peaks and memory."""

from __future__ import annotations

import dataclasses

import jax


@dataclasses.dataclass(frozen=True)
class Accelerator:
  """One chip."""

  kind: str  # How JAX's device kind begins.
  flops: float  # Dense bf16 FLOP/s.
  memory_gib: float | None = None  # What a program may use, as the TPU compiler says; None: not looked up.


# The first that fits counts: JAX calls a v5e 'TPU v5 lite' and a v5p 'TPU v5'.
TABLE = (
  Accelerator('TPU v4', 275e12, 32.0),
  Accelerator('TPU v5 lite', 197e12, 15.75),
  Accelerator('TPU v5e', 197e12, 15.75),
  Accelerator('TPU v5', 459e12, 95.74),
  Accelerator('TPU v6', 918e12, 31.25),
  Accelerator('NVIDIA H100', 989e12),
  Accelerator('NVIDIA H200', 989e12),
  Accelerator('NVIDIA A100', 312e12),
)


def find(device_kind: str) -> Accelerator | None:
  """Return the chip of JAX's device kind; None where it is not known."""
  return next((chip for chip in TABLE if device_kind.startswith(chip.kind)), None)


def peak_flops(device: jax.Device) -> float | None:
  """Return the peak bf16 FLOP/s of a device; None where it is not known."""
  chip = find(device.device_kind)
  return None if chip is None else chip.flops
