"""Long conversations: what is left out, in which order, and what never is."""

import pytest

from sdpo_jax.serving.sessions.compaction import Exchange, fitted, with_outputs
from sdpo_jax.serving.tool_calls import form_of
from tests.serving.sessions.dialogues import TOOLS, dialogue, drawn, text_of, tokenizer
from tests.serving.sessions.tool_templates import FAMILIES


def user(text):
  return {'role': 'user', 'content': text}


def tool(text):
  return {'role': 'tool', 'content': text}


def conversation(family, count, *, long=400, kept=()):
  """Return exchanges; each answer says its number, and every fourth answers a message of the person."""
  found = []
  for number in range(count):
    asked = [user(f'Message {number}.')] if number % 4 == 0 else []
    behind = [tool(f'begin {number} ' + 'x' * long + f' end {number}')]
    stays, told = number in kept or number == count - 1, number in kept
    behind = [tool(f'Denied {number}. ' + 'y' * long)] if told else behind
    found.append(Exchange(asked, drawn(family, f'Answer {number}.'), behind, stays, told))
  return found


@pytest.mark.parametrize('family', FAMILIES)
def test_parts_are_left_out_in_order_and_what_was_denied_stays(family):
  made = dialogue(family, system='Be brief.')
  made.check(form_of(tokenizer(family).chat_template))
  exchanges = conversation(family, 16, kept=(2, 9))
  exchanges[-1] = Exchange(exchanges[-1].asked, exchanges[-1].answer, [], True, False)
  new, lengths = [tool('The newest output.')], []
  whole = fitted(made, exchanges, new, 10**6)
  said = text_of(family, whole.tokens)
  assert 'left out' not in said and all(f'begin {number} ' in said for number in range(15) if number not in (2, 9))
  stages = set()
  for most in range(len(whole.tokens), 3200, -400):
    found = fitted(made, exchanges, new, most)
    said = text_of(family, found.tokens)
    lengths.append(len(found.tokens))
    assert lengths[-1] <= most / 2 or most == len(whole.tokens)
    assert all(text in said for text in ('Be brief.', 'Message 0.', 'Denied 2.', 'Denied 9.', 'The newest output.'))
    assert 'Answer 2.' in said and 'Answer 9.' in said and 'Answer 15.' in said and found.header == made.header
    outputs = [number for number in range(15) if f'begin {number} ' in said]
    answers = [number for number in range(16) if f'Answer {number}.' in said]
    assert outputs == [number for number in range(15) if number not in (2, 9)][-len(outputs) :] or not outputs
    gone = [number for number in range(15) if number not in answers]
    assert gone == [number for number in range(15) if number not in (2, 9)][: len(gone)]
    stages.add('output' if outputs else 'answer' if len(answers) > 3 else 'message')
    assert not gone or not outputs  # Outputs first.
  assert stages >= {'output', 'answer'} and lengths == sorted(lengths, reverse=True)


def test_a_prompt_is_what_the_template_writes_of_the_messages_that_are_left():
  family = 'qwen3'
  made, exchanges = dialogue(family), conversation(family, 3, kept=(0,))
  exchanges[-1] = Exchange([user('Again?')], exchanges[-1].answer, [], True, False)
  messages = [
    *[user('Message 0.'), {'role': 'assistant', 'content': 'Answer 0.'}, tool('Denied 0. ' + 'y' * 400)],
    user('(1 answer left out here.)\n\nAgain?'),
    *[{'role': 'assistant', 'content': 'Answer 2.'}, user('And now?')],
  ]
  expected = tokenizer(family).apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True, return_dict=False)
  assert fitted(made, exchanges, [user('And now?')], 2 * len(expected)).tokens == expected


def test_the_oldest_denials_go_only_when_nothing_else_makes_room():
  made, exchanges = dialogue('qwen3'), conversation('qwen3', 12, long=100, kept=range(1, 12))
  exchanges[-1] = Exchange([user('Again?')], exchanges[-1].answer, [], True, False)
  whole = len(fitted(made, exchanges, [user('And now?')], 10**6).tokens)
  for most in (whole * 3 // 2, whole, whole // 2, whole // 3):
    found = fitted(made, exchanges, [user('And now?')], most)
    denials = [number for number in range(1, 11) if f'Denied {number}. ' in text_of('qwen3', found.tokens)]
    assert len(found.tokens) <= 0.75 * most and denials == [*range(1, 11)][10 - len(denials) :]
    assert (len(denials) == 10) == (most > whole) and 'Answer 11.' in text_of('qwen3', found.tokens)


def test_outputs_keep_their_beginning_and_end():
  made = dialogue('qwen3')
  prompt = made.begin([user('Go.')])
  answer = drawn('qwen3', 'Yes.')
  long, short = 'first ' + 'é' * 5000 + ' last', 'short'

  def after(messages):
    return made.after(prompt.tokens, answer, messages)

  whole = after([tool(long), tool(short), user('So?')])
  assert with_outputs(after, [tool(long), tool(short), user('So?')], len(whole.tokens)) == whole
  found = with_outputs(after, [tool(long), tool(short), user('So?')], 600)
  said = text_of('qwen3', found.tokens)
  assert 560 < len(found.tokens) <= 600 and 'first é' in said and 'é last' in said and 'short' in said
  assert 'characters are left out' in said
  # What is not the output of a tool is not cut.
  assert with_outputs(after, [user(long)], 600) == after([user(long)])
