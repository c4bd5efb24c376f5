"""The bubblewrap command that starts the zygote on machines without Landlock where `bwrap` is installed.

Programs see a read-only file system with only Python in it, in namespaces without network or other processes. There is
no shell, and no /proc, which would show the zygote's memory; only if the zygote gives every program a view of its own
(view.py) does the zygote itself need a /proc, which the programs do not see. The programs' own seccomp filter and
limits apply as well; the filter also forbids new user namespaces, for which other set-ups need --disable-userns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import os
import pathlib
import shutil
import sys
import sysconfig

from sdpo_jax.environments.sandbox.confinement import Unsupported

SCRATCH = '/scratch'
NOBODY = '65534'
LOADER = ('/lib', '/lib64', '/usr/lib', '/usr/lib64', '/etc/ld.so.cache')  # Needed by a dynamically linked Python.


def find() -> str:
  """Return the path of bwrap; raises Unsupported if it is not installed."""
  path = shutil.which('bwrap')
  if path is None:
    raise Unsupported('bwrap is not installed')
  return path


def arguments(
  bwrap: str,
  readable: Sequence[str],
  files: Sequence[pathlib.Path],
  environment: Mapping[str, str],
  scratch_bytes: int,
  descriptor: int,
  *,
  proc: bool,
) -> list[str]:
  """Return the command line of a zygote in a bubblewrap of its own.

  Args:
    bwrap: the path of bwrap.
    readable: directories of the Python installation.
    files: the zygote's file first, then the files that it loads by path.
    environment: the zygote's complete environment.
    scratch_bytes: size of the scratch file system, the only writable one.
    descriptor: descriptor of the zygote's control socket.
    proc: whether /proc is mounted.
  """
  python = os.path.realpath(sys.executable)
  library = os.path.join(sysconfig.get_config_var('LIBDIR') or '', sysconfig.get_config_var('INSTSONAME') or '')
  command = [bwrap, '--unshare-all', '--unshare-user', '--uid', NOBODY, '--gid', NOBODY, '--hostname', 'sandbox']
  command += ['--die-with-parent', '--new-session', '--clearenv', '--cap-drop', 'ALL']
  for name, value in environment.items():
    command += ['--setenv', name, value]
  for path in [*LOADER, library]:
    command += ['--ro-bind-try', path, path]
  for path in [python, *readable, *map(str, files)]:
    command += ['--ro-bind', path, path]
  command += ['--proc', '/proc'] * proc
  command += ['--size', str(scratch_bytes), '--tmpfs', SCRATCH, '--remount-ro', '/', '--chdir', SCRATCH, '--']
  return [*command, python, '-I', '-X', 'utf8', str(files[0]), str(descriptor)]
