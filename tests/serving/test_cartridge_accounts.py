"""Cartridges of owners: uploaded in any format, read by samples, kept like adapters; what is foreign is refused."""

import dataclasses
import io
import json
import os
import pathlib
import tempfile
import zipfile

import numpy as np
import pytest
import safetensors.numpy

from sdpo_jax.config import ModelConfig, SamplingConfig
from sdpo_jax.inference import generate, runs
from sdpo_jax.models import huggingface
from sdpo_jax.models.adapters import cartridge_files, published_cartridges
from sdpo_jax.models.adapters.cartridge import Cartridge
from sdpo_jax.serving import cartridge_transfer, feedback
from sdpo_jax.serving.account import Account
from sdpo_jax.serving.errors import Forbidden, InvalidRequest, NameTaken, NotFound, VersionConflict
from sdpo_jax.serving.records import FROZEN, KEYS, VALUES
from sdpo_jax.serving.web.archives import unzipped, zipped
from tests.serving.service_world import HELLO, SLOTS, make_config, model_folder, running, sample
from tests.serving.store import s3_store


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  return model_folder(tmp_path_factory.mktemp('world') / 'model')


@pytest.fixture(scope='module')
def service(model, tmp_path_factory):
  config = make_config(model, tmp_path_factory.mktemp('store'))
  config.serve.cartridge_sources = (str(tmp_path_factory.mktemp('allowed')), 's3://bucket/notes/')
  with running(config) as running_service:
    yield running_service


@pytest.fixture
def ada(service, request):
  """Return an owner without adapters."""
  return Account(service, f'ada of {request.node.name}')


def cartridge(service, slots=SLOTS, seed=0, frozen=1, **changes):
  """Return a random cartridge for the model, or for one that differs from it."""
  sizes = dataclasses.replace(service.served.policy.config, **changes)
  draw = np.random.default_rng(seed)
  shape = sizes.layers, sizes.kv_heads, slots, sizes.head_dim
  return Cartridge(*(np.float32(0.5 * draw.standard_normal(shape)) for _ in range(2)), frozen)


def ours(service, folder, own, model=None):
  """Return the files of a cartridge in our format."""
  path = model or service.config.model.path
  origin = cartridge_files.Origin.of(path, huggingface.read_policy(path, ModelConfig()).config)
  cartridge_files.write(folder / 'made', own, origin)
  return {file.name: file.read_bytes() for file in (folder / 'made').iterdir()}


def slots_file(own):
  """Return the .pt file of a cartridge by its name."""
  import torch

  lists = {'trainable_keys': own.keys, 'trainable_values': own.values}
  content = {name: [torch.tensor(layer)[None] for layer in array] for name, array in lists.items()}
  none = [torch.zeros(1, own.kv_heads, 0, own.head_dim)] * own.layers
  content |= dict.fromkeys(('frozen_keys', 'frozen_values'), none)
  file = io.BytesIO()
  torch.save(content, file)
  return {'cartridge.pt': file.getvalue()}


def drawn(account, model, **options):
  [done] = sample(account, model, max_tokens=6, temperature=0.0, **options)
  return done


def test_a_cartridge_of_either_format_says_what_sampling_with_it_says(ada, service, model, tmp_path):
  """As launch.sample has it, to 1e-5; it has versions, an export and a copy as adapters have."""
  own = cartridge(service)
  made, version = ada.import_files('notes', ours(service, tmp_path, own))
  assert made.is_cartridge and version.reason == 'import' and made.settings == {'kind': 'cartridge'}
  found = drawn(ada, 'notes')
  assert found.id == '' and found.adapter is None and found.version is None
  options = generate.GenerationOptions(SamplingConfig(n=1, temperature=0.0), max_tokens=6)
  alone = generate.open_generator(runs.RunOrModel(model=str(model), cartridge=str(tmp_path / 'made')), options)
  prompt, session = service.prompt_of(messages=HELLO), alone.session
  expected = session.sampler.sample(session.base, alone.parameters, [prompt], **alone.sampling_options())
  count = int(expected.completion_mask.sum())
  assert found.tokens == expected.completion_tokens[0, :count].tolist()
  np.testing.assert_allclose(found.log_probs, expected.model_log_probs[0, :count], atol=1e-5)
  for form in ('sdpo_jax', 'published'):
    files = ada.export_files(made.id, 0, form)
    again, _ = ada.import_files(form, unzipped(zipped(files)))
    near = 0.01 if form == 'published' else 0  # Which is in bfloat16.
    for name in (KEYS, VALUES):
      arrays = service.store.arrays(ada.version(again.id))
      np.testing.assert_allclose(arrays[name], getattr(own, name), atol=near)
    assert arrays[FROZEN] == 1
  copy, _ = ada.fork(made.id, 0, 'copy')
  assert drawn(ada, copy.id).tokens == found.tokens
  assert {each.name for each in ada.adapters() if each.is_cartridge} == {'notes', 'sdpo_jax', 'published', 'copy'}


