"""Arithmetic estimate of a run's memory per device; the planner, which compiles the programs, is more exact."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import math
import os
from typing import Any

import jax

from sdpo_jax.config import Config
from sdpo_jax.distributed import accelerators
from sdpo_jax.distributed import mesh as meshes
from sdpo_jax.distributed.mesh import FSDP, RULES, TENSOR, parameter_sharding
from sdpo_jax.distributed.programs import leaf_bytes
from sdpo_jax.learning import batching
from sdpo_jax.learning.update import abstract_state
from sdpo_jax.models import parameters as parameter_tables
from sdpo_jax.models.policy import Policy
from sdpo_jax.rollout.functions import cache_shardings, sampler_functions
from sdpo_jax.rollout.sizes import shard_rows
from sdpo_jax.training import cartridges, feedback_writing, reference_policies, teacher_model
from sdpo_jax.training.carry_over import most_samples
from sdpo_jax.training.run_programs import abstract_parameters, abstract_teacher
from sdpo_jax.training.specs import batch_spec, declared_buckets, objective_spec, update_spec
from sdpo_jax.types import Tree

GIB = 2**30
LOGITS = 3  # Chunk-sized arrays that exist at one time: student, teacher, gradient.


@dataclasses.dataclass(frozen=True)
class Memory:
  """Estimated bytes on one device, by purpose."""

  held: Mapping[str, float]  # In use all the time.
  sampling: Mapping[str, float]  # In addition while sampling, with all rows at their limits.
  update: Mapping[str, float]  # In addition during an update, with the longest rows.

  @property
  def peak(self) -> float:
    """Return the peak memory: what is always in use plus the larger of the two phases."""
    return sum(self.held.values()) + max(sum(self.sampling.values()), sum(self.update.values()))


def estimate(config: Config, policy: Policy, mesh: jax.sharding.Mesh, document: int = 0) -> Memory:
  """Estimate the memory of a run on each device of a mesh.

  Args:
    config: settings.
    policy: the model, on the mesh.
    mesh: the run's mesh.
    document: tokens of the document that a cartridge's teacher reads.
  """
  base, trainable = abstract_parameters(policy, mesh)
  table = policy.parameter_table()
  state = abstract_state(update_spec(config), trainable, mesh, table)
  item = jax.numpy.dtype(config.model.dtype).itemsize
  held = {
    'parameters': _bytes(base) + _bytes(state.trainable),
    'optimizer': _bytes(state.opt_state),
    'teacher': _bytes(state.teacher),
  }
  references = reference_policies.abstract(objective_spec(config), table, trainable, config.model.dtype)
  held |= {f'{name} policy': _bytes(reference) for name, reference in references.items()}
  if document:
    held['document'] = _bytes(cartridges.abstract_document_teacher(config, policy, mesh, document).base)
  if teacher_model.is_used(config):
    held['teacher model'] = _bytes(abstract_teacher(config, mesh).base)
  if own := _copied(mesh, item, _prepared(policy, mesh, base)):
    held['base to sample with'] = own
  trained = parameter_tables.trainable(table)
  weights = 0.0 if item == 4 and mesh.shape[FSDP] == 1 else _copied(mesh, item, trained)
  cache = _cache(config, policy, mesh)
  if config.rollout.max_staleness and config.rollout.carried_cache == 'kept':
    held['carried keys and values'] = cache
  if feedback_writing.writes_itself(config):  # After the completions, with its own cache.
    cache = max(cache, _cache(feedback_writing.sampler_settings(config), policy, mesh))
  sampling = {'weights to sample with': weights, 'KV cache': cache}
  update = {
    'gradients': _bytes(state.trainable),
    'activations': _activations(config, policy, mesh, item),
    'logits': _logits(config, policy, mesh),
  }
  return Memory(held, sampling, update)


def of_device(device: jax.Device) -> float | None:
  """Return the bytes available to programs on a device (for a CPU its share of memory); None if unknown."""
  if device.platform == 'cpu':
    return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / jax.local_device_count()
  limit = (device.memory_stats() or {}).get('bytes_limit')
  if limit:
    return float(limit)
  chip = accelerators.find(device.device_kind)
  return None if chip is None or chip.memory_gib is None else chip.memory_gib * GIB


def readable(size: float) -> str:
  """Format a number of bytes with a unit."""
  for unit, scale in (('GiB', GIB), ('MiB', 2**20)):
    if size >= scale / 10:
      return f'{size / scale:,.2f} {unit}'
  return f'{size / 2**10:,.1f} KiB'


def _bytes(tree: Any) -> float:
  """Return the bytes of abstract arrays on one device."""
  return float(sum(leaf_bytes(tree)))


def _prepared(policy: Policy, mesh: jax.sharding.Mesh, base: Tree) -> parameter_tables.Table:
  """Return the frozen parameters that the sampler holds a second time, in another layout or dtype."""
  stays = {place for place in sampler_functions(policy, mesh).prepare_base(base).stays if place is not None}
  leaves, form = jax.tree.flatten(base)
  places = form.unflatten(range(len(leaves)))
  table = parameter_tables.frozen(policy.parameter_table())
  return tuple(parameter for parameter in table if parameter_tables.get(places, parameter.path) not in stays)


def _copied(mesh: jax.sharding.Mesh, item: int, table: parameter_tables.Table) -> float:
  """Return the bytes of the copy in compute dtype from which every group of devices samples."""
  total = 0.0
  for parameter in table:
    split = parameter_sharding(mesh, parameter.axes, parameter.shape).spec
    shards = mesh.shape[TENSOR] if TENSOR in jax.tree.leaves(tuple(split)) else 1
    total += math.prod(parameter.shape) / shards * (item if parameter.compute else 4)
  return total


def _cache(config: Config, policy: Policy, mesh: jax.sharding.Mesh) -> float:
  """Return the bytes of the keys and values of all rows that are decoded at once."""
  declared = declared_buckets(config)
  samples = most_samples(config, 0)
  groups = mesh.shape[FSDP]
  rows = groups * shard_rows(samples, config.rollout.max_batch_rows, groups)
  slots = declared.prompt[-1] + declared.response[-1]
  quantized = config.rollout.cache_dtype == 'int8'
  cache = jax.eval_shape(lambda: policy.init_cache(rows, slots, quantized))
  return _bytes(meshes.abstract(cache, cache_shardings(mesh, cache)))


def _activations(config: Config, policy: Policy, mesh: jax.sharding.Mesh, item: int) -> float:
  """Return the approximate bytes that the student's forward pass keeps for the backward pass, by `model.remat`."""
  sizes = policy.config
  declared = declared_buckets(config)
  tokens = declared.prompt[-1] + declared.response[-1]
  rows = batching.micro_batch_rows(batch_spec(config), mesh.size) // mesh.size
  heads = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
  kept = {
    'full': sizes.hidden_size,
    'save_attention': sizes.hidden_size + sizes.heads * sizes.head_dim,
    'dots': 3 * sizes.hidden_size + heads + 2 * sizes.intermediate_size,
    'none': 6 * sizes.hidden_size + 2 * heads + 4 * sizes.intermediate_size,
  }
  return float(rows * tokens * sizes.layers * kept[config.model.remat] * item)


def _logits(config: Config, policy: Policy, mesh: jax.sharding.Mesh) -> float:
  """Return the bytes of the float32 logits that exist at one time."""
  vocabulary = policy.config.padded_vocab_size
  shards = mesh.shape[RULES['vocab']] if vocabulary % mesh.shape[RULES['vocab']] == 0 else 1
  arrays = LOGITS if objective_spec(config).needs_teacher else LOGITS - 1
  return float(arrays * config.actor.logits_chunk_size * vocabulary / shards * 4)
