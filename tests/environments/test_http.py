"""The HTTP grader against a real server: what is sent, what comes back, and what a server can do wrong."""

import concurrent.futures
import contextlib
import datetime
import gzip
import json
import logging
import re
import shutil
import socket
import ssl
import subprocess
import threading

import httpcore2
import numpy as np
import pytest

from sdpo_jax.config import Config, EnvironmentsConfig, HttpGraderConfig
from sdpo_jax.environments import json_server, registry
from sdpo_jax.environments.grading import Graders
from sdpo_jax.errors import UserError
from sdpo_jax.files import jsonable
from sdpo_jax.types import Example
from tests.local_server import Answer, Server, dead_address

RIGHT = {'score': 1.0}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
  monkeypatch.setattr(json_server, 'FIRST_PAUSE_S', 0.0)


def example(i=0, **changes):
  values = dict(
    id=f'q{i}',
    messages=[{'role': 'user', 'content': f'Q{i}?'}],
    environment='http',
    ground_truth='4',
    data_source='sums',
  )
  return Example(**values | changes)


def grade(url, completions, *, examples=None, truncated=None, graders=None, **settings):
  """Through the same door as a run."""
  examples = examples or [example(i) for i in range(len(completions))]
  truncated = truncated or [False] * len(completions)
  if graders is not None:
    return graders.grade(examples, completions, truncated=truncated)
  with Graders(EnvironmentsConfig(http=HttpGraderConfig(url=url, **settings))) as made:
    return made.grade(examples, completions, truncated=truncated)


def test_what_is_sent_and_what_comes_back():
  answer = {'score': 0.25, 'feedback': 'Zähl nach: 2+2=四', 'metrics': {'acc': 0.5, 'pred': '五', 'parsed': True}}
  asked = example(
    messages=[{'role': 'system', 'content': 'Sei kurz.'}, {'role': 'user', 'content': '2+2? 🤔'}],
    ground_truth={'value': 4, 'limit': float('inf')},
    extra={'day': datetime.date(2026, 1, 2), 'points': np.array([1, 2])},
  )
  with Server(lambda body: Answer(answer)) as server:
    (outcome,) = grade(server.url + '/grade', ['五 “five”\n'], examples=[asked], truncated=[True])
  assert server.bodies == [
    {
      'id': 'q0',
      'data_source': 'sums',
      'prompt': [{'role': 'system', 'content': 'Sei kurz.'}, {'role': 'user', 'content': '2+2? 🤔'}],
      'completion': '五 “five”\n',
      'truncated': True,
      'ground_truth': {'value': 4, 'limit': None},
      'extra': {'day': '2026-01-02', 'points': [1, 2]},
    }
  ]
  assert server.paths == ['/grade'] and 'Authorization' not in server.headers[0]
  assert server.headers[0]['Accept-Encoding'] == 'identity' and 'Cookie' not in server.headers[0]
  assert outcome.score == 0.25 and outcome.feedback == 'Zähl nach: 2+2=四'
  assert outcome.metrics == {'acc': 0.5, 'pred': '五', 'parsed': 1.0}


def test_outcomes_keep_their_order_though_answers_do_not():
  """The first request is answered only when all others have been."""
  others = threading.Semaphore(0)

  def respond(body):
    number = int(body['completion'])
    if number == 0:
      for _ in range(7):
        assert others.acquire(timeout=30)
    else:
      others.release()
    return Answer({'score': number})

  with Server(respond) as server:
    outcomes = grade(server.url, [str(i) for i in range(8)], concurrency=8)
  assert [outcome.score for outcome in outcomes] == list(range(8))


def test_no_more_requests_at_once_than_allowed_and_no_fewer():
  meeting = threading.Barrier(3)

  def respond(body):
    meeting.wait(timeout=30)
    return Answer(RIGHT)

  with Server(respond) as server:
    outcomes = grade(server.url, ['x'] * 12, concurrency=3)
  assert len(outcomes) == 12 and all(outcome.score == 1.0 for outcome in outcomes)
  assert server.most_at_once == 3


