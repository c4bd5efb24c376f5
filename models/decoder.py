"""Decoder-only transformers in Flax NNX, and the policy that wraps one as a pure function of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import functools
import math
from typing import Any, Literal, NamedTuple

from flax import nnx
import jax
from jax import lax
import jax.numpy as jnp

from sdpo_jax.distributed.mesh import gathered_by_layer
from sdpo_jax.models import cache as kv_cache
from sdpo_jax.models import parameters
from sdpo_jax.models.adapters import kv_prefix, lora, lora_pool, slot_names
from sdpo_jax.models.architecture import Activation, Architecture
from sdpo_jax.models.attention import dispatch
from sdpo_jax.models.attention.backend import AttentionBackend, choose_backend, distinct_windows
from sdpo_jax.models.attention.prefix import Prefix
from sdpo_jax.models.families.table import parameter_table
from sdpo_jax.models.rope import rotate, rotation
from sdpo_jax.types import Tree

AnyAdapter = lora.Adapter | lora_pool.LoraPool | kv_prefix.KVPrefix
TURNED = 'turned_unembedding'  # The unembedding as [D, V], in parameters that are cast for decoding.
ACTIVATIONS: Mapping[Activation, Callable[[jax.Array], jax.Array]] = {
  'silu': jax.nn.silu,
  'gelu_tanh': functools.partial(jax.nn.gelu, approximate=True),
}


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, offset: float = 0.0) -> jax.Array:
  """Return x · rsqrt(mean x² + eps) · (weight + offset), with the mean over the axes of the weight, the last of x.

  It is computed in float32 and returned in the dtype of x.
  """
  y, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
  y = y * lax.rsqrt(jnp.mean(y * y, axis=tuple(range(-weight.ndim, 0)), keepdims=True) + eps)
  weight = weight + offset if offset else weight
  return (y * jnp.expand_dims(weight, tuple(range(x.ndim - weight.ndim)))).astype(x.dtype)


def project(x: jax.Array, weight: jax.Array, inputs: int = 1) -> jax.Array:
  """Return x [..., *in] · weight [*in, *out], contracted over `inputs` axes, in the dtype of x."""
  size = math.prod(weight.shape[:inputs])
  y = _product(x.reshape(*x.shape[: x.ndim - inputs], size), weight.reshape(size, -1))
  return y.reshape(*y.shape[:-1], *weight.shape[inputs:])


@jax.custom_vjp
def _product(x: jax.Array, weight: jax.Array) -> jax.Array:
  """Return x [..., in] · weight [in, out]."""
  return _dot(x, weight, ((x.ndim - 1,), (0,)))


def _dot(left: jax.Array, right: jax.Array, axes: tuple[tuple[int, ...], tuple[int, ...]]) -> jax.Array:
  precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
  return lax.dot_general(left, right, (axes, ((), ())), precision=precision, preferred_element_type=left.dtype)


def _product_forward(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  # `_product` is not called, since rematerialisation policies would not find the matrix product inside it.
  return _dot(x, weight, ((x.ndim - 1,), (0,))), (x, weight)


def _product_backward(kept: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
  # JAX's own rule multiplies in the other order and transposes the result, for which a CPU copies both operands.
  x, weight = kept
  rows = tuple(range(x.ndim - 1))
  return _dot(gradient, weight, ((gradient.ndim - 1,), (1,))), _dot(x, gradient, (rows, rows)).astype(weight.dtype)


_product.defvjp(_product_forward, _product_backward)


def prefix_of(adapter: AnyAdapter | None) -> kv_prefix.KVPrefix | None:
  """Return an adapter that is a prefix, or the cartridges of a pool; None: there are none."""
  if isinstance(adapter, lora_pool.LoraPool):
    return adapter.cartridges
  return adapter if isinstance(adapter, kv_prefix.KVPrefix) else None


class Layer(NamedTuple):
  """The arguments of a block that depend on the layer and on the batch."""

  index: jax.Array | int
  adapters: jax.Array | None  # [B] int32, the adapter of a pool that each row uses.


class Block(nnx.Module):
  """A decoder layer; its parameters may have a leading layers axis, which a scan removes.

  The parameter table determines which norms, biases and factors there are.
  """

  def __init__(
    self, config: Architecture, adapter: AnyAdapter | None, make: Callable[[parameters.Parameter], nnx.Param]
  ):
    self.config, self.adapter, self.shared = config, adapter, prefix_of(adapter)
    table = [parameter for parameter in _whole_table(config, adapter) if parameter.stacked]
    self.names = frozenset('.'.join(parameter.path[1:]) for parameter in table)
    for name, held in parameters.nest((parameter.path[1:], make(parameter)) for parameter in table).items():
      setattr(self, name, nnx.Dict(held) if isinstance(held, dict) else held)

  def __call__(
    self, x: jax.Array, layer: Layer, matrices: jax.Array, halves: bool, mix: Callable
  ) -> tuple[jax.Array, Any]:
    """Return x [B, S, D] after the layer, and the second result of `mix(query, key, value) -> (mixed, extra)`."""
    query, key, value = self.heads(self.norm('attention_norm', x), layer, matrices, halves)
    mixed, extra = mix(query, key, value)
    x = x + self.norm('attention_post_norm', self.linear('attention.output', mixed, layer, inputs=2))
    return x + self.norm('mlp_post_norm', self.gated(self.norm('mlp_norm', x), layer)), extra

  def linear(self, name: str, x: jax.Array, layer: Layer, inputs: int = 1) -> jax.Array:
    """Return x [..., *in] times the named matrix [*in, *out] of the layer, plus the term of its factors and its bias.

    All products of a layer with its matrices are computed here.
    """
    y = project(x, self._parameter(name), inputs)
    if f'{name}_{lora.A}' in self.names:
      y = y + self._factors_part(name, x, layer, inputs)
    if f'{name}_bias' not in self.names:
      return y
    bias = self._parameter(f'{name}_bias')
    return y + jnp.expand_dims(bias, tuple(range(y.ndim - bias.ndim)))

  def _factors_part(self, name: str, x: jax.Array, layer: Layer, inputs: int) -> jax.Array:
    """Return the term that the factors of a matrix add to the product; arguments as in `linear`."""
    a, b = (self._parameter(f'{name}_{suffix}') for suffix in (lora.A, lora.B))
    scale = self.adapter.by_name[f'layers.{name}'].scale(layer.index)
    if isinstance(self.adapter, lora_pool.LoraPool):
      return lora_pool.part(self.adapter, x, a, b, layer.adapters, scale, inputs)
    # The product of the factors is never added to the matrix itself, as bfloat16 would round it away.
    inner = project(x, a, inputs)
    return project((inner.astype(jnp.float32) * scale).astype(x.dtype), b)

  def slots(self) -> Prefix | None:
    """Return keys and values [KV, P, head_dim] of the layer's slots, or [L, …] of all layers; None without any."""
    if self.shared is None or not self.shared.slots:
      return None
    parts = [(slot_names.FROZEN_KEY, slot_names.FROZEN_VALUE), (slot_names.KEY, slot_names.VALUE)]
    held = [[self._parameter(name) for name in names] for names in parts if names[0] in self.names]
    return Prefix(
      *(jnp.concatenate(arrays, axis=-2) for arrays in zip(*held, strict=True)),
      divided=self.shared.parts is not None,
      trained=self.shared.trained,
    )

  def bank(self) -> Prefix:
    """Return the prefixes of a bank, [N, KV, slots, head_dim], with the number of slots filled, [N]; or [L, …]."""
    names = slot_names.BANK_KEY, slot_names.BANK_VALUE, slot_names.FILLED
    key, value, filled = map(self._parameter, names)
    return Prefix(key, value, filled=filled.astype(jnp.int32), divided=self.shared.parts is not None)

  def norm(self, name: str, x: jax.Array) -> jax.Array:
    """Return x after the norm with the weight `name`; x itself if the layer has no such norm."""
    if name not in self.names:
      return x
    return rms_norm(x, self._parameter(name), self.config.norm_eps, self.config.norm_offset)

  def heads(
    self, x: jax.Array, layer: Layer, matrices: jax.Array, halves: bool
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return queries [B, S, H, head_dim], rotated and scaled, and rotated keys and values [B, S, KV, head_dim]."""
    query, key, value = (self.linear(f'attention.{name}', x, layer) for name in ('query', 'key', 'value'))
    # The scale of scores is applied to the float32 matrices, so that it is not rounded to the compute dtype by itself.
    scaled = matrices * self.config.query_scale
    query = rotate(self.norm('attention.query_norm', query), scaled, halves)
    key = rotate(self.norm('attention.key_norm', key), matrices, halves)
    return query, key, value

  def gated(self, x: jax.Array, layer: Layer) -> jax.Array:
    """Return the output of the gated MLP: down(activation(gate x) · up x)."""
    activation = ACTIVATIONS[self.config.activation]
    gate, up = (self.linear(f'mlp.{name}', x, layer) for name in ('gate', 'up'))
    return self.linear('mlp.down', activation(gate) * up, layer)

  def _parameter(self, name: str) -> jax.Array:
    return functools.reduce(getattr, name.split('.'), self)[...]


class Decoder(nnx.Module):
  """The whole model; its layers are one block with stacked parameters, which is scanned, or (`unrolled`) a list."""

  def __init__(
    self,
    config: Architecture,
    adapter: AnyAdapter | None,
    make: Callable[[parameters.Parameter], nnx.Param],
    unrolled: bool,
  ):
    self.config, self.shared = config, prefix_of(adapter)
    self.both = isinstance(adapter, lora_pool.LoraPool) and self.shared is not None
    for parameter in parameter_table(config):
      if not parameter.stacked:
        setattr(self, parameter.name, make(parameter))
    blocks = [Block(config, adapter, make) for _ in range(config.layers if unrolled else 1)]
    self.layers = nnx.List(blocks) if unrolled else blocks[0]

  def output_matrix(self) -> jax.Array:
    """Return the unembedding [V, D], which is the embedding if they are tied."""
    return (self.embedding if self.config.tied else self.unembedding)[...]

  def __call__(
    self,
    tokens: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    cache: kv_cache.KVCache | None,
    parents: jax.Array | None,
    members: jax.Array | None,
    remat: str,
    backend: AttentionBackend,
  ) -> tuple[jax.Array, kv_cache.KVCache | None]:
    """Return final hidden states [B, S, D] and the updated cache; arguments as in `DecoderPolicy.apply`."""
    config = self.config
    adapters, members = (members[:, 0], members[:, 1]) if self.both and members is not None else (members, members)
    after_slots = positions + self._slots_before(members)
    matrices_of = self._rotations(after_slots)
    # A cache without `recent` is filled with these tokens, which attend only to each other.
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

    reads_bank = members is not None and self._has_bank

    def layer(block, prefix, bank, x, store, index):
      prefix = self._seen(prefix, bank, members, after_slots, index)

      def mix_and_store(query, key, value):
        updated = None if store is None else kv_cache.append_layer(store, key, value, index, slot)
        return mix(query, key, value, prefix, updated, index), updated

      x = backend.constrain(x, row_axes, None, None)
      x, store = block(x, Layer(index, adapters), matrices_of(index), backend.halves, mix_and_store)
      return backend.constrain(x, row_axes, None, None), store

    x = jnp.take(self.embedding[...], tokens, axis=0)
    if config.embedding_scale is not None:
      x = x * jnp.asarray(config.embedding_scale, x.dtype)
    if isinstance(self.layers, nnx.List):
      for index, block in enumerate(self.layers):
        bank = block.bank() if reads_bank else None
        x, store = layer(block, block.slots(), bank, x, store, index)
    else:
      graph, stacked = nnx.split(self.layers)
      # Join the slots of all layers at once, which a decode loop then does once, not in every layer of every step.
      # A scan would copy all of a layer's bank, of which few rows read little.
      bank = self.layers.bank() if reads_bank else None

      def scanned(carry, inputs):
        state, prefix, index = inputs
        return layer(nnx.merge(graph, state), prefix, bank, *carry, index), None

      inputs = stacked, self.layers.slots(), jnp.arange(config.layers, dtype=jnp.int32)
      (x, store), _ = lax.scan(_remat(scanned, remat if cache is None else 'none'), (x, store), inputs)
    if cache is not None and whole:
      filled = jnp.sum((segment_ids > 0).astype(jnp.int32), axis=1)
      cache = cache.replace(stores=store, lengths=filled)
    elif cache is not None:
      cache = cache.replace(recent=kv_cache.Recent(store, slot + tokens.shape[1]))
    return rms_norm(x, self.final_norm[...], config.norm_eps, config.norm_offset), cache

  def _rotations(self, positions: jax.Array) -> Callable[[jax.Array | int], jax.Array]:
    """Return the function from a layer's index to its rotation matrices, each of which is computed once."""
    config = self.config
    made = [rotation(positions, config.head_dim, rope) for rope in config.ropes]
    if config.layer_ropes is None:
      return lambda layer: made[0]
    if isinstance(self.layers, nnx.List):
      return lambda layer: made[config.layer_ropes[layer]]
    stacked, places = jnp.stack(made), jnp.asarray(config.layer_ropes, jnp.int32)
    return lambda layer: lax.dynamic_index_in_dim(stacked, places[layer], keepdims=False)

  @property
  def _has_bank(self) -> bool:
    return self.shared is not None and self.shared.members is not None

  def _slots_before(self, members: jax.Array | None) -> jax.Array | int:
    """Return the number of slots before the tokens; [B, 1] int32 if rows read those of a bank."""
    if self.shared is None:
      return 0
    if members is None or not self._has_bank:
      return self.shared.slots
    first = self.layers[0] if isinstance(self.layers, nnx.List) else self.layers
    return self._filled(first.bank(), members)[:, None]

  def _filled(self, bank: Prefix, members: jax.Array) -> jax.Array:
    """Return the number [B] of slots that rows see: those of all rows, and those of their members of a bank."""
    counts = jnp.take(bank.filled.reshape(-1, self.shared.members)[0], members, mode='clip')
    counts = jnp.where(members < 0, 0, counts)
    return self.shared.slots + (counts.sum(1) if counts.ndim == 2 else counts)

  def _seen(
    self,
    prefix: Prefix | None,
    bank: Prefix | None,
    members: jax.Array | None,
    positions: jax.Array,
    layer: jax.Array | int,
  ) -> Prefix | None:
    """Return the prefix of a layer with what each row sees of it: its filled slots, and the first [B, S] in a window.

    Args:
      prefix: from `Block.slots`.
      bank: from `Block.bank`, of this layer or of all; None: there is none, or no row reads it.
      members: [B] or [B, K] int32, the prefixes of the bank that each row reads.
      positions: [B, S] int32, after the slots.
      layer: index of the layer.
    """
    if prefix is None and bank is None:
      return None
    if bank is not None:
      key, value = (array.reshape(-1, *array.shape[-3:]) for array in (bank.key, bank.value))
      first = layer * self.shared.members if len(key) > self.shared.members else 0
      before = None if prefix is None else (prefix.key, prefix.value)
      # Of consecutive rows, those that read a prefix read the same.
      index = members.reshape(-1, self.shared.rows_alike).max(1) if self.shared.rows_alike > 1 else members
      prefix = (prefix or bank).replace(
        key=key, value=value, index=first + index, filled=self._filled(bank, members), before=before
      )
    elif self.shared.filling:
      prefix = prefix.replace(filled=positions[0, 0])
    elif self.shared.room > self.shared.slots:
      prefix = prefix.replace(filled=jnp.int32(self.shared.slots))
    if self.config.windows is None or not self.shared.within_windows:
      return prefix
    window = jnp.asarray(self.config.windows, jnp.int32)[layer]
    return prefix.replace(first=jnp.where(window > 0, jnp.maximum(positions - window + 1, 0), 0))

  # The following methods return mix(query, key, value, prefix, updated stores, layer) -> [B, S, H, head_dim].

  def _whole(self, backend, segment_ids, parents, sampling):
    """Return `mix` for attention of whole sequences to themselves."""
    starts = dispatch.segment_starts(segment_ids)
    windows = distinct_windows(self.config.windows)
    indices = jnp.asarray([windows.index(window) for window in self.config.windows or (0,) * self.config.layers])

    def mix(query, key, value, prefix, store, layer):
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
        prefix=prefix,
      )

    return mix

  def _onto(self, backend, positions, segment_ids, cache):
    """Return `mix` for attention to all tokens in the cache, by the plain formula."""
    del backend
    keys = [
      dispatch.in_slots(start, filled, kv_cache.slots(part))
      for part, (start, filled) in zip((cache, cache.recent), self._held(segment_ids, cache), strict=True)
    ]
    queries = positions, (segment_ids > 0).astype(jnp.int32)

    def visible(window):
      return [dispatch.visible(*queries, *part, window) for part in keys]

    everything = visible(None)

    def mix(query, key, value, prefix, store, layer):
      del key, value
      masks = everything
      if self.config.windows is not None:
        window = jnp.asarray(self.config.windows, jnp.int32)[layer]
        masks = [mask & (near | (window == 0)) for mask, near in zip(everything, visible(window), strict=True)]
      parts = [
        (kv_cache.layer_of(stores, layer), mask) for stores, mask in zip((cache.stores, store), masks, strict=True)
      ]
      return dispatch.attend(query, *parts, prefix=prefix)

    return mix

  def _onto_stacks(self, backend, positions, segment_ids, cache):
    """Return `mix` for attention to all tokens in the cache, by the kernel that reads the stacks in place."""
    windows = jnp.asarray(self.config.windows or (0,) * self.config.layers, jnp.int32)
    held, behind = self._held(segment_ids, cache)

    def mix(query, key, value, prefix, store, layer):
      del key, value
      parts = [(cache.stores, *held), (store, *behind)]
      return dispatch.attend_stacks(backend, query, positions, parts, layer, windows[layer], prefix)

    return mix

  @staticmethod
  def _held(segment_ids, cache):
    """Return (first position, slots filled), [B] int32 each, of the cache and of its recent tokens, with the new ones.

    A row whose new tokens are all padding reads nothing.
    """
    live = jnp.any(segment_ids > 0, axis=1)
    recent, start = cache.recent.length + segment_ids.shape[1], jnp.zeros_like(cache.lengths)
    filled, filled_recent = (jnp.where(live, length, 0) for length in (cache.lengths, recent))
    return (start, filled), (cache.lengths, filled_recent)


