"""What a model says aloud: its text without the thinking between `<think>` and `</think>`."""

from __future__ import annotations

import re

_OPEN, _CLOSE = '<think>', '</think>'
_BLOCK = re.compile(rf'{_OPEN}.*?{_CLOSE}', re.DOTALL)
_BLOCK_AND_SPACE = re.compile(rf'{_OPEN}.*?{_CLOSE}\s*', re.DOTALL)


def without_closed_thinking(text: str) -> str:
  """Return the text without its closed `<think>…</think>` blocks and the white space after them, as the reference
  does.
  """
  closed, rest = _split_after_last_close(text)
  stripped = rest.lstrip()
  return _BLOCK_AND_SPACE.sub('', closed + rest[: len(rest) - len(stripped)]) + stripped


def without_thinking(text: str) -> str:
  """Return what is said aloud.

  Removed are closed blocks; what precedes a `</think>` without a `<think>` of its own, which the chat template has put
  into the prompt; what follows a `<think>` that is never closed, since the text was cut off; and the white space that
  the text begins with then.
  """
  closed, rest = _split_after_last_close(text)
  said = _BLOCK.sub('', closed).rpartition(_CLOSE)[2] + rest.partition(_OPEN)[0]
  return said if said == text else said.lstrip()


def _split_after_last_close(text: str) -> tuple[str, str]:
  """Every block of the first part is closed: where many are not, the expressions above would take quadratic time."""
  end = text.rfind(_CLOSE) + len(_CLOSE) if _CLOSE in text else 0
  return text[:end], text[end:]
