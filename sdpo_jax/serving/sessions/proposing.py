"""Proposals of a session: their prompts, and sampling them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sdpo_jax.environments.thinking import without_thinking
from sdpo_jax.errors import short_repr
from sdpo_jax.serving import request_prompts
from sdpo_jax.serving.account import Account
from sdpo_jax.serving.errors import InvalidRequest
from sdpo_jax.serving.records import VersionTarget
from sdpo_jax.serving.sample_requests import SampleDraft
from sdpo_jax.serving.sessions import session_tables, teaching
from sdpo_jax.serving.sessions.conversation import Dialogue, StudentPrompt
from sdpo_jax.serving.sessions.session_records import SessionState, SessionTurn
from sdpo_jax.serving.tool_calls import Proposal, read_calls
from sdpo_jax.types import Messages

_ROLES = ('user', 'assistant', 'tool')


def new_messages(held: SessionState, messages: Sequence[Mapping[str, Any]]) -> Messages:
  """Validate the messages of a request for a proposal, and return them; raises InvalidRequest."""
  if not messages:
    return []
  new = request_prompts.conversation(messages)
  begins = not held.turns and held.session.settings.system is None
  for number, message in enumerate(new):
    if message['role'] not in _ROLES and not (begins and number == 0 and message['role'] == 'system'):
      raise InvalidRequest(
        f'messages[{number}] has the role {short_repr(message["role"])}: use user or tool; the system message is a '
        'setting of the session.',
        field=f'messages[{number}].role',
      )
  if new[-1]['role'] not in ('user', 'tool'):
    raise InvalidRequest('The last message, which the model answers, must be of a user or a tool.', field='messages')
  answered = held.answered
  if answered is not None and answered.results and any(message['role'] == 'tool' for message in new):
    raise InvalidRequest(
      f'The conversation already has the results of turn {answered.n}: leave messages of tools out.',
      field='messages',
    )
  return new


def next_prompt(held: SessionState, dialogue: Dialogue, new: Messages) -> StudentPrompt:
  """Return the prompt of the next proposal, with the results of tools and messages since the last answer."""
  answered = held.answered
  pending: Messages = [] if answered is None else [teaching.result_message(each) for each in answered.results]
  for turn in held.turns[0 if answered is None else 1 :]:
    pending += [dict(message) for message in turn.messages]
  pending += new
  if not pending:
    raise InvalidRequest(
      'There is nothing to answer: send a message of the user, or results of tools.', field='messages'
    )
  if answered is None:
    return dialogue.begin(pending)
  return dialogue.after(answered.prompt_tokens, answered.answer_tokens, pending)


def draw(
  account: Account,
  held: SessionState,
  dialogue: Dialogue,
  prompt: Sequence[int],
  messages: Messages,
  number: int,
  *,
  seed: int | None,
  drafts: bool,
  joins: bool = True,
) -> Iterator[SampleDraft | SessionTurn]:
  """Start sampling the answer to a prompt; the iterator yields drafts, if requested, and then the turn.

  Args:
    account: the account of the owner.
    held: the session.
    dialogue: the dialogue of the session.
    prompt: the token ids of the prompt.
    messages: the new messages before the turn.
    number: the number of the turn.
    seed: the seed of sampling; None: a random one.
    drafts: whether to yield drafts, too.
    joins: whether to store the turn as the newest one of the session.

  Raises:
    InvalidRequest: the prompt is too long.
    TurnConflict: the session was changed meanwhile; raised by the iterator.
    ServiceError, UserError: as `Account.sample`.
  """
  session, service = held.session, account.service
  if len(prompt) > service.max_prompt:
    named = f' {session.settings.title!r}' if session.settings.title else ''
    raise InvalidRequest(
      f'The conversation{named} has {len(prompt)} tokens, more than the limit of {service.max_prompt} '
      '(serve.prompt_buckets): open a new session, and begin it with the essentials of this one.',
      field='messages',
    )
  target = VersionTarget(adapter := account.adapter(session.adapter), adapter.head)
  options = session.settings.options(seed, [dialogue.turn_end])
  sampling = account.sample(target, prompt, options=options, drafts=drafts)

  def events() -> Iterator[SampleDraft | SessionTurn]:
    for event in sampling:
      if isinstance(event, SampleDraft):
        yield event
        continue
      sample = event.sample
      text = dialogue.text_of(sample.tokens, options.stop, sample.text)
      proposal = (
        read_calls(text, session.tool_form, session.settings.tools)
        if session.tool_form
        else Proposal(without_thinking(text).strip(), (), None)
      )
      turn = SessionTurn(
        n=number,
        messages=[dict(message) for message in messages],
        version=adapter.head,
        sample_id=sample.id,
        prompt_tokens=list(prompt),
        tokens=list(sample.tokens),
        log_probs=sample.log_probs,
        text=text,
        said=proposal.text,
        calls=tuple(proposal.calls),
        fault=proposal.fault,
        status='open' if proposal.calls or proposal.fault or not joins else 'answered',
        reused_tokens=sampling.reused,
        created=service.clock(),
      )
      if joins:
        account.call.check()  # A turn that the client has not seen would block the next one.
        with service.store.database.writing(full=True) as rows:
          session_tables.advance(rows, session, held.number)
          session_tables.put_turn(rows, session, turn)
      yield turn

  return events()
