"""Random histories of a store against a model of it that is a dictionary, with restarts and lost databases in
between.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
import tempfile

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from sdpo_jax.serving.errors import Gone, NameTaken, NotFound, VersionConflict
from sdpo_jax.serving.store.store import IdempotentRequest, Retention
from tests.serving.store.store_cases import arrays, assert_same, open_store

KEEP = 2
OWNERS = ('ada', 'bob')
NAMES = ('one', 'two')
OPERATIONS = st.one_of(
  st.tuples(
    st.sampled_from(['create', 'create', 'delete', 'change', 'stale']), st.sampled_from(OWNERS), st.sampled_from(NAMES)
  ),
  st.tuples(
    st.sampled_from(['commit', 'commit', 'commit', 'undo', 'request']), st.sampled_from(OWNERS), st.sampled_from(NAMES)
  ),
  st.tuples(st.sampled_from(['retain', 'reopen', 'lost'])),
)


@dataclasses.dataclass
class Kept:
  """What the model knows of an adapter."""

  id: str
  settings: dict
  versions: dict[int, int]  # Number → seed.
  kept_from: int = 1
  asked: dict[str, int] = dataclasses.field(default_factory=dict)  # Key → version.

  @property
  def head(self) -> int:
    return max(self.versions)


class History:
  def __init__(self, folder: pathlib.Path):
    self.folder, self.model, self.seeds = folder, {}, itertools.count()
    self.deleted: list[tuple[str, str]] = []
    self.open()

  def open(self) -> None:
    self.store = open_store(self.folder, retention=Retention(keep_versions=KEEP))

  def do(self, kind: str, *which: str) -> None:
    if kind in ('retain', 'reopen', 'lost'):
      getattr(self, kind)()
    elif kind == 'create':
      self.create(*which)
    elif which in self.model:
      getattr(self, kind)(which[0], self.model[which], which)
    else:
      with pytest.raises(NotFound):
        self.store.by_name(*which)

  def retain(self) -> None:
    gone = 0
    for kept in self.model.values():
      first = max(kept.head - KEEP, kept.kept_from)
      gone += len([kept.versions.pop(number) for number in range(kept.kept_from, first)])
      kept.kept_from = first
    assert self.store.retain().versions == gone

  def reopen(self) -> None:
    self.store.close()
    self.open()

  def lost(self) -> None:
    self.store.close()
    (self.folder / 'database' / 'store.sqlite').unlink()
    self.open()

  def create(self, owner: str, name: str) -> None:
    seed = next(self.seeds)
    if (owner, name) in self.model:
      with pytest.raises(NameTaken):
        self.store.create(owner, name, {}, arrays(seed))
    else:
      adapter, _ = self.store.create(owner, name, {'seed': seed}, arrays(seed))
      self.model[owner, name] = Kept(adapter.id, {'seed': seed}, {0: seed})

  def delete(self, owner: str, kept: Kept, which: tuple[str, str]) -> None:
    self.store.delete(owner, kept.id, kept.head)
    self.deleted.append((owner, kept.id))
    del self.model[which]

  def change(self, owner: str, kept: Kept, which: tuple[str, str]) -> None:
    kept.settings = {'seed': next(self.seeds)}
    self.store.change_settings(owner, kept.id, kept.head, kept.settings)

  def stale(self, owner: str, kept: Kept, which: tuple[str, str]) -> None:
    for expected in (kept.head - 1, kept.head + 1):
      with pytest.raises(VersionConflict) as error:
        self.store.commit(owner, kept.id, expected, arrays(0), reason='feedback', details={})
      assert error.value.current == kept.head

  def commit(self, owner: str, kept: Kept, which: tuple[str, str], seed: int | None = None, **more) -> None:
    seed = next(self.seeds) if seed is None else seed
    made = self.store.commit(owner, kept.id, kept.head, arrays(seed), reason='feedback', details={}, **more)
    kept.versions[made.number] = seed

  def undo(self, owner: str, kept: Kept, which: tuple[str, str]) -> None:
    number = min(kept.versions)
    assert_same(self.store.arrays(self.store.version(owner, kept.id, number)), arrays(kept.versions[number]))
    self.commit(owner, kept, which, kept.versions[number], parent=number)

  def request(self, owner: str, kept: Kept, which: tuple[str, str]) -> None:
    """Send a request twice, which dies the first time before its answer."""
    key = f'{kept.id} {len(kept.asked)}'
    request = self.store.begin(owner, key, 'body')
    assert isinstance(request, IdempotentRequest)
    self.commit(owner, kept, which, request=request)
    kept.asked[key] = kept.head

  def check(self) -> None:
    for owner in OWNERS:
      mine = {name: kept for (who, name), kept in self.model.items() if who == owner}
      assert {adapter.name: adapter.id for adapter in self.store.adapters(owner)} == {
        name: kept.id for name, kept in mine.items()
      }
      for name, kept in mine.items():
        adapter = self.store.by_name(owner, name)
        assert (adapter.head, adapter.settings) == (kept.head, kept.settings)
        known = self.store.versions(owner, kept.id)
        assert {version.number for version in known} == kept.versions.keys()
        for version in known:
          assert_same(self.store.arrays(version), arrays(kept.versions[version.number]))
        for number in range(1, kept.kept_from):
          with pytest.raises(Gone):
            self.store.version(owner, kept.id, number)
    for owner, id in self.deleted:
      with pytest.raises(NotFound):
        self.store.adapter(owner, id)
    assert self.store.problems == []

  def end(self) -> None:
    """All is there after a restart; then it is known what every request has made that was not answered."""
    self.reopen()
    self.check()
    for (owner, _), kept in self.model.items():
      for key, number in kept.asked.items():
        if number in kept.versions:
          assert self.store.begin(owner, key, 'body').version == number
    self.store.close()


@settings(max_examples=12, deadline=None)
@given(st.lists(OPERATIONS, min_size=5, max_size=25))
def test_a_store_is_what_its_history_says(operations):
  memory = '/dev/shm' if os.access('/dev/shm', os.W_OK) else None
  with tempfile.TemporaryDirectory(dir=memory) as folder:
    history = History(pathlib.Path(folder))
    for operation in operations:
      history.do(*operation)
    history.check()
    history.end()
