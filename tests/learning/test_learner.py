"""Requests of several adapters learned at once: each as a run would, with its own loss, and none touching another."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdpo_jax.config import Config
from sdpo_jax.errors import UserError
from sdpo_jax.learning import batching, training_pool
from sdpo_jax.learning.learner import Learner, whole
from sdpo_jax.learning.losses import Sdpo
from sdpo_jax.learning.requests import AdamW, Lesson, Task, Taught, UpdateOptions
from sdpo_jax.learning.scoring import CompiledSizes
from sdpo_jax.learning.update import apply_gradients, init_state, make_update
from sdpo_jax.models.adapters import lora_pool
from sdpo_jax.models.adapters.lora_pool import LoraPool
from sdpo_jax.models.forward import forward
from sdpo_jax.models.policy import NO_MEMBER
from sdpo_jax.objective.jsd_pg import LITE, JsdPg
from sdpo_jax.training.specs import update_spec
from sdpo_jax.types import Batch
from tests.models.adapters.lora_pools import MEMBERS, make_pool, stacked

K, ROWS = 8, 3
ROOM, LENGTH = 12, 6  # Of the longest prompt, and of the longest completion.
OPTIMIZER = AdamW(learning_rate=3e-3, weight_decay=0.1, max_grad_norm=0.05)


@pytest.fixture(scope='module')
def adapters():
  return make_pool(2)


@pytest.fixture(scope='module')
def learner(adapters):
  return learner_of(adapters)


def learn(learner, state, teachers, tasks):
  return whole(learner.learn(state, lambda: teachers, tasks))


def learner_of(adapters, **sizes):
  policy, base, _ = adapters

  def of(members):
    return dataclasses.replace(policy, adapter=LoraPool(policy.adapter, members))

  return Learner(
    of(MEMBERS),
    of(2),
    base,
    CompiledSizes(topk=K, rows=ROWS, **sizes),
    prompt_buckets=(4, 8),
    teacher_buckets=(12,),
    response_buckets=(6,),
  )


@pytest.fixture(scope='module')
def teachers(adapters):
  policy, _, factors = adapters
  two = dataclasses.replace(policy, adapter=LoraPool(policy.adapter, 2))
  pool = lora_pool.empty(two.parameter_table())
  for index in range(2):
    pool = lora_pool.with_member(pool, index, jax.tree.map(lambda leaf: 0.8 * leaf, factors[index]))
  return pool


def fresh(adapters):
  return training_pool.fresh(stacked(adapters[0], adapters[2]))


def task_of(slot, lessons, teacher=NO_MEMBER, **update):
  return Task(slot, lessons, UpdateOptions(**update), teacher)


def with_update(task, **changes):
  return dataclasses.replace(task, update=dataclasses.replace(task.update, **changes))


def lesson(seed, *, old=False, advantage=0.0, teacher_prompt=None):
  draw = np.random.default_rng(seed)
  prompt, completion = (draw.integers(1, 60, draw.integers(*sizes)).tolist() for sizes in ((1, 8), (2, 7)))
  extra = draw.integers(1, 60, 3).tolist()
  log_probs = np.float32(-2 - draw.random(len(completion))) if old else None
  return Lesson(
    prompt, completion, [*prompt, *extra] if teacher_prompt is None else teacher_prompt, log_probs, advantage
  )


def sdpo_alone(adapters, teachers, task, steps):
  """(factors, gradient norms) after the real update of a run of one adapter, row by row with the run's own settings."""
  policy, base, factors = adapters
  config, loss, optimizer = Config(), task.update.loss, task.update.optimizer
  sd = config.actor.self_distillation
  sd.alpha, sd.is_clip, sd.distillation_topk = loss.alpha, loss.is_clip, loss.topk
  sd.teacher_regularization = 'ema'
  config.algorithm.rollout_correction.rollout_is = None
  config.optimizer.lr, config.optimizer.lr_warmup_steps = optimizer.learning_rate, 0
  config.optimizer.weight_decay, config.optimizer.grad_clip = optimizer.weight_decay, optimizer.max_grad_norm
  state = init_state(update_spec(config), factors[task.slot])
  state = state.replace(teacher=lora_pool.member(teachers, task.teacher))
  update, norms = make_update(policy, update_spec(config)), []
  tokens = sum(len(each.completion) for each in task.lessons)
  old = {}
  for _ in range(steps):
    grads = update.zero(state.trainable)
    for index, each in enumerate(task.lessons):
      completion = np.asarray([each.completion], np.int32)
      mask = np.ones(completion.shape, bool)
      student = batching.token_rows([each.prompt], completion, mask, len(each.prompt))
      teacher = batching.token_rows([each.teacher_prompt], completion, mask, len(each.teacher_prompt))
      if index not in old:
        known = each.sampling_log_probs
        old[index] = update.log_probs(base, state.trainable, student, completion)[0] if known is None else known[None]
      ones = np.ones(completion.shape, np.float32) / tokens
      batch = Batch(
        student=student,
        teacher=teacher,
        targets=completion,
        mask=mask.astype(np.float32),
        distill_coef=loss.divergence_weight * ones,
        policy_coef=loss.policy_weight * ones if loss.policy_weight else None,
        entropy_coef=None,
        old_log_probs=old[index],
        advantages=np.full(completion.shape, each.advantage, np.float32) if loss.policy_weight else None,
      )
      grads, _ = update.accumulate(base, state, grads, batch)
    state, said = apply_gradients(update_spec(config), state, grads)
    norms.append(float(said['grad_norm']))
  return state.trainable, norms


