"""Updates of packed rows: their gradients are those of rows of one sample each."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from sdpo_jax.config import LoraConfig, MeshConfig, ModelConfig
from sdpo_jax.distributed import mesh as meshes
from sdpo_jax.learning import batching
from sdpo_jax.learning.update import make_update, place_state
from sdpo_jax.models import huggingface, parameters
from sdpo_jax.training.specs import batch_spec, update_spec
from tests import tiers
from tests.generation_batches import per_token
from tests.updates import MODEL, samples_for, settings

HYBRID = {'algorithm__mode': 'hybrid', 'algorithm__sdpo_coef': 0.5}
KINDS = {
  'EMA teacher': {},
  'hybrid': HYBRID,
  'epochs': {'actor__ppo_epochs': 2},
  'hybrid of several epochs': HYBRID | {'actor__ppo_epochs': 2},
  'LoRA': {'model__lora': LoraConfig(rank=4)},
}
ROOM = {
  'data__max_prompt_length': 16,
  'data__max_response_length': 12,
  'actor__self_distillation__max_reprompt_len': 32,
}


def gradients(kind: str, packed: bool):
  """Return the gradients of an optimizer step at which student and teacher differ, and the samples of each row."""
  config = settings(**KINDS[kind], **ROOM, actor__ppo_micro_batch_size=2, actor__pack_sequences=packed)
  advantages = per_token([1, -1, 0.5, -0.5, 0, 0, 2, -2])
  data = dataclasses.replace(samples_for(config), advantages=advantages)
  policy, values = huggingface.init(
    MODEL, jax.random.key(0), ModelConfig(dtype='float32', remat='none', lora=config.model.lora)
  )
  base, trainable = parameters.split(policy.parameter_table(), values)
  draw = np.random.default_rng(1)
  trainable, teacher = (
    jax.tree.map(lambda leaf: leaf + 0.1 * draw.standard_normal(leaf.shape, np.float32), trainable) for _ in range(2)
  )
  mesh = meshes.make_mesh(MeshConfig(1, 1), jax.devices()[:1])
  state = place_state(update_spec(config), jax.device_put(trainable, meshes.replicated(mesh)), mesh)
  state = state.replace(teacher=jax.device_put(teacher, meshes.replicated(mesh)))
  update = make_update(policy, update_spec(config), jax.tree.map(lambda leaf: leaf.sharding, state))
  share = batching.shares_prompts(batch_spec(config), policy)
  sums, rows = update.zero(state.trainable), []
  for micro in batching.micro_batches(data, np.arange(8), batch_spec(config), 1, share):
    sums, _ = update.accumulate(base, state, sums, meshes.put_rows(mesh, micro.batch))
    rows += micro.samples
  return jax.device_get(sums), rows


@pytest.mark.parametrize('kind', tiers.cases(KINDS, default=('hybrid of several epochs', 'LoRA'), slow=KINDS))
def test_packed_rows_have_the_gradients_of_rows_of_one_sample(kind):
  (packed, rows), (single, others) = (gradients(kind, packed) for packed in (True, False))
  assert max(map(len, rows)) > 1 == max(map(len, others))
  assert sorted(sum(rows, [])) == sorted(sum(others, []))
  scale = max(float(abs(leaf).max()) for leaf in jax.tree.leaves(single))
  assert scale > 1e-3
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-6 * scale), packed, single)
