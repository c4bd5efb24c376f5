"""LoRA (arXiv 2106.09685): to a frozen matrix W of a layer, the product of two small trained matrices is added.

The layer computes x W + scale · (x A) B, with A [in, r] and B [r, out]. The factors of a matrix are rows of the
parameter table, stacked over the layers like the matrix itself, so that scanning, sharding, saving and counting need no
code of their own for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
import dataclasses
import difflib
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np

from sdpo_jax.config import LoraConfig
from sdpo_jax.config.fields import MALFORMED_PATTERN
from sdpo_jax.errors import UserError, short_repr
from sdpo_jax.models.parameters import Parameter, Table, frozen_in

A, B = 'lora_a', 'lora_b'  # Suffixes of the names of factors.
ALL_LINEAR = 'all-linear'  # As in PEFT and verl: every matrix of the layers.
SETTING = 'model.lora'
SHOWN = 3  # Number of names shown in an error.
SMALLEST, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)  # Bounds of scales.


@dataclasses.dataclass(frozen=True)
class Target:
  """A matrix with factors, in all layers at once."""

  name: str  # Name of the parameter: 'layers.attention.query'.
  rank: int  # r, the same in every layer: the factors of all layers are one array.
  # One per layer; 0: the layer has no factors, and its entries in the arrays get no gradient.
  scales: tuple[float, ...]

  def scale(self, layer: jax.Array | int) -> jax.Array | float:
    """Return the scale of the factors' product in a layer, [] float32."""
    return self.scales[0] if len(set(self.scales)) == 1 else jnp.asarray(self.scales, jnp.float32)[layer]


@dataclasses.dataclass(frozen=True)
class Adapter:
  """A LoRA adapter: the matrices that have factors, with their ranks and scales. Hashable, a part of the policy."""

  targets: tuple[Target, ...]

  @functools.cached_property
  def by_name(self) -> Mapping[str, Target]:
    """The targets by the names of their matrices."""
    return {target.name: target for target in self.targets}

  def extended(self, table: Table, dtype: str) -> Table:
    """Return the parameter table of a model with the adapter: frozen parameters, then trainable factors.

    Args:
      table: table of the model.
      dtype: compute dtype of the model, in which frozen matrices are kept.
    """
    by_name = {parameter.name: parameter for parameter in table}
    pairs = [_factors(by_name[target.name], target.rank) for target in self.targets]
    return (*frozen_in(table, dtype), *(factor for pair in pairs for factor in pair))


def linear(table: Table) -> Table:
  """Return the parameters that can have factors: the matrices of the layers."""
  return tuple(parameter for parameter in table if parameter.stacked and parameter.transpose)


def is_factor(name: str) -> bool:
  """Return whether the parameter of this name, or with this last key of its path, is a factor."""
  return name.endswith((f'_{A}', f'_{B}'))


def factors(table: Table) -> Table:
  """Return the parameters of a table that are factors."""
  return tuple(parameter for parameter in table if is_factor(parameter.name))


def without_factors(table: Table) -> Table:
  """Return the parameters of a table that are not factors."""
  return tuple(parameter for parameter in table if not is_factor(parameter.name))


def _factors(matrix: Parameter, rank: int) -> tuple[Parameter, Parameter]:
  """Return A [L, *in, r] and B [L, r, *out] of a matrix [L, *in, *out], under PEFT's names."""
  outputs, inputs = matrix.huggingface_shape
  split = next(i for i in range(2, len(matrix.shape)) if math.prod(matrix.shape[1:i]) == inputs)
  module = f'base_model.model.{matrix.huggingface.removesuffix(".weight")}'

  def factor(suffix: str, letter: str, shape, axes, init, stored) -> Parameter:
    return Parameter(
      path=(*matrix.path[:-1], f'{matrix.path[-1]}_{suffix}'),
      shape=(matrix.shape[0], *shape),
      axes=('layers', *axes),
      init=init,
      huggingface=f'{module}.lora_{letter}.weight',
      huggingface_shape=stored,
      transpose=True,
    )

  into, out = matrix.shape[1:split], matrix.shape[split:]
  return (
    factor(A, 'A', (*into, rank), (*matrix.axes[1:split], None), 'kaiming_uniform', (rank, inputs)),
    factor(B, 'B', (rank, *out), (None, *matrix.axes[split:]), 'zeros', (outputs, rank)),
  )


