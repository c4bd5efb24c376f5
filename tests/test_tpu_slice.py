"""launch/tpu_slice.sh: the gcloud commands that it prints and runs, with a gcloud that only writes down what it is told."""

import os
import pathlib
import shlex
import subprocess

import pytest

from tests import tiny

PLACE = ('--name=sdpo', '--zone=us-x1', '--poll_s=0')
TRAIN = ('--', 'python', '-m', 'launch.train', '--config=configs/quickstart.py', '--workdir=gs://b/a run')

# Answers each question with the next line of the file of its kind, the last line again and again; a line that begins
# with ! is a failure. What it is told is in `calls`; remote commands are run here if there is a folder `home`.
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
  *'cat ~/sdpo_run/exit_code'*) answer codes ;;
  'tpu-vm ssh '*) [ ! -d "$FAKE/home" ] || HOME="$FAKE/home" bash -c "${last#--command=}" ;;
esac
"""


@pytest.fixture
def slice_of(tmp_path):
  """Runs the script with this fake; returns (exit code, stderr, gcloud's calls as lists of words)."""
  (tmp_path / 'bin').mkdir()
  (tmp_path / 'bin' / 'gcloud').write_text(GCLOUD)
  (tmp_path / 'bin' / 'gcloud').chmod(0o755)

  def run(*arguments: str, states: str = 'ACTIVE', codes: str = '0'):
    (tmp_path / 'states').write_text(states.replace(' ', '\n') + '\n')
    (tmp_path / 'codes').write_text(codes.replace(' ', '\n') + '\n')
    (tmp_path / 'calls').write_text('')
    environment = {**os.environ, 'FAKE': str(tmp_path), 'PATH': f'{tmp_path}/bin:{os.environ["PATH"]}'}
    done = subprocess.run(
      ['bash', str(tiny.REPOSITORY / 'launch' / 'tpu_slice.sh'), *arguments],
      capture_output=True,
      text=True,
      check=False,
      env=environment,
      timeout=120,
    )
    return done.returncode, done.stderr, [shlex.split(line) for line in (tmp_path / 'calls').read_text().splitlines()]

  return run


def verbs(calls: list[list[str]]) -> list[str]:
  """What was asked of gcloud, without the questions about state and exit code, and the loads of ssh by their content."""
  names = []
  for call in calls:
    if call[3] == 'describe' or 'exit_code 2>' in call[-1]:
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
  assert 'cannot be seen; trying again' in err  # One question failed: no reason to give the slice up.
  assert 'The slice sdpo is SUSPENDED: asking for it again' in err


def test_a_slice_that_cannot_be_had_ends_with_its_own_code(slice_of):
  code, err, calls = slice_of('create', *PLACE, '--type=v5litepod-256', states='WAITING_FOR_RESOURCES FAILED')
  assert code == 4
  assert 'The slice sdpo is FAILED' in err
  assert verbs(calls) == ['create']


@pytest.mark.parametrize('ended', ['75', '143'])
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


def test_the_command_is_started_as_it_was_written_and_outlives_its_shell(slice_of, tmp_path):
  home = tmp_path / 'home'
  (home / 'sdpo_jax').mkdir(parents=True)
  program = 'import os, sys; print(sys.argv[1:], os.getcwd()); sys.exit(3)'
  code, _, _ = slice_of('start', *PLACE, '--', 'python3', '-c', program, 'a b', "it's", '$HOME;')
  assert code == 0
  ended = home / 'sdpo_run' / 'exit_code'
  while not (ended.exists() and ended.read_text()):
    pass
  assert ended.read_text() == '3\n'
  assert (home / 'sdpo_run' / 'log').read_text() == f'{["a b", "it" + chr(39) + "s", "$HOME;"]} {home / "sdpo_jax"}\n'


def test_install_packs_what_git_knows(slice_of, tmp_path, monkeypatch):
  home = tmp_path / 'home'
  _, _, calls = slice_of('install', *PLACE)
  assert verbs(calls) == ['scp', 'install']
  assert calls[0][-1] == '--worker=all'
  assert pathlib.Path(calls[0][4]).name == 'code.tar.gz'
  assert not pathlib.Path(calls[0][4]).exists()  # Nothing is left behind.
  assert not home.exists()


@pytest.mark.parametrize(
  ('arguments', 'sentence'),
  [
    ((), 'Usage: '),
    (('run', '--zone=z', '--type=t', *TRAIN), '--name=… is required'),
    (('run', '--name=n', '--type=t', *TRAIN), '--zone=… is required'),
    (('run', *PLACE, *TRAIN), 'run needs --type=…'),
    (('start', *PLACE), 'start needs the command to start, after --.'),
    (('create', *PLACE, 'v5litepod-8'), 'v5litepod-8 is not a flag'),
  ],
)
def test_wrong_flags_end_with_a_sentence(slice_of, arguments, sentence):
  code, err, calls = slice_of(*arguments)
  assert code == 2
  assert sentence in err
  assert calls == []
