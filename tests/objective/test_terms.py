"""The pieces of the objective against direct NumPy formulas, and their properties."""

import functools
import re

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdpo_jax.objective import divergences, vocabulary
from sdpo_jax.objective.advantages import grpo_advantages
from sdpo_jax.objective.aggregation import loss_coefficients
from sdpo_jax.objective.importance import importance_ratio, mismatch, rollout_is_weights
from sdpo_jax.objective.loss import ObjectiveConfig
from sdpo_jax.objective.policy_gradient import dual_clip_ppo, kl_penalty
from sdpo_jax.objective.sharded import VocabShard
from sdpo_jax.objective.terms import clipped_ratio
from sdpo_jax.objective.top_k import GROUP, top_k, two_stage_top_k
from sdpo_jax.objective_settings import AGGREGATIONS


def log_probs(rng, *shape):
  logits = 2 * rng.standard_normal(shape)
  return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def numpy_divergence(s, t, alpha):
  p, q = np.exp(s), np.exp(t)
  if alpha == 0:
    return (q * (t - s)).sum(-1)
  if alpha == 1:
    return (p * (s - t)).sum(-1)
  m = np.log((1 - alpha) * p + alpha * q)
  return (1 - alpha) * (p * (s - m)).sum(-1) + alpha * (q * (t - m)).sum(-1)


seeds = st.integers(0, 2**31 - 1)


@settings(max_examples=15, deadline=None)
@given(seeds, st.sampled_from([0.0, 0.01, 0.3, 0.5, 1.0]))
def test_divergence_is_the_formula_and_not_negative(seed, alpha):
  rng = np.random.default_rng(seed)
  s, t = log_probs(rng, 3, 6), log_probs(rng, 3, 6)
  with jax.enable_x64(True):
    ours = np.asarray(divergences.divergence(jnp.asarray(s), jnp.asarray(t), alpha))
  np.testing.assert_allclose(ours, numpy_divergence(s, t, alpha), rtol=1e-12, atol=1e-14)
  assert np.all(ours >= 0)


@settings(max_examples=10, deadline=None)
@given(seeds, st.floats(0.05, 0.95))
def test_divergence_swaps_roles_with_alpha(seed, alpha):
  """JSD_α(s, t) = JSD_{1−α}(t, s); at one half it is symmetric; KL(t‖s) is KL of the swapped pair."""
  rng = np.random.default_rng(seed)
  with jax.enable_x64(True):
    s, t = jnp.asarray(log_probs(rng, 4, 5)), jnp.asarray(log_probs(rng, 4, 5))
    for a, b in ((alpha, 1 - alpha), (0.5, 0.5), (0.0, 1.0)):
      np.testing.assert_allclose(
        divergences.divergence(s, t, a), divergences.divergence(t, s, b), rtol=1e-9, atol=1e-14
      )


@pytest.mark.parametrize('alpha', [0.0, 0.3, 1.0])
def test_divergence_gradient_is_by_finite_differences_for_the_student_and_none_for_the_teacher(alpha):
  rng = np.random.default_rng(0)
  s, t = log_probs(rng, 5), log_probs(rng, 5)
  with jax.enable_x64(True):
    by_student, by_teacher = jax.grad(lambda s, t: divergences.divergence(s, t, alpha), argnums=(0, 1))(
      jnp.asarray(s), jnp.asarray(t)
    )
    np.testing.assert_allclose(
      by_student, divergences.divergence_slopes(jnp.asarray(s), jnp.asarray(t), alpha), rtol=1e-12
    )
  step = 1e-6
  for k in range(5):
    shift = step * np.eye(5)[k]
    slope = (numpy_divergence(s + shift, t, alpha) - numpy_divergence(s - shift, t, alpha)) / (2 * step)
    np.testing.assert_allclose(by_student[k], slope, rtol=1e-6, atol=1e-9)
  assert not np.any(by_teacher)


@pytest.mark.parametrize('end', [0.0, 1.0])
@pytest.mark.parametrize('number', [int, np.float32, np.float64, jnp.float32])
def test_the_ends_of_alpha_are_exact_whatever_its_type(end, number):
  """A KL there, and not the limit of the mixtures, which is 0; also under `jit`, if it does not trace alpha."""
  rng = np.random.default_rng(0)
  student, teacher = log_probs(rng, 5), log_probs(rng, 5)
  divergence = functools.partial(divergences.divergence, alpha=number(end))
  for evaluate in (divergence, jax.jit(divergence)):
    ours = evaluate(jnp.asarray(student, jnp.float32), jnp.asarray(teacher, jnp.float32))
    np.testing.assert_allclose(ours, numpy_divergence(student, teacher, end), rtol=1e-5)