def test_a_request_names_its_model_and_cartridges_by_one_rule(ada, service, tmp_path):
  ada.create('tutor')
  store, adapter = service.store, ada.adapter(ada.resolve('tutor').adapter.id)
  arrays = store.arrays(ada.version(adapter.id))
  arrays = {name: array + np.float32(0.1) for name, array in arrays.items()}
  store.commit(ada.owner, adapter.id, 0, arrays, reason='import', details={})
  for name, seed in (('one', 1), ('two', 2)):
    ada.import_files(name, slots_file(cartridge(service, slots=6, seed=seed)))
  one = ada.resolve('one').cartridges[0].adapter.id
  for said, same in (
    ('base#one', 'one'),
    ('tiny#one', 'one'),
    (f'sdpo://{one}@0', 'one'),
    ('base+tutor@1#one', 'tutor#one'),
    ('tutor#one@0+two', 'tutor#one+two'),
    ('one#two', 'base#one+two'),
  ):
    assert ada.resolve(said) == ada.resolve(same)
    assert ada.resolve(ada.resolve(said).uri) == ada.resolve(said)
  assert ada.resolve('tutor', ['one', 'two']) == ada.resolve('tutor#one+two')
  assert ada.resolve('one', ['two'], 'sequential').composition.positions == 'sequential'
  texts = {name: drawn(ada, name).log_probs.tolist() for name in ('base', 'one', 'tutor', 'tutor#one', 'tutor#one+two')}
  assert len({tuple(each) for each in texts.values()}) == len(texts)
  for wrong, error in (
    ('tutor#tutor', InvalidRequest),
    ('base#base', InvalidRequest),
    ('base#', NotFound),
    ('base#one+', NotFound),
    ('base#' + '+'.join(['one'] * 65), InvalidRequest),
    ('base#three', NotFound),
    ('base#one@7', NotFound),
    ('#one', NotFound),
    ('base++tutor', NotFound),
    (7, NotFound),
  ):
    with pytest.raises(error):
      ada.resolve(wrong)
  eve = Account(service, 'eve')
  with pytest.raises(NotFound):
    eve.resolve(f'base#{one}')


def test_a_new_version_is_read_at_once_and_an_undo_reads_the_old_one(ada, service):
  """Also by prompts whose beginning was kept behind the version before."""
  first, second = (slots_file(cartridge(service, slots=5, seed=seed)) for seed in (1, 2))
  made, _ = ada.import_files('notes', first)
  before = drawn(ada, 'notes')
  assert ada.push(made.id, 0, second).number == 1
  after = drawn(ada, 'notes')
  assert after.log_probs.tolist() != before.log_probs.tolist()
  assert drawn(ada, 'notes@0').log_probs.tolist() == before.log_probs.tolist()
  with pytest.raises(VersionConflict):
    ada.push(made.id, 0, first)
  ada.undo(made.id, None)
  assert drawn(ada, 'notes').log_probs.tolist() == before.log_probs.tolist()
  assert [version.reason for version in ada.versions(made.id)] == ['import', 'import', 'undo']
  ada.change(made.id, None, {'pinned_versions': [1]})
  with pytest.raises(InvalidRequest, match='Cartridges have no setting'):
    ada.change(made.id, None, {'guards': {}})
  with pytest.raises(InvalidRequest, match='no setting'):
    ada.change(ada.create('plain')[0].id, None, {'kind': 'cartridge'})
  for id in (made.id, ada.resolve('plain').adapter.id):
    with pytest.raises(InvalidRequest, match='no setting'):
      ada.change(id, None, {'other': None})
  ada.delete(made.id, None)
  with pytest.raises(NotFound):
    drawn(ada, 'notes')


