"""What a resumed run depends on beside its settings: what changes what is learned is refused, the rest is named."""

import dataclasses
import json
import pathlib
import re
import shutil

from etils import epath
import jax
import numpy as np
import pytest
from safetensors.torch import load_file, save_file
import torch

from sdpo_jax.config import Config
from sdpo_jax.data import pipeline
from sdpo_jax.environments import grader_code, registry
from sdpo_jax.environments.grading import Graders
from sdpo_jax.errors import UserError
from sdpo_jax.inference import runs
from sdpo_jax.learning.update import place_state
from sdpo_jax.models import identity
from sdpo_jax.models import tokenizer as tokenizers
from sdpo_jax.preflight import check
from sdpo_jax.training import loop, opening
from sdpo_jax.training.checkpoint.checkpoints import Checkpoints
from sdpo_jax.training.directory import fingerprint
from sdpo_jax.training.directory import starts as history
from sdpo_jax.training.directory.ownership import sole_user
from sdpo_jax.training.directory.workdir import write_settings
from sdpo_jax.training.questions import held_out_questions, training_questions
from sdpo_jax.training.specs import update_spec
from sdpo_jax.types import Example
from tests import tiny
from tests.conftest import forgetting

GRADER = '''
"""Grades by parity."""
import json
import pathlib

from helping import score
from sdpo_jax.environments import registry
from sdpo_jax.types import Outcome

NEIGHBOUR = 1
BONUS = [json.loads(pathlib.Path(__file__).with_name('bonus.json').read_text())] + [0]
BONUS.append(0)


@registry.register('fingerprinted')
def grade(examples, completions, *, truncated):
  """Return outcomes."""
  import late
  return [Outcome(score(text) + sum(BONUS) + late.EXTRA, 'odd') for text in completions]


def get_config():
  return 1
'''
HELP = """
DIVISOR = 2

def score(text):
  return float(len(text) % DIVISOR)

def other(text):
  return 3
"""


@pytest.fixture(scope='module')
def grader(tmp_path_factory):
  """Return a grader file, what it imports and what it reads; its folder."""
  folder = tmp_path_factory.mktemp('graders')
  (folder / 'my_grader.py').write_text(GRADER)
  (folder / 'helping.py').write_text(HELP)
  (folder / 'late.py').write_text('EXTRA = 0.5')
  (folder / 'bonus.json').write_text('0')
  return folder


@pytest.fixture
def importable(grader, monkeypatch):
  monkeypatch.syspath_prepend(str(grader))
  return grader


@pytest.fixture
def rewritten():
  """Change a file, and change it back."""
  before = {}

  def rewrite(path, old, new):
    before.setdefault(path, path.read_text())
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))

  yield rewrite
  for path, text in before.items():
    path.write_text(text)


def grader_of(file, name='grade'):
  """Return what a file defines, run anew."""
  made = {'__file__': str(file)}
  with forgetting():
    exec(compile(file.read_text(), str(file), 'exec'), made)
  return made[name]


@pytest.mark.parametrize(
  'name, old, new, changed',
  [
    ('my_grader.py', 'Grades by parity', 'Grades somehow', False),
    ('my_grader.py', 'Return outcomes', 'Return', False),
    ('my_grader.py', '  return [Outcome(', '  # Why not?\n\n  return [ Outcome(', False),
    ('my_grader.py', 'return 1', 'return 2', False),  # Settings are compared by their values.
    ('my_grader.py', 'NEIGHBOUR = 1', 'NEIGHBOUR = 2', False),
    ('helping.py', 'return 3', 'return 4', False),  # Nobody calls it.
    ('my_grader.py', "'odd'", "'even'", True),
    ('my_grader.py', '+ [0]', '+ [1]', True),
    ('my_grader.py', 'append(0)', 'append(1)', True),
    ('helping.py', '% DIVISOR', '// DIVISOR', True),
    ('helping.py', 'DIVISOR = 2', 'DIVISOR = 3', True),
    ('bonus.json', '0', '1', True),
    ('late.py', '0.5', '0.6', True),
  ],
)
def test_a_grader_is_told_by_what_it_does_and_by_whose_help(importable, rewritten, name, old, new, changed):
  def digest():
    return grader_code.digest(grader_of(importable / 'my_grader.py'))

  before = digest()
  rewritten(importable / name, old, new)
  assert (digest() != before) == changed


def test_a_grader_is_the_same_in_another_file(importable):
  before = grader_code.digest(grader_of(importable / 'my_grader.py'))
  (importable / 'renamed.py').write_text(f'import os\n{GRADER}\nos.environ.get("HOME")\n')
  assert grader_code.digest(grader_of(importable / 'renamed.py')) == before


