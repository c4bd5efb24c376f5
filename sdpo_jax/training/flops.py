"""Arithmetic of a step, for utilisation figures."""

from __future__ import annotations

import jax

from sdpo_jax.types import Tree

# Dense bf16 FLOP/s of one chip, by the start of JAX's device kind (vendors' data sheets).
PEAK_FLOPS = {
  'TPU v4': 275e12,
  'TPU v5 lite': 197e12,
  'TPU v5e': 197e12,
  'TPU v5p': 459e12,
  'TPU v6 lite': 918e12,
  'TPU v6e': 918e12,
  'NVIDIA H100': 989e12,
  'NVIDIA H200': 989e12,
  'NVIDIA A100': 312e12,
}


def forward_flops_per_token(parameters: Tree) -> float:
  """2 FLOPs a parameter and token: matrix products only, attention scores left out."""
  return 2.0 * sum(leaf.size for leaf in jax.tree.leaves(parameters))


def peak_flops(device: jax.Device) -> float | None:
  """Peak bf16 FLOP/s of a device; None where it is not known."""
  for prefix, peak in PEAK_FLOPS.items():
    if device.device_kind.startswith(prefix):
      return peak
  return None
