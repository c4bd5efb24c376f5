"""Places that keys share, and permits that they get in turns."""

import collections
import functools
import threading

from hypothesis import given
from hypothesis import strategies as st
import pytest

from sdpo_jax.rollout.fair_queue import Payer
from sdpo_jax.serving import capacity
from sdpo_jax.serving.call import Call
from sdpo_jax.serving.capacity import Capacity, FairSemaphore, Turns
from sdpo_jax.serving.errors import Cancelled, Deadline

LONG = 30.0  # Seconds that no test takes.


@given(st.integers(1, 40), st.lists(st.tuples(st.sampled_from('abc'), st.booleans(), st.integers(1, 3)), max_size=80))
def test_a_key_may_have_as_many_as_it_leaves_and_one_that_has_none_always_finds_one(limit, steps):
  places, taken = Capacity(limit), collections.Counter()
  for key, takes, count in steps:
    if takes:
      allowed = taken[key] + count <= limit - taken.total()
      assert places.has_room(key, count) == allowed and places.take(key, count) == allowed
      taken[key] += count if allowed else 0
    elif taken[key]:
      places.let_go(key)
      taken[key] -= 1
    assert places.taken == taken.total()
    assert places.has_room('new') == (taken.total() < limit)


@pytest.mark.parametrize('keys, each', [(1, 64), (2, 42), (3, 32)])
def test_keys_that_take_all_they_can_get_equal_parts(keys, each):
  """With k greedy keys each has 1/(k + 1): Choudhury and Hahne's threshold with α = 1."""
  places, taken = Capacity(128), collections.Counter()
  while took := [number for number in range(keys) if places.take(str(number))]:
    taken.update(took)
  assert [taken[number] for number in range(keys)] == [pytest.approx(each, abs=1)] * keys


def test_one_key_has_no_more_than_its_limit_and_the_only_one_has_all():
  places = Capacity(10, per_key=2)
  assert [places.take('a') for _ in range(3)] == [True, True, False] and places.take('b')
  only = Capacity(3, shared=False)
  assert [only.take('a') for _ in range(4)] == [True, True, True, False]


def test_those_who_are_refused_are_asked_back_one_by_one_as_fast_as_others_end(monkeypatch):
  now = [0.0]
  monkeypatch.setattr(capacity.time, 'monotonic', lambda: now[0])
  places = Capacity(4)
  assert places.take('a') and places.take('a') and places.refused('a') == 1.0
  for _ in range(60):  # One ends every half second.
    now[0] += 0.5
    places.let_go('a')
    places.take('a')
  waits = [places.refused('a') for _ in range(100)]
  assert waits[:3] == pytest.approx([1.0, 1.5, 2.0], abs=0.1) and max(waits) == pytest.approx(30.0, abs=0.1)
  assert places.refused('b') == 1.0  # Others have come in vain less often.
  now[0] += 100.0
  assert places.refused('a') == 1.0


def test_permits_go_to_payers_in_turns_and_never_to_more_than_there_are():
  semaphore, order, inside, most = FairSemaphore(1), [], [], []
  go_on = threading.Event()

  def work(payer, call):
    with semaphore.of(call):
      inside.append(payer)
      most.append(len(inside))
      assert go_on.wait(LONG)
      order.append(payer.id)
      inside.pop()

  threads = []
  for name in 'aaaaaabb':
    payer = Payer(name)
    threads.append(threading.Thread(target=work, args=(payer, Call(payer=payer))))
    threads[-1].start()
    while len(queue_of(semaphore)) + len(inside) < len(threads):
      pass
  go_on.set()
  for thread in threads:
    thread.join()
  assert ''.join(order) == 'aababaaa' or ''.join(order) == 'ababaaaa'
  assert max(most) == 1


def queue_of(semaphore):
  return [turn for turns in list(semaphore._waiting.values()) for turn in list(turns)]  # noqa: SLF001 (Nothing else tells.)


@pytest.mark.parametrize('waits_for', [FairSemaphore(1).of, functools.partial(Turns().of, 'a')])
def test_who_leaves_while_waiting_is_woken_and_holds_no_place_in_the_queue(waits_for):
  gone, told, inside = Call(), [], []

  def wait(call):
    try:
      with waits_for(call):
        inside.append(call)
    except Cancelled as error:
      told.append(error)

  threads = [threading.Thread(target=wait, args=(call,)) for call in (gone, Call())]
  with waits_for(Call()):
    for thread in threads:
      thread.start()
    gone.end()
    threads[0].join(LONG)
    assert not threads[0].is_alive() and len(told) == 1  # Though the permit is still taken.
  threads[1].join(LONG)
  assert len(inside) == 1 and gone not in inside


def test_who_leaves_or_is_late_takes_no_permit():
  semaphore = FairSemaphore(1)
  with semaphore.of(Call()):
    with pytest.raises(Deadline, match='Other requests'), semaphore.of(Call(deadline=0.0)):
      pass
    assert not queue_of(semaphore)
  gone = Call()
  gone.end()
  with pytest.raises(Cancelled), semaphore.of(gone):
    pass
  with pytest.raises(RuntimeError, match='on purpose'), semaphore.of(Call()):
    raise RuntimeError('on purpose')
  holds = threading.Thread(target=lambda: semaphore.of(Call()).__enter__())
  holds.start()
  holds.join(LONG)
  assert not holds.is_alive()  # The permit was free again each time.
