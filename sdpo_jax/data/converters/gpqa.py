"""GPQA (Rein et al. 2023): multiple-choice questions whose choices are shuffled."""

from __future__ import annotations

import numpy as np

from sdpo_jax.data.converters.raw import ConversionOptions, Parts, Splits, described, field, make_row
from sdpo_jax.data.rows import RawRow

PROMPT = (
  'Return your final response within \\boxed{{}} and only include the letter choice (A, B, C, or D) as your final '
  'response.\nProblem: {problem}\nOptions: {options}\nAnswer:'
)
CHOICES = ('Correct Answer', 'Incorrect Answer 1', 'Incorrect Answer 2', 'Incorrect Answer 3')
LETTERS = 'ABCD'


def convert(parts: Parts, options: ConversionOptions) -> Splits:
  """Return all questions, held out, with choices shuffled by `options.seed` (the reference's shuffling has no seed)."""
  return {'test': [_row(row, idx, options.seed) for idx, row in enumerate(parts['train'])]}


def _row(row: RawRow, idx: int, seed: int) -> RawRow:
  question = field(row, 'Question')
  order = np.random.default_rng([seed, idx]).permutation(len(CHOICES))
  shown = ', '.join(f'{letter}) {field(row, CHOICES[at])}' for letter, at in zip(LETTERS, order, strict=True))
  return make_row(
    row,
    idx,
    kind='gpqa',
    dataset='gpqa',
    prompt=PROMPT.format(problem=question, options=shown),
    description=described(question, 'gpqa'),
    answer=LETTERS[order.tolist().index(0)],
  )
