"""Output: styled on a terminal that supports colours, and plain text otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
import os
import shutil
from typing import NamedTuple, TextIO

from rich.cells import chop_cells
from rich.console import Console
from rich.text import Text

from sdpo_jax.terminal.escaping import visible

_STYLES = {
  '': '',
  'note': 'dim',
  'model': '',
  'head': 'bold',
  'place': 'cyan',
  'removed': 'red',
  'added': 'green',
  'good': 'green',
  'wrong': 'bold red',
  'command': 'bold yellow',
}
_AROUND = 6  # Lines of a page that are reserved for the question.


class Line(NamedTuple):
  """A line of text without characters that control the terminal, and the name of its style."""

  text: str
  style: str = ''


def has_colours(out: TextIO, environment: Mapping[str, str]) -> bool:
  """Return whether to use colours: on a terminal, unless NO_COLOR or TERM=dumb is set."""
  return out.isatty() and not environment.get('NO_COLOR') and environment.get('TERM', 'dumb') != 'dumb'


class Screen:
  """A screen that shows lines, and passes everything shown on to a history."""

  def __init__(self, out: TextIO, *, colours: bool, paged: bool, record: Callable[[str], None] = lambda text: None):
    """Make a screen.

    Args:
      out: the stream to write to.
      colours: whether to show styles; otherwise only text is written.
      paged: whether to split long output into pages, for a person at a terminal.
      record: called with everything that was shown.
    """
    self._out, self._paged, self.record = out, paged, record
    self._console = (
      Console(file=out, highlight=False, markup=False, emoji=False, force_terminal=True) if colours else None
    )
    self._draft = ''

  def page_of(self, lines: Sequence[Line]) -> tuple[list[Line], list[Line]]:
    """Split lines into those of the first page and the others; a line longer than a page is split, too."""
    if not self._paged:
      return list(lines), []
    columns, height = shutil.get_terminal_size()
    rows, shown, left = max(5, height - _AROUND), [], list(lines)
    while left and rows > 0:
      line, *others = left
      pieces = chop_cells(line.text, max(2, columns)) or ['']
      if len(pieces) > rows:
        if not shown:
          shown.append(line._replace(text=''.join(pieces[:rows])))
          left = [line._replace(text=''.join(pieces[rows:])), *others]
        break
      shown.append(line)
      left, rows = others, rows - len(pieces)
    return shown, left

  def show(self, lines: Iterable[Line]) -> None:
    """Show lines, and record them."""
    shown = list(lines)
    for line in shown:
      if self._console is None:
        self._out.write(line.text + '\n')
      else:
        self._console.print(Text(line.text, _STYLES[line.style]), soft_wrap=True)
    self._out.flush()
    if shown:
      self.record('\n'.join(line.text for line in shown))

  def say(self, text: str, style: str = 'note') -> None:
    """Show a text, which may be untrusted since it is escaped."""
    self.show(Line(line, style) for line in visible(text).split('\n'))

  def draft(self, text: str) -> None:
    """Show a piece of an answer while it is sampled."""
    self._draft += text
    shown = visible(text, keep='\n\t')
    if self._console is None:
      self._out.write(shown)
    else:
      self._console.print(Text(shown, _STYLES['model']), soft_wrap=True, end='')
    self._out.flush()

  def end_draft(self, whole: str | None = None) -> None:
    """End a streamed answer, and record it.

    Args:
      whole: the complete answer, of which the missing part is shown now; None: the answer was interrupted.
    """
    if whole is not None and not whole.startswith(self._draft):
      self.end_draft()
      self.say('The final answer differs:')
    if whole is not None:
      self.draft(whole[len(self._draft) :])
    shown, self._draft = self._draft, ''
    if shown:
      if not shown.endswith('\n'):
        self._out.write('\n')
        self._out.flush()
      self.record(visible(shown, keep='\n\t'))

  def beside(self, left: tuple[str, str], right: tuple[str, str]) -> None:
    """Show two texts with titles, side by side if there is room."""
    column = 0 if self._console is None else (shutil.get_terminal_size().columns - 3) // 2
    if column < 40:
      for title, text in (left, right):
        self.say(title, 'head')
        self.say(text, 'model')
      return
    parts = [[title, *_folded(visible(text), column)] for title, text in (left, right)]
    height = max(map(len, parts))
    parts = [[*part, *[''] * (height - len(part))] for part in parts]
    rows = [f'{one:<{column}} │ {two}' for one, two in zip(*parts, strict=True)]
    self.show(Line(row, '' if number else 'head') for number, row in enumerate(rows))


def _folded(text: str, column: int) -> list[str]:
  """Split a text into lines of at most `column` characters, without dropping any."""
  return [line[start : start + column] for line in text.split('\n') for start in range(0, max(1, len(line)), column)]


def is_plain(environment: Mapping[str, str] = os.environ) -> bool:
  """Return whether the terminal has no cursor control."""
  return environment.get('TERM', 'dumb') == 'dumb'
