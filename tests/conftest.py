"""Test settings: quick compilation, eight fake CPU devices, strict rank promotion, slow tests, real data."""

from collections.abc import Iterator
import contextlib
import ctypes
import gc
import importlib.util
import math
import os
import pathlib
import shutil
import subprocess

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('HF_HUB_OFFLINE', '1')
os.environ.setdefault('OPENBLAS_NUM_THREADS', '1')  # Its threads spin for 0.2 seconds in each process that starts.

from etils.epath import backend
from fsspec.implementations.local import LocalFileSystem
import hypothesis
import jax
import pytest

from sdpo_jax.environments import registry
from sdpo_jax.models import first_reading, remote_files
from tests import compiling, file_operations, model_reading

gc.disable()  # Until everything is collected: what is imported stays, and to look for garbage in it takes seconds.
made = compiling.prepare()
jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_numpy_rank_promotion', 'raise')

first_reading.ask = model_reading.in_this_process  # Commands that tests start have a process for it.

# The same examples in every run, on machines of any speed; `--hypothesis-profile=default` looks for new ones.
hypothesis.settings.register_profile(
  'repeatable', derandomize=True, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile('repeatable')

TESTS = pathlib.Path(__file__).parent
# Whole files go to a worker, in this order and then by name: with the longest first the workers end together.
LONGEST = """
  docs/test_blocks.py docs/test_pages_of_systems.py training/test_resume.py planner/test_plan.py
  models/attention/test_tpu.py training/test_durability.py
  training/test_cartridge_updates.py objective/test_golden.py examples/test_examples.py
  models/families/test_families.py training/test_base_once.py training/test_reference_policies.py planner/test_engine.py
  training/test_cartridge_processes.py training/test_startup.py serving/test_engine_start.py teacher/test_kinds.py
  rollout/test_engine.py training/checkpoint/test_checkpoints.py training/test_endings.py launch/test_commands.py
  evaluation/test_alarms.py teacher/test_lora_teachers.py models/test_policy.py training/test_step_meshes.py
  serving/web/test_server.py models/adapters/test_kv_prefix.py training/test_cartridge_runs.py
  models/attention/test_backends.py configs/test_paper.py models/attention/test_divided_prefix.py
  objective/test_sharded.py training/test_step.py inference/test_sample.py launch/test_package.py
  environments/sandbox/test_attacks.py serving/sessions/test_killed.py serving/test_account.py
  learning/test_learner.py benchmarks/test_rollout.py rollout/test_kept_prefixes.py objective/test_loss.py
  rollout/test_independence.py training/test_endpoint_teacher.py serving/test_worker.py
  models/adapters/test_lora_cost.py models/attention/test_divided_prefix_tpu.py rollout/test_sampling.py
  models/adapters/test_peft.py models/adapters/test_lora_pool_tpu.py serving/sessions/test_crash.py
  training/test_schedule.py serving/test_engine.py rollout/test_decode.py models/test_decoder.py
  models/test_huggingface.py objective/test_memory.py learning/test_optimizer.py models/adapters/test_lora_pool.py
  environments/test_code.py objective/test_terms.py quickstart/test_make_base.py house/test_interface.py
  distributed/test_cluster.py serving/store/test_crash.py quickstart/test_session_base.py
  quickstart/test_document_base.py training/test_skipped.py models/attention/test_prefix.py rollout/test_base.py
  environments/sandbox/test_sandbox.py data/test_pipeline.py inference/test_probe.py training/test_adapter_runs.py
  launch/test_tpu_slice.py environments/test_rules.py training/test_sampled_by.py serving/web/test_console.py
  models/test_exporting.py training/test_programs.py training/test_divergence.py inference/test_synthesis.py
  environments/test_user_environment.py learning/test_training_pool.py
""".split()
# Bytes that a process may keep: three workers share the machine, or a container in it, with what they start.
MEMORY = min(5 * 2**30, os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') // 5)


def pytest_addoption(parser):
  parser.addoption('--datasets', default=None, help='folder with the real data sets; tests that want them skip without')
  parser.addoption('--slow', action='store_true', help='also run tests marked slow')
  parser.addoption('--docs', action='store_true', help='also run the code of the pages, marked docs')
  parser.addoption('--campaigns', action='store_true', help='also run tests marked campaign')


def pytest_configure(config):
  config.pluginmanager.register(compiling.plugin())
  if config.getoption('numprocesses', None):  # Its workers collect, and it does not.
    gc.enable()
  if made is not None:
    config.add_cleanup(lambda: shutil.rmtree(made, ignore_errors=True))


def pytest_collection_modifyitems(config, items):
  place = {TESTS / path: index for index, path in enumerate(LONGEST)}
  items.sort(key=lambda item: place.get(item.path, len(place)))
  slow = not config.getoption('--slow') and pytest.mark.skip(reason='slow: run with --slow')
  campaign = not config.getoption('--campaigns') and pytest.mark.skip(reason='campaign: run with --campaigns')
  docs = not config.getoption('--docs') and pytest.mark.skip(reason='docs: run with --docs')
  tpu = importlib.util.find_spec('libtpu') is None and pytest.mark.skip(reason='libtpu is not installed')
  for item in items:
    for name, skip in (('slow', slow), ('docs', docs), ('campaign', campaign), ('tpu_compiler', tpu)):
      if skip and item.get_closest_marker(name):
        item.add_marker(skip)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
  if item.get_closest_marker('tpu_compiler') is None:
    return (yield)
  with compiling.without_cache():
    return (yield)


def pytest_collection_finish():
  """Keep what is imported to the end: without it a collection of garbage takes no time, with it half a second."""
  gc.collect()
  gc.freeze()
  gc.set_threshold(20_000, 20, 50)  # Tracing makes many objects, and little garbage.
  gc.enable()


def resident_bytes() -> float:
  """Return the memory of this process; endless where the system does not say."""
  try:
    return int(pathlib.Path('/proc/self/statm').read_text().split()[1]) * os.sysconf('SC_PAGE_SIZE')
  except OSError:
    return math.inf


def return_memory() -> None:
  """Give the system back what is free, where the C library can: it keeps gigabytes between what is still in use."""
  with contextlib.suppress(OSError, AttributeError):
    ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(scope='module', autouse=True)
def free_memory():
  """Drop compiled programs at the end of a file once they take much memory: a process that keeps all grows to 7 GB.

  Until then the collector looks only at objects of this file: those of compiled programs number millions.
  """
  yield
  if resident_bytes() > MEMORY:
    gc.unfreeze()
    jax.clear_caches()
    gc.collect()
    return_memory()
  gc.freeze()


@contextlib.contextmanager
def forgetting() -> Iterator[None]:
  """Take away after the block what was registered in it: in a run, names stay, so nothing public removes them."""
  tables = {'environment': registry._FACTORIES, 'generator': registry._GENERATORS}  # noqa: SLF001
  known = {kind: table.keys() | registry._BUILT_IN[kind].keys() for kind, table in tables.items()}  # noqa: SLF001
  yield
  for kind, table in tables.items():
    for name in table.keys() - known[kind]:
      del table[name]


@pytest.fixture(scope='module', autouse=True)
def forget_names():
  """Remove what a file's tests registered when they are done; experiments of two files register the same names."""
  with forgetting():
    yield


@pytest.fixture
def registering():
  """Return the registry of graders and generators; what a test registers in it goes when the test is done."""
  with forgetting():
    yield registry


@pytest.fixture
def bucket(tmp_path, monkeypatch) -> Iterator[pathlib.Path]:
  """Return the folder that stands for gs://here; copies go to tmp_path/copies."""
  root = tmp_path / 'store'
  (root / 'models').mkdir(parents=True)

  class Store(LocalFileSystem):
    @classmethod
    def _strip_protocol(cls, path):
      return super()._strip_protocol(str(path).replace('gs://here', str(root)))

  monkeypatch.setattr(backend.fsspec_backend, 'fs', lambda path: Store(skip_instance_cache=True))
  monkeypatch.setenv(remote_files.FOLDER, str(tmp_path / 'copies'))
  remote_files.fetch.cache_clear()
  yield root
  remote_files.fetch.cache_clear()


@pytest.fixture(scope='session')
def recorder(tmp_path_factory) -> file_operations.Recorder:
  """Return the recorder of file operations, where there is a compiler for it."""
  try:
    return file_operations.Recorder(tmp_path_factory.mktemp('recorder'))
  except (OSError, subprocess.CalledProcessError) as error:
    pytest.skip(f'the recorder of file operations cannot be compiled: {error}')
