"""Rows that read cartridges: one for all rows, or eight at once, as the engine serves them.

    python -m benchmarks.cartridge_rows [--slots=128] [--rows=64] [--cartridges=8] [--repeats=7]

A model of 4 layers with random weights draws `--tokens` tokens in every row, with prompts of 8 tokens: alone (`model`),
with one cartridge that is its frozen prefix (`prefix`), with a pool of adapters (`adapters`), and with such a pool and
cartridges, of which all rows read one (`one`) or as many rows read each (`all`). CPU-microseconds per token, medians of
repeats in turns, and their ratios to `one`, as a JSON line.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from sdpo_jax.config import LoraConfig, ModelConfig
from sdpo_jax.models import huggingface, parameters
from sdpo_jax.models.adapters import kv_prefix, lora_pool
from sdpo_jax.models.adapters.kv_prefix import KVPrefix
from sdpo_jax.models.adapters.lora_pool import LoraPool
from sdpo_jax.models.policy import NO_MEMBER
from sdpo_jax.rollout.resident import Resident, Weights
from sdpo_jax.rollout.sampler import Sampler
from tests.letters import TOKENIZER

MODEL = dict(
  model_type='qwen3',
  vocab_size=2048,
  hidden_size=256,
  intermediate_size=768,
  num_hidden_layers=4,
  num_attention_heads=8,
  num_key_value_heads=4,
  head_dim=32,
  tie_word_embeddings=True,
)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--slots', type=int, default=128)
  parser.add_argument('--rows', type=int, default=64)
  parser.add_argument('--cartridges', type=int, default=8)
  parser.add_argument('--tokens', type=int, default=64)
  parser.add_argument('--repeats', type=int, default=7)
  args = parser.parse_args()
  policy = huggingface.describe(MODEL, ModelConfig(dtype='float32', lora=LoraConfig(rank=4, alpha=8.0))).on(None)
  table, draw = policy.parameter_table(), np.random.default_rng(0)
  base = parameters.initialise(parameters.frozen(table), jax.random.key(0), 0.05)
  shape = MODEL['num_hidden_layers'], MODEL['num_key_value_heads'], args.slots, MODEL['head_dim']
  slots = [[np.float32(draw.standard_normal(shape)) for _ in range(2)] for _ in range(args.cartridges)]
  bank = KVPrefix(0, 0, members=args.cartridges, member_slots=args.slots, rows_alike=args.rows // args.cartridges)
  pooled = dataclasses.replace(policy, adapter=LoraPool(policy.adapter, 1, cartridges=bank))
  pool = lora_pool.empty(pooled.parameter_table())
  for index, own in enumerate(slots):
    pool = lora_pool.with_member(pool, index, lora_pool.cartridge(bank, *own))
  prefix = KVPrefix(args.slots, args.slots)
  frozen, _ = kv_prefix.slots(prefix, *map(jnp.asarray, slots[0]), 'float32')
  alone = dataclasses.replace(policy, adapter=None)
  sizes = dict(prompt_buckets=(8,), response_buckets=(args.tokens,), max_batch_rows=args.rows, decode_chunk=args.tokens)

  def resident(policy, base, trainable):
    return Resident(Sampler(policy, TOKENIZER, **sizes), base, trainable)

  apart = dataclasses.replace(policy, adapter=LoraPool(policy.adapter, 1))
  whole = resident(dataclasses.replace(alone, adapter=prefix), parameters.merge(base, frozen), {})
  pools = resident(pooled, base, pool)
  sides = {
    'model': (resident(alone, {}, base), [NO_MEMBER] * args.cartridges),
    'prefix': (whole, [NO_MEMBER] * args.cartridges),
    'adapters': (resident(apart, base, lora_pool.empty(apart.parameter_table())), [NO_MEMBER] * args.cartridges),
    'one': (pools, [0] * args.cartridges),
    'all': (pools, list(range(args.cartridges))),
  }

  def drawn(resident: Resident, cartridges: list[int]) -> float:
    """Return the CPU-seconds per token of one round of requests."""
    options = dict(n=args.rows // args.cartridges, seed=0, step=0, max_tokens=args.tokens)
    began = time.process_time()
    handles = [resident.submit([5] * 8, weights=Weights(cartridge=own, slots=own), **options) for own in cartridges]
    while resident.turn():
      pass
    return (time.process_time() - began) / sum(len(done.tokens) for handle in handles for done in handle.result())

  for side in sides.values():  # Compiled here.
    drawn(*side)
  found = {name: [] for name in sides}
  for _ in range(args.repeats):
    for name, side in sides.items():
      found[name].append(1e6 * drawn(*side))
  ratios = {
    name: statistics.median(own / one for own, one in zip(times, found['one'], strict=True))
    for name, times in found.items()
  }
  medians = {name: round(statistics.median(times), 2) for name, times in found.items()}
  told = {name: getattr(args, name) for name in ('slots', 'rows', 'cartridges', 'tokens')}
  line = told | {'cpu_us_per_token': medians, 'ratio_to_one': {name: round(value, 3) for name, value in ratios.items()}}
  print(json.dumps({'benchmark': 'cartridge_rows', **line}))


if __name__ == '__main__':
  main()
