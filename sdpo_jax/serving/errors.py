"""Errors of the service, each with an HTTP status and a code for clients."""

from __future__ import annotations

from typing import ClassVar

from sdpo_jax.config.privacy import public_text
from sdpo_jax.errors import UserError


class ServiceError(Exception):
  """A request has failed; the message is one sentence for the client.

  Attributes:
    status: the HTTP status.
    code: a word by which programs recognize the error.
    field: the field of the request that caused the error; None: no single field.
    log: a sentence for the operator, with paths or addresses, which clients never see; None: the message says all.
    retry_after: seconds after which a retry may help; None: unknown, but a second if the status is 503.
  """

  status: ClassVar[int] = 500
  code: ClassVar[str] = 'internal'

  def __init__(
    self, message: str, *, field: str | None = None, log: str | None = None, retry_after: float | None = None
  ):
    super().__init__(message)
    self.field, self.log = field, log
    self.retry_after = 1.0 if retry_after is None and self.status == 503 else retry_after


class InvalidRequest(ServiceError):
  """A field of the request is invalid."""

  status, code = 400, 'invalid_request'


def refusal(error: UserError) -> InvalidRequest:
  """Return an error of the engine or of settings as one of a request, without paths and addresses of the machine."""
  full = str(error)
  said = public_text(full)
  return InvalidRequest(said, log=None if said == full else full)


class Unauthorized(ServiceError):
  """The request has no valid API key."""

  status, code = 401, 'unauthorized'


class Forbidden(ServiceError):
  """The request is not allowed: by its origin, a missing session token, or a limit of the owner."""

  status, code = 403, 'forbidden'


class NotFound(ServiceError):
  """Something does not exist, or belongs to another owner, which looks the same."""

  status, code = 404, 'not_found'


class InFlight(ServiceError):
  """A request with the same idempotency key is still in progress."""

  status, code = 409, 'in_flight'


class NameTaken(ServiceError):
  """The owner has an adapter of that name."""

  status, code = 409, 'name_taken'


class _StateConflict(ServiceError):
  """The state is at `current`, and the request assumes another one."""

  def __init__(self, message: str, *, current: int):
    super().__init__(message)
    self.current = current


class TurnConflict(_StateConflict):
  """A session is at another turn than the request assumes.

  `current` is the number of its newest turn, −1 if there is none.
  """

  status, code = 409, 'turn_conflict'


class Gone(ServiceError):
  """Something existed, but has expired or was removed."""

  status, code = 410, 'gone'


class VersionConflict(_StateConflict):
  """The adapter is at another version than the request expects."""

  status, code = 412, 'version_conflict'


class TooLarge(ServiceError):
  """The body of the request, or a file in it, is too large."""

  status, code = 413, 'too_large'


class Unprocessable(ServiceError):
  """The idempotency key belongs to a different request."""

  status, code = 422, 'unprocessable'


class Busy(ServiceError):
  """A queue is full or an allowance is used up; retry after `retry_after` seconds."""

  status, code = 429, 'busy'


class Cancelled(ServiceError):
  """The client has disconnected, or the request was cancelled."""

  status, code = 499, 'cancelled'


class Damaged(ServiceError):
  """Stored data differ from what was written; `log` names the file."""

  status, code = 500, 'damaged'


class StorageFailed(ServiceError):
  """The store could not be read or written; everything acknowledged before is safe."""

  status, code = 503, 'storage_failed'


class NotHolder(ServiceError):
  """Another replica holds what the request changes."""

  status, code = 503, 'not_holder'

  def __init__(self, url: str, replica: str = '', after: str = ': retry in a second'):
    """Say so; `url`: where that replica is reached, and `replica`: its id, or empty if they are not known."""
    super().__init__(f'Another replica of the service has this adapter now{after}.', retry_after=1.0)
    self.url, self.replica = url, replica


class NotReady(ServiceError):
  """The service is starting, stopping or has failed."""

  status, code = 503, 'not_ready'


class TeacherUnavailable(ServiceError):
  """The external teacher does not answer, or not as it should; nothing was learned."""

  status, code = 503, 'teacher_unavailable'


class Deadline(ServiceError):
  """The request was not done within its time limit."""

  status, code = 504, 'deadline'
