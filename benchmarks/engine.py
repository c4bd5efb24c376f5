"""The service's engine on the quickstart's tiny model: many adapters in a batch, a feedback, a cold adapter.

    python -m benchmarks.engine [--adapters=8] [--rows=32] [--repeats=9]

`sampling`: tokens per CPU-second of rows that all have the same adapter, of rows with `--adapters` different adapters,
and of rows without an adapter; the same engine, prompts and lengths, in turns. `feedback`: wall and CPU milliseconds
from a request to its new version in host memory, for one completion of 64 tokens: scoring by student and teacher, a
step, and the log-probs afterwards; the median, and the ninth decile of wall time. `loading`: CPU-milliseconds to the
first token from a version that is not on the devices, less those from one that is. `worker`: the same sampling and
feedback through the thread that owns the engine, compared with the bare engine in the same process, in turns. `start`:
CPU-seconds of a process after its imports until all programs are ready, the model is loaded and requests are accepted:
for the first process, which compiles the programs, and for the second, which reads them; `engine` is the part after
loading the model, and `compiled` everything that JAX compiled, including the smallest operations. One core; one JSON
line each.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.rollout import one_core, take_turns

PROMPT, RESPONSE, REPROMPT = 64, 64, 256


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--adapters', type=int, default=8)
  parser.add_argument('--rows', type=int, default=32, help='completions that are decoded at once')
  parser.add_argument('--repeats', type=int, default=9)
  parser.add_argument('--start', type=pathlib.Path, help='of a child process: start with these compiled programs')
  args = parser.parse_args()
  if args.start is not None:
    print(json.dumps(one_start(args)))
    return
  one_core()
  with tempfile.TemporaryDirectory() as folder:
    engine = make_engine(args, pathlib.Path(folder))
    for measure in (sampling, feedback, loading, worker):
      print(json.dumps({'benchmark': f'engine/{measure.__name__}', **measure(engine, args)}), flush=True)
  print(json.dumps({'benchmark': 'engine/start', **start(args)}), flush=True)


def start(args: argparse.Namespace) -> dict[str, Any]:
  """Start two processes that share a folder of compiled programs."""
  with tempfile.TemporaryDirectory() as folder:
    options = [f'--adapters={args.adapters}', f'--rows={args.rows}', f'--start={pathlib.Path(folder) / "programs"}']
    # Only that folder caches compiled programs.
    environment = os.environ | {'JAX_ENABLE_COMPILATION_CACHE': 'false'}
    command = [sys.executable, '-m', 'benchmarks.engine', *options]
    runs = [subprocess.run(command, check=True, capture_output=True, text=True, env=environment) for _ in range(2)]
    return {name: json.loads(run.stdout) for name, run in zip(('first', 'second'), runs, strict=True)}


def one_start(args: argparse.Namespace) -> dict[str, Any]:
  """Return the cost of this process's start."""
  from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401  Imports are not measured.

  from sdpo_jax.configs import quickstart_lora  # noqa: F401
  from sdpo_jax.distributed.programs import noted_compilations
  from sdpo_jax.serving import engine as serving  # noqa: F401
  from sdpo_jax.training import opening  # noqa: F401

  with tempfile.TemporaryDirectory() as folder, noted_compilations() as noted:
    began, in_memory = time.process_time(), []
    engine = make_engine(args, pathlib.Path(folder), args.start, lambda: in_memory.append(time.process_time()))
    engine.compile(lambda line: None)
    ready = time.process_time()
    return {
      'cpu_s': round(ready - began, 2),
      'cpu_s_of_the_engine': round(ready - in_memory[0], 2),
      'programs': len(list(args.start.glob('*.program'))),
      'compiled': len(noted()),
    }


def make_engine(
  args: argparse.Namespace, folder: pathlib.Path, programs: pathlib.Path | None = None, loaded: Any = lambda: None
) -> Any:
  """Return an engine with the quickstart's model and three times as many versions as are sampled at once."""
  import jax
  import numpy as np

  from sdpo_jax.configs import quickstart_lora
  from sdpo_jax.models import parameters
  from sdpo_jax.serving.engine import Engine, EngineSettings
  from sdpo_jax.training.opening import make_session

  config = quickstart_lora.get_config()
  config.model.lora.rank = 16
  session, _ = make_session(config, folder)
  settings = EngineSettings(
    prompt_buckets=(PROMPT,),
    teacher_buckets=(REPROMPT,),
    response_buckets=(RESPONSE,),
    rows=args.rows,
    training_rows=1,
    snapshots=args.adapters,
    teachers=4,
    slots=4,
    topk=100,
    decode_chunk=16,
    kept_prefixes=0,
  )
  loaded()
  engine = Engine(session.policy, session.base, session.tokenizer, settings, folder / 'shelf', programs=programs)
  table, draw = parameters.trainable(session.policy.parameter_table()), np.random.default_rng(0)
  for index in range(3 * args.adapters):
    factors = parameters.map_table(lambda row: np.float32(0.02 * draw.standard_normal(row.shape)), table)
    engine.put(f'{index}@0', factors)
  if jax.default_backend() != 'cpu':
    raise RuntimeError('CPU-seconds are what is compared here.')
  return engine


