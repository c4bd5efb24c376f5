"""Why a failure of the machine loses nothing: whatever it may leave of the files of a run, the run goes on from there.

The file operations of processes that train are recorded, one of which is killed; then the disk is replayed to every
operation, and what it may hold there, by the promises of fsync alone, is opened as a resume opens it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import dataclasses
import errno
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import threading

from etils import epath
import jax
import numpy as np
import pytest

from sdpo_jax.config import Config
from sdpo_jax.errors import UserError
from sdpo_jax.inference import runs
from sdpo_jax.learning.update import abstract_state
from sdpo_jax.training import preemption
from sdpo_jax.training.checkpoint.checkpoints import Checkpoints
from sdpo_jax.training.directory import epochs, lost_checkpoints
from sdpo_jax.training.directory.ownership import sole_user
from sdpo_jax.training.directory.workdir import BEFORE_RESTART
from sdpo_jax.training.opening import make_session
from sdpo_jax.training.specs import update_spec
from sdpo_jax.types import TrainState
from tests import file_operations, tiers, tiny
from tests.file_operations import Disk, Operation, Tree
from tests.resumed_runs import assert_same_run
from tests.training import durable_run

RUN = 'run'


def record(
  recorder: file_operations.Recorder, folder: pathlib.Path, arguments: Sequence[str], fatal: Sequence[str]
) -> list[Operation]:
  """Run a command again and again, each time but the last to a signal; return the operations of all of them.

  Args:
    recorder: of the operations.
    folder: that is made.
    arguments: of tests/training/durable_run.py.
    fatal: where they get a SIGKILL, 'KIND TEXT', or another signal, 'SIGNAL KIND TEXT'.
  """
  signals = [end if end.startswith('SIG') else f'SIGKILL {end}' for end in fatal]
  codes = [preemption.EXIT_PREEMPTED if end.startswith('SIGTERM') else -signal.SIGKILL for end in signals]
  (folder / 'disk').mkdir(parents=True)
  done = subprocess.run(
    [sys.executable, '-m', 'tests.training.durable_run', json.dumps([*signals, None]), *arguments],
    env=tiny.environment() | recorder.environment(folder / 'disk', folder / 'log'),
    cwd=tiny.REPOSITORY,
    capture_output=True,
    text=True,
    check=True,
  )
  assert json.loads(done.stdout.splitlines()[-1]) == [*codes, 0], done.stderr
  operations = file_operations.read_log(folder / 'log')
  assert file_operations.after(operations).now() == file_operations.read_tree(folder / 'disk')  # None escaped.
  return operations


def record_stores(recorder: file_operations.Recorder, folder: pathlib.Path, *fatal: str) -> list[Operation]:
  return record(recorder, folder, ['stores', f'{folder}/disk/{RUN}', '4'], fatal)


def only(run: str, operations: Sequence[Operation]) -> list[Operation]:
  """Return the operations of one of the two runs of `durable_run.stores`, and those of what holds them."""
  other = ({RUN, durable_run.RESTARTED} - {run}).pop()
  return [one for one in operations if not re.match(rf'{other}([/ ]|$)', one.path)]


@pytest.fixture(scope='module')
def both(recorder, tmp_path_factory) -> list[Operation]:
  return record_stores(recorder, tmp_path_factory.mktemp('stores'), f'rename {RUN}/checkpoints/2$')


@pytest.fixture(scope='module')
def stored(both) -> list[Operation]:
  """Return the operations of a run without a model, which is killed when its second checkpoint has its name,
  unsynced.
  """
  return only(RUN, both)


@pytest.fixture(scope='module')
def restarted(both) -> list[Operation]:
  """Return the operations of a run that begins again, its checkpoints being gone."""
  return only(durable_run.RESTARTED, both)


@pytest.fixture(scope='module')
def stores_judge(stored, tmp_path_factory) -> Judge:
  scratch = tmp_path_factory.mktemp('scratch')
  return Judge(stored, durable_run.config(), durable_run.state_of(0), scratch, sample=200)


@dataclasses.dataclass(frozen=True)
class Opened:
  """What a resume finds in a directory."""

  complaint: str = ''
  step: int = 0  # Of the checkpoint; 0: it begins anew.
  digest: str = ''
  finished: int = 0  # The last step that was, with its line and files; what is left of the next one, a resume does.
  lines: tuple[str, ...] = ()  # Of metrics.jsonl, as JSON without times.


class Judge:
  """Opens what a disk may hold as a resume does, and says what is wrong with it. What holds the same is opened once.

  So is what differs only in what no resume reads: what was not finished and is not named so. That it makes no
  difference is checked of one in `sample` of those.
  """

  def __init__(
    self, operations: Iterable[Operation], config: Config, like: TrainState, scratch: pathlib.Path, sample: int
  ):
    self._config, self._like, self._scratch, self._sample = config, like, scratch, sample
    self._known: dict[int, Opened] = {}
    self._seen: set[int] = set()
    self.whole = 0  # Of those that were opened with all they hold.
    self._end = file_operations.below(
      file_operations.after(operations).now(), RUN
    )  # Of the run that was left in peace at last.
    self._lines = {json.loads(line)['step']: line for line in _timeless(self._end['metrics.jsonl'].decode())}

  @property
  def opened(self) -> int:
    return len(self._known)

  def complaint(self, tree: Tree, digests: dict[int, str], promised: int) -> str:
    """Return what is wrong with a tree, '' for nothing.

    Args:
      tree: what the disk holds.
      digests: of the states that were to be saved, by step.
      promised: the newest step whose checkpoint was said to be written; 0 for none.
    """
    tree = file_operations.below(tree, RUN)
    found = self._open(tree)
    if found.complaint:
      return found.complaint
    if found.step < promised:
      return f'step {found.step} is restored, though the checkpoint of step {promised} was written'
    if found.step and found.digest != digests.get(found.step):
      return f'what is restored at step {found.step} is not what was saved'
    if found.step:
      wanted = [line for step, line in sorted(self._lines.items()) if step <= found.finished]
      if list(found.lines) != wanted:
        return f'metrics.jsonl holds {len(found.lines)} lines up to step {found.finished} in place of {len(wanted)}'
      for path, content in self._end.items():
        folder, _, name = path.partition('/')
        if folder in ('rollouts', 'eval') and name and int(name.split('.')[0]) <= found.finished:
          if tree.get(path) != content:
            return f'{path} is not whole, though step {found.step} is restored'
    return ''

  def _open(self, tree: Tree) -> Opened:
    reduced = _reduced(tree)
    key = file_operations.key(reduced)
    if key not in self._known:
      self._known[key] = self._resume(reduced)
    whole = file_operations.key(tree)
    if whole not in self._seen:
      self._seen.add(whole)
      if len(self._seen) % self._sample == 0:
        self.whole += 1
        assert self._resume(tree) == self._known[key]
    return self._known[key]

  def _resume(self, tree: Tree) -> Opened:
    folder = epath.Path(self._scratch / RUN)
    shutil.rmtree(folder, ignore_errors=True)
    file_operations.write_tree(tree, pathlib.Path(folder))
    with contextlib.ExitStack() as stack:
      try:
        *_, resumed, finished = durable_run.begin(self._config, folder, self._like, stack)
        step, digest = (0, '') if resumed is None else (resumed.step, durable_run.digest(resumed.state))
        return Opened('', step, digest, finished, tuple(_timeless((folder / 'metrics.jsonl').read_text())))
      except Exception as error:  # None is expected: whatever it is, the run would end.
        return Opened(f'a resume ends with {type(error).__name__}: {error}')


def _reduced(tree: Tree) -> Tree:
  """Return a tree without what is in files and folders whose names say that they are not finished, or being removed."""

  def unfinished(path: str) -> bool:
    parts = path.split('/')
    return parts[0] == 'checkpoints' and len(parts) > 2 and not parts[1].isdecimal()

  return {
    path: b'' if path.endswith('.partial') and content else content
    for path, content in tree.items()
    if not unfinished(path)
  }


def _timeless(text: str) -> list[str]:
  lines = [json.loads(line) for line in text.splitlines()]
  return [
    json.dumps(
      {
        key: value
        for key, value in line.items()
        if not key.startswith(('time/', 'throughput/', 'programs/', 'fencing_epoch', 'line_digest'))
      }
    )
    for line in lines
  ]


def violations(operations: Sequence[Operation], judge: Judge, chosen: Callable[[int], bool]) -> Iterator[str]:
  """Replay a disk to the chosen operations and to every promise, and judge what may be there; yield what is wrong."""
  disk = Disk()
  digests: dict[int, str] = {}
  promised, judged = 0, set()
  for number, operation in enumerate(operations):
    disk.apply(operation)
    if operation.kind == 'mark':
      word, step, *rest = operation.path.split()
      if word == 'saving':
        assert digests.setdefault(int(step), rest[0]) == rest[0], 'two states of one step'
        continue
      promised = max(promised, int(step))
    elif operation.kind == 'fsync' or not chosen(number):  # What may be there after a sync, may be before.
      continue
    for name, tree in disk.survivors():
      case = (file_operations.key(tree), promised, len(digests))
      if case not in judged:
        judged.add(case)
        complaint = judge.complaint(tree, digests, promised)
        if complaint:
          yield f'after operation {number} ({operation}), {name}: {complaint}'


def test_a_failure_of_the_machine_at_any_operation_loses_nothing(stored, stores_judge):
  kinds = {operation.kind for operation in stored}
  assert kinds == set(file_operations.KINDS) - {'link', 'unsupported'}
  promises = [operation.path.split()[1] for operation in stored if operation.path.startswith('saved')]
  assert promises == ['1', '3', '4']  # It was killed before it could promise the second.
  assert not list(violations(stored, stores_judge, lambda number: number % 24 == 0))
  assert stores_judge.opened > 10 and stores_judge.whole > 0


@pytest.mark.slow
@pytest.mark.parametrize(
  'fatal',
  [
    (f'rename {RUN}/checkpoints/2$', f'rename {RUN}/checkpoints/3$'),
    ('fsync checkpoints/1.unfinished', 'write checkpoints/2.unfinished'),
    (f'rename {RUN}/checkpoints/1.deleted', f'unlink {RUN}/checkpoints/2.deleted'),
    (f'rename {RUN}/config.json', f'mkdir {RUN}/rollouts$', f'rename {RUN}/metrics.jsonl$', 'fsync metrics.jsonl$'),
    (f'create {RUN}/.lock', f'mkdir {RUN}/checkpoints$', f'rename {RUN}/epochs.json', 'write metrics.jsonl$'),
  ],
  ids=' then '.join,
)
def test_a_failure_after_a_kill_at_any_operation_loses_nothing(recorder, tmp_path, fatal):
  operations = only(RUN, record_stores(recorder, tmp_path, *fatal))
  judge = Judge(operations, durable_run.config(), durable_run.state_of(0), tmp_path, sample=100)
  assert not list(violations(operations, judge, lambda number: number % 3 == 0))
  assert judge.opened > 50 and judge.whole > 10


# What the run would do without one kind of sync → the files and folders of which it is left out.
UNSYNCED = {
  'the lines': f'{RUN}/metrics.jsonl',
  'what is written to a partial file': rf'{RUN}/\.[0-9a-f]+\.partial',
  'the names in the run': RUN,
  'the name of the run': '',
  'the manifest': rf'{RUN}/checkpoints/[^/]+/\.[0-9a-f]+\.partial',
  'the names in a checkpoint': rf'{RUN}/checkpoints/[^/]+(/(state|host|state/d|state/ocdbt.process_0(/d)?))?',
  'the host state': rf'{RUN}/checkpoints/[^/]+/host/metadata',
  'the metadata of Orbax': rf'{RUN}/checkpoints/.*/(_METADATA|_CHECKPOINT_METADATA|manifest.ocdbt.*)',
  'the arrays': rf'{RUN}/checkpoints/.*/d/[0-9a-f]+',
  'the names of checkpoints': f'{RUN}/checkpoints',
  'the rollouts': rf'{RUN}/rollouts/\..*\.partial',
  'the names of the rollouts': f'{RUN}/rollouts',
}


@pytest.mark.parametrize('missing', UNSYNCED.values(), ids=UNSYNCED)
def test_without_any_of_the_syncs_something_may_be_lost(stored, stores_judge, missing):
  left = [one for one in stored if one.kind != 'fsync' or not re.fullmatch(missing, one.path)]
  assert len(left) < len(stored)
  assert next(violations(left, stores_judge, lambda number: False), None)  # At a promise, which is not kept.


def test_removing_a_checkpoint_before_the_next_one_is_named_may_lose_both(stored, stores_judge):
  def place(kind: str, text: str) -> int:
    return next(number for number, one in enumerate(stored) if one.kind == kind and text in (one.path, one.target))

  named, removed = place('rename', f'{RUN}/checkpoints/4'), place('rename', f'{RUN}/checkpoints/3')
  removed = next(n for n in range(named, len(stored)) if stored[n].target.startswith(f'{RUN}/checkpoints/3.deleted'))
  assert stored[removed + 1].kind == 'fsync'
  early = [*stored[:named], *stored[removed : removed + 2], *stored[named:removed], *stored[removed + 2 :]]
  assert next(violations(early, stores_judge, lambda number: named <= number <= named + 3), None)


def losses(operations: Sequence[Operation], scratch: pathlib.Path) -> Iterator[str]:
  """Replay a disk to every operation of a restart, complete on what may be there, and yield what is not moved away."""
  disk, begun, judged = Disk(), False, set()
  whole = {name: text.encode() for name, text in durable_run.LEFT.items()}
  for number, operation in enumerate(operations):
    disk.apply(operation)
    begun = begun or operation.path == f'{durable_run.RESTARTED} left'
    for name, tree in disk.survivors() if begun and operation.kind != 'fsync' else ():
      case = file_operations.key(tree)
      if case in judged:
        continue
      judged.add(case)
      shutil.rmtree(scratch, ignore_errors=True)
      file_operations.write_tree(file_operations.below(tree, durable_run.RESTARTED), scratch)
      with sole_user(epath.Path(scratch), lambda text: None) as ownership:
        try:
          lost_checkpoints.settle(epath.Path(scratch), ownership, restart=False, say=lambda text: None)
        except UserError as error:
          assert 'was published' in str(error)  # It had not begun.
          lost_checkpoints.settle(epath.Path(scratch), ownership, restart=True, say=lambda text: None)
      left = {path: content for path, content in file_operations.read_tree(scratch).items() if content is not None}
      if file_operations.below(left, f'{BEFORE_RESTART}/1') != whole:
        yield f'after operation {number} ({operation}), {name}: there is {sorted(left)}'


def test_a_failure_of_the_machine_during_a_restart_loses_nothing(restarted, tmp_path, monkeypatch):
  monkeypatch.setattr(os, 'fsync', lambda descriptor: None)  # The machine of the test does not fail.
  assert not list(losses(restarted, tmp_path / 'run'))
  for folder in (durable_run.RESTARTED, f'{durable_run.RESTARTED}/{BEFORE_RESTART}/1'):
    unsynced = [one for one in restarted if (one.kind, one.path) != ('fsync', folder)]
    assert len(unsynced) < len(restarted)
    assert next(losses(unsynced, tmp_path / 'run'), None)


# Of the same kind: files and folders below the directory of a run, without what is drawn anew each time.
_DRAWN = re.compile(r'\.[0-9a-f]{16}(?=\.partial)|(?<=/d/)[0-9a-f]{32}')
Sync = tuple[str, int]  # What is synced, and how many times it was before.


class Syncs:
  """In the place of os.fsync: notes what is synced, and fails once.

  How many data files TensorStore makes of the arrays of a checkpoint is a matter of timing, so they count as one.
  """

  def __init__(self, folder: pathlib.Path, failing: Sync | None):
    self.seen: list[Sync] = []
    self.failed = ''
    self._folder, self._failing, self._fsync, self._mutex = folder, failing, os.fsync, threading.Lock()

  def __call__(self, descriptor: int) -> None:
    path = os.readlink(f'/proc/self/fd/{descriptor}')
    kind = _DRAWN.sub('*', path.removeprefix(str(self._folder)))
    with self._mutex:  # Checkpoints are synced by a thread of their own.
      before = sum(kind == other for other, _ in self.seen)
      number = 0 if kind.endswith('/d/*') else before
      if (kind, number) not in self.seen:
        self.seen.append((kind, number))
        if (kind, number) == self._failing:
          self.failed = path
          raise OSError(errno.EIO, os.strerror(errno.EIO))
    self._fsync(descriptor)


def stores_until_a_sync_fails(folder: pathlib.Path, failing: Sync | None) -> Syncs:
  """Write the files of a run of two steps; one sync fails, as of a disk with a bad block."""
  with pytest.MonkeyPatch.context() as patch:
    syncs = Syncs(folder, failing)
    patch.setattr(os, 'fsync', syncs)
    try:
      durable_run.stores(epath.Path(folder), 2)
    except (OSError, UserError) as error:
      assert 'Input/output error' in str(error)
    else:
      # What nothing depends on: a lock that is given back, the name of what is being removed.
      assert not syncs.failed or syncs.failed.endswith(('/.lock', '/checkpoints'))
  return syncs


@pytest.mark.parametrize('part', [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 8))])
def test_a_sync_that_fails_publishes_nothing_and_ends_the_run(tmp_path, part):
  syncs = stores_until_a_sync_fails(tmp_path / 'whole', None).seen
  assert len(syncs) > 40
  wanted = _timeless((tmp_path / 'whole' / 'metrics.jsonl').read_text())
  for number in range(part, len(syncs), 8):
    folder = tmp_path / str(number)
    failed = stores_until_a_sync_fails(folder, syncs[number]).failed
    assert failed, syncs[number]
    unfinished = re.search(r'/checkpoints/(\d+)\.unfinished', failed)
    if unfinished:
      assert not (folder / 'checkpoints' / unfinished.group(1)).exists()
    assert not list(folder.rglob('*.partial'))
    durable_run.stores(epath.Path(folder), 2)
    assert _timeless((folder / 'metrics.jsonl').read_text()) == wanted
    checkpoints = Checkpoints(folder, read_only=True)
    step, state, _ = checkpoints.restore(durable_run.state_of(0))
    assert (step, durable_run.digest(state)) == (2, durable_run.digest(durable_run.state_of(2)))


STEPS = 4


@pytest.fixture(scope='module')
def experiment(tmp_path_factory) -> tuple[pathlib.Path, list[str]]:
  """Return a folder with an uninterrupted run, and the flags that make it."""
  folder = tmp_path_factory.mktemp('experiment')
  flags = [f'--config={tiny.make_experiment(folder)}', f'--config.trainer.total_training_steps={STEPS}']
  flags.append(f'--config.trainer.max_ckpt_to_keep={durable_run.KEEP}')
  done = tiny.launch('train', *flags, f'--workdir={folder}/whole')
  assert done.returncode == 0, done.stderr
  return folder, flags


@pytest.fixture(scope='module')
def trained(recorder, experiment) -> list[Operation]:
  """Return the operations of a run that trains, is killed twice, and told to stop when the rest of a step is to be
  done.
  """
  folder, flags = experiment
  fatal = f'rename {RUN}/checkpoints/1$', 'SIGTERM rename rollouts/2.jsonl$', f'rename {RUN}/checkpoints/3$'
  return record(recorder, folder / 'recorded', ['train', *flags, f'--workdir={folder}/recorded/disk/{RUN}'], fatal)


@pytest.mark.slow
def test_a_failure_of_the_machine_while_a_run_trains_loses_nothing(experiment, trained, tmp_path):
  folder = experiment[0] / 'recorded' / 'disk' / RUN
  config = runs.run_config(folder)
  session, parameters = make_session(config, folder)
  here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  like = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here),
    abstract_state(update_spec(config), parameters, session.mesh),
  )
  judge = Judge(trained, config, like, tmp_path, sample=200)
  assert not list(violations(trained, judge, lambda number: number % 3 == 0))
  assert judge.opened > 50 and judge.whole > 10  # How many of the sampled states have a checkpoint differs a little.


@pytest.mark.parametrize('count', tiers.cases((8, 20), slow=(8,)))
def test_from_what_a_failure_leaves_a_run_ends_bit_for_bit_as_if_there_were_none(experiment, trained, tmp_path, count):
  folder, flags = experiment
  rng, disk, left = random.Random(0), Disk(), []
  places = set(np.linspace(0, len(trained) - 1, count).astype(int).tolist())
  for number, operation in enumerate(trained):
    disk.apply(operation)
    if number in places:
      _, tree = rng.choice(list(disk.survivors()))
      left.append(tmp_path / f'after_{number}')
      file_operations.write_tree(file_operations.below(tree, RUN), left[-1])
  commands = [('train', [*flags, f'--workdir={workdir}']) for workdir in left]
  for done in tiny.launch_many(commands):
    assert done.returncode == 0, done.stderr
  resumed = 0
  for workdir in left:
    assert_same_run(folder / 'whole', workdir, STEPS)
    resumed += epochs.read_epochs(workdir).epochs[-1].resumed_from > 0
  assert resumed > count // 2  # The others began anew: there was no checkpoint yet.
