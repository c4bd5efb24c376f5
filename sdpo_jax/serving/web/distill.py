"""Routes of other continual-distillation services: /v1/distill, /v1/feedback, /v1/score, /v1/lora and /v1/health.

They map to native routes, for existing clients. A `lora_id` is the name or the id of an adapter; a `lora_uri` also
names the version that the adapter must be at.
"""

from __future__ import annotations

from collections.abc import Sequence
import time
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sdpo_jax.serving import feedback as feedbacks
from sdpo_jax.serving import records
from sdpo_jax.serving.account import Account
from sdpo_jax.serving.errors import InvalidRequest
from sdpo_jax.serving.feedback_request import Item, make_request
from sdpo_jax.serving.records import AdapterRecord
from sdpo_jax.serving.web.admission import Lifetime
from sdpo_jax.serving.web.endpoints import Incoming, Reply, handled, route
from sdpo_jax.serving.web.native import feedback_again, zip_reply
from sdpo_jax.serving.web.pages import PAGED, limit_of, page
from sdpo_jax.serving.web.schemas import (
  Listed,
  Message,
  Named,
  Number,
  PageSaid,
  RequestBody,
  ResponseBody,
  Teacher,
  Text,
  Tokens,
  one_of,
)

# /v1/distill.


class DistillTraining(RequestBody):
  """The parameters of the loss `jsd_pg` and of its optimizer."""

  learning_rate: Number | None = Field(None, ge=0)
  alpha: Number = Field(0.5, gt=0, lt=1, description="The student's share of the mixture.")
  clip_eps: Number = Field(0.2, gt=0, description='The clip of the importance ratio to the sampling policy.')
  max_grad_norm: Number = Field(1.0, gt=0)
  num_steps: int = Field(1, ge=1)
  jsd_reg_weight: Number = Field(0.5, ge=0, description='Weight of the regulariser.')
  teacher_top_k: int | None = Field(None, ge=1, description='K of the teacher; null: that of the service.')
  support: Literal['teacher', 'union'] = Field(
    'teacher',
    description="The tokens of the regulariser: the teacher's top K or, with 'union', also the student's, which the "
    'service compiles for if serve.union_support is set, and refuses otherwise.',
  )
  tail: bool = Field(False, description='Whether a tail bucket holds all other tokens, as it always does with union.')


class DistillBody(RequestBody):
  """A completion of an adapter, and the feedback on it."""

  prompt: Text | Tokens = Field(description="The user's message, or the token ids of the whole prompt.")
  response: Text | Tokens
  feedback: Text | None = None
  lora_uri: str | None = Field(None, description='The URI of the version that learns; it must be the newest one.')
  lora_id: str | None = Field(None, description='Alternatively, the name or id of the adapter.')
  id: str | None = Field(None, description='Another name for lora_id.')
  teacher: Teacher | None = Field(None, description="As in FeedbackBody; null: the adapter's.")
  training: DistillTraining = Field(default_factory=DistillTraining)

  _one_adapter = one_of('lora_uri', 'lora_id', 'id')

  @property
  def adapter(self) -> str:
    """The URI, name or id of the adapter."""
    return self.lora_uri or self.lora_id or self.id


class DistillSaid(ResponseBody):
  """The result of learning from one completion."""

  lora_uri: str = Field(description='The URI of the newest version: the same as before if a guard rejected the step.')
  metadata: dict[str, Any] = Field(description='The metrics, whether a version was accepted, why not, and warnings.')


def distill(asked: Incoming) -> Reply:
  """Learn from one completion with the jsd_pg loss."""
  body: DistillBody = asked.body
  adapter, expected = _learner(asked, body.adapter)
  item = _item(asked.account, body.prompt, body.response, body.feedback)
  training = body.training
  update = {'loss': 'jsd_pg', 'steps': training.num_steps, 'jsd_weight': training.jsd_reg_weight}
  update |= training.model_dump(include={'learning_rate', 'alpha', 'clip_eps', 'max_grad_norm', 'support', 'tail'})
  most = asked.account.service.sizes.topk
  if training.jsd_reg_weight and training.teacher_top_k not in (None, most):
    raise InvalidRequest(
      f'The regulariser reads the {most} most likely tokens (serve.topk), not {training.teacher_top_k}: leave '
      'teacher_top_k out, or set jsd_reg_weight to 0 to turn the regulariser off.',
      field='training.teacher_top_k',
    )
  answer = _learn(asked, adapter, expected, [item], update, body.teacher)
  return Reply(_learned(adapter, answer))


