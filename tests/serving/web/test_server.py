"""The process of the service: its port from the start, its end by a signal, and what it refuses to start with."""

import asyncio
import contextlib
import http.client
import json
import os
import random
import signal
import socket
import threading
import types

import httpx2
import pytest

from sdpo_jax import extras
from sdpo_jax.config import Config, HttpConfig, LimitsConfig
from sdpo_jax.errors import UserError
from sdpo_jax.serving.allowances import Allowances
from sdpo_jax.serving.web import server
from sdpo_jax.serving.web.keys import add
from tests import tiers, tiny
from tests.serving.served_process import PATIENCE, ask, served, until

# What it refuses.


@pytest.mark.parametrize('host', ['0.0.0.0', '::', '192.168.1.5', 'example.org', ''])
def test_others_are_not_let_in_without_keys(host):
  with pytest.raises(UserError, match='python -m launch.serve_key'):
    server.open_keys(HttpConfig(host=host))


@pytest.mark.parametrize('host', ['127.0.0.1', 'localhost', '::1', '127.8.8.8'])
def test_this_machine_needs_no_key(host):
  assert server.open_keys(HttpConfig(host=host)) is None


def test_with_keys_anybody_may_reach_it(tmp_path):
  path = tmp_path / 'keys'
  secret, _ = add(path, 'ada', 'key')
  assert server.open_keys(HttpConfig(host='0.0.0.0', keys=str(path))).find(secret).owner == 'ada'
  with pytest.raises(UserError, match='cannot be read'):
    server.open_keys(HttpConfig(host='0.0.0.0', keys=str(tmp_path / 'none')))


def test_a_port_that_is_taken_is_named():
  with contextlib.closing(server.listen(HttpConfig(port=0))) as taken:
    with pytest.raises(UserError, match='choose another port'):
      server.listen(HttpConfig(port=taken.getsockname()[1]))
    assert server.url_of(taken) == f'http://127.0.0.1:{taken.getsockname()[1]}'


def test_answers_do_not_wait_for_acknowledgements():
  with contextlib.closing(server.listen(HttpConfig(port=0))) as listening:
    with socket.create_connection(listening.getsockname()) as client:
      listening.setblocking(True)
      accepted, address = listening.accept()
      with accepted:
        assert address == client.getsockname()
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_packages_that_are_missing_are_named_with_the_extra(monkeypatch):
  extras.check('serve')
  monkeypatch.setitem(extras.EXTRAS, 'serve', (extras.EXTRAS['serve'][0], ('starlette', 'no_such_package')))
  with pytest.raises(
    UserError, match=r'The service needs no_such_package, .*requirements-serve.txt.*sdpo_jax\[serve\]'
  ):
    extras.check('serve')


# A process, with something in the place of the service.


class Slow:
  """A service that becomes ready when it is let, and ends at once."""

  def __init__(self):
    self.worker, self.endpoint = (
      types.SimpleNamespace(ready=threading.Event(), failure=None, ended=False, stats={}),
      None,
    )
    self.stopped, self.allowances = [], Allowances(LimitsConfig())
    self.store = types.SimpleNamespace(stats={}, drain=lambda: None)

  def start(self):
    pass

  def stop(self, drain):
    self.stopped.append(drain)

  def capabilities(self):
    return {}


def process_of(make, **changes):
  config = Config(name='served')
  config.serve.http.port = 0
  for name, value in changes.items():
    setattr(config.serve.http, name, value)
  return server.ServiceProcess(config, lambda line: None, make)


def get(process, path, **headers):
  connection = http.client.HTTPConnection(process.url.removeprefix('http://'), timeout=PATIENCE)
  with contextlib.closing(connection):
    connection.request('GET', path, headers=headers)
    response = connection.getresponse()
    return response.status, json.loads(response.read())


