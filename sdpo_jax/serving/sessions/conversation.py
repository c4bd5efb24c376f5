"""A conversation as token ids: answers keep their sampled tokens, and the chat template renders everything else.

To find the tokens after an answer, a short conversation with a mark in place of the answer is rendered, and the part
after the mark is used. So neither the answer nor anything before it is ever tokenized again, even if the template would
rewrite earlier turns once others follow, for example without their thinking.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import functools
from typing import Any

from sdpo_jax.data.prompts import ChatFormat, Tokenizer
from sdpo_jax.errors import first_line
from sdpo_jax.files import jsonable
from sdpo_jax.models import chat_template as templates
from sdpo_jax.models import identity
from sdpo_jax.models.chat_template import PROBE, TEMPLATE_ERRORS
from sdpo_jax.models.control_tokens import plain_messages
from sdpo_jax.serving.errors import InvalidRequest
from sdpo_jax.serving.service_state import ServiceState
from sdpo_jax.serving.sessions.session_records import AgentSession
from sdpo_jax.serving.tool_calls import FORMS, Form, ToolCall, call_ids, write_calls
from sdpo_jax.types import Messages

_ASKED = {'role': 'user', 'content': PROBE}
# Tags that can be special tokens.
_MARKS = frozenset(('<think>', '</think>', *(tag for form in FORMS.values() for tag in form.tags)))


@dataclasses.dataclass(frozen=True)
class StudentPrompt:
  """The prompt of the student, split before the header of the assistant's turn."""

  body: list[int]  # The tokens before the header of the assistant's turn.
  header: list[int]

  @property
  def tokens(self) -> list[int]:
    """The whole prompt."""
    return [*self.body, *self.header]


