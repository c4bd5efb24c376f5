"""Telemetry of the service: a log of requests, and Prometheus metrics.

The log has one JSON object per line, never with headers or keys, and with bodies only if requested. /metrics has
requests, latencies, tokens, outcomes of feedback, and the counters of the worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
import functools
import json
import logging
import re
import sys
import threading
import time
import traceback
from typing import Any, TextIO

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from sdpo_jax.serving.web.admission import Lifetime

CONTENT_TYPE = exposition.CONTENT_TYPE_LATEST
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_WRITING = threading.Lock()  # Held while a line is written.
_METHODS = 'DELETE', 'GET', 'HEAD', 'OPTIONS', 'PATCH', 'POST', 'PUT'
_LONGEST_BODY = 20_000  # The most characters of a body in the log.


class Log:
  """A log with one JSON object per line; any thread may call."""

  def __init__(self, stream: TextIO | None = None, *, bodies: bool = False, clock: Callable[[], float] = time.time):
    """Make a log.

    Args:
      stream: the output stream; None: stderr.
      bodies: whether to log the bodies of requests and responses, too (serve.http.log_bodies).
      clock: returns seconds since the epoch.
    """
    self._stream, self._clock, self.bodies = stream, clock, bodies

  def without_bodies(self) -> Log:
    """Return this log without bodies and messages of errors."""
    return Log(self._stream, clock=self._clock)

  def write(self, event: str, *, bodies: Mapping[str, bytes] | None = None, **values: Any) -> None:
    """Write a line; `bodies` are added to it only if the log has bodies. Failures to write are ignored."""
    if self.bodies:
      values |= {name: _shown(body) for name, body in (bodies or {}).items()}
    line = json.dumps({'time': round(self._clock(), 3), 'event': event, **values}, default=str)
    with _WRITING:
      try:
        print(line, file=self._stream or sys.stderr, flush=True)
      except (OSError, ValueError):  # The reader of the stream is gone, or the stream is closed.
        return

  def error(self, error: BaseException, request_id: str) -> None:
    """Log the type and traceback of an unexpected error; the message, which may quote a prompt, only with bodies."""
    frames = traceback.extract_tb(error.__traceback__)
    at = [f'{frame.filename.rsplit("/site-packages/")[-1]}:{frame.lineno} {frame.name}' for frame in frames[-12:]]
    message = {'message': str(error)} if self.bodies else {}
    self.write('error', request=request_id, error=type(error).__name__, at=at, **message)


def _shown(body: bytes) -> str:
  return body[: 4 * _LONGEST_BODY].decode('utf-8', 'replace')[:_LONGEST_BODY]


class Forward(logging.Handler):
  """A handler for `logging` that forwards warnings of this package and of libraries to a `Log`."""

  def __init__(self, log: Log):
    super().__init__(logging.WARNING)
    self._log = log

  def emit(self, record: logging.LogRecord) -> None:
    # Without its arguments if a library logs it, since these may quote a request.
    known = record.name.startswith('sdpo_jax') or self._log.bodies
    message = record.getMessage() if known else str(record.msg)
    self._log.write('log', level=record.levelname.lower(), logger=record.name, message=message[:1000])


class Metrics:
  """The Prometheus metrics of one service."""

  def __init__(self, lifetime: Lifetime):
    """Make the metrics; the service of the lifetime need not exist yet."""
    self._registry, self._lifetime = CollectorRegistry(), lifetime
    self._registry.register(_Stats(lifetime))
    counter, gauge = (functools.partial(kind, registry=self._registry) for kind in (Counter, Gauge))
    seconds = functools.partial(Histogram, buckets=_SECONDS, registry=self._registry)
    self._requests = counter('sdpo_requests', 'Requests that were answered.', ['route', 'method', 'status'])
    self._seconds = seconds('sdpo_request_seconds', 'Seconds from a request to the end of its response.', ['route'])
    self._tokens = counter('sdpo_tokens', 'Tokens sampled, scored and learned.', ['kind'])
    self._feedback = counter('sdpo_feedback', 'Feedback transactions by outcome.', ['outcome'])
    self._decisions = counter('sdpo_session_decisions', 'Decisions on proposals.', ['decision'])
    self._denial_seconds = seconds(
      'sdpo_session_denial_seconds', 'Seconds from a denial to its response, including learning.'
    )
    self._learned = counter('sdpo_session_learned', 'Learning steps of sessions by outcome.', ['outcome'])
    under_way = gauge('sdpo_requests_under_way', 'Requests in progress.')
    under_way.set_function(lambda: lifetime.under_way)
    ready = gauge('sdpo_ready', 'Whether the service accepts requests.')
    ready.set_function(lambda: float(lifetime.ready))

  def end(self, route: str, method: str, status: int, seconds: float, tokens: Mapping[str, int]) -> None:
    """Count a request that has ended.

    Args:
      route: the pattern of its path, never the path itself.
      method: its HTTP method; clients may send any word.
      status: the status of the response.
      seconds: the time from the request to the end of its response.
      tokens: the tokens spent, by kind; negative counts are ignored, since counters never decrease.
    """
    self._requests.labels(route, method if method in _METHODS else 'other', str(status)).inc()
    self._seconds.labels(route).observe(seconds)
    for kind, count in tokens.items():
      if count > 0:
        self._tokens.labels(kind).inc(count)

  def feedback(self, outcome: str) -> None:
    """Count a feedback by its outcome: committed, rejected, unchanged or dry_run."""
    self._feedback.labels(outcome).inc()

  def decision(self, kind: str, seconds: float) -> None:
    """Count a decision on a proposal (approve, deny or edit), and for a denial the seconds until its response."""
    self._decisions.labels(kind).inc()
    if kind == 'deny':
      self._denial_seconds.observe(seconds)

  def session_learned(self, outcome: str) -> None:
    """Count the result of learning in a session: committed, rejected, unchanged, or waiting for more examples."""
    self._learned.labels(outcome).inc()

  def text(self, key: str | None = None) -> bytes:
    """Return all metrics in Prometheus' text format, with the usage of one key; None: of all keys."""
    return exposition.generate_latest(self._registry) + exposition.generate_latest(_Usage(self._lifetime, key))


