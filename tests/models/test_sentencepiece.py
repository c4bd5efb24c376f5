"""Directories with a SentencePiece model alone: ids and texts are those of SentencePiece."""

import random
import shutil
import types

import numpy as np
import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from transformers import AutoTokenizer, LlamaTokenizer

from sdpo_jax.config import Config, ModelConfig
from sdpo_jax.errors import UserError
from sdpo_jax.inference.chat import Chat
from sdpo_jax.models import huggingface, sentencepiece_model
from sdpo_jax.models import tokenizer as tokenizers
from sdpo_jax.models.control_tokens import control_strings
from sdpo_jax.rollout.results import Completion, Draft
from sdpo_jax.rollout.sampler import Sampler
from sdpo_jax.rollout.stops import StopStrings, to_text
from tests.letters import CONFIG
from tests.models import tokenizer_styles

STYLES = ('mistral', 'gemma')
TEXT = 'The answer is 4.\n\n  Zwölf 😀😀, é<0x0A>  x'


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
  root = tmp_path_factory.mktemp('sentencepiece')
  return {style: tokenizer_styles.make(style, root / style) for style in STYLES}


@pytest.fixture(scope='module')
def loaded(folders):
  return {style: tokenizers.load(folder) for style, folder in folders.items()}


def library(folder):
  return sentencepiece.SentencePieceProcessor(model_file=str(folder / 'tokenizer.model'))


@pytest.mark.parametrize('style', STYLES)
def test_ids_and_texts_are_those_of_sentencepiece(style, folders, loaded):
  pieces, tokenizer = library(folders[style]), loaded[style]
  ids = tokenizer.encode(TEXT, add_special_tokens=False)
  assert ids == pieces.encode(TEXT) and to_text(tokenizer, ids) == pieces.decode(ids) == TEXT
  assert len(tokenizer.get_vocab()) == pieces.get_piece_size()  # Nothing was added.
  for token in range(pieces.get_piece_size()):
    assert tokenizer.convert_ids_to_tokens(token) == pieces.id_to_piece(token)
  special = [tokenizer.bos_token_id, tokenizer.eos_token_id]
  assert special == [pieces.bos_id(), pieces.eos_id()]
  assert to_text(tokenizer, [*special, *ids, *special]).strip() == TEXT  # Control tokens are no text.


@pytest.mark.parametrize('style', STYLES)
def test_what_an_export_says_gives_others_the_same_tokens(style, folders, loaded, tmp_path):
  """For a Mistral, transformers would build another tokenizer."""
  shutil.copytree(folders[style], tmp_path, dirs_exist_ok=True)
  texts = tokenizers.exported(folders[style], loaded[style], None)
  assert set(texts) == {'tokenizer.json', 'tokenizer_config.json'}
  for name, text in texts.items():
    (tmp_path / name).write_text(text)
  assert tokenizers.exported(tmp_path, loaded[style], None) == {}
  others, messages = AutoTokenizer.from_pretrained(tmp_path), [{'role': 'user', 'content': TEXT}]
  options = {'add_generation_prompt': True, 'return_dict': False}
  expected = loaded[style].apply_chat_template(messages, **options)
  assert others.apply_chat_template(messages, **options) == expected
  assert others.decode(expected) == loaded[style].decode(expected)


def test_of_symbols_that_a_user_has_defined_delimiters_are_control_tokens(folders, loaded):
  tokenizer = loaded['gemma']
  ends = tokenizer.convert_tokens_to_ids(['<start_of_turn>', '<end_of_turn>'])
  text = 'a  b     c <table>d</table>'
  ids = tokenizer.encode(text, add_special_tokens=False)
  assert ids == library(folders['gemma']).encode(text)
  assert {'▁▁', '▁▁▁▁', '<table>', '</table>'} <= set(tokenizer.convert_ids_to_tokens(ids))
  assert to_text(tokenizer, [*ids, *ends]) == text
  strings = set(control_strings(tokenizer))
  assert {'<start_of_turn>', '<end_of_turn>'} <= strings and not {'▁▁', '<table>', '</table>'} & strings