@pytest.mark.parametrize(
  'fault', [Answer(status=500), Answer(status=503, headers={'Retry-After': '0'}), Answer(status=429)]
)
def test_what_may_pass_is_tried_again(fault, caplog):
  answers = [fault, fault, Answer(RIGHT)]
  with Server(lambda body: answers.pop(0)) as server:
    (outcome,) = grade(server.url, ['x'], retries=2)
  assert outcome.score == 1.0 and len(server.bodies) == 3 and not caplog.records


def test_a_lost_connection_is_tried_again():
  """The server promises more than it sends, then hangs up."""
  answers = [Answer(b'{"sc', headers={'Content-Length': '100', 'Connection': 'close'}), Answer(RIGHT)]
  with Server(lambda body: answers.pop(0)) as server:
    (outcome,) = grade(server.url, ['x'], retries=1)
  assert outcome.score == 1.0 and len(server.bodies) == 2


def test_pauses_grow_are_spread_and_follow_the_server(monkeypatch):
  monkeypatch.setattr(json_server, 'FIRST_PAUSE_S', 1.0)
  assert [json_server.pause_s(attempt, None, 0.5) for attempt in range(4)] == [1.0, 2.0, 4.0, 8.0]
  assert json_server.pause_s(1, None, 0.0) == 1.0 and json_server.pause_s(1, None, 0.999) == pytest.approx(
    3.0, rel=0.01
  )
  assert json_server.pause_s(0, 7.0, 0.9) == 7.0 and json_server.pause_s(3, 0.0, 0.9) == 0.0
  assert json_server.pause_s(0, 1e9, 0.0) == json_server.pause_s(30, None, 0.0) == json_server.LONGEST_PAUSE_S
  now = datetime.datetime(2026, 1, 1, 12, 0, 0, tzinfo=datetime.UTC)
  assert json_server.retry_after_s('3', now) == 3.0
  assert json_server.retry_after_s('Thu, 01 Jan 2026 12:00:30 GMT', now) == 30.0
  assert json_server.retry_after_s('soon', now) is None and json_server.retry_after_s(None, now) is None


@pytest.mark.parametrize(
  'answer, reason',
  [
    (Answer(b'no'), 'is not JSON'),
    (Answer(b'\xff\xfe'), 'is not JSON'),
    (Answer(b'[' * 9_000), 'is not JSON'),
    (Answer(b'[' * 100_000), 'its answer cannot be read: it has more than 10000 values'),
    (Answer(json.dumps({'score': 1}).encode('utf-16')), 'is not JSON'),
    (Answer(b'[1]'), "must be an object with a 'score', not [1]"),
    (Answer({'points': 1}), "'score' is missing"),
    (Answer({'score': '1'}), "'score' of its answer must be a number"),
    (Answer({'score': True}), "'score' of its answer must be a number"),
    (Answer({'score': None}), "'score' of its answer must be a number"),
    (Answer(b'{"score": NaN}'), 'must be a finite number'),
    (Answer(b'{"score": 1e999}'), 'must be a finite number'),
    (Answer(b'{"score": 1' + b'0' * 400 + b'}'), 'must be a finite number'),
    (Answer(b'{"score": ' + b'[' * 900 + b']' * 900 + b'}'), "'score' of its answer must be a number"),
    (Answer({'score': 1, 'feedback': ['x']}), "'feedback' of its answer must be a string or null"),
    (Answer({'score': 1, 'metrics': [1]}), "'metrics' of its answer must be an object"),
    (Answer({'score': 1, 'metrics': {'a': [1]}}), "'metrics.a' of its answer must be a number"),
    (Answer(b'"' + b'x' * 10_000_000 + b'"'), 'is larger than 1048576 bytes'),
    (Answer(gzip.compress(b'"' + b'x' * 10_000_000 + b'"'), headers={'Content-Encoding': 'gzip'}), "encoded ('gzip')"),
    (Answer(RIGHT, headers={'Content-Encoding': 'br\x1b[31m'}), r"encoded ('br\x1b[31m'), which was not asked for"),
    (Answer(b'{"score": ' + b'9' * 5000 + b'}'), 'is not JSON'),
    (Answer(b'{"score": -Infinity}'), 'must be a finite number'),
    (Answer({'score': 1, 'metrics': {str(i): 1 for i in range(101)}}), 'has more than 100 entries'),
    (Answer({'score': 1, 'metrics': {'a\x1b[2J': 1}}), r"cannot be printed: 'a\x1b[2J'"),
    (Answer({'score': 1, 'metrics': {'x' * 300: 1}}), 'is long or cannot be printed'),
    (Answer(b'\x1b]0;gotcha\x07', status=400), r"status 400 (Bad Request): '\x1b]0;gotcha\x07'"),
    (Answer({'error': 'which?'}, status=422), 'status 422 (Unprocessable Entity): \'{"error": "which?"}\''),
    (Answer(status=302, headers={'Location': '/elsewhere'}), 'status 302 (Found)'),
  ],
)
def test_a_useless_answer_costs_its_completion_and_is_asked_for_once(answer, reason, caplog):
  with Server(lambda body: answer if body['completion'] == 'bad' else Answer(RIGHT)) as server:
    good, bad = grade(server.url, ['good', 'bad'])
  assert good.score == 1.0 and good.reason is None
  assert bad.score is None and bad.feedback is None and bad.metrics == {} and reason in bad.reason
  assert len(server.bodies) == 2
  (record,) = caplog.records
  assert 'could not grade 1 of 2 completions' in record.getMessage() and reason in record.getMessage()


