"""`jsd_pg` written from its definition in NumPy, token by token."""

import numpy as np

B, T, V, K = 2, 4, 30, 6


def by_hand(x, settings, logits=None, in_mesh=False):
  """(loss, terms of the regulariser by token); the advantages are those of x['logits'], whatever `logits` are."""

  def log_softmax(z):
    return z - z.max() - np.log(np.exp(z - z.max()).sum())

  alpha, tokens = settings.alpha, x['mask'].sum()
  loss, summands = 0.0, []
  for at in np.ndindex(x['mask'].shape):
    if not x['mask'][at]:
      continue
    before, now = (log_softmax(z[at]) for z in (x['logits'], x['logits'] if logits is None else logits))
    named, y = [v for v in x['ids'][at] if v >= 0], x['targets'][at]
    knows = in_mesh or y in named
    theirs = x['teacher'][at][y] if knows else settings.floor
    mixture = np.log(alpha * np.exp(before[y]) + (1 - alpha) * np.exp(theirs))
    advantage = mixture - before[y] if settings.form == 'mixture' else (1 - 2 * alpha) * (before[y] - theirs)
    ratio = np.exp(now[y] - x['old'][at])
    loss -= min(ratio * advantage, np.clip(ratio, 1 - settings.clip_eps, 1 + settings.clip_eps) * advantage) / tokens
    p, q = np.exp(now[named]), np.exp(x['teacher'][at][named])
    if settings.support == 'union':
      new = [v for v in x['student_ids'][at] if v not in named]
      others = (1 - q.sum()) / (V - len(named))
      q = np.append(q, np.exp(x['teacher'][at][new]) if in_mesh else np.full(len(new), others))
      p = np.append(p, np.exp(now[new]))
      rest = V - len(p)
      p, q = (np.append(z, np.full(rest, (1 - z.sum()) / rest)) for z in (p, q))
    m = alpha * p + (1 - alpha) * q
    summands.append(alpha * p * np.log(p / m) + (1 - alpha) * q * np.log(q / m))
    loss += settings.jsd_weight * summands[-1].sum() / tokens
  return loss, summands
