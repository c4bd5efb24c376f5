"""Request schemas of the OpenAI-compatible routes: OpenAI's parameters, and those of vLLM and Fireworks for log-probs.

An unsupported parameter is rejected by name unless its value would have no effect; none is silently ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import pydantic

from sdpo_jax.serving.errors import InvalidRequest
from sdpo_jax.serving.web.schemas import CartridgePositions, Cartridges, Listed, RequestBody, Token

MOST_CHOICES = 128  # The largest n, as at OpenAI.
DEFAULT_COMPLETION_TOKENS = 16  # Default max_tokens of /v1/completions, as at OpenAI.

# Parameters about the client, or a provider's storage, routing and billing, which do not change a response.
_HARMLESS = frozenset({'user', 'metadata', 'safety_identifier', 'prompt_cache_key', 'prompt_cache_retention'})
# Unsupported parameters, and the values with which they have no effect.
_UNSERVED: Mapping[str, tuple[Any, ...]] = {
  'audio': (),
  'best_of': (1,),
  'frequency_penalty': (0,),
  'function_call': ('none', 'auto'),
  'functions': ([],),
  'ignore_eos': (False,),
  'include_stop_str_in_output': (False,),
  'length_penalty': (1,),
  'logit_bias': ({},),
  'min_tokens': (0,),
  'modalities': (['text'],),
  'moderation': (),
  'parallel_tool_calls': (True, False),  # Without tools, neither value has an effect.
  'prediction': (),
  'presence_penalty': (0,),
  'priority': (0,),
  'reasoning_effort': ('none',),
  'repetition_penalty': (1,),
  'response_format': ({'type': 'text'},),
  'service_tier': ('auto', 'default'),
  'skip_special_tokens': (True,),
  'spaces_between_special_tokens': (True,),
  'suffix': ('',),
  'tool_choice': ('none', 'auto'),
  'tools': ([],),
  'truncate_prompt_tokens': (),
  'use_beam_search': (False,),
  'verbosity': ('medium',),
  'web_search_options': (),
}

_SHAPES = {  # Fields that accept several types.
  'prompt': 'a text, a list of texts, a list of token ids, or a list of lists of token ids',
  'stop': 'a text or a list of texts',
  'content': 'a text, or a list of parts such as {"type": "text", "text": "…"}',
  'logprobs': 'a whole number, true or false',
}


class StreamOptions(RequestBody):
  """Options of a streamed response."""

  include_usage: bool = False  # Whether a last chunk without choices reports token counts.
  include_obfuscation: bool = False  # No effect: chunks are never padded to hide their lengths.
  continuous_usage_stats: Literal[False] = False


class _Request(RequestBody):
  """The parameters that both routes share."""

  model: str
  cartridges: Cartridges = []
  positions: CartridgePositions = 'overlap'
  n: int = pydantic.Field(1, ge=1, le=MOST_CHOICES)
  max_tokens: int | None = pydantic.Field(None, ge=0)
  temperature: float = pydantic.Field(1.0, ge=0, le=2)
  top_p: float = pydantic.Field(1.0, gt=0, le=1)
  top_k: int = pydantic.Field(-1, ge=-1)  # 0 and -1: all.
  min_p: float = pydantic.Field(0.0, ge=0, le=1)
  seed: int | None = pydantic.Field(None, ge=-(2**63), lt=2**63)
  stop: str | Listed[str] = []
  stop_token_ids: Listed[Token] = []
  stream: bool = False
  stream_options: StreamOptions | None = None
  prompt_logprobs: int | None = pydantic.Field(None, ge=-1)  # vLLM's.
  return_token_ids: bool = False  # vLLM's.
  store: bool = True  # Whether samples are stored, so that feedback can refer to them.

  @property
  def stops(self) -> tuple[str, ...]:
    """The strings that end a completion."""
    return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

  @property
  def include_usage(self) -> bool:
    """Whether a stream ends with token counts."""
    return self.stream_options is not None and self.stream_options.include_usage

  @pydantic.model_validator(mode='before')
  @classmethod
  def _leave_out_what_has_no_effect(cls, body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
      raise InvalidRequest('The body must be a JSON object.')
    given = {}
    for name, value in body.items():
      if name in cls.model_fields:
        if value is not None:  # null is the same as absent.
          given[name] = value
      elif name in _UNSERVED:
        if value is not None and not any(_same(value, neutral) for neutral in _UNSERVED[name]):
          raise InvalidRequest(f'{name} is not supported here: leave it out.', field=name)
      elif name not in _HARMLESS:
        raise InvalidRequest(
          f'There is no parameter {name[:100]!r}: leave it out, or correct its name.', field=name[:100]
        )
    return given

  @pydantic.model_validator(mode='after')
  def _stream_has_its_options(self):
    if self.stream_options is not None and not self.stream:
      raise ValueError('stream_options require stream=true.')
    if self.prompt_logprobs is not None and self.stream:
      raise ValueError('prompt_logprobs cannot be streamed: request them without stream.')
    return self


class TextCompletionRequest(_Request):
  """The body of a POST to /v1/completions."""

  prompt: str | Listed[str] | Listed[Token] | Listed[Listed[Token]]
  logprobs: bool | int | None = None  # A number as in OpenAI's API; true as in Fireworks', with `top_logprobs`.
  top_logprobs: int | None = pydantic.Field(None, ge=0)
  echo: bool = False
  echo_last: int | None = pydantic.Field(None, ge=0)  # Fireworks': how many last prompt tokens get log-probs.
  add_special_tokens: bool = True  # vLLM's: whether the tokenizer adds special tokens to a text.
  context_length_exceeded_behavior: Literal['error'] = 'error'  # Fireworks'.

  @property
  def prompts(self) -> list[str] | list[list[int]]:
    """The prompts as a list, also if there is a single one."""
    if isinstance(self.prompt, str):
      return [self.prompt]
    return [self.prompt] if self.prompt and isinstance(self.prompt[0], int) else self.prompt

  @property
  def content_logprobs(self) -> bool:
    """Whether log-probs have the format of a chat, as Fireworks requests them."""
    return self.logprobs is True

  @property
  def topk(self) -> int | None:
    """How many of the most likely tokens to return at every position; None: no log-probs were requested."""
    if isinstance(self.logprobs, bool) or self.logprobs is None:
      return (self.top_logprobs or 0) if self.logprobs else None
    return self.logprobs

  @pydantic.model_validator(mode='after')
  def _fields_agree(self):
    if not self.prompt or [] in self.prompts or '' in self.prompts:
      raise ValueError('prompt is empty: it needs at least one token.')
    if self.topk is not None and self.topk < 0:
      raise ValueError('logprobs must be 0 or more.')
    if self.top_logprobs is not None and not self.content_logprobs:
      raise ValueError('top_logprobs requires logprobs=true; otherwise logprobs itself is the number.')
    if self.echo_last and not self.content_logprobs:
      raise ValueError('echo_last requires logprobs=true.')
    if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None and not self.echo_last:
      raise ValueError('max_tokens=0 generates nothing: it requires echo or prompt_logprobs.')
    return self


class TextPart(RequestBody):
  """A text part of a message."""

  type: Literal['text']
  text: str


class ChatMessage(RequestBody):
  """A message of a conversation."""

  role: Literal['system', 'developer', 'user', 'assistant']
  content: str | Listed[TextPart]
  name: str | None = None

  def plain(self) -> dict[str, str]:
    """Return the message in the form that chat templates read."""
    content = self.content if isinstance(self.content, str) else ''.join(part.text for part in self.content)
    return {'role': 'system' if self.role == 'developer' else self.role, 'content': content}


class ChatCompletionRequest(_Request):
  """The body of a POST to /v1/chat/completions."""

  messages: Listed[ChatMessage] = pydantic.Field(min_length=1)
  max_completion_tokens: int | None = pydantic.Field(None, ge=0)
  logprobs: bool = False
  top_logprobs: int | None = pydantic.Field(None, ge=0)

  @property
  def topk(self) -> int | None:
    """How many of the most likely tokens to return at every position; None: no log-probs were requested."""
    return (self.top_logprobs or 0) if self.logprobs else None

  @property
  def limit(self) -> int | None:
    """The most tokens of a completion; None: the limit of the service."""
    return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

  @pydantic.model_validator(mode='after')
  def _fields_agree(self):
    if self.top_logprobs is not None and not self.logprobs:
      raise ValueError('top_logprobs requires logprobs=true.')
    if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
      raise ValueError('max_tokens and max_completion_tokens differ: send only one of them.')
    if self.limit == 0 and self.prompt_logprobs is None:
      raise ValueError('max_tokens=0 generates nothing: it requires prompt_logprobs.')
    if any(message.name is not None for message in self.messages):
      raise ValueError('messages cannot have a name, which chat templates do not render: leave it out.')
    return self


Body = TypeVar('Body', TextCompletionRequest, ChatCompletionRequest)


def parse(kind: type[Body], body: Any) -> Body:
  """Validate the body of a request.

  Args:
    kind: the schema of the route.
    body: the parsed JSON.

  Raises:
    InvalidRequest: a parameter is unknown, invalid or not supported.
  """
  try:
    return kind.model_validate(body)
  except pydantic.ValidationError as error:
    raise _invalid(error) from error


def _same(value: Any, neutral: Any) -> bool:
  return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _invalid(error: pydantic.ValidationError) -> InvalidRequest:
  """Return the first validation error of a request as a sentence."""
  first = error.errors(include_url=False, include_input=False)[0]
  if first['type'] == 'value_error':
    return InvalidRequest(str(first['ctx']['error']))
  path = []
  for part in first['loc']:
    path.append(str(part))
    # The rest of the path names a member of a union, which the client did not send.
    if part in _SHAPES and first['type'] != 'missing':
      return InvalidRequest(f'{".".join(path)} must be {_SHAPES[part]}.', field=path[0])
  name = '.'.join(path)
  if first['type'] == 'missing':
    return InvalidRequest(f'{name} is required.', field=path[0])
  return InvalidRequest(f'{name}: {first["msg"]}.', field=path[0])
