"""The records of the service: adapters, their versions, and the samples drawn from them; and how requests name them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import re
from typing import Any, Literal

import numpy as np

from sdpo_jax.errors import short_repr
from sdpo_jax.serving.errors import InvalidRequest, NotFound

BASE = ''  # The version name that stands for the model without an adapter.
# Prefixes of `engine.Feedback.teacher` before the name of a version, or of another model.
TEACHING_VERSION, TEACHING_MODEL = 'version:', 'model:'
BASE_NAME = 'base'  # The model without an adapter.
SCHEME = 'sdpo://'
_NAME = re.compile(r'[A-Za-z0-9][A-Za-z0-9._-]{0,63}')
_REFERENCE = re.compile(r'(?P<adapter>[A-Za-z0-9][A-Za-z0-9._-]{0,127})(?:@(?P<number>\d{1,9}))?')
Reason = Literal['create', 'feedback', 'import', 'fork', 'undo']


@dataclasses.dataclass(frozen=True)
class AdapterRecord:
  """An adapter of one owner: a name, settings, and the version that it is at."""

  id: str  # Minted by the service; never a name that a user chose.
  owner: str
  name: str  # A label, unique among the owner's adapters.
  head: int  # Number of its newest version.
  created: float  # Seconds since the epoch.
  settings: Mapping[str, Any]  # As JSON: teacher, average_rate, guards, canary prompts.


@dataclasses.dataclass(frozen=True)
class Version:
  """One immutable version of an adapter."""

  adapter: str  # Its id.
  number: int  # 0, 1, …: numbers never go back.
  parent: int | None  # The version that it was made from.
  reason: Reason
  created: float  # Seconds since the epoch.
  digest: str  # SHA-256 of its manifest, in hex.
  details: Mapping[str, Any]  # As JSON: what made it, such as the loss, the metrics and the ids of samples.

  @property
  def engine_name(self) -> str:
    """The name of this version in the engine."""
    return engine_name(self.adapter, self.number)


@dataclasses.dataclass(frozen=True)
class SampleRecord:
  """A completion as it was drawn, so that feedback on it never tokenizes its text again."""

  id: str
  owner: str
  adapter: str | None  # The id of the adapter that drew it; None: the model without an adapter.
  version: int | None  # The adapter's version that drew it.
  prompt_tokens: Sequence[int]
  tokens: Sequence[int]
  log_probs: np.ndarray  # [T] float32 of the tokens, at temperature 1, when they were drawn.
  temperature: float
  messages: Sequence[Mapping[str, Any]] | None  # The conversation behind the prompt; None: text or tokens.
  text: str
  finish_reason: Literal['stop', 'length']
  created: float  # Seconds since the epoch.
  expires: float  # Seconds since the epoch; the sample is gone afterwards.


@dataclasses.dataclass(frozen=True)
class VersionTarget:
  """A version of an adapter, or the model without one."""

  adapter: AdapterRecord | None  # None: the model without an adapter.
  number: int | None  # The number of the version.

  @property
  def engine_name(self) -> str:
    """The name of the version in the engine."""
    return BASE if self.adapter is None else engine_name(self.adapter.id, self.number)

  @property
  def lora_uri(self) -> str | None:
    """The URI of the version; None: it is the model without an adapter."""
    return None if self.adapter is None else lora_uri(self.adapter.id, self.number)


def engine_name(adapter: str, number: int) -> str:
  """Return the name that a version of an adapter has in the engine."""
  return f'{adapter}@{number}'


# How requests name adapters.


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
