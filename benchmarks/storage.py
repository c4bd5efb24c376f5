"""What versions of adapters cost in storage: bytes, and processor time before and after the answer.

    python -m benchmarks.storage [--folder=/disk/scratch] [--commits=6] [--feedbacks=100]

Prints one JSON line for each part; no model is loaded, and the arrays are random.

- `commit`: a version of an adapter of Qwen3-8B at rank 16 (43.6 million parameters): `before_answer_cpu_s` is what
  `Store.commit` takes, `state_cpu_s` the optimizer state that is written afterwards, medians; and the bytes of both.
- `read`: what sampling reads of a version that the engine does not have, and what learning reads in addition.
- `feedbacks`: an adapter of a 16th of the width learns that many times: bytes per parameter that are stored, and that
  were written, divided by the number of feedbacks, if all versions are kept and with the defaults; and those that are
  left once it is idle, per parameter. `idle_1000_gib` is that times 1,000 adapters of Qwen3-8B at rank 16.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
import contextlib
import json
import pathlib
import statistics
import tempfile
import time
from typing import Any

import numpy as np

from sdpo_jax.config import LoraConfig, ModelConfig
from sdpo_jax.config.serve import StoreConfig
from sdpo_jax.models import huggingface, parameters
from sdpo_jax.serving.records import Version
from sdpo_jax.serving.store.store import Retention, Store
from sdpo_jax.serving.store.versions import Base

QWEN3_8B = {
  'model_type': 'qwen3',
  'vocab_size': 151936,
  'hidden_size': 4096,
  'intermediate_size': 12288,
  'num_hidden_layers': 36,
  'num_attention_heads': 32,
  'num_key_value_heads': 8,
  'head_dim': 128,
  'max_position_embeddings': 40960,
  'rms_norm_eps': 1e-6,
  'rope_theta': 1e6,
  'tie_word_embeddings': False,
}
SMALL = {'hidden_size': 256, 'intermediate_size': 768, 'num_attention_heads': 2, 'num_key_value_heads': 1}
OWNER, IDLE = 'owner', 20 * 86400.0


def base_of(**sizes: Any) -> Base:
  """Return the base of adapters of Qwen3-8B at rank 16, or of one with other sizes."""
  config = ModelConfig(lora=LoraConfig(rank=16, alpha=32.0))
  policy = huggingface.describe(QWEN3_8B | sizes, config)
  table = policy.base_policy().parameter_table()
  return Base('Qwen3-8B', {'weights': {}, 'architecture': {}}, policy.adapter, table)


class Adapter:
  """An adapter in a store that learns, with random arrays."""

  def __init__(self, store: Store, clock: list[float]):
    self.store, self.clock, self.draw = store, clock, np.random.default_rng(0)
    self.id = store.create(OWNER, 'measured', {}, seed=0)[0].id
    self.count = parameters.count(store.base.rows)

  def arrays(self, *kinds: str) -> dict[str, np.ndarray]:
    """Return random arrays of the adapter's shape, by kind."""
    shapes = {f'{kind}/{row.name}': row.shape for kind in kinds for row in self.store.base.rows}
    return {name: self.draw.standard_normal(shape, np.float32) for name, shape in shapes.items()}

  def commit(self, factors: dict[str, np.ndarray]) -> Version:
    """Commit the next version."""
    head = self.store.adapter(OWNER, self.id).head
    return self.store.commit(OWNER, self.id, head, factors, reason='feedback', details={})

  def stored(self) -> int:
    """Return the bytes of everything that is stored of it."""
    return sum(entry.size for entry in self.store.blobs.list('users'))


@contextlib.contextmanager
def opened(folder: pathlib.Path | None, base: Base, **retention: Any) -> Iterator[Adapter]:
  """Provide a new adapter in a store that is removed at the end, with a clock that stands still."""
  clock = [0.0]
  more = {'base': base, 'retention': Retention(**retention), 'clock': lambda: clock[0]}
  with tempfile.TemporaryDirectory(dir=folder) as place:
    root = pathlib.Path(place)
    with Store.open(str(root / 'root'), root / 'store.sqlite', **more) as store:
      yield Adapter(store, clock)


def cpu(call: Any) -> tuple[float, Any]:
  """Return the processor time of a call in seconds, and its result."""
  began = time.process_time()
  found = call()
  return time.process_time() - began, found


def commits(folder: pathlib.Path | None, count: int) -> list[dict[str, Any]]:
  """Measure commits and reads at real sizes."""
  with opened(folder, base_of()) as adapter:
    factors, state = adapter.arrays('factors'), adapter.arrays('mu', 'nu') | {'count': np.asarray(1, np.int32)}
    before, after, sizes = [], [], [adapter.stored()]
    for _ in range(count):
      seconds, version = cpu(lambda: adapter.commit(factors))
      before.append(seconds)
      sizes.append(adapter.stored())
      seconds, _ = cpu(lambda version=version: adapter.store.keep_optimizer_state(version, state).result())
      after.append(seconds)
      sizes.append(adapter.stored())
    size = sizes[1] - sizes[0]
    reading, _ = cpu(lambda: adapter.store.arrays(version))
    learning, _ = cpu(lambda: adapter.store.optimizer_state(version))
    return [
      {
        'part': 'commit',
        'parameters': adapter.count,
        'before_answer_cpu_s': round(statistics.median(before), 3),
        'state_cpu_s': round(statistics.median(after), 3),
        'before_answer_mib': round(size / 2**20, 1),
        'state_mib': round((sizes[2] - sizes[1]) / 2**20, 1),
      },
      {
        'part': 'read',
        'sampling_mib': round(size / 2**20, 1),
        'sampling_cpu_s': round(reading, 3),
        'learning_mib': round((sizes[2] - sizes[1]) / 2**20, 1),
        'learning_cpu_s': round(learning, 3),
      },
    ]


def feedbacks(folder: pathlib.Path | None, count: int) -> list[dict[str, Any]]:
  """Measure what many feedbacks store and write."""
  found, default = [], StoreConfig()
  whole = parameters.count(base_of().rows)
  for name, retention in (
    ('all', {}),
    ('defaults', {'keep_versions': default.keep_versions, 'idle_s': default.idle_s, 'moments': default.moments}),
  ):
    with opened(folder, base_of(**SMALL), **retention) as adapter:
      factors, state = adapter.arrays('factors'), adapter.arrays('mu', 'nu') | {'count': np.asarray(1, np.int32)}
      for _ in range(count):
        adapter.store.keep_optimizer_state(adapter.commit(factors), state).result()
      adapter.store.retain()
      said = {
        'part': 'feedbacks',
        'kept': name,
        'feedbacks': count,
        'stored_per_parameter': round(adapter.stored() / adapter.count / count, 3),
        'written_per_parameter': round(adapter.store.stats['written_bytes'] / adapter.count / count, 3),
      }
      if retention:
        adapter.clock[0] += IDLE
        adapter.store.retain()
        idle = adapter.stored() / adapter.count
        said |= {'idle_per_parameter': round(idle, 3), 'idle_1000_gib': round(idle * whole * 1000 / 2**30, 1)}
      found.append(said)
  return found


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--folder', type=pathlib.Path, help='where stores are made; default: the temporary one')
  parser.add_argument('--commits', type=int, default=6, help='of 175 MB each')
  parser.add_argument('--feedbacks', type=int, default=100)
  args = parser.parse_args()
  for part in (commits(args.folder, args.commits) if args.commits else []) + feedbacks(args.folder, args.feedbacks):
    print(json.dumps(part), flush=True)


if __name__ == '__main__':
  main()
