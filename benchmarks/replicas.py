"""Replicas of the service over PostgreSQL and a bucket, while they are killed and paused and the database is stopped.

    python -m benchmarks.replicas [--minutes=20] [--replicas=3] [--clients=8] [--seed=0] [--bucket=own|moto]
    python -m benchmarks.replicas --replicas=2 --torments=kill,pause

Starts a PostgreSQL, a server that speaks S3, and replicas as users start them, with the tests' tiny model. Clients
create adapters, give feedback, undo, change settings, sample and hold sessions, each request at a random replica, on
adapters of their own and on shared ones; what fails with 503, or is not answered, is sent again with its
Idempotency-Key. All the while, a random replica gets SIGKILL or drains after SIGTERM and is started again, or gets
SIGSTOP and 2 to 20 s later SIGCONT, or PostgreSQL crashes for a few seconds. Once a replica is hit, adapters that it
held are undone elsewhere: `takeover_s` is the time until that is acknowledged.

One JSON line each: `torments`, and the machine's load; `asked`, answers by kind of request, and by code those that were
sent again; `takeover_s`; and `found`, at the end:

- `lost`: acknowledged changes that a replica does not have with what was acknowledged;
- `doubled`: versions of one idempotency key beyond the first, or that nobody has asked for;
- `gaps`: numbers that are missing; `different`: answers in which replicas differ;
- `refused`: requests that were refused for good, though nothing was wrong with them;
- `ended`: replicas that have ended by themselves, and are started again for the audit;
- `unknown`: requests without an answer.

Exit code 1 if one of these but the last is not 0, or a takeover took longer than 10 s.
"""

from __future__ import annotations

import argparse
import collections
from collections.abc import Iterator, Mapping
from concurrent import futures
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import httpx2
import numpy as np

from sdpo_jax.serving.errors import StorageFailed
from sdpo_jax.serving.store import versions
from sdpo_jax.serving.store.blobs import RemoteBlobs
from sdpo_jax.serving.web.gate import LOCAL_OWNER
from tests import compiling, local_server, tiny
from tests.serving import service_world
from tests.serving.store import postgres

ROOT = '/v1/continual'
BAR = 10.0  # Seconds within which what a replica held is changed elsewhere.
SIGNALS = {'kill': signal.SIGKILL, 'drain': signal.SIGTERM, 'pause': signal.SIGSTOP}
PROBES = 3  # Adapters of a replica that was hit, whose takeover is measured.
PATIENCE_S = 15.0  # Seconds after which a client asks elsewhere.
LONGEST_S = 120.0  # Seconds after which it gives a request up.
START_S = 600.0
AGAIN = {'in_flight', 'version_conflict', 'busy', 'deadline', 'cancelled'}  # Codes beside 503 to try again after.
# Refusals that a crash may cause: unacknowledged samples, which are not flushed, and turns that were made unanswered.
MAY_BE = {'sample', 'turn_conflict'}
CONFIG = """
import pathlib
from tests.serving import service_world

def get_config():
  config = service_world.make_config(pathlib.Path({model!r}), pathlib.Path('unused'))
  config.serve.store.root, config.serve.store.database = 's3://bucket/x', {database!r}
  config.serve.store.keep_versions = 0  # Every version is looked at in the end.
  config.serve.programs = {programs!r}
  config.serve.http.drain_s = 5.0
  return config
"""
HELLO = [{'role': 'user', 'content': 'Hi'}]


