"""The registry of compiled programs: what a run compiles, with the shapes that it calls each program with.

A room that compiles something registers a source of programs (`register`). Everything that lowers, compiles or costs
programs without running them, as the planner does, reads `registered_programs`; `compile_programs` compiles them in an
order in which each finds the shardings of what it is handed.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping
import contextlib
import dataclasses
from typing import Any

import jax

from models.policy import Policy
from sdpo_jax.config import Config
from sdpo_jax.teacher.signal import Teacher
from sdpo_jax.types import Tree

COMPILED = '/jax/core/compile/backend_compile_duration'  # What JAX reports when it compiles, or reads from its cache.
FEEDBACK = 'feedback/'  # Begins the kinds of the sampler with which the student writes feedback.
EVALUATION = 'evaluation/'  # Begins the labels and names of programs that only evaluation uses.


@dataclasses.dataclass(frozen=True)
class Program:
  """A jitted function with the shapes, dtypes and shardings that a run calls it with."""

  kind: str  # 'update', 'decode' …: programs of one kind differ in their sizes only.
  function: Callable[..., Any]
  arguments: tuple[Any, ...]
  static: dict[str, Any] = dataclasses.field(default_factory=dict)
  # What each argument is, or each of its leaves: 'base', 'parameters', 'state', 'gradients', 'cache' (of a decode
  # loop), 'batch' …
  holds: tuple[str | tuple[str, ...], ...] = ()
  # Argument → the program whose result it is, and which element of that (None: all): the shardings are those that the
  # compiler chose there. Where that has None in the place of a leaf, the program did not make the leaf.
  inherits: Mapping[int, tuple[str, int | None]] = dataclasses.field(default_factory=dict)
  buckets: tuple[int, ...] = ()  # Declared lengths: prompt, teacher prompt where there is one, completion.
  capacity: int | None = None  # Slots of the cache.
  rows: int | None = None  # Rows of the batch.
  evaluation: bool = False  # Only evaluation uses it.
  # Of the compiler, with which `function` is jitted: a lowered program does not show them.
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def label(self) -> str:
    """The kind, marked where the program is evaluation's."""
    return f'{EVALUATION if self.evaluation else ""}{self.kind}'

  @property
  def size(self) -> tuple[int, ...]:
    """The order of programs with one label: total length, then slots of the cache, then rows."""
    return sum(self.buckets), self.capacity or 0, self.rows or 0, *self.buckets

  def lower(self, shardings: Mapping[str, Any] | None = None) -> jax.stages.Lowered:
    """Return the program, ready to compile.

    Args:
      shardings: of the results of the programs from which this one inherits, by name; None: it is lowered for arguments
        whose shardings are not known.
    """
    arguments = list(self.arguments)
    for index, (name, element) in self.inherits.items() if shardings is not None else ():
      chosen = shardings[name] if element is None else shardings[name][element]
      arguments[index] = jax.tree.map(_placed, arguments[index], chosen)
    return self.function.lower(*arguments, **self.static)


def _placed(leaf: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding | None) -> jax.ShapeDtypeStruct:
  return leaf if sharding is None else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


@dataclasses.dataclass(frozen=True)
class Run:
  """What a source of programs is told of the run that would compile them."""

  config: Config
  policy: Policy
  base: Tree  # Abstract arrays with shardings, as `trainable`.
  trainable: Tree
  mesh: jax.sharding.Mesh
  stop_ids: int  # How many token ids end a completion.
  teacher: Teacher  # Who reads the teacher's prompts; its base as abstract arrays.
  held_out: int | None = None  # Questions of an evaluation; None: they are not known.


Source = Callable[[Run], dict[str, Program]]
_SOURCES: dict[str, Source] = {}


def register(source: Source) -> Source:
  """Register a source of programs, in the place of one with the same qualified name; used as a decorator."""
  _SOURCES[f'{source.__module__}.{source.__qualname__}'] = source
  return source


def registered_programs(run: Run) -> dict[str, Program]:
  """Return every program of a run by name, for all its declared buckets, from all registered sources.

  Raises:
    ValueError: two sources give a program the same name.
  """
  found: dict[str, Program] = {}
  for source in _SOURCES.values():
    programs = source(run)
    twice = sorted(found.keys() & programs.keys())
    if twice:
      raise ValueError(f'Two sources register a program {twice[0]!r}.')
    found |= programs
  return found


def compile_programs(
  found: Mapping[str, Program], names: Iterable[str]
) -> Iterator[tuple[str, jax.stages.Compiled | jax.errors.JaxRuntimeError]]:
  """Compile programs and, before each, those from which it inherits shardings.

  Args:
    found: from `registered_programs`.
    names: which ones.

  Yields:
    (name, the compiled program or the error with which the compiler refused it); those in need of a refused one are
    left out.
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
  """Note what is compiled, or read from the persistent cache, by any thread; small operations on arrays count, too.

  Yields:
    a function that returns the names of what was compiled since it was last called.
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
