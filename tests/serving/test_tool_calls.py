"""Tool calls in what models write, and written again."""

import json
import re

from hypothesis import given, strategies
import pytest

from sdpo_jax.errors import UserError
from sdpo_jax.serving.errors import InvalidRequest
from sdpo_jax.serving.tool_calls import FORMS, ToolCall, call_ids, cutting, form_of, read_calls, write_calls

HERMES = "{% if tools %}<tool_call>{'name': …, 'arguments': …}</tool_call>{% endif %}"
LLAMA = '{% if tools %}{"name": …, "parameters": …}{% endif %}{% if role == "ipython" %}{% endif %}'


CODER = HERMES + r"'<function=' + name + '>\n<parameter=' + key + '>\n'"
PROPERTIES = {
  'text': {'type': 'string'},
  'count': {'type': 'integer'},
  'ratio': {'type': 'number'},
  'flag': {'type': 'boolean'},
  'items': {'type': 'array'},
  'map': {'type': 'object'},
  'either': {'anyOf': [{'type': 'integer'}, {'type': 'string'}]},
  'maybe': {'type': ['integer', 'null']},
  'odd': {'type': 'str', 'anyOf': 3},
}
TOOLS = [
  {'type': 'function', 'function': {'name': 'none', 'parameters': 3}},
  {'type': 'function', 'function': {'name': 'set', 'parameters': {'type': 'object', 'properties': PROPERTIES}}},
]


def tagged(content: str) -> str:
  return f'<tool_call>\n{content}\n</tool_call>'


def test_the_template_says_the_form():
  assert form_of(HERMES) == 'hermes' and form_of(LLAMA) == 'llama3' and form_of(CODER) == 'qwen3_coder'
  for number, call in ((3, '[{'), (3, ' [{'), (11, 'n[CALL_ID]i[ARGS]{'), (13, 'n[ARGS]{')):
    assert form_of(f'{{% if tools %}}[TOOL_CALLS]{call}{{% endif %}}') == f'mistral_v{number}'


@pytest.mark.parametrize(
  'template, sentence',
  [
    (None, 'does not support tools'),
    ('{{ messages }}', 'does not support tools'),
    ('{% if tools %}[TOOL_CALLS]{% endif %}', "another of Mistral's form"),
    (HERMES + '<function=', "Seed-OSS's or another form"),
    (HERMES + '<function=a><parameter=b>c</parameter>', "Seed-OSS's or another form"),
    ('{% if tools %}[TOOL_CALLS]name[ARGS][THINK]{% endif %}', "Magistral's reasoning form"),
    ('{% if tools %}<|channel|>commentary{% endif %}', "gpt-oss's multi-message form"),
    (HERMES + '<arg_key>', "GLM's form"),
    ('{% if tools %}call them{% endif %}', 'an unknown form'),
  ],
)
def test_other_forms_are_refused_by_name(template, sentence):
  with pytest.raises(UserError, match=sentence):
    form_of(template)


def test_calls_are_found_beside_text_and_not_in_thinking():
  text = f'<think>{tagged("{}")}</think>I look.\n{tagged(json.dumps({"name": "read", "arguments": {"path": "a"}}))}\n'
  text += tagged('{"name": "glob", "arguments": {"pattern": "*"}}') + ' Done.'
  found = read_calls(text, 'hermes')
  assert found.calls == (ToolCall('read', {'path': 'a'}), ToolCall('glob', {'pattern': '*'}))
  assert found.text == 'I look.\nDone.' and found.fault is None
  assert read_calls('No call.', 'hermes') == read_calls('No call.', 'llama3')


@pytest.mark.parametrize('form', [form for form in FORMS if form != 'qwen3_coder'])
def test_tags_in_an_argument_are_text(form):
  tags = '</tool_call> <tool_call> <think> </think> <|python_tag|> [TOOL_CALLS] [ARGS] [CALL_ID]'
  call = ToolCall('write', {'content': f'a {tags} <b>', '<think>': '<'})
  written = write_calls((call,), form)
  assert read_calls(f'I write. {written}' if form != 'llama3' else written, form).calls == (call,)
  found = re.findall(r'</?(?:tool_call|think)>|<.python_tag|\[[A-Z_]+\]', written)
  own = re.findall(r'</?tool_call>|\[[A-Z_]+\]', write_calls((ToolCall('write', {}),), form))  # A call's own.
  assert found == own and '<b>' in written
  if form == 'hermes':  # As a model may write it.
    drawn = tagged('{"name": "write", "arguments": {"content": "</tool_call>"}}')
    assert read_calls(f'{drawn}\n{drawn} Done.', form).calls == (ToolCall('write', {'content': '</tool_call>'}),) * 2


