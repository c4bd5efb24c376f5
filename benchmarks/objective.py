"""CPU-seconds and memory of the objective, forward and backward, beside a plain PyTorch form of the same loss.

    python -m benchmarks.objective [--tokens=256,2048] [--vocab=151936] [--topk=100] [--width=1024]

The loss is self-distillation with the defaults of the paper's Section 3: Jensen–Shannon divergence (alpha 0.5) over the
student's top K with a tail bucket, importance ratio clipped at 2, temperature 1, from float32 hidden states and two
unembeddings, the teacher's included. Each case is run with and without the gradient to the student's unembedding.

PyTorch's side is what one writes first: whole logits, divided by the temperature in place, `logsumexp`, `topk`,
`gather`, autograd. Ours also returns entropies, tail masses and the other per-token metrics, which PyTorch's does not.

`products` is the floor on this machine: nothing but the matrix products of the same sizes in XLA, three (the logits of
student and teacher, the gradient to the states) or four (the gradient to the unembedding).

Each side of each case runs in a process of its own, on one core and one thread, on the same arrays: one warm-up, then
the best of `--repeats` by CPU time (user + system); compiling is not in it. Memory is the highest resident size of all
runs above that before the first, when inputs and compiled program are in place; results, such as the unembedding's
gradient, are in it on both sides. `temp_mib` is XLA's own count of temporary memory, without results. Prints one JSON
line.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
import functools
import gc
import json
import os
from pathlib import Path
import resource
import subprocess
import sys
import time
from typing import Any

import numpy as np

ALPHA, IS_CLIP, TEMPERATURE = 0.5, 2.0, 1.0
SIDES = ('ours', 'torch', 'products')


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--tokens', default='256,2048', help='comma-separated numbers of completion tokens')
  parser.add_argument('--vocab', type=int, default=151936)
  parser.add_argument('--topk', type=int, default=100)
  parser.add_argument('--width', type=int, default=1024)
  parser.add_argument('--chunk', type=int, default=512, help='tokens whose logits exist at one time (ours)')
  parser.add_argument('--repeats', type=int, default=2)
  parser.add_argument('--core', type=int, default=None, help='core to run on; default: the last one allowed')
  parser.add_argument('--side', choices=SIDES, help=argparse.SUPPRESS)
  parser.add_argument('--unembedding_gradient', type=int, default=0, help=argparse.SUPPRESS)
  options = parser.parse_args()
  if options.side:
    print(json.dumps(measure(options)))
    return
  cases = []
  for tokens in map(int, options.tokens.split(',')):
    for unembedding_gradient in (0, 1):
      sides = {side: _spawn(options, side, tokens, unembedding_gradient) for side in SIDES}
      ours, torch, products = sides['ours'], sides['torch'], sides.pop('products')
      cases.append(
        {
          'tokens': tokens,
          'unembedding_gradient': bool(unembedding_gradient),
          **sides,
          'products_cpu_s': products['cpu_s'],
          'speedup': round(torch['cpu_s'] / ours['cpu_s'], 2),
          'memory_ratio': round(ours['peak_mib'] / torch['peak_mib'], 3),
          'loss_difference': abs(ours['loss'] / torch['loss'] - 1),
          'gradient_difference': abs(ours['gradient_norm'] / torch['gradient_norm'] - 1),
        }
      )
  line = {
    'benchmark': 'objective',
    'vocab': options.vocab,
    'topk': options.topk,
    'width': options.width,
    'chunk': options.chunk,
    'cpu': _cpu_name(),
    'cases': cases,
  }
  print(json.dumps(line))


def _spawn(options: argparse.Namespace, side: str, tokens: int, unembedding_gradient: int) -> dict[str, Any]:
  core = options.core if options.core is not None else max(os.sched_getaffinity(0))
  environment = os.environ | {
    'OMP_NUM_THREADS': '1',
    'JAX_PLATFORMS': 'cpu',
    'XLA_FLAGS': '--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1',
  }
  command = [sys.executable, '-m', 'benchmarks.objective', f'--side={side}', f'--tokens={tokens}', f'--core={core}']
  command += [f'--{name}={getattr(options, name)}' for name in ('vocab', 'topk', 'width', 'chunk', 'repeats')]
  command += [f'--unembedding_gradient={unembedding_gradient}']
  finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
  if finished.returncode:
    raise SystemExit(f'{side} with {tokens} tokens ended with status {finished.returncode}:\n{finished.stderr}')
  return json.loads(finished.stdout.splitlines()[-1])


def measure(options: argparse.Namespace) -> dict[str, Any]:
  """Run one side of one case in this process."""
  os.sched_setaffinity(0, {options.core})
  build = {'ours': _ours, 'torch': _torch, 'products': _products}[options.side]
  run, facts = build(make_inputs(int(options.tokens), options.vocab, options.width), options)
  gc.collect()
  before = _resident()
  Path('/proc/self/clear_refs').write_text('5')  # Reset the high-water mark.
  run()
  times, wall = [], []
  for _ in range(options.repeats):
    start, clock = _cpu(), time.perf_counter()
    loss, gradient_norm = run()
    times.append(_cpu() - start)
    wall.append(time.perf_counter() - clock)
  peak = _resident('VmHWM') - before
  return {
    'cpu_s': round(min(times), 3),
    'wall_s': round(min(wall), 3),
    'peak_mib': round(peak / 1024, 1),
    'loss': loss,
    'gradient_norm': gradient_norm,
    **facts,
  }


def make_inputs(tokens: int, vocab: int, width: int) -> dict[str, np.ndarray]:
  """Return arrays for one completion: the teacher's states and unembedding are near the student's."""
  rng = np.random.default_rng(0)
  normal = functools.partial(rng.standard_normal, dtype=np.float32)
  hidden, unembedding = normal((tokens, width)), normal((vocab, width)) * np.float32(2 / width**0.5)
  return {
    'hidden': hidden,
    'unembedding': unembedding,
    'teacher_hidden': hidden + np.float32(0.3) * normal((tokens, width)),
    'teacher_unembedding': unembedding + np.float32(0.1) * unembedding[::-1],
    'targets': rng.integers(0, vocab, tokens).astype(np.int32),
    'coefficients': np.full(tokens, 1 / tokens, np.float32),
    'old_log_probs': np.full(tokens, -np.log(vocab), np.float32),
  }


def _ours(inputs: dict[str, np.ndarray], options: argparse.Namespace) -> tuple[Callable, dict[str, Any]]:
  import jax
  import jax.numpy as jnp

  from sdpo_jax.objective.loss import ObjectiveConfig, objective
  from sdpo_jax.types import TeacherSignal

  config = ObjectiveConfig(
    alpha=ALPHA, distillation_topk=options.topk, is_clip=IS_CLIP, temperature=TEMPERATURE, chunk_size=options.chunk
  )

  def loss(trained, fixed):
    x = trained | fixed
    teacher = TeacherSignal(hidden=x['teacher_hidden'], unembedding=x['teacher_unembedding'])
    return objective(
      x['hidden'],
      x['unembedding'],
      teacher,
      x['targets'],
      jnp.ones(x['targets'].shape),
      x['coefficients'],
      old_log_probs=x['old_log_probs'],
      config=config,
    )

  fixed = {name: jnp.array(inputs.pop(name)) for name in list(inputs)}
  fixed = {name: value if 'unembedding' in name else value[None] for name, value in fixed.items()}  # Batch size 1.
  fixed = jax.block_until_ready(fixed)
  names = ('hidden', 'unembedding') if options.unembedding_gradient else ('hidden',)
  trained = {name: fixed.pop(name) for name in names}
  start = time.perf_counter()
  compiled = jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(trained, fixed).compile()
  facts = {
    'temp_mib': round(compiled.memory_analysis().temp_size_in_bytes / 2**20, 1),
    'compile_s': round(time.perf_counter() - start, 1),
  }

  def run():
    (value, _), gradients = jax.block_until_ready(compiled(trained, fixed))
    return float(value), float(np.linalg.norm(gradients['hidden']))

  return run, facts


def _products(inputs: dict[str, np.ndarray], options: argparse.Namespace) -> tuple[Callable, dict[str, Any]]:
  import jax
  from jax import lax
  import jax.numpy as jnp

  x = jax.block_until_ready({name: jnp.array(inputs.pop(name)) for name in list(inputs)})
  product = jax.jit(
    lambda a, b, i, j: lax.dot_general(a, b, (((i,), (j,)), ((), ())), precision='highest'), static_argnums=(2, 3)
  )

  def run():
    logits = product(x['hidden'], x['unembedding'], 1, 1).block_until_ready()
    product(x['teacher_hidden'], x['teacher_unembedding'], 1, 1).block_until_ready()
    norm = float(np.linalg.norm(product(logits, x['unembedding'], 1, 0)))
    if options.unembedding_gradient:
      product(logits, x['hidden'], 0, 0).block_until_ready()
    return norm, norm

  return run, {}


def _torch(inputs: dict[str, np.ndarray], options: argparse.Namespace) -> tuple[Callable, dict[str, Any]]:
  import torch

  torch.set_num_threads(1)
  x = {name: torch.from_numpy(inputs.pop(name)) for name in list(inputs)}
  targets = x['targets'].long()[:, None]
  x['hidden'].requires_grad_()
  x['unembedding'].requires_grad_(bool(options.unembedding_gradient))

  def with_tail(log_probs):
    mass = torch.logsumexp(log_probs, -1, keepdim=True).clamp(max=-1e-7)
    return torch.cat([log_probs, torch.log(-torch.expm1(mass))], -1)

  def loss():
    student_logits = (x['hidden'] @ x['unembedding'].T).div_(TEMPERATURE)
    student_normaliser = torch.logsumexp(student_logits, -1, keepdim=True)
    top, ids = torch.topk(student_logits, options.topk)
    student = with_tail(top - student_normaliser)
    with torch.no_grad():
      teacher_logits = (x['teacher_hidden'] @ x['teacher_unembedding'].T).div_(TEMPERATURE)
      teacher = with_tail(teacher_logits.gather(-1, ids) - torch.logsumexp(teacher_logits, -1, keepdim=True))
      log_prob = (student_logits.gather(-1, targets) - student_normaliser)[:, 0]
      ratio = (log_prob - x['old_log_probs']).clamp(-20, 20).exp().clamp(max=IS_CLIP)
    weights = torch.tensor([1 - ALPHA, ALPHA]).log()
    mixture = torch.logsumexp(torch.stack([student + weights[0], teacher + weights[1]]), 0)
    to_mixture = [(p.exp() * (p - mixture)).sum(-1) for p in (student, teacher)]
    return (x['coefficients'] * ratio * torch.lerp(*to_mixture, ALPHA)).sum()

  def run():
    x['hidden'].grad = x['unembedding'].grad = None
    value = loss()
    value.backward()
    return float(value), float(x['hidden'].grad.norm())

  return run, {}


def _cpu() -> float:
  usage = resource.getrusage(resource.RUSAGE_SELF)
  return usage.ru_utime + usage.ru_stime


def _resident(field: str = 'VmRSS') -> int:
  """Return a field of /proc/self/status in KiB."""
  lines = Path('/proc/self/status').read_text().splitlines()
  return next(int(line.split()[1]) for line in lines if line.startswith(field + ':'))


def _cpu_name() -> str:
  lines = Path('/proc/cpuinfo').read_text().splitlines()
  return next((line.split(':')[1].strip() for line in lines if line.startswith('model name')), 'unknown')


if __name__ == '__main__':
  main()
