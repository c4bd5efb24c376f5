"""Sessions on a real engine and a real store: what is proposed, decided and learned, once and for all."""

import concurrent.futures
import dataclasses
import itertools
import json
import math
import pathlib

import numpy as np
import pydantic
import pytest

from sdpo_jax.files import as_json
from sdpo_jax.serving import feedback
from sdpo_jax.serving import guards as feedback_guards
from sdpo_jax.serving.account import Account
from sdpo_jax.serving.call import Call
from sdpo_jax.serving.errors import Cancelled, Forbidden, InvalidRequest, NotFound, StorageFailed, TurnConflict
from sdpo_jax.serving.feedback_request import Item, make_request
from sdpo_jax.serving.records import VersionTarget, engine_name
from sdpo_jax.serving.sample_requests import SampleDraft
from sdpo_jax.serving.sessions import session_tables, teaching, waiting_examples
from sdpo_jax.serving.sessions.examples import READER
from sdpo_jax.serving.sessions.session_records import (
  AgentSession,
  Decision,
  LearnedTurns,
  SessionSettings,
  SessionTurn,
  ToolResult,
)
from sdpo_jax.serving.sessions.sessions import Sessions
from sdpo_jax.serving.store.database import SESSION_TABLES
from sdpo_jax.serving.tool_calls import ToolCall
from sdpo_jax.serving.web.error_responses import invalid
from sdpo_jax.serving.web.session_schemas import DecisionRequest, ResultsRequest
from tests.serving.service_world import HELLO, make_config, model_folder, running
from tests.serving.session_world import GREP, GREP_A, READ, TOOLS, called, world

HI = [{'role': 'user', 'content': 'Hi'}]
RETRY = {'tools': TOOLS, 'after_denial': 'retry'}  # Prompts have 64 tokens; test_denials.py is about the default.
DENY, APPROVE = Decision('deny', 'Use r.'), Decision('approve')


@pytest.fixture(scope='module')
def running_world(tmp_path_factory):
  with world(tmp_path_factory.mktemp('sessions')) as made:
    yield made


@pytest.fixture
def service(running_world):
  return running_world[0]


@pytest.fixture
def script(running_world):
  yield running_world[1]
  assert running_world[1].left == 0  # Everything was asked for.


@pytest.fixture
def ada(running_world, request):
  """Return an owner without adapters."""
  return Account(running_world[0], f'ada of {request.node.name}')


def opened(account, adapter=None, **settings):
  """Return a session, of a new adapter unless one is named."""
  adapter = adapter or account.create('one', seed=0)[0].id
  session, _ = Sessions(account).open(adapter, SessionSettings(**RETRY | settings))
  return adapter, session.id


def proposed(account, script, where, text, messages=HI):
  """Return a proposal that says this."""
  script.say(text)
  [turn] = Sessions(account).propose(*where, messages)
  return turn


def denied(account, script, where, *, messages=HI, text=None, correction='Use r.'):
  """Return a proposal that is denied; what was learned."""
  turn = proposed(account, script, where, text or called(GREP), messages)
  return Sessions(account).decide(*where, turn.n, Decision('deny', correction))[1]


def head(account, where):
  return account.adapter(where[0]).head


# Proposals and decisions.


def test_a_denied_proposal_is_learned_and_the_next_one_is_the_new_versions(ada, script):
  adapter, session = where = opened(ada)
  first = proposed(ada, script, where, called(GREP))
  assert first.status == 'open' and [call.name for call in first.calls] == ['g'] and first.version == 0
  turn, learned = Sessions(ada).decide(*where, 0, DENY)
  assert turn.status == 'denied' and learned.accepted and learned.turns == (0,) and turn.learned == learned
  assert (learned.version_before, learned.version_after) == (0, 1) and head(ada, where) == 1
  assert learned.moved and all(each.before != each.after for each in learned.moved)
  script.reused = 7
  second = proposed(ada, script, where, called(READ), ())
  script.reused = 0
  assert (first.reused_tokens, second.reused_tokens) == (0, 7)
  assert [each.reused_tokens for each in Sessions(ada).turns(*where)] == [0, 7]
  assert second.version == 1 and second.prompt_tokens == first.prompt_tokens and second.n == 1
  assert [version for version, _ in script.asked[-2:]] == [f'{adapter}@0', f'{adapter}@1']
  assert ada.version(adapter).details['session'] == {'id': session, 'turns': [0], 'examples': [[0, 'denial']]}
  kept = Sessions(ada).turns(*where)
  assert [each.n for each in kept] == [0, 1] and kept[1].to_json() == second.to_json()
  np.testing.assert_array_equal(kept[1].log_probs, second.log_probs)


@pytest.mark.parametrize('count', [5, pytest.param(100, marks=pytest.mark.slow)])
def test_denials_without_a_gradient_move_no_bit(ada, script, service, monkeypatch, count):
  adapter, _ = where = opened(ada)
  denied(ada, script, where)
  monkeypatch.setattr(teaching, 'teacher_prompt', lambda dialogue, asked, *_, **__: list(asked.tokens))
  version = ada.version(adapter)
  before = {name: array.tobytes() for name, array in service.store.arrays(version).items()}
  for _ in range(count):
    learned = denied(ada, script, where, messages=())
    assert (learned.unchanged, learned.accepted, learned.version_before, learned.version_after) == (True, True, 1, 1)
    assert LearnedTurns(**json.loads(json.dumps(learned.to_json()))) == learned
  assert [each.digest for each in ada.versions(adapter)][1:] == [version.digest]
  ours = service.worker.arrays(version.engine_name)
  assert {name: array.tobytes() for name, array in ours.items()} == before
  assert {each.state for each in Sessions(ada).examples(adapter)} == {'learned'}
  monkeypatch.undo()
  assert denied(ada, script, where, messages=()).version_after == 2


