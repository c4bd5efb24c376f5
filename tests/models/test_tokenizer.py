"""Tokenizers that can be used for chat, and clear errors about those that cannot."""

import json
import shutil

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

from sdpo_jax.data import prompts
from sdpo_jax.errors import UserError
from sdpo_jax.models import chat_template
from sdpo_jax.models import tokenizer as tokenizers_module
from sdpo_jax.rollout.stops import to_text

MESSAGES = [{'role': 'user', 'content': 'a b'}]
TEMPLATE = (
  "{% for message in messages %}<|im_start|>{{ message['role'] }} {{ message['content'] }}<|im_end|>{% endfor %}"
  '{% if add_generation_prompt %}<|im_start|>assistant {% endif %}'
)

# As models that see images have it, which looks for lists of parts.
PARTS = '{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}'


@pytest.fixture
def directory(tmp_path):
  """Return a tokenizer of words whose chat template is in tokenizer_config.json."""
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
    ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert ids == [1, 3, 5, 6, 2, 1, 4]


@pytest.mark.parametrize('listed', [True, False])
def test_of_several_templates_that_for_conversations_without_tools_is_taken(directory, listed):
  several = {'tool_use': '{{ 1 / 0 }}', 'default': TEMPLATE}
  listing = [{'name': name, 'template': template} for name, template in several.items()]
  write(directory, 'tokenizer_config.json', chat_template=listing if listed else several)
  tokenizer = tokenizers_module.load(directory)
  assert chat_template.text_of(tokenizer) == TEMPLATE and chat_template.turn_end(tokenizer, {}) == '<|im_end|>'
  assert tokenizer.apply_chat_template(MESSAGES, return_dict=False) == [1, 3, 5, 6, 2]
  del several['default']
  write(directory, 'tokenizer_config.json', chat_template=several)
  with pytest.raises(UserError, match='has no chat template'):
    tokenizers_module.load(directory)
  (directory / 'chat_template.jinja').write_text(TEMPLATE)  # Goes before those.
  assert chat_template.text_of(tokenizers_module.load(directory)) == TEMPLATE


def test_a_template_from_a_file_goes_before_all_others(directory, tmp_path_factory):
  path = tmp_path_factory.mktemp('templates') / 'bare.jinja'
  for template in (None, TEMPLATE):
    write(directory, 'tokenizer_config.json', chat_template=template)
    path.write_text('{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}')
    tokenizer = tokenizers_module.load(directory, chat_template=path)
    assert tokenizer.apply_chat_template(MESSAGES, return_dict=False) == [5, 6, 2]
  for text, says in (
    ('{% for', 'fails on a single user message'),
    ("{{ raise_exception('No.') }}", r'bare\.jinja fails on a single user message: No: name another template'),
    ('{{ messages[3].content }}', 'fails on a single user message'),
    ('{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}', 'fails on a single user message'),
    ('{{ prompt }}<|im_end|>', r"bare\.jinja does not write the user's message: name a file"),
    (PARTS, r"bare\.jinja does not write the user's message"),
    (' \n', 'is empty'),
    ('\udcff', r'model\.chat_template=.*bare\.jinja cannot be read'),  # Not UTF-8.
  ):
    path.write_text(text, errors='surrogateescape')
    with pytest.raises(UserError, match=says):
      tokenizers_module.load(directory, chat_template=path)
  with pytest.raises(UserError, match=r'model\.chat_template=.*missing cannot be read'):
    tokenizers_module.load(directory, chat_template=path.with_name('missing'))


@pytest.mark.parametrize('family', ['qwen3', 'llama', 'qwen2', 'olmo3', 'gemma3_text', 'mistral'])
def test_what_is_read_as_it_is_stored_is_what_transformers_would_read(directory, family, monkeypatch):
  """Without `AutoTokenizer`, if the tokenizer names the class and transformers relies on that."""
  write(directory, 'config.json', model_type=family)
  asked = []
  read = AutoTokenizer.from_pretrained
  monkeypatch.setattr(AutoTokenizer, 'from_pretrained', lambda *of, **how: asked.append(of) or read(*of, **how))
  ours, theirs = tokenizers_module.load(directory), read(directory)
  assert len(asked) == (family not in ('qwen3', 'llama'))
  assert type(ours) is type(theirs) and ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
  assert ours.special_tokens_map == theirs.special_tokens_map and ours.init_kwargs.keys() == theirs.init_kwargs.keys()


