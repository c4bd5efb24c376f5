"""File access confined to one folder: no escape through `..`, links, other file systems or hard links."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import ctypes
import errno
import os
import pathlib
import secrets
import stat
import struct

OPENAT2 = 437  # The same number on all machines.
# RESOLVE_NO_XDEV, RESOLVE_NO_MAGICLINKS and RESOLVE_BENEATH of openat2(2).
_RESOLVE = 0x01 | 0x02 | 0x08
_SKIPPED = ('.git', '.hg', '.svn', '__pycache__', 'node_modules', '.venv')  # Skipped by searches.

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class PathError(Exception):
  """A path that cannot be read or written; the message is one sentence for the agent."""


class Folder:
  """Reads, writes and lists files below a workspace folder; thread-safe."""

  def __init__(self, path: pathlib.Path):
    """Open a folder; raises OSError if it does not exist."""
    self.path = pathlib.Path(os.path.realpath(path))
    self._root = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    self._device = os.fstat(self._root).st_dev

  def close(self) -> None:
    """Close the folder; no other method works afterwards."""
    os.close(self._root)

  def read(self, path: str, limit: int) -> bytes:
    """Return the content of a file.

    Raises:
      PathError: the file is missing, is larger than `limit` bytes, or the path leads out of the folder.
    """
    name = self.relative(path)
    with self._told(name), self._opened(name, os.O_RDONLY | os.O_NONBLOCK) as descriptor:
      status = os.fstat(descriptor)
      if not stat.S_ISREG(status.st_mode):
        kind = 'a folder' if stat.S_ISDIR(status.st_mode) else 'not a regular file'
        raise PathError(f'{name} is {kind}.')
      if status.st_size > limit:
        raise PathError(f'{name} has {status.st_size} bytes, more than the {limit} that are read.')
      with open(descriptor, 'rb', closefd=False) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
      raise PathError(f'{name} has more than the {limit} bytes that are read.')
    return content

  def write(self, path: str, content: bytes) -> bool:
    """Write a file, replacing an existing one; return whether one existed.

    This makes a new file: other hard links of the old one keep the old content.

    Raises:
      PathError: the path leads out of the folder or over a link, or names a folder.
    """
    name = self.relative(path)
    if name == '.':
      raise PathError('The workspace itself is a folder: name a file in it.')
    folder, last = os.path.split(name)
    with self._told(name):
      self._make(folder)
      with self._opened(folder or '.', os.O_RDONLY | os.O_DIRECTORY) as parent:
        mode = None
        with contextlib.suppress(FileNotFoundError):
          mode = os.stat(last, dir_fd=parent, follow_symlinks=False).st_mode
        if mode is not None and not stat.S_ISREG(mode):
          kind = 'a folder' if stat.S_ISDIR(mode) else 'a link' if stat.S_ISLNK(mode) else 'not a regular file'
          raise PathError(f'{name} is {kind}, and is not written to: name a file.')
        partial = f'.{secrets.token_hex(8)}.partial'
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(partial, flags, 0o666, dir_fd=parent)
        try:
          with open(descriptor, 'wb') as file:
            file.write(content)
            if mode is not None:
              os.fchmod(file.fileno(), mode & 0o777)  # New content does not run with its owner's rights.
          os.replace(partial, last, src_dir_fd=parent, dst_dir_fd=parent)
        except BaseException:
          with contextlib.suppress(FileNotFoundError):
            os.unlink(partial, dir_fd=parent)
          raise
    return mode is not None

  def remove(self, path: str) -> None:
    """Remove a file or a link; raises PathError if it is missing or a folder, or the path leads out of the folder."""
    name = self.relative(path)
    folder, last = os.path.split(name)
    with self._told(name), self._opened(folder or '.', os.O_RDONLY | os.O_DIRECTORY) as parent:
      os.unlink(last, dir_fd=parent)

  def files(self, path: str = '.') -> Iterator[str]:
    """Yield the names of the regular files below a folder, sorted, relative to the workspace; does not follow links.

    Raises:
      PathError: the folder does not exist.
    """
    name = self.relative(path)
    with self._told(name), self._opened(name, os.O_RDONLY | os.O_DIRECTORY) as top:
      top_name = '' if name == '.' else f'{name}/'
      for folder, folders, names, descriptor in os.fwalk('.', dir_fd=top, follow_symlinks=False):
        folders[:] = sorted(each for each in folders if each not in _SKIPPED and self._is_ours(each, descriptor))
        within = '' if folder == '.' else f'{folder.removeprefix("./")}/'
        for each in sorted(names):
          with contextlib.suppress(FileNotFoundError):
            if stat.S_ISREG(os.stat(each, dir_fd=descriptor, follow_symlinks=False).st_mode):
              yield f'{top_name}{within}{each}'

  def readable(self, path: str) -> str:
    """Return `relative` of an existing file or folder; raises PathError if it does not exist."""
    name = self.relative(path)
    with self._told(name), self._opened(name, os.O_RDONLY | os.O_NONBLOCK):
      return name

  def relative(self, path: str) -> str:
    """Return a path, absolute or not, relative to the folder.

    Raises:
      PathError: it leads out of the folder, or is not a valid path.
    """
    if not path or '\0' in path:
      raise PathError('The path is empty.' if not path else 'The path holds a null byte.')
    if len(os.fsencode(path)) > 4096:
      raise PathError('The path is longer than 4096 bytes.')
    # Purely textual: the target of `link/..` depends on the link, and opening it fails if the link leads out.
    name = os.path.relpath(os.path.join(self.path, path), self.path)
    if name == '..' or name.startswith('../'):
      raise PathError(f'{path} is outside of the workspace {self.path}, which is all that can be read and written.')
    return name

  def _is_ours(self, name: str, parent: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
      return os.stat(name, dir_fd=parent, follow_symlinks=False).st_dev == self._device
    return False

  def _make(self, folder: str) -> None:
    """Make a folder and its parents."""
    done = ''
    for part in folder.split('/') if folder else ():
      with self._opened(done or '.', os.O_RDONLY | os.O_DIRECTORY) as parent, contextlib.suppress(FileExistsError):
        os.mkdir(part, dir_fd=parent)
      done = os.path.join(done, part)

  @contextlib.contextmanager
  def _opened(self, name: str, flags: int) -> Iterator[int]:
    descriptor = self._open(name, flags | os.O_CLOEXEC)
    try:
      yield descriptor
    finally:
      os.close(descriptor)

  def _open(self, name: str, flags: int) -> int:
    how = struct.pack('=3Q', flags, 0, _RESOLVE)
    number, root, size = map(ctypes.c_long, (OPENAT2, self._root, len(how)))
    for _ in range(8):  # EAGAIN: a concurrent rename.
      found = _libc.syscall(number, root, os.fsencode(name), how, size)
      if found >= 0:
        return found
      code = ctypes.get_errno()
      if code == errno.ENOSYS:
        return self._open_by_parts(name, flags)
      if code != errno.EAGAIN:
        break
    raise OSError(code, os.strerror(code), name)

  def _open_by_parts(self, name: str, flags: int) -> int:
    """Open as `_open` does, before Linux 5.6: follows no links at all, not even those within the folder."""
    folders, last = os.path.split(name)
    descriptor = os.dup(self._root)
    try:
      for part in folders.split('/') if folders else ():
        below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = below
      found = os.open(last, flags | os.O_NOFOLLOW, dir_fd=descriptor)
    finally:
      os.close(descriptor)
    if os.fstat(found).st_dev != self._device:
      os.close(found)
      raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), name)
    return found

  @contextlib.contextmanager
  def _told(self, name: str) -> Iterator[None]:
    """Convert an OSError of a path to a PathError with one sentence."""
    try:
      yield
    except OSError as error:
      reasons = {
        errno.ENOENT: 'does not exist',
        errno.EXDEV: 'leads out of the workspace, or to another file system',
        errno.ELOOP: 'leads over a link that is not followed',
        errno.ENOTDIR: 'leads over something that is not a folder',
        errno.EISDIR: 'is a folder',
        errno.EACCES: 'is not yours to read or write',
        errno.EPERM: 'is not yours to read or write',
        errno.ENAMETOOLONG: 'has a name that is too long',
        errno.ENOSPC: 'cannot be written, for the disk is full',
        errno.EROFS: 'cannot be written, for the disk is read-only',
        errno.ENXIO: 'is not a regular file',
      }
      reason = reasons.get(error.errno or 0, f'cannot be opened ({error.strerror})')
      raise PathError(f'{name} {reason}.') from error
