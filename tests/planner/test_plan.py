"""The planner: memory, time and cost add up to what is known by hand; what does not fit or is not there is said."""

# ruff: noqa: E501 (the compiler's message is one line)

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import types
from typing import get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import tpu_plan
from sdpo_jax.config import Config, MeshConfig, ModelConfig
from sdpo_jax.configs import quickstart, qwen3_8b_chemistry, qwen3_8b_livecodebench
from sdpo_jax.distributed import mesh as meshes
from sdpo_jax.distributed import programs
from sdpo_jax.distributed.programs import Program
from sdpo_jax.errors import UserError
from sdpo_jax.learning import batching
from sdpo_jax.models import huggingface
from sdpo_jax.models.attention import splash
from sdpo_jax.models.flops import forward_flops
from sdpo_jax.planner import (
  hlo,
  kernels,
  lengths,
  model,
  plan_text,
  program_facts,
  run,
  search,
  simulation,
  topology,
  workload,
)
from sdpo_jax.planner import plan as planning
from sdpo_jax.training.run_programs import abstract_parameters, run_programs
from sdpo_jax.training.specs import batch_spec
from tests import tiers, tiny

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
  config.plan.longest_completion = config.plan.mean_completion = 6.0
  # As many slots as of a generation batch, so that one program serves both.
  config.val_kwargs.n, config.data.val_max_samples = config.rollout.n, config.data.train_batch_size
  slice_ = topology.describe('v5e:2x2')
  policy = huggingface.describe(SIZES, config.model)
  assumptions = planning.Assumptions.of(config, slice_.chip)
  only = ['prepare', 'prefill', 'decode', 'zero', 'apply', 'finish']
  said = []
  return planning.make(config, policy, slice_, assumptions, only=only, announce=said.append), policy, said


@needs_compiler
@pytest.mark.slow  # By default single programs are planned: one that does not fit, and those of a frozen base.
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
@pytest.mark.slow
def test_a_decode_loop_costs_a_step_times_the_longest_completion(made):
  plan, _, said = made
  decode, [step] = plan.programs['decode'], [each for each in plan.decoding if each['phase'] == 'decode']
  chunk = settings().rollout.decode_chunk
  assert decode.busy_step_seconds * chunk == pytest.approx(decode.seconds)
  # Rows end together, so that none waits for the longest, and the cache is one block of a row; of 128 rows on two
  # shards, one head each, in two layers, the kernels of the cache and of the chunk's own tokens take a block each.
  assert (step['steps'], step['calls'], step['live_rows'], step['rows']) == (6, 1, 128, 128)
  assert [(kernel.rows, kernel.calls, kernel.blocks) for kernel in decode.step_kernels] == [(64, 1, 1)] * 4
  attention = sum(kernel.rows * kernel.active for kernel in decode.step_kernels)
  assert decode.seconds_by_source['cache'] == pytest.approx(chunk * attention)
  assert step['seconds'] == pytest.approx(decode.call_seconds + 6 * (decode.turn_seconds + attention))
  # One chunk of steps: the host looks once at 128 rows.
  assert decode.seconds_by_source['host'] == pytest.approx(planning.HOST_CHUNK + 128 * planning.HOST_ROW)
  assert plan.phases['decode'] == pytest.approx(step['seconds'])
  assert decode.seconds == pytest.approx(sum(decode.seconds_by_source.values()))
  assert plan.fill['sampler'] == 1
  assert any(line.startswith('  decode/32×8: ') for line in said)


@needs_compiler
@pytest.mark.slow
def test_evaluation_in_the_same_program_costs_what_its_settings_ask_for(made):
  plan, *_ = made
  decode, held_out = plan.programs['decode'], plan.programs['evaluation/decode']
  assert held_out.hbm == decode.hbm
  assert held_out.turn_seconds > 1.05 * decode.turn_seconds  # To leave out what is not in the nucleus.
  assert plan.phases['evaluation'] > 1.05 * plan.phases['decode'] / settings().trainer.test_freq


@needs_compiler
@pytest.mark.slow
def test_the_report_and_the_json_hold_every_program(made):
  plan, *_ = made
  text = plan_text.text(plan)
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
  assert 'DOES NOT FIT: apply' in plan_text.text(plan)
  json.dumps(plan.to_json(), allow_nan=False)


@needs_compiler
@pytest.mark.parametrize(
  'slice_',
  [
    pytest.param('v5e:1x1', marks=pytest.mark.slow),
    *(pytest.param(name, marks=pytest.mark.campaign) for name in ('v6e:1x1', 'v5p:1x1x1')),
  ],
)
def test_a_slice_of_one_chip_is_planned(slice_):
  """Nothing is sharded there, so that kernels learn nowhere else which chip they are compiled for."""
  config, described = settings(), topology.describe(slice_)
  config.mesh.tensor = 1
  policy, labels = (
    huggingface.describe(SIZES, config.model),
    ['decode'] if slice_ == 'v5e:1x1' else ['prefill', 'decode'],
  )
  plan = planning.make(config, policy, described, planning.Assumptions.of(config, described.chip), only=labels)
  assert set(plan.programs) >= set(labels) and plan.chips == 1
  assert not any(estimate.error for estimate in plan.programs.values())
  # Nobody to send anything to, and attention by the kernel, which reads the cache in place.
  assert not any(estimate.collective_gb for estimate in plan.programs.values())
  assert plan.programs['decode'].seconds_by_source['cache'] > 0


