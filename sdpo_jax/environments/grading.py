"""Batch grading: every completion is graded by its question's graders, and a failing grader does not end the run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
import contextlib
import dataclasses
import importlib.util
import logging
import math
import pathlib
import sys
import threading
from typing import Any

import numpy as np

from sdpo_jax.config import EnvironmentsConfig, SandboxConfig, rewards
from sdpo_jax.environments import registry
from sdpo_jax.environments.grader_process import LOGGER, EndedProcessError, GraderProcess, RaisedError, UnsendableError
from sdpo_jax.environments.outcomes import called, checked, described, ungraded
from sdpo_jax.environments.reward_functions import is_reward_function
from sdpo_jax.environments.time_limit import EndedError, OverranError, call_within
from sdpo_jax.errors import UserError, short_repr
from sdpo_jax.types import Example, Outcome

# Overruns of single completions, or processes that these end in a row, after which the rest of a call is abandoned.
PATIENCE = 2
MAX_HANGING = 8  # Threads of abandoned calls at which a run ends.
# Metrics that a run uses; the completion takes them from the first grader that reports them.
MEANINGFUL = ('acc', 'pred', 'format_valid')
# Metric names per grader, run and process: each becomes a curve, a column and a line of every report.
MAX_NAMES = 200

_SANDBOX = vars(SandboxConfig())


class Graders(contextlib.AbstractContextManager['Graders']):
  """The graders of a run, made from settings on first use and closed at the run's end.

  A grader that raises, hangs, or returns an invalid score affects only the completions concerned, not the run: they are
  ungraded and counted. A user's grader is called in a process of its own if it can be sent there.
  """

  def __init__(self, settings: EnvironmentsConfig):
    """Load the user's modules.

    Raises:
      UserError: a module of `environments.modules` is missing or cannot be imported, or a name in
        `environments.reward_weights` matches no grader.
    """
    self._settings = settings
    self._made: dict[str, registry.Grader] = {}
    self._weights: dict[str, dict[str, float]] = {}  # By grader name, for every `Example.environment` so far.
    self._metric_names: dict[str, _MetricNames] = {}
    self._batch: dict[str, list[Outcome]] = defaultdict(list)  # By grader name, since `end_batch`.
    self._processes: dict[str, GraderProcess] = {}
    self._turns: dict[str, threading.Lock] = defaultdict(threading.Lock)  # Held while one is started or asked.
    self._part = threading.Lock()  # Held while a part is graded: training and evaluation may grade at the same time.
    self._ending: set[str] = set()  # Graders that have ended their process, about which the log says so.
    self._stay: dict[str, str] = {}  # Why graders stay in this process, by name.
    self._hanging: list[threading.Thread] = []  # Abandoned calls of such graders.
    self._closed = False
    load_modules(settings.modules)
    for name in settings.reward_weights:
      try:
        registry.require(name)
      except UserError as error:
        raise UserError(f'environments.reward_weights: {error}') from error

  def prepare(self, environments: Iterable[str]) -> None:
    """Make the graders of these environments, so that errors in their settings appear before a run begins.

    Raises:
      UserError: a grader does not exist, cannot work with the settings, or all graders of a question have weight 0.
    """
    for name in sorted({name for environment in set(environments) for name in self._weights_of(environment)}):
      self.get(name)

  def _weights_of(self, environment: str) -> dict[str, float]:
    """Return grader weights of an `Example.environment`, by name; raises UserError as `prepare`."""
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
    """Pass the run's questions to every grader that has a method `check_questions`, before the run begins.

    Raises:
      UserError: a grader cannot grade these questions.
    """
    for name, rows in self._rows_of(examples).items():
      grader = self.get(name)
      if hasattr(grader, 'check_questions'):
        grader.check_questions([examples[row] for row in rows])

  def unread_remarks(self, examples: Iterable[Example]) -> list[str]:
    """Return a sentence for each changed setting that only graders read which none of the run's questions names."""
    settings, used = self._settings, rewards.names({example.environment for example in examples})
    unread = [f'reward_weights.{name}' for name in settings.reward_weights if name not in used]
    unread += ['http.url'] * bool(settings.http.url and 'http' not in used)
    unread += ['judge.base_url'] * bool(settings.judge.base_url and 'judge' not in used)
    if not any(hasattr(self.get(name), 'layers') for name in used):
      unread += [f'sandbox.{name}' for name, value in vars(settings.sandbox).items() if value != _SANDBOX[name]]
    return [
      f'environments.{name} has no effect: no question of this run names a grader that reads it.' for name in unread
    ]

  def _rows_of(self, examples: Sequence[Example]) -> dict[str, list[int]]:
    """Return the rows that each grader judges, by name; raises UserError as `prepare`."""
    found: dict[str, list[int]] = defaultdict(list)
    for row, example in enumerate(examples):
      for name in self._weights_of(example.environment):
        found[name].append(row)
    return found

  def describe(self) -> list[str]:
    """Return a line for each way in which graders confine the programs that they run, from their `layers`."""
    names: dict[str, list[str]] = defaultdict(list)
    for name, grader in self._made.items():
      if layers := getattr(grader, 'layers', None):
        names[', '.join(layers)].append(name)
    return [f'  sandbox    {", ".join(of)}: {layers}' for layers, of in names.items()]

  def grade(
    self, examples: Sequence[Example], completions: Sequence[str], *, truncated: Sequence[bool]
  ) -> list[Outcome]:
    """Grade a whole batch and return one outcome per completion, in order; all three arguments have N entries.

    Raises:
      UserError: as `grade_part` and `end_batch`.
    """
    outcomes = self.grade_part(examples, completions, truncated=truncated)
    self.end_batch()
    return outcomes

  def grade_part(
    self, examples: Sequence[Example], completions: Sequence[str], *, truncated: Sequence[bool]
  ) -> list[Outcome]:
    """Grade part of a batch, like `grade`; call `end_batch` after the last part.

    Raises:
      UserError: a question names an unknown grader, or a grader returns the wrong number of outcomes or finds that it
        cannot grade at all.
    """
    found: list[dict[str, Outcome]] = [{} for _ in examples]  # For each completion, by grader.
    for name, rows in self._rows_of(examples).items():
      parts = [(examples[row], completions[row], truncated[row]) for row in rows]
      with self._part:
        outcomes = self._grade(name, parts)
        self._batch[name] += outcomes
      for row, outcome in zip(rows, outcomes, strict=True):
        found[row][name] = outcome
    weights = [self._weights_of(example.environment) for example in examples]
    scores = self._settings.score_range
    return [weighted_sum(parts, outcomes, scores) for parts, outcomes in zip(weights, found, strict=True)]

  def end_batch(self) -> None:
    """Tell graders with a method `end_batch` that a batch is complete, and log how many completions are ungraded.

    Raises:
      UserError: a grader could not grade any completion; the message says what to do.
    """
    batch, self._batch = self._batch, defaultdict(list)
    self._tell('end_batch', UserError)  # If it fails otherwise, every completion already has its outcome.
    for name, outcomes in batch.items():
      if why := [outcome.reason for outcome in outcomes if outcome.applicable and not outcome.graded]:
        said = 'The grader %r could not grade %d of %d completions; the first: %s.'
        LOGGER.warning(said, name, len(why), len(outcomes), why[0].rstrip('.'))

  def close(self) -> None:
    """End the processes and connections that graders hold, even while another thread grades.

    Each grader's close() has the time limit of a call.
    """
    self._closed = True
    for name, process in list(self._processes.items()):
      (process.end if self._turns[name].locked() else process.close)()  # Let it end by itself, unless it is at work.
    self._tell('close')  # If it fails, close the others, and report the error that ended the run.
    self._made.clear()
    for names in self._metric_names.values():
      names.end()

  def __exit__(self, *_: object) -> None:
    self.close()

  def get(self, name: str) -> registry.Grader:
    """Return the named grader, made on first use.

    Raises UserError as `prepare`, and RuntimeError once closed.
    """
    if self._closed:
      raise RuntimeError('The graders are closed.')
    if name not in self._made:
      try:
        self._made[name] = registry.get(name, self._settings)
        self._metric_names[name] = _MetricNames(name)
      except UserError:
        raise
      except (Exception, SystemExit) as error:  # User-defined factories may raise anything.
        raise UserError(f'The grader {name!r} cannot be made: {type(error).__name__}: {error}.') from error
    return self._made[name]

  def _grade(self, name: str, parts: list[tuple[Example, str, bool]]) -> list[Outcome]:
    """Return one checked outcome per completion, even if the named grader raises or hangs."""
    if len(parts) > 1:
      try:
        return self._ask(name, parts)
      except UserError:
        raise
      except Exception:  # Graders may be user code; their exceptions must not end a run of days.
        if self._closed:  # The run has ended, so these completions are no longer needed.
          raise
    # One by one, so that only completions that make it raise or hang are affected.
    outcomes: list[Outcome] = []
    overran, ended, why = 0, 0, ''
    for part in parts:
      if PATIENCE in (overran, ended):
        # The most frequent reason in such a batch is all that the end of a run reports, so it includes the limit.
        outcomes.append(ungraded(f'{why} for {PATIENCE} others, and was abandoned'))
        continue
      try:
        outcomes += self._ask(name, [part])
        ended = 0
      except UserError:
        raise
      except Exception as error:
        if self._closed:
          raise
        overran += isinstance(error, OverranError)
        ended = ended + 1 if isinstance(error, EndedProcessError) else 0
        why = _reason(name, error)
        outcomes.append(ungraded(why))
    return outcomes

  def _ask(self, name: str, parts: Sequence[tuple[Example, str, bool]]) -> list[Outcome]:
    """Call the grader and check its outcomes; raises what it raises, or UserError if it returns no list of outcomes."""
    grader = self.get(name)
    asked = [list(values) for values in zip(*parts, strict=True)]
    return [self._metric_names[name].kept(outcome) for outcome in self._call(name, grader, '__call__', asked)]

  def _tell(self, method: str, *raised: type[Exception]) -> None:
    """Call a method of all graders that have it; log its exceptions, except those to be `raised`."""
    for name, grader in list(self._made.items()):
      if not hasattr(grader, method):
        continue
      try:
        self._call(name, grader, method)
      except raised:
        raise
      except Exception as error:
        logging.warning('The %s() of the grader %r failed: %r', method, name, error)

  def _call(self, name: str, grader: registry.Grader, method: str, asked: Sequence[list[Any]] = ()) -> list[Outcome]:
    """Call a method of a grader as `called`, within the time limit, in its process or else in a thread.

    Raises what the grader raises, in a process a RaisedError for it, or UserError if too many threads hang.
    """
    with self._turns[name]:  # The limit of another thread's call begins afterwards.
      try:
        if process := self._process(name, grader):
          return self._within(name, grader, lambda: process.ask(method, asked))
      except UnsendableError as error:
        self._stay[name] = f'cannot be sent to a process ({error})'
        LOGGER.warning('The grader %r runs in the main process: it %s.', name, self._stay[name])
      except OverranError:
        self._processes.pop(name).end()
        raise
    own = asked if registry.is_built_in(name) else _copied(asked)
    try:
      return self._within(name, grader, lambda: called(grader, method, own, name, self._settings.score_range))
    except OverranError as error:
      self._hanging = [thread for thread in (*self._hanging, error.thread) if thread.is_alive()]
      if len(self._hanging) < MAX_HANGING:
        raise
      raise UserError(
        f'{MAX_HANGING} calls of graders hang in threads, which cannot be ended, the last one of {name!r}, which '
        f'{self._stay[name]}: mend it, or let it run in a process (docs/environments.md, Where it runs).'
      ) from error

  def _within(self, name: str, grader: registry.Grader, function: Callable[[], Any]) -> Any:
    seconds = None if getattr(grader, 'limits_itself', False) else self._settings.grader_timeout_s
    return call_within(function, seconds, f'grader-{name}')

  def _process(self, name: str, grader: registry.Grader) -> GraderProcess | None:
    """Return a grader's process, started if it does not run; None if the grader stays in this process."""
    own = hasattr(grader, 'close') or getattr(grader, 'limits_itself', False)
    if own or not getattr(grader, 'needs_process', not registry.is_built_in(name)):
      self._stay[name] = 'has a method close()'  # Others have limits of their own, or need none.
    if name in self._stay:
      return None
    found = self._processes.get(name)
    if found is None or found.ended:
      how = found and found.end()
      if how and name not in self._ending:
        LOGGER.warning('The process of the grader %r ended (%s): a new one starts whenever it does.', name, how)
        self._ending.add(name)
      found = self._processes[name] = GraderProcess(grader, name, self._settings.score_range)
    if self._closed:
      found.end()
    return found


