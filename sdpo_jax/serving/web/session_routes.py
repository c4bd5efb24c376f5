"""Routes of sessions: conversations in which a person approves, edits or denies proposals, and the adapter learns.

Since approved calls run on somebody's machine, web pages reach them only from serve.http.allowed_origins
(`Operation.guarded`), and changes of a session need its token (`Operation.token`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
import functools
import json
import time
from typing import Any
import urllib.parse

import pydantic
from starlette.routing import Route

from sdpo_jax.files import as_json
from sdpo_jax.serving.errors import InvalidRequest
from sdpo_jax.serving.sample_requests import SampleDraft
from sdpo_jax.serving.sessions.examples import READER, TrainingExample
from sdpo_jax.serving.sessions.session_records import Decision, LearnedTurns, SessionSettings, SessionTurn, ToolResult
from sdpo_jax.serving.sessions.sessions import Sessions
from sdpo_jax.serving.web import native
from sdpo_jax.serving.web import session_schemas as schemas
from sdpo_jax.serving.web.endpoints import Incoming, Reply, parsing, route, whole
from sdpo_jax.serving.web.error_responses import invalid
from sdpo_jax.serving.web.events import ServerSentEvent
from sdpo_jax.serving.web.pages import PAGED, dated_page, limit_of, page, paged
from sdpo_jax.serving.web.schemas import DeletedSaid

_SESSIONS, _EXAMPLES = f'{native.ADAPTER}/sessions', f'{native.ADAPTER}/examples'
_REPLAY = f'{native.ADAPTER}/replay'
_SESSION = _SESSIONS + '/{session}'
_TURN = _SESSION + '/turns/{n}'
NDJSON = 'application/x-ndjson'
Proposal = Iterator[SampleDraft | SessionTurn]
_guarded = functools.partial(route, guarded=True)


def list_sessions(asked: Incoming) -> Reply:
  """List the sessions of an adapter, the oldest first."""
  limit = limit_of(asked.query)
  found = Sessions(asked.account).list(asked.adapter, asked.query.get('after'), limit=limit + 1)
  return Reply(dated_page('sessions', found, limit, lambda each: each.to_json()))


def open_session(asked: Incoming) -> Reply:
  """Open a session, for every request another one (it has no Idempotency-Key), whose token only this response has."""
  settings: SessionSettings = asked.body
  _check_size(asked, 'system', [settings.system or ''])
  _check_size(asked, 'tools', [json.dumps(settings.tools)], 'max_tools_bytes')
  opened, token = Sessions(asked.account).open(asked.adapter, settings)
  said = {'session': opened.to_json(), 'token': token}
  return Reply(said, headers={'Location': f'{_SESSIONS.format(adapter=opened.adapter)}/{opened.id}'})


def get_session(asked: Incoming) -> Reply:
  """Return a session with its turns, the oldest first."""
  sessions, where, (after, limit) = Sessions(asked.account), (asked.adapter, asked.path['session']), paged(asked)
  found, turns = sessions.get(*where), sessions.turns(*where, after, limit + 1)
  listed = page('turns', [turn.to_json() for turn in turns], limit, [turn.n for turn in turns])
  return Reply({'session': found.to_json()} | listed)


def delete_session(asked: Incoming) -> Reply:
  """Delete the session and its turns; what the adapter has learned from it stays."""
  Sessions(asked.account).delete(asked.adapter, asked.path['session'])
  return Reply({'id': asked.path['session'], 'deleted': True})


# Proposals.


def propose(asked: Incoming, drafts: bool) -> Proposal:
  """Sample the next proposal, which becomes the newest turn of the session; it has no Idempotency-Key."""
  body: schemas.ProposeRequest = asked.body
  _check_size(asked, 'messages', [message.content for message in body.messages])
  messages = [message.model_dump() for message in body.messages]
  return Sessions(asked.account).propose(asked.adapter, asked.path['session'], messages, seed=body.seed, drafts=drafts)


def retry(asked: Incoming, drafts: bool) -> Proposal:
  """Sample an alternative to a turn from the newest version, for comparison; it is not stored."""
  where = asked.adapter, asked.path['session'], _turn(asked)
  return Sessions(asked.account).retry(*where, seed=asked.body.seed, drafts=drafts)


def _drawn(path: str, begin: Callable[[Incoming, bool], Proposal], body: type[pydantic.BaseModel]) -> Route:
  """Make the route of an operation that samples a turn, for one response or a stream."""

  def at_once(asked: Incoming) -> Reply:
    [turn] = begin(asked, False)
    return Reply({'turn': turn.to_json()})

  at_once.__doc__ = begin.__doc__
  stream = functools.partial(streamed, begin)
  return _guarded('POST', path, at_once, stream, body=body, response=schemas.ProposedSaid, token=True)


def streamed(begin: Callable[[Incoming, bool], Proposal], asked: Incoming) -> Iterator[ServerSentEvent]:
  """Yield the drafts of a turn and then the turn as events; closing the iterator cancels the turn."""
  for event in begin(asked, True):
    if isinstance(event, SampleDraft):
      yield ServerSentEvent({'delta': event.delta}, 'draft')
    else:
      yield ServerSentEvent({'turn': event.to_json()}, 'turn')


# Decisions.


def decide(asked: Incoming) -> Reply:
  """Approve, deny or edit a proposal; the adapter learns from denials and edits."""
  body: schemas.DecisionRequest = asked.body
  _check_size(asked, 'correction', [body.correction or ''])
  _check_size(asked, 'arguments', [json.dumps(body.arguments)])
  correction = body.correction if body.correction and body.correction.strip() else None
  decision = Decision(body.decision, correction, body.arguments, body.call)
  began = time.monotonic()
  turn, learned = _once(asked).decide(asked.adapter, asked.path['session'], _turn(asked), decision, body.digest)
  asked.metrics.decision(body.decision, time.monotonic() - began)
  return Reply({'turn': turn.to_json(), 'learned': _counted(asked, learned)})


def results(asked: Incoming) -> Reply:
  """Add the results of a proposal's calls; the adapter learns from failures if `learn_from_results` is set."""
  given: list[ToolResult] = asked.body.results
  _check_size(asked, 'results', [text for each in given for text in (each.text, each.stderr or '')])
  turn, learned = _once(asked).results(asked.adapter, asked.path['session'], _turn(asked), given, asked.body.digest)
  return Reply({'turn': turn.to_json(), 'learned': _counted(asked, learned)})


