"""The state that requests of all owners share: the store, the thread of the engine, tokenization, and events."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import math
import pathlib
import threading
import time
from typing import Any

import numpy as np

from sdpo_jax.config import Config
from sdpo_jax.data import rows
from sdpo_jax.data.sources import read_rows
from sdpo_jax.errors import UserError
from sdpo_jax.learning import requests
from sdpo_jax.learning.requests import Lesson
from sdpo_jax.models import parameters
from sdpo_jax.models.control_tokens import control_strings
from sdpo_jax.models.token_texts import TokenTexts
from sdpo_jax.serving import feedback_request, lessons, records, request_prompts, score_pieces
from sdpo_jax.serving.allowances import Allowances
from sdpo_jax.serving.call import Call
from sdpo_jax.serving.capacity import FairSemaphore, Turns
from sdpo_jax.serving.engine import EngineSettings
from sdpo_jax.serving.engine_settings import engine_settings
from sdpo_jax.serving.errors import InvalidRequest, NotFound
from sdpo_jax.serving.guards import CanaryMeter
from sdpo_jax.serving.peft_transfer import Served
from sdpo_jax.serving.records import OptimizerState, Version
from sdpo_jax.serving.sidecar import Sidecar
from sdpo_jax.serving.store.store import Store
from sdpo_jax.serving.worker import Worker
from sdpo_jax.training.opening import stop_token_ids
from sdpo_jax.training.specs import chat_format

_READS = 4  # The most requests that read versions at once, without the engine: some hold a whole optimizer state.
_OWNERS = 100_000  # The most adapters whose owners are remembered.
KEPT_EVENTS = 256  # The most events that are stored for an adapter.
_ADAPTERS = 4096  # The most adapters with stored events; the least recently changed one is dropped first.


@dataclasses.dataclass(frozen=True)
class AdapterEvent:
  """An event in the life of an adapter, such as a stage of learning."""

  id: int  # Increases with time, even over restarts.
  adapter: str
  kind: str  # queued, scored, stepped, guarded, committed, rejected …
  time: float  # Seconds since the epoch.
  details: Mapping[str, Any]  # As JSON.


class EventLog:
  """The recent events of all adapters. Any thread may call."""

  def __init__(self, clock: Callable[[], float] = time.time):
    """Make an empty log; `clock` returns seconds since the epoch."""
    self._clock, self._changed = clock, threading.Condition()
    self._last = 0  # The id of the newest event: the time in microseconds, to go on after one of another replica.
    self._events: collections.OrderedDict[str, collections.deque[AdapterEvent]] = collections.OrderedDict()

  def add(self, adapter: str, kind: str, details: Mapping[str, Any]) -> AdapterEvent:
    """Add an event with details as JSON, and wake those who wait for one."""
    with self._changed:
      now = self._clock()
      self._last = max(self._last + 1, int(1e6 * now))
      event = AdapterEvent(self._last, adapter, kind, now, details)
      self._events.setdefault(adapter, collections.deque(maxlen=KEPT_EVENTS)).append(event)
      self._events.move_to_end(adapter)
      if len(self._events) > _ADAPTERS:
        self._events.popitem(last=False)
      self._changed.notify_all()
    return event

  def wait(self, adapter: str, last: int | None, timeout: float) -> list[AdapterEvent]:
    """Return the stored events of an adapter with ids above `last` (None: all), after waiting for one if need be.

    It waits up to `timeout` seconds; empty: there is none.
    """
    with self._changed:
      return self._changed.wait_for(
        lambda: [event for event in self._events.get(adapter, ()) if last is None or event.id > last], timeout
      )

  def forget(self, adapter: str) -> None:
    """Drop all events of an adapter."""
    with self._changed:
      self._events.pop(adapter, None)


class ServiceState:
  """The state that all accounts share. Any thread may call."""

  def __init__(
    self,
    store: Store,
    worker: Worker,
    tokenizer: Any,
    config: Config,
    served: Served,
    *,
    positions: int | None = None,
    endpoint: Sidecar | None = None,
  ):
    """Make the state from its parts; `Service.make` makes these from settings.

    Args:
      store: the store of adapters, versions and samples.
      worker: the thread that owns the engine; it must load versions with `load`.
      tokenizer: the tokenizer of the model, with a chat template.
      config: settings.
      served: the shape of the adapters.
      positions: the number of positions of the model; None: unknown.
      endpoint: the external teacher for `ask_endpoint`; None: there is none.
    """
    self.store, self.worker, self.tokenizer, self.config, self.served = store, worker, tokenizer, config, served
    self.settings = config.serve
    self.sizes: EngineSettings = engine_settings(config)
    self.chat = chat_format(config)
    self.positions, self.endpoint, self.clock = positions, endpoint, store.clock
    self.turns, self.events = Turns(), EventLog(store.clock)
    shared = self.settings.http.keys is not None
    # Held while a version is read for a request that is not for the engine, while one is written, and while a feedback
    # is under way.
    self.reading = FairSemaphore(_READS, shared=shared)
    self.commits = FairSemaphore(self.settings.limits.max_commits, shared=shared)
    self.learning = FairSemaphore(4 * self.settings.slots, shared=shared)
    self.parsing = FairSemaphore(1)  # Held while a large body is parsed, since that stops all other threads.
    self.allowances = Allowances(self.settings.limits, store.database)
    self.vocab_size = served.policy.vocab_size
    topk = min(self.sizes.topk, self.vocab_size)
    self.texts = TokenTexts(tokenizer)
    self.tokenizing = threading.Lock()  # Held while encoding, since a tokenizer stores settings of a call in itself.
    longest = dataclasses.replace(config.actor.self_distillation, max_reprompt_len=self.sizes.teacher_buckets[-1])
    self.reprompting = lessons.Reprompting(longest, tokenizer, self.chat, self.tokenizing)
    self.canaries = CanaryMeter(
      worker, tokens=min(config.serve.guards.canary_tokens, self.sizes.response_buckets[-1]), topk=topk
    )
    # Canary prompts of adapters without their own, and answers that abilities are measured on, as token ids.
    self.default_canaries, self.abilities = self._read_canaries(config.serve.guards.canary_file)
    self._owners: collections.OrderedDict[str, str] = collections.OrderedDict()
    # By the name of a version, whose optimizer state it has in the engine; without arrays.
    self._states: collections.OrderedDict[str, OptimizerState] = collections.OrderedDict()
    self._lock = threading.Lock()

  # Versions of the engine.

  def remember(self, adapter: str, owner: str) -> None:
    """Remember who owns an adapter, so that `load` can find its versions."""
    with self._lock:
      self._owners[adapter] = owner
      self._owners.move_to_end(adapter)
      if len(self._owners) > _OWNERS:
        self._owners.popitem(last=False)

  def load(self, engine_name: str) -> Mapping[str, np.ndarray]:
    """Read the arrays of a version or an optimizer state from the store, for an engine that does not have it.

    Raises:
      NotFound: the version does not exist, or its adapter was not passed to `remember`.
    """
    adapter, _, number = records.version_of(engine_name).rpartition('@')
    with self._lock:
      owner = self._owners.get(adapter)
    if owner is None or not number.isdecimal():
      raise NotFound(f'There is no version {engine_name}.')
    version = self.store.version(owner, adapter, int(number))
    if engine_name == version.engine_name:
      return self.store.arrays(version)
    state = self.store.optimizer_state(version)
    self.note_state(version, state)
    return state.arrays

  def note_state(self, version: Version, state: OptimizerState) -> None:
    """Note which optimizer state a version has in the engine from now on."""
    with self._lock:
      self._states[version.engine_name] = dataclasses.replace(state, arrays={})
      self._states.move_to_end(version.engine_name)
      if len(self._states) > _OWNERS:
        self._states.popitem(last=False)

  def state_of(self, version: str) -> OptimizerState:
    """Return whose optimizer state a version has in the engine, by its name; without arrays."""
    with self._lock:
      return self._states.get(version, OptimizerState({}, None, None))

  # Prompts.

  def prompt_of(self, *, limit: int | None = None, **given: Any) -> list[int]:
    """Return the token ids of a prompt in one of three forms, see `request_prompts.tokens_of`.

    Args:
      limit: the most tokens; None: `max_prompt`.
      **given: `messages`, a conversation, rendered by the chat template; or `text`, tokenized without it; or `tokens`,
        ids that are used as they are; and `add_special_tokens`, whether the tokenizer adds its own to a text.

    Raises:
      InvalidRequest: none or several forms are given, the prompt is invalid, empty or too long.
    """
    limit = self.max_prompt if limit is None else limit
    with self.tokenizing:
      return request_prompts.tokens_of(self.tokenizer, self.chat, self.vocab_size, limit, **given)

  def _read_canaries(self, file: str | None) -> tuple[list[list[int]], list[tuple[list[int], list[int]]]]:
    """Return the prompts in a file, and those that have an answer with it; raises UserError for invalid rows."""
    prompts: list[list[int]] = []
    abilities: list[tuple[list[int], list[int]]] = []
    for row in read_rows(file, 'serve.guards.canary_file') if file is not None else ():
      messages, answer = rows.answered(row)
      try:
        prompts.append(self.prompt_of(messages=messages))
      except InvalidRequest as error:
        raise UserError(f'{row.origin}: {error}') from error
      if answer is None:
        continue
      spelled = next((each for each in control_strings(self.tokenizer) if each in answer), None)
      if spelled is not None:
        raise UserError(f"{row.origin}: field 'answer' spells the control token {spelled!r}: leave it out.")
      tokens = self.tokenizer.encode(answer, add_special_tokens=False)
      if len(tokens) > self.max_completion:
        raise UserError(
          f"{row.origin}: field 'answer' has {len(tokens)} tokens, and the limit is {self.max_completion} "
          '(serve.response_buckets): shorten it.'
        )
      abilities.append((prompts[-1], tokens))
    return prompts, abilities

  # The external teacher.

  def ask_endpoint(self, asked: Sequence[Lesson], call: Call) -> list[Lesson]:
    """Return lessons with log-probs of the external teacher; the engine is not blocked meanwhile.

    Args:
      asked: lessons with the teacher's prompts.
      call: the request; waiting ends when it ends.

    Raises:
      InvalidRequest: there is no external teacher.
      UserError: a lesson does not fit the engine.
      TeacherUnavailable: as `Sidecar.score`.
      Cancelled: the client has disconnected.
    """
    if self.endpoint is None:
      raise InvalidRequest(
        'This service has no teacher behind an endpoint: choose another kind of teacher.', field='teacher.kind'
      )
    sizes = self.sizes
    buckets = {'prompt': sizes.prompt_buckets, 'teacher': sizes.teacher_buckets, 'response': sizes.response_buckets}
    for lesson in asked:
      requests.check_lesson(lesson, buckets, sizes.topk, self.vocab_size)
    return lessons.taught(self.endpoint, asked, sizes.topk, call)

  # Properties.

  @property
  def model_name(self) -> str:
    """The name of the model without an adapter in requests; 'base' works, too."""
    return self.settings.model_name or short_name(self.config.model.path)

  @functools.cached_property
  def stop_token_ids(self) -> tuple[int, ...]:
    """The ids of the tokens that end every completion."""
    return tuple(stop_token_ids(self.config, self.tokenizer))

  @functools.cached_property
  def max_prompt(self) -> int:
    """The most tokens of a prompt."""
    return self.sizes.prompt_buckets[-1]

  @functools.cached_property
  def max_completion(self) -> int:
    """The most tokens of a completion."""
    return self.sizes.response_buckets[-1]

  @functools.cached_property
  def max_text(self) -> int:
    """The most tokens of a text to score, prompt and completion together."""
    return score_pieces.longest(self.sizes)

  @property
  def max_logprobs(self) -> int:
    """The most tokens per position whose log-probs the OpenAI-compatible routes return."""
    return min(self.settings.limits.max_logprobs, self.sizes.topk)

  def capabilities(self) -> dict[str, Any]:
    """Return the served model, limits and default settings, as JSON."""
    serve, served = self.settings, self.served
    return {
      'model': {
        'name': self.model_name,
        'vocab_size': self.vocab_size,
        'positions': self.positions,
      },
      'adapter': {
        'rank': served.rank,
        'alpha': None if served.rank is None or served.scale is None else served.scale * served.rank,
        'target_modules': list(served.targets),
        'parameters': sum(math.prod(row.shape) for row in parameters.trainable(served.policy.parameter_table())),
      },
      'tokens': {
        'prompt': self.max_prompt,
        'completion': self.max_completion,
        'text': self.max_text,
        'teacher_prompt': self.sizes.teacher_buckets[-1],
        'topk': self.sizes.topk,
        'logprobs': self.max_logprobs,
      },
      'cartridges': {'places': serve.cartridges, 'slots': serve.cartridge_slots} if serve.cartridges else None,
      'limits': dataclasses.asdict(serve.limits),
      'learning': dataclasses.asdict(serve.learning),
      'guards': {name: value for name, value in vars(serve.guards).items() if name != 'canary_file'},
      'teachers': sorted(
        set(feedback_request.TEACHERS)
        - ({'endpoint'} if self.endpoint is None else set())
        - (set() if self.config.actor.self_distillation.teacher_model else {'model'})
      ),
      'teacher_models': [short_name(name) for name in [self.config.actor.self_distillation.teacher_model] if name],
      'losses': ['jsd_pg', 'sdpo'],
      'samples_kept_s': serve.store.sample_ttl_s,
      'versions_kept': serve.store.keep_versions or None,
      'idle_s': serve.store.idle_s,
      'union_support': self.sizes.union_support,
      'feedback_texts_kept': serve.store.keep_feedback_texts,
      'lora_uri': records.lora_uri('ID', 0).replace('0', 'NUMBER'),
    }


def short_name(path: str) -> str:
  """Return the default name of a model in requests: the last part of its path or hub name."""
  return pathlib.PurePath(path.rstrip('/')).name
