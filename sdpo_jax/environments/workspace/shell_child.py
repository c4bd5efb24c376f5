"""Runs one command for shell.py: in a folder, with a read-only system, no network and no other processes.

The command has a network of its own with nothing but a loopback, so that tests can talk to their servers, and its own
terminals and shared memory.

Three processes take part: this one, outside, which waits; the first process of a new PID namespace, which sets up the
command's file system and reaps its orphans; and the command. Everything that was started ends with the command. See
`man 7 mount_namespaces`, `user_namespaces` and `pid_namespaces`. Run by path: standard library, and modules of the
sandbox that need no more.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import errno
import fcntl
import importlib
import json
import os
import resource
import signal
import socket
import stat
import struct
import sys
from typing import Any

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), 'sandbox'))
confinement, _, view = map(importlib.import_module, ('confinement', 'library', 'view'))  # `view` needs the others.

MIB = 2**20
DEVICES = ('null', 'zero', 'full', 'random', 'urandom')
LINKS = {'fd': '/proc/self/fd', 'stdin': '/proc/self/fd/0', 'stdout': '/proc/self/fd/1', 'stderr': '/proc/self/fd/2'}
LINKS['ptmx'] = 'pts/ptmx'
# Calls that commands do not need and in which kernels have had bugs, or that reach beyond the namespaces; x86_64,
# aarch64.
REFUSED = {
  **{name: confinement.OWN[name] for name in ('mount', 'umount2', 'pivot_root', 'mount_setattr', 'unshare', 'setns')},
  'open_tree': (428, 428),
  'move_mount': (429, 429),
  'fsopen': (430, 430),
  'fsconfig': (431, 431),
  'fsmount': (432, 432),
  'fspick': (433, 433),
  'open_tree_attr': (467, 467),
  'chroot': (161, 51),
  'ptrace': (101, 117),
  'process_vm_readv': (310, 270),
  'process_vm_writev': (311, 271),
  'pidfd_getfd': (438, 438),
  'kcmp': (312, 272),
  'bpf': (321, 280),
  'perf_event_open': (298, 241),
  'userfaultfd': (323, 282),
  'io_uring_setup': (425, 425),
  'io_uring_enter': (426, 426),
  'io_uring_register': (427, 427),
  'keyctl': (250, 219),
  'add_key': (248, 217),
  'request_key': (249, 218),
  'open_by_handle_at': (304, 265),
  'name_to_handle_at': (303, 264),
  'mknod': (133, None),
  'mknodat': (259, 33),
  'init_module': (175, 105),
  'finit_module': (313, 273),
  'delete_module': (176, 106),
  'kexec_load': (246, 104),
  'kexec_file_load': (320, 294),
  'reboot': (169, 142),
  'swapon': (167, 224),
  'swapoff': (168, 225),
  'syslog': (103, 116),
  'quotactl': (179, 60),
  'quotactl_fd': (443, 443),
  'acct': (163, 89),
  'settimeofday': (164, 170),
  'clock_settime': (227, 112),
  'clock_adjtime': (305, 266),
  'adjtimex': (159, 171),
  'sethostname': (170, 161),
  'setdomainname': (171, 162),
}
# Calls that libraries do without: their arguments are in memory, where a filter cannot see them.
MISSING = {'clone3': (435, 435), 'openat2': (437, 437)}
FALLOCATE = (285, 47)  # Takes a disk in no time; libraries write instead, which can be stopped.
# Calls that give a file its mode, with the number of that argument and, if it counts only then, of the flags.
MODES = {
  'chmod': ((90, None), 1, None),
  'fchmod': ((91, 52), 1, None),
  'fchmodat': ((268, 53), 2, None),
  'fchmodat2': ((452, 452), 2, None),
  'creat': ((85, None), 1, None),
  'open': ((2, None), 2, 1),
  'openat': ((257, 56), 3, 2),
}
SOCKETS = {'socket': (41, 198), 'socketpair': (53, 199)}
# Other families reach beyond a network namespace (AF_VSOCK, AF_ALG, AF_TIPC …) or load modules of the kernel.
FAMILIES, NETLINK_ROUTE = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6), 0
SIOCSIFFLAGS, IFF_UP = 0x8914, 0x1
TIOCSTI, TIOCLINUX = 0x5412, 0x541C  # Type into the terminal from which this was started.
NAMESPACES = 0x20000 | 0x2000000 | 0x4000000 | 0x8000000 | 0x10000000 | 0x20000000 | 0x40000000
X32, KILL = 0x40000000, 0x80000000
FAILED = 'failed'
TEMPORARY = ('/tmp', '/var/tmp')  # As in boundary.py.
NOSUID_NODEV = 0x2 | 0x4  # MOUNT_ATTR_…


def main() -> None:
  """Run the command that the request on the command line describes, and write how it ended to the answer's file."""
  parent, request, answer = map(int, sys.argv[1:])
  with open(request, 'rb') as file:
    job = json.load(file)
  for door in job['doors']:  # Entries to a control group.
    os.write(door, b'0')
    os.close(door)
  confinement.die_with_parent(parent)
  try:
    # One thread runs here, as a new user namespace requires.
    others = view.CLONE_NEWNS | view.CLONE_NEWPID | view.CLONE_NEWNET | view.CLONE_NEWIPC | view.CLONE_NEWUTS
    view.own_users(os.geteuid(), os.getegid(), others)
    first = os.fork()
  except OSError as error:
    tell(answer, {FAILED: f'namespaces are not allowed here ({error})'})
    return
  if first:
    os.waitpid(first, 0)
    return
  confinement.die_with_parent(0)
  try:
    missing = build(job)
  except OSError as error:
    tell(answer, {FAILED: f'the file system of the command cannot be made ({error})'})
    os._exit(1)
  with part('a loopback network', missing), socket.socket() as any_socket:
    fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack('16sH22x', b'lo', IFF_UP))
  tell(answer, {'missing': missing})
  program = refusing(confinement.machine())
  command = os.fork()
  if not command:
    run(program, job, answer)
  os.set_inheritable(answer, False)
  for descriptor in (0, 1, 2):  # So the reader of the output sees its end.
    os.close(descriptor)
  while (ended := os.wait())[0] != command:
    pass  # An orphan of the command.
  tell(answer, {'exit_code': os.waitstatus_to_exitcode(ended[1])})
  os._exit(0)  # Ends everything that the command has left running.


