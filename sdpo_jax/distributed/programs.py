"""Descriptions of the programs that a run or a service compiles: functions with the shapes of their arguments.

Whatever lowers, compiles or costs programs without running them, such as the planner, reads a list of them.
`compile_programs` compiles them in an order in which the shardings of every program's arguments are known.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping
import contextlib
import dataclasses
import math
from typing import Any

import jax

COMPILED = '/jax/core/compile/backend_compile_duration'  # What JAX reports when it compiles, or reads from its cache.
FEEDBACK = 'feedback/'  # Prefix of the kinds of sampling programs with which the student writes feedback.
EVALUATION = 'evaluation/'  # Prefix of the labels and names of programs that only evaluation uses.


@dataclasses.dataclass(frozen=True)
class Program:
  """A jitted function with the shapes, dtypes and shardings that a run calls it with."""

  kind: str  # 'update', 'decode' …: programs of one kind differ only in their sizes.
  function: Callable[..., Any]
  arguments: tuple[Any, ...]
  static: dict[str, Any] = dataclasses.field(default_factory=dict)
  # Purpose of each argument, or of each of its leaves: 'base', 'parameters', 'state', 'gradients', 'cache' (of a
  # decode loop), 'batch' …
  holds: tuple[str | tuple[str, ...], ...] = ()
  # Argument index → (the program whose result it is, which element of that result; None: all). The argument has the
  # shardings that the compiler chose for the result; a leaf whose sharding is None was not made by that program.
  inherits: Mapping[int, tuple[str, int | None]] = dataclasses.field(default_factory=dict)
  buckets: tuple[int, ...] = ()  # Declared lengths: prompt, teacher prompt where there is one, completion.
  capacity: int | None = None  # Slots of the cache.
  rows: int | None = None  # Rows of the batch.
  evaluation: bool = False  # Only evaluation uses it.
  # Compiler options with which `function` is jitted: a lowered program does not show them.
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def label(self) -> str:
    """The kind, with a prefix if only evaluation uses the program."""
    return f'{EVALUATION if self.evaluation else ""}{self.kind}'

  @property
  def size(self) -> tuple[int, ...]:
    """Sort key of programs with one label: total length, then slots of the cache, then rows."""
    return sum(self.buckets), self.capacity or 0, self.rows or 0, *self.buckets

  def lower(self, shardings: Mapping[str, Any] | None = None) -> jax.stages.Lowered:
    """Return the lowered program, ready to compile.

    Args:
      shardings: by name, the shardings of the results of the programs from which this one inherits; None: lower it for
        arguments whose shardings are not known.
    """
    arguments = list(self.arguments)
    for index, (name, element) in self.inherits.items() if shardings is not None else ():
      chosen = shardings[name] if element is None else shardings[name][element]
      arguments[index] = jax.tree.map(_placed, arguments[index], chosen)
    return self.function.lower(*arguments, **self.static)


def _placed(leaf: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding | None) -> jax.ShapeDtypeStruct:
  return leaf if sharding is None else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def leaf_bytes(argument: Any, shardings: Any = None) -> tuple[int | None, ...]:
  """Return the bytes of an argument's leaves on one device; None for a leaf without a sharding, which is not passed.

  Args:
    argument: abstract arrays.
    shardings: a tree of the same structure; None: those of the abstract arrays.
  """
  leaves, structure = jax.tree.flatten(argument)
  places = [leaf.sharding for leaf in leaves] if shardings is None else structure.flatten_up_to(shardings)
  return tuple(
    None if place is None else math.prod(place.shard_shape(leaf.shape)) * _itemsize(leaf.dtype)
    for leaf, place in zip(leaves, places, strict=True)
  )


def _itemsize(dtype: Any) -> int:
  return 8 if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) else dtype.itemsize


def compile_programs(
  found: Mapping[str, Program], names: Iterable[str]
) -> Iterator[tuple[str, jax.stages.Compiled | jax.errors.JaxRuntimeError]]:
  """Compile programs, each after those from which it inherits shardings.

  Args:
    found: programs by name.
    names: names of the programs to compile.

  Yields:
    (name, the compiled program or the compiler's error); programs that inherit from a failed one are left out.
  """
  shardings: dict[str, Any] = {}
  refused: set[str] = set()

  def with_sources(name: str) -> Iterator[str]:
    for source, _ in found[name].inherits.values():
      yield from with_sources(source)
    yield name

  for name in dict.fromkeys(needed for last in names for needed in with_sources(last)):
    sources = {source for source, _ in found[name].inherits.values()}
    if sources & refused:
      refused.add(name)
      continue
    try:
      compiled = found[name].lower(shardings).compile()
    except jax.errors.JaxRuntimeError as error:
      refused.add(name)
      yield name, error
      continue
    shardings[name] = compiled.output_shardings
    yield name, compiled


@contextlib.contextmanager
def noted_compilations() -> Iterator[Callable[[], list[str]]]:
  """Record what any thread compiles or reads from the persistent cache, including small array operations.

  Yields:
    a function that returns the names of the programs compiled since it was last called.
  """
  noted: collections.deque[str] = collections.deque()

  def listen(event: str, duration: float, **details: Any) -> None:
    if event == COMPILED:
      noted.append(str(details.get('fun_name', 'unnamed')))

  def taken() -> list[str]:
    return [noted.popleft() for _ in range(len(noted))]

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    yield taken
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)
