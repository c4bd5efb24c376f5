"""The feedback transaction, on a real engine and a real store: it happens whole, and exactly as it is answered, or not
at all.
"""

import dataclasses
import json
import threading

import numpy as np
import pytest

from sdpo_jax.errors import UserError
from sdpo_jax.learning.requests import Taught
from sdpo_jax.serving import feedback
from sdpo_jax.serving.account import Account
from sdpo_jax.serving.call import Call
from sdpo_jax.serving.engine import Engine
from sdpo_jax.serving.errors import (
  Cancelled,
  Deadline,
  InvalidRequest,
  NotFound,
  NotHolder,
  ServiceError,
  VersionConflict,
)
from sdpo_jax.serving.feedback import FeedbackEntry
from sdpo_jax.serving.feedback_request import Item, make_request
from sdpo_jax.serving.records import engine_name, optimizer_name
from sdpo_jax.serving.store import versions
from tests import tiers
from tests.serving.engines import put
from tests.serving.service_world import HELLO, WIDE, make_config, model_folder, running, sample

STAGES = ['queued', 'scored', 'stepped', 'guarded']
LOSSES = [{'loss': 'sdpo', 'alpha': 0.3}, {'loss': 'jsd_pg', 'alpha': 0.75}]
SAID = 'Say B.'


@pytest.fixture(scope='module')
def service(tmp_path_factory):
  folder = tmp_path_factory.mktemp('feedback')
  config = make_config(model_folder(folder / 'model'), folder / 'root')
  config.serve.guards.min_entropy = None
  with running(config) as running_service:
    yield running_service


@pytest.fixture
def ada(service, request):
  """Return an owner without adapters."""
  return Account(service, f'ada of {request.node.name}')


def ask(account, *items, update=LOSSES[0], **more):
  return make_request(items, update, account.service.settings, **more)


def fed(account, *asked, **more):
  """Return the response to a feedback."""
  return feedback.learn(account, *asked, **more).said


def learned(account, settings=None, versions=1):
  """Return an adapter that has learned already, and a sample of it."""
  adapter, _ = account.create('one', settings, seed=0)
  for seed in range(versions):
    [drawn] = sample(account, adapter.id, seed=seed)
    fed(account, adapter.id, None, ask(account, Item(sample_id=drawn.id, feedback=f'{SAID}{seed}')))
  [drawn] = sample(account, adapter.id, seed=versions)
  return account.adapter(adapter.id), drawn


def arrays(account, adapter):
  """All that is kept of an adapter, and all that the engine has of its newest version."""
  store = account.service.store
  kept = [(version.digest, store.arrays(version)) for version in account.versions(adapter.id)]
  newest = engine_name(adapter.id, account.adapter(adapter.id).head)
  kept += [('engine', account.service.worker.arrays(name)) for name in (newest, optimizer_name(newest))]
  kept += [('state', store.optimizer_state(account.version(adapter.id)).arrays)]
  return [(digest, {name: value.tobytes() for name, value in each.items()}) for digest, each in kept]


def scored(account, version, prompt, tokens, ids=None):
  return account.service.worker.score(version, [(prompt, tokens)], topk=WIDE, ids=ids).result()[0]


def per_token(answer, name):
  [item] = answer['items']
  return np.asarray(item['per_token'][name], np.float64)


@pytest.mark.parametrize('update', LOSSES)
def test_a_teacher_who_knows_nothing_more_teaches_exactly_nothing(ada, update):
  adapter, drawn = learned(ada)
  answer = fed(ada, adapter.id, None, ask(ada, Item(sample_id=drawn.id), update=update, mode='dry_run'))
  for name in ('advantages', 'divergence'):
    assert answer['items'][0]['per_token'][name] == [0.0] * len(drawn.tokens)
  assert [answer['metrics'][name] for name in ('loss', 'pg_loss', 'jsd_reg', 'grad_norm', 'mean_advantage')] == [
    0.0
  ] * 5
  assert answer['metrics']['teacher_gap'] == 0.0


EMPTY = {
  'sdpo': LOSSES[0],
  'jsd_pg': LOSSES[1],
  'hybrid': LOSSES[0],
  'forward_kl': {'alpha': 0.0},  # Their gradients have norms of about 1e-8.
  'reverse_kl': {'alpha': 1.0},
  'equal_rewards': LOSSES[0],
}


