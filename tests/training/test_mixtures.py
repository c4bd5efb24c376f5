"""Runs that train a cartridge among others, which are placed beside it in random number and order."""

from __future__ import annotations

import dataclasses
import shutil

import jax
import numpy as np
import pytest

from sdpo_jax.config import MeshConfig
from sdpo_jax.distributed import accelerators
from sdpo_jax.errors import UserError
from sdpo_jax.inference import runs
from sdpo_jax.models import huggingface, parameters
from sdpo_jax.models.adapters import cartridge_files, kv_prefix, named_cartridges
from sdpo_jax.models.adapters.cartridge import Cartridge
from sdpo_jax.models.adapters.composition import composed
from sdpo_jax.models.adapters.kv_prefix import KVPrefix
from sdpo_jax.preflight.check import check
from sdpo_jax.training import cartridges, loop, startup, step
from sdpo_jax.training.mixtures import mixtures
from tests.models.adapters.prefixed_models import logits, with_prefix
from tests.training.cartridge_runs import (
  QUESTIONS,
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
def config(tmp_path_factory):
  """Return the settings of a run with two other cartridges beside the trained one."""
  folder = tmp_path_factory.mktemp('mixtures')
  config = make_config(folder)
  policy, params, _ = model_alone(config.model.path)
  origin = cartridge_files.Origin.of(config.model.path, policy.config)
  others = [str(folder / f'other{number}') for number in range(2)]
  for number, other in enumerate(others):
    read = kv_prefix.read_text(policy, params, list(range(3 + number, 19 + number)))
    cartridge_files.write(other, Cartridge(*map(np.asarray, read), 1), origin, 'float32')
  return changed(config, distractors=tuple(others), max_distractors=2).validate()


@pytest.mark.parametrize('mesh', [MeshConfig(1, 1), pytest.param(MeshConfig(4, 2), marks=pytest.mark.slow)])
def test_rows_learn_beside_the_cartridges_that_are_drawn(config, tmp_path, monkeypatch, mesh):
  """Sampling, log-probs and divergence are those of all slots of a row, composed; only its own are trained."""
  monkeypatch.setattr(accelerators, 'devices', lambda: jax.devices()[: mesh.fsdp * mesh.tensor])
  config = changed(config, mesh)
  session, state = opened(config, tmp_path)
  assert session.policy.adapter == KVPrefix(16, 1, members=2, member_slots=16, at_once=2)
  # The others are parameters of neither the model nor the trained cartridge.
  alone, slot = parameters.count(session.policy.base_policy().parameter_table()), 2 * 2 * 2 * 8
  said = '\n'.join(startup.describe(session, 15 * slot, None, 0, 0))
  assert f': {alone + 16 * slot:,} parameters, {15 * slot:,} of them trained' in said
  assert '16 slots, 1 of them frozen, beside up to 2 of 2 frozen cartridges; the teacher reads' in said
  assert session.flops_per_token == session.update_flops_per_token / 2 == 2 * alone
  assert f'\n{alone + 16 * slot:,} parameters, {15 * slot:,} of them trained, computed' in check(config).text()
  monkeypatch.setattr('sdpo_jax.training.mixtures.mixtures', lambda *_: np.array([[1, -1], [0, 1]], np.int32))
  graded, batch = generation_batch(session, state)
  policy, params, _ = model_alone(config.model.path)
  own = cartridges.of_session(session, state.trainable)
  others = [
    named_cartridges.read(path, config.model.path, policy.config) for path in config.model.cartridge.distractors
  ]
  document, questions = texts_of(config)
  rollouts, divergence = graded.rollouts, []
  lengths = rollouts.completion_mask.sum(1)
  for group, chosen in enumerate(((1,), (0, 1))):
    whole = composed([own, *(others[at] for at in chosen)], 'overlap', policy.config, '')
    samples = np.flatnonzero(rollouts.group == group)
    texts = [[*questions[group], *rollouts.completion_tokens[at, : lengths[at]].tolist()] for at in samples]
    segments = (np.arange(64) < np.array([[len(text)] for text in texts])).astype(np.int32)
    tokens = np.array([text + [0] * (64 - len(text)) for text in texts], np.int32)
    row = tokens, np.arange(64, dtype=np.int32) * segments, segments
    said = logits(*with_prefix(policy, params, whole.prefix, whole.keys, whole.values), row)
    said = said - np.logaddexp.reduce(said, axis=-1, keepdims=True)
    teachers = log_probs(config, [[*document, *text] for text in texts], lengths[samples].tolist())
    for at, text, student, teacher in zip(samples, texts, said, teachers, strict=True):
      length = lengths[at]
      student = student[len(text) - length - 1 : len(text) - 1]
      expected = student[np.arange(length), text[-length:]]
      np.testing.assert_allclose(rollouts.model_log_probs[at, :length], expected, atol=3e-5)
      divergence.append(np.sum(np.exp(teacher) * (teacher - student), axis=-1))
  before = jax.device_get(session.base)
  moved, report = step.run_update(session, state, batch)
  for sample, values in enumerate(divergence):
    np.testing.assert_allclose(report.token_values['divergence'][sample, : len(values)], values, rtol=1e-4, atol=5e-6)
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(session.base), before)
  assert {leaf.shape[2] for leaf in jax.tree.leaves(moved.trainable)} == {15} and len(QUESTIONS) == 2


