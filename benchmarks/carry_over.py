"""What it costs that every batch waits for its longest sample: row-steps and CPU-seconds per token, carried or not.

    python -m benchmarks.carry_over [--staleness=0,4] [--batches=12] [--longest=512]

The random Qwen3 of `benchmarks.rollout` draws batches of 8 × 8 completions in 64 slots, each as long as its own
maximum, log-normal with sigma 1 and a mean of an eighth of `--longest`. With `rollout.max_staleness` its slots stay
open across steps; every step computes the keys and values of unfinished samples again, as after an update. Both sides
draw the same samples with one thread on one core. The first batches, until the schedule is steady, and the last ones,
which drain, are left out. A JSON line for every staleness: row-steps per token (rows of the decode loop × steps ÷
tokens drawn), the share of rows that draw, tokens per CPU-second, recomputed tokens per token, realised staleness, and
row-steps and speed relative to the first.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
import dataclasses
import json
import pathlib
import tempfile
from typing import Any

from benchmarks.rollout import MODELS, long_tail, one_core

GROUPS, SAMPLES = 8, 8
PROMPTS = 32, 128  # Buckets, as many as the recipes have.


def main() -> None:
  """Print a JSON line for every staleness."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--staleness', default='0,4', help='values of rollout.max_staleness')
  parser.add_argument('--batches', type=int, default=12, help='batches that are measured')
  parser.add_argument('--longest', type=int, default=512, help='longest completion')
  args = parser.parse_args()
  one_core()
  with tempfile.TemporaryDirectory() as folder:
    without: dict[str, float] | None = None
    for most in map(int, args.staleness.split(',')):
      found = measure(pathlib.Path(folder), most, args.batches, args.longest)
      without = without or found
      less = without['row_steps_per_token'] / found['row_steps_per_token']
      faster = found['tokens_per_cpu_s'] / without['tokens_per_cpu_s']
      print(json.dumps({'max_staleness': most, **found, 'fewer_row_steps': less, 'faster': faster}), flush=True)


def measure(folder: pathlib.Path, most: int, batches: int, longest: int) -> dict[str, float]:
  """Return the costs of some batches after the first ones."""
  import numpy as np

  from benchmarks.rollout_sides import timed

  first = 2 * most + 1
  config = config_of(folder, longest, most, first + batches + most)
  lengths = long_tail(np.random.default_rng(0), (first + batches + most) * GROUPS * SAMPLES, longest)
  steps = drawn_carried(config, folder, lengths) if most else drawn_alone(config, folder, lengths)
  for _ in range(first):
    next(steps)
  found: list[Any] = []
  _, cpu_s = timed(lambda: [found.append(next(steps)) for _ in range(batches)])
  steps.close()
  stats, ages = [each[0] for each in found], np.concatenate([each[1] for each in found])
  tokens = sum(each.tokens for each in stats)
  return {
    'row_steps_per_token': sum(each.row_steps for each in stats) / tokens,
    'live': sum(each.live_row_steps for each in stats) / sum(each.row_steps for each in stats),
    'decode_steps_per_batch': sum(each.decode_steps for each in stats) / batches,
    'tokens_per_cpu_s': tokens / cpu_s,
    'recomputed_per_token': sum(each.recomputed for each in stats) / tokens,
    'staleness_mean': float(ages.mean()),
    'staleness_max': int(ages.max()),
  }


def config_of(folder: pathlib.Path, longest: int, most: int, steps: int) -> Any:
  """Return the settings of a run of `steps` steps."""
  from tests import tiny

  if not (folder / 'model').exists():
    tiny.make_model(folder / 'model', **MODELS['small'])
    (folder / 'tiny_config.py').write_text(tiny.CONFIG.replace('{model!r}', repr(str(folder / 'model'))))
  made: dict[str, Any] = {}
  exec((folder / 'tiny_config.py').read_text(), made)
  config = made['get_config']()
  config.data.train_batch_size, config.rollout.n, config.rollout.max_batch_rows = GROUPS, SAMPLES, GROUPS * SAMPLES
  config.actor.ppo_mini_batch_size = GROUPS
  config.data.max_prompt_length, config.data.prompt_buckets = PROMPTS[-1], PROMPTS
  config.data.max_response_length, config.data.response_buckets = longest, (longest,)
  config.rollout.max_staleness, config.trainer.total_training_steps, config.trainer.test_freq = most, steps, 0
  config.trainer.val_before_train = True
  return config.validate()


def drawn_alone(config: Any, folder: pathlib.Path, lengths: list[int]) -> Iterator[tuple[Any, Any]]:
  """Yield the statistics of batches that wait for their longest sample, and the staleness of their samples."""
  import numpy as np

  from sdpo_jax.data.prompts import prompt_tokens
  from sdpo_jax.training.opening import load_tokenizer, make_session
  from sdpo_jax.training.questions import training_questions
  from sdpo_jax.training.specs import prompt_spec

  tokenizer = load_tokenizer(config)
  session, parameters = make_session(config, folder, tokenizer)
  questions, size = training_questions(config, tokenizer), GROUPS * SAMPLES
  for step, examples in enumerate(questions, 1):
    prompts = [prompt_tokens(tokenizer, example, prompt_spec(config)) for example in examples]
    most = lengths[(step - 1) * size : step * size]
    session.sampler.sample(session.base, parameters, prompts, n=SAMPLES, seed=0, step=step, max_tokens=most)
    yield session.sampler.stats, np.zeros(size)


def drawn_carried(config: Any, folder: pathlib.Path, lengths: list[int]) -> Iterator[tuple[Any, Any]]:
  """Yield the same of batches whose samples carry over."""
  import numpy as np

  from sdpo_jax.distributed.stopping import NEVER
  from sdpo_jax.environments.grading import Graders
  from sdpo_jax.learning.update import place_state
  from sdpo_jax.training import carry_over
  from sdpo_jax.training.opening import load_tokenizer, make_session
  from sdpo_jax.training.questions import training_questions
  from sdpo_jax.training.specs import update_spec
  from sdpo_jax.training.step import Timer

  class OfLengths(carry_over.CarryOver):
    """Groups whose samples have lengths of their own."""

    def _request(self, number: int, prompt: Any) -> Any:
      samples = super()._request(number, prompt)
      own = np.asarray(lengths[number * SAMPLES : (number + 1) * SAMPLES], np.int32)
      return dataclasses.replace(samples, knobs={**samples.knobs, 'max_tokens': own})

  tokenizer = load_tokenizer(config)
  session, parameters = make_session(config, folder, tokenizer)
  table = session.policy.parameter_table()
  state = place_state(update_spec(config), parameters, session.mesh, table)
  with Graders(config.environments) as graders:
    open_groups = OfLengths(session, graders, training_questions(config, tokenizer), 0, NEVER, 0)
    try:
      for step in range(1, config.trainer.total_training_steps + 1):
        graded = open_groups.draw(state, step, Timer()).graded
        yield graded.sampling, step - 1 - np.array([each[0][0] for each in graded.drawn_by])
    finally:
      open_groups.close()


if __name__ == '__main__':
  main()
