"""What the parts of the terminal program share in one session."""

from __future__ import annotations

import dataclasses
from typing import Any

from sdpo_jax.terminal.client import SessionClient
from sdpo_jax.terminal.history import History
from sdpo_jax.terminal.inputs import Inputs
from sdpo_jax.terminal.policies import ApprovalPolicy
from sdpo_jax.terminal.screen import Screen
from sdpo_jax.terminal.work import Workbench


@dataclasses.dataclass(frozen=True)
class SessionContext:
  """A session, and what it is held with."""

  session: SessionClient  # The session in the service.
  history: History  # The local history of the session.
  screen: Screen  # For all output.
  inputs: Inputs  # The source of messages and decisions.
  workbench: Workbench  # Runs the tools.
  policy: ApprovalPolicy  # The rules by which calls are allowed, asked about or refused.
  seed: int | None = None  # Makes proposals reproducible; None: random seeds.
  turns: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # Kept up to date by the conversation.

  def seed_of(self, number: int) -> int | None:
    """Return the seed with which a turn is sampled, for the first time and again; None: a random one."""
    return None if self.seed is None else self.seed + number