def test_what_was_learned_is_measured_from_the_teachers_whole_distribution(ada, script, service):
  """The divergence is compared with one from all log-probs, and the moved tokens with scores of both versions."""
  adapter, _ = where = opened(ada)
  turn = proposed(ada, script, where, called(GREP))
  _, learned = Sessions(ada).decide(*where, 0, DENY)
  [example] = Sessions(ada).examples(adapter)
  every = [np.tile(np.arange(service.vocab_size, dtype=np.int32), (len(turn.tokens), 1))]
  adapters = ada.adapter(adapter)

  def log_probs(number, prompt):
    [scored] = ada.score(VersionTarget(adapters, number), [(list(prompt), turn.tokens)], ids=every)
    return scored.of_ids.astype(np.float64), scored.log_probs

  teacher, _ = log_probs(0, example.teacher_prompt)
  (before, own), (after, moved) = (log_probs(number, turn.prompt_tokens) for number in (0, 1))
  whole = [float((np.exp(teacher) * (teacher - each)).sum(1).mean()) for each in (before, after)]
  # Tokens that are not named are taken together, which can only lower it.
  assert 0 < learned.divergence_before <= whole[0] + 1e-6 and 0 <= learned.divergence_after <= whole[1] + 1e-6
  assert whole[1] < whole[0] and learned.divergence_after < learned.divergence_before
  assert [each.position for each in learned.moved] == sorted(
    range(len(own)), key=lambda position: -abs(moved[position] - own[position])
  )[: waiting_examples.MOST_MOVED]
  for each in learned.moved:
    assert each.token == turn.tokens[each.position]
    np.testing.assert_allclose([each.before, each.after], [own[each.position], moved[each.position]], atol=1e-4)


def test_the_divergence_is_that_of_the_named_tokens_and_all_others_as_one():
  teacher = np.log([[0.5, 0.2]])
  student = np.log([[0.25, 0.25]])
  expected = 0.5 * math.log(2) + 0.2 * math.log(0.2 / 0.25) + 0.3 * math.log(0.3 / 0.5)
  assert feedback_guards.kl_over_support(student, teacher) == pytest.approx(expected)


def test_the_conversation_goes_on_with_what_was_approved_and_what_tools_answered(ada, script, service):
  where = opened(ada)
  denied(ada, script, where, correction=None)
  first = proposed(ada, script, where, called(GREP), ())
  turn, learned = Sessions(ada).decide(*where, 1, APPROVE)
  assert (turn.status, learned) == ('approved', None)
  with pytest.raises(InvalidRequest, match='nothing to answer'):
    Sessions(ada).propose(*where)
  turn, learned = Sessions(ada).results(*where, 1, [ToolResult(True, 'a:x')])
  assert learned is None and turn.results[0].text == 'a:x' and turn.status == 'approved'
  with pytest.raises(InvalidRequest, match='already has the results of turn 1'):
    Sessions(ada).propose(*where, [{'role': 'tool', 'content': 'a:x'}])
  second = proposed(ada, script, where, 'Done.', ())
  assert second.prompt_tokens[: len(first.prompt_tokens) + len(first.tokens)] == [*first.prompt_tokens, *first.tokens]
  text = service.tokenizer.decode(second.prompt_tokens)
  assert (
    text.endswith('</tool_call><|im_end|>\n<|im_start|>t\na:x<|im_end|>\n<|im_start|>a\n') and text.count('Hi') == 1
  )
  assert (second.status, second.said, second.calls) == ('answered', 'Done.', ())
  third = proposed(ada, script, where, 'Yes.', [{'role': 'user', 'content': '?'}])
  text = service.tokenizer.decode(third.prompt_tokens)
  assert text.endswith('<|im_start|>a\nDone.<|im_end|>\n<|im_start|>u\n?<|im_end|>\n<|im_start|>a\n')
  assert head(ada, where) == 0


def with_prompts_of(most, script, service, monkeypatch):
  monkeypatch.setattr(type(service), 'max_prompt', property(lambda self: most))
  monkeypatch.setattr(script, 'measures', False)
  config = dataclasses.replace(service.reprompting.config, max_reprompt_len=33_000)
  monkeypatch.setattr(service, 'reprompting', dataclasses.replace(service.reprompting, config=config))


@pytest.mark.parametrize(
  'count', [24, pytest.param(80, marks=pytest.mark.slow), pytest.param(200, marks=pytest.mark.campaign)]
)
def test_long_outputs_do_not_end_a_session(ada, script, service, monkeypatch, count):
  """In prompts of 32,768 tokens, with outputs of 20,000 characters; only what the model would say is not computed."""
  with_prompts_of(32_768, script, service, monkeypatch)
  adapter, _ = where = opened(ada, min_sdpo_examples=64, after_denial='tell')
  turns = []
  for number in range(count):
    turns.append(proposed(ada, script, where, called(GREP), [{'role': 'user', 'content': f'Task {number}.'}]))
    if number % 10 == 3:
      Sessions(ada).decide(*where, number, Decision('deny', f'Reason {number}.'))
      continue
    Sessions(ada).decide(*where, number, APPROVE)
    Sessions(ada).results(*where, number, [ToolResult(True, f'begin {number} ' + 'x' * 20_000 + f' end {number}')])
  prompts = [service.tokenizer.decode(turn.prompt_tokens) for turn in turns]
  assert max(len(turn.prompt_tokens) for turn in turns) <= 32_768
  assert [turn.compacted for turn in turns[:4]] == [False, False, False, True]
  for number, (before, turn) in enumerate(itertools.pairwise(turns), start=1):
    goes_on = turn.prompt_tokens[: len(before.prompt_tokens)] == before.prompt_tokens
    assert goes_on != turn.compacted
    said = prompts[number]
    assert said.endswith(f'<|im_start|>u\nTask {number}.<|im_end|>\n<|im_start|>a\n') and 'Task 0.' in said
    reasons = [place for place in range(number) if place % 10 == 3]
    found = [said.index(f'Reason {place}.') for place in reasons]
    assert found == sorted(found)
    if (number - 1) % 10 != 3:  # The newest output has its beginning and end.
      assert f'begin {number - 1} ' in said and f' end {number - 1}' in said
  assert [example.turn for example in Sessions(ada).examples(adapter)] == list(range(3, count, 10))