@dataclasses.dataclass
class Replica:
  """A process of the service, which is started again at the same port."""

  config: pathlib.Path
  environment: Mapping[str, str]
  log: pathlib.Path
  port: int = 0  # Chosen at the first start.
  well: bool = False  # Whether it is neither killed nor paused, and ready.
  process: subprocess.Popen | None = None

  @property
  def url(self) -> str:
    return f'http://127.0.0.1:{self.port}'

  def start(self) -> None:
    """Start it, again if it ends since the database is down, and wait until it is ready."""
    until = time.monotonic() + START_S
    self.port = self.port or local_server.free_port()
    self._run()
    while True:
      with contextlib.suppress(httpx2.HTTPError):
        if httpx2.get(f'{self.url}/readyz', timeout=5.0).status_code == 200:
          break
      if time.monotonic() > until:
        raise RuntimeError(f'A replica does not start: {self.log.read_text()[-3000:]}')
      if self.process.poll() is not None:
        self._run()
      time.sleep(0.1)
    self.well = True

  def _run(self) -> None:
    command = [sys.executable, '-m', 'launch.serve', f'--config={self.config}', f'--config.serve.http.port={self.port}']
    with self.log.open('a') as log:
      self.process = subprocess.Popen(
        [*command, f'--config.serve.http.url={self.url}'],
        stdout=log,
        stderr=log,
        cwd=tiny.REPOSITORY,
        env=self.environment,
      )

  def hit(self, number: signal.Signals) -> None:
    """Send a signal, after which it does not answer."""
    self.well = False
    self.process.send_signal(number)

  def revive(self) -> str:
    """Start it again if it has ended by itself; return what it said last, if so."""
    if (code := self.process.poll()) is None:
      return ''
    said = f'exit code {code}: {self.log.read_text()[-3000:]}'
    self.start()
    return said

  def end(self) -> None:
    """Kill it, if it was started."""
    if self.process is not None:
      self.hit(signal.SIGKILL)
      self.process.wait()


@contextlib.contextmanager
def bucket(kind: str, folder: pathlib.Path) -> Iterator[dict[str, str]]:
  """Run a server that speaks S3, with an empty bucket; yield the variables with which obstore finds it."""
  command = [sys.executable, '-m', f'tests.serving.store.{"s3" if kind == "own" else "moto"}_store']
  with (folder / 's3.log').open('w') as log:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=tiny.REPOSITORY)
  try:
    url = process.stdout.readline().strip()
    if not url:
      raise RuntimeError(f'The bucket does not start: {(folder / "s3.log").read_text()[-2000:]}')
    if kind == 'moto':
      httpx2.put(f'{url}/bucket').raise_for_status()
    names = {'AWS_ENDPOINT_URL': url, 'AWS_ALLOW_HTTP': 'true', 'AWS_REGION': 'us-east-1'}
    yield names | {'AWS_ACCESS_KEY_ID': 'nobody', 'AWS_SECRET_ACCESS_KEY': 'nothing'}
  finally:
    process.kill()
    process.wait()


@dataclasses.dataclass
class Change:
  """A request that changes an adapter, with its Idempotency-Key."""

  kind: str
  adapter: str  # Empty: it is created.
  said: dict[str, Any] | None = None  # The answer; None: none that says what has happened.
  refused: str = ''  # The code of the error that ended it.

  @property
  def version(self) -> int | None:
    """The version that it has made; None: none."""
    return made(self.kind, self.said) if self.said is not None else None


def made(kind: str, said: Mapping[str, Any]) -> int | None:
  """Return the version that an answer acknowledges; None: none was made."""
  if kind == 'create':
    return 0
  if kind == 'undo':
    return said['version']
  learned = said['learned'] if kind == 'decision' else said if kind == 'feedback' else None
  if learned is None or learned['version_after'] == learned['version_before']:
    return None
  return learned['version_after']


class Ledger:
  """What clients have asked for, and what was acknowledged."""

  def __init__(self) -> None:
    self.lock = threading.Lock()
    self.changes: dict[str, Change] = {}  # By key.
    self.asked: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    self.settings: dict[str, dict[str, Any]] = {}  # Of adapters that one client changes, as last acknowledged.
    self.doubtful: set[str] = set()  # Adapters of which a change of the settings has no answer.
    self.sessions: list[str] = []
    self.wrong: list[str] = []

  def count(self, kind: str, what: str) -> None:
    with self.lock:
      self.asked[kind][what] += 1

  def add(self, key: str, change: Change) -> None:
    with self.lock:
      self.changes[key] = change

  def note(self, what: str) -> None:
    """Note something that must not be."""
    with self.lock:
      self.wrong.append(what)
    print(what, file=sys.stderr, flush=True)


