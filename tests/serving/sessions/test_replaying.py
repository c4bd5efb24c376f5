"""Examples of a model that are written anew for one whose template calls tools in another form."""

import dataclasses
import itertools
import threading
import types

import numpy as np
import pytest

from sdpo_jax.data.prompts import ChatFormat
from sdpo_jax.serving.account import Account
from sdpo_jax.serving.capacity import FairSemaphore
from sdpo_jax.serving.errors import InvalidRequest
from sdpo_jax.serving.sessions import replaying
from sdpo_jax.serving.sessions.examples import TrainingExample
from sdpo_jax.serving.tool_calls import ToolCall, form_of, read_calls, write_calls
from tests.serving.sessions.dialogues import CONFIG, TOOLS, dialogue, drawn, stops, text_of, tokenizer
from tests.serving.sessions.tool_templates import FAMILIES

CALLS = (ToolCall('grep', {'p': 'x'}), ToolCall('grep', {'p': 'y'}))
CALLED = [{'name': call.name, 'arguments': dict(call.arguments)} for call in CALLS]


def account(family):
  """Of a service of that model; nothing is computed."""
  service = types.SimpleNamespace(
    tokenizer=tokenizer(family),
    chat=ChatFormat({}),
    stop_token_ids=stops(family),
    tokenizing=threading.Lock(),
    parsing=FairSemaphore(1),
    max_prompt=10_000,
    max_completion=1_000,
    reprompting=types.SimpleNamespace(config=CONFIG),
  )
  return Account(service, 'ada')


def answered(family, said):
  """Return an answer of that model with words and two calls."""
  form = form_of(tokenizer(family).chat_template)
  return form, write_calls(CALLS, form, TOOLS, said)


def exported(family, said):
  """Return a denial behind a call that was approved, as that model's service exports it."""
  form, text = answered(family, said)
  return TrainingExample(
    format=1,
    session='ses-1',
    turn=1,
    kind='denial',
    state='learned',
    versions=(1,),
    drawn_by=0,
    messages=(
      {'role': 'system', 'content': 'Be brief.'},
      {'role': 'user', 'content': 'Find x.'},
      {'role': 'assistant', 'content': text, 'calls': CALLED, 'said': said},
      {'role': 'tool', 'content': 'a: x'},
      {'role': 'tool', 'content': 'b: y'},
    ),
    tools=tuple(TOOLS),
    tool_form=form,
    text=text,
    said=said,
    ended=True,
    calls=tuple(CALLED),
    demonstration=None,
    demonstrated=(),
    feedback='Use rg.',
    environment=None,
    prompt_tokens=(1,),
    tokens=(1,),
    log_probs=np.zeros(1, np.float32),
    teacher_prompt=(1,),
    tokenizer='another',
    teacher=None,
    update={},
    guards=None,
    show_attempt=False,
  )


@pytest.mark.parametrize('said', ['', 'I look.'])
@pytest.mark.parametrize('before, after', list(itertools.product(FAMILIES, repeat=2)))
def test_calls_stay_calls_in_the_form_of_another_model(before, after, said):
  form, text = answered(after, said)
  [item] = replaying.items_of(account(after), exported(before, said), 0)
  assert item.tokens == drawn(after, text) and item.log_probs is None
  found = read_calls(dialogue(after).text_of(item.tokens, (), text), form, TOOLS)
  assert (tuple(found.calls), found.text, found.fault) == (CALLS, said, None)
  # The conversation is the one that this model would have had.
  made = dialogue(after, system='Be brief.')
  first = made.begin([{'role': 'user', 'content': 'Find x.'}]).tokens
  results = [{'role': 'tool', 'content': 'a: x'}, {'role': 'tool', 'content': 'b: y'}]
  asked = made.after(first, drawn(after, text), results)
  assert item.prompt_tokens == asked.tokens and item.teacher_prompt[: len(asked.body)] == asked.body
  assert 'Use rg.' in text_of(after, item.teacher_prompt[len(asked.body) :])


def test_calls_that_a_form_cannot_write_are_refused_by_the_number_of_their_example():
  call = {'name': 'grep', 'arguments': {'p': 'a\n</parameter>\n'}}
  example = dataclasses.replace(exported('hermes', ''), calls=(call,))
  with pytest.raises(InvalidRequest, match=r'examples\[7\]: These arguments cannot be written .*qwen3_coder'):
    replaying.items_of(account('qwen3_coder'), example, 7)
