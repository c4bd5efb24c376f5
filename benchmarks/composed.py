"""Several cartridges at once: right answers with k = 1 … 4 of them, trained alone, and among random others.

  python -m benchmarks.composed --output=FOLDER

Four documents of 16 facts each, with different keys, get a cartridge each, first alone; then another one each, trained
with up to three of the first as distractors. The model answers the questions about every document, greedily, with its
cartridge and those of k − 1 others, in random order. Everything is kept in FOLDER, and runs that are there are not
repeated.
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


def config_of(document: pathlib.Path, distractors: tuple[str, ...] = ()) -> Config:
  """Return the settings of a run on a document."""
  config = cartridge_quickstart.get_config(str(document))
  config.model.cartridge.distractors = distractors
  config.data.val_max_samples, config.val_kwargs.temperature, config.val_kwargs.n = FACTS, 0.0, 1
  config.trainer.total_training_steps = config.trainer.save_freq = STEPS.value
  config.trainer.test_freq = 0
  return config.validate()


def trained(folder: pathlib.Path, document: pathlib.Path, distractors: tuple[str, ...]) -> str:
  """Train a cartridge, unless it is there, and return its directory."""
  exported = folder / f'{document.stem}{"-among-others" * bool(distractors)}'
  if not exported.exists():
    began = time.process_time()
    workdir = folder / f'run-{exported.name}'
    loop.train(config_of(document, distractors), workdir)
    runs.export(str(workdir), str(exported), 'student')
    announce(f'{exported.name}: {time.process_time() - began:.0f} CPU-s')
  return str(exported)


def right(documents: list[pathlib.Path], cartridges: list[str], count: int, positions: str) -> tuple[float, int]:
  """Return the fraction of right answers with `count` cartridges, over all documents and sets, and their number."""
  rng, found = np.random.default_rng(count), []
  for own, document in enumerate(documents):
    for others in itertools.combinations([at for at in range(DOCUMENTS) if at != own], count - 1):
      chosen = ','.join(cartridges[at] for at in rng.permutation([own, *others]))
      config = config_of(document)
      source = runs.RunOrModel(model=config.model.path, cartridge=chosen, positions=positions)
      found.append(runs.evaluate_source(config, source, lambda _: None).metrics[facts.NAME]['mean@1'])
  return float(np.mean(found)), len(found)


def main(_: list[str]) -> None:
  folder = pathlib.Path(OUTPUT.value)
  folder.mkdir(parents=True, exist_ok=True)
  documents = write_documents(folder)
  alone = [trained(folder, document, ()) for document in documents]
  among = [
    trained(folder, document, tuple(other for at, other in enumerate(alone) if at != number))
    for number, document in enumerate(documents)
  ]
  announce(
    f'positions={POSITIONS.value}\n| cartridges at once | trained alone | among others | sets |\n|---|---|---|---|'
  )
  for count in range(1, DOCUMENTS + 1):
    (naive, sets), (mixed, _) = (right(documents, each, count, POSITIONS.value) for each in (alone, among))
    announce(f'| {count} | {naive:.1%} | {mixed:.1%} | {sets} |')


if __name__ == '__main__':
  app.run(main)
