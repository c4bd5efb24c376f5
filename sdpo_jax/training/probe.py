"""What there is to learn before training: the student's accuracy beside that of its self-teacher."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from models import huggingface
from models import tokenizer as tokenizers
from sdpo_jax.config import Config
from sdpo_jax.data import pipeline
from sdpo_jax.data.prompts import Tokenizer, prompt_tokens
from sdpo_jax.environments import registry
from sdpo_jax.environments.grading import Graders
from sdpo_jax.rollout.engine import Sampler
from sdpo_jax.teacher.context import build_teacher_context
from sdpo_jax.training.evaluation import grade
from sdpo_jax.types import Example, Rollouts, Tree


def probe_model(config: Config) -> dict[str, float]:
  """`probe` of the model directory `config.model.path` on the config's held-out questions.

  Raises:
    UserError: a missing model, or no held-out rows.
  """
  tokenizer = tokenizers.load(config.model.path)
  policy, params = huggingface.load(config.model.path, config.model)
  sampler = Sampler(
    policy,
    tokenizer,
    max_batch_rows=config.rollout.max_batch_rows,
    stop=config.rollout.stop,
    stop_token_ids=(*config.rollout.stop_token_ids, *tokenizers.stop_token_ids(config.model.path, tokenizer)),
  )
  with Graders(config.environments) as graders:
    examples = pipeline.evaluation_examples(config, tokenizer, registry)
    graders.prepare({example.environment for example in examples})
    return probe(config, sampler, params, tokenizer, graders, examples)


def probe(
  config: Config, sampler: Sampler, params: Tree, tokenizer: Tokenizer, graders: Graders, examples: Sequence[Example]
) -> dict[str, float]:
  """Fractions of successes (score at least `success_reward_threshold`) of the student and of its self-teacher.

  The self-teacher is the same model at the same temperature, reading what re-prompting would show the teacher of each
  completion; it answers once for every completion for which there is such a signal.

  Args:
    config: settings of rollouts and re-prompting, and the seed.
    sampler: without a limit on prompts, since the teacher's are longer.
    params: parameters of student and teacher.
    tokenizer: with a chat template.
    graders: of the questions.
    examples: G questions.

  Returns:
    student/sampled, student/greedy, student/groups_with_success; teacher/signal, the fraction of completions that have
    one; of those: teacher/accuracy, teacher/student_accuracy (the student's own), and teacher/feedback_accuracy and
    teacher/demonstration_accuracy where the teacher read one of the two (absent if it never did).
  """
  threshold = config.actor.self_distillation.success_reward_threshold

  def sample(prompts: Sequence[Sequence[int]], n: int, temperature: float, step: int) -> Rollouts:
    return sampler.sample(
      {},
      params,
      prompts,
      n=n,
      temperature=temperature,
      top_p=config.rollout.top_p,
      top_k=config.rollout.top_k,
      min_p=config.rollout.min_p,
      max_tokens=config.data.max_response_length,
      seed=config.seed,
      step=step,
    )

  prompts = [prompt_tokens(tokenizer, example, config) for example in examples]
  correct = lambda outcomes: np.asarray([outcome.score >= threshold for outcome in outcomes])
  rollouts = sample(prompts, config.rollout.n, config.rollout.temperature, 0)
  outcomes = grade(graders, examples, rollouts)
  success = correct(outcomes)
  context = build_teacher_context(
    [examples[group].messages for group in rollouts.group],
    rollouts.group,
    rollouts.text,
    outcomes,
    config.actor.self_distillation,
    tokenizer,
    seed=config.seed,
    step=0,
    enable_thinking=config.data.enable_thinking,
  )
  results = {
    'student/sampled': float(success.mean()),
    'student/greedy': float(correct(grade(graders, examples, sample(prompts, 1, 0.0, 0))).mean()),
    'student/groups_with_success': float(success.reshape(len(examples), -1).any(1).mean()),
    'teacher/signal': float(context.mask.mean()),
  }
  rows = np.flatnonzero(context.mask)
  if not len(rows):
    return results
  answers = sample([context.prompt_tokens[row] for row in rows], 1, config.rollout.temperature, 1)
  taught = correct(grade(graders, [examples[rollouts.group[row]] for row in rows], answers))
  shown = np.asarray([context.solutions[row] is not None for row in rows])
  results['teacher/accuracy'] = float(taught.mean())
  results['teacher/student_accuracy'] = float(success[rows].mean())
  for name, chosen in (('demonstration', shown), ('feedback', ~shown)):
    if chosen.any():
      results[f'teacher/{name}_accuracy'] = float(taught[chosen].mean())
  return results
