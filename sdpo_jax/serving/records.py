"""The records of the service: adapters, their versions, and the samples drawn from them; and what requests aim at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any, Literal

import numpy as np

from sdpo_jax.serving import adapter_names

BASE = ''  # The version name that stands for the model without an adapter.
# Prefixes of `engine.Feedback.teacher` before the name of a version, or of another model.
TEACHING_VERSION, TEACHING_MODEL = 'version:', 'model:'
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
    return None if self.adapter is None else adapter_names.lora_uri(self.adapter.id, self.number)


def engine_name(adapter: str, number: int) -> str:
  """Return the name that a version of an adapter has in the engine."""
  return f'{adapter}@{number}'
