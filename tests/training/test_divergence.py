"""KL(teacher‖student) on text of either one, as evaluations of cartridges measure it."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest

from sdpo_jax.config import Config, MeshConfig, ModelConfig
from sdpo_jax.distributed import accelerators
from sdpo_jax.errors import UserError
from sdpo_jax.inference import runs
from sdpo_jax.models import huggingface
from sdpo_jax.rollout.sampler import Sampler
from sdpo_jax.training import divergence, loop
from sdpo_jax.training.opening import stop_token_ids
from sdpo_jax.types import Example
from tests.training.cartridge_runs import QUESTIONS, changed, lines, log_probs, make_config, opened, texts_of


@pytest.fixture(scope='module')
def config(tmp_path_factory) -> Config:
  return make_config(tmp_path_factory.mktemp('cartridges'))


@pytest.fixture
def alone(config, monkeypatch) -> Config:
  """Return settings of a run on one device whose evaluations measure the divergence."""
  monkeypatch.setattr(accelerators, 'devices', lambda: jax.devices()[:1])
  made = changed(config, MeshConfig(1, 1))
  return dataclasses.replace(
    made,
    data=dataclasses.replace(made.data, val_files=made.data.train_files),
    val_kwargs=dataclasses.replace(made.val_kwargs, n=4, temperature=0.0),
    trainer=dataclasses.replace(made.trainer, test_divergence=True, test_freq=1, val_before_train=False),
  ).validate()


def test_each_divergence_is_the_mean_over_the_tokens_that_its_writer_draws(alone, tmp_path):
  """By the model alone, with the whole document or its first tokens in its context, in float64."""
  session, state = opened(alone, tmp_path)
  document, questions = texts_of(alone)
  texts = {'student': document[:16], 'teacher': document}
  policy, params = huggingface.load(alone.model.path, ModelConfig(dtype='float32'))
  stops = stop_token_ids(alone, session.tokenizer)
  sampler = Sampler(policy, session.tokenizer, prompt_buckets=(140,), response_buckets=(4,), stop_token_ids=stops)
  examples = [
    Example(str(number), [{'role': 'user', 'content': text}], 'none', None, f'task{number}')
    for number, text in enumerate(QUESTIONS)
  ]
  measured = divergence.measure(session, state.trainable, examples, seed=3)
  assert measured.keys() == {'task0', 'task1'}
  for writer, text in texts.items():
    drawn = sampler.sample({}, params, [[*text, *row] for row in questions], n=4, seed=3, step=0, max_tokens=4)
    lengths = drawn.completion_mask.sum(1).tolist()
    asked = [
      [*questions[group], *tokens[:length]]
      for group, tokens, length in zip(drawn.group, drawn.completion_tokens, lengths, strict=True)
    ]
    teacher, student = (
      log_probs(alone, [[*read, *row] for row in asked], lengths) for read in (document, texts['student'])
    )
    terms = [np.sum(np.exp(t) * (t - s), axis=-1) for t, s in zip(teacher, student, strict=True)]
    for task in range(2):
      expected = np.concatenate([row for row, group in zip(terms, drawn.group, strict=True) if group == task]).mean()
      np.testing.assert_allclose(measured[f'task{task}'][f'kl_on_{writer}'], expected, rtol=2e-5)
      assert expected > 0.01


def test_a_run_and_the_command_measure_the_same(alone, tmp_path):
  """Everything is compiled before the first step."""
  said = []
  loop.train(alone, tmp_path / 'run', announce=said.append)
  first, second = lines(tmp_path / 'run')
  assert first['programs/compiled'] == second['programs/compiled'] == 0
  assert any('evaluation/divergence/64×4' in line for line in said)
  assert second['eval/rows/kl_on_student'] < first['eval/rows/kl_on_student']
  found = runs.evaluate_to_file(alone, runs.RunOrModel(str(tmp_path / 'run')), output=str(tmp_path / 'eval.json'))
  for name in ('kl_on_student', 'kl_on_teacher'):
    np.testing.assert_allclose(found.metrics['rows'][name], second[f'eval/rows/{name}'], rtol=1e-6)
  assert (
    json.loads((tmp_path / 'eval.json').read_text())['rows']['kl_on_student'] == found.metrics['rows']['kl_on_student']
  )


def test_what_has_no_teacher_with_a_document_is_refused(alone, tmp_path):
  no_document = changed(alone, document='', initializer='random')
  with pytest.raises(UserError, match='test_divergence=true compares a cartridge .* set model.cartridge.document'):
    no_document.validate()
  plain = dataclasses.replace(alone.model, cartridge=type(alone.model.cartridge)())
  sd = dataclasses.replace(alone.actor.self_distillation, teacher_regularization='ema')
  whole = dataclasses.replace(alone, model=plain, actor=dataclasses.replace(alone.actor, self_distillation=sd))
  with pytest.raises(UserError, match='there is no cartridge here: set trainer.test_divergence=false'):
    runs.evaluate_to_file(whole, runs.RunOrModel(model=plain.path), output=str(tmp_path / 'eval.json'))
