"""The start of an engine: every program is there before the first request, and a second start compiles none."""

import dataclasses
import errno
import hashlib
import json
import os
import pathlib
import pickle
import time

import jax
import numpy as np
import pytest

from sdpo_jax.config import MeshConfig
from sdpo_jax.distributed.mesh import make_mesh, parameter_sharding
from sdpo_jax.distributed.programs import noted_compilations
from sdpo_jax.errors import UserError
from sdpo_jax.files import write_atomically
from sdpo_jax.learning.losses import Sdpo
from sdpo_jax.learning.requests import Lesson, UpdateOptions
from sdpo_jax.models import huggingface, parameters
from sdpo_jax.objective.jsd_pg import JsdPg
from sdpo_jax.serving import program_folder
from sdpo_jax.serving.engine import Engine, Feedback
from sdpo_jax.serving.program_folder import HOUR, INDEX, KEPT, PROGRAM, ProgramFolder
from sdpo_jax.serving.records import BASE, Composition
from tests import tiers
from tests.compiling import without_cache
from tests.letters import CONFIG, TOKENIZER
from tests.serving.engines import SETTINGS, cartridge, make_model, random_factors

LENGTHS = dataclasses.replace(
  SETTINGS, prompt_buckets=(4, 8), teacher_buckets=(6, 16), response_buckets=(4, 8), score_buckets=(12, 24)
)


@pytest.fixture(scope='module')
def model():
  return make_model()


def make_engine(model, folder, settings=SETTINGS, **more):
  policy, base = model
  return Engine(policy, base, TOKENIZER, settings, folder, stop_token_ids=(30,), **more)


def every_request(engine, policy, models=()):
  """All kinds of requests, in every bucket; returns what came of them."""
  settings, found = engine.settings, []
  engine.create('new@0', seed=1)
  engine.put('put@0', random_factors(policy, 0))
  for width in settings.prompt_buckets:
    for version, n in (('put@0', 3), ('new@0', 1), (BASE, 5), ('put@0', 1)):
      options = dict(n=n, seed=2, step=0, max_tokens=settings.response_buckets[-1])
      handle = engine.submit(version, [3] * width, owner='ada', **options)
      while engine.turn():
        pass
      found += [done.tokens for done in handle.result()]
    if settings.cartridges:
      engine.restore(f'note {width}@0', cartridge(3, width))
      for version, own in (('put@0', None), ('put@0', f'note {width}@0'), (BASE, f'note {width}@0')):
        read = own and Composition((own,))
        handle = engine.submit(version, [3] * width, cartridge=read, n=1, seed=2, step=0, max_tokens=4)
        while engine.turn():
          pass
        found += [handle.result()[0].tokens]
  for length in settings.score_buckets:
    for version in ('put@0', BASE):
      for scored in engine.score(version, [([3], [4] * length)] * 3, ids=[np.ones((length, 11), np.int32)] * 3):
        found += [scored.log_probs, scored.of_ids]
  number = 0
  for response in settings.response_buckets:
    rows = [([4] * length, [5] * response) for length in (*settings.teacher_buckets, 1)]
    for version in ('put@0', BASE):
      for scored in engine.score(version, rows, topk=3, ids=[np.ones((response, 11), np.int32)] * len(rows)):
        found += [scored.log_probs, scored.of_ids]
    for prompt in settings.prompt_buckets:
      for teacher in settings.teacher_buckets:
        lessons = [Lesson([3] * prompt, [5 + row] * response, [6] * teacher) for row in range(3)]
        kinds = 'live', 'average', 'base', *(f'model:{name}' for name in models)
        loss, kind = (Sdpo(topk=4), JsdPg(), Sdpo(topk=8))[number % 3], kinds[number % len(kinds)]
        version, new = f'put@{number}', f'put@{number + 1}'
        request = Feedback(version, new, lessons, UpdateOptions(loss, steps=2), kind)
        other = Feedback('new@0', f'other@{number}', lessons[:1], UpdateOptions(loss), 'version:put@0')
        found += [said.log_probs_after for came in engine.learn([request, other]) for said in came.said]
        found += jax.tree.leaves(engine.factors(new))
        number += 1
  engine.forget('new@0')
  assert bool(engine.counts['reused']) == bool(settings.kept_prefixes)
  return found


