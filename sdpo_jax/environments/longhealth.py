"""LongHealth: multiple choice whose answer is the text of an option between `<answer>` and `</answer>`.

The reference profile reproduces the scores of HazyResearch/cartridges cartridges/data/longhealth/evals.py, with its
quirks: the first answer counts, even one in the thinking; it is read as the most similar option, however dissimilar;
and a completion without an answer is read as the first option.
"""

from __future__ import annotations

from collections.abc import Sequence
import difflib

from sdpo_jax.config import EnvironmentsConfig
from sdpo_jax.environments.judging import after_thinking, by_profile, outcome, unanswered
from sdpo_jax.environments.multiple_choice import CLOSE, OPEN, TAGGED
from sdpo_jax.environments.registry import Grader, register_factory
from sdpo_jax.errors import UserError, short_repr
from sdpo_jax.types import Example, Outcome

NAME = 'longhealth'
CHOICES = 'choices'  # The field of a row that holds its options, in the order shown.
ALIKE = 0.8  # Clean profile: similarity in [0, 1] at which an answer matches an option.


def reference(example: Example, completion: str, truncated: bool) -> Outcome:
  """Score 1 iff the option most like the text after the first <answer>, up to the next </answer>, is right."""
  options = [option.strip().lower() for option in example.columns[CHOICES]]
  _, opened, rest = completion.partition(OPEN)
  answer, closed, _ = rest.partition(CLOSE)
  found = bool(opened and closed)
  answer = answer.strip().lower()
  pred = max(options, key=lambda option: _likeness(answer, option)) if found else options[0]
  return outcome(pred == str(example.ground_truth).strip().lower(), pred, found)


def clean(example: Example, completion: str, truncated: bool, reveal_answer: bool) -> Outcome:
  """Score 1 iff the last <answer>…</answer> after the thinking is the right option, up to a few letters."""
  options = example.columns[CHOICES]
  wanted = f'put one of the options, exactly as it is written, between {OPEN} and {CLOSE}.'
  tagged = TAGGED.findall(after_thinking(completion))
  if not tagged:
    return unanswered(truncated, wanted)
  pred = meant(tagged[-1], options)
  if pred is None:
    return outcome(False, '', False, f'Your answer is none of the options: {wanted}')
  right = meant(str(example.ground_truth), options)
  if pred == right:
    return outcome(True, pred, True)
  revealed = f' The right answer is {short_repr(right, 200)}.' if reveal_answer else ''
  return outcome(False, pred, True, f'Your answer, {short_repr(pred, 200)}, is wrong.{revealed}')


def meant(answer: str, options: Sequence[str]) -> str | None:
  """Return the option that equals an answer up to white space, case and a few letters; None unless exactly one does."""
  distinct = {_plain(option): option for option in reversed(options)}  # The first one of equal options.
  ranked = sorted(((_at_least(_plain(answer), plain), option) for plain, option in distinct.items()), reverse=True)
  (best, option), *others = ranked
  return option if best >= ALIKE and all(other < best for other, _ in others) else None


def _plain(text: str) -> str:
  return ' '.join(text.lower().split())


def _at_least(answer: str, option: str) -> float:
  """Return the similarity of two texts; 0 if their lengths alone put it below `ALIKE`."""
  most = 2 * min(len(answer), len(option)) / max(len(answer) + len(option), 1)
  return _likeness(answer, option) if most >= ALIKE else 0.0


def _likeness(answer: str, option: str) -> float:
  return difflib.SequenceMatcher(None, answer, option).ratio()


def check_questions(examples: Sequence[Example]) -> None:
  """Raise a UserError that names the row of a question without options, or whose answer is not exactly one of them."""
  for example in examples:
    options = example.columns.get(CHOICES)
    listed = isinstance(options, list) and all(isinstance(option, str) and option.strip() for option in options)
    where = example.extra.get('origin', example.id)
    if not listed or len(options) < 2:
      raise UserError(
        f'{where}: field {CHOICES!r}, from which {NAME!r} takes the options, must be a list of at least two texts, '
        f'not {short_repr(options)}.'
      )
    if meant(str(example.ground_truth), options) is None:
      raise UserError(f'{where}: the answer {short_repr(example.ground_truth)} matches none or two of the {CHOICES!r}.')


def _by_reference(examples: list[Example], completions: list[str], *, truncated: list[bool]) -> list[Outcome]:
  return [reference(*parts) for parts in zip(examples, completions, truncated, strict=True)]


_by_reference.needs_process = True  # On long texts `difflib` takes hours.


@register_factory(NAME)
def _make(settings: EnvironmentsConfig) -> Grader:
  grade = _by_reference if settings.profile == 'reference' else by_profile(reference, clean)(settings)
  grade.check_questions = check_questions
  return grade
