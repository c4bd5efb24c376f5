"""Prometheus metrics for /metrics: requests, latencies, tokens, versions, and the counters of the worker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
import re

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, exposition
from prometheus_client.core import GaugeMetricFamily, Metric

CONTENT_TYPE = exposition.CONTENT_TYPE_LATEST
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
  """The metrics of one service."""

  def __init__(self, stats: Callable[[], Mapping[str, float]], ready: Callable[[], bool]):
    """Make metrics.

    Args:
      stats: returns the worker's numbers by name.
      ready: returns whether all programs are compiled.
    """
    self._registry = CollectorRegistry()
    self._registry.register(_Stats(stats))
    self._requests = Counter(
      'sdpo_requests', 'Requests answered.', ['route', 'method', 'status'], registry=self._registry
    )
    self._seconds = Histogram(
      'sdpo_request_seconds',
      'Seconds from a request to the end of its answer.',
      ['route'],
      buckets=_SECONDS,
      registry=self._registry,
    )
    self._tokens = Counter('sdpo_tokens', 'Tokens sampled, scored and learned.', ['kind'], registry=self._registry)
    self._feedback = Counter('sdpo_feedback', 'Feedback by what came of it.', ['outcome'], registry=self._registry)
    self._decisions = Counter(
      'sdpo_session_decisions', 'Decisions on proposals.', ['decision'], registry=self._registry
    )
    self._denial_seconds = Histogram(
      'sdpo_session_denial_seconds',
      'Seconds from a denial to its answer, learning included.',
      buckets=_SECONDS,
      registry=self._registry,
    )
    self._learned = Counter(
      'sdpo_session_learned', 'What sessions have learned, by what came of it.', ['outcome'], registry=self._registry
    )
    self._under_way = Gauge('sdpo_requests_under_way', 'Requests that are worked on.', registry=self._registry)
    Gauge('sdpo_ready', 'Whether all programs are compiled.', registry=self._registry).set_function(
      lambda: float(ready())
    )

  def begin(self) -> None:
    """Count a request that has begun."""
    self._under_way.inc()

  def end(self, route: str, method: str, status: int, seconds: float) -> None:
    """Count a request that has ended; `route` is the pattern of its path, never the path."""
    self._under_way.dec()
    self._requests.labels(route, method, str(status)).inc()
    self._seconds.labels(route).observe(seconds)

  def tokens(self, kind: str, count: int) -> None:
    """Count tokens; refunds are not subtracted, since counters never decrease."""
    if count > 0:
      self._tokens.labels(kind).inc(count)

  def feedback(self, outcome: str) -> None:
    """Count a feedback: committed, rejected or dry_run."""
    self._feedback.labels(outcome).inc()

  def decision(self, kind: str, seconds: float) -> None:
    """Count a decision on a proposal: approve, deny or edit, and the seconds that it took."""
    self._decisions.labels(kind).inc()
    if kind == 'deny':
      self._denial_seconds.observe(seconds)

  def session_learned(self, outcome: str) -> None:
    """Count the result of learning in a session: committed, rejected, or waiting for more examples."""
    self._learned.labels(outcome).inc()

  def text(self) -> bytes:
    """Return all metrics in Prometheus' text format."""
    return exposition.generate_latest(self._registry)


class _Stats:
  """A collector that reads the worker's numbers when they are scraped."""

  def __init__(self, stats: Callable[[], Mapping[str, float]]):
    self._stats = stats

  def collect(self) -> Iterable[Metric]:
    for name, value in sorted(self._stats().items()):
      if isinstance(value, (int, float)):
        metric = 'sdpo_engine_' + re.sub(r'\W', '_', name)
        yield GaugeMetricFamily(metric, f'Of the engine: {name.replace("_", " ")}.', value=float(value))
