"""Detection of lost checkpoints, so that no run silently begins again over the remains of another.

A disk that is not mounted looks like a run without checkpoints. Other files of the run do not tell whether there ever
was one, since a run that is preempted before its first checkpoint must start again by itself. Therefore `epochs.json`
records the step of the last published checkpoint. If it is lost, too, a run that has ended a step is not begun again.
"""

from __future__ import annotations

from collections.abc import Callable
import errno
import itertools
import logging
import os

from etils import epath

from sdpo_jax.errors import UserError
from sdpo_jax.files import is_local, make_directory, read_bytes, sync_directory
from sdpo_jax.tables import named_steps
from sdpo_jax.training.directory.epochs import EPOCHS, Epochs
from sdpo_jax.training.directory.locks import unwritable
from sdpo_jax.training.directory.ownership import Ownership
from sdpo_jax.training.directory.published_checkpoints import published_steps
from sdpo_jax.training.directory.reconstructed_starts import numbers, reached, recorded
from sdpo_jax.training.directory.workdir import BEFORE_RESTART, RESULTS

_logger = logging.getLogger('sdpo_jax.checkpoints')


def settle(workdir: epath.Path, ownership: Ownership, *, restart: bool, say: Callable[[str], None]) -> None:
  """Check that no checkpoints of a run are lost; with `restart`, move what is left of such a run away.

  Args:
    workdir: directory of the run, whose `config.json` is still that of the start before.
    ownership: ownership of the directory.
    restart: whether to begin at step 0 if the checkpoints are lost.
    say: receives sentences for the user.

  Raises:
    UserError: published checkpoints are lost, or files cannot be moved.
  """
  record = ownership.record()
  if record.restarting is not None:
    # If the disk with the checkpoints has been mounted meanwhile, they are moved, too.
    steps = published_steps(workdir)
    back = f', including checkpoints ({named_steps(steps)}),' if steps else ''
    say(
      f'A --restart of {workdir} was interrupted: the rest of the old results{back} is moved to '
      f'{workdir / BEFORE_RESTART / str(record.restarting)}, and the run begins again at step 0.'
    )
    _move(workdir, record.restarting, ownership)
    record = ownership.record()
  steps = published_steps(workdir)
  if restart and not steps:
    if any((workdir / name).exists() for name in RESULTS):
      number = 1 + max(numbers(workdir / BEFORE_RESTART), default=0)
      ownership.restarting(number, record.published)
      _move(workdir, number, ownership)
      say(f'The run begins again at step 0; what was there is in {workdir / BEFORE_RESTART / str(number)}.')
    return
  if restart:
    say(
      f'--restart does nothing here: the checkpoint of step {steps[-1]} is there. To begin again at step 0, choose '
      'another --workdir.'
    )
  if sentence := _newest_lost(workdir, record):
    say(sentence)


def check_not_lost(workdir: epath.PathLike, say: Callable[[str], None] = _logger.warning) -> str | None:
  """Return what a start without --restart says of lost checkpoints; nothing is written.

  Args:
    workdir: directory of the run.
    say: receives a sentence if `epochs.json` is damaged.

  Raises:
    UserError: it is refused, since all are lost.
  """
  path = epath.Path(workdir) / EPOCHS
  content = read_bytes(path, 'make it readable') if path.exists() else None
  record = recorded(path.parent, content, say)
  # Otherwise the start completes the restart.
  return None if record.restarting is not None else _newest_lost(path.parent, record)


def _newest_lost(workdir: epath.Path, record: Epochs) -> str | None:
  """Return a sentence if the checkpoint that was published last is lost; raise UserError if all are."""
  if not (steps := published_steps(workdir)):
    refuse_loss(workdir, record)
  elif steps[-1] < record.published:
    return (
      f'{workdir / "checkpoints"}: the checkpoint of step {record.published} was published and is no longer there; '
      f'the newest is that of step {steps[-1]}.'
    )
  return None


def refuse_loss(workdir: epath.Path, record: Epochs) -> None:
  """Raise UserError if a checkpoint was published; to be called when a run would begin at step 0."""
  if record.published:
    raise UserError(
      f'{workdir} has no checkpoint to resume from, although that of step {record.published} was published there (if '
      f'{EPOCHS} was lost, perhaps another) and other files of the run go up to step '
      f'{max(reached(workdir), record.published)}: mount the disk or restore the folder that holds '
      f'{workdir / "checkpoints"}; or add --restart to begin again at step 0, which moves what is there to '
      f'{workdir / BEFORE_RESTART}.'
    )


def _move(workdir: epath.Path, number: int, ownership: Ownership) -> None:
  """Move the existing `RESULTS` to `before_restart/<number>`; this can be repeated after any interruption."""
  target = workdir / BEFORE_RESTART / str(number)
  try:
    make_directory(target)
    for name in RESULTS:
      _move_all(workdir / name, target / name)
    if is_local(workdir):
      sync_directory(target)
      sync_directory(workdir)
  except OSError as error:
    raise unwritable(workdir, error) from error
  ownership.restarting(None, published=0)


def _move_all(source: epath.Path, target: epath.Path) -> None:
  """Move a file or folder beside one that was moved earlier; in a store, that one may be incomplete and is replaced."""
  if is_local(source):
    if os.path.lexists(source):
      _rename(source, target)
  elif source.is_dir():  # A store has no folders: objects are moved one by one.
    for path in source.iterdir():
      _move_all(path, target / path.name)
  elif source.exists():
    source.copy(target, overwrite=True)
    source.unlink()


def _rename(source: epath.Path, target: epath.Path) -> None:
  names = (f'{target.name}.{serial}' if serial else target.name for serial in itertools.count())
  free = next(path for name in names if not os.path.lexists(path := target.parent / name))
  try:
    os.rename(source, free)
  except OSError as error:
    if error.errno != errno.EBUSY:
      raise
    if set(os.listdir(source)) - {'lost+found'}:
      raise UserError(
        f'{source} is a mount point, which --restart cannot move away: unmount it, or move away what is in it, then '
        'start the same command again.'
      ) from error
