"""Removal of the thinking between `<think>` and `</think>` from a model's text."""

from __future__ import annotations

import re

_OPEN, _CLOSE = '<think>', '</think>'
_BLOCK = re.compile(rf'{_OPEN}.*?{_CLOSE}', re.DOTALL)
_BLOCK_AND_SPACE = re.compile(rf'{_OPEN}.*?{_CLOSE}\s*', re.DOTALL)


def without_closed_thinking(text: str) -> str:
  """Remove closed `<think>…</think>` blocks and the white space after them, as the reference does."""
  closed, rest = _split_after_last_close(text)
  stripped = rest.lstrip()
  return _BLOCK_AND_SPACE.sub('', closed + rest[: len(rest) - len(stripped)]) + stripped


def without_thinking(text: str, *, unfinished: bool = True) -> str:
  """Return the text without the model's thinking.

  This removes closed blocks; the text before a `</think>` whose `<think>` is in the prompt, where the chat template has
  put it; the text after a `<think>` that is never closed because the completion was cut off; and white space that is
  then at the beginning. If not `unfinished`, the text after such a `<think>` stays.
  """
  closed, rest = _split_after_last_close(text)
  said = _BLOCK.sub('', closed).rpartition(_CLOSE)[2] + (rest.partition(_OPEN)[0] if unfinished else rest)
  return said if said == text else said.lstrip()


def _split_after_last_close(text: str) -> tuple[str, str]:
  """Split the text after its last `</think>`.

  Every block of the first part is closed: the expressions above would take quadratic time on many open ones.
  """
  end = text.rfind(_CLOSE) + len(_CLOSE) if _CLOSE in text else 0
  return text[:end], text[end:]
