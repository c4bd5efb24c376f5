"""MTOB (Tanzer et al. 2024): sentences to translate between English and Kalamang, which a grammar book teaches.

The wording of the prompt is this project's. The archive's `splits` hold the sentences, its `resources` the book.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sdpo_jax.data import sources
from sdpo_jax.data.converters.raw import DOCUMENT, ConversionOptions, Parts, Splits, described, field, make_row
from sdpo_jax.data.rows import RawRow
from sdpo_jax.errors import UserError
from sdpo_jax.files import json_object, read_text

LANGUAGES = {'ke': ('Kalamang', 'English'), 'ek': ('English', 'Kalamang')}
PARTS = {direction: f'test_examples_{direction}' for direction in LANGUAGES}
CANARY = 'big-bench-canary'  # The only field of an entry that marks a file as a benchmark.
PROMPT = 'Translate this sentence from {} into {}:\n\n{}\n\nAnswer with the translation and nothing else.'


def convert(parts: Parts, options: ConversionOptions) -> Splits:
  """Return the test sentences of the chosen direction, all held out: training uses the document.

  Raises:
    UserError: a sentence is empty or not in the source's schema.
  """
  made = []
  for number, row in enumerate(_entries(parts[PARTS[options.direction]]), start=1):
    sentence, answer = field(row, 'original').strip(), field(row, 'ground_truth').strip()
    if not sentence or not answer:
      raise UserError(f"{row.origin}: 'original' and 'ground_truth', its translation, must not be empty.")
    prompt = PROMPT.format(*LANGUAGES[options.direction], sentence)
    texts = {'prompt': prompt, 'description': described(sentence, 'translation'), 'answer': answer}
    idx = f'{options.direction}_{number}'
    made.append(make_row(row, idx, kind='translation', dataset='mtob', environment='chrf', **texts))
  return {'test': made}


def texts(parts: Parts, options: ConversionOptions) -> Mapping[str, str]:
  """Return the texts of `options.documents`, one after the other, as the text of one file.

  JSON files are the word list, of which the part for the chosen direction is taken, or pairs of sentences.

  Raises:
    UserError: no file is named, or one cannot be read or is JSON in another schema.
  """
  if not options.documents:
    raise UserError('--documents must name files that teach the language, such as mtob/resources/grammar_book.txt.')
  return {DOCUMENT: '\n'.join(_text(path, options.direction) for path in options.documents)}


def _entries(rows: Sequence[RawRow]) -> list[RawRow]:
  return [row for row in rows if not (isinstance(row.value, Mapping) and CANARY in row.value)]


def _text(path: str, direction: str) -> str:
  text = read_text(path, 'name files of MTOB in --documents')
  if not path.endswith('.json'):
    return text
  if (words := json_object(text)) is None:
    pairs = _entries(sources.read_rows(path, '--documents'))
    return ''.join(f'Kalamang: {field(row, "translation")}\nEnglish: {field(row, "original")}\n\n' for row in pairs)
  entries = field(RawRow(path, 1, words), direction, kind=Mapping).items()
  # The entry of a Kalamang word is a list, its part of speech and its meaning; that of an English one is a text.
  return ''.join(f'{word}: {", ".join(map(str, e)) if isinstance(e, list) else e}\n' for word, e in entries)