def flush(asked: Incoming) -> Reply:
  """Learn now from the examples that wait for min_sdpo_examples."""
  learned = _once(asked).flush(asked.adapter, asked.path['session'])
  return Reply({'learned': _counted(asked, learned)})


def _counted(asked: Incoming, learned: LearnedTurns | None) -> dict[str, Any] | None:
  """Return the result of learning as JSON, and count it in the metrics."""
  if learned is None:
    return None
  if learned.version_after != learned.version_before:
    outcome = 'committed'
  else:
    outcome = 'unchanged' if learned.unchanged else 'waiting' if learned.reason is None else 'rejected'
  asked.metrics.session_learned(outcome)
  return learned.to_json()


# Examples.


def examples(asked: Incoming) -> Reply:
  """Return the examples that were or will be learned, one JSON object per line; `Link` has the next page."""
  after, limit = paged(asked)
  found = Sessions(asked.account).examples(asked.adapter, asked.query.get('session'), after, limit + 1)
  query = urllib.parse.urlencode({**asked.query, 'after': found[:limit][-1].id if found else 0})
  link = {'Link': f'<{_EXAMPLES.format(adapter=asked.adapter)}?{query}>; rel="next"'} if len(found) > limit else {}
  return Reply(b''.join(as_json(vars(example)) + b'\n' for example in found[:limit]), NDJSON, link)


