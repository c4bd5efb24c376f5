"""Runs inside the sandbox: whether two mathematical answers are equal, by math-verify.

SymPy evaluates what a model wrote, for as long as that takes; hence the sandbox.
"""

from __future__ import annotations

import logging

from math_verify import parse, verify

logging.disable(logging.CRITICAL)  # It reports every answer that it cannot parse.


def run(payload: dict) -> bool:
  """Whether `payload['pred']` equals `payload['gold']`.

  With `payload['boxed']` both are read as LaTeX formulas; without, as running text, in which math-verify looks for the
  first thing that it can read (so '2\\sqrt{2}' is 2), as the reference does.
  """
  wrap = (lambda text: f'\\boxed{{{text}}}') if payload['boxed'] else (lambda text: text)
  # The sandbox keeps the time.
  gold, pred = (parse(wrap(payload[name]), parsing_timeout=None) for name in ('gold', 'pred'))
  return bool(verify(gold, pred, timeout_seconds=None))
