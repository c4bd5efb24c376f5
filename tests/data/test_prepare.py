"""The converters: rows in each source's own schema become the reference's rows, and nothing else is written."""

import base64
import datetime
import json
import pickle
import re
import zlib

import numpy as np
import pytest

from sdpo_jax.data import prepare, rows, sources
from sdpo_jax.data.converters import livecodebench, mathematics, raw, sciknoweval, tooluse
from sdpo_jax.errors import UserError
from tests import tiny


@pytest.fixture
def convert(tmp_path):
  def convert(name, parts, **options):
    """Return the rows of each file that is written, read back, and what was announced."""
    folder, output, said = tmp_path / 'in', tmp_path / 'out', []
    folder.mkdir(exist_ok=True)
    for part, values in parts.items():
      (folder / f'{part}.jsonl').write_text('\n'.join(map(json.dumps, values)))
    prepare.prepare(name, raw.ConversionOptions(**options), output, str(folder), said.append)

    def read(file):
      return [row.value for row in sources.read_rows(str(file), '')]

    return {file.stem: read(file) for file in sorted(output.iterdir())}, said

  return convert


def examples(values, split):
  return [rows.example(rows.RawRow('', at, value), split) for at, value in enumerate(values)]


# SciKnowEval.


def mcq(number=0, **changes):
  return {
    'question': f'Q{number}?',
    'choices': {'text': ['one', 'two\n', 'three', 'four'], 'label': ['A', 'B', 'C', 'D']},
    'answerKey': 'B',
    'type': 'mcq-4-choices',
    'domain': 'Chemistry',
    'details': {'level': 'L3', 'task': 't', 'subtask': 's'},
    'answer': '',
  } | changes


def test_sciknoweval_rows_are_the_reference_s_to_the_letter(convert):
  two = {'text': ['no', 'yes'], 'label': ['A', 'B']}
  made, _ = convert('sciknoweval', {'test': [mcq(), mcq(1, choices=two, type='mcq-2-choices')]}, domain='chemistry')
  values = sorted(made['train'] + made['test'], key=lambda value: value['idx'])
  assert values[0] == {
    'idx': 0,
    'kind': 'mcq',
    'dataset': 'sciknoweval',
    'answer': 'B',
    'elo': 1500,
    'prompt': 'Q0?\n\nA: one\nB: two\n\nC: three\nD: four\nPlease reason step by step.',
    'description': 'Q0? The solution will be evaluated in a mcq environment.',
    'tests': '-',
    'embedding': [],
    'system': (
      '\nGiven a question and four options, please select the right answer. Respond in the following '
      'format:\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>\n\nFor the answer, only output the letter '
      'corresponding to the correct option (A, B, C, or D), and nothing else. Do not restate the answer text. For '
      'example, if the answer is "A", just output:\n<answer>\nA\n</answer>\n'
    ),
  }
  assert values[1]['prompt'] == 'Q1?\n\nA: no\nB: yes\nPlease reason step by step.'
  assert {e.environment for e in examples(values, 'train')} == {'mcq'}


def test_sciknoweval_keeps_multiple_choice_of_level_3_and_one_domain(convert):
  others = [
    mcq(domain='Biology'),
    mcq(type='true_or_false', choices=None),
    mcq(details={'level': 'L2'}),
    mcq(type='open-ended-qa', answerKey=''),
  ]
  wanted = [mcq(number) for number in range(7)]
  made, _ = convert('sciknoweval', {'test': [*others, *wanted[:3], *others, *wanted[3:]]}, domain='chemistry')
  assert len(made['train']) == 6 and len(made['test']) == 1
  prompts = {value['idx']: value['prompt'][:3] for value in made['train'] + made['test']}
  assert prompts == {number: f'Q{number}?' for number in range(7)}  # Numbered after the choice, in the source's order.