@contextlib.contextmanager
def running(process):
  """Run a process in a thread; what it raises is raised at the end."""
  raised = []

  def run():
    try:
      process.run()
    except BaseException as error:
      raised.append(error)

  thread = threading.Thread(target=run)
  thread.start()
  try:
    yield raised
  finally:
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_the_port_answers_from_the_start_and_says_what_is_going_on():
  service = Slow()

  def make(config, announce):
    announce('reading 3 of 7')
    return service

  process = process_of(make, idle_shutdown_s=0.2)
  with running(process):
    until(lambda: process.lifetime.stage == 'reading 3 of 7')
    assert get(process, '/healthz') == (200, {'status': 'alive'})
    assert get(process, '/readyz') == (503, {'status': 'starting', 'stage': 'reading 3 of 7'})
    status, body = get(process, '/v1/capabilities')
    assert status == 503 and 'reading 3 of 7' in body['error']['message']
    service.worker.ready.set()
    assert get(process, '/v1/capabilities') == (200, {})
    # Nobody asks any more: it ends.
  assert len(service.stopped) == 1


def test_what_goes_wrong_at_the_start_ends_it_with_its_sentence():
  def make(config, announce):
    raise UserError('model.path is nowhere: set it.')

  process = process_of(make)
  with running(process) as raised:
    pass
  assert [str(error) for error in raised] == ['model.path is nowhere: set it.']


@pytest.mark.parametrize('when', ['start', 'later'])
def test_an_engine_that_cannot_be_made_ends_it_too(when):
  """Otherwise a replica would keep its leases, though it can do nothing with them."""
  service = Slow()
  process = process_of(lambda config, announce: service)
  with running(process) as raised:
    if when == 'later':
      service.worker.ready.set()
      until(lambda: process.lifetime.ready)
      service.worker.ready.clear()
      service.worker.failure = ValueError('The engine has failed, and is made anew.')
      assert get(process, '/readyz')[0] == 503
      assert httpx2.get(f'{process.url}/readyz').headers['retry-after'] == '1'
    service.worker.failure = UserError('Too little memory: lower serve.rows.')
    service.worker.ended = True
  assert raised == [service.worker.failure] and service.stopped


def test_requests_under_way_finish_and_new_ones_are_refused():
  service, begun, go_on = Slow(), threading.Event(), threading.Event()
  service.worker.ready.set()

  def capabilities():
    begun.set()
    go_on.wait()
    return {'done': True}

  service.capabilities = capabilities
  process = process_of(lambda config, announce: service)
  answers = []
  with running(process):
    until(lambda: process.lifetime.ready)
    asking = threading.Thread(target=lambda: answers.append(get(process, '/v1/capabilities')))
    asking.start()
    begun.wait()
    process.lifetime.drain()
    status, body = get(process, '/v1/capabilities')
    assert status == 503 and 'shutting down' in body['error']['message']
    assert get(process, '/readyz')[1]['status'] == 'draining'
    assert not service.stopped
    go_on.set()
    asking.join()
  assert answers == [(200, {'done': True})] and len(service.stopped) == 1


def test_headers_that_do_not_come_end_the_connection():
  async def ask():
    service = Slow()
    service.worker.ready.set()
    process = process_of(lambda config, announce: service, read_timeout_s=0.05)
    thread = threading.Thread(target=process.run)
    thread.start()
    host, port = process.url.removeprefix('http://').split(':')
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b'GET /healthz HTTP/1.1\r\nHost: local')
    first = await asyncio.wait_for(reader.read(), PATIENCE)
    # A body that does not come is answered, and not waited for either.
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
      b'POST /v1/continual/score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n'
      b'Content-Length: 100\r\n\r\n{'
    )
    second = await asyncio.wait_for(reader.read(), PATIENCE)
    process.lifetime.drain()
    await asyncio.to_thread(thread.join, PATIENCE)
    return first, second

  first, second = asyncio.run(ask())
  assert first == b'' and second.startswith(b'HTTP/1.1 408')