def test_the_projects_own_graders_are_told_apart_without_the_machinery_around_them(monkeypatch):
  names = ('digits', 'mcq', 'gpqa', 'tooluse', 'http')
  before = {name: grader_code.digest(registry.get(name, with_server())) for name in names}
  assert len(set(before.values())) == len(names)
  read, read_bytes = [], pathlib.Path.read_bytes
  monkeypatch.setattr(pathlib.Path, 'read_bytes', lambda file: read.append(file) or read_bytes(file))
  for name in names:
    assert grader_code.digest(registry.get(name, with_server())) == before[name]
  assert {file.name for file in read} == {
    'digits.py',
    'multiple_choice.py',
    'judging.py',
    'tool_use.py',
    'http_grader.py',
  }


def with_server():
  settings = Config().environments
  settings.http.url = 'http://localhost:1/'
  return settings


def test_a_grader_without_a_file_is_not_known():
  made = {}
  exec('def grade(examples, completions, *, truncated):\n  return []', made)
  assert grader_code.digest(made['grade']) == 'not known'


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  return tiny.make_model(tmp_path_factory.mktemp('model'))


@pytest.mark.parametrize(
  'name, old, new, changed',
  [
    ('tokenizer_config.json', '<|im_start|>assistant', '<|im_start|>teacher', ['chat_template']),
    ('tokenizer_config.json', '"pad_token": "<|endoftext|>"', '"pad_token": "<|im_start|>"', ['special_tokens']),
    ('config.json', '"eos_token_id": 258', '"eos_token_id": 256', ['special_tokens']),
    ('tokenizer.json', '"add_prefix_space": false', '"add_prefix_space": true', ['rules', 'texts']),
    ('tokenizer.json', '"!": 0,', '"!": 1,', ['vocabulary', 'rules', 'texts']),
    ('tokenizer.json', '"truncation": null', '"truncation":   null', []),
    ('tokenizer_config.json', '"tokenizer_class"', '"model_max_length": 77, "tokenizer_class"', []),
  ],
)
def test_a_tokenizer_is_told_by_what_it_makes_of_texts(model, rewritten, name, old, new, changed):
  before = identity.of_tokenizer(model, tokenizers.load(model))
  if old == '"!": 0,':
    rewritten(model / name, '"\\"": 1,', '"\\"": 0,')
  rewritten(model / name, old, new)
  after = identity.of_tokenizer(model, tokenizers.load(model))
  assert {key for key in before if before[key] != after[key]} == set(changed)


def test_a_template_of_ones_own_is_part_of_the_tokenizer(model, tmp_path):
  path = tmp_path / 'template.jinja'
  path.write_text(tiny.CHAT_TEMPLATE)
  before = identity.of_tokenizer(model, tokenizers.load(model))
  assert identity.of_tokenizer(model, tokenizers.load(model, chat_template=path)) == before
  path.write_text(tiny.CHAT_TEMPLATE + ' ')
  after = identity.of_tokenizer(model, tokenizers.load(model, chat_template=path))
  assert {key for key in before if before[key] != after[key]} == {'chat_template'}


