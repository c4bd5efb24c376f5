"""Completions that the teacher of a cartridge writes, in place of the student."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from sdpo_jax.config import Config, MeshConfig, ModelConfig
from sdpo_jax.distributed import accelerators
from sdpo_jax.errors import UserError
from sdpo_jax.models import huggingface
from sdpo_jax.rollout.sampler import Sampler
from sdpo_jax.training import loop, step
from sdpo_jax.training.opening import stop_token_ids
from sdpo_jax.training.run_programs import run_programs
from tests.training.cartridge_runs import changed, generation_batch, lines, log_probs, make_config, opened, texts_of


def written_by(settings: Config, writer: str) -> Config:
  rollout = dataclasses.replace(settings.rollout, sampled_by=writer)
  return dataclasses.replace(settings, rollout=rollout)


@pytest.fixture(scope='module')
def config(tmp_path_factory) -> Config:
  return make_config(tmp_path_factory.mktemp('cartridges'))


@pytest.fixture
def alone(config, monkeypatch) -> Config:
  """Return the settings on one device."""
  monkeypatch.setattr(accelerators, 'devices', lambda: jax.devices()[:1])
  return changed(config, MeshConfig(1, 1))


@pytest.mark.slow
@pytest.mark.parametrize('divided', [False, pytest.param(True, marks=pytest.mark.campaign)])
def test_the_teacher_writes_what_the_model_draws_behind_the_whole_document(
  config,
  tmp_path,
  monkeypatch,
  divided,
):
  """And the student's loss on it is the exact divergence, of the student as it is; also where devices share the
  document.
  """
  chosen = changed(config, MeshConfig(8 if divided else 1, 1), divide_document=divided)
  monkeypatch.setattr(accelerators, 'devices', lambda: jax.devices()[: chosen.mesh.fsdp])
  session, state = opened(written_by(chosen, 'teacher').validate(), tmp_path)
  graded, batch = generation_batch(session, state)
  document, questions = texts_of(chosen)
  policy, params = huggingface.load(chosen.model.path, ModelConfig(dtype='float32'))
  stops = stop_token_ids(chosen, session.tokenizer)
  sampler = Sampler(policy, session.tokenizer, prompt_buckets=(140,), response_buckets=(4,), stop_token_ids=stops)
  options = dict(n=4, seed=step.sampling_seed(state), step=1, max_tokens=4, temperature=1.0)
  expected = sampler.sample({}, params, [[*document, *question] for question in questions], **options)
  np.testing.assert_array_equal(graded.rollouts.completion_tokens, expected.completion_tokens)
  np.testing.assert_array_equal(graded.rollouts.completion_mask, expected.completion_mask)
  by_student = opened(chosen, tmp_path)[0]
  assert (generation_batch(by_student, state)[0].rollouts.completion_tokens != expected.completion_tokens).any()
  lengths = expected.completion_mask.sum(1).tolist()
  asked = [
    [*questions[group], *tokens[:length]]
    for group, tokens, length in zip(expected.group, expected.completion_tokens, lengths, strict=True)
  ]
  teacher = log_probs(chosen, [[*document, *row] for row in asked], lengths)
  student = log_probs(chosen, [[*document[:16], *row] for row in asked], lengths)
  divergence = [np.sum(np.exp(t) * (t - s), axis=-1) for t, s in zip(teacher, student, strict=True)]
  _, report = step.run_update(session, state, batch)
  np.testing.assert_allclose(report.loss, np.concatenate(divergence).mean(), rtol=1e-5)


def test_what_the_teachers_sampler_reads_is_told_apart(alone, tmp_path):
  """The document's keys and values are the teacher's, all else is the student's: for who counts memory."""
  session, state = opened(written_by(alone, 'teacher').validate(), tmp_path)
  found = run_programs(
    session.config, session.policy, session.base, state.trainable, session.mesh, teacher=session.teacher
  )
  prepare, (document, _) = found['prepare_base'], texts_of(alone)
  [kinds], [base] = prepare.holds, prepare.arguments
  sizes = dict.fromkeys(kinds, 0)
  for leaf, kind in zip(jax.tree.leaves(base), kinds, strict=True):
    sizes[kind] += leaf.size
  assert sizes['teacher base'] == 2 * 2 * 2 * len(document) * 8  # Keys and values, layers, heads, tokens, head_dim.
  model = sum(np.prod(row.shape) for row in session.policy.base_policy().parameter_table())
  assert sizes['base'] == model


@pytest.mark.slow
def test_a_student_with_the_whole_document_writes_what_its_teacher_does(alone, tmp_path):
  document, _ = texts_of(alone)
  whole = changed(alone, tokens=len(document))
  drawn = []
  for writer in ('student', 'teacher'):
    session, state = opened(written_by(whole, writer).validate(), tmp_path)
    drawn.append(generation_batch(session, state)[0].rollouts.completion_tokens)
  np.testing.assert_array_equal(*drawn)


@pytest.mark.slow
def test_a_run_on_the_teachers_text_compiles_everything_before_and_is_evaluated_by_the_student(alone, tmp_path):
  made = written_by(alone, 'teacher')
  made = dataclasses.replace(
    made,
    data=dataclasses.replace(made.data, val_files=made.data.train_files, val_max_samples=2),
    trainer=dataclasses.replace(made.trainer, test_freq=1, total_training_steps=2, val_before_train=False),
    val_kwargs=dataclasses.replace(made.val_kwargs, n=1, temperature=0.0),
  )
  said = []
  loop.train(made.validate(), tmp_path / 'run', announce=said.append)
  first, second = lines(tmp_path / 'run')
  assert first['programs/compiled'] == second['programs/compiled'] == 0
  assert second['train/loss'] < first['train/loss']
  assert not any(name.startswith('rollout_corr/') for name in first)
  assert any(' evaluation/prepare ' in line for line in said)
  with pytest.raises(UserError, match="rollout.sampled_by was 'teacher' and is now 'student'"):
    loop.train(written_by(made, 'student'), tmp_path / 'run')


@pytest.mark.parametrize(
  ('section', 'setting', 'value', 'sentence'),
  [
    ('model.cartridge', 'tokens', None, "rollout.sampled_by='teacher' is only for cartridges"),
    ('actor.policy_loss', 'loss_mode', 'vanilla', "loss_mode='vanilla', which has no teacher"),
    ('actor.self_distillation', 'teacher_context', 'reprompt', 'teacher_context to'),
    ('algorithm.rollout_correction', 'rollout_is', 'token', 'rollout_is: these weights'),
    ('actor', 'kl_loss_coef', 0.1, 'kl_loss_coef=0.1: the penalty'),
    ('actor', 'ppo_epochs', 2, 'is_clip=2.0 and several optimizer steps'),
  ],
)
def test_what_supposes_that_the_student_wrote_is_refused(config, section, setting, value, sentence):
  made = written_by(dataclasses.replace(config), 'teacher')
  if setting == 'tokens':
    made = dataclasses.replace(made, model=ModelConfig(path=config.model.path))
  else:
    made = _with(made, section.split('.'), setting, value)
  with pytest.raises(UserError, match=sentence):
    made.validate()


def _with(values, sections, setting, value):
  if not sections:
    return dataclasses.replace(values, **{setting: value})
  first, *rest = sections
  return dataclasses.replace(values, **{first: _with(getattr(values, first), rest, setting, value)})
