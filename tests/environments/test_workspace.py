"""The tools of an agent: what they do, what they refuse, and that nothing outside of the workspace changes."""

import contextlib
import errno
import fnmatch
import os
import pathlib
import shutil
import socket
import sys
import threading
import types

from hypothesis import given
from hypothesis import strategies as st
import pytest

import sdpo_jax
from sdpo_jax.config.locations import CACHE
from sdpo_jax.distributed import accelerators
from sdpo_jax.environments.workspace import boundary, folder, survey, tools
from sdpo_jax.environments.workspace.folder import Folder, PathError
from sdpo_jax.environments.workspace.shell import Cancellation, Shell, ShellLimits
from sdpo_jax.environments.workspace.tools import BadCall, Toolbox
from sdpo_jax.errors import UserError

CODE = 'def area(width, height):\n  return width * height\n\n\nprint(area(2, 3))\n'


@pytest.fixture
def workspace(tmp_path):
  folder = tmp_path / 'work'
  (folder / 'src' / 'deep').mkdir(parents=True)
  (folder / 'src' / 'area.py').write_text(CODE)
  (folder / 'src' / 'deep' / 'notes.txt').write_text('first\nsecond\nthird')
  (folder / '.git').mkdir()
  (folder / '.git' / 'config').write_text('[core]\n')
  (tmp_path / 'outside').mkdir()
  (tmp_path / 'outside' / 'secret.txt').write_text('secret')
  return folder


@pytest.fixture
def toolbox(workspace):
  return Toolbox(workspace, None)


@pytest.fixture(scope='module')
def shell(tmp_path_factory):
  folder = tmp_path_factory.mktemp('shell') / 'work'
  folder.mkdir()
  try:
    made = Shell(folder, ShellLimits(wall_s=60, memory_mb=1024, tmp_mb=8, file_mb=4, processes=64))
  except UserError as error:
    if 'user namespaces' not in str(error):
      raise
    pytest.skip(f'commands cannot be run here: {error}')
  return folder, made


def test_a_checkpoint_takes_back_the_change_of_one_file(toolbox, workspace):
  calls = {
    'write': {'path': 'new.txt', 'content': 'new'},
    'edit': {'path': 'src/area.py', 'old': 'return', 'new': 'yield'},
    'edit_lines': {'path': 'src/area.py', 'start': 1, 'end': 1, 'content': '#'},
  }
  saved = []
  for name, arguments in calls.items():
    saved.append(toolbox.checkpoint(*toolbox.preview(name, arguments)))
    assert toolbox.call(name, arguments).ok
  assert toolbox.preview('read', {'path': 'new.txt'}) is None
  with pytest.raises(BadCall, match='none does not exist'):
    toolbox.preview('edit', {'path': 'none', 'old': 'a', 'new': 'b'})
  os.chmod(workspace / 'src/area.py', 0o750)
  with pytest.raises(UserError, match='src/area.py was changed since'):
    toolbox.restore(**saved[1])
  assert [toolbox.restore(**each) for each in saved[::-1]] == [
    'src/area.py is as it was before.',
    'src/area.py is as it was before.',
    'new.txt, which was new, is removed.',
  ]
  assert (workspace / 'src/area.py').read_text() == CODE and not (workspace / 'new.txt').exists()
  assert (workspace / 'src/area.py').stat().st_mode & 0o777 == 0o750
  assert toolbox.restore(**saved[0]) == 'new.txt is already as it was before.'
  (workspace / 'new.txt').mkdir()
  with pytest.raises(UserError, match='new.txt is a folder. Nothing is restored.'):
    toolbox.restore(**saved[0])


def test_files_are_read_written_and_edited(toolbox, workspace):
  assert toolbox.call('read', {'path': 'src/area.py', 'offset': 2, 'limit': 1}).text == (
    '2\t  return width * height\n(3 more lines)'
  )
  assert (
    toolbox.call('write', {'path': 'new/folder/a.txt', 'content': 'one\n'}).text == 'Wrote new/folder/a.txt: 1 line.'
  )
  assert (workspace / 'new/folder/a.txt').read_text() == 'one\n'
  os.chmod(workspace / 'src/area.py', 0o750)
  edited = toolbox.call('edit', {'path': 'src/area.py', 'old': 'width * height', 'new': 'height * width'})
  assert edited.ok and 'return height * width' in (workspace / 'src/area.py').read_text()
  assert (workspace / 'src/area.py').stat().st_mode & 0o777 == 0o750
  lines = {'path': 'src/deep/notes.txt', 'start': 2, 'end': 2, 'content': '2a\n2b'}
  assert toolbox.call('edit_lines', lines).text == 'Replaced lines 2 to 2 of src/deep/notes.txt (+1 lines).'
  assert (workspace / 'src/deep/notes.txt').read_text() == 'first\n2a\n2b\nthird'
  toolbox.call('edit_lines', {'path': 'src/deep/notes.txt', 'start': 5, 'end': 4, 'content': 'last\n'})
  assert (workspace / 'src/deep/notes.txt').read_text() == 'first\n2a\n2b\nthird\nlast\n'
  absolute = toolbox.call('read', {'path': str(workspace / 'src/area.py')})
  assert absolute.ok and absolute.text.startswith('1\tdef area')


