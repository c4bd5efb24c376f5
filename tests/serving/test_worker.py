"""The engine's thread: all threads are answered as by an engine of their own, in fair turns, and each request ends
once.
"""

import collections
import concurrent.futures
import dataclasses
import threading
import types

import jax
import numpy as np
import pytest

from sdpo_jax.errors import UserError
from sdpo_jax.learning.learner import Learned
from sdpo_jax.learning.requests import Lesson, UpdateOptions
from sdpo_jax.learning.scoring import Scored
from sdpo_jax.rollout.fair_queue import Payer, Shares
from sdpo_jax.rollout.resident import CancelledError
from sdpo_jax.rollout.results import Completion
from sdpo_jax.rollout.slots import Slots
from sdpo_jax.serving.engine import Engine, EngineSettings, Feedback
from sdpo_jax.serving.errors import Busy, Cancelled, Deadline, InvalidRequest, NotFound, NotReady, ServiceError
from sdpo_jax.serving.records import BASE, optimizer_name, version_of
from sdpo_jax.serving.shelf import NoPlaceError
from sdpo_jax.serving.worker import Worker
from tests.serving.engines import feedback, make_model, put, random_factors, start

SETTINGS = EngineSettings(
  (8,), (8,), (8,), rows=2, training_rows=2, snapshots=2, slots=2, topk=4, kept_prefixes=0, memory_bytes=800
)
LONG = 10.0  # Seconds that no test takes.
ADA, BOB = Payer('ada'), Payer('bob')


@pytest.fixture(scope='module')
def model():
  return make_model()


class Stand:
  """What stands for an engine: it keeps names, notes what it is asked for, and fails when it is told to."""

  settings, counts = SETTINGS, types.MappingProxyType({'tokens': 0, 'prefilled': 0, 'reused': 0})

  def __init__(self, log):
    self.log, self.versions, self.drawings, self.places = log, {}, [], collections.Counter()
    self.shares = Shares()
    self.begun = collections.Counter()  # Samples of a version since it got its place.
    self.broken = collections.Counter()  # Calls of a method until it fails; negative: it fails from then on.
    self.gates = {}  # Events that a method waits for.

  def _called(self, name, *what):
    self.log.append((name, *what))
    if name in self.gates:
      assert self.gates[name].wait(LONG)
    if self.broken[name]:
      self.broken[name] -= self.broken[name] > 0
      if self.broken[name] <= 0:
        raise RuntimeError(f'{name} failed')

  def __contains__(self, version):
    return version == BASE or version in self.versions

  def compile(self, announce):
    self._called('compile')

  def restore(self, version, arrays):
    self._called('restore', version)
    if version in self.versions:
      raise ValueError(f'{version} is there already.')
    self.versions[version] = arrays

  def arrays(self, version):
    if version not in self.versions:
      raise UserError(f'There is no version {version}.')
    return self.versions[version]

  def bytes_of(self, name):
    return 100 if name == version_of(name) else 0

  @property
  def held_bytes(self):
    return sum(map(self.bytes_of, list(self.versions)))

  def drop(self, version):
    self._called('drop', version)
    self.versions.pop(version, None)

  def rename(self, version, new):
    if self.versions.keys() & {new, optimizer_name(new)}:
      self.forget(version)
      return
    self._called('rename', version, new)
    for name, other in ((version, new), (optimizer_name(version), optimizer_name(new))):
      self.versions[other] = self.versions.pop(name)

  def forget(self, version):
    self._called('forget', version)
    if self.places[version]:
      raise ValueError('in use')
    for name in (version, optimizer_name(version)):
      self.versions.pop(name, None)

  def served(self, version, cartridge=None):
    del cartridge
    if version == BASE or self.places[version]:
      return self.begun[version]
    self.begun[version] = 0
    return None if sum(map(bool, self.places.values())) == self.settings.snapshots else 0

  def submit(self, version, prompt, *, max_tokens=1, **options):
    if version != BASE and not self.places[version] and sum(map(bool, self.places.values())) == self.settings.snapshots:
      raise NoPlaceError('All places are in use.')
    self._called('submit', version)
    if not prompt:
      raise UserError('The prompt is empty.')
    drawing = Drawing(version, max_tokens)
    self.places[version] += version != BASE
    self.begun[version] += options.get('n', 1)
    self.drawings.append(drawing)
    return drawing

  def cancel(self, drawing):
    drawing.cancelled = True

  def turn(self):
    if self.drawings:
      self._called('turn')
    for drawing in list(self.drawings):
      drawing.turns -= 1
      if drawing.cancelled or drawing.turns == 0:
        drawing.end(CancelledError() if drawing.cancelled else None)
        self.drawings.remove(drawing)
        self.places[drawing.version] -= drawing.version != BASE
    return bool(self.drawings)

  def tell(self):
    pass

  def end(self, error):
    for drawing in self.drawings:
      drawing.end(error)

  def score(self, version, rows, *, topk=1, ids=None):
    self._called('score', version, len(rows))
    if any(not prompt for prompt, _ in rows):
      raise UserError('The prompt is empty.')
    found = []
    for at, (_, tokens) in enumerate(rows):
      said = np.full(len(tokens), float(len(tokens)))
      wide = np.zeros((len(tokens), topk))
      found.append(Scored(said, said, wide, wide, None if ids is None else ids[at]))
    return found

  def learn_in_pieces(self, feedback, keep):
    self._called('learn', *[each.new for each in feedback])
    if any(not each.lessons for each in feedback):
      raise UserError('There is nothing to learn from.')
    steps = max(each.update.steps for each in feedback)
    for _ in range(steps if steps > 1 else 0):  # A piece for each of several steps, unlike an engine.
      self._called('piece')
      yield 1 / steps
    for index, each in enumerate(feedback):
      if keep(index, None):
        self.versions[each.new] = {'of': each.version}
    return [Learned([], [{'stepped': True, 'grad_norm': 1.0}]) for _ in feedback]


