"""Keyboard input: single keys for choices, editable lines, and an editor for longer texts.

A choice is a key of its own, pressed after its question was shown: what was typed before is discarded, and neither a
key in the middle of a text nor a paste decides anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import contextlib
import fcntl
import os
import pathlib
import shlex
import subprocess
import tempfile
import termios
import time

from prompt_toolkit import PromptSession
from prompt_toolkit.application import Application, get_app_session
from prompt_toolkit.input.typeahead import get_typeahead
from prompt_toolkit.input.vt100 import Vt100Input, raw_mode
from prompt_toolkit.input.vt100_parser import Vt100Parser
from prompt_toolkit.key_binding import KeyBindings, KeyPress, KeyPressEvent
from prompt_toolkit.key_binding.bindings.named_commands import get_by_name
from prompt_toolkit.keys import Keys
from prompt_toolkit.layout import FormattedTextControl, Layout, Window
from prompt_toolkit.output import ColorDepth
from prompt_toolkit.validation import ValidationError

from sdpo_jax.errors import first_line
from sdpo_jax.terminal.inputs import BY_ITSELF, COMMAND, WITH_TEXT, Choice, EditorFailed, whole
from sdpo_jax.terminal.screen import MARGIN

_TERMINAL = 0  # The file descriptor of the standard input.
_WINDOW_S = 0.15  # A choice needs so many seconds without a key before it, since its question or since another key,
PAUSE_S = 0.6  # and so many after a text: more than there are between two words.
_LOOK_S = 0.03  # Seconds between looks at what is typed.
_PASTED = 64  # Nobody types so many characters at once.
_LONGEST = 200_000  # In characters, of a text that is typed or pasted.
_TOO_LONG = f'Not pasted: more than {_LONGEST:,} characters. Put them into a file.'
_LONGEST_LINE = 4095  # In bytes: a terminal that is read by lines drops the rest of one without notice.
_IGNORED = 'What was typed is ignored: pause, then choose.'
_EDITING = 'Enter: done. Alt-Enter: new line. Ctrl-C: leave it as it was.'


class Keyboard:
  """Input from a terminal with cursor control."""

  def __init__(self, *, colours: bool):
    source = get_app_session().input
    if isinstance(source, Vt100Input):
      source.vt100_parser = _Parser(source.vt100_parser.feed_key_callback)
    self._depth = None if colours else ColorDepth.DEPTH_1_BIT
    self._messages = self._prompt(multiline=True)

  def message(self) -> str | None:
    try:
      return whole(self._messages.prompt('> ', prompt_continuation='  ')).strip()
    except EOFError:
      return None

  def choice(self, keys: Mapping[str, str]) -> Choice:
    """Wait for one of the keys."""
    source = get_app_session().input
    early, last = bool(get_typeahead(source)) | _discarded(), time.monotonic()  # When a key was pressed last.
    if isinstance(source, Vt100Input):
      source.vt100_parser.reset()  # It may have read the beginning of a paste whose end was discarded.
    shown = question = question_of(keys)
    if early:
      shown += f'\n{_IGNORED}'
    bindings = KeyBindings()

    @bindings.add(Keys.Any)
    def pressed(event: KeyPressEvent) -> None:
      nonlocal early, last, shown
      key, now = event.key_sequence[0].key, time.monotonic()
      alone = now - last >= (PAUSE_S if early else _WINDOW_S) and not event.app.key_processor.input_queue
      last = now
      if key in (Keys.ControlC, Keys.SIGINT):
        event.app.exit(exception=KeyboardInterrupt)
      elif alone and (key in keys or key in (COMMAND, Keys.ControlD)):
        shown = f'? {key}: {keys[key]}' if key in keys else shown  # It stays there.
        event.app.exit(result='q' if key == Keys.ControlD else key)
      else:
        early, shown = True, f'{question}\n{_no_key(key) if alone and len(key) == 1 else _IGNORED}'

    def asked() -> None:
      nonlocal last
      last = time.monotonic()

    # Not a line editor, so that other keys have no effect and are not shown.
    text = FormattedTextControl(lambda: shown)
    layout = Layout(Window(text, dont_extend_height=True, wrap_lines=True))
    key = Application[str](layout, key_bindings=bindings, color_depth=self._depth).run(pre_run=asked)
    return Choice(COMMAND, self.line('> ', COMMAND)) if key == COMMAND else Choice(key)

  def line(self, question: str, default: str = '') -> str:
    margin = MARGIN if default else '  '  # The default may be a text of the model.
    try:
      return whole(self._prompt().prompt(question, default=default, prompt_continuation=margin)).strip()
    except EOFError:
      return ''

  def edited(self, text: str, kind: str) -> str:
    """Edit a text in $VISUAL or $EDITOR, or at a prompt if neither is set."""
    editor = os.environ.get('VISUAL') or os.environ.get('EDITOR')
    if editor:
      return in_editor(editor, text, kind)
    prompt = self._prompt(multiline=True)
    try:  # The model has written it.
      return prompt.prompt(f'{_EDITING}\n{MARGIN}', default=text, prompt_continuation=MARGIN)
    except (EOFError, KeyboardInterrupt):
      return ''

  def _prompt(self, *, multiline: bool = False) -> PromptSession[str]:
    return PromptSession(color_depth=self._depth, key_bindings=_text_keys(), multiline=multiline)


class _Parser(Vt100Parser):
  """A parser of keys that takes a long text at once, also from a terminal that does not mark a paste as one."""

  _paste_buffer = ''

  def feed(self, data: str) -> None:
    body = data.removesuffix('\r')
    if not self._in_bracketed_paste and len(body) >= _PASTED and '\x1b' not in data:
      self.feed_key_callback(KeyPress(Keys.BracketedPaste, body))
      data = data[len(body) :]
    super().feed(data)
    if len(self._paste_buffer) > _LONGEST:  # Reading on would take minutes.
      self._paste_buffer = _TOO_LONG + self._paste_buffer[-len('\x1b[201') :]


class Lines:
  """Input line by line, from a terminal without cursor control."""

  def message(self) -> str | None:
    try:
      return _line('> ')
    except EOFError:
      return None

  def choice(self, keys: Mapping[str, str]) -> Choice:
    while True:
      print(question_of(keys), end=' ', flush=True)
      if _settled():
        print(f'\n{_IGNORED}', end=' ', flush=True)
      try:
        line = _line()
      except EOFError:
        return Choice('q')
      if _discarded():  # It was the first of several lines.
        continue
      if line.startswith(COMMAND):
        return Choice(COMMAND, line)
      key, _, rest = line.partition(' ')
      if key in keys and (not rest or key in WITH_TEXT):
        return Choice(key, rest.strip() or None)
      print(_no_key(key) if len(line) == 1 else BY_ITSELF)

  def line(self, question: str, default: str = '') -> str:
    try:
      return _line(f'{question}[Enter: as it is above] ' if default else question) or default
    except EOFError:  # The default is not agreed to.
      return ''

  def edited(self, text: str, kind: str) -> str:
    editor = os.environ.get('VISUAL') or os.environ.get('EDITOR')
    what = 'Arguments as JSON' if kind == 'json' else 'Command'
    return in_editor(editor, text, kind) if editor else self.line(f'{what}, in one line: ')


def _line(question: str = '') -> str:
  """Read a line that the terminal has not cut."""
  with echoing(True):
    while len((line := input(question)).encode(errors='surrogateescape')) >= _LONGEST_LINE:
      print(f'The terminal cuts lines after {_LONGEST_LINE:,} bytes, so that this one is ignored: put it into a file.')
  return whole(line).strip()


def _no_key(key: str) -> str:
  return f'There is no key {key!r} here.'


def question_of(keys: Mapping[str, str]) -> str:
  """Return the line that lists keys with their meanings."""
  return '  '.join(f'[{key}] {meaning}' for key, meaning in keys.items())


@contextlib.contextmanager
def echoing(on: bool) -> Iterator[None]:
  """Let the terminal show what is typed, or not: between questions it would shift the rows of the model's text."""
  if not os.isatty(_TERMINAL):
    yield
    return
  before = termios.tcgetattr(_TERMINAL)
  flags = before[3] | termios.ECHO if on else before[3] & ~termios.ECHO
  termios.tcsetattr(_TERMINAL, termios.TCSANOW, [*before[:3], flags, *before[4:]])
  try:
    yield
  finally:
    termios.tcsetattr(_TERMINAL, termios.TCSANOW, before)


