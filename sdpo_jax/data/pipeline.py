"""Batches of examples from sources: a Grain pipeline whose position is part of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
import hashlib
import json
import sys
from typing import Any

import grain
import numpy as np

from sdpo_jax.config import DataConfig, rewards
from sdpo_jax.config.checks import round_shares
from sdpo_jax.data import rows, sources
from sdpo_jax.data.prompts import PromptSpec, Tokenizer, fits, fitting, name
from sdpo_jax.errors import UserError, short_repr
from sdpo_jax.types import Example

# Rows are already in memory: prefetching in threads would gain nothing.
_IN_PLACE = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
_PROBED = 32  # Number of a generator's questions that are checked before a run starts.


class TrainIterator(Iterator[list[Example]]):
  """Endless batches of `data.train_batch_size` examples, in an order determined by `seed`.

  Without `data.source_weights`, rows of all files form one set, shuffled anew each epoch; the last rows that do not
  fill a batch are left out of that epoch, as in the reference. Generators give their questions in order of index.
  Several generators, or generators together with files, take turns, example by example.

  With `data.source_weights`, every source has its share of the examples, exactly over each round of the weights' sum;
  each file is shuffled separately, anew whenever it is used up. A generator loses the turns of over-long questions that
  are left out.

  The order does not depend on the number of processes: each has its contiguous share of every batch, and a position
  saved with one number of processes is valid with any other.
  """

  def __init__(
    self,
    data: DataConfig,
    prompts: PromptSpec,
    seed: int,
    tokenizer: Tokenizer,
    registry: sources.Registry,
    *,
    process_index: int = 0,
    process_count: int = 1,
    reader: Callable[[str, str], list[Example]] | None = None,
  ):
    """Read and check every row.

    Args:
      data: sources, and the number of questions of a batch.
      prompts: how long a prompt may be.
      seed: seed of the order, and of generators.
      tokenizer: tokenizer, for the length of prompts.
      registry: the module `sdpo_jax.environments.registry`.
      process_index: index of this process, from 0.
      process_count: number of processes that share each batch.
      reader: reads the examples of a file, given its source and setting; None: `examples_of_file`.

    Raises:
      UserError: missing file, malformed row, over-long prompt, unknown environment or generator, fewer rows than a
        batch needs, or a batch that does not divide among the processes.
    """
    if data.train_batch_size % process_count:
      raise UserError(
        f'data.train_batch_size={data.train_batch_size} questions do not divide among {process_count} processes: make '
        'it a multiple of their number.'
      )
    share = data.train_batch_size // process_count
    self._mine = slice(process_index * share, (process_index + 1) * share)
    setting = 'data.train_files'
    files = {
      at: read_examples(source, 'train', data, prompts, tokenizer, registry, setting=setting, reader=reader)
      for at, source in enumerate(data.train_files)
      if not sources.is_generator(source)
    }
    # Source → digest of its questions; for a generator, of those that are checked here.
    self.digests = {data.train_files[at]: digest(examples) for at, examples in files.items()}
    if files and not data.source_weights:
      files = {0: [example for examples in files.values() for example in examples]}
    # All questions of files, and those questions of generators that are checked here.
    self.questions = [example for examples in files.values() for example in examples]
    # Number of rows in files; None: there is a generator, which is endless.
    self.rows = None if any(map(sources.is_generator, data.train_files)) else sum(map(len, files.values()))
    self._fingerprint = _fingerprint(files.values(), data.train_files)
    # Hashed, because Grain shuffles epoch e with seed + e: neighbouring seeds, or sources, would share epochs.
    seeds = np.random.SeedSequence(seed % 2**63).generate_state(len(data.train_files))
    shuffled = {at: grain.MapDataset.source(found).shuffle(int(seeds[at])) for at, found in files.items()}
    generators = {}
    for at, source in enumerate(data.train_files):
      if sources.is_generator(source):
        generate, first = _checked_generator(source, 'train', prompts, seed, tokenizer, registry)
        self.digests[source] = digest(first)
        self.questions += first
        generators[at] = grain.MapDataset.range(sys.maxsize).map(generate)
    self.environments = {example.environment for example in self.questions}
    self._counts = 'questions' if generators or data.source_weights else 'batches'  # The unit of a position.
    if self._counts == 'batches':
      if len(files[0]) < data.train_batch_size:
        raise UserError(
          f'data.train_files hold {len(files[0])} usable rows, fewer than data.train_batch_size='
          f'{data.train_batch_size}: lower it, with actor.ppo_mini_batch_size, or add rows.'
        )
      batches = shuffled[0].batch(data.train_batch_size, drop_remainder=True, batch_fn=list).repeat()
      self._iterator = iter(batches.to_iter_dataset(_IN_PLACE))
      return
    endless = {at: order.repeat() for at, order in shuffled.items()}
    if data.source_weights:
      parts = [(endless | generators)[at] for at in range(len(data.train_files))]
      mixed = mix(parts, data.source_weights)
    else:
      parts = [*endless.values(), *generators.values()]
      mixed = mix(parts, [1] * len(parts))
    # An over-long question to be left out is None here, and to_iter_dataset skips it.
    self._iterator = iter(mixed.to_iter_dataset(_IN_PLACE).batch(data.train_batch_size, batch_fn=list))

  def __next__(self) -> list[Example]:
    """Return this process's share of the next batch."""
    return next(self._iterator)[self._mine]

  def get_state(self) -> dict[str, Any]:
    """Return the position as JSON values."""
    return {'iterator': self._iterator.get_state(), 'fingerprint': self._fingerprint, 'counts': self._counts}

  def set_state(self, state: dict[str, Any], *, other_rows: bool = False) -> None:
    """Continue at a saved position; with `other_rows`, at the same position among rows that may have changed.

    Raises:
      UserError: the rows differ from those of the run that saved the state, and `other_rows` is false; or positions are
        counted in another unit, since generators or weights were added or removed.
    """
    if state['fingerprint'] != self._fingerprint and not other_rows:
      raise UserError(
        'data.train_files hold different rows than when this run was saved, so it cannot continue where it stopped: '
        'restore the files, start in a new workdir, or insist with --config.trainer.accept_changes=data.'
      )
    if state.get('counts', self._counts) != self._counts:
      raise UserError(
        'data.train_files mix files and generators differently than when this run was saved, so its position in them '
        'is no longer valid: restore the setting or start in a new workdir.'
      )
    self._iterator.set_state(state['iterator'])


