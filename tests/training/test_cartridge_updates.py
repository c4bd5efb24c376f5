"""The update of a cartridge: its teacher, its losses and its gradient, beside a model that reads the document
itself.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sdpo_jax.config import CartridgeConfig, Config, MeshConfig
from sdpo_jax.distributed.mesh import make_mesh, put_rows
from sdpo_jax.learning import batching
from sdpo_jax.learning.update import UpdateFunctions, make_update, place_state
from sdpo_jax.models import parameters
from sdpo_jax.models.adapters import kv_prefix
from sdpo_jax.models.adapters.kv_prefix import KVPrefix
from sdpo_jax.models.decoder import DecoderPolicy
from sdpo_jax.models.forward import forward
from sdpo_jax.teacher.signal import Teacher, teacher_signal
from sdpo_jax.training import cartridges
from sdpo_jax.training.specs import batch_spec, teacher_spec, update_spec
from sdpo_jax.types import Batch, TrainState, Tree
from tests import tiers
from tests.generation_batches import make_samples, per_token
from tests.models.adapters.prefixed_models import DOCUMENT, model, with_prefix
from tests.models.family_models import MODELS, MORE
from tests.updates import settings

STEPS, RATE = 10, 0.05


def losses(alpha: float = 0.0, topk: int | None = None, tail: bool = True, of: str = 'student') -> Config:
  """Return settings of a cartridge with this loss, and an optimizer that would let other parameters decay."""
  sd, optimizer = 'actor__self_distillation__', 'optimizer__'
  made = {
    'model__cartridge': CartridgeConfig(tokens=len(DOCUMENT), document='document.txt'),
    'actor__ppo_micro_batch_size': 8,
    'algorithm__rollout_correction__rollout_is': None,
    sd + 'teacher_context': 'prompt',
    sd + 'teacher_regularization': 'base',
    sd + 'alpha': alpha,
    sd + 'distillation_topk': topk,
    sd + 'distillation_topk_of': of,
    sd + 'distillation_add_tail': tail,
    optimizer + 'name': 'adamw',
    optimizer + 'lr': RATE,
    optimizer + 'weight_decay': 0.5,
    'trainer__total_training_steps': STEPS,
  }
  return settings(**made)


def answers(config: Config) -> batching.GenerationBatch:
  """Completions that the teacher reads behind the student's own prompts."""
  samples = make_samples(config)
  return dataclasses.replace(samples, teacher_prompts=samples.prompts, distill_mask=per_token(np.ones(8)))


@dataclasses.dataclass
class Case:
  """A cartridge before its first step, on one device."""

  student: DecoderPolicy
  base: Tree
  teacher: Teacher
  state: TrainState
  update: UpdateFunctions
  samples: batching.GenerationBatch
  batch: Batch
  order: list[int]  # Which sample each row of the batch holds.

  def accumulated(self, trainable: Tree) -> tuple[Tree, Any]:
    """(gradient, result) of the batch with these slots."""
    state = self.state.replace(trainable=trainable)
    return self.update.accumulate(self.base, state, self.update.zero(trainable), self.batch, self.teacher.base)

  def loss(self, trainable: Tree) -> float:
    return float(self.accumulated(trainable)[1].loss)

  def elsewhere(self) -> Tree:
    """Slots that say something else than the document."""
    draw = np.random.default_rng(3)
    return jax.tree.map(
      lambda leaf: np.asarray(leaf) + draw.standard_normal(leaf.shape).astype(np.float32), self.state.trainable
    )


@functools.cache
def case(name: str, within: bool, loss: tuple[Any, ...] = (0.0, None, True)) -> Case:
  """Return a slot for every token of the document, all but the first of them trained."""
  config, prefix = losses(*loss), KVPrefix(len(DOCUMENT), 1, within_windows=within)
  policy, params = model(name)
  mesh = make_mesh(MeshConfig(1, 1), jax.devices()[:1])
  read = kv_prefix.read_text(policy, params, DOCUMENT)
  student, base, trainable = with_prefix(policy, params, prefix, *read, mesh)
  teacher = cartridges.document_teacher(config, student, jax.device_put(params, jax.devices()[0]), DOCUMENT)
  state = place_state(update_spec(config), trainable, mesh, parameters.trainable(student.parameter_table()))
  update = make_update(student, update_spec(config), jax.tree.map(lambda leaf: leaf.sharding, state), teacher)
  samples = answers(config)
  [micro] = batching.micro_batches(samples, np.arange(8), batch_spec(config))
  order = [sample for row in micro.samples for sample in row]
  return Case(student, base, teacher, state, update, samples, put_rows(mesh, micro.batch), order)


