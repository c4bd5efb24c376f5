"""Tool calls as a person reviews them: their effect on the current files, or why they are invalid."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import json
import pathlib
from typing import Any

from sdpo_jax.environments.workspace.tools import BadCall, Toolbox
from sdpo_jax.terminal.changes import diff
from sdpo_jax.terminal.escaping import visible, visible_line
from sdpo_jax.terminal.policies import OTHERS, SERVED, ApprovalPolicy, CallRule
from sdpo_jax.terminal.screen import Line

_SHOWN = 40  # The most lines of a tool's output that are shown; the model reads all of it.


@dataclasses.dataclass(frozen=True)
class Proposed:
  """A call that was checked against the current files and the policy."""

  name: str
  arguments: Mapping[str, Any]
  verdict: CallRule  # The rule that decides about it.
  wrong: BadCall | None = None  # Why the call cannot be run; the message is for the person and the model.
  # Whether it is wrong since its valid arguments do not fit the current files, which an earlier call may change.
  for_now: bool = False
  change: tuple[str, str, str] | None = None  # Path, and text of the file before and after; None: no file changes.

  @property
  def can_run(self) -> bool:
    """Whether the call may run if the person approves it."""
    return self.verdict.verb != 'never' and self.wrong is None

  def same(self, other: Proposed) -> bool:
    """Return whether another check of a call has the same result, so that an approval is still valid."""
    return (self.name, self.arguments, self.change) == (other.name, other.arguments, other.change)


def look(name: str, arguments: Any, toolbox: Toolbox, policy: ApprovalPolicy, workspace: pathlib.Path) -> Proposed:
  """Check a call against the current files and the policy; nothing is changed."""
  try:
    checked = toolbox.checked(name, arguments)
  except BadCall as error:
    return Proposed(name, arguments, OTHERS, error)
  verdict = policy.verdict(name, checked, workspace)
  try:
    return Proposed(name, checked, verdict, change=toolbox.preview(name, checked))
  except BadCall as error:
    return Proposed(name, checked, verdict, error, for_now=True)


def calls_of(turn: Mapping[str, Any]) -> list[dict[str, Any]]:
  """Return the calls of a decided turn, with the arguments as edited."""
  calls = [dict(call) for call in turn['calls']]
  decision = turn['decision']
  if turn['status'] == 'edited':
    calls[decision.get('call') or 0]['arguments'] = decision['arguments']
  return calls


def described(proposed: Proposed) -> list[Line]:
  """Return the lines that show a call to the person: a diff, a command, or its arguments; the model wrote all of it."""
  return [line._replace(foreign=True) for line in _described(proposed)]


def _described(proposed: Proposed) -> list[Line]:
  if proposed.change is not None:
    path, before, after = proposed.change
    head = Line(f'{proposed.name} {visible(path, keep="")}', 'head')
    return [head, *diff(path, before, after)]
  if proposed.name == 'bash' and proposed.wrong is None:
    first, *others = proposed.arguments['command'].split('\n')
    lines = [Line(f'$ {visible_line(first)}', 'command')]
    lines += [Line(f'> {visible_line(line)}', 'command') for line in others]
    seconds = proposed.arguments.get('timeout')
    return lines + ([Line(f'  for at most {seconds:g} seconds', 'note')] if seconds is not None else [])
  if SERVED in proposed.name and proposed.wrong is None:
    server = proposed.name.partition(SERVED)[0]
    head = Line(f'{visible(proposed.name, keep="")} of the MCP server {server}, outside of the sandbox', 'head')
    shown = json.dumps(proposed.arguments, ensure_ascii=False, indent=2)
    return [head, *(Line(f'  {visible_line(line)}') for line in shown.split('\n'))]
  lines = [Line(visible(proposed.name, keep=''), 'head')]
  if not isinstance(proposed.arguments, Mapping):
    return [*lines, Line(f'  {visible(as_json(proposed.arguments), keep="")}')]
  for name, value in proposed.arguments.items():
    first, *others = (value if isinstance(value, str) else as_json(value)).split('\n')
    lines.append(Line(f'  {visible(str(name), keep="")}: {visible_line(first)}'))
    lines += [Line(f'  | {visible_line(line)}') for line in others]
  return lines


def output_of(ok: bool, text: str) -> list[Line]:
  """Return the first lines of a tool's output, for the person."""
  # Nothing is approved here, so that tabs are harmless.
  lines = visible(text.rstrip('\n'), keep='\n\t', prose=True).expandtabs(8).split('\n')
  found = [Line(line, 'note' if ok else 'wrong', foreign=True) for line in lines[:_SHOWN]]
  more = len(lines) - _SHOWN
  return found + ([Line(f'… {more} more lines, which only the model reads', 'note')] if more > 0 else [])


def as_json(value: Any) -> str:
  """Return a value as JSON, with non-ASCII characters as they are."""
  return json.dumps(value, ensure_ascii=False)
