"""Comparison of two mathematical answers by math-verify; runs inside the sandbox.

SymPy evaluates the model's text, which may take any time; hence the sandbox.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from math_verify import parse, verify
import sympy

_UNKNOWN = re.compile(r'\\circ|°|_|mod|\\gcd|lcm')  # Degrees, bases, functions: math-verify reads them wrongly.

logging.disable(logging.CRITICAL)  # math-verify logs every answer that it cannot parse.


def run(payload: dict) -> bool:
  """Return whether `payload['pred']` equals `payload['gold']`.

  If `payload['boxed']` is true, both are read as LaTeX formulas, and no false equation is right, of which math-verify
  takes the right side; otherwise as running text, in which it takes the first thing that it can read (so '2\\sqrt{2}'
  is 2), as the reference does.
  """
  wrap = (lambda text: f'\\boxed{{{text}}}') if payload['boxed'] else (lambda text: text)
  # The sandbox limits the time.
  gold, pred = (parse(wrap(payload[name]), parsing_timeout=None) for name in ('gold', 'pred'))
  right = bool(verify(gold, pred, timeout_seconds=None))
  if not (right and payload['boxed']) or _UNKNOWN.search(payload['pred']):
    return right
  text = payload['pred'].rstrip(' .,;')  # With a full stop behind it, math-verify returns no equation.
  return not any(map(is_false, pred if text == payload['pred'] else parse(wrap(text), parsing_timeout=None)))


def is_false(answer: Any) -> bool:
  """Return whether an answer equates two numbers that differ, decimals by more than a hundredth of them."""
  for equation in answer.atoms(sympy.Eq) if isinstance(answer, sympy.Basic) else ():
    if all(side.is_number for side in equation.args):
      left, right = (complex(sympy.N(side)) for side in equation.args)
      within = 0.01 if equation.has(sympy.Float) else 1e-9
      if abs(left - right) > within * max(abs(left), abs(right)) + 1e-9:  # sympy's zeros are small numbers.
        return True
  return False
