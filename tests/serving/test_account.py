"""All that an owner can do, on a real engine and a real store; what is another's is not there, whatever is asked."""

import collections
import concurrent.futures
import contextlib
import inspect
import json
import threading
import time

from huggingface_hub import ModelCard
import numpy as np
import pytest
import torch
import transformers

from sdpo_jax.config.serve import LearningConfig
from sdpo_jax.errors import UserError
from sdpo_jax.learning.requests import Lesson
from sdpo_jax.serving import feedback
from sdpo_jax.serving.account import Account
from sdpo_jax.serving.call import Call
from sdpo_jax.serving.capacity import FairSemaphore
from sdpo_jax.serving.errors import (
  Cancelled,
  Deadline,
  Forbidden,
  InvalidRequest,
  NameTaken,
  NotFound,
  ServiceError,
  VersionConflict,
)
from sdpo_jax.serving.feedback import FeedbackEntry
from sdpo_jax.serving.feedback_request import Item, choose_teacher, make_request
from sdpo_jax.serving.records import in_effect, lora_uri
from sdpo_jax.serving.sample_requests import SampleDone, SampleDraft, SampleOptions
from sdpo_jax.serving.store.store import Retention
from sdpo_jax.teacher.dialects import EndpointScores as Taught
from tests.serving.service_world import HELLO, make_config, model_folder, running, sample

ROW = ([72, 105, 33], [5, 6, 7, 8])


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  return model_folder(tmp_path_factory.mktemp('world') / 'model')


@pytest.fixture(scope='module')
def service(model, tmp_path_factory):
  with running(make_config(model, tmp_path_factory.mktemp('store'))) as running_service:
    yield running_service


@pytest.fixture
def ada(service, request):
  """Return an owner without adapters."""
  return Account(service, f'ada of {request.node.name}')


def moved(arrays, seed=0):
  """Arrays of a version that has learned something."""
  draw = np.random.default_rng(seed)
  return {
    name: np.asarray(value + 1, np.int32)
    if name == 'count'
    else np.float32(np.abs(value + 0.1 * draw.standard_normal(value.shape)))
    for name, value in arrays.items()
  }


def learn(account, id, seed=0):
  """Make the next version of an adapter."""
  store, adapter = account.service.store, account.adapter(id)
  arrays = moved(store.arrays(account.version(id)), seed)
  return store.commit(account.owner, id, adapter.head, arrays, reason='import', details={'metrics': {'loss': seed}})


def same(one, other):
  return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def logits(account, model):
  [found] = account.score(account.resolve(model), [ROW], topk=8)
  return found.log_probs.tolist(), found.top_log_probs.tolist()


def test_an_adapter_begins_as_the_model_and_is_found_by_name_id_and_address(ada):
  adapter, version = ada.create(
    'greeter', {'teacher': 'ema', 'canary_prompts': ['Hi', HELLO]}, base_model='tiny', rank=2
  )
  assert (version.number, version.reason, adapter.settings['teacher']) == (0, 'create', {'kind': 'ema'})
  assert ada.adapters() == [adapter] == [ada.adapter(adapter.id)] and ada.versions(adapter.id) == [version]
  names = ['greeter', adapter.id, 'greeter@0', f'{adapter.id}@0', lora_uri(adapter.id, 0)]
  assert {ada.resolve(name).engine_name for name in names} == {f'{adapter.id}@0'}
  assert ada.resolve('base') == ada.resolve('tiny') and ada.resolve('base').engine_name == ''
  np.testing.assert_allclose(logits(ada, 'greeter')[0], logits(ada, 'base')[0], atol=1e-6)


