"""Checkpoints that hold everything: device state, data iterator, what the run has measured so far.

One is there whole or not at all, and none is removed before a newer one is on the disk. In a file system:

1. Orbax writes `STEP.unfinished.EPOCH/` in the background;
2. all of it is synced, then its `manifest.json` is written last, and synced;
3. the folder is renamed to `STEP/`, the rename is synced, and only then are older checkpoints removed, each of which is
   renamed first, too.

In an object store, which cannot rename, Orbax writes `STEP/`, and the manifest is the object that publishes it. What is
restored is compared with its manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
import contextlib
import dataclasses
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
from sdpo_jax.training.checkpoint.manifest import DamagedError, Manifest
from sdpo_jax.training.checkpoint.unreadable import is_out_of_reach
from sdpo_jax.training.directory.epochs import Epochs, read_epochs
from sdpo_jax.training.directory.published import CHECKPOINTS, DAMAGED, MANIFEST, is_step
from sdpo_jax.types import TrainState

if TYPE_CHECKING:
  from sdpo_jax.training.directory.ownership import Ownership

SKIPPED = ocp.PLACEHOLDER  # In the place of a leaf that is not to be read.
PAUSES = (0.5, 2.0, 5.0)  # Seconds before each further attempt at what cannot be read at the moment.
NO_MANIFEST = f'it has no {MANIFEST}, so that an earlier version wrote it or that file was lost'
_LEFT_OVER = re.compile(r'\d+\.(unfinished|deleted|orbax-checkpoint-tmp).*')  # By a process that was killed.
_COMMITTED = 'commit_success.txt'  # Orbax's last object in a store that cannot rename.
_logger = logging.getLogger('sdpo_jax.checkpoints')


def _warn(text: str) -> None:
  _logger.warning('%s', text)


class Checkpoints:
  """The checkpoints of one run, written asynchronously; a step is there whole or not at all.

  Kept are the latest `keep` and, where `best_metric` is named, the latest of those with its largest value.
  """

  def __init__(
    self,
    workdir: epath.PathLike,
    *,
    keep: int = 2,
    best_metric: str | None = None,
    read_only: bool = False,
    ownership: Ownership | None = None,
    say: Callable[[str], None] = _warn,
  ):
    """Open the checkpoints of `workdir`.

    Args:
      workdir: of the run.
      keep: how many of the latest are kept.
      best_metric: by which one more is kept.
      read_only: whether the run may be going on elsewhere, and nothing is touched.
      ownership: of the directory, on process 0.
      say: receives sentences for the user about what is damaged.

    Raises:
      UserError: they cannot be opened.
    """
    self._workdir = epath.Path(workdir)
    if is_local(self._workdir):
      self._workdir = self._workdir.absolute()  # Orbax takes no relative path.
    self._keep, self._read_only, self._ownership, self._say = keep, read_only, ownership, say
    self.best_metric = best_metric
    self._manifests: dict[int, Manifest | None] = {}  # Step → its manifest; None: it cannot be read.
    self._unranked: dict[int, _Problem] = {}  # Step → why its manifest cannot be read.
    self._reader = _reader()
    self._waiting = threading.Lock()  # One thread may save where another one, which hangs, measures: both wait.
    self._publishing: tuple[int, list[int], futures.Future[None]] | None = None  # Step, those it supersedes, the work.
    self._failed: list[int] = []  # Steps of which a part may be written, and is to be removed.
    if not read_only:
      # All processes write one checkpoint in one folder, of which only process 0 knows the epoch.
      self._epoch = agreed(0 if ownership is None else ownership.epoch)
      self._writer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
      self._thread = futures.ThreadPoolExecutor(1, 'publish_checkpoint')
      try:
        self._clean_up()
      except OSError as error:
        with contextlib.suppress(UserError):
          self._manifests = self._scan()  # To say from where it resumes.
        raise self._write_error(error) from error
      barrier('the opening of the checkpoints')
    found = self._scan()
    steps = sorted(found) if read_only else gathered(sorted(found), 'the list of checkpoints')[0]
    self._manifests = {step: found.get(step) for step in steps}  # The same steps on every process.

  @property
  def directory(self) -> epath.Path:
    return self._workdir / CHECKPOINTS

  def steps(self) -> list[int]:
    """Return steps that have a checkpoint, or one that is being written, oldest first."""
    if self._read_only:
      self._manifests = self._scan()
    return sorted(self._manifests)

  def best(self, before: int) -> int | None:
    """Return the step below `before` whose checkpoint has the largest `best_metric`, the latest of equals; None: none
    has it.

    Its checkpoint is one that is kept.
    """
    self.wait()
    return self._best([step for step in self.steps() if step < before])

  def _best(self, steps: Sequence[int]) -> int | None:
    measured = {step: found.metrics for step in steps if (found := self._manifests[step]) is not None}
    ranked = [(metrics[self.best_metric], step) for step, metrics in measured.items() if self.best_metric in metrics]
    return max(ranked)[1] if ranked else None

  def state_digest(self, step: int) -> str | None:
    """Return the digest of the state in the checkpoint of one of `steps`; None: it has no manifest."""
    found = self._manifests[step]
    return found and found.state_digest

  def save(
    self,
    step: int,
    state: TrainState,
    host: Mapping[str, Any],
    metrics: Mapping[str, float],
    leaves: Mapping[str, str] | None = None,
  ) -> None:
    """Start writing a checkpoint; return once the device arrays may be changed again.

    Args:
      step: generation batches finished.
      state: device state.
      host: JSON-serialisable host state (data iterator, history).
      metrics: of this step, none where the state is not the one they were measured with; written beside the state, so
        that `best_metric` may be another one after a resume.
      leaves: the digests of the state's arrays, where they are known (`digests.leaf_digests`).

    Raises:
      UserError: it, or the one still being written, could not be written, or another process has taken the run over;
        earlier checkpoints are intact.
    """
    self.wait()
    if step in self._manifests:
      return
    leaves = digests.leaf_digests(state) if leaves is None else leaves
    draft = Manifest(step=step, fencing_epoch=self._epoch, leaves=leaves, metrics=_finite(metrics))
    self._check_owner()
    folder = self._unfinished(step)
    try:
      self._remove_failed()  # Orbax waits for process 0 before it begins.
      if jax.process_index() == 0 and not is_local(folder) and folder.exists():
        self._move(folder)  # It may be that of a process that has lost the run.
      self._failed.append(step)
      self._writer.save(
        folder, args=ocp.args.Composite(state=ocp.args.PyTreeSave(state), host=ocp.args.JsonSave(dict(host)))
      )
    except (OSError, ValueError, RuntimeError) as error:
      raise self._write_error(error) from error
    self._manifests[step] = draft
    superseded = self._superseded()
    self._publishing = step, superseded, self._thread.submit(self._publish, draft, superseded)

  def measured(self, step: int, metrics: Mapping[str, float]) -> None:
    """Put metrics into the checkpoint of one of `steps`, the state of which was saved before all were measured.

    Raises:
      UserError: it could not be written; the checkpoint is as it was.
    """
    self.wait()
    self._check_owner()
    known = self._manifests.get(step)
    if known is None:
      return  # It cannot be read, and is not ranked; or another thread has heard that it could not be written.
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
    """Return when everything is written.

    Raises:
      UserError: it could not be written; earlier checkpoints are intact.
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
    """Return when everything is written and nothing is open any more.

    Raises:
      UserError: as `wait`.
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
    """Remove what is there of checkpoints that could not be written; on a full disk room is needed for the next one."""
    failed, self._failed = self._failed, []
    if jax.process_index() != 0:
      return
    for step in failed:
      left = self._unfinished(step)
      if is_local(left):  # Orbax writes beside it, until all is there.
        names = [path.name for path in self.directory.iterdir()]
        found = [left.parent / name for name in names if name == left.name or name.startswith(f'{left.name}.')]
      else:
        found = [left] if left.exists() and not (left / MANIFEST).exists() else []
      for path in found:
        path.rmtree()

  def _check_owner(self) -> None:
    if self._ownership is not None:  # On process 0, the one that publishes.
      self._ownership.check()

  def _unfinished(self, step: int) -> epath.Path:
    """Return where a checkpoint is written; not where another process, which lost the run, may be writing it."""
    return self.directory / (f'{step}.unfinished.{self._epoch}' if is_local(self.directory) else str(step))

  def _publish(self, draft: Manifest, superseded: Sequence[int]) -> None:
    """Wait until Orbax has written a checkpoint, give it its manifest and its name, then remove older ones."""
    self._writer.wait_until_finished()  # On every process; process 0 ends it for all.
    if jax.process_index() != 0:
      return
    folder = self._unfinished(draft.step)
    sync_tree(folder)
    text = Manifest(**{**vars(draft), 'files': manifest.described_files(folder)}).to_json()
    if is_local(folder):
      write_atomically(folder / MANIFEST, text)
      self._check_owner()
      target = self.directory / str(draft.step)
      if target.exists():  # A process that had lost the run may have put it there.
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
    """Return the steps whose checkpoints are not kept; one that cannot be read is."""
    readable = [step for step in sorted(self._manifests) if self._manifests[step] is not None]
    kept = {*readable[-self._keep :], self._best(readable) if self.best_metric else None}
    return [step for step in readable if step not in kept]

  def _remove(self, step: int) -> None:
    """Remove a checkpoint: what is left of it, if this is interrupted, is none, and removed by the next start."""
    folder = self.directory / str(step)
    if is_local(folder):
      folder = folder.rename(self.directory / f'{step}.deleted.{self._epoch}')
      sync_directory(self.directory)
    else:
      (folder / _COMMITTED).unlink(missing_ok=True)
      (folder / MANIFEST).unlink(missing_ok=True)
    folder.rmtree()

  def _clean_up(self) -> None:
    """Make the folder of the checkpoints, and remove what a killed process left there of writing and removing."""
    if jax.process_index() != 0:
      return
    make_directory(self.directory)
    for path in list(self.directory.iterdir()) if self.directory.exists() else ():  # A store has no empty folders.
      unfinished = not is_local(path) and is_step(path.name) and not (path / _COMMITTED).exists()
      if _LEFT_OVER.fullmatch(path.name) or unfinished:
        path.rmtree()

  def _scan(self) -> dict[int, Manifest | None]:
    """Return the manifests of the checkpoints that are there by step; None: it cannot be read, which `restore` says.

    Raises:
      UserError: the folder itself cannot be read.
    """
    found: dict[int, Manifest | None] = {}
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
    """Return the newest whole checkpoint as (step, state, host state); None when there is none at all.

    A checkpoint that is damaged, for whichever process, is reported, moved to `checkpoints_damaged/`, and the one
    before it is tried.

    Args:
      like: a state, or abstract arrays with shardings, of the layout to restore; what is `SKIPPED` in it is not read.

    Raises:
      UserError: there are checkpoints but all are damaged, or one cannot be read for now, so that nobody knows.
    """
    self.wait()
    failures: dict[int, str] = {}
    while untried := [step for step in self.steps() if step not in failures]:
      step = untried[-1]
      try:
        state, host = self._restored(step, like)
      except DamagedError as error:
        failures[step] = str(error)
        self._say(f'The checkpoint of step {step} cannot be read ({error}); trying the one before it.')
        continue
      if not self._read_only:
        for other, problem in self._unranked.items():
          if other not in failures:
            self._say(f'The checkpoint of step {other} is not ranked ({problem.reason}).')
        unranked = [other for other, problem in self._unranked.items() if not problem.out_of_reach]
        self._set_aside([*failures, *unranked])
      return step, state, host
    if failures and set(failures.values()) == {NO_MANIFEST}:
      raise UserError(
        f'None of the checkpoints in {self.directory} has a {MANIFEST}: an earlier version of sdpo_jax wrote them, or '
        'those files were lost. They cannot be verified and are not trained on from, and are left as they are. Go on '
        'with the version that wrote them, or choose another --workdir; launch.export, evaluate and sample read them.'
      )
    if failures:
      raise UserError(
        f'None of the checkpoints in {self.directory} can be read '
        f'({"; ".join(f"step {step}: {reason}" for step, reason in failures.items())}): '
        'repair or remove them, or choose another --workdir.'
      )
    return None

  def restore_step(self, step: int, like: TrainState) -> TrainState:
    """Return the device state of the checkpoint of one step.

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
        f'The checkpoint of step {step} in {self.directory} cannot be read ({error}): repair it, or '
        'remove it and start the same command again.'
      ) from error

  def _restored(self, step: int, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
    """Return state and host state of a checkpoint that is whole for all processes; the same error on all of them.

    Raises:
      DamagedError: it is not.
      UserError: it could not be read, several times; it may be whole.
    """
    for pause in (*PAUSES, None):
      restored, problem = _attempt(self._read, step, like)
      problem = _shared(problem, f'the end of reading the checkpoint of step {step}')
      if problem is None:
        state, host, expected = restored
        # A program that all processes run together.
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

  def _read(self, step: int, like: TrainState) -> tuple[TrainState, dict[str, Any], Manifest | None]:
    like = abstract(like)
    folder = self.directory / str(step)
    try:
      expected = _manifest(folder, read_epochs(self._workdir))
      manifest.check_files(folder, expected)
    except FileNotFoundError as error:
      if not self._read_only:
        raise DamagedError(NO_MANIFEST) from error
      expected = None
    layout = ocp.args.PyTreeRestore(item=like, restore_args=ocp.checkpoint_utils.construct_restore_args(like))
    restored = self._reader.restore(folder, args=ocp.args.Composite(state=layout, host=ocp.args.JsonRestore()))
    return restored['state'], restored['host'], expected

  def _set_aside(self, steps: Sequence[int]) -> None:
    """Move damaged checkpoints to `checkpoints_damaged/`; interrupted, it is done by the next start.

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
    """Move a checkpoint to `checkpoints_damaged/` under its name, with a number if there is one of that name."""
    self._check_owner()
    target = self._workdir / DAMAGED
    make_directory(target)
    there = {path.name for path in target.iterdir()} if target.exists() else ()  # A store has no empty folders.
    names = (f'{folder.name}.{serial}' if serial else folder.name for serial in itertools.count())
    aside = target / next(name for name in names if name not in there)
    _rename(folder, aside)
    sync_directory(target)
    sync_directory(folder.parent)
    self._say(f'The checkpoint of step {folder.name} is now in {aside}.')

  def _write_error(self, error: Exception) -> UserError:
    # TensorStore has no number for a disk that is full.
    way_out = 'see that its file system works' if is_failing(error) else 'if the disk is full, make room'
    return UserError(
      f'A checkpoint could not be written to {self.directory} ({first_line(error)}): {way_out}, then start the same '
      f'command again; it resumes from step {max(self._manifests, default=0)}.'
    )


@dataclasses.dataclass(frozen=True)
class _Problem:
  """Why a checkpoint could not be read."""

  reason: str
  out_of_reach: bool  # For now, and it may be whole.

  @classmethod
  def of(cls, error: Exception) -> _Problem:
    # Orbax wraps what TensorStore says of an array in an Exception with the whole specification of the array.
    told = error.__cause__ if type(error) is Exception and error.__cause__ is not None else error
    return cls(first_line(told), is_out_of_reach(error))


def _manifest(folder: epath.Path, epochs: Epochs) -> Manifest:
  """Return the manifest of a checkpoint of the run with these epochs; errors as `manifest.read_manifest`."""
  found = manifest.read_manifest(folder)
  successor = epochs.fenced(found.fencing_epoch, found.step)
  if successor is not None:
    raise DamagedError(f'a process that had lost the run to another one ({successor}) wrote it')
  return found


def _rename(source: epath.Path, target: epath.Path) -> None:
  """Give a folder another name; in a store, copy it and remove it, which leaves it there if it is interrupted."""
  if is_local(source):
    source.rename(target)
  else:
    _copy(source, target)
    source.rmtree()


def _copy(source: epath.Path, target: epath.Path) -> None:
  for path in source.iterdir():
    if path.is_dir():
      _copy(path, target / path.name)
    else:
      path.copy(target / path.name, overwrite=True)


def _reader() -> ocp.Checkpointer:
  """Return what reads checkpoints; no process waits for another, so that one which cannot read may say so."""
  process = jax.process_index()
  alone = ocp.options.MultiprocessingOptions(
    primary_host=process, active_processes={process}, barrier_sync_key_prefix=f'reader_{process}'
  )
  return ocp.Checkpointer(ocp.CompositeCheckpointHandler(), multiprocessing_options=alone)


def _attempt(act: Callable[..., Any], *arguments: Any) -> tuple[Any, _Problem | None]:
  """Return what `act` does, or None and why it cannot."""
  try:
    return act(*arguments), None
  except Exception as error:  # Orbax and TensorStore raise many kinds for a damaged file; all mean the same here.
    return None, _Problem.of(error)


def _check(state: TrainState, expected: Manifest | None) -> None:
  """Raise DamagedError if what was restored is not what was saved."""
  if expected is not None:
    manifest.check_leaves(digests.leaf_digests(state), expected)


def _shared(own: _Problem | None, what: str) -> _Problem | None:
  """Return the problem of this process, or that of the first that has one; out of reach where it is for any."""
  found = [problem for problem in (own, *gathered(own, what)) if problem is not None]
  if not found:
    return None
  return _Problem(found[0].reason, any(problem.out_of_reach for problem in found))


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
  return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}


def abstract(state: TrainState) -> TrainState:
  """Shapes, dtypes and shardings of a state; what is `SKIPPED` in it stays so."""

  def describe(leaf: Any) -> Any:
    if leaf is SKIPPED:
      return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, 'sharding', None))

  return jax.tree.map(describe, state)


def only(field: str, state: TrainState) -> TrainState:
  """Return the layout that restores one field of a state; everything else in it is `SKIPPED`."""
  return jax.tree.map(lambda leaf: SKIPPED, state).replace(**{field: getattr(state, field)})
