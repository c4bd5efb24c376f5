"""The thread that owns the engine: it takes requests of all threads, in turns with sampling, and answers each once.

Between two chunks of tokens it does one other thing at most: it learns from feedback of several versions together, or
scores some rows of one. Versions that the engine does not have are read by other threads in the meantime.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
import concurrent.futures
import dataclasses
import gc
import logging
import threading
import time
from typing import Any, TypeVar

import numpy as np

from sdpo_jax.errors import UserError, first_line
from sdpo_jax.serving.engine import BASE, Engine, Feedback
from sdpo_jax.serving.errors import Busy, Cancelled, Deadline, InvalidRequest, NotReady, ServiceError
from sdpo_jax.serving.jobs import (
  ENDPOINT,
  ForgetJob,
  Handle,
  Job,
  LearnJob,
  SampleJob,
  ScoreJob,
  Unwanted,
  learned_together,
  needed,
  runnable,
  scored_together,
)
from sdpo_jax.serving.learning import Learned
from sdpo_jax.serving.places import NoPlaceError
from sdpo_jax.serving.scoring import Scored
from sdpo_jax.serving.shelf import Arrays

Future = concurrent.futures.Future
Answer = TypeVar('Answer')
_READERS = 2  # Threads that read versions.
_ASKERS = 8  # Threads that ask a teacher behind an endpoint.
_BATCHES = (
  4  # Micro-batches that are learned or scored between two chunks of tokens, unless one request has more lessons.
)
_SHARE = 0.75  # Of the memory for versions that those take which can be read again; others have the rest.
_COUNTS = 'sampled', 'scored', 'learned', 'failed', 'cancelled', 'late', 'refused', 'loads', 'restarts', 'turns'
_LEAST, _MOST = 0.1, 60.0  # Seconds after which a refused request may come again.
_logger = logging.getLogger('sdpo_jax.serving')


class _EngineLostError(Exception):
  """The engine cannot be used any more."""


class Worker:
  """The engine, for all threads."""

  def __init__(
    self,
    make_engine: Callable[[], Engine],
    load: Callable[[str], Arrays],
    *,
    max_waiting: int = 256,
    announce: Callable[[str], None] = print,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Make a worker that does nothing yet.

    Args:
      make_engine: makes the engine, in the worker's thread; again when its devices have failed.
      load: maps the name of a version that the engine does not have to its arrays; called by threads that do nothing
        else. What it raises reaches those who have asked for the version.
      max_waiting: requests that wait or are under way at most; others are refused.
      announce: receives lines about the programs of the engine.
      clock: seconds, for deadlines.
    """
    self.ready = threading.Event()  # All programs are there: requests are taken.
    self.failure: BaseException | None = None  # Why there is no engine now.
    self._make_engine, self._load, self._announce = make_engine, load, announce
    self._max_waiting, self._clock = max_waiting, clock
    self._thread = threading.Thread(target=self._run, name='engine', daemon=True)
    self._readers = concurrent.futures.ThreadPoolExecutor(_READERS, 'versions')
    self._askers = concurrent.futures.ThreadPoolExecutor(_ASKERS, 'endpoint')
    self._lock, self._wake = threading.Lock(), threading.Event()
    # Under the lock: what other threads leave for this one.
    self._inbox: collections.deque[Job | _Call] = collections.deque()
    self._unfinished = 0  # Requests that wait or are under way.
    self._refusal: str | None = 'The engine was not started yet.'  # Why there can be no new ones.
    self._closed = False
    self._stop_at: float | None = None
    self._counts = dict.fromkeys(_COUNTS, 0)
    self._pace, self._last_end = 0.0, clock()  # Seconds between the ends of requests, on average.
    # Of the worker's thread alone, but for looks at the engine.
    self._engine: Engine | None = None
    self._waiting: list[Job] = []
    self._drawing: list[SampleJob] = []
    self._loading: dict[str, Future[Arrays]] = {}
    self._pinned: set[str] = set()  # Versions that waiting requests need.
    self._kept: collections.OrderedDict[str, None] = collections.OrderedDict()  # Can be read again; longest ago first.
    self._own: set[str] = set()  # Versions that nothing but the engine has.
    self._rescued: dict[str, Arrays] = {}  # The same while the engine is made anew.

  # Life.

  def start(self) -> None:
    """Start the thread, which makes the engine and compiles its programs; `ready` says when it has."""
    with self._lock:
      self._refusal = 'The engine compiles its programs: come again when it is ready.'
    self._thread.start()

  def wait(self, timeout: float | None = None) -> bool:
    """Wait until the engine is ready, for at most `timeout` seconds; return whether it is.

    Raises:
      BaseException: why it will not be.
    """
    end = None if timeout is None else time.monotonic() + timeout
    while not self.ready.wait(0.1 if end is None else min(0.1, max(0.0, end - time.monotonic()))):
      if self._closed:
        raise self.failure or NotReady(self._refusal)
      if end is not None and time.monotonic() >= end:
        return False
    return True

  def stop(self, drain: float) -> None:
    """Refuses new requests, gives those that are there so many seconds to be done, and ends; more calls are no error.

    What belongs to a request under way, `arrays`, `put` and `forget`, is answered until then.
    """
    with self._lock:
      self._refusal = 'The service ends: send the request to it when it is back.'
      self._stop_at = self._clock() + drain
      started = self._thread.ident is not None
    self._wake.set()
    if started:
      self._thread.join()
    for threads in (self._readers, self._askers):
      threads.shutdown(wait=False, cancel_futures=True)

  # Requests.

  def sample(
    self,
    version: str,
    prompt: Sequence[int],
    *,
    deadline: float | None = None,
    drafts: bool = False,
    stop: Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    owner: str | None = None,
    **options: Any,
  ) -> Handle:
    """Lets samples of a prompt by a version wait for their turn.

    Args:
      version: its name in the engine; `BASE`: the model without an adapter.
      prompt: token ids.
      deadline: on the worker's clock; after it they end.
      drafts: whether the handle yields drafts, too.
      stop: strings that end a sample.
      stop_token_ids: tokens that do.
      owner: see `Engine.submit`.
      **options: `SamplingOptions`; the step is 0 unless given.

    Raises:
      Busy: too many requests wait.
      NotReady: there is no engine now.
    """
    handle = Handle()
    given = {'step': 0, **options, 'drafts': drafts, 'stop': tuple(stop), 'stop_token_ids': tuple(stop_token_ids)}
    given['owner'] = owner
    needs = frozenset({version} - {BASE})
    self._ask(
      lambda began: SampleJob(
        version=version,
        prompt=list(prompt),
        options=given,
        handle=handle,
        needs=needs,
        began=began,
        deadline=deadline,
      )
    )
    return handle

  def cancel(self, request: Handle | Future) -> None:
    """End a request: samples at the next chunk, and what has not begun yet at once; no error if it is done."""
    if isinstance(request, Future):
      request.cancel()
    else:
      request.cancelled = True
    self._wake.set()

  def score(
    self,
    version: str,
    rows: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    topk: int = 1,
    ids: Sequence[np.ndarray] | None = None,
    deadline: float | None = None,
  ) -> Future[list[Scored]]:
    """Lets rows wait to be scored; see `Engine.score`.

    Raises:
      InvalidRequest: there are no rows, or ids that are not [T, M] int32 of every row with the same M.
      Busy: too many requests wait.
      NotReady: there is no engine now.
    """
    if not rows:
      raise InvalidRequest('There is nothing to score: give at least one row.', field='rows')
    if ids is not None:
      ids = [np.asarray(own, np.int32) for own in ids]
      shapes = {own.ndim == 2 and own.shape[1] for own in ids}
      lengths = [len(tokens) for _, tokens in rows]
      if len(shapes) != 1 or False in shapes or [len(own) for own in ids] != lengths:
        raise InvalidRequest('ids must be as many for every token of every row.', field='ids')
    job = self._ask(
      lambda began: ScoreJob(
        version=version,
        rows=rows,
        topk=topk,
        ids=ids,
        needs=frozenset({version} - {BASE}),
        began=began,
        deadline=deadline,
      )
    )
    return job.future

  def learn(self, feedback: Feedback, *, deadline: float | None = None) -> Future[Learned]:
    """Lets feedback wait to be learned. Unless a gradient was not finite, the engine has the new version then.

    Nothing else has it: `stored` says when something does, and `forget` that nobody wants it. An endpoint that teaches
      is
    asked by another thread before.

    Raises:
      Busy: too many requests wait.
      NotReady: there is no engine now.
    """

    def make(began: float) -> LearnJob:
      job = LearnJob(feedback=feedback, needs=needed(feedback), began=began, deadline=deadline)
      if feedback.teacher == ENDPOINT and any(lesson.taught is None for lesson in feedback.lessons):
        job.asked = self._askers.submit(self._engine.ask_endpoint, feedback.lessons, Unwanted(job.future))
        job.asked.add_done_callback(lambda _: self._wake.set())
      return job

    return self._ask(make).future

  # Versions.

  def arrays(self, version: str) -> Arrays:
    """Return all that a version is, by name; none can be written to.

    Raises:
      ServiceError: neither the engine has it nor what loads versions.
    """
    engine, rescued = self._engine, self._rescued
    if version in rescued:
      return rescued[version]
    if engine is not None and version in engine:
      try:
        return engine.state(version)
      except UserError:  # It has gone in the meantime, to where it can be read.
        pass
    return self._load(version)

  def put(self, version: str, arrays: Arrays) -> None:
    """Make a version of arrays as `arrays` returns them.

    Raises:
      InvalidRequest: they are not of the shape that is served, or not finite.
      ServiceError: there is a version of that name.
      NotReady: there is no engine now.
    """

    def restore(engine: Engine) -> None:
      engine.restore(version, arrays)
      self._own.add(version)

    self._call(restore).result()

  def stored(self, version: str) -> None:
    """Says that `load` finds a version from now on, so that the engine need not have it."""

    def keep(_: Engine) -> None:
      if version in self._own:
        self._own.remove(version)
        self._kept[version] = None

    self._call(keep)

  def fresh(self, seed: int) -> Arrays:
    """Return the arrays of a version that changes nothing yet, of which the engine keeps nothing.

    Raises:
      NotReady: there is no engine now.
    """
    engine = self._engine
    if engine is None:
      raise NotReady('There is no engine now: come again when it is ready.')
    return engine.fresh(seed)

  def forget(self, *versions: str) -> None:
    """Erases versions from the engine, each as soon as what uses it is done; one that is not there is no error.

    Raises:
      NotReady: the worker has ended.
    """
    jobs = [ForgetJob(version=version, needs=frozenset(), began=self._clock()) for version in versions]
    for job in jobs:
      self._leave(job)
    for job in jobs:
      job.future.result()

  @property
  def stats(self) -> dict[str, float]:
    """Numbers for whoever watches: lengths of queues, and counts of what was done."""
    engine = self._engine
    with self._lock:
      found: dict[str, float] = dict(self._counts)
      found['unfinished'] = self._unfinished
    found['sampling'] = len(self._drawing)
    found['loading'] = len(self._loading)
    found['versions'] = len(self._kept) + len(self._own)
    for name in ('tokens', 'prefilled', 'reused'):
      found[name] = getattr(engine, name) if engine is not None else 0
    return found

  # What other threads leave.

  def _ask(self, make: Callable[[float], Job]) -> Any:
    """Lets a request wait, and returns it."""
    with self._lock:
      if self._refusal is not None:
        raise NotReady(self._refusal)
      if self._unfinished >= self._max_waiting:
        self._counts['refused'] += 1
        seconds = min(_MOST, max(_LEAST, self._pace * self._unfinished / 4))
        raise Busy(
          f'{self._unfinished} requests wait, as many as may: come again in {seconds:.1f} s.', retry_after=seconds
        )
      job = make(self._clock())
      self._unfinished += 1
      self._inbox.append(job)
    self._wake.set()
    return job

  def _call(self, do: Callable[[Engine], Answer]) -> Future[Answer]:
    """Lets something be done with the engine before the next chunk."""
    call = _Call(do)
    self._leave(call)
    return call.future

  def _leave(self, work: Job | _Call) -> None:
    with self._lock:
      if self._closed or self._thread.ident is None:
        raise NotReady(self._refusal)
      self._inbox.append(work)
    self._wake.set()

  # The thread.

  def _run(self) -> None:
    while True:
      try:
        engine = self._make_engine()
        engine.compile(self._announce)
        for version, arrays in self._rescued.items():
          engine.restore(version, arrays)
      except BaseException as error:
        _logger.exception('The engine could not be made.')
        self._close(f'There is no engine: {first_line(error)}', _plain(error))
        return
      self._engine, self.failure = engine, None
      self._own, self._rescued = set(self._rescued), {}
      with self._lock:
        if self._stop_at is None:
          self._refusal = None
      self.ready.set()
      try:
        self._serve(engine)
        self._close('The service has ended.')
        return
      except _EngineLostError as lost:
        error = lost.__cause__
      except Exception as unexpected:
        error = unexpected
      self._lose(engine, error)
      if self._stop_at is not None:
        self._close('The service has ended.', self.failure)
        return
      # Nothing may hold the memory of its devices when the next one is made.
      self._engine = engine = error = None
      gc.collect()

  def _serve(self, engine: Engine) -> None:
    """Works until the worker is stopped.

    Raises:
      _EngineLostError: the engine cannot be used any more.
    """
    while True:
      self._counts['turns'] += 1
      self._hear(engine)
      moved = self._end_what_is_over(engine)
      if self._finished(engine):
        return
      self._fetch(engine)
      moved |= self._begin(engine)
      moved |= self._work(engine)
      busy = self._turn(engine)
      moved |= self._collect()
      self._trim(engine)
      if not (moved or busy):
        self._rest()

  def _turn(self, engine: Engine) -> bool:
    try:
      return engine.turn()
    except Exception as error:
      raise _EngineLostError from error

  def _hear(self, engine: Engine) -> None:
    """Take what other threads have left, and versions that were read."""
    self._wake.clear()
    while self._inbox:
      work = self._inbox.popleft()
      if isinstance(work, Job):
        self._waiting.append(work)
      else:
        work.do(engine)
    for job in [job for job in self._waiting if isinstance(job, LearnJob) and job.asked and job.asked.done()]:
      try:
        job.feedback, job.asked = dataclasses.replace(job.feedback, lessons=job.asked.result()), None
      except Exception as error:
        self._end(engine, job, _refused(error), 'failed')
    for version, future in [(version, future) for version, future in self._loading.items() if future.done()]:
      del self._loading[version]
      try:
        if version not in engine:
          engine.restore(version, future.result())
          self._kept[version] = None
      except Exception as error:
        if not isinstance(error, ServiceError):
          _logger.exception('%s could not be loaded.', version)
          error = ServiceError(f'The version {version} could not be read ({first_line(error)}): nothing has changed.')
        for job in [job for job in self._waiting if version in job.needs]:
          self._end(engine, job, error, 'failed')

  def _end_what_is_over(self, engine: Engine) -> bool:
    """End requests that nobody waits for, or whose time is over; return whether there were any."""
    now, moved = self._clock(), False
    for job in [*self._waiting, *self._drawing]:
      if isinstance(job, ForgetJob) or job.ended is not None:
        continue
      if job.cancelled:
        self._end(engine, job, Cancelled('The request was cancelled.'), 'cancelled')
      elif job.deadline is not None and now >= job.deadline:
        self._end(engine, job, Deadline('The time of the request was over before it was done.'), 'late')
      moved |= job.ended is not None
    return moved

  def _finished(self, engine: Engine) -> bool:
    """Return whether the worker is to end, with nothing left to do or no time for it."""
    if self._stop_at is None:
      return False
    if not (self._waiting or self._drawing or self._loading or self._inbox):
      return True
    if self._clock() < self._stop_at:
      return False
    for job in [*self._waiting, *self._drawing]:
      self._end(engine, job, NotReady('The service ends, and there was no time left for this.'), 'cancelled')
    self._turn(engine)
    self._collect()
    return True

  def _fetch(self, engine: Engine) -> None:
    """Has versions read that requests need, no more at a time than memory holds, in the order of the requests."""
    pinned: set[str] = set()
    most = self._most(engine)
    for job in self._waiting:
      if not job.needs or (pinned and len(pinned | job.needs) > most):
        continue
      pinned |= job.needs
      for version in job.needs:
        if version not in engine and version not in self._loading:
          self._counts['loads'] += 1
          self._loading[version] = future = self._readers.submit(self._load, version)
          future.add_done_callback(lambda _: self._wake.set())
    self._pinned = pinned

  def _begin(self, engine: Engine) -> bool:
    """Begins to sample what can be begun; returns whether anything was."""
    moved, passed = False, []
    for job in [job for job in self._runnable(engine) if isinstance(job, SampleJob)]:
      if any(earlier.passed >= engine.settings.rows for earlier in passed):
        break  # It has waited for its place long enough: nobody takes one before.
      try:
        drawing = engine.submit(job.version, job.prompt, **job.options)
      except NoPlaceError:
        if not self._drawing:
          self._end(engine, job, Busy('All places to sample from are in use: come again.', retry_after=1.0), 'failed')
        passed.append(job)
        continue
      except Exception as error:
        self._refuse(engine, job, error)
        moved = True
        continue
      self._waiting.remove(job)
      self._touch(job)
      job.drawing = drawing
      job.handle.begin(drawing)
      self._drawing.append(job)
      for earlier in passed:
        earlier.passed += 1
      moved = True
    return moved

  def _work(self, engine: Engine) -> bool:
    """Erases what can be erased and does one thing beside sampling: what came first; returns whether there was any."""
    jobs = self._runnable(engine)
    moved = False
    for job in jobs:
      if isinstance(job, ForgetJob):
        moved |= self._forget(engine, job)
    first = next((job for job in jobs if isinstance(job, (LearnJob, ScoreJob))), None)
    if isinstance(first, LearnJob):
      self._learn(engine, jobs)
    elif isinstance(first, ScoreJob):
      self._score(engine, jobs)
    return moved or first is not None

  def _learn(self, engine: Engine, jobs: Sequence[Job]) -> None:
    settings = engine.settings
    rows = _BATCHES * settings.training_rows
    together = learned_together(jobs, slots=settings.slots, teachers=settings.teachers, rows=rows)
    wanted = [job for job in together if self._claimed(job)]
    if not wanted:
      return
    try:
      found = engine.learn([job.feedback for job in wanted])
    except Exception as error:
      self._alone_or_refused(engine, wanted, error)
      return
    for job, learned in zip(wanted, found, strict=True):
      if learned.stepped:
        self._own.add(job.feedback.new)
      self._touch(job)
      self._waiting.remove(job)
      self._ended(job, 'learned')
      job.answer(learned)

  def _score(self, engine: Engine, jobs: Sequence[Job]) -> None:
    together = scored_together(jobs, rows=_BATCHES * engine.settings.training_rows)
    wanted = [(job, count) for job, count in together if self._claimed(job)]
    if not wanted:
      return
    parts = [slice(len(job.found), len(job.found) + count) for job, count in wanted]
    rows = [row for (job, _), part in zip(wanted, parts, strict=True) for row in job.rows[part]]
    ids = None
    if wanted[0][0].ids is not None:
      ids = [own for (job, _), part in zip(wanted, parts, strict=True) for own in job.ids[part]]
    topk = max(job.topk for job, _ in wanted)
    try:
      found = engine.score(wanted[0][0].version, rows, topk=topk, ids=ids)
    except Exception as error:
      self._alone_or_refused(engine, [job for job, _ in wanted], error)
      return
    for job, count in wanted:
      own, found = found[:count], found[count:]
      job.found += [_cut(scored, job.topk) for scored in own]
      self._touch(job)
      if not job.left:
        self._waiting.remove(job)
        self._ended(job, 'scored')
        job.future.set_result(job.found)

  def _forget(self, engine: Engine, job: ForgetJob) -> bool:
    """Erases a version if nothing uses it; returns whether it did."""
    if job.version in self._loading or any(job.version == other.version for other in self._drawing):
      return False
    try:
      engine.forget(job.version)
    except ValueError:  # What was cancelled goes on until the next chunk.
      return False
    except Exception as error:
      self._refuse(engine, job, error)
      return True
    self._own.discard(job.version)
    self._kept.pop(job.version, None)
    self._waiting.remove(job)
    job.future.set_result(None)
    return True

  def _claimed(self, job: LearnJob | ScoreJob) -> bool:
    """Return whether somebody still waits for a request that is to be done now; if not, it is gone."""
    if not job.claim():
      self._waiting.remove(job)
      self._ended(job, 'cancelled')
      return False
    return True

  def _alone_or_refused(self, engine: Engine, jobs: Sequence[LearnJob | ScoreJob], error: Exception) -> None:
    """Lets each of several requests come again by itself, for one of them was not possible; one alone is refused."""
    if len(jobs) == 1:
      self._refuse(engine, jobs[0], error)
      return
    if not isinstance(error, (UserError, NoPlaceError)):
      self._try(engine, error)
    for job in jobs:
      job.alone = True

  def _refuse(self, engine: Engine, job: Job, error: Exception) -> None:
    """End a request that could not be done.

    Raises:
      _EngineLostError: nothing else can be done either.
    """
    self._end(engine, job, _refused(error), 'failed')
    if not isinstance(error, (UserError, NoPlaceError)):
      self._try(engine, error)

  def _try(self, engine: Engine, error: Exception) -> None:
    """Raise _EngineLostError if the engine does not even score a token after an error that it should not have had."""
    _logger.error('The engine failed at a request.', exc_info=error)
    try:
      engine.score(BASE, [([0], [0])], topk=0)
    except Exception as again:
      raise _EngineLostError from again

  def _collect(self) -> bool:
    """Note which samples are done; return whether any are."""
    done = [job for job in self._drawing if job.drawing.done]
    for job in done:
      self._drawing.remove(job)
      self._ended(job, job.ended or 'sampled')
    return bool(done)

  def _trim(self, engine: Engine) -> None:
    """Drop versions that can be read again, those that were used longest ago first, until memory holds the others."""
    more = len(self._kept) + len(self._own) - self._most(engine)
    if more <= 0:
      return
    for version in [version for version in self._kept if version not in self._pinned][:more]:
      engine.drop(version)
      del self._kept[version]

  def _most(self, engine: Engine) -> int:
    """Return how many versions are to be in memory."""
    return max(2, int(_SHARE * engine.settings.memory_bytes / engine.version_bytes))

  def _rest(self) -> None:
    """Wait until there is something to do, or the time of something is over."""
    times = [job.deadline for job in self._waiting if job.deadline is not None]
    if self._stop_at is not None:
      times.append(self._stop_at)
    self._wake.wait(max(0.0, min(times) - self._clock()) if times else None)

  def _runnable(self, engine: Engine) -> list[Job]:
    return runnable(self._waiting, engine) if self._waiting else []

  def _touch(self, job: Job) -> None:
    """Note that the versions of a request were used now."""
    for version in job.needs & self._kept.keys():
      self._kept.move_to_end(version)

  # Ends.

  def _end(self, engine: Engine | None, job: Job, error: ServiceError, count: str) -> None:
    """End a request without an answer; samples that are being drawn end with the next chunk."""
    if job.ended is not None:
      return
    job.ended = count
    job.fail(error)
    if job in self._drawing:
      engine.cancel(job.drawing)
      return
    if job in self._waiting:
      self._waiting.remove(job)
    if not isinstance(job, ForgetJob):
      self._ended(job, count)

  def _ended(self, job: Job, count: str) -> None:
    """Count a request that is done."""
    now = self._clock()
    with self._lock:
      self._counts[count] += 1
      self._unfinished -= 1
      self._pace += 0.1 * (now - max(self._last_end, job.began) - self._pace)
      self._last_end = now

  def _lose(self, engine: Engine, error: BaseException) -> None:
    """Fails all requests, for the engine cannot be used any more, and keeps what nothing else has."""
    _logger.error('The engine failed, and is made anew.', exc_info=error)
    why = f'The engine failed ({first_line(error)}) and is started again: send the request again in a while.'
    with self._lock:
      self._refusal = self._refusal or why
      self._counts['restarts'] += 1
    self.failure = _plain(error)
    self.ready.clear()
    left = [*self._waiting, *self._drawing]
    forgets = [job for job in left if isinstance(job, ForgetJob)]
    for job in left:
      if job not in forgets:
        self._end(engine, job, NotReady(why), 'failed')
    engine.end(self.failure)
    self._collect()
    gone = {job.version for job in forgets}
    for version in self._own - gone:
      try:
        self._rescued[version] = engine.state(version)
      except UserError:
        _logger.exception('The version %s is lost.', version)
    self._own.clear()
    self._kept.clear()
    self._loading.clear()
    self._pinned.clear()

  def _close(self, why: str, failure: BaseException | None = None) -> None:
    """End for good."""
    with self._lock:
      self.failure, self._refusal, self._closed = failure, why, True
      left = [*self._waiting, *self._inbox]
      self._inbox.clear()
    self.ready.clear()
    self._engine = None
    for work in left:
      if isinstance(work, ForgetJob):  # Nothing has it any more.
        work.future.set_result(None)
      elif isinstance(work, Job):
        self._end(None, work, NotReady(why), 'failed')
      else:
        work.future.set_exception(NotReady(why))


