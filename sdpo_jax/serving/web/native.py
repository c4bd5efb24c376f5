"""The native routes: adapters and their versions, completions, feedback, scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import json
from typing import TYPE_CHECKING, Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sdpo_jax.errors import UserError, short_repr
from sdpo_jax.files import as_json
from sdpo_jax.serving import feedback as feedbacks
from sdpo_jax.serving import records
from sdpo_jax.serving.errors import Gone, InvalidRequest, NotFound, NotHolder, ServiceError, StorageFailed
from sdpo_jax.serving.feedback_request import FeedbackRequest, Item, make_request
from sdpo_jax.serving.records import AdapterRecord, SampleRecord, Version
from sdpo_jax.serving.sample_requests import SampleDone, SampleOptions
from sdpo_jax.serving.store import store
from sdpo_jax.serving.web import error_responses, forwarding, packed, schemas, score_formats
from sdpo_jax.serving.web.archives import unzipped, zipped
from sdpo_jax.serving.web.endpoints import SSE, Incoming, Operation, Reply, incoming, route, whole
from sdpo_jax.serving.web.events import ServerSentEvent, stream
from sdpo_jax.serving.web.pages import PAGED, dated_page, limit_of, page, paged

if TYPE_CHECKING:
  from sdpo_jax.serving.account import Account

ROOT = '/v1/continual'
ADAPTER = ROOT + '/adapters/{adapter}'
# Seconds between keep-alive comments without events, and between checks whether the client is still connected.
_HEARTBEAT, _LOOK = 15.0, 1.0


# Adapters.


def list_adapters(asked: Incoming) -> Reply:
  """List your adapters, the oldest first."""
  limit = limit_of(asked.query)
  found = asked.account.adapters(asked.query.get('after'), limit=limit + 1)
  return Reply(dated_page('adapters', found, limit, adapter_said))


def create_adapter(asked: Incoming) -> Reply:
  """Make an adapter; at version 0 it does not change the model."""
  adapter, _ = asked.account.create(**vars(asked.body), request=asked.idempotency)
  return Reply(adapter_said(adapter), headers={'Location': f'{ROOT}/adapters/{adapter.id}'})


def get_adapter(asked: Incoming) -> Reply:
  """Return an adapter."""
  return Reply(adapter_said(asked.account.adapter(asked.adapter)))


def change_adapter(asked: Incoming) -> Reply:
  """Change settings of an adapter."""
  changed = asked.account.change(asked.adapter, asked.expected, asked.body.settings, request=asked.idempotency)
  return Reply(adapter_said(changed))


def delete_adapter(asked: Incoming) -> Reply:
  """Delete the adapter, and with it its versions, samples and feedback."""
  asked.account.delete(asked.adapter, asked.expected)
  return Reply({'id': asked.adapter, 'deleted': True})


def fork_adapter(asked: Incoming) -> Reply:
  """Make an adapter from a version of this one."""
  forked, _ = asked.account.fork(asked.adapter, asked.body.version, asked.body.name, request=asked.idempotency)
  return Reply(adapter_said(forked), headers={'Location': f'{ROOT}/adapters/{forked.id}'})


def undo(asked: Incoming) -> Reply:
  """Make a new version with the contents of an older one."""
  made = asked.account.undo(asked.adapter, asked.expected, asked.body.to, request=asked.idempotency)
  return Reply(version_said(made))


def list_versions(asked: Incoming) -> Reply:
  """List the stored versions of an adapter, the oldest first."""
  after, limit = paged(asked)
  found = asked.account.versions(asked.adapter, after, limit=limit + 1)
  kept = [each.number for each in records.in_effect(asked.account.service.store.database.lineage(asked.adapter))]
  # Of versions before the oldest one that is known to be in effect, nothing is known.
  oldest = min(kept, default=0)
  undone = [each for each in found if each.number > oldest and each.number not in kept and each.reason != 'undo']
  said = [version_said(each) | {'undone': each in undone} for each in found]
  return Reply(page('versions', said, limit, [version.number for version in found]))


def get_version(asked: Incoming) -> Reply:
  """Return a version and how it was made."""
  return Reply(version_said(asked.account.version(asked.adapter, whole(asked.path['number'], 'version'))))


def diff(asked: Incoming) -> Reply:
  """Return the distance between the matrices of a version and those of another one, by default its parent."""
  number = whole(asked.path['number'], 'version')
  against = asked.number('against')
  if against is None:
    against = asked.account.version(asked.adapter, number).parent
    if against is None:
      raise InvalidRequest(f'Version {number} has no parent: name a version with ?against=NUMBER.', field='against')
  return Reply(asked.account.diff(asked.adapter, against, number))


def export(asked: Incoming) -> Reply:
  """Return a zip of a version: in PEFT's format, or with the files of a cartridge."""
  return zip_reply(_exported(asked), 'adapter')


