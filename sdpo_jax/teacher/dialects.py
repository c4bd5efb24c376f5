"""Requests to servers for the log-probs of a given text, token by token, and the parsing of their responses.

P prompt tokens, T completion tokens, K log-probs at every position. Both dialects extend OpenAI's completions: vLLM by
`prompt_logprobs`, a map of token id → log-prob for every position of the prompt (null for the first); and Fireworks by
`echo_last`, a list of at most five log-probs for each of the last tokens of the prompt. Both add the prompt's own token
at a position if it is not among the K.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
from typing import Any

import numpy as np

from sdpo_jax.environments.json_server import Fault, quoted

MINUS_INFINITY = -9999.0  # Servers send it in place of −inf, which JSON lacks.
LARGEST = 1e30  # Numbers of this magnitude or more are not log-probs.
ROUNDING = 1e-3  # Amount by which a log-prob may exceed 0.
MOST_MASS = 1.01  # Largest sum of probabilities at a position.
# Maximum per entry of a response: a token's text, which may be long, and three more values.
ENTRY_BYTES, ENTRY_VALUES = 256, 8
SLACK_BYTES, SLACK_VALUES = 2**16, 10_000  # Allowance for everything around the entries.


@dataclasses.dataclass(frozen=True)
class EndpointScores:
  """A teacher's log-probs for a completion."""

  token_ids: np.ndarray  # [T, K] int32, the most likely tokens, most likely first; −1: not in the vocabulary.
  log_probs: np.ndarray  # [T, K] float32 of these; nats, at temperature 1.
  target_log_probs: np.ndarray  # [T] float32 of the completion's own tokens.
  # [T] of the completion's tokens, as decoded by the server.
  texts: tuple[str | None, ...] = dataclasses.field(default=(), repr=False)

  @property
  def tail_mass(self) -> np.ndarray:
    """The probability of all other tokens at each position, [T]."""
    return np.maximum(1.0 - np.exp(self.log_probs.astype(np.float64)).sum(1), 0.0)


@dataclasses.dataclass(frozen=True)
class Dialect:
  """How to request log-probs from a kind of server, and how to read its response."""

  request: Callable[[str, Sequence[int], Sequence[int], int], dict[str, Any]]  # (model, prompt, completion, K) → body.
  # (answer, prompt, completion) → [T]; raises Fault.
  rows: Callable[[Any, Sequence[int], Sequence[int]], list[PositionLogProbs]]

  def read(
    self, answer: Any, prompt: Sequence[int], completion: Sequence[int], k: int, vocab_size: int
  ) -> EndpointScores:
    """Return the log-probs in a response.

    Args:
      answer: JSON.
      prompt: [P], as sent; at least one.
      completion: [T], as sent.
      k: K, as requested.
      vocab_size: token ids from here on are ignored, since models of a family pad their vocabulary differently.

    Raises:
      Fault: the response lacks them or is not valid.
    """
    rows = self.rows(answer, prompt, completion)
    ids, log_probs = np.empty((len(rows), k), np.int32), np.empty((len(rows), k), np.float32)
    targets = np.empty(len(rows), np.float32)
    for place, (row, target) in enumerate(zip(rows, completion, strict=True)):
      entries = dict(row.entries)
      targets[place] = entries[target]
      if len(entries) == k + 1:  # The token itself is not one of the K.
        own = entries.pop(target)
        if own > min(entries.values()) + ROUNDING:
          raise Fault(f'its answer has {k + 1} log-probs at a position, but not those of the most likely tokens')
      if len(entries) != k:
        raise Fault(
          f'its answer has {len(entries)} log-probs at a position where {k} were asked for, so the server probably '
          'limits them'
        )
      best = sorted(entries.items(), key=lambda entry: (-entry[1], entry[0]))
      ids[place], log_probs[place] = [token for token, _ in best], [value for _, value in best]
    mass = np.exp(log_probs.astype(np.float64)).sum(1)
    if len(rows) and mass.max() > MOST_MASS:
      raise Fault(f'its answer has probabilities at a position that add up to {mass.max():.3g}')
    beyond = ids >= vocab_size
    ids[beyond], log_probs[beyond] = -1, -np.inf
    return EndpointScores(ids, log_probs, targets, tuple(row.text for row in rows))


@dataclasses.dataclass(frozen=True)
class PositionLogProbs:
  """The log-probs that a response gives at one position."""

  entries: Mapping[int, float]  # Token id → log-prob, including the text's own token at this position.
  text: str | None  # Text of that token.


def most_bytes(positions: int, k: int) -> int:
  """Return the maximum size of a response in bytes."""
  return SLACK_BYTES + positions * (k + 1) * ENTRY_BYTES


def most_values(positions: int, k: int) -> int:
  """Return the maximum number of values in a response."""
  return SLACK_VALUES + positions * (k + 1) * ENTRY_VALUES


def _choice(answer: Any) -> Mapping[str, Any]:
  choices = answer.get('choices') if isinstance(answer, Mapping) else None
  if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], Mapping):
    raise Fault(f"its answer does not have exactly one completion in 'choices': {quoted(answer)}")
  return choices[0]


