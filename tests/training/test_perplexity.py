"""The perplexity of reference answers, as evaluations measure it."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest
import torch
import transformers

from sdpo_jax.config import MeshConfig
from sdpo_jax.distributed import accelerators
from sdpo_jax.errors import UserError
from sdpo_jax.inference import runs
from sdpo_jax.training import loop, perplexity
from sdpo_jax.training.opening import load_tokenizer
from sdpo_jax.types import Example
from tests.training.cartridge_runs import QUESTIONS, changed, lines, make_config, opened, texts_of

ANSWERS = 'A man.', 'Nobody <|im_end|> knows it, not even the author of this.'


@pytest.fixture(scope='module')
def config(tmp_path_factory):
  """Return settings of a run on a cartridge of which evaluations measure the perplexity of two answers."""
  folder = tmp_path_factory.mktemp('cartridges')
  config = changed(make_config(folder), MeshConfig(1, 1))
  questions = folder / 'questions.jsonl'
  questions.write_text(
    ''.join(
      json.dumps({'prompt': question, 'answer': answer, 'dataset': f'task{index}'}) + '\n'
      for index, (question, answer) in enumerate(zip(QUESTIONS, ANSWERS, strict=True))
    )
  )
  config.data.val_files = (str(questions),)
  config.data.max_response_length, config.data.response_buckets = 64, (8, 64)
  config.val_kwargs = dataclasses.replace(config.val_kwargs, n=1)
  config.rollout.temperature = 0.5  # Of rollouts, not of what is measured.
  config.trainer.test_perplexity, config.trainer.test_freq, config.trainer.val_before_train = True, 2, False
  return config.validate()


@pytest.fixture
def alone(config, monkeypatch):
  monkeypatch.setattr(accelerators, 'devices', lambda: jax.devices()[:1])
  return config


def examples(*answers):
  return [
    Example(str(index), [{'role': 'user', 'content': text}], 'none', answer, f'task{index}')
    for index, (text, answer) in enumerate(zip(QUESTIONS, answers, strict=True))
  ]


def by_transformers(config, tokenizer, behind: list[int]) -> dict[str, float]:
  """Perplexities of the answers by transformers, which reads the tokens `behind` before each prompt."""
  model = transformers.AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32).eval()
  found = {}
  for index, (prompt, answer) in enumerate(zip(texts_of(config)[1], ANSWERS, strict=True)):
    said = tokenizer(answer, add_special_tokens=False, split_special_tokens=True).input_ids
    said.append(tokenizer.convert_tokens_to_ids('<|im_end|>'))
    tokens = torch.tensor([[*behind, *prompt, *said]])
    with torch.no_grad():
      scores = model(tokens).logits[0].double().log_softmax(-1)
    own = scores[-len(said) - 1 : -1].gather(1, torch.tensor(said)[:, None])
    found[f'task{index}'] = float(torch.exp(-own.mean()))
  return found


def test_perplexities_are_those_of_transformers(alone, tmp_path):
  """New slots stand for the first tokens of the document."""
  session, state = opened(alone, tmp_path)
  expected = by_transformers(alone, session.tokenizer, texts_of(alone)[0][:16])
  found = perplexity.measure(session, state.trainable, examples(*ANSWERS))
  assert {task: list(values) for task, values in found.items()} == {task: ['answer_perplexity'] for task in expected}
  for task, value in expected.items():
    np.testing.assert_allclose(found[task]['answer_perplexity'], value, rtol=1e-4)
  together = [dataclasses.replace(example, data_source='one') for example in examples(*ANSWERS)]
  lengths = [len(perplexity.answer_tokens(alone, session.tokenizer, example)) for example in together]
  pooled = np.average([np.log(value) for value in expected.values()], weights=lengths)
  one = perplexity.measure(session, state.trainable, together)
  np.testing.assert_allclose(one['one']['answer_perplexity'], np.exp(pooled), rtol=1e-4)


def test_a_run_and_the_command_measure_the_same(alone, tmp_path):
  """Everything is compiled before the first step."""
  said = []
  loop.train(alone, tmp_path / 'run', announce=said.append)
  first, last = lines(tmp_path / 'run')
  assert first['programs/compiled'] == last['programs/compiled'] == 0
  assert any('evaluation/perplexity/64×64' in line for line in said)
  found = runs.evaluate_to_file(alone, runs.RunOrModel(str(tmp_path / 'run')), output=str(tmp_path / 'eval.json'))
  for task in ('task0', 'task1'):
    np.testing.assert_allclose(
      found.metrics[task]['answer_perplexity'], last[f'eval/{task}/answer_perplexity'], rtol=1e-6
    )
  sd = dataclasses.replace(alone.actor.self_distillation, teacher_regularization='ema')
  plain = dataclasses.replace(alone.model, cartridge=type(alone.model.cartridge)())
  whole = dataclasses.replace(alone, model=plain, actor=dataclasses.replace(alone.actor, self_distillation=sd))
  of_model = runs.evaluate_to_file(whole, runs.RunOrModel(model=plain.path), output=str(tmp_path / 'of_model.json'))
  expected = by_transformers(alone, load_tokenizer(alone), [])
  for task, value in expected.items():
    np.testing.assert_allclose(of_model.metrics[task]['answer_perplexity'], value, rtol=1e-4)


@pytest.mark.parametrize(
  'answer, said',
  [
    *((answer, "no text as its 'answer': add it") for answer in (None, '', ' ', 7, ['A man.'])),
    ('word ' * 70, "'answer' has .* more than data.max_response_length=64: raise"),
  ],
)
def test_a_question_whose_answer_cannot_be_scored_is_named(config, answer, said):
  with pytest.raises(UserError, match=f"example '1': .*{said}"):
    perplexity.answer_tokens(config, load_tokenizer(config), examples(ANSWERS[0], answer)[1])
