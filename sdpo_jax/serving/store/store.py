"""The store of the service: adapters, their versions, samples and requests.

A version is committed in this order: an intent in the database, its files, its manifest, HEAD by compare-and-swap, the
rows of the database. It exists once HEAD has moved; what a process leaves that dies before is never visible.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import os
import pathlib
import secrets
import shutil
import threading
import time
from typing import Any, Literal

from sdpo_jax.errors import UserError, first_line, short_repr
from sdpo_jax.files import is_local, jsonable
from sdpo_jax.models import file_lock
from sdpo_jax.serving.errors import (
  Damaged,
  Gone,
  InFlight,
  InvalidRequest,
  NameTaken,
  NotFound,
  NotHolder,
  ServiceError,
  StorageFailed,
  Unprocessable,
  VersionConflict,
)
from sdpo_jax.serving.records import BEGINNING, AdapterRecord, OptimizerState, Reason, SampleRecord, Version
from sdpo_jax.serving.store import optimizer_states, store_recovery, versions
from sdpo_jax.serving.store.blobs import Blobs, LostSwapError, Tagged, make_private, open_blobs
from sdpo_jax.serving.store.connections import POSTGRES, Rows
from sdpo_jax.serving.store.database import Database, Known, RequestRow, put
from sdpo_jax.serving.store.leases import Leases
from sdpo_jax.serving.store.versions import Arrays, Base, BlobKey, Head, RequestId, VersionManifest
from sdpo_jax.serving.tool_calls import flaw_of

_logger = logging.getLogger('sdpo_jax.serving')
LONGEST_NAME = 200  # Characters.
_STATES = 8  # The most adapters whose optimizer state waits to be written.
_AGAIN = 5.0  # Seconds between two attempts to write after one has failed.
_TRIED, _MOST_TRIED = 'TRIED', 2**20  # The blob of such an attempt, and the most bytes in it.
FORGOTTEN = 7 * 86400.0  # Seconds after its expiry within which a sample is reported as gone, not as unknown.


@dataclasses.dataclass(frozen=True)
class Retention:
  """What is stored, and for how long."""

  keep_versions: int = 0  # How many versions to keep beside the newest one, version 0 and pinned ones; 0: all.
  idle_s: float = math.inf  # Seconds after which an unchanged adapter loses its moments and all but those three.
  moments: Literal['float32', 'bfloat16', 'none'] = 'float32'  # How moments are stored; 'none': not at all.
  request_ttl_s: float = 86400.0  # Lifetime of responses to requests with an idempotency key.


@dataclasses.dataclass(frozen=True)
class Retained:
  """How many versions, samples and stored requests `Store.retain` has removed."""

  versions: int
  samples: int
  requests: int


@dataclasses.dataclass(frozen=True)
class IdempotentRequest:
  """A request in progress that has an idempotency key."""

  owner: str
  id: RequestId


@dataclasses.dataclass(frozen=True)
class StoredResponse:
  """The stored outcome of an earlier request with the same key."""

  status: int | None  # The HTTP status; None: the response was lost when the process died, the version was not.
  response: bytes | None  # The body; None: likewise.
  adapter: str | None  # The id of the adapter that the request was about.
  version: int | None  # The version that the request made; None: none.


class Store(contextlib.AbstractContextManager):
  """The adapters of all owners; any thread may call. Use `Store.open`, and `close` at the end.

  All methods that write may raise StorageFailed; then nothing has changed, unless the message says otherwise.
  """

  def __init__(
    self,
    blobs: Blobs,
    database: Database,
    base: Base,
    retention: Retention,
    clock: Callable[[], float],
    held: contextlib.ExitStack,
    leases: Leases | None = None,
  ):
    """Make a store from open parts; use `open` instead."""
    self.blobs, self.database, self.base, self.retention = blobs, database, base, retention
    self.clock = clock if leases is None else lambda: clock() + leases.ahead  # Replicas have one time.
    self._held, self.leases = held, leases
    self._replica = '' if leases is None else leases.replica
    self._locks: dict[str, threading.RLock] = {}  # By adapter.
    self._lock = threading.Lock()  # Guards the fields below.
    self._names: set[tuple[str, str]] = set()  # (owner, name) of adapters that are being created.
    self._under_way: set[tuple[str, str]] = set()  # (owner, key) of requests.
    self._closed = True  # False between the end of recovery and `close`.
    self._changes = 0  # Changes of adapters that are under way.
    self._need = sum(4 * math.prod(shape) for shape in base.shapes.values())  # About the bytes of a version.
    self._look_again = 0.0  # When `unwritable` may try to write again.
    self._undropped: list[IdempotentRequest] = []  # Requests that have ended, and whose rows could not be dropped.
    self._doubtful: dict[str, str] = {}  # Folders, by id, of adapters whose database entry may differ from the root.
    self._given_up: set[str] = set()  # Adapters of which a put of HEAD has failed, which may still arrive in a bucket.
    # The adapters that were compared with the root since a start after a crash; None: there is no need to.
    self._compared: set[str] | None = None
    self._lost: dict[str, tuple[str, str]] = {}  # (Folder, message), by id, of damaged adapters that only the root has.
    # By the id of their adapter, the newest optimizer states that are not written yet.
    self._states: dict[str, tuple[Version, Arrays]] = {}
    self._written = 0  # Bytes.
    self._writer = ThreadPoolExecutor(1, 'optimizer-states')

  @classmethod
  def open(
    cls,
    root: str,
    database: str | pathlib.Path,
    *,
    base: Base,
    retention: Retention = Retention(),
    clock: Callable[[], float] = time.time,
    url: str = '',
    **options: Any,
  ) -> Store:
    """Open a store, or make one, and finish or undo what dead processes have left unfinished.

    Args:
      root: the place of the versions: a local folder, s3://bucket/prefix, gs://bucket/prefix or memory://name.
      database: a local file; it is rebuilt from the root if it is missing, damaged or of another root. Or
        postgresql://…, which replicas share, with a root that is no local folder; an empty one is filled from the root.
      base: the model and the shape of its adapters.
      retention: what is stored, and for how long.
      clock: returns seconds since the epoch.
      url: where other replicas reach this process.
      options: options for obstore's store, unless the root is a local folder.

    Raises:
      UserError: another process has it open, the root holds adapters of another base, or it cannot be opened.
    """
    with contextlib.ExitStack() as held:
      blobs = open_blobs(str(root), **options)
      held.callback(blobs.close)
      if is_local(blobs.name):
        _lock(held, pathlib.Path(blobs.name) / 'LOCK', f'serve.store.root={root}')
      if not str(database).startswith(POSTGRES):
        database = pathlib.Path(database)
        try:
          make_private(database.parent)
        except OSError as error:
          raise UserError(
            f'serve.store.database={database} cannot be made ({first_line(error)}): name a local file that can be '
            'written to.'
          ) from error
        _lock(held, database.with_name(f'{database.name}.lock'), f'serve.store.database={database}')
      try:
        identity = _identify(blobs, base)
        stamp = store_recovery.take_stamp(blobs)
        rows = Database.open(database, identity, stamp)
        held.callback(rows.close)
        leases = Leases(rows, url) if rows.shared else None
        if leases is not None:
          held.callback(leases.close)
        store = cls(blobs, rows, base, retention, clock, held, leases)
        with contextlib.nullcontext() if leases is None else leases.filling(identity):
          store._lost.update(store_recovery.recover(blobs, rows, clock()))
        store._compared = set() if rows.trusted and stamp.startswith(store_recovery.OPEN) else None
        if not store._lost:
          store_recovery.leave_stamp(blobs, rows, store_recovery.OPEN)
        store._closed = False
      except (StorageFailed, NotHolder) as error:
        raise UserError(f'The store cannot be opened: {error}') from error
      store._held = held.pop_all()
      return store

  def close(self) -> None:
    """Write the optimizer states that wait, close the files and release the locks.

    If all is in order, the next start reads nothing of the root.
    """
    self._writer.shutdown()
    with self._lock:
      closed, self._closed = self._closed, True
      settled = self._compared is None and not (self._changes or self._doubtful or self._lost or self._under_way)
    with contextlib.suppress(StorageFailed):
      if self.database.connections.failed and not closed:  # The next start finds out whether it is damaged.
        store_recovery.take_stamp(self.blobs)
      elif settled and not (closed or self.blobs.failed or self.database.unfinished()):
        store_recovery.leave_stamp(self.blobs, self.database, store_recovery.CLOSED)
    self._held.close()

  def unwritable(self) -> str:
    """Return why nothing can be stored now, in a sentence without paths; empty: it can.

    Disks are asked for their free space. Only after a write has failed, one is tried every `_AGAIN` seconds.
    """
    places = self.blobs.name, self.database.connections.folder
    if any(_free(place) < 2 * self._need for place in places if place and is_local(place)):
      return 'The disk is full.'
    with self._lock:
      failed = self.blobs.failed or self.database.connections.failed
      if not failed or time.monotonic() < self._look_again:
        return 'The storage cannot be written.' * failed
      self._look_again = time.monotonic() + _AGAIN
    try:
      self.database.check()
      self.blobs.delete([_TRIED], '')
      self.blobs.swap(_TRIED, bytes(min(self._need, _MOST_TRIED)), None)
      self.blobs.delete([_TRIED], '')
      self.blobs.failed = False
    except (StorageFailed, LostSwapError) as error:
      _logger.warning('The storage cannot be written: %s', error)
    return 'The storage cannot be written.' * (self.blobs.failed or self.database.connections.failed)

  def __exit__(self, *_: object) -> None:
    self.close()

  @property
  def problems(self) -> list[str]:
    """One sentence for each damaged adapter that the database does not know."""
    with self._lock:
      return [why for _, why in self._lost.values()]

  @property
  def stats(self) -> dict[str, int]:
    """Metrics by name: the bytes of versions and states written since the start, and the states that wait."""
    with self._lock:
      return {'written_bytes': self._written, 'waiting_states': len(self._states)}

  # Adapters.

  def create(
    self,
    owner: str,
    name: str,
    settings: Mapping[str, Any],
    arrays: Arrays | None = None,
    *,
    seed: int | None = None,
    reason: Reason = 'create',
    details: Mapping[str, Any] | None = None,
    request: IdempotentRequest | None = None,
  ) -> tuple[AdapterRecord, Version]:
    """Create an adapter and its version 0, whose factors are `arrays`, or drawn from `seed` whenever they are read.

    Raises:
      NameTaken: the owner has an adapter of that name.
      InvalidRequest: the name is empty, too long, or not valid UTF-8.
    """
    _check_name(owner, name)
    if self.database.shared and '\0' in f'{owner}{name}':
      raise InvalidRequest('PostgreSQL stores no text with a NUL: choose another name.', field='name')
    self._settle_all(owner)
    self.hold_owner(owner)
    taken = NameTaken(f'There is an adapter {short_repr(name)} already: choose another name.', field='name')
    with self._lock:
      if (owner, name) in self._names:
        raise taken
      self._names.add((owner, name))
    try:
      if self.database.by_name(owner, name) is not None:
        raise taken
      now = self.clock()
      adapter = AdapterRecord(f'ad-{secrets.token_hex(8)}', owner, name, 0, now, jsonable(settings))
      with self._alone(adapter.id, new=True):
        arrays = versions.fresh(self.base.adapter, self.base.rows, seed) if arrays is None else arrays
        return adapter, self._make_version(adapter, None, None, arrays, None, reason, details or {}, request, seed)
    finally:
      with self._lock:
        self._names.discard((owner, name))

  def adapter(self, owner: str, id: str) -> AdapterRecord:
    """Return an adapter; raises NotFound if it is unknown, deleted, or belongs to another owner."""
    return self._known(owner, id).head.adapter

  def by_name(self, owner: str, name: str) -> AdapterRecord:
    """Return the adapter of an owner that has a name; raises NotFound if there is none."""
    self._settle_all(owner)
    found = self.database.by_name(owner, name)
    if found is None:
      raise NotFound(f'There is no adapter {short_repr(name)}.')
    return self.adapter(owner, found.id)

  def adapters(self, owner: str, after: tuple[float, str] = BEGINNING, **only: Any) -> list[AdapterRecord]:
    """Return the adapters of an owner, the oldest first, see `Database.of_owner`."""
    self._settle_all(owner)
    return self.database.of_owner(owner, after, **only)

  def count(self, owner: str) -> int:
    """Return the number of adapters of an owner."""
    self._settle_all(owner)
    return self.database.count(owner)

  def change_settings(
    self, owner: str, id: str, expected: int, settings: Mapping[str, Any], *, request: IdempotentRequest | None = None
  ) -> AdapterRecord:
    """Replace the settings of an adapter; its `pinned_versions` are kept until they are pinned no more.

    Raises:
      NotFound: as `adapter`, or there is no such version to pin.
      Gone: a version to pin was removed.
      VersionConflict: the adapter is at another version than `expected`.
      Damaged: its HEAD is damaged.
    """
    self._known(owner, id)
    with self._alone(id):
      if settings.get('pinned_versions'):  # A newer state would take the place of one that waits.
        self._write_state(id)
      head, tagged = self._head(owner, id, expected)
      pinned = {
        str(number): head.pinned.get(str(number)) or self.version(owner, id, number).digest
        for number in settings.get('pinned_versions', ())
      }
      gone = {number for number in head.pinned.keys() - pinned.keys() if 0 < int(number) < head.kept_from}
      adapter = dataclasses.replace(head.adapter, settings=jsonable(settings))
      self._swap_head(dataclasses.replace(head, adapter=adapter, pinned=pinned), tagged, request)
      if gone:
        with contextlib.suppress(StorageFailed):  # The settings have changed; the next access removes the files.
          folder, _ = self._place(id)
          self._remove(id, folder, [key for key, of in self._listed(folder) if str(of.number) in gone])
      return adapter

  def delete(self, owner: str, id: str, expected: int | None = None) -> None:
    """Erase an adapter: its versions, samples, and the responses to requests about it.

    A deletion cannot be undone; if it is interrupted, the next `retain` or the next start continues it.

    Raises:
      NotFound: as `adapter`.
      VersionConflict: the adapter is at another version than `expected`.
    """
    if self._lost_of(owner, id) is None:
      self._known(owner, id)
    with self._alone(id):
      adapter = None if self._lost_of(owner, id) else self._known(owner, id).head.adapter
      if adapter is not None and expected not in (None, adapter.head):
        raise _conflict(adapter)
      folder = versions.adapter_folder(owner, id)
      with self._fenced(id) as rows:
        self.database.put_intent(rows, id, folder)
      try:
        if self.leases is not None and adapter is not None:
          self._end_head(owner, id, adapter.head)
      finally:
        self._doubt(id, folder)  # Until everything is erased.
      versions.bury(self.blobs, folder, id, self.clock())
      store_recovery.erase(self.blobs, self.database, folder, id)
      with self._lock:
        for kept in (self._doubtful, self._lost, self._locks, self._states):
          kept.pop(id, None)

  def _end_head(self, owner: str, id: str, expected: int) -> None:
    """Let HEAD say that an adapter is deleted, unless another replica has it; a damaged one nobody can move."""
    with contextlib.suppress(Damaged):
      head, tagged = self._head(owner, id, expected)
      key = f'{versions.adapter_folder(owner, id)}/{versions.HEAD}'
      try:
        self.blobs.swap(key, versions.write_head(dataclasses.replace(head, deleted=True)), tagged)
      except LostSwapError:
        raise NotHolder('') from None

  # Versions.

  def commit(
    self,
    owner: str,
    id: str,
    expected: int,
    arrays: Arrays,
    *,
    reason: Reason,
    details: Mapping[str, Any],
    parent: int | None = None,
    request: IdempotentRequest | None = None,
  ) -> Version:
    """Make the next version of an adapter.

    Args:
      owner: the owner of the adapter.
      id: the id of the adapter.
      expected: the version that the adapter must be at.
      arrays: the factors of the new version.
      reason: why it is made.
      details: how it was made, as JSON; numbers that are not finite become null.
      parent: the version from which it was made; None: `expected`.
      request: the request that makes it; a repeat of the request makes no second version.

    Raises:
      NotFound: as `adapter`.
      VersionConflict: the adapter is at another version; nothing has changed.
      Damaged: its HEAD is damaged.
      ValueError: the arrays do not have the shape of adapters of this base.
    """
    self._known(owner, id)
    with self._alone(id):
      if request is not None:  # It may have been found only now, when this replica has taken the adapter over.
        made = self.database.made_by(owner, request.id.key)
        if made is not None and made.adapter == id and made.created > self.clock() - self.retention.request_ttl_s:
          return self.version(owner, id, made.version)
      head, tagged = self._head(owner, id, expected)
      adapter = dataclasses.replace(head.adapter, head=expected + 1)
      parent = expected if parent is None else parent
      return self._make_version(adapter, head, tagged, arrays, parent, reason, details, request)

  def versions(self, owner: str, id: str, after: int = -1, **limit: int) -> list[Version]:
    """Return the versions of an adapter in order, without damaged ones; raises NotFound as `adapter`."""
    self._known(owner, id)
    return [known.manifest.version for known in self.database.versions(id, after, intact=True, **limit)]

  def version(self, owner: str, id: str, number: int) -> Version:
    """Return a version of an adapter.

    Raises:
      NotFound: as `adapter`, or the adapter has no such version.
      Gone: the version was removed by retention.
      Damaged: its manifest is damaged.
    """
    head = self._known(owner, id).head
    if 0 < number < head.kept_from and str(number) not in head.pinned:
      raise Gone(
        f'Version {number} of {id} was removed: version 0, those from {head.kept_from} on and pinned ones are kept.'
      )
    if not 0 <= number <= head.adapter.head:
      raise NotFound(f'{id} has no version {short_repr(number)}: its newest is {head.adapter.head}.')
    known = self.database.version(id, number)
    if known is None:
      raise Damaged(f'Version {number} of {id} is missing: restore it from a copy, or undo to another version.')
    if known.manifest is None:
      raise Damaged(known.damaged)
    return known.manifest.version

  def kept_from(self, owner: str, id: str) -> int:
    """Return the first version after 0 that retention has kept of an adapter; raises NotFound as `adapter`."""
    return self._known(owner, id).head.kept_from

  def arrays(self, version: Version) -> Arrays:
    """Return the arrays of a version, bit for bit as they were committed.

    Raises:
      Damaged: one of the version's files is missing or damaged.
      NotFound: the adapter was deleted.
      Gone: the version was removed by retention.
    """
    files = self._files(version, (versions.peft_files.WEIGHTS, versions.SLOTS))
    try:
      return versions.arrays_of(self.base, *next(iter(files.items())))
    except ValueError as error:
      raise Damaged(f'Version {version.number} of {version.adapter} cannot be read: {error}') from error

  def peft_files(self, version: Version) -> dict[str, bytes]:
    """Return the contents of a version's PEFT files by name; raises as `arrays`."""
    return self._files(version, versions.PEFT_FILES)

  # Optimizer state.

  def keep_optimizer_state(self, version: Version, arrays: Arrays) -> Future[None]:
    """Store the optimizer state of a version soon, and remove that of older versions, except pinned ones.

    A newer state of the adapter takes the place of one that still waits. `optimizer_state` returns those that wait; if
    the process dies, they are lost, and learning goes on from an older one.

    Args:
      version: a committed version.
      arrays: see `OptimizerState`.

    Returns:
      A future that is done when the state was written, or will be tried again by `retain`.
    """
    with self._lock:
      self._states.pop(version.adapter, None)
      self._states[version.adapter] = version, arrays
    done = self._writer.submit(self._write_state, version.adapter)
    # So that memory is bounded, whoever learns faster than is written waits; and what cannot be written is given up.
    while len(self._states) > _STATES:
      oldest = next(iter(self._states))
      self._writer.submit(self._write_state, oldest).result()
      with self._lock:
        if len(self._states) > _STATES and self._states.pop(oldest, None) is not None:
          _logger.error('The optimizer state of %s is given up, since too many cannot be stored.', oldest)
    return done

  def optimizer_state(self, version: Version) -> OptimizerState:
    """Return the optimizer state from which learning from a version goes on, see `optimizer_states`."""
    with self._lock:
      waiting, arrays = self._states.get(version.adapter, (None, {}))
    if waiting == version:
      return optimizer_states.own(version, arrays)
    known = {each.number: each.manifest for each in self.database.versions(version.adapter)}
    lineage, at = [], version.number
    while (manifest := known.get(at)) is not None:
      lineage.append(manifest.version)
      at = lineage[-1].parent
    return optimizer_states.read(self.blobs, self.base, self._place(version.adapter)[0], lineage)

  def _write_state(self, id: str) -> None:
    """Write the optimizer state of an adapter that waits, if there is one; a failed write is tried again later."""
    with self._lock:
      item = self._states.get(id)
    if item is None:
      return
    version, arrays = item
    try:
      folder, _ = self._place(id)
      size = optimizer_states.write(self.blobs, folder, version, arrays, self.retention.moments)
      with self._lock:
        self._written += size
      states = [(key, of) for key, of in self._listed(folder) if of.is_state]
      known = self.database.known(id)
      if known is None or known.deleted:  # Meanwhile.
        self.blobs.delete([key for key, _ in states], folder.rpartition('/')[0])
        raise NotFound(f'There is no adapter {id}.')
      older = [key for key, of in states if of.number < version.number and str(of.number) not in known.head.pinned]
      self.blobs.delete(older, folder)
      adapter, keep = known.head.adapter, self.retention.keep_versions
      # `retain` is too rare for one that learns all the time.
      if keep and adapter.head - 2 * keep > known.head.kept_from:
        with contextlib.suppress(VersionConflict, Damaged, NotHolder), self._alone(id):
          self._shrink(adapter, -math.inf)
    except (NotFound, FileNotFoundError):  # The adapter or the version was removed.
      pass
    except Exception:
      _logger.exception('The optimizer state of %s could not be stored yet; it is tried again.', version.engine_name)
      return
    with self._lock:
      if self._states.get(id) is item:
        del self._states[id]

  def settle_doubtful(self) -> None:
    """Write what the database has missed while it failed, or a replica has died; all replicas read only that."""
    for request in list(self._undropped):
      self._drop(request, ended=True)
      self._undropped.remove(request)
    self._each(list(self._doubtful), self._settle)
    if self.leases is not None:
      self._adopt()

  def _settle(self, id: str) -> None:
    """Re-read an adapter from the root if it is in doubt."""
    try:
      with self._alone(id):
        if (folder := self._doubtful.get(id)) is not None:  # Nobody has settled it meanwhile.
          if id in self._given_up:
            self._fence_off(id, self._epoch(id), again=True)
          else:
            self._re_read(id, folder)
    except NotHolder:  # But a replica that has settled it.
      with self._lock:
        self._doubtful.pop(id, None)

  def _compare_all(self) -> None:
    """After a crash, compare all adapters with the root, and find those that only the root has."""
    try:
      self.database.check()
    except StorageFailed:
      store_recovery.take_stamp(self.blobs)  # The next start does not believe it.
      raise
    places = store_recovery.all_places(self.blobs, self.database)

    def visit(id: str) -> None:  # One at a time, since whoever lists adapters settles all that are in doubt.
      self._doubt(id, places[id].folder)
      try:
        self._settle(id)
      except Damaged as error:
        with self._lock:
          self._lost[id] = self._doubtful.pop(id), str(error)

    self._each(places, visit)
    self._compared = None

  def _each(self, ids: Iterable[str], do: Callable[[str], None]) -> None:
    """Do something with adapters; one that fails keeps no other from it, and is reported at the end."""
    failed = None
    for id in ids:
      try:
        do(id)
      except (NotFound, VersionConflict, Damaged, NotHolder):  # It was deleted, changed meanwhile, or is damaged.
        continue
      except StorageFailed as error:
        failed = error
    if failed is not None:
      raise failed

  # Retention.

  def retain(self, now: float | None = None) -> Retained:
    """Remove what the retention settings no longer keep, and continue interrupted deletions.

    Args:
      now: seconds since the epoch; None: the clock's time.
    """
    now = self.clock() if now is None else now
    self.settle_doubtful()
    if self._compared is not None:
      self._compare_all()
    if self.leases is not None:
      self.leases.forget_dead()
    for id in list(self._states):
      self._writer.submit(self._write_state, id)
    idle, removed = now - self.retention.idle_s, []
    adapters = {adapter.id: adapter for adapter in self.database.to_shrink(self.retention.keep_versions, idle)}

    def visit(id: str) -> None:
      if id not in self._states:  # Else it has just learned, or its state must be written first.
        with self._alone(id, visit=True):
          removed.append(self._shrink(adapters[id], idle))

    try:
      self._each(adapters, visit)
    finally:
      with self.database.writing() as rows:
        samples = self.database.expire_samples(rows, now, now - FORGOTTEN)
        requests = self.database.expire_requests(rows, now - self.retention.request_ttl_s)
      if samples or requests:
        self.database.connections.truncate_log()
    return Retained(sum(removed), samples, requests)

  def _shrink(self, adapter: AdapterRecord, idle: float) -> int:
    """Remove what retention no longer keeps of an adapter; return how many versions were removed.

    Args:
      adapter: the adapter.
      idle: seconds since the epoch; if its newest version is older, that loses its moments, and others are removed.
    """
    head, tagged = self._head(adapter.owner, adapter.id, adapter.head)
    newest, keep = self.version(adapter.owner, adapter.id, adapter.head), self.retention.keep_versions
    is_idle = newest.created <= idle
    kept = 0 if is_idle else keep or adapter.head
    if (first := adapter.head - kept) > head.kept_from:
      head = dataclasses.replace(head, kept_from=first)
      self._swap_head(head, tagged, None)
    first = head.kept_from
    folder, _ = self._place(adapter.id)
    listed = [(key, of) for key, of in self._listed(folder) if str(of.number) not in head.pinned]
    old = [(key, of) for key, of in listed if 0 < of.number < first]
    moments = [key for key, _ in listed if key.endswith(versions.MOMENTS)] if is_idle else []
    self._remove(adapter.id, folder, {*moments, *(key for key, _ in old)})
    if is_idle:
      with self.database.writing() as rows:
        put(rows, 'shrunk', {'adapter': adapter.id, 'head': adapter.head}, key='adapter')
    return len({of.version for _, of in old})

  def _remove(self, id: str, folder: str, keys: Iterable[str]) -> None:
    """Remove blobs of versions that the HEAD of an adapter does not lead to any more."""
    try:
      self.blobs.delete(keys, folder)
    except StorageFailed:
      self._doubt(id, folder)  # The remaining blobs are garbage, which `_settle` removes.
      raise

  def _listed(self, folder: str) -> Iterator[tuple[str, BlobKey]]:
    """Yield the keys of the versions of the adapter in a folder, with their parts."""
    for entry in self.blobs.list(f'{folder}/versions'):
      if (of := versions.parse_key(entry.key)) is not None:
        yield entry.key, of

  # Making versions and moving HEAD.

  def _make_version(
    self,
    adapter: AdapterRecord,
    before: Head | None,
    tagged: Tagged | None,
    arrays: Arrays,
    parent: int | None,
    reason: Reason,
    details: Mapping[str, Any],
    request: IdempotentRequest | None,
    seed: int | None = None,
  ) -> Version:
    """Write the next version of an adapter, and move HEAD from `before` to it; files with a seed are not written."""
    folder = versions.adapter_folder(adapter.owner, adapter.id)
    files = versions.files_of(self.base, arrays)
    version = Version(adapter.id, adapter.head, parent, reason, self.clock(), '', jsonable(details))
    previous, id = before and before.digest, request and request.id
    manifest, content = versions.make_manifest(version, previous, id, files, seed)
    place = f'{folder}/versions/{manifest.folder}'
    try:
      with self._fenced(adapter.id, *[versions.adapter_folder(adapter.owner, '')] * (before is None)) as rows:
        self.database.put_intent(rows, adapter.id, folder, manifest.folder)
      stored = files if seed is None else {}
      self.blobs.put_new(place, stored, last={versions.MANIFEST: content})
      with self._lock:
        self._written += sum(map(len, (*stored.values(), content)))
    except BaseException:
      self._discard(adapter.id, folder, manifest)
      raise
    digest = manifest.version.digest
    if before is None:
      head = Head(adapter, digest, digest, epoch=self._epoch(adapter.id))
    else:
      head = dataclasses.replace(before, adapter=adapter, digest=digest)
    self._swap_head(head, tagged, request, manifest)
    return manifest.version

  def _swap_head(
    self, head: Head, tagged: Tagged | None, request: IdempotentRequest | None, manifest: VersionManifest | None = None
  ) -> None:
    """Move HEAD and update the database.

    Raises:
      VersionConflict: another process has moved it; the files of the new version are removed.
      StorageFailed: it may or may not have moved; the next access to the adapter finds out.
    """
    adapter, content = head.adapter, versions.write_head(head)
    folder = versions.adapter_folder(adapter.owner, adapter.id)
    number = None if manifest is None else manifest.version.number
    if manifest is None:  # As for a version: if this process dies, the next one or another replica looks at HEAD.
      with self._fenced(adapter.id) as rows:
        self.database.put_intent(rows, adapter.id, folder)
    try:
      self.blobs.swap(f'{folder}/{versions.HEAD}', content, tagged)
    except LostSwapError:
      self._doubt(adapter.id, folder)
      if not self._leads_to(folder, manifest):  # Else it was moved, although the answer was lost, and then again.
        if manifest is not None:
          self._discard(adapter.id, folder, manifest)
        raise _conflict(self._known(adapter.owner, adapter.id).head.adapter) from None
    except BaseException as error:
      self._doubt(adapter.id, folder)
      if not is_local(self.blobs.name):
        self._given_up.add(adapter.id)
      if not (isinstance(error, StorageFailed) and self._has_moved(adapter, content)):
        raise
    try:
      with self._fenced(adapter.id, *[versions.adapter_folder(adapter.owner, '')] * (tagged is None)) as rows:
        if manifest is not None:
          self.database.put_version(rows, manifest)
        self.database.drop_intent(rows, adapter.id)
        self.database.put_head(rows, head, versions.tag_of(content))
        if request is not None:
          self.database.note_made(rows, adapter.owner, request.id, adapter.id, number)
    except (StorageFailed, NotHolder) as error:
      if tagged is None and isinstance(error, NotHolder):  # Whoever has it now has taken it for unfinished.
        with contextlib.suppress(ServiceError):  # If so, there is a tombstone, and nothing may stay beside it.
          self._re_read(adapter.id, folder)
        raise
      # HEAD has moved, so the version exists. The database follows when it can be written again.
      _logger.warning(
        '%s is at version %d, but the database could not be updated yet: %s', adapter.id, adapter.head, error
      )
      self._doubt(adapter.id, folder)

  def _leads_to(self, folder: str, manifest: VersionManifest | None) -> bool:
    """Return whether HEAD leads to a version, after moving it there was refused.

    Raises:
      NotHolder: another replica has the adapter, and has not committed the version.
      StorageFailed: that cannot be known; the version stays.
    """
    tagged = self.blobs.tagged(f'{folder}/{versions.HEAD}')
    if tagged is None:
      return False
    head = versions.read_head(tagged.content, f'{self.blobs.name}/{folder}', folder)
    digest = head.digest if manifest is not None else None
    for number in range(head.adapter.head, 0 if manifest is None else manifest.version.number, -1):
      digest = None if digest is None else versions.read_manifest(self.blobs, folder, number, digest).previous
    found = manifest is not None and digest == manifest.version.digest
    if not found and self.leases is not None and head.epoch > self._epoch(head.adapter.id):
      if manifest is not None:
        self._discard(head.adapter.id, folder, manifest)
      raise self.leases.lost(head.adapter.id)
    return found

  def _has_moved(self, adapter: AdapterRecord, content: bytes) -> bool:
    """Return whether HEAD has this content although writing it has failed."""
    try:
      return self._known(adapter.owner, adapter.id).tag == versions.tag_of(content)
    except ServiceError:
      return False

  def _discard(self, id: str, folder: str, manifest: VersionManifest) -> None:
    """Remove the files of an uncommitted version; what cannot be removed now is before the next change."""
    names = (*versions.FILES, versions.MANIFEST)
    stays = folder if manifest.version.number else folder.rpartition('/')[0]
    try:
      self.blobs.delete([f'{folder}/versions/{manifest.folder}/{name}' for name in names], stays)
      with self.database.writing() as rows:
        self.database.drop_intent(rows, id, manifest.folder)
    except StorageFailed:
      self._doubt(id, folder)

  def _head(self, owner: str, id: str, expected: int) -> tuple[Head, Tagged]:
    """Return an adapter's HEAD, parsed and as a tagged blob; raises VersionConflict for another version."""
    known = self._known(owner, id)
    folder = versions.adapter_folder(owner, id)
    key = f'{folder}/{versions.HEAD}'
    tagged = self.blobs.tagged(key)
    if tagged is None or versions.tag_of(tagged.content) != known.tag:
      self._doubt(id, folder)
      self._known(owner, id)
      tagged = self.blobs.tagged(key)
      if tagged is None:
        raise store_recovery.no_head(self.blobs, folder)
    head = versions.read_head(tagged.content, f'{self.blobs.name}/{key}', folder)
    if self.leases is not None and head.epoch > self._epoch(id):
      raise self.leases.lost(id)
    if head.deleted:
      raise NotFound(f'There is no adapter {id}.')
    if head.adapter.head != expected:
      raise _conflict(head.adapter)
    return head, tagged

  def _files(self, version: Version, names: tuple[str, ...]) -> dict[str, bytes]:
    folder, known = self._place(version.adapter)
    try:
      manifest = versions.read_manifest(self.blobs, folder, version.number, version.digest)
      return versions.read_files(self.blobs, self.base, folder, manifest, names)
    except Damaged:
      # Raises Gone if retention has removed it meanwhile.
      self.version(known.head.adapter.owner, version.adapter, version.number)
      raise

  def _place(self, id: str) -> tuple[str, Known]:
    """Return the folder and the database entry of an adapter of any owner; raises NotFound if there is none."""
    known = self.database.known(id)
    if known is None or known.deleted:
      raise NotFound(f'There is no adapter {id}.')
    return versions.adapter_folder(known.head.adapter.owner, id), known

  # Entries of the database, which are in doubt after a failed write or a crash.

  def _known(self, owner: str, id: str) -> Known:
    """Return the database entry of an owner's adapter; raises NotFound if there is none."""
    if (compared := self._compared) is not None and id not in compared and (found := self.database.known(id)):
      self._doubt(id, versions.adapter_folder(found.head.adapter.owner, id))
      compared.add(id)
    if self._doubtful.get(id) == versions.adapter_folder(owner, id):
      self._settle(id)
    known = self.database.known(id)
    if known is None or known.deleted or known.head.adapter.owner != owner:
      if lost := self._lost_of(owner, id):
        raise Damaged(lost)
      named = self.database.by_name(owner, id) if id.isprintable() else None  # Else it may be no Unicode.
      hint = '' if named is None else f' with that id; the adapter of that name has the id {named.id}'
      raise NotFound(f'There is no adapter {short_repr(id)}{hint}.')
    return known

  def _settle_all(self, owner: str) -> None:
    """Re-read the adapters of an owner that are in doubt; damaged ones stay in doubt."""
    for id in list(self._doubtful):
      with contextlib.suppress(NotFound, Damaged):
        self._known(owner, id)

  def _doubt(self, id: str, folder: str) -> None:
    with self._lock:
      self._doubtful[id] = folder

  def _lost_of(self, owner: str, id: str) -> str | None:
    with self._lock:
      folder, why = self._lost.get(id, (None, None))
    return why if folder is not None and folder == versions.adapter_folder(owner, id) else None

  @contextlib.contextmanager
  def _alone(self, id: str, *, new: bool = False, visit: bool = False) -> Iterator[None]:
    """Hold the reentrant lock of an adapter, and its lease, which for a `new` one needs nothing to be put right.

    A lease that is taken for a `visit` is given back.

    Raises:
      StorageFailed: the store was closed, or there is no way to know who has the lease.
      NotHolder: another replica has it.
    """
    with self._lock:
      if self._closed:
        raise StorageFailed('The store is closed.')
      lock = self._locks.setdefault(id, threading.RLock())
      self._changes += 1
    try:
      with lock:
        taken = self.leases is not None and self.leases.epoch(id) is None
        if taken:
          epoch = self.leases.take(id)
          try:
            if not new:
              self._fence_off(id, epoch)
            self.leases.confirm(id, epoch)
          except BaseException:
            with contextlib.suppress(StorageFailed):  # Or another replica could not put it right while this one lives.
              self.leases.give_back(id)
            raise
        try:
          yield
        finally:
          if taken and (visit or self.leases.drained):
            self.leases.give_back(id)
    finally:
      with self._lock:
        self._changes -= 1

  # Replicas.

  def hold(self, owner: str, id: str) -> None:
    """Make this replica the one that changes an adapter; raises NotHolder if another one is, or as `adapter`."""
    self._known(owner, id)
    with self._alone(id):
      pass

  def drain(self) -> None:
    """Let other replicas change what this one has changed; what is under way ends as if it had just begun."""
    if self.leases is not None:
      self.leases.drain()

  def let_go(self, under_way: Container[str] = ()) -> None:
    """Give back the leases that were not needed of late, unless a change is under way or moments wait to be written.

    Args:
      under_way: the ids of adapters that requests are changing, which may compute for long before they commit.
    """
    creating = {versions.adapter_folder(owner, '') for owner, _ in self._names.copy()}
    for key in [] if self.leases is None else self.leases.idle():
      lock = self._locks.get(key, threading.RLock())
      if not any(key in each for each in (under_way, creating, self._states)) and lock.acquire(blocking=False):
        try:
          self.leases.give_back(key)
        finally:
          lock.release()

  def hold_owner(self, owner: str) -> None:
    """Make this replica the one that creates adapters of an owner; raises NotHolder if another one is."""
    key = versions.adapter_folder(owner, '')
    if self.leases is None or self.leases.epoch(key) is not None:
      return
    epoch = self.leases.take(key)
    self._adopt(owner)  # A dead replica may just have created one.
    self.leases.confirm(key, epoch)

  def _adopt(self, owner: str | None = None) -> None:
    """Put right what replicas that live no more have left unfinished of an owner; None: of all."""

    def visit(id: str) -> None:
      with self._alone(id, visit=True):
        pass

    self._each(self.leases.unfinished(owner), visit)

  def _fence_off(self, id: str, epoch: int, *, again: bool = False) -> None:
    """Write a new epoch into HEAD, so that a former holder cannot move it any more, and settle what that has left.

    `again`: write it even if HEAD has it, so that a put which was given up, and may still arrive, cannot move it.
    """
    known, intent = self.database.known(id), self.database.intents().get(id)
    if known is None and intent is None:
      return
    folder = intent[0] if known is None else versions.adapter_folder(known.head.adapter.owner, id)
    key = f'{folder}/{versions.HEAD}'
    while (tagged := self.blobs.tagged(key)) is not None:
      with contextlib.suppress(LostSwapError):  # A slow holder has just moved it.
        try:
          head = versions.read_head(tagged.content, f'{self.blobs.name}/{key}', folder)
          if self.leases is not None and head.epoch > epoch:
            raise self.leases.lost(id)
          if head.epoch < epoch or again:
            self.blobs.swap(key, versions.write_head(dataclasses.replace(head, epoch=max(head.epoch, epoch))), tagged)
        except Damaged:  # Nobody can move it.
          pass
        break
    else:
      if known is None:  # Whoever creates it may be slow, and must not end any more.
        versions.bury(self.blobs, folder, id, self.clock())
    self._re_read(id, folder)

  def _re_read(self, id: str, folder: str) -> None:
    """Settle an adapter; raises NotHolder if another replica has taken it over meanwhile."""
    check = None if self.leases is None else self.leases.check
    store_recovery.settle(self.blobs, self.database, folder, id, self.clock(), check, lambda: id in self._states)
    with self._lock:
      self._doubtful.pop(id, None)
      self._given_up.discard(id)

  def _epoch(self, id: str) -> int:
    return 0 if self.leases is None else self.leases.epoch(id) or 0

  @contextlib.contextmanager
  def _fenced(self, *keys: str) -> Iterator[Rows]:
    """Write to the database while no other replica can take these leases over."""
    with self.database.writing(full=True) as rows:
      for key in keys if self.leases is not None else ():
        self.leases.check(rows, key)
      yield rows

  # Samples.

  def keep_samples(self, samples: Sequence[SampleRecord]) -> None:
    """Store samples of one request until they expire; raises NotFound if its adapter was deleted meanwhile."""
    adapter, owner = samples[0].adapter, samples[0].owner
    with self.database.writing() as rows:
      if adapter is not None and not self.database.is_there(rows, adapter, owner):
        raise NotFound(f'There is no adapter {short_repr(adapter)}.')
      self.database.put_samples(rows, samples)

  def sample(self, owner: str, id: str) -> SampleRecord:
    """Return a sample of an owner by its id.

    Raises:
      NotFound: the owner has no such sample.
      Gone: it has expired.
    """
    found = self.database.sample(owner, id)
    if found is None:
      raise NotFound(f'There is no sample {short_repr(id)}.')
    expires, sample = found
    if sample is None or expires <= self.clock():
      raise Gone(f'The sample {id} has expired: sample again, or send the tokens themselves.')
    return sample

  # Requests with an idempotency key.

  def begin(self, owner: str, key: str, body_digest: str) -> IdempotentRequest | StoredResponse:
    """Register a request as in progress, or return its stored response.

    Args:
      owner: the owner who sends it.
      key: the idempotency key.
      body_digest: the digest of the request, including its path.

    Raises:
      InFlight: the request is in progress.
      Unprocessable: a different request was sent with this key.
    """
    return self.begin_part(owner, hashlib.sha256(key.encode('utf-8', 'surrogatepass')).hexdigest(), body_digest)

  def part(self, request: IdempotentRequest, index: int) -> IdempotentRequest | StoredResponse:
    """Begin one part of a request in progress, or return its stored response.

    Parts are finished or abandoned independently. If the process dies, a repeat of the whole finds the responses of
    finished parts. The response of the whole is erased with that of any part.

    Raises:
      InFlight: as `begin`.
      Unprocessable: as `begin`.
    """
    return self.begin_part(request.owner, f'{request.id.key}/{index}', request.id.body)

  def begin_part(self, owner: str, key: str, body: str) -> IdempotentRequest | StoredResponse:
    """Begin a part of a request that may be in progress in another process, see `part`; `key` and `body` of its id."""
    since, replica = self.clock() - self.retention.request_ttl_s, self._replica
    self._settle_all(owner)  # The request may have made something before it failed.
    row = self.database.request(owner, key) if replica else None
    if row is not None and row.state == 'open' and row.replica != replica and not self.leases.lives(row.replica):
      self._adopt(owner)  # Likewise.
    request = IdempotentRequest(owner, RequestId(key, body))
    with contextlib.ExitStack() as begun:
      with self.database.writing(full=bool(replica), alone=f'request {key}') as rows:
        row = self.database.request(owner, key) or self.database.made_by(owner, key)
        under_way = (owner, key) in self._under_way
        if row is not None and row.state == 'open' and row.replica != replica:
          under_way = self.leases.lives(row.replica)
          row = row if under_way else self.database.made_by(owner, key)
        if row is not None and (under_way or row.created > since):
          if row.body != body:
            raise Unprocessable(
              'A different request was sent with this Idempotency-Key: use a new key.', field='Idempotency-Key'
            )
          if row.state != 'open' and not under_way:
            return StoredResponse(row.status, row.response, row.adapter, row.version)
        if under_way:
          raise InFlight('A request with this Idempotency-Key is in progress: wait for its response.')
        row = RequestRow(body, 'open', None, None, None, None, self.clock(), replica)
        self.database.put_request(rows, owner, key, row)
        with self._lock:
          self._under_way.add((owner, key))
        # Unless the transaction succeeds. If that is unknown, its row would keep other replicas waiting.
        begun.callback(self._undropped.append, request)
        begun.callback(self._end, request)
      begun.pop_all()
    return request

  def about(self, request: IdempotentRequest, adapter: str) -> None:
    """Store which adapter a request is about, so that its response is erased with the adapter."""
    with self.database.writing() as rows:
      values = adapter, request.owner, request.id.key
      rows.execute('UPDATE requests SET adapter = ? WHERE owner = ? AND key = ?', values)

  def finish(self, request: IdempotentRequest, status: int, response: bytes) -> None:
    """Store the response of a request, for repeats of the request."""
    with self._ending(request):
      if (row := self._own(request)) is not None:
        with self.database.writing() as rows:
          row = dataclasses.replace(row, state='done', status=status, response=response)
          self.database.put_request(rows, request.owner, request.id.key, row)

  def abandon(self, request: IdempotentRequest) -> None:
    """End a request without a response; unless it has made a version, a repeat runs it again."""
    with self._ending(request):
      self._drop(request)

  @contextlib.contextmanager
  def _ending(self, request: IdempotentRequest) -> Iterator[None]:
    try:
      yield
    except StorageFailed:
      self._undropped.append(request)
      raise
    finally:
      self._end(request)

  def _drop(self, request: IdempotentRequest, *, ended: bool = False) -> None:
    """Drop the row of a request that has made nothing; if it has `ended`, unless it runs again."""
    with self.database.writing(alone=f'request {request.id.key}') as rows:
      row = self._own(request)
      again = ended and (request.owner, request.id.key) in self._under_way
      if row is not None and row.state == 'open' and not again:
        self.database.drop_request(rows, request.owner, request.id.key)

  def _own(self, request: IdempotentRequest) -> RequestRow | None:
    """Return the row of a request; None: it was erased with its adapter, or another replica runs the request now."""
    row = self.database.request(request.owner, request.id.key)
    return row if row is not None and row.replica == self._replica else None

  def _end(self, request: IdempotentRequest) -> None:
    with self._lock:
      self._under_way.discard((request.owner, request.id.key))


