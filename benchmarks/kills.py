"""Runs that are killed at random moments and started again, compared bit for bit with one that was left in peace.

  python -m benchmarks.kills                       # 60 kills of the quickstart at tiny settings, about 15 minutes on two cores
  python -m benchmarks.kills --kills=5 --seed=1

A run is started, killed by SIGKILL at a random moment, and started again, until it has finished; then the next run
begins, until there were enough kills. Half of the moments are drawn from the whole life of a process, which mostly
starts up, half from the part in which it writes. Prints one line of JSON; exit code 1 if any run ended otherwise than
the one left in peace: in a bit of its state, a number or text of metrics.jsonl that is no time, or a rollout.
"""

from __future__ import annotations

import collections
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

from absl import app, flags

from sdpo_jax.training.manifest import MANIFEST

KILLS = flags.DEFINE_integer('kills', 60, 'How many.', lower_bound=1)
SEED = flags.DEFINE_integer('seed', 0, 'Of the moments.')
CONFIG = flags.DEFINE_string('config', 'configs/quickstart.py', 'What is trained.')
STEPS = flags.DEFINE_integer('steps', 12, 'Steps of a run, each with a checkpoint.', lower_bound=1)

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


def start(workdir: pathlib.Path) -> subprocess.Popen:
  """Start, or resume, a run."""
  settings = [f'--config.{name}={value}' for name, value in TINY.items()]
  command = [sys.executable, '-m', 'launch.train', f'--config={CONFIG.value}', f'--workdir={workdir}', *settings]
  with log_of(workdir).open('w') as log:
    return subprocess.Popen(
      [*command, f'--config.trainer.total_training_steps={STEPS.value}'],
      stdout=subprocess.DEVNULL,
      stderr=log,
      env=os.environ | {'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0'},
    )


def log_of(workdir: pathlib.Path) -> pathlib.Path:
  """Return where the last process of a run says what it does."""
  return workdir.with_suffix('.log')


def finish(process: subprocess.Popen, workdir: pathlib.Path) -> None:
  """Wait for the end of a run, which must be a good one."""
  if process.wait() != 0:
    raise SystemExit(f'A run ended with exit code {process.returncode}: {log_of(workdir).read_text()}')


def left(workdir: pathlib.Path) -> dict[str, object]:
  """Return what a finished run left, without what differs between any two: times, and who wrote it."""

  def kept(name: str) -> bool:
    return name != 'fencing_epoch' and not name.startswith(('time/', 'throughput/', 'programs/'))

  lines = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
  [newest] = (path for path in (workdir / 'checkpoints').iterdir() if path.name == str(STEPS.value))
  manifest = json.loads((newest / MANIFEST).read_text())
  files = [path for folder in ('rollouts', 'eval') for path in sorted((workdir / folder).iterdir())]
  return {
    'lines': [{name: value for name, value in line.items() if kept(name)} for line in lines],
    'state': manifest['leaves'],
    'host': manifest['files']['host/metadata'],
    **{f'{path.parent.name}/{path.name}': path.read_text() for path in files},
  }


def phase(workdir: pathlib.Path) -> str:
  """Return what a killed process was at, by what it left."""
  folder = workdir / 'checkpoints'
  names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
  if any('.unfinished' in name for name in names):
    return 'while a checkpoint was written'
  if any('.deleted' in name for name in names):
    return 'while a checkpoint was removed'
  return 'between checkpoints' if any(name.isdecimal() for name in names) else 'before the first checkpoint'


def stamp(workdir: pathlib.Path) -> object:
  """Return what changes when a process begins to write to a run."""
  path = workdir / 'epochs.json'
  return path.stat().st_mtime_ns if path.exists() else None


def main(_: list[str]) -> None:
  rng = random.Random(SEED.value)
  with tempfile.TemporaryDirectory() as scratch:
    peace = pathlib.Path(scratch) / 'peace'
    for _ in range(2):  # The first one compiles.
      subprocess.run(['rm', '-rf', peace], check=True)
      began = time.monotonic()
      process = start(peace)
      while stamp(peace) is None and process.poll() is None:
        time.sleep(0.005)
      writing = time.monotonic()
      finish(process, peace)
      whole, active = time.monotonic() - began, time.monotonic() - writing
    expected, kills, finished, moments, wrong = left(peace), 0, 0, collections.Counter(), []
    while kills < KILLS.value:
      workdir = pathlib.Path(scratch) / f'run_{finished}'
      killed = True
      while killed:
        before = stamp(workdir)
        process = start(workdir)
        if rng.random() < 0.5:
          delay = rng.uniform(0, whole)
        else:
          while stamp(workdir) == before and process.poll() is None:
            time.sleep(0.005)
          delay = rng.uniform(0, active)
        try:
          process.wait(delay if kills < KILLS.value else None)
          killed = False
        except subprocess.TimeoutExpired:
          process.send_signal(signal.SIGKILL)
          killed = process.wait() == -signal.SIGKILL
          if killed:
            kills += 1
            moments[phase(workdir)] += 1
      finish(process, workdir)
      finished += 1
      found = left(workdir)
      wrong += [f'run {finished}: {name}' for name in {**expected, **found} if expected.get(name) != found.get(name)]
      print(f'run {finished} has finished; {kills} kills; {len(wrong)} differences', file=sys.stderr, flush=True)
    numbers = {'kills': kills, 'runs': finished, 'steps': STEPS.value, 'seconds_of_a_run': round(whole, 1)}
    print(json.dumps({**numbers, 'moments': dict(moments), 'differences': wrong}))
  if wrong:
    raise SystemExit(1)


if __name__ == '__main__':
  app.run(main)
