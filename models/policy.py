"""The protocol through which all code above `models/` uses a language model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import jax

from sdpo_jax.models.parameters import Table
from sdpo_jax.types import Tree

if TYPE_CHECKING:  # Code that only updates parameters has no cache.
  from sdpo_jax.models.architecture import Architecture
  from sdpo_jax.models.cache import KVCache

NO_MEMBER = -1  # Member index of a row that uses no adapter of a pool.


@runtime_checkable
class Policy(Protocol):
  """A language model as pure functions of a frozen base and a trainable tree, both nested dicts of arrays.

  Full fine-tuning: `base` is an empty dict and `trainable` holds every parameter. LoRA: `base` holds the parameters,
  `trainable` the factors. Cartridge: `trainable` is a key-value prefix. Optimizer, teacher, checkpoint and export see
  only the trainable tree. Implementations are hashable (static under `jit`).
  """

  config: Architecture
  vocab_size: int  # V, as in `config`; the unembedding may have more entries, which are not tokens.
  reads_filled: bool  # Whether decoding reads only filled slots of a cache, so that a large one costs no time.
  shares_prefixes: bool  # Whether `apply` accepts `parents`.
  pooled: bool  # Whether there is a pool of adapters or a bank of prefixes, and `apply` needs `members`.
  members_at_once: int | None  # K, if `members` are [B, K].
  # Number of consecutive rows that must read the same cartridge of a pool, or none, when a token is decoded in each
  # (`in_any_order` is the policy for other calls); None: there are no cartridges in a pool.
  rows_alike: int | None

  def parameter_table(self) -> Table:
    """Return shape, dtype, logical axes, initialiser and Hugging Face layout of every parameter.

    `Parameter.frozen` says which tree holds it; see `sdpo_jax.models.parameters.frozen` and `trainable`.
    """
    ...

  def on(self, mesh: jax.sharding.Mesh | None, attention_setting: str = 'auto') -> Policy:
    """Return the policy for the devices of a mesh.

    Args:
      mesh: mesh of the parameters and rows; None: the default device.
      attention_setting: the setting `model.attention`, which selects the kernels of attention.

    Raises:
      UserError: the devices or the dtype do not allow these kernels.
    """
    ...

  def in_any_order(self) -> Policy:
    """Return the policy for rows of which no two need read the same cartridge."""
    ...

  def with_remat(self, remat: str) -> Policy:
    """Return the policy with rematerialisation as the setting `model.remat` says."""
    ...

  def cast(self, base: Tree, trainable: Tree) -> tuple[Tree, Tree]:
    """Return both trees in compute dtype and the best layout for a decode loop; cast trees are returned unchanged.

    Every step of the loop reads every parameter; casting to bfloat16 before the loop halves the bytes. The trees are
    cast independently, so that the base may be cast once and the trainable tree for every batch.
    """
    ...

  def apply(
    self,
    base: Tree,
    trainable: Tree,
    tokens: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    cache: KVCache | None = None,
    parents: jax.Array | None = None,
    members: jax.Array | None = None,
  ) -> tuple[jax.Array, jax.Array, KVCache | None]:
    """Compute final hidden states and the matrix that turns them into logits.

    Args:
      base: frozen parameters, as they are or from `cast`.
      trainable: trainable parameters, as they are or from `cast`.
      tokens: [B, S] int32.
      positions: [B, S] int32, the position of each token in its segment, counted on from its parent.
      segment_ids: [B, S] int32, 0 = padding. A token attends to earlier tokens of its own segment. Tokens of a segment
        are in consecutive slots, in the order of their positions.
      cache: a cache from `init_cache`, which these tokens fill, one segment from slot 0 on in every row, attending to
        each other; or one from `with_recent`, to which every row adds S tokens, which attend to all tokens of the row.
        A row whose new tokens are padding is not in use, and its results are undefined.
      parents: [B, S] int32, an earlier segment to which a token attends in addition to its own; 0: none. In this way
        several completions share a prompt. None: no token has a parent. Only without a cache; the TPU's kernels then
        have no gradient.
      members: [B] int32, the adapter of the pool, or the prefix of the bank, that each row uses; `NO_MEMBER`: the row
        uses the base alone. Or [B, K] int32, the prefixes that it uses one after the other, `NO_MEMBER` after the last;
        with a pool that has cartridges [B, 2] int32, an adapter and a cartridge. None: no row uses any of these.

    Returns:
      Hidden states [B, S, D] after the final norm, the unembedding [V, D], such that logits = hidden @ unembedding.T,
      and the updated cache (None without one).

    Raises:
      ValueError: base and trainable both hold a parameter.
    """
    ...

  def init_cache(self, batch_size: int, length: int, quantized: bool = False) -> KVCache:
    """Return an empty cache of `length` slots for each of `batch_size` rows, compute dtype or (`quantized`) int8."""
    ...

  def with_recent(self, cache: KVCache, length: int) -> KVCache:
    """Return the cache with room for `length` more tokens in every row, until `cache.commit` is called."""
    ...
