"""Servers of the Model Context Protocol (https://modelcontextprotocol.io), whose tools the model may propose to call.

A server is a program of the user that runs with the user's rights, outside of the sandbox. The tools that it lists
when a session begins are those of the session: one that changes or disappears later is no longer called, since the
model and the person know it as it was. What a server says about its tools is not trusted, so its invisible characters
are shown by their names, to the model as to the person.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import re
import shutil
import sys
from typing import IO, Any, ClassVar, Literal

import anyio
import anyio.abc
from anyio.from_thread import BlockingPortal, start_blocking_portal
from anyio.streams.buffered import BufferedByteReceiveStream
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match
from jsonschema.validators import validator_for
from mcp import ClientSession, MCPError, StdioServerParameters, types
from mcp.client.stdio import get_default_environment
from mcp.os.posix.utilities import terminate_posix_process_tree
from mcp.shared.message import SessionMessage
import pydantic
import referencing
import referencing.exceptions

from sdpo_jax.environments.workspace.shell import Cancellation, Shell
from sdpo_jax.environments.workspace.tools import TOOLS, BadCall, Tool, ToolAnswer, Toolbox, shortened
from sdpo_jax.errors import UserError, first_line, printable, short_repr
from sdpo_jax.files import make_directory, read_json_object
from sdpo_jax.invisible import is_visible
from sdpo_jax.tables import counted
from sdpo_jax.terminal.embedded import CHILD
from sdpo_jax.terminal.escaping import visible
from sdpo_jax.terminal.policies import SERVED, as_subject

START_S, CALL_S, END_S = 60.0, 60.0, 2.0  # Seconds for the start, a call, and the end of a server.
MAX_MESSAGE = 16 * 2**20  # Bytes of a message of a server.
MAX_LOG = 2**20  # Bytes that are kept of what a server writes to stderr.
MAX_MEANING, MAX_SCHEMA = 1_000, 16_000  # Characters of a tool's description, and of the schema of its arguments.
_LOOK_S, _WATCH_S = 0.01, 0.2  # Seconds between checks whether a server has ended, at its end and before.
_CLOSED = (anyio.IncompleteRead, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError)  # The pipe of a server.
_NAME = re.compile(r'[A-Za-z0-9-]+(_[A-Za-z0-9-]+)*')  # Without a double underscore, so that names of tools are unique.
_TOOL = re.compile(r'[A-Za-z0-9_.-]{1,64}')


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

  def check(self, arguments: Mapping[str, Any]) -> None:
    """Raise BadCall if arguments do not fit the schema; references to other documents are not followed."""
    validator = validator_for(self.parameters, default=Draft202012Validator)
    try:
      error = best_match(validator(self.parameters, registry=referencing.Registry()).iter_errors(arguments))
    except (referencing.exceptions.Unresolvable, RecursionError, re.error):
      return  # The server checks them, too.
    if error is not None:
      field = str(error.absolute_path[0])[:100] if error.absolute_path else None
      raise BadCall(f'{self.name} does not take these arguments: {printable(error.message, 300)}.', field)


def load(path: str, workspace: pathlib.Path) -> dict[str, McpProgram]:
  """Read the servers of a file {"mcpServers": {NAME: {"command": …, "args": […], "env": {…}}}}, as other agents do.

  A server starts in the folder of the file, or in its "cwd".

  Raises:
    UserError: the file is invalid, or it or a program in it is in the workspace, where the model could change it.
  """
  file = pathlib.Path(os.path.abspath(os.path.expanduser(path)))
  _outside(workspace, file, f'--mcp={path}')
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
    _outside(workspace, path, where)
  return given.model_copy(update={'command': os.path.abspath(program), 'env': env, 'cwd': cwd})


def _outside(workspace: pathlib.Path, path: str | os.PathLike[str], where: str) -> None:
  for inside in map(pathlib.Path, (os.path.abspath(path), os.path.realpath(path))):
    if inside.is_relative_to(workspace):
      raise UserError(f'{where}: {inside} is in the workspace, so the model could change what runs as you: move it.')


@contextlib.contextmanager
def started(
  programs: Mapping[str, McpProgram], logs: pathlib.Path, known: Sequence[McpTool] | None = None
) -> Iterator[McpServers]:
  """Run the servers of a session, in an event loop in a thread of its own, until this is left.

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
    _, group = portal.start_task(_hold_tasks)
    try:
      servers = McpServers(portal, group, programs, logs, known)
      portal.call(servers.start)
      yield servers
    finally:
      portal.call(group.cancel_scope.cancel)