@needs_compiler
def test_of_an_adapter_the_report_says_what_is_trained_and_what_is_frozen():
  config = settings()
  config.model.lora.rank = 8
  slice_ = topology.describe('v5e:2x2')
  policy = huggingface.describe(SIZES, config.model)
  assumptions = planning.Assumptions.of(config, slice_.chip)
  plan = planning.make(config, policy, slice_, assumptions, source='small', only=['zero'])
  # In and out of the matrices: 256 → 512, 256 → 256 twice, 512 → 256, 256 → 512 twice and 512 → 256, in two layers.
  assert plan.trained == 2 * 8 * (768 + 512 + 512 + 768 + 3 * 768)
  layer = 2 * 256 + 2 * 128 + 2 * 256 * 512 + 2 * 256 * 256 + 3 * 256 * 512
  assert plan.parameters - plan.trained == 2 * 1024 * 256 + 256 + 2 * layer
  held = plan.programs['zero'].hbm
  # Of the factors an axis as long as the rank is never divided: at worst every chip has half of each.
  assert plan.trained * 4 / 4 <= held['parameters'] * planning.GIB <= plan.trained * 4 / 2 + 64
  assert held['optimizer'] == pytest.approx(2 * held['parameters'], rel=0.01)
  first, *_ = plan_text.text(plan).split('\n\n')
  assert first.startswith(
    '2.18 million parameters (small), of which 77,824 are trained and the others frozen, on v5e:2x2:'
  )


@needs_compiler
@pytest.mark.parametrize(
  ('slice_', 'layers'),
  [
    pytest.param('v5e:1x1', 9, id='read as it is', marks=pytest.mark.slow),
    pytest.param('v5e:2x2', 9, id='gathered'),
  ],
)
def test_a_plan_counts_a_frozen_base_as_often_as_it_is_there(slice_, layers):
  config, described = settings(), topology.describe(slice_)
  config.model.lora.rank = 8
  config.mesh.tensor = divided = 1 if slice_ == 'v5e:1x1' else 2
  policy = huggingface.describe(SIZES | {'num_hidden_layers': layers}, config.model)
  assumptions = planning.Assumptions.of(config, described.chip)
  labels = ['prepare_base', 'prepare', 'prefill', 'zero']
  plan = planning.make(config, policy, described, assumptions, only=labels)
  # In bfloat16, but for the norms, which every chip has whole.
  norms = 4 * (256 + layers * (2 * 256 + 2 * 128))
  matrices = 2 * (2 * 1024 * 256 + layers * (2 * 256 * 512 + 2 * 256 * 256 + 3 * 256 * 512))
  found, own = plan.base_gib * planning.GIB, plan.sampling_base_gib * planning.GIB
  assert matrices / plan.chips <= found <= matrices / plan.chips + norms
  sentence = plan_text.base(plan)
  assert sentence in plan_text.text(plan)
  if divided == 1:
    assert own == 0 and 'prepare_base' not in plan.programs
    assert sentence.endswith('is there once: student, teacher and sampler read the same arrays.')
  else:
    # Gathered over one axis and still in halves over the other.
    assert own == pytest.approx(matrices / 2, rel=0.01)
    assert 'the sampler has arrays of its own (mesh.fsdp=2 divides it and the sampler gathers it), ' in sentence
    assert sentence.endswith(f'another {plan.sampling_base_gib:.3g} GiB, made once per run.')
    assert plan.programs['prepare_base'].hbm['sampling base'] == pytest.approx(plan.sampling_base_gib)
  # They are there whichever program runs, and only the factors are a copy of every batch.
  for name, estimate in plan.programs.items():
    assert estimate.hbm['base'] == pytest.approx(plan.base_gib), name
    assert estimate.hbm.get('sampling base', 0) == pytest.approx(plan.sampling_base_gib), name
    assert estimate.hbm_gib == pytest.approx(sum(estimate.hbm.values()))
    assert estimate.hbm.get('sampling weights', 0) * planning.GIB < matrices / 4
  alone = planning.make(config, policy, described, assumptions, only=['zero'])
  assert alone.programs['zero'].hbm == plan.programs['zero'].hbm and set(alone.programs) == {'zero'}


def test_a_base_that_the_sampler_cannot_hold_is_not_said_to_be_there_once():
  refused = planning.Estimate('prepare_base', {}, math.nan, fits=False, error='RESOURCE_EXHAUSTED')
  mesh = {'fsdp': 8, 'tensor': 1}
  plan = types.SimpleNamespace(base_gib=1.9, sampling_base_gib=0.0, mesh=mesh, programs={'prepare_base': refused})
  assert plan_text.base(plan).endswith('(mesh.fsdp=8 divides it and the sampler gathers it), which do not fit.')


@pytest.mark.parametrize(
  ('trained', 'names'),
  [
    ('', ['base', 'parameters', 'optimizer', 'teacher', 'teacher base', 'sampling weights']),
    ('adapter', ['base', 'adapter', 'optimizer', "teacher's adapter", 'teacher base', "sampler's adapter"]),
    ('slots', ['base', 'slots', 'optimizer', "teacher's slots", 'document', "sampler's slots"]),
  ],
)
def test_the_memory_of_what_is_trained_beside_a_model_is_called_that(trained, names):
  held = {
    'base': 2.0,
    'parameters': 0.5,
    'optimizer': 1.0,
    'teacher': 0.5,
    'teacher base': 1.0,
    'sampling weights': 0.25,
  }
  table = plan_text.memory({'decode': planning.Estimate('decode', held, 5.25, True)}, 15.75, trained)
  assert [name.strip() for name in table.splitlines()[0].split('|')][2:-3] == names


