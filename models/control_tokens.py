"""Encoding of conversations in which only the chat template can write control tokens, and messages cannot.

A chat template joins its own text and the messages into one text, in which a tokenizer turns every string such as
`<|im_end|>` into the token of that name, no matter where it came from. Here such a string in a message gets a mark
before the template is applied. In the template's output, strings without the mark are the template's own and become
tokens; those of the messages lose their mark and stay text. A message that begins or ends with part of such a string
also gets a mark there, since templates may put messages side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import functools
import json
import re
import secrets
from typing import Any

import tokenizers

Tokenizer = Any  # transformers.PreTrainedTokenizerBase.
Conversation = Sequence[dict[str, str]]

_PRIVATE_USE = (0xE000, 0xF8FF)  # First and last of the characters that ordinary texts do not contain.
_MARK_LENGTH = 4
_MARKER = re.compile(r'[<\[].+[>\]]', re.DOTALL)  # Delimiters of turns: <｜User｜>, [INST].
_TAG = re.compile(r'<(/?)([A-Za-z_]\w*)>')  # Tags that models write as text: <think>, </tool_call>.


def control_strings(tokenizer: Tokenizer) -> tuple[str, ...]:
  """Return the strings that become control tokens, longest first.

  These are the special tokens and, of the other added tokens, those in `tokenizer.chat_control_tokens` or, if that is
  None, the delimiters of turns in the chat template. Tags that come in pairs, such as <think> and </think>, are text:
  models write them, and templates look for them.
  """
  added = getattr(tokenizer, 'added_tokens_decoder', {}).values()
  names = {token.content for token in added}
  named = getattr(tokenizer, 'chat_control_tokens', None)
  template = getattr(tokenizer, 'chat_template', None) or ''
  template = template if isinstance(template, str) else '\0'.join(template.values())

  def steers(text: str) -> bool:
    if named is not None:
      return text in named
    return text in template and is_delimiter(text, names)

  strings = {token.content for token in added if token.special or steers(token.content)}
  strings.update(getattr(tokenizer, 'all_special_tokens', ()))
  return tuple(sorted(strings - {''}, key=lambda text: (-len(text), text)))


def paired_tags(tokenizer: Tokenizer) -> tuple[str, ...]:
  """Return the added tokens that are tags in pairs and no control tokens, such as <tool_call> of Qwen3."""
  names = {token.content for token in getattr(tokenizer, 'added_tokens_decoder', {}).values()}
  return tuple(sorted(filter(functools.partial(_is_paired, names=names), names - {*control_strings(tokenizer)})))


def is_delimiter(text: str, names: set[str]) -> bool:
  """Return whether a token looks like a delimiter of turns, such as <｜User｜> or [INST], but not like a paired tag.

  Args:
    text: text of the token.
    names: texts of all tokens, in which the other tag of a pair is looked up.
  """
  return _MARKER.fullmatch(text) is not None and not _is_paired(text, names)


def _is_paired(text: str, names: set[str]) -> bool:
  tag = _TAG.fullmatch(text)
  return tag is not None and f'<{"" if tag[1] else "/"}{tag[2]}>' in names


class PlainMessages:
  """An encoder of conversations in which control tokens that messages spell stay text."""

  def __init__(self, tokenizer: Tokenizer, drawn: bool = True):
    """Make the encoder; if messages hold nothing that a model has `drawn`, their `paired_tags` stay text, too."""
    self._tokenizer = tokenizer
    self._strings = control_strings(tokenizer) + (() if drawn else paired_tags(tokenizer))
    self._pattern = _any_of(self._strings)
    self._beginnings = {text[:length] for text in self._strings for length in range(1, len(text))}
    self._ends = {text[-length:] for text in self._strings for length in range(1, len(text))}
    self._longest = max(map(len, self._strings), default=1)
    self._normalize = _normalizer(tokenizer, self._strings)
    self._marked: tuple[str, _Backend] | None = None  # Replaced as a whole, since several threads may encode.

  def spelled(self, messages: Conversation) -> bool:
    """Return whether a message spells a control token, or part of one at its beginning or end.

    This includes tokens that only the tokenizer's normalisation brings about.
    """
    texts = [text for message in messages for text in message.values()]
    if any(self._pattern.search(text) or any(self._halves(text)) for text in texts):
      return True
    return self._normalize is not None and any(self._pattern.search(self._normalize(text)) for text in texts)

  def encode(
    self,
    messages: Conversation,
    add_generation_prompt: bool = True,
    *,
    tools: Sequence[Any] = (),
    part: Callable[[str], str] = lambda chat: chat,
    **template_options: Any,
  ) -> list[int]:
    """Return the token ids of a conversation, by default including the header of the assistant's next turn.

    Args:
      messages: the conversation.
      add_generation_prompt: whether to add the header of the assistant's next turn.
      tools: JSON schemas of tools, which cannot spell control tokens either.
      part: function from the template's output to the part of it that is encoded.
      template_options: variables of the template.

    Raises:
      jinja2.TemplateError: the chat template refuses the messages.
    """
    sign, backend = self._backend([*_texts_of(messages), *_texts_of(tools)])

    def mark(text: str) -> str:
      first, last = (sign if half else '' for half in self._halves(text))
      inner = text.strip()
      before, after = text.split(inner, 1) if inner else (text, '')
      inner = self._pattern.sub(lambda match: _marked(match[0], sign), inner)
      return before + first + inner + last + after

    if tools:
      template_options['tools'] = [_mapped(tool, mark) for tool in tools]
    chat = self._tokenizer.apply_chat_template(
      [{key: mark(text) for key, text in message.items()} for message in messages],
      tokenize=False,
      add_generation_prompt=add_generation_prompt,
      **template_options,
    )
    return backend.encode(part(chat))

  def encode_text(self, text: str) -> list[int]:
    """Return the token ids of a text that is not a conversation and in which nothing is a control token."""
    sign, backend = self._backend([text])
    return backend.encode(self._pattern.sub(lambda match: _marked(match[0], sign), text))

  def _halves(self, text: str) -> tuple[bool, bool]:
    """Return whether a text begins with the end of a control token, and whether it ends with the beginning of one.

    White space around the text is ignored, since templates strip it.
    """
    head, tail = text[: self._longest], text[-self._longest :]
    head = text.lstrip()[: self._longest] if head[:1].isspace() else head
    tail = text.rstrip()[-self._longest :] if tail[-1:].isspace() else tail
    return (
      any(head[:length] in self._ends for length in range(1, len(head) + 1)),
      any(tail[-length:] in self._beginnings for length in range(1, len(tail) + 1)),
    )

  def _backend(self, texts: Sequence[str]) -> tuple[str, _Backend]:
    """Return a mark that none of the texts contains, and an encoder for texts with this mark."""
    marked = self._marked
    while marked is None or any(marked[0] in text for text in texts):
      first, last = _PRIVATE_USE
      mark = ''.join(chr(first + secrets.randbelow(last - first + 1)) for _ in range(_MARK_LENGTH))
      kind = _Renamed if getattr(self._tokenizer, 'is_fast', False) else _Split
      self._marked = marked = mark, kind(self._tokenizer, self._strings, mark)
    return marked


@functools.lru_cache(maxsize=4)
def plain_messages(tokenizer: Tokenizer, drawn: bool = True) -> PlainMessages:
  """Return the cached `PlainMessages` of a tokenizer."""
  return PlainMessages(tokenizer, drawn)


def _texts_of(value: Any) -> Iterator[str]:
  """Yield all texts in a JSON value, including names of fields."""
  if isinstance(value, str):
    yield value
  elif isinstance(value, dict):
    for name, each in value.items():
      yield name
      yield from _texts_of(each)
  elif isinstance(value, (list, tuple)):
    for each in value:
      yield from _texts_of(each)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
  """Return a JSON value with `change` applied to every text."""
  if isinstance(value, str):
    return change(value)
  if isinstance(value, dict):
    return {change(name): _mapped(each, change) for name, each in value.items()}
  return [_mapped(each, change) for each in value] if isinstance(value, (list, tuple)) else value


def _marked(text: str, mark: str) -> str:
  return text[0] + mark + text[1:]


def _any_of(strings: Sequence[str]) -> re.Pattern[str]:
  return re.compile('|'.join(map(re.escape, strings)) or '(?!)')


def _normalizer(tokenizer: Tokenizer, strings: Sequence[str]) -> Any:
  """Return the tokenizer's normalisation if control tokens are matched after it; else None."""
  if not getattr(tokenizer, 'is_fast', False) or tokenizer.backend_tokenizer.normalizer is None:
    return None
  normalized = {token.content for token in tokenizer.added_tokens_decoder.values() if token.normalized}
  return tokenizer.backend_tokenizer.normalizer.normalize_str if normalized & set(strings) else None


