"""The last state from which a run can go on, which is saved whatever ends the run."""

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
from sdpo_jax.training.directory.published import newest
from sdpo_jax.training.together import Together
from sdpo_jax.types import TrainState

RESCUE_S = 30.0  # For which a process that meets an error waits for the others to meet it too.


@dataclasses.dataclass(frozen=True)
class Whole:
  """A state from which the run can go on, with all that a checkpoint of it holds."""

  step: int  # Generation batches that it has seen.
  starting: StartingState  # Its arrays.
  host: Callable[[], Mapping[str, Any]]  # What the host holds, as values for JSON; made when it is saved.
  metrics: Mapping[str, float]  # By which its checkpoint is ranked; none while something of its step is outstanding.
  leaves: Mapping[str, str] | None  # The digests of its arrays, where they are known.


class Saving:
  """Holds the last whole state, and saves it: when it is due, beside what hangs, and before an error ends the run."""

  def __init__(
    self,
    workdir: epath.Path,
    checkpoints: Checkpoints,
    ownership: Ownership | None,
    together: Together,
    sync_lines: Callable[[], None],
    announce: Callable[[str], None],
  ):
    """Make what saves to `workdir`.

    Args:
      workdir: of the run.
      checkpoints: of the run.
      ownership: of the directory; None on all processes but one.
      together: of the run.
      sync_lines: returns once the lines so far are on the disk, which a checkpoint must not outlive.
      announce: receives sentences for the user.
    """
    self._workdir, self._checkpoints, self._ownership = workdir, checkpoints, ownership
    self._together, self._sync_lines, self._announce = together, sync_lines, announce
    self._busy = threading.Lock()  # One thread may save where another one, which hangs, trains.
    self._starting: StartingState | None = None
    self.whole: Whole

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
    """Note that the run can go on from `state`, of which more may be known than before; arguments as of `Whole`.

    Args:
      keep: as of `StartingState`.
    """
    # Another thread may be saving it by what was noted before, and whoever donates it waits for that one.
    if self._starting is None or not self._starting.holds(state):
      self._starting = StartingState(state, keep=keep)
    self.whole = Whole(step, self._starting, host, metrics, leaves)

  def save(self) -> None:
    """Save the last whole state, unless it is on disk, or gone since optimizer steps follow it."""
    with self._busy:
      whole = self.whole
      if self._is_due(whole):
        state = whole.starting.take()
        if state is not None:
          self._save(whole, state)

  def save_meanwhile(self) -> None:
    """As `save`, for another thread than the one that trains, which waits before it donates what is being saved."""
    with self._busy:
      whole = self.whole  # The thread that trains may have another one at any time.
      with whole.starting.held() as state:
        if state is not None and self._is_due(whole):
          self._save(whole, state)
      self._checkpoints.wait()

  def wait(self) -> None:
    """Return when everything is written; errors as `Checkpoints.wait`."""
    with self._busy:
      self._checkpoints.wait()

  def _is_due(self, whole: Whole) -> bool:
    return whole.step > 0 and whole.step not in self._checkpoints.steps()

  def _save(self, whole: Whole, state: TrainState) -> None:
    with self._together.alone():
      self._sync_lines()
    self._together.meet(f'syncing the lines up to step {whole.step}')
    barrier(f'the checkpoint of step {whole.step}')
    self._checkpoints.save(whole.step, state, whole.host(), whole.metrics, whole.leaves)

  def rescue(self, error: BaseException) -> None:
    """Save the last whole state before the run ends by `error`, and say which step is on disk.

    What goes wrong here is said, and hides nothing: the first error is the one that the run ends by.
    """
    if isinstance(error, RunLostError):
      return  # What is on disk is another process's, and so is the next start.
    first = jax.process_index() == 0
    try:
      # The others are where this process is if they met the same; otherwise nothing can be saved together.
      if cluster.exchange_notes('the end by an error', within_s=RESCUE_S) is None:
        self._announce('The other processes go on without this one: nothing more is saved.')
      else:
        if not self.whole.starting.on_devices:
          traceback.clear_frames(error.__traceback__)  # They hold arrays for which there is no room any more.
        if self._ownership is not None:
          self._ownership.check()
        self.save()
        self.wait()
    except Exception as second:
      self._announce(f'The state of step {self.whole.step} could not be saved: {first_line(second)}')
    if first:
      self._announce(preemption.what_is_there(functools.partial(newest, self._workdir)))
