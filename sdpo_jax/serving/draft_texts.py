"""The text of a completion while it is drawn: shown text is never taken back, and stop strings never appear."""

from __future__ import annotations

from collections.abc import Sequence

from sdpo_jax.rollout.stops import StopStrings, Tokenizer, to_text

_UNFINISHED = '\ufffd'  # The replacement character, which decoders write for an incomplete character.


def finished_text(tokenizer: Tokenizer, tokens: Sequence[int], stop: Sequence[str]) -> str:
  """Return the text of a completion up to its first stop string, without special tokens.

  Args:
    tokenizer: the model's tokenizer.
    tokens: the whole completion.
    stop: strings that end it. Special tokens count as text in them.
  """
  text = to_text(tokenizer, tokens)
  end = _first(text, stop)
  if end is not None:
    return text[:end]
  count = StopStrings(tokenizer, stop).find(list(tokens))
  if count is None:
    return text
  # The string spans a special token, which the text does not show.
  end = _first(to_text(tokenizer, tokens[:count], special=True), stop)
  while count and len(to_text(tokenizer, tokens[:count], special=True)) > (end or 0):
    count -= 1
  return to_text(tokenizer, tokens[:count])


class DraftText:
  """The text of a completion under way, and the part of it that has been shown."""

  def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
    """Make the text of a completion without tokens."""
    self.shown = ''
    self._tokenizer, self._stop = tokenizer, tuple(stop)

  def draft(self, tokens: Sequence[int]) -> str:
    """Return the further text that can be shown: no half character, nothing that may begin a stop string.

    Args:
      tokens: all tokens drawn so far.
    """
    text = to_text(self._tokenizer, tokens).rstrip(_UNFINISHED)
    end = _first(text, self._stop)
    text = text[:end] if end is not None else text[: len(text) - _held_back(text, self._stop)]
    return self._more(text)

  def finish(self, text: str) -> str:
    """Return the rest of the finished text that has not been shown."""
    if text.startswith(self.shown):
      return self._more(text)
    return ''  # A tokenizer that rewrites what it has written: what was shown cannot be taken back.

  def _more(self, text: str) -> str:
    if not text.startswith(self.shown):
      return ''
    more, self.shown = text[len(self.shown) :], text
    return more


def _first(text: str, stop: Sequence[str]) -> int | None:
  """Return the position of the first stop string; None: there is none."""
  return min((at for at in (text.find(each) for each in stop) if at >= 0), default=None)


def _held_back(text: str, stop: Sequence[str]) -> int:
  """Return how many characters at the end of a text may begin a stop string."""
  longest = max((len(each) - 1 for each in stop), default=0)
  for length in range(min(longest, len(text)), 0, -1):
    if any(each.startswith(text[-length:]) for each in stop):
      return length
  return 0
