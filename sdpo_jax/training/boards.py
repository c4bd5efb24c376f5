"""Logging to TensorBoard and Weights & Biases: metrics, named as in metrics.jsonl, and tables of samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import hashlib
import importlib.util
import json
import logging
import os
import re
import time
from typing import Any
import uuid

from etils import epath

from sdpo_jax.config import Config
from sdpo_jax.errors import UserError, first_line
from sdpo_jax.files import is_local, make_directory, read_text, sync_tree, write_atomically
from sdpo_jax.training.directory.workdir import WANDB_ID
from sdpo_jax.training.samples import COLUMNS, UNGRADED, Sample, shorten

SAMPLES = 'samples'  # Name of the tables.
NEW_PAGE = 'remove it for a new page'  # The way out of a damaged `WANDB_ID`.
LONGEST_CELL = 10_000  # Maximum number of characters of a text in a table.


class TensorBoard:
  """A writer of TensorBoard events to `tensorboard/` in the run directory.

  `SummaryWriter` of tensorboardX is not used: it changes names ('mean@4' to 'mean_4'), and writes in a thread that
  loses the error of a full disk and then waits for ever.
  """

  def __init__(self, workdir: epath.Path, resume_step: int = 0):
    """Open an event file; TensorBoard no longer shows events after `resume_step` in earlier files."""
    from tensorboardX import event_file_writer  # Slow to import.
    from tensorboardX.proto import event_pb2, plugin_text_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2

    self._event, self._summary, self._text = event_pb2, summary_pb2, plugin_text_pb2
    self._tensor, self._shape = tensor_pb2, tensor_shape_pb2
    folder = self._folder = workdir / 'tensorboard'
    make_directory(folder)
    self._writer = event_file_writer.EventsWriter(os.path.join(folder, 'events'), f'.{os.getpid()}')
    if resume_step:
      start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
      self._write(event_pb2.Event(step=resume_step + 1, session_log=start))

  def _write(self, event: Any) -> None:
    event.wall_time = time.time()
    self._writer.write_event(event)
    self._writer.flush()

  def numbers(self, step: int, values: Mapping[str, float | None]) -> None:
    """Write the numbers of a step; None is left out."""
    value = self._summary.Summary.Value
    numbers = [value(tag=name, simple_value=number) for name, number in values.items() if number is not None]
    self._write(self._event.Event(step=step, summary=self._summary.Summary(value=numbers)))

  def samples(self, step: int, samples: Sequence[Sample]) -> None:
    """Write a table of samples, which the text plugin shows."""
    # Indented, so that the text is shown verbatim and not as Markdown.
    rows = [[_indented(cell) for cell in sample.cells(LONGEST_CELL)] for sample in samples]
    cells = [f'**{name}**' for name in COLUMNS] + [cell for row in rows for cell in row]
    dim = self._shape.TensorShapeProto.Dim
    tensor = self._tensor.TensorProto(
      dtype='DT_STRING',
      string_val=[cell.encode() for cell in cells],
      tensor_shape=self._shape.TensorShapeProto(dim=[dim(size=len(rows) + 1), dim(size=len(COLUMNS))]),
    )
    plugin = self._summary.SummaryMetadata.PluginData(
      plugin_name='text', content=self._text.TextPluginData(version=0).SerializeToString()
    )
    value = self._summary.Summary.Value(
      tag=SAMPLES, metadata=self._summary.SummaryMetadata(plugin_data=plugin), tensor=tensor
    )
    self._write(self._event.Event(step=step, summary=self._summary.Summary(value=[value])))

  def sync(self) -> None:
    """Sync the written events to disk; raise OSError if that fails."""
    sync_tree(self._folder)

  def close(self) -> None:
    """Close the event file."""
    self._writer.close()


def _indented(text: str) -> str:
  return '\n'.join('    ' + line for line in text.splitlines())


class WeightsAndBiases:
  """A logger to the run's page on Weights & Biases, whose id is kept in the run directory.

  Steps that a resumed run repeats are on the page already, with the same numbers; the page ignores them. Once the page
  is open, an error of Weights & Biases ends the logging to it, but not the run, which still writes metrics.jsonl.
  """

  def __init__(self, workdir: epath.Path, config: Config, resume_step: int = 0):
    """Open a new page, or the page of the resumed run.

    Raises:
      UserError: the page cannot be opened.
    """
    import wandb

    self._wandb = wandb
    self._lost = False  # Whether logging to the page has ended after an error.
    try:
      self._run = wandb.init(
        project=config.trainer.wandb_project,
        name=config.name,
        id=run_id(workdir, resume_step),
        resume='allow',
        config=json.loads(config.to_json()),
        dir=str(workdir) if is_local(workdir) else None,
      )
    except wandb.Error as error:
      raise _unusable(error) from error

  def numbers(self, step: int, values: Mapping[str, float | None]) -> None:
    """Log the numbers of a step; None is left out."""
    known = {name: value for name, value in values.items() if value is not None}
    self._try(lambda: self._run.log(known, step=step))

  def samples(self, step: int, samples: Sequence[Sample]) -> None:
    """Log a table of samples."""
    rows = [
      [shorten(sample.prompt, LONGEST_CELL), shorten(sample.completion, LONGEST_CELL)]
      + [UNGRADED if sample.score is None else sample.score, shorten(sample.feedback or '', LONGEST_CELL)]
      for sample in samples
    ]

    def log() -> None:
      table = self._wandb.Table(columns=list(COLUMNS), data=rows, allow_mixed_types=True)
      self._run.log({SAMPLES: table}, step=step)

    self._try(log)

  def sync(self) -> None:
    """Do nothing: Weights & Biases manages its own files."""

  def close(self) -> None:
    """Upload what is left, and mark the run's page as finished."""
    self._try(self._run.finish)

  def _try(self, function: Callable[[], Any]) -> None:
    if self._lost:
      return
    try:
      function()
    except Exception as error:  # From wandb, from the network, or from wandb's background process.
      self._lost = True
      logging.warning('Logging to Weights & Biases failed and is off until the run is started again: %r', error)


