"""Policies, which decide what calls run without asking, and which never run.

A policy is a list of rules, of which the first that matches decides; the person is asked about calls that match none.
In a text file, a line is a rule, or a comment if it begins with `#`:

    never write secrets/**
    allow read **
    allow bash pytest -q *
    never bash
    ask

As JSON: `[{"rule": "allow", "tool": "read", "pattern": "**"}, {"rule": "never", "tool": "bash"}]`.

A pattern is matched against the path of a call; for `glob` against its pattern, for `bash` against the whole command.
In paths, `*` and `?` do not match slashes, but `**` does. In commands, the `*` of an `allow` rule matches anything
except characters that join, redirect, nest or expand, so that `allow bash rg *` does not allow `rg x; rm -r .`.

The tool of an MCP server is named `SERVER__TOOL`, and its pattern is matched against its arguments as JSON with sorted
keys: `allow fs__read_file {"path": "docs/*"}`. The `*` of an `allow` rule stays within one value, and does not match
`..`, but a pattern that is only `*` matches all calls. Nothing else is known about such arguments: `docs/*` is text
there, links are not resolved. A rule for all tools, such as `never * secrets/**`, refuses calls in whose arguments a
string is such a path.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
import dataclasses
import json
import os
import pathlib
import re
from typing import Any, Literal

from sdpo_jax.environments.workspace.tools import TOOLS
from sdpo_jax.errors import UserError, first_line, short_repr

Verb = Literal['allow', 'ask', 'never']
ANY = '*'  # Stands for all tools.
SERVED = '__'  # Between the name of an MCP server and that of its tool; no other tool has it in its name.
_VERBS = ('allow', 'ask', 'never')
# With these, a command can run, read or write more than its first word suggests. A dollar suffices:
# `${x:=$'\\x24\\x28ls\\x29'} ${x@P}` and `$[x]` execute the value of a variable.
_JOINS = '&;|<>()`$\n\r\0'


@dataclasses.dataclass(frozen=True)
class CallRule:
  """A rule for calls of a tool that match a pattern."""

  verb: Verb
  tool: str = ANY
  pattern: str | None = None  # None: all calls of the tool.
  exact: bool = False  # Whether the pattern is literal, even if it has a *.

  def __str__(self) -> str:
    words = [self.verb] if self == CallRule(self.verb) else [self.verb, self.tool]
    said = ' '.join(words if self.pattern is None else [*words, self.pattern])
    return f'{said} (as it stands)' if self.exact and {*'*?'} & {*(self.pattern or '')} else said

  def matches(self, tool: str, subjects: Sequence[str]) -> bool:
    """Return whether the rule applies to a call.

    Args:
      tool: the name of the tool.
      subjects: what `subjects_of` returns for the call.
    """
    if self.tool not in (ANY, tool):
      return False
    if self.pattern is None:
      return True
    if self.exact:
      whole = re.compile(re.escape(self.pattern))
    elif tool == 'bash':
      whole = _command_pattern(self.pattern, narrow=self.verb == 'allow')
    elif SERVED in tool and self.tool != ANY:
      whole = _json_pattern(self.pattern, narrow=self.verb == 'allow')
    else:
      whole = _path_pattern(self.pattern)
    if SERVED in tool:
      subjects = subjects[1:] if self.tool == ANY else subjects[:1]
    # `allow` must match all names of a path; for other rules one suffices.
    return (all if self.verb == 'allow' else any)(whole.fullmatch(subject) for subject in subjects)


OTHERS = CallRule('ask')  # Decides about calls that match no rule.


class ApprovalPolicy:
  """The rules of a session; rules that the person adds override `ask` rules, but not `never` rules."""

  def __init__(self, rules: Iterable[CallRule] = ()):
    self.rules = tuple(rules)
    self.added: list[CallRule] = []

  def verdict(self, tool: str, arguments: Mapping[str, Any], workspace: pathlib.Path) -> CallRule:
    """Return the rule that decides about a call, whose arguments must be valid; `OTHERS` if none matches."""
    subjects = subjects_of(tool, arguments, workspace)
    found = next((rule for rule in self.rules if rule.matches(tool, subjects)), OTHERS)
    if found.verb == 'ask':
      found = next((rule for rule in self.added if rule.matches(tool, subjects)), found)
    if found.verb == 'allow' and tool == 'grep' and self._hides_files():
      return OTHERS  # grep reads all files below a folder, including forbidden ones.
    return found

  def never(self, tool: str) -> bool:
    """Return whether no call of a tool can ever run, so that the model need not know the tool."""
    about = next((rule for rule in self.rules if rule.tool in (ANY, tool)), None)
    return about is not None and about.verb == 'never' and about.pattern is None

  def _hides_files(self) -> bool:
    return any(rule.verb == 'never' and rule.pattern and rule.tool in (ANY, 'read', 'grep') for rule in self.rules)


def subjects_of(tool: str, arguments: Mapping[str, Any], workspace: pathlib.Path) -> list[str]:
  """Return what patterns are matched against.

  These are the path, as given and with links resolved, or the command; for a tool of a server its arguments as JSON,
  and then all strings in them, as if they were paths.
  """
  if SERVED in tool:
    return [as_subject(arguments), *(name for text in _strings(arguments) for name in _names(text, workspace))]
  if tool == 'bash':
    return [arguments['command'].strip(' ')]
  if tool == 'glob':
    return [arguments['pattern']]
  return _names(arguments.get('path', '.'), workspace)


def as_subject(arguments: Mapping[str, Any]) -> str:
  """Return arguments in the one form of JSON that patterns are matched against; raises ValueError for NaN."""
  return json.dumps(arguments, ensure_ascii=False, sort_keys=True, allow_nan=False)


def _strings(value: Any) -> Iterator[str]:
  if isinstance(value, str):
    yield value
  elif isinstance(value, (Mapping, list)):
    for inner in value.values() if isinstance(value, Mapping) else value:
      yield from _strings(inner)


def _names(path: str, workspace: pathlib.Path) -> list[str]:
  """Return a path relative to the workspace, as given and with links resolved."""
  root = os.path.realpath(workspace)
  path = os.path.join(root, path)
  if '\0' in path:  # All tools reject it.
    return [path]
  # Resolve `..` textually first, as the tools do.
  name = os.path.relpath(path, root)
  return list(dict.fromkeys((name, os.path.relpath(os.path.realpath(os.path.join(root, name)), root))))


def suggestion(tool: str, arguments: Mapping[str, Any], workspace: pathlib.Path) -> str:
  """Return the pattern of an `exact` rule that allows this call and no other: its path or its command."""
  return subjects_of(tool, arguments, workspace)[0]


def load(value: str, served: Collection[str] = ()) -> ApprovalPolicy:
  """Load the policy that --policy names: `ask`, or a file.

  Args:
    value: `ask`, or the path of a file.
    served: the names of the tools of MCP servers.

  Raises:
    UserError: the file cannot be read, or has an invalid rule.
  """
  if value == 'ask':
    return ApprovalPolicy()
  try:
    text = pathlib.Path(value).read_text(encoding='utf-8')
  except (OSError, UnicodeDecodeError) as error:
    raise UserError(f'--policy={value} cannot be read ({first_line(error)}): name a file of rules, or ask.') from error
  return ApprovalPolicy(parse(text, value, served))


def parse(text: str, where: str, served: Collection[str] = ()) -> list[CallRule]:
  """Parse rules from text or JSON.

  Args:
    text: the content of a policy file.
    where: the name of the file, for error messages.
    served: the names of the tools of MCP servers.

  Raises:
    UserError: a rule is invalid; the message has its number.
  """
  if text.lstrip().startswith('['):
    return _parse_json(text, where, served)
  rules = []
  for number, line in enumerate(text.split('\n'), start=1):
    stripped = line.strip()
    if stripped and not stripped.startswith('#'):
      verb, *rest = stripped.split(maxsplit=2)
      tool, pattern = (rest + [None, None])[:2]
      rules.append(make_rule(verb, ANY if tool is None else tool, pattern, f'{where}, line {number}', served))
  return rules


def make_rule(verb: Any, tool: Any, pattern: Any, where: str, served: Collection[str] = ()) -> CallRule:
  """Validate the parts of a rule, and return it; raises UserError, which begins with `where`."""
  if verb not in _VERBS:
    raise UserError(f'{where}: a rule must begin with allow, ask or never, not {short_repr(verb)}.')
  tools = dict.fromkeys((*TOOLS, *served))
  if tool not in (ANY, *tools):
    raise UserError(f'{where}: there is no tool {short_repr(tool)}, only {", ".join(tools)}, and * for all.')
  if pattern is not None and not (isinstance(pattern, str) and pattern):
    raise UserError(f'{where}: the pattern must be a text, not {short_repr(pattern)}.')
  if verb == 'allow' and tool == ANY:
    raise UserError(f'{where}: a rule with allow must name one tool: write a rule for each of {", ".join(tools)}.')
  if verb == 'allow' and pattern is None:
    raise UserError(
      f'{where}: allow needs a pattern, such as allow {tool} {"**" if tool in TOOLS and tool != "bash" else "*"}.'
    )
  return CallRule(verb, tool, pattern)


def _parse_json(text: str, where: str, served: Collection[str]) -> list[CallRule]:
  try:
    values = json.loads(text)
  except (ValueError, RecursionError) as error:
    raise UserError(f'{where} is not JSON ({first_line(error)}): correct it, or write one rule per line.') from error
  rules = []
  for number, value in enumerate(values, start=1):
    at = f'{where}, rule {number}'
    if not isinstance(value, dict) or value.keys() - {'rule', 'tool', 'pattern'}:
      raise UserError(f'{at}: a rule must be an object with rule, tool and pattern, not {short_repr(value)}.')
    rules.append(make_rule(value.get('rule'), value.get('tool', ANY), value.get('pattern'), at, served))
  return rules


def _command_pattern(pattern: str, *, narrow: bool) -> re.Pattern[str]:
  star = f'[^{re.escape(_JOINS)}]*' if narrow else '.*'
  return re.compile(star.join(map(re.escape, pattern.split('*'))), re.DOTALL)


def _json_pattern(pattern: str, *, narrow: bool) -> re.Pattern[str]:
  if not narrow or pattern == '*':
    return _command_pattern(pattern, narrow=False)
  parts = r'[^"\\]*'.join(map(re.escape, pattern.split('*')))
  return re.compile(parts if '..' in pattern else rf'(?!.*\.\.){parts}', re.DOTALL)


def _path_pattern(pattern: str) -> re.Pattern[str]:
  pieces = {'**/': '(?:.*/)?', '**': '.*', '*': '[^/]*', '?': '[^/]'}
  parts = re.split(r'(\*\*/|\*\*|\*|\?)', pattern.removeprefix('./'))
  return re.compile(''.join(pieces.get(part) or re.escape(part) for part in parts), re.DOTALL)
