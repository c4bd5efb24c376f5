"""`jsd_pg` against NumPy in float64, what it is made of, and its settings; the published numbers are golden files."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdpo_jax.errors import UserError
from sdpo_jax.learning.requests import Lesson, Task, Taught, UpdateOptions
from sdpo_jax.objective import jsd_pg, reported
from sdpo_jax.objective.loss import ObjectiveConfig, objective
from sdpo_jax.types import TeacherSignal
from tests.learning.first_batches import first_batch
from tests.objective.jsd_pg_by_hand import B, K, T, V, by_hand


def problem(seed=0):
  rng = np.random.default_rng(seed)
  teacher = rng.standard_normal((B, T, V)) * 2
  teacher -= np.log(np.exp(teacher).sum(-1, keepdims=True))
  logits = rng.standard_normal((B, T, V)) * 2
  ids = np.argsort(-teacher, -1)[..., :K]
  ids[0, 0, -2:] = -1  # It may name fewer.
  targets = np.where(rng.random((B, T)) < 0.5, ids[..., 0], rng.integers(0, V, (B, T)))
  now = np.take_along_axis(logits, targets[..., None], -1)[..., 0] - np.log(np.exp(logits).sum(-1))
  return {
    'logits': logits,
    'teacher': teacher,
    'ids': ids,
    'student_ids': np.argsort(-logits, -1)[..., :K],
    'targets': targets,
    'mask': np.array([[1, 1, 1, 0], [1, 1, 1, 1]], float),
    'old': now + 1.5 * rng.standard_normal((B, T)),  # Ratios far from 1 on both sides.
  }


def prepared(x, settings, in_mesh=False):
  """Return the batch of a request's first step, its signal on the support that is asked for, and the floored tokens."""
  log_probs, ids, targets = x['teacher'], x['ids'], x['targets']
  lessons = []
  for row, length in enumerate(x['mask'].sum(1).astype(int)):
    top, own = ids[row, :length], targets[row, :length]
    at_top = np.take_along_axis(log_probs[row, :length], np.maximum(top, 0), -1)
    at_own = np.take_along_axis(log_probs[row, :length], own[:, None], -1)[:, 0]
    known = np.where((top == own[:, None]).any(-1), at_own, -np.inf)
    taught = None if in_mesh else Taught(top, at_top, known)
    lessons.append(Lesson([1], own, [1, 2] if in_mesh else None, x['old'][row, :length], taught=taught))
  batch, floored = first_batch(
    Task(slot=0, lessons=lessons, update=UpdateOptions(settings)),
    jnp.asarray(x['logits']),
    jnp.asarray(log_probs),
    jnp.eye(V),
    topk=K,
    vocab_size=V,
    dtype=np.float64,
    union=True,  # So that one program serves both supports.
  )
  return batch, floored


def test_rows_of_a_union_may_have_teachers_of_both_kinds():
  x = problem()
  given = jnp.asarray(np.take_along_axis(x['teacher'], np.maximum(x['ids'], 0), -1))
  signal = TeacherSignal(token_ids=jnp.asarray(x['ids'], jnp.int32), log_probs=given)
  ids = jnp.asarray(x['student_ids'], jnp.int32)
  exact = jnp.asarray(np.take_along_axis(x['teacher'], x['student_ids'], -1))
  found = jsd_pg.union(signal, ids, V, exact, jnp.asarray([True, False]))
  external, own = jsd_pg.union(signal, ids, V), jsd_pg.union(signal, ids, V, exact)
  assert not np.array_equal(external.log_probs, own.log_probs)
  for name in ('token_ids', 'log_probs'):
    np.testing.assert_array_equal(getattr(found, name)[0], getattr(external, name)[0])
    np.testing.assert_array_equal(getattr(found, name)[1], getattr(own, name)[1])


traced = []  # A shape for each program of `evaluate`.


@jax.jit
def evaluate(logits, batch):
  """(loss, aux), gradient by logits, that are hidden states of an identity."""
  traced.append(logits.shape)

  def value(logits):
    terms = {name: getattr(batch, name) for name in ('policy_coef', 'old_log_probs', 'advantages')}
    arrays = logits, jnp.eye(V), batch.signal, batch.targets, batch.mask, batch.distill_coef
    return objective(*arrays, config=ObjectiveConfig(chunk_size=3), numbers=batch.numbers, **terms)

  return jax.value_and_grad(value, has_aux=True)(logits)


SETTINGS = {
  'teacher': jsd_pg.JsdPg(alpha=0.3, jsd_weight=0.7),
  'design': jsd_pg.JsdPg(alpha=0.8, clip_eps=0.4, form='design'),
  'union': jsd_pg.JsdPg(alpha=0.6, jsd_weight=2.0, support='union', floor=-9.0),
}


