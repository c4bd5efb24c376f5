"""The settings of a run, an engine or a plan, with their validation and serialisation."""

from __future__ import annotations

import dataclasses
import json

from sdpo_jax.config.checks import check
from sdpo_jax.config.schema import Sections


@dataclasses.dataclass
class Config(Sections):
  """All settings of a run, which are checked together before anything starts."""

  def validate(self, *, trains: bool = True) -> Config:
    """Return these settings after checking them.

    Args:
      trains: whether they are for a training run, which needs data.

    Raises:
      UserError: a setting is out of range or contradicts another; the message names the first one and a remedy.
    """
    check(self, trains=trains)
    return self

  def to_json(self) -> str:
    """Return the settings as indented JSON."""
    return json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True)
