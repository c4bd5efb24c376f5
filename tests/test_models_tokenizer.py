"""Tokenizers that chat training can use, and clear words about those that it cannot."""

import json
import shutil

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from models import tokenizer as tokenizers_module
from sdpo_jax.errors import UserError

TEMPLATE = (
  "{% for message in messages %}<|im_start|>{{ message['role'] }} {{ message['content'] }}<|im_end|>{% endfor %}"
  '{% if add_generation_prompt %}<|im_start|>assistant {% endif %}'
)


@pytest.fixture
def directory(tmp_path):
  """A tokenizer of words whose chat template is in tokenizer_config.json."""
  words = ['<unk>', '<|im_start|>', '<|im_end|>', 'user', 'assistant', 'a', 'b']
  tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token='<unk>'))
  tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
  tokenizer.add_special_tokens(['<|im_start|>', '<|im_end|>'])
  tokenizer.save(str(tmp_path / 'tokenizer.json'))
  write(tmp_path, 'tokenizer_config.json', chat_template=TEMPLATE)
  return tmp_path


def write(directory, name, **values):
  if name == 'tokenizer_config.json':
    values = {'tokenizer_class': 'PreTrainedTokenizerFast', 'eos_token': '<|im_end|>', 'unk_token': '<unk>'} | values
  (directory / name).write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def test_the_template_may_live_in_either_file(directory):
  first = tokenizers_module.load(directory, vocab_size=7)
  write(directory, 'tokenizer_config.json')
  (directory / 'chat_template.jinja').write_text(TEMPLATE)
  second = tokenizers_module.load(directory)
  for tokenizer in (first, second):
    messages = [{'role': 'user', 'content': 'a b'}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert ids == [1, 3, 5, 6, 2, 1, 4]


def test_mistakes_are_named(directory, tmp_path_factory):
  def says(pattern, **changes):
    with pytest.raises(UserError, match=pattern):
      tokenizers_module.load(directory, **changes)

  says('has token id 6; the model knows 6 tokens only', vocab_size=6)
  write(directory, 'tokenizer_config.json', chat_template="{{ raise_exception('no users') }}")
  says('chat template of .* fails on a single user message: no users')
  write(directory, 'tokenizer_config.json')
  says(r'has no chat template: add chat_template to tokenizer_config\.json')
  (directory / 'tokenizer.json').write_text('{"model": 7}')
  says('tokenizer in .* cannot be read')
  (directory / 'tokenizer.json').unlink()
  says(r'has no tokenizer \(tokenizer\.json')
  shutil.rmtree(directory)
  says('does not exist')


def test_stop_tokens_follow_generation_config_then_config_then_tokenizer(directory):
  tokenizer = tokenizers_module.load(directory)

  def ids():
    return tokenizers_module.stop_token_ids(directory, tokenizer)

  assert ids() == (2,)
  write(directory, 'config.json', eos_token_id=5)
  assert ids() == (5, 2)
  write(directory, 'generation_config.json', temperature=0.6)
  assert ids() == (5, 2)
  write(directory, 'generation_config.json', eos_token_id=[2, 6])
  assert ids() == (2, 6)
  write(directory, 'generation_config.json', eos_token_id='<|im_end|>')
  with pytest.raises(UserError, match=r'generation_config\.json: eos_token_id must be a token id'):
    ids()


def test_a_model_without_any_stop_token_is_refused(directory):
  tokenizer = tokenizers_module.load(directory)
  tokenizer.eos_token = None
  with pytest.raises(UserError, match='names no end-of-sequence token'):
    tokenizers_module.stop_token_ids(directory, tokenizer)
