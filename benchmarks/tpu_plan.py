"""The shipped configs on v5e slices, asked of the TPU compiler: memory, time and communication by size and by model.

  python -m benchmarks.tpu_plan --keep=answers                  # every point: more than an hour on two cores
  python -m benchmarks.tpu_plan --keep=answers --only=v5e:8x8   # one point again
  python -m benchmarks.tpu_plan --only_write=true               # write the pages from what is there

No TPU is needed and nothing is measured: these are the compiler's estimates and arithmetic (docs/performance.md says
which is which). Writes results.json (every number of every point) and scaling.png to --output, and the blocks between
markers of the pages beside it, docs/performance.md and docs/tpu.md. With --keep=DIR the compiler is asked of each program
once: an interrupted run goes on where it stopped, and other lengths or prices cost seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import importlib
import json
import math
import pathlib
import sys
from typing import Any

from absl import app, flags

from sdpo_jax.config import Config
from sdpo_jax.config.fields import flatten
from sdpo_jax.planner import model, report, search, topology
from sdpo_jax.planner import plan as planning
from sdpo_jax.tables import markdown

OUTPUT = flags.DEFINE_string('output', 'docs/performance', 'Folder of the results.')
ONLY = flags.DEFINE_multi_string('only', [], 'Name of a point; may be repeated; unset: all.')
ONLY_WRITE = flags.DEFINE_bool('only_write', False, 'Compile nothing; draw and write what is there.')
KEEP = flags.DEFINE_string('keep', None, 'Folder that keeps what the compiler answers.')

BEGIN, END = '<!-- made by benchmarks.tpu_plan: -->', '<!-- end -->'
MAIN = 'v5e:8x8'


@dataclasses.dataclass(frozen=True)
class Point:
  """One slice and one shipped config, as it is but for the settings named."""

  name: str
  slice_: str
  config: str = 'qwen3_8b_chemistry'
  settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  arguments: Mapping[str, str] = dataclasses.field(default_factory=dict)  # Of its get_config.


POINTS = (
  Point(MAIN, MAIN),
  Point('v5e:4x4', 'v5e:4x4'),
  Point('v5e:16x16', 'v5e:16x16'),
  Point('v5e:8x8 (long completions)', MAIN, settings={'plan.mean_completion': 4096.0}),
  Point('v5e:8x8 (packed rows)', MAIN, settings={'actor.pack_sequences': True}),
  Point('v5e:8x8 (LiveCodeBench)', MAIN, config='qwen3_8b_livecodebench'),
)
# The same recipe with a model of every other family.
MODEL_POINTS = (
  Point('Olmo-3-7B', MAIN, config='paper', arguments={'model': 'olmo3_7b'}),
  *(
    Point(name, slice_, config='models', arguments={'model': model})
    for name, slice_, model in (
      ('Llama-3.1-8B', MAIN, 'llama3_1_8b'),
      ('Qwen2.5-7B', MAIN, 'qwen2_5_7b'),
      ('Mistral-7B', MAIN, 'mistral_7b'),
      ('Gemma-3-4B', 'v5e:4x8', 'gemma3_4b'),
    )
  ),
)


def configuration(point: Point) -> Config:
  """Return the point's settings."""
  config = importlib.import_module(f'configs.{point.config}').get_config(**point.arguments)
  return search.changed(config, dict(point.settings))


def stated(point: Point) -> dict[str, Any]:
  """Return the settings that the pages quote, by dotted name; results hold them, so that a change of them shows."""
  flat = flatten(configuration(point))
  return {name: flat[name] for name in QUOTED}


# Of the settings those that decide what is compiled and how often it runs.
QUOTED = (
  'model.path',
  'data.train_batch_size',
  'data.max_prompt_length',
  'data.max_response_length',
  'data.prompt_buckets',
  'data.response_buckets',
  'data.reprompt_buckets',
  'actor.self_distillation.max_reprompt_len',
  'actor.ppo_mini_batch_size',
  'actor.ppo_micro_batch_size',
  'actor.pack_sequences',
  'rollout.n',
  'rollout.max_batch_rows',
  'rollout.cache_dtype',
  'val_kwargs.n',
  'trainer.test_freq',
  'plan.mean_prompt',
  'plan.mean_completion',
  'plan.mean_reprompt',
  'plan.evaluation_questions',
)


