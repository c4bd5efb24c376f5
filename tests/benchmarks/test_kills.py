"""The campaign of kills: what it compares, and a small sample of it."""

import json
import subprocess
import sys

import pytest

from benchmarks import kills
from tests import tiny


def write_run(folder, unfinished=(), **changes):
  """Write what is left of a run of one step."""
  line = {'step': 1, 'train/loss': 0.5, 'time/step_s': 1.0, 'fencing_epoch': 1} | changes
  files = {
    'metrics.jsonl': json.dumps(line) + '\n',
    f'checkpoints/1/{kills.MANIFEST}': json.dumps({'leaves': {'trainable.w': 'ab'}}),
    'checkpoints/1/host/metadata': json.dumps({'iterator': 3, **dict(unfinished)}),
    'rollouts/1.jsonl': 'drawn\n',
    'eval/1.json': '{}\n',
  }
  for name, text in files.items():
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
  return folder


def test_runs_are_compared_in_all_but_times_and_writers(tmp_path):
  run = write_run(tmp_path / 'run')
  whole = kills.left(run, 1)
  later = {'time/step_s': 2.0, 'fencing_epoch': 3, 'programs/compiled': 4, 'throughput/tokens_per_s': 5}
  assert kills.left(write_run(tmp_path / 'again', **later), 1) == whole
  stopped = write_run(tmp_path / 'stopped', unfinished={kills.UNFINISHED: {'line': {}}})
  assert kills.left(stopped, 1) == whole  # Its last step was evaluated after the checkpoint.
  assert kills.left(write_run(tmp_path / 'further', unfinished={'iterator': 4}), 1) != whole
  assert kills.left(write_run(tmp_path / 'other', **{'train/loss': 0.25}), 1) != whole
  for name in ('rollouts/1.jsonl', 'eval/1.json'):
    before = (run / name).read_text()
    (run / name).write_text('changed')
    assert kills.left(run, 1) != whole
    (run / name).write_text(before)
  manifest = run / 'checkpoints' / '1' / kills.MANIFEST
  manifest.write_text(manifest.read_text().replace('ab', 'ac'))
  assert kills.left(run, 1) != whole


@pytest.mark.slow
def test_a_sample_of_the_campaign():
  command = [sys.executable, '-m', 'benchmarks.kills', '--variants=lora', '--kills=1', '--terms=1', '--steps=4']
  found = subprocess.run(command, cwd=tiny.REPOSITORY, capture_output=True, text=True, timeout=600, check=False)
  assert found.returncode == 0, found.stdout + found.stderr
  line = json.loads(found.stdout)
  assert line['variant'] == 'lora' and line['differences'] == []
  assert sum(line['moments'].values()) == 2 and sum(line['codes_after_sigterm'].values()) == 1
