"""Reading compiled programs: small texts with known answers, and programs that the TPU compiler has just made."""

# ruff: noqa: E501 (an instruction is one line)

import math

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np
import pytest

from sdpo_jax import extras
from sdpo_jax.planner import hlo, topology

needs_compiler = pytest.mark.tpu_compiler

# An outer loop of 5 around an inner one of 3 whose bound and step come in through the outer one's tuple; a matrix
# product in a fusion; one asynchronous all-gather that runs beside two fusions; two all-reduces on one channel.
LOOPS = """HloModule test, is_scheduled=true, num_partitions=4

%product (a: bf16[8,16], b: bf16[16,32]) -> bf16[8,32] {
  %a = bf16[8,16]{1,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[16,32]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %dot = bf16[8,32]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%start (a: bf16[8,16]) -> (bf16[8,16], bf16[16,16]) {
  %a = bf16[8,16]{1,0} parameter(0)
  %all-gather.1 = bf16[16,16]{1,0} all-gather(%a), channel_id=3, replica_groups=[2,2]<=[4], dimensions={0}, backend_config={"async_collective_fusion_config":{"flag_start":"-1"}}
  ROOT %begin = (bf16[8,16]{1,0}, bf16[16,16]{1,0}) custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%beside (a: bf16[8,16], b: bf16[16,32]) -> bf16[8,32] {
  %a = bf16[8,16]{1,0} parameter(0)
  %b = bf16[16,32]{1,0} parameter(1)
  %all-gather.2 = bf16[16,16]{1,0} all-gather(%a), channel_id=3, replica_groups=[2,2]<=[4], dimensions={0}, backend_config={"async_collective_fusion_config":{"flag_start":"2"}}
  ROOT %dot.2 = bf16[8,32]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%inner_condition (p.1: (s32[], bf16[8,16], s32[], s32[])) -> pred[] {
  %p.1 = (s32[], bf16[8,16]{1,0}, s32[], s32[]) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %n.1 = s32[] get-tuple-element(%p.1), index=2
  ROOT %less.1 = pred[] compare(%i.1, %n.1), direction=LT
}

%inner_body (p.2: (s32[], bf16[8,16], s32[], s32[])) -> (s32[], bf16[8,16], s32[], s32[]) {
  %p.2 = (s32[], bf16[8,16]{1,0}, s32[], s32[]) parameter(0)
  %i.2 = s32[] get-tuple-element(%p.2), index=0
  %x.2 = bf16[8,16]{1,0} get-tuple-element(%p.2), index=1
  %n.2 = s32[] get-tuple-element(%p.2), index=2
  %m.2 = s32[] get-tuple-element(%p.2), index=3
  %one.2 = s32[] constant(1)
  %next.2 = s32[] add(%i.2, %one.2)
  %tanh.2 = bf16[8,16]{1,0} tanh(%x.2), backend_config={"window_config":{"estimated_cycles":"100"}}
  ROOT %out.2 = (s32[], bf16[8,16]{1,0}, s32[], s32[]) tuple(%next.2, %tanh.2, %n.2, %m.2)
}

%outer_condition (p.3: (s32[], bf16[8,16], s32[])) -> pred[] {
  %p.3 = (s32[], bf16[8,16]{1,0}, s32[]) parameter(0)
  %five = s32[] constant(11)
  %i.3 = s32[] get-tuple-element(%p.3), index=0
  ROOT %less.3 = pred[] compare(%i.3, %five), direction=LT
}

%outer_body (p.4: (s32[], bf16[8,16], s32[])) -> (s32[], bf16[8,16], s32[]) {
  %p.4 = (s32[], bf16[8,16]{1,0}, s32[]) parameter(0)
  %i.4 = s32[] get-tuple-element(%p.4), index=0
  %x.4 = bf16[8,16]{1,0} get-tuple-element(%p.4), index=1
  %n.4 = s32[] get-tuple-element(%p.4), index=2
  %zero.4 = s32[] constant(0)
  %two.4 = s32[] constant(2)
  %begin.4 = s32[] copy(%zero.4)
  %in.4 = (s32[], bf16[8,16]{1,0}, s32[], /*index=3*/s32[]) tuple(%begin.4, %x.4, %n.4, /*index=3*/%n.4)
  %while.4 = (s32[], bf16[8,16]{1,0}, s32[], s32[]) while(%in.4), condition=%inner_condition, body=%inner_body
  %y.4 = bf16[8,16]{1,0} get-tuple-element(%while.4), index=1
  %all-reduce.4 = bf16[8,16]{1,0} all-reduce(%y.4), channel_id=7, replica_groups=mesh['axis_0'=2,'axis_1'=2] {'axis_0'}, to_apply=%add
  %next.4 = s32[] add(%i.4, %two.4)
  ROOT %out.4 = (s32[], bf16[8,16]{1,0}, s32[]) tuple(%next.4, %all-reduce.4, %n.4)
}

ENTRY %main (x: bf16[8,16], w: bf16[16,32]) -> bf16[8,32] {
  %x = bf16[8,16]{1,0:T(8,128)(2,1)} parameter(0)
  %w = bf16[16,32]{1,0:T(8,128)(2,1)} parameter(1)
  %three = s32[] constant(3)
  %one = s32[] constant(1)
  %in = (s32[], bf16[8,16]{1,0}, s32[]) tuple(%one, %x, %three)
  %while = (s32[], bf16[8,16]{1,0}, s32[]) while(%in), condition=%outer_condition, body=%outer_body
  %y = bf16[8,16]{1,0} get-tuple-element(%while), index=1
  %all-reduce = bf16[8,16]{1,0} all-reduce(%y), channel_id=7, replica_groups={{0,2},{1,3}}, to_apply=%add
  %async-collective-start = (bf16[8,16]{1,0}, bf16[16,16]{1,0}) fusion(%all-reduce), kind=kCustom, calls=%start
  %meanwhile.1 = bf16[8,32]{1,0} fusion(%all-reduce, %w), kind=kOutput, calls=%beside, backend_config={"estimated_cycles":"1000"}
  %meanwhile.2 = bf16[8,32]{1,0} fusion(%all-reduce, %w), kind=kOutput, calls=%beside, backend_config={"estimated_cycles":"1000"}
  %kernel = bf16[8,32]{1,0} custom-call(%all-reduce, %w), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"note":"a (line
break"
}}, metadata={op_name="jit(f)/some_kernel"}, backend_config={"custom_call_config":{}}
  ROOT %last = bf16[8,32]{1,0} fusion(%all-reduce, %w), kind=kOutput, calls=%product, backend_config={"estimated_cycles":"10"}
}
"""


