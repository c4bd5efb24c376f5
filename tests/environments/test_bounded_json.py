"""JSON of a stranger: what Python reads, and nothing that takes long to read."""

import json

import hypothesis
from hypothesis import strategies as st
import pytest

from sdpo_jax.environments import json_server

SIZE = 2**20  # Bytes, as the largest answer of a server.
VALUES = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text('[],{}:"\\\\ a\x00é四'),
  lambda inner: st.lists(inner) | st.dictionaries(st.text('[],{}"\\\\a'), inner),
)


def count(value):
  inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
  return 1 + sum(map(count, inner))


@hypothesis.settings(max_examples=50)
@hypothesis.given(VALUES, st.booleans())
def test_values_are_read_as_by_python_and_their_number_is_never_too_small(value, ascii_only):
  text, values = json.dumps(value, ensure_ascii=ascii_only).encode(), count(value)
  assert json_server.bounded_loads(text) == json_server.bounded_loads(text, 2 * values) == value
  with pytest.raises(json_server.Fault):
    json_server.bounded_loads(text, values - 1)


def test_values_are_bounded_and_text_is_not():
  most = json_server.MAX_VALUES - 1  # Beside the list.
  assert json_server.bounded_loads(json.dumps([0] * most).encode()) == [0] * most
  with pytest.raises(json_server.Fault, match='more than 10000 values'):
    json_server.bounded_loads(json.dumps([0] * (most + 1)).encode())
  text = ',[{"\\' * (SIZE // 8)
  assert json_server.bounded_loads(json.dumps([text]).encode()) == [text]


def test_a_byte_order_mark_is_none_of_it():
  assert json_server.bounded_loads(b'\xef\xbb\xbf[1]') == [1]


HOSTILE = {
  'lists': b'[' + b'[],' * (SIZE // 3),
  'lists in an object': b'{"score": 1, "x": [' + b'[],' * (SIZE // 3) + b'1]}',
  'strings': b'[' + b'"",' * (SIZE // 3),
  'keys': b'{' + b','.join(b'"%x":1' % index for index in range(SIZE // 9)) + b'}',
  'brackets': b'[' * SIZE,
}


@pytest.mark.parametrize('data', HOSTILE.values(), ids=HOSTILE)
def test_what_would_take_long_is_not_parsed(monkeypatch, data):
  monkeypatch.setattr(json_server.json, 'loads', lambda text: pytest.fail('it is parsed'))
  with pytest.raises(json_server.Fault):
    json_server.bounded_loads(data)


@pytest.mark.parametrize(
  'data', [b'"' * SIZE, b'"' + b'\\"' * SIZE, b'"' + b'\\' * (2 * SIZE + 1), b',' + b'\\"' * SIZE]
)
def test_strings_are_found_in_time_that_is_linear(data):
  """Hours, if what follows each of a million quotes was looked at again."""
  with pytest.raises(json_server.Fault):
    json_server.bounded_loads(b',' * json_server.MAX_VALUES + data)


def test_a_caller_may_expect_more_values():
  values = [0] * json_server.MAX_VALUES
  assert json_server.bounded_loads(json.dumps(values).encode(), len(values) + 1) == values
  with pytest.raises(json_server.Fault, match='more than 10000 values'):
    json_server.bounded_loads(json.dumps(values).encode(), len(values))
