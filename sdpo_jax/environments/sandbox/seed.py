"""A fork server whose processes find nothing of one another in their memory: it never learns anything to leak.

A process that waits for programs knows how they ended, and any fork of it knows that too: freed memory can still be
read. So the zygote does not fork programs itself. Before the first job it forks the *seed*, which only copies itself
when told to and is told nothing else: the job and its descriptors stay unread in a socket, from which the copy takes
them. The copy is a child of the zygote (CLONE_PARENT), not of the seed, which therefore never learns how a program
ended, nor its process id: the result of the system call stays in a register. Loaded by path; standard library only.
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
CREDENTIALS = struct.Struct('=iII')  # A sender's process, user and group in the receiver's ids; see unix(7).
MESSAGE = 2**16  # Maximum bytes of a message.
START_S = 60.0  # A copy that has not started by then never will.
THREAD_BYTES = 1024  # Start of the C library's record of a thread, which contains its id.

_python, _libc = ctypes.pythonapi, ctypes.PyDLL(None, use_errno=True)  # Neither releases the interpreter's lock.
for _hook in (_python.PyOS_BeforeFork, _python.PyOS_AfterFork_Parent, _python.PyOS_AfterFork_Child):
  _hook.restype = None
_libc.pthread_self.restype = ctypes.c_void_p
_libc.syscall.restype = None  # Ensures that no process id is ever stored.

Program = Callable[[bytes, list[int]], None]  # Called with a job and its descriptors, in the job's process.


class SeedDiedError(Exception):
  """The seed has ended."""


class Seed:
  """The seed, as seen by the process that made it and is the parent of its copies."""

  def __init__(self, program: Program, keep: Sequence[int] = ()):
    """Fork the seed from this process, which must have one thread.

    Args:
      program: run by each copy, which ends when it returns.
      keep: descriptors that copies need besides those of their job; all others from 3 on are closed in the seed.
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
    """Start a child of this process with a job and its descriptors; return its process id.

    Args:
      job: a message.
      fds: the job's descriptors.
      namespace: pidfd of the first process of the PID namespace for the child; None: the seed's namespace.

    Raises:
      OSError: the machine has no room for another process.
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
      except ConnectionResetError:  # The copy ended with the job unread.
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
  """Copy this process for every message; return in the seed after the last message, in copies after `program`."""
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
  """Fork this process as `os.fork` does, except that the caller's parent becomes the parent and nothing is returned.

  Raises:
    OSError: the machine has no room for another process.
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
  """Return the start of the C library's record of this thread, as 32-bit integers."""
  return list(struct.unpack(f'={THREAD_BYTES // 4}i', ctypes.string_at(_libc.pthread_self(), THREAD_BYTES)))


def _thread_id_addresses(parent: int, before: Sequence[int]) -> list[int]:
  """Return where the C library stores this thread's id; the thread must be a child of the C library's own fork.

  That fork writes the new id there, but the plain system call does not. Unless this is corrected,
  `signal.pthread_kill`, for example, does not reach the first thread of a program.

  Args:
    parent: process id of the parent when it had one thread.
    before: the parent's words at that time.
  """
  own, here, after = threading.get_native_id(), _libc.pthread_self(), _words_of_thread()
  pairs = enumerate(zip(before, after, strict=True))
  return [here + 4 * at for at, (old, new) in pairs if (old, new) == (parent, own)]


def _keep_only(descriptors: Sequence[int]) -> None:
  """Close every descriptor from 3 on but these."""
  first = 3
  for fd in sorted(descriptors):
    with contextlib.suppress(OSError):
      if fd > first:
        confinement.call('close_range', first, fd - 1, 0)
    first = max(first, fd + 1)
  confinement.close_from(first)
