"""Bytes that a decode step reads: small texts with known answers, and a program that the TPU compiler has just made."""

# ruff: noqa: E501 (an instruction is one line)

import pytest

from benchmarks import decode_tpu, tpu_plan
from sdpo_jax.configs import quickstart
from sdpo_jax.models import huggingface
from sdpo_jax.planner import hlo, topology, traffic
from sdpo_jax.planner import plan as planning
from tests import tiny

needs_compiler = pytest.mark.tpu_compiler

# A loop of unknown length around one of 9 layers. A layer's weights are cut from their stack in a product's fusion, the
# embedding and one row of a table are looked up, attention reads the cache and a stack of recent tokens, of which one
# slot is written in place. Before the loop, the scales of the cache are copied. S(1) is VMEM.
DECODE = """HloModule test, is_scheduled=true

%renamed (p: bf16[64,32]) -> bf16[32,64] {
  %p = bf16[64,32]{1,0} parameter(0)
  ROOT %b = bf16[32,64]{0,1} bitcast(%p)
}

%product (stack: bf16[9,16,32], at: s32[], x: bf16[8,16]) -> bf16[8,32] {
  %stack = bf16[9,16,32]{2,1,0} parameter(0)
  %at = s32[] parameter(1)
  %x = bf16[8,16]{1,0} parameter(2)
  %flat = bf16[9,512]{1,0} bitcast(%stack)
  %slice = bf16[1,512]{1,0} dynamic-slice(%flat, %at), dynamic_slice_sizes={1,512}
  %matrix = bf16[16,32]{1,0} bitcast(%slice)
  ROOT %dot = bf16[8,32]{1,0} dot(%x, %matrix), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%head (table: bf16[64,32], x: bf16[8,32]) -> f32[8,64] {
  %table = bf16[64,32]{1,0} parameter(0)
  %x = bf16[8,32]{1,0} parameter(1)
  %turned = bf16[32,64]{0,1} fusion(%table), kind=kLoop, calls=%renamed
  ROOT %dot = f32[8,64]{1,0} dot(%x, %turned), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%write (stack: bf16[9,8,1,32,128], row: bf16[1,8,1,1,128], at: s32[]) -> bf16[9,8,1,32,128] {
  %stack = bf16[9,8,1,32,128]{4,3,2,1,0} parameter(0)
  %row = bf16[1,8,1,1,128]{4,3,2,1,0} parameter(1)
  %at = s32[] parameter(2)
  ROOT %put = bf16[9,8,1,32,128]{4,3,2,1,0} dynamic-update-slice(%stack, %row, %at, %at, %at, %at, %at)
}

%few (p: s32[]) -> pred[] {
  %p = s32[] parameter(0)
  ROOT %c = pred[] constant(true)
}

%layer_condition (p: (s32[], bf16[9,16,32], bf16[9,8,1,2048,128], bf16[9,8,1,32,128])) -> pred[] {
  %p = (s32[], bf16[9,16,32]{2,1,0}, bf16[9,8,1,2048,128]{4,3,2,1,0}, bf16[9,8,1,32,128]{4,3,2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(9)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

%layer_body (p: (s32[], bf16[9,16,32], bf16[9,8,1,2048,128], bf16[9,8,1,32,128])) -> (s32[], bf16[9,16,32], bf16[9,8,1,2048,128], bf16[9,8,1,32,128]) {
  %p = (s32[], bf16[9,16,32]{2,1,0}, bf16[9,8,1,2048,128]{4,3,2,1,0}, bf16[9,8,1,32,128]{4,3,2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %stack = bf16[9,16,32]{2,1,0} get-tuple-element(%p), index=1
  %cache = bf16[9,8,1,2048,128]{4,3,2,1,0} get-tuple-element(%p), index=2
  %recent = bf16[9,8,1,32,128]{4,3,2,1,0} get-tuple-element(%p), index=3
  %one = s32[] constant(1)
  %next = s32[]{S(6)} add(%i, %one)
  %x = bf16[8,16]{1,0:T(8,128)(2,1)S(1)} iota(), iota_dimension=0
  %y = bf16[8,32]{1,0} fusion(%stack, %next, %x), kind=kOutput, calls=%product
  %row = bf16[1,8,1,1,128]{4,3,2,1,0:S(1)} iota(), iota_dimension=1
  %written = bf16[9,8,1,32,128]{4,3,2,1,0} fusion(%recent, %row, %next), kind=kLoop, calls=%write
  %cache_attention.1 = f32[8,1,16,128]{3,2,1,0:S(1)} custom-call(%y, %cache), custom_call_target="tpu_custom_call"
  %cache_attention.2 = f32[8,1,16,128]{3,2,1,0:S(1)} custom-call(%x, %written), custom_call_target="tpu_custom_call"
  ROOT %out = (s32[], bf16[9,16,32]{2,1,0}, bf16[9,8,1,2048,128]{4,3,2,1,0}, bf16[9,8,1,32,128]{4,3,2,1,0}) tuple(%next, %stack, %cache, %written)
}

%step_condition (p: (bf16[64,32], bf16[9,16,32], bf16[9,8,1,2048,128], bf16[9,8,1,32,128], pred[])) -> pred[] {
  %p = (bf16[64,32]{1,0}, bf16[9,16,32]{2,1,0}, bf16[9,8,1,2048,128]{4,3,2,1,0}, bf16[9,8,1,32,128]{4,3,2,1,0}, pred[]{S(1)}) parameter(0)
  ROOT %go = pred[] get-tuple-element(%p), index=4
}

%step_body (p: (bf16[64,32], bf16[9,16,32], bf16[9,8,1,2048,128], bf16[9,8,1,32,128], pred[])) -> (bf16[64,32], bf16[9,16,32], bf16[9,8,1,2048,128], bf16[9,8,1,32,128], pred[]) {
  %p = (bf16[64,32]{1,0}, bf16[9,16,32]{2,1,0}, bf16[9,8,1,2048,128]{4,3,2,1,0}, bf16[9,8,1,32,128]{4,3,2,1,0}, pred[]{S(1)}) parameter(0)
  %table = bf16[64,32]{1,0} get-tuple-element(%p), index=0
  %stack = bf16[9,16,32]{2,1,0} get-tuple-element(%p), index=1
  %cache = bf16[9,8,1,2048,128]{4,3,2,1,0} get-tuple-element(%p), index=2
  %recent = bf16[9,8,1,32,128]{4,3,2,1,0} get-tuple-element(%p), index=3
  %go = pred[]{S(1)} get-tuple-element(%p), index=4
  %zero = s32[] constant(0)
  %tokens = s32[8,1]{1,0:S(1)} iota(), iota_dimension=0
  %x = bf16[8,32]{1,0:S(1)} gather(%table, %tokens), offset_dims={1}, slice_sizes={1,32}
  %in = (s32[], bf16[9,16,32]{2,1,0}, bf16[9,8,1,2048,128]{4,3,2,1,0}, bf16[9,8,1,32,128]{4,3,2,1,0}) tuple(%zero, %stack, %cache, %recent)
  %layers = (s32[], bf16[9,16,32]{2,1,0}, bf16[9,8,1,2048,128]{4,3,2,1,0}, bf16[9,8,1,32,128]{4,3,2,1,0}) while(%in), condition=%layer_condition, body=%layer_body
  %logits = f32[8,64]{1,0} fusion(%table, %x), kind=kOutput, calls=%head
  %weights = f32[8,64]{1,0:S(1)} exponential(%logits)
  %stack.1 = bf16[9,16,32]{2,1,0} get-tuple-element(%layers), index=1
  %cache.1 = bf16[9,8,1,2048,128]{4,3,2,1,0} get-tuple-element(%layers), index=2
  %recent.1 = bf16[9,8,1,32,128]{4,3,2,1,0} get-tuple-element(%layers), index=3
  ROOT %out = (bf16[64,32]{1,0}, bf16[9,16,32]{2,1,0}, bf16[9,8,1,2048,128]{4,3,2,1,0}, bf16[9,8,1,32,128]{4,3,2,1,0}, pred[]{S(1)}) tuple(%table, %stack.1, %cache.1, %recent.1, %go)
}

ENTRY %main (a: bf16[64,32], b: bf16[9,16,32], c: bf16[9,8,1,2048,128], d: f32[9,8,1,1,2048], e: pred[]) -> bf16[9,8,1,2048,128] {
  %a = bf16[64,32]{1,0} parameter(0), metadata={op_name="trainable['embedding']"}
  %b = bf16[9,16,32]{2,1,0} parameter(1), metadata={op_name="trainable['layers']"}
  %c = bf16[9,8,1,2048,128]{4,3,2,1,0} parameter(2), metadata={op_name="cache.stores.keys"}
  %d = f32[9,8,1,1,2048]{4,3,2,1,0} parameter(3), metadata={op_name="cache.stores.key_scales"}
  %e = pred[]{S(1)} parameter(4)
  %scales = f32[9,8,1,1,2048]{1,4,3,2,0} copy(%d)
  %zero = bf16[] constant(0)
  %recent = bf16[9,8,1,32,128]{4,3,2,1,0} broadcast(%zero), dimensions={}
  %in = (bf16[64,32]{1,0}, bf16[9,16,32]{2,1,0}, bf16[9,8,1,2048,128]{4,3,2,1,0}, bf16[9,8,1,32,128]{4,3,2,1,0}, pred[]{S(1)}) tuple(%a, %b, %c, %recent, %e)
  %steps = (bf16[64,32]{1,0}, bf16[9,16,32]{2,1,0}, bf16[9,8,1,2048,128]{4,3,2,1,0}, bf16[9,8,1,32,128]{4,3,2,1,0}, pred[]{S(1)}) while(%in), condition=%step_condition, body=%step_body
  ROOT %out = bf16[9,8,1,2048,128]{4,3,2,1,0} get-tuple-element(%steps), index=2
}
"""