def test_a_model_is_told_by_its_config_and_its_weights_at_some_places(model, rewritten, tmp_path):
  before, weights = identity.of_architecture(model), identity.of_weights(model)
  assert before['rope_theta'] == '10000.0' and 'architectures' not in before
  rewritten(model / 'config.json', '"rope_theta": 10000.0', '"rope_theta": 5000.0')
  assert identity.of_architecture(model) == before | {'rope_theta': '5000.0'}
  assert identity.of_weights(model) == weights
  other = identity.of_weights(tiny.make_model(tmp_path, seed=1))
  assert other['tensors'] == weights['tensors'] and other['values'] != weights['values']


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('parts', [1, 3])
def test_weights_are_told_by_their_values_and_not_by_how_they_are_stored(model, dtype, parts, tmp_path):
  """The oracle is PyTorch, which rounds, divides into files and stores the tied head a second time."""
  tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in load_file(model / 'model.safetensors').items()}
  tensors['lm_head.weight'] = tensors['model.embed_tokens.weight'].clone()
  other = tmp_path / 'other'
  shutil.copytree(model, other)
  (other / 'model.safetensors').unlink()
  names = sorted(tensors, reverse=True)
  files = {f'part{i}.safetensors': names[i::parts] for i in range(parts)}
  for file, held in files.items():
    save_file({name: tensors[name] for name in held}, other / file)
  weight_map = {name: file for file, held in files.items() for name in held}
  (other / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': weight_map}))
  assert identity.of_weights(other) == identity.of_weights(model)
  changed = tensors['model.layers.1.mlp.up_proj.weight']
  changed += 0.01 * changed.abs().max()
  for file, held in files.items():
    save_file({name: tensors[name] for name in held}, other / file)
  assert identity.of_weights(other) != identity.of_weights(model)


def example(**changes):
  return Example(**({'id': 'a', 'messages': [{'role': 'user', 'content': 'Q'}], 'environment': 'e'} | changes))


def test_questions_are_told_by_all_that_a_grader_reads_and_not_by_where_they_lie():
  rows = {'ground_truth': '1', 'data_source': 's', 'extra': {'index': '1', 'origin': 'a.jsonl, line 1'}}
  plain = pipeline.digest([example(**rows)])
  moved = rows | {'extra': {'index': '1', 'origin': 'b.jsonl, line 9'}}
  assert pipeline.digest([example(**moved)]) == plain
  others = [
    rows | {'ground_truth': '2'},
    rows | {'data_source': 't'},
    rows | {'extra': {'index': '2'}},
    rows | {'columns': {'hint': 'x'}},
    rows | {'environment': 'f'},
    rows | {'id': 'b'},
  ]
  assert len({plain, *(pipeline.digest([example(**other)]) for other in others)}) == len(others) + 1
  assert pipeline.digest([example(**rows)] * 2) != plain


def test_a_checkpoint_was_trained_by_the_last_start_from_before_it():
  """Starts from 0, 40 and 80; then the checkpoints of 80 and 70 were damaged and one goes on from 60."""
  starts = [
    {'step': 0, 'parts': {'p': {'a': '1'}}},
    {'step': 40},
    {'step': 80, 'parts': {'p': {'a': '2'}}},
    {'step': 60, 'parts': {'p': {'a': '3'}}},
  ]

  def parts(count, step):
    found = history.trained_by(starts[:count], step)
    return found and found['p']['a']

  assert [parts(3, step) for step in (40, 41, 80, 81)] == ['1', '1', '1', '2']
  assert [parts(4, step) for step in (60, 61, 90)] == ['1', '3', '3']
  assert parts(4, 0) is None and history.trained_by([], 5) is None
  assert history.trained_by([{'step': 7}], 7) is None


ROWS = '{"prompt": "a?", "answer": "1"}\n{"prompt": "b?", "answer": "2"}\n'


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  """Return a run of one step in a folder of its own, with a grader and rows of the user's; and its settings."""
  folder = tmp_path_factory.mktemp('trained')
  (folder / 'rules.py').write_text(
    'from sdpo_jax.environments import registry\nfrom sdpo_jax.types import Outcome\n\n'
    "@registry.register('fingerprint_rules')\n"
    'def grade(examples, completions, *, truncated):\n'
    '  return [Outcome(float(len(text) % 2)) for text in completions]\n'
  )
  (folder / 'rows.jsonl').write_text(ROWS)
  (folder / 'held_out.jsonl').write_text(ROWS)
  config = Config(name='fingerprint')
  config.model.path = str(tiny.make_model(folder / 'model'))
  config.model.dtype, config.model.remat = 'float32', 'none'
  config.environments.modules = (str(folder / 'rules.py'),)
  config.data.train_files, config.data.environment = (str(folder / 'rows.jsonl'),), 'fingerprint_rules'
  config.data.val_files = (str(folder / 'held_out.jsonl'),)
  config.data.train_batch_size = 2
  config.data.max_prompt_length, config.data.max_response_length = 32, 4
  config.data.response_buckets, config.data.reprompt_buckets = (4,), (256,)
  config.rollout.n = config.val_kwargs.n = 4
  config.actor.ppo_mini_batch_size, config.actor.ppo_micro_batch_size = 2, 8
  config.actor.self_distillation.max_reprompt_len = 256
  config.actor.self_distillation.distillation_topk = 8
  config.algorithm.rollout_correction.rollout_is = None
  config.trainer.total_training_steps, config.trainer.val_before_train = 1, False
  config.trainer.test_freq = 1
  config.trainer.tensorboard = False
  begin(config, epath.Path(folder / 'run'))
  return folder, config


def begin(config, workdir):
  """Make what a run of one step leaves, but for the training."""
  with Graders(config.environments) as graders:
    tokenizer = opening.load_tokenizer(config)
    iterator = training_questions(config, tokenizer)
    held_out = held_out_questions(config, tokenizer)
    parts = fingerprint.take(config, tokenizer, iterator, held_out, graders)
  made, parameters = opening.make_session(config, workdir, tokenizer)
  with sole_user(workdir, print) as ownership:
    fingerprint.start(workdir, config, fingerprint.compare(workdir, config, parts), 0, ownership, [])
    write_settings(config, workdir)
  state = place_state(update_spec(config), parameters, made.mesh)
  state = state.replace(step=jax.device_put(np.int32(1), state.step.sharding))
  checkpoints = Checkpoints(workdir)
  checkpoints.save(1, state, {'iterator': iterator.get_state()}, {})
  checkpoints.close()
  (workdir / 'metrics.jsonl').write_text('{"step": 1}\n')


def go_on(folder, config, **trainer):
  """Start the same command again, which has no step left; what it says."""
  said = []
  config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, **trainer))
  loop.train(config, folder / 'run', announce=said.append)
  return said


