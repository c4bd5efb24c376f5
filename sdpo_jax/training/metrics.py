"""Where numbers go: metrics.jsonl and the boards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import json
from typing import Any

from etils import epath

from sdpo_jax.config import Config
from sdpo_jax.errors import UserError, short_repr
from sdpo_jax.files import append, is_local, jsonable, read_text, sync_file, write_atomically
from sdpo_jax.training.boards import TensorBoard, WeightsAndBiases
from sdpo_jax.training.samples import Sample


class MetricsWriter:
  """Writes one JSON object per step to `metrics.jsonl`; no step twice, even after a resume.

  Local files are appended to; object stores cannot append, so there the whole (small) file is written again.
  """

  def __init__(self, workdir: epath.PathLike, config: Config, *, resume_step: int = 0):
    self._path = epath.Path(workdir) / 'metrics.jsonl'
    self._lines = history(workdir, resume_step)
    self._rewrite()
    self._boards = _boards(epath.Path(workdir), config, resume_step)

  def _rewrite(self) -> None:
    write_atomically(self._path, ''.join(json.dumps(line) + '\n' for line in self._lines))

  def write(self, step: int, values: Mapping[str, Any]) -> None:
    """Appends the numbers of a step; those that are not finite become null (JSON has no NaN)."""
    line = {'step': step} | {key: jsonable(float(value)) for key, value in values.items()}
    self._lines.append(line)
    if is_local(self._path):
      append(self._path, json.dumps(line) + '\n')
    else:
      self._rewrite()
    for board in self._boards:
      board.numbers(step, {key: value for key, value in line.items() if key != 'step'})

  def sync(self) -> None:
    """Return once all lines are on the disk; a checkpoint that needs them may be published then.

    Raises:
      OSError: they are not.
    """
    sync_file(self._path)

  def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
    """Show samples of a step on the boards; before the step's numbers, since a page's steps never go back."""
    for board in self._boards:
      board.samples(step, samples)

  @property
  def lines(self) -> list[dict[str, Any]]:
    return self._lines

  def close(self) -> None:
    for board in self._boards:
      board.close()


def _boards(workdir: epath.Path, config: Config, resume_step: int) -> list[TensorBoard | WeightsAndBiases]:
  boards: list[TensorBoard | WeightsAndBiases] = []
  if config.trainer.tensorboard and is_local(workdir):
    boards.append(TensorBoard(workdir, resume_step))
  if config.trainer.wandb_project is not None:
    boards.append(WeightsAndBiases(workdir, config, resume_step))
  return boards


def read_metrics(workdir: epath.PathLike) -> list[dict[str, Any]]:
  """Return the lines of `metrics.jsonl`; a last line cut off by a crash is left out.

  Raises:
    UserError: it is no file, cannot be read, or holds a line that is not an object with a step.
  """
  path = epath.Path(workdir) / 'metrics.jsonl'
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
      raise UserError(f'{path}, line {number} is not JSON: the file was changed by hand; {way_out}.') from error
    step = value.get('step') if isinstance(value, dict) else None
    if not isinstance(step, int) or isinstance(step, bool):
      raise UserError(
        f'{path}, line {number} is not an object with a whole number as its step, but {short_repr(value)}: the file was '
        f'changed by hand; {way_out}.'
      )
    parsed.append(value)
  return parsed


def history(workdir: epath.PathLike, step: int) -> list[dict[str, Any]]:
  """The lines of `metrics.jsonl` up to the checkpoint of `step`; none at step 0, when a run begins anew."""
  return [line for line in read_metrics(workdir) if line['step'] <= step] if step else []