def as_log_probs(hidden: jax.Array, unembedding: jax.Array) -> np.ndarray:
  """In float64, whatever the loss is computed in."""
  scores = np.asarray(hidden, np.float64) @ np.asarray(unembedding, np.float64).T
  return scores - np.logaddexp.reduce(scores, axis=-1, keepdims=True)


@functools.cache
def compiled(name: str):
  """Return the forward pass of the model by itself."""
  return jax.jit(model(name)[0].apply)


def prefilled(name: str, before: list[int], made: Case) -> np.ndarray:
  """Log-probs [8, T, V] of completions, by the model alone with these tokens before each prompt; rows of the batch."""
  _, params = model(name)
  rollouts = made.samples.rollouts
  lengths = rollouts.completion_mask.sum(1)
  texts = [
    [*before, *prompt, *tokens[:length]]
    for prompt, tokens, length in zip(made.samples.prompts, rollouts.completion_tokens, lengths, strict=True)
  ]
  segments = (np.arange(48) < np.array([[len(text)] for text in texts])).astype(np.int32)
  tokens = np.array([text + [0] * (48 - len(text)) for text in texts], np.int32)
  hidden, unembedding, _ = compiled(name)({}, params, tokens, np.arange(48, dtype=np.int32) * segments, segments)
  scores = as_log_probs(hidden, unembedding)
  found = np.zeros((*rollouts.completion_mask.shape, scores.shape[-1]))
  for row, (text, length) in enumerate(zip(texts, lengths, strict=True)):
    found[row, :length] = scores[row, len(text) - length - 1 : len(text) - 1]
  return found[made.order]


def divergence(
  student: np.ndarray, teacher: np.ndarray, alpha: float, topk: int | None, tail: bool, of: str = 'student'
) -> float:
  """From the definitions, of two distributions [V] in float64."""
  s, t = np.exp(student), np.exp(teacher)
  if topk is not None:
    kept = np.argsort(-(s if of == 'student' else t))[:topk]
    s, t = s[kept], t[kept]
    s, t = (np.append(p, 1 - p.sum()) if tail else p / p.sum() for p in (s, t))
  if alpha in (0, 1):
    s, t = (s, t) if alpha else (t, s)
    return float(np.sum(s * np.log(s / t)))
  middle = (1 - alpha) * s + alpha * t
  return float((1 - alpha) * np.sum(s * np.log(s / middle)) + alpha * np.sum(t * np.log(t / middle)))


@pytest.mark.parametrize('name', tiers.cases((*MODELS, *MORE), default=('gemma3',), slow=MODELS))
def test_the_teacher_says_what_a_full_prefill_says_and_the_whole_document_leaves_nothing_to_learn(name):
  made = case(name, True)
  spec = teacher_spec(losses())

  @jax.jit
  def signal(base, of_teacher, state, rows):
    teacher = dataclasses.replace(made.teacher, base=of_teacher)
    return teacher_signal(teacher, made.student, base, state, rows, spec)

  found = signal(made.base, made.teacher.base, made.state, made.batch.teacher)
  found = as_log_probs(found.hidden, found.unembedding)
  expected = prefilled(name, DOCUMENT, made)
  real = made.samples.rollouts.completion_mask[made.order]
  # Rounding grows with the layers, of which there are two or nine.
  np.testing.assert_allclose(found[real], expected[real], atol=2e-5 if made.student.config.layers == 2 else 5e-5)
  assert np.abs(prefilled(name, [], made) - expected).max() > 0.1
  gradient, result = made.accumulated(made.state.trainable)
  assert abs(float(result.loss)) < 1e-5
  assert max(float(abs(leaf).max()) for leaf in jax.tree.leaves(gradient)) < 1e-5
  assert made.loss(made.elsewhere()) > 1e-2


EITHER = tiers.cases((True, False), default=(True,))


@pytest.mark.parametrize('within', EITHER)
@pytest.mark.parametrize('name', tiers.cases((*MODELS, *MORE), default=('gemma3',), slow=MODELS))
def test_the_gradient_of_the_slots_is_that_of_finite_differences(name, within):
  """Through the loss as it is trained, for keys and values by themselves."""
  made = case(name, within)
  slots = made.elsewhere()
  gradient = jax.device_get(made.accumulated(slots)[0])
  leaves, structure = jax.tree.flatten(slots)
  draw = np.random.default_rng(4)
  for which, slope in enumerate(jax.tree.leaves(gradient)):
    # Near the gradient, where the loss changes by more than its rounding.
    direction = slope * draw.uniform(0.5, 1.5, slope.shape).astype(np.float32)
    direction *= 0.015 / np.linalg.norm(direction)

    def quotient(width, which=which, direction=direction):
      ends = []
      for by in (width, -width):
        moved = [leaf + by * direction if number == which else leaf for number, leaf in enumerate(leaves)]
        ends.append(made.loss(jax.tree.unflatten(structure, moved)))
      return (ends[0] - ends[1]) / (2 * width)

    along = float(np.vdot(slope, direction))
    assert along > 1e-5
    # What is cubic in the width cancels.
    np.testing.assert_allclose((4 * quotient(1) - quotient(2)) / 3, along, rtol=5e-3)


