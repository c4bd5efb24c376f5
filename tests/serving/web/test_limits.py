"""Limits: tokens per minute with the time to come again, bodies cut off while they come, deadlines, places."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st
import pytest

from sdpo_jax.config import LimitsConfig
from sdpo_jax.serving.errors import Busy, InvalidRequest, TooLarge
from sdpo_jax.serving.web.admission import Allowances, ConcurrencyLimit, TokenBucket, read_body, time_limit
from sdpo_jax.serving.web.error_responses import TooSlow


def test_a_bucket_says_when_to_come_again_and_that_is_true():
  now = [0.0]
  bucket = TokenBucket(10, 100, lambda: now[0])
  assert bucket.take(100) == 0
  wait = bucket.take(30)
  assert wait == pytest.approx(3)
  now[0] += wait + 1e-9
  assert bucket.take(30) == 0
  assert bucket.take(1) > 0
  bucket.take(-20)
  assert bucket.take(20) == 0


def test_a_request_for_more_than_a_bucket_holds_is_let_in_when_it_is_full():
  now = [0.0]
  bucket = TokenBucket(10, 100, lambda: now[0])
  assert bucket.take(300) == 0
  now[0] += 20.0
  assert bucket.take(1) == pytest.approx(0.1)  # The level is 0 again.
  now[0] += 9.0
  assert bucket.take(300) == pytest.approx(1)
  now[0] += 1.0
  assert bucket.take(300) == 0


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(1, 300)), max_size=60))
def test_no_more_than_the_burst_and_the_rate_are_ever_had(requests):
  now, had, largest = [0.0], 0, 0
  bucket = TokenBucket(10, 100, lambda: now[0])
  for pause, tokens in requests:
    now[0] += pause
    if bucket.take(tokens) == 0:
      had, largest = had + tokens, max(largest, tokens)
  assert had <= 100 + 10 * now[0] + max(0, largest - 100) + 1e-6


def keys_of(allowances):
  """Return the keys whose buckets are in memory."""
  return set(allowances._buckets)  # noqa: SLF001 (A bucket that is forgotten is as good as a full one.)


def test_keys_have_buckets_of_their_own_and_full_ones_are_forgotten():
  now = [0.0]
  allowances = Allowances(LimitsConfig(tokens_per_minute=60, burst_tokens=10), lambda: now[0])
  allowances.spend('a', 10)
  with pytest.raises(Busy, match='60 tokens per minute') as refused:
    allowances.spend('a', 5)
  assert refused.value.retry_after == pytest.approx(5)
  allowances.spend('b', 10)
  now[0] = 100.0
  allowances.spend('c', 1)
  assert keys_of(allowances) == {'c'}
  allowances.spend('a', 0)
  assert keys_of(allowances) == {'c'}


def test_without_a_limit_nothing_is_counted():
  allowances = Allowances(LimitsConfig())
  allowances.spend('a', 10**9)
  assert not keys_of(allowances)


def test_places_are_refused_when_all_are_taken():
  places = ConcurrencyLimit(2)
  places.take()
  places.take()
  with pytest.raises(Busy, match='limit of 2 concurrent requests'):
    places.take()
  places.let_go()
  places.take()


@pytest.mark.parametrize('header, seconds', [(None, 300), ('1500', 1.5), ('999999999', 300), ('1', 0.001)])
def test_the_header_can_only_shorten_the_time(header, seconds):
  assert time_limit(header, 300) == seconds


@pytest.mark.parametrize('header', ['', '0', '-1', '1.5', 'soon', '٣', '1' * 5000, ' 5'])
def test_a_time_that_is_none_is_refused(header):
  with pytest.raises(InvalidRequest, match='X-Deadline-Ms'):
    time_limit(header, 300)


def receiving(*parts, end=True):
  """Return a `receive` that hands out parts of a body, and the list of those that are left."""
  left = [{'type': 'http.request', 'body': part, 'more_body': True} for part in parts]
  if end:
    left.append({'type': 'http.request', 'body': b'', 'more_body': False})

  async def receive():
    if not left:
      await asyncio.Event().wait()
    return left.pop(0)

  return receive, left


def test_a_body_is_cut_off_while_it_comes():
  receive, left = receiving(*[b'x' * 100] * 50)
  with pytest.raises(TooLarge, match='larger than the limit of 1000 bytes'):
    asyncio.run(read_body(receive, None, 1000, 5, 5))
  assert len(left) == 40  # Not one part more than it took.
  receive, left = receiving(b'x')
  with pytest.raises(TooLarge):
    asyncio.run(read_body(receive, '1001', 1000, 5, 5))
  assert len(left) == 2
  receive, _ = receiving(b'ab', b'', b'c')
  assert asyncio.run(read_body(receive, '3', 1000, 5, 5)) == b'abc'


def test_a_body_that_does_not_come_is_given_up():
  receive, _ = receiving(b'ab', end=False)
  with pytest.raises(TooSlow, match='No part of the body arrived'):
    asyncio.run(read_body(receive, None, 1000, 0.001, 5))


def test_a_body_that_comes_byte_by_byte_is_given_up():
  async def drip():
    await asyncio.sleep(0)
    return {'type': 'http.request', 'body': b'x', 'more_body': True}

  with pytest.raises(TooSlow, match='The body did not arrive within 0.01 seconds'):
    asyncio.run(read_body(drip, None, 10**9, 5, 0.01))


def test_a_sender_that_leaves_is_noticed():
  async def gone():
    return {'type': 'http.disconnect'}

  assert asyncio.run(read_body(gone, None, 10, 5, 5)) is None
