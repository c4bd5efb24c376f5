"""The shipped configs on v5e slices, by the TPU compiler: memory, time and communication by size and by model.

  python -m benchmarks.tpu_plan --keep=answers                  # every point: more than an hour on two cores
  python -m benchmarks.tpu_plan --keep=answers --only=v5e:8x8   # one point again
  python -m benchmarks.tpu_plan --only_write=true               # write the pages from what is there

No TPU is needed and nothing is measured: these are the compiler's estimates and arithmetic (docs/performance.md says
which is which). Writes results.json (every number of every point) and scaling.png to --output, and the blocks between
markers in docs/performance.md and docs/tpu.md. With --keep=DIR each program is compiled only once: an interrupted run
resumes where it stopped, and other lengths or prices take seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import importlib
import json
import math
import pathlib
import re
import sys
from typing import Any

from absl import app, flags

from sdpo_jax import extras
from sdpo_jax.config import Config
from sdpo_jax.config.fields import flatten
from sdpo_jax.models import parameters
from sdpo_jax.planner import model, plan_text, search, topology
from sdpo_jax.planner import plan as planning
from sdpo_jax.preflight import memory
from sdpo_jax.tables import markdown
from sdpo_jax.training import opening

# A test may load another study beside this one.
OUTPUT = flags.DEFINE_string('output', 'docs/performance', 'Folder of the results.', allow_override=True)
ONLY = flags.DEFINE_multi_string('only', [], 'Name of a point; may be repeated; unset: all.', allow_override=True)
ONLY_WRITE = flags.DEFINE_bool('only_write', False, 'Compile nothing; draw and write what is there.')
KEEP = flags.DEFINE_string('keep', None, 'Folder that keeps what the compiler answers.')

BEGIN, END = '<!-- made by benchmarks.tpu_plan: -->', '<!-- end -->'
MAIN = 'v5e:8x8'


@dataclasses.dataclass(frozen=True)
class Point:
  """A slice and a shipped config with changed settings."""

  name: str
  slice_: str
  config: str = 'qwen3_8b_chemistry'
  settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  arguments: Mapping[str, str] = dataclasses.field(default_factory=dict)  # Arguments of its get_config.
  only: Sequence[str] = ()  # Labels of the programs to plan, at their largest bucket; empty: all that a run would use.


MAIN_ROWS = f'{MAIN} (one sample per row)'
POINTS = (
  Point(MAIN, MAIN),
  *(Point(f'{MAIN} (max_staleness={most})', MAIN, settings={'rollout.max_staleness': most}) for most in (2, 4, 8)),
  Point(MAIN_ROWS, MAIN, settings={'actor.pack_sequences': False}),
  Point('v5e:4x4', 'v5e:4x4'),
  Point('v5e:16x16', 'v5e:16x16'),
  Point('v5e:8x8 (long completions)', MAIN, settings={'plan.mean_completion': 4096.0}),
  Point(
    'v5e:8x8 (long completions, max_staleness=2)',
    MAIN,
    settings={'plan.mean_completion': 4096.0, 'rollout.max_staleness': 2},
  ),
  Point('v5e:8x8 (LiveCodeBench)', MAIN, config='qwen3_8b_livecodebench'),
  Point(
    'v5e:8x8 (LiveCodeBench, max_staleness=2)',
    MAIN,
    config='qwen3_8b_livecodebench',
    settings={'rollout.max_staleness': 2},
  ),
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
# An adapter beside a frozen model: each model on its smallest slice, then by the number of rows decoded at once, then
# on the slice on which all parameters are trained.
_UPDATE, _SAMPLER = ('update',), ('prepare', 'prefill', 'decode')
_SMALL = ('zero', 'apply', 'finish', 'digest', 'empty', 'admit', 'compact')
LORA = 'v5e:2x4'
LORA_MODELS = tuple(
  Point(
    f'{name} with LoRA',
    slice_,
    config='lora',
    arguments={'model': model},
    only=_UPDATE + _SAMPLER + (_SMALL if model == 'qwen3_8b' else ()),
  )
  for name, slice_, model in (
    ('Qwen3-8B', LORA, 'qwen3_8b'),
    ('Qwen3-4B', 'v5e:2x2', 'qwen3_4b'),
    ('Qwen2.5-7B', 'v5e:2x2', 'qwen2_5_7b'),
    ('Qwen2.5-3B', 'v5e:2x2', 'qwen2_5_3b'),
    ('Llama-3.1-8B', 'v5e:2x2', 'llama3_1_8b'),
    ('Llama-3.2-3B', 'v5e:2x2', 'llama3_2_3b'),
    ('Mistral-7B', 'v5e:2x2', 'mistral_7b'),
    ('Olmo-3-7B', LORA, 'olmo3_7b'),
    ('Gemma-3-4B', 'v5e:2x2', 'gemma3_4b'),
  )
)
LORA_SLOTS = tuple(
  Point(
    f'Qwen3-8B with LoRA, {slots} slots',
    LORA,
    config='lora',
    settings={'rollout.max_batch_rows': slots},
    arguments={'model': 'qwen3_8b'},
    only=_SAMPLER,
  )
  for slots in (8, 16, 32, 64)
)
LORA_MAIN = Point(f'Qwen3-8B with LoRA on {MAIN}', MAIN, config='lora', arguments={'model': 'qwen3_8b'}, only=_UPDATE)
LORA_POINTS = (*LORA_MODELS, *LORA_SLOTS, LORA_MAIN)
EVERY = (*POINTS, *MODEL_POINTS, *LORA_POINTS)


def configuration(point: Point) -> Config:
  """Return the point's settings."""
  config = importlib.import_module(f'configs.{point.config}').get_config(**point.arguments)
  return search.changed(config, dict(point.settings))


