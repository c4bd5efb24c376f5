"""Schedules and optimizers: optax on every layer's matrix alone; meshes, checkpoints and skipped steps change
nothing.
"""

import copy
import functools
import json
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sdpo_jax.config import Config, MeshConfig, OptimizerConfig
from sdpo_jax.config.help import settings_help
from sdpo_jax.config.overrides import differences
from sdpo_jax.distributed import mesh as meshes
from sdpo_jax.errors import UserError
from sdpo_jax.learning import optimizer as optimizers
from sdpo_jax.learning import update
from sdpo_jax.models import published
from sdpo_jax.models.families import known_families
from sdpo_jax.models.families.table import parameter_table
from sdpo_jax.models.parameters import get, map_table, map_tree
from sdpo_jax.preflight.doubtful_settings import odd_settings
from sdpo_jax.training.checkpoint.checkpoints import Checkpoints
from sdpo_jax.training.specs import optimizer_spec, update_spec
from tests.config.valid_config import valid
from tests.updates import MODEL

# Wide enough for adafactor to factor some of its matrices (128 entries) and not others; biases have two axes per layer.
WIDE = MODEL | {
  'hidden_size': 128,
  'intermediate_size': 160,
  'num_attention_heads': 8,
  'num_key_value_heads': 4,
  'head_dim': 16,
  'attention_bias': True,
  'vocab_size': 130,
}
KEPT = 'embedding attention.key attention.output key_bias mlp_norm mlp.down final_norm'.split()
OTHERS = ('adafactor', 'lion', 'muon')


@functools.cache
def table():
  """Return some of the parameters of a model, of every kind that it has."""
  whole = parameter_table(known_families.read(WIDE))
  return tuple(parameter for parameter in whole if any(parameter.name.endswith(name) for name in KEPT))


def numbers(seed: int):
  rng = np.random.default_rng(seed)
  return map_table(lambda p: rng.normal(size=p.shape).astype(np.float32) * np.float32(10.0 ** (seed % 3 - 1)), table())


def settings(name: str, **changes) -> Config:
  config = valid()
  config.optimizer = OptimizerConfig(name=name, lr=1e-2, lr_warmup_steps=0, grad_clip=1e6, **changes)
  if name != 'sgd':
    config.optimizer.weight_decay = 0.1
  return config.validate()


# ———— Schedules ————


def rates(total: int, batches: int, **changes) -> list[float]:
  spec = optimizer_spec(OptimizerConfig(lr=3e-4, **changes), total)
  return [float(optimizers.learning_rate(spec, jnp.int32(step))) for step in range(batches)]


@pytest.mark.parametrize('warmup, total, floor', [(0, 7, 0.0), (3, 12, 0.1), (5, 6, 0.5)])
def test_decaying_rates_are_those_of_optax_and_of_the_formula(warmup, total, floor):
  changes = {'lr_warmup_steps': warmup, 'min_lr_ratio': floor}
  batches = total + 3
  cosine = optax.warmup_cosine_decay_schedule(0.0 if warmup else 3e-4, 3e-4, warmup, total, 3e-4 * floor)
  found = rates(total, batches, lr_scheduler_type='cosine', **changes)
  assert found == pytest.approx([float(cosine(step)) for step in range(batches)], rel=1e-5, abs=1e-11)
  linear = []
  for step in range(batches):
    left = 1 - (1 - floor) * min((step - warmup) / (total - warmup), 1)
    linear.append(3e-4 * (step / warmup if step < warmup else left))
  assert rates(total, batches, lr_scheduler_type='linear', **changes) == pytest.approx(linear, rel=1e-5, abs=1e-11)
  assert found[warmup] == pytest.approx(3e-4) and found[-1] == pytest.approx(3e-4 * floor, abs=1e-11)


def test_a_rate_that_is_said_to_decay_over_so_many_batches_does_not_ask_for_the_total():
  changes = {'lr_warmup_steps': 2, 'lr_scheduler_type': 'cosine', 'lr_decay_steps': 6}
  assert rates(6, 12, **changes) == rates(12, 12, **changes)
  assert rates(1, 3, lr_warmup_steps=10, lr_scheduler_type='linear') == pytest.approx([0, 3e-5, 6e-5])


