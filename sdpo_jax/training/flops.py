"""Arithmetic of a step, for utilisation figures."""

from __future__ import annotations

import jax

from sdpo_jax.distributed import accelerators
from sdpo_jax.types import Tree


def forward_flops_per_token(parameters: Tree) -> float:
  """2 FLOPs a parameter and token: matrix products only, attention scores left out."""
  return 2.0 * sum(leaf.size for leaf in jax.tree.leaves(parameters))


def peak_flops(device: jax.Device) -> float | None:
  """Peak bf16 FLOP/s of a device; None where it is not known."""
  chip = accelerators.find(device.device_kind)
  return None if chip is None else chip.flops
