"""Downloads from and uploads to the Hugging Face hub; as its libraries retry long, reachability is checked first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import contextlib
import functools
import json
import os
import pathlib
import shlex
import time

from sdpo_jax.errors import UserError, first_line

ATTEMPTS = 2  # Number of attempts to reach the hub.
TIMEOUT_S = 10.0  # Timeout of an attempt.
PAUSE_S = 1.0  # Pause between two attempts.


# Files of an earlier upload that programs would read instead of, or in addition to, those of a new one.
STALE = ('model*.safetensors*', 'adapter_*', 'base_fingerprint.json', 'cartridge.*', 'config.json', 'config.yaml')
DATA_SET = 'data set'  # The kind in `fetch` that has a name space of its own on the hub.


def fetch(
  name: str,
  patterns: Sequence[str],
  setting: str = 'model.path',
  what: str = 'model',
  revision: str | None = None,
) -> pathlib.Path:
  """Return the directory in the hub's cache with files of a model or data set, after downloading missing ones.

  Args:
    name: organisation/name.
    patterns: name patterns of the files to fetch.
    setting: the setting that holds the name, for error messages.
    what: what is fetched, such as `DATA_SET`.
    revision: branch, tag or commit; None: the main branch.

  Raises:
    UserError: the hub cannot be reached, has nothing of that name, or denies this user access.
  """
  from huggingface_hub import snapshot_download

  options = {} if what != DATA_SET else {'repo_type': 'dataset', 'revision': revision}
  with _explained(name, setting, what):
    return pathlib.Path(snapshot_download(name, allow_patterns=list(patterns), **options))


def names(name: str, folder: pathlib.Path, setting: str, revision: str | None) -> list[str]:
  """Return the names of a data set's files on the hub; if it cannot be reached, of those in `folder` from `fetch`."""
  from huggingface_hub import HfApi, constants

  if unreachable() or constants.is_offline_mode():
    return names_below(folder)
  with _explained(name, setting, DATA_SET):
    return sorted(HfApi().list_repo_files(name, repo_type='dataset', revision=revision))


def names_below(folder: pathlib.Path) -> list[str]:
  """Return the relative names of all files below a folder except hidden ones, as the hub lists those of a data set."""
  paths = (path.relative_to(folder) for path in folder.rglob('*') if path.is_file())
  return sorted(path.as_posix() for path in paths if not any(part.startswith('.') for part in path.parts))


@contextlib.contextmanager
def _explained(name: str, setting: str, what: str) -> Iterator[None]:
  """Turn errors of the hub into a UserError that names the way out."""
  from huggingface_hub import errors

  reason = unreachable()
  try:
    yield
  except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, ValueError, OSError) as error:
    where = f'{setting}={name!r} is not a directory here'
    if reason:
      raise UserError(
        f'{where}, and {reason}: connect this machine, or set {setting} to a Hugging Face {what} directory.'
      ) from error
    why = _why(error, name, what)
    raise UserError(f'{where}, and it cannot be loaded from the Hugging Face hub: {why}') from error


def check_push(name: str) -> None:
  """Raise UserError if a push to a model on the hub is sure to fail."""
  from huggingface_hub import HfApi

  with _pushing(name, 'nothing was exported'):
    if HfApi().whoami().get('auth', {}).get('accessToken', {}).get('role') == 'read':
      raise ValueError('the token that is logged in may only read: run `hf auth login` with one that may write')


def push(folder: str | os.PathLike, name: str, *, private: bool) -> None:
  """Upload a directory to a model on the hub, which is created if needed.

  Weights, adapters and cartridges of earlier uploads are removed from its newest version.

  Args:
    folder: the directory.
    name: OWNER/NAME.
    private: whether the model must be private.

  Raises:
    UserError: it cannot be uploaded, or should be private and is public already; the directory stays.
  """
  from huggingface_hub import HfApi

  upload = shlex.join(['hf', 'upload', name, str(folder), *(['--private'] if private else [])])
  with _pushing(name, f'what was exported is in {folder}, and `{upload}` uploads it'):
    api = HfApi()
    api.create_repo(name, private=private or None, exist_ok=True)
    if private and not api.model_info(name).private:
      raise ValueError('it exists and is public: name another model, or leave --private out')
    api.upload_folder(
      repo_id=name, folder_path=folder, commit_message='Export of sdpo_jax', delete_patterns=list(STALE)
    )


@contextlib.contextmanager
def _pushing(name: str, state: str) -> Iterator[None]:
  """Turn errors of a push into a UserError that names the way out and ends with `state`, which says what was done."""
  import httpx2
  from huggingface_hub import constants, errors
  from huggingface_hub.utils import validate_repo_id

  try:
    if name.count('/') != 1:
      raise ValueError('write it as OWNER/NAME')
    validate_repo_id(name)
    if reason := unreachable() or ('HF_HUB_OFFLINE is set' if constants.is_offline_mode() else None):
      raise ValueError(f'{reason}: let this machine reach the hub, or leave --push out')
    yield
  except (httpx2.HTTPError, OSError, ValueError, RuntimeError) as error:
    cause = error.__cause__ if isinstance(error.__cause__, errors.HfHubHTTPError) else error
    status = cause.response.status_code if isinstance(cause, errors.HfHubHTTPError) else None
    if isinstance(error, errors.LocalTokenNotFoundError) or status == 401:
      why = 'there is no token here, or one that the hub does not know: run `hf auth login`'
    elif status == 403:
      why = f'you may not write there ({cause.server_message}): name a model of yours, with a token that may write'
    else:
      why = _why(cause, name, 'model').rstrip('.')
    raise UserError(f'--push={name}: {why}; {state}.') from error


def _why(error: Exception, name: str, what: str) -> str:
  """Return why something cannot be loaded, since the first line of a library's message is often only a status."""
  from huggingface_hub import constants, errors

  if isinstance(error, errors.GatedRepoError):
    page = f'{constants.ENDPOINT}/{"datasets/" if what == DATA_SET else ""}{name}'
    return f'its publisher grants access on request: ask for it at {page}, then run `hf auth login` here.'
  if isinstance(error, errors.RepositoryNotFoundError):
    return f'there is no such {what}, or it is private: correct the name, or run `hf auth login`.'
  if isinstance(error, errors.RevisionNotFoundError):
    return 'it has no such revision.'
  if isinstance(error, json.JSONDecodeError):  # A sign-in page of a network, for example.
    return f'what answers for {constants.ENDPOINT} is not the hub: see that this machine reaches it.'
  return first_line(error)


@functools.cache
def unreachable() -> str | None:
  """Return why the hub cannot be reached; None if it answers or HF_HUB_OFFLINE is set.

  If it cannot be reached, its libraries are set to work offline, with what was downloaded earlier.
  """
  from huggingface_hub import constants

  if constants.is_offline_mode() or (reason := _knock(constants.ENDPOINT)) is None:
    return None
  constants.HF_HUB_OFFLINE = True
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
