"""Qwen3-8B as the TPU compiler sees it, with the shipped configs: all parameters on v5e:8x8, an adapter on v5e:2x4."""

import sys

import pytest

from benchmarks import tpu_plan
from sdpo_jax.planner import model, topology
from sdpo_jax.planner import plan as planning

pytestmark = [pytest.mark.campaign, pytest.mark.tpu_compiler]


def planned(*labels, name=tpu_plan.MAIN):
  point = next(point for point in tpu_plan.EVERY if point.name == name)
  config, slice_ = tpu_plan.configuration(point), topology.describe(point.slice_)
  policy, _ = model.read(config)
  assumptions = planning.Assumptions.of(config, slice_.chip)

  def announce(text):
    return print(text, file=sys.stderr)

  return planning.make(config, policy, slice_, assumptions, only=labels, announce=announce)


def test_the_update_fits_and_grows_no_slower():
  """64 rows of 2048 + 8192 student and 10240 + 8192 teacher tokens."""
  update = planned('update').programs['update']
  print({'GiB': update.hbm, 'seconds': update.seconds_by_source, 'kernels': update.kernel_seconds})
  assert update.error is None
  assert update.hbm_gib < 11
  assert not update.unbounded
  assert update.seconds <= 9.6


def test_decoding_256_rows_of_10240_tokens_copies_no_cache():
  decode = planned('prepare', 'prefill', 'decode').programs['decode']
  print({'GiB': decode.hbm, 'seconds': decode.seconds_by_source, 'copies': decode.copies})
  assert decode.error is None
  program = sum(decode.hbm.get(part, 0.0) for part in ('sampling weights', 'cache', 'batch', 'temporaries', 'padding'))
  assert program <= 8
  # Half a GiB is less than a ninth of the cache.
  assert all(copy['gib'] < 0.5 for copy in decode.copies)


def test_an_adapter_trains_on_eight_chips_with_one_copy_of_the_model():
  """8 rows as above; 32 of 10240 tokens decoded at once."""
  plan = planned('update', 'prepare', 'prefill', 'decode', name='Qwen3-8B with LoRA')
  update, decode = plan.programs['update'], plan.programs['decode']
  print({'update': update.hbm, 'decode': decode.hbm, 'seconds': update.seconds_by_source})
  assert plan.fits and update.hbm_gib <= 12 and decode.hbm_gib <= 12
  # 8.19 billion parameters of two bytes on eight chips, and nothing again for the sampler.
  assert plan.base_gib == pytest.approx(8.19e9 * 2 / 8 / 2**30, rel=0.01) and plan.sampling_base_gib == 0
  # No gradient of a frozen matrix: with each a student's token takes three products (forward, again for the backward
  # pass, and the gradient of what went in), a teacher's one. Of 6.95 billion parameters in the layers, 1.81 billion are
  # in the last product of a layer, whose result the backward pass does not need; of 0.62 billion in the unembedding the
  # student's logits are kept. The factors' own products are less than a hundredth.
  layers, last, head = 6.95e9, 1.81e9, 0.62e9
  student, teacher, completion = 2048 + 8192, 10240 + 8192, 8192
  products = (3 * layers - last) * student + layers * teacher + 3 * head * completion
  assert update.matmul_tflop == pytest.approx(2 * products / 1e12, rel=0.015)
  # The weights of a layer are gathered three times: for the teacher, for the student, and for the student's backward
  # pass. What the factors add does not weigh beside that, and the rest are the completions' states for the vocabulary's
  # shards.
  gathered = sum(size for kind, size in update.collective_gb.items() if kind.startswith('all-gather'))
  assert gathered == pytest.approx(3 * 2 * layers * 7 / 8 / 1e9, rel=0.15)
  assert sum(size for kind, size in update.collective_gb.items() if kind.startswith('collective-permute')) < 0.1
  assert update.seconds <= 9
