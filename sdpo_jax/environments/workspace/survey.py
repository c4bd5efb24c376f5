"""What a workspace holds that a command must not change or reach, and how much a command adds to its disk."""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import pathlib
import socket
import stat
from typing import NamedTuple

MIB = 2**20
# Disk space that a file or folder takes besides its content, so that many empty ones count, too.
_ENTRY = 1024
# So many files are mounted read-only one by one. If there are more, as in a copy by `cp -al`, their folders are.
_SINGLE = 2000
_ALMOST_FULL = 256 * MIB
_TRIES = 3  # To find all folders in their places.
_KIND = stat.S_IFMT(0xFFFF) | stat.S_ISUID | stat.S_ISGID


class Contents(NamedTuple):
  """The contents of a workspace."""

  taken: int  # Bytes of disk space; a file with several hard links counts once.
  closed: list[str]  # Files, or folders of many, that commands must not change: others have them as well, or run them.
  sockets: list[str]  # Sockets on which a process outside listens.
  # Folders with unknown contents. A command could `chmod` those of its own user, or know what is in others.
  unreadable: list[str]
  moved: bool  # Whether a folder was left out, since it was moved or removed meanwhile.


def survey(workspace: pathlib.Path) -> Contents:
  """Look at everything in a folder, without following links; commands may change it meanwhile.

  Raises:
    OSError: the folder itself cannot be read.
  """
  top = os.stat(workspace)
  blocks, number, closed, sockets, unreadable, moved = 0, 0, [], [], [], False
  linked = list[tuple[str, tuple[int, int], int]]()  # Path, device and inode, number of links.
  seen = collections.Counter[tuple[int, int]]()
  todo = [(str(workspace), (top.st_dev, top.st_ino))]
  while todo:
    folder, listed = todo.pop()
    try:
      opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
      if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
        moved = True
        continue
      if error.errno == errno.EACCES and folder != str(workspace):
        unreadable.append(folder)
        continue
      raise
    try:
      here = os.fstat(opened)
      if (here.st_dev, here.st_ino) != listed:  # Such as through a link in place of a folder above.
        moved = True
        continue
      with os.scandir(opened) as entries:
        for entry in entries:
          try:
            status = entry.stat(follow_symlinks=False)
          except FileNotFoundError:
            continue
          except PermissionError:  # It can be listed, but not searched.
            unreadable.append(folder)
            break
          mode, count = status.st_mode, status.st_nlink
          blocks += status.st_blocks
          number += 1
          if mode & _KIND == stat.S_IFREG and count == 1:  # Most are: here speed counts.
            continue
          path, inode = f'{folder}/{entry.name}', (status.st_dev, status.st_ino)
          if stat.S_ISDIR(mode):
            todo.append((path, inode))
          elif stat.S_ISREG(mode) and count == 1:
            closed.append(path)
          elif stat.S_ISREG(mode):
            linked.append((path, inode, count))
            seen[inode] += 1
            if seen[inode] > 1:
              blocks -= status.st_blocks
              number -= 1
          elif stat.S_ISSOCK(mode) and _listens(path):
            sockets.append(path)
    finally:
      os.close(opened)
  closed += [path for path, inode, count in linked if seen[inode] < count]
  return Contents(blocks * 512 + number * _ENTRY, _grouped(closed, str(workspace)), sockets, unreadable, moved)


def _listens(path: str) -> bool:
  """Return whether a process has a socket's file open, without connecting to it."""
  with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
    try:
      opened = os.open(path, os.O_PATH | os.O_NOFOLLOW)  # A path may be too long for an address.
    except OSError:
      return False
    try:  # With other errors it is a socket of another type, or not ours.
      return probe.connect_ex(f'/proc/self/fd/{opened}') != errno.ECONNREFUSED
    finally:
      os.close(opened)


def _grouped(paths: list[str], workspace: str) -> list[str]:
  """Return paths, or the folders of them if they are many, except the workspace itself."""
  if len(paths) <= _SINGLE:
    return paths
  folders = {path.rpartition('/')[0] for path in paths} - {workspace}
  outermost = [folder for folder in folders if folders.isdisjoint(map(str, pathlib.PurePath(folder).parents))]
  return [path for path in paths if path.rpartition('/')[0] == workspace] + sorted(outermost)


class DiskLimit:
  """Says when a command has added too much to the disk of its workspace.

  The free space of the disk is cheap to read, but others use it, too. So what was added is measured, and only once the
  free space has fallen by so much that the limit may have been reached.
  """

  def __init__(self, workspace: pathlib.Path, before: Contents, limit: int):
    """Begin before the command does, with the contents of the workspace and the bytes that may be added."""
    self._workspace, self._before, self._limit = workspace, before, limit
    self._first, self._most = self._free()
    self._left = limit

  def exceeded(self, command: int) -> str | None:
    """Return why a command must end, or None; `command` is the process that has made its PID namespace."""
    room, free = self._free()
    self._most = max(self._most, free)
    if room < _ALMOST_FULL < self._first:
      return 'its disk is almost full'
    if self._most - free < self._left:
      return None
    unmeasured = 'its disk has filled, and what the command has added cannot be measured'
    try:
      contents = next((found for _ in range(_TRIES) if not (found := survey(self._workspace)).moved), None)
    except OSError as error:
      return f'{unmeasured} ({error})'
    if contents is None:
      return f'{unmeasured}, since its folders are moved'
    if not set(contents.unreadable) <= set(self._before.unreadable):
      return f'{unmeasured}, since it has made folders that cannot be read'
    added = contents.taken + _unlinked(self._workspace, command) - self._before.taken
    self._most, self._left = free, max(self._limit - added, self._limit // 16)
    return f'it has added more than {self._limit // MIB} MB to the disk' if added > self._limit else None

  def _free(self) -> tuple[int, int]:
    """Return the free bytes of the disk, without and with those of further files as `survey` counts them."""
    disk = os.statvfs(self._workspace)
    room = disk.f_bavail * disk.f_frsize
    return room, room + disk.f_favail * _ENTRY


def _unlinked(workspace: pathlib.Path, command: int) -> int:
  """Return the bytes of removed files that the processes of a command still have open, or at most have mapped."""
  opened, mapped = dict[int, int](), dict[int, int]()  # By inode.
  try:
    namespace = os.readlink(f'/proc/{command}/ns/pid_for_children')
  except OSError:  # It has not begun, or has ended.
    return 0
  for process in (f'/proc/{name}' for name in os.listdir('/proc') if name.isdigit()):
    with contextlib.suppress(OSError):  # It has ended, or belongs to another user.
      if os.readlink(f'{process}/ns/pid') != namespace:
        continue
      for name in (f'{process}/fd/{number}' for number in os.listdir(f'{process}/fd')):
        with contextlib.suppress(OSError):
          status = os.stat(name)
          if status.st_nlink == 0 and os.readlink(name).startswith(f'{workspace}/'):
            opened[status.st_ino] = status.st_blocks * 512
      with open(f'{process}/maps', encoding='utf-8', errors='replace') as file:
        for line in file:
          place, _, offset, _, inode, *path = line.split(maxsplit=5)
          if path and path[0].startswith(f'{workspace}/') and path[0].endswith(' (deleted)\n'):
            start, end = (int(part, 16) for part in place.split('-'))
            mapped[int(inode)] = max(mapped.get(int(inode), 0), int(offset, 16) + end - start)
  return sum((mapped | opened).values())
