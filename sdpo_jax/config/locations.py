"""Where the files are that a config names, whatever directory a command is started in."""

from __future__ import annotations

import os
import pathlib


def beside(config_file: str, name: str) -> str:
  """Return the path of a file or folder that lies beside a config.

  Beneath the working directory it is relative, so that what a run saves of its settings does not name a machine.

  Args:
    config_file: of the config, its `__file__`.
    name: of the file, relative to the config's folder.
  """
  path = pathlib.Path(os.path.abspath(config_file)).parent / name
  here = pathlib.Path.cwd()
  return str(path.relative_to(here) if path.is_relative_to(here) else path)


def model_path(path: str, config_file: pathlib.Path) -> str:
  """Return `model.path` of a config: as it is where the working directory has it, or else the folder beside the config.

  Args:
    path: the setting: a folder, a gs:// address or a name on the hub.
    config_file: of the config.
  """
  if not path or '://' in path or os.path.isabs(path) or os.path.exists(path):
    return path
  return beside(str(config_file), path) if (config_file.parent / path).is_dir() else path
