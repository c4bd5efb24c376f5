"""How much of a text the files of a run hold."""

from __future__ import annotations

from sdpo_jax.teacher.context import shorten_middle
from sdpo_jax.types import Messages

TEXT_LIMIT = 65_536  # Characters; about twice what a completion of 8192 tokens has.


def excerpt(text: str) -> str:
  """Return the text, or of one with more than `TEXT_LIMIT` characters its beginning, what is left out, and its end."""
  left_out = len(text) - TEXT_LIMIT
  return shorten_middle(text, TEXT_LIMIT, f'\n… {left_out:,} of {len(text):,} characters left out …\n')


def excerpt_messages(messages: Messages) -> Messages:
  """Return the messages with the `excerpt` of each content."""
  return [{**message, 'content': excerpt(message['content'])} for message in messages]
