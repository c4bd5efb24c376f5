"""Qwen3-8B, fully fine-tuned with the shipped config, on v5e:8x8 as the TPU compiler sees it: it fits, and stays as fast."""

import sys

import pytest

from benchmarks import tpu_plan
from sdpo_jax.planner import model, topology
from sdpo_jax.planner import plan as planning

pytestmark = [pytest.mark.slow, pytest.mark.tpu_compiler]


def planned(*labels):
  point = next(point for point in tpu_plan.POINTS if point.name == tpu_plan.MAIN)
  config, slice_ = tpu_plan.configuration(point), topology.describe(point.slice_)
  policy, _ = model.read(config)
  assumptions = planning.Assumptions.of(config, slice_.chip)

  def announce(text):
    return print(text, file=sys.stderr)

  return planning.make(config, policy, slice_, assumptions, only=labels, announce=announce).programs


def test_the_update_fits_and_grows_no_slower():
  """64 rows of 2048 + 8192 student and 10240 + 8192 teacher tokens."""
  update = planned('update')['update']
  print({'GiB': update.hbm, 'seconds': update.seconds_by_source, 'kernels': update.kernel_seconds})
  assert update.error is None
  assert update.hbm_gib < 11
  assert not update.unbounded
  assert update.seconds <= 9.5


def test_decoding_256_rows_of_10240_tokens_copies_no_cache():
  decode = planned('prepare', 'prefill', 'decode')['decode']
  print({'GiB': decode.hbm, 'seconds': decode.seconds_by_source, 'copies': decode.copies})
  assert decode.error is None
  program = sum(decode.hbm.get(part, 0.0) for part in ('sampling weights', 'cache', 'batch', 'temporaries', 'padding'))
  assert program <= 8
  # Half a GiB is less than a ninth of the cache.
  assert all(copy['gib'] < 0.5 for copy in decode.copies)