def assert_close(found, expected, tolerance):
  for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(one, other, atol=tolerance * float(np.abs(other).max()))


@pytest.mark.slow
def test_tasks_that_are_learned_together_end_as_runs_of_their_own(adapters, teachers, learner):
  """With different divergences, supports, clips, numbers of steps, a hybrid among them, and rows over two
  micro-batches.
  """
  tasks = [
    task_of(0, [lesson(1), lesson(2, old=True)], teacher=1, loss=Sdpo(alpha=0.0, topk=3), optimizer=OPTIMIZER, steps=2),
    task_of(2, [lesson(3, old=True)], teacher=0, loss=Sdpo(alpha=1.0, topk=K, is_clip=None), optimizer=OPTIMIZER),
    task_of(
      1,
      [lesson(4, advantage=1.5), lesson(5, old=True, advantage=-0.5)],
      teacher=1,
      loss=Sdpo(alpha=0.5, topk=K, policy_weight=0.7, divergence_weight=0.4),
      optimizer=dataclasses.replace(OPTIMIZER, weight_decay=0.0, learning_rate=1e-2),
    ),
  ]
  state, learned = learn(learner, fresh(adapters), teachers, tasks)
  for task, found in zip(tasks, learned, strict=True):
    expected, norms = sdpo_alone(adapters, teachers, task, task.update.steps)
    np.testing.assert_allclose([step['grad_norm'] for step in found.steps], norms, rtol=2e-4)
    assert found.stepped and len(found.said) == len(task.lessons)
    assert_close(training_pool.slot_of(state, task.slot).trainable, expected, 3e-5)
    assert int(training_pool.slot_of(state, task.slot).moments.count) == task.update.steps
  assert max(step['grad_norm'] for found in learned for step in found.steps) > OPTIMIZER.max_grad_norm


def test_a_request_takes_the_steps_that_it_wants_beside_one_that_wants_more(adapters, teachers, learner):
  tasks = [
    task_of(slot, [lesson(91 + slot)], teacher=slot, loss=Sdpo(topk=K), optimizer=OPTIMIZER, steps=steps)
    for slot, steps in ((0, 1), (1, 3))
  ]
  state, learned = learn(learner, fresh(adapters), teachers, tasks)
  for task, found in zip(tasks, learned, strict=True):
    alone, _ = learn(learner, fresh(adapters), teachers, [task])
    slot = training_pool.slot_of(state, task.slot)
    assert int(slot.moments.count) == len(found.steps) == task.update.steps
    assert_close(slot.trainable, training_pool.slot_of(alone, task.slot).trainable, 3e-5)