@pytest.fixture(scope='module')
def loops():
  return hlo.trace(hlo.parse(LOOPS))


def test_nested_loops_multiply_and_their_bounds_are_found_through_the_outer_tuple(loops):
  assert not loops.unbounded
  assert {e.instruction.name: e.count for e in loops.executions}['tanh.2'] == 15
  assert hlo.cycles(loops) == 15 * 100 + 2 * 1000 + 10


def test_what_takes_most_cycles_comes_first(loops):
  assert hlo.hottest(loops, 3) == [('tanh.2', 1500, 15), ('meanwhile.1', 1000, 1), ('meanwhile.2', 1000, 1)]


def test_matrix_products_inside_fusions_count(loops):
  assert hlo.matmul_flops(loops) == 3 * 2 * 8 * 16 * 32


def test_collectives_count_starts_once_and_shared_channels_apart(loops):
  found = {(c.kind, c.axes, c.asynchronous): c for c in hlo.collectives(loops, {'fsdp': 2, 'tensor': 2})}
  assert set(found) == {('all-gather', ('tensor',), True), ('all-reduce', ('fsdp',), False)}
  gather, reduce = found['all-gather', ('tensor',), True], found['all-reduce', ('fsdp',), False]
  assert (gather.count, gather.payload, gather.wire) == (1, 512, 256)
  assert (reduce.count, reduce.payload, reduce.wire) == (6, 6 * 256, 6 * 256)


def test_a_kernel_without_an_estimate_is_listed_with_what_it_moves(loops):
  (kernel,) = [kernel for kernel in hlo.kernels(loops) if kernel.kind == 'pallas']
  assert (kernel.op_name, kernel.count) == ('jit(f)/some_kernel', 1)
  assert kernel.bytes == 2 * (8 * 16 + 16 * 32 + 8 * 32)