@pytest.mark.parametrize('kernels', [False, pytest.param(True, marks=pytest.mark.slow)], ids=['xla', 'splash'])
@pytest.mark.parametrize('name', tiers.cases((*MODELS, *MORE), default=('gemma3',), slow=('qwen3',)))
def test_packed_rows_have_the_gradient_of_rows_of_one_sample(name, kernels):
  """Every sample of a row sees all slots and, in the teacher's rows, the whole document, but no other sample."""
  made, config = case(name, True), losses()
  state, mesh = made.state.replace(trainable=made.elsewhere()), made.student.backend.mesh
  config.actor.ppo_micro_batch_size, update = 2, made.update
  if kernels:
    on = dataclasses.replace(made.student.backend, kind='splash', interpret=True)
    student, reader = (dataclasses.replace(policy, backend=on) for policy in (made.student, made.teacher.policy))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, made.state)
    update = make_update(student, update_spec(config), shardings, dataclasses.replace(made.teacher, policy=reader))

  def gradient(packed):
    config.actor.pack_sequences = packed
    sums, rows = update.zero(state.trainable), []
    for micro in batching.micro_batches(made.samples, np.arange(8), batch_spec(config)):
      sums, _ = update.accumulate(made.base, state, sums, put_rows(mesh, micro.batch), made.teacher.base)
      rows += micro.samples
    assert sorted(sum(rows, [])) == list(range(8)) and (max(map(len, rows)) > 1) == packed
    return jax.device_get(sums)

  single, packed = gradient(False), gradient(True)
  apart = optax.tree.norm(jax.tree.map(np.subtract, packed, single)) / optax.tree.norm(single)
  assert apart <= 1e-6, apart


@pytest.mark.parametrize('within', EITHER)
@pytest.mark.parametrize('name', tiers.cases((*MODELS, *MORE), default=('gemma3',), slow=MODELS))
def test_a_step_moves_the_trained_slots_only_and_as_adam_does_without_decay(name, within):
  made = case(name, within)
  base, slots = jax.device_get(made.base), made.elsewhere()
  state = jax.tree.map(jnp.copy, made.state).replace(trainable=jax.device_put(slots, jax.devices()[0]))
  before = made.loss(slots)
  gradient = made.accumulated(slots)[0]
  scale = min(
    1.0, losses().optimizer.grad_clip / np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(gradient)))
  )
  sizes = losses().optimizer
  expected = jax.tree.map(
    lambda slot, g: slot - RATE * (g * scale) / (np.abs(g * scale) + sizes.eps), slots, jax.device_get(gradient)
  )
  state, report = made.update.apply(state, gradient)
  assert report['taken'] == 1
  moved = jax.device_get(state.trainable)
  jax.tree.map(lambda new, known: np.testing.assert_allclose(new, known, rtol=2e-4, atol=1e-6), moved, expected)
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(made.base), base)
  assert {leaf.shape[2] for leaf in jax.tree.leaves(moved)} == {len(DOCUMENT) - 1}
  if not within:  # Every slot that every layer sees.
    jax.tree.map(lambda new, old: np.testing.assert_array_equal((new != old).any(-1), True), moved, slots)
  # A second step from there.
  gradient = made.accumulated(moved)[0]
  state, _ = made.update.apply(state, gradient)
  assert made.loss(jax.device_get(state.trainable)) < before


@pytest.mark.slow
@pytest.mark.parametrize('alpha', tiers.cases((0.0, 0.5, 1.0), default=(0.5,)))
@pytest.mark.parametrize(
  'support', [(None, True), *((8, tail, of) for tail in (True, False) for of in ('student', 'teacher'))]
)
def test_every_loss_is_the_divergence_from_the_model_that_reads_the_document(alpha, support):
  """From the definitions, in float64, at slots that say something else."""
  loss = alpha, *support
  made = case('gemma3', True, loss)
  slots = made.elsewhere()
  teacher = prefilled('gemma3', DOCUMENT, made)
  student = as_log_probs(*jax.jit(forward, static_argnums=0)(made.student, made.base, slots, made.batch.student))
  real = made.samples.rollouts.completion_mask[made.order]
  expected = np.array([divergence(s, t, *loss) for s, t in zip(student[real], teacher[real], strict=True)])
  _, result = made.accumulated(slots)
  np.testing.assert_allclose(np.asarray(result.aux['divergence'])[real], expected, rtol=2e-4, atol=2e-6)
  assert float(result.loss) == pytest.approx(expected.mean(), rel=1e-5)
  assert expected.mean() > 1e-2