def test_files_are_found(toolbox):
  assert toolbox.call('glob', {'pattern': '**/*.py'}).text == 'src/area.py'
  assert toolbox.call('glob', {'pattern': 'src/*'}).text == 'src/area.py'
  assert toolbox.call('glob', {'pattern': '**'}).text == 'src/area.py\nsrc/deep/notes.txt'
  assert toolbox.call('grep', {'pattern': r'^\s+return'}).text == 'src/area.py:2:  return width * height'
  assert toolbox.call('grep', {'pattern': 'second', 'path': 'src/deep'}).text == 'src/deep/notes.txt:2:second'
  assert toolbox.call('grep', {'pattern': 'second', 'path': 'src/deep/notes.txt'}).text == 'src/deep/notes.txt:2:second'
  assert toolbox.call('grep', {'pattern': 'second', 'glob': '**/*.py'}).text == '(No line matches.)'


def names(pattern, path):
  """Says whether a path matches, part by part."""
  if not pattern or not path:
    return not pattern and not path
  if pattern[0] == '**':
    # ** alone at the end stands for a file, too.
    return names(pattern[1:] or ['*'], path) or (len(path) > 1 and names(pattern, path[1:]))
  return fnmatch.fnmatchcase(path[0], pattern[0]) and names(pattern[1:], path[1:])


PARTS = st.sampled_from(['**', '**', 'a', 'b', '*', 'a*', '?', '[ab]', '[!a]', '[.*]', '[].]', '*.py', '.a', 'a.b'])
FILE_PARTS = st.sampled_from(['a', 'b', 'ab', '.', 'x.py', '.a', 'a.b', 'axb', '*', ']'])


@given(st.lists(PARTS, min_size=1, max_size=6), st.lists(FILE_PARTS, min_size=1, max_size=6))
def test_patterns_of_paths_match_part_by_part(pattern, path):
  found = tools.matcher('/'.join(pattern)).fullmatch('/'.join(path)) is not None
  assert found == names(pattern, path)


@given(st.text('ab*?[]!^-.\\\\|&~/(', min_size=1, max_size=12))
def test_every_pattern_of_paths_is_one(pattern):
  tools.matcher(pattern).fullmatch('a/b')


def test_no_pattern_of_paths_takes_for_ever():
  assert tools.matcher('**/a/' * 40 + 'b').fullmatch('a/' * 100 + 'c') is None
  assert tools.matcher('**/' * 300 + 'b').fullmatch('a/' * 100 + 'b') is not None


def test_a_search_that_fails_is_an_answer(toolbox, tmp_path, monkeypatch):
  broken = tmp_path / 'broken.py'
  broken.write_text('raise MemoryError')
  monkeypatch.setattr(tools, 'SEARCH', broken)
  answer = toolbox.call('grep', {'pattern': 'a'})
  assert not answer.ok and 'has ended with exit code 1' in answer.text and answer.field == 'pattern'


@pytest.mark.parametrize(
  'name, arguments, field, sentence',
  [
    ('delete', {}, None, "There is no tool 'delete'; there are read"),
    ('read', ['a'], None, 'must be an object'),
    ('read', {}, 'path', "read needs 'path'"),
    ('read', {'path': 1}, 'path', "'path' of read must be of type string, not 1"),
    ('read', {'path': 'src/area.py', 'offset': True}, 'offset', 'must be of type integer'),
    ('read', {'path': 'src/area.py', 'offset': 0}, 'offset', 'at least 1'),
    ('read', {'path': 'src/area.py', 'offset': 9}, 'offset', 'has 5 lines'),
    ('read', {'path': 'src/area.py', 'mode': 'r'}, 'mode', "takes no 'mode'"),
    ('read', {'path': 'src/area.py', 'm' * 300: 'r'}, 'm' * 100, "takes no 'mmm"),
    ('read', {'path': 'none.txt'}, 'path', 'none.txt does not exist'),
    ('read', {'path': 'src'}, 'path', 'src is a folder'),
    ('read', {'path': ''}, 'path', 'empty'),
    ('read', {'path': 'a\0b'}, 'path', 'null byte'),
    ('write', {'path': 'src', 'content': ''}, 'path', 'src is a folder'),
    ('write', {'path': 'src/area.bin', 'content': ''}, 'path', 'src/area.bin is not text in UTF-8'),
    ('write', {'path': '../outside/a', 'content': ''}, 'path', 'outside of the workspace'),
    ('write', {'path': 'a', 'content': '\ud800'}, 'content', 'half of a character'),
    ('write', {'path': 'a\ud800', 'content': ''}, 'path', 'half of a character at position 1'),
    ('read', {'path': '\ud800'}, 'path', 'half of a character'),
    ('grep', {'pattern': 'a', 'path': '\ud800'}, 'path', 'half of a character'),
    ('edit', {'path': 'src/area.py', 'old': 'def area(w):\n  x', 'new': ''}, 'old', 'does not occur'),
    (
      'edit',
      {'path': 'src/area.py', 'old': 'area', 'new': 'b'},
      'old',
      'occurs 2 times in src/area.py, next in line 5',
    ),
    ('edit', {'path': 'src/area.py', 'old': '', 'new': 'b'}, 'old', 'is empty'),
    ('edit_lines', {'path': 'src/area.py', 'start': 9, 'end': 9, 'content': ''}, 'start', 'has 5 lines'),
    ('edit_lines', {'path': 'src/area.py', 'start': 3, 'end': 9, 'content': ''}, 'end', 'between 2 and that, not 9'),
    ('grep', {'pattern': '('}, 'pattern', 'not a valid regular expression'),
    ('grep', {'pattern': 'a', 'path': '../outside'}, 'path', 'outside of the workspace'),
    ('bash', {'command': 'ls'}, None, 'Commands are not allowed here'),
    ('bash', {'command': 'ls', 'timeout': float('nan')}, 'timeout', 'at least 0.1'),
  ],
)
def test_what_cannot_be_done_is_said(toolbox, workspace, name, arguments, field, sentence):
  (workspace / 'src' / 'area.bin').write_bytes(b'\xff\xfe')
  answer = toolbox.call(name, arguments)
  assert not answer.ok and sentence in answer.text and answer.field == field


