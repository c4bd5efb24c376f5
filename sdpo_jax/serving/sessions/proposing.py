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
from sdpo_jax.serving.sessions import compaction, session_tables, teaching
from sdpo_jax.serving.sessions.conversation import Dialogue, StudentPrompt
from sdpo_jax.serving.sessions.session_records import SessionState, SessionTurn
from sdpo_jax.serving.store.database import Database
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
  last = held.denied[-1] if held.denied else held.answered
  if last is not None and teaching.behind(last) and any(message['role'] == 'tool' for message in new):
    raise InvalidRequest(
      f'The conversation already has the results of turn {last.n}: leave messages of tools out.', field='messages'
    )
  return new


def next_prompt(
  database: Database, held: SessionState, dialogue: Dialogue, new: Messages, most: int, *, denied: bool = True
) -> tuple[list[int], bool]:
  """Return the prompt of the next proposal, and whether older parts of the conversation are left out of it.

  It holds the results of tools and the messages since the last answer. If it has more than `most` tokens, results lose
  their middle or, if hardly any room is left for them, older parts are left out, see `compaction`. A prompt that is
  still too long is without the denied proposals right before, or cannot be helped.

  Args:
    database: has the turns of the session.
    held: the session.
    dialogue: the dialogue of the session.
    new: the new messages.
    most: the most tokens.
    denied: whether those denied proposals since the last answer that stay in the conversation are in the prompt, too.
  """
  answered = held.denied[-1] if denied and held.denied else held.answered
  told = [] if answered is None or answered.told is None else teaching.behind(answered)  # Stays whole.
  pending: Messages = [] if answered is None or told else teaching.behind(answered)
  for turn in held.turns:
    pending += [dict(message) for message in turn.messages] if answered is None or turn.n > answered.n else []
  pending += new
  if not (told or pending):
    raise InvalidRequest(
      'There is nothing to answer: send a message of the user, or results of tools.', field='messages'
    )

  def going_on(messages: Messages) -> StudentPrompt:
    if answered is None:
      return dialogue.begin(messages)
    return dialogue.after(answered.prompt_tokens, answered.answer_tokens, [*told, *messages])

  prompt = going_on(pending).tokens
  if len(prompt) <= most:
    return prompt, False
  if len(going_on(compaction.cut(pending, 0)).tokens) <= (1 - compaction.LEAST_LEFT) * most:
    return compaction.with_outputs(going_on, pending, most).tokens, False
  turns = [turn for turn in session_tables.turns(database, held.session.id) if turn.n <= held.number]
  exchanges = compaction.exchanges_of(turns, {turn.n for turn in held.denied} if not denied else set())
  prompt = compaction.fitted(dialogue, exchanges, pending, most).tokens
  if len(prompt) > most and denied and held.denied:
    return next_prompt(database, held, dialogue, new, most, denied=False)
  return prompt, True


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
  compacted: bool = False,
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
    compacted: whether older parts of the conversation are left out of the prompt.
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
      '(serve.prompt_buckets), without the parts that can be left out: shorten the message, or open a new session, and '
      'begin it with the essentials of this one.',
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
        compacted=compacted,
        created=service.clock(),
      )
      if joins:
        account.call.check()  # A turn that the client has not seen would block the next one.
        with service.store.database.writing(full=True) as rows:
          session_tables.advance(rows, session, held.number)
          session_tables.put_turn(rows, session, turn)
      yield turn

  return events()
