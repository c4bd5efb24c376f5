"""CITATION.cff is what readers of the Citation File Format 1.2.0 expect, and says what the model cards say."""

import re

import yaml

import sdpo_jax
from tests.house import sources

CITATION = sources.ROOT / 'CITATION.cff'


def test_the_citation_is_of_this_version_and_of_the_paper_that_cards_cite():
  values = yaml.safe_load(CITATION.read_text(encoding='utf-8'))
  # The keys that the format requires, and those that it knows of the ones used here.
  assert {'cff-version', 'message', 'title', 'authors'} <= values.keys()
  assert values.keys() <= {
    *('cff-version', 'message', 'title', 'authors', 'type', 'version', 'license', 'keywords', 'references'),
    *('url', 'repository-code', 'date-released', 'abstract', 'identifiers', 'preferred-citation'),
  }
  assert (values['cff-version'], values['version'], values['type']) == ('1.2.0', sdpo_jax.__version__, 'software')
  assert values['license'] == re.search('license = "(.*)"', (sources.ROOT / 'pyproject.toml').read_text())[1]
  [paper] = values['references']
  assert {'type', 'title', 'authors'} <= paper.keys() and paper['url'].endswith('2601.20802')
  card = (sources.ROOT / 'sdpo_jax/reporting/web/model_card_end.md').read_text(encoding='utf-8')
  readme = (sources.ROOT / 'README.md').read_text(encoding='utf-8')
  assert re.findall('@article{(.*),', readme) == re.findall('@article{(.*),', card)  # The key.
  bibtex = re.sub(r'\s+', ' ', card[card.index('@article') :]).replace('{\\"u}', 'ü')
  people = ' and '.join(f'{person["family-names"]}, {person["given-names"]}' for person in paper['authors'])
  assert f'author = {{{people}}}' in bibtex and f'title = {{{paper["title"]}}}' in bibtex
