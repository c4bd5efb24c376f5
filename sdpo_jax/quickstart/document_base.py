"""A tiny model, made from scratch, whose only skill is to answer questions about a document in its context.

It has two layers in the shape of Qwen2.5, with biases of queries and keys, and a third of a million parameters. It
learns to look up a key in random documents, starting close to an induction circuit (induction.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools
import os
import pathlib
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sdpo_jax.environments import facts
from sdpo_jax.models import exporting, huggingface
from sdpo_jax.models.decoder import DecoderPolicy
from sdpo_jax.quickstart import document_tokenizer as tokenizer
from sdpo_jax.quickstart import supervised
from sdpo_jax.quickstart.induction import with_circuit
from sdpo_jax.quickstart.supervised import TinyRecipe
from sdpo_jax.types import Tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class DocumentRecipe(TinyRecipe):
  """Hyperparameters of the model for documents and of its training."""

  steps: int = 150  # The first third uses short documents.
  warmup_steps: int = 10
  facts: int = facts.FACTS  # Per document at most; documents have at least half as many.
  documents: int = 6  # Per step.
  filler: int = 0  # Other words between the facts of a document at most, for documents of which little is asked.
  short_facts: int = 16
  short_documents: int = 16
  hidden_size: int = 128
  intermediate_size: int = 128
  layers: int = 2
  head_dim: int = 32


def make_document_base(
  output: str | os.PathLike,
  recipe: DocumentRecipe = DocumentRecipe(),
  announce: Callable[[str], None] = lambda text: None,
) -> None:
  """Write the model to the directory `output`, which must be empty or absent.

  Args:
    output: Hugging Face model directory to make.
    recipe: hyperparameters; by default the committed model's.
    announce: called with lines of progress.

  Raises:
    UserError: `output` is not empty.
  """
  exporting.check_target(output)
  values = config_json(recipe)
  with tempfile.TemporaryDirectory() as scratch:
    source = pathlib.Path(scratch)
    tokenizer.save(source)
    supervised.write_description(source, values)
    policy, params = train(recipe, announce)
    huggingface.save(output, policy, params, source=source, dtype='float32')


def train(recipe: DocumentRecipe, announce: Callable[[str], None] = lambda text: None) -> tuple[DecoderPolicy, Tree]:
  """Train a policy on random documents; return it with its parameters. The loss is cross-entropy per answer token."""
  policy, params = huggingface.init(config_json(recipe), jax.random.key(recipe.seed))
  params = jax.tree.map(jnp.asarray, with_circuit(params, policy.config, recipe.seed))
  rng = np.random.default_rng(recipe.seed)

  def rows_of(number: int) -> Rows:
    short = 3 * number < recipe.steps
    most, count = (recipe.short_facts, recipe.short_documents) if short else (recipe.facts, recipe.documents)
    documents = [facts.draw(rng, int(rng.integers(-(-most // 2), most + 1))) for _ in range(count)]
    filler = recipe.filler // 4 if short else recipe.filler
    return collate(
      documents,
      most,
      [scattered(rng, each, int(rng.integers(filler + 1))) for each in documents],
      1 + 4 * most + filler,
    )

  def say(loss: jax.Array, right: jax.Array) -> str:
    return f'cross-entropy {float(loss):.4f} nats a token, {float(right):.1%} of answers right'

  measure = functools.partial(cross_entropy, policy)
  return policy, supervised.train(params, measure, rows_of, recipe, say, announce, every=25, method=optax.adam)


# tokens, positions, segment_ids, parents [B, S]; indices of the states that predict the answers [B, Q, 3], answers [B,
# Q, 3]; all int32.
Rows = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def scattered(rng: np.random.Generator, document: facts.Document, filler: int) -> list[str]:
  """Return the words of a document with `filler` second values between its facts, which belong to none."""
  words = facts.write(document).split()
  for place in np.sort(rng.integers(len(document) + 1, size=filler))[::-1]:
    words.insert(4 * int(place), str(rng.choice(facts.SECOND)))
  return words


def collate(
  documents: Sequence[facts.Document], most: int, texts: Sequence[Sequence[str]] = (), room: int | None = None
) -> Rows:
  """Return documents with `most` questions each as arrays; each question sees its document but no other question.

  Args:
    documents: B documents of at most `most` facts; shorter ones repeat some questions.
    most: Q.
    texts: the words of each document; empty: those of its facts.
    room: tokens of the longest document; None: of `most` facts.
  """
  texts = texts or [facts.write(document).split() for document in documents]
  room, length = room or 1 + 4 * most, 4  # The latter are the tokens of a question with its answer but its last.
  tokens = np.zeros((len(documents), room + length * most), np.int32)
  positions, segment_ids, parents = np.zeros_like(tokens), np.zeros_like(tokens), np.zeros_like(tokens)
  answers = np.zeros((len(documents), most, 3), np.int32)
  for row, document in enumerate(documents):
    text = [tokenizer.token_of(word) for word in (tokenizer.BEGIN, *texts[row])]
    tokens[row, : len(text)] = text
    positions[row, : len(text)] = np.arange(len(text))
    segment_ids[row, : len(text)] = 1
    for question in range(most):
      fact, start = document[question % len(document)], room + length * question
      asked = [tokenizer.token_of(word) for word in (tokenizer.ASK, fact.key, *facts.answer(fact).split())]
      tokens[row, start : start + length] = asked[:-1]
      positions[row, start : start + length] = len(text) + np.arange(length)
      segment_ids[row, start : start + length] = 2 + question
      parents[row, start : start + length] = 1
      answers[row, question] = asked[2:]
  index = room + length * np.arange(most)[:, None] + np.arange(1, 4)[None]
  return tokens, positions, segment_ids, parents, np.broadcast_to(index.astype(np.int32), answers.shape), answers


def cross_entropy(policy: DecoderPolicy, params: Tree, rows: Rows) -> tuple[jax.Array, jax.Array]:
  """Return the mean cross-entropy per answer token, and the fraction of answers predicted completely."""
  tokens, positions, segment_ids, parents, index, answers = rows
  hidden, unembedding, _ = policy.apply({}, params, tokens, positions, segment_ids, parents=parents)
  states = jnp.take_along_axis(hidden, index.reshape(len(index), -1, 1), axis=1)
  logits = jnp.einsum('btd,vd->btv', states, unembedding).astype(jnp.float32).reshape(*answers.shape, -1)
  log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), answers[..., None], axis=-1)
  return -log_probs.mean(), (logits.argmax(-1) == answers).all(-1).mean()


def config_json(recipe: DocumentRecipe) -> dict[str, Any]:
  """Return the model's config.json, in the format of Qwen2.5."""
  return supervised.config_json(
    recipe,
    'qwen2',
    len(tokenizer.VOCABULARY),
    tokenizer.token_of(facts.END),
    rope_theta=1e6,
    attention_dropout=0.0,
    use_sliding_window=False,
    tie_word_embeddings=False,
    initializer_range=0.08,  # With smaller values, a cartridge cannot use the heads outside the circuit.
  )