def _copied(value: Any) -> Any:
  """Return a value with lists, dicts and arrays of its own, so that a grader which changes it changes nothing else."""
  if isinstance(value, Example):
    return dataclasses.replace(value, **{name: _copied(held) for name, held in vars(value).items()})
  if isinstance(value, np.ndarray):
    return value.copy()
  if type(value) is dict:
    return {name: _copied(held) for name, held in value.items()}
  return type(value)(map(_copied, value)) if type(value) in (list, tuple) else value


def _reason(name: str, error: Exception) -> str:
  """Return why a completion, on which its grader raised or hung, is ungraded."""
  if isinstance(error, OverranError):
    return f'the grader {name!r} gave {error} (environments.grader_timeout_s)'
  said = error.__cause__ if isinstance(error, EndedError) else error
  return f'the grader {name!r} {said if isinstance(said, RaisedError) else described(said)}'


class _MetricNames:
  """The metric names that a grader has reported so far, limited to `MAX_NAMES`; thread-safe."""

  def __init__(self, grader: str):
    self._grader = grader
    self._names: set[str] = set()
    self._dropped = 0  # Number of dropped values.
    self._lock = threading.Lock()

  def kept(self, outcome: Outcome) -> Outcome:
    """Return the outcome with metrics of the first `MAX_NAMES` names only; logs the first time it drops one."""
    with self._lock:
      for name in outcome.metrics:
        if len(self._names) < MAX_NAMES:
          self._names.add(name)
      further = [name for name in outcome.metrics if name not in self._names]
      if further and not self._dropped:
        logging.warning(
          'The grader %r has reported more than %d metric names; others, such as %s, are dropped.',
          self._grader,
          MAX_NAMES,
          short_repr(further[0]),
        )
      self._dropped += len(further)
    if not further:
      return outcome
    metrics = {name: value for name, value in outcome.metrics.items() if name in self._names}
    return dataclasses.replace(outcome, metrics=metrics)

  def end(self) -> None:
    """Log the number of dropped values, at the end of a run."""
    with self._lock:
      dropped, self._dropped = self._dropped, 0
    if dropped:
      logging.warning(
        'The grader %r has reported more than %d metric names: %d metrics with other names were dropped.',
        self._grader,
        MAX_NAMES,
        dropped,
      )


