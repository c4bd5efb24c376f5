"""Several cartridges as one: their slots one after the other, without more training (arXiv 2506.06266, section 5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from sdpo_jax.errors import UserError
from sdpo_jax.models.adapters.cartridge import Cartridge
from sdpo_jax.models.architecture import Architecture
from sdpo_jax.models.rope import frequencies

# 'overlap': each keeps the positions it was trained at, from 0 on, as in the published code; 'sequential': each begins
# where the one before it ends. The text begins at the number of all slots.
Positions = Literal['overlap', 'sequential']


def composed(parts: Sequence[Cartridge], positions: Positions, config: Architecture, where: str) -> Cartridge:
  """Return the cartridge whose slots are those of all parts, in order; the frozen ones are those of the first.

  Args:
    parts: at least one cartridge of the model.
    positions: at which positions the slots lie.
    config: architecture of the model.
    where: what names the parts, for the message.

  Raises:
    UserError: layers with windows see all slots of some parts, but not of others.
  """
  if len({part.within_windows for part in parts}) > 1:
    raise UserError(
      f'{where}: some of these cartridges were trained with model.cartridge.sliding_window=windowed and others with '
      'visible: compose those of one kind.'
    )
  starts = np.cumsum([0, *(part.slots for part in parts)])[:-1] * (positions == 'sequential')
  keys = [turned(part.keys, int(start), config) for part, start in zip(parts, starts, strict=True)]
  values = [part.values for part in parts]
  return Cartridge(*(np.concatenate(arrays, 2) for arrays in (keys, values)), parts[0].frozen, parts[0].within_windows)


def turned(keys: np.ndarray, by: int, config: Architecture) -> np.ndarray:
  """Return rotated keys [L, KV, P, head_dim] as they would be `by` positions later.

  A rotation by a constant angle: the factor of YaRN's cosines is in the keys already.
  """
  if not by:
    return keys
  angles = np.stack([frequencies(config.ropes[rope], config.head_dim) for rope in config.layer_ropes or [0]])
  angles = by * angles[:, None, None].astype(np.float64)
  first, second = np.split(keys.astype(np.float64), 2, axis=-1)
  cosine, sine = np.cos(angles), np.sin(angles)
  return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], -1).astype(np.float32)
