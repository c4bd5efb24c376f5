"""The circuit breaker around an external teacher, against a server that dies, hangs, babbles and comes back."""

import concurrent.futures
import threading

import pytest

from sdpo_jax.config import TeacherEndpointConfig
from sdpo_jax.distributed.stopping import NEVER, StoppedError
from sdpo_jax.environments import json_server
from sdpo_jax.errors import UserError
from sdpo_jax.serving.call import Call
from sdpo_jax.serving.errors import Cancelled, InvalidRequest, TeacherUnavailable
from sdpo_jax.serving.sidecar import FAILURES, STALE, Sidecar
from sdpo_jax.teacher import asking, endpoint
from sdpo_jax.teacher.endpoint import EndpointQuery
from tests.local_server import Answer, Server

ASKED = [EndpointQuery([5], [6, 7])]
DEAD = Answer({'error': 'no'}, status=500)
PAUSE = 10.0


def well(body):
  """Return the answer of a teacher that knows only the next token."""
  rows = [None, *({str(token): {'logprob': -0.5}} for token in body['prompt'][1:])]
  return Answer({'choices': [{'prompt_logprobs': rows}]})


class World:
  """A teacher whose answers, time and check the test sets."""

  def __init__(self, retries=0, timeout_s=5.0):
    self.answer, self.now, self.checks = well, 100.0, []
    self.server = Server(lambda body: self.answer(body))
    self.check = lambda endpoint, stop: endpoint.score(ASKED, stop)
    settings = TeacherEndpointConfig(
      url=f'{self.server.url}/v1', model='m', top_k=1, retries=retries, timeout_s=timeout_s
    )
    self.teacher = Sidecar(settings, 264, self._checked, pause_s=PAUSE, clock=lambda: self.now)

  def _checked(self, endpoint, stop):
    self.checks.append(stop)
    self.check(endpoint, stop)

  def refused(self, kind=TeacherUnavailable):
    """Ask once, which must be refused; return the error and how many requests the server got."""
    before = len(self.server.bodies)
    with pytest.raises(kind) as caught:
      self.teacher.score(ASKED)
    assert self.server.url not in str(caught.value) and '127.0.0.1' not in str(caught.value)
    return caught.value, len(self.server.bodies) - before

  def open(self):
    self.answer = lambda body: DEAD
    for _ in range(FAILURES):
      _, asked = self.refused()
      assert asked == 1
    assert self.teacher.state == {'breaker': 'open', 'retry_after_s': PAUSE}


@pytest.fixture
def world(monkeypatch):
  monkeypatch.setattr(json_server, 'FIRST_PAUSE_S', 0.0)
  found = World()
  with found.server:
    yield found
    found.teacher.close()


def test_a_dead_teacher_is_not_asked_until_the_pause_is_over_and_comes_back_through_a_check(world):
  [scored] = world.teacher.score(ASKED)
  assert scored.target_log_probs.tolist() == [-0.5, -0.5] and not world.checks
  world.open()
  world.now += 4.0
  error, asked = world.refused()
  assert asked == 0 and error.retry_after == pytest.approx(PAUSE - 4.0) and error.status == 503
  world.now += PAUSE
  error, asked = world.refused()  # The check, which fails.
  assert asked == 1 and len(world.checks) == 1 and world.teacher.state['retry_after_s'] == PAUSE
  assert world.server.url in error.log
  world.answer = well
  _, asked = world.refused()
  assert asked == 0
  world.now += PAUSE
  assert len(world.teacher.score(ASKED)) == 1 and world.teacher.state == {'breaker': 'closed'}
  assert world.teacher.counts == {'requests': 7, 'failures': 4, 'refused': 2}


def test_a_success_between_failures_keeps_the_breaker_closed(world):
  for _ in range(2 * FAILURES):
    world.answer = lambda body: DEAD
    world.refused()
    world.answer = well
    world.teacher.score(ASKED)
  assert world.teacher.state == {'breaker': 'closed'}


def test_attempts_that_fail_together_count_as_one(world):
  all_here = threading.Barrier(FAILURES + 1)

  def together(body):
    all_here.wait(30)
    return DEAD

  world.answer = together
  with concurrent.futures.ThreadPoolExecutor(FAILURES + 1) as pool:
    for done in [pool.submit(world.refused) for _ in range(FAILURES + 1)]:
      done.exception(30)
  assert world.teacher.counts['failures'] == FAILURES + 1 and world.teacher.state == {'breaker': 'closed'}