def weighted_sum(
  weights: Mapping[str, float], outcomes: Mapping[str, Outcome], score_range: Sequence[float]
) -> Outcome:
  """Return Σ weight · score over the graders that apply, or the reason why there is none.

  A single grader of weight 1 is left as it is. A grader that does not apply is left out of the sum, as TRL's
  GRPOTrainer does for a reward function that returns None. If a grader with a weight could not grade, the completion is
  ungraded. A grader of weight 0 contributes only feedback and metrics, and may fail. The sum is rounded once, so that
  rewards of 1 with weights of 0.7, 0.2 and 0.1 give 1.

  Args:
    weights: weights of a question's graders by name, in its order; at least one is not 0.
    outcomes: outcomes by the same names, each already `checked`.
    score_range: as for `checked`.
  """
  if list(weights.values()) == [1.0]:
    return next(iter(outcomes.values()))
  counting = [name for name, weight in weights.items() if weight]
  for name in counting:
    if not outcomes[name].graded and outcomes[name].applicable:
      return ungraded(f'{name}: {outcomes[name].reason}')
  if not any(outcomes[name].wanted for name in counting):
    return Outcome.unwanted(f'none of its graders gives scores ({", ".join(counting)})')
  if not any(outcomes[name].graded for name in counting):
    return Outcome.not_applicable(f'none of its rewards applies ({", ".join(counting)})')
  applied = {name: outcomes[name] for name in weights if outcomes[name].graded}
  said = [outcome.feedback for outcome in applied.values() if outcome.feedback and outcome.feedback.strip()]
  total = Outcome(
    score=_exact_sum([weights[name] * outcome.score for name, outcome in applied.items()]),
    feedback='\n\n'.join(dict.fromkeys(said)) or None,
    metrics=_metrics(applied) if len(weights) > 1 else next(iter(applied.values())).metrics,
  )
  found = checked(total, score_range)
  given = {name: outcome.score for name, outcome in applied.items()}
  return dataclasses.replace(found, rewards=given) if found.graded else found


