"""Keys and values that outlive their request: a conversation goes on from them, and draws what it would draw
without.
"""

import collections
import dataclasses
import functools
import inspect
import itertools

import jax
import numpy as np
import pytest

from sdpo_jax.config import LoraConfig, MeshConfig, ModelConfig
from sdpo_jax.distributed.mesh import make_mesh, parameter_sharding
from sdpo_jax.models import huggingface, parameters
from sdpo_jax.models.adapters import lora_pool
from sdpo_jax.models.adapters.lora_pool import LoraPool
from sdpo_jax.models.attention.backend import AttentionBackend
from sdpo_jax.rollout import sizes
from sdpo_jax.rollout.functions import sampler_functions
from sdpo_jax.rollout.kept_prefixes import KeptRows
from sdpo_jax.rollout.resident import CancelledError, Resident, Weights
from sdpo_jax.rollout.sampler import Sampler
from sdpo_jax.serving.records import BASE
from tests import tpu_programs
from tests.letters import CONFIG, TOKENIZER
from tests.planner.planned_engines import leaves, on_one_device
from tests.planner.planned_engines import settings as serve_settings
from tests.serving.engines import make_model, random_factors, start

SETTINGS = dict(prompt_buckets=(16, 64), response_buckets=(8,), max_batch_rows=4, decode_chunk=3, stop_token_ids=(30,))
SLIDING = dict(num_hidden_layers=2, use_sliding_window=True, sliding_window=5, max_window_layers=1)
MODELS = {
  'grouped queries': CONFIG | dict(num_hidden_layers=2),
  'sliding windows': CONFIG | SLIDING,
  'gemma3': CONFIG
  | dict(model_type='gemma3_text', num_hidden_layers=3, sliding_window=5, sliding_window_pattern=2)
  | dict(hidden_activation='gelu_pytorch_tanh', query_pre_attn_scalar=16, rope_local_base_freq=1e4, rope_theta=1e6),
  'scanned layers': CONFIG | dict(num_hidden_layers=9),
}


def make(name='grouped queries', mesh=None, kernels=False):
  policy, params = huggingface.init(MODELS[name], jax.random.key(1))
  if kernels:
    policy = dataclasses.replace(policy, backend=AttentionBackend('splash', mesh, interpret=True))
  if mesh is not None:

    def place(parameter, leaf):
      return jax.device_put(leaf, parameter_sharding(mesh, parameter.axes, parameter.shape))

    params = parameters.map_tree(place, policy.parameter_table(), params)
  return policy, params


@pytest.fixture(scope='module')
def model():
  return make()


@pytest.fixture(scope='module')
def adapted():
  return make_model()


def resident(model, kept, mesh=None, **changes):
  policy, params = model
  sampler = Sampler(policy, TOKENIZER, mesh=mesh, **SETTINGS | changes)
  return Resident(sampler, {}, params, stop_ids=4, kept_prefixes=kept)


def finish(resident):
  while resident.turn():
    pass


Turn = collections.namedtuple('Turn', 'prompt done reused prefilled')


def converse(resident, first=(3, 4, 5), turns=4, temperature=1.0):
  """Return a conversation in which every turn's prompt is that of the turn before, what was drawn, and some tokens
  more.
  """
  prompt, found = list(first), []
  for number in range(turns):
    before = resident.stats.prefilled
    handle = resident.submit(prompt, n=1, seed=number, step=0, max_tokens=8, temperature=temperature, owner='ada')
    finish(resident)
    [done] = handle.result()
    found.append(Turn(prompt, done, handle.reused, resident.stats.prefilled - before))
    prompt = [*prompt, *done.tokens.tolist(), 7, 8 + number]
  return found


def assert_same(found, expected):
  assert found.tokens.tolist() == expected.tokens.tolist() and found.stopped == expected.stopped
  for name in ('sampling_log_probs', 'model_log_probs', 'entropy'):
    np.testing.assert_allclose(getattr(found, name), getattr(expected, name), atol=1e-5)