@pytest.fixture
def run(trained):
  """`trained`, as it was before each test."""
  folder, config = trained
  kept = {name: (folder / 'run' / name).read_bytes() for name in ('fingerprint.json', 'config.json')}
  yield folder, config
  for name, content in kept.items():
    (folder / 'run' / name).write_bytes(content)


def starts(folder):
  return json.loads((folder / 'run' / 'fingerprint.json').read_text())['starts']


def test_a_run_that_goes_on_unchanged_says_nothing_and_is_noted(run):
  folder, config = run
  said = go_on(folder, config)
  assert not [line for line in said if 'rounding' in line or 'not checked' in line or 'Accepted' in line]
  first, second = starts(folder)
  assert set(first['parts']['graders']) == {'fingerprint_rules'} and first['parts']['devices']['kind'] == 'cpu'
  assert [(start['step'], start['fencing_epoch']) for start in (first, second)] == [(0, 1), (1, 2)]
  assert second['changes'] == [] and 'parts' not in second
  assert first['parts']['software']['jax'] == jax.__version__


def test_every_file_of_the_program_is_part_of_the_software():
  files = fingerprint.own_files()
  there = [path for package in ('models', 'sdpo_jax') for path in (tiny.REPOSITORY / package).rglob('*.py')]
  named = [path.relative_to(tiny.REPOSITORY).as_posix() for path in there]
  assert set(files) == {name if name.startswith('sdpo_jax/') else f'sdpo_jax/{name}' for name in named}
  assert files['sdpo_jax/training/loop.py'] == identity.digest(pathlib.Path(loop.__file__).read_bytes())
  assert identity.digest(files) in fingerprint.software()['sdpo_jax']


@pytest.mark.parametrize(
  'name, old, new, part, sentence',
  [
    ('rules.py', '% 2', '% 3', 'graders', r'graders/fingerprint_rules was [0-9a-f]{16} and is now [0-9a-f]{16}'),
    ('rows.jsonl', '"2"', '"3"', 'data', r'data/.*rows.jsonl was [0-9a-f]{16} and is now'),
    ('model/tokenizer_config.json', 'assistant', 'teacher', 'tokenizer', 'tokenizer/chat_template was'),
    ('model/config.json', '10000.0', '20000.0', 'model', 'model/rope_theta was 10000.0 and is now 20000.0'),
  ],
)
def test_what_changes_what_is_learned_is_refused_unless_it_is_accepted(run, rewritten, name, old, new, part, sentence):
  folder, config = run
  rewritten(folder / name, old, new)
  before = (folder / 'run' / 'fingerprint.json').read_text()
  with pytest.raises(UserError, match=rf'{sentence}.* insist with --config.trainer.accept_changes={part}\.$'):
    go_on(folder, config)
  with pytest.raises(UserError, match=sentence):  # Another thing is accepted.
    go_on(folder, config, accept_changes=tuple({'graders', 'data'} - {part}))
  assert (folder / 'run' / 'fingerprint.json').read_text() == before
  said = go_on(folder, config, accept_changes=(part,))
  assert any(re.match(rf'Accepted, as trainer.accept_changes says: {sentence}', line) for line in said)
  last = starts(folder)[-1]
  assert last['accepted'] == [part] and re.match(sentence, last['changes'][0]) and part in last['parts']
  # Nothing was trained since: what was there before still goes on.
  rewritten(folder / name, new, old)
  assert not any('Accepted' in line for line in go_on(folder, config))


