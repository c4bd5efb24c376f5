"""Digit instructions: the quickstart's task, endless, generated, and graded element by element as a unit test would.

A question asks in words to rearrange or change a list of digits ("Reverse the digits: 40713"); the answer is the new
list ("31704"). An answer scores 1 if every digit is right, else 0, and its feedback names the first digits that are
wrong and what was expected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import numpy as np

from sdpo_jax.environments.registry import register, register_generator
from sdpo_jax.errors import UserError
from sdpo_jax.types import Example, Outcome

NAME = 'digits'
LENGTH = 5  # Digits of a question.
SHOWN = 3  # Wrong digits that feedback names.
HELD_OUT = 5  # One list of digits in so many belongs to the test split.

Digits = Sequence[int]
Rule = Callable[[Digits], list[int]]


def shift(amount: int) -> Rule:
  """Return the rule that adds `amount` to every digit, modulo 10."""
  return lambda digits: [(digit + amount) % 10 for digit in digits]


def swap_neighbours(digits: Digits) -> list[int]:
  """Digits 2 1, 4 3, …; the last of an odd number stays."""
  return [digits[i ^ 1] if i ^ 1 < len(digits) else digits[i] for i in range(len(digits))]


@dataclasses.dataclass(frozen=True)
class Instruction:
  """A way to transform digits, and how to ask for it."""

  sentence: str
  rule: Rule


INSTRUCTIONS: dict[str, Instruction] = {
  'reverse': Instruction('Reverse the digits', lambda digits: list(digits)[::-1]),
  'swap': Instruction('Swap neighbouring digits', swap_neighbours),
  'ascending': Instruction('Sort the digits upwards', lambda digits: sorted(digits)),
  'descending': Instruction('Sort the digits downwards', lambda digits: sorted(digits, reverse=True)),
  'left': Instruction('Rotate the digits left', lambda digits: [*digits[1:], digits[0]]),
  'right': Instruction('Rotate the digits right', lambda digits: [digits[-1], *digits[:-1]]),
  'add_one': Instruction('Add one to each digit', shift(1)),
  'add_two': Instruction('Add two to each digit', shift(2)),
  'subtract_one': Instruction('Subtract one from each digit', shift(-1)),
  'complement': Instruction('Subtract each digit from nine', lambda digits: [9 - digit for digit in digits]),
}


def question(instruction: str, digits: Digits) -> str:
  """Return the user turn, e.g. 'Reverse the digits: 40713'."""
  return f'{INSTRUCTIONS[instruction].sentence}: {write(digits)}'


def answer(instruction: str, digits: Digits) -> str:
  """Return the right answer, e.g. '31704'; additions and subtractions are modulo 10."""
  return write(INSTRUCTIONS[instruction].rule(digits))


def write(digits: Digits) -> str:
  """[4, 0, 7] as '407'."""
  return ''.join(str(int(digit)) for digit in digits)


def split_of(digits: Digits) -> str:
  """Return the split that a list of digits belongs to, whatever the instruction: so no test list is ever seen in
  training.
  """
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
  """Endless questions: `generator:digits`, or `generator:digits?length=7`.

  Args:
    split: 'train' or 'test'; the two share no list of digits.
    seed: two seeds give two lists of questions.
    length: digits of a question, 2 to 100.

  Raises:
    UserError: unknown split, or a length that is no such number.
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


@register(NAME)
def grade(examples: list[Example], completions: list[str], *, truncated: list[bool]) -> list[Outcome]:
  """Scores 1 for exactly the right digits (white space around them is ignored), else 0.

  Metrics: acc, the fraction of digits that are right; pred, the answer for a majority vote; incorrect_format, 1 for an
  answer that is not the right number of digits or was cut off; format_valid, the opposite.
  """
  return [
    _grade(str(example.ground_truth), completion.strip(), cut)
    for example, completion, cut in zip(examples, completions, truncated, strict=True)
  ]


def _grade(expected: str, got: str, truncated: bool) -> Outcome:
  wanted = f'the answer must be {len(expected)} digits and nothing else.'
  if truncated:
    return _outcome(0.0, got, f'The answer was cut off before its end: {wanted}', incorrect_format=True)
  if len(got) != len(expected) or not (got.isascii() and got.isdecimal()):
    return _outcome(0.0, got, wanted[0].upper() + wanted[1:], incorrect_format=True)
  return _outcome(sum(e == g for e, g in zip(expected, got, strict=True)) / len(expected), got, feedback(expected, got))


def feedback(expected: str, got: str) -> str:
  """One line for each of the first `SHOWN` wrong digits; '' if all are right. Both strings are of one length."""
  wrong = [i for i in range(len(expected)) if expected[i] != got[i]]
  return '\n'.join(f'Digit {i + 1} is wrong: expected {expected[i]}, got {got[i]}.' for i in wrong[:SHOWN])


def _outcome(acc: float, pred: str, said: str, incorrect_format: bool = False) -> Outcome:
  metrics: dict[str, Any] = {
    'acc': acc,
    'pred': pred,
    'incorrect_format': float(incorrect_format),
    'format_valid': float(not incorrect_format),
  }
  return Outcome(score=float(acc == 1.0), feedback=said, metrics=metrics)
