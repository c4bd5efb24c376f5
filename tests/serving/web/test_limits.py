"""Limits: bodies cut off while they come, and deadlines."""

import asyncio

import pytest

from sdpo_jax.serving.errors import InvalidRequest, TooLarge
from sdpo_jax.serving.web.admission import read_body, time_limit
from sdpo_jax.serving.web.error_responses import TooSlow


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
