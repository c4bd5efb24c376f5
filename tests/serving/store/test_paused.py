"""Replicas in processes of their own, which are paused and killed while they make versions."""

import collections
import contextlib
import signal
import subprocess
import sys
import threading

import pytest

from benchmarks.replicas import bucket
from sdpo_jax.serving.errors import NotHolder
from sdpo_jax.serving.store import versions
from sdpo_jax.serving.store.store import Store
from tests import tiny
from tests.serving.served_process import until
from tests.serving.store import store_cases
from tests.serving.store.postgres import postgres  # noqa: F401 (A fixture.)

pytestmark = pytest.mark.slow  # Three processes.


class Writer:
  """A process of `store_writer`, and what it has said."""

  def __init__(self, root, database, name):
    command = [sys.executable, '-m', 'tests.serving.store.store_writer', root, database, name]
    self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tiny.REPOSITORY)
    self.said: list[str] = []
    self._reading = threading.Thread(target=lambda: self.said.extend(self.process.stdout), daemon=True)
    self._reading.start()

  def wait(self, more):
    """Wait until it has said so many more lines."""
    wanted = len(self.said) + more
    until(lambda: len(self.said) >= wanted)

  def kill(self):
    self.process.kill()
    self.process.wait()
    self._reading.join()


def test_a_holder_that_is_paused_or_killed_loses_nothing_and_makes_nothing_twice(
  postgres,  # noqa: F811
  tmp_path,
  monkeypatch,
):
  database, root = postgres.url(), 's3://bucket/x'
  with contextlib.ExitStack() as stack:
    names = stack.enter_context(bucket('own', tmp_path))
    for name, value in names.items():
      monkeypatch.setenv(name, value)
    start = lambda: Store.open(root, database, base=store_cases.tiny_base(), url='http://test')  # noqa: E731
    with start() as store:
      adapter, first = store.create('ada', 'mine', {}, store_cases.arrays(0))
    writers = [Writer(root, database, name) for name in ('one', 'other')]
    for writer in writers:
      stack.callback(writer.kill)
      until(lambda: writer.said)  # noqa: B023
    until(lambda: any(len(writer.said) > 3 for writer in writers))
    holder, other = sorted(writers, key=lambda writer: -len(writer.said))
    holder.process.send_signal(signal.SIGSTOP)
    other.wait(3)
    holder.process.send_signal(signal.SIGCONT)
    other.wait(3)
    other.kill()
    holder.wait(3)
    holder.kill()
    store = stack.enter_context(start())
    until(lambda: _held(store, adapter))
    found = store.versions('ada', adapter.id)
    assert [each.number for each in found] == list(range(len(found)))
    told = [line.split() for writer in writers for line in writer.said if line != 'ready\n' and line.endswith('\n')]
    assert len(told) >= 12 and len(dict(told)) == len(told)
    assert {(each.number, each.digest) for each in found} >= {(int(number), digest) for number, digest in told}
    folder = versions.adapter_folder('ada', adapter.id)
    manifests = [versions.read_manifest(store.blobs, folder, each.number, each.digest) for each in found[1:]]
    assert set(collections.Counter(each.request.key for each in manifests).values()) == {1}
    assert len(found) - 1 - len(told) <= len(writers)  # Those that were made and not said.


def _held(store, adapter):
  with contextlib.suppress(NotHolder):  # Until the lease of the dead one ends.
    store.hold('ada', adapter.id)
    return True
  return False
