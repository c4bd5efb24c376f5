"""Log-probs of tokens in the three shapes that clients of OpenAI, vLLM and Fireworks read.

A position says how likely the token that stands there is, and which K are the most likely. The first token of a prompt,
which nothing stands before, has no log-prob: null.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
from typing import Any

import numpy as np

from models.token_texts import TokenTexts
from sdpo_jax.serving.scoring import Scored

MINUS_INFINITY = -9999.0  # What stands for no probability at all, JSON having nothing for it.


@dataclasses.dataclass(frozen=True)
class Position:
  """What is said of a token."""

  token: int
  log_prob: float | None = None  # In nats; None: nothing stands before it.
  top: tuple[tuple[int, float], ...] = ()  # Token ids and their log-probs, the most likely first.

  @property
  def rank(self) -> int | None:
    """The place of the token among the most likely ones, from 1 on; None: it is not among them."""
    return next((place for place, (token, _) in enumerate(self.top, 1) if token == self.token), None)

  def most_likely(self, k: int) -> list[tuple[int, float]]:
    """Return the K most likely tokens, and the token itself behind them if it is none of these."""
    best = list(self.top[:k])
    return best if any(token == self.token for token, _ in best) else [*best, (self.token, self.log_prob)]


def positions(tokens: Sequence[int], log_probs: Sequence[float], scored: Scored | None) -> list[Position]:
  """Return what is said of tokens.

  Args:
    tokens: [T].
    log_probs: [T] of these.
    scored: of the same tokens; None: the most likely ones are not known.
  """
  found = []
  for place, (token, value) in enumerate(zip(tokens, log_probs, strict=True)):
    own, top = _finite(value), ()
    if scored is not None:
      ids, values = scored.top_ids[place].tolist(), scored.top_log_probs[place].tolist()
      # The same number for the same token, which clients compare to see whether it is the most likely one.
      top = tuple(
        (each, own if each == token else _finite(said)) for each, said in zip(ids, values, strict=True) if each >= 0
      )
    found.append(Position(int(token), own, top))
  return found


def prompt_positions(tokens: Sequence[int], scored: Scored | None, last: float | None = None) -> list[Position]:
  """Return what is said of the tokens of a prompt.

  Args:
    tokens: [P].
    scored: of all but the first one; None: there are no others.
    last: log-prob of the last one, if another one was scored in its place; None: it was not.
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
  """Return OpenAI's `logprobs` of a completion.

  Args:
    texts: of the tokens.
    said: of each.
    k: how many of the most likely tokens each has beside itself.
    offsets: where their texts begin in that of the choice.
  """
  tops: list[dict[str, float] | None] = []
  for each in said:
    if each.log_prob is None:
      tops.append(None)
      continue
    named: dict[str, float] = {}
    for token, value in each.most_likely(k):
      named.setdefault(texts.text_of(token), value)  # Of tokens with the same text, the most likely.
    tops.append(named)
  return {
    'tokens': [texts.text_of(each.token) for each in said],
    'token_logprobs': [each.log_prob for each in said],
    'top_logprobs': tops,
    'text_offset': list(offsets),
  }


def content_shape(texts: TokenTexts, said: Sequence[Position], k: int) -> dict[str, list[Any] | None]:
  """Return OpenAI's `logprobs` of a chat, in which tokens also have their ids, as Fireworks gives them."""

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
  """Return vLLM's `prompt_logprobs`, in which a token that is none of the most likely ones has no rank."""
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