def test_denials_do_not_end_a_session(ada, script, service, monkeypatch):
  with_prompts_of(1024, script, service, monkeypatch)
  where = opened(ada, min_sdpo_examples=64, after_denial='tell')
  turns = []
  for number in range(0, 40, 2):
    turns.append(proposed(ada, script, where, called(GREP), [{'role': 'user', 'content': f'Task {number}.'}]))
    Sessions(ada).decide(*where, number, Decision('deny', f'Reason {number}. ' + 'Why? ' * 5))
    turns.append(proposed(ada, script, where, called(READ), ()))
    Sessions(ada).decide(*where, number + 1, APPROVE)
    Sessions(ada).results(*where, number + 1, [ToolResult(True, 'Found.')])
  said = service.tokenizer.decode(turns[-1].prompt_tokens)
  assert 'Reason 38.' in said and 'Reason 0.' not in said and 'left out here' in said


def test_results_can_be_replaced_until_a_turn_has_read_them(ada, script, service):
  where = opened(ada)
  proposed(ada, script, where, called(GREP))
  Sessions(ada).decide(*where, 0, APPROVE)
  for text in ('one', 'two', 'two'):
    turn, _ = Sessions(ada).results(*where, 0, [ToolResult(True, text)])
  second = proposed(ada, script, where, 'Done.', ())
  said = service.tokenizer.decode(second.prompt_tokens)
  assert turn.results[0].text == 'two' and 'two' in said and 'one' not in said
  with pytest.raises(TurnConflict, match='already has other results, which a later turn has read'):
    Sessions(ada).results(*where, 0, [ToolResult(True, 'one')])


def test_messages_after_a_denial_join_those_that_were_not_answered(ada, script, service):
  where = opened(ada)
  denied(ada, script, where, correction=None)
  turn = proposed(ada, script, where, called(READ), [{'role': 'user', 'content': 'No!'}])
  text = service.tokenizer.decode(turn.prompt_tokens)
  assert text.endswith('<|im_start|>u\nHi<|im_end|>\n<|im_start|>u\nNo!<|im_end|>\n<|im_start|>a\n')
  assert [message['content'] for message in turn.messages] == ['No!']


def test_an_edit_teaches_the_edited_call_and_stands_in_the_conversation(ada, script, service):
  adapter, _ = where = opened(ada)
  first = proposed(ada, script, where, called(GREP))
  with pytest.raises(InvalidRequest, match='no call 1'):
    Sessions(ada).decide(*where, 0, Decision('edit', arguments={}, call=1))
  with pytest.raises(InvalidRequest, match='The arguments are unchanged'):
    Sessions(ada).decide(*where, 0, Decision('edit', arguments=dict(first.calls[0].arguments)))
  turn, learned = Sessions(ada).decide(*where, 0, Decision('edit', arguments={'p': 'a'}))
  assert turn.status == 'edited' and turn.called[0].arguments == {'p': 'a'} and turn.calls == first.calls
  assert learned.accepted and learned.turns == (0,)
  [example] = Sessions(ada).examples(adapter)
  assert (example.kind, example.demonstration) == ('edit', called(GREP_A)) and list(example.tokens) == first.tokens
  assert called(GREP_A) in service.tokenizer.decode(example.teacher_prompt)
  Sessions(ada).results(*where, 0, [ToolResult(True, 'ok')])
  second = proposed(ada, script, where, 'Done.', ())
  kept = [*first.prompt_tokens, *service.tokenizer.encode(called(GREP_A)), service.tokenizer.eos_token_id]
  assert second.prompt_tokens[: len(kept)] == kept


@pytest.mark.parametrize('how', ['direct', 'teacher'])
def test_how_the_rejected_and_the_wanted_call_moved_is_measured(ada, script, service, how):
  adapter, _ = where = opened(ada, learn_edits=how, update={'learning_rate': 0.01})
  first = proposed(ada, script, where, called(GREP))
  turn, learned = Sessions(ada).decide(*where, 0, Decision('edit', arguments={'p': 'a'}))
  assert learned.accepted and turn.learned == learned and Sessions(ada).turns(*where)[0].learned == learned
  [moved] = learned.answers
  for tokens, said in ((first.tokens, moved.rejected), (turn.kept_tokens, moved.wanted)):
    rows = [(first.prompt_tokens, tokens)]
    scores = [ada.score(VersionTarget(ada.adapter(adapter), number), rows)[0].log_probs.sum() for number in (0, 1)]
    assert said == pytest.approx(scores, abs=1e-3)
  [example] = Sessions(ada).examples(adapter)
  if how == 'direct':
    assert moved.rejected[0] > moved.rejected[1] and moved.wanted[0] < moved.wanted[1] and learned.warnings == ()
    assert learned.divergence_before is None and list(example.edited_tokens) == list(turn.kept_tokens)
  else:
    assert example.edited_tokens is None and learned.divergence_before > 0
  other = ada.create('other', seed=0)[0].id  # It learns the same from the example.
  [again] = Sessions(ada).replay(other, [READER.validate_json(as_json(vars(example)))])
  assert again.accepted and again.divergence_before == pytest.approx(learned.divergence_before)
  if how == 'direct':
    assert [each.wanted for each in again.answers] == [pytest.approx(moved.wanted)]


@pytest.mark.parametrize('limit', [None, 0.0])
def test_a_lesson_that_makes_the_denied_call_likelier_warns_or_is_rolled_back(ada, script, limit):
  where = opened(ada, guards={'max_rejected_rise': limit}, tools=[])
  learned = denied(ada, script, where, text='ttttt')
  [moved] = learned.answers
  assert moved.turn == 0 and moved.rejected[1] > moved.rejected[0] + 0.1 and moved.wanted is None
  if limit is None:
    assert learned.accepted and head(ada, where) == 1
    [warning] = learned.warnings
    assert f'{moved.rejected[0]:.2f} → {moved.rejected[1]:.2f}' in warning and 'turn 0' in warning
  else:
    assert not learned.accepted and head(ada, where) == 0 and learned.warnings == ()
    assert 'max_rejected_rise is 0' in learned.reason
  quieter = denied(ada, script, opened(ada, where[0]), text='Hello')
  assert quieter.accepted and quieter.warnings == ()


