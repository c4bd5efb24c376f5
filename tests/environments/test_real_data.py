"""The paper's real questions through load → template → random-model rollout → grade → re-prompt (needs --datasets)."""

import json
import pathlib

import jax
import numpy as np
import pytest
from transformers import AutoTokenizer

from sdpo_jax.config import Config, EnvironmentsConfig, ModelConfig
from sdpo_jax.data import pipeline
from sdpo_jax.data.prompts import prompt_tokens
from sdpo_jax.environments import registry
from sdpo_jax.environments.grading import Graders
from sdpo_jax.models import huggingface
from sdpo_jax.models.tokenizer import stop_token_ids
from sdpo_jax.quickstart import small_tokenizer
from sdpo_jax.rollout.sampler import Sampler
from sdpo_jax.teacher.context import build_teacher_context
from sdpo_jax.training.specs import prompt_spec
from tests import tiny

N = 2


@pytest.fixture(scope='module')
def real(request):
  folder = request.config.getoption('--datasets')
  if folder is None:
    pytest.skip('needs --datasets=DIR')
  return pathlib.Path(folder)


@pytest.fixture(scope='module')
def model(real, tmp_path_factory):
  """Return a random model with a tokenizer made from the questions, so that prompts have their usual lengths."""
  small = {'num_hidden_layers': 1, 'num_attention_heads': 2, 'num_key_value_heads': 1}  # It says nothing but noise.
  path = tmp_path_factory.mktemp('real') / 'model'
  folder = tiny.make_model(path, vocab_size=4096, max_position_embeddings=4096, **small)
  lines = [
    line for name in ('sciknoweval/chemistry', 'tooluse') for line in open(real / name / 'test.json', encoding='utf-8')
  ]
  small_tokenizer.save(small_tokenizer.train([json.loads(line)['prompt'] for line in lines], 4096), folder)
  return folder


def gold(example):
  """Return a completion that says the ground truth in the question's format."""
  if example.environment == 'mcq':
    return f'<reasoning>\nas it is\n</reasoning>\n<answer>\n{example.ground_truth}\n</answer>'
  calls = json.loads(example.ground_truth)
  return ''.join(f'Thought: so\nAction: {c["Action"]}\nAction Input: {c["Action_Input"]}\n' for c in calls)


@pytest.mark.parametrize(
  'task, sizes',
  [
    ('tooluse', {'test': 68}),
    pytest.param('sciknoweval/chemistry', {'test': 210}, marks=pytest.mark.slow),
    pytest.param('sciknoweval/chemistry', {'train': 1890}, marks=pytest.mark.campaign),
  ],
)
def test_the_whole_way_from_file_to_teacher_prompt(real, model, task, sizes):
  config = Config()
  config.model.path = str(model)
  config.data.max_prompt_length = 2048
  tokenizer = AutoTokenizer.from_pretrained(model)
  policy, parameters = huggingface.load(model, ModelConfig(dtype='float32', remat='none'))
  sampler = Sampler(policy, tokenizer, max_batch_rows=32, stop_token_ids=stop_token_ids(str(model), tokenizer))
  for split, size in sizes.items():
    examples = pipeline.read_examples(
      str(real / task / f'{split}.json'),
      split,
      config.data,
      prompt_spec(config),
      tokenizer,
      registry,
      setting='data.train_files',
    )
    assert len(examples) == size
    prompts = [prompt_tokens(tokenizer, example, prompt_spec(config)) for example in examples]
    rollouts = sampler.sample(
      {}, parameters, prompts, n=N, temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0, max_tokens=4, seed=0, step=0
    )
    noise = list(rollouts.text)
    asked = [examples[group] for group in rollouts.group]
    truncated = [reason == 'length' for reason in rollouts.finish_reason]
    for profile in ('reference', 'clean'):
      with Graders(EnvironmentsConfig(profile=profile)) as graders:
        assert all(outcome.graded for outcome in graders.grade(asked, noise, truncated=truncated))
        # The first completion of each question says the truth instead of noise.
        rollouts.text[::N] = [gold(example) for example in examples]
        outcomes = graders.grade(asked, rollouts.text, truncated=truncated)
      assert all(outcome.graded for outcome in outcomes)
      scores = np.array([outcome.score for outcome in outcomes]).reshape(-1, N)
      # Two of its own answers the reference cannot score.
      assert scores[:, 0].sum() == size - 2 * ((task, profile) == ('tooluse', 'reference'))
    context = build_teacher_context(
      [examples[group].messages for group in rollouts.group],
      rollouts.group,
      rollouts.text,
      outcomes,
      config.actor.self_distillation,
      tokenizer,
      seed=0,
      step=0,
    )
    taught = context.mask.reshape(-1, N)
    assert taught[:, 1].sum() == size
    assert all(
      gold(examples[group]) in context.messages[row][-1]['content']
      for row, group in enumerate(rollouts.group)
      if context.solutions[row]
    )
    assert max(map(len, context.prompt_tokens)) <= config.actor.self_distillation.max_reprompt_len
  jax.clear_caches()
