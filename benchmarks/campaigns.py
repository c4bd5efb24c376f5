"""Complete sweeps whose samples are tests: every mesh, family, dtype and TPU slice, too long for every change.

  python -m benchmarks.campaigns                       # all of them, about an hour on two cores
  python -m benchmarks.campaigns tests/models          # those of a room, or of a file

These are the tests marked `campaign`. Prints one line of JSON for each file (passed, failed, skipped, seconds) and one
for all, and writes them to `--output`. Exit code 1 if one fails. Further arguments are passed to pytest.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import subprocess
import sys
import tempfile
from xml.etree import ElementTree

import jax

ROOT = pathlib.Path(__file__).parent.parent


def outcomes(report: pathlib.Path) -> dict[str, dict[str, float]]:
  """Parse pytest's JUnit report into file → counts of passed, failed and skipped tests, and their seconds."""
  files: dict[str, dict[str, float]] = collections.defaultdict(
    lambda: {'passed': 0, 'failed': 0, 'skipped': 0, 'seconds': 0.0}
  )
  for case in ElementTree.parse(report).iter('testcase'):
    said = {child.tag for child in case}
    outcome = 'failed' if said & {'failure', 'error'} else 'skipped' if 'skipped' in said else 'passed'
    entry = files[case.get('classname', '').replace('.', '/') + '.py']
    entry[outcome] += 1
    entry['seconds'] = round(entry['seconds'] + float(case.get('time', 0)), 1)
  return dict(sorted(files.items()))


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--output', type=pathlib.Path, help='file for the results, e.g. docs/performance/campaigns.json')
  flags, given = parser.parse_known_args()
  with tempfile.TemporaryDirectory() as folder:
    report = pathlib.Path(folder) / 'report.xml'
    flags_of_pytest = ['--slow', '--campaigns', '-m', 'campaign', f'--junit-xml={report}']
    code = subprocess.run([sys.executable, '-m', 'pytest', *flags_of_pytest, *given], cwd=ROOT, check=False).returncode
    if not report.exists():
      return code
    files = outcomes(report)
  for file, counts in files.items():
    print(json.dumps({'file': file, **counts}))
  total = {name: round(sum(counts[name] for counts in files.values()), 1) for name in ('passed', 'failed', 'skipped')}
  print(json.dumps(total | {'jax': jax.__version__}))
  if flags.output:
    flags.output.write_text(json.dumps({'jax': jax.__version__, 'total': total, 'files': files}, indent=1) + '\n')
  return code


if __name__ == '__main__':
  sys.exit(main())
