"""A server that scores texts with a model of this process, and answers as vLLM or Fireworks do."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from tests.local_server import Answer


def log_probs(policy, parameters, tokens) -> np.ndarray:
  """Log-probs [S, V] of the token after each of S, in float64 from the model's states."""
  width = -(-len(tokens) // 64) * 64
  padded = np.zeros((1, width), np.int32)
  padded[0, : len(tokens)] = tokens
  hidden, unembedding = _states(policy)(
    parameters, padded, np.int32(padded * 0 + np.arange(width)), np.int32(np.arange(width) < len(tokens))[None]
  )
  logits = np.float64(hidden[0, : len(tokens)]) @ np.float64(unembedding)[: policy.vocab_size].T
  logits -= logits.max(-1, keepdims=True)
  return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@functools.cache
def _states(policy):
  return jax.jit(lambda parameters, *rows: policy.apply({}, parameters, *rows)[:2])


class Scorer:
  """What a server answers to each of the two requests, `max_logprobs` at most."""

  def __init__(self, policy, parameters, tokenizer, *, max_logprobs: int = 1000, max_length: int = 10**6):
    self.policy, self.parameters, self.tokenizer = policy, parameters, tokenizer
    self.max_logprobs, self.max_length = max_logprobs, max_length

  def __call__(self, body: dict[str, Any]) -> Answer:
    tokens = body['prompt']
    if len(tokens) + body['max_tokens'] > self.max_length:
      return Answer({'error': f'maximum context length is {self.max_length} tokens'}, status=400)
    if max(body.get('prompt_logprobs', 0), body.get('top_logprobs', 0)) > self.max_logprobs:
      return Answer({'error': f'Requested more than max allowed: {self.max_logprobs}'}, status=400)
    said = log_probs(self.policy, self.parameters, tokens)
    return Answer(self.vllm(body, tokens, said) if 'prompt_logprobs' in body else self.fireworks(body, tokens, said))

  def likeliest(self, row: np.ndarray, k: int, token: int) -> list[int]:
    best = np.argsort(-row, kind='stable')[:k].tolist()
    return best if token in best else [*best, token]

  def vllm(self, body, tokens, said):
    rows: list[Any] = [None]
    for row, token in zip(said[:-1], tokens[1:], strict=True):
      ranks = np.argsort(np.argsort(-row, kind='stable'), kind='stable') + 1
      entry = {
        str(each): {
          'logprob': max(float(row[each]), -9999.0),
          'rank': int(ranks[each]),
          'decoded_token': self.tokenizer.decode([each]),
        }
        for each in sorted(self.likeliest(row, body['prompt_logprobs'], token))
      }
      rows.append(entry)
    choice = {'index': 0, 'text': 'x', 'finish_reason': 'length', 'logprobs': None, 'prompt_logprobs': rows}
    return {'id': 'cmpl-1', 'choices': [choice | {'prompt_token_ids': tokens}], 'usage': {'prompt_tokens': len(tokens)}}

  def fireworks(self, body, tokens, said):
    def entry(token, row):
      return {'token': self.tokenizer.decode([token]), 'token_id': token, 'logprob': float(row[token])}

    content, count = [], body['echo_last']
    for row, token in zip(said[-count - 1 : -1], tokens[-count:], strict=True):
      best = [each for each in self.likeliest(row, body['top_logprobs'], token)][: body['top_logprobs']]
      content.append(entry(token, row) | {'top_logprobs': [entry(each, row) for each in best]})
    drawn = int(said[-1].argmax())
    content.append(entry(drawn, said[-1]) | {'top_logprobs': [entry(drawn, said[-1])]})
    choice = {'index': 0, 'text': 'x', 'finish_reason': 'length', 'logprobs': {'content': content}}
    return {'id': 'x', 'choices': [choice], 'usage': {}}
