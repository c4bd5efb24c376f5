"""Scripted input: a file with one input per line, or a pipe.

  Fix the test.            a text for the model
  y                        approves the call that is proposed
  a [PATTERN]              … and allows its like from then on
  n REASON                 denies it
  e {"path": "a.py"}       has it run with these arguments
  t                        tells the model what is wrong with it
  s                        leaves a call out that cannot be run as it was approved
  /COMMAND                 a command
  q                        leaves

Empty lines and those that begin with # are skipped. A text that begins like a decision is written behind a space.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
import pathlib
import sys

from sdpo_jax.errors import UserError, first_line, short_repr
from sdpo_jax.terminal.inputs import COMMAND, Choice, whole

_DECISIONS = 'yanetsq'


class OutOfStep(UserError):
  """A line of a script does not answer the current question."""


class Script:
  """Inputs from a script; each is shown as it is used."""

  def __init__(self, lines: Iterable[str], name: str, show: Callable[[str], None]):
    """Start a script.

    Args:
      lines: its lines; read one by one as they are needed, so that a pipe may answer.
      name: name of the script in errors.
      show: called with each line that is used.
    """
    self._lines, self._name, self._show, self._number = iter(lines), name, show, 0
    self.unanswered = False  # Whether a call was left undecided at the script's end.

  def message(self) -> str | None:
    while (line := self._next()) is not None:
      if line.strip() == 'q':
        break
      if _is_decision(line):
        raise OutOfStep(
          f'{self._where}: {short_repr(line)} decides about a call, and none is proposed here; if it is a text for the '
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
    if not _is_decision(line) or line[0] not in keys:
      able = ', '.join(f'{key} ({meaning})' for key, meaning in keys.items())
      raise OutOfStep(f'{self._where}: {short_repr(line)} is no answer to a call; possible are {able}.')
    self._show(f'? {line}')
    return Choice(line[0], line[1:].strip() or None)

  def line(self, question: str, default: str = '') -> str:
    if default:
      return default
    raise OutOfStep(f'{self._where}: the answer to {question!r} belongs on the same line, behind a space.')

  def edited(self, text: str) -> str:
    raise OutOfStep(f'{self._where}: e is followed by the arguments as JSON, such as {short_repr(text)}.')

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
  """Return the lines of --script=FILE, or of standard input for --script=-.

  Raises:
    UserError: the file cannot be read.
  """
  if path == '-':
    return sys.stdin
  try:
    return pathlib.Path(path).expanduser().read_text(encoding='utf-8').split('\n')
  except (OSError, UnicodeDecodeError) as error:
    raise UserError(f'--script={path} cannot be read ({first_line(error)}): name a file, or - for a pipe.') from error
