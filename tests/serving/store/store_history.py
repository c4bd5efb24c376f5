"""A process that makes, changes and deletes adapters in a store, for tests that stop it or its machine at any point.

python -m tests.serving.store.store_history FOLDER
  does what `history` says once, and marks what it has been told
python -m tests.serving.store.store_history FOLDER load
  for every line on stdin, NAME: a process that commits from several threads in FOLDER/NAME, and says what was
  acknowledged on stdout
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import threading

import numpy as np

from sdpo_jax.serving.errors import VersionConflict
from sdpo_jax.serving.records import Version
from sdpo_jax.serving.store.store import IdempotentRequest, Retention, Store
from tests import file_operations
from tests.serving.store.store_cases import arrays, open_store, slots, state

RETENTION = Retention(keep_versions=2, idle_s=1e6)
KEY, BODY = 'a key', 'a body'
THREADS = 4  # Of a process under load.


def state_of(store: Store) -> dict[str, dict]:
  """Return what a store says of the adapters of both owners: as JSON, by id."""
  found = {}
  for owner in ('ada', 'bob'):
    for adapter in store.adapters(owner):
      known = store.versions(owner, adapter.id)
      found[adapter.id] = {
        'owner': owner,
        'name': adapter.name,
        'head': adapter.head,
        'settings': dict(adapter.settings),
        'versions': {str(version.number): [version.digest, version.details['seed']] for version in known},
        'state of': state_of_newest(store, known),
      }
  return found


def state_of_newest(store: Store, known: list[Version]) -> list[int | None]:
  """Return of which versions the optimizer state of the newest one is, after comparing it with what was given."""
  found = store.optimizer_state(known[-1])
  seeds = {version.number: version.details['seed'] for version in known}
  for number, kinds in ((found.moments_of, ('mu', 'nu', 'count')), (found.average_of, ('average',))):
    names = [name for name in found.arrays if name.partition('/')[0] in kinds]
    assert bool(names) == (number is not None)
    for name in names:
      np.testing.assert_array_equal(found.arrays[name], state(seeds[number])[name])
  return [found.moments_of, found.average_of]


def ask(store: Store, adapter: str, expected: int) -> int:
  """Return what a handler does for a request that makes a version with an idempotency key; returns the version."""
  request = store.begin('ada', KEY, BODY)
  if not isinstance(request, IdempotentRequest):
    return request.version
  version = store.commit('ada', adapter, expected, arrays(12), reason='feedback', details={'seed': 12}, request=request)
  store.finish(request, 200, b'{}')
  return version.number


def history(store: Store) -> None:
  """Mark what the store says after every change that it has acknowledged."""
  counter = iter(range(100))

  def told(state: dict[str, dict]) -> None:
    file_operations.mark(json.dumps(state))

  def commit(owner, adapter, **more):
    head, seed = store.adapter(owner, adapter.id).head, next(counter)
    more = {'reason': 'feedback', 'details': {'seed': seed}} | more
    made = store.commit(owner, adapter.id, head, arrays(more['details']['seed']), **more)
    told(state_of(store))
    if made.reason == 'feedback':
      store.keep_optimizer_state(made, state(more['details']['seed'])).result()
      told(state_of(store))

  def create(owner, name, seed, drawn=False, **more):
    given = (None, {'seed': seed}) if drawn else (arrays(seed), {})
    details = {'seed': seed, 'drawn': drawn}
    adapter, _ = store.create(owner, name, {'step': 0}, given[0], **given[1], details=details, **more)
    told(state_of(store))
    return adapter

  told({})
  mine, his = create('ada', 'mine', 100, drawn=True), create('bob', 'his', 200)
  commit('ada', mine)
  ask(store, mine.id, 1)
  told(state_of(store))
  commit('ada', mine, reason='undo', details={'seed': 0}, parent=0)
  create('ada', 'fork', 12, reason='fork')
  notes, _ = store.create('bob', 'notes', {}, slots(7), reason='import', details={'seed': 7, 'slots': True})
  told(state_of(store))
  store.commit('bob', notes.id, 0, slots(8), reason='import', details={'seed': 8, 'slots': True})
  told(state_of(store))
  store.change_settings('ada', mine.id, 3, {'step': 1})
  told(state_of(store))
  commit('ada', mine)
  store.change_settings('ada', mine.id, 4, {'pinned_versions': [1, 2, 4]})
  told(state_of(store))
  commit('ada', mine)
  store.retain()
  told(state_of(store))
  store.delete('bob', his.id)
  told(state_of(store))
  store.change_settings('ada', mine.id, 5, {'pinned_versions': [2, 4]})
  told(state_of(store))
  store.retain(store.clock() + 2e6)
  told(state_of(store))


def load(folder: pathlib.Path) -> None:
  """Commit from several threads until it is killed; print every version that was acknowledged."""
  store = open_store(folder)
  lock = threading.Lock()

  def say(*what) -> None:
    with lock:
      os.write(1, (json.dumps(what) + '\n').encode())

  shared = store.by_name('all', 'shared')

  def work(number: int) -> None:
    owner = f'owner {number}'
    own = store.by_name(owner, 'own')
    seed = 1000 * (number + 1) + own.head
    while True:
      for who, adapter in ((owner, own), ('all', shared)):
        seed += 1
        expected = store.adapter(who, adapter.id).head
        try:
          made = store.commit(who, adapter.id, expected, arrays(seed), reason='feedback', details={'seed': seed})
        except VersionConflict:
          continue
        say(who, adapter.id, made.number, made.digest, seed)
        if seed % 2:
          store.keep_optimizer_state(made, state(seed))
      if seed % 3 == 0:
        doomed, _ = store.create(owner, f'doomed {seed}', {}, arrays(seed), details={'seed': seed})
        store.delete(owner, doomed.id)
        say(owner, doomed.id, None, None, None)

  for number in range(THREADS):
    threading.Thread(target=work, args=(number,), daemon=True).start()
  threading.Event().wait()


def prepare(folder: pathlib.Path) -> None:
  """Make the adapters of `load`."""
  with open_store(folder) as store:
    for owner, name in [('all', 'shared'), *((f'owner {number}', 'own') for number in range(THREADS))]:
      store.create(owner, name, {}, arrays(0), details={'seed': 0})


def main() -> None:
  folder = pathlib.Path(sys.argv[1])
  if sys.argv[2:] != ['load']:
    with open_store(folder, retention=RETENTION) as store:
      history(store)
    return
  for line in sys.stdin:  # A child each: what takes long is the imports.
    child = os.fork()
    if child == 0:
      try:
        load(folder / line.strip())
      finally:
        os._exit(1)
    os.write(1, (json.dumps(['pid', child]) + '\n').encode())
    os.waitpid(child, 0)
    os.write(1, b'["ended"]\n')


if __name__ == '__main__':
  main()
