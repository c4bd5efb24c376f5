"""Where numbers go: metrics.jsonl and the boards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import json
from typing import TYPE_CHECKING, Any

from etils import epath

from sdpo_jax.config import Config
from sdpo_jax.errors import UserError
from sdpo_jax.files import append, is_local, jsonable, sync_file, write_atomically
from sdpo_jax.training.boards import TensorBoard, WeightsAndBiases
from sdpo_jax.training.directory.epochs import FENCING_EPOCH
from sdpo_jax.training.directory.guarded_files import Seen, open_records
from sdpo_jax.training.directory.lines import METRICS, history
from sdpo_jax.training.samples import Sample

if TYPE_CHECKING:
  from sdpo_jax.training.directory.ownership import Ownership


class MetricsWriter:
  """Writes one JSON object per step to `metrics.jsonl`; no step twice, even after a resume.

  Local files are appended to; object stores cannot append, so there the whole (small) file is written again, in gs://
  only if nobody else has done so meanwhile.
  """

  def __init__(
    self, workdir: epath.PathLike, config: Config, *, resume_step: int = 0, ownership: Ownership | None = None
  ):
    """Go on from the line of `resume_step`; with an ownership, lines bear its epoch and none is written once it is
    lost.

    Raises:
      UserError: metrics.jsonl cannot be read, or another process has taken the run over.
    """
    workdir = epath.Path(workdir)
    self._path = workdir / METRICS
    self._ownership = ownership
    self._records = open_records(workdir) if not is_local(workdir) else None
    self._seen: Seen | None = None  # What is in the store.
    self._lines: list[dict[str, Any]] = []
    while True:
      if self._records is not None:
        self._seen = self._records.read(METRICS)
      self._lines = history(workdir, resume_step)
      if self._rewrite():
        break
      self.check()  # Whoever has written meanwhile is not the owner; those lines are left out.
    self._doubtful = False  # Whether a sync has failed.
    self._boards = _boards(workdir, config, resume_step)

  def check(self) -> None:
    """Return if the run is still this process's; raises UserError if another one has taken it over."""
    if self._ownership is not None:
      self._ownership.check()

  def _rewrite(self) -> bool:
    """Write all lines; False if somebody else has written meanwhile."""
    self.check()
    text = ''.join(json.dumps(line) + '\n' for line in self._lines)
    if self._records is None or self._seen is None:
      write_atomically(self._path, text)
      return True
    seen = self._records.replace(METRICS, text.encode(), self._seen)
    self._seen = seen or self._seen
    return seen is not None

  def write(self, step: int, values: Mapping[str, Any]) -> None:
    """Append what was measured in a step; numbers that are not finite become null (JSON has no NaN), texts stay texts.

    Raises:
      UserError: another process has taken the run over, or has written there; then nothing is written.
    """
    measured = {key: value if isinstance(value, str) else jsonable(float(value)) for key, value in values.items()}
    epoch = {} if self._ownership is None else {FENCING_EPOCH: self._ownership.epoch}
    line = {'step': step} | epoch | measured
    self._lines.append(line)
    if is_local(self._path):
      self.check()
      append(self._path, json.dumps(line) + '\n')
    elif not self._rewrite():
      self.check()
      raise UserError(
        f'{self._path} was changed while the run was going on, by something that is not the run: nothing more is '
        'written there; see that nothing else writes to it, then start the same command again.'
      )
    for board in self._boards:
      board.numbers(step, {key: value for key, value in measured.items() if not isinstance(value, str)})

  def sync(self) -> None:
    """Return once all lines, here and on the boards, are on the disk; a checkpoint that needs them may be published
    then.

    Raises:
      OSError: they are not.
    """
    if self._doubtful:  # What could not be synced may be lost though the next sync succeeds.
      self._rewrite()
    self._doubtful = True
    sync_file(self._path)
    self._doubtful = False
    for board in self._boards:
      board.sync()

  def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
    """Show samples of a step on the boards; before the step's numbers, since a page's steps never go back."""
    for board in self._boards:
      board.samples(step, samples)

  @property
  def lines(self) -> list[dict[str, Any]]:
    return self._lines

  def close(self) -> None:
    """End the boards, and return once all lines are on the disk; errors as `sync`."""
    for board in self._boards:
      board.close()
    self.sync()


def _boards(workdir: epath.Path, config: Config, resume_step: int) -> list[TensorBoard | WeightsAndBiases]:
  boards: list[TensorBoard | WeightsAndBiases] = []
  if config.trainer.tensorboard and is_local(workdir):
    boards.append(TensorBoard(workdir, resume_step))
  if config.trainer.wandb_project is not None:
    boards.append(WeightsAndBiases(workdir, config, resume_step))
  return boards
