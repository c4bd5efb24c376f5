"""The service under load over HTTP, with the quickstart's tiny model: many adapters, concurrent feedback and sampling.

    python -m benchmarks.serve [--adapters=100] [--feedbacks=1000] [--clients=8] [--alone=50] [--url=URL]

A server is started as users start it (`python -m launch.serve --config=configs/serve_quickstart.py`), with its own
root, unless `--url` names one. Each feedback is on a completion that its adapter drew before, and makes a new version
of it. `alone`: milliseconds of a single client from a request to its answer, for feedback and for sampling: the median,
the 95th percentile, and the CPU-milliseconds of the server. `load`: the same for `--clients` concurrent clients, which
draw a completion and give feedback on it in turns, with feedback and completions per second, and the server's memory
after every quarter: its cache of versions is bounded. `score`: bytes of the scores of one long row of a large
vocabulary, in each format. One JSON line each.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import httpx2
import numpy as np

from sdpo_jax.environments import digits
from sdpo_jax.learning.scoring import Scored
from sdpo_jax.serving.web import packed, score_formats

LISTENING = re.compile(r'Listening on (http://[^\s;]+);')  # First line of the server's output.
SCORED_TOKENS, SCORED_K, VOCABULARY = 1024, 100, 151_936


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--adapters', type=int, default=100)
  parser.add_argument('--feedbacks', type=int, default=1000, help='of all clients together')
  parser.add_argument('--clients', type=int, default=8)
  parser.add_argument('--alone', type=int, default=50, help='feedbacks of the one client before')
  parser.add_argument('--url', help='of a service that runs, whose memory and CPU-seconds are then not measured')
  args = parser.parse_args()
  with server(args.url) as (url, process):
    client = Client(url)
    made = [client.create(f'load-{index}-{os.getpid()}') for index in range(args.adapters)]
    print(json.dumps({'alone': alone(client, process, made, args.alone)}), flush=True)
    print(json.dumps({'load': load(url, process, made, args)}), flush=True)
  print(json.dumps({'score': score()}), flush=True)


@contextlib.contextmanager
def server(url: str | None, *settings: str, config: str = 'configs/serve_quickstart.py'):
  """Provide the address and the process id of a service; the id is None if it was started by others."""
  if url is not None:
    yield url, None
    return
  with tempfile.TemporaryDirectory() as folder:
    command = [
      sys.executable,
      '-m',
      'launch.serve',
      f'--config={config}',
      '--config.serve.http.port=0',
    ]
    command += [f'--config.serve.store.root={folder}/root', *settings]
    log = pathlib.Path(folder, 'log')
    with log.open('w') as file, subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT) as process:
      try:
        yield wait_until_ready(process, log), process.pid
      finally:
        process.terminate()


def wait_until_ready(process: subprocess.Popen, log: pathlib.Path) -> str:
  """Return the address of a server when it is ready; raises RuntimeError with its output if it ends before."""
  address = None
  while process.poll() is None:
    address = address or address_in(log.read_text())
    if address is not None:
      with contextlib.suppress(httpx2.TransportError):
        if httpx2.get(f'{address}/readyz').status_code == 200:
          return address
    time.sleep(0.2)
  raise RuntimeError(f'The server ended: {log.read_text()[-2000:]}')


def address_in(said: str) -> str | None:
  """Return the address in a server's output; None until the line is complete."""
  found = LISTENING.search(said)
  return None if found is None else found[1]


