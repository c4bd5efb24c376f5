"""Guards decide over numbers: each can be turned off, and what is not a number is never let through."""

import math
import types

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from sdpo_jax.config import GuardsConfig
from sdpo_jax.files import jsonable
from sdpo_jax.learning.losses import Sdpo
from sdpo_jax.serving import guards
from sdpo_jax.serving.errors import InvalidRequest
from sdpo_jax.serving.feedback import loss_said, recent_losses
from sdpo_jax.serving.guards import Guards, Measured
from sdpo_jax.serving.records import AdapterRecord, Version

GOOD = Measured(finite=True, loss_ratio=1.0, kl_to_base=0.1, entropy=1.0, self_similarity=0.2, rejected_rise=-0.1)
LIMITS = Guards(max_kl_to_base=0.5, min_entropy=0.3, max_loss_ratio=4.0, max_self_similarity=0.8, max_rejected_rise=0.0)
VALUE_OF = {
  'max_kl_to_base': 'kl_to_base',
  'min_entropy': 'entropy',
  'max_loss_ratio': 'loss_ratio',
  'max_self_similarity': 'self_similarity',
  'max_rejected_rise': 'rejected_rise',
}


def failed(limits, **measured):
  return [each.guard for each in guards.check(limits, Measured(**{**vars(GOOD), **measured})) if not each.passed]


@pytest.mark.parametrize(
  ('guard', 'value'),
  [(name, getattr(LIMITS, name) + (-0.1 if name == 'min_entropy' else 0.1)) for name in VALUE_OF],
)
def test_each_guard_rejects_alone_and_can_be_turned_off(guard, value):
  assert failed(LIMITS) == []
  assert failed(LIMITS, **{VALUE_OF[guard]: value}) == [guard]
  assert failed(LIMITS, **{VALUE_OF[guard]: math.nan}) == [guard]
  # The limit itself is kept; without a limit, or without a value, nothing is rejected.
  assert failed(LIMITS, **{VALUE_OF[guard]: getattr(LIMITS, guard)}) == []
  assert failed(Guards(**{**vars(LIMITS), guard: None}), **{VALUE_OF[guard]: value}) == []
  assert failed(LIMITS, **{VALUE_OF[guard]: None}) == []
  [said] = [each for each in guards.check(LIMITS, Measured(True, **{VALUE_OF[guard]: value})) if not each.passed]
  assert guard in said.reason and f'{value:.4g}' in said.reason and said.value == value


def test_what_is_not_finite_is_always_rejected():
  assert failed(Guards(), finite=False) == ['finite']


def test_the_request_goes_before_the_adapter_and_that_before_the_service():
  found = Guards.of(GuardsConfig(), {'min_entropy': 0.5, 'max_kl_to_base': 1}, None, {'max_kl_to_base': None})
  assert (found.min_entropy, found.max_kl_to_base) == (0.5, None)
  assert found.max_loss_ratio == GuardsConfig().max_loss_ratio
  for wrong in (
    {'max_kl': 1},
    {'min_entropy': -1},
    {'min_entropy': math.nan},
    {'min_entropy': True},
    {'min_entropy': '1'},
  ):
    with pytest.raises(InvalidRequest, match=next(iter(wrong))):
      Guards.of(GuardsConfig(), wrong)


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 12))
def test_the_divergence_over_a_few_tokens_is_the_formula_and_a_lower_bound(seed, k):
  draw = np.random.default_rng(seed)
  p, q = draw.dirichlet(np.full(12, 0.5), size=(2, 3)) + 1e-9
  p, q = (each / each.sum(-1, keepdims=True) for each in (p, q))
  ids = np.argsort(-q, axis=-1)[:, :k]
  found = guards.kl_over_support(*(np.log(np.take_along_axis(each, ids, 1)) for each in (q, p)))
  whole = (p * np.log(p / q)).sum(-1)
  kept = [np.take_along_axis(each, ids, 1) for each in (p, q)]
  tails = [np.maximum(1 - each.sum(-1), 1e-12) for each in kept]
  expected = (kept[0] * np.log(kept[0] / kept[1])).sum(-1) + tails[0] * np.log(tails[0] / tails[1])
  # What is left is a difference of numbers near 1: at 1e-9 it is known to 1e-7 of itself, and so is its logarithm.
  np.testing.assert_allclose(found, np.maximum(expected, 0), atol=1e-6)
  assert (found <= whole + 1e-6).all()
  assert (guards.kl_over_support(*(np.log(kept[0]),) * 2) == 0).all()


def test_entries_that_name_no_token_do_not_count():
  q, p = np.log([[0.5, 0.25, 0.25]]), np.log([[0.25, 0.5, 0.25]])
  more = (np.append(each, [[fill]], 1) for each, fill in ((q, -np.inf), (p, 0.0)))
  np.testing.assert_allclose(guards.kl_over_support(*more), guards.kl_over_support(q, p))


def test_completions_that_are_alike_are_seen():
  assert guards.self_similarity([[1, 2, 3, 4]] * 3) == 1.0
  assert guards.self_similarity([[1, 2, 3, 4], [5, 6, 7, 8]]) == 0.0
  assert guards.self_similarity([[1, 2, 3, 4], [0, 1, 2, 3]]) == 0.5
  assert guards.self_similarity([[1], [1]]) == 1.0 and guards.self_similarity([[1], [2]]) == 0.0
  assert guards.self_similarity([[9] * 8, [9] * 4]) == pytest.approx(2 * 2 / 8)
  assert guards.self_similarity([[1, 2]]) is None


def test_a_loss_is_compared_with_the_median_of_enough_others():
  assert guards.loss_ratio(3.0, [1.0] * (guards.LEAST_RECENT - 1)) is None
  assert guards.loss_ratio(-3.0, [1.0, -1.0, 1.0, 100.0]) == 3.0
  assert guards.loss_ratio(0.5, [1e-3] * 16) == 5.0  # A new question to whom has learned all earlier ones.


def test_only_losses_with_the_same_parameters_are_compared():
  """A KL is many times the Jensen-Shannon divergence of the same two distributions."""
  jsd, kl = Sdpo(alpha=0.5, is_clip=None), Sdpo(alpha=0.0, is_clip=None)
  versions = [
    Version('a', number, number - 1, reason, 0.0, '', {'loss': jsonable(loss_said(loss)), 'steps': steps})
    for number, (reason, loss, steps) in enumerate(
      [
        ('feedback', jsd, [{'loss': 0.1}, {'loss': 7.0}]),
        ('feedback', kl, [{'loss': 2.0}]),
        ('undo', jsd, []),
        ('feedback', jsd, [{'loss': None}]),
        ('feedback', jsd, [{'loss': 0.2}]),
      ]
    )
  ]
  store = types.SimpleNamespace(versions=lambda owner, id, after: versions[max(0, after + 1) :])
  adapter = AdapterRecord('a', 'ada', 'mine', len(versions) - 1, 0.0, {})
  assert recent_losses(store, adapter, loss_said(jsd)) == [0.1, 0.2]
  assert recent_losses(store, adapter, loss_said(kl)) == [2.0]
