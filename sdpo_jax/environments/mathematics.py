"""Mathematics: grades the answer in the last \\boxed{…}, compared with the right one by math-verify.

The reference profile reproduces the scores and feedback of lasgroup/SDPO verl/utils/reward_score/feedback/math.py, with
its quirks: only the last 100 characters are searched, and answers are read as running text, not as LaTeX. The clean
profile searches the whole answer, reads LaTeX as LaTeX, and compares text and numbers (with the row's `tolerance`).
"""

from __future__ import annotations

import dataclasses
import decimal
import pathlib
import re

from sdpo_jax.config import EnvironmentsConfig
from sdpo_jax.environments.judging import TRUNCATED, after_thinking, outcome
from sdpo_jax.environments.registry import register_factory
from sdpo_jax.environments.sandbox.sandbox import Limits, Sandbox, SandboxJob
from sdpo_jax.types import Example, Outcome

HARNESS = pathlib.Path(__file__).with_name('math_harness.py')
SECONDS = 5  # Limit per comparison, as in the reference.
MEMORY_MB = 1024
MAX_CHARACTERS = 2000  # Longest answer that is parsed instead of only compared as text.
REFERENCE_WINDOW = 100  # Characters at the end in which the reference searches for the answer.
WRONG_FORMAT = 'Your answer had the wrong format. The solution must be given in the format: \\boxed{your_answer}.'
WAS_TRUNCATED = 'Your response was truncated because it exceeded the maximum length.'

_MARKS = re.compile(r'\\(?:boxed|fbox)\s*\{|\\[{}]|[{}]')
_TEXT = re.compile(r'\\(?:text|mathrm|textbf|mbox)\s*\{([^{}]*)\}')
_THOUSANDS = re.compile(r'(?<=\d)\\,(?=\d{3}(?!\d))')
# White space that would join two numbers: '1 2' is not 12, nor '3. 14' 3.14.
_GAP = re.compile(r'(?<=[\d.])(?:\s|\\[ ,])+(?=\.?\d)')
_GAPPED = re.compile(r'(?:^|[^a-z\d\s.}_^])[\d.,]+ \.?\d')  # A macro may have two numbers: \frac 1 2.
# Allows commas only between thousands: 1,2 is a pair.
_NUMBER = re.compile(r'[-+]?(?:\d{1,3}(?:,\d{3})+|\d*)(?:\.\d+)?(?:e[-+]?\d+)?')


def reference_boxed(completion: str) -> str | None:
  """Return the content of the last \\boxed{ in the last 100 characters; '' if it is not closed, None without one."""
  _, opening, rest = completion[-REFERENCE_WINDOW:].rpartition('\\boxed{')
  if not opening:
    return None
  depth = 1
  for position, character in enumerate(rest):
    depth += {'{': 1, '}': -1}.get(character, 0)
    if depth == 0:
      return rest[:position]
  return ''


def last_boxed(text: str) -> str:
  """Return the content of the last closed \\boxed{…} or \\fbox{…}; '' without one."""
  open_braces: list[int | None] = []  # Start of each box's content; None for other braces.
  start = end = 0
  for mark in _MARKS.finditer(text):
    if mark.group() == '}':
      begun = open_braces.pop() if open_braces else None
      if begun is not None and begun > start:
        start, end = begun, mark.start()
    elif mark.group().endswith('{') and mark.group() != '\\{':
      open_braces.append(None if mark.group() == '{' else mark.end())
  return text[start:end].strip()


def plain(answer: str) -> str:
  """Normalise an answer to plain text: no dollars, \\text{…}, spaces but `_GAP`, or final full stop, in lower case."""
  text = _THOUSANDS.sub('', _TEXT.sub(r'\1', answer).replace('$', '').replace('\\!', ''))
  words = _GAP.sub('\0', text).replace('\\ ', '').replace('\\,', '')
  return re.sub(r'\s+', '', words).replace('\0', ' ').rstrip('.').lower()


def number(answer: str) -> decimal.Decimal | None:
  """Parse an answer that is a number ('1,000' and '$5.' too); None if it is not one."""
  text = plain(answer)
  if re.search(r',\s', answer) or not (_NUMBER.fullmatch(text) and any(c.isdigit() for c in text)):
    return None
  try:
    return decimal.Decimal(text.replace(',', ''))
  except decimal.InvalidOperation:  # The exponent is too large, or no digits precede it.
    return None


