"""The tools of a coding agent: their names, parameters and answers.

A call is data until `Toolbox.call` runs it, with checked arguments. An error is an answer too, with details for
feedback: the argument, line or exit code concerned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import fnmatch
import json
import math
import pathlib
import re
import signal
import subprocess
import sys
from typing import Any, Literal

from sdpo_jax.environments.workspace.folder import Folder, PathError
from sdpo_jax.environments.workspace.shell import Cancellation, Shell
from sdpo_jax.errors import UserError, short_repr

SEARCH, SEARCH_S = pathlib.Path(__file__).with_name('search_child.py'), 10.0
MAX_FILE_BYTES = 4 * 2**20
MAX_ANSWER = 20_000  # Characters of an answer; a longer one loses its middle.
MAX_MATCHES = 200
MAX_LINE = 500  # Characters per line of a search's answer.
MAX_PATTERN = 1000
MAX_FIELD = 100  # Characters of an unknown argument's name.
DENIED = 'Denied by the user, and not run.'  # What a model reads in place of the result of a denied call.
_ANY = re.compile(r'(\\.|\[\^?\]?(?:\\.|[^\]\\])*\])|\.', re.DOTALL)  # A dot that is neither escaped nor in brackets.


@dataclasses.dataclass(frozen=True)
class ToolParameter:
  """One argument of a tool."""

  kind: Literal['string', 'integer', 'number', 'boolean']
  meaning: str
  required: bool = True
  least: float = -math.inf  # Smallest valid number.


@dataclasses.dataclass(frozen=True)
class Tool:
  """A tool as described to a model."""

  name: str
  meaning: str
  parameters: Mapping[str, ToolParameter]
  changes: bool  # Whether the tool can change the workspace.

  def schema(self) -> dict[str, Any]:
    """Return the tool in the form of chat templates, with its parameters as a JSON schema."""
    properties = {
      name: {'type': parameter.kind, 'description': parameter.meaning} for name, parameter in self.parameters.items()
    }
    required = [name for name, parameter in self.parameters.items() if parameter.required]
    parameters = {'type': 'object', 'properties': properties, 'required': required}
    function = {'name': self.name, 'description': self.meaning, 'parameters': parameters}
    return {'type': 'function', 'function': function}


@dataclasses.dataclass(frozen=True)
class ToolAnswer:
  """The answer of a tool."""

  ok: bool  # False: the call failed.
  text: str  # For the model; errors begin with one sentence.
  exit_code: int | None = None  # Exit code of a command.
  field: str | None = None  # The argument at fault.
  line: int | None = None  # Line of the file, from 1, where an edit failed.
  dropped: int = 0  # Characters left out of the text.


class BadCall(Exception):
  """An invalid call; the message is one sentence for the agent."""

  def __init__(self, message: str, field: str | None = None, line: int | None = None):
    super().__init__(message)
    self.field, self.line = field, line


_PATH = ToolParameter('string', 'Path of a file, relative to the workspace.')
TOOLS = {
  tool.name: tool
  for tool in (
    Tool(
      'read',
      'Show the lines of a file with their numbers.',
      {
        'path': _PATH,
        'offset': ToolParameter('integer', 'First line to show, from 1.', False, 1),
        'limit': ToolParameter('integer', 'Number of lines to show.', False, 1),
      },
      False,
    ),
    Tool(
      'write',
      'Write a whole file.',
      {'path': _PATH, 'content': ToolParameter('string', 'All that the file is to hold.')},
      True,
    ),
    Tool(
      'edit',
      'Replace a piece of text in a file, which must occur once.',
      {
        'path': _PATH,
        'old': ToolParameter('string', 'Text that is in the file.'),
        'new': ToolParameter('string', 'Text to put in its place.'),
        'all': ToolParameter('boolean', 'Replace every occurrence.', False),
      },
      True,
    ),
    Tool(
      'edit_lines',
      'Replace lines of a file.',
      {
        'path': _PATH,
        'start': ToolParameter('integer', 'First line to replace, from 1.', True, 1),
        'end': ToolParameter('integer', 'Last line to replace; start - 1 inserts before start.', True, 0),
        'content': ToolParameter('string', 'Lines to put in their place.'),
      },
      True,
    ),
    Tool(
      'glob',
      'List the files whose path matches a pattern such as **/*.py.',
      {'pattern': ToolParameter('string', 'Pattern of paths; ** stands for any number of folders.')},
      False,
    ),
    Tool(
      'grep',
      'List the lines that match a regular expression.',
      {
        'pattern': ToolParameter('string', 'Regular expression.'),
        'path': ToolParameter('string', 'Folder or file to search.', False),
        'glob': ToolParameter('string', 'Pattern of the paths to search.', False),
      },
      False,
    ),
    Tool(
      'bash',
      'Run a command in the workspace, without network.',
      {
        'command': ToolParameter('string', 'The command.'),
        'timeout': ToolParameter('number', 'Seconds that it may take.', False, 0.1),
      },
      True,
    ),
  )
}


def check(name: str, arguments: Any) -> dict[str, Any]:
  """Return the arguments of a call; raises BadCall if the tool or an argument is unknown or invalid."""
  if name not in TOOLS:
    raise BadCall(f'There is no tool {short_repr(name)}; there are {", ".join(TOOLS)}.')
  parameters = TOOLS[name].parameters
  if not isinstance(arguments, Mapping):
    raise BadCall(f'The arguments of {name} must be an object, not {short_repr(arguments)}.')
  for given in arguments:
    if given not in parameters:
      raise BadCall(f'{name} takes no {short_repr(given)}; it takes {", ".join(parameters)}.', str(given)[:MAX_FIELD])
  for field, parameter in parameters.items():
    if field not in arguments:
      if parameter.required:
        raise BadCall(f'{name} needs {field!r}: {parameter.meaning}', field)
      continue
    value = arguments[field]
    types = {'string': str, 'integer': int, 'number': (int, float), 'boolean': bool}
    fits = isinstance(value, types[parameter.kind]) and isinstance(value, bool) == (parameter.kind == 'boolean')
    if not fits:
      raise BadCall(f'{field!r} of {name} must be of type {parameter.kind}, not {short_repr(value)}.', field)
    if isinstance(value, str):
      _check_whole(value, f'{field!r} of {name}', field)
    if parameter.kind in ('integer', 'number') and not parameter.least <= value < math.inf:
      raise BadCall(f'{field!r} of {name} must be at least {parameter.least:g}, not {short_repr(value)}.', field)
  return dict(arguments)


class Toolbox:
  """Runs the tools of an agent in one workspace."""

  def __init__(self, workspace: pathlib.Path, shell: Shell | None):
    """Open a workspace.

    Args:
      workspace: a folder, the only one that the tools read and write.
      shell: runs commands in it; None: commands are not available.
    """
    self._folder, self._shell = Folder(workspace), shell

  @property
  def tools(self) -> dict[str, Tool]:
    """Return the available tools by name."""
    return {name: tool for name, tool in TOOLS.items() if name != 'bash' or self._shell is not None}

  def call(
    self,
    name: str,
    arguments: Any,
    *,
    cancelled: Cancellation | None = None,
    shown: Callable[[bytes], None] = lambda chunk: None,
  ) -> ToolAnswer:
    """Run a tool; errors are answers, too.

    Args:
      name: the tool's name.
      arguments: an object, as the model wrote it.
      cancelled: lets a signal handler or another thread end a command.
      shown: called with each piece of a command's output, and often with none while it runs.
    """
    try:
      checked = self.checked(name, arguments)
      if name == 'bash':
        return self._bash(**checked, cancelled=cancelled, shown=shown)
      run: Callable[..., str] = getattr(self, f'_{name}')
      # File names may be bytes that are not valid text.
      text, dropped = shortened(run(**checked).encode(errors='backslashreplace').decode())
      return ToolAnswer(True, text, dropped=dropped)
    except PathError as error:
      return ToolAnswer(False, str(error), field='path')
    except BadCall as error:
      return ToolAnswer(False, str(error), field=error.field, line=error.line)

  def checked(self, name: str, arguments: Any) -> dict[str, Any]:
    """Return the arguments of a call; raises BadCall as `check`, and if the tool is not available."""
    checked = check(name, arguments)
    if name not in self.tools:
      raise BadCall('Commands are not allowed here: use the other tools.')
    return checked

  def preview(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Return path, old text and new text of the file that a call with checked arguments would write; else None.

    Raises:
      BadCall: the call would fail.
    """
    changes = {'write': self._written, 'edit': self._edited, 'edit_lines': self._with_lines}
    if name not in changes:
      return None
    try:
      return arguments['path'], *changes[name](**arguments)
    except PathError as error:
      raise BadCall(str(error), 'path') from error

  def checkpoint(self, path: str, before: str, after: str) -> dict[str, str | None]:
    """Return what `restore` needs to take back a change of a file that `preview` has returned."""
    try:
      self._folder.readable(path)
    except PathError:
      return {'path': path, 'before': None, 'after': after}
    return {'path': path, 'before': before, 'after': after}

  def restore(self, path: str, before: str | None, after: str) -> str:
    """Give a file the content from before a call, or remove it if there was none; return a sentence about it.

    Raises:
      UserError: the file has another content than before the call or after it.
    """
    try:
      now = self._text_if_any(path)
      if now == before:  # The call has failed, or somebody was faster.
        return f'{path} is already as it was before.'
      if now != after:
        raise UserError(f'{path} was changed since: restore it by hand, or undo that change first.')
      if before is None:
        self._folder.remove(path)
        return f'{path}, which was new, is removed.'
      self._folder.write(path, encoded(before))
    except PathError as error:
      raise UserError(f'{error} Nothing is restored.') from error
    return f'{path} is as it was before.'

  def _read(self, path: str, offset: int = 1, limit: int = 2000) -> str:
    lines = self._text(path).splitlines()
    if offset > max(1, len(lines)):
      raise BadCall(f'{path} has {len(lines)} lines, and offset is {offset}.', 'offset')
    shown = lines[offset - 1 : offset - 1 + limit]
    text = '\n'.join(f'{number}\t{line}' for number, line in enumerate(shown, start=offset))
    left = len(lines) - (offset - 1 + len(shown))
    return text + (f'\n({left} more lines)' if left else '') if lines else '(The file is empty.)'

  def _write(self, path: str, content: str) -> str:
    self._written(path, content)
    there = self._folder.write(path, encoded(content))
    count = len(content.splitlines())
    return f'{"Replaced" if there else "Wrote"} {path}: {count} line{"" if count == 1 else "s"}.'

  def _edit(self, path: str, old: str, new: str, all: bool = False) -> str:
    before, after = self._edited(path, old, new, all)
    self._folder.write(path, encoded(after))
    count = before.count(old) if all else 1
    return f'Replaced {count} {"piece" if count == 1 else "pieces"} of text in {path}.'

  def _edited(self, path: str, old: str, new: str, all: bool = False) -> tuple[str, str]:
    text = self._text(path)
    if not old:
      raise BadCall("'old' of edit is empty: give the text to replace, or use write or edit_lines.", 'old')
    if old == new:
      raise BadCall("'old' and 'new' of edit are the same.", 'new')
    count = text.count(old)
    if not count:
      raise BadCall(f"'old' does not occur in {path}.", 'old', _nearest(text, old))
    if count > 1 and not all:
      second = text.index(old, text.index(old) + 1)
      line = text.count('\n', 0, second) + 1
      raise BadCall(f"'old' occurs {count} times in {path}, next in line {line}: give more of it, or all.", 'old', line)
    return text, text.replace(old, new)

  def _edit_lines(self, path: str, start: int, end: int, content: str) -> str:
    before, after = self._with_lines(path, start, end, content)
    self._folder.write(path, encoded(after))
    change = len(after.splitlines()) - len(before.splitlines())
    return f'Replaced lines {start} to {end} of {path} ({change:+d} lines).'

  def _with_lines(self, path: str, start: int, end: int, content: str) -> tuple[str, str]:
    text = self._text(path)
    lines = text.splitlines(keepends=True)
    if start > len(lines) + 1:
      raise BadCall(f'{path} has {len(lines)} lines, and start is {start}.', 'start', len(lines))
    if not start - 1 <= end <= len(lines):
      raise BadCall(f'{path} has {len(lines)} lines: end must lie between {start - 1} and that, not {end}.', 'end')
    if lines and not lines[-1].endswith('\n') and start > len(lines):
      lines[-1] += '\n'
    if content and not content.endswith('\n') and end < len(lines):
      content += '\n'
    return text, ''.join([*lines[: start - 1], content, *lines[end:]])

  def _glob(self, pattern: str) -> str:
    matches = matcher(pattern).fullmatch
    found = [name for name in self._folder.files() if matches(name)]
    shown = '\n'.join(found[:MAX_MATCHES])
    more = len(found) - MAX_MATCHES
    return (shown + (f'\n({more} more files)' if more > 0 else '')) or '(No file matches.)'

  def _grep(self, pattern: str, path: str = '.', glob: str = '**') -> str:
    if len(pattern) > MAX_PATTERN:
      raise BadCall(f"'pattern' of grep has more than {MAX_PATTERN} characters.", 'pattern')
    request = {
      'folder': str(self._folder.path),
      'path': self._folder.readable(path),
      'pattern': pattern,
      'names': matcher(glob).pattern,
      'max_file_bytes': MAX_FILE_BYTES,
      'max_line': MAX_LINE,
      'max_matches': MAX_MATCHES,
    }
    try:
      done = subprocess.run(
        [sys.executable, '-I', '-X', 'utf8', str(SEARCH)],
        input=json.dumps(request).encode(),
        capture_output=True,
        timeout=SEARCH_S,
        check=True,
        env={},
      )
    except subprocess.TimeoutExpired as error:
      raise BadCall(f'The search took more than {SEARCH_S:g} seconds: use a simpler pattern.', 'pattern') from error
    except subprocess.CalledProcessError as error:  # Some patterns need more memory than is available.
      if error.returncode == -signal.SIGINT:  # A Ctrl-C at a terminal reaches the search, too.
        raise BadCall('The search was interrupted by the person.') from error
      raise BadCall(
        f'The search has ended with exit code {error.returncode}: use a simpler pattern.', 'pattern'
      ) from error
    found = json.loads(done.stdout)
    if 'wrong' in found:
      raise BadCall(f"'pattern' of grep is not a valid regular expression ({found['wrong']}).", 'pattern')
    more = ['(There are more: narrow the pattern.)'] * found['more']
    return '\n'.join([*found['found'], *more]) or '(No line matches.)'

  def _bash(
    self,
    command: str,
    timeout: float | None = None,
    *,
    cancelled: Cancellation | None,
    shown: Callable[[bytes], None],
  ) -> ToolAnswer:
    assert self._shell is not None
    if '\0' in command:
      raise BadCall("'command' of bash holds a null byte.", 'command')
    try:
      report = self._shell.run(command, wall_s=timeout, cancelled=cancelled, shown=shown)
    except UserError as error:  # The workspace was removed or made unreadable.
      return ToolAnswer(False, f'The command could not be run: {error}')
    output = report.output.decode(errors='replace')
    text, dropped = shortened(output)
    dropped += report.dropped
    if report.status == 'failed':
      return ToolAnswer(False, f'The command could not be run: {report.reason}.', dropped=dropped)
    if report.status != 'ended':
      why = {
        'timeout': f'took more than {report.wall_s:.1f} seconds and was ended',
        'cancelled': f'was interrupted by the person after {report.wall_s:.1f} seconds',
        'stopped': f'was ended: {report.reason}; its files are still there',
      }
      return ToolAnswer(False, f'The command {why[report.status]}.\n{text}', dropped=dropped)
    ended = f'Exit code {report.exit_code}.' if report.exit_code else ''
    note = '' if report.note in self._shell.notes else report.note  # New since the person was told.
    said = '\n'.join(filter(None, (ended, text, note))) or '(No output.)'
    return ToolAnswer(not report.exit_code, said, report.exit_code, dropped=dropped)

  def _text(self, path: str) -> str:
    try:
      return self._folder.read(path, MAX_FILE_BYTES).decode()
    except UnicodeDecodeError as error:
      raise PathError(f'{path} is not text in UTF-8.') from error

  def _written(self, path: str, content: str) -> tuple[str, str]:
    """Return the text of a file, '' if it is missing, and the new one; raises PathError if the old one is not text.

    Such a file is not replaced, since the change could not be shown for review.
    """
    return self._text_if_any(path) or '', content

  def _text_if_any(self, path: str) -> str | None:
    """Return the text of a file; None if it is missing."""
    try:
      return self._text(path)
    except PathError as error:
      if isinstance(error.__cause__, FileNotFoundError):
        return None
      raise


