"""MTOB and QASPER: their files become questions and a document for a cartridge; odd rows are named or counted."""

import json
import logging

import pyarrow
import pyarrow.parquet
import pytest

from sdpo_jax.data import prepare, rows, sources
from sdpo_jax.data.converters import raw
from sdpo_jax.environments import registry
from sdpo_jax.errors import UserError
from tests import tiny


@pytest.fixture
def convert(tmp_path):
  def convert(name, given, **options):
    """Return the rows of test.json, the document, and what was announced."""
    said = []
    prepare.prepare(name, raw.ConversionOptions(**options), tmp_path / 'out', str(given), said.append)
    assert {path.name for path in (tmp_path / 'out').iterdir()} == {'test.json', 'document.txt'}
    made = [row.value for row in sources.read_rows(str(tmp_path / 'out' / 'test.json'), '')]
    return made, (tmp_path / 'out' / 'document.txt').read_text(), said

  return convert


def example(value):
  return rows.example(rows.RawRow('x', 1, value), 'test')


# MTOB: an archive of `splits` and `resources`.

CANARY = {'big-bench-canary': 'do not train on this'}


def sentence(number, **changes):
  unknown = {'translation': '--------------------', 'url': 'https://example.org', 'original_id': number}
  return {'original': f'Ma toni {number}.', 'ground_truth': f'He says {number}.'} | unknown | changes


@pytest.fixture
def archive(tmp_path):
  splits, resources = tmp_path / 'mtob' / 'splits', tmp_path / 'mtob' / 'resources'
  splits.mkdir(parents=True)
  resources.mkdir()
  pair = {'original': 'I eat bananas.', 'translation': 'An im na.', 'url': '', 'original_id': 7}
  english = {'original': 'He goes.', 'ground_truth': 'Ma bo.'}
  words = {'ke': {'na': ['v', 'eat; drink'], 'im': ['n', 'banana']}, 'ek': {'eat': 'na', 'banana': 'im'}}
  for path, value in {
    splits / 'test_examples_ke.json': [CANARY, sentence(1), sentence(2), sentence(2)],
    splits / 'test_examples_ek.json': [CANARY, english],
    splits / 'train_examples.json': [CANARY, pair],
    resources / 'wordlist.json': CANARY | words,
  }.items():
    path.write_text(json.dumps(value, indent=2))
  (resources / 'grammar_book.txt').write_text('Kalamang is spoken on ŋ islands.\n')
  return tmp_path / 'mtob'


def documents(archive):
  names = ('resources/grammar_book.txt', 'resources/wordlist.json', 'splits/train_examples.json')
  return tuple(str(archive / name) for name in names)


def test_mtob_becomes_sentences_to_translate_and_the_named_files_the_document(convert, archive):
  made, document, said = convert('mtob', archive / 'splits', documents=documents(archive))
  assert [(row['idx'], row['answer']) for row in made] == [
    ('ke_1', 'He says 1.'),
    ('ke_2', 'He says 2.'),
    ('ke_3', 'He says 2.'),
  ]
  assert 'from Kalamang into English:\n\nMa toni 1.\n' in made[0]['prompt'] and 'He says' not in made[0]['prompt']
  assert 'the file of the paper has 50' in said[0] and 'published encrypted' in said[-1]
  assert document == (
    'Kalamang is spoken on ŋ islands.\n\nna: v, eat; drink\nim: n, banana\n\nKalamang: An im na.\nEnglish: I eat '
    'bananas.\n\n'
  )
  asked = example(made[0])
  assert (asked.environment, asked.data_source, asked.ground_truth) == ('chrf', 'mtob', 'He says 1.')
  [right, wrong] = registry.get('chrf')([asked] * 2, ['He says 1.', 'Ma toni 1.'], truncated=[False] * 2)
  assert right.score == 1 and 0 < wrong.score < 0.5


def test_mtob_has_the_other_direction(convert, archive):
  made, document, _ = convert('mtob', archive / 'splits', direction='ek', documents=documents(archive)[1:2])
  [row] = made
  assert (row['idx'], row['answer'], document) == ('ek_1', 'Ma bo.', 'eat: na\nbanana: im\n')
  assert 'from English into Kalamang:\n\nHe goes.\n' in row['prompt']


