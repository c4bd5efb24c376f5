"""What mkdocs calls when it builds the documentation (mkdocs.yml)."""

import importlib
import pathlib
import sys

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

sys.path[:0] = [str(pathlib.Path(__file__).parents[1])]  # Of sdpo_jax and of docs.

reference = importlib.import_module('docs.reference')


def on_files(files: Files, config: MkDocsConfig) -> Files:
  """Add the pages that are made from the code."""
  for name, content in reference.pages().items():
    files.append(File.generated(config, name, content=content))
  return files
