"""Alarms for a collapse: rules over the metrics of a run, evaluated from its `metrics.jsonl` alone.

A rule is `METRIC < VALUE` or `METRIC > VALUE`, followed by ` for N` if it must hold N measurements in a row.

  METRIC  a name in metrics.jsonl. `*` stands for any text without a slash, `**` for any text. Each name that matches is
          watched separately.
  VALUE   a number; or `best`, `first` or `last`, optionally with a factor (`0.7 * best`): the best value of the same
          metric so far, its first value, or its value at the measurement before. The best value is the largest if the
          rule has `<`, and the smallest if it has `>`. Without such a value, the rule does not hold.
  for N   counts the steps or evaluations that have the metric. A value that is not finite counts as not measured.

The evaluation before the first step (step 0) is a value for `best`, `first` and `last` but raises no alarm. After a
rollback the rules start counting again, and values from the undone steps are forgotten.
"""

from __future__ import annotations

import array
import bisect
from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import math
import re
from typing import Any, Literal

from sdpo_jax.errors import UserError

PREFIX = 'alarm/'  # Prefix of the metrics that alarms write themselves, which no rule sees.
NO_METRICS = ('step', 'fencing_epoch', 'line_digest')  # The keys of a line that are not metrics.
# In the line of a step that ended in a rollback: the step it went back to. The line's other numbers are those of the
# discarded weights.
ROLLBACK = 'alarm/rollback_to'
STOP = 'alarm/stop'  # 1 in the line of a step at which the alarms stopped the run.
GRAMMAR = (
  "write METRIC < VALUE or METRIC > VALUE, VALUE a number, best, first, last or '0.7 * best', then 'for N' if it must "
  "hold N times in a row, e.g. 'rollout/entropy < 0.02 for 3'"
)
_NUMBER = r'[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?'
_RULE = re.compile(
  rf'\s*(?P<metric>[^<>]*[^<>\s])\s*(?P<sign>[<>])\s*'
  rf'(?:(?P<number>{_NUMBER})|(?:(?P<factor>{_NUMBER})\s*\*\s*)?(?P<reference>best|first|last))'
  r'(?:\s+for\s+(?P<count>\d+))?\s*'
)


@dataclasses.dataclass(frozen=True)
class AlarmRule:
  """A parsed alarm rule; the module's docstring has the grammar."""

  text: str  # As written.
  metric: re.Pattern[str]  # Matches the whole name of a metric.
  below: bool  # `<`; otherwise `>`.
  factor: float  # The limit itself, or the factor of the reference value.
  reference: Literal['best', 'first', 'last'] | None
  count: int  # The required number of measurements in a row.

  def limit(self, earlier: Sequence[float]) -> float | None:
    """Return the limit that the next value is compared with, given the earlier ones; None without a reference value."""
    if self.reference is None:
      return self.factor
    if not earlier:
      return None
    best = max if self.below else min
    return self.factor * {'best': best(earlier), 'first': earlier[0], 'last': earlier[-1]}[self.reference]


def rules(texts: Sequence[str], *, evaluates: bool) -> list[AlarmRule]:
  """Return the parsed rules of a run.

  Args:
    texts: the setting `alarms.rules`.
    evaluates: whether the run has evaluations.

  Raises:
    UserError: a rule is malformed, or needs evaluations that the run does not make.
  """
  parsed = [parse(text) for text in texts]
  for rule in parsed:
    if not evaluates and rule.text.startswith(('eval/', 'gap/')):
      raise UserError(
        f'alarms.rules: {rule.text!r} is about evaluations, but trainer.test_freq=0 makes none: raise it, or remove '
        'the rule.'
      )
  return parsed


def parse(text: str) -> AlarmRule:
  """Return the rule with this text; raise UserError if it is malformed."""
  match = _RULE.fullmatch(text)
  if match is None or match['count'] == '0' or '***' in text:
    raise UserError(f'alarms.rules: {text!r} is not a rule: {GRAMMAR}.')
  parts = re.split(r'(\*\*|\*)', match['metric'])
  pattern = ''.join({'*': '[^/]*', '**': '.*'}.get(part, re.escape(part)) for part in parts)
  return AlarmRule(
    text=' '.join(text.split()),
    metric=re.compile(pattern),
    below=match['sign'] == '<',
    factor=float(match['number'] or match['factor'] or 1),
    reference=match['reference'],
    count=int(match['count'] or 1),
  )


