"""The engine of the service: it samples, scores and trains many adapters of one model in one process.

A version is immutable: the LoRA factors of an adapter, or the slots of a cartridge. Apart from factors, under a name of
its own (`records.optimizer_name`), the engine has their optimizer state, which only learning reads: moments, and if
wanted the moving average of the factors over all versions so far, which can act as the teacher. The engine copies what
a request needs into one of three pools on the devices: snapshots to sample from, with cartridges, in the compute
dtype; teachers to score with, in float32; and slots to train in, in float32. All calls must come from one thread unless
a method says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
import contextlib
import dataclasses
import functools
import math
import os
import pathlib
import time
from types import MappingProxyType
from typing import Any, Literal, Unpack

import jax
import numpy as np
import optax

from sdpo_jax.config import ServeConfig
from sdpo_jax.distributed.mesh import FSDP
from sdpo_jax.errors import UserError, first_line, printable, short_repr
from sdpo_jax.learning import training_pool
from sdpo_jax.learning.learner import Learned, Learner, whole
from sdpo_jax.learning.losses import Sdpo
from sdpo_jax.learning.requests import Lesson, Task, Taught, UpdateOptions, with_taught
from sdpo_jax.learning.scoring import CompiledSizes, Scored, Scorer, check_ids, mesh_of
from sdpo_jax.learning.training_pool import SlotState
from sdpo_jax.models import parameters
from sdpo_jax.models.adapters import composition, lora, lora_pool
from sdpo_jax.models.adapters.cartridge import Cartridge
from sdpo_jax.models.adapters.kv_prefix import KVPrefix
from sdpo_jax.models.adapters.lora_pool import LoraPool
from sdpo_jax.models.architecture import Architecture
from sdpo_jax.models.decoder import DecoderPolicy
from sdpo_jax.models.policy import NO_MEMBER, Policy
from sdpo_jax.rollout.resident import Handle, Resident, Weights
from sdpo_jax.rollout.results import SamplingStats
from sdpo_jax.rollout.sampler import Sampler, SamplingOptions
from sdpo_jax.rollout.stops import Tokenizer
from sdpo_jax.serving.kept_programs import KeptPrograms
from sdpo_jax.serving.program_folder import ProgramFolder, surroundings
from sdpo_jax.serving.records import (
  BASE,
  FROZEN,
  KEYS,
  TEACHING_MODEL,
  TEACHING_VERSION,
  VALUES,
  WINDOWED,
  Composition,
  optimizer_name,
  version_of,
)
from sdpo_jax.serving.shelf import Arrays, NoPlaceError, Places, Shelf
from sdpo_jax.serving.store import versions
from sdpo_jax.teacher import averaging
from sdpo_jax.types import Tree

_SCORING = UpdateOptions(Sdpo(topk=1))  # For checks of rows that are only scored.
_FACTORS = 'factors'  # The arrays of a version.
_ALIKE = 8  # Rows that read the same cartridge, at most: enough to read its slots in much less time than their own.
# The largest absolute value of a slot; models compute values up to some hundreds.
LARGEST_SLOT = 2.0**16
_MU, _NU, _COUNT, _AVERAGE = 'mu', 'nu', 'count', 'average'  # The arrays of an optimizer state.


@dataclasses.dataclass(frozen=True)
class EngineSettings:
  """The sizes for which the programs of an engine are compiled."""

  prompt_buckets: tuple[int, ...]  # Lengths to which prompts are padded.
  teacher_buckets: tuple[int, ...]  # Lengths to which prompts of teachers are padded.
  response_buckets: tuple[int, ...]  # Lengths to which completions are padded.
  # Lengths to which whole texts are padded for scoring; empty: only rows that fit the other buckets can be scored.
  score_buckets: tuple[int, ...] = ()
  rows: int = ServeConfig.rows  # Completions that are decoded at once.
  training_rows: int = ServeConfig.training_rows  # Rows in a micro-batch of training or scoring.
  snapshots: int = ServeConfig.snapshots  # Places for versions to sample from.
  cartridges: int = ServeConfig.cartridges  # Places for cartridges, or compositions of some.
  cartridge_slots: int = ServeConfig.cartridge_slots  # The most slots of each.
  cartridge_window: Literal['visible', 'windowed'] = ServeConfig.cartridge_window  # What layers with windows see.
  teachers: int = ServeConfig.teachers  # Places for versions to score with.
  slots: int = ServeConfig.slots  # Places for versions in training.
  topk: int = ServeConfig.topk  # K, the number of most likely tokens in supports and scores.
  union_support: bool = ServeConfig.union_support  # Whether supports may be the union of two top Ks.
  decode_chunk: int = ServeConfig.decode_chunk  # Tokens decoded per row before slots are checked.
  stop_ids: int = ServeConfig.stop_ids  # The most tokens that may end a completion.
  # Rows whose keys and values stay cached, for later prompts with the same prefix. Each shard of a mesh has an equal
  # share of them, rounded up.
  kept_prefixes: int = ServeConfig.kept_prefixes
  logits_chunk_size: int = ServeConfig.logits_chunk_size  # Tokens whose logits are in memory at once.
  memory_bytes: int | None = None  # Host memory for versions; None: see `memory_for`.
  # How rows are multiplied with their adapters, see `lora_pool.choose_product`.
  product: Literal['auto', 'gather', 'masked'] = ServeConfig.product


@dataclasses.dataclass(frozen=True)
class Feedback:
  """The lessons and settings with which one version becomes the next.

  Raises:
    UserError: average_rate is out of range, or the new version has no name.
  """

  version: str  # The version that learns.
  new: str  # The name of the new version.
  lessons: Sequence[Lesson]
  update: UpdateOptions = UpdateOptions()
  # 'live': the version itself; 'average': the moving average of its factors; 'base': the model without an adapter;
  # 'version:NAME': another version, such as an older one; 'model:NAME': one of the engine's other models; 'given': the
  # lessons contain the teacher's log-probs.
  teacher: str = 'live'
  # The weight of the new factors in the moving average, from 0 to 1. None: the new version has no average.
  average_rate: float | None = 0.05

  def __post_init__(self):
    if self.new == BASE:
      raise UserError('The new version needs a name; the empty name means the model without an adapter.')
    if self.average_rate is not None and not 0 <= self.average_rate <= 1:
      raise UserError(f'average_rate must be between 0 and 1, not {self.average_rate}.')


class Engine:
  """Versions of adapters by name, with sampling, scoring and learning."""

  def __init__(
    self,
    policy: DecoderPolicy,
    base: Tree,
    tokenizer: Tokenizer,
    settings: EngineSettings,
    folder: pathlib.Path,
    stop_token_ids: Sequence[int] = (),
    models: Mapping[str, tuple[Policy, Tree]] = MappingProxyType({}),
    programs: pathlib.Path | None = None,
  ):
    """Make an engine without versions.

    Args:
      policy: the model, placed on its devices, with an adapter of the shape that all versions share.
      base: the frozen parameters of the model.
      tokenizer: the tokenizer of the model, for texts and stop strings.
      settings: the sizes to compile for.
      folder: a folder for versions that do not fit into memory; no other engine may use it.
      stop_token_ids: tokens that end every completion.
      models: policies and parameters of other models that can teach, by name, on the same devices. Their vocabularies
        must begin with the tokens of this model.
      programs: a folder that caches compiled programs, which other engines may share; None: they are not cached.

    Raises:
      ValueError: the policy has no LoRA adapter, or another model has a smaller vocabulary.
      UserError: other users can write to the folder of programs, or the mesh does not divide the rows.
    """
    if not isinstance(policy.adapter, lora.Adapter):
      raise ValueError('An engine serves LoRA adapters, and the policy has none.')
    check_divides(settings, policy)
    self._vocab_size, self._adapter = policy.vocab_size, policy.adapter
    self._table = parameters.trainable(policy.parameter_table())
    self._count = parameters.count(self._table)
    self._architecture, self._bank = policy.config, bank_of(policy, settings)
    memory_bytes = settings.memory_bytes
    if memory_bytes is None:
      host = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
      memory_bytes = min(memory_for(settings, self._count, self._architecture), host // 4)
    self.settings = dataclasses.replace(settings, memory_bytes=memory_bytes)
    self._shelf = Shelf(folder, memory_bytes)
    kept_in = None
    if programs is not None:
      mesh = policy.backend.mesh
      devices = jax.devices()[:1] if mesh is None else list(mesh.devices.flat)
      key = surroundings(devices) | {
        'settings': dataclasses.asdict(settings),
        'policy': repr(policy),
        'models': {name: repr(other) for name, (other, _) in models.items()},
      }
      kept_in = ProgramFolder(programs, key, devices)
    self._programs = KeptPrograms(kept_in)
    keep = self._programs.keep

    sampled, taught, trained = pooled_policies(policy, settings)
    functions = pool_functions(sampled, trained)
    if self._bank is None:  # Both pools hold the same.
      del functions['put_teacher']
    functions = {name: keep(name, function) for name, function in functions.items()}
    self._put_slot, self._get_slot = functions['put_slot'], functions['get_slot']
    put_snapshot = functions['put_snapshot']
    self._snapshots = _Pool(sampled, policy.dtype, put_snapshot)
    self._teachers = _Pool(taught, 'float32', functions.get('put_teacher', put_snapshot))
    self._teacher_places = Places(settings.teachers)
    self._slots: SlotState | None = None  # None: the next feedback makes them.
    self._slot_places, self._trained = Places(settings.slots), trained
    sampler = Sampler(
      sampled,
      tokenizer,
      prompt_buckets=settings.prompt_buckets,
      response_buckets=settings.response_buckets,
      max_batch_rows=settings.rows,
      stop_token_ids=stop_token_ids,
      mesh=policy.backend.mesh,
      decode_chunk=settings.decode_chunk,
      keep=keep,
    )
    self._resident = Resident(
      sampler, base, self._snapshots.factors, stop_ids=settings.stop_ids, kept_prefixes=settings.kept_prefixes
    )
    self.shares = self._resident.shares  # What was sampled for payers, and whatever the caller charges to them.
    self._rehearsed = SamplingStats()  # The counts of `_rehearse`, which are not reported.
    self._sampling: list[tuple[Handle, list[tuple[_Sampled, Hashable]]]] = []
    self._loaded = False  # Whether versions were put into places since the last turn.
    self._adapters, self._cartridges = _Sampled(settings.snapshots), _Sampled(settings.cartridges)
    sizes = CompiledSizes(
      topk=settings.topk,
      rows=settings.training_rows,
      chunk_size=settings.logits_chunk_size,
      union=settings.union_support,
      keep=keep,
    )
    self._learner = Learner(
      trained,
      taught,
      base,
      sizes,
      prompt_buckets=settings.prompt_buckets,
      teacher_buckets=settings.teacher_buckets,
      response_buckets=settings.response_buckets,
    )
    self._texts: Scorer | None = None
    if settings.score_buckets:
      self._texts = Scorer(
        taught, base, sizes, prompt_buckets=(1,), response_buckets=settings.score_buckets, name='text'
      )
    self._models: dict[str, Scorer] = {}
    for name, (other, its_parameters) in models.items():
      if other.vocab_size < policy.vocab_size:
        raise ValueError(
          f'{name} has {other.vocab_size} tokens, fewer than the model that learns: {policy.vocab_size}.'
        )
      self._models[name] = Scorer(
        other,
        its_parameters,
        sizes,
        prompt_buckets=settings.teacher_buckets,
        response_buckets=settings.response_buckets,
        vocab_size=policy.vocab_size,
        name=TEACHING_MODEL + name,
      )

  # Start.

  def compile(self, announce: Callable[[str], None]) -> None:
    """Compile all programs or read them from the cache, so that no request waits for a compilation.

    Every program is called once for each bucket, with zeros.

    Args:
      announce: receives a line for every program.

    Raises:
      UserError: a program does not fit into the memory of the devices.
    """
    began = time.monotonic()
    announce('  programs   compiled, or read from the cache, before the first request')
    try:
      with self._programs.announced(announce):
        self._rehearse()
    except jax.errors.JaxRuntimeError as error:
      if 'RESOURCE_EXHAUSTED' not in str(error):
        raise
      raise UserError(
        f'The programs of the engine do not fit into the memory of the devices ({first_line(error)}): lower rows, '
        'training_rows, kept_prefixes, the places (snapshots, teachers, slots) or the largest buckets, or use more '
        'devices.'
      ) from error
    if self.settings.kept_prefixes:
      taken = self._resident.kept_bytes / 2**20
      announce(
        f'  {self.settings.kept_prefixes} prompts with their completions are cached on the devices, in {taken:,.0f} MiB'
      )
    made, read = self._programs.compiled, self._programs.read
    announce(f'  {made} compiled and {read} read in {time.monotonic() - began:.1f} s')

  def _rehearse(self) -> None:
    """Call every program as requests do, without changing any version."""
    settings = self.settings
    zeros = parameters.map_table(lambda row: np.zeros(row.shape, np.float32), self._table)
    for pool in (self._snapshots, self._teachers):
      pool.put(0, zeros)
    if self._bank is not None:
      sizes = self._architecture
      none = np.zeros((sizes.layers, sizes.kv_heads, 0, sizes.head_dim), np.float32)
      self._snapshots.put(0, lora_pool.cartridge(self._bank, none, none))
    self._resident.use(self._snapshots.factors)
    # The last prompt continues from the cached prefix of the previous one.
    for width in (*settings.prompt_buckets, *settings.prompt_buckets[-1:] * bool(settings.kept_prefixes)):
      handle = self._resident.submit([0] * width, owner=str(width), n=1, seed=0, step=0, max_tokens=1)
      while self._resident.turn():
        pass
      handle.result()
    self._resident.release(lambda _: True)
    self._rehearsed = dataclasses.replace(self._resident.stats)
    state = self._put_slot(self._fresh_slots(), np.int32(0), _own_state(zeros, zeros, zeros, np.zeros((), np.int32)))
    self._get_slot(state, np.int32(0))
    for length in settings.score_buckets:
      self._texts.score(
        self._teachers.factors, [([0], [0] * length)], member=NO_MEMBER, ids=[np.zeros((length, 1), np.int32)]
      )
    prompts, teachers = settings.prompt_buckets, settings.teacher_buckets
    for response in settings.response_buckets:
      completion, ids = [0] * response, [np.zeros((response, 1), np.int32)]
      self._learner.score(self._teachers.factors, NO_MEMBER, [([0] * teachers[-1], completion)], ids)
      for scorer in self._models.values():
        for length in teachers:
          scorer.score({}, [([0] * length, completion)])
      # No program reads the student's prompt, the teacher's prompt and the completion together.
      for index in range(max(len(prompts), len(teachers))):
        prompt, teacher = (lengths[min(index, len(lengths) - 1)] for lengths in (prompts, teachers))
        lesson = Lesson([0] * prompt, completion, [0] * teacher)
        task = Task(0, [lesson], UpdateOptions(Sdpo(topk=settings.topk), steps=2))
        state, _ = whole(self._learner.learn(state, lambda: self._teachers.factors, [task]))

  # Versions.

  def __contains__(self, version: str) -> bool:
    return version == BASE or version in self._shelf

  def create(self, version: str, seed: int) -> None:
    """Make a version with PEFT's initialization, which does not change the model yet."""
    self.restore(version, self.fresh(seed))

  def put(self, version: str, factors: Tree) -> None:
    """Make a version from factors, such as imported ones; without a state, its moments are 0.

    Raises:
      UserError: the factors have another shape, or values that are not finite, which would spread to other rows.
      ValueError: a version of that name exists.
    """
    self.restore(version, self._flat(_FACTORS, factors))

  def fresh(self, seed: int) -> Arrays:
    """Return the arrays of a version as `create` would make it, without storing them."""
    return versions.fresh(self._adapter, self._table, seed)

  def arrays(self, name: str) -> Arrays:
    """Return the arrays of a version or of an optimizer state by their names, read-only. Any thread may call.

    Args:
      name: the name of a version, which has factors; or of an optimizer state, which has mu, nu and count, or none of
        these if they are 0, and the average if there is one.

    Raises:
      UserError: there are none of that name.
    """
    try:
      return MappingProxyType(self._shelf.get(name))
    except KeyError:
      raise UserError(f'The engine has no version {name}.') from None

  def restore(self, version: str, arrays: Arrays) -> None:
    """Make a version or an optimizer state from arrays as `arrays` returns them, of any engine for the same shape.

    Raises:
      UserError: no version can have the name; or an array has a wrong name, shape or dtype, or invalid values; the
        engine has not changed.
      ValueError: there is one of that name.
    """
    if version_of(version) == BASE:
      raise UserError('A version needs a name; the empty name means the model without an adapter.')
    if arrays.keys() & {KEYS, VALUES} and version == version_of(version):
      self._shelf.put(version, checked_cartridge(f'The cartridge {version}', arrays, self.settings, self._architecture))
      return
    kinds = (_FACTORS,)
    if version != version_of(version):
      kinds = ((_MU, _NU) if _COUNT in arrays else ()) + ((_AVERAGE,) if _has_average(arrays) else ())
    expected = {f'{kind}/{row.name}': (row.shape, np.dtype(np.float32)) for kind in kinds for row in self._table}
    if _MU in kinds:
      expected[_COUNT] = ((), np.dtype(np.int32))
    for wrong, said in ((expected.keys() - arrays.keys(), 'lacks'), (arrays.keys() - expected.keys(), 'also holds')):
      if wrong:
        raise UserError(f'The version {version} {said} {printable(min(wrong))}, unlike the versions served here.')
    found: dict[str, np.ndarray] = {}
    for name, (shape, dtype) in expected.items():
      array = np.asarray(arrays[name])
      if (array.shape, array.dtype) != (shape, dtype):
        raise UserError(
          f'{name} of the version {version} is {array.dtype.name} of shape {array.shape}, but the engine serves '
          f'{dtype.name} of shape {shape}.'
        )
      if not training_pool.fits(array):
        raise UserError(f'{name} of the version {version} has values that are too large or not finite.')
      if (name == _COUNT or name.startswith(f'{_NU}/')) and np.min(array, initial=0) < 0:
        raise UserError(f'{name} of the version {version} has negative values, which it cannot have.')
      found[name] = array.copy() if array.flags.writeable else array
    if version != version_of(version):  # A slot that still has the version may have other moments.
      with contextlib.suppress(ValueError):  # It is in use.
        self._slot_places.forget(version_of(version))
    self._shelf.put(version, found)

  @property
  def held_bytes(self) -> int:
    """The bytes of all versions and optimizer states on the host, in memory and in files."""
    return self._shelf.held_bytes

  @property
  def names(self) -> list[str]:
    """The names of all versions and optimizer states. Any thread may call."""
    return self._shelf.names

  def bytes_of(self, name: str) -> int:
    """Return the size of the arrays of a version, at most, in bytes; or of an optimizer state with all arrays."""
    factors = 4 * self._count
    if name != version_of(name):
      return 3 * factors + 4
    return max(factors, cartridge_bytes(self.settings, self._architecture))

  def drop(self, version: str) -> None:
    """Drop the arrays of a version from the host; its copies on the devices stay, and `restore` can bring it back."""
    self._shelf.drop(version)

  def factors(self, version: str, kind: Literal['factors', 'average'] = 'factors') -> Tree:
    """Return the factors of a version or their moving average, on the host, nested as in the parameter table.

    Without an average, the factors are returned.
    """
    if kind == _AVERAGE and _has_average(state := self._state(version)):
      return self._tree(state, _AVERAGE)
    return self._tree(self._learned(version), _FACTORS)

  def _learned(self, version: str) -> Arrays:
    """Return the arrays of a version that must be an adapter, as those that learn and teach are."""
    arrays = self.arrays(version)
    if KEYS in arrays:
      raise UserError(f'{version} is a cartridge, which is only read by samples: name an adapter.')
    return arrays

  def forget(self, version: str) -> None:
    """Erase a version from the host and the devices; a missing version is ignored.

    Raises:
      ValueError: a request still uses it.
    """
    self._resident.release(lambda weights: _reads(weights, version))
    for places, name in self._in_places(version):
      places.forget(name)
    for name in (version, optimizer_name(version)):
      self._shelf.drop(name)

  def rename(self, version: str, new: str) -> None:
    """Give a version with an optimizer state another name; its arrays and copies stay where they are.

    If something of that name is there, which may have been loaded since it was stored, the version is erased instead.

    Raises:
      ValueError: so it is, and a request still uses it.
    """
    names = {version: new, optimizer_name(version): optimizer_name(new)}
    if set(names.values()) & set(self.names) or any(name in places for places, name in self._in_places(new)):
      self.forget(version)
      return
    for name, other in names.items():
      self._shelf.rename(name, other)
    self._resident.release(lambda weights: _reads(weights, version))
    for (places, name), (_, other) in zip(self._in_places(version), self._in_places(new), strict=True):
      if name in places:
        places.rename(name, other)

  def _in_places(self, version: str) -> list[tuple[Places, Hashable]]:
    """Return the places that a version may have on the devices, each with its name there."""
    own = [(self._adapters.places, version), (self._slot_places, version)]
    own += [(self._cartridges.places, name) for name in self._cartridges.places if version in name.versions]
    return own + [(self._teacher_places, (kind, version)) for kind in (_FACTORS, _AVERAGE)]

  # Sampling.

  def served(self, version: str, cartridge: Composition | None = None) -> int | None:
    """Return how many samples a version has begun since it was loaded, 0 if it can be; None: all its places are used.

    With a cartridge, the larger number of both, so that none keeps its place by coming with ever new others.
    """
    found = [self._adapters.served(version)] if version != BASE else []
    found += [self._cartridges.served(cartridge)] if cartridge is not None else []
    if None in found:
      return None
    return max(found, default=0)

  def submit(
    self,
    version: str,
    prompt: Sequence[int],
    *,
    cartridge: Composition | None = None,
    owner: str | None = None,
    **options: Unpack[SamplingOptions],
  ) -> Handle:
    """Queue a prompt to be sampled from a version, see `Resident.submit`.

    Args:
      version: the name of the version; `BASE`: the model without an adapter.
      prompt: token ids.
      cartridge: cartridges that stand before the prompt; None: none do.
      owner: the owner of the prompt. Cached prefixes are shared only among prompts of the same owner. None: no prefix
        is read or cached.
      **options: `SamplingOptions` and other options of `Resident.submit`.

    Raises:
      NoPlaceError: all snapshots, or all places for cartridges, are in use.
      UserError: as `Resident.submit`, or there is no such version, or the cartridges have too many slots.
    """
    check_ids('The prompt', prompt, self._vocab_size)
    adapter, read = NO_MEMBER, NO_MEMBER
    used: list[tuple[_Sampled, Hashable]] = []
    try:
      if version != BASE:
        arrays = self._learned(version)
        adapter = self._adapters.take(version, lambda index: self._load('member', index, self._tree(arrays, _FACTORS)))
        used.append((self._adapters, version))
      if cartridge is not None:
        parts = self._parts(cartridge)
        read = self._cartridges.take(
          cartridge, lambda index: self._load('cartridge', index, self._composed(cartridge, parts))
        )
        used.append((self._cartridges, cartridge))
      weights = Weights(adapter, version, read, cartridge)
      handle = self._resident.submit(prompt, weights=weights, owner=owner, **options)
    except BaseException:
      for kind, name in used:
        kind.places.let_go(name)
      raise
    self._sampling.append((handle, used))
    for kind, name in used:
      kind.begun[kind.places.index(name)] += handle.left
    return handle

  def _load(self, kind: Literal['member', 'cartridge'], index: int, own: Tree) -> None:
    """Copy a version to a place of the pool to sample from; `kind` is the field of `Weights` that names the place."""
    self._resident.release(lambda weights: getattr(weights, kind) == index)
    self._snapshots.put(index, own)
    self._loaded = True

  def _parts(self, cartridge: Composition) -> list[Cartridge]:
    """Return the cartridges of a composition, without a copy of their arrays."""
    if self._bank is None:
      raise UserError('This service serves no cartridges: set serve.cartridges.')
    windows, parts = self._bank.within_windows, []
    for version in cartridge.versions:
      arrays = self.arrays(version)
      if KEYS not in arrays:
        raise UserError(f'{version} is an adapter, not a cartridge.')
      parts.append(Cartridge(arrays[KEYS], arrays[VALUES], 0, windows))
    slots = sum(part.slots for part in parts)
    if slots > self._bank.member_slots:
      raise UserError(
        f'{len(parts)} cartridges with {slots} slots are more than serve.cartridge_slots='
        f'{self._bank.member_slots}: name fewer.'
      )
    return parts

  def _composed(self, cartridge: Composition, parts: Sequence[Cartridge]) -> Tree:
    """Return a composition as the pool takes it."""
    whole = composition.composed(parts, cartridge.positions, self._architecture, ', '.join(cartridge.versions))
    return lora_pool.cartridge(self._bank, whole.keys, whole.values)

  def cancel(self, handle: Handle) -> None:
    """Cancel a sampling request; it ends with the next `turn`."""
    self._resident.cancel(handle)

  def turn(self) -> bool:
    """Decode one chunk of tokens in all rows; return whether any request is in progress."""
    if self._loaded:  # The sampler's copy of the pool is made once for all versions that were loaded since.
      self._resident.use(self._snapshots.factors)
      self._loaded = False
    busy = self._resident.turn()
    self._let_go()
    return busy

  def tell(self) -> None:
    """Pass the results of the last turn to their requests; otherwise the next turn does."""
    self._resident.tell()
    self._let_go()

  def _let_go(self) -> None:
    for handle, used in self._sampling:
      if handle.done:
        for kind, name in used:
          kind.places.let_go(name)
    self._sampling = [(handle, used) for handle, used in self._sampling if not handle.done]

  def end(self, error: BaseException) -> None:
    """End sampling for good; every request in progress raises this error."""
    self._resident.end(error)

  @property
  def counts(self) -> dict[str, int]:
    """The numbers of tokens since the start.

    `tokens` were sampled; of prompts, `prefilled` went through the model, and the keys and values of `reused` came from
    cached prefixes.
    """
    stats, own = self._resident.stats, self._rehearsed
    return {'tokens': stats.tokens, 'prefilled': stats.prefilled - own.prefilled, 'reused': stats.reused - own.reused}

  # Scoring.

  def score(
    self,
    version: str,
    rows: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    topk: int = 1,
    ids: Sequence[np.ndarray] | None = None,
  ) -> list[Scored]:
    """Return a version's log-probs and entropies of given tokens.

    Args:
      version: the name of the version; `BASE`: the model without an adapter.
      rows: for each row the prompt and the tokens after it. A row must fit the buckets of teachers' prompts and
        completions, or have at most one token more than the largest score bucket.
      topk: how many of the most likely tokens to return at every position, at most the engine's K; 0: none.
      ids: further tokens to score, [T, M] int32 for each row of T tokens; None: none.

    Raises:
      NoPlaceError: all places for teachers are in use.
      UserError: there is no such version, a row is too long or holds no tokens, the ids do not match the tokens, or
        topk is too large.
    """
    if not 0 <= topk <= self.settings.topk:
      raise UserError(f'topk must be between 0 and {self.settings.topk}, not {short_repr(topk)}.')
    for prompt, tokens in rows:
      check_ids('A row to be scored', [*prompt, *tokens], self._vocab_size)
    if ids is not None and [np.ndim(own) == 2 and len(own) for own in ids] != [len(tokens) for _, tokens in rows]:
      raise UserError('ids must have one row for each of the T tokens of a text, [T, M].')
    texts = [index for index, (prompt, tokens) in enumerate(rows) if self._is_text(prompt, tokens)]
    others = [index for index in range(len(rows)) if index not in set(texts)]
    if others:
      lessons = [Lesson([1], tokens, prompt) for prompt, tokens in (rows[index] for index in others)]
      self._learner.check([Task(0, lessons, _SCORING)])
    member, release = self._teacher(version, _FACTORS)
    pool = self._teachers.factors
    found: dict[int, Scored] = {}
    try:
      if others:
        asked = None if ids is None else [ids[index] for index in others]
        scored = self._learner.score(pool, member, [rows[index] for index in others], asked)
        found |= zip(others, scored, strict=True)
      if texts:
        whole = [[*prompt, *tokens] for prompt, tokens in (rows[index] for index in texts)]
        asked = None if ids is None else [_behind(ids[index], len(rows[index][0]) - 1) for index in texts]
        said = self._texts.score(pool, [(row[:1], row[1:]) for row in whole], member=member, ids=asked)
        for index, scored in zip(texts, said, strict=True):
          found[index] = _last(scored, len(rows[index][1]))
    finally:
      release()
    return [one.with_top(topk) for _, one in sorted(found.items())]

  def _is_text(self, prompt: Sequence[int], tokens: Sequence[int]) -> bool:
    """Return whether a row must be scored as one text, since it does not fit the prompt and completion buckets.

    Raises:
      UserError: it does not fit the score buckets either.
    """
    settings = self.settings
    if not settings.score_buckets or not len(prompt) or not len(tokens):
      return False
    if len(prompt) <= settings.teacher_buckets[-1] and len(tokens) <= settings.response_buckets[-1]:
      return False
    length, most = len(prompt) + len(tokens), settings.score_buckets[-1] + 1
    if length > most:
      raise UserError(f'A text has {length} tokens, more than the limit of {most}.')
    return True

  # Learning.

  def learn(self, *given: Any, **more: Any) -> list[Learned]:
    """Learn from feedback in one go, see `learn_in_pieces`."""
    return whole(self.learn_in_pieces(*given, **more))

  def learn_in_pieces(
    self, feedback: Sequence[Feedback], keep: Callable[[int, Learned], bool] = lambda *_: True
  ) -> Generator[float, None, list[Learned]]:
    """Learn from feedback, each for another version, in one pass, of which there may be one at a time.

    Between two pieces, all other methods may be called; no version is there before the end, and none ever if the
    generator is closed.

    Args:
      feedback: the feedback, at most as many as there are slots.
      keep: maps (index of the feedback, result) to whether to store the new version. If not, or if a gradient was not
        finite, there is no new version.

    Yields:
      After every micro-batch, what part of the whole it was.

    Raises:
      UserError: a feedback cannot be learned from; nothing has changed.
      NoPlaceError: all slots or places for teachers are in use; nothing has changed.
    """
    for each in feedback:
      if each.new in self:
        raise UserError(f'The version {each.new} exists already, and versions never change.')
    if len({each.new for each in feedback}) < len(feedback):
      raise UserError('Two feedbacks have the same name for their new version: each needs its own.')
    if not feedback:
      return []
    taken: list[str] = []
    stored: list[str] = []
    releases: list[Callable[[], None]] = []
    try:
      tasks = []
      for each in feedback:
        slot = self._slot(each.version, taken)
        teacher, release = self._teacher_of(each)
        releases.append(release)
        itself = each.teacher in ('live', TEACHING_VERSION + each.version)
        tasks.append(Task(slot, each.lessons, each.update, teacher, itself))
      self._learner.check(tasks)
      for index, each in enumerate(feedback):
        if each.teacher.startswith(TEACHING_MODEL):
          tasks[index] = yield from self._taught(each, tasks[index])
      state, self._slots = self._slots, None  # Donated: the buffers are gone if this fails.
      state, learned = yield from self._learner.learn(state, lambda: self._teachers.factors, tasks)
      self._slots = state
      for index, (each, task, came) in enumerate(zip(feedback, tasks, learned, strict=True)):
        if came.stepped and keep(index, came):
          self._store(each, task.slot)
          stored.append(each.new)
          taken.remove(each.version)
          self._slot_places.rename(each.version, each.new)
          self._slot_places.let_go(each.new)
    except BaseException as error:
      for new in stored:  # Either all versions are stored or none.
        self._slot_places.forget(new)
        for name in (new, optimizer_name(new)):
          self._shelf.drop(name)
      if not isinstance(error, (UserError, NoPlaceError)):
        self._slots = None  # The buffers may be gone; the shelf has all their versions.
      raise
    finally:
      for release in releases:
        release()
      for version in taken:  # These slots were trained, so they no longer hold their version.
        self._slot_places.let_go(version)
        self._slot_places.forget(version)
      if self._slots is None:
        self._slot_places = Places(self.settings.slots)
    return learned

  def _slot(self, version: str, taken: list[str]) -> int:
    """Copy a version into a slot, unless one has it, and return the index; the version is added to `taken`."""
    if version == BASE:
      raise UserError('The model without an adapter cannot learn: name a version.')
    if version in taken:
      raise UserError(f'{version} cannot learn from two feedbacks at once: send one after the other.')
    arrays = self._learned(version)
    place = self._slot_places.take(version)
    taken.append(version)
    if self._slots is None:
      self._slots = self._fresh_slots()
    if not place.filled:
      state = self._state(version)
      if _COUNT in state:
        mu, nu, count = self._tree(state, _MU), self._tree(state, _NU), state[_COUNT]
      else:
        mu = nu = parameters.map_table(lambda row: np.zeros(row.shape, np.float32), self._table)
        count = np.zeros((), np.int32)
      own = _own_state(self._tree(arrays, _FACTORS), mu, nu, count)
      self._slots = self._put_slot(self._slots, np.int32(place.index), own)
    return place.index

  def _fresh_slots(self) -> SlotState:
    return training_pool.fresh(lora_pool.empty(self._trained.parameter_table(), self._trained.backend.mesh))

  def _store(self, feedback: Feedback, slot: int) -> None:
    """Store the contents of a slot as the new version of a feedback."""
    own = jax.device_get(self._get_slot(self._slots, np.int32(slot)))
    factors = self._flat(_FACTORS, own.trainable)
    state = {_COUNT: np.asarray(own.moments.count)} | self._flat(_MU, own.moments.mu) | self._flat(_NU, own.moments.nu)
    if feedback.average_rate is not None:
      before = self.factors(feedback.version, _AVERAGE)
      for row in self._table:
        average, value = parameters.get(before, row.path), factors[f'{_FACTORS}/{row.name}']
        state[f'{_AVERAGE}/{row.name}'] = averaging.average(average, value, np.float32(feedback.average_rate))
    self._shelf.put(optimizer_name(feedback.new), state)
    try:
      self._shelf.put(feedback.new, factors)
    except BaseException:
      self._shelf.drop(optimizer_name(feedback.new))
      raise

  def _state(self, version: str) -> Arrays:
    """Return the optimizer state of a version; empty: it has none."""
    name = optimizer_name(version)
    return self.arrays(name) if name in self._shelf else {}

  def _taught(self, feedback: Feedback, task: Task) -> Generator[float, None, Task]:
    """Return a task with the log-probs of the other model that the feedback names as its teacher, in pieces."""
    scorer, said, rows = self._models[feedback.teacher.removeprefix(TEACHING_MODEL)], [], self.settings.training_rows
    asked = [(lesson.teacher_prompt, lesson.completion) for lesson in task.lessons if lesson.taught is None]
    for start in range(0, len(asked), rows):
      said += scorer.score({}, asked[start : start + rows])
      yield 0.0
    taught = [Taught(scored.top_ids, scored.top_log_probs, scored.log_probs) for scored in said]
    return dataclasses.replace(task, lessons=with_taught(task.lessons, taught))

  def _teacher_of(self, feedback: Feedback) -> tuple[int, Callable[[], None]]:
    """Return the place of the teacher that a feedback names, filled, and a function that releases it."""
    teacher, is_given = feedback.teacher, feedback.teacher == 'given'
    # A lesson with a loss of its own has no teacher.
    if any((lesson.taught is None) == is_given for lesson in feedback.lessons if lesson.loss is None):
      raise UserError(
        f'teacher={teacher!r} requires lessons {"with" if is_given else "without"} log-probs of the teacher; only '
        "teacher='given' takes those with them."
      )
    kinds = {'live': (feedback.version, _FACTORS), 'average': (feedback.version, _AVERAGE), 'base': (BASE, _FACTORS)}
    if teacher.startswith(TEACHING_VERSION):
      kinds[teacher] = (teacher.removeprefix(TEACHING_VERSION), _FACTORS)
    elif teacher.startswith(TEACHING_MODEL):
      name = teacher.removeprefix(TEACHING_MODEL)
      if name not in self._models:
        raise UserError(f'There is no model {short_repr(name)} to teach, only: {", ".join(self._models) or "none"}.')
    if is_given or teacher.startswith(TEACHING_MODEL):
      return NO_MEMBER, lambda: None
    if teacher not in kinds:
      raise UserError(
        f"teacher must be 'live', 'average', 'base', 'given', 'version:NAME' or 'model:NAME', not {teacher!r}."
      )
    return self._teacher(*kinds[teacher])

  def _teacher(self, version: str, kind: str) -> tuple[int, Callable[[], None]]:
    """Return the place of a teacher, filled, and a function that releases it."""
    if version == BASE:
      return NO_MEMBER, lambda: None
    factors, key = self.factors(version, kind), (kind, version)
    place = self._teacher_places.take(key)
    if not place.filled:
      try:
        self._teachers.put(place.index, factors)
      except BaseException:
        self._teacher_places.let_go(key)
        self._teacher_places.forget(key)
        raise
    return place.index, functools.partial(self._teacher_places.let_go, key)

  # Arrays of versions.

  def _tree(self, arrays: Arrays, kind: str) -> Tree:
    return parameters.map_table(lambda row: arrays[f'{kind}/{row.name}'], self._table)

  def _flat(self, kind: str, tree: Tree) -> dict[str, np.ndarray]:
    """Return a copy of a tree as arrays of a version, by their names."""
    return {f'{kind}/{row.name}': np.array(parameters.get(tree, row.path), np.float32) for row in self._table}


