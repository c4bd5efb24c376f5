"""Which settings of `optimizer` each optimizer reads beside learning rate and clipping, which all of them do."""

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
