"""Every loss that a request may ask for, through the update of an adapter: SDPO, with a reward beside it, and
jsd_pg.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdpo_jax.distributed.programs import noted_compilations
from sdpo_jax.learning.requests import Lesson, Task, UpdateOptions
from sdpo_jax.learning.update import init_state, make_update
from sdpo_jax.models.forward import forward
from sdpo_jax.objective.jsd_pg import JsdPg
from sdpo_jax.objective.log_probs import scores
from sdpo_jax.training.specs import update_spec
from sdpo_jax.types import Batch, TokenRows
from tests.learning.first_batches import first_batch
from tests.models.adapters.lora_policies import make
from tests.objective import jsd_pg_by_hand, row_numbers_by_hand
from tests.objective.numpy_loss import B, T
from tests.updates import settings

PROMPT, REPROMPT, V, K = 3, 6, 61, 6
RATES = dict(actor__self_distillation__teacher_regularization='frozen', optimizer__lr=1e-2)
MASK = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0]], np.float32)
# Both ends of alpha and its middle; no ratio and two clips of it; a dual clip or none; K and less.
NUMBERS = row_numbers_by_hand.SHARED | dict(temperature=[1.0, 0.8, 1.3], topk=[K, 2, 4])


@functools.cache
def adapter():
  """(config, update, base, state) of a random adapter that a copy of itself teaches."""
  policy, base, factors = make(layers=1)
  config = settings(**RATES)
  config.actor.self_distillation.distillation_topk = K
  return (
    config,
    policy,
    make_update(policy, update_spec(config)),
    base,
    init_state(update_spec(config), factors, policy.parameter_table()),
  )


def rows(prompt):
  """Prompts of so many tokens, each followed by the same completions: (rows, targets)."""
  tokens = np.random.default_rng(prompt).integers(1, V, (B, prompt + T), dtype=np.int32)
  targets = np.random.default_rng(0).integers(1, V, (B, T), dtype=np.int32)
  tokens[:, prompt:] = targets
  places = np.tile(np.arange(prompt + T, dtype=np.int32), (B, 1))
  here = np.tile(np.arange(prompt - 1, prompt - 1 + T, dtype=np.int32), (B, 1))
  return TokenRows(tokens, places, np.ones_like(tokens), here), targets


@functools.cache
def model():
  """Return the jitted forward pass, by base, factors and rows."""
  return jax.jit(functools.partial(forward, adapter()[1]))


def states_of(factors, prompt):
  """Hidden states [B, T, D] and the unembedding, as the model itself computes them."""
  return model()(adapter()[3], factors, rows(prompt)[0])


def logits_of(factors, prompt):
  """[B, T, V] in float64."""
  hidden, unembedding = states_of(factors, prompt)
  return np.float64(hidden) @ np.float64(unembedding[:V]).T


def log_softmax(logits):
  return (
    logits
    - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    - logits.max(-1, keepdims=True)
  )


def step(batch):
  """(loss, gradients, state after the step) of the jitted update."""
  _, _, update, base, state = adapter()
  gradients, result = update.accumulate(base, state, update.zero(state.trainable), batch)
  kept = jax.device_get((result.loss, gradients))
  after, report = update.apply(jax.tree.map(jnp.copy, state), gradients)
  assert report['taken'] == 1 and report['grad_norm'] > 1e-3
  return *kept, after


def check(batch, by_hand):
  """Check that the update's loss is the formula's of its adapter, its gradient the formula's slope, and its step
  descends.
  """
  loss, gradients, after = step(batch)
  state = adapter()[-1]
  np.testing.assert_allclose(loss, by_hand(state.trainable), rtol=2e-5)
  norm = np.sqrt(sum((leaf.astype(np.float64) ** 2).sum() for leaf in jax.tree.leaves(gradients)))

  def moved(length):
    return jax.tree.map(lambda factor, by: factor + length * by / norm, state.trainable, gradients)

  slope = (by_hand(moved(1e-3)) - by_hand(moved(-1e-3))) / 2e-3
  np.testing.assert_allclose(slope, norm, rtol=1e-2)
  assert by_hand(after.trainable) < loss
  return gradients


def batch_of(**given):
  student, targets = rows(PROMPT)
  fields = dict.fromkeys(('teacher', 'distill_coef', 'policy_coef', 'entropy_coef', 'old_log_probs', 'advantages'))
  return Batch(student=student, targets=targets, mask=MASK, **fields | given)


@pytest.mark.parametrize('loss', ['sdpo', 'hybrid'])
def test_the_divergence_of_each_row_alone_and_with_a_reward(loss):
  """The teacher is the same adapter, told more; half of the rows have no reward, or none has one."""
  state, (teacher, targets) = adapter()[-1], rows(REPROMPT)
  temperatures = np.array(NUMBERS['temperature'])[:, None, None]
  own, told = logits_of(state.trainable, PROMPT), logits_of(state.trainable, REPROMPT)
  log_probs = np.take_along_axis(log_softmax(own / temperatures), targets[..., None], -1)[..., 0]
  # Far above their clip, ratios are constants; the first row, which has none, keeps its policy gradient.
  old = np.float32(log_probs - np.array([[0.05], [3.0], [3.0]]))
  x = {
    'mask': MASK,
    'targets': targets,
    'distill_coef': MASK / MASK.sum(),
    'policy_coef': MASK / MASK.sum() * (0.0 if loss == 'sdpo' else np.array([[0.7], [0.0], [0.7]])),
    'advantages': np.tile(np.array([[1.5], [0.0], [-0.5]]), (1, T)),
    'old_log_probs': old,
  }
  given = {name: np.float32(x[name]) for name in ('distill_coef', 'policy_coef', 'advantages', 'old_log_probs')}
  numbers = row_numbers_by_hand.of_rows(NUMBERS, np.float32)

  def by_hand(factors):
    states = {'hidden': logits_of(factors, PROMPT), 'teacher_hidden': told}
    nothing = dict.fromkeys(('entropy_coef', 'kl_coef', 'initial_log_probs'), np.zeros((B, T)))
    identity = {'unembedding': np.eye(V), 'teacher_unembedding': np.eye(V)}
    return row_numbers_by_hand.by_hand('topk', x | states | nothing | identity, NUMBERS)[0]

  check(batch_of(teacher=teacher, numbers=numbers, **given), by_hand)


def test_jsd_pg_with_a_teacher_that_is_scored_once():
  """In the program that serves every request with such a signal, whatever its numbers."""
  _, policy, update, base, state = adapter()
  student, targets = rows(PROMPT)
  (hidden, unembedding), (told, _) = (states_of(state.trainable, prompt) for prompt in (PROMPT, REPROMPT))
  theirs, own = (
    scores(states, unembedding, targets, K, vocab_size=policy.vocab_size, chunk_size=256) for states in (told, hidden)
  )
  x = {
    'logits': logits_of(state.trainable, PROMPT),
    'teacher': log_softmax(logits_of(state.trainable, REPROMPT)),
    'ids': np.asarray(theirs.top_ids),
    'targets': targets,
    'mask': MASK,
    'old': np.asarray(own.log_prob) - 0.05,
  }

  def batch_of_request(loss, states, old):
    lessons = [
      Lesson([1], targets[row, :length], [1, 2], np.asarray(old)[row, :length])
      for row, length in enumerate(MASK.sum(1).astype(int))
    ]
    task = Task(slot=0, lessons=lessons, update=UpdateOptions(loss))
    batch, _ = first_batch(task, hidden, states, unembedding, topk=K, vocab_size=policy.vocab_size)
    return batch.replace(student=student)

  with noted_compilations() as compiled:
    for request in (JsdPg(jsd_weight=3.0), JsdPg(alpha=0.75, clip_eps=0.4, form='design')):
      batch = batch_of_request(request, told, x['old'])
      check(batch, lambda factors: jsd_pg_by_hand.by_hand(x, request, logits_of(factors, PROMPT), in_mesh=True)[0])  # noqa: B023
    assert compiled().count('jit(accumulate)') == 1
  # The same model with the same context teaches nothing, and nothing changes.
  same = batch_of_request(JsdPg(), hidden, own.log_prob)
  assert not same.advantages.any() and (same.signal.token_ids < 0).all()
  gradients, result = update.accumulate(base, state, update.zero(state.trainable), same)
  assert result.loss == 0
  assert not any(leaf.any() for leaf in jax.tree.leaves(gradients))
