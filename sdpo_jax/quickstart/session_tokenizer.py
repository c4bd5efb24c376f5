"""Tokenizer of the tiny agent: words and runs of punctuation in its lessons are single tokens, other text is bytes.

It is constructed without training: byte-level, with whole pieces in its vocabulary. A word is the same token wherever
it occurs, in a question, a correction or a call, so that the model can copy it; white space joins punctuation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
import re

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from sdpo_jax.quickstart import small_tokenizer as chatml
from sdpo_jax.quickstart.small_tokenizer import END, END_OF_TEXT, START

OPEN, CLOSE = '<tool_call>', '</tool_call>'  # Text that models write, as in Qwen3; not special tokens.
# The prompt has only the names of the tools. Tool turns look like user turns.
CHAT_TEMPLATE = (
  "{%- set told = messages[0]['content'] if messages and messages[0]['role'] == 'system' else '' %}"
  "{%- if told or tools %}{{ '<|im_start|>system\\n' + told }}"
  "{%- if tools %}{{ ('\\n' if told else '') + 'Tools:' }}"
  "{%- for tool in tools %}{{ ' ' + (tool['function'] or tool)['name'] }}{%- endfor %}{%- endif %}"
  "{{ '<|im_end|>\\n' }}{%- endif %}"
  '{%- for message in messages %}'
  "{%- if message['role'] != 'system' or not loop.first %}"
  "{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}"
  "{%- for call in message['tool_calls'] or [] %}{%- set call = call['function'] or call %}"
  "{{ ('\\n' if message['content'] or not loop.first else '') + '<tool_call>\\n{\"name\": \"' + call['name'] }}"
  "{{ '\", \"arguments\": ' + (call['arguments'] if call['arguments'] is string else call['arguments'] | tojson) }}"
  "{{ '}\\n</tool_call>' }}{%- endfor %}"
  "{{ '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
  "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
# A digit; a word, possibly with a file name's extension; a run of anything else.
_PIECES = r'\p{N}|[\p{L}_]+(?:\.py\b)?|[^\p{L}\p{N}_]+'


def make(texts: Iterable[str], sentences: Sequence[str]) -> Tokenizer:
  """Return a tokenizer in which every piece of the texts, and each of the sentences, is one token."""
  splitter, pieces = chatml.splitter('|'.join([*map(re.escape, sentences), _PIECES])), set()
  for text in texts:
    pieces.update(piece for piece, _ in splitter.pre_tokenize_str(text))
  specials, letters = [END_OF_TEXT, START, END, OPEN, CLOSE], sorted(pre_tokenizers.ByteLevel.alphabet())
  names = [*specials, *letters, *sorted(pieces - set(letters))]
  tokenizer = Tokenizer(BPE({name: number for number, name in enumerate(names)}, [], ignore_merges=True))
  tokenizer.pre_tokenizer = splitter
  tokenizer.decoder = decoders.ByteLevel()
  tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in specials[:3]])
  tokenizer.add_tokens([AddedToken(name, normalized=False) for name in specials[3:]])
  return tokenizer
