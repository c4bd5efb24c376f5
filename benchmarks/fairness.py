"""One tenant floods the service, and another one goes on: latencies of the second, without and with the first.

    python -m benchmarks.fairness [--requests=60] [--flood=200] [--n=128] [--drips=100]

A server of the quickstart's tiny model is started with two keys. The quiet tenant sends `--requests` completions, then
as many feedbacks, one at a time: alone; while the other tenant has `--flood` requests for `--n` completions under way
and `--drips` requests whose bodies arrive a byte every 4 s; and while that one has as many feedbacks under way, on 16
adapters, and the same drips. Those of the flood that are refused come again after `Retry-After`. One JSON line each:
milliseconds, the quiet tenant's refusals, the ratio of its 95th percentile to that alone, and what the flood got done.
`cpu_ms` is what the server has computed until the answer: what others do on the machine matters less to it.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
import contextlib
import json
import multiprocessing
import pathlib
import socket
import tempfile
import time
from typing import Any
import urllib.parse

import httpx2

from benchmarks.serve import percentiles, server
from sdpo_jax.serving.web import keys

ROOT = '/v1/continual'
QUESTION = [{'role': 'user', 'content': 'Rotate the digits left: 40713'}]
DRIP = 4.0  # Seconds between two bytes of a slow body.
ADAPTERS = 16  # Of the flooding tenant.


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--requests', type=int, default=60)
  parser.add_argument('--flood', type=int, default=200)
  parser.add_argument('--n', type=int, default=128)
  parser.add_argument('--drips', type=int, default=100)
  args = parser.parse_args()
  with tempfile.TemporaryDirectory() as folder:
    file = pathlib.Path(folder, 'keys.jsonl')
    loud, quiet = (keys.add(file, owner, 'key')[0] for owner in ('loud', 'quiet'))
    with server(None, f'--config.serve.http.keys={file}') as (url, process):
      for line in measured(url, process, loud, quiet, args):
        print(json.dumps(line), flush=True)


def measured(url: str, process: int, loud: str, quiet: str, args: argparse.Namespace):
  """Yield what was measured of each kind of flood, the first without any."""
  tenant = Tenant(url, quiet, process)
  for _ in range(5):
    tenant.feedback(tenant.completion())
  idle = quiet_tenant(tenant, args.requests)
  yield {'flood': None} | idle
  for kind in ('completions', 'feedbacks'):
    with flooding(url, loud, kind, args) as done:
      found, served = quiet_tenant(tenant, args.requests), done.value
    ratios = {name: round(found[name]['p95'] / idle[name]['p95'], 2) for name in found if name.endswith('_ms')}
    yield {'flood': kind} | found | {'p95_to_idle': ratios, 'flood_done': served}


def quiet_tenant(tenant: Tenant, count: int) -> dict[str, Any]:
  """Return the latencies of completions and of feedbacks, one request at a time."""
  tenant.refused = 0
  drawn = [tenant.timed(tenant.completion) for _ in range(count)]
  learned = [tenant.timed(tenant.feedback, tenant.completion()) for _ in range(count)]
  found = {}
  for name, times in (('completion', drawn), ('feedback', learned)):
    for unit, each in zip(('ms', 'cpu_ms'), zip(*times, strict=True), strict=True):
      found[f'{name}_{unit}'] = percentiles(each)
  return found | {'refused': tenant.refused}


class Tenant:
  """A tenant with one adapter, who counts refusals."""

  def __init__(self, url: str, key: str, process: int):
    self._process = process
    self._http = httpx2.Client(base_url=url, timeout=300.0, headers={'X-API-Key': key})
    self.refused = 0
    self._adapter = self._send(f'{ROOT}/adapters', {'name': 'mine'})['id']

  def completion(self) -> str:
    return self._send(f'{ROOT}/completions', asking(self._adapter, 1))['completions'][0]['sample_id']

  def feedback(self, sample: str) -> None:
    self._send(f'{ROOT}/adapters/{self._adapter}/feedback', wrong(sample))

  def timed(self, ask: Callable[..., Any], *given: Any) -> tuple[float, float]:
    """Return the seconds until the answer, and the seconds that the server has computed meanwhile."""
    began, computed = time.perf_counter(), computed_by(self._process)
    ask(*given)
    return time.perf_counter() - began, computed_by(self._process) - computed

  def _send(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
    while (answer := self._http.post(path, json=body)).status_code == 429:
      self.refused += 1
      time.sleep(float(answer.headers['retry-after']))
    answer.raise_for_status()
    return answer.json()


def computed_by(process: int) -> float:
  """Return the CPU-seconds of a process so far, to the microsecond."""
  return (
    sum(int(file.read_text().split()[0]) for file in pathlib.Path(f'/proc/{process}/task').glob('*/schedstat')) / 1e9
  )


def asking(model: str, n: int) -> dict[str, Any]:
  return {'model': model, 'messages': QUESTION, 'n': n, 'max_tokens': 8}


def wrong(sample: str) -> dict[str, Any]:
  # A small step, so that no guard rejects one of many.
  return {'sample_id': sample, 'feedback': 'Digit 1 is wrong: expected 0, got 3.', 'update': {'learning_rate': 1e-6}}


@contextlib.contextmanager
def flooding(url: str, key: str, kind: str, args: argparse.Namespace):
  """Flood the service from another process; yields a count of the requests that were answered."""
  context = multiprocessing.get_context('spawn')
  done, begun = context.Value('i', 0), context.Event()
  process = context.Process(target=flood, args=(url, key, kind, args, done, begun), daemon=True)
  process.start()
  try:
    if not begun.wait(300):
      raise RuntimeError('The flood did not begin.')
    time.sleep(DRIP)  # Until queues are full.
    yield done
  finally:
    process.terminate()
    process.join()


def flood(url: str, key: str, kind: str, args: argparse.Namespace, done: Any, begun: Any) -> None:
  """Keep requests under way until the process is ended."""

  async def run() -> None:
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=url, timeout=None, headers={'X-API-Key': key}, limits=limits) as client:
      adapters = []
      for number in range(ADAPTERS):
        made = await client.post(f'{ROOT}/adapters', json={'name': f'{kind}-{number}'})
        adapters.append(made.raise_for_status().json()['id'])
      begun.set()
      asking = [one(client, adapters[number % ADAPTERS]) for number in range(args.flood)]
      await asyncio.gather(*asking, *(drip() for _ in range(args.drips)))

  async def one(client: httpx2.AsyncClient, adapter: str) -> None:
    while True:
      drawn = await send(client, f'{ROOT}/completions', asking_of(adapter))
      if kind == 'feedbacks':
        await send(client, f'{ROOT}/adapters/{adapter}/feedback', wrong(drawn['completions'][0]['sample_id']))
      done.value += 1

  def asking_of(adapter: str) -> dict[str, Any]:
    return asking(adapter, args.n if kind == 'completions' else 1)

  async def send(client: httpx2.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    while (answer := await client.post(path, json=body)).status_code == 429:
      await asyncio.sleep(float(answer.headers['retry-after']))
    return answer.raise_for_status().json()

  async def drip() -> None:
    address = urllib.parse.urlsplit(url)
    head = f'POST {ROOT}/completions HTTP/1.1\r\nHost: {address.netloc}\r\nX-API-Key: {key}\r\n'
    head += 'Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n'
    while True:
      _, writer = await asyncio.open_connection(address.hostname, address.port, family=socket.AF_INET)
      with contextlib.suppress(ConnectionError):
        writer.write(head.encode())
        while not writer.is_closing():
          writer.write(b' ')
          await writer.drain()
          await asyncio.sleep(DRIP)

  asyncio.run(run())


if __name__ == '__main__':
  main()