def quickly(gold: str, pred: str, tolerance: float) -> bool | None:
  """Return whether two answers are equal if text or plain numbers decide it; None if they do not."""
  if plain(gold) == plain(pred):
    return True
  gold = plain(gold).replace(' ', '') if _GAPPED.search(plain(gold)) else gold  # Of the data, it is grouping.
  if len(pred) > MAX_CHARACTERS or _GAPPED.search(plain(pred)):
    return False
  left, right = number(gold), number(pred)
  if left is None or right is None:
    return None
  with decimal.localcontext() as context:
    context.prec = 50
    try:
      return abs(left - right) <= decimal.Decimal(tolerance) * max(abs(left), abs(right))
    except decimal.DecimalException:  # Exponents too large.
      return False


@register_factory('math')
class MathGrader:
  """Grades mathematical answers in the settings' profile; owns the sandbox in which they are compared."""

  limits_itself = True

  def __init__(self, settings: EnvironmentsConfig):
    """Start the sandbox.

    Raises:
      UserError: no sandbox works here and `environments.sandbox.allow_unsandboxed` is off.
    """
    self._reference = settings.profile == 'reference'
    self._reveal = settings.reveal_answer
    self._limits = Limits(
      SECONDS + 1,
      SECONDS,
      MEMORY_MB,
      settings.sandbox.file_mb,
      settings.sandbox.output_mb,
      stdout_bytes=0,
      stderr_bytes=0,
      result_bytes=len('false'),
    )
    self._sandbox = Sandbox(settings.sandbox, HARNESS)
    self.layers = self._sandbox.layers  # Descriptions of the layers that confine the comparisons.

  def close(self) -> None:
    """Close the sandbox."""
    self._sandbox.close()

  def __call__(self, examples: list[Example], completions: list[str], *, truncated: list[bool]) -> list[Outcome]:
    """Return score 1 iff the boxed answer equals the ground truth.

    Raises:
      AttributeError: an example has no extra information (reference profile, as in the reference).
    """
    if self._reference:
      for example in examples:
        example.extra.get('split')
      boxes = [reference_boxed(completion) for completion in completions]
      same = [str(example.ground_truth) == box for example, box in zip(examples, boxes, strict=True)]
      known = [equal or (None if box else False) for equal, box in zip(same, boxes, strict=True)]
      preds = [box or '' for box in boxes]
    else:
      preds = [last_boxed(after_thinking(completion)) for completion in completions]
      known = [
        quickly(str(example.ground_truth), pred, float(example.extra.get('tolerance') or 0.0)) if pred else False
        for example, pred in zip(examples, preds, strict=True)
      ]
    open_rows = [row for row, verdict in enumerate(known) if verdict is None]
    asked = [{'gold': str(examples[row].ground_truth), 'pred': preds[row]} for row in open_rows]
    jobs = [SandboxJob({**answers, 'boxed': not self._reference}, '', self._limits) for answers in asked]
    failed: dict[int, str] = {}
    for row, report in zip(open_rows, self._sandbox.run(jobs), strict=True):
      known[row] = report.result is True  # An answer that overruns or breaks the parser is wrong.
      if report.status == 'failed':
        failed[row] = f'The sandbox could not compare the answer: {report.reason}.'
    judged = [self._outcome(*parts) for parts in zip(examples, preds, map(bool, known), truncated, strict=True)]
    return [Outcome.ungraded(failed[row]) if row in failed else found for row, found in enumerate(judged)]

  def _outcome(self, example: Example, pred: str, right: bool, truncated: bool) -> Outcome:
    graded = outcome(right, pred, bool(pred), self._feedback(example, pred, right, truncated))
    more = {'truncated': int(truncated), 'truncated_and_missing_answer': int(truncated and not pred)}
    return dataclasses.replace(graded, metrics=graded.metrics | more)

  def _feedback(self, example: Example, pred: str, right: bool, truncated: bool) -> str:
    if self._reference:
      return WAS_TRUNCATED if truncated else '' if pred else WRONG_FORMAT
    if right:
      return ''
    if not pred:
      return f'{TRUNCATED} before it answered: be shorter.' if truncated else WRONG_FORMAT
    return f'Your answer, {pred[:200]}, is wrong.' + f' The right answer is {example.ground_truth}.' * self._reveal