def _identify(blobs: Blobs, base: Base) -> str:
  """Return the id of a root, which a new root gets here; raises UserError if it belongs to another base."""
  content = blobs.tagged(versions.BASE)
  if content is None:
    values = {'format': versions.FORMAT, 'root': secrets.token_hex(16), 'base': base.described}
    with contextlib.suppress(LostSwapError):  # Another process has just written it.
      blobs.swap(versions.BASE, (json.dumps(values, indent=1) + '\n').encode(), None)
    content = blobs.tagged(versions.BASE)
  where = f'{blobs.name}/{versions.BASE}'
  try:
    values = json.loads(content.content)
    root, found = values['root'], values['base']
    if values['format'] == 1:
      raise UserError(
        f'serve.store.root={blobs.name} was written by an earlier version of sdpo_jax, in another format: export its '
        'adapters with that version and import them here, in another root.'
      )
    if values['format'] != versions.FORMAT or not isinstance(root, str):
      raise ValueError('it has another format')
  except (ValueError, KeyError, TypeError) as error:
    raise UserError(
      f'{where} is damaged ({first_line(error)}): restore it from a copy, or name another serve.store.root.'
    ) from error
  differing = [
    name for name in base.described['adapter'] if found['adapter'].get(name) != base.described['adapter'][name]
  ]
  if found['fingerprint'] != base.described['fingerprint']:
    differing.append('the model')
  if differing:
    raise UserError(
      f'serve.store.root={blobs.name} holds adapters of another model or shape ({", ".join(sorted(differing))} differ; '
      f'see {where}): serve that model with that shape, or name another root.'
    )
  return root


