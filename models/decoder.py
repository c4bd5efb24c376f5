"""Decoder-only transformers in Flax NNX, and the policy that wraps one as a pure function of its parameters."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
import math
from typing import Any, Literal, Protocol

from flax import nnx
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from models import cache as kv_cache
from models import parameters
from models.attention import dispatch
from models.attention.backend import AttentionBackend, choose_backend, distinct_windows
from models.policy import Sizes
from sdpo_jax.distributed.mesh import gathered_by_layer
from sdpo_jax.types import Tree

TURNED = 'turned_unembedding'  # [D, V], of parameters that are cast for decoding.


class DecoderConfig(Sizes, Protocol):
  """What the decoder reads of the config of a family (`models.families`): frozen, hashable, nothing of config.json."""

  rope_theta: float
  norm_eps: float
  tied: bool  # The embedding is the unembedding.
  attention_bias: bool
  initializer_range: float  # Standard deviation of random parameters.

  def parameter_table(self) -> parameters.Table:
    """Returns every parameter of the model: those whose paths the modules here name, and no others."""
    ...


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
  """Returns x · rsqrt(mean x² + eps) · weight over the last axis, computed in float32, in the dtype of x."""
  y = x.astype(jnp.float32)
  y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
  return (y * jnp.expand_dims(weight.astype(jnp.float32), tuple(range(x.ndim - 1)))).astype(x.dtype)


def rotation(positions: jax.Array, head_dim: int, theta: float) -> jax.Array:
  """Returns the rotary embedding of positions [B, S] as matrices [B, S, 2, 2, head_dim / 2] float32.

  Pair i of a head's numbers, (x[i], x[i + head_dim / 2]), is turned by the angle position · theta^(−2i / head_dim):
  number a of the result is the sum over b of [..., a, b, i] times number b.
  """
  frequencies = np.float32(1) / np.float32(theta) ** (
    np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
  )
  angles = positions.astype(jnp.float32)[..., None] * jnp.asarray(frequencies)[None, None]
  cosine, sine = jnp.cos(angles), jnp.sin(angles)
  return jnp.stack([cosine, -sine, sine, cosine], axis=2).reshape(*positions.shape, 2, 2, -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rotate(x: jax.Array, matrices: jax.Array, halves: bool = False) -> jax.Array:
  """Rotates x [B, S, H, head_dim] by (scaled) matrices from `rotation`, in float32, in the dtype of x.

  Constant matrices: no gradient goes to them. `halves` swaps the halves of a head as whole vectors, which suits the
  lanes of a TPU; sums of broadcast products suit a CPU, which takes several times as long to concatenate.
  """
  wide = x.astype(jnp.float32)
  if halves:
    first, second = jnp.split(wide, 2, axis=-1)
    own = jnp.concatenate([matrices[:, :, None, 0, 0], matrices[:, :, None, 1, 1]], axis=-1)
    other = jnp.concatenate([matrices[:, :, None, 0, 1], matrices[:, :, None, 1, 0]], axis=-1)
    return (wide * own + jnp.concatenate([second, first], axis=-1) * other).astype(x.dtype)
  pairs = wide.reshape(*x.shape[:-1], 2, -1)
  turned = sum(pairs[..., b : b + 1, :] * matrices[:, :, None, :, b] for b in range(2))
  return turned.reshape(x.shape).astype(x.dtype)


def _rotate_forward(x: jax.Array, matrices: jax.Array, halves: bool) -> tuple[jax.Array, jax.Array]:
  return rotate(x, matrices, halves), matrices


def _rotate_backward(halves: bool, matrices: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
  # The transposed map is a rotation too, and as cheap; differentiated step by step it would be sums over pairs.
  return rotate(gradient, matrices.swapaxes(2, 3), halves), jnp.zeros_like(matrices)


rotate.defvjp(_rotate_forward, _rotate_backward)


def project(x: jax.Array, weight: jax.Array, inputs: int = 1) -> jax.Array:
  """Returns x [..., *in] · weight [*in, *out] over `inputs` axes; accumulates in float32, in the dtype of x."""
  size = math.prod(weight.shape[:inputs])
  y = _product(x.reshape(*x.shape[: x.ndim - inputs], size), weight.reshape(size, -1))
  return y.reshape(*y.shape[:-1], *weight.shape[inputs:])


@jax.custom_vjp
def _product(x: jax.Array, weight: jax.Array) -> jax.Array:
  """Returns x [..., in] · weight [in, out]."""
  return _dot(x, weight, ((x.ndim - 1,), (0,)))


def _dot(left: jax.Array, right: jax.Array, axes: tuple[tuple[int, ...], tuple[int, ...]]) -> jax.Array:
  precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
  return lax.dot_general(left, right, (axes, ((), ())), precision=precision, preferred_element_type=left.dtype)


def _product_forward(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  # Not by calling `_product`: rematerialisation policies look for matrix products, and do not look into it.
  return _dot(x, weight, ((x.ndim - 1,), (0,))), (x, weight)


def _product_backward(kept: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
  # JAX's own rule multiplies the other way round and transposes the result, for which a CPU copies both factors.
  x, weight = kept
  rows = tuple(range(x.ndim - 1))
  return _dot(gradient, weight, ((gradient.ndim - 1,), (1,))), _dot(x, gradient, (rows, rows)).astype(weight.dtype)


_product.defvjp(_product_forward, _product_backward)


class Attention(nnx.Module):
  """Grouped-query attention with normalised queries and keys."""

  def __init__(self, config: DecoderConfig, make: Callable[[str], nnx.Param]):
    self.config = config
    self.query, self.key, self.value, self.output = make('query'), make('key'), make('value'), make('output')
    self.query_norm, self.key_norm = make('query_norm'), make('key_norm')
    if config.attention_bias:
      self.query_bias, self.key_bias = make('query_bias'), make('key_bias')
      self.value_bias, self.output_bias = make('value_bias'), make('output_bias')

  def heads(self, x: jax.Array, matrices: jax.Array, halves: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns queries [B, S, H, head_dim], rotated and scaled, and rotated keys and values [B, S, KV, head_dim]."""
    query, key, value = project(x, self.query[...]), project(x, self.key[...]), project(x, self.value[...])
    if self.config.attention_bias:
      query = query + self.query_bias[...][None, None]
      key = key + self.key_bias[...][None, None]
      value = value + self.value_bias[...][None, None]
    # Attention's 1 / √head_dim goes here, so that it is not rounded to the compute dtype by itself.
    scaled = matrices * self.config.head_dim**-0.5
    query = rotate(rms_norm(query, self.query_norm[...], self.config.norm_eps), scaled, halves)
    key = rotate(rms_norm(key, self.key_norm[...], self.config.norm_eps), matrices, halves)
    return query, key, value

  def merge(self, mixed: jax.Array) -> jax.Array:
    """Returns [B, S, D] from the heads' outputs [B, S, H, head_dim]."""
    y = project(mixed, self.output[...], inputs=2)
    return y + self.output_bias[...][None, None] if self.config.attention_bias else y