@pytest.mark.parametrize('count', [2, 10, 11, 500, 935])
def test_sciknoweval_is_split_as_hugging_face_datasets_does(count):
  import datasets  # With pandas.

  wanted = datasets.Dataset.from_dict({'idx': range(count)}).train_test_split(test_size=0.1, seed=42)
  train, test = sciknoweval.split(count)
  assert train.tolist() == wanted['train']['idx'][:] and test.tolist() == wanted['test']['idx'][:]


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'choices': {'text': ['one'], 'label': ['A', 'B']}}, "'choices' has 1 texts for the labels"),
    ({'answerKey': 'E'}, "'answerKey' is 'E'"),
    ({'choices': None}, "'choices.text' is missing|'choices' .*not None"),
    ({'question': 3}, "'question' must be of type str, not 3"),
    ({'details': {}}, "'details.level' is missing: is this the right source"),
  ],
)
def test_a_row_outside_the_source_s_schema_is_named_and_nothing_is_written(convert, tmp_path, change, message):
  convert('sciknoweval', {'test': [mcq(), mcq(1)]}, domain='chemistry')
  before = {file: file.read_bytes() for file in (tmp_path / 'out').iterdir()}
  with pytest.raises(UserError, match=f'test.jsonl, line 2: .*({message})'):
    convert('sciknoweval', {'test': [mcq(9), mcq(**change), mcq(8)]}, domain='chemistry')
  assert {file: file.read_bytes() for file in (tmp_path / 'out').iterdir()} == before


def test_a_row_that_training_would_refuse_is_refused_by_its_name_in_the_source(convert):
  labels = {'text': ['one', 'two'], 'label': ['1', '2']}
  with pytest.raises(UserError, match="test.jsonl, line 1: field 'answer', which 'mcq' grades by"):
    convert('sciknoweval', {'test': [mcq(choices=labels, answerKey='1'), mcq()]}, domain='chemistry')


def test_sizes_and_the_licence_are_announced(convert):
  values = [mcq(number) for number in range(10)]
  _, said = convert('sciknoweval', {'test': values}, domain='chemistry')
  assert re.search(r'train.json: 9 rows; the file of the paper has 1890', said[0])
  assert said[2] == 'Licence of the data: MIT, as its data set card says.'
  _, said = convert('sciknoweval', {'test': [mcq(number) for number in range(2100)]}, domain='chemistry')
  assert said[0].endswith('train.json: 1,890 rows.') and said[1].endswith('test.json: 210 rows.')


def test_a_domain_without_rows_says_so(convert):
  with pytest.raises(UserError, match="no L3 multiple-choice question of the domain 'physics'"):
    convert('sciknoweval', {'test': [mcq()]}, domain='physics')


# Tool use.

FIND, SEND = ('find', '{"name": "x"}'), ('send', '{"to": {"id": 1}}')


def step_of(call):
  return [[*call, 'thought'], 'observation']


def api(**changes):
  return {
    'Name': 'Post',
    'Description': 'Letters {and} parcels',
    'NLDocumentation': 'find: Finds.\nParameters: {"name": "string."}\nsend: Sends.\n',
    'Function_Description': {'find': '…', 'send': '…', 'components': ''},
    'Instructions': ['Find x.\n', 'Send it.'],
    'Golden_Answers': [
      [{'Action': 'find', 'Action_Input': FIND[1]}],
      [{'Action': 'find', 'Action_Input': FIND[1]}, {'Action': 'send', 'Action_Input': '{"to": ${id from find}}'}],
    ],
    'Instances': [
      {
        'input': 'Send x.\nHint: use 1',
        'intermediate_steps': [step_of(FIND), step_of(('getDetails', '{}')), step_of(SEND)],
      }
    ],
  } | changes


