"""Processor seconds of short programs in the sandbox, and of a new interpreter for each.

    python -m benchmarks.sandbox [--runs=2560] [--baseline_runs=128] [--workers=2]

A generation batch of the paper has 32 questions × 8 completions, a question some ten tests: 2 560 programs, most of
which return at once. Ours run in forks of the zygote, which has numpy loaded. The baseline is `python -I -c` with a time
limit, without any confinement and without numpy, as graders commonly do it: fewer runs, scaled to as many. Prints one
JSON line; processor seconds are those of this process and of all its children, start and end of the sandbox included.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

from sdpo_jax.config import SandboxConfig
from sdpo_jax.environments.sandbox import Job, Limits, Sandbox

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
  args = parser.parse_args()
  start = clock()
  mechanism, slowest = sandboxed(args.runs, args.workers)
  ours = [after - before for before, after in zip(start, clock(), strict=True)]
  start = clock()
  new_interpreters(args.baseline_runs, args.workers)
  baseline = [(after - before) * args.runs / args.baseline_runs for before, after in zip(start, clock(), strict=True)]
  line = {
    'benchmark': 'sandbox',
    'runs': args.runs,
    'workers': args.workers,
    'cores': len(os.sched_getaffinity(0)),
    'mechanism': mechanism,
    'sdpo_jax': {'cpu_s': round(ours[1], 2), 'wall_s': round(ours[0], 2), 'slowest_run_s': round(slowest, 3)},
    'python -I': {
      'cpu_s': round(baseline[1], 2),
      'wall_s': round(baseline[0], 2),
      'measured_runs': args.baseline_runs,
      'scaled': args.runs / args.baseline_runs,
    },
    'times_as_fast_cpu': round(baseline[1] / ours[1], 2),
  }
  print(json.dumps(line))


def sandboxed(runs: int, workers: int) -> tuple[str, float]:
  """Starts a sandbox, runs programs in it and closes it; its mechanism and the longest run in seconds."""
  with tempfile.TemporaryDirectory() as directory:
    harness = pathlib.Path(directory) / 'harness.py'
    harness.write_text(HARNESS)
    with Sandbox(SandboxConfig(workers=workers), harness, preload=('numpy', 'collections', 'math')) as sandbox:
      reports = sandbox.run([Job(PROGRAM, '', Limits(wall_s=60, cpu_s=60))] * runs)
      mechanism = sandbox.mechanism
  assert all(report.result == 45 for report in reports)
  return mechanism, max(report.wall_s for report in reports)


def new_interpreters(runs: int, workers: int) -> None:
  """Runs the program in as many interpreters of its own."""
  command = [sys.executable, '-I', '-c', f'{PROGRAM}\nprint(answer)']
  one = lambda _: subprocess.run(command, capture_output=True, timeout=60, check=True, env={}).stdout
  with ThreadPoolExecutor(workers) as pool:
    assert set(pool.map(one, range(runs))) == {b'45\n'}


def clock() -> tuple[float, float]:
  """Wall and processor seconds so far, the latter with children that have ended."""
  usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
  return time.perf_counter(), sum(each.ru_utime + each.ru_stime for each in usage)


if __name__ == '__main__':
  main()
