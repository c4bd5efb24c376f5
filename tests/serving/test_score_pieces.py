"""Long texts in pieces: each fits, and together they score what was asked, as if it had been one text."""

from hypothesis import given
from hypothesis import strategies as st
import numpy as np

from sdpo_jax.learning.scoring import Scored
from sdpo_jax.serving import score_pieces
from sdpo_jax.serving.engine import EngineSettings

lengths = st.integers(1, 40)


def scored_by_hand(row, ids):
  """Return scores that depend on every token up to the scored one, and on its further ids."""
  prompt, tokens = row
  before = [hash(tuple([*prompt, *tokens[: place + 1]])) % 1000 for place in range(len(tokens))]
  numbers = np.float32(before)
  of_ids = None if ids is None else numbers[:, None] + ids
  return Scored(numbers, -numbers, np.int32(before)[:, None], numbers[:, None] / 2, of_ids)


@given(lengths, lengths, lengths, st.integers(1, 30), st.lists(lengths, max_size=1), st.booleans())
def test_pieces_fit_and_say_what_the_whole_says(prompt, count, teacher, response, score, with_ids):
  sizes = EngineSettings((8,), (teacher,), (response,), tuple(score))
  tokens = np.random.default_rng(0).integers(100, size=prompt + count).tolist()
  row = tokens[:prompt], tokens[prompt:]
  ids = np.arange(2 * count, dtype=np.int32).reshape(count, 2) if with_ids else None
  parts = score_pieces.split(row, ids, sizes)

  def fits(prompt, tokens):
    return (len(prompt) <= teacher and len(tokens) <= response) or len(prompt) + len(tokens) <= max(
      score, default=0
    ) + 1

  if prompt + count > score_pieces.longest(sizes):
    assert not fits(*row) and len(parts) == 1
    return
  assert all(fits(*own) and len(own[0]) and len(own[1]) for own, _ in parts)
  assert len(parts) == 1 or not fits(*row)
  found = score_pieces.joined([scored_by_hand(*part) for part in parts], count)
  expected = scored_by_hand(row, ids)
  for name in ('log_probs', 'entropy', 'top_ids', 'top_log_probs') + ('of_ids',) * with_ids:
    np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