def test_connections_that_say_nothing_take_nobody_elses():
  async def ask():
    service = Slow()
    service.worker.ready.set()
    process = process_of(lambda config, announce: service, max_requests=4)
    thread = threading.Thread(target=process.run)
    thread.start()
    host, port = process.url.removeprefix('http://').split(':')
    silent = [await asyncio.open_connection(host, int(port)) for _ in range(400)]
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b'GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n')
    answer = await asyncio.wait_for(reader.read(), PATIENCE)
    oldest = await asyncio.wait_for(silent[0][0].read(), PATIENCE)
    for _, each in silent:
      each.close()
    process.lifetime.drain()
    await asyncio.to_thread(thread.join, PATIENCE)
    return answer, oldest

  answer, oldest = asyncio.run(ask())
  assert answer.startswith(b'HTTP/1.1 200') and oldest == b''


# Clients that do not read.


@contextlib.contextmanager
def answering(text, **changes):
  """Run a process whose first answer has a text, and whose others are short; its buffers are small."""
  service, answers = Slow(), [{'text': text}]
  service.worker.ready.set()
  service.capabilities = lambda: answers.pop() if answers else {}
  process = process_of(lambda config, announce: service, **changes)
  process._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # noqa: SLF001
  with running(process):
    try:
      until(lambda: process.lifetime.ready)
      yield process
    finally:
      process.lifetime.drain()


@contextlib.contextmanager
def reader(process, close=False):
  """Ask, and yield a file of the answer, of which only the first line was read."""
  host, port = process.url.removeprefix('http://').split(':')
  with socket.socket() as client:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((host, int(port)))
    end = b'Connection: close\r\n\r\n' if close else b'\r\n'
    client.sendall(b'GET /v1/capabilities HTTP/1.1\r\nHost: localhost\r\n' + end)
    with client.makefile('rb', buffering=1024) as answer:
      assert answer.readline() == b'HTTP/1.1 200 OK\r\n'
      yield answer


def rest_of(answer):
  """Return what else arrives until the connection ends."""
  parts = []
  with contextlib.suppress(ConnectionResetError):
    while part := answer.read1(65536):
      parts.append(part)
  return b''.join(parts)


@pytest.mark.parametrize('close', [False, True])
@pytest.mark.parametrize('size', [60_000, 4_000_000], ids=['less than is buffered', 'more than is buffered'])
def test_a_client_that_does_not_read_is_dropped_and_its_place_is_free(size, close):
  with answering('-' * size, read_timeout_s=0.1, max_requests=1) as process, reader(process, close) as answer:
    until(lambda: not process._server.server_state.connections)  # noqa: SLF001
    assert get(process, '/v1/capabilities') == (200, {})
    assert rest_of(answer).count(b'-') < size


def test_a_client_that_reads_slowly_holds_its_place_and_has_it_all():
  size = 4_000_000
  with answering('-' * size, max_requests=1) as process, reader(process) as answer:
    assert answer.read(100_000).count(b'-') > 90_000
    status, body = get(process, '/v1/capabilities')
    assert (status, body['error']['code']) == (429, 'busy')
    process.lifetime.drain()  # Which ends the connection once all was sent.
    assert rest_of(answer).endswith(b'-"}')
    until(lambda: not process.lifetime.under_way)


def test_a_client_that_still_reads_is_left_alone_by_connections_that_say_nothing():
  size = 60_000
  with answering('-' * size, max_requests=1) as process, reader(process) as answer, contextlib.ExitStack() as others:
    until(lambda: not process.lifetime.under_way)  # Its answer is buffered, and it was the first to wait.
    host, port = process.url.removeprefix('http://').split(':')
    silent = [others.enter_context(socket.create_connection((host, int(port)))) for _ in range(4 + 64)]
    assert silent[0].recv(1) == b''
    while (line := answer.readline()) != b'\r\n':
      assert line
    assert answer.read(size + len('{"text":""}')) == b'{"text":"%b"}' % (b'-' * size)


