"""A program's view of the machine where namespaces are allowed: read-only Python and a scratch space of its own.

The zygote makes it once: a mount namespace whose root holds only the directories of the Python installation, read-only,
so that reading leaves no access times. Every program then gets a copy of that namespace with its own tmpfs, whose size
and inodes the kernel limits and which ends with the program, and a PID namespace in which it is always number 2. See
`man 7 mount_namespaces`, `user_namespaces` and `pid_namespaces`. Loaded by path; standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import errno
import os
import signal
import stat
import struct
import sys

confinement, library = sys.modules['confinement'], sys.modules['library']  # The zygote loads them first.

OWN = '/own'  # Mount point of a program's file system.
SCRATCH = f'{OWN}/scratch'
STDIN = f'{OWN}/stdin'
INIT = '/init'
PROGRAM = 2  # Process id of every program; `INIT` comes before it.
INODES = 3  # Inodes of that file system besides the program's: root, scratch directory, standard input.
NOBODY = 65534

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER = 0x20000, 0x4000000, 0x8000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
FURTHER = {'ipc': CLONE_NEWIPC, 'uts': CLONE_NEWUTS, 'net': CLONE_NEWNET}
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
READ_ONLY = 0x1 | 0x2 | 0x4  # MOUNT_ATTR_RDONLY, _NOSUID and _NODEV.

# The first process of a PID namespace, whose end ends the namespace. It reads a byte from descriptor 0, a pipe that
# only the zygote could write to, and exits when the zygote is gone. It consists of a few instructions because a fork of
# the zygote would cost as much as the program to be run.
# x86_64: xor edi,edi; mov rsi,rsp; mov edx,1; xor eax,eax; syscall; xor edi,edi; mov eax,60; syscall
# aarch64: mov x0,0; mov x1,sp; mov x2,1; mov x8,63; svc 0; mov x0,0; mov x8,93; svc 0
CODE = (
  bytes.fromhex('31ff 4889e6 ba01000000 31c0 0f05 31ff b83c000000 0f05'),
  b''.join(
    struct.pack('<I', instruction)
    for instruction in (
      *(0xD2800000, 0x910003E1, 0xD2800022, 0xD28007E8, 0xD4000001),
      *(0xD2800000, 0xD2800BA8, 0xD4000001),
    )
  ),
)
ELF_MACHINE = (62, 183)


def separate() -> list[str]:
  """Move this process, which must have one thread, to its own namespaces; return their names.

  Root needs no user namespace. Any other user becomes nobody in one, with all capabilities in it until a program drops
  them; since these do not extend to namespaces made outside, a fork of this process continues as the first process of a
  PID namespace, and this process ends when that fork does.

  Raises:
    confinement.Unsupported: the machine forbids them.
  """
  found = ['mount']
  try:
    confinement.call('unshare', CLONE_NEWNS)
  except OSError:
    try:
      own_users(NOBODY, NOBODY, CLONE_NEWNS | CLONE_NEWPID)
      child = os.fork()
    except OSError as error:
      raise confinement.Unsupported(f'namespaces are not allowed here ({error.strerror})') from error
    if child:
      confinement.close_from(3)
      os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    confinement.die_with_parent(0)
    found.append('user')
  for name, flag in FURTHER.items():  # seccomp already blocks access to these; they are a second wall.
    with contextlib.suppress(OSError):
      confinement.call('unshare', flag)
      found.append(name)
  return found


def own_users(user: int, group: int, others: int) -> None:
  """Move this process to a user namespace, where it has these ids, and to the namespaces `others`; raises OSError."""
  maps = {'setgroups': 'deny', 'gid_map': f'{group} {os.getegid()} 1', 'uid_map': f'{user} {os.geteuid()} 1'}
  confinement.call('unshare', CLONE_NEWUSER | others)
  for name, text in maps.items():
    with open(f'/proc/self/{name}', 'w') as file:
      file.write(text)


def processes(at: str) -> int | None:
  """Return an open, unnamed /proc of this process's PID namespace; None if it is unavailable.

  Args:
    at: an existing directory, on which /proc is mounted temporarily.
  """
  try:
    mount('none', '/', '', MS_REC | MS_PRIVATE)
    mount('proc', at, 'proc', 0)
  except OSError:  # For example in a container that hides parts of its own /proc.
    return None
  opened = os.open(at, os.O_PATH | os.O_DIRECTORY)
  confinement.call('umount2', os.fsencode(at), MNT_DETACH)
  return opened


def build(
  readable: Sequence[str], aliases: Mapping[str, str], at: str, copies: Sequence[library.File] | None = None
) -> None:
  """Replace this process's root by a read-only file system of only the directories `readable`.

  Args:
    readable: real paths of directories; they keep their names.
    aliases: alias → real path, for other names under which modules in these directories were loaded.
    at: an existing directory on which the new root is mounted while it is made; then it is removed.
    copies: the files to copy into memory; None: mount the directories themselves.

  Raises:
    confinement.Unsupported: the machine forbids it or lacks memory, or the kernel is older than Linux 5.12.
  """
  try:
    mount('none', '/', '', MS_REC | MS_PRIVATE)
    parent = os.open(os.path.dirname(at), os.O_PATH | os.O_DIRECTORY)
    size = 2**20 + library.size(copies or ())
    mount('tmpfs', at, 'tmpfs', MS_NOSUID | MS_NODEV, f'mode=0755,size={size},nr_inodes={1024 + len(copies or ())}')
    for path in sorted(readable):  # Parents come before nested directories, which then exist already.
      if not os.path.isdir(at + path):
        os.makedirs(at + path)
        if copies is None:
          mount(path, at + path, '', MS_BIND | MS_REC)
          make_read_only(at + path)
    library.copy(copies or (), at)
    for alias, path in aliases.items():
      if not os.path.lexists(at + alias):
        os.makedirs(os.path.dirname(at + alias), exist_ok=True)
        os.symlink(path, at + alias)
    os.mkdir(at + OWN)
    os.mkdir(at + '/dev')
    os.symlink(STDIN, at + '/dev/stdin')
    with open(at + INIT, 'wb') as file:
      file.write(executable(confinement.machine()))
    os.chmod(at + INIT, 0o555)
    enter(at)
    with contextlib.suppress(OSError):  # Where nothing can be removed, it is a bubblewrap's and ends with it.
      os.rmdir(os.path.basename(at), dir_fd=parent)
    os.close(parent)
    make_read_only('/')
    check_read_only('/', *readable)
  except OSError as error:
    raise confinement.Unsupported(f'a file system of Python alone cannot be made here ({error})') from error


def enter(at: str) -> None:
  """Make the mount at `at` the root and working directory of this process, and leave the old root."""
  os.chdir(at)
  confinement.call('pivot_root', b'.', b'.')
  confinement.call('umount2', b'.', MNT_DETACH)
  os.chdir('/')


def check_read_only(*paths: str) -> None:
  """Raise OSError if one of these lies on a writable mount, where reading can update a file's access time."""
  for path in paths:
    if not os.statvfs(path).f_flag & os.ST_RDONLY:
      raise OSError(errno.EROFS, 'it can be written to', path)


