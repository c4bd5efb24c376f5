"""Qwen3-8B with the paper's lengths on v5e slices, asked of the TPU compiler: memory, time and communication by size.

  python -m benchmarks.tpu_plan --output=docs/performance                     # every point: an hour on two cores
  python -m benchmarks.tpu_plan --output=docs/performance --only=v5e:8x8      # one point again
  python -m benchmarks.tpu_plan --output=docs/performance --only_plot=true    # draw what is there

No TPU is needed and nothing is measured: these are the compiler's estimates and arithmetic (docs/performance.md says
which is which). Writes results.json (every number of every point) and scaling.png to --output, and the tables between
the two markers of the page beside it, docs/performance.md; where there is no such page, to tables.md.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import json
import math
import pathlib
import sys
from typing import Any

from absl import app, flags

from configs import paper
from sdpo_jax.config import Config
from sdpo_jax.planner import model, report, topology
from sdpo_jax.planner import plan as planning
from sdpo_jax.tables import markdown

OUTPUT = flags.DEFINE_string('output', 'docs/performance', 'Folder of the results.')
ONLY = flags.DEFINE_multi_string('only', [], 'Name of a point; may be repeated; unset: all.')
ONLY_PLOT = flags.DEFINE_bool('only_plot', False, 'Compile nothing; draw what is there.')

BEGIN, END = '<!-- made by benchmarks.tpu_plan: -->', '<!-- end -->'
MAIN = 'v5e:8x8'


@dataclasses.dataclass(frozen=True)
class Point:
  """One slice and one length of completions."""

  name: str
  slice_: str
  response: int = 8192
  reprompt: int = 4096


# The update: a row of student and teacher a chip. The sampler: 256 rows at once. Chips at fixed length, then length.
POINTS = (
  Point('v5e:4x4', 'v5e:4x4'),
  Point(MAIN, MAIN),
  Point('v5e:16x16', 'v5e:16x16'),
  Point('v5e:8x8, 2048 tokens', MAIN, response=2048),
  Point('v5e:8x8, 4096 tokens', MAIN, response=4096),
)


def configuration(point: Point) -> Config:
  """The paper's chemistry run at one length of every kind."""
  config = paper.get_config(task='chemistry')
  chips = math.prod(int(size) for size in point.slice_.partition(':')[2].split('x'))
  config.data.max_response_length = point.response
  config.actor.self_distillation.max_reprompt_len = point.reprompt
  config.data.prompt_buckets, config.data.response_buckets = (2048,), (point.response,)
  config.data.reprompt_buckets = (point.reprompt,)
  config.actor.ppo_micro_batch_size = chips
  config.rollout.max_batch_rows = 256
  return config.validate()


def compute(point: Point) -> dict[str, Any]:
  """The plan of a point as plain values, and its report."""
  config, slice_ = configuration(point), topology.describe(point.slice_)
  policy, source = model.read(config)
  assumptions = planning.Assumptions.of(config, slice_.chip)

  def announce(text):
    print(text, file=sys.stderr, flush=True)

  announce(f'{point.name}:')
  plan = planning.make(config, policy, slice_, assumptions, source=source, announce=announce)
  return plan.to_json() | {'response': point.response, 'report': report.text(plan)}


def _cell(value: float | None, digits: int = 3) -> str:
  if value is None:
    return '?'
  return f'{value:,.0f}' if abs(value) >= 1000 else f'{value:.{digits}g}'


def _refused(program: dict[str, Any]) -> bool:
  return program.get('error') is not None


def tables(results: dict[str, dict[str, Any]]) -> str:
  """Markdown: how everything grows with chips and tokens, and the whole report of the main point."""
  head = ['slice', 'chips', 'completion tokens']
  head += ['update GiB', 'update s', 'TFLOP a chip', 'sent GB', 'MFU %']
  head += ['decode GiB', 'ms a token', 'step s', 'tokens/s', '$ / 100 steps']
  rows = []
  for name, plan in results.items():
    update, decode = plan['programs'].get('update', {}), plan['programs'].get('decode', {})
    sent = None if _refused(update) else sum(update.get('collective_gb', {}).values())
    step = decode.get('step_seconds')
    values = [None if _refused(update) else update.get(key) for key in ('seconds', 'matmul_tflop')] + [sent]
    mfu = plan['update_mfu']
    rows.append(
      [name, str(plan['chips']), str(plan['response']), _cell(update.get('hbm_gib'))]
      + [_cell(value) for value in values]
      + [_cell(None if mfu is None else 100 * mfu), _cell(decode.get('hbm_gib'))]
      + [_cell(None if step is None else 1e3 * step), _cell(plan['step_seconds'])]
      + [_cell(plan['tokens_per_second']), _cell(plan['cost_per_100_steps'], 4)]
    )
  parts = ['### Growth with chips and tokens', markdown(head, rows), '![Growth](performance/scaling.png)']
  if MAIN in results:
    parts += [f'### Qwen3-8B on {MAIN}, program by program', results[MAIN]['report']]
  return '\n\n'.join(parts)


def draw(results: dict[str, dict[str, Any]], file: pathlib.Path) -> None:
  """Update time by part and bytes sent, over the points."""
  import matplotlib

  matplotlib.use('Agg')
  from matplotlib import pyplot

  names = list(results)
  figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout='constrained')
  bottom = [0.0] * len(names)
  for source in dict.fromkeys(s for plan in results.values() for s in plan['programs']['update']['seconds_by_source']):
    heights = [plan['programs']['update']['seconds_by_source'].get(source, 0.0) for plan in results.values()]
    left.bar(names, heights, bottom=bottom, label=source)
    bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
  left.set_ylabel('s an update of one row a chip (estimate)')
  left.legend(fontsize='small')
  for label, marker in (('update', 'o'), ('decode', 's')):
    right.plot(
      names,
      [plan['programs'][label]['hbm_gib'] or math.nan for plan in results.values()],
      marker,
      label=f'{label}, GiB',
    )
  sent = [sum(plan['programs']['update']['collective_gb'].values()) for plan in results.values()]
  right.plot(names, sent, '^', label='update sends, GB a chip')
  right.set_ylim(bottom=0)
  right.legend(fontsize='small')
  for axis in (left, right):
    axis.tick_params(axis='x', rotation=20)
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
  wanted = ONLY.value or [point.name for point in POINTS]
  for point in POINTS:
    if point.name in wanted and not ONLY_PLOT.value:
      results[point.name] = compute(point)
      results = {each.name: results[each.name] for each in POINTS if each.name in results}
      file.write_text(json.dumps(results, indent=1) + '\n')
  text = tables(results)
  draw(results, folder / 'scaling.png')
  page = folder.with_suffix('.md')
  if page.is_file():
    page.write_text(insert(page.read_text(encoding='utf-8'), text), encoding='utf-8')
  else:
    (folder / 'tables.md').write_text(text + '\n', encoding='utf-8')


if __name__ == '__main__':
  app.run(main)