def test_tool_use_rows_have_the_reference_s_layout(convert):
  made, said = convert('tooluse', {'train_data': [api()], 'eval_simulated': [api()]})
  prompt = (
    "Your task is to answer the user's question using available tools. \nYou have access to the following tools:\n"
    'Name: Post\nDescription: Letters {and} parcels\nDocumentation:\nfind: Finds.\nParameters: {"name": "string."}\n'
    'send: Sends.\n\nUse the following format:\nThought: you should always think about what to do\nAction: the action '
    'to take, should be one of the tool names.\nAction Input: the input to the action, must be in JSON format. All of '
    'the action input must be realistic and from the user.\n\nBegin!\nQuestion: '
  )
  # The second question cannot be answered without what the first call returns: it is left out.
  assert made['test'] == [
    {
      'idx': 1,
      'kind': 'tooluse',
      'dataset': 'tooluse',
      'answer': '[{"Action": "find", "Action_Input": "{\\"name\\": \\"x\\"}"}]',
      'elo': 1500,
      'prompt': prompt + 'Find x.\n',
      'description': prompt + 'Find x.\n',
      'tests': None,
      'embedding': [],
      'system': None,
    }
  ]
  (value,) = made['train']
  assert value['idx'] == 0 and value['prompt'] == prompt + 'Send x.'
  assert [tuple(call.values()) for call in json.loads(value['answer'])] == [FIND, SEND]
  assert [e.environment for e in examples(made['train'] + made['test'], 'train')] == ['tooluse'] * 2
  assert 'none is stated' in said[-1]


@pytest.mark.parametrize(
  'steps',
  [
    [],
    None,
    [step_of(('getDetails', '{}'))],
    [step_of(('fly', '{}'))],
    [step_of(('find', 'x'))],
    [step_of(('find', '3'))],
  ],
)
def test_conversations_without_calls_that_can_be_graded_are_left_out(convert, steps):
  more = {'input': 'Q', 'intermediate_steps': steps}
  train = api(Instances=[more, *api()['Instances'], more])
  made, _ = convert('tooluse', {'train_data': [train, {'Name': 'failed'}], 'eval_simulated': [api()]})
  assert len(made['train']) == 1 and made['test'][0]['idx'] == 1


@pytest.mark.parametrize(
  ('train', 'test', 'message'),
  [
    (api(), api(Instructions=['Q']), "eval_simulated.jsonl, line 1: 1 'Instructions' have 2 'Golden_Answers'"),
    (api(), api(Golden_Answers=[[], []]), 'No question of eval_simulated'),
    (api(Instances=[{'input': 'Q', 'intermediate_steps': ['x']}]), api(), "step of 'intermediate_steps' must be"),
    (
      api(Instances=[{'intermediate_steps': [step_of(FIND)]}]),
      api(),
      "train_data.jsonl, line 1: field 'input' is missing",
    ),
    (api(Instances=[]), api(), 'No question of train_data'),
  ],
)
def test_tool_use_sources_that_cannot_be_read_are_named(convert, train, test, message):
  with pytest.raises(UserError, match=message):
    convert('tooluse', {'train_data': [train], 'eval_simulated': [test]})


# LiveCodeBench.


def packed(value):
  return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def case(number, testtype='stdin'):
  return {'input': f'{number}\n', 'output': str(number), 'testtype': testtype}


def contest(tests=3, **changes):
  return {
    'question_title': 'T',
    'question_content': 'Print it.',
    'platform': 'atcoder',
    'question_id': 'a',
    'contest_id': 'c',
    'contest_date': '2025-02-01T00:00:00',
    'starter_code': '',
    'difficulty': 'easy',
    'public_test_cases': '[]',
    'private_test_cases': packed(json.dumps([case(number) for number in range(tests)])),
    'metadata': '{}',
  } | changes


