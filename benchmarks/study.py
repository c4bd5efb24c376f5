"""Studies with the quickstarts: SDPO beside GRPO, LoRA beside full fine-tuning, cartridges, learning rates, over seeds.

  python -m benchmarks.study --output=docs/quickstart            # everything, under an hour on two cores
  python -m benchmarks.study --output=docs/quickstart --only_plot=true
  python -m benchmarks.study --study=lora                       # LoRA and what it is compared with
  python -m benchmarks.study --study=cartridge                  # objectives, sizes and beginnings of slots
  python -m benchmarks.study --study=answers                    # whose answers cartridges learn from
  python -m benchmarks.study --study=staleness                  # samples that carry over, over hours

Every cell is a run of `python -m launch.train`, or of a command that ends in it, through the same code as any other;
two run at a time, one core each. Writes results.json (every evaluation of every run), table.md and, for most studies,
curves.png to --output; finished runs are not repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
import time
from typing import Any

from absl import app, flags
import numpy as np
from scipy import stats

from benchmarks import paused_digits, ways
from sdpo_jax import extras
from sdpo_jax.environments import facts
from sdpo_jax.files import write_output

STUDY = flags.DEFINE_enum(
  'study',
  'quickstart',
  ['quickstart', 'lora', 'cartridge', 'answers', 'staleness'],
  'What is compared: methods and teachers, LoRA, cartridges, whose answers cartridges learn from, or for how many '
  'updates samples carry over.',
)
# A test may load another study beside this one.
OUTPUT = flags.DEFINE_string('output', None, 'Folder of the results; unset: docs/<study>.', allow_override=True)
RUNS = flags.DEFINE_string('runs', 'runs/study', 'Folder of the runs.')
SEEDS = flags.DEFINE_integer('seeds', 3, 'Seeds of every arm.')
STEPS = flags.DEFINE_integer('steps', 0, "Generation batches of every run; 0: the config's.")
ONLY = flags.DEFINE_multi_string('only', [], 'Name of an arm to run; may be repeated; unset: all.', allow_override=True)
ONLY_PLOT = flags.DEFINE_bool('only_plot', False, 'Do not run anything; draw what is there.')
WORKERS = flags.DEFINE_integer('workers', 2, 'Runs at a time, one core each.')

SD = 'actor.self_distillation.'
SDPO, GRPO, LORA = 'configs/quickstart.py', 'configs/quickstart_grpo.py', 'configs/quickstart_lora.py'
# Placeholders in the config or a setting of an arm: a document of the task per seed, and one about other things.
DOCUMENT, OTHER_DOCUMENT = '{document}', '{other_document}'
CARTRIDGE = f'configs/cartridge_quickstart.py:document={DOCUMENT}'
# The same for the task of `ways`: a document, its questions and the base model.
MAP, WAYS, WAYS_MODEL = '{map}', '{ways}', '{ways_model}'
PAUSED_MODEL = '{paused_model}'  # The base model of `paused_digits`.

Curve = Mapping[int, float]  # Step → value.
Results = Mapping[str, Mapping[str, Mapping[int, Curve]]]  # Name of a measure → name of an arm → seed.


@dataclasses.dataclass(frozen=True)
class Measure:
  """A metric of every evaluation."""

  name: str
  metric: str  # Pattern of the metric's name in metrics.jsonl.
  label: str  # Label of the figure's axis.
  share: bool = True  # The metric lies between 0 and 1 and is shown in per cent.
  digits: int = 3  # After the point, if it is no share.

  def written(self, value: float) -> str:
    return f'{value:.0%}' if self.share else f'{value:.{self.digits}f}'


@dataclasses.dataclass(frozen=True)
class Arm:
  """A line of the table: a config with settings."""

  name: str
  config: str
  settings: Mapping[str, Any]
  tuning: bool = False  # Run with one seed only.
  program: Sequence[str] = ('launch.train',)  # Module and its own arguments.


@dataclasses.dataclass(frozen=True)
class Column:
  """A column of the table."""

  title: str
  measure: Measure
  of: Callable[[Curve], float | None]  # Returns a run's value; None: it has none.
  spread: bool = True  # Show the spread of the seeds beside the mean.


@dataclasses.dataclass(frozen=True)
class Panel:
  """A panel of the figure: learning curves of a few arms."""

  title: str
  arms: Sequence[str]
  measure: Measure


@dataclasses.dataclass(frozen=True)
class Study:
  """A table and a figure with their arms."""

  arms: Sequence[Arm]
  panels: Sequence[Panel]  # Left to right; empty: no figure.
  measures: Sequence[Measure]
  columns: Sequence[Column] = ()  # Empty: the first measure at fifths of the run and at its best.
  interval: bool = False  # Show the 95 % t-interval of a mean, not the lowest and highest seed.


def _teacher(kind: str, rate: float = 0.0) -> dict[str, Any]:
  return {SD + 'teacher_regularization': kind, SD + 'teacher_update_rate': rate}


def _grid(method: str, config: str, rates: Sequence[float]) -> list[Arm]:
  return [Arm(f'{method}, lr {rate:g}', config, {'optimizer.lr': rate}, tuning=True) for rate in rates]


AROUND = (3e-4, 3e-3)  # Neighbours of the learning rate of `SDPO` and `GRPO`, 1e-3.
ACCURACY = Measure('accuracy', r'eval/[^/]+/mean@\d+', 'held-out accuracy, sampled')
AGE = Measure('staleness', 'rollout/staleness_mean', 'updates since the first token', share=False, digits=1)
OLDEST = Measure('oldest', 'rollout/staleness_max', 'updates since the first token', share=False, digits=0)
WORDS = Measure('words', r'eval/[^/]+/acc/mean@\d+', 'words right, sampled')
GREEDY = dataclasses.replace(ACCURACY, label='questions answered, greedily')
ON_STUDENT = Measure('kl_on_student', r'eval/[^/]+/kl_on_student', 'KL on student text, nats per token', share=False)
ON_TEACHER = Measure('kl_on_teacher', r'eval/[^/]+/kl_on_teacher', 'KL on teacher text, nats per token', share=False)


def _end(curve: Curve) -> float:
  return curve[max(curve)]


def _slots(name: str, settings: Mapping[str, Any], lr: float = 0.08, beta: float = 0.999, tuning: bool = False) -> Arm:
  """Return an arm of the cartridge study: the shipped config with these settings, 300 steps and larger evaluations."""
  brief = {
    'optimizer.lr': lr,
    'optimizer.betas': f'0.9,{beta}',
    'trainer.total_training_steps': 300,
    'val_kwargs.n': 4,  # Answers on which the divergence is measured, drawn at temperature 1.
    'val_kwargs.temperature': 0.0,
    'trainer.test_freq': 50,
    'trainer.test_divergence': True,
  }
  return Arm(name, CARTRIDGE, brief | dict(settings), tuning)


def _top(model: str, tail: bool) -> dict[str, Any]:
  return {SD + 'distillation_topk': 20, SD + 'distillation_topk_of': model, SD + 'distillation_add_tail': tail}


SLOTS = 'forward KL, on-policy, 16 slots'  # The baseline from which the other arms differ.
BY_TEACHER = {'rollout.sampled_by': 'teacher'}


def _answered(task: str, config: str, settings: Mapping[str, Any]) -> list[Arm]:
  """Return arms of a task that differ in whose answers they learn from, at equal numbers of answers."""
  brief = dict(settings) | {'trainer.test_divergence': True}
  return [
    Arm(f"{task}: student's answers", config, brief),
    Arm(f"{task}: teacher's answers", config, brief | BY_TEACHER),
    Arm(
      f"{task}: the same answers of the teacher's",
      config,
      brief | BY_TEACHER,
      tuning=True,
      program=('benchmarks.repeated_answers', '--answers=1'),
    ),
  ]


def _carried(loss: str, alpha: float) -> list[Arm]:
  """Return arms of a loss that differ in how many updates samples carry over, with and without importance weights."""
  given = {'model.path': PAUSED_MODEL, SD + 'alpha': alpha}
  weights = {'': None, ', weighed': 'token'}
  return [
    Arm(
      f'{loss}, {most}{name}',
      'benchmarks/paused_digits.py',
      given | {'rollout.max_staleness': most, 'algorithm.rollout_correction.rollout_is': rollout_is},
    )
    for most in (0, 1, 2, 4, 8)
    for name, rollout_is in list(weights.items())[: 2 if most else 1]
  ]


# 48 questions, answers of 3 words.
_FACTS = {
  'optimizer.lr': 0.08,
  'optimizer.betas': '0.9,0.999',
  'trainer.total_training_steps': 300,
  'trainer.test_freq': 300,
  'val_kwargs.n': 16,
}
# 45 questions, answers of 15 words.
_ASKED = ways.WAYS * ways.HOPS
_WAYS = {
  'model.path': WAYS_MODEL,
  'model.cartridge.tokens': 8,
  'data.train_files': WAYS,
  'data.val_files': WAYS,
  'data.val_max_samples': _ASKED,
  'data.train_batch_size': _ASKED,
  'actor.ppo_mini_batch_size': _ASKED,
  'actor.ppo_micro_batch_size': _ASKED,
  'data.max_response_length': ways.HOPS,
  'data.response_buckets': ways.HOPS,
  'optimizer.lr': 0.1,
  'trainer.total_training_steps': 200,
  'trainer.test_freq': 100,
  'val_kwargs.n': 4,
}

STUDIES = {
  'quickstart': Study(
    arms=(
      Arm('SDPO, frozen teacher', SDPO, _teacher('frozen')),  # The quickstart.
      Arm('GRPO', GRPO, {}),
      Arm('SDPO, EMA 0.05', SDPO, _teacher('ema', 0.05)),
      Arm('SDPO, EMA 0.01', SDPO, _teacher('ema', 0.01)),
      Arm('SDPO, live teacher', SDPO, _teacher('live')),
      Arm('SDPO, frozen, no feedback', SDPO, _teacher('frozen') | {SD + 'include_environment_feedback': False}),
      *_grid('SDPO', SDPO, AROUND),
      *_grid('GRPO', GRPO, AROUND),
    ),
    panels=(
      Panel('SDPO and GRPO', ('SDPO, frozen teacher', 'SDPO, frozen, no feedback', 'GRPO'), ACCURACY),
      Panel('Teachers', ('SDPO, frozen teacher', 'SDPO, EMA 0.01', 'SDPO, EMA 0.05', 'SDPO, live teacher'), ACCURACY),
    ),
    measures=(ACCURACY,),
  ),
  'lora': Study(
    arms=(
      Arm('full fine-tuning', SDPO, {}),
      Arm('LoRA', LORA, {}),
      Arm('LoRA, EMA 0.01', LORA, _teacher('lora_ema', 0.01), tuning=True),
      Arm('LoRA, EMA 0.05', LORA, _teacher('lora_ema', 0.05), tuning=True),
      Arm('LoRA, rank 16', LORA, {'model.lora.rank': 16}, tuning=True),
      Arm('LoRA, rank 16, lr 0.003', LORA, {'model.lora.rank': 16, 'optimizer.lr': 3e-3}, tuning=True),
      Arm('LoRA, GRPO', LORA, {'actor.policy_loss.loss_mode': 'vanilla'}, tuning=True),
    ),
    panels=(
      Panel('LoRA and full fine-tuning', ('full fine-tuning', 'LoRA'), ACCURACY),
      Panel('Teachers, GRPO', ('LoRA', 'LoRA, EMA 0.01', 'LoRA, EMA 0.05', 'LoRA, GRPO'), ACCURACY),
    ),
    measures=(ACCURACY,),
  ),
  'cartridge': Study(
    arms=(
      _slots(SLOTS, {}),
      _slots('off-policy', {'rollout.sampled_by': 'teacher'}),
      _slots('reverse KL', {SD + 'alpha': 1.0}),
      _slots('JSD(½)', {SD + 'alpha': 0.5}),
      _slots("teacher's top 20", _top('teacher', tail=False)),
      _slots("teacher's top 20 and tail", _top('teacher', tail=True)),
      _slots("student's top 20", _top('student', tail=False)),
      _slots("student's top 20 and tail", _top('student', tail=True)),
      _slots('8 slots', {'model.cartridge.tokens': 8}),
      _slots('8 slots, off-policy', {'model.cartridge.tokens': 8, 'rollout.sampled_by': 'teacher'}),
      _slots('32 slots', {'model.cartridge.tokens': 32}),
      _slots('random slots', {'model.cartridge.initializer': 'random'}),
      _slots(
        'slots of another document',
        {'model.cartridge.initializer': 'text', 'model.cartridge.init_text': OTHER_DOCUMENT},
      ),
      _slots('no frozen slot', {'model.cartridge.num_frozen_tokens': 0}),
      _slots('lr 0.02', {}, lr=0.02),
      _slots('reverse KL, lr 0.2, β₂ 0.99', {SD + 'alpha': 1.0}, lr=0.2, beta=0.99, tuning=True),
      _slots('JSD(½), lr 0.2, β₂ 0.99', {SD + 'alpha': 0.5}, lr=0.2, beta=0.99, tuning=True),
      *(_slots(f'lr {lr}', {}, lr, tuning=True) for lr in (0.05, 0.1, 0.2)),
    ),
    panels=(
      Panel(
        'Objectives', (SLOTS, "teacher's top 20 and tail", "student's top 20 and tail", 'reverse KL', 'JSD(½)'), GREEDY
      ),
      Panel(
        'Slots',
        (
          SLOTS,
          '8 slots',
          '32 slots',
          'slots of another document',
          'random slots',
          'no frozen slot',
        ),
        GREEDY,
      ),
      Panel('Whose answers', (SLOTS, 'off-policy', '8 slots', '8 slots, off-policy'), ON_STUDENT),
    ),
    measures=(GREEDY, ON_STUDENT, ON_TEACHER),
    columns=(
      Column('right, step 100', GREEDY, lambda curve: curve.get(100)),
      Column('right, end', GREEDY, _end),
      Column('KL on student text, end', ON_STUDENT, _end),
      Column('KL on teacher text, end', ON_TEACHER, _end, spread=False),
    ),
  ),
  'answers': Study(
    arms=(
      *_answered('facts', CARTRIDGE, _FACTS),
      *_answered('ways', f'configs/cartridge_quickstart.py:document={MAP}', _WAYS)[:2],
    ),
    panels=(),
    measures=(ACCURACY, WORDS, ON_STUDENT, ON_TEACHER),
    columns=(
      Column('answers right', ACCURACY, _end),
      Column('words right', WORDS, _end),
      Column('KL on student text', ON_STUDENT, _end),
      Column('KL on teacher text', ON_TEACHER, _end),
    ),
    interval=True,
  ),
  'staleness': Study(
    arms=(*_carried('JSD(½)', 0.5), *_carried('forward KL', 0.0), *_carried('reverse KL', 1.0)),
    panels=(),
    measures=(ACCURACY, AGE, OLDEST),
    columns=(
      Column('right, step 100', ACCURACY, lambda curve: curve.get(100)),
      Column('right, end', ACCURACY, _end),
      Column('staleness, mean', AGE, lambda curve: float(np.mean(list(curve.values()))), spread=False),
      Column('largest', OLDEST, lambda curve: max(curve.values()), spread=False),
    ),
  ),
}


def workdir(root: pathlib.Path, arm: Arm, seed: int) -> pathlib.Path:
  return root / ''.join(c if c.isalnum() or c in '.-' else '_' for c in arm.name) / str(seed)


def document_files(root: pathlib.Path, seed: int) -> dict[str, pathlib.Path]:
  """Return the files of a seed by their placeholders; the first document is the shipped one."""
  folder = root / 'documents'
  return {
    DOCUMENT: folder / f'{seed}.txt',
    OTHER_DOCUMENT: folder / f'other_{seed}.txt',
    MAP: folder / f'map_{seed}.txt',
    WAYS: folder / f'ways_{seed}.jsonl',
    WAYS_MODEL: root / 'ways_model',
    PAUSED_MODEL: root / 'paused_model',
  }


def make_documents(root: pathlib.Path, seed: int) -> None:
  """Write a seed's files but the model; repeated calls write the same.

  The documents with facts are such as `launch.make_base --task=document` writes.
  """
  (root / 'documents').mkdir(parents=True, exist_ok=True)
  files = document_files(root, seed)
  for mark, numbers in ((DOCUMENT, seed), (OTHER_DOCUMENT, 1000 + seed)):
    write_output(files[mark], facts.write(facts.draw(np.random.default_rng(numbers))))
  task = ways.draw(np.random.default_rng([seed, 7]))
  write_output(files[MAP], ways.write(task.map))
  write_output(files[WAYS], ways.rows(task))


def command(arm: Arm, seed: int, root: pathlib.Path, steps: int) -> list[str]:
  """Return the command line of a run."""
  settings = {'seed': seed, 'trainer.rollout_save_freq': 0, 'trainer.save_freq': 0, 'trainer.tensorboard': False}
  settings |= dict(arm.settings)
  if steps:
    settings['trainer.total_training_steps'] = steps
  line = [f'--config={arm.config}', *(f'--config.{name}={value}' for name, value in settings.items())]
  for mark, file in document_files(root, seed).items():
    line = [part.replace(mark, str(file)) for part in line]
  return [sys.executable, '-m', *arm.program, f'--workdir={workdir(root, arm, seed)}', *line]


def execute(arm: Arm, seed: int, root: pathlib.Path, steps: int, core: int) -> str:
  """Run one cell on one core; return a line about it."""
  folder = workdir(root, arm, seed)
  if (folder / 'done').exists():
    return f'{arm.name}, seed {seed}: there already'
  if DOCUMENT in arm.config or MAP in arm.config:
    make_documents(root, seed)
  start = time.monotonic()
  available = sorted(os.sched_getaffinity(0))
  done = subprocess.run(
    command(arm, seed, root, steps),
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
  """Run all cells, `workers` at a time, each worker on its own core."""

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


def read(cells: Sequence[tuple[Arm, int]], root: pathlib.Path, measures: Sequence[Measure]) -> Results:
  """Return the measurements of the finished runs."""
  results: dict[str, dict[str, dict[int, Curve]]] = {measure.name: {} for measure in measures}
  for arm, seed in cells:
    folder = workdir(root, arm, seed)
    if not (folder / 'done').exists():
      continue
    lines = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
    for measure in measures:
      curve = {
        values['step']: value for values in lines for key, value in values.items() if re.fullmatch(measure.metric, key)
      }
      results[measure.name].setdefault(arm.name, {})[seed] = curve
  return results


def fifths(results: Results, measure: Measure) -> list[Column]:
  """Return the columns of a measure at fifths of the longest run and at its best."""
  steps = sorted({step for seeds in results[measure.name].values() for curve in seeds.values() for step in curve})
  picked = sorted({steps[round(i * (len(steps) - 1) / 5)] for i in range(6)})
  columns = [Column(f'step {step}', measure, lambda curve, step=step: curve.get(step)) for step in picked]
  return [*columns, Column('best', measure, lambda curve: max(curve.values()), spread=False)]


def half_width(values: Sequence[float]) -> float:
  """Return half the width of the 95 % t-interval of the mean of at least two values."""
  return float(stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5)


def table(results: Results, columns: Sequence[Column], interval: bool = False) -> str:
  """Return a Markdown table: a line per arm, with means over the seeds (lowest–highest), or with their intervals."""
  lines = [
    '| | ' + ' | '.join(column.title for column in columns) + ' | seeds |',
    '|---|' + '---|' * (len(columns) + 1),
  ]
  arms = results[columns[0].measure.name]
  for name, seeds in arms.items():
    cells = []
    for column in columns:
      curves = results[column.measure.name][name].values()
      values = [value for curve in curves if curve and (value := column.of(curve)) is not None]
      written = column.measure.written
      spread = ''
      if column.spread and len(values) > 1:
        spread = (
          f' ± {written(half_width(values))}' if interval else f' ({written(min(values))}–{written(max(values))})'
        )
      cells.append(f'{written(float(np.mean(values)))}{spread}' if values else '–')
    lines.append(f'| {name} | ' + ' | '.join(cells) + f' | {len(seeds)} |')
  return '\n'.join(lines) + '\n'


def plot(results: Results, panels: Sequence[Panel], target: pathlib.Path) -> None:
  """Plot learning curves: mean over seeds, and range from lowest to highest."""
  plt = extras.pyplot()

  figure, axes = plt.subplots(1, len(panels), figsize=(5 * len(panels), 3.8), constrained_layout=True)
  before = None  # The panel to the left.
  for axis, panel in zip(axes, panels, strict=True):
    measure = panel.measure
    for name in panel.arms:
      seeds = results[measure.name].get(name, {})
      if not seeds:
        continue
      steps = sorted(set.intersection(*(set(curve) for curve in seeds.values())))
      values = np.array([[curve[step] for step in steps] for curve in seeds.values()])
      [line] = axis.plot(steps, values.mean(0), label=name, linewidth=2)
      axis.fill_between(steps, values.min(0), values.max(0), color=line.get_color(), alpha=0.18, linewidth=0)
    axis.set_title(panel.title)
    axis.set_xlabel('generation batches')
    if measure.share:
      axis.set_ylim(0, 1)
      axis.yaxis.set_major_formatter(lambda value, _: f'{value:.0%}')
    else:
      axis.set_yscale('log')
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, fontsize=9, loc='best')
    if before is None or before.measure != measure:
      axis.set_ylabel(measure.label)
    else:
      axis.tick_params(labelleft=False)
    before = panel
  figure.savefig(target, dpi=140)


def main(_: Sequence[str]) -> None:
  output, root = pathlib.Path(OUTPUT.value or f'docs/{STUDY.value}'), pathlib.Path(RUNS.value)
  study = STUDIES[STUDY.value]
  known = [arm.name for arm in study.arms]
  if set(ONLY.value) - set(known):
    raise SystemExit(
      f'--only={min(set(ONLY.value) - set(known))}: there is no such arm; there are: {"; ".join(known)}.'
    )
  chosen = [arm for arm in study.arms if not ONLY.value or arm.name in ONLY.value]
  # Seed by seed, so that partial results give a table of fewer seeds.
  cells = [(arm, seed) for seed in range(SEEDS.value) for arm in chosen if not (arm.tuning and seed)]
  start = time.monotonic()
  if not ONLY_PLOT.value:
    for mark, make in ((WAYS_MODEL, ways.make_base), (PAUSED_MODEL, paused_digits.make_model)):
      model = document_files(root, 0)[mark]
      if any(mark in map(str, arm.settings.values()) for arm in chosen) and not model.exists():
        make(model, announce=lambda text: print(text, file=sys.stderr, flush=True))
    run_all(cells, root, STEPS.value, WORKERS.value)
  results = read(cells, root, study.measures)
  if not any(results.values()):
    raise SystemExit(f'There are no finished runs in {root}: run the study without --only_plot.')
  output.mkdir(parents=True, exist_ok=True)
  (output / 'results.json').write_text(json.dumps(results, indent=1) + '\n')
  shown = table(results, study.columns or fifths(results, study.measures[0]), study.interval)
  (output / 'table.md').write_text(shown)
  if study.panels:
    plot(results, study.panels, output / 'curves.png')
  print(shown)
  written = 'results.json, table.md' + (', curves.png' if study.panels else '')
  print(f'{output}/{written}; {(time.monotonic() - start) / 60:.1f} minutes')


if __name__ == '__main__':
  app.run(main)
