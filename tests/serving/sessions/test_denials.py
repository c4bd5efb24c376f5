"""What a denied proposal leaves in the conversation, and on which prompt it is learned."""

import json

import pytest

from sdpo_jax.environments.workspace.tools import DENIED
from sdpo_jax.files import as_json
from sdpo_jax.serving import feedback
from sdpo_jax.serving.errors import InvalidRequest
from sdpo_jax.serving.sessions import session_tables
from sdpo_jax.serving.sessions.examples import READER
from sdpo_jax.serving.sessions.session_records import Decision, SessionSettings, ToolResult
from sdpo_jax.serving.sessions.sessions import Sessions
from tests.serving.session_world import GREP, GREP_A, READ, TOOLS, called
from tests.serving.sessions import session_history
from tests.serving.store.store_cases import arrays, open_store

HI = [{'role': 'user', 'content': 'Hi'}]


@pytest.fixture
def ada(tmp_path, monkeypatch):
  """Return an owner without an engine; the store and everything that sessions do are real."""
  monkeypatch.setattr(feedback, 'learn', session_history.learn)
  with open_store(tmp_path) as store:
    yield session_history.account_of(store)


@pytest.fixture
def script(monkeypatch):
  """Return the texts that are going to be proposed, in order."""
  texts = []
  monkeypatch.setattr(session_history, 'called', lambda _: texts[0])
  return texts


def opened(ada, **settings):
  adapter = ada.service.store.create(session_history.OWNER, 'one', {}, arrays(0))[0].id
  session, _ = Sessions(ada).open(adapter, SessionSettings(tools=TOOLS, **settings))
  return adapter, session.id


def proposed(ada, script, where, text, messages=()):
  script[:] = [text]
  [turn] = Sessions(ada).propose(*where, list(messages))
  return turn


def denied(ada, script, where, correction, text=None, messages=()):
  turn = proposed(ada, script, where, text or called(GREP), messages)
  return Sessions(ada).decide(*where, turn.n, Decision('deny', correction))


def shown(ada, tokens):
  return ada.service.tokenizer.decode(tokens)


def tool(text):
  return f'<|im_start|>t\n{text}<|im_end|>\n'


def test_the_next_proposal_reads_why_the_last_one_was_denied(ada, script):
  where = opened(ada)
  first, learned = denied(ada, script, where, 'Use r.', messages=HI)
  assert learned.accepted and first.told == f'{DENIED}\nUse r.'
  second = proposed(ada, script, where, called(READ))
  both = [*first.prompt_tokens, *first.tokens]
  assert list(second.prompt_tokens[: len(both)]) == both  # As it was drawn.
  assert shown(ada, second.prompt_tokens[len(both) :]) == f'\n{tool(first.told)}<|im_start|>a\n'
  assert Sessions(ada).turns(*where)[0] == first


def test_lessons_are_on_the_prompt_without_what_was_denied(ada, script):
  where = opened(ada)
  first, _ = denied(ada, script, where, 'Use r.', messages=HI)
  second, _ = denied(ada, script, where, 'And a.', called(READ))
  third, learned = denied(ada, script, where, 'Use r.', called(GREP_A))
  assert learned.accepted and len(first.prompt_tokens) < len(second.prompt_tokens) < len(third.prompt_tokens)
  examples = Sessions(ada).examples(*where)
  header = len(ada.service.tokenizer.encode('<|im_start|>a\n', add_special_tokens=False))
  for example, turn, words in zip(
    examples, (first, second, third), ('Use r.', 'Use r.\n\nAnd a.', 'Use r.\n\nAnd a.'), strict=True
  ):
    assert list(example.prompt_tokens) == list(first.prompt_tokens) and list(example.tokens) == list(turn.tokens)
    assert list(example.teacher_prompt[: len(first.prompt_tokens) - header]) == list(first.prompt_tokens[:-header])
    assert words in shown(ada, example.teacher_prompt) and DENIED not in shown(ada, example.teacher_prompt)
    assert example.feedback == words and example.messages == tuple(HI)
    assert (example.log_probs is None) == (turn is not first)  # Drawn from another prompt.
  lines = [as_json(vars(each)) for each in examples]
  other = ada.service.store.create(session_history.OWNER, 'other', {}, arrays(0))[0].id
  replayed = Sessions(ada).replay(other, [READER.validate_json(line) for line in lines])
  assert [each.accepted for each in replayed] == [True] * 3


