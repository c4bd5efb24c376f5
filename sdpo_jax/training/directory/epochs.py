"""The fencing epochs of a run, which tell the writes of its owner from those of a process that has lost it.

Every start that may write to a run directory gets a number larger than all before it, its fencing epoch, and everything
that it publishes carries this number. A process that was suspended, or cut off from a file server, may wake up after
another one has taken over the run, and write once more before it notices. Such writes are recognised by two numbers:
their epoch is older, and their step is later than the step from which the newer epoch resumed.
"""

from __future__ import annotations

from collections.abc import Iterable
import dataclasses
import json
import logging
from typing import Any

from etils import epath

from sdpo_jax.errors import UserError, first_line, short_repr
from sdpo_jax.files import read_bytes
from sdpo_jax.training.directory import sealed, starts

EPOCHS = 'epochs.json'
FENCING_EPOCH = 'fencing_epoch'  # Key of the epoch in manifests and in lines of metrics.jsonl.
FORMAT = 2
_UNSEALED = 1  # The format of earlier versions, without a seal.
_logger = logging.getLogger('sdpo_jax.epochs')


class DamagedEpochsError(UserError):
  """`epochs.json` is damaged."""


@dataclasses.dataclass(frozen=True)
class Epoch:
  """One start of a run."""

  fencing_epoch: int
  host: str
  pid: int
  since: str
  token: str
  resumed_from: int | None = None  # The step from which it resumed; 0: it began a run; None: not known yet.

  def __str__(self) -> str:
    return f'host {self.host}, process {self.pid}, since {self.since}'


@dataclasses.dataclass(frozen=True)
class Epochs:
  """The contents of `epochs.json`: the starts of a run, oldest first, and facts that must survive between starts.

  A start is forgotten if none of its files can be left, or if a later start fences at least as much. So there are at
  most as many entries as checkpoints from which the run resumed, however often it is started.
  """

  epochs: tuple[Epoch, ...] = ()
  published: int = 0  # Step of the last checkpoint that was published; 0: none since the run began, or began again.
  restarting: int | None = None  # The n of `before_restart/<n>`, to which --restart is moving results; None: it is not.

  @property
  def newest(self) -> int:
    """The largest fencing epoch; 0 if the run was never started."""
    return self.epochs[-1].fencing_epoch if self.epochs else 0

  def begun(self, epoch: Epoch) -> Epochs:
    """Return the record with a new start; starts that never resumed have published nothing and are dropped."""
    return dataclasses.replace(
      self, epochs=(*(other for other in self.epochs if other.resumed_from is not None), epoch)
    )

  def resumed(self, step: int) -> Epochs:
    """Return the record after the newest epoch has resumed from `step`, whose checkpoint was therefore published."""
    *older, newest = self.epochs
    fencing = [epoch for epoch in older if epoch.resumed_from is not None and epoch.resumed_from < step]
    newest = dataclasses.replace(newest, resumed_from=step)
    return dataclasses.replace(self, epochs=(*fencing, newest), published=max(self.published, step))

  def fenced(self, fencing_epoch: int, step: int) -> Epoch | None:
    """Return the epoch that had taken over the run when an older one wrote `step`; None if the write is valid.

    Args:
      fencing_epoch: epoch of the writer; 0 if it was an earlier version of this program.
      step: step that was written.
    """
    for epoch in self.epochs:
      if epoch.fencing_epoch > fencing_epoch and epoch.resumed_from is not None and step > epoch.resumed_from:
        return epoch
    return None

  def to_json(self) -> str:
    """Return the text of `epochs.json`, sealed."""
    content = {'format': FORMAT, 'published': self.published, 'restarting': self.restarting}
    return sealed.seal(content | {'epochs': [dataclasses.asdict(epoch) for epoch in self.epochs]})


def parse(content: bytes, path: epath.PathLike) -> Epochs:
  """Return the record in the content of `epochs.json`.

  Raises:
    DamagedEpochsError: the content is damaged.
    UserError: a later version of this program wrote it.
  """
  try:
    values = json.loads(content)
    unsealed = values['format'] == _UNSEALED and sealed.SEAL not in values
    values = values if unsealed else sealed.unseal(content)
    if values['format'] not in (FORMAT, _UNSEALED):
      raise UserError(
        f'{path} has the format {short_repr(values["format"])} of a later version of this program: use that version.'
      )
    epochs = tuple(Epoch(**fields) for fields in values['epochs'])
    result = Epochs(epochs, values['published'], values['restarting'])
    numbers = [epoch.fencing_epoch for epoch in epochs]
    optional = [result.restarting, *(epoch.resumed_from for epoch in epochs)]
    whole = [*numbers, result.published, *(number for number in optional if number is not None)]
    if not all(type(number) is int and number >= 0 for number in whole):
      raise ValueError('its numbers are not whole numbers')
    if numbers != sorted(set(numbers)):
      raise ValueError('its epochs do not increase')
  except (ValueError, TypeError, KeyError, RecursionError) as error:
    raise DamagedEpochsError(
      f'{path} is damaged ({first_line(error)}); the next start of the run restores it from the checkpoints, '
      f'metrics.jsonl and {starts.FINGERPRINT}.'
    ) from error
  return result


def of_starts(workdir: epath.PathLike) -> Epochs:
  """Return the epochs recorded in `fingerprint.json`; none if it is missing or damaged, which `starts.read` reports."""
  record = Epochs()
  try:
    found = starts.read(workdir)
  except UserError:
    found = []
  for start in found:
    number, time = start.get(FENCING_EPOCH), start.get('time')
    if type(number) is int and number > record.newest and isinstance(time, str):
      record = record.begun(Epoch(number, 'unknown', 0, time, '')).resumed(start['step'])
  return record


def read_epochs(workdir: epath.PathLike) -> Epochs:
  """Return the epochs of a run, which decide which writes are valid; empty for a run of an earlier version.

  If `epochs.json` is damaged, a warning is logged, and the epochs are those of `fingerprint.json`.

  Raises:
    UserError: they cannot be read.
  """
  path = epath.Path(workdir) / EPOCHS
  if not path.exists():
    return Epochs()
  try:
    return parse(read_bytes(path, 'make it readable'), path)
  except DamagedEpochsError as error:
    _logger.warning('%s', error)
    return of_starts(workdir)


def of_the_run(lines: Iterable[dict[str, Any]], epochs: Epochs) -> tuple[list[dict[str, Any]], list[int]]:
  """Return the valid lines of metrics.jsonl, and the steps of lines that were written by a process without the run."""
  kept, foreign = [], []
  for line in lines:
    if epochs.fenced(line.get(FENCING_EPOCH, 0), line['step']) is None:
      kept.append(line)
    else:
      foreign.append(line['step'])
  return kept, foreign