def test_many_failures_are_one_warning(caplog):
  def respond(body):
    return Answer(RIGHT) if body['completion'] == '0' else Answer(status=400)

  with Server(respond) as server:
    outcomes = grade(server.url, [str(i) for i in range(20)])
  assert sum(not outcome.graded for outcome in outcomes) == 19
  assert [record.levelno for record in caplog.records] == [logging.WARNING]
  assert 'could not grade 19 of 20 completions' in caplog.records[0].getMessage()


def test_a_server_that_invents_names_does_not_fill_a_run(caplog):
  def respond(body):
    own = {f'{body["completion"]} {index}': 1.0 for index in range(40)}
    return Answer({'score': 1, 'metrics': {'acc': 1.0, **own}})

  settings = EnvironmentsConfig(http=HttpGraderConfig(url='', concurrency=1))
  with Server(respond) as server:
    settings.http.url = server.url
    with Graders(settings) as graders:
      for batch in range(4):
        outcomes = grade(server.url, [f'{batch} {i}' for i in range(3)], graders=graders)
        assert all(outcome.score == 1.0 and outcome.metrics['acc'] == 1.0 for outcome in outcomes)
        kept = {name for outcome in outcomes for name in outcome.metrics}
        assert len(kept) == {0: 121, 1: 80}.get(batch, 1)
  first, last = (record.getMessage() for record in caplog.records)
  assert 'more than 200 metric names' in first and "such as '1 " in first
  assert f'more than 200 metric names: {4 * 3 * 40 - 199} metrics with other names were dropped' in last


def test_half_a_surrogate_pair_can_be_written():
  with Server(lambda body: Answer({'score': 0, 'feedback': 'a\ud800b', 'metrics': {'pred': '\udc00'}})) as server:
    (outcome,) = grade(server.url, ['x'])
  assert outcome.feedback == 'a?b' and outcome.metrics['pred'] == '?'


def test_a_server_that_hangs_is_left_after_the_timeout(caplog):
  end = threading.Event()

  def respond(body):
    if body['completion'] == 'slow':
      end.wait(30)
    return Answer(RIGHT)

  with Server(respond) as server:
    fast, slow = grade(server.url, ['fast', 'slow'], timeout_s=0.2, retries=1)
    end.set()
  assert fast.score == 1.0 and not slow.graded
  assert 'no complete answer within 0.2 s' in caplog.text
  assert [body['completion'] for body in server.bodies].count('slow') == 2


HANDSHAKE = b'\x16\x03\x03\x40\x00\x02\x00\x3f\xfc'  # The beginning of a long answer in TLS.
CHUNKED = b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n'


