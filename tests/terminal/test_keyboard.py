"""What is typed at a terminal, key by key; and the service that the program starts."""

import io
import os
import re
import signal
import subprocess
import sys
import threading
import time

from prompt_toolkit.application import create_app_session
from prompt_toolkit.data_structures import Size
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from prompt_toolkit.output.vt100 import Vt100_Output
import pytest

from sdpo_jax.errors import UserError
from sdpo_jax.terminal import embedded, keyboard
from sdpo_jax.terminal.inputs import Choice, EditorFailed
from sdpo_jax.terminal.keyboard import Keyboard, Lines, in_editor
from sdpo_jax.terminal.script import OutOfStep, Script

KEYS = {'y': 'approve', 'n': 'deny'}
CTRL_C, CTRL_D, ALT_ENTER = '\x03', '\x04', '\x1b\r'


@pytest.fixture
def typed():
  """Yield a keyboard, and what is typed on it."""
  with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
    yield Keyboard(colours=False), pipe.send_text


def later(send, *texts, after=0.3):
  """Type texts one after the other, with time before each."""

  def typing():
    for text in texts:
      time.sleep(after)
      send(text)

  thread = threading.Thread(target=typing)
  thread.start()
  return thread


def test_one_key_is_a_choice_and_others_do_nothing(typed):
  board, send = typed
  for key, choice in (('y', Choice('y')), ('n', Choice('n')), (CTRL_D, Choice('q'))):
    typing = later(send, key)
    assert board.choice(KEYS) == choice
    typing.join()
  typing = later(send, 'xY\r\x1b[A', 'y', CTRL_C, after=keyboard.PAUSE_S / 2)  # The y comes too soon after a text.
  with pytest.raises(KeyboardInterrupt):
    board.choice(KEYS)
  typing.join()


@pytest.mark.parametrize(
  'text', ['by the way', 'yes', 'n', 'y\r', '\x1by', '/undo\r', CTRL_D, '\x1b[200~y\x1b[201~', 'y' * 5000]
)
def test_what_was_typed_before_the_question_is_no_choice(typed, text):
  board, send = typed
  send(text)
  with pytest.raises(KeyboardInterrupt):
    typing = later(send, CTRL_C, after=0.25)
    board.choice(KEYS)
  typing.join()


def test_a_key_typed_while_the_question_is_prepared_is_no_choice(typed, monkeypatch):
  board, send = typed
  run = keyboard.Application.run

  def slowly(self, **values):
    time.sleep(0.2)
    return run(self, **values)

  monkeypatch.setattr(keyboard.Application, 'run', slowly)
  send('y')
  typing = later(send, CTRL_C, after=0.4)
  with pytest.raises(KeyboardInterrupt):
    board.choice(KEYS)
  typing.join()


@pytest.mark.parametrize('text', ['yes', '\x1b[200~y\x1b[201~', 'n no\r', '/quit\r'])
def test_a_paste_at_a_question_is_no_choice(typed, text):
  board, send = typed
  typing = later(send, text, CTRL_C)
  with pytest.raises(KeyboardInterrupt):
    board.choice(KEYS)
  typing.join()


def test_ctrl_c_is_heard_at_once(typed):
  board, send = typed
  send(CTRL_C)
  with pytest.raises(KeyboardInterrupt):
    board.choice(KEYS)


def test_a_slash_begins_a_command(typed):
  board, send = typed
  typing = later(send, '/', 'undo 3\r')
  assert board.choice(KEYS) == Choice('/', '/undo 3')
  typing.join()


def test_texts_have_lines_and_end_with_enter(typed):
  board, send = typed
  send(f'one{ALT_ENTER}two\r')
  assert board.message() == 'one\ntwo'
  send('\r')
  assert board.message() == ''
  send(CTRL_D)
  assert board.message() is None
  send('because\r')
  assert board.line('Why? ') == 'because'
  send('.bak\r')
  assert board.line('Pattern: ', 'a.py') == 'a.py.bak'


PASTE, END = '\x1b[200~', '\x1b[201~'
LINES = 'line\r\n' * 30


@pytest.mark.parametrize('pasted', [PASTE + LINES + END, LINES])
def test_the_lines_of_a_paste_do_not_end_a_text(typed, pasted):
  """Marked as a paste by the terminal, or not."""
  board, send = typed
  typing = later(send, 'a ', pasted, '\r')
  assert board.message().rstrip() == 'a ' + 'line\n' * 29 + 'line'
  typing.join()


@pytest.mark.parametrize('ask', ['message', 'line'])
def test_a_paste_that_is_too_long_is_left_out_and_the_rest_kept(typed, ask):
  board, send = typed
  typing = later(send, 'kept', f'{PASTE}{"xy " * 300_000}{END}', '.\r')
  started = time.process_time()
  assert getattr(board, ask)(*(['Why? '] if ask == 'line' else [])) == 'kept.'
  assert time.process_time() - started < 60  # Of ten times as many, minutes.
  typing.join()


def test_without_an_editor_the_arguments_are_edited_in_the_prompt(typed, monkeypatch):
  board, send = typed
  monkeypatch.delenv('VISUAL', raising=False)
  monkeypatch.delenv('EDITOR', raising=False)
  send('\x7f}\r')
  assert board.edited('{"a": 1]', 'json') == '{"a": 1}'
  send(f'.{CTRL_C}')
  assert board.edited('ls', 'sh') == ''  # As it was.


