"""The command that starts the zygote in a bubblewrap: for machines without Landlock where `bwrap` is installed.

Programs find a read-only file system of nothing but Python, in namespaces without network and without processes of
others. There is no /proc in it, which would show the memory of the zygote, unless the zygote needs one to give every
program a view of its own (view.py), in which there is none again; and no shell. The programs' own seccomp filter and
limits come on top, as everywhere; it also forbids new user namespaces, for which other set-ups need --disable-userns.
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
LOADER = ('/lib', '/lib64', '/usr/lib', '/usr/lib64', '/etc/ld.so.cache')  # What a dynamically linked Python needs.


def find() -> str:
  """Path of bwrap; raises Unsupported where it is not installed."""
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
    bwrap: path of bwrap.
    readable: directories of the Python installation.
    files: the zygote first, then what it loads by path.
    environment: of the zygote; it has no other.
    scratch_bytes: size of the scratch file system, the only one that can be written to.
    descriptor: of the zygote's control socket.
    proc: whether it has a /proc.
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
