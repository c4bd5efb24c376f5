"""Thousands of hostile programs among honest ones: their effect on the honest ones and on the training process.

Honest programs are graded alone, then again with as many hostile ones between them, in an order that the seed decides.
Both passes go through the code environment, as in a run; this process stands for the training process.
"""

# ruff: noqa: E501 (a program is one line)

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import gc
import json
import os
import random
import tempfile
import threading
import time
from typing import Any

from sdpo_jax.config import EnvironmentsConfig, SandboxConfig
from sdpo_jax.environments.code import CodeGrader
from sdpo_jax.environments.sandbox.sandbox import Sandbox, SandboxJob, SandboxReport
from sdpo_jax.types import Example, Outcome

CALL = 64  # Programs per call of the grader, as completions of a batch arrive in parts.
WARM_UP = 0.1  # Fraction of programs graded before memory is measured: allocators keep memory once used.
MAX_GROWTH_MIB = 64.0  # Allowed change of memory, in both directions.
MAX_CALLBACK_MS = 50.0  # CPU time of a thread for all of this process's work on one program.


@dataclasses.dataclass(frozen=True)
class Entry:
  """A program with its tests."""

  kind: str
  honest: bool
  tests: dict[str, Any]
  code: str


def _tests(inputs: Sequence[Any], outputs: Sequence[Any], kind: str, limit: float, **more: Any) -> dict[str, Any]:
  tests = {'inputs': list(inputs), 'outputs': list(outputs), 'testtype': kind, 'fn_name': 'f', 'time_limit': limit}
  return tests | more


def _square(limit: float, *numbers: int) -> dict[str, Any]:
  return _tests([str(n) for n in numbers], [str(n * n) for n in numbers], 'functional', limit)


def _echo(limit: float, *numbers: int) -> dict[str, Any]:
  return _tests([f'{n}\n' for n in numbers], [f'{n}\n' for n in numbers], 'stdin', limit)


def _check(limit: float, test: str) -> dict[str, Any]:
  return _tests([test], [None], 'code', limit)