@pytest.mark.parametrize(
  'start, then',
  [
    (b'', b'H'),
    (b'HTTP/1.1 200 ', b'O'),
    (b'HTTP/1.1 200 OK\r\nX-Slow: ', b'0'),
    (b'HTTP/1.1 200 OK\r\n', b'X: y\r\n'),
    (b'', b'HTTP/1.1 103 Early Hints\r\n\r\n'),
    (b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n', b'0'),
    (b'HTTP/1.1 200 OK\r\n\r\n', b'0'),
    (CHUNKED, b'1\r\n0\r\n'),
    (CHUNKED + b'1;', b'0'),
    (CHUNKED + b'0\r\n', b'X: y\r\n'),
    (b'HTTP/1.1 500 No\r\nContent-Length: 1000\r\n\r\n', b'0'),
    (HANDSHAKE, b'0'),
  ],
)
def test_a_server_that_sends_byte_after_byte_is_left_after_the_timeout(start, then):
  """It is still sending when its completions have their outcomes, and the thread that asked has ended."""
  end = threading.Event()

  def drip(connection):
    connection.recv(2**16)
    connection.sendall(start)
    with contextlib.suppress(OSError):  # The client hangs up in the middle.
      while not end.wait(0.01):
        connection.sendall(then)

  with socket.create_server(('127.0.0.1', 0)) as listening, concurrent.futures.ThreadPoolExecutor(2) as threads:
    accepting = threads.submit(lambda: drip(listening.accept()[0]))
    scheme = 'https' if start == HANDSHAKE else 'http'
    settings = EnvironmentsConfig(
      http=HttpGraderConfig(url=f'{scheme}://127.0.0.1:{listening.getsockname()[1]}', timeout_s=0.1, retries=0)
    )
    timer = threading.Timer(20.0, end.set)  # Lest a failure takes for ever.
    timer.start()
    with Graders(settings) as graders:
      (outcome,) = graders.grade_part([example()], ['x'], truncated=[False])
      for thread in [thread for thread in threading.enumerate() if thread.name == 'grader-http']:
        thread.join(10)
        assert not thread.is_alive()
    assert not end.is_set() and outcome.reason == 'http: no complete answer within 0.1 s'
    timer.cancel()
    end.set()
    accepting.result()


@pytest.mark.parametrize(
  'start, then, reason',
  [
    (b'', b'HTTP/1.1 103 Early Hints\r\n\r\n' * 1000, 'begins with more than 65536 bytes of headers'),
    (b'HTTP/1.1 200 OK\r\n', b'X: y\r\n' * 1000, 'bytes of headers'),
    (b'HTTP/1.1 200 OK\r\nX: ', b'y' * 10_000, 'bytes of headers'),
    (b'HTTP/1.1 200 ', b'O' * 10_000, 'bytes of headers'),
    (CHUNKED, b'1\r\n0\r\n' * 1000, 'comes in more than 10000 pieces'),
    (CHUNKED, b'1000\r\n' + b'0' * 4096 + b'\r\n', 'is larger than 1048576 bytes'),
    (CHUNKED + b'0\r\n', b'X: y\r\n' * 1000, 'connection failed|larger'),
    (CHUNKED + b'1;', b'x' * 10_000, 'connection failed|larger'),
    (b'HTTP/1.1 200 OK\r\n\r\n', b'0' * 10_000, 'is larger than 1048576 bytes'),
    (b'HTTP/1.1 500 \x1b[31mNo\r\n\r\n', b'0' * 10_000, 'connection failed|status 500'),
  ],
)
def test_a_flood_is_left_before_the_timeout_and_at_little_cost(start, then, reason):
  """Of a server that would send for a minute."""
  end, sent = threading.Event(), []

  def flood(connection):
    connection.recv(2**16)
    with contextlib.suppress(OSError):  # The client hangs up in the middle.
      connection.sendall(start)
      while not end.is_set():
        connection.sendall(then)
        sent.append(len(then))

  with socket.create_server(('127.0.0.1', 0)) as listening, concurrent.futures.ThreadPoolExecutor(2) as threads:
    accepting = threads.submit(lambda: flood(listening.accept()[0]))
    settings = HttpGraderConfig(url=f'http://127.0.0.1:{listening.getsockname()[1]}', timeout_s=60, retries=0)
    timer = threading.Timer(60.0, end.set)
    timer.start()
    with Graders(EnvironmentsConfig(http=settings)) as graders:
      (outcome,) = graders.grade_part([example()], ['x'], truncated=[False])
    assert not end.is_set() and outcome.score is None
    assert re.search(reason, outcome.reason) and outcome.reason.isprintable()
    timer.cancel()
    end.set()
    accepting.result()
  assert sum(sent) < 2**24  # With what the system keeps on its way.


def test_headers_are_read_up_to_their_limit_however_they_arrive(monkeypatch):
  """A part just below the limit and a whole one after it would together be beyond what the parser takes."""
  handed = []

  class Endless(httpcore2.NetworkStream):
    def read(self, max_bytes, timeout=None):
      handed.append(min(max_bytes, 60_000))
      return b'y' * handed[-1]

    def write(self, buffer, timeout=None):
      pass

    def close(self):
      pass

    def get_extra_info(self, info):
      return None

  monkeypatch.setattr(httpcore2.SyncBackend, 'connect_tcp', lambda *arguments: Endless())
  server = json_server.JsonServer('http://127.0.0.1', authorization='', secrets=(), connections=1, setting='')
  with contextlib.closing(server), pytest.raises(json_server.Fault, match='more than 65536 bytes of headers'):
    server.ask({}, 60, name='test')
  assert sum(handed) == 2**16 + 1


@pytest.mark.skipif(shutil.which('openssl') is None, reason='makes a certificate with openssl')
def test_a_server_behind_tls(tmp_path, monkeypatch):
  key, certificate = tmp_path / 'key.pem', tmp_path / 'certificate.pem'
  subprocess.run(
    ['openssl', 'req', '-x509', '-newkey', 'ec', '-pkeyopt', 'ec_paramgen_curve:prime256v1', '-nodes', '-days', '2']
    + ['-subj', '/CN=grader', '-addext', 'subjectAltName=IP:127.0.0.1', '-keyout', key, '-out', certificate],
    check=True,
    capture_output=True,
  )
  context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
  context.load_cert_chain(certificate, key)
  with Server(lambda body: Answer(RIGHT), context) as server:
    with pytest.raises(UserError, match='CERTIFICATE_VERIFY_FAILED'):
      grade(server.url, ['x'], retries=0)
    monkeypatch.setenv('SSL_CERT_FILE', str(certificate))
    outcomes = grade(server.url, ['x' * 100_000] * 4, concurrency=2)
  assert [outcome.score for outcome in outcomes] == [1.0] * 4 and server.url.startswith('https://')


def test_a_name_server_that_does_not_answer_is_left(monkeypatch):
  end, resolve = threading.Event(), socket.getaddrinfo

  def hang(host, *rest, **options):
    if host == 'grader.invalid':
      end.wait(30)
    return resolve('127.0.0.1', *rest, **options)

  for name in ('http_proxy', 'HTTP_PROXY', 'all_proxy', 'ALL_PROXY'):
    monkeypatch.delenv(name, raising=False)
  monkeypatch.setattr(socket, 'getaddrinfo', hang)
  settings = HttpGraderConfig(url='http://grader.invalid', timeout_s=0.1, retries=0)
  with Graders(EnvironmentsConfig(http=settings)) as graders:
    (outcome,) = graders.grade_part([example()], ['x'], truncated=[False])
  assert outcome.reason == 'http: no complete answer within 0.1 s' and not end.is_set()
  end.set()


def test_a_server_that_takes_nothing_of_the_request_is_left():
  with socket.create_server(('127.0.0.1', 0), backlog=0) as listening:
    settings = HttpGraderConfig(url=f'http://127.0.0.1:{listening.getsockname()[1]}', timeout_s=0.2, retries=0)
    with Graders(EnvironmentsConfig(http=settings)) as graders:
      (outcome,) = graders.grade_part([example()], ['x' * 30_000_000], truncated=[False])
  assert outcome.reason == 'http: no complete answer within 0.2 s'


def test_a_length_that_is_a_lie_ends_the_answer_where_it_says():
  answers = [Answer(b'{"score": 1.0} {"score": 5.0}', headers={'Content-Length': '14', 'Connection': 'close'})]
  with Server(lambda body: answers[0]) as server:
    (outcome,) = grade(server.url, ['x'], retries=0)
  assert outcome.score == 1.0


def test_the_environment_names_a_proxy(monkeypatch):
  for name in ('http_proxy', 'HTTP_PROXY', 'all_proxy', 'ALL_PROXY', 'no_proxy', 'NO_PROXY'):
    monkeypatch.delenv(name, raising=False)
  with Server(lambda body: Answer(RIGHT)) as server:
    monkeypatch.setenv('http_proxy', server.url.replace('//', '//me:passw0rd@'))
    (outcome,) = grade('http://grader.invalid/grade', ['x'])
    assert outcome.score == 1.0 and server.paths == ['http://grader.invalid/grade']
    assert server.headers[0]['Proxy-Authorization'].startswith('Basic ')
    monkeypatch.setenv('no_proxy', '127.0.0.1')
    monkeypatch.setenv('http_proxy', dead_address())
    assert grade(server.url, ['x'])[0].score == 1.0
  monkeypatch.setenv('http_proxy', 'ftp://me:passw0rd@proxy')
  with pytest.raises(UserError, match='environments.http.url: the environment names a proxy') as raised:
    grade('http://grader.invalid/grade', ['x'])
  assert 'passw0rd' not in str(raised.value)


@pytest.mark.parametrize(
  'header',
  ['9' * 5000, '٣', 'Thu, 01 Jan 99999999999 12:00:30 GMT', 'Thu, 01 Jan 2026 12:00:30 +99999999999999', 'Mon', ''],
)
def test_no_header_about_a_pause_raises(header):
  wait = json_server.retry_after_s(header, datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC))
  assert 0 <= json_server.pause_s(0, wait, 0.5) <= json_server.LONGEST_PAUSE_S


