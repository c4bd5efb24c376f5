"""The order in which payers get slots, beside a simulation of slots in which every sample takes as long as it likes."""

import collections

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np

from sdpo_jax.rollout.fair_queue import FairQueue, Payer, Shares
from sdpo_jax.rollout.queue import KNOBS, Queue, Samples

ADA, BOB, EVE = Payer('ada'), Payer('bob'), Payer('eve')


def samples(n, *, max_tokens=8, length=1, first=0):
  knobs = {name: np.full(n, max_tokens if name == 'max_tokens' else 1, kind) for name, kind in KNOBS.items()}
  prompt = np.ones(length, np.int32)
  return Samples(prompt, length, first, knobs, np.zeros(0, np.int32), 0, 0, prefix=(n, length))


@given(st.lists(st.one_of(st.integers(1, 4), st.sampled_from('ab')), max_size=40), st.integers(0, 3))
def test_one_payer_is_served_as_by_a_plain_queue(steps, gone):
  """Numbers add so many samples, letters are a shard that takes one; at the end some are removed."""
  fair, plain = FairQueue(2), Queue(2)
  added = []
  for step in steps:
    if isinstance(step, int):
      added.append(samples(step))
      fair.add(added[-1], ADA)
      plain.add(added[-1])
    else:
      shard = 'ab'.index(step)
      assert fair.head is plain.head and fair.begun(shard) == plain.begun(shard)
      assert fair.take(shard) == plain.take(shard)
      assert all(fair.holds(shard, each.prefix) == plain.holds(shard, each.prefix) for each in added)
    assert fair.left == plain.left
  for queue in (fair, plain):
    queue.remove(lambda each: each in added[:gone])
  assert fair.left == plain.left
  while (taken := plain.take(0)) is not None:
    assert fair.take(0) == taken


class Rows:
  """Rows that draw one token per turn for their sample, and what was drawn for each payer."""

  def __init__(self, rows, draw):
    self.queue, self.rows, self.draw = FairQueue(1), [None] * rows, draw
    self.served, self.payers = collections.Counter(), {}
    self.waiting = collections.Counter()

  def add(self, payer, n, **more):
    made = samples(n, **more)
    self.payers[made] = payer
    self.queue.add(made, payer)
    self.waiting[payer] += n

  def turn(self):
    for at, row in enumerate(self.rows):
      if row is None and (taken := self.queue.take(0)) is not None:
        made, index = taken
        self.waiting[self.payers[made]] -= 1
        self.rows[at] = [made, index, int(self.draw.integers(1, made.knobs['max_tokens'][index] + 1))]
        self.served[self.payers[made]] += len(made.prompt) if index == 0 else 0
    for at, row in enumerate(self.rows):
      if row is not None:
        self.queue.drawn(row[0], 1)
        self.served[self.payers[row[0]]] += 1
        row[2] -= 1
        if not row[2]:
          self.queue.done(row[0], row[1])
          self.rows[at] = None


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 16), st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**32))
def test_two_that_always_wait_get_the_same_whatever_they_ask_for(rows, long, short, seed):
  """Ada's samples are as long as `long` and come in hundreds, Bob's as `short` and come one by one."""
  world = Rows(rows, np.random.default_rng(seed))
  world.add(ADA, 100, max_tokens=long)
  for _ in range(300):
    while world.waiting[BOB] < 20:
      world.add(BOB, 1, max_tokens=short)
    if world.waiting[ADA] < 100:
      world.add(ADA, 100, max_tokens=long)
    world.turn()
    # Sheng et al., theorem 4.4: twice the largest work under way, and here a prompt of one token more.
    assert abs(world.served[ADA] - world.served[BOB]) <= 2 * (rows * max(long, short) + 1)
  x = np.asarray([world.served[ADA], world.served[BOB]], float)
  assert x.sum() ** 2 / (2 * (x**2).sum()) > 0.95  # Jain's index.


def test_weights_are_shares():
  heavy = Payer('ada', 3.0)
  world = Rows(8, np.random.default_rng(0))
  for payer in (heavy, BOB):
    world.add(payer, 4000)
  for _ in range(1000):
    world.turn()
  assert 2.8 < world.served[heavy] / world.served[BOB] < 3.2


def test_whoever_comes_gets_the_next_free_slots_and_no_credit_for_having_been_away():
  world = Rows(4, np.random.default_rng(0))
  world.add(ADA, 10_000)
  for _ in range(1000):
    world.turn()
  before = world.served.copy()
  world.add(BOB, 2)
  for _ in range(8):  # No sample takes longer: by then two slots were free.
    world.turn()
  assert not world.waiting[BOB]
  world.add(BOB, 10_000)
  for _ in range(1000):
    world.turn()
  gained = [world.served[payer] - before[payer] for payer in (ADA, BOB)]
  assert abs(gained[0] - gained[1]) <= 2 * (4 * 8 + 1) + 4 * 8  # The last: what Ada drew before Bob came back.


def test_slots_wait_for_half_of_the_others_only_while_several_payers_have_some():
  queue, hers, his = FairQueue(1), samples(20), samples(1)
  queue.add(hers, ADA)
  queue.take(0)
  assert queue.refill(32) == 2 == Queue(1).refill(32)
  queue.add(his, BOB)
  assert queue.refill(32) == 2  # He gets the next free slot.
  assert queue.take(0)[0] is his and queue.refill(32) == 16
  queue.done(his, 0)
  assert queue.refill(32) == 2


def test_what_is_removed_no_longer_counts_against_its_payer():
  queue = FairQueue(1)
  held, after = samples(4, max_tokens=100), samples(4, max_tokens=100)
  queue.add(held, ADA)
  for _ in range(3):
    queue.take(0)
  queue.add(after, ADA)
  queue.add(samples(4, max_tokens=10), BOB)
  queue.remove(lambda each: each is held)
  assert queue.left == 8
  # Both begin anew: Ada has one sample of 100 tokens under way, and then Bob's four of 10 are fewer.
  assert [queue.take(0)[0].knobs['max_tokens'][0] for _ in range(6)] == [100, 10, 10, 10, 10, 100]


def test_payers_that_are_gone_are_forgotten():
  shares = Shares()
  shares.enter(EVE)
  for number in range(1000):
    payer = Payer(str(number))
    shares.enter(payer)
    shares.charge(payer, 1)
    shares.leave(payer)
    shares.charge(EVE, 2)
  assert len(shares) < 5
  shares.leave(EVE)
  shares.enter(ADA)
  assert len(shares) == 0
