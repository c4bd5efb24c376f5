"""The log of the service: one JSON object per line, without prompts, headers or keys unless requested."""

from __future__ import annotations

from collections.abc import Callable
import json
import logging
import sys
import threading
import time
import traceback
from typing import Any, TextIO

_LONGEST_BODY = 20_000  # The most characters of a body in the log.


class Log:
  """A writer of log lines; any thread may call."""

  def __init__(self, stream: TextIO | None = None, *, bodies: bool = False, clock: Callable[[], float] = time.time):
    """Make a log.

    Args:
      stream: the output stream; None: stderr.
      bodies: whether to also write the bodies of requests and responses (serve.http.log_bodies).
      clock: returns seconds since the epoch.
    """
    self._stream, self._clock, self.bodies = stream, clock, bodies
    self._lock = threading.Lock()

  def write(self, event: str, **values: Any) -> None:
    """Write a line; failures to write are ignored."""
    line = json.dumps({'time': round(self._clock(), 3), 'event': event, **values}, default=str)
    with self._lock:
      try:
        print(line, file=self._stream or sys.stderr, flush=True)
      except (OSError, ValueError):  # The reader of the stream is gone, or the stream is closed.
        return

  def request(self, *, asked: bytes, answered: bytes, **values: Any) -> None:
    """Write the line of a request, with its bodies if these are logged."""
    if self.bodies:
      values |= {'asked': _shown(asked), 'answered': _shown(answered)}
    self.write('request', **values)

  def error(self, error: BaseException, request_id: str) -> None:
    """Write the place and type of an unexpected error; the message, which may quote a prompt, only with bodies."""
    frames = traceback.extract_tb(error.__traceback__)
    at = [f'{frame.filename.rsplit("/site-packages/")[-1]}:{frame.lineno} {frame.name}' for frame in frames[-12:]]
    message = {'message': str(error)} if self.bodies else {}
    self.write('error', request=request_id, error=type(error).__name__, at=at, **message)


def _shown(body: bytes) -> str:
  return body[: 4 * _LONGEST_BODY].decode('utf-8', 'replace')[:_LONGEST_BODY]


class Forward(logging.Handler):
  """A logging handler that writes the messages of libraries and of this package into the same log."""

  def __init__(self, log: Log):
    super().__init__(logging.WARNING)
    self._log = log

  def emit(self, record: logging.LogRecord) -> None:
    # The unformatted message, since its arguments may quote a request.
    known = record.name.startswith('sdpo_jax') or self._log.bodies
    message = record.getMessage() if known else str(record.msg)
    self._log.write('log', level=record.levelname.lower(), logger=record.name, message=message[:1000])
