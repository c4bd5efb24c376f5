"""The devices of a process, and the table of their peak FLOP/s and memory from the data sheets."""

from __future__ import annotations

import dataclasses
import glob
import importlib.metadata
import importlib.util
import os
import pathlib

import jax

from sdpo_jax.errors import UserError, first_line


@dataclasses.dataclass(frozen=True)
class Accelerator:
  """One kind of chip."""

  kind: str  # The beginning of JAX's device kind.
  flops: float  # Dense bf16 FLOP/s.
  memory_gib: float | None = None  # Memory available to a program, according to the TPU compiler; None: unknown.


# The first match counts: JAX calls a v5e 'TPU v5 lite' and a v5p 'TPU v5'.
TABLE = (
  Accelerator('TPU v4', 275e12, 32.0),
  Accelerator('TPU v5 lite', 197e12, 15.75),
  Accelerator('TPU v5e', 197e12, 15.75),
  Accelerator('TPU v5', 459e12, 95.74),
  Accelerator('TPU v6', 918e12, 31.25),
  Accelerator('NVIDIA H100', 989e12),
  Accelerator('NVIDIA H200', 989e12),
  Accelerator('NVIDIA A100', 312e12),
)
TPU_FILES = ('/dev/accel*', '/dev/vfio/[0-9]*')
GOOGLE, NO_TPU = '0x1ae0', ('0x01', '0x02')  # PCI vendor, and the PCI classes of its disks and network cards.


def find(device_kind: str) -> Accelerator | None:
  """Return the chip with JAX's device kind `device_kind`; None if it is not in the table."""
  return next((chip for chip in TABLE if device_kind.startswith(chip.kind)), None)


def peak_flops(device: jax.Device) -> float | None:
  """Return the peak bf16 FLOP/s of a device; None if unknown."""
  chip = find(device.device_kind)
  return None if chip is None else chip.flops


def devices() -> list[jax.Device]:
  """Return JAX's devices, with a readable error if there are none.

  Raises:
    UserError: the platform named by JAX_PLATFORMS does not exist here, or cannot be used.
  """
  if 'tpu' in _named() and not _has_tpu() and 'JAX_FORCE_TPU_INIT' not in os.environ:
    raise _without_devices('there is no TPU on this machine')  # libtpu would print several lines.
  try:
    return jax.devices()
  except (RuntimeError, AssertionError) as error:  # AssertionError, without a message, for 'cuda' without a GPU.
    raise _without_devices(first_line(error) if str(error).strip() else 'no device was found') from error


def _without_devices(reason: str) -> UserError:
  return UserError(
    f'JAX_PLATFORMS={",".join(_named())} cannot be used here ({reason}): unset it to use what there is, or install jax '
    'for the accelerator (requirements-gpu.txt, requirements-tpu.txt).'
  )


def _named() -> list[str]:
  """Return the platforms named by JAX_PLATFORMS."""
  return [name for name in (jax.config.jax_platforms or '').split(',') if name]


def skip_absent_tpu() -> None:
  """Keep JAX from trying libtpu on a machine without TPU chips, where it prints errors before JAX takes the CPU.

  Does nothing if platforms are named (JAX_PLATFORMS), or if plugins of other accelerators are installed.
  """
  forced = _named() or 'JAX_FORCE_TPU_INIT' in os.environ
  if not forced and not _has_plugins() and not _has_tpu():
    jax.config.update('jax_platforms', 'cpu')


def _has_tpu() -> bool:
  """Return whether libtpu can reach a chip through a device file, or a Google chip is on the PCI bus."""
  return any(map(glob.glob, TPU_FILES)) or any(map(_is_tpu, glob.glob('/sys/bus/pci/devices/*')))


def _is_tpu(device: str) -> bool:
  vendor, kind = (pathlib.Path(device, name).read_text().strip() for name in ('vendor', 'class'))
  return vendor == GOOGLE and not kind.startswith(NO_TPU)


def _has_plugins() -> bool:
  """Return whether an installed package adds a platform other than CPU and TPU to JAX."""
  return importlib.util.find_spec('jax_plugins') is not None or bool(
    importlib.metadata.entry_points(group='jax_plugins')
  )


def prepare() -> None:
  """Set up JAX for a script as commands do: skip an absent TPU, and cache compiled programs on disk.

  Programs are cached in JAX_COMPILATION_CACHE_DIR or ~/.cache/sdpo_jax.
  """
  skip_absent_tpu()
  if 'JAX_COMPILATION_CACHE_DIR' not in os.environ:
    jax.config.update('jax_compilation_cache_dir', str(pathlib.Path.home() / '.cache' / 'sdpo_jax' / 'programs'))
  if 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS' not in os.environ:
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.3)
