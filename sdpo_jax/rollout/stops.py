"""Stop strings: finding the first token of a completion that completes one."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Tokenizer(Protocol):
  """The interface of a transformers tokenizer that sampling needs."""

  def decode(self, token_ids: Sequence[int], **kwargs: bool) -> str:
    """Return the text of tokens."""


def to_text(tokenizer: Tokenizer, tokens: Sequence[int], *, special: bool = False) -> str:
  """Return the text of tokens, without clean-up of spaces, and without special tokens unless `special`."""
  return tokenizer.decode(list(tokens), skip_special_tokens=not special, clean_up_tokenization_spaces=False)


class StopStrings:
  """The stop strings of a request; finds the token that completes the first of them in a completion.

  Special tokens count as text here, so a stop string may also be the name of one.
  """

  def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]):
    self._tokenizer = tokenizer
    self._stop = tuple(stop)
    # A token has at least one byte, so this many tokens hold any stop string; a few more, since a tokenizer may treat
    # the beginning of a text specially.
    self._reach = max((len(text.encode()) for text in stop), default=0) + 8

  def __bool__(self) -> bool:
    return bool(self._stop)

  def _within(self, tokens: Sequence[int]) -> bool:
    text = to_text(self._tokenizer, tokens, special=True)
    return any(stop in text for stop in self._stop)

  def end(self, tokens: np.ndarray, checked: int, done: bool) -> int | None:
    """Return the number of leading tokens up to the end of the first stop string; None if there is none.

    For an unfinished sample, the tail after `checked` tokens is examined first. A finished sample is always searched
    whole, which alone decides where it ends, so that the number of tokens between two calls changes nothing.
    """
    if not self:
      return None
    return self.find(tokens.tolist()) if done or self.may_end(tokens, checked) else None

  def may_end(self, tokens: np.ndarray, checked: int) -> bool:
    """Return whether a stop string may end after the first `checked` tokens, judging by the tail alone."""
    return self._within(tokens[max(0, checked - self._reach) :].tolist())

  def find(self, tokens: Sequence[int]) -> int | None:
    """Return the smallest number of leading tokens whose text contains a stop string, or None."""
    if not self._stop or not self._within(tokens):
      return None
    shorter = range(1, len(tokens))
    return 1 + bisect.bisect_left(shorter, True, key=lambda length: self._within(tokens[:length]))