@pytest.mark.parametrize('kind', EMPTY)
@pytest.mark.parametrize('count', [5, pytest.param(100, marks=pytest.mark.slow)])
def test_feedbacks_without_a_gradient_move_no_bit(ada, kind, count):
  adapter, drawn = learned(ada)  # Its moments are not 0, so that a step of AdamW would move the factors.
  before = arrays(ada, adapter)
  items = [Item(sample_id=drawn.id)] + [Item(sample_id=drawn.id, reward=0.0)] * (kind == 'hybrid')
  if kind == 'equal_rewards':
    items = [Item(sample_id=drawn.id, reward=0.1)] * 3  # Their mean is rounded.
  update = {**EMPTY[kind], 'weight_decay': 0.5, 'steps': 2}
  for _ in range(count):
    answer = fed(ada, adapter.id, 1, ask(ada, *items, update=update))
    assert (answer['unchanged'], answer['accepted'], answer['version_after']) == (True, True, 1)
    assert all(step['grad_norm'] < 1e-6 and not step['stepped'] for step in answer['steps'])
    assert kind in ('forward_kl', 'reverse_kl', 'equal_rewards') or answer['metrics']['grad_norm'] == 0
    assert list(answer['timings']) == [*STAGES, 'unchanged']
  assert arrays(ada, adapter) == before
  # The engine has not changed either: what is learned next starts from the same moments.
  twin, _ = ada.fork(adapter.id, 1, 'twin')
  for each in (adapter, twin):
    answer = fed(ada, each.id, None, ask(ada, of_tokens(drawn, SAID), update=update))
    assert not answer['unchanged'] and answer['version_after'] > answer['version_before']
  one, other = (ada.service.store.arrays(ada.version(each.id)) for each in (adapter, twin))
  assert {name: array.tobytes() for name, array in one.items()} == {
    name: array.tobytes() for name, array in other.items()
  }


def taught(account, adapter, drawn, **more):
  """Return the response to a feedback that moves an adapter."""
  answer = fed(account, adapter.id, None, ask(account, of_tokens(drawn, SAID), **more))
  assert answer['version_after'] == answer['version_before'] + 1
  return answer


def of_newest(account, adapter):
  """Return the factors of the newest version in the store, and its state, as bytes."""
  store, version = account.service.store, account.version(adapter.id)
  found = {**store.arrays(version), **store.optimizer_state(version).arrays}
  return {name: array.tobytes() for name, array in found.items()}


@pytest.mark.parametrize('kind', ['live', 'ema'])
def test_learning_goes_on_from_what_is_stored_as_from_what_the_engine_has(ada, kind):
  adapter, drawn = learned(ada, {'teacher': {'kind': kind}}, versions=2)
  twin, _ = ada.fork(adapter.id, None, 'twin')
  assert of_newest(ada, twin) == of_newest(ada, adapter)
  assert any(name.startswith('average/') for name in of_newest(ada, twin)) == (kind == 'ema')
  first = taught(ada, adapter, drawn)
  assert (first['moments_of'], first['average_of']) == (2, 2 if kind == 'ema' else None) and not first['warnings']
  second = taught(ada, twin, drawn)
  assert second['moments_of'] == 0 and second['metrics'] == first['metrics']
  assert of_newest(ada, twin) == of_newest(ada, adapter)
  ada.service.worker.forget(engine_name(twin.id, 1))  # From here on it is read from the store.
  first, second = (taught(ada, each, drawn) for each in (adapter, twin))
  assert (first['moments_of'], second['moments_of']) == (3, 1) and second['metrics'] == first['metrics']
  assert of_newest(ada, twin) == of_newest(ada, adapter)
  ada.service.store._writer.submit(int).result()  # noqa: SLF001 (Until then, the moments before are stored, too.)
  undone = ada.undo(twin.id, None)
  answer = taught(ada, twin, drawn)
  assert answer['moments_of'] is None
  assert answer['warnings'] == [f'The moments of version {undone.number} are not stored, so learning began with zeros.']


def test_an_average_is_that_of_the_feedback_before_or_begins_with_the_factors(ada, service):
  """Whether the engine has it or the store."""
  said = {}
  for where in ('engine', 'store'):
    adapter, _ = ada.create(where, seed=0)
    [drawn] = sample(ada, 'base', seed=5)
    said[where] = []
    for kind in ('ema', 'ema', 'live', 'ema'):
      answer = taught(ada, adapter, drawn, teacher={'kind': kind}, update={**LOSSES[0], 'alpha': 0.5})
      said[where].append((answer['average_of'], answer['metrics']['loss']))
      if where == 'store':
        service.store._writer.submit(int).result()  # noqa: SLF001 (The state has been written.)
        service.worker.forget(engine_name(adapter.id, answer['version_after']))
  assert [average for average, _ in said['engine']] == [None, 1, None, None]
  assert said['engine'] == said['store']