def _exact_sum(terms: Sequence[float]) -> float:
  """Return the sum, rounded once; infinite or NaN if a term or the sum is."""
  try:
    return math.fsum(terms)
  except (OverflowError, ValueError):  # Finite terms whose sum overflows, or infinities of both signs.
    return sum(terms)


def _metrics(outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
  """Return the metrics of several graders as `<grader>/<metric>`, and `MEANINGFUL` ones also under their own name."""
  found = {f'{name}/{key}': value for name, outcome in outcomes.items() for key, value in outcome.metrics.items()}
  for key in MEANINGFUL:
    given = [outcome.metrics[key] for outcome in outcomes.values() if key in outcome.metrics]
    if given:
      found[key] = given[0]
  return found


_loaded: set[pathlib.Path] = set()


def load_modules(paths: Sequence[str]) -> None:
  """Run the Python files that register a user's graders and generators, each once per process.

  Raises:
    UserError: a file is missing, is not Python, raises, or has a reward function with the name of a grader.
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
    sys.modules[spec.name] = module  # Dataclasses and pickling look up a module by its name.
    try:
      spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
      raise UserError(f'environments.modules: {name!r} cannot be run: {type(error).__name__}: {error}.') from error
    _register_reward_functions(vars(module), spec.name, name)
    _loaded.add(path)


def _register_reward_functions(names: Mapping[str, Any], module: str, file: str) -> None:
  """Register the reward functions that a file defines but does not register itself, under their own names."""
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
