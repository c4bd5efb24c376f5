"""Compiler options for many small programs that run once: compile time is all that counts."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

OPTIONS = {
  'xla_backend_optimization_level': 0,
  'xla_llvm_disable_expensive_passes': True,
  'xla_cpu_use_fusion_emitters': False,
}


@functools.cache
def quick() -> dict[str, bool | int]:
  """Those of `OPTIONS` that this version of XLA knows; they change the speed of a program, not what it computes."""
  known = {}
  for name, value in OPTIONS.items():
    try:
      jax.jit(lambda x: x + 1, compiler_options={name: value}).lower(jnp.zeros(())).compile()
    except jax.errors.JaxRuntimeError:
      continue
    known[name] = value
  return known
