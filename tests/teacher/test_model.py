"""Another model as the teacher, through a run: what it says of the student's own completions is what is learned."""

from __future__ import annotations

import dataclasses
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdpo_jax.config import Config, MeshConfig, ModelConfig
from sdpo_jax.distributed import mesh as meshes
from sdpo_jax.errors import UserError
from sdpo_jax.learning.update import make_update, place_state
from sdpo_jax.models import huggingface
from sdpo_jax.preflight import memory
from sdpo_jax.teacher.signal import Teacher
from sdpo_jax.training import step, teacher_model
from sdpo_jax.training.opening import make_session
from sdpo_jax.training.specs import objective_spec, update_spec
from tests import tiny
from tests.generation_batches import make_samples
from tests.updates import MODEL, make_model, settings

WIDE = {'hidden_size': 48, 'num_hidden_layers': 3, 'vocab_size': 272}
SETTINGS = {
  'actor__self_distillation__teacher_regularization': 'base',
  'actor__self_distillation__distillation_topk': 6,
  'actor__ppo_micro_batch_size': 4,
}


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
  """Return a student, and a larger teacher whose vocabulary is padded further."""
  root = tmp_path_factory.mktemp('models')
  student = tiny.make_model(root / 'student')
  teacher = tiny.make_model(root / 'teacher', seed=1, **WIDE, eos_token_id=258)
  return student, teacher


def configured(folders, **changes) -> Config:
  student, teacher = folders
  config = settings(**SETTINGS)
  config.model.path, config.model.dtype, config.model.remat = str(student), 'float32', 'none'
  config.actor.self_distillation.teacher_model = str(teacher)
  config.actor.self_distillation.teacher_context = 'prompt'
  for name, value in changes.items():
    setattr(config.actor.self_distillation, name, value)
  return config.validate()


def log_softmax(logits: np.ndarray) -> np.ndarray:
  logits = logits - logits.max(-1, keepdims=True)
  return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def logits(policy, base, trainable, prompt, completion) -> np.ndarray:
  """Float64 logits [length, V] of a model that reads a prompt and a completion, asked directly."""
  tokens = np.array([[*prompt, *completion]], np.int32)
  positions = np.arange(tokens.shape[1], dtype=np.int32)[None]
  hidden, unembedding, _ = policy.apply(base, trainable, tokens, positions, np.ones_like(tokens))
  hidden, unembedding = np.float64(hidden[0, -len(completion) - 1 : -1]), np.float64(unembedding)
  return hidden @ unembedding.T


def formula(student: np.ndarray, teacher: np.ndarray, k: int, alpha: float) -> np.ndarray:
  """Return the divergence [length] over the student's top K with a bucket for the rest, in float64 from log-probs
  [length, V].
  """
  ids = np.argsort(-student, axis=1)[:, :k]

  def with_rest(log_probs):
    kept = np.exp(np.take_along_axis(log_probs, ids, axis=1))
    return np.concatenate([kept, np.maximum(1 - kept.sum(1, keepdims=True), 1e-7)], axis=1)

  s, t = with_rest(student), with_rest(teacher)
  mixture = (1 - alpha) * s + alpha * t
  return ((1 - alpha) * s * np.log(s / mixture) + alpha * t * np.log(t / mixture)).sum(1)


