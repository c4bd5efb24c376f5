"""Digests of device state, which are exact and do not depend on the arrays' shardings.

A leaf of a state is read as 32-bit words w_0, w_1, …: the bits of its elements in row-major order of the whole array,
never of a shard. Each of `LANES` sums is Σ_i mix(w_i, i) modulo 2^32, with a different `mix` per lane. The order of
the terms does not matter, so every sharding, mesh and compiler gives the same sums, and no further array is stored.

For a fixed position i, `mix` is a bijection of words: a chain of w ^ k, w + k, w ^ (w >> s) and w · c with an odd c,
each of which is invertible. So if a single word changes, by one flipped bit or many, *all* lanes change. If several
words change, for example by a swap of two, a lane stays the same with a probability of about 2^-32, and all lanes with
about 2^-128, since each has constants of its own. The digest detects accidents. It is not a signature: two states with
the same digest can be constructed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import functools
import hashlib
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sdpo_jax.distributed.mesh import replicated

# For each lane: the multiplier of the position, an offset, and the two multipliers of `_mixed`; multipliers are odd.
CONSTANTS = (
  (0x9E3779B1, 0x243F6A88, 0x85EBCA6B, 0xC2B2AE35),
  (0x85EBCA77, 0x85A308D3, 0x7FEB352D, 0x846CA68B),
  (0xC2B2AE3D, 0x13198A2E, 0x9E485565, 0xEF1D6B47),
  (0x27D4EB2F, 0x03707344, 0x21F0AAAD, 0xD35A2D97),
)
LANES = len(CONSTANTS)
BLOCK = 2**15  # Number of elements that `block_sums` processes at once.


def leaf_digests(state: Any) -> dict[str, str]:
  """Return the digest of each leaf of a state by its path; all processes must call this, and get the same result.

  The keys of a path are joined by dots, as in the checkpoint.

  Args:
    state: a tree of arrays; leaves that are `...` are left out.
  """
  found, _ = jax.tree_util.tree_flatten_with_path(state)
  named = [(jax.tree_util.keystr(path, simple=True, separator='.'), leaf) for path, leaf in found if leaf is not ...]
  leaves = [leaf for _, leaf in named]
  sums = np.asarray(program(leaves)(leaves))
  return {name: leaf_digest(*_words_of(leaf), row) for (name, leaf), row in zip(named, sums, strict=True)}


def leaf_digest(shape: Sequence[int], dtype: Any, sums: np.ndarray) -> str:
  """Return the digest, 32 hex digits, of a leaf with the given shape, dtype and sums [LANES]."""
  described = f'{np.dtype(dtype).name} {"×".join(map(str, shape))} '.encode()
  return hashlib.sha256(described + np.asarray(sums, '<u4').tobytes()).hexdigest()[:32]


def state_digest(leaves: Mapping[str, str]) -> str:
  """Return the digest of a state, 64 hex digits, from the digests of its leaves by path."""
  return hashlib.sha256(json.dumps(sorted(leaves.items())).encode()).hexdigest()


def program(leaves: Sequence[Any]) -> Callable[[Sequence[jax.Array]], jax.Array]:
  """Return the jitted function from arrays like `leaves`, which may be abstract, to sums [leaves, LANES] uint32.

  The sums are replicated on all devices.
  """
  meshes = (leaf.sharding.mesh for leaf in leaves if isinstance(leaf.sharding, jax.sharding.NamedSharding))
  return _program(next(meshes, None))


@functools.cache
def _program(mesh: jax.sharding.Mesh | None) -> Callable[[Sequence[jax.Array]], jax.Array]:
  def digest(leaves: Sequence[jax.Array]) -> jax.Array:
    return jnp.stack([leaf_sums(leaf) for leaf in leaves]) if leaves else jnp.zeros([0, LANES], jnp.uint32)

  return jax.jit(digest, out_shardings=None if mesh is None else replicated(mesh))


@jax.jit
def leaf_sums(leaf: jax.Array) -> jax.Array:
  """Return the sums [LANES] uint32 of an array, as defined in the module's docstring; it is traced once per shape.

  Raises:
    TypeError: the elements are neither numbers of whole bytes nor typed keys.
    ValueError: the array is too large.
  """
  if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    leaf = jax.random.key_data(leaf)
  leaf = leaf if leaf.ndim else leaf[None]
  words = _words(leaf)
  leading = leading_axes(leaf.shape, len(words))
  low = _row_major(leaf.shape, range(leading, leaf.ndim))
  high = _scrambled(_row_major(leaf.shape, range(leading))) if leading else np.uint32(0)
  lanes = tuple(jnp.zeros(leaf.shape, jnp.uint32) for _ in range(LANES))
  for place, word in enumerate(words):
    terms = _terms(word, low * np.uint32(len(words)) + np.uint32(place), high)
    lanes = tuple(map(jnp.add, lanes, terms))

  def add(left: Sequence[jax.Array], right: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    return tuple(map(jnp.add, left, right))

  # A single reduction for all lanes: the compiler fuses it into one loop that reads each element once.
  return jnp.stack(jax.lax.reduce(lanes, (np.uint32(0),) * LANES, add, tuple(range(leaf.ndim))))


def block_sums(values: np.ndarray, origin: Sequence[int], shape: Sequence[int]) -> np.ndarray:
  """Return the contribution of a block to an array's sums [LANES] uint32, computed part by part with NumPy.

  Args:
    values: a block of the array, with the same number of axes.
    origin: index of the block's first element, per axis.
    shape: shape of the whole array.
  """
  if not shape:
    values, origin, shape = values[None], (0,), (1,)
  count = max(values.dtype.itemsize // 4, 1)
  leading = leading_axes(shape, count)
  held = np.uint64(math.prod(shape[leading:]))
  rows = np.ascontiguousarray(values).reshape(-1, values.shape[-1])
  strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
  width = max(values.shape[-1], 1)
  sums = np.zeros(LANES, np.uint32)
  for first in range(0, len(rows), max(BLOCK // width, 1)):
    part = rows[first : first + max(BLOCK // width, 1)]
    places = np.unravel_index(np.arange(first, first + len(part)), values.shape[:-1]) if values.ndim > 1 else ()
    begins = np.full(len(part), origin[-1], np.uint64)
    for place, start, stride in zip(places, origin, strides, strict=False):
      begins += (place.astype(np.uint64) + np.uint64(start)) * np.uint64(stride)
    for column in range(0, width, BLOCK):
      block = np.ascontiguousarray(part[:, column : column + BLOCK])
      numbers = begins[:, None] + np.arange(column, column + block.shape[1], dtype=np.uint64)
      low = (numbers % held).astype(np.uint32)
      high = _scrambled((numbers // held).astype(np.uint32)) if leading else np.uint32(0)
      for place in range(count):
        word = block.view('<u4')[:, place::count] if count > 1 else block.view(f'<u{block.itemsize}').astype(np.uint32)
        terms = _terms(word, low * np.uint32(count) + np.uint32(place), high)
        sums += np.array([term.sum(dtype=np.uint32) for term in terms], np.uint32)
  return sums


def _terms(word: Any, low: Any, high: Any) -> list[Any]:
  """Return each lane's terms for words at positions (low, high); uint32 arrays of NumPy or JAX."""
  low = _scrambled(low)
  return [_mixed(word, low, high, *map(np.uint32, constants)) for constants in CONSTANTS]


