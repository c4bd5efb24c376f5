"""Layouts of data sets: from columns as people name them to rows that training takes, or one sentence."""

import pytest

from sdpo_jax.data import layouts, rows
from sdpo_jax.data.rows import RawRow
from sdpo_jax.errors import UserError

BOXED = '\n\nPlease reason step by step, and put your final answer within \\boxed{}.'
LETTER = '\n\nA: ant\nB: bee\nC: cat\n\nPut the letter of the right option between <answer> and </answer>.'
MESSAGES = [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'Q'}]


def given(*values):
  return [RawRow(f'my.csv, line {number}', number, value) for number, value in enumerate(values, start=2)]


def recognised(*values, **columns):
  """Return the layout of some rows, which training takes as they are."""
  layout = layouts.recognise(given(*values), **columns)
  for row in layout.rows:
    rows.example(row, 'train', default_environment=layout.environment or 'mine')
  return layout


def made(*values, **columns):
  """Return grader, question and answer of the first row."""
  layout = recognised(*values, **columns)
  row = layout.rows[0].value
  return layout.environment, row.get('prompt', row.get('messages')), row.get('answer')


@pytest.mark.parametrize(
  'value, environment, prompt, answer',
  [
    ({'Question': ' Q ', 'Answer': 'yes'}, None, 'Q', 'yes'),
    ({'prompt': 'Q', 'solution': 'x = 2 or so'}, None, 'Q', 'x = 2 or so'),
    ({'prompt': MESSAGES, 'completion': 'yes'}, None, MESSAGES, 'yes'),
    ({'instruction': 'Translate.', 'input': 'chat', 'output': 'cat'}, None, 'Translate.\n\nchat', 'cat'),
    ({'instruction': 'Sing.', 'input': '', 'output': 'la'}, None, 'Sing.', 'la'),
    ({'input': 'Q', 'target': 'yes'}, None, 'Q', 'yes'),
    ({'question': 'Is it?', 'passage': 'It is.', 'answer': True}, None, 'It is.\n\nIs it?', 'True'),
    ({'question': 'Q', 'answer': 42}, 'math', f'Q{BOXED}', '42'),
    ({'question': 'Q', 'answer': 42.0}, 'math', f'Q{BOXED}', '42'),
    ({'question': 'Q', 'answer': 'First 6 * 7.\n#### 1,042'}, 'math', f'Q{BOXED}', '1042'),
    (
      {'problem': 'Q', 'solution': 'So \\boxed{1}, or \\boxed{\\frac{1}{\\sqrt{2}}}.'},
      'math',
      f'Q{BOXED}',
      '\\frac{1}{\\sqrt{2}}',
    ),
    ({'prompt': MESSAGES, 'answer': '-1/2'}, 'math', [MESSAGES[0], {'role': 'user', 'content': f'Q{BOXED}'}], '-1/2'),
    ({'question': 'Q', 'answer': 'on 3 March'}, None, 'Q', 'on 3 March'),
  ],
)
def test_questions_and_answers(value, environment, prompt, answer):
  assert made(value) == (environment, prompt, answer)


THREE = ['ant', 'bee', 'cat']


@pytest.mark.parametrize(
  'value',
  [
    {'choices': THREE, 'answer': 'B'},
    {'choices': THREE, 'answer': '(b)'},
    {'options': THREE, 'answer': 'bee'},
    {'choices': THREE, 'answer': 1},
    {'choices': str(THREE), 'label': '1'},
    {'choices': '["ant", "bee", "cat"]', 'answer': 'B'},
    {'choices': {'text': THREE, 'label': ['1', '2', '3']}, 'answerKey': '2'},
    {'options': {'A': 'ant', 'B': 'bee', 'C': 'cat'}, 'answer_idx': 'B'},
    {'A': 'ant', 'B': 'bee', 'C': 'cat', 'answer': 'B'},
    {'option_1': 'ant', 'option_2': 'bee', 'option_3': 'cat', 'answer': '2'},
    {'opa': 'ant', 'opb': 'bee', 'opc': 'cat', 'cop': 1},
    {'ending0': 'ant', 'ending1': 'bee', 'ending2': 'cat', 'label': '1'},
    {'Option A': 'ant', 'Option B': 'bee', 'Option C': 'cat', 'Correct Answer': 'bee'},
  ],
)
def test_multiple_choice(value):
  assert made({'question': 'Q', **value}) == ('mcq', f'Q{LETTER}', 'B')


