"""The target of sampling and scoring."""

from __future__ import annotations

import dataclasses

from sdpo_jax.serving import adapter_names
from sdpo_jax.serving.engine import BASE
from sdpo_jax.serving.records import AdapterRecord, engine_name


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
