"""Rows that read adapters and cartridges of one pool, in groups of slots: each gets what it would get alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdpo_jax.config import LoraConfig, MeshConfig, ModelConfig
from sdpo_jax.distributed.mesh import make_mesh, parameter_sharding
from sdpo_jax.models import huggingface, parameters
from sdpo_jax.models.adapters import kv_prefix, lora, lora_pool
from sdpo_jax.models.adapters.kv_prefix import KVPrefix
from sdpo_jax.models.adapters.lora_pool import LoraPool
from sdpo_jax.models.policy import NO_MEMBER
from sdpo_jax.rollout.fair_queue import Payer
from sdpo_jax.rollout.resident import Resident, Weights
from sdpo_jax.rollout.sampler import Sampler
from sdpo_jax.rollout.slot_groups import SlotGroups
from tests import tiers
from tests.letters import CONFIG, TOKENIZER

ADAPTERS, LENGTHS, SLOTS = 2, (5, 3, 6), 6
SETTINGS = dict(prompt_buckets=(8,), response_buckets=(12,), max_batch_rows=8, decode_chunk=3, stop_token_ids=(30,))


@pytest.fixture(scope='module', params=[1, pytest.param(3, marks=pytest.mark.slow)])
def model(request):
  """(policy of one adapter, base, factors of all adapters, slots of all cartridges); more layers are scanned."""
  shape = CONFIG | {'num_hidden_layers': request.param}
  policy = huggingface.describe(shape, ModelConfig(dtype='float32', lora=LoraConfig(rank=2, alpha=4.0))).on(None)
  table, draw = policy.parameter_table(), np.random.default_rng(1)
  base = parameters.initialise(parameters.frozen(table), jax.random.key(1), 0.3)

  def normal(*size):
    return (0.5 * draw.standard_normal(size)).astype(np.float32)

  factors = [parameters.map_table(lambda row: normal(*row.shape), parameters.trainable(table)) for _ in range(ADAPTERS)]
  sizes = policy.config
  slots = [[normal(sizes.layers, sizes.kv_heads, count, sizes.head_dim) for _ in range(2)] for count in LENGTHS]
  return policy, base, factors, slots


def pool_of(model, mesh=None, alike=2, kind=None):
  """Return (policy, pool) with all adapters and cartridges."""
  policy, _, factors, slots = model
  bank = KVPrefix(0, 0, members=len(LENGTHS), member_slots=SLOTS, rows_alike=alike)
  policy = dataclasses.replace(policy, adapter=LoraPool(policy.adapter, ADAPTERS, cartridges=bank)).on(mesh)
  if kind is not None:
    policy = dataclasses.replace(policy, backend=dataclasses.replace(policy.backend, kind=kind, interpret=True))
  pool = lora_pool.empty(policy.parameter_table(), mesh)
  for index, own in enumerate(factors):
    pool = lora_pool.with_member(pool, index, own)
  for index, (keys, values) in enumerate(slots):
    pool = lora_pool.with_member(pool, index, lora_pool.cartridge(bank, keys, values))
  return policy, pool


def merged(model, adapter):
  """Return the parameters of the model with an adapter merged into it."""
  policy, base, factors, _ = model
  if adapter == NO_MEMBER:
    return base
  scale = {target.name: target.scales for target in policy.adapter.targets}

  def add(row, leaf):
    if row.name not in scale:
      return leaf
    a, b = (
      parameters.get(factors[adapter], (*row.path[:-1], f'{row.path[-1]}_{suffix}')) for suffix in (lora.A, lora.B)
    )
    layers = [
      scale[row.name][layer] * a[layer].reshape(-1, a.shape[-1]) @ b[layer].reshape(b.shape[1], -1)
      for layer in range(row.layers)
    ]
    return leaf + np.stack(layers).reshape(leaf.shape)

  return parameters.map_tree(add, policy.base_policy().parameter_table(), base)


@pytest.fixture(scope='module')
def expected(model):
  """Return what a sampler of the merged model, with the cartridge as its frozen prefix, draws for a request."""

  def draw(prompt, adapter, cartridge, options):
    policy, params = model[0].base_policy(), merged(model, adapter)
    if cartridge != NO_MEMBER:
      prefix = KVPrefix(LENGTHS[cartridge], LENGTHS[cartridge])
      frozen, _ = kv_prefix.slots(prefix, *map(jnp.asarray, model[3][cartridge]), 'float32')
      policy, params = dataclasses.replace(policy, adapter=prefix), parameters.merge(params, frozen)
      alone = Sampler(policy, TOKENIZER, **SETTINGS).stream(params, {}, [prompt], **options)
    else:
      alone = Sampler(policy, TOKENIZER, **SETTINGS).stream({}, params, [prompt], **options)
    return sorted(alone, key=lambda done: done.sample)

  return draw


def requests():
  draw = np.random.default_rng(0)
  for index in range(12):
    prompt = draw.integers(1, 29, draw.integers(1, 9)).tolist()
    options = dict(
      n=2, seed=index, step=0, max_tokens=int(draw.integers(4, 13)), temperature=float(draw.choice([0.0, 1.0]))
    )
    yield prompt, index % (ADAPTERS + 1) - 1, index % (len(LENGTHS) + 1) - 1, options


def drawn_in(model, policy, pool, mesh=None, kept=0):
  sampler = Sampler(policy, TOKENIZER, mesh=mesh, **SETTINGS)
  base = model[1]
  if mesh is not None:
    rows = parameters.frozen(policy.parameter_table())
    base = parameters.map_tree(
      lambda row, leaf: jax.device_put(leaf, parameter_sharding(mesh, row.axes, row.shape)), rows, base
    )
  resident = Resident(sampler, base, pool, stop_ids=1, kept_prefixes=kept)
  handles = []
  for prompt, adapter, cartridge, options in requests():
    handles.append(resident.submit(prompt, weights=Weights(adapter, adapter, cartridge, cartridge), **options))
    resident.turn()
  while resident.turn():
    pass
  return [handle.result() for handle in handles]


@pytest.mark.parametrize(
  'case', tiers.cases(('xla', 'alone', 'kernels', 'divided'), default=('xla',), slow=('alone', 'kernels', 'divided'))
)
def test_every_row_gets_what_it_gets_alone(model, expected, case):
  mesh = make_mesh(MeshConfig(4, 2)) if case == 'divided' else None
  alike = 1 if case == 'alone' else 2
  policy, pool = pool_of(model, mesh, alike, 'splash' if case == 'kernels' else None)
  found = drawn_in(model, policy, pool, mesh)
  for own, request in zip(found, requests(), strict=True):
    for one, other in zip(own, expected(*request), strict=True):
      assert one.tokens.tolist() == other.tokens.tolist()
      np.testing.assert_allclose(one.model_log_probs, other.model_log_probs, atol=3e-5)


def test_decoding_pads_what_rows_read_and_not_the_bank(model):
  """The kernel's keys are wider than a head; to widen those of all cartridges in every layer took most of a step."""
  policy, _ = pool_of(model, kind='splash')
  many = dataclasses.replace(policy.adapter.cartridges, members=40)
  policy = dataclasses.replace(policy, adapter=dataclasses.replace(policy.adapter, cartridges=many))
  pool = lora_pool.empty(policy.parameter_table())
  tokens = np.ones((8, 1), np.int32)

  def step(base, pool, cache):
    return policy.apply(base, pool, tokens, tokens, tokens, cache, members=np.zeros((8, 2), np.int32))[0]

  cache = policy.with_recent(policy.init_cache(8, 16), 4)
  padded = [
    equation.outvars[0].aval.shape
    for equation in equations(jax.make_jaxpr(step)(model[1], pool, cache).jaxpr)
    if equation.primitive.name == 'pad'
  ]
  assert padded and all(40 not in shape for shape in padded)


