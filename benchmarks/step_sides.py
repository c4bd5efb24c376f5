"""The sides of `benchmarks.step`: processes that answer requests, one JSON line each.

A request describes a step (`work`); if it includes completions, only the update on these is made. So no side loads
another side's libraries.
"""

from __future__ import annotations

from collections.abc import Callable
import json
import os
from pathlib import Path
import sys
from typing import Any

from benchmarks.rollout_sides import NoText, timed

ADAPTER = 'adapter'  # Folder beside the model's files, in PEFT's format.
LEARNING_RATE, EMA_RATE, WEIGHT_DECAY, MAX_NORM = 1e-4, 0.05, 0.01, 1.0


def main() -> None:
  side, checkpoint = sys.argv[1:]
  answers = os.fdopen(os.dup(1), 'w')
  os.dup2(2, 1)  # Keeps output of libraries out of the answers.

  def answer(line):
    print(json.dumps(line), file=answers, flush=True)

  make, versions = SIDES[side]()
  answer(versions)
  made = None
  for line in sys.stdin:
    work = json.loads(line)['work']
    made = made or make(checkpoint, work)
    Path('/proc/self/clear_refs').write_text('5')  # Reset the high-water mark.
    outcome: dict[str, Any] = {'completions': work['completions']}
    spent = {}
    if work['completions'] is None:
      spent['sample'] = timed(lambda made=made, outcome=outcome: outcome.update(completions=made.sample()))
    spent['update'] = timed(lambda made=made, outcome=outcome: outcome.update(loss=made.update(outcome['completions'])))
    answer(
      {
        'loss': outcome['loss'],
        'peak_mib': _peak_mib(),
        'wall_s': sum(wall for wall, _ in spent.values()),
        'cpu_s': sum(cpu for _, cpu in spent.values()),
        **{f'cpu_s_{phase}': cpu for phase, (_, cpu) in spent.items()},
      }
    )


def _peak_mib() -> float:
  """Return the largest resident size since the reset, libraries and parameters included."""
  lines = Path('/proc/self/status').read_text().splitlines()
  return next(int(line.split()[1]) for line in lines if line.startswith('VmHWM:')) / 1024


