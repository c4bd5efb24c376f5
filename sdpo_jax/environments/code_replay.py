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
from typing import Any, Literal

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
  in_place: bool  # Whether all calls, not only statements, may change their arguments.
  # Limits of every process. `cpu_s` also limits all processes of the model's program together, and `MAX_REPLAY` times
  # `cpu_s` all processes of the test. `result_bytes` limits one answer of the model's program; `output_mb` limits the
  # test's result and all answers together.
  limits: Limits


@dataclasses.dataclass(frozen=True)
class Ended:
  """The end of a test: the report on its last process, and what that process returned."""

  report: SandboxReport
  result: dict[str, Any]  # {'finished': True} if the test ran to its end, else {'error': …, 'called': …} or nothing.


@dataclasses.dataclass
class _Test:
  """A test in progress, and its end once it has ended."""

  trial: CodeTrial
  answers: dict[str, Any] = dataclasses.field(default_factory=dict)  # Keyed by the JSON of the operations.
  characters: int = 0  # Length of all answers.
  sent: int = 0  # Characters of answers sent, over all starts of the test.
  cpu_s: float = 0.0  # CPU seconds of the model's program.
  test_cpu_s: float = 0.0
  ended: Ended | None = None

  def end(self, report: SandboxReport, status: Literal['timeout', 'output']) -> None:
    """End the test at a limit that it reached over several processes."""
    self.ended = Ended(dataclasses.replace(report, status=status), {})


def run(sandbox: Sandbox, helpers: HelperPool, trials: Sequence[CodeTrial]) -> list[Ended]:
  """Run the tests and return how each ended.

  Args:
    sandbox: where the tests and the model's programs run.
    helpers: processes of code_verdicts.py that parse the answers of the model's programs.
    trials: the tests.
  """
  tests = [_Test(trial) for trial in trials]
  while pending := [test for test in tests if test.ended is None]:
    _answer(sandbox, helpers, _asked(sandbox, pending))
  return [test.ended for test in tests]


def _asked(sandbox: Sandbox, tests: Sequence[_Test]) -> list[tuple[_Test, list[Any]]]:
  """Run tests with the known answers; return those with an unanswered call and its operations, and end the others."""
  jobs = []
  for test in tests:
    trial = test.trial
    job = _job(trial, 'replay', test=trial.test, answers=test.answers, in_place=trial.in_place)
    jobs.append(dataclasses.replace(job, limits=dataclasses.replace(trial.limits, result_bytes=None)))
  asked = []
  for test, report in zip(tests, sandbox.run(jobs), strict=True):
    # The harness alone writes this, in a process that never held the model's program: strings in a few objects.
    result = report.result if report.status == 'ended' and isinstance(report.result, dict) else {}
    test.test_cpu_s += max(0.0, report.cpu_s - START_S)
    test.sent += test.characters
    if 'need' not in result:
      test.ended = Ended(report, result)
    elif test.test_cpu_s > MAX_REPLAY * test.trial.limits.cpu_s:
      test.end(report, 'timeout')
    elif test.sent > MAX_SENT:
      test.end(report, 'output')
    elif len(test.answers) >= MAX_CALLS:
      said = f'ProcessError: the test calls the program more than {MAX_CALLS} times'
      test.ended = Ended(report, {'error': said})
    else:
      asked.append((test, result['need']))
  return asked


def _answer(sandbox: Sandbox, helpers: HelperPool, asked: Sequence[tuple[_Test, list[Any]]]) -> None:
  """Ask the model's programs; a program that ends without an answer or has used up its time ends its test."""
  jobs = [_job(test.trial, 'operations', code=test.trial.code, operations=need) for test, need in asked]
  for (test, need), report in zip(asked, sandbox.run(jobs), strict=True):
    limits = test.trial.limits
    test.cpu_s += report.cpu_s
    if report.status != 'ended' or not report.result_bytes.startswith(b'{'):
      test.ended = Ended(report, {})
    elif test.cpu_s > limits.cpu_s:
      test.end(report, 'timeout')
    else:
      try:
        found = helpers.ask({}, report.result_bytes, b'', b'')
      except RequestOverranError:
        found = {'raised': 'TypeError', 'message': 'the answer of the program cannot be read'}
      test.characters += sum(len(part) for part in found.values() if isinstance(part, str))
      if test.characters > limits.output_mb * 2**20:
        test.end(report, 'output')
      test.answers[json.dumps(need, sort_keys=True)] = found  # As the harness looks it up.


def _job(trial: CodeTrial, kind: str, **more: Any) -> SandboxJob:
  return SandboxJob({'profile': 'clean', 'testtype': kind, 'context': trial.context, **more}, '', trial.limits)