@functools.partial(jax.jit, static_argnums=0)
def logits_of(policy, base, trainable, rows):
  hidden, unembedding = forward(policy, base, trainable, rows)
  return hidden @ unembedding.T


def log_softmax(values):
  values = np.asarray(values, np.float64)
  values = values - values.max(-1, keepdims=True)
  return values - np.log(np.exp(values).sum(-1, keepdims=True))


def said_by(policy, base, trainable, prompt, completion):
  """[T, V] float64 log-probs."""
  tokens = np.zeros((1, LENGTH), np.int32)  # Of one length, for one program.
  tokens[0, : len(completion)] = completion
  rows = batching.token_rows([prompt], tokens, np.arange(LENGTH)[None] < len(completion), ROOM)
  return log_softmax(logits_of(policy, base, trainable, rows)[0, : len(completion)])[:, : policy.vocab_size]


@pytest.mark.parametrize('form', ['mixture', 'design'])
def test_jsd_pg_of_a_request_is_the_formula(adapters, teachers, learner, form):
  """Advantages and regulariser in float64, and the gradient by differences of the formula along the step taken."""
  policy, base, factors = adapters
  loss = JsdPg(alpha=0.75, clip_eps=0.2, jsd_weight=0.5, form=form)
  each = lesson(7, old=True)
  # Ratios within and beyond the clip.
  known = said_by(policy, base, factors[1], each.prompt, each.completion)[
    np.arange(len(each.completion)), each.completion
  ]
  each = dataclasses.replace(each, sampling_log_probs=np.float32(known + np.linspace(-0.3, 0.3, len(known))))
  plain = AdamW(learning_rate=1e-3, weight_decay=0.0, max_grad_norm=np.inf)
  # Beside another request, in whose rows the loss is another.
  other = task_of(0, [lesson(8)], teacher=0, loss=Sdpo(topk=K), optimizer=plain)
  task = task_of(1, [each], teacher=1, loss=loss, optimizer=plain)
  _, (_, found) = learn(learner, fresh(adapters), teachers, [other, task])

  taught = said_by(policy, base, lora_pool.member(teachers, 1), each.teacher_prompt, each.completion)
  at = np.arange(len(each.completion)), each.completion
  mixed = np.log(loss.alpha * np.exp(known) + (1 - loss.alpha) * np.exp(taught[at]))
  advantages = -(known - mixed) if form == 'mixture' else (1 - 2 * loss.alpha) * (known - taught[at])
  [said] = found.said
  np.testing.assert_allclose(said.log_probs_before, known, atol=2e-5)
  np.testing.assert_allclose(said.teacher_log_probs, taught[at], atol=2e-5)
  np.testing.assert_allclose(said.advantages, advantages, atol=5e-5)
  ids = np.argsort(-taught, axis=-1, kind='stable')[:, :K]
  np.testing.assert_array_equal(said.teacher_top_ids, ids)
  student = said_by(policy, base, factors[1], each.prompt, each.completion)
  np.testing.assert_allclose(said.entropy, -(np.exp(student) * student).sum(-1), atol=2e-5)

  def value(trainable):
    own = said_by(policy, base, trainable, each.prompt, each.completion)
    ratio = np.exp(own[at] - np.asarray(each.sampling_log_probs, np.float64))
    clipped = np.clip(ratio, 0.8, 1.2)
    pg = -np.mean(np.minimum(ratio * advantages, clipped * advantages))
    p, q = (np.take_along_axis(each, ids, 1) for each in (own, taught))
    m = np.log(loss.alpha * np.exp(p) + (1 - loss.alpha) * np.exp(q))
    terms = loss.alpha * np.exp(p) * (p - m) + (1 - loss.alpha) * np.exp(q) * (q - m)
    return pg + loss.jsd_weight * terms.sum(-1).mean(), terms.sum(-1)

  np.testing.assert_allclose(said.divergence, value(factors[1])[1], atol=2e-5)
  # Along the gradient the formula rises by its norm per unit.
  update = gradient_of(learner, adapters, teachers, task)
  norm = np.sqrt(sum(float(np.square(leaf).sum()) for leaf in jax.tree.leaves(update)))
  assert found.steps[0]['grad_norm'] == pytest.approx(norm, rel=1e-4)
  up, down = (
    value(jax.tree.map(lambda leaf, g, h=h: leaf + h * g / norm, factors[1], update))[0] for h in (1e-2, -1e-2)
  )
  assert (up - down) / 2e-2 == pytest.approx(norm, rel=0.03)


