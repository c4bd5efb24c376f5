"""Stored answers in place of sampled completions, and a teacher's stored log-probs as its signal."""

from __future__ import annotations

import numpy as np

from sdpo_jax.data.conversations import ANSWER, ScoredAnswer
from sdpo_jax.data.prompts import prompt_tokens
from sdpo_jax.rollout.buckets import padded
from sdpo_jax.training.graded import GradedRollouts
from sdpo_jax.training.session import Session
from sdpo_jax.training.specs import prompt_spec
from sdpo_jax.training.step import in_batch_order
from sdpo_jax.types import Example, Outcome, Rollouts, TeacherSignal


def read(session: Session, examples: list[Example]) -> GradedRollouts:
  """Return the answers of examples as an ungraded generation batch; nothing is known of the model that drew them."""
  answers: list[ScoredAnswer] = [example.extra[ANSWER] for example in examples]
  prompts = [prompt_tokens(session.tokenizer, example, prompt_spec(session.config)) for example in examples]
  width = max(len(answer.token_ids) for answer in answers)
  rollouts = Rollouts(
    np.arange(len(examples), dtype=np.int32),
    *padded(prompts, max(map(len, prompts))),
    *padded([answer.token_ids for answer in answers], width),
    *[np.full((len(answers), width), np.nan, np.float32)] * 3,  # Log-probs and entropies of the model that drew them.
    ['length' if answer.cut else 'stop' for answer in answers],
    [answer.text for answer in answers],
  )
  outcomes = [Outcome.unwanted('stored answers are not graded')] * len(answers)
  graded = GradedRollouts(examples, prompts, rollouts, outcomes, np.arange(len(examples)), graders_busy_s=0.0)
  return in_batch_order(session.config, graded)


def signal(graded: GradedRollouts, support: int) -> TeacherSignal:
  """Return the stored log-probs of a batch that `read` returned, [N, T, K] for K = `support`."""
  shape = (*graded.rollouts.completion_tokens.shape, support)
  ids, log_probs = np.full(shape, -1, np.int32), np.zeros(shape, np.float32)
  for row, question in enumerate(graded.rollouts.group):
    answer: ScoredAnswer = graded.examples[question].extra[ANSWER]
    places = np.arange(len(answer.positions)) - np.searchsorted(answer.positions, answer.positions)
    ids[row, answer.positions, places] = answer.entry_ids
    log_probs[row, answer.positions, places] = answer.log_probs
  return TeacherSignal(token_ids=ids, log_probs=log_probs)