class Mlp(nnx.Module):
  """SwiGLU: down(silu(gate x) · up x)."""

  def __init__(self, make: Callable[[str], nnx.Param]):
    self.gate, self.up, self.down = make('gate'), make('up'), make('down')

  def __call__(self, x: jax.Array) -> jax.Array:
    return project(jax.nn.silu(project(x, self.gate[...])) * project(x, self.up[...]), self.down[...])


class Block(nnx.Module):
  """One decoder layer; its parameters may carry a leading layers axis, which a scan removes."""

  def __init__(self, config: DecoderConfig, make: Callable[[str], nnx.Param]):
    self.config = config
    self.attention_norm, self.mlp_norm = make('attention_norm'), make('mlp_norm')
    self.attention = Attention(config, lambda name: make(f'attention.{name}'))
    self.mlp = Mlp(lambda name: make(f'mlp.{name}'))

  def __call__(self, x: jax.Array, matrices: jax.Array, halves: bool, mix: Callable) -> tuple[jax.Array, Any]:
    """Returns x [B, S, D] after the layer, and `extra` of `mix(query, key, value) -> (mixed, extra)`."""
    normed = rms_norm(x, self.attention_norm[...], self.config.norm_eps)
    query, key, value = self.attention.heads(normed, matrices, halves)
    mixed, extra = mix(query, key, value)
    x = x + self.attention.merge(mixed)
    return x + self.mlp(rms_norm(x, self.mlp_norm[...], self.config.norm_eps)), extra


