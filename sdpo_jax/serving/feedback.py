"""The feedback transaction: learn from lessons, check the new version with the guards, then commit or discard it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import concurrent.futures
import contextlib
import dataclasses
import functools
import logging
import secrets
import time
from typing import Any

import numpy as np

from sdpo_jax.errors import UserError
from sdpo_jax.files import jsonable
from sdpo_jax.learning.learner import Learned, LessonScores
from sdpo_jax.learning.losses import Loss, Sdpo
from sdpo_jax.learning.scoring import Scored
from sdpo_jax.serving import guards, lessons
from sdpo_jax.serving.account import Account
from sdpo_jax.serving.call import Call
from sdpo_jax.serving.engine import Feedback
from sdpo_jax.serving.errors import Gone, InvalidRequest, NotFound, NotHolder, NotReady, ServiceError
from sdpo_jax.serving.feedback_request import FeedbackRequest, choose_teacher
from sdpo_jax.serving.guards import Guards, Measured
from sdpo_jax.serving.jobs import tokens_learned
from sdpo_jax.serving.records import AdapterRecord, Version, engine_name, in_effect, optimizer_name
from sdpo_jax.serving.service_state import EventLog, ServiceState
from sdpo_jax.serving.store import optimizer_states
from sdpo_jax.serving.store.store import IdempotentRequest, Store
from sdpo_jax.serving.worker import Worker

Progress = Callable[..., None]  # (stage, **details): queued, scored, stepped, guarded, committed or rejected.
_TOGETHER = 32  # The most feedbacks of a batch that run concurrently.
_logger = logging.getLogger('sdpo_jax.serving')


@dataclasses.dataclass(frozen=True)
class FeedbackResult:
  """The response to a feedback, with the scores from which it was made."""

  said: dict[str, Any]  # The response, as JSON.
  scores: Sequence[LessonScores]  # One for each item.
  moved: Sequence[lessons.AnswersMoved]  # One for each item.


def learn(
  account: Account,
  id: str,
  expected: int | None,
  request: FeedbackRequest,
  *,
  idempotency: IdempotentRequest | None = None,
  progress: Progress = lambda stage, **details: None,
) -> FeedbackResult:
  """Learn from a feedback in one transaction, and return the response.

  The adapter gets one new version or is unchanged. If anything raises before the commit, including `progress` before
  'committed', the adapter, the store and the engine are unchanged. The transaction waits for other changes of the
  adapter.

  Args:
    account: the account of the owner.
    id: the id of the adapter that learns.
    expected: the version that the adapter must be at; None: any.
    request: what to learn.
    idempotency: the idempotency record, stored with the commit so that a repeated request does not learn twice.
    progress: called at every stage; it may raise to end the transaction.

  Raises:
    VersionConflict: the adapter is at another version.
    NotFound: the adapter or a sample does not exist.
    Gone: a sample has expired.
    InvalidRequest: an item cannot be learned from, or the teacher does not exist any more.
    UserError: an item does not fit the engine.
    Busy: too many requests wait.
    Deadline: the time limit was reached before the commit.
    Cancelled: the client disconnected before the commit.
  """
  with account.turn(id, expected) as adapter:
    if adapter.is_cartridge:
      raise InvalidRequest(f'{adapter.name} is a cartridge, which does not learn here: push a version of it instead.')
    if idempotency is not None:  # The response quotes samples, even if nothing is committed.
      account.service.store.about(idempotency, adapter.id)
    stages = _Stages(account.service.events, adapter.id, progress)
    with contextlib.ExitStack() as permit:
      return _learn(account, adapter, request, idempotency, stages, permit)


@dataclasses.dataclass
class _Stages:
  """The stages of a transaction: each is published as an event, and its time is recorded."""

  events: EventLog
  adapter: str  # The id of the adapter.
  progress: Progress
  began: float = dataclasses.field(default_factory=time.monotonic)
  times: dict[str, float] = dataclasses.field(default_factory=dict)

  def reach(self, stage: str, **details: Any) -> None:
    """Publish a stage and record its time; `progress` may raise."""
    self.events.add(self.adapter, stage, details)
    self.progress(stage, **details)
    self.times[stage] = time.monotonic() - self.began


def _learn(
  account: Account,
  adapter: AdapterRecord,
  request: FeedbackRequest,
  idempotency: IdempotentRequest | None,
  stages: _Stages,
  permit: contextlib.ExitStack,
) -> FeedbackResult:
  """Run the transaction; the caller holds the lock of the adapter, and gives back the permit to learn."""
  service, call, update = account.service, account.call, request.update
  store, worker = service.store, service.worker
  commits = request.mode == 'commit'
  limits = Guards.of(service.settings.guards, adapter.settings.get('guards'), request.guards)
  kept_from = store.kept_from(adapter.owner, adapter.id)
  teacher = choose_teacher(adapter, request.teacher, service.settings.learning, kept_from)
  if teacher.version is not None:
    _check_teacher(store, adapter, teacher.version)
  canary_prompts = _canary_prompts(service, adapter, request, limits)
  prepared = lessons.prepare(request.items, adapter, store, service.reprompting, service.vocab_size)
  learning = [each.lesson for each in prepared]
  before = engine_name(adapter.id, adapter.head)
  # A name that no version ever has: until the commit, the next number may become that of another replica's version.
  new = f'{before}-trial-{secrets.token_hex(8)}'
  with account.spending('feedbacks', 1), account.spending('learned', tokens_learned(learning, update.steps)):
    stages.reach('queued', version=adapter.head, items=len(prepared))
    call.check()
    asked = teacher.name
    if asked == 'endpoint':
      learning, asked = service.ask_endpoint(learning, call), 'given'
    permit.enter_context(service.learning.of(call))  # Not while another server is waited for.
    wanted = Feedback(before, new, learning, update, asked, teacher.average_rate)
    # There is a new version only if this returns.
    learned: Learned = call.result(worker.learn(wanted, **call.work))
  committed: Version | None = None
  try:
    for stage in ('scored', 'stepped'):  # The engine does both in one call.
      stages.reach(stage, steps=len(learned.steps))
    call.check()
    arrays, state = (worker.arrays(name) if learned.stepped else {} for name in (new, optimizer_name(new)))
    numbers = *arrays.values(), *state.values(), *(said.log_probs_after for said in learned.said)
    finite = (learned.stepped or learned.unchanged) and all(bool(np.isfinite(each).all()) for each in numbers)
    canaries = ability_loss = None
    if finite and arrays and service.abilities and limits.max_ability_loss is not None:
      ability_loss = service.canaries.ability_loss(new, service.abilities, call)
    if finite and arrays and canary_prompts:
      similarity = limits.max_self_similarity is not None
      canaries = service.canaries.measure(new, canary_prompts, similarity=similarity, call=call)
    score = functools.partial(_both, worker, before, new, call)
    moved = [lessons.AnswersMoved()] * len(prepared)
    if finite and arrays:
      moved = lessons.answers_moved(request.items, learned.said, score)
    recent = recent_losses(store, adapter, _loss_of(request))
    ratio = guards.loss_ratio(jsonable(learned.steps[0]['loss']), recent)
    rises = [each.rise for each in moved if each.rise is not None]
    names = () if canaries is None else ('kl_to_base', 'entropy', 'self_similarity')
    on_canaries = {name: getattr(canaries, name) for name in names}
    rise = max(rises, default=None)
    measured = Measured(finite, ratio, **on_canaries, rejected_rise=rise, ability_loss=ability_loss)
    details = _details(request, teacher.name, prepared, learned, guards.check(limits, measured), canaries)
    began = service.state_of(before)
    details['moments_of'] = began.moments_of
    details['average_of'] = None if teacher.average_rate is None else began.average_of
    details['warnings'] += _lost_moments(store, adapter, began.moments_of)
    accepted, reason = details['accepted'], details['reason']
    stages.reach('guarded', accepted=accepted, reason=reason)
    # Before the commit, since nothing may fail after it.
    items = [
      lessons.of_item(each, said, service.texts, detail=request.detail, top=request.top)
      for each, said in zip(prepared, learned.said, strict=True)
    ]
    call.check()
    if accepted and commits and arrays:
      with service.commits.of(call):
        committed = store.commit(
          adapter.owner,
          adapter.id,
          adapter.head,
          arrays,
          reason='feedback',
          details=details | ({'texts': _texts(request)} if service.settings.store.keep_feedback_texts else {}),
          request=idempotency,
        )
  finally:
    if committed is None:
      with contextlib.suppress(NotReady):  # The engine is gone, and the version with it.
        worker.forget(new)
  last = 'unchanged' if learned.unchanged else 'dry_run'
  last = 'committed' if committed is not None else last if accepted else 'rejected'
  stages.times[last] = time.monotonic() - stages.began
  answer = {
    'adapter': adapter.id,
    'version_before': adapter.head,
    'version_after': adapter.head if committed is None else committed.number,
    'unchanged': learned.unchanged,
    **details,
    'items': items,
    'timings': {stage: round(seconds, 6) for stage, seconds in stages.times.items()},
  }
  _note(service, adapter, answer, last, stages, new, committed and (committed, state))
  return FeedbackResult(answer, learned.said, moved)


def _lost_moments(store: Store, adapter: AdapterRecord, moments_of: int | None) -> list[str]:
  """Return a warning if learning from a version that was learned did not begin with its own moments."""
  learned, *_ = in_effect(store.database.lineage(adapter.id))  # An undo has the moments of its parent.
  if learned.number == moments_of or learned.reason in ('create', 'import'):
    return []
  instead = 'zeros' if moments_of is None else f'those of version {moments_of}'
  return [f'The moments of version {adapter.head} are not stored, so learning began with {instead}.']


def _both(worker: Worker, before: str, after: str, call: Call, rows: lessons.Rows) -> list[list[Scored]]:
  """Score rows by two versions at once."""
  scoring = [worker.score(name, rows, topk=0, **call.work) for name in (before, after)]
  return [each.result() for each in scoring]


def _details(
  request: FeedbackRequest,
  teacher: str,
  prepared: Sequence[lessons.Prepared],
  learned: Learned,
  checks: Sequence[guards.Check],
  canaries: guards.Canaries | None,
) -> dict[str, Any]:
  """Return what is stored as the details of a new version: the response without items and timings."""
  reason = next((each.reason for each in checks if not each.passed), None)
  return jsonable(
    {
      'mode': request.mode,
      'accepted': reason is None,
      'reason': reason,
      'loss': _loss_of(request),
      'optimizer': dataclasses.asdict(request.update.optimizer),
      'num_steps': request.update.steps,
      'teacher': 'ema' if teacher == 'average' else teacher,  # As in requests, or a version by its name.
      'warnings': list(learned.warnings),
      'samples': [each.sample.id for each in prepared if each.sample is not None],
      'metrics': _metrics(learned),
      'steps': learned.steps,
      'guards': [dataclasses.asdict(each) for each in checks],
      'canary': None if canaries is None else vars(canaries),
      **(request.source or {}),
    }
  )


def _metrics(learned: Learned) -> dict[str, float]:
  """Return the metrics of the last step, and some that compare the model before and after all steps.

  The latter are means over the tokens: `mean_log_prob_change`; `teacher_gap`, the teacher's log-prob minus that of the
  student before the steps; and `entropy` of the student before the steps.
  """
  found = {name: value for name, value in learned.steps[-1].items() if name != 'stepped'}
  before, after, theirs, entropy = (
    np.concatenate([getattr(each, name) for each in learned.said]).astype(np.float64)
    for name in ('log_probs_before', 'log_probs_after', 'teacher_log_probs', 'entropy')
  )
  return found | {
    'mean_log_prob_change': (after - before).mean(),
    'teacher_gap': (theirs - before).mean(),
    'entropy': entropy.mean(),
  }


def loss_said(loss: Loss) -> dict[str, Any]:
  """Return a loss with its name and parameters, as JSON."""
  return {'name': 'sdpo' if isinstance(loss, Sdpo) else 'jsd_pg', **dataclasses.asdict(loss)}


def _loss_of(request: FeedbackRequest) -> dict[str, Any]:
  """Return the loss of a request as JSON; with items that have no teacher, its values are another quantity."""
  direct = any(item.learned != 'from teacher' for item in request.items)
  return loss_said(request.update.loss) | ({'direct': True} if direct else {})


def recent_losses(store: Store, adapter: AdapterRecord, loss: Mapping[str, Any]) -> list[float]:
  """Return the loss before the first step of each feedback that made one of the newest versions of an adapter.

  Feedbacks with another loss or other parameters are left out, since their values are not comparable: a KL is many
  times the Jensen-Shannon divergence of the same two distributions.
  """
  told = jsonable(loss)
  recent = store.versions(adapter.owner, adapter.id, adapter.head - guards.RECENT)
  details = [version.details for version in recent if version.reason == 'feedback' and version.details['loss'] == told]
  return [float(each['steps'][0]['loss']) for each in details if each['steps'][0]['loss'] is not None]


@dataclasses.dataclass(frozen=True)
class FeedbackEntry:
  """One feedback of a batch."""

  adapter: str  # The id of the adapter.
  request: FeedbackRequest
  expected: int | None = None  # The version that the adapter must be at; None: any.
  idempotency: IdempotentRequest | None = None


def run_batch(
  account: Account, entries: Sequence[FeedbackEntry], forward: Callable[[int, NotHolder], Any] | None = None
) -> list[Any]:
  """Run several feedbacks; return, in their order, the response or the error of each.

  Each is its own transaction. Those of one adapter run one after the other, those of different adapters concurrently,
  so that the engine learns from them in the same batches.

  Args:
    account: the account of the owner.
    entries: the feedbacks.
    forward: asked, instead of returning the error, for the one of an index if another replica holds its adapter.
  """
  by_adapter: dict[str, list[int]] = {}
  for index, entry in enumerate(entries):
    by_adapter.setdefault(entry.adapter, []).append(index)

  def one_after_the_other(indices: list[int]) -> list[tuple[int, Any]]:
    found = []
    for index in indices:
      entry = entries[index]
      try:
        done = learn(account, entry.adapter, entry.expected, entry.request, idempotency=entry.idempotency).said
      except NotHolder as error:
        done = forward(index, error) if forward else error
      except (ServiceError, UserError) as error:
        done = error
      found.append((index, done))
    return found

  with concurrent.futures.ThreadPoolExecutor(min(max(1, len(by_adapter)), _TOGETHER), 'batch') as pool:
    done = dict(each for part in pool.map(one_after_the_other, by_adapter.values()) for each in part)
  return [done[index] for index in range(len(entries))]


def _check_teacher(store: Store, adapter: AdapterRecord, version: int) -> None:
  """Raise InvalidRequest if the version that should be the teacher does not exist any more."""
  try:
    store.version(adapter.owner, adapter.id, version)
  except (NotFound, Gone) as error:
    raise InvalidRequest(
      f'The teacher, version {version} of the adapter, does not exist any more: choose another teacher, or let the '
      'service keep more versions (serve.store.keep_versions, idle_s).',
      field='teacher',
    ) from error


def _texts(request: FeedbackRequest) -> list[dict[str, str]]:
  """Return what was said of each item, by the names of the request's fields."""
  names = ('feedback', 'environment', 'correction', 'demonstration')
  return [{name: said for name in names if (said := getattr(item, name)) is not None} for item in request.items]


