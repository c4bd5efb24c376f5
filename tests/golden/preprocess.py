"""Checks the golden file of kind `preprocess`: raw rows as the reference's preprocessing leaves them, exactly.

A case holds its raw row as `input`, or says where it stands: `file`, relative to a folder above this one, and `line`,
from 0. Cases whose file is not there are noted, not failed: the data sets are not handed on with the golden files.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

from sdpo_jax.data import rows, sources
from sdpo_jax.errors import UserError
from tests.golden.report import Report

KIND = 'preprocess'


def check(directory: pathlib.Path | str) -> Report:
  """Every case of `rows.json` in `directory`; the file may be missing."""
  directory, report = pathlib.Path(directory), Report(KIND)
  path = directory / 'rows.json'
  cases = json.loads(path.read_text(encoding='utf-8'))['cases'] if path.exists() else []
  for index, case in enumerate(cases):
    name = f'rows.json {index}'
    row = _row(directory, case)
    if row is None:
      report.note(name, f'there is no {case["file"]} in a folder above')
      continue
    report.cases += 1
    try:
      ours = rows.preprocess(row, case['split'])
    except UserError as error:
      report.fail(name, str(error))
      continue
    if difference := _difference(ours, case['expected']):
      report.fail(name, difference)
  return report


def _row(directory: pathlib.Path, case: dict[str, Any]) -> rows.RawRow | None:
  if 'input' in case:
    return rows.RawRow('input', 1, case['input'])
  for folder in directory.resolve().parents:
    if (folder / case['file']).is_file():
      return sources.read_rows(str(folder / case['file']), case['file'])[case['line']]
  return None


def _difference(ours: Any, expected: Any, name: str = 'row') -> str | None:
  """Where two JSON values differ first, types and the order of lists included."""
  if isinstance(expected, dict) and isinstance(ours, dict):
    if ours.keys() != expected.keys():
      return f'{name} has the fields {sorted(ours)}, expected {sorted(expected)}'
    found = (_difference(ours[key], expected[key], f'{name}.{key}') for key in expected)
    return next(filter(None, found), None)
  if isinstance(expected, list) and isinstance(ours, list) and len(ours) == len(expected):
    found = (_difference(*pair, f'{name}[{i}]') for i, pair in enumerate(zip(ours, expected, strict=True)))
    return next(filter(None, found), None)
  return None if type(ours) is type(expected) and ours == expected else f'{name} is {ours!r}, expected {expected!r}'
