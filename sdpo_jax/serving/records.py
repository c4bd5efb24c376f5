"""Records of the service: adapters, their versions and samples; and the names by which requests refer to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
import re
from typing import Any, Literal, TypeVar

import numpy as np

from sdpo_jax.errors import short_repr
from sdpo_jax.models.adapters.composition import Positions
from sdpo_jax.serving.errors import InvalidRequest, NotFound

BASE = ''  # The version name that stands for the model without an adapter.
# Prefixes in `engine.Feedback.teacher`, before the name of a version or of another model.
TEACHING_VERSION, TEACHING_MODEL = 'version:', 'model:'
BASE_NAME = 'base'  # The name of the model without an adapter in requests.
SCHEME = 'sdpo://'
_OPTIMIZER = '+optimizer'
# The arrays of a version that is a cartridge: slots [L, KV, P, head_dim], how many of them are frozen, and whether
# layers with windows see only slots within them, [] int32 each.
KEYS, VALUES, FROZEN, WINDOWED = 'keys', 'values', 'frozen', 'windowed'
MOST_CARTRIDGES = 64  # In one request.
CARTRIDGE = 'cartridge'  # The setting `kind` of adapters whose versions are cartridges.
_NAME = re.compile(r'[A-Za-z0-9][A-Za-z0-9._-]{0,63}')
_ID = re.compile(r'(ad|ses|smp|cmpl|chatcmpl)-[0-9a-f]{16,}')  # What the service itself names so.
_PLACE = re.compile(r'(\d+\.\d+)~([a-z]+-[0-9a-f]+)')
BEGINNING = (-math.inf, '')  # The place before all others.
_REFERENCE = re.compile(r'(?P<adapter>[A-Za-z0-9][A-Za-z0-9._-]{0,127})(?:@(?P<number>\d{1,9}))?')
Reason = Literal['create', 'feedback', 'import', 'fork', 'undo']


@dataclasses.dataclass(frozen=True)
class AdapterRecord:
  """An adapter of one owner, or what has versions like one: a cartridge."""

  id: str  # Made by the service, unlike the name.
  owner: str
  name: str  # Unique among the adapters of the owner.
  head: int  # The number of its newest version.
  created: float  # Seconds since the epoch.
  settings: Mapping[str, Any]  # As JSON, see `adapter_settings.checked`.

  @property
  def is_cartridge(self) -> bool:
    """Whether its versions are cartridges."""
    return self.settings.get('kind') == CARTRIDGE


@dataclasses.dataclass(frozen=True)
class Version:
  """One immutable version of an adapter."""

  adapter: str  # The id of the adapter.
  number: int  # 0, 1, …; numbers are never reused.
  parent: int | None  # The version from which it was made; None: none.
  reason: Reason
  created: float  # Seconds since the epoch.
  digest: str  # SHA-256 of its manifest, in hex.
  details: Mapping[str, Any]  # As JSON: how it was made, such as loss, metrics and ids of samples.

  @property
  def engine_name(self) -> str:
    """The name of this version in the engine."""
    return engine_name(self.adapter, self.number)


@dataclasses.dataclass(frozen=True, eq=False)
class OptimizerState:
  """The state from which a version's learning goes on, see `store.optimizer_states`."""

  arrays: Mapping[str, np.ndarray]  # mu/…, nu/… and count, unless these are 0; average/…, unless it is the factors.
  moments_of: int | None  # The number of the version whose moments they are; None: they are 0.
  average_of: int | None  # The number of the version whose average it is; None: there is none.


@dataclasses.dataclass(frozen=True)
class Ancestor:
  """What says which versions are in effect: a version without its details."""

  number: int
  parent: int | None
  reason: Reason


_Made = TypeVar('_Made', Version, Ancestor)


def in_effect(versions: Sequence[_Made]) -> list[_Made]:
  """Return the versions whose learning the newest one holds, the newest first: all but undone ones and undos.

  Args:
    versions: the stored versions of an adapter, the oldest first. Where one is missing, the list ends; an undo stands
      for a missing version that it has restored.
  """
  by_number, found = {version.number: version for version in versions}, []
  at = versions[-1].number if versions else None
  while at in by_number:
    version = by_number[at]
    at = version.parent
    if version.reason != 'undo' or at not in by_number:  # An undo equals its parent.
      found.append(version)
  return found


@dataclasses.dataclass(frozen=True)
class SampleRecord:
  """A completion as it was sampled; feedback on it uses these tokens and never tokenizes the text again."""

  id: str
  owner: str
  adapter: str | None  # The id of the adapter; None: the model without an adapter.
  version: int | None  # The version of the adapter that was sampled from.
  prompt_tokens: Sequence[int]
  tokens: Sequence[int]
  log_probs: np.ndarray  # [T] float32 log-probs of the tokens when they were sampled, at temperature 1.
  temperature: float
  messages: Sequence[Mapping[str, Any]] | None  # The conversation behind the prompt; None: it was a text or tokens.
  text: str
  finish_reason: Literal['stop', 'length']
  created: float  # Seconds since the epoch.
  expires: float  # Seconds since the epoch, after which it cannot be referred to.


