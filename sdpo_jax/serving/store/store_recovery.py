"""Recovery: rebuilds the database from the root, and cleans up after interrupted commits and deletions.

HEAD is the source of truth: versions that the HEAD of their adapter leads to exist, whatever the database says; all
others are garbage. The database of a local root is believed at the start if both have the same stamp, which every start
and every orderly end renews: a copy of either from another time has another stamp or none. After an orderly end,
nothing of the root is read. After a crash, the start reads the adapters whose change has an intent, which is written
before anything else, and each other one is read when it is first used, or by the next retention. Whoever changes a root
by hand removes its file STAMP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
import contextlib
import dataclasses
import logging
import secrets

from sdpo_jax.files import is_local
from sdpo_jax.serving.errors import Damaged
from sdpo_jax.serving.store import versions
from sdpo_jax.serving.store.blobs import REQUESTS, Blobs
from sdpo_jax.serving.store.connections import Rows
from sdpo_jax.serving.store.database import Database, Known, put
from sdpo_jax.serving.store.versions import BlobKey, Head, VersionManifest

_logger = logging.getLogger('sdpo_jax.serving')
ABANDONED = 3600.0  # Seconds after which a commit to an object store, by any process, has surely ended.
STAMP = 'STAMP'  # The blob with the stamp that a root has in common with its database.
OPEN, CLOSED = 'open', 'closed'  # What stamps begin with: while a process has the store open, and after an orderly end.
SHOWN = 3  # The most file names in a warning.


@dataclasses.dataclass
class _Place:
  """The blobs in the folder of an adapter."""

  folder: str
  id: str
  # By key: its parts, and the time of modification in seconds since the epoch.
  keys: dict[str, tuple[BlobKey, float]] = dataclasses.field(default_factory=dict)

  def has(self, name: str) -> bool:
    return f'{self.folder}/{name}' in self.keys

  def named(self, number: int) -> list[str]:
    """Return the folder names of all versions with this number; after a crash there may be several."""
    return sorted({key.version for key, _ in self.keys.values() if key.version and key.number == number})


@dataclasses.dataclass(frozen=True)
class _Found:
  """An adapter as the root has it."""

  head: Head
  tag: str
  manifests: Mapping[int, VersionManifest]
  damaged: Mapping[int, str]


def take_stamp(blobs: Blobs) -> str:
  """Remove the stamp from a root, and return it; empty: it has none.

  Other processes may write to an object store with databases of their own, so it never has one.
  """
  found = blobs.tagged(STAMP) if is_local(blobs.name) else None
  if found is None:
    return ''
  blobs.delete([STAMP], '')
  return found.content.decode('ascii', 'replace').strip()


def leave_stamp(blobs: Blobs, database: Database, state: str) -> None:
  """Give a local root and its database a new stamp; `state` is `OPEN` or `CLOSED`."""
  if is_local(blobs.name):
    stamp = f'{state} {secrets.token_hex(16)}'
    database.put_stamp(stamp)
    blobs.put(STAMP, f'{stamp}\n'.encode())


def recover(blobs: Blobs, database: Database, now: float) -> dict[str, tuple[str, str]]:
  """Bring a database in line with the root, and finish interrupted deletions.

  Args:
    blobs: the blobs of the root; nobody else may write to a local one.
    database: the database of the root.
    now: seconds since the epoch.

  Returns:
    (Folder, error message), by id, of adapters that the database does not know and whose HEAD cannot be read.

  Raises:
    StorageFailed: the root or the database cannot be read or written.
  """
  if not database.trusted:
    places = all_places(blobs, database)
  else:
    begun = {} if database.shared else database.intents()  # Replicas look after each other's.
    places = {id: _places(blobs, folder).get(id, _Place(folder, id)) for id, (folder, _) in begun.items()}
  lost = _put_right(blobs, database, places.values(), now, writing=False)
  with database.writing(full=True) as rows:
    if not database.shared:  # Others may have some in progress. Those that had made nothing can be sent again.
      rows.execute("DELETE FROM requests WHERE state = 'open'")
  return lost


Check = Callable[[Rows, str], None] | None


def settle(
  blobs: Blobs, database: Database, folder: str, id: str, now: float, check: Check, writing: Callable[[], bool]
) -> None:
  """Recover one adapter, as `recover` does for all; no other thread may use the adapter meanwhile.

  Args:
    blobs: the blobs of the root.
    database: the database of the root.
    folder: the folder of the adapter.
    id: its id.
    now: seconds since the epoch.
    check: raises an error, in a transaction, if the adapter is another replica's; then nothing is changed any more.
      What is removed was listed before, and so is not of that replica. None: there are no replicas.
    writing: returns whether this process may be writing an optimizer state of the adapter; replicas always may.

  Raises:
    Damaged: its HEAD cannot be read, and the database does not know it.
  """
  place = _places(blobs, folder).get(id, _Place(folder, id))
  is_writing = database.shared or writing()  # Asked after the listing, which has no files of writes that begin later.
  for _, why in _put_right(blobs, database, [place], now, writing=is_writing, check=check).values():
    raise Damaged(why)


def erase(blobs: Blobs, database: Database, folder: str, id: str) -> None:
  """Erase everything about an adapter except its tombstone, which must exist."""
  with database.writing() as rows:
    database.mark_deleted(rows, id)
  head = f'{folder}/{versions.HEAD}'
  keys = _places(blobs, folder).get(id, _Place(folder, id)).keys
  blobs.delete([head], folder)  # First, since without HEAD no version exists.
  blobs.delete([key for key, (what, _) in keys.items() if what.rest not in (versions.HEAD, versions.TOMBSTONE)], folder)
  with database.writing(full=True) as rows:
    database.erase(rows, id)
  database.connections.truncate_log()


def no_head(blobs: Blobs, folder: str) -> Damaged:
  """Return the error for an adapter whose HEAD is missing."""
  return Damaged(
    f'{blobs.name}/{folder}/{versions.HEAD} is missing: restore it from a copy, or delete the adapter; its versions '
    'are untouched.'
  )


def all_places(blobs: Blobs, database: Database) -> dict[str, _Place]:
  """Return the blobs of all adapters that the root or the database has, by id."""
  places = _places(blobs, 'users')
  for known in database.all_known():
    adapter = known.head.adapter
    places.setdefault(adapter.id, _Place(versions.adapter_folder(adapter.owner, adapter.id), adapter.id))
  return places


def _places(blobs: Blobs, prefix: str) -> dict[str, _Place]:
  """Return the blobs below a folder, grouped by the id of their adapter."""
  places: dict[str, _Place] = {}
  foreign = []
  for entry in blobs.list(prefix):
    key = versions.parse_key(entry.key)
    if key is None:
      foreign.append(entry.key)
    else:
      place = places.setdefault(key.adapter, _Place(key.folder, key.adapter))
      place.keys[entry.key] = (key, entry.modified)
  if foreign:
    _logger.warning(
      '%s holds %d files that do not belong to the store; they are ignored: %s',
      blobs.name,
      len(foreign),
      ', '.join(foreign[:SHOWN]),
    )
  return places


def _put_right(
  blobs: Blobs, database: Database, places: Iterable[_Place], now: float, *, writing: bool, check: Check = None
) -> dict[str, tuple[str, str]]:
  """Bring the database in line with the files of adapters; returns as `recover`.

  Args:
    blobs: the blobs of the root.
    database: the database of the root.
    places: the files, by adapter.
    now: seconds since the epoch.
    writing: whether this process may be writing optimizer states.
    check: see `settle`.
  """
  intents = database.intents()
  lost: dict[str, tuple[str, str]] = {}
  kept, wanted = [], []
  for place in places:
    known = database.known(place.id)
    if place.has(versions.TOMBSTONE):
      if len(place.keys) > 1 or known is not None:
        erase(blobs, database, place.folder, place.id)
    elif place.has(versions.HEAD):
      wanted.append((place, known))
    elif known is not None:
      _logger.warning('%s', no_head(blobs, place.folder))
    elif not any(key.number for key, _ in place.keys.values()):
      kept.append(place)  # The creation of the adapter was interrupted.
    else:
      lost[place.id] = (place.folder, str(no_head(blobs, place.folder)))

  def read(item: tuple[_Place, Known | None]) -> _Found | Damaged | None:
    place, known = item
    again = known is None or place.id in intents or database.is_damaged(place.id)
    try:
      return _read(blobs, database, place, None if again else known)
    except Damaged as error:
      return error

  with ThreadPoolExecutor(REQUESTS) as pool:  # A thread costs a connection to the database, too much for a few.
    found = list((map if len(wanted) < REQUESTS else pool.map)(read, wanted))
  news = []
  for (place, known), what in zip(wanted, found, strict=True):
    if isinstance(what, Damaged):
      _logger.warning('%s', what)
      if known is None:
        lost[place.id] = (place.folder, str(what))
      continue
    if what is not None and what.head.deleted:
      versions.bury(blobs, place.folder, place.id, now)
      erase(blobs, database, place.folder, place.id)
      continue
    kept.append(place)
    if what is not None:
      news.append(what)
  if news:
    _note(database, news, check)
  for place in kept:
    if check is not None:
      with database.writing() as rows:
        check(rows, place.id)
    ours = {intents[place.id][1]} if place.id in intents else set()
    _remove_garbage(blobs, database, place, ours, now, writing=writing)
  stale = intents.keys() & {place.id for place in kept}
  if stale:
    with database.writing(full=True) as rows:
      for id in stale:
        if check is not None:
          check(rows, id)
        database.drop_intent(rows, id, intents[id][1])
  return lost


def _read(blobs: Blobs, database: Database, place: _Place, known: Known | None) -> _Found | None:
  """Read an adapter from the root; None: its database entry `known` is up to date.

  Raises:
    Damaged: its HEAD is damaged.
  """
  key = f'{place.folder}/{versions.HEAD}'
  content = blobs.get(key)
  tag = versions.tag_of(content)
  if known is not None and known.tag == tag:
    return None
  head = versions.read_head(content, f'{blobs.name}/{key}', place.folder)
  if not database.is_new:
    blobs.renew(key, content)  # The process that wrote it may have died before it was durable.
  before = {
    one.manifest.version.digest: one.manifest for one in database.versions(place.id) if one.manifest is not None
  }
  manifests: dict[int, VersionManifest] = {}
  damaged: dict[int, str] = {}
  pinned = [number for number in map(int, head.pinned) if 0 < number < head.kept_from]
  numbers = [*range(head.adapter.head, max(head.kept_from, 1) - 1, -1), *pinned, 0]
  digest: str | None = head.digest
  for number in numbers:
    if number == 0 or number < head.kept_from:
      digest = head.origin if number == 0 else head.pinned[str(number)]
    try:
      manifest = before.get(digest) or _manifest(blobs, place, number, digest)
      manifests[number], digest = manifest, manifest.previous
    except Damaged as error:
      _logger.warning('%s', error)
      damaged[number], digest = str(error), None
  return _Found(head, tag, manifests, damaged)


def _manifest(blobs: Blobs, place: _Place, number: int, digest: str | None) -> VersionManifest:
  """Read the manifest of a version; digest None: it is unknown, since the next manifest is damaged.

  Raises:
    Damaged: the manifest is damaged, or without a digest there is not exactly one candidate.
  """
  if digest is not None:
    return versions.read_manifest(blobs, place.folder, number, digest)
  found = []
  for name in place.named(number):
    with contextlib.suppress(Damaged):
      found.append(versions.read_manifest(blobs, place.folder, number, name.partition('-')[2]))
  if len(found) != 1:
    raise Damaged(
      f'Version {number} in {blobs.name}/{place.folder}/versions cannot be told from uncommitted files, because the '
      'manifest of the next version is damaged: restore that manifest from a copy.'
    )
  return found[0]


def _note(database: Database, found: Iterable[_Found], check: Check) -> None:
  with database.writing(full=True) as rows:
    for one in found:
      adapter = one.head.adapter
      if check is not None:
        check(rows, adapter.id)
      rows.execute('DELETE FROM versions WHERE adapter = ?', (adapter.id,))
      for manifest in one.manifests.values():
        database.put_version(rows, manifest)
        if manifest.request is not None:
          database.note_made(rows, adapter.owner, manifest.request, adapter.id, manifest.version.number)
      for number, why in one.damaged.items():
        put(rows, 'versions', {'adapter': adapter.id, 'number': number, 'damaged': why}, key='adapter, number')
      database.put_head(rows, one.head, one.tag)
      database.drop_intent(rows, adapter.id)


def _remove_garbage(
  blobs: Blobs, database: Database, place: _Place, ours: set[str], now: float, *, writing: bool
) -> None:
  """Remove the remains of unfinished writes.

  In an object store, other processes may be committing unless the adapter has a lease, whose epoch is in HEAD: there
  only versions in `ours`, begun by processes with this database, are removed at once, and others after `ABANDONED`
  seconds.
  """
  known = database.known(place.id)
  rows = [] if known is None else database.versions(place.id)
  names = {one.manifest.folder for one in rows if one.manifest is not None}
  unclear = {one.number for one in rows if one.manifest is None}
  alone = is_local(blobs.name) or (database.shared and writing)
  garbage = [
    path
    for path, (key, modified) in place.keys.items()
    if key.version is None
    and key.rest != versions.HEAD  # Partial writes of HEAD.
    or key.version is not None
    and key.version not in names
    and key.number not in unclear
    and (alone or key.version in ours or modified < now - ABANDONED)
    or key.is_partial
    and not writing
  ]
  if garbage:
    _logger.info('%s/%s: %d files of unfinished writes are removed.', blobs.name, place.folder, len(garbage))
    blobs.delete(garbage, place.folder if known is not None else place.folder.rpartition('/')[0])
