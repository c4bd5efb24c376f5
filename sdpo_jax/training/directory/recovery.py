"""What the other files of a run say of its starts, where `epochs.json` is damaged or gone.

`fingerprint.json` names every start with the step from which it went on, checkpoints and lines bear the fencing epoch
of the process that wrote them, and checkpoints show what was published.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import re
from typing import Any

from etils import epath

from sdpo_jax.training.directory import epochs, sealed
from sdpo_jax.training.directory.epochs import FENCING_EPOCH, Epochs, of_starts
from sdpo_jax.training.directory.lines import raw_lines
from sdpo_jax.training.directory.published import CHECKPOINTS, DAMAGED, MANIFEST, is_step, published_steps
from sdpo_jax.training.directory.workdir import saved_settings

_NAMED = re.compile(r'\d+\.(?:unfinished|deleted)\.(\d+)')  # Folders that are named by the epoch of who made them.


def recorded(workdir: epath.Path, content: bytes | None, say: Callable[[str], None]) -> Epochs:
  """Return the starts of a run that a start goes by: those in `epochs.json` or, where it is damaged or gone, in other
  files.

  Args:
    workdir: of the run.
    content: of `epochs.json`; None: it is not there.
    say: receives a sentence about what is damaged.
  """
  if content is not None:
    try:
      return epochs.parse(content, workdir / epochs.EPOCHS)
    except epochs.DamagedEpochsError as error:
      say(str(error))
  return _recovered(workdir)


def _recovered(workdir: epath.Path) -> Epochs:
  """Return the epochs of a run without `epochs.json`: those of `fingerprint.json`, and what was published for
  certain.
  """
  record = of_starts(workdir)
  published = max([record.published, *published_steps(workdir)]) or due(workdir)
  return dataclasses.replace(record, published=published)


def largest_epoch(workdir: epath.Path) -> int:
  """Return the largest fencing epoch that anything of a run bears but `epochs.json` and its lock; 0: nothing does."""
  found: list[Any] = [line.get(FENCING_EPOCH, 0) for line in raw_lines(workdir)]
  found += [epoch.fencing_epoch for epoch in of_starts(workdir).epochs]
  for path in folders(workdir):
    named = _NAMED.match(path.name)
    if named is not None:
      found.append(int(named[1]))
    elif is_step(path.name.partition('.')[0]):
      found.append(_epoch_of(path))
  return max([0, *(number for number in found if type(number) is int)])


def folders(workdir: epath.Path) -> list[epath.Path]:
  """Return what lies beside the checkpoints of a run and those that were damaged, and these."""
  places = (workdir / CHECKPOINTS, workdir / DAMAGED)
  return [path for place in places if place.is_dir() for path in place.iterdir()]


def _epoch_of(checkpoint: epath.Path) -> Any:
  """Return the epoch in the manifest of a checkpoint; 0 where none can be read, which is the restore's to say."""
  try:
    return sealed.unseal((checkpoint / MANIFEST).read_bytes()).get(FENCING_EPOCH)
  except (ValueError, OSError):
    return 0


def reached(workdir: epath.Path) -> int:
  """Return the largest step that metrics.jsonl, `rollouts/` or `eval/` know of."""
  steps = [line['step'] for line in raw_lines(workdir)]
  return max([0, *steps, *numbers(workdir / 'rollouts'), *numbers(workdir / 'eval')])


def due(workdir: epath.Path) -> int:
  """Return the last step of which a run has published a checkpoint for certain, by its settings alone; 0: of none.

  Checkpoints are written beside the steps that follow, but each is whole before the next one is begun.
  """
  trainer = saved_settings(workdir).get('trainer') if (workdir / 'config.json').exists() else None
  save_freq = trainer.get('save_freq') if isinstance(trainer, dict) else None
  return max(0, (reached(workdir) - 1) // save_freq - 1) * save_freq if type(save_freq) is int and save_freq > 0 else 0


def numbers(folder: epath.Path) -> list[int]:
  """Return the numbers that entries of a folder are named by: 10, 20 for `10` and `20.jsonl`."""
  if not folder.is_dir():
    return []
  stems = [path.name.partition('.')[0] for path in folder.iterdir() if path.name.count('.') <= 1]
  return [int(stem) for stem in stems if stem.isascii() and stem.isdigit()]
