"""What an engine would take on a TPU slice: its programs are those that it calls, and the numbers are added up by
hand.
"""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest

from sdpo_jax.config import Config, MeshConfig, ModelConfig
from sdpo_jax.distributed.mesh import make_mesh
from sdpo_jax.errors import UserError
from sdpo_jax.models import huggingface, parameters
from sdpo_jax.planner import plan as planning
from sdpo_jax.planner import topology
from sdpo_jax.serving import pricing
from sdpo_jax.serving.engine import Engine, EngineSettings
from sdpo_jax.serving.engine_programs import engine_programs
from sdpo_jax.serving.engine_settings import engine_settings
from sdpo_jax.serving.kept_programs import KeptPrograms
from sdpo_jax.teacher.signal import Teacher
from sdpo_jax.training.run_programs import abstract_table
from tests.letters import TOKENIZER
from tests.planner.planned_engines import RANK, SIZES, leaves, on_one_device, settings

# Names of functions of the engine → kinds of programs; others have the same name.
CALLED = {
  'states': 'student',
  'teacher_states': 'teacher',
  'teacher_scores': 'scores',
  'teacher_of_ids': 'ids',
  'text_states': 'text',
  'text_scores': 'text scores',
  'text_of_ids': 'text ids',
  'model:larger_states': 'model',
  'model:larger_scores': 'model scores',
  'copy': 'admit',
  'advance': 'decode',
  'log_probs': 'log probs',
  'put_slot': 'put slot',
  'get_slot': 'get slot',
  'put_snapshot': 'put snapshot',
  'put_teacher': 'put teacher',
}
# Kinds → those of the functions that they share with others.
PUT = {'put cartridge': 'put snapshot', 'empty kept': 'empty', 'keep': 'admit'}
SAMPLING = (
  'prepare',
  'prepare_base',
  'prefill',
  'extend',
  'empty',
  'copy',
  'advance',
)  # What these return decides what is called.
ADAPTER = 2 * RANK * (4 * (64 + 64) + 3 * (64 + 128))
SLOT = 2 * 2 * 4 * 16  # Numbers of the cache per token: two layers of 4 heads.


def test_the_sizes_of_an_engine_are_those_that_the_settings_say():
  lengths = dict(prompt_buckets=(16,), teacher_buckets=(32,), response_buckets=(8,), score_buckets=(24,))
  config = Config()
  for name, value in lengths.items():
    setattr(config.serve, name, value)
  assert engine_settings(config) == EngineSettings(**lengths)
  others = dict(rows=3, training_rows=5, snapshots=6, teachers=7, slots=9, topk=11, decode_chunk=13, stop_ids=15)
  others |= dict(kept_prefixes=17, logits_chunk_size=19, product='masked', union_support=True)
  others |= dict(cartridges=21, cartridge_slots=23, cartridge_window='windowed')
  for name, value in others.items():
    setattr(config.serve, name, value)
  config.serve.memory_mb = 2
  found = engine_settings(config)
  assert dataclasses.asdict(found) == lengths | others | {'memory_bytes': 2 * 2**20}
  assert EngineSettings((16,), (32,), (8,)).kept_prefixes == 8


@pytest.mark.parametrize('shape, taught', [((1, 1), True), pytest.param((4, 2), False, marks=pytest.mark.slow)])
def test_the_programs_that_are_planned_are_those_that_an_engine_calls(tmp_path, monkeypatch, shape, taught):
  """With another model that teaches and the union of supports, and without."""
  config = settings(response_buckets=(8,), union_support=taught, cartridges=2, cartridge_slots=8)
  mesh = make_mesh(MeshConfig(*shape), jax.devices()[: math.prod(shape)])
  policy = huggingface.describe(SIZES, config.model).on(mesh)
  keep, called = KeptPrograms.keep, set()

  def noted(self, name, function):
    kept = keep(self, name, function)

    def call(*arguments, **static):
      called.add((CALLED.get(name, name), *leaves(arguments), tuple(static.items())))
      if name in SAMPLING:
        return kept(*arguments, **static)
      return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), jax.eval_shape(function, *arguments))

    return call

  monkeypatch.setattr(KeptPrograms, 'keep', noted)
  base = parameters.initialise(parameters.frozen(policy.parameter_table()), jax.random.key(0), 0.1)
  other, models = None, {}
  if taught:
    larger = huggingface.describe(SIZES | {'vocab_size': 512}, ModelConfig(dtype='float32')).on(mesh)
    values = parameters.initialise(larger.parameter_table(), jax.random.key(1), 0.1)
    other, models = Teacher(larger, abstract_table(larger.parameter_table(), mesh)), {'larger': (larger, values)}
  Engine(policy, base, TOKENIZER, engine_settings(config), tmp_path, models=models).compile(lambda _: None)
  planned = {
    (PUT.get(program.kind, program.kind), *leaves(program.arguments), tuple(program.static.items()))
    for program in engine_programs(config, policy, mesh, other).values()
  }
  for kind in {each[0] for each in called | planned}:
    assert {each[1:] for each in called if each[0] == kind} == {each[1:] for each in planned if each[0] == kind}, kind


