"""The studies: every arm is a valid run of its own, documents are the task's, and the table says what the runs say."""

from __future__ import annotations

import dataclasses
import importlib
import json
import pathlib

import numpy as np
import pytest

from benchmarks import study
from sdpo_jax.config import Config
from sdpo_jax.config.overrides import override
from sdpo_jax.environments import facts


def settings_of(line: list[str]) -> Config:
  """Return what a command line asks for."""
  assert line[1:3] == ['-m', 'launch.train']
  config = None
  for part in line[4:]:
    name, _, value = part.removeprefix('--').partition('=')
    if name == 'config':
      file, _, arguments = value.partition(':')
      module = importlib.import_module(file.removesuffix('.py').replace('/', '.'))
      config = module.get_config(**dict(pair.split('=') for pair in arguments.split(',') if pair))
    else:
      override(config, name.removeprefix('config.'), value)
  return config.validate()


@pytest.mark.parametrize('name', study.STUDIES)
def test_every_arm_is_a_valid_run_unlike_the_others(name):
  root, studied = pathlib.Path('runs'), study.STUDIES[name]
  configs = [settings_of(study.command(arm, 1, root, 0)) for arm in studied.arms]
  assert all(config.seed == 1 for config in configs)
  settings = [json.dumps(dataclasses.asdict(config), default=str) for config in configs]
  assert len(set(settings)) == len(settings)
  assert len({study.workdir(root, arm, 1) for arm in studied.arms}) == len(studied.arms)
  names = [arm.name for arm in studied.arms]
  assert {arm for panel in studied.panels for arm in panel.arms} <= set(names)
  assert settings_of(study.command(studied.arms[0], 0, root, 7)).trainer.total_training_steps == 7


def test_the_arms_of_cartridges_differ_in_what_they_are_named_for():
  root = pathlib.Path('runs')
  made = {arm.name: settings_of(study.command(arm, 2, root, 0)) for arm in study.STUDIES['cartridge'].arms}
  base = made[study.SLOTS]
  assert base.model.cartridge.document == 'runs/documents/2.txt' and base.trainer.total_training_steps == 300
  assert base.data.train_files == ('generator:facts?document=runs/documents/2.txt&shown=no',)
  assert (base.optimizer.lr, base.optimizer.betas, base.rollout.sampled_by) == (0.08, (0.9, 0.999), 'student')
  assert made['off-policy'].rollout.sampled_by == 'teacher'
  assert made['JSD(½)'].actor.self_distillation.alpha == 0.5
  assert made['slots of another document'].model.cartridge.init_text == 'runs/documents/other_2.txt'
  top = made["teacher's top 20 and tail"].actor.self_distillation
  assert (top.distillation_topk, top.distillation_topk_of, top.distillation_add_tail) == (20, 'teacher', True)


def test_documents_are_those_of_the_command(tmp_path):
  study.make_documents(tmp_path, 0)
  shipped = pathlib.Path('configs/facts_document.txt').read_text()
  own, other = (file.read_text() for file in study.document_files(tmp_path, 0).values())
  assert own == shipped and other == facts.write(facts.draw(np.random.default_rng(1000)))


def test_the_table_says_what_the_finished_runs_say(tmp_path):
  arms = [study.Arm(name, 'c.py', {}) for name in ('one', 'two', 'three')]
  measures = study.GREEDY, study.ON_STUDENT
  curves = {('one', 0): {0: (0.0, 4.0), 100: (0.5, 0.5)}, ('one', 1): {0: (0.25, 4.0), 100: (0.75, 0.25)}}
  curves[('two', 0)] = {0: (0.125, 2.0), 50: (1.0, 0.1234)}
  curves[('three', 0)] = {0: (0.5, 0.5)}
  for (name, seed), curve in curves.items():
    folder = study.workdir(tmp_path, study.Arm(name, 'c.py', {}), seed)
    folder.mkdir(parents=True)
    lines = [
      {'step': step, 'eval/facts/mean@4': right, 'eval/facts/acc/mean@4': 0.9, 'eval/facts/kl_on_student': far}
      for step, (right, far) in curve.items()
    ]
    (folder / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
    if name != 'three':
      (folder / 'done').write_text('1.0\n')
  results = study.read([(arm, seed) for arm in arms for seed in (0, 1)], tmp_path, measures)
  assert results['accuracy'] == {
    'one': {0: {0: 0.0, 100: 0.5}, 1: {0: 0.25, 100: 0.75}},
    'two': {0: {0: 0.125, 50: 1.0}},
  }
  columns = [
    study.Column('at 100', study.GREEDY, lambda curve: curve.get(100)),
    study.Column('KL', study.ON_STUDENT, lambda curve: curve[max(curve)]),
  ]
  assert study.table(results, columns).splitlines() == [
    '| | at 100 | KL | seeds |',
    '|---|---|---|---|',
    '| one | 62% (50%–75%) | 0.375 (0.250–0.500) | 2 |',
    '| two | – | 0.123 | 1 |',
  ]
  fifths = study.table(results, study.fifths(results, study.GREEDY)).splitlines()
  assert fifths[0] == '| | step 0 | step 50 | step 100 | best | seeds |'
  assert fifths[2] == '| one | 12% (0%–25%) | – | 62% (50%–75%) | 62% | 2 |'


PAGES = {'quickstart': 'docs/method.md', 'lora': 'docs/lora.md', 'cartridge': 'docs/cartridges.md'}


@pytest.mark.parametrize('name', PAGES)
def test_pages_show_the_table_of_the_results(name):
  folder, studied = pathlib.Path('docs') / name, study.STUDIES[name]
  read = json.loads((folder / 'results.json').read_text())
  results = {
    measure: {
      arm: {int(seed): {int(step): value for step, value in curve.items()} for seed, curve in seeds.items()}
      for arm, seeds in arms.items()
    }
    for measure, arms in read.items()
  }
  shown = study.table(results, studied.columns or study.fifths(results, studied.measures[0]))
  assert (folder / 'table.md').read_text() == shown
  assert shown in pathlib.Path(PAGES[name]).read_text()
  assert f'{name}/curves.png' in pathlib.Path(PAGES[name]).read_text()
