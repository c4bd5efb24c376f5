"""Comparison of two tokenizers, to decide whether one model can read another's token ids."""

from __future__ import annotations

import json
import os
from typing import Any

from sdpo_jax.errors import UserError
from sdpo_jax.models import identity, model_files, tokenizer
from sdpo_jax.models.control_tokens import Tokenizer


def check_teacher(student: str, teacher: str, setting: str) -> None:
  """Check that a model, or a tokenizer alone, that a setting names reads the student's token ids.

  Raises:
    UserError: a tokenizer is missing or damaged, or they differ.
  """
  model_files.resolve(teacher, weights=False, setting=setting)
  found = difference(student, teacher)
  if found is not None:
    raise UserError(
      f'{setting}={teacher} cannot teach {student}, since their tokenizers differ: {found}; use a teacher with the '
      'same tokenizer, such as another size of the same family.'
    )


def difference(path: str | os.PathLike, other: str | os.PathLike) -> str | None:
  """Return a phrase about how the tokenizers of two models differ; None if their token ids mean the same.

  Args:
    path: model directory or hub name of one model.
    other: model directory or hub name of the other.

  Raises:
    UserError: a tokenizer is missing or damaged.
  """
  one, two = tokenizer.read(path), tokenizer.read(other)
  here, there = _digests(one), _digests(two)
  differing = [part for part in here if here[part] != there[part]]
  if not differing:
    return None
  texts, others = ({number: text for text, number in each.get_vocab().items()} for each in (one, two))
  for number in sorted(texts.keys() | others.keys()):
    if texts.get(number) != others.get(number):
      said = [repr(each[number]) if number in each else 'nothing' for each in (texts, others)]
      return f'token id {number} is {said[0]} in {path} and {said[1]} in {other}'
  return f'{" and ".join(differing).replace("_", " ")} of {path} and {other} differ'


def _digests(read: Tokenizer) -> dict[str, str]:
  """Return digests of what a tokenizer's ids mean; unlike `identity.of_tokenizer`, without chat template and stops.

  They do not depend on the format of the files, which differs between versions of the library.

  Returns:
    Digests named vocabulary (every id with its text), merges (or the scores by which characters are joined to tokens)
    and special_tokens (the added ones).
  """
  added = sorted((number, token.content) for number, token in read.added_tokens_decoder.items())
  return {
    'vocabulary': identity.digest(sorted(read.get_vocab().items())),
    'merges': identity.digest(_joining(read)),
    'special_tokens': identity.digest(added),
  }


def _joining(read: Tokenizer) -> Any:
  """Return the rules by which a tokenizer joins characters: merges in order, or the scores of its tokens."""
  if not read.is_fast:
    return [read.encode(text, add_special_tokens=False) for text in identity.TEXTS]
  model = json.loads(read.backend_tokenizer.to_str())['model']
  return model.get('merges', model['vocab'])
