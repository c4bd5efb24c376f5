"""launch/tpu_slice.sh: the gcloud commands that it prints and runs, with a gcloud that writes down what it is told.

What the workers are told is run here, in a home of its own, where a test asks for a worker.
"""

import os
import pathlib
import re
import shlex
import signal
import subprocess
import threading
import time

import pytest

from tests import tiny

PLACE = ('--name=sdpo', '--zone=us-x1', '--poll_s=0')
TRAIN = ('--', 'python', '-m', 'launch.train', '--config=configs/quickstart.py', '--workdir=gs://b/a run')

# Answers each question with the next line of the file of its kind, the last line again and again; a line that begins
# with ! is a failure. What it is told is in `calls`. If there is a folder `home`, that is the home of the only worker:
# then what worker 0 answers is not in a file.
GCLOUD = """#!/usr/bin/env bash
printf '%q ' "$@" >> "$FAKE/calls"; echo >> "$FAKE/calls"
answer() {
  local line
  line=$(head -n 1 "$FAKE/$1")
  (($(wc -l < "$FAKE/$1") < 2)) || sed -i 1d "$FAKE/$1"
  [[ $line != !* ]] || exit 1
  echo "$line"
}
last="${@: -1}"
case "$3 $4 $last" in
  'queued-resources describe '*) answer states ;;
  'tpu-vm ssh '*)
    if [ -d "$FAKE/home" ]; then
      HOME="$FAKE/home" bash -c "${last#--command=}"
    elif [[ $last == *'; outcome' ]]; then
      answer codes
    fi
    ;;
esac
"""

# Saves when told to stop, as launch.train does, for as long as there is no file `saved`.
TRAINER = """
import os, signal, sys, time
def save(*_):
  print('saves', flush=True)
  while not os.path.exists('../sdpo_run/saved'):
    time.sleep(0.02)
  print('saved', flush=True)
  sys.exit(143)
signal.signal(signal.SIGTERM, save)
print('begins', flush=True)
time.sleep(60)
"""