async def _hold_tasks(*, task_status: anyio.abc.TaskStatus[anyio.abc.TaskGroup]) -> None:
  async with anyio.create_task_group() as group:  # Of this task, since only it can leave the group.
    task_status.started(group)
    await anyio.sleep_forever()


class McpServers:
  """The running servers of a session; see `started` for how to make it."""

  def __init__(
    self,
    portal: BlockingPortal,
    group: anyio.abc.TaskGroup,
    programs: Mapping[str, McpProgram],
    logs: pathlib.Path,
    known: Sequence[McpTool] | None,
  ):
    self._portal, self._group, self._programs, self._logs, self._new = portal, group, programs, logs, known is None
    self.tools = {tool.name: tool for tool in known or ()}
    self._running: dict[str, _Connection] = {}
    self.said: list[str] = []  # Sentences about them for the person.

  def toolbox(self, workspace: pathlib.Path, shell: Shell | None) -> Toolbox:
    """Make the tools of a workspace, together with those of the servers; arguments as those of `Toolbox`."""
    return McpToolbox(workspace, shell, self)

  def check(self, name: str, arguments: Any) -> dict[str, Any]:
    """Return the arguments of a call; raises BadCall if they do not fit, or the tool has changed."""
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
    tool.check(arguments)
    return dict(arguments)

  def call(self, name: str, arguments: Any, cancelled: Cancellation | None) -> ToolAnswer:
    """Call a tool, and return its answer; a server that has ended is started anew before."""
    return self._portal.call(self._call, name, arguments, cancelled)

  async def start(self) -> None:
    """Start all servers; raises UserError as `started`. Call in the event loop."""
    for name in self._programs:
      try:
        running = await self._connected(name)
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

  async def _connected(self, name: str) -> _Connection:
    """Return a running server, with its current tools; raises UserError if it cannot be started."""
    running = self._running.get(name)
    if running is not None and running.ending.is_set():
      await running.ended.wait()
      running = None
    if running is None:
      running = _Connection(name, self._programs[name], self._logs / f'{name}.log')
      await self._group.start(running.live)
      self._running[name] = running
    elif running.seen != running.changes:
      await running.ask_tools()
    return running

  async def _call(self, name: str, arguments: Mapping[str, Any], cancelled: Cancellation | None) -> ToolAnswer:
    server, _, tool = name.partition(SERVED)
    limit = self._programs[server].timeout
    running = None
    with contextlib.ExitStack() as stack:
      scope = stack.enter_context(anyio.CancelScope(deadline=anyio.current_time() + limit))
      if cancelled is not None:
        loop = asyncio.get_running_loop()
        loop.add_reader(cancelled, scope.cancel)
        stack.callback(loop.remove_reader, cancelled)
      try:
        running = await self._connected(server)
        self.check(name, arguments)  # The tools may be others now.
        return _answer(await running.session.call_tool(tool, dict(arguments)))
      except (UserError, BadCall) as error:
        return ToolAnswer(False, str(error), field=getattr(error, 'field', None))
      except MCPError as error:
        if error.code != types.CONNECTION_CLOSED or running is None:
          return _cut(False, f'The MCP server {server} refused the call: {error}')
        await running.ended.wait()
        text = f'{running.how()} Whether the call has done its work is not known; the next one starts the server anew.'
        return ToolAnswer(False, text)
      except (RuntimeError, ValueError) as error:  # From the client, about the content of the answer.
        return ToolAnswer(False, f'The MCP server {server} gave an invalid answer: {_reason(error)}.')
    late = anyio.current_time() >= scope.deadline
    why = f'took more than {limit:g} seconds and was given up' if late else 'was stopped by the person'
    return ToolAnswer(False, f'The call {why}; whether it has done its work is not known.')


