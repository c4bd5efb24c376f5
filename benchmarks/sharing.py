"""CPU-seconds with and without shared prompts: the sampler's prefill, and the teacher's rows of an update.

    python -m benchmarks.sharing [--model=small] [--prompts=8] [--n=8] [--prompt_length=512] [--reprompt_length=768]

`prefill`: the same samples of the same prompts, once as n completions per prompt and once as if every prompt had a
single one. `teacher`: gradients of one optimizer step in which all but two samples of a group have the same teacher
prompt (the question with the same demonstration), with `actor.pack_sequences`, when completions of a row share it and
when each has its own; `rows` has one sample per row. All sides must agree; one core, in turns; one JSON line each.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from benchmarks.rollout import MODELS, one_core, take_turns
from benchmarks.rollout_sides import NoText

SUCCESSFUL = 2  # Per group; they have no teacher signal.


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--model', choices=MODELS, default='small')
  parser.add_argument('--prompts', type=int, default=8)
  parser.add_argument('--n', type=int, default=8, help='completions a prompt, more than two')
  parser.add_argument('--prompt_length', type=int, default=512)
  parser.add_argument('--reprompt_length', type=int, default=768)
  parser.add_argument('--new_tokens', type=int, default=64, help='of all samples, and on average in the update')
  parser.add_argument('--longest', type=int, default=512, help='completions of the update, and targets of a row')
  parser.add_argument('--repeats', type=int, default=3)
  args = parser.parse_args()
  one_core()
  import jax

  from sdpo_jax.models import huggingface

  values = MODELS[args.model] | {'model_type': 'qwen3', 'tie_word_embeddings': True}
  policy, parameters = huggingface.init(values, jax.random.key(0))
  for measure in (prefill, teacher):
    print(json.dumps(measure(policy, parameters, args)), flush=True)


def report(name: str, sides: dict[str, Any], told: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
  """Return the JSON line of a comparison: CPU-seconds of each of the `sides`, which are called in turns."""
  measured = take_turns(sides, args.repeats)
  seconds = {side: round(cpu, 3) for side, (_, cpu) in measured.items()}
  faster = {side: round(cpu / measured['shared'][1], 2) for side, (_, cpu) in measured.items() if side != 'shared'}
  settings = ('model', 'prompts', 'n', 'prompt_length', 'reprompt_length', 'new_tokens', 'longest')
  given = {setting: getattr(args, setting) for setting in settings}
  return {'benchmark': f'sharing/{name}', **given, **told, 'cpu_seconds': seconds, 'times_as_fast_as': faster}


def prefill(policy: Any, parameters: Any, args: argparse.Namespace) -> dict[str, Any]:
  """Compare one prefill per prompt with one per sample."""
  import numpy as np

  from sdpo_jax.rollout.sampler import Sampler

  sampler = Sampler(policy, NoText(), max_batch_rows=args.prompts * args.n)
  rng = np.random.default_rng(0)
  prompts = rng.integers(1, policy.vocab_size, (args.prompts, args.prompt_length)).tolist()
  settings = dict(seed=0, max_tokens=args.new_tokens)
  repeated = [prompt for prompt in prompts for _ in range(args.n)]

  def shared(step):
    return sampler.sample({}, parameters, prompts, n=args.n, step=step, **settings)

  def apart(step):
    return sampler.sample({}, parameters, repeated, n=1, step=step, **settings)

  tokens, counts = [], []
  for side in (shared, apart):
    tokens.append(side(0).completion_tokens)
    counts.append(sampler.stats.prompts)
  # Matrix products of other shapes round differently, which sometimes changes a draw.
  same = float((tokens[0] == tokens[1]).all(1).mean())
  if same < 0.9:
    raise RuntimeError(f'Only {same:.0%} of the samples are the same.')
  told = {'prefilled_prompts': dict(zip(('shared', 'apart'), counts, strict=True)), 'same_samples': same}
  return report('prefill', {'shared': shared, 'apart': apart}, told, args)


def teacher(policy: Any, parameters: Any, args: argparse.Namespace) -> dict[str, Any]:
  """Compare packed rows that share a teacher prompt, packed rows with separate ones, and rows of one sample."""
  import dataclasses

  import jax
  import numpy as np

  from sdpo_jax.config import Config
  from sdpo_jax.distributed import mesh as meshes
  from sdpo_jax.learning import batching
  from sdpo_jax.learning.update import make_update, place_state
  from sdpo_jax.training.specs import batch_spec, update_spec
  from sdpo_jax.types import Rollouts

  rng, rows = np.random.default_rng(0), args.prompts * args.n
  lengths = np.clip(rng.lognormal(np.log(args.new_tokens) - 0.5, 1.0, rows), 4, args.longest).astype(int)
  mask = np.arange(args.longest) < lengths[:, None]

  def draw(*shape):
    return rng.integers(1, policy.vocab_size, shape).astype(np.int32)

  nothing = np.zeros(mask.shape, np.float32)
  group = np.repeat(np.arange(args.prompts), args.n)
  rollouts = Rollouts.of_completions(group, draw(*mask.shape) * mask, mask)
  prompts, reprompts = draw(args.prompts, 64).tolist(), draw(args.prompts, args.reprompt_length).tolist()
  samples = batching.GenerationBatch(
    prompts=[prompts[g] for g in group],
    teacher_prompts=[reprompts[g] for g in group],
    rollouts=rollouts,
    distill_mask=np.broadcast_to((np.arange(rows) % args.n >= SUCCESSFUL).astype(np.float32)[:, None], mask.shape),
    advantages=nothing,
  )
  config = Config()
  config.model.dtype, config.model.remat = 'float32', 'none'
  config.data.train_batch_size = config.actor.ppo_mini_batch_size = args.prompts
  config.rollout.n = args.n
  config.data.max_prompt_length, config.data.prompt_buckets = 64, (64,)
  config.data.max_response_length = args.longest
  config.data.response_buckets = tuple(args.longest // part for part in (8, 4, 2, 1))
  config.actor.self_distillation.max_reprompt_len = args.reprompt_length
  config.data.reprompt_buckets = (args.reprompt_length,)
  config.actor.ppo_micro_batch_size = 2
  packed = dataclasses.replace(config, actor=dataclasses.replace(config.actor, pack_sequences=True))
  mesh = meshes.make_mesh(config.mesh, jax.devices()[:1])
  state = place_state(update_spec(config), jax.device_put(parameters, meshes.replicated(mesh)), mesh)
  update = make_update(policy, update_spec(config), jax.tree.map(lambda leaf: leaf.sharding, state))
  sides = {'shared': (packed, True), 'apart': (packed, False), 'rows': (config, False)}
  batches = {
    side: list(batching.micro_batches(samples, np.arange(rows), batch_spec(config), share=share))
    for side, (config, share) in sides.items()
  }

  def gradients(side: str) -> tuple[float, Any]:
    grads, loss = update.zero(state.trainable), 0.0
    for micro in batches[side]:
      grads, result = update.accumulate({}, state, grads, meshes.put_rows(mesh, micro.batch))
      loss += float(result.loss)
    return loss, jax.block_until_ready(grads)

  losses = {side: gradients(side)[0] for side in sides}
  if not np.allclose(list(losses.values()), losses['rows'], rtol=1e-5):
    raise RuntimeError(f'The sides do not compute the same loss: {losses}.')

  def total(count):
    return {side: sum(map(count, batches[side])) for side in sides}

  told = {
    'rows': total(lambda micro: len(micro.samples)),
    'teacher_tokens': total(lambda micro: micro.tokens(micro.batch.teacher)),
    'teacher_slots': total(lambda micro: micro.batch.teacher.tokens.size),
  }
  return report('teacher', {side: lambda _, side=side: gradients(side) for side in sides}, told, args)


if __name__ == '__main__':
  main()