def test_what_changes_rounding_or_evaluations_alone_is_named(run, rewritten, monkeypatch):
  folder, config = run
  rewritten(folder / 'held_out.jsonl', '"2"', '"3"')
  monkeypatch.setattr(fingerprint, 'software', lambda: starts(folder)[0]['parts']['software'] | {'jax': '0.1'})
  config = dataclasses.replace(
    config,
    actor=dataclasses.replace(config.actor, logits_chunk_size=64),
    environments=dataclasses.replace(config.environments, grader_timeout_s=7.0),
  )
  said = go_on(folder, config)
  [rounding] = [line for line in said if 'in rounding' in line]
  assert 'actor.logits_chunk_size was 512 and is now 64' in rounding
  assert f'software/jax was {jax.__version__} and is now 0.1' in rounding
  [evaluation] = [line for line in said if line.startswith('Evaluations before and after')]
  assert 'evaluation/questions of held_out was' in evaluation
  assert (
    'From here on other completions may go ungraded: environments.grader_timeout_s was 300.0 and is now 7.0.' in said
  )
  assert len(starts(folder)[-1]['changes']) == 4 and starts(folder)[-1]['accepted'] == []


def test_a_start_without_evaluations_has_nothing_to_say_of_them(run):
  folder, config = run
  config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, test_freq=0, val_before_train=False))
  assert not any('Evaluations before' in line for line in go_on(folder, config))


def test_a_look_at_a_directory_without_a_run_says_that_it_would_begin(run):
  folder, config = run
  found = dict(check.check(config, folder / 'nothing').sections)
  assert found[f'Resuming {folder / "nothing"}'] == 'There is no checkpoint here: the run would begin at step 0.'
  assert not (folder / 'nothing').exists()


OF_NO_PARTS = '{"format": 1, "starts": [{"step": 0, "parts": {"tokenizer": 3}}]}'


def test_a_run_without_a_fingerprint_says_so_and_one_with_a_damaged_one_ends(run):
  folder, config = run
  path = folder / 'run' / 'fingerprint.json'
  path.unlink()
  assert any('does not record the tokenizer, data and graders of the steps up to 1' in s for s in go_on(folder, config))
  assert [start['step'] for start in starts(folder)] == [1]
  for damaged in (
    '',
    '{"format": 2, "starts": []}',
    '{"format": 1, "starts": [{}]}',
    OF_NO_PARTS,
    path.read_text()[:-40],
  ):
    path.write_text(damaged)
    with pytest.raises(UserError, match='restore it, or remove it, after which this start is not compared'):
      go_on(folder, config)


def test_a_start_that_is_refused_leaves_the_settings_of_the_run_as_they_are(run):
  """An earlier version, which wrote no manifests and knows fewer settings, must be able to go on."""
  folder, config = run
  manifest = folder / 'run' / 'checkpoints' / '1' / 'manifest.json'
  before, text = (folder / 'run' / 'config.json').read_bytes(), manifest.read_text()
  manifest.unlink()
  with pytest.raises(UserError, match='as does the version that wrote it'):
    go_on(folder, config, test_freq=2)
  assert (folder / 'run' / 'config.json').read_bytes() == before
  manifest.write_text(text)


def test_hosts_with_different_files_are_found_out(run, monkeypatch):
  parts = starts(run[0])[0]['parts']
  other = parts | {'graders': {'fingerprint_rules': 'ffff'}, 'devices': {}}

  def of_two(value, what):
    return [value, other]

  monkeypatch.setattr(fingerprint, 'gathered', of_two)
  with pytest.raises(
    UserError, match='graders/fingerprint_rules is [0-9a-f]{16} on process 0 and ffff on process 1. Copy'
  ):
    go_on(*run)


def test_a_look_before_a_resume_says_what_the_resume_would_say_and_writes_nothing(run, rewritten):
  folder, config = run
  before = {path: path.read_bytes() for path in (folder / 'run').rglob('*') if path.is_file()}
  assert ('Resuming', 'Nothing has changed that a resumed run would report.') in [
    (title.split()[0], text) for title, text in check.check(config, folder / 'run').sections
  ]
  rewritten(folder / 'held_out.jsonl', '"2"', '"3"')
  assert any('evaluation/questions of held_out was' in line for line in check.check(config, folder / 'run').odd)
  rewritten(folder / 'rules.py', '% 2', '% 3')
  with pytest.raises(UserError, match='graders/fingerprint_rules was'):
    check.check(config, folder / 'run')
  after = {path: path.read_bytes() for path in (folder / 'run').rglob('*') if path.is_file()}
  assert after == before


def test_whoever_reads_a_run_is_told_of_another_tokenizer(run, rewritten, caplog):
  folder, _ = run
  runs.open_run(folder / 'run')
  assert 'was trained with' not in caplog.text
  rewritten(folder / 'model' / 'tokenizer_config.json', 'assistant', 'teacher')
  runs.open_run(folder / 'run')
  assert 'not what the checkpoint of step 1 was trained with: tokenizer/chat_template was' in caplog.text
