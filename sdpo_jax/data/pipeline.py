"""From sources to batches of examples: a Grain pipeline whose position is part of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import hashlib
import json
import sys
from typing import Any

import grain
import numpy as np

from sdpo_jax.config import Config
from sdpo_jax.data import rows, sources
from sdpo_jax.data.prompts import Tokenizer, fits, fitting, name
from sdpo_jax.errors import UserError
from sdpo_jax.types import Example

# Rows are in memory already: reading ahead in threads would gain nothing.
_IN_PLACE = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
_PROBED = 32  # Questions of a generator that are checked before a run starts.


class TrainIterator:
  """Endless batches of `data.train_batch_size` examples, in an order that `seed` decides.

  Rows of all files form one set, shuffled anew each epoch; the last rows that do not fill a batch are left out of that
  epoch, as the reference does. Generators give their questions in order of index. Several generators, or generators
  beside files, take turns, example by example.
  """

  def __init__(self, config: Config, tokenizer: Tokenizer, registry: sources.Registry):
    """Reads and checks every row.

    Args:
      config: settings.
      tokenizer: for the length of prompts.
      registry: the module `sdpo_jax.environments.registry`.

    Raises:
      UserError: missing file, malformed row, over-long prompt, unknown environment or generator, or fewer rows than a
        batch needs.
    """
    data = config.data
    files = [source for source in data.train_files if not sources.is_generator(source)]
    generators = [source for source in data.train_files if sources.is_generator(source)]
    examples = read_examples(files, 'train', config, tokenizer, registry, setting='data.train_files')
    self._fingerprint = _fingerprint(examples, generators)
    self.environments = {example.environment for example in examples}  # Names of the graders that it needs.
    # Mixed, because Grain shuffles epoch e with seed + e: neighbouring seeds would share their epochs.
    seed = int(np.random.SeedSequence(config.seed % 2**63).generate_state(1)[0])
    shuffled = grain.MapDataset.source(examples).shuffle(seed) if examples else None
    if not generators:
      if len(examples) < data.train_batch_size:
        raise UserError(
          f'data.train_files hold {len(examples)} usable rows, fewer than data.train_batch_size='
          f'{data.train_batch_size}: lower it or add rows.'
        )
      batches = shuffled.batch(data.train_batch_size, drop_remainder=True, batch_fn=list).repeat()
      self._iterator = iter(batches.to_iter_dataset(_IN_PLACE))
      return
    parts = [] if shuffled is None else [shuffled.repeat()]
    for source in generators:
      generate, names = _checked_generator(source, 'train', config, tokenizer, registry)
      self.environments |= names
      parts.append(grain.MapDataset.range(sys.maxsize).map(generate))
    mixed = grain.MapDataset.mix(parts) if len(parts) > 1 else parts[0]
    # An over-long question that is to be left out is None here, and to_iter_dataset skips it.
    self._iterator = iter(mixed.to_iter_dataset(_IN_PLACE).batch(data.train_batch_size, batch_fn=list))

  def __iter__(self) -> TrainIterator:
    return self

  def __next__(self) -> list[Example]:
    return next(self._iterator)

  def get_state(self) -> dict[str, Any]:
    """The position, as values that JSON holds."""
    return {'iterator': self._iterator.get_state(), 'fingerprint': self._fingerprint}

  def set_state(self, state: dict[str, Any]) -> None:
    """Continues where `state` was taken.

    Raises:
      UserError: the rows are not those of the run that saved the state.
    """
    if state['fingerprint'] != self._fingerprint:
      raise UserError(
        'data.train_files hold other rows than when this run was saved, so it cannot continue where it stopped: '
        'restore the files or start in a new workdir.'
      )
    self._iterator.set_state(state['iterator'])


def evaluation_examples(config: Config, tokenizer: Tokenizer, registry: sources.Registry) -> list[Example]:
  """The held-out questions: the first `data.val_max_samples` (None: all) of each source, in order.

  Generators get seed 0 unless they name another one, so that runs with different seeds are compared on the same
  questions.

  Raises:
    UserError: as `TrainIterator`, or a generator without `data.val_max_samples`.
  """
  limit, setting = config.data.val_max_samples, 'data.val_files'
  examples: list[Example] = []
  for source in config.data.val_files:
    if not sources.is_generator(source):
      examples += read_examples([source], 'test', config, tokenizer, registry, setting=setting, limit=limit)
      continue
    if limit is None:
      raise UserError(f'{setting}: {source!r} is endless: set data.val_max_samples to the number of questions wanted.')
    generate = sources.make_generator(source, 'test', 0, registry)
    drawn = [generate(index) for index in range(limit)]
    _check_environments(drawn, registry)
    examples += fitting(tokenizer, drawn, config, source)
  return examples


def read_examples(
  files: Sequence[str],
  split: str,
  config: Config,
  tokenizer: Tokenizer,
  registry: sources.Registry,
  *,
  setting: str,
  limit: int | None = None,
) -> list[Example]:
  """The checked examples of files, in order; of each file the first `limit` rows.

  Raises:
    UserError: naming the file and line of the first fault.
  """
  examples: list[Example] = []
  for source in files:
    found = [rows.example(row, split) for row in sources.read_rows(source, setting)[:limit]]
    _check_environments(found, registry)
    examples += fitting(tokenizer, found, config, source)
  return examples


def _check_environments(examples: Sequence[Example], registry: sources.Registry) -> None:
  for example in {example.environment: example for example in reversed(examples)}.values():
    try:
      registry.require(example.environment)
    except UserError as error:
      raise UserError(f'{name(example)}: {error}') from error


def _checked_generator(
  source: str, split: str, config: Config, tokenizer: Tokenizer, registry: sources.Registry
) -> tuple[Callable[[int], Example | None], set[str]]:
  """The generator with its questions' lengths checked, None in place of one that is to be left out; its graders."""
  generate = sources.make_generator(source, split, config.seed, registry)
  # A limit that is too low, or an unknown environment, ends the run before anything is compiled.
  first = [generate(index) for index in range(_PROBED)]
  _check_environments(first, registry)
  fitting(tokenizer, first, config, source)

  def checked(index: int) -> Example | None:
    example = generate(index)
    return example if fits(tokenizer, example, config) else None

  return checked, {example.environment for example in first}


def _fingerprint(examples: Sequence[Example], generators: Sequence[str]) -> str:
  """A hash of the questions and their answers, by which a resumed run knows that they are the same."""
  questions = [[e.id, e.messages, e.environment, e.ground_truth] for e in examples]
  content = json.dumps([questions, list(generators)], sort_keys=True, default=str)
  return hashlib.sha256(content.encode()).hexdigest()[:16]