@pytest.mark.parametrize('content', [b'\xff', b'x' * (tools.MAX_FILE_BYTES + 1)])
def test_what_cannot_be_shown_is_not_replaced(toolbox, workspace, content):
  (workspace / 'a').write_bytes(content)
  with pytest.raises(BadCall, match='not text|more than the'):
    toolbox.preview('write', {'path': 'a', 'content': 'x'})
  assert not toolbox.call('write', {'path': 'a', 'content': 'x'}).ok and (workspace / 'a').read_bytes() == content


def test_names_of_files_that_are_no_text_are_answers_that_can_be_sent(toolbox, workspace):
  with open(os.fsencode(workspace) + b'/caf\xe9.md', 'w') as file:
    file.write('here')
  answers = [toolbox.call('glob', {'pattern': '*.md'}), toolbox.call('grep', {'pattern': 'here'})]
  assert [answer.text for answer in answers] == ['caf\\udce9.md', 'caf\\udce9.md:1:here']


def test_a_workspace_that_commands_cannot_have_is_an_answer(workspace, shell, monkeypatch):
  def fail(path):
    raise PermissionError(13, 'Permission denied', 'closed')

  _, made = shell
  monkeypatch.setattr('sdpo_jax.environments.workspace.shell.survey', fail)
  answer = Toolbox(workspace, made).call('bash', {'command': 'ls'})
  assert not answer.ok and 'could not be run: The workspace' in answer.text and 'closed' in answer.text


def test_a_line_that_looks_like_the_missing_text_is_named(toolbox):
  call = {'path': 'src/area.py', 'old': 'return width * height\n  # twice', 'new': ''}
  assert toolbox.call('edit', call).line == 2


def test_a_search_without_end_is_ended(toolbox, workspace, monkeypatch):
  (workspace / 'a.txt').write_text('a' * 60 + 'b\n')
  monkeypatch.setattr(tools, 'SEARCH_S', 0.5)
  answer = toolbox.call('grep', {'pattern': '(a+)+$'})
  assert not answer.ok and 'simpler pattern' in answer.text


def test_a_change_is_shown_before_it_is_made(toolbox, workspace):
  path, before, after = toolbox.preview('edit', {'path': 'src/area.py', 'old': '(2, 3)', 'new': '(4, 5)'})
  assert (path, before, after) == ('src/area.py', CODE, CODE.replace('(2, 3)', '(4, 5)'))
  assert toolbox.preview('write', {'path': 'new.txt', 'content': 'x'}) == ('new.txt', '', 'x')
  assert toolbox.preview('read', {'path': 'src/area.py'}) is None
  with pytest.raises(BadCall, match='does not occur'):
    toolbox.preview('edit', {'path': 'src/area.py', 'old': 'none', 'new': ''})
  assert (workspace / 'src/area.py').read_text() == CODE and not (workspace / 'new.txt').exists()


def test_long_answers_lose_their_middle(toolbox, workspace):
  (workspace / 'long.txt').write_text('x' * 50_000)
  answer = toolbox.call('read', {'path': 'long.txt'})
  assert answer.dropped == 50_002 - tools.MAX_ANSWER and f'{answer.dropped} characters are left out' in answer.text


ATTACKS = {
  'the folder above': lambda work: '../outside/secret.txt',
  'an absolute path': lambda work: str(work.parent / 'outside/secret.txt'),
  'up from a folder': lambda work: 'src/../../outside/secret.txt',
  'a link to a file': lambda work: link(work / 'link', work.parent / 'outside/secret.txt'),
  'a link to a folder': lambda work: link(work / 'folder', work.parent / 'outside') + '/secret.txt',
  'a relative link': lambda work: link(work / 'relative', pathlib.Path('../outside')) + '/secret.txt',
  'a link to the root': lambda work: link(work / 'root', pathlib.Path('/')) + str(work.parent / 'outside/secret.txt'),
  "this process's root": lambda work: (
    link(work / 'magic', pathlib.Path('/proc/self/root')) + str(work.parent / 'outside/secret.txt')
  ),
}


def link(at: pathlib.Path, to: pathlib.Path) -> str:
  at.symlink_to(to)
  return at.name


