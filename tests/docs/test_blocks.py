"""What the pages show is run as it is shown, or says why not."""

import os
import pathlib
import subprocess
import sys

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
LINKED = ('sdpo_jax', 'models', 'launch', 'configs', 'examples', 'benchmarks', 'requirements.txt')


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
@pytest.mark.parametrize('page', pages.PAGES)
def test_what_a_page_shows_works(page, tmp_path):
  if not any(block.reason is None and block.language not in pages.OUTPUT for block in pages.blocks(page)):
    pytest.skip('nothing on it is run')
  for name in LINKED:
    (tmp_path / name).symlink_to(tiny.REPOSITORY / name)
  variables = tiny.environment() | {'PYTHONPATH': str(tiny.REPOSITORY), 'NO_COLOR': '1'}
  variables['XDG_STATE_HOME'] = str(tmp_path / 'state')
  variables['PATH'] = f'{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ["PATH"]}'
  command = [sys.executable, '-m', 'tests.docs.pages', page]
  done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
  print(done.stdout, done.stderr[-20_000:])
  assert done.returncode == 0