def test_what_was_learned_says_that_moments_were_lost_in_an_answer_and_in_one_that_was_lost(
  ada, script, service, monkeypatch
):
  adapter, session = where = opened(ada)
  with monkeypatch.context() as patched:  # As after a kill between the answer and the writing of its state.
    patched.setattr(service.store, 'keep_optimizer_state', lambda *_: None)
    denied(ada, script, where)
  service.worker.forget(engine_name(adapter, 1))
  said = ('The moments of version 1 are not stored, so learning began with zeros.',)
  with monkeypatch.context() as patched:  # As after a kill between the commit and its note.
    patched.setattr(session_tables, 'note_learned', lambda *_: None)
    assert denied(ada, script, where, messages=()).warnings[:1] == said
  # Another session of the adapter leaves the note to this one, which may be about to write it.
  assert Sessions(ada).flush(*opened(ada, adapter)) is None and Sessions(ada).turns(*where)[1].learned is None
  assert Sessions(ada).flush(*where) is None and Sessions(ada).turns(*where)[1].learned.warnings == said


def test_an_answer_without_a_call_can_be_denied(ada, script):
  where = opened(ada, tools=[])
  assert proposed(ada, script, where, called(GREP)).status == 'answered'  # There are no tools, so there is no call.
  turn, learned = Sessions(ada).decide(*where, 0, DENY)
  assert turn.status == 'denied' and learned.accepted
  assert proposed(ada, script, where, 'Yes', ()).n == 1
  assert Sessions(ada).decide(*where, 1, APPROVE)[0].status == 'approved'


def test_a_call_that_cannot_be_read_teaches_why(ada, script):
  adapter, _ = where = opened(ada)
  turn = proposed(ada, script, where, '<tool_call>{')
  assert turn.status == 'open' and '</tool_call> is missing' in turn.fault
  _, learned = Sessions(ada).decide(*where, 0, Decision('deny'))
  [example] = Sessions(ada).examples(adapter)
  assert learned.accepted and example.environment == turn.fault and example.feedback is None
  half = proposed(ada, script, where, called(GREP) + '<tool_call>', ())
  assert half.calls and half.fault
  with pytest.raises(InvalidRequest, match='its plan is incomplete'):
    Sessions(ada).decide(*where, 1, APPROVE)


def test_tools_that_failed_are_lessons_where_the_session_says_so(ada, script):
  adapter, _ = where = opened(ada, learn_from_results=True, title='Tools')
  proposed(ada, script, where, called(GREP))
  Sessions(ada).decide(*where, 0, APPROVE)
  failed = ToolResult(False, 'No.', exit_code=2, stderr='x: bad', field='p', line=3)
  with pytest.raises(InvalidRequest, match='one result for each of them'):
    Sessions(ada).results(*where, 0, [failed, failed])
  turn, learned = Sessions(ada).results(*where, 0, [failed])
  [example] = Sessions(ada).examples(adapter)
  assert example.environment == 'The tool g failed (exit code 2, argument p, line 3).\nNo.\nstderr: x: bad'
  assert learned.accepted and turn.learned == learned and turn.status == 'approved'
  assert Sessions(ada).results(*where, 0, [failed]) == (turn, learned)
  with pytest.raises(TurnConflict, match='other results'):
    Sessions(ada).results(*where, 0, [ToolResult(True, 'x')])


def test_examples_wait_until_there_are_enough_and_are_learned_together(ada, script):
  adapter, _ = where = opened(ada, min_sdpo_examples=3, update={'learning_rate': 1e-3, 'alpha': 1.0})
  for waiting in (1, 2):
    learned = denied(ada, script, where, messages=HI if waiting == 1 else ())
    assert learned == LearnedTurns(0, 0, False, None, (), waiting)
  assert [example.state for example in Sessions(ada).examples(adapter)] == ['waiting'] * 2
  learned = denied(ada, script, where, messages=())
  assert learned.turns == (0, 1, 2) and learned.waiting == 0 and head(ada, where) == 1
  assert {turn.learned for turn in Sessions(ada).turns(*where)} == {learned}
  assert ada.version(adapter).details['optimizer']['learning_rate'] == 1e-3
  assert Sessions(ada).flush(*where) is None
  denied(ada, script, where, messages=())
  assert Sessions(ada).flush(*where).turns == (3,) and head(ada, where) == 2


def test_what_one_step_does_not_hold_goes_on_waiting_and_is_counted(ada, script, service, monkeypatch):
  where = opened(ada, min_sdpo_examples=4)
  for number in range(3):
    denied(ada, script, where, messages=() if number else HI)
  monkeypatch.setattr(service.settings.limits, 'max_items', 2)
  learned = Sessions(ada).flush(*where)
  assert (learned.turns, learned.waiting) == ((0, 1), 1)
  learned = Sessions(ada).flush(*where)
  assert (learned.turns, learned.waiting) == ((2,), 0) and Sessions(ada).flush(*where) is None


def test_what_was_right_is_rehearsed_beside_a_correction(ada, script):
  adapter, session = where = opened(ada, rehearse=1)
  for number, text in enumerate((READ, GREP_A)):
    proposed(ada, script, where, called(text), HI if number == 0 else ())
    Sessions(ada).decide(*where, number, APPROVE)
    Sessions(ada).results(*where, number, [ToolResult(True, '')])
  learned = denied(ada, script, where, messages=())
  assert learned.turns == (2,)
  assert ada.version(adapter).details['session']['examples'] == [[1, 'rehearsal'], [2, 'denial']]
  correction, rehearsed = Sessions(ada).examples(adapter, session)
  assert (rehearsed.turn, rehearsed.kind, rehearsed.demonstration) == (1, 'rehearsal', called(GREP_A))
  assert rehearsed.versions == correction.versions == (1,)
  denied(ada, script, where, messages=())
  assert [each.versions for each in Sessions(ada).examples(adapter)] == [(1,), (1, 2), (2,)]


def test_a_teacher_may_read_the_attempt(ada, script, service):
  adapter, _ = where = opened(ada, show_attempt=True, teacher={'kind': 'base'})
  turn = proposed(ada, script, where, called(GREP))
  Sessions(ada).decide(*where, 0, DENY)
  [example] = Sessions(ada).examples(adapter)
  assert list(example.teacher_prompt[: len(turn.prompt_tokens) + 6]) == [*turn.prompt_tokens, *turn.tokens]
  assert ada.version(adapter).details['teacher'] == 'base'


