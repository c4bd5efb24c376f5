"""Routes made from plain functions, which run in the thread pool on validated input and return what is sent."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
import dataclasses
import re
from typing import TYPE_CHECKING, Any

import pydantic
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sdpo_jax.serving.call import Call
from sdpo_jax.serving.errors import InvalidRequest
from sdpo_jax.serving.web.error_responses import as_json
from sdpo_jax.serving.web.events import ServerSentEvent, stream
from sdpo_jax.serving.web.openapi import JSON, Operation

if TYPE_CHECKING:
  from sdpo_jax.serving.account import Account
  from sdpo_jax.serving.web.prometheus import Metrics

_ETAG = re.compile(r'"(\d{1,9})"')


@dataclasses.dataclass(frozen=True)
class Incoming:
  """A validated request."""

  account: Account  # The account of the sender.
  call: Call
  body: Any  # An instance of the route's schema; bytes if it has none.
  path: Mapping[str, str]
  query: Mapping[str, str]
  expected: int | None  # The version that If-Match names; None: any.
  idempotency: Any  # The store's record of the request; None: it has no Idempotency-Key.
  last_event: int | None  # Last-Event-ID.
  metrics: Metrics

  @property
  def adapter(self) -> str:
    """The id of the adapter in the path."""
    return self.path['adapter']

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
  **values: Any,
) -> Route:
  """Return the route of a function.

  Args:
    method: the HTTP method.
    path: pattern of its path.
    function: called in the thread pool. The first line of its docstring is the route's summary.
    **values: further fields of its `Operation`.
  """
  summary = (function.__doc__ or '').strip().split('\n')[0]
  known = Operation(summary=summary, **values)
  allowed = tuple(known.query)

  async def endpoint(request: Request) -> Response:
    content = await request.body()
    check_query(request, allowed)
    return await run_in_threadpool(_answer, function, known, request, content)

  endpoint.operation = known  # type: ignore[attr-defined]
  endpoint.__doc__ = function.__doc__
  endpoint.__name__ = getattr(function, '__name__', 'endpoint')
  return Route(path, endpoint, methods=[method])


def drawing_route(
  path: str, at_once: Callable[[Incoming], Reply], drawn: Callable[[Incoming], Iterator[ServerSentEvent]], **values: Any
) -> Route:
  """Return the route of something that is drawn: answered as a whole or, if the body says `stream`, by events.

  Args:
    path: pattern of its path, for POST.
    at_once: returns the answer as a whole; its docstring is the route's.
    drawn: yields the events; closing the iterator cancels what is drawn.
    **values: further fields of its `Operation`, with the `body`.
  """
  whole_route = route('POST', path, at_once, **values)

  async def endpoint(request: Request) -> Response:
    known = read(values['body'], await request.body())
    if not known.stream:
      return await whole_route.endpoint(request)
    check_query(request, ())
    return await stream(request, drawn(incoming(request, known)))

  endpoint.operation = whole_route.endpoint.operation  # type: ignore[attr-defined]
  endpoint.__doc__ = at_once.__doc__
  return Route(path, endpoint, methods=['POST'])


def check_query(request: Request, allowed: Collection[str]) -> None:
  """Raise InvalidRequest for a query parameter that the route does not have."""
  unknown = sorted(set(request.query_params) - set(allowed))
  if unknown:
    raise InvalidRequest(f'There is no parameter {unknown[0][:60]!r} of this address.', field=unknown[0][:60])


def _answer(function: Callable[[Incoming], Reply], known: Operation, request: Request, content: bytes) -> Response:
  reply = function(incoming(request, read(known.body, content)))
  body = reply.body if isinstance(reply.body, bytes) else as_json(reply.body)
  headers = {**known.headers_of(reply.body), **reply.headers}
  return Response(body, known.status, headers, reply.content_type)


def read(schema: type[pydantic.BaseModel] | None, content: bytes) -> Any:
  """Return a body validated by its schema; without a schema, unchanged.

  Raises:
    pydantic.ValidationError: it does not match the schema.
  """
  return content if schema is None else schema.model_validate_json(content or b'{}')


def incoming(request: Request, body: Any) -> Incoming:
  """Return the handler's view of a request."""
  state, last = request.state, request.headers.get('last-event-id')
  return Incoming(
    account=state.account,
    call=state.call,
    body=body,
    path=request.path_params,
    query=request.query_params,
    expected=_if_match(request.headers.getlist('if-match')),
    idempotency=state.idempotency,
    metrics=state.metrics,
    last_event=int(last) if last is not None and last.isascii() and last.isdecimal() and len(last) < 19 else None,
  )


def _if_match(values: list[str]) -> int | None:
  if not values or values == ['*']:
    return None
  found = _ETAG.fullmatch(values[0].strip()) if len(values) == 1 else None
  if found is None:
    raise InvalidRequest('If-Match must be one version in quotes, as the header ETag has it: "3".', field='If-Match')
  return int(found[1])
