"""Several cartridges at once: right answers with k = 1 … 4 of them, trained alone, and among random others.

  python -m benchmarks.composed --output=FOLDER

Four documents of 16 facts each, with different keys, get a cartridge each, first alone. In every further round each goes
on, with up to three others of the round before as distractors. The model answers the questions about every document,
greedily, with its cartridge and those of k − 1 others of the same round, in random order. Everything is kept in FOLDER,
and runs that are there are not repeated.
"""

from __future__ import annotations

import itertools
import pathlib
import time

from absl import app, flags
import numpy as np

from sdpo_jax.command import announce
from sdpo_jax.config import Config
from sdpo_jax.configs import cartridge_quickstart
from sdpo_jax.environments import facts
from sdpo_jax.inference import runs
from sdpo_jax.training import loop

OUTPUT = flags.DEFINE_string('output', None, 'Folder to write to.', required=True)
STEPS = flags.DEFINE_integer('steps', 200, 'Steps of every run, of 48 questions each.', lower_bound=1)
ROUNDS = flags.DEFINE_integer('rounds', 3, 'Rounds among others.', lower_bound=0)
POSITIONS = flags.DEFINE_enum('positions', 'overlap', ['overlap', 'sequential'], 'Positions of composed slots.')
DOCUMENTS, FACTS = 4, 16


def write_documents(folder: pathlib.Path, seed: int = 0) -> list[pathlib.Path]:
  """Write documents that share no key, and return their files."""
  rng = np.random.default_rng(seed)
  keys, files = rng.permutation(facts.KEYS).reshape(DOCUMENTS, FACTS), []
  for number, own in enumerate(keys.tolist()):
    document = [fact._replace(key=key) for fact, key in zip(facts.draw(rng, FACTS), own, strict=True)]
    files.append(folder / f'document-{number}.txt')
    files[-1].write_text(facts.write(document))
  return files


def config_of(document: pathlib.Path, start: str = '', distractors: tuple[str, ...] = ()) -> Config:
  """Return the settings of a run on a document, from a cartridge or its first tokens."""
  config = cartridge_quickstart.get_config(str(document))
  if start:
    config.model.cartridge = config.model.cartridge.starting_from(start)
  config.model.cartridge.distractors = distractors
  config.data.val_max_samples, config.val_kwargs.temperature, config.val_kwargs.n = FACTS, 0.0, 1
  config.trainer.total_training_steps = config.trainer.save_freq = STEPS.value
  config.trainer.test_freq = 0
  return config.validate()


def trained(folder: pathlib.Path, document: pathlib.Path, number: int, start: str, others: tuple[str, ...]) -> str:
  """Train a cartridge of a round, unless it is there, and return its directory."""
  exported = folder / f'{document.stem}-{number}'
  if not exported.exists():
    began = time.process_time()
    workdir = folder / f'run-{exported.name}'
    loop.train(config_of(document, start, others), workdir)
    runs.export(str(workdir), str(exported), 'student')
    announce(f'{exported.name}: {time.process_time() - began:.0f} CPU-s')
  return str(exported)


def right(documents: list[pathlib.Path], cartridges: list[str], count: int, positions: str) -> float:
  """Return the fraction of right answers with `count` cartridges, over all documents and sets of others."""
  rng, found = np.random.default_rng(count), []
  for own, document in enumerate(documents):
    for others in itertools.combinations([at for at in range(DOCUMENTS) if at != own], count - 1):
      chosen = ','.join(cartridges[at] for at in rng.permutation([own, *others]))
      config = config_of(document)
      source = runs.RunOrModel(model=config.model.path, cartridge=chosen, positions=positions)
      found.append(runs.evaluate_source(config, source, lambda _: None).metrics[facts.NAME]['mean@1'])
  return float(np.mean(found))


def main(_: list[str]) -> None:
  folder = pathlib.Path(OUTPUT.value)
  folder.mkdir(parents=True, exist_ok=True)
  documents = write_documents(folder)
  rounds = [[trained(folder, document, 0, '', ()) for document in documents]]
  for number in range(1, ROUNDS.value + 1):
    before = rounds[-1]
    rounds.append(
      [
        trained(folder, document, number, own, tuple(other for other in before if other != own))
        for document, own in zip(documents, before, strict=True)
      ]
    )
  counts = range(1, DOCUMENTS + 1)
  announce(f'positions={POSITIONS.value}\n| k | {" | ".join(map(str, counts))} |\n|---|{"---|" * DOCUMENTS}')
  for number, cartridges in enumerate(rounds):
    found = [f'{right(documents, cartridges, count, POSITIONS.value):.0%}' for count in counts]
    announce(f'| {f"round {number}" if number else "alone"} | {" | ".join(found)} |')


if __name__ == '__main__':
  app.run(main)
