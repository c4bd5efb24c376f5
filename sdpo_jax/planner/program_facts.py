"""Compiler results, optionally cached in a folder, so that planning again takes seconds."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import hashlib
import json
import os
import re
from typing import Any

from etils import epath
import jax

from sdpo_jax.distributed.programs import Program, leaf_bytes
from sdpo_jax.files import make_directory, write_atomically


@dataclasses.dataclass(frozen=True)
class ProgramFacts:
  """What the planner reads of a compiled program, on one device."""

  text: str  # The scheduled HLO.
  argument_bytes: tuple[tuple[int | None, ...], ...]  # Of each argument's leaves; None: a leaf that is not passed.
  arguments_in_all: int  # Bytes of all arguments, padding included.
  results: int  # Bytes of all results.
  aliased: int  # Bytes of results that reuse an argument's memory.
  temporaries: int  # Bytes of temporaries.
  output_shardings: Any = None  # For programs that others inherit from; these are compiled every time.


def asked_of(found: Mapping[str, Program], compiler: str, folder: epath.PathLike | None) -> dict[str, Program]:
  """Replace the function of each program by a stand-in whose compilation returns `ProgramFacts`.

  Args:
    found: programs by name.
    compiler: name of the slice and of the compiler.
    folder: folder of cached results; None: no cache.
  """
  inherited = {source for program in found.values() for source, _ in program.inherits.values()}
  return {
    name: dataclasses.replace(
      program, function=_Question(program, compiler, folder=None if name in inherited else folder)
    )
    for name, program in found.items()
  }


@dataclasses.dataclass(frozen=True)
class _Question:
  """Stand-in for a jitted function with what `Program.lower` and `distributed.programs.compile_programs` use."""

  program: Program
  compiler: str
  folder: epath.PathLike | None  # None: the result is not cached.
  lowered: jax.stages.Lowered | None = None  # None: not lowered yet.

  def lower(self, *arguments: Any, **static: Any) -> _Question:
    return dataclasses.replace(self, lowered=self.program.function.lower(*arguments, **static))

  def compile(self) -> ProgramFacts:
    """Compile the program, or read its cached result.

    Raises:
      JaxRuntimeError: the compiler rejects the program.
    """
    if self.folder is None:
      return self._ask()
    path = epath.Path(self.folder) / f'{self._key()}.json'
    if path.exists():
      kept = json.loads(path.read_text(encoding='utf-8'))
      if 'refused' in kept:
        raise jax.errors.JaxRuntimeError(kept['refused'])
      return ProgramFacts(**kept | {'argument_bytes': tuple(map(tuple, kept['argument_bytes']))})
    make_directory(path.parent)
    try:
      answer = self._ask()
    except jax.errors.JaxRuntimeError as error:
      if 'RESOURCE_EXHAUSTED' in str(error):
        write_atomically(path, json.dumps({'refused': str(error)}))
      raise
    answer = dataclasses.replace(answer, output_shardings=None)
    write_atomically(path, json.dumps(dataclasses.asdict(answer)))
    return answer

  def _ask(self) -> ProgramFacts:
    compiled = self.lowered.compile()
    used = compiled.memory_analysis()
    shardings = compiled.input_shardings[0]
    return ProgramFacts(
      text=compiled.as_text(),
      argument_bytes=tuple(
        leaf_bytes(argument, sharding) for argument, sharding in zip(self.program.arguments, shardings, strict=True)
      ),
      arguments_in_all=used.argument_size_in_bytes,
      results=used.output_size_in_bytes,
      aliased=used.alias_size_in_bytes,
      temporaries=used.temp_size_in_bytes,
      output_shardings=compiled.output_shardings,
    )

  def _key(self) -> str:
    """Return a digest of everything the result depends on: the program and its names, the compiler and its options.

    Names are those of operations and arguments, which the planner reads, not of files and functions on the stack.
    """
    names = re.findall(r'loc\("((?:jit\(|[^"]*/)[^"]*)"\(|loc\("([^"]*)"\)', self.lowered.as_text(debug_info=True))
    options = [os.environ.get(name, '') for name in ('XLA_FLAGS', 'LIBTPU_INIT_ARGS')]
    parts = [
      self.compiler,
      *options,
      *(f'{name}={value}' for name, value in sorted(self.program.options.items())),
      self.lowered.as_text(),
      *sorted({operation or argument for operation, argument in names}),
    ]
    return hashlib.sha256('\0'.join(parts).encode()).hexdigest()
