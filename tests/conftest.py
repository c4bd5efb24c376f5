"""Test settings: eight fake CPU devices, strict rank promotion, options for slow tests and real data."""

import os

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('HF_HUB_OFFLINE', '1')

import jax
import pytest

jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_numpy_rank_promotion', 'raise')


def pytest_addoption(parser):
  parser.addoption('--datasets', default=None, help='folder with the real data sets; tests that want them skip without')
  parser.addoption('--slow', action='store_true', help='also run tests marked slow')


def pytest_collection_modifyitems(config, items):
  if config.getoption('--slow'):
    return
  skip = pytest.mark.skip(reason='slow: run with --slow')
  for item in items:
    if item.get_closest_marker('slow'):
      item.add_marker(skip)
