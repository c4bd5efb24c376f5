"""A report: what it reads of a run, what it leaves out, and that nothing that a model wrote is markup."""

import base64
import hashlib
import html.parser
import json
import pathlib
import re
import subprocess
import sys
import zlib

from etils.epath import backend
import pytest

from sdpo_jax.errors import UserError
from sdpo_jax.reporting import groups, page, report, rollouts, run_files
from sdpo_jax.training.directory import sealed
from tests import tiny
from tests.reporting import report_runs
from tests.reporting.report_runs import HOSTILE, config, metrics, rollout


class Parsed(html.parser.HTMLParser):
  """What a parser of HTML finds: elements in order, and the texts of scripts and styles."""

  def __init__(self, text):
    super().__init__(convert_charrefs=True)
    self.elements, self.texts, self._open = [], [], None
    self.feed(text)
    self.close()

  def handle_starttag(self, tag, attributes):
    self.elements.append((tag, dict(attributes)))
    self._open = (tag, dict(attributes), []) if tag in ('script', 'style') else None

  def handle_data(self, data):
    if self._open:
      self._open[2].append(data)

  def handle_endtag(self, tag):
    if self._open and tag == self._open[0]:
      self.texts.append((*self._open[:2], ''.join(self._open[2])))
      self._open = None

  def data(self, name):
    [text] = [text for _, attributes, text in self.texts if attributes.get('id') == name]
    return json.loads(zlib.decompress(base64.b64decode(text)), parse_constant=pytest.fail)


def written(workdir, *compare, max_rollouts=100, **more):
  """Return the page about runs, parsed."""
  said = []
  output = workdir / 'page.html'
  report.write_report(
    str(workdir), [str(each) for each in compare], str(output), max_rollouts=max_rollouts, say=said.append, **more
  )
  return Parsed(output.read_text()), said


def test_what_a_run_says(tmp_path):
  lines = [
    metrics(0, eval__t__mean__=0.1) | {'eval/t/mean@2': 0.25},
    metrics(1) | {'alarm/1': 0.0, 'alarm/2': 1.0},
    metrics(2, score=float('nan'))
    | {'alarm/1': 1.0, 'alarm/rollback_to': 1, 'train/huge': 10**400, 'train/flag': True},
    metrics(3) | {'alarm/1': 1.0, 'alarm/stop': 1.0, 'eval/t/mean@2': 0.75},
  ]
  folder = report_runs.write(
    tmp_path / 'run', lines, settings=config(alarms__rules=('rollout/entropy < 1', 'train/loss > 3'))
  )
  with open(folder / 'metrics.jsonl', 'a') as file:
    file.write('{"step": 4, "train/lo')  # Cut off by a crash.
  (folder / 'fingerprint.json').write_text(json.dumps({'format': 1, 'starts': [{'step': 0}, {'step': 2}, {'step': 2}]}))
  run = run_files.read_run(folder)
  assert run.series['rollout/score_mean'] == ([0, 1, 3], [0.5, 0.5, 0.5])
  assert run.series['eval/t/mean@2'] == ([0, 3], [0.25, 0.75])
  assert not {'train/huge', 'train/flag', 'state_digest', 'fencing_epoch', 'step', 'alarm/1'} & run.series.keys()
  assert run.alarms == (
    {'rule': 'rollout/entropy < 1', 'steps': [2, 3]},
    {'rule': 'train/loss > 3', 'steps': [1]},
  )
  assert (run.rollbacks, run.stopped, run.over, run.last, run.total, run.resumed) == (((2, 1),), 3, True, 3, 4, (2,))
  assert run.remarks == () and run.settings['trainer.total_training_steps'] == 4