@pytest.fixture(scope='module')
def step():
  return traffic.of_step(hlo.parse(DECODE), 32, ())


def test_weights_are_read_once_a_step_and_looked_up_rows_alone(step):
  assert step.weights == 9 * 16 * 32 * 2 + 64 * 32 * 2 + 8 * 32 * 2


def test_the_cache_is_read_in_whole_blocks_as_far_as_it_is_filled(step):
  slot = 9 * 8 * 128 * 2
  assert (step.slot, step.slots, step.block) == (slot, 2048, 1024)
  # A row without a sample is fetched a block of, too.
  assert [step.cache(filled) for filled in (0, 1, 1024, 1025, 2048)] == [
    slot * read for read in (1024, 1024, 1024, 2048, 2048)
  ]
  assert step.recent == 9 * 8 * 32 * 128 * 2


def test_rows_out_of_use_are_not_read(step):
  fewer = traffic.of_step(hlo.parse(DECODE.replace('= f32[8,1,16,128]', '= f32[2,1,16,128]')), 32, ())
  assert (fewer.slot, fewer.recent) == (step.slot / 4, step.recent / 4)


def test_what_else_reads_the_cache_is_a_stray(step):
  assert step.strays == 9 * 8 * 2048 * 4 / 32
  turned = DECODE.replace(
    '%cache_attention.1 = f32', '%turned = bf16[9,8,1,2048,128]{3,4,2,1,0} copy(%cache)\n  %z = f32'
  )
  assert traffic.of_step(hlo.parse(turned), 32, ()).strays >= 9 * 9 * 8 * 2048 * 128 * 2


