"""Writing of metrics to metrics.jsonl, TensorBoard and Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import json
import threading
from typing import TYPE_CHECKING, Any

from etils import epath

from sdpo_jax.config import Config
from sdpo_jax.errors import UserError
from sdpo_jax.files import append, is_local, jsonable, sync_file, write_atomically
from sdpo_jax.training.boards import TensorBoard, WeightsAndBiases
from sdpo_jax.training.directory.epochs import FENCING_EPOCH
from sdpo_jax.training.directory.guarded_files import Seen, open_records
from sdpo_jax.training.directory.lines import METRICS, history
from sdpo_jax.training.directory.sealed import LINE_DIGEST, last_digest, line_digest
from sdpo_jax.training.samples import Sample

if TYPE_CHECKING:
  from sdpo_jax.training.directory.ownership import Ownership


MOST_UNSYNCED = 1000  # Lines that are kept in memory until they are certainly on the disk.


class MetricsWriter:
  """A writer of one JSON object per step to `metrics.jsonl` and the boards; no step is written twice.

  A local file is appended to. Object stores cannot append, so there the whole (small) file is rewritten; in gs:// only
  if no other process has written it since.
  """

  def __init__(
    self, workdir: epath.PathLike, config: Config, *, resume_step: int = 0, ownership: Ownership | None = None
  ):
    """Open the file, and drop lines after `resume_step`.

    Args:
      workdir: directory of the run.
      config: settings, which say whether there are boards.
      resume_step: step from which the run resumes; 0: it begins.
      ownership: ownership of the directory, whose epoch is added to every line; once it is lost, nothing is written.

    Raises:
      UserError: metrics.jsonl cannot be read, or another process has taken the run over.
    """
    workdir = epath.Path(workdir)
    self._path = workdir / METRICS
    self._ownership = ownership
    self._records = open_records(workdir) if not is_local(workdir) else None
    self._seen: Seen | None = None  # The content in the store.
    self._texts: list[str] = []  # Lines that a failed sync may lose.
    self._lock = threading.Lock()  # Checkpoints sync the file from a thread of their own.
    while True:
      if self._records is not None:
        self._seen = self._records.read(METRICS)
      lines = history(workdir, resume_step).kept
      text = ''.join(json.dumps(line) + '\n' for line in lines).encode()
      if self._replace(text):
        break
      self.check()  # Still the owner: lines that another process has written are not the run's.
    self._digest = last_digest(lines)  # Of the last line.
    self._synced = len(text)  # Bytes of a local file that are certainly on the disk.
    self._doubtful = False  # Whether a sync has failed.
    self._boards = _boards(workdir, config, resume_step)

  def check(self) -> None:
    """Raise UserError if another process has taken over the run since."""
    if self._ownership is not None:
      self._ownership.check()

  def _replace(self, text: bytes) -> bool:
    """Write the whole file; return False if another process has written meanwhile."""
    self.check()
    if self._records is None or self._seen is None:
      write_atomically(self._path, text)
      return True
    seen = self._records.replace(METRICS, text, self._seen)
    self._seen = seen or self._seen
    return seen is not None

  def write(self, step: int, values: Mapping[str, Any]) -> None:
    """Append the metrics of a step; non-finite numbers become null (JSON has no NaN), strings stay strings.

    Raises:
      UserError: another process has taken over the run, or has written to the file; then nothing is written.
    """
    measured = {key: value if isinstance(value, str) else jsonable(float(value)) for key, value in values.items()}
    epoch = {} if self._ownership is None else {FENCING_EPOCH: self._ownership.epoch}
    line = {'step': step} | epoch | measured
    line[LINE_DIGEST] = line_digest(json.dumps(line), self._digest)
    text = json.dumps(line) + '\n'
    if self._seen is None:
      self.check()
      with self._lock:
        self._texts.append(text)
        append(self._path, text)
      if len(self._texts) >= MOST_UNSYNCED:
        self._sync_lines()
    elif not self._replace((self._seen.content or b'') + text.encode()):
      self.check()
      raise UserError(
        f'{self._path} was changed by something other than this run while it was going on: nothing more is written '
        'there; see that nothing else writes to it, then start the same command again.'
      )
    self._digest = line[LINE_DIGEST]
    for board in self._boards:
      board.numbers(step, {key: value for key, value in measured.items() if not isinstance(value, str)})

  def sync(self) -> str:
    """Block until all lines, in the file and on the boards, are on disk, as publishing a checkpoint requires.

    Returns:
      The `line_digest` of the last of them.

    Raises:
      OSError: they could not be synced.
    """
    digest = self._sync_lines()
    for board in self._boards:
      board.sync()
    return digest

  def _sync_lines(self) -> str:
    with self._lock:
      if self._doubtful:  # After a failed sync, data may be lost even if the next sync succeeds.
        with open(self._path, 'rb') as file:
          self._replace(file.read(self._synced) + ''.join(self._texts).encode())
      self._doubtful = True
      sync_file(self._path)
      self._doubtful = False
      self._synced += sum(len(text.encode()) for text in self._texts)
      self._texts.clear()
      return self._digest

  def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
    """Show samples of a step on the boards; call it before `write`, since steps on a board must not decrease."""
    for board in self._boards:
      board.samples(step, samples)

  def close(self) -> None:
    """Close the boards, and block until all lines are on disk; errors as in `sync`."""
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