def test_what_was_denied_stays_once_the_conversation_goes_on(ada, script):
  where = opened(ada, rehearse=1)
  first, _ = denied(ada, script, where, 'Use r.', messages=HI)
  second = proposed(ada, script, where, called(READ), [{'role': 'user', 'content': 'Well?'}])
  Sessions(ada).decide(*where, 1, Decision('approve'))
  Sessions(ada).results(*where, 1, [ToolResult(True, 'x')])
  third, _ = denied(ada, script, where, 'Not so.', called(GREP_A))
  assert list(third.prompt_tokens[: len(second.prompt_tokens)]) == list(second.prompt_tokens)
  _, rehearsed, last = sorted(Sessions(ada).examples(*where), key=lambda each: each.turn)
  assert list(last.prompt_tokens) == list(third.prompt_tokens) and last.log_probs is not None
  contents = [message['content'] for message in last.messages]
  assert contents == ['Hi', first.text, first.told, 'Well?', second.text, 'x']
  bare = shown(ada, rehearsed.prompt_tokens)  # What was accepted is kept for those who were not corrected.
  assert rehearsed.kind == 'rehearsal' and 'Hi' in bare and 'Well?' in bare and DENIED not in bare
  assert [message['content'] for message in rehearsed.messages] == ['Hi', 'Well?']


def test_every_call_is_told_and_an_answer_without_calls_by_a_message(ada, script):
  where = opened(ada)
  first, _ = denied(ada, script, where, None, called(READ, GREP), HI)
  assert first.told == DENIED
  second, _ = denied(ada, script, where, 'Do it.', 'No.')
  assert shown(ada, second.prompt_tokens).count(tool(DENIED)) == 2
  third = proposed(ada, script, where, called(READ))
  assert shown(ada, third.prompt_tokens).endswith('<|im_start|>u\nDo it.<|im_end|>\n<|im_start|>a\n')
  Sessions(ada).decide(*where, 2, Decision('deny'))
  with pytest.raises(InvalidRequest, match='already has the results of turn 2'):
    Sessions(ada).propose(*where, [{'role': 'tool', 'content': 'x'}])


def test_what_no_longer_fits_leaves_the_conversation(ada, script):
  where = opened(ada, min_sdpo_examples=2)
  ada.service.max_prompt = 256
  first, learned = denied(ada, script, where, 'r' * 200, messages=HI)
  assert learned.waiting == 1
  second, learned = denied(ada, script, where, 'Use r.')
  assert list(second.prompt_tokens) == list(first.prompt_tokens) and learned.turns == (0, 1)
  assert f'{DENIED}\nUse r.' in shown(ada, proposed(ada, script, where, called(READ)).prompt_tokens)


def test_sessions_without_the_setting_answer_the_same_prompt_again(ada, script):
  where = opened(ada)
  with ada.service.store.database.writing() as rows:
    [(record,)] = rows.execute('SELECT record FROM sessions WHERE id = ?', (where[1],)).fetchall()
    record = json.loads(record)
    del record['settings']['after_denial']
    rows.execute('UPDATE sessions SET record = ? WHERE id = ?', (json.dumps(record), where[1]))
  assert session_tables.session(ada.service.store.database, *where).settings.after_denial == 'retry'
  first, _ = denied(ada, script, where, 'Use r.', messages=HI)
  second = proposed(ada, script, where, called(READ))
  assert first.told is None and list(second.prompt_tokens) == list(first.prompt_tokens)