def test_pools_and_cache_take_what_they_hold():
  held = pricing.pool_bytes(on_one_device(settings(kept_prefixes=5)))
  count = 2 * 4  # Steps of two slots.
  rows, slots = 8, 16 + 16 + 4
  assert {part: held[part] for part in pricing.POOLS} == {
    'snapshots': 3 * ADAPTER * 2,
    'teachers': 5 * ADAPTER * 4,
    'slots': 2 * ADAPTER * 4,
    'moments': 2 * 2 * ADAPTER * 4 + count,
    'cache': rows * slots * SLOT * 2 + 4 * rows,
    'kept prefixes': 5 * (16 * SLOT * 2 + 4),
  }
  assert pricing.pool_bytes(on_one_device(settings(kept_prefixes=0)))['kept prefixes'] == 0


def planned(monkeypatch, config, held=None, **more):
  """Return the plan of an engine on one chip, each of whose programs takes as many seconds as `SECONDS` says, and no
  memory; `held` gets what lies on the chip whichever program runs.
  """

  def answered(topology, mesh, found, names, keep):
    return ((name, None) for name in names)

  def estimated(scenario, name, program, answer, resident, *_):
    if held is not None:
      held.update(resident)
    return planning.Estimate(
      name, {}, 0.0, True, seconds=SECONDS.get(program.kind, 100.0), busy_step_seconds=SECONDS['a token of all rows']
    )

  monkeypatch.setattr(planning, 'compiled_for', answered)
  monkeypatch.setattr(planning, 'estimated', estimated)
  described = topology.Topology('v5e:1x1', topology.CHIPS['v5e'], tuple(jax.devices()[:1]))
  config.plan.mean_prompt, config.plan.mean_completion, config.plan.mean_reprompt = 10, 12, 20
  return pricing.make(config, huggingface.describe(SIZES, config.model), described, **more)


SECONDS = {
  'student': 3.0,
  'teacher': 5.0,
  'first': 7.0,
  'accumulate': 11.0,
  'report': 43.0,
  'zero': 13.0,
  'step': 17.0,
  'log probs': 19.0,
  'prefill': 23.0,
  'put teacher': 29.0,
  'get slot': 31.0,
  'put snapshot': 37.0,
  'prepare': 41.0,
  'a token of all rows': 2.0,
}


def test_a_feedback_is_what_is_done_for_it(monkeypatch):
  """By hand: student and teacher, their scores, a gradient, a step, and the student again.

  For each version by itself, its factors go to the teachers' pool, and come back with two moments.
  """
  plan = planned(monkeypatch, settings())
  sent = 4 * ADAPTER / pricing.HOST_LINK
  host = 4 * sent + 29 + 31
  device = 2 * 3 + 5 + 7 + 11 + 43 + 13 + 17 + 19
  assert plan.latency_s == pytest.approx(device + host + 4 * ADAPTER / 1e9)
  # Two slots, though a micro-batch has eight rows.
  assert plan.feedbacks_per_hour == pytest.approx(3600 / (device / 2 + host))
  # 12 tokens of 8 rows, a prompt, of which eight are read at once, and a version's place.
  sampled = 12 * 2 / 8 + 23 / 8 + sent + 37 + 41
  assert plan.sampled_feedbacks_per_hour == pytest.approx(3600 / (device / 2 + host + sampled))
  assert plan.versions_in_memory == 2**30 // (3 * 4 * ADAPTER)
  more = planned(monkeypatch, settings(snapshots=10**5, memory_mb=None))
  assert more.settings.memory_bytes == 2 * (4 * ADAPTER * (10**5 + 5 + 2) + 12 * ADAPTER * 2)  # An average, too.
  assert planned(monkeypatch, settings(memory_mb=2048)).versions_in_memory == 2**31 // (3 * 4 * ADAPTER)
  text = pricing.text(plan)
  assert plan.cost_per_1000_feedbacks is None and 'chip-hour' not in text
  assert '3 versions to sample from, 5 to score with and 2 in training' in text
  more = pricing.text(planned(monkeypatch, settings(cartridges=2, cartridge_slots=8)))
  assert '3 versions to sample from with 2 cartridges of 8 slots, 5' in more


