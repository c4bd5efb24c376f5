"""The distance between two versions of an adapter: for each matrix, the change of the product of its factors."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import math

import numpy as np

from sdpo_jax.models.adapters import lora
from sdpo_jax.models.parameters import Parameter, Table


@dataclasses.dataclass(frozen=True)
class MatrixChange:
  """The change of scale · A B for a matrix of one layer, in Frobenius norms."""

  matrix: str  # The module's name in transformers.
  before: float  # ‖scale · A B‖ of the first version.
  after: float  # ‖scale · A' B'‖ of the second version.
  change: float  # ‖scale · (A' B' − A B)‖.

  @property
  def relative(self) -> float | None:
    """The change relative to the norm before; None if that was 0."""
    return self.change / self.before if self.before else None


def changes(
  adapter: lora.Adapter, table: Table, before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray]
) -> list[MatrixChange]:
  """Return the change of every matrix with factors, layer by layer, without forming any product A B.

  Args:
    adapter: the adapter, which determines the matrices with factors.
    table: the parameter table of the model without factors.
    before: the factors of the first version by their names in the parameter table, [L, …] float32.
    after: the factors of the second version, likewise.
  """
  matrices = {row.name: row for row in table}
  found = []
  for target in adapter.targets:
    row = matrices[target.name]
    old, new = _factors(row, target, before), _factors(row, target, after)
    for layer, scale in enumerate(target.scales):
      if scale:
        (a, b), (a_new, b_new) = ([part[layer].astype(np.float64) for part in pair] for pair in (old, new))
        # A' B' − A B = A' (B' − B) + (A' − A) B, which loses no digits where little has changed.
        moved = _norm(np.concatenate([a_new, a_new - a], axis=1), np.concatenate([b_new - b, b], axis=0))
        norms = (scale * norm for norm in (_norm(a, b), _norm(a_new, b_new), moved))
        found.append(MatrixChange(lora.module_name(row, layer), *norms))
  return found


def total(matrices: list[MatrixChange]) -> MatrixChange:
  """Return the change of all matrices taken as one vector, under the name 'all'."""

  def norm(name: str) -> float:
    return math.hypot(*(getattr(each, name) for each in matrices))

  return MatrixChange('all', norm('before'), norm('after'), norm('change'))


def _factors(row: Parameter, target: lora.Target, arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
  """Return A [L, in, r] and B [L, r, out]."""
  outputs, inputs = row.huggingface_shape
  a, b = (arrays[f'{target.name}_{suffix}'] for suffix in (lora.A, lora.B))
  return a.reshape(-1, inputs, target.rank), b.reshape(-1, target.rank, outputs)


def _norm(a: np.ndarray, b: np.ndarray) -> float:
  """Return the Frobenius norm of a product A [in, r] B [r, out]."""
  return math.sqrt(max(0.0, float(np.sum((a.T @ a) * (b @ b.T)))))