def _lock(held: contextlib.ExitStack, path: pathlib.Path, setting: str) -> None:
  """Hold a lock file until the stack closes; raises UserError if another process holds it."""

  def busy() -> None:
    try:
      who = f'the process {int(path.read_text())}'
    except (OSError, ValueError):  # The process has just started or ended.
      who = 'another process'
    raise UserError(f'{setting} is in use by {who}: stop that process, or name another place.')

  try:
    held.enter_context(file_lock.held(path, busy))
    path.write_text(str(os.getpid()))
  except OSError as error:
    raise UserError(f'{setting} cannot be locked ({first_line(error)}): name a writable place.') from error


def _free(place: str) -> int:
  """Return the free bytes of the disk of a folder; 0 if it cannot be asked."""
  try:
    return shutil.disk_usage(place).free
  except OSError:
    return 0


def _conflict(adapter: AdapterRecord) -> VersionConflict:
  return VersionConflict(f'{adapter.id} is at version {adapter.head}: read it and retry.', current=adapter.head)


def _check_name(owner: str, name: str) -> None:
  if not 0 < len(name) <= LONGEST_NAME or flaw_of(name):
    raise InvalidRequest(
      f'The name of an adapter must have 1 to {LONGEST_NAME} characters, valid in UTF-8.', field='name'
    )
  if flaw_of(owner):
    raise InvalidRequest('The name of an owner must be valid in UTF-8.')