def test_livecodebench_rows(convert):
  functional = contest(
    starter_code='class Solution:\n    def f(self, x: int) -> int:\n        ',
    metadata='{"func_name": "f"}',
    private_test_cases=json.dumps([case(number, 'functional') for number in range(4)]),
  )
  made, said = convert('livecodebench', {'test': [contest(), functional]})
  first, second = made['test']
  problem = (
    'You are a coding expert. You will be given a coding problem, and you need to write a correct Python program that '
    'matches the specification and passes all tests. The time limit is 1 second. You may start by outlining your '
    'thought process. In the end, please provide the complete code in a code block enclosed with ``` ```.\n\nPrint it.'
  )
  assert (first['prompt'], first['idx'], first['kind'], first['dataset']) == (problem, 0, 'code', 'livecodebench')
  assert (first['answer'], first['elo'], first['system']) == ('-', '-', None)
  assert first['description'] == 'Print it. The solution will be evaluated in a code environment.'
  assert json.loads(first['tests']) == {
    'inputs': ['0\n', '1\n', '2\n'],
    'outputs': ['0', '1', '2'],
    'testtype': 'stdin',
    'fn_name': '',
    'time_limit': 6,
  }
  signature = '\n\nYour solution should have the following signature: ```python\ndef f(self, x: int) -> int:\n```'
  assert second['prompt'] == problem + signature
  assert json.loads(second['tests'])['fn_name'] == 'f' and json.loads(second['tests'])['testtype'] == 'functional'
  asked = examples(made['test'], 'test')[1].messages
  assert [m['role'] for m in asked] == ['user'] and 'def f(x: int) -> int:' in asked[0]['content']
  assert 'the file of the paper has 131' in said[0] and "'cc'" in said[2]


def test_livecodebench_trains_on_half_of_each_question_s_tests_drawn_as_the_reference_draws_them(convert):
  counts = [1, 2, 3, 8, 21]
  made, _ = convert('livecodebench', {'test': [contest(count) for count in counts]})
  np.random.seed(0)
  for count, train, test in zip(counts, made['train'], made['test'], strict=True):
    kept = np.sort(np.random.choice(count, size=max(1, int(0.5 * count)), replace=False)).tolist()
    tests = json.loads(train['tests'])
    assert tests['inputs'] == [f'{number}\n' for number in kept] and tests['outputs'] == list(map(str, kept))
    assert len(json.loads(test['tests'])['inputs']) == count
    assert {**train, 'tests': None} == {**test, 'tests': None}


def test_livecodebench_keeps_contests_of_the_window(convert):
  days = ['2025-01-31T23:59:00', '2025-02-01T00:00:00', '2025-04-30T22:00:00', '2025-05-01T00:00:00']
  contests = [contest(contest_date=day, question_content=day) for day in days]
  made, said = convert('livecodebench', {'test': contests})
  assert [value['description'][:10] for value in made['test']] == ['2025-02-01', '2025-04-30']
  window = dict(since=datetime.date(2025, 5, 1), until=datetime.date(2026, 1, 1))
  made, said = convert('livecodebench', {'test': contests}, **window)
  assert [value['description'][:10] for value in made['test']] == ['2025-05-01'] and said[0].endswith('1 rows.')
  with pytest.raises(UserError, match='no contest from 2026-01-01 until 2025-05-01'):
    convert('livecodebench', {'test': contests}, since=datetime.date(2026, 1, 1))


def test_dates_of_a_hub_data_set_are_dates_already(tmp_path, monkeypatch):
  import datasets

  monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', tmp_path / 'cache')
  (tmp_path / 'in').mkdir()
  values = [contest(contest_date=datetime.datetime(2025, month, 1)) for month in (1, 2, 3)]
  datasets.Dataset.from_list(values).to_parquet(tmp_path / 'in' / 'test.parquet')
  prepare.prepare('livecodebench', raw.ConversionOptions(), tmp_path / 'out', f'hf:{tmp_path}/in', lambda said: None)
  assert len(sources.read_rows(str(tmp_path / 'out' / 'test.json'), '')) == 2


class Command:
  """Pickled, this would make a folder when it is loaded."""

  def __init__(self, path):
    self.path = path

  def __reduce__(self):
    import os

    return os.mkdir, (str(self.path),)


