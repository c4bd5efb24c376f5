"""Cartridges in a run: the initial values of the slots, and the teacher that reads the document instead of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools

import jax
import numpy as np

from sdpo_jax.config import Config
from sdpo_jax.distributed.mesh import replicated
from sdpo_jax.distributed.programs import Program
from sdpo_jax.models import parameters
from sdpo_jax.models.adapters import kv_prefix, named_cartridges
from sdpo_jax.models.adapters.cartridge import Cartridge
from sdpo_jax.models.adapters.kv_prefix import KVPrefix
from sdpo_jax.models.decoder import DecoderPolicy
from sdpo_jax.rollout.weights import base_preparation
from sdpo_jax.teacher.signal import Teacher
from sdpo_jax.training.documents import Texts, prefix_of
from sdpo_jax.training.run_programs import abstract_table
from sdpo_jax.training.session import Session
from sdpo_jax.types import Tree


def with_slots(config: Config, policy: DecoderPolicy, model: Tree, texts: Texts) -> Tree:
  """Return the parameters of a policy with a cartridge: the model's, and the initial slots.

  The same settings give the same slots at every start, including frozen ones, which are in no checkpoint.

  Args:
    config: settings with a cartridge.
    policy: policy with the cartridge, on its mesh.
    model: parameters of the model alone.
    texts: texts that the settings name.

  Raises:
    UserError: the cartridge to start from is damaged, or belongs to another model.
  """
  settings, sizes = config.model.cartridge, policy.config
  if settings.path:
    found = named_cartridges.read(settings.path, config.model.path, sizes, settings.positions)
    keys, values = found.keys, found.values
  elif texts.initial is not None:
    keys, values = kv_prefix.read_text(policy.base_policy(), _prepared(policy, model), texts.initial)
  else:
    shape = sizes.layers, sizes.kv_heads, policy.adapter.slots, sizes.head_dim
    draw = np.random.default_rng(config.seed)
    keys, values = (draw.standard_normal(shape, np.float32) for _ in range(2))
  placed = kv_prefix.place(policy, policy.adapter.without_bank, keys, values)
  return parameters.merge(model, parameters.merge(parameters.merge(*placed), _distractors(config, policy)))


def _distractors(config: Config, policy: DecoderPolicy) -> Tree:
  """Return the bank of the cartridges that are placed beside the trained one; empty if there are none."""
  paths, sizes = config.model.cartridge.distractors, policy.config
  if not paths:
    return {}
  prefix = policy.adapter.bank_alone
  bank, put = kv_prefix.empty_slots(policy, prefix), kv_prefix.bank_writer(dataclasses.replace(policy, adapter=prefix))
  for place, path in enumerate(paths):
    other = named_cartridges.read(path, config.model.path, sizes)
    slots = kv_prefix.KVPrefix(other.slots, other.slots)
    bank = put(
      bank, kv_prefix.place(policy, slots, other.keys, other.values)[0], np.int32(place), np.int32(other.slots)
    )
  return bank


def of_session(session: Session, slots: Tree) -> Cartridge:
  """Return the cartridge of a session on the host, the same in every process of a run; all processes call this.

  Args:
    session: session with a cartridge.
    slots: the trained slots.
  """
  prefix = session.policy.adapter
  keys, values = (np.asarray(array.addressable_data(0)) for array in _joiner(prefix, session.mesh)(session.base, slots))
  return Cartridge(keys, values, prefix.frozen, prefix.within_windows)


@functools.lru_cache(maxsize=1)
def _joiner(prefix: KVPrefix, mesh: jax.sharding.Mesh) -> Callable[[Tree, Tree], tuple[jax.Array, jax.Array]]:
  return jax.jit(functools.partial(kv_prefix.joined, prefix), out_shardings=replicated(mesh))


def _prepared(policy: DecoderPolicy, model: Tree) -> Tree:
  """Return a model's parameters as prepared for sampling, so that they are gathered once for all parts of a text."""
  return base_preparation(policy.base_policy(), policy.backend.mesh, model).run(model)


def document_teacher(config: Config, policy: DecoderPolicy, model: Tree, document: Sequence[int]) -> Teacher:
  """Return the teacher of a cartridge: the frozen model, with the document before every prompt.

  The document is read once, here. Its keys and values, in compute dtype, are the teacher's base; the model's own arrays
  are those of the student. Layers with windows see as much of the document as they would of its tokens.

  Args:
    config: settings with a cartridge.
    policy: policy of the student, on its mesh.
    model: parameters of the model alone.
    document: tokens of the document.
  """
  reader = _reader(config, policy, len(document))
  read = kv_prefix.read_slots(policy.base_policy(), _prepared(policy, model), document, reader.adapter.parts)
  return Teacher(reader, read, beside_student=True)


def abstract_document_teacher(config: Config, policy: DecoderPolicy, mesh: jax.sharding.Mesh, tokens: int) -> Teacher:
  """Return the teacher that reads `tokens` tokens, or chunks of as many, with abstract arrays as its base."""
  reader = _reader(config, policy, tokens)
  rows = reader.adapter.rows(policy.base_policy().parameter_table(), policy.dtype)
  return Teacher(reader, abstract_table(rows, mesh), beside_student=True)


def reading_programs(
  config: Config, policy: DecoderPolicy, base: Tree, mesh: jax.sharding.Mesh, tokens: int
) -> tuple[dict[str, Program], int]:
  """Return the programs with which a teacher reads a document, or one chunk, of `tokens` tokens.

  Training steps use them for chunks only.

  Args:
    config: settings with a cartridge.
    policy: policy of the student, on its mesh.
    base: frozen parameters of the policy, as abstract arrays.
    mesh: mesh of the run.
    tokens: number of tokens of the document.

  Returns:
    Programs by name, `document/gather` (if the model is gathered first) and `document/read`; and the number of times
    that the latter runs.
  """
  alone = policy.base_policy()
  model = parameters.select(alone.parameter_table(), base)
  prefix = kv_prefix.filling(tokens, _reader(config, policy, tokens).adapter.parts)
  part, starts = kv_prefix.schedule(prefix)
  held = abstract_table(prefix.rows(alone.parameter_table(), policy.dtype), mesh)
  prepared = base_preparation(alone, mesh, model)
  found, inherits = {}, {}
  if prepared.program is not None:
    found['document/gather'] = Program('gather document', prepared.program, (model,), holds=('base',))
    inherits[0] = 'document/gather', None
  found['document/read'] = Program(
    'read document',
    kv_prefix.reader(dataclasses.replace(alone, adapter=prefix)),
    (
      prepared.describe(model),
      held,
      jax.ShapeDtypeStruct((1, part), np.int32),
      jax.ShapeDtypeStruct((), np.int32),
    ),
    holds=(prepared.kinds('base', 'gathered base'), 'teacher base', 'batch', 'batch'),
    inherits=inherits,
    capacity=prefix.room,
    rows=1,
  )
  bank = _reader(config, policy, tokens)
  if bank.pooled:
    number = jax.ShapeDtypeStruct((), np.int32)
    kept = abstract_table(bank.adapter.rows(alone.parameter_table(), policy.dtype), mesh)
    arguments, holds = (kept, held, number, number), ('teacher base', 'batch', 'batch', 'batch')
    found['document/keep'] = Program('keep chunk', kv_prefix.bank_writer(bank), arguments, holds=holds)
  return found, len(starts)


def _reader(config: Config, policy: DecoderPolicy, tokens: int) -> DecoderPolicy:
  """Return the policy of the model with the document before its prompts."""
  return dataclasses.replace(policy, adapter=prefix_of(config, policy, tokens))