def assert_same_conversation(found, expected):
  for one, other in zip(found, expected, strict=True):
    assert one.prompt == other.prompt
    assert_same(one.done, other.done)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
  'name, kernels',
  [
    ('grouped queries', False),
    pytest.param('sliding windows', False, marks=SLOW),
    pytest.param('gemma3', False, marks=SLOW),
    pytest.param('scanned layers', False, marks=pytest.mark.campaign),
    pytest.param('grouped queries', True, marks=pytest.mark.campaign),
    pytest.param('sliding windows', True, marks=SLOW),
  ],
)
@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_a_turn_prefills_its_new_tokens_only_and_draws_the_same(name, kernels, temperature):
  made = make(name, kernels=kernels)
  expected = converse(resident(made, 0), temperature=temperature)
  found = converse(resident(made, 2), temperature=temperature)
  assert_same_conversation(found, expected)
  assert (found[0].reused, found[0].prefilled) == (0, len(found[0].prompt) - 1)
  for before, turn in zip(found, found[1:], strict=False):
    # All that had gone through the model; its own last token does so when the first one is drawn.
    assert turn.reused == len(before.prompt) + len(before.done.tokens) - 1
    assert turn.prefilled == len(turn.prompt) - 1 - turn.reused == 2
  for turn in expected:
    assert (turn.reused, turn.prefilled) == (0, len(turn.prompt) - 1)


@pytest.mark.slow
@pytest.mark.parametrize('config, kernels', [(MeshConfig(), False), (MeshConfig(4, 2), True)])
def test_on_a_mesh_a_conversation_goes_on_where_it_was(model, config, kernels):
  """Its next turn gets a slot of the shard that has its keys and values, though others are free."""
  mesh = make_mesh(config)
  made, firsts = make(mesh=mesh, kernels=kernels), ([3, 4, 5], [6, 2], [9, 9, 1, 4], [8, 1, 1])
  rows = dict(max_batch_rows=2 * mesh.shape['fsdp'])
  spread, alone = resident(made, mesh.shape['fsdp'], mesh, **rows), resident(model, 0)
  expected = [converse(alone, first, turns=3) for first in firsts]
  for number in range(3):  # All conversations take their turn together.
    before = spread.stats.prefilled
    options = dict(n=1, seed=number, step=0, max_tokens=8, owner='ada')
    handles = [spread.submit(turns[number].prompt, **options) for turns in expected]
    finish(spread)
    for handle, turns in zip(handles, expected, strict=True):
      assert_same(handle.result()[0], turns[number].done)
      assert number == 0 or handle.reused == len(turns[number].prompt) - 1 - 2
    assert number == 0 or spread.stats.prefilled - before == 2 * len(firsts)


def test_many_continue_one_prompt_at_once_while_it_is_evicted(model):
  """With several samples of some of them, and others between, which take its only row."""
  kept, alone = resident(model, 1), resident(model, 0)
  [first] = converse(kept, turns=1)
  prompts = [[*first.prompt, *first.done.tokens.tolist()[:-1], 11, number] for number in range(1, 7)]
  asked = [(prompt, 1 + number % 3) for number, prompt in enumerate(prompts)]
  asked[2:2] = [([1, 2, 9, 9], 2), ([20] * 40, 1)]
  handles = {}
  for each in (kept, alone):
    handles[each] = [each.submit(prompt, n=n, seed=5, step=0, max_tokens=8, owner='ada') for prompt, n in asked]
    finish(each)
  for mine, other in zip(handles[kept], handles[alone], strict=True):
    for one, two in zip(mine.result(), other.result(), strict=True):
      assert_same(one, two)
  reused = [handle.reused for handle in handles[kept]]
  assert reused[0] == reused[1] == len(first.prompt) + len(first.done.tokens) - 1 and reused[2:4] == [0, 0]
  assert kept.stats.prefilled + kept.stats.reused == alone.stats.prefilled + len(first.prompt) - 1


def test_samples_of_one_prompt_keep_it_once(model):
  kept, other = resident(model, 2), [9, 8, 7, 6, 5, 4]
  ask(kept, other)
  for _ in range(2):
    handle = kept.submit([3, 4, 5, 6, 7, 8], n=4, seed=1, step=0, max_tokens=8, owner='ada')
    finish(kept)
    assert ask(kept, other).reused == 5  # Nothing has taken its row.
  assert handle.reused == 5
  assert {done.reused for done in handle.result()} == {5}


def test_what_a_cancelled_request_had_is_kept(model):
  kept, prompt = resident(model, 2, stop_token_ids=()), [5, 4, 3, 2]
  options = dict(n=1, seed=2, step=0, max_tokens=8, owner='ada')
  handle = kept.submit(prompt, drafts=True, **options)
  kept.turn()
  kept.turn()
  kept.cancel(handle)
  finish(kept)
  with pytest.raises(CancelledError):
    handle.result()
  again, alone = kept.submit(prompt, **options), resident(model, 0, stop_token_ids=())
  expected = alone.submit(prompt, **options)
  for each in (kept, alone):
    finish(each)
  assert again.reused == 3
  [done], [other] = again.result(), expected.result()
  assert_same(done, other)
  # A prompt that goes on with what it had drawn by then reads none of that again.
  more = kept.submit([*prompt, *done.tokens[:6].tolist()], **options)
  finish(kept)
  assert more.reused == len(prompt) + 5


