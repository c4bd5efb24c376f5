"""The settings of `optimizer` that each optimizer reads; learning rate and clipping are read by all."""

from __future__ import annotations

from collections.abc import Mapping

_DECAY = ('weight_decay', 'weight_decay_exclude')

READS: Mapping[str, tuple[str, ...]] = {
  'adamw': ('betas', 'eps', *_DECAY, 'mu_dtype'),
  'sgd': (),
  'adafactor': _DECAY,
  'lion': ('betas', *_DECAY, 'mu_dtype'),
  'muon': ('betas', 'eps', 'momentum', *_DECAY, 'mu_dtype'),
}
