"""The circuit breaker around an external teacher, against a server that dies, hangs, babbles and comes back."""

import concurrent.futures
import threading

import pytest

from sdpo_jax.config import TeacherEndpointConfig
from sdpo_jax.distributed.stopping import NEVER, StoppedError
from sdpo_jax.environments import json_server
from sdpo_jax.errors import UserError
from sdpo_jax.serving.call import Call
from sdpo_jax.serving.errors import InvalidRequest, TeacherUnavailable
from sdpo_jax.serving.sidecar import FAILURES, STALE, Sidecar
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
  for _ in range(2 * FAILURES):
    error, _ = world.refused(InvalidRequest)
    assert error.field == 'teacher' and 'too long' in error.log
  assert world.teacher.state == {'breaker': 'closed'}


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