@pytest.mark.parametrize(
  'settings',
  [
    dataclasses.replace(SETTINGS, score_buckets=(16,), kept_prefixes=3, cartridges=2, cartridge_slots=4),
    pytest.param(LENGTHS, marks=pytest.mark.slow),
  ],
)
def test_no_request_compiles_anything_and_neither_does_a_second_start(model, tmp_path, settings):
  jax.clear_caches()  # A program of this process that was kept once, for other lengths, cannot be kept again.
  lines, more = [], {'programs': tmp_path / 'programs'}
  if settings is LENGTHS:
    more['models'] = {'larger': huggingface.init(CONFIG | dict(vocab_size=48), jax.random.key(5))}
  with noted_compilations() as noted:
    engine = make_engine(model, tmp_path / 'a', settings, **more)
    engine.compile(lines.append)
    assert (engine.counts['prefilled'], engine.counts['reused']) == (0, 0)
    more_lines = [line for line in lines if 'cached on the devices' in line]
    made = len(lines) - 2 - len(more_lines)  # Beside the first and the last line.
    assert len(noted()) == made
    found = every_request(engine, model[0], more.get('models', ()))
    assert noted() == []
  held = settings.kept_prefixes * (8 * 2 * 2 * 16 * 4 + 4)  # Tokens, keys and values, heads, numbers of a head, bytes.
  assert engine._resident.kept_bytes == held  # noqa: SLF001 (The line has whole MiB.)
  assert len(more_lines) == bool(held)
  assert lines[-1].startswith(f'  {made} compiled and 0 read in ') and len(set(lines)) == len(lines)
  assert (tmp_path / 'programs').stat().st_mode & 0o777 == 0o700
  assert len(list((tmp_path / 'programs').glob(f'*{PROGRAM}'))) == made
  lines = []
  with noted_compilations() as noted:
    again = make_engine(model, tmp_path / 'b', settings, **more)
    again.compile(lines.append)
    assert lines[-1].startswith(f'  0 compiled and {made} read in ')
    other = every_request(again, model[0], more.get('models', ()))
    assert noted() == []
  for one, two in zip(found, other, strict=True):
    np.testing.assert_array_equal(one, two)


@pytest.fixture
def folder(tmp_path):
  """Return a folder with two programs of one key, as a function opens it."""

  def opened(key='one'):
    return ProgramFolder(tmp_path / 'programs', {'key': key}, jax.devices()[:1])

  made = opened()
  for factor in (2, 3):
    made.put(f'times {factor}', compiled(factor))
  made.save()
  return opened


def compiled(factor):
  with without_cache():
    return jax.jit(lambda x: {'y': factor * x}).lower(np.zeros(3, np.float32)).compile()


def run(folder, name):
  x = np.arange(3, dtype=np.float32)
  program = folder.get(name, jax.tree.structure(((x,), {})))
  return None if program is None else np.asarray(program(x)['y']).tolist()