@pytest.mark.parametrize('attack', ATTACKS)
@pytest.mark.parametrize('by_parts', [False, True])
def test_no_path_leads_out(workspace, monkeypatch, attack, by_parts):
  if by_parts:
    monkeypatch.setattr(folder, 'OPENAT2', 2**20)  # A call that no kernel has.
  path, toolbox = ATTACKS[attack](workspace), Toolbox(workspace, None)
  assert not toolbox.call('read', {'path': path}).ok
  assert not toolbox.call('write', {'path': path, 'content': 'changed'}).ok
  assert not toolbox.call('edit', {'path': path, 'old': 'secret', 'new': 'changed'}).ok
  assert (
    not toolbox.call('write', {'path': path.replace('secret.txt', 'new/file.txt'), 'content': ''}).ok
    or 'link' in attack
  )
  assert 'secret' not in toolbox.call('grep', {'pattern': 'secret'}).text
  outside = workspace.parent / 'outside'
  assert os.listdir(outside) == ['secret.txt'] and (outside / 'secret.txt').read_text() == 'secret'


def test_a_further_name_of_a_file_outside_is_replaced_and_not_written_to(workspace):
  os.link(workspace.parent / 'outside/secret.txt', workspace / 'hard.txt')
  assert Toolbox(workspace, None).call('write', {'path': 'hard.txt', 'content': 'changed'}).ok
  assert (workspace / 'hard.txt').read_text() == 'changed'
  assert (workspace.parent / 'outside/secret.txt').read_text() == 'secret'


def test_a_link_within_the_workspace_is_read_through_and_not_written_over(workspace):
  (workspace / 'inner').symlink_to('src')
  (workspace / 'same.py').symlink_to('src/area.py')
  toolbox = Toolbox(workspace, None)
  assert toolbox.call('read', {'path': 'inner/area.py'}).ok and toolbox.call('read', {'path': 'same.py'}).ok
  refused = toolbox.call('write', {'path': 'same.py', 'content': ''})
  assert not refused.ok and 'is a link' in refused.text and (workspace / 'same.py').is_symlink()


def test_devices_and_pipes_are_not_opened(workspace):
  os.mkfifo(workspace / 'pipe')
  toolbox = Toolbox(workspace, None)
  for name, arguments in (('read', {}), ('write', {'content': 'x'})):
    answer = toolbox.call(name, {'path': 'pipe', **arguments})
    assert not answer.ok and 'not a regular file' in answer.text


def test_a_file_that_cannot_be_written_leaves_the_old_one(workspace, monkeypatch):
  def full(*arguments, **options):
    raise OSError(28, 'No space left on device')

  folder = Folder(workspace)
  monkeypatch.setattr(os, 'replace', full)
  with pytest.raises(PathError, match='the disk is full'):
    folder.write('src/area.py', b'new')
  assert (workspace / 'src/area.py').read_text() == CODE and sorted(os.listdir(workspace / 'src')) == [
    'area.py',
    'deep',
  ]


def test_commands_work_in_the_workspace_and_nowhere_else(shell):
  folder, bash = shell
  (folder / 'a.txt').write_text('a\n')
  answer = Toolbox(folder, bash).call('bash', {'command': 'cat a.txt; echo b > b.txt; pwd; git init -q .; ls -a'})
  assert answer.ok and answer.exit_code == 0, answer.text
  assert answer.text.split() == ['a', str(folder), '.', '..', '.git', 'a.txt', 'b.txt']
  failed = Toolbox(folder, bash).call('bash', {'command': 'echo problem >&2; exit 3'})
  assert not failed.ok and failed.exit_code == 3 and failed.text == 'Exit code 3.\nproblem\n'


COMMANDS = {
  'write beside the workspace': 'echo x > ../outside.txt',
  'write to the system': 'echo x > /usr/outside.txt || echo x > /etc/passwd || echo x > /opt/outside.txt',
  'write through a link': 'ln -sfn .. up && echo x > up/outside.txt',
  'write to a file with a further name outside': 'echo x > hard.txt',
  'make a further name of a file outside': 'ln /etc/passwd here || ln ../linked.txt here',
  'mount': 'mount -t tmpfs none /usr || mount --bind / /tmp || unshare -Urm true',
  'reach the network': 'exec 3<>/dev/tcp/127.0.0.1/22 || getent hosts example.com || '
  'python3 -c \'import socket; socket.create_connection(("10.0.0.1", 80), 1)\'',
  'see other processes': f'kill -0 {os.getpid()} || ls /proc/{os.getpid()} || test $(ls -d /proc/[0-9]* | wc -l) -gt 6',
  'read a home': 'cat ~root/.bash_history ~root/.ssh/* ~root/.profile || ls /home/* || cat /etc/shadow',
  'trace the first process': 'cat /proc/1/environ || cat /proc/1/mem || cat /proc/1/maps | grep python',
  'make a device': 'mknod disk b 8 0 || mknod /tmp/null c 1 3',
  'have privileges': 'grep -E "CapEff:.*[1-9a-f]" /proc/self/status || grep "NoNewPrivs:.*0" /proc/self/status',
  'fill the memory': 'python3 -c "bytearray(2 * 1024**3)"',
  'fill the temporary directory': 'head -c 16M /dev/zero > /tmp/full',
  'write a large file': 'head -c 8M /dev/zero > large; test $(stat -c %s large) -gt 5000000',
  "see this process's environment": 'env | grep SECRET_OF_THE_TEST',
}

# Beside a workspace below the temporary directory lies the command's own one, which ends with it.
IN_ITS_OWN = ('write beside the workspace', 'write through a link')