def numpy_slopes(s, t, alpha):
  """Return derivatives of `numpy_divergence` by the student's log-probs, each on its own."""
  p, q = np.exp(s), np.exp(t)
  if alpha == 0:
    return -q
  if alpha == 1:
    return p * (s - t + 1)
  return (1 - alpha) * p * (s - np.log((1 - alpha) * p + alpha * q))


@pytest.mark.parametrize('dtype', [np.float32, np.float64])
@pytest.mark.parametrize('form', ['jit', 'vmap', 'jit of vmap', 'eager'])
def test_an_alpha_that_is_data_is_exact_at_both_ends(form, dtype):
  """The KLs at 0 and 1, the mixtures between; what rounds to an end in the type of the log-probs is at that end."""
  rng = np.random.default_rng(0)
  student, teacher = log_probs(rng, 6), log_probs(rng, 6)
  alphas = np.array([0.0, 1.0, 0.3, 1 - 1e-9, 1e-44, 1 - 2e-7])
  evaluate = jax.value_and_grad(divergences.divergence)
  if 'vmap' in form:
    evaluate = jax.vmap(evaluate, (None, None, 0))
  if 'jit' in form:
    evaluate = jax.jit(evaluate)
  with jax.enable_x64(dtype == np.float64):
    s, t = jnp.asarray(student, dtype), jnp.asarray(teacher, dtype)
    if 'vmap' in form:
      values, slopes = evaluate(s, t, jnp.asarray(alphas, dtype))
    else:
      numbers = alphas.tolist() if form == 'eager' else map(dtype, alphas)
      values, slopes = zip(*(evaluate(s, t, alpha) for alpha in numbers), strict=True)
  tolerance = dict(rtol=1e-10, atol=1e-13) if dtype == np.float64 else dict(rtol=3e-4, atol=3e-7)
  for alpha, value, slope in zip(alphas, values, slopes, strict=True):
    rounded = float(dtype(alpha))
    rounded = 0.0 if rounded < np.finfo(dtype).tiny else rounded
    np.testing.assert_allclose(value, numpy_divergence(student, teacher, rounded), err_msg=alpha, **tolerance)
    np.testing.assert_allclose(slope, numpy_slopes(student, teacher, rounded), err_msg=alpha, **tolerance)


