"""Config files: Python files with `get_config()`, read with arguments and overrides."""

from __future__ import annotations

from collections.abc import Iterable
import importlib.util
import inspect
import os
import pathlib
import sys

from sdpo_jax.config.fields import did_you_mean
from sdpo_jax.config.locations import model_path, shipped, shipped_folder
from sdpo_jax.config.overrides import override
from sdpo_jax.config.validated import Config
from sdpo_jax.errors import UserError


def read(text: str, overrides: Iterable[tuple[str, str]] = ()) -> Config:
  """Return the settings of a config file, which are not validated yet.

  Args:
    text: FILE.py, or FILE.py:name=value,… with arguments of its `get_config()`. If a file `configs/…` does not exist,
      the one of this installation is read. A `model.path` that does not exist is looked for beside the file, and so are
      imported modules, after installed packages.
    overrides: (setting, text) pairs, in order: see `override`.

  Raises:
    UserError: there is no such file, it has no get_config(), the arguments are wrong, or a setting is unknown or of the
      wrong type.
  """
  path, arguments = _file_and_arguments(text)
  if not os.path.isfile(path):  # Names of any length.
    found = shipped(path)
    if found is None or not found.is_file():
      known = [f'configs/{file.name}' for file in shipped_folder().glob('[a-z]*.py')]
      raise UserError(
        f'--config={path}: there is no such file; those of this project are in configs/{did_you_mean(str(path), known)}'
      )
    path = found
  spec = importlib.util.spec_from_file_location(f'config_{path.stem}', path)
  if spec is None or spec.loader is None:
    raise UserError(f'--config={path} is not a Python file.')
  module = importlib.util.module_from_spec(spec)
  if path.resolve().parent != shipped_folder():
    make_importable(path.parent)
  sys.modules[spec.name] = module  # Graders that it defines are sent to processes by their module's name.
  try:
    spec.loader.exec_module(module)
  except SyntaxError as error:
    raise UserError(f'--config={path} is not valid Python: {error}.') from error
  if not hasattr(module, 'get_config'):
    raise UserError(f'--config={path} has no function get_config(); see configs/quickstart.py for an example.')
  signature = inspect.signature(module.get_config)
  try:
    signature.bind(**arguments)
  except TypeError as error:
    raise UserError(
      f'--config={text}: {error}; it takes {", ".join(signature.parameters) or "no arguments"}.'
    ) from error
  config = module.get_config(**arguments)
  if not isinstance(config, Config):
    raise UserError(f'get_config() of {path} returns {type(config).__name__}, not sdpo_jax.config.Config.')
  config.model.path = model_path(config.model.path, path)
  for name, value in overrides:
    override(config, name, value)
  return config


def make_importable(folder: pathlib.Path) -> None:
  """Let modules in a folder be imported by their names, unless the name is one of an installed package."""
  if str(folder.resolve()) not in map(os.path.realpath, sys.path):
    sys.path.append(str(folder.resolve()))


def _file_and_arguments(text: str) -> tuple[pathlib.Path, dict[str, str]]:
  """Split 'FILE.py:name=value,…' into the file and the arguments of its get_config()."""
  path, marked, rest = text.partition('.py:')
  if not marked:
    return pathlib.Path(text), {}
  pairs = [part.partition('=') for part in rest.split(',') if part]
  wrong = [name for name, equals, _ in pairs if not equals]
  if wrong:
    raise UserError(f'--config={text}: {wrong[0]!r} is not name=value.')
  return pathlib.Path(f'{path}.py'), {name: value for name, _, value in pairs}