def sampling(engine: Any, args: argparse.Namespace) -> dict[str, Any]:
  """Compare rows with one adapter, several adapters and none."""
  from sdpo_jax.serving.records import BASE

  def side(versions: list[str]) -> Any:
    def draw(step: int) -> int:
      handles = [
        engine.submit(versions[row % len(versions)], [5 + row] * 40, n=1, seed=row, step=step, max_tokens=RESPONSE)
        for row in range(args.rows)
      ]
      while engine.turn():
        pass
      return sum(len(done.tokens) for handle in handles for done in handle.result())

    return draw

  sides = {
    'several': side([f'{index}@0' for index in range(args.adapters)]),
    'one': side(['0@0']),
    'none': side([BASE]),
  }
  [tokens] = {draw(0) for draw in sides.values()}  # Completions end only by their length.
  rates = {name: tokens / cpu for name, (_, cpu) in take_turns(sides, args.repeats).items()}
  return {
    'adapters': args.adapters,
    'rows': args.rows,
    'tokens_per_cpu_second': {name: round(rate) for name, rate in rates.items()},
    'several_of_one': round(rates['several'] / rates['one'], 3),
    'one_of_none': round(rates['one'] / rates['none'], 3),
  }


def feedback(engine: Any, args: argparse.Namespace) -> dict[str, Any]:
  """Measure a feedback from the request to its new version."""
  import numpy as np

  from sdpo_jax.learning.losses import Sdpo
  from sdpo_jax.learning.requests import Lesson, UpdateOptions
  from sdpo_jax.objective.jsd_pg import JsdPg
  from sdpo_jax.serving.engine import Feedback

  draw = np.random.default_rng(0)
  taken: dict[str, list[tuple[float, float]]] = {}
  for number in range(4 * args.repeats):
    prompt, completion, said = (draw.integers(5, 60, size).tolist() for size in (40, RESPONSE, 80))
    loss = (Sdpo(topk=100), JsdPg())[number % 2]
    request = Feedback(
      f'0@{number}', f'0@{number + 1}', [Lesson(prompt, completion, prompt + said)], UpdateOptions(loss)
    )
    wall, cpu = time.perf_counter(), time.process_time()
    [came] = engine.learn([request])
    taken.setdefault(type(loss).__name__, []).append((time.perf_counter() - wall, time.process_time() - cpu))
    if not came.stepped:
      raise RuntimeError('A step was not taken.')
  found = {}
  for name, values in taken.items():
    walls, cpus = (sorted(1e3 * value for value in column[1:]) for column in zip(*values, strict=True))
    found[name] = {
      'wall_ms_p50': round(statistics.median(walls), 1),
      'wall_ms_p90': round(walls[int(0.9 * len(walls))], 1),
      'cpu_ms_p50': round(statistics.median(cpus), 1),
    }
  return {'completion_tokens': RESPONSE, 'teacher_tokens': REPROMPT + RESPONSE, **found}


def loading(engine: Any, args: argparse.Namespace) -> dict[str, Any]:
  """Return the CPU time to the first token of a version outside the devices, less that of one on them."""

  def first_token(version: str) -> float:
    before = time.process_time()
    handle = engine.submit(version, [7] * 40, n=1, seed=0, step=0, max_tokens=1)
    while engine.turn():
      pass
    handle.result()
    return 1e3 * (time.process_time() - before)

  cold, warm = [], []
  for number in range(2 * args.repeats):
    version = f'{args.adapters + number % (2 * args.adapters)}@0'
    cold.append(first_token(version))
    warm.append(first_token(version))
  return {
    'cpu_ms_cold': round(statistics.median(cold), 1),
    'cpu_ms_warm': round(statistics.median(warm), 1),
    'cpu_ms_of_loading': round(statistics.median(cold) - statistics.median(warm), 1),
  }


def worker(engine: Any, args: argparse.Namespace) -> dict[str, Any]:
  """Compare sampling through the engine's thread with the engine alone."""
  import numpy as np

  from sdpo_jax.learning.requests import Lesson
  from sdpo_jax.serving.engine import Feedback
  from sdpo_jax.serving.worker import Worker

  owner = Worker(lambda: engine, {}.__getitem__, announce=lambda line: None)
  owner.start()
  owner.wait()
  # The bare engine is called while its owner is idle.
  versions = [f'{row % args.adapters}@0' for row in range(args.rows)]

  def options(row: int, step: int) -> dict[str, int]:
    return {'n': 1, 'seed': row, 'step': step, 'max_tokens': RESPONSE}

  def bare(step: int) -> int:
    handles = [engine.submit(version, [5 + row] * 40, **options(row, step)) for row, version in enumerate(versions)]
    while engine.turn():
      pass
    return sum(len(done.tokens) for handle in handles for done in handle.result())

  def owned(step: int) -> int:
    handles = [owner.sample(version, [5 + row] * 40, **options(row, step)) for row, version in enumerate(versions)]
    return sum(len(done.tokens) for handle in handles for done in handle.result())

  sides = {'bare': bare, 'worker': owned}
  [tokens] = {draw(0) for draw in sides.values()}
  rates = {name: tokens / cpu for name, (_, cpu) in take_turns(sides, args.repeats).items()}
  draw = np.random.default_rng(0)
  taken: dict[str, list[float]] = {'bare': [], 'worker': []}
  for number in range(8 * args.repeats):
    name = ('bare', 'worker')[number % 2]
    prompt, completion, said = (draw.integers(5, 60, size).tolist() for size in (40, RESPONSE, 80))
    request = Feedback(f'1@{number}', f'1@{number + 1}', [Lesson(prompt, completion, prompt + said)])
    before = time.process_time()
    if name == 'bare':
      engine.learn([request])
    else:
      owner.learn(request).result()
    taken[name].append(1e3 * (time.process_time() - before))
  owner.stop(0.0)
  milliseconds = {name: statistics.median(values[1:]) for name, values in taken.items()}
  return {
    'tokens_per_cpu_second': {name: round(rate) for name, rate in rates.items()},
    'worker_of_bare': round(rates['worker'] / rates['bare'], 3),
    'cpu_ms_of_a_feedback': {name: round(each, 2) for name, each in milliseconds.items()},
  }


if __name__ == '__main__':
  main()
