"""Routes with their operations, which the gate, /openapi.json and /docs read.

Most handlers are plain functions that run in the thread pool, on validated input, and return a `Reply`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import re
from typing import TYPE_CHECKING, Any

import pydantic
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from sdpo_jax.files import as_json
from sdpo_jax.serving.call import Call
from sdpo_jax.serving.errors import InvalidRequest, NotHolder
from sdpo_jax.serving.web.error_responses import invalid
from sdpo_jax.serving.web.events import ServerSentEvent, stream

if TYPE_CHECKING:
  from sdpo_jax.serving.account import Account
  from sdpo_jax.serving.web.telemetry import Metrics

_LARGE = 2**16  # Bytes of a body that is parsed while no other one of that size is.
JSON, SSE = 'application/json', 'text/event-stream'
_ETAG = re.compile(r'"(\d{1,9})"')


@dataclasses.dataclass(frozen=True)
class Operation:
  """The properties of a route besides its path, methods and handler."""

  summary: str = ''
  # Schema of the request body, a model or dataclass of pydantic; None: there is none, or it is not JSON.
  body: Any = None
  response: type[pydantic.BaseModel] | None = None  # Schema of the response; None: not documented.
  status: int = 200
  content_type: str = JSON  # Content type of the request body.
  answers: str = JSON  # Content type of the response.
  query: Mapping[str, str] = dataclasses.field(default_factory=dict)  # Name → meaning.
  # For routes that run once per Idempotency-Key: maps (account, id of the adapter, version that the request made) to
  # the response body, if that was lost when the process died. None: every request runs.
  again: Callable[[Any, str, int | None], Any] | None = None
  open: bool = False  # Whether it needs no key, and works before the service is ready.
  probe: bool = False  # Whether it is called so often that the log omits it.
  observes: bool = False  # Whether it needs only a key, and works before the service is ready.
  cheap: bool = False  # Whether it has a place even where all of those for work are taken.
  endless: bool = False  # Whether it streams until the client disconnects.
  # Whether Host must be a name of the service, and only pages of serve.http.allowed_origins may call it, even if there
  # are keys.
  guarded: bool = False
  # The owner as whom requests of programs on this machine act, which are the only ones, without a key; None: the key's.
  tenant: str | None = None
  token: bool = False  # Whether it needs the token of the session that its path names.
  secret: bool = False  # Whether its response is never logged, even if bodies are.
  tagged: bool = False  # Whether the response has an ETag with the version.

  def headers_of(self, body: Any) -> dict[str, str]:
    """Return the ETag header of a response, from its body before that is serialized; empty if the route has none."""
    found = body.get('version_after', body.get('version')) if self.tagged else None
    return {'ETag': f'"{found}"'} if isinstance(found, int) else {}


def handled(method: str, path: str, **values: Any) -> Callable[[Callable[..., Any]], Route]:
  """Return a decorator that makes the route of a handler of starlette; `values` are fields of its `Operation`."""

  def made(handler: Callable[..., Any]) -> Route:
    handler.operation = Operation(**values)  # type: ignore[attr-defined]
    return Route(path, handler, methods=[method])

  return made


def operation_of(route: BaseRoute) -> Operation:
  """Return the operation of a route; its summary defaults to the first line of the handler's docstring."""
  endpoint = getattr(route, 'endpoint', None)
  known = getattr(endpoint, 'operation', None) or Operation()
  if not known.summary and endpoint is not None:
    first = (getattr(endpoint, '__doc__', None) or '').strip().split('\n')[0]
    known = dataclasses.replace(known, summary=first)
  return known


@dataclasses.dataclass(frozen=True)
class Incoming:
  """A validated request."""

  account: Account  # The account of the client.
  call: Call
  body: Any  # An instance of the route's schema; bytes if there is none.
  path: Mapping[str, str]
  adapter: str | None  # The id of the adapter in the path; None: the path has none.
  query: Mapping[str, str]
  expected: int | None  # The version that If-Match names; None: any.
  idempotency: Any  # The store's record of the request; None: there is no Idempotency-Key.
  last_event: int | None  # The header Last-Event-ID.
  metrics: Metrics
  # Posts to another replica in the name of the client, see `Forwarding.post`.
  post_to_replica: Callable[[NotHolder, str, bytes, Mapping[str, Sequence[str]]], tuple[int, Any]]

  def number(self, name: str) -> int | None:
    """Return an integer parameter of the query; None: it is absent.

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
  kept: bool = True  # Whether a repeat of the request gets it, too, and does not run again.


def whole(text: str, name: str) -> int:
  """Parse an integer from a URL.

  Raises:
    InvalidRequest: it is not an integer.
  """
  if not (text.isascii() and text.isdecimal() and len(text) <= 9):
    raise InvalidRequest(f'{name} must be a whole number.', field=name)
  return int(text)


def parsing(account: Account, content: bytes) -> contextlib.AbstractContextManager[None]:
  """Return what is held while a body is parsed: a large one stops all other threads, so keys take turns."""
  return account.service.parsing.of(account.call) if len(content) > _LARGE else contextlib.nullcontext()


def route(
  method: str,
  path: str,
  function: Callable[[Incoming], Reply],
  drawn: Callable[[Incoming], Iterator[ServerSentEvent]] | None = None,
  **values: Any,
) -> Route:
  """Make a route from a function.

  Args:
    method: the HTTP method.
    path: the pattern of its path.
    function: called in the thread pool. The first line of its docstring is the route's summary.
    drawn: called instead if the body has `stream` set; yields the events of the response, and closing the iterator
      cancels it. None: the body has no such field.
    **values: further fields of its `Operation`.
  """
  known = Operation(**values)
  reader = None if known.body is None else pydantic.TypeAdapter(known.body)

  def answer(request: Request, content: bytes) -> Response | Iterator[ServerSentEvent]:
    state, body = request.state, content
    try:
      if reader is not None:
        with parsing(state.account, content):
          body = reader.validate_json(content or b'{}')
    except pydantic.ValidationError as error:
      raise invalid(error, known.body.__pydantic_fields__) from error
    asked = incoming(request, body)
    if drawn is not None and body.stream:
      return drawn(asked)
    reply = function(asked)
    state.kept = reply.kept
    headers = {**known.headers_of(reply.body), **reply.headers}
    sent = reply.body if isinstance(reply.body, bytes) else as_json(reply.body)
    return Response(sent, known.status, headers, reply.content_type)

  async def endpoint(request: Request) -> Response:
    content = await request.body()
    unknown = sorted(request.query_params.keys() - known.query.keys())
    if unknown:
      raise InvalidRequest(f'This address takes no parameter {unknown[0][:60]!r}: leave it out.', field=unknown[0][:60])
    found = await run_in_threadpool(answer, request, content)
    return found if isinstance(found, Response) else await stream(request, found)

  endpoint.operation = known  # type: ignore[attr-defined]
  endpoint.__doc__ = function.__doc__
  endpoint.__name__ = getattr(function, '__name__', 'endpoint')
  return Route(path, endpoint, methods=[method])


def incoming(request: Request, body: Any) -> Incoming:
  """Return the request as handlers see it.

  Raises:
    InvalidRequest: the header If-Match does not name one version.
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
    post_to_replica=state.post_to_replica,
    last_event=int(last) if last is not None and last.isascii() and last.isdecimal() and len(last) < 19 else None,
  )
