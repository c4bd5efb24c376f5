"""LongHealth: its file becomes questions and a document, and both profiles find the option that an answer means."""

import difflib
import json
import re

import numpy as np
import pytest

from sdpo_jax.config import EnvironmentsConfig
from sdpo_jax.data import prepare, rows, sources
from sdpo_jax.data.converters import raw
from sdpo_jax.environments import registry
from sdpo_jax.errors import UserError
from tests.environments.processor_time import processor_seconds_at_most

CHOICES = ['Dexamethasone 20mg', 'Dexamethasone 40mg', 'No steroid at all', 'Prednisone, for 3 weeks', 'It is not said']


def question(number, **changes):
  letters = dict(zip((f'answer_{letter}' for letter in 'abcde'), CHOICES, strict=True))
  where = {'text_0': {'start': [0.1], 'end': [0.2]}}
  return {'No': number, 'question': f'What was given, {number}?', **letters, 'correct': CHOICES[1]} | {
    'answer_location': where,
    **changes,
  }


def patient(number, **changes):
  return {
    'texts': {'text_0': f'Dear colleague,\nthis is letter {number}.\n', 'text_1': 'Laboratory: 3.2\n'},
    'name': f'Jane Roe {number}',
    'birthday': f'1970-01-{number:02d}',
    'diagnosis': 'Multiple Myeloma',
    'questions': [question(0), question(1, correct=CHOICES[4])],
  } | changes


@pytest.fixture
def convert(tmp_path):
  def convert(file, **options):
    (tmp_path / 'benchmark_v5.json').write_text(json.dumps(file, indent=2))
    said = []
    prepare.prepare(
      'longhealth', raw.ConversionOptions(**options), tmp_path / 'out', str(tmp_path / 'benchmark_v5.json'), said.append
    )
    made = [row.value for row in sources.read_rows(str(tmp_path / 'out' / 'test.json'), '')]
    return made, (tmp_path / 'out' / 'document.txt').read_text(), said

  return convert


FILE = {'canary-string': 'LongHealth:0'} | {f'patient_{number:02d}': patient(number) for number in range(1, 13)}


def test_questions_and_records_of_the_chosen_patients_are_written(convert, tmp_path):
  made, document, said = convert(FILE)
  assert [row['idx'] for row in made] == [f'patient_{p:02d}_{q}' for p in range(1, 11) for q in (1, 2)]
  assert {path.name for path in (tmp_path / 'out').iterdir()} == {'test.json', 'document.txt'}
  assert 'test.json: 20 rows; the file of the paper has 200' in said[0] and 'document.txt: ' in said[1]
  asked = made[3]
  assert asked['answer'] == CHOICES[4] and asked['choices'] == CHOICES
  # What a question must say, and the options one below the other, in their order.
  for text in ('patient_02', 'Jane Roe 2', '1970-01-02', 'Multiple Myeloma', 'What was given, 1?', '\n'.join(CHOICES)):
    assert text in asked['prompt']
  assert '<thinking>' in asked['prompt'] and asked['prompt'].endswith('</answer>')
  for text in ('this is letter 10.', 'Jane Roe 10', '<text_1>\nLaboratory: 3.2\n</text_1>'):
    assert text in document
  assert 'letter 11.' not in document and 'What was given' not in document
  example = rows.example(rows.RawRow('x', 1, asked), 'test')
  assert (example.environment, example.data_source) == ('longhealth', 'longhealth')
  registry.get('longhealth').check_questions([example])
  only, document, _ = convert(FILE, patients=('patient_12',))
  assert len(only) == 2 and document.count('Dear colleague') == 1 and 'letter 12.' in document


@pytest.mark.parametrize(
  ('file', 'options', 'message'),
  [
    (FILE, {'patients': ('patient_01', 'patient_99')}, 'patient_99 are not in this source; there are patient_01, '),
    (FILE, {'patients': ('patient_01', 'patient_01')}, 'must name at least one patient, each once'),
    (FILE, {'patients': ()}, 'must name at least one patient'),
    ({'patient_01': {'name': 'x'}}, {'patients': ('patient_01',)}, "patient_01: field 'questions' is missing: is this"),
    ({'patient_01': patient(1, texts={})}, {'patients': ('patient_01',)}, "patient_01: 'texts' is empty"),
    (
      {'patient_01': patient(1, questions=[question(0), question(1, correct='F')])},
      {'patients': ('patient_01',)},
      "patient_01, question 2: 'correct' is 'F', but must be one of the five choices",
    ),
    ([], {}, r'does not hold a JSON object but \[\]: name the published benchmark_v5\.json in --input'),
  ],
)
def test_another_file_is_refused_and_nothing_is_written(convert, tmp_path, file, options, message):
  with pytest.raises(UserError, match=message):
    convert(file, **options)
  assert not (tmp_path / 'out').exists() or not list((tmp_path / 'out').iterdir())


