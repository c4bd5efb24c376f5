"""The sides of `benchmarks.rollout`: processes that answer requests, one JSON line each.

Run as a file by the side's own Python, with PYTHONPATH naming the checkout to use: Tunix has its own environment, an
older checkout of this repository its own modules. So only a side's own libraries are imported.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import json
import os
import sys
import time
from typing import Any

Run = Callable[[dict[str, Any], int], dict[str, Any]]


def main() -> None:
  side, checkpoint = sys.argv[1:]
  answers = os.fdopen(os.dup(1), 'w')
  os.dup2(2, 1)  # Keeps output of libraries out of the answers.

  def answer(line):
    print(json.dumps(line), file=answers, flush=True)

  run, versions = SIDES[side](checkpoint)
  answer(versions)
  for line in sys.stdin:
    request = json.loads(line)
    work, step = request['work'], request['step']
    outcome: dict[str, Any] = {}
    wall, cpu = timed(lambda work=work, step=step, outcome=outcome: outcome.update(run(work, step)))
    tokens = outcome['tokens']
    expected = work['max_tokens'] if step else [len(row) for row in tokens]
    if [len(row) for row in tokens] != expected:
      raise RuntimeError(f'{side} did not draw as many tokens as it was told to.')
    answer(
      {'wall_s': wall, 'cpu_s': cpu, 'cache_bytes': outcome['cache_bytes'], 'first_row': list(map(int, tokens[0]))}
    )


def timed(run: Callable[[], Any]) -> tuple[float, float]:
  """Return the (wall, CPU) seconds of a call."""
  wall, cpu = time.perf_counter(), time.process_time()
  run()
  return time.perf_counter() - wall, time.process_time() - cpu


class NoText:
  """A tokenizer for meaningless token ids; Tunix gets a prompt as its ids with spaces between."""

  def encode(self, text: str) -> list[int]:
    return [int(word) for word in text.split()]

  def decode(self, token_ids: list[int], **kwargs: bool) -> str:
    """Return an empty text."""
    del token_ids, kwargs
    return ''

  def bos_id(self) -> int:
    return 0

  def eos_id(self) -> int:
    return -1

  def pad_id(self) -> int:
    return 0


def sdpo_jax(checkpoint: str) -> tuple[Run, dict[str, str]]:
  """Return the sampler in the checkout on PYTHONPATH, this one or an older one."""
  import jax
  import numpy as np

  from sdpo_jax.config import ModelConfig
  from sdpo_jax.models import huggingface
  from sdpo_jax.rollout.sampler import Sampler

  policy, params = huggingface.load(checkpoint, ModelConfig(path=checkpoint, dtype='float32', remat='none'))
  samplers: dict[tuple[int, ...], tuple[Sampler, Callable[[], int]]] = {}

  def sampler_of(work: dict[str, Any]) -> tuple[Sampler, Callable[[], int]]:
    shape = len(work['prompts'][0]), max(work['max_tokens']), work['rows']
    if shape not in samplers:
      width, room, rows = shape
      sampler = Sampler(policy, NoText(), prompt_buckets=(width,), response_buckets=(room,), max_batch_rows=rows)
      samplers[shape] = sampler, count_cache(sampler)
    return samplers[shape]

  def run(work: dict[str, Any], step: int) -> dict[str, Any]:
    sampler, cache_bytes = sampler_of(work)
    rollouts = sampler.sample(
      {},
      params,
      work['prompts'],
      n=work['n'],
      seed=0,
      step=step,
      max_tokens=np.asarray(work['max_tokens']),
      temperature=work['temperature'],
      top_p=work['top_p'],
      top_k=work['top_k'] or -1,
    )
    lengths = rollouts.completion_mask.sum(1)
    return {
      'tokens': [row[:length] for row, length in zip(rollouts.completion_tokens, lengths, strict=True)],
      'cache_bytes': cache_bytes(),
    }

  return run, {'jax': jax.__version__}


def count_cache(sampler: Any) -> Callable[[], int]:
  """Return a function that returns the bytes of the sampler's largest cache so far.

  The sampler counts them itself; in older checkouts it passed its only cache to every dispatch.
  """
  import jax

  for name in ('stats', 'account'):  # `account` is the former name, in older checkouts.
    if hasattr(sampler, name):
      return lambda: getattr(sampler, name).cache_bytes
  programs, seen = sampler._programs, []  # noqa: SLF001 (Older checkouts count nowhere.)

  def advance(base: Any, trainable: Any, params: Any, state: Any, limit: Any) -> Any:
    seen.append(sum(leaf.nbytes for leaf in jax.tree.leaves(state.cache)))
    return programs.advance(base, trainable, params, state, limit)

  sampler._programs = dataclasses.replace(programs, advance=advance)  # noqa: SLF001 (As above.)
  return lambda: max(seen)


def transformers(checkpoint: str) -> tuple[Run, dict[str, str]]:
  """Return `generate` in batches of `rows` in the order of arrival, each until its longest row is done."""
  import torch
  import transformers

  torch.set_num_threads(1)
  torch.manual_seed(0)
  model = transformers.Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
  model.generation_config = transformers.GenerationConfig(eos_token_id=None, pad_token_id=0)

  def run(work: dict[str, Any], step: int) -> dict[str, Any]:
    prompts = torch.tensor(work['prompts']).repeat_interleave(work['n'], 0)
    if work['temperature']:
      how = dict(do_sample=True, temperature=work['temperature'], top_p=work['top_p'], top_k=work['top_k'])
    else:
      how = dict(do_sample=False)
    tokens, cache_bytes = [], 0
    for first in range(0, len(prompts), work['rows']):
      batch = prompts[first : first + work['rows']]
      lengths = work['max_tokens'][first : first + work['rows']]
      # It compiles nothing: two tokens warm it up.
      longest = max(lengths) if step else 2
      with torch.inference_mode():
        out = model.generate(
          batch,
          attention_mask=torch.ones_like(batch),
          max_new_tokens=longest,
          return_dict_in_generate=True,
          **how,
        )
      sizes = [layer.keys.nbytes + layer.values.nbytes for layer in out.past_key_values.layers]
      cache_bytes = max(cache_bytes, sum(sizes))
      completions = out.sequences[:, batch.shape[1] :]
      tokens += [row[:length].numpy() for row, length in zip(completions, lengths, strict=True)]
    return {'tokens': tokens, 'cache_bytes': cache_bytes}

  return run, {'torch': torch.__version__, 'transformers': transformers.__version__}


def tunix(checkpoint: str) -> tuple[Run, dict[str, str]]:
  """Return Tunix's vanilla sampler, one batch of all rows; every row as long as the longest."""
  from importlib import metadata
  from pathlib import Path

  import jax
  import jax.numpy as jnp
  from tunix.generate import sampler as sampling
  from tunix.models.qwen3 import model as qwen3
  from tunix.models.qwen3 import params as loader

  read = json.loads(Path(checkpoint, 'config.json').read_text())
  # Tunix's Qwen3 uses a RoPE theta of 1e6 whatever its configuration says; the checkpoint has the same.
  config = qwen3.ModelConfig(
    num_layers=read['num_hidden_layers'],
    vocab_size=read['vocab_size'],
    embed_dim=read['hidden_size'],
    hidden_dim=read['intermediate_size'],
    num_heads=read['num_attention_heads'],
    head_dim=read['head_dim'],
    num_kv_heads=read['num_key_value_heads'],
    rope_theta=1_000_000,
    norm_eps=read['rms_norm_eps'],
    use_tied_embedding=True,
  )
  model = loader.create_model_from_safe_tensors(checkpoint, config, dtype=jnp.float32)
  samplers: dict[int, sampling.Sampler] = {}

  def run(work: dict[str, Any], step: int) -> dict[str, Any]:
    width, room = len(work['prompts'][0]), max(work['max_tokens'])
    if width + room not in samplers:
      cache = sampling.CacheConfig(width + room, config.num_layers, config.num_kv_heads, config.head_dim)
      samplers[width + room] = sampling.Sampler(model, NoText(), cache)
    if work['temperature']:
      how = dict(temperature=work['temperature'], top_p=work['top_p'], top_k=work['top_k'] or None)
    else:
      how = {}
    done = samplers[width + room](
      [' '.join(map(str, prompt)) for prompt in work['prompts'] for _ in range(work['n'])],
      max_generation_steps=room,
      max_prompt_length=width,
      return_logprobs=work['log_probs'],
      eos_tokens=[-1],
      seed=step,
      **how,
    )
    rows = len(done.tokens)
    cache = jax.eval_shape(lambda: model.init_cache(rows, width + room, jnp.float32))
    cache_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    return {'tokens': done.tokens, 'cache_bytes': cache_bytes}

  return run, {'google-tunix': metadata.version('google-tunix'), 'jax': jax.__version__}


SIDES = {'sdpo_jax': sdpo_jax, 'transformers': transformers, 'tunix': tunix}

if __name__ == '__main__':
  main()