def denied(reason: str | None) -> str:
  """Return what a model reads in place of the result of a call that the user has denied, with the reason if any."""
  return '\n'.join(filter(None, (DENIED, reason)))


def encoded(text: str) -> bytes:
  """Encode a text for a file; raises BadCall for lone surrogates."""
  _check_whole(text, 'The text', 'content')
  content = text.encode()
  if len(content) > MAX_FILE_BYTES:
    raise BadCall(f'The text has {len(content)} bytes, more than the {MAX_FILE_BYTES} that are written.', 'content')
  return content


def _check_whole(text: str, what: str, field: str) -> None:
  """Raise BadCall for lone surrogates, which JSON can hold, but files and paths cannot."""
  try:
    text.encode()
  except UnicodeEncodeError as error:
    raise BadCall(f'{what} holds half of a character at position {error.start}.', field) from error


def shortened(text: str, limit: int = MAX_ANSWER) -> tuple[str, int]:
  """Cut the middle out of a text longer than `limit` characters; return it with the number of characters left out."""
  dropped = len(text) - limit
  if dropped <= 0:
    return text, 0
  half = limit // 2
  return f'{text[:half]}\n… {dropped} characters are left out …\n{text[len(text) - half :]}', dropped


def _nearest(text: str, old: str) -> int | None:
  """Return the number of the line that equals the first line of `old`, ignoring indentation; None if there is none."""
  first = next((line.strip() for line in old.splitlines() if line.strip()), None)
  return next((number for number, line in enumerate(text.splitlines(), 1) if first and line.strip() == first), None)