def test_a_server_that_is_down_ends_the_run():
  address = dead_address()
  with pytest.raises(UserError) as raised:
    grade(address, ['x'] * 20, concurrency=2, retries=1)
  sentence = str(raised.value)
  assert "environment 'http' graded none of 20 completions" in sentence
  assert 'ConnectError' in sentence and address in sentence and 'environments.http.url' in sentence


def test_a_server_that_never_answers_is_given_up_before_all_were_asked():
  def hang_up(body):
    raise ConnectionAbortedError

  with Server(hang_up) as server:
    # Whichever of the completions is named first: one that was asked about, or one that no request was made for.
    with pytest.raises(UserError, match='graded none of 100 completions: .*the connection failed'):
      grade(server.url, ['x'] * 100, concurrency=2, retries=1)
  assert len(server.bodies) < 10


def test_a_server_that_refuses_all_ends_the_run():
  with Server(lambda body: Answer({'detail': 'bad key'}, status=401)) as server:
    with pytest.raises(UserError, match='graded none of 3 completions: it answered with status 401.*bad key'):
      grade(server.url, ['x'] * 3)
  assert len(server.bodies) == 3


def test_one_question_that_cannot_be_graded_does_not_end_a_run_that_worked():
  def respond(body):
    return Answer(RIGHT) if body['id'] == 'q0' else Answer(status=413)

  with Server(respond) as server:
    settings = EnvironmentsConfig(http=HttpGraderConfig(url=server.url))
    with Graders(settings) as graders:
      assert grade('', ['x'], graders=graders)[0].score == 1.0
      outcomes = grade('', ['x'] * 4, examples=[example(1)] * 4, graders=graders)
      assert not any(outcome.graded for outcome in outcomes)
      with pytest.raises(UserError, match='graded none of 2 completions: it answered with status 413'):
        grade('', ['x'] * 2, examples=[example(1), example(2)], graders=graders)
    with Graders(settings) as fresh, pytest.raises(UserError, match='status 413'):
      grade('', ['x'], examples=[example(1)], graders=fresh)