@pytest.mark.parametrize(
  'arguments, field, why',
  [
    ({'rank': 4}, 'rank', 'rank 2 and lora_alpha 4'),
    ({'alpha': 16}, 'alpha', 'rank 2 and lora_alpha 4'),
    ({'base_model': 'llama'}, 'base_model', 'send tiny'),
    ({'name': 'a/b'}, 'name', 'letters'),
    ({'name': 'tiny'}, 'name', 'another name'),
    ({'settings': {'teachers': 1}}, 'settings.teachers', 'canary_prompts'),
    ({'settings': {'teacher': 'nobody'}}, 'teacher.kind', 'ema'),
    ({'settings': {'teacher': 3}}, 'teacher', 'kind'),
    ({'settings': {'guards': {'max_kl': 1}}}, 'guards.max_kl', 'max_kl_to_base'),
    ({'settings': {'guards': 1}}, 'guards', 'limits'),
    ({'settings': {'canary_prompts': 'Hi'}}, 'canary_prompts', 'list'),
    ({'settings': {'canary_prompts': ['Hi'] * 17}}, 'canary_prompts', '16'),
    ({'settings': {'canary_prompts': ['Hi', 'a' * 100]}}, 'canary_prompts[1]', 'shorten'),
    ({'settings': {'canary_prompts': [7]}}, 'canary_prompts[0]', 'messages'),
  ],
)
def test_what_cannot_be_made_is_refused_by_its_field(ada, arguments, field, why):
  with pytest.raises(InvalidRequest, match=why) as raised:
    ada.create(**{'name': 'a', **arguments})
  assert raised.value.field == field and ada.adapters() == []


def test_names_are_an_owners_own(ada, service):
  ada.create('same')
  with pytest.raises(NameTaken, match='already') as raised:
    ada.create('same')
  assert raised.value.status == 409
  other, _ = Account(service, 'somebody').create('same')
  assert Account(service, 'somebody').resolve('same').adapter == other


def test_no_owner_has_more_adapters_than_are_allowed(ada, service, monkeypatch):
  monkeypatch.setattr(service.settings.limits, 'max_adapters_per_owner', 2)
  first, _ = ada.create('a')
  ada.fork(first.id, None, 'b')
  with pytest.raises(Forbidden, match='2 adapters'):
    ada.create('c')
  ada.delete(first.id, None)
  ada.create('c')


def test_samples_are_kept_with_what_feedback_needs(ada):
  adapter, _ = ada.create('a')
  learn(ada, adapter.id)
  found = sample(ada, 'a', seed=3, n=3)
  assert found == sample(ada, 'a', seed=3, n=3) or [f.tokens for f in found] == [
    f.tokens for f in sample(ada, 'a', seed=3, n=3)
  ]
  for one in found:
    kept = ada.service.store.sample(ada.owner, one.id)
    assert (kept.adapter, kept.version, kept.messages) == (adapter.id, 1, HELLO)
    assert kept.prompt_tokens == ada.service.prompt_of(messages=HELLO) and list(kept.tokens) == list(one.tokens)
    assert kept.expires - kept.created == ada.service.settings.store.sample_ttl_s
    [scored] = ada.score(ada.resolve('a@1'), [(kept.prompt_tokens, kept.tokens)])
    np.testing.assert_allclose(scored.log_probs, kept.log_probs, atol=1e-5)
  [of_base] = sample(ada, 'base')
  assert (of_base.adapter, of_base.version) == (None, None)


def test_drafts_put_together_are_the_text(ada):
  prompt, whole, seen = ada.service.prompt_of(text='abc'), {}, 0
  sampling = ada.sample(ada.resolve('base'), prompt, n=3, options=SampleOptions(seed=1), drafts=True)
  for event in sampling:
    whole[event.index] = whole.get(event.index, '') + event.delta
    seen += isinstance(event, SampleDraft)
    if isinstance(event, SampleDone):
      assert whole[event.index] == event.sample.text and len(event.sample.tokens) <= 8
  assert sorted(whole) == [0, 1, 2] and seen


def test_a_stop_string_ends_a_completion_and_is_not_in_its_text(ada):
  [free] = sample(ada, 'base', temperature=0.0)
  text = ada.service.tokenizer.decode(list(free.tokens))
  stop = text[2:4]
  [stopped] = sample(ada, 'base', temperature=0.0, stop=[stop])
  assert stopped.finish_reason == 'stop' and stopped.text == text[: text.find(stop)]
  [free] = sample(ada, 'base', temperature=0.0, max_tokens=2)
  assert free.finish_reason == 'length' and len(free.tokens) == 2
  [ended] = sample(ada, 'base', temperature=0.0, stop_token_ids=[int(free.tokens[1])])
  first = list(free.tokens).index(free.tokens[1])
  assert ended.finish_reason == 'stop' and list(ended.tokens) == list(free.tokens)[: first + 1]