class Decoder(nnx.Module):
  """The whole model; its layers are one block with stacked parameters, to be scanned, or (`unrolled`) a list."""

  def __init__(self, config: DecoderConfig, make: Callable[[str], nnx.Param], unrolled: bool):
    self.config = config
    self.embedding = make('embedding')
    blocks = [Block(config, lambda name: make(f'layers.{name}')) for _ in range(config.layers if unrolled else 1)]
    self.layers = nnx.List(blocks) if unrolled else blocks[0]
    self.final_norm = make('final_norm')
    if not config.tied:
      self.unembedding = make('unembedding')

  def output_matrix(self) -> jax.Array:
    """Returns the unembedding [V, D], the embedding itself where tied."""
    return (self.embedding if self.config.tied else self.unembedding)[...]

  def __call__(
    self,
    tokens: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    cache: kv_cache.KVCache | None,
    parents: jax.Array | None,
    remat: str,
    backend: AttentionBackend,
  ) -> tuple[jax.Array, kv_cache.KVCache | None]:
    """Returns final hidden states [B, S, D] and the updated cache; arguments as in `DecoderPolicy.apply`."""
    config = self.config
    matrices = rotation(positions, config.head_dim, config.rope_theta)
    # A cache without recent tokens is to be filled by these: what they attend to is themselves.
    whole = cache is None or cache.recent is None
    slot, store = None, None
    if cache is not None:
      into = cache if whole else cache.recent
      slot, store = jnp.zeros((), jnp.int32) if whole else into.length, into.stores
    if whole:
      mix = self._whole(backend, segment_ids, parents, sampling=cache is not None)
    else:
      mix_as = self._onto_stacks if backend.stacked_cache else self._onto
      mix = mix_as(backend, positions, segment_ids, cache)
    row_axes, _ = backend.axes(tokens.shape[0], config.kv_heads, sampling=cache is not None)

    def layer(block, x, store, index):
      def mix_and_store(query, key, value):
        updated = None if store is None else kv_cache.append_layer(store, key, value, index, slot)
        return mix(query, key, value, updated, index), updated

      x, store = block(backend.constrain(x, row_axes, None, None), matrices, backend.halves, mix_and_store)
      return backend.constrain(x, row_axes, None, None), store

    x = jnp.take(self.embedding[...], tokens, axis=0)
    if isinstance(self.layers, nnx.List):
      for index, block in enumerate(self.layers):
        x, store = layer(block, x, store, index)
    else:
      graph, stacked = nnx.split(self.layers)

      def scanned(carry, inputs):
        state, index = inputs
        return layer(nnx.merge(graph, state), *carry, index), None

      inputs = stacked, jnp.arange(config.layers, dtype=jnp.int32)
      (x, store), _ = lax.scan(_remat(scanned, remat if cache is None else 'none'), (x, store), inputs)
    if cache is not None and whole:
      filled = jnp.sum((segment_ids > 0).astype(jnp.int32), axis=1)
      cache = cache.replace(stores=store, lengths=filled)
    elif cache is not None:
      cache = cache.replace(recent=kv_cache.Recent(store, slot + tokens.shape[1]))
    return rms_norm(x, self.final_norm[...], config.norm_eps), cache

  # What follows returns mix(query, key, value, stores of this call, layer) -> [B, S, H, head_dim].

  def _whole(self, backend, segment_ids, parents, sampling):
    """Attention of whole sequences to themselves."""
    starts = dispatch.segment_starts(segment_ids)
    windows = distinct_windows(self.config.windows)
    indices = jnp.asarray([windows.index(window) for window in self.config.windows or (0,) * self.config.layers])

    def mix(query, key, value, store, layer):
      del store
      return dispatch.attend_whole(
        backend,
        query,
        key,
        value,
        segment_ids,
        starts,
        windows=windows,
        window_index=indices.astype(jnp.int32)[layer],
        sampling=sampling,
        parents=parents,
      )

    return mix

  def _onto(self, backend, positions, segment_ids, cache):
    """Attention to all that the cache holds, by the plain formula."""
    del backend
    keys = [
      dispatch.in_slots(start, filled, kv_cache.slots(part))
      for part, (start, filled) in zip((cache, cache.recent), self._held(segment_ids, cache), strict=True)
    ]
    queries = positions, (segment_ids > 0).astype(jnp.int32)

    def visible(window):
      return [dispatch.visible(*queries, *part, window) for part in keys]

    everything = visible(None)

    def mix(query, key, value, store, layer):
      del key, value
      masks = everything
      if self.config.windows is not None:
        window = jnp.asarray(self.config.windows, jnp.int32)[layer]
        masks = [mask & (near | (window == 0)) for mask, near in zip(everything, visible(window), strict=True)]
      parts = [
        (kv_cache.layer_of(stores, layer), mask) for stores, mask in zip((cache.stores, store), masks, strict=True)
      ]
      return dispatch.attend(query, *parts)

    return mix

  def _onto_stacks(self, backend, positions, segment_ids, cache):
    """Attention to all that the cache holds, by the kernel that reads the stacks in place."""
    windows = jnp.asarray(self.config.windows or (0,) * self.config.layers, jnp.int32)
    held, behind = self._held(segment_ids, cache)

    def mix(query, key, value, store, layer):
      del key, value
      parts = [(cache.stores, *held), (store, *behind)]
      return dispatch.attend_stacks(backend, query, positions, parts, layer, windows[layer])

    return mix

  @staticmethod
  def _held(segment_ids, cache):
    """Returns (first position, slots filled), each [B] int32, of the cache and its recent tokens, new ones included.

    A row whose tokens are all padding reads nothing.
    """
    live = jnp.any(segment_ids > 0, axis=1)
    recent, start = cache.recent.length + segment_ids.shape[1], jnp.zeros_like(cache.lengths)
    filled, filled_recent = (jnp.where(live, length, 0) for length in (cache.lengths, recent))
    return (start, filled), (cache.lengths, filled_recent)


