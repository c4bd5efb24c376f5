"""What one process of a run does alone, and how all leave together if it fails: who leaves alone lets the others
wait.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib

import jax

from sdpo_jax.distributed import cluster
from sdpo_jax.distributed.collectives import noted


class Together:
  """What this process has failed at alone since all processes last met."""

  def __init__(self):
    self.failure: Exception | None = None

  @contextlib.contextmanager
  def alone(self) -> Iterator[None]:
    """Note what goes wrong in what not all processes do, for `meet`; the only process of a run just fails."""
    try:
      yield
    except Exception as error:
      if jax.process_count() == 1:
        raise
      self.failure = self.failure or error

  def meet(self, what: str) -> None:
    """Leave together if one process failed at `what` it did alone.

    Raises:
      Exception: this process did.
      cluster.FailedElsewhere: another one did, and is to say at what.
    """
    failure, self.failure = self.failure, None
    failed = noted('' if failure is None else type(failure).__name__, what)
    if failure is not None:
      raise failure
    if failed:
      raise cluster.FailedElsewhere(f'process {min(failed)} failed at {what}')
