"""Batches whose graders hang now and then, and what is left of them in the trainer's process.

  python -m benchmarks.hanging_graders   # 1,000 batches, 1 % of which hang, in about a minute
  python -m benchmarks.hanging_graders --batches=100 --hangs=0.1 --seed=1

Hanging batches sleep, search with a catastrophic regular expression, or compare long texts by `difflib` as LongHealth's
reference profile does. Prints one line of JSON: the most threads, descriptors and processes above those after the first
batch; the longest time for which the interpreter did not let another thread run, not counting time in which this
process had no processor; milliseconds of the median batch; and wrong outcomes. Exit code 1 if one is beyond its bound.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import random
import statistics
import sys
import tempfile
import threading
import time

from sdpo_jax.config import EnvironmentsConfig
from sdpo_jax.environments.grading import Graders
from sdpo_jax.types import Example

BOUNDS = {'threads': 2, 'descriptors': 2, 'processes': 2, 'held_s': 0.1, 'wrong': 0}
COMPLETIONS = 8
LIMIT_S = 0.5  # Far more than an honest call takes.
GRADER = """
import re
import time


def sometimes(completions, **columns):
  for text in completions:
    if text == 'sleep':
      time.sleep(3600)
    elif text == 'expression':
      re.match('(a+)+$', 'a' * 60 + 'b')
  return [float(len(text)) for text in completions]
"""
HONEST = '<answer>no</answer>'
HANGS = ('sleep', 'expression', f'<answer>{"a" * 300_000}</answer>')


class Ticker(threading.Thread):
  """Runs every millisecond, and measures for how long it could not although the process computed."""

  def __init__(self):
    super().__init__(daemon=True)
    self.longest_s = 0.0
    self.done = threading.Event()

  def run(self) -> None:
    at, spent = time.monotonic(), time.process_time()
    while not self.done.wait(0.001):
      now, computed = time.monotonic(), time.process_time()
      self.longest_s = max(self.longest_s, min(now - at - 0.001, computed - spent))
      at, spent = now, computed


def counts() -> dict[str, int]:
  """Return the threads and descriptors of this process and the processes that it has started."""
  children = 0
  for thread in os.listdir('/proc/self/task'):
    with contextlib.suppress(OSError):  # It has just ended.
      children += len(pathlib.Path(f'/proc/self/task/{thread}/children').read_text().split())
  return {
    'threads': threading.active_count(),
    'descriptors': len(os.listdir('/proc/self/fd')),
    'processes': children,
  }


def measure(batches: int, hangs: float, seed: int) -> dict[str, float]:
  """Grade batches and return what is above its beginning, and for how long the interpreter was held."""
  draw = random.Random(seed)
  hanging = draw.sample(range(1, batches), round(batches * hangs))
  choices = {'choices': ['a' * 199, 'no', 'yes']}
  seconds, most, wrong = [], dict.fromkeys(counts(), 0), 0
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / 'graders.py'
    path.write_text(GRADER)
    settings = EnvironmentsConfig(modules=(str(path),), profile='reference', grader_timeout_s=LIMIT_S)
    ticker = Ticker()
    with Graders(settings) as graders:
      for batch in range(batches):
        environments = ['sometimes', 'longhealth'] * (COMPLETIONS // 2)
        examples = [Example('q', [], name, 'no', 'x', columns={**choices, 'prompt': 'Q'}) for name in environments]
        texts = ['' if name == 'sometimes' else HONEST for name in environments]
        if batch in hanging:
          text = HANGS[hanging.index(batch) % len(HANGS)]
          row = 2 * draw.randrange(COMPLETIONS // 2) + ('<' in text)
          texts[row] = text
        begun = time.monotonic()
        outcomes = graders.grade(examples, texts, truncated=[False] * COMPLETIONS)
        seconds.append(time.monotonic() - begun)
        expected = [None if text in HANGS else float(text == HONEST) for text in texts]
        wrong += [outcome.score for outcome in outcomes] != expected
        if batch == 0:
          ticker.start()
          start = counts()  # With the processes of both graders.
        most = {name: max(most[name], count - start[name]) for name, count in counts().items()}
      ticker.done.set()
      ticker.join()
  found = {**most, 'held_s': round(ticker.longest_s, 4), 'wrong': wrong}
  return {'batches': batches, 'hung': len(hanging), 'batch_ms': round(1e3 * statistics.median(seconds), 2), **found}


def main() -> None:
  """Parse the flags, measure and print."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--batches', type=int, default=1000)
  parser.add_argument('--hangs', type=float, default=0.01, help='fraction of batches in which a call hangs')
  parser.add_argument('--seed', type=int, default=0)
  flags = parser.parse_args()
  found = measure(flags.batches, flags.hangs, flags.seed)
  print(json.dumps(found))
  sys.exit(any(found[name] > bound for name, bound in BOUNDS.items()))


if __name__ == '__main__':
  main()