class Client:
  """One user of the service."""

  def __init__(self, url: str):
    self._http = httpx2.Client(base_url=url, timeout=120.0)

  def create(self, name: str) -> str:
    return self._send('/v1/continual/adapters', {'name': name})['id']

  def sample(self, adapter: str, prompt: str, seed: int) -> dict[str, Any]:
    body = {'model': adapter, 'messages': [{'role': 'user', 'content': prompt}], 'seed': seed, 'max_tokens': 8}
    return self._send('/v1/continual/completions', body)['completions'][0]

  def correct(self, adapter: str, sample: dict[str, Any], right: str) -> dict[str, Any]:
    wrong = [
      index for index, (one, two) in enumerate(zip(right, sample['text'].ljust(len(right)), strict=False)) if one != two
    ]
    said = ' '.join(f'Digit {index + 1} is wrong: expected {right[index]}.' for index in wrong[:3]) or 'Right.'
    body = {'sample_id': sample['sample_id'], 'feedback': said}
    return self._send(f'/v1/continual/adapters/{adapter}/feedback', body)

  def _send(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = self._http.post(path, json=body)
    if answer.status_code >= 400:
      raise RuntimeError(f'{path}: {answer.status_code} {answer.text[:500]}')
    return answer.json()


def one_turn(client: Client, adapter: str, draw: random.Random) -> tuple[float, float]:
  """Return the seconds of a completion and of the feedback on it."""
  name = draw.choice(list(digits.INSTRUCTIONS))
  numbers = [draw.randrange(10) for _ in range(digits.LENGTH)]
  began = time.perf_counter()
  sample = client.sample(adapter, digits.question(name, numbers), draw.randrange(2**31))
  drawn = time.perf_counter()
  client.correct(adapter, sample, digits.answer(name, numbers))
  return drawn - began, time.perf_counter() - drawn


def alone(client: Client, process: int | None, adapters: list[str], count: int) -> dict[str, Any]:
  """Measure one client with one request at a time."""
  draw, began = random.Random(0), cpu_seconds(process)
  seconds = [one_turn(client, adapters[index % len(adapters)], draw) for index in range(count + 5)][5:]
  spent = cpu_seconds(process)
  drawn, learned = zip(*seconds, strict=True)
  return {
    'feedback_ms': percentiles(learned),
    'completion_ms': percentiles(drawn),
    'server_cpu_ms_of_both': None if spent is None else round(1000 * (spent - began) / (count + 5), 1),
  }


def load(url: str, process: int | None, adapters: list[str], args: argparse.Namespace) -> dict[str, Any]:
  """Measure several clients, each with its own adapters."""
  lock, seconds, memory = threading.Lock(), [], [resident_mib(process)]
  began = time.perf_counter()

  def work(number: int) -> None:
    client, draw = Client(url), random.Random(number)
    own = adapters[number :: args.clients]
    for turn in range(args.feedbacks // args.clients):
      took = one_turn(client, own[turn % len(own)], draw)
      with lock:
        seconds.append(took)
        if len(seconds) * 4 // args.feedbacks >= len(memory):
          memory.append(resident_mib(process))

  with concurrent.futures.ThreadPoolExecutor(args.clients) as pool:
    list(pool.map(work, range(args.clients)))
  whole = time.perf_counter() - began
  drawn, learned = zip(*seconds, strict=True)
  return {
    'clients': args.clients,
    'adapters': len(adapters),
    'feedbacks': len(seconds),
    'feedback_ms': percentiles(learned),
    'completion_ms': percentiles(drawn),
    'feedbacks_per_second': round(len(seconds) / whole, 2),
    'server_mib': memory,
  }


def score() -> dict[str, Any]:
  """Return the bytes of scores in each format, for made-up scores, as only the number of ids and values matters."""
  draw = np.random.default_rng(0)
  shape = SCORED_TOKENS, SCORED_K
  top = -np.sort(draw.exponential(8.0, shape), axis=1).astype(np.float32)
  ids = draw.integers(0, VOCABULARY, shape).astype(np.int32)
  scored = Scored(top[:, 0], -top[:, 1], ids, top)
  tokens = ids[:, 0].tolist()
  sizes = {
    'rows': len(json.dumps(score_formats.as_rows([scored], [tokens], None))),
    'columns': len(json.dumps(score_formats.as_columns([scored]), separators=(',', ':'))),
    'packed': len(packed.pack([scored], VOCABULARY)),
  }
  return {'tokens': SCORED_TOKENS, 'k': SCORED_K, 'vocabulary': VOCABULARY} | sizes


def percentiles(seconds) -> dict[str, float]:
  return {f'p{percent}': round(1000 * float(np.percentile(seconds, percent)), 1) for percent in (50, 95)}


def cpu_seconds(process: int | None) -> float | None:
  """Return the CPU-seconds of a process; None if it is not ours."""
  if process is None:
    return None
  fields = pathlib.Path(f'/proc/{process}/stat').read_text().rpartition(')')[2].split()
  return (int(fields[11]) + int(fields[12])) / os.sysconf('SC_CLK_TCK')


def resident_mib(process: int | None) -> float | None:
  """Return a process's memory in MiB; None if it is not ours."""
  if process is None:
    return None
  [line] = [
    line for line in pathlib.Path(f'/proc/{process}/status').read_text().splitlines() if line.startswith('VmRSS')
  ]
  return round(int(line.split()[1]) / 1024, 1)


if __name__ == '__main__':
  main()
