"""The choice of attention kernels, and their sharding, by settings and devices; static under `jit`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any, Literal

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sdpo_jax.distributed.mesh import FSDP, TENSOR
from sdpo_jax.errors import UserError
from sdpo_jax.models.attention.splash import LANES

Kind = Literal['xla', 'splash', 'cudnn']
CPU_TILE, DEVICE_TILE = 2**20, 2**28  # Bytes of a tile; on a CPU it should fit its cache, on a GPU fill the device.


@dataclasses.dataclass(frozen=True)
class AttentionBackend:
  """How attention is computed; the default runs on any device."""

  kind: Kind = 'xla'
  mesh: Mesh | None = None  # Mesh over which rows and heads are sharded; None: they are not.
  tile_bytes: int = CPU_TILE  # Approximate bytes of float32 scores that the XLA path holds at once.
  interpret: bool = False  # Whether kernels run as ordinary operations, for tests without their hardware.

  @property
  def stacked_cache(self) -> bool:
    """Whether the cache is one array for all layers, as the TPU's decoding kernel needs it, however few they are."""
    return self.kind == 'splash'

  def cached_dim(self, head_dim: int) -> int:
    """Return the width of a head in the cache, padded to whole lanes if a kernel reads the cache in place.

    With narrower heads, the TPU's compiler would put the slots along the lanes, and copy the cache for the kernel.
    """
    return -(-head_dim // LANES) * LANES if self.stacked_cache else head_dim

  @property
  def halves(self) -> bool:
    """Whether rotary embeddings swap halves of heads (`sdpo_jax.models.rope.rotate`)."""
    return self.kind == 'splash'

  @property
  def divided(self) -> bool:
    """Whether arrays are sharded over more than one device."""
    return self.mesh is not None and self.mesh.size > 1

  def axes(self, rows: int, kv_heads: int, sampling: bool) -> tuple[Any, str | None]:
    """Return (mesh axes of the rows, mesh axis of the heads), None for dimensions that are not sharded.

    Training and scoring shard rows over the whole mesh; sampling shards rows over `fsdp` and heads over `tensor`.
    Dimensions that an axis does not divide are not sharded over it.
    """
    if not self.divided:
      return None, None
    if not sampling and rows % self.mesh.size == 0:
      return (FSDP, TENSOR), None
    return (
      FSDP if rows % self.mesh.shape[FSDP] == 0 else None,
      TENSOR if kv_heads % self.mesh.shape[TENSOR] == 0 else None,
    )

  def constrain(self, array: jax.Array, *spec: Any) -> jax.Array:
    """Return the array with a sharding constraint `spec`, a mesh axis per dimension; unchanged without a mesh."""
    if not self.divided:
      return array
    return lax.with_sharding_constraint(array, NamedSharding(self.mesh, PartitionSpec(*spec)))

  def shard(
    self, function: Callable[..., Any], in_specs: Sequence[Sequence[Any]], out_specs: Any
  ) -> Callable[..., Any]:
    """Return `function` under `shard_map`, applied to each device's shards; specs are mesh axes per dimension."""
    if not self.divided:
      return function
    specs = tuple(PartitionSpec(*spec) for spec in in_specs)
    out = jax.tree.map(lambda spec: PartitionSpec(*spec), out_specs, is_leaf=lambda leaf: isinstance(leaf, tuple))
    return jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=out, check_vma=False)


def choose_backend(setting: str, dtype: str, head_dim: int, mesh: Mesh | None = None) -> AttentionBackend:
  """Return the backend for the setting `model.attention` on the devices of `mesh` (None: the default device).

  The mesh of a TPU topology without its hardware counts as TPUs.

  Raises:
    UserError: the devices or the dtype do not allow the setting.
  """
  platform = (mesh.devices.flat[0] if mesh is not None else jax.devices()[0]).platform
  is_gpu = platform in ('gpu', 'cuda', 'rocm')
  fits_cudnn = dtype == 'bfloat16' and head_dim % 8 == 0 and head_dim <= 128
  if setting == 'auto':
    setting = 'splash' if platform == 'tpu' else 'cudnn' if platform in ('gpu', 'cuda') and fits_cudnn else 'xla'
  if setting == 'splash' and platform != 'tpu':
    raise UserError(f"model.attention='splash' needs TPUs, but the devices here are {platform}: set it to auto or xla.")
  if setting == 'cudnn' and not (is_gpu and fits_cudnn):
    raise UserError(
      f"model.attention='cudnn' needs NVIDIA GPUs, model.dtype='bfloat16' and a head_dim that is a multiple of 8 up to "
      f'128, but here they are {platform}, {dtype!r} and {head_dim}: set it to auto or xla.'
    )
  return AttentionBackend(setting, mesh, CPU_TILE if platform == 'cpu' else DEVICE_TILE)


@functools.cache
def distinct_windows(windows: tuple[int, ...] | None) -> tuple[int, ...]:
  """Return the distinct windows of a model's layers; 0: all positions."""
  return tuple(sorted(set(windows or (0,))))