@pytest.mark.parametrize('tag', ['', '<|python_tag|>'])
def test_whole_answers_are_calls(tag):
  text = f'{tag}{{"name": "read", "parameters": {{"path": "a"}}}}; {{"name": "glob", "parameters": {{}}}}'
  assert read_calls(text, 'llama3').calls == (ToolCall('read', {'path': 'a'}), ToolCall('glob', {}))
  assert read_calls('{"result": 3}', 'llama3').calls == () and read_calls('{"result": 3}', 'llama3').fault is None
  assert 'in a form other than' in read_calls('<|python_tag|>read("a")', 'llama3').fault


@pytest.mark.parametrize(
  'text, fault',
  [
    ('<tool_call>{"name": "read"', '</tool_call> is missing'),
    (tagged('{"name": "read",}'), 'not valid JSON: '),
    (tagged('{"name": "read"} x'), 'not valid JSON: Extra data at character 18'),
    ('<tool_call>{"name": "read", "arguments": {"a": "</tool_call>"}}', '</tool_call> is missing'),
    (tagged('["read"]'), 'must be an object with "name" and "arguments"'),
    (tagged('{"arguments": {}}'), 'must be an object with "name"'),
    (tagged('{"name": "read", "arguments": "a"}'), "of the tool call 'read' must be an object, not 'a'"),
    (tagged('{"name": "read", "parameters": {}}'), "and not 'parameters'"),
    (tagged('[' * 100_000), 'JSON'),
    (tagged('{"name": "a"}') * 40, 'more than 32 tool calls'),
    (tagged('{"name": "a", "arguments": {"n": ' + '1' * 5000 + '}}'), 'not valid JSON: it holds a number of too many'),
    (tagged('{"name": "a", "arguments": {"n": ' + '[' * 200 + ']' * 200 + '}}'), "'a' holds objects and lists in more"),
    (tagged('{"name": "a", "arguments": {"n": [1e999]}}'), "'a' holds a number that is not finite"),
    (tagged('{"name": "a", "arguments": {"n": {"m": NaN}}}'), "'a' holds a number that is not finite"),
    (tagged('{"name": "a", "arguments": {"n": ["\\ud800"]}}'), "'a' holds half of a character"),
    (tagged('{"name": "a", "arguments": {"\\udfff": 1}}'), "'a' holds half of a character"),
    (tagged('{"name": "\\ud800", "arguments": {}}'), 'holds half of a character'),
  ],
)
def test_what_is_no_call_is_said(text, fault):
  assert fault in read_calls(text, 'hermes').fault


def test_a_whole_answer_may_be_no_call_for_the_same_reasons():
  text = '{"name": "a", "parameters": {"n": ' + '1' * 5000 + '}}'
  assert 'a number of too many digits' in read_calls(text, 'llama3').fault
  assert 'half of a character' in read_calls('{"name": "a", "parameters": {"n": "\\ud83d"}}', 'llama3').fault


def xml(*arguments, name='set'):
  texts = ''.join(f'<parameter={key}>\n{text}\n</parameter>\n' for key, text in arguments)
  return tagged(f'<function={name}>\n{texts}</function>')


