"""Bodies and responses of the native routes; unknown fields and values of a wrong type are rejected by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import Field

from sdpo_jax.models.adapters.composition import Positions
from sdpo_jax.serving.feedback_request import DETAILS, MOST_TOP, teacher_settings
from sdpo_jax.serving.records import MOST_CARTRIDGES

_Entry = TypeVar('_Entry')
# A body has room for millions of wrong entries, and building an error for each would stop all other threads.
Listed = Annotated[list[_Entry], Field(fail_fast=True)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[Listed[Token], Field(max_length=1_000_000)]
Text = Annotated[str, Field(max_length=4_000_000)]
Name = Annotated[str, Field(min_length=1, max_length=200)]
Cartridges = Annotated[list[Name], Field(max_length=MOST_CARTRIDGES)]
CartridgePositions = Annotated[
  Positions,
  Field(
    description='Positions of the slots of several: each from 0 on (overlap), or one after the other (sequential).'
  ),
]
Number = Annotated[float, Field(allow_inf_nan=False)]
Teacher = Annotated[
  dict[str, Any], pydantic.BeforeValidator(teacher_settings, json_schema_input_type=str | dict[str, Any])
]  # The name of a kind, or an object with the kind and its settings.


def one_of(*names: str) -> Any:
  """Return a validator of a body that refuses it unless exactly one of these fields is given."""

  def check(body: Any) -> Any:
    if sum(getattr(body, name) is not None for name in names) != 1:
      raise ValueError(f'send one of {", ".join(names[:-1])} and {names[-1]}')
    return body

  return pydantic.model_validator(mode='after')(check)


class RequestBody(pydantic.BaseModel):
  """The body of a request, or a part of one."""

  model_config = pydantic.ConfigDict(extra='forbid', strict=True, allow_inf_nan=False)


class ResponseBody(pydantic.BaseModel):
  """The body of a response, or a part of one."""

  model_config = pydantic.ConfigDict(extra='allow', ser_json_inf_nan='null')


# Adapters.


class CreateAdapter(RequestBody):
  """A new adapter; it does not change the model until it has learned."""

  name: Name = Field(description='A name, unique among your adapters.')
  settings: dict[str, Any] = Field(
    default_factory=dict,
    description='teacher {kind: live | ema | lagged | base | frozen | model | endpoint, …}, guards {…} and '
    'canary_prompts […], with the defaults of /v1/capabilities.',
  )
  base_model: str | None = Field(None, description='The model that you expect; an error if another one is served.')
  rank: int | None = Field(None, description='The rank that you expect; an error if another one is served.')
  alpha: Number | None = Field(None, description='The alpha that you expect; an error if another one is served.')
  source: Name | None = Field(
    None,
    description='A cartridge to read: a place that serve.cartridge_sources allows, or a name on the hub.',
  )


class ChangeAdapter(RequestBody):
  """New settings of an adapter."""

  settings: dict[str, Any] = Field(
    description='As in CreateAdapter; settings that are left out stay as they are. And pinned_versions […], numbers of '
    'versions that are kept, with the moments that they have.'
  )


class ForkAdapter(RequestBody):
  """A new adapter that starts from a version of another one."""

  name: Name
  version: int | None = Field(None, ge=0, description='The version to start from; null: the newest.')


class Undo(RequestBody):
  """The version to return to."""

  to: int | None = Field(
    None,
    ge=0,
    description='The version whose factors are copied; moments and average are those of the closest version from it '
    'back that still has them, or begin anew. null: the one before the newest that is not undone, so that requests one '
    'after the other walk back.',
  )


class AdapterSaid(ResponseBody):
  """An adapter."""

  id: str
  name: str
  kind: str = Field(description='adapter or cartridge.')
  version: int = Field(description='The number of the newest version; also in the header ETag.')
  lora_uri: str = Field(description='The URI of that version, which every field `model` accepts.')
  created: float = Field(description='Seconds since the epoch.')
  settings: dict[str, Any]


class PageSaid(ResponseBody):
  """A page of a list."""

  first_id: str | int | None = Field(description='The id of the first entry; null: the page is empty.')
  last_id: str | int | None = Field(description='The id of the last entry.')
  next: str | int | None = Field(
    description='For `after` in the address of the next page, also if the last entry is deleted; null: there is none.'
  )
  has_more: bool = Field(description='Whether there are entries after this page.')


class AdaptersSaid(PageSaid):
  """Your adapters, the oldest first."""

  adapters: list[AdapterSaid]


class VersionSaid(ResponseBody):
  """An immutable version of an adapter."""

  adapter: str
  version: int
  parent: int | None = Field(description='The version from which it was made; null: none.')
  reason: str = Field(description='create, feedback, import, fork or undo.')
  created: float = Field(description='Seconds since the epoch.')
  digest: str = Field(description='SHA-256 of its manifest.')
  lora_uri: str = Field(description='The URI of the version.')
  details: dict[str, Any] = Field(description='How it was made, such as loss, metrics and guards of a feedback.')
  undone: bool | None = Field(None, description='Whether what it has learned was undone since; null: not asked for.')


class VersionsSaid(PageSaid):
  """The stored versions of an adapter, the oldest first."""

  versions: list[VersionSaid]


class DiffSaid(ResponseBody):
  """The distance between the matrices of two versions, and the details of the versions between them."""


class DeletedSaid(ResponseBody):
  """Confirmation of a deletion."""

  id: str
  deleted: bool


class UsedSaid(ResponseBody):
  """What a key has used."""

  requests: int
  feedbacks: int
  sampled: int = Field(description='Tokens; those asked for until a completion is done, then those drawn.')
  scored: int
  learned: int


class UsageSaid(ResponseBody):
  """What your key has used, and its limits."""

  key: str = Field(description='The id of the key.')
  minute: UsedSaid = Field(description='In this minute, since this process began.')
  day: UsedSaid = Field(description='In this day, in UTC.')
  limits: dict[str, int | None] = Field(description='Those of tokens and feedbacks; null: none.')


class CapabilitiesSaid(ResponseBody):
  """The served model, its limits and the default settings."""


# Completions.


class Message(RequestBody):
  """A message of a conversation."""

  role: Annotated[str, Field(min_length=1, max_length=64)]
  content: Text


class Named(RequestBody):
  """The model or version that a request is about."""

  model: str = Field(
    'base',
    description="'base', the id or name of an adapter, also with @VERSION, or a lora_uri. For completions, #CARTRIDGE "
    'may follow, or several with + between them; a cartridge may also stand alone.',
  )


class Prompted(RequestBody):
  """A prompt in one of three forms."""

  messages: Listed[Message] | None = Field(None, description="A conversation, rendered by the model's chat template.")
  prompt: Text | None = Field(None, description='A text, tokenized without the chat template.')
  prompt_tokens: Tokens | None = Field(None, description='Token ids.')

  _one_prompt = one_of('messages', 'prompt', 'prompt_tokens')

  def conversation(self) -> list[dict[str, str]] | None:
    """Return the messages as dicts; None: the prompt has another form."""
    return None if self.messages is None else [message.model_dump() for message in self.messages]


class CompletionRequest(Prompted, Named):
  """A request for completions of a prompt."""

  cartridges: Cartridges = Field(default_factory=list, description='Cartridges, as after # in model.')
  positions: CartridgePositions = 'overlap'
  n: int = Field(1, ge=1)
  max_tokens: int | None = Field(None, ge=1)
  temperature: Number = Field(1.0, ge=0)
  top_p: Number = Field(1.0, gt=0, le=1)
  top_k: int = Field(-1, ge=-1)
  min_p: Number = Field(0.0, ge=0, lt=1)
  seed: int | None = None
  stop: Annotated[list[str], Field(max_length=64)] = Field(default_factory=list)
  stop_token_ids: Annotated[list[Token], Field(max_length=64)] = Field(default_factory=list)
  stream: bool = Field(False, description='Server-sent events: draft {index, delta}, completion, and done.')


class CompletionSaid(ResponseBody):
  """A completion."""

  sample_id: str = Field(
    description='The id with which feedback refers to this completion, until it expires; empty behind a cartridge.'
  )
  index: int
  text: str
  finish_reason: str
  tokens: list[int]
  log_probs: list[float | None] = Field(description='Log-probs of the tokens when they were sampled, at temperature 1.')
  expires: float = Field(description='When the sample_id expires, in seconds since the epoch.')


class Usage(ResponseBody):
  """Token counts."""

  prompt_tokens: int
  completion_tokens: int
  total_tokens: int
  reused_tokens: int = Field(
    description='Prompt tokens that were not computed again: their keys and values came from an earlier prompt.'
  )


class CompletionsSaid(ResponseBody):
  """The completions of a prompt."""

  model: str
  adapter: str | None
  version: int | None
  uri: str = Field(description='What names exactly the version and the cartridges that were read, as a `model`.')
  prompt_tokens: list[int]
  completions: list[CompletionSaid]
  usage: Usage


# Scores.


class ScoreRow(Prompted):
  """A prompt with the completion to score."""

  completion: Text | None = Field(None, description='A text, which is tokenized again; `tokens` are exact.')
  tokens: Tokens | None = None
  ids: Annotated[Listed[Annotated[Listed[Token], Field(max_length=4096)]], Field(max_length=100_000)] | None = Field(
    None, description='For each token of the completion, further ids to score; the same number for every token.'
  )

  _one_completion = one_of('completion', 'tokens')


class ScoreRequest(Named):
  """A request for log-probs of given tokens."""

  rows: Annotated[list[ScoreRow], Field(min_length=1, max_length=256)]
  topk: int = Field(1, ge=0, description='How many of the most likely tokens to return at every position.')
  format: Literal['rows', 'columns', 'packed'] = Field(
    'rows',
    description="'rows': an object per token; 'columns': lists, with top_log_probs as integers in units of −1e-4 "
    "nats; 'packed': the bytes that sdpo_jax/serving/web/packed.py describes.",
  )


class ScoreSaid(ResponseBody):
  """Log-probs of given tokens."""

  model: str
  version: int | None
  format: str
  scale: float | None = Field(None, description='Nats per unit of top_log_probs in columns.')
  rows: list[dict[str, Any]]


# Feedback.


class FeedbackItem(RequestBody):
  """A completion with the feedback on it."""

  sample_id: str | None = Field(None, description='The id of a completion of this service.')
  prompt_tokens: Tokens | None = Field(None, description='Without a sample_id: the prompt.')
  tokens: Tokens | None = Field(None, description='Without a sample_id: the completion.')
  log_probs: Annotated[Listed[Number], Field(max_length=1_000_000)] | None = Field(
    None, description='Log-probs of `tokens` when they were sampled; null: those of the current version.'
  )
  messages: Listed[Message] | None = Field(None, description='The conversation behind prompt_tokens, for the teacher.')
  feedback: Text | None = Field(None, description='What is wrong with the completion, in words.')
  correction: Text | None = Field(None, description='The right answer in its place.')
  demonstration: Text | None = Field(None, description='Another right answer to learn from.')
  environment: Text | None = Field(None, description='The output of a program, a test or a grader.')
  reward: Number | None = Field(None, description='A score of the completion, learned by a policy gradient.')


class Update(RequestBody):
  """How to learn; absent fields take the defaults of /v1/capabilities."""

  loss: Literal['sdpo', 'jsd_pg'] | None = None
  divergence: Literal['forward_kl', 'reverse_kl', 'jsd'] | None = Field(
    None, description='For sdpo: a name for alpha 0 (forward_kl), 1 (reverse_kl) or ½ (jsd).'
  )
  alpha: Number | None = Field(
    None, ge=0, le=1, description='For sdpo the share of the teacher, for jsd_pg of the student.'
  )
  topk: int | None = Field(None, ge=1, description='For sdpo: K, the size of the support of the divergence.')
  is_clip: Number | None = Field(None, gt=0, description='For sdpo: the clip of the importance ratio; null: no ratio.')
  divergence_weight: Number | None = Field(None, ge=0, description='For sdpo: the weight of the divergence.')
  policy_weight: Number | None = Field(None, ge=0, description='For sdpo: the weight of the policy gradient.')
  clip_ratio_low: Number | None = Field(None, ge=0, description='For the policy gradient: the lower clip.')
  clip_ratio_high: Number | None = Field(None, ge=0, description='For the policy gradient: the upper clip.')
  clip_ratio_c: Number | None = Field(None, gt=1, description='For the policy gradient: the bound of the dual clip.')
  clip_eps: Number | None = Field(None, gt=0, description='For jsd_pg: the clip of the importance ratio.')
  jsd_weight: Number | None = Field(None, ge=0, description='For jsd_pg: the weight of the regulariser.')
  floor: Number | None = Field(None, lt=0, description='For jsd_pg: log q of tokens that the teacher does not name.')
  form: Literal['mixture', 'design'] | None = None
  support: Literal['student', 'teacher', 'union'] | None = Field(
    None,
    description="The tokens of the divergence. For sdpo the top K of the student or, with 'teacher', of the teacher; "
    "for jsd_pg the teacher's or, with 'union', those of both (if serve.union_support).",
  )
  tail: bool | None = Field(
    None, description='For jsd_pg: whether a tail bucket holds all other tokens, as for sdpo and for union.'
  )
  learning_rate: Number | None = Field(None, ge=0)
  beta1: Number | None = Field(None, ge=0, lt=1)
  beta2: Number | None = Field(None, ge=0, lt=1)
  eps: Number | None = Field(None, gt=0)
  weight_decay: Number | None = Field(None, ge=0)
  max_grad_norm: Number | None = Field(None, gt=0, description='The clip of the gradient norm; null: no clipping.')
  steps: int | None = Field(None, ge=1, description='The number of optimizer steps.')


class FeedbackBody(FeedbackItem):
  """Feedback on one completion, or on several in `items`, and how to learn from it."""

  items: Listed[FeedbackItem] | None = Field(None, description='Several completions, instead of the fields of one.')
  update: Update = Field(default_factory=Update)
  teacher: Teacher | None = Field(
    None,
    description='live, ema, lagged, base, frozen or endpoint, or {kind: …} with its settings, such as {kind: model, '
    "name: …}; /v1/capabilities lists those here. null: the adapter's.",
  )
  mode: Literal['commit', 'dry_run'] = Field('commit', description='dry_run: learn nothing, only return the response.')
  guards: dict[str, Number | None] | None = Field(
    None,
    description='max_kl_to_base, min_entropy, max_loss_ratio, max_self_similarity, max_rejected_rise, '
    'max_ability_loss; null turns one off.',
  )
  detail: Listed[str] | None = Field(
    None, description=f'Which per-token lists the response has, of {", ".join(DETAILS)}; null: all.'
  )
  top: int | None = Field(
    None, ge=0, le=MOST_TOP, description="How many of the teacher's tokens to list at every position."
  )

  @pydantic.model_validator(mode='after')
  def _items_or_one(self):
    """Move the fields of a single completion to `items`."""
    names = FeedbackItem.model_fields
    own = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
    if self.items is None:
      self.items = [FeedbackItem(**own)]
    elif own:
      raise ValueError(f'{min(own)} belongs in one of the items: move it there, or leave items out')
    return self


class BatchEntry(FeedbackBody):
  """The feedback on one adapter of a batch."""

  adapter: str = Field(description='The id or the name of the adapter that learns.')
  if_match: int | None = Field(None, ge=0, description='The version that the adapter must be at; null: any.')


class BatchBody(RequestBody):
  """Several feedbacks, each in its own transaction."""

  entries: Annotated[list[BatchEntry], Field(min_length=1, max_length=256)]


class FeedbackSaid(ResponseBody):
  """The result of learning from a feedback."""

  adapter: str
  version_before: int
  version_after: int = Field(description='Equal to version_before if nothing was committed.')
  accepted: bool
  reason: str | None = Field(None, description='Why a guard rejected the new version; null: it was accepted.')
  unchanged: bool = Field(False, description='Whether every gradient was 0: nothing was learned, no version made.')
  moments_of: int | None = Field(
    None,
    description='The version with whose moments the optimizer began: version_before, or an older one; null: zeros.',
  )
  average_of: int | None = Field(None, description="The version whose average the teacher 'ema' began with, likewise.")
  warnings: list[str] = Field(
    default_factory=list, description='What was not learned as requested, and moments that were lost.'
  )
  items: list[dict[str, Any]] = Field(
    default_factory=list, description='For each completion: context, means, and per_token with the lists of `detail`.'
  )
  guards: list[dict[str, Any]] = Field(
    default_factory=list, description='For each guard: guard, value, limit, passed and reason.'
  )
  canary: dict[str, Any] | None = Field(None, description='Measurements on the canary prompts; null: there are none.')
  metrics: dict[str, Any] = Field(default_factory=dict)
  timings: dict[str, Any] = Field(default_factory=dict, description='Seconds from the request to each stage.')


class BatchSaid(ResponseBody):
  """The results of a batch."""

  results: list[dict[str, Any]] = Field(description='For each entry the response to its feedback, or {status, error}.')
