"""A cartridge of a text that no context holds: each prompt is taught by the part of the text that it is about.

  python -m benchmarks.book --output=FOLDER

It makes a tiny model that finds facts among other words (`launch.make_base` makes one that knows nothing but facts),
spreads 48 facts over 10,240 words, of which the model reads at most 900 at once, trains slots, and prints how many of
the 48 questions they answer, greedily. Everything is kept in FOLDER; an existing model there is used again.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time

import numpy as np

from sdpo_jax.command import announce
from sdpo_jax.config import Config
from sdpo_jax.configs import cartridge_quickstart
from sdpo_jax.data.self_study import Document
from sdpo_jax.environments import facts
from sdpo_jax.quickstart.document_base import DocumentRecipe, make_document_base, scattered
from sdpo_jax.training import loop
from sdpo_jax.training.opening import load_tokenizer

WORDS, CHUNK = 10_240, 900
RECIPE = DocumentRecipe(steps=200, facts=12, documents=4, filler=840)


def write_book(folder: pathlib.Path, tokenizer: object, seed: int) -> None:
  """Write a text with 48 facts, and a row for each, taught by a random window of the text that holds it."""
  rng = np.random.default_rng(seed)
  document = facts.draw(rng)
  words = scattered(rng, document, WORDS - 4 * len(document))
  (folder / 'book.txt').write_text(' '.join(words))
  text, keys = Document(' '.join(words), tokenizer), {fact.key: fact for fact in document}
  more = len(text) - WORDS  # The first word has no space before it, and more than one token.
  with (folder / 'prompts.jsonl').open('w') as file:
    for place in [at for at, word in enumerate(words) if word in keys]:
      # Where the fact is in its window is random.
      start = int(np.clip(place + more - rng.integers(CHUNK - 10), 0, len(text) - CHUNK + 5))
      row = {'prompt': words[place], 'answer': facts.answer(keys[words[place]]), 'environment': facts.NAME}
      file.write(json.dumps(row | {'window_start': start, 'window_end': start + CHUNK - 5}) + '\n')


def config_of(folder: pathlib.Path, steps: int, slots: int, seed: int) -> Config:
  """Return the settings of the run, those of the quickstart with a teacher that reads chunks."""
  config = cartridge_quickstart.get_config(str(folder / 'book.txt'))
  config.name, config.seed, config.model.path = 'book', seed, str(folder / 'model')
  cartridge = config.model.cartridge
  cartridge.tokens, cartridge.teacher_scope, cartridge.max_chunk = slots, 'chunk', CHUNK
  config.data.train_files = config.data.val_files = (str(folder / 'prompts.jsonl'),)
  config.val_kwargs.temperature, config.val_kwargs.n = 0.0, 1
  config.trainer.total_training_steps, config.trainer.test_freq, config.trainer.save_freq = steps, steps, steps
  return config.validate()


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--output', type=pathlib.Path, required=True, help='folder to write to')
  parser.add_argument('--steps', type=int, default=300, help='steps of the run, of 48 questions each')
  parser.add_argument('--slots', type=int, default=16, help='slots of the cartridge')
  parser.add_argument('--seed', type=int, default=0, help='seed of document and run')
  given = parser.parse_args()
  folder = given.output
  folder.mkdir(parents=True, exist_ok=True)
  if not (folder / 'model').exists():
    began = time.process_time()
    make_document_base(folder / 'model', RECIPE, announce)
    announce(f'{time.process_time() - began:.0f} CPU-s for the model')
  config = config_of(folder, given.steps, given.slots, given.seed)
  write_book(folder, load_tokenizer(config), given.seed)
  began = time.process_time()
  result = loop.train(config, folder / f'run-{given.steps}-{given.slots}-{given.seed}', announce=announce)
  right = result.evaluations[given.steps]['eval/prompts/mean@1']
  announce(f'{time.process_time() - began:.0f} CPU-s for {given.steps} steps: {right:.1%} of the answers are right')


if __name__ == '__main__':
  main()