class Drawing:
  def __init__(self, version, turns):
    self.version, self.turns, self.cancelled = version, turns, False
    self.left, self.drawn = 1, 0  # Samples, and tokens of them.
    self._future = concurrent.futures.Future()

  def end(self, error):
    if not self.done:
      self._future.set_exception(error) if error else self._future.set_result(None)

  @property
  def done(self):
    return self._future.done()

  def __iter__(self):
    self._future.result(LONG)
    none = np.zeros(0, np.float32)
    yield Completion(0, none, none, none, none, stopped=True, text=self.version)


@pytest.fixture
def made():
  """Yield a worker whose engine is a stand, and what there is of it."""
  found = types.SimpleNamespace(
    log=[], engines=[], store={}, loads=collections.Counter(), now=0.0, gate=None, fail=None
  )

  def make_engine():
    if found.fail is not None and found.engines:
      raise found.fail
    found.engines.append(Stand(found.log))
    return found.engines[-1]

  def load(version):
    if version != version_of(version):
      return {}
    found.loads[version] += 1
    if found.gate is not None:
      assert found.gate.wait(LONG)
    if version not in found.store:
      raise NotFound(f'There is no {version}.')
    return found.store[version]

  worker = Worker(make_engine, load, max_waiting=8, announce=lambda line: None, clock=lambda: found.now)
  with pytest.raises(NotReady, match='not been started'):
    worker.sample(BASE, [1], max_tokens=1)
  found.store.update({f'{index}@0': {'number': index} for index in range(20)})
  found.worker = worker
  worker.start()
  assert worker.wait(LONG)
  found.engine = found.engines[0]
  yield found
  if found.gate is not None:
    found.gate.set()
  for engine in found.engines:
    for gate in engine.gates.values():
      gate.set()
  worker.stop(0.0)


def lessons(version, new=None, count=1, **more):
  return Feedback(version, new or f'{version}+', [Lesson([1], [2], [3])] * count, **more)


def until(holds):
  """Wait until something holds that another thread brings about."""
  pause = threading.Event()
  for _ in range(int(LONG / 0.002)):
    if holds():
      return
    pause.wait(0.002)
  raise AssertionError('It never was so.')


def queued(worker):
  """Return the jobs that wait, and those that the worker's thread has yet to hear of."""
  return [*worker._inbox, *worker._waiting]  # noqa: SLF001 (Nothing else tells of single jobs.)


def refuses(worker):
  """Return whether new requests are refused; one that is not is left to the worker."""
  try:
    worker.score(BASE, [([1], [2])])
  except NotReady:
    return True
  return False


def held(made, *methods):
  """Lets the engine stop at its next call of these methods, and returns what lets it go on."""
  gates = {name: threading.Event() for name in methods}
  made.engine.gates |= gates
  return gates


def test_a_version_is_read_once_however_many_ask_for_it(made):
  made.gate = threading.Event()
  handles = [made.worker.sample('1@0', [1], max_tokens=2) for _ in range(3)]
  scored = made.worker.score('1@0', [([1], [2, 3])])
  until(lambda: made.loads)
  # Others go on in the meantime.
  assert made.worker.score(BASE, [([1], [2])]).result(LONG)[0].log_probs.shape == (1,)
  made.gate.set()
  assert [handle.result()[0].text for handle in handles] == ['1@0'] * 3 and len(scored.result(LONG)) == 1
  assert made.loads == {'1@0': 1}
  assert made.worker.arrays('1@0') == {'number': 1} and made.loads == {'1@0': 1}


def test_what_cannot_be_read_fails_those_who_asked(made):
  for version, error, said in (('none@0', NotFound, 'no none@0'), ('bad@0', ServiceError, 'could not be loaded')):
    if version == 'bad@0':
      made.store[version] = None
      made.engine.broken['restore'] = 1
    with pytest.raises(error, match=said):
      made.worker.sample(version, [1], max_tokens=1).result()
    made.engine.broken.clear()
  with pytest.raises(NotFound):
    made.worker.learn(lessons('1@0', teacher='version:none@0')).result(LONG)
  assert made.worker.learn(lessons('1@0', teacher='version:2@0')).result(LONG).stepped


def test_what_the_engine_cannot_hold_is_an_error_of_those_who_asked(made, monkeypatch):
  """Such as a cartridge of before, in a service that serves none any more."""

  def refuse(*_):
    raise UserError('This service serves none: set serve.cartridges.')

  with monkeypatch.context() as patch:
    patch.setattr(made.engine, 'restore', refuse, raising=False)
    with pytest.raises(InvalidRequest, match='set serve.cartridges'):
      made.worker.sample('9@0', [1], max_tokens=1).result()
  assert made.worker.sample('1@0', [1], max_tokens=1).result()