def test_lines_of_a_process_that_had_lost_the_run_are_left_out(tmp_path):
  starts = [{'step': 0, 'fencing_epoch': 1, 'time': 'then'}, {'step': 1, 'fencing_epoch': 2, 'time': 'now'}]
  lines = [metrics(1), metrics(2) | {'train/loss': 7.0}, metrics(2) | {'fencing_epoch': 2}]
  folder = report_runs.write(tmp_path / 'run', lines)
  (folder / 'fingerprint.json').write_text(json.dumps({'format': 1, 'starts': starts}))
  (folder / 'epochs.json').write_text('{}')  # Damaged: what fingerprint.json knows counts.
  run = run_files.read_run(folder)
  assert run.series['train/loss'][0] == [1, 2] and run.series['train/loss'][1][1] != 7.0
  assert '1 line (step 2) of a process that had lost the run' in run.remarks[0]


@pytest.mark.parametrize(
  'files, sentence',
  [
    (None, 'is not a run: there is no such directory'),
    ({}, 'is not a run: it is an empty directory'),
    ({'config.json': '{"model_type": "qwen3"}'}, 'is not a run: its config.json is not that of a run'),
    ({'config.json': 'no JSON'}, 'is not a run: its config.json is not that of a run'),
    ({'metrics.jsonl': '{"epoch": 1}\n{"epoch": 2}\n'}, 'line 1 is not an object with a whole number as its step'),
    ({'metrics.jsonl': 'loss,step\n1,2\n'}, 'line 1 is not JSON'),
  ],
)
def test_what_is_no_run_is_refused_in_one_sentence_and_nothing_is_written(tmp_path, files, sentence):
  folder = tmp_path / 'here'
  if files is not None:
    folder.mkdir()
    for name, text in files.items():
      (folder / name).write_text(text)
  before = sorted(tmp_path.rglob('*'))
  with pytest.raises(UserError, match=re.escape(sentence)) as error:
    report.write_report(str(folder), [], None, max_rollouts=10, say=pytest.fail)
  assert '\n' not in str(error.value) and sorted(tmp_path.rglob('*')) == before


def test_a_bucket_without_access_is_named_in_one_sentence(tmp_path, monkeypatch):
  def refuse(path):
    raise ImportError('gcsfs is not installed')

  monkeypatch.setattr(backend.fsspec_backend, 'fs', refuse)
  with pytest.raises(UserError, match=r'--workdir=gs://here/run needs a package that is not installed: gcsfs is'):
    report.write_report('gs://here/run', [], None, max_rollouts=10, say=pytest.fail)


def test_a_run_in_a_bucket_is_read_and_its_report_written_there(bucket):
  report_runs.write(bucket / 'run', [metrics(1), metrics(2)], {2: [rollout(2)]})
  said = []
  report.write_report('gs://here/run', [], None, max_rollouts=10, say=said.append)
  found = Parsed((bucket / 'run' / 'report.html').read_text()).data('summary')
  assert found['runs'][0]['last'] == 2 and found['rollouts']['score'] == [0.0]
  assert said == ['gs://here/run/report.html: run step 2, in progress; 1 rollout; 0.1 MB.']


def test_runs_without_steps_evaluations_or_settings_have_a_page(tmp_path):
  young = report_runs.write(tmp_path / 'young')
  found, said = written(young)
  assert found.data('summary')['remarks'] == ['young: No step is finished yet.'] and 'no step, in progress' in said[0]
  bare = report_runs.write(tmp_path / 'bare', [metrics(1)])
  (bare / 'config.json').unlink()
  found, _ = written(bare)
  summary = found.data('summary')
  assert summary['remarks'] == ['bare: config.json is not there.'] and summary['runs'][0]['threshold'] == 1.0
  (bare / 'config.json').write_text('[1')
  assert 'config.json is not JSON' in written(bare)[0].data('summary')['remarks'][0]


