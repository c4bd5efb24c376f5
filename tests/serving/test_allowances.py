"""What keys may use: tokens and feedbacks per minute and per day, counted over restarts and by several processes."""

import pathlib
import types

from hypothesis import given
from hypothesis import strategies as st
import pytest

from sdpo_jax.config import LimitsConfig
from sdpo_jax.serving.allowances import KINDS, Allowances, TokenBucket
from sdpo_jax.serving.errors import Busy, InvalidRequest, StorageFailed
from sdpo_jax.serving.store.database import Database

DAY = 86400
NOON = 20_000 * DAY + DAY // 2  # Of some day.
NONE = dict.fromkeys(KINDS, 0)


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


@pytest.fixture
def world(tmp_path):
  """Make allowances that share a clock and a database, which is opened anew each time."""
  found = types.SimpleNamespace(now=0.0, database=None)

  def make(database=True, **limits):
    if database:
      if found.database is not None:
        found.database.close()
      found.database = Database.open(pathlib.Path(tmp_path, 'db'), 'root')
    database = found.database if database else None
    return Allowances(LimitsConfig(**limits), database, lambda: found.now, lambda: NOON + found.now)

  found.make = make
  yield found
  if found.database is not None:
    found.database.close()


def test_tokens_of_all_kinds_share_a_minute_and_each_key_has_its_own(world):
  allowances = world.make(tokens_per_minute=60, burst_tokens=10)
  allowances.spend('a', 'sampled', 4)
  allowances.spend('a', 'learned', 6)
  with pytest.raises(Busy, match='60 tokens per minute') as refused:
    allowances.spend('a', 'scored', 5)
  assert refused.value.retry_after == pytest.approx(5)
  allowances.spend('b', 'scored', 10)
  allowances.spend('a', 'feedbacks', 1)
  world.now += refused.value.retry_after
  allowances.spend('a', 'scored', 5)
  assert allowances.used('a')['day'] == NONE | {'sampled': 4, 'learned': 6, 'scored': 5, 'feedbacks': 1}


@pytest.mark.parametrize('unit, kind', [('tokens', 'sampled'), ('feedbacks', 'feedbacks')])
def test_a_day_ends_at_midnight_in_utc(world, unit, kind):
  allowances = world.make(**{f'{unit}_per_day': 10})
  for _ in range(2):
    allowances.spend('a', kind, 5)
  allowances.spend('b', kind, 10)
  with pytest.raises(Busy, match=f'limited to 10 {unit} per day') as refused:
    allowances.spend('a', kind, 1)
  assert refused.value.retry_after == DAY / 2
  allowances.spend('a', kind, -1)  # Given back.
  allowances.spend('a', kind, 1)
  world.now += refused.value.retry_after - 0.5
  with pytest.raises(Busy):
    allowances.spend('a', kind, 1)
  world.now += 1
  allowances.spend('a', kind, 10)
  assert allowances.used('a')['day'] == NONE | {kind: 10}


def test_what_requests_under_way_have_reserved_is_soon_free_or_used(world):
  """Only what is used for good makes others wait until it is midnight, or until a bucket has filled."""
  for limits, later in (({'tokens_per_day': 100}, DAY / 2), ({'tokens_per_minute': 60, 'burst_tokens': 100}, 60)):
    made = world.make(**{'tokens_per_minute': None, 'tokens_per_day': None} | limits)
    key = str(later)
    made.spend(key, 'sampled', 90, reserve=True)
    with pytest.raises(Busy) as refused:
      made.spend(key, 'learned', 70)
    assert refused.value.retry_after == 1.0
    made.spend(key, 'sampled', -20, reserve=True)
    made.settle(key, {'sampled': 70})
    with pytest.raises(Busy) as refused:
      made.spend(key, 'learned', 90)
    assert refused.value.retry_after == pytest.approx(later)
    made.spend(key, 'learned', 30)


def test_what_never_fits_into_a_day_is_refused_for_good(world):
  made = world.make(tokens_per_day=100)
  with pytest.raises(InvalidRequest, match=r'may use 101 tokens, more than serve\.limits\.tokens_per_day=100'):
    made.spend('a', 'sampled', 101)
  made.spend('a', 'sampled', 100)


