"""Scripted input: a file with one input per line, or a pipe.

  Fix the test.            sends a message to the model
  y                        approves the proposed call
  a [PATTERN]              approves it, and allows such calls from then on
  n REASON                 denies it
  e {"path": "a.py"}       replaces its arguments
  t TEXT                   does not run it, and tells the model why; no TEXT is needed if it cannot run
  s                        skips a call whose effect has changed since its approval
  /COMMAND                 runs a command; /deny REASON denies an answer without calls
  q                        leaves the program

Empty lines and lines that begin with # are skipped. A message that looks like a decision must begin with a space.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
import os
import pathlib
import sys

from sdpo_jax.errors import UserError, first_line, short_repr
from sdpo_jax.terminal.inputs import BY_ITSELF, COMMAND, WITH_TEXT, Choice, whole

_DECISIONS = 'yanetsq'


class OutOfStep(UserError):
  """A line of a script does not fit the current question."""


class Script:
  """Input from the lines of a script, each of which is shown when it is used."""

  def __init__(self, lines: Iterable[str], name: str, show: Callable[[str], None]):
    """Make a source of input from a script.

    Args:
      lines: the lines, read one by one as they are needed, so that a pipe can react to output.
      name: the name of the script, for error messages.
      show: called with each line that is used.
    """
    self._lines, self._name, self._show, self._number = iter(lines), name, show, 0
    self.unanswered = False  # Whether the script ended before a call was decided.

  def message(self) -> str | None:
    while (line := self._next()) is not None:
      if line.strip() == 'q':
        break
      if _is_decision(line):
        raise OutOfStep(
          f'{self._where}: {short_repr(line)} is a decision, and no call is proposed here; if it is a message to the '
          'model, write a space before it.'
        )
      self._show(f'> {line}')
      return line.strip()
    return None

  def choice(self, keys: Mapping[str, str]) -> Choice:
    line = self._next()
    if line is None:
      self.unanswered = True
      return Choice('q')
    if line.startswith(COMMAND):
      self._show(f'> {line}')
      return Choice(COMMAND, line)
    rest = line[1:].strip()
    if not _is_decision(line) or line[0] not in keys or (rest and line[0] not in WITH_TEXT):
      able = ', '.join(f'{key} ({meaning})' for key, meaning in keys.items())
      raise OutOfStep(f'{self._where}: {short_repr(line)} is not a decision; possible here: {able}. {BY_ITSELF}')
    self._show(f'? {line}')
    return Choice(line[0], rest or None)

  def line(self, question: str, default: str = '') -> str:
    if default:
      return default
    raise OutOfStep(f'{self._where}: write the answer to {question!r} on the same line, after a space.')

  def edited(self, text: str, kind: str) -> str:
    raise OutOfStep(f'{self._where}: write the new arguments as JSON after e, such as e {{"path": "a.py"}}.')

  def _next(self) -> str | None:
    for raw in self._lines:
      self._number += 1
      line = whole(raw.rstrip('\r\n'))
      if line.strip() and not line.startswith('#'):
        return line
    return None

  @property
  def _where(self) -> str:
    return f'{self._name}, line {self._number}'


def _is_decision(line: str) -> bool:
  return line[0] in _DECISIONS and line[1:2] in ('', ' ')


def lines_of(path: str) -> Iterable[str]:
  """Return the lines of the file that --script names, or of standard input for -.

  Raises:
    UserError: the file cannot be read.
  """
  if path == '-':
    return sys.stdin
  try:
    return pathlib.Path(os.path.expanduser(path)).read_text(encoding='utf-8').split('\n')
  except (OSError, UnicodeDecodeError) as error:
    raise UserError(f'--script={path} cannot be read ({first_line(error)}): name a file, or - for a pipe.') from error
