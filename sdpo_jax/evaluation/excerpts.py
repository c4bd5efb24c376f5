"""Excerpts of long texts for the files of a run."""

from __future__ import annotations

from sdpo_jax.teacher.context import shorten_middle
from sdpo_jax.types import Messages

TEXT_LIMIT = 65_536  # Characters; about twice the length of a completion of 8192 tokens.


def excerpt(text: str) -> str:
  """Return the text; of one longer than `TEXT_LIMIT` characters, its beginning, the size of the gap, and its end."""
  left_out = len(text) - TEXT_LIMIT
  return shorten_middle(text, TEXT_LIMIT, f'\n… {left_out:,} of {len(text):,} characters left out …\n')


def excerpt_messages(messages: Messages) -> Messages:
  """Return the messages with the `excerpt` of each content."""
  return [{**message, 'content': excerpt(message['content'])} for message in messages]