def test_what_a_request_may_spend_is_asked_for_before_and_given_back(service):
  spent = []
  account = Account(service, 'spender', Call(spend=lambda kind, tokens: spent.append((kind, tokens))))
  found = sample(account, 'base', n=2)
  assert spent == [('sampled', 16)]
  account.call.closing.close()
  assert sum(tokens for _, tokens in spent) == sum(len(one.tokens) for one in found)
  account.score(account.resolve('base'), [ROW])
  assert spent[-1] == ('scored', 7)


@pytest.mark.parametrize('end', ['left', 'late', 'never begun'])
def test_what_was_not_drawn_of_a_request_that_failed_is_given_back(service, end):
  """What was drawn until then is paid for."""
  spent = collections.Counter()
  call = Call(0.0 if end == 'never begun' else None, lambda kind, tokens: spent.update({kind: tokens}))
  account = Account(service, 'spender', call)
  prompt = service.prompt_of(messages=HELLO)
  sampling = account.sample(
    account.resolve('base'), prompt, n=20, options=SampleOptions(seed=1), drafts=True, messages=HELLO
  )
  assert spent['sampled'] == 160
  if end == 'never begun':
    account.call.closing.close()
    assert spent['sampled'] == 0
    return
  next(events := iter(sampling))
  call.end(Deadline('late') if end == 'late' else None)
  with pytest.raises(ServiceError):
    collections.deque(events, maxlen=0)
  call.closing.close()
  assert 0 < spent['sampled'] < 160
  with pytest.raises(Deadline):
    Account(service, 'spender', Call(0.0, call.spend)).score(account.resolve('base'), [ROW])
  assert spent['scored'] == 0


def test_a_request_that_has_ended_changes_nothing_and_gets_nothing(service, ada):
  adapter, _ = ada.create('a')
  late = Account(service, ada.owner, Call(deadline=0.0))
  with pytest.raises(Deadline):
    late.undo(adapter.id, 0, 0)
  with pytest.raises(Deadline):
    late.score(late.resolve('a'), [ROW])
  with pytest.raises(Deadline):
    sample(late, 'a')
  call = Call()
  left = Account(service, ada.owner, call)
  call.end()
  with pytest.raises(Cancelled):
    left.change(adapter.id, 0, {'teacher': 'base'})
  with pytest.raises(Cancelled):
    sample(left, 'a')
  assert ada.adapter(adapter.id) == adapter and len(service.turns) == 0


def test_scores_of_the_tokens_that_are_asked_for(ada):
  ids = np.tile(np.arange(5, dtype=np.int32), (4, 1))
  [found] = ada.score(ada.resolve('base'), [ROW], topk=3, ids=[ids])
  assert found.top_ids.shape == (4, 3) and found.of_ids.shape == (4, 5)
  [long] = ada.score(ada.resolve('base'), [([1], [2] * (ada.service.max_text - 1))])
  assert len(long.log_probs) == ada.service.max_text - 1
  assert ada.score(ada.resolve('base'), []) == []
  for rows, asked in (([([], [1])], None), ([([1], [])], None), ([([1], [999])], None), ([ROW], [ids[:2]])):
    with pytest.raises(InvalidRequest):
      ada.score(ada.resolve('base'), rows, ids=asked)
  with pytest.raises(ServiceError, match='topk'):
    ada.score(ada.resolve('base'), [ROW], topk=101)


def test_undo_brings_all_of_an_older_version_back_as_a_new_one(ada):
  adapter, first = ada.create('a')
  second, third = learn(ada, adapter.id, 1), learn(ada, adapter.id, 2)
  before = logits(ada, 'a@1')
  version = ada.undo(adapter.id, 2, 1)
  assert (version.number, version.reason, version.parent, version.details['to']) == (3, 'undo', 1, 1)
  store = ada.service.store
  assert same(store.arrays(version), store.arrays(second)) and not same(store.arrays(version), store.arrays(third))
  assert logits(ada, 'a') == before == logits(ada, 'a@3')
  assert [each.number for each in ada.versions(adapter.id)] == [0, 1, 2, 3]
  with pytest.raises(NotFound, match='version 9'):
    ada.undo(adapter.id, 3, 9)
  assert first.number == 0