def _mixed(word: Any, low: Any, high: Any, spread: Any, offset: Any, first: Any, second: Any) -> Any:
  word = (word ^ (low * spread + offset)) * first
  word = ((word ^ (word >> np.uint32(15))) + high) * second
  return word ^ (word >> np.uint32(16))


def _scrambled(position: Any) -> Any:
  """Return positions, uint32, mapped one to one to pseudo-random values."""
  position = (position ^ (position >> np.uint32(16))) * np.uint32(0x7FEB352D)
  position = (position ^ (position >> np.uint32(15))) * np.uint32(0x846CA68B)
  return position ^ (position >> np.uint32(16))


def leading_axes(shape: Sequence[int], words: int) -> int:
  """Return the number of leading axes that the high word of a position counts; 0 for arrays of up to 2^32 words.

  Args:
    shape: shape of the array.
    words: number of words per element.

  Raises:
    ValueError: the axes cannot be divided into two groups of at most 2^32.
  """
  leading, held = len(shape), words
  while leading and held * shape[leading - 1] <= 2**32:
    leading -= 1
    held *= shape[leading]
  if math.prod(shape[:leading]) > 2**32:
    raise ValueError(f'An array of shape {tuple(shape)} is too large to be digested.')
  return leading


def _row_major(shape: Sequence[int], axes: range) -> jax.Array:
  """Return the row-major index over the given axes, as uint32 of shape `shape`."""
  number, stride = jnp.zeros(shape, jnp.uint32), 1
  for axis in reversed(axes):
    number += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(stride % 2**32)
    stride *= shape[axis]
  return number


def _words(leaf: jax.Array) -> list[jax.Array]:
  """Return an array's elements as uint32 words, the least significant first, each of the array's shape."""
  if leaf.dtype == jnp.bool_:
    return [leaf.astype(jnp.uint32)]
  bits = 8 * leaf.dtype.itemsize
  if bits == 64 and leaf.dtype.kind in 'iuf':
    pair = jax.lax.bitcast_convert_type(leaf, jnp.uint32)
    return [pair[..., 0], pair[..., 1]]
  numbers = jnp.integer, jnp.floating
  described = jnp.iinfo if jnp.issubdtype(leaf.dtype, jnp.integer) else jnp.finfo
  if not any(jnp.issubdtype(leaf.dtype, kind) for kind in numbers) or described(leaf.dtype).bits != bits:
    raise TypeError(f'An array of dtype {leaf.dtype} cannot be digested.')
  return [jax.lax.bitcast_convert_type(leaf, jnp.dtype(f'uint{bits}')).astype(jnp.uint32)]


def _words_of(leaf: jax.Array) -> tuple[tuple[int, ...], Any]:
  """Return the shape and dtype of a leaf's digested data; for a typed key, of its key data."""
  return (
    _key_data(leaf.shape, leaf.dtype) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else (leaf.shape, leaf.dtype)
  )


@functools.cache  # Each trace of it would keep a few kilobytes for good.
def _key_data(shape: tuple[int, ...], dtype: Any) -> tuple[tuple[int, ...], Any]:
  data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
  return data.shape, data.dtype