def tell(answer: int, what: dict[str, Any]) -> None:
  """Write a line of JSON to the descriptor `answer`."""
  os.write(answer, json.dumps(what).encode() + b'\n')


@contextlib.contextmanager
def part(name: str, missing: list[str]) -> Iterator[None]:
  """Do without a part of the command's surroundings, and add its name to `missing`, where the machine forbids it."""
  try:
    yield
  except OSError:
    missing.append(name)


def build(job: dict[str, Any]) -> list[str]:
  """Make this process's root a read-only file system of system directories, with the workspace.

  Returns:
    The names of parts that the machine forbids.
  """
  missing: list[str] = []
  at, workspace = job['at'], job['workspace']
  view.mount('none', '/', '', view.MS_REC | view.MS_PRIVATE)
  view.mount('tmpfs', at, 'tmpfs', view.MS_NOSUID | view.MS_NODEV, 'mode=0755,size=16m')
  within = [path for path in job['readable'] if is_temporary(path)]
  for path in job['readable']:
    if path not in within:
      place(path, at + path)
  for name in ('/dev/pts', '/dev/shm', '/proc', '/run', *TEMPORARY):
    os.makedirs(at + name, exist_ok=True)
  for name in (*DEVICES, 'tty'):
    os.close(os.open(f'{at}/dev/{name}', os.O_CREAT | os.O_WRONLY, 0o444))
  for name, path in LINKS.items():
    os.symlink(path, f'{at}/dev/{name}')
  with part('/proc', missing):  # A container that hides parts of its own /proc forbids it.
    view.mount('proc', f'{at}/proc', 'proc', view.MS_NOSUID | view.MS_NODEV)
  if not is_temporary(workspace):
    os.makedirs(at + workspace, exist_ok=True)
  view.make_read_only(at)
  for name in DEVICES:
    view.mount(f'/dev/{name}', f'{at}/dev/{name}', '', view.MS_BIND)
  with part('terminals', missing):
    view.mount('/dev/tty', f'{at}/dev/tty', '', view.MS_BIND)  # A command has none but those that it opens.
    view.mount('devpts', f'{at}/dev/pts', 'devpts', view.MS_NOSUID, 'newinstance,ptmxmode=0666,mode=0620')
  for name in ('/dev/shm', *TEMPORARY):
    view.mount('tmpfs', at + name, 'tmpfs', view.MS_NOSUID | view.MS_NODEV, f'mode=1777,size={job["tmp_mb"]}m')
  for path in within:
    if not os.path.lexists(at + path):  # Within another one.
      place(path, at + path)
      view.make_read_only(at + path)
  if is_temporary(workspace):
    os.makedirs(at + workspace, exist_ok=True)
  try:
    view.mount(workspace, at + workspace, '', view.MS_BIND)  # Excludes file systems mounted below the workspace.
  except OSError as error:
    if error.errno == errno.EINVAL:
      raise OSError(errno.EINVAL, 'something is mounted within the workspace: unmount it', workspace) from error
    raise
  view.set_attributes(at + workspace, NOSUID_NODEV, 0)
  for path in job['closed']:
    view.mount(path, at + path, '', view.MS_BIND)
    view.make_read_only(at + path)
  for path in job['hidden']:
    view.mount(f'{at}/{"run" if os.path.isdir(at + path) else "dev/null"}', at + path, '', view.MS_BIND)  # Is empty.
  view.enter(at)
  os.chdir(workspace)
  view.check_read_only('/', *(path for path in job['readable'] if not os.path.islink(path)))
  return missing


