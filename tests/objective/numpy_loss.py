"""The one loss written from its definitions in NumPy, and a small problem with all of its terms."""

import jax.numpy as jnp
import numpy as np

from sdpo_jax.types import TeacherSignal

B, T, V, D = 3, 5, 40, 8
TERMS = ('targets', 'mask', 'distill_coef', 'policy_coef', 'entropy_coef', 'old_log_probs', 'advantages')
TERMS += ('kl_coef', 'initial_log_probs')


def problem(seed=0, vocab=V):
  """Float64 arrays of a small problem: masks with holes, a fully masked row, coefficients of all four terms."""
  rng = np.random.default_rng(seed)

  def normal(*shape):
    return rng.standard_normal(shape)

  mask = (rng.random((B, T)) < 0.8) * 1.0
  mask[1, 2:] = 0
  return {
    'hidden': normal(B, T, D),
    'unembedding': normal(vocab, D),
    'teacher_hidden': normal(B, T, D),
    'teacher_unembedding': normal(vocab, D),
    'mix_hidden': normal(B, T, D),
    'mix_unembedding': normal(vocab, D),
    'targets': rng.integers(0, vocab, (B, T)),
    'mask': mask,
    'distill_coef': rng.random((B, T)) * mask,
    'policy_coef': rng.random((B, T)) * mask,
    'entropy_coef': rng.random((B, T)) * mask * 0.1,
    'old_log_probs': -3 + normal(B, T),
    'advantages': normal(B, T),
    'kl_coef': rng.random((B, T)) * mask * 0.3,
    'initial_log_probs': -3 + normal(B, T),
  }


def numpy_loss(x, config, mix_rate=None, vocab=V):
  """Written from the definitions, token by token."""

  def log_softmax(z):
    return z - z.max() - np.log(np.exp(z - z.max()).sum())

  total, per_token = 0.0, np.zeros((B, T))
  for i, t in np.ndindex(B, T):
    if not x['mask'][i, t]:
      continue
    s = log_softmax(x['unembedding'] @ x['hidden'][i, t] / config.temperature)
    other = x['teacher_unembedding'] @ x['teacher_hidden'][i, t]
    if mix_rate is not None:
      other = (1 - mix_rate) * other + mix_rate * (x['mix_unembedding'] @ x['mix_hidden'][i, t])
    q = log_softmax(other / config.temperature)
    y = x['targets'][i, t]
    if not config.full_logit_distillation:
      divergence = (s[y] - q[y]) * s[y]
    else:
      a, b = s, q
      if config.distillation_topk is not None:
        top = np.argsort(-s)[: config.distillation_topk]
        a, b = s[top], q[top]
        if config.distillation_add_tail:

          def tail(z):
            return np.log(-np.expm1(min(np.log(np.exp(z).sum()), -1e-7)))

          a, b = np.append(a, tail(a)), np.append(b, tail(b))
        else:
          a, b = a - np.log(np.exp(a).sum()), b - np.log(np.exp(b).sum())
      if config.alpha == 0:
        divergence = (np.exp(b) * (b - a)).sum()
      elif config.alpha == 1:
        divergence = (np.exp(a) * (a - b)).sum()
      else:
        m = np.log((1 - config.alpha) * np.exp(a) + config.alpha * np.exp(b))
        divergence = (1 - config.alpha) * (np.exp(a) * (a - m)).sum() + config.alpha * (np.exp(b) * (b - m)).sum()
    log_ratio = np.clip(s[y] - x['old_log_probs'][i, t], -20, 20)
    weight = 1.0 if config.is_clip is None else min(np.exp(log_ratio), config.is_clip)
    per_token[i, t] = divergence
    total += x['distill_coef'][i, t] * weight * divergence
    advantage, ratio = x['advantages'][i, t], np.exp(log_ratio)
    inside = np.clip(ratio, 1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    ppo = max(-advantage * ratio, -advantage * inside)
    total += x['policy_coef'][i, t] * (min(ppo, -config.clip_ratio_c * advantage) if advantage < 0 else ppo)
    total += x['entropy_coef'][i, t] * (np.exp(s) * s).sum()
    gap = s[y] - x['initial_log_probs'][i, t]
    estimates = {'k1': gap, 'k2': gap**2 / 2, 'k3': min(np.exp(-gap) + gap - 1, 10)}
    total += x['kl_coef'][i, t] * estimates[config.kl_kind]
  return total, per_token


def signal(x, mix_rate=None):
  mix = {}
  if mix_rate is not None:
    mix = dict(mix_hidden=x['mix_hidden'], mix_unembedding=x['mix_unembedding'], mix_rate=mix_rate)
  return TeacherSignal(hidden=x['teacher_hidden'], unembedding=x['teacher_unembedding'], **mix)


def arrays(x, dtype):
  return {name: jnp.asarray(v, dtype) if v.dtype.kind == 'f' else jnp.asarray(v, jnp.int32) for name, v in x.items()}
