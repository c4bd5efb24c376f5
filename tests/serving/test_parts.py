"""The small parts of the service: names, turns, events, the text of drafts, and how far apart two versions are."""

import threading
import time
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from sdpo_jax.config import LoraConfig, ModelConfig
from sdpo_jax.models import huggingface, parameters
from sdpo_jax.models.adapters import lora
from sdpo_jax.rollout.fair_queue import SERVICE
from sdpo_jax.serving import differences, records, service_state
from sdpo_jax.serving.call import Call
from sdpo_jax.serving.capacity import Turns
from sdpo_jax.serving.errors import Deadline, InvalidRequest, NotFound
from sdpo_jax.serving.sample_requests import DraftText, finished_text
from sdpo_jax.serving.service_state import EventLog
from tests.letters import CONFIG


def test_an_address_means_a_version_and_a_name_its_newest():
  uri = records.lora_uri('adp1', 7)
  assert records.parse(uri) == records.Reference('adp1', 7, is_id=True)
  assert records.parse('greeter') == records.Reference('greeter', None, is_id=False)
  assert records.parse('greeter@12') == records.Reference('greeter', 12, is_id=False)


@given(st.text(max_size=40))
def test_anything_else_is_unknown(text):
  try:
    found = records.parse(text)
  except NotFound as error:
    assert len(str(error)) < 400
  else:
    assert '/' not in found.adapter and ':' not in found.adapter and '@' not in found.adapter


@pytest.mark.parametrize(
  'uri',
  ['http://host/a', 'file:///etc/passwd', 'sdpo://../x', 'sdpo://a/b@1', 'a@-1', 'a@1@2', '', '..', 'sdpo://', None],
)
def test_no_path_and_no_other_address_is_taken(uri):
  with pytest.raises(NotFound):
    records.parse(uri)


@pytest.mark.parametrize(
  'name', ['', 'a b', 'a/b', 'a@1', '-a', 'a' * 65, 'base', 'tiny', 7, 'ä', 'ad-0123456789abcdef', f'smp-{"0" * 24}']
)
def test_a_name_is_short_and_plain_and_not_the_models(name):
  with pytest.raises(InvalidRequest) as raised:
    records.check_name(name, 'tiny')
  assert raised.value.field == 'name'
  for name in ('my-adapter_2.0', 'ad-hoc', 'ad-cafe', 'ad-0123456789abcdeg'):
    records.check_name(name, 'tiny')


def test_turns_come_in_the_order_of_asking_and_nothing_is_kept():
  turns, order, threads, waiting = Turns(), [], [], [threading.Event() for _ in range(8)]

  def change(number):
    waiting[number].set()
    with turns.of('a', Call()):
      order.append(number)

  with turns.of('a', Call()):
    with turns.of('b', Call()):
      assert len(turns) == 2
    for number in range(8):
      threads.append(threading.Thread(target=change, args=(number,)))
      threads[-1].start()
      waiting[number].wait()
      while turns._wanted['a'] < number + 2 or len(turns._locks['a']._waiting.get(SERVICE, ())) <= number:  # noqa: SLF001
        pass
    with pytest.raises(Deadline), turns.of('a', Call(deadline=time.monotonic())):
      pass
  for thread in threads:
    thread.join()
  assert order == list(range(8)) and len(turns) == 0


def test_a_turn_ends_also_where_a_change_fails():
  turns = Turns()
  with pytest.raises(ValueError), turns.of('a', Call()):
    raise ValueError
  with turns.of('a', Call(deadline=time.monotonic() + 10)):
    assert len(turns) == 1
  assert len(turns) == 0


def test_events_can_be_read_on_from_any_of_them():
  log, heard = EventLog(clock=lambda: 100.0), []
  made = [log.add('a', 'queued', {'n': n}) for n in range(3)]
  log.add('b', 'queued', {})
  assert [event.details['n'] for event in log.wait('a', None, 0)] == [0, 1, 2]
  assert log.wait('a', made[1].id, 0) == made[2:]
  assert log.wait('a', made[2].id, 0.0) == []
  waiter = threading.Thread(target=lambda: heard.extend(log.wait('c', None, 60.0)))
  waiter.start()
  late = log.add('c', 'queued', {})
  waiter.join()
  assert heard[-1] == late
  later = EventLog(clock=lambda: 101.0)
  assert later.add('a', 'queued', {}).id > late.id
  times = iter([100.0, 102.0])  # A replica that was there before the one that had the adapter meanwhile.
  former = EventLog(clock=lambda: next(times))
  former.add('b', 'queued', {})
  assert former.add('a', 'queued', {}).id > later.wait('a', None, 0)[-1].id
  log.forget('a')
  assert log.wait('a', None, 0) == []


