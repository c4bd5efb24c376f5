"""The documents that the benchmarks of cartridges make: each question can be answered by what its teacher reads."""

import itertools
import json

from benchmarks import book, composed
from sdpo_jax.configs import cartridge_quickstart
from sdpo_jax.data.self_study import Document
from sdpo_jax.environments import facts
from sdpo_jax.training.opening import load_tokenizer


def test_every_window_of_a_book_holds_its_fact(tmp_path):
  tokenizer = load_tokenizer(cartridge_quickstart.get_config())
  book.write_book(tmp_path, tokenizer, seed=3)
  text = (tmp_path / 'book.txt').read_text()
  rows = [json.loads(line) for line in (tmp_path / 'prompts.jsonl').read_text().splitlines()]
  document = Document(text, tokenizer)
  assert len(text.split()) == book.WORDS and len({row['prompt'] for row in rows}) == len(rows) == facts.FACTS
  for row in rows:
    passage = document.passage((row['window_start'], row['window_end']))
    assert f'{row["prompt"]} {row["answer"]}' in passage and len(passage.split()) < book.CHUNK
  assert len({row['window_start'] for row in rows}) > 40


def test_documents_that_are_composed_share_no_key(tmp_path):
  files = composed.write_documents(tmp_path)
  keys = [{fact.key for fact in facts.read(str(file))} for file in files]
  assert len(files) == 4 and all(len(own) == 16 for own in keys)
  assert not any(one & other for one, other in itertools.combinations(keys, 2))
