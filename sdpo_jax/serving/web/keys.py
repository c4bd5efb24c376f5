"""API keys, which identify the owner. A key is shown once, when it is made; what stores it holds its SHA-256.

They are in a file, or in a table of PostgreSQL for all replicas of a service.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import hashlib
import hmac
import json
import logging
import os
import pathlib
import secrets
import stat
import threading
import time
from typing import Any

from sdpo_jax.command_lines import command_line
from sdpo_jax.errors import UserError, first_line, printable
from sdpo_jax.files import make_directory, write_atomically
from sdpo_jax.serving.errors import StorageFailed
from sdpo_jax.serving.store.blobs import locked
from sdpo_jax.serving.store.connections import POSTGRES, Connections
from sdpo_jax.serving.store.database import connect, put

PREFIX = 'sdpo_'
_LONGEST = 200  # Characters of an owner or a name.
_READ_AGAIN = 2.0  # Seconds between two readings of the keys in a database.
_FIELDS = {'id': str, 'digest': str, 'owner': str, 'name': str, 'created': (int, float), 'weight': (int, float)}
_logger = logging.getLogger('sdpo_jax.serving')


@dataclasses.dataclass(frozen=True)
class ApiKey:
  """The stored data of a key."""

  id: str  # Identifies the key in logs and for `revoke`.
  digest: str  # SHA-256, hexadecimal.
  owner: str  # The owner as whom requests with the key act.
  name: str  # A label.
  created: float  # Seconds since the epoch.
  weight: float = 1.0  # Share of the engine relative to that of other keys.


def digest_of(key: str) -> str:
  """Return the SHA-256 of a key in hex, by which the key file stores it."""
  return hashlib.sha256(key.encode()).hexdigest()


def read(place: str | os.PathLike) -> list[ApiKey]:
  """Return the keys in a key file, or in the database at postgresql://….

  Raises:
    UserError: it cannot be read, other users can read or change the file, or a line is not a valid key.
  """
  if _is_database(place):
    with _changing(place, 'retry') as known:
      return known
  path = pathlib.Path(place)
  try:
    with open(path, encoding='utf-8') as file:
      mode = os.fstat(file.fileno()).st_mode
      text = file.read()
  except (OSError, UnicodeDecodeError) as error:
    raise UserError(
      f'The key file {path} cannot be read ({first_line(error)}): {_way_to_add(path)} makes one.'
    ) from error
  if not stat.S_ISREG(mode) or mode & 0o077:
    raise UserError(f'Other users can read or change the key file {path}: run chmod 600 {path}.')
  return [_parsed(line, f'{path}, line {number}') for number, line in enumerate(text.splitlines(), 1) if line.strip()]


def _is_database(place: str | os.PathLike) -> bool:
  return str(place).startswith(POSTGRES)


def place_of(text: str) -> str | pathlib.Path:
  """Return a place of keys as a user names it; raises UserError for an address of something else."""
  if '://' in text and not _is_database(text):
    raise UserError(f'Keys are in a local file or at postgresql://…, not at {text.partition("://")[0]}://….')
  return text if _is_database(text) else pathlib.Path(text).expanduser()


def _of_table(connections: Connections) -> list[ApiKey]:
  rows = connections.read('SELECT id, record FROM api_keys ORDER BY id', ())
  return [_parsed(record, f'The row {id} of api_keys') for id, record in rows]


def shown(place: str | os.PathLike) -> str:
  """Return a place of keys for messages, without a password."""
  return f'{POSTGRES}…' if _is_database(place) else str(place)


def _way_to_add(place: str | os.PathLike) -> str:
  return command_line('serve_key', f'--keys={shown(place)}', '--owner=NAME')


def _parsed(line: str, where: str) -> ApiKey:
  try:
    value = json.loads(line)
    value = {'weight': 1.0} | value  # Files of earlier versions of sdpo_jax have no weights.
  except (ValueError, TypeError, RecursionError):
    value = None
  right = isinstance(value, dict) and value.keys() == _FIELDS.keys()
  if not right or not all(isinstance(value[name], kind) for name, kind in _FIELDS.items()):
    raise UserError(
      f'{where} is not a key, a JSON object with {", ".join(_FIELDS)}: remove the line or restore the file.'
    )
  if len(value['digest']) != 64 or not value['owner'] or not _is_weight(value['weight']):
    raise UserError(f'{where} has an invalid digest, owner or weight: remove the line or restore the file.')
  return ApiKey(**value)


def _is_weight(weight: float) -> bool:
  return 0.01 <= weight <= 100


def _written(keys: Sequence[ApiKey]) -> str:
  return ''.join(json.dumps(dataclasses.asdict(key)) + '\n' for key in keys)


@contextlib.contextmanager
def _changing(place: str | os.PathLike, way_out: str) -> Iterator[list[ApiKey]]:
  """Provide the keys as a list, and store it if it has changed; one process at a time does so.

  Raises:
    UserError: the file or database cannot be read or written.
  """
  try:
    with contextlib.ExitStack() as held:
      if _is_database(place):
        connections = connect(str(place), 'The database of the keys')
        held.callback(connections.close)
        rows = held.enter_context(connections.writing(True, 'api_keys'))
        known = _of_table(connections)
      else:
        make_directory(pathlib.Path(place).parent)
        held.enter_context(locked(f'{place}.lock', os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW))
        known = read(place) if pathlib.Path(place).exists() else []
      before = list(known)
      yield known
      if known == before:
        return
      if not _is_database(place):
        write_atomically(pathlib.Path(place), _written(known), mode=0o600)
        return
      rows.execute('DELETE FROM api_keys')
      for key in known:
        put(rows, 'api_keys', {'id': key.id, 'record': _written([key])})
  except (OSError, StorageFailed) as error:
    raise UserError(
      f'The keys in {shown(place)} cannot be read or written ({first_line(error)}): {way_out}.'
    ) from error


def add(place: str | os.PathLike, owner: str, name: str, weight: float = 1.0) -> tuple[str, ApiKey]:
  """Make a key and return it with its stored data, from which it cannot be recovered.

  Args:
    place: the key file, made if it is missing; or postgresql://….
    owner: the owner as whom requests with the key act.
    name: a label.
    weight: its share of the engine relative to that of other keys, from 0.01 to 100.

  Raises:
    UserError: the owner or the name is empty or too long, the weight is out of range, or the file or database cannot be
      read or written.
  """
  for what, text in (('owner', owner), ('name', name)):
    if not text or len(text) > _LONGEST or not text.isprintable():
      raise UserError(f'--{what}={printable(text)!r} must have 1 to {_LONGEST} printable characters.')
  if not _is_weight(weight):
    raise UserError(f'--weight={weight:g} must lie in [0.01, 100].')
  secret = PREFIX + secrets.token_urlsafe(32)
  key = ApiKey(secrets.token_hex(4), digest_of(secret), owner, name, time.time(), weight)
  with _changing(place, 'name another place') as known:
    known.append(key)
  return secret, key


def revoke(place: str | os.PathLike, key_id: str) -> ApiKey:
  """Remove a key and return its stored data; running services reject the key from then on, or 2 seconds later.

  Raises:
    UserError: there is no such key, or the file or database cannot be read or written.
  """
  with _changing(place, 'make it writable') as known:
    for key in known:
      if key.id == key_id:
        known.remove(key)
        return key
    has = ', '.join(key.id for key in known) or 'none'
    raise UserError(f'{shown(place)} has no key with the id {printable(key_id)}; it has {has}.')


class KeyFile:
  """The keys of a key file, which is re-read when it changes; any thread may call."""

  def __init__(self, path: pathlib.Path):
    """Read the file.

    Raises:
      UserError: as `read`, or the file holds no key.
    """
    self._path, self._lock = path, threading.Lock()
    self._seen: Any = self._state()
    self._keys = read(path)
    if not self._keys:
      raise UserError(f'The key file {path} holds no key: {_way_to_add(path)} makes one.')

  def _state(self) -> Any:
    try:
      found = os.stat(self._path)
    except OSError:
      return None
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode

  def find(self, presented: str) -> ApiKey | None:
    """Return the stored data of a key; None: it is unknown. The duration reveals nothing about known keys."""
    with self._lock:
      state = self._state()
      if state != self._seen:
        self._seen = state
        try:
          self._keys = read(self._path)
        except UserError as error:  # A revoked key must not become valid again.
          self._keys = []
          _logger.error('All keys are rejected until the key file is valid again: %s', error)
      keys = self._keys
    return _matching(keys, presented)


class KeyTable:
  """The keys in a database, which are read every 2 seconds; any thread may call."""

  def __init__(self, url: str):
    """Read the keys.

    Raises:
      UserError: the database cannot be reached, or holds no key.
    """
    self._connections = connect(url, 'serve.http.keys')
    self._keys = _of_table(self._connections)
    if not self._keys:
      self._connections.close()
      raise UserError(f'The database of serve.http.keys holds no key: {_way_to_add(url)} makes one.')
    self._stopped = threading.Event()
    threading.Thread(target=self._follow, name='keys', daemon=True).start()

  def close(self) -> None:
    """Follow the database no longer."""
    self._stopped.set()
    self._connections.close()

  def _follow(self) -> None:
    while not self._stopped.wait(_READ_AGAIN):
      try:
        self._keys = _of_table(self._connections)
      except StorageFailed:  # Nothing else works without the database, and what was revoked before stays so.
        continue
      except UserError as error:  # A revoked key must not become valid again.
        self._keys = []
        _logger.error('All keys are rejected until the table api_keys is valid again: %s', error)

  def find(self, presented: str) -> ApiKey | None:
    """Return the stored data of a key, see `KeyFile.find`."""
    return _matching(self._keys, presented)


def _matching(keys: Sequence[ApiKey], presented: str) -> ApiKey | None:
  digest = digest_of(presented)
  found = [key for key in keys if hmac.compare_digest(key.digest, digest)]
  return found[-1] if found else None


Keys = KeyFile | KeyTable


def open_place(place: str) -> Keys:
  """Return the keys in a file or a database; raises UserError as these."""
  return KeyTable(place) if _is_database(place) else KeyFile(place_of(place))


def presented(headers: Mapping[str, Sequence[str]]) -> str | None:
  """Return the key in Authorization: Bearer or X-API-Key; None: there is not exactly one.

  Args:
    headers: the values of each header of the request, by its name in lower case.
  """
  found = list(headers.get('x-api-key', ()))
  for value in headers.get('authorization', ()):
    scheme, _, credential = value.partition(' ')
    found.append(credential.strip() if scheme.lower() == 'bearer' else '')
  # Equal keys count as one; different ones are rejected.
  return found[0] if found and found[0] and len(set(found)) == 1 else None
