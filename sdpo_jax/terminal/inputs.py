"""The person's input, typed at a terminal or read from a script."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

COMMAND = '/'  # The key of commands, which may be entered at any question.


class Leave(Exception):
  """The person leaves; the session can be resumed."""

  def __init__(self, code: int = 0):
    super().__init__(code)
    self.code = code


class EditorFailed(Exception):
  """Nothing was edited; the message says why."""


class Choice(NamedTuple):
  """A key and the text entered with it."""

  key: str
  rest: str | None = None  # A reason, arguments, a pattern or a command; None: still to be asked for.


def whole(text: str) -> str:
  """Return a typed text with a question mark for each invalid byte."""
  return text.encode(errors='replace').decode()


class Inputs(Protocol):
  """The interface of input sources. Every method raises KeyboardInterrupt for Ctrl-C."""

  def message(self) -> str | None:
    """Return a message to the model or a command; '' to continue, None at the end of input."""

  def choice(self, keys: Mapping[str, str]) -> Choice:
    """Return one of the keys, each given with its meaning, or a command; 'q' at the end of input."""

  def line(self, question: str, default: str = '') -> str:
    """Return the one-line answer to a question."""

  def edited(self, text: str) -> str:
    """Return the text as edited by the person; raises EditorFailed."""
