"""Memory and speed of loading and exporting a checkpoint of several gigabytes.

    python -m benchmarks.loading --folder=/disk/checkpoint [--gigabytes=4] [--devices=1,8] [--keep]

Writes a random Qwen3 in bfloat16 (with the safetensors library, in shards of 1 GB) to the folder, unless it exists, and
removes it at the end, unless `--keep`. One JSON line for each number of devices: CPU devices, all in this process,
which therefore places all of each parameter.

- `beyond_placed_mb`: the most that the process held at any time beyond the arrays that are placed, by the kernel's peak
  of its resident memory (VmHWM, which nothing that is mapped could hide from), reset before each parameter;
  `allowed_mb` is its share of the largest stacked parameter + 200; `beyond_own_share_mb` is what it held beyond the
  parameter that it was reading, too.
- `load`: GB of the files per second, with a page cache that knows nothing of them (`cold`) and one that holds them
  (`warm`); `read` is the baseline, one process that reads the same files from end to end and does nothing else.
  `cpu_s_per_gb` is the processor time of the same, which other programs of the machine hardly change.
- `sha256`: the same of comparing the files with their SHA-256.
- `export`: the same of writing the model again in bfloat16, synced; `export_beyond_mb` is its peak.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
import ctypes
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from typing import Any

SHARD = 10**9
BUFFER = 2**24


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--folder', required=True, type=pathlib.Path, help='where the checkpoint is, or is made')
  parser.add_argument('--gigabytes', type=float, default=4.0, help='of its files, about')
  parser.add_argument('--devices', default='1,8')
  parser.add_argument('--keep', action='store_true')
  parser.add_argument('--child', type=int, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.child:
    print(json.dumps(measure(args.folder, args.child)), flush=True)
    return
  if not (args.folder / 'config.json').exists():
    generate(args.folder, args.gigabytes)
  try:
    for devices in args.devices.split(','):
      command = [sys.executable, '-m', 'benchmarks.loading', f'--folder={args.folder}', f'--child={devices}']
      subprocess.run(command, check=True, env=os.environ | {'JAX_PLATFORMS': 'cpu'})
  finally:
    if not args.keep:
      shutil.rmtree(args.folder)


def generate(folder: pathlib.Path, gigabytes: float) -> None:
  """Write a random model of 24 layers, whose width follows from the size."""
  import ml_dtypes
  import numpy as np
  from safetensors.numpy import save_file

  from sdpo_jax.config import ModelConfig
  from sdpo_jax.models import checksums, huggingface
  from sdpo_jax.models.stored_tensors import INDEX

  layers, vocabulary = 24, 65536
  width = next(w for w in range(256, 16384, 256) if 2 * (layers * 12 * w * w + 2 * vocabulary * w) >= gigabytes * 1e9)
  values = {
    'architectures': ['Qwen3ForCausalLM'],
    'model_type': 'qwen3',
    'vocab_size': vocabulary,
    'hidden_size': width,
    'intermediate_size': 3 * width,
    'num_hidden_layers': layers,
    'num_attention_heads': width // 128,
    'num_key_value_heads': width // 256,
    'head_dim': 128,
    'tie_word_embeddings': False,
  }
  folder.mkdir(parents=True)
  drawn = np.random.default_rng(0).standard_normal(2**22 + 1, np.float32).astype(ml_dtypes.bfloat16)
  weight_map: dict[str, str] = {}
  pending: dict[str, Any] = {}
  files = 0

  def flush() -> None:
    nonlocal files
    files += 1
    name = f'model-{files:05d}.safetensors'
    save_file(pending, folder / name)
    weight_map.update(dict.fromkeys(pending, name))
    pending.clear()

  table = huggingface.describe(values, ModelConfig()).parameter_table()
  for parameter in table:
    for layer in range(parameter.layers):
      size = int(np.prod(parameter.huggingface_shape))
      if pending and 2 * size + sum(array.nbytes for array in pending.values()) > SHARD:
        flush()
      pending[parameter.huggingface_name(layer)] = np.resize(drawn, size).reshape(parameter.huggingface_shape)
  flush()
  (folder / INDEX).write_text(json.dumps({'metadata': {}, 'weight_map': weight_map}))
  checksums.write(folder)
  (folder / 'config.json').write_text(json.dumps(values))


def measure(folder: pathlib.Path, devices: int) -> dict[str, Any]:
  """Load, compare and export the model on a number of devices."""
  import jax

  jax.config.update('jax_num_cpu_devices', devices)
  from sdpo_jax.config import MeshConfig, ModelConfig
  from sdpo_jax.distributed.mesh import make_mesh
  from sdpo_jax.models import huggingface, placing

  size = sum(file.stat().st_size for file in folder.glob('*.safetensors'))
  speed, work = {}, {}

  def timed(name: str, function: Callable[[], Any]) -> Any:
    start, cpu = time.perf_counter(), time.process_time()
    result = function()
    work[name] = round((time.process_time() - cpu) / size * 1e9, 2)
    speed[name] = round(size / (time.perf_counter() - start) / 1e9, 2)
    return result

  mesh = make_mesh(MeshConfig(), jax.devices()) if devices > 1 else None
  config = ModelConfig(path=str(folder))
  beyond, shares, stacked = [], [], []
  place = placing.place

  base, placed = 0, 0

  def watched(parameter: Any, *rest: Any) -> jax.Array:
    nonlocal base, placed
    base = base or restart_peak()
    restart_peak()
    array = place(parameter, *rest)
    held = sum(shard.data.nbytes for shard in array.addressable_shards)
    placed += held
    beyond.append(memory('VmHWM') - base - placed)
    shares.append(held)
    stacked.append(held if parameter.stacked else 0)
    return array

  check_files, huggingface.check_files = huggingface.check_files, lambda root, edited: 0
  for state in ('cold', 'warm'):
    for name, function in (('read', lambda: read(folder)), ('load', lambda: huggingface.load(folder, config, mesh))):
      if state == 'cold':
        forget(folder)
      placing.place = watched if (name, state) == ('load', 'cold') else place
      loaded = timed(f'{name} {state}', function)
      if (name, state) == ('load', 'cold'):
        del loaded
  policy, params = loaded
  timed('sha256 warm', lambda: check_files(folder))
  before, target = restart_peak(), folder.with_name(f'{folder.name}.exported')
  try:
    timed('export', lambda: huggingface.save(target, policy, params, source=folder, dtype='bfloat16'))
    exported = memory('VmHWM') - before
  finally:
    shutil.rmtree(target, ignore_errors=True)
  return {
    'benchmark': 'loading',
    'devices': devices,
    'file_gb': round(size / 1e9, 2),
    'placed_gb': round(sum(leaf.nbytes for leaf in jax.tree.leaves(params)) / 1e9, 2),
    'beyond_placed_mb': round(max(beyond) / 1e6),
    'allowed_mb': round(max(stacked) / 1e6) + 200,
    'beyond_own_share_mb': round(max(b - s for b, s in zip(beyond, shares, strict=True)) / 1e6),
    'export_beyond_mb': round(exported / 1e6),
    'gb_per_s': speed,
    'cpu_s_per_gb': work,
  }


def read(folder: pathlib.Path) -> None:
  """Read all files from end to end."""
  buffer = bytearray(BUFFER)
  for path in sorted(folder.glob('*.safetensors')):
    with path.open('rb', buffering=0) as file:
      while file.readinto(buffer):
        pass


def forget(folder: pathlib.Path) -> None:
  """Have the page cache drop the files."""
  for path in folder.glob('*.safetensors'):
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def restart_peak() -> int:
  """Reset the kernel's peak of this process's memory; return the current value in bytes.

  Free memory is returned to the kernel first, so that later use of it counts.
  """
  ctypes.CDLL(None).malloc_trim(0)
  pathlib.Path('/proc/self/clear_refs').write_text('5')
  return memory('VmRSS')


def memory(field: str) -> int:
  """Return a field of /proc/self/status in bytes."""
  for line in pathlib.Path('/proc/self/status').read_text().splitlines():
    if line.startswith(f'{field}:'):
      return 1024 * int(line.split()[1])
  raise RuntimeError(f'/proc/self/status has no {field}.')


if __name__ == '__main__':
  main()