def begin(tmp_path: pathlib.Path, *arguments: str) -> subprocess.Popen:
  """Start the script with the fake."""
  environment = {**os.environ, 'FAKE': str(tmp_path), 'PATH': f'{tmp_path}/bin:{os.environ["PATH"]}'}
  script = str(tiny.REPOSITORY / 'launch' / 'tpu_slice.sh')
  return subprocess.Popen(
    ['bash', script, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
  )


@pytest.fixture
def slice_of(tmp_path):
  """Run the script with the fake; return (exit code, stderr, gcloud's calls as lists of words); `stdout` is a file."""
  (tmp_path / 'bin').mkdir()
  (tmp_path / 'bin' / 'gcloud').write_text(GCLOUD)
  (tmp_path / 'bin' / 'gcloud').chmod(0o755)

  def run(*arguments: str, states: str = 'ACTIVE', codes: str = '0'):
    (tmp_path / 'states').write_text(states.replace(' ', '\n') + '\n')
    (tmp_path / 'codes').write_text(codes.replace(' ', '\n') + '\n')
    (tmp_path / 'calls').write_text('')
    with begin(tmp_path, *arguments) as script:
      out, err = script.communicate(timeout=60)
    (tmp_path / 'stdout').write_text(out)
    return script.returncode, err, [shlex.split(line) for line in (tmp_path / 'calls').read_text().splitlines()]

  return run


class Worker:
  """The home of the only worker of the slice, and what the script has put there."""

  def __init__(self, tmp_path: pathlib.Path):
    self.home = tmp_path / 'home'
    self.run = self.home / 'sdpo_run'
    (self.home / 'sdpo_jax').mkdir(parents=True)
    self.groups: set[int] = set()

  def group(self) -> int:
    group = int((self.run / 'group').read_text().split()[0])
    self.groups.add(group)
    return group

  def let_go(self) -> None:
    """Lets a run that saves end."""
    (self.run / 'saved').touch()

  def log(self) -> list[str]:
    return (self.run / 'log').read_text().split()

  def await_log(self, *words: str) -> None:
    within(lambda: self.log() == list(words), lambda: f'the log is {self.log()}, not {words}')

  def await_exit_code(self, code: int) -> None:
    path = self.run / 'exit_code'
    within(path.exists, lambda: 'no exit code')
    assert path.read_text() == f'{code}\n'


def within(condition, complaint, seconds: float = 20) -> None:
  end = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < end, complaint()
    time.sleep(0.02)


@pytest.fixture
def worker(tmp_path):
  """Yield a worker on which what the script says is really run; nothing of it is left behind."""
  worker = Worker(tmp_path)
  yield worker
  if (worker.run / 'group').exists():
    worker.group()
  for group in worker.groups:
    try:
      os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
      pass


@pytest.fixture
def status(slice_of, tmp_path):
  """Return what `status` says of the worker: its outcome."""

  def ask() -> str:
    code, err, _ = slice_of('status', *PLACE)
    assert code == 0, err
    state, line = (tmp_path / 'stdout').read_text().splitlines()
    assert state == 'ACTIVE'
    return line.partition(': ')[2].rpartition(', ')[0]

  return ask


def verbs(calls: list[list[str]]) -> list[str]:
  """Return what was asked of gcloud, without the questions about state and exit code, and the loads of ssh by their
  content.
  """
  names = []
  for call in calls:
    if call[3] == 'describe' or call[-1].endswith('; outcome'):
      continue
    content = {'requirements-tpu': 'install', 'setsid': 'start', 'tail -n 30': 'log'}
    names.append(next((name for key, name in content.items() if key in call[-1]), call[3]))
  return names


def test_a_dry_run_prints_the_commands_and_runs_none(slice_of):
  code, err, calls = slice_of('run', '--dry_run', *PLACE, '--type=v5litepod-64', '--spot', '--project=p', *TRAIN)
  assert code == 0
  assert calls == []
  printed = [shlex.split(line[2:]) for line in err.splitlines() if line.startswith('+ ')]
  assert printed[0] == [
    *('gcloud', 'compute', 'tpus', 'queued-resources', 'create', 'sdpo', '--zone=us-x1', '--project=p'),
    *('--node-id=sdpo', '--accelerator-type=v5litepod-64', '--runtime-version=v2-alpha-tpuv5-lite', '--spot'),
  ]
  assert all({'--zone=us-x1', '--project=p'} <= set(command) for command in printed)
  assert verbs([command[1:] for command in printed]) == ['create', 'scp', 'install', 'start']
  assert 'done' not in err.splitlines()[-1]


def test_a_dry_run_does_not_say_how_the_slice_is(slice_of, tmp_path):
  code, _, calls = slice_of('status', '--dry_run', *PLACE)
  assert (code, calls, (tmp_path / 'stdout').read_text()) == (0, [], '')


def test_what_is_printed_is_what_is_run(slice_of):
  _, err, calls = slice_of('run', *PLACE, '--type=v5litepod-8', *TRAIN)
  assert [shlex.split(line[2:])[1:] for line in err.splitlines() if line.startswith('+ ')] == calls
  assert '--spot' not in calls[0]


def test_it_waits_for_the_slice_and_then_for_the_run(slice_of):
  code, err, calls = slice_of(
    'run', *PLACE, '--type=v5litepod-16', *TRAIN, states='WAITING_FOR_RESOURCES PROVISIONING ACTIVE', codes='running 0'
  )
  assert code == 0
  assert 'Waiting for the slice sdpo: WAITING_FOR_RESOURCES.' in err
  assert verbs(calls) == ['create', 'scp', 'install', 'start']


def test_a_preempted_slice_is_asked_for_again_and_the_run_started_again(slice_of):
  code, err, calls = slice_of(
    'watch', *PLACE, '--type=v5litepod-64', '--spot', *TRAIN, states='ACTIVE ! SUSPENDED ACTIVE', codes='running 0'
  )
  assert code == 0
  assert verbs(calls) == ['delete', 'create', 'scp', 'install', 'start']
  assert 'cannot be read; trying again' in err  # One question failed: no reason to give the slice up.
  assert 'The slice sdpo is SUSPENDED: requesting it again' in err


def test_a_slice_that_cannot_be_had_ends_with_its_own_code(slice_of):
  code, err, calls = slice_of('create', *PLACE, '--type=v5litepod-256', states='WAITING_FOR_RESOURCES FAILED')
  assert code == 4
  assert 'The slice sdpo is FAILED' in err
  assert verbs(calls) == ['create']


@pytest.mark.parametrize('ended', ['70', '75', '143'])
def test_a_run_that_lost_a_worker_or_was_told_to_stop_is_started_again(slice_of, ended):
  code, err, calls = slice_of('watch', *PLACE, '--type=v5litepod-64', *TRAIN, codes=f'running {ended} running 0')
  assert code == 0
  assert verbs(calls) == ['start']
  assert f'ended with exit code {ended}: starting it again' in err


@pytest.mark.parametrize(('ended', 'ours'), [('2', 2), ('3', 3), ('1', 1), ('134', 1)])
def test_a_run_that_starting_again_would_not_mend_is_not_started_again(slice_of, ended, ours):
  code, err, calls = slice_of('watch', *PLACE, '--type=v5litepod-64', *TRAIN, codes=ended)
  assert code == ours
  assert verbs(calls) == ['log']


def test_a_run_of_which_nothing_is_left_is_started_again(slice_of):
  code, err, calls = slice_of('watch', *PLACE, '--type=v5litepod-64', *TRAIN, codes='running lost running 0')
  assert code == 0
  assert verbs(calls) == ['start']
  assert 'gone without an exit code' in err


def test_a_worker_that_cannot_be_reached_is_looked_for_again(slice_of):
  code, err, calls = slice_of('watch', *PLACE, '--type=v5litepod-64', *TRAIN, codes='! ! running ! 0')
  assert code == 0
  assert verbs(calls) == []
  sentence = 'Worker 0 of the slice sdpo could not be reached, though the slice is ACTIVE,'
  said = [line for line in err.splitlines() if line.startswith('Worker 0')]
  assert said == [f'{sentence} ({count} of 10 times): trying again.' for count in (1, 2, 1)]  # Counted in a row.


def test_a_worker_that_can_never_be_reached_ends_the_watching(slice_of):
  code, err, calls = slice_of('watch', *PLACE, '--type=v5litepod-64', *TRAIN, codes='running !')
  assert code == 5
  assert verbs(calls) == []
  assert 'could not be reached, though the slice is ACTIVE, 10 times in a row: giving up.' in err
  assert sum(call[3] == 'ssh' for call in calls) == 1 + 10


def test_a_run_that_can_never_be_started_again_ends_the_watching(slice_of, worker):
  (worker.home / 'sdpo_jax').rmdir()
  code, err, calls = slice_of('watch', *PLACE, '--type=v5litepod-64', *TRAIN)
  assert code == 5
  assert verbs(calls) == ['start'] * 10
  assert 'No run has been started on worker 0: starting it.' in err
  assert 'could not be started on all workers of the slice sdpo 10 times in a row' in err


def test_the_command_is_started_as_it_was_written_and_outlives_its_shell(slice_of, worker):
  program = 'import os, sys; print(sys.argv[1:], os.getcwd()); sys.exit(3)'
  code, _, _ = slice_of('start', *PLACE, '--', 'python3', '-c', program, 'a b', "it's", '$HOME;')
  assert code == 0
  worker.await_exit_code(3)
  words = ['a b', "it's", '$HOME;']
  assert (worker.run / 'log').read_text() == f'{words} {worker.home / "sdpo_jax"}\n'


def test_a_stopped_run_saves_and_leaves_its_exit_code(slice_of, worker, status):
  assert status() == 'not started'
  assert slice_of('start', *PLACE, '--', 'python3', '-c', TRAINER)[0] == 0
  worker.await_log('begins')
  assert status() == 'running'
  assert slice_of('stop', *PLACE)[0] == 0
  worker.await_log('begins', 'saves')
  assert status() == 'running'
  worker.let_go()
  worker.await_exit_code(143)
  assert worker.log() == ['begins', 'saves', 'saved']
  within(lambda: status() == '143', status)


def test_a_start_waits_until_the_stopped_run_has_saved(slice_of, worker, status):
  slice_of('start', *PLACE, '--', 'python3', '-c', TRAINER)
  worker.await_log('begins')
  worker.group()
  slice_of('stop', *PLACE)
  waits = threading.Timer(0.6, worker.let_go)
  waits.start()
  code, err, _ = slice_of('start', *PLACE, '--', 'python3', '-c', TRAINER)
  waits.join()
  assert code == 0, err
  worker.await_log('begins', 'saves', 'saved', 'begins')
  assert status() == 'running'  # The exit code of the run before is gone.


def test_a_watch_starts_a_stopped_run_again(slice_of, worker):
  program = f'import os, sys\nif os.path.exists("../sdpo_run/saved"): sys.exit()\n{TRAINER}'
  slice_of('start', *PLACE, '--', 'python3', '-c', program)
  worker.await_log('begins')
  slice_of('stop', *PLACE)
  worker.let_go()
  code, err, calls = slice_of('watch', *PLACE, '--poll_s=0.1', '--type=v5litepod-8', '--', 'python3', '-c', program)
  assert code == 0
  assert verbs(calls) == ['start']
  assert 'ended with exit code 143: starting it again' in err
  assert err.splitlines()[-1] == 'The run is done.'
  assert worker.log() == ['begins', 'saves', 'saved']


@pytest.mark.parametrize('verb', ['start', 'install'])
def test_nothing_is_started_or_installed_beside_a_run(slice_of, worker, verb):
  slice_of('start', *PLACE, '--', 'python3', '-c', TRAINER)
  worker.await_log('begins')
  command = ('--', 'python3', '-c', TRAINER) if verb == 'start' else ()
  code, err, _ = slice_of(verb, *PLACE, '--wait_s=0', *command)
  assert code == 2
  assert 'A run is still going on here: stop it first.' in err
  assert worker.log() == ['begins']


@pytest.mark.usefixtures('slice_of')
def test_starts_at_the_same_time_start_one_run(worker, tmp_path):
  starts = [begin(tmp_path, 'start', *PLACE, '--wait_s=0', '--', 'python3', '-c', TRAINER) for _ in range(3)]
  for start in starts:
    start.communicate(timeout=60)
  assert sorted(start.returncode for start in starts) == [0, 2, 2]
  worker.await_log('begins')


def test_a_command_whose_wrapper_was_killed_is_still_seen(slice_of, worker, status):
  slice_of('start', *PLACE, '--', 'python3', '-c', TRAINER)
  worker.await_log('begins')
  os.kill(worker.group(), signal.SIGKILL)  # The wrapper leads the group.
  assert status() == 'running'
  assert slice_of('start', *PLACE, '--wait_s=0', '--', 'true')[0] == 2
  worker.let_go()
  slice_of('stop', *PLACE)
  worker.await_log('begins', 'saves', 'saved')
  within(lambda: status() == 'lost', status)


def test_what_a_command_leaves_behind_is_waited_for(slice_of, worker, status):
  slice_of('start', *PLACE, '--', 'bash', '-c', 'python3 -c "$0" & exit 75', TRAINER)
  worker.await_exit_code(75)
  worker.await_log('begins')
  assert status() == '75, but some of its processes live on'
  assert slice_of('start', *PLACE, '--wait_s=0', '--', 'true')[0] == 2
  worker.let_go()
  slice_of('stop', *PLACE)
  assert slice_of('start', *PLACE, '--', 'echo', 'again')[0] == 0
  worker.await_log('begins', 'saves', 'saved', 'again')


def test_a_run_that_is_killed_with_its_wrapper_is_started_again_by_watch(slice_of, worker, status):
  program = 'if [ -e ../sdpo_run/again ]; then echo resumed; else touch ../sdpo_run/again; kill -KILL 0; fi'
  slice_of('start', *PLACE, '--', 'bash', '-c', program)
  within(lambda: status() == 'lost', status)
  code, err, calls = slice_of('watch', *PLACE, '--poll_s=0.1', '--type=v5litepod-8', '--', 'bash', '-c', program)
  assert code == 0
  assert verbs(calls) == ['start']
  assert 'gone without an exit code' in err
  assert worker.log() == ['resumed']


def test_a_group_of_before_a_boot_is_not_the_run(slice_of, worker, status):
  worker.run.mkdir()
  with subprocess.Popen(['sleep', '60'], start_new_session=True) as other:
    (worker.run / 'group').write_text(f'{other.pid} 01234567-89ab-cdef-0123-456789abcdef\n')
    assert status() == 'lost'
    code, err, _ = slice_of('stop', *PLACE)
    assert code == 0
    assert 'No run is going on here.' in err
    assert slice_of('start', *PLACE, '--wait_s=0', '--', 'true')[0] == 0
    worker.await_exit_code(0)
    assert other.poll() is None
    other.kill()


def test_install_packs_what_git_knows(slice_of):
  _, _, calls = slice_of('install', *PLACE)
  assert verbs(calls) == ['scp', 'install']
  assert calls[0][-1] == '--worker=all'
  assert pathlib.Path(calls[0][4]).name == 'code.tar.gz'
  assert not pathlib.Path(calls[0][4]).exists()  # Nothing is left behind.


@pytest.mark.parametrize('arguments', [('--help',), ('-h',), ('run', '--help'), ('start', *PLACE, '-h')])
def test_help_lists_verbs_and_flags(slice_of, tmp_path, arguments):
  code, err, calls = slice_of(*arguments)
  assert (code, err, calls) == (0, '', [])
  text = (tmp_path / 'stdout').read_text()
  script = (tiny.REPOSITORY / 'launch' / 'tpu_slice.sh').read_text()
  flags = re.findall(r'^      (--\w+)(?:=\*)?\)', script, re.MULTILINE)
  listed = re.search(r'^  ((?:\w+ \| )+\w+)\) read_flags', script, re.MULTILINE)
  assert len(flags) == 10
  assert all(re.search(rf'^  {flag}\b', text, re.MULTILINE) for flag in flags)
  assert all(re.search(rf'^  {verb}  ', text, re.MULTILINE) for verb in listed[1].split(' | '))


@pytest.mark.parametrize(
  ('arguments', 'sentence'),
  [
    ((), '  create   requests the slice'),
    (('begin', *PLACE), 'begin is not run, create, install, start, watch, logs, status, stop or delete'),
    (('run', '--zone=z', '--type=t', *TRAIN), '--name=… is required'),
    (('run', '--name=n', '--type=t', *TRAIN), '--zone=… is required'),
    (('run', *PLACE, *TRAIN), 'run needs --type=…'),
    (('start', *PLACE), 'start needs the command to start, after --.'),
    (('create', *PLACE, 'v5litepod-8'), 'v5litepod-8 is not a flag'),
    (('start', *PLACE, '--wait_s=1m', *TRAIN), '--wait_s=1m must be a whole number of seconds.'),
    (('watch', *PLACE, '--poll_s=', *TRAIN), '--poll_s= must be a number of seconds.'),
  ],
)
def test_wrong_flags_end_with_a_sentence(slice_of, arguments, sentence):
  code, err, calls = slice_of(*arguments)
  assert code == 2
  assert sentence in err
  assert calls == []