def stated(point: Point) -> dict[str, Any]:
  """Return the settings that the pages quote, by dotted name; they are stored in results, so that changes show."""
  config = configuration(point)
  flat = flatten(config)
  names = QUOTED if config.model.lora.rank is None else (*QUOTED, *QUOTED_OF_ADAPTERS)
  return {name: flat[name] for name in names}


# Settings that decide what is compiled and how often it runs.
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
QUOTED_OF_ADAPTERS = ('model.lora.rank', 'model.lora.alpha', 'model.lora.target_modules', 'optimizer.lr')


def compute(point: Point, keep: str | None = None) -> dict[str, Any]:
  """Return the plan of a point as plain values, and its report."""
  config, slice_ = configuration(point), topology.describe(point.slice_)
  policy, source = model.read(config)
  assumptions = planning.Assumptions.of(config, slice_.chip)

  def announce(text):
    print(text, file=sys.stderr, flush=True)

  announce(f'{point.name}:')
  plan = planning.make(
    config, policy, slice_, assumptions, source=source, only=point.only or None, keep=keep, announce=announce
  )
  numbers = plan.to_json()
  for program in numbers['programs'].values():
    # Compile time is not a property of the programs.
    del program['compile_seconds']
  return numbers | {'settings': stated(point), 'report': plan_text.text(plan)}


def arithmetic(point: Point) -> dict[str, Any]:
  """Return the numbers that follow from a point's shapes alone, as plain values; compiles nothing."""
  config, slice_ = configuration(point), topology.describe(point.slice_)
  policy, _ = model.read(config)
  mesh = opening.model_mesh(config, policy, slice_.devices)
  held = memory.estimate(config, policy.on(mesh, config.model.attention), mesh)
  table = policy.parameter_table()
  always = sum(held.held.values())
  return {
    'topology': slice_.name,
    'mesh': dict(mesh.shape),
    'parameters': parameters.count(table),
    'trained': parameters.count(parameters.trainable(table)),
    'settings': stated(point),
    'least_gib': {
      'update': (always + sum(held.update.values())) / memory.GIB,
      'decode': (always + sum(held.sampling.values())) / memory.GIB,
    },
  }


def _cell(value: float | None, digits: int = 3) -> str:
  if value is None:
    return '?'
  return f'{value:,.0f}' if abs(value) >= 1000 else f'{value:.{digits}g}'


def _refused(program: dict[str, Any]) -> bool:
  return program.get('error') is not None


def tables(results: dict[str, dict[str, Any]]) -> str:
  """Return Markdown: the settings, scaling with chips and tokens, other models, and the main point's report."""
  sizes = {name: plan for name, plan in results.items() if name in {point.name for point in POINTS}}
  models = {name: plan for name, plan in results.items() if name in {point.name for point in MODEL_POINTS}}
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
    told = (
      'The same recipe (chemistry) with a model of every other family, as `configs/paper.py` and `configs/models.py` '
      'have it. Layers with a window are counted as if they saw all positions: for Olmo 3 and Gemma 3 these times are '
      'upper bounds.'
    )
    parts += ['### Other models', told, markdown(['model', 'billion parameters', 'slice', 'mesh', *HEAD], rows)]
  parts += adapters(results)
  warnings = {warning: name for name, plan in results.items() for warning in plan.get('warnings', ())}
  parts += [f'{name}: {warning}' for warning, name in warnings.items()]
  refused = {
    name: [label for label, each in plan.get('programs', {}).items() if _refused(each)]
    for name, plan in results.items()
  }
  parts += [
    f'{name}: does not fit; the compiler refuses {", ".join(f"`{label}`" for label in labels)} for want of memory.'
    for name, labels in refused.items()
    if labels
  ]
  if MAIN in sizes:
    parts += [f'### Qwen3-8B on {MAIN}, program by program', shortened(sizes[MAIN]['report'])]
  return '\n\n'.join(parts)


