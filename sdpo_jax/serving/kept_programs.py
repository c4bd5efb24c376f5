"""The programs of an engine, compiled or read from a cache once for all shapes of their arguments."""

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
# The default value of this option. With any option, JAX compiles again instead of reusing a program that this process
# has compiled, or read from JAX's cache: on a CPU, a program from that cache cannot be serialized again.
_AFRESH = {'xla_embed_ir_in_executable': False}


class KeptPrograms:
  """Wraps jitted functions, and caches their programs in a folder. All calls must come from one thread."""

  def __init__(self, folder: ProgramFolder | None = None):
    """Make an empty collection.

    Args:
      folder: the cache of programs; None: programs are compiled, or found in JAX's cache.
    """
    self.compiled, self.read = 0, 0  # The numbers of programs compiled and read so far.
    self._folder = folder
    self._lines: list[str] = []  # Lines that are not announced yet.
    self._announce: Announce = self._lines.append
    self._complete = False

  @contextlib.contextmanager
  def announced(self, announce: Announce) -> Iterator[None]:
    """Announce each program that the block compiles; afterwards the cache is closed, and further programs are logged.

    Args:
      announce: receives a line for each program, including those compiled before.
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
    """Wrap a jitted function, so that its programs are cached.

    Args:
      name: a unique name of the function.
      function: the jitted function; its keyword arguments are static.
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
        _logger.warning('%s was not compiled at the start: a request waits for its compilation.', label)
      lowered = function.lower(*arguments, **static)
      if self._folder is None:
        program = lowered.compile()
      else:
        with without_cache():
          program = lowered.compile(compiler_options=_AFRESH if jax.default_backend() == 'cpu' else None)
        self._folder.put(f'{label} {said}', program)
      self.compiled += 1
      self._announce(f'  {self.compiled:>3} {label}  {time.monotonic() - began:.1f} s')
    liveness.progress()
    return program


def _kind(leaf: Any) -> Hashable:
  """Return what a program depends on in an argument: shape, dtype and, on several devices, the sharding."""
  if isinstance(leaf, jax.Array) and leaf.committed and len(leaf.sharding.device_set) > 1:
    return leaf.shape, leaf.dtype, leaf.sharding
  return leaf.shape, leaf.dtype


def _label(name: str, arguments: tuple[Any, ...]) -> str:
  """Return the name with the shape of the first integer matrix among the arguments, such as token ids."""
  tables = (leaf.shape for leaf in jax.tree.leaves(arguments) if leaf.ndim == 2 and leaf.dtype == np.int32)
  return f'{name} {"×".join(map(str, shape))}' if (shape := next(tables, None)) else name


@contextlib.contextmanager
def without_cache() -> Iterator[None]:
  """Disable JAX's compilation cache in all threads during the block, since its programs cannot be serialized again."""
  before = jax.config.jax_enable_compilation_cache
  jax.config.update('jax_enable_compilation_cache', False)
  compilation_cache.reset_cache()
  try:
    yield
  finally:
    jax.config.update('jax_enable_compilation_cache', before)
    compilation_cache.reset_cache()
