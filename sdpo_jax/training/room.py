"""Checks per question that the teacher's prompt is possible: for the chat template, and within the length limit."""

from __future__ import annotations

from collections.abc import Sequence
import functools

from sdpo_jax.config import Config, SelfDistillationConfig
from sdpo_jax.data.prompts import Tokenizer, chat_tokens, name, named_chat_tokens
from sdpo_jax.errors import UserError
from sdpo_jax.objective.objective_spec import ObjectiveSpec
from sdpo_jax.teacher.context import reprompt, shorten_end, shorten_middle
from sdpo_jax.training.specs import chat_format
from sdpo_jax.types import Example

_BATCH = 256  # Conversations tokenised in one call.
# Tokens by which a prompt may exceed the sum of its parts, as tokenisation differs where they meet.
_SEAMS = 16
_TEXT = 'xx'  # Shortened to one character and the mark of a cut.
_EMPTY = [{'role': 'user', 'content': ''}]


def check_reprompts(tokenizer: Tokenizer, examples: Sequence[Example], config: Config, spec: ObjectiveSpec) -> None:
  """Raise UserError for the first question whose teacher prompt the chat template refuses.

  The teacher's last message is the user's. If the student's is another role's, such as a tool's, the template may
  refuse one prompt and accept the other.

  Args:
    tokenizer: tokenizer of the model.
    examples: questions whose student prompts the template accepts.
    config: settings.
    spec: whether the teacher is re-prompted at all.
  """
  if not spec.reprompts:
    return
  sd = config.actor.self_distillation
  for example in examples:
    if example.messages[-1]['role'] != 'user':
      asked, title = reprompt(example.messages, None, None, sd), f'{name(example)}, as the teacher is asked it'
      named_chat_tokens(tokenizer, [asked], [title], sd.max_reprompt_len, chat_format(config))


def check_room(tokenizer: Tokenizer, examples: Sequence[Example], config: Config, spec: ObjectiveSpec) -> None:
  """Raise UserError for the first question that leaves no room for a demonstration or feedback.

  The run would fail as soon as such a question has one (`teacher.context`). If the limit leaves room for the longest
  possible question, questions are not checked one by one.

  Args:
    tokenizer: tokenizer of the model.
    examples: questions of `data.max_prompt_length` tokens at most.
    config: settings.
    spec: whether the teacher is re-prompted at all.
  """
  sd, chat = config.actor.self_distillation, chat_format(config)
  if not spec.reprompts or sd.reprompt_truncation in ('left', 'right'):
    return
  for solution, feedback, attempt in _least_shown(sd):
    asked = functools.partial(reprompt, solution=solution, feedback=feedback, config=sd, attempt=attempt)
    [bare] = chat_tokens(tokenizer, [asked(_EMPTY)], chat)
    if config.data.max_prompt_length + len(bare) + _SEAMS <= sd.max_reprompt_len:
      continue
    for start in range(0, len(examples), _BATCH):
      part = examples[start : start + _BATCH]
      prompts = chat_tokens(tokenizer, [asked(example.messages) for example in part], chat)
      for example, tokens in zip(part, prompts, strict=True):
        if len(tokens) > sd.max_reprompt_len:
          raise UserError(
            f'{name(example)}: with the question and the instruction alone the prompt of the teacher has {len(tokens)} '
            f'tokens, and actor.self_distillation.max_reprompt_len={sd.max_reprompt_len} leaves no room for a '
            'demonstration or feedback: raise it above data.max_prompt_length plus the templates.'
          )


def _least_shown(sd: SelfDistillationConfig) -> list[tuple[str | None, str | None, str | None]]:
  """Return the shortest (demonstration, feedback, failed attempt) of each combination that a teacher may be shown."""
  shown, said = shorten_middle(_TEXT, 1), shorten_end(_TEXT, 1)
  attempt = shown if sd.include_failed_attempt else None
  kinds = []
  if sd.include_demonstration:
    kinds.append((shown, None, attempt))
  if sd.include_environment_feedback:
    kinds.append((None, said, attempt))
  if len(kinds) == 2 and not sd.environment_feedback_only_without_solution:
    kinds.append((shown, said, attempt))
  return kinds
