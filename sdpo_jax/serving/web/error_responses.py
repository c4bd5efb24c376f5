"""Errors as HTTP responses: the one place that maps errors to status codes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
import dataclasses
import logging
import math
import re
from typing import Any

import pydantic

from sdpo_jax.config.fields import did_you_mean
from sdpo_jax.config.privacy import public_text
from sdpo_jax.errors import UserError, printable
from sdpo_jax.serving.errors import (
  Damaged,
  InvalidRequest,
  ServiceError,
  StorageFailed,
  TooLarge,
  TurnConflict,
  Unauthorized,
  VersionConflict,
  refusal,
)
from sdpo_jax.tables import counted

# Routes whose errors have the native format; all others below /v1 have OpenAI's.
NATIVE = (
  '/v1/continual',
  '/v1/capabilities',
  '/v1/distill',
  '/v1/feedback',
  '/v1/score',
  '/v1/lora',
  '/v1/health',
)
TOKASAURUS = '/tokasaurus'  # Routes below have the errors of Tokasaurus.
# In the message of the store about a blob: the id of the adapter, and the number of the version.
_STORED = re.compile(r'/adapters/([0-9a-z-]+)(?:/versions/([0-9]+)-)?')
_LONGEST_WAIT = 3600.0  # Seconds in Retry-After, whatever another server has said.
_logger = logging.getLogger('sdpo_jax.serving')
_OPENAI_TYPES = {
  401: 'authentication_error',
  403: 'permission_error',
  404: 'not_found_error',
  409: 'conflict_error',
  429: 'rate_limit_error',
}


class MethodNotAllowed(ServiceError):
  """The route does not accept the HTTP method."""

  status, code = 405, 'method_not_allowed'


class Malformed(InvalidRequest):
  """The body is not JSON, or does not fit the schema of the route."""


class NotJson(ServiceError):
  """The body has a content type that the route does not accept."""

  status, code = 415, 'unsupported_media_type'


class TooSlow(ServiceError):
  """The body of the request did not arrive in time."""

  status, code = 408, 'request_timeout'


class Internal(ServiceError):
  """An unexpected error inside the service."""

  status, code = 500, 'internal'


@dataclasses.dataclass(frozen=True)
class Failure:
  """The response to a failed request."""

  status: int
  body: Mapping[str, Any]
  headers: Mapping[str, str]


def known(error: BaseException) -> ServiceError | None:
  """Return an error as the `ServiceError` to respond with, see `public`; None: it is unexpected."""
  if isinstance(error, ServiceError):
    return public(error) if error.status >= 500 else error
  if isinstance(error, UserError):
    return refusal(error)
  if isinstance(error, pydantic.ValidationError):
    return invalid(error)
  return None


def public(error: ServiceError) -> ServiceError:
  """Return an error of the service's own state without paths and addresses of its machine, which go to the log."""
  full = str(error)
  said = public_text(full)
  if said == full and not isinstance(error, (StorageFailed, Damaged)):  # Paths of these may have spaces.
    return error
  if isinstance(error, StorageFailed):
    said = 'The store cannot be read or written: retry later; nothing that was acknowledged is lost.'
  elif isinstance(error, Damaged) and (found := _STORED.search(full)):
    id, number = found.groups()
    what = f'The adapter {id}' if number is None else f'Version {int(number)} of {id}'
    said = f'{what} is damaged in the store: undo to another version, or ask the operator to restore it from a copy.'
  return type(error)(said, field=error.field, log=error.log or full, retry_after=error.retry_after)


def invalid(error: pydantic.ValidationError, fields: Iterable[str] = (), what: str = 'The body') -> Malformed:
  """Return the first validation error of a body with these fields, with the path in the body but not the value."""
  first, *others = error.errors(include_url=False, include_context=False, include_input=False)
  path = '.'.join(printable(str(part), 60) for part in first['loc'])
  if first['type'] == 'json_invalid':
    return Malformed(f'{what} is not JSON ({first["msg"].removeprefix("Invalid JSON: ")}): send one JSON object.')
  if first['type'] in ('extra_forbidden', 'unexpected_keyword_argument'):
    hint = did_you_mean(path, fields if len(first['loc']) == 1 else ())
    more = ': /openapi.json lists all fields.' if hint == '.' else hint
    return Malformed(f'There is no field {path}{more}', field=path)
  complaint = first['msg'].removeprefix('Value error, ').removesuffix('.')
  more = f' ({counted(len(others), "more error")})' if others else ''
  return Malformed(f'{path or what}: {complaint}{more}.', field=path or None)


def failure_of(error: Exception, path: str, request_id: str, unexpected: Callable[[Exception, str], None]) -> Failure:
  """Return the response to any error that a handler raised.

  Args:
    error: the error.
    path: the path of the request.
    request_id: the id under which the error is logged.
    unexpected: logs an error that no client could have caused.
  """
  found = known(error)
  if found is None:
    unexpected(error, request_id)
    found = Internal('Something unexpected went wrong; see the log of the service under this request_id.')
  return failure(found, path, request_id)


def failure(error: ServiceError, path: str, request_id: str) -> Failure:
  """Return the response to an error: the native format, or OpenAI's for the paths that are compatible with it."""
  headers, waits = {}, {}
  if error.retry_after is not None:
    wait = min(max(0.0, error.retry_after), _LONGEST_WAIT)
    waits = {'retry_after_s': round(wait, 1)}
    headers = {'Retry-After': str(max(1, math.ceil(wait))), 'retry-after-ms': str(math.ceil(1000 * wait))}
  if isinstance(error, VersionConflict):
    headers = {'ETag': f'"{error.current}"'}
  elif isinstance(error, Unauthorized):
    headers = {'WWW-Authenticate': 'Bearer'}
  elif isinstance(error, (TooLarge, TooSlow)):
    headers = {'Connection': 'close'}
  if path.startswith('/v1/') and not path.startswith(NATIVE):
    kind = _OPENAI_TYPES.get(error.status, 'invalid_request_error' if error.status < 500 else 'server_error')
    said: dict[str, Any] = {'message': str(error), 'type': kind, 'param': error.field, 'code': error.code}
  else:
    said = {'code': error.code, 'message': str(error)}
    if error.field is not None:
      said['field'] = error.field
    said |= waits  # Also for entries of a batch, which have no headers.
  if isinstance(error, VersionConflict):
    said['current_version'] = error.current
  elif isinstance(error, TurnConflict):
    said['current_turn'] = error.current
  if isinstance(error, Internal):
    said['request_id'] = request_id
  if error.log is not None:
    _logger.warning('%s: %s', request_id, error.log)
  if path.startswith(f'{TOKASAURUS}/'):
    return Failure(422 if isinstance(error, Malformed) else error.status, {'detail': str(error)}, headers)
  return Failure(error.status, {'error': said}, headers)
