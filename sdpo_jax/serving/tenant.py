"""One owner in one request: what sessions and feedback need of the owner's adapters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import concurrent.futures
import contextlib
import functools
import secrets
import time
from typing import Any

import numpy as np

from sdpo_jax.errors import short_repr
from sdpo_jax.learning.scoring import Scored
from sdpo_jax.rollout.results import Completion
from sdpo_jax.serving import request_prompts
from sdpo_jax.serving.call import Call
from sdpo_jax.serving.errors import Deadline, InvalidRequest, VersionConflict
from sdpo_jax.serving.records import AdapterRecord, SampleRecord, Version, VersionTarget
from sdpo_jax.serving.sample_requests import DraftText, SampleOptions, Sampling, finished_text
from sdpo_jax.serving.service_state import ServiceState


class Tenant:
  """One owner in one request. Any thread may call.

  Methods that take an adapter's id raise NotFound alike if the adapter does not exist, was deleted, or belongs to
  another owner.
  """

  def __init__(self, service: ServiceState, owner: str, call: Call):
    """Bind an owner to a request.

    Args:
      service: the state that all owners share.
      owner: the owner of the adapters.
      call: the request.
    """
    self.service, self.owner, self.call = service, owner, call

  def adapter(self, id: str) -> AdapterRecord:
    """Return an adapter."""
    found = self.service.store.adapter(self.owner, id)
    self.service.remember(found.id, self.owner)
    return found

  def version(self, id: str, number: int | None = None) -> Version:
    """Return a version of an adapter; None: its newest."""
    adapter = self.adapter(id)
    return self.service.store.version(self.owner, id, adapter.head if number is None else number)

  @contextlib.contextmanager
  def turn(self, id: str, expected: int | None) -> Iterator[AdapterRecord]:
    """Wait for this request's turn to change the adapter, check its version, and provide it."""
    self.adapter(id)  # Raise NotFound before a queue is made for an unknown id.
    with self.service.turns.of(id, self.call):
      adapter = self.adapter(id)
      if expected is not None and expected != adapter.head:
        raise VersionConflict(
          f'The adapter is at version {adapter.head}, and the request expects {expected}: look at what changed, and '
          'ask again.',
          current=adapter.head,
        )
      yield adapter

  @contextlib.contextmanager
  def spending(self, kind: str, tokens: int) -> Iterator[None]:
    """Spend tokens from the allowance; refund them if the block raises."""
    self.call.spend(kind, tokens)
    try:
      yield
    except BaseException:
      self.call.spend(kind, -tokens)
      raise

  def sample(
    self,
    target: VersionTarget,
    prompt_tokens: Sequence[int],
    *,
    n: int = 1,
    options: SampleOptions | None = None,
    drafts: bool = False,
    messages: Sequence[Mapping[str, Any]] | None = None,
  ) -> Sampling:
    """Draw completions of a prompt; each is stored with all that feedback on it needs.

    Args:
      target: from `resolve`.
      prompt_tokens: from `prompt_of`.
      n: number of completions.
      options: sampling options; None: the defaults.
      drafts: whether to also yield drafts.
      messages: the conversation that the prompt was rendered from; None: it was not a conversation.

    Raises:
      InvalidRequest: an option is not allowed.
      Busy: too many requests wait, or the owner's allowance is used up.
      UserError: as the engine.
    """
    service, most = self.service, self.service.settings.limits.max_samples
    if not 1 <= n <= most:
      raise InvalidRequest(f'n must be between 1 and {most}, not {short_repr(n)}.', field='n')
    options = (options or SampleOptions()).checked(max_completion=service.max_completion, vocab_size=service.vocab_size)
    with self.spending('sampled', n * options.max_tokens):
      job = service.worker.sample(
        target.engine_name,
        prompt_tokens,
        deadline=self.call.deadline,
        owner=self.owner,
        drafts=drafts,
        n=n,
        step=0,
        **vars(options),
      )
    conversation = [dict(message) for message in messages] if messages is not None else None

    def keep(done: Completion) -> SampleRecord:
      self.call.spend('sampled', len(done.tokens) - options.max_tokens)
      now, tokens = service.clock(), done.tokens.tolist()
      sample = SampleRecord(
        id=f'smp-{secrets.token_hex(12)}',
        owner=self.owner,
        adapter=None if target.adapter is None else target.adapter.id,
        version=target.number,
        prompt_tokens=list(prompt_tokens),
        tokens=tokens,
        log_probs=done.model_log_probs,
        temperature=options.temperature,
        messages=conversation,
        text=finished_text(service.tokenizer, tokens, options.stop),
        finish_reason='stop' if done.stopped else 'length',
        created=now,
        expires=now + service.settings.store.sample_ttl_s,
      )
      service.store.keep_sample(sample)
      return sample

    return Sampling(
      job,
      functools.partial(service.worker.cancel, job),
      keep,
      functools.partial(DraftText, service.tokenizer, options.stop),
      self.call,
    )

  def score(
    self,
    target: VersionTarget,
    rows: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    topk: int = 1,
    ids: Sequence[np.ndarray] | None = None,
  ) -> list[Scored]:
    """Return a version's log-probs and entropies of given tokens.

    Args:
      target: from `resolve`.
      rows: the prompt and the tokens after it, for each row; at least one token each.
      topk: how many of the most likely tokens to return at every position; 0: none.
      ids: [T, M] int32 for each row, further tokens whose log-probs to return.

    Raises:
      InvalidRequest: a row is invalid, or `ids` are not as many for every token of every row.
      Busy: as `sample`.
      UserError: a row or topk is too large.
    """
    for number, (prompt, tokens) in enumerate(rows):
      request_prompts.check_tokens(prompt, self.service.vocab_size, f'rows[{number}].prompt')
      request_prompts.check_tokens(tokens, self.service.vocab_size, f'rows[{number}].tokens')
    if not rows:
      return []
    with self.spending('scored', sum(len(prompt) + len(tokens) for prompt, tokens in rows)):
      future = self.service.worker.score(target.engine_name, rows, topk=topk, ids=ids, deadline=self.call.deadline)
    return self.wait(future)

  def wait(self, future: concurrent.futures.Future) -> Any:
    """Wait for a future of the worker and return its result.

    Raises:
      Deadline: the request has no time left.
      Cancelled: the sender does not wait any more.
    """
    left = None if self.call.deadline is None else max(0.0, self.call.deadline - time.monotonic())
    try:
      return self.call.result(future, left)
    except TimeoutError:
      if future.done():
        raise
      future.cancel()
      raise Deadline('The time of the request was over before it was done: nothing was changed.') from None