def _distilled_again(account: Account, adapter: str, version: int | None) -> dict[str, Any]:
  return _learned(account.adapter(adapter), feedback_again(account, adapter, version))


# /v1/feedback.


class FeedbackTraining(RequestBody):
  """The parameters of the divergence from the teacher and of the optimizer."""

  learning_rate: Number | None = Field(None, ge=0)
  alpha: Number = Field(0.5, ge=0, le=1, description='0: KL(teacher‖student), 1: KL(student‖teacher).')
  is_clip: Number = Field(5.0, ge=1)
  max_grad_norm: Number = Field(1.0, gt=0)
  kl_reg_weight: Literal[0] | Literal[0.0] = Field(
    0, description='Only 0 is supported; the guard max_kl_to_base limits the distance from the model.'
  )
  teacher_top_k: int | None = Field(None, ge=1, description='K of the teacher; null: that of the service.')


class LoraFeedbackItem(RequestBody):
  """A completion of an adapter with the feedback on it."""

  lora_id: str
  prompt: Text = Field(min_length=1)
  response: Text = Field(min_length=1)
  feedback: Text = Field(min_length=1)
  training: FeedbackTraining = Field(default_factory=FeedbackTraining)


class Orchestration(RequestBody):
  """Options of services whose sampler sleeps while they train; accepted without effect, since this one samples on."""

  sleep_before: bool = True
  wake_after: bool = True
  wake_on_failure: bool = True
  sleep_level: int = 1


class LoraFeedbackBody(RequestBody):
  """Completions of one adapter, which learns from all of them in one transaction."""

  requests: Annotated[Listed[LoraFeedbackItem], Field(min_length=1)]
  orchestration: Orchestration = Field(default_factory=Orchestration)

  @model_validator(mode='after')
  def _alike(self):
    for each in self.requests[1:]:
      if (each.lora_id, each.training) != (self.requests[0].lora_id, self.requests[0].training):
        raise ValueError('all requests must have the same lora_id and training; send the others separately')
    return self


class LoraFeedbackSaid(ResponseBody):
  """The result of learning from completions."""

  status: str = Field(description="'ok', or 'rejected' if a guard rejected the new version.")
  lora_id: str
  distill_result: dict[str, Any] = Field(description='lora_id, lora_uri and metadata.')
  batch_size: int


def feedback(asked: Incoming) -> Reply:
  """Learn from several completions by minimizing the divergence from the teacher."""
  began = time.monotonic()
  body: LoraFeedbackBody = asked.body
  first, account = body.requests[0], asked.account
  adapter, expected = _learner(asked, first.lora_id)
  items = [_item(account, each.prompt, each.response, each.feedback) for each in body.requests]
  training = first.training
  update = {'loss': 'sdpo', 'topk': training.teacher_top_k}
  update |= training.model_dump(include={'learning_rate', 'alpha', 'is_clip', 'max_grad_norm'})
  answer = _learn(asked, adapter, expected, items, update)
  return Reply(_fed(adapter, answer, len(items), time.monotonic() - began))


def _fed(adapter: AdapterRecord, answer: dict[str, Any], count: int, seconds: float) -> dict[str, Any]:
  took = round(1000 * seconds)
  return {
    'status': 'ok' if answer['accepted'] else 'rejected',
    'lora_id': adapter.name,
    'distill_result': _learned(adapter, answer),
    'vllm': {'slept': False, 'woke': False},
    'timing_ms': {'sleep': 0, 'distill': took, 'save': 0, 'wake': 0, 'logprobs': 0, 'total': took},
    'batch_size': count,
  }


def _fed_again(account: Account, adapter: str, version: int | None) -> dict[str, Any]:
  answer = feedback_again(account, adapter, version)
  return _fed(account.adapter(adapter), answer, len(answer.get('samples', ())), 0.0)


# Adapters and completions of requests.