def test_what_feedbacks_cost_is_said_where_a_price_is(monkeypatch):
  config = settings()
  config.plan.price_per_chip_hour = 1.5
  plan = planned(monkeypatch, config)
  assert plan.cost_per_1000_feedbacks == pytest.approx(1000 * 1.5 / plan.sampled_feedbacks_per_hour)
  assert f'${plan.cost_per_1000_feedbacks:.3g} at $1.5 per chip-hour' in pricing.text(plan)
  assert planned(monkeypatch, config, price=3.0).cost_per_1000_feedbacks == 2 * plan.cost_per_1000_feedbacks
  assert plan.to_json()['latency_s'] == plan.latency_s


@pytest.mark.parametrize(('moments', 'numbers'), [('float32', 3), ('bfloat16', 2), ('none', 1)])
def test_storage_bounds_feedbacks_and_has_a_price(monkeypatch, moments, numbers):
  config = settings()
  config.serve.store.moments, config.serve.store.keep_versions = moments, 5
  config.plan.storage_mb_s, config.plan.price_per_gib_month = 1e-9, 0.5
  plan = planned(monkeypatch, config)
  assert plan.storage_s == pytest.approx(4 * numbers * ADAPTER / 1e-3)
  assert plan.feedbacks_per_hour == pytest.approx(3600 / plan.storage_s)
  assert plan.stored_gib['idle'] == 4 * ADAPTER / 2**30
  assert plan.stored_gib['busy'] == pytest.approx(4 * (11 + numbers - 1) * ADAPTER / 2**30)
  assert plan.storage_cost == {kind: pytest.approx(500 * size) for kind, size in plan.stored_gib.items()}
  assert f'${plan.storage_cost["busy"]:.3g} or ${plan.storage_cost["idle"]:.3g} a month' in pricing.text(plan)


def test_what_cannot_be_served_is_said(monkeypatch):
  config = settings()
  config.model.lora.rank = None
  with pytest.raises(UserError, match=r'serves LoRA adapters: set model\.lora\.rank'):
    planned(monkeypatch, config)


@pytest.mark.campaign
@pytest.mark.tpu_compiler
def test_an_engine_is_planned_for_four_chips():
  config = settings()
  described = topology.describe('v5e:2x2')
  sizes = SIZES | {'hidden_size': 256, 'head_dim': 128, 'num_hidden_layers': 9}
  config.model.lora.target_modules = ('mlp',)
  plan = pricing.make(config, huggingface.describe(sizes, config.model), described)
  assert plan.fits and plan.mesh['fsdp'] * plan.mesh['tensor'] == plan.chips == 4
  kinds = {program.kind for program in on_one_device(config).values()}
  assert kinds <= plan.programs.keys() | {'prepare_base'}
  adapter = 9 * RANK * 3 * (256 + 128)
  assert plan.adapter == adapter
  for label, program in plan.programs.items():
    assert program.error is None and program.seconds > 0, label
    # Factors and two moments of two slots, in float32, whole on `fsdp`.
    assert 12 * 2 * adapter / plan.mesh['tensor'] <= 2**30 * (program.hbm['slots'] + program.hbm['moments']) * 1.01
  assert math.isfinite(plan.latency_s) and math.isfinite(plan.sampled_feedbacks_per_hour)
  text = pricing.text(plan)
  assert 'DOES NOT FIT' not in text and 'feedbacks per hour' in text


def test_another_model_that_teaches_is_planned_with(tmp_path, monkeypatch):
  config = settings()
  for name in ('own', 'other'):
    (tmp_path / name).mkdir()
    (tmp_path / name / 'config.json').write_text(json.dumps(SIZES | {'rms_norm_eps': 1e-6, 'rope_theta': 1e4}))
  config.model.path, config.actor.self_distillation.teacher_model = str(tmp_path / 'own'), str(tmp_path / 'other')
  config.data.max_prompt_length, config.data.max_response_length = 16, 16
  held = {}
  assert {'model', 'model scores'} <= set(planned(monkeypatch, config, held).programs)
  assert held['teacher base'] == held['base'] > 0  # They are of one size, in one dtype.
