"""A sample depends on its prompt, settings, seed and number only: every draw is repeated from a full forward pass."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdpo_jax.config import MeshConfig
from sdpo_jax.distributed.mesh import make_mesh, parameter_sharding
from sdpo_jax.models import huggingface, parameters
from sdpo_jax.rollout import decode, queue, sampling, sizes, slots
from sdpo_jax.rollout import sampler as samplers

CONFIG = dict(
  model_type='qwen3',
  vocab_size=97,
  hidden_size=32,
  intermediate_size=48,
  num_hidden_layers=2,
  num_attention_heads=4,
  num_key_value_heads=2,
  head_dim=16,
  tie_word_embeddings=True,
  initializer_range=0.3,
)
SEED, STEP, N, ROOM, EOS, CLOSE = 3, 4, 3, 40, 7, 1e-4
NO_TEXT = types.SimpleNamespace(decode=lambda *_, **__: '')


@pytest.fixture(scope='module')
def model():
  return huggingface.init(CONFIG, jax.random.key(2))


@pytest.fixture(scope='module')
def request_():
  """40 prompts of 1 to 24 tokens, three samples each with settings of their own."""
  rng = np.random.default_rng(0)
  prompts = [rng.integers(1, 97, rng.integers(1, 25)).tolist() for _ in range(40)]
  total = 40 * N
  return prompts, dict(
    n=N,
    seed=SEED,
    step=STEP,
    max_tokens=np.clip(rng.lognormal(2.0, 1.0, total), 1, ROOM).astype(int),
    temperature=rng.choice([0.7, 1.0, 1.5], total),
    top_p=rng.choice([0.8, 0.95, 1.0], total),
    top_k=rng.choice([-1, 20], total),
    min_p=rng.choice([0.0, 0.05], total),
  )


def knobs_of(settings, samples):
  def rows(name, dtype):
    return jnp.asarray(settings[name][samples], dtype)

  return sampling.SamplingParams(
    **{name: rows(name, jnp.float32) for name in ('temperature', 'top_p', 'min_p')},
    **{name: rows(name, jnp.int32) for name in ('top_k', 'max_tokens')},
    seed=jnp.full(len(samples), SEED, jnp.uint32),
    sample_id=jnp.asarray(samples, jnp.int32),
    step=jnp.full(len(samples), STEP, jnp.int32),
    stop_ids=jnp.full((len(samples), 1), EOS, jnp.int32),
  )


@jax.jit
def again(logits, params, position):
  """Return the token drawn from full logits, and how far its uniform number is from the edge to another token."""
  keys = sampling.row_keys(params)
  scaled = (logits - logits.max(-1, keepdims=True)) / params.temperature[:, None]
  weights = sampling.truncate(scaled, params.top_k, params.top_p, params.min_p)
  edges = jnp.cumsum(weights, axis=-1) / jnp.sum(weights, axis=-1, keepdims=True)
  uniform = (sampling.noise(keys, position)[:, 0] >> 8).astype(jnp.float32) * 2.0**-24
  return sampling.sample(logits, params, keys, position), jnp.abs(edges - uniform[:, None]).min(-1)


def check(model, request_, rollouts):
  """Every token is what is drawn from the full forward pass; returns how many are another one that is close."""
  policy, params = model
  prompts, settings = request_
  tokens, places = [], []
  for sample in range(len(rollouts)):
    completion = rollouts.completion_tokens[sample][rollouts.completion_mask[sample]].tolist()
    assert len(completion) == settings['max_tokens'][sample] or completion[-1] == EOS
    assert EOS not in completion[:-1]
    assert rollouts.finish_reason[sample] == ('stop' if completion[-1] == EOS else 'length')
    prompt = prompts[sample // N]
    tokens.append(prompt + completion)
    places += [(sample, i, len(prompt) + i - 1) for i in range(len(completion))]
  whole = np.zeros((len(tokens), max(map(len, tokens))), np.int32)
  for row, sequence in zip(whole, tokens, strict=True):
    row[: len(sequence)] = sequence
  positions = np.broadcast_to(np.arange(whole.shape[1], dtype=np.int32), whole.shape)
  hidden, matrix, _ = jax.jit(policy.apply)({}, params, whole, positions, np.ones_like(whole))
  samples, index, at = np.array(places).T
  logits = decode.logits(hidden[samples, at], matrix, policy.vocab_size)
  drawn, distance = again(logits, knobs_of(settings, samples), jnp.asarray(index, jnp.int32))
  same = np.asarray(drawn.token) == whole[samples, at + 1]
  assert (np.asarray(distance)[~same] < CLOSE).all()
  for name in ('sampling_log_prob', 'model_log_prob', 'entropy'):
    ours = getattr(rollouts, f'{name}s' if name != 'entropy' else name)[samples, index]
    np.testing.assert_allclose(ours[same], getattr(drawn, name)[same], atol=2e-4)
  return int((~same).sum())


def draw(model, request_, **settings):
  prompts, of_samples = request_
  settings = dict(prompt_buckets=(24,), response_buckets=(ROOM,), stop_token_ids=(EOS,), max_batch_rows=8) | settings
  sampler = samplers.Sampler(model[0], NO_TEXT, **settings)
  return sampler.sample({}, model[1], prompts, **of_samples)


@pytest.mark.parametrize(
  'settings',
  [
    pytest.param(dict(), marks=pytest.mark.campaign),
    pytest.param(dict(max_batch_rows=1), marks=pytest.mark.slow),
    dict(max_batch_rows=5, decode_chunk=7, prompt_buckets=(4, 13, 30), response_buckets=(ROOM + 9,)),
    pytest.param(dict(max_batch_rows=120, decode_chunk=1), marks=pytest.mark.slow),
  ],
  ids=['eight slots', 'one by one', 'five slots, other buckets', 'all at once, one step a look'],
)
def test_samples_are_drawn_as_from_a_full_forward_pass(model, request_, settings):
  rollouts = draw(model, request_, **settings)
  assert check(model, request_, rollouts) <= 2, rollouts.completion_mask.sum()


@pytest.mark.parametrize(
  'order', [pytest.param('backwards', marks=pytest.mark.campaign), pytest.param('shuffled', marks=pytest.mark.slow)]
)
def test_the_order_of_arrival_changes_no_sample(model, request_, monkeypatch, order):
  monkeypatch.setattr(sizes, 'SMALLEST_CACHE', 16)
  monkeypatch.setattr(queue, 'REFILLS', 2)

  def permuted(shards, waiting):
    order_ = range(len(waiting))[::-1] if order == 'backwards' else np.random.default_rng(1).permutation(len(waiting))
    return queue.Queue(shards, [waiting[at] for at in order_])

  monkeypatch.setattr(slots, 'Queue', permuted)
  assert check(model, request_, draw(model, request_, max_batch_rows=7, decode_chunk=5)) <= 2


@pytest.mark.parametrize(
  'config',
  [
    pytest.param(MeshConfig(), id='fsdp', marks=pytest.mark.campaign),
    pytest.param(MeshConfig(fsdp=4, tensor=2), id='fsdp and tensor'),
  ],
)
def test_a_mesh_changes_no_sample(model, request_, config):
  """Shards with queues of their own, which take over what others have left."""
  policy, params = model
  mesh = make_mesh(config)

  def place(parameter, leaf):
    return jax.device_put(leaf, parameter_sharding(mesh, parameter.axes, parameter.shape))

  spread = policy.on(mesh), parameters.map_tree(place, policy.parameter_table(), params)
  rollouts = draw(spread, request_, mesh=mesh, max_batch_rows=16, decode_chunk=8)
  assert check(model, request_, rollouts) <= 2


@pytest.mark.slow
@pytest.mark.parametrize(
  'layers', [pytest.param(2, id='shallow', marks=pytest.mark.campaign), pytest.param(9, id='deep')]
)
def test_an_int8_cache_is_near_and_changes_no_sample_by_where_it_lies(layers, request_):
  """Half a per cent of a nat or so in the log-probs of the same tokens; the same samples for any slots and chunks."""
  policy, params = huggingface.init(CONFIG | {'num_hidden_layers': layers}, jax.random.key(2))
  rollouts = draw((policy, params), request_, quantized=True)
  other = draw((policy, params), request_, quantized=True, max_batch_rows=5, decode_chunk=9)
  np.testing.assert_array_equal(other.completion_tokens, rollouts.completion_tokens)
  prompts, _ = request_
  errors, spread = [], []
  for sample in range(0, len(rollouts), 7):
    completion = rollouts.completion_tokens[sample][rollouts.completion_mask[sample]]
    whole = np.concatenate([prompts[sample // N], completion]).astype(np.int32)
    whole = np.pad(whole, (0, 64 - len(whole)))[None]
    first = len(prompts[sample // N]) - 1
    hidden, matrix, _ = jax.jit(policy.apply)(
      {}, params, whole, np.arange(64, dtype=np.int32)[None], np.ones_like(whole)
    )
    plain = np.asarray(jax.nn.log_softmax(hidden[0] @ matrix.T))[np.arange(first, first + len(completion)), completion]
    errors.append(np.abs(plain - rollouts.model_log_probs[sample][: len(completion)]))
    spread.append(plain)
  errors = np.concatenate(errors)
  assert 0 < errors.mean() < 0.02 and errors.max() < 0.2, (errors.mean(), errors.max(), np.concatenate(spread).std())
