"""What versions cost in storage, by the formula: 4 bytes of factors per parameter, and twice as many of moments."""

from benchmarks import storage


def test_bytes_are_those_of_the_formula():
  whole, default = storage.feedbacks(None, 20)
  # Headers and manifests are small; the first version is a seed, and the newest has moments.
  assert 0 < whole['stored_per_parameter'] - (20 * 4 + 8) / 20 < 0.1
  assert 0 < default['stored_per_parameter'] - (17 * 4 + 8) / 20 < 0.1
  for each in (whole, default):
    assert 0 < each['written_per_parameter'] - 12 < 0.1
  assert 0 < default['idle_per_parameter'] - 4 < 0.1 and default['idle_1000_gib'] < 200