def test_feedback_and_samples_take_turns(made):
  """A long sample delays feedback by one chunk, and a stream of feedback does not delay sampling."""
  for version in '12':
    put(made.worker, f'{version}@0', {})
  gates = held(made, 'turn')
  handle = made.worker.sample(BASE, [1], max_tokens=6)
  until(lambda: made.log[-1] == ('turn',))
  made.log.clear()
  asked = [made.worker.learn(lessons('1@0', f'1@{number}')) for number in (1, 2, 3)]
  asked.append(made.worker.score('2@0', [([1], [2])] * 11))
  gates['turn'].set()
  concurrent.futures.wait(asked, LONG)
  handle.result()
  turn = ('turn',)
  assert made.log == [
    *(('learn', '1@1'), turn, ('learn', '1@2'), turn, ('learn', '1@3'), turn),
    *(('score', '2@0', 8), turn, ('score', '2@0', 3), turn),
  ]
  assert len(asked[-1].result()) == 11


def test_samples_go_on_while_a_long_feedback_is_learned(made):
  """A payer's long feedback is learned in pieces, between which another one's tokens are drawn."""
  for version in ('own', 'other'):
    put(made.worker, version, {})
  gates = held(made, 'piece')
  learned = made.worker.learn(lessons('own', update=UpdateOptions(steps=60)), payer=ADA)
  until(lambda: made.log[-1] == ('piece',))
  handles = [made.worker.sample(version, [1], max_tokens=3, payer=BOB) for version in ('own', 'other')]
  gates['piece'].set()
  assert [handle.result()[0].text for handle in handles] == ['own', 'other'] and learned.result(LONG).stepped
  last = max(at for at, each in enumerate(made.log) if each == ('turn',))
  assert made.log[last:].count(('piece',)) > 10
  kinds = [each[0] for each in made.log if each[0] in ('piece', 'turn')]
  assert 'turn piece turn piece turn' in ' '.join(kinds)  # Little was done for Bob.


@pytest.mark.parametrize('end', ['cancelled', 'late', 'failed', 'stopped'])
def test_a_feedback_that_ends_while_it_is_learned_changes_nothing(made, end):
  put(made.worker, 'own', {})
  gates = held(made, 'piece')
  learned = made.worker.learn(lessons('own', update=UpdateOptions(steps=1000)), deadline=5.0)
  until(lambda: made.log[-1] == ('piece',))
  with pytest.raises(UserError):
    made.engine.arrays('own+')
  if end == 'cancelled':
    assert learned.cancel()
  elif end == 'late':
    made.now = 6.0
  elif end == 'failed':
    made.engine.broken['piece'] = 3
  with concurrent.futures.ThreadPoolExecutor() as threads:
    if end == 'stopped':
      ended = threads.submit(made.worker.stop, 0.0)
      until(lambda: refuses(made.worker))
    gates['piece'].set()
    if end == 'stopped':
      ended.result(LONG)
  errors = {'cancelled': concurrent.futures.CancelledError, 'late': Deadline, 'failed': ServiceError}
  with pytest.raises(errors.get(end, NotReady)):
    learned.result(LONG)
  until(lambda: made.worker.stats['unfinished'] == 0)
  assert 'own+' not in made.engine.versions and made.log.count(('piece',)) < 100
  if end != 'stopped':  # The version can learn from the next one.
    assert made.worker.learn(lessons('own')).result(LONG).stepped and 'own+' in made.engine.versions


def test_what_waits_together_is_done_together(made):
  for version in range(4):
    put(made.worker, f'own{version}', {})
  gates = held(made, 'score')
  first = made.worker.score(BASE, [([1], [2])])
  until(lambda: made.log[-1][0] == 'score')
  made.log.clear()
  learned = [made.worker.learn(lessons(f'own{version}')) for version in (0, 1, 0, 2)]
  scored = [made.worker.score('own3', [([1], [2] * (1 + index))], topk=index) for index in (1, 3)]
  with_ids = made.worker.score('own3', [([1], [2])], ids=[np.ones((1, 2))])
  gates['score'].set()
  concurrent.futures.wait([first, *learned, *scored, with_ids], LONG)
  assert made.log == [
    ('learn', 'own0+', 'own1+'),  # Two slots.
    ('learn', 'own0+', 'own2+'),  # What one version learns, one after the other.
    ('score', 'own3', 2),
    ('score', 'own3', 1),
  ]
  assert [(len(one.log_probs), one.top_ids.shape[1]) for [one] in map(lambda each: each.result(), scored)] == [
    (2, 1),
    (4, 3),
  ]
  assert with_ids.result()[0].of_ids.shape == (1, 2)


