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

from sdpo_jax.config import EnvironmentsConfig
from sdpo_jax.config.fields import fields_of
from sdpo_jax.environments import chat_endpoint, json_server
from sdpo_jax.environments.outcomes import encodable
from sdpo_jax.environments.registry import register_factory
from sdpo_jax.environments.remote import RemoteGrader
from sdpo_jax.environments.thinking import without_thinking
from sdpo_jax.errors import UserError
from sdpo_jax.files import jsonable
from sdpo_jax.types import Example, Outcome

NAME = 'judge'
_ADVICE = 'Let environments.judge.template ask for this line with {score}, or take another environments.judge.model'
MAX_LINES = 10_000  # Lines of an answer that are searched for the score.
_DECORATION = r'[\s*_#-]*'  # Markdown around the line with the score; not that of quotations and code.
_ITEM = r'(?:[-*+]|\d{1,3}[.)])\s'
_SCORE_LINE = re.compile(  # As the other expressions, for lower case.
  rf' {{0,3}}(?![ \t])(?:{_ITEM})?{_DECORATION}(?:(?:final|overall|total)\s+)?score-([0-9a-z]+){_DECORATION}:(.*)'
)
_LINE_END = re.compile(r'\r\n?|\n')  # As in Markdown; str.splitlines knows others.
_IGNORED = re.compile('[\u200b\u2060\ufeff]|(?<=\\w)[ \\t]+(?=>)')  # What is invisible; spaces at the end of a tag.
_FENCE = re.compile(
  rf'\s*+(?:{_ITEM}\s*+)*+'
  r'(?:(?P<before>(?!>).*[^`](?=`{3}[\w+-]+\s*$))?(?P<mark>`{3,}|~{3,}|"{3}|\'{3}|<!--)'
  r'|(?:.*(?=<answer-))?<(?P<name>blockquote|pre|code|quote|q|samp|details|answer[\w-]*)\b)'
)
# A quoted line that ends in a paragraph, and a line that cannot continue that paragraph.
_QUOTED = re.compile(rf'\s*+(?:{_ITEM}\s*+)*+>[\s>]*+(?!`{{3}}|~{{3}}|#)\S')
_BEGINNING = re.compile(rf'\s*+(?:>|#{{1,6}}\s|{_ITEM}|(?:[-*_]\s*){{3,}}$|$)')
_NUMBER = r'(?:\d+(?:\.\d*)?|\.\d+)'
_VALUE = re.compile(rf'(?P<of>{_NUMBER})\s*(?:/\s*(?P<whole>{_NUMBER})|(?P<percent>%))?', re.ASCII)


@register_factory(NAME)
def make(settings: EnvironmentsConfig) -> RemoteGrader:
  """Return the grader of `environments.judge`; raises UserError if the endpoint or the model's name is missing."""
  judge, prefix = settings.judge, 'environments.judge.'
  server = chat_endpoint.connect(judge, prefix, address='base_url', needs_key=False)
  if not judge.model.strip():
    raise UserError(f'{prefix}model is empty: set it to the name of the judging model at the endpoint.')
  drawn = threading.local()  # A request is made and its answer read in the same thread.

  def body(*part: Any) -> dict[str, Any]:
    drawn.tag = secrets.token_hex(8)
    messages = [{'role': 'user', 'content': question(*part, judge.template, tag=drawn.tag)}]
    sampling = {'temperature': judge.temperature, 'max_tokens': judge.max_tokens}
    return {'model': judge.model, 'messages': messages, **sampling}

  return RemoteGrader(NAME, server, judge, body=body, read=lambda answer: outcome(answer, drawn.tag))