def equations(jaxpr):
  for equation in jaxpr.eqns:
    yield equation
    for inner in jax.core.jaxprs_in_params(equation.params):
      yield from equations(inner)


def test_a_flood_of_cartridges_does_not_keep_another_payers_from_a_group(model):
  """Its group is emptied for it: of the flood, few more samples are done meanwhile than were under way."""
  policy, pool = pool_of(model, alike=4)
  resident = Resident(Sampler(policy, TOKENIZER, **SETTINGS), model[1], pool, stop_ids=1)

  def ask(cartridge, name, n):
    weights, options = Weights(cartridge=cartridge, slots=cartridge), dict(seed=1, step=0, max_tokens=6)
    return resident.submit([4, 5], weights=weights, payer=Payer(name), n=n, **options)

  floods = [ask(cartridge, 'loud', 40) for cartridge in (0, 1)]
  for _ in range(3):
    resident.turn()
  quiet = ask(2, 'quiet', 2)
  before = sum(flood.left for flood in floods)
  while not quiet.done:
    assert resident.turn()
  assert before - sum(flood.left for flood in floods) < 30


def test_a_sampler_that_does_not_group_its_rows_is_refused(model):
  policy, pool = pool_of(model)
  with pytest.raises(ValueError, match='resident'):
    Sampler(policy, TOKENIZER, **SETTINGS).sample(model[1], pool, [[4]], n=1, seed=0, step=0, max_tokens=2)