@dataclasses.dataclass(frozen=True)
class Composition:
  """The cartridges that a request reads as one, see `models.adapters.composition`."""

  versions: tuple[str, ...]  # Their names in the engine.
  positions: Positions = 'overlap'


@dataclasses.dataclass(frozen=True)
class VersionTarget:
  """A version of an adapter, or the model without one, and the cartridges before its prompts."""

  adapter: AdapterRecord | None  # None: the model without an adapter.
  number: int | None  # The number of the version; None: the model without an adapter.
  cartridges: tuple[VersionTarget, ...] = ()
  positions: Positions = 'overlap'

  @property
  def engine_name(self) -> str:
    """The name of the version in the engine."""
    return BASE if self.adapter is None else engine_name(self.adapter.id, self.number)

  @property
  def composition(self) -> Composition | None:
    """The cartridges in the engine; None: there are none."""
    names = tuple(each.engine_name for each in self.cartridges)
    return Composition(names, self.positions) if names else None

  @property
  def lora_uri(self) -> str | None:
    """The URI of the version; None for the model without an adapter."""
    return None if self.adapter is None else lora_uri(self.adapter.id, self.number)

  @property
  def uri(self) -> str:
    """What names exactly this version and these cartridges as the model of a request."""
    read = '+'.join(each.lora_uri for each in self.cartridges)
    return (self.lora_uri or BASE_NAME) + (f'#{read}' if read else '')


def engine_name(adapter: str, number: int) -> str:
  """Return the name that a version of an adapter has in the engine."""
  return f'{adapter}@{number}'


def optimizer_name(version: str) -> str:
  """Return the name that the optimizer state of a version has in the engine."""
  return f'{version}{_OPTIMIZER}'


def version_of(name: str) -> str:
  """Return the version to which a name in the engine belongs, which is one or that of an optimizer state."""
  return name.removesuffix(_OPTIMIZER)


# How requests name adapters.


@dataclasses.dataclass(frozen=True)
class Reference:
  """A parsed reference to an adapter or a version, which need not exist."""

  adapter: str  # The id or the name of the adapter.
  number: int | None  # The number of a version; None: the newest.
  is_id: bool  # Whether `adapter` must be an id.


def check_name(name: str, taken: str) -> None:
  """Raise InvalidRequest if a name for a new adapter is invalid, or means something else.

  Args:
    name: the name that a user has chosen.
    taken: the name of the model.
  """
  if not isinstance(name, str) or not _NAME.fullmatch(name):
    raise InvalidRequest(
      f'{short_repr(name)} is not a valid name of an adapter: use up to 64 letters, digits, dots, hyphens and '
      'underscores, beginning with a letter or a digit.',
      field='name',
    )
  if _ID.fullmatch(name):
    raise InvalidRequest(f'{name} looks like an id of this service: choose another name.', field='name')
  if name in (BASE_NAME, taken):
    raise InvalidRequest(f'{name} means the model without an adapter: choose another name.', field='name')


def lora_uri(adapter: str, number: int) -> str:
  """Return the URI of a version of an adapter."""
  return f'{SCHEME}{adapter}@{number}'


def parse(text: str) -> Reference:
  """Parse a reference to an adapter; no file is opened and no URI is fetched.

  Args:
    text: an id or a name, optionally with @ and a version number, or a URI as from `lora_uri`.

  Raises:
    NotFound: the text is no valid reference.
  """
  is_id = isinstance(text, str) and text.startswith(SCHEME)
  found = _REFERENCE.fullmatch(text.removeprefix(SCHEME)) if isinstance(text, str) else None
  if found is None:
    raise unknown(text)
  number = found['number']
  return Reference(found['adapter'], None if number is None else int(number), is_id)


def place_of(entry: Any) -> str:
  """Return the place of an entry in lists, which are in the order of creation; it outlives the entry."""
  return f'{entry.created!r}~{entry.id}'


def place_after(after: str | None, find: Callable[[str], Any]) -> tuple[float, str]:
  """Return the time of creation, in seconds since the epoch, and the id after which a page begins.

  Args:
    after: what `place_of` has returned, or what names an entry that exists; None: the page is the first.
    find: returns the entry of a name; raises NotFound.

  Raises:
    InvalidRequest: there is no such entry.
  """
  if after is None:
    return BEGINNING
  if (place := _PLACE.fullmatch(after)) is not None:
    return float(place[1]), place[2]
  try:
    entry = find(after)
  except NotFound as error:
    said = f'There is no {short_repr(after)} to go on after, or it was deleted: begin again, without after.'
    raise InvalidRequest(said, field='after') from error
  return entry.created, entry.id


def unknown(text: str) -> NotFound:
  """Return the error for a model or adapter that does not exist or belongs to another owner."""
  return NotFound(
    f'There is no model or adapter {short_repr(text)}: send {BASE_NAME}, the name or id of one of your adapters, '
    f'optionally with @ and a version number, or a URI {SCHEME}ID@NUMBER; cartridges come after a #.',
    field='model',
  )
