"""What a policy says of long rows, whatever is computed at one time."""

import jax
import numpy as np

from sdpo_jax.config import ModelConfig
from sdpo_jax.learning.scoring import CompiledSizes, Scorer
from sdpo_jax.models import huggingface, parameters
from tests.letters import CONFIG

LENGTH, TOPK = 3000, 16


def test_a_long_row_in_one_chunk_and_in_three_is_the_same():
  policy = huggingface.describe(CONFIG, ModelConfig(dtype='float32')).on(None)
  values = parameters.initialise(policy.parameter_table(), jax.random.key(1), 0.3)
  draw = np.random.default_rng(2)
  row = [1, 2, 3], draw.integers(1, policy.vocab_size, LENGTH).tolist()
  ids = draw.integers(0, policy.vocab_size, (LENGTH, 5)).astype(np.int32)

  def said(chunk_size):
    sizes = CompiledSizes(topk=TOPK, rows=1, chunk_size=chunk_size)
    scorer = Scorer(policy, values, sizes, prompt_buckets=(8,), response_buckets=(LENGTH,))
    return scorer.score({}, [row], ids=[ids])[0]

  whole, parts = said(LENGTH), said(LENGTH // 3)
  assert np.ptp(whole.log_probs) > 1 and whole.top_ids.shape == (LENGTH, TOPK)
  np.testing.assert_array_equal(parts.top_ids, whole.top_ids)
  for name in ('log_probs', 'entropy', 'top_log_probs', 'of_ids'):
    np.testing.assert_allclose(getattr(parts, name), getattr(whole, name), atol=1e-6, rtol=0)