def from_config(config: LoraConfig, table: Table) -> Adapter | None:
  """Return the adapter that the settings describe; None: all parameters are trained.

  Args:
    config: settings.
    table: table of the model.

  Raises:
    UserError: a pattern matches no matrix of the layers, or ranks of a matrix differ between layers.
  """
  if config.rank is None:
    return None
  chosen = matched(config.target_modules, table, f'{SETTING}.target_modules')
  without = [_among(chosen, pattern, table, f'{SETTING}.exclude_modules') for pattern in config.exclude_modules]
  chosen = chosen.difference(*without)
  if not chosen:
    raise UserError(
      f'{SETTING}.exclude_modules excludes all of {SETTING}.target_modules: there would be nothing to train.'
    )
  return build(
    table,
    chosen,
    ranks=_by_module(config.rank, config.rank_pattern, chosen, table, 'rank_pattern'),
    alphas=_by_module(config.alpha, config.alpha_pattern, chosen, table, 'alpha_pattern'),
    use_rslora=config.use_rslora,
    source=SETTING,
  )


Module = tuple[str, int]  # A matrix of one layer: the parameter's name and the number of the layer.


def build(
  table: Table,
  chosen: Iterable[Module],
  *,
  ranks: Mapping[Module, int],
  alphas: Mapping[Module, float],
  use_rslora: bool,
  source: str,
) -> Adapter:
  """Return the adapter with factors of the chosen matrices.

  Args:
    table: table of the model.
    chosen: the matrices with factors.
    ranks: r of at least these matrices.
    alphas: alpha of at least these matrices; a scale is alpha / r.
    use_rslora: whether a scale is alpha / √r instead (arXiv 2312.03732).
    source: where the adapter is described, for error messages.

  Raises:
    UserError: ranks that differ between the layers of a matrix, or a scale that is 0 or infinite in float32.
  """
  chosen, targets = set(chosen), []
  for parameter in linear(table):
    layers = [layer for layer in range(parameter.layers) if (parameter.name, layer) in chosen]
    if not layers:
      continue
    found: dict[int, int] = {}
    for layer in layers:
      found.setdefault(ranks[parameter.name, layer], layer)
    if len(found) > 1:
      (one, first), (other, second) = list(found.items())[:2]
      raise UserError(
        f'{source}: {module_name(parameter, first)} has rank {one} and {module_name(parameter, second)} rank {other}; '
        'the layers run as one loop, in which a matrix has the same rank in every layer: give all layers one rank.'
      )
    rank = next(iter(found))
    divisor = math.sqrt(rank) if use_rslora else rank
    scales = tuple(alphas[parameter.name, i] / divisor if i in layers else 0.0 for i in range(parameter.layers))
    for layer in layers:
      if not SMALLEST <= scales[layer] <= LARGEST:
        raise UserError(
          f'{source}: alpha of {module_name(parameter, layer)} is {alphas[parameter.name, layer]:g} and its rank '
          f'{rank}, so that the scale would be {scales[layer]:g}, which float32 cannot hold: correct alpha.'
        )
    targets.append(Target(parameter.name, rank, scales))
  return Adapter(tuple(targets))


