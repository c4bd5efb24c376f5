"""Comparison of two models' tokenizers: whether every token id means the same to both."""

import json

import pytest

from sdpo_jax.errors import UserError
from sdpo_jax.models import same_tokenizer
from tests import tiny


@pytest.fixture
def folders(tmp_path):
  for name in ('one', 'other'):
    (tmp_path / name).mkdir()
    tiny.make_tokenizer(tmp_path / name)
  return tmp_path / 'one', tmp_path / 'other'


def change(folder, edit):
  """Change tokenizer.json."""
  values = json.loads((folder / 'tokenizer.json').read_text())
  edit(values)
  (folder / 'tokenizer.json').write_text(json.dumps(values, indent=3))


def test_neither_chat_nor_layout_of_the_file_make_another_tokenizer(folders):
  one, other = folders
  change(other, lambda values: values.update(truncation=None, padding=None))
  settings = json.loads((other / 'tokenizer_config.json').read_text())
  del settings['chat_template']  # As of a base model.
  (other / 'tokenizer_config.json').write_text(json.dumps(settings | {'eos_token': '<|endoftext|>'}))
  assert same_tokenizer.difference(one, other) is None


def swap(values):
  vocab = values['model']['vocab']
  vocab['a'], vocab['b'] = vocab['b'], vocab['a']


def name_anew(values):
  values['added_tokens'][2]['content'] = '<|turn|>'
  values['model']['vocab']['<|turn|>'] = values['model']['vocab'].pop('<|im_end|>')


def merge(values):
  """Add another merge for the same vocabulary."""
  values['model']['vocab']['ab'] = 300
  values['model']['merges'] = [['a', 'b']]


def test_what_differs_is_said(folders):
  one, other = folders
  change(other, swap)
  number = json.loads((one / 'tokenizer.json').read_text())['model']['vocab']['a']
  assert same_tokenizer.difference(one, other) == f"token id {number} is 'a' in {one} and 'b' in {other}"


def test_another_special_token_is_another_tokenizer(folders):
  one, other = folders
  change(other, name_anew)
  assert f"token id 258 is '<|im_end|>' in {one} and '<|turn|>' in {other}" == same_tokenizer.difference(one, other)


def test_other_merges_of_the_same_tokens_are_another_tokenizer(folders):
  one, other = folders
  change(one, merge)
  change(other, merge)
  assert same_tokenizer.difference(one, other) is None
  change(other, lambda values: values['model'].update(merges=[]))
  assert same_tokenizer.difference(one, other) == f'merges of {one} and {other} differ'


def test_a_missing_tokenizer_is_said(folders, tmp_path):
  with pytest.raises(UserError, match='no tokenizer'):
    (tmp_path / 'none').mkdir()
    (tmp_path / 'none' / 'config.json').write_text('{}')
    same_tokenizer.difference(folders[0], tmp_path / 'none')
