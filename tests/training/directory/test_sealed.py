"""Seals of lines and files: what is changed, removed or moved is noticed; what earlier versions wrote is read."""

import hashlib
import json
import random

import pytest

from sdpo_jax.config import Config
from sdpo_jax.errors import UserError
from sdpo_jax.training import boards, metrics
from sdpo_jax.training.directory import epochs, lock_owner, sealed
from sdpo_jax.training.directory.lines import history, read_lines, read_metrics
from tests.training_states import flipped

STEPS = 4


def quiet() -> Config:
  config = Config()
  config.trainer.tensorboard = False
  return config


def write(folder, first: int, last: int) -> str:
  """Write the lines of some steps in one start of a run; return what its checkpoint would record."""
  writer = metrics.MetricsWriter(folder, quiet(), resume_step=first - 1)
  for step in range(first, last + 1):
    writer.write(step, {'train/loss': step / 8, 'state_digest': f'{step:064x}'})
  digest = writer.sync()
  writer.close()
  return digest


@pytest.fixture
def lines(tmp_path) -> list[str]:
  write(tmp_path, 1, STEPS)
  return (tmp_path / 'metrics.jsonl').read_text().splitlines()


def rewrite(folder, texts) -> None:
  (folder / 'metrics.jsonl').write_text(''.join(text + '\n' for text in texts))


def test_a_digest_covers_its_line_and_the_digest_before(lines):
  before = ''
  for text in lines:
    line = json.loads(text)
    recorded = line.pop('line_digest')
    own = hashlib.sha256(json.dumps(line).encode()).hexdigest()[:32]
    assert recorded == f'{own}-{hashlib.sha256(f"{before} {own}".encode()).hexdigest()[:32]}'
    before = recorded


def test_several_starts_write_one_chain(tmp_path):
  (tmp_path / 'one').mkdir()
  (tmp_path / 'two').mkdir()
  whole = write(tmp_path / 'one', 1, STEPS)
  write(tmp_path / 'two', 1, STEPS - 1)
  assert write(tmp_path / 'two', STEPS - 1, STEPS) == whole  # It drops a line and writes it again.
  one, two = ((tmp_path / name / 'metrics.jsonl').read_bytes() for name in ('one', 'two'))
  assert one == two and json.loads(one.splitlines()[-1])['line_digest'] == whole
  assert read_lines(tmp_path / 'two').remarks(STEPS) == []


def test_no_flipped_bit_of_a_line_passes(tmp_path, lines):
  """A resume refuses it, says something, or reads the same numbers, in other bytes."""
  whole = history(tmp_path, STEPS).kept
  content = (tmp_path / 'metrics.jsonl').read_bytes()
  same = 0
  for bit in random.Random(0).sample(range(8 * len(content)), 400):
    (tmp_path / 'metrics.jsonl').write_bytes(flipped(content, bit))
    try:
      found = history(tmp_path, STEPS)
    except UserError:
      continue
    same += found.kept == whole
    assert found.kept == whole or found.remarks(STEPS), bit
  assert same < 8


@pytest.mark.parametrize(
  ('order', 'said'),
  [
    ([0, 2, 3], 'no line of step 2, whose numbers are lost and unknown to alarms.'),
    ([0, 1, 3], 'no line of step 3, whose numbers are lost and unknown to alarms.'),
    ([1, 0, 2, 3], 'before line 1–3.'),
    ([1, 2, 3], 'no line of step 1, whose numbers are lost and unknown to alarms.'),
    ([0, 1, 1, 2, 3], 'before line 3.'),
  ],
)
def test_lines_that_were_removed_or_moved_are_named(tmp_path, lines, order, said):
  rewrite(tmp_path, [lines[at] for at in order])
  assert [remark.endswith(said) for remark in read_lines(tmp_path).remarks(STEPS)] == [True]
  history(tmp_path, STEPS)  # The numbers themselves are right: the run goes on.


def test_a_line_that_was_altered_ends_a_resume_and_is_named_to_readers(tmp_path, lines, caplog):
  rewrite(tmp_path, [lines[0], lines[1].replace('0.25', '0.75'), *lines[2:]])
  with pytest.raises(UserError, match='line 2 is not as it was written, .* restore the file, or remove'):
    history(tmp_path, STEPS)
  assert [line['step'] for line in history(tmp_path, 1).kept] == [1]  # A resume drops the others.
  assert [line['train/loss'] for line in read_metrics(tmp_path)] == [0.125, 0.75, 0.375, 0.5]
  assert 'line 2 is not as it was written' in caplog.text
  rewrite(tmp_path, [lines[0], *lines[2:]])
  assert len(history(tmp_path, STEPS).kept) == STEPS - 1


