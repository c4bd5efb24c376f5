"""Runs another program in its place, which gets SIGTERM when its parent process ends for any reason.

python embedded_child.py PARENT_PID PROGRAM [ARGUMENT …]
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
  """Ask the kernel for the signal, and replace this process by the program."""
  parent, *command = sys.argv[1:]
  libc = ctypes.CDLL(None, use_errno=True)
  if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0):
    code = ctypes.get_errno()
    raise OSError(code, os.strerror(code), 'prctl')
  if os.getppid() != int(parent):  # The parent ended before prctl was called.
    raise SystemExit(0)
  os.execv(command[0], command)


if __name__ == '__main__':
  main()
