"""The studies: every arm is a valid run of its own, documents are the task's, and the table says what the runs say."""

from __future__ import annotations

import dataclasses
import importlib
import json
import pathlib

import numpy as np
import pytest

from benchmarks import repeated_answers, study, ways
from sdpo_jax.config import Config
from sdpo_jax.config.overrides import override
from sdpo_jax.environments import facts
from sdpo_jax.quickstart import document_tokenizer as tokenizer
from sdpo_jax.rollout.results import Completion
from sdpo_jax.types import Rollouts


def settings_of(line: list[str]) -> Config:
  """Return what a command line asks for."""
  assert line[1] == '-m' and line[2] in ('launch.train', 'benchmarks.repeated_answers')
  config = None
  [start] = (at for at, part in enumerate(line) if part.startswith('--config='))
  for part in line[start:]:
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
  settings = [
    json.dumps((dataclasses.asdict(config), arm.program), default=str)
    for config, arm in zip(configs, studied.arms, strict=True)
  ]
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
  written = study.document_files(tmp_path, 0)
  assert written[study.DOCUMENT].read_text() == shipped
  assert written[study.OTHER_DOCUMENT].read_text() == facts.write(facts.draw(np.random.default_rng(1000)))


def test_the_answers_of_ways_are_what_the_document_says(tmp_path):
  study.make_documents(tmp_path, 3)
  written = study.document_files(tmp_path, 3)
  words = written[study.MAP].read_text().split()
  following = dict(zip(words[::3], words[1::3], strict=True))
  questions = [json.loads(line) for line in written[study.WAYS].read_text().splitlines()]
  assert len(following) == 1 + ways.WAYS * ways.HOPS + ways.BESIDE and set(words[2::3]) == {facts.END}
  assert len(questions) == ways.WAYS * ways.HOPS
  seen, goals = set(), set()
  for question in questions:
    place, answer = question['prompt'], question['answer'].split()
    assert len(answer) == ways.HOPS
    assert [following[place], *(following[at] for at in answer[:-1])] == answer
    seen |= {place, *answer}
    goals.add(answer[-1])
  assert len(goals) == 1 and len(seen) == 1 + ways.WAYS * ways.HOPS, 'places beside the ways are in no answer'
  for place in following:
    assert ways.walk(following, place, len(following))[-1] in goals, 'every place leads to the goal'


def test_the_base_model_learns_from_right_answers():
  maps = [{'bako': 'meta', 'meta': 'sopi', 'sopi': 'bako'}, {'bako': 'bako'}]
  tokens, positions, segment_ids, parents, index, answers = ways.collate(maps, 3, 2, 4, np.random.default_rng(0))
  word_of = {tokenizer.token_of(word): word for word in ways.PLACES}
  for row, following in enumerate(maps):
    for question in range(2):
      at = index[row, question]
      read = [word_of[int(token)] for token in tokens[row, at]]
      answer = [word_of[int(token)] for token in answers[row, question]]
      assert answer == ways.walk(following, read[0], 4) and read[1:] == answer[:-1]
      assert set(segment_ids[row, at]) == {2 + question} and set(parents[row, at]) == {1}
      assert list(positions[row, at] - 3 * len(following) - 1) == [1, 2, 3, 4]


class Drawn:
  """A sampler whose completions tell prompt, number of the sample and step."""

  def sample(self, base, trainable, prompts, *, n, step, on_finished, members=None):
    tokens = np.array([[*prompt, sample, step] for prompt in prompts for sample in range(n)], np.int32)
    for number, row in enumerate(tokens):
      on_finished(Completion(number, row, *[np.zeros(3, np.float32)] * 3, stopped=True, text=''))
    return Rollouts.of_completions(np.repeat(np.arange(len(prompts)), n), tokens, np.ones(tokens.shape, bool))


def test_a_prompt_gets_the_same_answers_in_every_epoch_in_whatever_order():
  sampler = repeated_answers.RepeatingSampler(Drawn(), answers=2)

  def drawn(step, prompts):
    finished = {}
    rollouts = sampler.sample(
      {}, {}, prompts, n=2, step=step, on_finished=lambda done: finished.update({done.sample: done})
    )
    assert rollouts.group.tolist() == [0, 0, 1, 1, 2, 2]
    assert [finished[sample].tokens.tolist() for sample in range(6)] == rollouts.completion_tokens.tolist()
    return [tuple(row) for row in rollouts.completion_tokens.tolist()]

  first = drawn(0, [[7], [5], [6]])
  assert first == [(7, 0, 0), (7, 1, 0), (5, 0, 0), (5, 1, 0), (6, 0, 0), (6, 1, 0)]
  assert set(drawn(4, [[5], [6], [7]])) == set(first)
  assert not set(drawn(3, [[5], [6], [7]])) & set(first)


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
  within = study.table(results, columns, interval=True).splitlines()
  assert within[2] == '| one | 62% ± 159% | 0.375 ± 1.588 | 2 |' and within[3] == '| two | – | 0.123 | 1 |'
  fifths = study.table(results, study.fifths(results, study.GREEDY)).splitlines()
  assert fifths[0] == '| | step 0 | step 50 | step 100 | best | seeds |'
  assert fifths[2] == '| one | 12% (0%–25%) | – | 62% (50%–75%) | 62% | 2 |'


PAGES = {
  'quickstart': 'docs/method.md',
  'lora': 'docs/lora.md',
  'cartridge': 'docs/cartridges.md',
  'answers': 'docs/cartridges.md',
}


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
  shown = study.table(results, studied.columns or study.fifths(results, studied.measures[0]), studied.interval)
  assert (folder / 'table.md').read_text() == shown
  assert shown in pathlib.Path(PAGES[name]).read_text()
  assert not studied.panels or f'{name}/curves.png' in pathlib.Path(PAGES[name]).read_text()