class _Stats:
  """A Prometheus collector that reads the metrics of worker and store when they are scraped."""

  def __init__(self, lifetime: Lifetime):
    self._lifetime = lifetime

  def collect(self) -> Iterable[Metric]:
    service = self._lifetime.present
    if service is not None and service.endpoint is not None:
      teacher = service.endpoint
      closed = teacher.state['breaker'] == 'closed'
      yield GaugeMetricFamily('sdpo_teacher_open', 'Whether the external teacher is not asked.', value=not closed)
      for name, value in teacher.counts.items():
        yield CounterMetricFamily(f'sdpo_teacher_{name}', f'Of the external teacher: {name}.', value=value)
    stats = {} if service is None else {'engine': service.worker.stats, 'store': service.store.stats}
    for part, values in stats.items():
      for name, value in sorted(values.items()):
        metric = f'sdpo_{part}_' + re.sub(r'\W', '_', name)
        yield GaugeMetricFamily(metric, f'The {part} metric {name.replace("_", " ")}.', value=float(value))


class _Usage:
  """What keys have used today, in the form of a registry; keys without use have no series."""

  def __init__(self, lifetime: Lifetime, key: str | None):
    self._lifetime, self._key = lifetime, key

  def collect(self) -> Iterable[Metric]:
    service = self._lifetime.present
    family = GaugeMetricFamily('sdpo_key_used_today', 'Use of a key in this UTC day.', labels=['key', 'kind'])
    today = service.allowances.today() if service is not None else {}
    for key, kind in sorted(name for name in today if self._key in (None, name[0])):
      family.add_metric([key, kind], today[key, kind])
    yield family