def test_the_update_steps_the_schedule_once_a_generation_batch():
  config = settings('sgd', lr_scheduler_type='linear', min_lr_ratio=0.2)
  config.trainer.total_training_steps = 4
  state = update.init_state(update_spec(config), {'w': jnp.ones(3)})
  seen = []
  for _ in range(3):
    for _ in range(2):  # Optimizer steps of a generation batch have one rate.
      state, report = update.apply_gradients(update_spec(config), state, {'w': jnp.zeros(3)})
      seen.append(float(report['learning_rate']))
    state = state.replace(step=state.step + 1)
  assert seen == pytest.approx([1e-2, 1e-2, 8e-3, 8e-3, 6e-3, 6e-3])


def test_more_steps_change_a_rate_that_decays_over_the_whole_run_and_no_other():
  def change(**changes):
    config = valid()
    config.optimizer = OptimizerConfig(**changes)
    config.trainer.total_training_steps = 100
    saved, longer = json.loads(config.validate().to_json()), copy.deepcopy(config)
    longer.trainer.total_training_steps = 200
    return saved, longer

  assert differences(*change()).refused == []
  saved, longer = change(lr_scheduler_type='cosine')
  (refused,) = differences(saved, longer).refused
  assert refused.startswith(
    'optimizer.lr_decay_steps was 100 and is now 200 (None means trainer.total_training_steps; set it'
  )
  longer.optimizer.lr_decay_steps = 100  # The way out.
  assert differences(saved, longer).refused == []
  assert differences(*change(lr_scheduler_type='linear', lr_decay_steps=50)).refused == []
  other = change(lr_scheduler_type='linear')[1]
  other.trainer.total_training_steps = 100
  assert differences(saved, other).refused == ["optimizer.lr_scheduler_type was 'cosine' and is now 'linear'"]


def test_a_run_that_ends_within_its_warm_up_is_said_to_be_odd():
  config = settings('adamw', lr_scheduler_type='cosine')
  config.optimizer.lr_warmup_steps = config.trainer.total_training_steps = 5
  assert any('lr_warmup_steps=5 is not below' in sentence for sentence in odd_settings(config.validate(), 1, None))


# ———— Optimizers ————


def pieces(parameter, array) -> list[jax.Array]:
  """Each layer's part: as the matrix of its Hugging Face tensor, inputs first, or as a vector."""
  layers = array if parameter.stacked else array[None]
  sides = parameter.huggingface_shape[::-1] if parameter.transpose else parameter.huggingface_shape
  return [layer.reshape(sides if len(sides) == 2 else -1) for layer in layers]


def oracle(name: str, parameter, config: OptimizerConfig) -> optax.GradientTransformation:
  """Return what optax calls this optimizer, for an array of one layer; it moves by minus the rate."""
  b1, b2 = config.betas
  adam = optax.scale_by_adam(b1, b2, config.eps)
  if name == 'adafactor':
    return optax.adafactor(1.0, multiply_by_parameter_scale=False)
  if name == 'lion':
    return optax.lion(1.0, b1, b2, weight_decay=0.0)
  if name == 'muon' and len(parameter.huggingface_shape) == 2 and 'vocab' not in parameter.axes:
    return optax.contrib.muon(1.0, beta=config.momentum, consistent_rms=0.2)
  return optax.chain(adam, optax.scale(-1.0))


START = 6  # The seed of the parameters.


@functools.cache
def after(name: str, shape: tuple[int, int], poisoned: bool = False):
  """Return the state after two optimizer steps on a mesh, between which there may be one whose gradient is NaN."""
  config = settings(name)
  mesh = meshes.make_mesh(MeshConfig(*shape), jax.devices()[: math.prod(shape)])
  shardings = map_table(lambda p: meshes.parameter_sharding(mesh, p.axes, p.shape), table())
  state = update.place_state(update_spec(config), jax.device_put(numbers(START), shardings), mesh, table())
  placed = jax.tree.map(lambda leaf: leaf.sharding, state)
  apply = functools.partial(update.apply_gradients, config, table=table())
  apply = jax.jit(apply, out_shardings=(placed, meshes.replicated(mesh)))
  for seed in range(2):
    if poisoned and seed == 1:
      bad = jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), numbers(0))
      left, report = apply(state, jax.device_put(bad, shardings))
      chex.assert_trees_all_equal(*(jax.device_get(each.replace(rng=None)) for each in (left, state)))
      assert not report['taken']
      state = left
    state, _ = apply(state, jax.device_put(numbers(seed), shardings))
  return state


