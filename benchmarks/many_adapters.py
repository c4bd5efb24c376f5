"""Many adapters: creating one, the start, a page of a list, and hot adapters that share the places on the devices.

    python -m benchmarks.many_adapters [--adapters=10000] [--repeats=5] [--before=DIR]

`store`, of a tiny model, in a folder in memory if there is one (`/dev/shm`), once empty and once with `--adapters`:
CPU-milliseconds to create an adapter, as an account does with its limit; wall and CPU-milliseconds to open the store
after an orderly end, and after a process was killed within a change; of the first use of an adapter after that, and of
the comparison of all with the root; milliseconds of a page of 100 adapters. `places`: tokens per CPU-second of the
quickstart's model, through the thread of the engine, when the requests of `--hot` adapters share `--places` places, and
when all are of one adapter; 256 requests wait all the time, of lengths from 8 to 64 tokens. With `--before`, a checkout
of an earlier commit, its numbers are beside ours: each repeat runs in a process for each side, in turns. Medians, as
JSON lines.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import multiprocessing
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
CREATED, USED, WAITING, LENGTHS, ROWS = 40, 100, 256, (8, 64), 32
PARTS = 'store', 'places'


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--adapters', type=int, default=10_000)
  parser.add_argument('--hot', type=int, default=64)
  parser.add_argument('--places', type=int, default=16)
  parser.add_argument('--requests', type=int, default=1024)
  parser.add_argument('--repeats', type=int, default=5)
  parser.add_argument('--before', type=pathlib.Path, help='a checkout to compare with')
  parser.add_argument('--part', choices=PARTS, help='of a child process')
  parser.add_argument('--folder', type=pathlib.Path, help='likewise: the stores')
  args = parser.parse_args()
  if args.part is not None:
    print(json.dumps({'store': store, 'places': places}[args.part](args)))
    return
  memory = pathlib.Path('/dev/shm')
  with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
    for part in PARTS:
      found: dict[str, dict[str, list[float]]] = collections.defaultdict(lambda: collections.defaultdict(list))
      for _ in range(args.repeats):
        for name, checkout in {'now': ROOT, 'before': args.before}.items():
          if checkout is not None:
            for key, value in of_side(part, checkout, pathlib.Path(folder, name), args).items():
              found[name][key].append(value)
      medians = {
        name: {key: float(f'{statistics.median(values):.4g}') for key, values in side.items()}
        for name, side in found.items()
      }
      print(json.dumps({'benchmark': f'many_adapters/{part}', **told(part, args), **medians}), flush=True)


def told(part: str, args: argparse.Namespace) -> dict[str, int]:
  names = ('adapters',) if part == 'store' else ('hot', 'places', 'requests')
  return {name: getattr(args, name) for name in names}


def of_side(part: str, checkout: pathlib.Path, folder: pathlib.Path, args: argparse.Namespace) -> dict[str, float]:
  """Run this file with the code of a checkout, in a process of its own."""
  options = [f'--{name}={value}' for name, value in told(part, args).items()]
  command = [sys.executable, __file__, f'--part={part}', f'--folder={folder}', *options]
  environment = os.environ | {'PYTHONPATH': str(checkout), 'JAX_PLATFORMS': 'cpu'}
  ran = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, cwd=checkout)
  return json.loads(ran.stdout.splitlines()[-1])


def store(args: argparse.Namespace) -> dict[str, float]:
  """Measure an empty store and one with many adapters."""
  from tests.serving.store.store_cases import arrays, open_store

  found: dict[str, float] = {}
  with open_store(args.folder) as opened:  # Kept by the first repeat for the others.
    for number in range(len(opened.adapters('ada')), args.adapters):
      opened.create('ada', f'a{number}', {}, arrays(0))
  with tempfile.TemporaryDirectory(dir=args.folder.parent) as empty:
    for size, folder in (('empty', pathlib.Path(empty)), ('full', args.folder)):
      with open_store(folder):
        pass
      with taking(found, f'start_{size}'):
        opened = open_store(folder)
      with opened:
        with taking(found, f'page_{size}'):
          paged(opened)
        made = [f'new-{number}' for number in range(CREATED)]
        with taking(found, f'create_{size}', CREATED):
          ids = [created(opened, name, arrays(0)) for name in made]
        for id in ids:
          opened.delete('ada', id)
      child = multiprocessing.get_context('spawn').Process(target=die, args=(folder,))
      child.start()
      child.join()
      with taking(found, f'start_{size}_after_a_kill'):
        opened = open_store(folder)
      with opened:
        used = opened.adapters('ada', limit=USED)
        with taking(found, f'first_use_{size}', len(used)):
          for adapter in used:
            opened.adapter('ada', adapter.id)
        with taking(found, f'comparison_{size}'):
          opened.retain()
        opened.delete('ada', opened.by_name('ada', 'killed').id)
  return found


def die(folder: pathlib.Path) -> None:
  """Open a store, and be killed while an adapter is changed that was created."""
  from sdpo_jax.serving.store.blobs import LocalBlobs
  from tests.serving.store.store_cases import arrays, open_store

  opened = open_store(folder)
  adapter, _ = opened.create('ada', 'killed', {}, arrays(0))
  LocalBlobs.swap = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
  opened.commit('ada', adapter.id, 0, arrays(1), reason='feedback', details={})


@contextlib.contextmanager
def taking(found: dict[str, float], name: str, count: int = 1):
  """Note the milliseconds that the block takes, over `count`."""
  wall, cpu = time.perf_counter(), time.process_time()
  yield
  found[f'{name}_ms'] = 1e3 * (time.perf_counter() - wall) / count
  found[f'{name}_cpu_ms'] = 1e3 * (time.process_time() - cpu) / count


def created(opened: Any, name: str, values: Any) -> str:
  """Create an adapter as an account does; earlier checkouts counted by reading all of them."""
  opened.count('ada') if hasattr(opened, 'count') else len(opened.adapters('ada'))
  return opened.create('ada', name, {}, values)[0].id


def paged(opened: Any) -> None:
  """Read 100 adapters; earlier checkouts had no pages."""
  if hasattr(opened, 'count'):
    opened.adapters('ada', limit=100)
  else:
    opened.adapters('ada')


def places(args: argparse.Namespace) -> dict[str, float]:
  """Measure requests of many adapters and of one, in turns."""
  from benchmarks.rollout import one_core

  one_core()
  from benchmarks import engine as engines
  from sdpo_jax.serving.worker import Worker

  with tempfile.TemporaryDirectory() as folder:
    # Makes three times as many versions as places.
    settings = argparse.Namespace(adapters=args.places, rows=ROWS)
    engine = engines.make_engine(settings, pathlib.Path(folder))
    for number in range(3 * args.places, args.hot):
      engine.put(f'{number}@0', engine.factors(f'{number % args.places}@0'))
    owner = Worker(lambda: engine, {}.__getitem__, announce=lambda line: None, max_waiting=WAITING)
    owner.start()
    owner.wait()

    def rate(adapters: int, turn: int) -> float:
      draw, jobs, tokens, began = random.Random(turn), collections.deque(), 0, time.process_time()
      for number in range(args.requests):
        if len(jobs) == WAITING:
          tokens += sum(len(done.tokens) for done in jobs.popleft().result())
        prompt = [5 + number % 50] * 20 + [5 + number // 50] * 20  # Every one another.
        options = {'n': 1, 'seed': number, 'step': turn, 'max_tokens': draw.randint(*LENGTHS)}
        jobs.append(owner.sample(f'{draw.randrange(adapters)}@0', prompt, **options))
      tokens += sum(len(done.tokens) for job in jobs for done in job.result())
      return tokens / (time.process_time() - began)

    for adapters in (1, args.hot):  # Compiles.
      rate(adapters, 0)
    one, many = zip(*((rate(1, turn), rate(args.hot, turn)) for turn in (1, 2, 3)), strict=True)
    owner.stop(0.0)
  one, many = statistics.median(one), statistics.median(many)
  return {'tokens_per_cpu_second_of_one': one, 'tokens_per_cpu_second_of_many': many, 'many_of_one': many / one}


if __name__ == '__main__':
  main()
