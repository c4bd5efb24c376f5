"""The state from which a generation batch starts, which the first optimizer step would overwrite."""

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
  """The state before a generation batch: on the devices until it is donated, then on the host where it is kept."""

  def __init__(self, state: TrainState, *, keep: bool = False):
    """Hold `state`; `keep` has `donate` copy it to the host where other optimizer steps follow the one that donates."""
    self._lock = threading.Lock()
    self._state: TrainState | None = state
    self._copy: list[_HostArray] | None = None
    self._structure = jax.tree.structure(state)
    self._keep = keep

  @property
  def on_devices(self) -> bool:
    """Whether the state is still where it was."""
    return self._state is not None

  def holds(self, state: TrainState) -> bool:
    """Return whether this is the state, still on the devices."""
    return self._state is state

  @property
  def there(self) -> bool:
    """Whether `take` has a state to return."""
    return self._state is not None or self._copy is not None

  def donate(self, *, others_follow: bool) -> None:
    """Let go of the state on the devices, which is about to be donated.

    Args:
      others_follow: whether there are optimizer steps after the one for which it is donated. Without any, the batch is
        as good as done, and nothing is copied.
    """
    with self._lock:  # Another thread may be saving it.
      self._donate(others_follow)

  def _donate(self, others_follow: bool) -> None:
    if self._state is None:
      return
    if self._keep and others_follow:
      leaves = jax.tree.leaves(self._state)
      for leaf in leaves:  # All are under way while the first is waited for.
        _numbers(leaf).copy_to_host_async()
      self._copy = [_HostArray.of(leaf) for leaf in leaves]
    self._state = None

  @contextlib.contextmanager
  def held(self) -> Iterator[TrainState | None]:
    """Yield the state if it is on the devices, where it stays until the end; `donate`, in another thread, waits."""
    with self._lock:
      yield self._state

  def take(self) -> TrainState | None:
    """Return the state, from the host back on its devices; None if it is gone."""
    if self._state is None and self._copy is not None:
      leaves = [copy.placed() for copy in self._copy]
      self._state, self._copy = jax.tree.unflatten(self._structure, leaves), None
    return self._state


@dataclasses.dataclass(frozen=True)
class _HostArray:
  """What this process holds of an array, on the host: each part once, however many of its devices have that part."""

  shape: tuple[int, ...]
  sharding: jax.sharding.Sharding
  parts: dict[str, np.ndarray]  # By where they are in the array.
  places: list[tuple[jax.Device, str]]  # Each device of this process, and which part it has.
  key: Any  # The implementation of typed PRNG keys; None: these are numbers.

  @classmethod
  def of(cls, leaf: jax.Array) -> _HostArray:
    """Wait for an array, and copy it."""
    numbers = _numbers(leaf)
    places, parts = [], {}
    for shard in numbers.addressable_shards:
      where = str(shard.index)
      places.append((shard.device, where))
      if where not in parts:
        # On CPUs an array is seen where it lies, which the next program is to overwrite.
        parts[where] = np.array(shard.data, copy=True)
    key = None if numbers is leaf else jax.random.key_impl(leaf)
    return cls(numbers.shape, numbers.sharding, parts, places, key)

  def placed(self) -> jax.Array:
    """Return the array, on the devices where it was."""
    shards = [jax.device_put(self.parts[where], device) for device, where in self.places]
    numbers = jax.make_array_from_single_device_arrays(self.shape, self.sharding, shards)
    return numbers if self.key is None else jax.random.wrap_key_data(numbers, impl=self.key)


def _numbers(leaf: jax.Array) -> jax.Array:
  """Return an array as numbers, which typed PRNG keys are not."""
  return jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