def test_lines_of_an_earlier_version_are_read_and_covered_by_those_after_them(tmp_path, caplog):
  rewrite(tmp_path, [json.dumps({'step': step, 'state_digest': 'f' * 64}) for step in (1, 2)])
  assert len(read_metrics(tmp_path)) == 2 and not caplog.text
  [said] = history(tmp_path, 2).remarks(2)
  assert '2 lines without line_digest' in said
  write(tmp_path, 3, STEPS)
  assert read_lines(tmp_path).remarks(STEPS) == [said] and read_lines(tmp_path).remarks() == []
  old, *rest = (tmp_path / 'metrics.jsonl').read_text().splitlines()
  rewrite(tmp_path, [old.replace('f', 'e', 1), *rest])
  assert len(read_lines(tmp_path).remarks(STEPS)) == 2 and 'before line 3' in read_lines(tmp_path).remarks()[0]


class Owner:
  """The owner of a run, or a process that believes to be."""

  def __init__(self, epoch: int):
    self.epoch = epoch

  def check(self) -> None:
    pass


def test_lines_of_a_process_that_has_lost_the_run_do_not_break_the_chain(tmp_path):
  late = metrics.MetricsWriter(tmp_path, quiet(), ownership=Owner(1))
  late.write(1, {'a': 1.0})
  started = [epochs.Epoch(number, 'host', 1, 'now', 'x', number - 1) for number in (1, 2)]
  (tmp_path / 'epochs.json').write_text(epochs.Epochs(tuple(started)).to_json())
  owner = metrics.MetricsWriter(tmp_path, quiet(), resume_step=1, ownership=Owner(2))
  late.write(2, {'a': 7.0})
  owner.write(2, {'a': 2.0})
  late.write(3, {'a': 7.0})
  owner.write(3, {'a': 3.0})
  assert [line['a'] for line in history(tmp_path, 3).kept] == [1.0, 2.0, 3.0]
  [said] = history(tmp_path, 3).remarks(3)
  assert '2 lines (steps 2–3) of a process that had lost the run' in said
  content = (tmp_path / 'metrics.jsonl').read_text()
  (tmp_path / 'metrics.jsonl').write_text(content.replace('7.0', '8.0', 1))
  with pytest.raises(UserError, match='line 2 is not as it was written'):
    history(tmp_path, 3)


def test_a_file_of_lines_notices_a_line_that_is_missing_at_its_end():
  texts = sealed.seal_lines([{'a': number} for number in range(3)], '7').encode().splitlines()
  for kept, name, whole in ((texts, '7', True), (texts[:2], '7', False), (texts, '8', False)):
    state, _ = sealed.check_line(kept[0], sealed.beginning(name, len(kept)))
    assert (state == sealed.WHOLE) == whole


@pytest.mark.parametrize('content', ['null', '[]', '{}', 'NaN', '"a"', '[' * 200_000, '9' * 5_000, ''])
def test_what_no_version_has_written_is_not_of_an_earlier_one(content):
  for name in ('2.json', '2.jsonl'):
    fault, verified = sealed.result_fault(name, f'{content}\n'.encode())
    assert 'is not as it was written' in fault and verified
  assert sealed.result_fault('2.json', b'{"step": 2}') == sealed.result_fault('2.jsonl', b'{"a": 1}\n') == (None, False)


def test_no_flipped_bit_of_a_sealed_file_passes(tmp_path):
  values = {'format': 1, 'starts': [{'step': 0, 'parts': {'a': {'b': 'c'}}}], 'wide': 1e-05}
  path = tmp_path / 'fingerprint.json'
  path.write_text(sealed.seal(values))
  assert sealed.read_sealed(path, 'restore it') == values
  content = path.read_bytes()
  for bit in range(0, 8 * len(content), 7):
    path.write_bytes(flipped(content, bit))
    with pytest.raises(UserError, match=': restore it'):
      sealed.read_sealed(path, 'restore it')
  for others in (values, values | {'sha256': 'f' * 64}):  # Of an earlier version, or written anew by another program.
    path.write_text(json.dumps(others))
    assert sealed.read_sealed(path, 'restore it') == values
  lines = content.decode().replace('"format": 1', '"format": 2').splitlines(keepends=True)
  path.write_text(''.join(line for line in lines if '"sha256"' not in line))  # The way out of one who changed it.
  assert sealed.read_sealed(path, 'restore it') == values | {'format': 2}


def test_no_flipped_bit_of_a_lock_passes():
  owner = lock_owner.this_process(3)
  content = owner.to_json().encode().ljust(1024)
  assert lock_owner.parse(content) == owner
  assert not any(lock_owner.parse(flipped(content, bit)) for bit in range(8 * len(content)))


def test_no_flipped_bit_of_the_id_of_a_page_passes(tmp_path):
  known = boards.run_id(tmp_path, 0)
  assert len(known) == 32 and boards.run_id(tmp_path, 5) == known
  content = (tmp_path / 'wandb_id').read_bytes()
  for bit in range(8 * len(content)):
    (tmp_path / 'wandb_id').write_bytes(flipped(content, bit))
    with pytest.raises(UserError, match='wandb_id is not .*: remove it for a new page'):
      boards.run_id(tmp_path, 5)
  (tmp_path / 'wandb_id').write_text('0123456789abcdef' * 2 + '\n')  # Of an earlier version.
  assert boards.run_id(tmp_path, 5) == '0123456789abcdef' * 2
