"""The one loss: against NumPy in float64, finite differences, its own unchunked form, and its properties."""

import dataclasses
import functools

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdpo_jax.config import Config
from sdpo_jax.objective.aggregation import loss_coefficients
from sdpo_jax.objective.log_probs import token_log_probs
from sdpo_jax.objective.loss import ObjectiveConfig, objective
from sdpo_jax.training.specs import objective_config
from sdpo_jax.types import TeacherSignal
from tests.golden.compiling import quick
from tests.objective.numpy_loss import TERMS, B, D, T, V, arrays, numpy_loss, problem, signal
from tests.objective.objective_from_logits import objective_from_logits


@functools.partial(jax.jit, static_argnames=('config', 'gradients', 'mix_rate'), compiler_options=quick())
def chunked(x, config, gradients=('hidden', 'unembedding'), mix_rate=None):
  """(loss, aux), gradients by name."""

  def value(trained):
    y = x | trained
    return objective(
      y['hidden'],
      y['unembedding'],
      signal(y, mix_rate),
      **{name: y[name] for name in TERMS if name in y},
      config=config,
    )

  return jax.value_and_grad(value, has_aux=True)({name: x[name] for name in gradients})


@functools.partial(jax.jit, static_argnames=('config', 'mix_rate'), compiler_options=quick())
def unchunked(x, config, mix_rate=None):
  def value(trained):
    y = x | trained

    def logits(name):
      return y[f'{name}hidden'] @ y[f'{name}unembedding'].T

    mix = {} if mix_rate is None else dict(mix_logits=logits('mix_'), mix_rate=mix_rate)
    return objective_from_logits(
      logits(''), logits('teacher_'), **{name: y[name] for name in TERMS if name in y}, config=config, **mix
    )

  return jax.value_and_grad(value, has_aux=True)({name: x[name] for name in ('hidden', 'unembedding')})


CONFIGS = {
  'topk': ObjectiveConfig(distillation_topk=6, alpha=0.3, temperature=0.7, chunk_size=4, vocab_block=17),
  'renormalised': ObjectiveConfig(
    distillation_topk=6,
    distillation_add_tail=False,
    alpha=0.0,
    is_clip=None,
    chunk_size=7,
    vocab_block=40,
    kl_kind='k2',
  ),
  'full': ObjectiveConfig(distillation_topk=None, alpha=0.5, is_clip=0.8, chunk_size=100, vocab_block=9, kl_kind='k1'),
  'reverse': ObjectiveConfig(distillation_topk=None, alpha=1.0, temperature=1.6, chunk_size=1, vocab_block=13),
  'sampled': ObjectiveConfig(full_logit_distillation=False, alpha=1.0, chunk_size=4, vocab_block=11),
}


@pytest.mark.parametrize('name', CONFIGS)
def test_loss_gradient_and_per_token_values(name):
  """NumPy's value, the unchunked form's gradient, finite differences along a random direction, metrics of both."""
  config = CONFIGS[name]
  mix_rate = 0.3 if name in ('topk', 'reverse') else None
  x = problem()
  rng = np.random.default_rng(1)
  with jax.enable_x64(True):
    (loss, aux), gradient = chunked(arrays(x, jnp.float64), config, mix_rate=mix_rate)
    (plain, plain_aux), plain_gradient = unchunked(arrays(x, jnp.float64), config, mix_rate=mix_rate)
  assert loss.dtype == np.float64 and gradient['hidden'].dtype == np.float64
  expected, per_token = numpy_loss(x, config, mix_rate)
  np.testing.assert_allclose(loss, expected, rtol=1e-12)
  np.testing.assert_allclose(plain, expected, rtol=1e-12)
  np.testing.assert_allclose(aux['divergence'], per_token, rtol=1e-11, atol=1e-14)
  assert set(aux) == set(plain_aux)
  for key, value in aux.items():
    np.testing.assert_allclose(value, plain_aux[key], rtol=1e-9, atol=1e-12, err_msg=key)
  for key, value in gradient.items():
    np.testing.assert_allclose(value, plain_gradient[key], rtol=1e-9, atol=1e-12)
  if config.full_logit_distillation and config.is_clip is None:  # No factor without gradient.
    directions = {key: rng.standard_normal(value.shape) for key, value in gradient.items()}

    def shifted(step):
      return x | {key: x[key] + step * directions[key] for key in directions}

    difference = (
      numpy_loss(shifted(1e-6), config, mix_rate)[0] - numpy_loss(shifted(-1e-6), config, mix_rate)[0]
    ) / 2e-6
    slope = sum((np.asarray(gradient[key]) * directions[key]).sum() for key in gradient)
    np.testing.assert_allclose(slope, difference, rtol=1e-6)


