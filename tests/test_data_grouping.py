"""Examples that ask the same are found, and only those."""

import dataclasses

from sdpo_jax.data import grouping
from sdpo_jax.types import Example

ASKED = Example('a', [{'role': 'user', 'content': 'Why?'}], 'math', '42', 'gsm8k', {'elo': 1})


def test_rows_that_ask_the_same_take_the_index_of_the_first():
  other = dataclasses.replace(ASKED, messages=[{'role': 'user', 'content': 'How?'}])
  again = dataclasses.replace(ASKED, id='b', data_source='math500', extra={'elo': 2})
  assert grouping.first_of_same([other, ASKED, other, again, ASKED]).tolist() == [0, 1, 0, 1, 1]


def test_another_answer_grader_or_system_prompt_is_another_question():
  different = [
    ASKED,
    dataclasses.replace(ASKED, ground_truth='43'),
    dataclasses.replace(ASKED, environment='mcq'),
    dataclasses.replace(ASKED, messages=[{'role': 'system', 'content': ''}, *ASKED.messages]),
    dataclasses.replace(ASKED, ground_truth={'answers': ['42']}),
  ]
  assert grouping.first_of_same(different).tolist() == [0, 1, 2, 3, 4]