class _Renamed:
  """An encoder that uses a copy of the tokenizer whose control tokens are renamed with the mark.

  In the template's output, marks are first exchanged: the template's own strings get them, and those of the messages
  lose them. The copy then recognises the former, and reads the latter as ordinary text.
  """

  def __init__(self, tokenizer: Tokenizer, strings: Sequence[str], mark: str):
    renamed = {text: _marked(text, mark) for text in strings}
    self._exchanged = renamed | {new: old for old, new in renamed.items()} | {mark: ''}
    self._pattern = _any_of(sorted(self._exchanged, key=len, reverse=True))
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    ids = {}
    for token in described['added_tokens']:
      token['content'] = renamed.get(token['content'], token['content'])
      ids[token['content']] = token['id']
    _rename_in_model(described['model'], renamed)
    described.update(post_processor=None, truncation=None, padding=None)  # The template writes everything.
    self._copy = tokenizers.Tokenizer.from_str(json.dumps(described))
    # The library gives consecutive ids to added tokens outside of the model's vocabulary, even if they had gaps.
    self._ids = {self._copy.token_to_id(content): number for content, number in ids.items()}

  def encode(self, chat: str) -> list[int]:
    exchanged = self._pattern.sub(lambda match: self._exchanged[match[0]], chat)
    return [self._ids.get(number, number) for number in self._copy.encode(exchanged, add_special_tokens=False).ids]