def own_files(size: int, entries: int, user: int | None, stdin: int) -> None:
  """Give this process, a fork of the zygote, its own scratch file system, with standard input as a file in it.

  The input is copied, because inode numbers in memory shared by all programs reveal programs to one another.

  Args:
    size: bytes that the program may store.
    entries: files and directories that it may create.
    user: owner of the scratch directory; None: this process's user.
    stdin: descriptor of the input; replaced by the descriptor of the copy.

  Raises:
    OSError: the machine has run out of memory or mounts.
  """
  length = os.fstat(stdin).st_size
  confinement.call('unshare', CLONE_NEWNS)
  mount('tmpfs', OWN, 'tmpfs', MS_NOSUID | MS_NODEV, f'mode=0700,size={size + length},nr_inodes={entries + INODES}')
  copy = os.open(STDIN, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o444)
  done = 0
  while done < length:
    done += os.sendfile(copy, stdin, done, length - done)
  os.close(copy)
  copy = os.open(STDIN, os.O_RDONLY)
  os.dup2(copy, stdin)
  os.close(copy)
  os.mkdir(SCRATCH, 0o700)
  if user is not None:
    os.chown(SCRATCH, user, user)
  os.chmod(OWN, 0o111)  # Even if the program is its owner, since it cannot change a mode.