def test_runs_that_differ_in_their_seed_only_are_one_curve(tmp_path):
  def run(folder, **changes):
    return run_files.read_run(report_runs.write(tmp_path / folder, [metrics(1)], settings=config(**changes)))

  runs = [
    run('a0', seed=0),
    run('b0', seed=0, optimizer__lr=0.5),
    run('a1', seed=1, trainer__save_freq=9, trainer__total_training_steps=7, name='other'),
    run('a2', seed=2),
    run('b1', seed=1, optimizer__lr=0.5),
    run('c', actor__policy_loss__loss_mode='vanilla'),
  ]
  found = groups.group_runs(runs)
  assert found == [[0, 2, 3], [1, 4], [5]]
  assert groups.differences(runs, found)['optimizer.lr'] == [1e-5, 0.5, 1e-5]
  assert set(groups.differences(runs, found)) == {'optimizer.lr', 'actor.policy_loss.loss_mode'}
  assert groups.labels(runs, found) == ['made, loss_mode=sdpo, lr=1e-05', 'made, loss_mode=sdpo, lr=0.5', 'c']
  alone = [run(f'{folder}/same', seed=seed, optimizer__lr=seed) for seed, folder in ((1, 'x'), (2, 'y'))]
  assert groups.labels(alone, [[0], [1]]) == ['same (1)', 'same (2)']


def test_nothing_that_a_model_or_a_user_wrote_is_markup(tmp_path):
  steps = {1: [rollout(1, group, text, id=text, feedback=text, finish_reason=text, rewards={text: 1.0},
                       prompt=[{'role': text, 'content': text}]) for group, text in enumerate(HOSTILE)]}  # fmt: skip
  settings = config(name=HOSTILE[0], data__train_files=HOSTILE, alarms__rules=(HOSTILE[1],))
  lines = [metrics(1) | {HOSTILE[0]: 1.0, HOSTILE[3]: 2.0, HOSTILE[4]: 3.0, 'alarm/1': 1.0}]
  folder = report_runs.write(tmp_path / '<b>&"run', lines, steps, settings)
  found, _ = written(folder)
  counts = {name: sum(tag == name for tag, _ in found.elements) for name in ('script', 'img', 'title', 'b')}
  assert counts == {'script': 3, 'img': 0, 'title': 1, 'b': 0}  # Summary, one piece, and the page's own.
  assert not [name for _, attributes in found.elements for name in attributes if name.startswith('on')]
  shown = found.data('piece0')
  assert [line['completion'] for line in shown] == list(HOSTILE)
  assert [''.join(line['tokens']) for line in shown] == list(HOSTILE)
  summary = found.data('summary')
  assert [question['id'] for question in summary['rollouts']['questions']] == list(HOSTILE)
  assert summary['runs'][0]['series'][HOSTILE[3]] == [[1], [2.0]]


def test_the_page_allows_its_own_style_and_script_by_digest_and_asks_nobody(tmp_path):
  found, _ = written(report_runs.write(tmp_path / 'run', [metrics(1)], {1: [rollout(1)]}))
  [policy] = [attributes['content'] for tag, attributes in found.elements if attributes.get('http-equiv')]
  rules = dict(rule.strip().split(' ', 1) for rule in policy.split(';'))
  own = {tag: text for tag, attributes, text in found.texts if 'id' not in attributes}
  for tag, rule in (('style', 'style-src'), ('script', 'script-src')):
    assert rules[rule] == f"'sha256-{base64.b64encode(hashlib.sha256(own[tag].encode()).digest()).decode()}'"
  assert rules['default-src'] == rules['base-uri'] == rules['form-action'] == "'none'"
  links = [attributes for _, attributes in found.elements if {'src', 'href'} & attributes.keys()]
  assert {each['href'] for each in links} == {'#overview', '#charts', '#rollouts'}


def test_lines_that_are_no_rollouts_are_counted_and_values_of_other_types_left_out(tmp_path):
  odd = {
    'completion': 'x', 'id': 7, 'score': float('nan'), 'prompt': 'plain', 'tokens': ['x', 3],
    'divergence': [1, None, 'y', 10**400], 'rewards': [1], 'feedback': {}, 'teacher_prompt': [{'role': 'user'}],
    'top_tokens': {'student': {}, 'texts': {}},
  }  # fmt: skip
  content = [json.dumps(rollout(1)), '[1]', '{"completion": 3}', '\0' * 512, json.dumps(odd), '']
  file = rollouts.pack(1, '\n'.join(content).encode() + b'{"completion": "torn')
  assert file.unreadable == 3 and len(file.entries) == 2
  [piece] = file.pieces
  _, read = json.loads(zlib.decompress(base64.b64decode(piece)))
  assert read == {
    'prompt': [{'role': '', 'content': 'plain'}],
    'completion': 'x',
    'divergence': [1.0, None, None, None],
  }
  assert file.entries[1] | {'id': '', 'question': 'plain', 'score': None, 'length': 4, 'taught': 0} == file.entries[1]
  folder = report_runs.write(tmp_path / 'run', [metrics(1)], {1: [rollout(1)]})
  (folder / 'rollouts' / '1.jsonl').write_text('\n'.join(content))
  (folder / 'rollouts' / 'notes.txt').write_text('x')
  assert written(folder)[0].data('summary')['remarks'] == [
    'run: rollouts/1.jsonl: line 2, 4 is not as it was written.',
    'run: 3 lines of rollouts/ are not rollouts and are left out.',
  ]