def test_tests_that_are_not_pickled_text_are_refused_and_run_nothing(convert, tmp_path):
  pickled = {
    'it wants to load posix.mkdir': packed(Command(tmp_path / 'made')),
    'it is pickled list instead of text': packed([case(0)]),
    'Expecting value': packed('no json'),
    'must hold tests with input, output and testtype': packed('[{"input": 1}]'),
    'must hold tests with': '[]',
    'cannot be read: .*incorrect header check': base64.b64encode(b'xyz').decode(),
    'cannot be read: .*(base64|padding|character)': '%%%',
    'cannot be read: .*(Ran out of input|truncated)': base64.b64encode(zlib.compress(b'\x80\x04\x95')).decode(),
    'nested too deeply': '[' * 100_000,
  }
  for message, text in pickled.items():
    with pytest.raises(UserError, match=f'test.jsonl, line 2: .*{message}'):
      convert('livecodebench', {'test': [contest(), contest(private_test_cases=text)]})
  assert not (tmp_path / 'made').exists()


def test_tests_that_would_fill_the_memory_are_refused(convert, monkeypatch):
  monkeypatch.setattr(livecodebench, 'LARGEST', 1000)
  with pytest.raises(UserError, match='it is larger than 1000 bytes'):
    convert('livecodebench', {'test': [contest(private_test_cases=packed(json.dumps([case(0)]) + ' ' * 10**6))]})


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'starter_code': 'class Solution: ...'}, "'starter_code' defines no function"),
    ({'metadata': '{'}, "'metadata' is not JSON"),
    ({'contest_date': 'spring'}, "'contest_date' is not a date: 'spring'"),
    ({'contest_date': None}, "'contest_date' must be of type str or datetime, not None"),
    ({'private_test_cases': json.dumps([case(0, 'functional')])}, "'fn_name' for functional tests"),
    ({'private_test_cases': json.dumps([case(0, 'other')])}, "'testtype' of functional, stdin, code"),
  ],
)
def test_a_contest_outside_the_source_s_schema_is_named(convert, change, message):
  with pytest.raises(UserError, match=f'test.jsonl, line 2: .*{message}'):
    convert('livecodebench', {'test': [contest(), contest(**change)]})


# Mathematics and GPQA.


@pytest.mark.parametrize(
  ('name', 'value', 'truth'),
  [
    ('math500', {'problem': 'How many?', 'answer': '\\frac{1}{2} ', 'solution': 's'}, '\\frac{1}{2}'),
    ('aime24', {'problem': 'How many?', 'solution': '\\boxed{204}'}, '204'),
    ('aime25', {'problem': 'How many?', 'answer': 70}, '70'),
    ('amc23', {'question': 'How many?', 'answer': 27.0}, '27.0'),
  ],
)
def test_mathematics_is_held_out_only(convert, name, value, truth):
  made, _ = convert(name, {'test': [value]})
  assert list(made) == ['test']
  (row,) = made['test']
  assert row['prompt'] == 'How many?\n\nPlease reason step by step, and put your final answer within \\boxed{}.'
  assert (row['answer'], row['kind'], row['dataset'], row['elo'], row['tests']) == (truth, 'math', name, '-', '-')
  (example,) = examples(made['test'], 'test')
  assert (example.environment, example.data_source, example.ground_truth) == ('math', name, truth)


def test_gsm8k_has_both_files_and_its_answers_are_numbers(convert):
  values = [{'question': f'{n}?', 'answer': f'Think #### or <<1+1=2>>.\n#### {n},000'} for n in (1, 2)]
  made, _ = convert('gsm8k', {'train': values, 'test': values[:1]})
  assert [row['answer'] for row in made['train']] == ['1000', '2000'] and len(made['test']) == 1
  with pytest.raises(UserError, match="train.jsonl, line 1: field 'answer' holds no final answer"):
    convert('gsm8k', {'train': [{'question': 'Q', 'answer': '7'}], 'test': values})


def test_a_boxed_answer_is_unpacked_only_where_it_is_all_there_is():
  assert [mathematics.boxed(text) for text in (' \\boxed{\\frac{1}{2}} ', '3', '', 'x = \\boxed{3}')] == [
    '\\frac{1}{2}',
    '3',
    '',
    'x = \\boxed{3}',
  ]