def test_rollout_weights_of_the_loss_are_constants():
  """min(π/π_sampler, 1.5) on the divergence and the policy gradient, not on the entropy; no gradient flows through
  it.
  """
  x = problem(5)
  config = ObjectiveConfig(
    distillation_topk=6, alpha=0.3, is_clip=None, chunk_size=4, vocab_block=17, rollout_is_threshold=1.5
  )
  trained = ('hidden', 'unembedding', 'sampling_log_probs')
  names = (*TERMS, 'sampling_log_probs')
  rng = np.random.default_rng(0)
  log_softmax = x['hidden'] @ x['unembedding'].T
  log_softmax -= np.log(np.exp(log_softmax).sum(-1, keepdims=True))
  log_probs = np.take_along_axis(log_softmax, x['targets'][..., None], axis=-1)[..., 0]
  x['sampling_log_probs'] = log_probs + rng.normal(size=(B, T))
  weights = np.minimum(np.exp(log_probs - x['sampling_log_probs']), 1.5)
  assert 0 < (weights[x['mask'] > 0] == 1.5).sum() < x['mask'].sum()

  def value(weights, y):
    z = y | weights
    return objective(z['hidden'], z['unembedding'], signal(z), **{name: z[name] for name in names}, config=config)[0]

  def plain(z):
    logits, others = z['hidden'] @ z['unembedding'].T, z['teacher_hidden'] @ z['teacher_unembedding'].T
    return objective_from_logits(logits, others, **{name: z[name] for name in names}, config=config)[0]

  with jax.enable_x64(True):
    y = arrays(x, jnp.float64)
    program = jax.jit(jax.value_and_grad(value), compiler_options=quick())
    loss, gradient = jax.device_get(program({name: y[name] for name in trained}, y))
    unchunked_loss = jax.jit(plain, compiler_options=quick())(y)
  direction = {name: rng.standard_normal(x[name].shape) for name in ('hidden', 'unembedding')}

  def by_hand(step=0.0):
    moved = {name: x[name] + step * direction[name] for name in direction}
    return numpy_loss(x | moved | {name: x[name] * weights for name in ('distill_coef', 'policy_coef')}, config)[0]

  np.testing.assert_allclose([loss, unchunked_loss], by_hand(), rtol=1e-12)
  slope = sum((gradient[name] * direction[name]).sum() for name in direction)
  np.testing.assert_allclose(slope, (by_hand(1e-6) - by_hand(-1e-6)) / 2e-6, rtol=1e-6)
  assert not np.any(gradient['sampling_log_probs'])


DATA = {
  'topk': dict(distillation_topk=6, chunk_size=4, vocab_block=17),
  'renormalised': dict(distillation_topk=6, distillation_add_tail=False, chunk_size=7, vocab_block=40),
  'full': dict(distillation_topk=None, chunk_size=4, vocab_block=9),
}


