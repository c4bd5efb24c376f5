"""The most likely tokens of student and teacher, recorded beside every token of a completion."""

import dataclasses
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdpo_jax.config import MeshConfig
from sdpo_jax.distributed import mesh as meshes
from sdpo_jax.learning import batching
from sdpo_jax.learning.readings import PolicyTopTokens, TopTokens
from sdpo_jax.learning.update import make_update, place_state
from sdpo_jax.models import tokenizer as tokenizers
from sdpo_jax.models.token_texts import TokenTexts
from sdpo_jax.teacher.signal import Teacher
from sdpo_jax.training import top_tokens
from sdpo_jax.training.specs import update_spec
from sdpo_jax.training.token_records import TokenRecords
from sdpo_jax.types import TeacherSignal
from tests import tiny
from tests.generation_batches import make_samples
from tests.updates import make_model, policy_shardings, settings

K = 5
FROZEN = {'actor__self_distillation__teacher_regularization': 'frozen', 'rollout__temperature': 0.7}
TRUST = {
  'actor__self_distillation__teacher_regularization': 'trust-region',
  'actor__self_distillation__teacher_update_rate': 0.3,
  'actor__pack_sequences': True,
}


def made(changes, devices=1):
  """Return a session, a state whose teacher differs from the student, and a generation batch."""
  config = settings(**changes)
  policy, parameters = make_model()
  _, others = make_model(seed=1)
  mesh = meshes.make_mesh(MeshConfig(fsdp=devices), jax.devices()[:devices])
  placed = jax.device_put(parameters, policy_shardings(policy, parameters, mesh))
  state = place_state(update_spec(config), placed, mesh)
  state = state.replace(teacher=jax.tree.map(lambda old, new: jax.device_put(new, old.sharding), state.teacher, others))
  shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
  session = types.SimpleNamespace(
    config=config,
    policy=policy,
    base={},
    mesh=mesh,
    teacher=Teacher(policy),
    update=make_update(policy, update_spec(config), shardings),
  )
  return session, state, make_samples(config), (parameters, others)


def distributions(session, parameters, prompts, rollouts):
  """Return log-probs [T, V] of each completion, from whole sequences, one at a time."""
  policy = session.policy
  length = max(map(len, prompts)) + rollouts.completion_mask.shape[1]

  @jax.jit
  def logits(tokens):
    hidden, unembedding, _ = policy.apply({}, parameters, tokens, jnp.arange(length)[None], jnp.ones_like(tokens))
    return hidden[0] @ unembedding.T

  found = []
  for prompt, tokens, mask in zip(prompts, rollouts.completion_tokens, rollouts.completion_mask, strict=True):
    whole = [*prompt, *tokens[mask]]
    row = np.zeros((1, length), np.int32)
    row[0, : len(whole)] = whole
    found.append(np.asarray(logits(row), np.float64)[len(prompt) - 1 : len(whole) - 1])
  return found


def log_softmax(logits, temperature):
  scaled = logits / temperature
  return (
    scaled
    - np.log(np.exp(scaled - scaled.max(-1, keepdims=True)).sum(-1, keepdims=True))
    - scaled.max(-1, keepdims=True)
  )


@pytest.mark.parametrize('changes', [FROZEN, pytest.param(TRUST, marks=pytest.mark.slow)])
def test_they_are_the_largest_of_whole_distributions(changes):
  session, state, batch, (student, teacher) = made(changes)
  found = top_tokens.measure(session, state, batch, K)
  config, rollouts = session.config, batch.rollouts
  of_student = distributions(session, student, batch.prompts, rollouts)
  of_teacher = distributions(session, teacher, batch.teacher_prompts, rollouts)
  if changes is TRUST:
    mixed = distributions(session, student, batch.teacher_prompts, rollouts)
    of_teacher = [0.7 * mine + 0.3 * other for mine, other in zip(of_teacher, mixed, strict=True)]
  for row in range(len(batch)):
    length = int(rollouts.completion_mask[row].sum())
    for said, logits in ((found.student, of_student), (found.teacher, of_teacher)):
      if said is found.teacher and not batch.taught[row]:
        assert (said.ids[row] == -1).all() and np.isnan(said.own[row]).all() and np.isnan(said.log_probs[row]).all()
        continue
      expected = log_softmax(logits[row], config.rollout.temperature)
      order = np.argsort(-expected, axis=-1)[:, :K]
      np.testing.assert_array_equal(said.ids[row, :length], order)
      np.testing.assert_allclose(said.log_probs[row, :length], np.take_along_axis(expected, order, -1), atol=2e-5)
      own = expected[np.arange(length), rollouts.completion_tokens[row, :length]]
      np.testing.assert_allclose(said.own[row, :length], own, atol=2e-5)
      assert (said.ids[row, length:] == -1).all()


