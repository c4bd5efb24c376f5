"""The table of faults: each is still in the product's text, is another program, and names tests that there are."""

import ast
import collections

import pytest

from benchmarks import mutants


@pytest.mark.parametrize('mutant', mutants.MUTANTS, ids=lambda mutant: f'{mutant.room}: {mutant.fault}')
def test_a_fault_can_be_made(mutant):
  text = (mutants.ROOT / mutant.file).read_text(encoding='utf-8')
  changed = mutant.mutated(text)
  if mutant.file.endswith('.py'):
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text))
  file, _, test = mutant.tests.partition('::')
  assert f'def {test or "test_"}' in (mutants.ROOT / file).read_text(encoding='utf-8')


def test_every_fault_is_another_one():
  assert len({(mutant.file, mutant.new, mutant.old) for mutant in mutants.MUTANTS}) == len(mutants.MUTANTS)
  with pytest.raises(ValueError, match="run.py holds 'a' 2 times, not once"):
    mutants.Mutant('launch/run.py', 'one of two', 'a', 'b', 'tests').mutated('a a')


def test_rooms_have_as_many_faults_as_are_proof():
  count = collections.Counter(mutant.room for mutant in mutants.MUTANTS)
  rooms = {path.name for path in (mutants.ROOT / 'sdpo_jax').iterdir() if (path / '__init__.py').is_file()}
  assert {room: count[room] for room in rooms | {'models', 'launch'} if count[room] < 5} == {}


def test_what_pytest_prints_says_which_test_failed_first():
  said = '=== short test summary info ===\nFAILED tests/a.py::test_b[x y] - assert 1 == 2\nFAILED tests/a.py::test_c\n'
  assert mutants.first_failure(1, said) == 'tests/a.py::test_b[x y]'
  assert mutants.first_failure(2, 'ERROR tests/a.py\n') == 'tests/a.py'
  assert mutants.first_failure(0, '3 passed') is None
  with pytest.raises(RuntimeError, match='exit code 4'):
    mutants.first_failure(4, 'no such file')
