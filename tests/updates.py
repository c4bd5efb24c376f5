"""A tiny model, settings of its objective, and updates of it on given samples."""

from __future__ import annotations

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np

from sdpo_jax.config import Config, MeshConfig, ModelConfig
from sdpo_jax.distributed import mesh as meshes
from sdpo_jax.learning import batching
from sdpo_jax.learning.batching import GenerationBatch
from sdpo_jax.learning.update import make_update, place_state
from sdpo_jax.models import huggingface
from sdpo_jax.training import step
from sdpo_jax.training.specs import batch_spec, objective_spec, update_spec
from tests.generation_batches import NO_MEMBERS, make_config, make_samples, per_token

MODEL = {
  'model_type': 'qwen3',
  'vocab_size': 64,
  'hidden_size': 16,
  'intermediate_size': 32,
  'num_hidden_layers': 2,
  'num_attention_heads': 2,
  'num_key_value_heads': 1,
  'head_dim': 8,
  'rms_norm_eps': 1e-6,
  'rope_theta': 10000.0,
  'tie_word_embeddings': True,
  'max_position_embeddings': 64,
  'hidden_act': 'silu',
  'initializer_range': 0.3,
}
VARIANTS = {
  'ema': {},
  'frozen': {'actor__self_distillation__teacher_regularization': 'frozen'},
  'live': {'actor__self_distillation__teacher_regularization': 'live'},
  'trust-region': {
    'actor__self_distillation__teacher_regularization': 'trust-region',
    'actor__self_distillation__teacher_update_rate': 0.3,
  },
  'full vocabulary': {'actor__self_distillation__distillation_topk': None},
  'sampled token': {
    'actor__self_distillation__full_logit_distillation': False,
    'actor__self_distillation__alpha': 1.0,
  },
  'off-policy': {'actor__ppo_mini_batch_size': 2, 'actor__ppo_epochs': 1},
  'grpo': {'actor__policy_loss__loss_mode': 'vanilla'},
  'entropy and KL': {'actor__entropy_coeff': 0.01, 'actor__kl_loss_coef': 0.1},
}
MESHES = {1: MeshConfig(fsdp=1, tensor=1), 4: MeshConfig(fsdp=2, tensor=2)}


def make_model(seed: int = 0):
  return huggingface.init(MODEL, jax.random.key(seed), ModelConfig(dtype='float32', remat='none'))


def settings(**changes) -> Config:
  """Tiny settings; keys are dotted below `actor.`, or absolute with a leading section name and a dot."""
  config = make_config()
  config.actor.self_distillation.distillation_topk = 8
  config.optimizer.name = 'sgd'  # AdamW's first steps amplify rounding: their size does not depend on the gradient's.
  config.optimizer.lr = 1e-2
  config.optimizer.lr_warmup_steps = 0
  for name, value in changes.items():
    *sections, leaf = name.split('__')
    target = config
    for section in sections:
      target = getattr(target, section)
    setattr(target, leaf, value)
  return config.validate()


@dataclasses.dataclass
class Outcome:
  state: object
  losses: list[float]
  reports: list[dict]
  aux: list[dict]


def run(
  config: Config, samples: batching.GenerationBatch, *, devices: int = 1, batches: int = 1, poison=None
) -> Outcome:
  """`batches` updates on the same samples."""
  policy, parameters = make_model()
  mesh = meshes.make_mesh(MeshConfig(fsdp=devices), jax.devices()[:devices])
  parameters = jax.device_put(parameters, policy_shardings(policy, parameters, mesh))
  state = place_state(update_spec(config), parameters, mesh)
  update = make_update(policy, update_spec(config), jax.tree.map(lambda leaf: leaf.sharding, state))
  size = config.actor.ppo_mini_batch_size * config.rollout.n
  outcome = Outcome(None, [], [], [])
  for _ in range(batches):
    applied = 0
    for start in range(0, len(samples), size):
      grads = update.zero(state.trainable)
      loss = 0.0
      for micro in batching.micro_batches(samples, np.arange(start, start + size), batch_spec(config), devices):
        grads, result = update.accumulate({}, state, grads, meshes.put_rows(mesh, micro.batch))
        loss += float(result.loss)
        outcome.aux.append(jax.device_get(result.aux))
      if poison is not None:
        grads = poison(grads)
      state, report = update.apply(state, grads)
      applied += int(report['taken'])
      outcome.losses.append(loss)
      outcome.reports.append({name: float(value) for name, value in report.items()})
    state = update.advance_teacher(state, np.int32(applied))
  return dataclasses.replace(outcome, state=jax.device_get(state.replace(rng=None)))