def test_rollouts_and_evaluations_that_are_altered_or_lost_are_named(tmp_path):
  named = [metrics(step) | {'rollout/recorded': 1, 'eval/t/mean@2': 0.5} for step in (1, 2, 3)]
  folder = report_runs.write(tmp_path / 'run', named, {1: [rollout(1)], 2: [rollout(2)]})
  (folder / 'eval').mkdir()
  for step in (1, 3):
    (folder / 'rollouts' / f'{step}.jsonl').write_text(sealed.seal_lines([rollout(step)], str(step)))
    (folder / 'eval' / f'{step}.json').write_text(sealed.seal({'step': step, 'metrics': {}}))
  lost = 'run: eval has no file of step 2 any more, though metrics.jsonl names one.'
  assert written(folder)[0].data('summary')['remarks'] == [lost]
  for name in ('rollouts/1.jsonl', 'eval/3.json'):
    (folder / name).write_text((folder / name).read_text().replace('"step": ', '"step": 1'))
  (folder / 'rollouts' / '3.jsonl').unlink()
  assert written(folder)[0].data('summary')['remarks'] == [
    'run: rollouts has no file of step 3 any more, though metrics.jsonl names one.',
    lost,
    'run: eval/3.json: is not as it was written (it does not agree with its sha256).',
    'run: rollouts/1.jsonl: line 1 is not as it was written.',
  ]
  (folder / 'eval' / '3.json').unlink()
  (folder / 'eval' / '3.json').mkdir()
  assert 'eval/3.json is a folder where a file belongs' in written(folder)[0].data('summary')['remarks'][2]


@pytest.mark.parametrize(
  'broken',
  [
    {'ids': [[1]], 'log_probs': [[-1.0]], 'own': [-1.0]},  # Of one token only.
    {'ids': [[1], [1]], 'log_probs': [[-1.0], []], 'own': [0.0, 0.0]},
    'nothing',
  ],
)
def test_top_tokens_that_do_not_fit_the_tokens_are_left_out(broken):
  said = rollout(1)['top_tokens']['student']
  top = {'student': said, 'teacher': broken, 'texts': {'1': 'a'}}
  lines = [rollout(1) | {'tokens': ['a', 'b'], 'top_tokens': each} for each in (top, top | {'student': broken})]
  [piece] = rollouts.pack(1, '\n'.join(map(json.dumps, lines)).encode()).pieces
  shown, hidden = json.loads(zlib.decompress(base64.b64decode(piece)))
  assert shown['top_tokens'] == {'student': said, 'teacher': None, 'texts': {'1': 'a'}}
  assert 'top_tokens' not in hidden and hidden['tokens'] == ['a', 'b']


