"""The names that users give adapters, and the URIs of versions."""

from __future__ import annotations

import dataclasses
import re

from sdpo_jax.errors import short_repr
from sdpo_jax.serving.errors import InvalidRequest, NotFound

BASE_NAME = 'base'  # The model without an adapter.
SCHEME = 'sdpo://'
_NAME = re.compile(r'[A-Za-z0-9][A-Za-z0-9._-]{0,63}')
_REFERENCE = re.compile(r'(?P<adapter>[A-Za-z0-9][A-Za-z0-9._-]{0,127})(?:@(?P<number>\d{1,9}))?')


@dataclasses.dataclass(frozen=True)
class Reference:
  """A parsed reference to an adapter, which need not exist."""

  adapter: str  # Its id, or its name.
  number: int | None  # The number of a version; None: the newest.
  is_id: bool  # Whether it can only be an id.


def check_name(name: str, taken: str) -> str:
  """Return the name of a new adapter after checking it.

  Args:
    name: a name that a user chose.
    taken: the name of the model without an adapter.

  Raises:
    InvalidRequest: it is not a valid name, or it is the model's.
  """
  if not isinstance(name, str) or not _NAME.fullmatch(name):
    raise InvalidRequest(
      f'{short_repr(name)} is no name of an adapter: take up to 64 letters, digits, dots, hyphens and underscores, of '
      'which the first is a letter or a digit.',
      field='name',
    )
  if name in (BASE_NAME, taken):
    raise InvalidRequest(f'{name} is the model without an adapter: take another name.', field='name')
  return name


def lora_uri(adapter: str, number: int) -> str:
  """Return the URI of a version of an adapter."""
  return f'{SCHEME}{adapter}@{number}'


def parse(text: str) -> Reference:
  """Return the reference that a URI or a name stands for; no file is opened and no URI is fetched.

  Args:
    text: an id or a name, optionally with @ and a version number, or a URI from `lora_uri`.

  Raises:
    NotFound: it can be neither.
  """
  is_id = isinstance(text, str) and text.startswith(SCHEME)
  found = _REFERENCE.fullmatch(text.removeprefix(SCHEME)) if isinstance(text, str) else None
  if found is None:
    raise unknown(text)
  number = found['number']
  return Reference(found['adapter'], None if number is None else int(number), is_id)


def unknown(text: str) -> NotFound:
  """Return the error for an adapter that does not exist or belongs to somebody else."""
  return NotFound(
    f'There is no model or adapter {short_repr(text)}: name {BASE_NAME}, one of your adapters (its name or id, and @ '
    f'with the number of a version if another than the newest is meant), or the address {SCHEME}ID@NUMBER of one.',
    field='model',
  )