def replay(asked: Incoming) -> Reply:
  """Learn from the exported examples of another adapter, in their order."""
  asked.account.adapter(asked.adapter)  # Raise NotFound before the lines are checked.
  with parsing(asked.account, asked.body):
    examples = examples_of(asked.body)
  learned = _once(asked).replay(asked.adapter, examples, request=asked.idempotency)
  return Reply({'learned': [_counted(asked, each) for each in learned]})


def examples_of(lines: bytes) -> list[TrainingExample]:
  """Parse examples, one JSON object per line.

  Raises:
    InvalidRequest: a line is invalid; the message has its number. Or there are no examples.
  """
  found = []
  for number, line in enumerate(lines.splitlines(), 1):
    if not line.strip():
      continue
    try:
      found.append(READER.validate_json(line))
    except pydantic.ValidationError as error:
      said = invalid(error, what='It')
      raise InvalidRequest(f'Line {number} is not an example from GET …/examples: {said}') from error
  if not found:
    raise InvalidRequest('There are no examples to replay: send the lines of GET …/examples.')
  return found


# Requests.


def _once(asked: Incoming) -> Any:
  """Return the account's sessions, for a change; its stored response will be erased with the adapter.

  Raises:
    InvalidRequest: the request has If-Match.
  """
  if asked.expected is not None:
    raise InvalidRequest('Sessions do not support If-Match, since turns have numbers: leave it out.', field='If-Match')
  if asked.idempotency is not None:
    adapter = asked.account.adapter(asked.adapter)
    asked.account.service.store.about(asked.idempotency, adapter.id)
  return Sessions(asked.account)


def _turn(asked: Incoming) -> int:
  return whole(asked.path['n'], 'The number of a turn')


def _check_size(asked: Incoming, field: str, texts: Iterable[str], setting: str = 'max_message_bytes') -> None:
  """Raise InvalidRequest if texts are together longer than a setting of serve.limits allows, in bytes."""
  most = getattr(asked.account.service.settings.limits, setting)
  size = sum(len(text.encode('utf-8', 'surrogatepass')) for text in texts)
  if size > most:
    raise InvalidRequest(
      f'{field} has {size} bytes, more than the limit of {most} (serve.limits.{setting}): shorten it.', field=field
    )


# Routes.


def _decided_again(account: Any, adapter: str, version: int | None) -> dict[str, Any]:
  raise AssertionError('Sessions store decisions and results themselves, and respond to a repeat from these.')


_SELECTED = {'session': 'Only return examples of this session.'} | PAGED
_ONCE: dict[str, Any] = {'again': _decided_again, 'token': True}
ROUTES: list[Route] = [
  _guarded('GET', _SESSIONS, list_sessions, query=PAGED, response=schemas.SessionsSaid),
  _guarded('POST', _SESSIONS, open_session, body=SessionSettings, response=schemas.OpenedSaid, status=201, secret=True),
  _guarded('GET', _SESSION, get_session, query=PAGED, response=schemas.SessionTurnsSaid),
  _guarded('DELETE', _SESSION, delete_session, response=DeletedSaid, token=True),
  _drawn(f'{_SESSION}/turns', propose, schemas.ProposeRequest),
  _drawn(f'{_TURN}/retry', retry, schemas.RetryRequest),
  _guarded('POST', f'{_TURN}/decision', decide, body=schemas.DecisionRequest, response=schemas.DecidedSaid, **_ONCE),
  _guarded('POST', f'{_TURN}/results', results, body=schemas.ResultsRequest, response=schemas.DecidedSaid, **_ONCE),
  _guarded('POST', f'{_SESSION}/flush', flush, body=schemas.Nothing, response=schemas.FlushedSaid, **_ONCE),
  _guarded('GET', _EXAMPLES, examples, query=_SELECTED, answers=NDJSON),
  _guarded('POST', _REPLAY, replay, response=schemas.ReplayedSaid, content_type=NDJSON, again=_decided_again),
]
