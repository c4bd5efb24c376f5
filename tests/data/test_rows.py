"""Rows of both schemas become examples; every fault names the file, the line and the field."""

import builtins
import csv
import io
import json

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from sdpo_jax.data import rows, sources
from sdpo_jax.errors import UserError
from tests.data.reference_rows import CALLS, CODE, RAW

TESTS = {'inputs': ['1', '2'], 'outputs': ['2', '3'], 'testtype': 'functional', 'fn_name': 'f', 'time_limit': 6}
# A ground truth that passes for each environment.
TRUTHS = {'code': json.dumps(TESTS), 'tooluse': json.dumps(CALLS), 'math': '\\frac{1}{2}'}
READY = {
  'data_source': 'gsm8k',
  'prompt': [{'role': 'user', 'content': '1 + 1?'}],
  'ability': 'math',
  'reward_model': {'style': 'math', 'ground_truth': '2'},
  'extra_info': {'split': 'train', 'index': '9'},
}


def row(value):
  return rows.RawRow('rows.json, line 3', 3, value)


@pytest.mark.parametrize('value', [RAW, {**CODE, 'tests': TRUTHS['code']}, READY], ids=['raw', 'code', 'preprocessed'])
def test_a_row_asks_the_same_whether_it_is_graded_or_not(value):
  assert rows.conversation(row(value)) == rows.example(row(value), 'train').messages


def test_a_row_without_grader_may_hold_its_messages():
  messages = [{'role': 'user', 'content': '1 + 1?'}, {'role': 'assistant', 'content': '3'}]
  messages.append({'role': 'user', 'content': 'Sure?'})
  assert rows.conversation(row({'messages': messages})) == rows.conversation(row({'prompt': messages})) == messages
  assert rows.conversation(row({'prompt': '1 + 1?'})) == messages[:1]


def test_a_raw_row():
  example = rows.example(row(RAW), 'train')
  assert example.messages == [
    {'role': 'system', 'content': '\nAnswer with a letter.\n'},
    {'role': 'user', 'content': RAW['prompt']},
  ]
  assert (example.id, example.environment, example.data_source, example.ground_truth) == (
    'sciknoweval/743',
    'mcq',
    'sciknoweval',
    'B',
  )
  assert example.extra['split'] == 'train' and example.extra['elo'] == 1500 and example.extra['achievement_prior'] == 0


def test_the_preprocessed_form_of_a_raw_row_is_the_reference_s():
  assert rows.preprocess(row({**CODE, 'achievement_prior': 0.4}), 'train') == {
    'data_source': 'livecodebench',
    'prompt': [{'role': 'user', 'content': 'Write def f(x) and (self)'}],
    'ability': 'code',
    'reward_model': {'style': 'code', 'ground_truth': '{"inputs": []}'},
    'extra_info': {
      'split': 'train',
      'index': '743',
      'description': 'def f(x)',
      'problem': 'Write def f(x) and (self)',
      'elo': 1500,
      'achievement_prior': 0.4,
    },
  }
  held_out = rows.preprocess(row({**CODE, 'achievement_prior': 0.4}), 'test')
  assert held_out['extra_info']['achievement_prior'] == 0  # The reference reads it for training rows only.


def test_an_empty_system_prompt_is_a_message_and_a_null_one_is_not():
  assert len(rows.example(row({**RAW, 'system': ''}), 'train').messages) == 2
  assert len(rows.example(row({**RAW, 'system': None}), 'train').messages) == 1
  assert len(rows.example(row({k: v for k, v in RAW.items() if k != 'system'}), 'train').messages) == 1


def test_a_preprocessed_row():
  example = rows.example(row(READY), 'train')
  assert (example.id, example.environment, example.ground_truth) == ('gsm8k/9', 'math', '2')
  assert rows.example(row(rows.preprocess(row(RAW), 'train')), 'train') == rows.example(row(RAW), 'train')


@pytest.mark.parametrize(
  ('source', 'environment'), [*rows.ENVIRONMENTS.items(), ('mine', 'own'), ('sciknoweval', 'own')]
)
def test_the_environment_follows_the_data_source_or_the_row(source, environment):
  named = {'environment': 'own'} if environment == 'own' else {}
  value = {**RAW, 'dataset': source, 'answer': TRUTHS.get(environment, 'B'), **named}
  assert rows.example(row(value), 'train').environment == environment


