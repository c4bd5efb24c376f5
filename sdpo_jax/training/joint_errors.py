"""Errors in work that one process does alone, raised on all processes, as the others would wait for it forever."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib

import jax

from sdpo_jax.distributed import cluster
from sdpo_jax.distributed.collectives import noted


class JointErrors:
  """The first error of this process's own work since the last call of `meet`."""

  def __init__(self):
    self.failure: Exception | None = None

  @contextlib.contextmanager
  def alone(self) -> Iterator[None]:
    """Catch an error in work that not all processes do, for `meet`; in a run of one process it is raised at once."""
    try:
      yield
    except Exception as error:
      if jax.process_count() == 1:
        raise
      self.failure = self.failure or error

  def meet(self, what: str) -> None:
    """Synchronise all processes, and raise on every one of them if one failed at `what`.

    Raises:
      Exception: this process failed; its own error.
      cluster.PeerFailed: another process failed, and reports at what.
    """
    failure, self.failure = self.failure, None
    failed = noted('' if failure is None else type(failure).__name__, what)
    if failure is not None:
      raise failure
    if failed:
      raise cluster.PeerFailed(f'process {min(failed)} failed at {what}')