def test_every_kind_of_teacher_reads_the_same_conversation(ada, script, service):
  adapter, header = (
    ada.create('one', seed=0)[0].id,
    service.tokenizer.encode('<|im_start|>a\n', add_special_tokens=False),
  )
  kinds = {'live': 'live', 'ema': 'ema', 'base': 'base', 'lagged': f'version:{adapter}@1'}
  for kind in kinds:
    _, session = where = opened(ada, adapter, teacher={'kind': kind} | ({'every': 2} if kind == 'lagged' else {}))
    denied(ada, script, where)
    [turn], [example] = Sessions(ada).turns(*where), Sessions(ada).examples(adapter, session)
    body, asked = turn.prompt_tokens[: -len(header)], list(example.teacher_prompt)
    assert turn.prompt_tokens == [*body, *header] and asked[: len(body)] == body and asked[-len(header) :] == header
    assert example.teacher['kind'] == kind
  assert [version.details['teacher'] for version in ada.versions(adapter)[1:]] == list(kinds.values())


def test_a_retry_is_the_newest_versions_and_joins_nothing(ada, script):
  where = opened(ada)
  denied(ada, script, where)
  script.say(called(READ))
  [turn] = Sessions(ada).retry(*where, 0)
  assert (turn.n, turn.version, turn.status) == (0, 1, 'open') and turn.calls[0].name == 'r'
  assert [each.version for each in Sessions(ada).turns(*where)] == [0]
  assert ada.service.store.sample(ada.owner, turn.sample_id).version == 1


def test_drafts_come_before_the_turn(ada, script):
  where = opened(ada)
  script.say('Hi.')
  *drafts, turn = Sessions(ada).propose(*where, HI, drafts=True)
  assert all(isinstance(each, SampleDraft) for each in drafts) and drafts[0].delta == 'H'
  assert turn.text == 'Hi.' and Sessions(ada).turns(*where)[0].text == 'Hi.'


# What does not go.


def test_what_is_decided_stays_decided(ada, script):
  where = opened(ada)
  proposed(ada, script, where, called(GREP))
  with pytest.raises(TurnConflict, match='not decided yet') as raised:
    Sessions(ada).propose(*where)
  assert raised.value.current == 0
  turn, learned = Sessions(ada).decide(*where, 0, DENY)
  assert Sessions(ada).decide(*where, 0, DENY) == (turn, learned) and head(ada, where) == 1
  for other in (APPROVE, Decision('deny', 'Use x.')):
    with pytest.raises(TurnConflict, match='already denied'):
      Sessions(ada).decide(*where, 0, other)
  with pytest.raises(TurnConflict, match='send results for'):
    Sessions(ada).results(*where, 0, [ToolResult(True, 'x')])
  answered = proposed(ada, script, where, 'Yes.', ())
  proposed(ada, script, where, 'No.', HI)
  with pytest.raises(TurnConflict, match='newest turn is') as raised:
    Sessions(ada).decide(*where, answered.n, DENY)
  assert raised.value.current == 2 and head(ada, where) == 1
  with pytest.raises(NotFound, match='no turn 7'):
    Sessions(ada).decide(*where, 7, DENY)


def test_of_two_who_decide_at_once_one_does(ada, script, service):
  where = opened(ada)
  proposed(ada, script, where, called(GREP))

  def decide(decision):
    try:
      return Sessions(Account(service, ada.owner)).decide(*where, 0, decision)[0].status
    except TurnConflict:
      return 'conflict'

  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    found = list(pool.map(decide, [DENY, APPROVE, Decision('deny', 'Other.'), DENY] * 4))
  [turn] = Sessions(ada).turns(*where)
  won = {'denied': [DENY, Decision('deny', 'Other.')], 'approved': [APPROVE]}[turn.status]
  assert turn.decision in won and 'conflict' in found and turn.status in found
  assert head(ada, where) == (turn.status == 'denied')


def test_of_two_proposals_at_once_one_is_kept(ada, script):
  where = opened(ada)
  script.say('One.', 'Two.')
  first, second = Sessions(ada).propose(*where, HI), Sessions(ada).propose(*where, HI)
  kept = next(first)
  with pytest.raises(TurnConflict, match='session has changed meanwhile'):
    next(second)
  assert [turn.text for turn in Sessions(ada).turns(*where)] == [kept.text]


def test_an_adapter_may_have_moved_on(ada, script, service):
  adapter, _ = where = opened(ada)
  proposed(ada, script, where, called(GREP))
  said = make_request([Item(prompt_tokens=[72], tokens=[73], feedback='No.')], {}, service.settings)
  feedback.learn(ada, adapter, None, said)
  _, learned = Sessions(ada).decide(*where, 0, DENY)
  assert (learned.version_before, learned.version_after) == (1, 2)
  ada.undo(adapter, None, 0)
  assert proposed(ada, script, where, called(READ), ()).version == 3
  assert Sessions(ada).decide(*where, 0, DENY)[1] == learned  # An undo does not make it learn again.
  assert head(ada, where) == 3


def test_a_guard_leaves_the_turn_denied_and_the_version_as_it_was(ada, script, monkeypatch):
  monkeypatch.setattr(feedback_guards, 'LEAST_RECENT', 1)
  where = opened(ada, guards={'max_loss_ratio': 0.0})
  first = denied(ada, script, where)
  assert first.accepted  # There is nothing to compare with yet.
  learned = denied(ada, script, where, messages=())
  assert not learned.accepted and 'max_loss_ratio' in learned.reason and learned.version_after == 1 == head(ada, where)
  assert learned.divergence_after == learned.divergence_before and learned.moved == ()
  turn = Sessions(ada).turns(*where)[1]
  assert turn.status == 'denied' and turn.learned == learned
  assert [each.state for each in Sessions(ada).examples(where[0])] == ['learned', 'rejected']
  assert Sessions(ada).decide(*where, 1, DENY) == (turn, learned)


def test_a_conversation_that_is_too_long_names_itself_and_the_way_out(ada, script):
  where = opened(ada, title='Long one')
  with pytest.raises(InvalidRequest, match="'Long one' has .* limit of 64.*open a new session"):
    Sessions(ada).propose(*where, [{'role': 'user', 'content': 'a' * 60}])
  assert Sessions(ada).turns(*where) == []