def test_what_is_damaged_or_of_another_engine_is_not_run(folder, tmp_path, caplog):
  assert run(folder(), 'times 2') == [0, 2, 4] and run(folder(), 'times 3') == [0, 3, 6]
  assert run(folder(), 'times 4') is None and run(folder('two'), 'times 2') is None
  assert not caplog.records
  programs = sorted((tmp_path / 'programs').glob(f'*{PROGRAM}'))
  [index] = (tmp_path / 'programs').glob(f'*{INDEX}')
  assert all(path.stat().st_mode & 0o777 == 0o600 for path in (index, *programs))
  whole, executed = [path.read_bytes() for path in programs], tmp_path / 'executed'

  def planted():
    return pickle.dumps(Planted(executed))

  for harm in (
    lambda path: path.write_bytes(planted()),
    lambda path: path.write_bytes(path.read_bytes()[:-1]),
    lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
    lambda path: path.write_bytes(b''),
    lambda path: path.chmod(0o620),
    lambda path: (path.unlink(), path.symlink_to(index)),
    lambda path: (path.unlink(), os.mkfifo(path)),
  ):
    for path in programs:
      harm(path)
    caplog.clear()
    assert [run(folder(), f'times {factor}') for factor in (2, 3)] == [None, None]
    assert len(caplog.records) >= 2 and not executed.exists()
    for path, content in zip(programs, whole, strict=True):
      path.unlink()
      write_atomically(path, content, mode=0o600)
  assert run(folder(), 'times 2') == [0, 2, 4]
  for text in ('{', '[]', '{"times 2": 1}', '{"times 2": "../x"}'):
    index.write_text(text)
    assert run(folder(), 'times 2') is None
  pickle.loads(planted())
  assert executed.exists()  # It would have been seen.


class Planted:
  """Makes a file where it is unpickled."""

  def __init__(self, path):
    self.path = path

  def __reduce__(self):
    return pathlib.Path.touch, (self.path,)


def test_a_program_that_the_runtime_refuses_is_compiled_anew(folder, tmp_path, caplog):
  """As of a file whose digest is entered, and whose content JAX does not take."""
  [index] = (tmp_path / 'programs').glob(f'*{INDEX}')
  content = pickle.dumps((b'no executable', {'y': 0}))
  digest = hashlib.sha256(content).hexdigest()
  write_atomically(tmp_path / 'programs' / (digest + PROGRAM), content, mode=0o600)
  index.write_text(json.dumps({'times 2': digest}))
  assert run(folder(), 'times 2') is None and 'compiled again' in caplog.text


@pytest.mark.parametrize(
  'harm, said',
  [
    (lambda path: path.chmod(0o770), 'can be written to by others (mode 0770)'),
    (lambda path: path.chmod(0o702), 'can be written to by others (mode 0702)'),
    (lambda path: (path.rename(path.with_name('other')), path.symlink_to('other')), 'not a link'),
    (lambda path: (path.rename(path.with_name('other')), path.write_text('')), 'name a folder of your own'),
  ],
)
def test_a_folder_to_which_others_can_write_is_refused(folder, tmp_path, harm, said):
  harm(tmp_path / 'programs')
  with pytest.raises(UserError) as error:
    folder()
  assert said in str(error.value) and str(error.value).count('\n') == 0


def test_a_folder_of_another_user_or_of_an_object_store_is_refused(folder, tmp_path, monkeypatch):
  monkeypatch.setattr(os, 'geteuid', lambda: os.getuid() + 1)
  with pytest.raises(UserError, match='belongs to the user'):
    folder()
  with pytest.raises(UserError, match='name a local folder'):
    ProgramFolder('gs://bucket/programs', {}, jax.devices()[:1])


def test_programs_of_engines_that_are_gone_go(folder, tmp_path):
  killed, writing = (tmp_path / 'programs' / f'.{digit * 16}.partial' for digit in 'ab')
  for path, ago in ((killed, 2 * HOUR), (writing, HOUR / 2)):
    path.touch()
    os.utime(path, (time.time() - ago,) * 2)
  for number in range(KEPT + 1):
    own = folder(str(number))
    own.put('times 2', compiled(2 + number))
    for path in (tmp_path / 'programs').glob(f'*{PROGRAM}'):
      os.utime(path, (number, number))
    own.save()
    index = max((tmp_path / 'programs').glob(f'*{INDEX}'), key=lambda path: path.stat().st_mtime)
    os.utime(index, (number, number))
  assert run(folder(str(KEPT)), 'times 2') == [0, 2 + KEPT, 2 * (2 + KEPT)]
  indices, programs = ([*(tmp_path / 'programs').glob(f'*{end}')] for end in (INDEX, PROGRAM))
  entered = {digest for index in indices for digest in json.loads(index.read_text()).values()}
  assert len(indices) == KEPT and {path.name.removesuffix(PROGRAM) for path in programs} == entered
  assert writing.exists() and not killed.exists()


