"""Drops everything from the calling process, permanently, that a graded program does not need.

Loaded on its own, by path, in a process without this package: standard library only. The layers, in order of use:
another user id and no capabilities (where the process is root), Landlock (files, and from newer kernels network and
signals), seccomp (an allow-list of system calls). See `man 7 landlock` and `man 2 seccomp`; structures and constants
are those of linux/landlock.h, linux/seccomp.h and linux/audit.h.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
import ctypes
import errno
import os
import platform
import struct

# System call numbers, a column for each machine; None where a machine lacks the call. Programs may make the calls of
# this table and no others; Python, its standard library and numpy need no more. Left out are calls that are harmless by
# themselves but reveal other programs: free memory (sysinfo), disk usage (statfs), the contents of the page cache
# (mincore, preadv2), and pipes, whose inode numbers come from a counter of the whole machine and which are of little
# use within one process.
X86_64, AARCH64 = 0, 1
ALLOWED = {
  # Open descriptors.
  'read': (0, 63),
  'write': (1, 64),
  'readv': (19, 65),
  'writev': (20, 66),
  'pread64': (17, 67),
  'pwrite64': (18, 68),
  'preadv': (295, 69),
  'pwritev': (296, 70),
  'lseek': (8, 62),
  'close': (3, 57),
  'dup': (32, 23),
  'dup2': (33, None),
  'dup3': (292, 24),
  'ftruncate': (77, 46),
  'sendfile': (40, 71),
  'copy_file_range': (326, 285),
  'eventfd2': (290, 19),
  'select': (23, None),
  'pselect6': (270, 72),
  'poll': (7, None),
  'ppoll': (271, 73),
  'epoll_create1': (291, 20),
  'epoll_ctl': (233, 21),
  'epoll_wait': (232, None),
  'epoll_pwait': (281, 22),
  # Paths; Landlock decides which.
  'creat': (85, None),
  'stat': (4, None),
  'lstat': (6, None),
  'fstat': (5, 80),
  'newfstatat': (262, 79),
  'statx': (332, 291),
  'access': (21, None),
  'faccessat': (269, 48),
  'faccessat2': (439, 439),
  'readlink': (89, None),
  'readlinkat': (267, 78),
  'getdents': (78, None),
  'getdents64': (217, 61),
  'getcwd': (79, 17),
  'chdir': (80, 49),
  'fchdir': (81, 50),
  'mkdir': (83, None),
  'mkdirat': (258, 34),
  'rmdir': (84, None),
  'unlink': (87, None),
  'unlinkat': (263, 35),
  'rename': (82, None),
  'renameat': (264, 38),
  'renameat2': (316, 276),
  'umask': (95, 166),
  # Memory.
  'mmap': (9, 222),
  'mprotect': (10, 226),
  'munmap': (11, 215),
  'mremap': (25, 216),
  'brk': (12, 214),
  # Time, and signals to the process itself.
  'nanosleep': (35, 101),
  'gettimeofday': (96, 169),
  'time': (201, None),
  'times': (100, 153),
  'alarm': (37, None),
  'pause': (34, None),
  'getitimer': (36, 102),
  'setitimer': (38, 103),
  'rt_sigaction': (13, 134),
  'rt_sigprocmask': (14, 135),
  'rt_sigpending': (127, 136),
  'rt_sigtimedwait': (128, 137),
  'rt_sigsuspend': (130, 133),
  'rt_sigreturn': (15, 139),
  'sigaltstack': (131, 132),
  'restart_syscall': (219, 128),
  # The process itself.
  'getpid': (39, 172),
  'getppid': (110, 173),
  'gettid': (186, 178),
  'getpgrp': (111, None),
  'getuid': (102, 174),
  'geteuid': (107, 175),
  'getgid': (104, 176),
  'getegid': (108, 177),
  'getresuid': (118, 148),
  'getresgid': (120, 150),
  'getgroups': (115, 158),
  'getrlimit': (97, 163),
  'setrlimit': (160, 164),
  'getrusage': (98, 165),
  'sched_yield': (24, 124),
  'sched_get_priority_max': (146, 125),
  'sched_get_priority_min': (147, 126),
  'getcpu': (309, 168),
  'uname': (63, 160),
  'getrandom': (318, 278),
  'exit': (60, 93),
  'exit_group': (231, 94),
  'wait4': (61, 260),
  'waitid': (247, 95),
  # Threads.
  'set_robust_list': (273, 99),
  'rseq': (334, 293),
  'membarrier': (324, 283),
  'arch_prctl': (158, None),
}
# Further calls that Python lacks, at least in some builds.
OWN = {
  'memfd_create': (319, 279),
  'pidfd_open': (434, 434),
  'capset': (126, 91),
  'seccomp': (317, 277),
  'landlock_create_ruleset': (444, 444),
  'landlock_add_rule': (445, 445),
  'landlock_restrict_self': (446, 446),
  'unshare': (272, 97),
  'setns': (308, 268),
  'mount': (165, 40),
  'umount2': (166, 39),
  'pivot_root': (155, 41),
  'mount_setattr': (442, 442),
}
AUDIT_ARCH = (0xC000003E, 0xC00000B7)
NEW_CALLS = 424  # From here on both machines use the same numbers, and libraries fall back where a call is missing.

# linux/filter.h: load a word, compare, and, return; the second field is (jump if true, jump if false).
LOAD, EQUAL, AT_LEAST, ANY_BIT, AND, RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
PASS = (RETURN, 0, 0, ALLOW)
Instruction = tuple[int, int, int, int]
SELF = -1  # Stands for the program's process id as an operand; other operands are not negative.
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16  # Offsets in struct seccomp_data; arguments have 8 bytes, low word first.

O_ACCMODE, O_TRUNC, O_TMPFILE = 0o3, 0o1000, 0o20000000  # O_TMPFILE's own bit; the same on both machines.
# CLONE_VM, _FS, _FILES, _SIGHAND, _THREAD and _SYSVSEM, as all libraries make threads: a thread with descriptors of its
# own could hide files from the survey.
THREAD = 0x100 | 0x200 | 0x400 | 0x800 | 0x10000 | 0x40000
CLOSE_RANGE_UNSHARE = 0x2  # For the same reason.
# A shared futex is visible to all processes that map the same file, such as a library: only the kernel may wake its
# waiters (FUTEX_WAIT, FUTEX_WAIT_BITSET), as it does when a thread that others join ends.
FUTEX_PRIVATE, FUTEX_CLOCK_REALTIME, SHARED_FUTEXES = 0x80, 0x100, (0, 9)
# MADV_NORMAL to MADV_DONTNEED, _FREE, _HUGEPAGE and _NOHUGEPAGE: no advice that evicts a file from memory.
ADVICE = (0, 1, 2, 3, 4, 8, 14, 15)
LAST_SIGNAL = 31  # Higher signals are queued, and the queue's limit is shared by all processes of a user.
# Excludes F_SETOWN and F_SETSIG, with which a descriptor sends signals to another process, leases and notices, and
# locks, with which programs could communicate through a Python file that both may read.
FCNTL_COMMANDS = (0, 1, 2, 3, 4, 1030, 1032)
# TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX.
IOCTL_REQUESTS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
PRCTL_OPTIONS = (15, 16)  # PR_SET_NAME, PR_GET_NAME.
CLOCKS = 16  # From here on a clock is the CPU time of a process or thread, possibly another one.

# linux/landlock.h: the number of file rights that each version of the interface knows.
FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
WRITE_FILE, READ_FILE, READ_DIR, REMOVE_DIR, REMOVE_FILE = (1 << bit for bit in range(1, 6))
MAKE_DIR, MAKE_REG, TRUNCATE = 1 << 7, 1 << 8, 1 << 14
READ = READ_FILE | READ_DIR
SCRATCH = READ | WRITE_FILE | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | TRUNCATE
NETWORK = 0b11  # Bind and connect TCP; since version 4.
SCOPES = 0b11  # Abstract sockets and signals; since version 6.
QUIET = 1  # Keeps denied accesses out of the system's audit log; since version 7.

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38
SIGKILL = 9

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class Unsupported(Exception):
  """The kernel or the machine lacks a feature that the confinement needs."""


def machine() -> int:
  """Return this machine's column of the tables; raises Unsupported except on 64-bit x86_64 and aarch64."""
  column = {'x86_64': X86_64, 'aarch64': AARCH64, 'arm64': AARCH64}.get(platform.machine())
  if column is None or struct.calcsize('P') != 8:
    raise Unsupported(f'there is no system call table for {platform.machine()}')
  return column


