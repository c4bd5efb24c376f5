"""Keyboard input: single keys for choices, editable lines, and an editor for longer texts."""

from __future__ import annotations

from collections.abc import Mapping
import os
import pathlib
import shlex
import subprocess
import tempfile

from prompt_toolkit import PromptSession
from prompt_toolkit.application import Application
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.layout import FormattedTextControl, Layout, Window
from prompt_toolkit.output import ColorDepth

from sdpo_jax.errors import first_line
from sdpo_jax.terminal.inputs import COMMAND, Choice, EditorFailed, whole


class Keyboard:
  """Input from a terminal with cursor control."""

  def __init__(self, *, colours: bool):
    self._depth = None if colours else ColorDepth.DEPTH_1_BIT
    self._history = InMemoryHistory()
    self._messages: PromptSession[str] = PromptSession(
      history=self._history, color_depth=self._depth, key_bindings=_newlines(), multiline=True
    )

  def message(self) -> str | None:
    try:
      return whole(self._messages.prompt('> ', prompt_continuation='  ')).strip()
    except EOFError:
      return None

  def choice(self, keys: Mapping[str, str]) -> Choice:
    """Wait for one of the keys."""
    bindings = KeyBindings()
    for key in (*keys, COMMAND):
      bindings.add(key)(lambda event, key=key: event.app.exit(result=key))
    bindings.add('c-c')(lambda event: event.app.exit(exception=KeyboardInterrupt))
    bindings.add('c-d')(lambda event: event.app.exit(result='q'))
    # Not a line editor, so that other keys have no effect and are not shown.
    asked = Window(FormattedTextControl(question_of(keys)), dont_extend_height=True, wrap_lines=True)
    asking: Application[str] = Application(Layout(asked), key_bindings=bindings, color_depth=self._depth)
    key = asking.run()
    return Choice(COMMAND, self.line('> ', COMMAND)) if key == COMMAND else Choice(key)

  def line(self, question: str, default: str = '') -> str:
    asking: PromptSession[str] = PromptSession(color_depth=self._depth)
    try:
      return whole(asking.prompt(question, default=default)).strip()
    except EOFError:
      return ''

  def edited(self, text: str) -> str:
    """Edit a text in $VISUAL or $EDITOR, or at a prompt if neither is set."""
    editor = os.environ.get('VISUAL') or os.environ.get('EDITOR')
    if editor:
      return in_editor(editor, text)
    asking: PromptSession[str] = PromptSession(color_depth=self._depth, key_bindings=_newlines(), multiline=True)
    try:
      return asking.prompt('', default=text)
    except EOFError:
      return text


class Lines:
  """Input line by line, from a terminal without cursor control."""

  def message(self) -> str | None:
    try:
      return whole(input('> ')).strip()
    except EOFError:
      return None

  def choice(self, keys: Mapping[str, str]) -> Choice:
    while True:
      try:
        line = whole(input(f'{question_of(keys)} ')).strip()
      except EOFError:
        return Choice('q')
      if line.startswith(COMMAND):
        return Choice(COMMAND, line)
      key, _, rest = line.partition(' ')
      if key in keys:
        return Choice(key, rest.strip() or None)

  def line(self, question: str, default: str = '') -> str:
    try:
      return whole(input(f'{question}[{default}] ' if default else question)).strip() or default
    except EOFError:
      return default

  def edited(self, text: str) -> str:
    editor = os.environ.get('VISUAL') or os.environ.get('EDITOR')
    return in_editor(editor, text) if editor else self.line('Arguments as JSON, in one line: ')


def question_of(keys: Mapping[str, str]) -> str:
  """Return the line that lists keys with their meanings."""
  return '  '.join(f'[{key}] {meaning}' for key, meaning in keys.items())


def in_editor(editor: str, text: str) -> str:
  """Let the person edit a text in an editor, and return the result.

  Raises:
    EditorFailed: the editor cannot be started, or has failed.
  """
  with tempfile.TemporaryDirectory(prefix='sdpo_session_') as folder:
    path = pathlib.Path(folder) / 'arguments.json'
    path.write_text(text, encoding='utf-8')
    try:
      done = subprocess.run([*shlex.split(editor), str(path)], check=False)
      if done.returncode:
        raise EditorFailed(f'The editor {editor} has ended with exit code {done.returncode}: nothing was changed.')
      return path.read_text(encoding='utf-8')
    except (OSError, ValueError) as error:
      raise EditorFailed(
        f'The editor {editor} cannot be used ({first_line(error)}): set EDITOR to another editor.'
      ) from error


def _newlines() -> KeyBindings:
  """Return key bindings in which Enter ends the text and Alt-Enter inserts a newline."""
  bindings = KeyBindings()

  def end(event: KeyPressEvent) -> None:
    event.current_buffer.validate_and_handle()

  def newline(event: KeyPressEvent) -> None:
    event.current_buffer.insert_text('\n')

  bindings.add('enter')(end)
  bindings.add('escape', 'enter')(newline)
  return bindings
