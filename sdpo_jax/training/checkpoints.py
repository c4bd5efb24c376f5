"""Orbax checkpoints that hold everything: device state, data iterator, what the run has measured so far."""

from __future__ import annotations

from collections.abc import Mapping
import logging
import math
from typing import Any

from etils import epath
import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy

from sdpo_jax.distributed.cluster import barrier
from sdpo_jax.distributed.collectives import gathered
from sdpo_jax.errors import UserError, first_line
from sdpo_jax.files import is_local
from sdpo_jax.types import TrainState

DAMAGED = 'checkpoints_damaged'
SKIPPED = ocp.PLACEHOLDER  # In the place of a leaf that is not to be read.
_logger = logging.getLogger('sdpo_jax.checkpoints')


class Checkpoints:
  """The checkpoints of one run, written asynchronously; a step is there whole or not at all.

  Kept are the latest `keep` and, where `best_metric` is named, the one with its largest value.
  """

  def __init__(
    self, workdir: epath.PathLike, *, keep: int = 2, best_metric: str | None = None, read_only: bool = False
  ):
    """Opens the checkpoints of `workdir`; with `read_only` the run may be going on elsewhere and nothing is touched."""
    self._read_only = read_only
    self._workdir = epath.Path(workdir)
    if is_local(self._workdir):
      self._workdir = self._workdir.absolute()  # Orbax takes no relative path.
    self._keep = keep
    self.best_metric = best_metric
    self._manager = self._open()

  def _open(self) -> ocp.CheckpointManager:
    if self._read_only:
      options = ocp.CheckpointManagerOptions(read_only=True, create=False)
      return ocp.CheckpointManager(self.directory, item_names=('state', 'host'), options=options)
    policies: list[Any] = [preservation_policy.LatestN(n=self._keep)]
    if self.best_metric:
      policies.append(preservation_policy.BestN(get_metric_fn=self._rank, n=1, keep_checkpoints_without_metrics=False))
    return ocp.CheckpointManager(
      self.directory,
      item_names=('state', 'host'),
      options=ocp.CheckpointManagerOptions(
        preservation_policy=preservation_policy.AnyPreservationPolicy(policies),
        cleanup_tmp_directories=True,
        enable_async_checkpointing=True,
        best_fn=self._rank,  # Metrics are written to disk only where there is one.
      ),
    )

  def _rank(self, metrics: Mapping[str, float]) -> float:
    """Return a checkpoint's rank by its metrics: the best metric, or −∞ where it was not measured."""
    return metrics.get(self.best_metric, -math.inf)

  @property
  def directory(self) -> epath.Path:
    return self._workdir / 'checkpoints'

  def steps(self) -> list[int]:
    """Steps that have a checkpoint, oldest first."""
    return sorted(self._manager.all_steps())

  def best(self, before: int) -> int | None:
    """The step below `before` whose checkpoint has the largest `best_metric`, the latest of equals; None: none has it.

    Its checkpoint is one that is kept.
    """
    self.wait()
    measured = {step: self._manager.metrics(step) or {} for step in self.steps() if step < before}
    ranked = [(metrics[self.best_metric], step) for step, metrics in measured.items() if self.best_metric in metrics]
    return max(ranked)[1] if ranked else None

  def save(self, step: int, state: TrainState, host: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
    """Starts writing a checkpoint; returns once the device arrays may be changed again.

    Args:
      step: generation batches finished.
      state: device state.
      host: JSON-serialisable host state (data iterator, history).
      metrics: of this step, none where the state is not the one they were measured with; written beside the state, so
        that `best_metric` may be another one after a resume.

    Raises:
      UserError: it, or the one still being written, could not be written; earlier checkpoints are intact.
    """
    if step in self._manager.all_steps():
      return
    evaluated = sorted(name for name in metrics if name.startswith('eval/'))
    if self.best_metric and evaluated and self.best_metric not in metrics:
      raise UserError(
        f'trainer.best_metric={self.best_metric} is not among the metrics of an evaluation: {", ".join(evaluated)}.'
      )
    measured = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
    try:
      self._manager.save(
        step,
        args=ocp.args.Composite(state=ocp.args.PyTreeSave(state), host=ocp.args.JsonSave(dict(host))),
        metrics=measured,
        force=True,
      )
    except (OSError, ValueError, RuntimeError) as error:
      raise self._write_error(error) from error

  def wait(self) -> None:
    """Returns when everything is written.

    Raises:
      UserError: it could not be written; earlier checkpoints are intact.
    """
    try:
      self._manager.wait_until_finished()
      self._manager.check_for_errors()
    except (OSError, ValueError, RuntimeError) as error:
      raise self._write_error(error) from error

  def close(self) -> None:
    """Return when everything is written and nothing is open any more.

    Raises:
      UserError: as `wait`.
    """
    try:
      self._manager.close()
    except (OSError, ValueError, RuntimeError) as error:
      raise self._write_error(error) from error

  def restore(self, like: TrainState) -> tuple[int, TrainState, dict[str, Any]] | None:
    """The newest readable checkpoint as (step, state, host state); None when there is none at all.

    A checkpoint that cannot be read, by whichever process, is reported, moved to `checkpoints_damaged/`, and the one
    before it is tried.

    Args:
      like: a state, or abstract arrays with shardings, of the layout to restore; what is `SKIPPED` in it is not read.

    Raises:
      UserError: there are checkpoints but none can be read.
    """
    failures = []
    for step in reversed(self.steps()):
      try:
        (state, host), own = self._read(step, like), None
      except Exception as error:  # Orbax and TensorStore raise many kinds for a damaged file; all mean the same here.
        own = first_line(error)
      # One process must not go on from another step than the others.
      reasons = gathered(own, f'the end of reading the checkpoint of step {step}')
      reason = own or next(filter(None, reasons), None)
      if reason is not None:
        failures.append((step, reason))
        _logger.error('Checkpoint of step %d cannot be read (%s); trying the one before it.', step, reason)
        continue
      if failures and not self._read_only:
        for damaged, _ in failures:
          self._set_aside(damaged)
        barrier('the setting aside of damaged checkpoints')
        self._manager.close()
        self._manager = self._open()
      return step, state, host
    if failures:
      raise UserError(
        f'None of the checkpoints in {self.directory} can be read '
        f'({"; ".join(f"step {step}: {reason}" for step, reason in failures)}): '
        'repair or remove them, or choose another --workdir.'
      )
    return None

  def restore_step(self, step: int, like: TrainState) -> TrainState:
    """The device state of the checkpoint of one step.

    Args:
      step: one of `steps`.
      like: as in `restore`.

    Raises:
      UserError: it cannot be read.
    """
    self.wait()
    try:
      return self._read(step, like)[0]
    except Exception as error:  # As in `restore`.
      raise UserError(
        f'The checkpoint of step {step} in {self.directory} cannot be read ({first_line(error)}): repair it, or '
        'remove it and start the same command again.'
      ) from error

  def _read(self, step: int, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
    like = abstract(like)
    layout = ocp.args.PyTreeRestore(item=like, restore_args=ocp.checkpoint_utils.construct_restore_args(like))
    restored = self._manager.restore(step, args=ocp.args.Composite(state=layout, host=ocp.args.JsonRestore()))
    return restored['state'], restored['host']

  def _set_aside(self, step: int) -> None:
    if jax.process_index() == 0:
      target = self._workdir / DAMAGED
      target.mkdir(parents=True, exist_ok=True)
      serial = sum(1 for path in target.iterdir() if path.name.split('.')[0] == str(step))
      (self.directory / str(step)).rename(target / (f'{step}.{serial}' if serial else str(step)))

  def _write_error(self, error: Exception) -> UserError:
    return UserError(
      f'A checkpoint could not be written to {self.directory} ({first_line(error)}): if the disk is full, make room, '
      f'then start the same command again; it resumes from step {max(self.steps(), default=0)}.'
    )


def abstract(state: TrainState) -> TrainState:
  """Shapes, dtypes and shardings of a state; what is `SKIPPED` in it stays so."""

  def describe(leaf: Any) -> Any:
    if leaf is SKIPPED:
      return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, 'sharding', None))

  return jax.tree.map(describe, state)


def only(field: str, state: TrainState) -> TrainState:
  """The layout that restores one field of a state; everything else in it is `SKIPPED`."""
  return jax.tree.map(lambda leaf: SKIPPED, state).replace(**{field: getattr(state, field)})