def test_one_that_is_refused_is_refused_alone(made):
  for version in range(3):
    put(made.worker, f'own{version}', {})
  gates = held(made, 'score')
  made.worker.score(BASE, [([1], [2])])
  until(lambda: made.log[-1][0] == 'score')
  learned = [made.worker.learn(lessons(f'own{version}', count=version)) for version in range(2)]
  scored = [made.worker.score('own2', [(prompt, [2])]) for prompt in ([1], [], [3])]
  empty = made.worker.sample(BASE, [], max_tokens=1)
  gates['score'].set()
  with pytest.raises(InvalidRequest, match='nothing to learn'):
    learned[0].result(LONG)
  with pytest.raises(InvalidRequest, match='is empty'):
    scored[1].result(LONG)
  with pytest.raises(InvalidRequest, match='is empty'):
    empty.result()
  assert learned[1].result(LONG).stepped and len(scored[0].result(LONG)) == len(scored[2].result(LONG)) == 1
  for rows, ids in (([], None), ([([1], [2])], [np.ones(1)]), ([([1], [2])], [np.ones((2, 1))])):
    with pytest.raises(InvalidRequest):
      made.worker.score(BASE, rows, ids=ids)
  assert not made.worker.failure and made.worker.stats['unfinished'] == 0


def test_whoever_waits_for_a_place_gets_one(made):
  """Requests of versions that have a place may pass those that have none, but not without end."""
  for version in '123':
    made.worker.score(f'{version}@0', [([1], [2])]).result(LONG)
  gates = held(made, 'turn')
  handles = [made.worker.sample(f'{version}@0', [1], n=2, max_tokens=4 * version**4) for version in (1, 2)]
  until(lambda: made.log[-1] == ('turn',))
  waits = made.worker.sample('3@0', [1], max_tokens=1)
  later = [made.worker.sample('1@0', [1], n=2, max_tokens=4) for _ in range(5)]
  gates['turn'].set()
  for handle in (*handles, waits, *later):
    handle.result()
  order = [each[1] for each in made.log if each[0] == 'submit']
  # Eight samples: eight times the share of a version in the rows, which is one row here.
  assert order == ['1@0', '2@0', '1@0', '1@0', '1@0', '3@0', '1@0', '1@0']


def test_a_version_is_loaded_only_when_rows_would_be_empty(made):
  for version in '12':
    made.worker.score(f'{version}@0', [([1], [2])]).result(LONG)
  gates = held(made, 'turn')
  running = [made.worker.sample('1@0', [1], max_tokens=turns) for turns in (3, 9)]
  until(lambda: made.log[-1] == ('turn',))
  later = [made.worker.sample(version, [1], max_tokens=1) for version in ('2@0', '1@0', BASE)]
  gates['turn'].set()
  for handle in (*running, *later):
    handle.result()
  assert [each[1] for each in made.log if each[0] == 'submit'] == ['1@0', '1@0', '1@0', BASE, '2@0']


def test_learning_and_scoring_go_to_payers_in_turns_in_small_batches(made):
  """Ada's five feedbacks wait when Bob's two come; a batch has as many as a micro-batch has rows."""
  for version in range(8):
    put(made.worker, f'own{version}', {})
  gates = held(made, 'score')
  first = made.worker.score(BASE, [([1], [2])], payer=ADA)
  until(lambda: made.log[-1][0] == 'score')
  learned = [made.worker.learn(lessons(f'own{version}'), payer=ADA) for version in range(5)]
  learned += [made.worker.learn(lessons(f'own{version}'), payer=BOB) for version in (5, 6)]
  gates['score'].set()
  assert len(concurrent.futures.wait([first, *learned], LONG).done) == 8
  batches = [each[1:] for each in made.log if each[0] == 'learn']
  assert batches == [('own0+', 'own5+'), ('own1+', 'own6+'), ('own2+', 'own3+'), ('own4+',)]


def test_sampling_and_learning_are_paid_from_one_account(made):
  """Ada has learned, and Bob has drawn less: his version gets the place that is free next, though she came first.

  What a payer has drawn counts as much when both want to learn.
  """
  for version in '1234':
    put(made.worker, version, {})
  gates = held(made, 'turn')
  busy = [made.worker.sample(version, [1], max_tokens=2) for version in '12']
  until(lambda: made.log[-1] == ('turn',))
  waiting = [made.worker.sample(version, [1], max_tokens=1, payer=payer) for version, payer in (('3', ADA), ('4', BOB))]
  until(lambda: len(queued(made.worker)) == 2)
  made.engine.shares.charge(ADA, 1000)
  gates['turn'].set()
  for handle in (*busy, *waiting):
    handle.result()
  assert [each[1] for each in made.log if each[0] == 'submit'] == ['1', '2', '4', '3']
  gates = held(made, 'score', 'turn')
  made.worker.score(BASE, [([1], [2])])
  until(lambda: made.log[-1][0] == 'score')
  made.worker.sample(BASE, [1], max_tokens=1)
  learned = [made.worker.learn(lessons(version, count=2), payer=payer) for version, payer in (('3', ADA), ('4', BOB))]
  gates['score'].set()
  until(lambda: made.log[-1] == ('turn',))
  made.engine.shares.charge(ADA, 1000)  # What she has drawn.
  gates['turn'].set()
  assert len(concurrent.futures.wait(learned, LONG).done) == 2
  assert [each[1] for each in made.log if each[0] == 'learn'] == ['4+', '3+']


