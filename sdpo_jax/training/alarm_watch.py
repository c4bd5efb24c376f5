"""The alarms of a run: they check the metrics of every step, and may stop the run or roll it back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any

import jax

from sdpo_jax.config import Config
from sdpo_jax.distributed.collectives import agreed
from sdpo_jax.evaluation import alarms
from sdpo_jax.evaluation.known_metrics import nearest
from sdpo_jax.training.checkpoint.checkpoints import Checkpoints


@dataclasses.dataclass
class AlarmVerdict:
  """The decision about a step's alarms: stop, roll back, or continue if neither field is set."""

  stop: str | None = None  # The reason to end the run.
  back_to: int | None = None  # The step whose checkpointed weights are restored.


class AlarmWatch:
  """A monitor of a run's alarm rules, which announces alarms and decides what to do about them."""

  def __init__(self, config: Config, checkpoints: Checkpoints, announce: Callable[[str], None] | None):
    """Make a monitor that has seen no step yet.

    Args:
      config: settings.
      checkpoints: checkpoints to which the run can be rolled back.
      announce: receives sentences for the user; None: another process announces them.
    """
    self._config, self._checkpoints, self._announce = config, checkpoints, announce or (lambda text: None)
    self.monitor = alarms.AlarmMonitor(alarms.rules(config.alarms.rules, evaluates=bool(config.trainer.test_freq)))
    self.stopped: str | None = None  # The alarm that stopped the run.
    self._checked_rules = False  # Whether the rules were compared with the names of the metrics.
    self._checked_best = False  # Whether `trainer.best_metric` was, too.

  def replay(self, step: int, lines: Sequence[Mapping[str, Any]]) -> None:
    """Restore the alarms up to `step` from lines of metrics.jsonl; a run that an alarm stopped stays stopped.

    Otherwise an automatic restart would continue a run that has gone wrong.
    """
    raised = self.monitor.replay(lines)
    if lines and lines[-1].get(alarms.STOP):
      self.stopped = self._judge(step, raised).stop

  def begin(self, values: Mapping[str, float]) -> None:
    """Record the metrics of an evaluation before the first step."""
    self.monitor.observe(0, values)
    self._name_missing_best(values)

  def after(self, step: int, line: dict[str, Any], metrics: Mapping[str, float], *, whole: bool) -> AlarmVerdict:
    """Return the verdict on the metrics of a step, and add its alarms to the metrics line.

    Args:
      step: number of the step.
      line: all of its metrics; those of alarms are added.
      metrics: the metrics by which a checkpoint can be ranked.
      whole: whether the line has every metric that any line of this run can have.
    """
    raised, fired = self.monitor.observe(step, line)
    line.update(fired)
    if whole:
      self._name_idle_rules()
      self._name_missing_best(metrics)
    verdict = self._judge(step, raised)
    self._say(step, raised, verdict)
    if verdict.stop is not None:
      line[alarms.STOP] = 1.0
      self.stopped = verdict.stop
    elif verdict.back_to is not None:
      line[alarms.ROLLBACK] = verdict.back_to
    return verdict

  def _judge(self, step: int, raised: Sequence[alarms.Alarm]) -> AlarmVerdict:
    """Decide what to do about the alarms of a step, following `alarms.action`; every process decides the same."""
    config, settings = self._config, self._config.alarms
    if settings.action == 'warn' or not self.monitor.rules or not agreed(len(raised)):
      return AlarmVerdict()
    reasons = '; '.join(map(str, raised))
    best = agreed(self._checkpoints.best(before=step) or 0) if config.trainer.best_metric else 0
    if settings.action == 'rollback' and best and self.monitor.rollbacks < settings.max_rollbacks:
      return AlarmVerdict(back_to=best)
    if settings.action == 'rollback' and best:
      reasons += f'; alarms.max_rollbacks={settings.max_rollbacks} rollbacks were made'
    elif settings.action == 'rollback':
      reasons += f'; there is no checkpoint with {config.trainer.best_metric} to roll back to'
    return AlarmVerdict(stop=reasons + (f'. The best checkpoint is that of step {best}.' if best else '.'))

  def _say(self, step: int, raised: Sequence[alarms.Alarm], verdict: AlarmVerdict) -> None:
    """Announce alarms when they begin, and whenever the run acts on them."""
    for alarm in raised:
      if alarm.begins or verdict != AlarmVerdict():
        self._announce(f'Alarm at step {step}: {alarm}.')
    if verdict.back_to is not None:
      self._announce(f'Rolling back to the weights of step {verdict.back_to}; step {step + 1} has new questions.')

  def _name_idle_rules(self) -> None:
    """Announce, once, the rules that match no metric, for example because a name is misspelt."""
    if not self._checked_rules and jax.process_index() == 0:
      for text in self.monitor.unmatched():
        self._announce(f'alarms.rules: {text!r} matches none of the metrics so far; metrics.jsonl has their names.')
    self._checked_rules = True

  def _name_missing_best(self, metrics: Mapping[str, float]) -> None:
    """Announce, once, that the metric named by `trainer.best_metric` is not measured."""
    best = self._config.trainer.best_metric
    if best is None or self._checked_best or not (best.startswith('eval/') or 'train/loss' in metrics):
      return
    if best not in metrics and jax.process_index() == 0:
      self._announce(
        f'trainer.best_metric={best} is not among the metrics; until it is, no checkpoint counts as the best. Similar '
        f'metrics are {", ".join(nearest(best, metrics))}; metrics.jsonl has all names.'
      )
    self._checked_best = True
