"""Messages of a prompt pool by a model behind an OpenAI-compatible endpoint, with several requests at a time.

A round is drawn as a whole or not at all: a server that fails ends the command, which goes on from the last round when
it is repeated. What the server or its model refuses to write is left out and counted, as long as it writes the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import threading
from typing import Any

import numpy as np

from sdpo_jax.config import FeedbackEndpointConfig
from sdpo_jax.distributed.stopping import NEVER
from sdpo_jax.environments import chat_endpoint, json_server
from sdpo_jax.environments.json_server import Fault
from sdpo_jax.environments.outcomes import encodable
from sdpo_jax.errors import UserError
from sdpo_jax.inference.synthesis import Ask, SynthesisOptions, WrittenMessage
from sdpo_jax.teacher.asking import EndpointClient, ask_all

FLAGS = '--endpoint_'
LIMITS = {'most_bytes': 2**26, 'most_values': 2**16}  # Of an answer, which may have hundreds of messages.
# Statuses that may be about the text of a single request: too long, or against rules. Others concern all of them.
REFUSALS = (400, 403, 413, 422, 451)
ENDS = ('stop', 'length', 'content_filter')  # Valid values of finish_reason; 'abort' of vLLM is worth another attempt.


class EndpointWriter(EndpointClient):
  """Client of the endpoint that the flags name; a `synthesis.Writer`."""

  def __init__(self, settings: FeedbackEndpointConfig, options: SynthesisOptions, stop: Sequence[str] = ()):
    """Prepare the client; no connection is made yet.

    Args:
      settings: values of the flags that begin with `FLAGS`.
      options: options of the pool.
      stop: texts that end a message.

    Raises:
      UserError: no model is named, or as in `EndpointClient`.
    """
    super().__init__(settings, FLAGS, chat_endpoint.PATH)
    if not settings.model.strip():
      raise UserError(f'{FLAGS}model is empty: set it to the name of the writing model at the endpoint.')
    self.model, self._options = settings.model, options
    self._body = {'model': self.model, 'temperature': options.temperature, 'max_tokens': options.max_tokens}
    self._body |= {'stop': list(stop)} if stop else {}
    self._wrote = False  # Whether it has written any message.
    self._refusal: Fault | None = None  # The last one with an HTTP status.

  def draw(self, asks: Sequence[Ask], round_number: int) -> list[WrittenMessage]:
    """Return the messages that answer the requests, `options.per_window` for each, in order.

    Raises:
      UserError: there is no usable answer to one of them, or every one is refused and none was written before.
    """
    given_up, threads = threading.Event(), self._settings.concurrency

    def ask(place: int) -> list[WrittenMessage]:
      try:
        return self._write(asks[place], [self._options.seed, round_number, place], given_up)
      except Fault as fault:
        raise self._error(fault) from fault

    found = ask_all(ask, len(asks), threads=threads, name='endpoint-writer', stop=NEVER, given_up=given_up)
    messages = [message for each in found for message in each]
    self._wrote = self._wrote or not all(message.refused for message in messages)
    if self._refusal is not None and not self._wrote:
      raise self._error(self._refusal)
    return messages

  def _write(self, ask: Ask, place: list[int], given_up: threading.Event) -> list[WrittenMessage]:
    """Return the messages for a request; those that an answer lacks, as of servers without `n`, are asked for again."""
    found: list[WrittenMessage] = []
    while (missing := self._options.per_window - len(found)) > 0:
      [seed] = np.random.SeedSequence([*place, len(found)]).generate_state(1)
      try:  # Some servers take seeds of 31 bits.
        body = {**self._body, 'messages': ask.messages, 'n': missing, 'seed': int(seed) >> 1}
        found += self._ask_again(body, read, given_up, name='endpoint-writer-post', **LIMITS)
      except Fault as fault:
        if fault.status not in REFUSALS:
          raise
        self._refusal = fault
        found += [WrittenMessage('', stopped=False, refused=f'refused with status {fault.status}')] * missing
    return found[: self._options.per_window]

  def _error(self, fault: Fault) -> UserError:
    return UserError(
      f'{self.public_url} ({FLAGS}url) has not written the messages of a round: {self._server.redacted(str(fault))}. '
      f'Check that it serves {self.model!r}, then start the same command again, which goes on after the last round.'
    )


def read(answer: Any) -> list[WrittenMessage]:
  """Return the messages in a chat completion.

  Raises:
    Fault: it holds none, or one has no valid finish_reason; another attempt may help.
  """
  choices = answer.get('choices') if isinstance(answer, Mapping) else None
  if not isinstance(choices, list) or not choices:
    raise Fault(f"its answer has no 'choices': {json_server.quoted(answer)}", again=True)
  return list(map(_message, choices))


def _message(choice: Any) -> WrittenMessage:
  message = choice.get('message') if isinstance(choice, Mapping) else None
  if not isinstance(message, Mapping) or choice.get('finish_reason') not in ENDS:
    wrong = json_server.quoted(choice)
    raise Fault(f'a choice of its answer has no message with a finish_reason of {", ".join(ENDS)}: {wrong}', again=True)
  content, end = message.get('content'), choice['finish_reason']  # No content if it was refused, or all was thought.
  refused = 'refused by the model' if end == 'content_filter' or message.get('refusal') else ''
  return WrittenMessage(encodable(content) if isinstance(content, str) else '', end == 'stop', refused)