@pytest.mark.parametrize('kind, loss', tiers.cases([('ema', 0), ('live', 1)], slow=[('ema', 0)]))
def test_a_curve_is_the_same_if_the_service_starts_again_before_every_feedback(tmp_path, kind, loss):
  """Factors, moments and average are read from the store each time: 12 losses and 12 versions, bit for bit."""
  said, kept, model = {}, {}, model_folder(tmp_path / 'model')
  for where, starts in (('memory', 1), ('store', 12)):
    config, said[where], kept[where] = make_config(model, tmp_path / where), [], []
    for start in range(starts):
      with running(config) as service:
        ada = Account(service, 'ada')
        if start == 0:
          adapter, _ = ada.create('one', {'teacher': {'kind': kind}}, seed=0)
        for head in range(start * 12 // starts, (start + 1) * 12 // starts):
          [drawn] = sample(ada, adapter.id, seed=head)
          item = Item(sample_id=drawn.id, feedback=f'{SAID}{head}')
          answer = fed(ada, adapter.id, head, ask(ada, item, update=LOSSES[loss]))
          assert (answer['version_after'], answer['moments_of'], answer['warnings']) == (head + 1, head or None, [])
          said[where].append((drawn.tokens, answer['metrics']))
          service.store._writer.submit(int).result()  # noqa: SLF001 (The state has been written.)
          kept[where].append(of_newest(ada, adapter))
  assert said['memory'] == said['store'] and kept['memory'] == kept['store']
  assert len({metrics['loss'] for _, metrics in said['store']}) == 12


def test_a_version_in_a_slot_goes_on_from_the_state_that_was_read(ada, service):
  adapter, drawn = learned(ada)
  twin, _ = ada.fork(adapter.id, None, 'twin')
  for each in (adapter, twin):
    name = optimizer_name(engine_name(each.id, each.head if each is twin else 1))
    if each is adapter:
      service.worker._engine.drop(name)  # noqa: SLF001 (As memory that is full makes it.)
  assert taught(ada, adapter, drawn)['metrics'] == taught(ada, twin, drawn)['metrics']
  assert of_newest(ada, twin) == of_newest(ada, adapter)


def test_the_answer_says_whose_moments_learning_began_with(ada, service, monkeypatch):
  """As after a kill between an answer and the writing of its state."""
  adapter, drawn = learned(ada)
  assert ada.version(adapter.id).details['moments_of'] is None and not ada.version(adapter.id).details['warnings']
  with monkeypatch.context() as patched:
    patched.setattr(service.store, 'keep_optimizer_state', lambda *_: None)
    taught(ada, adapter, drawn), taught(ada, adapter, drawn)
  service.worker.forget(engine_name(adapter.id, 3))
  answer = taught(ada, adapter, drawn)
  assert answer['moments_of'] == ada.version(adapter.id).details['moments_of'] == 1
  assert answer['warnings'] == ['The moments of version 3 are not stored, so learning began with those of version 1.']
  service.store._writer.submit(int).result()  # noqa: SLF001 (The state of version 4 has been written.)
  for each in service.store.blobs.list('users'):
    if each.key.endswith(versions.MOMENTS) and f'/{adapter.id}/' in each.key:
      service.store.blobs.delete([each.key], 'users')
  service.worker.forget(engine_name(adapter.id, 4))
  answer = taught(ada, adapter, drawn)
  assert answer['moments_of'] is None
  assert answer['warnings'] == ['The moments of version 4 are not stored, so learning began with zeros.']


@pytest.mark.parametrize('update', LOSSES)
def test_the_answer_is_what_direct_passes_and_the_formulas_say(ada, update):
  adapter, drawn = learned(ada)
  item = Item(sample_id=drawn.id, feedback=SAID, correction='B')
  answer = fed(ada, adapter.id, 1, ask(ada, item, update={**update, 'weight_decay': 0.1}))
  assert (answer['version_before'], answer['version_after'], answer['accepted']) == (1, 2, True)
  assert json.loads(json.dumps(answer, allow_nan=False)) == answer
  before, after = (scored(ada, engine_name(adapter.id, number), drawn.prompt_tokens, drawn.tokens) for number in (1, 2))
  request = ask(ada, item)
  [prepared] = feedback.lessons.prepare(
    request.items, adapter, ada.service.store, ada.service.reprompting, ada.service.vocab_size
  )
  assert SAID in ada.service.tokenizer.decode(prepared.lesson.teacher_prompt)
  taught = scored(ada, engine_name(adapter.id, 1), prepared.lesson.teacher_prompt, drawn.tokens)
  for name, expected in (
    ('log_probs_before', before.log_probs),
    ('log_probs_after', after.log_probs),
    ('teacher_log_probs', taught.log_probs),
    ('entropy', before.entropy),
  ):
    np.testing.assert_allclose(per_token(answer, name), expected, atol=1e-5)
  [said] = answer['items']
  assert said['per_token']['token_ids'] == drawn.tokens
  top = said['per_token']['top']
  assert [[each['token_id'] for each in row] for row in top] == taught.top_ids[:, :5].tolist()
  np.testing.assert_allclose(
    [[each['log_prob'] for each in row] for row in top], taught.top_log_probs[:, :5], atol=1e-5
  )
  assert top[0][0]['token'] == ada.service.texts.text_of(top[0][0]['token_id'])

  # The rest by the formulas, in float64.
  metrics, own, theirs = answer['metrics'], before.log_probs.astype(np.float64), taught.log_probs.astype(np.float64)
  assert metrics['tokens_processed'] == len(drawn.tokens) and metrics['grad_norm'] > 0
  ratio = np.exp(own - drawn.log_probs.astype(np.float64))
  assert metrics['mean_is_ratio'] == pytest.approx(ratio.mean(), abs=1e-5)
  assert metrics['mean_log_prob_change'] == pytest.approx((after.log_probs - before.log_probs).mean(), abs=1e-5)
  assert metrics['teacher_gap'] == pytest.approx((theirs - own).mean(), abs=1e-5)
  if update['loss'] == 'jsd_pg':
    alpha = update['alpha']
    advantages = np.log(alpha * np.exp(own) + (1 - alpha) * np.exp(theirs)) - own
    np.testing.assert_allclose(per_token(answer, 'advantages'), advantages, atol=2e-5)
    ids = taught.top_ids
    p = scored(ada, engine_name(adapter.id, 1), drawn.prompt_tokens, drawn.tokens, [ids]).of_ids.astype(np.float64)
    q = taught.top_log_probs.astype(np.float64)
    m = np.log(alpha * np.exp(p) + (1 - alpha) * np.exp(q))
    divergence = (alpha * np.exp(p) * (p - m) + (1 - alpha) * np.exp(q) * (q - m)).sum(-1)
    pg_loss = -np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages).mean()
    assert metrics['pg_loss'] == pytest.approx(pg_loss, abs=1e-5)
    assert metrics['jsd_reg'] == pytest.approx(divergence.mean(), abs=1e-5)
    assert metrics['loss'] == pytest.approx(pg_loss + 0.5 * divergence.mean(), abs=1e-5)
    assert metrics['mean_advantage'] == pytest.approx(np.abs(advantages).mean(), abs=1e-5)
    assert metrics['frac_positive_advantage'] == pytest.approx((advantages > 0).mean())
  else:
    alpha, ids = update['alpha'], before.top_ids
    q = scored(ada, engine_name(adapter.id, 1), prepared.lesson.teacher_prompt, drawn.tokens, [ids]).of_ids
    p, q = (np.exp(each.astype(np.float64)) for each in (before.top_log_probs, q))
    p, q = (np.concatenate([each, 1 - each.sum(-1, keepdims=True)], -1) for each in (p, q))
    m = (1 - alpha) * p + alpha * q
    divergence = ((1 - alpha) * p * np.log(p / m) + alpha * q * np.log(q / m)).sum(-1)
    assert per_token(answer, 'advantages').tolist() == [0.0] * len(drawn.tokens)
    assert metrics['loss'] == pytest.approx((np.minimum(ratio, 2) * divergence).mean(), abs=1e-5)
  np.testing.assert_allclose(per_token(answer, 'divergence'), divergence, atol=1e-5)
  version = ada.version(adapter.id)
  assert version.details['metrics'] == metrics and version.details['samples'] == [drawn.id]