@pytest.fixture(scope='module')
def pooled():
  """(policy with a pool of two adapters, base, a pool with the factors of one of three versions in each place)."""
  config = ModelConfig(dtype='float32', lora=LoraConfig(rank=2, alpha=4.0))
  policy = huggingface.describe(MODELS['grouped queries'], config).on(None)
  base = parameters.initialise(parameters.frozen(policy.parameter_table()), jax.random.key(1), 0.3)
  draw, table = np.random.default_rng(1), parameters.trainable(policy.parameter_table())
  versions = [
    parameters.map_table(lambda row: np.float32(0.5 * draw.standard_normal(row.shape)), table) for _ in range(3)
  ]
  whole = dataclasses.replace(policy, adapter=LoraPool(policy.adapter, 2))

  def pool(*held):
    factors = lora_pool.empty(whole.parameter_table())
    for place, version in enumerate(held):
      factors = lora_pool.with_member(factors, place, versions[version])
    return factors

  return whole, base, pool


def ask(resident, prompt, owner='ada', **more):
  handle = resident.submit(prompt, n=1, seed=3, step=0, max_tokens=8, owner=owner, **more)
  finish(resident)
  return handle


def test_nothing_is_read_of_other_weights_or_of_another_owner(pooled):
  policy, base, pool = pooled
  sampler = Sampler(policy, TOKENIZER, **SETTINGS)
  prompt = [3, 4, 5, 6, 7, 8, 9, 10, 11]

  def make_resident(kept, *held):
    return Resident(sampler, base, pool(*held), stop_ids=4, kept_prefixes=kept)

  kept = make_resident(8, 0, 1)
  whose = [
    dict(weights=Weights()),
    dict(weights=Weights(0, 'a@0')),
    dict(weights=Weights(0, 'a@1')),  # Another version in the same place.
    dict(weights=Weights(1, 'a@0')),  # Another place.
    dict(weights=Weights(), owner='bob'),
  ]
  assert [ask(kept, prompt, **each).reused for each in whose] == [0] * len(whose)
  assert [ask(kept, prompt, **each).reused for each in whose] == [8] * len(whose)
  # Another version takes a place, under a name that was there before.
  kept.release(lambda weights: weights.member == 0)
  kept.use(pool(2, 1))
  found, expected = ask(kept, prompt, **whose[1]), ask(make_resident(0, 2, 1), prompt, **whose[1])
  assert found.reused == 0
  assert_same(found.result()[0], expected.result()[0])
  assert [ask(kept, prompt, **each).reused for each in whose] == [8, 8, 0, 8, 8]
  for _ in range(2):  # What is nobody's is neither kept nor read from what is.
    assert ask(kept, prompt, owner=None).reused == 0


Held = collections.namedtuple('Held', 'row weights tokens time')


def test_rows_are_those_that_were_used_last_and_of_one_beginning_the_longest():
  """Against a plain list: what is found has as many common tokens as any that was put in and not displaced since."""
  draw, rows = np.random.default_rng(0), KeptRows(3, itertools.count())
  held, time = [], itertools.count()  # The one used longest ago first.

  def common(one, other):
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))

  for _ in range(400):
    weights, tokens = int(draw.integers(2)), tuple(draw.integers(0, 2, draw.integers(1, 7)).tolist())
    lengths = [common(old.tokens, tokens) if old.weights == weights else 0 for old in held]
    match = rows.match(weights, np.array(tokens))
    assert match.length == max(lengths, default=0)
    if draw.integers(5) == 0:
      rows.release(lambda its, weights=weights: its == weights)
      held = [old for old in held if old.weights != weights]
    elif draw.integers(2):
      if match.length:
        [used] = [old for old in held if old.row == match.row]
        assert lengths[held.index(used)] == match.length
        rows.use(match.row)
        held.remove(used)
        held.append(used._replace(time=next(time)))
    else:
      covering = [old for old in held if old.weights == weights and old.tokens[: len(tokens)] == tokens]
      row = rows.take(weights, np.array(tokens))
      assert (row is None) == bool(covering)
      if covering:
        held.remove(covering[0])
        held.append(covering[0]._replace(time=next(time)))
      else:
        held = [old for old in held if not (old.weights == weights and tokens[: len(old.tokens)] == old.tokens)]
        assert len(held) < 3 or row == held[0].row
        held = [*held[-2:], Held(row, weights, tokens, next(time))]
        assert {old.row for old in held} <= {0, 1, 2} and len({old.row for old in held}) == len(held)
    assert [rows.match(old.weights, np.array(old.tokens)) for old in held] == [
      (old.row, len(old.tokens)) for old in held
    ]
    assert len(rows) == len(held) and rows.displaced == (held[0].time if len(held) == 3 else -1)


