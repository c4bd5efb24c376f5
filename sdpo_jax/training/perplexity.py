"""The perplexity of the reference answers to held-out questions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import jax
import numpy as np

from sdpo_jax.config import Config
from sdpo_jax.data.prompts import name, prompt_tokens
from sdpo_jax.distributed.stopping import NEVER, Stop
from sdpo_jax.errors import UserError
from sdpo_jax.evaluation.completions import samples_by_source
from sdpo_jax.learning.readings import program_of
from sdpo_jax.learning.update import UpdateSpec, completion_log_probs
from sdpo_jax.models.chat_template import turn_end
from sdpo_jax.models.policy import Policy
from sdpo_jax.training.divergence import values_of_tokens
from sdpo_jax.training.session import Session
from sdpo_jax.training.specs import chat_format, prompt_spec, update_spec
from sdpo_jax.types import Example, Rollouts, Tree

PERPLEXITY = 'answer_perplexity'  # The metric of an evaluation.


def measure(
  session: Session, trainable: Tree, examples: Sequence[Example], stop: Stop = NEVER
) -> dict[str, dict[str, float]]:
  """Return exp of the mean negative log-prob of a token, over all tokens of the reference answers, by data source.

  An answer is scored behind the student's prompt, at temperature 1, with the token by which the chat template ends a
  turn.

  Args:
    session: session of the run.
    trainable: trainable parameters of the student.
    examples: held-out questions, with texts as ground truths.
    stop: whether the run is to stop; checked before each micro-batch.

  Returns:
    `PERPLEXITY` of each data source.

  Raises:
    UserError: a question has no answer in words, or a longer one than `data.max_response_length`.
    StoppedError: `stop` asked the run to stop.
  """
  prompts = [prompt_tokens(session.tokenizer, example, prompt_spec(session.config)) for example in examples]
  answers = [answer_tokens(session.config, session.tokenizer, example) for example in examples]
  lengths = np.array([len(tokens) for tokens in answers])
  mask = np.arange(lengths.max()) < lengths[:, None]
  tokens = np.zeros(mask.shape, np.int32)
  tokens[mask] = np.concatenate(answers)
  rollouts = Rollouts.of_completions(np.arange(len(examples)), tokens, mask)
  score = perplexity_program(session.policy, update_spec(session.config), session.mesh)
  values = values_of_tokens(
    session, prompts, rollouts, lambda rows, targets, _: score(session.base, trainable, rows, targets)[0], stop
  )
  found = samples_by_source(examples, rollouts.group)
  means = {source: values[rows][mask[rows]].mean(dtype=np.float64) for source, rows in found.items()}
  return {source: {PERPLEXITY: float(np.exp(-mean))} for source, mean in means.items()}


def perplexity_program(
  policy: Policy, spec: UpdateSpec, mesh: jax.sharding.Mesh
) -> Callable[..., tuple[jax.Array, jax.Array]]:
  """Return the jitted `completion_log_probs` at temperature 1, from `base` on."""
  plain = dataclasses.replace(spec, objective=dataclasses.replace(spec.objective, temperature=1.0))
  return program_of(mesh, completion_log_probs, policy, plain, mesh)


def answer_tokens(config: Config, tokenizer: Any, example: Example) -> list[int]:
  """Return the tokens of a question's reference answer, and the one that ends a turn if the chat template has one."""
  answer, limit = example.ground_truth, config.data.max_response_length
  if not isinstance(answer, str) or not answer.strip():
    raise UserError(
      f'{name(example)}: trainer.test_perplexity=true scores reference answers, and this row has no text as its '
      "'answer': add it, or leave test_perplexity at false."
    )
  end = turn_end(tokenizer, chat_format(config).variables)
  tokens = tokenizer(answer, add_special_tokens=False, split_special_tokens=True)['input_ids']
  tokens += [] if end is None else [tokenizer.convert_tokens_to_ids(end)]
  if len(tokens) > limit:
    raise UserError(
      f"{name(example)}: the 'answer' has {len(tokens)} tokens with the end of the turn, more than "
      f'data.max_response_length={limit}: raise it, or leave trainer.test_perplexity at false.'
    )
  return tokens
