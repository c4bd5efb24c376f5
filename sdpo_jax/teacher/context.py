"""The teacher's context: the student's prompt, or a re-prompt with additional information.

A re-prompt adds a successful attempt of the same group (the demonstration) and the grader's feedback, in the paper's
templates (arXiv 2601.20802, Table 2; reference ray_trainer.py:610-796).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
import dataclasses
import math
from typing import TypeVar

import numpy as np

from sdpo_jax.config import SelfDistillationConfig
from sdpo_jax.data.prompts import (
  DEFAULT_FORMAT,
  ChatFormat,
  Tokenizer,
  chat_tokens,
  chat_tokens_of_cut,
  count_tokens,
  named_chat_tokens,
)
from sdpo_jax.environments.outcomes import graded_of, scores_of
from sdpo_jax.environments.thinking import without_closed_thinking, without_thinking
from sdpo_jax.errors import UserError, short_repr
from sdpo_jax.models.control_tokens import plain_messages
from sdpo_jax.types import Messages, Outcome

_Asked = TypeVar('_Asked')
_Texts = tuple[str | None, str | None, str | None]  # Solution, feedback and the student's own attempt, or None each.
_CUT_MIDDLE = '\n...\n'  # Replaces the removed middle of a demonstration.
_CUT_END = '...'  # Ends a shortened feedback.
_SLACK = 4  # Tokens of max_reprompt_len that shortening may leave unused, to search less.
_LONG = 16  # Texts with more characters than this per token of the limit are not tokenised whole.
_GUESS = 4  # Approximate characters per token in texts of graders and models.
_LIMIT = 'actor.self_distillation.max_reprompt_len'


@dataclasses.dataclass
class TeacherContext:
  """The teacher's prompts before each of N completions."""

  messages: list[Messages]  # [N]
  prompt_tokens: list[list[int]]  # [N] of varying length; the completion's own token ids follow verbatim.
  mask: np.ndarray  # [N] float32, 1 where the teacher's prompt has more information than the student's.
  solutions: list[str | None]  # [N] demonstrations before any shortening.
  feedback: list[str | None]  # [N] feedback on each completion, whether or not the prompt includes it.
  truncated: np.ndarray  # [N] bool, whether the prompt had to be shortened.
  metrics: dict[str, float]


def shown_text(completion: str, config: SelfDistillationConfig) -> str | None:
  """Return a completion as shown to the teacher, without thinking if the settings say so; None if nothing is left."""
  closed_only = config.thinking_rule == 'closed'
  if config.remove_thinking_from_demonstration:
    completion = without_closed_thinking(completion) if closed_only else without_thinking(completion)
  return completion if closed_only or completion.strip() else None


def successes_by_group(
  scores: Sequence[float] | np.ndarray, group: Sequence[Hashable], threshold: float
) -> dict[Hashable, list[int]]:
  """Return group → rows whose score reaches the threshold, in batch order; groups without such rows are absent.

  Scores are compared as float32; NaN means no score.
  """
  successes: dict[Hashable, list[int]] = {}
  for row in np.flatnonzero(np.asarray(scores, np.float32) >= np.float32(threshold)):
    successes.setdefault(group[int(row)], []).append(int(row))
  return successes


def choose_demonstration(
  row: int,
  candidates: Sequence[int],
  config: SelfDistillationConfig,
  *,
  sample_ids: Sequence[int] | np.ndarray,
  seed: int,
  step: int,
) -> int | None:
  """Return the row whose completion is shown to the teacher of `row`; None if there is none.

  `demonstration='first'` takes the first candidate in batch order. `'random'` draws one from (seed, step, global
  sample number of `row`): the draw depends neither on the order of the batch nor on which process holds the row.
  """
  if config.dont_reprompt_on_self_success:
    candidates = [candidate for candidate in candidates if candidate != row]
  if not candidates:
    return None
  if config.demonstration == 'first':
    return candidates[0]
  ranked = sorted(candidates, key=lambda candidate: sample_ids[candidate])
  draw = np.random.default_rng([seed % 2**64, step, int(sample_ids[row])])
  return ranked[int(draw.integers(len(ranked)))]