def step_by_hand(adapters, teachers, task, advantages, old):
  """Return what is reported of the second of two steps, in float64, from logits alone."""
  policy, base, factors = adapters
  now, loss, sums = factors[task.slot], task.update.loss, dict.fromkeys(('pg', 'd', 'a', 'up', 'r', 'c', 'n'), 0.0)
  for each, advantage, before in zip(task.lessons, advantages, old, strict=True):
    at = np.arange(len(each.completion)), each.completion
    own = said_by(policy, base, now, each.prompt, each.completion)
    taught = said_by(policy, base, lora_pool.member(teachers, task.teacher), each.teacher_prompt, each.completion)
    ratio = np.exp(own[at] - before)
    if isinstance(loss, JsdPg):
      low = high = loss.clip_eps
      tail, weight, alpha, bound = loss.tail or loss.support == 'union', 1.0, 1 - loss.alpha, np.inf
      beyond = abs(ratio - 1) > loss.clip_eps
    else:
      low, high, bound = loss.clip_ratio_low, loss.clip_ratio_high, loss.clip_ratio_c
      tail = True
      weight, alpha, beyond = np.minimum(ratio, loss.is_clip), loss.alpha, ratio > loss.is_clip
    pg = np.maximum(-advantage * ratio, -advantage * np.clip(ratio, 1 - low, 1 + high))
    pg = np.where(advantage < 0, np.minimum(pg, -np.where(advantage < 0, advantage, -1) * bound), pg)
    width, d = getattr(loss, 'topk', K), np.zeros(len(own))
    for place, (ours, theirs) in enumerate(zip(own, taught, strict=True)):
      tops = {
        'student': np.argsort(-ours, kind='stable')[:width],
        'teacher': np.argsort(-theirs, kind='stable')[:width],
      }
      ids = tops[loss.support] if loss.support in tops else np.union1d(tops['student'], tops['teacher'])
      p, q = (np.exp(log_probs[ids]) for log_probs in (ours, theirs))
      if tail:
        p, q = (np.append(x, 1 - x.sum()) for x in (p, q))
      m = (1 - alpha) * p + alpha * q
      d[place] = ((1 - alpha) * p * np.log(p / m) + alpha * q * np.log(q / m)).sum()
    d = weight * d
    found = dict(pg=pg, d=d, a=abs(advantage), up=advantage > 0, r=ratio, c=beyond, n=np.ones(len(pg)))
    sums = {name: total + found[name].sum() for name, total in sums.items()}
  mean = {name: total / sums['n'] for name, total in sums.items()}
  weights = (1.0, loss.jsd_weight) if isinstance(loss, JsdPg) else (loss.policy_weight, loss.divergence_weight)
  return {
    'loss': weights[0] * mean['pg'] + weights[1] * mean['d'],
    'pg_loss': mean['pg'],
    'jsd_reg': mean['d'],
    'mean_advantage': mean['a'],
    'frac_positive_advantage': mean['up'],
    'mean_is_ratio': mean['r'],
    'clip_fraction': mean['c'],
    'floored_fraction': 0.0,
    'tokens_processed': sums['n'],
  }


