"""The registry of compiled programs: which programs a run with given settings uses, with their argument shapes.

The loop runs these functions; `programs` lists them with abstract arguments, so that others can lower, compile and
cost them without running anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from models.policy import Policy
from sdpo_jax import mesh as meshes
from sdpo_jax.config import Config
from sdpo_jax.rollout import decode, engine
from sdpo_jax.rollout import programs as rollout_programs
from sdpo_jax.rollout.sampling import SamplingParams
from sdpo_jax.training import batching
from sdpo_jax.training.checkpoints import abstract
from sdpo_jax.training.step import abstract_state, make_update
from sdpo_jax.types import Batch, TokenRows, Tree


@dataclasses.dataclass(frozen=True)
class Program:
  """A jitted function with the shapes, dtypes and shardings that a run calls it with."""

  function: Callable[..., Any]
  arguments: tuple[Any, ...]
  static: dict[str, Any] = dataclasses.field(default_factory=dict)

  def lower(self) -> jax.stages.Lowered:
    """The program, ready to compile."""
    return self.function.lower(*self.arguments, **self.static)


def programs(
  config: Config, policy: Policy, base: Tree, trainable: Tree, mesh: jax.sharding.Mesh, stop_ids: int = 1
) -> dict[str, Program]:
  """Every program of a run by name, for all its declared buckets.

  Names: `prefill/P×T`, `decode/P×T`, `score/P×T`, `update/P×R×T` (prompt, teacher prompt and completion buckets),
  `zero`, `apply`, `finish`. Evaluation uses `prefill` and `decode` with its own number of rows: `evaluation/…`.

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
    'zero': Program(update.zero, (trainable,)),
    'apply': Program(update.apply, (state, trainable)),
    'finish': Program(update.finish, (state, jax.ShapeDtypeStruct((), jnp.int32))),
  }
  terms = ['distill_coef' if sdpo else 'policy_coef', *(['entropy_coef'] if config.actor.entropy_coeff else [])]
  scoring = batching.scores_first(config)
  trained = batching.Buckets.of_update(config)
  for response in trained.response:
    for prompt in trained.prompt:
      if scoring:
        batch = abstract_batch(rows, prompt, None, response, old=False, terms=terms, mesh=mesh)
        found[f'score/{prompt}×{response}'] = Program(update.score, (base, trainable, batch.student, batch.targets))
      for reprompt in trained.reprompt if sdpo else (None,):
        batch = abstract_batch(
          rows, prompt, reprompt, response, old=not batching.on_policy(config), terms=terms, mesh=mesh
        )
        name = f'update/{prompt}×{reprompt}×{response}' if sdpo else f'update/{prompt}×{response}'
        found[name] = Program(update.accumulate, (base, state, trainable, batch))
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
) -> Batch:
  """Shapes and shardings of a micro-batch whose loss has these `terms`."""
  sharding = meshes.batch_sharding(mesh)
  array = lambda width, dtype: jax.ShapeDtypeStruct((rows, width), dtype, sharding=sharding)
  side = lambda room: TokenRows(
    tokens=array(room + response, jnp.int32),
    positions=array(room + response, jnp.int32),
    segment_ids=array(room + response, jnp.int32),
    target_index=array(response, jnp.int32),
  )
  weights = array(response, jnp.float32)
  return Batch(
    student=side(prompt),
    teacher=None if reprompt is None else side(reprompt),
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
  """Prefill and decode of training, and of evaluation where its calls have another shape."""
  run = rollout_programs.programs(policy, mesh)
  shape = lambda prompts, n: engine.call_shape(prompts, n, config.rollout.max_batch_rows, run.shards)
  calls = {'': shape(config.data.train_batch_size, config.rollout.n)}
  if config.trainer.test_freq and config.data.val_max_samples:
    held_out = shape(config.data.val_max_samples, config.val_kwargs.n)
    if held_out != calls['']:
      calls['evaluation/'] = held_out
  parameters = jax.eval_shape(run.prepare, base, trainable)
  found = {}
  for prefix, (groups, repeats) in calls.items():
    prompts, lengths, params = _sampling_arguments(mesh, groups, repeats, prompt, stop_ids)
    static = dict(n=repeats, max_new_tokens=response)
    arguments = (*parameters, prompts, lengths, params)
    slots = (prompt,)
    for stage in engine.stages(response):
      slots = (*slots, prompt + stage)
      if len(slots) == 2:
        static['slots'] = stage
        state = jax.eval_shape(functools.partial(run.prefill, **static), *arguments)
        found[f'{prefix}prefill/{prompt}×{response}'] = Program(run.prefill, arguments, static)
      else:
        state = jax.eval_shape(functools.partial(run.grow, n=repeats, slots=slots), state)
      # The program of the last stage, which holds the whole cache, has the plain name.
      found[f'{prefix}decode/{prompt}×{response}' + (f'@{stage}' if stage < response else '')] = Program(
        jax.jit(functools.partial(decode.advance, policy), donate_argnames='state'),
        (*parameters, params, state, jax.ShapeDtypeStruct((), jnp.int32)),
      )
  return found


def _sampling_arguments(
  mesh: jax.sharding.Mesh, groups: int, repeats: int, prompt: int, stop_ids: int
) -> tuple[Any, Any, SamplingParams]:
  rows = groups * repeats
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(meshes.FSDP))

  def array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding if shape else meshes.replicated(mesh))

  params = SamplingParams(
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
  return array((groups, prompt), jnp.int32), array((groups,), jnp.int32), params
