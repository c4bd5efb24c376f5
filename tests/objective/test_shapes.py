"""Every public function of the objective refuses arrays of the wrong rank, shape or type when it is traced."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdpo_jax.objective import divergences, importance, policy_gradient, terms, vocabulary
from sdpo_jax.objective.advantages import grpo_advantages
from sdpo_jax.objective.aggregation import loss_coefficients
from sdpo_jax.objective.chunks import over_active_tokens
from sdpo_jax.objective.fused import FusedSettings, SharedInputs, fused_loss
from sdpo_jax.objective.log_probs import log_probs_of_ids, scores, token_log_probs
from sdpo_jax.objective.loss import ObjectiveConfig, objective
from sdpo_jax.objective.sharded import Layout, VocabShard, over_devices
from sdpo_jax.objective.top_k import BlockwiseTopK, top_k, two_stage_top_k
from sdpo_jax.types import TeacherSignal
from tests.objective.objective_from_logits import objective_from_logits

B, T, D, V, K = 2, 3, 4, 9, 5
N = B * T


def floats(*shape):
  return jax.ShapeDtypeStruct(shape, jnp.float32)


def ints(*shape):
  return jax.ShapeDtypeStruct(shape, jnp.int32)


def loss_of(teacher_fields=(), **arguments):
  """`objective`, with the teacher's fields as arguments."""
  teacher = {name: arguments.pop(name) for name in teacher_fields}
  return objective(teacher=TeacherSignal(**teacher) if teacher else None, **arguments)


def scan(logits, **arguments):
  """`scan_vocabulary` over logits that are there."""
  logits_of = functools.partial(jax.lax.dynamic_slice_in_dim, logits, axis=1)
  return vocabulary.scan_vocabulary(VocabShard(V), logits_of, N, V, V, jnp.float32, **arguments)


def pull_back(gradients, hidden, unembedding, accumulator):
  gradients_of = functools.partial(jax.lax.dynamic_slice_in_dim, gradients, axis=1)
  return vocabulary.pull_back(gradients_of, hidden, unembedding, V, None, True, accumulator)


def loop(mask, operand, output):
  return over_active_tokens(mask, 2, operand, output, (), lambda carry, operand, valid: (carry, operand))


def terms_of(settings, log_prob, entropy, support, teacher_entropy, teacher_support, coefficient, active):
  scalars = ObjectiveConfig().term_scalars.of_type(jnp.float32)
  student = terms.StudentView(log_prob, entropy, support)
  teacher = terms.TeacherView(teacher_entropy, support=teacher_support, top1_in_support=teacher_entropy)
  tokens = terms.TokenInputs(active, active, coefficient)
  return terms.loss_terms(settings, scalars, student, teacher, tokens, active)


def distillation_of(log_prob, entropy):
  scalars = ObjectiveConfig().term_scalars
  settings = terms.TermSettings('sampled', 1.0, True, True)
  return terms.distillation_term(
    settings, scalars, terms.StudentView(log_prob, log_prob), terms.TeacherView(entropy, log_prob)
  )


def fused_loss_of(hidden, unembedding, mask):
  config = ObjectiveConfig()
  settings = FusedSettings.of(V, None, V, chunk_size=2, topk=K, terms=config.term_settings)
  tokens = terms.TokenInputs(jnp.zeros(mask.shape, int), mask, policy_coef=mask, advantages=mask)
  return fused_loss(settings, hidden, unembedding, tokens, SharedInputs(config.term_scalars))


def on_devices(hidden, unembedding, mask):
  layout = Layout(jax.sharding.Mesh(np.array(jax.devices()[:1]), ('data',)), ('data',))
  return over_devices(layout, layout.shard(V), lambda *_: None, hidden, unembedding, mask, ())


MATRIX = floats(V, D)
OWN = dict(hidden=floats(B, T, D), unembedding=MATRIX)
MIXED = OWN | dict(mix_hidden=floats(B, T, D), mix_unembedding=MATRIX, mix_rate=floats())
EXTERNAL = dict(token_ids=ints(B, T, K), log_probs=floats(B, T, K))
TOKENS = dict(
  targets=ints(B, T),
  mask=floats(B, T),
  distill_coef=floats(B, T),
  policy_coef=floats(B, T),
  entropy_coef=floats(B, T),
  old_log_probs=floats(B, T),
  advantages=floats(B, T),
  kl_coef=floats(B, T),
  initial_log_probs=floats(B, T),
)
STATES = dict(student_hidden=floats(B, T, D), student_unembedding=MATRIX)
TOPK = terms.TermSettings('topk', None, True, True)
PAIR = dict(student=floats(N, K), teacher=floats(N, K))
WRONG_PAIR = [dict(student=floats(N, 1)), dict(teacher=floats(N)), dict(student=ints(N, K)), dict(teacher=ints(N, K))]
WRONG_TOKENS = [
  dict(targets=floats(B, T)),
  dict(targets=ints(B, T, 1)),
  dict(mask=floats(B, 1)),
  dict(mask=floats(N)),
  *(dict([(name, shape)]) for name in list(TOKENS)[2:] for shape in (floats(B, 1), floats(N), ints(B, T))),
]

