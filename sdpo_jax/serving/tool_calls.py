"""Tool calls in the text of a model: parsing, checks, and rendering after an edit.

Each form is declared in `FORMS`. `hermes`, of Qwen2.5, Qwen3 and Hermes, puts each call between tags:

    <tool_call>
    {"name": "read", "arguments": {"path": "a.py"}}
    </tool_call>

`qwen3_coder`, of Qwen3-Coder, Qwen3.5 and Nemotron 3, too, but with the text of each argument between tags of its own,
so that only the schema of the tool says which type it has:

    <tool_call>
    <function=read>
    <parameter=path>
    a.py
    </parameter>
    </function>
    </tool_call>

`llama3`, of Llama 3.1 and later, makes the whole answer a call, after <|python_tag|> if the template requires it:

    {"name": "read", "parameters": {"path": "a.py"}}

The forms of Mistral have the number of the first version of its tokenizer that they came with:

    [TOOL_CALLS][{"name": "read", "arguments": {"path": "a.py"}, "id": "0f3b2c1d9"}]
    [TOOL_CALLS]read[CALL_ID]0f3b2c1d9[ARGS]{"path": "a.py"}
    [TOOL_CALLS]read[ARGS]{"path": "a.py"}

The chat template shows which form a model was trained with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import functools
import hashlib
import json
import math
import re
from typing import Any, Literal

from sdpo_jax.environments.thinking import without_thinking
from sdpo_jax.errors import UserError, short_repr
from sdpo_jax.serving.errors import InvalidRequest

Form = Literal['hermes', 'qwen3_coder', 'llama3', 'mistral_v3', 'mistral_v11', 'mistral_v13']
Tools = Sequence[Mapping[str, Any]]  # JSON schemas, as in chat templates.
MAX_CALLS = 32  # The most calls of an answer.
MAX_DEPTH = 64  # The most levels of nested objects and lists in the arguments of a call.
# Marks by which templates of unsupported forms are recognized, and the models that use them.
_OTHERS = {
  '<function=': "Functionary's, Seed-OSS's or another",
  '[THINK]': "Magistral's reasoning",
  '[TOOL_CALLS]': "another of Mistral's",
  '<｜tool▁calls▁begin｜>': "DeepSeek's",
  '<|tool_calls_section_begin|>': "Kimi's",
  '<start_function_call>': "FunctionGemma's",
  '<function_calls>': "Olmo's",
  '<|channel|>': "gpt-oss's multi-message",  # A result has the name of its tool, and several tokens end a turn.
  '<arg_key>': "GLM's",
  '<|tool_call_start|>': "LFM2's",
  '<|tool_list_start|>': "LFM2's",
}
_KNOWN = 'Qwen3, Qwen3-Coder, Hermes, Llama 3.1 or Mistral'
_OPEN, _CLOSE = '<tool_call>', '</tool_call>'
_PYTHON_TAG = '<|python_tag|>'  # Llama 3's tag before a call that is not the whole answer.
_CALLS, _CALL_ID, _ARGS = '[TOOL_CALLS]', '[CALL_ID]', '[ARGS]'
# The beginnings of tags.
_TAGS = re.compile(
  r'<(?=/?(?:tool_call|think|function|parameter)[>=]|\|python_tag\|>)|\[(?=(?:TOOL_CALLS|CALL_ID|ARGS)\])'
)
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


@dataclasses.dataclass(frozen=True)
class CallForm:
  """How the models of a family write tool calls."""

  signs: Sequence[str]  # Patterns that are all found in a chat template with this form.
  tags: Sequence[str]  # The tags, which can be special tokens; the first one begins the calls of an answer.
  joint: str  # What stands between a text and the calls after it.
  read: Callable[[str, Tools], Proposal]  # Parses an answer without its thinking.
  write: Callable[[Sequence[ToolCall]], str]  # Renders the calls of an answer.


def form_of(template: str | None) -> Form:
  """Return the form in which a chat template writes tool calls.

  Raises:
    UserError: there is no template, it does not support tools, or its form is not supported.
  """
  if not template or 'tools' not in template:
    raise UserError(
      'The chat template of the model does not support tools: set model.chat_template to one that does, such as those '
      f'of {_KNOWN}.'
    )
  found = next((name for name, form in FORMS.items() if all(re.search(sign, template) for sign in form.signs)), None)
  own = FORMS[found].tags if found else ()
  for mark, whose in _OTHERS.items():
    if mark in template and mark not in own:
      raise UserError(
        f'The chat template of the model writes tool calls in {whose} form ({mark}), which is not supported: use a '
        f'model or a template with those of {_KNOWN}.'
      )
  if found is None:
    raise UserError(
      f'The chat template of the model writes tool calls in an unknown form: use a model or a template with those of '
      f'{_KNOWN}.'
    )
  return found


def read_calls(text: str, form: Form, tools: Tools = ()) -> Proposal:
  """Parse the text and the calls of an answer, without its thinking.

  An invalid call and all calls after it are left out; `fault` says why.

  Args:
    text: the text of the answer.
    form: the form of its calls.
    tools: the schemas of the tools, by which some forms tell numbers and texts apart.
  """
  return FORMS[form].read(without_thinking(text), tools)


def write_calls(calls: Sequence[ToolCall], form: Form, tools: Tools = (), said: str = '') -> str:
  """Render the calls of an answer in the form in which the model writes them.

  Args:
    calls: the calls.
    form: the form.
    tools: the schemas of the tools, with which the calls are read again.
    said: the text of the answer before the calls.

  Raises:
    InvalidRequest: the form has no text that is read as these calls.
  """
  written = FORMS[form].write(calls)
  found = read_calls(written, form, tools)
  if (tuple(found.calls), found.text, found.fault) != (tuple(calls), '', None):
    raise InvalidRequest(
      f'These arguments cannot be written as a call in the form of the model ({form}): change them, for example tags '
      'in a text, or values of a type that the schema of the tool does not allow.',
      field='arguments',
    )
  return said + FORMS[form].joint + written if said else written


def call_ids(text: str) -> list[str]:
  """Return the ids, of nine characters, of Mistral's calls in an answer; numbers for those that have none."""
  ids = [found.get('id') if isinstance(found, dict) else None for found in _found(without_thinking(text))[1]]
  return [id if isinstance(id, str) and len(id) == 9 else f'{number:09}' for number, id in enumerate(ids)]


