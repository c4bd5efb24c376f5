"""Paths in configs, resolved independently of the directory in which a command is started."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re

# Where compiled programs are kept, which the next start of a command or service loads and runs unchecked.
CACHE = '~/.cache/sdpo_jax'


def beside(config_file: str, name: str) -> str:
  """Return the path of a file or folder in the folder of a config.

  It is relative if it is below the working directory, so that the saved settings of a run do not name a machine's
  paths.

  Args:
    config_file: path of the config, its `__file__`.
    name: path of the file, relative to the config's folder.
  """
  path = pathlib.Path(os.path.abspath(os.path.join(os.path.dirname(config_file), name)))
  here = pathlib.Path.cwd()
  return str(path.relative_to(here) if path.is_relative_to(here) else path)


def model_path(path: str, config_file: pathlib.Path) -> str:
  """Return `model.path` of a config; a relative path that does not exist may be a folder beside the config.

  Args:
    path: the setting: a folder, a gs:// address or a name on the hub.
    config_file: path of the config.
  """
  if not path or '://' in path or os.path.isabs(path) or os.path.exists(path):
    return path
  return beside(str(config_file), path) if (config_file.parent / path).is_dir() else path


def paths(setting: str | os.PathLike) -> list[str]:
  """Return the paths that a setting names, divided by commas; a local path with commas that exists is one."""
  given = os.fspath(setting)
  return [given] if os.path.exists(os.path.expanduser(given)) else [path.strip() for path in given.split(',')]


def shipped_folder() -> pathlib.Path:
  """Return the folder with the configs and models of this installation."""
  return pathlib.Path(importlib.util.find_spec('sdpo_jax.configs').origin).resolve().parent


def shipped(path: pathlib.Path) -> pathlib.Path | None:
  """Return the path of a file `configs/…` in this installation; None if it is not such a path or does not exist."""
  if path.parts[:1] != ('configs',) or '..' in path.parts:
    return None
  found = shipped_folder().joinpath(*path.parts[1:])
  return found if found.exists() else None


def is_hub_name(path: str) -> bool:
  """Return whether a path can only be a hub name: OWNER/NAME without a local folder OWNER, other than configs/NAME."""
  return bool(re.fullmatch(r'(?!\.|configs/)[\w.-]+/[\w.-]+', path)) and not pathlib.Path(path).parent.is_dir()
