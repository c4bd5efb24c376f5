"""Feedback written by a model behind an OpenAI-compatible endpoint, with several requests at a time.

If a request fails, the completion keeps the feedback of its grader.
"""

from __future__ import annotations

from collections.abc import Sequence
import threading

from sdpo_jax.config import SelfDistillationConfig
from sdpo_jax.distributed.stopping import NEVER, Stop
from sdpo_jax.environments import chat_endpoint
from sdpo_jax.environments.json_server import Fault
from sdpo_jax.teacher.asking import EndpointClient, ask_all
from sdpo_jax.teacher.written_feedback import UnwrittenError, WriterRequest, read

SECTION = 'actor.self_distillation.feedback_endpoint'


class FeedbackEndpoint(EndpointClient):
  """Client of the configured feedback endpoint."""

  def __init__(self, config: SelfDistillationConfig):
    """Prepare the client; no connection is made yet.

    Args:
      config: settings, with a `feedback_endpoint`.

    Raises:
      UserError: as in `EndpointClient`.
    """
    super().__init__(config.feedback_endpoint, f'{SECTION}.', chat_endpoint.PATH)
    self._config = config

  def write(self, asked: Sequence[WriterRequest], stop: Stop = NEVER) -> list[str | UnwrittenError]:
    """Return the feedback on each completion, or the reason why there is none.

    Args:
      asked: [M].
      stop: tells whether the run should stop; if so, this method stops waiting for responses.

    Raises:
      StoppedError: the run should stop.
    """
    work = _Work(patience=self._settings.concurrency)

    def ask(place: int) -> str | UnwrittenError:
      try:
        return self._ask(asked[place], work)
      except UnwrittenError as error:
        return error

    threads = self._settings.concurrency
    return ask_all(ask, len(asked), threads=threads, name='feedback-endpoint', stop=stop, given_up=work.given_up)

  def _ask(self, asked: WriterRequest, work: _Work) -> str:
    """Return the feedback on one completion; raise UnwrittenError once retries cannot help."""
    body = {
      'model': self._settings.model,
      'messages': asked.messages,
      'temperature': self._config.feedback_temperature,
      'max_tokens': self._config.feedback_max_tokens,
    }
    options = {'name': 'feedback-endpoint-post', 'on_answer': work.answered.set}
    try:
      said, _ = self._ask_again(body, chat_endpoint.answered, work.given_up, **options)
    except Fault as fault:
      work.count_failed()
      raise UnwrittenError(self._server.redacted(str(fault))) from fault
    return read(said)


class _Work:
  """Record of whether the server has answered anything during one call of `write`.

  A server that answers nothing is given up after a few failures, so that a batch does not wait hundreds of times.
  """

  def __init__(self, patience: int):
    self.answered = threading.Event()  # Set by a response of any kind.
    self.given_up = threading.Event()
    self._failed, self._patience = 0, patience
    self._lock = threading.Lock()

  def count_failed(self) -> None:
    """Count a completion for which all attempts have failed, and give up the server after too many."""
    with self._lock:
      self._failed += 1
      if self._failed >= self._patience and not self.answered.is_set():
        self.given_up.set()
