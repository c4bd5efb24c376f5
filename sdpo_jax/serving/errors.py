"""The errors of the service, each with its HTTP status and a code for clients."""

from __future__ import annotations

from typing import ClassVar


class ServiceError(Exception):
  """A refused request, with one sentence for its sender.

  Attributes:
    status: the HTTP status.
    code: a word for programs.
    field: the field of the request that caused the error; None: no single one.
  """

  status: ClassVar[int] = 500
  code: ClassVar[str] = 'internal'

  def __init__(self, message: str, *, field: str | None = None):
    super().__init__(message)
    self.field = field


class InvalidRequest(ServiceError):
  status, code = 400, 'invalid_request'


class Unauthorized(ServiceError):
  status, code = 401, 'unauthorized'


class Forbidden(ServiceError):
  status, code = 403, 'forbidden'


class NotFound(ServiceError):
  """The thing does not exist or belongs to somebody else; the two look the same."""

  status, code = 404, 'not_found'


class InFlight(ServiceError):
  """A request with the same idempotency key is still under way."""

  status, code = 409, 'in_flight'


class _StateConflict(ServiceError):
  """The state has moved on: it is at `current`, and the request assumes another."""

  def __init__(self, message: str, *, current: int, field: str | None = None):
    super().__init__(message, field=field)
    self.current = current


class TurnConflict(_StateConflict):
  """A session is at another turn than the request assumes.

  `current` is the number of its newest turn, −1 if there is none.
  """

  status, code = 409, 'turn_conflict'


class Gone(ServiceError):
  status, code = 410, 'gone'


class VersionConflict(_StateConflict):
  """The adapter is at another version than the request expects."""

  status, code = 412, 'version_conflict'


class TooLarge(ServiceError):
  status, code = 413, 'too_large'


class Unprocessable(ServiceError):
  status, code = 422, 'unprocessable'


class Busy(ServiceError):
  """A queue or an allowance is used up; `retry_after` is the number of seconds to wait before a retry."""

  status, code = 429, 'busy'

  def __init__(self, message: str, *, retry_after: float, field: str | None = None):
    super().__init__(message, field=field)
    self.retry_after = retry_after


class Cancelled(ServiceError):
  status, code = 499, 'cancelled'


class Damaged(ServiceError):
  """Stored data differ from what was written; the message names them."""

  status, code = 500, 'damaged'


class StorageFailed(ServiceError):
  """The store could not be read or written; everything acknowledged before is safe."""

  status, code = 503, 'storage_failed'


class NotReady(ServiceError):
  status, code = 503, 'not_ready'


class Deadline(ServiceError):
  status, code = 504, 'deadline'
