"""Conversations with a teacher's log-probs, as the makers of cartridges publish them, as examples with answers.

A row is a `Conversation` of HazyResearch/cartridges: `messages`, each with `role`, `content`, `token_ids` [T] and
`top_logprobs`, which is null except in answers of the assistant. It is flat (`token_idx`, `token_id` and `logprobs`
[E], and `shape`, (T, K)) or dense (`token_ids` and `logprobs` [T, K]). Other columns are not read.
Letters: T tokens of an answer, K log-probs of a token, E entries, i.e. log-probs that are kept of all tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import hashlib
import logging
from typing import Any

import numpy as np

from sdpo_jax.data import rows, sources
from sdpo_jax.errors import UserError, short_repr
from sdpo_jax.types import Example

ANSWER = 'answer'  # Key of an example's `ScoredAnswer` in `Example.extra`.
MASS = 0.99  # Probability that the kept log-probs of a token reach, if they are dense (`TopLogprobs.flatten`, 1528162).


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ScoredAnswer:
  """A stored answer of the assistant, with the log-probs of the model that wrote it."""

  text: str
  cut: bool  # Whether it had more than these T tokens.
  token_ids: np.ndarray  # [T] int32.
  positions: np.ndarray  # [E] int32, tokens of the answer, ascending.
  entry_ids: np.ndarray  # [E] int32, token ids in their place.
  log_probs: np.ndarray  # [E] float32, natural logarithms.

  def __str__(self) -> str:
    arrays = self.token_ids, self.positions, self.entry_ids, self.log_probs
    return hashlib.sha256(b''.join(map(bytes, arrays))).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class ConversationReader:
  """A reader of files of conversations."""

  vocabulary: int  # Number of token ids of the model.
  tokens: int  # T to which longer answers are cut: data.max_response_length.
  entries: int  # Maximum number of log-probs of a token: distillation_topk.

  def __call__(self, source: str, setting: str) -> list[Example]:
    """Return an example per answer with log-probs of a file or hub data set, in order.

    Its messages are those before the answer, without system messages; its ground truth is a digest of the answer, by
    which a resumed run notices another one.

    Raises:
      UserError: a row is faulty; the message names file, row, message and fault.
    """
    given, name = sources.read_rows(source, setting, arrays=True), sources.stem(source)
    found = [example for row in given for example in self._examples(row, name)]
    if cut := sum(example.extra[ANSWER].cut for example in found):
      logging.warning('%s: cut %d of %d answers to data.max_response_length=%d.', source, cut, len(found), self.tokens)
    return found

  def _examples(self, row: rows.RawRow, source: str) -> list[Example]:
    messages, found = rows.fields(row).get('messages'), []
    if not isinstance(messages, list) or not all(map(rows.is_message, messages)):
      raise UserError(f"{row.origin}: field 'messages' must be a list of messages with 'role' and 'content'.")
    for number, message in enumerate(messages, start=1):
      asked = [{'role': m['role'], 'content': m['content']} for m in messages[: number - 1] if m['role'] != 'system']
      if asked and message['role'] == 'assistant' and message.get('top_logprobs') is not None:
        origin, name = f'{row.origin}, message {number}', f'{source}/{row.number}.{number}'
        answer = self._answer(message, origin)
        found.append(Example(name, asked, 'none', str(answer), source, {'origin': origin, ANSWER: answer}))
    if not found:
      raise UserError(f"{row.origin}: no answer has 'top_logprobs' (rollout.sampled_by='data'): leave the row out.")
    return found

  def _answer(self, message: Mapping[str, Any], origin: str) -> ScoredAnswer:
    def require(holds: bool, fault: str) -> None:
      if not holds:
        raise UserError(f'{origin}: {fault}.')

    def numbers(stored: Any, name: str, dims: int = 1) -> np.ndarray:
      given = stored.get(name) if isinstance(stored, Mapping) else None
      try:
        values = np.asarray(given)
      except ValueError:  # Lists of different lengths.
        values = np.zeros(0)
      kinds, what = ('iuf', 'numbers') if name == 'logprobs' else ('iu', 'whole numbers')
      good = values.ndim == dims and values.size > 0 and values.dtype.kind in kinds
      require(good, f'field {name!r} must hold {what}{" for each token" * (dims > 1)}, not {short_repr(given)}')
      return values if name == 'logprobs' else values.astype(np.int64)

    stored, tokens = message['top_logprobs'], numbers(message, 'token_ids')
    dense = not isinstance(stored, Mapping) or 'token_idx' not in stored
    ids, log_probs = (numbers(stored, name, 1 + dense) for name in ('token_ids' if dense else 'token_id', 'logprobs'))
    positions = ids if dense else numbers(stored, 'token_idx')
    require(ids.shape == log_probs.shape == positions.shape, "the fields of 'top_logprobs' differ in length")
    length, most = len(ids) if dense else numbers(stored, 'shape')[0], log_probs.max()
    # Not so NaN; slightly more is rounding error.
    require(most <= 1e-3, f'log-probs must be numbers of at most 0, not {most}')
    if dense:
      positions, ids, log_probs = _flat(ids, log_probs)
    named, used = np.append(positions, 0), np.append(tokens, ids)
    fits = length == len(tokens) > named.max() and named.min() == 0
    require(fits, f"'top_logprobs' must be those of the {len(tokens)} 'token_ids', not of {length} tokens")
    fault = f'its token ids go from {used.min()} to {used.max()}, those of the model from 0 to {self.vocabulary - 1}'
    require(0 <= used.min() <= used.max() < self.vocabulary, fault)
    order = np.argsort(positions, kind='stable')
    order = order[positions[order] < self.tokens]
    most = np.bincount(positions[order], minlength=1).max()
    require(most > 0, f'none of the first data.max_response_length={self.tokens} tokens has log-probs: raise it')
    require(most <= self.entries, f'a token has {most} log-probs: raise distillation_topk={self.entries}')
    cut, arrays = len(tokens) > self.tokens, (tokens[: self.tokens], positions[order], ids[order])
    return ScoredAnswer(message['content'], cut, *(a.astype('i4') for a in arrays), log_probs[order].astype('f4'))


def _flat(ids: np.ndarray, log_probs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Return positions, ids and log-probs [E] of the kept ones of [T, K]: the fewest that reach `MASS`, or else all.

  Negative ids fill up positions with fewer log-probs.
  """
  order = np.argsort(-log_probs, axis=1, kind='stable')
  ids, log_probs = (np.take_along_axis(values, order, axis=1) for values in (ids, log_probs))
  mass = np.cumsum(np.exp(log_probs) * (ids >= 0), axis=1)
  kept = (np.pad(mass[:, :-1], ((0, 0), (1, 0))) < MASS) & (ids >= 0)
  return np.nonzero(kept)[0], ids[kept], log_probs[kept]