def compute(point: Point, keep: str | None = None) -> dict[str, Any]:
  """Return the plan of a point as plain values, and its report."""
  config, slice_ = configuration(point), topology.describe(point.slice_)
  policy, source = model.read(config)
  assumptions = planning.Assumptions.of(config, slice_.chip)

  def announce(text):
    print(text, file=sys.stderr, flush=True)

  announce(f'{point.name}:')
  plan = planning.make(config, policy, slice_, assumptions, source=source, keep=keep, announce=announce)
  numbers = plan.to_json()
  for program in numbers['programs'].values():
    # What took the compiler this long says nothing of the programs.
    del program['compile_seconds']
  return numbers | {'settings': stated(point), 'report': report.text(plan)}


def _cell(value: float | None, digits: int = 3) -> str:
  if value is None:
    return '?'
  return f'{value:,.0f}' if abs(value) >= 1000 else f'{value:.{digits}g}'


def _refused(program: dict[str, Any]) -> bool:
  return program.get('error') is not None


def tables(results: dict[str, dict[str, Any]]) -> str:
  """Markdown: the settings, how everything grows with chips and tokens, other models, and the main point's report."""
  sizes = {name: plan for name, plan in results.items() if name in {point.name for point in POINTS}}
  models = {name: plan for name, plan in results.items() if name not in sizes}
  parts = []
  if MAIN in sizes:
    quoted = ', '.join(f'`{name}={_value(value)}`' for name, value in sizes[MAIN]['settings'].items())
    parts.append(f'`configs/{POINTS[0].config}.py` has {quoted}.')
  if sizes:
    table = markdown(['slice', *HEAD], [[name, *_row(plan)] for name, plan in sizes.items()])
    parts += ['### Growth with chips and tokens', table, '![Growth](performance/scaling.png)']
  if models:
    rows = [
      [name, f'{plan["parameters"] / 1e9:.2f}', plan['topology'], _mesh(plan), *_row(plan)]
      for name, plan in models.items()
    ]
    told = 'The same recipe (chemistry) with a model of every other family, as `configs/paper.py` and `configs/models.py` have it.'
    told += ' Layers with a window are counted as if they saw all positions: for Olmo 3 and Gemma 3 these times are upper bounds.'
    parts += ['### Other models', told, markdown(['model', 'billion parameters', 'slice', 'mesh', *HEAD], rows)]
  warnings = {warning: name for name, plan in results.items() for warning in plan['warnings']}
  parts += [f'{name}: {warning}' for warning, name in warnings.items()]
  refused = {
    name: [label for label, each in plan['programs'].items() if _refused(each)] for name, plan in results.items()
  }
  parts += [
    f'{name}: does not fit; the compiler refuses {", ".join(f"`{label}`" for label in labels)} for want of memory.'
    for name, labels in refused.items()
    if labels
  ]
  if MAIN in sizes:
    parts += [f'### Qwen3-8B on {MAIN}, program by program', sizes[MAIN]['report']]
  return '\n\n'.join(parts)


HEAD = ('chips', 'tokens per completion', 'update GiB', 'largest update s', 'TFLOP per chip', 'sent GB', 'rows live %')
HEAD += ('tokens live %', 'update MFU %', 'decode GiB', 'ms per token', 'evaluation s', 'step s', 'tokens/s')
HEAD += ('$ / 100 steps',)


def _row(plan: dict[str, Any]) -> list[str]:
  """Return the cells of a plan under `HEAD`."""
  update, decode = plan['programs'].get('update', {}), plan['programs'].get('decode', {})
  sent = None if _refused(update) else sum(update.get('collective_gb', {}).values())
  step = decode.get('busy_step_seconds')
  values = [None if _refused(update) else update.get(key) for key in ('seconds', 'matmul_tflop')] + [sent]
  shares = [plan['fill']['rows'], plan['fill']['tokens'], plan['update_mfu']]
  return (
    [str(plan['chips']), _cell(plan['assumptions']['mean_completion']), _cell(update.get('hbm_gib'))]
    + [_cell(value) for value in values]
    + [_cell(None if share is None else 100 * share) for share in shares]
    + [_cell(decode.get('hbm_gib')), _cell(None if step is None else 1e3 * step)]
    + [_cell(plan['phases'].get('evaluation')), _cell(plan['step_seconds'])]
    + [_cell(plan['tokens_per_second']), _cell(plan['cost_per_100_steps'], 4)]
  )


def _mesh(plan: dict[str, Any]) -> str:
  return ' × '.join(f'{axis}={size}' for axis, size in plan['mesh'].items())


