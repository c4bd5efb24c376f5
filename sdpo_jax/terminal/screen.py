"""Output: styled on a terminal that supports colours, and plain text otherwise.

All that the model or a tool has written is behind a margin, also where a line wraps, and no other line has it. The
program's own lines begin at the edge of the terminal and go on indented, so that no text can be taken for one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
import functools
import itertools
import os
import shutil
from typing import Any, NamedTuple, TextIO
import unicodedata

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from sdpo_jax.terminal.drafts import after_calls, call_at, shown_of
from sdpo_jax.terminal.escaping import visible

MARGIN = '│ '
_INDENT = '  '

_STYLES = {
  'note': 'dim',
  'head': 'bold',
  'place': 'cyan',
  'removed': 'red',
  'added': 'green',
  'good': 'green',
  'wrong': 'bold red',
  'command': 'bold yellow',
}
_BEGUN = 16  # More characters than the beginning of a tag has.
_AROUND = 6  # Lines of a page that are reserved for the question.


class Line(NamedTuple):
  """A line of text without characters that control the terminal, and the name of its style."""

  text: str
  style: str = ''
  foreign: bool = False  # Whether the model or a tool has written it, so that it is shown behind the margin.


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
    self._wraps = paged or out.isatty()
    self._console = (
      Console(file=out, highlight=False, markup=False, emoji=False, force_terminal=True) if colours else None
    )
    self._draft = ''  # The answer that is being sampled,
    self._seen = 0  # how many of its characters are shown,
    self._row = ''  # the last row of them,
    self._written = ''  # and all that was shown.
    self._counting = False  # Whether the row of the cursor tells that a call is being written.

  def page_of(self, lines: Sequence[Line]) -> tuple[list[Line], list[Line]]:
    """Split lines into those of the first page and the others; a line longer than a page is split, too."""
    if not self._paged:
      return list(lines), []
    rows, shown, left = max(5, shutil.get_terminal_size().lines - _AROUND), [], list(lines)
    while left and rows > 0:
      line, *others = left
      pieces = self._rows(line)
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
      for number, row in enumerate(self._rows(line)):
        self._put(MARGIN if line.foreign else _INDENT if number else '')
        self._put(row, line.style)
        self._put('\n')
    self._out.flush()
    if shown:
      self.record('\n'.join(MARGIN * line.foreign + line.text for line in shown))

  def say(self, text: str, style: str = 'note') -> None:
    """Show a sentence in one line, which may quote anything since it is escaped."""
    self.show([Line(visible(text, keep=''), style)])

  def draft(self, text: str) -> None:
    """Show a piece of an answer while it is sampled; calls are left to the review, and only counted."""
    self._draft += text
    self._show_draft(call_at(self._draft))
    if self._console is not None and (hidden := len(self._draft) - call_at(self._draft)) > _BEGUN:
      self._put('\n' if self._row and not self._counting else '\r')
      self._counting = True
      self._put(f'… writing a call, {hidden:,} characters', 'note')
      self._out.flush()

  def end_draft(self, turn: Mapping[str, Any] | None = None) -> None:
    """End a streamed answer, and record it.

    Args:
      turn: the complete answer, of which the missing part is shown now; None: the answer was interrupted.
    """
    if turn is not None and not turn['text'].startswith(self._draft):
      self.end_draft()
      self.say('The final answer differs:')
    if turn is not None:
      self._draft = turn['text']
      self._show_draft(shown_of(turn))
      if rest := visible(after_calls(turn), keep='\n\t', prose=True):
        self._flow('\n' * bool(self._written) + rest)
    if self._counting:
      self._uncount()
    elif self._written:
      self._put('\n')
    self._out.flush()
    if self._written:
      self.record('\n'.join(MARGIN + line for line in self._written.split('\n')))
    self._draft = self._row = self._written = ''
    self._seen = 0

  def _show_draft(self, end: int) -> None:
    """Show the answer up to a position, without white space at its end, which may be the last before a call."""
    end = len(self._draft[:end].rstrip())
    if end > self._seen:
      # The letter that a mark belongs to may have been shown before.
      before = self._draft[max(0, self._seen - 8) : self._seen]
      shown = visible(before + self._draft[self._seen : end], keep='\n\t', prose=True)
      self._flow(shown[len(visible(before, keep='\n\t', prose=True)) :])
      self._seen = end
      self._out.flush()

  def _flow(self, text: str) -> None:
    """Write text, already escaped, on from the last row of the answer."""
    self._written += text
    if self._counting:
      self._uncount()
      text = text.removeprefix('\n')
    for number, part in enumerate(text.split('\n')):
      if number:
        self._put('\n' if self._row else f'{MARGIN.rstrip()}\n')
        self._row = ''
      row, *others = _chopped((self._row + part).expandtabs(8), self._width(len(MARGIN)))
      self._put((MARGIN if row and not self._row else '') + row[len(self._row) :])
      for other in others:
        self._put(f'\n{MARGIN}{other}')
      self._row = others[-1] if others else row

  def _uncount(self) -> None:
    """Remove the row that tells of a call."""
    self._put('\r\x1b[K')
    self._counting, self._row = False, ''

  def _put(self, text: str, style: str = '') -> None:
    if self._console is None or not style:
      self._out.write(text)
    else:
      self._console.print(Text(text, _STYLES[style]), soft_wrap=True, end='')

  def _rows(self, line: Line) -> list[str]:
    """Split a line into rows of the terminal, without margin or indentation."""
    if not line.foreign and len(whole := _chopped(line.text, self._width())) == 1:
      return whole
    return _chopped(line.text, self._width(len(MARGIN)), words=not line.foreign)

  def _width(self, margin: int = 0) -> int | None:
    """Return how many cells a row has beside a margin; None: rows are not wrapped here."""
    return max(2, shutil.get_terminal_size().columns - margin) if self._wraps else None

  def beside(self, left: tuple[str, str], right: tuple[str, str]) -> None:
    """Show two texts with titles, side by side if there is room."""
    column = 0 if self._console is None else (shutil.get_terminal_size().columns - 5) // 2
    (one, first), (two, second) = ((title, visible(text, prose=True)) for title, text in (left, right))
    if column < 40:
      for title, text in ((one, first), (two, second)):
        self.say(title, 'head')
        self.show(Line(line, foreign=True) for line in text.split('\n'))
      return
    rows = itertools.zip_longest(
      *([row for line in text.split('\n') for row in _chopped(line, column)] for text in (first, second)), fillvalue=''
    )
    self.say(f'{one} │ {two}', 'head')
    self.show(Line(f'{old}{" " * (column - sum(map(_cells, old)))} │ {new}', foreign=True) for old, new in rows)


def _chopped(text: str, width: int | None, *, words: bool = False) -> list[str]:
  """Split a text into rows of at most so many cells, after a space if words are to stay whole."""
  if width is None:
    return [text]
  rows, start, used = [], 0, 0
  for index, letter in enumerate(text):
    cells = _cells(letter)
    if used + cells > width:
      space = text.rfind(' ', start, index) if words else -1
      rows.append(text[start : index if space < 0 else space + 1])
      start += len(rows[-1])
      used = sum(map(_cells, text[start:index]))
    used += cells
  return [*rows, text[start:]]


@functools.lru_cache(1024)
def _cells(letter: str) -> int:
  """Return how many cells of a row a character may take; terminals differ in symbols, so that the most counts."""
  symbol = unicodedata.category(letter) == 'So' and not '─' <= letter <= '╿'  # All draw lines in one cell.
  wide = symbol or unicodedata.east_asian_width(letter) in 'WF'
  return max(cell_len(letter), 2 * wide)


def is_plain(environment: Mapping[str, str] = os.environ) -> bool:
  """Return whether the terminal has no cursor control."""
  return environment.get('TERM', 'dumb') == 'dumb'
