"""The quickstart's study: SDPO beside GRPO, four teachers, feedback on and off, learning rates, over seeds.

  python -m benchmarks.study --output=docs/quickstart            # everything, under an hour on two cores
  python -m benchmarks.study --output=docs/quickstart --only_plot=true

Every cell is a run of `python -m launch.train` through the same code as any other; two run at a time, one core each.
Writes results.json (every evaluation of every run), table.md and curves.png to --output; finished runs are not repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import threading
import time
from typing import Any

from absl import app, flags
import numpy as np

OUTPUT = flags.DEFINE_string('output', 'docs/quickstart', 'Folder of the results.')
RUNS = flags.DEFINE_string('runs', 'runs/study', 'Folder of the runs.')
SEEDS = flags.DEFINE_integer('seeds', 3, 'Seeds of every arm.')
STEPS = flags.DEFINE_integer('steps', 0, "Generation batches of every run; 0: the config's.")
ONLY = flags.DEFINE_multi_string('only', [], 'Name of an arm to run; may be repeated; unset: all.')
ONLY_PLOT = flags.DEFINE_bool('only_plot', False, 'Do not run anything; draw what is there.')
WORKERS = flags.DEFINE_integer('workers', 2, 'Runs at a time, one core each.')

SD = 'actor.self_distillation.'
SDPO, GRPO = 'configs/quickstart.py', 'configs/quickstart_grpo.py'


@dataclasses.dataclass(frozen=True)
class Arm:
  """One line of the table."""

  name: str
  config: str
  settings: Mapping[str, Any]
  tuning: bool = False  # One seed only: a point of a learning-rate grid.


def arms(learning_rates: Mapping[str, Sequence[float]]) -> list[Arm]:
  """The study's arms; `learning_rates` holds the grid of each method."""

  def teacher(kind, rate):
    return {SD + 'teacher_regularization': kind, SD + 'teacher_update_rate': rate}

  compared = [
    Arm('SDPO, frozen teacher', SDPO, teacher('frozen', 0.0)),  # The quickstart.
    Arm('GRPO', GRPO, {}),
    Arm('SDPO, EMA 0.05', SDPO, teacher('ema', 0.05)),
    Arm('SDPO, EMA 0.01', SDPO, teacher('ema', 0.01)),
    Arm('SDPO, live teacher', SDPO, teacher('live', 0.0)),
    Arm('SDPO, frozen, no feedback', SDPO, teacher('frozen', 0.0) | {SD + 'include_environment_feedback': False}),
  ]
  grid = [
    Arm(f'{method}, lr {rate:g}', config, {'optimizer.lr': rate}, tuning=True)
    for method, config in (('SDPO', SDPO), ('GRPO', GRPO))
    for rate in learning_rates[method]
  ]
  return compared + grid


LEARNING_RATES = {'SDPO': (3e-4, 3e-3), 'GRPO': (3e-4, 3e-3)}  # Around the configs' own 1e-3.


def workdir(root: pathlib.Path, arm: Arm, seed: int) -> pathlib.Path:
  return root / ''.join(c if c.isalnum() or c in '.-' else '_' for c in arm.name) / str(seed)


def command(arm: Arm, seed: int, folder: pathlib.Path, steps: int) -> list[str]:
  """The command line of a run."""
  settings = {'seed': seed, 'trainer.rollout_save_freq': 0, 'trainer.save_freq': 0, 'trainer.tensorboard': False}
  settings |= dict(arm.settings)
  if steps:
    settings['trainer.total_training_steps'] = steps
  return [
    sys.executable,
    '-m',
    'launch.train',
    f'--config={arm.config}',
    f'--workdir={folder}',
    *(f'--config.{name}={value}' for name, value in settings.items()),
  ]


def execute(arm: Arm, seed: int, root: pathlib.Path, steps: int, core: int) -> str:
  """Runs one cell on one core; returns a line about it."""
  folder = workdir(root, arm, seed)
  if (folder / 'done').exists():
    return f'{arm.name}, seed {seed}: there already'
  start = time.monotonic()
  available = sorted(os.sched_getaffinity(0))
  done = subprocess.run(
    command(arm, seed, folder, steps),
    capture_output=True,
    text=True,
    check=False,
    preexec_fn=lambda: os.sched_setaffinity(0, {available[core % len(available)]}),
  )
  if done.returncode:
    raise RuntimeError(f'{arm.name}, seed {seed} ended with code {done.returncode}:\n{done.stderr[-2000:]}')
  seconds = time.monotonic() - start
  (folder / 'done').write_text(f'{seconds:.1f}\n')
  return f'{arm.name}, seed {seed}: {seconds:.0f} s'


def run_all(cells: Sequence[tuple[Arm, int]], root: pathlib.Path, steps: int, workers: int) -> None:
  """All runs, `workers` at a time, each worker on its own core."""

  waiting = iter(cells)
  lock = threading.Lock()

  def worker(core: int) -> None:
    while True:
      with lock:
        cell = next(waiting, None)
      if cell is None:
        return
      print(execute(*cell, root, steps, core), file=sys.stderr, flush=True)

  with concurrent.futures.ThreadPoolExecutor(workers) as pool:
    for future in [pool.submit(worker, core) for core in range(workers)]:
      future.result()


