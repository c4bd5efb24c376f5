"""One draw: truncation as transformers does it, samples that follow the distribution, noise that is never shared."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from sdpo_jax.config import MeshConfig
from sdpo_jax.distributed.mesh import make_mesh
from sdpo_jax.planner import hlo
from sdpo_jax.rollout import sampling
from tests.compiling import compile_as_users, users_options
from tests.tpu_programs import slice_mesh

KNOBS = [
  dict(),
  dict(temperature=0.6),
  dict(temperature=1.7, top_k=5),
  dict(top_p=0.8),
  dict(temperature=0.6, top_p=0.95, top_k=20),
  dict(temperature=2.0, min_p=0.2),
  dict(temperature=1.3, top_k=12, top_p=0.7, min_p=0.1),
]

DRAWS = 20000  # Rows of one shape, for one program.


def make_params(rows, *, temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0, seed=0, sample_id=None, step=0):
  """Parameters of `rows` rows; scalars or arrays."""

  def fill(value, dtype):
    return jnp.broadcast_to(jnp.asarray(value, dtype), (rows,))

  return sampling.SamplingParams(
    temperature=fill(temperature, jnp.float32),
    top_p=fill(top_p, jnp.float32),
    top_k=fill(top_k, jnp.int32),
    min_p=fill(min_p, jnp.float32),
    seed=fill(seed, jnp.uint32),
    sample_id=jnp.arange(rows, dtype=jnp.int32) if sample_id is None else fill(sample_id, jnp.int32),
    step=fill(step, jnp.int32),
    max_tokens=fill(1, jnp.int32),
    stop_ids=jnp.full((rows, 1), -1, jnp.int32),
  )


def draw(logits, params, position=0):
  return sampling.sample(logits, params, sampling.row_keys(params), jnp.asarray(position, jnp.int32))


sample = jax.jit(draw)
sample_as_users = jax.jit(draw, compiler_options=users_options())


truncate = jax.jit(sampling.truncate, static_argnames='mesh')


def by_transformers(logits, temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0):
  """[B, V] float64 probabilities of transformers' warpers in their order; 0 where truncated."""
  scores = torch.tensor(np.asarray(logits), dtype=torch.float32) / temperature
  if top_k > 0:
    scores = TopKLogitsWarper(top_k)(None, scores)
  if top_p < 1:
    scores = TopPLogitsWarper(top_p)(None, scores)
  if min_p > 0:
    scores = MinPLogitsWarper(min_p)(None, scores)
  return torch.softmax(scores.double(), dim=-1).numpy()


def shifted(logits, temperature=1.0):
  logits = jnp.asarray(logits)
  return (logits - logits.max(-1, keepdims=True)) / temperature


