"""Where numbers go: metrics.jsonl and the boards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import json
import logging
from typing import TYPE_CHECKING, Any

from etils import epath

from sdpo_jax.config import Config
from sdpo_jax.errors import UserError, short_repr
from sdpo_jax.files import append, is_local, jsonable, read_text, sync_file, write_atomically
from sdpo_jax.training.boards import TensorBoard, WeightsAndBiases
from sdpo_jax.training.conditional import Seen, open_records
from sdpo_jax.training.epochs import FENCING_EPOCH, of_the_run, read_epochs
from sdpo_jax.training.samples import Sample

if TYPE_CHECKING:
  from sdpo_jax.training.ownership import Ownership

METRICS = 'metrics.jsonl'
UNWRITTEN = '\0' * 512  # In the place of a block that had not reached the disk when the machine failed.
STATE_DIGEST = 'state_digest'  # In a line: of the state at the end of its step, which a checkpoint of the step holds.
_logger = logging.getLogger('sdpo_jax.metrics')


class MetricsWriter:
  """Writes one JSON object per step to `metrics.jsonl`; no step twice, even after a resume.

  Local files are appended to; object stores cannot append, so there the whole (small) file is written again, in gs://
  only if nobody else has done so meanwhile.
  """

  def __init__(
    self, workdir: epath.PathLike, config: Config, *, resume_step: int = 0, ownership: Ownership | None = None
  ):
    """Go on from the line of `resume_step`; with an ownership, lines bear its epoch and none is written once it is lost.

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
    """Return once all lines, here and on the boards, are on the disk; a checkpoint that needs them may be published then.

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


def read_metrics(workdir: epath.PathLike, last: int | None = None) -> list[dict[str, Any]]:
  """Return the lines of `metrics.jsonl` that are the run's; a last line cut off by a crash is left out.

  So are lines that a process wrote when another one had taken the run over; their steps are named in a warning.

  Args:
    workdir: of the run.
    last: step up to which lines are wanted; None: all.

  Raises:
    UserError: it is no file, cannot be read, or holds a line that is not an object with a step.
  """
  dropped = dropped_lines(workdir, last)
  if dropped is not None:
    _logger.warning('%s', dropped)
  return _lines(workdir, last)[0]


def dropped_lines(workdir: epath.PathLike, last: int | None = None) -> str | None:
  """Return a sentence about the lines that are not the run's; None: there are none. Arguments and errors as `read_metrics`."""
  _, foreign = _lines(workdir, last)
  if not foreign:
    return None
  lines = f'a line of step {foreign[0]} was' if len(foreign) == 1 else f'lines of steps {spans(foreign)} were'
  path = epath.Path(workdir) / METRICS
  return f'{path}: {lines} written by a process that had lost the run to another one, and left out.'


def _lines(workdir: epath.PathLike, last: int | None) -> tuple[list[dict[str, Any]], list[int]]:
  wanted = [line for line in raw_lines(workdir) if last is None or line['step'] <= last]
  return of_the_run(wanted, read_epochs(workdir))


def spans(steps: Iterable[int]) -> str:
  """Return numbers as people write them: '3, 5–8'."""
  groups: list[list[int]] = []
  for step in sorted(set(steps)):
    if groups and step == groups[-1][1] + 1:
      groups[-1][1] = step
    else:
      groups.append([step, step])
  return ', '.join(str(first) if first == last else f'{first}–{last}' for first, last in groups)


def raw_lines(workdir: epath.PathLike) -> list[dict[str, Any]]:
  """Return all lines of `metrics.jsonl`, whoever wrote them; errors as `read_metrics`.

  Lines in a block that a failure of the machine has kept from the disk are left out. No checkpoint follows such a line.
  """
  path = epath.Path(workdir) / METRICS
  if not path.exists():
    return []
  way_out = 'mend or remove it'
  lines = read_text(path, way_out).splitlines()
  parsed: list[dict[str, Any]] = []
  for number, line in enumerate(lines, 1):
    try:
      value = json.loads(line)
    except (ValueError, RecursionError) as error:
      if number == len(lines):
        break
      if UNWRITTEN in line:
        continue
      raise UserError(f'{path}, line {number} is not JSON: the file was changed by hand; {way_out}.') from error
    step = value.get('step') if isinstance(value, dict) else None
    if not isinstance(step, int) or isinstance(step, bool):
      raise UserError(
        f'{path}, line {number} is not an object with a whole number as its step, but {short_repr(value)}: the file was '
        f'changed by hand; {way_out}.'
      )
    epoch = value.get(FENCING_EPOCH, 0)
    if not isinstance(epoch, int):
      raise UserError(
        f'{path}, line {number} has {short_repr(epoch)} as its {FENCING_EPOCH}, which is a whole number: the file was '
        f'changed by hand; {way_out}.'
      )
    parsed.append(value)
  return parsed


def history(workdir: epath.PathLike, step: int) -> list[dict[str, Any]]:
  """The lines of `metrics.jsonl` up to the checkpoint of `step`; none at step 0, when a run begins anew."""
  return _lines(workdir, step)[0] if step else []


def check_digest(workdir: epath.PathLike, step: int, digest: str) -> bool:
  """Return whether the line of a step names the digest of the state that was restored; False: there is none that does.

  Raises:
    UserError: it names another one.
  """
  recorded = [line[STATE_DIGEST] for line in history(workdir, step) if line['step'] == step and STATE_DIGEST in line]
  if recorded and recorded[-1] != digest:
    raise UserError(
      f'{epath.Path(workdir) / METRICS} and the checkpoint of step {step} are not of the same run: the line of that step '
      f'names the state {short_repr(recorded[-1])}, and the checkpoint holds {digest}. Restore the one that was changed, '
      'choose another --workdir, or take that line out of metrics.jsonl if the checkpoint is the one to go on from.'
    )
  return bool(recorded)
