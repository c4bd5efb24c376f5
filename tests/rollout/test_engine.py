"""The host side: slots, buckets, order, stop strings and text change no sample; wrong inputs say what to do."""

import dataclasses
import itertools
import types

import jax
import numpy as np
import pytest

from sdpo_jax.config import MeshConfig
from sdpo_jax.distributed.mesh import make_mesh, parameter_sharding
from sdpo_jax.errors import UserError
from sdpo_jax.models import cache as kv_cache
from sdpo_jax.models import huggingface, parameters
from sdpo_jax.models.attention.backend import AttentionBackend
from sdpo_jax.rollout import queue, results, sizes, slots
from sdpo_jax.rollout import sampler as samplers
from sdpo_jax.rollout.buckets import bucket_lengths, smallest_bucket
from sdpo_jax.rollout.functions import sampler_functions
from sdpo_jax.rollout.stops import StopStrings
from tests.compiling import compile_as_users
from tests.letters import CONFIG, TOKENIZER, decode_text

SAMPLED = ('completion_tokens', 'completion_mask', 'sampling_log_probs', 'model_log_probs', 'entropy')


PROMPTS = [[3, 4, 5], [7] * 12, [9, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [11, 12]]


@pytest.fixture(scope='module')
def model():
  return huggingface.init(CONFIG, jax.random.key(1))


def make_sampler(model, tokenizer=TOKENIZER, **settings):
  settings = dict(prompt_buckets=(32,), response_buckets=(24,), stop_token_ids=(30,)) | settings
  return samplers.Sampler(model[0], tokenizer, **settings)


def spying(**wrappers):
  """Return a `keep` that wraps the functions of these names."""
  return lambda name, function: wrappers.get(name, lambda function: function)(function)


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
  """Yield the names of the functions that a test has compiled so far."""
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
  [
    dict(max_batch_rows=3, prompt_buckets=(50,), response_buckets=(31,), decode_chunk=7),
    pytest.param(dict(max_batch_rows=1, prompt_buckets=(3, 12, 20), decode_chunk=5), marks=pytest.mark.slow),
    pytest.param(dict(max_batch_rows=8), marks=pytest.mark.campaign),
  ],
  ids=['fewer slots than samples of a prompt, other buckets', 'one slot', 'half of the samples at once'],
)
def test_slots_and_buckets_change_no_sample(model, reference, settings):
  sampler = make_sampler(model, **settings)
  assert_same_samples(sample(sampler, model), reference)
  assert sampler.stats.prompts == 4  # However its samples are spread over time, a prompt is prefilled once.
  assert sampler.stats.tokens == reference.completion_mask.sum()


