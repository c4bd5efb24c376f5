"""A run directory in gs://: its lock, epochs and metrics are replaced on condition, whatever is lost on the way."""

import concurrent.futures
import dataclasses
import importlib.util
import json
import threading

from etils import epath
import pytest

from sdpo_jax.config import Config
from sdpo_jax.errors import UserError
from sdpo_jax.training import metrics
from sdpo_jax.training.checkpoint import checkpoints, manifest
from sdpo_jax.training.directory import epochs, guarded_files, lock_owner, locks, ownership, reconstructed_starts
from sdpo_jax.training.directory import lines as lines_module
from tests import tiny
from tests.training.directory import object_store
from tests.training_states import assert_same, flipped, make_state

RUN = 'bucket/runs/tiny'
FOLDER = epath.Path(f'gs://{RUN}')


@pytest.fixture
def store(monkeypatch):
  monkeypatch.setattr(guarded_files, 'RETRIES', {'max_retries': 3, 'initial_delay': '1ms', 'max_delay': '2ms'})
  # TensorStore does it all here; gcsfs need not be installed.
  monkeypatch.setattr(lines_module, '_parsed', lambda path: parsed(guarded_files.Objects(FOLDER)))
  monkeypatch.setattr(reconstructed_starts, 'published_steps', lambda workdir: [])
  monkeypatch.setattr(reconstructed_starts, 'due', lambda workdir: 0)
  monkeypatch.setattr(reconstructed_starts, 'folders', lambda workdir: [])
  monkeypatch.setattr(reconstructed_starts, 'of_starts', lambda workdir: epochs.Epochs())
  monkeypatch.setattr(lines_module, 'read_epochs', lambda workdir: epochs.parse(read(epochs.EPOCHS), FOLDER))
  with object_store.ObjectStore() as server:
    for name, value in server.environment().items():
      monkeypatch.setenv(name, value)
    yield server


def read(name):
  return guarded_files.Objects(FOLDER).read(name).content


def parsed(objects):
  content = objects.read(lines_module.METRICS).content or b''
  return [(number, line, json.loads(line)) for number, line in enumerate(content.decode().splitlines(), 1)]


def lines(objects):
  return [line for _, _, line in parsed(objects)]


def take(said=print, seconds=None):
  """Take the run; `seconds` counts those for which another one was waited for."""
  passed = [] if seconds is None else seconds
  return ownership.take(FOLDER, said, ownership.Clock(now=lambda: sum(passed), sleep=passed.append))


def elsewhere(server):
  """Make the owner one of another host, which gives no sign of life."""
  lock = lock_owner.parse(server.objects[f'{RUN}/.lock'].content)
  moved = dataclasses.replace(lock, host='elsewhere', boot='another')
  assert server.put(f'{RUN}/.lock', moved.to_json().encode(), None)


def take_over(server):
  elsewhere(server)
  return take(seconds=[])


def contents(server):
  return {name: found.content for name, found in server.objects.items()}


def test_only_what_was_seen_is_replaced(store):
  objects = guarded_files.Objects(FOLDER)
  nothing = objects.read('a')
  assert nothing.content is None
  first = objects.replace('a', b'1', nothing)
  assert objects.replace('a', b'2', nothing) is None and objects.read('a') == first
  assert 'ifGenerationMatch=0' in store.requests[1] and 'ifGenerationMatch=0' in store.requests[2]
  second = objects.replace('a', b'2', first)
  assert objects.replace('a', b'3', first) is None and objects.read('a') == second
  assert f'ifGenerationMatch={store.objects[f"{RUN}/a"].generation}' not in store.requests[-2]


@pytest.mark.parametrize('done', [False, True])
def test_an_answer_that_is_lost_is_no_other_writer(store, done):
  """The connection breaks before or after the object is written; the second attempt must not take it for another's."""
  objects = guarded_files.Objects(FOLDER)
  seen, lost = objects.read('a'), []

  def once(method, name, now):
    if method == 'POST' and now == done and not lost:
      lost.append(name)
      return 'lose'
    return None

  store.disturb = once
  written = objects.replace('a', b'mine', seen)
  assert lost and written == objects.read('a') and written.content == b'mine'
  assert len(store.objects) == 1 and objects.replace('a', b'next', written).content == b'next'


def test_an_answer_is_lost_and_another_one_writes(store):
  objects = guarded_files.Objects(FOLDER)

  def once(method, name, done):
    if method == 'POST' and done and store.objects[name].content == b'mine':
      store.put(name, b'of another', None)
      return 'lose'
    return None

  store.disturb = once
  assert objects.replace('a', b'mine', objects.read('a')) is None
  assert store.objects[f'{RUN}/a'].content == b'of another'


@pytest.mark.parametrize('status, word', [(403, 'PERMISSION_DENIED'), (503, 'retry attempts failed')])
def test_a_store_that_refuses_is_a_sentence(store, status, word):
  store.disturb = lambda method, name, done: status
  with pytest.raises(UserError, match=f'gs://{RUN} cannot be reached or may not be written .*{word}'):
    take()


