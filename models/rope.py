"""Rotary position embeddings: their frequencies, and the rotation of heads."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

RopeKind = Literal['default', 'linear', 'llama3', 'yarn']


@dataclasses.dataclass(frozen=True)
class Rope:
  """The mapping from positions to angles; names and meanings are those of `rope_parameters` in a config.json."""

  theta: float = 10000.0
  kind: RopeKind = 'default'
  factor: float = 1.0  # Factor by which positions are stretched; all kinds but 'default'.
  original_max_position_embeddings: float = 0.0  # Number of positions before stretching; 'llama3' and 'yarn'.
  low_freq_factor: float = 1.0  # Only 'llama3'.
  high_freq_factor: float = 4.0  # Only 'llama3'.
  beta_fast: float = 32.0  # Only 'yarn'.
  beta_slow: float = 1.0  # Only 'yarn'.
  truncate: bool = True  # Whether the bounds of the ramp are rounded to whole numbers; only 'yarn'.
  attention_factor: float = 1.0  # Factor of cosines and sines; only 'yarn'.


def frequencies(rope: Rope, head_dim: int) -> np.ndarray:
  """Return the angles per position [head_dim / 2] float32, computed in the same order as in transformers."""
  exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
  wavelengths = np.float32(rope.theta) ** exponents  # Divided by 2π.
  plain = np.float32(1) / wavelengths
  if rope.kind == 'default':
    return plain
  if rope.kind == 'linear':
    return plain / np.float32(rope.factor)
  return _llama3(rope, plain) if rope.kind == 'llama3' else _yarn(rope, plain, wavelengths)


def _llama3(rope: Rope, plain: np.ndarray) -> np.ndarray:
  """Return the frequencies with low ones divided by the factor, high ones unchanged, and others interpolated."""
  factor, low, high = np.float32(rope.factor), np.float32(rope.low_freq_factor), np.float32(rope.high_freq_factor)
  original = np.float32(rope.original_max_position_embeddings)
  lengths = np.float32(2 * math.pi) / plain
  smooth = (original / lengths - low) / (high - low)
  between = (1 - smooth) * plain / factor + smooth * plain
  return np.where(lengths > original / low, plain / factor, np.where(lengths < original / high, plain, between))


def _yarn(rope: Rope, plain: np.ndarray, wavelengths: np.ndarray) -> np.ndarray:
  """Return the frequencies on a linear ramp over the pairs of a head: fast ones unchanged, slow ones divided.

  Source: arXiv 2309.00071, section 3.2.
  """
  pairs = len(plain)

  def pair(rotations: float) -> float:
    """Return the (fractional) index of the pair that turns `rotations` times within the original length."""
    turns = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
    return 2 * pairs * math.log(turns) / (2 * math.log(rope.theta))

  low, high = pair(rope.beta_fast), pair(rope.beta_slow)
  if rope.truncate:
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, 2 * pairs - 1)
  width = high - low if high != low else 0.001
  slowed = np.clip((np.arange(pairs, dtype=np.float32) - np.float32(low)) / np.float32(width), 0, 1)
  kept = 1 - slowed
  return np.float32(1) / (np.float32(rope.factor) * wavelengths) * (1 - kept) + plain * kept


def rotation(positions: jax.Array, head_dim: int, rope: Rope) -> jax.Array:
  """Return the rotary embedding of positions [B, S] as matrices [B, S, 2, 2, head_dim / 2] float32.

  Pair i of a head, (x[i], x[i + head_dim / 2]), is turned by the angle position · frequency[i] and multiplied by
  `rope.attention_factor`: element a of the result is the sum over b of [..., a, b, i] times element b of the pair.
  """
  angles = positions.astype(jnp.float32)[..., None] * jnp.asarray(frequencies(rope, head_dim))[None, None]
  cosine, sine = jnp.cos(angles), jnp.sin(angles)
  if rope.attention_factor != 1:
    cosine, sine = cosine * rope.attention_factor, sine * rope.attention_factor
  return jnp.stack([cosine, -sine, sine, cosine], axis=2).reshape(*positions.shape, 2, 2, -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rotate(x: jax.Array, matrices: jax.Array, halves: bool = False) -> jax.Array:
  """Rotate x [B, S, H, head_dim] by (scaled) matrices from `rotation`, in float32; return it in the dtype of x.

  The matrices get no gradient. With `halves`, the halves of a head are swapped as whole vectors, which suits the lanes
  of a TPU; sums of broadcast products suit a CPU, on which concatenation takes several times as long.
  """
  wide = x.astype(jnp.float32)
  if halves:
    first, second = jnp.split(wide, 2, axis=-1)
    own = jnp.concatenate([matrices[:, :, None, 0, 0], matrices[:, :, None, 1, 1]], axis=-1)
    other = jnp.concatenate([matrices[:, :, None, 0, 1], matrices[:, :, None, 1, 0]], axis=-1)
    return (wide * own + jnp.concatenate([second, first], axis=-1) * other).astype(x.dtype)
  pairs = wide.reshape(*x.shape[:-1], 2, -1)
  turned = sum(pairs[..., b : b + 1, :] * matrices[:, :, None, :, b] for b in range(2))
  return turned.reshape(x.shape).astype(x.dtype)


def _rotate_forward(x: jax.Array, matrices: jax.Array, halves: bool) -> tuple[jax.Array, jax.Array]:
  return rotate(x, matrices, halves), matrices


def _rotate_backward(halves: bool, matrices: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
  # The transpose is a rotation, too, and as cheap; automatic differentiation would give sums over pairs.
  return rotate(gradient, matrices.swapaxes(2, 3), halves), jnp.zeros_like(matrices)


rotate.defvjp(_rotate_forward, _rotate_backward)