@pytest.mark.parametrize('devices', [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_teacher_whose_vocabulary_is_padded_further_teaches_by_the_formula(devices):
  """Its entries behind the student's vocabulary are large, and are no part of its distribution."""
  config = settings(**SETTINGS)
  policy, parameters = make_model()
  wide = MODEL | {'hidden_size': 32, 'num_hidden_layers': 3, 'head_dim': 16, 'vocab_size': MODEL['vocab_size'] + 8}
  large, theirs = huggingface.init(wide, jax.random.key(5), ModelConfig(dtype='float32', remat='none'))
  assert large.vocab_size == policy.vocab_size + 8
  theirs['embedding'] = theirs['embedding'].at[policy.vocab_size :].mul(20.0)
  mesh = meshes.make_mesh(MeshConfig(fsdp=2, tensor=2) if devices == 4 else MeshConfig(1, 1), jax.devices()[:devices])
  whole = meshes.replicated(mesh)
  parameters, theirs = jax.device_put((parameters, theirs), whole)
  frozen = dataclasses.replace(large, frozen=tuple({each.name.split('.')[0] for each in large.parameter_table()}))
  teacher = Teacher(frozen, theirs)
  state = place_state(update_spec(config), parameters, mesh)
  session = types.SimpleNamespace(
    config=config,
    spec=objective_spec(config),
    policy=policy,
    base={},
    mesh=mesh,
    teacher=teacher,
    update=make_update(policy, update_spec(config), jax.tree.map(lambda leaf: leaf.sharding, state), teacher),
  )
  batch = make_samples(config)
  copied = jax.device_get(parameters)
  _, report = step.run_update(session, state, batch)
  found = report.token_values['divergence']
  sd, lengths = config.actor.self_distillation, batch.rollouts.completion_mask.sum(1) * batch.taught
  sample = int(np.argmax(lengths))
  length = int(lengths[sample])
  completion = batch.rollouts.completion_tokens[sample, :length]
  own = logits(policy, {}, copied, batch.prompts[sample], completion)[:, : policy.vocab_size]
  other = logits(large, {}, jax.device_get(theirs), batch.teacher_prompts[sample], completion)
  other = other[:, : policy.vocab_size]
  temperature = config.rollout.temperature
  expected = formula(log_softmax(own / temperature), log_softmax(other / temperature), 6, sd.alpha)
  np.testing.assert_allclose(found[sample, :length], expected, rtol=2e-4, atol=2e-6)
  assert length > 3


def test_a_session_has_the_teacher_frozen_in_compute_dtype_and_only_to_train(folders, tmp_path):
  config = configured(folders)
  config.model.dtype = 'bfloat16'
  session, _ = make_session(config, tmp_path, teaches=True)
  dtypes = {leaf.dtype for leaf in jax.tree.leaves(session.teacher.base)}
  assert dtypes == {jnp.dtype('bfloat16'), jnp.dtype('float32')}  # Norm weights compute in float32.
  written, _ = huggingface.load(folders[1], ModelConfig(dtype='float32'))
  assert session.teacher.policy.config == written.config
  assert session.teacher_flops_per_token > 2 * session.flops_per_token
  evaluated, _ = make_session(config, tmp_path)
  assert evaluated.teacher.base is None
  held = memory.estimate(config, session.policy, session.mesh).held
  leaves = jax.tree.leaves(session.teacher.base)
  assert held['teacher model'] == sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)


def test_teachers_that_cannot_teach_are_refused(folders, tmp_path):
  student, teacher = folders
  config = configured(folders)
  teacher_model.check(config)
  narrow = tiny.make_model(tmp_path / 'narrow', vocab_size=263, seed=2, eos_token_id=258)
  config.actor.self_distillation.teacher_model = str(narrow)
  with pytest.raises(UserError, match='knows 263 tokens and the student 264'):
    teacher_model.check(config)
  other = tiny.make_model(tmp_path / 'other', seed=2)
  values = json.loads((other / 'tokenizer.json').read_text())
  vocab = values['model']['vocab']
  vocab['a'], vocab['b'] = vocab['b'], vocab['a']
  (other / 'tokenizer.json').write_text(json.dumps(values))
  config.actor.self_distillation.teacher_model = str(other)
  with pytest.raises(UserError, match=r"teacher_model=.*other cannot teach .*: token id \d+ is 'a' in .* and 'b' in"):
    teacher_model.check(config)
  short = tiny.make_model(tmp_path / 'short', seed=2, max_position_embeddings=8)
  config.actor.self_distillation.teacher_model = str(short)
  with pytest.raises(UserError, match='has 8 positions .* but a prompt of 8 tokens with a completion of 6 needs 14'):
    teacher_model.check(config)
  config.actor.self_distillation.teacher_model = str(tmp_path / 'nowhere')
  with pytest.raises(UserError, match='nowhere'):
    teacher_model.check(config)


@pytest.mark.parametrize(
  ('change', 'sentence'),
  [
    (lambda c: setattr(c.actor.self_distillation, 'teacher_regularization', 'ema'), "teacher_regularization to 'base'"),
    (lambda c: setattr(c.actor.policy_loss, 'loss_mode', 'vanilla'), 'has no effect with actor.policy_loss.loss_mode'),
  ],
)
def test_settings_that_contradict_a_teacher_are_refused(folders, change, sentence):
  config = configured(folders)
  config.data.train_files, config.trainer.test_freq = ('rows.jsonl',), 0
  change(config)
  with pytest.raises(UserError, match=sentence):
    config.validate()