def test_of_several_starts_at_once_exactly_one_wins(store):
  """The others are told who: this very process, whose number the winner's lock names."""
  for turn in range(1, 6):
    together = threading.Barrier(4)

    def start(together=together):
      together.wait()
      try:
        return take()
      except UserError as error:
        return error

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
      results = [future.result() for future in [pool.submit(start) for _ in range(4)]]
    [winner] = [result for result in results if isinstance(result, ownership.Ownership)]
    refused = [str(result) for result in results if result is not winner]
    assert all('Another process is training in' in text for text in refused)
    assert winner.epoch >= turn
    winner.check()
    record = epochs.parse(read(epochs.EPOCHS), '')
    assert record.epochs[-1].fencing_epoch == record.newest == winner.epoch
    winner.release()


@pytest.mark.parametrize('done', [False, True])
def test_a_start_survives_the_loss_of_any_answer(store, done):
  take().release()
  for lost in range(3):
    posts = []

    def lose(method, name, now, lost=lost, posts=posts):
      if method == 'POST' and now == done:
        posts.append(name)
        if len(posts) == lost + 1:
          return 'lose'
      return None

    store.disturb = lose
    before = epochs.parse(read(epochs.EPOCHS), '')
    mine = take()
    mine.resumed(5)
    mine.published(6)
    mine.release()
    record = epochs.parse(read(epochs.EPOCHS), '')
    assert record.newest == mine.epoch == before.newest + 1 and len(record.epochs) == 1
    assert record.epochs[-1].resumed_from == 5 and record.published == 6 and len(posts) > lost


def test_a_silent_owner_of_another_host_is_replaced_after_a_lease(store):
  former = take()
  elsewhere(store)
  said, seconds = [], []
  newer = take(said.append, seconds)
  assert newer.epoch == former.epoch + 1 and sum(seconds) == pytest.approx(ownership.LEASE_S, rel=0.05)
  assert 'host elsewhere' in said[0] and 'takes over' in said[-1]
  elsewhere(store)
  alive = store.put

  def beat(seconds):
    passed.append(seconds)
    lock = lock_owner.parse(store.objects[f'{RUN}/.lock'].content)
    alive(f'{RUN}/.lock', dataclasses.replace(lock, beat=lock.beat + 1).to_json().encode(), None)

  passed = []
  with pytest.raises(UserError, match='is training in .*host elsewhere'):
    ownership.take(FOLDER, print, ownership.Clock(now=lambda: sum(passed), sleep=beat))


def quiet():
  config = Config()
  config.trainer.tensorboard = False
  return config


def test_who_lost_the_run_overwrites_nothing(store):
  former = take()
  writer = metrics.MetricsWriter(FOLDER, quiet(), ownership=former)
  writer.write(1, {'a': 1.0})
  newer = take_over(store)
  newer.resumed(1)
  successor = metrics.MetricsWriter(FOLDER, quiet(), resume_step=1, ownership=newer)
  successor.write(2, {'a': 2.0})
  before = contents(store)
  for attempt in (
    former.check,
    former.renew,
    lambda: former.published(2),
    lambda: writer.write(2, {'a': 7.0}),
    lambda: metrics.MetricsWriter(FOLDER, quiet(), ownership=former),
  ):
    with pytest.raises(ownership.RunLostError, match='has taken over the run'):
      attempt()
  former.release()
  assert contents(store) == before
  newer.check()
  successor.write(3, {'a': 3.0})
  assert [(line['step'], line['a'], line['fencing_epoch']) for line in lines(guarded_files.Objects(FOLDER))] == [
    (1, 1.0, 1),
    (2, 2.0, 2),
    (3, 3.0, 2),
  ]


def test_stopped_between_the_check_and_the_write_it_overwrites_nothing(store):
  former = take()
  writer = metrics.MetricsWriter(FOLDER, quiet(), ownership=former)
  writer.write(1, {'a': 1.0})
  newer = []

  def stop(method, name, done):
    if method == 'POST' and name.endswith('metrics.jsonl') and not done and not newer:
      newer.append(None)  # Only once.
      newer[0] = take_over(store)
      metrics.MetricsWriter(FOLDER, quiet(), resume_step=1, ownership=newer[0]).write(2, {'a': 2.0})
    return None

  store.disturb = stop
  with pytest.raises(ownership.RunLostError, match='has taken over the run'):
    writer.write(2, {'a': 7.0})
  assert [line['a'] for line in lines(guarded_files.Objects(FOLDER))] == [1.0, 2.0]


def test_what_it_writes_while_the_next_one_starts_is_left_out(store):
  former = take()
  writer = metrics.MetricsWriter(FOLDER, quiet(), ownership=former)
  writer.write(1, {'a': 1.0})
  former.check = lambda: None  # It has just asked.
  newer = take_over(store)
  written = []

  def late(method, name, done):
    if method == 'POST' and name.endswith('metrics.jsonl') and not done and not written:
      written.append(name)
      writer.write(2, {'a': 7.0})
    return None

  store.disturb = late
  successor = metrics.MetricsWriter(FOLDER, quiet(), resume_step=1, ownership=newer)
  assert written
  successor.write(2, {'a': 2.0})
  assert [line['a'] for line in lines(guarded_files.Objects(FOLDER))] == [1.0, 2.0]
  with pytest.raises(UserError, match='was changed by something other than this run while it was going on'):
    writer.write(3, {'a': 7.0})


