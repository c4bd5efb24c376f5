"""Proposals: their prompts, and their events while they are drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from sdpo_jax.environments.thinking import without_thinking
from sdpo_jax.errors import short_repr
from sdpo_jax.serving import request_prompts
from sdpo_jax.serving.errors import InvalidRequest
from sdpo_jax.serving.records import VersionTarget
from sdpo_jax.serving.sample_requests import SampleDone, SampleDraft, Sampling
from sdpo_jax.serving.sessions import archive, teaching
from sdpo_jax.serving.sessions.conversation import Dialogue, StudentPrompt
from sdpo_jax.serving.sessions.ledger import Ledger, SessionState
from sdpo_jax.serving.sessions.session_records import SessionTurn
from sdpo_jax.serving.store import session_tables
from sdpo_jax.serving.tenant import Tenant
from sdpo_jax.serving.tool_calls import read_calls
from sdpo_jax.types import Messages

_ROLES = ('user', 'assistant', 'tool')


class Proposing:
  """An iterator over the events of a proposal."""

  def __init__(self, sampling: Sampling, finish: Callable[[SampleDone], SessionTurn]):
    """Wrap a proposal that is being drawn.

    Args:
      sampling: draws it.
      finish: makes its turn and stores it.
    """
    self._sampling, self._finish = sampling, finish

  def __iter__(self) -> Iterator[SampleDraft | SessionTurn]:
    """Yield drafts, if requested, and the turn; drawing is cancelled when the reader stops.

    Raises:
      TurnConflict: something else has changed the session meanwhile.
      ServiceError: as `Sampling`.
    """
    for event in self._sampling:
      yield self._finish(event) if isinstance(event, SampleDone) else event

  def result(self) -> SessionTurn:
    """Wait for the turn and return it; raise the errors of `__iter__`."""
    *_, turn = self
    return turn

  def cancel(self) -> None:
    """Cancel the proposal."""
    self._sampling.cancel()


def new_messages(held: SessionState, messages: Sequence[Mapping[str, Any]]) -> Messages:
  """Return the checked new messages of a request for a proposal."""
  if not messages:
    return []
  new = request_prompts.conversation(messages)
  begins = not held.turns and held.session.settings.system is None
  for number, message in enumerate(new):
    if message['role'] not in _ROLES and not (begins and number == 0 and message['role'] == 'system'):
      raise InvalidRequest(
        f'messages[{number}] has the role {short_repr(message["role"])}: messages of a session are of the user or a '
        'tool; its system message is a setting.',
        field=f'messages[{number}].role',
      )
  if new[-1]['role'] not in ('user', 'tool'):
    raise InvalidRequest('The last message must be of the user or a tool: it is to be answered.', field='messages')
  answered = held.answered
  if answered is not None and answered.results and any(message['role'] == 'tool' for message in new):
    raise InvalidRequest(
      f'The results of turn {answered.n} are in the conversation already: leave the messages of tools out.',
      field='messages',
    )
  return new


def next_prompt(held: SessionState, dialogue: Dialogue, new: Messages) -> StudentPrompt:
  """Return the prompt of the next proposal."""
  answered = held.answered
  pending: Messages = [] if answered is None else [teaching.result_message(each) for each in answered.results]
  for turn in held.turns[0 if answered is None else 1 :]:
    pending += [dict(message) for message in turn.messages]
  pending += new
  if not pending:
    raise InvalidRequest(
      'There is nothing to answer: send a message of the user, or the results of the tools.', field='messages'
    )
  if answered is None:
    return dialogue.begin(pending)
  return dialogue.after(answered.prompt_tokens, answered.answer_tokens, pending)


def draw(
  tenant: Tenant,
  ledger: Ledger,
  held: SessionState,
  dialogue: Dialogue,
  prompt: Sequence[int],
  seed: int | None,
  drafts: bool,
  *,
  number: int,
  messages: Messages,
  joins: bool = True,
) -> Proposing:
  """Draw the answer to a prompt.

  Args:
    tenant: the owner.
    ledger: stores the turn.
    held: the session.
    dialogue: its conversation.
    prompt: token ids.
    seed: seed of the proposal; None: a random one.
    drafts: whether to also yield drafts.
    number: number of the turn.
    messages: the messages before the turn.
    joins: whether to store it as the session's newest turn.

  Raises:
    InvalidRequest: the prompt is too long.
    ServiceError, UserError: as `Tenant.sample`.
  """
  session, service = held.session, tenant.service
  if len(prompt) > service.max_prompt:
    named = f' {session.settings.title!r}' if session.settings.title else ''
    raise InvalidRequest(
      f'The conversation{named} has {len(prompt)} tokens, and {service.max_prompt} are read at most '
      '(serve.prompt_buckets): open a new session, and begin it with what matters of this one.',
      field='messages',
    )
  target = VersionTarget(adapter := tenant.adapter(session.adapter), adapter.head)
  options = session.settings.options(seed, [dialogue.turn_end])
  sampling = tenant.sample(target, prompt, options=options, drafts=drafts)

  def finish(done: SampleDone) -> SessionTurn:
    sample = done.sample
    text = dialogue.text_of(sample.tokens, options.stop, sample.text)
    proposal = read_calls(text, session.tool_form) if session.tool_form else None
    calls, fault = ((), None) if proposal is None else (tuple(proposal.calls), proposal.fault)
    turn = SessionTurn(
      n=number,
      messages=tuple(dict(message) for message in messages),
      version=adapter.head,
      sample_id=sample.id,
      prompt_tokens=list(prompt),
      tokens=list(sample.tokens),
      log_probs=sample.log_probs,
      text=text,
      said=without_thinking(text).strip() if proposal is None else proposal.text,
      calls=calls,
      fault=fault,
      status='open' if calls or fault or not joins else 'answered',
      reused_tokens=sampling.reused(done.index),
      created=service.clock(),
    )
    if joins:
      tenant.call.check()  # A turn that nobody has seen would stand in the way of the next one.
      with ledger.writing() as rows:
        ledger.advance(rows, held)
        session_tables.put_turn(rows, session.id, session.adapter, archive.turn_row(turn))
    return turn

  return Proposing(sampling, finish)
