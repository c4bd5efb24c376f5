"""The scripted user of the study of sessions: what it asks, wants and says, and how its runs are summed up."""

import numpy as np
import pytest

from benchmarks import session_learning as study
from sdpo_jax.quickstart import tool_tasks

FIND = tool_tasks.ToolTask('find', 'find where parse is used in src', {'symbol': 'parse', 'folder': 'src'})
SIZE = tool_tasks.ToolTask('size', 'how large is src?', {'folder': 'src'})


def test_the_user_wants_one_way_of_ten_kinds_and_any_way_of_others():
  assert study.wanted(FIND, 'rg') and not study.wanted(FIND, 'grep -r') and not study.wanted(FIND, None)
  assert study.wanted(SIZE, 'du') and study.wanted(SIZE, 'dust') and not study.wanted(SIZE, None)
  assert not set(study.OTHERS) & set(study.PREFERENCES) and set(study.OTHERS) < set(tool_tasks.KINDS)


def test_the_user_says_what_they_want_and_names_what_was_tried():
  asked, said = study.script(3, 50, shuffled=False)
  again, _ = study.script(3, 50, shuffled=True)
  assert [task.ask for task in asked] == [task.ask for task in again]
  assert 30 <= sum(map(study.prefers, asked)) < 50
  for task, words in zip(asked, said, strict=True):
    label = study.PREFERENCES.get(task.kind, tool_tasks.KINDS[task.kind].ways[0].label)
    assert label in words('perl') and words('perl') == words('perl')


def test_shuffled_corrections_are_those_of_other_turns():
  asked, said = study.script(3, 100, shuffled=True)
  elsewhere = 0
  for task, words in zip(asked, said, strict=True):
    if study.prefers(task):
      text = words(None)
      assert any(label in text for label in study.PREFERENCES.values())
      elsewhere += study.PREFERENCES[task.kind] not in text
  assert elsewhere > 0.7 * sum(map(study.prefers, asked))


def test_held_out_tasks_are_about_no_preference_and_the_same_every_time():
  tests = study.held_out(5)
  assert [task.ask for task in tests] == [task.ask for task in study.held_out(5)]
  kinds = [task.kind for task in tests]
  assert {kinds.count(kind) for kind in kinds} == {study.HELD_OUT}
  assert set(kinds) == set(tool_tasks.KINDS) - set(study.PREFERENCES)


def test_single_lessons_are_the_same_every_time_and_can_be_edits():
  tasks = study.fresh(5, 36)
  assert [(task.ask, label) for task, label, _ in tasks] == [(task.ask, label) for task, label, _ in study.fresh(5, 36)]
  assert [task.kind for task, _, _ in tasks] != [task.kind for task, _, _ in study.fresh(6, 36)]
  for task, label, _ in tasks:
    favourite, *others = tool_tasks.KINDS[task.kind].ways
    assert any(way.label == label and way.tool == favourite.tool for way in others)


def test_means_are_over_the_users_of_an_arm():
  runs = [{'arm': 'base', 'seed': 1, 'end': 0.1, 'denied': [1]}, {'arm': 'base', 'seed': 2, 'end': 0.3, 'denied': [0]}]
  found = study.means([*runs, {'arm': 'live', 'seed': 1, 'end': 1.0, 'denied': [1]}])
  assert found == {'base': {'users': 2, 'end': pytest.approx(0.2)}, 'live': {'users': 1, 'end': 1.0}}


def test_the_figure_is_drawn(tmp_path):
  draw = np.random.default_rng(0)
  runs = [
    {'arm': arm, 'seed': seed, 'denied': draw.integers(2, size=40).tolist()}
    for arm in ('base', study.SHUFFLED)
    for seed in (1, 2)
  ]
  study.plot({'runs': runs}, tmp_path / 'learning.png')
  assert (tmp_path / 'learning.png').read_bytes().startswith(b'\x89PNG')