def reprompt(
  messages: Messages,
  solution: str | None,
  feedback: str | None,
  config: SelfDistillationConfig,
  attempt: str | None = None,
) -> Messages:
  """Return the conversation that the teacher sees: its last message is replaced by the re-prompted user turn.

  With neither a solution nor feedback the question is not changed. The student's failed `attempt`, if any, comes
  before the feedback.
  """
  prompt = messages[-1]['content']
  if solution is not None or feedback is not None:
    shown = '' if solution is None else config.solution_template.format(successful_previous_attempt=solution)
    said = '' if attempt is None else config.attempt_template.format(attempt=attempt)
    said += '' if feedback is None else config.feedback_template.format(feedback_raw=feedback)
    prompt = config.reprompt_template.format(prompt=prompt, solution=shown, feedback=said)
  return [*messages[:-1], {'role': 'user', 'content': prompt}]


def shorten_middle(text: str | None, length: int, cut: str = _CUT_MIDDLE) -> str | None:
  """Shorten a text, such as a demonstration, to `length` characters by replacing its middle with `cut`.

  Its beginning shows the approach and its end holds the answer, which the teacher needs most.
  """
  if text is None or len(text) <= length:
    return text
  return text[: (length + 1) // 2] + cut + text[len(text) - length // 2 :]


def shorten_end(text: str | None, length: int) -> str | None:
  """Cut feedback after `length` characters, since graders put the kind of error and the first failure first."""
  return text if text is None or len(text) <= length else text[:length] + _CUT_END


def same_context(messages: Sequence[Messages], prompts: Sequence[list[int]]) -> TeacherContext:
  """Return the context of a teacher that reads the student's own prompts; its mask is 1 for every completion.

  Args:
    messages: [N] the question of each completion.
    prompts: [N] the tokens of the student's prompts.
  """
  count = len(prompts)
  return TeacherContext(
    messages=list(messages),
    prompt_tokens=list(prompts),
    mask=np.ones(count, np.float32),
    solutions=[None] * count,
    feedback=[None] * count,
    truncated=np.zeros(count, bool),
    metrics={'teacher/prompt_length_mean': float(np.mean([len(prompt) for prompt in prompts]))},
  )


def build_teacher_context(
  messages: Sequence[Messages],
  group: Sequence[Hashable] | np.ndarray,
  completions: Sequence[str],
  outcomes: Sequence[Outcome],
  config: SelfDistillationConfig,
  tokenizer: Tokenizer,
  *,
  seed: int,
  step: int,
  sample_ids: Sequence[int] | np.ndarray | None = None,
  chat: ChatFormat = DEFAULT_FORMAT,
) -> TeacherContext:
  """Return the teacher's prompts for N completions.

  Over-long prompts follow `reprompt_truncation`. 'content' shortens demonstration, attempt and feedback, the longest
  first, to about the greatest length with which the templated prompt has at most `max_reprompt_len` tokens; the
  question, the closing instruction and the assistant header are never cut. 'right' and 'left' cut tokens off that end,
  as the reference does (the former loses the instruction and the assistant header). 'error' ends the run.

  Args:
    messages: [N] the question of each completion.
    group: [N] completions of one question share a value.
    completions: [N] texts without special tokens.
    outcomes: [N] their grades.
    config: settings.
    tokenizer: a transformers tokenizer with a chat template.
    seed: seed of the random choice of demonstrations.
    step: generation batch, part of the same seed.
    sample_ids: [N] global number of each completion in the generation batch; None: 0 … N − 1.
    chat: how messages become tokens. (The reference passes only enable_thinking to the teacher's template, True if not
      set; here student and teacher have the same variables.)

  Raises:
    UserError: a prompt does not fit `max_reprompt_len` and cannot or must not be shortened, or the chat template
      refuses a prompt.
  """
  count = len(completions)
  sample_ids = np.arange(count) if sample_ids is None else sample_ids
  group = list(group)
  graded = graded_of(outcomes)
  successes = successes_by_group(scores_of(outcomes), group, config.success_reward_threshold)
  feedback = [_feedback(outcome, config) for outcome in outcomes]
  solutions: list[str | None] = []
  used: list[str | None] = []
  attempts: list[str | None] = []
  shown = [shown_text(completion, config) for completion in completions]
  for row in range(count):
    right = successes.get(group[row], ())
    taught = config.teach_successes or row not in right
    # Whether an ungraded completion needs teaching is unknown.
    teachable = config.include_demonstration and graded[row] and taught
    candidates = [success for success in right if shown[success] is not None] if teachable else ()
    chosen = choose_demonstration(row, candidates, config, sample_ids=sample_ids, seed=seed, step=step)
    solution = None if chosen is None else shown[chosen]
    solutions.append(solution)
    failed = graded[row] and row not in right
    attempts.append(shown[row] if config.include_failed_attempt and failed else None)
    shown_instead = config.environment_feedback_only_without_solution and solution is not None
    used.append(None if shown_instead or not taught else feedback[row])
  mask = np.array([s is not None or f is not None for s, f in zip(solutions, used, strict=True)], np.float32)

  texts = list(zip(solutions, used, attempts, strict=True))
  prompts = [
    reprompt(question, solution, said, config, attempt)
    for question, (solution, said, attempt) in zip(messages, texts, strict=True)
  ]
  # Completions of a group often share their prompt: each distinct one is tokenised once.
  keys = [tuple((message['role'], message['content']) for message in prompt) for prompt in prompts]
  distinct = {key: row for row, key in reversed(list(enumerate(keys)))}
  asked = [prompts[row] for row in distinct.values()]
  names = [f'The prompt of the teacher for {short_repr(messages[row][-1]["content"])}' for row in distinct.values()]
  found = named_chat_tokens(tokenizer, asked, names, config.max_reprompt_len, chat)
  tokens = dict(zip(distinct, found, strict=True))
  fitted = {
    key: _fit(messages[row], prompts[row], texts[row], tokens[key], config, tokenizer, chat)
    for key, row in distinct.items()
  }
  truncated = np.array([fitted[key][2] for key in keys], bool)
  lengths = [len(fitted[keys[row]][1]) for row in np.flatnonzero(mask)]

  def fraction(flags: Sequence[bool] | np.ndarray, of: np.ndarray = graded) -> float:
    return float(np.mean(np.asarray(flags)[of])) if of.any() else 0.0

  return TeacherContext(
    messages=[fitted[key][0] for key in keys],
    prompt_tokens=[fitted[key][1] for key in keys],
    mask=mask,
    solutions=solutions,
    feedback=feedback,
    truncated=truncated,
    metrics={
      'self_distillation/success_group_fraction': len(successes)
      / max(len({group[row] for row in np.flatnonzero(graded)}), 1),
      'self_distillation/success_sample_fraction': fraction([s is not None for s in solutions]),
      'self_distillation/feedback_available_fraction': fraction([f is not None for f in feedback]),
      'self_distillation/feedback_used_fraction': fraction([f is not None for f in used]),
      'self_distillation/reprompt_sample_fraction': fraction(mask),
      'self_distillation/truncated_fraction': fraction(truncated),  # Of all graded completions.
      'teacher/truncation': fraction(truncated, mask > 0),  # Of the teacher's prompts.
      'teacher/prompt_length_mean': float(np.mean(lengths)) if lengths else math.nan,
    },
  )


def reprompted(
  messages: Messages,
  solution: str | None,
  feedback: str | None,
  config: SelfDistillationConfig,
  tokenizer: Tokenizer,
  chat: ChatFormat = DEFAULT_FORMAT,
  attempt: str | None = None,
  *,
  setting: str = _LIMIT,
) -> tuple[list[int], bool]:
  """Return the teacher's prompt for one question, and whether texts were shortened, as in `build_teacher_context`.

  A conversation whose last message is not the user's, such as one that ends with a tool's output, gets another user
  turn.

  Args:
    messages: the question.
    solution: text shown as the demonstration.
    feedback: text shown as the grader's feedback.
    config: templates and limit.
    tokenizer: a transformers tokenizer with a chat template.
    chat: how messages become tokens.
    attempt: the student's own attempt, shown before the feedback.
    setting: name of the setting of the limit, for error messages.

  Raises:
    UserError: as in `build_teacher_context`.
  """
  if messages[-1]['role'] != 'user':
    messages = [*messages, {'role': 'user', 'content': ''}]
  asked = reprompt(messages, solution, feedback, config, attempt)
  [tokens] = named_chat_tokens(tokenizer, [asked], ["The teacher's prompt"], config.max_reprompt_len, chat)
  _, tokens, truncated = _fit(messages, asked, (solution, feedback, attempt), tokens, config, tokenizer, chat, setting)
  return tokens, truncated


def reprompted_behind(
  prompt: Sequence[int],
  solution: str | None,
  feedback: str | None,
  config: SelfDistillationConfig,
  tokenizer: Tokenizer,
  chat: ChatFormat = DEFAULT_FORMAT,
  attempt: str | None = None,
  *,
  setting: str = _LIMIT,
) -> tuple[list[int], bool]:
  """Return the teacher's prompt for a prompt that is given as tokens, and whether texts were shortened to fit.

  It consists of the prompt's own tokens, the text that a re-prompted turn has after the question, and an empty line.

  Args:
    prompt: token ids.
    solution: text shown as the demonstration.
    feedback: text shown as the grader's feedback.
    config: templates and limit.
    tokenizer: a transformers tokenizer; no chat template is used.
    chat: determines whether texts may contain control tokens.
    attempt: the student's own attempt, shown before the feedback.
    setting: name of the setting of the limit, for error messages.

  Raises:
    UserError: the prompt and the templates alone do not fit.
  """

  def written(solution: str | None, feedback: str | None, attempt: str | None) -> list[int]:
    text = instruction(solution, feedback, config, attempt) + '\n\n'
    if chat.split_special_tokens:
      return [*prompt, *plain_messages(tokenizer).encode_text(text)]
    return [*prompt, *tokenizer.encode(text, add_special_tokens=False)]

  return fitted(written, solution, feedback, attempt, config.max_reprompt_len, setting=setting)


def instruction(
  solution: str | None, feedback: str | None, config: SelfDistillationConfig, attempt: str | None = None
) -> str:
  """Return the text that a re-prompted turn has after the question."""
  [said] = reprompt([{'role': 'user', 'content': ''}], solution, feedback, config, attempt)
  return said['content']


def fitted(
  written: Callable[[str | None, str | None, str | None], list[int]],
  solution: str | None,
  feedback: str | None,
  attempt: str | None,
  limit: int,
  *,
  setting: str = _LIMIT,
) -> tuple[list[int], bool]:
  """Return the tokens of a teacher's prompt whose texts are as long as fits, and whether they were shortened.

  Args:
    written: maps a solution, feedback and an attempt to the tokens of the prompt with them.
    solution: text shown as the demonstration.
    feedback: text shown as the grader's feedback.
    attempt: the student's own attempt.
    limit: maximum number of tokens.
    setting: name of the setting of the limit, for error messages.

  Raises:
    UserError: the prompt does not fit with texts of one character.
  """

  texts = solution, feedback, attempt
  whole = written(*texts) if _longest(texts) <= _LONG * limit else None
  if whole is not None and len(whole) <= limit:
    return whole, False
  alone = 'the prompt and the instruction alone take {} tokens'
  _, tokens = _shortened(lambda *texts: (None, written(*texts)), texts, limit, whole, setting, alone)
  return tokens, True


def _feedback(outcome: Outcome, config: SelfDistillationConfig) -> str | None:
  """Return the feedback on a completion that the settings select: the grader's, a model's, or both."""
  if not outcome.graded:
    return None
  said = outcome.feedback if config.include_environment_feedback and isinstance(outcome.feedback, str) else None
  said = said if said and said.strip() else None
  if not config.feedback_model or outcome.written is None:
    return said
  return outcome.written if said is None or not config.feedback_keeps_output else f'{said}\n\n{outcome.written}'


def _fit(
  messages: Messages,
  prompt: Messages,
  texts: _Texts,
  tokens: list[int] | None,
  config: SelfDistillationConfig,
  tokenizer: Tokenizer,
  chat: ChatFormat,
  setting: str = _LIMIT,
) -> tuple[Messages, list[int], bool]:
  """Return the conversation, its tokens and whether they had to be shortened; `tokens` is None if far too many."""
  limit = config.max_reprompt_len
  if tokens is not None and len(tokens) <= limit:
    return prompt, tokens, False
  if config.reprompt_truncation == 'right':
    return prompt, (tokens or chat_tokens_of_cut(tokenizer, prompt, limit, chat, _beginning)[0])[:limit], True
  if config.reprompt_truncation == 'left':
    return prompt, (tokens or chat_tokens_of_cut(tokenizer, prompt, limit, chat, _end)[0])[-limit:], True
  if texts[:2] == (None, None):  # The row is not taught: its prompt is never read.
    return prompt, tokens or chat_tokens(tokenizer, [prompt], chat)[0], False
  if config.reprompt_truncation == 'error':
    raise UserError(
      f"A teacher's prompt has {count_tokens(tokens, limit)}, more than {setting}={limit}: raise it, or set "
      'actor.self_distillation.reprompt_truncation=content to shorten demonstrations and feedback.'
    )

  def written(solution: str | None, feedback: str | None, attempt: str | None) -> tuple[Messages, list[int]]:
    shorter = reprompt(messages, solution, feedback, config, attempt)
    return shorter, chat_tokens(tokenizer, [shorter], chat)[0]

  alone = 'the question and the instruction alone take {} tokens with the chat template'
  return *_shortened(written, texts, limit, tokens, setting, alone), True


def _longest(texts: _Texts) -> int:
  return max(len(text or '') for text in texts)


def _shortened(
  written: Callable[[str | None, str | None, str | None], tuple[_Asked, list[int]]],
  texts: _Texts,
  limit: int,
  whole: Sequence[int] | None,
  setting: str,
  alone: str,
) -> tuple[_Asked, list[int]]:
  """Return the prompt, and its tokens, with the longest beginnings and ends of the texts that fit.

  Args:
    written: maps texts to the prompt with them, and its tokens.
    texts: the whole texts.
    limit: maximum number of tokens.
    whole: tokens of the prompt with whole texts; None: far too many.
    setting: name of the setting of the limit, for error messages.
    alone: text for error messages that says what takes {} tokens even without these texts.

  Raises:
    UserError: the prompt does not fit with texts of one character.
  """
  solution, feedback, tried = texts

  def attempt(length: int) -> tuple[_Asked, list[int]]:
    return written(shorten_middle(solution, length), shorten_end(feedback, length), shorten_middle(tried, length))

  found = longest_that_fits(attempt, _longest(texts), limit, whole)
  if len(found[1]) > limit:
    raise UserError(
      f'{setting}={limit} leaves no room for a demonstration or feedback: {alone.format(len(found[1]))}; raise it '
      'above data.max_prompt_length plus the templates.'
    )
  return found


def longest_that_fits(
  attempt: Callable[[int], tuple[_Asked, list[int]]], longest: int, limit: int, whole: Sequence[int] | None
) -> tuple[_Asked, list[int]]:
  """Return nearly the longest of the shortened prompts that fit; if none does, the shortest, which is too long.

  Args:
    attempt: maps the number of characters that each text may have to (prompt, its tokens).
    longest: characters of the longest text.
    limit: maximum number of tokens.
    whole: tokens of the prompt with whole texts; None: far too many.
  """
  low, high, best = 1, longest, attempt(1)
  if len(best[1]) > limit:
    return best
  if whole is not None:
    above = len(whole)
  else:  # From below, so that the time depends on the limit and not on the length of the texts.
    length = _GUESS * limit
    while length < high and len((candidate := attempt(length))[1]) <= limit:
      low, best, length = length, candidate, 2 * length
    high, above = (length, len(candidate[1])) if length < high else (high, limit + 1)
  # Length in tokens is nearly linear in length in characters: interpolate, and halve now and then to be safe.
  halve = False
  while high - low > 1 and limit - len(best[1]) > _SLACK:
    share = 0.5 if halve else (limit - len(best[1])) / (above - len(best[1]))
    middle = min(max(low + int((high - low) * share), low + 1), high - 1)
    candidate = attempt(middle)
    if len(candidate[1]) <= limit:
      low, best = middle, candidate
    else:
      high, above = middle, len(candidate[1])
    halve = not halve
  return best


def _beginning(messages: Messages, length: int) -> Messages:
  return [*messages[:-1], {**messages[-1], 'content': messages[-1]['content'][:length]}]


def _end(messages: Messages, length: int) -> Messages:
  return [*messages[:-1], {**messages[-1], 'content': messages[-1]['content'][-length:]}]
