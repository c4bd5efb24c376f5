"""What processes tell each other: everything arrives whole, and in arrays of one shape, for which nothing new is
compiled.
"""

import pickle

import jax
import numpy as np

from sdpo_jax.distributed import collectives


def test_what_is_gathered_is_sent_in_parts_of_one_size(monkeypatch):
  rng = np.random.default_rng(0)
  mine = [{'scores': rng.random(size), 'text': 'x' * size} for size in (3, 20_000, 1)]
  other = {'a': 'y' * 150_000}
  sent, waiting = [], []

  def process_allgather(values):
    if values.dtype == np.int32:
      content = np.frombuffer(pickle.dumps(other), np.uint8)
      longest = max(len(content), int(values[0]))
      padded = np.zeros(-(-longest // collectives.PART) * collectives.PART, np.uint8)
      padded[: len(content)] = content
      waiting.extend(padded.reshape(-1, collectives.PART))
      return np.array([values, [len(content)]])
    sent.append(values.shape)
    return np.stack([values, waiting.pop(0)])

  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  monkeypatch.setattr(collectives, 'barrier', lambda what: None)
  monkeypatch.setattr(collectives.multihost_utils, 'process_allgather', process_allgather)
  for value in mine:
    found = collectives.gathered(value, 'the end of a test')
    np.testing.assert_equal(found, [value, other])
  assert set(sent) == {(collectives.PART,)} and len(sent) > 3
