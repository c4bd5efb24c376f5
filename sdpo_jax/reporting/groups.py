"""Grouping of runs that differ only in their seeds, and the settings in which groups differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import json
import re
from typing import Any

from sdpo_jax.config.fields import is_listed
from sdpo_jax.config.overrides import RESUMABLE
from sdpo_jax.reporting.run_files import RunFiles

SEED = 'seed'
SHOWN = 3  # Maximum number of differing settings in the label of a group.
_HANDED_OVER = re.compile(r'.*/(?=rows/[0-9a-f]{16}/)')  # The run's directory in RUN/rows/DIGEST/….


def group_runs(runs: Sequence[RunFiles]) -> list[list[int]]:
  """Return groups of run indices, ordered by the first run of each.

  Runs of a group differ only in their seeds and in settings that do not affect what is learned. A run without settings
  is a group of its own.
  """
  found: dict[str, list[int]] = {}
  for number, run in enumerate(runs):
    key = json.dumps(_learned(run.settings), sort_keys=True, default=str) if run.settings else f'run {number}'
    found.setdefault(key, []).append(number)
  return list(found.values())


def differences(
  runs: Sequence[RunFiles], groups: Sequence[Sequence[int]], *, public: bool = True
) -> dict[str, list[Any]]:
  """Return setting → value in each group, publishable if `public`, for those that differ; None if a group lacks it."""
  settings = [_learned(runs[group[0]].shown if public else runs[group[0]].settings) for group in groups]
  names = sorted({name for each in settings for name in each})
  values = {name: [each.get(name) for each in settings] for name in names}
  return {name: each for name, each in values.items() if any(value != each[0] for value in each)}


def labels(runs: Sequence[RunFiles], groups: Sequence[Sequence[int]]) -> list[str]:
  """Return a distinct label for the curve of each group.

  A single run is labelled with the name of its directory, and a group with the settings in which it differs.
  """
  differing = differences(runs, groups)
  found = []
  for place, group in enumerate(groups):
    if len(group) == 1:
      found.append(runs[group[0]].name)
      continue
    told = [f'{name.rpartition(".")[2]}={_written(values[place])}' for name, values in differing.items()]
    more = [f'{len(told) - SHOWN} more'] if len(told) > SHOWN else []
    found.append(', '.join([str(runs[group[0]].shown.get('name', runs[group[0]].name)), *told[:SHOWN], *more]))
  twice = {label for label in found if found.count(label) > 1}
  return [f'{label} ({number})' if label in twice else label for number, label in enumerate(found, 1)]


def _learned(settings: Mapping[str, Any]) -> dict[str, Any]:
  """Return the settings of a run that affect what is learned, except its seed."""
  learned = {name: value for name, value in settings.items() if not is_listed(name, (SEED, *RESUMABLE))}
  files = learned.get('data.train_files')
  if isinstance(files, list):
    learned['data.train_files'] = [_HANDED_OVER.sub('', str(file)) for file in files]
  return learned


def _written(value: Any) -> str:
  return value if isinstance(value, str) else json.dumps(value)
