"""Checkpoints of a run's whole state: device state, data iterator, and the metrics of its step.

A checkpoint exists completely or not at all, and none is removed before a newer one is on disk. In a file system:

1. Orbax writes `STEP.unfinished.EPOCH/` in the background;
2. all of it is synced, then its `manifest.json` is written last, and synced;
3. the folder is renamed to `STEP/`, the rename is synced, and only then are older checkpoints removed, each of which is
   renamed first, too.

In an object store, which cannot rename, Orbax writes `STEP/`, and the manifest is the object that publishes it. A
restored checkpoint is compared with its manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
import contextlib
import dataclasses
import errno
import itertools
import logging
import math
import re
import threading
import time
from typing import TYPE_CHECKING, Any

from etils import epath
import jax
import orbax.checkpoint as ocp

from sdpo_jax.distributed.cluster import barrier
from sdpo_jax.distributed.collectives import agreed, gathered
from sdpo_jax.errors import UserError, first_line
from sdpo_jax.files import is_failing, is_local, make_directory, sync_directory, sync_tree, write_atomically
from sdpo_jax.training.checkpoint import digests, manifest
from sdpo_jax.training.checkpoint.manifest import CheckpointManifest, DamagedError
from sdpo_jax.training.checkpoint.unreadable import ignore_given_up_reads, is_out_of_reach
from sdpo_jax.training.directory.epochs import Epochs, read_epochs
from sdpo_jax.training.directory.published_checkpoints import CHECKPOINTS, DAMAGED, MANIFEST, is_step
from sdpo_jax.types import TrainState, Tree

if TYPE_CHECKING:
  from sdpo_jax.training.directory.ownership import Ownership

ARRAYS = 'arrays'  # Entry of the host's state that is not JSON but a tree of device arrays.
SKIPPED = ocp.PLACEHOLDER  # Placeholder for a leaf that is not read.
PAUSES = (0.5, 2.0, 5.0)  # Seconds before each further attempt to read a checkpoint that is out of reach.
NO_MANIFEST = f'it has no {MANIFEST}, because an earlier version wrote it or that file was lost'
_LEFT_OVER = re.compile(r'\d+\.(unfinished|deleted|orbax-checkpoint-tmp).*')  # Left by a process that was killed.
_COMMITTED = 'commit_success.txt'  # Orbax's last object in a store that cannot rename.
_logger = logging.getLogger('sdpo_jax.checkpoints')


class Checkpoints:
  """The checkpoints of one run, written asynchronously; a step's checkpoint exists completely or not at all.

  The latest `keep` checkpoints are kept and, if `best_metric` is set, the one with its largest value (the latest of
  equals).
  """

  def __init__(
    self,
    workdir: epath.PathLike,
    *,
    keep: int = 2,
    best_metric: str | None = None,
    read_only: bool = False,
    ownership: Ownership | None = None,
    say: Callable[[str], None] = _logger.warning,
    arrays: Tree | None = None,
  ):
    """Open the checkpoints of `workdir`.

    Args:
      workdir: directory of the run.
      keep: number of latest checkpoints to keep.
      best_metric: metric whose best checkpoint is kept in addition.
      read_only: whether to change nothing, since another process may be running the run.
      ownership: ownership of the directory, on process 0.
      say: receives sentences for the user about damaged checkpoints.
      arrays: the `ARRAYS` of a host's state as abstract arrays with shardings; None: they are not restored.

    Raises:
      UserError: the checkpoints cannot be opened.
    """
    self._workdir = epath.Path(workdir)
    if is_local(self._workdir):
      self._workdir = self._workdir.absolute()  # Orbax takes no relative path.
    self._keep, self._read_only, self._ownership, self._say = keep, read_only, ownership, say
    self._arrays = arrays
    self.best_metric = best_metric
    # Step → its manifest; None: the manifest cannot be read.
    self._manifests: dict[int, CheckpointManifest | None] = {}
    self._unranked: dict[int, _Problem] = {}  # Step → why its manifest cannot be read.
    self._reader = _reader()
    self._waiting = threading.Lock()  # Another thread may save while the main thread hangs; both call `wait`.
    self._publishing: tuple[int, list[int], futures.Future[None]] | None = None  # Step, steps it supersedes, the work.
    self._failed: list[int] = []  # Steps with a partly written checkpoint that must be removed.
    if not read_only:
      # All processes write to one folder per checkpoint, and only process 0 knows the epoch in its name.
      self._epoch = agreed(0 if ownership is None else ownership.epoch)
      self._writer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
      self._thread = futures.ThreadPoolExecutor(1, 'publish_checkpoint')
      try:
        self._clean_up()
      except OSError as error:
        with contextlib.suppress(UserError):
          self._manifests = self._scan()  # So that an error can name the step to resume from.
        raise self._write_error(error) from error
      barrier('the opening of the checkpoints')
    found = self._scan()
    steps = sorted(found) if read_only else gathered(sorted(found), 'the list of checkpoints')[0]
    self._manifests = {step: found.get(step) for step in steps}  # The same steps on every process.

  @property
  def directory(self) -> epath.Path:
    """The folder of the valid checkpoints."""
    return self._workdir / CHECKPOINTS

  def steps(self) -> list[int]:
    """Return the steps with a checkpoint, including one that is being written, oldest first."""
    if self._read_only:
      self._manifests = self._scan()
    return sorted(self._manifests)

  def best(self, before: int) -> int | None:
    """Return the step below `before` with the best kept checkpoint by `best_metric`, the latest of equals; or None."""
    self.wait()
    return self._best([step for step in self.steps() if step < before])

  def _best(self, steps: Sequence[int]) -> int | None:
    measured = {step: found.metrics for step in steps if (found := self._manifests[step]) is not None}
    ranked = [(metrics[self.best_metric], step) for step, metrics in measured.items() if self.best_metric in metrics]
    return max(ranked)[1] if ranked else None

  def state_digest(self, step: int) -> str | None:
    """Return the digest of the state in the checkpoint of one of `steps`; None if it has no manifest."""
    found = self._manifests[step]
    return found and found.state_digest

  def save(
    self,
    step: int,
    state: TrainState,
    host: Mapping[str, Any],
    metrics: Mapping[str, float],
    leaves: Mapping[str, str] | None = None,
    line_digest: str = '',
  ) -> None:
    """Start writing a checkpoint; return once the device arrays may be changed again.

    Args:
      step: number of finished generation batches.
      state: device state.
      host: host state as JSON values (data iterator, waiting batches), and perhaps `ARRAYS`.
      metrics: metrics of this step; empty if they were measured with another state. All are stored, so that
        `best_metric` may be changed at a resume.
      leaves: digests of the state's arrays, if known (`digests.leaf_digests`).
      line_digest: as in the manifest.

    Raises:
      UserError: this checkpoint or the one still in progress could not be written, or another process has taken over
        the run; earlier checkpoints are intact.
    """
    self.wait()
    if step in self._manifests:
      return
    leaves = digests.leaf_digests(state) if leaves is None else leaves
    draft = CheckpointManifest(step, self._epoch, leaves, _finite(metrics), line_digest=line_digest)
    self._check_owner()
    folder = self._unfinished(step)
    try:
      self._remove_failed()  # Orbax waits for process 0 before it begins.
      if jax.process_index() == 0 and not is_local(folder) and folder.exists():
        self._move(folder)  # The folder may be from a process that has lost the run.
      self._failed.append(step)
      items = {'state': ocp.args.PyTreeSave(state)}
      if ARRAYS in host:
        items[ARRAYS] = ocp.args.PyTreeSave(host[ARRAYS])
      values = {name: value for name, value in host.items() if name != ARRAYS}
      self._writer.save(folder, args=ocp.args.Composite(**items, host=ocp.args.JsonSave(values)))
    except (OSError, ValueError, RuntimeError) as error:
      raise self._write_error(error) from error
    self._manifests[step] = draft
    superseded = self._superseded()
    self._publishing = step, superseded, self._thread.submit(self._publish, draft, superseded)

  def measured(self, step: int, metrics: Mapping[str, float]) -> None:
    """Add metrics to the checkpoint of one of `steps`, whose state was saved before all of them were measured.

    Raises:
      UserError: they could not be written; the checkpoint is unchanged.
    """
    self.wait()
    self._check_owner()
    known = self._manifests.get(step)
    if known is None:
      return  # It is unreadable and not ranked, or another thread has reported that it could not be written.
    self._manifests[step] = dataclasses.replace(known, metrics=_finite(metrics))
    if jax.process_index() != 0:
      return
    folder = self.directory / str(step)
    try:
      written = dataclasses.replace(manifest.read_manifest(folder), metrics=_finite(metrics))
      write_atomically(folder / MANIFEST, written.to_json())
    except (OSError, DamagedError) as error:
      raise self._write_error(error) from error

  def wait(self) -> None:
    """Block until everything is written.

    Raises:
      UserError: the checkpoint could not be written; earlier checkpoints are intact.
    """
    with self._waiting:
      if self._publishing is None:
        return
      (step, superseded, work), self._publishing = self._publishing, None
      try:
        work.result()
      except BaseException as error:
        del self._manifests[step]
        if isinstance(error, OSError | ValueError | RuntimeError):
          raise self._write_error(error) from error
        raise
      self._failed.remove(step)
      for older in superseded:
        del self._manifests[older]

  def close(self) -> None:
    """Block until everything is written, and close all resources.

    Raises:
      UserError: as in `wait`.
    """
    try:
      self.wait()
    finally:
      self._reader.close()
      if not self._read_only:
        self._thread.shutdown()
        try:
          self._writer.close()
        except (OSError, ValueError, RuntimeError) as error:
          raise self._write_error(error) from error
        finally:
          with contextlib.suppress(OSError, UserError):  # The next start removes it.
            self._check_owner()
            self._remove_failed()

  def _remove_failed(self) -> None:
    """Remove the partly written folders of failed checkpoints, as the next one may need the room on a full disk."""
    failed, self._failed = self._failed, []
    if jax.process_index() != 0:
      return
    for step in failed:
      left = self._unfinished(step)
      if is_local(left):  # Orbax writes to a folder beside it until everything is written.
        names = [path.name for path in self.directory.iterdir()]
        found = [left.parent / name for name in names if name == left.name or name.startswith(f'{left.name}.')]
      else:
        found = [left] if left.exists() and not (left / MANIFEST).exists() else []
      for path in found:
        _remove_tree(path)

  def _check_owner(self) -> None:
    if self._ownership is not None:  # Only process 0 publishes.
      self._ownership.check()

  def _unfinished(self, step: int) -> epath.Path:
    """Return the folder to write a checkpoint to, distinct from that of a process that has lost the run."""
    return self.directory / (f'{step}.unfinished.{self._epoch}' if is_local(self.directory) else str(step))

  def _publish(self, draft: CheckpointManifest, superseded: Sequence[int]) -> None:
    """Wait until Orbax has written a checkpoint, write its manifest, rename it, and remove older ones."""
    self._writer.wait_until_finished()  # On every process; process 0 then publishes for all.
    if jax.process_index() != 0:
      return
    folder = self._unfinished(draft.step)
    sync_tree(folder)
    text = CheckpointManifest(**{**vars(draft), 'files': manifest.described_files(folder)}).to_json()
    if is_local(folder):
      write_atomically(folder / MANIFEST, text)
      self._check_owner()
      target = self.directory / str(draft.step)
      if target.exists():  # A process that had lost the run may have written it.
        self._move(target)
      folder.rename(target)
      sync_directory(self.directory)
    else:
      self._check_owner()
      write_atomically(folder / MANIFEST, text)
    if self._ownership is not None:
      self._ownership.published(draft.step)
    for step in superseded:
      try:
        self._remove(step)
      except OSError as error:
        self._say(f'The old checkpoint of step {step} cannot be removed ({first_line(error)}).')

  def _superseded(self) -> list[int]:
    """Return the steps whose checkpoints are not kept; unreadable ones are kept."""
    readable = [step for step in sorted(self._manifests) if self._manifests[step] is not None]
    kept = {*readable[-self._keep :], self._best(readable) if self.best_metric else None}
    return [step for step in readable if step not in kept]

  def _remove(self, step: int) -> None:
    """Remove a checkpoint; if this is interrupted, the rest no longer counts as one, and the next start removes it."""
    folder = self.directory / str(step)
    if is_local(folder):
      folder = folder.rename(self.directory / f'{step}.deleted.{self._epoch}')
      sync_directory(self.directory)
    else:
      (folder / _COMMITTED).unlink(missing_ok=True)
      (folder / MANIFEST).unlink(missing_ok=True)
    folder.rmtree()

  def _clean_up(self) -> None:
    """Create the folder of checkpoints, and remove partial ones that a killed process has left there."""
    if jax.process_index() != 0:
      return
    make_directory(self.directory)
    for path in list(self.directory.iterdir()) if self.directory.exists() else ():  # Stores have no empty folders.
      unfinished = not is_local(path) and is_step(path.name) and not (path / _COMMITTED).exists()
      if _LEFT_OVER.fullmatch(path.name) or unfinished:
        _remove_tree(path)

  def _scan(self) -> dict[int, CheckpointManifest | None]:
    """Return the manifests of the existing checkpoints by step; None if one cannot be read, which `restore` reports.

    Raises:
      UserError: the folder itself cannot be read.
    """
    found: dict[int, CheckpointManifest | None] = {}
    try:
      paths = list(self.directory.iterdir()) if self.directory.exists() else []
    except Exception as error:  # Object stores raise many kinds; all mean the same here.
      raise UserError(
        f'{self.directory} cannot be read ({first_line(error)}): make it readable, then start the same command again.'
      ) from error
    epochs = read_epochs(self._workdir)
    for path in paths:
      if is_step(path.name):
        step = int(path.name)
        try:
          found[step] = _manifest(path, epochs)
        except Exception as error:  # Object stores raise many kinds; all mean the same here.
          found[step] = None
          lost = isinstance(error, FileNotFoundError)
          self._unranked[step] = _Problem(NO_MANIFEST, out_of_reach=False) if lost else _Problem.of(error)
    return found

  def restore(self, like: TrainState) -> tuple[int, TrainState, dict[str, Any]] | None:
    """Return the newest intact checkpoint as (step, state, host state); None if there are no checkpoints.

    A checkpoint that any process finds damaged is reported and moved to `checkpoints_damaged/`, and the one before it
    is tried.

    Args:
      like: a state, or abstract arrays with shardings, in the layout to restore; `SKIPPED` leaves are not read.

    Raises:
      UserError: all checkpoints are damaged, or one is out of reach for now and may be intact.
    """
    self.wait()
    failures: dict[int, str] = {}
    while untried := [step for step in self.steps() if step not in failures]:
      step = untried[-1]
      try:
        state, host = self._restored(step, like)
      except DamagedError as error:
        failures[step] = str(error)
        before = 'trying the one before it' if len(untried) > 1 else 'there is none before it'
        self._say(f'The checkpoint of step {step} cannot be read ({error}); {before}.')
        continue
      if not self._read_only:
        for other, problem in self._unranked.items():
          if other not in failures:
            self._say(f'The checkpoint of step {other} is not ranked ({problem.reason}).')
        unranked = [other for other, problem in self._unranked.items() if not problem.out_of_reach]
        self._set_aside([*failures, *unranked])
      return step, state, host
    if failures:
      raise none_whole(self.directory, failures)
    return None

  def restore_step(self, step: int, like: TrainState) -> TrainState:
    """Return the device state of a step's checkpoint.

    Args:
      step: one of `steps`.
      like: as in `restore`.

    Raises:
      UserError: it cannot be read.
    """
    self.wait()
    try:
      return self._restored(step, like)[0]
    except DamagedError as error:
      raise UserError(
        f'The checkpoint of step {step} in {self.directory} cannot be read ({error}): start the '
        'same command again, which goes on from the newest one that can be read.'
      ) from error

  def _restored(self, step: int, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
    """Return state and host state of a checkpoint that all processes find intact; all raise the same errors.

    Raises:
      DamagedError: a process finds it damaged.
      UserError: several attempts to read it failed; it may be intact.
    """
    for pause in (*PAUSES, None):
      restored, problem = _attempt(self._read, step, like)
      problem = _shared(problem, f'the end of reading the checkpoint of step {step}')
      if problem is None:
        state, host, expected = restored
        # All processes run this program together.
        _, problem = _attempt(_check, state, expected)
        problem = _shared(problem, f'the end of checking the checkpoint of step {step}')
        if problem is None:
          if expected is None:
            self._say(f'The checkpoint of step {step} is not verified: {NO_MANIFEST}.')
          return state, host
      if not problem.out_of_reach:
        raise DamagedError(problem.reason)
      if pause is not None:
        self._say(f'The checkpoint of step {step} cannot be read ({problem.reason}); trying again.')
        time.sleep(pause)
    raise UserError(
      f'The checkpoint of step {step} in {self.directory} cannot be read for now, after {len(PAUSES) + 1} attempts '
      f'({problem.reason}), which does not mean that it is damaged; nothing was changed: make it readable, then start '
      'the same command again.'
    )

  def _read(self, step: int, like: TrainState) -> tuple[TrainState, dict[str, Any], CheckpointManifest | None]:
    like = abstract(like)
    folder = self.directory / str(step)
    try:
      expected = _manifest(folder, read_epochs(self._workdir))
      manifest.check_files(folder, expected)
    except FileNotFoundError as error:
      if not self._read_only:
        raise DamagedError(NO_MANIFEST) from error
      expected = None
    wanted = {'state': like} | ({} if self._arrays is None else {ARRAYS: self._arrays})
    items = {
      name: ocp.args.PyTreeRestore(item=tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree))
      for name, tree in wanted.items()
    }
    ignore_given_up_reads()
    restored = self._reader.restore(folder, args=ocp.args.Composite(**items, host=ocp.args.JsonRestore()))
    arrays = {} if self._arrays is None else {ARRAYS: restored[ARRAYS]}
    return restored['state'], restored['host'] | arrays, expected

  def _set_aside(self, steps: Sequence[int]) -> None:
    """Move damaged checkpoints to `checkpoints_damaged/`; if this is interrupted, the next start completes it.

    Raises:
      UserError: one cannot be moved.
    """
    steps = sorted(set().union(*gathered(list(steps), 'the list of damaged checkpoints')))
    for step in steps if jax.process_index() == 0 else ():
      folder = self.directory / str(step)
      try:
        self._move(folder)
      except OSError as error:
        raise UserError(
          f'The damaged checkpoint {folder} cannot be moved to {self._workdir / DAMAGED} ({first_line(error)}): move '
          'it away, then start the same command again.'
        ) from error
    for step in steps:
      self._manifests.pop(step, None)
      self._unranked.pop(step, None)
    if steps:
      barrier('the setting aside of damaged checkpoints')

  def _move(self, folder: epath.Path) -> None:
    """Move a checkpoint to `checkpoints_damaged/`, with a number appended to its name if that is taken."""
    self._check_owner()
    target = self._workdir / DAMAGED
    make_directory(target)
    there = {path.name for path in target.iterdir()} if target.exists() else ()  # Stores have no empty folders.
    names = (f'{folder.name}.{serial}' if serial else folder.name for serial in itertools.count())
    aside = target / next(name for name in names if name not in there)
    if is_local(folder):
      folder.rename(aside)
    else:  # If this is interrupted, the source stays in place.
      _copy(folder, aside)
      folder.rmtree()
    sync_directory(target)
    sync_directory(folder.parent)
    self._say(f'The checkpoint of step {folder.name} is now in {aside}.')

  def _write_error(self, error: Exception) -> UserError:
    # TensorStore has no error number for a full disk.
    way_out = 'see that its file system works' if is_failing(error) else 'if the disk is full, make room'
    return UserError(
      f'A checkpoint could not be written to {self.directory} ({first_line(error)}): {way_out}, then start the same '
      f'command again; it resumes from step {max(self._manifests, default=0)}.'
    )


@dataclasses.dataclass(frozen=True)
class _Problem:
  """Why a checkpoint could not be read."""

  reason: str
  out_of_reach: bool  # Whether it cannot be read for now, but may be intact.

  @classmethod
  def of(cls, error: Exception) -> _Problem:
    # Orbax wraps TensorStore's error about an array in an Exception with the array's whole specification.
    told = error.__cause__ if type(error) is Exception and error.__cause__ is not None else error
    return cls(first_line(told), is_out_of_reach(error))


def none_whole(directory: epath.Path, failures: Mapping[int, str]) -> UserError:
  """Return the error for a run without a whole checkpoint, given what is wrong with those in `directory` by step."""
  reasons = '; '.join(f'step {step}: {reason}' for step, reason in failures.items())
  earlier = f'; launch.export, evaluate and sample read one without {MANIFEST}, as does the version that wrote it'
  return UserError(
    f'None of the checkpoints in {directory} is whole ({reasons}). To begin again at step 0, move that folder away and '
    'add --restart to launch.train; else restore one, or choose another --workdir'
    f'{earlier if NO_MANIFEST in failures.values() else ""}.'
  )


def _manifest(folder: epath.Path, epochs: Epochs) -> CheckpointManifest:
  """Return the manifest of a checkpoint of the run with these epochs; errors as in `manifest.read_manifest`."""
  found = manifest.read_manifest(folder)
  successor = epochs.fenced(found.fencing_epoch, found.step)
  if successor is not None:
    raise DamagedError(f'a process that had lost the run to another one ({successor}) wrote it')
  return found


def _remove_tree(folder: epath.Path) -> None:
  """Remove a folder to which the threads of a failed write may still be adding files."""
  for attempt in itertools.count():
    try:
      return folder.rmtree()
    except OSError as error:
      if error.errno != errno.ENOTEMPTY or attempt == 50:
        raise
    time.sleep(0.02)


def _copy(source: epath.Path, target: epath.Path) -> None:
  for path in source.iterdir():
    if path.is_dir():
      _copy(path, target / path.name)
    else:
      path.copy(target / path.name, overwrite=True)


def _reader() -> ocp.Checkpointer:
  """Return a checkpointer that reads without synchronising processes, so that errors of one can be shared."""
  process = jax.process_index()
  alone = ocp.options.MultiprocessingOptions(
    primary_host=process, active_processes={process}, barrier_sync_key_prefix=f'reader_{process}'
  )
  return ocp.Checkpointer(ocp.CompositeCheckpointHandler(), multiprocessing_options=alone)


def _attempt(act: Callable[..., Any], *arguments: Any) -> tuple[Any, _Problem | None]:
  """Return the result of `act` and None, or else None and the reason why it failed."""
  try:
    return act(*arguments), None
  except Exception as error:  # Orbax and TensorStore raise many types for a damaged file; all mean the same here.
    return None, _Problem.of(error)


def _check(state: TrainState, expected: CheckpointManifest | None) -> None:
  """Raise DamagedError if the restored state differs from the saved one."""
  if expected is not None:
    manifest.check_leaves(digests.leaf_digests(state), expected)


def _shared(own: _Problem | None, what: str) -> _Problem | None:
  """Return the problem of the first process that has one, out of reach if that of any process is; None if none has."""
  found = [problem for problem in (own, *gathered(own, what)) if problem is not None]
  if not found:
    return None
  return _Problem(found[0].reason, any(problem.out_of_reach for problem in found))


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
  return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}


def abstract(state: TrainState) -> TrainState:
  """Return a state as abstract arrays with shardings; `SKIPPED` leaves are unchanged."""

  def describe(leaf: Any) -> Any:
    if leaf is SKIPPED:
      return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, 'sharding', None))

  return jax.tree.map(describe, state)


def only(field: str, state: TrainState) -> TrainState:
  """Return the layout that restores one field of a state; all other leaves are `SKIPPED`."""
  return jax.tree.map(lambda leaf: SKIPPED, state).replace(**{field: getattr(state, field)})
