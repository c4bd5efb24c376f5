"""What a run with a cartridge takes: the model once, the document's keys and values beside it, the slots."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses

import jax
import numpy as np
import pytest

from sdpo_jax.config import CartridgeConfig, Config
from sdpo_jax.distributed import mesh as meshes
from sdpo_jax.errors import UserError
from sdpo_jax.models import huggingface
from sdpo_jax.models.adapters.kv_prefix import KVPrefix
from sdpo_jax.planner import document, plan_text, topology, workload
from sdpo_jax.planner import plan as planning
from sdpo_jax.preflight import memory
from sdpo_jax.training import cartridges
from sdpo_jax.training.run_programs import abstract_parameters, run_programs
from tests.compiling import without_cache
from tests.planner.planned_engines import SIZES

MATRICES = 256 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128)
NORMS = 64 + 2 * (2 * 64 + 2 * 16)
SLOT = 2 * 2 * 4 * 16
DOCUMENT, SLOTS, FROZEN = 3000, 64, 1


def settings(dtype: str = 'float32') -> Config:
  config = Config()
  config.model.path, config.model.dtype, config.model.remat = 'model', dtype, 'full'
  config.model.cartridge = CartridgeConfig(tokens=SLOTS, num_frozen_tokens=FROZEN, document='report.txt')
  config.data.train_files, config.data.environment = ('rows.jsonl',), 'none'
  config.data.train_batch_size = config.actor.ppo_mini_batch_size = 2
  config.data.max_prompt_length, config.data.max_response_length = 16, 8
  config.data.prompt_buckets, config.data.response_buckets = (16,), (8,)
  config.rollout.n, config.rollout.max_batch_rows, config.actor.ppo_micro_batch_size = 2, 4, 1
  sd = config.actor.self_distillation
  sd.teacher_context, sd.teacher_regularization = 'prompt', 'base'
  sd.alpha, sd.distillation_topk = 0.0, None
  config.algorithm.rollout_correction.rollout_is = None
  config.actor.logits_chunk_size = 8
  config.trainer.test_freq = 0
  return config.validate()


def test_an_update_is_given_the_model_once_and_the_document():
  """By the compiled program's own account."""
  config = settings()
  policy = huggingface.describe(SIZES, config.model)
  mesh = meshes.make_mesh(config.mesh, jax.devices()[:1])
  policy = policy.on(mesh)
  teacher = cartridges.abstract_document_teacher(config, policy, mesh, DOCUMENT)
  found = run_programs(config, policy, *abstract_parameters(policy, mesh), mesh, teacher=teacher)
  with jax.set_mesh(mesh), without_cache():
    given = found['update/16×16×8'].lower().compile().memory_analysis().argument_size_in_bytes
  # Of the trained slots the values and the gradients, of the frozen one its values; moments are not read.
  known = 4 * (MATRICES + NORMS + SLOT * (DOCUMENT + FROZEN + 2 * (SLOTS - FROZEN)))
  assert known <= given <= known + 2**10  # The batch takes the rest.


def planned(config: Config, labels: Sequence[str], tokens: int = DOCUMENT, **more) -> planning.Plan:
  described = topology.describe('v5e:2x2')
  policy = huggingface.describe(SIZES | more, config.model)
  assumptions = planning.Assumptions.of(config, described.chip, document=tokens)
  return planning.make(config, policy, described, assumptions, only=labels)


@pytest.mark.tpu_compiler
def test_a_plan_names_what_slots_and_document_take_as_a_check_does():
  """Four chips with a key-value head each: by hand, by the plan, and by the estimate of launch.check."""
  config = settings('bfloat16')
  config.mesh.tensor = 4
  plan = planned(config, ['zero'])
  trained = SLOTS - FROZEN
  known = {
    'parameters': 4 * SLOT * trained / 4,
    'optimizer': 2 * 4 * SLOT * trained / 4,
    'teacher base': 2 * SLOT * DOCUMENT / 4,
  }
  held = plan.programs['zero'].hbm
  for part, size in known.items():
    assert held[part] * planning.GIB == pytest.approx(size, abs=64), part
  assert known['optimizer'] + 64 > plan.moments_gib * planning.GIB >= known['optimizer']
  assert plan.document_gib == held['teacher base'] and (plan.slots, plan.frozen_slots) == (SLOTS, FROZEN)
  # The norms are whole on every chip, in float32.
  model = (2 * (MATRICES + SLOT * FROZEN)) / 4 + 4 * NORMS
  assert plan.base_gib * planning.GIB == pytest.approx(model, rel=0.01)
  text = plan_text.text(plan)
  assert 'The cartridge has 64 slots: 63 trained,' in text and 'and 1 frozen, counted with the base.' in text
  assert "Keys and values of the document's 3,000 tokens take" in text
  policy = huggingface.describe(SIZES, config.model)
  mesh = meshes.make_mesh(dataclasses.replace(config.mesh, fsdp=1), jax.devices()[:4])
  checked = memory.estimate(config, policy.on(mesh), mesh, DOCUMENT).held
  assert checked['document'] == pytest.approx(held['teacher base'] * planning.GIB, rel=0.02)
  assert checked['optimizer'] == pytest.approx(held['optimizer'] * planning.GIB, rel=0.02)
  assert checked['parameters'] == pytest.approx((held['base'] + held['parameters']) * planning.GIB, rel=0.02)


