"""A call as the person is to judge it: what it would do to the files as they are now, or why no tool takes it."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import json
import pathlib
from typing import Any

from sdpo_jax.environments.workspace.tools import BadCall, Toolbox, check
from sdpo_jax.terminal.changes import diff
from sdpo_jax.terminal.escaping import visible, visible_line
from sdpo_jax.terminal.policies import Policy, Verdict
from sdpo_jax.terminal.screen import Line


@dataclasses.dataclass(frozen=True)
class Wrong:
  """Why a call cannot be run."""

  text: str
  field: str | None = None
  line: int | None = None
  # Whether its arguments are right and only the files are not so, which a call before it may change.
  for_now: bool = False


@dataclasses.dataclass(frozen=True)
class Proposed:
  """A call, looked at beside the files and the policy of this moment."""

  name: str
  arguments: Mapping[str, Any]
  verdict: Verdict
  wrong: Wrong | None = None
  change: tuple[str, str, str] | None = None  # The path, and the text of that file before and after.

  @property
  def can_run(self) -> bool:
    """Whether it may be run if the person says so."""
    return self.verdict.verb != 'never' and self.wrong is None

  def same(self, other: Proposed) -> bool:
    """Return whether another look has found the same: whoever approves one approves the other."""
    return (self.name, self.arguments, self.change) == (other.name, other.arguments, other.change)


def look(name: str, arguments: Any, toolbox: Toolbox, policy: Policy, workspace: pathlib.Path) -> Proposed:
  """Return what there is to know of a call before it is run."""
  try:
    checked = check(name, arguments)
    if name not in toolbox.tools:
      raise BadCall('Commands are not allowed here: use the other tools.')
  except BadCall as error:
    return Proposed(name, arguments, Verdict('ask', None), Wrong(str(error), error.field, error.line))
  verdict = policy.verdict(name, checked, workspace)
  try:
    return Proposed(name, checked, verdict, change=toolbox.preview(name, checked))
  except BadCall as error:
    return Proposed(name, checked, verdict, Wrong(str(error), error.field, error.line, for_now=True))


def described(proposed: Proposed) -> list[Line]:
  """Return all that the person must see of a call, and nothing that is not the call's."""
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
  lines = [Line(visible(proposed.name, keep=''), 'head')]
  if not isinstance(proposed.arguments, Mapping):
    return [*lines, Line(f'  {visible(as_json(proposed.arguments), keep="")}')]
  for name, value in proposed.arguments.items():
    first, *others = (value if isinstance(value, str) else as_json(value)).split('\n')
    lines.append(Line(f'  {visible(str(name), keep="")}: {visible_line(first)}'))
    lines += [Line(f'  | {visible_line(line)}') for line in others]
  return lines


def as_json(value: Any) -> str:
  """Return a value as JSON, in which no character is lost."""
  return json.dumps(value, ensure_ascii=False)