def test_a_beginning_is_not_read_from_a_row_where_that_takes_longer(model):
  """By hand: of buckets 16 and 64, eight tokens go through the model at once."""
  assert sizes.sizes(rows=4, refilled=True, widths=(16, 64), room=8, chunk=3, keeps_size=True).piece == 8
  kept = resident(model, 4)
  ask(kept, [3, 4])
  # Nine more tokens are two pieces, as much as prefilling a prompt of 16.
  assert ask(kept, [3, *range(10, 19), 5]).reused == 0
  assert ask(kept, [3, 20, 21, 22]).reused == 1


def draw(engine, version, prompt=(3, 4, 5, 6, 7, 8), owner='ada'):
  handle = engine.submit(version, prompt, owner=owner, n=1, seed=3, step=0, max_tokens=8)
  while engine.turn():
    pass
  return handle


def test_versions_that_leave_an_engine_leave_nothing_behind(adapted, tmp_path):
  """Two places for four versions, one of which is erased and made anew with other factors under its old name."""
  settings = dict(prompt_buckets=(16,), snapshots=2)
  kept, alone = (start(adapted, tmp_path / str(count), 4, kept_prefixes=count, **settings) for count in (3, 0))
  for version, reused in (
    (BASE, 0),
    ('0@0', 0),
    ('0@0', 5),
    ('1@0', 0),
    ('0@0', 5),
    ('2@0', 0),  # Takes the place of 1@0, and its row: that of the base was used longer ago.
    ('0@0', 5),
    ('1@0', 0),  # Takes the place of 2@0, and its row.
    (BASE, 5),
    ('0@0', 5),
  ):
    found, expected = draw(kept, version), draw(alone, version)
    assert found.reused == reused, version
    assert_same(found.result()[0], expected.result()[0])
  kept.forget('0@0')
  assert draw(kept, BASE, prompt=(9, 8, 7, 6, 5, 4)).reused == 0  # In the row of 0@0, though 1@0 was used longer ago.
  assert draw(kept, '1@0').reused == 5
  alone.forget('0@0')
  for engine in (kept, alone):
    engine.put('0@0', random_factors(adapted[0], 7))
  found, expected = draw(kept, '0@0'), draw(alone, '0@0')
  assert found.reused == 0
  assert_same(found.result()[0], expected.result()[0])
  assert (kept.counts['prefilled'], kept.counts['reused']) == (7 * 5, 6 * 5) and alone.counts['reused'] == 0


def test_without_kept_rows_an_engine_has_the_programs_that_it_had():
  """And with some, three more: nothing else changes, and no run has any of them."""

  def programs(**changes):
    found = on_one_device(serve_settings(**changes))
    return {
      name: (inspect.unwrap(program.function), leaves(program.arguments), program.static)
      for name, program in found.items()
    }

  without, some = programs(kept_prefixes=0), programs(kept_prefixes=8)
  assert {name.split('/')[0] for name in some.keys() - without.keys()} == {'empty kept', 'keep', 'extend'}
  assert {name: some[name] for name in without} == without


@pytest.mark.tpu_compiler
@pytest.mark.slow
def test_a_tpu_continues_a_row_by_the_kernel_that_decodes():
  """What was kept and the tokens of a piece are two caches, and beside the rows there is next to nothing."""
  mesh, slots, prompts = tpu_programs.slice_mesh('v5e:2x2', 2, 2), 1024, 2
  policy = huggingface.describe(tpu_programs.SMALL, ModelConfig()).on(mesh)
  functions, array = sampler_functions(policy, mesh), functools.partial(tpu_programs.over_rows, mesh)
  params = tpu_programs.abstract_parameters(policy, mesh)
  params = jax.tree.map(
    lambda given, leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=given.sharding),
    params,
    jax.eval_shape(policy.cast, {}, params)[1],
  )
  cache = tpu_programs.abstract_cache(functions, mesh, 16, slots)
  numbers, tokens = array((prompts,), np.int32), array((prompts, slots), np.int32)
  compiled = functions.extend.lower({}, params, cache, numbers, tokens, numbers, numbers, piece=64).compile()
  assert tpu_programs.kernels(compiled.as_text()) == 2 * ['cache_attention']
  row = sum(int(np.prod(store.shape)) * 2 for store in (cache.stores.keys, cache.stores.values)) // 16 // 2
  memory = compiled.memory_analysis()
  assert row <= memory.output_size_in_bytes < 1.01 * row
  assert memory.temp_size_in_bytes < 1.2 * row
