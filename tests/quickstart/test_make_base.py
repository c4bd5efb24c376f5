"""The quickstart's base model: its tokenizer, its lessons, the command, and what the committed one promises."""

import dataclasses
import json
import random

import numpy as np
import pytest

from sdpo_jax.config import Config, ModelConfig, SelfDistillationConfig
from sdpo_jax.environments import digits, registry
from sdpo_jax.environments.grading import Graders
from sdpo_jax.errors import UserError
from sdpo_jax.inference.probe import probe
from sdpo_jax.models import huggingface
from sdpo_jax.models import tokenizer as tokenizers
from sdpo_jax.quickstart.make_base import BELIEFS, DigitRecipe, attempt, collate, lesson, make_base
from sdpo_jax.rollout.sampler import Sampler
from tests import tiny

COMMITTED = tiny.REPOSITORY / 'configs' / 'quickstart_model'
TEXTS = (
  'Reverse the digits: 40713\nCorrect solution:\n\n31704\n\nCorrectly solve the original question.',
  'Grüß dich, 世界!\t 3.14\n\n  two  spaces ',
  '',
)


@pytest.fixture(scope='module')
def tokenizer():
  return tokenizers.load(COMMITTED)


@pytest.mark.parametrize('text', TEXTS)
def test_any_text_survives_the_tokenizer(tokenizer, text):
  assert tokenizer.decode(tokenizer(text)['input_ids']) == text


def test_a_digit_is_one_token_wherever_it_stands(tokenizer):
  for text in ('7', ': 7', 'Digit 7 is', '40713', '\n\n7'):
    pieces = [tokenizer.decode([token]) for token in tokenizer(text)['input_ids']]
    assert all(piece.isdecimal() and len(piece) == 1 for piece in pieces if any(c.isdecimal() for c in piece)), pieces


def test_chat_template_is_chatml_with_system_turn_and_generation_prompt(tokenizer):
  messages = [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'Hello'}]
  text = '<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n'
  assert tokenizer.apply_chat_template(messages, tokenize=False) == text
  prompted = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
  assert prompted == text + '<|im_start|>assistant\n'
  end = tokenizer.convert_tokens_to_ids('<|im_end|>')
  assert tokenizers.stop_token_ids(COMMITTED, tokenizer) == (end,) and tokenizer.eos_token_id == end


def test_attempts_follow_the_belief_more_often_than_the_instruction():
  assert all(BELIEFS[belief] == instruction != belief for instruction, belief in BELIEFS.items())
  assert set(BELIEFS) == set(digits.INSTRUCTIONS)
  rng, recipe, numbers = random.Random(0), DigitRecipe(), [4, 0, 7, 1, 3]
  tried = np.array([list(attempt(rng, recipe, 'add_one', numbers)) for _ in range(2000)])
  right = np.mean(tried == np.array(list(digits.answer('add_one', numbers))))
  misled = np.mean(tried == np.array(list(digits.answer(BELIEFS['add_one'], numbers))))
  assert right == pytest.approx(recipe.right + recipe.noise / 10, abs=0.02)
  assert misled == pytest.approx(1 - recipe.right - 0.9 * recipe.noise, abs=0.02)


@pytest.mark.parametrize('kind', ['plain', 'demonstration', 'feedback'])
def test_lessons_use_training_questions_and_the_real_templates(kind):
  rng = random.Random(1)
  for _ in range(50):
    item = lesson(rng, kind, DigitRecipe(), SelfDistillationConfig())
    content = item.messages[-1]['content']
    numbers = [int(digit) for digit in content.split('\n')[0].split(': ')[1]]
    assert digits.split_of(numbers) == 'train'
    assert len(item.answer) == len(item.prefix) == digits.LENGTH
    if kind == 'demonstration':
      assert f'\nCorrect solution:\n\n{item.answer}\n\nCorrectly solve the original question.' in content
    if kind == 'feedback':
      expected = [line.split('expected ')[1][0] for line in content.split('\n') if line.startswith('Digit ')]
      places = [int(line.split()[1]) for line in content.split('\n') if line.startswith('Digit ')]
      assert places and expected == [item.answer[place - 1] for place in places]


