"""The teacher's prompt: the tokens of the student's conversation, followed by the feedback.

The teacher's prompt begins with the student's prompt up to the header of the assistant's turn; only the last turn is
new. If the prompt is too long, the feedback is shortened, never the conversation.
"""

from __future__ import annotations

from collections.abc import Sequence

from sdpo_jax.config import SelfDistillationConfig
from sdpo_jax.errors import UserError
from sdpo_jax.serving.errors import InvalidRequest
from sdpo_jax.serving.sessions.conversation import Dialogue, StudentPrompt
from sdpo_jax.serving.sessions.session_records import SessionTurn, TeacherTexts, ToolResult
from sdpo_jax.teacher import context
from sdpo_jax.types import Messages

_LONGEST_STDERR = 4000  # The most characters of stderr in a text; only the end of a longer one is shown.


def teacher_prompt(
  dialogue: Dialogue,
  asked: StudentPrompt,
  said: TeacherTexts,
  config: SelfDistillationConfig,
  attempt: Sequence[int] | None = None,
  *,
  title: str = '',
) -> list[int]:
  """Return the token ids of the teacher's prompt.

  Args:
    dialogue: the dialogue of the session.
    asked: the prompt of the student.
    said: the texts that the teacher reads.
    config: has the templates; `max_reprompt_len` is the most tokens.
    attempt: the tokens of the proposal, if the teacher reads it, too; None: it does not.
    title: the title of the session, for error messages.

  Raises:
    InvalidRequest: the conversation leaves no room for the feedback.
  """

  def written(solution: str | None, feedback: str | None, _: str | None) -> list[int]:
    text = context.instruction(solution, feedback, config).lstrip('\n')
    drawn = solution is not None  # A demonstration shows a call as the model writes it.
    if attempt is not None:
      return dialogue.after(asked.tokens, attempt, [{'role': 'user', 'content': text}], drawn).tokens
    return [*asked.body, *dialogue.said_behind(text, drawn)]

  try:
    tokens, _ = context.fitted(written, said.demonstration, said.whole, None, config.max_reprompt_len)
  except UserError as error:
    raise InvalidRequest(
      f'The conversation{_named(title)} has {len(asked.tokens)} tokens, which leaves no room for the feedback in the '
      f'{config.max_reprompt_len} of the teacher (serve.teacher_buckets): decide without a correction, or open a new '
      'session.'
    ) from error
  return tokens


def of_results(turn: SessionTurn, results: Sequence[ToolResult]) -> TeacherTexts:
  """Return the texts about failed tools, see `failure`, for the teacher."""
  calls = turn.called
  return TeacherTexts(
    environment='\n\n'.join(failure(calls[each.call].name, each) for each in results if not each.ok) or None
  )


def behind(turn: SessionTurn) -> Messages:
  """Return the messages behind a turn in the conversation: the results of its calls, or why it was denied."""
  if turn.told is None:
    return [result_message(result) for result in turn.results]
  return [{'role': 'tool' if turn.calls else 'user', 'content': turn.told}] * max(1, len(turn.calls))


def failure(name: str, result: ToolResult) -> str:
  """Return a text about a failed tool: its name, exit code, invalid argument and line, and its output."""
  where = [f'exit code {result.exit_code}'] if result.exit_code is not None else []
  where += [f'argument {result.field}'] if result.field is not None else []
  where += [f'line {result.line}'] if result.line is not None else []
  head = f'The tool {name} failed ({", ".join(where)}).' if where else f'The tool {name} failed.'
  return '\n'.join(filter(None, (head, result.text.strip(), _stderr(result))))


def result_message(result: ToolResult) -> dict[str, str]:
  """Return a tool result as a message for the model."""
  if result.ok:
    return {'role': 'tool', 'content': result.text}
  code = f'Exit code {result.exit_code}.' if result.exit_code is not None and not result.text else ''
  return {'role': 'tool', 'content': '\n'.join(filter(None, (code, result.text, _stderr(result)))) or 'It failed.'}


def _stderr(result: ToolResult) -> str | None:
  """Return the end of a tool's stderr; None: it is empty, or the text contains it."""
  text = (result.stderr or '').strip()
  if not text or text in result.text:
    return None
  return f'stderr: {"…" if len(text) > _LONGEST_STDERR else ""}{text[-_LONGEST_STDERR:]}'


def _named(title: str) -> str:
  return f' of the session {title!r}' if title else ''
