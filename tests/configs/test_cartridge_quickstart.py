"""The shipped quickstart of a cartridge: its document is the task's, and its slots learn to answer like all of it."""

import json
import pathlib

import numpy as np
import pytest

from sdpo_jax.configs import cartridge_quickstart
from sdpo_jax.environments import facts
from sdpo_jax.preflight import check
from sdpo_jax.training.documents import read_texts
from sdpo_jax.training.opening import load_tokenizer
from tests import tiny


@pytest.mark.slow
def test_the_shipped_document_is_what_its_command_writes_and_no_file_is_overwritten(tmp_path):
  line = ['--task=document', '--config=configs/facts.py', f'--output={tmp_path}/text.txt']
  done = tiny.launch('make_base', *line)
  shipped = pathlib.Path(cartridge_quickstart.get_config().model.cartridge.document).read_bytes()
  assert done.returncode == 0 and (tmp_path / 'text.txt').read_bytes() == shipped
  assert shipped.decode() == facts.write(facts.draw(np.random.default_rng(0)))
  again = tiny.launch('make_base', *line, '--seed=1')
  assert again.returncode == 2 and 'already exists' in again.stderr
  assert (tmp_path / 'text.txt').read_bytes() == shipped


def test_the_questions_are_about_the_document_that_the_teacher_reads():
  other = cartridge_quickstart.get_config(document='text.txt')
  assert other.model.cartridge.document == 'text.txt'
  assert other.data.train_files == other.data.val_files == ('generator:facts?document=text.txt&shown=no',)
  config = cartridge_quickstart.get_config().validate()
  assert not check.check(config).odd
  texts = read_texts(config, load_tokenizer(config), teaches=True)
  # A token that begins the document, and four of each fact.
  assert len(texts.document) == 1 + 4 * 48 and texts.initial == texts.document[:16]


@pytest.mark.campaign
def test_the_slots_answer_like_the_whole_document(tmp_path):
  done = tiny.launch('train', '--config=configs/cartridge_quickstart.py', f'--workdir={tmp_path}')
  assert done.returncode == 0, done.stderr
  lines = [json.loads(line) for line in (tmp_path / 'metrics.jsonl').read_text().splitlines()]
  accuracy = {line['step']: line['eval/facts/mean@4'] for line in lines if 'eval/facts/mean@4' in line}
  assert accuracy[0] < 0.1 and accuracy[1000] >= 0.95
  divergence = [line['teacher/divergence'] for line in lines if line['step']]
  assert divergence[-1] < 0.02 * divergence[0]
