"""The score of a translation is chrF, as sacrebleu computes it and as its formula says."""

import collections

import numpy as np
import pytest
from sacrebleu.metrics import CHRF

from sdpo_jax import extras
from sdpo_jax.config import EnvironmentsConfig
from sdpo_jax.data import rows
from sdpo_jax.environments import registry
from sdpo_jax.errors import UserError
from tests.environments.processor_time import processor_seconds_at_most

TRUTH = 'She went to the beach, and caught two fish.'


def judged(completion, truth=TRUTH, *, truncated=False, **settings):
  value = {'prompt': 'Translate.', 'environment': 'chrf', 'answer': truth}
  example = rows.example(rows.RawRow('rows.jsonl, line 3', 3, value), 'test')
  [outcome] = registry.get('chrf', EnvironmentsConfig(**settings))([example], [completion], truncated=[truncated])
  return outcome


def by_formula(said, truth, beta=2):
  """F-score of precision and recall, each the mean over the lengths 1 to 6 of which both texts have n-grams."""
  texts = [''.join(text.split()) for text in (said, truth)]
  precisions, recalls = [], []
  for n in range(1, 7):
    ours, theirs = (collections.Counter(text[i : i + n] for i in range(len(text) - n + 1)) for text in texts)
    if ours and theirs:
      precisions.append((ours & theirs).total() / ours.total())
      recalls.append((ours & theirs).total() / theirs.total())
  precision, recall = np.mean(precisions), np.mean(recalls)
  return (1 + beta**2) * precision * recall / (beta**2 * precision + recall) if precision + recall else 0.0


WORDS = 'she he went goes to from the a beach house , and caught Caught two fish . Mą éŋ 鱼 x'.split()


def test_the_score_is_sacrebleu_s_and_the_formula_s():
  draw = np.random.default_rng(0)
  metric = CHRF()
  scores = []
  for _ in range(200):
    said, truth = (' '.join(draw.choice(WORDS, draw.integers(1, 9))) for _ in range(2))
    outcome = judged(f'<think>\n{truth}\n</think>\n\n{said}\n', truth)
    assert outcome.score == pytest.approx(metric.sentence_score(said, [truth]).score / 100, abs=1e-12)
    assert outcome.score == pytest.approx(by_formula(said, truth), abs=1e-12)
    assert outcome.metrics['acc'] == outcome.score and outcome.metrics['pred'] == said
    scores.append(outcome.score)
  assert min(scores) < 0.1 and max(scores) > 0.5 and len(set(scores)) > 100


def test_equal_texts_score_one_and_case_and_order_count():
  assert judged(TRUTH).score == 1.0 and judged(TRUTH).feedback == ''
  assert judged(TRUTH.upper()).score < judged('Two fish she caught, and went to the beach.').score < 0.9
  assert judged('鱼').score == 0.0


@pytest.mark.parametrize(
  ('completion', 'truncated', 'said'),
  [
    ('', False, 'wrong format: write the translation and nothing else'),
    (f'<think>It says: {TRUTH}', True, 'cut off at the length limit before it answered'),
    (f'<think>{TRUTH}</think>\n', False, 'wrong format'),
  ],
)
def test_thinking_is_no_translation(completion, truncated, said):
  outcome = judged(completion, truncated=truncated)
  assert outcome.score == 0 and said in outcome.feedback and outcome.metrics['format_valid'] == 0


@pytest.mark.parametrize('profile', ['clean', 'reference'])
def test_feedback_tells_the_reference_only_if_it_may(profile):
  outcome = judged('She caught a whale.', profile=profile)
  assert f'a chrF of {outcome.score:.2f}' in outcome.feedback and 'whale' not in outcome.feedback
  assert not any(word in outcome.feedback for word in ('fish', 'beach', 'went'))
  assert f'The reference is {TRUTH!r}.' in judged('No.', profile=profile, reveal_answer=True).feedback
  assert judged('She', truncated=True).feedback.startswith('Your response was cut off at the length limit. ')


def test_long_completions_take_no_longer_than_they_are():
  for piece in ('a', 'ab cd ', '<think>', '</think>'):
    with processor_seconds_at_most(30):  # A second if the time is proportional to the length.
      judged(piece * (100_000 // len(piece)))


def test_a_row_without_a_reference_and_a_missing_package_are_named(monkeypatch):
  with pytest.raises(UserError, match=r"rows\.jsonl, line 3: field 'answer' must be a non-empty string, not None"):
    judged('x', truth=None)
  monkeypatch.setattr(extras.importlib.util, 'find_spec', lambda _: None)
  with pytest.raises(
    UserError, match=r"The grader 'chrf' needs sacrebleu, .* requirements-chrf\.txt .*sdpo_jax\[chrf\]"
  ):
    registry.get('chrf')