@pytest.mark.parametrize('whole_at_once', [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_growing_and_shrinking_cache_changes_no_sample(model, reference, monkeypatch, whole_at_once):
  """Also where rows are moved together, and with any order of arrival."""
  monkeypatch.setattr(sizes, 'SMALLEST_CACHE', 8)
  taken = []

  def resizing(resize):
    def spy(cache, source, slots):
      taken.append((len(cache.lengths), kv_cache.slots(cache), len(source), slots))
      return resize(cache, source, slots=slots)

    return spy

  # Where there is nothing to wait for, stages are gone through as rows run out.
  settings = dict(max_batch_rows=48 if whole_at_once else 8, decode_chunk=4, prompt_buckets=(8,), stop_token_ids=())
  sampler = make_sampler(model, **settings, keep=spying(resize=resizing))
  prompts, lengths = (
    [[3, 4, 5], [7] * 4, [9, 1], [11]],
    np.array([2, 24, 24, 3, *[4] * 42, 3, 12]),
  )  # Long ones end first.
  whole = make_sampler(model, stop_token_ids=())
  expected = sample(whole, model, prompts, n=12, max_tokens=lengths)
  if whole_at_once:
    assert_same_samples(sample(sampler, model, prompts, n=12, max_tokens=lengths), expected)
    assert taken == [(48, 18, 48, 36), (48, 36, 16, 36), (16, 36, 4, 36)]
    return
  assert_same_samples(sample(sampler, model, prompts, n=12, max_tokens=lengths), expected)
  # 8 + 24 + 4 slots, half of them at first; a third of the rows, and a twelfth.
  assert taken == [(8, 18, 8, 36), (8, 36, 3, 36), (3, 36, 1, 36)]

  def backwards(shards, waiting):
    return queue.Queue(shards, waiting[::-1])

  monkeypatch.setattr(slots, 'Queue', backwards)
  assert_same_samples(sample(sampler, model, prompts, n=12, max_tokens=lengths), expected)


@pytest.mark.slow
def test_the_kernels_of_a_tpu_sample_the_same_from_a_cache_that_keeps_its_size(model, reference):
  policy, params = model
  kernels = dataclasses.replace(policy, backend=AttentionBackend('splash', interpret=True))
  assert sampler_functions(kernels, None).keeps_size and not sampler_functions(policy, None).keeps_size
  sampler = make_sampler((kernels, params), max_batch_rows=6, decode_chunk=8)
  assert_same_samples(sample(sampler, (kernels, params)), reference)


def test_a_cache_that_is_not_resized_has_one_program_and_changes_no_sample(model, reference, compiled):
  lengths = np.array([2, 2, 8, 24] * 4)
  expected = sample(make_sampler(model, stop_token_ids=()), model, max_tokens=lengths)
  # So many steps between two looks that the program is not there yet.
  sampler = make_sampler(model, stop_token_ids=(), decode_chunk=6, resized=False)
  before = count(compiled)['advance']
  assert_same_samples(sample(sampler, model, max_tokens=lengths), expected)
  assert count(compiled)['advance'] == before + 1
  assert sampler.stats.row_steps == 24 * 16


@pytest.mark.parametrize(
  ('layers', 'mesh'),
  [
    pytest.param(1, None, id='one device', marks=pytest.mark.slow),
    pytest.param(kv_cache.SHALLOW + 1, MeshConfig(4, 2), id='deep, eight devices', marks=pytest.mark.slow),
  ],
)
def test_rows_that_run_out_are_left_behind_where_the_cache_keeps_its_size(layers, mesh):
  """Live rows move to the front of the same arrays, each within its shard, and no others are stepped: same samples."""
  policy, params = huggingface.init(CONFIG | {'num_hidden_layers': layers}, jax.random.key(1))
  request = dict(prompts=[prompt[:8] for prompt in PROMPTS], max_tokens=np.array([2, 2, 8, 14] * 4))
  expected = sample(make_sampler((policy, params), stop_token_ids=()), (policy, params), **request)
  mesh = mesh and make_mesh(mesh)
  kernels = dataclasses.replace(policy, backend=AttentionBackend('splash', mesh, interpret=True))
  if mesh is not None:

    def place(parameter, leaf):
      return jax.device_put(leaf, parameter_sharding(mesh, parameter.axes, parameter.shape))

    params = parameters.map_tree(place, policy.parameter_table(), params)
  short = dict(prompt_buckets=(8,), response_buckets=(14,), decode_chunk=4)
  moves, shards = [], sampler_functions(kernels, mesh).shards

  def compacting(compact):
    def spy(stores, lengths, source):
      moves.append((len(lengths), np.asarray(source).reshape(shards, -1)))
      return compact(stores, lengths, source)

    return spy

  keep = spying(compact=compacting)
  sampler = make_sampler((kernels, params), mesh=mesh, stop_token_ids=(), keep=keep, **short)
  assert_same_samples(sample(sampler, (kernels, params), **request), expected)
  # A shard keeps two rows.
  assert [(before, source.size) for before, source in moves] == [(16, 8), (8, 4)][: 2 if mesh is None else 1]
  assert all((source >= source.shape[1]).any() for _, source in moves)
  # Rows go as soon as as many have run out, not only at the next look.
  assert sampler.stats.decode_steps == 14 and sampler.stats.row_steps == 2 * 16 + 6 * 8 + 6 * (4 if mesh is None else 8)


def test_completions_come_as_they_finish(model, reference):
  """Each once, the short ones first, before the others are done; and the same as in a batch."""
  sampler = make_sampler(model, max_batch_rows=16, decode_chunk=4)
  lengths = np.array([24, 3, 3, 3] * 4)
  settings = dict(n=4, seed=5, step=2, max_tokens=lengths, temperature=1.3, top_p=0.95)
  expected = sample(make_sampler(model), model, max_tokens=lengths)
  stream = sampler.stream({}, model[1], PROMPTS, **settings)
  first = [next(stream) for _ in range(12)]
  assert sampler.stats.dispatches < 24 / 4
  rest = list(stream)
  assert sorted(done.sample for done in (*first, *rest)) == list(range(16))
  assert all(len(done.tokens) == 24 or done.stopped for done in rest)
  for done in (*first, *rest):
    mask = expected.completion_mask[done.sample]
    assert done.tokens.tolist() == expected.completion_tokens[done.sample][mask].tolist()
    assert done.text == expected.text[done.sample]
    assert ('stop' if done.stopped else 'length') == expected.finish_reason[done.sample]
  heard = []
  sample(sampler, model, max_tokens=lengths, on_finished=heard.append)
  assert [done.sample for done in heard] == [done.sample for done in (*first, *rest)]


def test_texts_are_made_while_the_device_is_at_work(model):
  events = []

  def noted(name, function):
    def call(*arguments, **settings):
      events.append(name)
      return function(*arguments, **settings)

    return call

  tokenizer = types.SimpleNamespace(decode=noted('text', decode_text))
  keep = spying(advance=lambda advance: noted('advance', advance))
  sampler = make_sampler(model, tokenizer=tokenizer, max_batch_rows=6, decode_chunk=4, keep=keep)
  # That the host reads what was drawn shows nowhere else.
  functions = sampler._functions  # noqa: SLF001
  sampler._functions = dataclasses.replace(functions, fetch=noted('fetch', functions.fetch))  # noqa: SLF001
  sample(sampler, model)
  assert events.count('text') == 16
  looks = [after for before, after in itertools.pairwise(events) if before == 'fetch']
  assert set(looks[:-1]) == {'advance'} and looks[-1] == 'text'


def test_drafts_are_completions_as_far_as_they_are_drawn(model, reference):
  """Of every sample that goes on, at every look, also where slots are refilled."""
  settings = dict(n=4, seed=5, step=2, max_tokens=24, temperature=1.3, top_p=0.95)
  stop = reference.text[0][6:8]
  for sampler in (
    make_sampler(model, max_batch_rows=6, decode_chunk=4),
    make_sampler(model, max_batch_rows=6, decode_chunk=4, stop=(stop,)),
  ):
    seen = list(sampler.stream({}, model[1], PROMPTS, drafts=True, **settings))
    done = {item.sample: item for item in seen if isinstance(item, results.Completion)}
    drafts = {number: [] for number in done}
    for item in seen:
      if isinstance(item, results.Draft):
        drafts[item.sample].append(item.tokens.tolist())
    assert sorted(done) == list(range(16))
    texts = {item.sample: item.text for item in sampler.stream({}, model[1], PROMPTS, **settings)}
    assert {number: completion.text for number, completion in done.items()} == texts
    for number, completion in done.items():
      whole = completion.tokens.tolist()
      # A look comes early where another sample is done; the last one finds the completion.
      assert drafts[number] == [whole[: len(tokens)] for tokens in drafts[number]]
      lengths = [0, *map(len, drafts[number]), len(whole)]
      assert all(0 < step <= 4 for step in np.diff(lengths))
    assert any(done[number].stopped and drafts[number] for number in done)


def test_the_stats_add_up(model):
  """Forced lengths through four slots: what a perfect engine would take, and at most a chunk more for each refill."""
  sampler = make_sampler(model, max_batch_rows=4, decode_chunk=8, stop_token_ids=())
  lengths = np.array([24, 3, 9, 12] * 4)
  done = sample(sampler, model, max_tokens=lengths)
  stats = sampler.stats
  assert done.completion_mask.sum() == lengths.sum() == stats.tokens
  assert lengths.sum() <= stats.row_steps <= 1.3 * lengths.sum()
  assert stats.prompts == 4
  # Two layers' worth of numbers: one layer of keys and values, two heads of 16 float32.
  slot = 2 * 2 * 16 * 4
  assert stats.live_bytes % slot == 0 and 4 * 24 * slot <= stats.live_bytes < 4 * (20 + 24) * slot
  assert stats.cache_bytes >= 4 * (32 + 24 + 8) * slot + 4 * 8 * slot


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
  # As many rows as the reference has, for one program.
  four_times = PROMPTS * 4, {name: np.tile(values, 4) for name, values in knobs.items()}
  together = sample(sampler, model, four_times[0], n=1, **four_times[1])
  assert together.completion_mask.sum(1).tolist()[1:3] == [7, 1]
  # The first of the alone samples has number 0, as has the first of the batch.
  alone = sample(sampler, model, PROMPTS[:1], n=1, **{name: values[:1] for name, values in knobs.items()})
  assert_same_samples(together.take(np.array([0])), alone)
  greedy = four_times[1] | dict(temperature=np.zeros(16))
  reordered = sample(sampler, model, four_times[0], n=1, **greedy)
  np.testing.assert_array_equal(reordered.completion_tokens[1], together.completion_tokens[1])


def test_seed_step_and_sample_number_choose_the_sample(model, reference):
  sampler = make_sampler(model)
  assert_same_samples(sample(sampler, model), reference)
  for change in (dict(seed=6), dict(step=3)):
    assert sample(sampler, model, **change).text[4:8] != reference.text[4:8]
  assert sample(sampler, model, prompts=PROMPTS[:1] * 2 + PROMPTS[2:]).text[4:8] != reference.text[:4]


def test_each_of_several_stop_ids_ends_a_completion_and_is_its_last_token(model):
  free = sample(make_sampler(model, stop_token_ids=()), model)
  drawn = [free.completion_tokens[row][free.completion_mask[row]].tolist() for row in range(16)]
  stops = {tokens[4] for tokens in drawn[::3]} | {30}
  stopped = sample(make_sampler(model, stop_token_ids=tuple(stops)), model)
  ended_by = set()
  for row, tokens in enumerate(drawn):
    end = next((at + 1 for at, token in enumerate(tokens) if token in stops), None)
    assert stopped.completion_tokens[row][stopped.completion_mask[row]].tolist() == tokens[:end]
    assert stopped.finish_reason[row] == ('length' if end is None else 'stop')
    ended_by |= set() if end is None else {tokens[end - 1]}
  assert len(ended_by) >= 3


@pytest.mark.parametrize(
  'chunk', [4, pytest.param(1, marks=pytest.mark.slow), pytest.param(24, marks=pytest.mark.campaign)]
)
def test_stop_strings_end_with_the_token_that_completes_them(model, reference, chunk):
  """The samples are those without stop strings, cut after the first token whose text completes one."""
  pieces = [text[5:7] for text in reference.text if len(text) > 10][:3] + ['<end>']
  stopped = sample(make_sampler(model, stop=pieces, decode_chunk=chunk, stop_token_ids=()), model)
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


def test_training_and_evaluation_share_compiled_functions(compiled):
  """Steps, temperatures, truncation and lengths compile nothing new."""
  model = huggingface.init(CONFIG | {'vocab_size': 44}, jax.random.key(1))  # For which no other test has compiled any.
  sampler = make_sampler(model, prompt_buckets=(32,), response_buckets=(10,), max_batch_rows=6)
  for step in range(3):
    sample(sampler, model, PROMPTS[:2], n=3, step=step, max_tokens=10, temperature=1.0, top_p=1.0)
    sample(sampler, model, PROMPTS[1:3], n=3, step=step, max_tokens=4 + step, temperature=0.6, top_p=0.95, top_k=20)
    sample(sampler, model, PROMPTS[:1] * 2, n=3, step=step, max_tokens=9, temperature=0.0)
    sample(sampler, model, PROMPTS * 2, n=3, step=step, max_tokens=10, min_p=0.1)
  assert count(compiled) == {'prefill': 1, 'advance': 1}


@pytest.mark.parametrize(
  'config',
  [
    pytest.param(MeshConfig(), id='fsdp', marks=pytest.mark.campaign),
    pytest.param(MeshConfig(fsdp=2, tensor=4), id='fsdp and tensor', marks=pytest.mark.slow),
  ],
)
def test_rows_spread_over_a_mesh_sample_the_same(model, reference, config, compiled):
  """Also with stop strings, and each shape compiles two programs only."""
  policy, params = model
  mesh = make_mesh(config)

  def place(parameter, leaf):
    return jax.device_put(leaf, parameter_sharding(mesh, parameter.axes, parameter.shape))

  spread = policy, parameters.map_tree(place, policy.parameter_table(), params)
  sampler = make_sampler(spread, mesh=mesh)
  assert_same_samples(sample(sampler, spread), reference)
  stopping = make_sampler(spread, mesh=mesh, stop=('<end>',), stop_token_ids=())
  assert sample(stopping, spread).text == reference.text
  assert count(compiled) == {'prefill': 1, 'advance': 1}


def test_rows_are_divided_over_the_mesh(model):
  """And stay where they are: no program sends keys or values from one device to another."""
  policy, params = model
  functions = sampler_functions(policy, make_mesh(MeshConfig()))
  index, count = np.arange(16, dtype=np.int32) % 2, np.full(8, 2, np.int32)
  cache = functions.empty(rows=16, slots=64)
  prompts = functions.prefill(
    {}, functions.prepare(params), *functions.put((np.ones((8, 32), np.int32), np.full(8, 3, np.int32)))
  )
  places = functions.put((index, index, count))
  assert 'all-' not in compile_as_users(functions.copy.lower(cache, prompts, *places)).as_text()
  assert 'all-' not in compile_as_users(functions.resize.lower(cache, places[0], slots=40)).as_text()
  shorter = functions.resize(cache, places[0], slots=40)
  for held in (prompts, shorter, functions.copy(cache, prompts, *places)):
    for leaf in jax.tree.leaves(held):
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
    sample(make_sampler(model, prompt_buckets=(64,)), model, prompts, **settings)


def test_an_empty_stop_string_is_refused(model):
  with pytest.raises(UserError, match='rollout.stop'):
    make_sampler(model, stop=('a', ''))


def test_buckets():
  assert bucket_lengths((), 2048) == (512, 2048) and bucket_lengths((), 8192, 3) == (512, 2048, 8192)
  assert bucket_lengths((), 10240) == (2560, 10240)
  assert bucket_lengths((), 300) == (128, 300)  # A quarter, but no less than 128.
  assert bucket_lengths((), 128) == (128,) and bucket_lengths((), 9) == (9,)
  assert bucket_lengths((50, 20, 300), 100) == (20, 50, 100)
  assert smallest_bucket((20, 50), 20) == 20 and smallest_bucket((20, 50), 51) is None
  assert smallest_bucket((), 17) == 32


def request_sizes(**changes):
  limits = dict(rows=64, refilled=True, widths=(64,), room=512, chunk=32, keeps_size=False)
  return sizes.sizes(**(limits | changes))


def test_sizes_are_few_and_hold_what_is_asked():
  found = request_sizes()
  small, whole, few, fewest = found.stages
  assert found.stages == tuple(sizes.Size(*size) for size in ((64, 304), (64, 608), (22, 608), (6, 608)))
  assert found.moves == ((small, whole), (whole, few), (few, fewest)) and found.admitting == 2
  assert found.path(None, 95, 64) == (small,) and found.path(None, 305, 64) == (whole,)
  assert found.path(small, 304, 64) == found.path(whole, 608, 23) == found.path(fewest, 608, 1) == ()
  assert found.path(small, 305, 64) == (whole,) and found.path(small, 200, 7) == (whole, few)
  assert found.path(whole, 200, 3) == (few, fewest)
  assert found.enough(60, 1) == 60 - 22 and found.enough(22, 1) == 22 - 6 and found.enough(6, 1) == 6
  assert found.enough(120, 2) == 120 - 44
  assert request_sizes(refilled=False).admitting == 1
  assert [size.rows for size in request_sizes(widths=(32, 64)).stages] == [64, 64, 16]
  assert request_sizes(room=8192, widths=(512, 2048)).stages[0].slots == (8192 + 2048 + 32) / 4
  # What is drawn at one go needs one size; so do a few rows, and lengths that leave little to save.
  assert len(request_sizes(room=32).stages) == len(request_sizes(rows=4, room=72).stages) == 1
  assert request_sizes(resized=False).stages == (whole,)
  kept = request_sizes(keeps_size=True)
  assert [size.rows for size in kept.stages] == [64, 32, 16, 8] and {size.slots for size in kept.stages} == {608}
  assert kept.admitting == 1 and kept.path(kept.stages[0], 608, 3) == kept.stages[1:]
  assert found.prompts(64) == 4 and found.prompts(2048) == 1 and request_sizes(rows=2).prompts(8) == 2


def test_every_prompt_fits_into_the_first_size_and_every_sample_into_the_last():
  rng = np.random.default_rng(0)
  for rows, widest, room, chunk in rng.integers(1, (300, 3000, 9000, 64), (300, 4)).tolist():
    for keeps in (False, True):
      found = request_sizes(rows=rows, widths=(widest,), room=room, chunk=chunk, keeps_size=keeps)
      (first,) = found.path(None, widest - 1 + chunk, rows)
      assert first == found.stages[0] and len(found.stages) <= 4
      path = found.path(first, widest - 1 + room - 1 + chunk, 1)
      assert (path or (first,))[-1] == found.stages[-1] and found.stages[-1].slots == widest + room + chunk


def test_rows_of_a_shard():
  assert sizes.shard_rows(256, 256, 1) == 256 and sizes.shard_rows(100, 64, 8) == 8
  assert sizes.shard_rows(6, 256, 8) == 1 and sizes.shard_rows(5, 2, 8) == 1  # No fewer rows than devices.


def test_slots_close_up():
  """Those in front stay where they are, those behind take what is free, in order; the rest is anybody's."""

  def close_up(held, rows):
    return slots.closed_up(np.array(held, int), rows).tolist()

  assert close_up([1, 5, 7], 4) == [5, 1, 7, 3]
  assert close_up([4, 5, 6, 7], 4) == [4, 5, 6, 7]
  assert close_up([0, 2], 4) == close_up([], 4) == [0, 1, 2, 3]


@dataclasses.dataclass(frozen=True)
class OfPrompt:
  """n samples of a prompt, in a queue."""

  prefix: int
  n: int

  def __len__(self):
    return self.n


def of_prompts(prompts, n):
  return [OfPrompt(prompt, n) for prompt in prompts]


def take(waiting, shard):
  """(Prompt, which of its samples) that a shard gets."""
  got = waiting.take(shard)
  return got and (got[0].prefix, got[1])


def drain(waiting, shards, order):
  """Return what each of the shards gets if they take in this order, over and over."""
  taken = [[] for _ in range(shards)]
  for shard in itertools.cycle(order):
    got = take(waiting, shard)
    if got is None:
      return taken
    taken[shard].append(got)


@pytest.mark.parametrize('order', [(0, 1, 2), (2, 0), (1,), (0, 0, 0, 1, 2)])
@pytest.mark.parametrize('prompts', [[2, 0, 1], [5], list(range(20))])
def test_the_queue_hands_out_every_sample_once(order, prompts):
  taken = drain(queue.Queue(3, of_prompts(prompts, 7)), 3, order)
  everything = sorted(got for shard in taken for got in shard)
  assert everything == sorted((prompt, i) for prompt in prompts for i in range(7))


def test_shards_keep_to_their_prompts_while_there_are_enough():
  taken = drain(queue.Queue(3, of_prompts(range(6), 4)), 3, (0, 1, 2))
  assert [sorted({prompt for prompt, _ in shard}) for shard in taken] == [[0, 3], [1, 4], [2, 5]]
  waiting = queue.Queue(2, of_prompts([4, 7], 8))
  assert take(waiting, 0) == (4, 0) and take(waiting, 1) == (7, 0) and waiting.left == 14
  assert waiting.holds(0, 4) and waiting.holds(1, 7) and not waiting.holds(0, 7)
  for _ in range(7):
    waiting.take(0)
  assert not waiting.holds(0, 4)
  assert take(waiting, 0) == (7, 4) and waiting.holds(0, 7)  # Half of what the other has left.


def test_what_is_removed_from_the_queue_is_handed_to_nobody():
  waiting = queue.Queue(2, of_prompts([4, 7, 4], 3))
  waiting.add(OfPrompt(9, 2))
  assert take(waiting, 0) == (4, 0) and waiting.left == 10
  assert waiting.holds(0, 4) and waiting.holds(1, 9)  # It waits for any shard.
  waiting.remove(lambda samples: samples.prefix == 4)
  assert waiting.left == 5 and not waiting.holds(0, 4)
  taken = [take(waiting, shard) for shard in (1, 0, 0, 1, 1)]
  assert sorted(taken) == [(7, 0), (7, 1), (7, 2), (9, 0), (9, 1)]
  assert waiting.take(0) is None and not waiting.left