def mix(parts: Sequence[grain.MapDataset], weights: Sequence[float]) -> grain.MapDataset:
  """Return the elements of endless `parts` in turn, each part as often as its weight says.

  A round has as many turns as the sum of the weights, scaled to integers without a common divisor; in it each part
  has exactly its number of turns, evenly spread. (`grain.MapDataset.mix` rounds weights to hundredths of the smallest.)
  """
  shares = round_shares(weights)
  # Turn j of a part with s turns comes at time (j + 1/2) / s of the round; in a tie the earlier part goes first.
  owner = np.repeat(np.arange(len(shares)), shares)
  turn = np.concatenate([np.arange(share) for share in shares])
  order = np.argsort((turn + 0.5) / np.repeat(shares, shares), kind='stable')
  owner, turn = owner[order], turn[order]

  def element(index: int) -> Any:
    completed, position = divmod(index, len(owner))
    part = owner[position]
    return parts[part][int(completed * shares[part] + turn[position])]

  return grain.MapDataset.range(sys.maxsize).map(element)


def evaluation_examples(
  data: DataConfig, prompts: PromptSpec, tokenizer: Tokenizer, registry: sources.Registry
) -> list[Example]:
  """Return the held-out questions: the first `data.val_max_samples` (None: all) of each source, in order.

  Generators get seed 0 unless their source sets another one, so that runs with different seeds are compared on the same
  questions.

  Raises:
    UserError: as in `TrainIterator`, or a generator without `data.val_max_samples`.
  """
  limit, setting = data.val_max_samples, 'data.val_files'
  examples: list[Example] = []
  for source in data.val_files:
    if not sources.is_generator(source):
      examples += read_examples(source, 'test', data, prompts, tokenizer, registry, setting=setting, limit=limit)
      continue
    if limit is None:
      raise UserError(f'{setting}: {source!r} is endless: set data.val_max_samples to the number of questions wanted.')
    generate = sources.make_generator(source, 'test', 0, registry)
    drawn = [generate(index) for index in range(limit)]
    check_environments(drawn, registry)
    examples += fitting(tokenizer, drawn, prompts, source)
  return examples