def test_the_head_of_a_large_answer_is_all_that_is_sent():
  with answering('-' * 1_000_000) as process:
    connection = http.client.HTTPConnection(process.url.removeprefix('http://'), timeout=PATIENCE)
    with contextlib.closing(connection):
      for method, length in (('HEAD', '1000011'), ('GET', '2')):
        connection.request(method, '/v1/capabilities')
        response = connection.getresponse()
        assert (response.status, response.headers['Content-Length']) == (200, length)
        assert response.read() == (b'' if method == 'HEAD' else b'{}')


# The real one.


@pytest.mark.slow
def test_a_real_process_learns_stops_at_a_signal_and_knows_it_all_when_it_comes_back(tmp_path):
  messages = [{'role': 'user', 'content': 'Hi'}]
  with served(tmp_path) as running:
    assert ask(running, 'GET', '/healthz') == (200, {'status': 'alive'})
    until(lambda: ask(running, 'GET', '/readyz')[0] == 200)
    status, adapter = ask(running, 'POST', '/v1/continual/adapters', {'name': 'mine'})
    assert status == 201
    asked = {'model': 'mine', 'messages': messages, 'max_tokens': 4, 'seed': 3}
    status, drawn = ask(running, 'POST', '/v1/continual/completions', asked)
    sample = drawn['completions'][0]['sample_id']
    at, body = f'/v1/continual/adapters/{adapter["id"]}', {'sample_id': sample, 'feedback': 'Be brief.'}
    status, answer = ask(running, 'POST', f'{at}/feedback', body, **{'Idempotency-Key': 'once', 'If-Match': '"0"'})
    assert status == 200 and answer['version_after'] == 1
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(PATIENCE) == 0
  assert any(line.startswith('Stopping') for line in running.lines)
  assert not any('Traceback' in line or 'Be brief' in line for line in running.lines)
  with served(tmp_path) as running:
    until(lambda: ask(running, 'GET', '/readyz')[0] == 200)
    assert ask(running, 'GET', at)[1]['version'] == 1
    # The same request is answered as before, and not learned again.
    again = ask(running, 'POST', f'{at}/feedback', body, **{'Idempotency-Key': 'once', 'If-Match': '"0"'})
    assert again == (200, answer) and ask(running, 'GET', at)[1]['version'] == 1
    os.kill(running.process.pid, signal.SIGINT)
    assert running.process.wait(PATIENCE) == 0
  assert any('0 compiled' in line for line in running.lines), running.lines


class Learner(threading.Thread):
  """A client that gives one adapter feedback after feedback until its server is gone."""

  def __init__(self, running, at: str, sample: str, version: int, told):
    super().__init__()
    self.at, self.doubtful, self.acknowledged = at, None, []
    self._running, self._sample, self._version, self._told = running, sample, version, told

  def request(self, number: int) -> tuple[str, str, dict, str]:
    """Return what leads to a version: method, path, body, key."""
    body = {'sample_id': self._sample, 'feedback': f'Be {number} times as brief.', 'update': {'learning_rate': 1e-4}}
    return 'POST', f'{self.at}/feedback', body, f'{self.at}-{number}'

  def send(self, running, number: int) -> tuple[int, dict]:
    method, path, body, key = self.request(number)
    return ask(running, method, path, body, **{'Idempotency-Key': key})

  def run(self):
    while True:
      number = self._version + len(self.acknowledged) + 1
      try:
        status, answer = self.send(self._running, number)
      except (OSError, http.client.HTTPException, ValueError):
        status, answer = None, None
      if status != 200:
        self.doubtful = number
        return
      self.acknowledged.append(answer)
      self._told.release()