def test_undo_after_undo_walks_back(ada):
  adapter, _ = ada.create('a')
  learned = [learn(ada, adapter.id, seed) for seed in (1, 2, 3)]
  assert [ada.undo(adapter.id, None).details['to'] for _ in learned] == [2, 1, 0]
  with pytest.raises(InvalidRequest, match='Version 0 is the first one: there is nothing to undo'):
    ada.undo(adapter.id, None)
  learn(ada, adapter.id, 4)  # Version 7, of version 6, which equals version 0.
  assert [version.number for version in in_effect(ada.versions(adapter.id))] == [7, 0]
  assert ada.undo(adapter.id, None).details['to'] == 0
  ada.undo(adapter.id, None, 3)  # Forward again.
  assert [version.number for version in in_effect(ada.versions(adapter.id))] == [3, 2, 1, 0]
  assert ada.undo(adapter.id, None).details['to'] == 2


@pytest.mark.parametrize('what', ['fork', 'diff', 'undo', 'export', 'import'])
def test_what_reads_versions_takes_turns_with_other_keys(ada, service, monkeypatch, what):
  adapter, _ = ada.create('a')
  learn(ada, adapter.id)
  files = ada.export_files(adapter.id)
  monkeypatch.setattr(service, 'reading', FairSemaphore(1))
  impatient = Account(service, ada.owner, Call(time.monotonic() + 0.1))
  ask = {
    'fork': lambda: impatient.fork(adapter.id, None, 'b'),
    'diff': lambda: impatient.diff(adapter.id, 0, 1),
    'undo': lambda: impatient.undo(adapter.id, None),
    'export': lambda: impatient.export_files(adapter.id),
    'import': lambda: impatient.import_files('c', files),
  }[what]
  with service.reading.of(Call()), pytest.raises(Deadline, match='took all the time'):
    ask()
  impatient.call.deadline = None
  ask()


def test_an_idle_adapter_goes_on_from_what_is_kept(ada, monkeypatch):
  """Its newest version restores one that was removed, as was the one that would teach."""
  adapter, _ = ada.create('a', {'teacher': {'kind': 'lagged', 'every': 2}})
  for seed in range(3):
    learn(ada, adapter.id, seed)
  undone = ada.undo(adapter.id, None, 2)
  monkeypatch.setattr(ada.service.store, 'retention', Retention(idle_s=-1e9))
  assert ada.service.store.retain().versions >= 3
  assert ada.versions(adapter.id)[1:] == [undone] == in_effect(ada.versions(adapter.id))
  with pytest.raises(
    InvalidRequest, match='Version 2, before 4, is not stored any more .serve.store.keep_versions, idle'
  ):
    ada.undo(adapter.id, None)
  learn(ada, adapter.id, 3)
  assert [version.number for version in in_effect(ada.versions(adapter.id))] == [5, 4]
  chosen = [
    choose_teacher(ada.adapter(adapter.id), asked, LearningConfig(), ada.service.store.kept_from(ada.owner, adapter.id))
    for asked in (None, {'kind': 'lagged', 'every': 5}, {'kind': 'lagged', 'version': 3})
  ]
  assert [each.version for each in chosen] == [4, 0, 3]


def test_a_fork_begins_as_the_version_and_goes_its_own_way(ada):
  adapter, _ = ada.create('a', {'guards': {'min_entropy': None}})
  learn(ada, adapter.id)
  fork, version = ada.fork(adapter.id, 1, 'b')
  store = ada.service.store
  assert (version.number, version.reason, version.details['from']) == (0, 'fork', lora_uri(adapter.id, 1))
  assert fork.settings == adapter.settings and same(store.arrays(version), store.arrays(ada.version(adapter.id, 1)))
  learn(ada, fork.id, 3)
  assert ada.adapter(adapter.id).head == 1 == ada.adapter(fork.id).head and logits(ada, 'a') != logits(ada, 'b')
  ada.delete(adapter.id, None)
  assert logits(ada, 'b@0') != logits(ada, 'b')


