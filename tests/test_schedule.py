"""The benchmark path as a schedule of a run: hybrid objectives, feedback that a model writes, examples that gather."""

from __future__ import annotations

import dataclasses

import chex
import numpy as np
import pytest

from models.forward import forward
from sdpo_jax.config import Config
from sdpo_jax.errors import UserError
from sdpo_jax.objective.spec import ObjectiveSpec
from sdpo_jax.training import batching
from tests.test_batching import make_samples, per_token
from tests.test_step import make_model, run, settings

HYBRID = {
  'algorithm__mode': 'hybrid',
  'actor__ppo_mini_batch_size': 2,  # Two optimizer steps, so that both ratios are others than 1.
  'optimizer__grad_clip': 1e9,
}


def samples_of(config: Config) -> batching.GenerationBatch:
  """Eight samples: some taught, most with an advantage, one ungraded, one that a teacher reads and nobody graded."""
  samples = make_samples(config)
  spec = ObjectiveSpec.from_config(config)
  return dataclasses.replace(
    samples,
    teacher_prompts=samples.teacher_prompts if spec.reads_teacher else None,
    graded=np.array([1, 1, 1, 0, 1, 1, 1, 1], bool),
    scored=np.array([1, 1, 0, 0, 1, 1, 1, 1], bool),
    advantages=per_token([1, -1, 0, 0, 0, 0, 2, -0.5]),
    old_log_probs=samples.rollouts.model_log_probs - 4 if spec.needs_old_log_probs else None,
  )


def test_without_a_policy_gradient_hybrid_is_sdpo_bit_for_bit():
  pure, hybrid = (
    settings(**{**HYBRID, 'algorithm__mode': 'pure_sdpo'}),
    settings(**HYBRID, algorithm__policy_gradient_coef=0.0),
  )
  assert ObjectiveSpec.from_config(pure) == ObjectiveSpec.from_config(hybrid)
  one, other = (run(config, samples_of(config)) for config in (pure, hybrid))
  chex.assert_trees_all_equal(one.state, other.state)
  assert one.losses == other.losses and one.losses[0] > 0


@pytest.mark.slow
def test_without_a_divergence_hybrid_is_grpo():
  grpo = settings(**{**HYBRID, 'algorithm__mode': 'pure_sdpo'}, actor__policy_loss__loss_mode='vanilla')
  hybrid = settings(**HYBRID, algorithm__sdpo_coef=0.0)
  assert ObjectiveSpec.from_config(hybrid).coefficients == ('policy_coef',)
  one, other = (run(config, samples_of(config)) for config in (grpo, hybrid))
  chex.assert_trees_all_close(one.state.trainable, other.state.trainable, rtol=1e-6)
  assert one.losses == pytest.approx(other.losses, rel=1e-6)


def log_softmax(policy, parameters, prompts, rollouts) -> np.ndarray:
  """Log-probs of every token at every place of completions, float64: [N, T, V]."""
  rows = batching.token_rows(prompts, rollouts.completion_tokens, rollouts.completion_mask, 17)
  hidden, unembedding = forward(policy, {}, parameters, rows)
  scores = np.asarray(hidden, np.float64) @ np.asarray(unembedding, np.float64)[: policy.vocab_size].T
  return scores - np.logaddexp.reduce(scores, axis=-1, keepdims=True)


def kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
  return (np.exp(p) * (p - q)).sum(-1)


def test_the_sum_of_both_terms_is_that_of_numpy():
  """The first optimizer step, of samples 0 to 3: Jensen–Shannon over the top 8 with a tail, dual-clip PPO."""
  weights = {'algorithm__sdpo_coef': 0.7, 'algorithm__policy_gradient_coef': 0.3}
  config = settings(**HYBRID, **weights)
  samples = samples_of(config)
  rollouts, taught = samples.rollouts, samples.distill_mask.any(1)
  policy, parameters = make_model()
  student = log_softmax(policy, parameters, samples.prompts, rollouts)
  teacher = log_softmax(policy, parameters, samples.teacher_prompts, rollouts)
  top = np.argsort(-student, axis=-1)[..., :8]

  def bucketed(log_probs):
    support = np.take_along_axis(log_probs, top, -1)
    return np.concatenate([support, np.log1p(-np.exp(support).sum(-1, keepdims=True))], -1)

  s, t = bucketed(student), bucketed(teacher)
  mixed = np.logaddexp(s, t) - np.log(2)
  divergence = 0.5 * kl(s, mixed) + 0.5 * kl(t, mixed)
  token = np.take_along_axis(student, rollouts.completion_tokens[..., None], -1)[..., 0]
  ratio = np.exp(token - samples.old_log_probs)
  a, clip = samples.advantages.astype(np.float64), config.actor.policy_loss
  ppo = np.maximum(-a * ratio, -a * np.clip(ratio, 1 - clip.clip_ratio_low, 1 + clip.clip_ratio_high))
  ppo = np.where(a < 0, np.minimum(ppo, -a * clip.clip_ratio_c), ppo)
  first = np.arange(8) < 4
  mask = rollouts.completion_mask & samples.graded[:, None] & first[:, None]

  def mean(values, rows):
    chosen = mask & rows[:, None]
    return values[chosen].sum() / chosen.sum()

  wanted = 0.7 * mean(np.minimum(ratio, 2) * divergence, taught) + 0.3 * mean(ppo, samples.scored)
  outcome = run(config, samples)
  assert outcome.losses[0] == pytest.approx(wanted, rel=1e-4)
  assert np.abs(ratio[mask] - 1).max() > 0.5 and (a[:4] != 0).any()


@pytest.mark.parametrize(
  ('changes', 'sentence'),
  [
    ({'algorithm__sdpo_coef': 2.0}, 'algorithm.sdpo_coef=2.0 has no effect'),
    ({'algorithm__mode': 'hybrid', 'actor__policy_loss__loss_mode': 'vanilla'}, "loss_mode='vanilla'"),
    ({**HYBRID, 'algorithm__sdpo_coef': 0.0, 'algorithm__policy_gradient_coef': 0.0}, 'nothing is minimised'),
    ({**HYBRID, 'algorithm__policy_gradient_coef': -1.0}, 'must be at least 0'),
  ],
)
def test_settings_that_contradict_each_other_are_refused(changes, sentence):
  with pytest.raises(UserError, match=sentence):
    settings(**changes)