def test_a_batch_that_comes_in_parts_is_judged_as_a_whole(caplog):
  def respond(body):
    return Answer(RIGHT) if body['completion'] == 'good' else Answer(status=400)

  with Server(respond) as server:
    with Graders(EnvironmentsConfig(http=HttpGraderConfig(url=server.url))) as graders:

      def part(*texts):
        return graders.grade_part([example(i) for i in range(len(texts))], texts, truncated=[False] * len(texts))

      assert [outcome.score for outcome in part('bad', 'bad') + part('good') + part('bad')] == [None, None, 1, None]
      assert not caplog.records
      graders.end_batch()
      (record,) = caplog.records
      assert 'could not grade 3 of 4 completions' in record.getMessage()
      part('bad', 'bad')
      part('bad')
      with pytest.raises(UserError, match='graded none of 3 completions: it answered with status 400'):
        graders.end_batch()


def test_a_server_that_is_down_is_given_up_before_the_last_part():
  def hang_up(body):
    raise ConnectionAbortedError

  with Server(hang_up) as server:
    settings = HttpGraderConfig(url=server.url, concurrency=2, retries=1)
    with Graders(EnvironmentsConfig(http=settings)) as graders:
      graders.grade_part([example(0)], ['x'], truncated=[False])
      with pytest.raises(UserError, match='graded none of 2 completions: the connection failed'):
        graders.grade_part([example(1)], ['x'], truncated=[False])
  assert len(server.bodies) == 4


