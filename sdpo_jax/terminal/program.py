"""The terminal program, from its options to its exit code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import functools
import io
import math
import os
import pathlib
import shutil
import sys
import time
from typing import TYPE_CHECKING, Any

from sdpo_jax.command_lines import command_line
from sdpo_jax.config import config_files
from sdpo_jax.config.locations import shipped_folder
from sdpo_jax.environments.workspace import boundary
from sdpo_jax.environments.workspace.shell import Shell, ShellLimits
from sdpo_jax.environments.workspace.tools import Toolbox
from sdpo_jax.errors import UserError, printable
from sdpo_jax.files import make_directory, read_json_object
from sdpo_jax.tables import counted
from sdpo_jax.terminal import history as histories
from sdpo_jax.terminal import policies, script
from sdpo_jax.terminal.client import AnswerLost, Refused, ServiceClient, SessionClient
from sdpo_jax.terminal.embedded import Embedded
from sdpo_jax.terminal.escaping import visible
from sdpo_jax.terminal.history import History
from sdpo_jax.terminal.inputs import Inputs
from sdpo_jax.terminal.keyboard import Keyboard, Lines, echoing
from sdpo_jax.terminal.policies import ApprovalPolicy
from sdpo_jax.terminal.screen import Line, Screen, has_colours, is_plain
from sdpo_jax.terminal.session_context import SessionContext
from sdpo_jax.terminal.session_loop import Conversation
from sdpo_jax.terminal.work import Workbench

if TYPE_CHECKING:
  from sdpo_jax.terminal.mcp_servers import McpServers

DEFAULT_CONFIG = 'session_quickstart.py'
_ERASE = '\r\x1b[K'  # Goes to the beginning of the row of the cursor, and erases it.
_DAY_S = 86_400
_NO_KEY = 401  # The status of a request without a key to a service that needs one.
_TITLE = 200  # The most characters of a title that the service takes.
KEY = 'SDPO_API_KEY'  # The environment variable with the API key of the service.


@dataclasses.dataclass(frozen=True)
class CommandOptions:
  """The options on the command line; None: not given."""

  url: str | None = None  # The address of a service; None: start one.
  config: str | None = None  # The config of a service to start.
  overrides: Sequence[tuple[str, str]] = ()  # Settings that override those of the config, with values as text.
  adapter: str | None = None  # The name or id of the adapter.
  workspace: str | None = None  # The folder in which the model works.
  script: str | None = None  # A file with input, or - for a pipe; None: the keyboard.
  policy: str | None = None  # A file with rules, or ask.
  mcp: str | None = None  # A file of MCP servers.
  state: str | None = None  # The folder of histories.
  resume: bool = False
  session: str | None = None  # The id of the session to resume; None: the newest.
  system: str | None = None  # The system message of a new session.
  settings: str | None = None  # A JSON file with further settings of a new session.
  seed: int | None = None  # Makes proposals reproducible.
  readable: Sequence[str] = ()  # Further folders that commands can read.
  env: Sequence[str] = ()  # Environment variables of commands, as NAME or NAME=VALUE.
  timeout: float | None = None  # Seconds that a command may take.


@dataclasses.dataclass(frozen=True)
class _Start:
  """What a session starts with."""

  options: CommandOptions
  known: Mapping[str, Any]  # What the history of a resumed session knows; nothing of a new one.
  workspace: pathlib.Path
  states: pathlib.Path  # The folder of histories.
  stack: contextlib.ExitStack  # Takes what must be closed afterwards.


def run(options: CommandOptions) -> int:
  """Run a session and return the exit code.

  Raises:
    UserError: an option is invalid, or the service cannot be used.
  """
  if options.url is not None and (options.config is not None or options.overrides):
    raise UserError('--url names a running service, and --config one to start: leave one of them out.')
  if options.timeout is not None and not 0 < options.timeout <= _DAY_S:
    raise UserError(f'--timeout={options.timeout:g}: give it seconds, at most {_DAY_S:,}, which is a day.')
  try:
    os.getcwd()
  except FileNotFoundError as error:
    raise UserError('The folder in which this program is started was removed: change to another one.') from error
  with contextlib.ExitStack() as stack:
    return _held(options, stack)


def _held(options: CommandOptions, stack: contextlib.ExitStack) -> int:
  """Run a session; pushes what must be closed afterwards onto the stack."""
  folder = histories.state_folder(options.state)
  history = None
  known: Mapping[str, Any] = {}
  if options.resume:
    history = History(histories.find(folder, options.session))
    stack.callback(history.close)
    known = history.opened
    for flag in ('adapter', 'system', 'settings'):
      if getattr(options, flag) is not None:
        raise UserError(f'--{flag} is for a new session: leave it out with --resume.')
  workspace = _workspace(options.workspace or known.get('workspace') or '.', folder)
  policy_name = options.policy or known.get('policy') or 'ask'
  if policy_name != 'ask':
    policy_name = boundary.outside(workspace, policy_name, f'--policy={policy_name}')
  start = _Start(options, known, workspace, folder, stack)
  servers = _servers(start)
  policy = policies.load(policy_name, () if servers is None else servers.tools)
  _take_all_texts()
  screen = Screen(
    sys.stdout, colours=options.script is None and has_colours(sys.stdout, os.environ), paged=options.script is None
  )
  inputs = _inputs(options, screen)
  if options.script is None:
    stack.enter_context(echoing(False))
  toolbox = _toolbox(start, policy, servers)
  settings = _settings(options, toolbox, policy, workspace.name)
  client, where = _service(start)  # Last, since starting a service is slow.
  try:
    if history is None:
      adapter = client.adapter(options.adapter or 'session')
      opened, token = client.open_session(adapter['id'], settings)
      about = {'workspace': str(workspace), 'policy': policy_name, 'adapter': adapter['id'], 'token': token, **where}
      if servers is not None:
        about['mcp'] = {
          'file': os.path.abspath(os.path.expanduser(options.mcp)),
          'tools': [dataclasses.asdict(tool) for tool in servers.tools.values()],
        }
      history = History.begin(folder, opened['id'], about)
      stack.callback(history.close)
    session = SessionClient(client, history.opened['adapter'], history.opened['session'], history.opened['token'])
    state, turns = session.state()
    learner = client.adapter_now(history.opened['adapter'])
  except (AnswerLost, Refused) as error:
    keyless = isinstance(error, Refused) and error.status == _NO_KEY
    raise UserError(f'{error} Set the environment variable {KEY}.' if keyless else str(error)) from error
  written = history
  screen.record = lambda text: written.note('shown', text=text)
  at = f'adapter {learner["name"]!r} at version {learner["version"]}'
  screen.say(f'Session {session.id} in {workspace}, {at}; /help lists keys and commands.')
  for sentence in () if servers is None else servers.said:
    screen.say(sentence)
  if turns:
    newest = turns[-1]['version']
    screen.say(f'{counted(len(turns), "turn")} so far, the newest by version {newest}; /history shows all.')
  live = options.script is None and sys.stdout.isatty() and not is_plain()
  workbench = Workbench(toolbox, workspace, sys.stdout if live else None)
  try:
    context = SessionContext(session, history, screen, inputs, workbench, policy, options.seed)
    code = Conversation(context, state['settings']).run()
    if isinstance(inputs, script.Script) and inputs.unanswered:
      _announce(f'The script ended before a decision on the call of turn {context.turns[-1]["n"]}.')
    return code
  finally:
    state = [] if options.state is None else [f'--state={options.state}']
    state += [f'--readable={name}' for name in options.readable] + [f'--env={text}' for text in options.env]
    state += [] if options.timeout is None else [f'--timeout={options.timeout:g}']
    resume = command_line('session', f'--resume={session.id}', *state)
    print(f'Resume the session with: {resume}', file=sys.stderr, flush=True)  # In one line, to be copied.


def _announce(text: str) -> None:
  Screen(sys.stderr, colours=False, paged=False).say(text)


def _announce_stage(began: float, stage: str) -> None:
  """Say how far the start of the service is, on a terminal in a line that the next stage overwrites."""
  said = f'{time.monotonic() - began:3.0f} s: {"compiled " if stage[:1].isdecimal() else ""}{printable(stage)}'
  if _overwrites():
    print(f'{_ERASE}{said[: shutil.get_terminal_size().columns - 1]}', end='', file=sys.stderr, flush=True)
  else:
    _announce(said)


def _overwrites() -> bool:
  return sys.stderr.isatty() and not is_plain()


def _take_all_texts() -> None:
  """Keep input that is not valid text, and output that the terminal cannot encode, from raising errors."""
  for stream, errors in ((sys.stdin, 'surrogateescape'), (sys.stdout, 'backslashreplace')):
    if isinstance(stream, io.TextIOWrapper):
      stream.reconfigure(errors=errors)


def _workspace(named: str, states: pathlib.Path) -> pathlib.Path:
  path = boundary.checked_workspace(named)
  if states.resolve().is_relative_to(path):
    raise UserError(
      f'The workspace {path} contains the histories of sessions ({states}), which the model must not read: name a '
      'folder within it, or another folder for the histories with --state.'
    )
  return path


def _served(start: _Start) -> tuple[list[str], str]:
  """Return the arguments of the service to start, and its working directory.

  Raises:
    UserError: the config, the folder that its paths are relative to, or that of its compiled programs, which are
      unpickled, is in the workspace.
  """
  overrides = [f'--config.{name}={text}' for name, text in start.options.overrides]
  here = os.getcwd()
  if start.options.config is not None:
    arguments, folder = [f'--config={start.options.config}', *overrides], here
  elif not overrides and 'arguments' in start.known:
    arguments, folder = start.known['arguments'], start.known['folder']
  else:
    config, store = shipped_folder() / DEFAULT_CONFIG, start.states.resolve() / 'adapters'
    arguments = [f'--config={config}', f'--config.serve.store.root={store}', *overrides]
    folder = str(start.states.resolve()) if pathlib.Path(here).is_relative_to(start.workspace) else here
  named = arguments[0].removeprefix('--config=')
  file = named.partition('.py:')[0].removesuffix('.py') + '.py'
  way_out = 'name a config outside of it, from a folder outside of it, and the folder of work with --workspace'
  for path in (folder, os.path.join(folder, file)):
    boundary.outside(start.workspace, path, '--config', way_out)
  settings = [argument.removeprefix('--config.').partition('=') for argument in arguments[1:]]
  with contextlib.chdir(folder):
    if programs := config_files.read(named, [(name, text) for name, _, text in settings]).serve.programs:
      boundary.outside(start.workspace, programs, 'serve.programs', 'name another folder')
  return arguments, folder


def _toolbox(start: _Start, policy: ApprovalPolicy, servers: McpServers | None) -> Toolbox:
  """Make the tools; without bash, and with a message, if commands cannot be confined to the workspace."""
  shell, options, workspace = None, start.options, start.workspace
  readable = boundary.readable_folders(options.readable, workspace, start.states)
  variables = boundary.variables(options.env, os.environ)
  limits = ShellLimits()
  if options.timeout is not None:
    cpu_s = max(limits.cpu_s, math.ceil(options.timeout * (os.cpu_count() or 1)))
    limits = dataclasses.replace(limits, wall_s=options.timeout, cpu_s=cpu_s)
  if not policy.never('bash'):
    try:
      shell = Shell(workspace, limits, readable=readable, variables=variables)
      if shell.notes:
        _announce(shell.notes)
    except UserError as error:
      _announce(f'The model cannot run commands on this machine. {error}')
  return Toolbox(workspace, shell) if servers is None else servers.toolbox(workspace, shell)


def _settings(options: CommandOptions, toolbox: Toolbox, policy: ApprovalPolicy, title: str) -> dict[str, Any]:
  """Return the settings of a new session: those of the options, and the schemas of the tools."""
  given = {} if options.settings is None else read_json_object(options.settings, 'name another file with --settings')
  if 'tools' in given:
    raise UserError(f'{options.settings} has tools, which this program defines: leave them out.')
  if options.system is not None:
    given['system'] = options.system
  given.setdefault('title', printable(title, None)[:_TITLE])
  given['tools'] = [tool.schema() for name, tool in toolbox.tools.items() if not policy.never(name)]
  return given


def _service(start: _Start) -> tuple[ServiceClient, dict[str, Any]]:
  """Connect to a service or start one; return its client, and what a history needs to find it again."""
  url = start.options.url or (None if start.options.config is not None else start.known.get('url'))
  try:
    if url is not None:
      client = ServiceClient(url, os.environ.get(KEY))
      start.stack.callback(client.close)
      client.wait(lambda stage: _announce(f'The service is starting: {stage}'))
      return client, {'url': url}
    make_directory(start.states)
    arguments, folder = _served(start)
    _announce(
      'Starting a service. Its first start compiles some thirty programs, which are kept for the next ones: with the '
      'tiny agent this takes one to two minutes on two cores, and a second start some seconds.'
    )
    began = time.monotonic()
    service = Embedded(arguments, pathlib.Path(folder))
    start.stack.callback(service.stop)
    client = service.client()
    start.stack.callback(client.close)
    client.wait(functools.partial(_announce_stage, began), service.check)
    print(_ERASE * _overwrites(), end='', file=sys.stderr)
    _announce(f'Ready after {time.monotonic() - began:.0f} s.')
    return client, {'arguments': list(arguments), 'folder': folder}
  except (AnswerLost, Refused) as error:
    raise UserError(f'{error} Start one with {command_line("serve")}, or leave --url out.') from error


def _inputs(options: CommandOptions, screen: Screen) -> Inputs:
  if options.script is not None:
    return script.Script(
      script.lines_of(options.script),
      options.script,
      lambda line: screen.show([Line(visible(line, keep='', prose=True), 'head')]),
    )
  if not sys.stdin.isatty():
    raise UserError('The standard input is not a terminal: add --script=- to read one input per line from it.')
  if is_plain() or not sys.stdout.isatty():
    return Lines()
  return Keyboard(colours=has_colours(sys.stdout, os.environ))


def _servers(start: _Start) -> McpServers | None:
  """Start the MCP servers of the session, if it has some.

  Raises:
    UserError: their file is invalid, or one of a new session cannot be started.
  """
  began, options = start.known.get('mcp'), start.options
  if options.resume and began is None and options.mcp is not None:
    raise UserError('--mcp is for a new session, or one that began with MCP servers: leave it out with --resume.')
  file = options.mcp or (began['file'] if began is not None else None)
  if file is None:
    return None
  from sdpo_jax.terminal import mcp_servers  # Here, since importing the client takes a second.

  programs = mcp_servers.load(file, start.workspace)
  tools = None if began is None else [mcp_servers.McpTool(**tool) for tool in began['tools']]
  _announce(f'Starting {counted(len(programs), "MCP server")}.')
  return start.stack.enter_context(mcp_servers.started(programs, start.states / 'mcp', tools))
