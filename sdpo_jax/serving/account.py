"""All that an owner can do. Adapters and samples are looked up with the owner, so that what is another's is not
there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import secrets
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from models.adapters import peft_files
from models.token_texts import TokenTexts
from sdpo_jax.errors import UserError, short_repr
from sdpo_jax.rollout.results import Completion
from sdpo_jax.serving import adapter_settings, differences, feedback, names, prompts
from sdpo_jax.serving.call import Call
from sdpo_jax.serving.draft_texts import DraftText, finished_text
from sdpo_jax.serving.errors import Deadline, Forbidden, InvalidRequest, ServiceError, VersionConflict
from sdpo_jax.serving.event_log import Event
from sdpo_jax.serving.feedback_request import FeedbackRequest
from sdpo_jax.serving.records import Adapter, Sample, Version
from sdpo_jax.serving.sampling import SampleOptions, Sampling
from sdpo_jax.serving.scoring import Scored
from sdpo_jax.serving.sessions.sessions import Sessions
from sdpo_jax.serving.store.store import Request, StoredResponse
from sdpo_jax.serving.targets import Target

if TYPE_CHECKING:
  from sdpo_jax.serving.service import Service

Progress = Callable[..., None]  # (stage, **details).
_LARGEST = 10  # Matrices that a diff names as those that changed most.


class Account:
  """What one owner can do, in one request. Any thread may call.

  Every method that takes the id of an adapter raises NotFound alike if there is none, if it was deleted, and if it is
  somebody else's. Methods that change an adapter take the version that it is expected to be at (None: any), raise
  VersionConflict if it is not, and wait for other changes of the same adapter.
  """

  def __init__(self, service: Service, owner: str, call: Call):
    """Make what `Service.account` returns.

    Args:
      service: what all owners share.
      owner: whose adapters there are.
      call: the request.
    """
    self.service, self.owner, self.call = service, owner, call

  # What is served.

  @property
  def texts(self) -> TokenTexts:
    """What the model's tokens stand for."""
    return self.service.texts

  @property
  def most_tokens(self) -> int:
    """Tokens of a completion at most."""
    return self.service.max_completion

  @property
  def most_scored(self) -> int:
    """Tokens of a text, prompt and completion together, that is scored at most."""
    return self.service.max_text

  @property
  def most_logprobs(self) -> int:
    """Tokens at a position whose log-probs the routes of other APIs give at most."""
    return min(self.service.settings.limits.max_logprobs, self.service.sizes.topk)

  def capabilities(self) -> dict[str, Any]:
    """Return what the service serves; see `Service.capabilities`."""
    return self.service.capabilities()

  # Adapters.

  def create(
    self,
    name: str,
    settings: Mapping[str, Any] | None = None,
    *,
    seed: int | None = None,
    base_model: str | None = None,
    rank: int | None = None,
    alpha: float | None = None,
    request: Request | None = None,
  ) -> tuple[Adapter, Version]:
    """Make an adapter that changes nothing yet.

    Args:
      name: that no other adapter of the owner has.
      settings: see `adapter_settings.checked`.
      seed: of its factors; None: another one every time.
      base_model: what the sender believes to be served; None: whatever is.
      rank: likewise.
      alpha: likewise.
      request: of an idempotency key.

    Raises:
      InvalidRequest: no such name or settings, or something else is served.
      Forbidden: the owner has as many adapters as one may have.
    """
    self._check_served(base_model, rank, alpha)
    factors = self.service.worker.fresh(secrets.randbits(32) if seed is None else seed % 2**32)
    return self._create(name, settings, factors, 'create', {}, request)

  def _create(
    self,
    name: str,
    settings: Mapping[str, Any] | None,
    arrays: Mapping[str, np.ndarray],
    reason: str,
    details: Mapping[str, Any],
    request: Request | None,
  ) -> tuple[Adapter, Version]:
    store, limit = self.service.store, self.service.settings.limits.max_adapters_per_owner
    checked = adapter_settings.checked(settings or {}, self.service.settings, self.prompt_of)
    names.check_name(name, self.service.model_name)
    with self.service.turns.of(('owner', self.owner), self.call.deadline):
      self.call.check()
      if len(store.adapters(self.owner)) >= limit:
        raise Forbidden(f'There are {limit} adapters, as many as one owner may have: delete one that is not needed.')
      made, version = store.create(self.owner, name, checked, arrays, reason=reason, details=details, request=request)
    self.service.remember(made.id, self.owner)
    self._tell(made.id, 'committed', version=version.number, reason=reason)
    return made, version

  def adapters(self) -> list[Adapter]:
    """Return the owner's adapters."""
    return self.service.store.adapters(self.owner)

  def adapter(self, id: str) -> Adapter:
    """Return an adapter."""
    found = self.service.store.adapter(self.owner, id)
    self.service.remember(found.id, self.owner)
    return found

  def change(
    self, id: str, expected: int | None, settings: Mapping[str, Any], *, request: Request | None = None
  ) -> Adapter:
    """Give some of an adapter's settings other values; the version stays what it is."""
    with self._turn(id, expected) as adapter:
      changed = adapter_settings.checked({**adapter.settings, **settings}, self.service.settings, self.prompt_of)
      return self.service.store.change_settings(self.owner, id, adapter.head, changed, request=request)

  def fork(self, id: str, number: int | None, name: str, *, request: Request | None = None) -> tuple[Adapter, Version]:
    """Make an adapter of a version of another one (None: its newest), with its settings, moments and average."""
    adapter, version = self.adapter(id), self.version(id, number)
    arrays = self.service.store.arrays(version)
    details = {'from': names.lora_uri(adapter.id, version.number)}
    return self._create(name, adapter.settings, arrays, 'fork', details, request)

  def delete(self, id: str, expected: int | None) -> None:
    """Delete an adapter: its name, its versions, and all samples and feedback of it."""
    with self._turn(id, expected) as adapter:
      known = self.service.store.versions(self.owner, id)
      self.service.store.delete(self.owner, id, adapter.head if expected is not None else None)
      self.service.worker.forget(*(version.engine_name for version in known))
    self.service.events.forget(id)

  # Versions.

  def versions(self, id: str) -> list[Version]:
    """Return the versions of an adapter, the oldest first."""
    self.adapter(id)
    return self.service.store.versions(self.owner, id)

  def version(self, id: str, number: int | None = None) -> Version:
    """Return a version of an adapter; None: its newest."""
    adapter = self.adapter(id)
    return self.service.store.version(self.owner, id, adapter.head if number is None else number)

  def diff(self, id: str, a: int, b: int) -> dict[str, Any]:
    """Return how far a version is from another one, as JSON.

    Returns:
      `total`, `largest` (the matrices that changed most) and `matrices`: Frobenius norms of what the factors add to
      each matrix `before` and `after`, of the `change`, and this `relative` to before. `versions`: what is known of
      each version after the older of the two up to the newer one.
    """
    before, after = self.version(id, a), self.version(id, b)
    served, store = self.service.served, self.service.store
    found = differences.changes(served.adapter, served.table, *map(_factors, map(store.arrays, (before, after))))
    largest = sorted(found, key=lambda each: -each.change)[:_LARGEST]
    first, last = sorted((a, b))
    between = [version for version in self.versions(id) if first < version.number <= last]
    return {
      'from': a,
      'to': b,
      'total': _shown(differences.total(found)),
      'largest': [_shown(each) for each in largest],
      'matrices': [_shown(each) for each in found],
      'versions': [
        {'number': version.number, 'reason': version.reason, 'created': version.created, 'details': version.details}
        for version in between
      ],
    }

  def undo(self, id: str, expected: int | None, to: int, *, request: Request | None = None) -> Version:
    """Make a new version that is all that an older one was, its moments and its average included."""
    with self._turn(id, expected) as adapter:
      source = self.service.store.version(self.owner, id, to)
      arrays = self.service.store.arrays(source)
      version = self.service.store.commit(
        self.owner, id, adapter.head, arrays, reason='undo', details={'to': to}, parent=to, request=request
      )
    self._tell(id, 'committed', version=version.number, reason='undo')
    return version

  # PEFT files.

  def import_peft(
    self,
    name: str,
    files: Mapping[str, bytes],
    settings: Mapping[str, Any] | None = None,
    *,
    request: Request | None = None,
  ) -> tuple[Adapter, Version]:
    """Make an adapter of files that PEFT has written; its optimizer begins anew.

    Args:
      name: as in `create`.
      files: see `peft_transfer.Served.factors`.
      settings: as in `create`.
      request: of an idempotency key.

    Raises:
      InvalidRequest: as `create`, or the files hold no adapter as it is served here.
      TooLarge: they are larger than such an adapter can be.
      Forbidden: as `create`.
    """
    names.check_name(name, self.service.model_name)
    factors = self.service.served.factors(files)
    fresh = self.service.worker.fresh(0)  # Moments and count of a version that has learned nothing.
    own = {f'{kind}/{row}': value for kind in ('factors', 'average') for row, value in factors.items()}
    digest = hashlib.sha256(files[peft_files.WEIGHTS]).hexdigest()
    return self._create(name, settings, {**fresh, **own}, 'import', {'sha256': digest}, request)

  def export_peft(self, id: str, number: int | None = None) -> dict[str, bytes]:
    """Return the files of a version (None: the newest) that PEFT loads, by name."""
    return self.service.store.peft_files(self.version(id, number))

  # What is asked of versions.

  def resolve(self, model: str) -> Target:
    """Return what a request means by a model.

    Args:
      model: 'base' or the name of the model; the id or the name of an adapter, with @ and the number of a version or
        without; or the address of a version. Nothing is ever opened or fetched for it.

    Raises:
      NotFound: there is no such model, adapter or version.
    """
    if model in (names.BASE_NAME, self.service.model_name):
      return Target(None, None)
    reference = names.parse(model)
    for find in (self.service.store.adapter, self.service.store.by_name)[: 1 if reference.is_id else 2]:
      with contextlib.suppress(names.NotFound):
        adapter = find(self.owner, reference.adapter)
        number = adapter.head if reference.number is None else reference.number
        self.service.store.version(self.owner, adapter.id, number)
        self.service.remember(adapter.id, self.owner)
        return Target(adapter, number)
    raise names.unknown(model)

  def prompt_of(
    self,
    *,
    messages: Sequence[Mapping[str, Any]] | None = None,
    text: str | None = None,
    tokens: Sequence[int] | None = None,
    limit: int | None = None,
    add_special_tokens: bool = True,
  ) -> list[int]:
    """Return the token ids of a prompt, which is given in one of three forms; see `prompts.tokens_of`.

    Args:
      messages: a conversation, for the chat template of the model.
      text: as it is.
      tokens: likewise.
      limit: tokens at most; None: those that a prompt has at most.
      add_special_tokens: whether a text gets what the tokenizer puts before and behind one.

    Raises:
      InvalidRequest: none or several are given, it is no such prompt, or is too long.
    """
    service = self.service
    with service.tokenizing:
      return prompts.tokens_of(
        service.tokenizer,
        service.chat,
        service.vocab_size,
        service.max_prompt if limit is None else limit,
        messages=messages,
        text=text,
        tokens=tokens,
        add_special_tokens=add_special_tokens,
      )

  def sample(
    self,
    target: Target,
    prompt_tokens: Sequence[int],
    *,
    n: int = 1,
    options: SampleOptions | None = None,
    drafts: bool = False,
    messages: Sequence[Mapping[str, Any]] | None = None,
  ) -> Sampling:
    """Draws completions of a prompt, which are kept with all that feedback on them needs.

    Args:
      target: of `resolve`.
      prompt_tokens: of `prompt_of`.
      n: completions.
      options: how they are drawn; None: as the model says.
      drafts: yield drafts, too.
      messages: the conversation that the prompt was made of; None: it was none.

    Raises:
      InvalidRequest: an option that cannot be.
      Busy: too many wait, or the owner's allowance is used up.
      UserError: as the engine.
    """
    service, most = self.service, self.service.settings.limits.max_samples
    if not 1 <= n <= most:
      raise InvalidRequest(f'n must be between 1 and {most}, not {short_repr(n)}.', field='n')
    options = (options or SampleOptions()).checked(max_completion=service.max_completion, vocab_size=service.vocab_size)
    with self._spending('sampled', n * options.max_tokens):
      handle = service.worker.sample(
        target.engine_name,
        prompt_tokens,
        deadline=self.call.deadline,
        owner=self.owner,
        drafts=drafts,
        stop=tuple(options.stop),
        stop_token_ids=tuple(options.stop_token_ids),
        n=n,
        seed=options.seed,
        step=0,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
      )
    kept = [dict(message) for message in messages] if messages is not None else None

    def keep(done: Completion) -> Sample:
      self.call.spend('sampled', len(done.tokens) - options.max_tokens)
      return self._keep(target, prompt_tokens, options, kept, done)

    return Sampling(
      handle,
      functools.partial(service.worker.cancel, handle),
      keep,
      lambda: DraftText(service.tokenizer, options.stop),
      self.call,
    )

  def _keep(
    self,
    target: Target,
    prompt_tokens: Sequence[int],
    options: SampleOptions,
    messages: list[dict[str, Any]] | None,
    done: Completion,
  ) -> Sample:
    now, tokens = self.service.clock(), done.tokens.tolist()
    sample = Sample(
      id=f'smp-{secrets.token_hex(12)}',
      owner=self.owner,
      adapter=None if target.adapter is None else target.adapter.id,
      version=target.number,
      prompt_tokens=list(prompt_tokens),
      tokens=tokens,
      log_probs=done.model_log_probs,
      temperature=options.temperature,
      messages=messages,
      text=finished_text(self.service.tokenizer, tokens, options.stop),
      finish_reason='stop' if done.stopped else 'length',
      created=now,
      expires=now + self.service.settings.store.sample_ttl_s,
    )
    self.service.store.keep_sample(sample)
    return sample

  def sample_of(self, id: str) -> Sample:
    """Return a completion that was drawn for the owner.

    Raises:
      NotFound: there is none.
      Gone: it was not kept any longer.
    """
    return self.service.store.sample(self.owner, id)

  def score(
    self,
    target: Target,
    rows: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    topk: int = 1,
    ids: Sequence[np.ndarray] | None = None,
  ) -> list[Scored]:
    """Return what a version says of tokens.

    Args:
      target: of `resolve`.
      rows: prompt and tokens after it, of each row; at least one token each.
      topk: how many of the most likely tokens are wanted at every position; 0: none.
      ids: [T, M] int32 of each row, whose log-probs are wanted, too.

    Raises:
      InvalidRequest: rows that are none.
      Busy: as `sample`.
      UserError: a row or topk is too large.
    """
    for number, (prompt, tokens) in enumerate(rows):
      prompts.check_tokens(prompt, self.service.vocab_size, f'rows[{number}].prompt')
      prompts.check_tokens(tokens, self.service.vocab_size, f'rows[{number}].tokens')
    for number, (asked, (_, tokens)) in enumerate(zip(ids or (), rows, strict=bool(ids))):
      if asked.shape[:1] != (len(tokens),) or asked.ndim != 2:
        raise InvalidRequest(
          f'rows[{number}].ids must be a list of token ids for each token.', field=f'rows[{number}].ids'
        )
    if not rows:
      return []
    with self._spending('scored', sum(len(prompt) + len(tokens) for prompt, tokens in rows)):
      future = self.service.worker.score(target.engine_name, rows, topk=topk, ids=ids, deadline=self.call.deadline)
    return self.wait(future)

  def wait(self, future: concurrent.futures.Future) -> Any:
    """Return what comes of something that the worker does for the request.

    Raises:
      Deadline: the request has no time left.
      Cancelled: nobody waits for it any more.
    """
    left = None if self.call.deadline is None else max(0.0, self.call.deadline - time.monotonic())
    with self.call.on_end(future.cancel):
      try:
        return future.result(left)
      except TimeoutError:
        if future.done():
          raise
        future.cancel()
        raise Deadline('The time of the request was over before it was done: nothing was changed.') from None
      except concurrent.futures.CancelledError:
        self.call.check()
        raise

  # Learning.

  def feedback(
    self,
    id: str,
    expected: int | None,
    request: FeedbackRequest,
    *,
    idempotency: Request | None = None,
    progress: Progress = lambda stage, **details: None,
  ) -> dict[str, Any]:
    """Learns from feedback, if the guards let it; see `feedback.run`."""

    def tell(stage: str, **details: Any) -> None:
      self._tell(id, stage, **details)
      progress(stage, **details)

    with self._turn(id, expected) as adapter:
      if idempotency is not None:  # Its answer says what was drawn, also where nothing is committed.
        self.service.store.about(idempotency, adapter.id)
      return feedback.run(self, adapter, request, expected=adapter.head, idempotency=idempotency, progress=tell)

  def feedback_batch(self, entries: Sequence[feedback.Entry]) -> list[dict[str, Any] | ServiceError | UserError]:
    """Learns from feedback on several adapters at once, each by itself; see `feedback.run_batch`."""
    return feedback.run_batch(self, entries)

  # Sessions.

  @property
  def sessions(self) -> Sessions:
    """The interactive sessions of the owner's adapters."""
    return Sessions(self)

  # Events.

  def events(self, id: str, after: int | None = None, timeout: float = 15.0) -> Iterator[Event | None]:
    """Yield what happens to an adapter, and None whenever nothing has for so many seconds.

    Args:
      id: of the adapter.
      after: the last event that is known already; None: all that are kept are yielded.
      timeout: seconds.
    """
    self.adapter(id)

    def stream(last: int | None) -> Iterator[Event | None]:
      while True:
        found = self.service.events.wait(id, last, timeout)
        for event in found:
          last = event.id
          yield event
        if not found:
          yield None

    return stream(after)

  def listen(self, id: str, listener: Callable[[Event], None]) -> Callable[[], None]:
    """Tells somebody of every event of an adapter from now on; returns what ends it. See `EventLog.listen`."""
    self.adapter(id)
    return self.service.events.listen(id, listener)

  def events_after(self, id: str, after: int | None = None) -> list[Event]:
    """Return the events that are kept of an adapter, after one that is known already."""
    self.adapter(id)
    return self.service.events.after(id, after)

  # Requests that are sent again.

  def begin(self, key: str, body_digest: str) -> Request | StoredResponse:
    """Begins a request with an idempotency key, or returns what it was answered before; see `Store.begin`."""
    return self.service.store.begin(self.owner, key, body_digest)

  def part(self, request: Request, index: int) -> Request | StoredResponse:
    """Begins a part of a request; see `Store.part`."""
    return self.service.store.part(request, index)

  def finish(self, request: Request, status: int, response: bytes) -> None:
    """Keep the answer of a request."""
    self.service.store.finish(request, status, response)

  def abandon(self, request: Request) -> None:
    """Forgets a request that has changed nothing."""
    self.service.store.abandon(request)

  # Inside.

  @contextlib.contextmanager
  def _turn(self, id: str, expected: int | None) -> Iterator[Adapter]:
    """Give the adapter when it is this request's turn to change it."""
    self.adapter(id)  # Before anything is kept for an id that means nothing.
    with self.service.turns.of(id, self.call.deadline):
      self.call.check()
      adapter = self.adapter(id)
      if expected is not None and expected != adapter.head:
        raise VersionConflict(
          f'The adapter is at version {adapter.head}, and the request expects {expected}: look at what changed, and '
          'ask again.',
          current=adapter.head,
        )
      yield adapter

  @contextlib.contextmanager
  def _spending(self, kind: str, tokens: int) -> Iterator[None]:
    """Spends tokens for what the block begins, and gets them back if it is refused."""
    self.call.spend(kind, tokens)
    try:
      yield
    except BaseException:
      self.call.spend(kind, -tokens)
      raise

  def _tell(self, id: str, kind: str, **details: Any) -> None:
    self.service.events.add(id, kind, details)

  def _check_served(self, base_model: str | None, rank: int | None, alpha: float | None) -> None:
    served, service = self.service.served, self.service
    if base_model is not None and base_model not in (service.model_name, names.BASE_NAME):
      raise InvalidRequest(
        f'{short_repr(base_model)} is not served here: leave base_model out, or name {service.model_name}.',
        field='base_model',
      )
    own_alpha = None if served.rank is None or served.scale is None else served.scale * served.rank
    for field, asked, own in (('rank', rank, served.rank), ('alpha', alpha, own_alpha)):
      if asked is not None and asked != own:
        raise InvalidRequest(
          f'{field}={short_repr(asked)} is not served here, where all adapters are {served.described()}: leave {field} '
          'out.',
          field=field,
        )


def _factors(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  return {name.removeprefix('factors/'): value for name, value in arrays.items() if name.startswith('factors/')}


def _shown(change: differences.MatrixChange) -> dict[str, Any]:
  return {**dataclasses.asdict(change), 'relative': change.relative}
