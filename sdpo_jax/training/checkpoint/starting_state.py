"""The state at the start of a generation batch, held until, or beyond, the optimizer step that overwrites it."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import dataclasses
import threading
from typing import Any

import jax
import numpy as np

from sdpo_jax.types import TrainState


class StartingState:
  """The state before a generation batch: on the devices until it is donated, then on the host if it is kept."""

  def __init__(self, state: TrainState, *, keep: bool = False):
    """Hold `state`; with `keep`, `donate` copies it to the host if further optimizer steps follow."""
    self._lock = threading.Lock()
    self._state: TrainState | None = state
    self._copy: list[_HostArray] | None = None
    self._structure = jax.tree.structure(state)
    self._keep = keep

  @property
  def on_devices(self) -> bool:
    """Whether the state is still on the devices."""
    return self._state is not None

  def holds(self, state: TrainState) -> bool:
    """Return whether `state` is the held state, still on the devices."""
    return self._state is state

  @property
  def there(self) -> bool:
    """Whether `take` would return a state."""
    return self._state is not None or self._copy is not None

  def donate(self, *, others_follow: bool) -> None:
    """Release the state on the devices, which is about to be donated.

    Args:
      others_follow: whether further optimizer steps follow the one that donates it. If not, the batch is almost done,
        and nothing is copied.
    """
    with self._lock:  # Another thread may be saving it.
      if self._state is not None and self._keep and others_follow:
        leaves = jax.tree.leaves(self._state)
        for leaf in leaves:  # Start all copies before waiting for the first.
          _numbers(leaf).copy_to_host_async()
        self._copy = [_HostArray.of(leaf) for leaf in leaves]
      self._state = None

  @contextlib.contextmanager
  def held(self) -> Iterator[TrainState | None]:
    """Provide the state if it is on the devices; `donate` in another thread blocks until the context ends."""
    with self._lock:
      yield self._state

  def take(self) -> TrainState | None:
    """Return the state, copied back to its devices if it was on the host; None if it is gone."""
    if self._state is None and self._copy is not None:
      leaves = [copy.placed() for copy in self._copy]
      self._state, self._copy = jax.tree.unflatten(self._structure, leaves), None
    return self._state


@dataclasses.dataclass(frozen=True)
class _HostArray:
  """This process's part of an array, on the host; each shard is stored once, even if several devices hold it."""

  shape: tuple[int, ...]
  sharding: jax.sharding.Sharding
  parts: dict[str, np.ndarray]  # Shards by their index in the array.
  places: list[tuple[jax.Device, str]]  # Each device of this process, and the index of its shard.
  key: Any  # The implementation of typed PRNG keys; None: the elements are numbers.

  @classmethod
  def of(cls, leaf: jax.Array) -> _HostArray:
    """Wait for an array, and copy it to the host."""
    numbers = _numbers(leaf)
    places, parts = [], {}
    for shard in numbers.addressable_shards:
      where = str(shard.index)
      places.append((shard.device, where))
      if where not in parts:
        # On CPUs, NumPy would share the array's buffer, which the next program overwrites.
        parts[where] = np.array(shard.data, copy=True)
    key = None if numbers is leaf else jax.random.key_impl(leaf)
    return cls(numbers.shape, numbers.sharding, parts, places, key)

  def placed(self) -> jax.Array:
    """Return the array on its devices."""
    shards = [jax.device_put(self.parts[where], device) for device, where in self.places]
    numbers = jax.make_array_from_single_device_arrays(self.shape, self.sharding, shards)
    return numbers if self.key is None else jax.random.wrap_key_data(numbers, impl=self.key)


def _numbers(leaf: jax.Array) -> jax.Array:
  """Return an array as numbers: the key data of typed PRNG keys, other arrays unchanged."""
  return jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