# Parts of a report that only those who change a program read.
_DETAILS = re.compile(
  r'most cycles \[compiler\]|^```|, without an estimate of|copies in HBM|\d loops have|^\| program +\|'
)
_SMALL_ROW = re.compile(rf'^\| (?:(?:evaluation/)?(?:{"|".join((*_SMALL, "prepare", "prefill", "score"))})\b|\S*#)')


def shortened(report: str) -> str:
  """Return a report without its lists of single operations, kernels and collectives, and without small programs."""
  parts = (part for part in report.split('\n\n') if not _DETAILS.search(part))
  return '\n\n'.join('\n'.join(line for line in part.split('\n') if not _SMALL_ROW.match(line)) for part in parts)


HEAD = ('chips', 'tokens per completion', 'update GiB', 'largest update s', 'TFLOP per chip', 'sent GB', 'rows live %')
HEAD += ('tokens live %', 'update MFU %', 'decode GiB', 'ms per token', 'evaluation s', 'step s', 'tokens/s')
HEAD += ('$ / 100 steps',)


def adapters(results: dict[str, dict[str, Any]]) -> list[str]:
  """Return Markdown on adapters: models on their smallest slices, slots, and the update compared with the full one."""
  models = {point.name: results[point.name] for point in LORA_MODELS if point.name in results}
  slots = {point.name: results[point.name] for point in LORA_SLOTS if point.name in results}
  parts = []
  if models:
    parts += ['### LoRA', LORA_TOLD, markdown(LORA_HEAD, [_adapter_row(name, plan) for name, plan in models.items()])]
  if 'report' in models.get(LORA_MODELS[0].name, {}):
    # Trained parameters and copies of the base, without the table of memory between them.
    about = models[LORA_MODELS[0].name]['report'].split('\n\n')[:3]
    parts.append(' '.join(part for part in about if not part.startswith('|')))
  if slots:
    rows = [
      [str(plan['settings']['rollout.max_batch_rows']), *_gib(plan, 'decode', 'cache', 'temporaries'), *_token(plan)]
      for plan in slots.values()
    ]
    head = ['completions at once', 'decode GiB', 'of it cache', 'temporaries', 'ms per token', 'tokens/s']
    parts += [f'Qwen3-8B with LoRA on {LORA}, by `rollout.max_batch_rows`:', markdown(head, rows)]
  if MAIN in results and LORA_MAIN.name in results:
    rows = [
      [what, *_gib(results[name], 'update'), *_update(results[name])]
      for what, name in (('all parameters', MAIN), ('LoRA', LORA_MAIN.name))
    ]
    head = ['trained', 'update GiB', 's', 'µs per token', 'TFLOP per chip', 'sent GB']
    told = f'The largest update of Qwen3-8B on {MAIN}, one packed row per chip, student and teacher tokens together:'
    then = (
      'With LoRA the sampler keeps its copy of the base between batches, '
      f'{results[LORA_MAIN.name]["sampling_base_gib"]:.2f} GiB here. The products with factors are few operations, but '
      'each reads or writes the activations of a layer once more, so that less time is saved than operations.'
    )
    parts += [told, markdown(head, rows), then]
  return parts


LORA_TOLD = (
  '`configs/lora.py` with the task chemistry: factors of rank 16 beside all matrices of the layers, the base in '
  'bfloat16. Each model is on the smallest slice of v5e that holds its largest update, and so many completions at '
  'once, with half a GiB to spare; both at their longest: 2,048 tokens of prompt, 8,192 of completion, 10,240 of '
  'teacher prompt. *By hand* is what the shapes alone say (`launch.check`): a lower bound, without what the compiler '
  'needs in addition, for which see the rows where it was asked. Rows that are *not compiled* are on the smallest '
  'slice on which that bound leaves room: ask `launch.plan` before you rely on them. *Again* is what the sampler holds '
  'of the base for itself because its layout is another: nothing where `mesh.fsdp` is 1. A run chooses `mesh.tensor` '
  'so that a copy of the weights is small enough; on these slices that is as many chips as the key-value heads allow.'
)
LORA_HEAD = ('model', 'trained, million', 'slice', 'mesh', 'completions at once', 'by hand: update GiB', 'decode GiB')
LORA_HEAD += ('compiled: base GiB', 'again', 'update GiB', 'update s', 'decode GiB', 'ms per token')


