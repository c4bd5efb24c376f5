"""CPU-seconds of short programs in the sandbox, and of a new interpreter for each.

    python -m benchmarks.sandbox [--runs=2560] [--baseline_runs=128] [--workers=2]
    python -m benchmarks.sandbox --soak [--programs=20000] [--seed=0] [--workers=2]

A generation batch of the paper has 32 questions × 8 completions, a question some ten tests: 2 560 programs, most of
which return at once. Ours run in forks of the zygote, which has numpy loaded. The baselines are `python -I -c` with a
time limit and without any confinement, as graders commonly do it, plain and with numpy imported: fewer runs, scaled to
as many. Prints one JSON line; processor seconds are those of this process and of all its children, start and end of the
sandbox included.

With --soak hostile and honest programs are graded among one another (sandbox_soak.py); prints one JSON line, and exits
with 1 if a verdict on an honest program is not the one that it gets alone, a hostile one passes, the memory of this
process differs by more than 64 MiB, or it spends more than 50 ms of a thread's processor time on one program,
collections of garbage aside.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

from benchmarks import sandbox_soak
from sdpo_jax.config import SandboxConfig
from sdpo_jax.environments.sandbox.sandbox import Limits, Sandbox, SandboxJob

HARNESS = """
def run(payload):
  namespace = {}
  exec(payload, namespace)
  return namespace['answer']
"""
PROGRAM = 'answer = sum(range(10))'


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--runs', type=int, default=2560)
  parser.add_argument('--baseline_runs', type=int, default=128)
  parser.add_argument('--workers', type=int, default=2)
  parser.add_argument('--soak', action='store_true')
  parser.add_argument('--programs', type=int, default=20_000)
  parser.add_argument('--seed', type=int, default=0)
  args = parser.parse_args()
  if args.soak:
    line = sandbox_soak.soak(args.programs, args.seed, args.workers)
    print(json.dumps(line | {'cores': len(os.sched_getaffinity(0))}))
    sys.exit(1 if line['missed'] else 0)
  outcome = []
  ours = measure(lambda: outcome.extend(sandboxed(args.runs, args.workers)))
  scale = args.runs / args.baseline_runs
  line = {
    'benchmark': 'sandbox',
    'runs': args.runs,
    'workers': args.workers,
    'cores': len(os.sched_getaffinity(0)),
    'mechanism': outcome[0],
    'sdpo_jax': {**ours, 'slowest_run_s': round(outcome[1], 3)},
  }
  for name, imports in {'python -I': '', 'python -I, numpy': 'import numpy\n'}.items():
    baseline = measure(lambda imports=imports: new_interpreters(args.baseline_runs, args.workers, imports), scale)
    line[name] = {**baseline, 'measured_runs': args.baseline_runs, 'scaled': scale}
  print(json.dumps(line))


def measure(work: Callable[[], None], scale: float = 1.0) -> dict[str, float]:
  """Return the CPU and wall seconds of a call, times `scale`."""
  before = clock()
  work()
  wall, cpu = ((after - start) * scale for start, after in zip(before, clock(), strict=True))
  return {'cpu_s': round(cpu, 2), 'wall_s': round(wall, 2)}


def sandboxed(runs: int, workers: int) -> tuple[str, float]:
  """Start a sandbox, run programs in it and close it; return its mechanism and the longest run in seconds."""
  with tempfile.TemporaryDirectory() as directory:
    harness = pathlib.Path(directory) / 'harness.py'
    harness.write_text(HARNESS)
    with Sandbox(SandboxConfig(workers=workers), harness, preload=('numpy', 'collections', 'math')) as sandbox:
      reports = sandbox.run([SandboxJob(PROGRAM, '', Limits(wall_s=60, cpu_s=60))] * runs)
      mechanism = sandbox.mechanism
  assert all(report.result == 45 for report in reports)
  return mechanism, max(report.wall_s for report in reports)


def new_interpreters(runs: int, workers: int, imports: str) -> None:
  """Run the program in this many new interpreters."""
  command = [sys.executable, '-I', '-c', f'{imports}{PROGRAM}\nprint(answer)']
  environment = {'OPENBLAS_NUM_THREADS': '1'}

  def one(_):
    return subprocess.run(command, capture_output=True, timeout=60, check=True, env=environment).stdout

  with ThreadPoolExecutor(workers) as pool:
    assert set(pool.map(one, range(runs))) == {b'45\n'}


def clock() -> tuple[float, float]:
  """Return wall and CPU seconds so far, the latter including children that have ended."""
  usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
  return time.perf_counter(), sum(each.ru_utime + each.ru_stime for each in usage)


if __name__ == '__main__':
  main()