class Dialogue:
  """Converts messages of one session to tokens. The caller must hold the lock of the tokenizer.

  Methods raise InvalidRequest if the template rejects messages, or renders them in a way that cannot be spliced.
  """

  def __init__(
    self,
    tokenizer: Tokenizer,
    chat: ChatFormat,
    *,
    system: str | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    stop_token_ids: Sequence[int] = (),
  ):
    """Make the converter of a session.

    Args:
      tokenizer: the tokenizer of the model, with a chat template.
      chat: settings of the chat template.
      system: the system message; None: there is none.
      tools: JSON schemas of the tools, for the template.
      stop_token_ids: tokens that end completions; those that the template also writes end a turn.
    """
    template = template_of(tokenizer, tools) or ''
    self._ends = {token for token in stop_token_ids if tokenizer.decode([token], skip_special_tokens=False) in template}
    self._writes_ids = '[TOOL_CALLS]' in template and 'tool_call_id' in template
    self._tokenizer, self._chat, self._tools = tokenizer, chat, list(tools)
    self._first = [] if system is None else [{'role': 'system', 'content': system}]

  # Prompts.

  def begin(self, messages: Messages) -> StudentPrompt:
    """Return the first prompt of the conversation."""
    return self._asked(lambda chat: chat, [*self._first, *self._accepted(messages)])

  def after(
    self, prompt: Sequence[int], answer: Sequence[int], messages: Messages, drawn: bool = False
  ) -> StudentPrompt:
    """Return the prompt that continues after an answer.

    Args:
      prompt: the tokens of the prompt that was answered.
      answer: the sampled tokens of the answer, with or without an end-of-turn token.
      messages: the messages after the answer, at least one.
      drawn: see `said_behind`.
    """
    behind = self._behind(self._accepted(messages, answer), drawn=drawn)
    return StudentPrompt([*prompt, *answer, *behind.body[1 if self.is_ended(answer) else 0 :]], behind.header)

  def is_ended(self, answer: Sequence[int]) -> bool:
    """Return whether an answer ends with an end-of-turn token, instead of being cut off at the length limit."""
    return bool(answer) and (answer[-1] == self.turn_end or answer[-1] in self._ends)

  def said_behind(self, text: str, drawn: bool = False) -> list[int]:
    """Return the tokens of a user message that follows another message, up to the header of the assistant's turn.

    Only if it shows what a model has `drawn` can it spell tags of calls and thinking; otherwise these are text, as in
    the output of tools.
    """
    before = self._rendered(self._before_user, False, ())
    said = {'role': 'user', 'content': text}
    return self._tokens([*self._before_user, said], lambda chat: _without_beginning(chat, before), (), drawn)

  def split(self, prompt: Sequence[int]) -> StudentPrompt:
    """Split a prompt of this conversation into body and header."""
    header = self.header
    body = list(prompt[: len(prompt) - len(header)])
    if list(prompt[len(body) :]) != header:
      raise _cannot('does not write the same header before every turn of the assistant')
    return StudentPrompt(body, header)

  @functools.cached_property
  def header(self) -> list[int]:
    """The tokens of the header of the assistant's turn."""
    return self._encode(self._header_text)

  @functools.cached_property
  def turn_end(self) -> int:
    """The token with which the template ends an assistant turn."""
    text = templates.turn_end(self._tokenizer, self._chat.variables)
    if text is None:
      raise _cannot('does not end turns of the assistant with a control token')
    return self._tokenizer.convert_tokens_to_ids(text)

  def check(self, form: Form | None) -> None:
    """Raise InvalidRequest if conversations with this template cannot be continued after sampled answers.

    Args:
      form: the form of tool calls; None: there are no tools.
    """
    asked, tool = {'role': 'user', 'content': f'{PROBE}u'}, {'role': 'tool', 'content': f'{PROBE}t'}
    earlier = [{'role': 'user', 'content': f'{PROBE}e'}, {'role': 'assistant', 'content': f'{PROBE}f'}]
    shapes = [[asked], [tool], [tool, tool], [tool, asked]] if form else [[asked]]
    for shape in shapes:
      found = self._behind(shape)
      if found != self._behind(shape, earlier):
        raise _cannot('renders a message differently if other messages come before it')
      if not found.body or found.body[0] != self.turn_end:
        raise _cannot('writes something between an answer and its end-of-turn token')
      mark, conversation = self._marked(shape)
      text = _behind(self._rendered(conversation, True, self._tools), mark)
      if any(text.count(message['content']) != shape.count(message) for message in shape):
        raise _cannot('does not write each message exactly once and unchanged')
    whole = self.begin([asked])
    if whole.tokens != self._tokens([*self._first, asked], lambda chat: chat, self._tools):
      raise _cannot("writes a header of the assistant's turn that merges with the token before it")
    self.said_behind(PROBE)

  # Answers.

  def text_of(self, answer: Sequence[int], stop: Sequence[str] = (), plain: str | None = None) -> str:
    """Return the text of an answer with the tags of calls and thinking, even if these are special tokens.

    Args:
      answer: the tokens of the answer.
      stop: strings at the first of which the text ends.
      plain: the text without special tokens, if it is known.
    """
    if plain is None:
      plain = self._tokenizer.decode(answer, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    if not any(token in self._special_marks for token in answer):
      return plain
    text, piece = '', []
    for token in [*answer, None]:
      if token is not None and token not in self._special_marks:
        piece.append(token)
        continue
      text += self._tokenizer.decode(piece, skip_special_tokens=True, clean_up_tokenization_spaces=False)
      text, piece = text + self._special_marks.get(token, ''), []
    return text[: min((at for at in map(text.find, stop) if at >= 0), default=len(text))]

  def edited(self, text: str, calls: Sequence[ToolCall], form: Form) -> list[int]:
    """Return the tokens of an answer with its calls replaced, including the end-of-turn token.

    Args:
      text: the text of the answer, with its calls.
      calls: the new calls.
      form: the form in which to write the calls.
    """
    tag = FORMS[form].tags[0]
    closed = text.rfind('</think>') + len('</think>') if '</think>' in text else 0
    at = text.find(tag, closed)
    said = text[closed:]
    thinking = text[: closed + len(said) - len(said.lstrip())] if closed else ''
    before = text[:at] if at >= 0 else thinking  # Without a tag the whole answer is the call.
    written = write_calls(calls, form, self._tools)
    if at >= 0 and not written.startswith(tag):
      written = tag + written
    return [*self._answer(before + written), self.turn_end]

  def answer(self, text: str, ended: bool) -> list[int]:
    """Tokenize an answer of a model with another tokenizer, with an end-of-turn token if it has `ended`."""
    return [*self._answer(text), *([self.turn_end] if ended else [])]

  def _answer(self, text: str) -> list[int]:
    """Tokenize an answer; only tags of calls and thinking can become control tokens."""
    found: list[int] = []
    marks = {text: token for token, text in self._special_marks.items()}
    while text:
      at, mark = min(((text.find(mark), mark) for mark in marks if mark in text), default=(len(text), ''))
      found += self._encode_plain(text[:at]) if at else []
      found += [marks[mark]] if mark else []
      text = text[at + len(mark) :]
    return found

  # Rendering.

  @functools.cached_property
  def _special_marks(self) -> dict[int, str]:
    """Those of `_MARKS` that are special tokens, which decoding leaves out, by token id."""
    added = getattr(self._tokenizer, 'added_tokens_decoder', {})
    return {number: token.content for number, token in added.items() if token.special and token.content in _MARKS}

  @functools.cached_property
  def _header_text(self) -> str:
    messages = [*self._first, _ASKED]
    with_header = self._rendered(messages, True, self._tools)
    return _without_beginning(with_header, self._rendered(messages, False, self._tools))

  @functools.cached_property
  def _before_user(self) -> Messages:
    """Messages that one of the user can follow: some templates demand an answer between two questions."""
    try:
      self._rendered([_ASKED, _ASKED], False, ())
    except InvalidRequest:
      return [_ASKED, {'role': 'assistant', 'content': PROBE}]
    return [_ASKED]

  def _accepted(self, messages: Messages, answer: Sequence[int] = ()) -> Messages:
    """Return the messages after an answer as the template accepts them: Mistral's demand ids, and no two questions."""
    ids = iter(call_ids(self.text_of(answer)) if self._writes_ids and answer else ())
    found: Messages = []
    for message in messages:
      if self._writes_ids and message['role'] == 'tool':
        message = {'tool_call_id': next(ids, f'{len(found):09}'), **message}
      both = found and found[-1]['role'] == message['role'] == 'user'
      if both and len(self._before_user) > 1:
        message = {**message, 'content': f'{found.pop()["content"]}\n\n{message["content"]}'}
      found.append(message)
    return found

  def _asked(self, part: Any, messages: Messages, drawn: bool = False) -> StudentPrompt:
    """Render messages; return the part that `part` selects from the text before the header, as a prompt."""
    header = self._header_text

    def body(chat: str) -> str:
      if not chat.endswith(header):
        raise _cannot('does not write the same header before every turn of the assistant')
      return part(chat[: len(chat) - len(header)])

    return StudentPrompt(self._tokens(messages, body, self._tools, drawn), list(self.header))

  def _behind(self, messages: Messages, earlier: Messages = (), drawn: bool = False) -> StudentPrompt:
    """Return the tokens that the template writes after an answer if messages follow."""
    mark, conversation = self._marked(messages, earlier)
    return self._asked(lambda chat: _behind(chat, mark), conversation, drawn)

  def _marked(self, messages: Messages, earlier: Messages = ()) -> tuple[str, Messages]:
    mark = f'{PROBE}a'
    while any(mark in text for message in [*self._first, *messages] for text in message.values()):
      mark += 'z'
    answered = [_ASKED, {'role': 'assistant', 'content': mark}]
    return mark, [*self._first, *earlier, *answered, *self._accepted(messages)]

  def _rendered(self, messages: Messages, header: bool, tools: Sequence[Any]) -> str:
    variables = {**self._chat.variables, **({'tools': list(tools)} if tools else {})}
    try:
      return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=header, **variables)
    except TEMPLATE_ERRORS as error:
      raise _refused(messages, error) from error

  def _tokens(self, messages: Messages, part: Any, tools: Sequence[Any], drawn: bool = False) -> list[int]:
    if not self._chat.split_special_tokens:
      return self._encode(part(self._rendered(messages, True, tools)))
    try:
      plain = plain_messages(self._tokenizer, drawn)
      return plain.encode(messages, True, tools=tools, part=part, **self._chat.variables)
    except TEMPLATE_ERRORS as error:
      raise _refused(messages, error) from error

  def _encode(self, text: str) -> list[int]:
    """Tokenize a text that the template has written, which can spell control tokens."""
    return self._tokenizer.encode(text, add_special_tokens=False)

  def _encode_plain(self, text: str) -> list[int]:
    """Tokenize a text that cannot spell control tokens unless the settings allow it."""
    if not self._chat.split_special_tokens:
      return self._encode(text)
    return plain_messages(self._tokenizer).encode_text(text)


