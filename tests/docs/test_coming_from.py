"""The page about other trainers: TRL's fields are all there, our names exist, and a script of TRL is soon ours."""

import dataclasses
import difflib
import re

import pytest

import sdpo_jax
from sdpo_jax.config import Config
from sdpo_jax.config.fields import flatten
from tests import tiny
from tests.docs import pages

TEXT = (tiny.REPOSITORY / 'docs' / 'coming_from.md').read_text(encoding='utf-8')
# Rows of the three tables: what it is called there, and here.
ROWS = re.findall(r'^\| (.+?) \| (.+?) \|$', TEXT, re.MULTILINE)
NAME = re.compile(r'`([a-z_]+[a-z_0-9]*)`')


@pytest.fixture(scope='module')
def trl():
  """Return the fields that TRL defines or redefines, and all with those of transformers, of which some are listed."""
  transformers = pytest.importorskip('transformers')
  sdpo = pytest.importorskip('trl.experimental.sdpo', reason='TRL is not installed')
  grpo = pytest.importorskip('trl')
  general = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
  kinds = (sdpo.SDPOConfig, grpo.GRPOConfig)
  all_fields = {field.name for kind in kinds for field in dataclasses.fields(kind)}
  of_trl = {part for kind in kinds for part in kind.__mro__ if part.__module__.startswith('trl')}
  redefined = {name for part in of_trl for name in part.__annotations__} & all_fields
  return all_fields - general | redefined, all_fields


def section(heading: str) -> str:
  return TEXT.split(f'## {heading}\n')[1].split('\n## ')[0]


@pytest.mark.docs
def test_every_field_of_trl_is_in_the_table_once(trl):
  own, known = trl
  listed = [
    name for row in re.findall(r'^\| (`.+?) \|', section("TRL's fields"), re.MULTILINE) for name in NAME.findall(row)
  ]
  assert sorted(name for name in listed if listed.count(name) > 1) == []
  assert sorted(own - set(listed)) == [] and sorted(set(listed) - known) == []


def test_the_settings_that_the_page_names_exist():
  known = set(flatten(Config()))
  parts = {name.rpartition('.')[0] for name in known}
  named = {name for _, here in ROWS for name in re.findall(r'`((?:[a-z_]+\.)+[a-z_]+)`', here)}
  assert sorted(name for name in named - known if not name.startswith(('sdpo_jax.', 'docs.'))) == []
  assert len(named) > 60
  cut = {name.rstrip('.…') for _, here in ROWS for name in re.findall(r'`([a-z_.]+\.)…`', here)}
  assert cut <= parts | {name.partition('.')[0] for name in known}


def test_a_script_of_trl_needs_ten_changed_lines_and_runs(tmp_path, monkeypatch):
  theirs, ours = (block.text for block in pages.blocks('docs/coming_from.md') if block.language == 'python')
  changes = [
    line for line in difflib.ndiff(theirs.splitlines(), ours.splitlines()) if line[0] in '+-' and line[2:].strip()
  ]
  assert sum(line[0] == '+' for line in changes) <= 10
  monkeypatch.chdir(tmp_path)
  datasets = pytest.importorskip('datasets')
  rows = datasets.Dataset.from_list([{'question': f'Q{number}', 'answer': f'#### {number}'} for number in range(4)])
  monkeypatch.setattr(datasets, 'load_dataset', lambda *_, **__: rows)
  small = {'data.train_batch_size': 2, 'actor.ppo_mini_batch_size': 2, 'data.max_prompt_length': 32}
  small |= {'data.max_response_length': 4, 'actor.self_distillation.max_reprompt_len': 256, 'model.dtype': 'float32'}
  small |= {'trainer.total_training_steps': 1}
  exec(ours.replace('sdpo_jax.train(', 'call = dict('), names := {})
  call = names['call'] | {'model': tiny.make_model(tmp_path / 'model')}
  call['changes'] = call['changes'] | small
  assert call.pop('workdir') == 'runs/gsm8k'
  assert sdpo_jax.train(**call).step == 1
  assert (tmp_path / 'runs' / 'model' / 'metrics.jsonl').is_file()  # Named after the model, as there is no config.