def test_what_is_taken_back_after_midnight_gives_no_credit(world):
  made = world.make(tokens_per_day=100)
  made.spend('k', 'sampled', 90)
  world.now += DAY / 2
  made.spend('k', 'sampled', -89)
  assert made.today().get(('k', 'sampled'), 0) == 0
  made.spend('k', 'sampled', 100)
  with pytest.raises(Busy):
    made.spend('k', 'sampled', 1)


def test_feedbacks_have_a_rate_of_their_own(world):
  allowances = world.make(feedbacks_per_minute=2, tokens_per_minute=None, tokens_per_day=None)
  for _ in range(2):
    allowances.spend('a', 'feedbacks', 1)
  with pytest.raises(Busy, match='2 feedbacks per minute') as refused:
    allowances.spend('a', 'feedbacks', 1)
  assert refused.value.retry_after == pytest.approx(30)
  allowances.spend('a', 'learned', 10**12)
  allowances.spend('a', 'requests', 10**6)


def test_days_survive_a_restart_and_minutes_do_not(world):
  allowances = world.make(tokens_per_day=100)
  allowances.spend('a', 'sampled', 90)
  allowances.save()
  allowances.spend('a', 'sampled', -30)
  allowances.spend('b', 'feedbacks', 1)
  allowances.save()
  allowances.spend('b', 'feedbacks', 1)  # Not saved: the process dies.
  again = world.make(tokens_per_day=100)
  assert again.used('a')['day'] == NONE | {'sampled': 60} and again.used('a')['minute'] == NONE
  assert again.used('b')['day'] == NONE | {'feedbacks': 1}
  with pytest.raises(Busy):
    again.spend('a', 'learned', 41)
  again.spend('a', 'learned', 40)
  world.now += DAY
  assert world.make().used('a')['day'] == NONE


def test_several_processes_add_to_the_same_days(world):
  one = world.make(tokens_per_day=100)
  two = Allowances(LimitsConfig(tokens_per_day=100), world.database, lambda: 0.0, lambda: NOON)
  for allowances in (one, two):
    allowances.spend('a', 'sampled', 50)
    allowances.save()
  two.spend('b', 'sampled', 1)  # Not refused, nor lost.
  with pytest.raises(Busy):
    two.spend('a', 'sampled', 1)
  one.spend('a', 'requests', 1)  # It learns what the other has added when it saves.
  one.spend('a', 'sampled', -1)
  one.save()
  assert one.used('a')['day'] == NONE | {'sampled': 99, 'requests': 1}


def test_what_cannot_be_saved_is_saved_later(world, monkeypatch):
  allowances = world.make()
  allowances.spend('a', 'sampled', 5)

  def full(amounts):
    raise StorageFailed('The disk is full.')

  with monkeypatch.context() as patched:
    patched.setattr(world.database, 'add_usage', full)
    with pytest.raises(StorageFailed):
      allowances.save()
  allowances.spend('a', 'sampled', 2)
  allowances.save()
  assert world.make().used('a')['day'] == NONE | {'sampled': 7}


def test_a_month_is_kept(world):
  allowances = world.make()
  allowances.spend('a', 'sampled', 5)
  allowances.save()
  day = NOON // DAY
  for later, kept in ((31, {('a', 'sampled'): 5}), (32, {})):
    world.now = later * DAY
    allowances.spend('b', 'sampled', 1)
    allowances.save()
    assert world.database.usage(day) == kept


def test_full_buckets_and_past_days_take_no_memory(world):
  allowances = world.make(database=False, tokens_per_minute=60, burst_tokens=10)
  for number in range(100):
    allowances.spend(str(number), 'sampled', 10)
  world.now += DAY
  allowances.spend('x', 'sampled', 1)
  assert set(allowances._buckets) == {('x', 'tokens')}  # noqa: SLF001 (A forgotten bucket is as good as a full one.)
  assert allowances.today() == {('x', 'sampled'): 1}


def test_limits_are_on_by_default_and_said(world):
  allowances = world.make(database=False)
  said = allowances.used('a')
  assert said['key'] == 'a' and all(limit > 1000 for limit in said['limits'].values())
  assert said['limits'].keys() == {
    f'{unit}_per_{time}' for unit in ('tokens', 'feedbacks') for time in ('minute', 'day')
  }
