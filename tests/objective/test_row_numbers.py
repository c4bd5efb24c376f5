"""Numbers that each row has for itself: against NumPy in float64 row by row, by one program for all of them."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdpo_jax.errors import UserError
from sdpo_jax.objective import row_numbers
from sdpo_jax.objective.loss import ObjectiveConfig, objective
from sdpo_jax.types import RowNumbers
from tests.golden.compiling import quick
from tests.objective.numpy_loss import TERMS, B, arrays, problem, signal
from tests.objective.objective_from_logits import objective_from_logits
from tests.objective.row_numbers_by_hand import KINDS, SHARED, by_hand, of_rows

TRAINED = ('hidden', 'unembedding')
OTHERS = SHARED | dict(alpha=[0.3, 0.0, 1.0], is_clip=[1.1, 0.0, 0.5], temperature=[1.0, 0.5, 2.0])


traced = []  # (Kind, path) of each program.


@functools.cache
def program(kind, path):
  """Return the jitted (loss, aux), gradients by name of the arrays and numbers."""
  config = ObjectiveConfig(**KINDS[kind][0])

  def value(trained, x, numbers):
    traced.append((kind, path))
    y = x | trained
    given = {name: y[name] for name in TERMS}
    if path == 'chunks':
      return objective(y['hidden'], y['unembedding'], signal(y), **given, config=config, numbers=numbers)
    logits = (y[f'{name}hidden'] @ y[f'{name}unembedding'].T for name in ('', 'teacher_'))
    return objective_from_logits(*logits, **given, config=config, numbers=numbers)

  return jax.jit(jax.value_and_grad(value, has_aux=True), compiler_options=quick())


def evaluate(kind, path, x, values, dtype='float64'):
  x = arrays(x, dtype)
  return jax.device_get(program(kind, path)({name: x[name] for name in TRAINED}, x, of_rows(values, dtype)))


@pytest.mark.parametrize('kind', KINDS)
def test_each_row_has_the_loss_and_gradient_of_its_own_numbers(kind):
  x, rng = problem(6), np.random.default_rng(3)
  direction = {name: rng.standard_normal(x[name].shape) for name in TRAINED}
  before = traced.count((kind, 'chunks'))
  with jax.enable_x64(True):
    for values in (SHARED, OTHERS, OTHERS | dict(is_clip=[0.0] * B)):
      values = values | KINDS[kind][1]
      (loss, aux), gradients = evaluate(kind, 'chunks', x, values)
      expected, divergence = by_hand(kind, x, values)
      np.testing.assert_allclose(loss, expected, rtol=1e-12)
      np.testing.assert_allclose(aux['divergence'], divergence, rtol=1e-10, atol=1e-12)
      if kind == 'topk':
        _, differentiated = evaluate(kind, 'logits', x, values)
        for name in TRAINED:
          np.testing.assert_allclose(gradients[name], differentiated[name], rtol=1e-10, atol=1e-12)
    # Which JAX has differentiated; and by differences of the formula, in which the ratio would move too.
    slope = sum((gradients[name] * direction[name]).sum() for name in TRAINED)
    up, down = (by_hand(kind, x | {n: x[n] + h * direction[n] for n in TRAINED}, values)[0] for h in (1e-6, -1e-6))
    np.testing.assert_allclose(slope, (up - down) / 2e-6, rtol=1e-6)
    for scale in (1e2, 1e4):
      sure = x | {name: x[name] * scale for name in ('hidden', 'teacher_hidden')}
      assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(evaluate(kind, 'chunks', sure, values)))
  assert traced.count((kind, 'chunks')) - before <= 1


def test_tokens_may_have_their_own():
  """As where a row holds samples of several requests: rows in another order, token by token."""
  x = problem(6)
  values = SHARED | KINDS['topk'][1]
  order = np.random.default_rng(5).integers(0, B, x['mask'].shape)
  spread = {name: np.asarray(value)[order] for name, value in values.items()}
  expected = 0.0
  for row in range(B):
    alike = {name: [value[row]] * B for name, value in values.items()}
    expected += by_hand('topk', x | dict(mask=np.where(order == row, x['mask'], 0)), alike)[0]
  with jax.enable_x64(True):
    (loss, _), _ = evaluate('topk', 'chunks', x, spread)
  np.testing.assert_allclose(loss, expected, rtol=1e-12)
  row_numbers.check(of_rows(spread, np.float64), 8)
  with pytest.raises(UserError, match='alpha of row 1 is 2.0'):
    row_numbers.check(RowNumbers(alpha=np.array([[0.5, 0.5], [1.0, 2.0]])))


@pytest.mark.slow
def test_float32_ends_are_exact_and_finite_however_sure_the_distributions_are():
  x = problem(1)
  values = SHARED | KINDS['topk'][1] | dict(alpha=np.float32([0.0, 1.0, 0.5]))
  (loss, _), _ = evaluate('topk', 'chunks', x, values, 'float32')
  np.testing.assert_allclose(loss, by_hand('topk', x, values)[0], rtol=5e-6)
  for scale in (1e2, 1e4):
    sure = x | {name: x[name] * scale for name in ('hidden', 'teacher_hidden')}
    (loss, aux), gradients = evaluate('topk', 'chunks', sure, values, 'float32')
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((loss, aux, gradients)))


def test_numbers_of_masked_rows_have_no_effect_whatever_they_are():
  x = problem(2)
  x['mask'][1] = 0
  values = SHARED | KINDS['topk'][1]
  broken = {name: np.where(np.arange(B) == 1, 10**6 if name == 'topk' else np.nan, v) for name, v in values.items()}
  with jax.enable_x64(True):
    for path in ('chunks', 'logits'):
      jax.tree.map(np.testing.assert_array_equal, *(evaluate('topk', path, x, v) for v in (broken, values)))


def test_what_rows_cannot_have_is_refused():
  zeros = jnp.zeros((2, 3))
  x = {name: zeros for name in ('mask', 'distill_coef')} | dict(targets=zeros.astype(int))

  def call(numbers, **settings):
    states = jnp.zeros((2, 3, 4)), jnp.zeros((9, 4))
    teacher = signal(dict(teacher_hidden=states[0], teacher_unembedding=states[1]))
    objective(*states, teacher, **x, config=ObjectiveConfig(**settings), numbers=numbers)

  ones = jnp.ones(2)
  with pytest.raises(ValueError, match='alpha of rows is of no use with full_logit_distillation=False'):
    call(RowNumbers(alpha=ones), full_logit_distillation=False, alpha=1.0)
  with pytest.raises(ValueError, match='topk and tail of rows'):
    call(RowNumbers(topk=ones.astype(int)), distillation_topk=None)
  with pytest.raises(ValueError, match='tail of rows needs distillation_add_tail=True'):
    call(RowNumbers(tail=ones), distillation_add_tail=False)
  for wrong in (RowNumbers(alpha=jnp.ones(3)), RowNumbers(alpha=jnp.ones((2, 1))), RowNumbers(topk=ones)):
    with pytest.raises(AssertionError):
      call(wrong)


WRONG = {
  'alpha': (1.5, 'alpha of row 1 is 1.5: it must be between 0 and 1.'),
  'is_clip': (-1.0, 'is_clip of row 1 is -1.0: it must be positive, or 0 for no ratio.'),
  'rollout_is_threshold': (0.0, 'rollout_is_threshold of row 1 is 0.0: it must be positive and finite.'),
  'temperature': (math.inf, 'temperature of row 1 is inf: it must be positive and finite.'),
  'clip_ratio_low': (1.5, 'clip_ratio_low of row 1 is 1.5: it must be between 0 and 1.'),
  'clip_ratio_high': (math.nan, 'clip_ratio_high of row 1 is nan: it must be 0 or more.'),
  'clip_ratio_c': (1.0, 'clip_ratio_c of row 1 is 1.0: it must be greater than 1, or infinite for no dual clip.'),
  'topk': (9, 'topk of row 1 is 9: it must be 1 or more and at most 8.'),
  'tail': (0.5, 'tail of row 1 is 0.5: it must be 0 or 1.'),
}


def test_wrong_values_are_named_with_their_row():
  assert set(WRONG) == {field.name for field in dataclasses.fields(RowNumbers)}
  row_numbers.check(of_rows(SHARED | dict(topk=[6, 1, 8], tail=[0, 1, 1]), np.float32), 8)
  for name, (value, sentence) in WRONG.items():
    fine = 8 if name == 'topk' else (2.0 if name == 'clip_ratio_c' else 1.0)
    with pytest.raises(UserError) as refused:
      row_numbers.check(of_rows({name: [fine, value]}, np.float64), 8)
    assert str(refused.value) == sentence
