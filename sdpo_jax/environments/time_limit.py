"""Calls of code that may never return."""

from __future__ import annotations

from collections.abc import Callable
import threading
from typing import Any, TypeVar

Result = TypeVar('Result')


class OverranError(Exception):
  """A call did not return in time; its thread goes on, and what it returns is dropped."""


class EndedError(Exception):
  """A call raised what would end its process, such as SystemExit, which is the cause of this exception."""


def call_within(function: Callable[[], Result], seconds: float | None, name: str) -> Result:
  """Return what `function` returns, called in a thread of its own; None for `seconds`: however long it takes.

  The thread is abandoned where it overruns, and does not keep the process from ending.

  Raises:
    OverranError: the time is over.
    EndedError: it raised a BaseException that is no Exception; the thread of the caller is not to end by that.
    Exception: whatever it raised.
  """
  results: list[Any] = []
  errors: list[BaseException] = []
  done = threading.Event()

  def work() -> None:
    try:
      results.append(function())
    except BaseException as error:  # It belongs to the thread that waits.
      errors.append(error)
    finally:
      done.set()

  threading.Thread(target=work, name=name, daemon=True).start()
  if not done.wait(seconds):
    raise OverranError(f'no answer within {seconds:g} s')
  if not errors:
    return results[0]
  if isinstance(errors[0], Exception):
    raise errors[0]
  raise EndedError(repr(errors[0])) from errors[0]