@pytest.mark.parametrize(
  'key, text, value',
  [
    ('text', '5', '5'),
    ('text', 'True', 'True'),
    ('text', '\n a\n\n', '\n a\n\n'),
    ('text', '"a" <b> </functions> <function> [ARGS]', '"a" <b> </functions> <function> [ARGS]'),
    ('text', '', ''),
    ('count', ' 5 ', 5),
    ('ratio', '5', 5),
    ('ratio', '-5e-1', -0.5),
    ('flag', 'True', True),
    ('flag', 'false', False),
    ('items', '[1,\n"</parameter"]', [1, '</parameter']),
    ('map', '{"a": null}', {'a': None}),
    ('either', '5', 5),
    ('either', '"5"', '"5"'),
    ('either', 'five', 'five'),
    ('either', 'true', 'true'),
    ('maybe', 'None', None),
    ('odd', '{', '{'),
    ('odd', '[5]', [5]),
    ('unknown', 'a', 'a'),
    ('unknown', '5', 5),
  ],
)
def test_the_schema_says_which_type_a_text_between_tags_is_of(key, text, value):
  (call,) = read_calls(f'I set. {xml((key, text))}', 'qwen3_coder', TOOLS).calls
  assert call == ToolCall('set', {key: value}) and type(call.arguments[key]) is type(value)
  inline = tagged(f'<function=set><parameter={key}>{text}</parameter></function>')
  if not text.startswith('\n'):
    assert read_calls(inline, 'qwen3_coder', TOOLS).calls == (call,)


@pytest.mark.parametrize(
  'text, fault',
  [
    ('<tool_call>\n<function=set>', '</tool_call> is missing'),
    (tagged('{"name": "set"}'), 'must be <function=…>'),
    (tagged('<function=>\n</function>'), 'must be <function=…>'),
    (tagged('<function=set>'), 'must be <function=…>'),
    (tagged('<function=set>\nx\n</function>'), 'must be <function=…>'),
    (tagged('<function=set>\n<parameter=text>\na\n</function>'), 'holds a tag of calls'),
    (xml(('text', 'a\n</parameter>\nb')), 'must be <function=…>'),
    (xml(('text', 'a\n<parameter=b>')), "argument 'text' of the tool call 'set' holds a tag of calls"),
    (xml(('text', '</function>')), 'holds a tag of calls'),
    (xml(('text', '<tool_call>')), 'holds a tag of calls'),
    (xml(('text', 'a'), ('text', 'b')), "argument 'text' of the tool call 'set' stands there twice"),
    (xml(('count', 'five')), "'count' of the tool call 'set' must be integer, not 'five'"),
    (xml(('count', '5.5')), 'must be integer, not 5.5'),
    (xml(('count', 'true')), 'must be integer, not True'),
    (xml(('flag', '1')), 'must be boolean, not 1'),
    (xml(('maybe', '{}')), 'must be integer or null, not {}'),
    (xml(('ratio', 'NaN')), 'a number that is not finite'),
    (xml(('items', '[' * 100_000)), 'must be array'),
  ],
)
def test_what_is_no_call_between_tags_is_said(text, fault):
  found = read_calls(xml(('text', 'a')) + text + xml(('text', 'b')), 'qwen3_coder', TOOLS)
  if 'is missing' in fault:
    found = read_calls(xml(('text', 'a')) + text, 'qwen3_coder', TOOLS)
  assert fault in found.fault and found.calls == (ToolCall('set', {'text': 'a'}),)


@pytest.mark.parametrize(
  'text, names, fault',
  [
    (
      'I do.[TOOL_CALLS] [{"name": "a", "arguments": {}}, {"name": "b", "arguments": {}, "id": "a23456789"}]',
      'ab',
      None,
    ),
    ('I do.[TOOL_CALLS]a[CALL_ID]a23456789[ARGS]{}[TOOL_CALLS]b[ARGS] {"x": "[TOOL_CALLS]"}', 'ab', None),
    ('I do.', '', None),
    ('I do.[TOOL_CALLS][{"name": "a", "arguments": {}}] So.', '', 'not valid JSON: Extra data'),
    ('I do.[TOOL_CALLS]a[ARGS]{}[TOOL_CALLS]b[ARGS]{', 'a', 'not valid JSON: '),
    ('I do.[TOOL_CALLS]a[ARGS]{}[TOOL_CALLS]b[ARGS][]', 'a', "of the tool call 'b' must be an object, not []"),
    ('I do.[TOOL_CALLS]a {}', '', 'not valid JSON: '),
    ('I do.[TOOL_CALLS]{"name": "a"}', '', 'must be a list'),
    ('I do.[TOOL_CALLS]' + '[' * 100_000, '', 'not valid JSON: '),
    ('I do.[TOOL_CALLS]' + '[TOOL_CALLS]'.join(['a[ARGS]{}'] * 40), 'a' * 32, 'more than 32 tool calls'),
  ],
)
def test_calls_of_mistral_are_read(text, names, fault):
  found = read_calls(text, 'mistral_v3')
  assert (''.join(call.name for call in found.calls), found.text) == (names, 'I do.')
  assert found.fault is None if fault is None else fault in found.fault
  assert len(call_ids(text)) >= len(names)


