"""Cost of an update of an adapter: frozen matrices have no gradients, which would take time and memory."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest

from sdpo_jax.config import Config, LoraConfig, ModelConfig
from sdpo_jax.distributed.mesh import make_mesh
from sdpo_jax.learning.update import abstract_state, make_update
from sdpo_jax.models import huggingface, parameters
from sdpo_jax.models.adapters import lora
from sdpo_jax.models.adapters.lora_pool import LoraPool
from sdpo_jax.planner import hlo
from sdpo_jax.training.run_programs import abstract_batch, abstract_table
from sdpo_jax.training.specs import objective_spec, update_spec
from tests.compiling import compile_as_users
from tests.models.small_policies import CONFIG

LAYERS, RANK, TOPK, VOCAB, MEMBERS = 3, 4, 8, 5000, 5
ROWS, PROMPT, REPROMPT, RESPONSE = 2, 16, 24, 40


@functools.cache
def compiled(rank, remat='none', pool=None):
  """Return (program, parameter table) of an update; with a pool, every row has an adapter of its own."""
  settings = ModelConfig(dtype='float32', remat=remat, lora=LoraConfig(rank=rank))
  mesh = make_mesh(Config().mesh, jax.devices()[:1])
  values = CONFIG | {'vocab_size': VOCAB, 'num_hidden_layers': LAYERS, 'tie_word_embeddings': True}
  policy = huggingface.describe(values, settings).on(mesh)
  if pool is not None:
    policy = dataclasses.replace(policy, adapter=LoraPool(policy.adapter, MEMBERS, pool))
  config = Config(model=settings)
  config.actor.self_distillation.distillation_topk = TOPK
  table = policy.parameter_table()
  tree = abstract_table(table, mesh)
  base, trainable = parameters.split(table, tree)
  state = abstract_state(update_spec(config), trainable, mesh, table)
  update = make_update(policy, update_spec(config), jax.tree.map(lambda leaf: leaf.sharding, state))
  batch = abstract_batch(ROWS, PROMPT, REPROMPT, RESPONSE, spec=objective_spec(config), mesh=mesh)
  if pool is not None:
    members = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    batch = batch.replace(**{side: getattr(batch, side).replace(members=members) for side in ('student', 'teacher')})
  return compile_as_users(update.accumulate.lower(base, state, trainable, batch)), table


def operations(program):
  return hlo.matmul_flops(hlo.trace(hlo.parse(program.as_text())))


@pytest.mark.slow
@pytest.mark.parametrize('remat', ['none', pytest.param('full', marks=pytest.mark.campaign)])
def test_a_frozen_matrix_is_multiplied_by_twice_and_has_no_gradient(remat):
  """By hand: a trained matrix costs three products per token of the student, a frozen one two, and the teacher's
  one.
  """
  (whole, _), (adapter, table) = compiled(None, remat), compiled(RANK, remat)
  student, teacher, scored = (ROWS * width for width in (PROMPT + RESPONSE, REPROMPT + RESPONSE, RESPONSE))
  matrices = sum(math.prod(p.shape) for p in lora.linear(lora.without_factors(table)))
  factors = sum(math.prod(p.shape) for p in lora.factors(table))
  embedding = math.prod(next(p.shape for p in table if p.name == 'embedding'))
  width = CONFIG['hidden_size']
  again = 1 if remat == 'full' else 0  # A forward pass of the factors that the backward pass repeats.
  saved = 2 * student * matrices + 2 * scored * embedding
  # The factors' own products, and those with the unembedding's entries of the top K and the target, which is how the
  # gradient by the states is made where logits are not kept.
  added = 2 * ((3 + again) * student + teacher) * factors + 2 * scored * (TOPK + 1) * width
  assert operations(whole) - operations(adapter) == pytest.approx(saved - added, rel=0.01)
  assert operations(adapter) < operations(whole)


@pytest.mark.slow
@pytest.mark.parametrize('pool', [None, 'gather', pytest.param('masked', marks=pytest.mark.campaign)])
def test_an_update_of_an_adapter_holds_nothing_of_the_size_of_the_base(pool):
  """It has no gradients of frozen matrices, zeros in their place, or copies; an update of the whole model has."""
  (whole, _), (adapter, table) = compiled(None), compiled(RANK, pool=pool)
  frozen = {p.shape for p in table if p.name == 'embedding' or p in lora.linear(lora.without_factors(table))}
  embedding = next(p.shape for p in table if p.name == 'embedding')

  def made(program):
    """Return the shapes of frozen matrices that occur as results of operations other than views."""
    lines = [line for line in program.as_text().splitlines() if not re.search(r' (parameter|bitcast|get-tuple)', line)]
    found = [re.match(r'\s*(?:ROOT )?%?[\w.-]+ = f32\[([\d,]+)\]', line) for line in lines]
    return {tuple(map(int, match[1].split(','))) for match in found if match} & frozen

  assert embedding in made(whole)
  assert made(adapter) == set()
  size = 4 * math.prod(embedding)
  temporary = adapter.memory_analysis().temp_size_in_bytes
  assert temporary < whole.memory_analysis().temp_size_in_bytes - size
  assert adapter.memory_analysis().output_size_in_bytes < size
