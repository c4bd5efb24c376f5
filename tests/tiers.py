"""Which cases of a sweep run by default, which with `--slow`, and which in `python -m benchmarks.campaigns` only."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def cases(every: Iterable[Any], default: Collection[Any] = (), slow: Collection[Any] = ()) -> list[Any]:
  """Return the parameters of a test, tuples for several arguments; those of neither collection are a campaign's."""

  def marks(case: Any) -> tuple[pytest.MarkDecorator, ...]:
    return () if case in default else (pytest.mark.slow,) if case in slow else (pytest.mark.campaign,)

  return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks(case)) for case in every]
