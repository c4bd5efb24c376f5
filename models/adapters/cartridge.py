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
  """The sizes in which a cartridge and its model must agree."""

  layers: int
  kv_heads: int
  head_dim: int


@dataclasses.dataclass(frozen=True, eq=False)
class Cartridge:
  """Keys and values of P slots, to which all tokens of the text after them attend in every layer.

  Slot i is at position i, so its keys are normalised and rotated like those of a token there, in the layout of
  `sdpo_jax.models.rope` (element j of a head is paired with element j + head_dim / 2). Values are as the model projects
  them. The text continues at position P.
  """

  keys: np.ndarray  # [L, KV, P, head_dim] float32.
  values: np.ndarray  # [L, KV, P, head_dim] float32.
  frozen: int  # F, with 0 ≤ F < P; the first F slots are never trained.
  within_windows: bool = False  # As in `KVPrefix`.

  @property
  def prefix(self) -> KVPrefix:
    """The description of the slots that a policy needs."""
    return KVPrefix(self.slots, self.frozen, self.within_windows)

  @property
  def layers(self) -> int:
    """L."""
    return self.keys.shape[0]

  @property
  def kv_heads(self) -> int:
    """KV, the number of key-value heads."""
    return self.keys.shape[1]

  @property
  def slots(self) -> int:
    """P, including frozen slots."""
    return self.keys.shape[2]

  @property
  def head_dim(self) -> int:
    """The number of elements of a head."""
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
        'float32 [layers, key-value heads, slots, head_dim] of the same shape and not empty; make the cartridge again.'
      )
  if not 0 <= cartridge.frozen < cartridge.slots:
    raise UserError(
      f'{where}: {cartridge.frozen} of its {cartridge.slots} slots are frozen: at least one must be trainable, and the '
      'number of frozen ones must not be negative; make the cartridge again.'
    )
  for name, array in (('keys', cartridge.keys), ('values', cartridge.values)):
    for layer, part in enumerate(array):
      if not is_finite(part):
        wrong = int(np.count_nonzero(~np.isfinite(part)))
        raise UserError(
          f'{where}: layer {layer} of its {name} holds {wrong} values of {part.size} that are not finite (NaN or '
          'infinite), so that it cannot be used: take an earlier cartridge of the run that made it.'
        )


def narrowed(values: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
  """Return finite float32 values, converted to the dtype of a file.

  Raises:
    UserError: values are too large for the dtype; the message names the array.
  """
  with np.errstate(over='ignore'):  # Values that overflow are reported below.
    converted = values.astype(dtype)
  if not is_finite(converted):
    raise UserError(
      f'{name} of the cartridge holds values up to {float(np.abs(values).max()):.3g}, but {dtype} ends at '
      f'{float(ml_dtypes.finfo(dtype).max):.3g}: write the cartridge in float32.'
    )
  return converted


def check_fits(cartridge: HeadSizes, sizes: HeadSizes, where: str) -> None:
  """Check that a cartridge has the layers and heads of a model.

  Args:
    cartridge: a cartridge or its description.
    sizes: sizes of the model.
    where: the file or directory, with which the error message begins.

  Raises:
    UserError: it belongs to another model.
  """
  found = (cartridge.layers, cartridge.kv_heads, cartridge.head_dim)
  wanted = (sizes.layers, sizes.kv_heads, sizes.head_dim)
  if found != wanted:
    raise UserError(
      f'{where} is a cartridge of a model with {_sizes(found)}, but this model has {_sizes(wanted)}: use the model '
      'that it was made for, or make a cartridge for this one.'
    )


def _sizes(sizes: tuple[int, int, int]) -> str:
  layers, kv_heads, head_dim = sizes
  return f'{layers} layers and {kv_heads} key-value heads of {head_dim}'