@needs_compiler
@pytest.mark.parametrize(
  ('slice_', 'rank'),
  tiers.cases(
    [('v5e:1x1', None), ('v5e:1x1', 4), ('v5e:2x2', None), ('v5e:2x2', 4), ('v5e:8x8', None)],
    slow=[('v5e:1x1', 4), ('v5e:2x2', None)],
  ),
)
def test_the_whole_command_on_a_small_model(tmp_path, slice_, rank):
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
    f'--config.model.lora.rank={rank}',
    '--price=2',
    cache=tmp_path / 'cache',
  )
  assert done.returncode == 0, done.stderr
  values = json.loads(output.read_text())
  assert {'update', 'decode', 'prefill', 'apply', 'finish', 'zero', 'prepare'} <= set(values['programs'])
  assert values['fits'] and values['programs']['update']['matmul_tflop'] > 0
  assert not values['programs']['update']['unbounded']
  assert values['cost_per_100_steps'] == pytest.approx(2 * values['device_hours_per_100_steps'])
  assert (values['base_gib'] > 0) == (values['trained'] < values['parameters']) == (rank is not None)
  # Of a model of so few layers the sampler has a copy, layer by layer.
  assert (values['sampling_base_gib'] > 0) == (rank is not None)
  assert ('the sampler has arrays of its own' in done.stdout) == (rank is not None)
  assert not any((tmp_path / 'cache').rglob('*')), 'A program that cannot be read back was kept.'


@needs_compiler
def test_a_slice_has_as_many_axes_as_those_of_its_generation():
  for name, axes in (('v5e:2x4x2', 2), ('v5p:4x4', 3)):
    with pytest.raises(UserError, match=f'--topology={name}: slices of {name[:3]} have {axes} axes'):
      topology.describe(name)


WRONG = {  # What its sentence must hold → flags.
  'v9z:8x8': ['--topology=v9z:8x8'],
  'nowhere.json': ['--topology=v5e:2x2', '--model_config=nowhere.json'],
  '--output=/dev/null/plan.json cannot be written': ['--topology=v5e:2x2', '--output=/dev/null/plan.json'],
  'mesh.tensor=3': ['--topology=v5e:2x2', '--config.mesh.tensor=3'],
  'weather': ['--topology=v5e:2x2', '--search', '--search_over=weather'],
  '--topology': [],
}


@pytest.mark.slow  # By default test_commands.py types wrong flags, and what a plan cannot use is refused below.
@needs_compiler
def test_wrong_input_ends_with_one_sentence(tmp_path):
  commands = [('plan', ['--config=configs/quickstart.py', *flags]) for flags in WRONG.values()]
  ended = tiny.launch_many(commands, cache=tmp_path / 'cache')
  for sentence, done in zip(WRONG, ended, strict=True):
    assert done.returncode == 2, (sentence, done.stderr)
    assert sentence in done.stderr and 'Traceback' not in done.stderr, sentence
    assert 'Compiling' not in done.stderr, sentence


# --- arithmetic, without a compiler ----------------------------------------------------------------------------------


def test_useful_operations_of_the_papers_update():
  """64 rows of 2048 + 8192 tokens, student and teacher alike: 733 TFLOP a chip of 64, counted by hand."""
  config = qwen3_8b_chemistry.get_config()
  policy, _ = model.read(config)
  student = forward_flops(policy, 64, 10240, 8192)
  assert 4 * student / 64 == pytest.approx(733e12, rel=0.005)


def lengths_of(config):
  return planning.drawn_samples(config, planning.Assumptions.of(config, topology.CHIPS['v5e']), 1)


@pytest.mark.parametrize(('mean', 'micro'), [(8192.0, 4), (4096.0, 4), (2048.0, 1)])
def test_micro_batches_are_those_of_the_runs_own_batching(mean, micro):
  """256 samples of one length: packed, the completion fills its share of 8192 places before prompts fill theirs.

  Of 4096 tokens, two in a row of 8192 are 1 % more than one in each of twice as many rows of 4096.
  """
  config = qwen3_8b_chemistry.get_config()
  config.actor.ppo_micro_batch_size, config.actor.pack_sequences = 64, True
  config.data.response_buckets, config.data.reprompt_buckets = (1024, 4096, 8192), (2560, 10240)
  config.plan.mean_completion = config.plan.longest_completion = mean
  policy, _ = model.read(config)
  samples = lengths_of(config)
  packed = workload.of_batch(config, policy, samples, 64, share=False)
  assert len(packed.updates) == micro
  config.actor.pack_sequences = False
  padded = workload.of_batch(config, policy, samples, 64, share=False)
  assert len(padded.updates) == 4 and padded.live_rows == padded.rows == 256
  # What is live does not depend on where it stands.
  tokens = 256 * (240 + 495.8 + 2 * mean)
  assert packed.live_tokens == padded.live_tokens == pytest.approx(tokens, rel=0.005)
  assert packed.useful_flops == padded.useful_flops
  assert packed.tokens < padded.tokens or packed.updates == padded.updates and mean > 2048


