"""CPU-seconds of short programs in the sandbox, and of a new interpreter for each.

    python -m benchmarks.sandbox [--runs=2560] [--baseline_runs=128] [--workers=2]
    python -m benchmarks.sandbox --soak [--programs=20000] [--seed=0] [--workers=2]
    python -m benchmarks.sandbox --workspace [--files=50000] [--runs=20]

A generation batch of the paper has 32 questions × 8 completions, a question some ten tests: 2 560 programs, most of
which return at once. Ours run in forks of the zygote, which has numpy loaded. The baselines are `python -I -c` with a
time limit and without any confinement, as graders commonly do it, plain and with numpy imported: fewer runs, scaled to
as many. Prints one JSON line; processor seconds are those of this process and of all its children, start and end of the
sandbox included.

With --soak hostile and honest programs are graded among one another (sandbox_soak.py); prints one JSON line, and exits
with 1 if a verdict on an honest program is not the one that it gets alone, a hostile one passes, the memory of this
process differs by more than 64 MiB, or it spends more than 50 ms of a thread's processor time on one program,
collections of garbage aside.

With --workspace it is a command of a session, `:`, that is timed in workspaces with no file, with so many files, and
with as many that have hard links outside, one after the other; prints the median seconds of each as a JSON line.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
import json
import os
import pathlib
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

from benchmarks import sandbox_soak
from sdpo_jax.config import SandboxConfig
from sdpo_jax.environments.sandbox.sandbox import Limits, Sandbox, SandboxJob
from sdpo_jax.environments.workspace.shell import Shell

HARNESS = """
def run(payload):
  namespace = {}
  exec(payload, namespace)
  return namespace['answer']
"""
PROGRAM = 'answer = sum(range(10))'


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--runs', type=int, default=None, help='2560 unless given, and 20 with --workspace')
  parser.add_argument('--baseline_runs', type=int, default=128)
  parser.add_argument('--workers', type=int, default=2)
  parser.add_argument('--soak', action='store_true')
  parser.add_argument('--workspace', action='store_true')
  parser.add_argument('--files', type=int, default=50_000)
  parser.add_argument('--programs', type=int, default=20_000)
  parser.add_argument('--seed', type=int, default=0)
  args = parser.parse_args()
  if args.workspace:
    print(json.dumps({'benchmark': 'workspace', 'files': args.files, **commands(args.files, args.runs or 20)}))
    return
  args.runs = args.runs or 2560
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


def commands(files: int, runs: int) -> dict[str, float]:
  """Return the median seconds of a command by the contents of its workspace."""
  with tempfile.TemporaryDirectory() as at:
    kinds = {name: pathlib.Path(at, name) for name in ('empty', 'files', 'linked')}
    for name, top in kinds.items():
      top.mkdir()
      for number in range(0 if name == 'empty' else files):
        path = top / str(number // 50) / str(number)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b'x')
    shutil.copytree(kinds['linked'], pathlib.Path(at, 'outside'), copy_function=os.link)
    shells = {name: Shell(top) for name, top in kinds.items()}
    took = [{name: shell.run(':').wall_s for name, shell in shells.items()} for _ in range(runs)]
  return {f'{name}_s': round(statistics.median(run[name] for run in took), 3) for name in kinds}


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
