"""Multiple choice: `mcq` (SciKnowEval), `gpqa` and `mmlu_pro`.

The reference profile reproduces the scores of lasgroup/SDPO verl/utils/reward_score/feedback/{mcq,gpqa,mmlu_pro}.py,
with their quirks: an answer needs no tags, GPQA upper-cases first (so the article "a" is choice A), feedback is always
empty, and `incorrect_format` of `mcq` is 1 if the format is *right*. `format_valid` is 1 if it is right, in both
profiles.
"""

from __future__ import annotations

import functools
import re

from sdpo_jax.environments.judging import after_thinking, by_profile, outcome, unanswered
from sdpo_jax.environments.registry import register_factory
from sdpo_jax.types import Example, Outcome

OPEN, CLOSE = '<answer>', '</answer>'
_ANSWER_IS = re.compile(r'answer is \(?([A-J])', re.IGNORECASE)
_ANSWER = re.compile(r'answer:\s*([A-J])', re.IGNORECASE)
_REFERENCE_FORMAT = re.compile(r'<answer>\s*(A|B|C|D)\s*</answer>$')
TAGGED = re.compile(r'<answer>((?:(?!<answer>).)*?)</answer>', re.DOTALL | re.IGNORECASE)
_LETTER = re.compile(r'[\s*_(\[]*([A-Za-z])[\s*_)\]]*(?:[:.,)-]|$)')  # Excludes the article in "A protein".
# Patterns that state a choice outside of tags, most reliable first; the last match of a pattern counts.
_STATED = (
  re.compile(r'\\boxed\{\s*(?:\\text\{\s*)?\(?([A-Z])[)}\s]'),
  re.compile(r'(?i:answer)(?:\s+(?i:is))?[\s:*]*(?:\(([A-Za-z])\)|([A-Z])\b)'),
  re.compile(r'(?i:choice|option)(?:\s+(?i:is))?[\s:*]*(?:\(([A-Za-z])\)|([A-Z])\b)'),
  re.compile(r'\b([A-Z])\b'),
)


def reference_mcq(example: Example, completion: str, truncated: bool) -> Outcome:
  """Score 1 iff the text after the last <answer>, up to the next </answer>, is the letter; tags are not needed."""
  pred = completion.split(OPEN)[-1].split(CLOSE)[0].strip()
  right_format = _REFERENCE_FORMAT.search(completion) is not None
  return outcome(pred == example.ground_truth, pred, right_format, incorrect_format=int(right_format))


def reference_gpqa(example: Example, completion: str, truncated: bool) -> Outcome:
  """Score 1 iff the last word A, B, C or D of the upper-cased text, or else the whole text, is the letter."""
  letters = re.findall(r'\b(A|B|C|D)\b', completion.upper())
  pred = letters[-1] if letters else completion.strip().strip('.').rstrip('.').rstrip('/')
  return outcome(pred == example.ground_truth, pred, bool(letters))


def reference_mmlu_pro(example: Example, completion: str, truncated: bool) -> Outcome:
  """Score 1 iff the first 'answer is X' or 'answer: X', or else the last single letter A to J, is the letter.

  The first two match in any case, even if X begins a word: 'The answer is incomplete' states choice i, which is none.
  """
  found = _ANSWER_IS.search(completion) or _ANSWER.search(completion)
  letters = [found.group(1)] if found else re.findall(r'\b[A-J]\b', completion)
  pred = letters[-1] if letters else ''
  valid = pred in tuple('ABCDEFGHIJ')
  score = float(pred == example.ground_truth)
  return Outcome(score, None, {'acc': score, 'pred': pred, 'incorrect_format': int(not valid), 'format_valid': valid})


def clean_mcq(example: Example, completion: str, truncated: bool, reveal_answer: bool) -> Outcome:
  """Score 1 iff the letter in the last <answer>…</answer> is right; '(B)', 'b.', 'B: because' are letters."""
  wanted = f'put only the letter of the right option between {OPEN} and {CLOSE}.'
  return _judged(example, _tagged_letter(after_thinking(completion)), truncated, wanted, reveal_answer)


def clean_stated(letters: str, example: Example, completion: str, truncated: bool, reveal_answer: bool) -> Outcome:
  """Score 1 iff the choice stated last is right: \\boxed{B}, 'the answer is B', or else a single capital."""
  text = after_thinking(completion)
  pred = _tagged_letter(text)
  for pattern in _STATED:
    if not pred:
      stated = [''.join(match.groups('')).upper() for match in pattern.finditer(text)]
      pred = next((letter for letter in reversed(stated) if letter in letters), '')
  wanted = 'end with "The answer is X.", X being the letter of the right option.'
  return _judged(example, pred, truncated, wanted, reveal_answer)


def _tagged_letter(text: str) -> str:
  tagged = TAGGED.findall(text)
  letter = _LETTER.match(tagged[-1]) if tagged else None
  return letter.group(1).upper() if letter else ''


def _judged(example: Example, pred: str, truncated: bool, wanted: str, reveal_answer: bool) -> Outcome:
  truth = str(example.ground_truth).strip().upper()
  if not pred:
    return unanswered(truncated, wanted)
  if pred == truth:
    return outcome(True, pred, True)
  revealed = f' The right answer is {truth}.' if reveal_answer else ''
  return outcome(False, pred, True, f'Your answer, {pred}, is wrong.{revealed}')


register_factory('mcq')(by_profile(reference_mcq, clean_mcq))
register_factory('gpqa')(by_profile(reference_gpqa, functools.partial(clean_stated, 'ABCD')))
register_factory('mmlu_pro')(by_profile(reference_mmlu_pro, functools.partial(clean_stated, 'ABCDEFGHIJ')))
