"""A plugin of pytest that runs tests of the service over PostgreSQL and S3 instead of SQLite and a folder.

  pytest -p tests.serving.replicated tests/serving/store/test_store.py tests/serving/web tests/serving/sessions …

What looks into the local files, or is about them, is skipped.
"""

from __future__ import annotations

import contextlib
import os
import pathlib

import pytest

from tests.serving.store import postgres, s3_store, store_cases

_open = contextlib.ExitStack()
_urls: dict[str, str] = {}  # Of the databases, by folder.


def pytest_sessionstart(session: pytest.Session) -> None:
  """Start the servers."""
  s3, server = _open.enter_context(s3_store.S3()), _open.enter_context(postgres.serving())
  os.environ |= {
    'AWS_ENDPOINT_URL': s3.options['endpoint'],
    'AWS_ALLOW_HTTP': 'true',
    'AWS_SKIP_SIGNATURE': 'true',
    'AWS_REGION': 'none',
  }

  def places(folder: pathlib.Path) -> tuple[str, str]:
    if str(folder) not in _urls:
      _urls[str(folder)] = server.url()
    return f's3://bucket/{len(_urls)}{folder}'.replace('//', '/').replace('s3:/', 's3://'), _urls[str(folder)]

  store_cases.places = places


def pytest_sessionfinish(session: pytest.Session) -> None:
  """Stop the servers."""
  _open.close()
