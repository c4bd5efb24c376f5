"""Mathematics with a final answer: MATH-500, GSM8K, AIME and AMC."""

from __future__ import annotations

from collections.abc import Callable
import re

from sdpo_jax.data.converters.raw import ConversionOptions, Parts, Splits, described, field, make_row
from sdpo_jax.data.rows import ENVIRONMENTS, RawRow
from sdpo_jax.errors import UserError

PROMPT = '{problem}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}.'


def converter(
  dataset: str, problem: str, answer: str, final: Callable[[str], str] = str.strip
) -> Callable[[Parts, ConversionOptions], Splits]:
  """Return a function that converts a data set of problems with final answers.

  Args:
    dataset: name under which results are reported.
    problem: field of the question.
    answer: field of its answer, a string or a number.
    final: extracts the final answer from that field's text; returns '' if there is none.
  """

  def convert(parts: Parts, options: ConversionOptions) -> Splits:
    return {split: [row_of(row, idx) for idx, row in enumerate(rows)] for split, rows in parts.items()}

  def row_of(row: RawRow, idx: int) -> RawRow:
    question, given = field(row, problem), str(field(row, answer, kind=(str, int, float)))
    truth = final(given)
    if not truth:
      raise UserError(f'{row.origin}: field {answer!r} holds no final answer.')
    return make_row(
      row,
      idx,
      kind='math',
      dataset=dataset,
      prompt=PROMPT.format(problem=question),
      description=described(question, 'math'),
      answer=truth,
      environment=None if dataset in ENVIRONMENTS else 'math',
    )

  return convert


def after_hashes(text: str) -> str:
  """Return the number after '####' without commas, in answers of GSM8K."""
  _, mark, answer = text.rpartition('####')
  return answer.strip().replace(',', '') if mark else ''


def boxed(text: str) -> str:
  """Return the content of a \\boxed{} that is the whole text, otherwise the text itself, in answers of AIME 2024."""
  found = re.fullmatch(r'\\boxed\{(.*)\}', text.strip(), re.DOTALL)
  return (found.group(1) if found else text).strip()