def test_rollouts_of_unfinished_steps_wait_and_of_many_the_page_has_a_spread(tmp_path):
  steps = {step: [rollout(step, group) for group in range(10)] for step in range(1, 10)}
  folder = report_runs.write(tmp_path / 'run', [metrics(step) for step in range(1, 9)], steps)
  found = written(folder, max_rollouts=1000)[0].data('summary')
  assert sorted(set(found['rollouts']['step'])) == list(range(1, 9)) and found['remarks'] == []
  found = written(folder, max_rollouts=30)[0].data('summary')
  assert sorted(set(found['rollouts']['step'])) == [1, 4, 8]
  assert found['remarks'] == ['run: rollouts of 3 of 8 steps are in this page (--max_rollouts, --max_mb).']
  few = written(folder, max_rollouts=7)[0].data('summary')
  assert few['rollouts']['step'] == [8] * 7 and few['rollouts']['question'] == list(range(7))
  assert few['remarks'] == [
    'run: rollouts of 1 of 8 steps, the last one only in part, are in this page (--max_rollouts, --max_mb).'
  ]
  assert written(folder, max_rollouts=0)[0].data('summary')['rollouts']['step'] == []
  other = report_runs.write(tmp_path / 'other', [metrics(1)], {1: [rollout(1)] * 5}, config(optimizer__lr=1.0))
  both = written(folder, other, max_rollouts=30)[0].data('summary')
  assert sorted(set(zip(both['rollouts']['run'], both['rollouts']['step'], strict=True))) == [(0, 8), (1, 1)]


# A word of a folder, a bucket, a user, a host; none may be in a page.
PRIVATE = {
  'model__path': '/home/alice/models/base',
  'model__chat_template': 'alice/mine.jinja',
  'actor__self_distillation__teacher_model': '~/alice/larger',
  'actor__self_distillation__teacher_endpoint__url': 'http://alice.internal:8000/v1',
  'actor__self_distillation__reprompt_template': 'QUOTED {prompt} /home/alice/x/notes.txt </think> /no_think and/or',
  'data__train_files': (
    'gs://alice/x/train.jsonl',
    'hf:/srv/alice/rows?split=test',
    'hf:me/rows?split=train',
    'alice/a',
  ),
  'data__val_files': ('generator:facts?document=/home/alice/facts.txt&shown=no',),
  'data__apply_chat_template_kwargs': {'/home/alice/key': ['../alice/value']},
  'environments__modules': ('../alice/graders.py',),
  'alarms__rules': ('eval/*/mean@16 < 0.7 * best',),
}


@pytest.mark.parametrize('texts', [True, False])
def test_a_page_names_no_folder_no_host_and_without_texts_nothing_that_quotes_the_data(tmp_path, texts, monkeypatch):
  monkeypatch.chdir(tmp_path)
  lines = {1: [rollout(1, 0, 'QUOTED', ungraded='http://alice.internal/: no answer', id='QUOTED', feedback='QUOTED',
                       finish_reason='QUOTED', prompt=[{'role': 'user', 'content': 'QUOTED'}], tokens=['QUOTED'],
                       teacher_prompt=[{'role': 'user', 'content': 'QUOTED'}], rewards={'exact': 'QUOTED'}),
               rollout(1, 1, 'QUOTED', divergence=[0.5, 0.25])]}  # fmt: skip
  folders = [root / 'alice' / name / 'same' for name, root in (('a', tmp_path), ('b', pathlib.Path()))]
  for folder, rate in zip(folders, (1.0, 2.0), strict=True):
    report_runs.write(folder, [metrics(1)], lines, config(**PRIVATE, optimizer__lr=rate))
    (folder / 'fingerprint.json').write_text('[]')  # Damaged, which a remark says.
  found, _ = written(*folders, texts=texts)
  texts_of_page = [text for _, _, text in found.texts] + [json.dumps(found.data(f'piece{place}')) for place in (0, 1)]
  everything = '\n'.join([*texts_of_page, json.dumps(found.data('summary'), ensure_ascii=False)])
  for word in ('alice', str(tmp_path), '/home', '/srv'):
    assert word not in everything, everything[everything.index(word) - 99 :][:200]
  assert ('QUOTED' in everything) == texts
  summary = found.data('summary')
  settings = summary['runs'][0]['settings']
  assert settings['data.train_files'] == ['train.jsonl', 'hf:rows?split=test', 'hf:me/rows?split=train', 'a']
  assert (settings['model.path'], settings['environments.modules']) == ('base', ['graders.py'])
  assert settings['actor.self_distillation.teacher_endpoint.url'] == 'http://…'
  assert settings['data.val_files'] == ['generator:facts?document=facts.txt&shown=no']
  assert settings['alarms.rules'] == list(PRIVATE['alarms__rules'])
  assert settings.get('actor.self_distillation.reprompt_template') == (
    'QUOTED {prompt} notes.txt </think> /no_think and/or' if texts else None
  )
  assert [group['label'] for group in summary['groups']] == ['same (1)', 'same (2)']
  assert summary['remarks'][0].startswith('same: fingerprint.json does not hold a JSON object')
  rollouts_shown, questions = found.data('piece0'), summary['rollouts']['questions']
  if not texts:
    assert rollouts_shown == [
      {'group': 0, 'score': 0.0, 'divergence': [0.25] * 6, 'rewards': {'exact': None}},
      {'group': 1, 'score': 1.0, 'divergence': [0.5, 0.25]},
    ]
    assert [question['text'] for question in questions] == [f'question {place}' for place in (1, 2, 3, 4)]
    assert summary['rollouts']['length'] == [1, 6, 1, 6] and 'left out' in summary['remarks'][-1]


