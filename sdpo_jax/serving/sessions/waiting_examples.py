"""Learning from the waiting examples of a session in one feedback transaction, whose result is stored in their turns.

Decisions are on the disk before learning begins. The details of the new version name its examples, so that
`session_tables.reconcile` can mark these after a crash: nothing is learned twice, and no decision is lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import itertools
import time
from typing import Any

import numpy as np

from sdpo_jax.learning.learner import LessonScores
from sdpo_jax.models.token_texts import TokenTexts
from sdpo_jax.serving import feedback
from sdpo_jax.serving.account import Account
from sdpo_jax.serving.errors import InvalidRequest
from sdpo_jax.serving.feedback import FeedbackResult
from sdpo_jax.serving.feedback_request import MOST_TOP, FeedbackRequest, Item, make_request
from sdpo_jax.serving.guards import kl_over_support
from sdpo_jax.serving.lessons import rounded
from sdpo_jax.serving.sessions import proposing, session_tables, teaching
from sdpo_jax.serving.sessions.conversation import Dialogue
from sdpo_jax.serving.sessions.examples import TrainingExample
from sdpo_jax.serving.sessions.session_records import (
  AgentSession,
  LearnedTurns,
  MovedAnswers,
  MovedToken,
  SessionExample,
  SessionSettings,
  SessionTurn,
  TeacherTexts,
)
from sdpo_jax.serving.sessions.session_tables import REHEARSAL, SOURCE
from sdpo_jax.teacher import context

MOST_MOVED = 8  # The most tokens in `LearnedTurns.moved`.
_NOTICEABLE = 0.05  # Nats, by which a log-prob must have moved the wrong way to be told.
_LEAST = 1e-8  # Lower bound of the probability of the tail.
_PAGE = 16  # Turns that are read at a time when searching for approved ones.


def example_of(
  account: Account, session: AgentSession, dialogue: Dialogue, turn: SessionTurn, kind: str, said: TeacherTexts
) -> SessionExample | None:
  """Make the example of a turn; None: there is no text for the teacher.

  The student's prompt is without the denied proposals right before the turn, so that the next task is done as they were
  corrected without a correction; the teacher reads what was said about them.
  """
  if not said:
    return None
  service, settings = account.service, session.settings
  attempt = turn.tokens if settings.show_attempt and kind != REHEARSAL else None
  before = session_tables.state(service.store.database, session, turn.n)
  if before.denied and kind != REHEARSAL:
    words = [each.decision.correction for each in before.denied] + [said.feedback]
    said = dataclasses.replace(said, feedback='\n\n'.join(dict.fromkeys(filter(None, words))) or None)
  with account.tokenizing():
    bare = turn.prompt_tokens
    if before.denied:
      bare, _ = proposing.next_prompt(
        service.store.database, before, dialogue, list(turn.messages), service.max_prompt, denied=False
      )
    asked = dialogue.split(bare)
    prompt = teaching.teacher_prompt(dialogue, asked, said, service.reprompting.config, attempt, title=settings.title)
  # Rehearsals do not wait, since they are only learned with others.
  state = 'learned' if kind == REHEARSAL else 'waiting'
  head, own = account.adapter(session.adapter).head, None if bare == turn.prompt_tokens else bare
  direct = kind == 'edit' and settings.learn_edits == 'direct' and len(turn.kept_tokens) <= service.max_completion
  return SessionExample(session.id, turn.n, kind, state, head, (), prompt, said, own, direct)


def learn(account: Account, session: AgentSession, dialogue: Dialogue, *, few: bool = False) -> LearnedTurns | None:
  """Learn from the waiting examples of a session, and return the result; None: no example waits.

  The caller must hold the lock of the session.

  Args:
    account: the account of the owner.
    session: the session.
    dialogue: the dialogue of the session.
    few: whether to learn even if fewer than `min_sdpo_examples` wait.

  Raises:
    ServiceError, UserError: as `feedback.learn`; the examples keep waiting.
  """
  settings, store = session.settings, account.service.store
  waiting = session_tables.examples(store.database, session.adapter, session=session.id, state='waiting')
  adapter = account.adapter(session.adapter)
  if not waiting:
    return None
  if len(waiting) < settings.min_sdpo_examples and not few:
    return LearnedTurns(adapter.head, adapter.head, False, None, (), len(waiting))
  began = time.monotonic()
  most = account.service.settings.limits.max_items
  sizes = itertools.accumulate(2 if each.direct else 1 for each in waiting)
  learning = waiting[: max(1, sum(size <= most - settings.rehearse for size in sizes))]
  left = most - len(learning) - sum(each.direct for each in learning)
  beside = list(_rehearsed(account, session, dialogue, max(each.n for each in learning)))[: max(0, left)]
  everything = [*beside, *learning]
  turns = {n: session_tables.turn(store.database, session.id, n) for n in {each.n for each in everything}}
  numbers = sorted({each.n for each in learning})
  source = {'id': session.id, 'turns': numbers, 'examples': [[each.n, each.kind] for each in everything]}
  made = [(each.n, item) for each in everything for item in _items(each, turns[each.n])]
  items = [item for _, item in made]
  request = request_of(account, items, settings, {SOURCE: source})
  if beside:
    with store.database.writing() as rows:
      for each in beside:
        session_tables.put_example(rows, session.adapter, each)
  done = feedback.learn(account, session.adapter, None, request)
  learned = said_of(account, done, items, [n for n, _ in made], began)
  learned = dataclasses.replace(learned, turns=tuple(numbers), waiting=len(waiting) - len(learning))
  references = [(session.id, each.n, each.kind) for each in (everything if learned.accepted else learning)]
  with store.database.writing(full=True) as rows:
    session_tables.note_learned(rows, references, learned.version_after if learned.accepted else None, learned)
  return learned


def request_of(
  account: Account, items: Sequence[Item], settings: SessionSettings | TrainingExample, source: Mapping[str, Any]
) -> FeedbackRequest:
  """Make the request to learn from completions with the settings of their session.

  Args:
    account: the account of the owner.
    items: the completions with their feedback.
    settings: the settings of the session, or an example that contains them.
    source: the origin of the completions, for the details of the new version.

  Raises:
    InvalidRequest: an item or a setting is invalid.
  """
  return make_request(
    items,
    settings.update,
    account.service.settings,
    teacher=settings.teacher,
    guards=settings.guards,
    detail=(),
    measured=True,
    source=source,
  )


def _items(example: SessionExample, turn: SessionTurn) -> list[Item]:
  prompt = list(turn.prompt_tokens if example.asked is None else example.asked)
  log_probs = turn.log_probs if example.asked is None else None  # Otherwise they are of another prompt.
  item = Item(prompt_tokens=prompt, tokens=list(turn.tokens), log_probs=log_probs, **dataclasses.asdict(example.said))
  item = dataclasses.replace(item, teacher_prompt=example.teacher_prompt)
  if example.direct:
    return directly(item, turn.kept_tokens)
  if example.kind in ('denial', 'edit'):
    item = dataclasses.replace(item, rejected=turn.tokens, wanted=turn.kept_tokens)
  return [item]


def directly(item: Item, edited: Sequence[int]) -> list[Item]:
  """Return the items by which an edited answer is learned without a teacher, in place of the item of the proposal.

  Cross-entropy alone would make the proposal likelier, too, through what it has in common with the edited answer.
  """
  unwanted = dataclasses.replace(item, log_probs=None, learned='as unwanted', rejected=item.tokens)
  wanted = dataclasses.replace(item, log_probs=None, learned='as wanted', wanted=edited, tokens=list(edited))
  return [unwanted, wanted]


def _rehearsed(account: Account, session: AgentSession, dialogue: Dialogue, newest: int) -> Iterator[SessionExample]:
  """Yield examples of approved proposals up to a turn, the newest first, each its own demonstration.

  Proposals that consist of thinking only, or leave the teacher no room, are skipped: no particular rehearsal is needed.
  """
  service, left, before = account.service, session.settings.rehearse, newest + 1
  while left > 0 and (page := session_tables.turns_back(service.store.database, session.id, before, _PAGE)):
    before = page[-1].n
    for turn in page:
      if left == 0 or turn.status != 'approved':
        continue
      said = TeacherTexts(demonstration=context.shown_text(turn.text, service.reprompting.config))
      with contextlib.suppress(InvalidRequest):
        if (example := example_of(account, session, dialogue, turn, REHEARSAL, said)) is not None:
          left -= 1
          yield example


# Measuring.


def said_of(
  account: Account, done: FeedbackResult, items: Sequence[Item], numbers: Sequence[int], began: float
) -> LearnedTurns:
  """Summarize a feedback, with the divergence and the moved tokens of its last completion.

  Args:
    account: the account of the owner.
    done: the result of `feedback.learn`.
    items: the completions.
    numbers: the numbers of their turns.
    began: when learning began, on the monotonic clock.
  """
  answer, scores = done.said, done.scores[-1]
  before, after = answer['version_before'], answer['version_after']
  divergences = _divergences(scores) if items[-1].learned == 'from teacher' else (None, None)
  moved: dict[int, dict[str, Any]] = {}
  for n, each in zip(numbers, done.moved, strict=True):
    known = moved.setdefault(n, {'rejected': None, 'wanted': None})
    known |= {name: value for name, value in vars(each).items() if value is not None}
  answers = tuple(MovedAnswers(n, **each) for n, each in moved.items() if each['rejected'] is not None)
  return LearnedTurns(
    before,
    after,
    answer['accepted'],
    answer['reason'],
    tuple(sorted(set(numbers))),
    0,
    divergences[0],
    divergences[after != before],
    _moved(items[-1].tokens, scores, account.service.texts) if answer['accepted'] else (),
    round(time.monotonic() - began, 6),
    answers,
    (*answer['warnings'], *(each for moved in answers for each in _warnings(moved) if answer['accepted'])),
    answer['unchanged'],
  )


def _warnings(moved: MovedAnswers) -> Iterator[str]:
  ways_out = 'correct it in other words, edit the call, or undo'
  for values, what, sign, way_out in (
    (moved.rejected, 'rejected', 1, f'{ways_out}; the guard max_rejected_rise would reject such a version'),
    (moved.wanted, 'wanted', -1, ways_out),
  ):
    before, after = values or (None, None)
    if before is not None and after is not None and sign * (after - before) >= _NOTICEABLE:
      how = f'{"likelier" if sign > 0 else "less likely"} than before (log-prob {before:.2f} → {after:.2f})'
      yield f'What was {what} in turn {moved.turn} is {how}: {way_out}.'


def _divergences(scores: LessonScores) -> tuple[float | None, float | None]:
  """Return KL(teacher‖student), the mean over the tokens, before and after the steps of a measured feedback.

  None: no log-prob of the teacher is finite.
  """
  ids, log_probs = scores.teacher_top_ids[:, :MOST_TOP], rounded(scores.teacher_top_log_probs[:, :MOST_TOP])
  named = (ids >= 0) & np.isfinite(log_probs)
  if not named.any():
    return None, None
  theirs = np.where(named, log_probs, -np.inf)
  students = (rows[:, :MOST_TOP] for rows in (scores.named_before, scores.named_after))
  before, after = (float(kl_over_support(student, theirs, least=_LEAST).mean()) for student in students)
  return before, after


def _moved(tokens: Sequence[int], scores: LessonScores, texts: TokenTexts) -> tuple[MovedToken, ...]:
  """Return the tokens of an answer whose log-probs changed most, the largest change first."""
  before, after = rounded(scores.log_probs_before), rounded(scores.log_probs_after)
  both = np.isfinite(before) & np.isfinite(after)
  change = np.where(both, after, 0) - np.where(both, before, 0)
  most = [position for position in np.argsort(-abs(change), kind='stable')[:MOST_MOVED].tolist() if change[position]]
  return tuple(
    MovedToken(at, int(tokens[at]), texts.text_of(int(tokens[at])), float(before[at]), float(after[at])) for at in most
  )