@pytest.mark.parametrize('in_mesh', [False, True])
def test_loss_and_gradient_are_the_formula(in_mesh):
  """With a teacher that names a few tokens and with one that knows all; over both supports, in both forms."""
  x, rng = problem(), np.random.default_rng(1)
  if in_mesh:  # Such a teacher names all of its top K.
    x['ids'] = np.argsort(-x['teacher'], -1)[..., :K]
  direction = rng.standard_normal(x['logits'].shape)
  with jax.enable_x64(True):
    for name, settings in SETTINGS.items():
      batch, _ = prepared(x, settings, in_mesh)
      (loss, aux), gradient = jax.device_get(evaluate(jnp.asarray(x['logits']), batch))
      expected, summands = by_hand(x, settings, in_mesh=in_mesh)
      np.testing.assert_allclose(loss, expected, rtol=1e-10, err_msg=name)
      np.testing.assert_allclose(aux['divergence'][x['mask'] > 0], [s.sum() for s in summands], rtol=1e-10)
      assert all((s >= -1e-15).all() for s in summands) and (aux['divergence'] >= 0).all()
      up, down = (by_hand(x, settings, x['logits'] + h * direction, in_mesh)[0] for h in (1e-6, -1e-6))
      np.testing.assert_allclose((gradient * direction).sum(), (up - down) / 2e-6, rtol=1e-6, atol=1e-9)
      # Other numbers take no other program.
      both = dataclasses.replace(settings, alpha=0.55, clip_eps=0.1)
      (loss, _), _ = evaluate(jnp.asarray(x['logits']), prepared(x, both, in_mesh)[0])
      np.testing.assert_allclose(loss, by_hand(x, both, in_mesh=in_mesh)[0], rtol=1e-10)
  assert len(traced) == 1


def test_agreement_is_exactly_nothing_and_disagreement_is_bounded_below_only():
  same = jnp.asarray(-np.random.default_rng(0).exponential(5, (3, 7)), jnp.float32)
  for alpha in (0.5, 0.3, jnp.asarray([0.1, 0.5, 0.9])):
    assert not jsd_pg.advantages(same, same, alpha).any()
  ours, theirs = jnp.asarray([[-90.0, -1e-9, -0.5]]), jnp.asarray([[-1e-9, -90.0, -1e4]])
  found = np.asarray(jsd_pg.advantages(ours, theirs, 0.25))
  np.testing.assert_allclose(found, [[90 + np.log(0.75), np.log(0.25), np.log(0.25)]], rtol=1e-6)
  np.testing.assert_allclose(jsd_pg.advantages(ours, theirs, 0.5, 'design'), 0)
  assert jax.grad(lambda x: jsd_pg.advantages(x, theirs, 0.5).sum())(ours).tolist() == [[0, 0, 0]]


REFUSED = {
  'form must be one of mixture, design': dict(form='other'),
  'support must be one of teacher, union': dict(support='student'),
  'alpha of jsd_pg must lie between 0 and 1, without the ends, not 1.0': dict(alpha=1.0),
  'alpha of jsd_pg must lie between 0 and 1, without the ends, not nan': dict(alpha=float('nan')),
  "alpha=0.4 with form='design' would reinforce what the teacher dislikes": dict(alpha=0.4, form='design'),
  'clip_eps must be greater than 0 and at most 1': dict(clip_eps=0.0),
  'jsd_weight must be 0 or a positive number': dict(jsd_weight=-1.0),
  'floor is a log-probability and must be negative': dict(floor=1.0),
}


@pytest.mark.parametrize('sentence', REFUSED)
def test_settings_that_make_no_sense_are_refused(sentence):
  with pytest.raises(UserError, match=sentence):
    jsd_pg.JsdPg(**REFUSED[sentence])


def test_floored_tokens_and_lite_answers_are_told():
  x = problem()
  settings = jsd_pg.JsdPg(jsd_weight=0.0)
  unknown = ~(x['ids'] == x['targets'][..., None]).any(-1)
  with jax.enable_x64(True):
    batch, floored = prepared(x, settings)
    (loss, aux), _ = evaluate(jnp.asarray(x['logits']), batch)
    report = reported.means(jax.device_get(reported.row_sums(batch, aux, floored)))
  np.testing.assert_allclose(report['floored_fraction'], unknown[x['mask'] > 0].mean(), rtol=1e-6)
  assert 0 < report['floored_fraction'] < 1 and report['tokens_processed'] == 7
  np.testing.assert_allclose(report['loss'], report['pg_loss'])
  np.testing.assert_allclose(loss, report['loss'], rtol=1e-12)
