"""Several cartridges as one: against the published cache with concatenated slots, and the texts one after the other."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from sdpo_jax.config import ModelConfig
from sdpo_jax.errors import UserError
from sdpo_jax.models import huggingface
from sdpo_jax.models.adapters import cartridge_files, kv_prefix, named_cartridges
from sdpo_jax.models.adapters.cartridge import Cartridge
from sdpo_jax.models.adapters.composition import composed, turned
from tests import tiers, tiny
from tests.models.adapters.prefixed_models import logits, model, rows, with_prefix
from tests.models.family_models import MODELS, MORE, VOCABULARY

TEXTS = [np.random.default_rng(seed).integers(1, VOCABULARY, size).tolist() for seed, size in ((1, 9), (2, 14), (3, 5))]


def read(policy, params, texts, frozen=1):
  return [Cartridge(*map(np.asarray, kv_prefix.read_text(policy, params, text)), frozen) for text in texts]


@pytest.mark.parametrize('name', tiers.cases((*MODELS, *MORE), default=('gemma3',), slow=('qwen3', 'llama')))
def test_turned_keys_are_those_of_later_positions(name):
  """In every layer by its own frequencies; the first layer's keys depend on nothing but token and position."""
  policy, params = model(name)
  text = TEXTS[1]
  [behind] = read(policy, params, [[7] * 6 + text])
  [alone] = read(policy, params, [text])
  moved = turned(alone.keys, 6, policy.config)
  np.testing.assert_allclose(moved[0], behind.keys[0][:, 6:], atol=1e-5)
  assert moved.shape == alone.keys.shape and np.abs(moved - alone.keys).max() > 0.01
  np.testing.assert_allclose(turned(moved, -6, policy.config), alone.keys, atol=1e-6)


def test_overlapping_slots_are_those_of_the_published_cache_concatenated(tmp_path):
  """`transformers` with the keys and values of all slots as its cache, and the text at the number of all slots."""
  path = tiny.make_model(tmp_path / 'model', initializer_range=0.3)
  policy, params = huggingface.load(str(path), ModelConfig(dtype='float32'))
  parts = read(policy, params, TEXTS)
  origin = cartridge_files.Origin.of(str(path), policy.config)
  for number, part in enumerate(parts):
    cartridge_files.write(tmp_path / str(number), part, origin, 'float32')
  named = ','.join(str(tmp_path / str(number)) for number in range(len(parts)))
  found = named_cartridges.read(named, str(path), policy.config)
  slots = sum(map(len, TEXTS))
  described = named_cartridges.describe(named)
  assert found.slots == described.prefix.slots == slots and found.frozen == 1
  tokens, positions, segments = rows(count=1)
  reference = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
  count, past = int(segments.sum()), transformers.DynamicCache()
  for layer, (keys, values) in enumerate(zip(found.keys, found.values, strict=True)):
    past.update(torch.tensor(keys[None]), torch.tensor(values[None]), layer)
  with torch.no_grad():
    said = reference(
      torch.tensor(tokens[:, :count].astype(np.int64)),
      past_key_values=past,
      position_ids=torch.arange(slots, slots + count)[None],
    ).logits.numpy()
  student = with_prefix(policy, params, found.prefix, found.keys, found.values)
  ours = logits(*student, (tokens, positions, segments))
  np.testing.assert_allclose(ours[0, :count], said[0], atol=1e-4)
  moved = named_cartridges.read(named, str(path), policy.config, 'sequential')
  np.testing.assert_array_equal(moved.values, found.values)
  np.testing.assert_array_equal(moved.keys[:, :, :9], found.keys[:, :, :9])
  assert np.abs(moved.keys[:, :, 9:] - found.keys[:, :, 9:]).max() > 0.01


def test_cartridges_of_different_windows_are_refused():
  policy, params = model('qwen3')
  one, other = read(policy, params, TEXTS[:2])
  with pytest.raises(UserError, match='A,B: some of these .*sliding_window=windowed and others with visible'):
    composed([one, dataclasses.replace(other, within_windows=True)], 'overlap', policy.config, 'A,B')


def test_rows_read_slots_and_then_any_of_a_bank():
  """As if the slots were concatenated, whatever other rows read; rows may read fewer of them, or none."""
  policy, params = model('qwen3')
  own, *others = read(policy, params, [TEXTS[0], TEXTS[1], TEXTS[1][::-1], TEXTS[1][2:] + [3, 4]])
  prefix = kv_prefix.KVPrefix(own.slots, 1, members=3, member_slots=14, at_once=2)
  student, base, trained = with_prefix(policy, params, own.prefix, own.keys, own.values)
  alone = kv_prefix.KVPrefix(0, 0, members=3, member_slots=14)
  bank, put = kv_prefix.empty_slots(policy, alone), kv_prefix.bank_writer(dataclasses.replace(policy, adapter=alone))
  for place, other in enumerate(others):
    text = kv_prefix.slots(kv_prefix.KVPrefix(14, 14), other.keys, other.values, 'float32')[0]
    bank = put(bank, text, np.int32(place), np.int32(14))
  mixed = dataclasses.replace(student, adapter=prefix)
  layers = base['layers'] | {'prefix': base['layers'].get('prefix', {}) | bank['layers']['prefix']}
  base = base | {'layers': layers}
  row = rows(count=4)
  members = np.array([[2, 0], [1, -1], [-1, -1], [0, 1]], np.int32)
  hidden, unembedding, _ = mixed.apply(base, trained, *row, members=members)
  found = np.asarray(hidden @ unembedding.T)
  for at, chosen in enumerate(members):
    whole = composed([own, *(others[place] for place in chosen if place >= 0)], 'overlap', policy.config, '')
    expected = logits(*with_prefix(policy, params, whole.prefix, whole.keys, whole.values), row)
    real = row[2][at] > 0
    np.testing.assert_allclose(found[at][real], expected[at][real], atol=5e-5)
  hidden, unembedding, _ = mixed.apply(base, trained, *row)
  np.testing.assert_allclose(np.asarray(hidden @ unembedding.T)[2], found[2], atol=5e-5)
  assert jnp.isfinite(hidden).all()