@pytest.mark.parametrize('name', ['topk', pytest.param('renormalised', marks=pytest.mark.slow), 'full'])
def test_an_alpha_that_is_data_gives_the_loss_and_gradient_of_that_number(name):
  """As a service asks: one program, vmapped over an alpha for each request, the ends among them."""
  left_out = ('policy_coef', 'entropy_coef', 'advantages', 'kl_coef', 'initial_log_probs')
  x = {key: value for key, value in problem(4).items() if key not in left_out}
  alphas = np.array([0.0, 0.3, 1.0])
  settings = DATA[name] | dict(is_clip=None)
  rng = np.random.default_rng(2)
  trained = ('hidden', 'unembedding')
  direction = {key: rng.standard_normal(x[key].shape) for key in trained}

  def of(alpha, y):
    def value(weights):
      z = y | weights
      given = {key: z[key] for key in TERMS if key in z}
      return objective(
        z['hidden'], z['unembedding'], signal(z), **given, config=ObjectiveConfig(alpha=alpha, **settings)
      )[0]

    return jax.value_and_grad(value)({key: y[key] for key in trained})

  with jax.enable_x64(True):
    program = jax.jit(jax.vmap(of, (0, None)), compiler_options=quick())
    losses, gradients = jax.device_get(program(jnp.asarray(alphas), arrays(x, jnp.float64)))
  no_more = dict.fromkeys(left_out, np.zeros((B, T)))

  def by_hand(alpha, step=0.0):
    moved = {key: x[key] + step * direction[key] for key in trained}
    return numpy_loss(x | no_more | moved, ObjectiveConfig(alpha=alpha, **settings))[0]

  for place, alpha in enumerate(alphas.tolist()):
    np.testing.assert_allclose(losses[place], by_hand(alpha), rtol=1e-12)
    slope = sum((gradients[key][place] * direction[key]).sum() for key in trained)
    np.testing.assert_allclose(slope, (by_hand(alpha, 1e-6) - by_hand(alpha, -1e-6)) / 2e-6, rtol=1e-6)


def test_float32_is_close_and_its_type_kept():
  x = problem()
  (loss, aux), gradient = chunked(arrays(x, jnp.float32), CONFIGS['topk'])
  assert loss.dtype == aux['divergence'].dtype == gradient['unembedding'].dtype == jnp.float32
  np.testing.assert_allclose(loss, numpy_loss(x, CONFIGS['topk'])[0], rtol=1e-5)


def test_bfloat16_states_give_float32_logits_and_bfloat16_gradients():
  x = problem()
  rounded = {
    name: np.asarray(jnp.asarray(v, jnp.bfloat16), np.float64) if 'hidden' in name or 'unembed' in name else v
    for name, v in x.items()
  }
  low = {
    name: jnp.asarray(v, jnp.bfloat16) if 'hidden' in name or 'unembed' in name else v
    for name, v in arrays(x, jnp.float32).items()
  }
  (loss, aux), gradient = chunked(low, CONFIGS['topk'])
  assert loss.dtype == aux['log_prob'].dtype == jnp.float32
  assert gradient['hidden'].dtype == gradient['unembedding'].dtype == jnp.bfloat16
  np.testing.assert_allclose(loss, numpy_loss(rounded, CONFIGS['topk'])[0], rtol=1e-4)


@pytest.mark.slow
def test_one_gradient_may_be_left_out_or_both():
  x = arrays(problem(), jnp.float32)
  config = CONFIGS['topk']
  _, both = chunked(x, config)
  _, hidden = chunked(x, config, gradients=('hidden',))
  _, unembedding = chunked(x, config, gradients=('unembedding',))
  np.testing.assert_allclose(hidden['hidden'], both['hidden'], rtol=1e-4, atol=1e-6)  # By another order of sums.
  np.testing.assert_array_equal(unembedding['unembedding'], both['unembedding'])
  (loss, _), _ = chunked(x, config)
  alone = jax.jit(functools.partial(objective, config=config), compiler_options=quick())
  forward, _ = alone(x['hidden'], x['unembedding'], signal(x), **{n: x[n] for n in TERMS})
  np.testing.assert_allclose(forward, loss, rtol=1e-6)


