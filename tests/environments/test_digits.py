"""The digit instructions by examples written out."""

import pytest

from sdpo_jax.environments import digits

ANSWERS = {
  'reverse': '90174',
  'swap': '74019',
  'ascending': '01479',
  'descending': '97410',
  'left': '71094',
  'right': '94710',
  'add_one': '58210',
  'add_two': '69321',
  'subtract_one': '36098',
  'complement': '52890',
}
LIST = (4, 7, 1, 0, 9)


def test_every_instruction_has_an_example():
  assert set(ANSWERS) == set(digits.INSTRUCTIONS)


@pytest.mark.parametrize('instruction', ANSWERS)
def test_of_an_odd_number_of_digits_none_is_lost(instruction):
  assert digits.answer(instruction, LIST) == ANSWERS[instruction]
