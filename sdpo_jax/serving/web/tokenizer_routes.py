"""vLLM's routes of the tokenizer, which lm-eval reads with `tokenizer_backend=remote`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from sdpo_jax.serving.request_prompts import check_tokens
from sdpo_jax.serving.web.endpoints import Incoming, Reply, route
from sdpo_jax.serving.web.schemas import Listed, Message, RequestBody, ResponseBody, Tokens, one_of

_LONGEST = 200_000  # Characters of a text: other requests wait while it is tokenized.
_SPECIAL = ('bos_token', 'eos_token', 'pad_token', 'unk_token')


class TokenizeBody(RequestBody):
  """A text or a conversation to tokenize."""

  model: str | None = Field(None, description='Without effect: all adapters have one tokenizer.')
  prompt: Annotated[str, Field(max_length=_LONGEST)] | None = None
  messages: Listed[Message] | None = Field(None, description="Alternatively, a conversation for the model's template.")
  add_special_tokens: bool = Field(True, description='Whether the tokenizer adds its special tokens to a text.')
  return_token_strs: bool = False

  _one_form = one_of('prompt', 'messages')


class TokenizeSaid(ResponseBody):
  """The tokens of a text."""

  tokens: list[int]
  count: int
  max_model_len: int = Field(description='The most tokens of a text to score.')
  token_strs: list[str] | None = Field(None, description='The text of each token, if requested.')


def tokenize(asked: Incoming) -> Reply:
  """Return the token ids of a text or a conversation."""
  body: TokenizeBody = asked.body
  service = asked.account.service
  if body.messages is not None:
    tokens = service.prompt_of(messages=[each.model_dump() for each in body.messages], limit=service.max_text)
  else:
    with asked.account.tokenizing():
      tokens = service.tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens)
  texts = [service.texts.text_of(token) for token in tokens] if body.return_token_strs else None
  said = {'tokens': tokens, 'count': len(tokens), 'max_model_len': service.max_text, 'token_strs': texts}
  return Reply(said)


class DetokenizeBody(RequestBody):
  """Token ids to decode."""

  model: str | None = Field(None, description='Without effect, as in TokenizeBody.')
  tokens: Tokens


class DetokenizeSaid(ResponseBody):
  """The text of tokens."""

  prompt: str


def detokenize(asked: Incoming) -> Reply:
  """Return the text of token ids, special tokens included."""
  service = asked.account.service
  if asked.body.tokens:
    check_tokens(asked.body.tokens, service.vocab_size, 'tokens')
  return Reply({'prompt': service.texts.text(asked.body.tokens)})


class TokenizerInfoSaid(ResponseBody):
  """The settings of the tokenizer."""

  tokenizer_class: str
  chat_template: str | None


def tokenizer_info(asked: Incoming) -> Reply:
  """Return the special tokens and the chat template of the tokenizer."""
  tokenizer = asked.account.service.tokenizer
  said: dict[str, Any] = {name: getattr(tokenizer, name, None) for name in _SPECIAL}
  template = tokenizer.get_chat_template() if tokenizer.chat_template else None
  return Reply(said | {'tokenizer_class': type(tokenizer).__name__, 'chat_template': template})


ROUTES = [
  route('POST', '/tokenize', tokenize, body=TokenizeBody, response=TokenizeSaid),
  route('POST', '/detokenize', detokenize, body=DetokenizeBody, response=DetokenizeSaid),
  route('GET', '/tokenizer_info', tokenizer_info, response=TokenizerInfoSaid),
]
