"""The soak of the sandbox: few programs through the real one, and every bar with numbers that miss it."""

import dataclasses
import gc

import pytest

from benchmarks import sandbox_soak
from sdpo_jax.types import Outcome


def test_programs_of_every_kind_come_in_an_order_that_the_seed_decides():
  made = sandbox_soak.entries(120, 5)
  assert made == sandbox_soak.entries(120, 5) != sandbox_soak.entries(120, 6)
  assert sum(entry.honest for entry in made) == 60
  assert {entry.kind for entry in made if entry.honest} == set(sandbox_soak.HONEST)
  assert {entry.kind for entry in made if not entry.honest} == set(sandbox_soak.HOSTILE)
  assert not all(entry.honest for entry in made[::2])


def check(line, programs):
  assert line['missed'] == [] and line['kinds'] == [], line
  assert line['programs'] == programs and line['runs'] >= programs and line['longest_callback_ms'] > 0
  assert line['verdicts_changed'] == line['hostile_passed'] == line['files_left'] == 0


def test_a_short_soak():
  check(sandbox_soak.soak(16, 1, 2), 16)


@pytest.mark.slow
def test_a_soak_with_every_kind_of_program():
  check(sandbox_soak.soak(104, 2, 2), 104)


def right(score=1.0, said=''):
  return Outcome(score, said, {'acc': score})


PROGRAMS = [sandbox_soak.Entry('a', True, {}, ''), sandbox_soak.Entry('b', False, {}, '')] * 2
ALONE = sandbox_soak.Pass([right(), right(0.0)], ['landlock'], [1.0], [0.0], [1.0], [100.0], 1.0, 1.0)
MIXED = dataclasses.replace(
  ALONE,
  outcomes=[right(), right(0.0), right(0.0), right(0.0)],
  callbacks_ms=[1.0, 50.0],
  memory_mib=[9.0, *[100.0] * 9, 164.0, 36.0],
)


@pytest.mark.parametrize(
  'changes, files, missed',
  [
    ({}, 0, []),
    ({'outcomes': [right(0.0), *MIXED.outcomes[1:]]}, 0, ['verdicts_changed']),
    ({'outcomes': [right(1.0, 'x'), *MIXED.outcomes[1:]]}, 0, ['verdicts_changed']),
    ({'outcomes': [Outcome.ungraded('x'), *MIXED.outcomes[1:]]}, 0, ['verdicts_changed']),
    ({'outcomes': [*MIXED.outcomes[:3], right()]}, 0, ['hostile_passed']),
    ({'outcomes': [*MIXED.outcomes[:3], Outcome.ungraded('x')]}, 0, ['hostile_passed']),
    ({'memory_mib': [100.0, *[100.0] * 9, 165.0]}, 0, ['memory_growth_mib']),
    ({'memory_mib': [100.0, *[100.0] * 9, 35.0]}, 0, ['memory_growth_mib']),
    ({'callbacks_ms': [50.5, 1.0]}, 0, ['longest_callback_ms']),
    ({}, 1, ['files_left']),
  ],
)
def test_every_bar_can_be_missed(changes, files, missed):
  line = sandbox_soak.summary(PROGRAMS, ALONE, dataclasses.replace(MIXED, **changes), files_left=files)
  assert line['missed'] == missed


def test_collections_of_garbage_are_counted_apart(monkeypatch):
  now = [10.0]

  def collecting(phase, info):
    now[0] += 0.5 * (phase == 'start')

  class Inner:
    def run(self, jobs, then):
      found = []
      for number, job in enumerate(jobs):
        now[0] += job
        gc.collect()
        found.append(then(number, job))
      return found

    def close(self):
      pass

  monkeypatch.setattr(sandbox_soak.time, 'thread_time', lambda: now[0])
  gc.disable()
  try:
    measured = sandbox_soak.MeasuredSandbox(Inner())
    gc.callbacks.append(collecting)
    assert measured.run([1.0, 0.25], None) == [1.0, 0.25]
    gc.callbacks.remove(collecting)
    measured.close()
  finally:
    gc.enable()
  assert measured.callbacks_ms == [11_000.0, 250.0] and measured.collections_ms == [0.0, 500.0, 500.0]
  assert not [each for each in gc.callbacks if getattr(each, '__self__', None) is measured]