def _has_average(arrays: Arrays) -> bool:
  return any(name.startswith(f'{_AVERAGE}/') for name in arrays)


def checked_cartridge(name: str, arrays: Arrays, settings: EngineSettings, sizes: Architecture) -> Arrays:
  """Return read-only arrays of a cartridge.

  Args:
    name: what the message of an error begins with.
    arrays: see `records.KEYS`.
    settings: the sizes of the engine.
    sizes: the architecture of the model.

  Raises:
    UserError: they do not fit the model, have values that no model computes, or no cartridges are served.
  """
  if not settings.cartridges:
    raise UserError(f'{name} cannot be read, since this service serves none: set serve.cartridges.')
  found, most = {name: np.asarray(array) for name, array in arrays.items()}, settings.cartridge_slots
  slots = found[KEYS].shape[2:3] if KEYS in found else ()
  wanted = (sizes.layers, sizes.kv_heads, *slots, sizes.head_dim)
  expected = {kind: (wanted, np.dtype(np.float32)) for kind in (KEYS, VALUES)}
  expected |= {kind: ((), np.dtype(np.int32)) for kind in (FROZEN, WINDOWED)}
  if {kind: (array.shape, array.dtype) for kind, array in found.items()} != expected:
    shown = ', '.join(f'{printable(kind)} {array.dtype.name} {array.shape}' for kind, array in sorted(found.items()))
    raise UserError(
      f'{name} has {shown}, but the model has float32 keys and values of {sizes.layers} layers, {sizes.kv_heads} '
      f'heads, any number of slots and {sizes.head_dim} elements of a head.'
    )
  if not 1 <= slots[0] <= most:
    raise UserError(f'{name} has {slots[0]} slots, but serve.cartridge_slots={most} are served.')
  if sizes.windows is not None and bool(found[WINDOWED]) != (settings.cartridge_window == 'windowed'):
    raise UserError(
      f'{name} was trained with another model.cartridge.sliding_window than serve.cartridge_window='
      f'{settings.cartridge_window}.'
    )
  for kind in (KEYS, VALUES):
    damaged = ~(abs(found[kind]) <= LARGEST_SLOT)
    if damaged.any():
      layer, _, slot, _ = np.unravel_index(damaged.argmax(), damaged.shape)
      raise UserError(
        f'{name} has {kind} in slot {slot} of layer {layer} that are not finite, or larger than {LARGEST_SLOT:.0f}.'
      )
  return {kind: array.copy() if array.flags.writeable else array for kind, array in found.items()}


