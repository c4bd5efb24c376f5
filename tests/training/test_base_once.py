"""One copy of a frozen base serves student and teacher, and the sampler where layouts agree; training leaves it
alone.
"""

from __future__ import annotations

import collections
import gc
import json
import math

import jax
import numpy as np
import pytest

from sdpo_jax.config import Config, LoraConfig, ModelConfig
from sdpo_jax.distributed import mesh as meshes
from sdpo_jax.models import huggingface
from sdpo_jax.planner import topology
from sdpo_jax.training import loop, opening, step
from sdpo_jax.training.run_programs import abstract_parameters, run_programs
from tests import tiny
from tests.compiling import without_cache
from tests.training.many_lengths import experiment
from tests.updates import MODEL, settings

TEACHER = 'actor__self_distillation__teacher_regularization'


def of_lora(folder, layers, **changes) -> Config:
  """Two steps of a model with an adapter, and an evaluation after each."""
  short = {'data__max_response_length': 4, 'data__response_buckets': (4,), 'data__val_max_samples': 4}
  config = experiment(folder, trainer__total_training_steps=2, trainer__test_freq=1, **short, **changes)
  config.model.path = str(tiny.make_model(folder / 'deep', num_hidden_layers=layers))
  config.model.lora.rank = 3
  return config


def alive() -> collections.Counter:
  """How many buffers there are of arrays of each shape; of an array on several devices one counts."""
  gc.collect()
  arrays = [array for array in jax.live_arrays() if not jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)]
  return collections.Counter(
    shape for shape, _ in {(array.shape, array.addressable_data(0).unsafe_buffer_pointer()) for array in arrays}
  )


@pytest.mark.parametrize(
  ('layers', 'devices', 'changes'),
  [
    pytest.param(9, 1, {}, marks=pytest.mark.campaign),
    pytest.param(9, 1, {TEACHER: 'base'}, marks=pytest.mark.slow),
    pytest.param(9, 2, {}, marks=pytest.mark.slow),
    pytest.param(2, 1, {}, marks=pytest.mark.slow),
  ],
  ids=['same layout', 'the base teaches', 'gathered', 'layer by layer'],
)
def test_a_run_holds_the_base_once_and_leaves_it_as_it_is(tmp_path, monkeypatch, layers, devices, changes):
  """Twice where the sampler's layout differs; nothing is compiled late, and every step samples and evaluates."""
  found, before, sessions, seen = jax.devices()[:devices], alive(), [], []
  monkeypatch.setattr(opening, 'make_mesh', lambda config, _, described: meshes.make_mesh(config, found, described))

  def opened(*arguments, make=loop.make_session, **settings):
    made, trainable = make(*arguments, **settings)
    sessions.append((made, jax.tree.map(np.array, made.base)))
    return made, trainable

  def updated(current, state, *arguments, run=step.run_update, **settings):
    result = run(current, state, *arguments, **settings)
    seen.append((alive() - before, jax.tree.map(lambda leaf: leaf.shape, result[0].teacher)))
    return result

  monkeypatch.setattr(loop, 'make_session', opened)
  monkeypatch.setattr(step, 'run_update', updated)
  loop.train(of_lora(tmp_path, layers, **changes), tmp_path / 'run')
  lines = [json.loads(line) for line in (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()]
  assert [line['programs/compiled'] for line in lines] == [0.0] * 3
  [(made, expected)] = sessions
  jax.tree.map(np.testing.assert_array_equal, made.base, expected)
  own = [leaf for leaf in jax.tree.leaves(made.base) if leaf.ndim > 1]
  # Gathered are copies of the same shape; layer by layer they are of another.
  once = collections.Counter(leaf.shape for leaf in own)
  gathered = collections.Counter(leaf.shape for leaf in own if not leaf.sharding.is_fully_replicated)
  matrices = {shape for shape in once if len(shape) > 2}
  assert len(seen) == 2 and len(matrices) >= 4 and (devices == 1) == (not gathered)
  for arrays, teacher in seen:
    assert {shape: arrays[shape] for shape in once} == once + gathered
    for shape in matrices:
      assert arrays[shape[1:]] == (once[shape] * layers if layers == 2 else 0), shape
    assert bool(teacher) == (TEACHER not in changes)
  del made, expected, own
  sessions.clear()
  seen.clear()
  assert not [shape for shape in alive() - before if shape in matrices]


SIZES = MODEL | dict(hidden_size=64, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=32)


def update_program(layers, dtype, devices, sizes=SIZES, **changes):
  """Return (the program of the update, bytes of the base, of the factors) on the first of the devices."""
  config = settings(algorithm__rollout_correction__rollout_is=None, actor__ppo_micro_batch_size=1, **changes)
  described = ModelConfig(dtype=dtype, remat='full', lora=LoraConfig(rank=2))
  policy = huggingface.describe(sizes | {'num_hidden_layers': layers}, described)
  mesh = opening.model_mesh(config, policy, devices)
  policy = policy.on(mesh)
  trees = abstract_parameters(policy, mesh)
  found = run_programs(config, policy, *trees, mesh)

  def size(tree):
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

  with jax.set_mesh(mesh):
    return found['update/8×16×6'].lower(), *map(size, trees)


@pytest.mark.parametrize('teacher', ['ema', pytest.param('base', marks=pytest.mark.slow)])
def test_student_and_teacher_read_one_base_and_copy_none_of_it(teacher):
  """By the compiled program's own account."""
  lowered, base, factors = update_program(12, 'float32', jax.devices()[:1], **{TEACHER: teacher})
  with without_cache():  # A program that is read back no longer knows what memory it takes.
    used = lowered.compile().memory_analysis()
  # Factors of student and teacher, gradients; moments are not read. The batch is less than the smallest of these.
  sets = {'ema': 3, 'base': 2}[teacher]
  assert base + sets * factors <= used.argument_size_in_bytes < base + (sets + 0.5) * factors
  assert used.temp_size_in_bytes < base / 3


@pytest.mark.campaign
@pytest.mark.tpu_compiler
def test_a_tpu_copies_none_of_a_base_in_bfloat16():
  """What a deeper model needs beside its arguments is far from what its base has more."""
  devices = topology.describe('v5e:2x2').devices
  sizes = SIZES | dict(hidden_size=256, intermediate_size=1024, head_dim=128, vocab_size=1024)
  shallow, deep = (update_program(layers, 'bfloat16', devices, sizes) for layers in (9, 27))
  temporaries = [lowered.compile().memory_analysis().temp_size_in_bytes for lowered, *_ in (shallow, deep)]
  assert temporaries[1] - temporaries[0] < (deep[1] - shallow[1]) / 8
  used = deep[0].compile().memory_analysis()
  assert used.argument_size_in_bytes < 2 * deep[1]
