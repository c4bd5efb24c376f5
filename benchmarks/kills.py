"""Runs that are killed at random moments and resumed, compared bit for bit with an undisturbed run.

  python -m benchmarks.kills   # 60 kills of the quickstart at tiny settings, some minutes on two cores
  python -m benchmarks.kills --kills=5 --seed=1

A run is started, killed by SIGKILL at a random moment, and started again, until it has finished; then the next run
begins, until there were enough kills. Half of the moments are drawn from a process's whole life, most of which is
start-up, half from the part in which it writes. Prints one line of JSON; exit code 1 if any run differs from the
undisturbed one: in a bit of its state, a number or text of metrics.jsonl other than a time, or a rollout.
"""

from __future__ import annotations

import argparse
import collections
import gc
import json
import math
import os
import pathlib
import random
import runpy
import signal
import sys
import tempfile
import time
import traceback

# Modules of a run, imported before the fork.
from sdpo_jax import command  # noqa: F401
from sdpo_jax.training.directory.published_checkpoints import MANIFEST

TINY = {
  'data.train_batch_size': 4,
  'data.val_max_samples': 8,
  'rollout.n': 4,
  'actor.ppo_mini_batch_size': 4,
  'actor.ppo_micro_batch_size': 16,
  'trainer.save_freq': 1,
  'trainer.test_freq': 3,
  'trainer.rollout_save_freq': 1,
  'trainer.max_ckpt_to_keep': 1,
}


def start(flags: argparse.Namespace, workdir: pathlib.Path) -> int:
  """Start or resume a run in a fork of this process, which has not started JAX; return the process id."""
  child = os.fork()
  if child == 0:
    code: object = 1
    try:
      log = os.open(log_of(workdir), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
      os.dup2(log, 1)
      os.dup2(log, 2)
      settings = TINY | {'trainer.total_training_steps': flags.steps}
      sys.argv = ['launch/train.py', f'--config={flags.config}', f'--workdir={workdir}']
      sys.argv += [f'--config.{name}={value}' for name, value in settings.items()]
      runpy.run_module('launch.train', run_name='__main__', alter_sys=True)
    except SystemExit as end:
      code = end.code or 0
    except BaseException:
      traceback.print_exc()
    finally:
      sys.stdout.flush()
      sys.stderr.flush()
      os._exit(code if isinstance(code, int) else 1)
  return child


def log_of(workdir: pathlib.Path) -> pathlib.Path:
  """Return the log file of a run's last process."""
  return workdir.with_suffix('.log')


def await_end(process: int, seconds: float) -> int | None:
  """Return the exit code of a process (-N: signal N); None if it runs for longer than `seconds`."""
  deadline = time.monotonic() + seconds
  while True:
    ended, status = os.waitpid(process, os.WNOHANG)
    if ended:
      return os.waitstatus_to_exitcode(status)
    if time.monotonic() >= deadline:
      return None
    time.sleep(0.002)


def await_writing(process: int, workdir: pathlib.Path, before: object) -> int | None:
  """Wait until a process begins to write to a run; return its exit code if it ends before."""
  code = None
  while code is None and stamp(workdir) == before:
    code = await_end(process, 0.005)
  return code


def check(code: int, workdir: pathlib.Path) -> None:
  """Exit with an error if a run has failed."""
  if code != 0:
    raise SystemExit(f'A run ended with exit code {code}: {log_of(workdir).read_text()}')


def left(workdir: pathlib.Path, last: int) -> dict[str, object]:
  """Return a finished run's results, without what differs between any two runs: times, and who wrote it."""

  def kept(name: str) -> bool:
    return name not in ('fencing_epoch', 'line_digest') and not name.startswith(('time/', 'throughput/', 'programs/'))

  lines = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
  [newest] = (path for path in (workdir / 'checkpoints').iterdir() if path.name == str(last))
  manifest = json.loads((newest / MANIFEST).read_text())
  files = [path for folder in ('rollouts', 'eval') for path in sorted((workdir / folder).iterdir())]
  return {
    'lines': [{name: value for name, value in line.items() if kept(name)} for line in lines],
    'state': manifest['leaves'],
    'host': manifest['files']['host/metadata'],
    **{f'{path.parent.name}/{path.name}': path.read_text() for path in files},
  }


def phase(workdir: pathlib.Path) -> str:
  """Return the phase in which a process was killed, judging by its files."""
  folder = workdir / 'checkpoints'
  names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
  if any('.unfinished' in name for name in names):
    return 'while a checkpoint was written'
  if any('.deleted' in name for name in names):
    return 'while a checkpoint was removed'
  return 'between checkpoints' if any(name.isdecimal() for name in names) else 'before the first checkpoint'


def stamp(workdir: pathlib.Path) -> object:
  """Return a value that changes when a process begins to write to a run."""
  path = workdir / 'epochs.json'
  return path.stat().st_mtime_ns if path.exists() else None


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--kills', type=int, default=60, help='how many')
  parser.add_argument('--seed', type=int, default=0, help='of the moments')
  parser.add_argument('--config', default='configs/quickstart.py', help='what is trained')
  parser.add_argument('--steps', type=int, default=12, help='of a run, each with a checkpoint')
  flags = parser.parse_args()
  os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0')
  gc.collect()
  gc.freeze()
  rng, kills, finished, moments, wrong = random.Random(flags.seed), 0, 0, collections.Counter(), []
  with tempfile.TemporaryDirectory() as scratch:
    for name in ('compiled', 'peace'):
      peace, began = pathlib.Path(scratch) / name, time.monotonic()
      process = start(flags, peace)
      code, writing = await_writing(process, peace, None), time.monotonic()
      check(await_end(process, math.inf) if code is None else code, peace)
      whole, active = time.monotonic() - began, time.monotonic() - writing
    expected = left(peace, flags.steps)
    while kills < flags.kills:
      workdir = pathlib.Path(scratch) / f'run_{finished}'
      code = -signal.SIGKILL
      while code == -signal.SIGKILL:
        before = stamp(workdir)
        process = start(flags, workdir)
        soon = rng.random() < 0.5
        code = None if soon else await_writing(process, workdir, before)
        if code is None:
          code = await_end(process, rng.uniform(0, whole if soon else active) if kills < flags.kills else math.inf)
        if code is None:
          os.kill(process, signal.SIGKILL)
          code = await_end(process, math.inf)  # It may just have ended.
          if code == -signal.SIGKILL:
            kills += 1
            moments[phase(workdir)] += 1
      check(code, workdir)
      finished += 1
      found = left(workdir, flags.steps)
      wrong += [f'run {finished}: {name}' for name in {**expected, **found} if expected.get(name) != found.get(name)]
      print(f'run {finished} has finished; {kills} kills; {len(wrong)} differences', file=sys.stderr, flush=True)
  numbers = {'kills': kills, 'runs': finished, 'steps': flags.steps, 'seconds_of_a_run': round(whole, 1)}
  print(json.dumps({**numbers, 'moments': dict(moments), 'differences': wrong}))
  return 1 if wrong else 0


if __name__ == '__main__':
  sys.exit(main())
