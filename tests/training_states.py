"""A small training state, and files that are compared and damaged."""

import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from sdpo_jax.types import TrainState


def make_state(step: int, size: int = 64) -> TrainState:
  noise = jax.random.normal(jax.random.key(step), (size, 4))  # Does not compress.
  params = {'layer': {'w': noise, 'b': jnp.arange(4.0)}}
  return TrainState(
    step=jnp.int32(step),
    optimizer_step=jnp.int32(2 * step),
    trainable=params,
    opt_state=optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(0.1)).init(params),
    teacher=jax.tree.map(lambda leaf: leaf * 0.1, params),
    rng=jax.random.key(7),
  )


def assert_same(left: TrainState, right: TrainState) -> None:
  chex.assert_trees_all_equal(left.replace(rng=None), right.replace(rng=None))
  np.testing.assert_array_equal(jax.random.key_data(left.rng), jax.random.key_data(right.rng))


def flipped(content: bytes, bit: int) -> bytes:
  return content[: bit // 8] + bytes([content[bit // 8] ^ 1 << bit % 8]) + content[bit // 8 + 1 :]


def files_below(folder: pathlib.Path) -> list[pathlib.Path]:
  return sorted(path for path in folder.rglob('*') if path.is_file())
