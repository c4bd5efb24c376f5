"""Reading the files of a run that reports are made from: settings, metrics, resumes, and alarms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
from typing import Any

from etils import epath

from sdpo_jax.config.fields import is_number
from sdpo_jax.config.privacy import public_settings
from sdpo_jax.errors import UserError
from sdpo_jax.evaluation import alarms
from sdpo_jax.training.directory import starts
from sdpo_jax.training.directory.lines import METRICS, read_lines
from sdpo_jax.training.directory.sealed import read_sealed
from sdpo_jax.training.directory.workdir import located, no_run

CONFIG = 'config.json'
# Metric → (steps, values), from the lines of metrics.jsonl that have it.
Series = dict[str, tuple[list[int], list[float]]]


@dataclasses.dataclass(frozen=True)
class RunFiles:
  """The contents of a run's files, without rollouts."""

  workdir: epath.Path  # Not for publication, unlike the name.
  settings: Mapping[str, Any]  # By dotted name; empty if config.json is missing or unreadable.
  shown: Mapping[str, Any]  # Settings as they may be published.
  series: Series
  resumed: tuple[int, ...]  # Steps from which later starts resumed.
  alarms: tuple[Mapping[str, Any], ...]  # Rules with the steps at which they fired: `alarms_of`.
  rollbacks: tuple[tuple[int, int], ...]  # (step, step to which the run went back).
  stopped: int | None  # The step at which alarms stopped the run.
  last: int | None  # The last finished step.
  remarks: tuple[str, ...]  # Sentences about missing data.
  lost: tuple[str, ...]  # Sentences about lost files of rollouts and evaluations.

  @property
  def name(self) -> str:
    """Return the run's display name, that of its directory."""
    return self.workdir.name or 'run'

  @property
  def total(self) -> int | None:
    """Return the planned number of steps; None if unknown."""
    total = self.settings.get('trainer.total_training_steps')
    return total if type(total) is int else None

  @property
  def over(self) -> bool:
    """Return whether no more steps will follow."""
    done = self.last is not None and self.total is not None and self.last >= self.total
    return done or self.stopped is not None


def read_run(workdir: epath.PathLike, *, texts: bool = True) -> RunFiles:
  """Read the files of a run, which may still be training.

  Args:
    workdir: the run's directory.
    texts: whether `shown` includes templates.

  Raises:
    UserError: there is no run, or metrics.jsonl cannot be read.
  """
  workdir = located(workdir)
  has_metrics, has_settings = ((workdir / name).exists() for name in (METRICS, CONFIG))
  settings, remarks = _settings(workdir) if has_settings else ({}, [f'{CONFIG} is not there.'])
  if not has_metrics and 'trainer.total_training_steps' not in settings:
    raise no_run(workdir)
  found = read_lines(workdir)
  lines = found.kept
  remarks += found.remarks()
  if not lines:
    remarks.append('No step is finished yet.')
  elif has_metrics and not any(isinstance(line.get('train/loss'), float | int) for line in lines if line['step'] > 0):
    remarks.append('No finished step has a train/loss.')
  try:
    resumed = tuple(sorted({start['step'] for start in starts.read(workdir)} - {0}))
  except UserError as error:
    resumed = ()
    remarks.append(str(error))
  stops = [line['step'] for line in lines if line.get(alarms.STOP)]
  return RunFiles(
    workdir,
    settings,
    {name: value for name, value in public_settings(settings).items() if texts or not name.endswith('template')},
    series_of(lines),
    resumed,
    alarms_of(lines, settings.get('alarms.rules')),
    tuple((line['step'], int(to)) for line in lines if (to := finite(line.get(alarms.ROLLBACK))) is not None),
    stops[-1] if stops and stops[-1] == lines[-1]['step'] else None,
    lines[-1]['step'] if lines else None,
    tuple(remarks),
    tuple(found.lost_results()),
  )


def series_of(lines: Iterable[Mapping[str, Any]]) -> Series:
  """Return the finite numbers in lines of metrics.jsonl, by metric."""
  found: Series = {}
  for line in lines:
    for name, value in line.items():
      number = None if name in alarms.NO_METRICS or name.startswith(alarms.PREFIX) else finite(value)
      if number is not None:
        steps, values = found.setdefault(name, ([], []))
        steps.append(line['step'])
        values.append(number)
  return found


def alarms_of(lines: Sequence[Mapping[str, Any]], rules: Any) -> tuple[Mapping[str, Any], ...]:
  """Return every alarm rule with the steps at which it fired.

  Args:
    lines: lines of metrics.jsonl.
    rules: `alarms.rules` of the settings, if known.

  Returns:
    A dict with `rule`, the text of the rule, and `steps` for each rule, in the order of the settings.
  """
  texts = [rule for rule in rules if isinstance(rule, str)] if isinstance(rules, list | tuple) else []
  held: dict[int, list[int]] = {number: [] for number in range(1, len(texts) + 1)}
  for line in lines:
    for name, value in line.items():
      number = name.removeprefix(alarms.PREFIX)
      if name.startswith(alarms.PREFIX) and number.isascii() and number.isdecimal() and finite(value):
        held.setdefault(int(number), []).append(line['step'])
  return tuple(
    {'rule': texts[number - 1] if number <= len(texts) else f'rule {number}', 'steps': steps}
    for number, steps in sorted(held.items())
  )


def _settings(workdir: epath.Path) -> tuple[dict[str, Any], list[str]]:
  """Return the settings in config.json by dotted name, and a list of sentences about what is wrong with the file."""
  try:
    waiting = list(read_sealed(workdir / CONFIG, 'restore it').items())
  except UserError as error:
    return {}, [str(error)]
  found: dict[str, Any] = {}
  while waiting:
    name, value = waiting.pop(0)
    if isinstance(value, dict) and value:
      waiting = [(f'{name}.{key}', item) for key, item in value.items()] + waiting
    else:
      found[name] = value
  return found, []


def finite(value: Any) -> float | None:
  """Return a JSON value as a float if it is a finite number in range; None for all others, including booleans."""
  return float(value) if is_number(value) else None