@pytest.mark.parametrize(
  ('written', 'group'),
  [
    ('replica_groups={{0,4},{1,5},{2,6},{3,7}}', [0, 4]),
    ('replica_groups=[4,2]<=[8]', [0, 1]),
    ('replica_groups=[4,2]<=[2,4]T(1,0)', [0, 4]),
    ("replica_groups=mesh['a'=2,'b'=4] {'b'}", [0, 1, 2, 3]),
    ("replica_groups=mesh['a'=2,'b'=4] {'a'}", [0, 4]),
    ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", [0, 4]),
    ("replica_groups=mesh['a'=8] {'a':(1)2}", [0, 4]),
    ("replica_groups=mesh['a'=8] {'a':(2)4}", [0, 1, 2, 3]),
    ('replica_groups={}', list(range(8))),
    ('source_target_pairs={{0,4},{4,0}}', [0, 4]),
    ('source_target_pairs={{0,0},{1,5}}', [1, 5]),
  ],
)
def test_every_way_to_write_a_group(written, group):
  instruction = hlo.Instruction('x', 'all-reduce', (), (), f', channel_id=1, {written}, to_apply=%add')
  assert hlo.replica_group(instruction, 8) == group


def test_a_batched_product_written_as_a_convolution_counts_no_holes():
  # XLA's way to multiply 8 matrices [4, 16] with 8 matrices [16, 32]: all other pairs fall on padding.
  text = """HloModule t
ENTRY %main (a: bf16[8,4,16], b: bf16[8,16,32]) -> bf16[8,4,32] {
  %a = bf16[8,4,16]{2,1,0} parameter(0)
  %b = bf16[8,16,32]{2,1,0} parameter(1)
  ROOT %c = bf16[8,4,32]{2,1,0} convolution(%a, %b), window={size=8 stride=7 pad=0_0 lhs_dilate=8}, dim_labels=0bf_0io->0bf
}
"""
  assert hlo.matmul_flops(hlo.trace(hlo.parse(text))) == 8 * 2 * 4 * 16 * 32


def test_an_unknown_loop_is_named_and_a_scope_bounds_it():
  changed = LOOPS.replace('%n.2, %m.2)', '%next.2, %m.2)')  # The bound now changes from turn to turn.
  found = hlo.trace(hlo.parse(changed), unknown_trips=7)
  assert [loop.name for loop in found.unbounded] == ['while.4']
  assert {e.instruction.name: e.count for e in found.executions}['tanh.2'] == 5 * 7
  scoped = changed.replace(
    'body=%inner_body', 'body=%inner_body, metadata={op_name="jit(f)/while/body/at_most_4/while"}'
  )
  found = hlo.trace(hlo.parse(scoped))
  assert not found.unbounded
  assert {e.instruction.name: e.count for e in found.executions}['tanh.2'] == 5 * 4
  around = changed.replace(
    'body=%inner_body', 'body=%inner_body, metadata={op_name="jit(f)/at_most_4/while/body/inner/while"}'
  )
  assert [loop.name for loop in hlo.trace(hlo.parse(around)).unbounded] == ['while.4']


def test_the_dearest_branch_counts_unless_its_scope_names_a_case_that_does_not_hold():
  text = """HloModule t

%dear (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  ROOT %tanh = f32[8]{0} tanh(%a), backend_config={"estimated_cycles":"100"}
}

%cheap (b: f32[8]) -> f32[8] {
  %b = f32[8]{0} parameter(0)
  ROOT %negate = f32[8]{0} negate(%b), backend_config={"estimated_cycles":"10"}
}

ENTRY %main (x: f32[8], at: s32[]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %at = s32[] parameter(1)
  ROOT %chosen = f32[8]{0} conditional(%at, %x, %x), branch_computations={%dear, %cheap}, metadata={op_name="jit(f)/SCOPE/cond"}
}
"""
  for scope, cases, cycles in (('other', (), 100), ('if_tied', ('tied',), 100), ('if_tied', ('top_k',), 10)):
    assert hlo.cycles(hlo.trace(hlo.parse(text.replace('SCOPE', scope)), cases=cases)) == cycles
  inside = text.replace('SCOPE', 'if_tied/cond/branch_0_fun')
  assert hlo.cycles(hlo.trace(hlo.parse(inside))) == 100


def test_text_that_is_no_module_is_refused():
  with pytest.raises(ValueError, match='ENTRY'):
    hlo.parse('HloModule nothing\n')


def compiled(function, mesh, *arguments):
  """Return a trace of `function` compiled for the mesh; arguments are (shape, dtype, spec)."""
  structs = [
    jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))
    for shape, dtype, spec in arguments
  ]
  return hlo.trace(hlo.parse(jax.jit(function).lower(*structs).compile().as_text()))


@pytest.fixture(scope='module')
def mesh():
  return Mesh(np.array(topology.describe('v5e:2x2').devices).reshape(2, 2), ('fsdp', 'tensor'))


