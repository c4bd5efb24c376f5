"""Resuming a run: the newest checkpoint, the unfinished part of its step, and the check against its metrics line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
from typing import Any

from etils import epath

from sdpo_jax import liveness
from sdpo_jax.config import Config
from sdpo_jax.distributed.cluster import barrier
from sdpo_jax.errors import UserError, short_repr
from sdpo_jax.evaluation import alarms
from sdpo_jax.training.checkpoint.checkpoints import Checkpoints
from sdpo_jax.training.checkpoint.unfinished import Unfinished
from sdpo_jax.training.directory import lost_checkpoints
from sdpo_jax.training.directory.lines import STATE_DIGEST, MetricsLines, history
from sdpo_jax.training.directory.ownership import Ownership
from sdpo_jax.training.directory.workdir import open_workdir
from sdpo_jax.types import TrainState, Tree

UNFINISHED = 'unfinished'  # Key in the host's state: the outstanding part of the step.


@dataclasses.dataclass(frozen=True)
class Resumed:
  """The state from which a run resumes."""

  step: int  # The step of the checkpoint.
  state: TrainState
  host: Mapping[str, Any]
  digest: str  # Of the state.
  unfinished: Unfinished | None  # The outstanding part of the step; None: its metrics line is written.
  recorded: bool  # Whether the step's metrics line has the same digest.
  lost: Sequence[str]  # Sentences about lines and results that are lost, or not as they were written.

  def __str__(self) -> str:
    as_recorded = ', as in metrics.jsonl' if self.recorded else ''
    return f'step {self.step} (state {self.digest[:16]}{as_recorded})'


@contextlib.contextmanager
def opened(
  config: Config,
  workdir: epath.Path,
  ownership: Ownership | None,
  like: TrainState,
  say: Callable[[str], None],
  arrays: Tree | None = None,
) -> Iterator[tuple[Checkpoints, Resumed | None]]:
  """Provide the checkpoints of a run and the newest restored state (None if there is none); close them at the end.

  Args:
    config: settings.
    workdir: directory of the run, after `lost_checkpoints.settle`.
    ownership: ownership of the directory; None on all processes but one.
    like: a state, or abstract arrays with shardings, in the layout to restore.
    say: receives sentences for the user.
    arrays: as in `Checkpoints`.

  Raises:
    UserError: the run cannot resume from what is on disk.
  """
  open_workdir(workdir)
  barrier('the start of the run')  # Weights are read by now, and the directory is there.
  trainer = config.trainer
  checkpoints = Checkpoints(
    workdir,
    keep=trainer.max_ckpt_to_keep,
    best_metric=trainer.best_metric,
    ownership=ownership,
    say=say,
    arrays=arrays,
  )
  try:
    liveness.begin('restore')
    yield checkpoints, _resume(workdir, checkpoints, ownership, like)
  except BaseException:
    with contextlib.suppress(Exception):  # The user must see the first error, not one raised by closing.
      checkpoints.close()
    raise
  checkpoints.close()


def _resume(
  workdir: epath.Path, checkpoints: Checkpoints, ownership: Ownership | None, like: TrainState
) -> Resumed | None:
  restored = checkpoints.restore(like)
  if ownership is not None:
    if restored is None:
      lost_checkpoints.refuse_loss(workdir, ownership.record())
    ownership.resumed(restored[0] if restored else 0)
  if restored is None:
    return None
  step, state, host = restored
  digest, lines = checkpoints.state_digest(step), history(workdir, step)
  written, recorded = compared(step, host, digest, lines)
  unfinished = None if written == step else Unfinished.from_json(host[UNFINISHED])
  lost = [*lines.remarks(written), *lines.lost_results()]
  return Resumed(step, state, host, digest, unfinished, recorded, lost)


def compared(step: int, host: Mapping[str, Any], digest: str, lines: MetricsLines) -> tuple[int, bool]:
  """Compare the checkpoint from which a run resumes with the metrics line of its step.

  Part of the step is outstanding if the checkpoint says so and the step has no line: with one, it was finished after
  the checkpoint was saved, unless the line reports a rollback. Then the checkpoint has the state before it, and the
  rollback is repeated; likewise an evaluation that draws tokens of samples that carry over.

  Args:
    step: step of the checkpoint.
    host: host state in it.
    digest: digest of its state.
    lines: lines of metrics.jsonl up to that step at least.

  Returns:
    The last step that must have a line, `step` unless part of it is outstanding; and whether its line has the digest.

  Raises:
    UserError: the line has another digest.
  """
  own = [line for line in lines.kept if line['step'] == step]
  # The line of step 1 cannot be dropped, see `written_before`.
  draws = UNFINISHED in host and step > 1 and Unfinished.from_json(host[UNFINISHED]).draws
  if draws or UNFINISHED in host and all(line.get(alarms.ROLLBACK) is not None for line in own):
    return step - 1, False
  recorded = [line[STATE_DIGEST] for line in own if STATE_DIGEST in line]
  if recorded and recorded[-1] != digest:
    raise UserError(
      f'{lines.path} and the checkpoint of step {step} are not of the same run: the line of that step names the state '
      f'{short_repr(recorded[-1])}, and the checkpoint holds {digest}. Restore the one that was changed, choose '
      'another --workdir, or remove that line from metrics.jsonl if the checkpoint is the right one.'
    )
  return step, bool(recorded)


def written_before(step: int, unfinished: Unfinished | None) -> int:
  """Return the last step whose line of metrics.jsonl is kept when a run resumes at `step`."""
  # Step 1 is never rolled back, and the line of step 0 must not be dropped.
  return step if unfinished is None or step == 1 else step - 1
