"""A proposal while it is drawn: drafts, where they were asked for, and at the end the turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sdpo_jax.serving.sampling import SampleDone, SampleDraft, Sampling
from sdpo_jax.serving.sessions.records import SessionTurn


class Proposing:
  """An iterator of what comes of a proposal."""

  def __init__(self, sampling: Sampling, finish: Callable[[SampleDone], SessionTurn]):
    """Watches a proposal.

    Args:
      sampling: draws it.
      finish: makes the turn of it, and keeps that.
    """
    self._sampling, self._finish = sampling, finish

  def __iter__(self) -> Iterator[SampleDraft | SessionTurn]:
    """Yields drafts, where they were asked for, and the turn. Whoever stops reading ends what is left.

    Raises:
      TurnConflict: something else has changed the session meanwhile.
      ServiceError: as `Sampling`.
    """
    for event in self._sampling:
      yield self._finish(event) if isinstance(event, SampleDone) else event

  def result(self) -> SessionTurn:
    """Waits for the turn; raises what iterating raises."""
    *_, turn = self
    return turn

  def cancel(self) -> None:
    """Ends it."""
    self._sampling.cancel()