def _exported(asked: Incoming) -> dict[str, bytes]:
  form = asked.query.get('format', 'sdpo_jax')
  if form not in ('sdpo_jax', 'published'):
    raise InvalidRequest(f'format must be sdpo_jax or published, not {short_repr(form)}.', field='format')
  return asked.account.export_files(asked.adapter, asked.number('version'), form)


def zip_reply(files: Mapping[str, bytes], name: str) -> Reply:
  """Return files as a zip that browsers and curl save under a name."""
  return Reply(zipped(files), 'application/zip', {'Content-Disposition': f'attachment; filename="{name}.zip"'})


def export_file(asked: Incoming) -> Reply:
  """Return one of the files of a version."""
  files, name = _exported(asked), asked.path['file']
  if name not in files:
    raise NotFound(f'An exported version has no such file, only {", ".join(sorted(files))}.')
  kind = 'application/json' if name.endswith('.json') else 'application/octet-stream'
  return Reply(bytes(files[name]), content_type=kind)


def import_adapter(asked: Incoming) -> Reply:
  """Make an adapter from a zip with adapter_config.json and adapter_model.safetensors in PEFT's format, or a cartridge.

  The files of a cartridge are those of launch.export, or cartridge.pt and config.yaml.
  """
  name = asked.query.get('name')
  if not name:
    raise InvalidRequest('The new adapter needs a name: add ?name=NAME to the address.', field='name')
  adapter, _ = asked.account.import_files(name, _uploaded(asked), request=asked.idempotency)
  return Reply(adapter_said(adapter), headers={'Location': f'{ROOT}/adapters/{adapter.id}'})


def push(asked: Incoming) -> Reply:
  """Make the next version of an adapter or a cartridge from a zip, as when one is made from files."""
  asked.account.adapter(asked.adapter)  # Raises NotFound before the zip is read.
  return Reply(
    version_said(asked.account.push(asked.adapter, asked.expected, _uploaded(asked), request=asked.idempotency))
  )


def _uploaded(asked: Incoming) -> dict[str, bytes]:
  with asked.account.service.reading.of(asked.account.call):
    return unzipped(asked.body)


def capabilities(asked: Incoming) -> Reply:
  """Return the served model with its limits and defaults."""
  return Reply(asked.account.service.capabilities())


def usage(asked: Incoming) -> Reply:
  """Return what your key has used in this minute and day, and its limits."""
  return Reply(asked.account.service.allowances.used(asked.call.payer.id))


# Completions.


def _begun(asked: Incoming, drafts: bool) -> tuple[Any, list[int], Any]:
  body: schemas.CompletionRequest = asked.body
  target = asked.account.resolve(body.model, body.cartridges, body.positions)
  prompt = asked.account.service.prompt_of(messages=body.conversation(), text=body.prompt, tokens=body.prompt_tokens)
  options = SampleOptions.of(body)
  sampling = asked.account.sample(
    target, prompt, n=body.n, options=options, drafts=drafts, messages=body.conversation()
  )
  return target, prompt, sampling


def completions(asked: Incoming) -> Reply:
  """Sample completions; each is stored under a sample_id, to which feedback can refer."""
  target, prompt, sampling = _begun(asked, drafts=False)
  samples = sampling.result()
  return Reply(completions_said(asked.body.model, target, prompt, samples, sampling.reused))


