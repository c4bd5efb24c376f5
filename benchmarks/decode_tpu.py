"""Reads of a decode step of Qwen3-8B on v5e:8x8 and their minimum, from the TPU compiler's own program.

  python -m benchmarks.decode_tpu --keep=answers    # five minutes on two cores

For rows × context of 256 × 10240, 384 × 10240 and 1024 × 4096, with a cache in bfloat16 and in int8, and for every mesh
that divides the model and may fit, the sampler's loop is compiled as in a run. No TPU is needed and nothing is
measured. One JSON line per program, on stdout and in decode_tpu.jsonl of --output; the best mesh of each setting goes
into a table between this benchmark's markers in docs/performance.md, which explains the columns.
"""

from __future__ import annotations

from collections.abc import Sequence
import itertools
import json
import math
import pathlib
from typing import Any

from absl import app, flags

from benchmarks import tpu_plan
from sdpo_jax.config import Config
from sdpo_jax.configs import qwen3_8b_chemistry
from sdpo_jax.files import jsonable
from sdpo_jax.models.policy import Policy
from sdpo_jax.planner import model, topology
from sdpo_jax.planner import plan as planning
from sdpo_jax.tables import markdown

BEGIN = '<!-- made by benchmarks.decode_tpu: -->'
SLICE = 'v5e:8x8'
PROMPT = 2048
SETTINGS = ((256, 10240), (384, 10240), (1024, 4096))  # Concurrent rows, tokens of prompt and completion.
# fsdp × tensor. More than 8 do not divide the 8 key-value heads, and less than 2 leave more weights than a chip holds.
MESHES = ((8, 8), (16, 4), (32, 2))
CACHES = {'auto': 'bfloat16', 'int8': 'int8'}


def configuration(rows: int, context: int, cache: str, mesh: tuple[int, int]) -> Config:
  """Return the shipped chemistry run with this number of sampler rows and one length of every kind."""
  config = qwen3_8b_chemistry.get_config()
  config.data.max_response_length, config.data.response_buckets = context - PROMPT, (context - PROMPT,)
  config.data.max_prompt_length, config.data.prompt_buckets = PROMPT, (PROMPT,)
  config.data.train_batch_size = config.actor.ppo_mini_batch_size = rows // config.rollout.n
  config.rollout.max_batch_rows, config.rollout.cache_dtype = rows, cache
  config.mesh.fsdp, config.mesh.tensor = mesh
  config.trainer.test_freq = 0
  # All rows are in use until the last step.
  config.plan.mean_completion = config.plan.longest_completion = float(context - PROMPT)
  return config.validate()


def minimum(policy: Policy, config: Config, filled: int) -> tuple[float, float]:
  """Return the bytes of weights and of cache that a chip must read in a step whose rows hold `filled` tokens each.

  Weights are in bfloat16, divided over `tensor`, without a separate embedding table (of which a step reads one row per
  token); the cache holds keys and values of every token and layer, and for int8 a float32 scale per head for each.
  """
  table = {parameter.name: math.prod(parameter.shape) for parameter in policy.parameter_table()}
  looked_up = table['embedding'] if 'unembedding' in table else 0
  sizes = policy.config
  a_head = 2 * sizes.head_dim if config.rollout.cache_dtype == 'auto' else sizes.head_dim + 4
  cached = 2 * sizes.layers * sizes.kv_heads * a_head * filled * config.rollout.max_batch_rows
  return 2 * (sum(table.values()) - looked_up) / config.mesh.tensor, cached / (config.mesh.fsdp * config.mesh.tensor)


