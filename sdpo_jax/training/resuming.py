"""The start of a run where it stopped: the newest checkpoint, what is outstanding of its step, and what its line
says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
from typing import Any

from etils import epath

from sdpo_jax import liveness
from sdpo_jax.config import Config
from sdpo_jax.distributed.cluster import barrier
from sdpo_jax.evaluation import alarms
from sdpo_jax.training.checkpoint.checkpoints import Checkpoints
from sdpo_jax.training.checkpoint.unfinished import Unfinished
from sdpo_jax.training.directory import remains
from sdpo_jax.training.directory.lines import check_digest, history
from sdpo_jax.training.directory.ownership import Ownership
from sdpo_jax.training.directory.workdir import open_workdir
from sdpo_jax.types import TrainState

UNFINISHED = 'unfinished'  # In the host's state: what is outstanding of the step.


@dataclasses.dataclass(frozen=True)
class Resumed:
  """What a run goes on from."""

  step: int  # Of the checkpoint.
  state: TrainState
  host: Mapping[str, Any]
  digest: str  # Of the state.
  unfinished: Unfinished | None  # What is outstanding of the step; None: it has its line.
  recorded: bool  # Whether its line names the same digest.

  def __str__(self) -> str:
    as_recorded = ', as in metrics.jsonl' if self.recorded else ''
    return f'step {self.step} (state {self.digest[:16]}{as_recorded})'


@contextlib.contextmanager
def opened(
  config: Config, workdir: epath.Path, ownership: Ownership | None, like: TrainState, say: Callable[[str], None]
) -> Iterator[tuple[Checkpoints, Resumed | None]]:
  """Open the checkpoints of a run and restore the newest whole one, None where there is none; close them at the end.

  Args:
    config: settings.
    workdir: of the run, which nothing is missing from that would be trained over (`remains.settle`).
    ownership: of the directory; None on all processes but one.
    like: a state, or abstract arrays with shardings, of the layout to restore.
    say: receives sentences for the user.

  Raises:
    UserError: what there is cannot be gone on from.
  """
  open_workdir(workdir)
  barrier('the start of the run')  # Weights are read by now, and the directory is there.
  trainer = config.trainer
  checkpoints = Checkpoints(
    workdir, keep=trainer.max_ckpt_to_keep, best_metric=trainer.best_metric, ownership=ownership, say=say
  )
  try:
    liveness.begin('restore')
    yield checkpoints, _resume(workdir, checkpoints, ownership, like)
  except BaseException:
    with contextlib.suppress(Exception):  # What of it matters was said before; the first error is the one to hear.
      checkpoints.close()
    raise
  checkpoints.close()


def _resume(
  workdir: epath.Path, checkpoints: Checkpoints, ownership: Ownership | None, like: TrainState
) -> Resumed | None:
  restored = checkpoints.restore(like)
  if ownership is not None:
    if restored is None:
      remains.refuse_loss(workdir, ownership.record())
    ownership.resumed(restored[0] if restored else 0)
  if restored is None:
    return None
  step, state, host = restored
  digest = checkpoints.state_digest(step)
  if is_unfinished(step, host, history(workdir, step)):  # Its line, if it has one, is of the state after it.
    return Resumed(step, state, host, digest, Unfinished.from_json(host[UNFINISHED]), recorded=False)
  return Resumed(step, state, host, digest, None, check_digest(workdir, step, digest))


def is_unfinished(step: int, host: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> bool:
  """Return whether something is outstanding of the step from which a run resumes.

  Args:
    step: of the checkpoint.
    host: the host's state in it.
    lines: of metrics.jsonl, up to that step. If the step has one, it was finished after the checkpoint; but the state
      of the checkpoint is that of before a rollback, which is to be made anew.
  """
  return UNFINISHED in host and all(line['step'] != step or line.get(alarms.ROLLBACK) is not None for line in lines)


def written_before(step: int, unfinished: Unfinished | None) -> int:
  """Return the last step whose line of metrics.jsonl stays when a run resumes at `step`."""
  # Nothing is rolled back at step 1, and the line of step 0 is not to be dropped with it.
  return step if unfinished is None or step == 1 else step - 1
