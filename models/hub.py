"""Downloads from the Hugging Face hub; its libraries retry for half a minute, so reachability is checked once first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import contextlib
import functools
import pathlib
import time

from sdpo_jax.errors import UserError, first_line

ATTEMPTS = 2
TIMEOUT_S = 10.0  # Timeout of an attempt.
PAUSE_S = 1.0  # Pause between two attempts.


DATA_SET = 'data set'  # Of the kinds of `fetch`, the one with a name space of its own on the hub.


def fetch(
  name: str,
  patterns: Sequence[str],
  setting: str = 'model.path',
  what: str = 'model',
  revision: str | None = None,
) -> pathlib.Path:
  """Return the directory of the hub's cache with a model's or data set's files, downloading those that are missing.

  Args:
    name: organisation/model.
    patterns: name patterns of the files to fetch.
    setting: the setting that holds the name, for error messages.
    what: what is fetched, such as `DATA_SET`.
    revision: branch, tag or commit; None: the main branch.

  Raises:
    UserError: the hub cannot be reached, has no such model, or denies this user access.
  """
  from huggingface_hub import snapshot_download

  options = {} if what != DATA_SET else {'repo_type': 'dataset', 'revision': revision}
  with _explained(name, setting, what):
    return pathlib.Path(snapshot_download(name, allow_patterns=list(patterns), **options))


def names(name: str, folder: pathlib.Path, setting: str, revision: str | None) -> list[str]:
  """Return the names of a data set's files; without the hub, of those in the folder that `fetch` has returned."""
  from huggingface_hub import HfApi, constants

  if unreachable() or constants.is_offline_mode():
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob('*') if path.is_file())
  with _explained(name, setting, DATA_SET):
    return sorted(HfApi().list_repo_files(name, repo_type='dataset', revision=revision))


@contextlib.contextmanager
def _explained(name: str, setting: str, what: str) -> Iterator[None]:
  """Raise what goes wrong on the hub as a UserError with the way out."""
  from huggingface_hub import errors

  reason = unreachable()
  try:
    yield
  except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, errors.HFValidationError, OSError) as error:
    where = f'{setting}={name!r} is not a directory here'
    if reason:
      raise UserError(
        f'{where}, and {reason}: connect this machine, or set {setting} to a Hugging Face {what} directory.'
      ) from error
    why = _why(error, name, what)
    raise UserError(f'{where}, and it cannot be loaded from the Hugging Face hub: {why}') from error


def _why(error: Exception, name: str, what: str) -> str:
  """Return why something cannot be loaded; the first line of the library's message is often only the status."""
  from huggingface_hub import constants, errors

  if isinstance(error, errors.GatedRepoError):
    page = f'{constants.ENDPOINT}/{"datasets/" if what == DATA_SET else ""}{name}'
    return f'its publisher grants access on request: ask for it at {page}, then run `hf auth login` here.'
  if isinstance(error, errors.RepositoryNotFoundError):
    return f'there is no such {what}, or a private one: correct the name, or run `hf auth login`.'
  if isinstance(error, errors.RevisionNotFoundError):
    return 'it has no such revision.'
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