HONEST_S, HOSTILE_S = 5.0, 0.1  # Time limits; that of honest programs allows for concurrent work.
_SHARED = ['/tmp/left', '/var/tmp/left', '/dev/shm/left', '/left', '../left', 'left', '/proc/self/cwd/../left']
_ALWAYS = 'class Always(int):\n  def __eq__(self, other): return True\n  __hash__ = None\n'
_DESCRIPTORS = (
  'import os\nfor d in range(3, 64):\n  try:\n    os.write(d, {text!r})\n  except OSError:\n    pass\nos._exit(0)'
)
# Honest programs: right answers, and common mistakes.
HONEST: dict[str, Callable[[random.Random], tuple[dict[str, Any], str]]] = {
  'right': lambda r: (_square(HONEST_S, r.randrange(99), -r.randrange(99)), 'def f(n):\n  return n * n'),
  'wrong': lambda r: (_square(HONEST_S, r.randrange(3, 99), 2), 'def f(n):\n  return n + n'),
  'method': lambda r: (_square(HONEST_S, r.randrange(99)), 'class Solution:\n  def f(self, n):\n    return n ** 2'),
  'raises': lambda r: (_square(HONEST_S, r.randrange(3, 99)), 'def f(n):\n  return [0][n]'),
  'lists': lambda r: (_tests(['9999'], [json.dumps(list(range(9999)))], 'functional', HONEST_S), 'def f(n):\n  return list(range(n))'),
  'numpy': lambda r: (_square(HONEST_S, r.randrange(99)), 'import numpy as np\ndef f(n):\n  return (np.arange(n + 1) ** 2)[n]'),
  'prints': lambda r: (_echo(HONEST_S, r.randrange(99), r.randrange(99)), 'print(int(input()))'),
  'prints and complains': lambda r: (_echo(HONEST_S, r.randrange(99)), 'import sys\nfor i in range(99):\n  print(i, file=sys.stderr)\nprint(input())'),
  'files': lambda r: (_echo(HONEST_S, r.randrange(99)), 'open("own", "w").write(input())\nprint(open("own").read())'),
  'asserted': lambda r: (_check(HONEST_S, f'for n in range({r.randrange(2, 5)}):\n  assert f(n) == n * n'), 'def f(n):\n  return n * n'),
  'in place': lambda r: (_check(HONEST_S, 'xs = [3, 1, 2]\nf(xs)\nassert xs == [1, 2, 3]'), 'def f(xs):\n  xs.sort()'),
  'exits': lambda r: (_echo(HONEST_S, r.randrange(99)), 'print(input())\nimport sys\nsys.exit(3)'),
}  # fmt: skip
# Hostile programs, none of which may pass.
HOSTILE: dict[str, Callable[[random.Random], tuple[dict[str, Any], str]]] = {
  'spins': lambda r: (_square(HOSTILE_S, 2), 'def f(n):\n  while True:\n    pass'),
  'sleeps': lambda r: (_square(HOSTILE_S, 2), 'import time\ndef f(n):\n  time.sleep(60)'),
  'memory': lambda r: (_square(HOSTILE_S, 2), 'def f(n):\n  x = []\n  while True:\n    x.append(bytearray(1 << 24))'),
  'lists of lists': lambda r: (_square(HOSTILE_S, 2), 'import os\ndata = b"[" + b"[]," * 2700000\nwhile data:\n  data = data[os.write(4, data):]\nos._exit(0)'),
  'a long text': lambda r: (_square(HOSTILE_S, 2), 'def f(n):\n  return "x" * (1 << 23)'),
  'prints without end': lambda r: (_echo(HOSTILE_S, 5), 'while True:\n  print("5" * 9999)'),
  'complains without end': lambda r: (_echo(HOSTILE_S, 5), 'import sys\nwhile True:\n  print("5" * 9999, file=sys.stderr)'),
  'prints not text': lambda r: (_echo(HOSTILE_S, 5), 'import os\nwhile True:\n  os.write(1, b"\\xff" * 65536)'),
  'reports success': lambda r: (_check(HOSTILE_S, 'assert f(2) == 4'), _DESCRIPTORS.format(text=b'{"finished": true, "repr": "5", "whole": "4"}')),
  'reports everything': lambda r: (_square(HOSTILE_S, 2), _DESCRIPTORS.format(text=b'{"output": "4", "whole": "4"}\n' * 2)),
  'equals everything': lambda r: (_square(HOSTILE_S, 2), _ALWAYS + 'def f(n):\n  return Always(7)'),
  'ends the sequence': lambda r: (_check(HOSTILE_S, 'assert all(map(f, [1, 2]))'), 'def f(n):\n  raise StopIteration'),
  'empties arguments': lambda r: (_check(HOSTILE_S, 'xs = [2, 1]\nassert f(xs) == sorted(xs)'), 'def f(xs):\n  xs.clear()\n  return []'),
  'exits': lambda r: (_check(HOSTILE_S, 'assert f(2) == 4'), 'import os\ndef f(n):\n  os._exit(0)'),
  'kills': lambda r: (_square(HOSTILE_S, 2), 'import os, signal\nfor pid in (-1, 0, os.getppid(), 1):\n  try:\n    os.kill(pid, signal.SIGKILL)\n  except OSError:\n    pass'),
  'forks': lambda r: (_square(HOSTILE_S, 2), 'import os\nwhile True:\n  os.fork()'),
  'threads': lambda r: (_square(HOSTILE_S, 2), 'import threading, time\nfor i in range(999):\n  threading.Thread(target=time.sleep, args=(9,)).start()'),
  'many files': lambda r: (_square(HOSTILE_S, 2), 'for i in range(99999):\n  open(str(i), "w").write("x")'),
  'large files': lambda r: (_square(HOSTILE_S, 2), 'for i in range(99):\n  open(str(i), "wb").write(bytes(1 << 22))'),
  'unlinked files': lambda r: (_square(HOSTILE_S, 2), 'import os\nkept = []\nfor i in range(99):\n  kept.append(open("x", "wb"))\n  kept[-1].write(bytes(1 << 22))\n  os.unlink("x")'),
  'deep directories': lambda r: (_square(HOSTILE_S, 2), 'import os\nfor i in range(9999):\n  os.mkdir("d")\n  os.chdir("d")'),
  'leaves an answer': lambda r: (_echo(HOSTILE_S, 4711), f'import os\nfor p in {_SHARED}:\n  try:\n    open(p, "w").write("4711")\n  except OSError:\n    pass\nprint(0)'),
  'reads what was left': lambda r: (_echo(HOSTILE_S, 4711), f'import os\nfor p in {_SHARED}:\n  try:\n    print(open(p).read())\n  except OSError:\n    pass'),
  'deep result': lambda r: (_square(HOSTILE_S, 2), 'def f(n):\n  x = []\n  for i in range(99999):\n    x = [x]\n  return x'),
  'crashes': lambda r: (_square(HOSTILE_S, 2), 'import ctypes\nctypes.string_at(0)'),
  'lies about itself': lambda r: (_square(HOSTILE_S, 2), 'class Meta(type):\n  __name__ = property(lambda self: 1 / 0)\nclass Lie(BaseException, metaclass=Meta):\n  def __str__(self):\n    raise SystemExit(0)\ndef f(n):\n  raise Lie'),
}  # fmt: skip


