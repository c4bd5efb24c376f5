"""Names, ranges and checks of the objective's settings, shared by the configuration and the objective."""

from __future__ import annotations

from typing import Any

AGGREGATIONS = ('token-mean', 'seq-mean-token-sum', 'seq-mean-token-mean', 'seq-mean-token-sum-norm')
TOPK_METHODS = ('exact', 'approx')
ALPHA = (0.0, 1.0)  # Smallest and largest alpha.


def known_number(value: Any) -> float | None:
  """Return `value` as a float; None if it is None or known only when the program runs.

  Real scalars of Python, NumPy and JAX are known, except those that JAX is tracing.
  """
  if value is None:
    return None
  try:
    return float(value)
  except TypeError:  # JAX's ConcretizationTypeError is a TypeError, so JAX need not be imported.
    return None


def check_divergence(
  alpha: Any, distillation_topk: int | None, full_logit_distillation: bool, prefix: str = ''
) -> None:
  """Check the settings of a divergence, as far as they are known at trace time.

  Args:
    alpha: interpolates between KL(teacher‖student) at 0 and KL(student‖teacher) at 1.
    distillation_topk: K, the number of the student's most likely tokens that are distilled; None: all.
    full_logit_distillation: false to distil the sampled token only.
    prefix: prefix of the settings' names in error messages, such as `actor.self_distillation.`.

  Raises:
    ValueError: alpha outside [0, 1], a K that is not positive, or the sampled token with an alpha other than 1.
  """
  known_alpha = known_number(alpha)
  if known_alpha is not None and not ALPHA[0] <= known_alpha <= ALPHA[1]:
    raise ValueError(f'{prefix}alpha must lie in [{ALPHA[0]:g}, {ALPHA[1]:g}], not {alpha}.')
  if distillation_topk is not None and distillation_topk <= 0:
    raise ValueError(
      f'{prefix}distillation_topk must be positive or None (the whole vocabulary), not {distillation_topk}.'
    )
  if not full_logit_distillation and known_alpha != 1.0:
    raise ValueError(
      f'{prefix}full_logit_distillation=False distils the sampled token, which is reverse KL only: '
      f'set {prefix}alpha=1.0.'
    )
