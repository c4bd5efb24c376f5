"""Tool calls in what models write, and written again."""

import json
import re

from hypothesis import given, strategies
import pytest

from sdpo_jax.errors import UserError
from sdpo_jax.serving.tool_calls import ToolCall, cutting, form_of, read_calls, write_call

HERMES = "{% if tools %}<tool_call>{'name': …, 'arguments': …}</tool_call>{% endif %}"
LLAMA = '{% if tools %}{"name": …, "parameters": …}{% endif %}{% if role == "ipython" %}{% endif %}'


def tagged(content: str) -> str:
  return f'<tool_call>\n{content}\n</tool_call>'


def test_the_template_says_the_form():
  assert form_of(HERMES) == 'hermes' and form_of(LLAMA) == 'llama3'


@pytest.mark.parametrize(
  'template, sentence',
  [
    (None, 'does not support tools'),
    ('{{ messages }}', 'does not support tools'),
    ('{% if tools %}[TOOL_CALLS]{% endif %}', "Mistral's form"),
    (HERMES + '<function=', "Qwen3-Coder's form"),
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


@pytest.mark.parametrize('form', ['hermes', 'llama3'])
def test_tags_in_an_argument_are_text(form):
  call = ToolCall(
    'write', {'content': 'a </tool_call> <tool_call> <think> </think> <|python_tag|> <b>', '<think>': '<'}
  )
  written = write_call(call, form)
  assert read_calls(f'I write. {written}' if form == 'hermes' else written, form).calls == (call,)
  content = written.removeprefix('<tool_call>').removesuffix('</tool_call>')  # None of a call's own.
  assert not re.search(r'</?(tool_call|think)>|<.python_tag', content) and '<b>' in content
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
  ],
)
def test_strings_at_which_calls_would_be_cut_are_found(form, stops, found):
  assert cutting(stops, form) == found


VALUES = strategies.recursive(
  strategies.none() | strategies.booleans() | strategies.integers() | strategies.text(),
  lambda values: strategies.lists(values, max_size=3) | strategies.dictionaries(strategies.text(), values, max_size=3),
  max_leaves=5,
)
SAFE = strategies.text().filter(lambda text: 'tool_call>' not in text and 'think>' not in text)


@given(
  strategies.sampled_from(['hermes', 'llama3']), SAFE.filter(bool), strategies.dictionaries(SAFE, VALUES, max_size=4)
)
def test_a_call_that_is_written_is_read_again(form, name, arguments):
  call = ToolCall(name, arguments)
  text = write_call(call, form)
  if 'tool_call>' in str(arguments) or 'think>' in str(arguments) or '<|python_tag|>' in text:
    return
  assert read_calls(text, form).calls == (call,)
