"""A small byte-level BPE tokenizer with a ChatML template, trained on a task's own text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
import json
import pathlib

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

END_OF_TEXT, START, END = '<|endoftext|>', '<|im_start|>', '<|im_end|>'
CHAT_TEMPLATE = (
  '{%- for message in messages %}'
  "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
  '{%- endfor %}'
  "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
# Pieces that never merge with each other: one digit; a word or punctuation followed by a white-space character; other
# white space. The space belongs to the word before it, so that a digit is one token wherever it stands.
_PIECES = r'\p{N}|\p{L}+\s?|[^\s\p{L}\p{N}]+\s?|\s+'


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
  """Train a tokenizer of at most `vocab_size` tokens that encodes any text.

  Frequent words of `texts` become one token.
  """
  tokenizer = Tokenizer(BPE())
  tokenizer.pre_tokenizer = splitter(_PIECES)
  tokenizer.decoder = decoders.ByteLevel()
  trainer = BpeTrainer(
    vocab_size=vocab_size,
    special_tokens=[END_OF_TEXT, START, END],
    initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    show_progress=False,
  )
  tokenizer.train_from_iterator(texts, trainer)
  return tokenizer


def splitter(pieces: str) -> pre_tokenizers.PreTokenizer:
  """Return a pre-tokenizer that splits text by a regular expression and maps each piece to byte-level letters."""
  return pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(Regex(pieces), 'isolated'),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )


def save(
  tokenizer: Tokenizer,
  directory: pathlib.Path,
  template: str = CHAT_TEMPLATE,
  *,
  kind: str = 'PreTrainedTokenizerFast',
  end: str = END,
  others: Sequence[str] = (START,),
) -> None:
  """Write tokenizer.json and tokenizer_config.json for transformers.AutoTokenizer.

  Args:
    tokenizer: the tokenizer to write.
    directory: an existing directory.
    template: chat template.
    kind: the transformers class that loads it.
    end: the special token that ends a turn.
    others: special tokens besides it and `END_OF_TEXT`, the padding token.
  """
  tokenizer.save(str(directory / 'tokenizer.json'))
  values = {
    'tokenizer_class': kind,
    'chat_template': template,
    'eos_token': end,
    'pad_token': END_OF_TEXT,
    'additional_special_tokens': list(others),
    'clean_up_tokenization_spaces': False,
    'model_max_length': 1024,
  }
  (directory / 'tokenizer_config.json').write_text(json.dumps(values, indent=2) + '\n', encoding='utf-8')
