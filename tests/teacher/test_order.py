"""The balanced order: a permutation in zig-zag partitions, nearly equal in cost, as the reference lays them out."""

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from sdpo_jax.teacher.order import balanced_order, workload


def test_one_partition_goes_short_long_short():
  assert balanced_order([50, 10, 40, 20, 30, 60]).tolist() == [1, 4, 0, 5, 2, 3]


def test_equal_lengths_keep_their_order_within_the_zig_zag():
  assert balanced_order([7, 7, 7, 7, 7]).tolist() == [0, 2, 4, 3, 1]


def test_workload_is_linear_plus_quadratic():
  assert workload([0, 1, 1000]) == [0, 24577, 25576000]


def test_two_partitions_by_hand():
  # Nodes {0: 1, 1: 2} and {2: 3, 3: 100} (lengths); the wider is taken first and the other joined crosswise:
  # {3, 0} and {2, 1}; heavier set first.
  assert balanced_order([1, 2, 3, 100], partitions=2).tolist() == [0, 3, 1, 2]


@settings(max_examples=60, deadline=None)
@given(
  lengths=st.lists(st.integers(1, 9000), min_size=1, max_size=12),
  partitions=st.sampled_from([1, 2, 3, 4]),
  data=st.data(),
)
def test_partitions_are_a_permutation_each_a_zig_zag(lengths, partitions, data):
  lengths = (lengths * partitions)[: len(lengths) * partitions]
  lengths = data.draw(st.permutations(lengths))
  order = balanced_order(lengths, partitions)
  assert sorted(order.tolist()) == list(range(len(lengths)))
  for part in np.split(order, partitions):
    values = np.array(lengths)[part]
    rise = values[: (len(values) + 1) // 2]
    fall = values[(len(values) + 1) // 2 :]
    assert (np.diff(rise) >= 0).all() and (np.diff(fall) <= 0).all()


def test_partitions_of_many_sequences_cost_nearly_the_same():
  lengths = np.random.default_rng(0).lognormal(6, 0.6, 256).astype(int) + 1
  costs = [sum(workload(lengths[part])) for part in np.split(balanced_order(lengths, 4), 4)]
  assert max(costs) / min(costs) < 1.03


def test_the_first_success_of_a_group_is_shorter_than_the_mean_success():
  # Why the reference's demonstrations are length-biased on one rank.
  rng = np.random.default_rng(1)
  ratios = []
  for _ in range(20):
    lengths, success = rng.lognormal(6, 0.6, 256).astype(int) + 1, rng.random(256) < 0.6
    order = balanced_order(lengths)
    for group in range(32):
      rows = [r for r in order if r // 8 == group and success[r]]
      if rows:
        ratios.append(lengths[rows[0]] / lengths[rows].mean())
  assert 0.6 < np.mean(ratios) < 0.95


def test_sets_must_be_of_equal_size():
  with pytest.raises(ValueError, match='equal size'):
    balanced_order([1, 2, 3], partitions=2)
