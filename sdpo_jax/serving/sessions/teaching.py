"""What the teacher reads: the conversation that the student has read, token by token, and behind it what was said.

Only the last turn is new, so that the student's prompt up to the header of its own turn begins the teacher's. Where
all of it does not fit, what was said is shortened, never the conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses

from sdpo_jax.config import SelfDistillationConfig
from sdpo_jax.errors import UserError
from sdpo_jax.serving.errors import InvalidRequest
from sdpo_jax.serving.sessions.conversation import Asked, Dialogue
from sdpo_jax.serving.sessions.records import SessionTurn, ToolResult, edited
from sdpo_jax.serving.tool_calls import Form, write_call
from sdpo_jax.teacher import context

_LONGEST_STDERR = 4000  # Characters; of a longer one the end is shown.


@dataclasses.dataclass(frozen=True)
class Said:
  """What the teacher is shown beside the conversation."""

  demonstration: str | None = None  # What should have been proposed.
  feedback: str | None = None  # What a person says of the proposal.
  environment: str | None = None  # What came of it.

  @property
  def whole(self) -> str | None:
    """What is shown as feedback."""
    return '\n\n'.join(text for text in (self.feedback, self.environment) if text) or None

  def __bool__(self) -> bool:
    """Whether there is anything to be shown."""
    return any(text and text.strip() for text in dataclasses.astuple(self))


def teacher_prompt(
  dialogue: Dialogue,
  asked: Asked,
  said: Said,
  config: SelfDistillationConfig,
  attempt: Sequence[int] | None = None,
  *,
  title: str = '',
) -> list[int]:
  """Return the teacher's prompt.

  Args:
    dialogue: of the session.
    asked: what the student has read.
    said: what the teacher is shown.
    config: templates; `max_reprompt_len` is what fits.
    attempt: the proposal, which the teacher reads, too; None: it does not.
    title: of the session, for messages.

  Raises:
    InvalidRequest: the conversation leaves no room.
  """

  def written(solution: str | None, feedback: str | None, _: str | None) -> list[int]:
    text = context.instruction(solution, feedback, config).lstrip('\n')
    if attempt is not None:
      return dialogue.after(asked.tokens, attempt, [{'role': 'user', 'content': text}]).tokens
    return [*asked.body, *dialogue.said_behind(text)]

  try:
    tokens, _ = context.fitted(written, said.demonstration, said.whole, None, config.max_reprompt_len)
  except UserError as error:
    raise InvalidRequest(
      f'The conversation{_named(title)} has {len(asked.tokens)} tokens, which leaves the teacher no room for what is '
      f'to be learned in its {config.max_reprompt_len} (serve.teacher_buckets): decide without a correction, or open a '
      'new session.'
    ) from error
  return tokens


def of_denial(turn: SessionTurn, correction: str | None) -> Said:
  """Return what a denial shows: the correction, and what is wrong with a call that cannot be read."""
  return Said(feedback=correction, environment=turn.fault)


def of_edit(turn: SessionTurn, form: Form) -> Said:
  """Return what an edit shows: the calls as they are now, and what was said of them."""
  calls = edited(turn.calls, turn.decision)
  return Said('\n'.join(write_call(call, form) for call in calls), turn.decision.correction)


def of_results(turn: SessionTurn, results: Sequence[ToolResult]) -> Said:
  """Return what failed tools show: which, with which arguments, where, and how."""
  calls = turn.called
  return Said(environment='\n\n'.join(failure(calls[each.call].name, each) for each in results if not each.ok) or None)


def failure(name: str, result: ToolResult) -> str:
  """Return the sentence about a tool that has failed, and what it wrote."""
  where = [f'exit code {result.exit_code}'] if result.exit_code is not None else []
  where += [f'argument {result.field}'] if result.field is not None else []
  where += [f'line {result.line}'] if result.line is not None else []
  head = f'The tool {name} failed ({", ".join(where)}).' if where else f'The tool {name} failed.'
  return '\n'.join(filter(None, (head, result.text.strip(), _stderr(result))))


def result_message(result: ToolResult) -> dict[str, str]:
  """Return what the model reads of what a tool has answered."""
  if result.ok:
    return {'role': 'tool', 'content': result.text}
  code = f'Exit code {result.exit_code}.' if result.exit_code is not None and not result.text else ''
  return {'role': 'tool', 'content': '\n'.join(filter(None, (code, result.text, _stderr(result)))) or 'It failed.'}


def _stderr(result: ToolResult) -> str | None:
  """Return the end of what a tool has written to stderr; None: nothing, or the text holds it."""
  text = (result.stderr or '').strip()
  if not text or text in result.text:
    return None
  return f'stderr: {"…" if len(text) > _LONGEST_STDERR else ""}{text[-_LONGEST_STDERR:]}'


def _named(title: str) -> str:
  return f' of the session {title!r}' if title else ''
