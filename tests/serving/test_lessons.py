"""Lessons of a feedback: who reads what, rewards as advantages, and numbers that JSON can hold."""

import dataclasses
import json
import types

import numpy as np
import pytest

from sdpo_jax.config import SelfDistillationConfig
from sdpo_jax.data.prompts import ChatFormat
from sdpo_jax.errors import UserError
from sdpo_jax.files import jsonable
from sdpo_jax.serving import lessons
from sdpo_jax.serving.errors import InvalidRequest
from sdpo_jax.serving.feedback_request import Item
from sdpo_jax.serving.records import AdapterRecord, SampleRecord
from tests.golden.tokenizer import CharacterTokenizer

TOKENIZER = CharacterTokenizer()
QUESTION = [{'role': 'system', 'content': 'S'}, {'role': 'user', 'content': 'Q'}]
ADAPTER = AdapterRecord('a', 'ada', 'name', 3, 0.0, {})


def sample(**changes):
  prompt = TOKENIZER.apply_chat_template([QUESTION], tokenize=True, return_dict=False, add_generation_prompt=True)[0]
  tokens = TOKENIZER.encode('bad')
  given = dict(
    id='s',
    owner='ada',
    adapter='a',
    version=1,
    prompt_tokens=prompt,
    tokens=tokens,
    log_probs=np.float32([-1, -2, -3]),
    temperature=1.0,
    messages=QUESTION,
    text='bad',
    finish_reason='stop',
    created=0.0,
    expires=1.0,
  )
  return SampleRecord(**given | changes)


def prepare(*items, kept=None, **config):
  store = types.SimpleNamespace(sample=lambda owner, id: kept or sample())
  reprompting = lessons.Reprompting(SelfDistillationConfig(**config), TOKENIZER, ChatFormat())
  return lessons.prepare(items, ADAPTER, store, reprompting, 1000)


def asked(prepared):
  return TOKENIZER.decode(prepared.lesson.teacher_prompt)


def test_what_is_said_of_a_completion_goes_where_the_templates_have_it():
  [found] = prepare(Item(sample_id='s', feedback='no', environment='E1', correction='good', demonstration='best'))
  assert found.lesson.prompt == sample().prompt_tokens and found.lesson.completion == sample().tokens
  assert found.lesson.sampling_log_probs is not None and found.lesson.advantage == 0
  assert asked(found) == (
    '<|system|>\nS<|end|>\n<|user|>\nQ\nCorrect solution:\n\ngood\n\nbest\nThe following is feedback from your '
    'unsuccessful earlier attempt:\n\nno\n\nE1\n\nCorrectly solve the original question.<|end|>\n<|assistant|>\n'
  )
  assert found.context == ('correction', 'demonstration', 'feedback', 'environment') and not found.truncated


def test_without_feedback_the_teacher_reads_what_the_student_read():
  for item in (Item(sample_id='s'), Item(sample_id='s', feedback=' ', reward=1.0)):
    [found] = prepare(item)
    assert found.lesson.teacher_prompt == found.lesson.prompt and found.context == ()


def test_tokens_without_a_conversation_stay_a_prefix():
  item = Item(prompt_tokens=TOKENIZER.encode('2+2='), tokens=[5], feedback='no')
  [found] = prepare(item)
  assert asked(found).startswith('2+2=\nThe following is feedback') and found.lesson.sampling_log_probs is None
  [found] = prepare(dataclasses.replace(item, messages=QUESTION))
  assert asked(found).startswith('<|system|>\nS')


def test_long_texts_are_shortened_and_said_to_be():
  [found] = prepare(Item(sample_id='s', feedback='x' * 900), max_reprompt_len=300)
  assert found.truncated and len(found.lesson.teacher_prompt) <= 300
  with pytest.raises(UserError, match=r'serve\.teacher_buckets=50 leaves no room'):
    prepare(Item(sample_id='s', feedback='x' * 900), max_reprompt_len=50)


def test_a_failed_attempt_is_shown_if_the_settings_say_so():
  [found] = prepare(Item(sample_id='s', feedback='no'), include_failed_attempt=True)
  assert 'Your unsuccessful earlier attempt:\n\nbad\nThe following' in asked(found)


def test_rewards_are_centred_where_several_are_given():
  found = prepare(*(Item(sample_id='s', reward=reward) for reward in (1.0, None, 0.0)))
  assert [each.lesson.advantage for each in found] == [0.5, 0.0, -0.5]
  [found] = prepare(Item(sample_id='s', reward=-1.0))
  assert found.lesson.advantage == -1.0


def test_samples_of_another_adapter_are_refused_and_those_of_the_base_are_not():
  with pytest.raises(InvalidRequest, match=r'items\[0\]: the sample s is of another adapter'):
    prepare(Item(sample_id='s'), kept=sample(adapter='b'))
  assert prepare(Item(sample_id='s'), kept=sample(adapter=None, version=None))


def test_a_correction_that_is_only_thinking_is_refused():
  with pytest.raises(InvalidRequest, match='correction consists of thinking only'):
    prepare(Item(sample_id='s', correction='<think>hm</think>'))


@pytest.mark.parametrize('field', ['prompt_tokens', 'tokens'])
@pytest.mark.parametrize('tokens', [[], [1000], [-1], [1.5], [True]])
def test_tokens_that_are_none_are_refused(field, tokens):
  item = dataclasses.replace(Item(prompt_tokens=[1], tokens=[1]), **{field: tokens})
  with pytest.raises(InvalidRequest, match=rf'items\[1\]\.{field} '):
    prepare(Item(sample_id='s'), item)


def test_what_is_not_finite_is_null():
  values = np.float32([[1, np.nan], [-np.inf, -0.0]])
  assert lessons.numbers(values) == [[1.0, None], [None, 0.0]]
  found = jsonable({'a': np.float32(np.inf), 'b': [(np.int32(3), float('nan'))], 'c': True, 'd': None})
  assert json.dumps(found, allow_nan=False) == '{"a": null, "b": [[3, null]], "c": true, "d": null}'
  assert str(jsonable(-0.0)) == '0.0'


def test_what_has_no_teacher_is_learned_by_a_loss_of_its_own():
  items = [Item(prompt_tokens=[5], tokens=[6, 7], learned=how) for how in ('as wanted', 'as unwanted')]
  made = [
    each.lesson
    for each in lessons.prepare(items, ADAPTER, None, lessons.Reprompting(None, TOKENIZER, ChatFormat()), 99)
  ]
  assert [lesson.advantage for lesson in made] == [0.0, -1.0]
  assert [(lesson.loss.divergence_weight, lesson.loss.policy_weight) for lesson in made] == [(1.0, 0.0), (0.0, 1.0)]
  for lesson in made:
    assert lesson.taught.top_ids.tolist() == [[6], [7]] and not lesson.taught.top_log_probs.any()
    assert lesson.teacher_prompt is None and lesson.loss.alpha == 0.0  # The forward KL.
  assert lessons.taught(None, made, 5) == made  # Nothing is left to ask a teacher.
