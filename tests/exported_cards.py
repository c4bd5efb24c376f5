"""Reading the model card of an export, with what must be true of all of them."""

from __future__ import annotations

import os
import pathlib

from huggingface_hub import ModelCard
import yaml

from sdpo_jax.models import checksums


def read(folder: pathlib.Path, *private: str | os.PathLike) -> ModelCard:
  """Return the card of an export; none of the `private` texts may be in it, and SHA256SUMS must be right."""
  file = folder / 'README.md'
  text = file.read_text(encoding='utf-8')
  for each in private:
    assert str(each) not in text, text
  sums = checksums.known(folder)
  assert sums.keys() == {path.name for path in folder.iterdir()} - {checksums.SUMS}
  assert not checksums.differences(folder, sums)
  card = ModelCard.load(file)
  assert card.data.to_dict() == yaml.safe_load(text.split('---\n')[1])
  assert card.text.count('\n## ') == 6 and card.text.count('```') % 2 == 0
  return card