@pytest.mark.parametrize('vocabulary', [7, 300, 1000])
@pytest.mark.parametrize('knobs', KNOBS[2:])
def test_truncation_keeps_what_transformers_keeps(vocabulary, knobs):
  rng = np.random.default_rng(vocabulary)
  scale = np.array([0.1, 1, 3, 10], np.float32)[:, None]
  logits = np.concatenate([rng.normal(size=(4, vocabulary)).astype(np.float32) * scale for _ in range(8)])
  logits[::3, :2] = -np.inf
  expected = by_transformers(logits, **knobs)

  def rows(key, default):
    return jnp.full(len(logits), knobs.get(key, default))

  weights = truncate(
    shifted(logits, knobs.get('temperature', 1.0)), rows('top_k', -1), rows('top_p', 1.0), rows('min_p', 0.0)
  )
  weights = np.asarray(weights, np.float64)
  np.testing.assert_array_equal(weights > 0, expected > 0)
  np.testing.assert_allclose(weights / weights.sum(-1, keepdims=True), expected, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize('vocabulary', [50, 1024, pytest.param(3000, marks=pytest.mark.slow)])
def test_every_p_and_k_keeps_the_smallest_set(vocabulary):
  """Against sorting, over many random rows with a knob each."""
  rng = np.random.default_rng(0)
  logits = (rng.normal(size=(400, vocabulary)) * rng.uniform(0.1, 6, (400, 1))).astype(np.float32)
  top_p, top_k = (
    rng.uniform(0.01, 0.999, 400).astype(np.float32),
    rng.integers(1, vocabulary * 6 // 5, 400).astype(np.int32),
  )
  weights = np.asarray(truncate(shifted(logits), jnp.asarray(top_k), jnp.asarray(top_p), jnp.zeros(400)))
  for row in range(400):
    order = np.argsort(-logits[row], kind='stable')[: top_k[row]]
    probabilities = np.exp(logits[row, order].astype(np.float64))
    before = np.cumsum(probabilities) - probabilities
    kept = set(order[before < float(top_p[row]) * probabilities.sum()].tolist())
    assert set(np.flatnonzero(weights[row]).tolist()) == kept


def test_ties_at_the_edge():
  """Top-k keeps all that tie with the k-th; top-p keeps as many as reach the mass, first in the vocabulary first."""
  logits = jnp.zeros((3, 8))
  weights = np.asarray(truncate(logits, jnp.array([3, -1, -1]), jnp.array([1.0, 0.5, 0.51]), jnp.zeros(3)))
  assert (weights[0] > 0).all()
  assert np.flatnonzero(weights[1]).tolist() == [0, 1, 2, 3]
  assert np.flatnonzero(weights[2]).tolist() == [0, 1, 2, 3, 4]


def test_rows_that_do_not_count_are_left_whole():
  logits, count = jnp.tile(jnp.asarray([0.0, -1.0, -2.0]), (4, 1)), jnp.array([1, 1, -1, -1])
  kept = truncate(logits, count, jnp.array([1.0, 1, 0.1, 0.1]), jnp.zeros(4), live=jnp.array([True, False] * 2)) > 0
  assert kept.sum(-1).tolist() == [1, 3, 1, 3]


def test_logits_that_differ_by_less_than_their_weights_do():
  """exp makes one weight of them: top-k and top-p still take the larger logit first."""
  logits = jnp.tile(jnp.asarray([-2e-9, -9.0, 0.0, -1e-9, -1e-9]), (5, 1))
  assert len(set(np.exp(np.asarray(logits[0])).tolist())) == 2
  top_k, top_p = jnp.array([1, 2, -1, -1, -1]), jnp.array([1.0, 1.0, 0.2, 0.4, 0.7])
  kept = np.asarray(truncate(logits, top_k, top_p, jnp.zeros(5))) > 0
  assert [np.flatnonzero(row).tolist() for row in kept] == [[2], [2, 3, 4], [2], [2, 3], [2, 3, 4]]


@pytest.mark.slow
def test_a_divided_vocabulary_stays_where_it_lies():
  """With the vocabulary over four devices no step gathers it, and what is drawn is the same."""
  rng = np.random.default_rng(5)
  rows, size = 8, 4736  # As 151936: few divisors but 2 ** 7.
  logits = jnp.asarray(rng.normal(size=(rows, size)) * 2, jnp.float32)
  params = make_params(rows, temperature=np.array([0, 1, 1, 0.7] * 2), top_p=np.array([1, 0.9] * 4), top_k=[-1, 50] * 4)
  mesh = make_mesh(MeshConfig(fsdp=2, tensor=4))

  def place(*axes):
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))

  divided = jax.device_put(logits, place('fsdp', 'tensor'))
  by_row = jax.tree.map(lambda leaf: jax.device_put(leaf, place('fsdp') if leaf.ndim else place()), params)
  compiled = compile_as_users(sample.lower(divided, by_row))
  text = compiled.as_text()
  moved = re.findall(r'f32\[([\d,]+)\]\S* (?:all-gather|all-to-all|collective-permute|all-reduce)\(', text)
  sizes = [math.prod(map(int, shape.split(','))) for shape in moved]
  assert sizes and max(sizes) < rows * size / 32, moved
  assert ' sort(' not in text and 'TopK' not in text
  apart, together = compiled(divided, by_row), sample(logits, params)
  np.testing.assert_array_equal(apart.token, together.token)
  np.testing.assert_allclose(apart.sampling_log_prob, together.sampling_log_prob, atol=1e-5)