def test_the_key_is_sent_and_never_said(monkeypatch, caplog):
  monkeypatch.setenv('GRADER_KEY', 'Bearer s3cr3t-key\n')

  def respond(body):
    return Answer({'error': 'you sent s3cr3t-key'}, status=403) if body['completion'] == 'bad' else Answer(RIGHT)

  caplog.set_level(logging.INFO)
  monkeypatch.setenv('GRADER_TOKEN', 't0ken-of-mine')
  monkeypatch.setenv('GRADER_PATH', 'p4th/of/mine')
  with Server(respond) as server:
    grade(server.url, ['good', 'bad'], authorization_env='GRADER_KEY')
    with pytest.raises(UserError) as raised:
      address = server.url + '/${GRADER_PATH}?token=${GRADER_TOKEN}'
      grade(address, ['bad'], authorization_env='GRADER_KEY')
  assert {headers['Authorization'] for headers in server.headers} == {'Bearer s3cr3t-key'}
  assert server.paths[-1] == '/p4th/of/mine?token=t0ken-of-mine'
  said = caplog.text + str(raised.value)
  assert 'you sent ***' in said and server.url + '/***' in said
  assert not any(secret in said for secret in ('s3cr3t', 'p4th', 't0ken'))


def test_a_key_that_the_server_repeats_is_in_no_outcome(monkeypatch):
  monkeypatch.setenv('GRADER_KEY', 'Bearer s3cr3t-key')
  answer = {'score': 0, 'feedback': 'You sent s3cr3t-key.', 'metrics': {'pred': 's3cr3t-key', 's3cr3t-key': 1}}
  with Server(lambda body: Answer(answer)) as server:
    (outcome,) = grade(server.url, ['x'], authorization_env='GRADER_KEY')
  assert outcome.feedback == 'You sent ***.' and outcome.metrics == {'pred': '***', '***': 1}


@pytest.mark.parametrize('shown', range(8, 15))
def test_no_part_of_a_key_is_left_where_an_answer_is_shortened(monkeypatch, shown):
  """Its first `shown` characters are the last ones that a message has room for."""
  monkeypatch.setenv('GRADER_KEY', 'Bearer s3cr3t-key/of-mine')
  text = 'x' * (json_server.QUOTED - shown) + 's3cr3t-key/of-mine' + 'x' * 900
  answers = {
    'status': Answer(text.encode(), status=400),
    'as JSON': Answer(text.replace('/', '\\/').encode(), status=400),
    'body': Answer(text.encode()),
    'header': Answer(RIGHT, headers={'Content-Encoding': text}),
    'fine': Answer(RIGHT),
  }
  with Server(lambda body: answers[body['completion']]) as server:
    outcomes = grade(server.url, list(answers), authorization_env='GRADER_KEY')
  assert [outcome.graded for outcome in outcomes] == [False] * 4 + [True]
  assert not any('s3cr3t' in outcome.reason for outcome in outcomes[:4])


