"""The compiled programs of a sampler, with the shapes of their arguments, for the planner.

`prepare` makes the sampler's copy of the trainable parameters, and `prepare_base` its copy of those base parameters
that it cannot use unchanged, if there are any. There is `prefill/P×T` for every bucket of prompts; the others are for
the largest bucket, and for the cache sizes of `sdpo_jax.rollout.sizes`: `empty/P×T` makes the cache, `admit/P×T` copies
a prompt's cache into the rows of its samples, and `decode/P×T` draws tokens. A cache that starts small, with C slots,
has `admit/P×T@C`, `decode/P×T@C` and `resize/P×T@C`; one with fewer rows R has `decode/P×T#R`, reached by
`resize/P×T#R`, or by `compact/P×T#R` if the cache keeps its size. Samples that carry over have `recompute/P×T`, with
`empty recomputed/P×T`, or `clear/P×T` and `park/P×T`, and `readmit/P×T`. Programs that only evaluation uses are
`evaluation/…`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from sdpo_jax.distributed import mesh as meshes
from sdpo_jax.distributed.programs import EVALUATION, Program
from sdpo_jax.models.policy import Policy
from sdpo_jax.rollout import decode, functions, sizes
from sdpo_jax.rollout.queue import KNOBS
from sdpo_jax.rollout.sampling import SamplingParams
from sdpo_jax.types import Tree


@dataclasses.dataclass(frozen=True)
class SamplerSpec:
  """The sizes that a sampler's programs depend on, besides those of its model."""

  prompts: tuple[int, ...]  # Buckets of prompts.
  response: int  # Maximum tokens of a completion.
  max_rows: int  # Maximum number of completions decoded at once.
  least: int  # Arrays are sized for at least this many samples: those of a training step.
  chunk: int  # Maximum tokens drawn per call of the decode loop.
  stop_ids: int  # Number of token ids that end a completion.
  int8_cache: bool = False
  carries: Literal['', 'recomputed', 'kept'] = ''  # How the slots of training stay open across steps, if they do.


def sampler_programs(
  policy: Policy,
  mesh: jax.sharding.Mesh,
  base: Tree,
  trainable: Tree,
  spec: SamplerSpec,
  requests: Sequence[tuple[int, bool]],
  whose: str = '',
  *,
  students_base: Tree | None = None,
  resized: bool = True,
  kept_prefixes: int = 0,
) -> dict[str, Program]:
  """Return label → program, for all programs that a sampler needs for some requests.

  Args:
    policy: the policy to sample from.
    mesh: mesh to run on.
    base: frozen parameters of the policy, as abstract arrays.
    trainable: other parameters of the policy.
    spec: sizes.
    requests: (number of samples, whether only evaluation makes it) of each request; programs that an earlier request
      uses are not listed again.
    whose: prefix of the programs' kinds; empty for the run's own sampler.
    students_base: frozen parameters of the student, if the policy may be another model's.
    resized: as in `rollout.sizes.sizes`.
    kept_prefixes: rows that keep keys and values (`rollout.kept_prefixes`); if there are any, the programs include
      `empty kept`, `keep` (copies a slot to a row) and `extend` (continues a row with the rest of a prompt).
  """
  engine = functions.sampler_functions(policy, mesh, spec.int8_cache)
  prepared, evaluation = engine.prepare_base(base), requests[0][1]
  students = {id(leaf) for leaf in jax.tree.leaves(base if students_base is None else students_base)}
  whose_base = ['base' if id(leaf) in students else 'teacher base' for leaf in jax.tree.leaves(base)]
  made = Program(f'{whose}prepare', engine.prepare, (trainable,), holds=('parameters',), evaluation=evaluation)
  found, inherits = {made.label: made}, {1: (made.label, None)}
  if prepared.program is not None:
    whole = Program(
      f'{whose}prepare_base', prepared.program, (base,), holds=(tuple(whose_base),), evaluation=evaluation
    )
    found, inherits = {whole.label: whole} | found, {0: (whole.label, None)} | inherits
  weights = SamplerArguments(
    arguments=(prepared.describe(base), jax.eval_shape(engine.prepare, trainable)),
    holds=(tuple('sampling base' if stay is None else whose_base[stay] for stay in prepared.stays), 'parameters'),
    inherits=inherits,
  )
  called: set[tuple[Any, ...]] = set()
  for samples, evaluation in requests:
    for name, program in _sampling(
      mesh, spec, engine, weights, samples, evaluation, whose, resized, kept_prefixes
    ).items():
      shapes = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(program.arguments))
      key = program.kind, shapes, *program.static.items()
      if key not in called:
        called.add(key)
        found[name] = program
  return found


