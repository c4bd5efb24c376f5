"""Routes and their operations, declared beside their handlers: for the gate, /openapi.json and /docs.

Most handlers are plain functions, which run in the thread pool on validated input and return what is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import re
from typing import TYPE_CHECKING, Any, TypeVar

import pydantic
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from sdpo_jax.files import as_json
from sdpo_jax.serving.call import Call
from sdpo_jax.serving.errors import InvalidRequest
from sdpo_jax.serving.web.events import ServerSentEvent, stream

if TYPE_CHECKING:
  from sdpo_jax.serving.account import Account
  from sdpo_jax.serving.web.telemetry import Metrics

JSON, SSE = 'application/json', 'text/event-stream'
_ETAG = re.compile(r'"(\d{1,9})"')
_Handler = TypeVar('_Handler', bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Operation:
  """The properties of a route beside its path, its methods and its handler."""

  summary: str = ''
  body: type[pydantic.BaseModel] | None = None  # Schema of its body; None: it has none, or it is not JSON.
  response: type[pydantic.BaseModel] | None = None  # Schema of its response; None: not described.
  status: int = 200
  content_type: str = JSON  # The content type of the body.
  answers: str = JSON  # The content type of the response.
  query: Mapping[str, str] = dataclasses.field(default_factory=dict)  # Name → meaning.
  # For routes that run once per Idempotency-Key: maps (account, id of the adapter, version that the
  # request made) to the body of a response that was lost with its process. None: every request runs.
  again: Callable[[Any, str, int | None], Any] | None = None
  open: bool = False  # Whether it needs no key, and is answered before the service is ready.
  probe: bool = False  # Whether it is called so often that the log leaves it out.
  observes: bool = False  # Whether it needs a key and nothing else, and is answered before the service is ready.
  endless: bool = False  # Whether it streams until its sender disconnects.
  # Whether Host must be a name of the service, and only pages of serve.http.allowed_origins may call it, even with
  # keys.
  guarded: bool = False
  token: bool = False  # Whether it needs the token of the session in its path.
  secret: bool = False  # Whether its response is never logged, even if bodies are.
  tagged: bool = False  # Whether its response has an ETag with its version.

  def headers_of(self, body: Any) -> dict[str, str]:
    """Return the headers derived from the body of a response, before it is rendered: its ETag."""
    found = body.get('version_after', body.get('version')) if self.tagged else None
    return {'ETag': f'"{found}"'} if isinstance(found, int) else {}


def operation(**values: Any) -> Callable[[_Handler], _Handler]:
  """Return a decorator that attaches an `Operation` to a handler."""

  def say(handler: _Handler) -> _Handler:
    handler.operation = Operation(**values)  # type: ignore[attr-defined]
    return handler

  return say


def operation_of(route: BaseRoute) -> Operation:
  """Return the operation of a route; without a summary it gets the first line of the handler's docstring."""
  endpoint = getattr(route, 'endpoint', None)
  known = getattr(endpoint, 'operation', None) or Operation()
  if not known.summary and endpoint is not None:
    first = (getattr(endpoint, '__doc__', None) or '').strip().split('\n')[0]
    known = dataclasses.replace(known, summary=first)
  return known


@dataclasses.dataclass(frozen=True)
class Incoming:
  """A validated request."""

  account: Account  # The account of the sender.
  call: Call
  body: Any  # An instance of the route's schema; bytes if it has none.
  path: Mapping[str, str]
  adapter: str | None  # The id of the adapter in the path; None: it names none.
  query: Mapping[str, str]
  expected: int | None  # The version that If-Match names; None: any.
  idempotency: Any  # The store's record of the request; None: it has no Idempotency-Key.
  last_event: int | None  # Last-Event-ID.
  metrics: Metrics

  def number(self, name: str) -> int | None:
    """Return an integer from the query; None: it is absent.

    Raises:
      InvalidRequest: it is not an integer.
    """
    value = self.query.get(name)
    return None if value is None else whole(value, name)


@dataclasses.dataclass(frozen=True)
class Reply:
  """The response of a handler."""

  body: Any  # As JSON, or bytes.
  content_type: str = JSON
  headers: Mapping[str, str] = dataclasses.field(default_factory=dict)


def whole(text: str, name: str) -> int:
  """Return the integer that a text of a URL spells.

  Raises:
    InvalidRequest: it is not an integer.
  """
  if not (text.isascii() and text.isdecimal() and len(text) <= 9):
    raise InvalidRequest(f'{name} must be a whole number.', field=name)
  return int(text)


def route(
  method: str,
  path: str,
  function: Callable[[Incoming], Reply],
  drawn: Callable[[Incoming], Iterator[ServerSentEvent]] | None = None,
  **values: Any,
) -> Route:
  """Return the route of a function.

  Args:
    method: the HTTP method.
    path: pattern of its path.
    function: called in the thread pool. The first line of its docstring is the route's summary.
    drawn: yields the events of what is drawn, for a body that says `stream`; closing the iterator cancels it. None: the
      body has no such field.
    **values: further fields of its `Operation`.
  """
  known = Operation(**values)

  def answer(request: Request, content: bytes) -> Response | Iterator[ServerSentEvent]:
    body = content if known.body is None else known.body.model_validate_json(content or b'{}')
    asked = incoming(request, body)
    if drawn is not None and body.stream:
      return drawn(asked)
    reply = function(asked)
    headers = {**known.headers_of(reply.body), **reply.headers}
    sent = reply.body if isinstance(reply.body, bytes) else as_json(reply.body)
    return Response(sent, known.status, headers, reply.content_type)

  async def endpoint(request: Request) -> Response:
    content = await request.body()
    unknown = sorted(request.query_params.keys() - known.query.keys())
    if unknown:
      raise InvalidRequest(f'There is no parameter {unknown[0][:60]!r} of this address.', field=unknown[0][:60])
    found = await run_in_threadpool(answer, request, content)
    return found if isinstance(found, Response) else await stream(request, found)

  endpoint.operation = known  # type: ignore[attr-defined]
  endpoint.__doc__ = function.__doc__
  endpoint.__name__ = getattr(function, '__name__', 'endpoint')
  return Route(path, endpoint, methods=[method])


def incoming(request: Request, body: Any) -> Incoming:
  """Return the handler's view of a request.

  Raises:
    InvalidRequest: If-Match is not one version.
  """
  state, last, expected = request.state, request.headers.get('last-event-id'), None
  versions = request.headers.getlist('if-match')
  if versions and versions != ['*']:
    found = _ETAG.fullmatch(versions[0].strip()) if len(versions) == 1 else None
    if found is None:
      raise InvalidRequest('If-Match must be one version in quotes, as the header ETag has it: "3".', field='If-Match')
    expected = int(found[1])
  return Incoming(
    account=state.account,
    call=state.call,
    body=body,
    path=request.path_params,
    adapter=request.path_params.get('adapter'),
    query=request.query_params,
    expected=expected,
    idempotency=state.idempotency,
    metrics=state.metrics,
    last_event=int(last) if last is not None and last.isascii() and last.isdecimal() and len(last) < 19 else None,
  )
