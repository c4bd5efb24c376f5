"""`configs/cartridge.py`: cartridges of published models at the sizes of the paper about them."""

import pytest

from sdpo_jax.configs import cartridge, models
from sdpo_jax.errors import UserError
from sdpo_jax.models import huggingface, parameters, published
from sdpo_jax.models.adapters.slot_names import is_slots
from sdpo_jax.planner import plan as planning
from sdpo_jax.planner import topology, workload


@pytest.mark.parametrize('model', cartridge.TENSOR)
def test_every_model_is_valid_and_trains_its_slots_alone(model):
  config = cartridge.get_config(model, 'report.txt', '1024', 'prompts.jsonl', '').validate()
  assert f' {model}' in cartridge.__doc__ and config.name == f'cartridge_{model}_1024'
  assert config.data.val_files == () and config.trainer.test_freq == 0
  policy = huggingface.describe(published.config_json(config.model.path), config.model)
  sizes, table = policy.config, policy.parameter_table()
  trained = parameters.trainable(table)
  # By hand: a key and a value per layer, head and slot, but for the first slot.
  assert parameters.count(trained) == 2 * sizes.layers * sizes.kv_heads * 1023 * sizes.head_dim
  assert all(is_slots(parameter) and parameter.dtype == 'float32' for parameter in trained)
  # The mesh divides heads and everything else, and the published format can hold the slots.
  tensor = config.mesh.tensor
  assert not sizes.kv_heads % tensor and not sizes.heads % tensor and not 8 % tensor
  assert sizes.kv_heads < 1024


def test_the_settings_are_those_that_were_published():
  config = cartridge.get_config().validate()
  assert config.model.path == 'meta-llama/Llama-3.2-3B-Instruct' and config.model.cartridge.tokens == 2048
  assert config.model.cartridge.num_frozen_tokens == 1
  rows, length = config.data.train_batch_size * config.rollout.n, 512 + config.data.max_response_length
  assert (rows, length, config.rollout.temperature) == (64, 1024, 1.0)
  optimizer = config.optimizer
  assert (optimizer.name, optimizer.lr, optimizer.betas, optimizer.grad_clip) == ('adamw', 2e-2, (0.9, 0.999), 1.0)
  assert config.trainer.total_training_steps * rows == 65536
  sampling = config.val_kwargs
  assert (sampling.n, sampling.temperature, config.data.max_response_length) == (8, 0.3, 512)
  assert (config.actor.self_distillation.alpha, config.actor.self_distillation.distillation_topk) == (0.0, None)
  assert config.data.apply_chat_template_kwargs == models.get_config('llama3_2_3b').data.apply_chat_template_kwargs
  assert cartridge.get_config('qwen3_4b').data.enable_thinking is False


def test_the_declared_lengths_fit_what_is_asked_and_answered():
  """64 samples of 100 + 256 tokens on average, on eight devices."""
  config = cartridge.get_config().validate()
  policy = huggingface.describe(published.config_json(config.model.path), config.model)
  assumptions = planning.Assumptions.of(config, topology.CHIPS['v5e'], document=98304)
  assert (assumptions.mean_prompt, assumptions.mean_completion) == (100, 256)
  samples = planning.drawn_samples(config, assumptions, 1)
  work = workload.of_batch(config, policy, samples, 8, share=False)
  assert work.rows <= 40 and work.live_rows == work.rows and work.live_tokens > 0.75 * work.tokens


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ({'model': 'qwen3_14b'}, "model='qwen3_14b' is none of llama3_2_1b, "),
    ({'tokens': '2000.5'}, "tokens='2000.5' must be a multiple of 16 above 0"),
    ({'tokens': '2047'}, "tokens='2047' must be a multiple of 16"),
    ({'tokens': '0'}, "tokens='0' must be"),
    ({'tokens': '-16'}, "tokens='-16' must be"),
    ({'document': ''}, 'document is empty: name a file'),
    ({'prompts': ''}, 'prompts is empty: name a file'),
  ],
)
def test_other_arguments_are_refused_by_name(arguments, message):
  with pytest.raises(UserError, match=f'configs/cartridge.py: {message}'):
    cartridge.get_config(**arguments)
