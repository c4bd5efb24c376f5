"""Tokens per second of the sampler and of transformers' `generate`: same model, prompts and length, one core each.

    python -m benchmarks.rollout [--model=tiny|mid] [--prompts=8] [--n=8] [--prompt_length=64] [--new_tokens=128]

Both sides sample at temperature 1 from random Qwen3 weights in float32 with the end-of-sequence token disabled, after a
warm-up that compiles and loads everything. Ours shares one prefill among the n completions of a prompt and returns two
log-probs and the entropy of every token, which `generate` does not. They take turns, and the medians are printed as one
JSON line: wall-clock seconds depend on what else the machine does, CPU seconds do not.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
import json
import os
import statistics
import tempfile
import time

MODELS = {
  'tiny': dict(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
  ),
  'mid': dict(
    vocab_size=32768,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
  ),
}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--model', choices=[*MODELS, 'all'], default='all')
  parser.add_argument('--prompts', type=int, default=8)
  parser.add_argument('--n', type=int, default=8, help='completions a prompt')
  parser.add_argument('--prompt_length', type=int, default=64)
  parser.add_argument('--new_tokens', type=int, default=None, help='default: 128 for tiny, 64 for mid')
  parser.add_argument('--top_p', type=float, default=1.0)
  parser.add_argument('--repeats', type=int, default=3)
  args = parser.parse_args()
  one_core()
  for name in MODELS if args.model == 'all' else [args.model]:
    new_tokens = args.new_tokens or (128 if name == 'tiny' else 64)
    print(json.dumps(compare(name, args.prompts, args.n, args.prompt_length, new_tokens, args.top_p, args.repeats)))


def one_core() -> None:
  """Both libraries on one core and one thread; call before either is imported."""
  if hasattr(os, 'sched_setaffinity'):
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
  os.environ['JAX_PLATFORMS'] = 'cpu'
  os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} --xla_cpu_multi_thread_eigen=false'.strip()
  for name in ('OMP_NUM_THREADS', 'MKL_NUM_THREADS'):
    os.environ[name] = '1'


def compare(
  name: str, prompts: int, n: int, prompt_length: int, new_tokens: int, top_p: float, repeats: int
) -> dict[str, object]:
  """The benchmark's line for one model: tokens per second and CPU seconds per token of both sides."""
  import jax
  import numpy as np
  import torch
  import transformers

  from models import huggingface
  from sdpo_jax.config import ModelConfig
  from sdpo_jax.rollout.engine import Sampler

  torch.set_num_threads(1)
  torch.manual_seed(0)
  config = transformers.Qwen3Config(**MODELS[name], tie_word_embeddings=True, eos_token_id=None, pad_token_id=0)
  model = transformers.Qwen3ForCausalLM(config).eval()
  with tempfile.TemporaryDirectory() as path:
    model.save_pretrained(path)
    policy, params = huggingface.load(path, ModelConfig(path=path, dtype='float32', remat='none'))
  tokens = np.random.default_rng(0).integers(1, config.vocab_size, (prompts, prompt_length))
  rows = torch.tensor(tokens).repeat_interleave(n, 0)
  sampler = Sampler(
    policy, NoText(), prompt_buckets=(prompt_length,), response_buckets=(new_tokens,), max_batch_rows=prompts * n
  )

  def ours(step: int) -> None:
    rollouts = sampler.sample(
      {}, params, tokens.tolist(), n=n, seed=0, step=step, max_tokens=new_tokens, temperature=1.0, top_p=top_p
    )
    assert rollouts.completion_mask.all()

  def theirs(step: int) -> None:
    del step
    with torch.inference_mode():
      out = model.generate(
        rows,
        attention_mask=torch.ones_like(rows),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=top_p,
        max_new_tokens=new_tokens,
        eos_token_id=None,
        pad_token_id=0,
      )
    assert out.shape == (prompts * n, prompt_length + new_tokens)

  measured = take_turns({'sdpo_jax': ours, 'transformers': theirs}, repeats)
  count = prompts * n * new_tokens
  sides = {
    side: {'tokens_per_s': round(count / wall, 1), 'cpu_us_per_token': round(cpu / count * 1e6, 2)}
    for side, (wall, cpu) in measured.items()
  }
  return {
    'benchmark': 'rollout',
    'model': name,
    'parameters': sum(leaf.size for leaf in jax.tree.leaves(params)),
    'prompts': prompts,
    'n': n,
    'prompt_length': prompt_length,
    'new_tokens': new_tokens,
    'top_p': top_p,
    **sides,
    'times_as_fast': round(measured['transformers'][0] / measured['sdpo_jax'][0], 2),
    'times_as_fast_cpu': round(measured['transformers'][1] / measured['sdpo_jax'][1], 2),
    'versions': {'jax': jax.__version__, 'torch': torch.__version__, 'transformers': transformers.__version__},
  }


def take_turns(sides: dict[str, Callable[[int], None]], repeats: int) -> dict[str, tuple[float, float]]:
  """Median (wall, CPU) seconds of each side over `repeats` runs after one to warm up."""
  seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
  for step in range(repeats + 1):
    for name, run in sides.items():
      wall, cpu = time.perf_counter(), time.process_time()
      run(step)
      seconds[name].append((time.perf_counter() - wall, time.process_time() - cpu))
  return {
    name: tuple(statistics.median(column) for column in zip(*runs[1:], strict=True)) for name, runs in seconds.items()
  }


class NoText:
  """A tokenizer for token ids that mean nothing."""

  def decode(self, token_ids: list[int], **kwargs: bool) -> str:
    """The empty text."""
    del token_ids, kwargs
    return ''


if __name__ == '__main__':
  main()
