"""What the person says, whichever way: typed at a terminal, or written down before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

COMMAND = '/'  # The key of a command, which may be given wherever something is asked.


class Leave(Exception):
  """The person leaves; what is under way can be resumed."""

  def __init__(self, code: int = 0):
    super().__init__(code)
    self.code = code


class EditorFailed(Exception):
  """Nothing was edited; the sentence says why."""


class Choice(NamedTuple):
  """A key, and what was said with it."""

  key: str
  rest: str | None = None  # A reason, arguments, a pattern or a command; None: it has still to be asked for.


def whole(text: str) -> str:
  """Return a text as it was typed, with a question mark for each byte that is part of no character."""
  return text.encode(errors='replace').decode()


class Inputs(Protocol):
  """Where answers come from. Every method raises KeyboardInterrupt for Ctrl-C."""

  def message(self) -> str | None:
    """Return a text for the model or a command; empty: go on; None: there will be none any more."""

  def choice(self, keys: Mapping[str, str]) -> Choice:
    """Return one of the keys, which have a meaning each, or a command; 'q' where there will be none any more."""

  def line(self, question: str, default: str = '') -> str:
    """Return the answer to a question, in one line."""

  def edited(self, text: str) -> str:
    """Return a text as the person has changed it; raise EditorFailed."""