def rows_of_every_kind(count, size, shard):
  """Logits [9 · count, size] shifted after temperature, top_k, top_p and min_p."""
  rng = np.random.default_rng(0)
  normal = rng.normal(size=(count, size)) * rng.uniform(0.1, 8, (count, 1))
  zipf = rng.permuted(-np.log(np.arange(1, size + 1)) * rng.uniform(1, 4, (count, 1)), axis=1)
  padded, one = np.where(np.arange(size) < size - 200, normal, -np.inf), np.eye(count, size) * 50
  # The likeliest tokens are 128 apart in one shard, and in half of the rows the first two are equal.
  crowded, order = np.full((count, size), -12.0), np.arange(len(range(0, shard, 128)))
  crowded[:, :shard:128] = rng.permuted(-0.3 * np.maximum(order, np.arange(count)[:, None] % 2), axis=1)
  kinds = [zipf, zipf, normal, padded, one, np.round(zipf), np.where(zipf < -9, -np.inf, zipf), crowded, crowded * 0]
  logits = np.concatenate(kinds).astype(np.float32)
  temperature, top_k, top_p, min_p = (
    rng.choice(values, len(logits)).astype(dtype)
    for values, dtype in (
      ([0.01, 0.6, 1, 1, 5], np.float32),
      ([-1, -1, 1, 4, 20, size // 2], np.int32),
      ([0, 0.5, 0.75, 0.95, 0.99, 1], np.float32),
      ([0, 0, 0.05], np.float32),
    )
  )
  # Rows of the first kind need the mass of a whole number of tokens, but for the last bits of float32.
  temperature[:count] = 1
  sums = np.cumsum(np.sort(np.asarray(jnp.exp(shifted(zipf.astype(np.float32)))))[:, ::-1], axis=1)
  exact = sums[np.arange(count), rng.integers(1, 60, count)] / sums[:, -1]
  top_p[:count] = exact + np.spacing(exact) * rng.integers(-2, 3, count)
  return shifted(logits, temperature[:, None]), top_k, top_p, min_p


def by_row_and_token(mesh, axes):
  return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*['fsdp', 'tensor'][:axes]))


@pytest.mark.parametrize('by_mass', [True, False], ids=['top-p', 'top-k'])
def test_candidates_of_shards_keep_the_same_tokens(by_mass):
  """Bit for bit what passes over the whole vocabulary keep, in batches that are proven as in others."""
  mesh = make_mesh(MeshConfig(fsdp=2, tensor=4))

  def put(*values):
    return [jax.device_put(value, by_row_and_token(mesh, value.ndim)) for value in values]

  @jax.jit
  def proven(scaled, top_k, top_p):
    # What a batch keeps does not show which of its rows are proven.
    find, weights = sampling._by_candidates, jnp.exp(scaled)  # noqa: SLF001
    active = top_p < 1 if by_mass else top_k > 0
    target = top_p * jnp.sum(weights, axis=-1) if by_mass else top_k.astype(jnp.float32)
    low, proven = find(weights, target, active, mesh, by_mass=by_mass)
    return jnp.where(weights >= low[:, None], weights, 0.0), proven & active

  scaled, top_k, top_p, min_p = rows_of_every_kind(48, 2800, 700)
  alone = (scaled, top_k * 0, top_p, min_p * 0) if by_mass else (scaled, top_k, top_p * 0 + 1, min_p * 0)
  expected = np.asarray(truncate(*put(*alone)))
  kept, shown = map(np.asarray, proven(*put(*alone[:3])))
  assert shown.mean() > 0.2 and not shown[-48:].any()
  np.testing.assert_array_equal(kept[shown], expected[shown])
  if by_mass:
    all_proven = [values[np.resize(np.flatnonzero(shown), len(shown))] for values in alone]
    for batch in (all_proven, (scaled, top_k, top_p, min_p)):
      np.testing.assert_array_equal(truncate(*put(*batch), mesh=mesh), truncate(*put(*batch)))