def compute(rows: int, context: int, cache: str, mesh: tuple[int, int], keep: str | None = None) -> dict[str, Any]:
  """Return the benchmark's line for one program."""
  config, slice_ = configuration(rows, context, cache, mesh), topology.describe(SLICE)
  policy, source = model.read(config)
  assumptions = planning.Assumptions.of(config, slice_.chip)
  plan = planning.make(config, policy, slice_, assumptions, source=source, only=('prepare', 'decode'), keep=keep)
  decode, bandwidth, chips = plan.programs['decode'], slice_.chip.hbm_bandwidth, len(slice_.devices)
  line = {
    'benchmark': 'decode_tpu',
    'model': source,
    'slice': SLICE,
    'compiler': slice_.compiler,
    'mesh': plan.mesh,
    'rows': rows,
    'context': context,
    'cache': CACHES[cache],
    'hbm_gib': decode.hbm,
    'hbm_total_gib': decode.hbm_gib,
    'fits': decode.fits,
    'error': decode.error,
  }
  if decode.error is not None:
    return jsonable(line)
  reads, steps = decode.step_reads, config.rollout.decode_chunk
  beside = (decode.seconds - decode.seconds_by_source['cache']) / steps
  fills = {}
  for name, filled in (('half', context // 2), ('full', context)):
    weights, live = minimum(policy, config, filled)
    fills[name] = {
      'filled': filled,
      'cache_gb': reads.cache(filled) / 1e9,
      'read_gb': reads.total(filled) / 1e9,
      'minimum_gb': (weights + live) / 1e9,
      'ratio': reads.total(filled) / (weights + live),
      # A step draws a token for each row, from reads of all chips.
      'read_mb_per_token': reads.total(filled) * chips / rows / 1e6,
      'minimum_mb_per_token': (weights + live) * chips / rows / 1e6,
      'read_ms': 1e3 * reads.total(filled) / bandwidth,
      'attention_ms': 1e3 * sum(kernel.filled(filled) for kernel in decode.step_kernels),
      'planned_ms': 1e3 * (beside + sum(kernel.filled(filled) for kernel in decode.step_kernels)),
    }
  return jsonable(
    line
    | {
      'reads_mb': {kind: getattr(reads, kind) / 1e6 for kind in ('weights', 'recent', 'rest', 'chunk', 'strays')},
      'largest_copy_mib': max((copy['gib'] * 1024 for copy in decode.copies), default=0.0),
      'fills': fills,
      'planned_ms_by_source': {kind: 1e3 * seconds / steps for kind, seconds in decode.seconds_by_source.items()},
      'planned_matmul_tflop': decode.matmul_tflop / steps,
    }
  )


def best(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
  """Return the line with the least time per step among a setting's lines that fit."""
  fitting = [line for line in lines if line['fits']]
  return min(fitting or lines, key=lambda line: line['fills']['full']['planned_ms'] if 'fills' in line else math.inf)


def table(lines: Sequence[dict[str, Any]]) -> str:
  """Return Markdown: for every setting the fastest mesh that fits, with full rows, and how the meshes compare."""
  head = ['rows × context', 'cache', 'mesh', 'HBM GiB', 'rows hold', 'weights GB', 'cache GB', 'other MB', 'read GB']
  head += ['minimum GB', 'ratio', 'MB a token', 'least', 'ms at 819 GB/s', 'attention ms', 'ms planned']
  settings: dict[tuple[str, str], list[dict[str, Any]]] = {}
  for line in lines:
    settings.setdefault((f'{line["rows"]} × {line["context"]}', line['cache']), []).append(line)

  def shape(line):
    return ' × '.join(str(size) for size in line['mesh'].values())

  rows = []
  for setting, tried in settings.items():
    line = best(tried)
    fill, other = line['fills']['full'], sum(size for kind, size in line['reads_mb'].items() if kind != 'weights')
    rows.append(
      [*setting, shape(line), f'{line["hbm_total_gib"]:.1f}', str(fill['filled'])]
      + [f'{line["reads_mb"]["weights"] / 1e3:.2f}', f'{fill["cache_gb"]:.2f}', f'{other:.0f}']
      + [f'{fill["read_gb"]:.2f}', f'{fill["minimum_gb"]:.2f}', f'{fill["ratio"]:.3f}']
      + [f'{fill["read_mb_per_token"]:.0f}', f'{fill["minimum_mb_per_token"]:.0f}']
      + [f'{fill[kind]:.1f}' for kind in ('read_ms', 'attention_ms', 'planned_ms')]
      + [*map(_tried, tried)]
    )
  return markdown(head + [shape(line) for line in next(iter(settings.values()))], rows)


def _tried(line: dict[str, Any]) -> str:
  total = '?' if line['hbm_total_gib'] is None else f'{line["hbm_total_gib"]:.1f}'
  return f'{line["fills"]["full"]["planned_ms"]:.1f} ms, {total}' if line['fits'] else f'does not fit, {total}'


def main(arguments: Sequence[str]) -> None:
  del arguments
  topology.compile_only()
  folder = pathlib.Path(flags.FLAGS.output)
  lines = []
  with (folder / 'decode_tpu.jsonl').open('w', encoding='utf-8') as file:
    for (rows, context), cache, mesh in itertools.product(SETTINGS, CACHES, MESHES):
      lines.append(compute(rows, context, cache, mesh, tpu_plan.KEEP.value))
      print(json.dumps(lines[-1]), flush=True)
      file.write(json.dumps(lines[-1]) + '\n')
  page = folder.with_suffix('.md')
  page.write_text(tpu_plan.insert(page.read_text(encoding='utf-8'), table(lines), BEGIN), encoding='utf-8')


if __name__ == '__main__':
  app.run(main)