@pytest.mark.parametrize('attack', COMMANDS)
def test_no_command_gets_out(shell, monkeypatch, attack):
  folder, bash = shell
  monkeypatch.setenv('SECRET_OF_THE_TEST', 'x')
  linked = folder.parent / 'linked.txt'
  linked.write_text('outside\n')
  (folder / 'hard.txt').unlink(missing_ok=True)
  os.link(linked, folder / 'hard.txt')
  before = sorted(os.listdir(folder.parent))
  report = bash.run(COMMANDS[attack])
  assert report.status == 'ended' and (report.exit_code or attack in IN_ITS_OWN), report.output.decode()
  assert sorted(os.listdir(folder.parent)) == before and linked.read_text() == 'outside\n'


def test_a_command_ends_with_all_that_it_started(shell):
  folder, bash = shell
  (folder / 'later.txt').unlink(missing_ok=True)
  script = '(setsid sh -c "sleep 0.5; echo x > later.txt" &) ; (sleep 300 &) ; echo done'
  assert bash.run(script).output == b'done\n'
  report = bash.run('sleep 300', wall_s=0.2)
  assert (report.status, report.exit_code) == ('timeout', None)
  assert bash.run('sleep 0.6; ls').output.split().count(b'later.txt') == 0
  assert bash.run('yes', wall_s=0.5).status == 'timeout'


def test_a_command_can_be_cancelled(shell):
  _, bash = shell
  with Cancellation() as cancelled:
    timer = threading.Timer(0.2, cancelled.set)
    timer.start()
    assert bash.run('sleep 300', cancelled=cancelled).status == 'cancelled'


FORKS = """
import os, time
count = 0
try:
  while count < 200:
    if not os.fork():
      time.sleep(300)
    count += 1
except OSError:
  pass
print(count)
"""


def test_too_many_processes_are_not_started(shell):
  folder, bash = shell
  (folder / 'forks.py').write_text(FORKS)
  report = bash.run('python3 forks.py')
  assert report.status == 'ended' and 10 < int(report.output) < 64


def test_long_output_keeps_its_beginning_and_its_end(shell):
  folder, bash = shell
  answer = Toolbox(folder, bash).call('bash', {'command': 'seq 1000000'})
  assert answer.ok and answer.text.startswith('1\n2\n') and answer.text.endswith('999999\n1000000\n')
  assert answer.dropped > 6_000_000


SPECIAL = {
  'chmod': 'touch x; chmod 4755 x',
  'group': 'touch x; chmod g+s x',
  'folder': 'mkdir -m 2755 folder || chmod 2755 folder',
  'install': 'install -m 6755 /usr/bin/env x',
  'archive': 'mkdir in; cp /usr/bin/env in; tar --mode=4755 -cf a.tar in; rm -r in; tar -xpf a.tar',
  'open': 'python3 -c "import os; os.open(\'x\', os.O_CREAT | os.O_WRONLY, 0o4755)"',
  'unnamed': 'python3 -c "import os; os.open(\'.\', os.O_TMPFILE | os.O_WRONLY, 0o4755)"',
  'fchmod': 'python3 -c "import os; os.fchmod(os.open(\'x\', os.O_CREAT | os.O_WRONLY, 0o755), 0o4755)"',
  'fchmodat2': 'touch x; python3 -c "import ctypes; c = ctypes.CDLL(None); '
  "exit(c.syscall(452, -100, b'x', 0o4755, 0) != 0)\"",
  'openat2': 'python3 -c "import ctypes, struct; c = ctypes.CDLL(None); '
  "exit(c.syscall(437, -100, b'x', struct.pack('=3Q', 0o101, 0o4755, 0), 24) < 0)\"",
  'capability': 'cp /usr/bin/env x; python3 -c "import os; '
  "os.setxattr('x', 'security.capability', bytes.fromhex('0100000200040000' + '00' * 12))\"",
  'node': 'python3 -c "import os; os.mknod(\'x\', 0o104755)"',
}


@pytest.mark.parametrize('how', SPECIAL)
def test_no_command_leaves_a_file_that_runs_with_its_owners_rights(shell, how):
  folder, bash = shell
  for path in folder.iterdir():
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
  report = bash.run(SPECIAL[how])
  found = {str(path): path.lstat().st_mode & 0o6000 for path in folder.rglob('*')}
  assert report.status == 'ended' and report.exit_code and not any(found.values()), (report.output, found)
  assert not any('security.capability' in os.listxattr(path) for path in found)


def test_a_file_that_has_such_rights_already_is_not_changed(shell):
  folder, bash = shell
  (folder / 'mine').write_text('mine')
  os.chmod(folder / 'mine', 0o4755)
  assert bash.run('echo x > mine').exit_code and (folder / 'mine').stat().st_mode & 0o4000
  assert Toolbox(folder, None).call('write', {'path': 'mine', 'content': 'new'}).ok
  assert (folder / 'mine').stat().st_mode & 0o7777 == 0o755


GROWTH = {  # What a command does, and whether it is stopped.
  'files': ('for i in 1 2 3 4; do head -c 12M /dev/zero > big$i; sleep 0.1; done; sleep 9', True),
  'a removed file that is open': ('exec 5> u; rm u; head -c 30M /dev/zero >&5; sleep 9', True),
  'folders that move': (
    'mkdir a; head -c 30M /dev/zero > a/f; while :; do mv a b; mv b a; done',
    True,
  ),
  'room that is taken at once': ('fallocate -l 30M f', False),
  'a file with holes': ('truncate -s 30M f; sleep 0.3', False),
  'one file with many names': ('head -c 12M /dev/zero > f; for i in 1 2 3; do ln f f$i; done; sleep 0.3', False),
  'a file in place of another': ('head -c 12M /dev/zero > f; rm f; head -c 12M /dev/zero > f; sleep 0.3', False),
}