def matched(patterns: Iterable[str], table: Table, source: str) -> set[Module]:
  """Return the matrices of the layers that any of the patterns matches.

  Args:
    patterns: regular expressions, each of which must match whole components of a name (see `names`), or `ALL_LINEAR`.
    table: table of the model.
    source: where the patterns come from, for error messages.

  Raises:
    UserError: a pattern is not a regular expression, or matches nothing; the message says why or shows similar names.
  """
  found: set[Module] = set()
  for pattern in patterns:
    if pattern == ALL_LINEAR:
      found |= names(table).keys()
      continue
    whole = _components(pattern, source)
    chosen = {module for module, known in names(table).items() if any(map(whole.search, known))}
    if not chosen:
      raise UserError(f'{source}: {_nothing(pattern, whole, table)}')
    found |= chosen
  return found


@functools.cache
def names(table: Table) -> Mapping[Module, tuple[str, ...]]:
  """Return the three names by which patterns can match each matrix of each layer.

  They are the name of the parameter, the same with the number of the layer, and that of the Hugging Face module.
  """
  return {
    (parameter.name, layer): (
      parameter.name,
      parameter.name.replace('layers.', f'layers.{layer}.', 1),
      module_name(parameter, layer),
    )
    for parameter in linear(table)
    for layer in range(parameter.layers)
  }


def module_name(parameter: Parameter, layer: int) -> str:
  """Return the name of the module in transformers that holds a matrix."""
  return parameter.huggingface_name(layer).removesuffix('.weight')


def _components(pattern: str, source: str) -> re.Pattern[str]:
  try:
    return re.compile(rf'(?:^|\.)(?:{pattern})(?:\.|$)')
  except MALFORMED_PATTERN as error:
    raise UserError(f'{source}: {short_repr(pattern)} is not a regular expression ({error}): correct it.') from error


def _nothing(pattern: str, whole: re.Pattern[str], table: Table) -> str:
  """Return a sentence about why a pattern matches no matrix."""
  if re.search('router|expert', pattern):
    return f'{pattern!r} is about routers or experts, which take no factors: name matrices of attention or of the MLP.'
  if any(map(whole.search, ('lm_head', 'unembedding', 'embedding', 'embed_tokens'))):
    return (
      f'{pattern!r} is about the embedding or the unembedding, which take no factors, because logits are computed in '
      'chunks. Name matrices of the layers, or train all parameters.'
    )
  others = [p.name for p in table if p not in linear(table) and (whole.search(p.name) or whole.search(p.huggingface))]
  if others:
    return f'{pattern!r} is {others[0]}, which is no matrix and takes no factors: name matrices of the layers.'
  parts = {
    part for known in names(table).values() for name in (known[0], known[2]) for part in (name, name.split('.')[-1])
  }
  last = max(layer for _, layer in names(table))
  near = difflib.get_close_matches(pattern, sorted(parts), n=SHOWN, cutoff=0.3) or sorted(p.name for p in linear(table))
  return (
    f'{pattern!r} matches no matrix of the layers 0 to {last}; the nearest names are {", ".join(near)}. A pattern must '
    "match whole parts of a name between dots, e.g. attention, q_proj or 'layers.[0-3].mlp'."
  )


def _by_module(
  value: float, patterns: Mapping[str, float], chosen: set[Module], table: Table, setting: str
) -> dict[Module, float]:
  """Return the value for every chosen matrix: that of the first pattern that matches it, or else `value`."""
  found = dict.fromkeys(chosen, value)
  for pattern, own in reversed(patterns.items()):
    found |= dict.fromkeys(_among(chosen, pattern, table, f'{SETTING}.{setting}'), own)
  return found


def _among(chosen: set[Module], pattern: str, table: Table, source: str) -> set[Module]:
  """Return the chosen matrices that a pattern matches; raise UserError if it matches only others."""
  found = chosen & matched([pattern], table, source)
  if not found:
    raise UserError(
      f'{source}: {pattern!r} matches only matrices that have no factors, and would change nothing: leave it out, or '
      f'choose these in {SETTING}.target_modules.'
    )
  return found
