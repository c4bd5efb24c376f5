"""chrF: how much a translation's character n-grams are those of the reference, from 0 to 1 (Popović 2015).

MTOB's evaluation has sacrebleu's defaults, as here, but adds up the n-grams of all sentences before it divides. A score
here is that of one sentence, and evaluations show their mean, which differs.
"""

from __future__ import annotations

from sdpo_jax import extras
from sdpo_jax.config import EnvironmentsConfig
from sdpo_jax.environments.judging import TRUNCATED, after_thinking, grader, outcome, unanswered
from sdpo_jax.environments.registry import Grader, register_factory
from sdpo_jax.errors import short_repr
from sdpo_jax.types import Example, Outcome


@register_factory('chrf')
def _make(settings: EnvironmentsConfig) -> Grader:
  extras.check('chrf')
  from sacrebleu.metrics import CHRF

  metric = CHRF(char_order=6, word_order=0, beta=2)

  def judge(example: Example, completion: str, truncated: bool) -> Outcome:
    """Score the text after the thinking; thinking that was cut off is no translation."""
    said = after_thinking(completion).partition('<think>')[0].strip()
    if not said:
      return unanswered(truncated, 'write the translation and nothing else.')
    truth = str(example.ground_truth)
    score = metric.sentence_score(said, [truth]).score / 100
    cut = f'{TRUNCATED}. ' if truncated else ''
    revealed = f' The reference is {short_repr(truth, 200)}.' if settings.reveal_answer else ''
    feedback = f'{cut}Your translation has a chrF of {score:.2f}, where 1 is that of the reference.{revealed}'
    return outcome(score, said, True, '' if said == truth else feedback)

  return grader(judge)
