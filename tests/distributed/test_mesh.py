"""The mesh and its rules."""

import jax
import numpy as np
import pytest

from sdpo_jax.config import MeshConfig
from sdpo_jax.distributed import mesh as meshes
from sdpo_jax.errors import UserError


def test_minus_one_is_the_rest():
  assert dict(meshes.make_mesh(MeshConfig()).shape) == {'fsdp': 8, 'tensor': 1}
  assert dict(meshes.make_mesh(MeshConfig(fsdp=-1, tensor=2)).shape) == {'fsdp': 4, 'tensor': 2}
  assert dict(meshes.make_mesh(MeshConfig(fsdp=2, tensor=-1)).shape) == {'fsdp': 2, 'tensor': 4}


@pytest.mark.parametrize(
  'config, said',
  [
    (MeshConfig(fsdp=3), r'mesh.fsdp=3 does not divide the 8 devices here: 1, 2, 4, 8 do'),
    (MeshConfig(fsdp=-1, tensor=16), r'mesh.tensor=16 does not divide the 8 devices'),
    (MeshConfig(fsdp=4, tensor=4), r'mesh.fsdp=4 × mesh.tensor=4 does not make up the 8 devices'),
  ],
)
def test_a_wrong_product_is_named(config, said):
  with pytest.raises(UserError, match=said):
    meshes.make_mesh(config)


def test_a_mesh_with_fsdp_alone():
  assert dict(meshes.make_mesh(MeshConfig(fsdp=2)).shape) == {'fsdp': 2, 'tensor': 4}


def test_parameters_are_sharded_where_the_axis_divides_and_whole_elsewhere():
  mesh = meshes.make_mesh(MeshConfig(fsdp=4, tensor=2))

  def spec(axes, shape):
    return tuple(meshes.parameter_sharding(mesh, axes, shape).spec)

  assert spec(('vocab', 'embed'), (10, 8)) == ('tensor', 'fsdp')
  assert spec(('vocab', 'embed'), (9, 6)) == (None, None)
  assert spec(('layers', 'embed', 'heads', 'head_dim'), (3, 8, 2, 4)) == (None, 'fsdp', 'tensor', None)
  assert spec((None,), (8,)) == (None,)


def test_stacks_are_gathered_along_the_first_axis_that_is_split():
  mesh = meshes.make_mesh(MeshConfig(fsdp=4, tensor=2))

  def spec(axes, shape):
    return tuple(meshes.gathered_by_layer(mesh, axes, shape).spec)

  assert spec(('layers', 'embed', 'mlp'), (3, 16, 6)) == (None, ('fsdp', 'tensor'))
  assert spec(('layers', 'mlp', 'embed'), (3, 16, 8)) == (None, ('tensor', 'fsdp'))
  assert spec(('layers', 'heads', 'head_dim', 'embed'), (3, 2, 4, 8)) == (None, 'tensor', None, 'fsdp')
  assert spec(('layers', None), (3, 8)) == (None, None)


def test_rows_are_spread_and_scalars_and_odd_rows_are_not():
  mesh = meshes.make_mesh(MeshConfig())
  placed = meshes.put_rows(mesh, {'rows': np.arange(16).reshape(8, 2), 'odd': np.arange(3), 'step': np.int32(4)})
  assert placed['rows'].addressable_shards[3].data.tolist() == [[6, 7]]
  assert placed['odd'].sharding.is_fully_replicated and placed['step'].sharding.is_fully_replicated
  assert jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), placed)['rows'] == np.arange(16).reshape(8, 2).tolist()


class Chip:
  device_kind = 'TPU v5 lite'


class LargeChip:
  device_kind = 'TPU v5'  # What JAX calls a v5p.


@pytest.mark.parametrize(
  'layers, width, chips, group',
  [(36, 4096, 64, 8), (36, 4096, 4, 4), (28, 1024, 64, 1), (28, 2048, 64, 2), (80, 8192, 256, 8), (36, 4096, 1, 1)],
)
def test_small_groups_sample_a_model_that_fits(layers, width, chips, group):
  # Much as Qwen3's: three MLP matrices, and attention of 8 key-value heads.
  parameters = [
    ('mlp', ('layers', 'embed', 'mlp'), (layers, width, 9 * width)),
    ('keys', ('layers', 'embed', 'kv_heads', 'head_dim'), (layers, width, 8, 128)),
    ('embedding', ('vocab', 'embed'), (152576, width)),
  ]
  assert meshes.sampling_group([Chip()] * chips, parameters) == group
  assert meshes.sampling_group([LargeChip()] * chips, parameters) == (8 if width == 8192 else 1)


def test_a_cpu_samples_alone_and_a_given_fsdp_leaves_the_rest():
  assert dict(meshes.make_mesh(MeshConfig(), parameters=[('w', ('mlp',), (2**40,))]).shape) == {'fsdp': 8, 'tensor': 1}
  assert dict(meshes.make_mesh(MeshConfig(fsdp=2)).shape) == {'fsdp': 2, 'tensor': 4}


@pytest.mark.parametrize(
  'axis, size, fits',
  [
    ('vocab', 264, True),
    ('vocab', 263, False),
    ('kv_heads', 2, False),
    ('heads', 6, False),
    ('mlp', 66, False),
    ('embed', 31, True),
  ],
)
def test_what_a_mesh_cannot_split_is_named_with_the_remedy(axis, size, fits):
  mesh = meshes.make_mesh(MeshConfig(fsdp=2, tensor=4))

  def check():
    return meshes.check_divides(mesh, [('some.weight', ('layers', axis), (3, size))])

  if fits:
    return check()
  with pytest.raises(
    UserError, match=f'mesh.tensor=4 does not divide the {size} entries of axis {axis!r} of the parameter some.weight'
  ):
    check()