def test_a_trial_says_what_a_commit_does_and_changes_nothing(ada):
  adapter, drawn = learned(ada)
  known, versions = arrays(ada, adapter), ada.service.worker.stats['versions']
  item, stages = Item(sample_id=drawn.id, feedback=SAID), []
  trial, tried = (
    fed(ada, adapter.id, None, ask(ada, item, mode='dry_run'), progress=lambda stage, **_: stages.append(stage))
    for _ in range(2)
  )
  assert stages == [*STAGES, 'dry_run'] * 2 and trial['version_after'] == 1 and trial['accepted']
  assert arrays(ada, adapter) == known and ada.service.worker.stats['versions'] == versions
  stages.clear()
  done = fed(ada, adapter.id, None, ask(ada, item), progress=lambda stage, **_: stages.append(stage))
  assert stages == [*STAGES, 'committed'] and done['version_after'] == 2
  for name in ('items', 'metrics', 'guards'):
    assert trial[name] == tried[name] == done[name]
  assert SAID not in json.dumps(ada.version(adapter.id, 2).details)
  kinds = [event.kind for event in ada.service.events.wait(adapter.id, None, 0)]
  assert kinds[-5:] == [*STAGES, 'committed']


def test_texts_are_stored_with_their_version_only_if_the_settings_say_so(ada, service, monkeypatch):
  adapter, drawn = learned(ada)
  monkeypatch.setattr(service.settings.store, 'keep_feedback_texts', True)
  said = 'naïve'
  items = Item(sample_id=drawn.id, feedback=SAID), Item(sample_id=drawn.id, correction=said, reward=1.0)
  answer = fed(ada, adapter.id, 1, ask(ada, *items))
  assert ada.version(adapter.id, 2).details['texts'] == [{'feedback': SAID}, {'correction': said}]
  assert 'texts' not in answer | ada.version(adapter.id, 1).details


def break_learn(service, monkeypatch):
  monkeypatch.setattr(Engine, 'learn_in_pieces', fail)


def break_measure(service, monkeypatch):
  monkeypatch.setattr(service.canaries, 'measure', fail)


def break_arrays(service, monkeypatch):
  monkeypatch.setattr(service.worker, 'arrays', fail)


def break_answer(service, monkeypatch):
  monkeypatch.setattr(feedback.lessons, 'of_item', fail)


def break_commit(service, monkeypatch):
  monkeypatch.setattr(service.store, 'commit', fail)


def break_blobs(service, monkeypatch):
  monkeypatch.setattr(service.store.blobs, 'put_new', fail)


