"""A teacher that reads a part of a long text before each prompt: the chunk that the prompt was written about.

Rows of prompts name their chunk as `window_start` and `window_end`, its first token and its end among those of the
document's text, as `launch.synthesize` writes them, and with several documents the file as `document`; by a
`window_digest`, another text or tokenizer than theirs is noticed. Keys and values of some chunks are held on the
devices as a bank (`kv_prefix`), and those that a batch asks for and that are missing replace the chunks that have not
been used for the longest time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
import dataclasses
import os
from typing import Any, NamedTuple

import numpy as np

from sdpo_jax.config import Config
from sdpo_jax.config.locations import paths
from sdpo_jax.data.self_study import SPARE, Document
from sdpo_jax.errors import UserError, short_repr
from sdpo_jax.models.adapters import kv_prefix
from sdpo_jax.models.chat_template import PROBE
from sdpo_jax.models.decoder import DecoderPolicy
from sdpo_jax.rollout.weights import base_preparation
from sdpo_jax.training import documents
from sdpo_jax.training.specs import objective_spec
from sdpo_jax.types import Example, Tree

FIELDS = 'window_start', 'window_end'


class Chunk(NamedTuple):
  """A part of a document."""

  file: str
  start: int  # Its first token, among those of the text without a template.
  end: int


class Chunks:
  """The chunks that prompts ask about, as tokens before a conversation."""

  def __init__(self, config: Config, tokenizer: Any):
    """Make them from the documents that the settings name; a document is read when a row names it."""
    self._config, self._tokenizer = config, tokenizer
    self._documents: dict[str, Document] = {}
    self.files = paths(config.model.cartridge.document)
    self._by_name = {os.path.basename(file): file for file in self.files}
    if len(self._by_name) < len(self.files):
      raise UserError(
        f'{documents.SECTION}.document={config.model.cartridge.document} names two files alike, and rows tell them by '
        'their names: rename one.'
      )
    whole = documents.tokens_before(config, tokenizer, PROBE, documents.SECTION)
    # Number of tokens around a chunk.
    self.frame = len(whole) - len(tokenizer.encode(PROBE, add_special_tokens=False))

  def _document(self, file: str) -> Document:
    if file not in self._documents:
      text = documents.text_of(file, f'{documents.SECTION}.document')
      self._documents[file] = Document(text, self._tokenizer)
    return self._documents[file]

  def of(self, example: Example) -> Chunk:
    """Return the chunk of a row.

    Raises:
      UserError: the row does not name one, or it is longer than `max_chunk` allows.
    """
    origin, cartridge = _origin(example), self._config.model.cartridge
    file, name = self.files[0], example.columns.get('document')
    if len(self.files) > 1:
      if name not in self._by_name:
        raise UserError(
          f"{origin}: field 'document' is {short_repr(name)}, which names no file of {documents.SECTION}.document: it "
          f'must be {" or ".join(self._by_name)}.'
        )
      file = self._by_name[name]
    # CSV files hold strings.
    window = tuple(int(field) if str(field).isdecimal() else field for field in map(example.columns.get, FIELDS))
    if not all(isinstance(number, int) for number in window):
      raise UserError(
        f"{origin}: fields 'window_start' and 'window_end' are {short_repr(window)}, but {documents.SECTION}."
        "teacher_scope='chunk' teaches each prompt by these tokens of the document: let launch.synthesize write the "
        "prompts, add both fields, or set teacher_scope='full'."
      )
    (start, end), document = window, self._document(file)
    if (example.columns.get('window_digest') or document.digest) != document.digest:
      raise UserError(
        f'{origin}: the window was cut out of another text than {file}, or by another tokenizer (window_digest): let '
        'launch.synthesize write the prompts again, or name the text and the model that they were written about.'
      )
    if not 0 <= start < end <= len(document):
      raise UserError(f'{origin}: tokens {start} to {end}, its window, are not among the {len(document)} of {file}.')
    if end - start + self.frame > cartridge.max_chunk:
      raise UserError(
        f'{origin}: the window has {end - start} tokens, and {self.frame} around them: raise {documents.SECTION}.'
        f'max_chunk={cartridge.max_chunk}, or write prompts with a smaller --max_window.'
      )
    return Chunk(file, start, end)

  def tokens(self, chunk: Chunk, origin: str) -> list[int]:
    """Return the tokens of the chunk of a row before a conversation.

    Raises:
      UserError: there are more than `max_chunk`, or as in `documents.tokens_before`; the message names the row.
    """
    where = f'{origin}: {chunk.file}, tokens {chunk.start} to {chunk.end}'
    text = self._document(chunk.file).passage((chunk.start, chunk.end)).strip()
    tokens = documents.tokens_before(self._config, self._tokenizer, text, where)
    most = self._config.model.cartridge.max_chunk
    if len(tokens) > most:
      raise UserError(f'{where}, make {len(tokens)} tokens by themselves: raise {documents.SECTION}.max_chunk={most}.')
    return tokens


def _origin(example: Example) -> str:
  return example.extra.get('origin', example.id)


def check(config: Config, tokenizer: Any, training: Sequence[Example], held_out: Sequence[Example]) -> Chunks | None:
  """Check that every question names its chunk, if the teacher reads one, and that it holds those of an evaluation.

  Returns:
    The chunks; None: the teacher reads none.

  Raises:
    UserError: as `ChunkBank.members`.
  """
  if config.model.cartridge.teacher_scope != 'chunk' or not objective_spec(config).reads_teacher:
    return None
  chunks, measured = Chunks(config, tokenizer), held_out if config.trainer.test_divergence else ()
  asked = {chunks.of(example): _origin(example) for example in training}
  evaluated = {chunks.of(example): _origin(example) for example in measured}
  _check_room(evaluated, len(measured), documents.chunks_held(config))
  for chunk, origin in (asked | evaluated).items():
    if chunk.end - chunk.start + chunks.frame + SPARE > config.model.cartridge.max_chunk:
      chunks.tokens(chunk, origin)
  return chunks


def _check_room(chunks: Collection[Chunk], questions: int, room: int) -> None:
  if len(chunks) > room:
    raise UserError(
      f'{questions} questions ask about {len(chunks)} chunks, and {room} are held at once: raise {documents.SECTION}.'
      'chunks_held.'
    )


class ChunkBank:
  """Keys and values of chunks on the devices, of which every row of the teacher reads one."""

  def __init__(self, config: Config, policy: DecoderPolicy, model: Tree, chunks: Chunks):
    """Make a bank without chunks, and compile what reads one.

    Args:
      config: settings with a cartridge whose `teacher_scope` is 'chunk'.
      policy: policy of the student, on its mesh.
      model: parameters of the model alone.
      chunks: the chunks of the prompts.
    """
    self._alone, self._model, self._chunks = policy.base_policy(), model, chunks
    prefix = documents.prefix_of(config, policy, config.model.cartridge.max_chunk)
    self.policy = dataclasses.replace(policy, adapter=prefix)
    # Reading chunks replaces the arrays of this tree, which the teacher's base is.
    self.base: Tree = kv_prefix.empty_slots(self._alone, prefix)
    self._places: dict[Chunk, int] = {}  # The least recently used come first.
    self._read({0: []})

  def documents(self, examples: Sequence[Example]) -> np.ndarray:
    """Return the index [G] int32 of each question's document among those of the settings."""
    return np.array([self._chunks.files.index(self._chunks.of(example).file) for example in examples], np.int32)

  def members(self, examples: Sequence[Example]) -> np.ndarray:
    """Return the place [G] int32 of each question's chunk in the bank, after reading those that are not there.

    Raises:
      UserError: there are more different chunks than places, or as in `Chunks`.
    """
    wanted = [self._chunks.of(example) for example in examples]
    different, room = dict(zip(wanted, map(_origin, examples), strict=True)), self.policy.adapter.members
    _check_room(different, len(examples), room)
    kept = {chunk: place for chunk, place in self._places.items() if chunk not in different}
    known = {chunk: place for chunk, place in self._places.items() if chunk in different}
    missing = [chunk for chunk in different if chunk not in known]
    free = [place for place in range(room) if place not in {*kept.values(), *known.values()}]
    while len(free) < len(missing):
      free.append(kept.pop(next(iter(kept))))
    placed = dict(zip(missing, free, strict=False))
    self._places = kept | known  # If reading fails, the other places are still right.
    self._read({place: self._chunks.tokens(chunk, different[chunk]) for chunk, place in placed.items()})
    self._places |= placed
    return np.array([self._places[chunk] for chunk in wanted], np.int32)

  def _read(self, texts: dict[int, list[int]]) -> None:
    """Put texts, by their places, into the bank."""
    if not texts:
      return
    room, parts = self.policy.adapter.member_slots, self.policy.adapter.parts
    model = base_preparation(self._alone, self._alone.backend.mesh, self._model).run(self._model)
    put = kv_prefix.bank_writer(self.policy)
    for place, tokens in texts.items():
      padded = [*tokens, *[0] * (room - len(tokens))]  # What comes after a text does not change its keys and values.
      slots = kv_prefix.read_slots(self._alone, model, padded, parts)
      self.base |= put(self.base, slots, np.int32(place), np.int32(len(tokens)))