def _named(account: Account, text: str) -> tuple[AdapterRecord, int | None]:
  """Return the adapter that a request names, and the number of the version if it names one.

  Raises:
    NotFound: there is no such adapter or version.
    InvalidRequest: the model without an adapter is named.
  """
  target = account.resolve(text)
  if target.adapter is None:
    raise InvalidRequest(f'{text} is the model without an adapter or a cartridge: name an adapter.', field='lora_id')
  return target.adapter, records.parse(text).number


def _learner(asked: Incoming, text: str) -> tuple[AdapterRecord, int | None]:
  """Return the adapter that learns, and the version that it must be at (None: any)."""
  adapter, number = _named(asked.account, text)
  return adapter, asked.expected if number is None else number


def _item(account: Account, prompt: str | Sequence[int], response: str | Sequence[int], said: str | None) -> Item:
  """Return a completion with its feedback; a prompt given as text becomes a user message."""
  messages = [{'role': 'user', 'content': prompt}] if isinstance(prompt, str) else None
  prompt_tokens = account.service.prompt_of(messages=messages) if messages else account.service.prompt_of(tokens=prompt)
  tokens = _completion(account, response)
  return Item(prompt_tokens=prompt_tokens, tokens=tokens, messages=messages, feedback=said)


def _completion(account: Account, given: str | Sequence[int]) -> list[int]:
  """Return the token ids of a completion; a text is tokenized without an end token."""
  if not isinstance(given, str):
    return list(given)
  return account.service.prompt_of(text=given, limit=account.service.max_completion, add_special_tokens=False)


def _learn(
  asked: Incoming,
  adapter: AdapterRecord,
  expected: int | None,
  items: Sequence[Item],
  update: dict[str, Any],
  teacher: dict[str, Any] | None = None,
) -> dict[str, Any]:
  account = asked.account
  known = {name: value for name, value in update.items() if value is not None}
  request = make_request(items, known, account.service.settings, teacher=teacher, detail=(), top=0)
  return feedbacks.learn(account, adapter.id, expected, request, idempotency=asked.idempotency).said


def _learned(adapter: AdapterRecord, answer: dict[str, Any]) -> dict[str, Any]:
  """Return the result of learning as JSON in the form of `DistillSaid`."""
  told = ('accepted', 'reason', 'unchanged', 'moments_of', 'warnings', 'version_before', 'version_after')
  return {
    'lora_id': adapter.name,
    'lora_uri': records.lora_uri(adapter.id, answer['version_after']),
    'metadata': {**answer['metrics'], **{name: answer[name] for name in told if name in answer}},
  }


# /v1/score.


class CompletionScoreBody(Named):
  """A completion to score."""

  messages: Listed[Message] | None = Field(None, description='The conversation before the completion.')
  prompt: Text | Tokens | None = Field(None, description='Alternatively, a text or token ids.')
  completion: Text | Tokens

  _one_prompt = one_of('messages', 'prompt')


class CompletionScoreSaid(ResponseBody):
  """The log-prob of a completion."""

  logprob_sum: float = Field(description='The log-prob of the completion, in nats.')
  logprobs: list[float] = Field(description='The log-prob of each token, in nats.')
  tokens: list[int] = Field(description='The token ids of the completion.')


def score(asked: Incoming) -> Reply:
  """Return the log-prob of a completion and of each of its tokens."""
  body, account = asked.body, asked.account
  target = account.resolve(body.model)
  messages = None if body.messages is None else [message.model_dump() for message in body.messages]
  form = 'text' if isinstance(body.prompt, str) else 'tokens'
  prompt = account.service.prompt_of(messages=messages, **{form: body.prompt})
  tokens = _completion(account, body.completion)
  [scored] = account.score(target, [(prompt, tokens)], topk=0)
  log_probs = scored.log_probs.tolist()
  return Reply({'logprob_sum': sum(log_probs), 'logprobs': log_probs, 'tokens': list(tokens)})


# /v1/lora.


class LoraInitBody(RequestBody):
  """A new adapter; fields other than its name may only state what is served."""

  lora_id: str = Field(description='The name of the adapter.')
  base_model: str | None = Field(None, description='The model that you expect.')
  lora_r: int | None = Field(None, description='The rank that you expect.')
  lora_alpha: Number | None = Field(None, description='The alpha that you expect.')
  target_modules: Listed[str] | None = Field(None, description='The matrices with factors that you expect.')


