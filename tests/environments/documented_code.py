"""The code that docs/environments.md shows."""

import re

from tests import tiny

DOCS = (tiny.REPOSITORY / 'docs' / 'environments.md').read_text()


def block(name):
  """Return the file that a block of the documentation writes, or the block that follows the mention of the file."""
  name = re.escape(name)
  match = re.search(rf"^cat > {name} <<'END'\n(.*?)^END$", DOCS, re.DOTALL | re.MULTILINE)
  match = match or re.search(rf'`{name}`:\n\n```python\n(.*?)```', DOCS, re.DOTALL)
  assert match, f'docs/environments.md no longer shows {name}'
  return match.group(1)
