"""The reference's own numbers: every committed golden file, and the command that checks any folder of them."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

from tests import tiny
from tests.golden import e2e, extras, jsd_pg, loss, teacher
from tests.golden.__main__ import main

DATA = tiny.REPOSITORY / 'tests' / 'golden' / 'data'
SHARDS = 4
# What rounds least shows most; every program is another one in the other type.
both_types = pytest.mark.parametrize('dtype', ['float64', pytest.param('float32', marks=pytest.mark.slow)])


def passed(report):
  assert report.cases and not report.failed, '\n'.join(report.messages)


# By default as the update computes them: by chunks, from hidden states, but for logits that are not finite.
@pytest.mark.parametrize(
  ('dtype', 'paths'),
  [
    pytest.param('float64', ('chunks',), id='float64'),
    pytest.param('float64', ('logits',), id='float64, from logits', marks=pytest.mark.slow),
    pytest.param('float32', ('chunks',), id='float32', marks=pytest.mark.slow),
    pytest.param('float32', ('logits',), id='float32, from logits', marks=pytest.mark.campaign),
  ],
)
@pytest.mark.parametrize('shard', range(SHARDS))
def test_losses(shard, dtype, paths):
  # Neighbouring files share shapes and settings, hence compiled programs.
  count = len(list((DATA / 'loss').glob('*.npz')))
  assert count == 112
  edges = np.linspace(0, count, SHARDS + 1).astype(int)
  passed(loss.check(DATA / 'loss', slice(int(edges[shard]), int(edges[shard + 1])), (dtype,), paths))


def test_exceptions_of_the_loss(tmp_path):
  shutil.copy(DATA / 'loss' / 'errors.json', tmp_path)
  report = loss.check(tmp_path)
  assert not report.failed, report.messages


@both_types
def test_losses_of_the_service(dtype):
  report = jsd_pg.check(DATA / 'jsd_pg', (dtype,))
  passed(report)
  assert report.cases == 15 and (report.worst > 0) == (dtype == 'float64')


def test_extras():
  report = extras.check(DATA / 'extras')
  passed(report)
  assert report.cases == 113


def test_teachers():
  passed(teacher.check(DATA / 'teacher'))


@both_types
def test_updates_end_to_end(dtype):
  passed(e2e.check(DATA / 'e2e', (dtype,)))


def test_command_fails_on_a_wrong_number_and_on_nothing(tmp_path, capsys):
  folder = tmp_path / 'loss'
  folder.mkdir()
  name = '108_topk_notail_K1.npz'
  with np.load(DATA / 'loss' / name) as archive:
    arrays = dict(archive)
  np.savez(folder / name, **arrays)
  assert main([str(tmp_path)]) == 0
  assert capsys.readouterr().out == 'loss: 1 cases, 0 failed, worst 0.0e+00\n'
  np.savez(folder / name, **arrays | {'exp_loss_f64': arrays['exp_loss_f64'] + 1e-4})
  assert main([str(tmp_path)]) == 1
  assert 'loss: 1 cases, 1 failed' in capsys.readouterr().out
  # A reference that is not finite cannot fail.
  info = json.loads(str(arrays['info_json'])) | {'loss_finite': False}
  np.savez(folder / name, **arrays | {'exp_loss_f64': np.float64('nan'), 'info_json': json.dumps(info)})
  assert main([str(tmp_path)]) == 0
  (tmp_path / 'unknown').mkdir()
  shutil.rmtree(folder)
  assert main([str(tmp_path)]) == 1


@pytest.mark.slow
def test_command_as_a_process(tmp_path):
  (tmp_path / 'extras').mkdir()
  shutil.copy(DATA / 'extras' / 'kl_penalty.npz', tmp_path / 'extras')
  command = [sys.executable, '-m', 'tests.golden', str(tmp_path)]
  finished = subprocess.run(command, capture_output=True, text=True, cwd=tiny.REPOSITORY, check=False)
  assert finished.returncode == 0, finished.stderr
  assert finished.stdout.startswith('extras: 9 cases, 0 failed, worst ')
