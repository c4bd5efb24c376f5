"""What adapters and their versions are called: names that users choose, and addresses of versions."""

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
  """What a request says of an adapter, which need not exist."""

  adapter: str  # Its id, or its name.
  number: int | None  # Of a version; None: the newest.
  is_id: bool  # Whether it can only be an id.


def check_name(name: str, taken: str) -> str:
  """Return the name of a new adapter.

  Args:
    name: that a user chose.
    taken: the name of the model without an adapter.

  Raises:
    InvalidRequest: it is no name, or that of the model.
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
  """Return the address of a version of an adapter."""
  return f'{SCHEME}{adapter}@{number}'


def parse(text: str) -> Reference:
  """Return what an address or a name means. Nothing is ever opened or fetched for it.

  Args:
    text: an id or a name, with @ and the number of a version or without, or an address that `lora_uri` made.

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
  """Return what is said of an adapter that is not there, or somebody else's."""
  return NotFound(
    f'There is no model or adapter {short_repr(text)}: name {BASE_NAME}, one of your adapters (its name or id, and @ '
    f'with the number of a version if another than the newest is meant), or the address {SCHEME}ID@NUMBER of one.',
    field='model',
  )