class LoraSaid(ResponseBody):
  """A new adapter."""

  lora_id: str
  lora_uri: str


def lora_init(asked: Incoming) -> Reply:
  """Make an adapter that does not change the model yet."""
  body, account = asked.body, asked.account
  served = account.service.served.targets
  if body.target_modules is not None and set(body.target_modules) != set(served):
    raise InvalidRequest(
      f'All adapters here are of {", ".join(served)}: leave target_modules out.',
      field='target_modules',
    )
  adapter, version = account.create(
    body.lora_id, base_model=body.base_model, rank=body.lora_r, alpha=body.lora_alpha, request=asked.idempotency
  )
  return Reply(_begun(adapter, version.number))


def _begun(adapter: AdapterRecord, number: int) -> dict[str, Any]:
  return {'lora_id': adapter.name, 'id': adapter.id, 'lora_uri': records.lora_uri(adapter.id, number)}


def _begun_again(account: Account, adapter: str, version: int | None) -> dict[str, Any]:
  return _begun(account.adapter(adapter), version or 0)


class LorasSaid(PageSaid):
  """Your adapters."""

  loras: list[str] = Field(description='The names of the adapters.')


def lora_list(asked: Incoming) -> Reply:
  """List the names of your adapters."""
  limit, only = limit_of(asked.query), {'prefix': asked.query.get('prefix', '')}
  found = asked.account.adapters(asked.query.get('after'), named=True, limit=limit + 1, **only)
  names = [each.name for each in found]
  return Reply(page('loras', names, limit, names, [records.place_of(each) for each in found]))


def _queried(asked: Incoming) -> tuple[AdapterRecord, int | None]:
  text = asked.query.get('lora_id')
  if text is None:
    raise InvalidRequest('Name the adapter in the address: ?lora_id=NAME.', field='lora_id')
  return _named(asked.account, text)


def lora_export(asked: Incoming) -> Reply:
  """Return the files of an adapter as a zip; PEFT loads the unpacked folder."""
  adapter, number = _queried(asked)
  return zip_reply(asked.account.export_files(adapter.id, number), adapter.name)


class LoraDeletedSaid(ResponseBody):
  """Confirmation of a deletion."""

  deleted: bool


def lora_delete(asked: Incoming) -> Reply:
  """Delete an adapter and everything stored about it."""
  adapter, number = _queried(asked)
  asked.account.delete(adapter.id, asked.expected if number is None else number)
  return Reply({'deleted': True})


class HealthSaid(ResponseBody):
  """The state of the service."""

  status: str = Field(description='healthy, starting or unhealthy.')


_LISTED = {'prefix': 'The beginning of the names to list.', **PAGED}
_LORA = {'lora_id': 'The name, id or URI of the adapter.'}


def routes(lifetime: Lifetime) -> list[Route]:
  """Return these routes for a service with the given lifetime."""

  @handled('GET', '/v1/health', response=HealthSaid, open=True)
  async def health(request: Request) -> Response:
    """Return whether requests are accepted."""
    status = 'healthy' if lifetime.ready else 'unhealthy' if lifetime.why_not() else 'starting'
    return JSONResponse({'status': status, 'worker': {'status': status, 'error': lifetime.why_not() or None}})

  return [
    route('POST', '/v1/distill', distill, body=DistillBody, response=DistillSaid, again=_distilled_again),
    route('POST', '/v1/feedback', feedback, body=LoraFeedbackBody, response=LoraFeedbackSaid, again=_fed_again),
    route('POST', '/v1/score', score, body=CompletionScoreBody, response=CompletionScoreSaid),
    route('POST', '/v1/lora/init', lora_init, body=LoraInitBody, response=LoraSaid, again=_begun_again),
    route('GET', '/v1/lora', lora_list, response=LorasSaid, query=_LISTED),
    route('GET', '/v1/lora/export', lora_export, query=_LORA, answers='application/zip'),
    route('DELETE', '/v1/lora', lora_delete, response=LoraDeletedSaid, query=_LORA),
    health,
  ]
