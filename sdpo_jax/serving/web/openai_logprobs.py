"""Log-probs of tokens in the formats of OpenAI, vLLM and Fireworks.

A position holds the log-prob of its token and the K most likely tokens. The log-prob of the first token of a prompt is
null.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
from typing import Any

import numpy as np

from sdpo_jax.learning.scoring import Scored
from sdpo_jax.models.token_texts import TokenTexts

MINUS_INFINITY = -9999.0  # Represents −inf, which JSON cannot.


@dataclasses.dataclass(frozen=True)
class Position:
  """A token with its log-prob and the most likely tokens at its position."""

  token: int
  log_prob: float | None = None  # In nats; None: it is the first token of a prompt.
  top: tuple[tuple[int, float], ...] = ()  # Token ids and their log-probs, the most likely first.

  @property
  def rank(self) -> int | None:
    """The rank of the token among the most likely ones, from 1; None: it is not among them."""
    return next((place for place, (token, _) in enumerate(self.top, 1) if token == self.token), None)

  def most_likely(self, k: int) -> list[tuple[int, float]]:
    """Return the K most likely tokens, followed by the token itself if it is not among them."""
    best = list(self.top[:k])
    return best if any(token == self.token for token, _ in best) else [*best, (self.token, self.log_prob)]


def positions(tokens: Sequence[int], log_probs: Sequence[float], scored: Scored | None) -> list[Position]:
  """Return the positions of tokens with known log-probs.

  Args:
    tokens: [T] token ids.
    log_probs: [T] their log-probs.
    scored: the scores of these tokens; None: the most likely tokens are unknown.
  """
  found = []
  for place, (token, value) in enumerate(zip(tokens, log_probs, strict=True)):
    own, top = _finite(value), ()
    if scored is not None:
      ids, values = scored.top_ids[place].tolist(), scored.top_log_probs[place].tolist()
      # Both places must have the same number: clients compare them to tell whether a token is the most likely one.
      top = tuple(
        (each, own if each == token else _finite(said)) for each, said in zip(ids, values, strict=True) if each >= 0
      )
    found.append(Position(int(token), own, top))
  return found


def prompt_positions(tokens: Sequence[int], scored: Scored | None, last: float | None = None) -> list[Position]:
  """Return the positions of the tokens of a prompt.

  Args:
    tokens: [P] token ids.
    scored: the scores of all tokens but the first; None: there is only one token.
    last: the log-prob of the last token, if another token was scored in its place; None: it was scored itself.
  """
  if scored is None:
    return [Position(int(tokens[0]))]
  log_probs = scored.log_probs.tolist()
  return [
    Position(int(tokens[0])),
    *positions(tokens[1:], log_probs if last is None else [*log_probs[:-1], last], scored),
  ]


def _finite(value: float) -> float:
  return max(float(np.float32(value)), MINUS_INFINITY)


def completion_shape(
  texts: TokenTexts, said: Sequence[Position], k: int, offsets: Sequence[int]
) -> dict[str, list[Any]]:
  """Return the `logprobs` of a completion in OpenAI's format.

  Args:
    texts: the texts of tokens.
    said: the positions.
    k: how many of the most likely tokens to list for each position.
    offsets: the offset of each token in the text of the choice, in characters.
  """
  tops: list[dict[str, float] | None] = []
  for each in said:
    if each.log_prob is None:
      tops.append(None)
      continue
    named: dict[str, float] = {}
    for token, value in each.most_likely(k):
      named.setdefault(texts.text_of(token), value)  # Of tokens with the same text, the most likely one.
    tops.append(named)
  return {
    'tokens': [texts.text_of(each.token) for each in said],
    'token_logprobs': [each.log_prob for each in said],
    'top_logprobs': tops,
    'text_offset': list(offsets),
  }


def content_shape(texts: TokenTexts, said: Sequence[Position], k: int) -> dict[str, list[Any] | None]:
  """Return the `logprobs` of a chat completion in OpenAI's format, with token ids as in Fireworks'."""

  def entry(token: int, value: float | None) -> dict[str, Any]:
    return {
      'token': texts.text_of(token),
      'token_id': token,
      'logprob': value,
      'bytes': list(texts.bytes_of(token)),
    }

  content = [
    entry(each.token, each.log_prob) | {'top_logprobs': [entry(token, value) for token, value in each.top[:k]]}
    for each in said
  ]
  return {'content': content, 'refusal': None}


def prompt_shape(texts: TokenTexts, said: Sequence[Position], k: int) -> list[dict[str, Any] | None]:
  """Return `prompt_logprobs` in vLLM's format; a token that is not among the most likely ones has the rank null."""
  found: list[dict[str, Any] | None] = []
  for each in said:
    if each.log_prob is None:
      found.append(None)
      continue
    ranks = {token: place for place, (token, _) in enumerate(each.top, 1)}
    found.append(
      {
        str(token): {'logprob': value, 'rank': ranks.get(token), 'decoded_token': texts.text_of(token)}
        for token, value in each.most_likely(k)
      }
    )
  return found
