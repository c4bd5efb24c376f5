"""A teacher at an endpoint in a run: what the server says is what is learned, all of it or nothing."""

from __future__ import annotations

import dataclasses
import json
import types

import jax
import numpy as np
import pytest

from sdpo_jax.config import Config, ModelConfig, TeacherEndpointConfig
from sdpo_jax.distributed import collectives
from sdpo_jax.distributed import mesh as meshes
from sdpo_jax.environments import json_server
from sdpo_jax.errors import UserError
from sdpo_jax.models import huggingface, tokenizer
from sdpo_jax.teacher.endpoint import Endpoint
from sdpo_jax.training import endpoint_teacher
from sdpo_jax.training.loop import train
from sdpo_jax.training.run_programs import abstract_parameters, run_programs
from sdpo_jax.training.specs import declared_buckets, objective_spec
from tests import tiny
from tests.generation_batches import make_samples
from tests.local_server import Answer, Server
from tests.scoring_server import Scorer, log_probs
from tests.updates import MODEL, make_model, settings, update

WIDTH = {'vllm': 20, 'fireworks': 5}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
  monkeypatch.setattr(json_server, 'FIRST_PAUSE_S', 0.0)


def configured(url: str, dialect: str = 'vllm', **changes) -> Config:
  config = settings(actor__ppo_micro_batch_size=4, rollout__temperature=1.0)
  sd = config.actor.self_distillation
  sd.teacher_regularization = 'base'
  sd.teacher_endpoint = TeacherEndpointConfig(
    url=url, dialect=dialect, model='m', tokenizer='t', top_k=WIDTH[dialect], retries=0
  )
  for name, value in changes.items():
    setattr(sd, name, value)
  return config.validate()


@pytest.fixture(scope='module')
def teacher():
  policy, parameters = huggingface.init(MODEL, jax.random.key(5), ModelConfig(dtype='float32', remat='none'))
  return policy, parameters, Scorer(policy, parameters, types.SimpleNamespace(decode=str))


def ask(config, batch):
  """Return the signal of a batch, asked as a run asks for it."""
  spec = objective_spec(config)
  chosen = config.actor.self_distillation.teacher_endpoint
  with Endpoint(chosen, 64) as endpoint:
    return endpoint_teacher.signal(endpoint, batch.teacher_prompts, batch.rollouts, batch.taught, spec)


@pytest.mark.parametrize('dialect', [pytest.param('vllm', marks=pytest.mark.slow), 'fireworks'])
def test_the_divergence_is_over_the_tokens_that_the_server_names(teacher, dialect):
  large, theirs, scorer = teacher
  policy, parameters = make_model()
  with Server(scorer) as server:
    config = configured(server.url, dialect)
    batch = make_samples(config)
    signal = ask(config, batch)
    assert len(server.bodies) == batch.taught.sum()
  external = dataclasses.replace(batch, teacher_prompts=None, signal=signal)
  _, [report] = update(config, policy, {}, parameters, None, external)
  alpha, mass = config.actor.self_distillation.alpha, []
  for sample in np.flatnonzero(batch.taught):
    length = int(batch.rollouts.completion_mask[sample].sum())
    completion = batch.rollouts.completion_tokens[sample, :length].tolist()
    taught = log_probs(large, theirs, [*batch.teacher_prompts[sample], *completion])[-length - 1 : -1]
    own = log_probs(policy, parameters, [*batch.prompts[sample], *completion])[-length - 1 : -1]
    ids = np.argsort(-taught, axis=1)[:, : WIDTH[dialect]]

    def with_rest(values, ids=ids):
      kept = np.exp(np.take_along_axis(values, ids, axis=1))
      return np.concatenate([kept, 1 - kept.sum(1, keepdims=True)], axis=1)

    s, t = with_rest(own), with_rest(taught)
    mixture = (1 - alpha) * s + alpha * t
    expected = ((1 - alpha) * s * np.log(s / mixture) + alpha * t * np.log(t / mixture)).sum(1)
    np.testing.assert_allclose(report.token_values['divergence'][sample, :length], expected, rtol=1e-4, atol=1e-6)
    mass.append(report.token_values['teacher_tail'][sample, :length] - t[:, -1])
  assert np.abs(np.concatenate(mass)).max() < 1e-4


def test_of_the_sampled_token_alone_the_server_knows_all(teacher):
  large, theirs, scorer = teacher
  with Server(scorer) as server:
    config = configured(server.url, full_logit_distillation=False, alpha=1.0)
    batch = make_samples(config)
    signal = ask(config, batch)
  assert signal.token_ids.shape[-1] == 1
  for sample in range(len(batch)):
    length = int(batch.rollouts.completion_mask[sample].sum())
    completion = batch.rollouts.completion_tokens[sample, :length]
    if not batch.taught[sample]:
      assert (signal.token_ids[sample] == -1).all()
      continue
    np.testing.assert_array_equal(signal.token_ids[sample, :length, 0], completion)
    said = log_probs(large, theirs, [*batch.teacher_prompts[sample], *completion.tolist()])[-length - 1 : -1]
    np.testing.assert_allclose(signal.log_probs[sample, :length, 0], said[np.arange(length), completion], rtol=1e-5)
    assert (signal.token_ids[sample, length:] == -1).all()


def test_the_programs_of_a_run_read_the_signal_and_no_teacher():
  config = configured('http://localhost:1')
  policy, _ = make_model()
  mesh = meshes.make_mesh(config.mesh)
  found = run_programs(config, policy, *abstract_parameters(policy, mesh), mesh, held_out=0)
  updates = [program for program in found.values() if program.kind == 'update']
  assert len(updates) == len(declared_buckets(config).prompt) * len(declared_buckets(config).response)
  for program in updates:
    batch = program.arguments[3]
    assert batch.teacher is None and batch.signal.token_ids.shape == (*batch.targets.shape, 20)


