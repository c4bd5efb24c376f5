"""Which folders may be a workspace or be read by its commands, and which variables commands get."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import os
import pathlib
import re
import sys
import sysconfig

import sdpo_jax
from sdpo_jax.config.locations import CACHE
from sdpo_jax.environments.sandbox.sandbox import installation
from sdpo_jax.errors import UserError, printable
from sdpo_jax.files import is_local

TEMPORARY = ('/tmp', '/var/tmp')
_CLOSED = ('/', '/usr', '/bin', '/sbin', '/lib', '/lib64', '/opt')
_CLOSED_WITH_ALL_BELOW = ('/proc', '/sys', '/dev', '/run', '/etc')
_VARIABLE = re.compile('[A-Za-z_][A-Za-z0-9_]*')


def checked_workspace(named: str | pathlib.Path) -> pathlib.Path:
  """Return the real path of a workspace.

  Raises:
    UserError: it is not a folder, cannot be written, belongs to the system, or has files that this program consists of,
      which would run without any confinement once a command has changed them.
  """
  path = pathlib.Path(os.path.realpath(os.path.expanduser(named)))
  if not os.path.isdir(path):  # A name of any length.
    raise UserError(f'The workspace {named} is not a folder: name the folder in which the model should work.')
  if str(path) in _CLOSED or any(map(path.is_relative_to, _CLOSED_WITH_ALL_BELOW)):
    raise UserError(f'The workspace {path} is a system folder: name one of your own.')
  if str(path) in TEMPORARY:
    raise UserError(f'The workspace {path} is shared by all users: name a folder within it.')
  own, imported = _own_code(), _places(filter(None, sys.path))
  for code in own | imported:
    if code.is_relative_to(path) or (code in own and path.is_relative_to(code)):
      raise UserError(
        f'The workspace {path} has files of this program, in {code}: what the model changes there would run without '
        'confinement at the next start. Name another folder, such as one beside or below it for your project, or '
        'install the program and its Python outside of the workspace.'
      )
  if os.statvfs(path).f_flag & os.ST_RDONLY:
    raise UserError(f'The workspace {path} is on a read-only disk: name a folder that can be written.')
  if not os.access(path, os.W_OK | os.X_OK):
    raise UserError(f'The workspace {path} is not yours to write: name another folder.')
  return path


def outside(workspace: pathlib.Path, named: str, where: str, way_out: str = 'move it') -> str:
  """Return the absolute path of a file or folder that a person has named.

  Raises:
    UserError: it, or what it links to, is in the workspace; the message begins with `where`.
  """
  path = os.path.abspath(os.path.expanduser(named))
  for inside in _places([path]):
    if inside.is_relative_to(workspace):
      raise UserError(f'{where}: {inside} is in the workspace, so the model could change what runs as you: {way_out}.')
  return path


def _own_code() -> set[pathlib.Path]:
  """Return the folders of this program, of what it imports, and of what it has compiled."""
  package, *checkout = sdpo_jax.__path__
  own = [package, *(f'{root}/{name}' for root in checkout for name in ('models', 'launch', 'configs'))]
  own += [sysconfig.get_path('scripts'), *installation()[0]]
  kept = [path for path in (os.path.expanduser(CACHE), os.environ.get('JAX_COMPILATION_CACHE_DIR')) if path]
  return _places([*filter(os.path.isdir, own), *filter(is_local, kept)])


def _places(paths: Iterable[str | os.PathLike[str]]) -> set[pathlib.Path]:
  """Return where paths are, and where the links in them lead: who can change either can change what is found."""
  return {pathlib.Path(found(path)) for path in paths for found in (os.path.abspath, os.path.realpath)}


def readable_folders(named: Sequence[str], workspace: pathlib.Path, private: pathlib.Path) -> list[str]:
  """Return the real paths of folders that commands may read, too.

  Args:
    named: folders, as given to --readable.
    workspace: the real path of the workspace.
    private: a folder that they must not read.

  Raises:
    UserError: one is not a folder, or one of the workspace, of the system or of this program.
  """
  found = []
  for name in named:
    path = pathlib.Path(os.path.realpath(os.path.expanduser(name)))
    if not (name and os.path.isdir(path)):
      raise UserError(f'--readable={name} is not a folder.')
    if path.is_relative_to(workspace):
      raise UserError(f'--readable={name} is in the workspace, which commands read anyway: leave it out.')
    own = private.resolve()
    if own.is_relative_to(path) or path.is_relative_to(own):
      raise UserError(f'--readable={name}: the histories of sessions are in {own}, which the model must not read.')
    if str(path) in ('/', *TEMPORARY) or any(map(path.is_relative_to, _CLOSED_WITH_ALL_BELOW[:4])):
      raise UserError(f'--readable={name}: commands have a {path} of their own; name another folder.')
    found.append(str(path))
  return found


def variables(given: Sequence[str], own: Mapping[str, str]) -> dict[str, str]:
  """Return environment variables for commands, given as NAME=VALUE, or as NAME of one of our own.

  Raises:
    UserError: one is not set, or not a name.
  """
  found = {}
  for text in given:
    name, equals, value = text.partition('=')
    if not _VARIABLE.fullmatch(name):
      raise UserError(f'--env={printable(text)}: write the name of a variable, or NAME=VALUE.')
    if not equals and name not in own:
      raise UserError(f'--env={name}: this variable is not set; give it a value with --env={name}=VALUE.')
    found[name] = value if equals else own[name]
  return found