@pytest.mark.parametrize('name', [*OTHERS, pytest.param('adamw', marks=pytest.mark.slow)])  # That is torch's, too.
def test_an_optimizer_is_optaxs_on_every_layer_alone(name):
  config = settings(name).optimizer

  def move(parameter, start, gradients):
    moved = []
    for layer, value in enumerate(pieces(parameter, start)):
      transform = oracle(name, parameter, config)
      state = transform.init(value)
      for tree in gradients:
        change, state = transform.update(pieces(parameter, get(tree, parameter.path))[layer], state, value)
        value = value + config.lr * (change - config.weight_decay * value)
      moved.append(value.reshape(parameter.shape[int(parameter.stacked) :]))
    return jnp.stack(moved) if parameter.stacked else moved[0]

  @jax.jit
  def expected(start, gradients):
    return map_tree(lambda parameter, leaf: move(parameter, leaf, gradients), table(), start)

  ours, start = jax.device_get(after(name, (1, 1)).trainable), numbers(START)
  theirs = jax.device_get(expected(start, [numbers(seed) for seed in range(2)]))
  largest = max(jax.tree.leaves(jax.tree.map(lambda a, b: abs(a - b).max(), ours, theirs)))
  moved = min(jax.tree.leaves(jax.tree.map(lambda a, b: abs(a - b).max(), theirs, start)))
  assert largest < 2e-6 < 1e-3 < moved


@pytest.mark.parametrize('name', ['adafactor', pytest.param('lion', marks=pytest.mark.slow), 'muon'])
def test_eight_devices_move_the_parameters_as_one_and_split_the_state_likewise(name):
  alone, together = after(name, (1, 1)), after(name, (4, 2))
  found = jax.device_get((together.trainable, alone.trainable))
  chex.assert_trees_all_close(*found, atol=2e-6)
  chex.assert_trees_all_equal_shapes(together.opt_state, alone.opt_state)
  held = sum(leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(together.opt_state))
  whole = sum(leaf.size for leaf in jax.tree.leaves(together.opt_state))
  parameters = sum(leaf.size for leaf in jax.tree.leaves(together.trainable))
  if name == 'adafactor':  # The keys have fewer than 128 columns.
    assert whole < 0.25 * parameters
  else:
    # Momenta, and of what is no matrix inside of a layer a second moment.
    assert parameters <= whole <= 1.2 * parameters and held < 0.2 * whole


@pytest.mark.slow  # By default test_step.py has such a gradient.
@pytest.mark.parametrize('name', ['muon', *OTHERS[:2]])
def test_a_gradient_that_is_not_finite_leaves_the_state_alone_and_a_checkpoint_holds_it(name, tmp_path):
  state, whole = after(name, (4, 2), poisoned=True), after(name, (4, 2))
  chex.assert_trees_all_equal(*(jax.device_get(each.replace(rng=None)) for each in (state, whole)))
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(3, state, {}, {})
  checkpoints.wait()
  mesh = state.step.sharding.mesh
  step, found, _ = checkpoints.restore(
    update.abstract_state(update_spec(settings(name)), state.trainable, mesh, table())
  )
  checkpoints.close()
  assert step == 3 and jax.tree.structure(found) == jax.tree.structure(state)
  chex.assert_trees_all_equal(*(jax.device_get(each.replace(rng=None)) for each in (found, state)))
  assert all(jax.tree.leaves(jax.tree.map(lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim), found, state)))


