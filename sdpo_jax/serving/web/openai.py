"""OpenAI-compatible routes: completions, chat completions and models, with the log-probs of vLLM and Fireworks.

Every choice has a `sample_id`, to which feedback can refer. `model` is the name or id of an adapter, with `@` and a
number for a version other than the newest.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
import contextlib
import itertools
from typing import Any

import pydantic_core
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sdpo_jax.files import as_json
from sdpo_jax.models.token_texts import TokenTexts
from sdpo_jax.serving.account import Account
from sdpo_jax.serving.errors import InvalidRequest
from sdpo_jax.serving.records import AdapterRecord
from sdpo_jax.serving.sample_requests import SampleDone
from sdpo_jax.serving.store.database import ALL
from sdpo_jax.serving.web import events, openai_jobs, openai_logprobs
from sdpo_jax.serving.web.endpoints import JSON, handled, parsing
from sdpo_jax.serving.web.events import ServerSentEvent
from sdpo_jax.serving.web.openai_jobs import CompletionJob, DrawnCompletion, job_of_chat, job_of_completion
from sdpo_jax.serving.web.openai_logprobs import Position
from sdpo_jax.serving.web.openai_schemas import ChatCompletionRequest, TextCompletionRequest, parse
from sdpo_jax.serving.web.pages import MOST_LISTED, PAGED, limit_of, page

# The index of a choice, its new text, the completion once it is finished, and the log-probs of its prompt.
Part = tuple[int, str, DrawnCompletion | None, Sequence[Position]]

# Answers.


def answer(account: Account, job: CompletionJob) -> dict[str, Any]:
  """Sample or score everything that a request asks for, and return the response."""
  said, drawn = _done(account, job)
  texts = account.service.texts
  choices = [choice(texts, job, index, each, said[index // job.asked.n]) for index, each in enumerate(drawn)]
  body = head_of(job)
  body |= {'choices': choices, 'usage': _usage(job, drawn)}
  if job.chat and job.asked.prompt_logprobs is not None:
    body['prompt_logprobs'] = openai_logprobs.prompt_shape(texts, said[0], job.asked.prompt_logprobs)
  if job.chat and job.asked.return_token_ids:
    body['prompt_token_ids'] = list(job.prompts[0].tokens)
  return body


def _done(account: Account, job: CompletionJob) -> tuple[list[list[Position]], list[DrawnCompletion]]:
  """Return the log-probs of every prompt, and all completions in the order of the choices."""
  if job.reads:
    said, drawn = openai_jobs.read(account, job)
    return said, [each for each in drawn for _ in range(job.asked.n)]
  begun = openai_jobs.start(account, job, drafts=False)
  try:
    said = openai_jobs.said_of_prompts(account, job)
    drawn = []
    for prompt, sampling in zip(job.prompts, begun, strict=True):
      drawn += openai_jobs.drawn_of(account, job, prompt, sampling.result())
  finally:
    openai_jobs.cancel(begun)
  return said, drawn


def head_of(job: CompletionJob, kind: str | None = None) -> dict[str, Any]:
  """Return the fields that every response has, such as the exact version; `kind`: what it is, None: a whole one."""
  return {
    'id': job.id,
    'object': kind or ('chat.completion' if job.chat else 'text_completion'),
    'created': job.created,
    'model': job.asked.model,
    'system_fingerprint': job.target.uri,  # The exact version that drew the tokens.
  }


def _usage(job: CompletionJob, drawn: Sequence[DrawnCompletion]) -> dict[str, int]:
  prompt, completion = sum(len(each.tokens) for each in job.prompts), sum(len(each.tokens) for each in drawn)
  return {'prompt_tokens': prompt, 'completion_tokens': completion, 'total_tokens': prompt + completion}


def choice(
  texts: TokenTexts, job: CompletionJob, index: int, drawn: DrawnCompletion, said: Sequence[Position] = ()
) -> dict[str, Any]:
  """Return the JSON of a finished choice, with log-probs of its prompt if these were requested."""
  choice: dict[str, Any] = {'index': index}
  prompt = job.prompts[index // job.asked.n]
  if job.chat:
    choice['message'] = {'role': 'assistant', 'content': drawn.text, 'refusal': None}
  else:
    choice['text'] = prompt.text + drawn.text if job.echo else drawn.text
  choice['logprobs'] = _logprobs(texts, job, index, drawn, said)
  choice |= _ending(job, index, drawn)
  if not job.chat and job.asked.prompt_logprobs is not None:
    choice['prompt_logprobs'] = openai_logprobs.prompt_shape(texts, said, job.asked.prompt_logprobs)
  return choice


def _ending(job: CompletionJob, index: int, drawn: DrawnCompletion) -> dict[str, Any]:
  """Return the fields of a choice that are only known when it is finished."""
  found: dict[str, Any] = {'finish_reason': drawn.finish_reason, 'sample_id': drawn.sample_id}
  if job.asked.return_token_ids:
    found['token_ids'] = list(map(int, drawn.tokens))
    if not job.chat:
      found['prompt_token_ids'] = list(job.prompts[index // job.asked.n].tokens)
  return found


def _logprobs(
  texts: TokenTexts, job: CompletionJob, index: int, drawn: DrawnCompletion, said: Sequence[Position]
) -> dict[str, Any] | None:
  """Return the log-probs of a choice in the requested format; None if none were requested."""
  if job.asked.topk is None:
    return None
  prompt, echoed = job.prompts[index // job.asked.n], job.echoed[index // job.asked.n]
  whole = [*said[len(prompt.tokens) - echoed :], *drawn.said] if echoed else drawn.said
  if job.chat or job.asked.content_logprobs:
    return openai_logprobs.content_shape(texts, whole, job.asked.topk)
  offsets = texts.offsets(prompt.tokens, special=prompt.special) if echoed else []
  start = len(prompt.text) if job.echo else 0
  # The text does not show special tokens that the tokenizer puts before it.
  offsets = [min(each, start) for each in offsets] + texts.offsets(drawn.tokens, start, special=False)
  return openai_logprobs.completion_shape(texts, whole, job.asked.topk, offsets)


# Streams.


def chunks(account: Account, job: CompletionJob) -> Iterator[dict[str, Any]]:
  """Yield the chunks of a response while it is sampled; with log-probs, each choice is sent once it is finished."""
  with contextlib.closing(_parts(account, job)) as parts:
    first = next(parts)  # Before anything is sent, so that a refused request gets a proper status code.
    yield from _chunks_of(account, job, itertools.chain([first], parts))


def _chunks_of(account: Account, job: CompletionJob, parts: Iterable[Part]) -> Iterator[dict[str, Any]]:
  drawn: list[DrawnCompletion] = []
  for index in range(len(job.prompts) * job.asked.n):
    if job.chat:
      yield _chunk(job, index, '', first=True)
    elif job.echo and job.asked.topk is None:
      yield _chunk(job, index, job.prompts[index // job.asked.n].text)
  for index, text, done, said in parts:
    if done is not None and job.asked.topk is not None:
      before = job.prompts[index // job.asked.n].text if job.echo else ''
      yield _chunk(job, index, before + done.text, _logprobs(account.service.texts, job, index, done, said))
    elif text and job.asked.topk is None:
      yield _chunk(job, index, text)
    if done is not None:
      drawn.append(done)
      choice = {'index': index, **({'delta': {}} if job.chat else {'text': ''}), 'logprobs': None}
      yield _chunk_head(job) | {'choices': [choice | _ending(job, index, done)]}
  if job.asked.include_usage:
    yield _chunk_head(job) | {'choices': [], 'usage': _usage(job, drawn)}


def _parts(account: Account, job: CompletionJob) -> Generator[Part, None, None]:
  """Yield the parts of a response as they are sampled."""
  if job.reads:
    said, drawn = openai_jobs.read(account, job)
    for index in range(len(job.prompts) * job.asked.n):
      place = index // job.asked.n
      yield index, drawn[place].text, drawn[place], said[place]
    return
  begun = openai_jobs.start(account, job, drafts=job.asked.topk is None)
  try:
    said = openai_jobs.said_of_prompts(account, job)
    for place, (prompt, sampling) in enumerate(zip(job.prompts, begun, strict=True)):
      for event in sampling:
        done = None
        if isinstance(event, SampleDone):
          [done] = openai_jobs.drawn_of(account, job, prompt, [event.sample])
        yield place * job.asked.n + event.index, event.delta, done, said[place]
  finally:
    openai_jobs.cancel(begun)


def _chunk_head(job: CompletionJob) -> dict[str, Any]:
  head = head_of(job, 'chat.completion.chunk' if job.chat else 'text_completion')
  return head | {'usage': None} if job.asked.include_usage else head


def _chunk(
  job: CompletionJob, index: int, text: str, logprobs: Mapping[str, Any] | None = None, *, first: bool = False
) -> dict[str, Any]:
  delta = {'role': 'assistant', 'content': text} if first else {'content': text}
  choice = {'index': index, **({'delta': delta} if job.chat else {'text': text})}
  return _chunk_head(job) | {'choices': [choice | {'logprobs': logprobs, 'finish_reason': None}]}


def _events(account: Account, job: CompletionJob) -> Iterator[ServerSentEvent]:
  for chunk in chunks(account, job):
    yield ServerSentEvent(chunk)
  yield ServerSentEvent('[DONE]')


# Models.


def model_entry(name: str, created: float, **more: Any) -> dict[str, Any]:
  """Return the description of a model, made at a time in seconds since the epoch."""
  return {'id': name, 'object': 'model', 'created': int(created), 'owned_by': 'sdpo_jax', **more}


def models(account: Account, after: str | None = None, limit: int = ALL) -> dict[str, Any]:
  """Return the list of the model and the owner's adapters, the oldest first, or a page of it.

  Each adapter is there as NAME and as NAME@VERSION of its newest version.

  Args:
    account: the account of the client.
    after: the last model of the page before; None: there is none.
    limit: the most models of the page.

  Raises:
    InvalidRequest: there is no model `after`.
  """
  base = account.service.model_name
  found = [model_entry(base, 0)] if after is None else []
  last, _, version = (base if after is None else after).partition('@')
  rows = account.adapters(None if last == base else last, named=True, limit=limit + 1)
  if last != base and not version:  # Its newest version is next.
    rows.insert(0, account.service.store.by_name(account.owner, last))
  for adapter in rows:
    names = (adapter.name, f'{adapter.name}@{adapter.head}')[adapter.name == last :]
    found += [_adapter_model(name, adapter, adapter.head, base) for name in names]
  return {'object': 'list', **page('data', found, limit, [each['id'] for each in found])}


def _adapter_model(name: str, adapter: AdapterRecord, version: int, base: str) -> dict[str, Any]:
  return model_entry(name, adapter.created, parent=base, adapter=adapter.id, version=version)


# Routes.


async def _answer(request: Request, kind: type, job_of: Callable[[Account, Any], CompletionJob]) -> Response:
  account: Account = request.state.account
  content = await request.body()

  def prepare() -> CompletionJob:
    with parsing(account, content):
      asked = parse(kind, _json(content))
    job = job_of(account, asked)
    openai_jobs.check_scored(job)
    return job

  job = await run_in_threadpool(prepare)
  if job.asked.stream:
    return await events.stream(request, _events(account, job))
  # Serialize there, too: a large response would block the event loop here.
  return await run_in_threadpool(lambda: Response(as_json(answer(account, job)), media_type=JSON))


def _json(content: bytes) -> Any:
  """Parse the body of a request.

  Raises:
    InvalidRequest: it is not JSON, or holds invalid Unicode.
  """
  try:
    return pydantic_core.from_json(content, allow_inf_nan=False)
  except ValueError:
    raise InvalidRequest('The body is not JSON: send one JSON object.') from None


@handled('POST', '/v1/completions', body=TextCompletionRequest)
async def completions(request: Request) -> Response:
  """Continue prompts, as OpenAI's completions do; stream=true sends chunks as server-sent events."""
  return await _answer(request, TextCompletionRequest, job_of_completion)