def _canary_prompts(
  service: ServiceState, adapter: AdapterRecord, request: FeedbackRequest, limits: Guards
) -> list[Sequence[int]]:
  """Return the canary prompts on which to measure the new version; empty if no guard needs them.

  Raises:
    InvalidRequest: a limit that the user has set is measured on canary prompts, and there are none.
  """
  given = [said or {} for said in (adapter.settings.get('guards'), request.guards)]

  def is_set(name: str) -> bool:
    return getattr(limits, name) is not None and any(said.get(name) is not None for said in given)

  if is_set('max_ability_loss') and not service.abilities:
    raise InvalidRequest(
      'The guard max_ability_loss is measured on answers of the service, which has none: turn it off with '
      'max_ability_loss: null.',
      field='guards.max_ability_loss',
    )
  prompts = adapter.settings.get('canary_prompts') or ()
  if not prompts and not service.default_canaries:
    for name in filter(is_set, guards.ON_CANARIES):
      raise InvalidRequest(
        f'The guard {name} is measured on canary prompts, and the adapter has none: set canary_prompts in its '
        f'settings, or turn the guard off with {name}: null.',
        field=f'guards.{name}',
      )
    return []
  if not limits.on_canaries:
    return []
  if not prompts:
    return service.default_canaries
  asked = [[{'role': 'user', 'content': each}] if isinstance(each, str) else each for each in prompts]
  return [service.prompt_of(messages=messages) for messages in asked]


def _note(
  service: ServiceState,
  adapter: AdapterRecord,
  answer: Mapping[str, Any],
  stage: str,
  stages: _Stages,
  new: str,
  committed: tuple[Version, Mapping[str, np.ndarray]] | None,
) -> None:
  """Store the optimizer state, and publish the last stage. Errors are logged but not raised."""
  store, worker, after = service.store, service.worker, answer['version_after']
  actions: list[Callable[[], None]] = []
  if committed is not None:  # With its optimizer state, which is written after the answer.
    actions.append(lambda: service.note_state(committed[0], optimizer_states.own(*committed)))
    actions.append(lambda: store.keep_optimizer_state(*committed))
    actions.append(lambda: worker.stored(new, committed[0].engine_name))
  actions.append(lambda: stages.reach(stage, version=after, accepted=answer['accepted'], reason=answer['reason']))
  for action in actions:
    try:
      action()
    except Exception:
      _logger.exception('A feedback on %s was processed, but not all of it could be recorded.', adapter.id)
