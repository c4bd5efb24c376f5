"""Runs of cartridges: slots are trained by the loop to say what the frozen model says that reads the whole document."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal

import jax
import numpy as np
import pytest
import torch
import transformers

from sdpo_jax.config import CartridgeConfig, Config, MeshConfig, ModelConfig
from sdpo_jax.data.prompts import ChatFormat, chat_tokens
from sdpo_jax.distributed import accelerators
from sdpo_jax.errors import UserError
from sdpo_jax.inference import probe, runs
from sdpo_jax.learning.optimizer import make_optimizer
from sdpo_jax.models import huggingface, identity
from sdpo_jax.models import parameters as parameter_tables
from sdpo_jax.models.adapters import cartridge_files, kv_prefix, published_cartridges
from sdpo_jax.models.adapters.kv_prefix import KVPrefix
from sdpo_jax.models.forward import forward
from sdpo_jax.preflight import check
from sdpo_jax.rollout.sampler import Sampler
from sdpo_jax.training import cartridges, loop, step
from sdpo_jax.training.directory import fingerprint
from sdpo_jax.training.opening import make_session, stop_token_ids
from sdpo_jax.training.specs import optimizer_spec
from sdpo_jax.types import TokenRows
from tests import exported_cards, hub_server
from tests.models.adapters.cartridges import past_of
from tests.models.family_models import MODELS, SIZES
from tests.push_server import push_server
from tests.training.cartridge_runs import (
  QUESTIONS,
  TEXT,
  changed,
  generation_batch,
  lines,
  log_probs,
  make_config,
  model_alone,
  opened,
  texts_of,
)


@pytest.fixture(scope='module')
def config(tmp_path_factory) -> Config:
  return make_config(tmp_path_factory.mktemp('cartridges'))


def plain_completions(config, session, state) -> np.ndarray:
  """Return what the model alone draws with the first tokens of the document before the questions."""
  document, questions = texts_of(config)
  policy, params, _ = model_alone(config.model.path)
  stops = stop_token_ids(config, session.tokenizer)
  sampler = Sampler(policy, session.tokenizer, prompt_buckets=(80,), response_buckets=(4,), stop_token_ids=stops)
  prompts = [[*document[:16], *question] for question in questions]
  seed = step.sampling_seed(state)
  drawn = sampler.sample({}, params, prompts, n=4, seed=seed, step=1, max_tokens=4, temperature=1.0)
  return drawn.completion_tokens


@pytest.mark.parametrize(
  ('mesh', 'divided'),
  [
    (MeshConfig(1, 1), None),
    *(pytest.param(MeshConfig(*sizes), None, marks=pytest.mark.slow) for sizes in ((4, 2), (8, 1))),
    pytest.param(MeshConfig(4, 2), True, marks=pytest.mark.slow),
  ],
)
def test_the_first_step_is_on_policy_and_minimises_the_forward_divergence(config, tmp_path, monkeypatch, mesh, divided):
  """Its completions are those of a model with the first tokens in its context; its loss is the exact divergence."""
  monkeypatch.setattr(accelerators, 'devices', lambda: jax.devices()[: mesh.fsdp * mesh.tensor])
  session, state = opened(changed(config, mesh, divide_document=divided), tmp_path)
  document, questions = texts_of(config)
  assert session.teacher.policy.adapter.parts == (4 if divided else None)
  assert session.teacher.policy.adapter.slots == len(document) > 64 and not jax.tree.leaves(state.teacher)
  before = jax.device_get(session.base)
  graded, batch = generation_batch(session, state)
  assert graded.prompts == questions
  rollouts, group = graded.rollouts, graded.rollouts.group
  lengths = rollouts.completion_mask.sum(1).tolist()
  asked = [[*questions[group[i]], *rollouts.completion_tokens[i, :length]] for i, length in enumerate(lengths)]
  teacher = log_probs(config, [[*document, *row] for row in asked], lengths)
  student = log_probs(config, [[*document[:16], *row] for row in asked], lengths)
  divergence = [np.sum(np.exp(t) * (t - s), axis=-1) for t, s in zip(teacher, student, strict=True)]
  for row, length in enumerate(lengths):
    drawn_ones = np.arange(length), rollouts.completion_tokens[row, :length]
    np.testing.assert_allclose(rollouts.model_log_probs[row, :length], student[row][drawn_ones], atol=2e-5)
  if mesh.tensor == 1:
    np.testing.assert_array_equal(rollouts.completion_tokens, plain_completions(config, session, state))
  moved, report = step.run_update(session, state, batch)
  for row, values in enumerate(divergence):
    np.testing.assert_allclose(report.token_values['divergence'][row, : lengths[row]], values, rtol=1e-4, atol=2e-6)
  np.testing.assert_allclose(report.loss, np.concatenate(divergence).mean(), rtol=1e-5)
  assert np.concatenate(divergence).mean() > 0.01
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(session.base), before)
  assert int(moved.optimizer_step) == 1
  assert {leaf.shape[2] for leaf in jax.tree.leaves(moved.trainable)} == {15}  # The first slot is frozen.


@pytest.mark.slow  # By default test_cartridge_updates.py has a slot for every token.
def test_with_a_slot_for_every_token_there_is_nothing_to_learn(config, tmp_path):
  document, questions = texts_of(config)
  session, state = opened(changed(config, tokens=len(document)), tmp_path)
  length = len(questions[0])
  rows = TokenRows(
    tokens=np.array([questions[0]], np.int32),
    positions=np.arange(length, dtype=np.int32)[None],
    segment_ids=np.ones((1, length), np.int32),
    target_index=np.arange(length - 1, dtype=np.int32)[None],
  )

  def loss(slots):
    student, unembedding = forward(session.policy, session.base, slots, rows)
    teacher = forward(session.teacher.policy, session.teacher.whole_base(session.base), {}, rows)[0]
    student, teacher = (jax.nn.log_softmax(hidden @ unembedding.T) for hidden in (student, teacher))
    return jax.numpy.sum(jax.numpy.exp(teacher) * (teacher - student), axis=-1).mean()

  moving = jax.jit(jax.value_and_grad(loss))
  divergence, gradient = moving(state.trainable)
  assert abs(float(divergence)) < 1e-5
  assert max(float(abs(leaf).max()) for leaf in jax.tree.leaves(gradient)) < 1e-5
  off = jax.tree.map(lambda leaf: leaf + 0.1, state.trainable)
  assert float(moving(off)[0]) > 1e-3
  # One copy of the model serves both.
  of_teacher = {id(leaf) for leaf in jax.tree.leaves(session.teacher.whole_base(session.base))}
  table = session.policy.base_policy().parameter_table()
  assert all(id(parameter_tables.get(session.base, row.path)) in of_teacher for row in table)


@pytest.mark.parametrize('ended', [False, True])
def test_slots_begin_as_the_published_ones_of_a_text(config, tmp_path, monkeypatch, ended):
  """KVFromText: what transformers computes for the cut text and, with `init_turn_end`, what ends a system message."""
  monkeypatch.setattr(accelerators, 'devices', lambda: jax.devices()[:1])
  text = 'Another text, which has more tokens than the slots.'
  (tmp_path / 'text.txt').write_text(text)
  begin = {'initializer': 'text', 'init_text': str(tmp_path / 'text.txt'), 'init_turn_end': ended}
  session, trained = make_session(changed(config, MeshConfig(1, 1), **begin).validate(), tmp_path)
  tokenizer = transformers.AutoTokenizer.from_pretrained(config.model.path)
  whole = tokenizer.apply_chat_template([{'role': 'system', 'content': text}], return_dict=False)
  end = [tokenizer.convert_tokens_to_ids('<|im_end|>'), *tokenizer.encode('\n')]
  reference = transformers.AutoModelForCausalLM.from_pretrained(config.model.path).eval()
  tokens = [*whole[:14], *end] if ended else whole[:16]
  with torch.no_grad():
    past = reference(torch.tensor([tokens]), use_cache=True).past_key_values
  slots = cartridges.of_session(session, trained)
  assert slots.keys.shape[2] == 16 == len(tokens) < len(whole)
  for layer, (keys, values) in enumerate(zip(slots.keys, slots.values, strict=True)):
    np.testing.assert_allclose(keys, past.layers[layer].keys[0], atol=2e-5)
    np.testing.assert_allclose(values, past.layers[layer].values[0], atol=2e-5)


@pytest.fixture(scope='module')
def service():
  with push_server() as opened:
    yield opened


@pytest.fixture(scope='module')
def run(config, service, tmp_path_factory):
  """Return (settings, workdir) of a run of two steps, which sends its slots to a service."""
  folder = tmp_path_factory.mktemp('runs')
  (folder / 'text.txt').write_text(TEXT)
  made = changed(config, document=str(folder / 'text.txt'))
  pushed = dataclasses.replace(made.trainer, push_url=service.address, push_name='notes')
  loop.train(dataclasses.replace(made, trainer=pushed), folder / 'run')
  return made, folder / 'run'


def test_a_run_that_is_stopped_is_saved_before_it_waits_for_a_service(run, tmp_path, monkeypatch):
  """A service that does not answer must not use up the time that is left."""
  made, there = run[0], []
  monkeypatch.setattr(loop.Pushing, 'send', lambda *_: os.kill(os.getpid(), signal.SIGTERM))
  monkeypatch.setattr(loop.Pushing, 'close', lambda _: there.extend(os.listdir(tmp_path / 'run/checkpoints')))
  pushed = dataclasses.replace(made.trainer, push_url='http://localhost:8420')
  assert loop.train(dataclasses.replace(made, trainer=pushed), tmp_path / 'run').preempted
  assert there == ['1']


def test_a_service_has_the_slots_of_the_newest_step(run, service, tmp_path):
  made, workdir = run
  assert service.kept[-1] == {'run': made.name, 'step': '2'}
  assert ('POST', '/v1/continual/adapters/import?name=notes') in service.paths
  runs.export(str(workdir), str(tmp_path / 'made'), 'student')
  for name in ('cartridge.json', 'cartridge.safetensors'):
    (tmp_path / name).write_bytes(service.files[name])
  origin = cartridge_files.Origin.of(made.model.path, huggingface.read_policy(made.model.path, made.model).config)
  sent, exported = (
    cartridge_files.read(place, origin, huggingface.read_policy(made.model.path, made.model).config)
    for place in (tmp_path, tmp_path / 'made')
  )
  np.testing.assert_array_equal(sent.keys, exported.keys)
  np.testing.assert_array_equal(sent.values, exported.values)
  assert all(line['programs/compiled'] == 0 for line in lines(workdir))


def test_a_run_goes_on_where_it_was_stopped_and_with_the_same_texts_only(run, tmp_path):
  """Slots, moments and metrics are those of an uninterrupted run; frozen slots are made again from the text."""
  made, workdir = run
  whole = lines(workdir)
  assert [line['step'] for line in whole] == [1, 2] and whole[1]['train/loss'] < whole[0]['train/loss']
  assert whole[0]['rollout/ungraded_fraction'] == 0 and whole[0]['rollout/score_mean'] is None
  trainer = dataclasses.replace(made.trainer, total_training_steps=1)
  loop.train(dataclasses.replace(made, trainer=trainer), tmp_path / 'parts')
  elsewhere = tmp_path / 'elsewhere.txt'
  elsewhere.write_text(TEXT)
  moved, said = changed(made, document=str(elsewhere)), []
  loop.train(moved, tmp_path / 'parts', announce=said.append)
  assert [line['state_digest'] for line in lines(tmp_path / 'parts')] == [line['state_digest'] for line in whole]
  assert any('16 slots, 1 of them frozen; the teacher reads' in line for line in said)
  elsewhere.write_text(TEXT.replace('dolor', 'color'))
  with pytest.raises(UserError, match=r'document/tokens was .*accept_changes=data'):
    loop.train(moved, tmp_path / 'parts')
  elsewhere.write_text('Another ' + TEXT)
  with pytest.raises(UserError, match=r'adapter/text of the slots was .*accept_changes=model,data'):
    loop.train(moved, tmp_path / 'parts')
  elsewhere.write_text(TEXT)
  with pytest.raises(UserError, match='model.cartridge.init_turn_end was False and is now True'):
    loop.train(changed(moved, init_turn_end=True), tmp_path / 'parts')
  insisting = dataclasses.replace(made.trainer, accept_changes=('model', 'data'))
  with pytest.raises(UserError, match='model.cartridge.tokens was 16 and is now 20'):
    loop.train(dataclasses.replace(changed(moved, tokens=20), trainer=insisting), tmp_path / 'parts')


def drawn(session, slots) -> np.ndarray:
  """Completions of the questions, greedy."""
  prompts = chat_tokens(session.tokenizer, [[{'role': 'user', 'content': text}] for text in QUESTIONS], ChatFormat())
  options = dict(n=1, seed=0, step=0, max_tokens=4, temperature=0.0)
  return session.sampler.sample(session.base, slots, prompts, **options).completion_tokens


def test_a_cartridge_is_exported_read_and_trained_on(run, tmp_path, monkeypatch):
  made, workdir = run
  session, slots, step_ = runs.open_run(workdir)
  assert step_ == 2 and session.policy.adapter == KVPrefix(16, 1)
  expected = drawn(session, slots)
  with hub_server.reached(tmp_path, monkeypatch):
    assert runs.export(str(workdir), str(tmp_path / 'ours'), 'student', push='me/ours') == 2
  alone = dataclasses.replace(made, model=dataclasses.replace(made.model, cartridge=CartridgeConfig()))
  opened_again, again = runs.open_source(
    runs.RunOrModel(model=made.model.path, cartridge=str(tmp_path / 'ours')), alone
  )
  jax.tree.map(np.testing.assert_array_equal, again, slots)
  jax.tree.map(np.testing.assert_array_equal, opened_again.base, session.base)
  np.testing.assert_array_equal(drawn(opened_again, again), expected)
  onwards = changed(alone, path=str(tmp_path / 'ours'), document=made.model.cartridge.document).validate()
  _, state = opened(onwards, tmp_path)
  jax.tree.map(np.testing.assert_array_equal, state.trainable, slots)
  # The first frozen slot is that of the first token, the others are not where they began.
  document, _ = texts_of(made)
  policy, params = huggingface.load(made.model.path, ModelConfig(dtype='float32'))
  keys, values = kv_prefix.read_text(policy, params, document[:16])
  found = cartridge_files.read(
    tmp_path / 'ours', cartridge_files.Origin.of(made.model.path, policy.config), policy.config
  )
  np.testing.assert_allclose(found.keys[:, :, :1], keys[:, :, :1], atol=1e-6)
  assert np.abs(found.values[:, :, 1:] - values[:, :, 1:]).min(axis=(0, 1, 3)).max() > 1e-3
  with hub_server.reached(tmp_path, monkeypatch) as served:
    runs.export(str(workdir), str(tmp_path / 'theirs'), 'student', form='cartridge_pt', push='me/theirs')
  published = published_cartridges.read(tmp_path / 'theirs').cartridge
  np.testing.assert_array_equal(published.keys, found.keys)
  np.testing.assert_array_equal(published.values, found.values)
  assert published.frozen == 1
  assert served.models['me/theirs'].files == {path.name: path.read_bytes() for path in (tmp_path / 'theirs').iterdir()}
  for name, texts in (('ours', 'cartridge.json'), ('theirs', 'config.yaml')):
    card = exported_cards.read(tmp_path / name, workdir.parent, made.model.path)
    assert card.data.get('library_name') == 'sdpo_jax' and f'--cartridge=me/{name} ' in card.text
    for private in (workdir.parent, made.model.path, made.model.cartridge.document):
      assert str(private) not in (tmp_path / name / texts).read_text()
  runs.export(str(workdir), str(tmp_path / 'first'), 'student', form='cartridge_pt_fixed')
  kept = torch.load(tmp_path / 'first' / 'cartridge.pt', weights_only=False)
  assert kept.keys() == {'trainable_keys', 'trainable_values', 'fixed_keys', 'fixed_values'}
  np.testing.assert_array_equal(published_cartridges.read(tmp_path / 'first').cartridge.keys, found.keys)
  # What others can serve is taken back, though it does not say whose it is.
  served, again = runs.open_source(runs.RunOrModel(model=made.model.path, cartridge=str(tmp_path / 'theirs')), alone)
  jax.tree.map(np.testing.assert_array_equal, (again, served.base), (slots, session.base))
  digests = [
    fingerprint.starting_values(changed(onwards, path=str(tmp_path / path)).model)
    for path in ('theirs', 'theirs/cartridge.pt')
  ]
  assert digests[0] == digests[1] != fingerprint.starting_values(onwards.model)
  # In transformers, behind what a server loads.
  reference = transformers.AutoModelForCausalLM.from_pretrained(made.model.path).eval()
  _, (question, _) = texts_of(made)
  with torch.no_grad():
    past = past_of(tmp_path / 'theirs' / 'cartridge.pt')
    there = reference(torch.tensor([question]), past_key_values=past).logits.numpy()
  tokens = np.array([question] * 8, np.int32)  # As many rows as there are devices.
  places = np.tile(np.arange(len(question), dtype=np.int32), (8, 1))
  hidden, unembedding, _ = session.policy.apply(session.base, slots, tokens, places, np.ones_like(tokens))
  np.testing.assert_allclose((hidden @ unembedding.T)[:1, :, : there.shape[-1]], there, atol=1e-4)


@pytest.mark.slow
def test_training_goes_on_from_a_published_cartridge_and_resumes(run, tmp_path):
  made, workdir = run
  runs.export(str(workdir), str(tmp_path / 'theirs'), 'student', form='cartridge_pt')
  alone = dataclasses.replace(made, model=dataclasses.replace(made.model, cartridge=CartridgeConfig()))
  onwards = changed(alone, path=str(tmp_path / 'theirs'), document=made.model.cartridge.document).validate()
  loop.train(onwards, tmp_path / 'whole')
  trainer = dataclasses.replace(onwards.trainer, total_training_steps=1)
  loop.train(dataclasses.replace(onwards, trainer=trainer), tmp_path / 'parts')
  loop.train(onwards, tmp_path / 'parts')
  whole, parts = lines(tmp_path / 'whole'), lines(tmp_path / 'parts')
  assert [line['state_digest'] for line in parts] == [line['state_digest'] for line in whole]
  assert whole[0]['train/loss'] < lines(workdir)[0]['train/loss']  # It begins where the other run ended.
  # What it began with is not what it was: frozen slots are in no checkpoint.
  cartridge = published_cartridges.read(tmp_path / 'theirs').cartridge
  shutil.rmtree(tmp_path / 'theirs')
  published_cartridges.write(tmp_path / 'theirs', dataclasses.replace(cartridge, keys=2 * cartridge.keys), 'some/model')
  trainer = dataclasses.replace(onwards.trainer, total_training_steps=3)
  with pytest.raises(UserError, match=r'factors/values was .*accept_changes=model'):
    loop.train(dataclasses.replace(onwards, trainer=trainer), tmp_path / 'parts')


def test_an_evaluation_says_that_a_cartridge_is_of_another_document(run, tmp_path):
  made, workdir = run
  runs.export(str(workdir), str(tmp_path / 'ours'), 'student')
  about = cartridge_files.read_manifest(tmp_path / 'ours').about
  document, _ = texts_of(made)
  assert about['document_digest'] == identity.digest(document) and about['step'] == '2'
  data = dataclasses.replace(made.data, val_files=made.data.train_files)
  trainer = dataclasses.replace(made.trainer, test_freq=1)

  def said(document, **source):
    heard, asked = [], dataclasses.replace(changed(made, document=str(document)), data=data, trainer=trainer)
    output = tmp_path / f'{len(list(tmp_path.iterdir()))}.json'
    runs.evaluate_to_file(asked, runs.RunOrModel(**source), output=str(output), announce=heard.append)
    return [line for line in heard if 'document' in line]

  (tmp_path / 'same.txt').write_text(TEXT)
  (tmp_path / 'other.txt').write_text(TEXT.replace('dolor', 'color'))
  of_run, of_directory = (
    ({'workdir': str(workdir), 'model': None}, str(workdir)),
    (
      {'workdir': None, 'model': made.model.path, 'cartridge': str(tmp_path / 'ours')},
      str(tmp_path / 'ours'),
    ),
  )
  for source, name in (of_run, of_directory):
    [line] = said(tmp_path / 'other.txt', **source)
    assert line.startswith(f'{name} was made from another text than {tmp_path}/other.txt (model.cartridge.document')
  assert said(tmp_path / 'same.txt', **source) == []
  [line] = said(tmp_path / 'gone.txt', **source)
  assert 'is not checked: ' in line and 'gone.txt' in line
  # Questions that their grader cannot grade are named before any is asked, as when a run begins.
  (tmp_path / 'rows.jsonl').write_text('{"prompt": "What?", "environment": "longhealth", "answer": "b"}\n')
  data = dataclasses.replace(data, val_files=(str(tmp_path / 'rows.jsonl'),))
  with pytest.raises(UserError, match=r"rows\.jsonl, line 1: field 'choices'"):
    said(tmp_path / 'same.txt', **source)


def test_what_does_not_go_with_a_cartridge_is_refused(run, tmp_path, tmp_path_factory):
  made, workdir = run
  with pytest.raises(
    UserError, match='trained a cartridge; export it with --format=cartridge or --format=cartridge_pt'
  ):
    runs.export(str(workdir), str(tmp_path / 'out'), 'student', form='merged')
  with pytest.raises(UserError, match='--dtype=float16: .* float32 or bfloat16'):
    runs.export(str(workdir), str(tmp_path / 'out'), 'student', 'float16')
  settings = json.loads((workdir / 'config.json').read_text())
  assert settings['model']['cartridge']['tokens'] == 16
  settings['model']['cartridge']['tokens'] = 8
  other = tmp_path_factory.mktemp('other')
  (other / 'config.json').write_text(json.dumps(settings))
  with pytest.raises(UserError, match='cuts 8 slots to a multiple of 16'):  # Before anything else of it is read.
    runs.export(str(other), str(tmp_path / 'out'), 'student', form='cartridge_pt')
  with pytest.raises(UserError, match='the teacher of this run has no weights of its own'):
    runs.export(str(workdir), str(tmp_path / 'out'), 'teacher')
  with pytest.raises(UserError, match='--cartridge=dir goes with --model=HF_DIR: a run has its own'):
    runs.open_source(runs.RunOrModel(str(workdir), cartridge='dir'), made)
  with pytest.raises(UserError, match='--adapter=a and --cartridge=b: a model has one of them'):
    runs.open_source(runs.RunOrModel(model=made.model.path, adapter='a', cartridge='b'), made)
  of_path = dataclasses.replace(made, model=dataclasses.replace(made.model, cartridge=CartridgeConfig(path='c')))
  with pytest.raises(UserError, match='model.cartridge.path=c of the config: name that as --cartridge'):
    runs.open_source(runs.RunOrModel(model=made.model.path), of_path)
  assert not list(tmp_path.iterdir())


def test_a_probe_knows_no_cartridges_and_a_check_counts_the_document(config):
  of_rows = dataclasses.replace(config, data=dataclasses.replace(config.data, val_files=config.data.train_files))
  with pytest.raises(UserError, match='launch.probe compares .*: leave model.cartridge out'):
    probe.probe_model(of_rows)
  document, _ = texts_of(config)
  shown = check.check(config).text()
  bytes_of_document = 2 * 2 * len(document) * 2 * 8 * 4 / 2  # Keys and values, layers, tokens, heads over two devices.
  assert re.search(rf'document +always +{bytes_of_document / 1024:.1f} KiB', shown)
  gone = changed(config, document='gone.txt')
  with pytest.raises(UserError, match='gone.txt'):
    check.check(gone)


@pytest.mark.parametrize('name', ['adamw', 'lion', 'adafactor', 'muon'])
def test_slots_do_not_decay(name):
  optimizer = dataclasses.replace(Config().optimizer, name=name, weight_decay=0.5)
  policy = dataclasses.replace(
    huggingface.describe(SIZES | MODELS['qwen3'][1] | {'model_type': 'qwen3'}, ModelConfig()), adapter=KVPrefix(4, 1)
  )
  table = parameter_tables.trainable(policy.parameter_table())
  slots = parameter_tables.map_table(lambda row: jax.numpy.ones(row.shape), table)
  made = make_optimizer(optimizer_spec(optimizer, 1), table)
  still, _ = made.update(jax.tree.map(jax.numpy.zeros_like, slots), made.init(slots), slots)
  assert not any(leaf.any() for leaf in jax.tree.leaves(still))
