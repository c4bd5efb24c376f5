"""Jobs of OpenAI-compatible requests: how they are validated, sampled and scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import secrets
import time
from typing import Literal

from sdpo_jax.errors import short_repr
from sdpo_jax.learning.scoring import Scored
from sdpo_jax.serving.account import Account
from sdpo_jax.serving.errors import InvalidRequest
from sdpo_jax.serving.records import SampleRecord, VersionTarget
from sdpo_jax.serving.sample_requests import SampleOptions, Sampling
from sdpo_jax.serving.web.openai_logprobs import Position, positions, prompt_positions
from sdpo_jax.serving.web.openai_schemas import DEFAULT_COMPLETION_TOKENS, ChatCompletionRequest, TextCompletionRequest


@dataclasses.dataclass(frozen=True)
class Prompt:
  """One prompt of a request."""

  tokens: Sequence[int]
  text: str = ''  # The text to repeat if `echo` is set.
  special: bool = False  # Whether the text includes special tokens.
  messages: Sequence[Mapping[str, str]] | None = None  # The messages of a chat.


@dataclasses.dataclass(frozen=True)
class CompletionJob:
  """A validated request that has not been started."""

  asked: TextCompletionRequest | ChatCompletionRequest
  target: VersionTarget
  prompts: Sequence[Prompt]
  max_tokens: int | None  # None: the limit of the service.
  echoed: Sequence[int]  # How many of the last tokens of each prompt get log-probs.
  id: str
  created: int  # Seconds since the epoch.

  @property
  def chat(self) -> bool:
    """Whether it came from the route of chat completions."""
    return isinstance(self.asked, ChatCompletionRequest)

  @property
  def echo(self) -> bool:
    """Whether the text of a choice begins with its prompt."""
    return not self.chat and self.asked.echo

  @property
  def reads(self) -> bool:
    """Whether scoring the prompts suffices for the response; see `_reads`."""
    return _reads(self.asked, self.max_tokens)


@dataclasses.dataclass(frozen=True)
class DrawnCompletion:
  """A completion with its log-probs."""

  tokens: Sequence[int]
  text: str
  finish_reason: Literal['stop', 'length']
  sample_id: str | None  # None: it was only scored or not stored, so that feedback cannot refer to it.
  said: Sequence[Position] | None = None  # Log-probs of its tokens; None: not requested.


# Jobs of requests.


def job_of_completion(account: Account, asked: TextCompletionRequest) -> CompletionJob:
  """Make the job of a request to /v1/completions.

  Raises:
    ServiceError: the model does not exist, or a prompt or a number is out of range.
  """
  service, target = account.service, account.resolve(asked.model, asked.cartridges, asked.positions)
  limit = min(DEFAULT_COMPLETION_TOKENS, service.max_completion) if asked.max_tokens is None else asked.max_tokens
  longest, most = _longest(account, asked, limit), service.settings.limits.max_waiting // 2
  if len(asked.prompts) > most:  # Each is a job in the engine, where one key alone gets half of the places.
    raise InvalidRequest(f'At most {most} prompts fit in a request (serve.limits.max_waiting).', field='prompt')
  prompts = []
  for prompt in asked.prompts:
    if isinstance(prompt, str):
      tokens = service.prompt_of(text=prompt, limit=longest, add_special_tokens=asked.add_special_tokens)
      prompts.append(Prompt(tokens, prompt))
    else:
      prompts.append(Prompt(service.prompt_of(tokens=prompt, limit=longest), service.texts.text(prompt), special=True))
  echoed = [0] * len(prompts)
  if asked.topk is not None and (asked.echo or asked.echo_last):
    echoed = [min(len(each.tokens), asked.echo_last or len(each.tokens)) for each in prompts]
  return _job(account, asked, target, prompts, limit, echoed, 'cmpl')


def job_of_chat(account: Account, asked: ChatCompletionRequest) -> CompletionJob:
  """Make the job of a request to /v1/chat/completions; raises as `job_of_completion`."""
  messages = [message.plain() for message in asked.messages]
  tokens = account.service.prompt_of(messages=messages, limit=_longest(account, asked, asked.limit))
  prompt = Prompt(tokens, messages=messages)
  return _job(
    account,
    asked,
    account.resolve(asked.model, asked.cartridges, asked.positions),
    [prompt],
    asked.limit,
    [0],
    'chatcmpl',
  )


def check_scored(job: CompletionJob) -> None:
  """Raise InvalidRequest if tokens would have to be scored behind a cartridge."""
  if job.target.cartridges and (job.asked.topk is not None or job.asked.prompt_logprobs is not None or job.reads):
    raise InvalidRequest(
      'Log-probs behind a cartridge are only those of drawn tokens, in the answers of /v1/continual/completions.',
      field='logprobs' if job.asked.prompt_logprobs is None else 'prompt_logprobs',
    )


def _reads(asked: TextCompletionRequest | ChatCompletionRequest, max_tokens: int | None) -> bool:
  """Return whether scoring the prompts suffices: at most the single most likely next token is requested.

  Clients send such requests for the log-probs of a given text. One forward pass answers them, so their prompts may be
  as long as texts to score.
  """
  scored = asked.prompt_logprobs is not None or (
    isinstance(asked, TextCompletionRequest) and asked.topk is not None and bool(asked.echo or asked.echo_last)
  )
  greedy = max_tokens == 1 and asked.temperature == 0 and asked.n == 1 and not asked.stops and not asked.stop_token_ids
  return max_tokens == 0 or (scored and greedy)


def _longest(account: Account, asked: TextCompletionRequest | ChatCompletionRequest, max_tokens: int | None) -> int:
  """Return the most tokens that a prompt of the request may have."""
  service = account.service
  return max(service.max_prompt, service.max_text) if _reads(asked, max_tokens) else service.max_prompt


def _job(account: Account, asked, target, prompts, max_tokens, echoed, prefix) -> CompletionJob:
  most = account.service.max_logprobs
  for field, kind, count in (('prompt_logprobs', 'prompt', asked.prompt_logprobs), ('logprobs', 'sample', asked.topk)):
    if count is not None and not 0 <= count <= most:
      raise InvalidRequest(
        f'Requested {kind} logprobs of {"all tokens" if count < 0 else short_repr(count)}, which is greater than max '
        f'allowed: {most} (serve.limits.max_logprobs and serve.topk).',
        field=field,
      )
  return CompletionJob(
    asked, target, prompts, max_tokens, echoed, f'{prefix}-{secrets.token_hex(12)}', int(time.time())
  )


# Drawing.


def start(account: Account, job: CompletionJob, *, drafts: bool) -> list[Sampling]:
  """Start sampling completions of all prompts.

  Raises:
    ServiceError: a prompt cannot be sampled from; all others are cancelled.
  """
  asked, begun = job.asked, []
  options = dataclasses.replace(SampleOptions.of(asked), max_tokens=job.max_tokens, stop=asked.stops)
  try:
    for prompt in job.prompts:
      more = {'drafts': drafts, 'messages': prompt.messages, 'store': asked.store}
      sampling = account.sample(job.target, prompt.tokens, n=asked.n, options=options, **more)
      begun.append(sampling)
  except BaseException:
    cancel(begun)
    raise
  return begun


def cancel(begun: Sequence[Sampling]) -> None:
  """Cancel what `start` has started; finished completions are not affected."""
  for sampling in begun:
    sampling.cancel()


def drawn_of(
  account: Account, job: CompletionJob, prompt: Prompt, samples: Sequence[SampleRecord]
) -> list[DrawnCompletion]:
  """Convert samples of a prompt to `DrawnCompletion`, with the log-probs of their tokens if requested."""
  topk = job.asked.topk
  found: Sequence[Scored | None] = [None] * len(samples)
  if topk:
    found = account.score(job.target, [(prompt.tokens, sample.tokens) for sample in samples], topk=topk)
  drawn = []
  for sample, scored in zip(samples, found, strict=True):
    said = None if topk is None else positions(sample.tokens, sample.log_probs.tolist(), scored)
    drawn.append(DrawnCompletion(sample.tokens, sample.text, sample.finish_reason, sample.id or None, said))
  return drawn


# Reading.


def said_of_prompts(account: Account, job: CompletionJob) -> list[list[Position]]:
  """Return the log-probs of the tokens of each prompt; empty lists if none were requested."""
  if job.asked.prompt_logprobs is None and not any(job.echoed):
    return [[] for _ in job.prompts]
  # The first token of a prompt has no log-prob.
  rows = [(prompt.tokens[:1], prompt.tokens[1:]) for prompt in job.prompts if len(prompt.tokens) > 1]
  # With the largest K, to know the ranks of tokens beyond the requested ones.
  found = iter(account.score(job.target, rows, topk=account.service.max_logprobs))
  return [prompt_positions(each.tokens, next(found) if len(each.tokens) > 1 else None) for each in job.prompts]


def read(account: Account, job: CompletionJob) -> tuple[list[list[Position]], list[DrawnCompletion]]:
  """Return the log-probs of each prompt and its most likely next token, for a job that `reads`.

  There is no next token if none was asked for, or if a prompt is as long as a text may be.
  """
  if job.max_tokens == 0 or any(len(prompt.tokens) >= account.service.max_text for prompt in job.prompts):
    return said_of_prompts(account, job), [DrawnCompletion((), '', 'length', None, ())] * len(job.prompts)
  service = account.service
  # Append any token, to get the scores at the position after the prompt.
  rows = [(prompt.tokens[:1], [*prompt.tokens[1:], 0]) for prompt in job.prompts]
  said, drawn = [], []
  for prompt, scored in zip(job.prompts, account.score(job.target, rows, topk=service.max_logprobs), strict=True):
    token = int(scored.top_ids[-1, 0])
    found = prompt_positions([*prompt.tokens, token], scored, last=float(scored.top_log_probs[-1, 0]))
    said.append(found[:-1])
    end = 'stop' if token in service.stop_token_ids else 'length'
    drawn.append(DrawnCompletion([token], service.texts.text([token], special=False), end, None, found[-1:]))
  return said, drawn