@pytest.mark.parametrize(
  'ours, theirs',
  [
    ({}, {}),
    ({'tail': True}, {'support': 'teacher'}),
    pytest.param({'support': 'union'}, {'support': 'teacher'}, marks=pytest.mark.slow),
  ],
)
def test_what_is_reported_of_a_step_is_the_formula(adapters, teachers, learner, ours, theirs):
  """Of the first and of a later step, of rows in several micro-batches, each beside those of another loss."""
  if 'support' in ours:
    learner = learner_of(adapters, union=True)
  policy, base, factors = adapters
  fast = AdamW(learning_rate=3e-2, weight_decay=0.0)

  def drawn_by(slot, seed, advantage=0.0):
    each = lesson(seed, advantage=advantage)
    known = said_by(policy, base, factors[slot], each.prompt, each.completion)
    known = known[np.arange(len(each.completion)), each.completion]
    return dataclasses.replace(each, sampling_log_probs=np.float32(known + np.linspace(-0.4, 0.4, len(known))))

  tasks = [
    task_of(0, [drawn_by(0, 51), drawn_by(0, 52)], 1, loss=JsdPg(alpha=0.3, **ours), optimizer=fast, steps=2),
    task_of(
      1,
      [drawn_by(1, 53, 1.5), drawn_by(1, 54, -0.5)],
      0,
      loss=Sdpo(alpha=0.3, topk=5, is_clip=1.1, policy_weight=0.7, divergence_weight=0.4, **theirs),
      optimizer=fast,
      steps=2,
    ),
  ]
  once, _ = learn(learner, fresh(adapters), teachers, [with_update(task, steps=1) for task in tasks])
  _, learned = learn(learner, fresh(adapters), teachers, tasks)
  for task, found in zip(tasks, learned, strict=True):
    advantages = [np.float64(said.advantages) for said in found.said]
    old = [np.float64(each.sampling_log_probs) for each in task.lessons]
    between = training_pool.slot_of(once, task.slot).trainable
    for step, now in zip(found.steps, (factors[task.slot], between), strict=True):
      of_step = (policy, base, {task.slot: now})
      expected = step_by_hand(of_step, teachers, task, advantages, old)
      assert step.keys() == {*expected, 'grad_norm', 'stepped'}
      for name, value in expected.items():
        np.testing.assert_allclose(step[name], value, rtol=2e-4, atol=2e-5, err_msg=name)
    assert found.steps[0]['loss'] != found.steps[1]['loss'] and 0 < found.steps[0]['clip_fraction'] < 1


@pytest.mark.parametrize('optimizer', [dict(learning_rate=1e38), dict(learning_rate=1e31, weight_decay=1.0)])
def test_a_step_into_numbers_that_are_too_large_is_not_taken(adapters, teachers, learner, optimizer):
  task = task_of(0, [lesson(71)], teacher=0, loss=Sdpo(topk=K), optimizer=AdamW(**optimizer))
  state, (found,) = learn(learner, fresh(adapters), teachers, [task])
  assert not found.stepped and np.isfinite(found.steps[0]['loss'])
  jax.tree.map(
    np.testing.assert_array_equal, training_pool.slot_of(state, 0), training_pool.slot_of(fresh(adapters), 0)
  )


def test_a_teacher_that_names_a_handful_of_tokens_teaches_without_the_regulariser(adapters, teachers, learner):
  each = lesson(72)
  length = len(each.completion)

  def said_of(count):
    ids = np.tile(np.arange(count, dtype=np.int32), (length, 1))
    said = Taught(ids, np.full(ids.shape, -2.5, np.float32), np.full(length, -1.0, np.float32))
    return dataclasses.replace(each, teacher_prompt=None, taught=said)

  few, many = (
    task_of(slot, [said_of(count)], loss=JsdPg(), optimizer=OPTIMIZER) for slot, count in enumerate((LITE, LITE + 1))
  )
  _, (lite, full) = learn(learner, fresh(adapters), teachers, [few, many])
  [warning] = lite.warnings
  assert 'named 5 tokens' in warning and 'regulariser' in warning and not full.warnings
  assert lite.steps[0]['loss'] == pytest.approx(lite.steps[0]['pg_loss'])
  assert full.steps[0]['loss'] == pytest.approx(full.steps[0]['pg_loss'] + 0.5 * full.steps[0]['jsd_reg'])
  assert full.steps[0]['jsd_reg'] > 1e-3
  _, (bucket,) = learn(learner, fresh(adapters), teachers, [with_update(few, loss=Sdpo(topk=K))])
  assert 'only their total probability' in bucket.warnings[0]


