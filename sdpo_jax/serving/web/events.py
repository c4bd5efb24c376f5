"""Server-sent events, streamed from a synchronous iterator."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
import dataclasses
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import StreamingResponse

from sdpo_jax.files import as_json
from sdpo_jax.serving.web import error_responses

_END = object()


@dataclasses.dataclass(frozen=True)
class ServerSentEvent:
  """One event; without data it is a comment, which clients skip."""

  data: Any = None  # JSON; a str is sent unquoted.
  event: str | None = None  # The kind of the event; None: 'message'.
  id: int | str | None = None  # A client sends it as Last-Event-ID to resume after this event.

  def encode(self) -> bytes:
    """Return the event in the text/event-stream format."""
    if self.data is None:
      return b': still here\n\n'
    text = self.data if isinstance(self.data, str) else as_json(self.data).decode()
    lines = [f'id: {self.id}'] if self.id is not None else []
    lines += [f'event: {self.event}'] if self.event is not None else []
    lines += [f'data: {line}' for line in text.split('\n')]
    return ('\n'.join(lines) + '\n\n').encode()


async def stream(request: Request, events: Iterable[ServerSentEvent]) -> StreamingResponse:
  """Return a streaming response; the events are drawn from the iterator in the thread pool, one after the other.

  The first event is awaited here, so that a request that is refused before it gets a proper status code. A later error
  becomes an event 'error', which ends the stream.
  """
  iterator = iter(events)
  first = await run_in_threadpool(next, iterator, _END)
  return StreamingResponse(
    _body(request, iterator, first), media_type='text/event-stream', headers={'X-Accel-Buffering': 'no'}
  )


async def _body(request: Request, iterator: Iterator[ServerSentEvent], event: Any) -> AsyncIterator[bytes]:
  try:
    while event is not _END:
      yield event.encode()
      event = await run_in_threadpool(next, iterator, _END)
  except Exception as error:
    state = request.state
    failed = error_responses.failure_of(error, request.url.path, state.request_id, state.log.error)
    yield ServerSentEvent(failed.body, 'error').encode()
  finally:
    close = getattr(iterator, 'close', None)
    if close is not None:
      await run_in_threadpool(close)
