"""Routes of Tokasaurus with cartridges, for the clients that are published with them; off unless a tenant is set.

They are below `TOKASAURUS`, need no key, and act as one owner (`serve.tokasaurus_tenant`) for programs on this machine
alone. The body of a batch's answer is a pickle of plain lists and dicts, since those clients unpickle it; nothing is
unpickled here. Nor are samples stored: no answer has an id to which feedback could refer.

They differ from Tokasaurus in this:
- What it ignores, and what cannot be done here, is refused by name, unless it changes nothing. null is as if absent.
- A cartridge is one of the tenant's; a slash in its id stands for a hyphen. Its source is not read: a name means the
  newest version that was uploaded (and NAME@NUMBER one that never changes), so `force_redownload` needs nothing done.
- Messages are rendered by the chat template of the service, also behind a cartridge.
- Log-probs of sampled tokens are those at the temperature of the request, or at 1 if it is 0, as there. Those of other
  tokens are known at 1 alone, and not behind a cartridge.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
import dataclasses
import json
import pickle
from typing import Any, Literal

import numpy as np
from pydantic import Field
from starlette.routing import Route

from sdpo_jax.errors import short_repr
from sdpo_jax.rollout.results import Completion
from sdpo_jax.serving.account import Account
from sdpo_jax.serving.errors import InvalidRequest, NotFound
from sdpo_jax.serving.records import BASE_NAME, VersionTarget
from sdpo_jax.serving.sample_requests import Sampling, finished_text
from sdpo_jax.serving.web import openai, openai_jobs, openai_logprobs, openai_schemas
from sdpo_jax.serving.web.endpoints import Incoming, Reply, route
from sdpo_jax.serving.web.error_responses import TOKASAURUS
from sdpo_jax.serving.web.openai_jobs import CompletionJob, DrawnCompletion
from sdpo_jax.serving.web.schemas import Listed, Name, RequestBody, one_of

_PICKLE = 'application/octet-stream'
# Parameters of OpenAI's schemas that Tokasaurus or these routes do not have.
_UNSERVED = {'stream', 'prompt_logprobs', 'return_token_ids', 'echo', 'echo_last', 'top_p', 'top_k', 'min_p'}
# Arrays of `system_fingerprint`, for every choice: [T], [T, K] and [T, K].
_PACKED = {'packed_chosen_logprobs': '<f4', 'packed_topk_indices': '<i4', 'packed_topk_logprobs': '<f4'}


class CartridgeReference(RequestBody):
  """A cartridge of the tenant."""

  id: Name = Field(description='Its name or id, optionally with @ and a version number.')
  source: Literal['wandb', 'local', 'huggingface'] = Field('wandb', description='Without effect: none is read.')
  force_redownload: bool = Field(False, description='Without effect: the newest version is read in any case.')


class _CartridgeRequest(RequestBody):
  """The parameters that OpenAI's requests do not have, or have otherwise."""

  cartridges: list[CartridgeReference] = Field([], max_length=64)
  logprobs_in_fingerprint: bool = Field(False, description='Whether log-probs are in system_fingerprint, as arrays.')


class CartridgeCompletion(_CartridgeRequest, openai_schemas.TextCompletionRequest):
  """A text or token ids to continue behind cartridges."""


class CartridgeChat(_CartridgeRequest, openai_schemas.ChatCompletionRequest):
  """A conversation to answer behind cartridges."""

  temperature: float = Field(0.7, ge=0, le=2)
  apply_chat_template_overrides: dict[str, Any] = Field({}, description='Variables of the template, as they are here.')

  _one_limit = one_of('max_tokens', 'max_completion_tokens')


class CartridgeChats(RequestBody):
  """Conversations to answer at once: all of them, or none."""

  requests: Listed[CartridgeChat] = Field(max_length=4096)


# Requests.


