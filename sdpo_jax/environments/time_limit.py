"""Calls of code that may never return, with a time limit."""

from __future__ import annotations

from collections.abc import Callable
import concurrent.futures
import threading
from typing import TypeVar

Result = TypeVar('Result')


class OverranError(Exception):
  """A call did not return in time; its thread continues, and its result is dropped."""

  thread: threading.Thread | None = None


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
  called: concurrent.futures.Future[Result] = concurrent.futures.Future()

  def work() -> None:
    try:
      called.set_result(function())
    except BaseException as error:  # Raised again in the waiting thread.
      called.set_exception(error)

  thread = threading.Thread(target=work, name=name, daemon=True)
  thread.start()
  if not concurrent.futures.wait([called], seconds).done:
    error = OverranError(f'no answer within {seconds:g} s')
    error.thread = thread
    raise error
  error = called.exception()
  if error is None or isinstance(error, Exception):
    return called.result()
  raise EndedError(repr(error)) from error
