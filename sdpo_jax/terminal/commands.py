"""Commands to the terminal program: lines that begin with a slash."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import io
import json
import os
import pathlib
import shlex
from typing import Any
import zipfile

from sdpo_jax.config.fields import did_you_mean
from sdpo_jax.errors import UserError, first_line, printable, short_repr
from sdpo_jax.files import make_directory, write_atomically
from sdpo_jax.tables import aligned
from sdpo_jax.terminal.calls import calls_of, described, look, output_of
from sdpo_jax.terminal.drafts import prose_of
from sdpo_jax.terminal.escaping import original, visible
from sdpo_jax.terminal.inputs import Leave
from sdpo_jax.terminal.learned import details_of, turns_of
from sdpo_jax.terminal.policies import OTHERS, SERVED
from sdpo_jax.terminal.screen import MARGIN, Line
from sdpo_jax.terminal.session_context import SessionContext

_KEYS = f"""y                    approves the call that is shown
a                    approves it, and always allows such calls in this session
n                    denies it, with a reason from which the model learns
e                    edits its arguments, in $VISUAL or $EDITOR, or here
t                    does not run it, and tells the model why: no lesson, unless learn_from_results is set
s                    only if its effect has changed: leaves it out
v                    only if it is longer than the screen: views the rest
q, Ctrl-D            leaves; the call stays open
/                    begins a command, also at a call
Enter, Alt-Enter     sends a text; begins a new line in it
Ctrl-C               stops what is running; twice leaves
A key counts by itself, after its question; what is typed before it is ignored, as are pastes.
The model and the tools write behind {MARGIN.strip()}, and nobody else does."""


class Commands:
  """The slash commands of one conversation."""

  def __init__(
    self, context: SessionContext, learned: Callable[[Mapping[str, Any] | None], None], deny: Callable[[str], None]
  ):
    """Make the commands.

    Args:
      context: the session.
      learned: records and shows what was learned without a decision.
      deny: denies the newest answer, for a reason.
    """
    self._session, self._client, self._turns = context.session, context.session.client, context.turns
    self._history, self._screen, self._workbench = context.history, context.screen, context.workbench
    self._policy, self._seed_of = context.policy, context.seed_of
    self._learned, self._deny = learned, deny
    self._table: dict[str, tuple[Callable[[list[str]], None], str, int]] = {
      '/help': (self._help, '/help                lists keys and commands', 0),
      '/deny': (self._denied, '/deny REASON         denies the last answer; the model learns, and answers anew', 1),
      '/learned': (self._lesson, '/learned             shows how the last lesson has moved the model', 0),
      '/undo': (self._undo, '/undo [VERSION]      goes back by one version, again by one more, or to VERSION', 1),
      '/undo --files': (self._undo, '/undo --files        restores the last file that a tool but bash has changed', 0),
      '/versions': (self._versions, '/versions            lists the versions of the adapter', 0),
      '/diff': (
        self._diff,
        '/diff [A B]          compares the matrices of versions A and B, or of the newest and its parent',
        2,
      ),
      '/export': (self._export, '/export DIR          writes the newest version as PEFT reads it', 1),
      '/retry': (self._retry, '/retry [TURN]        shows an answer of the newest version beside the old one', 1),
      '/flush': (self._flush, '/flush               learns now from examples that wait for more', 0),
      '/history': (self._talk, '/history             shows the conversation so far', 0),
      '/session': (self._about, '/session             shows id, adapter, service, workspace and history', 0),
      '/tools': (self._tools, '/tools               lists the tools of MCP servers, as they describe themselves', 0),
      '/policy': (self._rules, '/policy              lists the rules that allow, ask about or refuse calls', 0),
      **dict.fromkeys(('/quit', '/exit'), (self._quit, '/quit, /exit, Ctrl-D leaves; --resume continues', 0)),
    }

  def run(self, line: str) -> None:
    """Run a command line.

    Raises:
      UserError: the command does not exist, or has failed.
      Leave: the command ends the program.
      AnswerLost, Refused: a request to the service has failed.
    """
    name, _, reason = line.partition(' ')
    try:
      # A reason is any text, also with one apostrophe.
      name, *arguments = [name, reason.strip()] if name == '/deny' else shlex.split(line)
    except ValueError as error:
      raise UserError(f'{short_repr(line)} cannot be parsed ({first_line(error)}): close the quotes.') from error
    if name not in self._table:
      raise UserError(f'There is no command {printable(name)}{did_you_mean(name, self._table)} /help lists all.')
    function, usage, most = self._table[name]
    if len(arguments) > most:
      limit = ('no argument', 'at most one argument', 'at most two arguments')[most]
      raise UserError(f'{name} takes {limit}: {" ".join(usage.split())}.')
    function(arguments)

  def _help(self, arguments: list[str]) -> None:
    usages = dict.fromkeys(usage for _, usage, _ in self._table.values())  # /quit and /exit share a line.
    self._screen.show(Line(line) for line in [*usages, *_KEYS.split('\n')])

  def _denied(self, arguments: list[str]) -> None:
    if not any(arguments):
      raise UserError('/deny needs a reason, from which the model learns: /deny REASON.')
    self._deny(arguments[0])

  def _lesson(self, arguments: list[str]) -> None:
    learned = next((record['learned'] for record in reversed(self._history.records) if record.get('learned')), None)
    if learned is None:
      raise UserError('Nothing was learned in this session yet.')
    self._screen.show(details_of(learned) or [Line('The service has told no more about it.', 'note')])

  def _undo(self, arguments: list[str]) -> None:
    if arguments == ['--files']:
      self._restore()
      return
    to = _whole(arguments[0], '/undo VERSION, or /undo --files') if arguments else None
    known = self._client.versions(self._session.adapter)
    made = self._client.undo(self._session.adapter, to)
    to = made['details']['to']
    self._history.add('undone', to=to, version=made['version'])
    said = [f'Version {made["version"]} equals version {to}']
    for each in known:
      if each['version'] > to and each['reason'] != 'undo' and not each['undone']:
        said.append(f'version {each["version"]} ({_said_of(each["details"]) or each["reason"]}) is undone')
    self._screen.say(f'{"; ".join(said)}.', 'good')

  def _restore(self) -> None:
    """Restore the file that the newest call has changed of those whose file was not restored yet.

    One that cannot be restored is named once, and then stays as it is until it can be.
    """
    # If the program was killed while a call ran, and the call ran again, the second time may have changed nothing.
    saved = {
      (record['n'], record['call']): record['saved']
      for record in self._history.records
      if record['kind'] == 'running' and record.get('saved') and record['saved']['before'] != record['saved']['after']
    }
    for number, call in reversed(saved):
      if self._history.last('restored', n=number, call=call) is not None:
        continue
      try:
        said = self._workbench.toolbox.restore(**saved[number, call])
      except UserError as error:
        if self._history.last('left', n=number, call=call) is not None:
          continue
        self._history.add('left', n=number, call=call)
        raise UserError(f'Turn {number}: {error} /undo --files again goes on to the change before it.') from error
      self._history.add('restored', n=number, call=call)
      self._screen.say(f'Turn {number}: {said}', 'good')
      return
    raise UserError('No tool but bash has changed a file in this session that can still be restored.')

  def _versions(self, arguments: list[str]) -> None:
    rows = []
    for version in self._client.versions(self._session.adapter):
      parent = '' if version['parent'] is None else str(version['parent'])
      about = ', '.join(filter(None, (_said_of(version['details']), 'undone' * bool(version['undone']))))
      rows.append((str(version['version']), parent, str(version['reason']), about))
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
        raise UserError(f'Version {after} is the first one: name two versions, /diff A B.')
    found = self._client.difference(self._session.adapter, before, after)
    rows = [_norms(found['total']), *map(_norms, found['largest'])]
    self._screen.say(f'From version {before} to {after}, Frobenius norms:')
    self._table_of(('matrix', 'before', 'after', 'change'), rows)

  def _export(self, arguments: list[str]) -> None:
    if not arguments:
      raise UserError('/export needs the folder to write to: /export DIR.')
    folder = pathlib.Path(os.path.expanduser(arguments[0]))
    try:
      if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f'{folder} exists and is not an empty folder: name an empty or a new one.')
      content = self._client.export(self._session.adapter)
      make_directory(folder)
      with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for name in archive.namelist():
          if pathlib.PurePath(name).name != name:  # It would be written elsewhere.
            raise UserError(f'The export has {printable(name)!r}, which is not a plain file name: nothing was written.')
        for name in archive.namelist():
          write_atomically(folder / name, archive.read(name))
    except (OSError, ValueError, zipfile.BadZipFile) as error:  # A null byte is a ValueError.
      raise UserError(f'{folder} cannot be written ({first_line(error)}): name another folder.') from error
    self._screen.say(f'Exported to {folder}: {", ".join(sorted(archive.namelist()))}.', 'good')

  def _retry(self, arguments: list[str]) -> None:
    turns = {turn['n']: turn for turn in self._turns}
    decided = [turn['n'] for turn in self._turns if turn['status'] != 'open'] or list(turns)
    if not decided:
      raise UserError('There is no turn yet: write something first.')
    number = _whole(arguments[0], '/retry TURN') if arguments else decided[-1]
    if number not in turns:
      raise UserError(f'There is no turn {number}, only 0 to {max(turns)}.')
    old = turns[number]
    new = self._session.retry(number, self._seed_of(number), lambda text: None)
    self._history.add('retried', n=number, text=new['text'], version=new['version'])
    self._screen.beside(
      (f'turn {number}, version {old["version"]}', self._text(old)),
      (f'again, version {new["version"]}', self._text(new)),
    )

  def _text(self, turn: Mapping[str, Any]) -> str:
    """Return an answer of the model with its calls as they are shown for review."""
    calls = [original(line.text) for call in turn['calls'] for line in self._described(call)]
    return '\n'.join(filter(None, (prose_of(turn), *calls)))

  def _described(self, call: Mapping[str, Any]) -> list[Line]:
    """Return the lines that show a call whose effect on the files is over."""
    bench = self._workbench
    looked = look(call['name'], call['arguments'], bench.toolbox, self._policy, bench.workspace)
    return described(dataclasses.replace(looked, change=None))

  def _flush(self, arguments: list[str]) -> None:
    learned = self._session.flush()
    if learned is None:
      self._screen.say('No examples are waiting.')
    self._learned(learned)

  def _talk(self, arguments: list[str]) -> None:
    lines: list[Line] = []
    for turn in self._turns:
      for message in turn['messages']:
        lines += spoken(message['role'], message['content'])
      lines += spoken(f'turn {turn["n"]} (version {turn["version"]}, {turn["status"]})', prose_of(turn))
      results = {result['call']: output_of(result['ok'], result['text']) for result in turn['results']}
      for index, call in enumerate(calls_of(turn)):
        lines += [*self._described(call), *results.get(index, ())]
      correction = (turn['decision'] or {}).get('correction')
      if correction is not None:
        lines += spoken('correction', correction)
    self._screen.show(lines or [Line('The conversation is empty.', 'note')])

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
    self._screen.show(Line(visible(f'{name:<10} {value}', keep='')) for name, value in rows)

  def _tools(self, arguments: list[str]) -> None:
    lines: list[Line] = []
    for name, tool in self._workbench.toolbox.tools.items():
      if SERVED in name:
        about = f'{tool.meaning}\n{json.dumps(tool.parameters, ensure_ascii=False)}'
        lines += spoken(name, original(about))  # Which names the invisible characters once.
    self._screen.show(lines or [Line('There are no MCP servers: name a file of some with --mcp.', 'note')])

  def _rules(self, arguments: list[str]) -> None:
    lines = [str(rule) for rule in self._policy.rules]
    lines += [f'{rule}   (added in this session)' for rule in self._policy.added]
    lines.append(f'{OTHERS}   (everything else)' if lines else 'There are no rules: you are asked about each call.')
    self._screen.show(Line(visible(line, keep='')) for line in lines)

  def _quit(self, arguments: list[str]) -> None:
    raise Leave

  def _table_of(self, header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    shown = [tuple(visible(cell, keep='') for cell in row) for row in rows]
    self._screen.show(Line(line) for line in aligned(header, shown).split('\n'))


def _whole(text: str, usage: str) -> int:
  if not (text.isascii() and text.isdecimal() and len(text) <= 9):
    raise UserError(f'{short_repr(text)} is not a number: {usage}.')
  return int(text)


def _norms(matrix: Mapping[str, Any]) -> tuple[str, ...]:
  return (str(matrix['matrix']), *(f'{matrix[name]:.4g}' for name in ('before', 'after', 'change')))


def _said_of(details: Mapping[str, Any]) -> str:
  """Return the details of a version in one line: the version that it equals, or the turns that it has learned."""
  if 'to' in details:
    return f'as version {details["to"]}'
  if 'session' in details:
    return f'{details["session"]["id"]}, {turns_of(details["session"])}'
  return ''


def spoken(who: str, text: str) -> list[Line]:
  """Return the lines of a text behind a head with who has written it."""
  shown = visible(text, keep='\n\t', prose=True).expandtabs(8)
  return [Line(f'{who}:', 'head'), *(Line(line, foreign=True) for line in shown.split('\n') if shown)]
