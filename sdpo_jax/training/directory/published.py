"""Which checkpoints a run has published, by their names alone."""

from __future__ import annotations

import re

from etils import epath

from sdpo_jax.files import is_local

CHECKPOINTS = 'checkpoints'  # The folder of those that count.
DAMAGED = 'checkpoints_damaged'  # And of those that could not be read.
MANIFEST = 'manifest.json'  # The last file of a checkpoint; in a store, it publishes it.
_STEP = re.compile('[1-9][0-9]*')  # Step 0 has no checkpoint.


def is_step(name: str) -> bool:
  """Return whether a checkpoint may have this name: a step, and no other way to write one, such as 07."""
  return _STEP.fullmatch(name) is not None


def published_steps(workdir: epath.PathLike) -> list[int]:
  """Return the steps whose checkpoints were published, in order, as names say; nothing is read, and one may be
  damaged.
  """
  directory = epath.Path(workdir) / CHECKPOINTS
  if not directory.exists():
    return []
  # A disk's folder gets its name when it is whole; in a store its last object says that it is.
  return sorted(
    int(path.name)
    for path in directory.iterdir()
    if is_step(path.name) and (is_local(path) or (path / MANIFEST).exists())
  )


def newest(workdir: epath.PathLike) -> int:
  """Return the last of `published_steps`; 0: there is none."""
  return max(published_steps(workdir), default=0)