@dataclasses.dataclass(frozen=True)
class Alarm:
  """A rule that has held for as many measurements of a metric as it requires."""

  rule: AlarmRule
  number: int  # The rule's number, from 1: its metric is `alarm/<number>`.
  metric: str
  value: float
  limit: float
  held: int  # Number of consecutive measurements for which it has held.

  @property
  def begins(self) -> bool:
    """Whether the alarm did not hold at the measurement before."""
    return self.held == self.rule.count

  def __str__(self) -> str:
    sign = '<' if self.rule.below else '>'
    times = f' ({self.held} times in a row)' if self.held > 1 else ''
    return f'{self.metric} = {self.value:.4g} {sign} {self.limit:.4g}{times}, rule {self.rule.text!r}'


class AlarmMonitor:
  """Evaluates rules over the metrics of a run, step by step; its state is a pure function of the observed lines."""

  def __init__(self, rules: Sequence[AlarmRule]):
    self.rules = tuple(rules)
    self.rollbacks = 0
    # Metric → steps and values, for metrics that a rule names; arrays, since they grow as long as the run lasts.
    self._series: dict[str, tuple[array.array[int], array.array[float]]] = {}
    self._held: dict[tuple[int, str], int] = {}  # (Rule, metric) → consecutive measurements for which it holds.

  def observe(self, step: int, metrics: Mapping[str, Any]) -> tuple[list[Alarm], dict[str, float]]:
    """Add the metrics of a step, and evaluate the rules.

    Args:
      step: number of the step, larger than all before.
      metrics: the step's line of metrics.jsonl.

    Returns:
      The alarms, and `alarm/<n>` (1 or 0) of every rule that has a measured metric.
    """
    alarms, fired = [], {}
    values = {
      name: float(value)
      for name, value in metrics.items()
      if not name.startswith(PREFIX) and value is not None and not isinstance(value, str) and math.isfinite(value)
    }
    for number, rule in enumerate(self.rules, 1):
      for name, value in values.items():
        if not rule.metric.fullmatch(name) or step == 0:
          continue
        limit = rule.limit(self._series[name][1] if name in self._series else ())
        holds = limit is not None and (value < limit if rule.below else value > limit)
        held = self._held[number, name] = self._held.get((number, name), 0) + 1 if holds else 0
        alarm = held >= rule.count
        fired[f'alarm/{number}'] = max(float(alarm), fired.get(f'alarm/{number}', 0.0))
        if alarm:
          alarms.append(Alarm(rule, number, name, value, limit, held))
    for name, value in values.items():
      if any(rule.metric.fullmatch(name) for rule in self.rules):
        steps, earlier = self._series.setdefault(name, (array.array('q'), array.array('d')))
        steps.append(step)
        earlier.append(value)
    return alarms, fired

  def roll_back(self, to_step: int) -> None:
    """Forget the values measured after `to_step`, and start counting again."""
    self.rollbacks += 1
    self._held.clear()
    for steps, values in self._series.values():
      kept = bisect.bisect_right(steps, to_step)
      del steps[kept:], values[kept:]

  def replay(self, lines: Iterable[Mapping[str, Any]]) -> list[Alarm]:
    """Observe the lines of metrics.jsonl of an interrupted run; return the alarms of the last one."""
    alarms: list[Alarm] = []
    for line in lines:
      numbers = {name: value for name, value in line.items() if name not in NO_METRICS}
      alarms, _ = self.observe(line['step'], numbers)
      if line.get(ROLLBACK) is not None:
        self.roll_back(int(line[ROLLBACK]))
        alarms = []
    return alarms

  def unmatched(self) -> list[str]:
    """Return the texts of the rules that match none of the metrics measured so far, such as misspelled ones."""
    return [rule.text for rule in self.rules if not any(rule.metric.fullmatch(name) for name in self._series)]
