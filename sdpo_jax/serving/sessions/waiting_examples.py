"""Learning from the waiting examples of a session: they become a feedback, and its result is noted with their turns.

A decision is on the disk before learning begins. The details of the new version name the session and its turns, so that
after a crash between the commit and the note, `session_tables.reconcile` can make the note: nothing is learned twice,
and no decision is lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import dataclasses
import time

from sdpo_jax.serving import feedback
from sdpo_jax.serving.errors import InvalidRequest
from sdpo_jax.serving.feedback import FeedbackResult
from sdpo_jax.serving.feedback_request import Item, make_request
from sdpo_jax.serving.sessions import archive, measuring, teaching
from sdpo_jax.serving.sessions.conversation import Dialogue
from sdpo_jax.serving.sessions.session_records import AgentSession, LearnedTurns, SessionTurn
from sdpo_jax.serving.store import session_tables
from sdpo_jax.serving.store.session_tables import REHEARSAL, SOURCE, ExampleRow
from sdpo_jax.serving.tenant import Tenant
from sdpo_jax.teacher import context

_PAGE = 16  # How many turns to read at a time when searching for approved ones.


def item_of(row: ExampleRow, turn: SessionTurn) -> Item:
  """Return the feedback item of an example."""
  return Item(
    prompt_tokens=turn.prompt_tokens,
    tokens=turn.tokens,
    log_probs=turn.log_probs,
    feedback=row.record['feedback'],
    environment=row.record['environment'],
    demonstration=row.record['demonstration'],
    teacher_prompt=row.teacher_prompt,
  )


def example_row(
  session: AgentSession,
  turn: SessionTurn,
  kind: str,
  said: teaching.TeacherTexts,
  teacher_prompt: Sequence[int],
  head: int,
) -> ExampleRow:
  """Return the row of a waiting example, or of a rehearsal, which is learned beside others."""
  state = 'learned' if kind == REHEARSAL else 'waiting'
  return ExampleRow(session.id, turn.n, kind, state, head, (), teacher_prompt, dataclasses.asdict(said))


def learn(tenant: Tenant, session: AgentSession, dialogue: Dialogue, *, few: bool = False) -> LearnedTurns | None:
  """Learn the waiting examples of a session and return the result; None: none waits.

  The caller makes sure that nobody else changes the session meanwhile.

  Args:
    tenant: the owner.
    session: the session of the examples.
    dialogue: its conversation.
    few: whether to learn even if fewer than `min_sdpo_examples` wait.

  Raises:
    ServiceError, UserError: as `feedback.learn`; the examples keep waiting.
  """
  settings, store = session.settings, tenant.service.store
  waiting = session_tables.examples(store.database, session.adapter, session=session.id, state='waiting')
  adapter = tenant.adapter(session.adapter)
  if not waiting:
    return None
  if len(waiting) < settings.min_sdpo_examples and not few:
    return LearnedTurns(adapter.head, adapter.head, False, None, (), len(waiting))
  began = time.monotonic()
  most = tenant.service.settings.limits.max_items
  rows = waiting[: max(1, most - settings.rehearse)]
  beside = list(_rehearsed(tenant, session, dialogue, rows, adapter.head))[: most - len(rows)]
  turns = {n: _turn(tenant, session, n) for n in {row.n for row in (*rows, *beside)}}
  everything = [*beside, *rows]
  numbers = sorted({row.n for row in rows})
  request = make_request(
    [item_of(row, turns[row.n]) for row in everything],
    settings.update,
    tenant.service.settings,
    teacher=settings.teacher,
    guards=settings.guards,
    detail=(),
    measured=True,
    source={SOURCE: {'id': session.id, 'turns': numbers, 'examples': [[row.n, row.kind] for row in everything]}},
  )
  if beside:
    with store.database.writing() as writing:
      for row in beside:
        session_tables.put_example(writing, session.adapter, row)
  done = feedback.learn(tenant, session.adapter, None, request)
  learned = said_of(tenant, done, turns[rows[-1].n], numbers, began)
  learned = dataclasses.replace(learned, waiting=len(waiting) - len(rows))
  references = [(row.session, row.n, row.kind) for row in (everything if learned.accepted else rows)]
  with store.database.writing(full=True) as writing:
    version = learned.version_after if learned.accepted else None
    session_tables.note_learned(writing, references, version, learned.to_json())
  return learned


def said_of(
  tenant: Tenant, done: FeedbackResult, turn: SessionTurn | Item, numbers: Sequence[int], began: float
) -> LearnedTurns:
  """Return the summary of a feedback, with the divergence and the moved tokens of its last completion.

  Args:
    tenant: the owner.
    done: from `feedback.learn`.
    turn: the turn or item with the prompt and tokens of that completion.
    numbers: the turns that were learned from.
    began: when learning began, on the monotonic clock.
  """
  answer, scores = done.said, done.scores[-1]
  before, after = answer['version_before'], answer['version_after']
  divergences = measuring.divergences(scores)
  return LearnedTurns(
    before,
    after,
    answer['accepted'],
    answer['reason'],
    tuple(numbers),
    0,
    divergences[0],
    divergences[after != before],
    measuring.moved(turn.tokens, scores, tenant.service.texts) if answer['accepted'] else (),
    round(time.monotonic() - began, 6),
  )


def _turn(tenant: Tenant, session: AgentSession, n: int) -> SessionTurn:
  return archive.turn_of(session_tables.turn(tenant.service.store.database, session.id, n))


def _rehearsed(
  tenant: Tenant, session: AgentSession, dialogue: Dialogue, rows: Sequence[ExampleRow], head: int
) -> Iterator[ExampleRow]:
  """Yield examples of approved proposals, the newest first, each with itself as the demonstration.

  Proposals of which the teacher may read nothing, and those that leave it no room, are skipped: rehearsals only protect
  what was approved, and nobody has asked for any one of them.
  """
  service, left = tenant.service, session.settings.rehearse
  before = max(row.n for row in rows) + 1
  while left > 0:
    page = session_tables.turns_back(service.store.database, session.id, before, _PAGE)
    if not page:
      return
    for turn in map(archive.turn_of, page):
      before = turn.n
      shown = context.shown_text(turn.text, service.reprompting.config) if turn.status == 'approved' else None
      if left == 0 or not shown:
        continue
      said = teaching.TeacherTexts(demonstration=shown)
      try:
        with service.tokenizing:
          asked = dialogue.split(turn.prompt_tokens)
          prompt = teaching.teacher_prompt(dialogue, asked, said, service.reprompting.config)
      except InvalidRequest:
        continue
      left -= 1
      yield example_row(session, turn, REHEARSAL, said, prompt, head)