def test_the_update_of_livecodebench_on_64_chips_is_mostly_padding():
  """Eight sequences per optimizer step: 8 of 64 rows are live, and of these what the declared lengths leave."""
  config = qwen3_8b_livecodebench.get_config()
  config.plan.trained_fraction = 0.75
  policy, _ = model.read(config)
  samples = lengths_of(config)
  work = workload.of_batch(config, policy, samples, 64, share=False)
  assert len(work.updates) == 32 and work.rows == 32 * 64 and work.live_rows == 192
  # Every micro-batch pays for 64 rows of a declared length for prompt, teacher prompt and completion.
  declared = {(p + t, r + t, t) for p in (512, 2048) for r in (2560, 10240) for t in (1024, 4096, 8192)}
  assert {shape[1:] for shape in work.updates} <= declared and {shape[0] for shape in work.updates} == {64}
  assert work.tokens == sum(rows * (student + teacher) for rows, student, teacher, _ in work.updates)
  live = samples.trained
  assert work.live_tokens == (samples.prompt + samples.reprompt + 2 * samples.completion)[live].sum()
  assert 0.01 < work.live_tokens / work.tokens < 0.06
  mesh = meshes.make_mesh(MeshConfig(fsdp=8, tensor=1), jax.devices())
  assert not planning.idle_warnings(config, mesh)  # Eight sequences for eight devices.
  config.rollout.n = 4
  assert 'has 4 sequences for 8 devices' in planning.idle_warnings(config, mesh)[0]


@pytest.mark.parametrize('name', ['qwen3_8b_chemistry', 'qwen3_8b_chemistry_grpo', 'qwen3_8b_livecodebench', 'packed'])
def test_every_micro_batch_has_a_registered_program(name):
  config = importlib.import_module(f'configs.{"qwen3_8b_chemistry" if name == "packed" else name}').get_config()
  config.actor.pack_sequences = name == 'packed'
  config.actor.kl_loss_coef = 0.1 if name in ('packed', 'qwen3_8b_livecodebench') else 0.0
  policy, _ = model.read(config)
  mesh = meshes.make_mesh(MeshConfig(fsdp=4, tensor=2), jax.devices())
  found = run_programs(config, policy, *abstract_parameters(policy, mesh), mesh)
  work = workload.of_batch(config, policy, lengths_of(config), 8, batching.shares_prompts(batch_spec(config), policy))
  used = workload.used(found, work)
  assert len(used['update']) == len(work.updates) > 0
  assert {found[name].kind for name in used['update']} == {'update'}
  assert len(used['initial']) == len(work.references) and bool(work.references) == bool(config.actor.kl_loss_coef)
  assert {found[name].kind for name in used['initial']} == ({'initial'} if work.references else set())
  with pytest.raises(ValueError, match='No program of kind'):
    workload.used({}, work)


def test_a_step_adds_up():
  config = qwen3_8b_chemistry.get_config()
  config.rollout.max_batch_rows, config.plan.evaluation_questions = 128, 64
  config.plan.mean_completion = config.plan.longest_completion = 8192.0
  mesh = meshes.make_mesh(MeshConfig(fsdp=8, tensor=1), jax.devices())

  def one(name, seconds, turn=0.0):
    return planning.Estimate(name, {}, 1.0, True, seconds=seconds, call_seconds=seconds, turn_seconds=turn)

  took = dict(prepare=1.0, prefill=2.0, score=3.0, zero=0.1, apply=0.2, finish=0.3)
  estimates = {name: one(name, value) for name, value in took.items()}
  estimates |= {'decode': one('decode', 60.0, turn=2.0), 'update': one('update/large', 8.0)}
  estimates['update/small'] = one('update/small', 1.0)
  estimates['decode/few'] = one('decode/few', 50.0, turn=1.0)
  estimates['evaluation/decode'] = one('evaluation/decode', 70.0, turn=3.0)
  assumptions = planning.Assumptions.of(config, topology.CHIPS['v5e'])
  used = {'score': ('score',) * 4, 'update': ('update/small', 'update/small', 'update/unplanned', 'update/large')}
  scenario = planning.Scenario(config, topology.CHIPS['v5e'], mesh, assumptions)
  work = simulation.Work
  works = {
    'prefill': [('prefill/8', 8, work(calls=4)), ('admit/8', 8, work(calls=9))],
    'decode': [('decode', 128, work(calls=3, turns=90)), ('decode/few', 64, work(calls=2, turns=10))],
    'evaluation': [('decode/few', 64, work(calls=0.5, turns=7)), ('prefill/8', 8, work(calls=5))],
  }
  phases = planning.phase_seconds(scenario, estimates, used, 2, works)
  # Of the micro-batches, the one whose program has no estimate takes the time of the largest; so do decode loops, and
  # in an evaluation those of evaluations come first. What is not planned at all does not count.
  expected = {
    'prefill': 1 + 4 * 2,
    'decode': 3 * 60 + 90 * 2 + 2 * 50 + 10,
    'score': 4 * 3 / 2,
    'update': (1 + 1 + 8 + 8) / 2,
    'optimizer': 0.1 + 0.2 + 0.3,
    'evaluation': 1 / 5 + 0.5 * 50 + 7 + 5 * 2,
  }
  assert phases == pytest.approx(expected)
  config.trainer.test_freq = 0
  assert planning.Assumptions.of(config, topology.CHIPS['v5e']).evaluation_questions == 0


@pytest.mark.parametrize(('mean', 'longest', 'spread'), [(255.8, 8192, 1.0), (4096, 8192, 1.0), (820.8, 1500, 0.7)])
def test_lengths_have_the_mean_and_the_limit_that_were_given(mean, longest, spread):
  found = lengths.quantiles(mean, longest, 256, spread)
  assert found.mean() == pytest.approx(mean, abs=0.5)
  assert found.min() >= 1 and found.max() <= longest and (np.diff(found) >= 0).all()
  if mean < longest / 20:
    # Uncut: the logarithm is normal, so that the median is e^(σ²/2) below the mean.
    assert np.median(found) == pytest.approx(mean / math.exp(spread**2 / 2), rel=0.05)
    assert np.log(found).std() == pytest.approx(spread, rel=0.05)
  assert (lengths.quantiles(64, 64, 8, 1.0) == 64).all()


