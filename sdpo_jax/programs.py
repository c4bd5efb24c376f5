"""The registry of compiled programs: which programs a run with given settings uses, with their argument shapes.

The loop runs these functions; `programs` lists them with abstract arguments, so that others can lower, compile and
cost them without running anything. `compile_programs` does so in an order in which each finds the shardings of what it
is handed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from models import parameters as parameter_tables
from models.policy import Policy
from sdpo_jax.config import Config
from sdpo_jax.distributed import mesh as meshes
from sdpo_jax.rollout import decode, slots
from sdpo_jax.rollout import functions as rollout_programs
from sdpo_jax.rollout.sampling import SamplingParams
from sdpo_jax.training import batching
from sdpo_jax.training.checkpoints import abstract
from sdpo_jax.training.update import abstract_state, make_update
from sdpo_jax.types import Batch, TokenRows, Tree

EVALUATION = 'evaluation/'  # Begins the names of programs that only evaluation uses.


@dataclasses.dataclass(frozen=True)
class Program:
  """A jitted function with the shapes, dtypes and shardings that a run calls it with."""

  function: Callable[..., Any]
  arguments: tuple[Any, ...]
  static: dict[str, Any] = dataclasses.field(default_factory=dict)
  # What each argument is: 'parameters', 'state', 'gradients', 'cache' (of a decode loop), 'batch'.
  holds: tuple[str, ...] = ()
  # Argument → the program whose result it is, and which element of that (None: all): the shardings are those that the
  # compiler chose there.
  inherits: Mapping[int, tuple[str, int | None]] = dataclasses.field(default_factory=dict)

  def lower(self, shardings: Mapping[str, Any] | None = None) -> jax.stages.Lowered:
    """The program, ready to compile.

    Args:
      shardings: of the results of the programs from which this one inherits, by name; None: it is lowered for arguments
        whose shardings are not known.
    """
    arguments = list(self.arguments)
    for index, (name, element) in self.inherits.items() if shardings is not None else ():
      chosen = shardings[name] if element is None else shardings[name][element]
      arguments[index] = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), arguments[index], chosen
      )
    return self.function.lower(*arguments, **self.static)


def compile_programs(
  found: Mapping[str, Program], names: Iterable[str]
) -> Iterator[tuple[str, jax.stages.Compiled | jax.errors.JaxRuntimeError]]:
  """Compiles programs and, before each, those from which it inherits shardings.

  Args:
    found: from `programs`.
    names: which ones.

  Yields:
    (name, the compiled program or the error with which the compiler refused it); those in need of a refused one are
    left out.
  """
  shardings: dict[str, Any] = {}
  refused: set[str] = set()

  def wanted(name: str) -> Iterator[str]:
    for source, _ in found[name].inherits.values():
      yield from wanted(source)
    yield name

  for name in dict.fromkeys(step for last in names for step in wanted(last)):
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


def abstract_parameters(policy: Policy, mesh: jax.sharding.Mesh) -> Tree:
  """Shapes, dtypes and shardings of a model's parameters, from its table."""
  return parameter_tables.map_table(
    lambda parameter: jax.ShapeDtypeStruct(
      parameter.shape,
      jnp.dtype(parameter.dtype),
      sharding=meshes.parameter_sharding(mesh, parameter.axes, parameter.shape),
    ),
    policy.parameter_table(),
  )


