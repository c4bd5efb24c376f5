"""The code that docs/environments.md shows."""

import re

from tests import tiny

DOCS = (tiny.REPOSITORY / 'docs' / 'environments.md').read_text()


def block(name, language='python'):
  """Return the code block of the documentation that follows the mention of a file."""
  match = re.search(rf'`{re.escape(name)}`:\n\n```{language}\n(.*?)```', DOCS, re.DOTALL)
  assert match, f'docs/environments.md no longer shows {name}'
  return match.group(1)
