"""The site of the documentation: built without a warning or a network, and of its own files alone."""

import json
import os
import re
import subprocess
import sys

import pytest

from benchmarks import chromium
from tests import tiny

LINK = re.compile(r'\]\((?!https?:|#)([^)#\s]+)[^)]*\)')
LOADED = re.compile(r'<(?:script|img|iframe)[^>]* src="([^"]*)"|<link[^>]* href="([^"]*)"|url\(["\']?(https?:[^"\')]*)')


def test_links_lead_to_files_of_the_repository_too():
  """A code host shows the pages as they are."""
  pages = [tiny.REPOSITORY / 'README.md', *(tiny.REPOSITORY / 'docs').glob('*.md')]
  links = [(page, link) for page in pages for link in LINK.findall(page.read_text(encoding='utf-8'))]
  assert len(links) > 100
  assert [(page.name, link) for page, link in links if not (page.parent / link).exists()] == []


def test_the_pages_stay_short():
  """Hand-written words; `<!-- made by` … `<!-- end -->` and the experiments are written by commands."""
  words = {
    page.name: len(
      re.sub(r'<!-- made by.*?<!-- end -->', '', page.read_text(encoding='utf-8'), flags=re.DOTALL).split()
    )
    for page in [tiny.REPOSITORY / 'README.md', *(tiny.REPOSITORY / 'docs').glob('*.md')]
  }
  assert words.pop('README.md') <= 900
  assert words.pop('experiments.md') > 0 and sum(words.values()) <= 28_070


@pytest.mark.docs
def test_the_site_is_built_and_loads_nothing_from_elsewhere(tmp_path):
  offline = {'http_proxy': 'http://127.0.0.1:9', 'https_proxy': 'http://127.0.0.1:9', 'NO_MKDOCS_2_WARNING': '1'}
  done = subprocess.run(
    [sys.executable, '-m', 'mkdocs', 'build', '--strict', '--quiet', '--site-dir', str(tmp_path)],
    cwd=tiny.REPOSITORY,
    env=os.environ | offline,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  pages = sorted(tmp_path.rglob('*.html'))
  assert {'index.html', 'settings.html', 'commands.html', 'tutorial.html'} <= {page.name for page in pages}
  settings = (tmp_path / 'reference' / 'settings.html').read_text()
  assert 'teacher_update_rate' in settings
  assert 'id="actorself_distillation"' in settings and '_distillation_1"' not in settings  # Every section once.
  assert '--topology' in (tmp_path / 'reference' / 'commands.html').read_text()
  files = [*pages, *tmp_path.rglob('*.css')]
  loaded = {address for file in files for found in LOADED.findall(file.read_text()) for address in found if address}
  assert [address for address in loaded if address.startswith(('http:', 'https:', '//'))] == []
  index = json.loads((tmp_path / 'search' / 'search_index.json').read_text())
  found = ' '.join(each['text'] for each in index['docs'] if each['location'].startswith('reference/settings'))
  words = re.split(index['config']['separator'], re.sub('<[^>]*>', ' ', found))
  assert {'teacher_update_rate', 'grader_timeout_s', 'lr'} <= set(words)  # Searched for without their section.
  program = chromium.installed()
  if program is None:
    pytest.skip('Chromium is not installed: what scripts would load is not seen')
  with chromium.opened(program) as page:
    page.call('Page.navigate', url=(tmp_path / 'tutorial.html').as_uri())
    page.until("document.readyState === 'complete' && document.querySelector('.md-typeset h1')")
    asked = page.requested()
  assert asked and [address for address in asked if not address.startswith(('file:', 'blob:'))] == []
