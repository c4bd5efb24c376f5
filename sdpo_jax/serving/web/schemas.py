"""The bodies and responses of the native routes. Unknown fields, and values of a wrong type, are refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from sdpo_jax.serving.feedback_request import DETAILS, MOST_TOP, teacher_settings

Token = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[Token], Field(max_length=1_000_000)]
Text = Annotated[str, Field(max_length=4_000_000)]
Name = Annotated[str, Field(min_length=1, max_length=200)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Teacher = Annotated[
  dict[str, Any], pydantic.BeforeValidator(teacher_settings, json_schema_input_type=str | dict[str, Any])
]  # A kind, or {kind: …} with more.


class RequestBody(pydantic.BaseModel):
  """A body, or a part of one."""

  model_config = pydantic.ConfigDict(extra='forbid', strict=True, allow_inf_nan=False)


class ResponseBody(pydantic.BaseModel):
  """An answer, or a part of one."""

  model_config = pydantic.ConfigDict(extra='allow', ser_json_inf_nan='null')


# Adapters.


class CreateAdapter(RequestBody):
  name: Name = Field(description='A label, unique among your adapters.')
  settings: dict[str, Any] = Field(
    default_factory=dict,
    description='teacher {kind: live | ema | lagged | base | frozen, …}, guards {…}, canary_prompts […]; '
    'see /v1/capabilities.',
  )
  base_model: str | None = Field(None, description='What is served, or an error says so.')
  rank: int | None = Field(None, description='The same.')
  alpha: Number | None = Field(None, description='The same.')


class ChangeAdapter(RequestBody):
  settings: dict[str, Any] = Field(description='As of CreateAdapter; what is left out stays as it is.')


class ForkAdapter(RequestBody):
  name: Name
  version: int | None = Field(None, ge=0, description='To begin with; null: the newest.')


class Undo(RequestBody):
  to: int = Field(ge=0, description='The version whose content the new version has, moments and average included.')


class AdapterSaid(ResponseBody):
  id: str
  name: str
  version: int = Field(description='Its newest one; also in the header ETag.')
  lora_uri: str = Field(description='The address of that version, for every field that names a model.')
  created: float = Field(description='Seconds since the epoch.')
  settings: dict[str, Any]


class AdaptersSaid(ResponseBody):
  adapters: list[AdapterSaid]


class VersionSaid(ResponseBody):
  adapter: str
  version: int
  parent: int | None
  reason: str = Field(description='create, feedback, import, fork or undo.')
  created: float
  digest: str = Field(description='SHA-256 of its manifest.')
  lora_uri: str
  details: dict[str, Any]


class VersionsSaid(ResponseBody):
  versions: list[VersionSaid]


class DiffSaid(ResponseBody):
  """How far the matrices of two versions are apart, and what was measured between them."""


class DeletedSaid(ResponseBody):
  id: str
  deleted: bool


class CapabilitiesSaid(ResponseBody):
  """What is served, and its limits and defaults."""


# Completions.


class Message(RequestBody):
  role: Annotated[str, Field(min_length=1, max_length=64)]
  content: Text


class Named(RequestBody):
  model: str = Field('base', description='base, or an adapter: id, name, either with @VERSION, or a lora_uri.')


class Prompted(RequestBody):
  messages: list[Message] | None = Field(None, description='A conversation, for the chat template of the model.')
  prompt: Text | None = Field(None, description='Text, as it is.')
  prompt_tokens: Tokens | None = Field(None, description='Token ids.')

  @pydantic.model_validator(mode='after')
  def _one_prompt(self):
    if sum(given is not None for given in (self.messages, self.prompt, self.prompt_tokens)) != 1:
      raise ValueError('send one of messages, prompt and prompt_tokens')
    return self

  def conversation(self) -> list[dict[str, str]] | None:
    """Return the messages as plain values; None: there are none."""
    return None if self.messages is None else [message.model_dump() for message in self.messages]


class CompletionRequest(Prompted, Named):
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
  sample_id: str = Field(description='By which feedback names this completion; kept for a while.')
  index: int
  text: str
  finish_reason: str
  tokens: list[int]
  log_probs: list[float | None] = Field(description='Of the tokens when they were drawn, at temperature 1.')
  expires: float = Field(description='When the sample_id is gone, in seconds since the epoch.')


class Usage(ResponseBody):
  prompt_tokens: int
  completion_tokens: int
  total_tokens: int
  reused_tokens: int = Field(
    description='Of the prompt, those that were not read again: keys and values of an earlier prompt were kept.'
  )


class CompletionsSaid(ResponseBody):
  model: str
  adapter: str | None
  version: int | None
  prompt_tokens: list[int]
  completions: list[CompletionSaid]
  usage: Usage


# Scores.


class ScoreRow(Prompted):
  completion: Text | None = Field(None, description='Text; tokens are exact, and text is read anew.')
  tokens: Tokens | None = None
  ids: Annotated[list[Annotated[list[Token], Field(max_length=4096)]], Field(max_length=100_000)] | None = Field(
    None, description='For each token of the completion, ids whose log-probs are wanted, too; as many for all.'
  )

  @pydantic.model_validator(mode='after')
  def _one_completion(self):
    if (self.completion is None) == (self.tokens is None):
      raise ValueError('send one of completion and tokens')
    return self


class ScoreRequest(Named):
  rows: Annotated[list[ScoreRow], Field(min_length=1, max_length=256)]
  topk: int = Field(1, ge=0, description='How many of the most likely tokens are wanted at every position.')
  format: Literal['rows', 'columns', 'packed'] = Field(
    'rows',
    description="'rows': an object per token; 'columns': lists, in which top_log_probs are whole numbers of −1e-4 "
    "nats; 'packed': bytes, see sdpo_jax/serving/web/packed.py.",
  )


class ScoreSaid(ResponseBody):
  model: str
  version: int | None
  format: str
  scale: float | None = Field(None, description='Nats of one unit of top_log_probs in columns.')
  rows: list[dict[str, Any]]


# Feedback.


class FeedbackItem(RequestBody):
  sample_id: str | None = Field(None, description='Of a completion of this service.')
  prompt_tokens: Tokens | None = Field(None, description='Or what was read …')
  tokens: Tokens | None = Field(None, description='… and what was answered.')
  log_probs: Annotated[list[Number], Field(max_length=1_000_000)] | None = Field(
    None, description='Of these tokens when they were drawn; null: as the version says now.'
  )
  messages: list[Message] | None = Field(None, description='The conversation of prompt_tokens, for the teacher.')
  feedback: Text | None = Field(None, description='What was wrong with it, in words.')
  correction: Text | None = Field(None, description='What would have been right.')
  demonstration: Text | None = Field(None, description='An answer to learn from.')
  environment: Text | None = Field(None, description='What a program or a grader said.')
  reward: Number | None = Field(None, description='How good it was; learned by a policy gradient.')


class Update(RequestBody):
  """How to learn; absent fields take the defaults of /v1/capabilities."""

  loss: Literal['sdpo', 'jsd_pg'] | None = None
  divergence: Literal['forward_kl', 'reverse_kl', 'jsd'] | None = Field(
    None, description='Of sdpo: alpha 0, 1 or ½ by name.'
  )
  alpha: Number | None = Field(None, ge=0, le=1, description='Of sdpo and of jsd_pg, in which it is mirrored.')
  topk: int | None = Field(None, ge=1)
  is_clip: Number | None = Field(None, gt=0, description='Of sdpo; null: no ratio.')
  divergence_weight: Number | None = Field(None, ge=0)
  policy_weight: Number | None = Field(None, ge=0)
  clip_ratio_low: Number | None = Field(None, ge=0)
  clip_ratio_high: Number | None = Field(None, ge=0)
  clip_ratio_c: Number | None = Field(None, gt=1)
  clip_eps: Number | None = Field(None, gt=0, description='Of jsd_pg, as the next ones.')
  jsd_weight: Number | None = Field(None, ge=0)
  floor: Number | None = Field(None, lt=0)
  form: Literal['mixture', 'design'] | None = None
  support: Literal['teacher', 'union'] | None = None
  learning_rate: Number | None = Field(None, ge=0)
  beta1: Number | None = Field(None, ge=0, lt=1)
  beta2: Number | None = Field(None, ge=0, lt=1)
  eps: Number | None = Field(None, gt=0)
  weight_decay: Number | None = Field(None, ge=0)
  max_grad_norm: Number | None = Field(None, gt=0, description='Null: no limit.')
  steps: int | None = Field(None, ge=1)


class FeedbackBody(FeedbackItem):
  """One completion with what is said of it, or several as `items`."""

  items: list[FeedbackItem] | None = Field(None, description='In the place of the fields of one.')
  update: Update = Field(default_factory=Update)
  teacher: Teacher | None = Field(
    None, description="live, ema, lagged, base or frozen, or {kind: …} with more; in the place of the adapter's."
  )
  mode: Literal['commit', 'dry_run'] = Field('commit', description='dry_run: say what would be, and change nothing.')
  guards: dict[str, Number | None] | None = Field(
    None, description='max_kl_to_base, min_entropy, max_loss_ratio, max_self_similarity; null turns one off.'
  )
  detail: list[str] | None = Field(
    None, description=f'Which lists per token the answer has, of {", ".join(DETAILS)}; null: all.'
  )
  top: int | None = Field(
    None, ge=0, le=MOST_TOP, description="How many of the teacher's tokens are named at a position."
  )

  @pydantic.model_validator(mode='after')
  def _items_or_one(self):
    """Let `items` hold the completions in any case."""
    names = FeedbackItem.model_fields
    own = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
    if self.items is None:
      self.items = [FeedbackItem(**own)]
    elif own:
      raise ValueError(f'{min(own)} belongs into one of items, or items must be left out')
    return self


class BatchEntry(FeedbackBody):
  adapter: str = Field(description='Id or name of the adapter that learns.')
  if_match: int | None = Field(None, ge=0, description='The version that it must be at.')


class BatchBody(RequestBody):
  entries: Annotated[list[BatchEntry], Field(min_length=1, max_length=256)]


class FeedbackSaid(ResponseBody):
  adapter: str
  version_before: int
  version_after: int = Field(description='The same if nothing was committed.')
  accepted: bool
  reason: str | None = Field(None, description='Why not.')
  items: list[dict[str, Any]] = Field(
    default_factory=list, description='Of each completion: context, per_token (the lists of `detail`), means.'
  )
  guards: list[dict[str, Any]] = Field(
    default_factory=list, description='Of each guard: guard, value, limit, passed, reason.'
  )
  canary: dict[str, Any] | None = Field(
    None, description='What was measured on the canary prompts; null: there are none.'
  )
  metrics: dict[str, Any] = Field(default_factory=dict)
  timings: dict[str, Any] = Field(default_factory=dict, description='Seconds.')


class BatchSaid(ResponseBody):
  results: list[dict[str, Any]] = Field(description='For each entry its answer, or {status, error}.')