def _job(account: Account, asked: CartridgeCompletion | CartridgeChat) -> CompletionJob:
  """Make the job of a request; raises InvalidRequest if something in it cannot be done here."""
  for name in sorted(asked.model_fields_set & _UNSERVED):
    if getattr(asked, name) != type(asked).model_fields[name].default:
      raise InvalidRequest(f'{name} is not supported here: leave it out.')
  if asked.model.lower() not in ('default', account.service.model_name.lower()):
    raise InvalidRequest(f'model must be {account.service.model_name}, or default: there is no other one here.')
  pairs = sorted((each.id.replace('/', '-'), each.source) for each in asked.cartridges)
  for name, source in pairs:
    try:
      account.resolve(BASE_NAME, [name])
    except (NotFound, InvalidRequest):  # Or it is an adapter.
      raise InvalidRequest(
        f'serve.tokasaurus_tenant has no cartridge {name!r}, and {source} is not read here: upload it under that name, '
        'or create it with a source that serve.cartridge_sources allows.'
      ) from None
  if asked.topk and (pairs or asked.temperature not in (0, 1)):
    raise InvalidRequest('top_logprobs is not supported behind a cartridge, nor at a temperature other than 0 and 1.')
  if isinstance(asked, CartridgeChat):
    _check_chat(account, asked)
  job_of = openai_jobs.job_of_chat if isinstance(asked, CartridgeChat) else openai_jobs.job_of_completion
  job = job_of(account, asked.model_copy(update={'model': BASE_NAME, 'cartridges': [name for name, _ in pairs]}))
  if len(job.prompts) > 1:
    raise InvalidRequest('Several prompts are not supported here: send one request for each.')
  return dataclasses.replace(job, asked=asked)


def _check_chat(account: Account, asked: CartridgeChat) -> None:
  """Raise InvalidRequest for a conversation that the service would render otherwise than is asked for."""
  texts = [message.plain() for message in asked.messages]
  if texts[-1]['role'] != 'user' or any('<cartridge>' in each['content'] for each in texts if each['role'] == 'system'):
    raise InvalidRequest('messages must end with one of the user; cartridges are named in their field, not in a text.')
  own = asked.apply_chat_template_overrides
  if not own.items() <= account.service.chat.variables.items():
    raise InvalidRequest(
      f'apply_chat_template_overrides={short_repr(own)} must be as data.enable_thinking and '
      'data.apply_chat_template_kwargs are.'
    )


# Answers.


def _answers(account: Account, jobs: Sequence[CompletionJob]) -> list[dict[str, Any]]:
  """Sample everything that requests ask for at once, and return their responses."""
  begun: list[Sampling] = []
  try:
    for job in jobs:
      begun += openai_jobs.start(account, job, drafts=False)
    drawn = [sampling.unkept() for sampling in begun]
  finally:
    openai_jobs.cancel(begun)
  pairs = list(zip(jobs, drawn, strict=True))
  rows = [(job.prompts[0].tokens, each.tokens.tolist()) for job, own in pairs if job.asked.topk for each in own]
  # At once, with the largest K of all: the model is the same.
  scored = iter(account.score(VersionTarget(None, None), rows, topk=max([0, *(job.asked.topk or 0 for job in jobs)])))
  return [_answer(account, job, own, scored) for job, own in pairs]


