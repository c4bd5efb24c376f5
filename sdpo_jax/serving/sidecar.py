"""The external teacher of a service behind a circuit breaker, which asks a dead teacher only now and then.

The breaker opens after `FAILURES` failed attempts in a row. Attempts at the same time count as one: an attempt counts
only if it began after the failure before. While the breaker is open, every request that needs the teacher is refused at
once, and nothing is asked again. After a pause, one request checks the teacher as at the start of the service, since
another model may have come back in its place; if it passes, the breaker closes, and the request goes on. For the same
reason, one request checks it, while others wait, after a while without an answer, or after texts of several requests in
a row were refused. If such a check fails, its attempts count as any others; but a server that refuses the check's own
texts, or is another teacher, opens the breaker at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import logging
import threading
import time
from typing import Any

from sdpo_jax.config import TeacherEndpointConfig
from sdpo_jax.distributed.stopping import NEVER, Stop, StoppedError
from sdpo_jax.environments.json_server import Fault
from sdpo_jax.errors import UserError
from sdpo_jax.serving.errors import Deadline, InvalidRequest, TeacherUnavailable
from sdpo_jax.teacher.asking import STOP_S
from sdpo_jax.teacher.dialects import EndpointScores
from sdpo_jax.teacher.endpoint import Endpoint, EndpointError, EndpointQuery

FAILURES = 3  # Failed attempts in a row that open the breaker, and requests in a row whose texts are refused.
STALE = 300.0  # Seconds without an answer after which the teacher is checked again: enough to load another model.
_UNFIT = (400, 413, 422)  # Statuses of a teacher that lives, but refuses a text.
_logger = logging.getLogger('sdpo_jax.serving')


class Sidecar:
  """The external teacher of a service. Any thread may call."""

  def __init__(
    self,
    settings: TeacherEndpointConfig,
    vocab_size: int,
    check: Callable[[Endpoint, Stop], None],
    *,
    pause_s: float,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Make a teacher that is not connected yet.

    Args:
      settings: the endpoint.
      vocab_size: vocabulary size of the student.
      check: checks that the server is the teacher that the settings describe, as `Endpoint.check` does.
      pause_s: seconds for which an open breaker refuses requests.
      clock: returns seconds, as `time.monotonic`.

    Raises:
      UserError: as `Endpoint`.
    """
    self._endpoint = Endpoint(settings, vocab_size, self._attempted, lambda: self._open_until is not None)
    self._check, self._pause, self._clock = check, pause_s, clock
    self._lock = threading.Condition()  # Guards the fields below; notified when a check has ended.
    self._failures, self._failed_at = 0, -float('inf')  # Attempts in a row, and when the last one ended.
    self._unfit = 0  # Requests in a row of which the teacher has refused a text.
    self._answered_at = clock()
    self._open_until: float | None = None  # None: the breaker is closed.
    self._probing = False  # Whether a request is checking the teacher.
    self.counts = {'requests': 0, 'failures': 0, 'refused': 0}  # Attempts, failed ones, and requests refused at once.

  def begin(self) -> None:
    """Check the teacher at the start of the service; if it does not answer, a later request checks it.

    Raises:
      UserError: it answers, but not as the teacher that the settings describe.
    """
    try:
      self._check(self._endpoint, NEVER)
    except EndpointError as error:
      if not error.fault.again:
        raise
      _logger.warning('The service starts without its teacher, and refuses what needs it until it answers: %s', error)
      self._open_until = self._clock() + self._pause

  def close(self) -> None:
    """Close the connections."""
    self._endpoint.close()

  @property
  def state(self) -> dict[str, Any]:
    """The state for /readyz: 'closed', 'open' or 'probing', and, unless it is closed, when it is asked again."""
    with self._lock:
      if self._open_until is None:
        return {'breaker': 'closed'}
      state = 'probing' if self._probing else 'open'
      return {'breaker': state, 'retry_after_s': round(max(0.0, self._open_until - self._clock()), 1)}

  def score(self, asked: Sequence[EndpointQuery], stop: Stop = NEVER) -> list[EndpointScores]:
    """Return the teacher's scores, as `Endpoint.score`.

    Raises:
      TeacherUnavailable: the breaker is open, or the teacher has not answered as it should.
      InvalidRequest: the teacher refuses one of the texts.
      StoppedError: `stop` was set.
    """
    try:
      if self._admit(stop):
        self._probe(stop)
      return self._endpoint.score(asked, stop)
    except StoppedError:
      try:
        stop.check()
      except Deadline as error:
        raise self._unavailable('has not answered within the time limit of the request') from error
      raise
    except EndpointError as error:
      if error.fault.status in _UNFIT:
        with self._lock:
          self._unfit += 1
        raise InvalidRequest(
          'The external teacher refuses to score one of the completions: choose another kind of teacher for it.',
          field='teacher',
          log=str(error),
        ) from error
      raise self._unavailable('does not answer as it should', error.fault.after_s, log=str(error)) from error

  def _admit(self, stop: Stop) -> bool:
    """Return whether the request has to check the teacher first, after waiting for a check of another one.

    Raises:
      TeacherUnavailable: the breaker is open.
      StoppedError: `stop` was set.
    """
    with self._lock:
      while self._probing and self._open_until is None:
        if stop.asked():
          raise StoppedError
        self._lock.wait(STOP_S)
      now, until = self._clock(), self._open_until
      stale = now - self._answered_at > STALE or self._unfit >= FAILURES
      if until is None or (until <= now and not self._probing):
        self._probing = stale or until is not None
        return self._probing
      self.counts['refused'] += 1
    raise self._unavailable('does not answer at the moment')

  def _probe(self, stop: Stop) -> None:
    """Check the teacher, and close the breaker; if the check is stopped, the next request checks again."""
    try:
      self._check(self._endpoint, stop)
      with self._lock:
        if self._open_until is not None:
          _logger.warning('The external teacher answers again.')
        self._open_until, self._failures, self._unfit, self._answered_at = None, 0, 0, self._clock()
    except UserError as error:
      unlike = not isinstance(error, EndpointError)
      with self._lock:
        if unlike or error.fault.status in _UNFIT:  # Which `_attempted` does not count.
          self._open('fails its check')
      said = 'is not the one of the settings' if unlike else 'does not answer as it should'
      raise self._unavailable(said, log=str(error)) from error
    finally:
      with self._lock:
        self._probing = False
        self._lock.notify_all()

  def _open(self, why: str) -> None:
    """Open the breaker, or keep it open; the caller holds the lock."""
    if self._open_until is None:
      _logger.warning('The external teacher %s: it is not asked for %g s.', why, self._pause)
    self._open_until = self._clock() + self._pause

  def _unavailable(self, said: str, after_s: float | None = None, log: str | None = None) -> TeacherUnavailable:
    return TeacherUnavailable(
      f'The external teacher {said}: nothing was learned. Retry later, or choose another kind of teacher.',
      log=log,
      retry_after=max(self.state.get('retry_after_s', 0.0), after_s or 1.0),
    )

  def _attempted(self, began: float, fault: Fault | None) -> None:
    """Note a request to the teacher; see `Endpoint`."""
    with self._lock:
      self.counts['requests'] += 1
      if fault is None:
        self._failures, self._unfit, self._answered_at = 0, 0, self._clock()
        return
      self.counts['failures'] += 1
      if fault.status in _UNFIT or began < self._failed_at:
        return
      self._failures, self._failed_at = self._failures + 1, time.monotonic()
      if self._failures >= FAILURES or self._open_until is not None:
        self._open(f'has failed {FAILURES} times')
