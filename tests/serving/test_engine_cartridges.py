"""Cartridges in the engine: samples read them beside adapters, each as a model with that cartridge alone."""

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest

from sdpo_jax.errors import UserError
from sdpo_jax.models import parameters
from sdpo_jax.models.adapters import composition, kv_prefix
from sdpo_jax.models.adapters.cartridge import Cartridge
from sdpo_jax.models.adapters.kv_prefix import KVPrefix
from sdpo_jax.rollout.sampler import Sampler
from sdpo_jax.serving.engine import LARGEST_SLOT, checked_cartridge
from sdpo_jax.serving.records import BASE, KEYS, VALUES, WINDOWED, Composition
from sdpo_jax.serving.shelf import NoPlaceError
from tests.letters import TOKENIZER
from tests.serving.engines import SETTINGS, cartridge, feedback, make_model, start

OPTIONS = dict(n=2, seed=3, step=0, max_tokens=6, temperature=0.0)
NAMES = {'one@0': 3, 'two@0': 5, 'six@0': 6}


@pytest.fixture(scope='module')
def model():
  return make_model()


@pytest.fixture
def engine(model, tmp_path):
  engine = start(model, tmp_path, adapters=2, rows=8, cartridges=2, cartridge_slots=8, kept_prefixes=4)
  for seed, (name, slots) in enumerate(NAMES.items()):
    engine.restore(name, cartridge(slots, seed))
  return engine


def run(engine, *handles):
  while engine.turn():
    pass
  return [handle.result() for handle in handles]


def ask(engine, version, read, prompt=(4, 5, 6), **options):
  return engine.submit(version, list(prompt), cartridge=read, owner='ada', **OPTIONS | options)


def alone(model, arrays, prompt=(4, 5, 6)):
  """Return what a sampler of the model draws with these slots as its frozen prefix."""
  policy, base = model
  prefix = KVPrefix(arrays[KEYS].shape[2], arrays[KEYS].shape[2])
  frozen, _ = kv_prefix.slots(prefix, jnp.asarray(arrays[KEYS]), jnp.asarray(arrays[VALUES]), 'float32')
  policy, sizes = dataclasses.replace(policy.base_policy(), adapter=prefix), dict(prompt_buckets=(8,), decode_chunk=3)
  sampler = Sampler(policy, TOKENIZER, response_buckets=(8,), max_batch_rows=2, stop_token_ids=(30,), **sizes)
  return sorted(
    sampler.stream(parameters.merge(base, frozen), {}, [list(prompt)], **OPTIONS), key=lambda done: done.sample
  )


def assert_same(found, expected):
  for one, other in zip(found, expected, strict=True):
    assert one.tokens.tolist() == other.tokens.tolist()
    np.testing.assert_allclose(one.model_log_probs, other.model_log_probs, atol=1e-5)


def test_a_request_names_an_adapter_a_cartridge_both_or_neither(model, engine):
  reads = [None, Composition(('one@0',)), Composition(('two@0',))]
  found = run(engine, *(ask(engine, version, read) for read in reads for version in (BASE, '0@0')))
  for read, own in zip(reads[1:], found[2::2], strict=True):
    assert_same(own, alone(model, engine.arrays(read.versions[0])))
  assert len({round(float(each[0].model_log_probs.sum()), 3) for each in found}) == len(found)
  for (version, read), own in zip(((v, r) for r in reads for v in (BASE, '0@0')), found, strict=True):
    assert_same(run(engine, ask(engine, version, read))[0], own)


@pytest.mark.parametrize('positions', ['overlap', 'sequential'])
def test_several_cartridges_are_read_as_one(model, engine, positions, monkeypatch):
  [found] = run(engine, ask(engine, BASE, Composition(('one@0', 'two@0'), positions)))
  made = [cartridge(NAMES[name], seed) for seed, name in enumerate(('one@0', 'two@0'))]
  parts = [Cartridge(own[KEYS], own[VALUES], 0) for own in made]
  whole = composition.composed(parts, positions, model[0].config, '')
  assert_same(found, alone(model, {KEYS: whole.keys, VALUES: whole.values}))
  monkeypatch.setattr(composition, 'composed', None)  # Nothing is copied for what is refused, or has a place.
  with pytest.raises(UserError, match='2 cartridges with 9 slots are more than serve.cartridge_slots=8'):
    ask(engine, BASE, Composition(('one@0', 'six@0'), positions))
  assert_same(*run(engine, *(ask(engine, BASE, Composition(('one@0', 'two@0'), positions)) for _ in range(2))))


def test_another_cartridge_of_the_same_name_is_read_by_the_next_request(model, engine):
  """Nor are keys and values of prompts kept that were read behind the one before."""
  read = Composition(('one@0',))
  run(engine, ask(engine, BASE, read))
  engine.forget('one@0')
  with pytest.raises(UserError, match='no version one@0'):
    ask(engine, BASE, read)
  engine.restore('one@0', cartridge(4, 99))
  handle = ask(engine, BASE, read)
  [found] = run(engine, handle)
  assert handle.reused == 0
  assert_same(found, alone(model, cartridge(4, 99)))


