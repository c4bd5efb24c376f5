"""A cartridge: key-value slots that represent a text, as arrays on the host."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import ml_dtypes
import numpy as np

from sdpo_jax.errors import UserError
from sdpo_jax.models.adapters.kv_prefix import KVPrefix
from sdpo_jax.models.tensor_files import is_finite


class HeadSizes(Protocol):
  """The sizes that a cartridge and its model have in common."""

  layers: int
  kv_heads: int
  head_dim: int


@dataclasses.dataclass(frozen=True, eq=False)
class Cartridge:
  """Keys and values of P slots, which all tokens of the text after them attend to in every layer.

  Slot i is at position i, so its keys are normalised and rotated like those of a token there, in the layout of
  `sdpo_jax.models.rope` (number j of a head is paired with number j + head_dim / 2). Values are as the model projects
  them. The text continues at position P.
  """

  keys: np.ndarray  # [L, KV, P, head_dim] float32.
  values: np.ndarray  # [L, KV, P, head_dim] float32.
  frozen: int  # F, with 0 ≤ F < P: the first F slots are never trained.
  within_windows: bool = False  # As in `KVPrefix`: whether layers with windows see only the slots within them.

  @property
  def prefix(self) -> KVPrefix:
    return KVPrefix(self.slots, self.frozen, self.within_windows)

  @property
  def layers(self) -> int:
    return self.keys.shape[0]

  @property
  def kv_heads(self) -> int:
    return self.keys.shape[1]

  @property
  def slots(self) -> int:
    """P, including frozen slots."""
    return self.keys.shape[2]

  @property
  def head_dim(self) -> int:
    return self.keys.shape[3]


def check(cartridge: Cartridge, where: str) -> None:
  """Check that the arrays of a cartridge are valid.

  Args:
    cartridge: a cartridge that was read or is about to be written.
    where: the file or directory, with which the error message begins.

  Raises:
    UserError: a shape, the dtype, the number of frozen slots, or a value is wrong.
  """
  for name, array in (('keys', cartridge.keys), ('values', cartridge.values)):
    if array.ndim != 4 or not all(array.shape) or array.dtype != np.float32 or array.shape != cartridge.keys.shape:
      raise UserError(
        f'{where}: its {name} are {array.dtype} {array.shape}, and its keys {cartridge.keys.shape}: both must be '
        'float32 [layers, key-value heads, slots, head_dim] of one shape, and hold something; make the cartridge anew.'
      )
  if not 0 <= cartridge.frozen < cartridge.slots:
    raise UserError(
      f'{where}: {cartridge.frozen} of its {cartridge.slots} slots are frozen: at least one must be trainable, and the '
      'number of frozen ones not negative; make the cartridge anew.'
    )
  for name, array in (('keys', cartridge.keys), ('values', cartridge.values)):
    for layer, part in enumerate(array):
      if not is_finite(part):
        wrong = int(np.count_nonzero(~np.isfinite(part)))
        raise UserError(
          f'{where}: layer {layer} of its {name} holds {wrong} values of {part.size} that are not finite (NaN or '
          'infinite), with which nothing can be trained or sampled: take an earlier one of the run that made it.'
        )


def narrowed(values: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
  """Return finite float32 values in the dtype of a file.

  Raises:
    UserError: the array holds values that the dtype cannot; the message names it.
  """
  with np.errstate(over='ignore'):  # Values that overflow are reported below.
    converted = values.astype(dtype)
  if not is_finite(converted):
    raise UserError(
      f'{name} of the cartridge holds values up to {float(np.abs(values).max()):.3g}, and {dtype} ends at '
      f'{float(ml_dtypes.finfo(dtype).max):.3g}: write the cartridge in float32.'
    )
  return converted


def check_fits(cartridge: HeadSizes, sizes: HeadSizes, where: str) -> None:
  """Check that a cartridge has the layers and heads of a model.

  Args:
    cartridge: the cartridge or its description.
    sizes: sizes of the model.
    where: the file or directory, with which the error message begins.

  Raises:
    UserError: it belongs to another model.
  """
  found = (cartridge.layers, cartridge.kv_heads, cartridge.head_dim)
  wanted = (sizes.layers, sizes.kv_heads, sizes.head_dim)
  if found != wanted:
    raise UserError(
      f'{where} is a cartridge of a model with {_sizes(found)}, and this model has {_sizes(wanted)}: give it the model '
      'that it was made for, or make a cartridge for this one.'
    )


def _sizes(sizes: tuple[int, int, int]) -> str:
  layers, kv_heads, head_dim = sizes
  return f'{layers} layers and {kv_heads} key-value heads of {head_dim}'
