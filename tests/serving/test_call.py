"""A request ends when its sender leaves or its time is over, and whatever works for it is told."""

import threading

import pytest

from sdpo_jax.serving.call import Call
from sdpo_jax.serving.errors import Cancelled, Deadline


def test_a_request_goes_on_until_its_time_is_over():
  now = [0.0]
  call = Call(deadline=5.0, clock=lambda: now[0])
  call.check()
  now[0] = 5.0
  with pytest.raises(Deadline, match='nothing was changed'):
    call.check()
  Call().check()


def test_whoever_works_for_a_request_is_told_once_when_it_ends():
  call, told = Call(), []
  with call.on_end(lambda: told.append('first')):
    pass
  with call.on_end(lambda: told.append('second')):
    thread = threading.Thread(target=call.end)
    thread.start()
    thread.join()
    call.end(Deadline('later'))
  with call.on_end(lambda: told.append('third')):
    pass
  assert told == ['second', 'third']
  with pytest.raises(Cancelled):
    call.check()


def test_the_first_error_that_ends_a_request_is_the_one_it_raises():
  call = Call()
  call.end(Deadline('over'))
  call.end()
  with pytest.raises(Deadline, match='over'):
    call.check()


def test_what_a_request_spends_is_asked_for_before():
  spent = []
  Call(spend=lambda kind, tokens: spent.append((kind, tokens))).spend('sampled', 7)
  Call().spend('sampled', 7)
  assert spent == [('sampled', 7)]
