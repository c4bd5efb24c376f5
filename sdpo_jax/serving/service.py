"""A service without its network layer: the store, the thread of the engine, and the state that all owners share."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
import contextlib
import dataclasses
import logging
import pathlib
import shutil
import tempfile
import threading
import time
from typing import Any

import jax

from sdpo_jax.config import Config
from sdpo_jax.config.locations import CACHE
from sdpo_jax.errors import UserError
from sdpo_jax.models import huggingface, identity, model_files, parameters
from sdpo_jax.serving.engine import Engine, EngineSettings, check_divides
from sdpo_jax.serving.engine_settings import as_run, engine_settings
from sdpo_jax.serving.errors import StorageFailed
from sdpo_jax.serving.peft_transfer import Served
from sdpo_jax.serving.service_state import ServiceState, short_name
from sdpo_jax.serving.sidecar import Sidecar
from sdpo_jax.serving.store.connections import POSTGRES
from sdpo_jax.serving.store.store import Retention, Store
from sdpo_jax.serving.store.versions import Base
from sdpo_jax.serving.worker import Worker
from sdpo_jax.training import teacher_model
from sdpo_jax.training.opening import check_turn_end, load_tokenizer, model_mesh, stop_token_ids

_logger = logging.getLogger('sdpo_jax.serving')
TEND_SECONDS = 600.0  # Seconds between two passes of retention.
_SAVE_SECONDS = 1.0  # Seconds between two savings of usage.
_DATABASE = 'service.sqlite'  # The default name of the database in a local root.


class Service(ServiceState):
  """The shared state of a service, with its start and stop. Any thread may call."""

  _tending: threading.Thread | None = None  # None: `start` was not called.

  @classmethod
  def make(
    cls,
    config: Config,
    *,
    announce: Callable[[str], None] = print,
    devices: Sequence[jax.Device] | None = None,
  ) -> Service:
    """Make a service from settings; `start` loads the model.

    Args:
      config: validated settings; model.lora must be set.
      announce: receives lines about the programs of the engine.
      devices: the devices of the engine; None: all.

    Raises:
      UserError: the model or its tokenizer cannot be read, the sizes do not fit the model or the devices, or the store
        belongs to another model, is damaged or in use.
    """
    model = config.model
    if not model.lora.used:
      raise UserError('A service serves LoRA adapters: set model.lora.rank, which all of them share.')
    tokenizer, described = load_tokenizer(config), huggingface.read_policy(model.path, model)
    mesh, sizes = model_mesh(config, described, devices), engine_settings(config)
    check_divides(sizes, described.on(mesh, model.attention))
    values = model_files.read_json(model_files.resolve(model.path), 'config.json')
    positions = huggingface.positions(values)
    check_positions(sizes, positions)
    if config.actor.self_distillation.teacher_model:
      teacher_model.check(as_run(config))
    try:
      check_turn_end(config, tokenizer)
    except UserError as error:  # Harmless: completions are only longer than necessary.
      _logger.warning('%s', error)
    base = Base.of(model, described, identity.of_base(model.path))
    database, folder = _places_of(config)
    with contextlib.ExitStack() as opened:
      endpoint = _endpoint_of(config, tokenizer, sizes, described.vocab_size)
      if endpoint is not None:
        opened.callback(endpoint.close)
        endpoint.begin()
      store = opened.enter_context(_open_store(config, database, base))
      made: list[Service] = []
      worker = Worker(
        _engine_maker(config, tokenizer, mesh, sizes, folder),
        lambda name: made[0].load(name),
        max_waiting=config.serve.limits.max_waiting,
        shared=config.serve.http.keys is not None,
        announce=announce,
      )
      served = Served(described, base.fingerprint['weights'])
      made.append(cls(store, worker, tokenizer, config, served, positions=positions, endpoint=endpoint))
      opened.pop_all()  # From here on, `stop` closes them.
    return made[0]

  # Life cycle.

  def start(self) -> None:
    """Start the thread of the engine, which loads the model and compiles, and one that saves usage and deletes."""
    self.worker.start()
    self._stopped = threading.Event()
    self._tending = threading.Thread(target=self.tend, args=(self._stopped,), name='tending', daemon=True)
    self._tending.start()

  def stop(self, drain: float = 0.0) -> None:
    """Refuse new requests, give those in progress `drain` seconds to finish, and close the store."""
    try:
      self.worker.stop(drain)
    finally:
      if self._tending is not None:
        self._stopped.set()
        self._tending.join()
      if self.endpoint is not None:
        self.endpoint.close()
      self.store.close()

  def tend(self, stopped: threading.Event) -> None:
    """Save the usage of keys, settle what is in doubt and give back leases, every second and at the end.

    Retention is applied more rarely. It ends when `stopped` is set.
    """
    next_pass, saved = time.monotonic(), True
    while True:
      ends = stopped.is_set()
      try:
        self.allowances.save()
        saved = True
      except StorageFailed:  # The next call adds what this one could not.
        if saved:
          _logger.exception('The usage of keys could not be saved; this is tried again every second.')
        saved = False
      with contextlib.suppress(StorageFailed):
        self.store.settle_doubtful()
        self.store.let_go(self.turns)
      if ends:
        return
      if time.monotonic() >= next_pass:
        next_pass = time.monotonic() + TEND_SECONDS
        try:
          self.store.retain()
        except Exception:  # No request depends on it, and the next pass tries again.
          _logger.exception('The retention settings could not be applied; this is tried again.')
      stopped.wait(_SAVE_SECONDS)


def _endpoint_of(config: Config, tokenizer: Any, sizes: EngineSettings, vocab_size: int) -> Sidecar | None:
  """Return the configured external teacher, whose server `begin` checks; None: none is configured."""
  settings = config.actor.self_distillation.teacher_endpoint
  if not settings.used:
    return None
  longest = sizes.teacher_buckets[-1] + sizes.response_buckets[-1]
  return Sidecar(
    dataclasses.replace(settings, top_k=min(settings.top_k, sizes.topk)),
    vocab_size,
    lambda found, stop: found.check(config.model.path, tokenizer, longest, stop),
    pause_s=config.serve.learning.teacher_pause_s,
  )


def _places_of(config: Config) -> tuple[str, pathlib.Path]:
  """Return the database of a service, and a folder for versions that do not fit into the memory of its engine."""
  store = config.serve.store
  if (store.database or '').startswith(POSTGRES):
    folder = pathlib.Path(tempfile.mkdtemp(prefix='sdpo_jax-versions-'))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return store.database, folder
  path = pathlib.Path(store.database or pathlib.Path(store.root) / _DATABASE).expanduser().absolute()
  return str(path), path.with_name(f'{path.name}.versions')


def _open_store(config: Config, database: str, base: Base) -> Store:
  store = config.serve.store
  root = store.root if '://' in store.root else str(pathlib.Path(store.root).expanduser().absolute())
  names = (field.name for field in dataclasses.fields(Retention))
  retention = Retention(**{name: getattr(store, name) for name in names})
  return Store.open(root, database, base=base, retention=retention, url=config.serve.http.url or '')


def _engine_maker(
  config: Config, tokenizer: Any, mesh: jax.sharding.Mesh, sizes: EngineSettings, folder: pathlib.Path
) -> Callable[[], Engine]:
  """Return a function that loads the model and makes its engine.

  Args:
    config: settings.
    tokenizer: the tokenizer of the model.
    mesh: the mesh to run on.
    sizes: the sizes of the engine.
    folder: a folder for versions that do not fit into memory; no other engine may use it.
  """
  programs = pathlib.Path(config.serve.programs or f'{CACHE}/engine').expanduser()
  other = config.actor.self_distillation.teacher_model

  def make_engine() -> Engine:
    policy, values = huggingface.load(config.model.path, config.model, mesh=mesh, seed=config.seed)
    frozen, _ = parameters.split(policy.parameter_table(), values)
    models = {}
    if other:
      teacher = teacher_model.load(as_run(config), mesh)
      models[short_name(other)] = teacher.policy, teacher.base
    stops = stop_token_ids(config, tokenizer)
    return Engine(policy, frozen, tokenizer, sizes, folder, stops, models=models, programs=programs)

  return make_engine


def check_positions(sizes: EngineSettings, positions: int | None) -> None:
  """Raise UserError if the buckets of an engine allow longer texts than the model has positions for."""
  longest = max(sizes.prompt_buckets[-1], sizes.teacher_buckets[-1]) + sizes.response_buckets[-1]
  if positions is not None and sizes.cartridges:
    behind = sizes.cartridge_slots + sizes.prompt_buckets[-1] + sizes.response_buckets[-1]
    if behind > positions:
      raise UserError(
        f'serve: a completion behind serve.cartridge_slots={sizes.cartridge_slots} and the longest prompt needs '
        f'{behind} positions, and the model has {positions} (max_position_embeddings): lower serve.cartridge_slots or '
        'the buckets.'
      )
  if positions is not None and longest > positions:
    raise UserError(
      f'serve: a prompt of {longest - sizes.response_buckets[-1]} tokens with a completion of '
      f'{sizes.response_buckets[-1]} needs {longest} positions, and the model has {positions} '
      '(max_position_embeddings): lower serve.prompt_buckets, serve.teacher_buckets or serve.response_buckets.'
    )