def test_a_token_that_the_teacher_has_said_nothing_of_has_the_floor_and_is_counted(adapters, teachers, learner):
  each = lesson(61)
  length = len(each.completion)
  said = np.full(length, -1.0, np.float32)
  said[0] = -np.inf
  ids, log_probs = np.tile(np.arange(3, dtype=np.int32), (length, 1)), np.full((length, 3), -2.0, np.float32)
  given = dataclasses.replace(each, teacher_prompt=None, taught=Taught(ids, log_probs, said))
  _, (found,) = learn(learner, fresh(adapters), teachers, [task_of(0, [given], loss=JsdPg(floor=-9.0))])
  assert found.steps[0]['floored_fraction'] == pytest.approx(1 / length)
  np.testing.assert_array_equal(found.said[0].teacher_log_probs, np.where(np.isneginf(said), -9.0, said))


def gradient_of(learner, adapters, teachers, task):
  """Return the first moments after one step of Adam, (1 − β₁) times the gradient."""
  state, _ = learn(learner, fresh(adapters), teachers, [task])
  mu = training_pool.slot_of(state, task.slot).moments.mu
  return jax.tree.map(lambda leaf: np.asarray(leaf) / (1 - task.update.optimizer.beta1), mu)


@pytest.mark.parametrize('loss', [Sdpo(topk=K), Sdpo(topk=K, alpha=0.0), JsdPg()], ids=['jsd', 'forward', 'jsd_pg'])
def test_a_teacher_that_reads_and_knows_the_same_teaches_nothing(adapters, learner, loss):
  """No feedback, the same adapter: advantages and loss are 0 at every token."""
  policy, _, factors = adapters
  same = dataclasses.replace(policy, adapter=LoraPool(policy.adapter, 2))
  pool = lora_pool.with_member(lora_pool.empty(same.parameter_table()), 1, factors[2])
  each = lesson(11)
  each = dataclasses.replace(each, teacher_prompt=each.prompt)
  still = AdamW(weight_decay=0.0)
  _, (found,) = learn(learner, fresh(adapters), pool, [task_of(2, [each], teacher=1, loss=loss, optimizer=still)])
  [said] = found.said
  for name in ('advantages', 'divergence'):
    np.testing.assert_allclose(getattr(said, name), 0, atol=1e-6)
  np.testing.assert_allclose(said.log_probs_before, said.teacher_log_probs, rtol=1e-6, atol=1e-6)
  assert found.steps[0]['grad_norm'] < 1e-4
  # And the model without an adapter does not agree with the adapter.
  _, (other,) = learn(
    learner, fresh(adapters), pool, [task_of(2, [each], teacher=NO_MEMBER, loss=loss, optimizer=still)]
  )
  assert other.said[0].divergence.max() > 1e-3


def test_slots_without_a_task_keep_every_bit_and_the_others_do_not_depend_on_company(adapters, teachers, learner):
  task = task_of(1, [lesson(21), lesson(22)], teacher=0, loss=Sdpo(topk=K), optimizer=OPTIMIZER, steps=2)
  other = task_of(2, [lesson(23)], teacher=1, loss=JsdPg(), optimizer=OPTIMIZER)
  alone, (first,) = learn(learner, fresh(adapters), teachers, [task])
  both, (second, _) = learn(learner, fresh(adapters), teachers, [task, other])
  for slot in (0, 2):
    jax.tree.map(
      np.testing.assert_array_equal,
      training_pool.slot_of(alone, slot),
      training_pool.slot_of(fresh(adapters), slot),
    )
  assert_close(training_pool.slot_of(both, 1).trainable, training_pool.slot_of(alone, 1).trainable, 1e-6)
  np.testing.assert_allclose(first.said[0].log_probs_after, second.said[0].log_probs_after, atol=1e-5)
  assert np.abs(first.said[0].log_probs_after - first.said[0].log_probs_before).max() > 1e-3


def test_later_requests_compile_nothing(adapters, teachers, learner):
  state, _ = learn(
    learner, fresh(adapters), teachers, [task_of(0, [lesson(31)], loss=Sdpo(topk=K), optimizer=OPTIMIZER, steps=2)]
  )
  names = []

  def listen(event, duration, **details):
    if event == '/jax/core/compile/backend_compile_duration':
      names.append(details['fun_name'])

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    changed = dataclasses.replace(OPTIMIZER, learning_rate=1e-4, beta2=0.99)
    learn(learner, state, teachers, [task_of(1, [lesson(31)], teacher=0, loss=JsdPg(alpha=0.6), optimizer=changed)])
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)
  assert names == []


