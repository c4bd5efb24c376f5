"""The sandbox: what programs get, what is reported of them, limits, faults of the helper process, no leaks."""

import os
import pathlib

import pytest

from sdpo_jax.config import SandboxConfig
from sdpo_jax.environments.sandbox import Job, Limits, Sandbox

HARNESS = pathlib.Path(__file__).with_name('sandbox_harness.py')
LIMITS = Limits(wall_s=20, cpu_s=10)


@pytest.fixture(scope='module')
def sandbox():
  with Sandbox(SandboxConfig(workers=2), HARNESS, preload=('math', 'no_such_module')) as value:
    yield value


def run(sandbox, code, stdin='', limits=LIMITS, **given):
  return sandbox.run([Job({'code': code, 'given': given}, stdin, limits)])[0]


def test_a_program_gets_its_payload_and_input_and_what_it_makes_comes_back(sandbox):
  report = run(
    sandbox, 'import sys; print(input()); print("bad", file=sys.stderr); result = {"a": [x, None]}', 'in', x=3
  )
  assert report.status == 'ended' and report.exit_code == 0 and report.signal is None
  assert (report.result, report.stdout, report.stderr) == ({'a': [3, None]}, 'in\n', 'bad\n')
  assert 0 < report.cpu_s < 10 and 0 < report.wall_s < 20


def test_reports_come_in_the_order_of_the_jobs(sandbox):
  jobs = [Job({'code': f'result = {index}'}, '', LIMITS) for index in range(20)]
  assert [report.result for report in sandbox.run(jobs)] == list(range(20))


@pytest.mark.parametrize(
  'code, exit_code', [('', 0), ('import os; os._exit(3)', 3), ('import sys; sys.exit(4)', 4), ('1 / 0', 1)]
)
def test_exit_codes(sandbox, code, exit_code):
  assert run(sandbox, code).exit_code == exit_code


def test_time_is_limited_by_the_wall_and_by_the_processor(sandbox):
  assert run(sandbox, 'import time; time.sleep(60)', limits=Limits(0.2, 10)).status == 'timeout'
  busy = run(sandbox, 'while True: pass', limits=Limits(60, 0.2))
  assert busy.status == 'timeout' and 0.2 <= busy.cpu_s < 2


def test_descriptors_are_closed_after_many_jobs(sandbox):
  run(sandbox, '')
  before = len(os.listdir('/proc/self/fd'))
  sandbox.run([Job({'code': ''}, '', LIMITS)] * 50)
  assert len(os.listdir('/proc/self/fd')) == before
