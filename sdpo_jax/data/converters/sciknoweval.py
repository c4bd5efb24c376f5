"""SciKnowEval (Feng et al. 2024): multiple-choice questions of level 3, one domain at a time.

The system prompt is the reference's, which speaks of four options even if there are two.
"""

from __future__ import annotations

import math

import numpy as np

from sdpo_jax.data.converters.raw import ConversionOptions, Parts, Splits, described, field, make_row
from sdpo_jax.data.rows import RawRow
from sdpo_jax.errors import UserError

DOMAINS = ('biology', 'chemistry', 'material', 'physics')
LEVEL = 'L3'
TYPES = ('mcq-4-choices', 'mcq-2-choices')
SYSTEM = """
Given a question and four options, please select the right answer. Respond in the following format:
<reasoning>
...
</reasoning>
<answer>
...
</answer>

For the answer, only output the letter corresponding to the correct option (A, B, C, or D), and nothing else. \
Do not restate the answer text. For example, if the answer is "A", just output:
<answer>
A
</answer>
"""
TEST_SIZE, SEED = 0.1, 42


def convert(parts: Parts, options: ConversionOptions) -> Splits:
  """Return the rows of `options.domain`, with a tenth of them held out as in the reference.

  Raises:
    UserError: the domain is unknown or has no row, or a row is not in the source's schema.
  """
  if options.domain not in DOMAINS:
    raise UserError(f'--domain={options.domain} must be one of {", ".join(DOMAINS)}.')
  picked = [row for row in parts['test'] if _wanted(row, options.domain)]
  if not picked:
    raise UserError(f'There is no {LEVEL} multiple-choice question of the domain {options.domain!r} in this source.')
  rows = [_row(row, idx) for idx, row in enumerate(picked)]
  train, test = split(len(rows))
  return {'train': [rows[idx] for idx in train], 'test': [rows[idx] for idx in test]}


def split(count: int) -> tuple[np.ndarray, np.ndarray]:
  """Return the indices of training and held-out rows: Hugging Face's `train_test_split(test_size=0.1, seed=42)`."""
  order = np.random.default_rng(SEED).permutation(count)
  held_out = math.ceil(TEST_SIZE * count)
  return order[held_out:], order[:held_out]


def _wanted(row: RawRow, domain: str) -> bool:
  return (
    field(row, 'domain').lower() == domain and field(row, 'type') in TYPES and field(row, 'details', 'level') == LEVEL
  )


def _row(row: RawRow, idx: int) -> RawRow:
  question, answer = field(row, 'question'), field(row, 'answerKey')
  texts, labels = field(row, 'choices', 'text', kind=list), field(row, 'choices', 'label', kind=list)
  if len(texts) != len(labels) or answer not in labels:
    raise UserError(
      f"{row.origin}: 'choices' has {len(texts)} texts for the labels {labels}, and 'answerKey' is {answer!r}: each "
      'choice must have its label, and the answer be one of them.'
    )
  choices = '\n'.join(f'{label}: {text}' for label, text in zip(labels, texts, strict=True))
  return make_row(
    row,
    idx,
    kind='mcq',
    dataset='sciknoweval',
    system=SYSTEM,
    prompt=f'{question}\n\n{choices}\nPlease reason step by step.',
    description=described(question, 'mcq'),
    answer=answer,
    elo=1500,
  )
