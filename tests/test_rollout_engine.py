"""The host side: buckets, calls, stop strings and text change no sample; wrong inputs say what to do."""

import types

import jax
import numpy as np
import pytest

from models import huggingface, parameters
from sdpo_jax.config import MeshConfig
from sdpo_jax.errors import UserError
from sdpo_jax.mesh import make_mesh, parameter_sharding
from sdpo_jax.rollout import engine
from sdpo_jax.rollout.programs import programs
from sdpo_jax.rollout.stops import StopStrings

ALPHABET = 'abcdefghijklmnopqrstuvwxyz .,'
CONFIG = dict(
  model_type='qwen3',
  vocab_size=40,  # Larger than the alphabet: some tokens have no text, as in padded vocabularies.
  hidden_size=32,
  intermediate_size=48,
  num_hidden_layers=1,
  num_attention_heads=4,
  num_key_value_heads=2,
  head_dim=16,
  tie_word_embeddings=True,
  initializer_range=0.3,
)
SAMPLED = ('completion_tokens', 'completion_mask', 'sampling_log_probs', 'model_log_probs', 'entropy')


def decode_text(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False):
  special = '' if skip_special_tokens else '<end>'
  return ''.join(ALPHABET[t - 1] if 0 < t <= len(ALPHABET) else special if t == 30 else '' for t in tokens)