@needs_compiler
def test_the_compilers_loops_and_products(mesh):
  def f(x, w):
    def layer(x, w):
      return lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ w), x), None

    return lax.scan(layer, x, w)[0]

  found = compiled(f, mesh, ((256, 512), jnp.bfloat16, ('fsdp',)), ((5, 512, 512), jnp.bfloat16, ()))
  assert not found.unbounded
  assert hlo.matmul_flops(found) == 5 * 3 * 2 * 128 * 512 * 512


@needs_compiler
@pytest.mark.parametrize(
  'name', ['v5e:1x1', *(pytest.param(name, marks=pytest.mark.campaign) for name in ('v6e:1x1', 'v5p:1x1x1'))]
)
def test_the_clock_turns_cycles_into_the_data_sheets_flops(name):
  slice_ = topology.describe(name)
  single = Mesh(np.array(slice_.devices).reshape(1, 1), ('fsdp', 'tensor'))
  found = compiled(lambda a, b: a @ b, single, *[((4096, 4096), jnp.bfloat16, ())] * 2)
  rate = hlo.matmul_flops(found) / (hlo.cycles(found) / slice_.chip.clock)
  assert 0.8 * slice_.chip.flops < rate <= slice_.chip.flops


@needs_compiler
def test_the_compilers_batched_products(mesh):
  def f(a, b):
    return jnp.einsum('bkgd,bkcd->bkgc', a, b)

  found = compiled(f, mesh, ((8, 4, 16, 128), jnp.bfloat16, ()), ((8, 4, 256, 128), jnp.bfloat16, ()))
  assert hlo.matmul_flops(found) == 2 * 8 * 4 * 16 * 128 * 256


@needs_compiler
def test_the_compilers_collectives_and_their_axes(mesh):
  sizes = dict(mesh.shape)

  def f(x):
    def body(_, x):
      gathered = lax.all_gather(x, 'fsdp', axis=0, tiled=True)
      return lax.psum_scatter(jnp.sin(gathered), 'fsdp', scatter_dimension=0, tiled=True)

    x = lax.fori_loop(0, 6, body, x)
    return lax.psum(x, ('fsdp', 'tensor'))

  spec = PartitionSpec('fsdp')
  sharded = jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=PartitionSpec(), check_vma=False)
  found = compiled(sharded, mesh, ((1024, 1024), jnp.float32, ('fsdp',)))
  wire: dict = {}
  for collective in hlo.collectives(found, sizes):
    key = collective.kind, collective.axes
    wire[key] = wire.get(key, 0) + collective.wire
  assert wire['all-gather', ('fsdp',)] == 6 * 1024 * 1024 * 4 / 2
  # A reduce-scatter may be compiled as an all-reduce and a slice, which sends twice as much.
  scattered = wire.get(('reduce-scatter', ('fsdp',)), 0) + wire.get(('all-reduce', ('fsdp',)), 0) / 2
  assert scattered == 6 * 1024 * 1024 * 4 / 2
  assert wire['all-reduce', ('fsdp', 'tensor')] == 512 * 1024 * 4 * 2 * 3 / 4


@needs_compiler
@pytest.mark.slow
def test_the_compilers_sorts_and_top_k(mesh):
  single = Mesh(mesh.devices.reshape(-1)[:1].reshape(1, 1), mesh.axis_names)

  def f(x):
    return (lax.top_k(x, 100), jnp.sort(x, axis=1))

  kernels = {k.kind: k for k in hlo.kernels(compiled(f, single, ((64, 32768), jnp.float32, ())))}
  assert {'topk', 'sort'} <= set(kernels)
  assert math.prod(kernels['sort'].operands[0].shape) == 64 * 32768


@needs_compiler
def test_slices_and_their_chips():
  assert len(topology.describe('v5e:1x1').devices) == 1
  assert len(topology.describe('v5e:16x16').devices) == 256
  assert topology.describe('v6e:2x4').chip.hbm_gib > topology.describe('v5e:2x4').chip.hbm_gib


@needs_compiler
@pytest.mark.parametrize('name', ['v5e:3x5', 'v5e', 'v9z:2x2', 'v5e:0x2', 'v5e:64x64', 'v5p:32x4x4'])
def test_a_slice_that_there_is_not_is_named(name):
  with pytest.raises(topology.UserError, match=name):
    topology.describe(name)


def test_without_the_compiler_a_sentence_says_what_to_install(monkeypatch):
  monkeypatch.setattr(extras.importlib.util, 'find_spec', lambda _: None)
  monkeypatch.delenv('TPU_LIBRARY_PATH', raising=False)
  with pytest.raises(topology.UserError, match='pip install'):
    topology.describe('v5e:8x8')