@pytest.mark.parametrize(
  ('value', 'message'),
  [
    ({k: v for k, v in RAW.items() if k != 'prompt'}, "'prompt' or 'messages' is missing; there is: 'idx', 'kind'"),
    ({k: v for k, v in RAW.items() if k != 'answer'}, "'answer' is missing or empty, but .*'ground_truth' and 'sol"),
    (
      {k: v for k, v in RAW.items() if k != 'dataset'},
      "no environment grades the data source 'data'.*data.environment",
    ),
    ({'prompt': 'What?'}, "no environment grades the data source 'data'.*field 'environment'"),
    ({k: v for k, v in CODE.items() if k != 'tests'}, "'tests' is missing or empty, but the row is graded by it[.]"),
    ({**RAW, 'kind': 7}, "'kind' must be a non-empty string, not 7"),
    ({**RAW, 'dataset': ''}, "'dataset' must be a non-empty string"),
    (
      {**RAW, 'prompt': [{'role': 'user', 'content': 'x'}] + [{'role': 'assistant', 'content': 'y'}]},
      "the assistant's",
    ),
    ({**RAW, 'messages': 'x'}, "'messages' must be a non-empty list of messages"),
    ({**CODE, 'tests': None}, "'tests' must be a non-empty string, not None"),
    ({**RAW, 'prompt': ' \n'}, "'prompt' must be a non-empty string"),
    ({**RAW, 'prompt': 7}, "'prompt' must be a non-empty string, not 7"),
    ({**RAW, 'answer': 4}, "'answer' must be a non-empty string, not 4"),
    ({**RAW, 'system': ['x']}, "'system' must be a string or null"),
    ({**RAW, 'dataset': 'mine'}, "no environment grades the data source 'mine'.*field 'environment'"),
    ({**RAW, 'environment': 3}, "field 'environment' must be the name of a grader, a list .* not 3"),
    ([1], r'a row must be an object with named fields, not \[1\]'),
    ({**READY, 'prompt': '1 + 1?'}, "'prompt' must be a non-empty list of messages"),
    ({**READY, 'prompt': []}, "'prompt' must be a non-empty list of messages"),
    ({**READY, 'prompt': [{'role': 'user'}]}, "'role' and 'content'"),
    ({**READY, 'prompt': [{'role': 'user', 'content': ''}]}, 'last message, which asks the question, is empty'),
    ({**READY, 'reward_model': {'style': 'math'}}, "'ground_truth'"),
    ({**READY, 'extra_info': 'x'}, "'extra_info' must be an object"),
  ],
)
def test_a_malformed_row_is_named(value, message):
  with pytest.raises(UserError, match=f'(?s)^rows.json, line 3: .*{message}'):
    rows.example(row(value), 'train')


USER = [{'role': 'user', 'content': '1 + 1?'}]


@pytest.mark.parametrize(
  ('value', 'truth'),
  [
    ({'prompt': '1 + 1?', 'answer': '2'}, '2'),
    ({'prompt': '1 + 1?', 'solution': '2'}, '2'),  # TRL's columns.
    ({'prompt': USER, 'solution': '2', 'answer': None}, '2'),
    ({'messages': USER, 'ground_truth': '2', 'solution': 'It is 2.'}, '2'),
    ({'prompt': '1 + 1?', 'answer': '2', 'ground_truth': '3', 'dataset': 'mine', 'kind': 'sum'}, '2'),
    ({'prompt': '1 + 1?', 'answer': '2', 'environment': 'math'}, '2'),
  ],
)
def test_a_row_of_ones_own_needs_a_prompt_and_what_the_grader_reads(value, truth):
  defaults = dict(default_source='rows', default_environment='mcq' if 'environment' in value else 'math')
  example = rows.example(row(value), 'train', **defaults)
  assert example.messages == USER and example.ground_truth == truth and example.environment == 'math'
  source = value.get('dataset', 'rows')
  assert (example.id, example.data_source, example.extra['ability']) == (
    f'{source}/3',
    source,
    value.get('kind', 'math'),
  )


