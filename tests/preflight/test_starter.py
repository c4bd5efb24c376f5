"""The folder to start from: what is written for which data, that a run of it starts, and that nothing is lost."""

import importlib.util
import json
import pathlib

import pyarrow
import pyarrow.parquet
import pytest

from sdpo_jax.config import config_files
from sdpo_jax.data.rows import RawRow
from sdpo_jax.errors import UserError
from sdpo_jax.models import tokenizer as tokenizers
from sdpo_jax.preflight import starter
from tests import tiny

ROWS = [{'question': f'What is {number}?' + '!' * number, 'answer': f'The number {number}'} for number in range(40)]


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  """Return a model directory without weights, which nothing here reads."""
  folder = tiny.make_model(tmp_path_factory.mktemp('starter') / 'model')
  (folder / 'model.safetensors').unlink()
  described = json.loads((folder / 'config.json').read_text())
  (folder / 'config.json').write_text(json.dumps(described | {'dtype': 'float32'}))
  return folder


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  return tmp_path


def written(data, model, output=None, columns=(None, None)):
  """Return the folder, and what was said."""
  said = []
  return starter.write(str(data), str(model), output, columns, said.append), '\n'.join(said)


def lines(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def module(path):
  spec = importlib.util.spec_from_file_location('written_grader', path)
  found = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(found)
  return found


def jsonl(path):
  path.parent.mkdir(exist_ok=True)
  path.write_text(''.join(json.dumps(row) + '\n' for row in ROWS))
  return path


def test_csv_to_a_run_that_starts(here, model):
  cells = [f'"{row["question"]}",{row["answer"]}' for row in ROWS]
  (here / 'my.csv').write_text('\n'.join(['Question,Answer', *cells]) + '\n')
  said = []
  starter.start('my.csv', str(model), None, (None, None), said.append)
  assert "my.csv: questions in 'Question', answers in 'Answer'; 36 rows to train on, 4 held out." == said[0]
  assert '━━ Prompts ━━' in said[-1] and '\nNothing looks odd.\n' in said[-1]
  assert said[-1].endswith('Next:\n  python -m launch.train --config=my/config.py')
  config = config_files.read('my/config.py').validate()
  assert (config.name, config.data.environment, config.environments.modules) == ('my', 'exact_match', ('my/grader.py',))
  tokenizer = tokenizers.load(model)
  longest = max(len(prompt_tokens(tokenizer, row['question'])) for row in ROWS)
  assert longest <= config.data.max_prompt_length < longest + 16 and not config.data.filter_overlong_prompts
  assert (config.data.train_batch_size, config.data.val_max_samples, config.model.dtype) == (32, 4, 'float32')
  assert 'python -m launch.probe --config=my/config.py\n' in (here / 'my' / 'README.md').read_text()


def prompt_tokens(tokenizer, question):
  return tokenizer.apply_chat_template([{'role': 'user', 'content': question}], add_generation_prompt=True)['input_ids']


def test_json_lines_parquet_and_a_folder_of_a_data_set_give_the_same_rows(here, model):
  jsonl(here / 'lines.jsonl')
  pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), 'table.parquet')
  jsonl(here / 'set' / 'train.jsonl')
  folders = [
    written(data, model, output)[0]
    for data, output in (
      ('lines.jsonl', None),
      ('table.parquet', None),
      ('hf:set?split=train', 'of_set'),
    )
  ]
  assert [str(folder) for folder in folders] == ['lines', 'table', 'of_set']
  texts = {tuple((folder / name).read_text() for name in ('train.jsonl', 'held_out.jsonl')) for folder in folders}
  assert len(texts) == 1
  assert [len(lines(here / 'lines' / name)) for name in ('train.jsonl', 'held_out.jsonl')] == [36, 4]


@pytest.mark.parametrize(
  'row, environment, function',
  [
    ({'question': 'Q', 'A': 'x', 'B': 'y', 'answer': 'B'}, 'mcq', 'exact_match'),
    ({'question': 'Q', 'answer': '42'}, 'math', 'exact_match'),
    ({'prompt': 'Q'}, 'short_answer', 'short_answer'),
  ],
)
def test_what_fits_grades(here, model, row, environment, function):
  rows = [row | {'prompt' if 'prompt' in row else 'question': f'Q{number}'} for number in range(3)]
  (here / 'my.json').write_text(json.dumps(rows))
  folder, _ = written('my.json', model)
  config = config_files.read(str(folder / 'config.py')).validate()
  assert (config.data.environment, config.data.train_batch_size) == (environment, 2)
  assert callable(getattr(module(folder / 'grader.py'), function))