def cartridge_bytes(settings: EngineSettings, sizes: Architecture) -> int:
  """Return the bytes of the largest cartridge on the host; 0 if none are served."""
  return bool(settings.cartridges) * 2 * 4 * sizes.layers * sizes.kv_heads * settings.cartridge_slots * sizes.head_dim


def memory_for(settings: EngineSettings, count: int, sizes: Architecture) -> int:
  """Return the bytes of host memory for versions of `count` factors: twice as many as have places on the devices.

  The second half is for the versions that learning makes, whose optimizer state is included. The result is at least
  1 GiB.
  """
  places = settings.snapshots + settings.teachers + settings.slots
  factors = 4 * count * (places + 3 * settings.slots)
  return max(2**30, 2 * (factors + settings.cartridges * cartridge_bytes(settings, sizes)))


def bank_of(policy: DecoderPolicy, settings: EngineSettings) -> KVPrefix | None:
  """Return the bank of cartridges to sample with; None: there is none."""
  if not settings.cartridges:
    return None
  mesh = policy.backend.mesh
  return KVPrefix(
    0,
    0,
    within_windows=settings.cartridge_window == 'windowed',
    members=settings.cartridges,
    member_slots=settings.cartridge_slots,
    rows_alike=math.gcd(settings.rows // (1 if mesh is None else mesh.shape[FSDP]), _ALIKE),
  )


def check_divides(settings: EngineSettings, policy: DecoderPolicy) -> None:
  """Raise UserError unless the rows of an engine can be divided over the mesh of its policy."""
  mesh = policy.backend.mesh
  if mesh is None:
    return
  for name, shards in (('rows', mesh.shape[FSDP]), ('training_rows', mesh.size)):
    if getattr(settings, name) % shards:
      raise UserError(
        f'serve.{name}={getattr(settings, name)} must be a multiple of {shards}, the number of parts of the mesh.'
      )


def pooled_policies(
  policy: DecoderPolicy, settings: EngineSettings
) -> tuple[DecoderPolicy, DecoderPolicy, DecoderPolicy]:
  """Return three copies of a policy, to sample, score and train, each with a pool of adapters."""

  def pooled(members: int, decoding: bool) -> DecoderPolicy:
    product = lora_pool.choose_product(settings.product, policy.backend.mesh, decoding=decoding)
    return dataclasses.replace(policy, adapter=LoraPool(policy.adapter, members, product))

  sampled = pooled(settings.snapshots, True)
  sampled = dataclasses.replace(
    sampled, adapter=dataclasses.replace(sampled.adapter, cartridges=bank_of(policy, settings))
  )
  return sampled, pooled(settings.teachers, False), pooled(settings.slots, False)


def pool_functions(sampled: DecoderPolicy, trained: DecoderPolicy) -> dict[str, Callable[..., Any]]:
  """Return the jitted functions that copy versions into pools and slots, and back from a slot.

  Args:
    sampled: the policy with the pool to sample from.
    trained: the policy with the pool of the training slots.
  """
  mesh, table = mesh_of(trained), trained.parameter_table()
  pool_lies = mesh and lora_pool.shardings(table, mesh)
  sampled_lie = mesh and lora_pool.shardings(sampled.parameter_table(), mesh)
  slots_lie = mesh and training_pool.shardings(table, mesh)
  return {
    'put_snapshot': jax.jit(lora_pool.with_member, donate_argnums=0, out_shardings=sampled_lie),
    'put_teacher': jax.jit(lora_pool.with_member, donate_argnums=0, out_shardings=pool_lies),
    'put_slot': jax.jit(training_pool.with_slot, donate_argnums=0, out_shardings=slots_lie),
    'get_slot': jax.jit(training_pool.slot_of),
  }


def _reads(weights: Weights, version: str) -> bool:
  """Return whether samples with these weights read a version, as adapter or as cartridge."""
  return weights.version == version or (weights.slots is not None and version in weights.slots.versions)


class _Sampled:
  """The versions of one kind to sample from: their places in the pool, and how much each has been used."""

  def __init__(self, count: int):
    self.places, self.begun = Places(count), [0] * count  # By place: the samples begun since it got its version.

  def served(self, name: Hashable) -> int | None:
    """Return the samples that a version has begun since it got its place, 0 if it can get one; None: it cannot."""
    index = self.places.index(name)
    if index is not None:
      return self.begun[index]
    return None if self.places.full else 0

  def take(self, name: Hashable, load: Callable[[int], None]) -> int:
    """Return the place of a version for one use, after `load` has filled it unless it was."""
    place = self.places.take(name)
    if not place.filled:
      try:
        load(place.index)
      except BaseException:
        self.places.let_go(name)
        self.places.forget(name)
        raise
      self.begun[place.index] = 0
    return place.index


class _Pool:
  """The factors of several versions on the devices, and cartridges; one version is replaced at a time."""

  def __init__(self, policy: DecoderPolicy, dtype: str, with_member: Callable[..., Tree]):
    self.factors: Tree = lora_pool.empty(policy.parameter_table(), policy.backend.mesh, dtype)
    self._with_member = with_member

  def put(self, index: int, own: Tree) -> None:
    """Put factors, or a cartridge, into a place that nothing uses."""
    self.factors = self._with_member(self.factors, np.int32(index), own)


def _behind(ids: np.ndarray, more: int) -> np.ndarray:
  """Return ids [T, M] after `more` rows of −1, which stand for no token."""
  return np.concatenate([np.full((more, ids.shape[1]), -1, np.int32), ids])


def _last(scored: Scored, count: int) -> Scored:
  """Return the scores of the last `count` tokens of a row."""
  return Scored(**{name: None if array is None else array[-count:] for name, array in vars(scored).items()})


def _own_state(factors: Tree, mu: Tree, nu: Tree, count: np.ndarray) -> SlotState:
  return SlotState(factors, optax.ScaleByAdamState(count, mu, nu))
