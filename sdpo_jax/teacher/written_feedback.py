"""Feedback that a model writes on failed completions: which ones get it, the writer's prompt, and its parsing."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
import dataclasses

import numpy as np

from sdpo_jax.config import SelfDistillationConfig
from sdpo_jax.data.prompts import ChatFormat, Tokenizer, bounded_chat_tokens, chat_tokens
from sdpo_jax.environments.chat_endpoint import conversation
from sdpo_jax.environments.outcomes import encodable, graded_of, scores_of
from sdpo_jax.environments.thinking import without_thinking
from sdpo_jax.errors import first_line
from sdpo_jax.models.chat_template import TEMPLATE_ERRORS
from sdpo_jax.teacher.context import longest_that_fits, shorten_end, shorten_middle, shown_text, successes_by_group
from sdpo_jax.types import Messages, Outcome

NO_OUTPUT = '(nothing)'  # Replaces missing feedback of a grader.


class UnwrittenError(Exception):
  """The reason why there is no feedback on a completion."""


@dataclasses.dataclass(frozen=True)
class WriterRequest:
  """The request to a writer of feedback about one completion."""

  row: int  # Row in the generation batch.
  messages: Messages
  tokens: list[int]  # The messages as tokens of the model that is trained.


def rows_to_write(
  group: Sequence[Hashable] | np.ndarray,
  texts: Sequence[str],
  outcomes: Sequence[Outcome],
  config: SelfDistillationConfig,
) -> list[int]:
  """Return the completions that get feedback: graded failures whose teacher will read it.

  With `environment_feedback_only_without_solution`, groups that have a success to show get none, because their teacher
  reads that success instead.

  Args:
    group: [N] completions of one question share a value.
    texts: [N] completions without special tokens.
    outcomes: [N] their grades.
    config: settings.
  """
  graded, group = graded_of(outcomes), list(group)
  successes = successes_by_group(scores_of(outcomes), group, config.success_reward_threshold)
  shown = {
    of
    for of, rows in successes.items()
    if config.include_demonstration and any(shown_text(texts[row], config) is not None for row in rows)
  }
  alone = config.environment_feedback_only_without_solution
  return [
    row
    for row, of in enumerate(group)
    if graded[row] and row not in successes.get(of, ()) and not (alone and of in shown)
  ]


def ask(
  row: int,
  question: Messages,
  attempt: str,
  output: str | None,
  config: SelfDistillationConfig,
  tokenizer: Tokenizer,
  chat: ChatFormat,
) -> WriterRequest:
  """Return the request to the writer about a completion, shortened to `feedback_prompt_len` tokens.

  The attempt is cut in its middle and the grader's output at its end; the question and the template stay whole.

  Args:
    row: row of the completion.
    question: conversation that the completion answers.
    attempt: text of the completion.
    output: the grader's feedback.
    config: template and limit.
    tokenizer: tokenizer of the model that is trained; it also measures lengths for other writers.
    chat: how messages become that model's tokens.

  Raises:
    UnwrittenError: question and template alone are too long, or the chat template refuses them.
  """
  attempt = shown_text(attempt, config) or ''
  output = output if isinstance(output, str) and output.strip() else NO_OUTPUT
  limit, prompt = feedback_prompt_len(config), conversation(question)

  def shortened(length: int) -> Messages:
    said = config.feedback_prompt_template.format(
      prompt=prompt, attempt=shorten_middle(attempt, length), output=shorten_end(output, length)
    )
    return [{'role': 'user', 'content': said}]

  def measured(length: int) -> tuple[Messages, list[int]]:
    messages = shortened(length)
    return messages, chat_tokens(tokenizer, [messages], chat)[0]

  longest = max(len(attempt), len(output))
  whole = shortened(longest)
  try:
    [tokens] = bounded_chat_tokens(tokenizer, [whole], limit, chat)
    if tokens is not None and len(tokens) <= limit:
      return WriterRequest(row, whole, tokens)
    messages, found = longest_that_fits(measured, longest, limit, tokens)
  except TEMPLATE_ERRORS as error:
    raise UnwrittenError(f'the chat template refuses the prompt of the writer: {first_line(error)}') from error
  if len(found) > limit:
    setting = 'max_reprompt_len' if config.feedback_max_prompt_len is None else 'feedback_max_prompt_len'
    raise UnwrittenError(
      f'the question and the template alone take {len(found)} tokens, more than '
      f'actor.self_distillation.{setting}={limit}'
    )
  return WriterRequest(row, messages, found)


def feedback_prompt_len(config: SelfDistillationConfig) -> int:
  """Return the limit of a writer's prompt in tokens: `feedback_max_prompt_len`, or else `max_reprompt_len`."""
  return config.max_reprompt_len if config.feedback_max_prompt_len is None else config.feedback_max_prompt_len


def read(text: str) -> str:
  """Return the feedback in a writer's output, without its thinking.

  Raises:
    UnwrittenError: nothing is left.
  """
  said = encodable(without_thinking(text).strip())
  if not said:
    raise UnwrittenError('the writer returned no feedback' + (', only thinking' if text.strip() else ''))
  return said