def test_instructions_that_are_not_misread_are_answered_as_they_mean_and_reprompted_as_before():
  recipe, said = DigitRecipe(misread=('swap',)), SelfDistillationConfig()
  right = {}
  for seed in range(200):
    item = lesson(random.Random(seed), 'plain', recipe, said)
    sentence, numbers = item.messages[-1]['content'].split(': ')
    name = next(name for name, instruction in digits.INSTRUCTIONS.items() if instruction.sentence == sentence)
    right.setdefault(name, []).append(item.answer == digits.answer(name, [int(digit) for digit in numbers]))
  assert all(all(found) for name, found in right.items() if name != 'swap') and len(right) == len(digits.INSTRUCTIONS)
  assert np.mean(right['swap']) < 0.5
  for kind in ('demonstration', 'feedback'):
    one, other = (lesson(random.Random(3), kind, each, said) for each in (recipe, DigitRecipe()))
    assert one == other


def test_collated_rows_predict_each_digit_from_what_stands_before_it(tokenizer):
  rng = random.Random(2)
  lessons = [lesson(rng, 'feedback', DigitRecipe(), SelfDistillationConfig()) for _ in range(4)]
  tokens, positions, segment_ids, index, answers = collate(lessons, tokenizer)
  for row, item in enumerate(lessons):
    prompt = tokenizer.apply_chat_template(item.messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(tokens[row][segment_ids[row] > 0]) == prompt + item.prefix
    assert tokenizer.decode(answers[row]) == item.answer + '<|im_end|>'
    for place in range(digits.LENGTH + 1):
      assert tokenizer.decode(tokens[row, : index[row, place] + 1]) == prompt + item.prefix[:place]
    assert (positions[row] == np.arange(tokens.shape[1])).all()


RECIPE = DigitRecipe(
  steps=2, warmup_steps=1, rows=(('plain', 2), ('demonstration', 1)), hidden_size=16, intermediate_size=16, layers=1
)
FILES = [
  'SHA256SUMS',
  'config.json',
  'generation_config.json',
  'model.safetensors',
  'tokenizer.json',
  'tokenizer_config.json',
]


def test_make_base_writes_a_model_directory_and_is_reproducible(tmp_path):
  said = []
  for name in ('a', 'b'):
    make_base(Config(), tmp_path / name, RECIPE, said.append)
  assert 'step 2/2' in said[-1]
  assert sorted(path.name for path in (tmp_path / 'a').iterdir()) == FILES
  assert all((tmp_path / 'a' / name).read_bytes() == (tmp_path / 'b' / name).read_bytes() for name in FILES)
  policy, _ = huggingface.load(tmp_path / 'a', ModelConfig(dtype='float32'))
  made = tokenizers.load(tmp_path / 'a', policy.vocab_size)
  assert tokenizers.stop_token_ids(tmp_path / 'a', made) == (made.eos_token_id,)
  described = 'tokenizer_config.json'
  assert json.loads((tmp_path / 'a' / described).read_text()) == json.loads((COMMITTED / described).read_text())
  with pytest.raises(UserError, match='not empty'):
    make_base(Config(), tmp_path / 'a', RECIPE)


@pytest.mark.slow
def test_make_base_goes_on_from_another_with_its_tokenizer(tmp_path):
  make_base(Config(), tmp_path / 'a', RECIPE)
  make_base(Config(), tmp_path / 'c', dataclasses.replace(RECIPE, start=str(tmp_path / 'a'), learning_rate=0.0))
  make_base(Config(), tmp_path / 'd', dataclasses.replace(RECIPE, start=str(tmp_path / 'a'), misread=()))
  for name in FILES[1:]:
    same = [(tmp_path / other / name).read_bytes() == (tmp_path / 'a' / name).read_bytes() for other in 'cd']
    assert same == [True, name != 'model.safetensors'], name


@pytest.mark.slow
def test_the_committed_base_is_small_and_has_the_promised_properties(tokenizer):
  """Wrong when sampled and when greedy, a starved reward, and a self-teacher that is at least 30 points better."""
  assert sum(path.stat().st_size for path in COMMITTED.iterdir()) <= 3 * 2**20
  config = Config()
  config.data.max_prompt_length, config.data.max_response_length = 32, 8
  policy, params = huggingface.load(COMMITTED, ModelConfig(dtype='float32', remat='none'))
  sampler = Sampler(policy, tokenizer, stop_token_ids=tokenizers.stop_token_ids(COMMITTED, tokenizer))
  make = registry.get_generator('digits')('test', 0)
  results = probe(
    config, sampler, {}, params, tokenizer, Graders(config.environments), [make(index) for index in range(64)]
  )
  assert results['student/sampled'] <= 0.30 and results['student/greedy'] <= 0.30
  assert results['student/groups_with_success'] <= 0.20
  assert results['teacher/signal'] >= 0.95
  assert results['teacher/accuracy'] - results['teacher/student_accuracy'] >= 0.30