def example(answer=CHOICES[1], choices=CHOICES):
  value = {'prompt': 'Q', 'environment': 'longhealth', 'answer': answer, 'choices': choices}
  return rows.example(rows.RawRow('rows.jsonl, line 3', 3, value), 'test')


def judged(completion, profile='clean', *, truncated=False, of=None, **settings):
  grade = registry.get('longhealth', EnvironmentsConfig(profile=profile, **settings))
  [outcome] = grade([of or example()], [completion], truncated=[truncated])
  return outcome


def published_rule(completion, choices, correct):
  """Upstream's, from its description: the first tags decide, the nearest option is meant, and none is option A."""
  found = re.search('<answer>(.*?)</answer>', completion, re.DOTALL)
  options = [choice.strip().lower() for choice in choices]
  if found is None:
    return options[0] == correct.strip().lower()
  text = found[1].strip().lower()
  ratios = [difflib.SequenceMatcher(None, text, option).ratio() for option in options]
  return options[ratios.index(max(ratios))] == correct.strip().lower()


def test_the_reference_profile_scores_as_the_published_rule():
  draw = np.random.default_rng(0)
  pieces = [
    *CHOICES,
    '<answer>',
    '</answer>',
    '<answer>',
    '</answer>',
    '\n',
    'dexamethasone',
    '40',
    'gibberish',
    ' not ',
    '',
  ]
  scores = set()
  for _ in range(400):
    completion = ''.join(draw.choice(pieces, draw.integers(0, 9)))
    correct = CHOICES[draw.integers(5)]
    outcome = judged(completion, 'reference', of=example(correct))
    assert outcome.score == published_rule(completion, CHOICES, correct), completion
    assert outcome.metrics['format_valid'] == bool(re.search('<answer>.*?</answer>', completion, re.DOTALL))
    scores.add((outcome.score, outcome.metrics['format_valid']))
  assert scores == {(0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0)}
  assert judged('I do not know.', 'reference', of=example(CHOICES[0])).score == 1.0  # Whoever gives none: option A.


@pytest.mark.parametrize(
  ('completion', 'score', 'pred', 'said'),
  [
    ('<thinking>20 or 40</thinking>\n<answer>\nDexamethasone 40mg\n</answer>', 1, CHOICES[1], ''),
    ('<answer>dexamethasone  40 mg.</answer>', 1, CHOICES[1], ''),
    ('<answer>Dexamethasone 20mg</answer> no: <answer>Dexamethasone 40mg</answer>', 1, CHOICES[1], ''),
    ('<answer>Dexamethasone 20mg</answer>', 0, CHOICES[0], "'Dexamethasone 20mg', is wrong."),
    ('<answer>Dexamethasone</answer>', 0, '', 'is none of the options'),
    ('<answer>None</answer>', 0, '', 'is none of the options'),
    ('<answer>Prednisone</answer>', 0, '', 'is none of the options'),
    ('Dexamethasone 40mg', 0, '', 'had the wrong format: put one of the options'),
    ('<think><answer>Dexamethasone 40mg</answer></think>', 0, '', 'wrong format'),
  ],
)
def test_the_clean_profile_takes_the_option_that_is_meant(completion, score, pred, said):
  outcome = judged(completion)
  assert (outcome.score, outcome.metrics['pred']) == (score, pred) and said in outcome.feedback
  assert outcome.metrics['format_valid'] == bool(pred) and '40mg' not in outcome.feedback


def test_feedback_is_as_in_other_graders():
  assert 'cut off at the length limit' in judged('<thinking>', truncated=True).feedback
  assert (
    "right answer is 'Dexamethasone 40mg'" in judged('<answer>It is not said</answer>', reveal_answer=True).feedback
  )
  twice = ['Yes', 'No', 'yes ', 'Perhaps', 'Never']
  assert judged('<answer>YES</answer>', of=example('yes', twice)).score == 1.0


@pytest.mark.parametrize('profile', ['clean', 'reference'])
def test_long_completions_take_no_longer_than_they_are(profile):
  for piece in ('<answer>', '</answer>', 'a', '<answer>a', 'D</answer><answer>'):
    text = piece * (400_000 // len(piece))
    with processor_seconds_at_most(30):  # Milliseconds if the time is proportional to the length.
      judged(text, profile)
      judged(f'<answer>{text[:40_000]}</answer>', profile)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'choices': None}, r"rows\.jsonl, line 3: field 'choices', .* at least two texts, not None"),
    ({'choices': ['one']}, "not \\['one'\\]"),
    ({'choices': ['one', 2]}, "not \\['one', 2\\]"),
    ({'answer': 'Aspirin'}, r"rows\.jsonl, line 3: the answer 'Aspirin' matches none or two of the 'choices'"),
  ],
)
def test_a_row_without_its_options_is_named_before_the_run(changes, message):
  with pytest.raises(UserError, match=message):
    registry.get('longhealth').check_questions([example(**changes)])