def fail(*args, **kwargs):
  raise OSError('broken')


OFTEN = [break_learn, break_arrays, break_commit, break_blobs, 'guarded', 'late']
RARELY = [break_measure, break_answer, 'queued', 'scored', 'stepped', 'left']


@pytest.mark.parametrize('broken', OFTEN + [pytest.param(each, marks=pytest.mark.slow) for each in RARELY])
def test_whatever_fails_leaves_everything_as_it_was(ada, service, monkeypatch, broken):
  adapter, drawn = learned(ada, {'canary_prompts': ['Hello']})
  other, _ = ada.create('other')
  known, versions = [arrays(ada, each) for each in (adapter, other)], service.worker.stats['versions']
  request = ask(ada, Item(sample_id=drawn.id, feedback=SAID))
  spent = {'learned': [], 'feedbacks': []}
  call = Call(spend=lambda kind, amount: spent[kind].append(amount))
  account = Account(service, ada.owner, call)

  def progress(stage, **_):
    if stage == broken:
      raise Cancelled('left')
    if broken in ('late', 'left') and stage == 'guarded':
      call.end(Deadline('late') if broken == 'late' else None)

  with monkeypatch.context() as patched:
    if callable(broken):
      broken(service, patched)
    with pytest.raises((OSError, ServiceError)):
      fed(account, adapter.id, None, request, progress=progress)
  assert [arrays(ada, each) for each in (adapter, other)] == known
  assert service.worker.stats['versions'] == versions
  # What was learned and thrown away is paid for.
  assert spent['learned'][0] > 0 and spent['feedbacks'][0] == 1
  for own in spent.values():
    assert sum(own) == (0 if broken in (break_learn, 'queued') else own[0])
  # The next one is as if nothing had been.
  twin, _ = ada.fork(adapter.id, 1, 'twin')  # While version 1 has its moments.
  done = fed(ada, adapter.id, 1, request)
  assert done['version_after'] == 2
  assert (
    fed(ada, twin.id, 0, dataclasses.replace(request, items=[of_tokens(drawn, SAID)]))['metrics'] == done['metrics']
  )


def of_tokens(drawn, said=None):
  """Return the same completion, given in tokens."""
  return Item(
    prompt_tokens=drawn.prompt_tokens,
    tokens=drawn.tokens,
    log_probs=drawn.log_probs,
    messages=drawn.messages,
    feedback=said,
  )


def test_what_is_noted_after_the_commit_cannot_undo_it(ada, service, monkeypatch):
  adapter, drawn = learned(ada)
  monkeypatch.setattr(service.store, 'keep_optimizer_state', fail)
  seen = []
  done = fed(
    ada,
    adapter.id,
    None,
    ask(ada, Item(sample_id=drawn.id, feedback=SAID)),
    progress=lambda stage, **_: seen.append(stage),
  )
  assert done['version_after'] == ada.adapter(adapter.id).head == 2 and seen[-1] == 'committed'


@pytest.mark.parametrize(
  ('guard', 'limit'),
  [('max_kl_to_base', 0.0), ('min_entropy', 100.0), ('max_self_similarity', -1), ('max_loss_ratio', 0.0)],
)
def test_a_guard_that_says_no_leaves_the_version(ada, monkeypatch, guard, limit):
  versions = 4 if guard == 'max_loss_ratio' else 1
  adapter, drawn = learned(ada, {'canary_prompts': ['Hello', HELLO]}, versions=versions)
  known = arrays(ada, adapter)
  if limit < 0:  # Completions that are all the same.
    monkeypatch.setattr(feedback.guards, 'self_similarity', lambda completions: 1.0)
    limit = 0.5
  request = ask(ada, Item(sample_id=drawn.id, feedback=SAID), guards={guard: limit})
  stages = []
  answer = fed(
    ada, adapter.id, versions, request, progress=lambda stage, **said: stages.append((stage, said.get('reason')))
  )
  assert (answer['version_before'], answer['version_after'], answer['accepted']) == (versions, versions, False)
  assert guard in answer['reason'] and stages[-2:] == [('guarded', answer['reason']), ('rejected', answer['reason'])]
  [said] = [each for each in answer['guards'] if not each['passed']]
  assert (said['guard'], said['limit']) == (guard, limit) and said['value'] is not None
  assert arrays(ada, adapter) == known
  passed = fed(ada, adapter.id, versions, dataclasses.replace(request, guards={guard: None}, mode='dry_run'))
  assert passed['accepted'] and passed['canary']['prompts'] == 2