class _Connection:
  """A process of a server, and the session with it; all in the event loop."""

  def __init__(self, name: str, program: McpProgram, log: pathlib.Path):
    self._name, self._program, self._log = name, program, log
    self.ending, self.ended = anyio.Event(), anyio.Event()
    self.tools: Mapping[str, McpTool] = {}
    self.notes: list[str] = []  # What was cut or left out of its tools.
    self.changes = self.seen = 0  # How often it has said that its tools have changed, until `tools` were asked for.
    self._logged = anyio.Event()  # Set at the end of its stderr.
    self._why, self._junk = '', ''
    self._words, self._code = b'', None
    self.session: ClientSession

  def how(self) -> str:
    """Return a sentence about its end."""
    how = self._why or f'ended with exit code {self._code}'
    words = self._words.decode(errors='replace').strip().rpartition('\n')[2]
    last = f' Its last words: {printable(words, 200)} ({self._log})' if words else ''
    junk = f' Its stdout had what is no message: {self._junk}' if self._junk else ''
    return f'The MCP server {self._name} {how}.{last}{junk}'

  async def live(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
    """Run the server until it ends or this is cancelled.

    Raises:
      UserError: it cannot be started.
    """
    came, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    write, goes = anyio.create_memory_object_stream[SessionMessage](0)
    given = self._program
    command = [sys.executable, '-I', str(CHILD), str(os.getpid()), given.command, *given.args]
    try:
      with open(self._log, 'ab', buffering=0) as log:
        # In a session of its own, so that only this program gets Ctrl-C.
        process = await anyio.open_process(command, env=given.env, cwd=given.cwd, start_new_session=True)
        async with read, write, anyio.create_task_group() as group:
          group.start_soon(self._keep_stderr, process, log)
          group.start_soon(self._read, process, came)
          group.start_soon(self._write, process, goes)
          try:
            async with ClientSession(read, write, message_handler=self._hear) as self.session:
              ready = await self._greet()
              if ready:
                task_status.started()
                while process.returncode is None and not self.ending.is_set():
                  with anyio.move_on_after(_WATCH_S):  # A child of its own may hold its stdout open when it ends.
                    await self.ending.wait()
          finally:
            with anyio.CancelScope(shield=True):
              await self._end(process)
            group.cancel_scope.cancel()
    except OSError as error:
      raise UserError(f'The MCP server {self._name} cannot be started: {first_line(error)}.') from error
    finally:
      self.ended.set()
    if not ready:
      raise UserError(f'{self.how()} Correct it in the file of --mcp, or leave it out there.')

  async def _greet(self) -> bool:
    """Begin the session and ask for the tools; return whether the server has answered."""
    try:
      with anyio.fail_after(START_S):
        await self.session.initialize()
        await self.ask_tools()
      return True
    except TimeoutError:
      self._why = f'did not answer within {START_S:g} seconds'
    except (MCPError, RuntimeError, ValueError) as error:
      if getattr(error, 'code', None) != types.CONNECTION_CLOSED:
        self._why = f'began with an invalid answer ({_reason(error)})'
    return False

  async def _read(self, process: anyio.abc.Process, came: MemoryObjectSendStream[SessionMessage | Exception]) -> None:
    """Pass on the messages of the server, and end the session when they end."""
    assert process.stdout is not None
    lines = BufferedByteReceiveStream(process.stdout)
    try:
      async with came:
        while True:
          line = await lines.receive_until(b'\n', MAX_MESSAGE)
          try:
            message = types.jsonrpc_message_adapter.validate_json(line, by_name=False)
          except ValueError:
            self._junk = printable(line.decode(errors='replace').strip(), 100)
          else:
            await came.send(SessionMessage(message))
    except anyio.DelimiterNotFound:
      self._why = f'sent a message of more than {MAX_MESSAGE // 2**20} MiB and was stopped'
    except _CLOSED:
      pass  # It has ended.
    finally:
      self.ending.set()
      with contextlib.suppress(*_CLOSED), anyio.move_on_after(3 * END_S, shield=True):
        async for _ in process.stdout:  # So that it can write what is left, and end.
          pass

  async def _write(self, process: anyio.abc.Process, goes: MemoryObjectReceiveStream[SessionMessage]) -> None:
    """Send messages to the server."""
    assert process.stdin is not None
    with contextlib.suppress(*_CLOSED):
      async with goes:
        async for message in goes:
          text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
          await process.stdin.send(f'{text}\n'.encode())

  async def _keep_stderr(self, process: anyio.abc.Process, log: IO[bytes]) -> None:
    """Write the beginning of what the server writes to stderr to its log."""
    assert process.stderr is not None
    log.truncate(log.tell() if log.tell() < MAX_LOG else 0)  # Of earlier sessions.
    left = MAX_LOG
    try:
      async for chunk in process.stderr:
        with contextlib.suppress(OSError):  # The disk may be full.
          log.write(chunk[:left])
        left, self._words = max(0, left - len(chunk)), (self._words + chunk)[-1000:]
    finally:
      self._logged.set()

  async def _hear(self, message: Any) -> None:
    self.changes += isinstance(message, types.ToolListChangedNotification)

  async def _end(self, process: anyio.abc.Process) -> None:
    """End the server: close its stdin, then send SIGTERM, then SIGKILL."""
    assert process.stdin is not None
    with contextlib.suppress(*_CLOSED):
      await process.stdin.aclose()
    for signalled in (False, True):
      if signalled:  # Also if it has ended, since its children may not have.
        await terminate_posix_process_tree(process, END_S)
      with anyio.move_on_after(END_S):
        while process.returncode is None:
          await anyio.sleep(_LOOK_S)
    with anyio.move_on_after(END_S):
      await self._logged.wait()
    self._code = process.returncode
    # A child of its own may still hold the pipes open, and nothing public closes this end of them.
    transport = getattr(getattr(process, '_process', None), '_transport', None)
    if transport is not None:
      transport.close()
    self.ending.set()

  async def ask_tools(self) -> None:
    """Ask the server for its tools."""
    found: dict[str, McpTool] = {}
    changes, cursor, self.notes = self.changes, '', []
    while cursor is not None:
      page = await self.session.list_tools(params=types.PaginatedRequestParams(cursor=cursor or None))
      for tool in page.tools:
        self._add(found, tool)
      cursor = page.next_cursor
    self.tools, self.seen = found, changes

  def _add(self, found: dict[str, McpTool], tool: types.Tool) -> None:
    name, meaning, wrong = f'{self._name}{SERVED}{tool.name}', visible(tool.description or ''), None
    schema = _visible(tool.input_schema)
    text = json.dumps(schema, ensure_ascii=False)
    try:
      validator_for(schema, default=Draft202012Validator).check_schema(schema)
    except SchemaError as error:
      wrong = f'the schema of its arguments is invalid ({printable(error.message)})'
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

  def call(self, name: str, arguments: Any, *, cancelled: Cancellation | None = None, **more: Any) -> ToolAnswer:
    if name in self._servers.tools:
      return self._servers.call(name, arguments, cancelled)
    return super().call(name, arguments, cancelled=cancelled, **more)

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