@pytest.mark.parametrize('how', GROWTH)
def test_what_a_command_adds_to_the_disk_is_limited(shell, tmp_path, how):
  bash = Shell(tmp_path, ShellLimits(wall_s=60, disk_mb=16, file_mb=40))
  command, stopped = GROWTH[how]
  answer = Toolbox(tmp_path, bash).call('bash', {'command': command})
  assert ('has added more than 16 MB' in answer.text or 'are moved' in answer.text) == stopped, answer.text


def test_another_program_that_fills_the_disk_ends_no_command(shell, tmp_path, monkeypatch):
  (tmp_path / 'work').mkdir()
  bash = Shell(tmp_path / 'work', ShellLimits(disk_mb=16))
  filling = threading.Timer(0.3, (tmp_path / 'other').write_bytes, [bytes(40 * 2**20)])
  looks, look = [], survey.survey
  monkeypatch.setattr(survey, 'survey', lambda workspace: looks.append(workspace) or look(workspace))
  filling.start()
  assert bash.run('sleep 1').status == 'ended' and looks
  filling.join()


def test_a_command_ends_before_the_disk_is_full(tmp_path, monkeypatch):
  rooms = iter([2**30, 2**29, 2**27])
  monkeypatch.setattr(os, 'statvfs', lambda path: os.statvfs_result([1, 1, 0, 0, next(rooms), 0, 0, 2**24, 0, 255]))
  limit = survey.DiskLimit(tmp_path, survey.survey(tmp_path), 2**40)
  assert limit.exceeded(os.getpid()) is None and limit.exceeded(os.getpid()) == 'its disk is almost full'


def test_only_usual_sockets_can_be_made(shell):
  _, bash = shell
  probe = 'import socket\nfor family in range(64):\n  for kind in (1, 2, 3):\n    try: socket.socket(family, kind)\n'
  report = bash.run(f'echo "{probe}    except OSError: continue\n    print(family)" | sed "s/\\\\n/\\n/g" | python3')
  assert {*report.output.split()} <= {b'1', b'2', b'10', b'16'} and report.exit_code == 0, report.output


def test_a_socket_of_a_program_outside_is_out_of_reach(shell, monkeypatch):
  folder, bash = shell
  monkeypatch.chdir(folder)
  with socket.socket(socket.AF_UNIX) as outside, contextlib.closing(socket.socket(socket.AF_UNIX)) as ended:
    outside.bind('outside')
    outside.listen()
    ended.bind('ended')
    ended.close()
    reach = 'import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])'
    report = bash.run(f'python3 -c "{reach}" outside; echo $?; rm ended && echo removed')
    assert report.output.endswith(b'1\nremoved\n') and b'ConnectionRefused' in report.output
    outside.setblocking(False)
    with pytest.raises(BlockingIOError):
      outside.accept()
  os.unlink('outside')


PROJECT = """
import http.server, multiprocessing, os, pty, socket, threading, unittest, urllib.request

class Project(unittest.TestCase):
  def test_server(self):
    for host, kind in (('localhost', socket.AF_INET), ('::1', socket.AF_INET6)):
      class Server(http.server.ThreadingHTTPServer):
        address_family = kind
      with Server((host, 0), http.server.SimpleHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        shown = f'[{host}]' if ':' in host else host
        with urllib.request.urlopen(f'http://{shown}:{server.server_address[1]}/project.py', timeout=60) as answer:
          self.assertIn(b'class Project', answer.read())
        server.shutdown()

  def test_pool(self):
    for method in ('fork', 'spawn'):
      with multiprocessing.get_context(method).Pool(2) as pool:
        self.assertEqual(pool.map(abs, range(-3, 0)), [3, 2, 1])

  def test_terminal(self):
    child, at = pty.fork()
    if not child:
      os.execvp('bash', ['bash', '-c', 'read -p name? name < /dev/tty; echo hello $name; tty'])
    os.write(at, b'you\\n')
    said = b''
    try:
      while more := os.read(at, 1000):
        said += more
    except OSError:
      pass
    self.assertIn(b'hello you', said)
    self.assertIn(b'/dev/pts/0', said)
    os.waitpid(child, 0)

  def test_expect(self):
    try:
      import pexpect
    except ImportError:
      self.skipTest('pexpect is not installed')
    child = pexpect.spawn('python3 -q', timeout=60)
    child.sendline('print(6 * 7)')
    child.expect('42')

if __name__ == '__main__':
  unittest.main()
"""


def test_a_projects_tests_with_servers_processes_and_terminals_pass(shell):
  folder, bash = shell
  (folder / 'project.py').write_text(PROJECT)
  if bash.notes:
    pytest.skip(bash.notes)
  report = bash.run('python3 project.py && df /dev/shm | tail -1')
  assert report.exit_code == 0 and b'/dev/shm' in report.output, report.output.decode()