def _adapter_row(name: str, plan: dict[str, Any]) -> list[str]:
  known = [name.removesuffix(' with LoRA'), f'{plan["trained"] / 1e6:.1f}', plan['topology'], _mesh(plan)]
  known += [str(plan['settings']['rollout.max_batch_rows'])]
  known += [_cell(plan['least_gib'][label]) for label in ('update', 'decode')]
  if 'programs' not in plan:
    return known + ['not compiled', *[''] * 5]
  return (
    known
    + [_cell(plan['base_gib']), _cell(plan['sampling_base_gib'])]
    + [*_gib(plan, 'update'), *_update(plan)[:1], *_gib(plan, 'decode'), *_token(plan)[:1]]
  )


def _gib(plan: dict[str, Any], label: str, *parts: str) -> list[str]:
  """Return a program's memory, in total and by some parts."""
  program = plan['programs'][label]
  whole = _cell(program['hbm_gib'])
  held = [None if _refused(program) else program['hbm'].get(part, 0.0) for part in parts]
  return [whole if program['fits'] else f'{whole} (does not fit)', *map(_cell, held)]


def _update(plan: dict[str, Any]) -> list[str]:
  """Return seconds, µs per token on a chip, TFLOP and GB sent, for the largest update."""
  program, settings = plan['programs']['update'], plan['settings']
  if _refused(program):
    return [_cell(None)] * 4
  tokens = settings['data.max_prompt_length'] + settings['actor.self_distillation.max_reprompt_len']
  tokens += 2 * settings['data.max_response_length']
  values = program['seconds'], 1e6 * program['seconds'] / tokens, program['matmul_tflop']
  return [_cell(value) for value in (*values, sum(program['collective_gb'].values()))]


def _token(plan: dict[str, Any]) -> list[str]:
  """Return ms per token of every row while all rows have a sample, and tokens per second of all rows."""
  step = plan['programs']['decode'].get('busy_step_seconds')
  rows = plan['settings']['rollout.max_batch_rows']
  return [_cell(None if step is None else 1e3 * step), _cell(None if step is None else rows / step)]


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
  """Return the sentence of docs/tpu.md about the cost of 100 steps of the main point."""
  hours = 100 * plan['step_seconds'] / 3600
  return (
    f'{plan["chips"]} chips for 100 steps of {plan["step_seconds"]:.0f} s (an estimate, evaluation included) are '
    f'{plan["chips"]} × {hours:.2f} h = {plan["device_hours_per_100_steps"]:.0f} chip-hours; at '
    f'{plan["assumptions"]["price"]:.2f} dollars, {plan["cost_per_100_steps"]:.0f} dollars on demand.'
  )


def pages(results: dict[str, dict[str, Any]]) -> dict[str, str]:
  """Return the text between the markers of each page beside the results."""
  missing = [point.name for point in EVERY if point.name not in results]
  # A page with gaps must not look complete.
  gaps = (
    f'Not planned yet: {", ".join(missing)}; `python -m benchmarks.tpu_plan --keep=DIR` does it.' if missing else ''
  )
  text = '\n\n'.join(part for part in (gaps, tables(results) if results else '') if part)
  return {'performance.md': text, 'tpu.md': cost(results[MAIN]) if MAIN in results else gaps}


def draw(results: dict[str, dict[str, Any]], file: pathlib.Path) -> None:
  """Plot the time per step by phase, and memory and bytes sent, over the points."""
  pyplot = extras.pyplot()

  names = [name if plan['fits'] else f'{name}: does not fit' for name, plan in results.items()]
  figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 6), layout='constrained')
  bottom = [0.0] * len(names)
  for phase in dict.fromkeys(phase for plan in results.values() for phase in plan['phases']):
    # A plan that does not fit has estimates for some phases only: their sum would look like a step.
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
    axis.tick_params(axis='x', labelsize='small', rotation=90)
  figure.savefig(file, dpi=120)
  pyplot.close(figure)


def insert(page: str, text: str, begin: str = BEGIN) -> str:
  """Return the page with `text` between the marker `begin` and the next end marker.

  Raises:
    ValueError: the page lacks a marker.
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
  wanted = ONLY.value or [point.name for point in EVERY]
  for point in EVERY:
    if ONLY_WRITE.value:
      continue
    found = {} if point.name not in wanted else compute(point, KEEP.value)
    if point in LORA_MODELS:
      found = arithmetic(point) | found
    if found:
      results[point.name] = (results.get(point.name, {}) if point.name not in wanted else {}) | found
      results = {each.name: results[each.name] for each in EVERY if each.name in results}
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
