"""Learning rate, gradient clipping and optimizers: the reference's (torch AdamW, clip by global norm) and others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax

from sdpo_jax.errors import UserError
from sdpo_jax.models.adapters.slot_names import is_slots
from sdpo_jax.models.parameters import Parameter, Table
from sdpo_jax.types import Tree

# `torch.nn.utils.clip_grad_norm_` divides by norm + 1e-6.
CLIP_EPS = 1e-6
# Root mean square of Muon's updates, about that of AdamW's, so that both can use the same learning rate and weight
# decay (Liu et al., arXiv 2502.16982, section 2.2).
MUON_RMS = 0.2
SHOWN = 6  # Maximum number of names in an error message.


@dataclasses.dataclass(frozen=True)
class OptimizerSpec:
  """The settings of an optimizer; those of `optimizer.…` have the same names."""

  name: str
  lr: float
  lr_warmup_steps: int
  lr_scheduler_type: str
  decay_steps: int | None  # Generation batches, including the warm-up; None: the rate does not decay.
  min_lr_ratio: float
  betas: tuple[float, ...]
  eps: float
  momentum: float
  weight_decay: float
  weight_decay_exclude: tuple[str, ...]
  grad_clip: float
  skip_empty_steps: bool
  mu_dtype: str


def learning_rate(spec: OptimizerSpec, step: jax.Array) -> jax.Array:
  """Return the learning rate of generation batch `step` (0-based): linear from 0 in the warm-up, then by the schedule.

  During the warm-up it is lr · step / lr_warmup_steps, so that its first batch has rate 0 (reference
  torch_functional.py:752-774, stepped once per generation batch). With p = (step − lr_warmup_steps) /
  (decay steps − lr_warmup_steps), at most 1, and m = min_lr_ratio, the rate after it is lr times

  - constant: 1
  - linear: 1 − (1 − m) · p
  - cosine: m + (1 − m) · (1 + cos π·p) / 2

  Args:
    spec: settings of the schedule.
    step: [] int, number of finished generation batches.
  """
  warmup = spec.lr_warmup_steps
  factor = jnp.minimum(1.0, step / warmup) if warmup else 1.0
  if spec.lr_scheduler_type != 'constant':
    decaying = max(spec.decay_steps - warmup, 1)
    progress = jnp.clip((step - warmup) / decaying, 0.0, 1.0)
    left = 1.0 - progress if spec.lr_scheduler_type == 'linear' else 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
    factor = factor * (spec.min_lr_ratio + (1.0 - spec.min_lr_ratio) * left)
  return jnp.asarray(spec.lr * factor)


def make_optimizer(spec: OptimizerSpec, table: Table = ()) -> optax.GradientTransformation:
  """Return the optimizer without learning rate and sign: the caller moves parameters by −rate · update.

  Weight decay is decoupled and comes last: rate · weight_decay · parameter. The slots of a cartridge do not decay.
  Every layer of a stacked parameter is treated as a parameter of its own.

  - adamw: Adam's update.
  - sgd: the gradient, without decay.
  - adafactor: the gradient over the root of its second moment, which is kept as means of rows and columns where both
    sides of a matrix have 128 entries or more, with a root mean square of at most 1 per matrix; without momentum, and
    the rate is absolute (Shazeer & Stern, arXiv 1804.04235, without its relative step size).
  - lion: the sign of a mean of gradients (Chen et al., arXiv 2302.06675).
  - muon: matrices inside the layers by their orthogonalised momentum, scaled to a root mean square of `MUON_RMS`;
    all other parameters, including embeddings, by Adam's update (arXiv 2502.16982).

  Args:
    spec: which optimizer, and its settings.
    table: parameter table of the model, which tells adafactor and muon which parameters are matrices.

  Raises:
    UserError: by `init` and `update`, if an entry of weight_decay_exclude matches no parameter.
    ValueError: by `init` and `update`, if the table lacks a parameter.
  """
  if spec.name == 'sgd':
    return optax.identity()
  by_name = {parameter.name: parameter for parameter in table}
  # Keys and values are not weights and should not decay towards zero.
  if any(is_slots(parameter) for parameter in table):
    return _UPDATES[spec.name](spec, by_name)
  decayed = functools.partial(_decayed, spec.weight_decay_exclude) if spec.weight_decay_exclude else None
  return optax.chain(_UPDATES[spec.name](spec, by_name), optax.add_decayed_weights(spec.weight_decay, decayed))


def _adam(spec: OptimizerSpec, by_name: Mapping[str, Parameter]) -> optax.GradientTransformation:
  b1, b2 = spec.betas
  return optax.scale_by_adam(b1=b1, b2=b2, eps=spec.eps, mu_dtype=jnp.dtype(spec.mu_dtype))


def _lion(spec: OptimizerSpec, by_name: Mapping[str, Parameter]) -> optax.GradientTransformation:
  b1, b2 = spec.betas
  return optax.scale_by_lion(b1=b1, b2=b2, mu_dtype=jnp.dtype(spec.mu_dtype))


def _adafactor(spec: OptimizerSpec, by_name: Mapping[str, Parameter]) -> optax.GradientTransformation:
  transform = optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))
  return _by_layer(lambda _: transform, by_name, matrix_shape, jax.vmap)


def _muon(spec: OptimizerSpec, by_name: Mapping[str, Parameter]) -> optax.GradientTransformation:
  def labels(tree: Tree) -> Tree:
    def label(parameter: Parameter, _: jax.Array) -> str:
      return 'others' if matrix_axes(parameter) is None or 'vocab' in parameter.axes else 'matrices'

    return _map_named(label, tree, by_name)

  def of_layer(parameter: Parameter) -> optax.GradientTransformation:
    rms = MUON_RMS * math.sqrt(max(matrix_shape(parameter)))
    axes = optax.contrib.MuonDimensionNumbers(*matrix_axes(parameter))
    orthogonal = optax.contrib.scale_by_muon(
      beta=spec.momentum, mu_dtype=jnp.dtype(spec.mu_dtype), weight_dimension_numbers=axes
    )
    return optax.chain(orthogonal, optax.scale(rms))

  # Layer by layer: the products of all layers' matrices with themselves would take gigabytes.
  matrices = _by_layer(of_layer, by_name, _layer_shape, _one_by_one)
  return optax.partition({'matrices': matrices, 'others': _adam(spec, by_name)}, labels)


_UPDATES: Mapping[str, Callable[[OptimizerSpec, Mapping[str, Parameter]], optax.GradientTransformation]] = {
  'adamw': _adam,
  'adafactor': _adafactor,
  'lion': _lion,
  'muon': _muon,
}


# ---------------------------------------------------------------------------------------------------------------------
# Parameters: which are matrices, which decay
# ---------------------------------------------------------------------------------------------------------------------


def matrix_axes(parameter: Parameter) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
  """Return the axes of one layer of a parameter that form each side of a matrix; None if it is a vector."""
  if len(parameter.huggingface_shape) != 2:
    return None
  shape = _layer_shape(parameter)
  _, size = parameter.huggingface_shape[::-1] if parameter.transpose else parameter.huggingface_shape
  split = len(shape) - 1
  while split > 1 and math.prod(shape[split:]) < size:
    split -= 1
  if split < 1 or math.prod(shape[split:]) != size:
    raise ValueError(f'The axes of {parameter.name}, {shape}, are not those of a matrix {parameter.huggingface_shape}.')
  return tuple(range(split)), tuple(range(split, len(shape)))


def _layer_shape(parameter: Parameter) -> tuple[int, ...]:
  return parameter.shape[int(parameter.stacked) :]


def matrix_shape(parameter: Parameter) -> tuple[int, ...]:
  """Return the shape of one layer of a parameter as a matrix (two numbers) or as a vector (one)."""
  shape = _layer_shape(parameter)
  groups = matrix_axes(parameter) or (range(len(shape)),)
  return tuple(math.prod(shape[axis] for axis in group) for group in groups)


def _map_named(function: Callable[[Parameter, Any], Any], tree: Tree, by_name: Mapping[str, Parameter]) -> Tree:
  """Return the tree of function(parameter, leaf); masked nodes of optax stay masked.

  Raises:
    ValueError: a leaf is not a parameter of the table.
  """

  def call(path: Any, leaf: Any) -> Any:
    name = _name(path)
    if name not in by_name:
      raise ValueError(f'This optimizer treats matrices apart, and the parameter table does not have {name}.')
    return function(by_name[name], leaf)

  return jax.tree_util.tree_map_with_path(call, tree)


def _name(path: Any) -> str:
  return jax.tree_util.keystr(path, simple=True, separator='.')


def _by_layer(
  transform_of: Callable[[Parameter], optax.GradientTransformation],
  by_name: Mapping[str, Parameter],
  shape_of: Callable[[Parameter], tuple[int, ...]],
  over_layers: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> optax.GradientTransformation:
  """Return a transformation that treats every layer of a parameter separately, as if each were a tree of one array.

  Its state has the structure of a layer's state, with a tree like that of the parameters in place of each array, and a
  leading axis of layers (of size 1 if a parameter is not stacked).

  Args:
    transform_of: returns the transformation of one layer of a parameter; all have states of the same structure.
    by_name: the parameter table.
    shape_of: returns the shape in which the transformation sees one layer of a parameter.
    over_layers: maps a function of arrays over their first axes, such as `jax.vmap`.
  """

  def of_layers(tree: Tree) -> list[_Layers]:
    def split(parameter: Parameter, leaf: jax.Array) -> _Layers:
      return _Layers(transform_of(parameter), leaf.reshape(parameter.layers, *shape_of(parameter)))

    return jax.tree.leaves(_map_named(split, tree, by_name))

  def structure_of_state(layers: Sequence[_Layers]) -> Any:
    return jax.tree.structure(jax.eval_shape(layers[0].transform.init, layers[0].values[0]))

  def init(params: Tree) -> Tree:
    layers, outer = of_layers(params), jax.tree.structure(params)
    if not layers:
      return ()
    states = [jax.vmap(each.transform.init)(each.values) for each in layers]
    return jax.tree.transpose(outer, structure_of_state(layers), outer.unflatten(states))

  def update(updates: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
    layers, outer = of_layers(updates), jax.tree.structure(updates)
    if not layers:
      return updates, state
    inner = structure_of_state(layers)
    states = outer.flatten_up_to(jax.tree.transpose(inner, outer, state))
    moved, after = [], []
    for each, own, parameter in zip(layers, states, of_layers(params), strict=True):
      step, left = over_layers(each.transform.update)(each.values, own, parameter.values)
      moved.append(step)
      after.append(left)
    whole = [step.reshape(leaf.shape) for step, leaf in zip(moved, jax.tree.leaves(updates), strict=True)]
    return outer.unflatten(whole), jax.tree.transpose(outer, inner, outer.unflatten(after))

  return optax.GradientTransformation(init, update)


@dataclasses.dataclass(frozen=True)
class _Layers:
  """The layers of a parameter, or of its gradient, and the transformation of each; a leaf in tree functions."""

  transform: optax.GradientTransformation
  values: jax.Array  # [layers, …].


def _one_by_one(function: Callable[..., Any]) -> Callable[..., Any]:
  """Return a function that maps `function` over the first axes of its arguments in a loop."""
  return lambda *arguments: jax.lax.map(lambda each: function(*each), arguments)


def _decayed(excluded: Iterable[str], tree: Tree) -> Tree:
  """Return a tree of bool, true for parameters that decay: those whose names match no excluded pattern."""
  names = [_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
  check_excluded(excluded, names)
  return jax.tree_util.tree_map_with_path(
    lambda path, _: not any(re.search(pattern, _name(path)) for pattern in excluded), tree
  )


def check_excluded(excluded: Iterable[str], names: Iterable[str]) -> None:
  """Check that every pattern of `optimizer.weight_decay_exclude` matches the name of a trained parameter.

  Raises:
    UserError: a pattern matches none; the message names it and some of the parameters.
  """
  names = list(names)
  for pattern in excluded:
    if not any(re.search(pattern, name) for name in names):
      more = f' and {len(names) - SHOWN} more' if len(names) > SHOWN else ''
      raise UserError(
        f'optimizer.weight_decay_exclude: {pattern!r} matches none of the parameters, which are '
        f'{", ".join(names[:SHOWN])}{more}: correct the pattern or leave it out.'
      )


def clip_by_global_norm(grads: Tree, max_norm: float) -> tuple[Tree, jax.Array]:
  """Return gradients scaled so that their global L2 norm is at most `max_norm`, and the norm before."""
  norm = optax.tree.norm(grads)
  scale = jnp.minimum(1.0, max_norm / (norm + CLIP_EPS))
  return jax.tree.map(lambda grad: grad * scale.astype(grad.dtype), grads), norm


def take_step(
  optimizer: optax.GradientTransformation,
  rate: jax.Array,
  max_norm: float | jax.Array,
  parameters: Tree,
  state: Tree,
  grads: Tree,
  allowed: Callable[[Tree], jax.Array] | None = None,
  smallest: float | None = None,
) -> tuple[tuple[Tree, Tree], jax.Array, jax.Array]:
  """Take one optimizer step, or leave every bit as it is if the gradient is not finite (reference dp_actor.py:577-580).

  Args:
    optimizer: without learning rate and sign; see `make_optimizer`.
    rate: [] learning rate.
    max_norm: largest global norm of the gradients; larger ones are scaled down to it.
    parameters: the trained parameters.
    state: the optimizer's state.
    grads: gradients of all rows of the step.
    allowed: maps the new parameters and state to [] bool, whether the step may be taken; None: it may.
    smallest: a gradient of this norm or less is no step either, so that neither momentum nor decay moves anything;
      None: every norm is.

  Returns:
    (parameters, state), the norm before clipping, and [] bool, whether the step was taken.
  """
  clipped, norm = clip_by_global_norm(grads, max_norm)
  taken = jnp.isfinite(norm) if smallest is None else jnp.isfinite(norm) & (norm > smallest)
  updates, after = optimizer.update(clipped, state, parameters)
  moved = jax.tree.map(lambda p, u: p - (rate * u).astype(p.dtype), parameters, updates), after
  if allowed is not None:
    taken = taken & allowed(moved)
  return jax.tree.map(lambda new, old: jnp.where(taken, new, old), moved, (parameters, state)), norm, taken
