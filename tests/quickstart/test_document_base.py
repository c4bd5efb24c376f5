"""The tiny model for documents: its tokenizer, its lessons, its beginning, and what the committed one promises."""

import json

import jax
import numpy as np
import pytest

from sdpo_jax.config import ModelConfig
from sdpo_jax.environments import facts
from sdpo_jax.errors import UserError
from sdpo_jax.models import huggingface
from sdpo_jax.models import tokenizer as tokenizers
from sdpo_jax.quickstart import document_base, document_tokenizer
from sdpo_jax.quickstart.document_base import DocumentRecipe, make_document_base
from sdpo_jax.quickstart.induction import with_circuit
from tests import tiny

REPOSITORY = tiny.REPOSITORY
COMMITTED = REPOSITORY / 'configs' / 'facts_model'
TEXTS = ('bako meta sopi ; dige', 'Grüß dich, 世界!\t 3.14\n\n  two  spaces ', 'basara bak', '')


@pytest.fixture(scope='module')
def tokenizer():
  return tokenizers.load(COMMITTED)


@pytest.mark.parametrize('text', TEXTS)
def test_any_text_survives_the_tokenizer(tokenizer, text):
  assert tokenizer.decode(tokenizer(text)['input_ids']) == text


def test_every_word_of_the_task_is_one_token(tokenizer):
  words = (*facts.KEYS, *facts.FIRST, *facts.SECOND, facts.END)
  ids = tokenizer(' ' + ' '.join(words))['input_ids']
  assert ids == [document_tokenizer.token_of(word) for word in words] and len(set(ids)) == len(words)


def test_an_answer_follows_its_question_and_ends_like_a_fact(tokenizer):
  system, user = {'role': 'system', 'content': 'bako meta sopi ;'}, {'role': 'user', 'content': 'bako'}
  render = tokenizer.apply_chat_template
  assert (
    render([system, user], tokenize=False, add_generation_prompt=True) == '<|document|> bako meta sopi ;<|ask|> bako'
  )
  assert render([user], tokenize=False, add_generation_prompt=True) == '<|ask|> bako'
  answered = [user, {'role': 'assistant', 'content': 'meta sopi ;'}]
  assert render(answered, tokenize=False) == '<|ask|> bako meta sopi ;'
  asked = render([user], add_generation_prompt=True, return_dict=False)
  assert render(answered, return_dict=False)[: len(asked)] == asked
  assert document_tokenizer.token_of(';') in tokenizers.stop_token_ids(COMMITTED, tokenizer)


def test_questions_stand_behind_their_document_each_by_itself(tokenizer):
  rng = np.random.default_rng(0)
  documents = [facts.draw(rng, 3), facts.draw(rng, 2)]
  tokens, positions, segment_ids, parents, index, answers = document_base.collate(documents, 3)
  for row, document in enumerate(documents):
    text = tokens[row][segment_ids[row] == 1]
    assert tokenizer.decode(text) == '<|document|> ' + facts.write(document)
    for question in range(3):
      own = segment_ids[row] == 2 + question
      fact = document[question % len(document)]
      assert tokenizer.decode(tokens[row][own]) == f'<|ask|> {fact.key} {fact.first} {fact.second}'
      assert positions[row][own].tolist() == list(range(len(text), len(text) + 4)) and (parents[row][own] == 1).all()
      assert tokenizer.decode(answers[row, question]) == ' ' + facts.answer(fact)
      places = index[row, question]
      assert own[places].all() and tokens[row, places[0]] == document_tokenizer.token_of(fact.key)
      assert (tokens[row, places[1:]] == answers[row, question, :2]).all()
    assert (parents[row][segment_ids[row] == 1] == 0).all()


def test_the_first_layer_begins_by_looking_at_the_token_before():
  """The scores of its biases alone, by rotations as complex numbers."""
  policy, params = huggingface.init(document_base.config_json(DocumentRecipe()), jax.random.key(0))
  attention = with_circuit(params, policy.config, 0)['layers']['attention']

  def turned(bias, position):
    return (bias[:16] + 1j * bias[16:]) * np.exp(1j * position * 1e6 ** (-np.arange(16) / 16))

  keys = np.stack([turned(attention['key_bias'][0, 0], position) for position in range(200)])
  for position in (1, 7, 199):
    scores = (turned(attention['query_bias'][0, 0], position) * keys[: position + 1].conj()).sum(-1).real / 32**0.5
    weights = np.exp(scores - scores.max())
    assert weights.argmax() == position - 1 and weights.max() > 3 * np.sort(weights)[-2]


TINY = DocumentRecipe(steps=2, facts=2, documents=1, short_facts=2, short_documents=1)  # One program.


def test_what_is_made_has_the_form_of_the_committed_model(tmp_path):
  said = []
  make_document_base(tmp_path / 'made', TINY, said.append)
  assert said[-1].startswith('step 2/2: cross-entropy ')
  assert sorted(file.name for file in (tmp_path / 'made').iterdir()) == sorted(
    file.name for file in COMMITTED.iterdir()
  )
  for name in ('config.json', 'generation_config.json', 'tokenizer.json', 'tokenizer_config.json'):
    assert (tmp_path / 'made' / name).read_bytes() == (COMMITTED / name).read_bytes()
  with pytest.raises(UserError, match='not empty'):
    make_document_base(tmp_path / 'made', TINY)


@pytest.mark.slow
def test_the_same_seed_makes_the_same_model(tmp_path):
  for name in ('a', 'b'):
    make_document_base(tmp_path / name, TINY)
  for file in (tmp_path / 'a').iterdir():
    assert file.read_bytes() == (tmp_path / 'b' / file.name).read_bytes()


def test_the_committed_model_knows_what_its_context_says():
  assert sum(path.stat().st_size for path in COMMITTED.iterdir()) <= 3 * 2**20
  policy, params = huggingface.load(COMMITTED, ModelConfig(dtype='float32', remat='none'))
  rng = np.random.default_rng(123)
  rows = document_base.collate([facts.draw(rng) for _ in range(4)], facts.FACTS)
  loss = jax.jit(document_base.cross_entropy, static_argnums=0)
  nats, right = loss(policy, params, rows)
  assert right >= 0.97 and nats < 0.01
  tokens, positions, segment_ids, parents, *rest = rows
  _, guessed = loss(policy, params, (tokens, positions, segment_ids, np.zeros_like(parents), *rest))
  assert guessed <= 0.02  # Without the document.


@pytest.mark.slow
def test_the_command_evaluates_the_committed_model(tmp_path):
  flags = ['--config=configs/facts.py', '--model=configs/facts_model', f'--output={tmp_path / "facts.json"}']
  finished = tiny.launch('evaluate', *flags, quick=True)
  assert finished.returncode == 0, finished.stderr
  assert json.loads((tmp_path / 'facts.json').read_text())['facts']['mean@1'] >= 0.97


@pytest.mark.campaign
def test_the_command_makes_a_model_that_is_as_good(tmp_path):
  flags = ['--task=facts', '--config=configs/facts.py', '--seed=3', f'--output={tmp_path / "made"}']
  finished = tiny.launch('make_base', *flags)
  assert finished.returncode == 0, finished.stderr
  policy, params = huggingface.load(tmp_path / 'made', ModelConfig(dtype='float32', remat='none'))
  rows = document_base.collate([facts.draw(np.random.default_rng(124)) for _ in range(4)], facts.FACTS)
  assert jax.jit(document_base.cross_entropy, static_argnums=0)(policy, params, rows)[1] >= 0.97