# name: (function, arguments that it takes, changes of them that it refuses)
CASES = {
  'floored': (divergences.floored, dict(log_probs=floats(N)), [dict(log_probs=ints(N))]),
  'with_tail': (
    divergences.with_tail,
    dict(log_probs=floats(N, K)),
    [dict(log_probs=floats()), dict(log_probs=ints(N))],
  ),
  'renormalised': (
    divergences.renormalised,
    dict(log_probs=floats(N, K)),
    [dict(log_probs=floats()), dict(log_probs=ints(N))],
  ),
  'log_ratios_to_mixture': (
    divergences.log_ratios_to_mixture,
    dict(student_log_probs=floats(N), teacher_log_probs=floats(N), alpha=floats()),
    [dict(student_log_probs=floats(1)), dict(teacher_log_probs=ints(N)), dict(alpha=floats(N))],
  ),
  'divergence_terms': (divergences.divergence_terms, PAIR | dict(alpha=floats()), [*WRONG_PAIR, dict(alpha=floats(1))]),
  'divergence_slopes': (
    divergences.divergence_slopes,
    PAIR | dict(alpha=floats()),
    [*WRONG_PAIR, dict(alpha=floats(1))],
  ),
  'divergence': (
    divergences.divergence,
    dict(student_log_probs=floats(N, K), teacher_log_probs=floats(N, K), alpha=floats()),
    [
      dict(student_log_probs=floats(N, 1)),
      dict(teacher_log_probs=ints(N, K)),
      dict(alpha=floats(1)),
      dict(student_log_probs=floats(), teacher_log_probs=floats()),
    ],
  ),
  'importance_ratio': (
    importance.importance_ratio,
    dict(log_probs=floats(B, T), old_log_probs=floats(B, T)),
    [dict(log_probs=floats(B, 1)), dict(old_log_probs=floats(N)), dict(log_probs=ints(B, T))],
  ),
  'dual_clip_ppo': (
    policy_gradient.dual_clip_ppo,
    dict(log_probs=floats(N), old_log_probs=floats(N), advantages=floats(N), clip_ratio_c=floats()),
    [
      dict(advantages=floats(1)),
      dict(advantages=ints(N)),
      dict(log_probs=floats(N, 1)),
      dict(old_log_probs=ints(N)),
      dict(clip_ratio_c=floats(1)),
    ],
  ),
  'kl_penalty': (
    functools.partial(policy_gradient.kl_penalty, kind='k3'),
    dict(log_probs=floats(N), reference_log_probs=floats(N)),
    [dict(log_probs=floats(1)), dict(reference_log_probs=ints(N))],
  ),
  'rollout_is_weights': (
    importance.rollout_is_weights,
    dict(old_log_probs=floats(B, T), rollout_log_probs=floats(B, T), mask=ints(B, T)),
    [
      dict(mask=floats(B)),
      dict(mask=floats(B, 1)),
      dict(old_log_probs=ints(B, T)),
      dict(rollout_log_probs=ints(B, T)),
      dict(old_log_probs=floats(N), rollout_log_probs=floats(N), mask=floats(N)),
    ],
  ),
  'grpo_advantages': (
    grpo_advantages,
    dict(scores=floats(N), group=ints(N)),
    [dict(scores=floats(N, 1)), dict(group=ints(1)), dict(group=floats(N)), dict(scores=ints(N))],
  ),
  'loss_coefficients': (
    functools.partial(loss_coefficients, mode='token-mean'),
    dict(mask=floats(B, T)),
    [dict(mask=floats(N)), dict(mask=floats(B, T, 1))],
  ),
  'support_divergence': (
    functools.partial(terms.support_divergence, add_tail=True),
    PAIR | dict(alpha=floats()),
    [*WRONG_PAIR, dict(student=floats(N), teacher=floats(N))],
  ),
  'sampled_token_divergence': (
    terms.sampled_token_divergence,
    dict(log_prob=floats(N), teacher_log_prob=floats(N)),
    [
      dict(log_prob=floats(1)),
      dict(teacher_log_prob=ints(N)),
      dict(log_prob=floats(B, T), teacher_log_prob=floats(B, T)),
    ],
  ),
  'clipped_ratio': (
    functools.partial(terms.clipped_ratio, TOPK, ObjectiveConfig().term_scalars),
    dict(log_prob=floats(N), old_log_prob=floats(N)),
    [dict(log_prob=floats(1)), dict(log_prob=floats(B, T), old_log_prob=floats(B, T))],
  ),
  'policy_term': (
    functools.partial(terms.policy_term, ObjectiveConfig().term_scalars),
    dict(log_prob=floats(N), old_log_prob=floats(N), advantages=floats(N)),
    [dict(advantages=floats(1)), dict(log_prob=floats(N, 1))],
  ),
  'loss_terms': (
    functools.partial(terms_of, TOPK),
    dict(
      log_prob=floats(N),
      entropy=floats(N),
      support=floats(N, K),
      teacher_entropy=floats(N),
      teacher_support=floats(N, K),
      coefficient=floats(N),
      active=jax.ShapeDtypeStruct((N,), bool),
    ),
    [
      dict(log_prob=floats(N, 1)),
      dict(entropy=floats(1)),
      dict(entropy=ints(N)),
      dict(support=floats(N, 1)),
      dict(teacher_entropy=floats(1)),
      dict(teacher_support=floats(1, K)),
      dict(coefficient=floats(1)),
      dict(active=floats(N)),
    ],
  ),
  'distillation_term': (
    distillation_of,
    dict(log_prob=floats(N), entropy=floats(N)),
    [dict(entropy=floats(1)), dict(log_prob=floats(B, T), entropy=floats(B, T))],
  ),
  'fused_loss': (
    fused_loss_of,
    dict(hidden=floats(N, D), unembedding=MATRIX, mask=floats(N)),
    [dict(hidden=floats(B, T, D)), dict(unembedding=ints(V, D)), dict(mask=floats(1))],
  ),
  'top_k': (
    functools.partial(top_k, k=K),
    dict(values=floats(N, V)),
    [dict(values=floats(V)), dict(values=floats(N, 1))],
  ),
  'two_stage_top_k': (
    functools.partial(two_stage_top_k, k=K),
    dict(values=floats(N, 500)),
    [dict(values=floats(500)), dict(values=floats(N, 1))],
  ),
  'BlockwiseTopK': (
    lambda logits: (top := BlockwiseTopK(K, 2 * V, 2, V, 'exact')).add(top.start(N, jnp.float32), 0, logits, None),
    dict(logits=floats(N, V)),
    [dict(logits=floats(N, 1))],
  ),
  'block_statistics': (
    vocabulary.block_statistics,
    dict(logits=floats(N, V)),
    [dict(logits=floats(V)), dict(logits=ints(N, V))],
  ),
  'project': (
    vocabulary.project,
    dict(hidden=floats(N, D), unembedding=MATRIX),
    [dict(hidden=floats(D)), dict(hidden=floats(N, 1)), dict(unembedding=ints(V, D))],
  ),
  'take_entries': (
    functools.partial(vocabulary.take_entries, start=0, size=1),
    dict(unembedding=MATRIX),
    [dict(unembedding=floats(D))],
  ),
  'weighted_entries': (
    vocabulary.weighted_entries,
    dict(unembedding=MATRIX, ids=ints(N, K), weights=floats(N, K)),
    [dict(unembedding=floats(V)), dict(ids=floats(N, K)), dict(weights=floats(N, 1)), dict(weights=ints(N, K))],
  ),
  'scatter_add': (
    vocabulary.scatter_add,
    dict(values=floats(N, V), ids=ints(N, K), updates=floats(N, K)),
    [dict(values=floats(1, V)), dict(values=floats(V)), dict(ids=floats(N, K)), dict(updates=floats(N, 1))],
  ),
  'scan_vocabulary': (
    scan,
    dict(logits=floats(N, V), ids=ints(N, K), averaged=MATRIX),
    [dict(ids=ints(1, K)), dict(ids=floats(N, K)), dict(ids=ints(N)), dict(averaged=floats(V + 1, D))],
  ),
  'pull_back': (
    pull_back,
    dict(gradients=floats(N, V), hidden=floats(N, D), unembedding=MATRIX, accumulator=MATRIX),
    [dict(hidden=floats(D)), dict(unembedding=floats(V, 1)), dict(accumulator=floats(1, D))],
  ),
  'over_active_tokens': (
    loop,
    dict(mask=floats(N), operand=floats(N, D), output=floats(N, D)),
    [dict(mask=floats(B, T)), dict(operand=floats(1, D)), dict(output=floats(1, D))],
  ),
  'token_log_probs': (
    token_log_probs,
    OWN | dict(targets=ints(B, T), temperature=floats(), mask=floats(B, T)),
    [
      dict(hidden=floats(N, D)),
      dict(hidden=ints(B, T, D)),
      dict(unembedding=floats(V, 1)),
      dict(targets=floats(B, T)),
      dict(targets=ints(1, T)),
      dict(temperature=floats(B + 1)),
      dict(temperature=floats(B, 1)),
      dict(mask=floats(N)),
    ],
  ),
  'scores': (
    functools.partial(scores, k=K),
    OWN | dict(targets=ints(B, T), temperature=floats(B), mask=floats(B, T)),
    [dict(hidden=floats(N, D)), dict(unembedding=floats(V, 1)), dict(targets=ints(B, T, 1)), dict(mask=floats(N))],
  ),
  'log_probs_of_ids': (
    log_probs_of_ids,
    OWN | dict(ids=ints(B, T, K), temperature=floats(B), mask=floats(B, T)),
    [dict(hidden=floats(B, 1, D)), dict(ids=ints(B, T)), dict(ids=floats(B, T, K)), dict(temperature=floats(T))],
  ),
  'objective, own teacher': (
    functools.partial(loss_of, tuple(MIXED)),
    STATES | MIXED | TOKENS,
    [
      *WRONG_TOKENS,
      dict(student_hidden=floats(N, D)),
      dict(student_hidden=floats(B, T, D + 1)),
      dict(student_hidden=ints(B, T, D)),
      dict(student_unembedding=floats(V)),
      dict(student_unembedding=ints(V, D)),
      *(dict([(name, floats(B, 1, D))]) for name in ('hidden', 'mix_hidden')),
      *(dict([(name, floats(V, 1))]) for name in ('unembedding', 'mix_unembedding')),
      dict(mix_rate=floats(B)),
    ],
  ),
  'objective, external teacher': (
    functools.partial(loss_of, tuple(EXTERNAL)),
    STATES | EXTERNAL | TOKENS,
    [
      dict(token_ids=ints(B, T)),
      dict(token_ids=floats(B, T, K)),
      dict(log_probs=floats(B, T, 1)),
      dict(log_probs=ints(B, T, K)),
    ],
  ),
  'objective, support': (
    functools.partial(loss_of, tuple(OWN)),
    STATES | OWN | TOKENS | dict(support=ints(B, T, K)),
    [dict(support=ints(B, T)), dict(support=floats(B, T, K)), dict(support=ints(N, 1, K))],
  ),
  'objective_from_logits': (
    objective_from_logits,
    TOKENS | dict(student_logits=floats(B, T, V), teacher_logits=floats(B, T, V)),
    [
      *WRONG_TOKENS,
      dict(student_logits=floats(N, V)),
      dict(teacher_logits=floats(B, T, 1)),
      dict(teacher_logits=ints(B, T, V)),
    ],
  ),
}