@functools.lru_cache(maxsize=4)
def fingerprint(tokenizer: Tokenizer) -> str:
  """Return a digest of a tokenizer and its chat template; if it is equal, token ids can be exchanged."""
  ids = [tokenizer.encode(text, add_special_tokens=False) for text in identity.TEXTS]
  return identity.digest([sorted(tokenizer.get_vocab().items()), tokenizer.chat_template, ids])


def written_by(service: ServiceState) -> dict[str, Any]:
  """Return how messages of sessions are tokenized now, as JSON: tokenizer fingerprint and template settings."""
  with service.tokenizing:
    mark = fingerprint(service.tokenizer)
  chat = service.chat
  return {'tokenizer': mark, 'variables': jsonable(chat.variables), 'split_special_tokens': chat.split_special_tokens}


def dialogue_of(service: ServiceState, session: AgentSession) -> Dialogue:
  """Make the `Dialogue` of a session."""
  system, tools, stops = session.settings.system, session.settings.tools, service.stop_token_ids
  return Dialogue(service.tokenizer, service.chat, system=system, tools=tools, stop_token_ids=stops)


def template_of(tokenizer: Tokenizer, tools: Sequence[Any]) -> str | None:
  """Return the chat template for conversations with these tools; None: the tokenizer has none."""
  template = tokenizer.chat_template
  if isinstance(template, Mapping) and tools:
    return template.get('tool_use', template.get('default'))
  return templates.text_of(tokenizer)


def _behind(chat: str, mark: str) -> str:
  before, found, behind = chat.rpartition(mark)
  if not found or mark in before:
    raise _cannot('does not write answers of the assistant exactly once and unchanged')
  return behind


def _without_beginning(chat: str, beginning: str) -> str:
  if not chat.startswith(beginning):
    raise _cannot('renders a message differently if another message follows')
  return chat[len(beginning) :]


def _cannot(why: str) -> InvalidRequest:
  return InvalidRequest(
    f'The chat template of the model {why}, so a session cannot be continued after sampled tokens: set '
    'model.chat_template to another one, such as those of Qwen3, Hermes or Llama 3.1.'
  )


def _refused(messages: Messages, error: Exception) -> InvalidRequest:
  roles = ', '.join(str(message['role']) for message in messages)
  return InvalidRequest(
    f"The model's chat template rejects these messages ({roles}): {first_line(error).rstrip('.!')}; use roles that it "
    'accepts, or set model.chat_template to another one.',
    field='messages',
  )
