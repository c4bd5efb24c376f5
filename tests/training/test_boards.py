"""TensorBoard and Weights & Biases get the names of metrics.jsonl, a table of samples, and one page a run."""

import dataclasses
import json
import struct
import sys

from etils import epath
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from sdpo_jax.config import Config
from sdpo_jax.errors import UserError
from sdpo_jax.training import boards, metrics, samples
from sdpo_jax.training.directory.lines import read_metrics
from sdpo_jax.training.graded import GradedRollouts
from sdpo_jax.types import Example, Outcome, Rollouts

NAMES = ('eval/parity/mean@4', 'time/a b_s', '/odd', 'train/loss')


def events(workdir):
  """Return the events of all files in order, by TFRecord's layout: a length of 8 bytes, a checksum of 4, data, and one
  of 4.
  """
  found = []
  for path in sorted((workdir / 'tensorboard').iterdir()):
    content = path.read_bytes()
    while content:
      (length,) = struct.unpack('<Q', content[:8])
      found.append(event_pb2.Event.FromString(content[12 : 12 + length]))
      content = content[16 + length :]
  return found


@pytest.fixture
def config():
  config = Config(name='mine')
  config.trainer.tensorboard = False
  return config


@pytest.fixture
def wandb(monkeypatch, tmp_path_factory):
  """Yield a stand-in for the library, with the part of its documented interface that is used; it keeps what it is
  told.
  """
  folder = tmp_path_factory.mktemp('site')
  (folder / 'wandb.py').write_text("""
class Error(Exception): ...
class UsageError(Error): ...
class Table:
  def __init__(self, columns, data, allow_mixed_types=False):
    kinds = [{type(row[at]) for row in data} for at in range(len(columns))]
    assert allow_mixed_types or all(len(kind) == 1 for kind in kinds)
    self.columns, self.data = columns, data
class Run:
  def __init__(self, options): self.options, self.lines, self.finished = options, [], False
  def log(self, data, step):
    assert not self.lines or step >= self.lines[-1][0], 'steps must not go back'
    self.lines.append((step, data))
  def finish(self): self.finished = True
runs, failure = [], None
def login():
  if failure: raise failure
  return True
def init(*, project, name, id, resume, config, dir):
  if failure: raise failure
  runs.append(Run(dict(project=project, name=name, id=id, resume=resume, config=config, dir=dir)))
  return runs[-1]
""")
  monkeypatch.syspath_prepend(folder)
  monkeypatch.delitem(sys.modules, 'wandb', raising=False)
  monkeypatch.delenv('WANDB_MODE', raising=False)
  import wandb

  yield wandb
  sys.modules.pop('wandb')


def three_samples():
  return [
    samples.Sample('Which?', 'a | b\n# c', 0.5, None),
    samples.Sample('What?', 'x', None, 'No\x1b[31m grade'),
    samples.Sample('Long?', 'y' * 20_000 + 'END', 1.0, ''),
  ]


def test_tensorboard_keeps_every_name(tmp_path, config):
  config.trainer.tensorboard = True
  writer = metrics.MetricsWriter(tmp_path, config)
  writer.write(7, {name: number for number, name in enumerate(NAMES)} | {'train/nan': float('nan')})
  writer.close()
  values = {value.tag: value.simple_value for event in events(tmp_path) for value in event.summary.value}
  assert values == {name: number for number, name in enumerate(NAMES)}
  assert [event.step for event in events(tmp_path) if event.summary.value] == [7]


def test_a_resumed_run_hides_the_events_that_it_repeats(tmp_path):
  for resume_step in (0, 3):
    board = boards.TensorBoard(epath.Path(tmp_path), resume_step)
    board.numbers(resume_step + 1, {'a': 1.0})
    board.close()
  starts = [event.step for event in events(tmp_path) if event.session_log.status == event_pb2.SessionLog.START]
  assert starts == [4]


def test_a_full_disk_is_said_by_tensorboard(tmp_path, monkeypatch):
  """A thread that writes would lose the error, and whoever waits for it would wait for ever."""
  full = open('/dev/full', 'wb')
  monkeypatch.setattr('tensorboardX.record_writer.open_file', lambda path: full)
  board = boards.TensorBoard(epath.Path(tmp_path))
  with pytest.raises(OSError, match='No space left'):
    board.numbers(1, {'a': 1.0})
  with pytest.raises(OSError, match='No space left'):
    full.close()


def test_samples_are_a_table_in_tensorboard(tmp_path):
  board = boards.TensorBoard(epath.Path(tmp_path))
  board.samples(5, three_samples())
  board.close()
  [(step, value)] = [(event.step, value) for event in events(tmp_path) for value in event.summary.value]
  assert (step, value.tag, value.metadata.plugin_data.plugin_name) == (5, 'samples', 'text')
  assert [dim.size for dim in value.tensor.tensor_shape.dim] == [4, 4]
  cells = np.reshape([cell.decode() for cell in value.tensor.string_val], (4, 4)).tolist()
  assert cells[0] == ['**prompt**', '**completion**', '**score**', '**feedback**']
  # Four spaces make a block of code in Markdown: no table, heading or tag of a completion is one of the page.
  assert cells[1] == ['    Which?', '    a | b\n    # c', '    0.5', '']
  assert cells[2][2] == '    ungraded'
  assert len(cells[3][1]) < 10_100 and cells[3][1].endswith('yEND')


