"""The published checkpoints of a run, listed by their names alone."""

from __future__ import annotations

import re

from etils import epath

from sdpo_jax.files import is_local

CHECKPOINTS = 'checkpoints'  # The folder of valid checkpoints.
DAMAGED = 'checkpoints_damaged'  # The folder of those that could not be read.
MANIFEST = 'manifest.json'  # The last file of a checkpoint to be written; in a store, it publishes the checkpoint.
_STEP = re.compile('[1-9][0-9]*')  # Step 0 has no checkpoint.


def is_step(name: str) -> bool:
  """Return whether a name is that of a checkpoint: a step without leading zeros."""
  return _STEP.fullmatch(name) is not None


def published_steps(workdir: epath.PathLike) -> list[int]:
  """Return the steps of published checkpoints in order; files are not read, so that a checkpoint may be damaged."""
  directory = epath.Path(workdir) / CHECKPOINTS
  if not directory.is_dir():
    return []
  # On a disk, a folder gets this name once it is complete; in a store, the last object marks it as complete.
  return sorted(
    int(path.name)
    for path in directory.iterdir()
    if is_step(path.name) and (is_local(path) or (path / MANIFEST).exists())
  )


def newest(workdir: epath.PathLike) -> int:
  """Return the last of `published_steps`; 0 if there is none."""
  return max(published_steps(workdir), default=0)
