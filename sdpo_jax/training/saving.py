"""Saving of the last state from which a run can continue, however the run ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import functools
import threading
import traceback
from typing import Any

from etils import epath
import jax

from sdpo_jax.distributed import cluster
from sdpo_jax.distributed.cluster import barrier
from sdpo_jax.errors import first_line
from sdpo_jax.training import preemption
from sdpo_jax.training.checkpoint.checkpoints import Checkpoints
from sdpo_jax.training.checkpoint.starting_state import StartingState
from sdpo_jax.training.directory.ownership import Ownership, RunLostError
from sdpo_jax.training.directory.published_checkpoints import newest
from sdpo_jax.training.joint_errors import JointErrors
from sdpo_jax.training.skipped import SkippedError
from sdpo_jax.types import TrainState

RESCUE_S = 30.0  # Seconds that a process with an error waits for the others to report theirs.


@dataclasses.dataclass(frozen=True)
class Whole:
  """A whole state, from which the run can continue, with everything else that its checkpoint holds."""

  step: int  # Number of generation batches that it has seen.
  starting: StartingState  # Its arrays.
  host: Callable[[], Mapping[str, Any]]  # Returns the host state as JSON values; called when the state is saved.
  metrics: Mapping[str, float]  # The metrics that rank its checkpoint; empty while its step is unfinished.
  leaves: Mapping[str, str] | None  # The digests of its arrays, if known.


@dataclasses.dataclass
class Saving:
  """The last whole state, saved when due, while the training thread hangs, and before an error ends the run."""

  workdir: epath.Path  # The directory of the run.
  checkpoints: Checkpoints
  ownership: Ownership | None  # None on all processes but one.
  joint_errors: JointErrors
  sync_lines: Callable[[], str]  # `MetricsWriter.sync`; '' on processes that write no lines.
  announce: Callable[[str], None]  # Receives sentences for the user.
  whole: Whole = dataclasses.field(init=False)

  def __post_init__(self):
    self._busy = threading.Lock()  # Another thread may save while the training thread hangs.
    self._starting: StartingState | None = None

  def hold(
    self,
    step: int,
    state: TrainState,
    host: Callable[[], Mapping[str, Any]],
    metrics: Mapping[str, float],
    leaves: Mapping[str, str] | None,
    *,
    keep: bool,
  ) -> None:
    """Make `state` the one that a checkpoint would hold; called again once its metrics or digests are known.

    Arguments as in `Whole`.

    Args:
      keep: as in `StartingState`.
    """
    # Another thread may be saving this state already; keep its `StartingState`, as donating the state waits for that.
    if self._starting is None or not self._starting.holds(state):
      self._starting = StartingState(state, keep=keep)
    self.whole = Whole(step, self._starting, host, metrics, leaves)

  def save(self) -> None:
    """Save the last whole state, unless it is on disk already or its arrays were overwritten by optimizer steps."""
    with self._busy:
      whole = self.whole
      if self._is_due(whole):
        state = whole.starting.take()
        if state is not None:
          self._save(whole, state)

  def save_meanwhile(self) -> None:
    """Save the last whole state from another thread; the training thread waits for it before donating the state."""
    with self._busy:
      whole = self.whole  # The training thread may replace it at any time.
      with whole.starting.held() as state:
        if state is not None and self._is_due(whole):
          self._save(whole, state)
      self.checkpoints.wait()

  def wait(self) -> None:
    """Block until everything is written; errors as in `Checkpoints.wait`."""
    with self._busy:
      self.checkpoints.wait()

  def _is_due(self, whole: Whole) -> bool:
    return whole.step > 0 and whole.step not in self.checkpoints.steps()

  def _save(self, whole: Whole, state: TrainState) -> None:
    line_digest = ''
    with self.joint_errors.alone():
      line_digest = self.sync_lines()
    self.joint_errors.meet(f'syncing the lines up to step {whole.step}')
    barrier(f'the checkpoint of step {whole.step}')
    self.checkpoints.save(whole.step, state, whole.host(), whole.metrics, whole.leaves, line_digest)

  def rescue(self, error: BaseException) -> None:
    """Save the last whole state before `error` ends the run, and announce which step is on disk.

    Errors raised meanwhile are announced and do not hide `error`, which still ends the run.
    """
    if isinstance(error, RunLostError):
      return  # The directory, and thus the next start, belongs to another process.
    try:
      # All processes must save together, and the others get here only if they have the same error.
      if cluster.exchange_notes('the end by an error', within_s=RESCUE_S) is None:
        self.announce('The other processes do not save together with this one: nothing more is saved.')
      else:
        if not self.whole.starting.on_devices:
          traceback.clear_frames(error.__traceback__)  # The frames hold arrays for which there is no room any more.
        if self.ownership is not None:
          self.ownership.check()
        self.save()
        self.wait()
    except Exception as second:
      self.announce(f'The state of step {self.whole.step} could not be saved: {first_line(second)}')
    if jax.process_index() == 0 and not isinstance(error, SkippedError):
      self.announce(preemption.what_is_there(functools.partial(newest, self.workdir)))