class Ours:
  """This project's sampler and update."""

  def __init__(self, checkpoint: str, work: dict[str, Any]):
    import jax
    import numpy as np

    from sdpo_jax.config import Config
    from sdpo_jax.distributed import mesh as meshes
    from sdpo_jax.learning.update import make_update, place_state
    from sdpo_jax.models import huggingface, parameters
    from sdpo_jax.rollout.sampler import Sampler
    from sdpo_jax.training.specs import update_spec

    groups = len(work['prompts'])
    rows = groups * work['n']
    config = Config()
    config.model.dtype, config.model.remat = 'float32', work['remat']
    if work['lora']:
      config.model.lora.path = str(Path(checkpoint) / ADAPTER)
    config.data.train_batch_size = config.actor.ppo_mini_batch_size = groups
    config.data.max_response_length = work['new_tokens']
    config.data.response_buckets = (work['new_tokens'],)
    config.data.prompt_buckets = (len(work['prompts'][0]),)
    config.data.reprompt_buckets = (len(work['reprompts'][0]),)
    config.rollout.n = work['n']
    config.actor.ppo_micro_batch_size = rows
    config.actor.self_distillation.distillation_topk = work['topk']
    config.actor.self_distillation.teacher_update_rate = EMA_RATE
    config.optimizer.lr, config.optimizer.lr_warmup_steps = LEARNING_RATE, 0
    config.optimizer.weight_decay, config.optimizer.grad_clip = WEIGHT_DECAY, MAX_NORM
    self.config, self.work = config, work
    self.mesh = meshes.make_mesh(config.mesh, jax.devices()[:1])
    policy, params = huggingface.load(checkpoint, config.model, self.mesh)
    self.base, trainable = parameters.split(policy.parameter_table(), params)
    self.state = place_state(update_spec(config), trainable, self.mesh)
    self.functions = make_update(policy, update_spec(config), jax.tree.map(lambda leaf: leaf.sharding, self.state))
    self.sampler = Sampler(
      policy,
      NoText(),
      prompt_buckets=config.data.prompt_buckets,
      response_buckets=config.data.response_buckets,
      max_batch_rows=rows,
      mesh=self.mesh,
    )
    self.everything = np.arange(rows)
    self.rollouts = None

  def sample(self) -> Any:
    self.rollouts = self.sampler.sample(
      self.base,
      self.state.trainable,
      self.work['prompts'],
      n=self.work['n'],
      seed=0,
      step=0,
      max_tokens=self.work['new_tokens'],
    )
    return self.rollouts.completion_tokens

  def update(self, completions: Any) -> float:
    import jax
    import numpy as np

    from sdpo_jax.distributed import mesh as meshes
    from sdpo_jax.learning import batching
    from sdpo_jax.training.specs import batch_spec

    rollouts = self.rollouts or self._given(np.asarray(completions, np.int32))
    shape = rollouts.completion_tokens.shape
    samples = batching.GenerationBatch(
      prompts=[self.work['prompts'][group] for group in rollouts.group],
      teacher_prompts=[self.work['reprompts'][group] for group in rollouts.group],
      rollouts=rollouts,
      distill_mask=np.ones(shape, np.float32),
      advantages=np.zeros(shape, np.float32),
    )
    grads, loss = self.functions.zero(self.state.trainable), 0.0
    for micro in batching.micro_batches(samples, self.everything, batch_spec(self.config)):
      batch = meshes.put_rows(self.mesh, micro.batch)
      grads, result = self.functions.accumulate(self.base, self.state, grads, batch)
      loss += float(result.loss)
    self.state, _ = self.functions.apply(self.state, grads)
    self.state = jax.block_until_ready(self.functions.advance_teacher(self.state, np.int32(1)))
    return loss

  def _given(self, completions: Any) -> Any:
    """Return rollouts with completions that were not sampled."""
    import numpy as np

    from sdpo_jax.types import Rollouts

    rows, width = completions.shape
    nothing = np.zeros((rows, width), np.float32)
    return Rollouts(
      group=np.repeat(np.arange(len(self.work['prompts'])), self.work['n']),
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


class Theirs:
  """The same step in plain PyTorch; with an adapter, by PEFT, whose second adapter is the teacher."""

  def __init__(self, checkpoint: str, work: dict[str, Any]):
    import copy

    import torch
    import transformers

    self.work = work
    self.model = transformers.Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    if work['lora']:
      import peft

      self.model = peft.PeftModel.from_pretrained(self.model, Path(checkpoint) / ADAPTER, 'student', is_trainable=True)
      self.model.load_adapter(Path(checkpoint) / ADAPTER, 'teacher')
      self.model.set_adapter('student')
      self.teacher = self.model
    else:
      self.teacher = copy.deepcopy(self.model).requires_grad_(False)
    if work['remat'] == 'full':
      self.model.gradient_checkpointing_enable({'use_reentrant': False})
    self.model.train()
    self.trained = {name: value for name, value in self.model.named_parameters() if value.requires_grad}
    named = dict(self.teacher.named_parameters())
    self.averaged = {name: named[name.replace('.student.', '.teacher.')] for name in self.trained}
    self.optimizer = torch.optim.AdamW(self.trained.values(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)

    def repeat(tokens):
      return torch.tensor(tokens).repeat_interleave(work['n'], 0)

    self.prompts, self.reprompts = repeat(work['prompts']), repeat(work['reprompts'])

  def sample(self) -> Any:
    import torch

    with torch.inference_mode():
      tokens = self.model.generate(
        input_ids=self.prompts,
        attention_mask=torch.ones_like(self.prompts),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        max_new_tokens=self.work['new_tokens'],
        eos_token_id=None,
        pad_token_id=0,
      )
    return tokens[:, self.prompts.shape[1] :].clone()

  def log_probs(self, model: Any, prompts: Any, completions: Any) -> tuple[Any, Any]:
    import torch

    length = completions.shape[1]
    logits = model(input_ids=torch.cat([prompts, completions], 1), use_cache=False, logits_to_keep=length + 1).logits
    logits = logits[:, :-1]
    return logits, logits.logsumexp(-1, keepdim=True)

  def update(self, completions: Any) -> float:
    import torch

    completions = torch.as_tensor(completions).long()
    logits, normaliser = self.log_probs(self.model, self.prompts, completions)
    top, ids = logits.topk(self.work['topk'])
    del logits
    with torch.no_grad():
      teacher = self.tail(self.teacher_log_probs(completions, ids))
    student = self.tail(top - normaliser)
    mixture = torch.logaddexp(student, teacher) - torch.log(torch.tensor(2.0))

    def kl(left):
      return (left.exp() * (left - mixture)).sum(-1)

    loss = (0.5 * kl(student) + 0.5 * kl(teacher)).mean()
    self.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(self.trained.values(), MAX_NORM)
    self.optimizer.step()
    with torch.no_grad():
      for name, mine in self.averaged.items():
        mine.lerp_(self.trained[name], EMA_RATE)
    return float(loss.detach())

  def teacher_log_probs(self, completions: Any, ids: Any) -> Any:
    if self.work['lora']:
      self.model.set_adapter('teacher')
    logits, normaliser = self.log_probs(self.teacher, self.reprompts, completions)
    if self.work['lora']:
      self.model.set_adapter('student')
    return logits.gather(-1, ids) - normaliser

  def tail(self, log_probs: Any) -> Any:
    import torch

    mass = log_probs.logsumexp(-1, keepdim=True).clamp(max=-1e-7)
    return torch.cat([log_probs, torch.log(-torch.expm1(mass))], -1)


def _sdpo_jax() -> tuple[Callable[..., Any], dict[str, str]]:
  import jax

  return Ours, {'jax': jax.__version__}


def _pytorch() -> tuple[Callable[..., Any], dict[str, str]]:
  import peft
  import torch
  import transformers

  torch.set_num_threads(1)
  return Theirs, {'torch': torch.__version__, 'transformers': transformers.__version__, 'peft': peft.__version__}


SIDES: dict[str, Callable[[], tuple[Callable[..., Any], dict[str, str]]]] = {'sdpo_jax': _sdpo_jax, 'pytorch': _pytorch}


if __name__ == '__main__':
  main()
