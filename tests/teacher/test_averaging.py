"""Teacher weights: reference EMA values and guards, exact ends, precision, adapters, restarts."""

import decimal
import json

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdpo_jax.teacher import averaging
from sdpo_jax.teacher.averaging import TeacherSpec
from tests import tiny

GOLDEN = tiny.REPOSITORY / 'tests' / 'golden' / 'data' / 'teacher'


def tree(seed=0, dtype=jnp.float32):
  keys = jax.random.split(jax.random.key(seed), 2)
  return {
    'embed': jax.random.normal(keys[0], (5, 3), dtype),
    'layers': {'w': jax.random.normal(keys[1], (2, 3), dtype)},
  }


def equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def test_live_teacher_stores_nothing_and_is_the_student():
  student = tree()
  live = averaging.live()
  assert live.init(student) == {} and live.update({}, student, 0) == {}
  own, mixed = averaging.signal_parameters({}, student, TeacherSpec('live', 0.05, None))
  assert own is student and mixed is None


@pytest.mark.parametrize('transform', [averaging.frozen(), averaging.ema(0.0)])
def test_teachers_that_never_move(transform):
  student = tree()
  teacher = transform.init(student)
  equal(transform.update(teacher, tree(1), 3), student)


def test_trust_region_is_read_with_the_student_mixed_in():
  student, teacher = tree(1), tree(0)
  spec = TeacherSpec('trust-region', 0.05, None)
  assert averaging.signal_parameters(teacher, student, spec) == (teacher, student)


def test_ema_rate_one_copies_the_student_exactly():
  transform = averaging.ema(1.0)
  equal(transform.update(transform.init(tree()), tree(1), 0), tree(1))


@settings(max_examples=25, deadline=None)
@given(rate=st.floats(0.001, 0.999), seed=st.integers(0, 100))
def test_ema_is_the_weighted_mean(rate, seed):
  transform = averaging.ema(rate)
  teacher, student = tree(seed), tree(seed + 1)
  moved = transform.update(teacher, student, 0)
  expected = jax.tree.map(lambda t, s: np.float64(t) * (1 - rate) + np.float64(s) * rate, teacher, student)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), moved, expected)


@pytest.mark.parametrize('rate', [0.0, 1e-300, 1e-18, 1e-9, 0.05, 0.5, 1 - 1e-12, 1.0])
@pytest.mark.parametrize('ratio', [0.125, 0.37, 1.0, 2.0, 7, 1e4])
def test_a_scaled_ema_rate_keeps_of_the_teacher_what_the_rule_says(rate, ratio):
  with decimal.localcontext(prec=400):
    expected = 1 - (1 - decimal.Decimal(rate)) ** decimal.Decimal(ratio)
  assert averaging.scaled_ema_rate(rate, ratio) == pytest.approx(float(expected), rel=1e-14, abs=0)


@pytest.mark.parametrize('steps', [1, 2, 5])
def test_one_update_at_the_scaled_rate_is_as_many_towards_a_student_that_stands_still(steps):
  student, teacher = tree(1), averaging.ema(0.1).init(tree())
  moved = averaging.ema(averaging.scaled_ema_rate(0.1, steps)).update(teacher, student, 0)
  for step in range(steps):
    teacher = averaging.ema(0.1).update(teacher, student, step)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), moved, teacher)
  back = averaging.scaled_ema_rate(averaging.scaled_ema_rate(0.1, steps), 1 / steps)
  assert back == pytest.approx(0.1, rel=1e-14)


@pytest.mark.parametrize(
  'rate, ratio', [(-0.1, 2), (1.1, 2), (float('nan'), 2), (0.1, 0), (0.1, -1), (0.1, float('inf'))]
)
def test_a_rate_or_ratio_that_is_none_is_refused(rate, ratio):
  with pytest.raises(ValueError, match=r'lies in \[0, 1\]|positive and finite'):
    averaging.scaled_ema_rate(rate, ratio)


def test_a_teacher_of_bfloat16_weights_is_kept_in_float32_and_moves_at_small_rates():
  transform = averaging.ema(1e-4)
  student = tree(dtype=jnp.bfloat16)
  teacher = transform.init(student)
  assert {x.dtype for x in jax.tree.leaves(teacher)} == {jnp.dtype('float32')}
  moved = transform.update(teacher, jax.tree.map(lambda x: x + 1, student), 0)
  assert all((m != t).any() for m, t in zip(jax.tree.leaves(moved), jax.tree.leaves(teacher), strict=True))


def test_the_teacher_survives_donation_of_the_student():
  student = tree()
  teacher = averaging.ema(0.5).init(student)
  jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)(student)
  equal(teacher, tree())


def test_guards_refuse_a_teacher_that_is_missing_or_the_student_itself():
  student, transform = tree(), averaging.ema(0.1)
  with pytest.raises(ValueError, match='empty'):
    transform.update({}, student, 0)
  with pytest.raises(ValueError, match='is the student'):
    transform.update(student, student, 0)
  with pytest.raises(ValueError):
    transform.update({'embed': student['embed']}, student, 0)
  assert averaging.ema(0.0).update({}, student, 0) == {}


def test_restart_takes_the_student_every_m_batches():
  transform = averaging.restart(3)
  update = jax.jit(transform.update)
  teacher, taken = transform.init(tree(100)), []
  for step in range(7):
    teacher = update(teacher, tree(step), step)
    taken.append(next(s for s in (100, *range(7)) if np.array_equal(teacher['embed'], tree(s)['embed'])))
  assert taken == [100, 100, 2, 2, 2, 5, 5]
  with pytest.raises(ValueError):
    averaging.restart(0)


@pytest.mark.parametrize('name', ['live', 'frozen', 'ema', 'trust-region'])
def test_make_knows_every_setting_and_updates_run_under_jit(name):
  transform = averaging.make(TeacherSpec(name, 0.25, None))
  student = tree()
  moved = jax.jit(transform.update)(transform.init(student), tree(1), 0)
  expected = {'live': {}, 'ema': jax.tree.map(lambda t, s: t * 0.75 + s * 0.25, student, tree(1))}.get(name, student)
  assert jax.tree.structure(moved) == jax.tree.structure(expected)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), moved, expected)


@pytest.mark.skipif(not GOLDEN.exists(), reason='the reference files are not here')
@pytest.mark.parametrize('bits', [64, 32])
def test_reference_ema(bits):
  paths = sorted(GOLDEN.glob('ema_*.npz'))
  assert paths
  with jax.enable_x64(bits == 64):
    dtype = np.dtype(f'float{bits}')
    for path in paths:
      data = np.load(path, allow_pickle=False)
      settings_ = json.loads(str(data['config_json']))
      rate = settings_.get('teacher_update_rate', settings_.get('rate'))
      names = [key.removeprefix('teacher0_') for key in data if key.startswith('teacher0_')]
      transform = averaging.ema(rate)
      teacher = transform.init({name: jnp.asarray(data[f'teacher0_{name}'], dtype) for name in names})
      steps = sorted({int(key.split('_')[0].removeprefix('student')) for key in data if key.startswith('student')})
      for step in steps:
        teacher = transform.update(teacher, {n: jnp.asarray(data[f'student{step}_{n}'], dtype) for n in names}, step)
        for name in names:
          expected = data[f'exp_teacher{step}_{name}_f64']
          error = np.abs(np.asarray(teacher[name], np.float64) - expected) / (1 + np.abs(expected).max())
          assert error.max() <= (1e-12 if bits == 64 else 1e-6), (path.name, step, name)
