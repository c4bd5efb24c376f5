"""What the pages show is run as it is shown, or says why not."""

import pytest

from tests import tiny
from tests.docs import pages

# Why code is not run here; a page names one of these, with what it needs.
REASONS = (
  'needs a TPU slice',
  'needs a GPU',
  'needs a network',
  'needs credentials',
  'sits at a terminal',
  'takes too long',
  'part of a file',
  'installs packages',
  'needs a checkpoint of yours',
)
LANGUAGES = ('bash', 'python', *pages.OUTPUT)


def test_every_block_is_run_or_says_why_not():
  found = [block for page in pages.PAGES for block in pages.blocks(page)]
  assert [f'{block.page}:{block.line}' for block in found if block.language not in LANGUAGES] == []
  assert [
    f'{block.page}:{block.line}: {block.reason}'
    for block in found
    if block.reason is not None and not block.reason.startswith(REASONS)
  ] == []
  assert len([block for block in found if block.reason is None]) > 10


def test_blocks_and_commands_are_found(tmp_path, monkeypatch):
  text = 'A\n<!-- not run: needs a GPU -->\n```bash\nx\n```\n\n1. B\n   ```python\n   if 1:\n     2\n   ```\n'
  (tmp_path / 'page.md').write_text(text)
  monkeypatch.setattr(tiny, 'REPOSITORY', tmp_path)
  first, second = pages.blocks('page.md')
  assert (first.line, first.language, first.reason) == (3, 'bash', 'needs a GPU')
  assert (second.line, second.text, second.reason) == (8, 'if 1:\n  2\n', None)
  shell = "a --x='1\n2'  # Why.\n# Alone.\nb \\\n  --y\ncat > f <<'END'\nc\nEND\nd | e\n"
  assert pages.commands(shell) == ["a --x='1\n2'  # Why.", 'b \\\n  --y', "cat > f <<'END'\nc\nEND", 'd | e']


@pytest.mark.docs
@pytest.mark.parametrize('page', sorted({*pages.PAGES} - {*pages.OF_SYSTEMS}))
def test_what_a_page_shows_works(page, tmp_path):
  pages.run_as_shown(page, tmp_path)
