"""The thread that owns the engine: it takes requests from all threads, and interleaves learning with sampling.

Every request ends exactly once, with a result or an error. Between two chunks of decoded tokens the thread runs a few
micro-batches: a piece of learning, from the feedback on several versions, or a batch of scoring, of one version's rows.
Reader threads load the versions that the engine does not have.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Generator, Sequence
import concurrent.futures
import gc
import logging
import threading
import time
from typing import Any

import numpy as np

from sdpo_jax.errors import UserError, first_line
from sdpo_jax.learning.learner import Learned
from sdpo_jax.learning.scoring import Scored
from sdpo_jax.rollout.fair_queue import SERVICE, Payer, Shares
from sdpo_jax.serving.capacity import Capacity
from sdpo_jax.serving.engine import Engine, Feedback
from sdpo_jax.serving.errors import Busy, Cancelled, Deadline, InvalidRequest, NotReady, ServiceError, refusal
from sdpo_jax.serving.jobs import (
  ForgetJob,
  Job,
  LearnJob,
  SampleJob,
  ScoreJob,
  fair_order,
  learn_batch,
  runnable,
  score_batch,
  tokens_scored,
)
from sdpo_jax.serving.records import BASE, TEACHING_VERSION, Composition, optimizer_name, version_of
from sdpo_jax.serving.shelf import Arrays, NoPlaceError

Future = concurrent.futures.Future
_READERS = 2  # Threads that load versions.
_BATCHES = 4  # The most micro-batches between two chunks of tokens.
_PASSES = 3  # Through the model, which a micro-batch of learning takes at least: before, in and after a step.
_RECENT = 10.0  # Seconds after which a payer without new work is not reckoned with.
_FILLS = 8  # How often a version fills its share of the rows before it lets others have its place.
_SHARE = 0.75  # The share of the memory for versions that is used; the rest is headroom.
_LEAST_VERSIONS = 2  # That fit into memory in any case, with their optimizer states.
_COUNTS = 'sampled', 'scored', 'learned', 'failed', 'cancelled', 'late', 'refused', 'loads', 'restarts', 'turns'
_logger = logging.getLogger('sdpo_jax.serving')


class Worker:
  """The queue of the engine and the thread that works it off. Any thread may call."""

  def __init__(
    self,
    make_engine: Callable[[], Engine],
    load: Callable[[str], Arrays],
    *,
    max_waiting: int = 256,
    shared: bool = False,
    announce: Callable[[str], None] = print,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Make a worker; `start` starts its thread.

    Args:
      make_engine: makes the engine, in the thread of the worker; called again after the engine has failed.
      load: returns the arrays of a version or an optimizer state, by its name, that the engine does not have; called in
        reader threads. Its errors are raised in the requests that need the version.
      max_waiting: the most requests that may wait or be in progress; further ones are refused.
      shared: whether payers must leave room for others among these, see `Capacity`.
      announce: receives lines about the programs of the engine.
      clock: returns seconds; deadlines are times on it.
    """
    self.ready = threading.Event()  # Set while all programs are compiled and requests are accepted.
    self.failure: BaseException | None = None  # The error because of which there is no engine.
    self._make_engine, self._load, self._announce = make_engine, load, announce
    self._clock = clock
    self._thread = threading.Thread(target=self._run, name='engine', daemon=True)
    self._readers = concurrent.futures.ThreadPoolExecutor(_READERS, 'versions')
    self._lock, self._wake = threading.Lock(), threading.Event()
    self._inbox: collections.deque[Job] = collections.deque()  # New requests; guarded by the lock.
    # Of requests that wait or are in progress; likewise.
    self._places = Capacity(max_waiting, of='jobs in the engine', shared=shared)
    self._shares = Shares()  # Work done for each payer, of the engine: samples, scores and learning.
    self._seen: dict[Payer, float] = {}  # When payers last had new work.
    # Why new requests are refused; None: they are accepted.
    self._refusal: str | None = 'The engine has not been started yet.'
    self._closed = False
    self._stop_at: float | None = None
    self._counts = dict.fromkeys(_COUNTS, 0)
    # Used by the thread of the worker only; other threads may only read `_engine`.
    self._engine: Engine | None = None
    self._room = 0.0  # The bytes of versions and optimizer states that may be in memory.
    self._waiting: list[Job] = []
    self._drawing: list[SampleJob] = []
    self._learners: list[LearnJob] = []  # Those of the batch that learns.
    self._pieces: Generator[float, None, list[Learned]] | None = None  # What is left to do of it; dropped: nothing is.
    # By the names of versions and optimizer states:
    self._loading: dict[str, Future[Arrays]] = {}
    self._pinned: set[str] = set()  # Those that waiting requests need.
    # Those that can be loaded again, least recently used first.
    self._kept: collections.OrderedDict[str, None] = collections.OrderedDict()
    self._own: set[str] = set()  # Those that only the engine has.
    # Those that `load` can read from now on, with the names by which it does.
    self._stored: collections.deque[tuple[str, str]] = collections.deque()
    self._rescued: dict[str, Arrays] = {}  # The arrays of `_own` while a new engine is made.

  # Life.

  def start(self) -> None:
    """Start the thread, which makes the engine, compiles its programs and then sets `ready`."""
    with self._lock:
      self._refusal = 'The engine is compiling its programs: retry when it is ready.'
    self._thread.start()

  def wait(self, timeout: float | None = None) -> bool:
    """Wait until the engine is ready, for at most `timeout` seconds; return whether it is.

    Raises:
      BaseException: the error because of which there will be no engine.
    """
    end = None if timeout is None else time.monotonic() + timeout
    while not self.ready.wait(0.1 if end is None else min(0.1, max(0.0, end - time.monotonic()))):
      if self._closed:
        raise self.failure or NotReady(self._refusal)
      if end is not None and time.monotonic() >= end:
        return False
    return True

  @property
  def ended(self) -> bool:
    """Whether there is no engine and will be none, because of `failure`."""
    return self._closed and self.failure is not None

  def stop(self, drain: float) -> None:
    """Refuse new requests, give those in the queue `drain` seconds to finish, and end the thread.

    Until then, calls that belong to a request in progress (`arrays` and `forget`) are answered. A second call is
    allowed.
    """
    with self._lock:
      self._refusal = 'The service is shutting down: retry when it is back.'
      self._stop_at = self._clock() + drain
      started = self._thread.ident is not None
    self._wake.set()
    if started:
      self._thread.join()
    self._readers.shutdown(wait=False, cancel_futures=True)

  # Requests.

  def sample(
    self,
    version: str,
    prompt: Sequence[int],
    *,
    cartridge: Composition | None = None,
    deadline: float | None = None,
    payer: Payer = SERVICE,
    **options: Any,
  ) -> SampleJob:
    """Queue a prompt to be sampled from a version.

    Args:
      version: the name of the version in the engine; `BASE`: the model without an adapter.
      prompt: token ids.
      cartridge: cartridges that stand before the prompt; None: none do.
      deadline: a time on the worker's clock, at which unfinished samples are cancelled; None: no limit.
      payer: on whose account; payers take turns.
      **options: options of `Engine.submit`: the owner, stop strings and tokens, whether the job yields drafts, too, and
        `SamplingOptions`; the default of `step` is 0.

    Raises:
      Busy: too many requests wait.
      NotReady: there is no engine now.
    """
    needs = frozenset({version, *(cartridge.versions if cartridge is not None else ())} - {BASE})
    options = {'step': 0, **options}
    job = SampleJob(needs, deadline, payer, version=version, cartridge=cartridge, prompt=list(prompt), options=options)
    self._queue(job)
    return job

  def cancel(self, request: SampleJob | Future) -> None:
    """Cancel a request; samples in progress end with the next chunk, and finished requests are not affected."""
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
    payer: Payer = SERVICE,
  ) -> Future[list[Scored]]:
    """Queue rows to be scored, see `Engine.score`.

    Raises:
      InvalidRequest: there are no rows, or the ids are not [T, M] int32 for every row with the same M.
      Busy: too many requests wait.
      NotReady: there is no engine now.
    """
    if not rows:
      raise InvalidRequest('There is nothing to score: send at least one row.', field='rows')
    if ids is not None:
      ids = [np.asarray(own, np.int32) for own in ids]
      shapes = {own.ndim == 2 and own.shape[1] for own in ids}
      lengths = [len(tokens) for _, tokens in rows]
      if len(shapes) != 1 or False in shapes or [len(own) for own in ids] != lengths:
        raise InvalidRequest('ids must have the same number of ids for every token of every row.', field='ids')
    job = ScoreJob(frozenset({version} - {BASE}), deadline, payer, version=version, rows=rows, topk=topk, ids=ids)
    self._queue(job)
    return job.future

  def learn(self, feedback: Feedback, *, deadline: float | None = None, payer: Payer = SERVICE) -> Future[Learned]:
    """Queue a feedback to learn from; once the future is done, the engine has the new version.

    If a gradient was not finite, there is no new version. Otherwise only the engine has it: call `stored` after it was
    stored, or `forget` to discard it. Its name must be one that `load` never reads, since until then others may store
    another version by the final name.

    Raises:
      Busy: too many requests wait.
      NotReady: there is no engine now.
    """
    needs = {feedback.version, optimizer_name(feedback.version)}
    if feedback.teacher.startswith(TEACHING_VERSION):
      needs.add(feedback.teacher.removeprefix(TEACHING_VERSION))
    job = LearnJob(frozenset(needs - {BASE}), deadline, payer, feedback=feedback)
    self._queue(job)
    return job.future

  # Versions.

  def arrays(self, version: str) -> Arrays:
    """Return the arrays of a version or an optimizer state by name, read-only.

    Raises:
      ServiceError: neither the engine nor `load` has the version.
    """
    engine, rescued = self._engine, self._rescued
    if version in rescued:
      return rescued[version]
    if engine is not None and version in engine:
      try:
        return engine.arrays(version)
      except UserError:  # It was dropped meanwhile, so `load` can read it.
        pass
    return self._load(version)

  def stored(self, version: str, name: str) -> None:
    """Note that `load` can read a version that was learned, by the name that it has from now on."""
    self._stored.append((version, name))
    self._wake.set()

  def forget(self, *versions: str) -> None:
    """Erase versions with their states from the engine, each as soon as nothing uses it; missing ones are ignored.

    Raises:
      NotReady: the worker has ended.
    """
    jobs = [ForgetJob(version=version) for version in versions]
    with self._lock:
      if self._closed or self._thread.ident is None:
        raise NotReady(self._refusal)
      self._inbox += jobs
    self._wake.set()
    for job in jobs:
      job.future.result()

  def known(self, prefix: str) -> list[str]:
    """Return the names of the versions in the engine that begin with a prefix."""
    engine = self._engine
    names = [] if engine is None else engine.names
    return sorted({version_of(name) for name in names if name.startswith(prefix)})

  @property
  def stats(self) -> dict[str, float]:
    """Metrics of the worker by name: queue lengths and counts."""
    engine = self._engine
    with self._lock:
      found: dict[str, float] = dict(self._counts)
      found['unfinished'] = self._places.taken
    found['sampling'] = len(self._drawing)
    found['loading'] = len(self._loading)
    found['versions'] = len(self._kept) + len(self._own)
    return found | (engine.counts if engine is not None else dict.fromkeys(('tokens', 'prefilled', 'reused'), 0))

  # Work queued by other threads.

  def _queue(self, job: Job) -> None:
    """Queue a request; raises NotReady or Busy if it cannot be accepted."""
    with self._lock:
      if self._refusal is not None:
        raise NotReady(self._refusal)
      if not self._places.take(job.payer.id):
        self._counts['refused'] += 1
        raise self._places.full(job.payer.id)
      job.began = self._clock()
      self._inbox.append(job)
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
        _logger.exception('The engine could not be started.')
        self._close(f'There is no engine: {first_line(error)}', _plain(error))
        return
      self._engine, self._shares, self.failure = engine, engine.shares, None
      least = sum(engine.bytes_of(name) for name in ('', optimizer_name('')))
      self._room = max(_LEAST_VERSIONS * least, _SHARE * engine.settings.memory_bytes)
      self._own, self._rescued = set(self._rescued), {}
      with self._lock:
        if self._stop_at is None:
          self._refusal = None
      self.ready.set()
      try:
        self._serve(engine)
        self._close('The service has ended.')
        return
      except Exception as unexpected:
        error = unexpected
      self._lose(engine, error)
      if self._stop_at is not None:
        self._close('The service has ended.', self.failure)
        return
      # Free the device memory of the lost engine before the next one is made.
      self._engine = engine = error = None
      gc.collect()

  def _serve(self, engine: Engine) -> None:
    """Serve requests until the worker is stopped.

    Raises:
      Exception: the engine is no longer usable.
    """
    while True:
      self._counts['turns'] += 1
      self._hear(engine)
      moved = self._end_what_is_over(engine)
      if self._stop_at is not None and self._finished(engine):
        return
      self._fetch(engine)
      moved |= self._begin(engine)
      if self._drawing:
        moved |= engine.turn()
        self._hear(engine)  # What came meanwhile need not wait for another turn.
        moved |= self._end_what_is_over(engine)
      moved |= self._work(engine)
      moved |= self._collect()
      self._trim(engine)
      if not moved:  # Wait for new work or for the next deadline.
        times = [job.deadline for job in self._waiting if job.deadline is not None]
        if self._stop_at is not None:
          times.append(self._stop_at)
        self._wake.wait(max(0.0, min(times) - self._clock()) if times else None)

  def _hear(self, engine: Engine) -> None:
    """Take new requests from the inbox, and versions that reader threads have loaded."""
    self._wake.clear()
    while self._stored:
      version, name = self._stored.popleft()
      if version in self._own:
        self._own -= {version, optimizer_name(version)}
        engine.rename(version, name)
        self._kept |= dict.fromkeys(each for each in (name, optimizer_name(name)) if each in engine)
    while self._inbox:
      job = self._inbox.popleft()
      if not isinstance(job, ForgetJob):
        self._shares.enter(job.payer)
      self._seen[job.payer] = job.began
      self._waiting.append(job)
    for version, future in [(version, future) for version, future in self._loading.items() if future.done()]:
      del self._loading[version]
      try:
        if version not in engine:
          engine.restore(version, future.result())
          self._kept[version] = None
      except Exception as error:
        if isinstance(error, UserError):  # Such as a cartridge, in a service that serves none any more.
          error = refusal(error)
        elif not isinstance(error, ServiceError):
          _logger.exception('The version %s could not be loaded.', version)
          error = ServiceError(f'The version {version} could not be loaded ({first_line(error)}): nothing has changed.')
        for job in [job for job in self._waiting if version in job.needs]:
          self._end(engine, job, error, 'failed')

  def _end_what_is_over(self, engine: Engine) -> bool:
    """End requests that were cancelled or are past their deadline; return whether there were any."""
    now, moved = self._clock(), False
    for job in [*self._waiting, *self._drawing]:
      if isinstance(job, ForgetJob) or job.ended is not None:
        continue
      if job.cancelled:
        self._end(engine, job, Cancelled('The request was cancelled.'), 'cancelled')
      elif job.deadline is not None and now >= job.deadline:
        self._end(engine, job, Deadline('The time limit of the request was reached.'), 'late')
      moved |= job.ended is not None
    return moved

  def _finished(self, engine: Engine) -> bool:
    """Return whether the thread of a stopped worker should end, since no work or no time is left."""
    if not (self._waiting or self._drawing or self._loading or self._inbox):
      return True
    if self._clock() < self._stop_at:
      return False
    for job in [*self._waiting, *self._drawing]:
      self._end(engine, job, NotReady('The service is shutting down: retry when it is back.'), 'cancelled')
    engine.turn()
    self._collect()
    return True

  def _fetch(self, engine: Engine) -> None:
    """Start loading the versions that waiting requests need, in turns, but no more than memory has room for."""
    pinned = {version for job in self._learners for version in job.needs}
    for job in fair_order(self._waiting, self._shares, self._drawing):
      new = job.needs - pinned  # Many jobs need the same versions.
      if not new or (pinned and sum(map(engine.bytes_of, pinned | new)) > self._room):
        continue
      pinned |= new
      for version in new:
        if version not in engine and version not in self._loading:
          self._counts['loads'] += 1
          self._loading[version] = future = self._readers.submit(self._load, version)
          future.add_done_callback(lambda _: self._wake.set())
    self._pinned = pinned

  def _begin(self, engine: Engine) -> bool:
    """Start sampling for every waiting request that can start; return whether any did."""
    # While others wait for a place, a version that has one begins this many samples: a place costs more to fill than
    # to use, and rows stay empty where no waiting request has a place.
    rows = engine.settings.rows
    share = max(1, _FILLS * rows // engine.settings.snapshots)
    moved, waits, ahead = False, False, collections.Counter()
    for job in self._drawing:
      ahead[job.payer] += job.drawing.left
    for job in fair_order(runnable(self._waiting, engine), self._shares, self._drawing):
      # Samples that would wait long for rows must not hold places for versions meanwhile, which others may need.
      if not isinstance(job, SampleJob) or ahead[job.payer] >= 2 * rows:
        continue
      served = engine.served(job.version, job.cartridge)
      # A version is loaded when rows would soon be empty, since loading several at once costs little more than one.
      busy = ahead[job.payer] >= 5 * rows // 4
      if served is None or (waits and served >= share) or (busy and job.needs and not served):
        waits = True
        continue
      try:
        drawing = engine.submit(job.version, job.prompt, cartridge=job.cartridge, payer=job.payer, **job.options)
      except Exception as error:
        self._refuse(engine, job, error)
      else:
        self._waiting.remove(job)
        self._touch(job)
        job.begin(drawing)
        self._drawing.append(job)
        ahead[job.payer] += drawing.left
      moved = True
    return moved

  def _work(self, engine: Engine) -> bool:
    """Erase versions, then run one batch of learning or scoring; return whether anything was done."""
    jobs = fair_order(runnable(self._waiting, engine), self._shares, self._drawing)
    moved = any([self._forget(engine, job) for job in jobs if isinstance(job, ForgetJob)])
    if all(job.ended for job in self._learners):
      self._learners, self._pieces = [], None
    # Who wants to learn waits for the end of the batch that does.
    kinds = ScoreJob if self._learners else (LearnJob, ScoreJob)
    first = next((job for job in jobs if isinstance(job, kinds) or job in self._learners), None)
    if first is not None or self._several():
      engine.tell()  # Completions need not wait for the batch, nor those of one payer for the next turn of all.
    if isinstance(first, LearnJob):
      self._learn(engine, jobs)
    elif isinstance(first, ScoreJob):
      self._score(engine, jobs)
    return moved or first is not None

  def _several(self) -> bool:
    """Return whether several payers have had work of late."""
    since = self._clock() - _RECENT
    self._seen = {payer: at for payer, at in self._seen.items() if at > since}
    return len(self._seen) > 1

  def _most_rows(self, engine: Engine) -> int:
    """Return the most rows of a batch: those of one micro-batch while several payers wait for its end."""
    return engine.settings.training_rows * (1 if self._several() else _BATCHES)

  def _samples_first(self, batch: Sequence[LearnJob]) -> bool:
    """Return whether a payer for whom less was done than for those of a batch waits for samples."""
    least = min(self._shares.of(job.payer) for job in batch)
    jobs = [*self._drawing, *(job for job in self._waiting if isinstance(job, SampleJob))]
    return any(self._shares.of(job.payer) < least for job in jobs)

  def _learn(self, engine: Engine, jobs: Sequence[Job]) -> None:
    """Go on with the batch that learns, or begin one."""
    settings, batch = engine.settings, self._learners
    if not batch:
      batch = learn_batch(jobs, slots=settings.slots, teachers=settings.teachers, rows=self._most_rows(engine))
      self._pinned |= {version for job in batch for version in job.needs}
    try:
      if not self._learners:  # A version may be cancelled until it is stored.
        of, kept = [job.feedback for job in batch], lambda index, _: self._claimed(batch[index])
        self._learners, self._pieces = batch, engine.learn_in_pieces(of, kept)
      for _ in range(_PASSES * (1 if self._several() else _BATCHES)):
        share = next(self._pieces)
        for job in batch:
          self._shares.charge(job.payer, share * job.work)
        if self._samples_first(batch):
          break
      return
    except StopIteration as done:
      found = done.value
    except Exception as error:
      self._learners, self._pieces = [], None
      self._alone_or_refused(engine, batch, error)
      return
    self._learners, self._pieces = [], None
    for job, learned in zip(batch, found, strict=True):
      if not self._claimed(job):
        continue
      if learned.stepped:
        self._own |= {job.feedback.new, optimizer_name(job.feedback.new)}
      self._touch(job)
      self._waiting.remove(job)
      self._ended(job, 'learned')
      job.future.set_result(learned)

  def _score(self, engine: Engine, jobs: Sequence[Job]) -> None:
    batch = score_batch(jobs, rows=self._most_rows(engine))
    wanted = [(job, count) for job, count in batch if self._claimed(job)]
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
      if isinstance(error, NoPlaceError) and self._learners:  # Teachers of the batch have all places.
        self._learn(engine, jobs)
        return
      self._alone_or_refused(engine, [job for job, _ in wanted], error)
      return
    for job, count in wanted:
      own, found = found[:count], found[count:]
      self._shares.charge(job.payer, tokens_scored(job.rows[len(job.found) : len(job.found) + count]))
      job.found += [scored.with_top(job.topk) for scored in own]
      self._touch(job)
      if not job.left:
        self._waiting.remove(job)
        self._ended(job, 'scored')
        job.future.set_result(job.found)

  def _forget(self, engine: Engine, job: ForgetJob) -> bool:
    """Erase a version if nothing uses it; return whether the job is done."""
    names = {job.version, optimizer_name(job.version)}
    if names & self._loading.keys() or any(job.version in other.needs for other in self._drawing):
      return False
    try:
      engine.forget(job.version)
    except ValueError:  # Cancelled samples run until the next chunk.
      return False
    except Exception as error:
      self._refuse(engine, job, error)
      return True
    self._own -= names
    for name in names:
      self._kept.pop(name, None)
    self._waiting.remove(job)
    job.future.set_result(None)
    return True

  def _claimed(self, job: LearnJob | ScoreJob) -> bool:
    """Return whether a job has not ended, and can no longer be cancelled; one that was cancelled is removed."""
    if job.ended is not None:
      return False
    job.claimed = job.claimed or job.future.set_running_or_notify_cancel()
    if not job.claimed:
      job.ended = 'cancelled'
      self._waiting.remove(job)
      self._ended(job, job.ended)
    return job.claimed

  def _alone_or_refused(self, engine: Engine, jobs: Sequence[LearnJob | ScoreJob], error: Exception) -> None:
    """After a batch has failed, let each of its jobs run alone; fail a job that was alone."""
    if len(jobs) == 1:
      self._refuse(engine, jobs[0], error)
      return
    if not isinstance(error, (UserError, NoPlaceError)):
      self._try(engine, error)
    for job in jobs:
      job.alone = True

  def _refuse(self, engine: Engine, job: Job, error: Exception) -> None:
    """End a request with the error of the engine.

    Raises:
      Exception: the engine is no longer usable.
    """
    self._end(engine, job, _refused(error), 'failed')
    if not isinstance(error, (UserError, NoPlaceError)):
      self._try(engine, error)

  def _try(self, engine: Engine, error: Exception) -> None:
    """After an unexpected error, score one token, which raises another one if the engine cannot even do that."""
    _logger.error('A request has failed in the engine.', exc_info=error)
    engine.score(BASE, [([0], [0])], topk=0)

  def _collect(self) -> bool:
    """Remove finished sampling jobs; return whether there were any."""
    done = [job for job in self._drawing if job.drawing.done]
    for job in done:
      self._drawing.remove(job)
      self._ended(job, job.ended or 'sampled')
    return bool(done)

  def _trim(self, engine: Engine) -> None:
    """Drop what can be loaded again, the least recently used first, until the rest has room in memory."""
    while engine.held_bytes > self._room:
      name = next((name for name in self._kept if name not in self._pinned), None)
      if name is None:
        return
      engine.drop(name)
      del self._kept[name]

  def _touch(self, job: Job) -> None:
    """Mark the versions of a request as just used."""
    for version in job.needs & self._kept.keys():
      self._kept.move_to_end(version)

  # Ends.

  def _end(self, engine: Engine | None, job: Job, error: ServiceError, count: str) -> None:
    """End a request with an error; samples in progress end with the next chunk."""
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
    """Count a request that has ended, and free its place."""
    self._shares.leave(job.payer)
    with self._lock:
      self._counts[count] += 1
      self._places.let_go(job.payer.id)

  def _lose(self, engine: Engine, error: BaseException) -> None:
    """Fail all requests after the engine was lost, and save the versions that only it had."""
    _logger.error('The engine has failed, and is restarted.', exc_info=error)
    why = f'The engine has failed ({first_line(error)}) and is being restarted: retry when it is ready.'
    with self._lock:
      self._refusal = self._refusal or why
      self._counts['restarts'] += 1
    self.failure = _plain(error)
    self.ready.clear()
    self._learners, self._pieces = [], None
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
        self._rescued[version] = engine.arrays(version)
      except UserError:
        _logger.exception('The version %s is lost.', version)
    self._own.clear()
    self._kept.clear()
    self._loading.clear()
    self._pinned.clear()

  def _close(self, why: str, failure: BaseException | None = None) -> None:
    """End the worker for good, and fail all requests that still wait."""
    with self._lock:
      self.failure, self._refusal, self._closed = failure, why, True
      left = [*self._waiting, *self._inbox]
      self._inbox.clear()
    self.ready.clear()
    self._learners, self._pieces, self._engine = [], None, None
    for job in left:
      if isinstance(job, ForgetJob):  # The version is gone with the engine.
        job.future.set_result(None)
      else:
        self._end(None, job, NotReady(why), 'failed')


def _refused(error: Exception) -> ServiceError:
  """Return the error for the client that corresponds to an error of the engine."""
  if isinstance(error, ServiceError):
    return error
  if isinstance(error, UserError):
    return refusal(error)
  if isinstance(error, NoPlaceError):
    return Busy(f'{error} Retry in a second.', retry_after=1.0)
  return ServiceError(f'The request has failed in the engine ({first_line(error)}): nothing has changed.')


def _plain(error: BaseException) -> BaseException:
  """Return an error without its tracebacks, whose frames would keep the engine and its device memory alive."""
  seen: BaseException | None = error
  while seen is not None:
    seen.__traceback__, seen = None, seen.__context__ or seen.__cause__
  return error
