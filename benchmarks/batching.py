"""Host CPU-seconds for splitting a generation batch into micro-batches, and their fill; no model is computed.

    python -m benchmarks.batching [--task=livecodebench] [--devices=8] [--mean=256] [--repeats=3]

The shapes are those of the paper's experiments (configs/paper.py): 256 samples, completions of up to 8192 tokens, whose
lengths are log-normal (σ = 1) with the mean of the paper's Table 8. Three in four have a signal; the samples of a group
share a demonstration. Rows of one sample each (`rows`) are compared with packed ones (`packed`). `fill` is the fraction
of a row's tokens that is not padding, for the student's and the teacher's rows. One JSON line.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import get_args

import numpy as np

from sdpo_jax.config import Config
from sdpo_jax.configs import paper
from sdpo_jax.learning import batching
from sdpo_jax.training import step
from sdpo_jax.training.specs import batch_spec
from sdpo_jax.types import Rollouts

TRAINED = 0.75  # Fraction of the samples.


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--task', choices=get_args(paper.Task), default='livecodebench')
  parser.add_argument('--devices', type=int, default=8, help='that share the rows of a micro-batch')
  parser.add_argument('--mean', type=float, default=256, help='tokens of a completion')
  parser.add_argument('--repeats', type=int, default=3)
  args = parser.parse_args()
  config = paper.get_config(task=args.task)
  batch = generation_batch(config, args.mean)
  sides = {}
  for side in ('rows', 'packed'):
    config.actor.pack_sequences = side == 'packed'
    sides[side] = min((deal(config, batch, args.devices) for _ in range(args.repeats)), key=lambda x: x['cpu_seconds'])
  print(json.dumps({'benchmark': 'batching', 'task': args.task, 'devices': args.devices, 'mean': args.mean, **sides}))


def deal(config: Config, batch: batching.GenerationBatch, devices: int) -> dict[str, float]:
  """Make every micro-batch of a generation batch, as `step.run_update` does; return the time taken and their fill."""
  student, teacher, micros, spent = step.Filled(), step.Filled(), 0, 0.0
  for samples in batching.mini_batches(batch_spec(config)):
    started = time.process_time()
    for micro in batching.micro_batches(batch, samples, batch_spec(config), devices, config.actor.pack_sequences):
      spent += time.process_time() - started
      student.add(micro, micro.batch.student)
      teacher.add(micro, micro.batch.teacher)
      micros += 1
      started = time.process_time()
    spent += time.process_time() - started
  return {
    'cpu_seconds': round(spent, 3),
    'micro_batches': micros,
    'tokens_of_shapes': student.token_room + teacher.token_room,
    'fill_student': round(student.tokens / student.token_room, 3),
    'fill_teacher': round(teacher.tokens / teacher.token_room, 3),
    'fill_rows': round(student.rows / student.row_room, 3),
  }


def generation_batch(config: Config, mean: float, seed: int = 0) -> batching.GenerationBatch:
  """Return random samples whose lengths have this mean."""
  rng, groups, n = np.random.default_rng(seed), config.data.train_batch_size, config.rollout.n
  count, longest = groups * n, config.data.max_response_length
  lengths = np.clip(rng.lognormal(np.log(mean) - 0.5, 1.0, count).astype(int), 1, longest)
  mask = np.arange(longest) < lengths[:, None]
  tokens = (rng.integers(1, 150_000, mask.shape) * mask).astype(np.int32)
  prompts = [rng.integers(1, 150_000, rng.integers(200, 800)).tolist() for _ in range(groups)]
  shown = rng.integers(0, n, groups) + n * np.arange(groups)  # For each group, the sample that its teacher sees.
  zeros = np.zeros(mask.shape, np.float32)
  rollouts = Rollouts.of_completions(np.repeat(np.arange(groups, dtype=np.int32), n), tokens, mask)
  reprompts = [prompt + tokens[i, : lengths[i]].tolist() for prompt, i in zip(prompts, shown, strict=True)]
  trained = (rng.random(count) < TRAINED).astype(np.float32)
  return batching.GenerationBatch(
    prompts=[prompts[group] for group in rollouts.group],
    teacher_prompts=[reprompts[group] for group in rollouts.group],
    rollouts=rollouts,
    distill_mask=np.repeat(trained[:, None], longest, axis=1),
    old_log_probs=zeros,
    distill_weights=np.ones_like(zeros),
  )


if __name__ == '__main__':
  main()