def test_guards_measure_what_direct_passes_say(ada):
  adapter, drawn = learned(ada, {'canary_prompts': ['Hello', 'What?']})
  answer = fed(ada, adapter.id, None, ask(ada, Item(sample_id=drawn.id, feedback=SAID)))
  prompts = [ada.service.prompt_of(messages=[{'role': 'user', 'content': text}]) for text in ('Hello', 'What?')]
  canaries = ada.service.canaries.of_base(prompts, Call())
  divergence, entropy = [], []
  for canary in canaries:
    new, base = (
      scored(ada, version, canary.prompt, canary.completion, [canary.top_ids])
      for version in (engine_name(adapter.id, 2), '')
    )
    p, q = (np.exp(each.of_ids.astype(np.float64)) for each in (new, base))
    p, q = (np.concatenate([each, 1 - each.sum(-1, keepdims=True)], -1) for each in (p, q))
    divergence.append((p * np.log(p / q)).sum(-1))
    entropy.append(new.entropy)
  assert answer['canary']['kl_to_base'] == pytest.approx(np.concatenate(divergence).mean(), abs=1e-6)
  assert answer['canary']['entropy'] == pytest.approx(np.concatenate(entropy).mean(), abs=1e-6)
  assert answer['canary']['kl_to_base'] > 0


def test_the_services_own_prompts_and_answers_guard_all_adapters(ada, service, monkeypatch, tmp_path):
  file = tmp_path / 'canaries.jsonl'
  rows = [{'prompt': 'Hi', 'answer': 'Yes'}, {'prompt': HELLO, 'answer': 'No.'}, {'prompt': 'Again'}]
  file.write_text('\n'.join(json.dumps(row) for row in rows))
  prompts, abilities = service._read_canaries(str(file))  # noqa: SLF001 (As the service does when it starts.)
  assert prompts == [service.prompt_of(messages=[{'role': 'user', 'content': each}]) for each in ('Hi', 'Hi', 'Again')]
  assert [(prompt, service.tokenizer.decode(answer)) for prompt, answer in abilities] == [
    (prompts[0], 'Yes'),
    (prompts[1], 'No.'),
  ]
  monkeypatch.setattr(service, 'default_canaries', prompts)
  monkeypatch.setattr(service, 'abilities', abilities)
  adapter, drawn = learned(ada)
  answer = fed(ada, adapter.id, None, ask(ada, of_tokens(drawn, SAID)))
  checks = {each['guard']: each for each in answer['guards']}
  before, after = (
    np.concatenate([scored(ada, name, *row).log_probs for row in abilities]).astype(np.float64)
    for name in ('', engine_name(adapter.id, 2))
  )
  assert checks['max_ability_loss']['value'] == pytest.approx((before - after).mean(), abs=1e-6)
  assert checks['max_kl_to_base']['value'] > 0 and answer['canary']['prompts'] == 3
  with monkeypatch.context() as patched:
    patched.setattr(service.canaries, 'ability_loss', lambda *_: 0.5)
    rejected = fed(ada, adapter.id, None, ask(ada, of_tokens(drawn, SAID)))
  assert not rejected['accepted'] and "log-prob of the service's own answers would be 0.5, and" in rejected['reason']
  off = fed(ada, adapter.id, None, ask(ada, of_tokens(drawn, SAID), guards={'max_ability_loss': None}))
  assert off['accepted'] and {each['guard']: each['value'] for each in off['guards']}['max_ability_loss'] is None
  monkeypatch.setattr(service, 'abilities', [])
  with pytest.raises(InvalidRequest, match='max_ability_loss is measured on answers of the service, which has none'):
    fed(ada, adapter.id, None, ask(ada, of_tokens(drawn, SAID), guards={'max_ability_loss': 0.1}))
  assert 'canary_file' not in service.capabilities()['guards']
  strict, _ = ada.create('strict', {'guards': {'max_ability_loss': 0.1}})
  assert fed(ada, strict.id, None, ask(ada, of_tokens(drawn, SAID), guards={'max_ability_loss': None}))['accepted']
  own, _ = ada.create('own', {'canary_prompts': ['Hello']})
  assert fed(ada, own.id, None, ask(ada, of_tokens(drawn, SAID)))['canary']['prompts'] == 1
  for row, said in (
    ({'answer': 'a'}, "field 'prompt' or 'messages' is missing"),
    ('Hi', 'a row must be an object'),
    ({'prompt': 'Hi', 'answer': 5}, "field 'answer' must be a non-empty string, not 5"),
    ({'prompt': 'Hi', 'answer': ''}, "field 'answer' must be a non-empty string"),
    ({'prompt': ' '}, "field 'prompt' must be a non-empty string"),
    ({'prompt': 'Hi', 'answer': 'a' * 99}, "field 'answer' has 99 tokens, and the limit is 8"),
    ({'prompt': 'Hi' * 99}, 'The prompt has .* the limit is 64'),
    ({'prompt': 7}, "field 'prompt' must be a non-empty string, not 7"),
    ({'prompt': 'Hi', 'answr': 'Yes'}, "no field 'answr', .* did you mean 'answer'"),
    ({'prompt': 'Hi', 'answer': 'Y\ud83d'}, 'half of a character'),
    ({'prompt': 'Hi\ud83d', 'answer': 'Y'}, 'half of a character'),
    ({'prompt': 'Hi', 'answer': 'Yes<|im_end|>'}, r"field 'answer' spells the control token '<\|im_end\|>'"),
  ):
    file.write_text(json.dumps({'prompt': 'fine'}) + '\n' + json.dumps(row))
    with pytest.raises(UserError, match=f'canaries.jsonl.*2.*{said}'):
      service._read_canaries(str(file))  # noqa: SLF001


