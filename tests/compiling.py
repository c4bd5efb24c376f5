"""How the tests compile: quickly in their own processes, and with XLA's defaults where it matters what users run.

Most of a test's time goes to compiling programs that run once. So `prepare` asks XLA to optimise as little as it can.
To compile then takes no longer than to read from a compilation cache, so only commands have one, which they share. What
a test says about the programs of users (their memory, their text, that two of them agree bit for bit) it says of
programs compiled with XLA's defaults: by `compile_as_users` or with `users_options`, or in a child process without the
flags, in which a test marked `as_users` runs as a whole. Commands get `users_environment`.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile

import jax
import pytest

from sdpo_jax.serving.kept_programs import without_cache

OPTIONS = {  # name: (in tests, XLA's default)
  'xla_backend_optimization_level': (0, 3),
  'xla_llvm_disable_expensive_passes': (True, False),
  'xla_cpu_use_fusion_emitters': (False, True),
  'xla_cpu_parallel_codegen_split_count': (1, 32),  # Several workers share the processors; parts cost a quarter more.
}
FLAGS = ' '.join(f'--{name}={str(value).lower()}' for name, (value, _) in OPTIONS.items())
_SAVED = 'SDPO_TESTS_ENVIRONMENT'  # The variables that `prepare` changes as they were, in JSON.
_CACHE = 'SDPO_TESTS_CACHE'  # The directory of programs that commands compile.
_REPORTS = 'SDPO_TESTS_REPORTS'  # Set in a child process: the file that gets the outcomes of its tests.


def prepare() -> pathlib.Path | None:
  """Set up this process and those it starts, before its first compilation; return what to remove in the end.

  A cache directory named by JAX_COMPILATION_CACHE_DIR is used, and kept.
  """
  made = None
  if _CACHE not in os.environ:
    given = os.environ.get('JAX_COMPILATION_CACHE_DIR')
    made = None if given else pathlib.Path(tempfile.mkdtemp(prefix='sdpo_tests_'))
    os.environ[_CACHE] = given or str(made)
  if _SAVED not in os.environ and _REPORTS not in os.environ:
    before = os.environ.get('XLA_FLAGS')
    os.environ[_SAVED] = json.dumps(before)
    flags = f'{before or ""} {FLAGS}'.strip()
    if _known(flags):
      os.environ['XLA_FLAGS'] = flags
  jax.config.update('jax_enable_compilation_cache', False)
  if _REPORTS not in os.environ:
    jax.config.update('jax_traceback_in_locations_limit', 0)  # Where each operation was written: 5 % of the time.
  return made


def _known(flags: str) -> bool:
  """Whether this version of XLA knows these flags; a process that gives it others dies."""
  program = [sys.executable, '-c', 'import jax; jax.jit(lambda: 0)()']
  environment = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': flags}
  return subprocess.run(program, env=environment, capture_output=True, check=False).returncode == 0


def users_options() -> dict[str, bool | int]:
  """Compiler options that undo the flags for one program; `tests/house/test_compiling.py` holds them to that."""
  given = os.environ.get('XLA_FLAGS', '').endswith(FLAGS)
  return {name: default for name, (_, default) in OPTIONS.items()} if given else {}


def compile_as_users(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
  """Compiles with XLA's defaults. A program read back from a cache would not have the same text."""
  with without_cache():
    return lowered.compile(compiler_options=users_options())


def users_environment() -> dict[str, str]:
  """Return the environment of a process that compiles as a user's does."""
  environment = {name: value for name, value in os.environ.items() if name not in (_SAVED, 'XLA_FLAGS')}
  saved = json.loads(os.environ[_SAVED]) if _SAVED in os.environ else os.environ.get('XLA_FLAGS')
  return environment if saved is None else environment | {'XLA_FLAGS': saved}


def commands_cache() -> pathlib.Path:
  """Where commands that tests start keep their programs unless a test says otherwise."""
  return pathlib.Path(os.environ[_CACHE]) / 'commands'


class AsUsers:
  """A pytest plugin that runs tests marked `as_users` in a child process, all of a file at once."""

  def __init__(self):
    self.outcomes: dict[str, tuple[str, str]] = {}

  @pytest.hookimpl(tryfirst=True)
  def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
    if pyfuncitem.get_closest_marker('as_users') is None:
      return None
    if pyfuncitem.nodeid not in self.outcomes:
      of_file = [item for item in pyfuncitem.session.items if item.path == pyfuncitem.path]
      self.outcomes |= _run(pyfuncitem.config, [item.nodeid for item in of_file if item.get_closest_marker('as_users')])
    outcome, text = self.outcomes[pyfuncitem.nodeid]
    if outcome == 'skipped':
      pytest.skip(text)
    if outcome != 'passed':
      pytest.fail(text, pytrace=False)
    return True


def _run(config: pytest.Config, tests: list[str]) -> dict[str, tuple[str, str]]:
  """name → (outcome, what there is to say) of tests run in a child process."""
  with tempfile.TemporaryDirectory() as folder:
    reports = pathlib.Path(folder) / 'reports.jsonl'
    options = [f'--datasets={config.getoption("--datasets")}'] if config.getoption('--datasets') else []
    options += [flag for flag in ('--slow', '--campaigns') if config.getoption(flag)]
    child = subprocess.run(
      [sys.executable, '-m', 'pytest', '-n', '0', *options, *tests],
      env=users_environment() | {_REPORTS: str(reports), 'PYTEST_ADDOPTS': ''},
      cwd=config.rootpath,
      capture_output=True,
      text=True,
      check=False,
    )
    lines = reports.read_text().splitlines() if reports.exists() else []
  outcomes: dict[str, tuple[str, str]] = {}
  for test, outcome, text in map(json.loads, lines):
    if outcomes.get(test, ('passed', ''))[0] == 'passed':  # A test that passed may still fail to clean up.
      outcomes[test] = outcome, text
  return {
    test: ('failed', f'The child process did not run it.\n{child.stdout}{child.stderr}') for test in tests
  } | outcomes


class Reports:
  """A pytest plugin of the child process: writes down each test's outcome."""

  def __init__(self, path: str):
    self.path = path

  def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
    if report.when == 'call' or report.outcome != 'passed':
      text = report.longreprtext if report.outcome == 'failed' else str(report.longrepr)
      with open(self.path, 'a') as file:
        file.write(json.dumps([report.nodeid, report.outcome, text]) + '\n')


def plugin() -> AsUsers | Reports:
  """Return what this process needs for tests marked `as_users`."""
  return Reports(os.environ[_REPORTS]) if _REPORTS in os.environ else AsUsers()