def test_commands_read_further_folders_and_variables_that_are_named(shell, tmp_path, monkeypatch):
  (tmp_path / 'data' / 'in').mkdir(parents=True)
  (tmp_path / 'data' / 'rows.txt').write_text('rows')
  (tmp_path / 'work').mkdir()
  monkeypatch.setenv('OF_MINE', 'given')
  readable = boundary.readable_folders(
    [str(tmp_path / 'data' / 'in'), str(tmp_path / 'data')], tmp_path / 'work', tmp_path / 'state'
  )
  variables = boundary.variables(['OF_MINE', 'NEW=a=b'], os.environ)
  bash = Shell(tmp_path / 'work', readable=readable, variables=variables)
  report = bash.run(f'cat {tmp_path}/data/rows.txt; echo $OF_MINE $NEW; ls ..; touch {tmp_path}/data/x')
  assert report.output.startswith(b'rowsgiven a=b\ndata\nwork\n') and report.exit_code == 1
  assert b'Read-only' in report.output and not (tmp_path / 'data' / 'x').exists()
  above = Shell(tmp_path / 'work', readable=[str(tmp_path)])
  assert above.run('ls ..; touch here; touch ../there').output.startswith(b'data\nwork\n')
  assert (tmp_path / 'work' / 'here').exists() and not (tmp_path / 'there').exists()


@pytest.mark.parametrize(
  'function, given, sentence',
  [
    ('readable_folders', 'none', '--readable=none is not a folder'),
    ('readable_folders', '', '--readable= is not a folder'),
    ('readable_folders', 'work/in', '--readable=work/in is in the workspace, which commands read anyway'),
    ('readable_folders', '.', 'the histories of sessions are in'),
    ('readable_folders', 'state/in', 'the histories of sessions are in'),
    ('readable_folders', '/', 'the histories of sessions are in'),
    ('readable_folders', '/proc/self', 'have a /proc/.* of their own'),
    ('variables', 'NOT_SET', '--env=NOT_SET: this variable is not set'),
    ('variables', 'a b=c', 'write the name of a variable'),
  ],
)
def test_what_commands_cannot_have_is_named(tmp_path, monkeypatch, function, given, sentence):
  monkeypatch.chdir(tmp_path)
  for name in ('state', 'work'):
    (tmp_path / name / 'in').mkdir(parents=True)
  more = (tmp_path / 'work', tmp_path / 'state') if function == 'readable_folders' else ({},)
  with pytest.raises(UserError, match=sentence):
    getattr(boundary, function)([given], *more)


def test_many_files_with_further_names_outside_cost_no_time_and_stay(shell, tmp_path, monkeypatch):
  monkeypatch.setattr(survey, '_SINGLE', 3)
  work = tmp_path / 'work'
  for name in ('a/b/one', 'a/b/c/two', 'a/b/c/three', 'd/four', 'five'):
    (work / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name.replace('/', '_')).write_text('kept')
    os.link(tmp_path / name.replace('/', '_'), work / name)
  assert sorted(survey.survey(work).closed) == [f'{work}/a/b', f'{work}/d', f'{work}/five']
  report = Shell(work).run('for file in $(find . -type f); do echo x > $file; done; echo new > a/new; echo new > new')
  assert report.exit_code == 0 and (work / 'a' / 'new').read_text() == (work / 'new').read_text() == 'new\n'
  assert {path.read_text() for path in tmp_path.iterdir() if path.is_file()} == {'kept'}


def test_a_folder_that_is_replaced_by_a_link_is_not_followed(workspace, monkeypatch):
  outside, opened = workspace.parent / 'outside', os.open
  (outside / 'deep').mkdir()
  alone = survey.survey(workspace).taken

  def meddling(path, *arguments, **options):
    if str(path).endswith('/src/deep') and not (workspace / 'src').is_symlink():
      shutil.move(workspace / 'src', workspace.parent / 'moved')
      (workspace / 'src').symlink_to(outside)
    return opened(path, *arguments, **options)

  monkeypatch.setattr(os, 'open', meddling)
  found = survey.survey(workspace)
  assert found.taken < alone and found.moved


@pytest.mark.parametrize('listed', [False, True])
def test_commands_find_a_folder_empty_that_cannot_be_read(shell, workspace, monkeypatch, listed):
  opened, scandir = os.open, os.scandir
  (workspace / 'src' / 'hard').hardlink_to(workspace.parent / 'outside' / 'secret.txt')

  def closed(path, *arguments, **options):  # As for a user other than root, to whom nothing is closed.
    if str(path).endswith('/src') and not listed:
      raise PermissionError(errno.EACCES, 'Permission denied', path)
    return opened(path, *arguments, **options)

  def stat(**options):
    raise PermissionError(errno.EACCES, 'Permission denied')

  def names_only(place):
    found = listed and 'area.py' in os.listdir(place)
    return contextlib.nullcontext([types.SimpleNamespace(name='hard', stat=stat)]) if found else scandir(place)

  made = Shell(workspace)
  monkeypatch.setattr(os, 'open', closed)
  monkeypatch.setattr(os, 'scandir', names_only)
  assert survey.survey(workspace).unreadable == [f'{workspace}/src']
  later = Shell(workspace)
  assert 'find 1 folder' not in made.notes and later.notes.startswith(
    'Commands find 1 folder of the workspace empty, since they cannot'
  )
  command = 'ls -A src; cat src/hard; chmod 777 src; mv src aside; echo x > src/hard; echo ok > new'
  answer = Toolbox(workspace, made).call('bash', {'command': command})
  assert answer.ok and answer.text.count('No such file') == 1 and answer.text.count('Read-only') == 2
  assert 'busy' in answer.text and answer.text.endswith('chmod u+rx it outside of the session if they should see it.')
  assert (workspace.parent / 'outside' / 'secret.txt').read_text() == 'secret' and (workspace / 'new').exists()
  assert Toolbox(workspace, later).call('bash', {'command': 'ls src'}).text == '(No output.)'  # The person knows.