def test_blocks_of_the_cache_follow_every_row_and_step():
  completions, prompt, block, blocks = [5, 1, 12, 3], 6, 4, 4
  drawn = [min(max(-(-(prompt + step) // block), 1), blocks) for length in completions for step in range(length)]
  assert lengths.live_blocks(completions, prompt, block, blocks) == pytest.approx(np.mean(drawn))


def test_lengths_come_from_a_runs_metrics(tmp_path):
  config = qwen3_8b_chemistry.get_config()

  def line(step, mean, most, **lengths):
    values = {'completion_length_mean': mean, 'completion_length_max': most, 'completion_length_p50': 100.0}
    values['completion_length_p95'] = 100 * math.exp(1.6448536 * 0.8)
    return {'step': step, **{f'rollout/{name}': value for name, value in values.items()}} | {
      'self_distillation/reprompt_sample_fraction': 0.5,
      **lengths,
    }

  text = '\n'.join(json.dumps(values) for values in [line(1, 100.0, 900.0), {'step': 2}, line(3, 300.0, 700.0)])
  (tmp_path / 'metrics.jsonl').write_text(text + '\n')
  for source in (tmp_path, tmp_path / 'metrics.jsonl'):
    assumed = planning.Assumptions.of(config, topology.CHIPS['v5e'], run=str(source))
    assert (assumed.mean_completion, assumed.longest_completion, assumed.trained_fraction) == (200, 900, 0.5)
    assert assumed.completion_spread == pytest.approx(0.8)
    assert assumed.mean_prompt == config.plan.mean_prompt
  longer = [line(step, 500.0, 900.0) for step in range(1, 31)] + [line(step, 250.0, 800.0) for step in range(31, 51)]
  (tmp_path / 'metrics.jsonl').write_text(''.join(json.dumps(values) + '\n' for values in longer))
  assumed = planning.Assumptions.of(config, topology.CHIPS['v5e'], run=str(tmp_path))
  assert (assumed.mean_completion, assumed.longest_completion) == (250, 800)  # Of the last 20 steps.
  prompts = {'rollout/prompt_length_mean': 150.0, 'teacher/prompt_length_mean': 650.0}
  (tmp_path / 'metrics.jsonl').write_text(json.dumps(line(1, 100.0, 900.0, **prompts)) + '\n')
  assumed = planning.Assumptions.of(config, topology.CHIPS['v5e'], run=str(tmp_path))
  assert (assumed.mean_prompt, assumed.mean_reprompt) == (150, 650)
  with pytest.raises(UserError, match='--lengths=.*nothing'):
    planning.Assumptions.of(config, topology.CHIPS['v5e'], run=str(tmp_path / 'nothing'))
  config.data.max_response_length = 512
  with pytest.raises(UserError, match='longest_completion=900 .measured in'):
    planning.Assumptions.of(config, topology.CHIPS['v5e'], run=str(tmp_path))


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
  # What the micro-batches run is planned beside the largest.
  used = planning.select(found, everything=False, used=['update/512×1024', 'update/2048×512'])
  assert used['update'] == 'update/2048×512' and used['update/512×1024'] == 'update/512×1024'
  assert 'decode/512×64@16' not in used


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
  # Of a causal row of 10240 tokens 55 of 100 blocks are computed, for 32 heads: by the matrix units' peak alone the
  # four products of dkv take 1760 × 8192 cycles, the three of dq 1760 × 6144, and the two of the forward pass 1760 ×
  # 4096.
  heads = array(32, 10240, 128, dtype='bf16')
  grid = array(1, 10, 10, dtype='s8')
  # Beside them 3200 grid steps and 320 rows of blocks take what their schedules say.
  for part, products, cycles in (
    ('fwd_residuals', 2, 1760 * 4681 + 3200 * 190 + 320 * 1379),
    ('dkv_no_residuals', 4, 1760 * 8376 + 3200 * 311 + 320 * 654),
    ('dq_no_residuals', 3, 1760 * 6315 + 3200 * 211 + 320 * 334),
  ):
    kernel = hlo.Kernel('pallas', f'splash_mha_{part}.1', '', (grid, heads, heads, heads), (heads,), 0, 2)
    took, kind = kernels.seconds(kernel, chip)
    least = 2 * 1760 * products * 2 * 1024**2 * 128 / chip.flops
    assert took == pytest.approx(2 * cycles / 1.5e9) and took > least and kind == kernels.TABLE, part
  # Short rows have smaller blocks, and more of them on the diagonal: 6 of 9 for 1536 tokens.
  short = array(32, 1536, 128, dtype='bf16')
  kernel = hlo.Kernel('pallas', 'splash_mha_dkv.1', '', (grid, short, short, short), (short,), 0, 1)
  assert kernels.seconds(kernel, chip)[0] == pytest.approx(32 * (6 * 8376 / 4 + 9 * 311 + 3 * 654 / 2) / 1.5e9)
  # Behind 2048 slots, two rows of blocks see three and four of four blocks; where all is seen, eight.
  query, keys = array(24, 2048, 128, dtype='bf16'), array(8, 4096, 128, dtype='bf16')
  for part, scope, cycles in (
    ('fwd', 'attention_after', 7 * 4681 + 8 * 190 + 2 * 1379),
    ('dkv', 'attention_after', 7 * 8376 + 8 * 311 + 4 * 654),
    ('fwd', f'{splash.TO_PREFIX}/vmap', 8 * 4681 + 8 * 190 + 2 * 1379),
  ):
    kernel = hlo.Kernel('pallas', f'splash_mha_{part}.1', scope, (grid, query, keys, keys), (query,), 0, 1)
    assert kernels.seconds(kernel, chip)[0] == pytest.approx(24 * cycles / 1.5e9), (part, scope)
  other = hlo.Kernel('other', 'gather', '', (heads,), (heads,), 819_000_000, 3)
  assert kernels.seconds(other, chip) == (pytest.approx(3e-3), kernels.ROOFLINE)


def test_a_decode_kernel_costs_what_it_skips_and_what_it_computes():
  """256 rows on 8 × 8 chips, 36 layers, 10272 slots: the dumped schedules of bfloat16 and int8 by hand."""
  chip = topology.CHIPS['v5e']
  partial = hlo.Array('f32', (32, 1, 16, 128), 1)

  def kernel(dtype, slots, *scales):
    store = hlo.Array(dtype, (36, 32, 1, slots, 128), 0)
    return kernels.decode_kernel(
      hlo.Kernel('pallas', '', '', (partial, store, store, *scales), (partial,), 0, 36), chip
    )

  cache = kernel('bf16', 10272)
  assert (cache.rows, cache.calls, cache.block, cache.blocks) == (32, 36, 1024, 11)
  # Keys and values of a block are 512 KiB, which takes longer than its 618 bundles.
  assert cache.active == pytest.approx(2**19 / 819e9) and cache.active > 618 / 1.5e9
  # 6144 tokens in every row: 5 of 11 blocks are skipped, for 131 bundles each.
  assert cache.filled(6144) == pytest.approx(36 * 32 * (6 * 2**19 / 819e9 + 5 * 131 / 1.5e9))
  assert 36 * 32 * 5 * cache.skipped == pytest.approx(0.50e-3, rel=0.01)
  assert cache.filled(0) == cache.filled(1) == cache.filled(1024) < cache.filled(1025)
  # The second call of a layer, for the tokens of the chunk: 252 bundles.
  assert kernel('bf16', 32).filled(32) == pytest.approx(36 * 32 * 252 / 1.5e9, rel=0.01)
  # An int8 block is half as long on its way and takes 951 bundles, as long as one of bfloat16: nothing is saved.
  scales = hlo.Array('f32', (36, 32, 1, 1, 10272), 0)
  int8 = kernel('s8', 10272, scales, scales)
  assert int8.active == pytest.approx(951 / 1.5e9, rel=0.01) and int8.active > 0.95 * cache.active


def test_the_latency_of_collectives_counts_messages_one_after_the_other():
  axes = {'fsdp': 8, 'tensor': 8}

  def hops(kind, *names):
    return hlo.Collective(kind, names, False, 1.0, 1.0, 1.0).hops(axes)

  # A ring of eight: seven messages to gather, and seven more where sums come first.
  assert hops('all-gather', 'tensor') == hops('reduce-scatter', 'tensor') == 7
  assert hops('all-reduce', 'tensor') == 14 and hops('all-reduce', 'fsdp', 'tensor') == 28
  assert hops('collective-permute', 'tensor') == 1


def test_what_the_compiler_answered_is_kept(tmp_path, monkeypatch):
  def scoped(name, factor=2.0):
    def function(x):
      with jax.named_scope(name):
        return jnp.tanh(factor * x)

    return jax.jit(function)

  sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  array = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=sharding)
  found = {name: Program('one', scoped(name), (array,), holds=('batch',)) for name in ('first', 'second')}
  found['last'] = Program('one', scoped('last', 3.0), (array,), holds=('batch',), inherits={0: ('second', None)})

  def ask(**changed):
    asked = program_facts.asked_of(found, **({'compiler': 'here', 'folder': str(tmp_path)} | changed))
    return dict(programs.compile_programs(asked, found))

  compiled = []
  compile_ = jax.stages.Lowered.compile

  def counted(self, *args, **kwargs):
    compiled.append(self)
    return compile_(self, *args, **kwargs)

  monkeypatch.setattr(jax.stages.Lowered, 'compile', counted)
  once = ask()
  assert len(compiled) == 3 and once['first'].argument_bytes == ((8 * 16 * 4,),) and once['first'].results == 512

  def elsewhere():
    return ask()

  jax.clear_caches()  # Traced again, from another function, it is the same program.
  again = elsewhere()
  # One from whose shardings another begins is compiled every time; what is kept has no shardings.
  assert len(compiled) == 4 and again['first'] == once['first'] and 'tanh' in again['last'].text
  # The names of scopes count, which say how often a loop runs, and so does who answers.
  found['first'] = Program('one', scoped('another'), (array,), holds=('batch',))
  ask()
  assert len(compiled) == 6
  # So do the compiler's options, which a lowered program does not show.
  found['first'] = dataclasses.replace(found['first'], options={'xla_backend_optimization_level': 0})
  ask()
  assert len(compiled) == 8
  found['first'] = dataclasses.replace(found['first'], options={})
  ask(compiler='elsewhere')
  assert len(compiled) == 11
  ask(folder=None)
  assert len(compiled) == 14


def test_a_refused_program_is_refused_again_without_asking(tmp_path, monkeypatch):
  array = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
  found = {'one': Program('one', jax.jit(jnp.sin), (array,), holds=('batch',))}
  asked = program_facts.asked_of(found, 'here', str(tmp_path))
  messages = [f'{kind}: Used 15.90G of 15.75G hbm' for kind in ('INTERNAL', 'RESOURCE_EXHAUSTED')]
  left = iter(messages)

  def refuse(self, *args, **kwargs):
    raise jax.errors.JaxRuntimeError(next(left))

  monkeypatch.setattr(jax.stages.Lowered, 'compile', refuse)
  # Only what the program itself is at fault for is kept: the third time nobody is asked.
  for message in (*messages, messages[-1]):
    ((_, error),) = programs.compile_programs(asked, found)
    assert isinstance(error, jax.errors.JaxRuntimeError) and str(error) == message


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
  (tmp_path / 'downloaded.json').write_text(json.dumps(SIZES | {'hidden_size': 512}))
  monkeypatch.setattr('huggingface_hub.hf_hub_download', lambda *_: str(tmp_path / 'downloaded.json'))
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
    ({'mean_completion': 5000.0}, r'plan.mean_completion=5000 .* at most 4096'),
    ({'longest_completion': 9000.0}, r'plan.longest_completion=9000 .* data.max_response_length'),
    ({'mean_completion': 20.0, 'longest_completion': 10.0}, r'plan.mean_completion=20 .* the longest completion'),
    ({'mean_prompt': 4000.0}, r'plan.mean_prompt=4000 .* data.max_prompt_length'),
    ({'mean_reprompt': 5e4}, r'plan.mean_reprompt=50000 .*max_reprompt_len'),
  ],
)
def test_lengths_that_cannot_be_are_refused(given, said):
  config = qwen3_8b_chemistry.get_config()
  config.data.max_response_length, config.data.response_buckets = 4096, (4096,)
  for name, value in given.items():
    setattr(config.plan, name, value)
  config.validate()  # A run does not read them.
  with pytest.raises(UserError, match=said):
    planning.Assumptions.of(config, topology.CHIPS['v5e'])


def test_lengths_that_nothing_is_known_of_are_the_limits():
  config = settings()
  assumed = planning.Assumptions.of(config, topology.CHIPS['v5e'])
  assert (assumed.mean_completion, assumed.longest_completion) == (4, 8)
  assert (assumed.mean_prompt, assumed.mean_reprompt) == (32, 96)
  config.plan.longest_completion = 6.0
  assert planning.Assumptions.of(config, topology.CHIPS['v5e']).mean_completion == 3
  config.data.val_max_samples = None
  # Nobody knows how many held-out questions there are: as many as fill 128 rows with 4 samples each.
  assert planning.Assumptions.of(config, topology.CHIPS['v5e']).evaluation_questions == 32


def test_an_output_that_cannot_be_written_is_found_before_anything_is_compiled(tmp_path):
  (tmp_path / 'folder').mkdir()

  def plan(output):
    return run.plan(qwen3_8b_chemistry.get_config(), 'v5e:2x2', output=str(output), announce=print, show=print)

  with pytest.raises(UserError, match='is a directory: name a file'):
    plan(tmp_path / 'folder')
  (tmp_path / 'file').write_text('')
  with pytest.raises(UserError, match='cannot be written'):
    plan(tmp_path / 'file' / 'plan.json')


def test_a_search_ranks_what_fits_by_speed_and_the_rest_by_size(monkeypatch):
  config = qwen3_8b_chemistry.get_config()
  policy, _ = model.read(config)

  tried = []

  def make(config, policy, topology, assumptions, *, only, keep, announce):
    del topology, assumptions, keep, announce
    tried.append((config.mesh.tensor, config.actor.ppo_micro_batch_size, policy.remat, config.rollout.max_batch_rows))
    if 'update' in only:
      rows = config.actor.ppo_micro_batch_size / 64
      seconds, hbm = 100 / rows - config.mesh.tensor, 5 * rows + (4 if policy.remat == 'none' else 0)
    else:
      seconds, hbm = 1e5 / config.rollout.max_batch_rows, config.rollout.max_batch_rows / 20 / config.mesh.tensor
    estimate = planning.Estimate('x', {}, hbm, hbm <= 15.75, seconds=seconds)
    return dataclasses.replace(
      planning.Plan('', '', 64, {}, '', 0, 15.75, True, None, {}, {}, 0, 0, 0, 0, 0, {}, {}, 0, 0, ''),
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
  assert '--config.mesh.tensor=8' in plan_text.search(found)
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
  program = {'hbm_gib': 9.5, 'seconds': 7.5, 'matmul_tflop': 715.0, 'error': None, 'busy_step_seconds': 0.011}
  program |= {'collective_gb': {'all-gather fsdp async': 40.0, 'all-reduce fsdp sync': 31.0}}
  program |= {'seconds_by_source': {'compiler': 6.0, 'table': 1.5}}
  plan = {'chips': 64, 'update_mfu': 0.48, 'step_seconds': 100.0, 'tokens_per_second': 12345.6, 'warnings': []}
  plan |= {'fill': {'rows': 0.5, 'tokens': 0.25}, 'phases': {'evaluation': 21.5}, 'device_hours_per_100_steps': 177.8}
  plan |= {'assumptions': {'mean_completion': 256.0, 'price': 1.2}, 'settings': {'rollout.n': 8}}
  plan |= {'cost_per_100_steps': 213.3, 'report': 'THE REPORT', 'programs': {'update': program, 'decode': program}}
  plan |= {'fits': True}
  refused = plan | {'programs': {'update': program | {'error': 'too large', 'hbm_gib': None}, 'decode': program}}
  results = {'v5e:8x8': plan, 'v5e:4x4': refused | {'fits': False, 'update_mfu': None, 'warnings': ['IDLE']}}
  other = {'topology': 'v5e:8x8', 'parameters': 7298011136, 'mesh': {'fsdp': 8, 'tensor': 8}}
  results |= {'Olmo-3-7B': plan | other | {'report': 'ANOTHER REPORT'}}
  adapter = {
    'trained': 43646976,
    'base_gib': 1.91,
    'sampling_base_gib': 0.0,
    'least_gib': {'update': 5.2, 'decode': 7.87},
  }
  adapter |= {'topology': 'v5e:2x4', 'mesh': {'fsdp': 1, 'tensor': 8}}
  lengths = {'data.max_prompt_length': 2048, 'data.max_response_length': 8192}
  adapter['settings'] = lengths | {'actor.self_distillation.max_reprompt_len': 10240, 'rollout.max_batch_rows': 32}
  program |= {'fits': True, 'hbm': {'cache': 5.6}}
  results |= {'Qwen3-8B with LoRA': plan | adapter, 'Qwen3-4B with LoRA': adapter}
  results |= {'Qwen3-8B with LoRA, 64 slots': plan | adapter | {'programs': {'decode': program | {'fits': False}}}}
  results |= {'Qwen3-8B with LoRA on v5e:8x8': plan | adapter}
  results['v5e:8x8 (one sample per row)'] = plan | {'settings': plan['settings'] | adapter['settings']}
  results['v5e:8x8'] = plan | {'settings': plan['settings'] | adapter['settings']}
  details = 'update, most cycles [compiler]:\n\n```text\n1 s in 2: add\n```\n\n| program | collective, axes |'
  results['v5e:8x8'] |= {'report': f'THE REPORT\n\n{details}'}
  text = tpu_plan.tables(results)
  rows = [[cell.strip() for cell in line.split('|')[1:-1]] for line in text.splitlines() if line.startswith('|')]
  known = ['43.6', 'v5e:2x4', 'fsdp=1 × tensor=8', '32', '5.2', '7.87']
  assert ['Qwen3-8B', *known, '1.91', '0', '9.5', '7.5', '9.5', '11'] in rows
  assert ['Qwen3-4B', *known, 'not compiled', *[''] * 5] in rows  # What was not compiled has no number of a compiler.
  assert ['32', '9.5 (does not fit)', '5.6', '0', '11', '2,909'] in rows  # 32 tokens in 11 ms.
  # 7.5 s for 2 · 8192 + 2048 + 10240 tokens.
  assert [['9.5', '7.5', '262', '715', '71']] * 2 == [row[1:] for row in rows if row[0] in ('all parameters', 'LoRA')]
  assert not any(word in text for word in ('most cycles', 'in 2: add', 'collective, axes'))
  assert 'THE REPORT' in text and '`rollout.n=8`' in text and 'v5e:4x4: IDLE' in text
  line = next(line for line in text.splitlines() if line.startswith('| v5e:8x8'))
  cells = [cell.strip() for cell in line.split('|')[3:-1]]
  olmo = next(line for line in text.splitlines() if line.startswith('| Olmo-3-7B'))
  assert [cell.strip() for cell in olmo.split('|')[2:7]] == ['7.30', 'v5e:8x8', 'fsdp=8 × tensor=8', '64', '256']
  assert 'ANOTHER REPORT' not in text
  assert 'v5e:4x4: does not fit; the compiler refuses `update` for want of memory.' in text
  assert cells == ['256', '9.5', '7.5', '715', '71', '50', '25', '48', '9.5', '11', '21.5', '100', '12,346', '213.3']
  assert next(line for line in text.splitlines() if line.startswith('| v5e:4x4')).count('?') == 5
  assert tpu_plan.cost(plan).startswith('64 chips for 100 steps of 100 s') and '178 chip-hours' in tpu_plan.cost(plan)
  tpu_plan.draw({name: results[name] for name in ('v5e:8x8', 'v5e:4x4')}, tmp_path / 'scaling.png')
  assert (tmp_path / 'scaling.png').stat().st_size > 1000
  page = (tiny.REPOSITORY / 'docs' / 'performance.md').read_text(encoding='utf-8')
  assert tpu_plan.insert(tpu_plan.insert(page, 'one'), 'two') == tpu_plan.insert(page, 'two')
  with pytest.raises(ValueError, match='holds no'):
    tpu_plan.insert('nothing', text)


def test_the_pages_quote_the_shipped_configs():
  """Who changes what decides them makes the pages anew: `python -m benchmarks.tpu_plan --keep=DIR`."""
  docs = tiny.REPOSITORY / 'docs'
  results = json.loads((docs / 'performance' / 'results.json').read_text(encoding='utf-8'))
  points = {point.name: point for point in tpu_plan.EVERY}
  assert set(results) <= set(points)
  for name, plan in results.items():
    assert plan['settings'] == json.loads(json.dumps(tpu_plan.stated(points[name]))), name
    assert plan['topology'] == points[name].slice_
    if plan.get('fits'):
      assert plan['step_seconds'] == pytest.approx(sum(plan['phases'].values()))
  # The main point is a shipped config as it is.
  assert not points[tpu_plan.MAIN].settings
  for name, text in tpu_plan.pages(results).items():
    # What is not there yet is said.
    assert ('Not planned yet: v5e:8x8,' in text) == (tpu_plan.MAIN not in results)
    page = (docs / name).read_text(encoding='utf-8')
    assert tpu_plan.insert(page, text) == page, name
