"""Pages of lists: what is there throughout is on exactly one page, in order, whatever else comes and goes."""

from __future__ import annotations

import itertools
import random

import pytest

from sdpo_jax.serving.records import BEGINNING, place_after, place_of
from sdpo_jax.serving.sessions import session_tables
from sdpo_jax.serving.sessions.session_records import AgentSession, SessionExample, SessionSettings, TeacherTexts
from sdpo_jax.serving.store.database import Database
from sdpo_jax.serving.store.store import Retention
from tests.serving.store.postgres import postgres  # noqa: F401 (A fixture.)
from tests.serving.store.store_cases import arrays, open_store


@pytest.fixture
def clock():
  """Return a clock from which several adapters get the same time."""
  ticks = itertools.count()
  return lambda: 1e9 + 0.1 * (next(ticks) // 16)


@pytest.mark.parametrize('seed', range(3))
def test_what_stays_is_on_one_page_while_others_come_and_go(tmp_path, clock, seed):
  draw = random.Random(seed)
  with open_store(tmp_path, clock=clock) as store:
    made = [store.create(draw.choice(('ada', 'bob')), f'{number}', {}, arrays(0))[0] for number in range(24)]
    own = [adapter for adapter in made if adapter.owner == 'ada']
    assert len({adapter.created for adapter in own}) < len(own)
    deleted, found, after = set(), [], BEGINNING
    while page := store.adapters('ada', after, limit=3):
      assert len(page) <= 3
      found += page
      after = page[-1].created, page[-1].id
      victim = draw.choice([adapter for adapter in made if adapter.id not in deleted])  # Maybe the one at `after`.
      store.delete(victim.owner, victim.id)
      deleted.add(victim.id)
      if len(found) < 20:
        store.create('ada', f'new-{len(found)}', {}, arrays(0))
    ids = [adapter.id for adapter in found]
    assert len(set(ids)) == len(ids)
    assert [adapter for adapter in found if adapter in own and adapter.id not in deleted] == sorted(
      (adapter for adapter in own if adapter.id not in deleted), key=lambda adapter: (adapter.created, adapter.id)
    )
    left = store.adapters('ada')
    assert store.count('ada') == len(left) and store.count('nobody') == store.count('\ud800') == 0
    assert [adapter.name for adapter in store.adapters('ada', prefix='new-')] == [
      adapter.name for adapter in left if adapter.name.startswith('new-')
    ]
    assert store.adapters('bob', (own[0].created, own[0].id), limit=1) != own[:1]  # Another's place is only a time.


def test_pages_of_versions_leave_out_what_was_removed(tmp_path, clock):
  with open_store(tmp_path, clock=clock, retention=Retention(keep_versions=4)) as store:
    adapter, _ = store.create('ada', 'mine', {}, arrays(0))
    for head in range(9):
      store.commit('ada', adapter.id, head, arrays(head), reason='feedback', details={})
    assert [each.number for each in store.versions('ada', adapter.id, limit=3)] == [0, 1, 2]
    store.retain()
    assert [each.number for each in store.versions('ada', adapter.id, 2, limit=2)] == [5, 6]
    assert [each.number for each in store.versions('ada', adapter.id, 6, limit=9)] == [7, 8, 9]
    assert store.versions('ada', adapter.id, 9) == []
    assert [step.number for step in store.database.lineage(adapter.id)] == [0, *range(5, 10)]


@pytest.fixture(params=['sqlite', 'postgresql'])
def database(request, tmp_path):
  """Yield an empty database of either kind."""
  place = tmp_path / 'store.sqlite' if request.param == 'sqlite' else request.getfixturevalue('postgres').url()
  found = Database.open(place, 'root')
  yield found
  found.close()


def test_pages_of_sessions_turns_and_examples_are_the_same_in_both_databases(database):
  settings = SessionSettings()
  own = [AgentSession(f'ses-{n:016x}', 'ad-1', 1e9 + 0.1 * (n // 4), settings, None, {}, 'token') for n in range(9)]
  with database.writing() as rows:
    for session in own[::-1]:
      session_tables.put_session(rows, session)
    for n in range(4):
      for kind in ('denial', session_tables.REHEARSAL):
        example = SessionExample(own[n % 2].id, n, kind, 'waiting', 0, (), [1], TeacherTexts(feedback='No.'))
        session_tables.put_example(rows, 'ad-1', example)

  def paged(read, place_of, after):
    found = []
    while page := read(after):
      assert len(page) <= 2
      found += page
      after = place_of(page[-1])
    return found

  def sessions(after):
    return session_tables.sessions(database, 'ad-1', after, 2)

  def place(session):
    return place_after(place_of(session), None)

  assert [each.id for each in paged(sessions, place, BEGINNING)] == [each.id for each in own]
  examples = paged(lambda after: session_tables.examples(database, 'ad-1', after, 2), lambda each: each.id, -1)
  assert [(each.n, each.kind) for each in examples] == [(n, 'denial') for n in range(4)]  # No rehearsal was learned.
  only = session_tables.examples(database, 'ad-1', -1, 9, session=own[1].id, state='waiting')
  assert [each.n for each in only] == [1, 3] and session_tables.turns(database, own[0].id, -1, 2) == []
