"""The fencing epochs of a run: which process could write when, and from which step it went on.

Every start that may write to a run directory gets a number that is larger than all before it, its fencing epoch, and
what it publishes bears that number. A process that was stopped, or cut off from a file server, may wake after another
one has taken the run over, and write once more before it notices. What it writes then is told from the run by two
numbers: its epoch is older, and its step lies beyond the one from which the newer epoch went on.
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
FENCING_EPOCH = 'fencing_epoch'  # Its name in manifests and in the lines of metrics.jsonl.
FORMAT = 2
_UNSEALED = 1  # The format of earlier versions.
_logger = logging.getLogger('sdpo_jax.epochs')


class DamagedEpochsError(UserError):
  """`epochs.json` is not as it was written."""


@dataclasses.dataclass(frozen=True)
class Epoch:
  """One start of a run."""

  fencing_epoch: int
  host: str
  pid: int
  since: str
  token: str
  resumed_from: int | None = None  # The step from which it went on, 0 from nothing; None until that is known.

  def __str__(self) -> str:
    return f'host {self.host}, process {self.pid}, since {self.since}'


@dataclasses.dataclass(frozen=True)
class Epochs:
  """The starts of a run that tell what is the run's, oldest first, and what must not be forgotten between them.

  A start from which nothing can be left, or that fences no more than a later one does, is forgotten: however often a
  run is started, there are no more of them than checkpoints from which it went on.
  """

  epochs: tuple[Epoch, ...] = ()
  published: int = 0  # Step of the last checkpoint that was published; 0: none since the run began (anew).
  restarting: int | None = None  # Old results are being moved to `before_restart/<n>`.

  @property
  def newest(self) -> int:
    return self.epochs[-1].fencing_epoch if self.epochs else 0

  def begun(self, epoch: Epoch) -> Epochs:
    """Add a start, whose number is larger than all before; those that never went on have published nothing."""
    return dataclasses.replace(
      self, epochs=(*(other for other in self.epochs if other.resumed_from is not None), epoch)
    )

  def resumed(self, step: int) -> Epochs:
    """Note from which step the newest epoch goes on; whoever resumes from a checkpoint has proof that there is one."""
    *older, newest = self.epochs
    fencing = [epoch for epoch in older if epoch.resumed_from is not None and epoch.resumed_from < step]
    newest = dataclasses.replace(newest, resumed_from=step)
    return dataclasses.replace(self, epochs=(*fencing, newest), published=max(self.published, step))

  def fenced(self, fencing_epoch: int, step: int) -> Epoch | None:
    """Return the epoch that had taken the run over when an older one wrote `step`; None: what was written is the run's.

    Args:
      fencing_epoch: under which it was written; 0 for what an earlier version of this program wrote.
      step: that was written.
    """
    for epoch in self.epochs:
      if epoch.fencing_epoch > fencing_epoch and epoch.resumed_from is not None and step > epoch.resumed_from:
        return epoch
    return None

  def to_json(self) -> str:
    content = {'format': FORMAT, 'published': self.published, 'restarting': self.restarting}
    return sealed.seal(content | {'epochs': [dataclasses.asdict(epoch) for epoch in self.epochs]})


def parse(content: bytes, path: epath.PathLike) -> Epochs:
  """Return what `epochs.json` holds.

  Raises:
    DamagedEpochsError: it is not as it was written.
    UserError: it is of a later version.
  """
  try:
    values = json.loads(content)
    unsealed = values['format'] == _UNSEALED and sealed.SEAL not in values
    values = values if unsealed else sealed.unseal(content)
    if values['format'] not in (FORMAT, _UNSEALED):
      raise UserError(
        f'{path} has the format {short_repr(values["format"])}, which a later version wrote: use that one.'
      )
    epochs = tuple(Epoch(**fields) for fields in values['epochs'])
    result = Epochs(epochs, values['published'], values['restarting'])
    numbers = [epoch.fencing_epoch for epoch in epochs]
    optional = [result.restarting, *(epoch.resumed_from for epoch in epochs)]
    whole = [*numbers, result.published, *(number for number in optional if number is not None)]
    if not all(type(number) is int and number >= 0 for number in whole):
      raise ValueError('its numbers are not whole numbers')
    if numbers != sorted(set(numbers)):
      raise ValueError('its numbers do not grow')
  except (ValueError, TypeError, KeyError, RecursionError) as error:
    raise DamagedEpochsError(
      f'{path} is damaged ({first_line(error)}); the next start of the run writes it anew from what checkpoints, lines '
      f'and {starts.FINGERPRINT} say.'
    ) from error
  return result


def of_starts(workdir: epath.PathLike) -> Epochs:
  """Return the epochs that `fingerprint.json` knows; none where it is gone, or damaged, which is for its reader to
  say.
  """
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
  """Return the epochs of a run, to tell what is the run's; of one that an earlier version wrote, none.

  Where `epochs.json` is damaged, which is said, those that `fingerprint.json` knows.

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
  """Return the lines of metrics.jsonl that are the run's, and the steps of those that are not."""
  kept, foreign = [], []
  for line in lines:
    if epochs.fenced(line.get(FENCING_EPOCH, 0), line['step']) is None:
      kept.append(line)
    else:
      foreign.append(line['step'])
  return kept, foreign
