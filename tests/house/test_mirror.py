"""Tests lie in the room that they are about; what they share lies beside them, and never in a test file."""

from collections.abc import Iterator
import re

from tests import tiny
from tests.conftest import LONGEST, TESTS

# The reference's numbers with the command that checks them, and what is about the whole house.
OF_NO_ROOM = {'golden', 'house'}
IMPORTS = re.compile(r'\bfrom (tests\b[\w.]*) import (\([^)]*\)|[\w, ]+)|\bimport (tests\b[\w.]*)')


def imported(text: str) -> Iterator[str]:
  """Names of what a text imports from the tests, also in the programs that it has in strings."""
  for package, names, module in IMPORTS.findall(text):
    if module:
      yield module
    else:
      yield from (f'{package}.{name.split()[0]}' for name in names.strip('() \n').split(',') if name.strip())


def test_every_folder_of_tests_is_a_room_of_the_product():
  assert sorted(path.name for path in TESTS.glob('test_*.py')) == []
  folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob('*.py')} - {TESTS.relative_to(TESTS)}
  rooms = [folder for folder in folders if folder.parts[0] not in OF_NO_ROOM]
  homes = tiny.REPOSITORY, tiny.REPOSITORY / 'sdpo_jax'
  assert [str(room) for room in rooms if not any(any((home / room).glob('*.py')) for home in homes)] == []
  assert [str(folder) for folder in folders if not (TESTS / folder / '__init__.py').is_file()] == []
  assert len(rooms) > 20


def test_no_test_file_imports_another():
  found, count = [], 0
  for path in TESTS.rglob('*.py'):
    own = '.'.join(path.relative_to(TESTS.parent).with_suffix('').parts)
    for name in imported(path.read_text()):
      count += 1
      if re.search(r'\.test_', name) and not f'{name}.'.startswith(f'{own}.'):
        found.append(f'{own} imports {name}')
  assert found == []
  assert count > 200


def test_imports_of_every_form_are_seen():
  forms = {
    'from T.a import test_b as c, d': ['T.a.test_b', 'T.a.d'],
    'from T.a.test_b import (\n  C,\n  d,\n)': ['T.a.test_b.C', 'T.a.test_b.d'],
    "program = 'import json; from T import test_b; test_b.run()'": ['T.test_b'],
    '  import T.test_b as b': ['T.test_b'],
    'from Tuite import a': [],
  }
  for text, expected in forms.items():  # With a T, since this file is read, too.
    assert list(imported(text.replace('T', 'tests'))) == [name.replace('T', 'tests') for name in expected]


def test_files_that_workers_begin_with_are_there():
  assert [path for path in LONGEST if not (TESTS / path).is_file()] == []
  assert len(set(LONGEST)) == len(LONGEST)