def _discarded() -> bool:
  """Discard what was typed at the terminal and not read yet; return whether there was anything."""
  if not os.isatty(_TERMINAL):
    return False
  with raw_mode(_TERMINAL):  # Otherwise characters of an unfinished line do not count.
    count = fcntl.ioctl(_TERMINAL, termios.FIONREAD, bytes(4))
    termios.tcflush(_TERMINAL, termios.TCIFLUSH)
  return any(count)


def _settled() -> bool:
  """Discard what is typed until nobody types; return whether somebody did."""
  early, last = _discarded(), time.monotonic()
  while time.monotonic() - last < (PAUSE_S if early else _WINDOW_S):
    time.sleep(_LOOK_S)
    if _discarded():
      early, last = True, time.monotonic()
  return early


def in_editor(editor: str, text: str, kind: str) -> str:
  """Let the person edit a text in an editor, in a file whose name ends in its kind, and return the result.

  Raises:
    EditorFailed: the editor cannot be started, or has failed.
  """
  with tempfile.TemporaryDirectory(prefix='sdpo_session_') as folder:
    path = pathlib.Path(folder) / f'arguments.{kind}'
    path.write_text(text, encoding='utf-8')
    try:
      with echoing(True):
        done = subprocess.run([*shlex.split(editor), str(path)], check=False)
      if done.returncode:
        raise EditorFailed(f'The editor {editor} has ended with exit code {done.returncode}: nothing was changed.')
      return path.read_text(encoding='utf-8')
    except (OSError, ValueError) as error:
      raise EditorFailed(
        f'The editor {editor} cannot be used ({first_line(error)}): set EDITOR to another editor.'
      ) from error


def _text_keys() -> KeyBindings:
  """Return key bindings of texts: Enter ends one, Alt-Enter inserts a newline, and a paste is no longer than a text."""
  bindings = KeyBindings()
  bindings.add('enter')(get_by_name('accept-line'))

  @bindings.add('escape', 'enter')
  def newline(event: KeyPressEvent) -> None:
    event.current_buffer.insert_text('\n')

  @bindings.add(Keys.BracketedPaste)
  def paste(event: KeyPressEvent) -> None:
    text, buffer = event.data.replace('\r\n', '\n').replace('\r', '\n'), event.current_buffer
    if not text.startswith(_TOO_LONG) and len(buffer.text) + len(text) <= _LONGEST:
      buffer.insert_text(text)
    else:
      buffer.validation_error = ValidationError(message=_TOO_LONG)

  return bindings