def test_settings_change_without_a_new_version(ada):
  adapter, _ = ada.create('a', {'teacher': 'live', 'guards': {'min_entropy': 0.1}})
  changed = ada.change(adapter.id, 0, {'teacher': {'kind': 'lagged', 'every': 3}})
  assert changed.settings == {'teacher': {'kind': 'lagged', 'every': 3}, 'guards': {'min_entropy': 0.1}}
  assert ada.change(adapter.id, None, {'guards': None}).settings == {'teacher': {'kind': 'lagged', 'every': 3}}
  with pytest.raises(VersionConflict) as raised:
    ada.change(adapter.id, 4, {})
  assert raised.value.current == 0 == ada.adapter(adapter.id).head


def test_of_many_changes_that_expect_the_same_version_one_is_made(ada):
  adapter, _ = ada.create('a')

  def change(_):
    try:
      return ada.undo(adapter.id, 0, 0).number
    except VersionConflict as error:
      return error

  with concurrent.futures.ThreadPoolExecutor(8) as threads:
    found = list(threads.map(change, range(8)))
  assert found.count(1) == 1
  assert {each.current for each in found if each != 1} == {1} and ada.adapter(adapter.id).head == 1


def test_a_diff_says_what_moved_and_what_was_known_in_between(ada):
  adapter, _ = ada.create('a')
  learn(ada, adapter.id, 1)
  learn(ada, adapter.id, 2)
  diff = ada.diff(adapter.id, 0, 2)
  assert [each['number'] for each in diff['versions']] == [1, 2]
  assert diff['versions'][1]['details']['metrics'] == {'loss': 2}
  assert diff['total']['before'] == 0.0 and diff['total']['relative'] is None and diff['total']['change'] > 0
  assert diff['largest'][0]['change'] == max(each['change'] for each in diff['matrices']) and len(diff['largest']) == 10
  assert len(diff['matrices']) == 14 and 'model.layers.1.mlp.down_proj' in {each['matrix'] for each in diff['matrices']}
  back = ada.diff(adapter.id, 2, 0)
  np.testing.assert_allclose(back['total']['change'], diff['total']['change'])
  assert back['total']['after'] == 0 and ada.diff(adapter.id, 1, 1)['total']['change'] == 0
  json.dumps(diff, allow_nan=False)


def test_an_export_is_what_peft_computes_with_and_an_import_brings_it_back(ada, model, tmp_path):
  import peft  # Takes three seconds.

  adapter, _ = ada.create('a')
  learn(ada, adapter.id)
  files = ada.export_files(adapter.id)
  card = ModelCard(files['README.md'].decode())
  assert card.data.get('library_name') == 'peft' and '`a`' in card.text and 'version 1 of an adapter' in card.text
  assert str(model) not in card.content and card.text.count('\n## ') == 3
  for name, content in files.items():
    (tmp_path / name).write_bytes(content)
  theirs = peft.PeftModel.from_pretrained(
    transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), tmp_path
  ).eval()
  prompt, tokens = ROW
  with torch.no_grad():
    said = torch.log_softmax(theirs(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1], -1).numpy()
  every = np.tile(np.arange(264, dtype=np.int32), (4, 1))
  [ours] = ada.score(ada.resolve('a'), [ROW], ids=[every])
  np.testing.assert_allclose(ours.of_ids, said, atol=1e-4)
  assert np.abs(said - ada.score(ada.resolve('base'), [ROW], ids=[every])[0].of_ids).max() > 0.01
  made, version = ada.import_files('b', files)
  assert version.reason == 'import' and logits(ada, 'b') == logits(ada, 'a')
  arrays = ada.service.store.arrays(version)
  assert all(name.startswith('factors/') for name in arrays)
  assert not ada.service.store.optimizer_state(version).arrays
  assert ada.export_files(made.id, 0)['adapter_model.safetensors'] == files['adapter_model.safetensors']
  with pytest.raises(InvalidRequest, match='letters'):
    ada.import_files('../b', files)