def test_tied_embeddings_add_up():
  """An unembedding that also made the hidden states receives both gradients, scaled by what stands behind the loss."""
  x = arrays(problem(), jnp.float32)
  table = x['unembedding']

  def value(embedding, unembedding):
    hidden = jnp.tanh(embedding[x['targets']])
    loss, _ = objective(hidden, unembedding, signal(x), **{n: x[n] for n in TERMS}, config=CONFIGS['topk'])
    return 3.0 * loss

  tied = jax.jit(jax.grad(lambda table: value(table, table)), compiler_options=quick())
  halves = jax.jit(jax.grad(value, argnums=(0, 1)), compiler_options=quick())
  np.testing.assert_allclose(tied(table), sum(halves(table, table)), rtol=1e-4, atol=1e-6)


def test_nothing_flows_to_the_teacher_or_through_the_metrics():
  x = arrays(problem(), jnp.float32)

  def call(y):
    return objective(y['hidden'], y['unembedding'], signal(y, 0.5), **{n: y[n] for n in TERMS}, config=CONFIGS['topk'])

  names = ('teacher_hidden', 'teacher_unembedding', 'mix_hidden', 'mix_unembedding', 'distill_coef', 'old_log_probs')

  @functools.partial(jax.jit, compiler_options=quick())
  def slopes_of(y):
    through_metrics = jax.grad(lambda hidden: call(x | {'hidden': hidden})[1]['divergence'].sum())
    return jax.grad(lambda y: call(x | y)[0])(y), through_metrics(y['hidden'])

  slopes, through_metrics = slopes_of({name: x[name] for name in (*names, 'hidden')})
  assert all(not np.any(slopes[name]) for name in names) and np.any(slopes['hidden'])
  assert not np.any(through_metrics)


small = CONFIGS['topk']


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6))
def test_masked_tokens_have_no_effect_whatever_they_hold(seed):
  x = problem(seed)
  (loss, aux), gradient = chunked(arrays(x, jnp.float32), small)
  dead = x['mask'] == 0
  for name in (
    'hidden',
    'teacher_hidden',
    'old_log_probs',
    'advantages',
    'distill_coef',
    'policy_coef',
    'entropy_coef',
    'kl_coef',
    'initial_log_probs',
  ):
    x[name][dead] = np.nan
  x['targets'][dead] = 0
  (after, after_aux), after_gradient = chunked(arrays(x, jnp.float32), small)
  assert after == loss
  jax.tree.map(np.testing.assert_array_equal, (aux, gradient), (after_aux, after_gradient))
  assert not np.any(np.asarray(gradient['hidden'])[dead])


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 10**6))
def test_all_masked_is_zero(seed):
  x = problem(seed)
  x['mask'] *= 0
  (loss, aux), gradient = chunked(arrays(x, jnp.float32), small)
  assert loss == 0
  assert all(not np.any(leaf) for leaf in jax.tree.leaves((aux, gradient)))