class Client:
  """Sends requests to random replicas until they are answered; for one thread."""

  def __init__(self, name: str, replicas: list[Replica], ledger: Ledger, seed: object):
    self.name, self._replicas, self.ledger = name, replicas, ledger
    self.draw = random.Random(f'{seed} {name}')
    self._http = httpx2.Client(timeout=httpx2.Timeout(PATIENCE_S, connect=2.0))
    self._count = 0
    self.repeats = 0.2  # The share of changes that are repeated once they are acknowledged.

  def ask(self, kind: str, method: str, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    """Send a request until its answer is final; return status and answer, 0 and None if there is none."""
    until = time.monotonic() + LONGEST_S
    while time.monotonic() < until:
      where = self.draw.choice(self._replicas)
      try:
        answer = self._http.request(method, where.url + path, json=body, headers=headers)
        said = answer.json()
      except (httpx2.HTTPError, ValueError):
        self.ledger.count(kind, 'unanswered')
        time.sleep(0.2)
        continue
      if answer.status_code < 300:
        self.ledger.count(kind, 'done')
        return answer.status_code, said
      code = said['error']['code']
      self.ledger.count(kind, code)
      if answer.status_code != 503 and code not in AGAIN:
        return answer.status_code, said
      time.sleep(0.25)
    return 0, None

  def change(self, kind: str, adapter: str, method: str, path: str, body: Any, **headers: str) -> Change:
    """Send a change with a new key; now and then repeat it, which must not change anything."""
    self._count += 1
    key = f'{self.name}-{self._count}'
    change = Change(kind, adapter)
    self.ledger.add(key, change)
    status, said = self.ask(kind, method, path, body, **{'Idempotency-Key': key}, **headers)
    if status and status < 300:
      change.said = said
      if self.draw.random() < self.repeats:
        status, again = self.ask('repeat', method, path, body, **{'Idempotency-Key': key}, **headers)
        if status and (status >= 300 or made(kind, again) != change.version):
          self.ledger.note(f'doubled: a repeat of {key} ({kind}) is answered {str(again)[:300]}, not {str(said)[:300]}')
    elif status:
      error = said['error']
      change.refused = 'sample' if 'sample' in error['message'] and status == 404 else error['code']
      if change.refused not in MAY_BE:
        self.ledger.note(f'refused: {kind} {path}: {status} {error}')
    return change

  def create(self, name: str) -> str | None:
    change = self.change('create', '', 'POST', f'{ROOT}/adapters', {'name': name})
    if change.said is None:
      return None
    change.adapter = change.said['id']
    return change.adapter

  def feedback(self, adapter: str, sample: str | None = None) -> Change:
    if sample is None:
      tokens = [self.draw.randrange(250) for _ in range(6)]
      item: dict[str, Any] = {'prompt_tokens': tokens[:3], 'tokens': tokens[3:]}
    else:
      item = {'sample_id': sample}
    body = {'items': [item | {'feedback': f'Be {self.draw.randrange(1000)} times as brief.'}], 'detail': []}
    return self.change('feedback', adapter, 'POST', f'{ROOT}/adapters/{adapter}/feedback', body)

  def undo(self, adapter: str) -> Change:
    return self.change('undo', adapter, 'POST', f'{ROOT}/adapters/{adapter}/undo', {'to': 0})

  def set(self, adapter: str, alone: bool) -> None:
    settings = {'guards': {'max_loss_ratio': 1e6 + self.draw.randrange(10**6)}}
    change = self.change('settings', adapter, 'PATCH', f'{ROOT}/adapters/{adapter}', {'settings': settings})
    if alone:
      with self.ledger.lock:
        if change.said is None:
          self.ledger.doubtful.add(adapter)
        else:
          self.ledger.settings[adapter] = settings

  def sample(self, adapter: str) -> str | None:
    body = {'model': adapter, 'messages': HELLO, 'max_tokens': 8, 'seed': self.draw.randrange(1000)}
    status, said = self.ask('sample', 'POST', f'{ROOT}/completions', body)
    if status == 200:
      return said['completions'][0]['sample_id']
    if status:
      self.ledger.note(f'refused: sample of {adapter}: {status} {said}')
    return None

  def session(self, adapter: str) -> None:
    """Open a session, and deny two proposals."""
    status, said = self.ask(
      'session', 'POST', f'{ROOT}/adapters/{adapter}/sessions', {'update': {'learning_rate': 1e-4}}
    )
    if status != 201:
      if status:
        self.ledger.note(f'refused: session of {adapter}: {status} {said}')
      return
    path = f'{ROOT}/adapters/{adapter}/sessions/{said["session"]["id"]}'
    token = {'X-Session-Token': said['token']}
    with self.ledger.lock:
      self.ledger.sessions.append(path)
    for turn in range(2):
      body = {} if turn else {'messages': HELLO}
      status, said = self.ask('turn', 'POST', f'{path}/turns', body, **token)
      if status != 200:  # Such as a turn that was made, and not answered.
        return
      where = f'{path}/turns/{said["turn"]["n"]}/decision'
      denied = {
        'decision': 'deny',
        'correction': f'Be {turn + 2} times as brief.',
        'digest': said['turn'].get('digest'),
      }
      if self.change('decision', adapter, 'POST', where, denied, **token).said is None:
        return

  def run(self, shared: list[str], stopped: threading.Event) -> None:
    """Send requests until it is told to stop."""
    own: list[str] = []
    while not stopped.is_set():
      if not own or len(own) < 20 and self.draw.random() < 0.03:
        if (new := self.create(f'{self.name}-{len(own)}')) is not None:
          own.append(new)
        continue
      alone = self.draw.random() < 0.6
      adapter = self.draw.choice(own[-4:] if alone else shared)
      what = self.draw.random()
      if what < 0.45:
        self.feedback(adapter)
      elif what < 0.6:
        if (sample := self.sample(adapter)) is not None:
          self.feedback(adapter, sample)
      elif what < 0.7:
        self.undo(adapter)
      elif what < 0.85:
        self.set(adapter, alone)
      elif what < 0.93:
        self.sample(adapter)
      else:
        self.session(adapter)
      stopped.wait(self.draw.uniform(0, 1.0))


class Tormentor:
  """Kills and pauses replicas, and stops the database; and measures how long it takes until others go on."""

  def __init__(self, replicas: list[Replica], server: postgres.Server, database: str, ledger: Ledger, seed: int):
    self._replicas, self._server, self._database, self.ledger = replicas, server, database, ledger
    self._draw = random.Random(f'{seed} torments')
    self._seed, self._restarts, self._starting = seed, [], futures.ThreadPoolExecutor(len(replicas))
    self.done: collections.Counter = collections.Counter()
    self.takeovers: list[float] = []

  def held(self, replica: Replica) -> list[str]:
    """Return adapters that a replica holds."""
    import psycopg

    query = "SELECT adapter FROM leases JOIN replicas ON id = replica WHERE url = %s AND adapter LIKE 'ad-%%'"
    with psycopg.connect(self._database) as connection:
      return [id for (id,) in connection.execute(query, (replica.url,)).fetchall()]

  def once(self, what: str) -> None:
    """Torment the service once, and wait until it goes on."""
    began = time.monotonic()
    if what == 'database':
      self.stop_database()
    else:
      victim = self._draw.choice([each for each in self._replicas if each.well])
      paused_s = self._draw.uniform(2.0, 20.0)  # Before what depends on time, so that the seed says how long.
      held = self.held(victim)
      self._draw.shuffle(held)
      at = time.monotonic()
      victim.hit(SIGNALS[what])
      others = [each for each in self._replicas if each.well]
      probes = [threading.Thread(target=self._probe, args=(id, others, at, what)) for id in held[:PROBES]]
      for probe in probes:
        probe.start()
      if what == 'pause':
        time.sleep(paused_s)
        victim.process.send_signal(signal.SIGCONT)
        victim.well = True
      for probe in probes:
        probe.join()
      if what != 'pause':
        victim.process.wait()
        restart = self._starting.submit(victim.start)
        self._restarts.append(restart)
        if self._draw.random() < 0.5 or sum(each.well for each in self._replicas) < 2:
          restart.result()
    self.done[what] += 1
    print(f'{what}: {time.monotonic() - began:.1f} s', file=sys.stderr, flush=True)

  def stop_database(self) -> None:
    self._server.stop()
    time.sleep(self._draw.uniform(1.0, 6.0))
    self._server.start()

  def _probe(self, id: str, others: list[Replica], at: float, what: str) -> None:
    client = Client(f'probe-{id}-{at:.3f}', others, self.ledger, self._seed)
    if client.undo(id).said is not None:
      took = time.monotonic() - at
      self.takeovers.append(took)
      if took > BAR:
        self.ledger.note(f'late: {id} was changed elsewhere {took:.1f} s after a {what}')

  def drawn(self) -> str:
    """Draw what comes next; at least one replica stays well."""
    others = ['kill', 'pause', 'kill', 'pause', 'drain'] if sum(each.well for each in self._replicas) > 1 else []
    return self._draw.choice(['database', *others])

  def end(self) -> None:
    """Wait until all replicas are well.

    Raises:
      RuntimeError: one does not start.
    """
    for restart in self._restarts:
      restart.result()
    self._starting.shutdown()


class Audit:
  """What replicas have in the end, compared with what was acknowledged."""

  def __init__(self, replicas: list[Replica], ledger: Ledger, blobs: RemoteBlobs):
    self._replicas, self.ledger, self._blobs = replicas, ledger, blobs
    self._http = httpx2.Client(timeout=60.0)
    self.found: collections.Counter = collections.Counter(
      dict.fromkeys(('lost', 'doubled', 'gaps', 'different', 'refused', 'ended', 'unknown'), 0)
    )

  def note(self, kind: str, what: str, count: int = 1) -> None:
    self.found[kind] += count
    print(f'{kind}: {what}', file=sys.stderr, flush=True)

  def run(self) -> dict[str, int]:
    changes = self.ledger.changes
    for replica in self._replicas:
      if said := replica.revive():
        self.note('ended', f'{replica.url}, {said}')
    for what in self.ledger.wrong:
      kind = what.partition(':')[0]
      if kind != 'late':
        self.found[kind] += 1
    of_adapter: dict[str, dict[str, Change]] = collections.defaultdict(dict)
    for key, change in changes.items():
      of_adapter[change.adapter][key] = change
      self.found['unknown'] += change.said is None and not change.refused
    self._names(of_adapter.pop('', {}))
    for adapter in of_adapter:
      self._adapter(adapter, of_adapter[adapter])
    for path in self.ledger.sessions:
      self._same(path)
    return dict(self.found) | {'adapters': len(of_adapter), 'changes': len(changes)}

  def _names(self, unknown: Mapping[str, Change]) -> None:
    """Count adapters that nobody knows to have asked for."""
    said = self._same(f'{ROOT}/adapters?limit=1000')
    extra = {each['id'] for each in said['adapters']} - {change.adapter for change in self.ledger.changes.values()}
    if len(extra) > len(unknown):
      self.note('doubled', f'{len(extra)} adapters, of which {len(unknown)} may have been asked for', len(extra))

  def _same(self, path: str) -> Any:
    """Return what all replicas answer."""
    answers = [self._answer(each.url + path) for each in self._replicas]
    for answer in answers[1:]:
      if answer.text != answers[0].text:
        self.note('different', f'{path}: {answers[0].text[:300]} … {answer.text[:300]}')
    return max(answers, key=lambda answer: (answer.status_code == 200, len(answer.text))).json()

  def _answer(self, url: str) -> httpx2.Response:
    until = time.monotonic() + LONGEST_S
    while True:
      late = time.monotonic() > until
      try:
        answer = self._http.get(url)
        if answer.status_code != 503 or late:
          return answer
        print(f'again: {url} {answer.text}', file=sys.stderr, flush=True)
      except httpx2.HTTPError:
        if late:
          raise
      time.sleep(0.5)

  def _adapter(self, adapter: str, changes: Mapping[str, Change]) -> None:
    head = self._same(f'{ROOT}/adapters/{adapter}')
    if 'version' not in head:
      self.note('lost', f'{adapter} with {len(changes)} changes: {head}', len(changes))
      return
    stored, after = {}, ''
    while True:
      page = self._same(f'{ROOT}/adapters/{adapter}/versions?limit=1000{after}')
      if 'versions' not in page:
        self.note('lost', f'versions of {adapter}: {page}', len(changes))
        return
      stored |= {each['version']: each for each in page['versions']}
      if not page['has_more']:
        break
      after = f'&after={page["last_id"]}'
    missing = set(range(head['version'] + 1)) ^ stored.keys()
    if missing:
      self.note('gaps', f'{adapter}: {sorted(missing)[:10]}', len(missing))
    known: dict[int, str] = {}
    for key, change in changes.items():
      number = change.version
      if number is None:
        continue
      if number not in stored or number in known or not _agrees(change, stored[number]):
        self.note('lost', f'{adapter}@{number} of {key}: {str(stored.get(number))[:300]}; {str(change.said)[:300]}')
      known[number] = key
    unknown = sum(change.said is None for change in changes.values())
    if (extra := len(stored) - len(known) - unknown) > 0:
      self.note('doubled', f'{adapter}: {sorted(stored.keys() - known.keys())}', extra)
    self._keys(adapter, stored)
    wanted = self.ledger.settings.get(adapter)
    if wanted and adapter not in self.ledger.doubtful and wanted['guards'] != head['settings'].get('guards'):
      self.note('lost', f'settings of {adapter}: {wanted}, not {head["settings"]}')

  def _keys(self, adapter: str, stored: Mapping[int, Any]) -> None:
    """Look for two versions of one idempotency key."""
    folder = versions.adapter_folder(LOCAL_OWNER, adapter)
    manifests = [self._manifest(folder, number, said['digest']) for number, said in stored.items()]
    counts = collections.Counter(each.request.key for each in manifests if each.request is not None)
    for key, count in counts.items():
      if count > 1:
        self.note('doubled', f'{adapter}: {count} versions of {key}', count - 1)

  def _manifest(self, folder: str, number: int, digest: str) -> versions.VersionManifest:
    until = time.monotonic() + LONGEST_S
    while True:
      try:
        return versions.read_manifest(self._blobs, folder, number, digest)
      except StorageFailed as error:
        if time.monotonic() > until:
          raise
        print(f'again: {error}', file=sys.stderr, flush=True)
      time.sleep(0.5)


def _agrees(change: Change, stored: Mapping[str, Any]) -> bool:
  """Return whether a stored version is what was acknowledged."""
  if change.kind == 'undo':
    return all(stored[name] == change.said[name] for name in ('digest', 'parent', 'created', 'details'))
  if change.kind == 'feedback':
    return stored['reason'] == 'feedback' and stored['details'].get('metrics') == change.said['metrics']
  return True


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--minutes', type=float, default=20.0)
  parser.add_argument('--replicas', type=int, default=3)
  parser.add_argument('--clients', type=int, default=8)
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--bucket', choices=('own', 'moto'), default='own')
  parser.add_argument('--logs', type=pathlib.Path, help='folder for the output of the replicas')
  parser.add_argument('--torments', help='kill, drain, pause or database, comma-separated, in place of --minutes')
  args = parser.parse_args()
  with contextlib.ExitStack() as stack:
    folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix='replicas')))
    running, server, database = stack.enter_context(service(folder, args.replicas, args.bucket, args.logs))
    return measured(args, running, server, database)