def call(name: str, *arguments: int | bytes) -> int:
  """Make a system call of `OWN` or `CHECKED` and return its result; raises OSError naming the call.

  Bytes are passed by their address: text, or a structure that the kernel only reads.
  """
  numbers = ((OWN.get(name) or CHECKED[name])[machine()], *arguments)
  result = _libc.syscall(*(value if isinstance(value, bytes) else ctypes.c_long(value) for value in numbers))
  if result < 0:
    code = ctypes.get_errno()
    raise OSError(code, f'{name}: {os.strerror(code)}')
  return result


def close_from(first: int) -> None:
  """Close every descriptor from `first` on."""
  try:
    call('close_range', first, 0x7FFFFFFF, 0)
  except (OSError, Unsupported):
    os.closerange(first, os.sysconf('SC_OPEN_MAX'))


def die_with_parent(parent: int) -> None:
  """Have the kernel kill this process when its parent ends; call it after the last change of user.

  Args:
    parent: the parent's process id; 0 if the parent is in another PID namespace.
  """
  call('prctl', PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
  if os.getppid() != parent:
    os._exit(1)


def drop_privileges(uid: int | None) -> None:
  """Switch to the user and group `uid` (None: keep them) and give up all capabilities permanently."""
  if uid is not None:
    try:
      os.setgroups([])
      os.setresgid(uid, uid, uid)
      os.setresuid(uid, uid, uid)
    except OSError as error:
      raise OSError(
        error.errno, f'root cannot become user {uid} ({error.strerror}): run as an ordinary user'
      ) from error
  call('capset', struct.pack('=Ii', 0x20080522, 0), bytes(24))
  # A change of user makes /proc/self, and with it /dev/stdin, inaccessible to the process itself.
  call('prctl', PR_SET_DUMPABLE, 1, 0, 0, 0)
  call('prctl', PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


# ———— Landlock ————


def landlock_version() -> int:
  """Return the version of the kernel's Landlock interface; raises Unsupported if it is missing or off."""
  try:
    return call('landlock_create_ruleset', 0, 0, 1)
  except OSError as error:
    reason = {errno.ENOSYS: 'the kernel has no Landlock', errno.EOPNOTSUPP: 'Landlock is off in the kernel'}
    raise Unsupported(reason.get(error.errno, str(error))) from error


def restrict_files(version: int, readable: Sequence[int], scratch: int, stdin: int | None = None) -> None:
  """Restrict this process to reading below the directories `readable` and working below `scratch`.

  Args:
    version: version of the kernel's Landlock interface.
    readable: descriptors of directories.
    scratch: descriptor of a directory.
    stdin: descriptor of a file that may also be opened by name for reading.
  """
  handled = (1 << FILE_RIGHTS[min(version, max(FILE_RIGHTS))]) - 1
  fields = [handled] + [NETWORK] * (version >= 4) + [SCOPES] * (version >= 6)
  ruleset = call('landlock_create_ruleset', struct.pack(f'={len(fields)}Q', *fields), 8 * len(fields), 0)
  rules = [*((directory, READ) for directory in readable), (scratch, SCRATCH & handled)]
  if stdin is not None:
    rules.append((stdin, READ_FILE))
  for opened, rights in rules:
    call('landlock_add_rule', ruleset, 1, struct.pack('=Qi', rights, opened), 0)
  call('landlock_restrict_self', ruleset, QUIET if version >= 7 else 0)
  os.close(ruleset)


# ———— seccomp ————


def restrict_calls(program: bytes) -> None:
  """Install a filter of `assembled` for this process and its threads; call `drop_privileges` before."""
  instructions = ctypes.create_string_buffer(program, len(program))
  call('seccomp', 1, 0, struct.pack('HxxxxxxP', len(program) // 8, ctypes.addressof(instructions)))


def filter_program(pid: int, column: int | None = None) -> bytes:
  """Return the seccomp filter of a program with this process id.

  It permits `ALLOWED`, and `CHECKED` for some arguments.

  All other calls fail with EPERM, or with ENOSYS where that makes libraries fall back (clone3, openat2 and newer
  calls), so that a program sees an exception.
  """
  rules = [(numbers, [PASS]) for numbers in ALLOWED.values()]
  for *numbers, rule in CHECKED.values():
    rules.append((numbers, [(*what, pid if operand == SELF else operand) for *what, operand in rule]))
  # Includes the x32 calls of x86_64, which have large numbers.
  others = [(AT_LEAST, 0, 1, NEW_CALLS), fail(errno.ENOSYS), fail(errno.EPERM)]
  return assembled(machine() if column is None else column, fail(errno.ENOSYS), rules, others)


def assembled(
  column: int,
  foreign: Instruction,
  rules: Iterable[tuple[Sequence[int | None], Sequence[Instruction]]],
  others: Sequence[Instruction],
) -> bytes:
  """Return a seccomp filter; the instructions for every call must end with a return.

  Args:
    column: the machine, a column of the tables.
    foreign: what to return for 32-bit calls on a 64-bit machine, which have other numbers.
    rules: the numbers of a call on both machines, and the instructions for it.
    others: the instructions for all other calls.
  """
  code = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, AUDIT_ARCH[column]), foreign, (LOAD, 0, 0, NUMBER)]
  for numbers, rule in rules:
    if numbers[column] is not None:
      code += [(EQUAL, 0, len(rule), numbers[column]), *rule]
  return b''.join(struct.pack('=HBBI', *instruction) for instruction in (*code, *others))


def _flags(argument: int) -> list[Instruction]:
  """Return the instructions that check the flags with which a file is opened."""
  return [
    load(argument),
    # The survey of written bytes would not count a file without a name.
    (ANY_BIT, 0, 1, O_TMPFILE),
    fail(errno.EOPNOTSUPP),
    # Before version 3, Landlock lets a reader truncate a file: so here only with O_RDONLY.
    (AND, 0, 0, O_TRUNC | O_ACCMODE),
    (EQUAL, 0, 1, O_TRUNC),
    fail(errno.EPERM),
    PASS,
  ]


def _signal(argument: int) -> list[Instruction]:
  """Return the instructions that allow a signal, given as an argument, to the process itself only."""
  return [
    load(0),
    (EQUAL, 1, 0, SELF),
    fail(errno.EPERM),
    load(argument),
    (AT_LEAST, 0, 1, LAST_SIGNAL + 1),
    fail(errno.EPERM),
    PASS,
  ]


def _one_of(argument: int, values: Sequence[int]) -> list[Instruction]:
  checks = [instruction for value in values for instruction in ((EQUAL, 0, 1, value), PASS)]
  return [load(argument), *checks, fail(errno.EPERM)]


def load(argument: int) -> Instruction:
  """Return the instruction that loads the low word of an argument, counted from 0."""
  return (LOAD, 0, 0, ARGUMENTS + 8 * argument)


def fail(code: int) -> Instruction:
  """Return the instruction that lets the call fail with an error code; 0: succeed without doing anything."""
  return (RETURN, 0, 0, ERRNO | code)


_CLOCK = [load(0), (AT_LEAST, 0, 1, CLOCKS), fail(errno.EPERM), PASS]
_SHARED = [operation | clock for operation in SHARED_FUTEXES for clock in (0, FUTEX_CLOCK_REALTIME)]
# Calls that are allowed only for some arguments: their numbers on each machine, and the instructions for them, which
# end with returns. SELF stands for the program's process id.
CHECKED: dict[str, tuple[int | None, int | None, list[Instruction]]] = {
  # Succeeds without doing anything: a program's files need not outlive it, and syncing one of Python's files would
  # make the disk flush the data of other processes.
  'fsync': (74, 82, [fail(0)]),
  'fdatasync': (75, 83, [fail(0)]),
  'open': (2, None, _flags(1)),
  'openat': (257, 56, _flags(2)),
  'fcntl': (72, 25, _one_of(1, FCNTL_COMMANDS)),
  'ioctl': (16, 29, _one_of(1, IOCTL_REQUESTS)),
  'prctl': (157, 167, _one_of(0, PRCTL_OPTIONS)),
  'prlimit64': (302, 261, _one_of(0, (0, SELF))),
  'kill': (62, 129, _signal(1)),
  'tgkill': (234, 131, _signal(2)),
  'clone': (56, 220, [load(0), (AND, 0, 0, THREAD), (EQUAL, 0, 1, THREAD), PASS, fail(errno.EPERM)]),
  'close_range': (436, 436, [load(2), (ANY_BIT, 0, 1, CLOSE_RANGE_UNSHARE), fail(errno.EPERM), PASS]),
  'futex': (202, 98, [load(1), (ANY_BIT, 0, 1, FUTEX_PRIVATE), PASS, *_one_of(1, _SHARED)]),
  'madvise': (28, 233, _one_of(2, ADVICE)),
  'sched_getaffinity': (204, 123, _one_of(0, (0, SELF))),
  'clock_gettime': (228, 113, _CLOCK),
  'clock_getres': (229, 114, _CLOCK),
  'clock_nanosleep': (230, 115, _CLOCK),
}
