"""What `metrics.jsonl` and the folders of results have lost is named, once for each kind, by the steps."""

import json

import pytest

from sdpo_jax.training.directory.lines import read_lines


def write(folder, steps, **more) -> None:
  (folder / 'metrics.jsonl').write_text(''.join(json.dumps({'step': step, **more}) + '\n' for step in steps))


@pytest.mark.parametrize(
  ('steps', 'upto', 'said'),
  [
    ((0, 1, 3, 7, 8), 3, ['has no line of step 2, whose numbers']),
    ((0, 1, 3, 7, 8), 8, ['has no line of steps 2, 4–6, whose numbers']),
    ((0, 1, 3, 7, 8), None, ['has no line of steps 2, 4–6, whose numbers']),
    ((0, 1, 3, 7, 8), 1, []),
    ((), 0, []),
    ((), 8, ['has no line of steps 1–8, whose numbers']),
    ((1, 2, 2, 3), 3, ['has several lines of step 2.']),
    ((1, 10**15), None, ['has no line of steps 2–1000002, whose numbers']),
  ],
)
def test_lines_that_are_missing_are_named_by_their_steps(tmp_path, steps, upto, said):
  write(tmp_path, steps)
  faults = read_lines(tmp_path).faults(upto)
  assert [f'{tmp_path}/metrics.jsonl {text}' in fault for fault, text in zip(faults, said, strict=True)] == [
    True
  ] * len(said)


def test_a_file_that_is_missing_is_told_from_missing_lines(tmp_path):
  [said] = read_lines(tmp_path).faults(8)
  assert 'metrics.jsonl is missing, and with it the lines of steps 1–8, whose' in said


def test_files_that_lines_name_are_missed(tmp_path):
  for name in ('rollouts/1.jsonl', 'rollouts/2.jsonl', 'eval/2.json'):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text('{}\n')
  lines = [{'step': step, 'rollout/recorded': 4} for step in (1, 2)] + [{'step': 3, 'train/loss': 1.0}]
  lines[1]['eval/sums/mean@2'] = 0.5
  (tmp_path / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
  assert read_lines(tmp_path).lost_results() == []
  (tmp_path / 'rollouts/1.jsonl').unlink()
  (tmp_path / 'eval/2.json').unlink()
  rollouts, evaluation = read_lines(tmp_path).lost_results()
  assert rollouts == f'{tmp_path}/rollouts has no file of step 1 any more, though metrics.jsonl names one.'
  assert evaluation == f'{tmp_path}/eval has no file of step 2 any more, though metrics.jsonl names one.'
  assert read_lines(tmp_path).lost_results('eval') == [evaluation]
