"""What the processes of a run tell each other on the host; a run of one process is asked nothing."""

from __future__ import annotations

import pickle
from typing import Any

import jax
from jax.experimental import multihost_utils
import numpy as np

from sdpo_jax.distributed import cluster
from sdpo_jax.distributed.cluster import barrier

PART = 2**16  # Bytes of a process that are sent at once.


def agreed(value: int) -> int:
  """Return the value that process 0 has, on every process."""
  return value if jax.process_count() == 1 else int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def noted(note: str, what: str) -> dict[int, str]:
  """Return the notes that are not empty, by process; the devices are asked only where `cluster` does not join the run.

  Args:
    note: of this process.
    what: it is about, as of `gathered`.
  """
  if jax.process_count() == 1 or cluster.joined():
    return cluster.exchange_notes(what, note)
  return {process: text for process, text in enumerate(gathered(note, what)) if text}


def gathered(value: Any, what: str) -> list[Any]:
  """Return what each process has, in order of the processes, on every process.

  Args:
    value: anything that can be pickled.
    what: it is, for a sentence about a process that the others wait for ('… did not reach the end of grading').
  """
  if jax.process_count() == 1:
    return [value]
  barrier(what)
  content = np.frombuffer(pickle.dumps(value), np.uint8)
  sizes = multihost_utils.process_allgather(np.array([len(content)], np.int32)).ravel()
  # In parts of one size: each other size would be one more program to compile.
  parts = -(-int(sizes.max()) // PART)
  padded = np.zeros((parts, PART), np.uint8)
  padded.reshape(-1)[: len(content)] = content
  everything = np.concatenate(
    [multihost_utils.process_allgather(part).reshape(len(sizes), -1) for part in padded], axis=1
  )
  return [pickle.loads(row[:size].tobytes()) for row, size in zip(everything, sizes, strict=True)]
