"""Parts of the HTTP layer by themselves: formats of scores, zips, errors, events, metrics, the log."""

import io
import json
import math
import threading
import types
import zipfile

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pydantic
import pytest

from sdpo_jax.errors import UserError
from sdpo_jax.files import as_json
from sdpo_jax.learning.scoring import Scored
from sdpo_jax.serving.errors import (
  Busy,
  Damaged,
  InvalidRequest,
  NotFound,
  StorageFailed,
  TooLarge,
  Unauthorized,
  VersionConflict,
)
from sdpo_jax.serving.web import app, archives, error_responses, packed, schemas, score_formats
from sdpo_jax.serving.web.admission import Lifetime
from sdpo_jax.serving.web.events import ServerSentEvent
from sdpo_jax.serving.web.telemetry import Log, Metrics


def scored(tokens, topk, vocab_size, ids=0, seed=0):
  """Scores as of a model with a large vocabulary: ids of all sizes, log-probs down to −25 nats."""
  draw = np.random.default_rng(seed)
  top = -np.sort(draw.gamma(6.0, 2.0, (tokens, topk)).astype(np.float32), axis=1)
  return Scored(
    log_probs=-draw.gamma(2.0, 1.5, tokens).astype(np.float32),
    entropy=draw.gamma(2.0, 1.0, tokens).astype(np.float32),
    top_ids=draw.integers(0, vocab_size, (tokens, topk)).astype(np.int32),
    top_log_probs=top,
    of_ids=-draw.gamma(2.0, 1.5, (tokens, ids)).astype(np.float32) if ids else None,
  )


def test_scores_of_1024_tokens_with_k_100_are_as_small_as_they_are_to_be():
  """1.5 MB as columns, 0.5 MB packed; rows, for people, are not counted."""
  rows = [scored(1024, 100, 151_936)]
  # The worst case: all ids have six digits.
  rows[0].top_ids[:] = 100_000 + rows[0].top_ids % 51_936
  columns = as_json({'rows': score_formats.as_columns(rows)})
  small = packed.pack(rows, 151_936)
  assert len(columns) <= 1.5e6
  assert len(small) <= 0.5e6


def test_whatever_was_kept_can_be_answered():
  said = as_json({'text': 'é\ud800', 'number': np.inf, 'whole': 'é'})
  assert json.loads(said) == {'text': 'é\ud800', 'number': None, 'whole': 'é'}
  assert as_json('é') == '"é"'.encode()


def test_columns_give_log_probs_to_half_a_unit():
  [row] = rows = [scored(7, 5, 264, ids=3)]
  [said] = json.loads(json.dumps(score_formats.as_columns(rows)))
  assert said['top_ids'] == row.top_ids.tolist()
  np.testing.assert_allclose(np.asarray(said['top_log_probs']) * score_formats.SCALE, row.top_log_probs, atol=5.1e-5)
  np.testing.assert_allclose(said['log_probs'], row.log_probs, atol=1e-6)
  np.testing.assert_allclose(said['of_ids'], row.of_ids, atol=1e-6)
  row.top_log_probs[0, 1] = -np.inf
  assert score_formats.as_columns(rows)[0]['top_log_probs'][0][1] is None


def test_rows_name_tokens_with_what_is_said_of_them():
  [row] = rows = [scored(2, 2, 264, ids=1)]
  row.top_ids[1, 1] = -1
  [said] = score_formats.as_rows(rows, [[5, 6]], [np.asarray([[7], [8]], np.int32)])
  assert [entry['token'] for entry in said['tokens']] == [5, 6]
  assert [len(entry['top']) for entry in said['tokens']] == [2, 1]
  assert [entry['ids'][0]['token'] for entry in said['tokens']] == [7, 8]


@settings(deadline=None, max_examples=40)
@given(
  st.lists(st.tuples(st.integers(0, 9), st.integers(0, 7), st.integers(0, 3)), max_size=4),
  st.integers(1, 300_000),
)
def test_packed_scores_come_back(sizes, vocab_size):
  rows = [scored(t, k, vocab_size, m, seed) for seed, (t, k, m) in enumerate(sizes)]
  for row in rows:
    row.top_ids[:, -1:] = -1
  back = packed.unpack(packed.pack(rows, vocab_size))
  assert len(back) == len(rows)
  for one, other in zip(rows, back, strict=True):
    np.testing.assert_array_equal(one.log_probs, other.log_probs)
    np.testing.assert_array_equal(one.entropy, other.entropy)
    np.testing.assert_array_equal(one.top_ids, other.top_ids)
    np.testing.assert_allclose(one.top_log_probs, other.top_log_probs, rtol=5e-4, atol=1e-6)
    np.testing.assert_array_equal(
      one.of_ids if one.of_ids is not None else [], other.of_ids if one.of_ids is not None else []
    )