@pytest.mark.slow
def test_a_run_among_others_evaluates_resumes_and_exports_its_own(config, tmp_path, monkeypatch):
  """The exported cartridge needs no other; a resume notices another distractor."""
  monkeypatch.setattr(accelerators, 'devices', lambda: jax.devices()[:1])
  config = changed(config, MeshConfig(1, 1))
  config = dataclasses.replace(
    config,
    data=dataclasses.replace(config.data, val_files=config.data.train_files),
    trainer=dataclasses.replace(config.trainer, test_freq=1, save_freq=1),
  ).validate()
  loop.train(config, tmp_path / 'whole')
  one = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, total_training_steps=1))
  loop.train(one, tmp_path / 'two')
  loop.train(config, tmp_path / 'two')
  whole, two = lines(tmp_path / 'whole'), lines(tmp_path / 'two')
  assert whole[-1]['train/loss'] == two[-1]['train/loss'] > 0
  assert [line['programs/compiled'] for line in whole if 'train/loss' in line] == [0, 0]
  gone = tmp_path / 'gone'
  shutil.copytree(config.model.cartridge.distractors[0], gone)
  others = (str(gone), config.model.cartridge.distractors[1])
  loop.train(changed(one, distractors=others), tmp_path / 'three')
  shutil.rmtree(gone)
  assert runs.export(str(tmp_path / 'three'), str(tmp_path / 'exported'), 'student') == 1
  shutil.copytree(config.model.cartridge.distractors[1], gone)
  with pytest.raises(UserError, match='distractor 0'):
    loop.train(changed(config, distractors=others), tmp_path / 'three')


def test_mixtures_are_of_every_number_and_order(config):
  about = np.zeros(50, np.int32)
  found = np.concatenate([mixtures(config, number, about) for number in range(4)])
  assert {tuple(row) for row in found.tolist()} == {(-1, -1), (0, -1), (1, -1), (0, 1), (1, 0)}
  counts = np.bincount((found >= 0).sum(1))
  assert (counts > 40).all()  # Each of three numbers is expected 67 times.
  np.testing.assert_array_equal(mixtures(config, 2, about), mixtures(config, 2, about))
  found = mixtures(config, 0, about + 2)  # Questions about the third document need its cartridge.
  assert {tuple(row) for row in found.tolist()} == {(1, -1), (1, 0)}


def test_cartridges_that_do_not_fit_are_named(config, tmp_path):
  policy, params, _ = model_alone(config.model.path)
  origin = cartridge_files.Origin.of(config.model.path, policy.config)
  read = [np.asarray(array) for array in kv_prefix.read_text(policy, params, list(range(8)))]
  cartridge_files.write(str(tmp_path / 'few'), Cartridge(*read, 1), origin, 'float32')
  first = config.model.cartridge.distractors[0]
  for settings, says in (
    ({'distractors': (first, str(tmp_path / 'few'))}, '16 visible slots in .*other0, 8 visible slots in .*few, 16 vis'),
    ({'sliding_window': 'windowed'}, 'must have .* 16 windowed slots in the trained one: leave out what differs'),
  ):
    with pytest.raises(UserError, match=says):
      huggingface.read_policy(config.model.path, changed(config, **settings).model)


def test_a_cartridge_whose_path_has_a_comma_is_one(config, tmp_path):
  first = config.model.cartridge.distractors[0]
  shutil.copytree(first, tmp_path / 'a,b')
  assert named_cartridges.describe(tmp_path / 'a,b') == named_cartridges.describe(first)
  assert changed(config, path=str(tmp_path / 'a,b'), tokens=None, num_frozen_tokens=1).validate()


def test_settings_that_contradict_are_refused(config):
  with pytest.raises(UserError, match='path=a,b names several cartridges, and a run trains one'):
    changed(config, path='a,b', tokens=None, distractors=(), max_distractors=3).validate()
  trainer = dataclasses.replace(config.trainer, test_divergence=True)
  with pytest.raises(UserError, match='test_divergence=true with model.cartridge.distractors'):
    dataclasses.replace(config, trainer=trainer).validate()
