"""Blobs by key, in a local folder, where all writes are synced to the disk, or in an object store (s3://, gs://).

Keys are relative paths with slashes. Other files in the folder or bucket are left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import os
import pathlib
from types import MappingProxyType
from typing import Any

from sdpo_jax.errors import UserError, first_line
from sdpo_jax.files import (
  is_local,
  make_directory,
  remove_partials,
  sync_ancestors,
  sync_directory,
  sync_file,
  write_atomically,
)
from sdpo_jax.serving.errors import StorageFailed

REQUESTS = 16  # Concurrent requests to an object store.
SYNCS = 8  # Concurrent syncs of files.
_NONE: Mapping[str, bytes] = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class BlobEntry:
  """A blob as listings return it."""

  key: str
  size: int  # Bytes.
  modified: float  # Seconds since the epoch.


@dataclasses.dataclass(frozen=True)
class Tagged:
  """The content of a mutable blob, and a tag that changes with it."""

  content: bytes
  tag: Mapping[str, str]


class LostSwapError(Exception):
  """A compare-and-swap has failed, because the blob has another tag than expected."""


class Blobs:
  """The blobs below one root; any thread may call. A failed read or write raises StorageFailed, naming the blob."""

  _errors: tuple[type[Exception], ...] = (OSError,)  # What a failed read or write raises.
  _way_out: str  # What can be done about it, for messages.

  def __init__(self, name: str, threads: int):
    """Make what is common to all places; use `open_blobs` instead."""
    self.name = name  # The name of the root, for messages.
    self.failed = False  # Whether a read or write has failed; whoever has seen writing succeed resets it.
    self._pool = ThreadPoolExecutor(threads, thread_name_prefix='blobs')

  def put_new(self, folder: str, contents: Mapping[str, bytes], last: Mapping[str, bytes] = _NONE) -> None:
    """Write new blobs, by their names below `folder`; those in `last` become visible after the others.

    Raises:
      FileExistsError: one of the blobs exists; it has not changed.
    """

  def get(self, key: str) -> bytes:
    """Return the content of a blob; raises FileNotFoundError if there is none."""

  def tagged(self, key: str) -> Tagged | None:
    """Return the content of a blob with its tag; None: there is none."""

  def swap(self, key: str, content: bytes, expected: Tagged | None) -> None:
    """Replace a blob if it has the expected tag (None: if there is no blob).

    Raises:
      LostSwapError: the blob has another tag, is missing, or exists; nothing has changed.
    """

  def put(self, key: str, content: bytes) -> None:
    """Write a blob atomically, whether or not it exists; raises FileNotFoundError if a local folder is missing."""

  def renew(self, key: str, content: bytes) -> None:
    """Make sure that an existing blob is durable; `content` is the content that it has."""

  def list(self, prefix: str = '') -> Iterator[BlobEntry]:
    """Yield all blobs below the folder `prefix`; '': all of the root."""

  def delete(self, keys: Iterable[str], below: str) -> None:
    """Erase blobs, and the folders below `below` that become empty; missing blobs are ignored."""

  def close(self) -> None:
    """Shut down the threads that write blobs."""
    self._pool.shutdown()

  @contextlib.contextmanager
  def _failures(self, place: object) -> Iterator[None]:
    try:
      yield
    except (FileNotFoundError, FileExistsError):
      raise
    except self._errors as error:
      self.failed = True
      raise StorageFailed(
        f'{place} cannot be read or written ({first_line(error)}): {self._way_out}, and retry; '
        'nothing that was acknowledged is lost.'
      ) from error


def open_blobs(root: str, **options: Any) -> Blobs:
  """Open the blobs of a root.

  Args:
    root: a local path, which is made if missing, s3://bucket/prefix, gs://bucket/prefix, or memory://name, which lives
      as long as the process.
    options: options for obstore's store, such as client options.

  Raises:
    UserError: the root cannot be opened.
  """
  if is_local(root):
    return LocalBlobs(pathlib.Path(root))
  return RemoteBlobs(root, **options)


class LocalBlobs(Blobs):
  """Blobs as files below a local folder, which is made with mode 0700."""

  _way_out = 'make room on its disk, or check the disk'

  def __init__(self, root: pathlib.Path):
    """Open a folder, which is made if missing.

    Raises:
      UserError: the folder cannot be made.
    """
    try:
      make_private(root)
      remove_partials(root)
    except OSError as error:
      raise UserError(
        f'serve.store.root={root} cannot be made ({first_line(error)}): name a folder that can be written to.'
      ) from error
    super().__init__(str(root), SYNCS)
    self._root = root

  def put_new(self, folder: str, contents: Mapping[str, bytes], last: Mapping[str, bytes] = _NONE) -> None:
    # The order does not matter, since nobody reads the folder before a HEAD names it.
    where = self._root / folder
    with self._failures(where):
      make_directory(where.parent)
      where.mkdir(exist_ok=True)
      paths = [where / name for name in (*contents, *last)]
      for path, content in zip(paths, (*contents.values(), *last.values()), strict=True):
        _create(path, content)
      # Concurrent syncs are combined by the file system.
      done = [self._pool.submit(sync_file, path) for path in paths]
      done += [self._pool.submit(sync_directory, path) for path in (where, where.parent)]
      for each in done:
        each.result()

  def get(self, key: str) -> bytes:
    path = self._root / key
    with self._failures(path), open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), 'rb') as file:
      return file.read()

  def tagged(self, key: str) -> Tagged | None:
    try:
      content = self.get(key)
    except FileNotFoundError:
      return None
    return Tagged(content, {'sha256': hashlib.sha256(content).hexdigest()})

  def swap(self, key: str, content: bytes, expected: Tagged | None) -> None:
    path = self._root / key
    with self._failures(path):
      make_directory(path.parent)
      # This lock makes the swap atomic even against processes that do not hold the store's lock.
      with locked(path.parent, os.O_RDONLY | os.O_DIRECTORY):
        found = self.tagged(key)
        if (found and found.tag) != (expected and expected.tag):
          raise LostSwapError(f'{path} has changed.')
        write_atomically(path, content, 0o600)

  def put(self, key: str, content: bytes) -> None:
    path = self._root / key
    with self._failures(path):
      write_atomically(path, content, 0o600)

  def renew(self, key: str, content: bytes) -> None:
    # The directory may not have been synced. The file is written again, since after a failed fsync a second one proves
    # nothing.
    path = self._root / key
    with self._failures(path):
      write_atomically(path, content, 0o600)
      sync_ancestors(path)

  def list(self, prefix: str = '') -> Iterator[BlobEntry]:
    start = self._root / prefix
    with self._failures(start):
      yield from self._below(str(start), prefix)

  def _below(self, folder: str, prefix: str) -> Iterator[BlobEntry]:
    try:
      scan = os.scandir(folder)
    except (FileNotFoundError, NotADirectoryError):
      return
    with scan:
      found = sorted(scan, key=lambda entry: entry.name)
    for entry in found:
      key = f'{prefix}/{entry.name}' if prefix else entry.name
      if entry.is_dir(follow_symlinks=False):
        yield from self._below(entry.path, key)
      else:
        try:
          status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:  # It was removed meanwhile.
          continue
        yield BlobEntry(key, status.st_size, status.st_mtime)

  def delete(self, keys: Iterable[str], below: str) -> None:
    folders, stays = set(), self._root / below
    for key in keys:
      path = self._root / key
      with self._failures(path):
        path.unlink(missing_ok=True)
        folders.add(path.parent)
    for folder in sorted(folders, key=lambda path: -len(path.parts)):
      with self._failures(folder):
        _prune(folder, stays)


def _create(path: pathlib.Path, content: bytes) -> None:
  try:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
  except FileExistsError:
    raise FileExistsError(f'{path} is there already.') from None
  with open(descriptor, 'wb') as file:
    file.write(content)


def make_private(folder: pathlib.Path) -> None:
  """Make a folder with mode 0700 unless it exists; raises OSError if it cannot be made."""
  if not folder.is_dir():
    make_directory(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)
    sync_directory(folder.parent)


def _prune(folder: pathlib.Path, stays: pathlib.Path) -> None:
  """Remove a folder and its empty parents up to `stays`, and sync the removal to the disk."""
  while folder != stays:
    try:
      remove_partials(folder)
      folder.rmdir()
    except FileNotFoundError:
      pass
    except OSError as error:
      if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
        raise
      break
    folder = folder.parent
  if folder.is_dir():
    sync_directory(folder)


@contextlib.contextmanager
def locked(path: str | os.PathLike, flags: int) -> Iterator[None]:
  """Hold the lock of a local file or folder, opened with these flags; it is also released if the process dies."""
  descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield
  finally:
    os.close(descriptor)


_memory: dict[str, Any] = {}  # In-memory stores by their URL, memory://name.


class RemoteBlobs(Blobs):
  """Blobs of an object store, in which every put is durable and atomic."""

  _way_out = 'check that the store can be reached and that the account may write to it'

  def __init__(self, url: str, **options: Any):
    """Open an object store.

    Args:
      url: as in `open_blobs`.
      options: options for obstore's store.

    Raises:
      UserError: the store cannot be opened, or obstore is not installed.
    """
    try:
      import obstore
      from obstore import exceptions
      import obstore.store
    except ImportError as error:
      raise UserError(
        f'serve.store.root={url} needs the package obstore: install sdpo_jax[serve], or name a local folder.'
      ) from error
    super().__init__(url.rstrip('/'), REQUESTS)
    self._obstore, self._exceptions, self._errors = obstore, exceptions, (exceptions.BaseError, OSError)
    try:
      if url.startswith('memory://'):
        self._store = _memory.setdefault(url, obstore.store.MemoryStore())
      else:
        self._store = obstore.store.from_url(url, **options)
    except (exceptions.BaseError, ValueError) as error:
      raise UserError(
        f'serve.store.root={url} cannot be opened ({first_line(error)}): name a local folder, s3://… or gs://….'
      ) from error

  def put_new(self, folder: str, contents: Mapping[str, bytes], last: Mapping[str, bytes] = _NONE) -> None:
    for part in (contents, last):
      keys = [f'{folder}/{name}' for name in part]
      list(self._pool.map(self._create, keys, part.values()))

  def _create(self, key: str, content: bytes) -> None:
    with self._failures(f'{self.name}/{key}'):
      try:
        self._obstore.put(self._store, key, content, mode='create')
      except self._exceptions.AlreadyExistsError as error:
        # Since obstore repeats a put whose response was lost, the blob may be our own.
        found = self.tagged(key)
        if found is None:  # S3 says so (409), too, while another put of the blob has not ended.
          raise StorageFailed(f'{self.name}/{key} is being written: retry.', retry_after=1.0) from error
        if found.content != content:
          raise FileExistsError(f'{self.name}/{key} is there already.') from None

  def get(self, key: str) -> bytes:
    with self._failures(f'{self.name}/{key}'):
      return bytes(self._obstore.get(self._store, key).bytes())

  def tagged(self, key: str) -> Tagged | None:
    with self._failures(f'{self.name}/{key}'):
      try:
        found = self._obstore.get(self._store, key)
        content = bytes(found.bytes())
      except FileNotFoundError:
        return None
      tag = {name: found.meta[name] for name in ('e_tag', 'version') if found.meta.get(name) is not None}
      return Tagged(content, tag)

  def swap(self, key: str, content: bytes, expected: Tagged | None) -> None:
    with self._failures(f'{self.name}/{key}'):
      try:
        mode = 'create' if expected is None else dict(expected.tag)
        self._obstore.put(self._store, key, content, mode=mode)
      except (self._exceptions.AlreadyExistsError, self._exceptions.PreconditionError, FileNotFoundError):
        found = self.tagged(key)  # As in `_create`.
        if found is None or found.content != content:
          raise LostSwapError(f'{self.name}/{key} has changed.') from None

  def put(self, key: str, content: bytes) -> None:
    with self._failures(f'{self.name}/{key}'):
      self._obstore.put(self._store, key, content)

  def renew(self, key: str, content: bytes) -> None:
    """Do nothing, since every blob that can be read is durable."""

  def list(self, prefix: str = '') -> Iterator[BlobEntry]:
    with self._failures(f'{self.name}/{prefix}'):
      for page in self._obstore.list(self._store, prefix=prefix or None):
        for entry in page:
          yield BlobEntry(entry['path'], entry['size'], entry['last_modified'].timestamp())

  def delete(self, keys: Iterable[str], below: str) -> None:
    list(self._pool.map(self._erase, keys))

  def _erase(self, key: str) -> None:
    with self._failures(f'{self.name}/{key}'), contextlib.suppress(FileNotFoundError):
      self._obstore.delete(self._store, key)