def test_the_grader_is_the_row_s_then_that_of_its_data_source_then_the_default():
  named = {'prompt': 'x', 'answer': 'B'}
  for more, environment in (({}, 'own'), ({'dataset': 'gsm8k'}, 'math'), ({'dataset': 'mine'}, 'own')):
    assert rows.example(row(named | more), 'train', default_environment='own').environment == environment
    assert rows.example(row(named | more | {'environment': 'mcq'}), 'train').environment == 'mcq'
  # A file's name is no data source of the reference.
  assert rows.example(row(named), 'train', default_source='gsm8k', default_environment='mcq').environment == 'mcq'
  assert rows.example(row(READY), 'train', default_environment='mcq').environment == 'math'
  assert rows.example(row({**READY, 'data_source': 'x'}), 'train', default_environment='math').environment == 'math'


def test_a_grader_of_ones_own_may_read_anything_and_sees_every_column():
  value = {'id': 'q7', 'prompt': '1 + 1?', 'system': 'Add.', 'answer': [1, 2], 'rubric': {'max': 3}}
  example = rows.example(row(value), 'train', default_environment='own')
  assert example.id == 'data/q7' and example.ground_truth == [1, 2]
  assert example.messages == [{'role': 'system', 'content': 'Add.'}, *USER]
  assert example.columns == value
  assert rows.example(row({'prompt': 'x'}), 'train', default_environment='own').ground_truth is None
  columns = rows.example(row({**RAW, 'rubric': 1, 'embedding': [0.5]}), 'train').columns
  assert columns['rubric'] == 1 and 'embedding' not in columns


def test_unit_tests_grade_code_without_a_kind():
  value = {'prompt': 'f?', 'answer': 'no', 'tests': json.dumps(TESTS)}
  assert rows.example(row(value), 'train', default_environment='code').ground_truth == json.dumps(TESTS)
  assert rows.example(row(value), 'train', default_environment='math').ground_truth == 'no'


def test_a_system_prompt_goes_before_messages_that_have_none():
  system = {'role': 'system', 'content': 'S'}
  assert rows.conversation(row({'prompt': USER, 'system': 'S'})) == [system, *USER]
  assert rows.conversation(row({'messages': [system, *USER], 'system': 'other'})) == [system, *USER]


def test_sound_ground_truths_pass():
  for tests in (
    TESTS,
    {**TESTS, 'testtype': 'stdin', 'fn_name': ''},
    {**TESTS, 'testtype': 'code', 'outputs': [None, None], 'time_limit': 0.5},
    {**TESTS, 'inputs': [{'a': 1}, {'a': 2}], 'context': 'import math'},
    {**TESTS, 'inputs': ['\0', '\u2028']},
  ):
    assert rows.example(row({**CODE, 'tests': json.dumps(tests)}), 'train').ground_truth == json.dumps(tests)
  for arguments in ('{}', {'name': 'x'}, '{"user": {"name": "x"}}'):
    calls = json.dumps([{'Action': '[Optional]find', 'Action_Input': arguments}])
    value = {**RAW, 'kind': 'tooluse', 'dataset': 'tooluse', 'answer': calls}
    assert rows.example(row(value), 'train').ground_truth == calls


@pytest.mark.parametrize(
  ('tests', 'message'),
  [
    ('print(1)', "'tests', which 'code' grades by, is not JSON: Expecting value at line 1, column 1"),
    ('[' * 100_000, 'is not JSON: it is nested too deeply'),
    ('[' + '9' * 5000 + ']', 'is not JSON: Exceeds the limit'),
    ('[]', r'must be a JSON object of unit tests, not \[\]'),
    ('{}', "lacks 'inputs' and 'outputs' and 'testtype' and 'time_limit'"),
    ({'time_limit': ...}, "lacks 'time_limit'"),
    ({'outputs': ['2']}, '2 inputs and 1 outputs'),
    ({'inputs': [], 'outputs': []}, 'at least one, not 0 inputs'),
    ({'inputs': '12'}, "a list as 'inputs', not '12'"),
    ({'testtype': 'weird'}, "'testtype' of functional, stdin, code, not 'weird'"),
    ({'testtype': ['stdin']}, "'testtype' of functional, stdin, code"),
    ({'fn_name': ''}, "'fn_name' for functional tests"),
    ({'time_limit': 0}, "positive number of seconds as 'time_limit', not 0"),
    ({'time_limit': True}, "positive number of seconds as 'time_limit', not True"),
    ({'time_limit': float('inf')}, "positive number of seconds as 'time_limit', not inf"),
    ({'time_limit': 10**400}, "positive number of seconds as 'time_limit', not 1000"),
    ({'time_limit': '6'}, "positive number of seconds as 'time_limit', not '6'"),
  ],
)
def test_unusable_unit_tests_are_named(tests, message):
  if isinstance(tests, dict):
    tests = json.dumps({key: value for key, value in {**TESTS, **tests}.items() if value is not ...})
  with pytest.raises(UserError, match=f'(?s)^rows.json, line 3: .*{message}'):
    rows.example(row({**CODE, 'tests': tests}), 'train')


