"""What mkdocs calls when it builds the documentation (mkdocs.yml)."""

import importlib
import pathlib
import re
import sys

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

sys.path[:0] = [str(pathlib.Path(__file__).parents[1])]  # Of sdpo_jax and of docs.

reference = importlib.import_module('docs.reference')
# Where a link leads on a code host, which shows the pages as they are → the page that is made of it here.
MADE_OF = {
  '../README.md': 'index.md',
  '../launch': 'reference/commands.md',
  '../sdpo_jax/config/schema.py': 'reference/settings.md',
  '../sdpo_jax/interface.py': 'reference/python.md',
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
  """Add the pages that are made from the code."""
  for name, content in reference.pages().items():
    files.append(File.generated(config, name, content=content))
  return files


def on_page_markdown(markdown: str, **_: object) -> str:
  """Let links to a source lead to the page that is made of it."""
  return re.sub(r'(?<=\]\()(\.\./[^)#]*)(?=[)#])', lambda found: MADE_OF.get(found[1], found[1]), markdown)