def test_a_gradient_that_is_not_finite_is_said_and_changes_nothing(adapters, teachers, learner):
  broken = dataclasses.replace(lesson(41), sampling_log_probs=None, advantage=3e38)
  task = task_of(0, [broken], teacher=0, loss=Sdpo(topk=K, policy_weight=1e9), optimizer=OPTIMIZER)
  fine = task_of(1, [lesson(42)], teacher=0, loss=Sdpo(topk=K), optimizer=OPTIMIZER)
  state, (first, second) = learn(learner, fresh(adapters), teachers, [task, fine])
  assert not first.stepped and second.stepped
  jax.tree.map(
    np.testing.assert_array_equal, training_pool.slot_of(state, 0), training_pool.slot_of(fresh(adapters), 0)
  )


def taught(token, log_prob):
  return Taught(np.asarray([[token]], np.int32), np.asarray([[log_prob]], np.float32), np.float32([-1.0]))


@pytest.mark.parametrize('name', ['learning_rate', 'beta1', 'beta2', 'eps', 'weight_decay', 'max_grad_norm'])
def test_numbers_of_an_optimizer_that_are_none_are_refused(name):
  for wrong in (float('nan'), -1.0):
    with pytest.raises(UserError, match=f'{name} must be'):
      AdamW(**{name: wrong})


@pytest.mark.parametrize(
  'change, said',
  [
    (dict(lessons=[]), 'nothing to learn from'),
    (dict(steps=0), 'num_steps must be at least 1'),
    (dict(steps=1.5), 'num_steps must be at least 1'),
    (dict(lessons=[Lesson([1], [61], [1])]), 'The completion must hold token ids from 0 to 60 only'),
    (dict(lessons=[Lesson([-1], [1], [1])]), 'The prompt must hold token ids'),
    (dict(lessons=[Lesson([1], [1.5], [1])]), 'The completion must hold token ids'),
    (dict(lessons=[Lesson([1], [1], [1], advantage=np.inf)]), 'advantage of a lesson must be a finite number'),
    (
      dict(lessons=[Lesson([1], [1], [1], np.float32([np.nan]))]),
      'sampling log-prob of the completion is not',
    ),
    (dict(lessons=[Lesson([1], [1], None, taught=taught(61, -1.0))]), "The teacher's top_ids must hold token ids"),
    (dict(lessons=[Lesson([1], [1], None, taught=taught(1, np.nan))]), 'log-prob of the teacher is not a number'),
    (dict(loss=Sdpo(topk=K + 1)), 'topk=9 is more than the 8'),
    (dict(loss=JsdPg(support='union')), "support='union' doubles"),
    (dict(lessons=[Lesson([], [1], [1])]), 'The prompt is empty'),
    (dict(lessons=[Lesson([1], [1] * 7, [1])]), 'The completion has 7 tokens, but the engine takes at most 6'),
    (dict(lessons=[Lesson([1], [1], [1] * 13)]), "The teacher's prompt has 13 tokens"),
  ],
)
def test_what_cannot_be_learned_is_refused_before_anything_changes(learner, change, said):
  with pytest.raises(UserError, match=said):
    learner.check([task_of(**{'slot': 0, 'lessons': [lesson(1)], 'loss': Sdpo(topk=K), **change})])
  with pytest.raises(ValueError, match='one slot'):
    learner.check([task_of(0, [lesson(1)], loss=Sdpo(topk=K))] * 2)


@pytest.mark.parametrize('wrong', [dict(alpha=1.5), dict(policy_weight=-1.0), dict(is_clip=0.0), dict(topk=0)])
def test_losses_that_are_none_are_refused(wrong):
  with pytest.raises(UserError, match=next(iter(wrong))):
    Sdpo(**wrong)
  assert jnp.isfinite(jnp.float32(Sdpo().alpha))
