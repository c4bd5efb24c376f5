"""The helper processes of a sandbox, for tests that end one or look for what it leaves.

Users of a sandbox have nothing to do with them, so it names them nowhere in public.
"""

from __future__ import annotations

from sdpo_jax.environments.sandbox import cgroups
from sdpo_jax.environments.sandbox.sandbox import Sandbox


def pids(sandbox: Sandbox) -> list[int]:
  """Return the process ids of a sandbox's zygotes."""
  return [host.pid for host in sandbox._hosts]  # noqa: SLF001


def scratch_of(sandbox: Sandbox) -> str:
  """Return the directory below which the programs of a sandbox with Landlock have theirs."""
  return sandbox._hosts[0]._scratch  # noqa: SLF001


def group_of(sandbox: Sandbox) -> cgroups.Group | None:
  """Return the control group of a sandbox's first zygote and its programs."""
  return sandbox._hosts[0]._group  # noqa: SLF001