def test_one_payer_is_served_in_order_and_in_large_batches(made):
  for version in range(3):
    put(made.worker, f'own{version}', {})
  gates = held(made, 'score')
  made.worker.score(BASE, [([1], [2])], payer=ADA)
  until(lambda: made.log[-1][0] == 'score')
  scored = [made.worker.score(BASE, [([1], [2])] * 3, payer=ADA) for _ in range(3)]
  gates['score'].set()
  assert len(concurrent.futures.wait(scored, LONG).done) == 3
  assert [each[2] for each in made.log if each[0] == 'score'][1:] == [8, 1]  # Four micro-batches of two.


def test_samples_far_ahead_hold_no_places_for_versions(made):
  """Ada's seven requests of two versions hold both places until enough rows are free; Bob's version gets the next."""
  for version in '123':
    made.worker.score(f'{version}@0', [([1], [2])]).result(LONG)
  gates = held(made, 'turn')
  ada = [made.worker.sample(f'{1 + number % 2}@0', [1], max_tokens=4, payer=ADA) for number in range(7)]
  until(lambda: made.log[-1] == ('turn',))
  bob = made.worker.sample('3@0', [1], max_tokens=1, payer=BOB)
  gates['turn'].set()
  for handle in (*ada, bob):
    handle.result()
  order = [each[1] for each in made.log if each[0] == 'submit']
  assert len(order) == 8 and order.index('3@0') < 7


def test_who_has_just_come_is_before_who_has_requests_under_way(made):
  """Ada's third version waits for a place; Bob's request need not, though his version has begun its share of samples.

  Both have had as much done for them, but Ada's two requests are under way.
  """
  for version in '123':
    made.worker.score(f'{version}@0', [([1], [2])]).result(LONG)
  gates = held(made, 'turn')
  ada = [made.worker.sample(version, [1], n=8, max_tokens=6, payer=ADA) for version in ('1@0', '2@0')]
  until(lambda: made.log[-1] == ('turn',))
  ada.append(made.worker.sample('3@0', [1], max_tokens=1, payer=ADA))
  bob = made.worker.sample('1@0', [1], max_tokens=1, payer=BOB)
  gates['turn'].set()
  for handle in (*ada, bob):
    handle.result()
  assert [each[1] for each in made.log if each[0] == 'submit'] == ['1@0', '2@0', '1@0', '3@0']


def test_a_queue_that_is_shared_has_room_for_whoever_has_none_in_it():
  worker = Worker(lambda: Stand([]), lambda version: {}, max_waiting=8, shared=True, announce=lambda line: None)
  worker.start()
  assert worker.wait(LONG)
  gates = held(types.SimpleNamespace(engine=worker._engine), 'score')  # noqa: SLF001 (The stand.)
  waiting = [worker.score(BASE, [([1], [2])], payer=ADA) for _ in range(4)]
  for _ in range(2):  # No request of hers has ended yet, which would say how long one takes.
    with pytest.raises(Busy, match='as many jobs in the engine as one sender may have now, or all 8') as refused:
      worker.score(BASE, [([1], [2])], payer=ADA)
    assert refused.value.retry_after == pytest.approx(1.0)
  waiting += [worker.score(BASE, [([1], [2])], payer=BOB) for _ in range(2)]
  with pytest.raises(Busy):
    worker.score(BASE, [([1], [2])], payer=BOB)
  gates['score'].set()
  assert len(concurrent.futures.wait(waiting, LONG).done) == 6
  until(lambda: worker.stats['unfinished'] == 0)
  worker.stop(0.0)


def test_what_is_too_much_is_refused_and_says_when_to_come_again(made):
  gates = held(made, 'score')
  first = made.worker.score(BASE, [([1], [2])])
  until(lambda: made.log[-1][0] == 'score')
  others = [made.worker.score(BASE, [([1], [2])]) for _ in range(7)]
  for ask in (
    lambda: made.worker.score(BASE, [([1], [2])]),
    lambda: made.worker.learn(lessons('1@0')),
    lambda: made.worker.sample(BASE, [1], max_tokens=1),
  ):
    with pytest.raises(Busy, match='all 8 are taken') as refused:
      ask()
    assert 0.9 <= refused.value.retry_after <= 31
  gates['score'].set()
  assert len(concurrent.futures.wait([first, *others], LONG).done) == 8
  until(lambda: made.worker.stats['unfinished'] == 0)
  assert made.worker.score(BASE, [([1], [2])]).result(LONG) and made.worker.stats['refused'] == 3


def test_time_that_is_over_and_requests_that_nobody_wants(made):
  gates = held(made, 'turn', 'score')
  running, unwanted = (made.worker.sample(BASE, [1], max_tokens=10**6, deadline=until) for until in (5.0, None))
  until(lambda: made.log.count(('submit', BASE)) == 2)
  waiting = [made.worker.score(BASE, [([1], [2])], deadline=5.0), made.worker.learn(lessons('1@0'), deadline=6.0)]
  dropped, ended = made.worker.score(BASE, [([1], [2])]), made.worker.sample('1@0', [1], max_tokens=1)
  made.worker.cancel(dropped)
  made.worker.cancel(ended)
  made.worker.cancel(unwanted)
  made.now = 7.0
  for gate in gates.values():
    gate.set()
  for late in (running.result, waiting[0].result, waiting[1].result):
    with pytest.raises(Deadline, match='time limit of the request'):
      late()
  for gone in (unwanted, ended):
    with pytest.raises(Cancelled, match='cancelled'):
      gone.result()
    assert gone.drawing is None or gone.drawing.done
  assert dropped.cancelled()
  until(lambda: made.worker.stats['unfinished'] == 0)
  assert not made.engine.drawings and not any(made.engine.places.values())
  assert ('score', BASE, 1) not in made.log
  made.worker.cancel(unwanted)  # No error.


