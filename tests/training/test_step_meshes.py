"""The quickstart's whole step on meshes, packed and not: loss, gradients and the tree after a step are one device's."""

import functools

import chex
import jax
import numpy as np
import optax
import pytest

from sdpo_jax.config import Config, MeshConfig
from sdpo_jax.configs import quickstart
from sdpo_jax.data.prompts import prompt_tokens
from sdpo_jax.distributed import mesh as meshes
from sdpo_jax.environments import registry
from sdpo_jax.learning import batching
from sdpo_jax.learning.update import make_update, place_state
from sdpo_jax.models import huggingface
from sdpo_jax.models import parameters as parameter_tables
from sdpo_jax.models import tokenizer as tokenizers
from sdpo_jax.teacher.context import build_teacher_context
from sdpo_jax.training.specs import batch_spec, prompt_spec, update_spec
from sdpo_jax.types import Outcome, Rollouts

QUESTIONS, N, T = 4, 4, 8
MESHES = [(8, 1), (4, 2), (2, 4)]


def settings(pack: bool) -> Config:
  config = quickstart.get_config()
  config.data.train_batch_size = config.actor.ppo_mini_batch_size = QUESTIONS
  config.rollout.n = N
  config.data.max_response_length, config.data.response_buckets = 4 * T, (T, 4 * T)
  config.data.max_prompt_length, config.data.prompt_buckets = 64, (32, 64)
  config.actor.self_distillation.max_reprompt_len, config.data.reprompt_buckets = 160, (160,)
  config.actor.self_distillation.distillation_topk = 20
  config.actor.ppo_micro_batch_size = 8
  config.actor.pack_sequences = pack
  config.optimizer.name, config.optimizer.lr, config.optimizer.lr_warmup_steps = 'sgd', 1e-2, 0
  return config.validate()


@functools.cache
def samples() -> batching.GenerationBatch:
  """Teacher-forced completions of real questions, of all lengths, with feedback and demonstrations."""
  config = settings(False)
  tokenizer = tokenizers.load(config.model.path)
  make = registry.get_generator('digits')('train', 0)
  examples = [make(index) for index in range(QUESTIONS)]
  rng = np.random.default_rng(0)
  count = QUESTIONS * N
  tokens = rng.integers(10, 200, (count, T)).astype(np.int32)
  mask = np.arange(T)[None] < rng.integers(1, T + 1, count)[:, None]
  group = np.repeat(np.arange(QUESTIONS, dtype=np.int32), N)
  prompts = [prompt_tokens(tokenizer, examples[g], prompt_spec(config)) for g in group]
  zeros = np.zeros((count, T), np.float32)
  rollouts = Rollouts(
    group, np.zeros((count, 1), np.int32), np.ones((count, 1), bool), tokens * mask, mask, zeros, zeros, zeros,
    ['stop'] * count, [tokenizer.decode(row[row_mask]) for row, row_mask in zip(tokens, mask, strict=True)],
  )  # fmt: skip
  outcomes = [
    Outcome(float(row % 5 == 0), '' if row % 3 == 0 else 'Digit 1 is wrong: expected 0, got 3.') for row in range(count)
  ]
  context = build_teacher_context(
    [examples[g].messages for g in group],
    group,
    rollouts.text,
    outcomes,
    config.actor.self_distillation,
    tokenizer,
    seed=0,
    step=0,
  )
  assert 0 < context.mask.sum() < count
  weights = rng.uniform(0.5, 2, (count, T)).astype(np.float32)
  distill_mask = np.repeat(context.mask[:, None], T, axis=1)
  return batching.GenerationBatch(
    prompts,
    context.prompt_tokens,
    rollouts,
    distill_mask=distill_mask,
    advantages=zeros,
    distill_weights=weights,
    policy_weights=weights,
    references={'initial': (-5 + rng.normal(size=(count, T))).astype(np.float32)},
  )