def test_a_command_hides_nothing_that_it_adds_to_the_disk(workspace, monkeypatch):
  limit, found = survey.DiskLimit(workspace, survey.survey(workspace), 1), survey.survey(workspace)
  monkeypatch.setattr(survey, 'survey', lambda path: found._replace(unreadable=[f'{path}/new']))
  monkeypatch.setattr(limit, '_free', lambda: (2**40, 0))
  assert 'since it has made folders that cannot be read' in limit.exceeded(os.getpid())


@pytest.mark.parametrize('path', ['/', '/usr', '/etc/ssl', '/proc/self', '/tmp'])
def test_a_folder_of_the_system_is_no_workspace(path):
  with pytest.raises(UserError, match='a system folder|shared by all users'):
    Shell(pathlib.Path(path))


def test_what_a_machine_forbids_is_said(tmp_path, monkeypatch):
  child = tmp_path / 'child.py'
  told = '{"missing": ["a loopback network"]}\\n{"exit_code": 0}\\n'
  child.write_text(f"import os, sys\nos.write(int(sys.argv[-1]), b'{told}')\n")
  monkeypatch.setattr('sdpo_jax.environments.workspace.shell.CHILD', child)
  (tmp_path / 'work').mkdir()
  assert 'This machine forbids commands a loopback network' in Shell(tmp_path / 'work').notes


def test_where_namespaces_are_not_allowed_there_are_no_commands(tmp_path, monkeypatch):
  child = tmp_path / 'child.py'
  child.write_text(
    'import os, sys\nos.write(int(sys.argv[-1]), b\'{"failed": "namespaces are not allowed here"}\\n\')\n'
  )
  monkeypatch.setattr('sdpo_jax.environments.workspace.shell.CHILD', child)
  (tmp_path / 'work').mkdir()
  with pytest.raises(UserError, match='namespaces are not allowed here. Do not allow it any'):
    Shell(tmp_path / 'work')


def test_what_this_program_runs_is_no_workspace(tmp_path, monkeypatch):
  root = pathlib.Path(sdpo_jax.__path__[0]).resolve().parent
  (tmp_path / 'link').symlink_to(root)
  for path in (root, root.parent, root / 'sdpo_jax' / 'terminal', tmp_path / 'link', sys.prefix, sys.base_prefix):
    with pytest.raises(UserError, match='files of this program, in .*|system folder'):
      boundary.checked_workspace(path)
  code = tmp_path / 'checkout' / 'sdpo_jax'
  (code.parent / 'project').mkdir(parents=True)
  code.mkdir()
  monkeypatch.setattr(sdpo_jax, '__path__', [str(code), str(code.parent)])
  with pytest.raises(UserError, match='Name another folder, such as one beside or below it'):
    boundary.checked_workspace(tmp_path)
  project = boundary.checked_workspace(code.parent / 'project')
  with contextlib.suppress(UserError):  # Where there are no namespaces.
    assert Shell(project).run('echo x > ../sdpo_jax/new.py').exit_code and not list(code.iterdir())


def test_what_the_next_start_loads_is_no_workspace(tmp_path, monkeypatch):
  home, away = tmp_path / 'home', tmp_path / 'away'
  away.mkdir()
  (home / 'project').mkdir(parents=True)
  monkeypatch.setenv('HOME', str(home))
  boundary.checked_workspace(home / 'project')
  with pytest.raises(UserError, match='home/.cache/sdpo_jax: what the model changes there would run without'):
    boundary.checked_workspace(home)
  (home / '.cache').symlink_to(away)  # Which the model could replace.
  for place in (home, away):
    with pytest.raises(UserError, match='/sdpo_jax: what the model changes'):
      boundary.checked_workspace(place)
  monkeypatch.setenv('JAX_COMPILATION_CACHE_DIR', 'gs://bucket/programs')
  boundary.checked_workspace(home / 'project')
  monkeypatch.setenv('JAX_COMPILATION_CACHE_DIR', str(home / 'project' / 'programs'))
  with pytest.raises(UserError, match='project/programs: what the model changes'):
    boundary.checked_workspace(home / 'project')


def test_commands_keep_what_they_compile_where_no_workspace_can_be(tmp_path, monkeypatch):
  monkeypatch.setenv('HOME', str(tmp_path))
  monkeypatch.delenv('JAX_COMPILATION_CACHE_DIR', raising=False)
  kept = {}
  monkeypatch.setattr(accelerators, 'skip_absent_tpu', lambda: None)
  monkeypatch.setattr(accelerators.jax.config, 'update', kept.__setitem__)
  accelerators.prepare()
  with pytest.raises(UserError, match='in the workspace'):
    boundary.outside(pathlib.Path(CACHE).expanduser(), kept['jax_compilation_cache_dir'], 'programs')


def test_a_workspace_on_a_read_only_disk_is_named(tmp_path, monkeypatch):
  monkeypatch.setattr(os, 'statvfs', lambda path: os.statvfs_result([0] * 8 + [os.ST_RDONLY, 255]))
  with pytest.raises(UserError, match='is on a read-only disk'):
    boundary.checked_workspace(tmp_path)