@pytest.mark.slow
def test_eight_devices_say_what_one_says():
  (one, state, batch, _), (eight, spread, _, _) = made(FROZEN), made(FROZEN, devices=8)
  expected, found = top_tokens.measure(one, state, batch, K), top_tokens.measure(eight, spread, batch, K)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), expected, found)


def test_of_a_teacher_elsewhere_they_are_what_it_named():
  config = settings()
  batch = make_samples(config)
  shape = batch.rollouts.completion_mask.shape
  ids = np.tile(np.array([7, 9, -1], np.int32), (*shape, 1))
  given = np.tile(np.log([0.2, 0.7, 0.1]).astype(np.float32), (*shape, 1))
  tokens = np.where(batch.rollouts.completion_mask, 7, 0).astype(np.int32)
  batch = dataclasses.replace(
    batch,
    teacher_prompts=None,
    signal=TeacherSignal(token_ids=ids, log_probs=given),
    rollouts=dataclasses.replace(batch.rollouts, completion_tokens=tokens),
  )
  said = top_tokens.of_signal(batch, 2)
  assert said.ids[0, 0].tolist() == [9, 7]
  np.testing.assert_allclose(np.exp(said.log_probs[0, 0]), [0.7, 0.2], rtol=1e-6)
  first = np.argwhere(batch.rollouts.completion_mask)[0]
  assert np.exp(said.own[tuple(first)]) == pytest.approx(0.2)
  other = top_tokens.of_signal(dataclasses.replace(batch, rollouts=make_samples(config, seed=4).rollouts), 3)
  assert other.ids[0, 0].tolist() == [9, 7, -1] and np.isnan(other.log_probs[0, 0, 2])
  assert np.isnan(other.own[make_samples(config, seed=4).rollouts.completion_tokens > 10]).all()


def test_records_have_texts_of_tokens_that_put_together_are_the_completion(tmp_path):
  tiny.make_tokenizer(tmp_path)
  tokenizer = tokenizers.load(tmp_path)
  text = 'ab\n é</script>\u202e'
  tokens = tokenizer(text, add_special_tokens=False).input_ids + [tokenizer.eos_token_id]
  rollouts = batching.Rollouts.of_completions(
    np.zeros(1, np.int32), np.array([tokens + [0, 0]], np.int32), np.array([[True] * len(tokens) + [False] * 2])
  )
  length = len(tokens)
  said = PolicyTopTokens(
    ids=np.array([[[5, 6, -1]] * (length + 2)], np.int32),
    log_probs=np.array([[[-0.12345, -2.0, np.nan]] * (length + 2)], np.float32),
    own=np.full((1, length + 2), np.nan, np.float32),
  )
  nothing = PolicyTopTokens(np.full_like(said.ids, -1), np.full_like(said.log_probs, np.nan), said.own)
  records = TokenRecords(
    TokenTexts(tokenizer), rollouts, np.full((1, length + 2), 0.5, np.float32), TopTokens(said, nothing)
  )
  fields = json.loads(json.dumps(records.of(0), allow_nan=False))
  assert len(fields['tokens']) == length and fields['tokens'][-1] == tokenizer.eos_token

  def bytes_of(token):
    return bytes.fromhex(token[len('bytes:') :].replace('\\x', '')) if token.startswith('bytes:') else token.encode()

  assert b''.join(map(bytes_of, fields['tokens'][:-1])).decode() == text
  assert fields['advantages'] == [0.5] * length
  top = fields['top_tokens']
  assert top['teacher'] is None and top['student']['ids'] == [[5, 6]] * length
  assert top['student']['log_probs'][0] == [-0.1235, -2.0] or top['student']['log_probs'][0] == [-0.1234, -2.0]
  assert top['student']['own'] == [None] * length
  assert top['texts'] == {str(token): tokenizer.decode([token]) for token in (5, 6)}
  assert 'top_tokens' not in dataclasses.replace(records, top=None).of(0)


def test_the_setting_says_which_steps_record():
  config = settings(trainer__record_top_tokens=20, trainer__rollout_save_freq=5, trainer__total_training_steps=12)
  assert config.trainer.records_top_tokens
  assert [step for step in range(1, 13) if config.trainer.writes_rollouts(step)] == [1, 5, 10, 12]
  config.trainer.total_training_steps = 3  # A first try has something to look at.
  assert [step for step in range(1, 4) if config.trainer.writes_rollouts(step)] == [1, 3]
  config.trainer.rollout_save_freq = 0
  assert not config.trainer.records_top_tokens and not any(map(config.trainer.writes_rollouts, range(1, 6)))