@dataclasses.dataclass(frozen=True)
class SamplerArguments:
  """The prepared parameters, as the first two arguments of the sampler's programs."""

  arguments: tuple[Tree, Tree]  # Base and trainable tree, abstract.
  holds: tuple[tuple[str, ...], str]  # As in `Program`, like `inherits`.
  inherits: dict[int, tuple[str, int | None]]


def _sampling(
  mesh: jax.sharding.Mesh,
  spec: SamplerSpec,
  engine: functions.SamplerFunctions,
  weights: SamplerArguments,
  samples: int,
  evaluation: bool,
  whose: str,
  resized: bool,
  kept_prefixes: int,
) -> dict[str, Program]:
  """Return the sampler's programs for a request of `samples`, except those that prepare the parameters."""
  response, chunk, shards = spec.response, spec.chunk, engine.shards
  carries = '' if evaluation else spec.carries
  rows = sizes.shard_rows(max(samples, spec.least), spec.max_rows, shards)
  taken = sizes.sizes(
    rows=rows,
    refilled=bool(carries) or samples > rows * shards,
    widths=spec.prompts,
    room=response,
    chunk=chunk,
    keeps_size=engine.keeps_size,
    resized=resized,
  )
  whole, most = taken.stages[-1].slots, taken.rows * shards
  found: dict[str, Program] = {}

  def of_rows(rows: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return _of_rows(mesh, (rows,), dtype)

  def members(rows: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    shape = jax.eval_shape(lambda: engine.no_members(rows)).shape
    return (_of_rows(mesh, shape, jnp.int32),) if engine.pooled else ()

  def cache(rows: int, length: int) -> Any:
    shape = jax.eval_shape(functools.partial(engine.empty, rows=rows, slots=length))
    return meshes.abstract(shape, functions.cache_shardings(mesh, shape))

  def held(size: sizes.Size) -> Any:
    """Return the abstract cache of a size; one that is never resized has arrays for the largest number of rows."""
    if not engine.keeps_size:
      return cache(shards * size.rows, size.slots)
    return cache(most, size.slots).replace(lengths=of_rows(shards * size.rows))

  def suffix(before: sizes.Size, after: sizes.Size | None = None) -> str:
    rows = (after or before).rows
    return f'@{before.slots}' * (before.slots < whole) + f'#{shards * rows}' * (rows < taken.rows)

  def add(
    name: str,
    function: Callable[..., Any],
    arguments: Sequence[Any],
    holds: Sequence[str | tuple[str, ...]],
    *,
    prompt: int = spec.prompts[-1],
    suffix: str = '',
    **more: Any,
  ) -> None:
    lengths = prompt, response
    found[named(whose + name, lengths, evaluation) + suffix] = Program(
      whose + name, function, tuple(arguments), holds=tuple(holds), buckets=lengths, evaluation=evaluation, **more
    )

  together: dict[int, int] = {}  # Prompts prefilled together → the largest bucket for which that many are.
  for prompt in spec.prompts:
    prompts = shards * taken.prompts(prompt)
    together[prompts] = prompt
    add(
      'prefill',
      engine.prefill,
      (*weights.arguments, _of_rows(mesh, (prompts, prompt), jnp.int32), of_rows(prompts), *members(prompts)),
      (*weights.holds, 'batch', 'batch', *['batch'] * len(members(prompts))),
      prompt=prompt,
      capacity=taken.prefix,
      rows=prompts,
      inherits=weights.inherits,
      static=dict(slots=taken.prefix),
    )
  first = taken.stages[0]
  for size in taken.stages[: taken.admitting if carries else 1]:
    shape = dict(rows=most, slots=size.slots)
    add('empty', engine.empty, (), (), suffix=suffix(size), capacity=size.slots, rows=most, static=shape)
  for size in taken.stages[: taken.admitting]:
    for prompts, prompt in together.items():
      add(
        'admit',
        engine.copy,
        (held(size), cache(prompts, taken.prefix), of_rows(most), of_rows(most), of_rows(shards)),
        ('cache', 'cache', 'batch', 'batch', 'batch'),
        prompt=prompt,
        suffix=suffix(size),
        capacity=size.slots,
        rows=most,
      )
  if carries == 'kept':
    rows, indices = cache(most, whole), (of_rows(most), of_rows(most), of_rows(shards))
    more, three = dict(capacity=whole, rows=most), ['batch'] * 3
    add('clear', engine.clear, (rows.stores, of_rows(most)), ('cache', 'batch'), **more)
    for size in () if engine.keeps_size else taken.stages:
      if (shards * size.rows, size.slots) != (most, whole):
        holds = ('next carried', 'cache', *three)
        add('park', engine.copy, (rows, held(size), *indices), holds, suffix=suffix(size), **more)
    for size in taken.stages[: taken.admitting]:
      arguments, holds = (held(size), rows, *indices), ('cache', 'carried', *three)
      add('readmit', engine.copy, arguments, holds, suffix=suffix(size), capacity=size.slots, rows=most)
  if carries == 'recomputed':
    again = shards * taken.recomputed
    more = dict(capacity=whole, rows=again)
    add('empty recomputed', engine.empty, (), (), static=dict(rows=again, slots=whole), **more)
    tokens, numbers = _of_rows(mesh, (again, whole - chunk), jnp.int32), of_rows(again)
    add(
      'recompute',
      engine.extend,
      (*weights.arguments, cache(again, whole), numbers, tokens, numbers, numbers, *members(again)),
      (*weights.holds, 'cache', *['batch'] * (4 + len(members(again)))),
      inherits=weights.inherits,
      static=dict(piece=taken.recomputed_piece),
      **more,
    )
    for size in taken.stages[: taken.admitting]:
      arguments = held(size), cache(again, whole), of_rows(most), of_rows(most), of_rows(shards)
      holds = 'cache', 'cache', 'batch', 'batch', 'batch'
      add('readmit', engine.copy, arguments, holds, suffix=suffix(size), capacity=size.slots, rows=most)
  if kept_prefixes:
    kept = shards * math.ceil(kept_prefixes / shards)
    more = dict(capacity=taken.prefix, rows=kept)
    add('empty kept', engine.empty, (), (), static=dict(rows=kept, slots=taken.prefix), **more)
    rows = cache(kept, taken.prefix)
    indices = of_rows(most), of_rows(most), of_rows(shards)
    add('keep', engine.copy, (rows, held(first), *indices), ('kept prefixes', 'cache', *['batch'] * 3), **more)
    prompts = shards * taken.prompts(taken.prefix)
    tokens, numbers = _of_rows(mesh, (prompts, taken.prefix), jnp.int32), of_rows(prompts)
    add(
      'extend',
      engine.extend,
      (*weights.arguments, rows, numbers, tokens, numbers, numbers, *members(prompts)),
      (*weights.holds, 'kept prefixes', *['batch'] * (4 + len(members(prompts)))),
      capacity=taken.prefix,
      rows=prompts,
      inherits=weights.inherits,
      static=dict(piece=taken.piece),
    )
  for size in taken.stages:
    rows = shards * size.rows
    params = SamplingParams(
      **{name: of_rows(rows, dtype) for name, dtype in KNOBS.items()},
      seed=of_rows(rows, jnp.uint32),
      sample_id=of_rows(rows),
      step=of_rows(rows),
      stop_ids=_of_rows(mesh, (rows, spec.stop_ids), jnp.int32),
    )
    state = decode.DecodeState(params, *[of_rows(rows)] * 2, of_rows(rows, bool), *members(rows))
    add(
      'decode',
      engine.advance,
      (*weights.arguments, held(size), state, jax.ShapeDtypeStruct((), jnp.int32)),
      (*weights.holds, 'cache', 'batch', 'batch'),
      suffix=suffix(size),
      capacity=size.slots,
      rows=rows,
      inherits=weights.inherits,
      static=dict(steps=chunk),
    )
  for before, after in taken.moves:
    given, source, rows = held(before), of_rows(shards * after.rows), shards * after.rows
    if engine.keeps_size:
      holds = 'cache', 'cache', 'batch'
      arguments = given.stores, given.lengths, source
      add('compact', engine.compact, arguments, holds, suffix=suffix(before, after), capacity=whole, rows=rows)
    else:
      static = dict(slots=after.slots)
      more = dict(suffix=suffix(before, after), capacity=after.slots, rows=rows, static=static)
      add('resize', engine.resize, (given, source), ('cache', 'batch'), **more)
  return found


def named(kind: str, lengths: Sequence[int], evaluation: bool = False) -> str:
  """Return the name of a program: its kind and its buckets."""
  return f'{EVALUATION if evaluation else ""}{kind}/{"×".join(map(str, lengths))}'


def _of_rows(mesh: jax.sharding.Mesh, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
  if mesh.size == 1:  # The arrays come from the host without a sharding.
    return jax.ShapeDtypeStruct(shape, dtype)
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(meshes.FSDP))
  return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding if shape else meshes.replicated(mesh))