def programs(
  config: Config, policy: Policy, base: Tree, trainable: Tree, mesh: jax.sharding.Mesh, stop_ids: int = 1
) -> dict[str, Program]:
  """Every program of a run by name, for all its declared buckets.

  Names: `score/P×T`, `update/P×R×T` (prompt, teacher prompt and completion buckets), `zero`, `apply`, `finish`,
  `prepare` (the sampler's copy of the weights). Of the sampler: `prefill/P×T`, `admit/P×T` (a prompt's cache into the
  rows of its samples), `decode/P×T` and, for a cache with fewer slots C than prompt and completion may need,
  `decode/P×T@C`; `resize/P×T` from the largest of these to the one before. Where the cache keeps its size instead,
  `decode/P×T#R` with fewer rows R of it; `compact/P×T` from all rows to half of them. Evaluation has its own number of
  rows: `evaluation/…`.

  Args:
    config: settings.
    policy: the model.
    base: frozen parameters; abstract arrays will do.
    trainable: trainable parameters; abstract arrays will do.
    mesh: where it runs.
    stop_ids: how many token ids end a completion.
  """
  base, trainable = abstract(base), abstract(trainable)
  state = abstract_state(config, trainable, mesh)
  update = make_update(policy, config, jax.tree.map(lambda leaf: leaf.sharding, state))
  declared = batching.Buckets.of(config)
  sdpo = config.actor.policy_loss.loss_mode == 'sdpo'
  rows = -(-config.actor.ppo_micro_batch_size // mesh.size) * mesh.size
  found = {
    'zero': Program(update.zero, (trainable,), holds=('parameters',)),
    'apply': Program(update.apply, (state, trainable), holds=('state', 'gradients')),
    'finish': Program(update.finish, (state, jax.ShapeDtypeStruct((), jnp.int32)), holds=('state', 'batch')),
  }
  terms = ['distill_coef' if sdpo else 'policy_coef', *(['entropy_coef'] if config.actor.entropy_coeff else [])]
  scoring = batching.scores_first(config)
  trained = batching.Buckets.of_update(config)
  for response in trained.response:
    for prompt in trained.prompt:
      if scoring:
        batch = abstract_batch(rows, prompt, None, response, old=False, terms=terms, mesh=mesh)
        found[f'score/{prompt}×{response}'] = Program(
          update.score,
          (base, trainable, batch.student, batch.targets),
          holds=('parameters', 'parameters', 'batch', 'batch'),
        )
      for reprompt in trained.reprompt if sdpo else (None,):
        batch = abstract_batch(
          rows,
          prompt,
          reprompt,
          response,
          old=not batching.on_policy(config),
          terms=terms,
          mesh=mesh,
          share=batching.shares_prompts(config, policy),
        )
        name = f'update/{prompt}×{reprompt}×{response}' if sdpo else f'update/{prompt}×{response}'
        found[name] = Program(
          update.accumulate, (base, state, trainable, batch), holds=('parameters', 'state', 'gradients', 'batch')
        )
  for prompt in declared.prompt:
    found.update(_sampling(config, policy, base, trainable, mesh, prompt, declared.response[-1], stop_ids))
  return found


def abstract_batch(
  rows: int,
  prompt: int,
  reprompt: int | None,
  response: int,
  *,
  old: bool,
  terms: Sequence[str],
  mesh: jax.sharding.Mesh,
  share: bool = False,
) -> Batch:
  """Shapes and shardings of a micro-batch whose loss has these `terms`; `share` from `batching.shares_prompts`."""
  sharding = meshes.batch_sharding(mesh)
  array = lambda width, dtype: jax.ShapeDtypeStruct((rows, width), dtype, sharding=sharding)
  side = lambda room, share=False: TokenRows(
    tokens=array(room + response, jnp.int32),
    positions=array(room + response, jnp.int32),
    segment_ids=array(room + response, jnp.int32),
    target_index=array(response, jnp.int32),
    parents=array(room + response, jnp.int32) if share else None,
  )
  weights = array(response, jnp.float32)
  return Batch(
    student=side(prompt),
    teacher=None if reprompt is None else side(reprompt, share),
    targets=array(response, jnp.int32),
    mask=weights,
    **{name: weights if name in terms else None for name in batching.COEFFICIENTS},
    old_log_probs=weights if old else None,
    advantages=weights,
  )


def _sampling(
  config: Config,
  policy: Policy,
  base: Tree,
  trainable: Tree,
  mesh: jax.sharding.Mesh,
  prompt: int,
  response: int,
  stop_ids: int,
) -> dict[str, Program]:
  """The sampler's programs in training, and in evaluation where it has another number of rows."""
  run = rollout_programs.programs(policy, mesh, config.rollout.cache_dtype == 'int8')
  limit = config.rollout.max_batch_rows
  rows_of = lambda prompts, n: (slots.shard_rows(prompts * n, limit, run.shards), n)
  calls = {'': rows_of(config.data.train_batch_size, config.rollout.n)}
  if config.trainer.test_freq:
    # How many held-out questions there are is known from their files only: without a limit, enough to fill all slots.
    held_out = rows_of(config.data.val_max_samples or limit, config.val_kwargs.n)
    if held_out != calls['']:
      calls[EVALUATION] = held_out
  parameters = jax.eval_shape(run.prepare, base, trainable)
  found = {'prepare': Program(run.prepare, (base, trainable), holds=('parameters', 'parameters'))}
  weights = {0: ('prepare', 0), 1: ('prepare', 1)}
  place = f'{prompt}×{response}'
  for prefix, (rows, n) in calls.items():
    total = rows * run.shards
    of_rows, scalar = functools.partial(_of_rows, mesh), jax.ShapeDtypeStruct((), jnp.int32)

    def cache(rows: int, length: int) -> Any:
      shape = jax.eval_shape(functools.partial(run.empty, rows=rows, slots=length))
      if run.shards == mesh.size == 1:
        return shape
      place = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
      return jax.tree.map(place, shape, rollout_programs.cache_shardings(mesh, shape))

    # The most prompts of a shard that are prefilled together: those that fill its slots at first.
    prompts = run.shards * slots.pieces(-(-rows // n))[0]
    arguments = (*parameters, of_rows((prompts, prompt), jnp.int32), of_rows((prompts,), jnp.int32))
    holds = ('parameters', 'parameters', 'batch', 'batch')
    found[f'{prefix}prefill/{place}'] = Program(run.prefill, arguments, holds=holds, inherits=weights)
    capacities = slots.slot_buckets(prompt + response + config.rollout.decode_chunk, run.keeps_size)
    index = of_rows((total,), jnp.int32)
    found[f'{prefix}admit/{place}'] = Program(
      run.copy,
      (cache(total, capacities[-1]), cache(prompts, prompt), index, index, of_rows((run.shards,), jnp.int32)),
      holds=('cache', 'cache', 'batch', 'batch', 'batch'),
    )
    whole = cache(total, capacities[-1])
    fewer = [run.shards * size for size in slots.row_buckets(rows, few=True)[:-1]] if run.keeps_size else []
    caches = {f'@{length}': cache(total, length) for length in capacities[:-1]} | {'': whole}
    caches |= {f'#{left}': whole.replace(lengths=of_rows((left,), jnp.int32)) for left in fewer}
    for part, held in caches.items():
      left = held.lengths.shape[0]
      newest = of_rows((left,), jnp.int32)
      state = decode.Rows(_sampling_params(mesh, left, stop_ids), newest, newest, of_rows((left,), jnp.bool_))
      found[f'{prefix}decode/{place}{part}'] = Program(
        run.advance,
        (*parameters, held, state, scalar),
        dict(steps=config.rollout.decode_chunk),
        holds=('parameters', 'parameters', 'cache', 'batch', 'batch'),
        inherits=weights,
      )
    if fewer:
      found[f'{prefix}compact/{place}'] = Program(
        run.compact,
        (whole.stores, whole.lengths, of_rows((fewer[-1],), jnp.int32)),
        holds=('cache', 'cache', 'batch'),
      )
    if len(capacities) > 1:
      found[f'{prefix}resize/{place}'] = Program(
        run.resize, (cache(total, capacities[-2]), index), dict(slots=capacities[-1]), holds=('cache', 'batch')
      )
  return found


def _of_rows(mesh: jax.sharding.Mesh, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(meshes.FSDP))
  return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding if shape else meshes.replicated(mesh))


def _sampling_params(mesh: jax.sharding.Mesh, rows: int, stop_ids: int) -> SamplingParams:
  array = functools.partial(_of_rows, mesh)
  return SamplingParams(
    temperature=array((rows,), jnp.float32),
    top_p=array((rows,), jnp.float32),
    top_k=array((rows,), jnp.int32),
    min_p=array((rows,), jnp.float32),
    seed=array((rows,), jnp.uint32),
    sample_id=array((rows,), jnp.int32),
    step=array((), jnp.int32),
    max_tokens=array((rows,), jnp.int32),
    stop_ids=array((rows, stop_ids), jnp.int32),
  )
