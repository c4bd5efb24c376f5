"""Downloads from the Hugging Face hub; its libraries retry for half a minute, so reachability is checked once first."""

from __future__ import annotations

from collections.abc import Sequence
import functools
import pathlib
import sys
import time

from sdpo_jax.errors import UserError, first_line

ATTEMPTS = 2
TIMEOUT_S = 10.0  # Timeout of an attempt.
PAUSE_S = 1.0  # Pause between two attempts.


def fetch(name: str, patterns: Sequence[str], setting: str = 'model.path', what: str = 'model') -> pathlib.Path:
  """Return the directory of the hub's cache with a model's files, after downloading those that are missing.

  Args:
    name: organisation/model.
    patterns: name patterns of the files to fetch.
    setting: the setting that holds the name, for error messages.
    what: what is fetched, for error messages.

  Raises:
    UserError: the hub cannot be reached, has no such model, or denies this user access.
  """
  from huggingface_hub import errors, snapshot_download

  reason = unreachable()
  try:
    return pathlib.Path(snapshot_download(name, allow_patterns=list(patterns)))
  except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError) as error:
    where = f'{setting}={name!r} is not a directory here'
    if reason:
      raise UserError(
        f'{where}, and {reason}: connect this machine, or set {setting} to a Hugging Face {what} directory.'
      ) from error
    raise UserError(f'{where}, and it cannot be loaded from the Hugging Face hub: {_why(error, name)}') from error


def _why(error: Exception, name: str) -> str:
  """Return why a model cannot be loaded; the first line of the library's message is often only the status."""
  from huggingface_hub import constants, errors

  if isinstance(error, errors.GatedRepoError):
    page = f'{constants.ENDPOINT}/{name}'
    return f'its publisher grants access on request: ask for it at {page}, then run `hf auth login` here.'
  if isinstance(error, errors.RepositoryNotFoundError):
    return 'there is no such model, or a private one: correct the name, or run `hf auth login`.'
  return first_line(error)


@functools.cache
def unreachable() -> str | None:
  """Return why the hub cannot be reached; None if it answers or HF_HUB_OFFLINE is set.

  If it cannot be reached, its libraries are set to work offline, with earlier downloads.
  """
  from huggingface_hub import constants

  if constants.is_offline_mode():
    return None
  reason = _knock(constants.ENDPOINT)
  if reason is None:
    return None
  constants.HF_HUB_OFFLINE = True
  if 'datasets' in sys.modules:  # `datasets` copies the constant when it is imported.
    sys.modules['datasets'].config.HF_HUB_OFFLINE = True
  return f'{constants.ENDPOINT} cannot be reached from here ({reason})'


def _knock(address: str) -> str | None:
  """Return why a server does not answer; None if it gives any answer."""
  import httpx2
  from huggingface_hub import get_session

  reason = None
  for attempt in range(ATTEMPTS):
    if attempt:
      time.sleep(PAUSE_S)
    try:
      get_session().head(address, timeout=TIMEOUT_S)
      return None
    except (httpx2.HTTPError, OSError) as error:
      reason = first_line(error)
  return reason
