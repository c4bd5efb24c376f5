"""The parameter table of a model, from which it is initialised, sharded, imported and exported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
import math
from typing import Any, Literal

from flax.traverse_util import flatten_dict, unflatten_dict
import jax
import jax.numpy as jnp
import numpy as np

from sdpo_jax.types import Tree

Path = tuple[str, ...]
Bounds = tuple[tuple[int, int], ...]  # (start, stop) on every axis of a part of an array.
# Number of rows that are transposed at once, and of elements of padding after each: rows at distances of a power of two
# would all map to the same few sets of a processor's cache.
_STRIP, _APART = 128, 16


@dataclasses.dataclass(frozen=True)
class Parameter:
  """One array of a model.

  Its Hugging Face tensors are the slices along the leading 'layers' axis, if it has one. A Hugging Face matrix is
  [out, in]; with `transpose`, ours has the inputs first. A reshape then gives our shape, in which heads have an axis of
  their own. Entries beyond those of a Hugging Face matrix pad the vocabulary; they are initialised to zero and not
  exported.
  """

  path: Path  # Keys in the nested parameter dict.
  shape: tuple[int, ...]
  axes: tuple[str | None, ...]  # Logical axis of every dimension, which mesh rules shard; None: never sharded.
  init: Literal['normal', 'ones', 'zeros', 'kaiming_uniform']
  huggingface: str  # Tensor name, with {layer} where layers are stacked.
  huggingface_shape: tuple[int, ...]  # Shape of one Hugging Face tensor.
  transpose: bool = False
  compute: bool = True  # Whether it is cast to compute dtype; false for norm weights, which stay float32.
  dtype: str = 'float32'  # Dtype of the master copy.
  frozen: bool = False  # Whether the base tree holds it, not the trainable tree.

  @property
  def name(self) -> str:
    """The keys of its path, joined by dots: 'layers.attention.query'."""
    return '.'.join(self.path)

  @property
  def padding(self) -> int:
    """Number of vocabulary entries that pad those of the Hugging Face tensor."""
    return 0 if self.stacked else self.shape[0] - math.prod(self.huggingface_shape) // math.prod(self.shape[1:])

  @property
  def stacked(self) -> bool:
    """Whether it holds the parameters of all layers, along a leading 'layers' axis."""
    return self.axes[0] == 'layers'

  @property
  def layers(self) -> int:
    """Number of Hugging Face tensors that make up this parameter."""
    return self.shape[0] if self.stacked else 1

  def huggingface_name(self, layer: int = 0) -> str:
    """Return the name of its Hugging Face tensor of a layer."""
    return self.huggingface.format(layer=layer)

  def groups(self) -> Iterator[tuple[int, int, int]]:
    """Yield (size, start, end) for each axis of a Hugging Face tensor, in our order; our axes start … end − 1 form it.

    Our axes are counted without the layers axis.
    """
    shape = self.shape[1:] if self.stacked else self.shape
    axis = 0
    for size in self.huggingface_shape[::-1] if self.transpose else self.huggingface_shape:
      end = axis + 1
      while math.prod(shape[axis:end]) < size:
        end += 1
      yield size, axis, end
      axis = end

  def from_huggingface(self, tensor: Any, block: Bounds) -> np.ndarray:
    """Return a block of one Hugging Face tensor in our layout (without the layers axis), in its own dtype.

    An axis of the tensor corresponds to one of our axes or to several, the first of which varies slowest, so that
    bounds on that one are bounds on the tensor's axis. Only this part is read; other axes (within a head) are cut
    afterwards.

    Args:
      tensor: an array, or an object that gives an array when indexed with a slice per axis, like that of safetensors'
        `get_slice`.
      block: bounds in our axes, without the layers axis.
    """
    shape = self.shape[1:] if self.stacked else self.shape
    ranges, covered, cuts = [], [], []
    for size, axis, end in self.groups():
      (start, stop), inner = block[axis], shape[axis + 1 : end]
      first, last = start * math.prod(inner), min(stop * math.prod(inner), size)
      ranges.append(slice(first, last) if first < last else slice(0, 0))  # safetensors wants a start within the axis.
      covered += [stop - start, *inner]
      cuts += [slice(None), *(slice(*bounds) for bounds in block[axis + 1 : end])]
    part = tensor[tuple(ranges[::-1] if self.transpose else ranges)]
    part = part.T if self.transpose else part
    if self.padding and len(part) < covered[0]:
      part = np.concatenate([part, np.zeros((covered[0] - len(part), *part.shape[1:]), part.dtype)])
    return part.reshape(covered)[tuple(cuts)]

  def to_huggingface(self, array: np.ndarray) -> np.ndarray:
    """Return a contiguous Hugging Face tensor: the inverse of `from_huggingface`."""
    array = array[: array.shape[0] - self.padding]
    matrix = array.reshape(self.huggingface_shape[::-1] if self.transpose else self.huggingface_shape)
    return _transposed(matrix) if self.transpose else np.ascontiguousarray(matrix)


def _transposed(matrix: np.ndarray) -> np.ndarray:
  """Return the contiguous transpose of a matrix, several times faster than a copy of `matrix.T`, mostly in bfloat16."""
  source = matrix.view(f'u{matrix.itemsize}')
  rows, columns = source.shape
  result = np.empty((columns, rows), source.dtype)
  strip = np.empty((_STRIP, columns + _APART), source.dtype)[:, :columns]
  for start in range(0, rows, _STRIP):
    part = strip[: min(_STRIP, rows - start)]
    part[...] = source[start : start + _STRIP]
    result[:, start : start + _STRIP] = part.T
  return result.view(matrix.dtype)


Table = tuple[Parameter, ...]


def frozen(table: Table) -> Table:
  """Return the parameters that the base tree holds."""
  return tuple(parameter for parameter in table if parameter.frozen)


def trainable(table: Table) -> Table:
  """Return the parameters that the trainable tree holds."""
  return tuple(parameter for parameter in table if not parameter.frozen)


def frozen_in(table: Table, dtype: str) -> Table:
  """Return the parameters of a table as frozen ones, kept in `dtype`, the model's compute dtype."""
  return tuple(dataclasses.replace(p, frozen=True, dtype=dtype if p.compute else 'float32') for p in table)