@pytest.mark.parametrize('style', STYLES)
def test_merges_follow_the_scores_of_pieces_not_their_numbers(style, tmp_path):
  """Llama's runs of spaces are its first pieces, but have the lowest scores."""
  folder = tokenizer_styles.make(style, tmp_path / 'model')
  model = sentencepiece_model_pb2.ModelProto()
  model.ParseFromString((folder / 'tokenizer.model').read_bytes())
  normal = [piece for piece in model.pieces if piece.type == piece.NORMAL and len(piece.piece) > 1]
  for rank, piece in enumerate(random.Random(0).sample(normal, len(normal))):
    piece.score = -float(rank)
  (folder / 'tokenizer.model').write_bytes(model.SerializeToString())
  pieces, tokenizer = library(folder), tokenizers.load(folder)
  for sentence in tokenizer_styles.SENTENCES[:4]:
    assert tokenizer.encode(sentence, add_special_tokens=False) == pieces.encode(sentence)


def test_the_class_that_a_config_asks_for_is_not_trusted(folders, tmp_path):
  """For Mistral, transformers builds a tokenizer that loses the space before a text or, from 5.24 on, adds another
  after each control token; it is not used.
  """
  pieces, folder = library(folders['mistral']), folders['mistral']
  expected = [pieces.encode('The'), [pieces.piece_to_id('[INST]'), *pieces.encode('The')]]

  def ids(tokenizer):
    return [tokenizer.encode(text, add_special_tokens=False) for text in ('The', '[INST] The')]

  used = sentencepiece_model.load(folder)
  assert isinstance(used, LlamaTokenizer) and ids(used) == expected
  assert ids(AutoTokenizer.from_pretrained(folder)) != expected
  broken = tokenizer_styles.make('mistral', tmp_path / 'words')
  options = tokenizer_styles.STYLES['mistral'].pieces | {'model_type': 'word', 'hard_vocab_limit': False}
  tokenizer_styles.write_pieces(broken, **options)
  with pytest.raises(
    UserError, match=r'transformers splits text differently from SentencePiece: put a tokenizer\.json'
  ):
    tokenizers.load(broken)
  (broken / 'tokenizer.model').write_bytes(b'IQ== 0\nIg== 1\n')  # As Llama 3's, in the format of another library.
  with pytest.raises(UserError, match=r'tokenizer\.model is not a SentencePiece model .* put a tokenizer\.json'):
    tokenizers.load(broken)


@pytest.mark.parametrize('style', STYLES)
def test_a_stop_string_ends_where_the_decoded_text_first_holds_it(style, loaded):
  tokenizer, draw = loaded[style], random.Random(0)
  ordinary = [number for number in range(8, len(tokenizer))]
  for stop in ('answer is', ' two', '\n', '😀', 'é', '.'):
    stops = StopStrings(tokenizer, (stop,))
    middle = tokenizer.encode(f'The{stop} x', add_special_tokens=False)
    for _ in range(5):
      ids = [*draw.choices(ordinary, k=draw.randrange(40)), *middle, *draw.choices(ordinary, k=5)]
      holding = [end for end in range(1, len(ids) + 1) if stop in tokenizer.decode(ids[:end])]
      found = stops.find(ids)
      assert found in holding and stops.may_end(np.array(ids), holding[0])
      assert found == holding[0] or len(stop.encode()) > 1


@pytest.mark.parametrize('style', STYLES)
def test_an_answer_that_is_streamed_is_the_decoded_text(style, loaded, monkeypatch):
  """Token by token, even if half a character keeps the decoder from showing the one before it."""
  tokenizer = loaded[style]
  ids = tokenizer.encode(TEXT, add_special_tokens=False)
  drafts = [tokenizer.decode(ids[:end]) for end in range(1, len(ids))]
  assert any(text.endswith('\N{REPLACEMENT CHARACTER}' * 3) for text in drafts)
  assert any(not now.startswith(before) for before, now in zip(drafts, drafts[1:], strict=False))

  done = Completion(0, np.array(ids), *[np.zeros(0, np.float32)] * 3, stopped=True, text=tokenizer.decode(ids))
  looks = [*(Draft(0, np.array(ids[:end])) for end in range(1, len(ids))), done]
  monkeypatch.setattr(Sampler, 'stream', lambda *arguments, **options: looks)
  policy = huggingface.describe(CONFIG, ModelConfig()).on(None)
  session = types.SimpleNamespace(config=Config(), policy=policy, tokenizer=tokenizer, mesh=None, base={})
  generator = types.SimpleNamespace(
    session=session, parameters={}, prompt_tokens=lambda *arguments: [1], sampling_options=lambda step: {}
  )
  chat, written = Chat(generator, None, announce=lambda text: None), []
  assert chat.answer('?', written.append) == 'stop'
  assert ''.join(written) == TEXT and len(list(filter(None, written))) > 10
  assert chat.messages[-1] == {'role': 'assistant', 'content': TEXT}
