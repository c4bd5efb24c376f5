"""The settings of a run, of an engine or of a plan, which know how to be checked and written."""

from __future__ import annotations

import dataclasses
import json

from sdpo_jax.config.checks import check
from sdpo_jax.config.schema import Sections


@dataclasses.dataclass
class Config(Sections):
  """Every setting of a run, checked all together before anything starts."""

  def validate(self, *, trains: bool = True) -> Config:
    """Return these settings after checking them.

    Args:
      trains: whether they are those of a run, which needs data.

    Raises:
      UserError: naming the first setting that is out of range or contradicts another, and the way out.
    """
    check(self, trains=trains)
    return self

  def to_json(self) -> str:
    """Return the settings as indented JSON."""
    return json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True)