@pytest.mark.slow
@pytest.mark.tpu_compiler
@pytest.mark.parametrize('fsdp', [pytest.param(1, marks=pytest.mark.campaign), 2])
def test_reading_a_document_is_planned_with_what_is_in_memory_then(fsdp):
  config = settings('bfloat16')
  config.mesh.fsdp, config.mesh.tensor = fsdp, 4 // fsdp
  sizes = {'head_dim': 128, 'num_hidden_layers': 9}
  plan = planned(config, ['gather document', 'read document'], 5000, **sizes)
  read = plan.programs['read document']
  assert plan.reading_parts == 3 and plan.reading_seconds == pytest.approx(3 * read.seconds) and read.seconds > 0
  # Keys and values of nine layers and four heads; nothing of the slots and their moments is there yet.
  assert read.hbm['teacher base'] * planning.GIB == pytest.approx(
    2 * 2 * 9 * 4 * 128 * 5000 / config.mesh.tensor, rel=0.1
  )
  assert 'parameters' not in read.hbm and 'optimizer' not in read.hbm
  assert ('gathered base' in read.hbm) == ('gather document' in plan.programs) == (fsdp > 1)
  # Each part attends to itself and to all of the document, in nine layers.
  assert read.kernel_seconds['splash fwd [table]'] > 0
  assert 'It is read once per run, in 3 parts, which takes' in plan_text.cartridge(plan)


def test_a_document_is_as_long_as_the_settings_say_or_its_tokenizer():
  config = settings()
  config.plan.document_tokens = 50_000
  assert document.tokens(config, None) == 50_000  # There is neither such a file nor such a model.
  assert document.tokens(config, 50_024) == 50_000
  with pytest.raises(
    UserError, match='has 50000 tokens, and with a prompt of 16 and a completion of 8 that is more than'
  ):
    document.tokens(config, 50_023)
  config.plan.document_tokens = SLOTS - 1
  with pytest.raises(UserError, match='plan.document_tokens=63 is fewer than model.cartridge.tokens=64'):
    document.tokens(config, None)
  config.model.cartridge.initializer = 'random'
  assert document.tokens(config, SLOTS + 24) == SLOTS - 1
  with pytest.raises(
    UserError, match='model.cartridge.tokens=64: with a prompt of 16 .* is more than the 87 positions'
  ):
    document.tokens(config, SLOTS + 23)
  config.plan.document_tokens = None
  config.model.path = 'configs/facts_model'
  with pytest.raises(UserError, match='tokens of .* cannot be counted: .*report.txt.* Or set plan.document_tokens'):
    document.tokens(config, None)
  config.model.cartridge.document = 'configs/facts_document.txt'
  assert document.tokens(config, None) == 193  # As docs/cartridges.md has it.
  config.actor.policy_loss.loss_mode = 'vanilla'  # Nobody reads it.
  assert document.tokens(config, None) == 0
  plain = Config()
  plain.model.path, plain.data.train_files, plain.plan.document_tokens = 'model', ('rows.jsonl',), 8
  with pytest.raises(UserError, match='plan.document_tokens=8 has no effect without a cartridge'):
    plain.validate()


def test_a_teacher_behind_a_document_costs_attention_to_all_of_it():
  config = settings()
  policy = huggingface.describe(SIZES, config.model)
  teacher = dataclasses.replace(policy, adapter=KVPrefix(DOCUMENT, DOCUMENT))
  lengths = {'mean_prompt': 6, 'mean_completion': 4, 'longest_completion': 8, 'trained_fraction': 1.0}
  others = {'mean_reprompt': 16, 'evaluation_questions': 0, 'document': DOCUMENT, 'price': 1.0}
  samples = planning.drawn_samples(config, planning.Assumptions(**lengths, **others, completion_spread=1.0), 1)
  np.testing.assert_array_equal(samples.reprompt, samples.prompt)  # It reads the student's own prompts.
  alone, behind = (workload.of_batch(config, policy, samples, 1, False, reader) for reader in (policy, teacher))
  # A score and a weighted value of every layer, head and slot; the model alone has its own 64 slots.
  tokens = int((samples.prompt + samples.completion).sum())
  assert behind.useful_flops - alone.useful_flops == 4 * tokens * 2 * 4 * 16 * (DOCUMENT - SLOTS)
  assert planning.Assumptions.of(config, topology.CHIPS['v5e']).mean_reprompt == 16
  config.plan.mean_prompt = 6
  assert planning.Assumptions.of(config, topology.CHIPS['v5e']).mean_reprompt == 6