def test_a_start_that_stalls_until_it_is_replaced_does_not_begin(store):
  """It has the lock, not yet its epoch, when another host has waited out its lease."""
  newer = []

  def stall(method, name, done):
    if method == 'POST' and name.endswith(epochs.EPOCHS) and not done and not newer:
      newer.append(None)
      newer[0] = take_over(store)
    return None

  store.disturb = stall
  with pytest.raises(UserError, match='Another process is training in'):
    take()
  newer[0].check()
  assert len(epochs.parse(read(epochs.EPOCHS), '').epochs) == 1


def test_other_stores_are_not_guarded_and_say_so(tmp_path):
  folder, said = epath.Path(tmp_path), []
  lock = locks.ObjectLock(guarded_files.Files(folder), folder, said.append)
  assert lock.read() is None and lock.write(b'a') and lock.read() == b'a' and not lock.exclusive
  assert 'cannot be locked' in said[0]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec('gcsfs') is None, reason='gcsfs is not installed')
def test_a_whole_run_stops_and_resumes_in_a_store_as_on_a_disk(tmp_path, monkeypatch):
  config = tiny.make_experiment(tmp_path)
  arguments = [f'--config={config}', '--config.trainer.test_freq=2']
  with object_store.ObjectStore() as server:
    for name, value in server.environment().items():
      monkeypatch.setenv(name, value)
    for steps in (2, 4):
      for workdir in (f'gs://{RUN}', f'{tmp_path}/run'):
        line = [*arguments, f'--config.trainer.total_training_steps={steps}', f'--workdir={workdir}']
        done = tiny.launch('train', *line)
        assert done.returncode == 0, done.stderr
        verified = tiny.launch('verify', f'--workdir={workdir}')
        assert verified.returncode == 0 and f'nothing would be lost: step {steps} has' in verified.stdout, verified
        assert steps == 2 or f'Resuming {workdir} at step 2 (state ' in done.stderr
    remote = [json.loads(line) for line in server.objects[f'{RUN}/metrics.jsonl'].content.decode().splitlines()]
    local = [json.loads(line) for line in (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()]
    varying = ('time/', 'throughput/', 'line_digest')
    strip = [
      [{key: value for key, value in line.items() if not key.startswith(varying)} for line in run]
      for run in (remote, local)
    ]
    assert strip[0] == strip[1] and [line['fencing_epoch'] for line in remote] == [1, 1, 1, 2, 2]
    for name in ('config.json', 'rollouts/4.jsonl', 'eval/4.json'):
      assert server.objects[f'{RUN}/{name}'].content == (tmp_path / 'run' / name).read_bytes()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec('gcsfs') is None, reason='gcsfs is not installed')
def test_checkpoints_in_a_store_are_compared_set_aside_and_replaced(store, monkeypatch):
  run = f'gs://{RUN}'

  def folders():
    return sorted({'/'.join(name.removeprefix(f'{RUN}/').split('/')[:2]) for name in store.objects})

  opened = checkpoints.Checkpoints(run, keep=2)
  for step in (1, 2, 3):
    opened.save(step, make_state(step), {'iterator': step}, {})
  opened.close()
  assert folders() == ['checkpoints/2', 'checkpoints/3']
  for name in [name for name in store.objects if '/checkpoints/3/' in name and '/d/' in name]:
    content = store.objects[name].content
    store.put(name, flipped(content, 4 * len(content)), None)
  opened = checkpoints.Checkpoints(run, keep=2)
  step, state, host = opened.restore(make_state(0))
  assert (step, host) == (2, {'iterator': 2}) and folders() == ['checkpoints/2', 'checkpoints_damaged/3']
  assert_same(state, make_state(2))
  # A process that has lost the run leaves one without a manifest where the next one is to be written.
  for name in [name for name in store.objects if '/checkpoints/2/' in name and not name.endswith(manifest.MANIFEST)]:
    store.put(name.replace('/checkpoints/2/', '/checkpoints/3/'), store.objects[name].content, None)
  opened.save(3, make_state(3), {}, {})
  opened.wait()
  assert folders() == ['checkpoints/2', 'checkpoints/3', 'checkpoints_damaged/3', 'checkpoints_damaged/3.1']
  assert_same(opened.restore_step(3, make_state(0)), make_state(3))
  monkeypatch.setattr(checkpoints, 'PAUSES', ())
  store.disturb = lambda method, name, done: 403 if name and '/checkpoints/3/' in name else None
  with pytest.raises(UserError, match='step 3 in .* cannot be read for now'):
    checkpoints.Checkpoints(run, read_only=True).restore(make_state(0))