def test_samples_on_a_terminal_are_whole_lines_without_control_characters():
  text = samples.as_text(5, three_samples())
  assert text.splitlines()[:5] == [
    '── step 5, sample 1 of 3 ──',
    'prompt      Which?',
    'completion  a | b',
    '            # c',
    'score       0.5',
  ]
  assert 'score       ungraded' in text and 'No\\x1b[31m grade' in text
  assert all(letter.isprintable() or letter == '\n' for letter in text)
  assert max(map(len, text.splitlines())) < 600 and 'yEND' in text


def test_samples_are_spread_over_the_batch():
  empty = np.zeros((6, 0))
  arrays = {field.name: empty for field in dataclasses.fields(Rollouts)}
  arrays |= {'group': np.repeat(np.arange(3), 2), 'text': list('abcdef'), 'finish_reason': ['stop'] * 6}
  graded = GradedRollouts(
    examples=[Example(str(i), [{'role': 'user', 'content': f'Q{i}'}], 'e', None, 's') for i in range(3)],
    prompts=[],
    rollouts=Rollouts(**arrays),
    outcomes=[Outcome(float(i)) for i in range(6)],
    sample_ids=np.arange(6),
    graders_busy_s=0.0,
  )
  assert [(sample.prompt, sample.completion) for sample in samples.pick(graded, 3)] == [
    ('Q0', 'a'),
    ('Q1', 'c'),
    ('Q2', 'e'),
  ]
  assert [sample.score for sample in samples.pick(graded, 100)] == [0, 1, 2, 3, 4, 5]


def test_a_page_gets_names_samples_and_the_id_of_its_directory(tmp_path, config, wandb):
  config.trainer.wandb_project = 'p'
  for folder, resume_step in (('one', 0), ('one', 2), ('two', 0), ('one', 0)):
    (tmp_path / folder).mkdir(exist_ok=True)
    if resume_step:
      (tmp_path / folder / 'metrics.jsonl').write_text('{"step": 2}\n')
    writer = metrics.MetricsWriter(tmp_path / folder, config, resume_step=resume_step)
    writer.write_samples(3, three_samples())
    writer.write(3, {name: 1.0 for name in NAMES} | {'train/nan': float('nan')})
    writer.close()
  first, resumed, elsewhere, anew = wandb.runs
  assert first.options['id'] == resumed.options['id'] and len(first.options['id']) == 32
  assert len({run.options['id'] for run in (first, elsewhere, anew)}) == 3
  assert (tmp_path / 'one' / 'wandb_id').read_text() == anew.options['id'] + '\n'
  assert {key: first.options[key] for key in ('project', 'name', 'resume')} == {
    'project': 'p',
    'name': 'mine',
    'resume': 'allow',
  }
  assert first.options['config'] == json.loads(config.to_json()) and first.finished
  (_, table), (step, numbers) = first.lines
  assert step == 3 and set(numbers) == set(NAMES)
  assert table['samples'].columns == ['prompt', 'completion', 'score', 'feedback']
  assert [row[2] for row in table['samples'].data] == [0.5, 'ungraded', 1.0]


def test_an_id_that_cannot_be_read_is_named(tmp_path):
  (tmp_path / 'wandb_id').write_bytes(b'\xff')
  with pytest.raises(UserError, match='wandb_id is not UTF-8 .*remove it for a new page'):
    boards.run_id(tmp_path, 1)


@pytest.mark.parametrize('failing', ['log', 'finish'])
def test_a_page_that_is_lost_costs_no_step(tmp_path, config, wandb, monkeypatch, caplog, failing):
  config.trainer.wandb_project = 'p'
  writer = metrics.MetricsWriter(tmp_path, config)
  writer.write(1, {'a': 1.0})
  [run] = wandb.runs

  def fail(*_, **__):
    raise BrokenPipeError(32, 'Broken pipe')

  monkeypatch.setattr(run, failing, fail)
  writer.write_samples(2, three_samples())
  writer.write(2, {'a': 2.0})
  writer.close()
  assert [line['step'] for line in read_metrics(tmp_path)] == [1, 2]
  assert caplog.text.count('is off until the run is started again') == 1 and 'Broken pipe' in caplog.text


def test_a_page_that_cannot_be_opened_is_said(tmp_path, config, wandb, monkeypatch):
  boards.check_wandb(config)  # It is not asked for.
  config.trainer.wandb_project = 'p'
  boards.check_wandb(config)
  monkeypatch.setattr(wandb, 'failure', wandb.UsageError('api_key not configured (no-tty). call wandb.login()'))
  sentence = r'Weights & Biases cannot be used \(api_key not configured .*`wandb login`.*WANDB_MODE=offline'
  with pytest.raises(UserError, match=sentence):
    boards.check_wandb(config)
  with pytest.raises(UserError, match=sentence):
    metrics.MetricsWriter(tmp_path, config)
  monkeypatch.setenv('WANDB_MODE', 'offline')
  boards.check_wandb(config)  # Nobody need be logged in.


def test_wandb_is_asked_for_and_not_installed(config, monkeypatch):
  monkeypatch.setattr(boards.importlib.util, 'find_spec', lambda name: None)
  boards.check_wandb(config)
  config.trainer.wandb_project = 'project'
  with pytest.raises(UserError, match='pip install wandb'):
    boards.check_wandb(config)
