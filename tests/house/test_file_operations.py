"""The recorder sees what a process does to files, and the model keeps what fsync promises and nothing more."""

import os
import subprocess
import sys

import pytest

from tests import file_operations, tiny
from tests.file_operations import Disk, Operation

# Everything that changes or names a file, from Python and from a shell that writes by itself, and a thread beside them.
_PROGRAM = """
import os, pathlib, shutil, subprocess, sys, tempfile, threading
from tests import file_operations
root = pathlib.Path(sys.argv[1])
os.chdir(root)
os.makedirs('a/b')
pathlib.Path('a/text').write_text('hello')
with open('a/text', 'r+') as file:
  file.seek(2)
  file.write('LONGER')
  file.truncate(7)
with open('a/text', 'a') as file:
  file.write('!')
  file.flush()
  os.fsync(file.fileno())
os.truncate('a/text', 6)
fd = os.open('b', os.O_RDWR | os.O_CREAT)
os.pwrite(fd, b'xyz', 4)
os.writev(fd, [b'12', b'', b'34'])
os.pwritev(fd, [b'5', b'6'], 9)
os.fdatasync(fd)
os.close(fd)
here = os.open('a', os.O_RDONLY)
os.mkdir('c', dir_fd=here)
os.rename('text', 'c/renamed', src_dir_fd=here, dst_dir_fd=here)
os.link('a/c/renamed', 'a/linked')
os.fsync(here)
shutil.copyfile('b', 'copied')
shutil.copytree('a', 'tree')
shutil.rmtree('a')
os.unlink('b')
pathlib.Path('gone').mkdir()
pathlib.Path('gone').rmdir()
descriptor, name = tempfile.mkstemp(dir=root)
os.write(descriptor, b'temporary')
os.replace(name, 'kept')
def lines():
  for number in range(200):
    with open('lines', 'a') as file:
      file.write(f'{number}\\n')
threads = [threading.Thread(target=lines) for _ in range(3)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
subprocess.run(['sh', '-c', 'echo child > child; mv child moved'], check=True)
pathlib.Path('outside').unlink(missing_ok=True)
pathlib.Path(sys.argv[2]).write_text('not recorded')
file_operations.mark('the end')
"""


def recorded(recorder, tmp_path, program: str, *arguments, code: int = 0) -> list[Operation]:
  root = tmp_path / 'root'
  root.mkdir(exist_ok=True)
  done = subprocess.run(
    [sys.executable, '-c', program, root, *arguments],
    env=os.environ | recorder.environment(root, tmp_path / 'log'),
    cwd=tiny.REPOSITORY,
    check=False,
  )
  assert done.returncode == code
  return file_operations.read_log(tmp_path / 'log')


def test_what_was_recorded_makes_the_same_files_again(recorder, tmp_path):
  operations = recorded(recorder, tmp_path, _PROGRAM, tmp_path / 'elsewhere')
  disk = Disk()
  for operation in operations:
    disk.apply(operation)
  tree = file_operations.read_tree(tmp_path / 'root')
  assert disk.now() == tree and tree['tree/c/renamed'] == b'heLONG' and tree['copied'] == b'1234xyz\0\x0056'
  assert tree['lines'].count(b'\n') == 600 and tree['moved'] == b'child\n'
  assert [operation.path for operation in operations if operation.kind == 'mark'] == ['the end']
  synced = [operation.path for operation in operations if operation.kind == 'fsync']
  assert synced == ['a/text', 'b', 'a']
  file_operations.write_tree(disk.now(), tmp_path / 'again')
  assert file_operations.read_tree(tmp_path / 'again') == tree


@pytest.mark.parametrize(
  'program, call',
  [
    ("import mmap; f = open('x', 'w+b'); f.write(b'x'); f.flush(); mmap.mmap(f.fileno(), 1)", 'mmap'),
    ("os.symlink('x', 'y')", 'symlink'),
    ("os.posix_fallocate(os.open('x', os.O_RDWR | os.O_CREAT), 0, 10)", 'fallocate'),
  ],
)
def test_what_cannot_be_followed_is_said(recorder, tmp_path, program, call):
  with pytest.raises(ValueError, match=f'{call}.* cannot be replayed'):
    recorded(recorder, tmp_path, f'import os, sys; os.chdir(sys.argv[1]); {program}')


@pytest.mark.parametrize('fatal, made', [('mkdir b', 'a b1'), ('mkdir b$', 'a b1 b'), ('mkdir ', 'a')])
def test_a_process_ends_at_the_operation_that_is_named(recorder, tmp_path, fatal, made):
  program = """
import os, sys
from tests import file_operations
os.chdir(sys.argv[1])
file_operations.signal_at('SIGKILL ' + sys.argv[2])
for name in ('a', 'b1', 'b', 'c'):
  os.mkdir(name)
"""
  operations = recorded(recorder, tmp_path, program, fatal, code=-9)
  assert [str(operation) for operation in operations] == ['start ', *(f'mkdir {name}' for name in made.split())]
  assert sorted(os.listdir(tmp_path / 'root')) == sorted(made.split())


