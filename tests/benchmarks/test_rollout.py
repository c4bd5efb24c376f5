"""The rollout benchmark: its lengths, the least memory they need, and that all sides that are here answer."""

import json
import os
from pathlib import Path
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import rollout


def test_long_tail_has_the_mean_and_the_bounds_that_it_says():
  lengths = rollout.long_tail(np.random.default_rng(0), 100_000, 1024)
  assert min(lengths) >= 1 and max(lengths) == 1024
  # Cutting at the longest takes 4 % off a mean of an eighth of it.
  assert np.mean(lengths) == pytest.approx(128 * 0.96, rel=0.03)
  logarithms = np.log([length for length in lengths if length < 1024])
  assert np.std(logarithms) == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize('slots', [1, 3, 8, 40])
def test_most_alive_is_what_stepping_through_finds(slots):
  rng = np.random.default_rng(slots)
  lengths, prompt = rng.integers(1, 30, 40).tolist(), 5
  queue, running, most = list(lengths), [], 0
  while queue or running:
    while queue and len(running) < slots:
      running.append([0, queue.pop(0)])
    # A step caches the prompt and every token drawn before.
    most = max(most, sum(prompt + drawn for drawn, _ in running))
    running = [[drawn + 1, length] for drawn, length in running if drawn + 1 < length]
  assert rollout.most_alive(lengths, slots, prompt) == most


@pytest.mark.slow
def test_all_sides_that_are_here_print_a_line_a_setting():
  """This checkout stands in for the older one."""
  root = Path(rollout.__file__).parents[1]
  command = [sys.executable, '-m', 'benchmarks.rollout', '--model=tiny', '--settings=greedy,long_tail', '--prompts=2']
  command += ['--n=2', '--prompt_length=8', '--new_tokens=4', '--samples=8', '--slots=4', '--longest=32']
  environment = os.environ | {'XLA_FLAGS': ''}
  done = subprocess.run(
    [*command, '--repeats=1', f'--spine={root}'], cwd=root, env=environment, capture_output=True, text=True, check=True
  )
  greedy, tail = map(json.loads, done.stdout.splitlines())
  assert greedy['same_greedy_tokens'] == {'transformers': True, 'spine': True}
  assert greedy['new_tokens'] == 16 and tail['longest'] <= 32 and tail['rows'] == 4
  for line in (greedy, tail):
    assert set(line['sides']) == {'sdpo_jax', 'transformers', 'spine'} and line['left_out'] == ['tunix']
    assert all(side['cache_mib'] >= 0 < side['tokens_per_cpu_s'] for side in line['sides'].values())
