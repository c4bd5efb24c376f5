"""Exchange of values between the processes of a run, on the host; a run of one process exchanges nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import pickle
from typing import Any

import jax
from jax.experimental import multihost_utils
import numpy as np

from sdpo_jax.distributed import cluster
from sdpo_jax.distributed.cluster import barrier
from sdpo_jax.distributed.stopping import StoppedError
from sdpo_jax.errors import UserError

PART = 2**16  # Bytes that each process sends at once.


def agreed(value: int) -> int:
  """Return process 0's value on every process."""
  return value if jax.process_count() == 1 else int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def noted(note: str, what: str) -> dict[int, str]:
  """Return the non-empty notes of all processes, by process; uses devices only if `cluster` has not joined the run.

  Args:
    note: note of this process.
    what: name of the point in the run, as in `gathered`.
  """
  if jax.process_count() == 1 or cluster.joined():
    return cluster.exchange_notes(what, note)
  return {process: text for process, text in enumerate(gathered(note, what)) if text}


def gathered(value: Any, what: str) -> list[Any]:
  """Return the values of all processes in order, on every process.

  Args:
    value: any value that can be pickled.
    what: name of the point in the run, for messages such as 'process 3 did not reach the end of grading'.
  """
  if jax.process_count() == 1:
    return [value]
  barrier(what)
  content = np.frombuffer(pickle.dumps(value), np.uint8)
  sizes = multihost_utils.process_allgather(np.array([len(content)], np.int32)).ravel()
  # In parts of equal size: every other size would be one more program to compile.
  parts = -(-int(sizes.max()) // PART)
  padded = np.zeros((parts, PART), np.uint8)
  padded.reshape(-1)[: len(content)] = content
  everything = np.concatenate(
    [multihost_utils.process_allgather(part).reshape(len(sizes), -1) for part in padded], axis=1
  )
  return [pickle.loads(row[:size].tobytes()) for row, size in zip(everything, sizes, strict=True)]


def divided(numbers: Sequence[int], work: Callable[[Sequence[int]], Sequence[Any]], what: str) -> list[Any]:
  """Divide work on numbered items among the processes, and return all results, in order, on every process.

  Args:
    numbers: numbers of the items; the share of a process is those that leave its index as the remainder.
    work: returns the results of the items with the given numbers.
    what: as in `gathered`.

  Raises:
    UserError: `work` raised it on a process; on every process.
    StoppedError: likewise.
  """
  processes = jax.process_count()
  shares = [[number for number in numbers if number % processes == index] for index in range(processes)]
  try:
    own = work(shares[jax.process_index()])
  except (UserError, StoppedError) as error:
    if processes == 1:
      raise
    own = error  # The other processes wait for this share and must learn of the error.
  results = {}
  for share, found in zip(shares, gathered(own, what), strict=True):
    if isinstance(found, UserError | StoppedError):
      raise found
    results |= zip(share, found, strict=True)
  return [results[number] for number in numbers]