def _log_prob(value: Any) -> float:
  """Return a log-prob from a response, −inf where the server sent `MINUS_INFINITY` or less."""
  # Comparisons also work for integers that no float can hold; NaN is never within bounds.
  if isinstance(value, bool) or not isinstance(value, int | float) or not -LARGEST < value < LARGEST:
    raise Fault(f'a log-prob of its answer is not a finite number: {quoted(value)}')
  if value > ROUNDING:
    raise Fault(f'a log-prob of its answer is above 0: {quoted(value)}')
  return -math.inf if value <= MINUS_INFINITY else min(float(value), 0.0)


def _text(value: Any) -> str | None:
  return value if isinstance(value, str) else None


def _check_echo(sent: Sequence[int], echoed: Any) -> None:
  """Raise Fault if a server echoes other tokens than it was sent."""
  if echoed is not None and echoed != list(sent):
    raise Fault('it has read other tokens than it was sent')


# --- vLLM
# ----------------------------------------------------------------------------------------------------------------


def _vllm_request(model: str, prompt: Sequence[int], completion: Sequence[int], k: int) -> dict[str, Any]:
  return {
    'model': model,
    'prompt': [*prompt, *completion],
    'max_tokens': 1,  # Not all servers allow 0; the drawn token is ignored.
    'temperature': 0,
    'prompt_logprobs': k,
    'return_token_ids': True,
    'add_special_tokens': False,
  }


def _vllm_rows(answer: Any, prompt: Sequence[int], completion: Sequence[int]) -> list[PositionLogProbs]:
  choice = _choice(answer)
  found = choice.get('prompt_logprobs')
  if not isinstance(found, list):
    raise Fault("its answer has no 'prompt_logprobs', which it may not support")
  whole = [*prompt, *completion]
  _check_echo(whole, choice.get('prompt_token_ids'))
  if len(found) != len(whole):
    raise Fault(f'its answer has log-probs at {len(found)} positions, but {len(whole)} tokens were sent')
  # The first entry of the prompt has no context and is null.
  return [_vllm_row(row, token) for row, token in zip(found[len(prompt) :], completion, strict=True)]


def _vllm_row(row: Any, token: int) -> PositionLogProbs:
  if not isinstance(row, Mapping):
    raise Fault(f'its answer has no log-probs at a position: {quoted(row)}')
  entries = {}
  for key, entry in row.items():
    if not (key.isascii() and key.isdecimal()) or (len(key) > 1 and key[0] == '0') or len(key) > 9:
      raise Fault(f'its answer has a log-prob for something that is not a token id: {quoted(key)}')
    if not isinstance(entry, Mapping):
      raise Fault(f'its answer has an entry without a log-prob: {quoted(entry)}')
    entries[int(key)] = _log_prob(entry.get('logprob'))
  if token not in entries:
    raise Fault('its answer has no log-prob of the token at a position, as if positions were shifted')
  return PositionLogProbs(entries, _text(row[str(token)].get('decoded_token')))


# --- Fireworks
# -----------------------------------------------------------------------------------------------------------


def _fireworks_request(model: str, prompt: Sequence[int], completion: Sequence[int], k: int) -> dict[str, Any]:
  return {
    'model': model,
    'prompt': [*prompt, *completion],
    'max_tokens': 1,
    'temperature': 0,
    'logprobs': True,
    'top_logprobs': k,
    'echo_last': len(completion),
    'return_token_ids': True,
    'context_length_exceeded_behavior': 'error',
  }


def _fireworks_rows(answer: Any, prompt: Sequence[int], completion: Sequence[int]) -> list[PositionLogProbs]:
  choice = _choice(answer)
  found = choice.get('logprobs')
  content = found.get('content') if isinstance(found, Mapping) else None
  if not isinstance(content, list):
    raise Fault("its answer has no 'logprobs.content', which it may not support")
  _check_echo([*prompt, *completion], choice.get('prompt_token_ids'))
  # There is one more position for the drawn token, unless that ends the text.
  if len(content) not in (len(completion), len(completion) + 1):
    raise Fault(f'its answer has log-probs at {len(content)} positions, but {len(completion)} were asked for')
  return [_fireworks_row(entry, token) for entry, token in zip(content, completion, strict=False)]


def _fireworks_row(found: Any, token: int) -> PositionLogProbs:
  if not isinstance(found, Mapping) or not isinstance(found.get('top_logprobs'), list):
    raise Fault(f"its answer has no 'top_logprobs' at a position: {quoted(found)}")
  if _token_id(found) != token:
    raise Fault('it has read other tokens than it was sent, or its positions are shifted')
  entries = {}
  for entry in found['top_logprobs']:
    if not isinstance(entry, Mapping):
      raise Fault(f'its answer has an entry without a log-prob: {quoted(entry)}')
    number = _token_id(entry)
    if number in entries:
      raise Fault(f'its answer has two log-probs of token id {number} at a position')
    entries[number] = _log_prob(entry.get('logprob'))
  return PositionLogProbs({token: _log_prob(found.get('logprob'))} | entries, _text(found.get('token')))


def _token_id(entry: Mapping[str, Any]) -> int:
  value = entry.get('token_id')
  if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
    raise Fault(f"its answer has no token id in 'token_id': {quoted(value)}")
  return value


DIALECTS: Mapping[str, Dialect] = {
  'vllm': Dialect(_vllm_request, _vllm_rows),
  'fireworks': Dialect(_fireworks_request, _fireworks_rows),
}