def test_a_cartridge_only_stands_before_prompts(ada, service):
  made, _ = ada.import_files('notes', slots_file(cartridge(service, slots=4)))
  plain, _ = ada.create('plain')
  for use, said in (
    (lambda: feedback.learn(ada, made.id, None, None), 'does not learn'),
    (lambda: ada.diff(made.id, 0, 0), 'no matrices'),
    (lambda: ada.score(ada.resolve('notes'), [([4], [5])]), 'not scored'),
    (lambda: ada.push(made.id, None, ada.export_files(plain.id)), 'notes is a cartridge'),
    (lambda: ada.push(plain.id, None, ada.export_files(made.id)), 'plain is an adapter'),
  ):
    with pytest.raises(InvalidRequest, match=said):
      use()
  assert ada.adapter(made.id).head == ada.adapter(plain.id).head == 0


def test_what_is_uploaded_is_checked_against_the_model(ada, service, tmp_path):
  """A cartridge of another model, damaged files, and values that no model computes; nothing is made of them."""
  good = ours(service, tmp_path, cartridge(service))

  def tensors(change):
    content = safetensors.numpy.load(good['cartridge.safetensors'])
    change(content)
    return good | {'cartridge.safetensors': safetensors.numpy.save(content)}

  def manifest(**changes):
    values = json.loads(good['cartridge.json'])
    return good | {'cartridge.json': json.dumps(values | changes).encode()}

  def spoiled(kind, value):
    own = cartridge(service, slots=4)
    getattr(own, kind)[1, 0, 2, 3] = value
    return slots_file(own)

  other = model_folder(tmp_path / 'other')
  weights = safetensors.numpy.load_file(other / 'model.safetensors')
  safetensors.numpy.save_file({name: 1.5 * array for name, array in weights.items()}, other / 'model.safetensors')
  (tmp_path / 'apart').mkdir()
  for files, said in (
    (ours(service, tmp_path / 'apart', cartridge(service), str(other)), 'other weights'),
    (tensors(lambda content: content['layers.0.key'].fill(0)), 'is not as it was written'),
    ({'cartridge.json': good['cartridge.json']}, 'cartridge.safetensors'),
    ({'cartridge.safetensors': good['cartridge.safetensors']}, 'cartridge.pt'),
    (good | {'cartridge.safetensors': good['cartridge.safetensors'][:-9]}, 'is not as it was written'),
    (manifest(slots=9), 'its digest differs'),
    (manifest(about={'run': '\ud800'}), 'its digest differs'),
    (good | {'cartridge.json': b'{'}, 'cartridge.json'),
    ({'cartridge.pt': b'PK nothing'}, 'cartridge.pt'),
    ({'cartridge.pt': b''}, 'cartridge.pt'),
    ({'config.yaml': b'a: b'}, 'cartridge.pt'),
    (slots_file(cartridge(service, slots=4, layers=3)), '3 layers'),
    (slots_file(cartridge(service, slots=4, head_dim=6)), 'heads of 6'),
    (slots_file(cartridge(service, slots=SLOTS + 1)), f'{SLOTS + 1} slots'),
    (spoiled('keys', np.nan), 'not finite'),
    (spoiled('values', np.inf), 'not finite'),
    (spoiled('keys', 1e30), 'larger than 65536'),
    (spoiled('values', -1e6), 'larger than 65536'),
  ):
    with pytest.raises(InvalidRequest) as raised:
      ada.import_files('bad', files)
    assert said in str(raised.value) and 'sdpo-import' not in str(raised.value)
  without = dataclasses.replace(service.config, serve=dataclasses.replace(service.settings, cartridges=0))
  with pytest.raises(InvalidRequest, match='serves none: set serve.cartridges'):
    cartridge_transfer.arrays_of(good, without, service.served)
  assert ada.adapters() == []
  with pytest.raises(InvalidRequest, match='notes.txt'):
    unzipped(zip_of({'cartridge.json': b'', 'notes.txt': b''}))
  with pytest.raises(InvalidRequest, match='twice'):
    unzipped(zip_of({'a.pt': b'', 'b.pt': b''}))
  assert unzipped(zip_of({'made/cache-step7.pt': b'1'})) == {'cartridge.pt': b'1'}
  ada.import_files('good', good)
  with pytest.raises(NameTaken):
    ada.import_files('good', good)


def zip_of(files):
  content = io.BytesIO()
  with zipfile.ZipFile(content, 'w') as archive:
    for name, body in files.items():
      archive.writestr(name, body)
  return content.getvalue()