def test_a_signal_whose_handler_writes_is_handled_after_the_operation(recorder, tmp_path):
  program = """
import os, signal, sys
from tests import file_operations
os.chdir(sys.argv[1])
reader, writer = os.pipe()
os.set_blocking(writer, False)
signal.set_wakeup_fd(writer)
signal.signal(signal.SIGTERM, lambda number, frame: os.mkdir('handled'))
file_operations.signal_at('SIGTERM mkdir a$')
os.mkdir('a')
os.mkdir('b')
"""
  operations = recorded(recorder, tmp_path, program)
  assert [operation.path for operation in operations[1:]] == ['a', 'handled', 'b']


def operation(kind: str, inode: int = 0, path: str = '', target: str = '', offset: int = 0, data: bytes = b''):
  return Operation(kind, 1, inode, path, target, offset, data)


def after(*operations: Operation) -> set[frozenset]:
  """Return what may be there after these operations on an empty disk whose root has the inode 1."""
  disk = Disk()
  for one in (operation('start', 1), *operations):
    disk.apply(one)
  return {frozenset(tree.items()) for _, tree in disk.survivors()}


def trees(*wanted: dict[str, bytes | None]) -> set[frozenset]:
  return {frozenset(tree.items()) for tree in wanted}


CREATED = operation('create', 2, 'x')
WRITTEN = operation('write', 2, 'x', data=b'abcd')


def test_nothing_is_sure_without_a_sync():
  assert after(CREATED, WRITTEN) == trees({}, {'x': b''}, {'x': b'abcd'}, {'x': b'ab'}, {'x': b'\0\0\0\0'})


def test_a_synced_file_has_its_data_but_not_its_name():
  assert after(CREATED, WRITTEN, operation('fsync', 2)) == trees({}, {'x': b'abcd'})


def test_a_synced_directory_has_its_names_but_not_their_data():
  synced = operation('fsync', 1)
  assert after(CREATED, WRITTEN, synced) == trees({'x': b''}, {'x': b'abcd'}, {'x': b'ab'}, {'x': b'\0\0\0\0'})
  assert after(CREATED, WRITTEN, synced, operation('fsync', 2)) == trees({'x': b'abcd'})


def test_what_is_appended_later_may_be_torn_and_what_was_there_not():
  before = CREATED, WRITTEN, operation('fsync', 2), operation('fsync', 1)
  appended = operation('write', 2, 'x', offset=4, data=b'efgh')
  assert after(*before, appended) == trees({'x': b'abcd'}, {'x': b'abcdefgh'}, {'x': b'abcdef'}, {'x': b'abcd\0\0\0\0'})
  assert after(*before, operation('truncate', 2, 'x', offset=1)) == trees({'x': b'abcd'}, {'x': b'a'})


def test_a_rename_without_a_sync_may_be_lost_and_publish_nothing():
  old = (
    operation('create', 3, 'y'),
    operation('write', 3, 'y', data=b'old'),
    operation('fsync', 3),
    operation('fsync', 1),
  )
  renamed = operation('rename', 2, 'x', 'y')
  unsynced = after(*old, CREATED, WRITTEN, renamed)
  assert frozenset({'y': b''}.items()) in unsynced  # The name without the data: why the data are synced before.
  safe = after(*old, CREATED, WRITTEN, operation('fsync', 2), renamed)
  assert safe == trees({'y': b'old'}, {'y': b'old', 'x': b'abcd'}, {'y': b'abcd'})
  assert after(*old, CREATED, WRITTEN, operation('fsync', 2), renamed, operation('fsync', 1)) == trees({'y': b'abcd'})


def test_names_that_are_not_synced_may_be_there_in_any_order():
  made = [operation('mkdir', number, name) for number, name in ((2, 'a'), (3, 'b'), (4, 'c'))]
  assert after(*made) == trees(
    {},
    {'a': None},
    {'b': None},
    {'c': None},
    {'a': None, 'b': None},
    {'a': None, 'c': None},
    {'b': None, 'c': None},
    {'a': None, 'b': None, 'c': None},
  )


def test_a_rename_between_directories_is_sure_once_both_are_synced():
  made = operation('mkdir', 2, 'a'), operation('mkdir', 3, 'b'), operation('create', 4, 'a/x')
  synced = operation('fsync', 1), operation('fsync', 2), operation('fsync', 3)
  moved = operation('rename', 4, 'a/x', 'b/x')
  both = trees({'a': None, 'b': None, 'a/x': b''}, {'a': None, 'b': None, 'b/x': b''})
  assert after(*made, *synced, moved) == after(*made, *synced, moved, operation('fsync', 3)) == both
  assert after(*made, *synced, moved, *synced) == trees({'a': None, 'b': None, 'b/x': b''})


def test_a_removed_file_is_there_until_its_directory_is_synced():
  made = CREATED, operation('fsync', 2), operation('fsync', 1), operation('unlink', path='x')
  assert after(*made) == trees({}, {'x': b''})
  assert after(*made, operation('fsync', 1)) == trees({})


def test_files_in_a_directory_that_is_lost_are_lost():
  inside = operation('mkdir', 2, 'a'), operation('create', 3, 'a/x'), operation('fsync', 3), operation('fsync', 2)
  assert after(*inside) == trees({}, {'a': None, 'a/x': b''})