@pytest.mark.parametrize(
  ('odd', 'message'),
  [
    ({'ground_truth': ' '}, "'original' and 'ground_truth', its translation, must not be empty"),
    ({'original': '\n'}, "'original' and 'ground_truth', its translation, must not be empty"),
    ({'original': 3}, "field 'original' must be of type str, not 3"),
    (None, "field 'original' is missing: is this the right source"),
  ],
)
def test_odd_sentences_are_named_and_nothing_is_written(convert, archive, tmp_path, odd, message):
  values = [CANARY, sentence(1), {'translation': ''} if odd is None else sentence(2, **odd)]
  (archive / 'splits' / 'test_examples_ke.json').write_text(json.dumps(values, indent=2))
  with pytest.raises(UserError, match=rf'test_examples_ke\.json, line 12: {message}'):
    convert('mtob', archive / 'splits', documents=documents(archive))
  assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize(
  ('named', 'content', 'message'),
  [
    (None, '', '--documents must name files that teach the language'),
    ('gone.txt', None, 'gone.txt cannot be read .*: name files of MTOB in --documents'),
    ('wordlist.json', '{"words": {}}', "wordlist.json: field 'ke' is missing"),
    ('train.json', '[{"original": "He goes."}]', "train.json, line 1: field 'translation' is missing"),
  ],
)
def test_documents_that_cannot_be_read_are_named(convert, archive, named, content, message):
  if content is not None and named:
    (archive / named).write_text(content)
  with pytest.raises(UserError, match=message):
    convert('mtob', archive / 'splits', documents=(str(archive / named),) if named else ())


# QASPER: papers in two layouts, and rewritten questions.


def reply(free='', spans=(), sure=None, unanswerable=False):
  evidence = {'evidence': ['A paragraph.'], 'highlighted_evidence': ['A']}
  return {'unanswerable': unanswerable, 'extractive_spans': list(spans), 'yes_no': sure, 'free_form_answer': free} | (
    evidence
  )


def asked(number, *replies, **changes):
  answers = [{'answer': one, 'annotation_id': 'a', 'worker_id': 'w'} for one in replies]
  return {'question': f'Which data, {number}? ', 'question_id': f'q{number}', 'answers': answers} | changes


def paper(number, *questions, **changes):
  sections = [
    {'section_name': 'Introduction', 'paragraphs': [f'We do {number}.', '', 'It works.\n']},
    {'section_name': None, 'paragraphs': ['The end.']},
  ]
  return {'title': f'On {number}', 'abstract': f'Short {number}.', 'full_text': sections, 'qas': list(questions)} | (
    changes
  )


def as_on_the_hub(name, value):
  """Return a paper with objects of lists instead of lists of objects."""

  def columns(objects, *names):
    return {column: [one[column] for one in objects] for column in names}

  questions = [
    one | {'answers': columns(one['answers'], 'answer', 'annotation_id', 'worker_id')} for one in value['qas']
  ]
  sections = columns(value['full_text'], 'section_name', 'paragraphs')
  return {'id': name} | value | {'full_text': sections, 'qas': columns(questions, 'question', 'question_id', 'answers')}


PAPERS = {
  '1901.1': paper(
    1,
    asked(1, reply('SQuAD and others'), reply(unanswerable=True)),
    asked(2, reply(spans=['BERT', 'ELMo'])),
    asked(3, reply(sure=False)),
    asked(4, reply(sure=True)),
    asked(5, reply(unanswerable=True), reply('not taken')),
    asked(6, reply()),
    asked(7),
    asked(8, reply('x'), question=' '),
    asked(1, reply('again')),
  ),
  '1902.2': paper(2, asked(9, reply('Twelve'))),
  '1903.3': paper(3, asked(10, reply('Other'))),
}
CHOSEN = ('1902.2', '1901.1')


@pytest.mark.parametrize('layout', ['release', 'hub'])
def test_qasper_becomes_answered_questions_and_the_chosen_papers_the_document(convert, tmp_path, caplog, layout):
  given = tmp_path / {'release': 'train.json', 'hub': 'train.parquet'}[layout]
  if layout == 'release':
    given.write_text(json.dumps(PAPERS))
  else:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([as_on_the_hub(*named) for named in PAPERS.items()]), given)
  with caplog.at_level(logging.WARNING):
    made, document, said = convert('qasper', given, papers=CHOSEN)
  assert {row['idx']: row['answer'] for row in made} == {
    'q9': 'Twelve',
    'q1': 'SQuAD and others',
    'q2': 'BERT, ELMo',
    'q3': 'No',
    'q4': 'Yes',
  }
  assert made[1]['prompt'].startswith('About the paper "On 1": Which data, 1?\n')
  asked = example(made[0])
  assert (asked.environment, asked.data_source, asked.ground_truth) == ('none', 'qasper', 'Twelve')
  assert caplog.messages == [
    '1 of 10 questions are left out: the paper does not answer it.',
    '3 of 10 questions are left out: the question or its answer is empty.',
    '1 of 10 questions are left out: its id is that of another question.',
  ]
  assert document.startswith(
    '<paper>\nTitle: On 2\n\nAbstract: Short 2.\n\nIntroduction\n\nWe do 2.\n\nIt works.\n\nThe end.\n</paper>\n\n'
  )
  assert 'On 1' in document and 'On 3' not in document and 'Which data' not in document and 'CC BY 4.0' in said[-1]


