"""A teacher that reads the student's own prompts teaches every completion, also of questions that nobody grades."""

from __future__ import annotations

import types

import numpy as np
import pytest

from sdpo_jax.config import Config, EnvironmentsConfig
from sdpo_jax.environments.grading import Graders
from sdpo_jax.environments.outcomes import check_graded, missing_of
from sdpo_jax.errors import UserError
from sdpo_jax.evaluation import evaluate
from sdpo_jax.learning import batching
from sdpo_jax.training import step
from sdpo_jax.training.graded import GradedRollouts
from sdpo_jax.training.specs import batch_spec, declared_buckets, objective_spec
from sdpo_jax.types import Example, Outcome
from tests.generation_batches import NO_MEMBERS, make_config, make_samples
from tests.scored_rollouts import WORDS, rollouts


def config(**changes) -> Config:
  made = make_config(**changes)
  made.actor.self_distillation.teacher_context = 'prompt'
  made.algorithm.rollout_correction.rollout_is = None
  return made


def graded(samples, outcomes):
  """Return these samples, two of every question, as they come from the graders."""
  count = len(samples)
  examples = [Example(str(i), [{'role': 'user', 'content': f'q{i}'}], 'none', None, 's') for i in range(count // 2)]
  return GradedRollouts(examples, samples.prompts[::2], samples.rollouts, outcomes, np.arange(count), 0.0)


def test_the_teacher_reads_what_the_student_reads_and_teaches_everything():
  made = config()
  samples = make_samples(made)
  spec = objective_spec(made)
  assert spec.needs_teacher and not spec.reprompts
  session = types.SimpleNamespace(config=made, spec=spec, tokenizer=None, references={}, **NO_MEMBERS)
  outcomes = [Outcome(1.0), Outcome.ungraded('late'), Outcome.unwanted('no'), Outcome(0.0, 'wrong')] * 2
  found = graded(samples, outcomes)
  context = step.build_teacher_prompts(session, found, seed=0, step=1)
  assert context.prompt_tokens == [samples.prompts[row // 2 * 2] for row in range(8)]
  assert context.messages[3] == found.examples[1].messages
  batch = step.build_batch(session, None, found, context, {})
  weights = batching.coefficients(batch, np.arange(8), batch_spec(made))['distill_coef']
  # token-mean over all completions.
  mask = samples.rollouts.completion_mask
  np.testing.assert_allclose(weights, mask / mask.sum(), rtol=1e-6)
  made.actor.self_distillation.teacher_context = 'reprompt'
  session.spec = objective_spec(made)
  again = step.build_batch(session, None, found, context, {})
  assert not batching.coefficients(again, np.arange(8), batch_spec(made))['distill_coef'][1].any()


def test_its_prompts_have_the_lengths_of_the_students():
  made = config()
  made.data.prompt_buckets, made.data.max_prompt_length, made.data.reprompt_buckets = (8, 16), 32, (4, 999)
  assert declared_buckets(made).prompts == ((8, 8), (16, 16), (32, 32))


def test_a_student_that_would_teach_itself_is_refused():
  made = Config()
  made.model.path, made.data.train_files, made.trainer.test_freq = 'm', ('rows.jsonl',), 0
  made.actor.self_distillation.teacher_context = 'prompt'
  made.validate()
  made.actor.self_distillation.teacher_regularization = 'live'
  with pytest.raises(UserError, match="teacher_context='prompt' with teacher_regularization='live': .*'reprompt'"):
    made.validate()


QUESTION = Example('q', [{'role': 'user', 'content': '?'}], 'none', None, 'open')


def test_nobody_misses_the_scores_of_questions_without_a_grader():
  with Graders(EnvironmentsConfig()) as graders:
    graders.prepare({'none', 'none,digits'})
    outcomes = graders.grade([QUESTION] * 2, ['a', 'b'], truncated=[False, True])
    with_other = Example('q', QUESTION.messages, 'none,digits', '12', 'open')
    [scored] = graders.grade([with_other], ['12'], truncated=[False])
  assert scored.score == 1.0 and scored.rewards == {'digits': 1.0}
  assert [(outcome.score, outcome.graded, outcome.wanted) for outcome in outcomes] == [(None, False, False)] * 2
  check_graded(outcomes, 0.0)
  assert missing_of([*outcomes, Outcome.ungraded('late'), Outcome(1.0)]).tolist() == [False, False, True, False]
  with pytest.raises(UserError, match='1 of 3 completions could not be graded'):
    check_graded([*outcomes, Outcome.ungraded('late')], 0.0)
  metrics = evaluate.metrics_by_source([QUESTION], rollouts(['a', 'b'], [0, 0]), outcomes, 2, WORDS)['open']
  assert np.isnan(metrics['mean@2']) and metrics['ungraded_fraction'] == 0 and metrics['questions'] == 1
  assert not any(name.startswith(('best@', 'acc')) for name in metrics)