def read_examples(
  source: str,
  split: str,
  data: DataConfig,
  prompts: PromptSpec,
  tokenizer: Tokenizer,
  registry: sources.Registry,
  *,
  setting: str,
  limit: int | None = None,
  reader: Callable[[str, str], list[Example]] | None = None,
) -> list[Example]:
  """Return the checked examples of the first `limit` rows of a file, in order.

  Raises:
    UserError: a row is faulty; the message names file and line of the first fault.
  """
  found = reader(source, setting) if reader else examples_of_file(source, split, data.environment, setting, limit)
  check_environments(found, registry)
  return fitting(tokenizer, found, prompts, source)


def examples_of_file(
  source: str, split: str, environment: str | None, setting: str, limit: int | None = None
) -> list[Example]:
  """Return the examples of the first `limit` rows of a file (None: all), without checks of length and grader.

  Rows that name no grader get `environment`.

  Raises:
    UserError: a row is faulty; the message names file and line of the first fault.
  """
  defaults = {'default_source': sources.stem(source), 'default_environment': environment}
  return [rows.example(row, split, **defaults) for row in sources.read_rows(source, setting)[:limit]]


def check_environments(examples: Sequence[Example], registry: sources.Registry) -> None:
  """Check that the graders that examples name exist.

  Raises:
    UserError: a grader does not exist; the message names the first example that needs it.
  """
  for example in {example.environment: example for example in reversed(examples)}.values():
    try:
      for grader in sorted(rewards.names([example.environment])):
        registry.require(grader)
    except rewards.UnreadableRewards as error:
      raise UserError(f'{name(example)}: its environment {short_repr(example.environment)} {error}.') from error
    except UserError as error:
      raise UserError(f'{name(example)}: {error}') from error


def _checked_generator(
  source: str, split: str, prompts: PromptSpec, seed: int, tokenizer: Tokenizer, registry: sources.Registry
) -> tuple[Callable[[int], Example | None], list[Example]]:
  """Return a generator that gives None for over-long questions to be left out, and its first questions."""
  generate = sources.make_generator(source, split, seed, registry)
  # Too low a limit, or an unknown environment, ends the run before anything is compiled.
  first = [generate(index) for index in range(_PROBED)]
  check_environments(first, registry)
  fitting(tokenizer, first, prompts, source)

  def checked(index: int) -> Example | None:
    example = generate(index)
    return example if fits(tokenizer, example, prompts) else None

  return checked, first


def digest(examples: Sequence[Example]) -> str:
  """Return a digest, 16 hexadecimal digits, of questions and everything that graders read of them.

  The origin of a row (file and line) is not part of it.
  """
  found = hashlib.sha256()
  for example in examples:
    row = {field.name: getattr(example, field.name) for field in dataclasses.fields(example)}
    row['extra'] = {name: value for name, value in example.extra.items() if name != 'origin'}
    # Values that the row repeats, such as a megabyte of unit tests, are not digested twice.
    told = [example.ground_truth, *(message['content'] for message in example.messages)]
    row['columns'] = {
      name: None if any(value is known for known in told) else value for name, value in example.columns.items()
    }
    found.update(json.dumps(row, sort_keys=True, default=str).encode())
  return found.hexdigest()[:16]


def _fingerprint(sets: Iterable[Sequence[Example]], names: Sequence[str]) -> str:
  """Return a hash of the questions and answers, by which a resumed run checks that they are unchanged."""
  digest = hashlib.sha256()
  # One set at a time: the unit tests of some data sets take up much of the memory.
  for examples in sets:
    for example in examples:
      question = [example.id, example.messages, example.environment, example.ground_truth]
      digest.update(json.dumps(question, sort_keys=True, default=str).encode())
    digest.update(b'\n')
  digest.update(json.dumps([name for name in names if sources.is_generator(name)]).encode())
  return digest.hexdigest()[:16]
