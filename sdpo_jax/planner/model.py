"""The architecture of a model from its config.json alone."""

from __future__ import annotations

import pathlib
import re
from typing import Any

from sdpo_jax.config import Config
from sdpo_jax.errors import UserError
from sdpo_jax.models import first_reading, hub, huggingface, model_files, published
from sdpo_jax.models.decoder import DecoderPolicy


def read(config: Config, model_config: str | None = None) -> tuple[DecoderPolicy, str]:
  """Return the policy that a run would train and the source of its sizes; arguments and errors as for `sizes`."""
  values, source = sizes(config, model_config)
  return huggingface.describe(values, config.model), source


def sizes(config: Config, model_config: str | None = None) -> tuple[dict[str, Any], str]:
  """Return the config.json of a run's model and its source; no weights are read or downloaded.

  Args:
    config: settings; model.path may be a directory, a model of `sdpo_jax.models.published`, or another hub name.
    model_config: a config.json to use instead.

  Raises:
    UserError: there is no config.json, the hub cannot provide it, or its architecture is not supported.
  """
  path = model_config or config.model.path
  local = pathlib.Path(path).expanduser()
  if model_config is not None and not local.is_file():
    raise UserError(f'--model_config={model_config}: there is no such file; it must be the config.json of a model.')
  if local.is_dir():
    first_reading.check(local)
    local /= 'config.json'
  if local.is_file():
    return model_files.read_json(local.parent, local.name), str(local)
  values = published.config_json(path)
  if values is not None:
    return values, f'the published sizes of {path}'
  if not re.fullmatch(r'[\w-][\w.-]*/[\w.-]+', path):
    raise UserError(
      f'model.path={path!r} has no config.json: name a model directory or a hub model, or pass a config.json with '
      '--model_config=FILE.json.'
    )
  return _download(path), f'config.json of {path} on the hub'


def _download(name: str) -> dict[str, object]:
  from huggingface_hub import errors, hf_hub_download

  hub.unreachable()  # If it is, go offline, so that the download fails at once.
  try:
    file = pathlib.Path(hf_hub_download(name, 'config.json'))
  except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError, ValueError) as error:
    raise UserError(
      f'model.path={name!r} is no directory here, and the Hugging Face hub does not give its config.json '
      f'({type(error).__name__}): pass one with --model_config=FILE.json.'
    ) from error
  first_reading.check(file.parent)
  return model_files.read_json(file.parent, file.name)
