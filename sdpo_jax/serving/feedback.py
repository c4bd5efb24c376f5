"""The feedback transaction: learn the lessons, check the new version with the guards, and commit it or discard it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
import concurrent.futures
import contextlib
import dataclasses
import logging
import secrets
import time
from typing import Any

import numpy as np

from sdpo_jax.errors import UserError
from sdpo_jax.learning.learner import Learned, LessonScores
from sdpo_jax.learning.requests import Lesson
from sdpo_jax.serving import answers, guards, lessons, teachers
from sdpo_jax.serving.account import Account
from sdpo_jax.serving.call import Call
from sdpo_jax.serving.engine import Feedback
from sdpo_jax.serving.errors import Gone, InvalidRequest, NotFound, NotReady, ServiceError
from sdpo_jax.serving.feedback_request import FeedbackRequest
from sdpo_jax.serving.guards import Canaries, Guards, Measured
from sdpo_jax.serving.records import AdapterRecord, Version, engine_name
from sdpo_jax.serving.service_state import ServiceState
from sdpo_jax.serving.store.store import IdempotentRequest, Store
from sdpo_jax.serving.teachers import FeedbackTeacher

Progress = Callable[..., None]  # (stage, **details): queued, scored, stepped, guarded, committed or rejected.
_TOGETHER = 32  # The most feedbacks of a batch that run at once.
_logger = logging.getLogger('sdpo_jax.serving')


@dataclasses.dataclass(frozen=True)
class FeedbackResult:
  """The response to a feedback, and the scores that its items are made from."""

  said: dict[str, Any]  # As JSON.
  scores: Sequence[LessonScores]  # One for each item.


def learn(
  account: Account,
  id: str,
  expected: int | None,
  request: FeedbackRequest,
  *,
  idempotency: IdempotentRequest | None = None,
  progress: Progress = lambda stage, **details: None,
) -> FeedbackResult:
  """Learn from a feedback in one transaction and return the response.

  Afterwards the adapter is one version further or unchanged. If anything raises before the commit, including `progress`
  before 'committed', the adapter, the store and the engine are unchanged. Other changes of the adapter are waited for;
  if the store has changed nevertheless, the commit is refused.

  Args:
    account: the owner's, in this request.
    id: of the adapter that learns.
    expected: the version that the adapter must be at; None: any.
    request: what to learn.
    idempotency: idempotency record stored with the commit, so that a repeated request does not learn twice.
    progress: called at every stage; it may raise to end the transaction.

  Raises:
    VersionConflict: the adapter is at another version.
    NotFound: the adapter, a sample, or the version that teaches, does not exist.
    Gone: a sample has expired.
    InvalidRequest: something cannot be learned.
    UserError: the same, from the engine.
    Busy: too many requests wait.
    Deadline: the time was over before the commit.
    Cancelled: the sender left before the commit.
  """

  def tell(stage: str, **details: Any) -> None:
    account.service.events.add(id, stage, details)
    progress(stage, **details)

  with account.turn(id, expected) as adapter:
    if idempotency is not None:  # Its response quotes the samples, even if nothing is committed.
      account.service.store.about(idempotency, adapter.id)
    return _learn(account.service, account.call, adapter, request, idempotency, tell)


def _learn(
  service: ServiceState,
  call: Call,
  adapter: AdapterRecord,
  request: FeedbackRequest,
  idempotency: IdempotentRequest | None,
  progress: Progress,
) -> FeedbackResult:
  """Run the transaction while nobody else changes the adapter."""
  store, worker, clock = service.store, service.worker, _Clock()
  commits = request.mode == 'commit'
  limits = Guards.of(service.settings.guards, adapter.settings.get('guards'), request.guards)
  teacher = teachers.choose(adapter, request.teacher, service.settings.learning)
  _check_teacher(store, adapter, teacher)
  canary_prompts = _canary_prompts(service, adapter, request, limits)
  prepared = lessons.prepare(request.items, adapter, store, service.reprompting, service.vocab_size)
  tokens = sum(_tokens(each.lesson, request.update.steps) for each in prepared)
  call.spend('learned', tokens)
  progress('queued', version=adapter.head, items=len(prepared))
  clock.through('queued')

  before = engine_name(adapter.id, adapter.head)
  new = engine_name(adapter.id, adapter.head + 1)
  if not commits:  # A name that no later commit can have.
    new = f'{before}-trial-{secrets.token_hex(8)}'
  wanted = Feedback(
    version=before,
    new=new,
    lessons=[each.lesson for each in prepared],
    update=request.update,
    teacher=teacher.name,
    average_rate=teacher.average_rate,
  )
  try:
    call.check()
    if teacher.name == 'endpoint':
      wanted = dataclasses.replace(wanted, lessons=service.ask_endpoint(wanted.lessons, call), teacher='given')
    # Once learning has begun, wait in any case: only then is it known whether there is a version to forget.
    learned: Learned = call.result(worker.learn(wanted, deadline=call.deadline))
  except BaseException:
    call.spend('learned', -tokens)
    raise
  committed: Version | None = None
  try:
    for stage in ('scored', 'stepped'):  # Both stages are one call of the engine.
      progress(stage, steps=len(learned.steps))
      clock.through(stage)
    call.check()
    arrays = worker.arrays(new) if learned.stepped else None
    finite = arrays is not None and _all_finite([*arrays.values(), *(each.log_probs_after for each in learned.said)])
    canaries = None
    if finite and canary_prompts:
      similarity = limits.max_self_similarity is not None
      canaries = service.canaries.measure(new, canary_prompts, similarity=similarity, deadline=call.deadline)
    recent = answers.recent_losses(_recent(store, adapter), request.update.loss)
    checks = guards.check(limits, _measured(learned, finite, canaries, recent))
    details = answers.details(request, teacher.said, prepared, learned, checks, canaries)
    accepted, reason = details['accepted'], details['reason']
    progress('guarded', accepted=accepted, reason=reason)
    clock.through('guarded')
    # The response is made before the commit, since nothing may fail afterwards.
    items = [
      answers.of_item(each, said, service.texts, detail=request.detail, top=request.top)
      for each, said in zip(prepared, learned.said, strict=True)
    ]
    call.check()
    if accepted and commits:
      committed = store.commit(
        adapter.owner,
        adapter.id,
        adapter.head,
        arrays,
        reason='feedback',
        details=details,
        request=idempotency,
      )
  finally:
    if committed is None:
      with contextlib.suppress(NotReady):  # Then no engine has the version.
        worker.forget(new)
  clock.through('committed' if committed is not None else 'rejected' if not accepted else 'dry_run')
  after = adapter.head if committed is None else committed.number
  answer = answers.make(adapter.id, adapter.head, after, details, items, clock.times)
  _note(service, adapter, request, answer, progress)
  return FeedbackResult(answer, learned.said)


@dataclasses.dataclass(frozen=True)
class FeedbackEntry:
  """One feedback of a batch."""

  adapter: str  # Its id.
  request: FeedbackRequest
  expected: int | None = None
  idempotency: IdempotentRequest | None = None


def run_batch(account: Account, entries: Sequence[FeedbackEntry]) -> list[dict[str, Any] | ServiceError | UserError]:
  """Run several feedbacks and return, in order, the response or the error of each.

  Each is a transaction of its own. Those of one adapter run one after the other; those of different adapters run at the
  same time, so that the engine learns them in the same programs.
  """
  by_adapter: dict[str, list[int]] = {}
  for index, entry in enumerate(entries):
    by_adapter.setdefault(entry.adapter, []).append(index)

  def one_after_the_other(indices: list[int]) -> list[tuple[int, dict[str, Any] | ServiceError | UserError]]:
    found = []
    for index in indices:
      entry = entries[index]
      try:
        done = learn(account, entry.adapter, entry.expected, entry.request, idempotency=entry.idempotency)
        found.append((index, done.said))
      except (ServiceError, UserError) as error:
        found.append((index, error))
    return found

  if not by_adapter:
    return []
  with concurrent.futures.ThreadPoolExecutor(min(len(by_adapter), _TOGETHER), 'batch') as pool:
    done = dict(each for part in pool.map(one_after_the_other, by_adapter.values()) for each in part)
  return [done[index] for index in range(len(entries))]


def _tokens(lesson: Lesson, steps: int) -> int:
  """Return the number of tokens that a lesson computes: one pass of the teacher, and one of the student per step."""
  length = len(lesson.completion)
  return len(lesson.teacher_prompt or ()) + length + steps * (len(lesson.prompt) + length)


class _Clock:
  """A stopwatch that records the seconds until each stage was finished."""

  def __init__(self):
    self._began, self.times = time.monotonic(), {}

  def through(self, stage: str) -> None:
    self.times[stage] = time.monotonic() - self._began


def _check_teacher(store: Store, adapter: AdapterRecord, teacher: FeedbackTeacher) -> None:
  """Raise InvalidRequest if the version that should teach does not exist any more."""
  if teacher.version is None:
    return
  try:
    store.version(adapter.owner, adapter.id, teacher.version)
  except (NotFound, Gone) as error:
    raise InvalidRequest(
      f'Version {teacher.version} of the adapter, which is to teach, is not kept any more: choose another teacher, or '
      'let the service keep more versions (serve.store.keep_versions).',
      field='teacher',
    ) from error


def _canary_prompts(
  service: ServiceState, adapter: AdapterRecord, request: FeedbackRequest, limits: Guards
) -> list[Sequence[int]]:
  """Return the prompts on which to measure the new version; empty if no guard needs them.

  Raises:
    InvalidRequest: the user has set a limit on canary prompts, and there are none.
  """
  prompts = adapter.settings.get('canary_prompts') or ()
  if not prompts:
    for said in (adapter.settings.get('guards'), request.guards):
      asked = [name for name in guards.ON_CANARIES if (said or {}).get(name) is not None]
      if asked and getattr(limits, asked[0]) is not None:
        raise InvalidRequest(
          f'The guard {asked[0]} is measured on canary prompts, and the adapter has none: set canary_prompts in its '
          f'settings, or {asked[0]} to null.',
          field=f'guards.{asked[0]}',
        )
    return []
  if not limits.on_canaries:
    return []
  asked = [[{'role': 'user', 'content': each}] if isinstance(each, str) else each for each in prompts]
  return [service.prompt_of(messages=messages) for messages in asked]


def _recent(store: Store, adapter: AdapterRecord) -> list[Version]:
  """Return the newest stored versions of an adapter."""
  found = []
  for number in range(max(0, adapter.head - guards.RECENT + 1), adapter.head + 1):
    try:
      found.append(store.version(adapter.owner, adapter.id, number))
    except ServiceError:  # A removed or damaged version is left out of the comparison.
      continue
  return found


def _all_finite(arrays: Iterable[np.ndarray]) -> bool:
  return all(bool(np.isfinite(array).all()) for array in arrays)


def _measured(learned: Learned, finite: bool, canaries: Canaries | None, recent: Sequence[float]) -> Measured:
  loss = answers.number(learned.steps[0]['loss'])
  ratio = None if loss is None else guards.loss_ratio(loss, recent)
  if canaries is None:
    return Measured(finite, ratio)
  return Measured(finite, ratio, canaries.kl_to_base, canaries.entropy, canaries.self_similarity)


def _note(
  service: ServiceState,
  adapter: AdapterRecord,
  request: FeedbackRequest,
  answer: Mapping[str, Any],
  progress: Progress,
) -> None:
  """Log the feedback in the store and report the last stage. Errors are logged: the response stands."""
  store, worker, after = service.store, service.worker, answer['version_after']
  committed = after != answer['version_before']
  stage = 'committed' if committed else 'dry_run' if answer['accepted'] else 'rejected'
  texts = ('feedback', 'environment', 'correction', 'demonstration')
  record = {
    **{name: answer[name] for name in ('version_before', 'version_after', 'accepted', 'reason', 'metrics')},
    'items': [
      {'sample_id': item.sample_id, 'reward': item.reward, 'num_tokens': said['num_tokens'], 'context': said['context']}
      | {name: getattr(item, name) for name in texts if getattr(item, name) is not None}
      for item, said in zip(request.items, answer['items'], strict=True)
    ],
  }
  actions: list[Callable[[], None]] = []
  if committed:
    actions.append(lambda: worker.stored(engine_name(adapter.id, after)))
  if request.mode == 'commit':
    actions.append(lambda: store.note_feedback(adapter.owner, adapter.id, record))
  actions.append(lambda: progress(stage, version=after, accepted=answer['accepted'], reason=answer['reason']))
  for action in actions:
    try:
      action()
    except Exception:
      _logger.exception('A feedback on %s was through, and not all was noted of it.', adapter.id)
