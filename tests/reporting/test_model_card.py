"""The card of an export: what it says of a run's files, and that nothing in them can break or leak through it."""

import json
import logging
import re

from huggingface_hub import ModelCard
import pytest
import yaml

from sdpo_jax.reporting import model_card
from tests.reporting import report_runs
from tests.reporting.report_runs import HOSTILE, config, metrics

SOFTWARE = {'sdpo_jax': '0.1.0 (12ab)', 'python': '3.11.7', 'jax': '0.10.2', 'XLA_FLAGS': '--xla_dump_to=/home/alice/x'}


def evaluated(step: int, *scores: list[float], task: str = 'digits') -> dict:
  """Return a line of metrics.jsonl with an evaluation, of which `scores` are the samples of each question."""
  mean = sum(map(sum, scores)) / sum(map(len, scores))
  found = {f'mean@{len(scores[0])}': mean, 'best@2': mean + 0.1, 'std@2': 0.3, 'questions': float(len(scores))}
  return metrics(step) | {f'eval/{task}/{name}': value for name, value in found.items()}


def run_of(folder, lines, settings, samples=None, starts=()):
  report_runs.write(folder, lines, settings=settings)
  (folder / 'fingerprint.json').write_text(json.dumps({'format': 1, 'starts': list(starts)}))
  (folder / 'eval').mkdir()
  for step, found in (samples or {}).items():
    (folder / 'eval' / f'{step}.json').write_text(json.dumps({'step': step, 'samples': found}))
  return folder


def samples_of(task: str, *scores: list[float | None]) -> list[dict]:
  return [
    {'data_source': task, 'id': f'{task}/{question}', 'score': score}
    for question, of_question in enumerate(scores)
    for score in of_question
  ]


def card_of(workdir, settings, step=3, weights='student', form='model', name='me/tuned') -> ModelCard:
  made = model_card.Exported(workdir, step, weights, form, 'bfloat16', name)
  text = model_card.text_of(made, settings)
  card = ModelCard(text)
  assert card.data.to_dict() == yaml.safe_load(text.split('---\n')[1])
  return card


def test_a_card_says_what_the_files_of_a_run_say(tmp_path):
  settings = config(
    model__path='Qwen/Qwen3-8B', optimizer__lr=1e-6, trainer__total_training_steps=4,
    data__train_files=('hf:me/rows?split=train', '/home/alice/more.jsonl', 'hf:me/rows?split=test'),
    data__val_files=('gs://alice/test.jsonl',), environments__judge__base_url='http://alice.internal/v1',
  )  # fmt: skip
  scores = [1.0, 0.0], [1.0, 1.0], [0.0, 0.0]
  lines = [
    evaluated(0, [0.0, 0.0], [0.5, 0.5]),
    metrics(1),
    evaluated(2, *scores),
    metrics(3),
    evaluated(4, [1.0, 1.0]),
  ]
  starts = [
    {'step': 0, 'parts': {'software': SOFTWARE, 'devices': {'platform': 'tpu', 'kind': 'TPU v5 lite', 'count': '8'}}},
    {'step': 3, 'parts': {'software': {'jax': '9'}}},
  ]
  workdir = run_of(tmp_path / 'alice', lines, settings, {2: samples_of('digits', *scores, [None])}, starts)
  card = card_of(workdir, settings)
  assert card.data.to_dict() | {'model-index': None} == {
    'library_name': 'transformers', 'base_model': 'Qwen/Qwen3-8B', 'base_model_relation': 'finetune',
    'datasets': ['me/rows'], 'model-index': None,
    'tags': ['sdpo', 'self-distillation', 'reinforcement-learning', 'text-generation', 'jax', 'sdpo_jax'],
  }  # fmt: skip
  results = {result.metric_type: result.metric_value for result in card.data.eval_results}
  assert results == {'mean@2': 0.5, 'best@2': 0.6} and card.data.eval_results[0].dataset_name == 'digits'
  text = card.text
  assert '| task | metric | step 0 | step 2 |' in text  # The last up to step 3.
  # Means of the questions are 0.5, 1 and 0, whose standard deviation is 0.5; a sample without a score does not count.
  assert f'| `digits` | mean@2 | 0.25 | 0.5 ± {0.5 / 3**0.5:.2g} |' in text
  assert '| `digits` | best@2 | 0.35 | 0.6 |' in text and '| `digits` | questions | 2 | 3 |' in text
  assert 'step 4' not in text and '3 of 4 steps of SDPO, each of 32 questions with 8 completions' in text
  assert 'base model: [Qwen/Qwen3-8B](https://huggingface.co/Qwen/Qwen3-8B)' in text
  assert '`hf:me/rows?split=train`, `more.jsonl`' in text and 'held-out data: `test.jsonl`' in text
  assert 'Trained on `8` × `TPU v5 lite` with sdpo_jax `0.1.0 (12ab)`, python `3.11.7`, jax `0.10.2`; exported' in text
  lines = text.split('```yaml\n')[1].split('\n```')[0].split('\n')
  changed = {name: json.loads(value) for name, _, value in (line.partition(': ') for line in lines)}
  assert changed['optimizer.lr'] == 1e-6 and changed['environments.judge.base_url'] == 'http://…'
  assert changed['data.train_files'] == ['hf:me/rows?split=train', 'more.jsonl', 'hf:me/rows?split=test']
  assert 'optimizer.eps' not in changed and 'name' not in changed
  assert not re.search('alice|gs://|/home', str(card)) and text.count('@article{') == text.count('@software{') == 1
  assert '@software{sdpo_jax,\n  title' in text
  assert "AutoModelForCausalLM.from_pretrained('me/tuned')" in text and "--model=me/tuned --prompt='Hello'" in text


