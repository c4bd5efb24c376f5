"""Seconds of one SDPO step beside a plain PyTorch implementation of the same step: same model, batch, lengths, one core.

    python -m benchmarks.step [--model=tiny|mid] [--prompts=8] [--n=8] [--prompt_length=64] [--new_tokens=64]

A step samples the completions, scores them with an EMA teacher under a longer prompt, and makes one AdamW update on the
top-K + tail Jensen–Shannon divergence. The PyTorch side is what one would write first: transformers' `generate`, whole
logits, autograd, `torch.optim.AdamW`. Before timing, both sides compute the loss of the same tokens and must agree.
One JSON line; the CPU seconds do not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import tempfile

from benchmarks.rollout import MODELS, one_core, take_turns
from benchmarks.rollout_sides import NoText

TOPK = 20


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--model', choices=[*MODELS, 'all'], default='all')
  parser.add_argument('--prompts', type=int, default=8)
  parser.add_argument('--n', type=int, default=8, help='completions a prompt')
  parser.add_argument('--prompt_length', type=int, default=64)
  parser.add_argument('--reprompt_length', type=int, default=128)
  parser.add_argument('--new_tokens', type=int, default=64)
  parser.add_argument('--repeats', type=int, default=3)
  args = parser.parse_args()
  one_core()
  for name in MODELS if args.model == 'all' else [args.model]:
    print(json.dumps(compare(name, args)))


def compare(name: str, args: argparse.Namespace) -> dict[str, object]:
  """The benchmark's line for one model."""
  import jax
  import numpy as np
  import torch
  import transformers

  torch.set_num_threads(1)
  torch.manual_seed(0)
  config = transformers.Qwen3Config(**MODELS[name], tie_word_embeddings=True, eos_token_id=None, pad_token_id=0)
  rng = np.random.default_rng(0)

  def draw(length):
    return rng.integers(1, config.vocab_size, (args.prompts, length))

  prompts, reprompts = draw(args.prompt_length), draw(args.reprompt_length)
  model = transformers.Qwen3ForCausalLM(config)
  with tempfile.TemporaryDirectory() as path:
    model.save_pretrained(path)
    ours = Ours(path, prompts, reprompts, args)
  theirs = Theirs(model, prompts, reprompts, args)
  completions = rng.integers(1, config.vocab_size, (args.prompts * args.n, args.new_tokens)).astype(np.int32)
  losses = [side.update(completions) for side in (ours, theirs)]  # The first update: both teachers are the student.
  losses = [side.update(completions) for side in (ours, theirs)]
  if not np.isclose(*losses, rtol=2e-3):
    raise RuntimeError(f'The two sides do not compute the same loss: {losses}.')
  measured = take_turns({'sdpo_jax': ours.step, 'pytorch': theirs.step}, args.repeats)
  return {
    'benchmark': 'step',
    'model': name,
    'prompts': args.prompts,
    'n': args.n,
    'prompt_length': args.prompt_length,
    'reprompt_length': args.reprompt_length,
    'new_tokens': args.new_tokens,
    'topk': TOPK,
    'losses': [float(loss) for loss in losses],
    **{
      side: {'seconds_per_step': round(wall, 3), 'cpu_seconds_per_step': round(cpu, 3)}
      for side, (wall, cpu) in measured.items()
    },
    'times_as_fast': round(measured['pytorch'][0] / measured['sdpo_jax'][0], 2),
    'times_as_fast_cpu': round(measured['pytorch'][1] / measured['sdpo_jax'][1], 2),
    'versions': {'jax': jax.__version__, 'torch': torch.__version__, 'transformers': transformers.__version__},
  }