@pytest.mark.parametrize('status', [400, 413, 422])
def test_a_text_that_the_teacher_refuses_does_not_open_it_for_others(world, status):
  world.answer = lambda body: Answer({'error': 'too long'}, status=status)
  world.check = lambda endpoint, stop: None  # Whose own texts it takes.
  for _ in range(2 * FAILURES):
    error, _ = world.refused(InvalidRequest)
    assert error.field == 'teacher' and 'too long' in error.log
  assert world.teacher.state == {'breaker': 'closed'} and len(world.checks) == 1  # After the first three.


def test_a_teacher_that_refuses_everything_is_the_operators_matter(world, caplog):
  world.answer = lambda body: Answer({'error': 'no prompt_logprobs'}, status=400)
  for _ in range(FAILURES):
    world.refused(InvalidRequest)
  assert not world.checks and not caplog.text
  error, asked = world.refused()
  assert error.status == 503 and error.retry_after == PAUSE and 'no prompt_logprobs' in error.log
  assert asked == len(world.checks) == 1 and world.teacher.state['breaker'] == 'open'
  assert 'The external teacher fails its check: it is not asked for 10 s.' in caplog.text
  world.now += PAUSE
  world.answer = well
  assert len(world.teacher.score(ASKED)) == 1 and world.teacher.state == {'breaker': 'closed'}


@pytest.mark.parametrize(
  'answer', [Answer(b'<html>'), Answer({'choices': []}), Answer({'choices': [{'prompt_logprobs': [None]}]}), DEAD]
)
def test_garbage_counts_as_a_failure(world, answer):
  world.answer = lambda body: answer
  for _ in range(FAILURES):
    world.refused()
  assert world.teacher.state['breaker'] == 'open'


def test_one_request_checks_while_others_are_refused_at_once(world):
  world.open()
  world.now += PAUSE
  entered, leave = threading.Event(), threading.Event()

  def slowly(endpoint, stop):
    entered.set()
    assert leave.wait(30)

  world.answer, world.check = well, slowly
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    first = pool.submit(world.teacher.score, ASKED)
    assert entered.wait(30) and world.teacher.state['breaker'] == 'probing'
    assert world.refused()[1] == 0
    leave.set()
    assert len(first.result(30)) == 1
  assert world.teacher.state == {'breaker': 'closed'}


def test_a_teacher_that_nobody_has_asked_for_long_is_checked_by_one_request_while_others_wait(world):
  world.now += STALE + 1.0
  entered, leave = threading.Event(), threading.Event()

  def slowly(endpoint, stop):
    entered.set()
    assert leave.wait(30)

  world.check = slowly
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    scores = [pool.submit(world.teacher.score, ASKED) for _ in range(4)]
    assert entered.wait(30)
    leave.set()
    assert all(len(each.result(30)) == 1 for each in scores)
  assert len(world.checks) == 1 and world.teacher.counts == {'requests': 4, 'failures': 0, 'refused': 0}


def test_a_check_of_a_teacher_that_nobody_has_asked_for_long_fails_like_any_request(world):
  world.now += STALE + 1.0
  world.answer = lambda body: DEAD
  for _ in range(FAILURES - 1):
    assert world.teacher.state == {'breaker': 'closed'}
    assert world.refused()[1] == 1
  world.answer = well
  assert len(world.teacher.score(ASKED)) == 1 and len(world.checks) == FAILURES


def test_nobody_checks_beside_a_check_that_has_opened_it(world):
  world.now += STALE + 1.0
  entered, leave = threading.Event(), threading.Event()

  def opening(endpoint, stop):
    for _ in range(FAILURES):
      with pytest.raises(UserError):
        endpoint.score(ASKED, stop)
    entered.set()
    assert leave.wait(30)

  world.answer, world.check = lambda body: DEAD, opening
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    first = pool.submit(world.refused)
    assert entered.wait(30)
    world.now += PAUSE
    assert world.refused()[1] == 0 and len(world.checks) == 1
    leave.set()
    first.exception(30)