@pytest.mark.parametrize(
  'chunk_size,vocab_block',
  [
    (2, 7),
    pytest.param(15, 1, marks=pytest.mark.slow),
    pytest.param(1, 40, marks=pytest.mark.campaign),
    pytest.param(1000, 1000, marks=pytest.mark.campaign),
  ],
)
def test_chunk_sizes_change_nothing(chunk_size, vocab_block):
  x = problem(3)
  with jax.enable_x64(True):
    x = arrays(x, jnp.float64)
    expected = chunked(x, small)
    ours = chunked(x, dataclasses.replace(small, chunk_size=chunk_size, vocab_block=vocab_block))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-13), ours, expected)


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(['token-mean', 'seq-mean-token-mean']), st.sampled_from([None, 1]))
def test_micro_batches_add_up_exactly(seed, mode, group_size):
  """Coefficients are made once for the batch, so any split of it gives the same loss and gradient."""
  x = problem(seed)
  x['distill_coef'] = loss_coefficients(x['mask'], mode, group_size=group_size)
  with jax.enable_x64(True):
    x = arrays(x, jnp.float64)
    (loss, _), gradient = chunked(x, small)
    parts = [chunked({n: v if 'unembedding' in n else v[i : i + 1] for n, v in x.items()}, small) for i in range(B)]
    parts, loss, gradient = jax.tree.map(np.asarray, (parts, loss, gradient))
  np.testing.assert_allclose(sum(part[0][0] for part in parts), loss, rtol=1e-12)
  np.testing.assert_allclose(
    sum(part[1]['unembedding'] for part in parts), gradient['unembedding'], rtol=1e-10, atol=1e-14
  )
  np.testing.assert_allclose(
    np.concatenate([part[1]['hidden'] for part in parts]), gradient['hidden'], rtol=1e-10, atol=1e-14
  )


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 10**6))
def test_student_at_teacher_has_no_divergence_and_no_gradient(seed):
  x = problem(seed)
  x['teacher_hidden'], x['teacher_unembedding'] = x['hidden'], x['unembedding']
  x['policy_coef'] = x['entropy_coef'] = x['kl_coef'] = np.zeros((B, T))
  with jax.enable_x64(True):
    (loss, _), gradient = chunked(arrays(x, jnp.float64), small)
  assert abs(float(loss)) < 1e-14
  assert all(np.max(np.abs(leaf)) < 1e-14 for leaf in gradient.values())


def test_all_but_one_token_and_a_tail_is_the_whole_vocabulary():
  with jax.enable_x64(True):
    x = arrays(problem(5), jnp.float64)

    def of(topk, alpha, trained):
      y = x | trained
      config = ObjectiveConfig(distillation_topk=topk, alpha=alpha, chunk_size=8)
      terms = {name: y[name] for name in TERMS}
      return objective(y['hidden'], y['unembedding'], signal(y), **terms, config=config)[0]

    trained = {name: x[name] for name in ('hidden', 'unembedding')}
    whole, tailed = (
      jax.jit(jax.value_and_grad(functools.partial(of, topk), argnums=1), compiler_options=quick())
      for topk in (None, V - 1)
    )
    for alpha in (0.0, 0.5, 1.0):
      (one, gradient), (other, expected) = (program(jnp.float64(alpha), trained) for program in (tailed, whole))
      np.testing.assert_allclose(one, other, rtol=1e-9)
      jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-9), gradient, expected)