def test_kept_prefixes_are_those_of_a_cartridge(model, expected):
  """A prompt that goes on after another reuses its keys and values if both are behind the same cartridge."""
  policy, pool = pool_of(model)
  resident = Resident(Sampler(policy, TOKENIZER, **SETTINGS), model[1], pool, stop_ids=1, kept_prefixes=4)
  reused, options = [], dict(n=1, seed=3, step=0, max_tokens=4, temperature=0.0)
  for prompt, cartridge in (([7, 8, 9, 10], 0), ([7, 8, 9, 10, 11], 1), ([7, 8, 9, 10, 11], 0), ([7, 8, 9], -1)):
    handle = resident.submit(prompt, weights=Weights(cartridge=cartridge, slots=cartridge), owner='me', **options)
    while resident.turn():
      pass
    [found], [other] = handle.result(), expected(prompt, NO_MEMBER, cartridge, options)
    assert found.tokens.tolist() == other.tokens.tolist()
    reused.append(handle.reused)
  assert reused == [0, 0, 4, 0]


class TestSlotGroups:
  def make(self, cartridges, waiting=()):
    groups = SlotGroups(2)
    groups.update(np.array(cartridges), lambda cartridge: cartridge in waiting)
    return groups

  def test_samples_go_where_their_cartridge_is_read_then_to_a_group_that_reads_none(self):
    groups = self.make([5, -1, -1, -1, 6, -1])
    free = [1, 2, 3, 5]
    assert groups.best(free, 5) == [0]
    assert groups.best([2, 3, 5], 5) == [0, 1]
    assert groups.best(free, 7) == [1, 2]
    assert groups.best([0, 3, 4, 5], 7) == [1]
    assert groups.best(free, NO_MEMBER) == [3, 2, 1, 0]
    groups.give(2, 7)
    assert groups.best([1, 3, 5], 8) == []

  def test_a_reserved_group_admits_no_more_readers_until_it_was_used_or_nobody_waits(self):
    groups = self.make([5, 5, 6, -1], waiting=(7,))
    groups.reserve(7)
    groups.reserve(7)
    assert groups.best([3], 6) == [] and groups.best([3], 7) == [] and groups.best([3], NO_MEMBER) == [0]
    groups.update(np.array([5, 5, -1, -1]), lambda cartridge: cartridge == 7)
    assert groups.best([2, 3], 6) == [] and groups.best([2, 3], 7) == [0, 1]
    groups.update(np.array([5, 5, -1, -1]), lambda cartridge: False)
    assert groups.best([2, 3], 6) == [0, 1]

  def test_nothing_is_reserved_for_what_needs_no_group(self):
    for cartridges, wanted in (([5, 5, -1, -1], 7), ([5, 5, 6, 6], 6), ([5, 5, 6, 6], NO_MEMBER)):
      groups = self.make(cartridges)
      groups.reserve(wanted)
      assert all(groups.best([0, 2], cartridge) for cartridge in {5, 6} & set(cartridges))
