"""Scores as JSON: an object per token for people, or columns for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sdpo_jax.files import jsonable
from sdpo_jax.learning.scoring import Scored

SCALE = -1e-4  # Nats per unit of the integers in columns, which are shorter than decimal fractions.


def as_rows(rows: Sequence[Scored], tokens: Sequence[Sequence[int]], ids: Sequence[np.ndarray] | None) -> list[Any]:
  """Return, for every row, an object for each of its tokens.

  Args:
    rows: the scores.
    tokens: the scored token ids of each row.
    ids: the further token ids that were scored, [T, M] for each row; None: none.
  """
  found = []
  for number, (row, own) in enumerate(zip(rows, tokens, strict=True)):
    said = []
    for place, token in enumerate(own):
      top = zip(row.top_ids[place].tolist(), row.top_log_probs[place].tolist(), strict=True)
      entry: dict[str, Any] = {
        'token': int(token),
        'log_prob': float(row.log_probs[place]),
        'entropy': float(row.entropy[place]),
        'top': [{'token': each, 'log_prob': value} for each, value in top if each >= 0],
      }
      if row.of_ids is not None and ids is not None:
        entry['ids'] = [
          {'token': each, 'log_prob': value}
          for each, value in zip(ids[number][place].tolist(), row.of_ids[place].tolist(), strict=True)
        ]
      said.append(entry)
    found.append({'tokens': said})
  return jsonable(found)


def as_columns(rows: Sequence[Scored]) -> list[Any]:
  """Return, for every row, one list for each kind of number.

  `top_log_probs` are integers in units of `SCALE` nats, exact to ±5e-5 nats; null stands for a probability of 0.
  """
  return [
    {
      'log_probs': _rounded(row.log_probs),
      'entropy': _rounded(row.entropy),
      'top_ids': row.top_ids.tolist(),
      'top_log_probs': _whole(row.top_log_probs),
      **({} if row.of_ids is None else {'of_ids': _rounded(row.of_ids)}),
    }
    for row in rows
  ]


def _rounded(values: np.ndarray) -> list[Any]:
  return jsonable(np.round(np.asarray(values, np.float64), 6))


def _whole(values: np.ndarray) -> list[list[int | None]]:
  units = np.asarray(values, np.float64) / SCALE
  finite = np.isfinite(units)
  whole = np.rint(np.where(finite, units, 0)).astype(np.int64).tolist()
  if finite.all():
    return whole
  return [
    [number if known else None for number, known in zip(line, knows, strict=True)]
    for line, knows in zip(whole, finite.tolist(), strict=True)
  ]