def test_code_of_a_model_directory_is_never_run_nor_asked_about(directory, monkeypatch):
  monkeypatch.setattr('builtins.input', lambda *_: pytest.fail('asked'))
  write(directory, 'tokenizer_config.json', tokenizer_class='Own', auto_map={'AutoTokenizer': ['own.Own', None]})
  (directory / 'own.py').write_text('raise SystemExit')
  with pytest.raises(UserError, match='cannot be read: .*custom code'):
    tokenizers_module.load(directory)


def test_an_end_that_the_model_cannot_write_is_refused(directory):
  write(directory, 'generation_config.json', eos_token_id=[2, 10**12])
  assert tokenizers_module.stop_token_ids(directory, tokenizers_module.load(directory)) == (2, 10**12)
  with pytest.raises(UserError, match=r'eos_token_id .* holds \[1000000000000\], and the token ids .* from 0 to 6'):
    tokenizers_module.load(directory, vocab_size=7)


def add_tokens(directory, *tokens):
  described = json.loads((directory / 'tokenizer.json').read_text())
  plain = {'single_word': False, 'lstrip': False, 'rstrip': False, 'normalized': False}
  for number, (text, special) in enumerate(tokens, start=7):
    described['added_tokens'].append({'id': number, 'content': text, 'special': special, **plain})
  (directory / 'tokenizer.json').write_text(json.dumps(described))


def test_special_tokens_without_an_embedding_are_text_and_others_are_refused(directory, caplog):
  """As in Gemma 3 1B, whose tokenizer has a token for images that has no embedding in the model."""
  add_tokens(directory, ('<image>', True), ('<pad>', True))
  write(directory, 'tokenizer_config.json', chat_template=TEMPLATE, pad_token='<pad>', image_token='<image>')
  asked = [{'role': 'user', 'content': 'a <image> b <pad>'}]
  options = {'add_generation_prompt': True, 'return_dict': False}
  assert tokenizers_module.load(directory, vocab_size=9).apply_chat_template(asked, **options)[3] == 7
  loaded = tokenizers_module.load(directory, vocab_size=7)
  assert max(loaded.get_vocab().values()) == 6 and loaded.pad_token is None
  for split in (True, False):
    chat = prompts.ChatFormat(split_special_tokens=split)
    assert prompts.chat_tokens(loaded, [asked], chat) == [[1, 3, 5, 0, 6, 0, 2, 1, 4]]
  assert "no embedding for 2 special tokens of the tokenizer, such as '<image>', which are read as text" in caplog.text
  for special, template in ((False, TEMPLATE), (True, TEMPLATE + '<image>')):
    described = json.loads((directory / 'tokenizer.json').read_text())
    described['added_tokens'] = [token for token in described['added_tokens'] if token['id'] < 7]
    (directory / 'tokenizer.json').write_text(json.dumps(described))
    add_tokens(directory, ('<image>', special))
    write(directory, 'tokenizer_config.json', chat_template=template)
    with pytest.raises(UserError, match=r"has token id 7 \('<image>'\), but the model knows 7 tokens only"):
      tokenizers_module.load(directory, vocab_size=7)
  write(directory, 'tokenizer_config.json', chat_template=TEMPLATE, eos_token='<image>')
  with pytest.raises(UserError, match='the model knows 7 tokens only'):
    tokenizers_module.load(directory, vocab_size=7)


def test_ids_beyond_the_tokenizer_decode_to_nothing(directory):
  tokenizer = tokenizers_module.load(directory, vocab_size=1000)
  assert to_text(tokenizer, [5, 999, 6]) == tokenizer.decode([5, 6]) == 'a b' and to_text(tokenizer, [700]) == ''


def test_mistakes_are_named(directory, tmp_path_factory):
  def says(pattern, **changes):
    with pytest.raises(UserError, match=pattern):
      tokenizers_module.load(directory, **changes)

  says(r"has token id 6 \('b'\), but the model knows 6 tokens only: take the tokenizer and", vocab_size=6)
  write(directory, 'tokenizer_config.json', chat_template="{{ raise_exception('no users') }}")
  says('chat template of .* fails on a single user message: no users')
  write(directory, 'tokenizer_config.json')
  says(
    r'has no chat template: name a file with one in model\.chat_template \(launch\.sample: --chat_template\), or write'
  )
  (directory / 'tokenizer.json').write_text('{"model": 7}')
  says('tokenizer in .* cannot be read')
  (directory / 'tokenizer.json').unlink()
  (directory / 'vocab.json').write_text('{"a": 0}')  # And no merges.txt.
  says('tokenizer in .* cannot be read')
  (directory / 'vocab.json').unlink()
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