@pytest.mark.parametrize(
  ('environment', 'truth', 'message'),
  [
    ('tooluse', 'find(x)', 'is not JSON'),
    ('tooluse', '{}', 'non-empty JSON list of calls'),
    ('tooluse', '[]', 'non-empty JSON list of calls'),
    ('tooluse', '["find"]', "'Action' and 'Action_Input', not 'find'"),
    ('tooluse', '[{"Action": "find"}]', "'Action' and 'Action_Input'"),
    ('tooluse', '[{"Action": "find", "Action_Input": "{x}"}]', "call of 'find' whose 'Action_Input' is not JSON"),
    ('tooluse', '[{"Action": "find", "Action_Input": "[1]"}]', "'Action_Input' must be a JSON object"),
    ('mcq', 'b', 'letter of the right choice, such as "A", not \'b\''),
    ('mcq', 'A\n', 'letter of the right choice'),
    ('gpqa', 'Option B', 'letter of the right choice'),
  ],
)
def test_an_unusable_answer_is_named(environment, truth, message):
  value = {**RAW, 'environment': environment, 'answer': truth}
  with pytest.raises(UserError, match=f"line 3: field 'answer', which '{environment}' grades by, .*{message}"):
    rows.example(row(value), 'train')
  ready = {**READY, 'environment': environment, 'reward_model': {'ground_truth': truth}}
  with pytest.raises(UserError, match="field 'reward_model.ground_truth'"):
    rows.example(row(ready), 'train')


@pytest.mark.parametrize(
  'value', [{**RAW, 'prompt': 'What \ud800 is?'}, {**RAW, 'system': '\udfff'}, {**RAW, 'idx': '\ud800'}]
)
def test_half_of_a_character_is_refused_and_a_nul_is_text(value):
  with pytest.raises(UserError, match='line 3: half of a character'):
    rows.example(row(value), 'train')
  assert rows.example(row({**RAW, 'prompt': 'a\0b'}), 'train').messages[-1]['content'] == 'a\0b'


ANY_JSON = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
  lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
  max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(
  good=st.sampled_from([RAW, {**CODE, 'tests': json.dumps(TESTS)}, {**RAW, 'environment': 'tooluse'}, READY]),
  field=st.sampled_from(sorted({*RAW, *READY, 'environment'})),
  value=ANY_JSON | ANY_JSON.map(json.dumps) | ANY_JSON.map(lambda x: {'ground_truth': x}),
)
def test_whatever_a_field_holds_the_row_loads_or_is_named(good, field, value):
  try:
    rows.example(row({**good, field: value}), 'train')
  except UserError as error:
    assert str(error).startswith('rows.json, line 3: ') and len(str(error)) < 500
  except Exception as error:
    raise AssertionError(f'{field}={value!r}') from error


@settings(max_examples=100, deadline=None)
@given(content=st.binary(max_size=30) | ANY_JSON.map(lambda value: json.dumps(value).encode()))
def test_whatever_a_file_holds_its_rows_are_read_or_the_file_is_named(tmp_path_factory, content):
  try:
    read(tmp_path_factory.mktemp('rows'), content)
  except UserError as error:
    assert 'rows.json' in str(error)


def read(tmp_path, content, name='rows.json'):
  path = tmp_path / name
  path.write_bytes(content if isinstance(content, bytes) else content.encode())
  return sources.read_rows(str(path), 'data.train_files')


def test_json_lines_keep_their_line_numbers(tmp_path):
  found = read(tmp_path, '{"a": 1}\n\n  \n{"a": "x\u2028y"}\r\n')
  assert [(r.value['a'], r.number) for r in found] == [(1, 1), ('x\u2028y', 4)]
  assert found[1].origin.endswith('rows.json, line 4')


