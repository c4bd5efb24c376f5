"""Checks of every question's teacher prompt: does the chat template accept it, and does the length limit leave room?"""

from __future__ import annotations

from collections.abc import Sequence
import functools

from sdpo_jax.config import Config, SelfDistillationConfig
from sdpo_jax.data.prompts import Tokenizer, chat_tokens, name, named_chat_tokens
from sdpo_jax.errors import UserError
from sdpo_jax.objective.objective_spec import ObjectiveSpec
from sdpo_jax.teacher import written_feedback
from sdpo_jax.teacher.context import reprompt, shorten_end, shorten_middle
from sdpo_jax.training.specs import chat_format
from sdpo_jax.types import Example

_BATCH = 256  # Conversations tokenised in one call.
# Tokens by which a prompt may exceed the sum of its parts, as tokenisation differs where they meet.
_SEAMS = 16
_TEXT = 'xx'  # Is shortened to one character and the mark of omission.
_EMPTY = [{'role': 'user', 'content': ''}]


def check_reprompts(tokenizer: Tokenizer, examples: Sequence[Example], config: Config, spec: ObjectiveSpec) -> None:
  """Raise UserError for the first question whose teacher prompt the chat template refuses.

  The last message to the teacher has the role of the user. If the last message of the question has another role, such
  as tool, the template may accept the student's prompt and refuse the teacher's.

  Args:
    tokenizer: tokenizer of the model.
    examples: questions whose student prompts the template accepts.
    config: settings.
    spec: terms of the loss, which say whether the teacher is re-prompted.
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

  The run would fail as soon as the teacher is shown one with that question (`teacher.context`). If the limit leaves
  room for the longest possible question, questions are not checked one by one.

  Args:
    tokenizer: tokenizer of the model.
    examples: questions of `data.max_prompt_length` tokens at most.
    config: settings.
    spec: terms of the loss, which say whether the teacher is re-prompted.
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
            f'tokens, so that actor.self_distillation.max_reprompt_len={sd.max_reprompt_len} leaves no room for a '
            'demonstration or feedback: raise it above data.max_prompt_length plus the templates.'
          )


def check_writer(tokenizer: Tokenizer, examples: Sequence[Example], config: Config, spec: ObjectiveSpec) -> None:
  """Raise UserError if no question fits the prompt of the writer of feedback, see `written_feedback.ask`.

  The run would fail after its first step, if nothing could be written.

  Args:
    tokenizer: tokenizer of the model.
    examples: questions.
    config: settings.
    spec: terms of the loss, which say whether a teacher reads the feedback.
  """
  sd, why = config.actor.self_distillation, ''
  for example in examples if sd.feedback_model and spec.reprompts else ():
    try:
      written_feedback.ask(0, example.messages, _TEXT, _TEXT, sd, tokenizer, chat_format(config))
      return
    except written_feedback.UnwrittenError as error:
      why = why or f'{name(example)}, as the writer of feedback is asked about it: {error}'
  if why:
    raise UserError(f'{why}, and no other question fits either: raise it.')


def _least_shown(sd: SelfDistillationConfig) -> list[tuple[str | None, str | None, str | None]]:
  """Return (demonstration, feedback, failed attempt), as short as possible, of each combination a teacher may see."""
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
