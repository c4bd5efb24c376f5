"""Facts of a document: questions about a made-up text, whose answers no pretrained model can know.

A document lists facts, each a key with two values ("bako meta sopi ;"); a question is a key, and its answer the two
values. Keys and first values occur once per document. The document is the question's system message: without it the
answer cannot be known, with it everything is known. Questions that do not show it are for models that hold the document
elsewhere, in a cartridge.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from sdpo_jax.command_lines import command_line
from sdpo_jax.environments.judging import grader
from sdpo_jax.environments.registry import register, register_generator
from sdpo_jax.errors import UserError, short_repr
from sdpo_jax.files import read_text
from sdpo_jax.types import Example, Outcome

NAME = 'facts'
END = ';'


def _words(first: str, second: str) -> tuple[str, ...]:
  """Return all words of two syllables, one from each list."""
  return tuple(one + two for one in first.split() for two in second.split())


KEYS = _words('ba be bi bo da de di do', 'ka ke ki ko ga ge gi go')
FIRST = _words('ma me mi mo na ne', 'ra re ri ro ta te ti to')  # Words that occur only as first values.
SECOND = _words('sa se si so va ve', 'la le li lo pa pe pi po')
FACTS = 48  # Facts per document, at most as many as there are first values.


class Fact(NamedTuple):
  """An entry of a document: a key and its two values."""

  key: str
  first: str
  second: str


Document = tuple[Fact, ...]


def draw(rng: np.random.Generator, facts: int = FACTS) -> Document:
  """Draw a random document with this many facts."""
  keys = rng.permutation(len(KEYS))[:facts]
  first = rng.permutation(len(FIRST))[:facts]
  second = rng.integers(len(SECOND), size=facts)
  return tuple(Fact(KEYS[k], FIRST[a], SECOND[b]) for k, a, b in zip(keys, first, second, strict=True))


def write(document: Sequence[Fact]) -> str:
  """Return the text of a document, e.g. 'bako meta sopi ; dige nari vela ;'."""
  return ' '.join(f'{fact.key} {fact.first} {fact.second} {END}' for fact in document)


def read(file: str) -> Document:
  """Parse a document from a text file, local or gs://….

  Raises:
    UserError: the file cannot be read, or differs from what `write` writes in more than white space.
  """
  way_out = f'name a document that `{command_line("make_base", "--task=document")}` wrote'
  words = read_text(file, way_out).split()
  parts = [words[at : at + 4] for at in range(0, len(words), 4)]
  for number, part in enumerate(parts, start=1):
    if len(part) < 4 or part[3] != END or END in part[:3]:
      said = short_repr(' '.join(part))
      raise UserError(f'{file}: fact {number} is not a key, two values and {END!r}, but {said}: {way_out}.')
  facts = tuple(Fact(*part[:3]) for part in parts)
  if not facts or len({fact.key for fact in facts}) < len(facts):
    said = 'a key occurs twice' if facts else 'there is no fact'
    raise UserError(f'{file}: {said}: {way_out}.')
  return facts


def answer(fact: Fact) -> str:
  """Return the answer to the question for a fact's key, e.g. 'meta sopi ;'."""
  return f'{fact.first} {fact.second} {END}'


@register_generator(NAME)
def generate(
  split: str, seed: int, *, facts: int | str = FACTS, document: str = '', shown: str = 'yes'
) -> Callable[[int], Example]:
  """Make endless questions, going through one document after another: `generator:facts`, or `generator:facts?facts=16`.

  `generator:facts?document=FILE&shown=no` asks for the facts of one document again and again without showing it.

  Args:
    split: 'train' or 'test'; the two share no random document.
    seed: different seeds give different sequences of random documents.
    facts: facts per random document, 1 to 48.
    document: text file with the only document of both splits; '': random documents.
    shown: 'yes' if the document is the system message of its questions, else 'no'.

  Raises:
    UserError: unknown split, invalid number of facts or choice, or a file that is not a document.
  """
  if split not in ('train', 'test'):
    raise UserError(f"The generator {NAME!r} has the splits 'train' and 'test', not {split!r}.")
  if not str(facts).isdecimal() or not 1 <= int(facts) <= FACTS:
    raise UserError(f'generator:{NAME}?facts={facts}: facts must be a number from 1 to {FACTS}.')
  if shown not in ('yes', 'no'):
    raise UserError(f"generator:{NAME}?shown={shown}: shown must be 'yes' or 'no'.")
  if document and int(facts) != FACTS:
    raise UserError(
      f'generator:{NAME}?facts={facts}&document={document}: the document has its own facts: leave out facts.'
    )
  only = read(document) if document else None
  count = int(facts) if only is None else len(only)

  def example(index: int) -> Example:
    rng = np.random.default_rng([seed % 2**64, ('train', 'test').index(split), index // count])
    asked = draw(rng, count) if only is None else only
    fact = asked[index % count]
    before = [{'role': 'system', 'content': write(asked)}] if shown == 'yes' else []
    return Example(
      id=f'{NAME}/{split}/{seed}/{index}',
      messages=[*before, {'role': 'user', 'content': fact.key}],
      environment=NAME,
      ground_truth=answer(fact),
      data_source=NAME,
    )

  return example


def judge(example: Example, completion: str, truncated: bool) -> Outcome:
  """Score 1 for exactly the two values, else 0; the closing ';' may be missing, since sampling may stop there.

  Metrics: acc, the fraction of the two values that are right; pred, the answer for a majority vote.
  """
  expected, got = _values(str(example.ground_truth)), _values(completion)
  right = sum(e == g for e, g in zip(expected, got, strict=False))  # The answer may have fewer or more words.
  acc = right / len(expected) if len(got) <= len(expected) else 0.0
  feedback = '' if acc == 1 else f'Wrong: the document says {" ".join(expected)!r}.'
  return Outcome(score=float(acc == 1), feedback=feedback, metrics={'acc': acc, 'pred': ' '.join(got)})


def _values(text: str) -> list[str]:
  words = text.split()
  return words[:-1] if words and words[-1] == END else words


grade = register(NAME)(grader(judge))