def test_copies_count_where_they_make_an_array():
  """Not in the midst of a fusion, as %turned in %head would be."""
  renamed = DECODE.replace('bf16[32,64]{0,1} bitcast(%p)', 'bf16[32,64]{0,1} copy(%p)')
  last = '%logits = f32[8,64]{1,0} fusion(%table'
  made = renamed.replace(last, f'%made = bf16[32,64]{{0,1}} fusion(%table), kind=kLoop, calls=%renamed\n  {last}')
  found = [
    {copy.name for copy in hlo.copies(hlo.trace(hlo.parse(text), unknown_trips=1))} for text in (DECODE, renamed, made)
  ]
  assert found == [{'scales'}, {'scales'}, {'scales', 'made'}]


def test_activations_in_vmem_are_not_read_from_hbm(step):
  logits, products = 8 * 64 * 4, 9 * 8 * 32 * 2
  scalars = step.rest - logits - products
  assert 0 <= scalars < 1024 and step.chunk < 64


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize('cache', ['auto', pytest.param('int8', marks=pytest.mark.campaign)])
def test_a_compiled_step_reads_its_weights_and_its_cache_and_little_else(cache):
  """On 4 chips, rows in halves, heads in halves; ten times the weights that would fit into VMEM."""
  config = quickstart.get_config()
  config.model.dtype, config.rollout.cache_dtype = 'bfloat16', cache
  config.mesh.fsdp = config.mesh.tensor = 2
  config.data.max_prompt_length, config.data.prompt_buckets = 512, (512,)
  config.data.max_response_length, config.data.response_buckets = 1536, (1536,)
  config.data.train_batch_size = config.actor.ppo_mini_batch_size = 8
  config.rollout.max_batch_rows = 64
  sizes = dict(hidden_size=2048, intermediate_size=16384, num_hidden_layers=12, head_dim=128, vocab_size=16384)
  sizes |= dict(num_attention_heads=8, num_key_value_heads=2, tie_word_embeddings=False, model_type='qwen3')
  slice_ = topology.describe('v5e:2x2')
  policy = huggingface.describe(sizes, config.model)
  assumptions = planning.Assumptions.of(config.validate(), slice_.chip)
  plan = planning.make(config, policy, slice_, assumptions, only=('prepare', 'decode'))
  reads = plan.programs['decode'].step_reads
  for filled in (1024, 2048):
    weights, cached = decode_tpu.minimum(policy, config, filled)
    products = 2 * 2048 * 1024 + 2 * 2048 * 256 + 3 * 2048 * 16384
    assert weights == pytest.approx(12 * products + 16384 * 2048, rel=1e-3)
    # Scales and smaller matrices may stay in VMEM, 128 MiB, from step to step.
    assert (1.0 if cache == 'auto' else 0.96) * cached <= reads.cache(filled) <= cached
    assert 0.93 * weights <= reads.weights <= 1.01 * weights
    assert 0.93 * (weights + cached) <= reads.total(filled) <= 1.02 * (weights + cached)
  # Scales at most, once for many steps.
  assert reads.strays <= (0.0 if cache == 'auto' else 0.01) * reads.cache(2048)