def cutting(stops: Sequence[str], form: Form) -> str | None:
  """Return a stop string that would cut off every call; None: there is none."""
  bare = FORMS[form].write((ToolCall('', {'': 'qzx'}),))
  bare += '\n' if bare.endswith(_CLOSE) else ''
  return next((stop for stop in stops if stop in bare), None)


# Tags around each call.

Taken = tuple[ToolCall | str, str | None]  # A call, or why it is none, and the text after it; None: it is not closed.


def _read_tagged(take: Callable[[str, Tools], Taken], text: str, tools: Tools) -> Proposal:
  said: list[str] = []

  def calls() -> Iterator[ToolCall | str]:
    rest: str | None = text
    while rest is not None:
      before, opened, after = rest.partition(_OPEN)
      said.append(before.strip())
      if not opened:
        return
      call, rest = take(after, tools)
      yield f'A tool call is not closed: {_CLOSE} is missing.' if rest is None else call

  return _proposal(said, calls())


def _take_json(after: str, _: Tools) -> Taken:
  try:
    found, end = _DECODER.raw_decode(after, len(after) - len(after.lstrip()))
    behind, closed, rest = after[end:].partition(_CLOSE)  # Not the first tag: a text in the arguments may hold it.
    if closed and behind.strip():
      raise json.JSONDecodeError('Extra data', after, end)
    return _call(found, 'arguments'), rest if closed else None
  except (ValueError, RecursionError) as error:
    return _not_json(error), '' if _CLOSE in after else None


_FUNCTION = re.compile(r'\s*<function=([^<>\n]+)>')
_PARAMETER = re.compile(r'\s*<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>', re.DOTALL)
_END = re.compile(r'\s*</function>\s*</tool_call>')
_STRUCTURE = re.compile(r'<(?:function|parameter)=|</function>|</?tool_call>')
_PYTHON = {'True': True, 'False': False, 'None': None}  # As templates write these values.
_TYPES = {'string': str, 'integer': int, 'number': (int, float), 'boolean': bool, 'object': dict, 'array': list}
_TYPES['null'] = type(None)


