"""Bytes and texts of single tokens, whose concatenation is the whole text even if tokens split a character."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
import functools
import json
import re
from typing import Any

Tokenizer = Any  # A transformers tokenizer.

_BYTE = re.compile(r'<0x([0-9A-Fa-f]{2})>')  # A byte in vocabularies with byte fallback.
_SPACE = '▁'  # A space in sentencepiece vocabularies.


class TokenTexts:
  """The bytes and texts of a vocabulary's tokens."""

  def __init__(self, tokenizer: Tokenizer):
    self._tokenizer = tokenizer
    self._added = {number: token.content for number, token in tokenizer.added_tokens_decoder.items()}
    self._special = frozenset(tokenizer.all_special_ids)
    decoders = _decoders(tokenizer)
    self._byte_level, self._spaces = 'ByteLevel' in decoders, bool({'ByteFallback', 'Metaspace'} & decoders)
    self._known: dict[int, bytes] = {}  # Cache, at most as large as the vocabulary.

  def bytes_of(self, token: int) -> bytes:
    """Return the UTF-8 bytes of a token, which may be part of a character; none for an id that is not a token."""
    found = self._known.get(token)
    if found is None:
      found = self._known[token] = self._bytes_of(token)
    return found

  def _bytes_of(self, token: int) -> bytes:
    piece = self._added.get(token)
    if piece is not None and (token in self._special or not self._spaces):
      return piece.encode()
    piece = self._tokenizer.convert_ids_to_tokens(token)
    if piece is None:
      return b''
    if self._byte_level:
      table = _byte_of_character()
      return bytes(table[character] for character in piece) if set(piece) <= table.keys() else piece.encode()
    if self._spaces:
      byte = _BYTE.fullmatch(piece)
      return bytes([int(byte[1], 16)]) if byte else piece.replace(_SPACE, ' ').encode()
    return self._tokenizer.decode([token], clean_up_tokenization_spaces=False).encode()

  def text_of(self, token: int) -> str:
    r"""Return the text of a token; if it is part of a character, its bytes in the form 'bytes:\xe2\x80'."""
    found = self.bytes_of(token)
    try:
      return found.decode()
    except UnicodeDecodeError:
      return 'bytes:' + ''.join(f'\\x{byte:02x}' for byte in found)

  def text(self, tokens: Iterable[int], *, special: bool = True) -> str:
    """Return the text of tokens, without special ones unless `special`; incomplete characters become U+FFFD."""
    return b''.join(self.bytes_of(each) for each in tokens if special or each not in self._special).decode(
      errors='replace'
    )

  def offsets(self, tokens: Sequence[int], start: int = 0, *, special: bool = True) -> list[int]:
    """Return the offset of each token's text in the text of all.

    Args:
      tokens: T token ids.
      start: offset of the first token.
      special: whether the text includes special tokens.

    Returns:
      T offsets in characters; a token that continues a character has the offset of that character.
    """
    decoder = codecs.getincrementaldecoder('utf-8')('replace')
    found = []
    for token in tokens:
      found.append(start)
      if special or token not in self._special:
        start += len(decoder.decode(self.bytes_of(token)))
    return found


def _decoders(tokenizer: Tokenizer) -> set[str]:
  """Return the names of the steps of a tokenizer's decoder; none if they are unknown."""
  backend = getattr(tokenizer, 'backend_tokenizer', None)
  decoder = None if backend is None else backend.decoder
  if decoder is None:
    return set()

  def names(state: dict[str, Any]) -> Iterable[str]:
    yield state['type']
    for step in state.get('decoders', ()):
      yield from names(step)

  return set(names(json.loads(decoder.__getstate__())))


@functools.cache
def _byte_of_character() -> dict[str, int]:
  """Return the mapping from characters to bytes in byte-level vocabularies (as in GPT-2).

  Bytes that are printable in Latin-1 stand for themselves; the others are, in order, the characters from U+0100 on.
  """
  plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
  others = [byte for byte in range(256) if byte not in set(plain)]
  return {chr(byte): byte for byte in plain} | {chr(0x100 + place): byte for place, byte in enumerate(others)}