def test_an_idle_worker_does_nothing(made):
  made.worker.score('1@0', [([1], [2])]).result(LONG)
  before = made.worker.stats['turns']
  until(lambda: made.worker._wake.is_set() is False)  # noqa: SLF001 (Nothing else tells that it rests.)
  for _ in range(50):
    made.worker.arrays('1@0')
  assert made.worker.stats['turns'] <= before + 2


def test_versions_that_can_be_read_again_are_dropped(made):
  """Those that only the engine has stay, and those in use, whatever comes."""
  most = 6  # Three quarters of the memory.
  put(made.worker, 'own', {'mine': 1})
  for version in range(20):
    made.worker.score(f'{version}@0', [([1], [2])]).result(LONG)
    until(lambda: made.worker.stats['unfinished'] == 0)
  made.worker.score(BASE, [([1], [2])]).result(LONG)
  assert 'own' in made.engine.versions and len(made.engine.versions) <= most + 1
  made.store['20@0'] = {'mine': 1}
  made.worker.stored('own', '20@0')
  made.worker.score('20@0', [([1], [2])]).result(LONG)
  assert made.loads['20@0'] == 0 and 'own' not in made.engine.versions
  for version in range(8):
    made.worker.score(f'{version}@0', [([1], [2])]).result(LONG)
  made.worker.score(BASE, [([1], [2])]).result(LONG)
  assert '20@0' not in made.engine.versions
  assert made.worker.arrays('20@0') == {'mine': 1}
  with pytest.raises(NotFound):
    made.worker.arrays('none@0')


def test_a_version_that_was_loaded_since_it_was_stored_is_there_once(made):
  put(made.worker, 'own', {'number': 0})
  made.worker.score('0@0', [([1], [2])]).result(LONG)
  made.worker.stored('own', '0@0')
  made.worker.score('0@0', [([1], [2])]).result(LONG)
  assert 'own' not in made.engine.versions and made.engine.versions['0@0'] == {'number': 0}
  assert ('forget', 'own') in made.log and made.loads['0@0'] == 1


def test_a_version_is_forgotten_when_nothing_uses_it(made):
  gates = held(made, 'turn')
  handle = made.worker.sample('1@0', [1], max_tokens=3)
  until(lambda: made.log[-1] == ('turn',))
  with concurrent.futures.ThreadPoolExecutor() as threads:
    erased = threads.submit(made.worker.forget, '1@0')
    until(lambda: any(not job.needs for job in queued(made.worker)))
    del made.store['1@0']
    after = made.worker.score('1@0', [([1], [2])])
    gates['turn'].set()
    erased.result(LONG)
  assert handle.result()[0].text == '1@0'
  with pytest.raises(NotFound):
    after.result(LONG)
  made.worker.forget('never there', '2@0', '3@0')
  made.worker.forget()


def test_the_end_lets_what_is_under_way_be_done(made):
  gates = held(made, 'turn')
  handle = made.worker.sample('1@0', [1], max_tokens=3)
  until(lambda: made.log[-1] == ('turn',))
  waiting = made.worker.learn(lessons('1@0'))
  with concurrent.futures.ThreadPoolExecutor() as threads:
    ended = threads.submit(made.worker.stop, 100.0)
    until(lambda: refuses(made.worker))
    with pytest.raises(NotReady, match='shutting down'):
      made.worker.score(BASE, [([1], [2])])
    gates['turn'].set()
    ended.result(LONG)
  assert handle.result()[0].text == '1@0' and waiting.result(LONG).stepped
  with pytest.raises(NotReady):
    made.worker.forget('x')
  with pytest.raises(NotReady, match='has ended'):
    made.worker.wait(LONG)


def test_the_end_does_not_wait_for_ever(made):
  gates = held(made, 'turn')
  handle, put = made.worker.sample('1@0', [1], max_tokens=10**9), None
  until(lambda: made.log[-1] == ('turn',))
  made.gate = threading.Event()
  put = made.worker.score('2@0', [([1], [2])])  # Its version is never read.
  with concurrent.futures.ThreadPoolExecutor() as threads:
    ended = threads.submit(made.worker.stop, 0.0)
    until(lambda: refuses(made.worker))
    gates['turn'].set()
    ended.result(LONG)
  for left in (handle.result, put.result):
    with pytest.raises(NotReady, match='shutting down'):
      left()
  assert not made.engine.drawings


