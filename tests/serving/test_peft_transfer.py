"""Adapters that users bring: what PEFT wrote is read to the bit, and everything else is refused before it costs
anything.
"""

import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
import numpy as np
import pytest
import safetensors.numpy

from sdpo_jax.config import LoraConfig, ModelConfig
from sdpo_jax.models import huggingface, parameters
from sdpo_jax.models.adapters import peft_files
from sdpo_jax.serving.errors import InvalidRequest, ServiceError, TooLarge
from sdpo_jax.serving.peft_transfer import LARGEST_CONFIG, LARGEST_HEADER, Served
from tests.letters import CONFIG

CONFIG_FILE, WEIGHTS, BASE = 'adapter_config.json', 'adapter_model.safetensors', 'base_fingerprint.json'
FINGERPRINT = {'tensors': '3', 'values': 'abc'}


def served(**lora):
  config = ModelConfig(dtype='float32', lora=LoraConfig(**{'rank': 2, 'alpha': 4.0, **lora}))
  return Served(huggingface.describe(CONFIG, config), FINGERPRINT)


def written(folder, shape, seed=0):
  """Return the files of an adapter with random factors, and the factors."""
  draw, policy = np.random.default_rng(seed), shape.policy
  tree = parameters.map_table(
    lambda row: np.float32(draw.standard_normal(row.shape)), parameters.trainable(policy.parameter_table())
  )
  peft_files.save(
    folder / 'adapter',
    peft_files.AdapterBase('b', {'weights': FINGERPRINT}, shape.adapter, shape.table),
    tree,
  )
  files = {name: (folder / 'adapter' / name).read_bytes() for name in (CONFIG_FILE, WEIGHTS, BASE)}
  return files, {row.name: parameters.get(tree, row.path) for row in parameters.trainable(policy.parameter_table())}


@pytest.fixture(scope='module')
def files(tmp_path_factory):
  return written(tmp_path_factory.mktemp('import'), served())


def changed(files, **entries):
  return files | {CONFIG_FILE: json.dumps(json.loads(files[CONFIG_FILE]) | entries).encode()}


def test_factors_come_as_they_were_written(files):
  content, factors = files
  found = served().factors(content)
  assert found.keys() == factors.keys()
  for name, value in found.items():
    np.testing.assert_array_equal(value, factors[name])
  without = {name: content[name] for name in (CONFIG_FILE, WEIGHTS)}
  assert served().factors(without).keys() == factors.keys()


@pytest.mark.parametrize(
  'lora, why',
  [
    ({'rank': 3}, 'rank 3 and lora_alpha 4'),
    ({'alpha': 5.0}, 'rank 2 and lora_alpha 5'),
    ({'target_modules': ('attention',)}, 'o_proj'),
  ],
)
def test_an_adapter_of_another_shape_is_refused_and_told_what_is_served(files, lora, why):
  with pytest.raises(ServiceError) as raised:
    served(**lora).factors(files[0])
  assert why in str(raised.value) and raised.value.field == 'files'


def test_an_adapter_of_another_model_is_refused(files):
  other = files[0] | {BASE: json.dumps({'format': 1, 'weights': {'values': 'xyz'}}).encode()}
  with pytest.raises(InvalidRequest, match='other weights'):
    served().factors(other)


def tensors(files, change):
  arrays = safetensors.numpy.load(files[WEIGHTS])
  change(arrays)
  return files | {WEIGHTS: safetensors.numpy.save(arrays)}


def first(arrays):
  return sorted(arrays)[0]


@pytest.mark.parametrize(
  'change, why',
  [
    (lambda arrays: arrays.update({first(arrays): np.full_like(arrays[first(arrays)], np.nan)}), 'not finite'),
    (
      lambda arrays: arrays.update({first(arrays): np.full_like(arrays[first(arrays)], 1e38)}),
      'a value of 1e\\+30 or more',
    ),
    (lambda arrays: arrays.update({first(arrays): arrays[first(arrays)].T.copy()}), 'shape'),
    (lambda arrays: arrays.pop(first(arrays)), 'missing'),
    (lambda arrays: arrays.update({f'{first(arrays)}2': arrays.pop(first(arrays))}), 'missing'),
    (lambda arrays: arrays.update({first(arrays): arrays[first(arrays)].astype(np.int32)}), 'stored as I32'),
  ],
)
def test_tensors_must_be_those_of_the_shape_and_finite(files, change, why):
  with pytest.raises(InvalidRequest, match=why) as raised:
    served().factors(tensors(files[0], change))
  assert 'sdpo-import' not in str(raised.value) and '/tmp' not in str(raised.value)


@pytest.mark.parametrize(
  'content, error, why',
  [
    ({}, InvalidRequest, 'The file adapter_config.json is missing'),
    ({CONFIG_FILE: b'{}'}, InvalidRequest, 'The file adapter_model.safetensors is missing'),
    ({CONFIG_FILE: b'{}', WEIGHTS: b''}, InvalidRequest, 'peft_type is missing'),
    ({CONFIG_FILE: b'[' * 10_000, WEIGHTS: b''}, InvalidRequest, 'adapter_config.json'),
    ({CONFIG_FILE: b' ' * (LARGEST_CONFIG + 1), WEIGHTS: b''}, TooLarge, 'bytes'),
    ({WEIGHTS: (LARGEST_HEADER + 1).to_bytes(8, 'little')}, InvalidRequest, 'header'),
    ({WEIGHTS: b'\0' * 10**6}, TooLarge, 'at most'),
    ({WEIGHTS: b'\x10' + b'\0' * 7 + b'{"a": '}, InvalidRequest, 'safetensors'),
    ({WEIGHTS: b'pickle'}, InvalidRequest, 'safetensors'),
  ],
)
def test_what_is_no_adapter_is_refused_in_a_sentence(files, content, error, why):
  content = content if CONFIG_FILE in content or not content else {CONFIG_FILE: files[0][CONFIG_FILE], **content}
  with pytest.raises(error, match=why):
    served().factors(content)


@pytest.mark.parametrize(
  'entries', [{'target_modules': '(a+)+$'}, {'rank_pattern': {'(.*)*x': 3}}, {'layers_pattern': ['(a|a)*']}]
)
def test_an_expression_that_could_run_for_years_is_not_compiled(files, entries):
  with pytest.raises(InvalidRequest, match='repetitions'):
    served().factors(changed(files[0], **entries))


def test_a_pickle_is_not_read(files):
  content = {CONFIG_FILE: files[0][CONFIG_FILE], 'adapter_model.bin': b'cos\nsystem\n'}
  with pytest.raises(InvalidRequest, match='The file adapter_model.safetensors is missing'):
    served().factors(content)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_bytes_come_they_are_an_adapter_or_refused(files, data):
  content, factors = files
  name = data.draw(st.sampled_from([CONFIG_FILE, WEIGHTS, BASE]))
  changed_bytes = bytearray(content[name])
  # Of the weights, the header above all.
  places = st.integers(0, min(len(changed_bytes), 3000) - 1)
  for place, value in data.draw(st.lists(st.tuples(places, st.integers(0, 255)), min_size=1, max_size=8)):
    changed_bytes[place] = value
  cut = data.draw(st.integers(0, len(changed_bytes)) | st.none())
  try:
    found = served().factors(content | {name: bytes(changed_bytes[:cut])})
  except ServiceError as error:
    assert str(error).endswith(('.', '!')) and '/tmp' not in str(error)
  else:
    assert {key: value.shape for key, value in found.items()} == {key: value.shape for key, value in factors.items()}
    assert all(np.isfinite(value).all() for value in found.values())
