"""The interface for input of the person, typed at a terminal or read from a script."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

COMMAND = '/'  # Begins a command, which can be entered at any question.
WITH_TEXT = 'anet'  # Keys that may have a text behind them in a line.
BY_ITSELF = 'A key counts by itself: only a, n, e and t may have a text behind them.'


class Leave(Exception):
  """The person leaves the program; the session can be resumed."""


class EditorFailed(Exception):
  """The editor has failed, so nothing was edited; the message says why."""


class Choice(NamedTuple):
  """A key that the person has chosen, and the text entered with it."""

  key: str
  rest: str | None = None  # A reason, arguments, a pattern or a command; None: none was entered yet.


def whole(text: str) -> str:
  """Return a typed text in which invalid bytes are question marks."""
  return text.encode(errors='replace').decode()


class Inputs(Protocol):
  """A source of input. All methods raise KeyboardInterrupt for Ctrl-C."""

  def message(self) -> str | None:
    """Return a message to the model, or a command; '' to continue, None at the end of input."""

  def choice(self, keys: Mapping[str, str]) -> Choice:
    """Return a choice among keys, given with their meanings, or a command; the key 'q' at the end of input."""

  def line(self, question: str, default: str = '') -> str:
    """Return the one-line answer to a question."""

  def edited(self, text: str, kind: str) -> str:
    """Return a text of a kind, json or sh, after the person has edited it; '' if they leave it. Raises EditorFailed."""
