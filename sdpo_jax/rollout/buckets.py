"""Buckets: the few declared lengths to which sequences are padded, so that a run compiles for few shapes."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses

from sdpo_jax.config import Config
from sdpo_jax.errors import UserError

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


def bucket(length: int, lengths: tuple[int, ...], name: str) -> int:
  """Return the smallest declared length that holds `length`.

  Raises:
    UserError: none does.
  """
  size = smallest_bucket(lengths, length)
  if size is None:
    raise UserError(f'A length of {length} tokens exceeds the largest bucket of {name}, {max(lengths)}: raise it.')
  return size


@dataclasses.dataclass(frozen=True)
class Buckets:
  """The declared lengths of a run; a micro-batch uses the smallest triple that holds it, and compiles once."""

  prompt: tuple[int, ...]
  response: tuple[int, ...]
  reprompt: tuple[int, ...]

  @classmethod
  def of(cls, config: Config) -> Buckets:
    """Return those declared in the settings, or powers of two up to the limits."""
    data = config.data
    return cls(
      prompt=bucket_lengths(data.prompt_buckets, data.max_prompt_length),
      response=bucket_lengths(data.response_buckets, data.max_response_length),
      reprompt=bucket_lengths(data.reprompt_buckets, config.actor.self_distillation.max_reprompt_len),
    )

  @classmethod
  def of_update(cls, config: Config) -> Buckets:
    """Return those of the update: packed rows have the largest of those that are not declared in the settings."""
    whole, data = cls.of(config), config.data
    if not config.actor.pack_sequences:
      return whole
    return cls(
      whole.prompt if data.prompt_buckets else whole.prompt[-1:],
      whole.response if data.response_buckets else whole.response[-1:],
      whole.reprompt if data.reprompt_buckets else whole.reprompt[-1:],
    )
