"""Test programs that run apart from the program under test.

A test of type `code` is a Python program that calls the model's functions and asserts. If both ran in one process, the
model's program could read the expected values, or report success itself. So the test runs in its own process, with
stand-ins for the model's functions and classes. A call of a stand-in that has not been answered before ends that
process; a fresh process of the model's program answers this one call with plain data; then the test starts again and
finds the answer. Arguments are copies, except those of a call that is a statement. Objects of the model's classes stay
on its side: every use of one replays the earlier operations.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import json
from typing import Any

from sdpo_jax.environments.helper_process import HelperPool, RequestOverranError
from sdpo_jax.environments.sandbox.sandbox import Limits, Sandbox, SandboxJob, SandboxReport

MAX_CALLS = 1000  # Limit per test; each call costs two processes.
# Limits per test over all its starts, because every answer of the model's program makes each restart longer: a multiple
# of `cpu_s`, not counting a process's start; and characters of answers, which this process writes again for each start.
MAX_REPLAY, START_S, MAX_SENT = 10.0, 0.02, 2**26
CALLED_CHARACTERS = 200  # Length limit of the last call as shown.


@dataclasses.dataclass(frozen=True)
class CodeTrial:
  """A test program and the model's program that it tests."""

  code: str  # The model's program.
  context: str  # Code that runs before either program.
  test: str
  in_place: bool  # All calls of the model's functions may change their arguments, not only statements.
  # Limits of every process. `cpu_s` also limits all processes of the model's program together, and `MAX_REPLAY` times
  # `cpu_s` all processes of the test. `result_bytes` limits one answer of the model's program; `output_mb` limits the
  # test's result and all answers together.
  limits: Limits


@dataclasses.dataclass(frozen=True)
class Ended:
  """The end of a test: the report of the process that ended it, and what that process returned."""

  report: SandboxReport
  result: dict[str, Any]  # {'finished': True} if the test ran to its end, else {'error': …, 'called': …} or nothing.


@dataclasses.dataclass
class _State:
  answers: dict[str, Any] = dataclasses.field(default_factory=dict)  # Keyed by the JSON of the operations.
  characters: int = 0  # Length of all answers.
  sent: int = 0  # Characters of answers sent, over all starts of the test.
  cpu_s: float = 0.0  # CPU seconds of the model's program.
  test_cpu_s: float = 0.0


def run(sandbox: Sandbox, helpers: HelperPool, trials: Sequence[CodeTrial]) -> list[Ended]:
  """Run the tests and return how each ended.

  Args:
    sandbox: where the tests and the model's programs run.
    helpers: processes of code_verdicts.py that parse the answers of the model's programs.
    trials: the tests.
  """
  ended: list[Ended | None] = [None] * len(trials)
  states = [_State() for _ in trials]
  pending = list(range(len(trials)))
  while pending:
    asked = _asked(sandbox, trials, states, pending, ended)
    _answer(sandbox, helpers, trials, states, asked, ended)
    pending = [number for number, _ in asked if ended[number] is None]
  return ended


def _asked(
  sandbox: Sandbox,
  trials: Sequence[CodeTrial],
  states: Sequence[_State],
  pending: Sequence[int],
  ended: list[Ended | None],
) -> list[tuple[int, list[Any]]]:
  """Run tests with the known answers; return (test, operations) for unanswered calls and fill `ended` for the rest."""
  jobs = []
  for number in pending:
    limits = dataclasses.replace(trials[number].limits, result_bytes=None)
    job = _job(
      trials[number],
      'replay',
      test=trials[number].test,
      answers=states[number].answers,
      in_place=trials[number].in_place,
    )
    jobs.append(dataclasses.replace(job, limits=limits))
  asked = []
  for number, report in zip(pending, sandbox.run(jobs), strict=True):
    # The harness alone writes this, in a process that never held the model's program: strings in a few objects.
    result = report.result if report.status == 'ended' and isinstance(report.result, dict) else {}
    state = states[number]
    state.test_cpu_s += max(0.0, report.cpu_s - START_S)
    state.sent += state.characters
    if 'need' not in result:
      ended[number] = Ended(report, result)
    elif state.test_cpu_s > MAX_REPLAY * trials[number].limits.cpu_s:
      ended[number] = Ended(dataclasses.replace(report, status='timeout'), {})
    elif state.sent > MAX_SENT:
      ended[number] = Ended(dataclasses.replace(report, status='output'), {})
    elif len(states[number].answers) >= MAX_CALLS:
      said = f'ProcessError: the test calls the program more than {MAX_CALLS} times'
      ended[number] = Ended(report, {'error': said})
    else:
      asked.append((number, result['need']))
  return asked


def _answer(
  sandbox: Sandbox,
  helpers: HelperPool,
  trials: Sequence[CodeTrial],
  states: Sequence[_State],
  asked: Sequence[tuple[int, list[Any]]],
  ended: list[Ended | None],
) -> None:
  """Ask the model's programs; a program that ends without an answer or has used up its time ends its test."""
  jobs = [_job(trials[number], 'operations', code=trials[number].code, operations=need) for number, need in asked]
  for (number, need), report in zip(asked, sandbox.run(jobs), strict=True):
    state, limits = states[number], trials[number].limits
    state.cpu_s += report.cpu_s
    if report.status != 'ended' or not report.result_bytes.startswith(b'{'):
      ended[number] = Ended(report, {})
    elif state.cpu_s > limits.cpu_s:
      ended[number] = Ended(dataclasses.replace(report, status='timeout'), {})
    else:
      try:
        found = helpers.ask({}, report.result_bytes, b'', b'')
      except RequestOverranError:
        found = {'raised': 'TypeError', 'message': 'the answer of the program cannot be read'}
      state.characters += sum(len(part) for part in found.values() if isinstance(part, str))
      if state.characters > limits.output_mb * 2**20:
        ended[number] = Ended(dataclasses.replace(report, status='output'), {})
      state.answers[key(need)] = found


def _job(trial: CodeTrial, kind: str, **more: Any) -> SandboxJob:
  return SandboxJob({'profile': 'clean', 'testtype': kind, 'context': trial.context, **more}, '', trial.limits)


def key(operations: Sequence[Any]) -> str:
  """Return the key under which the harness looks up an answer."""
  return json.dumps(operations, sort_keys=True)