TOKENIZER = types.SimpleNamespace(decode=decode_text)
PROMPTS = [[3, 4, 5], [7] * 12, [9, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [11, 12]]


@pytest.fixture(scope='module')
def model():
  return huggingface.init(CONFIG, jax.random.key(1))


def make_sampler(model, **settings):
  settings = dict(prompt_buckets=(32,), response_buckets=(24,), stop_token_ids=(30,)) | settings
  return engine.Sampler(model[0], TOKENIZER, **settings)


def sample(sampler, model, prompts=PROMPTS, **settings):
  settings = dict(n=4, seed=5, step=2, max_tokens=24, temperature=1.3, top_p=0.95) | settings
  return sampler.sample({}, model[1], prompts, **settings)


def assert_same_samples(one, other):
  width = min(one.completion_tokens.shape[1], other.completion_tokens.shape[1])
  for name in SAMPLED:
    left, right = getattr(one, name), getattr(other, name)
    assert not left[:, width:].any() and not right[:, width:].any()
    np.testing.assert_allclose(left[:, :width], right[:, :width], atol=1e-4)
  assert one.text == other.text and one.finish_reason == other.finish_reason


@pytest.fixture
def compiled():
  """The names of the functions that a test has compiled so far."""
  names = []

  def listen(event, duration, **details):
    if event == '/jax/core/compile/backend_compile_duration':
      names.append(details['fun_name'])

  jax.monitoring.register_event_duration_secs_listener(listen)
  yield names
  jax.monitoring.unregister_event_duration_listener(listen)


def count(names):
  return {kind: sum(kind in name for name in names) for kind in ('prefill', 'advance')}


@pytest.fixture(scope='module')
def reference(model):
  return sample(make_sampler(model), model)


def test_rollouts_hold_prompts_masks_text_and_reasons(reference):
  assert len(reference) == 16
  assert reference.group.tolist() == np.repeat(np.arange(4), 4).tolist()
  for row in range(16):
    assert reference.prompt_tokens[row][reference.prompt_mask[row]].tolist() == PROMPTS[row // 4]
    tokens = reference.completion_tokens[row][reference.completion_mask[row]].tolist()
    assert reference.text[row] == decode_text(tokens, skip_special_tokens=True)
    assert reference.finish_reason[row] == ('stop' if tokens[-1] == 30 else 'length')
    assert 30 not in tokens[:-1] and (tokens[-1] == 30 or len(tokens) == 24)
    assert not reference.completion_tokens[row][~reference.completion_mask[row]].any()
  assert set(reference.finish_reason) == {'stop', 'length'}
  assert len(set(reference.text)) == 16
  drawn = reference.completion_mask
  assert (reference.sampling_log_probs[drawn] <= 1e-6).all() and (reference.entropy[drawn] > 0).all()


@pytest.mark.parametrize(
  'settings',
  [dict(max_batch_rows=8), dict(max_batch_rows=3, prompt_buckets=(50,), response_buckets=(31,))],
  ids=['two prompts a call', 'half a group a call, other buckets'],
)
def test_batching_changes_no_sample(model, reference, settings):
  assert_same_samples(sample(make_sampler(model, **settings), model), reference)


@pytest.mark.parametrize('on_mesh', [False, True])
def test_making_room_in_stages_changes_no_sample(model, reference, monkeypatch, compiled, on_mesh):
  """Three stages, of which the later ones are not even begun when every row is done."""
  monkeypatch.setattr(engine, 'SMALLEST_STAGE', 4)
  assert engine.stages(24) == (6, 12, 24)
  sampler = make_sampler(model, mesh=make_mesh(MeshConfig()) if on_mesh else None)
  short = sample(sampler, model, max_tokens=6)
  np.testing.assert_array_equal(short.completion_tokens[:, :6], reference.completion_tokens[:, :6])
  assert count(compiled) == {'prefill': 1, 'advance': 1}
  assert_same_samples(sample(sampler, model), reference)
  assert count(compiled) == {'prefill': 1, 'advance': 3}
  if not on_mesh:
    stopping = make_sampler(model, stop=('<end>',), stop_token_ids=(), stop_check_interval=5)
    assert sample(stopping, model).text == reference.text


def test_one_by_one_is_the_batch(model):
  """Every row alone, with the knobs that it has in a batch of rows with different knobs."""
  knobs = dict(
    temperature=np.array([1.0, 0.0, 0.7, 1.5]),
    top_p=np.array([1.0, 1.0, 0.9, 0.5]),
    top_k=np.array([-1, 3, 5, -1]),
    min_p=np.array([0.1, 0.0, 0.0, 0.0]),
    max_tokens=np.array([24, 7, 1, 24]),
  )
  sampler = make_sampler(model)
  together = sample(sampler, model, n=1, **knobs)
  assert together.completion_mask.sum(1).tolist()[1:3] == [7, 1]
  # The first of the alone samples has number 0, as has the first of the batch.
  alone = sample(sampler, model, PROMPTS[:1], n=1, **{name: values[:1] for name, values in knobs.items()})
  assert_same_samples(together.take(np.array([0])), alone)
  reordered = sample(sampler, model, n=1, **knobs | dict(temperature=knobs['temperature'] * 0))
  np.testing.assert_array_equal(reordered.completion_tokens[1], together.completion_tokens[1])


def test_seed_step_and_sample_number_choose_the_sample(model, reference):
  sampler = make_sampler(model)
  assert_same_samples(sample(sampler, model), reference)
  for change in (dict(seed=6), dict(step=3), dict(prompts=PROMPTS[:1] + PROMPTS)):
    assert sample(sampler, model, **change).text[4:8] != reference.text[4:8]


@pytest.mark.parametrize('interval', [1, 5, 24])
def test_stop_strings_end_with_the_token_that_completes_them(model, reference, interval):
  """The samples are those without stop strings, cut after the first token whose text completes one."""
  pieces = [text[5:7] for text in reference.text if len(text) > 10][:3] + ['<end>']
  stopped = sample(make_sampler(model, stop=pieces, stop_check_interval=interval, stop_token_ids=()), model)
  free = sample(make_sampler(model, stop_token_ids=()), model)
  ended = 0
  for row in range(16):
    tokens = free.completion_tokens[row][free.completion_mask[row]].tolist()
    ends = [i for i in range(1, len(tokens) + 1) if any(piece in decode_text(tokens[:i]) for piece in pieces)]
    expected = tokens[: ends[0]] if ends else tokens
    assert stopped.completion_tokens[row][stopped.completion_mask[row]].tolist() == expected
    assert stopped.finish_reason[row] == ('stop' if ends else 'length')
    assert stopped.text[row] == decode_text(expected, skip_special_tokens=True)
    ended += bool(ends)
  assert 3 <= ended


def test_stop_strings_over_several_tokens():
  stops = StopStrings(TOKENIZER, ('abc', 'ya'))
  assert stops.find([1, 2, 3, 4]) == 3
  assert stops.find([35, 1, 35, 2, 35, 35, 3, 1, 2, 3]) == 7
  assert stops.find([2, 3, 1, 2, 25, 1]) == 6
  assert stops.find([1, 2, 4, 3]) is None
  assert not StopStrings(TOKENIZER, ())


def test_training_and_evaluation_share_programs(model, compiled):
  """Steps, temperatures, truncation and lengths compile nothing new: two programs for every declared shape."""
  sampler = make_sampler(model, prompt_buckets=(8, 32), response_buckets=(10,), max_batch_rows=6)
  for step in range(3):
    if step == 1:
      first = list(compiled)
    sample(sampler, model, PROMPTS[:2], n=3, step=step, max_tokens=10, temperature=1.0, top_p=1.0)
    sample(sampler, model, PROMPTS[1:3], n=3, step=step, max_tokens=4 + step, temperature=0.6, top_p=0.95, top_k=20)
    sample(sampler, model, PROMPTS[:1] * 2, n=3, step=step, max_tokens=9, temperature=0.0)
    sample(sampler, model, PROMPTS * 2, n=3, step=step, max_tokens=10, min_p=0.1)
  assert sampler.shapes == {engine.Shapes(2, 3, 8, 10), engine.Shapes(2, 3, 32, 10)}
  assert count(compiled) == {'prefill': 2, 'advance': 2}
  assert compiled == first


@pytest.mark.parametrize('config', [MeshConfig(), MeshConfig(fsdp=2, tensor=4)], ids=['fsdp', 'fsdp and tensor'])
def test_rows_spread_over_a_mesh_sample_the_same(model, reference, config, compiled):
  """Also with stop strings, and each shape compiles two programs only."""
  policy, params = model
  mesh = make_mesh(config)
  place = lambda parameter, leaf: jax.device_put(leaf, parameter_sharding(mesh, parameter.axes, parameter.shape))
  spread = policy, parameters.map_tree(place, policy.parameter_table(), params)
  sampler = make_sampler(spread, mesh=mesh)
  assert_same_samples(sample(sampler, spread), reference)
  stopping = make_sampler(spread, mesh=mesh, stop=('<end>',), stop_token_ids=(), stop_check_interval=5)
  assert sample(stopping, spread).text == reference.text
  assert len(sampler.shapes | stopping.shapes) == 1
  assert count(compiled) == {'prefill': 1, 'advance': 1}


def test_rows_are_divided_over_the_mesh(model):
  policy, params = model
  mesh = make_mesh(MeshConfig())
  run = programs(policy, mesh)
  prompts, lengths = np.ones((8, 32), np.int32), np.full(8, 3, np.int32)
  knobs = dict(temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0, max_tokens=24)
  knobs = {
    name: np.full(16, value, np.float32 if isinstance(value, float) else np.int32) for name, value in knobs.items()
  }
  params_of_rows = make_sampler(model)._params(np.arange(16, dtype=np.int32), knobs, seed=0, step=0)
  prompts, lengths, params_of_rows = run.put((prompts, lengths, params_of_rows))
  state = run.prefill(*run.prepare({}, params), prompts, lengths, params_of_rows, n=2, max_new_tokens=24, slots=8)
  state = run.grow(state, n=2, slots=(32, 40, 56))
  for leaf in jax.tree.leaves(state):
    if leaf.ndim:
      assert leaf.addressable_shards[0].data.size * 8 == leaf.size, leaf.sharding


@pytest.mark.parametrize(
  ('prompts', 'settings', 'says'),
  [
    ([[1], [2] * 65], {}, 'Prompt 1 .* 65 tokens.*data.max_prompt_length=64'),
    ([[1], []], {}, 'Prompt 1 .* empty'),
    ([], {}, 'no prompt'),
    ([[1]], dict(max_tokens=25), 'max_tokens=25 .*data.max_response_length=24'),
    ([[1]], dict(max_tokens=0), 'max_tokens must be at least 1'),
  ],
)
def test_wrong_requests_say_what_to_do(model, prompts, settings, says):
  with pytest.raises(UserError, match=says):
    sample(make_sampler(model, prompt_buckets=(), max_prompt_length=64), model, prompts, **settings)


def test_an_empty_stop_string_is_refused(model):
  with pytest.raises(UserError, match='rollout.stop'):
    make_sampler(model, stop=('a', ''))


def test_stages():
  assert engine.stages(64) == (64,) and engine.stages(128) == (64, 128) and engine.stages(8192) == (2048, 4096, 8192)


def test_buckets():
  assert engine.buckets((), 100) == (16, 32, 64, 100)
  assert engine.buckets((), 9) == (9,)
  assert engine.buckets((50, 20, 300), 100) == (20, 50, 100)
  assert engine.pick((20, 50), 20) == 20 and engine.pick((20, 50), 51) is None
  assert engine.pick((), 17) == 32


@pytest.mark.parametrize(
  ('prompts', 'n', 'max_rows', 'shards', 'shape'),
  [
    (32, 8, 256, 1, (32, 8)),
    (50, 4, 128, 1, (25, 4)),
    (3, 20, 8, 1, (1, 7)),
    (1, 1, 256, 1, (1, 1)),
    (3, 2, 256, 8, (8, 1)),  # Two rows of padding, not ten.
    (32, 8, 256, 64, (64, 4)),  # Half a group on every device.
    (100, 3, 64, 8, (16, 3)),
    (5, 4, 2, 8, (8, 1)),  # No fewer rows than devices.
  ],
)
def test_calls_have_one_shape(prompts, n, max_rows, shards, shape):
  assert engine.call_shape(prompts, n, max_rows, shards) == shape
