"""Grading a batch: every completion by the environment that its question names, whatever a grader does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import importlib.util
import logging
import math
import numbers
import pathlib
import sys

from sdpo_jax.config import EnvironmentsConfig
from sdpo_jax.environments import registry
from sdpo_jax.errors import UserError, short_repr
from sdpo_jax.types import Example, Outcome

# A metric of every outcome that stands for a grader's exception; its mean over a batch is logged.
FAILED = 'grader_failed'


class Graders:
  """The graders of a run: made from settings when first needed, closed at its end.

  A grader that raises costs the completions that it raises for, not the run: they score 0 and are counted.
  """

  def __init__(self, settings: EnvironmentsConfig):
    """Loads the user's modules.

    Raises:
      UserError: a module of `environments.modules` is missing or cannot be imported.
    """
    self._settings = settings
    self._made: dict[str, registry.Grader] = {}
    self._closed = False
    load_modules(settings.modules)

  def prepare(self, names: Iterable[str]) -> None:
    """Makes the graders of these names now, so that what is wrong with their settings is said before a run begins.

    Raises:
      UserError: there is no such grader, or it cannot work with the settings.
    """
    for name in sorted(set(names)):
      self.get(name)

  def grade(
    self, examples: Sequence[Example], completions: Sequence[str], *, truncated: Sequence[bool]
  ) -> list[Outcome]:
    """One outcome a completion of a whole batch, in order; all three arguments have N entries.

    Raises:
      UserError: as `grade_part` and `end_batch`.
    """
    outcomes = self.grade_part(examples, completions, truncated=truncated)
    self.end_batch()
    return outcomes

  def grade_part(
    self, examples: Sequence[Example], completions: Sequence[str], *, truncated: Sequence[bool]
  ) -> list[Outcome]:
    """As `grade`, for some completions of a batch, the rest of which follows; `end_batch` is to be called at its end.

    Raises:
      UserError: a question names a grader that there is not, or a grader returns the wrong number of outcomes, or
        finds that it cannot grade at all.
    """
    outcomes: list[Outcome | None] = [None] * len(completions)
    by_environment: dict[str, list[int]] = defaultdict(list)
    for row, example in enumerate(examples):
      by_environment[example.environment].append(row)
    for name, rows in by_environment.items():
      parts = [[examples[row] for row in rows], [completions[row] for row in rows], [truncated[row] for row in rows]]
      for row, outcome in zip(rows, self._grade(name, *parts), strict=True):
        outcomes[row] = outcome
    return outcomes

  def end_batch(self) -> None:
    """Tells graders that want to know that a batch is over.

    Raises:
      UserError: a grader could not grade any of it, and says what to do.
    """
    for grader in self._made.values():
      if hasattr(grader, 'end_batch'):
        grader.end_batch()

  def close(self) -> None:
    """Ends the processes and connections of graders that hold some, also while another thread grades."""
    self._closed = True
    for grader in self._made.values():
      if hasattr(grader, 'close'):
        grader.close()
    self._made.clear()

  def __enter__(self) -> Graders:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def get(self, name: str) -> registry.Grader:
    """The grader of that name, made on its first use; raises UserError as `prepare`, RuntimeError once closed."""
    if self._closed:
      raise RuntimeError('The graders are closed.')
    if name not in self._made:
      self._made[name] = registry.get(name, self._settings)
    return self._made[name]

  def _grade(self, name: str, examples: list[Example], completions: list[str], truncated: list[bool]) -> list[Outcome]:
    grader = self.get(name)
    try:
      outcomes = grader(examples, completions, truncated=truncated)
    except UserError:
      raise
    except Exception as error:  # A grader is anybody's code; what it raises must not end a run of days.
      if self._closed:  # The run has ended, and nobody waits for these completions any more.
        raise
      if len(completions) > 1:
        # Again one by one, so that only those that it raises for suffer.
        parts = zip(examples, completions, truncated, strict=True)
        return [outcome for e, c, t in parts for outcome in self._grade(name, [e], [c], [t])]
      logging.warning('The grader %r raised for a completion of %s, which scores 0: %r', name, examples[0].id, error)
      return [_failed()]
    if not isinstance(outcomes, Sequence) or not all(isinstance(outcome, Outcome) for outcome in outcomes):
      raise UserError(
        f'The grader {name!r} must return a list with one sdpo_jax.types.Outcome for each completion, not '
        f'{short_repr(outcomes)}.'
      )
    if len(outcomes) != len(completions):
      raise UserError(
        f'The grader {name!r} returned {len(outcomes)} outcomes for {len(completions)} completions: it must return one '
        'for each, in order.'
      )
    wrong = [outcome for outcome in outcomes if not _is_sound(outcome)]
    if wrong:
      logging.warning(
        'The grader %r gave %d of %d completions a score that is no finite number, or feedback that is no text, such as '
        '%s; they score 0.',
        name,
        len(wrong),
        len(outcomes),
        short_repr(wrong[0]),
      )
    return [_encodable(outcome) if _is_sound(outcome) else _failed() for outcome in outcomes]


def _failed() -> Outcome:
  """What stands for a completion that could not be graded."""
  return Outcome(0.0, None, {'acc': 0.0, 'pred': '', FAILED: 1.0})


def _is_sound(outcome: Outcome) -> bool:
  number = isinstance(outcome.score, numbers.Real) and math.isfinite(outcome.score)
  return number and isinstance(outcome.feedback, str | None) and isinstance(outcome.metrics, Mapping)


def clean(text: str) -> str:
  """Text that can be encoded: escapes can spell half a surrogate pair, which no file or tokenizer takes."""
  return text.encode('utf-8', 'replace').decode()


def _encodable(outcome: Outcome) -> Outcome:
  """The outcome with texts that can be encoded: what a model wrote may stand in them."""
  feedback = outcome.feedback
  metrics = {name: clean(value) if isinstance(value, str) else value for name, value in outcome.metrics.items()}
  return dataclasses.replace(outcome, feedback=None if feedback is None else clean(feedback), metrics=metrics)


_loaded: set[pathlib.Path] = set()


def load_modules(paths: Sequence[str]) -> None:
  """Runs the Python files that register a user's graders and generators, each once a process.

  Raises:
    UserError: a file is missing, is not Python, or raises when run.
  """
  for name in paths:
    path = pathlib.Path(name).resolve()
    if path in _loaded:
      continue
    if not path.is_file():
      raise UserError(f'environments.modules: there is no file {name!r} (looked for {path}).')
    spec = importlib.util.spec_from_file_location(f'environment_{path.stem}', path)
    if spec is None or spec.loader is None:
      raise UserError(f'environments.modules: {name!r} is not a Python file (.py).')
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dataclasses and pickling look a module up by its name.
    try:
      spec.loader.exec_module(module)
    except Exception as error:
      raise UserError(f'environments.modules: {name!r} cannot be run: {type(error).__name__}: {error}.') from error
    _loaded.add(path)
