"""The planner: memory, time and cost add up to what is known by hand; what does not fit or is not there is said."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import get_args, get_type_hints

import jax
import pytest

from benchmarks import tpu_plan
from configs import quickstart, qwen3_8b_chemistry
from models import huggingface
from sdpo_jax.config import Config, MeshConfig, ModelConfig
from sdpo_jax.distributed import mesh as meshes
from sdpo_jax.errors import UserError
from sdpo_jax.planner import hlo, kernels, model, report, run, search, topology
from sdpo_jax.planner import plan as planning
from sdpo_jax.programs import Program
from sdpo_jax.training.run_programs import abstract_parameters, run_programs
from tests import tiny

needs_compiler = pytest.mark.tpu_compiler

SIZES = {
  'model_type': 'qwen3',
  'vocab_size': 1024,
  'hidden_size': 256,
  'intermediate_size': 512,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'head_dim': 128,
  'tie_word_embeddings': False,
}


def settings() -> Config:
  config = quickstart.get_config()
  config.model.dtype = 'bfloat16'
  config.mesh.tensor = 2
  config.val_kwargs.top_p = 0.9
  return config.validate()


@pytest.fixture(scope='module')
def made():
  config = settings()
  slice_ = topology.describe('v5e:2x2')
  policy = huggingface.describe(SIZES, config.model)
  assumptions = planning.Assumptions.of(config, slice_.chip, longest_completion=6.0)
  only = ['prepare', 'prefill', 'decode', 'evaluation/decode', 'zero', 'apply', 'finish']
  said = []
  return planning.make(config, policy, slice_, assumptions, only=only, announce=said.append), policy, said


@needs_compiler
def test_memory_by_kind_is_the_models(made):
  plan, policy, _ = made
  parameters = 4 * sum(math.prod(p.shape) for p in policy.parameter_table())
  norms = 4 * sum(math.prod(p.shape) for p in policy.parameter_table() if p.init == 'ones')
  apply = plan.programs['apply'].hbm
  # Matrices lie in quarters, norm weights whole or in part.
  for part, copies in (('parameters', 1), ('gradients', 1), ('optimizer', 2)):
    low, high = copies * (parameters - norms) / 4, copies * ((parameters - norms) / 4 + norms)
    assert low <= apply[part] * planning.GIB <= high + 64, part  # AdamW also counts its steps.
  assert plan.programs['apply'].hbm_gib == pytest.approx(sum(apply.values()))
  # While the sampler runs, the trainer's state lies beside its own copy of the weights.
  decode = plan.programs['decode'].hbm
  assert {name: decode[name] for name in ('parameters', 'optimizer')} == pytest.approx(
    {name: apply[name] for name in ('parameters', 'optimizer')}
  )
  assert decode['sampling weights'] * planning.GIB >= parameters / 2 / 2
  assert plan.fits


@needs_compiler
def test_a_decode_loop_costs_a_step_times_the_longest_completion(made):
  plan, _, said = made
  decode = plan.programs['decode']
  assert 0 < decode.step_seconds * 6 <= decode.seconds < decode.step_seconds * 12
  # The kernel that attends to the cache has no estimate; what it reads lies between half of the cache and all of it.
  size = decode.hbm['cache'] * planning.GIB / topology.CHIPS['v5e'].hbm_bandwidth
  assert 0.3 * size < decode.seconds_by_source['cache roofline'] / 6 < size
  # 128 rows of a generation batch go through the sampler in one call of 512.
  assert plan.phases['decode'] == pytest.approx(decode.seconds)
  assert decode.seconds == pytest.approx(sum(decode.seconds_by_source.values()))
  # Held-out completions are truncated to a nucleus, which takes the dear branch.
  assert plan.programs['evaluation/decode'].step_seconds > 0
  assert any(line.startswith('  decode/32×8: ') for line in said)


@needs_compiler
def test_evaluation_in_the_same_program_costs_what_its_settings_ask_for():
  config = settings()
  config.rollout.max_batch_rows, config.val_kwargs.n = 64, config.rollout.n  # Slots are fewer than either asks for.
  slice_ = topology.describe('v5e:2x2')
  assumptions = planning.Assumptions.of(config, slice_.chip, evaluation_questions=200)
  plan = planning.make(config, huggingface.describe(SIZES, config.model), slice_, assumptions, only=['decode'])
  decode, held_out = plan.programs['decode'], plan.programs['evaluation/decode']
  assert held_out.hbm == decode.hbm
  assert held_out.step_seconds > 1.05 * decode.step_seconds  # To leave out what is not in the nucleus.


@needs_compiler
def test_the_report_and_the_json_hold_every_program(made):
  plan, *_ = made
  text = report.text(plan)
  for label in plan.programs:
    assert f'| {label} ' in text
  for kind in ('[compiler]', '[arithmetic]'):
    assert kind in text
  values = json.loads(json.dumps(plan.to_json(), allow_nan=False))
  assert values['topology'] == 'v5e:2x2' and values['fits'] is True
  for program in values['programs'].values():
    assert {'hbm_gib', 'matmul_tflop', 'seconds', 'seconds_by_source', 'collective_gb'} <= set(program)


@needs_compiler
def test_what_does_not_fit_is_said_with_its_size():
  config = qwen3_8b_chemistry.get_config()
  slice_ = topology.describe('v5e:1x1')
  policy, _ = model.read(config)
  plan = planning.make(config, policy, slice_, planning.Assumptions.of(config, slice_.chip), only=['apply'])
  assert not plan.fits
  assert plan.programs['apply'].hbm_gib > slice_.chip.hbm_gib
  assert 'DOES NOT FIT: apply' in report.text(plan)
  json.dumps(plan.to_json(), allow_nan=False)


@needs_compiler
@pytest.mark.parametrize(
  'slice_', ['v5e:1x1', *(pytest.param(name, marks=pytest.mark.slow) for name in ('v6e:1x1', 'v5p:1x1x1'))]
)
def test_a_slice_of_one_chip_is_planned(slice_):
  """Nothing is sharded there, so that kernels learn nowhere else which chip they are compiled for."""
  config, described = settings(), topology.describe(slice_)
  config.mesh.tensor = 1
  policy, labels = huggingface.describe(SIZES, config.model), ['prepare', 'prefill', 'decode']
  plan = planning.make(config, policy, described, planning.Assumptions.of(config, described.chip), only=labels)
  assert set(plan.programs) >= set(labels) and plan.chips == 1
  assert not any(estimate.error for estimate in plan.programs.values())
  # Nobody to send anything to, and attention by the kernel, which reads the cache in place.
  assert not any(estimate.collective_gb for estimate in plan.programs.values())
  assert plan.programs['decode'].seconds_by_source['cache roofline'] > 0


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize('slice_', ['v5e:1x1', 'v5e:2x2', 'v5e:8x8'])
def test_the_whole_command_on_a_small_model(tmp_path, slice_):
  config, output, sizes = tiny.make_experiment(tmp_path), tmp_path / 'plan.json', tmp_path / 'sizes.json'
  sizes.write_text(json.dumps(SIZES))
  done = tiny.launch(
    'plan',
    f'--config={config}',
    f'--topology={slice_}',
    f'--model_config={sizes}',
    f'--output={output}',
    '--config.model.dtype=bfloat16',
    f'--config.mesh.tensor={1 if slice_ == "v5e:1x1" else 2}',
    '--price=2',
    cache=tmp_path / 'cache',
  )
  assert done.returncode == 0, done.stderr
  values = json.loads(output.read_text())
  assert {'update', 'decode', 'prefill', 'apply', 'finish', 'zero', 'prepare'} <= set(values['programs'])
  assert values['fits'] and values['programs']['update']['matmul_tflop'] > 0
  assert not values['programs']['update']['unbounded']
  assert values['cost_per_100_steps'] == pytest.approx(2 * values['device_hours_per_100_steps'])
  assert not any((tmp_path / 'cache').rglob('*')), 'A program that cannot be read back was kept.'


@pytest.mark.parametrize(
  ('flags', 'sentence'),
  [
    (['--topology=v9z:8x8'], 'v9z:8x8'),
    (['--topology=v5e:2x2', '--model_config=nowhere.json'], 'nowhere.json'),
    (['--topology=v5e:2x2', '--output=/dev/null/plan.json'], '--output=/dev/null/plan.json cannot be written'),
    (['--topology=v5e:2x2', '--config.mesh.tensor=3'], 'mesh.tensor=3'),
    (['--topology=v5e:2x2', '--search', '--search_over=weather'], 'weather'),
    ([], '--topology'),
  ],
)
@needs_compiler
def test_wrong_input_ends_with_one_sentence(tmp_path, flags, sentence):
  done = tiny.launch('plan', '--config=configs/quickstart.py', *flags, cache=tmp_path)
  assert done.returncode == 2
  assert sentence in done.stderr and 'Traceback' not in done.stderr
  assert 'Compiling' not in done.stderr


# --- arithmetic, without a compiler ----------------------------------------------------------------------------------


def test_useful_operations_of_the_papers_update():
  """64 rows of 2048 + 8192 tokens, student and teacher alike: 733 TFLOP a chip of 64, counted by hand."""
  config = qwen3_8b_chemistry.get_config()
  policy, _ = model.read(config)
  student = planning.forward_flops(policy, 64, 10240, 8192)
  assert 4 * student / 64 == pytest.approx(733e12, rel=0.005)


@pytest.mark.parametrize(('mean', 'micro'), [(8192.0, 4), (4096.0, 2), (2048.0, 1)])
def test_packed_rows_are_counted_by_mean_lengths(mean, micro):
  config = qwen3_8b_chemistry.get_config()
  config.actor.ppo_micro_batch_size = 64
  config.mesh = MeshConfig(fsdp=8, tensor=1)
  mesh = meshes.make_mesh(config.mesh, jax.devices())
  chip = topology.CHIPS['v5e']
  given = dict(mean_completion=mean, mean_prompt=512.0, mean_reprompt=2048.0)
  assumptions = planning.Assumptions.of(config, chip, **given)
  config.actor.pack_sequences = True
  # 256 samples; the completion fills its share of 8192 places before prompts fill theirs.
  assert planning.micro_batch_counts(config, mesh, assumptions) == (micro, 64)
  config.actor.pack_sequences = False
  assert planning.micro_batch_counts(config, mesh, assumptions) == (4, 64)


def test_a_step_adds_up():
  config = qwen3_8b_chemistry.get_config()
  config.actor.ppo_micro_batch_size, config.rollout.max_batch_rows = 64, 128
  config.actor.pack_sequences = False
  mesh = meshes.make_mesh(MeshConfig(fsdp=8, tensor=1), jax.devices())

  def one(seconds):
    return planning.Estimate('x', {}, 1.0, True, seconds=seconds)

  took = dict(prepare=1.0, prefill=2.0, decode=60.0, score=3.0, update=8.0, zero=0.1, apply=0.2, finish=0.3)
  assumptions = planning.Assumptions.of(config, topology.CHIPS['v5e'])
  phases = planning.phase_seconds(config, mesh, assumptions, {name: one(value) for name, value in took.items()})
  # 32 questions × 8 samples through 128 slots, the first half of them in half of the longest one's time; four
  # micro-batches of 64, one optimizer step.
  expected = {
    'prefill': 1 + 2 * 2,
    'decode': (1 + 1 / 2) * 60,
    'score': 4 * 3,
    'update': 4 * 8,
    'optimizer': 0.1 + 0.2 + 0.3,
  }
  assert phases == pytest.approx(expected)
  with_questions = dataclasses.replace(assumptions, evaluation_questions=64)
  phases = planning.phase_seconds(config, mesh, with_questions, {name: one(value) for name, value in took.items()})
  # 64 questions × 16 samples, 8 times as many as slots, every 5 steps.
  assert phases['evaluation'] == pytest.approx((8 * 2 + (1 + 7 / 2) * 60) / 5)


def test_of_each_kind_the_largest_program_is_planned():

  def program(kind, buckets=(), capacity=None, rows=None, evaluation=False):
    return Program(kind, None, (), buckets=buckets, capacity=capacity, rows=rows, evaluation=evaluation)

  found = {
    'update/512×1024': program('update', (512, 1024), rows=8),
    'update/2048×512': program('update', (2048, 512), rows=8),
    'decode/512×64@16': program('decode', (512, 64), 16, 16),
    'decode/512×64': program('decode', (512, 64), 608, 16),
    'decode/512×64#8': program('decode', (512, 64), 608, 8),
    'admit/512×64': program('admit', (512, 64), 608, 16),
    'apply': program('apply'),
    'evaluation/decode/512×64': program('decode', (512, 64), 608, 32, evaluation=True),
  }
  assert planning.select(found, everything=False) == {
    'update': 'update/2048×512',
    'decode': 'decode/512×64',
    'admit': 'admit/512×64',
    'apply': 'apply',
    'evaluation/decode': 'evaluation/decode/512×64',
  }
  every = planning.select(found, everything=True)
  assert set(every.values()) == set(found)


def test_messages_of_the_compiler_that_memory_is_short():
  short = (
    'RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (20.06G) exceeds '
    'available HBM (15.75G).'
  )
  assert planning.parse_out_of_memory(short) == (20.06, [])
  long = """RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 15.90G of 15.75G hbm. Exceeded hbm capacity by 153.6M.

