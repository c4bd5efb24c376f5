"""Memory of a long run: resident size and Python's heap, step by step, which must not grow.

  python -m benchmarks.long_run                     # 5,000 steps of the quickstart at tiny settings, five minutes
  python -m benchmarks.long_run --steps=1300 --heap # Python's allocations too, which take three times as long

Prints a line of JSON every `--every` steps: `rss_mb`, and with --heap `heap_kb`, what Python's objects take; then the
growth per step between `--after` and the end. Compiled programs, threads and the allocator's arenas settle within the
first few hundred steps. The statistics of TensorStore that Orbax reads for every checkpoint are never freed, about 35
kB each time: what still grows is nearly all theirs, so that `--save_freq` decides.
"""

from __future__ import annotations

import argparse
import gc
import json
import pathlib
import tempfile
import time
import tracemalloc

from sdpo_jax import load_config, steps

REPOSITORY = pathlib.Path(__file__).parent.parent
TINY = {
  'data.train_batch_size': 2,
  'data.val_max_samples': 4,
  'rollout.n': 4,
  'rollout.max_batch_rows': 8,
  'actor.ppo_mini_batch_size': 2,
  'actor.ppo_micro_batch_size': 8,
  'trainer.test_freq': 50,
  'trainer.max_skipped_steps': 0,  # So small a batch often has nothing to learn from.
}


def resident_mb() -> float:
  """Return the resident size of this process in MB."""
  fields = dict(line.split(':', 1) for line in pathlib.Path('/proc/self/status').read_text().splitlines())
  return int(fields['VmRSS'].split()[0]) / 1e3


def measure(flags: argparse.Namespace, workdir: pathlib.Path) -> dict[str, float]:
  """Train, print a line every so often, and return the growth after `flags.after`."""
  changes = TINY | {'trainer.total_training_steps': flags.steps, 'trainer.save_freq': flags.save_freq}
  if flags.heap:
    tracemalloc.start()
  run = steps(load_config(REPOSITORY / 'configs' / f'{flags.config}.py', changes), workdir)
  settled, began = {}, time.monotonic()
  for taken in run:
    step = taken.number
    if step % flags.every and step not in (flags.after, flags.steps):
      continue
    gc.collect()
    line = {'step': step, 'rss_mb': round(resident_mb(), 1), 'seconds': round(time.monotonic() - began)}
    if tracemalloc.is_tracing():
      line['heap_kb'] = round(tracemalloc.get_traced_memory()[0] / 1e3, 1)
    print(json.dumps(line), flush=True)
    settled = line if step == flags.after else settled
  number = flags.steps - flags.after
  grown = {'rss_mb': round(line['rss_mb'] - settled['rss_mb'], 1), 'steps': number}
  if flags.heap:
    grown['heap_bytes_per_step'] = round((line['heap_kb'] - settled['heap_kb']) * 1e3 / number)
  return grown


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--config', default='quickstart', help='a config in configs/')
  parser.add_argument('--steps', type=int, default=5000)
  parser.add_argument('--after', type=int, default=1000, help='step from which growth counts')
  parser.add_argument('--every', type=int, default=200, help='steps between two lines')
  parser.add_argument('--save_freq', type=int, default=50)
  parser.add_argument('--heap', action='store_true', help="trace Python's allocations, too")
  flags = parser.parse_args()
  with tempfile.TemporaryDirectory() as folder:
    print(json.dumps({'grown': measure(flags, pathlib.Path(folder) / 'run')}))


if __name__ == '__main__':
  main()
