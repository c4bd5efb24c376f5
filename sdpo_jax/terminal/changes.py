"""Unified diffs of the change that a call makes to a file, with every character visible."""

from __future__ import annotations

import difflib
import io
import os

from sdpo_jax.terminal.escaping import visible, visible_line
from sdpo_jax.terminal.screen import Line

_CONTEXT = 3  # Unchanged lines around a change.
_MOST = 4_000_000  # The most pairs of lines to compare; larger changes are shown as one replacement.
_NO_NEWLINE = '\\ No newline at end of file'


def diff(path: str, before: str, after: str) -> list[Line]:
  """Return the styled lines of a unified diff; only unchanged lines far from changes are left out."""
  if before == after:
    return [Line(f'{visible(path, keep="")}: no changes.', 'note')]
  old, new = list(io.StringIO(before)), list(io.StringIO(after))  # Split at newlines only, unlike by `splitlines`.
  found = [Line(f'--- {visible(path, keep="")}', 'head'), Line(f'+++ {visible(path, keep="")}', 'head')]
  for group in _groups(old, new):
    first, last = group[0], group[-1]
    found.append(Line(f'@@ -{_range(first[1], last[2])} +{_range(first[3], last[4])} @@', 'place'))
    for tag, old_from, old_to, new_from, new_to in group:
      if tag == 'equal':
        found += _marked(' ', old[old_from:old_to], '')
      else:
        found += _marked('-', old[old_from:old_to], 'removed')
        found += _marked('+', new[new_from:new_to], 'added')
  return found


def _marked(mark: str, lines: list[str], style: str) -> list[Line]:
  found = []
  for line in lines:
    found.append(Line(mark + visible_line(line.removesuffix('\n')), style))
    if not line.endswith('\n'):
      found.append(Line(_NO_NEWLINE, style))
  return found


def _groups(old: list[str], new: list[str]) -> list[list[tuple[str, int, int, int, int]]]:
  """Return changes in groups with the lines around them, as difflib does, but for large files, too."""
  same = len(os.path.commonprefix([old, new]))
  left_old, left_new = old[same:], new[same:]
  tail = len(os.path.commonprefix([left_old[::-1], left_new[::-1]]))
  middle_old, middle_new = left_old[: len(left_old) - tail], left_new[: len(left_new) - tail]
  if len(middle_old) * len(middle_new) <= _MOST:
    inner = difflib.SequenceMatcher(None, middle_old, middle_new, autojunk=False).get_opcodes()
  else:
    inner = [('replace', 0, len(middle_old), 0, len(middle_new))]
  old_end, new_end = same + len(middle_old), same + len(middle_new)
  matcher = difflib.SequenceMatcher()
  matcher.opcodes = [  # Overrides what it would compute.
    ('equal', 0, same, 0, same),
    *((tag, *(place + same for place in places)) for tag, *places in inner),
    ('equal', old_end, len(old), new_end, len(new)),
  ]
  return list(matcher.get_grouped_opcodes(_CONTEXT))


def _range(start: int, end: int) -> str:
  """Return a range of lines as unified diffs write it, from 1; an empty range has the number of the line before."""
  count = end - start
  return f'{start + 1}' if count == 1 else f'{start + 1 if count else start},{count}'
