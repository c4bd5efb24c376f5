"""How many replicas a load needs, and what saturates first: a simulation of queues, with measured costs per request.

    python -m benchmarks.replica_load --measure     # First measures, on this machine, what requests cost
    python -m benchmarks.replica_load [--rate=10000] [--feedback_share=0.05] [--tokens=50000] [--database_per_s=…]

`--measure` starts PostgreSQL, an S3 server and one replica of the tests' tiny model, and asks it one request at a time:
CPU-milliseconds of the server per read, undo, completion of 8 tokens and feedback, and transactions of the database for
each (`pg_stat_database`). The CPU time of the last two has the engine's work in it, which an accelerator would do; so a
completion is taken for a read, plus `--tokenizing_ms`, and a feedback for an undo. Then 8 threads do what a completion
does to the database, for 3 s. One JSON line: `measured`.

The simulation: requests come at random (Poisson), a share of them feedback, the others completions of `--tokens_each`
tokens, each at a random replica, which forwards feedback on adapters of others. In this order they queue for
the CPU of their replica (one interpreter), the database, which all share, and the engine of their replica (`--tokens`
per second; a feedback takes as long as 4 completions), and a feedback waits for 3 puts and a get of the bucket, which
has no queue. One JSON line for the fewest replicas of which no CPU and no engine is more than `--most` busy: how busy
each resource is, milliseconds in all, and what saturates first. If that is the database, whose queue then grows as long
as the load lasts, another line for one that does enough transactions.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
import contextlib
import json
import math
import os
import pathlib
import sys
import tempfile
import time
from typing import Any

import httpx2
import numpy as np

from benchmarks import replicas
from benchmarks.serve import cpu_seconds

# By default, as `--measure` has found them on two cores.
COSTS = {
  'read_cpu_ms': 3.7,
  'completion_cpu_ms': 4.2,
  'feedback_cpu_ms': 11.3,
  'completion_transactions': 2.2,
  'feedback_transactions': 19.0,
  'database_per_s': 2874.0,
}
SECONDS = 10.0  # Of the simulated load.
FEEDBACK_TOKENS = 4  # A feedback costs an engine what so many completions do: drawn once, scored, learned.
BUCKET_CALLS = 4  # One after the other, in a feedback: HEAD is read, then files, manifest and HEAD are put.


def queue(arrivals: np.ndarray, services: np.ndarray) -> np.ndarray:
  """Return when requests leave a server that takes them one at a time, first come, first served."""
  order = np.argsort(arrivals, kind='stable')
  came, done = arrivals[order], np.cumsum(services[order])
  left = np.empty_like(arrivals)
  left[order] = done + np.maximum.accumulate(came - done + services[order])
  return left


def simulate(count: int, args: argparse.Namespace) -> dict[str, object]:
  """Simulate the load over so many replicas."""
  draw = np.random.default_rng(args.seed)
  requests = draw.poisson(args.rate * SECONDS)
  began = np.sort(draw.uniform(0, SECONDS, requests))
  feedback, replica = draw.random(requests) < args.feedback_share, draw.integers(count, size=requests)
  holder = np.where(feedback, draw.integers(count, size=requests), replica)
  cpu = np.where(feedback, args.feedback_cpu_ms, args.completion_cpu_ms) / 1e3
  forwards = (holder != replica) * args.read_cpu_ms / 1e3
  database = np.where(feedback, args.feedback_transactions, args.completion_transactions) / args.database_per_s
  engine = np.where(feedback, FEEDBACK_TOKENS, 1) * args.tokens_each / args.tokens
  at = began.copy()
  busy = {'cpu': 0.0, 'engine': 0.0}
  for number in range(count):
    mine = replica == number
    at[mine] = queue(at[mine], forwards[mine])
  for number in range(count):
    mine = holder == number
    at[mine] = queue(at[mine], cpu[mine])
    spent = cpu[mine].sum() + forwards[replica == number].sum()
    busy['cpu'] = max(busy['cpu'], spent / SECONDS)
  at = queue(at, database)
  for number in range(count):
    mine = holder == number
    at[mine] = queue(at[mine], engine[mine])
    busy['engine'] = max(busy['engine'], engine[mine].sum() / SECONDS)
  at += feedback * BUCKET_CALLS * draw.uniform(*args.bucket_ms, size=requests) / 1e3
  took = 1e3 * (at - began)
  busy['database'] = database.sum() / SECONDS
  said: dict[str, object] = {
    'replicas': count,
    'database_per_s': round(args.database_per_s),
    'busy': {name: round(float(each), 2) for name, each in busy.items()},
    'first': max(busy, key=lambda name: busy[name]),
  }
  for name, chosen in (('completion', ~feedback), ('feedback', feedback)):
    if not chosen.any():
      continue
    said[f'{name}_ms'] = {f'p{each}': round(float(np.percentile(took[chosen], each)), 1) for each in (50, 95)}
  return said


def measure(args: argparse.Namespace) -> dict[str, float]:
  """Measure what requests cost, and how many transactions the database does."""
  import psycopg

  found: dict[str, float] = {}
  with contextlib.ExitStack() as stack:
    folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix='load')))
    [replica], _, database = stack.enter_context(replicas.service(folder, 1, 'own'))
    connection = stack.enter_context(psycopg.connect(database, autocommit=True))
    client = replicas.Client('one', [replica], replicas.Ledger(), args.seed)
    adapter = client.create('measured')
    kinds = {
      'read': lambda: httpx2.get(f'{replica.url}{replicas.ROOT}/adapters/{adapter}').raise_for_status(),
      'undo': lambda: client.undo(adapter),
      'completion': lambda: client.sample(adapter),
      'feedback': lambda: client.feedback(adapter),
    }
    client.repeats = 0.0
    for name, ask in kinds.items():
      ask()
      before, cpu = transactions(connection), cpu_seconds(replica.process.pid)
      for _ in range(args.asked):
        ask()
      found[f'{name}_cpu_ms'] = round(1e3 * (cpu_seconds(replica.process.pid) - cpu) / args.asked, 1)
      # Those of renewals and of this loop are among them: less than one.
      found[f'{name}_transactions'] = round((transactions(connection) - before) / args.asked, 1)
    found['database_per_s'] = round(throughput(database, adapter))
  found['cores'], found['load'] = os.cpu_count() or 1, round(os.getloadavg()[0], 1)
  return found


def transactions(connection: Any) -> int:
  """Return how many transactions were committed, once no process holds back its counts, which takes about a second."""
  time.sleep(1.5)
  query = 'SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()'
  return connection.execute(query).fetchone()[0]


def throughput(url: str, adapter: str, seconds: float = 3.0, threads: int = 8) -> float:
  """Return the transactions per second of threads that read an adapter and its newest version, and store a sample."""
  from sdpo_jax.serving.store.connections import PostgresConnections
  from sdpo_jax.serving.store.database import Database

  database = Database(PostgresConnections(url, 'serve.store.database'), is_new=False)
  until = time.monotonic() + seconds

  def run(number: int) -> int:
    done = 0
    while time.monotonic() < until:
      database.known(adapter)
      database.version(adapter, 0)
      with database.writing() as rows:
        database.is_there(rows, adapter, 'local')
      done += 3
    return done

  with contextlib.closing(database), ThreadPoolExecutor(threads) as pool:
    return sum(pool.map(run, range(threads))) / seconds


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--measure', action='store_true')
  parser.add_argument('--asked', type=int, default=30, help='requests of each kind that are measured')
  parser.add_argument('--rate', type=float, default=10_000.0, help='requests per second')
  parser.add_argument('--feedback_share', type=float, default=0.05)
  parser.add_argument('--tokens_each', type=float, default=100.0, help='of a completion')
  parser.add_argument('--tokens', type=float, default=50_000.0, help='per second, of one engine')
  parser.add_argument('--tokenizing_ms', type=float, default=0.5, help="a completion's tokenizing, beside a read")
  parser.add_argument('--bucket_ms', type=float, nargs=2, default=(20.0, 50.0), help='of a call, from and to')
  parser.add_argument('--most', type=float, default=0.8, help='how busy a resource may be')
  parser.add_argument('--seed', type=int, default=0)
  for name, value in COSTS.items():
    parser.add_argument(f'--{name}', type=float, default=value)
  args = parser.parse_args()
  if args.measure:
    found = measure(args)
    print(json.dumps({'measured': found}), flush=True)
    for name in COSTS.keys() & found.keys():
      setattr(args, name, found[name])
    args.completion_cpu_ms, args.feedback_cpu_ms = found['read_cpu_ms'] + args.tokenizing_ms, found['undo_cpu_ms']
  count, said = 1, simulate(1, args)
  while (most := max(said['busy']['cpu'], said['busy']['engine'])) > args.most:
    count = max(count + 1, math.ceil(count * most / args.most))
    said = simulate(count, args)
  print(json.dumps({'load': said}), flush=True)
  needed = said['busy']['database'] * args.database_per_s / args.most
  if needed > args.database_per_s:
    args.database_per_s = round(needed)
    print(json.dumps({'load': simulate(count, args)}), flush=True)
  return 0


if __name__ == '__main__':
  sys.exit(main())