def _remat(layer: Callable, remat: str) -> Callable:
  """Return the layer with rematerialisation in its backward pass.

  `remat` says what is recomputed: 'none', 'full' (everything), 'save_attention' (all but attention) or 'dots' (all but
  matrix products).
  """
  if remat == 'none':
    return layer
  saved = {
    'full': None,
    'save_attention': jax.checkpoint_policies.save_only_these_names(dispatch.RESIDUALS),
    'dots': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
  }[remat]
  # Inside a scan, the loop itself keeps the compiler from merging the recomputation with the forward pass.
  return jax.checkpoint(layer, policy=saved, prevent_cse=False)


@functools.cache
def _graph(config: Architecture, adapter: AnyAdapter | None, unrolled: bool) -> nnx.GraphDef:
  def make(parameter: parameters.Parameter) -> nnx.Param:
    return nnx.Param(jax.ShapeDtypeStruct(parameter.shape, jnp.dtype(parameter.dtype)), axes=parameter.axes)

  return nnx.graphdef(Decoder(config, adapter, make, unrolled))


@dataclasses.dataclass(frozen=True)
class DecoderPolicy:
  """A decoder as a pure function of its parameters (`sdpo_jax.models.policy.Policy`); static under `jit`.

  In full fine-tuning, the default, the base is empty. With an adapter, all parameters are in the base, and the factors
  or slots are the trainable tree. Without one, parameters whose names begin with an entry of `frozen` are in the base.
  """

  config: Architecture
  dtype: Literal['float32', 'bfloat16'] = 'bfloat16'
  remat: Literal['none', 'full', 'save_attention', 'dots'] = 'full'
  backend: AttentionBackend = AttentionBackend()
  frozen: tuple[str, ...] = ()  # Names of parameters or of groups of them: 'embedding', 'layers.mlp'.
  adapter: AnyAdapter | None = None

  @property
  def vocab_size(self) -> int:
    """See `sdpo_jax.models.policy.Policy.vocab_size`."""
    return self.config.vocab_size

  @property
  def reads_filled(self) -> bool:
    """See `sdpo_jax.models.policy.Policy.reads_filled`."""
    return self.backend.stacked_cache

  @property
  def shares_prefixes(self) -> bool:
    """See `sdpo_jax.models.policy.Policy.shares_prefixes`."""
    return self.config.windows is None and not isinstance(self.adapter, kv_prefix.KVPrefix)

  @property
  def pooled(self) -> bool:
    """See `sdpo_jax.models.policy.Policy.pooled`."""
    return isinstance(self.adapter, (lora_pool.LoraPool, kv_prefix.KVPrefix)) and self.adapter.members is not None

  @property
  def members_at_once(self) -> int | None:
    """See `sdpo_jax.models.policy.Policy.members_at_once`."""
    if isinstance(self.adapter, kv_prefix.KVPrefix):
      return self.adapter.at_once
    return None if self.rows_alike is None else 2

  @property
  def rows_alike(self) -> int | None:
    """See `sdpo_jax.models.policy.Policy.rows_alike`."""
    pool = self.adapter
    return pool.cartridges.rows_alike if isinstance(pool, lora_pool.LoraPool) and pool.cartridges is not None else None

  def in_any_order(self) -> DecoderPolicy:
    """See `sdpo_jax.models.policy.Policy.in_any_order`."""
    if self.rows_alike is None:
      return self
    bank = dataclasses.replace(self.adapter.cartridges, rows_alike=1)
    return dataclasses.replace(self, adapter=dataclasses.replace(self.adapter, cartridges=bank))

  def on(self, mesh: jax.sharding.Mesh | None, attention_setting: str = 'auto') -> DecoderPolicy:
    """See `sdpo_jax.models.policy.Policy.on`."""
    backend = choose_backend(attention_setting, self.dtype, self.config.head_dim, mesh)
    return dataclasses.replace(self, backend=backend)

  def with_remat(self, remat: str) -> DecoderPolicy:
    """See `sdpo_jax.models.policy.Policy.with_remat`."""
    return dataclasses.replace(self, remat=remat)

  def parameter_table(self) -> parameters.Table:
    """See `sdpo_jax.models.policy.Policy.parameter_table`.

    Raises:
      ValueError: no parameter has a name that begins with an entry of `frozen`.
    """
    if self.adapter is not None:
      return self.adapter.extended(parameter_table(self.config), self.dtype)
    return _table(self.config, self.frozen)

  def base_policy(self) -> DecoderPolicy:
    """Return the policy without its adapter; it takes the base alone, with an empty trainable tree."""
    return dataclasses.replace(self, adapter=None)

  def cast(self, base: Tree, trainable: Tree) -> tuple[Tree, Tree]:
    """See `sdpo_jax.models.policy.Policy.cast`.

    Parameters are in compute dtype, except norm weights, which stay float32. A shallow model (`cache.SHALLOW`) gets a
    tree per layer under 'layers' instead of stacked arrays and, if it is not sharded, an additional unembedding [D, V].
    With few rows, a CPU multiplies by the latter in four fifths of the time, and that is half of such a model's step.
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
    members: jax.Array | None = None,
  ) -> tuple[jax.Array, jax.Array, kv_cache.KVCache | None]:
    """See `sdpo_jax.models.policy.Policy.apply`.

    Hidden states and unembedding are in compute dtype. States of padding (segment 0) are finite but meaningless.
    """
    if cache is not None or _is_cast(base) or _is_cast(trainable):
      params = parameters.merge(*self.cast(base, trainable))
    else:
      params = self._in_compute_dtype(parameters.merge(base, trainable))
      params = self._ready_to_gather(params, tokens.shape[0])
    turned = params.pop(TURNED, None)
    if isinstance(self.adapter, lora_pool.LoraPool):
      params = params | {'layers': self.adapter.arranged(params['layers'])}
    decoder = nnx.merge(_graph(self.config, self.adapter, _is_unrolled(params)), params)
    hidden, cache = decoder(tokens, positions, segment_ids, cache, parents, members, self.remat, self.backend)
    return hidden, decoder.output_matrix() if turned is None else turned.T, cache

  def init_cache(self, batch_size: int, length: int, quantized: bool = False) -> kv_cache.KVCache:
    """See `sdpo_jax.models.policy.Policy.init_cache`."""
    stacked = self.backend.stacked_cache or self.config.layers > kv_cache.SHALLOW
    return self._empty(batch_size, length, jnp.int8 if quantized else jnp.dtype(self.dtype), stacked)

  def with_recent(self, cache: kv_cache.KVCache, length: int) -> kv_cache.KVCache:
    """See `sdpo_jax.models.policy.Policy.with_recent`."""
    dtype = jax.tree.leaves(cache.stores.keys)[0].dtype
    empty = self._empty(cache.lengths.shape[0], length, dtype, cache.stores.stacked)
    return cache.replace(recent=kv_cache.Recent(empty.stores, jnp.zeros((), jnp.int32)))

  def _empty(self, rows: int, length: int, dtype: jnp.dtype, stacked: bool) -> kv_cache.KVCache:
    """Return an empty cache; if stacked, its rows and heads are sharded as the decoding kernel expects."""
    config = self.config
    width = self.backend.cached_dim(config.head_dim)
    empty = kv_cache.init(config.layers, rows, config.kv_heads, length, width, dtype, stacked=stacked)
    if not stacked:
      return empty
    row_axes, head_axis = self.backend.axes(rows, config.kv_heads, sampling=True)

    def place(stack: jax.Array) -> jax.Array:
      return self.backend.constrain(stack, None, row_axes, head_axis, None, None)

    return empty.replace(stores=jax.tree.map(place, empty.stores))

  def _ready_to_gather(self, params: Tree, rows: int) -> Tree:
    """Return stacked matrices in the sharding from which the layer loop gathers them, if rows span the mesh."""
    mesh = self.backend.mesh
    if not self.backend.divided or rows % mesh.size:
      return params

    def place(parameter: parameters.Parameter, leaf: jax.Array) -> jax.Array:
      if not (parameter.stacked and parameter.compute) or 'slots' in parameter.axes or slot_names.is_bank(parameter):
        return leaf  # Sharded slots are never gathered, nor is a bank, of which rows read a little.
      return lax.with_sharding_constraint(leaf, gathered_by_layer(mesh, parameter.axes, parameter.shape))

    return parameters.map_tree(place, self.parameter_table(), params)

  def _in_compute_dtype(self, params: Tree) -> Tree:
    return parameters.in_compute_dtype(parameters.held(self.parameter_table(), params), params, self.dtype)


@functools.cache
def _whole_table(config: Architecture, adapter: AnyAdapter | None) -> parameters.Table:
  table = parameter_table(config)
  return table if adapter is None else adapter.extended(table, 'float32')


@functools.cache
def _table(config: Architecture, frozen: tuple[str, ...]) -> parameters.Table:
  table = parameter_table(config)
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
  """Return whether a tree has the form that `cast` gives to the parameters of shallow models."""
  return _is_unrolled(params) or TURNED in params