def _remat(layer: Callable, remat: str) -> Callable:
  """Returns the layer with what its backward pass recomputes.

  'none', 'full' (all), 'save_attention' (all but attention) or 'dots' (all but matrix products).
  """
  if remat == 'none':
    return layer
  saved = {
    'full': None,
    'save_attention': jax.checkpoint_policies.save_only_these_names(dispatch.RESIDUALS),
    'dots': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
  }[remat]
  # Inside a scan the loop itself keeps the compiler from merging the recomputation with the forward pass.
  return jax.checkpoint(layer, policy=saved, prevent_cse=False)


@functools.cache
def _graph(config: DecoderConfig, unrolled: bool) -> nnx.GraphDef:
  by_name = {parameter.name: parameter for parameter in config.parameter_table()}

  def make(name: str) -> nnx.Param:
    parameter = by_name[name]
    return nnx.Param(jax.ShapeDtypeStruct(parameter.shape, jnp.dtype(parameter.dtype)), axes=parameter.axes)

  return nnx.graphdef(Decoder(config, make, unrolled))


@dataclasses.dataclass(frozen=True)
class DecoderPolicy:
  """A decoder as a pure function of its parameters (`models.policy.Policy`); static under `jit`.

  Parameters whose names begin with one of `frozen` are in the base, the others in the trainable tree; full fine-tuning,
  the default, leaves the base empty.
  """

  config: DecoderConfig
  dtype: Literal['float32', 'bfloat16'] = 'bfloat16'
  remat: Literal['none', 'full', 'save_attention', 'dots'] = 'full'
  backend: AttentionBackend = AttentionBackend()
  frozen: tuple[str, ...] = ()  # Names of parameters or of what holds some: 'embedding', 'layers.mlp'.

  @property
  def vocab_size(self) -> int:
    return self.config.vocab_size

  @property
  def reads_filled(self) -> bool:
    return self.backend.stacked_cache

  @property
  def shares_prefixes(self) -> bool:
    return self.config.windows is None

  def on(self, mesh: jax.sharding.Mesh | None, attention_setting: str = 'auto') -> DecoderPolicy:
    """See `models.policy.Policy.on`."""
    backend = choose_backend(attention_setting, self.dtype, self.config.head_dim, mesh)
    return dataclasses.replace(self, backend=backend)

  def with_remat(self, remat: str) -> DecoderPolicy:
    """See `models.policy.Policy.with_remat`."""
    return dataclasses.replace(self, remat=remat)

  def parameter_table(self) -> parameters.Table:
    """See `models.policy.Policy.parameter_table`.

    Raises:
      ValueError: no parameter has a name that begins with an entry of `frozen`.
    """
    return _table(self.config, self.frozen)

  def cast(self, base: Tree, trainable: Tree) -> tuple[Tree, Tree]:
    """See `models.policy.Policy.cast`.

    Compute dtype, but for norm weights, which stay float32. Of a shallow model (`models.cache.SHALLOW`), a tree per
    layer under 'layers' instead of the stacked arrays, and the unembedding as [D, V] beside it where it is whole: with
    few rows, which is half of such a model's step, a CPU multiplies by it in four fifths of the time.
    """
    return self._cast(base), self._cast(trainable)

  def _cast(self, params: Tree) -> Tree:
    if _is_cast(params):
      return params
    params = self._in_compute_dtype(params)
    if self.config.layers > kv_cache.SHALLOW:
      return params
    if 'layers' in params:
      layers = {i: jax.tree.map(lambda leaf, i=i: leaf[i], params['layers']) for i in range(self.config.layers)}
      params = params | {'layers': layers}
    matrix = 'embedding' if self.config.tied else 'unembedding'
    turned = matrix in params and not self.backend.divided
    return params | {TURNED: params[matrix].T} if turned else params

  def apply(
    self,
    base: Tree,
    trainable: Tree,
    tokens: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    cache: kv_cache.KVCache | None = None,
    parents: jax.Array | None = None,
  ) -> tuple[jax.Array, jax.Array, kv_cache.KVCache | None]:
    """See `models.policy.Policy.apply`.

    Hidden states and unembedding are in compute dtype. States of padding (segment 0) are finite and without meaning.
    """
    if cache is not None or _is_cast(base) or _is_cast(trainable):
      params = parameters.merge(*self.cast(base, trainable))
    else:
      params = self._in_compute_dtype(parameters.merge(base, trainable))
      params = self._ready_to_gather(params, tokens.shape[0])
    turned = params.pop(TURNED, None)
    decoder = nnx.merge(_graph(self.config, _is_unrolled(params)), params)
    hidden, cache = decoder(tokens, positions, segment_ids, cache, parents, self.remat, self.backend)
    return hidden, decoder.output_matrix() if turned is None else turned.T, cache

  def init_cache(self, batch_size: int, length: int, quantized: bool = False) -> kv_cache.KVCache:
    """See `models.policy.Policy.init_cache`."""
    stacked = self.backend.stacked_cache or self.config.layers > kv_cache.SHALLOW
    return self._empty(batch_size, length, jnp.int8 if quantized else jnp.dtype(self.dtype), stacked)

  def with_recent(self, cache: kv_cache.KVCache, length: int) -> kv_cache.KVCache:
    """See `models.policy.Policy.with_recent`."""
    dtype = jax.tree.leaves(cache.stores.keys)[0].dtype
    empty = self._empty(cache.lengths.shape[0], length, dtype, cache.stores.stacked)
    return cache.replace(recent=kv_cache.Recent(empty.stores, jnp.zeros((), jnp.int32)))

  def _empty(self, rows: int, length: int, dtype: jnp.dtype, stacked: bool) -> kv_cache.KVCache:
    """Returns an empty cache; if stacked, rows and heads lie where the decoding kernel looks for them."""
    config = self.config
    empty = kv_cache.init(config.layers, rows, config.kv_heads, length, config.head_dim, dtype, stacked=stacked)
    if not stacked:
      return empty
    row_axes, head_axis = self.backend.axes(rows, config.kv_heads, sampling=True)

    def place(stack: jax.Array) -> jax.Array:
      return self.backend.constrain(stack, None, row_axes, head_axis, None, None)

    return empty.replace(stores=jax.tree.map(place, empty.stores))

  def _ready_to_gather(self, params: Tree, rows: int) -> Tree:
    """Places stacked matrices as the layer loop of `rows` rows gathers them, where these are spread over the mesh."""
    mesh = self.backend.mesh
    if not self.backend.divided or rows % mesh.size:
      return params

    def place(parameter: parameters.Parameter, leaf: jax.Array) -> jax.Array:
      if not (parameter.stacked and parameter.compute):
        return leaf
      return lax.with_sharding_constraint(leaf, gathered_by_layer(mesh, parameter.axes, parameter.shape))

    return parameters.map_tree(place, self.parameter_table(), params)

  def _in_compute_dtype(self, params: Tree) -> Tree:
    def cast(parameter: parameters.Parameter, leaf: jax.Array) -> jax.Array:
      return leaf.astype(self.dtype if parameter.compute else jnp.float32)

    return parameters.map_tree(cast, parameters.held(self.parameter_table(), params), params)


@functools.cache
def _table(config: DecoderConfig, frozen: tuple[str, ...]) -> parameters.Table:
  table = config.parameter_table()
  names = [parameter.name for parameter in table]
  for prefix in frozen:
    if not any(_begins(name, prefix) for name in names):
      raise ValueError(f'No parameter has a name that begins with {prefix!r}; there are {", ".join(names)}.')
  return tuple(
    dataclasses.replace(parameter, frozen=any(_begins(parameter.name, prefix) for prefix in frozen))
    for parameter in table
  )


def _begins(name: str, prefix: str) -> bool:
  return f'{name}.'.startswith(f'{prefix}.')


def _is_unrolled(params: Tree) -> bool:
  return 0 in params.get('layers', ())


def _is_cast(params: Tree) -> bool:
  """Whether a tree has the form that `cast` gives to parameters of shallow models."""
  return _is_unrolled(params) or TURNED in params
