"""A random model whose tokens are letters, and the tokenizer that says so."""

import types

ALPHABET = 'abcdefghijklmnopqrstuvwxyz .,'
CONFIG = dict(
  model_type='qwen3',
  vocab_size=40,  # Larger than the alphabet: some tokens have no text, as in padded vocabularies.
  hidden_size=32,
  intermediate_size=48,
  num_hidden_layers=1,
  num_attention_heads=4,
  num_key_value_heads=2,
  head_dim=16,
  tie_word_embeddings=True,
  initializer_range=0.3,
)


def decode_text(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False):
  special = '' if skip_special_tokens else '<end>'
  return ''.join(ALPHABET[t - 1] if 0 < t <= len(ALPHABET) else special if t == 30 else '' for t in tokens)


TOKENIZER = types.SimpleNamespace(decode=decode_text)
