"""Text for users: counts, step numbers, and tables with a left-aligned first column and right-aligned others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
import itertools

Rows = Sequence[Sequence[str]]


def counted(count: int, noun: str) -> str:
  """Return a count with its noun, which gets an s unless the count is 1: '1,000 tokens'."""
  return f'{count:,} {noun}' if count == 1 else f'{count:,} {noun}s'


def spans(steps: Iterable[int]) -> str:
  """Return step numbers as text with ranges, such as '3, 5–8'."""
  counter = itertools.count()
  groups = [list(group) for _, group in itertools.groupby(sorted(set(steps)), lambda step: step - next(counter))]
  return ', '.join(str(group[0]) if len(group) == 1 else f'{group[0]}–{group[-1]}' for group in groups)


def named_steps(steps: Iterable[int]) -> str:
  """Return step numbers for people: 'step 3', 'steps 3, 5–8'."""
  return f'{"step" if len(set(steps)) == 1 else "steps"} {spans(steps)}'


def aligned(header: Sequence[str], rows: Rows) -> str:
  """Return a table for a terminal, its columns separated by spaces."""
  widths, [head, *body] = _columns(header, rows)
  rule = '  '.join('─' * width for width in widths)
  return '\n'.join(['  '.join(head), rule, *('  '.join(line) for line in body)])


def markdown(header: Sequence[str], rows: Rows) -> str:
  """Return a table in Markdown."""
  widths, lines = _columns(header, rows)
  head, *body = [f'| {" | ".join(line)} |' for line in lines]
  rule = '|' + '|'.join('-' * (width + 1) + (':' if column else '-') for column, width in enumerate(widths)) + '|'
  return '\n'.join([head, rule, *body])


def _columns(header: Sequence[str], rows: Rows) -> tuple[list[int], list[list[str]]]:
  """Return the widths of the columns, and the cells of all lines padded to them."""
  widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
  pads = [str.ljust] + [str.rjust] * (len(widths) - 1)
  return widths, [[pad(*cell) for pad, *cell in zip(pads, line, widths, strict=True)] for line in (header, *rows)]