def test_a_session_does_not_need_the_samples(ada, script, service):
  where = opened(ada)
  proposed(ada, script, where, called(GREP))
  service.store.retain(service.clock() + 10 * service.settings.store.sample_ttl_s)
  assert Sessions(ada).decide(*where, 0, DENY)[1].accepted


def parsed(body, said):
  """Return the body of a request as its route reads it."""
  try:
    return pydantic.TypeAdapter(body).validate_json(json.dumps(said))
  except pydantic.ValidationError as error:
    raise invalid(error) from error


@pytest.mark.parametrize(
  'said, field',
  [
    ({'tool': []}, 'tool'),
    ({'tools': [{'name': 3}]}, 'tools.0'),
    ({'tools': [{'name': 'x', 'parameters': math.inf}]}, 'tools.0'),
    ({'tools': 'grep'}, 'tools'),
    ({'tools': TOOLS * 50}, 'tools'),
    ({'tools': [], 'system': 'x' * 9999}, 'system'),
    ({'title': 'x' * 201}, 'title'),
    ({'min_sdpo_examples': 0}, 'min_sdpo_examples'),
    ({'min_sdpo_examples': 60, 'rehearse': 5}, 'min_sdpo_examples'),
    ({'rehearse': -1}, 'rehearse'),
    ({'teacher': 'nobody'}, 'teacher.kind'),
    ({'update': {'rate': 1}}, 'update.rate'),
    ({'update': {'steps': 99}}, 'update.steps'),
    ({'guards': {'max_kl': 1}}, 'guards.max_kl'),
    ({'sampling': {'n': 2}}, 'sampling.n'),
    ({'sampling': {'max_tokens': 9}}, 'max_tokens'),
    ({'sampling': {'temperature': -1}}, 'sampling.temperature'),
    ({'sampling': {'stop': ['</tool_call>']}}, 'sampling.stop'),
    ({'learn_from_results': 1}, 'learn_from_results'),
    ({'system': 1}, 'system'),
    ({'show_attempt': 'no'}, 'show_attempt'),
  ],
)
def test_settings_that_cannot_be_are_refused_by_their_field(ada, said, field):
  with pytest.raises(InvalidRequest) as raised:
    Sessions(ada).open(ada.create('one', seed=0)[0].id, parsed(SessionSettings, RETRY | said))
  assert raised.value.field == field and len(str(raised.value)) > 20


@pytest.mark.parametrize(
  'read, said, field',
  [
    (DecisionRequest, {'decision': 'maybe'}, 'decision'),
    (DecisionRequest, {'decision': 'edit', 'arguments': [1]}, 'arguments'),
    (DecisionRequest, {'decision': 'edit', 'arguments': {'a': math.nan}}, 'arguments'),
    (DecisionRequest, {'decision': 'edit', 'arguments': {'a': [{'b\ud800': 1}]}}, None),  # Is no JSON.
    (DecisionRequest, {'decision': 'deny', 'correction': 3}, 'correction'),
    (DecisionRequest, {'decision': 'deny', 'correction': 'half \ud83d'}, None),
    (DecisionRequest, {'decision': 'edit', 'arguments': {}, 'call': True}, 'call'),
    (ResultsRequest, {'results': [{'call': 0, 'ok': True}]}, 'results.0.text'),
    (ResultsRequest, {'results': [{'call': 0, 'ok': 1, 'text': ''}]}, 'results.0.ok'),
    (ResultsRequest, {'results': [{'ok': True, 'text': '', 'exit_code': 'x'}]}, 'results.0.exit_code'),
    (ResultsRequest, {'results': [{'ok': True, 'text': '', 'colour': 'x'}]}, 'results.0.colour'),
  ],
)
def test_what_is_none_is_refused_by_its_field(read, said, field):
  with pytest.raises(InvalidRequest) as raised:
    parsed(read, said)
  assert raised.value.field == field


@pytest.mark.parametrize(
  'said, field',
  [
    ({'kind': 'edit'}, 'arguments'),
    ({'kind': 'deny', 'arguments': {}}, 'arguments'),
    ({'kind': 'approve', 'correction': 'x'}, 'correction'),
  ],
)
def test_fields_of_a_decision_that_do_not_go_together_are_refused(said, field):
  with pytest.raises(InvalidRequest) as raised:
    Decision(**said)
  assert raised.value.field == field


@pytest.mark.parametrize(
  'change, field',
  [
    ({'format': 2}, 'format'),
    ({'session': None}, 'session'),
    ({'tokens': []}, 'tokens'),
    ({'tokens': [1, 2**31]}, 'tokens.1'),
    ({'log_probs': [0.0, 0.0]}, 'log_probs'),
    ({'update': {'a': math.inf}}, 'update'),
    ({'messages': [{'role': 'assistant', 'content': '', 'calls': []}]}, 'messages.0'),
    ({'calls': [{'name': 'a'}]}, 'calls.0'),
    ({'messages': [{'role': 'assistant', 'content': '', 'said': '', 'calls': [1]}]}, 'messages.0'),
    ({'colour': 'red'}, 'colour'),
  ],
)
def test_examples_that_cannot_be_are_refused_by_their_field(ada, script, change, field):
  where = opened(ada)
  denied(ada, script, where)
  [example] = Sessions(ada).examples(where[0])
  with pytest.raises(pydantic.ValidationError) as raised:
    READER.validate_json(json.dumps(vars(example) | change))
  assert invalid(raised.value).field == field


@pytest.mark.parametrize(
  'messages, why',
  [
    ([{'role': 'system', 'content': 'x'}], 'a setting'),
    ([{'role': 'user', 'content': 'x'}, {'role': 'assistant', 'content': 'x'}], 'last message'),
    ([{'role': 'user'}], 'content'),
    ([{'role': 'critic', 'content': 'x'}], 'role'),
  ],
)
def test_messages_that_cannot_be_are_refused(ada, messages, why):
  where = opened(ada, system='S')
  with pytest.raises(InvalidRequest, match=why):
    Sessions(ada).propose(*where, messages)


