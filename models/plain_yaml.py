"""YAML from strangers, read as texts: numbers with a million digits cost as little as other texts."""

from __future__ import annotations

from typing import Any

import yaml

from sdpo_jax.errors import first_line


def read(text: str) -> Any:
  """Return texts, also for numbers, None for null, and lists and mappings of them; tags do not count.

  Raises:
    ValueError: it is not YAML, or nested too deeply, or has merge keys (<<), with which a short text could grow large.
  """
  try:
    return yaml.load(text, _Loader)
  except (yaml.YAMLError, RecursionError) as error:
    raise ValueError(first_line(error)) from error


class _Loader(getattr(yaml, 'CBaseLoader', yaml.BaseLoader)):
  """A loader that constructs no numbers, dates or Python objects."""

  def plain(self, node: yaml.ScalarNode) -> str | None:
    """Construct a value without a tag."""
    if node.value == '<<':
      raise yaml.YAMLError('merge keys (<<) are not read')
    return None if not node.style and node.value in ('', '~', 'null', 'Null', 'NULL') else node.value


_Loader.add_constructor('tag:yaml.org,2002:str', _Loader.plain)
