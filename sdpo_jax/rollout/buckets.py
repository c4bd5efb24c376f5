"""Buckets: the few lengths to which sequences are padded, so that a run compiles for few shapes."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import itertools
import math

import numpy as np

from sdpo_jax.errors import UserError

SMALLEST = 16  # Tokens of the smallest bucket if lengths have no limit.
SHORTEST = 128  # Tokens of the shortest default bucket. A shorter one saves less than its programs cost.
STEP = 4  # Each default bucket is a quarter of the next.
PROMPTS, RESPONSES = 2, 3  # Number of default buckets.


def bucket_lengths(declared: Sequence[int], limit: int, count: int = PROMPTS) -> tuple[int, ...]:
  """Return the lengths to pad to, ascending.

  Args:
    declared: lengths in tokens, in any order; empty: the default buckets.
    limit: the largest length, which is a bucket itself; longer declared ones are left out.
    count: maximum number of default buckets: the limit, a quarter of it, a sixteenth …, rounded up to multiples of
      SHORTEST tokens.
  """
  if not declared:
    declared = [math.ceil(limit / STEP**part / SHORTEST) * SHORTEST for part in range(1, count)]
  return tuple(sorted({length for length in declared if length < limit} | {limit}))


def smallest_bucket(lengths: Sequence[int], length: int) -> int | None:
  """Return the smallest of the ascending `lengths` that holds `length` tokens; None if none does.

  If `lengths` is empty, all powers of two from `SMALLEST` on are buckets.
  """
  if not lengths:
    return max(SMALLEST, 1 << (length - 1).bit_length())
  return next((bucket for bucket in lengths if bucket >= length), None)


def bucket(length: int, lengths: tuple[int, ...], name: str) -> int:
  """Return the smallest declared length that holds `length`.

  Raises:
    UserError: none does.
  """
  size = smallest_bucket(lengths, length)
  if size is None:
    raise UserError(f'A length of {length} tokens exceeds the largest bucket of {name}, {max(lengths)}: raise it.')
  return size


def padded(rows: Sequence[Sequence[int]], room: int) -> tuple[np.ndarray, np.ndarray]:
  """Return tokens padded to T = room, [B, T] int32, and a mask of the tokens that are not padding, [B, T] bool."""
  tokens, mask = np.zeros((len(rows), room), np.int32), np.zeros((len(rows), room), bool)
  for row, own in enumerate(rows):
    tokens[row, : len(own)], mask[row, : len(own)] = own, True
  return tokens, mask


@dataclasses.dataclass(frozen=True)
class Buckets:
  """The bucket lengths of a run; a micro-batch uses the smallest that hold it, and compiles once per combination."""

  prompt: tuple[int, ...]
  response: tuple[int, ...]
  reprompt: tuple[int, ...]
  # Whether short prompts are combined only with short teacher prompts, and long with long, because neither buckets are
  # declared or the teacher reads the student's prompts; else all combinations occur.
  paired: bool = False

  @property
  def prompts(self) -> tuple[tuple[int, int], ...]:
    """All combinations (prompt, teacher prompt) of a micro-batch with a teacher, ascending."""
    if not self.paired:
      return tuple(itertools.product(self.prompt, self.reprompt))
    count = max(len(self.prompt), len(self.reprompt))

    def stretched(lengths: tuple[int, ...]) -> tuple[int, ...]:
      return (*lengths[:1] * (count - len(lengths)), *lengths)

    return tuple(zip(stretched(self.prompt), stretched(self.reprompt), strict=True))

  def holding(self, prompt: int, reprompt: int) -> tuple[int, int]:
    """Return the smallest of `prompts` that holds a prompt and a teacher prompt of these lengths.

    Raises:
      UserError: one of them is too long.
    """
    prompt = bucket(prompt, self.prompt, 'data.prompt_buckets')
    reprompt = bucket(reprompt, self.reprompt, 'data.reprompt_buckets')
    return next(pair for pair in self.prompts if pair[0] >= prompt and pair[1] >= reprompt)
