"""What users may send as a prompt, and how they may have it answered: every mistake is named, and long ones cost
little.
"""

import pytest
from transformers import AutoTokenizer

from sdpo_jax.data.prompts import ChatFormat
from sdpo_jax.serving import request_prompts
from sdpo_jax.serving.errors import InvalidRequest
from sdpo_jax.serving.sample_requests import LONGEST_STOP, MOST_STOPS, SampleOptions
from tests.tiny import make_tokenizer

VOCABULARY, LIMIT = 264, 40
HELLO = [{'role': 'user', 'content': 'Hi'}]


@pytest.fixture(scope='module')
def tokenizer(tmp_path_factory):
  folder = tmp_path_factory.mktemp('tokenizer')
  make_tokenizer(folder)
  return AutoTokenizer.from_pretrained(folder)


def tokens_of(tokenizer, **prompt):
  return request_prompts.tokens_of(tokenizer, ChatFormat(), VOCABULARY, LIMIT, **prompt)


def test_a_prompt_is_a_conversation_a_text_or_tokens(tokenizer):
  chat = tokens_of(tokenizer, messages=HELLO)
  assert tokenizer.decode(chat) == '<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n'
  assert tokens_of(tokenizer, text=tokenizer.decode(chat)) == chat == tokens_of(tokenizer, tokens=chat)
  parts = [{'role': 'user', 'content': [{'type': 'text', 'text': 'H'}, {'type': 'text', 'text': 'i'}]}]
  assert tokens_of(tokenizer, messages=parts) == chat


def test_messages_cannot_spell_control_tokens(tokenizer):
  spelled = tokens_of(tokenizer, messages=[{'role': 'user', 'content': '<|im_end|>'}])
  end = tokenizer.convert_tokens_to_ids('<|im_end|>')
  assert spelled.count(end) == 1 and '<|im_end|>' in tokenizer.decode([t for t in spelled if t != end])


@pytest.mark.parametrize(
  'prompt, field, why',
  [
    ({}, None, 'none'),
    ({'text': 'a', 'tokens': [1]}, None, 'text and tokens'),
    ({'text': ''}, 'text', 'empty'),
    ({'text': 7}, 'text', 'text'),
    ({'tokens': []}, 'tokens', 'non-empty'),
    ({'tokens': [1, VOCABULARY]}, 'tokens', '264'),
    ({'tokens': [True]}, 'tokens', 'True'),
    ({'tokens': [-1]}, 'tokens', '-1'),
    ({'tokens': 'abc'}, 'tokens', 'list'),
    ({'tokens': [1] * 41}, 'tokens', '41 tokens, and the limit is 40'),
    ({'text': 'a' * 41}, 'text', '41 tokens, and the limit is 40'),
    ({'text': 'a' * 10**7}, 'text', 'more than 80 tokens, and the limit is 40'),
    ({'messages': [{'role': 'user', 'content': 'a' * 10**7}]}, 'messages', 'more than 80 tokens, and the limit is 40'),
    ({'messages': []}, 'messages', '1 to'),
    ({'messages': 'Hi'}, 'messages', 'list'),
    ({'messages': [{'role': 'user'}]}, 'messages[0].content', 'text'),
    ({'messages': [{'content': 'Hi'}]}, 'messages[0]', 'role'),
    ({'messages': [*HELLO, {'role': 'user', 'content': [{'type': 'image_url'}]}]}, 'messages[1].content', 'text'),
  ],
)
def test_what_is_no_prompt_is_refused_in_a_sentence(tokenizer, prompt, field, why):
  with pytest.raises(InvalidRequest, match=why) as raised:
    tokens_of(tokenizer, **prompt)
  assert raised.value.field == field and len(str(raised.value)) < 300


def checked(**options):
  return SampleOptions(**options).checked(max_completion=8, vocab_size=VOCABULARY)


def test_what_is_left_open_is_filled_in():
  options = checked(top_k=0, seed=-1)
  assert (options.max_tokens, options.top_k, options.seed) == (8, -1, 2**32 - 1)
  assert checked().seed != checked().seed


@pytest.mark.parametrize(
  'option, value',
  [
    ('max_tokens', 0),
    ('max_tokens', 9),
    ('max_tokens', 1.5),
    ('temperature', -0.1),
    ('temperature', float('nan')),
    ('temperature', '1'),
    ('top_p', 0),
    ('top_p', 1.1),
    ('top_k', -2),
    ('top_k', True),
    ('min_p', 2),
    ('seed', 1.0),
    ('seed', 10**30),
    ('stop', ['']),
    ('stop', ['a'] * (MOST_STOPS + 1)),
    ('stop', ['a' * (LONGEST_STOP + 1)]),
    ('stop', [1]),
    ('stop_token_ids', [VOCABULARY]),
  ],
)
def test_an_option_that_cannot_be_is_named(option, value):
  with pytest.raises(InvalidRequest) as raised:
    checked(**{option: value})
  assert raised.value.field == option
