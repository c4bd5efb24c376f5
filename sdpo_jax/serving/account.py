"""The operations of one owner.

Adapters and samples are looked up with their owner, so that those of other owners look as if they did not exist.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import hashlib
import secrets
from typing import Any

import numpy as np

from models.adapters import peft_files
from sdpo_jax.errors import UserError, short_repr
from sdpo_jax.serving import adapter_names, adapter_settings, differences, feedback
from sdpo_jax.serving.errors import Forbidden, InvalidRequest, ServiceError
from sdpo_jax.serving.event_log import AdapterEvent
from sdpo_jax.serving.feedback_request import FeedbackRequest
from sdpo_jax.serving.records import AdapterRecord, Version, VersionTarget
from sdpo_jax.serving.sessions.sessions import Sessions
from sdpo_jax.serving.store.store import IdempotentRequest
from sdpo_jax.serving.tenant import Tenant

_LARGEST = 10  # How many of the most changed matrices a diff lists.


class Account(Tenant):
  """The operations of one owner in one request. Any thread may call.

  Methods that take an adapter's id raise NotFound alike if the adapter does not exist, was deleted, or belongs to
  another owner. Methods that change an adapter take the version that the caller expects it to be at (None: any), raise
  VersionConflict if it is at another one, and wait for other changes of the same adapter.
  """

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
    checked = adapter_settings.checked(settings or {}, self.service.settings, self.service.prompt_of)
    adapter_names.check_name(name, self.service.model_name)
    with self.service.turns.of(('owner', self.owner), self.call):
      if len(store.adapters(self.owner)) >= limit:
        raise Forbidden(f'There are {limit} adapters, as many as one owner may have: delete one that is not needed.')
      made, version = store.create(self.owner, name, checked, arrays, reason=reason, details=details, request=request)
    self.service.remember(made.id, self.owner)
    self.service.events.add(made.id, 'committed', {'version': version.number, 'reason': reason})
    return made, version

  def adapters(self) -> list[AdapterRecord]:
    """Return the owner's adapters."""
    return self.service.store.adapters(self.owner)

  def change(
    self, id: str, expected: int | None, settings: Mapping[str, Any], *, request: IdempotentRequest | None = None
  ) -> AdapterRecord:
    """Update some of an adapter's settings; its version stays the same."""
    with self.turn(id, expected) as adapter:
      service = self.service
      changed = adapter_settings.checked({**adapter.settings, **settings}, service.settings, service.prompt_of)
      return service.store.change_settings(self.owner, id, adapter.head, changed, request=request)

  def fork(
    self, id: str, number: int | None, name: str, *, request: IdempotentRequest | None = None
  ) -> tuple[AdapterRecord, Version]:
    """Make an adapter from a version of another one (None: the newest), with its settings, moments and average."""
    adapter, version = self.adapter(id), self.version(id, number)
    arrays = self.service.store.arrays(version)
    details = {'from': adapter_names.lora_uri(adapter.id, version.number)}
    return self._create(name, adapter.settings, arrays, 'fork', details, request)

  def delete(self, id: str, expected: int | None) -> None:
    """Delete an adapter with its name, its versions, and all its samples and feedback."""
    with self.turn(id, expected) as adapter:
      known = self.service.store.versions(self.owner, id)
      self.service.store.delete(self.owner, id, adapter.head if expected is not None else None)
      self.service.worker.forget(*(version.engine_name for version in known))
    self.service.events.forget(id)

  # Versions.

  def versions(self, id: str) -> list[Version]:
    """Return the versions of an adapter, the oldest first."""
    self.adapter(id)
    return self.service.store.versions(self.owner, id)

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
    with self.turn(id, expected) as adapter:
      source = self.service.store.version(self.owner, id, to)
      arrays = self.service.store.arrays(source)
      version = self.service.store.commit(
        self.owner, id, adapter.head, arrays, reason='undo', details={'to': to}, parent=to, request=request
      )
    self.service.events.add(id, 'committed', {'version': version.number, 'reason': 'undo'})
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
    adapter_names.check_name(name, self.service.model_name)
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
    if model in (adapter_names.BASE_NAME, self.service.model_name):
      return VersionTarget(None, None)
    reference = adapter_names.parse(model)
    for find in (self.service.store.adapter, self.service.store.by_name)[: 1 if reference.is_id else 2]:
      with contextlib.suppress(adapter_names.NotFound):
        adapter = find(self.owner, reference.adapter)
        number = adapter.head if reference.number is None else reference.number
        self.service.store.version(self.owner, adapter.id, number)
        self.service.remember(adapter.id, self.owner)
        return VersionTarget(adapter, number)
    raise adapter_names.unknown(model)

  # Learning.

  def feedback(
    self,
    id: str,
    expected: int | None,
    request: FeedbackRequest,
    *,
    idempotency: IdempotentRequest | None = None,
    progress: feedback.Progress = lambda stage, **details: None,
  ) -> dict[str, Any]:
    """Learn from feedback, if the guards accept the result; see `feedback.learn`."""
    return feedback.learn(self, id, expected, request, idempotency=idempotency, progress=progress).said

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

  # Inside.

  def _check_served(self, base_model: str | None, rank: int | None, alpha: float | None) -> None:
    served, service = self.service.served, self.service
    if base_model is not None and base_model not in (service.model_name, adapter_names.BASE_NAME):
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
