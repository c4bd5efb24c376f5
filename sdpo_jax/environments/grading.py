"""Grading a batch: every completion by the graders that its question names, whatever a grader does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
import importlib.util
import logging
import pathlib
import sys
from typing import Any

from sdpo_jax.config import EnvironmentsConfig, rewards
from sdpo_jax.environments import registry
from sdpo_jax.environments.metric_names import MetricNames
from sdpo_jax.environments.outcomes import checked, ungraded
from sdpo_jax.environments.reward_functions import is_reward_function
from sdpo_jax.environments.time_limit import EndedError, OverranError, call_within
from sdpo_jax.environments.weighted_sum import weighted_sum
from sdpo_jax.errors import UserError, short_repr
from sdpo_jax.types import Example, Outcome

PATIENCE = 2  # Single completions of a call that may overrun before the rest of the call is abandoned.


class Graders:
  """The graders of a run: made from settings when first needed, closed at its end.

  A grader that raises, hangs, or gives a score that is none costs the completions that it does so for, not the run:
  they are ungraded, and counted.
  """

  def __init__(self, settings: EnvironmentsConfig):
    """Load the user's modules.

    Raises:
      UserError: a module of `environments.modules` is missing or cannot be imported, or a name in
        `environments.reward_weights` is no grader's.
    """
    self._settings = settings
    self._made: dict[str, registry.Grader] = {}
    self._weights: dict[str, dict[str, float]] = {}  # By name of the grader, of every `Example.environment` so far.
    self._metric_names: dict[str, MetricNames] = {}
    self._closed = False
    load_modules(settings.modules)
    for name in settings.reward_weights:
      try:
        registry.require(name)
      except UserError as error:
        raise UserError(f'environments.reward_weights: {error}') from error

  def prepare(self, environments: Iterable[str]) -> None:
    """Make the graders of these environments, so that what is wrong with their settings is said before a run begins.

    Raises:
      UserError: there is no such grader, it cannot work with the settings, or all graders of a question weigh nothing.
    """
    for name in sorted({name for environment in set(environments) for name in self._weights_of(environment)}):
      self.get(name)

  def _weights_of(self, environment: str) -> dict[str, float]:
    """Return the weights of the graders of an `Example.environment` by name; raises UserError as `prepare`."""
    if environment not in self._weights:
      try:
        named = rewards.parse(environment)
      except rewards.UnreadableRewards as error:
        raise UserError(f'The environment {short_repr(environment)} of a question {error}.') from error
      given = self._settings.reward_weights
      found = {part.name: float(given.get(part.name, 1.0)) if part.weight is None else part.weight for part in named}
      if not any(found.values()):
        raise UserError(
          f'All graders of {environment!r} have the weight 0, so that every completion would score 0: give one of them '
          'another weight, in the row or in environments.reward_weights.'
        )
      self._weights[environment] = found
    return self._weights[environment]

  def check_questions(self, examples: Sequence[Example]) -> None:
    """Hands every grader that wants to see them the questions that it will be asked about, before a run begins.

    Raises:
      UserError: a grader cannot grade such questions.
    """
    by_grader: dict[str, list[Example]] = defaultdict(list)
    for example in examples:
      for name in self._weights_of(example.environment):
        by_grader[name].append(example)
    for name, asked in by_grader.items():
      grader = self.get(name)
      if hasattr(grader, 'check_questions'):
        grader.check_questions(asked)

  def describe(self) -> list[str]:
    """Return a line for each way in which graders confine the programs that they run; `layers` of a grader names it."""
    names: dict[str, list[str]] = defaultdict(list)
    for name, grader in self._made.items():
      if layers := getattr(grader, 'layers', None):
        names[', '.join(layers)].append(name)
    return [f'  sandbox    {", ".join(of)}: {layers}' for layers, of in names.items()]

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
    weights = [self._weights_of(example.environment) for example in examples]
    by_grader: dict[str, list[int]] = defaultdict(list)
    for row, names in enumerate(weights):
      for name in names:
        by_grader[name].append(row)
    found: list[dict[str, Outcome]] = [{} for _ in examples]  # Of each completion by grader.
    for name, rows in by_grader.items():
      parts = [(examples[row], completions[row], truncated[row]) for row in rows]
      for row, outcome in zip(rows, self._grade(name, parts), strict=True):
        found[row][name] = outcome
    scores = self._settings.score_range
    return [weighted_sum(parts, outcomes, scores) for parts, outcomes in zip(weights, found, strict=True)]

  def end_batch(self) -> None:
    """Tells graders that want to know that a batch is over.

    Raises:
      UserError: a grader could not grade any of it, and says what to do.
    """
    for name, grader in list(self._made.items()):
      if not hasattr(grader, 'end_batch'):
        continue
      try:
        self._call(name, grader, grader.end_batch)
      except UserError:
        raise
      except Exception as error:  # Every completion has its outcome by now.
        logging.warning('The end_batch() of the grader %r failed: %r', name, error)

  def close(self) -> None:
    """End the processes and connections of graders that hold some, also while another thread grades.

    A close() has the time limit of a call.
    """
    self._closed = True
    for name, grader in list(self._made.items()):
      if not hasattr(grader, 'close'):
        continue
      try:
        self._call(name, grader, grader.close)
      except Exception as error:  # The others are to be closed as well, and what ended the run is to be said.
        logging.warning('The close() of the grader %r failed: %r', name, error)
    self._made.clear()
    for names in self._metric_names.values():
      names.end()

  def __enter__(self) -> Graders:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def get(self, name: str) -> registry.Grader:
    """Return the grader of that name, made on its first use; raises UserError as `prepare`, RuntimeError once
    closed.
    """
    if self._closed:
      raise RuntimeError('The graders are closed.')
    if name not in self._made:
      try:
        self._made[name] = registry.get(name, self._settings)
        self._metric_names[name] = MetricNames(name)
      except UserError:
        raise
      except (Exception, SystemExit) as error:  # Of anybody's factory.
        raise UserError(f'The grader {name!r} cannot be made: {type(error).__name__}: {error}.') from error
    return self._made[name]

  def _grade(self, name: str, parts: list[tuple[Example, str, bool]]) -> list[Outcome]:
    """One checked outcome for each completion, whatever the grader of that name does with them."""
    if len(parts) > 1:
      try:
        return self._ask(name, parts)
      except UserError:
        raise
      except Exception:  # A grader is anybody's code; what it raises must not end a run of days.
        if self._closed:  # The run has ended, and nobody waits for these completions any more.
          raise
    # One by one, so that only those that it raises or hangs for suffer.
    outcomes: list[Outcome] = []
    overran = 0
    for part in parts:
      if overran == PATIENCE:
        # The most frequent reason of such a batch, which is all that the end of a run says: so with the limit.
        outcomes.append(
          ungraded(
            f'the grader {name!r} was abandoned after it had not answered within {self._settings.grader_timeout_s:g} s '
            f'(environments.grader_timeout_s) for {PATIENCE} others'
          )
        )
        continue
      try:
        outcomes += self._ask(name, [part])
      except UserError:
        raise
      except Exception as error:
        if self._closed:
          raise
        overran += isinstance(error, OverranError)
        outcomes.append(_without(name, part[0], error))
    return outcomes

  def _ask(self, name: str, parts: Sequence[tuple[Example, str, bool]]) -> list[Outcome]:
    """Return what the grader returns, checked; raises whatever it raises, or UserError if it is no list of outcomes."""
    grader = self.get(name)
    examples, completions, truncated = (list(values) for values in zip(*parts, strict=True))
    outcomes = self._call(name, grader, lambda: grader(examples, completions, truncated=truncated))
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
    sound = [checked(outcome, self._settings.score_range) for outcome in outcomes]
    wrong = [new for new, old in zip(sound, outcomes, strict=True) if not new.graded and old.score is not None]
    if wrong:
      logging.warning(
        'The grader %r returned unusable outcomes for %d of %d completions, which are ungraded; the first: %s.',
        name,
        len(wrong),
        len(outcomes),
        wrong[0].reason,
      )
    return [self._metric_names[name].kept(outcome) for outcome in sound]

  def _call(self, name: str, grader: registry.Grader, function: Callable[[], Any]) -> Any:
    seconds = None if getattr(grader, 'limits_itself', False) else self._settings.grader_timeout_s
    return call_within(function, seconds, f'grader-{name}')


def _without(name: str, example: Example, error: Exception) -> Outcome:
  """Return what stands for a completion that its grader raised or hung for."""
  if isinstance(error, OverranError):
    logging.warning('The grader %r was abandoned over a completion of %s: %s.', name, example.id, error)
    return ungraded(f'the grader {name!r} gave {error} (environments.grader_timeout_s)')
  said = error.__cause__ if isinstance(error, EndedError) else error
  logging.warning('The grader %r raised for a completion of %s, which is ungraded: %r', name, example.id, said)
  return ungraded(f'the grader {name!r} raised {short_repr(said, 200)}')


_loaded: set[pathlib.Path] = set()


def load_modules(paths: Sequence[str]) -> None:
  """Run the Python files that register a user's graders and generators, each once a process.

  Raises:
    UserError: a file is missing, is not Python, raises when run, or has a reward function with the name of a grader.
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
    except (Exception, SystemExit) as error:
      raise UserError(f'environments.modules: {name!r} cannot be run: {type(error).__name__}: {error}.') from error
    _register_reward_functions(vars(module), spec.name, name)
    _loaded.add(path)


def _register_reward_functions(names: Mapping[str, Any], module: str, file: str) -> None:
  """Register the reward functions that a file defines, and has not registered itself, under their own names."""
  for name, value in names.items():
    defined = getattr(value, '__module__', None) == module and not name.startswith('_')
    if not defined or not is_reward_function(value) or registry.is_registered_reward_function(value):
      continue
    try:
      registry.register_reward_function(name)(value)
    except ValueError as error:
      raise UserError(
        f'environments.modules: the reward function {name!r} of {file!r} has the name of another grader: rename it.'
      ) from error