def test_an_editor_opens_the_arguments(tmp_path):
  program = tmp_path / 'editor.py'
  code = 'import sys\npath = sys.argv[-1]\ntext = open(path).read()\nopen(path, "w").write(text.upper() + path[-3:])'
  program.write_text(code)
  assert in_editor(f'{sys.executable} {program}', '{"ü": 1}', 'sh') == '{"Ü": 1}.sh'
  with pytest.raises(EditorFailed, match='exit code 3: nothing was changed'):
    in_editor(f'{sys.executable} -c "raise SystemExit(3)"', '', 'sh')
  with pytest.raises(EditorFailed, match='set EDITOR to another editor'):
    in_editor('/none/of/these', '', 'sh')


def test_a_key_that_is_not_offered_is_named(monkeypatch):
  shown = io.StringIO()
  monkeypatch.setattr(keyboard, 'PAUSE_S', 0.15)
  output = Vt100_Output(shown, lambda: Size(rows=40, columns=80), enable_cpr=False)
  with create_pipe_input() as pipe, create_app_session(input=pipe, output=output):
    board = Keyboard(colours=False)
    typing = later(pipe.send_text, 't', 'yes', 'y')
    assert board.choice(KEYS) == Choice('y')
    typing.join()
  out = re.sub(r'\x1b\[[0-9;?]*[A-Za-z]', ' ', shown.getvalue())
  # Only letters that differ are written anew.
  assert re.search(r"There is no key 't' here\..*pause, then choose\..*\? y: approve", out, re.DOTALL)


def test_only_some_keys_may_have_a_text_behind_them(monkeypatch, capsys):
  given = iter(['t', 'y but use rg rather than grep', 'v rest', 'n use rg'])
  monkeypatch.setattr('builtins.input', lambda question='': next(given))
  assert Lines().choice(KEYS) == Choice('n', 'use rg')
  out = capsys.readouterr().out
  assert "There is no key 't' here." in out and out.count('A key counts by itself: only a, n, e and t may') == 2
  with pytest.raises(OutOfStep, match='line 1: .y but use rg. is not a decision; .* A key counts by itself'):
    Script(['y but use rg'], 'script', print).choice(KEYS)


def test_a_terminal_that_takes_lines_only_does(monkeypatch):
  given = iter(['what', 'n No, use rg', '/help', 'y', ' Hello '])
  monkeypatch.setattr('builtins.input', lambda question='': next(given))
  lines = Lines()
  assert lines.choice(KEYS) == Choice('n', 'No, use rg')
  assert lines.choice(KEYS) == Choice('/', '/help')
  assert lines.choice(KEYS) == Choice('y')
  assert lines.message() == 'Hello'

  def ended(question=''):
    raise EOFError

  monkeypatch.setattr('builtins.input', ended)
  assert lines.choice(KEYS) == Choice('q') and lines.message() is None and lines.line('Why? ', 'x') == ''
  assert keyboard.question_of(KEYS) == '[y] approve  [n] deny'


def test_a_line_that_the_terminal_has_cut_is_not_taken_for_the_text(monkeypatch, capsys):
  given = iter(['x' * 4095, 'é' * 2048, 'x' * 4094])
  monkeypatch.setattr('builtins.input', lambda question='': next(given))
  assert Lines().message() == 'x' * 4094 and capsys.readouterr().out.count('cuts lines after 4,095 bytes') == 2


# The service as a child.

PARENT = """
import os, signal, subprocess, sys
child = {child!r}
code = 'import signal, os; os.write(1, b"here"); signal.pause()'
subprocess.Popen([sys.executable, '-I', child, str(os.getpid()), sys.executable, '-c', code])
signal.pause()
"""


@pytest.mark.parametrize('number', [signal.SIGKILL, signal.SIGTERM])
def test_a_child_ends_with_its_parent_however_that_ends(number):
  """The pipe is closed when all who can write into it have ended, and the child is one of them."""
  code = PARENT.format(child=str(embedded.CHILD))
  parent = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE)
  assert os.read(parent.stdout.fileno(), 4) == b'here'
  parent.send_signal(number)
  assert parent.wait() == -number
  assert parent.stdout.read() == b''
  parent.stdout.close()


def test_a_child_whose_parent_has_ended_already_does_not_begin():
  done = subprocess.run(
    [sys.executable, '-I', str(embedded.CHILD), '1', sys.executable, '-c', 'print("begun")'],
    capture_output=True,
    check=False,
  )
  assert done.returncode == 0 and done.stdout == b''


def test_a_service_that_was_killed_is_not_asked_again(tmp_path, monkeypatch):
  child = tmp_path / 'child.py'
  child.write_text(
    'import os, pathlib, signal, sys\npathlib.Path("pid").write_text(str(os.getpid()))\n'
    'print("Listening on http://127.0.0.1:9; ready", file=sys.stderr, flush=True)\nsignal.pause()\n'
  )
  monkeypatch.setattr(embedded, 'CHILD', child)
  service = embedded.Embedded([], tmp_path)
  try:
    client = service.client()
    os.kill(int((tmp_path / 'pid').read_text()), signal.SIGKILL)
    with pytest.raises(UserError, match='was ended by signal 9. Nothing is lost'):
      client.get('/x')
  finally:
    service.stop()