def _take_xml(after: str, tools: Tools) -> Taken:
  opened, arguments, fault = _FUNCTION.match(after), {}, None
  name, at = (opened[1], opened.end()) if opened else ('', 0)
  while opened and fault is None and (found := _PARAMETER.match(after, at)):
    key, text = found.groups()
    at, kinds = found.end(), _kinds(tools, name, key)
    if key in arguments or _STRUCTURE.search(text):
      why = 'stands there twice' if key in arguments else 'holds a tag of calls'
      fault = f'The argument {short_repr(key)} of the tool call {short_repr(name)} {why}.'
    elif not _allowed(value := _value(text, kinds), kinds):
      fault = (
        f'The argument {short_repr(key)} of the tool call {short_repr(name)} must be {" or ".join(sorted(kinds))}, '
      )
      fault += f'not {short_repr(value)}.'
    arguments[key] = value if fault is None else None
  end = _END.match(after, at)
  if fault is None and not (opened and end):
    fault = 'A tool call must be <function=…>, then <parameter=…> … </parameter> for each argument, and </function>.'
  if fault is not None:
    return fault, '' if _CLOSE in after else None
  return _call({'name': name, 'arguments': arguments}, 'arguments'), after[end.end() :]


def _kinds(tools: Tools, name: str, key: str) -> set[str]:
  """Return the types that the schema of a tool allows for an argument; none: any."""
  found: Any = next((each for tool in tools if (each := tool.get('function', tool)).get('name') == name), None)
  for step in ('parameters', 'properties', key):
    found = found.get(step) if isinstance(found, Mapping) else None
  if not isinstance(found, Mapping):
    return set()
  schemas = [found, *(each for word in ('anyOf', 'oneOf') if isinstance(found.get(word), list) for each in found[word])]
  types = [each.get('type') for each in schemas if isinstance(each, Mapping)]
  return {kind for each in types for kind in (each if isinstance(each, list) else [each]) if str(kind) in _TYPES}


def _value(text: str, kinds: set[str]) -> Any:
  """Return an argument: a text, unless it is JSON of another type that is allowed."""
  try:
    found = _PYTHON[text.strip()] if text.strip() in _PYTHON else json.loads(text)
  except (ValueError, RecursionError):
    return text
  return found if not isinstance(found, str) and (_allowed(found, kinds) or 'string' not in kinds) else text


def _allowed(value: Any, kinds: set[str]) -> bool:
  if isinstance(value, bool):
    return not kinds or 'boolean' in kinds
  return not kinds or any(isinstance(value, _TYPES[kind]) for kind in kinds)


def _write_json(calls: Sequence[ToolCall]) -> str:
  return '\n'.join(f'{_OPEN}\n{_json(_named(call, "arguments"))}\n{_CLOSE}' for call in calls)


def _write_xml(calls: Sequence[ToolCall]) -> str:
  def written(call: ToolCall) -> str:
    # As templates do, and hence Python's True and None.
    texts = {key: _json(each) if isinstance(each, (dict, list)) else str(each) for key, each in call.arguments.items()}
    arguments = ''.join(f'<parameter={key}>\n{text}\n</parameter>\n' for key, text in texts.items())
    return f'{_OPEN}\n<function={call.name}>\n{arguments}</function>\n{_CLOSE}'

  return '\n'.join(map(written, calls))


# Answers that are calls.


def _read_whole(text: str, _: Tools) -> Proposal:
  tagged = _PYTHON_TAG in text
  said, _, content = text.rpartition(_PYTHON_TAG) if tagged else ('', '', text)
  position = _SEPARATOR.match(content).end()
  if not content[position:].startswith('{'):
    fault = 'The answer calls a tool in a form other than {"name": …, "parameters": {…}}.' if tagged else None
    return Proposal(text.replace(_PYTHON_TAG, '').strip(), (), fault)
  found, fault = [], None
  try:
    while position < len(content):
      value, position = _DECODER.raw_decode(content, position)
      found.append(value)
      position = _SEPARATOR.match(content, position).end()
  except (ValueError, RecursionError) as error:
    fault = _not_json(error)
  if found and not (isinstance(found[0], dict) and 'name' in found[0]):
    return Proposal(text.strip(), (), None)  # An answer in JSON that is not a call.
  return _proposal([said.strip()], _calls(found, 'parameters', fault))


# Mistral's tags.

_NAME = re.compile(r'([^\s\[\]{}]+)(?:\[CALL_ID\](\w+))?\[ARGS\]\s*')


def _read_mistral(text: str, _: Tools) -> Proposal:
  said, found, fault = _found(text)
  return _proposal([said], _calls(found, 'arguments', fault))