def policy_shardings(policy, parameters, mesh):
  """Where the parameter table puts each parameter."""
  return jax.tree.map(
    lambda leaf, axes: meshes.parameter_sharding(mesh, axes.names, leaf.shape), parameters, logical_axes(policy)
  )


class Axes:
  """Names of a leaf's axes, opaque to tree functions."""

  def __init__(self, names):
    self.names = names


def logical_axes(policy):
  tree: dict = {}
  for parameter in policy.parameter_table():
    node = tree
    *folders, leaf = parameter.path
    for folder in folders:
      node = node.setdefault(folder, {})
    node[leaf] = Axes(parameter.axes)
  return tree


def samples_for(config: Config) -> batching.GenerationBatch:
  samples = make_samples(config)
  if config.actor.policy_loss.loss_mode == 'vanilla':
    advantages = per_token([1, -1, 0.5, -0.5, 0, 0, 2, -2])
    samples = dataclasses.replace(samples, teacher_prompts=None, advantages=advantages)
  if objective_spec(config).needs_old_log_probs:
    samples = dataclasses.replace(samples, old_log_probs=samples.rollouts.model_log_probs - 4)
  if objective_spec(config).references:
    samples = dataclasses.replace(samples, references={'initial': samples.rollouts.model_log_probs - 3})
  return samples


def start(config, **changes):
  """(session, state) of a tiny model on one device."""
  policy, parameters = make_model()
  mesh = meshes.make_mesh(MeshConfig(fsdp=1), jax.devices()[:1])
  state = place_state(update_spec(config), jax.device_put(parameters, meshes.replicated(mesh)), mesh)
  session = types.SimpleNamespace(
    **NO_MEMBERS,
    config=config,
    spec=objective_spec(config),
    policy=policy,
    base={},
    mesh=mesh,
    teacher=None,
    update=make_update(policy, update_spec(config), jax.tree.map(lambda leaf: leaf.sharding, state)),
    **changes,
  )
  return session, state


def update(config, policy, base, trainable, teacher, batch: GenerationBatch, *, devices: int = 1, batches: int = 1):
  """`batches` updates by `step.run_update` on the same samples: (states after each, reports)."""
  mesh = meshes.make_mesh(MESHES[devices], jax.devices()[:devices])
  whole = meshes.replicated(mesh)
  base, trainable = jax.device_put((base, trainable), whole)
  if teacher is not None and teacher.base is not None:
    teacher = dataclasses.replace(teacher, base=jax.device_put(teacher.base, whole))
  state = place_state(update_spec(config), trainable, mesh)
  session = types.SimpleNamespace(
    **NO_MEMBERS,
    config=config,
    spec=objective_spec(config),
    policy=policy,
    base=base,
    mesh=mesh,
    teacher=teacher,
    update=make_update(policy, update_spec(config), jax.tree.map(lambda leaf: leaf.sharding, state), teacher),
  )
  states, reports = [], []
  for _ in range(batches):
    state, report = step.run_update(session, state, batch)
    states.append(jax.device_get(state.replace(rng=None)))
    reports.append(report)
  return states, reports


def assert_entropy(report, log_probs, sample: int) -> None:
  """Check that the teacher's entropies of a sample are those of what was said."""
  expected = -(jnp.exp(log_probs) * log_probs).sum(-1)
  np.testing.assert_allclose(report.token_values['teacher_entropy'][sample, : len(expected)], expected, rtol=1e-4)
