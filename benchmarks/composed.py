"""Several cartridges at once: right answers with k = 1 … 4 of them, trained alone, and among random others.

  python -m benchmarks.composed --output=FOLDER

Four documents of 16 facts each, with different keys, get a cartridge each, first alone. In every further round each
goes on, with up to three others of the round before as distractors, and half of its questions are about their
documents: it learns to be heard among them, and to keep silent. The model answers the questions about every
document, greedily, with its cartridge and those of k − 1 others of the same round, in random order. Everything is kept
in FOLDER, and runs that are there are not repeated.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import re
import time

import numpy as np

from sdpo_jax.command import announce
from sdpo_jax.config import Config
from sdpo_jax.configs import cartridge_quickstart
from sdpo_jax.data.self_study import Document
from sdpo_jax.environments import facts
from sdpo_jax.inference import runs
from sdpo_jax.training import loop
from sdpo_jax.training.opening import load_tokenizer

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


def write_questions(documents: list[pathlib.Path]) -> pathlib.Path:
  """Write questions about the first document, and as many about the others, and return their file."""
  file = documents[0].with_suffix('.questions.jsonl')
  with file.open('w') as out:
    for document in [documents[0]] * (len(documents) - 1) + documents[1:]:
      tokens = len(Document(document.read_text(), load_tokenizer(cartridge_quickstart.get_config())))
      for fact in facts.read(str(document)):
        row = {'prompt': fact.key, 'answer': facts.answer(fact), 'environment': facts.NAME, 'document': document.name}
        out.write(json.dumps(row | {'window_start': 0, 'window_end': tokens}) + '\n')
  return file


def config_of(document: pathlib.Path, steps: int = 1, start: str = '', distractors: tuple[str, ...] = ()) -> Config:
  """Return the settings of a run on a document, from a cartridge or its first tokens."""
  config = cartridge_quickstart.get_config(str(document))
  if start:
    config.model.cartridge = config.model.cartridge.starting_from(start)
    documents = [
      document,
      *(document.with_name(re.sub('-[0-9]+$', '.txt', pathlib.Path(other).name)) for other in distractors),
    ]
    cartridge = config.model.cartridge
    cartridge.distractors, cartridge.document = distractors, ','.join(map(str, documents))
    cartridge.teacher_scope, cartridge.max_chunk = 'chunk', 5 * FACTS
    config.data.train_files = (str(write_questions(documents)),)
  config.data.val_max_samples, config.val_kwargs.temperature, config.val_kwargs.n = FACTS, 0.0, 1
  config.trainer.total_training_steps = config.trainer.save_freq = steps
  config.trainer.test_freq = 0
  return config.validate()


def trained(
  folder: pathlib.Path, document: pathlib.Path, number: int, steps: int, start: str = '', others: tuple[str, ...] = ()
) -> str:
  """Train a cartridge of a round, unless it is there, and return its directory."""
  exported = folder / f'{document.stem}-{number}'
  if not exported.exists():
    began = time.process_time()
    workdir = folder / f'run-{exported.name}'
    loop.train(config_of(document, steps, start, others), workdir)
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


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--output', type=pathlib.Path, required=True, help='folder to write to')
  parser.add_argument('--steps', type=int, default=200, help='steps of every run, of 48 questions each')
  parser.add_argument('--rounds', type=int, default=2, help='rounds among others')
  parser.add_argument('--positions', choices=('overlap', 'sequential'), default='overlap', help='of composed slots')
  given = parser.parse_args()
  folder = given.output
  folder.mkdir(parents=True, exist_ok=True)
  documents = write_documents(folder)
  rounds = [[trained(folder, document, 0, given.steps) for document in documents]]
  for number in range(1, given.rounds + 1):
    before = rounds[-1]
    rounds.append(
      [
        trained(folder, document, number, given.steps, own, tuple(other for other in before if other != own))
        for document, own in zip(documents, before, strict=True)
      ]
    )
  counts = range(1, DOCUMENTS + 1)
  announce(f'positions={given.positions}\n| k | {" | ".join(map(str, counts))} |\n|---|{"---|" * DOCUMENTS}')
  for number, cartridges in enumerate(rounds):
    found = [f'{right(documents, cartridges, count, given.positions):.0%}' for count in counts]
    announce(f'| {f"round {number}" if number else "alone"} | {" | ".join(found)} |')


if __name__ == '__main__':
  main()