@functools.cache
def step(shape: tuple[int, int], pack: bool):
  """(loss, gradients, parameters after one step of plain gradient descent, per-token divergences and KL estimates)"""
  config, data = settings(pack), samples()
  config.actor.kl_loss_coef, config.actor.kl_loss_type = 0.1, 'k2'
  mesh = meshes.make_mesh(MeshConfig(*shape), jax.devices()[: shape[0] * shape[1]])
  config.model.vocab_multiple = 1 if mesh.size == 1 else 16  # No mesh divides the 471 tokens.
  policy, parameters = huggingface.load(config.model.path, config.model, mesh=mesh)
  state = place_state(update_spec(config), parameters, mesh)
  update = make_update(policy, update_spec(config), jax.tree.map(lambda leaf: leaf.sharding, state))
  grads, loss = update.zero(state.trainable), 0.0
  divergence, estimates = np.full((2, len(data), T), np.nan, np.float32)
  share = batching.shares_prompts(batch_spec(config), policy)
  micros = list(batching.micro_batches(data, np.arange(len(data)), batch_spec(config), mesh.size, share))
  assert share == pack and any(pack and micro.batch.teacher.parents.any() for micro in micros) == pack
  for micro in micros:
    grads, result = update.accumulate({}, state, grads, meshes.put_rows(mesh, micro.batch))
    loss += float(result.loss)
    data.scatter(micro.samples, np.asarray(result.aux['divergence']), divergence)
    data.scatter(micro.samples, np.asarray(result.aux['initial_kl']), estimates)
  gradients = of_tokens(policy, grads)
  state, _ = update.apply(state, grads)
  return loss, gradients, of_tokens(policy, state.trainable), divergence, estimates


def of_tokens(policy, tree):
  """Return the tree on the host, without the rows of zeros that pad the vocabulary."""

  def strip(parameter, leaf):
    rows = leaf.shape[0] - parameter.padding
    assert not np.any(leaf[rows:])
    return leaf[:rows]

  return parameter_tables.map_tree(strip, policy.parameter_table(), jax.device_get(tree))


# Both axes divided: what a mesh divides knows nothing of packing. The others are compiled as users do.
USUAL = [((4, 2), True)]


@pytest.mark.parametrize(
  ('shape', 'pack'),
  [
    pytest.param(
      shape,
      pack,
      id=f'{shape[0]}x{shape[1]}-{"packed" if pack else "rows"}',
      marks=() if (shape, pack) in USUAL else (pytest.mark.slow, pytest.mark.as_users),
    )
    for shape in MESHES
    for pack in (False, True)
  ],
)
def test_a_mesh_gives_what_one_device_gives(shape, pack):
  loss, gradients, parameters, divergence, estimates = step((1, 1), False)
  mesh_loss, mesh_gradients, mesh_parameters, mesh_divergence, mesh_estimates = step(shape, pack)
  assert abs(loss) > 1e-3 and mesh_loss == pytest.approx(loss, rel=1e-5)
  assert optax.tree.norm(jax.tree.map(np.subtract, mesh_gradients, gradients)) <= 1e-5 * optax.tree.norm(gradients)
  for ours, theirs in zip(jax.tree.leaves(mesh_gradients), jax.tree.leaves(gradients), strict=True):
    # The gradients of key norms are sums of terms a hundred times as large: their own rounding is up to 1.1e-5.
    assert np.linalg.norm(ours - theirs) <= 2e-5 * np.linalg.norm(theirs)
  chex.assert_trees_all_close(mesh_parameters, parameters, rtol=1e-5, atol=1e-7)
  taught = samples().taught  # Packed, the teacher reads no others.
  np.testing.assert_allclose(mesh_divergence[taught], divergence[taught], rtol=1e-4, atol=1e-6)
  np.testing.assert_allclose(mesh_estimates, estimates, rtol=1e-4, atol=1e-6)
  # The penalty is on every token, of samples too of which the teacher knows nothing.
  np.testing.assert_array_equal(np.isfinite(estimates), samples().rollouts.completion_mask)


def test_packing_takes_less_room_and_sharing_prompts_fewer_tokens():
  def taken(pack, share):
    micros = list(batching.micro_batches(samples(), np.arange(16), batch_spec(settings(pack)), share=share))
    held = sum(map(len, (row for micro in micros for row in micro.samples)))
    room = sum(micro.batch.student.tokens.size + micro.batch.teacher.tokens.size for micro in micros)
    return held, room, sum(micro.tokens(micro.batch.teacher) for micro in micros)

  (held, room, tokens), packed, shared = taken(False, False), taken(True, False), taken(True, True)
  assert held == packed[0] == shared[0] == int(samples().taught.sum())
  assert shared[1] <= packed[1] < 0.7 * room
  assert shared[2] < packed[2] == tokens