def is_temporary(path: str) -> bool:
  """Return whether a path lies below a directory for temporary files, over which the command gets its own tmpfs."""
  return any(path.startswith(f'{name}/') for name in TEMPORARY)


def place(path: str, to: str) -> None:
  """Mount a directory or a file of the machine at a new path, or link to one."""
  if os.path.lexists(to):
    return
  os.makedirs(os.path.dirname(to), exist_ok=True)
  if os.path.islink(path):
    os.symlink(os.readlink(path), to)
    return
  if os.path.isdir(path):
    os.mkdir(to)
  else:
    os.close(os.open(to, os.O_CREAT | os.O_WRONLY, 0o444))
  view.mount(path, to, '', view.MS_BIND | view.MS_REC)


def run(program: bytes, job: dict[str, Any], answer: int) -> None:
  """Execute the command in place of this process."""
  try:
    os.setsid()
    limits = job['limits']
    for name, value in (
      ('RLIMIT_CORE', 0),
      ('RLIMIT_CPU', limits['cpu_s']),
      ('RLIMIT_FSIZE', limits['file_mb'] * MIB),
      ('RLIMIT_AS', limits['memory_mb'] * MIB),
      ('RLIMIT_NOFILE', limits['descriptors']),
      ('RLIMIT_NPROC', limits['processes']),
    ):
      resource.setrlimit(getattr(resource, name), (value, value))
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    confinement.drop_privileges(None)
    confinement.restrict_calls(program)
    os.set_inheritable(answer, False)
    os.execve(job['shell'][0], job['shell'], job['environment'])
  except OSError as error:
    tell(answer, {FAILED: f'the command cannot be started ({error})'})
  os._exit(127)


def refusing(column: int) -> bytes:
  """Return the seccomp filter of commands.

  It denies `REFUSED`, new namespaces, typing into a terminal, files that run with the rights of their owner or group,
  and sockets of unusual families.
  """
  load, refused, permitted = confinement.load, confinement.fail(errno.EPERM), confinement.PASS
  missing, no_family = confinement.fail(errno.ENOSYS), confinement.fail(errno.EAFNOSUPPORT)
  new = [load(0), (confinement.ANY_BIT, 0, 1, NAMESPACES), refused, permitted]
  typing = [load(1), (confinement.EQUAL, 1, 0, TIOCSTI), (confinement.EQUAL, 0, 1, TIOCLINUX), refused, permitted]
  rules = [(numbers, [refused]) for numbers in REFUSED.values()]
  rules += [(numbers, [missing]) for numbers in MISSING.values()]
  rules.append((FALLOCATE, [confinement.fail(errno.EOPNOTSUPP)]))
  rules += [(confinement.CHECKED['clone'], new), (confinement.CHECKED['ioctl'], typing)]
  for numbers, mode, flags in MODES.values():
    made = [load(flags), (confinement.ANY_BIT, 1, 0, os.O_CREAT | confinement.O_TMPFILE), permitted] if flags else []
    checked = [load(mode), (confinement.ANY_BIT, 0, 1, stat.S_ISUID | stat.S_ISGID), refused, permitted]
    rules.append((numbers, [*made, *checked]))
  usual = [step for family in FAMILIES for step in ((confinement.EQUAL, 0, 1, family), permitted)]
  usual += [(confinement.EQUAL, 1, 0, socket.AF_NETLINK), no_family]
  usual += [load(2), (confinement.EQUAL, 0, 1, NETLINK_ROUTE), permitted, no_family]
  rules += [(numbers, [load(0), *usual]) for numbers in SOCKETS.values()]
  others = [(confinement.AT_LEAST, 0, 1, X32), missing] * (column == confinement.X86_64)
  return confinement.assembled(column, (confinement.RETURN, 0, 0, KILL), rules, [*others, permitted])


if __name__ == '__main__':
  main()