def test_processes_share_the_requests_and_have_the_same(teacher, monkeypatch):
  """Each asks about its own share; what one could not have scored ends the step on all."""
  _, _, scorer = teacher
  with Server(scorer) as server:
    config = configured(server.url, 'fireworks')
    batch = make_samples(config)
    alone = ask(config, batch)
    together = len(server.bodies)
    monkeypatch.setattr(jax, 'process_count', lambda: 2)
    shares = []
    for process in range(2):
      monkeypatch.setattr(jax, 'process_index', lambda process=process: process)
      monkeypatch.setattr(collectives, 'gathered', lambda found, what: shares.append(found) or [[], []])
      with pytest.raises(ValueError):  # Shares are missing.
        ask(config, batch)
    assert len(server.bodies) == 2 * together and all(0 < len(share) < together for share in shares)
    monkeypatch.setattr(jax, 'process_index', lambda: 0)
    monkeypatch.setattr(collectives, 'gathered', lambda found, what: shares)
    found = ask(config, batch)
    np.testing.assert_array_equal(found.token_ids, alone.token_ids)
    np.testing.assert_array_equal(found.log_probs, alone.log_probs)
    monkeypatch.setattr(collectives, 'gathered', lambda found, what: [found, UserError('Not here.')])
    with pytest.raises(UserError, match='Not here'):
      ask(config, batch)
  monkeypatch.setattr(collectives, 'gathered', lambda found, what: [found, shares[1]])
  with pytest.raises(UserError, match='has not scored completion'):  # The server is gone.
    ask(config, batch)


def of_endpoint(**changes):
  def change(config):
    for name, value in changes.items():
      setattr(config.actor.self_distillation.teacher_endpoint, name, value)

  return change


def of(**changes):
  def change(config):
    for name, value in changes.items():
      *sections, leaf = name.split('__')
      target = config
      for section in sections:
        target = getattr(target, section)
      setattr(target, leaf, value)

  return change


@pytest.mark.parametrize(
  ('change', 'sentence'),
  [
    (of_endpoint(model=''), 'teacher_endpoint.model is empty'),
    (of_endpoint(tokenizer=' '), 'teacher_endpoint.tokenizer is empty'),
    (of_endpoint(dialect='fireworks'), "top_k=20 with dialect='fireworks', which gives 5"),
    (of_endpoint(url='http://user:pw@host/v1'), 'holds a user or a password'),
    (of_endpoint(url=''), "teacher_endpoint.model='m' and .* have no effect with .*teacher_endpoint.url=''"),
    (of(rollout__temperature=0.7), 'at temperature 1'),
    (of(actor__self_distillation__teacher_regularization='ema'), "teacher_regularization to 'base'"),
    (of(actor__self_distillation__teacher_model='other'), 'which has another teacher'),
    (of(actor__policy_loss__loss_mode='vanilla'), 'has no effect with actor.policy_loss.loss_mode'),
  ],
)
def test_settings_that_contradict_the_endpoint_are_refused(change, sentence):
  config = configured('http://localhost:1')
  change(config)
  with pytest.raises(UserError, match=sentence):
    config.validate()


@pytest.mark.slow
def test_a_run_learns_from_the_server_as_from_the_model_and_takes_no_half_step(tmp_path):
  """All tokens are asked for; the model on the devices is compared over the whole vocabulary."""
  path = tiny.make_experiment(tmp_path)
  folder = tiny.make_model(tmp_path / 'teacher', seed=1, hidden_size=48)
  namespace = {'__name__': 'tiny_config'}
  exec(path.read_text(), namespace)  # It registers the task of the experiment.

  def experiment(**changes):
    config = namespace['get_config']()
    sd = config.actor.self_distillation
    sd.teacher_context, sd.teacher_regularization = 'prompt', 'base'
    sd.distillation_topk, sd.distillation_add_tail = None, False
    config.trainer.total_training_steps = 2
    for name, value in changes.items():
      setattr(sd, name, value)
    return config

  policy, parameters = huggingface.load(folder, ModelConfig(dtype='float32', remat='none'))
  scorer, limit = Scorer(policy, parameters, tokenizer.load(folder)), [10**9]

  def respond(body):
    limit[0] -= 1
    return scorer(body) if limit[0] >= 0 else Answer(status=400)

  def lines(workdir):
    return [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]

  train(experiment(teacher_model=str(folder)), tmp_path / 'in_mesh')
  with Server(respond) as server:
    asked = TeacherEndpointConfig(url=server.url, model='m', tokenizer=str(folder), top_k=264, retries=0)
    train(experiment(teacher_endpoint=asked), tmp_path / 'external')
    ours, theirs = lines(tmp_path / 'in_mesh'), lines(tmp_path / 'external')
    for name in ('train/loss', 'teacher/divergence', 'train/grad_norm'):
      assert [line[name] for line in ours if name in line] == pytest.approx(
        [line[name] for line in theirs if name in line], rel=1e-3, abs=1e-7
      )
    limit[0] = 2 + 8 + 3  # The check, the first step, a part of the second.
    with pytest.raises(UserError, match='has not scored completion'):
      train(experiment(teacher_endpoint=asked), tmp_path / 'cut')
    assert lines(tmp_path / 'cut')[-1]['step'] == 1
    limit[0] = 10**9
    assert train(experiment(teacher_endpoint=asked), tmp_path / 'cut').step == 2
    assert lines(tmp_path / 'cut')[-1]['state_digest'] == theirs[-1]['state_digest']