def test_cartridges_take_turns_at_the_places(model, engine):
  handles = [ask(engine, BASE, Composition((name,))) for name in ('one@0', 'two@0')]
  assert engine.served(BASE, Composition(('six@0',))) is None and engine.served(BASE, Composition(('one@0',))) == 2
  assert engine.served('0@0', Composition(('one@0',))) == 2  # Not 0, though the adapter is not loaded.
  with pytest.raises(NoPlaceError):
    ask(engine, '1@0', Composition(('six@0',)))
  with pytest.raises(ValueError, match='in use'):
    engine.forget('one@0')
  run(engine, *handles)
  for name in ('six@0', 'one@0', 'two@0'):
    assert_same(run(engine, ask(engine, BASE, Composition((name,))))[0], alone(model, engine.arrays(name)))


def test_what_no_model_computes_is_refused_and_changes_nothing(engine):
  read = Composition(('one@0',))
  [before] = run(engine, ask(engine, BASE, read))

  def changed(name, value):
    arrays = cartridge(3, 0)
    arrays[name][0, 0, 1, 2] = value
    return arrays

  good = cartridge(3, 0)
  for arrays, said in (
    (changed(KEYS, np.nan), 'not finite'),
    (changed(VALUES, np.inf), 'not finite'),
    (changed(KEYS, 1e30), 'keys in slot 1 of layer 0 that are not finite, or larger than 65536'),
    (changed(VALUES, -2 * LARGEST_SLOT), 'larger than 65536'),
    (good | {KEYS: good[KEYS][:, :1]}, 'float32 keys and values of 1 layers, 2 heads'),
    (good | {KEYS: good[KEYS].astype(np.float16)}, 'keys float16'),
    (good | {KEYS: good[KEYS][..., :2, :]}, 'float32 keys and values'),
    ({KEYS: good[KEYS]}, 'float32 keys and values'),
    (good | {'more': good[KEYS]}, 'float32 keys and values'),
    (cartridge(9, 0), '9 slots, but serve.cartridge_slots=8'),
    (cartridge(0, 0), '0 slots'),
    (cartridge(3, 0, num_hidden_layers=2), 'of 1 layers'),
  ):
    with pytest.raises(UserError, match=re.escape(said)):
      engine.restore('bad@0', arrays)
    assert 'bad@0' not in engine
  [after] = run(engine, ask(engine, BASE, read))
  for one, other in zip(before, after, strict=True):
    np.testing.assert_array_equal(one.model_log_probs, other.model_log_probs)


def test_windows_are_those_with_which_a_cartridge_was_trained(model):
  """Also of one that was stored before the setting was changed; without windows both are the same."""
  settings, sizes = dataclasses.replace(SETTINGS, cartridges=1, cartridge_slots=8), model[0].config
  with_windows = dataclasses.replace(sizes, windows=(4,))
  for kind, other in ((0, 'windowed'), (1, 'visible')):
    arrays = cartridge(3, 0) | {WINDOWED: np.int32(kind)}
    changed = dataclasses.replace(settings, cartridge_window=other)
    assert checked_cartridge('It', arrays, changed, sizes).keys() == arrays.keys()
    with pytest.raises(UserError, match=f'serve.cartridge_window={other}'):
      checked_cartridge('It', arrays, changed, with_windows)
  assert checked_cartridge('It', cartridge(3, 0), settings, with_windows)


def test_a_cartridge_is_no_adapter_and_an_adapter_no_cartridge(engine, model, tmp_path):
  for use in (
    lambda: engine.submit('one@0', [4], **OPTIONS),
    lambda: engine.score('one@0', [([4], [5])]),
    lambda: engine.learn([feedback('one@0', 'one@1')]),
    lambda: engine.learn([feedback('0@0', '0@1', teacher='version:one@0')]),
  ):
    with pytest.raises(UserError, match='one@0 is a cartridge'):
      use()
  with pytest.raises(UserError, match='0@0 is an adapter'):
    ask(engine, BASE, Composition(('0@0',)))
  without = start(model, tmp_path / 'other', adapters=1)
  with pytest.raises(UserError, match='serves no'):
    ask(without, '0@0', Composition(('one@0',)))
  with pytest.raises(UserError, match='serves none'):
    without.restore('one@0', cartridge(3, 0))
  assert SETTINGS.cartridges == 0


@pytest.mark.slow
def test_eight_cartridges_in_one_batch_are_each_read_as_alone(model, tmp_path):
  """Eight rows read each, beside rows that read none, from prompts of all lengths."""
  more = dict(adapters=1, rows=72, cartridges=8, cartridge_slots=12, decode_chunk=4)
  engine = start(model, tmp_path, **more)
  for seed in range(8):
    engine.restore(f'{seed}@0', cartridge(12 - seed, seed)) if seed else engine.restore('8@0', cartridge(12, 0))
  names = ['8@0', *(f'{seed}@0' for seed in range(1, 8))]
  prompts = {name: [5 + at] * (1 + at) for at, name in enumerate(names)}
  handles = [ask(engine, BASE, Composition((name,)), prompts[name], n=8) for name in names]
  handles.append(ask(engine, BASE, None, [9, 8, 7], n=8))
  engine.turn()
  assert engine._resident._queue.left == 0  # noqa: SLF001 (All are under way at once.)
  for name, found in zip(names, run(engine, *handles), strict=False):
    expected = alone(model, engine.arrays(name), prompts[name])
    for done in found:
      assert_same([done], expected[:1])