def test_events_are_bounded(monkeypatch):
  monkeypatch.setattr(service_state, '_ADAPTERS', 3)
  log = EventLog()
  for number in range(2 * service_state.KEPT_EVENTS):
    log.add('a', 'queued', {'n': number})
  assert len(log.wait('a', None, 0)) == service_state.KEPT_EVENTS
  for name in 'bcd':
    log.add(name, 'queued', {})
  assert log.wait('a', None, 0) == []
  assert len(log._events) == 3  # noqa: SLF001 (Nothing else tells what is kept.)


class Bytes:
  """A tokenizer of bytes; 256 is a special token."""

  def decode(self, tokens, skip_special_tokens=False, **_):
    parts = [bytes([t]) if t < 256 else b'' if skip_special_tokens else b'<|end|>' for t in tokens]
    return b''.join(parts).decode('utf-8', errors='replace')


@settings(max_examples=200)
@given(
  st.text(alphabet='ab€😀 né', max_size=12),
  st.lists(st.sampled_from(['ab', 'b€', '😀 ', 'n', 'aab']), max_size=2),
  st.lists(st.integers(0, 40), max_size=6),
)
def test_what_was_shown_of_a_draft_is_a_beginning_of_the_text(text, stop, looks):
  tokens = list(text.encode())
  cut = [at for at in (text.find(each) for each in stop) if at >= 0]
  if cut:  # The engine ends it with the token that completes a stop string.
    ends = [len(text[: text.find(each)].encode()) + len(each.encode()) for each in stop if each in text]
    tokens = tokens[: min(ends)]
  final = finished_text(Bytes(), tokens, stop)
  assert not any(each in final for each in stop)
  shown, whole = DraftText(Bytes(), stop), ''
  for look in sorted(looks):
    whole += shown.draft(tokens[: min(look, max(0, len(tokens) - 1))])
    assert final.startswith(whole) and whole == shown.shown
  assert whole + shown.finish(final) == final


def test_a_stop_string_may_hold_a_special_token():
  tokens = [*b'good', 256]
  assert finished_text(Bytes(), tokens, ['d<|end|>']) == 'goo'
  assert finished_text(Bytes(), tokens, ['<|end|>']) == 'good'
  assert finished_text(Bytes(), tokens, []) == 'good'


def test_the_change_of_a_matrix_is_that_of_the_product_of_its_factors():
  policy = huggingface.describe(CONFIG, ModelConfig(dtype='float32', lora=LoraConfig(rank=2, alpha=4.0)))
  table, draw = parameters.trainable(policy.parameter_table()), np.random.default_rng(0)
  before = {row.name: np.float32(draw.standard_normal(row.shape)) for row in table}
  after = {
    name: value + np.float32(1e-3) * np.float32(draw.standard_normal(value.shape)) for name, value in before.items()
  }
  base = policy.base_policy().parameter_table()
  found = {each.matrix: each for each in differences.changes(policy.adapter, base, before, after)}
  for row in lora.linear(base):
    outputs, inputs = row.huggingface_shape
    for layer in range(row.layers):
      old, new = (
        2.0
        * arrays[f'{row.name}_lora_a'][layer].reshape(inputs, 2).astype(np.float64)
        @ arrays[f'{row.name}_lora_b'][layer].reshape(2, outputs)
        for arrays in (before, after)
      )
      one = found.pop(lora.module_name(row, layer))
      np.testing.assert_allclose(
        [one.before, one.after, one.change], list(map(np.linalg.norm, (old, new, new - old))), rtol=1e-6
      )
      assert one.relative == one.change / one.before
  assert not found
  same = differences.changes(policy.adapter, base, before, before)
  assert {each.change for each in same} == {0.0} == {differences.total(same).change}
  zero = {name: 0 * value for name, value in before.items()}
  assert differences.changes(policy.adapter, base, zero, before)[0].relative is None


def test_the_total_is_as_of_one_matrix():
  parts = [SimpleNamespace(before=3.0, after=1.0, change=0.0), SimpleNamespace(before=4.0, after=0.0, change=2.0)]
  assert differences.total(parts) == differences.MatrixChange('all', 5.0, 1.0, 2.0)