@pytest.mark.parametrize('method', ['restore', 'submit', 'turn', 'score', 'learn', 'forget', 'drop'])
@pytest.mark.parametrize('lasting', [False, True])
def test_a_failure_of_the_engine_is_told_and_overcome(made, method, lasting):
  """Whichever call fails, once or from then on: every request ends, and what only the engine had is there
  afterwards.
  """
  worker = made.worker
  put(worker, 'own', {'mine': 1})
  put(worker, 'gone', {})
  for version in range(5):
    worker.score(f'{version}@0', [([1], [2])]).result(LONG)
  if lasting:
    made.engine.broken['score'] = -1  # Not even a token is scored any more.
  made.engine.broken[method] = -1 if lasting else 1
  asked = [
    worker.sample('own', [1], max_tokens=3).result,
    worker.sample('9@0', [1], max_tokens=3).result,
    worker.score('own', [([1], [2])]).result,
    worker.learn(lessons('own')).result,
    worker.learn(lessons('1@0')).result,
    lambda: worker.forget('gone'),
    worker.score('10@0', [([1], [2])]).result,
    worker.score('11@0', [([1], [2])]).result,
  ]
  outcomes = collections.Counter()
  for ask in asked:
    try:
      ask()
      outcomes['done'] += 1
    except ServiceError as error:
      assert 'failed' in str(error) or 'again' in str(error), error
      outcomes[type(error).__name__] += 1
  until(lambda: worker.ready.is_set() and worker.stats['unfinished'] == 0)
  assert worker.failure is None and len(made.engines) == 1 + worker.stats['restarts']
  assert worker.arrays('own') == {'mine': 1}
  assert not lasting or method in ('restore', 'forget', 'drop') or worker.stats['restarts']
  assert sum(outcomes.values()) == len(asked)
  for version in ('own', '1@0', BASE):
    assert worker.sample(version, [1], max_tokens=1).result()[0].text == version
  assert worker.learn(lessons('own', 'next')).result(LONG).stepped


def test_what_was_drawn_is_counted_unless_the_engine_has_failed(made):
  gates = held(made, 'turn')
  handle = made.worker.sample(BASE, [1], max_tokens=3)
  assert handle.drawn == 0
  until(lambda: made.log[-1] == ('turn',))
  made.engine.drawings[0].drawn = 7
  assert handle.drawn == 7
  made.engine.broken['turn'] = 1
  gates['turn'].set()
  with pytest.raises(NotReady):
    handle.result()
  assert handle.drawn == 0


def test_an_engine_that_cannot_be_made_again_is_said(made):
  made.fail = RuntimeError('no device')
  made.engine.broken['turn'] = -1
  with pytest.raises(NotReady, match='turn failed|no device|sampled'):
    made.worker.sample('1@0', [1], max_tokens=3).result()
  with pytest.raises(RuntimeError, match='no device'):
    made.worker.ready.clear()
    made.worker.wait(LONG)
  assert isinstance(made.worker.failure, RuntimeError) and not made.worker.ready.is_set()
  with pytest.raises(NotReady, match='There is no engine: no device'):
    made.worker.score(BASE, [([1], [2])])