def test_what_is_deleted_is_gone_everywhere(ada):
  adapter, _ = ada.create('a')
  learn(ada, adapter.id)
  [drawn] = sample(ada, 'a')
  logits(ada, 'a@0')
  with pytest.raises(VersionConflict):
    ada.delete(adapter.id, 0)
  ada.delete(adapter.id, 1)
  for ask in (
    lambda: ada.adapter(adapter.id),
    lambda: ada.resolve('a'),
    lambda: ada.service.store.sample(ada.owner, drawn.id),
    lambda: ada.service.load(f'{adapter.id}@1'),
  ):
    with pytest.raises(NotFound):
      ask()
  for number in (0, 1):  # The engine has none of them either.
    with pytest.raises(NotFound):
      ada.service.worker.arrays(f'{adapter.id}@{number}')
  assert ada.adapters() == []
  assert ada.create('a')[0].id != adapter.id


def test_events_tell_what_happened_and_go_on_from_the_last_one(ada):
  adapter, _ = ada.create('a')
  [made] = ada.service.events.wait(adapter.id, None, 0)
  stream = ada.events(adapter.id, after=made.id, timeout=0.0)
  assert next(stream) is None
  ada.undo(adapter.id, 0, 0)
  event = next(stream)
  assert (event.kind, dict(event.details)) == ('committed', {'version': 1, 'reason': 'undo'})


def test_feedback_makes_one_version_whoever_else_asks_and_says_what_it_does(ada):
  adapter, _ = ada.create('a')
  [drawn] = sample(ada, 'a')
  other, _ = ada.create('b')
  before = logits(ada, 'a'), logits(ada, 'b')
  request = make_request([Item(sample_id=drawn.id, feedback='Say more.')], {}, ada.service.settings)

  def ask(_):
    try:
      return feedback.learn(ada, adapter.id, 0, request).said
    except VersionConflict as error:
      return error.current

  with concurrent.futures.ThreadPoolExecutor(4) as threads:
    found = list(threads.map(ask, range(4)))
  [answer] = [each for each in found if each != 1]
  assert (answer['version_before'], answer['version_after'], answer['accepted']) == (0, 1, True)
  kinds = [event.kind for event in ada.service.events.wait(adapter.id, None, 0)]
  assert kinds == ['committed', 'queued', 'scored', 'stepped', 'guarded', 'committed']
  assert logits(ada, 'a') != before[0] == logits(ada, 'a@0') and logits(ada, 'b') == before[1]
  [first, refused] = feedback.run_batch(ada, [FeedbackEntry(other.id, request), FeedbackEntry('nobody', request)])
  assert isinstance(first, InvalidRequest) and isinstance(refused, NotFound)  # The sample is another adapter's.
  assert len(ada.service.turns) == 0


class Elsewhere:
  """A teacher that says of every token what the model without an adapter says."""

  def __init__(self, account):
    self.account, self.asked = account, []

  def score(self, asked, stop):
    stop.check()
    self.asked += asked
    rows = [(list(each.prompt), list(each.completion)) for each in asked]
    found = self.account.score(self.account.resolve('base'), rows, topk=8)
    return [Taught(each.top_ids, each.top_log_probs, each.log_probs) for each in found]


def test_a_teacher_behind_an_endpoint_is_asked_and_learned_from(ada, monkeypatch):
  adapter, _ = ada.create('a', {'teacher': 'endpoint'})
  [drawn] = sample(ada, 'a')
  request = make_request([Item(sample_id=drawn.id, feedback='Say more.')], {}, ada.service.settings)
  with pytest.raises(InvalidRequest, match='no teacher behind an endpoint'):
    feedback.learn(ada, adapter.id, None, request)
  assert 'endpoint' not in ada.service.capabilities()['teachers']
  monkeypatch.setattr(ada.service, 'endpoint', Elsewhere(ada))
  answer = feedback.learn(ada, adapter.id, None, request).said
  [asked] = ada.service.endpoint.asked
  assert answer['accepted'] and answer['version_after'] == 1 and list(asked.completion) == list(drawn.tokens)
  assert (
    'Say more.' in ada.service.tokenizer.decode(list(asked.prompt))
    and 'endpoint' in ada.service.capabilities()['teachers']
  )
  with pytest.raises(UserError, match='must hold token ids from'):
    ada.service.ask_endpoint([Lesson([1], [10**6], [3])], Call())
  assert ada.service.endpoint.asked == [asked]  # Nobody pays for the scores of what cannot be learned.
  call = Call()
  call.end()
  with pytest.raises(Cancelled):
    ada.service.ask_endpoint([Lesson([1], [2], [3])], call)


