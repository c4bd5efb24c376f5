"""`python -m tests.golden DIR`: checks every golden file beneath DIR against this implementation.

DIR may hold any of the folders loss, jsd_pg, teacher, e2e, extras, reprompt, reward, preprocess and cartridges, at any
depth, with any files in the formats described in README.md beside the data. One line a kind; exit status 1 if a case
fails or none is found. What failed and what is informational goes to stderr.
"""

from __future__ import annotations

import argparse
import importlib
import os
from pathlib import Path
import sys

KINDS = ('loss', 'jsd_pg', 'teacher', 'e2e', 'extras', 'reprompt', 'reward', 'preprocess', 'cartridges')


def folders(directory: Path, kind: str) -> list[Path]:
  """Folders called `kind` beneath `directory`, itself included."""
  found = [directory] if directory.resolve().name == kind else []
  return found + sorted(path for path in directory.rglob(kind) if path.is_dir())


def main(arguments: list[str] | None = None) -> int:
  """Exit status: 0 if every case passes, 1 if one fails or there is none, 2 if there is no such folder."""
  parser = argparse.ArgumentParser(prog='python -m tests.golden', description=__doc__)
  parser.add_argument('directory', type=Path, metavar='DIR')
  parser.add_argument('--verbose', action='store_true', help='also print what cannot fail')
  options = parser.parse_args(arguments)
  if not options.directory.is_dir():
    print(f'There is no folder {options.directory}.', file=sys.stderr)
    return 2
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')
  cases = failed = 0
  for kind in KINDS:
    for folder in folders(options.directory, kind):
      report = importlib.import_module(f'tests.golden.{kind}').check(folder)
      if not report.cases:
        continue
      print(report, flush=True)
      for message in report.messages + (report.notes if options.verbose else []):
        print(f'  {kind}/{message}', file=sys.stderr)
      cases, failed = cases + report.cases, failed + report.failed
  if not cases:
    print(f'No golden file found beneath {options.directory}.', file=sys.stderr)
  return int(failed > 0 or cases == 0)


if __name__ == '__main__':
  sys.exit(main())
