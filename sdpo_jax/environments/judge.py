"""The environment `judge`: a language model behind an OpenAI-compatible endpoint scores and criticises completions.

Its critique becomes the feedback. The template is a setting. The judge sees the completion between tags with a number
drawn for that request, so that a completion cannot fake its own end, and gives its score on a line with that number, so
that no score which it repeats from a completion is read.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from typing import Any

from sdpo_jax.config import EnvironmentsConfig, JudgeConfig
from sdpo_jax.environments import chat_endpoint, json_server
from sdpo_jax.environments.outcomes import encodable
from sdpo_jax.environments.registry import register_factory
from sdpo_jax.environments.remote import RemoteGrader
from sdpo_jax.environments.thinking import without_thinking
from sdpo_jax.errors import UserError
from sdpo_jax.files import jsonable
from sdpo_jax.types import Example, Outcome

NAME = 'judge'
MAX_LINES = 10_000  # Lines of an answer that are searched for the score.
_DECORATION = r'[\s*_#-]*'  # Markdown around the line with the score; not that of quotations and code.
_SCORE_LINE = re.compile(
  rf' {{0,3}}(?![ \t]){_DECORATION}(?:(?:final|overall|total)\s+)?score-(?P<tag>[0-9a-z]+){_DECORATION}:(?P<value>.*)',
  re.IGNORECASE,
)
_FENCE = re.compile(
  r'\s*(?:(?:[-*+]|\d{1,3}[.)])\s+)*(?:(?P<mark>`{3,}|~{3,}|"{3}|\'{3}|<!--)'
  r'|(?:.*(?=<answer-))?<(?P<name>blockquote|pre|code|quote|q|samp|details|answer[\w-]*)\b)',
  re.IGNORECASE,
)
_NUMBER = r'(?:\d+(?:\.\d*)?|\.\d+)'
_VALUE = re.compile(rf'(?P<of>{_NUMBER})\s*(?:/\s*(?P<whole>{_NUMBER})|(?P<percent>%))?', re.ASCII)


@register_factory(NAME)
def make(settings: EnvironmentsConfig) -> RemoteGrader:
  """Return the grader of `environments.judge`; raises UserError if the endpoint or the model's name is missing."""
  judge, prefix = settings.judge, 'environments.judge'
  server = chat_endpoint.connect(judge, prefix, address='base_url', needs_key=False)
  if not judge.model.strip():
    raise UserError(f'{prefix}.model is empty: set it to the name of the judging model at the endpoint.')
  drawn = threading.local()  # A request is made and its answer read in the same thread.

  def body(*part: Any) -> dict[str, Any]:
    drawn.tag = secrets.token_hex(8)
    return request(*part, judge, tag=drawn.tag)

  return RemoteGrader(NAME, server, judge, body=body, read=lambda answer: outcome(answer, drawn.tag))


def request(example: Example, completion: str, truncated: bool, settings: JudgeConfig, *, tag: str) -> dict[str, Any]:
  """Return the request body that asks for the critique of one completion; `tag` must be hard to guess."""
  return {
    'model': settings.model,
    'messages': [{'role': 'user', 'content': question(example, completion, truncated, settings.template, tag=tag)}],
    'temperature': settings.temperature,
    'max_tokens': settings.max_tokens,
  }


def question(example: Example, completion: str, truncated: bool, template: str, *, tag: str) -> str:
  """Return the judge's prompt, the template filled; `tag` marks the completion and the line with the score."""
  answer = f'<answer-{tag}>\n{completion}\n</answer-{tag}>'
  if truncated:
    answer += '\n(The answer was cut off here, at the limit of its length.)'
  truth = example.ground_truth
  if '{score}' not in template:
    template += '\n\nOn the line with the score, write "{score}" in place of "Score".'
  return template.format(
    question=chat_endpoint.conversation(example.messages),
    completion=answer,
    ground_truth=truth if isinstance(truth, str) else json.dumps(jsonable(truth), ensure_ascii=False),
    score=f'Score-{tag}',
  )


def outcome(answer: Any, tag: str) -> Outcome:
  """Return the outcome in a chat completion; raises json_server.Fault, worth another attempt, if it has no score."""
  content, cut = chat_endpoint.answered(answer)
  if len(content.splitlines()) > MAX_LINES:
    raise json_server.Fault(f"the judge's answer has more than {MAX_LINES} lines: {_end(content)}", again=True)
  score, critique = read_critique(content, tag)
  if score is None:
    hint = '; it was cut off, so raise environments.judge.max_tokens' if cut else ''
    raise json_server.Fault(
      f"the judge's answer has not one line 'Score-…: x' with x from 0 to 1{hint}: {_end(content)}", again=True
    )
  return Outcome(score, encodable(critique) or None, {'acc': score})


def read_critique(text: str, tag: str) -> tuple[float | None, str]:
  """Return the score and the critique in a judge's answer.

  The score is on the only line that begins with 'Score-<tag>:' (ignoring Markdown, capitals and a leading 'final',
  'overall' or 'total') and is neither quoted nor in a block of code, as a number from 0 to 1, a fraction (4/5) or a
  percentage; None if there is no such line, more than one, it holds anything else, or a block is not closed. The
  critique is the rest of the text without the judge's thinking.
  """
  lines = without_thinking(text).splitlines()
  found, closing = {}, ''
  for at, line in enumerate(lines):
    if closing:
      inside = closing not in line.lower() or (closing[0] in '`~' and line.strip(' \t`~'))
      closing = closing if inside else ''
    elif fence := _FENCE.match(line):
      closing = f'</{fence["name"].lower()}>' if fence['name'] else fence['mark'].replace('<!--', '-->')
      closing = '' if closing in line[fence.end() :].lower() else closing
    elif (match := _SCORE_LINE.fullmatch(line)) and match['tag'].lower() == tag:
      found[at] = _value(match['value'])
  critique = '\n'.join(line for at, line in enumerate(lines) if at not in found).strip()
  return found.popitem()[1] if len(found) == 1 and not closing else None, critique


def _value(text: str) -> float | None:
  match = _VALUE.fullmatch(text.strip().strip('*_`').strip().removesuffix('.'))
  if match is None:
    return None
  whole = 100.0 if match['percent'] else float(match['whole'] or 1.0)
  value = float(match['of']) / whole if whole else None
  return value if value is not None and 0.0 <= value <= 1.0 else None


def _end(text: str) -> str:
  """Return the end of a text, where the score was expected, as messages quote it."""
  return json_server.quoted('…' + text[-150:] if len(text) > 150 else text)