def _answer(account: Account, job: CompletionJob, drawn: Sequence[Completion], scored: Iterator) -> dict[str, Any]:
  """Return the response to a request, with the tokens in `system_fingerprint`, which is JSON in a text.

  Args:
    account: the account of the tenant.
    job: the request.
    drawn: its completions.
    scored: yields a `Scored` for each, if the most likely tokens were requested.
  """
  asked, service, choices = job.asked, account.service, []
  packed = asked.logprobs_in_fingerprint  # And nowhere else.
  shown = dataclasses.replace(job, asked=asked.model_copy(update={'logprobs': None})) if packed else job
  fingerprint: dict[str, list[Any]] = {name: [] for name in ('completion_ids', *_PACKED)}
  for index, each in enumerate(drawn):
    tokens, log_probs = each.tokens.tolist(), each.sampling_log_probs if asked.temperature else each.model_log_probs
    said = openai_logprobs.positions(tokens, log_probs.tolist(), next(scored) if asked.topk else None)
    # As Tokasaurus, also if the last of as many tokens as were allowed would have ended the completion.
    ending = 'length' if len(tokens) == job.max_tokens else 'stop'
    done = DrawnCompletion(tokens, finished_text(service.tokenizer, tokens, asked.stops), ending, None, said)
    choices.append(openai.choice(service.texts, shown, index, done))
    fingerprint['completion_ids'].append(tokens)
    if packed:
      tops = [zip(*at.top[: asked.topk], strict=True) for at in said] if asked.topk else ()
      arrays = [at.log_prob for at in said], *zip(*tops, strict=True)  # [T], and [T, K] twice.
      for (name, kind), values in zip(_PACKED.items(), arrays, strict=False):
        fingerprint[name].append(base64.b64encode(np.asarray(values, kind).tobytes()).decode())
  prompt, completion = len(drawn) * len(job.prompts[0].tokens), sum(len(each.tokens) for each in drawn)
  usage = {'prompt_tokens': prompt, 'completion_tokens': completion, 'total_tokens': prompt + completion}
  usage['prompt_tokens_details'] = {'cached_tokens': sum(each.reused for each in drawn)}
  said = json.dumps({name: values or None for name, values in fingerprint.items()})
  return openai.head_of(job) | {'choices': choices, 'usage': usage, 'system_fingerprint': said}


# Routes.


def _single(asked: Incoming) -> Reply:
  """Continue a text, or answer a conversation, behind cartridges."""
  return Reply(_answers(asked.account, [_job(asked.account, asked.body)])[0])


def _batch(asked: Incoming) -> Reply:
  """Answer conversations behind cartridges, in their order; the body is a pickle of a list of dicts."""
  account, requests, jobs = asked.account, asked.body.requests, []
  most = account.service.settings.limits.max_waiting // 2
  if len(requests) > most:  # Each is a job in the engine, where one key alone gets half of the places.
    raise InvalidRequest(f'At most {most} requests fit in a batch (serve.limits.max_waiting).')
  for number, each in enumerate(requests):
    try:
      jobs.append(_job(account, each))
    except InvalidRequest as error:
      raise InvalidRequest(f'requests.{number}: {error}') from error
  rows = _answers(account, jobs)
  for row in rows:  # Some clients read everything in it as numbers.
    del row['usage']['prompt_tokens_details']
  return Reply(pickle.dumps(rows, protocol=4), _PICKLE)


def _ping(asked: Incoming) -> Reply:
  """Report that requests are answered."""
  return Reply({'message': 'pong'})


def _models(asked: Incoming) -> Reply:
  """List the model alone, as clients expect."""
  return Reply({'object': 'list', 'data': [openai.model_entry(asked.account.service.model_name, 0)]})


_CHATS = {'body': CartridgeChats, 'answers': _PICKLE}
_ROUTES = (
  ('GET', '/ping', _ping, {'cheap': True}),
  ('GET', '/v1/models', _models, {'cheap': True}),
  ('POST', '/custom/cartridge/completions', _single, {'body': CartridgeCompletion}),
  ('POST', '/custom/cartridge/chat/completions', _single, {'body': CartridgeChat}),
  ('POST', '/custom/synchronous-batch-completions', _batch, _CHATS),
  ('POST', '/custom/cartridge/synchronous-batch-completions', _batch, _CHATS),
  ('POST', '/batch/cartridge/chat/completions', _batch, _CHATS),  # An older path, to which most clients send.
)


def routes(tenant: str) -> list[Route]:
  """Return the routes; `tenant` is the owner as whom they act, empty for no routes."""
  return [
    route(method, f'{TOKASAURUS}{path}', function, tenant=tenant, guarded=True, **more)
    for method, path, function, more in (_ROUTES if tenant else ())
  ]