@pytest.mark.parametrize(
  ('form', 'library', 'lines'),
  [
    ('merged', 'transformers', ["AutoModelForCausalLM.from_pretrained('me/tuned')", 'sdpo sample --model=me/tuned ']),
    (
      'peft',
      'peft',
      [
        'from peft import PeftModel\nfrom transformers',
        "from_pretrained('…/my base')\nmodel = PeftModel.from_pretrained(model, 'me/tuned')\n```",
        "sdpo sample --model='…/my base' --adapter=me/tuned ",
      ],
    ),
    ('cartridge', 'sdpo_jax', ["for `…/my base`.\n\n```bash\nsdpo sample --model='…/my base' --cartridge="]),
    ('cartridge_pt', 'sdpo_jax', ["for `…/my base`.\n\n```bash\nsdpo sample --model='…/my base' --cartridge="]),
  ],
)
def test_a_card_says_how_each_format_is_loaded(tmp_path, form, library, lines):
  settings = config(model__path=str(tmp_path / 'my base'), actor__policy_loss__loss_mode='vanilla')
  card = card_of(run_of(tmp_path / 'run', [metrics(3)], settings), settings, form=form)
  assert (card.data.get('library_name'), card.data.base_model, card.data.eval_results) == (library, None, None)
  assert card.data.tags[0] == 'grpo' and 'steps of GRPO' in card.text and 'a local one, `my base`' in card.text
  assert all(line in card.text for line in lines) and 'There was no evaluation up to this step.' in card.text
  assert 'with unknown versions; exported by' in card.text and str(tmp_path) not in str(card)


def test_scores_of_the_student_are_not_those_of_an_exported_teacher(tmp_path):
  settings = config(algorithm__mode='hybrid')
  card = card_of(run_of(tmp_path / 'run', [evaluated(1, [1.0, 0.0])], settings), settings, weights='teacher')
  assert card.data.eval_results is None and 'scores of the student, not of the exported teacher' in card.text
  assert '| mean@2 | 0.5 |' in card.text and 'steps of SDPO and GRPO' in card.text


@pytest.mark.parametrize(
  'text', [*HOSTILE[:-1], '---\nlicense: mit\n---', '```\n# x', '| a `` b |', r'a \| b', 'a: [b, "', "'"]
)
def test_no_text_of_a_run_is_yaml_or_markdown_or_html(tmp_path, text):
  settings = config(
    name=text, model__path=f'/x/{text}', data__train_files=(f'/x/{text}', f'hf:me/{text}'), data__val_files=(text,),
    actor__self_distillation__reprompt_template=text,
  )  # fmt: skip
  parts = {'software': {'jax': text}, 'devices': {'kind': text, 'count': text}}
  lines = [evaluated(1, [1.0, 0.0], task=text)]
  workdir = run_of(tmp_path / 'run', lines, settings, starts=[{'step': 0, 'parts': parts}])
  plain = config(name='x', model__path='/x/x', data__train_files=('/x/x', 'hf:me/x'), data__val_files=('x',))
  plain.actor.self_distillation.reprompt_template = 'x'
  parts = {'software': {'jax': 'x'}, 'devices': {'kind': 'x', 'count': 'x'}}
  lines = [evaluated(1, [1.0, 0.0], task='x')]
  calm = run_of(tmp_path / 'calm', lines, plain, starts=[{'step': 0, 'parts': parts}])
  card, expected = card_of(workdir, settings, form='peft', name=text), card_of(calm, plain, form='peft', name='x')
  assert card.data.to_dict().keys() - {'datasets'} == expected.data.to_dict().keys() - {'datasets'}
  assert [result.metric_type for result in card.data.eval_results] == ['mean@2', 'best@2']
  assert card.text.isascii() or all(letter.isprintable() or letter == '\n' for letter in card.text)
  assert card.text.count('\n') == expected.text.count('\n')  # No text has ended a line, a row or a block.
  spans = re.compile(r'(?<!`)(`+)(?!`).+?(?<!`)\1(?!`)')  # Code spans, in which nothing is markup but their end.
  blocks = re.compile(r'^```.*?^```$', re.MULTILINE | re.DOTALL)
  outside = [spans.sub('…', blocks.sub('…', each.text)) for each in (card, expected)]
  assert outside[0] == outside[1]
  rows = [re.findall(r'(?<!\\)(?:\\\\)*\|', line) for line in card.text.split('\n') if line.startswith('|')]
  assert [len(bars) for bars in rows] == [4] * 5  # In a table a bar counts in code, too.


def test_what_cannot_be_read_is_left_out_and_said(tmp_path, caplog):
  settings = config()
  workdir = run_of(tmp_path / 'run', [evaluated(1, [1.0, 0.0])], settings)
  (workdir / 'eval' / '1.json').write_text('{')
  with caplog.at_level(logging.WARNING):
    assert '| mean@2 | 0.5 |' in card_of(workdir, settings).text and 'eval/1.json is not JSON' in caplog.text
    (workdir / 'metrics.jsonl').write_text('{"epoch": 1}\n{"step": 1}\n')
    (workdir / 'fingerprint.json').write_text('[]')
    assert 'There was no evaluation up to this step.' in card_of(workdir, settings).text
  assert caplog.text.count('The model card leaves out what cannot be read') == 3
  samples, starts = [1, {'score': 1.0, 'id': [2], 'data_source': {}}], [{'step': 0, 'parts': {'devices': {'count': 1}}}]
  run_of(tmp_path / 'odd', [evaluated(1, [1.0, 0.0])], settings, {1: samples}, starts)
  assert '| mean@2 | 0.5 |' in card_of(tmp_path / 'odd', settings).text