@pytest.mark.tpu_compiler
def test_shards_that_prove_a_threshold_exchange_candidates_once():
  """No pass over the vocabulary, let alone a loop of them: those stand in the branch of batches that are not proven."""
  mesh = slice_mesh('v5e:2x4', 2, 4)
  logits, *knobs = (
    jax.ShapeDtypeStruct(shape, dtype, sharding=by_row_and_token(mesh, len(shape)))
    for shape, dtype in (((16, 4096), jnp.float32), ((16,), jnp.int32), ((16,), jnp.float32), ((16,), jnp.float32))
  )
  text = truncate.lower(logits, *knobs, mesh=mesh).compile().as_text()
  sent = hlo.collectives(hlo.trace(hlo.parse(text), cases=('top_k', 'top_p')), dict(mesh.shape))
  assert {(each.kind, *each.axes): each.count for each in sent} == {
    ('all-gather', 'tensor'): 2,  # Candidates of top-k and of top-p.
    ('all-reduce', 'tensor'): 1,  # The total, of which top-p is a part.
    ('all-reduce', 'fsdp'): 3,  # Whether any row has top-k or top-p, whether all are proven, twice.
  }
  assert text.count(' all-reduce(') > 10 and ' while(' in text


def test_extreme_rows_leave_the_most_likely_token():
  logits = jnp.asarray([[-jnp.inf, 5.0, -jnp.inf, -jnp.inf]] * 3 + [[0.0, 80.0, -3e38, -jnp.inf]])
  params = make_params(4, top_p=[1e-9, 1.0, 0.5, 0.0], top_k=[-1, 1, 3, 4], min_p=[0.0, 0.5, 0.0, 0.9])
  drawn = sample(logits, params)
  assert drawn.token.tolist() == [1, 1, 1, 1]
  for values in (drawn.sampling_log_prob, drawn.model_log_prob, drawn.entropy):
    np.testing.assert_allclose(values, 0, atol=1e-6)


def test_tokens_that_cannot_be_drawn_never_are():
  logits = np.random.default_rng(0).normal(size=(1, 300)).astype(np.float32)
  logits[0, 170:] = -np.inf
  drawn = sample(jnp.tile(jnp.asarray(logits), (DRAWS, 1)), make_params(DRAWS, temperature=5.0))
  assert int(drawn.token.max()) < 170
  assert bool(jnp.isfinite(drawn.sampling_log_prob).all() & jnp.isfinite(drawn.entropy).all())


# One level of the draw, blocks with padding behind the last, and blocks that divide the vocabulary.
@pytest.mark.parametrize(
  ('vocabulary', 'knobs'),
  [
    pytest.param(vocabulary, knobs, marks=own if knobs is KNOBS[-1] else marks)
    for vocabulary, own, marks in (
      (12, (), ()),
      (300, (), pytest.mark.slow),
      (1024, pytest.mark.slow, pytest.mark.campaign),
    )
    for knobs in KNOBS
  ],
)
def test_samples_follow_the_truncated_distribution(vocabulary, knobs):
  draws = DRAWS
  logits = np.random.default_rng(1).normal(size=(1, vocabulary)).astype(np.float32) * 1.5
  expected = by_transformers(logits, **knobs)[0]
  tokens = np.asarray(sample(jnp.tile(jnp.asarray(logits), (draws, 1)), make_params(draws, **knobs)).token)
  counts = np.bincount(tokens, minlength=vocabulary)
  assert counts[expected == 0].sum() == 0
  # Chi-square over cells that expect at least 20 draws, the rest pooled: its mean is the number of cells less one.
  common = expected * draws >= 20
  cells = np.append(expected[common], max(1 - expected[common].sum(), 0)) * draws
  seen = np.append(counts[common], counts[~common].sum())
  cells, seen = cells[cells > 1e-3], seen[cells > 1e-3]
  degrees = max(len(cells) - 1, 1)
  statistic = ((seen - cells) ** 2 / cells).sum()
  assert statistic < degrees + 5 * np.sqrt(2 * degrees), (statistic, degrees)