def test_a_page_has_as_many_rollouts_as_its_megabytes_hold(tmp_path, monkeypatch):
  monkeypatch.setattr(rollouts, 'PIECE', 3000)
  noise = [hashlib.sha512(bytes([place])).hexdigest() for place in range(20)]
  steps = {step: [rollout(step, group, text) for group, text in enumerate(noise)] for step in (1, 2)}
  lines = [metrics(1), metrics(2)]
  runs = [report_runs.write(tmp_path / name, lines, steps, config(seed=seed)) for seed, name in enumerate('ab')]
  whole, said = written(*runs, max_rollouts=1000)
  assert len(whole.data('summary')['rollouts']['step']) == 80
  size = (runs[0] / 'page.html').stat().st_size
  assert said == [
    f'{runs[0] / "page.html"}: a step 2, in progress, b step 2, in progress; 80 rollouts; {size / 1e6:.1f} MB.'
  ]
  bare = len(report.Reporter(runs, 0).page()[0].encode())
  for part in (0.5, 0.1):
    limit = int(bare + part * (size - bare))
    found, _ = written(*runs, max_rollouts=1000, max_mb=limit / 1e6)
    summary = found.data('summary')
    assert 0.5 * (limit - bare) < (runs[0] / 'page.html').stat().st_size - bare <= limit - bare
    assert '--max_mb' in summary['remarks'][0] or '--max_mb' in summary['remarks'][1]
    assert set(summary['rollouts']['run']) == {0, 1}  # Neither run takes the place of the other.
    for place, piece in enumerate(summary['rollouts']['piece']):  # Those that are listed are there.
      assert found.data(f'piece{piece}')[summary['rollouts']['place'][place]]['completion'] in noise
  assert written(*runs, max_mb=bare / 2e6)[0].data('summary')['rollouts']['step'] == []


def test_every_rollout_is_found_where_the_index_says(tmp_path, monkeypatch):
  monkeypatch.setattr(rollouts, 'PIECE', 3000)
  steps = {step: [rollout(step, group, f'{step}.{group}') for group in range(12)] for step in (1, 2)}
  found, _ = written(report_runs.write(tmp_path / 'run', [metrics(2)], steps))
  index = found.data('summary')['rollouts']
  assert max(index['piece']) > 3
  for place in range(24):
    shown = found.data(f'piece{index["piece"][place]}')[index['place'][place]]
    expected = rollout(index['step'][place], place % 12, f'{index["step"][place]}.{place % 12}')
    assert shown['completion'] == expected['completion'] == index['said'][place]
    assert shown['top_tokens'] == expected['top_tokens'] and shown['divergence'] == expected['divergence']


def test_a_colour_is_full_at_what_few_rollouts_exceed(tmp_path):
  lines = [rollout(1, place, divergence=[float(place), 0.0], advantages=[-2.0, 1.0]) for place in range(11)]
  found, _ = written(report_runs.write(tmp_path / 'run', [metrics(1)], {1: lines}))
  assert found.data('summary')['full'] == {'divergence': 8.0, 'advantage': 2.0, 'credit': pytest.approx(0.2)}