def test_the_grader_scores_and_explains(here, model):
  jsonl(here / 'my.jsonl')
  folder, _ = written('my.jsonl', model)
  grade = module(folder / 'grader.py').exact_match
  said = ['I think\nthe number 4.', '<answer>The number 4</answer>', 'The number 4 it is.', 'The number 14', ' ']
  found = grade(completions=said, ground_truth=['The number 4'] * 5, level=[1] * 5)
  assert [each['score'] for each in found] == [1, 1, 0, 0, 0]
  assert [each['feedback'] for each in found[:2]] == [None, None]
  assert 'in there' in found[2]['feedback'] and "'The number 14', is not" in found[3]['feedback']
  chat = [[{'role': 'assistant', 'content': 'The number 4'}]]
  assert grade(completions=chat, ground_truth=['The number 4'])[0]['score'] == 1


def test_prompts_without_answers_have_an_example_of_a_grader(here, model):
  (here / 'my.txt').write_text('Q\n\nR\n')
  folder, _ = written('my.txt', model)
  grade = module(folder / 'grader.py').short_answer
  assert [each['score'] for each in grade(completions=['Yes.', '', 'word ' * 101])] == [1, 0, 0]


def test_equal_questions_are_on_one_side():
  made = [RawRow('', number, {'prompt': f'Q{number % 30}', 'answer': str(number)}) for number in range(90)]
  train, held_out = ({row.value['prompt'] for row in part} for part in starter.split(made))
  assert len(train) == 27 and len(held_out) == 3 and not train & held_out
  assert sum(map(len, starter.split(made))) == 90
  with pytest.raises(UserError, match='a single question'):
    starter.split(made[::30])


def test_long_prompts_leave_room_for_answers(here, model):
  """The tiny model was made for 512 positions."""
  positions = json.loads((model / 'config.json').read_text())['max_position_embeddings']
  rows = [{'question': 'Q' * length, 'answer': 'yes'} for length in (*range(1, 20), 2 * positions)]
  (here / 'my.json').write_text(json.dumps(rows))
  config = config_files.read(str(written('my.json', model)[0] / 'config.py')).validate()
  assert config.data.filter_overlong_prompts and config.data.max_prompt_length == positions // 2
  reprompt, response = config.actor.self_distillation.max_reprompt_len, config.data.max_response_length
  assert config.data.max_prompt_length < reprompt and reprompt + response <= positions


def test_a_model_beside_the_data_is_found_from_anywhere(here, model, monkeypatch):
  jsonl(here / 'my.jsonl')
  pathlib.Path('near').symlink_to(model)
  folder, _ = written('my.jsonl', 'near')
  assert config_files.read('my/config.py').model.path == 'near'
  (here / 'other').mkdir()
  monkeypatch.chdir(here / 'other')
  config = config_files.read(str(here / folder / 'config.py'))
  assert config.model.path == str(here / 'near') and config.data.train_files == (str(here / 'my' / 'train.jsonl'),)


def test_a_folder_that_exists_is_left_alone(here, model):
  jsonl(here / 'my.jsonl')
  (here / 'my').mkdir()
  (here / 'my' / 'grader.py').write_text('mine')
  for output, name in ((None, 'my'), ('my/grader.py', 'my/grader.py'), ('gs://bucket/my', 'gs://bucket/my')):
    with pytest.raises(UserError, match=f'^--output={name} is not the name of a new local folder'):
      written('my.jsonl', model, output)
  assert [path.name for path in (here / 'my').iterdir()] == ['grader.py']


@pytest.mark.parametrize('name', ['x"""\nimport os\nos.mkdir("ran")\n"""', 'a\\N{x}', 'half\udcff', 'x' * 300])
def test_no_name_of_a_file_becomes_code(here, model, name):
  data = jsonl(here / 'my.jsonl').rename(here / f'{name[:50]}.jsonl')
  with pytest.raises(UserError, match=r'letters\.$|name another directory\.$'):
    written(data, model, name)
  assert [*here.iterdir()] == [data]


@pytest.mark.parametrize(
  'rows, sentence',
  [
    ([{'q': 'Q', 'a': 'A'}], 'No column is recognised'),
    ([{'question': 'Q', 'answer': 'A'}], 'a single question'),
    (
      [{'question': 'Q', 'answer': 'half \ud800'}, {'question': 'R', 'answer': 'A'}],
      r'my.json, line 1: half of a char',
    ),
  ],
)
def test_of_bad_rows_nothing_is_written(here, model, rows, sentence):
  (here / 'my.json').write_text(json.dumps(rows))
  with pytest.raises(UserError, match=sentence):
    written('my.json', model)
  assert [path.name for path in here.iterdir()] == ['my.json']


def test_what_a_run_would_refuse_is_said_and_kept(here, model, monkeypatch):
  def refuse(config):
    raise UserError(f'{config.name} is refused.')

  jsonl(here / 'my.jsonl')
  monkeypatch.setattr(starter.check, 'check', refuse)
  with pytest.raises(UserError, match=r'^my/ is written, but .* launch.check --config=my/config.py\): my is refused'):
    starter.start('my.jsonl', str(model), None, (None, None), lambda text: None)
  assert len(lines(here / 'my' / 'train.jsonl')) == 36
