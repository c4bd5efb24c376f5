"""The tools of an agent: what they do, what they refuse, and that nothing outside of the workspace changes."""

import fnmatch
import os
import pathlib
import threading

from hypothesis import given
from hypothesis import strategies as st
import pytest

from sdpo_jax.environments.workspace import folder, tools
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
    saved.append(toolbox.checkpoint(name, arguments))
    assert toolbox.call(name, arguments).ok
  for name, arguments in {'read': {'path': 'new.txt'}, 'edit': {'path': 'none', 'old': 'a', 'new': 'b'}}.items():
    assert toolbox.checkpoint(name, arguments) is None
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
  with pytest.raises(UserError, match='new.txt does not exist. Nothing is restored.'):
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
  monkeypatch.setattr('sdpo_jax.environments.workspace.shell.shared_files', fail)
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


@pytest.mark.parametrize('path', ['/', '/usr', '/etc/ssl', '/proc/self', '/tmp'])
def test_a_folder_of_the_system_is_no_workspace(path):
  with pytest.raises(UserError, match='a system folder|shared by all users'):
    Shell(pathlib.Path(path))


def test_where_namespaces_are_not_allowed_there_are_no_commands(tmp_path, monkeypatch):
  child = tmp_path / 'child.py'
  child.write_text(
    'import os, sys\nos.write(int(sys.argv[-1]), b\'{"failed": "namespaces are not allowed here"}\\n\')\n'
  )
  monkeypatch.setattr('sdpo_jax.environments.workspace.shell.CHILD', child)
  (tmp_path / 'work').mkdir()
  with pytest.raises(UserError, match='namespaces are not allowed here. Do not allow it any'):
    Shell(tmp_path / 'work')