def test_every_parameter_of_every_published_model_is_the_matrix_or_vector_that_its_tensors_are():
  for name in published.names():
    for parameter in parameter_table(known_families.read(published.config_json(name))):
      sides = parameter.huggingface_shape[::-1] if parameter.transpose else parameter.huggingface_shape
      padding = (parameter.padding, 0)[: len(sides)]
      assert optimizers.matrix_shape(parameter) == tuple(map(sum, zip(sides, padding, strict=True))), (name, parameter)
  known = {parameter.name: optimizers.matrix_axes(parameter) for parameter in table()}
  assert known['layers.attention.key'] == ((0,), (1, 2)) and known['layers.attention.output'] == ((0, 1), (2,))
  assert known['embedding'] == ((0,), (1,)) and known['layers.attention.key_bias'] is known['final_norm'] is None


def test_matrices_cannot_be_told_without_a_table():
  with pytest.raises(ValueError, match='the parameter table does not have w'):
    optimizers.make_optimizer(optimizer_spec(OptimizerConfig(name='muon'), 1)).init({'w': jnp.ones((2, 2))})


def test_what_is_excluded_by_name_does_not_decay():
  config = settings('adamw', weight_decay_exclude=('norm', '^embedding$', 'bias')).optimizer
  transform = optimizers.make_optimizer(optimizer_spec(config, 1))
  twos = np.full(3, 2.0, np.float32)
  start = {'embedding': twos, 'layers': {'up': twos, 'up_bias': twos, 'mlp_norm': twos}, 'unembedding': twos}
  updates, _ = transform.update(jax.tree.map(np.zeros_like, start), transform.init(start), start)
  moved = jax.tree.map(lambda leaf: pytest.approx(0.2) == float(leaf[0]), updates)
  left = {'up': True, 'up_bias': False, 'mlp_norm': False}
  assert moved == {'embedding': False, 'layers': left, 'unembedding': True}


def test_a_pattern_that_excludes_nothing_is_named_with_some_names():
  config = settings('adamw', weight_decay_exclude=('norm', 'lm_head'))
  with pytest.raises(
    UserError, match=r"exclude: 'lm_head' matches none of the parameters, which are embedding, .* and 1 more: corr"
  ):
    jax.eval_shape(functools.partial(update.init_state, config), numbers(START))


def test_the_patterns_that_the_help_suggests_are_those_of_every_published_model():
  (suggested,) = re.findall(r'e\.g\.\s+([\w,]+)\.', settings_help(Config(), 'optimizer.weight_decay_exclude'))
  for name in published.names():
    parameters = parameter_table(known_families.read(published.config_json(name)))
    optimizers.check_excluded(suggested.split(','), [parameter.name for parameter in parameters])


@pytest.mark.parametrize(
  'changes, sentence',
  [
    (
      {'name': 'sgd', 'weight_decay': 0.1},
      "weight_decay=0.1 has no effect with optimizer.name='sgd': .*, or leave it at 0.01",
    ),
    ({'name': 'lion', 'eps': 1e-6}, "eps=1e-06 has no effect with .*='lion': set that to 'adamw' or 'muon'"),
    ({'name': 'adafactor', 'mu_dtype': 'bfloat16'}, "mu_dtype='bfloat16' has no effect"),
    ({'momentum': 0.9}, "momentum=0.9 has no effect with optimizer.name='adamw'"),
    ({'min_lr_ratio': 0.1}, "min_lr_ratio=0.1 has no effect with optimizer.lr_scheduler_type='constant'"),
    ({'lr_decay_steps': 10}, "lr_decay_steps=10 has no effect .* leave it at None"),
    (
      {'lr_scheduler_type': 'linear', 'lr_decay_steps': 10},
      'lr_decay_steps=10 counts the warm-up .*lr_warmup_steps=10',
    ),
    ({'weight_decay_exclude': ('norm', '')}, 'holds an empty pattern, which is found in every name'),
    ({'weight_decay_exclude': ('norm', '(')}, r"'\(' is not a regular expression"),
    ({'lr_scheduler_type': 'cosine', 'min_lr_ratio': 1.5}, r'min_lr_ratio must lie in \[0, 1\]'),
  ],
)  # fmt: skip
def test_settings_that_contradict_each_other_are_named(changes, sentence):
  config = valid()
  config.optimizer = OptimizerConfig(**changes)
  with pytest.raises(UserError, match=sentence):
    config.validate()
  config.optimizer = OptimizerConfig(name='sgd', betas=[0.9, 0.999])  # As JSON gives them back.
  config.validate()