def test_lines_of_a_text_file_are_prompts(tmp_path):
  found = read(tmp_path, '\ufeffWhat?\n\n  {"a": 1}\u2028and so on \r\n', 'rows.txt')
  assert [(r.value, r.number) for r in found] == [({'prompt': 'What?'}, 1), ({'prompt': '{"a": 1}\u2028and so on'}, 3)]
  asked = [rows.example(r, 'train', default_source='rows', default_environment='none') for r in found]
  assert [(e.messages, e.environment, e.id) for e in asked[:1]] == [
    ([{'role': 'user', 'content': 'What?'}], 'none', 'rows/1')
  ]
  with pytest.raises(UserError, match="rows.txt, line 1: field 'answer' is missing"):
    rows.example(found[0], 'train', default_environment='math')
  with pytest.raises(UserError, match='data.train_files: .*rows.txt.* holds no rows'):
    read(tmp_path, '\n \n', 'rows.txt')


def test_rows_of_a_json_array_keep_the_line_where_they_begin(tmp_path):
  found = read(tmp_path, '\ufeff \n[ {"a":\n 1},\n\n{"a": 2}, {"a": 3}\n]\n')
  assert [(r.value['a'], r.number) for r in found] == [(1, 2), (2, 5), (3, 5)]


@settings(max_examples=40, deadline=None)
@given(
  values=st.lists(st.dictionaries(st.text(max_size=4), st.text(max_size=6) | st.integers()), min_size=1, max_size=5),
  indent=st.none() | st.integers(0, 3),
)
def test_arrays_and_lines_read_the_same(tmp_path_factory, values, indent):
  folder = tmp_path_factory.mktemp('rows')
  array = read(folder, json.dumps(values, indent=indent))
  lines = read(folder, '\n'.join(json.dumps(v, ensure_ascii=False) for v in values))
  assert [r.value for r in array] == [r.value for r in lines] == values


@pytest.mark.parametrize(
  ('content', 'message'),
  [
    ('{"a": 1}\n{"a": \n', 'line 2: invalid JSON at column'),
    ('{"a": 1}\nnot json\n', 'line 2: invalid JSON at column 1'),
    ('[{"a": 1},\n{"a": }]', 'line 2: invalid JSON'),
    ('[{"a": 1}\n\n{"a": 2}]', "line 3: invalid JSON: expected ',' or ']'"),
    ('[{"a": 1},\n]', 'line 2: invalid JSON'),
    ('[{"a": 1}', 'line 1: invalid JSON'),
    ('[{"a": 1}]\n{"b": 2}', 'line 2: invalid JSON: text after the end'),
    ('{"a": 1}\n{"a": "\xff"}'.encode('latin-1'), r'line 2: the file is not UTF-8 text .*: save it as UTF-8'),
    ('{"a": 1}'.encode('utf-16-le'), 'line 1: invalid JSON'),
    ('{"a": 1}\n{"a": ' + '[' * 100_000, 'line 2: invalid JSON: nested too deeply'),
    ('[{"a": 1},\n{"a": ' + '[' * 100_000, 'line 2: invalid JSON: nested too deeply'),
    ('{"a": ' + '1' * 5000 + '}', 'line 1: invalid JSON: Exceeds the limit'),
    ('', 'holds no rows'),
    ('[]', 'holds no rows'),
    (' \n ', 'holds no rows'),
  ],
)
def test_a_malformed_file_names_the_line(tmp_path, content, message):
  with pytest.raises(UserError, match=message):
    read(tmp_path, content)


def test_a_file_of_another_kind_is_said_to_be_read_as_json(tmp_path):
  with pytest.raises(UserError, match=r'line 1: invalid JSON at .*; only \.csv, .* are not read as JSON'):
    read(tmp_path, 'prompt\tanswer\n', 'rows.tsv')
  with pytest.raises(UserError, match=r'line 1: invalid JSON at column 2: [^;]*\.$'):
    read(tmp_path, '{x', 'rows.JSON')


def test_csv_has_a_header_and_keeps_its_line_numbers(tmp_path):
  text = '\ufeffprompt, answer,system\r\n"1 + 1, in\n""words""?",2,\r\n\r\n3?, 3 ,S\r\n'
  found = read(tmp_path, text, 'rows.csv')
  assert [(r.origin[-6:], r.number, r.value) for r in found] == [
    ('line 2', 2, {'prompt': '1 + 1, in\n"words"?', 'answer': '2'}),
    ('line 5', 5, {'prompt': '3?', 'answer': ' 3 ', 'system': 'S'}),
  ]
  assert len(read(tmp_path, 'prompt\n' + 'x' * 1_000_000, 'rows.csv')[0].value['prompt']) == 1_000_000