def test_two_processes_may_fill_a_folder_at_once_and_a_full_disk_is_no_error(folder, monkeypatch, caplog):
  one, other = folder('new'), folder('new')
  for own in (one, other):
    own.put('times 5', compiled(5))
  other.save()
  one.save()
  assert run(folder('new'), 'times 5') == [0, 5, 10] and not caplog.records

  def full(*_, **__):
    raise OSError(errno.ENOSPC, 'No space left on device')

  monkeypatch.setattr(program_folder, 'write_atomically', full)
  own = folder('full')
  own.put('times 5', compiled(5))
  own.save()
  assert 'No space left' in caplog.text and run(folder('full'), 'times 5') is None


def test_programs_that_do_not_fit_are_said_by_the_settings_to_change(model, tmp_path, monkeypatch):
  engine = make_engine(model, tmp_path / 'shelf')

  def exhausted(*_, **__):
    raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: out of memory')

  monkeypatch.setattr(jax.stages.Lowered, 'compile', exhausted)
  with pytest.raises(UserError, match='lower rows, training_rows'):
    engine.compile(lambda line: None)


def on_mesh(policy, base, fsdp, tensor):
  mesh = make_mesh(MeshConfig(fsdp=fsdp, tensor=tensor), jax.devices()[: fsdp * tensor])
  placed = parameters.map_table(
    lambda row: jax.device_put(parameters.get(base, row.path), parameter_sharding(mesh, row.axes, row.shape)),
    parameters.frozen(policy.parameter_table()),
  )
  return policy.on(mesh), placed


@pytest.mark.slow
def test_a_mesh_divides_pools_and_scores_as_one_device(model, tmp_path):
  policy, base = on_mesh(*model, 4, 2)
  settings = dataclasses.replace(SETTINGS, training_rows=8)
  for wrong, said in (
    (dict(rows=6), 'rows=6 must be a multiple of 4'),
    (dict(training_rows=4), 'training_rows=4 must be a multiple of 8'),
  ):
    with pytest.raises(UserError, match=said):
      make_engine((policy, base), tmp_path / 'none', dataclasses.replace(settings, **wrong))
  divided, whole = (make_engine(each, tmp_path / str(at), settings) for at, each in enumerate(((policy, base), model)))
  for row in parameters.trainable(policy.parameter_table()):
    pool = divided._snapshots.factors  # noqa: SLF001 (Where versions lie changes no result.)
    spec = parameters.get(pool, row.path).sharding.spec
    expected = ['tensor' if axis in ('heads', 'kv_heads', 'mlp') else None for axis in row.axes]
    assert list(spec) == [expected[0], None, *expected[1:]]  # Behind the layers: the versions.
  rows = [([4] * length, [5, 6, 7]) for length in (3, 7)]
  for engine in (divided, whole):
    engine.put('a@0', random_factors(model[0], 1))
  for one, other in zip(divided.score('a@0', rows, topk=4), whole.score('a@0', rows, topk=4), strict=True):
    np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-5)
    np.testing.assert_array_equal(one.top_ids, other.top_ids)


@pytest.mark.parametrize('fsdp, tensor', tiers.cases([(2, 1), (4, 2)], slow=[(4, 2)]))
def test_an_engine_on_a_mesh_does_what_one_device_does(model, tmp_path, fsdp, tensor):
  more = dict(cartridges=2, cartridge_slots=4)
  settings = dataclasses.replace(SETTINGS, training_rows=fsdp * tensor, rows=2 * fsdp, **more)
  divided, whole = (
    make_engine(each, tmp_path / str(number), settings)
    for number, each in enumerate((on_mesh(*model, fsdp, tensor), model))
  )
  divided.compile(lambda line: None)
  with noted_compilations() as noted:
    found = every_request(divided, model[0])
    assert noted() == []
  for mine, theirs in zip(found, every_request(whole, model[0]), strict=True):
    np.testing.assert_allclose(np.float64(mine), np.float64(theirs), atol=2e-4)
