"""Dialogues in the templates of models that call tools."""

import functools
import pathlib
import tempfile

from sdpo_jax.config import SelfDistillationConfig
from sdpo_jax.data.prompts import ChatFormat
from sdpo_jax.serving.sessions.conversation import Dialogue
from tests.serving.sessions.tool_templates import FAMILIES, make_tokenizer

TOOLS = [{'type': 'function', 'function': {'name': 'grep', 'description': 'Finds.', 'parameters': {'type': 'object'}}}]
CONFIG = SelfDistillationConfig(max_reprompt_len=10_000)


@functools.cache
def tokenizer(family):
  with tempfile.TemporaryDirectory() as folder:
    return make_tokenizer(pathlib.Path(folder), family)


@functools.cache
def stops(family):
  ends = ['<|eot_id|>', '<|eom_id|>', '<|end_of_text|>'] if family == 'llama3' else [FAMILIES[family][2]]
  return tuple(tokenizer(family).convert_tokens_to_ids(ends))


def dialogue(family, **more):
  chat = ChatFormat(more.pop('variables', {}))
  return Dialogue(tokenizer(family), chat, **{'tools': TOOLS, 'stop_token_ids': stops(family), **more})


def text_of(family, tokens):
  return tokenizer(family).decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def drawn(family, text, ended=True):
  """Return what a model draws that says this."""
  tokens = tokenizer(family).encode(text, add_special_tokens=False)
  return [*tokens, tokenizer(family).eos_token_id] if ended else tokens