def digests(running, at: str) -> dict[int, str]:
  """Return the versions of an adapter: number → digest of all that is stored of it."""
  return {each['version']: each['digest'] for each in ask(running, 'GET', f'{at}/versions')[1]['versions']}


def begin(running, name: str) -> tuple[str, str]:
  """Make an adapter; return its address and a sample of it."""
  status, made = ask(running, 'POST', '/v1/continual/adapters', {'name': name})
  assert status == 201
  asked = {'model': name, 'messages': [{'role': 'user', 'content': 'Hi'}], 'max_tokens': 4}
  sample = ask(running, 'POST', '/v1/continual/completions', asked)[1]['completions'][0]['sample_id']
  return f'/v1/continual/adapters/{made["id"]}', sample


@pytest.mark.parametrize('kills', tiers.cases((2, 20), slow=(2,)))
def test_a_server_that_is_killed_under_load_has_lost_nothing_and_learned_nothing_twice(tmp_path, kills):
  """By SIGKILL, while three clients learn and a fourth adapter rests; the last time it is told by SIGTERM."""
  draw, learners, known, score = random.Random(0), [], {}, None
  for turn in range(kills + 2):
    with served(tmp_path) as running:
      until(lambda: ask(running, 'GET', '/readyz')[0] == 200)
      if turn == 0:
        places = [begin(running, name) for name in ('a', 'b', 'c', 'rests')]
        heads = {at: 0 for at, _ in places}
        rest = places.pop()[0]
        asked = {'model': 'rests', 'rows': [{'prompt': 'Hi', 'completion': ' there'}], 'topk': 8}
        score = ask(running, 'POST', '/v1/continual/score', asked)
        known = {at: digests(running, at) for at in heads}
      for learner in learners:
        found = digests(running, learner.at)
        last = heads[learner.at] + len(learner.acknowledged)
        assert list(found) == list(range(len(found))) and len(found) - 1 in (last, last + 1)
        assert all(found[number] == digest for number, digest in known[learner.at].items())
        # What was acknowledged is answered as before, and what was in doubt is learned once.
        if learner.acknowledged:
          assert learner.send(running, last) == (200, learner.acknowledged[-1])
        status, answer = learner.send(running, last + 1)
        assert status == 200 and answer['version_after'] == last + 1
        heads[learner.at], known[learner.at] = last + 1, digests(running, learner.at)
        assert len(known[learner.at]) == last + 2
      assert digests(running, rest) == known[rest] and ask(running, 'POST', '/v1/continual/score', asked) == score
      if turn == kills + 1:
        running.process.terminate()
        break
      told = threading.Semaphore(0)
      learners = [Learner(running, at, sample, heads[at], told) for at, sample in places]
      for learner in learners:
        learner.start()
      for _ in range(draw.randrange(1, 12)):
        assert told.acquire(timeout=PATIENCE)
      threading.Event().wait(draw.uniform(0, 0.2))  # The moment is any of a request.
      running.process.send_signal(signal.SIGKILL if turn < kills else signal.SIGTERM)
      assert running.process.wait(PATIENCE) == (-signal.SIGKILL if turn < kills else 0)
      for learner in learners:
        learner.join(PATIENCE)
        assert learner.doubtful is not None and not learner.is_alive()
  assert min(heads.values()) == 0 and sum(heads.values()) > 3 * kills


@pytest.mark.slow  # By default test_keys.py makes and lists them.
def test_a_key_is_made_and_listed_from_the_command_line(tmp_path):
  path = tmp_path / 'keys.jsonl'
  made = tiny.launch('serve_key', f'--keys={path}', '--owner=ada', '--name=laptop')
  assert made.returncode == 0 and made.stdout.startswith('sdpo_') and made.stdout.strip() not in path.read_text()
  listed = tiny.launch('serve_key', f'--keys={path}')
  assert listed.stdout.split()[2:] == ['1', 'ada', 'laptop'] and listed.stdout.split()[0] in made.stderr