def _streamed(asked: Incoming) -> Iterator[ServerSentEvent]:
  target, prompt, sampling = _begun(asked, drafts=True)
  done: dict[int, SampleRecord] = {}
  for event in sampling:
    if event.delta:
      yield ServerSentEvent({'index': event.index, 'delta': event.delta}, 'draft')
    if isinstance(event, SampleDone):
      done[event.index] = event.sample
      yield ServerSentEvent(completion_said(event.index, event.sample), 'completion')
  samples = [done[index] for index in sorted(done)]
  said = completions_said(asked.body.model, target, prompt, samples, sampling.reused)
  yield ServerSentEvent({name: said[name] for name in ('model', 'adapter', 'version', 'uri', 'usage')}, 'done')


# Scores.


def score(asked: Incoming) -> Reply:
  """Return the log-probs of given tokens under a version, or under the model without an adapter."""
  body: schemas.ScoreRequest = asked.body
  service, target = asked.account.service, asked.account.resolve(asked.body.model)
  rows, ids = [], []
  for number, row in enumerate(body.rows):
    most = service.max_text
    prompt = service.prompt_of(messages=row.conversation(), text=row.prompt, tokens=row.prompt_tokens, limit=most)
    tokens = service.prompt_of(text=row.completion, tokens=row.tokens, limit=most, add_special_tokens=False)
    rows.append((prompt, tokens))
    if row.ids is not None:
      ids.append(_ids(row.ids, len(tokens), f'rows.{number}.ids'))
  if ids and (len(ids) != len(rows) or len({one.shape[1] for one in ids}) != 1):
    raise InvalidRequest('Send ids with all rows or none, the same number for every token.', field='rows')
  scored = asked.account.score(target, rows, topk=body.topk, ids=ids or None)
  if body.format == 'packed':
    return Reply(packed.pack(scored, service.vocab_size), content_type=packed.CONTENT_TYPE)
  said: dict[str, Any] = {'model': body.model, 'version': target.number, 'format': body.format}
  if body.format == 'columns':
    return Reply(said | {'scale': score_formats.SCALE, 'rows': score_formats.as_columns(scored)})
  return Reply(said | {'rows': score_formats.as_rows(scored, [tokens for _, tokens in rows], ids or None)})


def _ids(ids: list[list[int]], count: int, field: str) -> np.ndarray:
  """Return ids as an array, [T, M] int32.

  Raises:
    InvalidRequest: there is not the same number of ids for each of the T tokens.
  """
  if len(ids) != count or len({len(one) for one in ids}) > 1:
    raise InvalidRequest(f'{field} must be one list per token ({count}), all of the same length.', field=field)
  return np.asarray(ids, np.int32).reshape(count, -1)


# Feedback.


def feedback(asked: Incoming) -> Reply:
  """Learn from feedback on completions in one transaction, which makes a new version or is rejected by the guards."""
  request = feedback_request(asked.body, asked.account.service.settings)
  answer = feedbacks.learn(asked.account, asked.adapter, asked.expected, request, idempotency=asked.idempotency).said
  asked.metrics.feedback(outcome(answer))
  return Reply(answer)


def outcome(answer: Mapping[str, Any]) -> str:
  """Return the outcome of a feedback for the metrics: committed, rejected, unchanged or dry_run."""
  if not answer['accepted'] or answer['unchanged']:
    return 'unchanged' if answer['accepted'] else 'rejected'
  return 'dry_run' if answer['version_after'] == answer['version_before'] else 'committed'


def feedback_batch(asked: Incoming) -> Reply:
  """Learn from several feedbacks, each in its own transaction; those on different adapters are learned together."""
  service = asked.account.service
  entries = []
  for number, entry in enumerate(asked.body.entries):
    try:
      adapter = asked.account.resolve(entry.adapter).adapter
      if adapter is None:
        raise InvalidRequest('Neither the model nor a cartridge can learn: name an adapter.', field='adapter')
      found = feedbacks.FeedbackEntry(adapter.id, feedback_request(entry, service.settings), entry.if_match)
    except (ServiceError, UserError) as error:
      raise _of_entry(error, number) from error
    entries.append(found)
  if asked.idempotency is None:
    results = list(_learned(asked, dict(enumerate(entries))).values())
  else:
    results = _batch_once(asked, asked.idempotency, entries)
  said = [_result(done) for done in results]
  return Reply({'results': said}, kept=not any('error' in each for each in said))  # As alone: errors are not kept.


