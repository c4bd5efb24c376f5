"""The check of preprocessed rows: it passes on what the code does and notices every kind of difference."""

import json
import re

import pytest

from sdpo_jax.data import rows
from tests.data.reference_rows import CODE, RAW
from tests.golden import __main__ as golden
from tests.golden import preprocess


def expected(value, split='train'):
  return json.loads(json.dumps(rows.preprocess(rows.RawRow('', 1, value), split)))


def case(value=RAW, **more):
  return {'file': None, 'input': value, 'split': 'train', 'expected': expected(value)} | more


def report(folder, *cases):
  (folder / 'rows.json').write_text(json.dumps({'cases': cases}))
  return preprocess.check(folder)


def test_right_rows_pass_and_a_missing_file_is_no_fault(tmp_path):
  assert preprocess.check(tmp_path).cases == 0
  found = report(tmp_path, case(), case({**CODE, 'achievement_prior': 0.4}))
  assert (found.cases, found.failed) == (2, 0)


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (lambda e: e['prompt'].pop(0), r'row.prompt is '),
    (lambda e: e['prompt'].reverse(), r"row.prompt\[0\].role is 'system', expected 'user'"),
    (lambda e: e['extra_info'].update(index=743), "row.extra_info.index is '743', expected 743"),
    (lambda e: e['extra_info'].update(achievement_prior=0.0), 'row.extra_info.achievement_prior is 0, expected 0.0'),
    (lambda e: e['extra_info'].pop('elo'), 'row.extra_info has the fields'),
    (lambda e: e.update(ability='code'), "row.ability is 'mcq', expected 'code'"),
    (lambda e: e['reward_model'].update(ground_truth='C'), "row.reward_model.ground_truth is 'B', expected 'C'"),
  ],
)
def test_every_difference_is_noticed(tmp_path, change, message):
  wrong = expected(RAW)
  change(wrong)
  found = report(tmp_path, case(expected=wrong), case())
  assert (found.cases, found.failed) == (2, 1)
  assert re.search(message, found.messages[0])


def test_a_row_that_is_refused_is_a_failure(tmp_path):
  found = report(tmp_path, case(expected={}, input={**RAW, 'prompt': ''}))
  assert found.failed == 1 and "'prompt' must be a non-empty string" in found.messages[0]


def test_rows_are_looked_up_by_file_and_line_in_folders_above(tmp_path):
  (tmp_path / 'datasets').mkdir()
  (tmp_path / 'datasets' / 'rows.json').write_text('\n'.join(json.dumps({**RAW, 'idx': i}) for i in range(3)))
  folder = tmp_path / 'golden' / 'preprocess'
  folder.mkdir(parents=True)
  there = {'file': 'datasets/rows.json', 'line': 2, 'split': 'test', 'expected': expected({**RAW, 'idx': 2}, 'test')}
  found = report(folder, there, {**there, 'line': 1}, {**there, 'file': 'datasets/other.json'})
  assert (found.cases, found.failed) == (2, 1)
  assert "row.extra_info.index is '1', expected '2'" in found.messages[0]
  assert found.notes == ['rows.json 2: there is no datasets/other.json in a folder above']


def test_the_command_checks_this_kind(tmp_path, capsys):
  folder = tmp_path / 'preprocess'
  folder.mkdir()
  report(folder, case())
  assert golden.main([str(tmp_path)]) == 0
  assert capsys.readouterr().out == 'preprocess: 1 cases, 0 failed, worst 0.0e+00\n'
  report(folder, case(split='test', expected=expected(RAW)))
  assert golden.main([str(tmp_path)]) == 1
