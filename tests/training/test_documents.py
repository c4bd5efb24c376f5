"""What stands before the prompts of a cartridge: a document as the model's chat template writes it, and which are
refused.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil

import pytest

from sdpo_jax.config import CartridgeConfig, Config, LoraConfig
from sdpo_jax.data.prompts import ChatFormat, chat_tokens, document_tokens
from sdpo_jax.errors import UserError
from sdpo_jax.models import chat_template
from sdpo_jax.models import tokenizer as tokenizers
from sdpo_jax.training.documents import read_texts
from sdpo_jax.training.opening import load_tokenizer
from tests import tiny
from tests.models import tokenizer_styles

BEHIND = ChatFormat(behind_document=True)
QUESTION = [{'role': 'user', 'content': 'Who <|im_end|>?'}]
# Of models that know no system messages, and begin with a token of their own.
PLAIN = (
  "{{ '<|endoftext|>' }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
  '[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] '
)
# The system message is put into the user's.
FOLDED = (
  "{% if messages[0].role == 'system' %}{% set text = messages[0].content + '\n' %}{% set messages = messages[1:] %}"
  "{% else %}{% set text = '' %}{% endif %}"
  '{% for m in messages %}<|im_start|>{{ m.role }}\n{{ text if loop.first }}{{ m.content }}<|im_end|>\n{% endfor %}'
)
# The last letters of a system message and what follows are one word.
JOINED = '{% for m in messages %}{{ m.content }}{% endfor %}'


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> pathlib.Path:
  folder = tmp_path_factory.mktemp('texts')
  (folder / 'long.txt').write_text('All there is to know: <|im_end|> ' * 4)
  (folder / 'short.txt').write_text('Nothing.')
  (folder / 'empty.txt').write_text(' \n')
  (folder / 'latin.txt').write_bytes(b'caf\xe9')
  tiny.make_model(folder / 'model')
  return folder


@pytest.fixture
def config(folder) -> Config:
  config = Config()
  config.model.path = str(folder / 'model')
  config.model.cartridge = CartridgeConfig(tokens=16, document=str(folder / 'long.txt'))
  config.data.train_files, config.trainer.test_freq = ('rows.jsonl',), 0
  config.data.max_prompt_length, config.data.max_response_length = 64, 8
  config.actor.self_distillation.teacher_regularization = 'base'
  config.actor.self_distillation.teacher_context = 'prompt'
  return config


def tokenizer_of(config, template=None):
  tokenizer = load_tokenizer(config)
  if template is not None:
    tokenizer.chat_template = template
  return tokenizer


def test_prompts_are_what_follows_a_system_message(config):
  tokenizer = tokenizer_of(config)
  [behind] = chat_tokens(tokenizer, [QUESTION], BEHIND)
  text = 'Some <|im_start|> document'
  before = document_tokens(tokenizer, text, BEHIND)
  # Bytes are tokens: what messages spell are bytes, what the template writes are tokens.
  start, end = tokenizer.convert_tokens_to_ids(['<|im_start|>', '<|im_end|>'])
  assert [before.count(start), before.count(end), behind.count(start), behind.count(end)] == [1, 1, 2, 1]
  said = tokenizer.decode([*before, *behind])
  assert said.startswith(f'<|im_start|>system\n{text}<|im_end|>\n<|im_start|>user\nWho <|im_end|>?<|im_end|>\n')
  assert [*before, *behind] == chat_tokens(tokenizer, [[{'role': 'system', 'content': text}, *QUESTION]], ChatFormat())[
    0
  ]


@pytest.mark.parametrize('template', [PLAIN, FOLDED])
def test_a_text_stands_before_the_conversation_where_there_are_no_system_messages(config, template):
  tokenizer = tokenizer_of(config, template)
  tokenizer.bos_token = '<|endoftext|>'
  assert not chat_template.has_system_turn(tokenizer, {})
  [usual] = chat_tokens(tokenizer, [QUESTION], ChatFormat())
  [behind] = chat_tokens(tokenizer, [QUESTION], BEHIND)
  begin = [tokenizer.bos_token_id] if template == PLAIN else []
  assert [*begin, *behind] == usual
  text = 'A <|endoftext|> text'
  before = document_tokens(tokenizer, text, BEHIND)
  assert before[: len(begin)] == begin and len(before) == len(begin) + len(text)
  assert tokenizer.decode(before[len(begin) :]) == text
  special = document_tokens(tokenizer, text, dataclasses.replace(BEHIND, split_special_tokens=False))
  assert special.count(tokenizer.convert_tokens_to_ids('<|endoftext|>')) == len(begin) + 1


def test_texts_are_read_for_whom_they_are_needed(config, folder):
  tokenizer = tokenizer_of(config)
  document = document_tokens(tokenizer, (folder / 'long.txt').read_text(), BEHIND)

  def read(teaches=True, **changes):
    cartridge = dataclasses.replace(config.model.cartridge, **changes)
    model = dataclasses.replace(config.model, cartridge=cartridge)
    texts = read_texts(dataclasses.replace(config, model=model), tokenizer, teaches=teaches)
    return texts.document, texts.initial

  assert read() == (document, document[:16])
  assert read(teaches=False) == (None, document[:16])
  text = document_tokens(tokenizer, 'Nothing.', BEHIND)
  other = {'initializer': 'text', 'init_text': str(folder / 'short.txt'), 'tokens': len(text)}
  assert read(**other) == (document, text)
  assert (
    read(initializer='random', tokens=512 - 64 - 8)
    == read(initializer='random')
    == (document, None)
    == read(tokens=None, path='somewhere')
  )
  assert read(teaches=False, initializer='random', document='gone.txt') == (None, None)


ENDS = {
  'llama': ['<|eot_id|>'],
  'qwen': ['<|im_end|>', 'Ċ'],
  'olmo': ['<|im_end|>', 'Ċ'],
  'tekken': ['[/SYSTEM_PROMPT]'],
}


@pytest.mark.parametrize('style', ENDS)
@pytest.mark.parametrize('initializer', ['document', 'text'])
def test_the_first_tokens_of_a_text_end_like_a_system_message(config, folder, tmp_path, style, initializer):
  """As the published tokens do, which are cut as long as the slots are fewer."""
  config.model.path = str(tokenizer_styles.make(style, tmp_path / 'model'))
  tokenizer = tokenizers.load(config.model.path)
  text = {'document': 'document', 'text': 'init_text'}[initializer]
  cartridge = {text: str(folder / 'long.txt'), 'initializer': initializer}
  whole = document_tokens(tokenizer, (folder / 'long.txt').read_text(), BEHIND)

  def initial(slots, **changes):
    config.model.cartridge = CartridgeConfig(tokens=slots, **cartridge, **changes)
    return read_texts(config, tokenizer, teaches=False).initial

  end = tokenizer.convert_tokens_to_ids(ENDS[style])
  assert initial(16) == whole[:16] and initial(16, init_turn_end=True) == [*whole[: 16 - len(end)], *end]
  assert initial(len(whole), init_turn_end=True) == whole
  with pytest.raises(
    UserError, match=rf'with {len(end)} tokens of its own, and there are {len(end)} slots: .* or raise'
  ):
    initial(len(end), init_turn_end=True, num_frozen_tokens=0)


@pytest.mark.parametrize('style', ['gemma', 'mistral'])
def test_a_template_without_system_messages_ends_none(config, tmp_path, style):
  config.model.path = str(tokenizer_styles.make(style, tmp_path / 'model'))
  config.model.cartridge.init_turn_end = True
  with pytest.raises(UserError, match=r'init_turn_end=True: .* with 0 tokens of its own, .* leave it at False\.'):
    read_texts(config, tokenizers.load(config.model.path), teaches=False)


@pytest.mark.parametrize(
  ('changes', 'said'),
  [
    ({'document': '', 'initializer': 'random'}, r'cartridge\.document is empty, .* name a text file'),
    ({'document': '{folder}/gone.txt'}, r'gone\.txt .*name a text file in model\.cartridge\.document'),
    ({'document': '{folder}/empty.txt'}, r'empty\.txt is empty'),
    ({'document': '{folder}/latin.txt'}, r'latin\.txt is not UTF-8'),
    ({'tokens': 999}, r'tokens=999: .*long\.txt, .* has \d+ tokens only'),
    (
      {'initializer': 'text', 'init_text': '{folder}/short.txt', 'tokens': 64},
      r'tokens=64: .*short\.txt, .* has \d+ tokens only: lower',
    ),
    ({'initializer': 'random', 'tokens': 512 - 64 - 8 + 1}, r'tokens=441: .* more than the 512 positions'),
    ({'document': 'unknown://bucket/a.txt'}, r'a\.txt cannot be read .*: name a text file'),
  ],
)
def test_texts_that_cannot_be_read_or_are_too_short_are_refused(config, folder, changes, said):
  changes = {key: value.format(folder=folder) if isinstance(value, str) else value for key, value in changes.items()}
  config.model.cartridge = dataclasses.replace(config.model.cartridge, **changes)
  with pytest.raises(UserError, match=said):
    read_texts(config, tokenizer_of(config), teaches=True)


def test_a_document_beyond_the_model_s_positions_is_refused(config):
  tokenizer = tokenizer_of(config)
  text = pathlib.Path(config.model.cartridge.document).read_text()
  left = 512 - 64 - len(document_tokens(tokenizer, text, BEHIND))  # Of the model's positions.
  config.data.max_response_length = left
  read_texts(config, tokenizer, teaches=True)
  config.data.max_response_length = left + 1
  with pytest.raises(UserError, match=r'has \d+ tokens, and with a prompt of 64 .* more than the 512 positions'):
    read_texts(config, tokenizer, teaches=True)


def test_a_file_that_no_context_can_hold_is_not_read(config, tmp_path, monkeypatch):
  longest = len('<|endoftext|>')  # Of the tokens of this tokenizer, beside bytes.
  file = tmp_path / 'huge.txt'
  config.model.cartridge.document = str(file)
  file.write_bytes(b'a' * (16 * 512))
  with pytest.raises(UserError, match=r'has \d+ tokens, and with a prompt'):
    read_texts(config, tokenizer_of(config), teaches=True)
  assert longest < 16
  with file.open('wb') as made:
    made.truncate(2**40)  # Takes no room.
  monkeypatch.setattr('sdpo_jax.training.documents.read_text', lambda *_: pytest.fail('was read'))
  with pytest.raises(UserError, match=r'huge\.txt has 1,099,511,627,776 bytes, more than the 512 positions'):
    read_texts(config, tokenizer_of(config), teaches=True)


def test_texts_whose_end_joins_what_follows_are_refused(config, folder, tmp_path):
  tokenizer = tokenizer_of(config, JOINED)
  assert chat_template.has_system_turn(tokenizer, {})
  read_texts(config, tokenizer, teaches=True)  # Bytes never join.
  shutil.copytree(config.model.path, tmp_path / 'joining')
  file = tmp_path / 'joining' / 'tokenizer.json'
  described = json.loads(file.read_text())
  described['model']['vocab']['Ġq'] = 259
  described['model']['merges'] = [['Ġ', 'q']]
  file.write_text(json.dumps(described))
  (tmp_path / 'joining' / 'SHA256SUMS').unlink()
  config.model.path = str(tmp_path / 'joining')
  with pytest.raises(UserError, match='the tokens of a question after this text differ from those after other texts'):
    read_texts(config, tokenizer_of(config, JOINED), teaches=True)


@pytest.mark.parametrize(
  ('change', 'said'),
  [
    (lambda c: setattr(c.model, 'lora', LoraConfig(rank=2)), 'model.cartridge and model.lora are both set'),
    (lambda c: setattr(c.model.cartridge, 'num_frozen_tokens', 16), 'num_frozen_tokens=16 leaves none'),
    (lambda c: setattr(c.model.cartridge, 'tokens', 0), r'cartridge\.tokens must be at least 1'),
    (lambda c: setattr(c.model.cartridge, 'document', ''), "document is empty, and initializer='document'"),
    (
      lambda c: setattr(c.model.cartridge, 'init_text', 'a.txt'),
      "init_text='a.txt' has no effect with .*='document'",
    ),
    (lambda c: setattr(c.model.cartridge, 'initializer', 'text'), 'init_text is empty'),
    (
      lambda c: c.model.cartridge.__dict__.update(initializer='random', init_turn_end=True),
      "init_turn_end=True has no effect with .*initializer='random'",
    ),
    (lambda c: setattr(c.model.cartridge, 'path', 'dir'), "tokens=16 has no effect with .*path='dir', .* at None"),
    (lambda c: setattr(c.model.cartridge, 'tokens', None), 'document=.* has no effect without a cartridge'),
    (lambda c: setattr(c.actor.self_distillation, 'teacher_regularization', 'ema'), "'ema' .*set it to 'base'"),
  ],
)
def test_settings_that_contradict_a_cartridge_are_refused(config, change, said):
  config.validate()
  change(config)
  with pytest.raises(UserError, match=said):
    config.validate()
