"""Requests in OpenAI's words: what is served is read, what is not is refused by its name, nothing is dropped in
silence.
"""

import numpy as np
import pytest

from sdpo_jax.learning.scoring import Scored
from sdpo_jax.models import tokenizer as tokenizers
from sdpo_jax.models.token_texts import TokenTexts
from sdpo_jax.serving.errors import InvalidRequest
from sdpo_jax.serving.web import openai_logprobs
from sdpo_jax.serving.web.openai_schemas import ChatCompletionRequest, TextCompletionRequest, parse
from tests import tiny

MESSAGES = [{'role': 'user', 'content': 'Q1'}]


def completion(**fields):
  return parse(TextCompletionRequest, {'model': 'm', 'prompt': 'x', **fields})


def chat(**fields):
  return parse(ChatCompletionRequest, {'model': 'm', 'messages': MESSAGES, **fields})


@pytest.mark.parametrize(
  ('prompt', 'prompts'),
  [('x', ['x']), (['x', 'y'], ['x', 'y']), ([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]])],
)
def test_a_prompt_has_four_shapes(prompt, prompts):
  assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize('ask', [completion, chat])
def test_what_asks_for_nothing_passes(ask):
  neutral = {'user': 'u', 'metadata': {'a': 'b'}, 'store': False, 'frequency_penalty': 0.0, 'tools': None, 'n': None}
  assert ask(**neutral).n == 1 and ask(logit_bias={}, response_format={'type': 'text'}, best_of=1).stops == ()


@pytest.mark.parametrize('ask', [completion, chat])
@pytest.mark.parametrize(
  ('field', 'value'),
  [
    ('tools', [{'type': 'function'}]),
    ('logit_bias', {'5': 1}),
    ('frequency_penalty', 0.5),
    ('presence_penalty', -1),
    ('response_format', {'type': 'json_object'}),
    ('best_of', 4),
    ('best_of', True),
    ('logitbias', {}),
    ('temprature', None),
  ],
)
def test_what_is_not_served_is_refused_by_its_name(ask, field, value):
  with pytest.raises(InvalidRequest, match=field) as caught:
    ask(**{field: value})
  assert caught.value.field == field


@pytest.mark.parametrize(
  ('fields', 'words'),
  [
    ({'prompt': []}, 'prompt is empty'),
    ({'prompt': ['']}, 'prompt is empty'),
    ({'prompt': [[]]}, 'prompt is empty'),
    ({'prompt': [-1]}, 'prompt must be a text, a list'),
    ({'prompt': ['a', 1]}, 'prompt must be a text, a list'),
    ({'model': None}, 'model is required'),
    ({'temperature': 2.5}, 'temperature: .* less than or equal to 2'),
    ({'temperature': float('nan')}, 'temperature: .* finite'),
    ({'n': '3'}, 'n: .* integer'),
    ({'n': 0}, 'n: '),
    ({'logprobs': -1}, 'logprobs must be 0'),
    ({'top_logprobs': 2}, 'top_logprobs requires logprobs=true'),
    ({'max_tokens': 0}, 'max_tokens=0 generates nothing'),
    ({'prompt_logprobs': 1, 'stream': True}, 'cannot be streamed'),
    ({'stream_options': {'include_usage': True}}, 'require stream=true'),
  ],
)
def test_wrong_completions_are_refused_in_a_sentence(fields, words):
  with pytest.raises(InvalidRequest, match=words):
    completion(**fields)


@pytest.mark.parametrize(
  ('fields', 'words'),
  [
    ({'messages': []}, 'messages: '),
    ({'messages': [{'role': 'tool', 'content': 'x'}]}, 'messages.0.role'),
    ({'messages': [{'role': 'user', 'content': [{'type': 'image_url'}]}]}, 'messages.0.content must be a text'),
    ({'messages': [{'role': 'user', 'content': 'x', 'name': 'ada'}]}, 'cannot have a name'),
    ({'top_logprobs': 2}, 'top_logprobs requires'),
    ({'max_tokens': 3, 'max_completion_tokens': 4}, 'differ'),
    ({'echo': True}, 'echo'),
  ],
)
def test_wrong_chats_are_refused_in_a_sentence(fields, words):
  with pytest.raises(InvalidRequest, match=words):
    chat(**fields)


def test_log_probs_are_asked_for_in_two_ways():
  assert completion().topk is None and completion(logprobs=False).topk is None
  assert completion(logprobs=0).topk == 0 and completion(logprobs=3).topk == 3
  fireworks = completion(logprobs=True, top_logprobs=5, echo_last=4, context_length_exceeded_behavior='error')
  assert fireworks.topk == 5 and fireworks.content_logprobs
  assert chat().topk is None and chat(logprobs=True).topk == 0 and chat(logprobs=True, top_logprobs=2).topk == 2


def test_messages_are_what_a_chat_template_reads():
  parts = [{'type': 'text', 'text': 'a'}, {'type': 'text', 'text': 'b'}]
  request = chat(messages=[{'role': 'developer', 'content': 'Be brief.'}, {'role': 'user', 'content': parts}])
  assert [message.plain() for message in request.messages] == [
    {'role': 'system', 'content': 'Be brief.'},
    {'role': 'user', 'content': 'ab'},
  ]


def test_log_probs_have_the_shapes_that_clients_read(tmp_path):
  tiny.make_tokenizer(tmp_path)
  texts = TokenTexts(tokenizers.load(tmp_path))
  a, b, half = (texts_id for texts_id in tokenizers.load(tmp_path).encode('ab€')[:3])
  scored = Scored(
    np.float32([-1.0000001, -3.0]),
    np.zeros(2, np.float32),
    np.int32([[b, a], [a, -1]]),
    np.float32([[-1.0, -2.0], [-0.5, -np.inf]]),
  )
  said = openai_logprobs.prompt_positions([a, b, half], scored)
  assert [each.rank for each in said] == [None, 1, None]
  shape = openai_logprobs.completion_shape(texts, said, 1, [0, 1, 2])
  assert shape['tokens'] == ['a', 'b', 'bytes:\\xe2'] and shape['text_offset'] == [0, 1, 2]
  assert shape['token_logprobs'][0] is None and shape['top_logprobs'][0] is None
  # Of the token that stands there one number, wherever it is told: clients compare them.
  assert shape['top_logprobs'][1] == {'b': shape['token_logprobs'][1]}
  assert shape['top_logprobs'][2] == {'a': -0.5, 'bytes:\\xe2': -3.0}
  vllm = openai_logprobs.prompt_shape(texts, said, 2)
  assert vllm[0] is None and vllm[1][str(b)]['rank'] == 1 and vllm[1][str(a)]['rank'] == 2
  assert vllm[2] == {
    str(a): {'logprob': -0.5, 'rank': 1, 'decoded_token': 'a'},
    str(half): {'logprob': -3.0, 'rank': None, 'decoded_token': 'bytes:\\xe2'},
  }
  content = openai_logprobs.content_shape(texts, said[2:], 1)['content']
  assert content == [
    {
      'token': 'bytes:\\xe2',
      'token_id': half,
      'logprob': -3.0,
      'bytes': [0xE2],
      'top_logprobs': [{'token': 'a', 'token_id': a, 'logprob': -0.5, 'bytes': [97]}],
    }
  ]
  [worst] = openai_logprobs.positions([a], [-np.inf], None)
  assert worst.log_prob == openai_logprobs.MINUS_INFINITY and worst.most_likely(0) == [(a, worst.log_prob)]