def test_external_teacher_equals_the_same_distribution_from_states():
  """Token ids and log-probs of the student's own top K, in another order and padded, are the in-mesh top-K loss."""
  x = problem(7)
  config = ObjectiveConfig(distillation_topk=6, alpha=0.5, chunk_size=4)

  def log_softmax(z):
    return z - np.log(np.exp(z).sum(-1, keepdims=True))

  student = x['hidden'] @ x['unembedding'].T
  teacher = log_softmax(x['teacher_hidden'] @ x['teacher_unembedding'].T)
  ids = np.argsort(student, -1)[..., -6:]
  given_log_probs = np.take_along_axis(teacher, ids, -1)
  ids = np.concatenate([np.full((B, T, 2), -1), ids], -1)
  given_log_probs = np.concatenate([np.full((B, T, 2), np.nan), given_log_probs], -1)
  with jax.enable_x64(True):
    y = arrays(x, jnp.float64)
    external = TeacherSignal(token_ids=jnp.asarray(ids), log_probs=jnp.asarray(given_log_probs))

    def value(hidden, teacher):
      return objective(hidden, y['unembedding'], teacher, **{n: y[n] for n in TERMS}, config=config)

    program = jax.jit(jax.value_and_grad(value, has_aux=True), compiler_options=quick())
    ours, expected = program(y['hidden'], external), program(y['hidden'], signal(y))
  np.testing.assert_allclose(ours[0][0], expected[0][0], rtol=1e-12)
  np.testing.assert_allclose(ours[1], expected[1], rtol=1e-9, atol=1e-13)
  for name in ('divergence', 'student_tail', 'teacher_tail', 'teacher_coverage'):
    np.testing.assert_allclose(ours[0][1][name], expected[0][1][name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
  ('alpha', 'add_tail'),
  [
    (0.0, True),
    (0.5, False),
    pytest.param(0.5, True, marks=pytest.mark.campaign),
    pytest.param(1.0, False, marks=pytest.mark.slow),
  ],
)
def test_tokens_of_which_an_external_teacher_says_nothing_have_no_divergence(alpha, add_tail):
  """No ids at all, or what is not a number where nothing is weighed: as if their coefficient were 0."""
  x = problem(3)
  config = ObjectiveConfig(distillation_topk=3, alpha=alpha, distillation_add_tail=add_tail, chunk_size=4)
  rng = np.random.default_rng(0)
  ids = np.argsort(rng.random((B, T, V)), -1)[..., :3]
  log_probs = np.log(rng.dirichlet(np.ones(5), (B, T))[..., :3])
  untold, broken = np.zeros((B, T), bool), np.zeros((B, T), bool)
  untold[0, 0], broken[2, 1] = True, True
  x['mask'][[0, 2], [0, 1]] = 1
  x['distill_coef'] = np.where(broken, 0, x['distill_coef'] + untold)

  def value(hidden, ids, log_probs, coef):
    terms = {n: jnp.asarray(x[n], jnp.float32 if x[n].dtype == float else jnp.int32) for n in TERMS}
    teacher = TeacherSignal(token_ids=jnp.asarray(ids), log_probs=jnp.asarray(log_probs, jnp.float32))
    terms['distill_coef'] = jnp.asarray(coef, jnp.float32)
    return objective(hidden, jnp.asarray(x['unembedding'], jnp.float32), teacher, **terms, config=config)[0]

  program = jax.jit(jax.value_and_grad(value), compiler_options=quick())
  hidden = jnp.asarray(x['hidden'], jnp.float32)
  loss, gradient = program(
    hidden,
    np.where(untold[..., None], -1, ids),
    np.where(broken[..., None], np.nan, log_probs),
    x['distill_coef'],
  )
  expected = program(hidden, ids, log_probs, np.where(untold | broken, 0, x['distill_coef']))
  assert np.isfinite(gradient).all()
  np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
  np.testing.assert_allclose(gradient, expected[1], rtol=1e-5, atol=1e-6)


def test_a_teacher_may_pad_its_vocabulary_differently():
  """The first V - 2 entries are tokens; what stands behind them, on either side, counts for nothing."""
  x = problem(5)
  tokens = V - 2
  config = ObjectiveConfig(distillation_topk=None, alpha=0.5, chunk_size=4, vocab_block=4)
  x['targets'] %= tokens

  def value(hidden, teacher_unembedding):
    terms = {n: jnp.asarray(x[n], jnp.float32 if x[n].dtype == float else jnp.int32) for n in TERMS}
    teacher = TeacherSignal(hidden=jnp.asarray(x['teacher_hidden'], jnp.float32), unembedding=teacher_unembedding)
    unembedding = jnp.asarray(x['unembedding'], jnp.float32)
    return objective(hidden, unembedding, teacher, **terms, config=config, vocab_size=tokens)[0]

  hidden, matrix = jnp.asarray(x['hidden'], jnp.float32), jnp.asarray(x['teacher_unembedding'], jnp.float32)
  program = jax.jit(jax.value_and_grad(value), compiler_options=quick())
  expected = program(hidden, matrix)
  for entries in (V - 2, V + 5):
    padded = jnp.concatenate([matrix[:tokens], jnp.full((entries - tokens, D), 7.0)])
    ours = program(hidden, padded)
    np.testing.assert_allclose(ours[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(ours[1], expected[1], rtol=1e-5, atol=1e-6)


def test_support_replaces_the_top_k():
  x = arrays(problem(7), jnp.float32)
  config = ObjectiveConfig(distillation_topk=6, alpha=0.5, chunk_size=4)
  top = jax.lax.top_k(x['hidden'] @ x['unembedding'].T, 6)[1]

  def value(support):
    return objective(
      x['hidden'], x['unembedding'], signal(x), **{n: x[n] for n in TERMS}, config=config, support=support
    )[0]

  call = jax.jit(value, compiler_options=quick())
  np.testing.assert_allclose(call(top), call(None), rtol=1e-6)
  assert abs(call((top + 1) % V) - call(None)) > 1e-3


def test_without_old_log_probs_the_ratios_are_one():
  x = problem(2)
  states = (jnp.asarray(x[name], jnp.float32) for name in ('hidden', 'unembedding'))
  x['old_log_probs'] = np.asarray(token_log_probs(*states, jnp.asarray(x['targets']), small.temperature)[0])
  y = arrays(x, jnp.float32)
  given_old = chunked(y, small)
  y.pop('old_log_probs')
  current = chunked(y, small)
  live = x['mask'] > 0
  np.testing.assert_array_equal(np.asarray(current[0][1]['ratio'])[live], 1)
  np.testing.assert_array_equal(np.asarray(current[0][1]['ppo_ratio'])[live], 1)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), current, given_old)


def test_policy_gradient_alone_needs_no_teacher():
  x = problem(4)
  x['distill_coef'] = np.zeros((B, T))
  y = arrays(x, jnp.float32)
  loss, aux = objective(y['hidden'], y['unembedding'], None, **{n: y[n] for n in TERMS}, config=small)
  np.testing.assert_allclose(loss, numpy_loss(x, small)[0], rtol=1e-4)
  np.testing.assert_allclose(loss, aux['policy_loss'] - aux['entropy_bonus'] + aux['kl_loss'], rtol=1e-5)
  assert 'divergence' not in aux


@pytest.mark.slow  # By default test_golden.py has numbers of the reference.
def test_the_reference_s_published_figures():
  """Values and gradient norms of lasgroup/SDPO 0e6d510 on sines and cosines, float32."""
  b, t, v = np.meshgrid(np.arange(2), np.arange(4), np.arange(8), indexing='ij')
  student = jnp.asarray(2 * np.sin(1 + 1.7 * b + 0.9 * t + 0.6 * v), jnp.float32)
  teacher = jnp.asarray(2.5 * np.cos(0.3 + 1.1 * b + 0.5 * t + 0.8 * v), jnp.float32)
  targets = jnp.asarray(((3 * b + 5 * t + 1) % 8)[..., 0])
  old = jnp.asarray((-1.5 - 0.2 * b - 0.4 * t)[..., 0], jnp.float32)
  mask = np.array([[1, 1, 1, 1], [1, 1, 0, 0]], np.float32)
  rollout = np.array([[0.5, 1, 1.5, 2], [1, 0.25, 0, 0]], np.float32)
  eye = jnp.eye(8)

  def value(student, coefficients, config):
    return objective(
        student, eye, TeacherSignal(hidden=teacher, unembedding=eye), targets, jnp.asarray(mask), coefficients,
        old_log_probs=old, config=config,
      )[0]  # fmt: skip

  program = jax.jit(jax.value_and_grad(value), static_argnames='config', compiler_options=quick())

  def run(mode='token-mean', rows=(1, 1), weights=1.0, **settings):
    coefficients = loss_coefficients(mask * np.array(rows, np.float32)[:, None], mode) * weights
    config = ObjectiveConfig(**({'is_clip': None, 'distillation_topk': 3, 'chunk_size': 3} | settings))
    loss, gradient = program(student, coefficients, config=config)
    return float(loss), float(jnp.linalg.norm(gradient.ravel()))

  expected = [
    (run(distillation_topk=None, alpha=0.2), (0.11037705, 0.02503995)),
    (run(alpha=0.0), (0.51348448, 0.17839035)),
    (run(distillation_add_tail=False, alpha=0.5), (0.09720308, 0.04394075)),
    (run(full_logit_distillation=False, alpha=1.0), (0.15459602, 0.60326445)),
    (run(alpha=0.5, is_clip=2.0), (0.05265716, 0.02756530)),
    (run(alpha=1.0, is_clip=2.0, weights=rollout), (0.18323977, 0.09695297)),
    (run(alpha=0.5, mode='seq-mean-token-mean'), (0.11807370, 0.04228808)),
    (run(alpha=0.5, mode='seq-mean-token-sum', rows=(0, 1)), (0.21165633, 0.14364900)),
    (run(alpha=0.5, mode='seq-mean-token-sum', rows=(0, 0)), (0.0, 0.0)),  # NaN in the reference.
    (run(distillation_topk=8, alpha=0.5), (0.16346033, 0.03702862)),
  ]
  for ours, theirs in expected:
    np.testing.assert_allclose(ours, theirs, rtol=3e-6)


def test_forward_only_log_probs_and_entropy():
  x = problem(9)
  logits = x['hidden'] @ x['unembedding'].T / 0.7
  log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  with jax.enable_x64(True):
    y = arrays(x, jnp.float64)
    ours, entropy = token_log_probs(y['hidden'], y['unembedding'], y['targets'], 0.7, chunk_size=4, vocab_block=7)
    masked, _ = token_log_probs(y['hidden'], y['unembedding'], y['targets'], 0.7, chunk_size=4, mask=y['mask'])
  ours, entropy, masked = np.asarray(ours), np.asarray(entropy), np.asarray(masked)
  np.testing.assert_allclose(ours, np.take_along_axis(log_probs, x['targets'][..., None], -1)[..., 0], rtol=1e-12)
  np.testing.assert_allclose(entropy, -(np.exp(log_probs) * log_probs).sum(-1), rtol=1e-12)
  np.testing.assert_allclose(masked, ours * x['mask'], rtol=1e-12)


def test_settings_and_arguments_that_contradict_each_other_are_refused():
  for bad in (
    dict(alpha=1.5),
    dict(alpha=np.float32(-0.5)),
    dict(alpha=jnp.float32(2.0)),
    dict(distillation_topk=0),
    dict(is_clip=0.0),
    dict(temperature=np.float64(0.0)),
    dict(chunk_size=0),
  ):
    with pytest.raises(ValueError, match=next(iter(bad))):
      ObjectiveConfig(**bad)
  with pytest.raises(ValueError, match='alpha=1'):
    ObjectiveConfig(full_logit_distillation=False, alpha=0.5)
  assert ObjectiveConfig(full_logit_distillation=False, alpha=np.float32(1.0)).alpha == 1
  x = arrays(problem(), jnp.float32)
  states = (x['hidden'], x['unembedding'])
  terms = {n: x[n] for n in TERMS}
  for teacher in (
    TeacherSignal(),
    TeacherSignal(hidden=x['hidden']),
    TeacherSignal(hidden=x['hidden'], unembedding=x['unembedding'], mix_rate=0.5),
    TeacherSignal(token_ids=x['targets'][..., None]),
  ):
    with pytest.raises(ValueError, match='teacher'):
      objective(*states, teacher, **terms)
  with pytest.raises(ValueError, match='advantages'):
    objective(*states, signal(x), **(terms | {'advantages': None}))


def test_settings_come_from_the_configuration():
  config = Config()
  config.rollout.temperature, config.actor.self_distillation.alpha = 0.8, 1.0
  ours = objective_config(config)
  assert (ours.temperature, ours.alpha, ours.distillation_topk, ours.chunk_size) == (
    0.8,
    1.0,
    100,
    Config().actor.logits_chunk_size,
  )
