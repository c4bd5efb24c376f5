"""Reconstruction of the starts of a run from its other files, if `epochs.json` is damaged or missing.

`fingerprint.json` lists every start with the step from which it resumed, checkpoints and lines carry the fencing epoch
of the process that wrote them, and the checkpoints show which steps were published.
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
from sdpo_jax.training.directory.published_checkpoints import CHECKPOINTS, DAMAGED, MANIFEST, is_step, published_steps
from sdpo_jax.training.directory.workdir import saved_settings

_NAMED = re.compile(r'\d+\.(?:unfinished|deleted)\.(\d+)')  # Folders whose names end with the writer's epoch.


def recorded(workdir: epath.Path, content: bytes | None, say: Callable[[str], None]) -> Epochs:
  """Return the starts of a run from `epochs.json` or, if it is damaged or missing, from other files.

  Without that file and without checkpoints, nothing tells a run whose checkpoints are lost from one that was killed
  before its first. A run that has ended a step then counts as one with a checkpoint, and begins again only if asked.

  Args:
    workdir: directory of the run.
    content: content of `epochs.json`; None: the file is missing.
    say: receives a sentence about damage.
  """
  if content is not None:
    try:
      return epochs.parse(content, workdir / epochs.EPOCHS)
    except epochs.DamagedEpochsError as error:
      say(str(error))
  record = of_starts(workdir)
  published = max([record.published, *published_steps(workdir)]) or due(workdir) or int(_was_recorded(workdir))
  return dataclasses.replace(record, published=published)


def _was_recorded(workdir: epath.Path) -> bool:
  """Return whether a step has ended since there was an `epochs.json`, whose epoch its line names."""
  return any(line['step'] > 0 and FENCING_EPOCH in line for line in raw_lines(workdir))


def largest_epoch(workdir: epath.Path) -> int:
  """Return the largest fencing epoch in any file of a run except `epochs.json` and the lock; 0 if there is none."""
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
  """Return the entries of the folders of valid and of damaged checkpoints."""
  places = (workdir / CHECKPOINTS, workdir / DAMAGED)
  return [path for place in places if place.is_dir() for path in place.iterdir()]


def _epoch_of(checkpoint: epath.Path) -> Any:
  """Return the epoch in a checkpoint's manifest; 0 if it cannot be read, which is reported on restore."""
  try:
    return sealed.unseal((checkpoint / MANIFEST).read_bytes()).get(FENCING_EPOCH)
  except (ValueError, OSError):
    return 0


def reached(workdir: epath.Path) -> int:
  """Return the largest step that appears in metrics.jsonl, `rollouts/` or `eval/`."""
  steps = [line['step'] for line in raw_lines(workdir)]
  return max([0, *steps, *numbers(workdir / 'rollouts'), *numbers(workdir / 'eval')])


def due(workdir: epath.Path) -> int:
  """Return the last step whose checkpoint a run, by its settings, must have published; 0 if there is none.

  Checkpoints are written during later steps, but each is complete before the next one is begun.
  """
  trainer = saved_settings(workdir).get('trainer') if (workdir / 'config.json').exists() else None
  save_freq = trainer.get('save_freq') if isinstance(trainer, dict) else None
  return max(0, (reached(workdir) - 1) // save_freq - 1) * save_freq if type(save_freq) is int and save_freq > 0 else 0


def numbers(folder: epath.Path) -> list[int]:
  """Return the numbers in the names of a folder's entries: 10 and 20 for `10` and `20.jsonl`."""
  if not folder.is_dir():
    return []
  stems = [path.name.partition('.')[0] for path in folder.iterdir() if path.name.count('.') <= 1]
  return [int(stem) for stem in stems if stem.isascii() and stem.isdigit()]