def zip_of(*entries):
  content = io.BytesIO()
  with zipfile.ZipFile(content, 'w', zipfile.ZIP_DEFLATED) as archive:
    for name, body in entries:
      archive.writestr(name, body)
  return content.getvalue()


CONFIG, WEIGHTS = 'adapter_config.json', 'adapter_model.safetensors'


def test_an_adapter_travels_as_a_zip_also_in_a_folder():
  files = {CONFIG: b'{}', WEIGHTS: bytes(range(256))}
  assert archives.unzipped(archives.zipped(files)) == files
  assert archives.zipped(files) == archives.zipped(dict(reversed(files.items())))
  assert archives.unzipped(zip_of(('mine/', b''), (f'mine/{CONFIG}', b'{}'), (f'mine/{WEIGHTS}', b'x'))) == {
    CONFIG: b'{}',
    WEIGHTS: b'x',
  }


@pytest.mark.parametrize(
  'content, error, sentence',
  [
    (b'', InvalidRequest, 'not a readable zip'),
    (b'PK\x03\x04garbage', InvalidRequest, 'not a readable zip'),
    (zip_of((CONFIG, b'{}'), (WEIGHTS, b'x' * 1000))[:-30], InvalidRequest, 'not a readable zip'),
    (zip_of(('../' + CONFIG, b'{}')), InvalidRequest, None),
    (zip_of(('/etc/passwd', b'{}')), InvalidRequest, 'nothing else'),
    (zip_of((f'a/b/{CONFIG}', b'{}')), InvalidRequest, 'nothing else'),
    (zip_of((CONFIG, b'{}'), ('optimizer.pt', b'\x80')), InvalidRequest, 'nothing else'),
    (zip_of(('cartridge.json', b'{}'), (WEIGHTS, b'x')), InvalidRequest, 'nothing else'),
    (zip_of((CONFIG, b'{}'), (f'x/{CONFIG}', b'{}')), InvalidRequest, 'twice'),
    (zip_of(*[(f'{number}', b'') for number in range(17)]), InvalidRequest, '17 files'),
    (zip_of((WEIGHTS, b'\0' * 2**26)), TooLarge, 'far larger than the zip'),
  ],
)
def test_a_zip_that_is_no_adapter_is_refused_and_none_is_unpacked_without_end(content, error, sentence):
  if sentence is None:  # A folder above is a folder like any other: its name is never used.
    assert archives.unzipped(content) == {CONFIG: b'{}'}
    return
  with pytest.raises(error, match=sentence):
    archives.unzipped(content)


def test_errors_have_a_status_headers_and_the_shape_of_their_route():
  busy = error_responses.failure(Busy('Come later.', retry_after=0.3), '/v1/continual/score', 'id')
  assert busy.status == 429 and busy.headers == {'Retry-After': '1', 'retry-after-ms': '300'}
  for odd in (math.inf, 1e400, 1e9):  # As another server may have said.
    busy = error_responses.failure(Busy('Come later.', retry_after=odd), '/v1/continual/score', 'id')
    assert busy.headers == {'Retry-After': '3600', 'retry-after-ms': '3600000'}
  for error in (StorageFailed('/my disk/db cannot be read.'), Damaged('/my disk/adapters/ad-1/HEAD is missing.')):
    said = error_responses.public(error)
    assert 'disk' not in str(said) and 'disk' in said.log
  assert busy.body == {'error': {'code': 'busy', 'message': 'Come later.', 'retry_after_s': 3600.0}}
  conflict = error_responses.failure(VersionConflict('Not that.', current=7), '/v1/continual/adapters/x/feedback', 'id')
  assert conflict.status == 412 and conflict.headers == {'ETag': '"7"'}
  assert conflict.body['error']['current_version'] == 7
  openai = error_responses.failure(NotFound('None.', field='model'), '/v1/chat/completions', 'id')
  assert openai.body == {
    'error': {'message': 'None.', 'type': 'not_found_error', 'param': 'model', 'code': 'not_found'}
  }
  assert error_responses.failure(Unauthorized('Who?'), '/v1/models', 'id').headers == {'WWW-Authenticate': 'Bearer'}
  internal = error_responses.failure(error_responses.Internal('Oh.'), '/v1/models', 'abc')
  assert internal.status == 500 and internal.body['error']['request_id'] == 'abc'


def test_what_a_client_could_have_caused_is_known_and_nothing_else():
  assert error_responses.known(UserError('Set it.')).status == 400
  assert error_responses.known(KeyError('secret')) is None and error_responses.known(MemoryError()) is None