@handled('POST', '/v1/chat/completions', body=ChatCompletionRequest)
async def chat_completions(request: Request) -> Response:
  """Answer a conversation, as OpenAI's chat completions do; stream=true sends chunks as server-sent events."""
  return await _answer(request, ChatCompletionRequest, job_of_chat)


# Whole by default, as OpenAI's, whose clients ask for no second page.
_LISTED = PAGED | {'limit': f'The most entries of a page, up to {MOST_LISTED}; by default all.'}


@handled('GET', '/v1/models', query=_LISTED)
async def list_models(request: Request) -> Response:
  """List the model and your adapters, by name and by name@version."""
  query = request.query_params
  limit = limit_of(query) if 'limit' in query else ALL
  found = await run_in_threadpool(lambda: as_json(models(request.state.account, query.get('after'), limit)))
  return Response(found, media_type=JSON)


@handled('GET', '/v1/models/{model}')
async def get_model(request: Request) -> Response:
  """Describe the model without an adapter, an adapter or a cartridge, or a version of one."""
  account, name = request.state.account, request.path_params['model']

  def describe() -> dict[str, Any]:
    target = account.resolve(name)
    if target.adapter is None and len(target.cartridges) == 1:
      [target] = target.cartridges
    if target.adapter is None:
      return model_entry(name, 0)
    return _adapter_model(name, target.adapter, target.number, account.service.model_name)

  return JSONResponse(await run_in_threadpool(describe))


ROUTES = [completions, chat_completions, list_models, get_model]