@pytest.mark.parametrize('name', CASES)
def test_wrong_ranks_shapes_and_types_are_refused(name):
  function, arguments, changes = CASES[name]
  jax.eval_shape(function, **arguments)
  for change in changes:
    with pytest.raises(AssertionError):
      jax.eval_shape(function, **arguments | change)
      print(f'{name} takes {change}')


def test_numpy_arrays_of_wrong_ranks_shapes_and_types_are_refused():
  """The functions that work on NumPy's arrays, as the host calls them."""
  good = np.ones((B, T), np.float64)
  with pytest.raises(AssertionError):
    loss_coefficients(good[0], 'token-mean')
  with pytest.raises(AssertionError):
    grpo_advantages(np.ones(3), np.zeros(3))
  for bad in (good[0], good[:1], good.astype(int)):
    with pytest.raises(AssertionError):
      importance.rollout_is_weights(good, bad, good)
    with pytest.raises(AssertionError):
      importance.mismatch(good, bad, good)


def test_arguments_split_over_devices_are_refused():
  with pytest.raises(AssertionError):
    on_devices(jnp.ones((N, D, 1)), jnp.ones((V, D)), jnp.ones(N))
  with pytest.raises(AssertionError):
    on_devices(jnp.ones((N, D)), jnp.ones((V, D)), jnp.ones(1))
  with pytest.raises(AssertionError):
    Layout(jax.sharding.Mesh(np.array(jax.devices()), ('data',)), ('data',), 'data').padded(jnp.ones(V))


def test_statistics_of_other_tokens_do_not_merge():
  with pytest.raises(AssertionError):
    vocabulary.merge_statistics(*(vocabulary.empty_statistics(tokens, jnp.float32) for tokens in (1, 2)))


def test_numbers_of_the_configuration_are_scalars():
  with pytest.raises(AssertionError):
    ObjectiveConfig(alpha=np.full(2, 0.5))
