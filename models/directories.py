"""Directories of models and adapters, on this machine, in an object store or on the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Sequence
import os
import pathlib

from sdpo_jax import files
from sdpo_jax.config.locations import is_hub_name, shipped
from sdpo_jax.errors import UserError
from sdpo_jax.models import first_reading, hub, remote_files


def is_local(path: str | os.PathLike) -> bool:
  """Return whether `path` is a directory of this machine, for which `fetch` downloads nothing."""
  return files.is_local(path) and os.path.isdir(_place(path))


def _place(path: str | os.PathLike) -> pathlib.Path:
  """Return a local path; for `configs/…` that the working directory does not have, the one in this installation."""
  local = pathlib.Path(path).expanduser()
  return local if os.path.exists(local) else shipped(local) or local


def fetch(path: str | os.PathLike, patterns: Sequence[str], setting: str, what: str) -> pathlib.Path:
  """Return the local directory for `path`: itself, a copy of gs://…, or the hub's snapshot of a name.

  The network is not accessed for a path whose parent directory exists, or that cannot be a hub name (/…, ./…, ~/…,
  configs/…). `configs/…` is that of the working directory, or else of this installation.

  Args:
    path: path of the directory, or name on the hub.
    patterns: name patterns of the files to fetch.
    setting: the setting that holds the path, for error messages.
    what: what the directory holds, such as 'model', for error messages.

  Raises:
    UserError: there is no such directory, or reading a file of it takes too much.
  """
  root = _fetched(path, patterns, setting, what)
  first_reading.check(root)
  return root


def _fetched(path: str | os.PathLike, patterns: Sequence[str], setting: str, what: str) -> pathlib.Path:
  local = _place(path)
  if not files.is_local(path):
    return remote_files.fetch(str(path), tuple(patterns), setting, what)
  if os.path.isdir(local):  # Names of any length.
    return local
  if not is_hub_name(str(path)):
    raise UserError(
      f'The {what} directory {local} does not exist: set {setting} to one that does, or to a name on the hub.'
    )
  return hub.fetch(str(path), patterns, setting, what)
