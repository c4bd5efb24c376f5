"""The examples of sessions, exported with their conversations so that they can be learned elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
import functools
from typing import Any

from models import identity
from sdpo_jax.data.prompts import Tokenizer
from sdpo_jax.files import jsonable
from sdpo_jax.serving.service_state import ServiceState
from sdpo_jax.serving.sessions import archive, teaching
from sdpo_jax.serving.sessions.conversation import Dialogue
from sdpo_jax.serving.sessions.examples import TrainingExample
from sdpo_jax.serving.sessions.session_records import AgentSession, SessionTurn
from sdpo_jax.serving.store import session_tables
from sdpo_jax.serving.store.session_tables import REHEARSAL, ExampleRow
from sdpo_jax.serving.tenant import Tenant
from sdpo_jax.serving.tool_calls import ToolCall


@functools.lru_cache(maxsize=4)
def fingerprint(tokenizer: Tokenizer) -> str:
  """Return a digest of a tokenizer and its chat template; if it is equal, tokens have the same meaning."""
  ids = [tokenizer.encode(text, add_special_tokens=False) for text in identity.TEXTS]
  return identity.digest([sorted(tokenizer.get_vocab().items()), tokenizer.chat_template, ids])


def written_by(service: ServiceState) -> dict[str, Any]:
  """Return a record of how the messages of a session become tokens, including the tokenizer's fingerprint."""
  with service.tokenizing:
    mark = fingerprint(service.tokenizer)
  chat = service.chat
  return {'tokenizer': mark, 'variables': jsonable(chat.variables), 'split_special_tokens': chat.split_special_tokens}


def dialogue_of(service: ServiceState, session: AgentSession) -> Dialogue:
  """Return the conversion of a session's messages to tokens."""
  system, tools, stops = session.settings.system, session.settings.tools, service.stop_token_ids
  return Dialogue(service.tokenizer, service.chat, system=system, tools=tools, stop_token_ids=stops)


def examples(tenant: Tenant, adapter: str, session: str | None) -> list[TrainingExample]:
  """Return every example that was or will be learned in sessions of an adapter, in the order they were written.

  Args:
    tenant: the owner.
    adapter: its id.
    session: the id of one of its sessions; None: all.
  """
  service = tenant.service
  rows = session_tables.examples(service.store.database, adapter, session=session)
  rows = [row for row in rows if row.kind != REHEARSAL or row.versions]
  marks: dict[str, str] = {}
  contexts: dict[tuple[str, int], tuple[AgentSession, SessionTurn, list[dict[str, Any]], bool]] = {}
  for id in dict.fromkeys(row.session for row in rows):
    found = session_tables.session(service.store.database, adapter, id)
    if found is not None:
      marks[id] = found.record['written']['tokenizer']
      numbers = {row.n for row in rows if row.session == id}
      for turn, messages, ended in _histories(tenant, archive.session_of(found, tenant.owner), numbers):
        contexts[id, turn.n] = archive.session_of(found, tenant.owner), turn, messages, ended
  known = [row for row in rows if (row.session, row.n) in contexts]
  return [_example(row, *contexts[row.session, row.n], marks[row.session]) for row in known]


def _histories(
  tenant: Tenant, session: AgentSession, numbers: set[int]
) -> Iterator[tuple[SessionTurn, list[dict[str, Any]], bool]]:
  """Yield turns of a session, each with the messages before it, and whether its answer ended the turn."""
  service, settings = tenant.service, session.settings
  dialogue = dialogue_of(service, session)
  said: list[dict[str, Any]] = [] if settings.system is None else [{'role': 'system', 'content': settings.system}]
  pending: list[dict[str, Any]] = []
  for row in session_tables.turns(service.store.database, session.id):
    turn = archive.turn_of(row)
    pending += [dict(message) for message in turn.messages]
    if turn.n in numbers:
      yield turn, [*said, *pending], dialogue.is_ended(turn.tokens)
    if turn.joins:
      text = turn.text
      if turn.kept_tokens is not None:
        with service.tokenizing:
          plain = service.tokenizer.decode(
            turn.kept_tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
          )
          text = dialogue.text_of(turn.kept_tokens, (), plain)
      said += [*pending, {'role': 'assistant', 'content': text, 'calls': _calls(turn.called), 'said': turn.said}]
      pending = [teaching.result_message(result) for result in turn.results]


def _example(
  row: ExampleRow, session: AgentSession, turn: SessionTurn, messages: list[dict[str, Any]], ended: bool, mark: str
) -> TrainingExample:
  settings = session.settings
  edits = turn.called if row.kind == 'edit' else turn.calls if row.kind == REHEARSAL and not turn.said else ()
  return TrainingExample(
    session=session.id,
    turn=turn.n,
    kind=row.kind,
    state=row.state,
    versions=tuple(row.versions),
    drawn_by=turn.version,
    messages=tuple(messages),
    tools=tuple(settings.tools),
    tool_form=session.tool_form,
    text=turn.text,
    said=turn.said,
    ended=ended,
    calls=tuple(_calls(turn.calls)),
    demonstration=row.record['demonstration'],
    demonstrated=tuple(_calls(edits)),
    feedback=row.record['feedback'],
    environment=row.record['environment'],
    prompt_tokens=tuple(turn.prompt_tokens),
    tokens=tuple(turn.tokens),
    log_probs=turn.log_probs,
    teacher_prompt=tuple(row.teacher_prompt),
    tokenizer=mark,
    teacher=settings.teacher,
    update=settings.update,
    guards=settings.guards,
    show_attempt=settings.show_attempt,
  )


def _calls(calls: tuple[ToolCall, ...]) -> list[dict[str, Any]]:
  return [{'name': call.name, 'arguments': dict(call.arguments)} for call in calls]
