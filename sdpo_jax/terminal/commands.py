"""Commands to the program itself: lines that begin with a slash."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import io
import pathlib
import shlex
from typing import Any
import zipfile

from sdpo_jax.errors import UserError, first_line, printable, short_repr
from sdpo_jax.files import make_directory, write_atomically
from sdpo_jax.tables import aligned
from sdpo_jax.terminal.client import SessionClient
from sdpo_jax.terminal.escaping import visible
from sdpo_jax.terminal.history import History
from sdpo_jax.terminal.inputs import Leave
from sdpo_jax.terminal.policies import ApprovalPolicy, CallRule
from sdpo_jax.terminal.screen import Line, Screen
from sdpo_jax.terminal.work import Workbench

_KEYS = """At a call: y approve · a always allow its like in this session · n deny, and say why · e edit its arguments
t tell the model what is wrong with it, without a lesson · v view the rest of it · q quit, the call stays open
In a text: Enter sends it, Alt-Enter begins a new line. Ctrl-C ends what is running; twice leaves."""


class Commands:
  """The commands of one conversation."""

  def __init__(
    self,
    session: SessionClient,
    turns: Sequence[Mapping[str, Any]],
    history: History,
    screen: Screen,
    workbench: Workbench,
    policy: ApprovalPolicy,
    learned: Callable[[Mapping[str, Any] | None], None],
    seed_of: Callable[[int], int | None],
  ):
    """Make the commands.

    Args:
      session: the session in the service.
      turns: its turns, which the conversation keeps up to date.
      history: its local history.
      screen: shows everything.
      workbench: runs the tools.
      policy: says which calls are asked about.
      learned: records and shows what was learned without a decision.
      seed_of: returns the seed with which a turn is drawn again; None: any seed.
    """
    self._session, self._client, self._turns = session, session.client, turns
    self._history, self._screen, self._workbench, self._policy = history, screen, workbench, policy
    self._learned, self._seed_of = learned, seed_of
    self._table: dict[str, tuple[Callable[[list[str]], None], str, int]] = {
      '/help': (self._help, '/help                what can be typed', 0),
      '/undo': (self._undo, '/undo [VERSION]      the version before, or an older one, becomes the newest again', 1),
      '/versions': (self._versions, '/versions            the versions of the adapter', 0),
      '/diff': (
        self._diff,
        '/diff [A B]          how far two versions are apart: A and B, or the newest and its parent',
        2,
      ),
      '/export': (self._export, '/export DIR          the newest version as PEFT reads it', 1),
      '/retry': (self._retry, '/retry [TURN]        what the newest version says instead, beside what was said', 1),
      '/flush': (self._flush, '/flush               learns at once what waits for more examples', 0),
      '/history': (self._talk, '/history             the conversation so far', 0),
      '/session': (self._about, '/session             this session: id, adapter, service, workspace, history', 0),
      '/policy': (self._rules, '/policy              the rules by which calls are allowed, asked for or refused', 0),
      **dict.fromkeys(('/quit', '/exit'), (self._quit, '/quit, /exit, Ctrl-D leaves; --resume goes on', 0)),
    }

  def run(self, line: str) -> None:
    """Run a command line.

    Raises:
      UserError: the command does not exist or cannot be done.
      Leave: the command ends the program.
      AnswerLost, Refused: raised by requests to the service.
    """
    try:
      name, *arguments = shlex.split(line)
    except ValueError as error:
      raise UserError(f'{short_repr(line)} cannot be read ({first_line(error)}): close what is quoted.') from error
    if name not in self._table:
      raise UserError(f'There is no command {printable(name)}: /help lists those that there are.')
    function, usage, most = self._table[name]
    if len(arguments) > most:
      limit = ('no argument', 'at most one argument', 'at most two arguments')[most]
      raise UserError(f'{name} takes {limit}: {" ".join(usage.split())}.')
    function(arguments)

  def _help(self, arguments: list[str]) -> None:
    usages = dict.fromkeys(usage for _, usage, _ in self._table.values())  # /exit is /quit.
    self._screen.say('\n'.join([*usages, _KEYS]))

  def _undo(self, arguments: list[str]) -> None:
    if arguments:
      to = _whole(arguments[0], '/undo VERSION')
    else:
      versions = self._client.versions(self._session.adapter)
      to = versions[-1]['parent']
      if to is None:
        raise UserError(f'Version {versions[-1]["version"]} is the first: there is nothing to undo.')
    made = self._client.undo(self._session.adapter, to)
    self._history.add('undone', to=to, version=made['version'])
    self._screen.say(f'Version {made["version"]} is what version {to} was.', 'good')

  def _versions(self, arguments: list[str]) -> None:
    rows = []
    for version in self._client.versions(self._session.adapter):
      parent = '' if version['parent'] is None else str(version['parent'])
      rows.append((str(version['version']), parent, str(version['reason']), _said_of(version['details'])))
    self._table_of(('version', 'parent', 'reason', 'about'), rows)

  def _diff(self, arguments: list[str]) -> None:
    if len(arguments) == 1:
      raise UserError('/diff takes two versions, or none for the newest and its parent.')
    if arguments:
      before, after = (_whole(each, '/diff A B') for each in arguments)
    else:
      newest = self._client.versions(self._session.adapter)[-1]
      after, before = newest['version'], newest['parent']
      if before is None:
        raise UserError(f'Version {after} is the first: name two versions, /diff A B.')
    found = self._client.difference(self._session.adapter, before, after)
    rows = [_norms(found['total']), *map(_norms, found['largest'])]
    self._screen.say(f'From version {before} to {after}, Frobenius norms:')
    self._table_of(('matrix', 'before', 'after', 'change'), rows)

  def _export(self, arguments: list[str]) -> None:
    if not arguments:
      raise UserError('/export needs the folder to write to: /export DIR.')
    folder = pathlib.Path(arguments[0]).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
      raise UserError(f'{folder} is there already: name a folder that is empty or new.')
    content = self._client.export(self._session.adapter)
    try:
      make_directory(folder)
      with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for name in archive.namelist():
          if pathlib.PurePath(name).name != name:  # Not a file name of the service.
            raise UserError(f'The export holds {printable(name)!r}, which is no name of a file: nothing is written.')
        for name in archive.namelist():
          write_atomically(folder / name, archive.read(name))
    except (OSError, zipfile.BadZipFile) as error:
      raise UserError(f'{folder} cannot be written ({first_line(error)}): name another folder.') from error
    self._screen.say(f'Exported to {folder}: {", ".join(sorted(archive.namelist()))}.', 'good')

  def _retry(self, arguments: list[str]) -> None:
    turns = {turn['n']: turn for turn in self._turns}
    decided = [turn['n'] for turn in self._turns if turn['status'] != 'open'] or list(turns)
    if not decided:
      raise UserError('There is no turn yet: say something first.')
    number = _whole(arguments[0], '/retry TURN') if arguments else decided[-1]
    if number not in turns:
      raise UserError(f'There is no turn {number}; there are 0 to {max(turns)}.')
    old = turns[number]
    new = self._session.retry(number, self._seed_of(number), lambda text: None)
    self._history.add('retried', n=number, text=new['text'], version=new['version'])
    self._screen.beside(
      (f'turn {number}, version {old["version"]}', old['text']), (f'again, version {new["version"]}', new['text'])
    )

  def _flush(self, arguments: list[str]) -> None:
    learned = self._session.flush()
    if learned is None:
      self._screen.say('Nothing waits.')
    self._learned(learned)

  def _talk(self, arguments: list[str]) -> None:
    lines: list[Line] = []
    for turn in self._turns:
      for message in turn['messages']:
        lines += _spoken(message['role'], message['content'])
      lines += _spoken(f'turn {turn["n"]} (version {turn["version"]}, {turn["status"]})', turn['text'])
      correction = (turn['decision'] or {}).get('correction')
      if correction is not None:
        lines += _spoken('correction', correction)
    self._screen.show(lines or [Line('Nothing has been said yet.', 'note')])

  def _about(self, arguments: list[str]) -> None:
    adapter = self._client.adapter_now(self._session.adapter)
    rows = [
      ('session', self._session.id),
      ('adapter', f'{adapter["name"]} ({adapter["id"]}), version {adapter["version"]}'),
      ('service', self._client.url),
      ('workspace', str(self._workbench.workspace)),
      ('tools', ', '.join(self._workbench.toolbox.tools)),
      ('history', str(self._history.path)),
    ]
    self._screen.say('\n'.join(f'{name:<10} {value}' for name, value in rows))

  def _rules(self, arguments: list[str]) -> None:
    lines = [str(rule) for rule in self._policy.rules]
    lines += [f'{rule}   (added in this session)' for rule in self._policy.added]
    self._screen.say('\n'.join([*lines, f'{CallRule("ask")}   (everything else)']))

  def _quit(self, arguments: list[str]) -> None:
    raise Leave

  def _table_of(self, header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    shown = [tuple(visible(cell, keep='') for cell in row) for row in rows]
    self._screen.show(Line(line) for line in aligned(header, shown).split('\n'))


def _whole(text: str, usage: str) -> int:
  if not (text.isascii() and text.isdecimal() and len(text) <= 9):
    raise UserError(f'{short_repr(text)} is no number: {usage}.')
  return int(text)


def _norms(matrix: Mapping[str, Any]) -> tuple[str, ...]:
  return (str(matrix['matrix']), *(f'{matrix[name]:.4g}' for name in ('before', 'after', 'change')))


def _said_of(details: Mapping[str, Any]) -> str:
  """Return the details of a version that fit into a line."""
  if 'to' in details:
    return f'as version {details["to"]}'
  if 'session' in details:
    turns = details['session']['turns']
    return f'{details["session"]["id"]}, {"turn" if len(turns) == 1 else "turns"} {", ".join(map(str, turns))}'
  return ''


def _spoken(who: str, text: str) -> list[Line]:
  return [Line(f'{who}:', 'head'), *(Line(f'  {line}') for line in visible(text).split('\n'))]
