"""CPU-seconds and memory of one SDPO step beside PyTorch's: same model, batch and lengths, one core, one thread.

    python -m benchmarks.step [--model=tiny|mid|vocabulary] [--lora=16] [--remat=none|full] [--repeats=3]

A step samples the completions, scores them with an EMA teacher under a longer prompt, and makes one AdamW update on the
top-K + tail Jensen–Shannon divergence. The PyTorch side is what one would write first: transformers' `generate`, logits
of all completion tokens, autograd, `torch.optim.AdamW`.

With `--lora=RANK` both train the same adapter of that rank on all matrices of the layers, from the same files.
PyTorch's side is PEFT, whose second adapter is the teacher; neither merges the adapter into the model.

Each side is a process of its own. Both make two updates on the same completions, whose losses must agree, and then take
turns. The medians are printed as one JSON line per model: seconds of a step (`cpu_seconds`: user + system, which depend
little on what else the machine does) and of its two parts, and `peak_mib`, the largest resident size of the process
during the steps, libraries and parameters included.
"""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path
import statistics
import sys
import tempfile
from typing import Any

from benchmarks.rollout import MODELS, ROOT, Worker, one_core, turns, write_checkpoint
from benchmarks.step_sides import ADAPTER

# Questions, completions per question, tokens of prompt, teacher's prompt and completion, and K.
CASES: dict[str, dict[str, int]] = {
  'tiny': dict(prompts=8, n=8, prompt_length=64, reprompt_length=128, new_tokens=64, topk=20),
  'mid': dict(prompts=8, n=8, prompt_length=64, reprompt_length=128, new_tokens=64, topk=20),
  'vocabulary': dict(prompts=2, n=4, prompt_length=64, reprompt_length=128, new_tokens=128, topk=100),
}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--model', choices=[*CASES, 'all'], default='all')
  parser.add_argument('--lora', type=int, default=0, metavar='RANK', help='train an adapter; 0: all parameters')
  parser.add_argument('--remat', choices=['none', 'full'], default='none', help='what the backward pass recomputes')
  parser.add_argument('--repeats', type=int, default=3)
  for name in CASES['tiny']:
    parser.add_argument(f'--{name}', type=int, help="default: the model's own")
  args = parser.parse_args()
  one_core()
  for model in CASES if args.model == 'all' else [args.model]:
    case = {name: getattr(args, name) or value for name, value in CASES[model].items()}
    print(json.dumps(compare(model, case, args)), flush=True)


def compare(model: str, case: dict[str, int], args: argparse.Namespace) -> dict[str, Any]:
  """Return the JSON line of a model."""
  import numpy as np

  rng = np.random.default_rng(0)

  def draw(rows, length):
    return rng.integers(1, MODELS[model]['vocab_size'], (rows, length)).tolist()

  work = {
    'lora': args.lora,
    'remat': args.remat,
    'prompts': draw(case['prompts'], case['prompt_length']),
    'reprompts': draw(case['prompts'], case['reprompt_length']),
    'completions': None,
    **{name: case[name] for name in ('n', 'new_tokens', 'topk')},
  }
  given = work | {'completions': draw(case['prompts'] * case['n'], case['new_tokens'])}
  with tempfile.TemporaryDirectory() as checkpoint:
    write_checkpoint(model, checkpoint)
    if args.lora:
      write_adapter(checkpoint, args.lora)
    here = functools.partial(
      Worker, checkpoint=checkpoint, python=sys.executable, root=str(ROOT), script='step_sides.py'
    )
    workers = {side: here(side) for side in ('sdpo_jax', 'pytorch')}
    try:
      # The loss of the second update depends on the first update of student and teacher.
      losses = [[worker.run(given, 0)['loss'] for _ in range(2)][1] for worker in workers.values()]
      if not np.isclose(*losses, rtol=2e-3):
        raise RuntimeError(f'The two sides do not compute the same loss: {losses}.')
      answers = turns({side: functools.partial(worker.run, work) for side, worker in workers.items()}, args.repeats)
    finally:
      for worker in workers.values():
        worker.stop()

  def median(side: str, key: str) -> float:
    return statistics.median(answer[key] for answer in answers[side])

  def sides(key: str) -> tuple[float, float]:
    return median('sdpo_jax', key), median('pytorch', key)

  ours, theirs = sides('cpu_s')
  our_peak, their_peak = sides('peak_mib')
  return {
    'benchmark': 'step',
    'model': model,
    **case,
    'lora_rank': args.lora,
    'remat': args.remat,
    'losses': losses,
    **{
      side: {
        'seconds': round(median(side, 'wall_s'), 3),
        'cpu_seconds': round(median(side, 'cpu_s'), 3),
        'cpu_seconds_sample': round(median(side, 'cpu_s_sample'), 3),
        'cpu_seconds_update': round(median(side, 'cpu_s_update'), 3),
        'peak_mib': round(median(side, 'peak_mib')),
        'versions': worker.versions,
      }
      for side, worker in workers.items()
    },
    'times_as_fast_cpu': round(theirs / ours, 2),
    'memory_ratio': round(our_peak / their_peak, 3),
  }


def write_adapter(checkpoint: str, rank: int) -> None:
  """Write a random adapter for the model in a folder; its B are not zero, so that all factors have gradients."""
  import peft
  import torch
  import transformers

  torch.manual_seed(1)
  model = transformers.Qwen3ForCausalLM.from_pretrained(checkpoint)
  config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules='all-linear', task_type='CAUSAL_LM')
  model = peft.get_peft_model(model, config)
  for name, value in model.named_parameters():
    if 'lora_B' in name:
      torch.nn.init.normal_(value, std=0.02)
  model.save_pretrained(Path(checkpoint) / ADAPTER)


if __name__ == '__main__':
  main()
