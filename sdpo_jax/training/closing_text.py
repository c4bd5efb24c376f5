"""The summaries that commands print when they have finished."""

from __future__ import annotations

from collections.abc import Sequence
import os

from etils import epath

from sdpo_jax.command_lines import command_line
from sdpo_jax.evaluation.evaluate import Evaluation
from sdpo_jax.evaluation.known_metrics import headlines
from sdpo_jax.tables import aligned
from sdpo_jax.training import skipped
from sdpo_jax.training.divergence import ON_STUDENT, ON_TEACHER
from sdpo_jax.training.loop import Result


def summary(
  result: Result, config_path: str, overrides: Sequence[tuple[str, str]] = (), *, trained: str = 'model'
) -> str:
  """Return the summary of a run: held-out accuracy before and after, its directory, and the next commands to type.

  Args:
    result: result of the run.
    config_path: path of the config as typed.
    overrides: (setting, text) as typed, repeated in commands that read the config.
    trained: what `launch.export` writes of the run: 'model', 'adapter' or 'cartridge'.
  """
  workdir = result.workdir
  if result.preempted:
    if result.step == 0:
      return 'Stopped before the first step was done; nothing was learned yet. The same command starts again.'
    return f'Stopped after step {result.step}; the checkpoint is saved. The same command continues {workdir}.'
  steps = '1 step' if result.step == 1 else f'{result.step} steps'
  lines = [f'{steps} done; the run is in {workdir}.']
  if result.skipped.count:
    lines.append(f'{skipped.sentence(result.skipped, result.step)}.')
  if result.stopped:
    lines = [
      f'Stopped by an alarm after step {result.step}: {result.stopped}',
      f'The run is in {workdir}, with a checkpoint of this step. To continue from it, change alarms.rules or '
      'alarms.action and start the same command again.',
    ]
  if len(result.evaluations) >= 1:
    first, last = min(result.evaluations), max(result.evaluations)
    before, after = result.evaluations[first], result.evaluations[last]
    names = headlines(after)
    names += [name for name in after if name.endswith(f'/{UNGRADED}') and (after[name] or before.get(name))]
    divergences = [name for name in after if name.rpartition('/')[2] in (ON_STUDENT, ON_TEACHER)]
    rows = [
      [
        name.removeprefix('eval/'),
        *('–' if at.get(name) is None else format(at[name], style) for at in (before, after)),
      ]
      for shown, style in ((names, '.1%'), (divergences, '.4f'))
      for name in shown
    ]
    lines += ['', aligned(['held-out accuracy', f'step {first}', f'step {last}'], rows)]
  settings = [f'--config.{name}={text}' for name, text in overrides]
  where, exported = f'--workdir={workdir}', _new(epath.Path(f'{os.path.basename(workdir)}_{trained}'), result.step)
  following = [
    ('report', where),
    ('sample', where, f'--prompt={result.example_prompt}', '--temperature=0'),
    ('export', where, f'--output={exported}'),
  ]
  if result.evaluations:
    output = f'--output={_new(workdir / "evaluation.json", result.step)}'
    following.insert(0, ('evaluate', f'--config={config_path}', *settings, where, output))
  lines += ['', 'Next:', *(f'  {command_line(*words)}' for words in following)]
  return '\n'.join(lines)


def _new(path: epath.Path, step: int) -> epath.Path:
  """Return `path`, or with the step in its name if it exists, since no command overwrites what is there."""
  return path.with_stem(f'{path.stem}_{step}') if path.exists() else path


UNGRADED = 'ungraded_fraction'  # Shown unless it is 0: the other metrics count graded samples only.
# Column of the table → name and format of its metric; n is the number of samples per question.
COLUMNS = {
  'mean@{n}': ('mean@{n}', '.1%'),
  'best@{n}': ('best@{n}', '.1%'),
  'maj@{n}': ('maj@{n}', '.1%'),
  'acc/mean@{n}': ('acc/mean@{n}', '.1%'),
  'format valid': ('format_valid_fraction', '.1%'),
  'ungraded': (UNGRADED, '.1%'),
  'truncated': ('truncated_fraction', '.1%'),
  'tokens p50': ('completion_length_p50', ',.0f'),
  'p95': ('completion_length_p95', ',.0f'),
  "KL on student's": (ON_STUDENT, '.4f'),
  "on teacher's": (ON_TEACHER, '.4f'),
  'questions': ('questions', ',.0f'),
}


def evaluation_table(evaluation: Evaluation, n: int) -> str:
  """Return a table of the headline metrics with one row per data source; columns that no source has are left out.

  Args:
    evaluation: evaluation of a run or a model.
    n: number of samples per question.
  """
  columns = {title.format(n=n): (name.format(n=n), style) for title, (name, style) in COLUMNS.items()}
  shown = {
    title: (name, style)
    for title, (name, style) in columns.items()
    if any(metrics[name] or name != UNGRADED for metrics in evaluation.metrics.values() if name in metrics)
  }
  rows = [
    [task, *(format(metrics[name], style) if name in metrics else '–' for name, style in shown.values())]
    for task, metrics in evaluation.metrics.items()
  ]
  return aligned(['held-out', *shown], rows)
