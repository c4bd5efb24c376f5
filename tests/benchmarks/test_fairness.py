"""The campaign about a tenant that floods, in small: a real process, and another tenant who is never refused."""

import json
import subprocess
import sys

import pytest

from tests import tiny


@pytest.mark.slow
def test_a_sample_of_the_campaign():
  command = [sys.executable, '-m', 'benchmarks.fairness', '--requests=4', '--flood=70', '--n=16', '--drips=70']
  done = subprocess.run(
    command, capture_output=True, text=True, timeout=300, cwd=tiny.REPOSITORY, env=tiny.environment(quick=True)
  )
  assert done.returncode == 0, done.stderr[-2000:]
  idle, *floods = map(json.loads, done.stdout.splitlines())
  assert [each['flood'] for each in (idle, *floods)] == [None, 'completions', 'feedbacks']
  assert not any(each['refused'] for each in (idle, *floods))
  assert all(each['flood_done'] > 0 and each['feedback_ms']['p50'] > 0 for each in floods)
