"""The operations of one owner on adapters and samples; those of other owners look as if they did not exist."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import json
import secrets
from typing import Any

import numpy as np

from sdpo_jax.config.privacy import public_place
from sdpo_jax.errors import short_repr
from sdpo_jax.files import as_json
from sdpo_jax.learning.scoring import Scored
from sdpo_jax.models.adapters import composition, peft_config
from sdpo_jax.reporting import model_card
from sdpo_jax.rollout.results import Completion
from sdpo_jax.serving import (
  adapter_settings,
  cartridge_transfer,
  differences,
  records,
  request_prompts,
  score_pieces,
)
from sdpo_jax.serving.call import Call
from sdpo_jax.serving.errors import Deadline, Forbidden, InvalidRequest, NotFound, VersionConflict
from sdpo_jax.serving.jobs import tokens_scored
from sdpo_jax.serving.records import AdapterRecord, SampleRecord, Version, VersionTarget
from sdpo_jax.serving.sample_requests import DraftText, SampleOptions, Sampling, finished_text
from sdpo_jax.serving.service_state import AdapterEvent, ServiceState
from sdpo_jax.serving.store.store import IdempotentRequest

_LARGEST = 10  # How many of the most changed matrices a diff lists.


@dataclasses.dataclass(frozen=True, eq=False)
class Account:
  """The operations of one owner within one request. Any thread may call.

  Methods that take the id of an adapter raise NotFound if it does not exist, was deleted, or belongs to another owner.
  Methods that change an adapter take the version that the caller expects it to be at (None: any), raise VersionConflict
  if it is at another one, and wait for other changes of the same adapter.
  """

  service: ServiceState  # Shared by all owners.
  owner: str
  call: Call = dataclasses.field(default_factory=Call)  # The request that the operations belong to.

  @contextlib.contextmanager
  def tokenizing(self) -> Iterator[None]:
    """Hold the tokenizer for a text of any length: keys take turns at it, so that others wait for one text."""
    with self.service.parsing.of(self.call), self.service.tokenizing:
      yield

  # Adapters.

  def adapter(self, id: str) -> AdapterRecord:
    """Return the current record of an adapter."""
    found = self.service.store.adapter(self.owner, id)
    self.service.remember(found.id, self.owner)
    return found

  def version(self, id: str, number: int | None = None) -> Version:
    """Return a version of an adapter by its number; None: the newest."""
    adapter = self.adapter(id)
    return self.service.store.version(self.owner, id, adapter.head if number is None else number)

  @contextlib.contextmanager
  def turn(self, id: str, expected: int | None) -> Iterator[AdapterRecord]:
    """Hold the lock under which an adapter is changed, after checking its version; yields its record.

    Raises:
      NotHolder: another replica of the service changes it.
    """
    self.service.store.hold(self.owner, id)  # Raises NotFound before a queue is made for an unknown id.
    with self.service.turns.of(id, self.call):
      adapter = self.adapter(id)
      if expected is not None and expected != adapter.head:
        raise VersionConflict(
          f'The adapter is at version {adapter.head}, and the request expects {expected}: check what has changed, '
          'and retry.',
          current=adapter.head,
        )
      yield adapter

  def create(
    self,
    name: str,
    settings: Mapping[str, Any] | None = None,
    *,
    seed: int | None = None,
    base_model: str | None = None,
    rank: int | None = None,
    alpha: float | None = None,
    source: str | None = None,
    request: IdempotentRequest | None = None,
  ) -> tuple[AdapterRecord, Version]:
    """Create an adapter that does not change the model yet, or one with a cartridge that is read from a source.

    Args:
      name: a name that no other adapter of the owner has.
      settings: see `adapter_settings.checked`.
      seed: the seed of the factors; None: a random one.
      base_model: the model that the client expects; None: any.
      rank: the rank that the client expects; None: any.
      alpha: the LoRA alpha that the client expects; None: any.
      source: see `cartridge_transfer.fetched`; None: there is none.
      request: the idempotency record of the request; None: it has no Idempotency-Key.

    Raises:
      InvalidRequest: the name or a setting is not allowed, or another model, rank or alpha is served.
      NameTaken: the owner has an adapter of that name.
      Forbidden: the owner has as many adapters as the limit allows, or the source is not allowed.
    """
    self._check_served(base_model, rank, alpha)
    if source is not None:
      records.check_name(name, self.service.model_name)
      with self.service.reading.of(self.call):
        arrays = cartridge_transfer.fetched(source, self.service.config, self.service.served)
      return self._create(name, settings, arrays, 'import', {'source': source}, request)
    seed = secrets.randbits(32) if seed is None else seed % 2**32
    return self._create(name, settings, None, 'create', {}, request, seed)

  def _create(
    self,
    name: str,
    settings: Mapping[str, Any] | None,
    arrays: Mapping[str, np.ndarray] | None,
    reason: str,
    details: Mapping[str, Any],
    request: IdempotentRequest | None,
    seed: int | None = None,
  ) -> tuple[AdapterRecord, Version]:
    store, limit = self.service.store, self.service.settings.limits.max_adapters_per_owner
    is_cartridge = arrays is not None and records.KEYS in arrays
    checked = adapter_settings.checked(settings or {}, self.service.settings, self.service.prompt_of, is_cartridge)
    if checked.get('pinned_versions'):
      raise InvalidRequest('A new adapter has no versions to pin yet: pin one when it is there.', field='settings')
    records.check_name(name, self.service.model_name)
    with self.service.turns.of(('owner', self.owner), self.call):
      if store.count(self.owner) >= limit:
        raise Forbidden(f'You have {limit} adapters, the limit (serve.limits.max_adapters_per_owner): delete one.')
      with self.service.commits.of(self.call):
        made, version = store.create(
          self.owner, name, checked, arrays, seed=seed, reason=reason, details=details, request=request
        )
    self.service.remember(made.id, self.owner)
    self.service.events.add(made.id, 'committed', {'version': version.number, 'reason': reason})
    return made, version

  def adapters(self, after: str | None = None, *, named: bool = False, **only: Any) -> list[AdapterRecord]:
    """Return the owner's adapters, the oldest first.

    Args:
      after: the id (or if `named`, the name) or place of the last adapter already seen, see `records.place_after`.
      named: whether `after` is a name.
      **only: `limit` and `prefix`, see `Database.of_owner`.

    Raises:
      InvalidRequest: there is no adapter `after`.
    """
    store = self.service.store
    find = functools.partial(store.by_name if named else store.adapter, self.owner)
    return store.adapters(self.owner, records.place_after(after, find), **only)

  def change(
    self, id: str, expected: int | None, settings: Mapping[str, Any], *, request: IdempotentRequest | None = None
  ) -> AdapterRecord:
    """Update settings of an adapter; those not given, and the version, stay the same."""
    with self.turn(id, expected) as adapter:
      service = self.service
      changed = adapter_settings.checked(
        {**adapter.settings, **settings}, service.settings, service.prompt_of, adapter.is_cartridge
      )
      return service.store.change_settings(self.owner, id, adapter.head, changed, request=request)

  def fork(
    self, id: str, number: int | None, name: str, *, request: IdempotentRequest | None = None
  ) -> tuple[AdapterRecord, Version]:
    """Create an adapter from a version of another one (None: the newest), with its settings and optimizer state."""
    adapter, version, store = self.adapter(id), self.version(id, number), self.service.store
    with self.service.reading.of(self.call):
      state, arrays = store.optimizer_state(version), store.arrays(version)
    details = {
      'from': records.lora_uri(adapter.id, version.number),
      'moments_of': state.moments_of,
      'average_of': state.average_of,
    }
    settings = {name: value for name, value in adapter.settings.items() if name != 'pinned_versions'}
    made, first = self._create(name, settings, arrays, 'fork', details, request)
    if state.arrays:
      store.keep_optimizer_state(first, state.arrays)
    return made, first

  def delete(self, id: str, expected: int | None) -> None:
    """Delete an adapter with all its versions, samples and feedback; its name becomes free."""
    with self.turn(id, expected) as adapter:
      self.service.store.delete(self.owner, id, adapter.head if expected is not None else None)
      self.service.worker.forget(*self.service.worker.known(f'{id}@'))
    self.service.events.forget(id)

  # Versions.

  def versions(self, id: str, after: int = -1, **limit: int) -> list[Version]:
    """Return the versions of an adapter with numbers above `after`, the oldest first, at most `limit`."""
    self.adapter(id)
    return self.service.store.versions(self.owner, id, after, **limit)

  def diff(self, id: str, a: int, b: int) -> dict[str, Any]:
    """Return the distance from version `a` to version `b` of an adapter, as JSON.

    Returns:
      `matrices`: for each matrix the Frobenius norm of the factors' product `before` and `after`, of the `change`, and
      the change `relative` to before; `largest`: those that changed most; `total`: all matrices taken as one;
      `versions`: the details of each version after the older of the two up to the newer one.
    """
    if self.adapter(id).is_cartridge:
      raise InvalidRequest('A cartridge has no matrices to compare: name an adapter.')
    before, after = self.version(id, a), self.version(id, b)
    served, store = self.service.served, self.service.store
    with self.service.reading.of(self.call):
      found = differences.changes(served.adapter, served.table, *map(_factors, map(store.arrays, (before, after))))
    largest = sorted(found, key=lambda each: -each.change)[:_LARGEST]
    first, last = sorted((a, b))
    between = [version for version in self.versions(id, first, limit=last - first) if version.number <= last]
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

  def undo(
    self, id: str, expected: int | None, to: int | None = None, *, request: IdempotentRequest | None = None
  ) -> Version:
    """Make a new version with the factors of an older one, and with its optimizer state if that is stored.

    Args:
      id: the id of the adapter.
      expected: the version that the adapter must be at; None: any.
      to: the older version; None: the one before the newest that is not undone, so that repeated calls walk back.
      request: as in `create`.
    """
    with self.turn(id, expected) as adapter:
      if to is None:
        newest, *earlier = records.in_effect(self.service.store.database.lineage(id))
        if newest.parent is None:
          raise InvalidRequest(f'Version {newest.number} is the first one: there is nothing to undo.', field='to')
        if not earlier:
          raise InvalidRequest(
            f'Version {newest.parent}, before {newest.number}, is not stored any more (serve.store.keep_versions, '
            "idle_s): name another one with 'to'.",
            field='to',
          )
        to = earlier[0].number
      source = self.service.store.version(self.owner, id, to)
      with self.service.reading.of(self.call):
        arrays = self.service.store.arrays(source)
      version = self._commit(adapter, arrays, 'undo', details={'to': to}, parent=to, request=request)
    return version

  # Files.

  def import_files(
    self, name: str, files: Mapping[str, bytes], *, request: IdempotentRequest | None = None
  ) -> tuple[AdapterRecord, Version]:
    """Create an adapter from files in PEFT's format, whose optimizer starts from zero moments, or a cartridge.

    Args:
      name: as in `create`.
      files: the contents of the files by name, see `peft_transfer.Served.factors` and `cartridge_transfer.arrays_of`.
      request: as in `create`.

    Raises:
      InvalidRequest: as `create`, or the files do not hold an adapter of the served shape, or a cartridge of the model.
      TooLarge: the files are larger than such an adapter can be.
      Forbidden: as `create`.
    """
    records.check_name(name, self.service.model_name)
    arrays, digest = self._read(files)
    return self._create(name, None, arrays, 'import', {'sha256': digest}, request)

  def push(
    self, id: str, expected: int | None, files: Mapping[str, bytes], *, request: IdempotentRequest | None = None
  ) -> Version:
    """Make the next version of an adapter or a cartridge from files; arguments and errors as in `import_files`."""
    self.adapter(id)
    arrays, digest = self._read(files)
    with self.turn(id, expected) as adapter:
      if adapter.is_cartridge != (records.KEYS in arrays):
        own, other = ('a cartridge', 'an adapter') if adapter.is_cartridge else ('an adapter', 'a cartridge')
        raise InvalidRequest(f'{adapter.name} is {own}, and these are files of {other}: import them.', field='files')
      version = self._commit(adapter, arrays, 'import', details={'sha256': digest}, request=request)
    return version

  def _commit(
    self, adapter: AdapterRecord, arrays: Mapping[str, np.ndarray], reason: records.Reason, **more: Any
  ) -> Version:
    """Make the next version of an adapter whose lock is held, and tell those who watch it; `more` as `Store.commit`."""
    with self.service.commits.of(self.call):
      version = self.service.store.commit(self.owner, adapter.id, adapter.head, arrays, reason=reason, **more)
    self.service.events.add(adapter.id, 'committed', {'version': version.number, 'reason': reason})
    return version

  def _read(self, files: Mapping[str, bytes]) -> tuple[Mapping[str, np.ndarray], str]:
    """Return the arrays of uploaded files, and the digest of the file with most of them."""
    with self.service.reading.of(self.call):
      if cartridge_transfer.is_cartridge(files):
        arrays = cartridge_transfer.arrays_of(files, self.service.config, self.service.served)
      else:
        arrays = {f'factors/{row}': value for row, value in self.service.served.factors(files).items()}
      return arrays, hashlib.sha256(max(files.values(), key=len)).hexdigest()

  def export_files(self, id: str, number: int | None = None, form: str = 'sdpo_jax') -> dict[str, bytes]:
    """Return the contents of the files of a version (None: the newest) by name.

    Those of an adapter are PEFT's, and a model card; those of a cartridge have our format or, if `form` is 'published',
    the published one.
    """
    adapter, version, service = self.adapter(id), self.version(id, number), self.service
    if adapter.is_cartridge:
      with service.reading.of(self.call):
        return cartridge_transfer.files_of(service.store.arrays(version), form, service.config, service.served)
    card = model_card.text_of_adapter(adapter.name, version.number, service.served.described(), service.config)
    with service.reading.of(self.call):
      files = service.store.peft_files(version)
    own = json.loads(files[peft_config.FILE])
    own['base_model_name_or_path'] = public_place(service.config.model.path)
    return {**files, peft_config.FILE: as_json(own), model_card.FILE: card.encode()}

  # Sampling and scoring.

  def resolve(
    self, model: str, cartridges: Sequence[str] = (), positions: composition.Positions = 'overlap'
  ) -> VersionTarget:
    """Find the version and the cartridges that a request names as its model: MODEL[#CARTRIDGE[+CARTRIDGE…]].

    Args:
      model: MODEL is 'base' or the name of the model; or the id or the name of an adapter, optionally with @ and a
        version number, or the URI of a version, also after 'base+'. A CARTRIDGE is named like an adapter, and may stand
        alone. All are only looked up in the store: no file is opened and no URI is fetched.
      cartridges: further cartridges.
      positions: the positions of the slots of several.

    Raises:
      NotFound: there is no such model, adapter or version.
      InvalidRequest: an adapter is named where a cartridge must be, or too many are.
    """
    if not isinstance(model, str):
      raise records.unknown(model)
    name, sign, read = (model, '', '') if model == self.service.model_name else model.partition('#')
    own = self._named(name.removeprefix(f'{records.BASE_NAME}+'))
    wanted = [*(read.split('+') if sign else ()), *cartridges]
    if len(wanted) > records.MOST_CARTRIDGES:
      raise InvalidRequest(f'A request reads at most {records.MOST_CARTRIDGES} cartridges: name fewer.', field='model')
    others = [self._named(each) for each in wanted]
    for each, other in zip(wanted, others, strict=True):
      if other.adapter is None or not other.adapter.is_cartridge:
        raise InvalidRequest(f'{short_repr(each)} is no cartridge: name it in model, before a #.', field='model')
    if own.adapter is not None and own.adapter.is_cartridge:
      own, others = VersionTarget(None, None), [own, *others]
    return dataclasses.replace(own, cartridges=tuple(others), positions=positions)

  def _named(self, model: str) -> VersionTarget:
    """Return the version that one name stands for, which may be a cartridge."""
    if model in (records.BASE_NAME, self.service.model_name):
      return VersionTarget(None, None)
    reference = records.parse(model)
    for find in (self.service.store.adapter, self.service.store.by_name)[: 1 if reference.is_id else 2]:
      with contextlib.suppress(NotFound):
        adapter = find(self.owner, reference.adapter)
        number = adapter.head if reference.number is None else reference.number
        self.service.store.version(self.owner, adapter.id, number)
        self.service.remember(adapter.id, self.owner)
        return VersionTarget(adapter, number)
    raise records.unknown(model)

  @contextlib.contextmanager
  def spending(self, kind: str, amount: int) -> Iterator[None]:
    """Take from the allowance of the key; take it back if the block raises.

    Args:
      kind: 'sampled', 'scored', 'learned' or 'feedbacks'.
      amount: the number of tokens or feedbacks.
    """
    self.call.spend(kind, amount)
    try:
      yield
    except BaseException:
      self.call.spend(kind, -amount)
      raise

  def sample(
    self,
    target: VersionTarget,
    prompt_tokens: Sequence[int],
    *,
    n: int = 1,
    options: SampleOptions | None = None,
    drafts: bool = False,
    messages: Sequence[Mapping[str, Any]] | None = None,
    store: bool = True,
  ) -> Sampling:
    """Start sampling completions of a prompt; each is stored as a sample, to which feedback can refer.

    Args:
      target: the version to sample from, see `resolve`.
      prompt_tokens: token ids, see `ServiceState.prompt_of`.
      n: the number of completions.
      options: sampling options; None: the defaults.
      drafts: whether to yield drafts, too.
      messages: the conversation that the prompt was rendered from; None: it was a text or tokens.
      store: whether to keep the samples and, on the devices, their keys and values; if not, samples have an empty id.
        Samples behind cartridges are never kept: nothing learns with a cartridge before its prompts.

    Raises:
      InvalidRequest: an option is not allowed.
      Busy: too many requests wait, or the allowance of the key is used up.
      UserError: as `Engine.submit`.
    """
    service, most = self.service, self.service.settings.limits.max_samples
    if not 1 <= n <= most:
      raise InvalidRequest(f'n must be between 1 and {most}, not {short_repr(n)}.', field='n')
    options = (options or SampleOptions()).checked(max_completion=service.max_completion, vocab_size=service.vocab_size)
    with self.spending('sampled', n * options.max_tokens):
      job = service.worker.sample(
        target.engine_name,
        prompt_tokens,
        cartridge=target.composition,
        **self.call.work,
        owner=self.owner if store else None,
        drafts=drafts,
        n=n,
        step=0,
        **vars(options),
      )
    self.call.closing.callback(lambda: self.call.spend('sampled', job.drawn - n * options.max_tokens))
    store = store and not target.cartridges
    conversation = [dict(message) for message in messages] if messages is not None else None

    def kept(done: Completion) -> SampleRecord:
      now, tokens = service.clock(), done.tokens.tolist()
      return SampleRecord(
        id=f'smp-{secrets.token_hex(12)}' if store else '',
        owner=self.owner,
        adapter=None if target.adapter is None else target.adapter.id,
        version=target.number,
        prompt_tokens=list(prompt_tokens),
        tokens=tokens,
        log_probs=done.model_log_probs,
        temperature=options.temperature,
        messages=conversation,
        text=finished_text(service.tokenizer, tokens, options.stop),
        finish_reason='stop' if done.stopped else 'length',
        created=now,
        expires=now + service.settings.store.sample_ttl_s,
      )

    def keep(done: Sequence[Completion]) -> list[SampleRecord]:
      samples = list(map(kept, done))
      if store:
        service.store.keep_samples(samples)
      return samples

    return Sampling(
      job,
      functools.partial(service.worker.cancel, job),
      keep,
      functools.partial(DraftText, service.tokenizer, options.stop),
      self.call,
    )

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
      target: the version that scores, see `resolve`.
      rows: for each row the prompt and the tokens after it, at least one token each.
      topk: how many of the most likely tokens to return at every position; 0: none.
      ids: further tokens to score, [T, M] int32 for each row of T tokens; None: none.

    Raises:
      InvalidRequest: a row is invalid, M is not the same for all tokens of all rows, or there is a cartridge.
      Busy: as `sample`.
      UserError: a row or topk is too large.
    """
    if target.cartridges:
      raise InvalidRequest(
        'Given tokens are not scored behind a cartridge: name an adapter or the model.', field='model'
      )
    for number, (prompt, tokens) in enumerate(rows):
      request_prompts.check_tokens(prompt, self.service.vocab_size, f'rows[{number}].prompt')
      request_prompts.check_tokens(tokens, self.service.vocab_size, f'rows[{number}].tokens')
    if not rows:
      return []
    each_ids = [None] * len(rows) if ids is None else ids
    parts = [score_pieces.split(row, own, self.service.sizes) for row, own in zip(rows, each_ids, strict=True)]
    pieces = [row for part in parts for row, _ in part]
    wanted = None if ids is None else [own for part in parts for _, own in part]
    with self.spending('scored', tokens_scored(pieces)):
      future = self.service.worker.score(target.engine_name, pieces, topk=topk, ids=wanted, **self.call.work)
      found = iter(self.wait(future))
    return [
      score_pieces.joined([next(found) for _ in part], len(tokens)) if len(part) > 1 else next(found)
      for part, (_, tokens) in zip(parts, rows, strict=True)
    ]

  def wait(self, future: concurrent.futures.Future) -> Any:
    """Wait for a future of the worker, and return its result.

    Raises:
      Deadline: the time limit of the request is over.
      Cancelled: the client has disconnected.
    """
    try:
      return self.call.result(future, self.call.left)
    except TimeoutError:
      if future.done():
        raise
      future.cancel()
      raise Deadline('The time limit of the request was reached: nothing was changed.') from None

  # Events.

  def events(self, id: str, after: int | None = None, timeout: float = 15.0) -> Iterator[AdapterEvent | None]:
    """Yield the events of an adapter, and None after every `timeout` seconds without one.

    Args:
      id: the id of the adapter.
      after: the id of the last event already seen; None: begin with the oldest stored event.
      timeout: seconds to wait for an event.
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

  # Checks.

  def _check_served(self, base_model: str | None, rank: int | None, alpha: float | None) -> None:
    served, service = self.service.served, self.service
    if base_model is not None and base_model not in (service.model_name, records.BASE_NAME):
      raise InvalidRequest(
        f'The model {short_repr(base_model)} is not served here: leave base_model out, or send {service.model_name}.',
        field='base_model',
      )
    own_alpha = None if served.rank is None or served.scale is None else served.scale * served.rank
    for field, asked, own in (('rank', rank, served.rank), ('alpha', alpha, own_alpha)):
      if asked is not None and asked != own:
        raise InvalidRequest(
          f'{field}={short_repr(asked)} is not served here: all adapters have {served.described()}. Leave {field} out.',
          field=field,
        )


def _factors(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  return {name.removeprefix('factors/'): value for name, value in arrays.items() if name.startswith('factors/')}


def _shown(change: differences.MatrixChange) -> dict[str, Any]:
  return {**dataclasses.asdict(change), 'relative': change.relative}