def test_a_limit_that_the_user_sets_needs_canary_prompts(ada):
  adapter, drawn = learned(ada)
  with pytest.raises(InvalidRequest, match='max_kl_to_base is measured on canary prompts'):
    fed(ada, adapter.id, None, ask(ada, Item(sample_id=drawn.id), guards={'max_kl_to_base': 1.0}))


@pytest.mark.parametrize('learning_rate', [1e30, 3e38])
def test_versions_that_are_not_finite_are_never_kept(ada, learning_rate):
  adapter, drawn = learned(ada)
  known = arrays(ada, adapter)
  request = ask(ada, Item(sample_id=drawn.id, feedback=SAID), update={'learning_rate': learning_rate, 'steps': 2})
  answer = fed(ada, adapter.id, None, request)
  assert not answer['accepted'] and 'not finite' in answer['reason'] and answer['version_after'] == 1
  assert json.dumps(answer, allow_nan=False) and arrays(ada, adapter) == known


def test_stale_samples_are_weighted_and_foreign_ones_are_not_there(ada, service):
  adapter, drawn = learned(ada)
  fed(ada, adapter.id, 1, ask(ada, Item(sample_id=drawn.id, feedback=SAID)))
  stale = fed(ada, adapter.id, 2, ask(ada, Item(sample_id=drawn.id, feedback=SAID), mode='dry_run'))
  assert stale['items'][0]['sample_version'] == 1 and stale['metrics']['mean_is_ratio'] != 1
  given = fed(ada, adapter.id, 2, ask(ada, of_tokens(drawn, SAID), mode='dry_run'))
  assert given['metrics'] == stale['metrics']
  other, _ = ada.create('other')
  with pytest.raises(InvalidRequest, match='is of another adapter'):
    fed(ada, other.id, None, ask(ada, Item(sample_id=drawn.id)))
  assert fed(ada, other.id, None, ask(ada, of_tokens(drawn)))['accepted']
  eve = Account(service, 'eve')
  own, _ = eve.create('mine')
  with pytest.raises(NotFound) as foreign:
    fed(eve, own.id, None, ask(eve, Item(sample_id=drawn.id)))
  with pytest.raises(NotFound) as unknown:
    fed(eve, own.id, None, ask(eve, Item(sample_id='smp-none')))
  assert str(foreign.value).replace(drawn.id, 'smp-none') == str(unknown.value)
  [of_base] = sample(ada, 'base')
  assert fed(ada, other.id, None, ask(ada, Item(sample_id=of_base.id, feedback=SAID)))['accepted']


@pytest.mark.parametrize('kind', ['ema', 'base', 'frozen', 'lagged'])
def test_teachers_of_an_adapter_say_what_direct_passes_say(ada, kind):
  teacher = {'kind': kind, **({'every': 1} if kind == 'lagged' else {'rate': 0.5} if kind == 'ema' else {})}
  adapter, drawn = learned(ada, {'teacher': teacher}, versions=2)
  answer = fed(ada, adapter.id, None, ask(ada, Item(sample_id=drawn.id), mode='dry_run'))
  name = {'base': '', 'frozen': engine_name(adapter.id, 0), 'lagged': engine_name(adapter.id, 1)}.get(kind)
  if kind == 'ema':
    known, state = (ada.service.worker.arrays(f(engine_name(adapter.id, 2))) for f in (str, optimizer_name))
    name = 'average of the test'
    own = {f'factors/{key[8:]}': value for key, value in state.items() if key.startswith('average/')}
    assert own.keys() == known.keys() and any((known[key] != value).any() for key, value in own.items())
    put(ada.service.worker, name, own)
  expected = scored(ada, name, drawn.prompt_tokens, drawn.tokens).log_probs
  np.testing.assert_allclose(per_token(answer, 'teacher_log_probs'), expected, atol=1e-5)
  if kind == 'ema':
    ada.service.worker.forget(name)


def test_a_teacher_elsewhere_who_names_a_handful_of_tokens_is_said_to(ada, service, monkeypatch):
  adapter, drawn = learned(ada)

  def answered(lessons, call):
    shape = len(lessons[0].completion), 3
    ids, log_probs = np.tile(np.int32([5, 6, 7]), (shape[0], 1)), np.full(shape, np.log(0.3), np.float32)
    said = Taught(ids, log_probs, np.full(shape[0], -np.inf, np.float32))
    return [dataclasses.replace(lesson, teacher_prompt=None, taught=said) for lesson in lessons]

  request = ask(ada, Item(sample_id=drawn.id, feedback=SAID), update=LOSSES[1], teacher={'kind': 'endpoint'})
  with pytest.raises(InvalidRequest, match='no teacher behind an endpoint'):
    fed(ada, adapter.id, None, request)
  monkeypatch.setattr(service, 'ask_endpoint', answered)
  answer = fed(ada, adapter.id, None, request)
  assert answer['accepted'] and 'named 3 tokens' in answer['warnings'][0]
  assert answer['metrics']['floored_fraction'] == 1.0 and (per_token(answer, 'teacher_log_probs') == -20).all()
  assert [len(row) for row in answer['items'][0]['per_token']['top']] == [3] * len(drawn.tokens)
  with pytest.raises(InvalidRequest, match="no model 'large' to teach"):
    fed(ada, adapter.id, None, dataclasses.replace(request, teacher={'kind': 'model', 'name': 'large'}))