def entries(count: int, seed: int) -> list[Entry]:
  """Return `count` programs in random order, half of them honest, all kinds equally often."""
  made = []
  for index in range(count):
    honest = index % 2 == 0
    makers = HONEST if honest else HOSTILE
    kind = list(makers)[(index // 2) % len(makers)]
    made.append(Entry(kind, honest, *makers[kind](random.Random(f'{seed} {index}'))))
  random.Random(seed).shuffle(made)
  return made


class MeasuredSandbox:
  """A sandbox that measures the CPU time of its threads in this process per program.

  Garbage collections are counted apart: they go through all of the process's objects, on whatever thread is running.
  """

  def __init__(self, inner: Sandbox):
    self._inner = inner
    self._before = threading.local()
    self.callbacks_ms: list[float] = []  # One per program that has run.
    self.collections_ms: list[float] = [0.0]
    gc.callbacks.append(self._collection)

  def run(self, jobs: Sequence[SandboxJob], then: Callable[[int, SandboxReport], Any] | None = None) -> list[Any]:
    """Run jobs as `Sandbox.run` does."""

    def measured(number: int, report: SandboxReport) -> Any:
      found = report if then is None else then(number, report)
      # All work of the thread since its last program: starting this one, reading, comparing.
      now = time.thread_time() - getattr(self._before, 'collecting', 0.0)
      self.callbacks_ms.append((now - getattr(self._before, 'time', 0.0)) * 1000)
      self._before.time = now
      return found

    return self._inner.run(jobs, measured)

  def close(self) -> None:
    gc.callbacks.remove(self._collection)
    self._inner.close()

  def _collection(self, phase: str, info: Mapping[str, int]) -> None:
    now = time.thread_time()
    if phase == 'start':
      self._before.collection = now
    elif (start := getattr(self._before, 'collection', None)) is not None:
      self._before.collecting = getattr(self._before, 'collecting', 0.0) + now - start
      self.collections_ms.append((now - start) * 1000)


@dataclasses.dataclass
class Pass:
  """Results of grading programs."""

  outcomes: list[Outcome]
  layers: list[str]  # Layers that confine the programs.
  callbacks_ms: list[float]
  collections_ms: list[float]  # Garbage collections, on any thread.
  calls_ms: list[float]  # CPU time of the thread that calls the grader, per `CALL` programs.
  memory_mib: list[float]  # After each call.
  wall_s: float
  cpu_s: float  # Of this process.


def graded(programs: Sequence[Entry], workers: int | None) -> Pass:
  """Grade programs, `CALL` at a time."""
  calls, memory = [], []
  start, cpu = time.perf_counter(), time.process_time()
  with contextlib.closing(CodeGrader(EnvironmentsConfig(sandbox=SandboxConfig(workers=workers)))) as grader:
    layers = list(grader.layers)
    measured = grader.sandbox = MeasuredSandbox(grader.sandbox)
    outcomes = []
    for first in range(0, len(programs), CALL):
      part = programs[first : first + CALL]
      before = time.thread_time()
      outcomes += grader(
        [_example(entry) for entry in part],
        [f'```python\n{entry.code}\n```' for entry in part],
        truncated=[False] * len(part),
      )
      calls.append((time.thread_time() - before) * 1000)
      memory.append(resident_mib())
  wall, cpu = time.perf_counter() - start, time.process_time() - cpu
  return Pass(outcomes, layers, measured.callbacks_ms, measured.collections_ms, calls, memory, wall, cpu)


def _example(entry: Entry) -> Example:
  question = [{'role': 'user', 'content': 'Q'}]
  return Example(entry.kind, question, 'code', json.dumps(entry.tests), 'soak', {'split': 'train'})


def resident_mib() -> float:
  """Return the resident memory of this process."""
  with open('/proc/self/statm') as file:
    return int(file.read().split()[1]) * os.sysconf('SC_PAGE_SIZE') / 2**20


def soak(count: int, seed: int, workers: int | None) -> dict[str, Any]:
  """Return the effects on honest programs and on this process; 'missed' names the exceeded limits."""
  programs = entries(count, seed)
  alone = graded([entry for entry in programs if entry.honest], workers)
  with _own_temporary_directory() as directory:
    mixed = graded(programs, workers)
    files_left = len(os.listdir(directory))
  return summary(programs, alone, mixed, files_left=files_left) | {'seed': seed}


@contextlib.contextmanager
def _own_temporary_directory() -> Iterator[str]:
  """Provide an empty temporary folder that only this process uses, so that all files left in it are the programs'."""
  before = tempfile.tempdir
  with tempfile.TemporaryDirectory() as directory:
    os.chmod(directory, 0o755)  # Programs run as another user.
    tempfile.tempdir = directory
    try:
      yield directory
    finally:
      tempfile.tempdir = before


def summary(programs: Sequence[Entry], alone: Pass, mixed: Pass, *, files_left: int) -> dict[str, Any]:
  """Return the numbers and which of them exceed their limits."""
  beside = [outcome for entry, outcome in zip(programs, mixed.outcomes, strict=True) if entry.honest]
  honest = [entry for entry in programs if entry.honest]
  changed = [
    entry.kind
    for entry, before, after in zip(honest, alone.outcomes, beside, strict=True)
    if _verdict(before) != _verdict(after)
  ]
  passed = [
    entry.kind
    for entry, outcome in zip(programs, mixed.outcomes, strict=True)
    if not entry.honest and outcome.score != 0.0
  ]
  warm = mixed.memory_mib[int(WARM_UP * len(mixed.memory_mib)) :]
  growth = max(abs(value - warm[0]) for value in warm)
  longest = max(mixed.callbacks_ms)
  bars = {
    'verdicts_changed': not changed,
    'hostile_passed': not passed,
    'memory_growth_mib': growth <= MAX_GROWTH_MIB,
    'longest_callback_ms': longest <= MAX_CALLBACK_MS,
    'files_left': files_left == 0,
  }
  ordered = sorted(mixed.callbacks_ms)
  return {
    'benchmark': 'sandbox_soak',
    'programs': len(programs),
    'honest': len(honest),
    'runs': len(mixed.callbacks_ms),
    'layers': mixed.layers,
    'verdicts_changed': len(changed),
    'hostile_passed': len(passed),
    'kinds': sorted(set(changed + passed)),
    'memory_mib': [round(value, 1) for value in (warm[0], min(warm), max(warm))],
    'memory_growth_mib': round(growth, 1),
    'longest_callback_ms': round(longest, 1),
    'callback_p99_ms': round(ordered[int(0.99 * len(ordered))], 1),
    'longest_collection_ms': round(max(mixed.collections_ms), 1),
    'longest_call_ms': round(max(mixed.calls_ms), 1),
    'files_left': files_left,
    'cpu_s': round(mixed.cpu_s, 1),
    'wall_s': round(mixed.wall_s, 1),
    'wall_alone_s': round(alone.wall_s, 1),
    'missed': [name for name, kept in bars.items() if not kept],
  }


def _verdict(outcome: Outcome) -> tuple[Any, ...]:
  return outcome.score, outcome.feedback, json.dumps(outcome.metrics, sort_keys=True)
