"""Servers of the Model Context Protocol (https://modelcontextprotocol.io), whose tools the model may propose to call.

A server is a program of the user that runs with the user's rights, outside of the sandbox. The tools that it lists
when a session begins are those of the session: one that changes or disappears later is no longer called, since the
model and the person know it as it was. What a server says about its tools is not trusted, so its invisible characters
are shown by their names, to the model as to the person.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import logging
import os
import pathlib
import re
import shutil
import sys
import threading
from typing import IO, Any, ClassVar, Literal, TypeVar

import anyio
from anyio.from_thread import BlockingPortal, start_blocking_portal
from mcp import ClientSession, MCPError, StdioServerParameters, types
from mcp.client.stdio import get_default_environment, stdio_client
import pydantic

from sdpo_jax.environments.workspace.boundary import outside
from sdpo_jax.environments.workspace.shell import LOOK_S, Cancellation, Shell
from sdpo_jax.environments.workspace.tools import TOOLS, BadCall, Tool, ToolAnswer, Toolbox, shortened
from sdpo_jax.errors import UserError, first_line, printable, short_repr
from sdpo_jax.files import make_directory, read_json_object
from sdpo_jax.invisible import is_visible
from sdpo_jax.tables import counted
from sdpo_jax.terminal.embedded import CHILD
from sdpo_jax.terminal.escaping import visible
from sdpo_jax.terminal.policies import SERVED, as_subject

START_S, CALL_S, END_S = 60.0, 60.0, 2.0  # Seconds for the start, a call, and the last words of a server.
MAX_LOG = 2**20  # Bytes that are kept of what a server writes to stderr.
MAX_MEANING, MAX_SCHEMA = 1_000, 16_000  # Characters of a tool's description, and of the schema of its arguments.
_NAME = re.compile(r'[A-Za-z0-9-]+(_[A-Za-z0-9-]+)*')  # Without a double underscore, so that names of tools are unique.
_TOOL = re.compile(r'[A-Za-z0-9_.-]{1,64}')
_T = TypeVar('_T')


class McpProgram(StdioServerParameters):
  """How to start a server, as its entry in a file says it; other keys, such as autoApprove, have no effect."""

  timeout: pydantic.PositiveFloat = CALL_S  # Seconds that a call may take.
  disabled: bool = False
  type: Literal['stdio'] = 'stdio'
  url: None = None  # Servers elsewhere are not supported.


@dataclasses.dataclass(frozen=True)
class McpTool:
  """A tool of a server, as the model knows it."""

  changes: ClassVar[bool] = True  # Whether it can change the workspace: nobody knows.
  name: str  # SERVER__TOOL.
  meaning: str
  parameters: Mapping[str, Any]  # The JSON schema of its arguments.

  def schema(self) -> dict[str, Any]:
    """Return the tool in the form of chat templates."""
    function = {'name': self.name, 'description': self.meaning, 'parameters': self.parameters}
    return {'type': 'function', 'function': function}


def load(path: str, workspace: pathlib.Path) -> dict[str, McpProgram]:
  """Read the servers of a file {"mcpServers": {NAME: {"command": …, "args": […], "env": {…}}}}, as other agents do.

  A server starts in the folder of the file, or in its "cwd".

  Raises:
    UserError: the file is invalid, or it or a program in it is in the workspace, where the model could change it.
  """
  file = pathlib.Path(outside(workspace, path, f'--mcp={path}'))
  servers = read_json_object(file, 'name another file with --mcp').get('mcpServers')
  if not isinstance(servers, dict) or not servers:
    raise UserError(f'{file} names no servers: write {{"mcpServers": {{"NAME": {{"command": …, "args": […]}}}}}}.')
  found = {name: _program(file, name, values, workspace) for name, values in servers.items()}
  return {name: program for name, program in found.items() if not program.disabled}


def _program(file: pathlib.Path, name: str, values: Any, workspace: pathlib.Path) -> McpProgram:
  where = f'{file}, server {short_repr(name)}'
  if not _NAME.fullmatch(name):
    raise UserError(f'{where}: name it with letters, digits, - and single _ between them.')
  try:
    given = McpProgram.model_validate(values)
  except pydantic.ValidationError as error:
    raise UserError(f'{where}: {_reason(error)}.') from error
  cwd = os.path.join(file.parent, given.cwd or '')
  env = {**get_default_environment(), **(given.env or {})}
  command = os.path.join(cwd, given.command) if os.sep in given.command else given.command
  program = shutil.which(command, path=env.get('PATH'))
  if program is None or not os.path.isdir(cwd):
    wrong = f'there is no program {short_repr(given.command)}' if program is None else f'there is no folder {cwd}'
    raise UserError(f'{where}: {wrong}: correct the file, or leave the server out.')
  # Other folders may be those to work in.
  for path in (cwd, program, *filter(os.path.isfile, (os.path.join(cwd, argument) for argument in given.args))):
    outside(workspace, path, where)
  return given.model_copy(update={'command': os.path.abspath(program), 'env': env, 'cwd': cwd})


@contextlib.contextmanager
def started(
  programs: Mapping[str, McpProgram], logs: pathlib.Path, known: Sequence[McpTool] | None = None
) -> Iterator[McpServers]:
  """Run the servers of a session, whose client has an event loop in a thread of its own, until this is left.

  Args:
    programs: how to start them, by name.
    logs: a folder for what they write to stderr.
    known: the tools of a session that is resumed; None: a new session has those that the servers list.

  Raises:
    UserError: the folder cannot be made, or, in a new session, a server cannot be started.
  """
  try:
    make_directory(logs)
  except OSError as error:
    raise UserError(f'{logs} cannot be made ({first_line(error)}): name another folder with --state.') from error
  for name in ('client', 'mcp'):  # What the client says about messages that it drops must not be on the screen.
    logging.getLogger(name).setLevel(logging.CRITICAL)
  with start_blocking_portal(name='mcp') as portal:
    servers = McpServers(portal, programs, logs, known)
    try:
      servers.start()
      yield servers
    finally:
      servers.close()


class McpServers:
  """The running servers of a session; see `started` for how to make it."""

  def __init__(
    self,
    portal: BlockingPortal,
    programs: Mapping[str, McpProgram],
    logs: pathlib.Path,
    known: Sequence[McpTool] | None,
  ):
    self._portal, self._programs, self._logs, self._new = portal, programs, logs, known is None
    self.tools = {tool.name: tool for tool in known or ()}
    self._running: dict[str, _Connection] = {}
    self.said: list[str] = []  # Sentences about them for the person.

  def toolbox(self, workspace: pathlib.Path, shell: Shell | None) -> Toolbox:
    """Make the tools of a workspace, together with those of the servers; arguments as those of `Toolbox`."""
    return McpToolbox(workspace, shell, self)

  def check(self, name: str, arguments: Any) -> dict[str, Any]:
    """Return the arguments of a call, which only the server checks; raises BadCall if the tool has changed."""
    tool = self.tools[name]
    if not isinstance(arguments, Mapping):
      raise BadCall(f'The arguments of {name} must be an object, not {short_repr(arguments)}.')
    try:
      as_subject(arguments).encode()
    except (ValueError, RecursionError) as error:
      raise BadCall(f'The arguments of {name} hold what JSON cannot ({first_line(error)}).') from error
    server = name.partition(SERVED)[0]
    if server not in self._programs:
      raise BadCall(f'The session has begun with an MCP server {server}, which the file of --mcp no longer names.')
    if server in self._running and self._running[server].tools.get(name) != tool:
      raise BadCall(f'The MCP server {server} has changed or removed {name} since the session began: do not use it.')
    return dict(arguments)

  def start(self) -> None:
    """Start all servers; raises UserError as `started`."""
    for name in self._programs:
      try:
        running = self._connected(name, START_S, functools.partial(self._limited, None, lambda chunk: None))
      except UserError as error:
        if self._new:
          raise
        self.said.append(f'{error} Until then its tools fail.')
        continue
      if self._new:
        self.tools.update(running.tools)
      mine = {tool: value for tool, value in self.tools.items() if tool.partition(SERVED)[0] == name}
      self.said.append(f'MCP server {name}: {counted(len(mine), "tool")}; it runs as you, outside of the sandbox.')
      self.said += running.notes
      gone = [tool for tool in mine if running.tools.get(tool) != mine[tool]]
      if gone:
        self.said.append(f'It has changed or removed these since the session began, so they fail: {", ".join(gone)}.')

  def call(
    self,
    name: str,
    arguments: Any,
    *,
    cancelled: Cancellation | None = None,
    shown: Callable[[bytes], None] = lambda chunk: None,
  ) -> ToolAnswer:
    """Call a tool, and return its answer; a server that has ended is started anew before.

    Arguments as in `Toolbox.call`; a server has no output to show.
    """
    server, _, tool = name.partition(SERVED)
    limit, limited = self._programs[server].timeout, functools.partial(self._limited, cancelled, shown)
    try:
      running = self._connected(server, limit, limited)
      self.check(name, arguments)  # The tools may be others now.
      return _answer(limited(limit, running.session.call_tool, tool, dict(arguments)))
    except (UserError, BadCall) as error:
      return ToolAnswer(False, str(error), field=getattr(error, 'field', None))
    except (TimeoutError, _StoppedError) as error:
      said = self._running[server].junk() if server in self._running else ''
      return ToolAnswer(False, f'The call {error}; whether it has done its work is not known.{said}')
    except MCPError as error:
      if error.code != types.CONNECTION_CLOSED:
        return _cut(False, f'The MCP server {server} refused the call: {error}')
      text = 'Whether the call has done its work is not known; the next one starts the server anew.'
      return ToolAnswer(False, f'{self._end(server)} {text}')
    except (RuntimeError, ValueError) as error:  # From the client, about the content of the answer.
      return ToolAnswer(False, f'The MCP server {server} gave an invalid answer: {_reason(error)}.')

  def _connected(self, name: str, limit: float, limited: Callable[..., Any]) -> _Connection:
    """Return a server that answers, with its current tools; raises UserError if it cannot be started."""
    running = self._running.get(name)
    if running is not None:
      try:
        limited(limit, running.refresh)
        return running
      except TimeoutError as error:
        raise UserError(f'{self._end(name, "did not answer")} The next call starts it anew.') from error
      except MCPError:
        self._end(name)  # It has ended since.
    running = _Connection(name, self._programs[name], self._logs / f'{name}.log')
    try:
      running.stack.enter_context(self._portal.wrap_async_context_manager(running.live()))
    except OSError as error:
      raise UserError(f'The MCP server {name} cannot be started: {first_line(error)}.') from error
    self._running[name] = running
    try:
      limited(START_S, running.greet)
      return running
    except _StoppedError:
      self._end(name)
      raise
    except TimeoutError:
      how = f'did not answer within {START_S:g} seconds'
    except (MCPError, RuntimeError, ValueError) as error:
      closed = getattr(error, 'code', None) == types.CONNECTION_CLOSED
      how = 'ended' if closed else f'began with an invalid answer ({_reason(error)})'
    raise UserError(f'{self._end(name, how)} Correct it in the file of --mcp, or leave it out there.')

  def _limited(self, cancelled: Cancellation | None, shown: Callable[[bytes], None], *asked: Any) -> Any:
    """Ask a server; raises TimeoutError, or _StoppedError if the person stops it."""
    answer = self._portal.start_task_soon(_limited, cancelled, *asked)
    while not concurrent.futures.wait([answer], LOOK_S).done:
      shown(b'')
    return answer.result()

  def _end(self, name: str, how: str = 'ended') -> str:
    """End a server, or what is left of it, and return a sentence about it."""
    running = self._running.pop(name)
    running.stack.close()
    return f'The MCP server {name} {how}.{running.words()}{running.junk()}'

  def close(self) -> None:
    """End all servers."""
    for name in [*self._running]:
      self._end(name)


async def _limited(
  cancelled: Cancellation | None, seconds: float, ask: Callable[..., Awaitable[_T]], *values: Any
) -> _T:
  with contextlib.ExitStack() as stack:
    scope = stack.enter_context(anyio.move_on_after(seconds))
    if cancelled is not None:
      loop = asyncio.get_running_loop()
      loop.add_reader(cancelled, scope.cancel)
      stack.callback(loop.remove_reader, cancelled)
    return await ask(*values)
  if anyio.current_time() >= scope.deadline:
    raise TimeoutError(f'took more than {seconds:g} seconds and was given up')
  raise _StoppedError('was stopped by the person')


class _StoppedError(Exception):
  """The person has pressed Ctrl-C."""


class _Connection:
  """A process of a server, and the session with it."""

  def __init__(self, name: str, program: McpProgram, log: pathlib.Path):
    self._name, self._program, self._log = name, program, log
    self.stack = contextlib.ExitStack()  # Holds `live`.
    self.tools: Mapping[str, McpTool] = {}
    self.notes: list[str] = []  # What was cut or left out of its tools.
    self._changed = False  # Whether it has said so of its tools since they were asked for.
    self._words, self._junk = b'', ''
    self.session: ClientSession

  def words(self) -> str:
    """Return a sentence with the last line that it wrote to stderr."""
    words = self._words.decode(errors='replace').strip().rpartition('\n')[2]
    return f' Its last words: {printable(words, 200)} ({self._log})' if words else ''

  def junk(self) -> str:
    """Return a sentence with the last line of its stdout that is no message of the protocol, unless told before."""
    junk, self._junk = self._junk, ''
    return f' Its stdout had what is no message: {junk}' if junk else ''

  @contextlib.asynccontextmanager
  async def live(self) -> AsyncIterator[None]:
    """Run the server, in a process group of its own, so that only this program gets Ctrl-C, until this is left."""
    given = self._program
    command = ['-I', str(CHILD), str(os.getpid()), given.command, *given.args]
    text = {'encoding': 'utf-8', 'encoding_error_handler': 'replace'}
    program = given.model_copy(update={'command': sys.executable, 'args': command, **text})
    log = open(self._log, 'ab', buffering=0)
    source, sink = os.pipe()
    keeper = threading.Thread(target=self._keep_stderr, args=(source, log), daemon=True)
    keeper.start()
    try:
      with open(sink, 'w') as stderr:
        async with (
          stdio_client(program, stderr) as streams,
          ClientSession(*streams, message_handler=self._hear) as self.session,
        ):
          yield
    finally:
      keeper.join(END_S)  # A child of its own may still hold its stderr open.

  def _keep_stderr(self, source: int, log: IO[bytes]) -> None:
    """Write what the server writes to stderr to its log, from whose beginning it goes on when that is full."""
    with open(source, 'rb', buffering=0) as stderr, log:
      while chunk := stderr.read(MAX_LOG):
        self._words = (self._words + chunk)[-1000:]
        if log.tell() + len(chunk) > MAX_LOG:
          log.seek(0)
          log.truncate()
        with contextlib.suppress(OSError):  # The disk may be full.
          log.write(chunk)

  async def greet(self) -> None:
    """Begin the session and ask for the tools."""
    await self.session.initialize()
    await self._ask_tools()

  async def refresh(self) -> None:
    """Ask for the tools if they have changed, or else for a sign of life."""
    try:
      await (self._ask_tools() if self._changed else self.session.send_ping())
    except MCPError as error:
      if error.code == types.CONNECTION_CLOSED:
        raise

  async def _hear(self, message: Any) -> None:
    self._changed |= isinstance(message, types.ToolListChangedNotification)
    if isinstance(message, pydantic.ValidationError):
      self._junk = printable(str(message.errors()[0]['input']).strip(), 100)

  async def _ask_tools(self) -> None:
    found: dict[str, McpTool] = {}
    cursor, self.notes, self._changed = '', [], False
    while cursor is not None:
      page = await self.session.list_tools(params=types.PaginatedRequestParams(cursor=cursor or None))
      for tool in page.tools:
        self._add(found, tool)
      cursor = page.next_cursor
    self.tools = found

  def _add(self, found: dict[str, McpTool], tool: types.Tool) -> None:
    name, meaning, wrong = f'{self._name}{SERVED}{tool.name}', visible(tool.description or ''), None
    schema = _visible(tool.input_schema)
    text = json.dumps(schema, ensure_ascii=False)
    if not _TOOL.fullmatch(tool.name) or name in found:
      wrong = 'its name is used twice' if name in found else 'its name must have at most 64 letters, digits, _, . and -'
    elif len(text) > MAX_SCHEMA:
      wrong = f'the schema of its arguments has {len(text)} characters, more than {MAX_SCHEMA}'
    elif not all(map(is_visible, text)):
      wrong = 'the schema of its arguments has invisible characters'
    if wrong is not None:
      self.notes.append(f'Its tool {printable(tool.name)} is left out: {wrong}.')
      return
    if len(meaning) > MAX_MEANING:
      self.notes.append(f'The description of {name} is cut from {len(meaning)} to {MAX_MEANING} characters.')
      meaning = meaning[:MAX_MEANING] + '…'
    found[name] = McpTool(name, meaning, schema)


class McpToolbox(Toolbox):
  """The tools of a workspace, and those of servers."""

  def __init__(self, workspace: pathlib.Path, shell: Shell | None, servers: McpServers):
    super().__init__(workspace, shell)
    self._servers = servers

  @property
  def tools(self) -> dict[str, Tool | McpTool]:
    """Return the available tools by name."""
    return {**super().tools, **self._servers.tools}

  def checked(self, name: str, arguments: Any) -> dict[str, Any]:
    if name in self._servers.tools:
      return self._servers.check(name, arguments)
    if name not in TOOLS:
      raise BadCall(f'There is no tool {short_repr(name)}; there are {", ".join(self.tools)}.')
    return super().checked(name, arguments)

  def call(self, name: str, arguments: Any, **more: Any) -> ToolAnswer:
    call = self._servers.call if name in self._servers.tools else super().call
    return call(name, arguments, **more)

  def preview(self, name: str, arguments: Any) -> tuple[str, str, str] | None:
    return None if name in self._servers.tools else super().preview(name, arguments)


def _visible(schema: Any) -> Any:
  """Return a schema in whose descriptions every character is visible."""
  if isinstance(schema, dict):
    said = {name: value for name, value in schema.items() if name == 'description' and isinstance(value, str)}
    return {name: visible(value) if name in said else _visible(value) for name, value in schema.items()}
  return [*map(_visible, schema)] if isinstance(schema, list) else schema


def _answer(result: types.CallToolResult) -> ToolAnswer:
  """Return a result as text, in which images, sounds and resources are named only."""
  parts = []
  for part in result.content:
    if isinstance(part, types.TextContent):
      parts.append(part.text)
    elif isinstance(part, types.EmbeddedResource):
      parts.append(f'[resource {part.resource.uri}, not shown]')
    elif isinstance(part, types.ResourceLink):
      parts.append(f'[link to resource {part.uri}, not read]')
    else:
      parts.append(f'[{part.type} {part.mime_type}, {len(part.data)} characters of base64, not shown]')
  if not parts and result.structured_content is not None:
    parts = [json.dumps(result.structured_content, ensure_ascii=False)]
  return _cut(not result.is_error, '\n'.join(parts) or '(No output.)')


def _reason(error: Exception) -> str:
  """Return why a value of a file or of a server is invalid."""
  if not isinstance(error, pydantic.ValidationError):
    return printable(first_line(error), 200)
  wrong = error.errors()[0]
  return printable(f'{".".join(map(str, wrong["loc"])) or "value"}: {wrong["msg"]}', 200)


def _cut(ok: bool, text: str) -> ToolAnswer:
  text, dropped = shortened(text)
  return ToolAnswer(ok, text, dropped=dropped)