def test_qasper_takes_rewritten_questions_about_the_chosen_papers(convert, tmp_path, caplog):
  def question(paper, number, **changes):
    old = {'old_question': 'Which?', 'old_answer': str(reply('x')), 'title': 't', 'abstract': 'a'}
    return {'paper_id': paper, 'question': f'Which data has On {number}?', 'answer': f'{number} sets.'} | old | changes

  (tmp_path / 'train.json').write_text(json.dumps(PAPERS))
  made = [question('1901.1', 1), question('1903.3', 3), question('1902.2', 2), question('1902.2', 4, answer=' ')]
  (tmp_path / 'new.jsonl').write_text('\n'.join(map(json.dumps, made)))
  made, document, _ = convert('qasper', tmp_path / 'train.json', papers=CHOSEN, rewritten=str(tmp_path / 'new.jsonl'))
  assert [(row['idx'], row['answer']) for row in made] == [('1901.1_1', '1 sets.'), ('1902.2_3', '2 sets.')]
  assert made[0]['prompt'].startswith('Which data has On 1?\n') and 'We do 1.' in document
  assert caplog.messages == ['1 of 3 questions are left out: the question or its answer is empty.']
  (tmp_path / 'new.jsonl').write_text(json.dumps({'question': 'Q', 'answer': 'A'}))
  with pytest.raises(UserError, match=r"new\.jsonl, line 1: field 'paper_id' is missing"):
    convert('qasper', tmp_path / 'train.json', papers=CHOSEN, rewritten=str(tmp_path / 'new.jsonl'))


def lacking(value, name):
  return {key: held for key, held in value.items() if key != name}


@pytest.mark.parametrize(
  ('file', 'message'),
  [
    ({'1903.3': paper(3)}, '--papers: 1902.2, 1901.1 are not in this source; there are 1903.3'),
    ({name: paper(1, asked(1, reply(unanswerable=True))) for name in CHOSEN}, 'No question about the papers 1902.2, 1'),
    (PAPERS | {'1901.1': lacking(paper(1), 'qas')}, r"train.json, 1901.1: field 'qas' is missing: is this the right"),
    (
      PAPERS | {'1901.1': paper(1, asked(1, lacking(reply('x'), 'yes_no')))},
      "qa 1, answer 1: field 'answer.yes_no' is",
    ),
    (PAPERS | {'1901.1': paper(1, asked(1, reply(sure=3)))}, "'answer.yes_no' must be of type bool or NoneType, not 3"),
    (
      PAPERS | {'1901.1': paper(1, qas={'question': ['Q'], 'answers': []})},
      "1901.1: the fields of 'qas' must be lists",
    ),
    (
      [{'id': name, **PAPERS[name]} for name in CHOSEN * 2],
      "line 1: 'id' is '1902.2', as in .*: leave one of them out",
    ),
  ],
)
def test_another_file_is_refused_and_nothing_is_written(convert, tmp_path, file, message):
  (tmp_path / 'train.json').write_text(json.dumps(file))
  with pytest.raises(UserError, match=message):
    convert('qasper', tmp_path / 'train.json', papers=CHOSEN)
  assert not (tmp_path / 'out').exists()


def test_the_command(archive, tmp_path):
  (tmp_path / 'train.json').write_text(json.dumps(PAPERS))
  new = ({'paper_id': '1903.3', 'question': 'Q?', 'answer': answer} for answer in ('A', ''))
  (tmp_path / 'new.jsonl').write_text('\n'.join(map(json.dumps, new)))
  book = ','.join(documents(archive))
  qasper = [f'--rewritten={tmp_path}/new.jsonl', '--papers=1903.3', f'--output={tmp_path}/qasper']
  mtob = [f'--input={archive}/splits', '--direction=ek', f'--documents={book}', f'--output={tmp_path}/mtob']
  runs = [
    tiny.launch('prepare_data', '--source=mtob', *mtob, quick=True),
    tiny.launch('prepare_data', '--source=qasper', f'--input={tmp_path}/train.json', *qasper, quick=True),
  ]
  assert [run.returncode for run in runs] == [0, 0]
  assert '1 of 2 questions are left out: the question or its answer is empty.' in runs[1].stderr
  assert 'Ma bo.' in (tmp_path / 'mtob' / 'test.json').read_text()
  assert json.loads((tmp_path / 'qasper' / 'test.json').read_text())['answer'] == 'A'
  assert 'We do 3.' in (tmp_path / 'qasper' / 'document.txt').read_text()
