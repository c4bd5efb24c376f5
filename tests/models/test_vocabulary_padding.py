"""Rows that pad the vocabulary change no samples, log-probs, gradients or exports."""

import functools

import chex
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from sdpo_jax.config import Config, ModelConfig
from sdpo_jax.learning import update
from sdpo_jax.learning.batching import token_rows
from sdpo_jax.models import huggingface
from sdpo_jax.models import tokenizer as tokenizers
from sdpo_jax.models.families import qwen
from sdpo_jax.objective.loss import objective
from sdpo_jax.rollout.sampler import Sampler
from sdpo_jax.training.specs import update_spec
from tests import tiny

MULTIPLE = 100  # 264 tokens become 300 rows.


@pytest.fixture(scope='module', params=[True, False], ids=['tied', 'untied'])
def models(request, tmp_path_factory):
  """Return (directory, [(policy, parameters) without and with padding])."""
  folder = tiny.make_model(tmp_path_factory.mktemp('padding') / 'model', tie_word_embeddings=request.param)

  def load(multiple):
    return huggingface.load(folder, ModelConfig(dtype='float32', remat='none', vocab_multiple=multiple))

  return folder, [load(None), load(MULTIPLE)]


def test_pads_are_rows_of_zeros(models):
  _, [(plain, small), (padded, large)] = models
  assert plain.vocab_size == padded.vocab_size == 264
  assert small['embedding'].shape[0] == 264 and large['embedding'].shape[0] == 300
  np.testing.assert_array_equal(large['embedding'][:264], small['embedding'])
  assert not np.any(large['embedding'][264:])
  fresh = huggingface.init(
    {**qwen.QWEN3.write(padded.config), 'vocab_size': 264},
    jax.random.key(0),
    ModelConfig(dtype='float32', vocab_multiple=MULTIPLE),
  )[1]
  assert fresh['embedding'].shape[0] == 300 and not np.any(fresh['embedding'][264:]) and np.any(fresh['embedding'][263])


def test_large_vocabularies_are_padded_by_themselves(models):
  values = qwen.QWEN3.write(models[1][0][0].config)

  def rows(size):
    return huggingface.describe({**values, 'vocab_size': size}, ModelConfig()).config.padded_vocab_size

  assert rows(151936) == 152576 and rows(32768) == 32768 and rows(1000) == 1000


@pytest.mark.parametrize(
  'models', [True, pytest.param(False, marks=pytest.mark.slow)], ids=['tied', 'untied'], indirect=True, scope='module'
)
@pytest.mark.parametrize('top_p', [1.0, 0.9])
def test_the_same_is_sampled(models, top_p):
  folder, pairs = models
  drawn = []
  for policy, parameters in pairs:
    sampler = Sampler(policy, tokenizers.load(folder), max_batch_rows=8, stop_token_ids=(258,))
    drawn.append(
      sampler.sample(
        {},
        parameters,
        [[1, 2, 3], [4, 5]],
        n=4,
        temperature=1.5,
        top_p=top_p,
        top_k=-1,
        min_p=0.0,
        max_tokens=8,
        seed=1,
        step=0,
      )
    )
  np.testing.assert_array_equal(drawn[0].completion_tokens, drawn[1].completion_tokens)
  for name in ('sampling_log_probs', 'model_log_probs', 'entropy'):
    np.testing.assert_allclose(getattr(drawn[0], name), getattr(drawn[1], name), atol=1e-5)


def test_log_probs_and_gradients_are_the_same_and_pads_get_none(models):
  config = Config()
  completions = np.array([[7, 8, 9, 0], [3, 2, 1, 5]], np.int32)
  rows = token_rows([[1, 2], [4, 5, 6]], completions, completions > 0, 4)
  results = []
  for policy, parameters in models[1]:

    def loss(tree, policy=policy):
      return update.forward(policy, {}, tree, rows)

    of_rows = functools.partial(update.completion_log_probs, policy, update_spec(config), None, {})
    log_probs, entropy = jax.jit(of_rows)(parameters, rows, completions)

    def total(tree, loss=loss, policy=policy):
      hidden, unembedding = loss(tree)
      every = np.ones(completions.shape, np.float32)
      terms = {name: every for name in ('policy_coef', 'entropy_coef', 'advantages')}
      return objective(hidden, unembedding, None, completions, every, None, vocab_size=policy.vocab_size, **terms)[0]

    results.append((log_probs, entropy, jax.jit(jax.grad(total))(parameters)))
  (log_probs, entropy, small), (padded_log_probs, padded_entropy, large) = results
  chex.assert_trees_all_close((log_probs, entropy), (padded_log_probs, padded_entropy), atol=1e-5)
  for name in {'embedding', 'unembedding'} & set(small):
    assert not np.any(large[name][264:])
    np.testing.assert_allclose(large[name][:264], small[name], atol=1e-4)


def test_pads_are_not_exported(models, tmp_path):
  folder, [_, (policy, parameters)] = models
  huggingface.save(tmp_path / 'out', policy, parameters, source=folder, dtype='float32')
  before, after = (load_file(path / 'model.safetensors') for path in (folder, tmp_path / 'out'))
  chex.assert_trees_all_equal(before, after)
