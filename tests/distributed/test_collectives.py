"""What processes tell each other: everything arrives whole, and in arrays of one shape, for which nothing new is
compiled.
"""

import pickle

import jax
import numpy as np
import pytest

from sdpo_jax.distributed import collectives
from sdpo_jax.distributed.stopping import StoppedError
from sdpo_jax.errors import UserError


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


def test_divided_work_is_done_once_and_known_everywhere(monkeypatch):
  monkeypatch.setattr(jax, 'process_count', lambda: 3)
  done = {}

  def work(share):
    done[jax.process_index()] = [number**2 for number in share]
    return done[jax.process_index()]

  monkeypatch.setattr(collectives, 'gathered', lambda own, what: [own, own, own])
  for process in range(3):
    monkeypatch.setattr(jax, 'process_index', lambda process=process: process)
    with pytest.raises(ValueError):  # The shares have different sizes.
      collectives.divided(range(7), work, 'the end of a test')
  assert done == {0: [0, 9, 36], 1: [1, 16], 2: [4, 25]}
  monkeypatch.setattr(collectives, 'gathered', lambda own, what: [done[process] for process in range(3)])
  assert collectives.divided(range(7), work, 'the end of a test') == [number**2 for number in range(7)]


@pytest.mark.parametrize('error', [UserError('No.'), StoppedError()], ids=['user', 'stopped'])
def test_an_error_in_one_share_ends_the_work_of_all(monkeypatch, error):
  def fail(share):
    raise error

  with pytest.raises(type(error)):
    collectives.divided(range(3), fail, 'the end of a test')
  told = []
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  monkeypatch.setattr(collectives, 'gathered', lambda own, what: told.append(own) or [own, [1]])
  with pytest.raises(type(error)):
    collectives.divided(range(3), fail, 'the end of a test')
  assert told == [error]
