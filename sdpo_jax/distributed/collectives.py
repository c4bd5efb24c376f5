"""What the processes of a run tell each other on the host; a run of one process is asked nothing."""

from __future__ import annotations

import pickle
from typing import Any

import jax
from jax.experimental import multihost_utils
import numpy as np

from sdpo_jax.distributed.cluster import barrier


def agreed(value: int) -> int:
  """The value that process 0 has, on every process."""
  return value if jax.process_count() == 1 else int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def gathered(value: Any, what: str) -> list[Any]:
  """What each process has, in order of the processes, on every process.

  Args:
    value: anything that can be pickled.
    what: it is, for a sentence about a process that the others wait for ('… did not reach the end of grading').
  """
  if jax.process_count() == 1:
    return [value]
  barrier(what)
  content = np.frombuffer(pickle.dumps(value), np.uint8)
  sizes = multihost_utils.process_allgather(np.array([len(content)], np.int32)).ravel()
  padded = np.zeros(sizes.max(), np.uint8)
  padded[: len(content)] = content
  everything = multihost_utils.process_allgather(padded).reshape(len(sizes), -1)
  return [pickle.loads(row[:size].tobytes()) for row, size in zip(everything, sizes, strict=True)]
