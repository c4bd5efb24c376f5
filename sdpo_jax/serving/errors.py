"""What the service refuses, each with the HTTP status and the code that a client can tell it by."""

from __future__ import annotations

from typing import ClassVar


class ServiceError(Exception):
  """A request that the service refuses, with one sentence for its sender.

  Attributes:
    status: the HTTP status.
    code: a word for programs.
    field: the field of the request that is to blame; None: no single one.
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
  """There is no such thing, or it belongs to somebody else: the two look the same."""

  status, code = 404, 'not_found'


class InFlight(ServiceError):
  """A request with the same idempotency key is still under way."""

  status, code = 409, 'in_flight'


class _ElsewhereError(ServiceError):
  """What the request is about is at `current`, and not where the request takes it to be."""

  def __init__(self, message: str, *, current: int, field: str | None = None):
    super().__init__(message, field=field)
    self.current = current


class TurnConflict(_ElsewhereError):
  """A session is not where the request takes it to be; `current` is the number of its newest turn, −1: there is
  none.
  """

  status, code = 409, 'turn_conflict'


class Gone(ServiceError):
  status, code = 410, 'gone'


class VersionConflict(_ElsewhereError):
  """The adapter is at another version than the request expects."""

  status, code = 412, 'version_conflict'


class TooLarge(ServiceError):
  status, code = 413, 'too_large'


class Unprocessable(ServiceError):
  status, code = 422, 'unprocessable'


class Busy(ServiceError):
  """A queue or an allowance is used up; `retry_after` says in how many seconds to come again."""

  status, code = 429, 'busy'

  def __init__(self, message: str, *, retry_after: float, field: str | None = None):
    super().__init__(message, field=field)
    self.retry_after = retry_after


class Cancelled(ServiceError):
  status, code = 499, 'cancelled'


class Damaged(ServiceError):
  """Something that was stored is not as it was written; the sentence names it."""

  status, code = 500, 'damaged'


class StorageFailed(ServiceError):
  """The store could not be read or written; what was acknowledged before is there."""

  status, code = 503, 'storage_failed'


class NotReady(ServiceError):
  status, code = 503, 'not_ready'


class Deadline(ServiceError):
  status, code = 504, 'deadline'
