"""TPU slices to compile for, described without their devices."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from typing import Any

import jax
from jax.experimental import topologies

from sdpo_jax import extras
from sdpo_jax.distributed import accelerators
from sdpo_jax.errors import UserError

# Keeps libtpu from looking for a TPU, its metadata server, and the lock of another process.
ENVIRONMENT = {
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
  'TPU_ACCELERATOR_TYPE': 'v5litepod-64',
  'TPU_MIN_LOG_LEVEL': '3',
  'TPU_SKIP_MDS_QUERY': '1',
  'TPU_STDERR_LOG_LEVEL': '3',
  'TPU_WORKER_HOSTNAMES': 'localhost',
  'TPU_WORKER_ID': '0',
}


@dataclasses.dataclass(frozen=True)
class Chip:
  """One chip of a TPU generation."""

  name: str
  hbm_gib: float  # GiB available to a program, according to the compiler's own out-of-memory message.
  flops: float  # Dense bf16 FLOP/s (data sheet).
  hbm_bandwidth: float  # Byte/s (data sheet).
  clock: float  # Hz; times the products per cycle of the matrix units it gives `flops`.
  ici_bandwidth: float  # Byte/s that a chip at a corner of a slice without wraparound can send.
  price: float  # US dollars per chip-hour: on-demand list price, which changes; only a default.
  smallest: str  # The smallest slice that the compiler describes; single chips are taken from it.
  slices: tuple[str, ...]  # Examples for messages.
  longest: int  # Chips along an axis of the largest slice; with more the compiler aborts the process.


def _chip(name: str, kind: str, **properties: Any) -> Chip:
  """Return a chip whose memory and peak are those of a kind of accelerator."""
  known = accelerators.find(kind)
  return Chip(name, known.memory_gib, known.flops, **properties)


_PLANE = {
  'smallest': '2x2',
  'slices': ('1x1', '2x2', '2x4', '4x4', '4x8', '8x8', '8x16', '16x16'),
  'longest': 16,
}
_CUBE = {
  'smallest': '2x2x1',
  'slices': ('1x1x1', '2x2x1', '2x2x2', '2x4x4', '4x4x4', '4x4x8', '8x8x8'),
  'longest': 28,
}
_CHIPS = (
  _chip('v5e', 'TPU v5 lite', hbm_bandwidth=819e9, clock=1.5e9, ici_bandwidth=100e9, price=1.20, **_PLANE),
  _chip('v6e', 'TPU v6', hbm_bandwidth=1638e9, clock=1.75e9, ici_bandwidth=180e9, price=2.70, **_PLANE),
  _chip('v5p', 'TPU v5', hbm_bandwidth=2765e9, clock=1.75e9, ici_bandwidth=270e9, price=4.20, **_CUBE),
)
CHIPS = {chip.name: chip for chip in _CHIPS}


@dataclasses.dataclass(frozen=True)
class Topology:
  """A slice: its name, its chip type, and descriptions of its devices for compilation."""

  name: str
  chip: Chip
  devices: tuple[jax.Device, ...]

  @property
  def compiler(self) -> str:
    """Return the versions of jax and libtpu, whose releases compile differently."""
    built = re.search(r'Built on (\w+ +\d+ \d+)', self.devices[0].client.platform_version)
    return f'jax {jax.__version__}, libtpu' + (f' built on {built.group(1)}' if built else '')


def describe(name: str) -> Topology:
  """Describe the slice `name`, e.g. v5e:8x8 (v5e:1x1 is one chip); needs libtpu, but no TPU.

  Raises:
    UserError: libtpu is not installed, or the slice does not exist.
  """
  if 'TPU_LIBRARY_PATH' not in os.environ:
    extras.check('tpu')
  match = re.fullmatch(r'(\w+):([1-9]\d*(?:x[1-9]\d*)+)', name)
  if match is None or match.group(1) not in CHIPS:
    raise UserError(
      f'--topology={name} is no slice: write KIND:SHAPE with one of {", ".join(CHIPS)}, e.g. v5e:8x8 or v5e:1x1.'
    )
  chip, shape = CHIPS[match.group(1)], match.group(2)
  examples = f'there are {", ".join(chip.slices)}'
  sizes = [int(size) for size in shape.split('x')]
  if len(sizes) != chip.smallest.count('x') + 1:
    raise UserError(f'--topology={name}: slices of {chip.name} have {chip.smallest.count("x") + 1} axes; {examples}.')
  chips = math.prod(sizes)
  if max(sizes) > chip.longest:
    raise UserError(f'--topology={name}: no slice of {chip.name} is longer than {chip.longest} chips; {examples}.')
  wanted = chip.smallest if chips == 1 else shape
  for variable, value in ENVIRONMENT.items():
    os.environ.setdefault(variable, value)
  try:
    described = topologies.get_topology_desc(platform='tpu', topology_name=f'{chip.name}:{wanted}')
  except (RuntimeError, ValueError) as error:  # JaxRuntimeError is a RuntimeError.
    reason = ' '.join(str(error).split())
    if 'topolog' not in reason.lower() and 'INVALID_ARGUMENT' not in reason:
      raise UserError(f'The TPU compiler (libtpu) does not start: {reason}') from error
    raise UserError(f'--topology={name}: the compiler knows no such slice ({reason}); {examples}.') from error
  if chips > 1 and len(described.devices) != chips:
    raise UserError(f'--topology={name}: the compiler describes {len(described.devices)} devices for {chips} chips.')
  return Topology(name, chip, tuple(described.devices[:chips]))


def compile_only() -> None:
  """Keep this process off accelerators and its programs out of the compilation cache; call it before JAX starts.

  Programs compiled for a described slice can be written to the cache but not read back.
  """
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_enable_compilation_cache', False)
