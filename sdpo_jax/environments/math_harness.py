"""Comparison of two mathematical answers by math-verify; runs inside the sandbox.

SymPy evaluates the model's text, which may take any time; hence the sandbox.
"""

from __future__ import annotations

import logging

from math_verify import parse, verify

logging.disable(logging.CRITICAL)  # math-verify logs every answer that it cannot parse.


def run(payload: dict) -> bool:
  """Return whether `payload['pred']` equals `payload['gold']`.

  If `payload['boxed']` is true, both are read as LaTeX formulas; otherwise as running text, in which math-verify takes
  the first thing that it can read (so '2\\sqrt{2}' is 2), as the reference does.
  """
  wrap = (lambda text: f'\\boxed{{{text}}}') if payload['boxed'] else (lambda text: text)
  # The sandbox limits the time.
  gold, pred = (parse(wrap(payload[name]), parsing_timeout=None) for name in ('gold', 'pred'))
  return bool(verify(gold, pred, timeout_seconds=None))