def _rename_in_model(model: dict[str, Any], renamed: dict[str, str]) -> None:
  """Rename control tokens in the model's vocabulary, so that no text is merged to them."""
  vocabulary = model['vocab']
  if isinstance(vocabulary, list):  # Of a unigram model, with scores.
    model['vocab'] = [[renamed.get(piece, piece), score] for piece, score in vocabulary]
  elif not renamed.keys().isdisjoint(vocabulary):
    model['vocab'] = {renamed.get(piece, piece): number for piece, number in vocabulary.items()}
    if 'merges' in model:
      pairs = [merge.split(' ') if isinstance(merge, str) else merge for merge in model['merges']]
      model['merges'] = [pair for pair in pairs if renamed.keys().isdisjoint([*pair, ''.join(pair)])]
  if model.get('unk_token') in renamed:
    model['unk_token'] = renamed[model['unk_token']]


class _Split:
  """An encoder that works piece by piece, for tokenizers without a backend of the tokenizers library.

  Control tokens of the template are looked up. Text between them is encoded as usual or, if a message spells a control
  token in it, without matching added tokens.
  """

  def __init__(self, tokenizer: Tokenizer, strings: Sequence[str], mark: str):
    self._tokenizer = tokenizer
    self._spelled = {_marked(text, mark): text for text in strings} | {mark: ''}
    self._pattern = _any_of(sorted([*self._spelled, *strings], key=len, reverse=True))
    self._names = _any_of(strings)

  def encode(self, chat: str) -> list[int]:
    ids: list[int] = []
    text, end = '', 0
    for match in self._pattern.finditer(chat):
      text, end = text + chat[end : match.start()], match.end()
      if match[0] in self._spelled:
        text += self._spelled[match[0]]
      else:
        ids += [*self._text(text), self._tokenizer.convert_tokens_to_ids(match[0])]
        text = ''
    return ids + self._text(text + chat[end:])

  def _text(self, text: str) -> list[int]:
    options = {'split_special_tokens': True} if self._names.search(text) else {}
    return self._tokenizer.encode(text, add_special_tokens=False, **options) if text else []


_Backend = _Renamed | _Split
