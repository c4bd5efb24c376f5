"""What is shown of an answer while it is sampled: its text, and of its calls only that one is being written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdpo_jax.environments.thinking import without_thinking
from sdpo_jax.serving.tool_calls import FORMS

_TAGS = frozenset(form.tags[0] for form in FORMS.values())
_THOUGHT = '</think>'


def call_at(text: str) -> int:
  """Return the position in an unfinished answer from which on it is, or may become, a call; its length: it is none."""
  start = text.rfind(_THOUGHT) + len(_THOUGHT) if _THOUGHT in text else 0
  said = text[start:].lstrip()
  if said.startswith('<think>'):
    return len(text)
  if said.startswith('{'):  # Llama 3 writes calls without a tag.
    return len(text) - len(said)
  found = [at for tag in _TAGS if (at := text.find(tag, start)) >= 0]
  begun = [len(text) - size for tag in _TAGS for size in range(1, len(tag)) if text.endswith(tag[:size])]
  return min([*found, *begun, len(text)])


def shown_of(turn: Mapping[str, Any]) -> int:
  """Return the position up to which a complete answer is shown: to its first call, which is shown for review.

  An invalid call is shown as it was written, and so is what only looked like a call.
  """
  return len(turn['text']) if turn['fault'] is not None or not turn['calls'] else call_at(turn['text'])


def after_calls(turn: Mapping[str, Any]) -> str:
  """Return what a complete answer says besides calls after its first one."""
  before = turn['text'][: shown_of(turn)]
  return '' if before == turn['text'] else turn['said'].removeprefix(without_thinking(before).strip()).strip()


def prose_of(turn: Mapping[str, Any]) -> str:
  """Return what a complete answer says besides its calls, as it is shown."""
  return '\n'.join(filter(None, (turn['text'][: shown_of(turn)].rstrip(), after_calls(turn))))