def _learned(asked: Incoming, entries: Mapping[int, feedbacks.FeedbackEntry]) -> dict[int, Any]:
  """Return the results of entries of a batch, by their numbers; other replicas learn what they hold."""
  numbers, given = list(entries), list(entries.values())

  def forward(index: int, holder: NotHolder) -> _OfHolder | ServiceError:
    try:
      return _learned_by_holder(asked, holder, numbers[index], given[index]) if holder.url else holder
    except ServiceError as error:  # Of this entry alone.
      return error

  results = dict(zip(numbers, feedbacks.run_batch(asked.account, given, forward), strict=True))
  for done in results.values():
    if not isinstance(done, (Exception, _OfHolder)):
      asked.metrics.feedback(outcome(done))
  return results


def _learned_by_holder(asked: Incoming, holder: NotHolder, number: int, entry: feedbacks.FeedbackEntry) -> _OfHolder:
  """Let another replica learn from an entry of a batch; return its result or its error, as JSON."""
  body = asked.body.entries[number].model_dump_json(exclude_unset=True, exclude={'adapter', 'if_match'})
  headers = {'idempotency-key': [], 'if-match': [] if entry.expected is None else [f'"{entry.expected}"']}
  part = entry.idempotency
  if part is not None:  # It runs there under the same name, so that a repeat of the batch finds its answer anywhere.
    asked.account.service.store.abandon(part)
    headers['idempotency-key'] = [forwarding.PART.format(part.id.key, part.id.body)]
  status, said = asked.post_to_replica(holder, f'{ROOT}/adapters/{entry.adapter}/feedback', body.encode(), headers)
  if not isinstance(said, dict) or ('version_after' if status == 200 else 'error') not in said:
    raise NotHolder('')  # It is no replica that has answered.
  return _OfHolder(said if status == 200 else {'status': status, **said})


class _OfHolder(dict[str, Any]):
  """What another replica has answered, and stored."""


def _batch_once(
  asked: Incoming, request: store.IdempotentRequest, entries: Sequence[feedbacks.FeedbackEntry]
) -> list[Any]:
  """Return the results of a batch with an Idempotency-Key; each entry is learned only once, and errors run again."""
  account, begun = asked.account, {}
  results: list[Any] = [None] * len(entries)
  try:
    for index in range(len(entries)):
      part = account.service.store.part(request, index)
      if isinstance(part, store.StoredResponse):
        results[index] = (
          feedback_again(account, part.adapter, part.version) if part.response is None else json.loads(part.response)
        )
      else:
        begun[index] = part
    todo = {index: dataclasses.replace(entries[index], idempotency=part) for index, part in begun.items()}
    for index, done in _learned(asked, todo).items():
      results[index] = done
      if not isinstance(done, (Exception, _OfHolder)):
        part = begun.pop(index)
        account.service.store.finish(part, 200, as_json(done))
  finally:
    with contextlib.ExitStack() as ended:  # Each of them, also if the database fails.
      for part in begun.values():
        ended.callback(account.service.store.abandon, part)
  return results


def _batch_again(account: Account, adapter: str, version: int | None) -> dict[str, Any]:
  raise AssertionError('A batch makes no version itself; its entries do.')


def _of_entry(error: ServiceError | UserError, number: int) -> Exception:
  """Return an error that also names the batch entry in which it occurred."""
  known = error_responses.known(error)
  if isinstance(known, (InvalidRequest, NotFound)):
    field = f'entries.{number}' + (f'.{known.field}' if known.field else '')
    return type(known)(f'entries[{number}]: {known}', field=field, log=known.log)
  return error


def _result(done: Any) -> Any:
  if not isinstance(done, Exception):
    return done
  failed = error_responses.failure(error_responses.known(done), ROOT, '')
  return {'status': failed.status, **failed.body}