@pytest.mark.parametrize('fails', [True, False], ids=['after failures', 'while nobody asked'])
def test_another_teacher_in_its_place_is_refused(world, fails):
  if fails:
    world.open()
    world.now += PAUSE
  else:
    world.now += STALE
    world.teacher.score(ASKED)
    world.now += STALE
    world.teacher.score(ASKED)
    world.now += STALE + 1.0
    assert not world.checks
  world.answer = well

  def check(endpoint, stop):
    raise UserError(f'The teacher at {endpoint.public_url} has another tokenizer.')

  world.check = check
  error, asked = world.refused()
  assert (
    asked == 0
    and len(world.checks) == 1
    and 'is not the one of the settings' in str(error)
    and world.server.url in error.log
  )
  assert world.teacher.state == {'breaker': 'open', 'retry_after_s': PAUSE}


def test_a_client_that_leaves_during_the_check_leaves_the_check_to_the_next_one(world):
  world.open()
  world.now += PAUSE
  world.answer = well

  def check(endpoint, stop):
    raise StoppedError

  own, world.check = world.check, check
  with pytest.raises(StoppedError):
    world.teacher.score(ASKED, Call())
  world.check = own
  assert len(world.teacher.score(ASKED)) == 1


def test_a_teacher_that_is_away_at_the_start_is_checked_later_and_one_that_does_not_fit_ends_it(world, caplog):
  world.answer = lambda body: DEAD
  world.teacher.begin()
  assert 'starts without its teacher' in caplog.text and world.refused()[1] == 0
  world.now += PAUSE
  world.answer = well
  assert len(world.teacher.score(ASKED)) == 1 and world.checks[0] is NEVER
  world.answer = lambda body: Answer({'error': 'no such model'}, status=404)
  with pytest.raises(UserError, match='no such model'):
    world.teacher.begin()


def test_a_teacher_that_hangs_until_the_time_limit_is_unavailable_and_a_client_that_leaves_is_not_told(monkeypatch):
  monkeypatch.setattr(asking, 'STOP_S', 0.01)
  found, leave, now, calls = World(timeout_s=30.0), threading.Event(), [0.0], []

  def hang(body):
    now[0] += 2.0
    if len(calls) == 2:
      calls[1].end()
    return leave.wait(30) and DEAD

  found.answer = hang
  with found.server:
    try:
      calls.append(Call(1.0, clock=lambda: now[0]))
      with pytest.raises(TeacherUnavailable, match='within the time limit') as caught:
        found.teacher.score(ASKED, calls[0])
      assert caught.value.status == 503 and caught.value.retry_after >= 1.0
      calls.append(Call())
      with pytest.raises(Cancelled):
        found.teacher.score(ASKED, calls[1])
    finally:
      leave.set()
      found.teacher.close()


def test_nothing_is_asked_again_once_it_is_open(monkeypatch):
  monkeypatch.setattr(endpoint, 'STOP_S', 0.01)
  found, paused = World(retries=9), threading.Event()
  noting = found.teacher._endpoint._on_attempt  # noqa: SLF001

  def attempted(*attempt):
    noting(*attempt)
    paused.set()

  monkeypatch.setattr(found.teacher._endpoint, '_on_attempt', attempted)  # noqa: SLF001
  found.answer = lambda body: Answer({}, 503, {'Retry-After': '60'})
  with found.server, concurrent.futures.ThreadPoolExecutor(1) as pool:
    first = pool.submit(found.refused)
    assert paused.wait(30)  # It would ask again in a minute.
    found.answer = lambda body: Answer({}, 503, {'Retry-After': '0'})
    error, asked = found.refused()
    assert asked == FAILURES - 1 and error.retry_after == PAUSE
    assert first.result(30)[1] == len(found.server.bodies) == FAILURES
    found.teacher.close()


def test_a_teacher_that_hangs_opens_it_like_a_dead_one(monkeypatch):
  monkeypatch.setattr(json_server, 'FIRST_PAUSE_S', 0.0)
  found, leave = World(retries=FAILURES - 1, timeout_s=0.05), threading.Event()
  found.answer = lambda body: leave.wait(30) and DEAD
  with found.server:
    try:
      error, asked = found.refused()
      assert asked == FAILURES and 'no complete answer within' in error.log
      assert found.teacher.state['breaker'] == 'open' and error.retry_after == PAUSE
    finally:
      leave.set()
      found.teacher.close()
