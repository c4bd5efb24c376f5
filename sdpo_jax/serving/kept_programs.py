"""The programs of an engine: each is compiled, or read from a folder, once for every shape of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
import contextlib
import hashlib
import logging
import time
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
import numpy as np

from sdpo_jax import liveness
from sdpo_jax.serving.program_folder import ProgramFolder

Announce = Callable[[str], None]
_logger = logging.getLogger('sdpo_jax.serving')
# This option is set to its default. A compilation with options is never answered from what this process has compiled
# or read from JAX's cache before: what was read there cannot be kept a second time on a CPU (its kernels are not
# found).
_AFRESH = {'xla_embed_ir_in_executable': False}


class KeptPrograms:
  """Functions that compile on the first call with arguments of new shapes. Calls come from one thread."""

  def __init__(self, folder: ProgramFolder | None = None):
    """Make an empty collection.

    Args:
      folder: where programs are stored; None: they are compiled, or found in JAX's cache.
    """
    self.compiled, self.read = 0, 0  # How many programs were compiled and read so far.
    self._folder = folder
    self._lines: list[str] = []  # Not announced yet.
    self._announce: Announce = self._lines.append
    self._complete = False

  @contextlib.contextmanager
  def announced(self, announce: Announce) -> Iterator[None]:
    """Announce every program that the block calls; afterwards none is stored, and a missing one is logged.

    Args:
      announce: receives the lines, including those of programs that were called before.
    """
    for line in self._lines:
      announce(line)
    self._lines.clear()
    self._announce = announce
    try:
      yield
      if self._folder is not None:
        self._folder.save()
        self._folder.close()
        self._folder = None
      self._complete = True
    finally:
      self._announce = self._lines.append

  def keep(self, name: str, function: Any) -> Callable[..., Any]:
    """Return a jitted function whose programs are stored.

    Args:
      name: unique name of the function.
      function: jitted; its keyword arguments are static.
    """
    programs: dict[Hashable, jax.stages.Compiled] = {}

    def call(*arguments: Any, **static: Any) -> Any:
      leaves, tree = jax.tree.flatten(arguments)
      key = tree, tuple(static.items()), tuple(map(_kind, leaves))
      program = programs.get(key)
      if program is None:
        program = programs[key] = self._made(name, function, arguments, static, key)
      return program(*arguments)

    return call

  def _made(
    self, name: str, function: Any, arguments: tuple[Any, ...], static: dict[str, Any], key: tuple[Any, ...]
  ) -> jax.stages.Compiled:
    began, label = time.monotonic(), _label(name, arguments)
    tree, _, leaves = key
    said = hashlib.sha256(repr((name, sorted(static.items()), str(tree), leaves)).encode()).hexdigest()
    program = None
    if self._folder is not None:
      program = self._folder.get(f'{label} {said}', jax.tree.structure((arguments, {})))
    if program is not None:
      self.read += 1
    else:
      if self._complete:
        _logger.warning('%s was not compiled at the start, and a request waits for it.', label)
      lowered = function.lower(*arguments, **static)
      if self._folder is None:
        program = lowered.compile()
      else:
        with without_cache():
          program = lowered.compile(compiler_options=_AFRESH if jax.default_backend() == 'cpu' else None)
        self._folder.put(f'{label} {said}', program)
      self.compiled += 1
    liveness.progress()
    self._announce(f'  {self.compiled + self.read:>3} {label}  {time.monotonic() - began:.1f} s')
    return program


def _kind(leaf: Any) -> Hashable:
  """Return what a program depends on in an argument: shape, dtype and, on several devices, the sharding."""
  if isinstance(leaf, jax.Array) and leaf.committed and len(leaf.sharding.device_set) > 1:
    return leaf.shape, leaf.dtype.name, leaf.sharding
  return leaf.shape, leaf.dtype.name


def _label(name: str, arguments: tuple[Any, ...]) -> str:
  """Return the name with the shape of the first matrix of integers, such as token ids, among the arguments."""
  tables = (leaf.shape for leaf in jax.tree.leaves(arguments) if leaf.ndim == 2 and leaf.dtype == np.int32)
  return f'{name} {"×".join(map(str, shape))}' if (shape := next(tables, None)) else name


@contextlib.contextmanager
def without_cache() -> Iterator[None]:
  """Disable JAX's compilation cache in all threads within the block; it cannot restore programs for a TPU."""
  before = jax.config.jax_enable_compilation_cache
  jax.config.update('jax_enable_compilation_cache', False)
  compilation_cache.reset_cache()
  try:
    yield
  finally:
    jax.config.update('jax_enable_compilation_cache', before)
    compilation_cache.reset_cache()
