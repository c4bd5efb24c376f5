"""A sample of the tests of the service over PostgreSQL and S3, as `tests.serving.replicated` runs all of them."""

import subprocess
import sys

import pytest

from tests import tiny
from tests.serving.store.postgres import postgres  # noqa: F401 (A fixture.)

FILES = ('web/test_native.py', 'web/test_openai.py', 'store/test_crash.py', 'sessions/test_crash.py')
CHOSEN = (
  'feedback_is_sent_again or batch_with_a_key or another_owner_has_is_not_there or words_of_others_name '
  'or adapters_are_models or machine_that or full_disk_loses_nothing and send-1 or killed_at_any_write'
)


@pytest.mark.slow
def test_the_service_does_over_postgres_and_s3_what_it_does_over_a_folder(postgres):  # noqa: F811
  files = [f'tests/serving/{file}' for file in FILES]
  command = [sys.executable, '-m', 'pytest', '-n0', '-p', 'tests.serving.replicated', '-k', CHOSEN, *files]
  environment = tiny.environment(quick=True)
  done = subprocess.run(command, cwd=tiny.REPOSITORY, capture_output=True, text=True, env=environment, check=False)
  assert done.returncode == 0, done.stdout + done.stderr