def matcher(pattern: str) -> re.Pattern[str]:
  """Return a regular expression for whole paths that match a pattern in which ** stands for any number of folders."""
  if not pattern or len(pattern) > MAX_PATTERN:
    raise BadCall(f"'pattern' must have between 1 and {MAX_PATTERN} characters.", 'pattern')
  blocks: list[list[str]] = [[]]  # Parts of the path between two **.
  for part in pattern.removeprefix('./').split('/'):
    if part == '**':
      blocks.append([])
    else:
      blocks[-1].append(f'{_part(part)}/')
  first, *others = (''.join(block) for block in blocks)
  if not others:
    return re.compile(first.removesuffix('/'))
  *between, last = others
  # The first match of a block between two ** is as good as any later one: trying those, too, could take years.
  placed = ''.join(f'(?>(?:[^/]+/)*?{block})' for block in between if block)
  return re.compile(f'{first}{placed}(?:[^/]+/)*{last.removesuffix("/") or "[^/]+"}')


def _part(pattern: str) -> str:
  """Return the regular expression for one part of a path; no wildcard matches a slash."""
  expression = fnmatch.translate(pattern).removeprefix('(?s:').removesuffix(')\\Z').removesuffix(')\\z')
  return _ANY.sub(lambda found: found[1] or '[^/]', expression)
