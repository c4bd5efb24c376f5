"""The environment `http`: your own grader behind a URL.

One POST per completion with a JSON object: id, data_source, prompt (chat messages), completion, truncated,
ground_truth, extra. The answer is {"score": number, "feedback": string or null, "metrics": {name: number or string}};
the last two may be missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdpo_jax.config import EnvironmentsConfig
from sdpo_jax.environments import json_server
from sdpo_jax.environments.outcomes import encodable
from sdpo_jax.environments.registry import register_factory
from sdpo_jax.environments.remote import RemoteGrader, number
from sdpo_jax.types import Example, Outcome

NAME = 'http'
MAX_METRICS, MAX_NAME = 100, 200  # Metrics per answer, and characters of a name: each becomes a curve of the run.


@register_factory(NAME)
def make(settings: EnvironmentsConfig) -> RemoteGrader:
  """Return the grader of `environments.http`; raises UserError if its address, or a key that it names, is missing."""
  http, prefix = settings.http, 'environments.http'
  url, secrets = json_server.read_address(http.url, f'{prefix}.url', 'http://localhost:8000/grade')
  key = json_server.read_secret(http.authorization_env, f'{prefix}.authorization_env', required=True)
  server = json_server.JsonServer(
    url, authorization=key, secrets=secrets, connections=http.concurrency, setting=f'{prefix}.url'
  )
  return RemoteGrader(NAME, server, http, body=request, read=outcome)


def request(example: Example, completion: str, truncated: bool) -> dict[str, Any]:
  """Return the request body that asks for the grade of one completion."""
  return {
    'id': example.id,
    'data_source': example.data_source,
    'prompt': example.messages,
    'completion': completion,
    'truncated': bool(truncated),
    'ground_truth': example.ground_truth,
    'extra': example.extra,
  }


def outcome(answer: Any) -> Outcome:
  """Return the outcome in an answer; raises json_server.Fault naming what is wrong with it."""
  if not isinstance(answer, Mapping):
    raise json_server.Fault(f"its answer must be an object with a 'score', not {json_server.quoted(answer)}")
  if 'score' not in answer:
    raise json_server.Fault(f"'score' is missing in its answer {json_server.quoted(answer)}")
  feedback, metrics = answer.get('feedback'), answer.get('metrics')
  if not isinstance(feedback, str | None):
    raise json_server.Fault(f"'feedback' of its answer must be a string or null, not {json_server.quoted(feedback)}")
  if not isinstance(metrics, Mapping | None):
    raise json_server.Fault(f"'metrics' of its answer must be an object, not {json_server.quoted(metrics)}")
  if len(metrics or {}) > MAX_METRICS:
    raise json_server.Fault(f"'metrics' of its answer has more than {MAX_METRICS} entries")
  for name in metrics or {}:
    if len(name) > MAX_NAME or not name.isprintable():
      raise json_server.Fault(
        f"a name in 'metrics' of its answer is long or cannot be printed: {json_server.quoted(name)}"
      )
  return Outcome(
    score=number(answer['score'], 'score'),
    feedback=None if feedback is None else encodable(feedback),
    metrics={encodable(name): _metric(name, value) for name, value in (metrics or {}).items()},
  )


def _metric(name: str, value: Any) -> float | str:
  if isinstance(value, str):
    return encodable(value)
  return float(value) if isinstance(value, bool) else number(value, f'metrics.{name}')