def split(table: Table, tree: Tree) -> tuple[Tree, Tree]:
  """Return (base, trainable) from the nested dict of all parameters; the inverse of `merge`."""
  return select(frozen(table), tree), select(trainable(table), tree)


def select(table: Table, tree: Tree) -> Tree:
  """Return the nested dict of the parameters in the table, taken from a tree that may hold more."""
  return nest((parameter.path, get(tree, parameter.path)) for parameter in table)


def held(table: Table, tree: Tree) -> Table:
  """Return those parameters of the table that a nested dict holds."""
  paths = flatten_dict(tree).keys()
  return tuple(parameter for parameter in table if parameter.path in paths)


def get(tree: Tree, path: Path) -> Any:
  """Return the leaf of a nested dict at `path`."""
  for key in path:
    tree = tree[key]
  return tree


def merge(base: Tree, trainable: Tree, path: tuple[Any, ...] = ()) -> Tree:
  """Return the nested dict with the leaves of both trees, which belong at `path`.

  Raises:
    ValueError: both trees have a leaf at a path, or one a leaf and the other a dict; the message names the path.
  """
  merged = dict(base)
  for key, node in trainable.items():
    if key not in base:
      merged[key] = node
    elif isinstance(base[key], dict) and isinstance(node, dict):
      merged[key] = merge(base[key], node, (*path, key))
    else:
      name = '.'.join(map(str, (*path, key)))
      raise ValueError(f'Base and trainable parameters both hold {name}, but each belongs to one of the trees.')
  return merged


def nest(leaves: Iterable[tuple[Path, Any]]) -> Tree:
  """Return the nested dict with the given (path, leaf) pairs."""
  return unflatten_dict(dict(leaves))


def map_table(function: Callable[[Parameter], Any], table: Table) -> Tree:
  """Return the nested dict of function(parameter), such as shapes, shardings or arrays."""
  return nest((parameter.path, function(parameter)) for parameter in table)


def map_tree(function: Callable[[Parameter, Any], Any], table: Table, tree: Tree) -> Tree:
  """Return the nested dict of function(parameter, leaf of `tree`)."""
  return nest((parameter.path, function(parameter, get(tree, parameter.path))) for parameter in table)


def in_compute_dtype(table: Table, tree: Tree, dtype: str) -> Tree:
  """Return the tree cast to `dtype`, except parameters that are used in float32 (norm weights)."""
  return map_tree(lambda p, leaf: leaf.astype(dtype if p.compute else jnp.float32), table, tree)


def count(table: Table) -> int:
  """Return the number of elements of all parameters in the table."""
  return sum(math.prod(p.shape) for p in table)


def initialise(
  table: Table, rng: jax.Array, scale: float, place: Callable[[Parameter, np.ndarray], jax.Array] | None = None
) -> Tree:
  """Return random parameters from the stream of a PRNG key; otherwise as `draw`."""
  return draw(table, np.asarray(jax.random.key_data(rng)).tolist(), scale, place)


def draw(
  table: Table,
  key: Sequence[int],
  scale: float,
  place: Callable[[Parameter, np.ndarray], jax.Array] | None = None,
) -> Tree:
  """Return random parameters: normal with standard deviation `scale` for matrices, ones for norms, zeros for biases.

  `kaiming_uniform` is uniform within ±1/√(inputs), as in torch.nn.Linear and PEFT. Parameters are drawn on the host (a
  compiled generator per shape would take longer than it saves), each array from its own stream.

  Args:
    table: the parameters to draw.
    key: seed words of the stream, such as the data of a PRNG key.
    scale: standard deviation of normal parameters.
    place: function that puts the values of a parameter on its devices; None: on the default device.
  """

  def make(number: int, parameter: Parameter) -> jax.Array:
    generator = np.random.default_rng([*key, number])
    if parameter.init == 'normal':
      values = np.float32(scale) * generator.standard_normal(parameter.shape, np.float32)
      if parameter.padding:
        values[-parameter.padding :] = 0
    elif parameter.init == 'kaiming_uniform':
      bound = np.float32(1 / math.sqrt(parameter.huggingface_shape[-1]))
      values = bound * (2 * generator.random(parameter.shape, np.float32) - 1)
    else:
      values = np.full(parameter.shape, float(parameter.init == 'ones'))
    values = values.astype(parameter.dtype)
    return jax.device_put(values) if place is None else place(parameter, values)

  return nest((parameter.path, make(number, parameter)) for number, parameter in enumerate(table))