@pytest.mark.parametrize(
  'body, field, sentence',
  [
    ('{"name": "a", "colour": 1}', 'colour', 'There is no field colour'),
    ('{}', 'name', 'name: Field required'),
    ('{"name": 7}', 'name', 'valid string'),
    ('{"name": "a", "alpha": NaN}', None, ''),
    ('{"name": "a", "rank": true}', 'rank', 'valid integer'),
    ('[]', None, 'The body'),
    ('{', None, 'not JSON'),
    ('', None, 'not JSON'),
    ('[' * 100_000, None, 'not JSON'),
  ],
)
def test_a_wrong_body_is_named_by_its_field_and_never_quoted(body, field, sentence):
  with pytest.raises(ValueError) as caught:
    schemas.CreateAdapter.model_validate_json(body)
  said = error_responses.known(caught.value)
  assert said.status == 400 and sentence in str(said)
  if field is not None:
    assert said.field == field


def test_values_of_a_body_are_not_in_its_error():
  with pytest.raises(ValueError) as caught:
    schemas.FeedbackBody.model_validate_json('{"sample_id": 5, "feedback": ["a secret prompt"], "mode": "secret"}')
  said = str(error_responses.known(caught.value))
  assert 'secret' not in said and 'more errors' in said


def bodies(kind=schemas.RequestBody):
  """All kinds of bodies and of their parts, of all routes."""
  return [kind, *(each for own in kind.__subclasses__() for each in bodies(own))]


def test_few_of_many_wrong_entries_are_reported():
  """A body of 16 MB has room for 8 million: an error for each takes 7 GB, and half a minute of all threads."""
  assert app.make_app and len(bodies()) > 40
  for kind in bodies():
    for name in kind.model_fields:
      try:
        kind.model_validate_json(json.dumps({name: [{}] * 2000}))
      except pydantic.ValidationError as error:
        assert error.error_count() < 1000, (kind, name)


def test_a_feedback_is_about_one_completion_or_items():
  one = schemas.FeedbackBody(sample_id='s', feedback='Too long.')
  assert [item.sample_id for item in one.items] == ['s']
  several = schemas.FeedbackBody(items=[{'sample_id': 'a'}, {'sample_id': 'b', 'reward': 1.0}])
  assert [item.sample_id for item in several.items] == ['a', 'b']
  with pytest.raises(ValueError, match='feedback belongs in one of the items'):
    schemas.FeedbackBody(items=[{'sample_id': 'a'}], feedback='Too long.')


def test_an_event_is_lines_and_an_empty_one_a_comment():
  assert ServerSentEvent({'a': float('nan')}, 'draft', 7).encode() == b'id: 7\nevent: draft\ndata: {"a":null}\n\n'
  assert ServerSentEvent('[DONE]').encode() == b'data: [DONE]\n\n'
  assert ServerSentEvent('a\nb').encode() == b'data: a\ndata: b\n\n'
  assert ServerSentEvent().encode().startswith(b':')


def test_metrics_are_counted_by_route_and_the_workers_numbers_are_asked_for():
  ready = threading.Event()
  ready.set()
  worker = types.SimpleNamespace(ready=ready, failure=None, stats={'waiting': 3})
  teacher = types.SimpleNamespace(state={'breaker': 'open'}, counts={'failures': 3})
  store = types.SimpleNamespace(stats={'written_bytes': 7})
  allowances = types.SimpleNamespace(today=lambda: {('k1', 'sampled'): 3})
  service = types.SimpleNamespace(worker=worker, endpoint=teacher, store=store, allowances=allowances)
  metrics = Metrics(Lifetime(service))
  metrics.end('/v1/continual/adapters/{adapter}', 'GET', 200, 0.02, {'sampled': 12})
  metrics.end('/v1/score', 'POST', 429, 0.02, {'sampled': -2})
  metrics.feedback('committed')
  text = metrics.text().decode()
  assert 'sdpo_requests_total{method="GET",route="/v1/continual/adapters/{adapter}",status="200"} 1.0' in text
  assert 'sdpo_tokens_total{kind="sampled"} 12.0' in text
  assert 'sdpo_engine_waiting 3.0' in text and 'sdpo_store_written_bytes 7.0' in text and 'sdpo_ready 1.0' in text
  assert 'sdpo_teacher_open 1.0' in text and 'sdpo_teacher_failures_total 3.0' in text


def test_the_log_has_bodies_and_messages_of_errors_only_where_they_are_asked_for():
  for bodies in (False, True):
    stream = io.StringIO()
    log = Log(stream, bodies=bodies, clock=lambda: 1.0)
    log.write('request', bodies={'asked': b'a secret prompt', 'answered': b'a secret answer'}, status=200)
    try:
      raise ValueError('a secret value')
    except ValueError as error:
      log.error(error, 'abc')
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line['event'] for line in lines] == ['request', 'error'] and lines[1]['error'] == 'ValueError'
    assert ('secret' in stream.getvalue()) == bodies
    assert 'test_parts.py' in lines[1]['at'][0]


def test_a_log_that_nobody_reads_stops_nothing():
  stream = io.StringIO()
  stream.close()
  Log(stream).write('request')