@settings(max_examples=40, deadline=None)
@given(
  values=st.lists(
    st.lists(
      st.text(st.characters(codec='utf-8', exclude_characters='\0'), min_size=1, max_size=8), min_size=2, max_size=2
    ),
    min_size=1,
    max_size=4,
  )
)
def test_csv_reads_what_the_csv_module_writes(tmp_path_factory, values):
  buffer = io.StringIO(newline='')
  csv.writer(buffer).writerows([['prompt', 'answer'], *values])
  found = read(tmp_path_factory.mktemp('rows'), buffer.getvalue(), 'rows.csv')
  assert [list(r.value.values()) for r in found] == values


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('prompt,answer\n1,2\n1\n', 'line 3: 1 cells, but the header names 2 columns'),
    ('prompt;answer\n1;2\n', "line 1: commas must separate columns, not as in 'prompt;answer'"),
    ('prompt,answer\n\n1,"2" x\n', 'line 3: invalid CSV'),
    ('prompt,answer\n1,"2\n\n', 'line 2: invalid CSV: unexpected end of data'),
    ('prompt,prompt\n1,2', 'line 1: a header must name every column, each differently'),
    ('\nprompt,\n1,2', 'line 2: a header must name every column'),
    ('prompt,answer\n', 'holds no rows'),
    ('', 'holds no rows'),
    ('prompt,answer\n1,\xff'.encode('latin-1'), r'line 2: the file is not UTF-8 text .*: save it as UTF-8'),
  ],
)
def test_malformed_csv_names_the_line(tmp_path, text, message):
  with pytest.raises(UserError, match=f'rows.csv.*{message}'):
    read(tmp_path, text, 'rows.csv')


@pytest.mark.parametrize(
  'source', ['rows.jsonl', 'a/b.c/rows.csv', 'gs://bucket/rows.parquet', 'hf:me/rows?split=test[:3]', 'hf:/data/rows']
)
def test_the_stem_of_a_source(source):
  assert sources.stem(source) == 'rows'


@pytest.mark.parametrize('name', ['missing.json', ''])
def test_a_missing_file_names_the_setting(tmp_path, name):
  with pytest.raises(UserError, match='data.val_files: there is no file'):
    sources.read_rows(str(tmp_path / name), 'data.val_files')


def test_parquet_needs_pyarrow_and_says_so(tmp_path, monkeypatch):
  real = builtins.__import__

  def without(name, *args, **kwargs):
    if name.startswith('pyarrow'):
      raise ImportError(name)
    return real(name, *args, **kwargs)

  monkeypatch.setattr(builtins, '__import__', without)
  with pytest.raises(UserError, match='pip install pyarrow'):
    read(tmp_path, b'PAR1', 'rows.parquet')


def test_parquet_rows(tmp_path):
  pyarrow = pytest.importorskip('pyarrow')
  parquet = pytest.importorskip('pyarrow.parquet')
  ready = [rows.preprocess(row({**RAW, 'idx': i}), 'train') for i in range(3)]
  buffer = io.BytesIO()
  parquet.write_table(pyarrow.Table.from_pylist(ready), buffer)
  found = read(tmp_path, buffer.getvalue(), 'rows.parquet')
  assert [rows.example(r, 'train').id for r in found] == [f'sciknoweval/{i}' for i in range(3)]
  assert found[2].origin.endswith('rows.parquet, row 3')
  with pytest.raises(UserError, match='not a readable parquet file'):
    read(tmp_path, b'PAR1 broken', 'rows.parquet')
  texts = pyarrow.Array.from_buffers(pyarrow.string(), 1, pyarrow.array([b'\xff']).buffers())
  times = pyarrow.array([10**15], pyarrow.timestamp('s'))
  for wrong in ([texts, texts], ['prompt', 'answer']), ([times], ['at']), ([times, times], ['at', 'at']):
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.table(wrong[0], names=wrong[1]), buffer)
    with pytest.raises(UserError, match='^[^\n]*not a readable parquet file[^\n]*$'):
      read(tmp_path, buffer.getvalue(), 'rows.parquet')


def test_capitals_and_addresses_of_files(tmp_path):
  assert read(tmp_path, b'prompt\nQ\n', 'ROWS.CSV')[0].value == {'prompt': 'Q'}
  with pytest.raises(UserError, match=r"^--data: 'https://x/rows.csv' cannot be read: 'https://' is not known: name a"):
    sources.read_rows('https://x/rows.csv', '--data')
