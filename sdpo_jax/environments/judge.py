"""The environment `judge`: a language model behind an OpenAI-compatible endpoint scores and criticises completions.

Its critique becomes the feedback. The template is a setting; what the judge reads of the completion stands between
tags with a number drawn for that request alone, so that a completion cannot pretend to end.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

from sdpo_jax.config import EnvironmentsConfig, JudgeConfig
from sdpo_jax.environments import chat_endpoint, json_server, remote
from sdpo_jax.environments.outcomes import encodable
from sdpo_jax.environments.registry import register_factory
from sdpo_jax.environments.thinking import without_thinking
from sdpo_jax.errors import UserError
from sdpo_jax.files import jsonable
from sdpo_jax.types import Example, Outcome

NAME = 'judge'
MAX_LINES = 10_000  # Of an answer: the score is searched for in each.
_DECORATION = r'[\s*_`#>-]*'  # Markdown around the line.
_SCORE_LINE = re.compile(
  rf'{_DECORATION}(?:(?:final|overall|total)\s+)?score{_DECORATION}:(?P<value>.*)', re.IGNORECASE
)
_NUMBER = r'(?:\d+(?:\.\d*)?|\.\d+)'
_VALUE = re.compile(rf'(?P<of>{_NUMBER})\s*(?:/\s*(?P<whole>{_NUMBER})|(?P<percent>%))?', re.ASCII)


@register_factory(NAME)
def make(settings: EnvironmentsConfig) -> Judge:
  """Return the grader of `environments.judge`; raises UserError without an endpoint or the name of a model."""
  return Judge(settings.judge)


class Judge:
  """Asks `environments.judge.model` about completions."""

  limits_itself = True

  def __init__(self, settings: JudgeConfig):
    prefix = 'environments.judge'
    url, secret = chat_endpoint.read_address(settings.base_url, f'{prefix}.base_url')
    if not settings.model.strip():
      raise UserError(f'{prefix}.model is empty: set it to the name of the judging model at the endpoint.')
    key = json_server.read_secret(settings.api_key_env, f'{prefix}.api_key_env', required=False)
    self._settings = settings
    self._remote = remote.Remote(
      NAME,
      url,
      secrets=secret,
      authorization=f'Bearer {key}' if key else '',
      timeout_s=settings.timeout_s,
      retries=settings.retries,
      concurrency=settings.concurrency,
      setting=f'{prefix}.base_url',
    )

  def __call__(self, examples: list[Example], completions: list[str], *, truncated: list[bool]) -> list[Outcome]:
    """See `registry.Grader`; raises UserError as `end_batch`, as soon as nothing is to be hoped for."""
    parts = zip(examples, completions, truncated, strict=True)
    bodies = [lambda part=part: request(*part, self._settings, tag=secrets.token_hex(8)) for part in parts]
    return self._remote.grade(examples, bodies, outcome)

  def end_batch(self) -> None:
    """See `registry.GraderFactory`; raises UserError if the judge graded none of the batch."""
    self._remote.end_batch()

  def close(self) -> None:
    self._remote.close()


def request(example: Example, completion: str, truncated: bool, settings: JudgeConfig, *, tag: str) -> dict[str, Any]:
  """Return the body that asks for the critique of one completion; `tag` must be hard to guess."""
  return {
    'model': settings.model,
    'messages': [{'role': 'user', 'content': question(example, completion, truncated, settings.template, tag=tag)}],
    'temperature': settings.temperature,
    'max_tokens': settings.max_tokens,
  }


def question(example: Example, completion: str, truncated: bool, template: str, *, tag: str) -> str:
  """Return what the judge reads."""
  answer = f'<answer-{tag}>\n{completion}\n</answer-{tag}>'
  if truncated:
    answer += '\n(The answer was cut off here, at the limit of its length.)'
  truth = example.ground_truth
  return template.format(
    question=chat_endpoint.conversation(example.messages),
    completion=answer,
    ground_truth=truth if isinstance(truth, str) else json.dumps(jsonable(truth), ensure_ascii=False),
  )


def outcome(answer: Any) -> Outcome:
  """Return the outcome of a chat completion; raises json_server.Fault, worth another attempt, if there is no score in
  it.
  """
  content, cut = chat_endpoint.answered(answer)
  if len(content.splitlines()) > MAX_LINES:
    raise json_server.Fault(f"the judge's answer has more than {MAX_LINES} lines: {_end(content)}", again=True)
  score, critique = read_critique(content)
  if score is None:
    hint = '; it was cut off, so raise environments.judge.max_tokens' if cut else ''
    raise json_server.Fault(
      f"the judge's answer has no line 'Score: x' with x from 0 to 1{hint}: {_end(content)}", again=True
    )
  return Outcome(score, encodable(critique) or None, {'acc': score})


def read_critique(text: str) -> tuple[float | None, str]:
  """Score and critique of a judge's answer.

  The score stands on the last line that begins with 'Score:' (Markdown, capitals and a leading 'final', 'overall' or
  'total' do not matter) as a number from 0 to 1, a fraction (4/5) or a percentage; None if there is no such line or
  that line holds anything else. The critique is all the rest, without what the judge thought to itself.
  """
  lines = without_thinking(text).splitlines()
  for at in reversed(range(len(lines))):
    if match := _SCORE_LINE.fullmatch(lines[at]):
      return _value(match['value']), '\n'.join(lines[:at] + lines[at + 1 :]).strip()
  return None, '\n'.join(lines).strip()


def _value(text: str) -> float | None:
  match = _VALUE.fullmatch(text.strip().strip('*_`').strip().removesuffix('.'))
  if match is None:
    return None
  whole = 100.0 if match['percent'] else float(match['whole'] or 1.0)
  value = float(match['of']) / whole if whole else None
  return value if value is not None and 0.0 <= value <= 1.0 else None


def _end(text: str) -> str:
  """Return the end of a text as messages quote it: that is where the score was expected."""
  return json_server.quoted('…' + text[-150:] if len(text) > 150 else text)