def _value(value: Any) -> str:
  return ','.join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def cost(plan: dict[str, Any]) -> str:
  """Return the sentence of docs/tpu.md about what 100 steps of the main point cost."""
  hours = 100 * plan['step_seconds'] / 3600
  return (
    f'{plan["chips"]} chips for 100 steps of {plan["step_seconds"]:.0f} s (an estimate, evaluation included) are '
    f'{plan["chips"]} × {hours:.2f} h = {plan["device_hours_per_100_steps"]:.0f} chip-hours; at '
    f'{plan["assumptions"]["price"]:.2f} dollars, {plan["cost_per_100_steps"]:.0f} dollars on demand.'
  )


def pages(results: dict[str, dict[str, Any]]) -> dict[str, str]:
  """Return what stands between the markers of each page beside the results."""
  missing = [point.name for point in (*POINTS, *MODEL_POINTS) if point.name not in results]
  # Nobody should take a page with gaps for a whole one.
  gaps = (
    f'Not planned yet: {", ".join(missing)}; `python -m benchmarks.tpu_plan --keep=DIR` does it.' if missing else ''
  )
  text = '\n\n'.join(part for part in (gaps, tables(results) if results else '') if part)
  return {'performance.md': text, 'tpu.md': cost(results[MAIN]) if MAIN in results else gaps}


def draw(results: dict[str, dict[str, Any]], file: pathlib.Path) -> None:
  """Draw the time of a step by phase, and memory and bytes sent, over the points."""
  import matplotlib

  matplotlib.use('Agg')
  from matplotlib import pyplot

  names = [
    name.replace(' (', '\n(').replace(' ', '\n') + ('' if plan['fits'] else '\n(does not fit)')
    for name, plan in results.items()
  ]
  figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout='constrained')
  bottom = [0.0] * len(names)
  for phase in dict.fromkeys(phase for plan in results.values() for phase in plan['phases']):
    # Of a plan that does not fit only some phases have an estimate: their sum would look like a step.
    heights = [plan['phases'].get(phase) or 0.0 if plan['fits'] else 0.0 for plan in results.values()]
    left.bar(names, heights, bottom=bottom, label=phase)
    bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
  left.set_ylabel('s per step (estimate)')
  left.legend(fontsize='small')
  for label, marker in (('update', 'o'), ('decode', 's')):
    right.plot(
      names,
      [plan['programs'][label]['hbm_gib'] or math.nan for plan in results.values()],
      marker,
      label=f'{label}, GiB',
    )
  sent = [sum(plan['programs']['update']['collective_gb'].values()) for plan in results.values()]
  right.plot(names, sent, '^', label='update sends, GB per chip')
  right.set_ylim(bottom=0)
  right.legend(fontsize='small')
  for axis in (left, right):
    axis.tick_params(axis='x', labelsize='small')
  figure.savefig(file, dpi=120)
  pyplot.close(figure)


def insert(page: str, text: str, begin: str = BEGIN) -> str:
  """The page with `text` between the marker `begin` and the end after it.

  Raises:
    ValueError: it has none.
  """
  before, found, rest = page.partition(begin)
  _, end, after = rest.partition(END)
  if not found or not end:
    raise ValueError(f'The page holds no {begin} … {END}.')
  return f'{before}{begin}\n\n{text}\n\n{END}{after}'


def main(arguments: Sequence[str]) -> None:
  del arguments
  topology.compile_only()
  folder = pathlib.Path(OUTPUT.value)
  folder.mkdir(parents=True, exist_ok=True)
  file = folder / 'results.json'
  results = json.loads(file.read_text()) if file.is_file() else {}
  points = (*POINTS, *MODEL_POINTS)
  wanted = ONLY.value or [point.name for point in points]
  for point in points:
    if point.name in wanted and not ONLY_WRITE.value:
      results[point.name] = compute(point, KEEP.value)
      results = {each.name: results[each.name] for each in points if each.name in results}
      file.write_text(json.dumps(results, indent=1) + '\n')
  if sizes := {point.name: results[point.name] for point in POINTS if point.name in results}:
    draw(sizes, folder / 'scaling.png')
  for name, text in pages(results).items():
    page = folder.parent / name
    if page.is_file():
      page.write_text(insert(page.read_text(encoding='utf-8'), text), encoding='utf-8')
    else:
      (folder / name).write_text(text + '\n', encoding='utf-8')


if __name__ == '__main__':
  app.run(main)
