"""Leases in PostgreSQL: which of several replicas of a service may change which adapter, and create adapters of whom.

A replica renews one row about itself, and its leases live as long as that, or until it has not needed them for a while:
a new replica gets its share of the work. Whoever takes over the lease of a replica that has not renewed it gets a
higher epoch and writes that into HEAD first, so that the compare-and-swap of a former holder, which may only be slow,
fails from then on. All times are those of the database's clock.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import logging
import secrets
import threading
import time

from sdpo_jax.serving.errors import NotHolder, StorageFailed
from sdpo_jax.serving.store.connections import Rows
from sdpo_jax.serving.store.database import Database, put
from sdpo_jax.serving.store.versions import adapter_folder

LIFETIME = 6.0  # Seconds without a renewal after which the leases of a replica may be taken over.
IDLE = 60.0  # Seconds after which a lease that was not needed is given back.
_FILLING = 'filling'  # The key of the lease to fill an empty database.
_FORGOTTEN = 86400.0  # Seconds after which a dead replica is forgotten.
_NOW = 'extract(epoch FROM clock_timestamp())::float8'
_LIVES = f'EXISTS (SELECT 1 FROM replicas r WHERE r.id = replica AND r.expires > {_NOW})'
_logger = logging.getLogger('sdpo_jax.serving')


class Leases:
  """The leases of this process; any thread may call."""

  def __init__(self, database: Database, url: str):
    """Register this process as a replica, and begin to renew its leases; raises StorageFailed.

    Args:
      database: a shared database.
      url: where other replicas reach this one.
    """
    self.replica = secrets.token_hex(8)
    self._database, self._url = database, url
    self._lock = threading.RLock()  # Guards the fields below against other writers.
    self._held: dict[str, int] = {}  # Epochs by key.
    self._needed: dict[str, float] = {}  # By key, when it was last asked for, on the clock of time.monotonic().
    self.drained = False  # Whether no lease is kept for long any more.
    self.ahead = 0.0  # Seconds by which the database's clock is ahead of this one.
    self.valid_until = 0.0  # The time.monotonic() until which they are surely not taken over.
    self.renew()
    self.stopped = threading.Event()
    self.thread = threading.Thread(target=self._keep, name='leases', daemon=True)
    self.thread.start()

  def drain(self) -> None:
    """Give all leases back, so that others need not wait until they end; from now on each is kept for one change."""
    self.drained = True
    # If that fails, they end by themselves.
    with contextlib.suppress(StorageFailed), self._lock, self._database.writing(full=True) as rows:
      self._held = {}
      rows.execute("UPDATE leases SET replica = '' WHERE replica = ?", (self.replica,))

  def close(self) -> None:
    """Give all leases back, and end."""
    self.stopped.set()
    self.thread.join()
    self.drain()
    with contextlib.suppress(StorageFailed), self._database.writing(full=True) as rows:
      rows.execute('DELETE FROM replicas WHERE id = ?', (self.replica,))

  def _keep(self) -> None:
    told = False
    while not self.stopped.wait(LIFETIME / 4):
      try:
        self.renew()
        told = False
      except StorageFailed as error:
        if not told:
          _logger.warning('The leases could not be renewed, which is tried again: %s', error.log or error)
        told = True

  def renew(self) -> None:
    """Renew the leases; raises StorageFailed."""
    with self._lock:
      began = time.monotonic()
      with self._database.writing(full=True) as rows:
        [(expires,)] = rows.execute(
          f'INSERT INTO replicas (id, url, expires) VALUES (?, ?, {_NOW} + ?) '
          'ON CONFLICT (id) DO UPDATE SET expires = excluded.expires RETURNING expires',
          (self.replica, self._url, LIFETIME),
        ).fetchall()
        self.ahead = expires - LIFETIME - time.time()
        if began >= self.valid_until:  # Others may have taken some.
          found = rows.execute('SELECT adapter, epoch FROM leases WHERE replica = ?', (self.replica,)).fetchall()
          self._held = {key: epoch for key, epoch in found if self._held.get(key) == epoch}
      self.valid_until = began + LIFETIME

  def epoch(self, key: str) -> int | None:
    """Return the epoch of a lease that this replica has and can use; None: see `take`."""
    self._needed[key] = now = time.monotonic()
    return self._held.get(key) if now < self.valid_until else None

  def idle(self) -> list[str]:
    """Return the keys of leases that were not asked for of late."""
    since = time.monotonic() - (LIFETIME if self.drained else IDLE)
    # Copies, since other threads add to both meanwhile.
    self._needed = {key: at for key, at in self._needed.copy().items() if at >= since}
    return [key for key in self._held.copy() if key not in self._needed]

  def take(self, key: str) -> int:
    """Take a lease, which `confirm` makes usable, and return its epoch.

    Raises:
      NotHolder: a living replica has it.
    """
    with self._lock:
      self.renew()
      with self._database.writing(full=True, alone=f'lease {key}') as rows:
        found = rows.execute(
          f'SELECT replica, epoch, (SELECT url FROM replicas r WHERE r.id = replica AND r.expires > {_NOW}) '
          'FROM leases WHERE adapter = ?',
          (key,),
        ).fetchone()
        holder, before, url = found or ('', 0, None)
        if holder == self.replica:
          return before
        if url is not None:
          raise NotHolder(url, holder)
        # At least the time, since epochs in HEAD outlive a database that was lost.
        [(epoch,)] = rows.execute(
          f'INSERT INTO leases (adapter, replica, epoch) VALUES (?, ?, ({_NOW} * 1e6)::bigint) '
          'ON CONFLICT (adapter) DO UPDATE SET replica = excluded.replica, '
          'epoch = greatest(leases.epoch + 1, excluded.epoch) RETURNING epoch',
          (key, self.replica),
        ).fetchall()
        return epoch

  @contextlib.contextmanager
  def filling(self, root: str) -> Iterator[None]:
    """Run a block that fills an empty database from a root, while other replicas that have just started wait."""
    while not self._database.read('SELECT 1 FROM meta'):
      try:
        self.take(_FILLING)
      except NotHolder:
        time.sleep(LIFETIME / 20)
        continue
      yield
      with self._database.writing(full=True) as rows:
        self.check(rows, _FILLING)
        put(rows, 'meta', {'root': root})
      self.give_back(_FILLING)
      return
    self._database.trusted = True
    yield

  def confirm(self, key: str, epoch: int) -> None:
    """Use a lease from now on, since what its last holder has left is put right; raises NotHolder if it was lost."""
    with self._lock:
      with self._database.writing() as rows:
        self.check(rows, key)
      self._held[key] = epoch

  def give_back(self, key: str) -> None:
    """End a lease."""
    with self._lock:
      self._held.pop(key, None)
    with self._database.writing() as rows:
      rows.execute("UPDATE leases SET replica = '' WHERE adapter = ? AND replica = ?", (key, self.replica))

  def lost(self, key: str) -> NotHolder:
    """Forget a lease that another replica has taken over; return the error that says so."""
    self._held.pop(key, None)
    return NotHolder('')

  def check(self, rows: Rows, key: str) -> None:
    """Raise NotHolder if another replica has taken a lease over; until the transaction ends, none can."""
    query = 'SELECT 1 FROM leases WHERE adapter = ? AND replica = ? FOR SHARE'
    if not rows.execute(query, (key, self.replica)).fetchall():
      raise self.lost(key)

  def lives(self, replica: str) -> bool:
    """Return whether the replica of an id has renewed its leases."""
    return bool(self._database.read(f'SELECT 1 FROM replicas WHERE id = ? AND expires > {_NOW}', (replica,)))

  def unfinished(self, owner: str | None) -> list[str]:
    """Return the ids of adapters of an owner (None: of all) with a change whose outcome no living replica knows."""
    query = f'SELECT adapter FROM intents LEFT JOIN leases USING (adapter) WHERE NOT {_LIVES} AND folder LIKE ?'
    return [id for (id,) in self._database.read(query, ('%' if owner is None else f'{adapter_folder(owner, "")}%',))]

  def forget_dead(self) -> None:
    """Drop dead replicas and the requests that these had in progress, once their leases are taken over."""
    with self._database.writing() as rows:
      rows.execute(f"DELETE FROM requests WHERE state = 'open' AND NOT {_LIVES}")
      rows.execute(f'DELETE FROM replicas WHERE expires < {_NOW} - ?', (_FORGOTTEN,))