def test_a_template_without_tools_is_refused_by_name(tmp_path):
  config = make_config(model_folder(tmp_path / 'model'), tmp_path / 'root')
  with running(config) as service:
    account = Account(service, 'ada')
    adapter = account.create('one')[0].id
    with pytest.raises(InvalidRequest, match='does not support tools') as raised:
      opened(account, adapter)
    assert raised.value.field == 'tools'
    session, _ = Sessions(account).open(adapter, SessionSettings(sampling={'max_tokens': 4}))
    [turn] = Sessions(account).propose(adapter, session.id, HELLO, seed=3)  # What the model itself draws.
    assert turn.prompt_tokens == account.service.prompt_of(messages=HELLO) and 0 < len(turn.tokens) <= 4
    [again] = Sessions(account).retry(adapter, session.id, 0, seed=3)
    assert again.tokens == turn.tokens
    [after] = Sessions(account).propose(adapter, session.id, [{'role': 'user', 'content': 'a'}])
    assert after.prompt_tokens[: len(turn.prompt_tokens) + len(turn.tokens)] == [*turn.prompt_tokens, *turn.tokens]
    assert Sessions(account).decide(adapter, session.id, 1, DENY)[1].accepted


# Whose it is.


def test_a_session_is_its_owners_and_needs_its_token(ada, service):
  adapter = ada.create('one', seed=0)[0].id
  session, token = Sessions(ada).open(adapter, SessionSettings(title='Mine'))
  assert token.startswith('sst-') and token not in json.dumps(session.to_json())
  Sessions(ada).check_token(adapter, session.id, token)
  for other in (None, '', 'sst-', token[:-1], token + 'x', '\ud800'):
    with pytest.raises(Forbidden, match='X-Session-Token'):
      Sessions(ada).check_token(adapter, session.id, other)
  assert Sessions(ada).list(adapter) == [session] == [Sessions(ada).get(adapter, session.id)]
  eve = Account(service, 'eve')
  own = eve.create('own')[0].id
  asked = [
    lambda adapter: Sessions(eve).open(adapter, SessionSettings()),
    Sessions(eve).list,
    Sessions(eve).examples,
    lambda adapter: Sessions(eve).replay(adapter, []),
    *(
      lambda adapter, method=method, more=more: getattr(Sessions(eve), method)(adapter, session.id, *more)
      for method, more in {
        'check_token': (token,),
        'get': (),
        'turns': (),
        'delete': (),
        'propose': (HI,),
        'retry': (0,),
        'decide': (0, DENY),
        'results': (0, []),
        'flush': (),
        'examples': (),
      }.items()
    ),
  ]
  for ask in asked:
    with pytest.raises(NotFound):
      ask(adapter)
  for ask in asked[4:]:
    with pytest.raises(NotFound):
      ask(own)


def rows_of(service, *names):
  """How many rows of the tables of sessions name one of these."""
  count = 0
  for table in SESSION_TABLES:
    for row in service.store.database.read(f'SELECT * FROM {table}'):
      count += any(name in map(str, row) for name in names)
  return count


def test_what_is_deleted_is_erased(ada, script, service):
  adapter, session = where = opened(ada, system='secret')
  denied(ada, script, where, correction='secret')
  other = opened(ada, adapter)
  denied(ada, script, other)
  assert rows_of(service, session) == 3 and rows_of(service, adapter) == 6
  Sessions(ada).delete(*where)
  assert rows_of(service, session) == 0 and rows_of(service, adapter) == 3
  with pytest.raises(NotFound):
    Sessions(ada).turns(*where)
  content = b''.join(
    path.read_bytes() for path in pathlib.Path(service.settings.store.root).glob('*.sqlite*') if path.is_file()
  )
  assert content and b'secret' not in content and head(ada, where) == 2  # What was learned stays.
  ada.delete(adapter, None)
  assert rows_of(service, adapter) == 0


def test_a_proposal_of_a_session_that_was_deleted_meanwhile_is_kept_nowhere(ada, script, service):
  where = opened(ada)
  script.say('Yes.', 'Yes.')
  proposing = Sessions(ada).propose(*where, HI)
  Sessions(ada).delete(*where)
  with pytest.raises(NotFound):
    next(proposing)
  assert rows_of(service, where[1]) == 0
  where = opened(ada, where[0])
  proposing = Sessions(ada).propose(*where, HI)
  ada.delete(where[0], None)
  with pytest.raises(NotFound):
    next(proposing)
  assert rows_of(service, where[0]) == 0


# What fails halfway.


def test_a_decision_that_was_not_learned_is_learned_when_it_is_sent_again(ada, script, service):
  where = opened(ada)
  proposed(ada, script, where, called(GREP))
  ended = Call()

  class Ending:
    """Ends the request as soon as it spends on learning."""

    def spend(self, kind, tokens):
      if kind == 'learned' and tokens > 0:
        ended.end()

  ended.spend = Ending().spend
  with pytest.raises(Cancelled):
    Sessions(Account(service, ada.owner, ended)).decide(*where, 0, DENY)
  [turn] = Sessions(ada).turns(*where)
  assert turn.status == 'denied' and turn.learned is None and head(ada, where) == 0
  second = proposed(ada, script, where, called(READ), ())  # The conversation does not wait for it.
  turn, learned = Sessions(ada).decide(*where, 0, DENY)
  assert learned.accepted and turn.learned == learned and head(ada, where) == 1
  assert Sessions(ada).decide(*where, second.n, APPROVE)[1] is None


def test_what_was_learned_and_not_noted_is_not_learned_again(ada, script, service, monkeypatch):
  where = opened(ada)
  proposed(ada, script, where, called(GREP))

  def fail(*_):
    raise StorageFailed('The disk is full.')

  with monkeypatch.context() as patched:
    patched.setattr(session_tables, 'note_learned', fail)
    with pytest.raises(StorageFailed):
      Sessions(ada).decide(*where, 0, DENY)
  assert head(ada, where) == 1 and Sessions(ada).turns(*where)[0].learned is None
  turn, learned = Sessions(ada).decide(*where, 0, DENY)
  assert (learned.version_before, learned.version_after, learned.turns) == (0, 1, (0,)) and head(ada, where) == 1
  assert turn.learned == learned and Sessions(ada).flush(*where) is None