def test_a_reward_makes_what_was_drawn_likelier(ada):
  adapter, drawn = learned(ada)
  for reward in (1.0, -1.0):
    answer = fed(ada, adapter.id, None, ask(ada, Item(sample_id=drawn.id, reward=reward), mode='dry_run'))
    assert np.sign(answer['metrics']['mean_log_prob_change']) == reward
    assert per_token(answer, 'advantages').tolist() == [reward] * len(drawn.tokens)


def test_several_steps_are_all_reported(ada):
  adapter, drawn = learned(ada)
  request = ask(
    ada,
    Item(sample_id=drawn.id, feedback=SAID),
    update={**LOSSES[0], 'steps': 3, 'learning_rate': 1e-3},
    detail=(),
    top=0,
  )
  answer = fed(ada, adapter.id, None, request)
  assert [set(step) >= {'loss', 'grad_norm', 'stepped'} for step in answer['steps']] == [True] * 3
  losses = [step['loss'] for step in answer['steps']]
  assert losses == sorted(losses, reverse=True) and answer['metrics']['loss'] == losses[-1]
  assert answer['items'][0]['per_token'] == {} and list(answer['timings']) == [*STAGES, 'committed']


def test_an_adapter_that_has_moved_on_is_not_changed(ada):
  adapter, drawn = learned(ada)
  with pytest.raises(VersionConflict) as conflict:
    fed(ada, adapter.id, 0, ask(ada, Item(sample_id=drawn.id, feedback=SAID)))
  assert conflict.value.current == 1
  with pytest.raises(VersionConflict):
    feedback.learn(ada, adapter.id, 5, ask(ada, Item(sample_id=drawn.id)))


def test_a_batch_asks_elsewhere_for_several_adapters_at_once_and_for_each_in_order(ada, monkeypatch):
  holder, both, asked = NotHolder('http://other'), threading.Barrier(2, timeout=30), []
  monkeypatch.setattr(feedback, 'learn', lambda *_, **__: (_ for _ in ()).throw(holder))

  def forward(index, error):
    assert error is holder
    both.wait()
    asked.append(index)
    return -index

  entries = [FeedbackEntry(adapter, None) for adapter in ('a', 'b', 'a', 'b')]
  assert feedback.run_batch(ada, entries, forward) == [0, -1, -2, -3]
  assert asked.index(0) < asked.index(2) and asked.index(1) < asked.index(3)
  assert feedback.run_batch(ada, entries[:1]) == [holder]


def test_no_sample_is_of_a_version_that_is_refused(ada, service, monkeypatch):
  """Another replica has committed the version of that number, and a sample of that is asked before ours is gone."""
  adapter, drawn = learned(ada)
  own, asked = service.store.commit, []

  def refused(owner, id, expected, arrays, **more):
    own(owner, id, expected, service.store.arrays(ada.version(id, 0)), **more)
    asked.extend(sample(ada, f'{id}@2', n=2))
    raise NotHolder('')

  monkeypatch.setattr(service.store, 'commit', refused)
  with pytest.raises(NotHolder):
    fed(ada, adapter.id, None, ask(ada, Item(sample_id=drawn.id, feedback=SAID)))
  monkeypatch.undo()
  assert len(asked) == 2
  for each in asked:
    theirs = scored(ada, '', each.prompt_tokens, each.tokens)  # It changes nothing of the model.
    np.testing.assert_allclose(each.log_probs, theirs.log_probs, atol=2e-5)
  assert service.worker.known(f'{adapter.id}@1-trial') == []
  assert fed(ada, adapter.id, 2, ask(ada, Item(sample_id=drawn.id, feedback=SAID)))['version_after'] == 3


def test_a_batch_is_a_transaction_for_each(ada):
  adapter, drawn = learned(ada)
  other, _ = ada.create('other')
  good = ask(ada, of_tokens(drawn, SAID))
  found = feedback.run_batch(
    ada,
    [
      FeedbackEntry(adapter.id, good, 1),
      FeedbackEntry(other.id, good),
      FeedbackEntry(adapter.id, good, 1),
      FeedbackEntry('ad-none', good),
      FeedbackEntry(other.id, good, 1),
    ],
  )
  assert [found[index]['version_after'] for index in (0, 1, 4)] == [2, 1, 2]
  assert isinstance(found[2], VersionConflict) and isinstance(found[3], NotFound)
  assert feedback.run_batch(ada, []) == []
  alone, _ = ada.create('alone')
  for each in (other, alone):
    assert ada.service.store.arrays(ada.version(each.id, 0)) is not None
