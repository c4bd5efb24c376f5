"""Forks processes that find nothing of one another in their memory: all are copies of one that never learns anything.

A process that waits for programs knows how they ended, and any fork of it knows that too: what has been freed is still
there to be found. So the zygote does not fork programs itself. Before the first job it forks the *seed*, which does
nothing else but copy itself when told to, and is told only that: job and descriptors lie unread in a socket, from which
the copy takes them. The copy is a child of the zygote (CLONE_PARENT), not of the seed, which therefore never learns how
a program ended, nor its process id: the result of the system call stays in a register. Loaded by path; standard library
only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import contextlib
import ctypes
import os
import signal
import socket
import struct
import sys
import threading
import traceback

confinement = sys.modules['confinement']  # The zygote loads it first.

CLONE_PARENT, CLONE_NEWPID = 0x8000, 0x20000000
MSG_CMSG_CLOEXEC = 0x40000000
CREDENTIALS = struct.Struct('=iII')  # Of a sender, in the ids of the receiver: process, user, group; see unix(7).
MESSAGE = 2**16  # Bytes of a message at most.
START_S = 60.0  # A copy that does not come to life within that time never will.
THREAD_BYTES = 1024  # At the beginning of what the C library knows of a thread; its id is among them.

_python, _libc = ctypes.pythonapi, ctypes.PyDLL(None, use_errno=True)  # Neither lets go of the interpreter's lock.
for _hook in (_python.PyOS_BeforeFork, _python.PyOS_AfterFork_Parent, _python.PyOS_AfterFork_Child):
  _hook.restype = None
_libc.syscall.restype = None  # So that no process id is ever stored.

Program = Callable[[bytes, list[int]], None]  # With a job and its descriptors, in the process of the job.


class SeedDiedError(Exception):
  """There is no seed any more."""


class Seed:
  """The seed, as the process sees it that has made it and is the parent of its copies."""

  def __init__(self, program: Program, keep: Sequence[int] = ()):
    """Forks the seed from this process, which must have one thread.

    Args:
      program: what a copy does; it ends when this returns.
      keep: descriptors that copies need beside those of their job; all others from 3 on are closed in the seed.
    """
    self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent, known = os.getpid(), _words_of_thread()
    self.pid = os.fork()
    if self.pid == 0:
      leave = os._exit
      try:
        del self
        _keep_only([*keep, theirs.fileno()])
        confinement.die_with_parent(parent)
        _serve(theirs, program, _thread_id_addresses(parent, known))
        leave(0)
      except BaseException:
        traceback.print_exc()
      finally:
        leave(70)
    theirs.close()

  def fork(self, job: bytes, fds: Sequence[int], namespace: int | None = None) -> int:
    """Return a new child of this process, which is given a job and descriptors; its process id.

    Args:
      job: a message.
      fds: of the job.
      namespace: descriptor of a process (pidfd) that is the first of the namespace of process ids in which the child is
        to be; None: it is in that of the seed.

    Raises:
      OSError: the machine has no room for it.
      SeedDiedError: the seed has ended.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
      with theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        socket.send_fds(ours, [job], fds)
        try:
          socket.send_fds(self._control, [b'f'], [theirs.fileno()] + [namespace] * (namespace is not None))
        except (BrokenPipeError, ConnectionResetError) as error:
          raise SeedDiedError from error
      ours.settimeout(START_S)
      try:
        answer, ancillary, _, _ = ours.recvmsg(64, socket.CMSG_SPACE(CREDENTIALS.size))
      except ConnectionResetError:  # It has ended with the job unread.
        answer = b''
    if not answer:
      raise OSError('its process ended before it began')
    if answer != b'0':
      raise OSError(int(answer), os.strerror(int(answer)))
    (pid,) = (CREDENTIALS.unpack(data)[0] for _, kind, data in ancillary if kind == socket.SCM_CREDENTIALS)
    return pid

  def close(self) -> None:
    """End the seed."""
    self._control.close()
    os.waitpid(self.pid, 0)


def _serve(control: socket.socket, program: Program, addresses: Sequence[int]) -> None:
  """Copy this process for every message, until there are no more; return in the seed, and in copies as well."""
  seed = (os.getpid(), os.getppid())
  while True:
    message, fds, _, _ = socket.recv_fds(control, 1, 2, MSG_CMSG_CLOEXEC)
    if not message:
      return
    try:
      if len(fds) > 1:
        confinement.call('setns', fds[1], CLONE_NEWPID)
      _clone(seed)
    except OSError as error:
      os.write(fds[0], str(error.errno).encode())
    if (os.getpid(), os.getppid()) != seed:
      break
    for fd in fds:
      os.close(fd)
  for address in addresses:
    ctypes.c_int.from_address(address).value = threading.get_native_id()
  control.close()
  for fd in fds[1:]:
    os.close(fd)
  with socket.socket(fileno=fds[0]) as channel:
    channel.send(b'0')
    job, given, _, _ = socket.recv_fds(channel, MESSAGE, 16, MSG_CMSG_CLOEXEC)
  program(job, given)


def _clone(seed: tuple[int, int]) -> None:
  """Forks this process as `os.fork` does, but for the parent of the new one and a result, which there is not.

  Raises:
    OSError: there is no room for another process.
  """
  _python.PyOS_BeforeFork()
  ctypes.set_errno(0)
  number = confinement.CHECKED['clone'][confinement.machine()]
  _libc.syscall(*(ctypes.c_long(value) for value in (number, CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)))
  if (os.getpid(), os.getppid()) != seed:
    return _python.PyOS_AfterFork_Child()
  code = ctypes.get_errno()
  _python.PyOS_AfterFork_Parent()
  if code:
    raise OSError(code, os.strerror(code))


def _words_of_thread() -> list[int]:
  """Return the beginning of what the C library knows of this thread, as integers of 32 bits."""
  pthread_self = ctypes.CDLL(None).pthread_self
  pthread_self.restype = ctypes.c_void_p
  return list(struct.unpack(f'={THREAD_BYTES // 4}i', ctypes.string_at(pthread_self(), THREAD_BYTES)))


def _thread_id_addresses(parent: int, before: Sequence[int]) -> list[int]:
  """Where the C library notes the id of this thread, which must be a child of the C library's own fork.

  Its fork writes the new id there, the system call alone does not. Unless this is made up for, for example
  `signal.pthread_kill` does not reach the first thread of a program.

  Args:
    parent: process id of the parent, when it had one thread.
    before: what it knew of that.
  """
  pthread_self = ctypes.CDLL(None).pthread_self
  pthread_self.restype = ctypes.c_void_p
  own, after = threading.get_native_id(), _words_of_thread()
  pairs = enumerate(zip(before, after, strict=True))
  return [pthread_self() + 4 * at for at, (old, new) in pairs if (old, new) == (parent, own)]


def _keep_only(descriptors: Sequence[int]) -> None:
  """Close every descriptor from 3 on but these."""
  first = 3
  for fd in sorted(descriptors):
    with contextlib.suppress(OSError):
      if fd > first:
        confinement.call('close_range', first, fd - 1, 0)
    first = max(first, fd + 1)
  confinement.close_from(first)