def test_a_decision_that_cannot_be_kept_is_none(ada, script, monkeypatch):
  where = opened(ada)
  proposed(ada, script, where, called(GREP))

  def fail(*_):
    raise StorageFailed('The disk is full.')

  with monkeypatch.context() as patched:
    patched.setattr(session_tables, 'put_example', fail)
    with pytest.raises(StorageFailed):
      Sessions(ada).decide(*where, 0, DENY)
  [turn] = Sessions(ada).turns(*where)
  assert turn.status == 'open' and turn.decision is None and head(ada, where) == 0
  assert Sessions(ada).decide(*where, 0, APPROVE)[0].status == 'approved'


def test_examples_travel_as_json_and_are_learned_by_another_adapter_as_they_were(ada, script, service):
  adapter, _ = where = opened(ada, min_sdpo_examples=2, rehearse=1)
  proposed(ada, script, where, called(READ))
  Sessions(ada).decide(*where, 0, APPROVE)
  Sessions(ada).results(*where, 0, [ToolResult(True, 'ok')])
  for _ in range(3):
    denied(ada, script, where, messages=())
  found = Sessions(ada).examples(adapter)
  examples = [READER.validate_json(as_json(vars(example))) for example in found]
  assert [(example.kind, example.state) for example in examples] == [
    ('denial', 'learned'),
    ('denial', 'learned'),
    ('rehearsal', 'learned'),
    ('denial', 'waiting'),
  ]
  assert [vars(example) for example in examples] == [vars(example) for example in found]
  other, _ = ada.create('two', seed=0)
  learned = Sessions(ada).replay(other.id, examples)
  assert [each.turns for each in learned] == [(0, 1, 2), (3,)] and all(each.accepted for each in learned)
  one, two = (service.store.arrays(ada.version(id, 1)) for id in (adapter, other.id))
  for name in one:
    np.testing.assert_allclose(one[name], two[name], atol=1e-6, err_msg=name)
  assert ada.version(other.id, 1).details['replayed']['session'] == where[1]


def test_what_was_undone_is_marked_and_not_learned_by_holder(ada, script, service):
  adapter, _ = where = opened(ada, rehearse=1)
  proposed(ada, script, where, called(READ))
  Sessions(ada).decide(*where, 0, APPROVE)
  Sessions(ada).results(*where, 0, [ToolResult(True, 'ok')])
  for _ in range(2):
    denied(ada, script, where, messages=())
  ada.undo(adapter, None)
  found = Sessions(ada).examples(adapter)
  assert [(example.kind, example.turn, example.state, example.versions) for example in found] == [
    ('denial', 1, 'learned', (1,)),
    ('rehearsal', 0, 'learned', (1,)),
    ('denial', 2, 'undone', (2,)),
  ]
  other, _ = ada.create('two', seed=0)
  examples = [READER.validate_json(as_json(vars(example))) for example in found]
  assert [each.turns for each in Sessions(ada).replay(other.id, examples)] == [(0, 1)]
  one, two = (service.store.arrays(ada.version(id)) for id in (adapter, other.id))
  for name in one:
    np.testing.assert_allclose(one[name], two[name], atol=1e-6, err_msg=name)
  ada.undo(adapter, None, 2)  # Forward again.
  assert [example.state for example in Sessions(ada).examples(adapter)] == ['learned'] * 3


def test_examples_are_written_anew_for_another_tokenizer(ada, script, service, monkeypatch):
  """What it would be if the texts had been said here: the tokenizer is the same, but does not count as such."""
  adapter, _ = where = opened(ada, system='S')
  proposed(ada, script, where, called(GREP))
  Sessions(ada).decide(*where, 0, APPROVE)
  Sessions(ada).results(*where, 0, [ToolResult(True, 'ok')])
  denied(ada, script, where, messages=())
  turn = Sessions(ada).turns(*where)[1]
  [example] = Sessions(ada).examples(adapter)
  assert [message['role'] for message in example.messages] == ['system', 'user', 'assistant', 'tool']
  moved = dataclasses.replace(example, tokenizer='another', prompt_tokens=(1,), tokens=(1,), teacher_prompt=(1,))
  asked = []
  monkeypatch.setattr(feedback, 'learn', lambda tenant, id, expected, request, **_: asked.append(request) or stop())

  def stop():
    raise Cancelled('Enough is known.')

  other, _ = ada.create('two', seed=0)
  with pytest.raises(Cancelled):
    Sessions(ada).replay(other.id, [moved])
  [item] = asked[0].items
  assert item.prompt_tokens == turn.prompt_tokens and item.tokens == turn.tokens and item.log_probs is None
  assert item.teacher_prompt == list(example.teacher_prompt)
  too_long = dataclasses.replace(moved, messages=({'role': 'user', 'content': 'a' * 100},))
  with pytest.raises(InvalidRequest, match=r'examples\[1\]: its conversation has'):
    Sessions(ada).replay(other.id, [moved, too_long])


def test_records_are_json_and_back():
  learned = LearnedTurns(0, 1, True, None, (0,), 0, 0.5, 0.25, (), 0.1)
  assert LearnedTurns(**json.loads(json.dumps(learned.to_json()))) == learned
  for decision in (DENY, APPROVE, Decision('edit', 'x', {'a': [1]}, 2)):
    assert Decision(**json.loads(json.dumps(decision.to_json()))) == decision
  settings = SessionSettings(tools=TOOLS, teacher={'kind': 'ema'}, update={'steps': 2}, sampling={'stop': ['x']})
  assert SessionSettings(**json.loads(json.dumps(settings.to_json()))) == settings
  session = AgentSession('a', 'b', 0.0, settings, None, {}, 'digest')
  assert list(session.to_json()) == ['id', 'adapter', 'created', 'settings', 'tool_form']
  turn = SessionTurn(0, HI, 1, 's', [1], [2], np.zeros(1, np.float32), 't', 't', (), None, 'open', 0.0)
  derived = {'digest', 'called'}
  assert turn.to_json().keys() == {field.name for field in dataclasses.fields(SessionTurn)} - {'log_probs'} | derived
  changes = ({'n': 1}, {'sample_id': 't'}, {'text': 'u'}, {'status': 'denied'}, {'calls': (ToolCall('g', {'p': 1}),)})
  digests = [
    turn.digest(turn.calls),
    *(made.digest(made.calls) for made in [dataclasses.replace(turn, **each) for each in changes]),
  ]
  assert len(set(digests)) == 5 and digests[0] == digests[4]  # A decision is checked again when it is sent again.