def test_nobody_waits_for_the_teacher_of_another(ada, monkeypatch):
  adapter, _ = ada.create('a', {'teacher': 'endpoint'})
  entered, leave = threading.Event(), threading.Event()

  class Slow(Elsewhere):
    def score(self, asked, stop):
      entered.set()
      assert leave.wait(60)
      return super().score(asked, stop)

  monkeypatch.setattr(ada.service, 'endpoint', Slow(ada))
  [drawn] = sample(ada, 'a')
  request = make_request([Item(sample_id=drawn.id, feedback='Say more.')], {}, ada.service.settings)
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    learning = pool.submit(feedback.learn, ada, adapter.id, None, request)
    try:
      assert entered.wait(60)
      bob = Account(ada.service, 'bob')
      other, _ = bob.create('b')
      [own] = sample(bob, 'b')
      quick = make_request([Item(sample_id=own.id, feedback='No.')], {}, ada.service.settings)
      assert feedback.learn(bob, other.id, None, quick).said['version_after'] == 1
      assert sample(ada, 'a') and not learning.done()
    finally:
      leave.set()
    assert learning.result(60).said['version_after'] == 1


def test_what_is_drawn_while_its_adapter_is_deleted_is_not_kept(ada):
  adapter, _ = ada.create('a')
  sampling = iter(ada.sample(ada.resolve('a'), [5, 6], n=2))
  kept = [next(sampling).sample]
  ada.delete(adapter.id, None)
  with pytest.raises(NotFound):
    kept += [event.sample for event in sampling]
  for one in kept:
    with pytest.raises(NotFound):
      ada.service.store.sample(ada.owner, one.id)


def methods_of_an_adapter():
  """Every public method of an account that takes the id of one."""
  for name, method in inspect.getmembers(Account, inspect.isfunction):
    if not name.startswith('_') and 'id' in inspect.signature(method).parameters:
      yield name


ARGUMENTS = {  # Beside the id.
  'adapter': (),
  'change': (None, {}),
  'fork': (None, 'x'),
  'delete': (None,),
  'versions': (),
  'version': (0,),
  'diff': (0, 0),
  'undo': (None, 0),
  'export_files': (),
  'push': (None, {}),
  'turn': (None,),
  'events': (),
}


@pytest.mark.parametrize('name', [*methods_of_an_adapter(), 'sample', 'feedback'])
def test_what_is_anothers_is_not_there(service, name):
  """By every way to it; a method that is new must be added to ARGUMENTS."""
  eve, ada = Account(service, 'eve'), Account(service, 'ada')
  foreign = {adapter.name: adapter for adapter in ada.adapters()}.get('mine') or ada.create('mine')[0]
  [drawn] = sample(ada, 'mine')
  known = drawn.id if name == 'sample' else foreign.id

  def ask(account, id):
    if name == 'sample':
      return account.service.store.sample(account.owner, id)
    if name == 'feedback':
      return feedback.learn(account, id, None, None)
    return getattr(account, name)(id, *ARGUMENTS[name])

  head = ada.adapter(foreign.id)
  said = set()
  for id in (known, known[:-4] + '0000', 'x', '../..', '', 'ad-\ud800', known.upper()):
    with pytest.raises(NotFound) as raised:
      found = ask(eve, id)
      with found if name == 'turn' else contextlib.nullcontext():  # A block does nothing before it is entered.
        pass
    said.add(str(raised.value).replace(repr(id), 'ID'))
  assert len(said) == 1 and ada.adapter(foreign.id) == head and eve.adapters() == []
  assert ask(ada, known) if name in ('adapter', 'versions', 'sample') else True