def test_log_probs_and_entropy():
  rng = np.random.default_rng(2)
  rows = 64
  logits = (rng.normal(size=(rows, 40)) * 2).astype(np.float32)
  temperature = rng.uniform(0.3, 2, rows).astype(np.float32)
  temperature[::8] = 0
  drawn = sample(jnp.asarray(logits), make_params(rows, temperature=temperature, top_p=0.9, top_k=10))
  plain = torch.log_softmax(torch.tensor(logits).double(), -1).numpy()
  at = np.arange(rows), np.asarray(drawn.token)
  np.testing.assert_allclose(drawn.model_log_prob, plain[at], atol=1e-5)
  np.testing.assert_allclose(drawn.entropy, -(np.exp(plain) * plain).sum(-1), atol=1e-5)
  for row in range(rows):
    if temperature[row] == 0:
      assert at[1][row] == logits[row].argmax() and float(drawn.sampling_log_prob[row]) == 0
    else:
      p = by_transformers(logits[row : row + 1], float(temperature[row]), top_p=0.9, top_k=10)[0]
      np.testing.assert_allclose(float(drawn.sampling_log_prob[row]), np.log(p[at[1][row]]), atol=1e-5)


def test_no_two_draws_share_noise():
  """All 64 bits of every (seed, step, sample, position) differ, and so do the bits of neighbours in any of them."""
  seen = set()
  for seed in (0, 1):
    for step in (0, 1):
      keys = sampling.row_keys(make_params(64, seed=seed, step=step))
      for position in range(64):
        bits = np.asarray(sampling.noise(keys, jnp.int32(position)))
        seen.update(map(tuple, bits.tolist()))
  assert len(seen) == 2 * 2 * 64 * 64


@pytest.mark.parametrize(
  'sample', [pytest.param(sample, id='quickly'), pytest.param(sample_as_users, id='as users', marks=pytest.mark.slow)]
)
def test_a_draw_depends_on_nothing_but_its_own_row(sample):
  """Bit for bit: alone, in another place, beside rows of other settings."""
  rng = np.random.default_rng(3)
  logits = jnp.asarray(rng.normal(size=(12, 333)) * 2, jnp.float32)
  knobs = dict(
    temperature=np.array([0, 1, 0.7, 1, 1, 2, 1, 0.6, 0, 1, 1, 1], np.float32),
    top_p=np.array([1, 1, 0.9, 1, 0.5, 1, 1, 0.95, 0.5, 1, 1, 0.2], np.float32),
    top_k=np.array([-1, -1, 5, 3, -1, -1, 0, 20, 1, -1, 400, -1], np.int32),
    min_p=np.array([0, 0, 0, 0.1, 0, 0.3, 0, 0, 0, 0, 0, 0], np.float32),
    seed=np.arange(12, dtype=np.uint32) % 3,
    sample_id=np.arange(12, dtype=np.int32) * 7,
  )

  def take(rows):
    return sample(logits[rows], make_params(len(rows), **{k: v[rows] for k, v in knobs.items()}, step=4), 9)

  together = take(np.arange(12))
  shuffled = take(np.arange(12)[::-1])
  for name in ('token', 'sampling_log_prob', 'model_log_prob', 'entropy'):
    np.testing.assert_array_equal(getattr(together, name), getattr(shuffled, name)[::-1])
    for row in range(12):
      np.testing.assert_array_equal(getattr(together, name)[row], getattr(take(np.array([row])), name)[0])


@pytest.mark.slow
def test_without_truncation_nothing_is_sorted_or_bisected():
  """The compiled program holds no sort at all, and its bisection loops stand behind conditionals."""
  logits, params = jnp.zeros((4, 1000)), make_params(4)
  text = compile_as_users(sample.lower(logits, params)).as_text()
  assert ' sort(' not in text and 'TopK' not in text
  entry = text[text.index('ENTRY ') :]
  assert ' while(' not in entry and ' conditional(' in entry
