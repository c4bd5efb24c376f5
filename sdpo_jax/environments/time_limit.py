"""Calls of code that may never return, with a time limit."""

from __future__ import annotations

from collections.abc import Callable
import threading
from typing import Any, TypeVar

Result = TypeVar('Result')


class OverranError(Exception):
  """A call did not return in time; its thread continues, and its result is dropped."""


class EndedError(Exception):
  """A call raised an exception that would end its process, such as SystemExit; it is the cause of this exception."""


def call_within(function: Callable[[], Result], seconds: float | None, name: str) -> Result:
  """Call `function` in a thread of its own and return its result; `seconds` None means no limit.

  A thread that overruns is abandoned and does not keep the process from ending.

  Raises:
    OverranError: the time limit has passed.
    EndedError: it raised a BaseException that is not an Exception, which must not end the caller's thread.
    Exception: any exception that it raised.
  """
  results: list[Any] = []
  errors: list[BaseException] = []
  done = threading.Event()

  def work() -> None:
    try:
      results.append(function())
    except BaseException as error:  # Raised again in the waiting thread.
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