def read(cells: Sequence[tuple[Arm, int]], root: pathlib.Path) -> dict[str, dict[int, dict[int, float]]]:
  """arm → seed → step → held-out accuracy (mean@k), for the runs that are finished."""
  results: dict[str, dict[int, dict[int, float]]] = {}
  for arm, seed in cells:
    folder = workdir(root, arm, seed)
    if not (folder / 'done').exists():
      continue
    curve = {}
    for line in (folder / 'metrics.jsonl').read_text().splitlines():
      values = json.loads(line)
      for key, value in values.items():
        if key.startswith('eval/') and '/mean@' in key and key.count('/') == 2:
          curve[values['step']] = value
    results.setdefault(arm.name, {})[seed] = curve
  return results


def table(results: Mapping[str, Mapping[int, Mapping[int, float]]]) -> str:
  """Markdown: held-out sampled accuracy, mean over seeds (lowest–highest), at fifths of the run and at its best."""
  steps = sorted({step for seeds in results.values() for curve in seeds.values() for step in curve})
  picked = [steps[round(i * (len(steps) - 1) / 5)] for i in range(6)]
  picked = sorted(set(picked))
  lines = [
    '| | ' + ' | '.join(f'step {step}' for step in picked) + ' | best | seeds |',
    '|---|' + '---|' * (len(picked) + 2),
  ]
  for name, seeds in results.items():
    cells = []
    for step in picked:
      values = [curve[step] for curve in seeds.values() if step in curve]
      spread = f' ({min(values):.0%}–{max(values):.0%})' if len(values) > 1 else ''
      cells.append(f'{np.mean(values):.0%}{spread}' if values else '–')
    best = np.mean([max(curve.values()) for curve in seeds.values()])
    lines.append(f'| {name} | ' + ' | '.join(cells) + f' | {best:.0%} | {len(seeds)} |')
  return '\n'.join(lines) + '\n'


def plot(results: Mapping[str, Mapping[int, Mapping[int, float]]], target: pathlib.Path) -> None:
  """Learning curves: mean over seeds, and the range between the lowest and the highest."""
  import matplotlib

  matplotlib.use('Agg')
  import matplotlib.pyplot as plt

  groups = [
    ('SDPO and GRPO', ['SDPO, frozen teacher', 'SDPO, frozen, no feedback', 'GRPO']),
    ('Teachers', ['SDPO, frozen teacher', 'SDPO, EMA 0.01', 'SDPO, EMA 0.05', 'SDPO, live teacher']),
  ]
  figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True, constrained_layout=True)
  for axis, (title, names) in zip(axes, groups, strict=True):
    for name in names:
      seeds = results.get(name, {})
      if not seeds:
        continue
      steps = sorted(set.intersection(*(set(curve) for curve in seeds.values())))
      values = np.array([[curve[step] for step in steps] for curve in seeds.values()])
      [line] = axis.plot(steps, values.mean(0), label=name, linewidth=2)
      axis.fill_between(steps, values.min(0), values.max(0), color=line.get_color(), alpha=0.18, linewidth=0)
    axis.set_title(title)
    axis.set_xlabel('generation batches')
    axis.set_ylim(0, 1)
    axis.yaxis.set_major_formatter(lambda value, _: f'{value:.0%}')
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, fontsize=9, loc='best')
  axes[0].set_ylabel('held-out accuracy, sampled')
  figure.savefig(target, dpi=140)


def main(_: Sequence[str]) -> None:
  output, root = pathlib.Path(OUTPUT.value), pathlib.Path(RUNS.value)
  known = [arm.name for arm in arms(LEARNING_RATES)]
  if set(ONLY.value) - set(known):
    raise SystemExit(
      f'--only={min(set(ONLY.value) - set(known))}: there is no such arm; there are: {"; ".join(known)}.'
    )
  chosen = [arm for arm in arms(LEARNING_RATES) if not ONLY.value or arm.name in ONLY.value]
  cells = [(arm, seed) for arm in chosen for seed in range(1 if arm.tuning else SEEDS.value)]
  start = time.monotonic()
  if not ONLY_PLOT.value:
    run_all(cells, root, STEPS.value, WORKERS.value)
  results = read(cells, root)
  if not results:
    raise SystemExit(f'There are no finished runs in {root}: run the study without --only_plot.')
  output.mkdir(parents=True, exist_ok=True)
  (output / 'results.json').write_text(json.dumps(results, indent=1) + '\n')
  (output / 'table.md').write_text(table(results))
  plot(results, output / 'curves.png')
  print(table(results))
  print(f'{output}/results.json, table.md, curves.png; {(time.monotonic() - start) / 60:.1f} minutes')


if __name__ == '__main__':
  app.run(main)
