"""A writer of feedback behind an OpenAI-compatible endpoint, asked about some completions at a time.

What it does wrong costs the completions that it concerns, which keep what their grader said.
"""

from __future__ import annotations

from collections.abc import Sequence
import random
import threading

from sdpo_jax import liveness
from sdpo_jax.config import SelfDistillationConfig
from sdpo_jax.distributed.stopping import NEVER, Stop, StoppedError
from sdpo_jax.environments import chat_endpoint, json_server
from sdpo_jax.environments.json_server import Fault
from sdpo_jax.teacher.feedback import Asked, UnwrittenError, read

SECTION = 'actor.self_distillation.feedback_endpoint'
STOP_S = 0.5  # Between two questions whether the run is to stop, while answers are waited for.


class FeedbackEndpoint:
  """The writer that the settings name; holds connections until `close()`."""

  def __init__(self, config: SelfDistillationConfig):
    """Connect to nothing yet.

    Args:
      config: settings, with a `feedback_endpoint`.

    Raises:
      UserError: no address, or an environment variable that is not there.
    """
    settings = config.feedback_endpoint
    url, secrets = chat_endpoint.read_address(settings.url, f'{SECTION}.url')
    key = json_server.read_secret(settings.api_key_env, f'{SECTION}.api_key_env', required=True)
    self._config, self._settings = config, settings
    self._server = json_server.JsonServer(
      url,
      authorization=f'Bearer {key}' if key else '',
      secrets=secrets,
      connections=settings.concurrency,
      setting=f'{SECTION}.url',
    )
    self._closing = threading.Event()

  def __enter__(self) -> FeedbackEndpoint:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def close(self) -> None:
    """Lets go of connections; what is under way is not tried again."""
    self._closing.set()
    self._server.close()

  @property
  def public_url(self) -> str:
    """The address, without what may be secret of it."""
    return self._server.public_url

  def write(self, asked: Sequence[Asked], stop: Stop = NEVER) -> list[str | UnwrittenError]:
    """Return the feedback on each completion, or why there is none.

    Args:
      asked: [M].
      stop: whether the run is to stop, which does not wait for answers.

    Raises:
      StoppedError: as `stop` said.
    """
    work = _Work(len(asked), patience=self._settings.concurrency)

    def ask_about() -> None:
      while (place := work.next()) is not None:
        try:
          work.add(place, self._ask(asked[place], work))
        except BaseException as error:  # It belongs to the thread that waits.
          work.add(place, error)

    # Threads that do not keep the process from ending.
    for _ in range(min(self._settings.concurrency, len(asked))):
      threading.Thread(target=ask_about, name='feedback-endpoint', daemon=True).start()
    try:
      while not work.wait(STOP_S):
        if stop.asked():
          raise StoppedError
    finally:
      work.given_up.set()
    for found in work.found.values():
      if isinstance(found, BaseException) and not isinstance(found, UnwrittenError):
        raise found
    return [work.found[place] for place in range(len(asked))]

  def _ask(self, asked: Asked, work: _Work) -> str:
    """Return what one answer says; raises UnwrittenError once no further attempt helps."""
    body = {
      'model': self._settings.model,
      'messages': asked.messages,
      'temperature': self._config.feedback_temperature,
      'max_tokens': self._config.feedback_max_tokens,
    }
    for attempt in range(self._settings.retries + 1):
      if work.given_up.is_set() or self._closing.is_set():
        raise UnwrittenError('the server was given up, as none of the requests before was answered')
      try:
        answer = self._server.ask(
          body, self._settings.timeout_s, name='feedback-endpoint-post', on_answer=work.answered.set
        )
        said, _ = chat_endpoint.answered(answer)
        liveness.progress()
        return read(said)
      except Fault as fault:
        if not fault.again or attempt == self._settings.retries:
          work.count_failed()
          raise UnwrittenError(self._server.redacted(str(fault))) from fault
        work.given_up.wait(json_server.pause_s(attempt, fault.after_s, random.random()))
    raise AssertionError('The last attempt returns or raises.')


class _Work:
  """What has become of the completions of a call.

  A server that has answered nothing is given up, so that a batch does not wait for it hundreds of times.
  """

  def __init__(self, count: int, patience: int):
    self.found: dict[int, str | BaseException] = {}
    self.answered = threading.Event()  # There was an answer of any kind.
    self.given_up = threading.Event()
    self._waiting, self._count = iter(range(count)), count
    self._failed, self._patience = 0, patience
    self._changed = threading.Condition()

  def next(self) -> int | None:
    """Return a completion to ask about; None if there is none."""
    with self._changed:
      return next(self._waiting, None)

  def add(self, place: int, found: str | BaseException) -> None:
    with self._changed:
      self.found[place] = found
      self._changed.notify()

  def count_failed(self) -> None:
    """Note a completion that has used all its attempts."""
    with self._changed:
      self._failed += 1
      if self._failed >= self._patience and not self.answered.is_set():
        self.given_up.set()

  def wait(self, seconds: float) -> bool:
    """Return whether nothing is outstanding; after so many seconds at most."""
    with self._changed:
      return self._changed.wait_for(lambda: len(self.found) == self._count, seconds)
