"""Tool calls in the text of a model: parsing, checks, and rendering after an edit.

Two forms are known. `hermes`, of Qwen2.5, Qwen3 and Hermes, puts each call between tags:

    <tool_call>
    {"name": "read", "arguments": {"path": "a.py"}}
    </tool_call>

`llama3`, of Llama 3.1 and later, makes the whole answer a call, after <|python_tag|> if the template requires it:

    {"name": "read", "parameters": {"path": "a.py"}}

The chat template shows which form a model was trained with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import json
import math
import re
from typing import Any, Literal

from sdpo_jax.environments.thinking import without_thinking
from sdpo_jax.errors import UserError, short_repr

Form = Literal['hermes', 'llama3']
MAX_CALLS = 32  # The most calls of an answer.
MAX_DEPTH = 64  # The most levels of nested objects and lists in the arguments of a call.
# Marks by which templates of unsupported forms are recognized, and the models that use them.
_OTHERS = {
  '<function=': "Qwen3-Coder's",
  '[TOOL_CALLS]': "Mistral's",
  '<｜tool▁calls▁begin｜>': "DeepSeek's",
  '<|tool_calls_section_begin|>': "Kimi's",
  '<start_function_call>': "FunctionGemma's",
  '<function_calls>': "Olmo's",
  '<|channel|>': "gpt-oss's",
  '<arg_key>': "GLM's",
  '<|tool_call_start|>': "LFM2's",
  '<|tool_list_start|>': "LFM2's",
}
_OPEN, _CLOSE = '<tool_call>', '</tool_call>'
PYTHON_TAG = '<|python_tag|>'  # Llama 3's tag before a call that is not the whole answer.
_ARGUMENTS = {'hermes': 'arguments', 'llama3': 'parameters'}
_TAGS = re.compile(r'<(?=/?(?:tool_call|think)>|\|python_tag\|>)')  # The beginnings of tags.
_DECODER = json.JSONDecoder()
_SEPARATOR = re.compile(r'[\s;]*')
_HALF = re.compile('[\ud800-\udfff]')  # A lone surrogate, which JSON can hold and UTF-8 cannot.


@dataclasses.dataclass(frozen=True)
class ToolCall:
  """A call that a model proposes."""

  name: str
  arguments: Mapping[str, Any]

  def message(self) -> dict[str, Any]:
    """Return the call as chat templates take it in messages."""
    return {'type': 'function', 'function': {'name': self.name, 'arguments': dict(self.arguments)}}


@dataclasses.dataclass(frozen=True)
class Proposal:
  """The text of an answer and its tool calls."""

  text: str  # The text without calls.
  calls: Sequence[ToolCall]
  fault: str | None  # A sentence for the model on why a call is invalid; None: all are valid.


def form_of(template: str | None) -> Form:
  """Return the form in which a chat template writes tool calls.

  Raises:
    UserError: there is no template, it does not support tools, or its form is not supported.
  """
  if not template or 'tools' not in template:
    raise UserError(
      'The chat template of the model does not support tools: set model.chat_template to one that does, such as those '
      'of Qwen3, Hermes or Llama 3.1.'
    )
  for mark, whose in _OTHERS.items():
    if mark in template:
      raise UserError(
        f'The chat template of the model writes tool calls in {whose} form ({mark}), which is not supported: use a '
        'model or a template with those of Qwen3, Hermes or Llama 3.1.'
      )
  if _OPEN in template and 'arguments' in template:
    return 'hermes'
  if 'parameters' in template and ('ipython' in template or 'python_tag' in template):
    return 'llama3'
  raise UserError(
    'The chat template of the model writes tool calls in an unknown form: use a model or a template with those of '
    'Qwen3, Hermes or Llama 3.1.'
  )


def read_calls(text: str, form: Form) -> Proposal:
  """Parse the text and the calls of an answer, without its thinking.

  An invalid call and all calls after it are left out; `fault` says why.
  """
  shown = without_thinking(text)
  return _read_tagged(shown) if form == 'hermes' else _read_whole(shown)


def write_call(call: ToolCall, form: Form) -> str:
  """Render a call in the form in which the model writes it."""
  content = json.dumps({'name': call.name, _ARGUMENTS[form]: dict(call.arguments)}, ensure_ascii=False)
  content = _TAGS.sub(r'\\u003c', content)  # Of an argument, it must stay text.
  return f'{_OPEN}\n{content}\n{_CLOSE}' if form == 'hermes' else content


def cutting(stops: Sequence[str], form: Form) -> str | None:
  """Return a stop string that would cut off every call; None: there is none."""
  bare = write_call(ToolCall('', {}), form) + ('\n' if form == 'hermes' else '')
  return next((stop for stop in stops if stop in bare), None)


def _read_tagged(text: str) -> Proposal:
  said, calls, rest = [], [], text
  while True:
    before, opened, after = rest.partition(_OPEN)
    said.append(before.strip())
    if not opened:
      return _proposal(said, calls, None)
    if len(calls) == MAX_CALLS:
      return _proposal(said, calls, f'There are more than {MAX_CALLS} tool calls in one answer.')
    try:
      found, end = _DECODER.raw_decode(after, len(after) - len(after.lstrip()))
      behind, closed, rest = after[end:].partition(_CLOSE)  # Not the first tag: a text in the arguments may hold it.
      if closed and behind.strip():
        raise json.JSONDecodeError('Extra data', after, end)
      call = _call(found, 'arguments')
    except (ValueError, RecursionError) as error:
      call, closed = f'A tool call is not valid JSON: {_reason(error)}.', _CLOSE in after
    if not closed:
      return _proposal(said, calls, f'A tool call is not closed: {_CLOSE} is missing.')
    if isinstance(call, str):
      return _proposal(said, calls, call)
    calls.append(call)


def _read_whole(text: str) -> Proposal:
  tagged = PYTHON_TAG in text
  said, _, content = text.rpartition(PYTHON_TAG) if tagged else ('', '', text)
  position = _SEPARATOR.match(content).end()
  if not content[position:].startswith('{'):
    fault = 'The answer calls a tool in a form other than {"name": …, "parameters": {…}}.' if tagged else None
    return Proposal(text.replace(PYTHON_TAG, '').strip(), (), fault)
  calls: list[ToolCall] = []
  while position < len(content):
    if len(calls) == MAX_CALLS:
      return _proposal([said.strip()], calls, f'There are more than {MAX_CALLS} tool calls in one answer.')
    try:
      found, position = _DECODER.raw_decode(content, position)
    except (ValueError, RecursionError) as error:
      return _proposal([said.strip()], calls, f'A tool call is not valid JSON: {_reason(error)}.')
    if not calls and not (isinstance(found, dict) and 'name' in found):
      return Proposal(text.strip(), (), None)  # An answer in JSON that is not a call.
    call = _call(found, 'parameters')
    if isinstance(call, str):
      return _proposal([said.strip()], calls, call)
    calls.append(call)
    position = _SEPARATOR.match(content, position).end()
  return _proposal([said.strip()], calls, None)


def _call(found: Any, key: str) -> ToolCall | str:
  """Return a call, or a sentence on why it is invalid."""
  if not isinstance(found, dict) or not isinstance(found.get('name'), str) or not found['name']:
    return f'A tool call must be an object with "name" and "{key}", not {short_repr(found)}.'
  if further := found.keys() - {'name', key, 'id', 'type'}:
    return f'A tool call has "name" and "{key}", and not {short_repr(sorted(further)[0])}.'
  arguments = found.get(key, {})
  if not isinstance(arguments, dict):
    return f'The {key} of the tool call {short_repr(found["name"])} must be an object, not {short_repr(arguments)}.'
  if flaw := flaw_of(found['name']) or flaw_of(arguments):
    return f'The tool call {short_repr(found["name"])} holds {flaw}.'
  return ToolCall(found['name'], arguments)


def flaw_of(value: Any) -> str | None:
  """Return what is wrong with a JSON value that cannot be stored, sent or shown; None: nothing."""
  left = [(value, 0)]
  while left:
    found, depth = left.pop()
    if depth > MAX_DEPTH:
      return f'objects and lists in more than {MAX_DEPTH} others'
    if isinstance(found, float) and not math.isfinite(found):
      return 'a number that is not finite'
    if isinstance(found, str) and _HALF.search(found):
      return 'half of a character'
    if isinstance(found, Mapping):
      left += [(each, depth + 1) for each in (*found, *found.values())]
    elif isinstance(found, list):
      left += [(each, depth + 1) for each in found]
  return None


def _proposal(said: Sequence[str], calls: Sequence[ToolCall], fault: str | None) -> Proposal:
  return Proposal('\n'.join(filter(None, said)), tuple(calls), fault)


def _reason(error: Exception) -> str:
  if isinstance(error, json.JSONDecodeError):
    return f'{error.msg} at character {error.pos + 1}'
  return 'it is nested too deeply' if isinstance(error, RecursionError) else 'it holds a number of too many digits'