@pytest.mark.parametrize('spelling', ['fixed', 'frozen'])
def test_what_publishers_have_written_is_read_from_buckets_the_hub_and_uploads(ada, service, monkeypatch, spelling):
  """In both spellings, and a bucket as it is now: a cartridge that has been replaced there is not the one before."""

  def slots(name):
    version = ada.version(ada.resolve(name).cartridges[0].adapter.id)
    return {kind: service.store.arrays(version)[kind] for kind in (KEYS, VALUES, FROZEN)}

  def made(folder, seed):
    own = cartridge(service, seed=seed, frozen=3)
    published_cartridges.write(folder, own, 'tiny', spelling, 'float32')
    return own, {file.name: file.read_bytes() for file in folder.iterdir()}

  monkeypatch.setattr(service.settings, 'cartridge_sources', ('s3://bucket/notes', 'hub'))
  with s3_store.S3() as bucket, tempfile.TemporaryDirectory() as folder:
    monkeypatch.setenv('AWS_ENDPOINT_URL', bucket.options['endpoint'])
    for name, value in {'AWS_ALLOW_HTTP': 'true', 'AWS_SKIP_SIGNATURE': 'true', 'AWS_REGION': 'none'}.items():
      monkeypatch.setenv(name, value)
    for seed in (1, 2):
      own, files = made(pathlib.Path(folder, str(seed)), seed)
      bucket.objects |= {
        'notes/7/cache-step7.pt': files['cartridge.pt'],
        'notes/7/config.yaml': files['config.yaml'],
        'notes/7/more/cartridge.pt': b'',
        'notes/7/README.md': b'',
      }
      ada.create(f'kept{seed}', source='s3://bucket/notes/7')
      ada.import_files(f'sent{seed}', unzipped(zip_of({'cache-step7.pt': files['cartridge.pt']})))
      monkeypatch.setattr('huggingface_hub.snapshot_download', lambda name, **options: str(pathlib.Path(folder, '1')))
      for name in (f'kept{seed}', f'sent{seed}'):
        found = slots(name)
        np.testing.assert_array_equal(found[KEYS], own.keys)
        np.testing.assert_array_equal(found[VALUES], own.values)
        assert found[FROZEN] == 3
    with pytest.raises(InvalidRequest, match='or a single .pt file, but holds none'):
      ada.create('other', source='s3://bucket/notes/8')
    ada.create('named', source='hazyresearch/cartridge-wauoq23f')
    np.testing.assert_array_equal(slots('named')[KEYS], slots('kept1')[KEYS])


def test_only_places_that_the_operator_allows_are_read(ada, service, tmp_path):
  [folder, _] = service.settings.cartridge_sources
  cartridge_files.write(
    f'{folder}/deep/notes',
    cartridge(service),
    cartridge_files.Origin.of(service.config.model.path, service.served.policy.config),
  )
  made, version = ada.create('notes', source=f'{folder}/deep/notes')
  assert made.is_cartridge and version.details == {'source': f'{folder}/deep/notes'}
  assert drawn(ada, 'notes').text is not None
  outside = tmp_path / 'outside'
  published_cartridges.write(outside, cartridge(service), 'tiny')
  os.symlink(outside, f'{folder}/link')
  for source in (
    str(outside),
    f'{folder}/link',
    f'{folder}/../{outside.name}',
    f'{folder}x/notes',
    f'{folder}/deep/notes,{outside}',
    'deep/notes',
    's3://bucket/other',
    's3://bucket/notes/../other',
    's3://bucket/notes2',
    'gs://bucket/notes',
    'someone/cartridge',
    'hub',
    '',
    f'{folder}/deep\0',
    f'{folder}/.. ',
    f'{folder}/link ',
    f'{folder}/link/x://notes',
    's3://bucket/notes/..\n',
  ):
    with pytest.raises(Forbidden, match='serve.cartridge_sources'):
      ada.create('other', source=source)
  assert cartridge_transfer.is_allowed('s3://bucket/notes/7', service.settings.cartridge_sources)
  assert cartridge_transfer.is_allowed('someone/cartridge', ('hub',))
  assert not cartridge_transfer.is_allowed('someone/../../etc', ('hub',))
  with pytest.raises(InvalidRequest, match='no cartridge'):
    ada.create('other', source=f'{folder}/deep')