@pytest.mark.parametrize(
  'authorization, keys',
  [
    ('s3cr3t-key', ['s3cr3t-key']),
    ('Bearer s3cr3t-key', ['s3cr3t-key']),
    ('Token token="s3cr3t-key", nonce=n0nce-of-mine', ['s3cr3t-key', 'n0nce-of-mine']),
    ('Basic bWU6cGFzc3cwcmQ=', ['bWU6cGFzc3cwcmQ=', 'passw0rd']),
    ('Basic no base 64', []),
  ],
)
def test_every_part_of_a_header_that_is_a_key_is_one(monkeypatch, authorization, keys):
  monkeypatch.setenv('GRADER_KEY', authorization)
  with Server(lambda body: Answer({'score': 0, 'feedback': ' '.join(['bearer', *keys])})) as server:
    (outcome,) = grade(server.url, ['x'], authorization_env='GRADER_KEY')
  assert outcome.feedback == ' '.join(['bearer', *['***'] * len(keys)])


@pytest.mark.parametrize('section, name', [('http', 'url'), ('judge', 'base_url')])
@pytest.mark.parametrize(
  'address, sentence',
  [
    ('http://me:passw0rd@host/grade', 'holds a user or a password'),
    ('http://passw0rd@host/grade', 'holds a user or a password'),
    ('http://host/grade?api_key=passw0rd', r"the value of the parameter 'api_key'.* write \$\{NAME\}"),
    ('http://host/grade?a=1&X-Amz-Signature=passw0rd', "the value of the parameter 'X-Amz-Signature'"),
    ('http://host/grade?api_key=${KEY}&limit=3', None),
    ('http://${HOST}:8000/grade', None),
  ],
)
def test_addresses_with_keys_are_refused_before_anything_is_written(section, name, address, sentence):
  config = Config()
  config.model.path, config.data.train_files, config.trainer.test_freq = 'model', ('rows.json',), 0
  setattr(getattr(config.environments, section), name, address)
  if sentence is None:
    config.validate()
    return
  with pytest.raises(UserError, match=f'environments.{section}.{name} .*{sentence}') as raised:
    config.validate()
  assert 'passw0rd' not in str(raised.value)


@pytest.mark.parametrize(
  'settings, sentence',
  [
    ({}, 'environments.http.url is empty: set it to the address'),
    ({'url': 'localhost:8000'}, 'environments.http.url must be an http or https address'),
    ({'url': 'ftp://host/x'}, 'environments.http.url must be an http or https address'),
    ({'url': 'http://me:key'}, 'environments.http.url must be an http or https address'),
    ({'url': 'http://host/${NOT_SET_HERE}'}, r'url names \$\{NOT_SET_HERE\}: there is no such environment variable'),
    ({'url': 'http://host', 'authorization_env': 'NOT_SET_HERE'}, 'authorization_env=NOT_SET_HERE: there is no such'),
  ],
)
def test_settings_that_cannot_work_are_named_before_a_run(settings, sentence):
  graders = Graders(EnvironmentsConfig(http=HttpGraderConfig(**settings)))
  with pytest.raises(UserError, match=sentence):
    graders.prepare(['http'])


@pytest.mark.parametrize('section', ['http', 'judge'])
@pytest.mark.parametrize('name, value', [('timeout_s', 0.0), ('retries', -1), ('concurrency', 0)])
def test_limits_are_validated(section, name, value):
  config = Config()
  config.model.path, config.data.train_files, config.trainer.test_freq = 'model', ('rows.json',), 0
  config.validate()
  setattr(getattr(config.environments, section), name, value)
  with pytest.raises(UserError, match=f'environments.{section}.{name}'):
    config.validate()


def test_the_registry_knows_it():
  assert 'http' in registry.names()
  assert json.loads(json.dumps(jsonable({'a': (1, None, np.float32(2), float('nan'))}))) == {'a': [1, None, 2.0, None]}
