"""A plugin of pytest that runs tests of the service over PostgreSQL and S3 instead of SQLite and a folder.

  python -m pytest -p tests.serving.replicated tests/serving/web/test_native.py tests/serving/web/test_openai.py …

What looks into the local files, or is about them, is skipped.
"""

from __future__ import annotations

import contextlib
import os

import pytest

from tests.serving.store import places, postgres, s3_store

# Tests that look into local files, break a local disk or are about SQLite.
LOCAL = """
  test_a_version_is_the_folder_of_an_adapter test_a_second_process_is_refused_by_name
  test_a_root_of_another_base_is_refused test_a_database_is_filled_from_the_root
  test_what_is_damaged_is_named_and_never_half_loaded test_what_others_have_put_into_the_root_is_left_alone
  test_a_deleted_adapter_leaves_nothing_but_a_tombstone
  test_an_answer_goes_with_the_adapter_that_the_request_turned_out_to_be_about test_what_has_expired_is_in_no_file
  test_retention_keeps_the_newest_the_current_and_the_first_version test_nobody_else_may_look_into_the_folders
  test_manifests_say_what_sha256sum_says test_a_state_that_was_not_written_is_that_of_an_ancestor_or_zeros
  test_damage_is_noticed_and_another_versions_state_is_not_taken test_a_state_of_a_deleted_adapter_leaves_nothing
  test_pinned_versions_are_known_without_the_database test_a_version_from_a_seed_has_no_files_and_is_checked
  test_readiness_is_also_that_of_the_storage test_no_answer_tells_where_the_service_keeps_things_or_whom_it_asks
  test_what_is_deleted_is_erased
""".split()
_open = contextlib.ExitStack()


def pytest_sessionstart(session: pytest.Session) -> None:
  """Start the servers."""
  places.bucket, server = _open.enter_context(s3_store.S3()), _open.enter_context(postgres.serving())
  os.environ |= {
    'AWS_ENDPOINT_URL': places.bucket.options['endpoint'],
    'AWS_ALLOW_HTTP': 'true',
    'AWS_SKIP_SIGNATURE': 'true',
    'AWS_REGION': 'none',
    places.POSTGRES: server.place,
  }


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
  """Skip what is about local files."""
  for item in items:
    if item.name.partition('[')[0] in LOCAL:
      item.add_marker(pytest.mark.skip(reason='is about local files'))


def pytest_sessionfinish(session: pytest.Session) -> None:
  """Stop the servers."""
  _open.close()
