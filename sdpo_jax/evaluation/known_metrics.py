"""Names of the metrics that a run will report, to check settings that name a metric before the run starts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
import difflib
import re

from sdpo_jax.errors import UserError
from sdpo_jax.evaluation.completions import DESCRIBED, WORDS
from sdpo_jax.evaluation.evaluate import QUESTIONS, summary_names

EVALUATION = 'eval/'
# Prefixes of the metrics of steps, apart from evaluations.
FAMILIES = ('rollout/', 'rollout_corr/', 'train/', 'self_distillation/', 'teacher/', 'throughput/', 'gap/')


def evaluation_names(tasks: Collection[str], n: int, words: Sequence[str]) -> list[str]:
  """Return the metric names of an evaluation, except `eval/<task>/<metric>/<summary>`, which graders add.

  Args:
    tasks: data sources of the held-out questions.
    n: number of samples per question.
    words: words of doubt to count; empty: they are not counted.
  """
  described = [name for name in DESCRIBED if words or name != WORDS]
  return [f'{EVALUATION}{task}/{name}' for task in tasks for name in (*summary_names(n), *described, QUESTIONS)]


def headlines(names: Iterable[str]) -> list[str]:
  """Return the headline metrics among `eval/<task>/…`: mean, best and maj of the score, and the mean of acc."""
  names = list(names)
  tasks = [name.removesuffix('questions') for name in names if name.endswith('/questions')]
  first = re.compile(r'(?:mean|best|maj|acc/mean)@\d+')
  return [name for name in names if any(first.fullmatch(name.removeprefix(task)) for task in tasks)]


def nearest(name: str, known: Iterable[str]) -> list[str]:
  """Return the three known names most similar to `name`."""
  return difflib.get_close_matches(name, list(known), n=3, cutoff=0.0)


def check_best_metric(name: str | None, tasks: Collection[str], n: int, words: Sequence[str]) -> None:
  """Raise UserError if no step of a run can have the metric `trainer.best_metric`.

  The metrics that graders add are not known before they grade: `eval/<task>/<anything>/mean@n` may be one of them.

  Args:
    name: name of the metric; None: the setting is not used.
    tasks: data sources of the held-out questions; empty: nothing is evaluated.
    n: `val_kwargs.n`.
    words: `alarms.epistemic_words`.
  """
  if name is None or name.startswith(FAMILIES):
    return
  setting = f'trainer.best_metric={name}'
  if not name.startswith(EVALUATION):
    raise UserError(
      f'{setting} is not a metric: those of evaluations are eval/<task>/…, e.g. eval/<task>/mean@{n}, those of steps '
      f'begin with {", ".join(FAMILIES)}.'
    )
  if not tasks:
    raise UserError(
      f'{setting} is a metric of evaluations, but there are none: set data.val_files and trainer.test_freq, or name '
      'another metric.'
    )
  known = evaluation_names(tasks, n, words)
  summaries = summary_names(n)
  folders = [f'{EVALUATION}{task}/' for task in tasks]
  metrics = [name.removeprefix(folder).rpartition('/') for folder in folders if name.startswith(folder)]
  added = any(metric and summary in summaries for metric, _, summary in metrics)
  if name not in known and not added:
    raise UserError(
      f'{setting} is not among the metrics of an evaluation of {", ".join(sorted(tasks))} with val_kwargs.n={n}; the '
      f'most similar are {", ".join(nearest(name, known))}.'
    )