class ProcessIds:
  """Makes PID namespaces, one per program."""

  def __init__(self):
    self._ours = os.open('/proc/self/ns/pid', os.O_RDONLY)
    self._lifeline, self._held = os.pipe()

  @contextlib.contextmanager
  def separate(self) -> Iterator[tuple[int, int]]:
    """Provide a new namespace: its first process, to be ended afterwards, and a descriptor, valid within the block.

    Raises:
      OSError: there are too many processes, namespaces or descriptors.
    """
    confinement.call('unshare', CLONE_NEWPID)
    try:
      actions = [(os.POSIX_SPAWN_DUP2, self._lifeline, 0), (os.POSIX_SPAWN_CLOSE, 1), (os.POSIX_SPAWN_CLOSE, 2)]
      first = os.posix_spawn(INIT, ['init'], {}, file_actions=actions)
    finally:
      try:
        confinement.call('setns', self._ours, CLONE_NEWPID)
      except OSError:  # Otherwise the next fork would be in another program's namespace: better end.
        os._exit(1)
    try:
      namespace = os.pidfd_open(first)
    except OSError:
      os.kill(first, signal.SIGKILL)
      raise
    try:
      yield first, namespace
    finally:
      os.close(namespace)


def executable(column: int) -> bytes:
  """Return an ELF file of `CODE` for a column of confinement's tables."""
  code, base, header = CODE[column], 0x400000, 64 + 56
  size = header + len(code)
  return b''.join(
    (
      b'\x7fELF\x02\x01\x01' + bytes(9),
      struct.pack('<HHIQQQIHHHHHH', 2, ELF_MACHINE[column], 1, base + header, 64, 0, 0, 64, 56, 1, 0, 0, 0),
      struct.pack('<IIQQQQQQ', 1, 5, 0, base, base, size, size, 0x1000),
      code,
    )
  )


def reach(paths: Sequence[str]) -> None:
  """Let other users reach `paths` below closed directories, in a mount namespace of this process alone.

  Otherwise programs could not read a Python below a closed home directory once they have dropped their privileges.

  Raises:
    confinement.Unsupported: the machine forbids it.
  """
  closed: dict[str, list[str]] = {}
  for path in paths:
    parts = path.split('/')
    for ancestor in ('/'.join(parts[:count]) for count in range(2, len(parts))):
      if not os.stat(ancestor).st_mode & stat.S_IXOTH:
        closed.setdefault(ancestor, []).append(path)
        break
  if not closed:
    return
  try:
    confinement.call('unshare', CLONE_NEWNS)
    mount('none', '/', '', MS_REC | MS_PRIVATE)
    for ancestor, inside in closed.items():
      fds = [os.open(path, os.O_PATH | os.O_DIRECTORY) for path in inside]
      mount('tmpfs', ancestor, 'tmpfs', 0, 'mode=0755,size=1m')
      for path, fd in zip(inside, fds, strict=True):
        os.makedirs(path, 0o755, exist_ok=True)
        mount(f'/proc/self/fd/{fd}', path, '', MS_BIND | MS_REC)
        os.close(fd)
  except OSError as error:
    raise confinement.Unsupported(
      f'other users cannot enter {", ".join(closed)}, in which Python or the temporary directory lies, and it cannot '
      f'be mounted elsewhere ({error}): put them where others can read, or run as an ordinary user'
    ) from error


def make_read_only(path: str) -> None:
  """Make the mount at `path` and all mounts below it read-only in this namespace; raises OSError before Linux 5.12."""
  set_attributes(path, READ_ONLY, AT_RECURSIVE)


def set_attributes(path: str, attributes: int, flags: int) -> None:
  """Add attributes to the mount at `path` by mount_setattr(2)."""
  given = struct.pack('=4Q', attributes, 0, 0, 0)
  confinement.call('mount_setattr', AT_FDCWD, os.fsencode(path), flags, given, len(given))


def mount(source: str, target: str, kind: str, flags: int, data: str = '') -> None:
  """Call mount(2)."""
  confinement.call('mount', *map(os.fsencode, (source, target, kind)), flags, os.fsencode(data))