@pytest.mark.parametrize('rounds', [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_every_request_ends_whatever_fails_in_between(made, rounds):
  """Threads ask for anything while the engine fails at any call; what only the engine had outlives all of them."""
  worker, kept, wrong = made.worker, {}, []
  methods = ['restore', 'submit', 'turn', 'score', 'learn', 'forget', 'drop']

  def ask(number):
    draw = np.random.default_rng(number)
    try:
      for at in range(rounds):
        own, version = f'{number} {at}', f'{draw.integers(20)}@0'
        action = draw.choice(['sample', 'cancel', 'score', 'learn', 'reject', 'break'])
        try:
          if action == 'break' and number == 0:
            engine = made.engines[-1]
            if worker.ready.is_set():  # An engine that fails before it is ready would be the last one.
              engine.broken[str(draw.choice(methods))] = int(draw.choice([1, -1]))
          elif action in ('sample', 'cancel'):
            handle = worker.sample(version, [1], max_tokens=int(draw.integers(1, 5)))
            if action == 'cancel':
              worker.cancel(handle)
            assert handle.result()[0].text == version
          elif action == 'score':
            assert len(worker.score(version, [([1], [2])] * 5, topk=2).result(LONG)) == 5
          elif action in ('learn', 'reject'):
            worker.learn(lessons(version, own)).result(LONG)
            if action == 'reject':
              worker.forget(own)
            else:
              kept[own] = {'of': version}
        except ServiceError:
          pass
    except BaseException as error:
      wrong.append(error)

  threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert not wrong
  made.engines[-1].broken.clear()
  until(lambda: worker.ready.is_set() and worker.stats['unfinished'] == 0)
  assert kept and all(worker.arrays(version) == arrays for version, arrays in kept.items())
  assert worker.score(BASE, [([1], [2])]).result(LONG)


class Client(threading.Thread):
  """Asks for anything, in any order, of adapters of its own and of all first versions."""

  def __init__(self, worker, store, number, rounds):
    super().__init__()
    self.worker, self.store, self.rounds = worker, store, rounds
    self.draw = np.random.default_rng(number)
    self.heads = {adapter: f'{adapter}@0' for adapter in (2 * number, 2 * number + 1)}
    self.drawn, self.scored, self.learned, self.errors = [], [], [], []

  def run(self):
    try:
      for number in range(self.rounds):
        self.act(number)
    except BaseException as error:
      self.errors.append(error)

  def act(self, number):
    draw, worker = self.draw, self.worker
    adapter = int(draw.choice(list(self.heads)))
    anyone = str(draw.choice([*self.heads.values(), f'{draw.integers(16)}@0', BASE]))
    action = draw.choice(['sample', 'sample', 'cancel', 'score', 'learn', 'learn', 'reject'])
    if action in ('sample', 'cancel'):
      seed = int(draw.integers(3))
      handle = worker.sample(anyone, [3, 4, 5], n=2, seed=seed, max_tokens=8)
      if action == 'cancel':
        worker.cancel(handle)
      try:
        self.drawn.append((anyone, seed, handle.result()))
      except Cancelled:
        assert action == 'cancel'
    elif action == 'score':
      self.scored.append((anyone, worker.score(anyone, [([3, 4], [5, 6, 7])], topk=4).result()[0]))
    else:
      head, new, own = self.heads[adapter], f'{adapter}@{number + 1}', f'{adapter}-trial-{number}'
      teacher = str(draw.choice(['live', 'average', 'base', f'version:{adapter}@0']))
      request = feedback(head, own, seed=number, teacher=teacher)
      assert worker.learn(request).result().stepped
      if action == 'reject':
        worker.forget(own)
        return
      for of in (str, optimizer_name):
        self.store[of(new)] = worker.arrays(of(own))
      self.learned.append(dataclasses.replace(request, new=new))
      worker.stored(own, new)
      self.heads[adapter] = new


@pytest.mark.parametrize('rounds', [6, pytest.param(80, marks=pytest.mark.slow)])
def test_eight_clients_get_what_an_engine_of_their_own_gives(model, tmp_path, rounds, monkeypatch):
  monkeypatch.setattr(Engine, 'compile', lambda self, announce: None)
  numbers = sum(leaf.size for leaf in jax.tree.leaves(random_factors(model[0], 0)))
  engine = start(model, tmp_path / 'shelf', 16, memory_bytes=12 * (4 * 4 * numbers + 4))
  store = {f'{index}@0': engine.arrays(f'{index}@0') for index in range(16)}
  first = {name: {key: array.copy() for key, array in arrays.items()} for name, arrays in store.items()}
  for name in first:
    engine.drop(name)
    store[optimizer_name(name)] = {}
  worker = Worker(lambda: engine, store.__getitem__, announce=lambda line: None)
  worker.start()
  assert worker.wait(LONG)
  clients = [Client(worker, store, number, rounds) for number in range(8)]
  for client in clients:
    client.start()
  for client in clients:
    client.join()
  assert not [error for client in clients for error in client.errors]
  assert worker.stats['failed'] == worker.stats['restarts'] == 0
  until(lambda: engine.held_bytes <= 9 * (4 * 4 * numbers + 4))
  for name, arrays in first.items():
    for key, array in arrays.items():
      np.testing.assert_array_equal(worker.arrays(name)[key], array)
  worker.stop(LONG)
  # The same engine, with one thing after the other.
  for name in [name for name in store if name == version_of(name)]:
    engine.forget(name)
    for each in (name, optimizer_name(name)):
      engine.restore(each, store[each])
  for request in (request for client in clients for request in client.learned):
    engine.learn([dataclasses.replace(request, new='again')])
    for name in (request.new, optimizer_name(request.new)):
      for key, array in engine.arrays(name.replace(request.new, 'again')).items():
        np.testing.assert_allclose(store[name][key], array, atol=2e-5, err_msg=key)
    engine.forget('again')
  known = {}
  for version, seed, done in (each for client in clients for each in client.drawn):
    if (version, seed) not in known:
      handle = engine.submit(version, [3, 4, 5], n=2, seed=seed, step=0, max_tokens=8)
      while engine.turn():
        pass
      known[version, seed] = handle.result()
    for one, other in zip(done, known[version, seed], strict=True):
      np.testing.assert_array_equal(one.tokens, other.tokens)
      np.testing.assert_allclose(one.model_log_probs, other.model_log_probs, atol=1e-5)
  for version, one in (each for client in clients for each in client.scored):
    [other] = engine.score(version, [([3, 4], [5, 6, 7])], topk=4)
    np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-5)


def test_an_engine_whose_sampler_failed_is_made_anew(model, tmp_path, monkeypatch):
  monkeypatch.setattr(Engine, 'compile', lambda self, announce: None)
  worker = Worker(lambda: start(model, tmp_path / 'shelf', 1), {}.__getitem__, announce=lambda line: None)
  worker.start()
  assert worker.wait(LONG)
  first = worker.sample('0@0', [3, 4, 5], n=2, seed=0, max_tokens=8).result()
  put(worker, 'own', worker.arrays('0@0'))
  with monkeypatch.context() as broken:

    def fail(self):
      raise RuntimeError('the device is gone')

    broken.setattr(Slots, 'advance', fail)
    with pytest.raises(NotReady, match='device is gone|while it sampled'):
      worker.sample('own', [3, 4, 5], n=2, seed=0, max_tokens=8).result()
  until(worker.ready.is_set)
  again = worker.sample('own', [3, 4, 5], n=2, seed=0, max_tokens=8).result()
  for one, other in zip(again, first, strict=True):
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_array_equal(one.model_log_probs, other.model_log_probs)
  worker.stop(LONG)
