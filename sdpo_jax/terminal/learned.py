"""What the adapter has learned from a decision or from failures: in one line, and in detail on request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdpo_jax.tables import aligned
from sdpo_jax.terminal.escaping import visible
from sdpo_jax.terminal.screen import Line

_LONGEST = 24  # The most characters of a token that are shown.


def lines_of(learned: Mapping[str, Any] | None, least: int) -> list[Line]:
  """Return a line on what was learned, or why nothing was.

  Args:
    learned: the result from the service; None: there was nothing to learn.
    least: how many examples are learned together (`min_sdpo_examples`).
  """
  if learned is None:
    return []
  before, after, waiting = learned['version_before'], learned['version_after'], learned['waiting']
  if not learned['accepted']:
    if waiting and learned['reason'] is None:
      return [Line(f'Nothing learned yet: {waiting} of {least} examples wait (/flush learns from them now).', 'note')]
    why = visible(str(learned['reason'] or 'the service gave no reason'), keep='')
    return [Line(f'Not learned: a guard has rejected the new version, and version {before} stays ({why}).', 'wrong')]
  if learned.get('unchanged'):
    return [Line(f'Nothing to learn from {turns_of(learned)}: its gradient is 0, and version {before} stays.', 'note')]
  seconds = '' if learned['seconds'] is None else f' in {learned["seconds"]:.2f} s'
  more = f'; {waiting} of {least} examples wait' if waiting else ''
  said = f'Learned: version {before} → {after}{seconds}, from {turns_of(learned)}{more}. /learned shows more.'
  return [Line(said, 'good'), *(Line(visible(each, keep=''), 'wrong') for each in learned.get('warnings') or ())]


def turns_of(learned: Mapping[str, Any]) -> str:
  """Return the turns that were learned from, such as 'turns 2, 3'."""
  return f'{"turn" if len(learned["turns"]) == 1 else "turns"} {", ".join(map(str, learned["turns"]))}'


def details_of(learned: Mapping[str, Any]) -> list[Line]:
  """Return lines on how much a lesson has moved: the divergence, and the tokens that changed most."""
  lines = []
  if learned['divergence_before'] is not None:
    later = learned['divergence_after']
    change = '' if later is None else f' → {later:.4f}'
    lines.append(
      Line(f'Divergence from the teacher on that answer: {learned["divergence_before"]:.4f}{change} nats per token.')
    )
  lines += [Line(_answers(each)) for each in learned.get('answers') or ()]
  return lines + [Line(line) for line in _moved(learned['moved'])]


def _answers(answers: Mapping[str, Any]) -> str:
  """Return how the log-probs of whole answers have moved: of the one that was rejected, and of the edited one."""
  shown = [(name, answers[name]) for name in ('rejected', 'wanted') if answers[name] and None not in answers[name]]
  said = ', '.join(f'{name} {before:.2f} → {after:.2f}' for name, (before, after) in shown)
  return f'Log-prob of the whole answer: {said}.' if said else 'The answers are too long to be scored.'


def _moved(moved: list[Mapping[str, Any]]) -> list[str]:
  if not moved:
    return []
  rows = []
  for one in moved:
    before, after = one['before'], one['after']
    rows.append((_token(one['text']), str(one['position']), f'{before:.3f}', f'{after:.3f}', f'{after - before:+.3f}'))
  table = aligned(('token', 'position', 'log-prob before', 'after', 'change'), rows)
  return ['Tokens that changed most:', *('  ' + line for line in table.split('\n'))]


def _token(text: str) -> str:
  shown = f'‘{visible(text, keep=" ")}’'
  return shown if len(shown) <= _LONGEST else shown[: _LONGEST - 1] + '…'