@pytest.mark.parametrize('form', ['{}', '{}@0', 'sdpo://{}@0', 'sdpo://{}', '{}@7'])
def test_a_foreign_model_is_as_unknown_as_one_that_there_is_not(service, form):
  eve, ada = Account(service, 'eve'), Account(service, 'ada')
  foreign = {adapter.name: adapter for adapter in ada.adapters()}.get('mine') or ada.create('mine')[0]
  said = set()
  for id in (foreign.id, foreign.id[:-4] + '0000', 'mine', 'yours'):
    with pytest.raises(NotFound) as raised:
      eve.resolve(form.format(id))
    said.add(str(raised.value).replace(repr(form.format(id)), 'MODEL'))
  assert len(said) == 1


def test_versions_are_there_after_a_restart_and_read_when_they_are_used(model, tmp_path):
  config = make_config(model, tmp_path / 'root')
  with running(config) as service:
    ada = Account(service, 'ada')
    adapter, _ = ada.create('a')
    learn(ada, adapter.id)
    before, [drawn] = logits(ada, 'a'), sample(ada, 'a')
  with running(config) as service:
    again = Account(service, 'ada')
    assert again.adapter(adapter.id).head == 1 and service.worker.stats.get('loads', 0) == 0
    assert logits(again, 'a') == before and service.worker.stats['loads'] == 1
    assert service.store.sample(again.owner, drawn.id).text == drawn.text


@pytest.mark.slow
def test_a_service_on_a_mesh_does_what_one_on_a_device_does(service, model, tmp_path):
  config = make_config(model, tmp_path / 'root')
  config.serve.rows = config.serve.training_rows = 8
  config.serve.programs = str(tmp_path / 'programs')
  alone, said = Account(service, 'mesh'), []
  with running(config, devices=8) as on_mesh:
    for account in (alone, Account(on_mesh, 'mesh')):
      adapter, _ = account.create('a', seed=1)
      learn(account, adapter.id)
      [drawn] = sample(account, 'a', seed=3)
      request = make_request([Item(sample_id=drawn.id, feedback='Say more.')], {}, account.service.settings)
      answer = feedback.learn(account, adapter.id, 1, request).said
      assert answer['accepted'] and account.export_files(adapter.id, 2)
      said.append((list(drawn.tokens), logits(account, 'a@1')[0], logits(account, 'a@2')[0]))
  (tokens, before, after), (tokens_of_mesh, before_of_mesh, after_of_mesh) = said
  assert tokens == tokens_of_mesh
  np.testing.assert_allclose(before_of_mesh, before, atol=1e-4)
  np.testing.assert_allclose(after_of_mesh, after, atol=1e-3)


def test_what_is_not_kept_is_removed_from_time_to_time_whatever_goes_wrong(service, monkeypatch):
  asked, done, stopped = [], threading.Event(), threading.Event()

  def retain():
    asked.append(None)
    if len(asked) == 1:
      raise OSError('disk')
    done.set()

  monkeypatch.setattr(service.store, 'retain', retain)
  monkeypatch.setattr('sdpo_jax.serving.service.TEND_SECONDS', 0.0)
  thread = threading.Thread(target=service.tend, args=(stopped,), daemon=True)
  thread.start()
  assert done.wait(60)
  stopped.set()
  thread.join()
  assert len(asked) >= 2


def test_what_is_served_is_said(ada):
  said = ada.service.capabilities()
  assert said['idle_s'] == 14 * 86400 and said['union_support'] is False
  assert said['model']['name'] == 'tiny' and said['adapter']['rank'] == 2 and said['adapter']['alpha'] == 4.0
  assert said['tokens'] == {
    'prompt': 64,
    'completion': 8,
    'text': 321,
    'teacher_prompt': 256,
    'topk': 100,
    'logprobs': 20,
  }
  assert str(ada.service.config.model.path) not in json.dumps(said, allow_nan=False)
