"""The simulation of a load over replicas."""

import json
import sys

import numpy as np

from benchmarks import replica_load


def test_a_queue_serves_one_request_at_a_time():
  left = replica_load.queue(np.array([0.0, 10.0, 1.0]), np.array([2.0, 1.0, 3.0]))
  assert left.tolist() == [2.0, 11.0, 5.0]


def test_what_saturates_first_is_named(capsys, monkeypatch):
  monkeypatch.setattr(sys, 'argv', ['replica_load', '--rate=100', '--feedback_transactions=20', '--database_per_s=200'])
  assert replica_load.main() == 0
  short, enough = (json.loads(line)['load'] for line in capsys.readouterr().out.splitlines())
  assert short['first'] == 'database' and short['busy']['database'] > 1 >= enough['busy']['database']
  assert enough['completion_ms']['p95'] < short['completion_ms']['p95']