def question(example: Example, completion: str, truncated: bool, template: str, *, tag: str) -> str:
  """Return the judge's prompt, the template filled; `tag`, hard to guess, marks completion and line with the score."""
  answer = f'<answer-{tag}>\n{completion}\n</answer-{tag}>'
  if truncated:
    answer += '\n(The answer was cut off here, at the limit of its length.)'
  truth = example.ground_truth
  if 'score' not in fields_of(template):
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
  long = len(content.splitlines()) > MAX_LINES
  score, critique = (None, '') if long else read_critique(content, tag, cut=cut)
  if score is None:
    hint = '; it was cut off, so raise environments.judge.max_tokens' if cut else ''
    line = f'has more than {MAX_LINES} lines' if long else "does not have exactly one line 'Score-…: x', x from 0 to 1"
    raise json_server.Fault(f"the judge's answer {line}{hint}: {_end(content)}", again=True, advice=_ADVICE)
  return Outcome(score, encodable(critique) or None, {'acc': score})


def read_critique(text: str, tag: str, *, cut: bool = False) -> tuple[float | None, str]:
  """Return the score and the critique in a judge's answer.

  The score is on the line that begins with 'Score-<tag>:' (ignoring Markdown, capitals and a leading 'final', 'overall'
  or 'total') and is neither quoted nor in a block of code, as a number from 0 to 1, a fraction (4/5) or a percentage;
  None if there is no such line, several that differ, it holds anything else, or a block is not closed. The critique is
  the rest of the text without the judge's thinking. A score in thinking that is not closed counts if there is no other
  one and the answer was not `cut` off at its limit.
  """
  said = without_thinking(text)
  found = _scores(said, tag, cut)
  critique = '\n'.join(line for at, line in enumerate(_LINE_END.split(said)) if at not in found).strip()
  if not found and not cut:
    found = _scores(without_thinking(text, unfinished=False), tag, cut)
  return found.popitem()[1] if len(set(found.values())) == 1 else None, critique


def _scores(text: str, tag: str, cut: bool) -> dict[int, float | None]:
  """Return the lines with a score, by index; None: not valid. A block that is not closed hides one more, not valid.

  A tag that is never closed begins no block, unless it stands for an answer, or the text was `cut` off; nor does such a
  fence at the end of a line, as in "The code: ```python". A line directly after a quoted one belongs to the quotation,
  as in Markdown.
  """
  lines = _LINE_END.split(_IGNORED.sub('', text.lower()))
  ends = {end: at for at, line in enumerate(lines) for end in re.findall(r'</[\w-]+>', line) or [line.strip()]}
  found, closing, name, depth, quoted = {}, '', '', 0, False
  for at, line in enumerate(lines):
    if closing:
      depth += line.count(f'<{name}') - line.count(closing)
      within = depth > 0 and (cut or at < ends.get(closing, 0)) if name else closing[0] in '`~' and line.strip(' \t`~')
      closing = closing if closing not in line or within else ''
    elif fence := _FENCE.match(line):
      name, rest = fence['name'] or '', line[fence.end() :]
      closing = f'</{name}>' if name else fence['mark'].replace('<!--', '-->')
      stays = cut or (name.startswith('answer') and not rest.partition('>')[2].strip())
      depth = line.count(f'<{name}') - rest.count(closing) if name else closing not in rest
      if depth <= 0 or ((name or fence['before']) and ends.get(closing, 0) <= at and not stays):
        closing = ''
      quoted = quoted and not closing
    else:
      quoted = bool(_QUOTED.match(line)) or (quoted and not _BEGINNING.match(line))
      if not quoted and (match := _SCORE_LINE.fullmatch(line)) and match[1] == tag:
        found[at] = _value(match[2])
  return found | ({len(lines): None} if closing else {})


def _value(text: str) -> float | None:
  match = _VALUE.fullmatch(text.strip().removesuffix('<br>').strip('*_`').strip().removesuffix('.'))
  if match is None:
    return None
  whole = 100.0 if match['percent'] else float(match['whole'] or 1.0)
  value = float(match['of']) / whole if whole else None
  return value if value is not None and 0.0 <= value <= 1.0 else None


def _end(text: str) -> str:
  """Return the end of a text, where the score was expected, as messages quote it."""
  return json_server.quoted('…' + text[-150:] if len(text) > 150 else text)