@contextlib.contextmanager
def service(
  folder: pathlib.Path, count: int, kind: str, logs: pathlib.Path | None = None
) -> Iterator[tuple[list[Replica], postgres.Server, str]]:
  """Run so many replicas with a database and a kind of bucket; yield them, the database and its URL."""
  scratch = compiling.prepare()
  with contextlib.ExitStack() as stack:
    if scratch is not None:
      stack.callback(shutil.rmtree, scratch)
    server, names = stack.enter_context(postgres.serving()), stack.enter_context(bucket(kind, folder))
    database = server.url()
    os.environ.update(names)
    config, model = folder / 'config.py', service_world.model_folder(folder / 'model')
    programs = compiling.commands_cache().parent / 'engine'
    config.write_text(CONFIG.format(model=str(model), database=database, programs=str(programs)))
    environment = tiny.environment(quick=True)
    found = [Replica(config, environment, (logs or folder) / f'replica{number}.log') for number in range(count)]
    for replica in found:
      stack.callback(replica.end)
      replica.start()  # One after the other, so that the first one compiles for all.
    yield found, server, database


def measured(args: argparse.Namespace, replicas: list[Replica], server: postgres.Server, database: str) -> int:
  """Run clients and torments, print what came of them, and return the exit code."""
  ledger, stopped = Ledger(), threading.Event()
  first = Client('first', replicas, ledger, args.seed)
  shared = [first.create(f'shared-{number}') for number in range(4)]
  clients = [Client(f'client-{number}', replicas, ledger, args.seed) for number in range(args.clients)]
  threads = [threading.Thread(target=client.run, args=(shared, stopped)) for client in clients]
  for thread in threads:
    thread.start()
  tormentor, draw = Tormentor(replicas, server, database, ledger, args.seed), random.Random(args.seed)
  try:
    until = time.monotonic() + 60 * args.minutes
    given = args.torments.split(',') if args.torments else None
    while given or (given is None and time.monotonic() < until):
      stopped.wait(draw.uniform(2.0, 8.0))
      tormentor.once(given.pop(0) if given else tormentor.drawn())
    tormentor.end()
  finally:
    stopped.set()
    for thread in threads:
      thread.join()
  load = [round(each, 1) for each in os.getloadavg()]
  print(json.dumps({'torments': dict(tormentor.done), 'load': load, 'cores': os.cpu_count()}), flush=True)
  print(json.dumps({'asked': {kind: dict(counts) for kind, counts in sorted(ledger.asked.items())}}), flush=True)
  times = tormentor.takeovers
  took = {
    'count': len(times),
    'p50': round(float(np.median(times or [0.0])), 2),
    'max': round(max(times, default=0.0), 2),
  }
  print(json.dumps({'takeover_s': took}), flush=True)
  found = Audit(replicas, ledger, RemoteBlobs('s3://bucket/x')).run()
  print(json.dumps({'found': found}), flush=True)
  wrong = any(found[name] for name in ('lost', 'doubled', 'gaps', 'different', 'refused', 'ended'))
  return int(wrong or max(times, default=0.0) > BAR)


if __name__ == '__main__':
  sys.exit(main())
