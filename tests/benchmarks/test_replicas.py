"""The campaign about replicas in small, and what its audit counts."""

import json
import subprocess
import sys
import types

import pytest

from benchmarks import replicas
from tests import tiny
from tests.serving.store.postgres import postgres  # noqa: F401 (A fixture.)

VERSION = {'version': 1, 'reason': 'undo', 'digest': 'ab', 'parent': 0, 'created': 1.0, 'details': {}}


@pytest.fixture
def audit(monkeypatch):
  """Give an audit of one replica with two versions, made by a creation and an undo."""
  ledger = replicas.Ledger()
  ledger.add('a', replicas.Change('create', 'ad-1', {'id': 'ad-1'}))
  ledger.add('b', replicas.Change('undo', 'ad-1', VERSION))
  found = replicas.Audit([], ledger, None)
  found.versions = [{'version': 0}, VERSION]
  found.keys = [None, 'b']
  found.head = {'id': 'ad-1', 'version': 1, 'settings': {}}

  def same(path):
    if path.endswith('/ad-1'):
      return found.head
    return {'adapters': [found.head], 'versions': found.versions, 'has_more': False}

  def manifest(blobs, folder, number, digest):
    key = found.keys[number]
    return types.SimpleNamespace(request=None if key is None else types.SimpleNamespace(key=key))

  monkeypatch.setattr(found, '_same', same)
  monkeypatch.setattr(replicas.versions, 'read_manifest', manifest)
  for each in found.versions:
    each.setdefault('digest', '')
  return found


def counted(audit):
  return {name: count for name, count in audit.run().items() if count and name not in ('adapters', 'changes')}


def test_an_audit_finds_nothing_where_nothing_is_wrong(audit):
  assert counted(audit) == {}


def test_an_audit_finds_what_is_lost_doubled_or_missing(audit):
  changes = audit.ledger.changes
  changes['b'].said = VERSION | {'digest': 'cd'}
  assert counted(audit) == {'lost': 1}
  del changes['b']
  audit.found.clear()
  assert counted(audit) == {'doubled': 1}
  changes['b'] = replicas.Change('undo', 'ad-1')  # Its answer was lost.
  audit.found.clear()
  assert counted(audit) == {'unknown': 1}
  changes['b'].said = VERSION
  audit.keys = ['b', 'b']
  audit.found.clear()
  assert counted(audit) == {'doubled': 1}
  audit.keys, audit.head = [None, 'b'], audit.head | {'version': 2}
  audit.found.clear()
  assert counted(audit) == {'gaps': 1}


def test_an_audit_finds_a_replica_that_has_ended_by_itself_and_starts_it_again(audit, tmp_path, monkeypatch):
  replica = replicas.Replica(tmp_path / 'config.py', {}, tmp_path / 'log')
  replica.log.write_text('Killed')
  replica.process = types.SimpleNamespace(poll=lambda: -9)
  monkeypatch.setattr(replica, 'start', lambda: setattr(replica, 'process', types.SimpleNamespace(poll=lambda: None)))
  audit._replicas.append(replica)  # noqa: SLF001 (That of the fixture has none.)
  assert counted(audit) == {'ended': 1}
  audit.found.clear()
  assert counted(audit) == {}


@pytest.mark.slow
def test_a_sample_of_the_campaign(postgres):  # noqa: F811 (Skipped without PostgreSQL.)
  # By its seed, a pause of 7.3 s, and little waiting between the torments.
  command = [sys.executable, '-m', 'benchmarks.replicas', '--replicas=2', '--clients=2', '--torments=pause,kill']
  done = subprocess.run(
    [*command, '--seed=474'],
    capture_output=True,
    text=True,
    timeout=1200,
    cwd=tiny.REPOSITORY,
    env=tiny.environment(quick=True),
  )
  lines = [json.loads(line) for line in done.stdout.splitlines()]
  assert len(lines) == 4, (done.returncode, done.stderr[-3000:])
  torments, _, took, found = lines
  assert torments['torments'] == {'pause': 1, 'kill': 1} and took['takeover_s']['count']
  wrong = {name: count for name, count in found['found'].items() if name not in ('adapters', 'changes', 'unknown')}
  assert not any(wrong.values()), done.stderr[-3000:]
