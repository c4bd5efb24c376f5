"""Comparison of runs as text and JSON: settings that differ, metrics, curves, and tests against noise over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import fnmatch
import itertools
import json
from typing import Any

from etils import epath
import numpy as np

from sdpo_jax.errors import UserError, printable, short_repr
from sdpo_jax.evaluation.known_metrics import headlines, nearest
from sdpo_jax.files import check_output, jsonable, read_bytes, write_output
from sdpo_jax.reporting.groups import SEED, differences, group_runs, labels
from sdpo_jax.reporting.run_files import RunFiles, read_run
from sdpo_jax.reporting.seed_noise import ENOUGH, LEVEL, compare_groups
from sdpo_jax.tables import aligned

TRAINING = 'rollout/score_mean'  # Compared if no run has evaluations.
EVALUATION = ('val_kwargs.', 'data.val_files', 'data.val_max_samples')  # Settings that change what is measured.
BARS, WIDTH = '▁▂▃▄▅▆▇█', 40
TESTS = (
  'p is from the exact permutation test of the difference of means, which makes almost no assumptions; least p is the '
  f'smallest p that this number of seeds allows. If least p is at most {LEVEL}, this test decides; otherwise, '
  "Welch's t interval does, which assumes that the values over seeds are normally distributed."
)


def write_comparison(workdirs: Sequence[str], patterns: Sequence[str], output: str | None) -> str:
  """Return the result of `compare` as text, and write it as JSON to the file `output` unless that is None."""
  if output is not None:
    check_output(output)
    path = epath.Path(output)
    if path.is_file() and not read_bytes(path, 'name another --output').startswith(b'{\n "arms"'):
      raise UserError(f'--output={output} exists and is not a comparison: name another file, or remove it.')
  found = compare(workdirs, patterns)
  if output is not None:
    write_output(output, json.dumps(jsonable(found), ensure_ascii=False, indent=1) + '\n')
  return text(found)


def compare(workdirs: Sequence[str], patterns: Sequence[str] = ()) -> dict[str, Any]:
  """Compare the runs in some directories.

  Args:
    workdirs: directories of runs.
    patterns: names of metrics, or patterns such as 'eval/*/mean@4', all of which are tested; empty: the headline
      metrics of evaluations, of which only the means are tested.

  Returns:
    arms: name → {label, runs: seed → directory}.
    settings: name → value in each arm, for the settings in which arms differ.
    metrics: name → {step: the last step that all runs have, values: arm → values of its runs at that step, curves: arm
      → step → mean over its runs}.
    pairs: for each two arms and tested metric, {metric, arms} and the fields of a `SeedNoise`.
    remarks: sentences about what limits the comparison.

  Raises:
    UserError: no run is named, or one twice; a directory holds no run; or no run has such a metric.
  """
  runs = [read_run(workdir) for workdir in workdirs]
  groups = group_runs(runs)
  arms = {f'arm {number}': [runs[at] for at in group] for number, group in enumerate(groups, start=1)}
  seeds = {arm: {str(run.settings.get(SEED)): str(run.workdir) for run in group} for arm, group in arms.items()}
  if not runs:
    raise UserError('Name the directories of the runs to compare, such as runs/a runs/b.')
  if same := next((group for arm, group in arms.items() if len(seeds[arm]) < len(group)), None):
    named = ' and '.join(str(run.workdir) for run in same)
    raise UserError(f'{named} differ in no setting that matters, and some have the same seed: name one for each seed.')
  remarks = [f'{run.name}: {remark}' for run in runs for remark in run.remarks]
  remarks += [f'{run.name} has not ended: step {run.last or 0} of {run.total}.' for run in runs if not run.over]
  for name in sorted({name for run in runs for name in run.settings if name.startswith(EVALUATION)}):
    if any(run.settings.get(name) != runs[0].settings.get(name) for run in runs):
      remarks.append(f'{name} differs, so the evaluations of these runs may not be comparable.')
  metrics, pairs = {}, []
  for name in _chosen(runs, patterns):
    series = {arm: [dict(zip(*run.series.get(name, ((), ())), strict=True)) for run in arms[arm]] for arm in arms}
    shared = {arm: sorted(set.intersection(*map(set, each))) for arm, each in series.items()}
    if not (steps := set.intersection(*map(set, shared.values()))):
      remarks.append(f'{name} is not compared: there is no step at which all runs have it.')
      continue
    values = {arm: [run[max(steps)] for run in each] for arm, each in series.items()}
    curves = {arm: {at: float(np.mean([run[at] for run in series[arm]])) for at in shared[arm]} for arm in arms}
    metrics[name] = {'step': max(steps), 'values': values, 'curves': curves}
    if patterns or name == TRAINING or '/mean@' in name:
      for two in itertools.combinations(arms, 2):
        noise = compare_groups(*(values[arm] for arm in two))
        pairs.append({'metric': name, 'arms': two, **dataclasses.asdict(noise)})
  if early := [name for name, metric in metrics.items() if metric['step'] == 0]:
    remarks.append(f'{", ".join(early)}: before training, as step 0 is the last that all runs have.')
  named = {arm: {'label': label, 'runs': seeds[arm]} for arm, label in zip(arms, labels(runs, groups), strict=True)}
  settings = differences(runs, groups)
  if moved := differences(runs, groups, public=False).keys() - settings.keys():
    remarks.append(f'Runs whose {" or ".join(sorted(moved))} is in another folder are arms of their own.')
  return {'arms': named, 'settings': settings, 'metrics': metrics, 'pairs': pairs, 'remarks': remarks}


def _chosen(runs: Sequence[RunFiles], patterns: Sequence[str]) -> list[str]:
  """Return the names of the metrics to compare; raises UserError for a pattern that no name matches."""
  names = list(dict.fromkeys(name for run in runs for name in run.series))
  for pattern in patterns:
    if not fnmatch.filter(names, pattern):
      near = ', '.join(nearest(pattern, names)) or 'no metric yet'
      raise UserError(f'--metric={pattern}: no run has such a metric; the most similar are {near}.')
  if not patterns:
    return headlines(names) or [TRAINING]
  return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def text(found: Mapping[str, Any]) -> str:
  """Format the result of `compare` for a terminal."""
  arms = [
    f'{arm}  {told["label"]}: {", ".join(f"{run} (seed {seed})" for seed, run in told["runs"].items())}'
    for arm, told in found['arms'].items()
  ]
  sections = {'Arms': '\n'.join(arms)}
  if found['settings']:
    rows = [[name, *(short_repr(value, 30) for value in values)] for name, values in found['settings'].items()]
    sections['Settings that differ'] = aligned(['setting', *found['arms']], rows)
  for name, metric in found['metrics'].items():
    sections[f'{name} at step {metric["step"]}'] = _table(metric)
  if found['pairs']:
    sections['More than noise over seeds?'] = _verdicts(found)
  if found['remarks']:
    sections['Remarks'] = '\n'.join(found['remarks'])
  whole = '\n\n'.join(f'━━ {title} ━━\n{content}' for title, content in sections.items())
  return printable(whole, None, keep='\n')  # Names may hold anything.


def _table(metric: Mapping[str, Any]) -> str:
  """Return a table of a metric, with a row for each arm: statistics over seeds, and its curve as bars."""
  curves = metric['curves']
  steps = sorted({step for curve in curves.values() for step in curve})
  steps = [steps[place] for place in np.unique(np.linspace(0, len(steps) - 1, WIDTH).round().astype(int))]
  heights = [value for curve in curves.values() for value in curve.values()]
  low, unit = min(heights), (max(heights) - min(heights) or 1) / (len(BARS) - 1)
  rows = []
  for arm, values in metric['values'].items():
    bars = ''.join(BARS[round((curves[arm][step] - low) / unit)] if step in curves[arm] else ' ' for step in steps)
    numbers = (f'{number:.4g}' for number in (np.mean(values), min(values), max(values)))
    rows.append([arm, str(len(values)), *numbers, bars])
  return aligned(['', 'seeds', 'mean', 'lowest', 'highest', f'steps {steps[0]} to {steps[-1]}'], rows)


def _verdicts(found: Mapping[str, Any]) -> str:
  """Return a table of the differences between arms, and notes on the tests."""
  rows, single = [], False
  for pair in found['pairs']:
    sizes = [len(found['arms'][arm]['runs']) for arm in pair['arms']]
    single |= min(sizes) < 2
    interval = '{:+.4f} … {:+.4f}'.format(*pair['interval']) if pair['interval'] else '–'
    numbers = ['–' if pair[name] is None else f'{pair[name]:.2g}' for name in ('p', 'least_p')]
    said = {True: 'yes', False: 'no', None: 'unknown'}[pair['real']] + (f', {pair["test"]}' if pair['test'] else '')
    title = f'{pair["metric"]}, {" − ".join(pair["arms"])}'
    rows.append([title, ' and '.join(map(str, sizes)), f'{pair["difference"]:+.4f}', interval, *numbers, said])
  header = ['difference', 'seeds', 'of means', f'{1 - LEVEL:.0%} interval, Welch', 'p', 'least p', 'more than noise?']
  tested = sum(pair['test'] is not None for pair in found['pairs'])
  told = [TESTS] if tested else []
  if single:
    told.append(
      'Nothing can be concluded about an arm with a single seed, since the noise over seeds is unknown. Two seeds per '
      f'arm give an interval; with {ENOUGH} per arm the permutation test can decide.'
    )
  if tested > 1:
    told.append(f'Even without any real difference, about {LEVEL * tested:.2g} of {tested} tests would say "yes".')
  return '\n\n'.join([aligned(header, rows), *told])