def gpqa(number):
  return {
    'Question': f'Q{number}',
    'Correct Answer': 'right',
    **{f'Incorrect Answer {at}': f'wrong {at}' for at in (1, 2, 3)},
  }


def test_gpqa_choices_are_shuffled_by_the_seed(convert):
  made, _ = convert('gpqa', {'train': [gpqa(number) for number in range(40)]})
  assert list(made) == ['test']
  letters = [value['answer'] for value in made['test']]
  assert set(letters) == set('ABCD')
  for number, value in enumerate(made['test']):
    before, options = value['prompt'].split('\nOptions: ')
    assert before == (
      'Return your final response within \\boxed{} and only include the letter choice (A, B, C, or D) as your final '
      f'response.\nProblem: Q{number}'
    )
    choices = dict(re.findall(r'([A-D])\) ([a-z]+(?: \d)?)', options.removesuffix('\nAnswer:')))
    assert (
      sorted(choices.values()) == ['right', 'wrong 1', 'wrong 2', 'wrong 3'] and choices[value['answer']] == 'right'
    )
  assert convert('gpqa', {'train': [gpqa(number) for number in range(40)]})[0] == made
  other, _ = convert('gpqa', {'train': [gpqa(number) for number in range(40)]}, seed=1)
  assert [value['answer'] for value in other['test']] != letters


# Where sources are.


def test_sources_are_read_at_their_public_address_unless_another_is_given(tmp_path):
  gsm8k, sciknow, tools = (prepare.SOURCES[name] for name in ('gsm8k', 'sciknoweval', 'tooluse'))
  assert prepare.address(gsm8k, 'train', None) == 'hf:openai/gsm8k?config=main&split=train'
  assert prepare.address(gsm8k, 'test', 'hf:me/copy') == 'hf:me/copy?split=test'
  assert prepare.address(gsm8k, 'test', 'hf:me/copy?split=dev&revision=refs/pr/1') == (
    'hf:me/copy?split=dev&revision=refs/pr/1'
  )
  assert prepare.address(tools, tooluse.TRAIN, 'hf:me/tools') == 'hf:me/tools?split=train_data'
  assert prepare.address(sciknow, 'test', 'rows.json') == 'rows.json'
  (tmp_path / 'test.parquet').touch()
  assert prepare.address(sciknow, 'test', str(tmp_path)) == str(tmp_path / 'test.parquet')
  (tmp_path / 'test.json').touch()
  for part, source, given, message in (
    ('test', sciknow, str(tmp_path), 'must hold one file test .*, not 2; .* hf:'),
    ('train', gsm8k, str(tmp_path), 'must hold one file train .*, not 0'),
    ('train', gsm8k, 'rows.json', 'must be the folder of train and test'),
    (tooluse.TEST, tools, None, 'folder that holds train_data.json and eval_simulated.json: the README of'),
  ):
    with pytest.raises(UserError, match=message):
      prepare.address(source, part, given)


def test_every_source_has_a_licence_line_and_addresses_that_can_be_read():
  for source in prepare.SOURCES.values():
    assert source.licence and (all(source.parts.values()) or source.where)
    for part, public in source.parts.items():
      if public:
        assert prepare.hub_datasets.parse(public)[1]['split'] == part


def test_an_output_that_is_a_file_is_refused(tmp_path):
  (tmp_path / 'in.json').write_text(json.dumps(mcq()))
  with pytest.raises(UserError, match='--output=.*cannot be created as a folder'):
    prepare.prepare(
      'sciknoweval', raw.ConversionOptions(domain='chemistry'), tmp_path / 'in.json', str(tmp_path / 'in.json'), print
    )