class Ours:
  """This project's sampler and update."""

  def __init__(self, path, prompts, reprompts, args):
    import jax
    import numpy as np

    from models import huggingface
    from sdpo_jax.config import Config
    from sdpo_jax.distributed import mesh as meshes
    from sdpo_jax.rollout.engine import Sampler
    from sdpo_jax.training.update import make_update, place_state

    config = Config()
    config.model.dtype, config.model.remat = 'float32', 'none'
    config.data.train_batch_size = config.actor.ppo_mini_batch_size = args.prompts
    config.data.max_response_length = args.new_tokens
    config.data.response_buckets = (args.new_tokens,)
    config.data.prompt_buckets, config.data.reprompt_buckets = (args.prompt_length,), (args.reprompt_length,)
    config.rollout.n = args.n
    config.actor.ppo_micro_batch_size = args.prompts * args.n
    config.actor.self_distillation.distillation_topk = TOPK
    config.optimizer.lr, config.optimizer.lr_warmup_steps = 1e-4, 0
    self.config, self.args, self.prompts, self.reprompts = config, args, prompts.tolist(), reprompts.tolist()
    policy, parameters = huggingface.load(path, config.model)
    self.mesh = meshes.make_mesh(config.mesh, jax.devices()[:1])
    parameters = jax.device_put(parameters, meshes.replicated(self.mesh))
    self.state = place_state(config, parameters, self.mesh)
    self.functions = make_update(policy, config, jax.tree.map(lambda leaf: leaf.sharding, self.state))
    self.sampler = Sampler(
      policy,
      NoText(),
      prompt_buckets=(args.prompt_length,),
      response_buckets=(args.new_tokens,),
      max_batch_rows=args.prompts * args.n,
      mesh=self.mesh,
    )
    self.everything = np.arange(args.prompts * args.n)

  def step(self, step: int) -> None:
    rollouts = self.sampler.sample(
      {},
      self.state.trainable,
      self.prompts,
      n=self.args.n,
      seed=0,
      step=step,
      max_tokens=self.args.new_tokens,
    )
    self.update(rollouts.completion_tokens, rollouts)

  def update(self, completions, rollouts=None) -> float:
    import numpy as np

    from sdpo_jax.distributed import mesh as meshes
    from sdpo_jax.training import batching
    from sdpo_jax.types import Rollouts

    rows, width = completions.shape
    if rollouts is None:
      nothing = np.zeros((rows, width), np.float32)
      rollouts = Rollouts(
        group=np.repeat(np.arange(self.args.prompts), self.args.n),
        prompt_tokens=np.zeros((rows, 1), np.int32),
        prompt_mask=np.ones((rows, 1), bool),
        completion_tokens=completions,
        completion_mask=np.ones((rows, width), bool),
        sampling_log_probs=nothing,
        model_log_probs=nothing,
        entropy=nothing,
        finish_reason=['length'] * rows,
        text=[''] * rows,
      )
    samples = batching.GenerationBatch(
      prompts=[self.prompts[group] for group in rollouts.group],
      teacher_prompts=[self.reprompts[group] for group in rollouts.group],
      rollouts=rollouts,
      distill_mask=np.ones((rows, width), np.float32),
      advantages=np.zeros((rows, width), np.float32),
    )
    grads, loss = self.functions.zero(self.state.trainable), 0.0
    for micro in batching.micro_batches(samples, self.everything, self.config):
      batch = meshes.put_rows(self.mesh, micro.batch)
      grads, result = self.functions.accumulate({}, self.state, grads, batch)
      loss += float(result.loss)
    self.state, _ = self.functions.apply(self.state, grads)
    self.state = self.functions.advance_teacher(self.state, np.int32(1))
    return loss


class Theirs:
  """The same step in plain PyTorch."""

  def __init__(self, model, prompts, reprompts, args):
    import copy

    import torch

    self.args = args
    self.model, self.teacher = model, copy.deepcopy(model).requires_grad_(False)
    self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)

    def repeat(tokens):
      return torch.tensor(tokens).repeat_interleave(args.n, 0)

    self.prompts, self.reprompts = repeat(prompts), repeat(reprompts)

  def step(self, step: int) -> None:
    import torch

    del step
    with torch.inference_mode():
      tokens = self.model.generate(
        self.prompts,
        attention_mask=torch.ones_like(self.prompts),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        max_new_tokens=self.args.new_tokens,
        eos_token_id=None,
        pad_token_id=0,
      )
    self.update(tokens[:, self.args.prompt_length :].clone())

  def log_probs(self, model, prompts, completions):
    import torch

    logits = model(torch.cat([prompts, completions], 1)).logits[:, prompts.shape[1] - 1 : -1]
    return logits, logits.logsumexp(-1, keepdim=True)

  def update(self, completions) -> float:
    import torch

    completions = torch.as_tensor(completions).long()
    logits, normaliser = self.log_probs(self.model, self.prompts, completions)
    top, ids = logits.topk(TOPK)
    with torch.no_grad():
      teacher_logits, teacher_normaliser = self.log_probs(self.teacher, self.reprompts, completions)
      teacher = self.tail(teacher_logits.gather(-1, ids) - teacher_normaliser)
    student = self.tail(top - normaliser)
    mixture = torch.logaddexp(student, teacher) - torch.log(torch.tensor(2.0))

    def kl(left):
      return (left.exp() * (left - mixture)).sum(-1)

    loss = (0.5 * kl(student) + 0.5 * kl(teacher)).mean()
    self.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
    self.optimizer.step()
    with torch.no_grad():
      for mine, theirs in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
        mine.lerp_(theirs, 0.05)
    return float(loss)

  def tail(self, log_probs):
    import torch

    mass = log_probs.logsumexp(-1, keepdim=True).clamp(max=-1e-7)
    return torch.cat([log_probs, torch.log(-torch.expm1(mass))], -1)


if __name__ == '__main__':
  main()