def test_another_file_is_never_overwritten(tmp_path):
  folder = report_runs.write(tmp_path / 'run', [metrics(1)])
  other = tmp_path / 'notes.html'
  other.write_text('<!doctype html>mine')
  with pytest.raises(UserError, match='exists and is not a report'):
    report.write_report(str(folder), [], str(other), max_rollouts=1, say=pytest.fail)
  assert other.read_text() == '<!doctype html>mine'
  with pytest.raises(UserError, match='is a directory: name a file'):
    report.write_report(str(folder), [], str(tmp_path), max_rollouts=1, say=pytest.fail)
  written(folder)
  assert written(folder)[1]  # A report is.


def test_a_page_is_written_anew_while_the_run_goes_on(tmp_path, monkeypatch):
  folder = report_runs.write(tmp_path / 'run', [metrics(1)], {1: [rollout(1)]})
  read, reloads, asked = [], [], []
  monkeypatch.setattr(rollouts, 'read_bytes', lambda path, way_out: (read.append(path.name), path.read_bytes())[1])

  def wait(seconds):
    asked.append(seconds)
    reloads.append(Parsed((folder / 'page.html').read_text()).data('summary')['reload_s'])
    if len(asked) % 2:
      step = len(asked) // 2 + 2
      with open(folder / 'metrics.jsonl', 'a') as file:
        file.write(json.dumps(metrics(step)) + '\n')
      (folder / 'rollouts' / f'{step}.jsonl').write_text(json.dumps(rollout(step)) + '\n')

  found, said = written(folder, follow_s=3.0, wait=wait)
  summary = found.data('summary')
  assert (summary['runs'][0]['last'], summary['runs'][0]['over'], summary['reload_s']) == (4, True, None)
  assert asked == [3.0] * 5 and reloads == [10.0] * 5
  assert len(said) == 4 and 'step 4; 4 rollouts' in said[-1]  # One for each state of the run.
  assert read == ['1.jsonl', '2.jsonl', '3.jsonl', '4.jsonl']  # None twice.


def test_a_page_that_is_not_followed_any_longer_does_not_wait_for_another(tmp_path):
  folder = report_runs.write(tmp_path / 'run', [metrics(1)])

  def interrupt(seconds):
    raise KeyboardInterrupt

  found, said = written(folder, follow_s=20.0, wait=interrupt)
  assert found.data('summary')['reload_s'] is None and said[-1].endswith('no longer updated.')


COMMAND = """
import json
import os
import sys
from absl import flags
from sdpo_jax import command

command.define_list('compare', 'Runs.')
flags.DEFINE_string('output', None, 'File.')
cases = json.loads(sys.argv[1])
for case in cases:
  if not os.fork():
    sys.argv[1:] = case
    sys.stderr = sys.stdout
    command.run(lambda: print(flags.FLAGS.compare, flags.FLAGS.output))
  os.wait()
"""


def test_a_flag_takes_every_value_behind_it():
  cases = {
    '--compare a b --output=x': "['a', 'b'] x",
    '--compare a --compare b c': "['a', 'b', 'c'] None",
    '--compare=a b': "'b' is not a flag",
    '--output x --compare a': "['a'] x",
    '--output x a': "'a' is not a flag",
    'compare a': "'compare a' is not a flag",
    '--compare': 'Missing value for flag --compare',
  }
  commands = json.dumps([each.split() for each in cases])
  done = subprocess.run([sys.executable, '-c', COMMAND, commands], capture_output=True, text=True, cwd=tiny.REPOSITORY)
  said = done.stdout.splitlines()
  assert len(said) == len(cases), done
  assert all(line.startswith(expected) for line, expected in zip(said, cases.values(), strict=True)), said


def test_the_data_of_a_page_are_ascii(tmp_path):
  folder = report_runs.write(tmp_path / 'run', [metrics(1)], {1: [rollout(1, completion='漢字\ud800')]})
  written(folder)
  content = (folder / 'page.html').read_bytes()
  assert content.startswith(page.MARK.encode()) and '漢'.encode() not in content
