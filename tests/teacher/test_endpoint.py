"""The client of a teacher at an endpoint, against a real server with a tiny model, and against servers that do
wrong.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import threading

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from sdpo_jax.config import ModelConfig, TeacherEndpointConfig
from sdpo_jax.distributed.stopping import StoppedError
from sdpo_jax.environments import json_server
from sdpo_jax.errors import UserError
from sdpo_jax.models import huggingface, tokenizer
from sdpo_jax.teacher import asking, dialects
from sdpo_jax.teacher.endpoint import Endpoint, EndpointQuery
from tests import tiny
from tests.local_server import Answer, Server, dead_address
from tests.scoring_server import Scorer, log_probs

ROWS = [EndpointQuery([5, 9, 30], [7, 8, 201, 4]), EndpointQuery([17], [1]), EndpointQuery([2, 3], [])]
WIDTH = {'vllm': 20, 'fireworks': 5}
both = pytest.mark.parametrize('dialect', list(WIDTH))


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
  monkeypatch.setattr(json_server, 'FIRST_PAUSE_S', 0.0)


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  folder = tiny.make_model(tmp_path_factory.mktemp('model') / 'teacher')
  policy, parameters = huggingface.load(folder, ModelConfig(dtype='float32', remat='none'))
  return folder, policy, parameters, tokenizer.load(folder)


@pytest.fixture(scope='module')
def scorer(model):
  _, policy, parameters, reader = model
  return Scorer(policy, parameters, reader)


def endpoint(url, dialect='vllm', vocab_size=264, **settings) -> Endpoint:
  return Endpoint(
    TeacherEndpointConfig(**{'url': url, 'dialect': dialect, 'model': 'm', 'top_k': WIDTH[dialect], **settings}),
    vocab_size,
  )


@both
def test_all_rows_are_scored_as_the_model_scores_them(model, scorer, dialect):
  _, policy, parameters, _ = model
  with Server(scorer) as server, endpoint(f'{server.url}/v1', dialect) as teacher:
    found = teacher.score(ROWS)
  assert set(server.paths) == {'/v1/completions'} and len(server.bodies) == 2  # None about an empty completion.
  k = WIDTH[dialect]
  for asked, scored in zip(ROWS, found, strict=True):
    length = len(asked.completion)
    assert scored.token_ids.shape == scored.log_probs.shape == (length, k)
    assert scored.token_ids.dtype == np.int32 and scored.log_probs.dtype == np.float32
    if not length:
      continue
    expected = log_probs(policy, parameters, [*asked.prompt, *asked.completion])[-length - 1 : -1]
    best = np.sort(expected, axis=1)[:, ::-1][:, :k]
    np.testing.assert_allclose(scored.log_probs, best, rtol=1e-5)
    np.testing.assert_allclose(np.take_along_axis(expected, scored.token_ids, axis=1), best, rtol=1e-5)
    np.testing.assert_allclose(scored.target_log_probs, expected[np.arange(length), asked.completion], rtol=1e-5)
    np.testing.assert_allclose(scored.tail_mass, 1 - np.exp(best).sum(1), rtol=1e-4)


def test_what_is_sent(scorer):
  with Server(scorer) as server, endpoint(server.url + '/v1/') as teacher:
    teacher.score(ROWS[:1])
  [body] = server.bodies
  assert body['prompt'] == [5, 9, 30, 7, 8, 201, 4] and body['model'] == 'm' and body['prompt_logprobs'] == 20
  assert body['max_tokens'] == 1 and body['add_special_tokens'] is False and 'Authorization' not in server.headers[0]
  with Server(scorer) as server, endpoint(server.url, 'fireworks') as teacher:
    teacher.score(ROWS[:1])
  [body] = server.bodies
  assert body['echo_last'] == 4 and body['logprobs'] is True and body['top_logprobs'] == 5


def test_ids_that_the_student_does_not_have_are_left_out(scorer):
  with Server(scorer) as server, endpoint(server.url) as teacher, endpoint(server.url, vocab_size=100) as narrow:
    [whole], [cut] = teacher.score(ROWS[:1]), narrow.score(ROWS[:1])
  beyond = whole.token_ids >= 100
  assert beyond.any() and (cut.token_ids[beyond] == -1).all() and np.isneginf(cut.log_probs[beyond]).all()
  np.testing.assert_array_equal(cut.token_ids[~beyond], whole.token_ids[~beyond])


@both
def test_a_server_that_is_what_the_settings_say_passes_the_check(model, scorer, dialect, caplog):
  folder, _, _, reader = model
  with Server(scorer) as server, endpoint(server.url, dialect, tokenizer=str(folder)) as teacher:
    teacher.check(str(folder), reader, 90)
    assert [len(body['prompt']) for body in server.bodies][-1] == 90
    assert not caplog.records
    teacher.score(ROWS)
    [said] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert f'{WIDTH[dialect]} most likely tokens leave out' in said and '% of its probability' in said
    teacher.score(ROWS)
  assert len(caplog.records) == 1


def test_the_check_refuses_other_servers(model, scorer, tmp_path):
  folder, policy, parameters, reader = model
  other = tiny.make_model(tmp_path / 'other', seed=2)
  values = json.loads((other / 'tokenizer.json').read_text())
  vocab = values['model']['vocab']
  for first, second in zip('abcdefghijkl', 'mnopqrstuvwx', strict=True):
    vocab[first], vocab[second] = vocab[second], vocab[first]
  (other / 'tokenizer.json').write_text(json.dumps(values))

  def refusal(respond, named=folder, **settings):
    with Server(respond) as server, endpoint(server.url, **{'tokenizer': str(named), **settings}) as teacher:
      with pytest.raises(UserError) as error:
        teacher.check(str(folder), reader, 90)
    return str(error.value)

  assert 'tokenizer=' in refusal(scorer, other) and "is 'a' in" in refusal(scorer, other)
  # The settings name the right tokenizer, and the server has another.
  lying = Scorer(policy, parameters, tokenizer.load(other))
  assert 'has another tokenizer than the student: a token that is' in refusal(lying)
  few = Scorer(policy, parameters, reader, max_logprobs=10)
  assert 'lower actor.self_distillation.teacher_endpoint.top_k=20 or raise the limit' in refusal(few)
  short = Scorer(policy, parameters, reader, max_length=500)
  with Server(short) as server, endpoint(server.url, tokenizer=str(folder)) as teacher:
    with pytest.raises(UserError, match='has not scored a text of 500 tokens.*maximum context length is 500'):
      teacher.check(str(folder), reader, 500)
  assert "has no 'prompt_logprobs'" in refusal(lambda body: Answer({'choices': [{'text': 'x'}]}))
  assert 'has not scored the first, short text: it answered with status 404' in refusal(lambda body: Answer(status=404))


def with_change(scorer, edit):
  def respond(body):
    answer = copy.deepcopy(scorer(body).body)
    replaced = edit(answer['choices'][0])
    return Answer(answer if replaced is None else replaced)

  return respond


def entry(choice):
  """Return an entry in the middle of an answer: that of the likeliest token, and the row of it."""
  row = choice['prompt_logprobs'][4]
  return max(row, key=lambda key: row[key]['logprob']), row


def put(value):
  def edit(choice):
    key, row = entry(choice)
    row[key]['logprob'] = value

  return edit


def drop(choice):
  key, row = entry(choice)
  for other in [each for each in row if each not in (key, '8')][:2]:  # 8 stands there.
    del row[other]


def rename(to):
  def edit(choice):
    key, row = entry(choice)
    row[to] = row.pop(key)

  return edit


def shift(choice):
  choice['prompt_logprobs'] = [None, None, *choice['prompt_logprobs'][1:-1]]


HOSTILE = {
  'not a number': (put('-1.5'), 'not a finite number'),
  'NaN': (put(float('nan')), 'not a finite number'),
  'infinite': (put(float('-inf')), 'not a finite number'),
  'too large for a float': (put(-(10**400)), 'not a finite number'),
  'true': (put(True), 'not a finite number'),
  'above 0': (put(0.5), 'above 0'),
  'too much mass': (put(-1e-4), 'add up to'),
  'too few': (drop, 'log-probs at a position where 20 were asked for'),
  'shifted': (shift, 'as if positions were shifted'),
  'short': (lambda choice: choice['prompt_logprobs'].pop(), 'at 6 positions, but 7 tokens were sent'),
  'a word for an id': (rename('the'), 'not a token id'),
  'an id twice': (rename('0201'), 'not a token id'),
  'other tokens': (lambda choice: choice['prompt_token_ids'].append(3), 'read other tokens'),
  'no entry': (lambda choice: choice['prompt_logprobs'].__setitem__(5, {'201': 7}), 'without a log-prob'),
  'no row': (lambda choice: choice['prompt_logprobs'].__setitem__(5, None), 'no log-probs at a position'),
  'nothing': (lambda choice: {'choices': []}, "not have exactly one completion in 'choices'"),
  'a list': (lambda choice: [choice], "not have exactly one completion in 'choices'"),
}


@pytest.mark.parametrize('name', HOSTILE)
def test_an_answer_that_says_something_else_is_refused_and_not_asked_for_again(scorer, name):
  edit, sentence = HOSTILE[name]

  with Server(with_change(scorer, lambda choice: _replaced(edit, choice))) as server, endpoint(server.url) as teacher:
    with pytest.raises(UserError, match='has not scored completion 1 of 1: .*' + sentence):
      teacher.score(ROWS[:1])
  assert len(server.bodies) == 1


def _replaced(edit, choice):
  """Return what an edit puts in the place of the whole answer; None: it has changed the choice."""
  result = edit(choice)
  return result if isinstance(result, list) or (isinstance(result, dict) and 'choices' in result) else None


def test_fireworks_answers_with_an_id_twice_or_other_tokens_are_refused(scorer):
  def twice(choice):
    best = choice['logprobs']['content'][1]['top_logprobs']
    best[1] = best[0]

  def other(choice):
    choice['logprobs']['content'][2]['token_id'] += 1

  for edit, sentence in ((twice, 'two log-probs of token id'), (other, 'read other tokens than it was sent')):
    with Server(with_change(scorer, edit)) as server, endpoint(server.url, 'fireworks') as teacher:
      with pytest.raises(UserError, match=sentence):
        teacher.score(ROWS[:1])


def test_large_and_deep_answers_are_not_read(scorer):
  allowed = dialects.most_bytes(8, 20)
  deep = b'{"choices":' + b'[' * 5000 + b']' * 5000 + b'}'
  many = b'[' + b'0,' * 40_000 + b'0]'
  for body, sentence in ((b' ' * (allowed + 1), 'is larger than'), (deep, 'not JSON'), (many, 'more than .* values')):
    with Server(lambda _, body=body: Answer(body)) as server, endpoint(server.url) as teacher:
      with pytest.raises(UserError, match=sentence):
        teacher.score(ROWS[:1])


def test_what_may_pass_is_tried_again_and_what_does_not_ends_the_batch(scorer):
  answers = [Answer(status=503), Answer(status=429, headers={'Retry-After': '0'})]
  with Server(lambda body: answers.pop(0) if answers else scorer(body)) as server:
    with endpoint(server.url, retries=2, concurrency=1) as teacher:
      assert len(teacher.score(ROWS)) == 3
  assert len(server.bodies) == 4
  with Server(lambda body: Answer(status=500)) as server, endpoint(server.url, retries=1, concurrency=1) as teacher:
    with pytest.raises(UserError, match='completion 1 of 3: it answered with status 500'):
      teacher.score(ROWS)
  assert len(server.bodies) == 2  # Nothing is asked about the others any more.
  with endpoint(dead_address(), retries=0) as teacher, pytest.raises(UserError, match='connection failed'):
    teacher.score(ROWS)


def test_redirects_are_not_followed(scorer):
  with Server(scorer) as aim:
    with Server(lambda _: Answer(status=307, headers={'Location': aim.url + '/completions'})) as server:
      with endpoint(server.url) as teacher, pytest.raises(UserError, match='status 307'):
        teacher.score(ROWS)
  assert not aim.bodies


def test_a_batch_has_one_deadline(scorer):
  hold = threading.Event()

  def respond(body):
    hold.wait(30)
    return scorer(body)

  with Server(respond) as server, endpoint(server.url, batch_timeout_s=0.3, retries=5) as teacher:
    with pytest.raises(UserError, match='has not scored completion'):
      teacher.score(ROWS)
    hold.set()
  with Server(lambda _: Answer(status=429, headers={'Retry-After': '9'})) as server:
    with endpoint(server.url, batch_timeout_s=0.3, retries=5, concurrency=1) as teacher:
      with pytest.raises(UserError, match='the batch took more than 0.3 s .*; at the previous attempt, .* status 429'):
        teacher.score(ROWS)


def test_a_run_that_is_told_to_stop_does_not_wait_for_answers(scorer, monkeypatch):
  monkeypatch.setattr(asking, 'STOP_S', 0.01)
  hold, asked = threading.Event(), threading.Event()

  class Stop:
    def asked(self):
      return asked.is_set()

    def check(self):
      pass

  def respond(body):
    asked.set()
    hold.wait(30)
    return scorer(body)

  with Server(respond) as server, endpoint(server.url) as teacher:
    with pytest.raises(StoppedError):
      teacher.score(ROWS, Stop())
    hold.set()


def test_no_more_requests_at_once_than_allowed_and_no_fewer(scorer):
  meeting = threading.Barrier(3)

  def respond(body):
    meeting.wait(timeout=30)
    return scorer(body)

  with Server(respond) as server, endpoint(server.url, concurrency=3) as teacher:
    teacher.score(ROWS[:1] * 6)
  assert server.most_at_once == 3


def test_a_key_is_sent_and_never_shown(scorer, monkeypatch, caplog):
  monkeypatch.setenv('TEACHER_KEY', 's3cr3t-key')
  with Server(scorer) as server, endpoint(server.url, api_key_env='TEACHER_KEY') as teacher:
    teacher.score(ROWS[:1])
  assert server.headers[0]['Authorization'] == 'Bearer s3cr3t-key'
  with Server(lambda _: Answer(b'You sent s3cr3t-key', status=401)) as server:
    with endpoint(server.url, api_key_env='TEACHER_KEY') as teacher, pytest.raises(UserError) as error:
      teacher.score(ROWS[:1])
  assert 's3cr3t' not in str(error.value) + caplog.text and 'status 401' in str(error.value)
  monkeypatch.delenv('TEACHER_KEY')
  with pytest.raises(
    UserError, match='teacher_endpoint.api_key_env=TEACHER_KEY: there is no such environment variable'
  ):
    endpoint('http://localhost:1', api_key_env='TEACHER_KEY')


def test_addresses_that_cannot_be_asked_are_refused():
  with pytest.raises(UserError, match='must end before /completions'):
    endpoint('http://localhost:8000/v1/completions')
  with pytest.raises(UserError, match='must be an http or https address'):
    endpoint('localhost:8000')


ANYTHING = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(['', '7', '8', '-1', 'x', '٣', '9' * 30]),
  lambda inner: (
    st.lists(inner, max_size=3)
    | st.dictionaries(
      st.sampled_from(['logprob', 'token_id', 'top_logprobs', 'content', '8', '٣', 'decoded_token']), inner, max_size=3
    )
  ),
  max_leaves=8,
)


def places(value, path=()):
  """Where values stand within JSON."""
  yield path
  items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
  for key, inner in items:
    yield from places(inner, (*path, key))


@both
@hypothesis.settings(
  max_examples=150, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
@hypothesis.given(st.data())
def test_whatever_stands_in_an_answer_it_is_read_or_refused(scorer, dialect, data):
  asked, k = ROWS[0], 3
  how = dialects.DIALECTS[dialect]
  answer = copy.deepcopy(answered(scorer, dialect, k))
  *path, last = data.draw(st.sampled_from(sorted(filter(None, places(answer)), key=str)))  # Not the answer itself.
  target = answer
  for key in path:
    target = target[key]
  target[last] = data.draw(ANYTHING)
  try:
    scored = how.read(answer, asked.prompt, asked.completion, k, 264)
  except json_server.Fault:
    return
  assert scored.token_ids.shape == scored.log_probs.shape == (4, k) and scored.target_log_probs.shape == (4,)
  assert not np.isnan(scored.log_probs).any() and (scored.log_probs <= 0).all()
  assert (np.exp(scored.log_probs).sum(1) < 1.011).all()
  for row, ids in zip(scored.log_probs, scored.token_ids, strict=True):
    assert (np.diff(row[ids >= 0]) <= 0).all()  # What the student does not know is left out where it stood.
  for row in scored.token_ids:
    assert len({each for each in row.tolist() if each >= 0}) == (row >= 0).sum() and (row < 264).all()


@functools.cache
def answered(scorer, dialect, k):
  asked = ROWS[0]
  return scorer(dialects.DIALECTS[dialect].request('m', asked.prompt, asked.completion, k)).body
