"""The operations of one owner.

Adapters and samples are looked up with their owner, so that those of other owners look as if they did not exist.
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
from sdpo_jax.learning.scoring import Scored
from sdpo_jax.rollout.results import Completion
from sdpo_jax.serving import adapter_settings, differences, feedback, names, prompts
from sdpo_jax.serving.call import Call
from sdpo_jax.serving.draft_texts import DraftText, finished_text
from sdpo_jax.serving.errors import Deadline, Forbidden, InvalidRequest, ServiceError, VersionConflict
from sdpo_jax.serving.event_log import AdapterEvent
from sdpo_jax.serving.feedback_request import FeedbackRequest
from sdpo_jax.serving.records import AdapterRecord, SampleRecord, Version
from sdpo_jax.serving.sampling import SampleOptions, Sampling
from sdpo_jax.serving.sessions.sessions import Sessions
from sdpo_jax.serving.store.store import IdempotentRequest, StoredResponse
from sdpo_jax.serving.targets import VersionTarget

if TYPE_CHECKING:
  from sdpo_jax.serving.service import Service

Progress = Callable[..., None]  # (stage, **details).
_LARGEST = 10  # How many of the most changed matrices a diff lists.


class Account:
  """The operations of one owner in one request. Any thread may call.

  Methods that take an adapter's id raise NotFound alike if the adapter does not exist, was deleted, or belongs to
  another owner. Methods that change an adapter take the version that the caller expects it to be at (None: any), raise
  VersionConflict if it is at another one, and wait for other changes of the same adapter.
  """

  def __init__(self, service: Service, owner: str, call: Call):
    """Make the account that `Service.account` returns.

    Args:
      service: the state that all owners share.
      owner: the owner of the adapters.
      call: the request.
    """
    self.service, self.owner, self.call = service, owner, call

  # Properties of the service.

  @property
  def texts(self) -> TokenTexts:
    """The texts of the model's tokens."""
    return self.service.texts

  @property
  def most_tokens(self) -> int:
    """The most tokens of a completion."""
    return self.service.max_completion

  @property
  def most_scored(self) -> int:
    """The most tokens of a text to be scored, prompt and completion together."""
    return self.service.max_text

  @property
  def most_logprobs(self) -> int:
    """The most tokens per position whose log-probs the OpenAI-compatible routes return."""
    return min(self.service.settings.limits.max_logprobs, self.service.sizes.topk)

  def capabilities(self) -> dict[str, Any]:
    """Return the capabilities of the service; see `Service.capabilities`."""
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
    request: IdempotentRequest | None = None,
  ) -> tuple[AdapterRecord, Version]:
    """Make an adapter that does not change the model yet.

    Args:
      name: a name that no other adapter of the owner has.
      settings: see `adapter_settings.checked`.
      seed: seed of the factors; None: a random one.
      base_model: the model that the sender expects; None: any.
      rank: the rank that the sender expects; None: any.
      alpha: the LoRA alpha that the sender expects; None: any.
      request: the request's idempotency record; None: it has no key.

    Raises:
      InvalidRequest: the name or the settings are not allowed, or another model, rank or alpha is served.
      Forbidden: the owner has reached the limit of adapters.
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
    request: IdempotentRequest | None,
  ) -> tuple[AdapterRecord, Version]:
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

  def adapters(self) -> list[AdapterRecord]:
    """Return the owner's adapters."""
    return self.service.store.adapters(self.owner)

  def adapter(self, id: str) -> AdapterRecord:
    """Return an adapter."""
    found = self.service.store.adapter(self.owner, id)
    self.service.remember(found.id, self.owner)
    return found

  def change(
    self, id: str, expected: int | None, settings: Mapping[str, Any], *, request: IdempotentRequest | None = None
  ) -> AdapterRecord:
    """Update some of an adapter's settings; its version stays the same."""
    with self._turn(id, expected) as adapter:
      changed = adapter_settings.checked({**adapter.settings, **settings}, self.service.settings, self.prompt_of)
      return self.service.store.change_settings(self.owner, id, adapter.head, changed, request=request)

  def fork(
    self, id: str, number: int | None, name: str, *, request: IdempotentRequest | None = None
  ) -> tuple[AdapterRecord, Version]:
    """Make an adapter from a version of another one (None: the newest), with its settings, moments and average."""
    adapter, version = self.adapter(id), self.version(id, number)
    arrays = self.service.store.arrays(version)
    details = {'from': names.lora_uri(adapter.id, version.number)}
    return self._create(name, adapter.settings, arrays, 'fork', details, request)

  def delete(self, id: str, expected: int | None) -> None:
    """Delete an adapter with its name, its versions, and all its samples and feedback."""
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
    """Return the distance between two versions of an adapter, as JSON.

    Returns:
      `total`, `largest` (the matrices that changed most) and `matrices`: Frobenius norms of the factors' product for
      each matrix `before` and `after`, of the `change`, and the change `relative` to before. `versions`: the details of
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

  def undo(self, id: str, expected: int | None, to: int, *, request: IdempotentRequest | None = None) -> Version:
    """Make a new version that equals an older one, including its moments and its average."""
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
    request: IdempotentRequest | None = None,
  ) -> tuple[AdapterRecord, Version]:
    """Make an adapter from files that PEFT wrote; its optimizer starts from zero moments.

    Args:
      name: as in `create`.
      files: see `peft_transfer.Served.factors`.
      settings: as in `create`.
      request: as in `create`.

    Raises:
      InvalidRequest: as `create`, or the files do not hold an adapter of the shape that is served.
      TooLarge: the files are larger than such an adapter can be.
      Forbidden: as `create`.
    """
    names.check_name(name, self.service.model_name)
    factors = self.service.served.factors(files)
    fresh = self.service.worker.fresh(0)  # Moments and count of a version that has learned nothing.
    own = {f'{kind}/{row}': value for kind in ('factors', 'average') for row, value in factors.items()}
    digest = hashlib.sha256(files[peft_files.WEIGHTS]).hexdigest()
    return self._create(name, settings, {**fresh, **own}, 'import', {'sha256': digest}, request)

  def export_peft(self, id: str, number: int | None = None) -> dict[str, bytes]:
    """Return the files of a version (None: the newest) by name, in the format that PEFT loads."""
    return self.service.store.peft_files(self.version(id, number))

  # Sampling and scoring.

  def resolve(self, model: str) -> VersionTarget:
    """Return the version that a request names as its model.

    Args:
      model: 'base' or the name of the model; the id or the name of an adapter, optionally with @ and a version number;
        or the URI of a version. No file is opened and no URI is fetched.

    Raises:
      NotFound: there is no such model, adapter or version.
    """
    if model in (names.BASE_NAME, self.service.model_name):
      return VersionTarget(None, None)
    reference = names.parse(model)
    for find in (self.service.store.adapter, self.service.store.by_name)[: 1 if reference.is_id else 2]:
      with contextlib.suppress(names.NotFound):
        adapter = find(self.owner, reference.adapter)
        number = adapter.head if reference.number is None else reference.number
        self.service.store.version(self.owner, adapter.id, number)
        self.service.remember(adapter.id, self.owner)
        return VersionTarget(adapter, number)
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
    """Return the token ids of a prompt that is given in one of three forms; see `prompts.tokens_of`.

    Args:
      messages: a conversation, rendered by the chat template of the model.
      text: a text, encoded as it is.
      tokens: token ids, taken as they are.
      limit: the most tokens; None: the limit of prompts.
      add_special_tokens: whether the tokenizer adds its special tokens around a text.

    Raises:
      InvalidRequest: none or several forms are given, the prompt is invalid, or it is too long.
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
    target: VersionTarget,
    prompt_tokens: Sequence[int],
    *,
    n: int = 1,
    options: SampleOptions | None = None,
    drafts: bool = False,
    messages: Sequence[Mapping[str, Any]] | None = None,
  ) -> Sampling:
    """Draw completions of a prompt; each is stored with all that feedback on it needs.

    Args:
      target: from `resolve`.
      prompt_tokens: from `prompt_of`.
      n: number of completions.
      options: sampling options; None: the defaults.
      drafts: whether to also yield drafts.
      messages: the conversation that the prompt was rendered from; None: it was not a conversation.

    Raises:
      InvalidRequest: an option is not allowed.
      Busy: too many requests wait, or the owner's allowance is used up.
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

    def keep(done: Completion) -> SampleRecord:
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
    target: VersionTarget,
    prompt_tokens: Sequence[int],
    options: SampleOptions,
    messages: list[dict[str, Any]] | None,
    done: Completion,
  ) -> SampleRecord:
    now, tokens = self.service.clock(), done.tokens.tolist()
    sample = SampleRecord(
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

  def sample_of(self, id: str) -> SampleRecord:
    """Return a stored completion of the owner.

    Raises:
      NotFound: there is none.
      Gone: it has expired.
    """
    return self.service.store.sample(self.owner, id)

  def score(
    self,
    target: VersionTarget,
    rows: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    topk: int = 1,
    ids: Sequence[np.ndarray] | None = None,
  ) -> list[Scored]:
    """Return a version's log-probs and entropies of given tokens.

    Args:
      target: from `resolve`.
      rows: the prompt and the tokens after it, for each row; at least one token each.
      topk: how many of the most likely tokens to return at every position; 0: none.
      ids: [T, M] int32 for each row, further tokens whose log-probs to return.

    Raises:
      InvalidRequest: a row is invalid.
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
    """Wait for a future of the worker and return its result.

    Raises:
      Deadline: the request has no time left.
      Cancelled: the sender does not wait any more.
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
    idempotency: IdempotentRequest | None = None,
    progress: Progress = lambda stage, **details: None,
  ) -> dict[str, Any]:
    """Learn from feedback, if the guards accept the result; see `feedback.run`."""

    def tell(stage: str, **details: Any) -> None:
      self._tell(id, stage, **details)
      progress(stage, **details)

    with self._turn(id, expected) as adapter:
      if idempotency is not None:  # Its response quotes the samples, even if nothing is committed.
        self.service.store.about(idempotency, adapter.id)
      return feedback.run(self, adapter, request, expected=adapter.head, idempotency=idempotency, progress=tell)

  def feedback_batch(
    self, entries: Sequence[feedback.FeedbackEntry]
  ) -> list[dict[str, Any] | ServiceError | UserError]:
    """Learn from feedback on several adapters at once, each in its own transaction; see `feedback.run_batch`."""
    return feedback.run_batch(self, entries)

  # Sessions.

  @property
  def sessions(self) -> Sessions:
    """The interactive sessions of the owner's adapters."""
    return Sessions(self)

  # Events.

  def events(self, id: str, after: int | None = None, timeout: float = 15.0) -> Iterator[AdapterEvent | None]:
    """Yield the events of an adapter, and None whenever there was none for `timeout` seconds.

    Args:
      id: of the adapter.
      after: id of the last event already seen; None: begin with the oldest event that is kept.
      timeout: seconds.
    """
    self.adapter(id)

    def stream(last: int | None) -> Iterator[AdapterEvent | None]:
      while True:
        found = self.service.events.wait(id, last, timeout)
        for event in found:
          last = event.id
          yield event
        if not found:
          yield None

    return stream(after)

  def listen(self, id: str, listener: Callable[[AdapterEvent], None]) -> Callable[[], None]:
    """Call `listener` with every later event of an adapter; return a function that ends this. See `EventLog.listen`."""
    self.adapter(id)
    return self.service.events.listen(id, listener)

  def events_after(self, id: str, after: int | None = None) -> list[AdapterEvent]:
    """Return the kept events of an adapter that are newer than the event `after`."""
    self.adapter(id)
    return self.service.events.after(id, after)

  # Idempotent requests.

  def begin(self, key: str, body_digest: str) -> IdempotentRequest | StoredResponse:
    """Begin a request with an idempotency key, or return its stored response; see `Store.begin`."""
    return self.service.store.begin(self.owner, key, body_digest)

  def part(self, request: IdempotentRequest, index: int) -> IdempotentRequest | StoredResponse:
    """Begin one part of a batch request; see `Store.part`."""
    return self.service.store.part(request, index)

  def finish(self, request: IdempotentRequest, status: int, response: bytes) -> None:
    """Store the response of a request."""
    self.service.store.finish(request, status, response)

  def abandon(self, request: IdempotentRequest) -> None:
    """Forget a request that has changed nothing."""
    self.service.store.abandon(request)

  # Inside.

  @contextlib.contextmanager
  def _turn(self, id: str, expected: int | None) -> Iterator[AdapterRecord]:
    """Wait for this request's turn to change the adapter, check its version, and provide it."""
    self.adapter(id)  # Raise NotFound before a queue is made for an unknown id.
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
    """Spend tokens from the allowance; refund them if the block raises."""
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