@pytest.mark.slow
def test_the_command(tmp_path):
  (tmp_path / 'test.json').write_text(json.dumps([mcq(number) for number in range(10)]))
  made = [f'--output={tmp_path}/out', f'--input={tmp_path}']
  done, *failed = tiny.launch_many(
    [
      ('prepare_data', ['--source=sciknoweval', '--domain=chemistry', *made]),
      ('prepare_data', ['--source=sciknoweval', *made]),
      ('prepare_data', ['--source=other', *made]),
      ('prepare_data', ['--source=livecodebench', '--since=soon', *made]),
      ('prepare_data', ['--source=gpqa', *made]),
      ('prepare_data', ['--source=gpqa', f'--output={tmp_path}/out']),
      ('prepare_data', ['--source=longhealth', f'--output={tmp_path}/out']),
    ],
    cache=tmp_path / 'cache',
  )
  assert done.returncode == 0 and 'Licence of the data: MIT' in done.stdout
  assert sorted(file.name for file in (tmp_path / 'out').iterdir()) == ['test.json', 'train.json']
  sentences = [
    '--source=sciknoweval needs --domain',
    'should be one of <sciknoweval|',
    '--since=soon is not a day',
    'must hold one file train',
    "--input='Idavidrein/gpqa' is not a directory here, and it cannot be loaded from the Hugging Face hub",
    '--input must name the folder that holds benchmark_v5.json: it is in the folder data of https://github.com/kbressem',
  ]
  for process, sentence in zip(failed, sentences, strict=True):
    assert process.returncode == 2 and sentence in process.stderr
    assert len(process.stderr.strip().splitlines()) == 1


# The real files: their rows, brought back into the schema of the source, are converted into themselves.


@pytest.fixture
def real(request):
  folder = request.config.getoption('--datasets')
  if folder is None:
    pytest.skip('needs --datasets=DIR')
  return lambda name: [row.value for row in sources.read_rows(f'{folder}/{name}', '--datasets')]


@pytest.mark.parametrize('domain', sciknoweval.DOMAINS)
def test_real_sciknoweval_files_are_reproduced(real, convert, domain):
  files = {split: real(f'sciknoweval/{domain}/{split}.json') for split in ('train', 'test')}
  source = []
  for value in sorted(files['train'] + files['test'], key=lambda value: value['idx']):
    question = value['description'].removesuffix(' The solution will be evaluated in a mcq environment.')
    choices = value['prompt'].removeprefix(f'{question}\n\n').removesuffix('\nPlease reason step by step.')
    found = re.findall(r'(?:^|\n)([A-D]): (.*?)(?=\n[A-D]: |\Z)', choices, re.DOTALL)
    source.append(
      mcq(
        question=question,
        choices={'text': [text for _, text in found], 'label': [label for label, _ in found]},
        answerKey=value['answer'],
        domain=domain.capitalize(),
        type=f'mcq-{len(found)}-choices',
      )
    )
  made, said = convert('sciknoweval', {'test': source}, domain=domain)
  assert made == files
  assert not any('the file of the paper' in sentence for sentence in said)


def test_the_real_tool_use_file_is_reproduced(real, convert):
  wanted = real('tooluse/test.json')
  apis = {}
  layout = (
    re.escape(tooluse.PROMPT)
    .replace(r'\{name\}', '(?P<name>.*?)')
    .replace(r'\{description\}', '(?P<description>.*?)')
    .replace(r'\{documentation\}', '(?P<documentation>.*)')
    .replace(r'\{question\}', '(?P<question>.*)')
  )
  for value in wanted:
    found = re.fullmatch(layout, value['prompt'], re.DOTALL)
    made = apis.setdefault(
      found['documentation'],
      api(
        Name=found['name'],
        Description=found['description'],
        NLDocumentation=found['documentation'],
        Instructions=[],
        Golden_Answers=[],
      ),
    )
    made['Instructions'].append(found['question'])
    made['Golden_Answers'].append(json.loads(value['answer']))
  assert len(apis) == 10
  made, said = convert('tooluse', {'train_data': [api()], 'eval_simulated': list(apis.values())})
  first = wanted[0]['idx'] - 1  # One training row of ours stands for all of theirs.
  assert [value | {'idx': value['idx'] + first} for value in made['test']] == [
    value | {'embedding': []} for value in wanted
  ]
  assert said[1].endswith('68 rows.')