def test_the_table_takes_the_fastest_mesh_that_fits():
  fill = dict(
    filled=100,
    cache_gb=2.0,
    read_gb=3.5,
    minimum_gb=3.4,
    ratio=3.5 / 3.4,
    read_ms=4.3,
    attention_ms=2.6,
    planned_ms=6.0,
  )
  fill |= dict(read_mb_per_token=40.0, minimum_mb_per_token=39.0)
  line = dict(rows=8, context=100, cache='int8', mesh={'fsdp': 2, 'tensor': 4}, hbm_total_gib=9.0, fits=True)
  line |= dict(fills={'full': fill}, reads_mb={'weights': 1500.0, 'recent': 2.0, 'rest': 1.0})
  slower = line | {'mesh': {'fsdp': 4, 'tensor': 2}, 'fills': {'full': fill | {'planned_ms': 7.0}}}
  faster = line | {'mesh': {'fsdp': 8, 'tensor': 1}, 'fills': {'full': fill | {'planned_ms': 5.0}}}
  refused = {key: value for key, value in line.items() if key not in ('fills', 'reads_mb')}
  refused |= {'fits': False, 'hbm_total_gib': None}
  lines = [slower, faster | {'fits': False, 'hbm_total_gib': 17.0}, refused, line]
  assert decode_tpu.best(lines) is line
  text = decode_tpu.table(lines)
  cells = [cell.strip() for cell in text.splitlines()[2].split('|')[1:-1]]
  assert cells[:16] == '8 × 100;int8;2 × 4;9.0;100;1.50;2.00;3;3.50;3.40;1.029;40;39;4.3;2.6;6.0'.split(';')
  assert cells[16:] == ['7.0 ms, 9.0', 'does not fit, 17.0', 'does not fit, ?', '6.0 ms, 9.0']
  page = (tiny.REPOSITORY / 'docs' / 'performance.md').read_text(encoding='utf-8')
  written = tpu_plan.insert(page, text, decode_tpu.BEGIN)
  assert text in written
  assert written.partition(decode_tpu.BEGIN)[0] == page.partition(decode_tpu.BEGIN)[0]