Total hbm usage >= 16.15G:
    reserved        258.00M
    program          15.90G

  Largest program allocations in hbm:

  1. Size: 4.50G
     Operator: op_name="jit(f)/while/body/dot_general" source_file="a.py"
     Shape: bf16[36,64,1024]{2,1,0:T(8,128)(2,1)}
     Unpadded size: 4.50G
     XLA label: fusion.7 = fusion(...)
     Allocation type: HLO temp
     ==========================

  2. Size: 512.00M
     Shape: f32[1024,131072]{1,0:T(8,128)}
     Allocation type: HLO temp
     ==========================
"""
  used, buffers = planning.parse_out_of_memory(long)
  assert used == 15.9
  assert [buffer['gib'] for buffer in buffers] == [4.5, 0.5]
  assert buffers[0]['op_name'] == 'jit(f)/while/body/dot_general' and buffers[0]['shape'] == 'bf16[36,64,1024]'
  assert planning.parse_out_of_memory('INTERNAL: something else') == (None, [])


def test_kernels_come_from_the_table_at_its_own_shapes():
  chip = topology.CHIPS['v5e']

  def array(*shape, dtype='f32'):
    return hlo.Array(dtype, shape, 0)

  topk = hlo.Kernel('topk', 'top', '', (array(512, 151936),), (array(512, 100),), 0, 2)
  assert kernels.seconds(topk, chip) == (pytest.approx(2 * 24.7e-3), kernels.TABLE)
  for width, expected in ((19072, 3.8e-3), (2432, 0.30e-3)):
    sort = hlo.Kernel('sort', 'sort', '', (array(512, width),), (array(512, width),), 0, 1)
    assert kernels.seconds(sort, chip) == (pytest.approx(expected, rel=0.05), kernels.TABLE)
  heads = array(32, 10240, 128, dtype='bf16')
  grid = array(1, 10, 10, dtype='s8')
  for part, expected in (('fwd_residuals', 7.2e-3), ('dkv_no_residuals', 9.9e-3), ('dq_no_residuals', 7.4e-3)):
    kernel = hlo.Kernel('pallas', f'splash_mha_{part}.1', '', (grid, heads, heads, heads), (heads,), 0, 1)
    assert kernels.seconds(kernel, chip) == (pytest.approx(expected), kernels.TABLE)
  other = hlo.Kernel('other', 'gather', '', (heads,), (heads,), 819_000_000, 3)
  assert kernels.seconds(other, chip) == (pytest.approx(3e-3), kernels.ROOFLINE)


def test_sizes_come_from_a_directory_a_file_the_table_or_the_hub(tmp_path, monkeypatch):
  config = qwen3_8b_chemistry.get_config()
  policy, source = model.read(config)
  assert 'Qwen/Qwen3-8B' in source
  assert sum(math.prod(p.shape) for p in policy.parameter_table()) == pytest.approx(8.19e9, rel=0.002)
  (tmp_path / 'config.json').write_text(json.dumps(SIZES))
  for path in (tmp_path, tmp_path / 'config.json'):
    config.model.path = str(path)
    assert model.read(config)[0].config.hidden_size == 256
  config.model.path = 'someone/else'
  monkeypatch.setattr(model, '_download', lambda name: SIZES | {'hidden_size': 512})
  assert model.read(config)[0].config.hidden_size == 512
  assert model.read(config, str(tmp_path / 'config.json'))[0].config.hidden_size == 256
  config.model.path = str(tmp_path / 'nothing')
  with pytest.raises(UserError, match='--model_config'):
    model.read(config)


def test_a_hub_that_cannot_be_reached_is_said(monkeypatch):
  import huggingface_hub

  def unreachable(*_, **__):
    raise OSError('no route')

  monkeypatch.setattr(huggingface_hub, 'hf_hub_download', unreachable)
  config = qwen3_8b_chemistry.get_config()
  config.model.path = 'someone/else'
  with pytest.raises(UserError, match='--model_config=FILE.json'):
    model.read(config)


@pytest.mark.parametrize(
  'given, said',
  [
    ({'mean_completion': 5000.0}, r'--mean_completion=5000 .* at most 4096'),
    ({'longest_completion': 9000.0}, r'--longest_completion=9000 .* data.max_response_length'),
    ({'mean_completion': 20.0, 'longest_completion': 10.0}, r'--mean_completion=20 .* --longest_completion'),
    ({'mean_prompt': 0.0}, r'--mean_prompt=0 must be more than 0'),
    ({'mean_reprompt': 5e4}, r'--mean_reprompt=50000 .*max_reprompt_len'),
  ],
)
def test_lengths_that_cannot_be_are_refused(given, said):
  config = qwen3_8b_chemistry.get_config()
  config.data.max_response_length = 4096
  with pytest.raises(UserError, match=said):
    planning.Assumptions.of(config, topology.CHIPS['v5e'], **given)


def test_the_mean_follows_the_longest():
  assumed = planning.Assumptions.of(qwen3_8b_chemistry.get_config(), topology.CHIPS['v5e'], longest_completion=100.0)
  assert assumed.mean_completion == 50


def test_an_output_that_cannot_be_written_is_found_before_anything_is_compiled(tmp_path):
  (tmp_path / 'folder').mkdir()

  def plan(output):
    return run.plan(
      qwen3_8b_chemistry.get_config(), 'v5e:2x2', output=str(output), given={}, announce=print, show=print
    )

  with pytest.raises(UserError, match='is a directory: name a file'):
    plan(tmp_path / 'folder')
  (tmp_path / 'file').write_text('')
  with pytest.raises(UserError, match='cannot be written'):
    plan(tmp_path / 'file' / 'plan.json')


def test_a_search_ranks_what_fits_by_speed_and_the_rest_by_size(monkeypatch):
  config = qwen3_8b_chemistry.get_config()
  policy, _ = model.read(config)

  tried = []

  def make(config, policy, topology, assumptions, *, only, announce):
    del topology, assumptions, announce
    tried.append((config.mesh.tensor, config.actor.ppo_micro_batch_size, policy.remat, config.rollout.max_batch_rows))
    if 'update' in only:
      rows = config.actor.ppo_micro_batch_size / 64
      seconds, hbm = 100 / rows - config.mesh.tensor, 5 * rows + (4 if policy.remat == 'none' else 0)
    else:
      seconds, hbm = 1e5 / config.rollout.max_batch_rows, config.rollout.max_batch_rows / 20 / config.mesh.tensor
    estimate = planning.Estimate('x', {}, hbm, hbm <= 15.75, seconds=seconds)
    return dataclasses.replace(
      planning.Plan('', '', 64, {}, '', 0, 15.75, True, None, {}, {}, 0, 0, 0, 0, 0, 0, 0, ''),
      fits=estimate.fits,
      programs={'x': estimate},
      step_seconds=seconds,
    )

  monkeypatch.setattr(search.planning, 'make', make)
  assert set(search.REMATS) == set(get_args(get_type_hints(ModelConfig)['remat']))
  slice_ = topology.Topology('v5e:8x8', topology.CHIPS['v5e'], tuple(range(64)))
  found = search.search(config, policy, slice_, None, search.SEARCHED)
  assert {result.settings['mesh.tensor'] for result in found} == {1, 2, 4, 8}
  fits = [result.fits for result in found]
  assert fits == sorted(fits, reverse=True) and {True, False} == set(fits)
  best = found[0]
  # Two rows a chip fit, four do not; 256 rows at most are sampled in a batch.
  assert best.settings['actor.ppo_micro_batch_size'] == 128 and best.settings['rollout.max_batch_rows'] == 256
  assert best.settings['mesh.tensor'] == 8
  # What asks for more than something that does not fit is not compiled: four rows a chip only with the least remat.
  assert {remat for _, micro, remat, _ in tried if micro == 256} <= {'full', config.model.remat}
  assert len(tried) == len(set(tried))
  failing = [result.hbm_gib for result in found if not result.fits]
  assert failing == sorted(failing)
  assert '--config.mesh.tensor=8' in report.search(found)
  with pytest.raises(UserError, match='weather'):
    search.search(config, policy, slice_, None, ['weather'])


def test_every_program_says_what_its_arguments_are():
  config = settings()
  policy = huggingface.describe(SIZES, config.model)
  mesh = meshes.make_mesh(MeshConfig(fsdp=2, tensor=2), jax.devices()[:4])
  found = run_programs(config, policy, *abstract_parameters(policy, mesh), mesh)
  for name, program in found.items():
    assert len(program.holds) == len(program.arguments), name


def test_the_page_of_estimates_is_made_from_results(tmp_path):
  program = {'hbm_gib': 9.5, 'seconds': 7.5, 'matmul_tflop': 715.0, 'error': None, 'step_seconds': 0.011}
  program |= {'collective_gb': {'all-gather fsdp async': 40.0, 'all-reduce fsdp sync': 31.0}}
  program |= {'seconds_by_source': {'compiler': 6.0, 'table': 1.5}}
  plan = {'chips': 64, 'response': 8192, 'update_mfu': 0.48, 'step_seconds': 100.0, 'tokens_per_second': 12345.6}
  plan |= {'cost_per_100_steps': 213.3, 'report': 'THE REPORT', 'programs': {'update': program, 'decode': program}}
  refused = plan | {'programs': {'update': program | {'error': 'too large', 'hbm_gib': None}, 'decode': program}}
  results = {'v5e:8x8': plan, 'v5e:4x4': refused | {'update_mfu': None}}
  text = tpu_plan.tables(results)
  assert 'THE REPORT' in text
  line = next(line for line in text.splitlines() if line.startswith('| v5e:8x8'))
  assert [cell.strip() for cell in line.split('|')[4:9]] == ['9.5', '7.5', '715', '71', '48']
  assert next(line for line in text.splitlines() if line.startswith('| v5e:4x4')).count('?') == 5
  tpu_plan.draw(results, tmp_path / 'scaling.png')
  assert (tmp_path / 'scaling.png').stat().st_size > 1000
  page = (tiny.REPOSITORY / 'docs' / 'performance.md').read_text(encoding='utf-8')
  assert tpu_plan.insert(tpu_plan.insert(page, 'one'), 'two') == tpu_plan.insert(page, 'two')
  with pytest.raises(ValueError, match='holds no'):
    tpu_plan.insert('nothing', text)