class _Call:
  """Something that is done with the engine before the next chunk, whatever waits."""

  def __init__(self, function: Callable[[Engine], Any]):
    self.future: Future = Future()
    self._function = function

  def do(self, engine: Engine) -> None:
    try:
      self.future.set_result(self._function(engine))
    except Exception as error:
      self.future.set_exception(_refused(error))


def _refused(error: Exception) -> ServiceError:
  """Return what the sender of a request hears of an error of the engine."""
  if isinstance(error, ServiceError):
    return error
  if isinstance(error, UserError):
    return InvalidRequest(str(error))
  if isinstance(error, NoPlaceError):
    return Busy(f'{error} Come again.', retry_after=1.0)
  return ServiceError(f'The engine failed at this request ({first_line(error)}): nothing has changed.')


def _cut(scored: Scored, topk: int) -> Scored:
  """Return what is said with no more than so many of the most likely tokens."""
  if scored.top_ids.shape[1] == topk:
    return scored
  return dataclasses.replace(scored, top_ids=scored.top_ids[:, :topk], top_log_probs=scored.top_log_probs[:, :topk])


def _plain(error: BaseException) -> BaseException:
  """Return an error without the frames that it came from, which hold an engine and the memory of its devices."""
  seen: BaseException | None = error
  while seen is not None:
    seen.__traceback__, seen = None, seen.__context__ or seen.__cause__
  return error
