"""Tokens per CPU-second of the sampler beside transformers' `generate`, Tunix's sampler and an older checkout of ours.

    python -m benchmarks.rollout [--settings=greedy,plain,top_p,top_p_top_k,long_tail]
      [--model=small|tiny|mid|vocabulary]
      [--tunix_python=PATH] [--spine=DIR]

Every side has the same random Qwen3 weights in float32, the same prompts and the same lengths, which are forced: no
token ends a row. Each is a process of its own; all are bound to the same core and one thread, take turns, and are
warmed up first. The medians are printed as one JSON line a setting. CPU-seconds, prefill and host work included, are
what to compare: wall-clock seconds depend on what else the machine does.

Settings: `greedy`; `plain` (temperature 1); `top_p` (0.95, all of the vocabulary); `top_p_top_k` (0.95 of the best 50);
`long_tail`: `--samples` samples through `--slots` slots, each as long as its own maximum, log-normal with sigma 1 and
a mean of an eighth of `--longest`. There, `generate` and the older checkout run batches of `--slots` in the order of
arrival, and only the tokens up to each row's maximum count. Ours returns two log-probs and the entropy of every token
in all settings, Tunix the log-probs in `plain` alone (it is faster without), transformers none.

Tunix needs an environment of its own, whose Python `--tunix_python` names; without it that side is left out:

    python3.11 -m venv tunix && tunix/bin/pip install google-tunix "jax[cpu]==0.10.2"

`--spine` names a checkout of this repository as it was when it sampled whole batches; without it that side is left out:

    git worktree add spine c346baf

`cache_mib` is the largest key-value cache a side held; `cache_minimum_mib` what the tokens need that are alive at the
fullest moment when slots are refilled at once. `same_greedy_tokens` compares the first row of every side with ours.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
import functools
import heapq
import json
import os
from pathlib import Path
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks.rollout_sides import timed

MODELS = {
  'tiny': dict(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
  ),
  'small': dict(
    vocab_size=32000,
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=32,
  ),
  # Dominated by the vocabulary, which is Qwen3's.
  'vocabulary': dict(
    vocab_size=151936,
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=32,
  ),
  'mid': dict(
    vocab_size=32768,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
  ),
}
SETTINGS = {
  'greedy': dict(temperature=0.0, top_p=1.0, top_k=0),
  'plain': dict(temperature=1.0, top_p=1.0, top_k=0),
  'top_p': dict(temperature=1.0, top_p=0.95, top_k=0),
  'top_p_top_k': dict(temperature=1.0, top_p=0.95, top_k=50),
  'long_tail': dict(temperature=1.0, top_p=1.0, top_k=0),
}
ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--settings', default=','.join(SETTINGS), help='comma-separated')
  parser.add_argument('--model', choices=MODELS, default='small')
  parser.add_argument('--prompts', type=int, default=16)
  parser.add_argument('--n', type=int, default=1, help='completions a prompt, in all settings')
  parser.add_argument('--prompt_length', type=int, default=64)
  parser.add_argument('--new_tokens', type=int, default=128)
  parser.add_argument('--samples', type=int, default=256, help='samples of long_tail')
  parser.add_argument('--slots', type=int, default=64, help='rows that long_tail decodes at once')
  parser.add_argument('--longest', type=int, default=512, help='maximum of the lengths of long_tail')
  parser.add_argument('--repeats', type=int, default=3)
  parser.add_argument('--tunix_python', default='', help="Tunix's Python")
  parser.add_argument('--spine', default='', help='folder of an older checkout')
  args = parser.parse_args()
  unknown = set(args.settings.split(',')) - set(SETTINGS)
  if unknown:
    parser.error(f'--settings: {", ".join(sorted(unknown))} is not one of {", ".join(SETTINGS)}')
  one_core()
  with tempfile.TemporaryDirectory() as checkpoint:
    write_checkpoint(args.model, checkpoint)
    workers = start(args, checkpoint)
    try:
      for setting in args.settings.split(','):
        print(json.dumps(compare(setting, args, workers)), flush=True)
    finally:
      for worker in workers.values():
        worker.stop()


def one_core() -> None:
  """Keep this process and its children on one core and one thread; call before importing any of the libraries."""
  if hasattr(os, 'sched_setaffinity'):
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
  os.environ['JAX_PLATFORMS'] = 'cpu'
  os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} --xla_cpu_multi_thread_eigen=false'.strip()
  for name in ('OMP_NUM_THREADS', 'MKL_NUM_THREADS'):
    os.environ[name] = '1'


def write_checkpoint(model: str, path: str) -> None:
  """Write random weights in Hugging Face format, which every side reads."""
  import torch
  import transformers

  torch.manual_seed(0)
  config = transformers.Qwen3Config(
    **MODELS[model],
    tie_word_embeddings=True,
    eos_token_id=None,
    pad_token_id=0,
    rope_parameters={'rope_type': 'default', 'rope_theta': 1e6},
  )
  transformers.Qwen3ForCausalLM(config).save_pretrained(path)


class Worker:
  """The process of one side, running `script`."""

  def __init__(self, side: str, checkpoint: str, python: str, root: str, script: str = 'rollout_sides.py'):
    self.side = side
    self._process = subprocess.Popen(
      [python, '-P', str(ROOT / 'benchmarks' / script), side, checkpoint],
      env=os.environ | {'PYTHONPATH': root},
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )
    self.versions: dict[str, str] = self._answer()

  def run(self, work: dict[str, Any], step: int) -> dict[str, Any]:
    """Send a request and return the answer; step 0 warms up."""
    print(json.dumps({'work': work, 'step': step}), file=self._process.stdin, flush=True)
    return self._answer()

  def stop(self) -> None:
    self._process.stdin.close()
    self._process.wait()

  def _answer(self) -> dict[str, Any]:
    line = self._process.stdout.readline()
    if not line:
      raise SystemExit(f'{self.side} ended with status {self._process.wait()}; what it said stands above.')
    return json.loads(line)


def start(args: argparse.Namespace, checkpoint: str) -> dict[str, Worker]:
  """Start the available sides and return them, ours first."""
  here = functools.partial(Worker, checkpoint=checkpoint, python=sys.executable)
  workers = {'sdpo_jax': here('sdpo_jax', root=str(ROOT)), 'transformers': here('transformers', root='')}
  if args.tunix_python:
    workers['tunix'] = Worker('tunix', checkpoint, args.tunix_python, '')
  if args.spine:
    workers['spine'] = here('sdpo_jax', root=str(Path(args.spine).resolve()))
  return workers


def compare(setting: str, args: argparse.Namespace, workers: dict[str, Worker]) -> dict[str, Any]:
  """Return the JSON line of a setting."""
  work = make_work(setting, args)
  # Whole batches of equal rows leave Tunix no choice; it would step all 256 rows to the longest.
  sides = {name: worker for name, worker in workers.items() if setting != 'long_tail' or name != 'tunix'}
  answers = turns({name: functools.partial(worker.run, work) for name, worker in sides.items()}, args.repeats)
  count = sum(work['max_tokens'])

  def median(name, key):
    return statistics.median(answer[key] for answer in answers[name])

  cpu = {name: median(name, 'cpu_s') for name in sides}

  def mib(size):
    return round(size / 2**20, 2)

  line = {
    'benchmark': 'rollout',
    'setting': setting,
    'model': args.model,
    'prompts': len(work['prompts']),
    'n': args.n,
    'rows': work['rows'],
    'prompt_length': args.prompt_length,
    'new_tokens': count,
    'longest': max(work['max_tokens']),
    'sides': {
      name: {
        'tokens_per_cpu_s': round(count / cpu[name], 1),
        'tokens_per_s': round(count / median(name, 'wall_s'), 1),
        'cache_mib': mib(answers[name][-1]['cache_bytes']),
        'versions': worker.versions,
      }
      for name, worker in sides.items()
    },
    'times_as_fast_cpu': {name: round(cpu[name] / cpu['sdpo_jax'], 2) for name in sides if name != 'sdpo_jax'},
    'cache_minimum_mib': mib(fewest_bytes(work, MODELS[args.model])),
  }
  if setting == 'greedy':
    first = {name: answers[name][-1]['first_row'] for name in sides}
    line['same_greedy_tokens'] = {name: first[name] == first['sdpo_jax'] for name in sides if name != 'sdpo_jax'}
  left_out = [name for name in ('tunix', 'spine') if name not in sides]
  return line | {'left_out': left_out}


def make_work(setting: str, args: argparse.Namespace) -> dict[str, Any]:
  """Return the request for every side, as plain numbers."""
  import numpy as np

  rng = np.random.default_rng(0)
  tail = setting == 'long_tail'
  if tail and args.samples % args.n:
    raise SystemExit(f'--samples={args.samples} is not a multiple of --n={args.n}.')
  prompts = args.samples // args.n if tail else args.prompts
  rows = prompts * args.n
  tokens = rng.integers(1, MODELS[args.model]['vocab_size'], (prompts, args.prompt_length))  # 0 is padding.
  return {
    **SETTINGS[setting],
    'prompts': tokens.tolist(),
    'n': args.n,
    'rows': args.slots if tail else rows,
    'max_tokens': long_tail(rng, rows, args.longest) if tail else [args.new_tokens] * rows,
    'log_probs': setting == 'plain',
  }


def long_tail(rng: Any, samples: int, longest: int) -> list[int]:
  """Return log-normal lengths with sigma 1 and mean longest / 8, at least 1 and at most `longest`."""
  import numpy as np

  lengths = rng.lognormal(np.log(longest / 8) - 0.5, 1.0, samples)
  return np.clip(np.ceil(lengths), 1, longest).astype(int).tolist()


def fewest_bytes(work: dict[str, Any], model: dict[str, int]) -> int:
  """Return the float32 bytes of keys and values alive at the fullest moment, with slots refilled at once.

  The newest token of a row is not yet cached; prompts are stored once per sample.
  """
  most = most_alive(work['max_tokens'], work['rows'], len(work['prompts'][0]))
  return most * model['num_hidden_layers'] * 2 * model['num_key_value_heads'] * model['head_dim'] * 4


def most_alive(lengths: Sequence[int], slots: int, prompt_length: int) -> int:
  """Return the peak number of cached tokens if each of the `slots` takes the next sample once it is free."""
  free = [0] * slots
  spans = []
  for length in lengths:
    begin = heapq.heappop(free)
    spans.append((begin, begin + length))
    heapq.heappush(free, begin + length)
  # The number falls only when a row ends, so peaks are at the last steps of rows.
  return max(sum(prompt_length + end - 1 - begin for begin, other in spans if begin < end <= other) for _, end in spans)


def turns(sides: dict[str, Callable[[int], Any]], repeats: int) -> dict[str, list[Any]]:
  """Return each side's results of `repeats` runs after a warm-up (step 0)."""
  results: dict[str, list[Any]] = {name: [] for name in sides}
  for step in range(repeats + 1):
    for name, run in sides.items():
      results[name].append(run(step))
  return {name: runs[1:] for name, runs in results.items()}


def take_turns(sides: dict[str, Callable[[int], Any]], repeats: int) -> dict[str, tuple[float, float]]:
  """Return the median (wall, CPU) seconds of each side in this process over `repeats` runs after a warm-up."""

  def clock(run):
    return lambda step: timed(lambda: run(step))

  measured = turns({name: clock(run) for name, run in sides.items()}, repeats)
  return {
    name: tuple(statistics.median(column) for column in zip(*runs, strict=True)) for name, runs in measured.items()
  }


if __name__ == '__main__':
  main()