def feedback_request(body: schemas.FeedbackBody, settings: Any) -> FeedbackRequest:
  """Convert the body of a request to a `FeedbackRequest`.

  Raises:
    InvalidRequest: a field is invalid, or the fields cannot be learned from in this combination.
  """
  items = [Item(**given.model_dump()) for given in body.items]
  names = ('teacher', 'mode', 'guards', 'detail', 'top')
  more = {name: getattr(body, name) for name in names if getattr(body, name) is not None}
  return make_request(items, body.update.model_dump(exclude_unset=True), settings, **more)


# Events.


async def events(request: Request) -> Response:
  """Stream the events of an adapter: queued, scored, stepped, guarded, committed, rejected; Last-Event-ID resumes."""
  return await stream(request, event_stream(incoming(request, b'')))


events.operation = Operation(answers=SSE, endless=True)  # type: ignore[attr-defined]


def event_stream(asked: Incoming) -> Iterator[ServerSentEvent]:
  """Yield the events of an adapter as they happen, after an empty comment and with heartbeats in silences.

  Raises:
    NotHolder: they happen at another replica now, to which a client that reconnects is forwarded.
  """
  asked.account.service.store.hold(asked.account.owner, asked.adapter)  # Where they happen.
  happening = asked.account.events(asked.adapter, asked.last_event, timeout=_LOOK)
  yield ServerSentEvent()
  silent = 0.0
  for event in happening:
    asked.call.check()
    if event is not None:
      silent = 0.0
      yield ServerSentEvent({'adapter': event.adapter, 'time': event.time, **event.details}, event.kind, event.id)
    elif (silent := silent + _LOOK) >= _HEARTBEAT:
      silent = 0.0
      with contextlib.suppress(StorageFailed):  # As long as that is not known, they happen here.
        asked.account.service.store.hold(asked.account.owner, asked.adapter)
      yield ServerSentEvent()


# Responses.


def adapter_said(adapter: AdapterRecord) -> dict[str, Any]:
  """Return an adapter as JSON in the form of `AdapterSaid`."""
  return {
    'id': adapter.id,
    'name': adapter.name,
    'kind': 'cartridge' if adapter.is_cartridge else 'adapter',
    'version': adapter.head,
    'lora_uri': records.lora_uri(adapter.id, adapter.head),
    'created': adapter.created,
    'settings': {name: value for name, value in adapter.settings.items() if name != 'kind'},
  }


def version_said(version: Version) -> dict[str, Any]:
  """Return a version as JSON in the form of `VersionSaid`."""
  return {
    'adapter': version.adapter,
    'version': version.number,
    'parent': version.parent,
    'reason': version.reason,
    'created': version.created,
    'digest': version.digest,
    'lora_uri': records.lora_uri(version.adapter, version.number),
    'details': dict(version.details),
  }


def completion_said(index: int, sample: SampleRecord) -> dict[str, Any]:
  """Return a completion as JSON in the form of `CompletionSaid`."""
  return {
    'sample_id': sample.id,
    'index': index,
    'text': sample.text,
    'finish_reason': sample.finish_reason,
    'tokens': [int(token) for token in sample.tokens],
    'log_probs': np.asarray(sample.log_probs, np.float64),
    'expires': sample.expires,
  }


def completions_said(
  model: str, target: Any, prompt: list[int], samples: list[SampleRecord], reused: int = 0
) -> dict[str, Any]:
  """Return completions as `CompletionsSaid`; `reused` is the number of prompt tokens that came from a cached prefix."""
  drawn = sum(len(sample.tokens) for sample in samples)
  usage = {'prompt_tokens': len(prompt), 'completion_tokens': drawn, 'total_tokens': len(prompt) + drawn}
  return {
    'model': model,
    'adapter': None if target.adapter is None else target.adapter.id,
    'version': target.number,
    'uri': target.uri,
    'prompt_tokens': list(prompt),
    'completions': [completion_said(index, sample) for index, sample in enumerate(samples)],
    'usage': usage | {'reused_tokens': reused},
  }


# Responses to a repeated request whose first response was lost with its process.