def _found(text: str) -> tuple[str, list[Any], str | None]:
  """Return the text before Mistral's calls, the calls as they are in JSON, and why the rest is invalid."""
  said, tagged, rest = text.partition(_CALLS)
  found: list[Any] = []
  try:
    while tagged:
      rest = rest.lstrip()
      name = _NAME.match(rest)
      value, end = _DECODER.raw_decode(rest, name.end() if name else 0)
      behind, tagged, after = rest[end:].partition(_CALLS)
      if behind.strip():
        raise json.JSONDecodeError('Extra data', rest, end)
      if not name and not isinstance(value, list):
        return said.strip(), found, f'Tool calls after {_CALLS} must be a list, not {short_repr(value)}.'
      found += [{'name': name[1], 'arguments': value, 'id': name[2]}] if name else value
      rest = after
  except (ValueError, RecursionError) as error:
    return said.strip(), found, _not_json(error)
  return said.strip(), found, None


def _write_list(calls: Sequence[ToolCall]) -> str:
  objects = [{**_named(call, 'arguments'), 'id': _id(call, number)} for number, call in enumerate(calls)]
  return f'{_CALLS}[{", ".join(map(_json, objects))}]'


def _write_arguments(identified: bool, calls: Sequence[ToolCall]) -> str:
  ids = [_CALL_ID + _id(call, number) if identified else '' for number, call in enumerate(calls)]
  return ''.join(
    f'{_CALLS}{call.name}{id}{_ARGS}{_json(dict(call.arguments))}' for call, id in zip(calls, ids, strict=True)
  )


def _id(call: ToolCall, number: int) -> str:
  return hashlib.sha256(f'{number} {_json(_named(call, "arguments"))}'.encode()).hexdigest()[:9]


# JSON.

_TOO_MANY = f'There are more than {MAX_CALLS} tool calls in one answer.'


def _named(call: ToolCall, key: str) -> dict[str, Any]:
  return {'name': call.name, key: dict(call.arguments)}


def _json(value: Any) -> str:
  """Write JSON in which what would be a tag stays text."""
  return _TAGS.sub(lambda tag: f'\\u{ord(tag[0]):04x}', json.dumps(value, ensure_ascii=False))


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


def _calls(found: Sequence[Any], key: str, fault: str | None) -> Iterator[ToolCall | str]:
  """Yield the calls in JSON values, each or why it is none, and at the end why what follows them is none."""
  yield from (_call(each, key) for each in found)
  if fault is not None:
    yield fault


def _proposal(said: Sequence[str], calls: Iterable[ToolCall | str]) -> Proposal:
  """Return the proposal with the calls up to the first that is none, but a sentence on why."""
  found, fault = [], None
  for call in calls:
    fault = _TOO_MANY if len(found) == MAX_CALLS else call if isinstance(call, str) else None
    if fault is not None:
      break
    found.append(call)
  return Proposal('\n'.join(filter(None, said)), tuple(found), fault)


def _not_json(error: Exception) -> str:
  why = 'it is nested too deeply' if isinstance(error, RecursionError) else 'it holds a number of too many digits'
  if isinstance(error, json.JSONDecodeError):
    why = f'{error.msg} at character {error.pos + 1}'
  return f'A tool call is not valid JSON: {why}.'


_BRACKETS = (_CALLS, _CALL_ID, _ARGS)
FORMS: Mapping[Form, CallForm] = {
  'qwen3_coder': CallForm(
    (_OPEN, '<function=', r'<parameter=[^<]*>(\\n|\n)'),
    (_OPEN, _CLOSE, '<function='),
    '\n\n',
    functools.partial(_read_tagged, _take_xml),
    _write_xml,
  ),
  'hermes': CallForm(
    (_OPEN, 'arguments'), (_OPEN, _CLOSE), '\n', functools.partial(_read_tagged, _take_json), _write_json
  ),
  'mistral_v11': CallForm(
    (r'\[ARGS\]', r'\[CALL_ID\]'), _BRACKETS, '', _read_mistral, functools.partial(_write_arguments, True)
  ),
  'mistral_v13': CallForm((r'\[ARGS\]',), _BRACKETS, '', _read_mistral, functools.partial(_write_arguments, False)),
  'mistral_v3': CallForm((r'\[TOOL_CALLS\] ?\[',), _BRACKETS, '', _read_mistral, _write_list),
  'llama3': CallForm(
    ('parameters', 'ipython|python_tag'),
    (_PYTHON_TAG,),
    _PYTHON_TAG,
    _read_whole,
    lambda calls: '\n'.join(_json(_named(call, 'parameters')) for call in calls),
  ),
}