def run_id(workdir: epath.Path, resume_step: int) -> str:
  """Return the id of a run's page: a new one, written to the run's directory, unless a run with an id is resumed.

  Raises:
    UserError: the file with the id cannot be read.
  """
  path = workdir / WANDB_ID
  if resume_step and path.exists() and (known := saved_id(path)):
    return known
  drawn = _checked(f'z{uuid.uuid4().hex[:15]}')
  write_atomically(path, drawn + '\n')
  return drawn


def saved_id(path: epath.Path) -> str:
  """Return the id of a run's page in a file; one of an earlier version has 32 hex digits, none of which is a check.

  Raises:
    UserError: the file cannot be read, or is not as it was written.
  """
  text = read_text(path, NEW_PAGE)
  if len(text) == 33 and not re.fullmatch('[0-9a-f]{32}\n', text) and text != _checked(text[:16]) + '\n':
    raise UserError(f'{path} is not as it was written: {NEW_PAGE}.')
  return text.strip()


def _checked(drawn: str) -> str:
  """Return an id of 16 characters with 16 check digits; the first is no hex digit, even if one bit of it is flipped."""
  return drawn + hashlib.sha256(drawn.encode()).hexdigest()[:16]


def check_wandb(config: Config) -> None:
  """Check that Weights & Biases can be used if the settings ask for it; on a terminal it may ask for its key.

  Raises:
    UserError: wandb is not installed, or has no key.
  """
  if config.trainer.wandb_project is None:
    return
  if importlib.util.find_spec('wandb') is None:
    raise UserError(
      'trainer.wandb_project is set but wandb is not installed: `pip install wandb`, or set trainer.wandb_project=None.'
    )
  if os.environ.get('WANDB_MODE', 'online') != 'online':
    return
  import wandb

  try:
    wandb.login()
  except wandb.Error as error:
    raise _unusable(error) from error


def _unusable(error: Exception) -> UserError:
  return UserError(
    f'trainer.wandb_project is set but Weights & Biases cannot be used ({first_line(error)}): run `wandb login`, or '
    'set WANDB_MODE=offline to log to this machine alone, or trainer.wandb_project=None.'
  )
