"""Digit instructions: the quickstart's task, endless, generated, and graded element by element as a unit test would.

A question asks in words to rearrange or change a list of digits ("Reverse the digits: 40713"); the answer is the new
list ("31704"). An answer scores 1 if every digit is right, else 0, and its feedback names the first digits that are
wrong and what was expected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses

import numpy as np

from sdpo_jax.environments.judging import grader, outcome
from sdpo_jax.environments.registry import register, register_generator
from sdpo_jax.errors import UserError
from sdpo_jax.types import Example, Outcome

NAME = 'digits'
LENGTH = 5  # Digits per question.
SHOWN = 3  # Wrong digits that feedback names.
HELD_OUT = 5  # One in this many lists of digits belongs to the test split.

Digits = Sequence[int]
Rule = Callable[[Digits], list[int]]


def shift(amount: int) -> Rule:
  """Return the rule that adds `amount` to every digit, modulo 10."""
  return lambda digits: [(digit + amount) % 10 for digit in digits]


def swap_neighbours(digits: Digits) -> list[int]:
  """Swap digits pairwise: 2 1, 4 3, …; the last of an odd number stays."""
  return [digits[i ^ 1] if i ^ 1 < len(digits) else digits[i] for i in range(len(digits))]


@dataclasses.dataclass(frozen=True)
class Transformation:
  """A transformation of digits and its wording in questions."""

  sentence: str
  rule: Rule


INSTRUCTIONS: dict[str, Transformation] = {
  'reverse': Transformation('Reverse the digits', lambda digits: list(digits)[::-1]),
  'swap': Transformation('Swap neighbouring digits', swap_neighbours),
  'ascending': Transformation('Sort the digits upwards', lambda digits: sorted(digits)),
  'descending': Transformation('Sort the digits downwards', lambda digits: sorted(digits, reverse=True)),
  'left': Transformation('Rotate the digits left', lambda digits: [*digits[1:], digits[0]]),
  'right': Transformation('Rotate the digits right', lambda digits: [digits[-1], *digits[:-1]]),
  'add_one': Transformation('Add one to each digit', shift(1)),
  'add_two': Transformation('Add two to each digit', shift(2)),
  'subtract_one': Transformation('Subtract one from each digit', shift(-1)),
  'complement': Transformation('Subtract each digit from nine', lambda digits: [9 - digit for digit in digits]),
}


def question(instruction: str, digits: Digits) -> str:
  """Return the user turn, e.g. 'Reverse the digits: 40713'."""
  return f'{INSTRUCTIONS[instruction].sentence}: {write(digits)}'


def answer(instruction: str, digits: Digits) -> str:
  """Return the right answer, e.g. '31704'; additions and subtractions are modulo 10."""
  return write(INSTRUCTIONS[instruction].rule(digits))


def write(digits: Digits) -> str:
  """Join digits: [4, 0, 7] becomes '407'."""
  return ''.join(str(int(digit)) for digit in digits)


def split_of(digits: Digits) -> str:
  """Return the split of a list of digits, the same for all instructions: no test list occurs in training."""
  return 'test' if sum((i + 1) * int(digit) for i, digit in enumerate(digits)) % HELD_OUT == 0 else 'train'


def draw(rng: np.random.Generator, split: str, length: int = LENGTH) -> tuple[str, list[int]]:
  """Return a random instruction and a random list of digits of the split."""
  instruction = list(INSTRUCTIONS)[rng.integers(len(INSTRUCTIONS))]
  while True:
    digits = rng.integers(10, size=length).tolist()
    if split_of(digits) == split:
      return instruction, digits


@register_generator(NAME)
def generate(split: str, seed: int, *, length: int | str = LENGTH) -> Callable[[int], Example]:
  """Make endless questions: `generator:digits`, or `generator:digits?length=7`.

  Args:
    split: 'train' or 'test'; the two share no list of digits.
    seed: different seeds give different sequences of questions.
    length: digits per question, 2 to 100.

  Raises:
    UserError: the split is unknown or the length is not such a number.
  """
  if split not in ('train', 'test'):
    raise UserError(f"The generator {NAME!r} has the splits 'train' and 'test', not {split!r}.")
  if not str(length).isdecimal() or not 2 <= int(length) <= 100:
    raise UserError(f'generator:{NAME}?length={length}: length must be a number from 2 to 100.')

  def example(index: int) -> Example:
    rng = np.random.default_rng([seed % 2**64, ('train', 'test').index(split), index])
    instruction, digits = draw(rng, split, int(length))
    return Example(
      id=f'{NAME}/{split}/{seed}/{index}',
      messages=[{'role': 'user', 'content': question(instruction, digits)}],
      environment=NAME,
      ground_truth=answer(instruction, digits),
      data_source=NAME,
      extra={'instruction': instruction},
    )

  return example


def judge(example: Example, completion: str, truncated: bool) -> Outcome:
  """Score 1 if the digits are exactly right (ignoring white space around them), else 0.

  Metrics: acc, the fraction of digits that are right; pred, the answer for a majority vote; incorrect_format, 1 for an
  answer that is not the right number of digits or was cut off; format_valid, the opposite.
  """
  expected, got = str(example.ground_truth), completion.strip()
  wanted = f'the answer must be {len(expected)} digits and nothing else.'
  if truncated:
    return _outcome(0.0, got, f'The answer was cut off before its end: {wanted}', incorrect_format=1.0)
  if len(got) != len(expected) or not (got.isascii() and got.isdecimal()):
    return _outcome(0.0, got, wanted[0].upper() + wanted[1:], incorrect_format=1.0)
  return _outcome(sum(e == g for e, g in zip(expected, got, strict=True)) / len(expected), got, feedback(expected, got))


def feedback(expected: str, got: str) -> str:
  """Describe each of the first `SHOWN` wrong digits in a line; '' if all are right. Strings have equal length."""
  wrong = [i for i in range(len(expected)) if expected[i] != got[i]]
  return '\n'.join(f'Digit {i + 1} is wrong: expected {expected[i]}, got {got[i]}.' for i in wrong[:SHOWN])


def _outcome(acc: float, pred: str, said: str, incorrect_format: float = 0.0) -> Outcome:
  found = outcome(acc == 1.0, pred, not incorrect_format, said, incorrect_format=incorrect_format)
  return dataclasses.replace(found, metrics=found.metrics | {'acc': acc})


grade = register(NAME)(grader(judge))