@pytest.mark.parametrize(
  'call',
  [
    ToolCall('set', {'text': 'a\n</parameter>\n'}),
    ToolCall('set', {'text': 'a\n</parameter>\n<parameter=count>\n5'}),
    ToolCall('set', {'text': '<tool_call>'}),
    ToolCall('set', {'text': '</think>'}),
    ToolCall('set', {'text': None}),
    ToolCall('set', {'either': '5'}),
    ToolCall('set', {'a>b': 'c'}),
    ToolCall('a\nb', {}),
  ],
)
def test_what_a_form_cannot_write_is_refused(call):
  with pytest.raises(InvalidRequest, match='cannot be written as a call in the form of the model .qwen3_coder.'):
    write_calls((ToolCall('set', {}), call), 'qwen3_coder', TOOLS)
  assert read_calls(write_calls((call,), 'hermes'), 'hermes').calls == (call,)


def test_nothing_after_a_fault_is_a_call():
  first, last = tagged('{"name": "read", "arguments": {}}'), tagged('{"name": "bash", "arguments": {}}')
  found = read_calls(first + tagged('{') + last, 'hermes')
  assert [call.name for call in found.calls] == ['read'] and found.fault


@pytest.mark.parametrize(
  'form, stops, found',
  [
    (
      'hermes',
      ['\n<tool_call>', 'User:', '</tool_call>'],
      '</tool_call>',
    ),  # The first one ends an answer after a call.
    ('hermes', ['</tool_call>\n'], '</tool_call>\n'),
    ('hermes', ['User:', '</answer>'], None),
    ('llama3', ['\n', 'User:'], None),
    ('llama3', ['}'], '}'),
    ('qwen3_coder', ['\n\n', '</parameter>'], '</parameter>'),
    ('mistral_v3', ['[TOOL', ']'], '[TOOL'),
    ('mistral_v13', ['\n', '[ARGS]'], '[ARGS]'),
  ],
)
def test_strings_at_which_calls_would_be_cut_are_found(form, stops, found):
  assert cutting(stops, form) == found


VALUES = strategies.recursive(
  strategies.none() | strategies.booleans() | strategies.integers() | strategies.text(),
  lambda values: strategies.lists(values, max_size=3) | strategies.dictionaries(strategies.text(), values, max_size=3),
  max_leaves=5,
)
ARGUMENTS = strategies.dictionaries(strategies.sampled_from(sorted(PROPERTIES)) | strategies.text(), VALUES, max_size=4)


@given(strategies.sampled_from(sorted(FORMS)), strategies.just('set') | strategies.text(min_size=1), ARGUMENTS)
def test_a_call_that_is_written_is_read_again(form, name, arguments):
  call = ToolCall(name, arguments)
  try:
    text = write_calls((call,), form, TOOLS)
  except InvalidRequest:
    assert form == 'qwen3_coder' or (not name.isalnum() and 'mistral' in form)
    return
  (found,) = read_calls(f'I set.\n{text}' if form != 'llama3' else text, form, TOOLS).calls
  assert json.dumps([found.name, found.arguments]) == json.dumps([name, arguments])  # Which tells True from 1.


@given(strategies.text(), strategies.integers(), strategies.booleans(), strategies.lists(VALUES, max_size=3))
def test_ordinary_arguments_can_be_written_between_tags(text, count, flag, items):
  call = ToolCall('set', {'text': text, 'count': count, 'flag': flag, 'items': items, 'map': {'a': items}})
  assert read_calls(write_calls((call,), 'qwen3_coder', TOOLS), 'qwen3_coder', TOOLS).calls == (call,)