@pytest.mark.parametrize('alpha', [0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize('difference', [1e-6, 1e-4, 1e-2])
def test_near_convergence_the_gradient_is_exact_and_no_divergence_negative(alpha, difference):
  """In float32, against the formula in long double with the same rounded log-probs."""
  rng = np.random.default_rng(0)
  s = log_probs(rng, 10_000, 5)
  s, t = np.float32(s), np.float32(s + difference * rng.standard_normal(s.shape))
  values, pull_back = jax.vjp(lambda s: divergences.divergence(s, t, alpha), jnp.asarray(s))
  values, slopes = np.asarray(values), np.asarray(pull_back(jnp.ones_like(values))[0])
  s, t, alpha = np.longdouble(s), np.longdouble(t), np.longdouble(np.float32(alpha))
  m = np.log1p(alpha * np.expm1(t - s))
  exact = -(1 - alpha) * np.exp(s) * m
  assert np.abs(slopes - exact).max() <= 1e-6 * np.abs(exact).max() and np.all(values >= 0)
  if difference >= 1e-4 and alpha <= 0.5:
    of_rows = (alpha * np.exp(t) * (t - s - m) + exact).sum(-1)
    assert np.median(np.abs(values / of_rows - 1)) <= 2e-3


@pytest.mark.parametrize('alpha', [1e-6, 0.3, 1 - 1e-6])
@pytest.mark.parametrize('dtype', [np.float32, np.float64])
def test_values_and_gradients_are_right_however_far_apart_the_distributions_are(alpha, dtype):
  """Also at the seam of the two forms, |t − s| = 1, and by whatever is differentiated."""
  gaps = np.array([0, 1e-30, 0.5, 1 - 1e-6, 1, 1 + 1e-6, 2, 88, 89, 200, 1e3, 1e4])
  gaps = np.concatenate([gaps, -gaps])
  s, t = np.minimum(-gaps, 0) - 0.1, np.minimum(gaps, 0) - 0.1  # The less likely one is |gap| nats below.
  with jax.enable_x64(dtype == np.float64):
    s, t, weight = (jnp.asarray(x, dtype) for x in (s, t, alpha))
    of_terms = jax.grad(lambda *x: divergences.divergence_terms(*x).sum(), argnums=(0, 1, 2))(s, t, weight)
    assert all(np.all(np.isfinite(x)) for x in of_terms)
    terms, slopes = divergences.divergence_terms(s, t, weight), divergences.divergence_slopes(s, t, weight)
  s, t, weight, terms, slopes = (np.longdouble(np.asarray(x)) for x in (s, t, weight, terms, slopes))
  m = np.logaddexp(s + np.log1p(-weight), t + np.log(weight))
  near = np.abs(t - s) <= 0.5
  below = np.where(near, np.log1p(weight * np.expm1(np.where(near, t - s, 0))), m - s)
  exact_slopes = -(1 - weight) * np.exp(s) * below
  exact = exact_slopes + weight * np.exp(t) * (t - s - below)
  tolerance = dict(rtol=1e-11, atol=1e-14) if dtype == np.float64 else dict(rtol=2e-6, atol=2e-7)
  np.testing.assert_allclose(slopes, exact_slopes, **tolerance)
  np.testing.assert_allclose(terms, exact, **tolerance)


@pytest.mark.parametrize('end', [0.0, 1.0])
def test_no_branch_of_alpha_that_is_not_taken_makes_a_gradient_nan(end):
  """Also where log-probs are −inf, and by whatever is differentiated: the terms themselves, the teacher, alpha."""
  s, t = jnp.array([-jnp.inf, -0.5, -1.0]), jnp.array([-0.7, -jnp.inf, -0.7])
  for function in (divergences.divergence, lambda *x: divergences.divergence_terms(*x).sum()):
    of_data = jax.jit(jax.value_and_grad(function, argnums=(0, 1, 2)))(s, t, end)
    of_number = jax.value_and_grad(function, argnums=(0, 1))(s, t, end)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(of_data))
    np.testing.assert_allclose(of_data[0], of_number[0], rtol=1e-6)
    np.testing.assert_allclose(of_data[1][0], of_number[1][0], rtol=1e-6, atol=1e-30)  # The smallest number or none.


@pytest.mark.parametrize('alpha', [0.0, 0.5, 1.0])
@pytest.mark.parametrize('where', ['student', 'teacher', 'both'])
def test_minus_infinity_stays_finite(alpha, where):
  rng = np.random.default_rng(1)
  s, t = log_probs(rng, 4).astype(np.float32), log_probs(rng, 4).astype(np.float32)
  if where != 'teacher':
    s[2] = -np.inf
  if where != 'student':
    t[2] = -np.inf
  value, slope = jax.value_and_grad(lambda s: divergences.divergence(s, jnp.asarray(t), alpha))(jnp.asarray(s))
  assert np.isfinite(value) and np.all(np.isfinite(slope))
  assert where == 'teacher' or slope[2] == 0
  floor = divergences.log_floor(jnp.float32)
  expected = numpy_divergence(np.maximum(s, floor).astype(np.float64), np.maximum(t, floor).astype(np.float64), alpha)
  np.testing.assert_allclose(value, expected, rtol=1e-5)


def test_tail_holds_the_rest_and_at_least_1e_7():
  with jax.enable_x64(True):
    tailed = divergences.with_tail(jnp.log(jnp.array([[0.5, 0.2], [0.6, 0.4]])))
    np.testing.assert_allclose(jnp.exp(tailed[0]), [0.5, 0.2, 0.3], rtol=1e-12)
    np.testing.assert_allclose(jnp.exp(tailed[1, 2]), -np.expm1(-1e-7), rtol=1e-9)
    # No gradient through a clamped tail.
    slope = jax.grad(lambda x: divergences.with_tail(x)[-1])(jnp.log(jnp.array([0.6, 0.4])))
    np.testing.assert_array_equal(slope, 0)
    np.testing.assert_allclose(
      jnp.exp(divergences.renormalised(jnp.log(jnp.array([0.5, 0.25])))), [2 / 3, 1 / 3], rtol=1e-12
    )


@pytest.mark.parametrize(
  'vocab,k',
  [
    (7, 7),
    (5003, 30),
    (4096, 32),
    pytest.param(5003, 40, marks=pytest.mark.slow),
    pytest.param(1000, 20, marks=pytest.mark.campaign),
    pytest.param(9000, 1, marks=pytest.mark.campaign),
  ],
)
@pytest.mark.parametrize('levels', [None, 5])
def test_top_k_is_exact_and_ranks_equal_entries_by_their_index(vocab, k, levels):
  """At once, in two stages, and gathered block by block without the logits; rows of −inf and of few values too."""
  rng = np.random.default_rng(0)
  logits = rng.standard_normal((5, vocab)).astype(np.float32)
  if levels:
    logits = np.round(logits * levels)
  logits[1, : vocab // 2] = -np.inf
  logits[2, k // 2 :] = -np.inf
  logits[3] = 1.0
  logits[4] = np.sort(logits[4])
  expected = np.argsort(-logits, axis=1, kind='stable')[:, :k]
  logits = jnp.asarray(logits)
  found = [top_k(logits, k)]
  if k * GROUP <= vocab:
    found.append(two_stage_top_k(logits, k))
  shard = VocabShard(vocab)

  def block_of(start, size):
    return jax.lax.dynamic_slice_in_dim(logits, start, size, axis=1)

  for block in (vocab, 64, 7):
    found.append(vocabulary.scan_vocabulary(shard, block_of, len(logits), vocab, block, jnp.float32, topk=k).largest)
  for values, ids in found:
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(np.asarray(logits), expected, axis=1))


@pytest.mark.parametrize('kept', [True, False])
def test_top_k_orders_a_small_part_of_a_large_vocabulary(kept):
  """The work of `lax.top_k` on a CPU depends on the order of what it is given."""
  tokens, vocab, k = 4, 150_016, 100

  def largest(logits):
    if kept:
      return top_k(logits, k)

    def block_of(start, size):
      return jax.lax.dynamic_slice_in_dim(logits, start, size, axis=1)

    return vocabulary.scan_vocabulary(VocabShard(vocab), block_of, tokens, vocab, 2048, jnp.float32, topk=k).largest

  lowered = jax.jit(largest).lower(jax.ShapeDtypeStruct((tokens, vocab), jnp.float32)).as_text()
  widths = [int(width) for width in re.findall(rf'top_k.*: tensor<{tokens}x(\d+)xf32> ->', lowered)]
  assert widths and max(widths) <= vocab // GROUP


def test_statistics_of_parts_merge_to_those_of_the_whole():
  rng = np.random.default_rng(0)
  logits = (5 * rng.standard_normal((4, 50))).astype(np.float32) + np.array([[0], [1e4], [-1e4], [0]], np.float32)
  logits[3, :40] = -np.inf
  parts = vocabulary.empty_statistics(4, jnp.float32)
  for part in np.split(logits, [3, 17, 41], axis=1):
    parts = vocabulary.merge_statistics(parts, vocabulary.block_statistics(jnp.asarray(part)))
  wide = logits.astype(np.float64)
  shifted = wide - wide.max(1, keepdims=True)
  normaliser = wide.max(1) + np.log(np.exp(shifted).sum(1))
  p = np.exp(wide - normaliser[:, None])
  entropy = -(p * np.where(p > 0, wide - normaliser[:, None], 0)).sum(1)
  np.testing.assert_allclose(parts.log_normaliser, normaliser, rtol=1e-6)
  np.testing.assert_allclose(parts.entropy, entropy, rtol=1e-4, atol=1e-5)
  empty = vocabulary.block_statistics(jnp.full((2, 3), -jnp.inf))
  assert np.all(np.isfinite(empty.log_normaliser)) and np.all(empty.entropy == 0)


def numpy_aggregate(loss, mask, mode, scale):
  """Return the definition, group by group, as a loop."""
  tokens = mask.sum(1)
  if mode == 'token-mean':
    return (loss * mask).sum() / max(mask.sum(), 1)
  if mode == 'seq-mean-token-sum-norm':
    return (loss * mask).sum() / scale
  rows = [i for i in range(len(mask)) if tokens[i] > 0]
  sums = [(loss[i] * mask[i]).sum() / (tokens[i] + 1e-8 if mode == 'seq-mean-token-mean' else 1) for i in rows]
  return sum(sums) / max(len(rows), 1)


@settings(max_examples=25, deadline=None)
@given(seeds, st.sampled_from(AGGREGATIONS), st.sampled_from([None, 1, 2, 3, 6]))
def test_aggregation_is_the_mean_over_groups_of_the_definition(seed, mode, group_size):
  rng = np.random.default_rng(seed)
  mask = (rng.random((6, 5)) < 0.6) * (rng.random((6, 1)) < 0.7) * 1.0
  loss = rng.standard_normal((6, 5))
  size = group_size or 6
  expected = np.mean([numpy_aggregate(loss[i : i + size], mask[i : i + size], mode, 9.0) for i in range(0, 6, size)])
  ours = loss_coefficients(mask, mode, group_size=group_size, scale=9.0)
  assert ours.dtype == np.float64 and isinstance(ours, np.ndarray)
  np.testing.assert_allclose((ours * loss).sum(), expected, rtol=1e-12, atol=1e-15)
  assert np.all(ours[mask == 0] == 0)
  on_device = loss_coefficients(jnp.asarray(mask, jnp.float32), mode, group_size=group_size, scale=9.0)
  np.testing.assert_allclose(on_device, ours, rtol=2e-6)


def test_aggregation_of_nothing_is_zero_and_errors_name_the_setting():
  for mode in AGGREGATIONS:
    np.testing.assert_array_equal(loss_coefficients(np.zeros((2, 3), np.float32), mode, group_size=1), 0)
  with pytest.raises(ValueError, match='loss_agg_mode'):
    loss_coefficients(np.ones((2, 3)), 'mean')
  with pytest.raises(ValueError, match='loss_group_size=4'):
    loss_coefficients(np.ones((6, 3)), 'token-mean', group_size=4)


def test_masked_sequences_count_with_a_group_size_of_one():
  """(1/N) Σ_i m_i·mean_t ℓ_it over all N sequences: the paper's effective objective."""
  mask = np.array([[1, 1, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0]], np.float64)
  np.testing.assert_allclose(
    loss_coefficients(mask, 'token-mean', group_size=1), mask * np.array([[1 / 8], [0], [1 / 4], [0]])
  )


@settings(max_examples=15, deadline=None)
@given(seeds, st.booleans())
def test_advantages(seed, norm_by_std):
  rng = np.random.default_rng(seed)
  group = rng.permutation([0, 0, 0, 1, 1, 7, 2, 2, 2, 2])
  scores = rng.standard_normal(10)
  expected = np.empty(10)
  for i in range(10):
    members = scores[group == group[i]]
    centre, spread = (members.mean(), members.std(ddof=1)) if len(members) > 1 else (0.0, 1.0)
    expected[i] = (scores[i] - centre) / (spread + 1e-6) if norm_by_std else scores[i] - centre
  np.testing.assert_allclose(grpo_advantages(scores, group, norm_by_std), expected, rtol=1e-10)
  on_device = grpo_advantages(jnp.asarray(scores, jnp.float32), jnp.asarray(group), norm_by_std)
  np.testing.assert_allclose(on_device, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize('score', [1.0, 0.6, 0.1, -1 / 3, 1e-30, 999.9])
@pytest.mark.parametrize('norm_by_std', [False, True])
def test_equal_scores_have_exactly_no_advantage(norm_by_std, score):
  """Also those whose sum is rounded, and beside a group that has a signal; on the host and in a compiled program."""
  group = np.array([0] * 6 + [1] * 7 + [2] * 2)
  scores = np.array([score] * 13 + [0.0, 1.0], np.float32)
  compiled = jax.jit(functools.partial(grpo_advantages, norm_by_std=norm_by_std))
  for advantages in (grpo_advantages(scores, group, norm_by_std), compiled(jnp.asarray(scores), jnp.asarray(group))):
    assert advantages.dtype == np.float32
    np.testing.assert_array_equal(advantages[:13], 0)
    np.testing.assert_allclose(advantages[13:], [-(0.5**0.5), 0.5**0.5] if norm_by_std else [-0.5, 0.5], rtol=1e-5)


def test_an_offset_that_all_scores_share_costs_no_digits():
  """997.1 and 997.2 differ by the multiple of 2^-14 that float32 makes of them; half of it either way is exact."""
  scores = np.array([997.1, 997.2] * 3, np.float32)
  half = (float(scores[1]) - float(scores[0])) / 2
  for advantages in (
    grpo_advantages(scores, np.zeros(6, int)),
    grpo_advantages(jnp.asarray(scores), jnp.zeros(6, int)),
  ):
    np.testing.assert_array_equal(advantages, np.array([-half, half] * 3, np.float32))


@pytest.mark.parametrize('norm_by_std', [False, True])
def test_an_ungraded_sample_is_as_if_it_were_not_there(norm_by_std):
  group = np.array([0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 4])
  scores = np.array([1, 0, 1, 0.25, 1, 1, 0.5, 1, np.nan, 0.75, np.nan])
  graded = np.array([1, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0], bool)
  expected = np.zeros(11)
  rest = np.array([0, 1, 3])  # Of question 0; of 1 and 2 a single sample is left, 3 has but one, 4 none with a score.
  expected[rest] = grpo_advantages(scores[rest], group[rest], norm_by_std)
  expected[9] = 0.75 / (1 + 1e-6) if norm_by_std else 0.75
  np.testing.assert_array_equal(grpo_advantages(scores, group, norm_by_std, graded=graded), expected)
  traced = jax.jit(lambda *values: grpo_advantages(values[0], values[1], norm_by_std, graded=values[2]))
  np.testing.assert_allclose(traced(scores.astype(np.float32), group, graded), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize('advantage', [1.5, -1.5])
@pytest.mark.parametrize('ratio', [0.1, 0.79, 0.81, 1.0, 1.27, 1.29, 2.9, 3.1])
def test_dual_clip_by_cases(advantage, ratio):
  """Slope −A·r where nothing clips, 0 where the clip or the dual clip is active."""

  def value(x):
    return dual_clip_ppo(x, jnp.zeros(()), jnp.asarray(advantage), 0.2, 0.28, 3.0)

  (loss, metrics), slope = jax.value_and_grad(value, has_aux=True)(jnp.log(jnp.asarray(ratio)))
  if advantage > 0:
    clipped, lower = ratio > 1.28, False
    expected = -advantage * min(ratio, 1.28)
  else:
    clipped, lower = ratio < 0.8, ratio > 3.0
    expected = -advantage * min(max(ratio, 0.8), 3.0)
  np.testing.assert_allclose(loss, expected, rtol=1e-5)
  np.testing.assert_allclose(slope, 0 if clipped or lower else -advantage * ratio, rtol=1e-5)
  assert (bool(metrics['clipped']), bool(metrics['clipped_lower'])) == (clipped, lower)
  np.testing.assert_allclose(metrics['ratio'], ratio, rtol=1e-6)


def test_kl_estimates():
  rng = np.random.default_rng(0)
  x, y = rng.standard_normal((2, 7)).astype(np.float32)
  d = (x - y).astype(np.float64)
  for kind, expected in (('k1', d), ('abs', abs(d)), ('k2', d**2 / 2), ('k3', np.exp(-d) + d - 1)):
    np.testing.assert_allclose(kl_penalty(jnp.asarray(x), jnp.asarray(y), kind), expected, rtol=1e-4, atol=1e-6)
  with pytest.raises(ValueError, match='k9'):
    kl_penalty(x, y, 'k9')


@pytest.mark.parametrize('kind, meaning', [('k1', None), ('k2', 'reverse'), ('k3', 'forward')])
def test_the_gradient_of_a_kl_estimate_is_not_always_that_of_what_it_estimates(kind, meaning):
  """Its mean over tokens drawn from π, by hand in float64: none, of KL(π‖initial), of KL(initial‖π)."""
  rng = np.random.default_rng(0)
  logits, others = rng.standard_normal((2, 9)) * 0.5
  policy, initial = (np.exp(z) / np.exp(z).sum() for z in (logits, others))
  gap = np.log(policy) - np.log(initial)
  with jax.enable_x64(True):
    slopes = jax.vmap(jax.grad(lambda a, b: kl_penalty(a, b, kind)))(jnp.log(policy), jnp.log(initial))
  slopes = np.asarray(slopes)
  np.testing.assert_allclose(slopes, {'k1': 1 + 0 * gap, 'k2': gap, 'k3': 1 - np.exp(-gap)}[kind], rtol=1e-12)
  # By the logits: log π_v has the slopes 1[v = u] − π_u.
  mean = policy * slopes - policy * (policy * slopes).sum()
  expected = {
    None: 0 * policy,
    'reverse': policy * (gap - (policy * gap).sum()),
    'forward': policy - initial,
  }[meaning]
  np.testing.assert_allclose(mean, expected, atol=1e-15)


def test_importance_ratio_has_an_upper_clip_only_and_no_gradient():
  new, old = jnp.array([-1.0, -1.0, -1.0, -50.0, -1.0]), jnp.array([-1.0, -3.0, -1.5, -1.0, -90.0])
  scalars = ObjectiveConfig(is_clip=2.0).term_scalars.of_type(jnp.float32)
  ratio, metrics = clipped_ratio(ObjectiveConfig(is_clip=2.0).term_settings, scalars, new, old)
  np.testing.assert_allclose(ratio, [1, 2, np.exp(0.5), np.exp(-20), 2], rtol=1e-6)
  np.testing.assert_array_equal(metrics['ratio_clipped'], [0, 1, 0, 0, 1])
  np.testing.assert_allclose(importance_ratio(new, old)[4], np.exp(20), rtol=1e-6)
  assert not np.any(jax.grad(lambda x: importance_ratio(x, old).sum())(new))


@pytest.mark.parametrize('level', ['token', 'sequence'])
def test_rollout_weights(level):
  rng = np.random.default_rng(0)
  old, rollout = -rng.random((2, 4, 5)) * 3
  mask = np.ones((4, 5)) * (np.arange(5)[None] < np.array([[5], [3], [0], [1]]))
  rollout[mask == 0] = np.nan  # Padding may hold anything.
  ratio = np.where(mask > 0, old - np.nan_to_num(rollout), 0)
  if level == 'sequence':
    ratio = np.repeat(ratio.sum(1, keepdims=True), 5, 1)
  expected = np.minimum(np.exp(ratio) * mask, 2.0)
  weights, metrics = rollout_is_weights(old, rollout, mask, 2.0, level=level)
  np.testing.assert_allclose(weights, expected, rtol=1e-12)
  assert all(np.isfinite(value) for value in metrics.values())
  normalised, metrics = rollout_is_weights(old, rollout, mask, 2.0, True, level=level)
  np.testing.assert_allclose(normalised * metrics['rollout_corr/rollout_is_batch_norm_factor'], expected, rtol=1e-12)
  if level == 'token':
    np.testing.assert_allclose(normalised.sum() / mask.sum(), 1, rtol=1e-6)
  _, nothing = rollout_is_weights(old, rollout, mask * 0, 2.0, True, level=level)
  assert all(np.isfinite(value) for value in nothing.values())


def test_mismatch_of_sampler_and_trainer():
  rng = np.random.default_rng(3)
  trainer, noise = -rng.random((3, 6)), rng.normal(0, 0.1, (3, 6))
  mask = rng.random((3, 6)) < 0.7
  sampler = np.where(mask, trainer + noise, np.nan)  # Padding may hold anything.
  metrics = mismatch(trainer, sampler, mask)
  assert metrics['rollout_corr/log_prob_difference_mean'] == pytest.approx(np.abs(noise[mask]).mean())
  assert metrics['rollout_corr/log_prob_difference_max'] == pytest.approx(np.abs(noise[mask]).max())
  centred = [values[mask] - values[mask].mean() for values in (trainer, sampler)]
  pearson = (centred[0] * centred[1]).sum() / np.sqrt((centred[0] ** 2).sum() * (centred[1] ** 2).sum())
  assert metrics['rollout_corr/log_prob_correlation'] == pytest.approx(pearson)
  trainer[0] = np.nan  # Rows that were not trained.
  mean = np.abs(noise[1:][mask[1:]]).mean()
  assert mismatch(trainer, sampler, mask)['rollout_corr/log_prob_difference_mean'] == pytest.approx(mean)
  assert 'rollout_corr/log_prob_correlation' not in mismatch(trainer, np.zeros((3, 6)), mask)
  assert mismatch(trainer, sampler, np.zeros((3, 6))) == {}