def test_answers_of_multiple_choice_are_read_in_one_way_in_all_rows():
  """By hand: the second row has a 3, which no count from 0 gives to three choices."""
  one, two = ({'question': 'Q', 'choices': THREE, 'answer': number} for number in (1, 3))
  layout = recognised(one, two)
  assert [row.value['answer'] for row in layout.rows] == ['A', 'C'] and 'by numbers from 1' in layout.said
  # Texts that are numbers, too: 2 is a choice in one row only, and so means a place in both.
  layout = recognised(one | {'choices': ['5', '2', '7'], 'answer': 2}, two | {'choices': ['8', '9', '3'], 'answer': 0})
  assert [row.value['answer'] for row in layout.rows] == ['C', 'A'] and 'by numbers from 0' in layout.said
  with pytest.raises(
    UserError, match=r"^my.csv, line 3: 'answer' must name one of the choices in 'choices' by texts, .* holds 'dog'"
  ):
    layouts.recognise(given(one | {'answer': 'cat'}, one | {'answer': 'dog'}))


def test_questions_may_have_fewer_choices_than_columns():
  layout = recognised(
    {'question': 'Q', 'A': 'x', 'B': 'y', 'C': 'z', 'answer': 'C'}, {'question': 'R', 'A': 'x', 'B': 'y', 'answer': 'A'}
  )
  assert [row.value['choices'] for row in layout.rows] == [['x', 'y', 'z'], ['x', 'y']]


@pytest.mark.parametrize(
  'value, environment, answered',
  [
    ({'prompt': 'Q', 'answer': 'B', 'kind': 'mcq'}, 'mcq', True),
    ({'prompt': 'Q', 'answer': '1', 'dataset': 'gsm8k'}, None, True),
    ({'prompt': 'Q', 'answer': '1', 'environment': 'math'}, None, True),
    ({'messages': MESSAGES}, None, False),
    ({'messages': MESSAGES, 'solution': '1'}, None, True),
    ({'data_source': 'math', 'prompt': MESSAGES, 'reward_model': {'ground_truth': '1'}}, None, True),
  ],
)
def test_rows_of_our_own_stay_as_they_are(value, environment, answered):
  layout = recognised(value)
  assert (layout.environment, layout.answered, layout.rows[0].value) == (environment, answered, value)


def test_the_answer_of_a_conversation_is_what_the_assistant_says_last():
  said = {'role': 'assistant', 'content': 'yes'}
  assert made({'messages': [*MESSAGES, said], 'source': 'x'}) == (None, MESSAGES, 'yes')


def test_prompts_need_no_answer():
  layout = recognised({'prompt': 'Q'}, {'prompt': 'R'})
  assert not layout.answered and [row.value for row in layout.rows] == [{'prompt': 'Q'}, {'prompt': 'R'}]


def test_named_columns_count_and_others_stay_for_graders():
  value = {'question': 'no', 'stem': 'Q', 'answer': 'no', 'key': 'yes', 'kind': 'x', 'level': 3}
  layout = recognised(value, prompt_column='stem', answer_column='key')
  assert layout.rows[0].value == {'question': 'no', 'level': 3, 'prompt': 'Q', 'answer': 'yes'}
  assert not recognised(value, prompt_column='stem', answer_column='').answered


@pytest.mark.parametrize(
  'values, columns, sentence',
  [
    (
      [{'a': '1', 'b': '2'}],
      {},
      "No column is recognised as the question; there are 'a', 'b': name the right columns in --pro",
    ),
    (
      [{'question': 'Q', 'reply': '2'}],
      {},
      "recognised as the answer; there are 'question', 'reply': name the right columns in --prompt",
    ),
    (
      [{'Said to us': 'Q', 'answer': '2'}],
      {'prompt_column': 'said to us'},
      "^--prompt_column='said to us' names no column; there are 'Said to us', 'answer'; did you mean 'Said to us'",
    ),
    ([{'question': 'Q', 'answer': '2'}], {'answer_column': 'x'}, "^--answer_column='x' names no column; there are '"),
    (
      [{'question': 'Q', 'answer': ['2']}],
      {},
      r"^my.csv, line 2: 'answer' must hold a text or a number, but holds \['2'\]",
    ),
    ([{'question': 'Q', 'answer': 'x'}, {'answer': 'x'}], {}, "^my.csv, line 3: 'question' must hold a text"),
    ([{'question': 'Q', 'choices': 'x', 'answer': 'x'}], {}, "^my.csv, line 2: 'choices' must hold 2 to 26 choices"),
    (['x'], {}, '^my.csv, line 2: a row must be an object'),
  ],
)
def test_other_data_end_with_a_sentence_that_names_the_flags(values, columns, sentence):
  with pytest.raises(UserError, match=sentence):
    layouts.recognise(given(*values), **columns)
