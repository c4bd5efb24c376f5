"""The registry: it names every program of a run, with the shapes that the run calls them with."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdpo_jax.config import MeshConfig
from sdpo_jax.distributed import mesh as meshes
from sdpo_jax.distributed import programs as registry
from sdpo_jax.learning import batching
from sdpo_jax.learning.update import make_update, place_state
from sdpo_jax.models.attention.backend import AttentionBackend
from sdpo_jax.planner.plan import resident_bytes
from sdpo_jax.training.checkpoint.checkpoints import abstract
from sdpo_jax.training.run_programs import abstract_parameters, run_programs
from sdpo_jax.training.specs import batch_spec, update_spec
from tests.updates import make_model, samples_for, settings


def registered(**changes):
  config = settings(**changes)
  policy, parameters = make_model()
  mesh = meshes.make_mesh(MeshConfig(), jax.devices()[:1])
  parameters = jax.device_put(parameters, meshes.replicated(mesh))
  return config, policy, parameters, mesh, run_programs(config, policy, {}, parameters, mesh)


def test_names_follow_the_settings():
  *_, sdpo = registered(algorithm__rollout_correction__rollout_is=None, trainer__test_freq=0)
  sampler = {'prepare', 'prefill/8×6', 'empty/8×6', 'admit/8×6', 'decode/8×6'}
  assert {'zero', 'apply', 'finish', 'digest', 'update/8×16×6'} | sampler == set(sdpo)
  *_, scored = registered()
  assert 'score/8×6' in scored
  *_, grpo = registered(actor__policy_loss__loss_mode='vanilla')
  assert 'update/8×6' in grpo
  *_, held = registered(actor__kl_loss_coef=0.1, model__dtype='bfloat16')
  assert set(held) - set(scored) == {'initial/8×6'}
  _, initial, *_ = held['initial/8×6'].arguments
  assert (initial['embedding'].dtype, initial['final_norm'].dtype) == (jnp.bfloat16, jnp.float32)
  resident = resident_bytes(held)
  assert resident['initial policy'] == sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(initial))
  assert resident['parameters'] > 1.9 * resident['initial policy'] and 'initial policy' not in resident_bytes(scored)


def test_held_out_questions_fill_the_slots_where_their_number_is_not_known():
  def rows(found, name):
    return found[name].arguments[-2].token.shape[0]

  *_, found = registered(rollout__max_batch_rows=16)
  assert (rows(found, 'decode/8×6'), rows(found, 'evaluation/decode/8×6')) == (8, 16)
  config, *_, found = registered(rollout__max_batch_rows=8, val_kwargs__n=2)
  assert config.rollout.n == 2 and 'evaluation/decode/8×6' not in found


def test_the_update_is_called_with_the_registered_shapes():
  config, policy, parameters, mesh, found = registered()
  samples = samples_for(config)
  samples.sampling_log_probs = samples.rollouts.sampling_log_probs  # As `step.build_batch` does.
  state = place_state(update_spec(config), parameters, mesh)
  update = make_update(policy, update_spec(config), jax.tree.map(lambda leaf: leaf.sharding, state))
  for micro in batching.micro_batches(samples, np.arange(len(samples)), batch_spec(config)):
    batch = meshes.put_rows(mesh, micro.batch)
    # As `step.run_update` calls it; the self-teacher has no base of its own.
    actual = abstract(({}, state, update.zero(state.trainable), batch, None))

    def shapes(tree):
      return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)

    assert shapes(actual) == shapes(found['update/8×16×6'].arguments)


@pytest.mark.parametrize(
  'name',
  [
    'update/8×16×6',
    'prepare',
    'prefill/8×6',
    'empty/8×6',
    'admit/8×6',
    'decode/8×6',
    'apply',
    'finish',
    'digest',
    'score/8×6',
    'initial/8×6',
  ],
)
def test_every_kind_of_program_lowers(name):
  *_, found = registered(actor__kl_loss_coef=0.1)
  assert 'func.func public @main' in found[name].lower().as_text()


def test_packed_updates_have_the_lengths_of_others():
  buckets = {'data__prompt_buckets': (4, 8), 'data__response_buckets': (3, 6), 'data__reprompt_buckets': (8, 16)}

  def updates(**more):
    return [name for name in registered(**buckets, **more)[-1] if name.startswith('update')]

  assert len(updates()) == 8 and updates(actor__pack_sequences=True) == updates()
  buckets['data__reprompt_buckets'] = buckets['data__prompt_buckets'] = ()
  assert updates(actor__pack_sequences=True) == ['update/8×16×3', 'update/8×16×6'] == updates()


def test_a_long_cache_has_a_decode_loop_of_every_size():
  *_, found = registered(data__max_response_length=500, data__response_buckets=(500,), trainer__test_freq=0)
  # 8 + 500 + 32 slots, half of them at first; a third of the eight rows in the end, then a twelfth.
  names = {'empty/8×500@270', 'admit/8×500@270', 'decode/8×500@270', 'resize/8×500@270', 'prepare', 'prefill/8×500'}
  names |= {'digest', 'decode/8×500', 'decode/8×500#3', 'decode/8×500#1', 'resize/8×500#3', 'resize/8×500#1'}
  assert {name for name in found if found[name].kind not in ('update', 'score', 'zero', 'apply', 'finish')} == names
  for before, after in (('@270', ''), ('#3', '#3'), ('#1', '#1')):
    program = found[f'resize/8×500{before}']
    left = jax.eval_shape(functools.partial(program.function, **program.static), *program.arguments)
    given = found[f'decode/8×500{after}'].arguments[2]
    assert jax.tree.map(lambda leaf: leaf.shape, left) == jax.tree.map(lambda leaf: leaf.shape, given), before


def test_a_cache_that_keeps_its_size_has_a_decode_loop_of_fewer_rows():
  """Whose cache is what is left when rows are moved together."""
  config = settings(rollout__max_batch_rows=8, data__max_response_length=40, data__response_buckets=(40,))
  policy = dataclasses.replace(make_model()[0], backend=AttentionBackend('splash', interpret=True))
  mesh = meshes.make_mesh(MeshConfig(), jax.devices()[:1])
  found = run_programs(config, policy, *abstract_parameters(policy, mesh), mesh)
  loops = [name for name in found if name.startswith('decode')]
  assert loops == ['decode/8×40', 'decode/8×40#4', 'decode/8×40#2']
  assert not any(name.startswith('resize') for name in found)

  def shapes(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)

  for before, after in (('', '#4'), ('#4', '#2')):
    compact, loop = found[f'compact/8×40{after}'], found[f'decode/8×40{after}']
    assert shapes(compact.arguments[:2]) == shapes(tuple(vars(found[f'decode/8×40{before}'].arguments[2]).values())[:2])
    left = jax.eval_shape(compact.function, *compact.arguments)
    assert shapes(left) == shapes(loop.arguments[2])
    assert 'func.func public @main' in loop.lower().as_text()


def test_a_decode_loop_on_a_mesh_is_compiled_for_what_it_gets_and_leaves():
  config = settings(rollout__max_batch_rows=8)
  policy, _ = make_model()
  mesh = meshes.make_mesh(MeshConfig(fsdp=4), jax.devices()[:4])
  found = run_programs(config, policy, *abstract_parameters(policy, mesh), mesh)
  compiled = dict(registry.compile_programs(found, ['decode/8×6', 'admit/8×6']))
  assert list(compiled) == ['prepare', 'decode/8×6', 'admit/8×6']
  (_, _, given, state, _), _ = compiled['decode/8×6'].input_shardings
  cache = found['decode/8×6'].arguments[2]
  rows = cache.lengths.shape[0]
  assert state.token.shard_shape((rows,)) == (rows // 4,) == given.lengths.shard_shape((rows,))
  for program in compiled.values():
    if program is not compiled['prepare']:
      left = program.output_shardings
      left = left[0] if isinstance(left, tuple) else left
      jax.tree.map(
        lambda leaf, one, other: one.is_equivalent_to(other, leaf.ndim) or pytest.fail(f'{one}, {other}'),
        cache,
        given,
        left,
      )


def test_programs_behind_a_refused_one_are_left_out():
  def refuse(*_, **__):
    raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: too large')

  *_, found = registered()
  broken = {name: dataclasses.replace(found[name]) for name in found}
  broken['prepare'] = registry.Program('prepare', types.SimpleNamespace(lower=refuse), ())
  results = dict(registry.compile_programs(broken, ['decode/8×6', 'finish']))
  assert set(results) == {'prepare', 'finish'}
  assert 'RESOURCE_EXHAUSTED' in str(results['prepare'])
