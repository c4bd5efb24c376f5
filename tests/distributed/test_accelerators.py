"""Which devices a command uses: a platform that is not there ends in a sentence, and an absent TPU in silence."""

import importlib.metadata
import importlib.util
import pathlib

import jax
import pytest

from sdpo_jax.distributed import accelerators
from sdpo_jax.errors import UserError


@pytest.fixture
def machine(monkeypatch, tmp_path):
  """Return a machine with these device files and PCI devices, (vendor, class); platforms as JAX_PLATFORMS names
  them.
  """

  def make(files=(), pci=(), platforms=None, plugins=None):
    found = {'/sys/bus/pci/devices/*': [], **{pattern: [] for pattern in accelerators.TPU_FILES}}
    for number, (vendor, kind) in enumerate(pci):
      folder = tmp_path / str(number)
      folder.mkdir()
      (folder / 'vendor').write_text(vendor + '\n')
      (folder / 'class').write_text(kind + '\n')
      found['/sys/bus/pci/devices/*'].append(str(folder))
    for file in files:
      [pattern] = [pattern for pattern in accelerators.TPU_FILES if pathlib.PurePath(file).match(pattern)]
      found[pattern].append(file)
    monkeypatch.setattr(accelerators.glob, 'glob', found.get)
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: 'spec' if plugins == 'package' else None)
    monkeypatch.setattr(importlib.metadata, 'entry_points', lambda group: ['x'] if plugins == 'entry point' else [])
    jax.config.update('jax_platforms', platforms and ','.join(platforms))
    monkeypatch.delenv('JAX_FORCE_TPU_INIT', raising=False)

  before = jax.config.jax_platforms
  yield make
  jax.config.update('jax_platforms', before)


# A network card of Google's is in every machine of its cloud; device files and classes as on v4 and v5e hosts.
@pytest.mark.parametrize(
  'described, cpu',
  [
    ({}, True),
    ({'pci': [('0x1ae0', '0x020000'), ('0x8086', '0x060000')]}, True),
    ({'pci': [('0x1ae0', '0x088000')]}, False),
    ({'files': ['/dev/accel0']}, False),
    ({'files': ['/dev/vfio/3']}, False),
    ({'plugins': 'package'}, False),
    ({'plugins': 'entry point'}, False),
    ({'platforms': ['cuda']}, False),
  ],
)
def test_libtpu_is_left_alone_where_there_is_no_chip(machine, described, cpu):
  machine(**described)
  before = jax.config.jax_platforms
  accelerators.skip_absent_tpu()
  assert jax.config.jax_platforms == ('cpu' if cpu else before) and before != 'cpu'


def test_a_tpu_that_is_asked_for_and_absent_is_said_before_libtpu_is_loaded(machine, monkeypatch):
  monkeypatch.setattr(jax, 'devices', lambda: pytest.fail('JAX was asked'))
  machine(platforms=['tpu', 'cpu'])
  with pytest.raises(UserError, match='^JAX_PLATFORMS=tpu,cpu cannot be used here .there is no TPU on this machine.: '):
    accelerators.devices()


@pytest.mark.parametrize('error, reason', [(AssertionError(), 'no device was found'), (RuntimeError('x\ny'), 'x')])
def test_a_platform_that_jax_does_not_have_is_said(machine, monkeypatch, error, reason):
  def fail():
    raise error

  monkeypatch.setattr(jax, 'devices', fail)
  machine(platforms=['cuda'])
  with pytest.raises(UserError, match=f'^JAX_PLATFORMS=cuda cannot be used here .{reason}.: unset it'):
    accelerators.devices()
