"""The fake tokenizer with which the golden re-prompting files were made."""

from __future__ import annotations

from typing import Any


class CharacterTokenizer:
  """The tokenizer of the golden files: id = code point + 10, 0 pads, 2 ends; chat turns in <|role|> … <|end|>."""

  pad_token_id = 0
  eos_token_id = 2
  chat_template = 'fixed'

  def apply_chat_template(
    self,
    conversations: list[Any],
    *,
    tokenize: bool,
    return_dict: bool,
    add_generation_prompt: bool,
    enable_thinking: bool = True,
  ) -> list[list[int]]:
    assert tokenize and not return_dict and add_generation_prompt
    return [self.encode(self._render(messages, enable_thinking)) for messages in conversations]

  def _render(self, messages: list[dict[str, str]], enable_thinking: bool) -> str:
    turns = ''.join(f'<|{m["role"]}|>\n{m["content"]}<|end|>\n' for m in messages)
    return turns + '<|assistant|>\n' + ('' if enable_thinking else '<think>\n\n</think>\n\n')

  def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
    return [ord(character) + 10 for character in text]

  def decode(self, tokens: list[int]) -> str:
    return ''.join(chr(token - 10) for token in tokens if token >= 10)