def _adapter_again(account: Any, adapter: str, version: int | None) -> dict[str, Any]:
  return adapter_said(account.adapter(adapter))


def _version_again(account: Any, adapter: str, version: int | None) -> dict[str, Any]:
  return version_said(account.version(adapter, version))


def feedback_again(account: Any, adapter: str, version: int | None) -> dict[str, Any]:
  """Return the response to a feedback, rebuilt from the details of the version that it made."""
  details: Mapping[str, Any] = {}
  with contextlib.suppress(Gone):  # Retention has removed it meanwhile.
    details = account.version(adapter, version).details
  known = {'accepted': True, 'reason': None, 'unchanged': False, 'metrics': {}, **details}
  return known | {
    'adapter': adapter,
    'version_before': version - 1,
    'version_after': version,
    'recovered': True,
    'timings': {},
  }


_EXPORT = {
  'version': 'The number of a version; by default the newest.',
  'format': "Of a cartridge: 'published' for cartridge.pt and config.yaml; by default ours.",
}
_CHANGED: dict[str, Any] = {'response': schemas.AdapterSaid, 'again': _adapter_again, 'tagged': True}
_MADE: dict[str, Any] = {'status': 201, **_CHANGED}
ROUTES: list[Route] = [
  route('GET', '/v1/capabilities', capabilities, response=schemas.CapabilitiesSaid),
  route('GET', '/v1/usage', usage, response=schemas.UsageSaid, cheap=True),
  route('GET', f'{ROOT}/adapters', list_adapters, query=PAGED, response=schemas.AdaptersSaid),
  route('POST', f'{ROOT}/adapters', create_adapter, body=schemas.CreateAdapter, **_MADE),
  route(
    'POST',
    f'{ROOT}/adapters/import',
    import_adapter,
    content_type='application/zip',
    query={'name': 'The name of the new adapter.'},
    **_MADE,
  ),
  route(
    'POST',
    f'{ADAPTER}/versions',
    push,
    content_type='application/zip',
    status=201,
    response=schemas.VersionSaid,
    again=_version_again,
    tagged=True,
  ),
  route('GET', ADAPTER, get_adapter, response=schemas.AdapterSaid, tagged=True),
  route('PATCH', ADAPTER, change_adapter, body=schemas.ChangeAdapter, **_CHANGED),
  route('DELETE', ADAPTER, delete_adapter, response=schemas.DeletedSaid),
  route('POST', f'{ADAPTER}/fork', fork_adapter, body=schemas.ForkAdapter, **_MADE),
  route(
    'POST', f'{ADAPTER}/undo', undo, body=schemas.Undo, response=schemas.VersionSaid, again=_version_again, tagged=True
  ),
  route('GET', f'{ADAPTER}/versions', list_versions, query=PAGED, response=schemas.VersionsSaid),
  route('GET', f'{ADAPTER}/versions/{{number}}', get_version, response=schemas.VersionSaid, tagged=True),
  route(
    'GET',
    f'{ADAPTER}/versions/{{number}}/diff',
    diff,
    response=schemas.DiffSaid,
    query={'against': 'The number of the other version; by default the parent.'},
  ),
  route('GET', f'{ADAPTER}/export', export, query=_EXPORT, answers='application/zip'),
  route('GET', f'{ADAPTER}/export/{{file}}', export_file, query=_EXPORT, answers='application/octet-stream'),
  Route(f'{ADAPTER}/events', events, methods=['GET']),
  route(
    'POST',
    f'{ADAPTER}/feedback',
    feedback,
    body=schemas.FeedbackBody,
    response=schemas.FeedbackSaid,
    again=feedback_again,
    tagged=True,
  ),
  route(
    'POST',
    f'{ROOT}/feedback/batch',
    feedback_batch,
    body=schemas.BatchBody,
    response=schemas.BatchSaid,
    again=_batch_again,
  ),
  route(
    'POST',
    f'{ROOT}/completions',
    completions,
    _streamed,
    body=schemas.CompletionRequest,
    response=schemas.CompletionsSaid,
  ),
  route('POST', f'{ROOT}/score', score, body=schemas.ScoreRequest, response=schemas.ScoreSaid),
]
