"""A task of long answers about a document, for tiny cartridges: to follow its directions from one place to the next.

A document ("bako meta ; lopi sase ; …") names for every place the next one. A question is a place; its answer names the
next `HOPS` places. All ways lead to one goal, which is next to itself. Questions are asked only on a few ways: the
places beside them, most of the document, are read about only by who strays there, and from there the document leads
back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import json
import os
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sdpo_jax.environments import facts
from sdpo_jax.models import exporting, huggingface
from sdpo_jax.quickstart import document_base, supervised
from sdpo_jax.quickstart import document_tokenizer as tokenizer
from sdpo_jax.quickstart.induction import with_circuit

PLACES = (*facts.KEYS, *facts.FIRST, *facts.SECOND)  # Names, each one token of the tiny tokenizer.
HOPS, WAYS, BESIDE = 15, 3, 80  # Words of an answer; ways that are asked about; places beside them.
RECIPE = document_base.DocumentRecipe(steps=300, facts=110)  # At most 110 places; documents of the task have 126.

Map = Mapping[str, str]  # Place → next place, in the order of the document.


@dataclasses.dataclass(frozen=True)
class Task:
  """A document and the places that are asked about."""

  map: Map
  asked: Sequence[str]


def draw(rng: np.random.Generator, hops: int = HOPS, ways: int = WAYS, beside: int = BESIDE) -> Task:
  """Draw a task of this many ways to the goal, each of `hops` places, and this many places beside them.

  A place beside leads to any place but the goal that was drawn before it.
  """
  goal, *names = (PLACES[number] for number in rng.permutation(len(PLACES))[: 1 + ways * hops + beside])
  following = {goal: goal}
  asked = names[: ways * hops]
  for at in range(0, len(asked), hops):
    way = asked[at : at + hops]
    following |= dict(zip(way, [*way[1:], goal], strict=True))
  known = list(following)  # The goal comes first.
  for place in names[len(asked) :]:
    following[place] = known[rng.integers(1, len(known))]
    known.append(place)
  order = rng.permutation(len(known))
  return Task({known[number]: following[known[number]] for number in order}, asked)


def write(following: Map) -> str:
  """Return the text of a document."""
  return ' '.join(f'{place} {after} {facts.END}' for place, after in following.items())


def walk(following: Map, place: str, hops: int = HOPS) -> list[str]:
  """Return the next places from a place on."""
  way = []
  for _ in range(hops):
    place = following[place]
    way.append(place)
  return way


def rows(task: Task, hops: int = HOPS) -> str:
  """Return the questions as JSON lines, graded as answers of the facts are: `acc` is the fraction of right words."""
  lines = (
    {'prompt': place, 'answer': ' '.join(walk(task.map, place, hops)), 'dataset': 'ways', 'environment': facts.NAME}
    for place in task.asked
  )
  return ''.join(json.dumps(line) + '\n' for line in lines)


def random_map(rng: np.random.Generator, places: int) -> Map:
  """Return a map in which the next place of each is any place, to train the base model on."""
  names = [PLACES[number] for number in rng.permutation(len(PLACES))[:places]]
  return {name: names[rng.integers(places)] for name in names}


def collate(maps: Sequence[Map], most: int, questions: int, hops: int, rng: np.random.Generator) -> document_base.Rows:
  """Return documents of at most `most` places, with random questions each, as `document_base.collate` does."""
  room, length = 1 + 3 * most, hops + 1
  tokens = np.zeros((len(maps), room + length * questions), np.int32)
  positions, segment_ids, parents = np.zeros_like(tokens), np.zeros_like(tokens), np.zeros_like(tokens)
  answers = np.zeros((len(maps), questions, hops), np.int32)
  for row, following in enumerate(maps):
    text = [tokenizer.token_of(word) for word in (tokenizer.BEGIN, *write(following).split())]
    tokens[row, : len(text)] = text
    positions[row, : len(text)] = np.arange(len(text))
    segment_ids[row, : len(text)] = 1
    for question in range(questions):
      place = list(following)[rng.integers(len(following))]
      asked = [tokenizer.token_of(word) for word in (tokenizer.ASK, place, *walk(following, place, hops))]
      at = slice(room + length * question, room + length * (question + 1))
      tokens[row, at] = asked[:-1]
      positions[row, at] = len(text) + np.arange(length)
      segment_ids[row, at], parents[row, at] = 2 + question, 1
      answers[row, question] = asked[2:]
  index = room + length * np.arange(questions)[:, None] + np.arange(1, length)[None]
  return tokens, positions, segment_ids, parents, np.broadcast_to(index.astype(np.int32), answers.shape), answers


def make_base(
  output: str | os.PathLike,
  recipe: document_base.DocumentRecipe = RECIPE,
  announce: Callable[[str], None] = lambda text: None,
) -> None:
  """Write a tiny model that follows the directions of a document in its context, about two minutes on a core.

  Args:
    output: Hugging Face model directory to make, empty or absent.
    recipe: hyperparameters; `facts` and `short_facts` are numbers of places.
    announce: called with lines of progress.

  Raises:
    UserError: `output` is not empty.
  """
  exporting.check_target(output)
  values = document_base.config_json(recipe)
  policy, params = huggingface.init(values, jax.random.key(recipe.seed))
  params = jax.tree.map(jnp.asarray, with_circuit(params, policy.config, recipe.seed))
  rng = np.random.default_rng(recipe.seed)

  def rows_of(number: int) -> document_base.Rows:
    short = 3 * number < recipe.steps
    most = recipe.short_facts if short else recipe.facts
    count = recipe.short_documents if short else recipe.documents
    questions, hops = (16, 4) if short else (12, HOPS)
    maps = [random_map(rng, int(rng.integers(-(-most // 2), most + 1))) for _ in range(count)]
    return collate(maps, most, questions, hops, rng)

  def say(loss: jax.Array, right: jax.Array) -> str:
    return f'cross-entropy {float(loss):.4f} nats a token, {float(right):.1%} of answers right'

  measure = functools.partial(document_base.cross_entropy, policy)
  params = supervised.train(params, measure, rows_of, recipe, say, announce, every=25, method=optax.adam)
  with tempfile.TemporaryDirectory() as scratch:
    source = pathlib.Path(scratch)
    tokenizer.save(source)
    supervised.write_description(source, values)
    huggingface.save(output, policy, params, source=source, dtype='float32')
