"""Buckets: the few declared lengths to which sequences are padded, so that a run compiles for few shapes."""

from __future__ import annotations

from collections.abc import Sequence

SMALLEST = 16  # Tokens; of buckets that are not declared.


def bucket_lengths(declared: Sequence[int], limit: int | None) -> tuple[int, ...]:
  """Returns the lengths to pad to, ascending.

  Args:
    declared: lengths in tokens, in any order; empty: powers of two.
    limit: the largest length, which is a bucket itself; longer declared ones are left out. None: no limit.

  Returns:
    The buckets; empty, which stands for any power of two, when nothing is declared and there is no limit.
  """
  if limit is None:
    return tuple(sorted(set(declared)))
  if not declared:
    declared = [2**i for i in range(SMALLEST.bit_length() - 1, limit.bit_length())]
  return tuple(sorted({length for length in declared if length < limit} | {limit}))


def smallest_bucket(lengths: Sequence[int], length: int) -> int | None:
  """Returns the smallest of `lengths` (from `bucket_lengths`) that holds `length` tokens, None if none does."""
  if not lengths:
    return max(SMALLEST, 1 << (length - 1).bit_length())
  return next((bucket for bucket in lengths if bucket >= length), None)
