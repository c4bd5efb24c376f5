"""Damage to each kind of file of a run: launch.verify says what a resume does, in its words, and the way out works."""

import json
import pathlib
import re
import shutil

from etils import epath
import jax
import numpy as np
import pytest

from sdpo_jax.config import Config
from sdpo_jax.data.pipeline import TrainIterator
from sdpo_jax.environments.grading import Graders
from sdpo_jax.errors import UserError
from sdpo_jax.evaluation.evaluate import Evaluation
from sdpo_jax.inference import verify
from sdpo_jax.learning.update import place_state
from sdpo_jax.training import loop, opening, questions, step_records
from sdpo_jax.training.checkpoint import digests
from sdpo_jax.training.checkpoint.checkpoints import Checkpoints
from sdpo_jax.training.directory import fingerprint, lost_checkpoints, sealed
from sdpo_jax.training.directory.ownership import sole_user
from sdpo_jax.training.directory.workdir import check_workdir, write_settings
from sdpo_jax.training.metrics import MetricsWriter
from sdpo_jax.training.specs import update_spec
from tests import tiers, tiny

STEPS = 2


@pytest.fixture(scope='module')
def config(tmp_path_factory) -> Config:
  """Return settings by which no step is left after the first, so that nothing is compiled."""
  made = Config(name='damaged')
  made.model.path = str(tiny.make_model(tmp_path_factory.mktemp('model')))
  made.model.dtype, made.model.remat = 'float32', 'none'
  made.data.train_files = made.data.val_files = ('generator:digits',)
  made.data.train_batch_size = made.data.val_max_samples = 2
  made.data.max_prompt_length, made.data.max_response_length = 64, 4
  made.data.response_buckets, made.data.reprompt_buckets = (4,), (512,)
  made.rollout.n = 4
  made.actor.ppo_mini_batch_size, made.actor.ppo_micro_batch_size = 2, 8
  made.actor.self_distillation.max_reprompt_len = 512
  made.actor.self_distillation.distillation_topk = 8
  made.algorithm.rollout_correction.rollout_is = None
  made.trainer.total_training_steps, made.trainer.val_before_train = 1, False
  made.trainer.test_freq = 1
  made.trainer.tensorboard = False
  return made


@pytest.fixture(scope='module')
def whole(config, tmp_path_factory) -> pathlib.Path:
  """Return what a run of two steps leaves, each with a checkpoint, rollouts and an evaluation, but for the training."""
  run = epath.Path(tmp_path_factory.mktemp('run') / 'run')
  with Graders(config.environments) as graders:
    tokenizer = opening.load_tokenizer(config)
    iterator: TrainIterator = questions.training_questions(config, tokenizer)
    held_out = questions.held_out_questions(config, tokenizer)
    parts = fingerprint.take(config, tokenizer, iterator, held_out, graders)
  session, parameters = opening.make_session(config, run, tokenizer)
  with sole_user(run, print) as ownership:
    fingerprint.start(run, config, fingerprint.compare(run, config, parts), 0, ownership, [])
    ownership.resumed(0)
    write_settings(config, run)
    writer, checkpoints = MetricsWriter(run, config, ownership=ownership), Checkpoints(run, ownership=ownership)
    (run / 'rollouts').mkdir()
    state = place_state(update_spec(config), parameters, session.mesh)
    for step in range(1, STEPS + 1):
      state = state.replace(step=jax.device_put(np.int32(step), state.step.sharding))
      samples = [{'completion': text} for text in 'ab']
      (run / 'rollouts' / f'{step}.jsonl').write_text(sealed.seal_lines(samples, str(step)))
      step_records.write_evaluation(run, step, Evaluation({'sums': {'mean@1': step / 8}}, samples))
      digest = digests.state_digest(digests.leaf_digests(state))
      line = {'rollout/recorded': 2, 'train/loss': step / 8, 'eval/sums/mean@1': step / 8, 'state_digest': digest}
      writer.write(step, line)
      checkpoints.save(step, state, {'iterator': iterator.get_state()}, {}, None, writer.sync())
    writer.close()
    checkpoints.close()
  return pathlib.Path(run)


def edit(name, old, new):
  def act(run):
    text = (run / name).read_text()
    assert old in text
    (run / name).write_text(text.replace(old, new, 1))

  return act


def lines(name, *kept):
  def act(run):
    texts = (run / name).read_text().splitlines(keepends=True)
    (run / name).write_text(''.join(texts[number] for number in kept))

  return act


def remove(*names):
  def act(run):
    for name in names:
      shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()

  return act


def respell(run):
  texts = (run / 'metrics.jsonl').read_text().splitlines()
  (run / 'metrics.jsonl').write_text(
    ''.join(json.dumps(json.loads(text), separators=(',', ':')) + '\n' for text in texts)
  )


def both(*acts):
  return lambda run: [act(run) for act in acts]


HOST = 'checkpoints/{}/host/metadata'
# Damage → the step from which a resume goes on, None: it is refused; what both say; then what mends it.
DAMAGES = {
  'none': (lambda run: None, 2, '', None),
  'altered line': (
    edit('metrics.jsonl', '"train/loss": 0.125', '"train/loss": 0.5'),
    None,
    'metrics.jsonl, line 1 is not as it was written',
    lines('metrics.jsonl', 1),
  ),
  'altered last line': (
    edit('metrics.jsonl', '"train/loss": 0.25', '"train/loss": 0.5'),
    None,
    'metrics.jsonl, line 2 is not as it was written',
    lines('metrics.jsonl', 0),
  ),
  'first line removed': (lines('metrics.jsonl', 1), 2, 'metrics.jsonl has no line of step 1, whose', None),
  'last line removed': (lines('metrics.jsonl', 0), 2, 'metrics.jsonl has no line of step 2, whose', None),
  'all lines removed': (lines('metrics.jsonl'), 2, 'metrics.jsonl has no line of steps 1–2, whose', None),
  'no metrics.jsonl': (remove('metrics.jsonl'), 2, 'is missing, and with it the lines of steps 1–2, whose', None),
  'no line': (edit('metrics.jsonl', '{"step": 1', '{"step"; 1'), None, 'line 1 is not JSON', lines('metrics.jsonl', 1)),
  'altered config.json': (
    edit('config.json', '"seed": 0', '"seed": 1'),
    None,
    'config.json is not as it was written .*: restore it, or remove it',
    remove('config.json'),
  ),
  'no config.json': (
    remove('config.json'),
    2,
    'Settings are not compared with those of earlier starts: config.json is missing.',
    None,
  ),
  'altered fingerprint.json': (
    edit('fingerprint.json', '"platform": "cpu"', '"platform": "gpu"'),
    None,
    'fingerprint.json is not as it was written .*: restore it, or remove it',
    remove('fingerprint.json'),
  ),
  'no fingerprint.json': (
    remove('fingerprint.json'),
    2,
    'fingerprint.json does not record the tokenizer, data and graders of the steps up to 2: .* not checked',
    None,
  ),
  'altered epochs.json': (
    edit('epochs.json', '"published": 2', '"published": 3'),
    2,
    'epochs.json is damaged .*; the next start of the run restores it',
    None,
  ),
  'no rollouts': (remove('rollouts'), 2, 'rollouts has no file of steps 1–2 any more', None),
  'no evaluation': (remove('eval/1.json'), 2, 'eval has no file of step 1 any more', None),
  'newest checkpoint': (edit(HOST.format(2), '{', '['), 1, 'its file host/metadata', None),
  'no newest checkpoint': (
    remove('checkpoints/2'),
    1,
    'the checkpoint of step 2 was published and is no longer there; the newest is that of step 1',
    None,
  ),
  'only checkpoint': (
    both(remove('checkpoints/1'), edit(HOST.format(2), '{', '[')),
    None,
    r'None of the checkpoints in .* is whole .*\)\. To begin again at step 0, move that folder away and add --restart',
    None,
  ),
  'manifest of the only checkpoint': (
    both(remove('checkpoints/1'), remove('checkpoints/2/manifest.json')),
    None,
    r'None of the checkpoints in .* is whole .* manifest.*\)\. To begin again at step 0, move that folder away and add',
    None,
  ),
  'no checkpoint': (
    remove('checkpoints'),
    None,
    'has no checkpoint to resume from, although that of step 2 was published .* or add --restart',
    None,
  ),
  'no checkpoint and no epochs.json': (
    remove('checkpoints', 'epochs.json'),
    None,
    'has no checkpoint to resume from, .*: mount the disk .* or add --restart',
    None,
  ),
  'no checkpoint and altered epochs.json': (
    both(remove('checkpoints'), edit('epochs.json', '"published": 2', '"published": 3')),
    None,
    'has no checkpoint to resume from, .*: mount the disk .* or add --restart',
    None,
  ),
  'no checkpoint and no config.json': (
    remove('checkpoints', 'config.json'),
    None,
    'holds a run without config.json and without checkpoints: add --restart',
    None,
  ),
}
BY_DEFAULT = (
  'altered line',
  'first line removed',
  'no config.json',
  'only checkpoint',
  'no checkpoint and no epochs.json',
)
STANDING = ('no fingerprint.json', 'no newest checkpoint')  # Said until there is a later checkpoint.
# What a resume does not read: it says nothing, and verify says that it goes on.
UNREAD = {
  'altered spelling': (respell, 'line 1–2 was written anew, with the same values; a resume goes on'),
  'altered rollouts': (edit('rollouts/1.jsonl', '"a"', '"c"'), 'line 1 is not as it was written; a resume goes on'),
  'altered evaluation': (edit('eval/1.json', '0.125', '0.5'), 'is not as it was written .*; a resume goes on'),
}


def verified(run) -> tuple[int, list[str]]:
  said: list[str] = []
  code = verify.verify(str(run), None, said.append)
  state = {}
  for text in said[:-1]:
    word, what = re.match(r'(\w+) +(\S+): ', text).groups()
    assert state.setdefault(what, word) == word or verify.WHOLE not in (word, state[what]), said
  return code, said


def resumed(config, run, caplog) -> tuple[int | None, str]:
  """Resume a run; return the step from which it went on, None if it was refused, and all that was said."""
  said: list[str] = []
  caplog.clear()
  try:
    loop.train(config, run, announce=said.append)
  except UserError as error:
    return None, str(error)
  [step] = [int(found[1]) for text in said if (found := re.match(r'Resuming .* at step (\d+)', text))]
  return step, '\n'.join([*said, *caplog.messages])


@pytest.mark.parametrize('name', tiers.cases(DAMAGES, default=BY_DEFAULT, slow=DAMAGES))
def test_verify_says_what_a_resume_does(config, whole, tmp_path, caplog, name):
  damage, step, sentence, mend = DAMAGES[name]
  run = pathlib.Path(shutil.copytree(whole, tmp_path / 'run'))
  damage(run)
  code, said = verified(run)
  assert re.search(sentence, '\n'.join(said)), said
  assert ('a resume is refused because of' in said[-1]) == (step is None), said
  assert (
    step is None or f'step {step} has a whole' in said[-1] or f'the last whole checkpoint (step {step})' in said[-1]
  )
  assert (code == verify.ALL_WHOLE) == (name in ('none', 'no fingerprint.json'))
  found, told = resumed(config, run, caplog)
  assert found == step and re.search(sentence, told), told
  if step is not None:
    assert name in ('none', 'altered epochs.json') or len(re.findall(sentence, told)) == 1, told  # Once a start,
    found, told = resumed(config, run, caplog)
    assert found == step and (name in ('none', *STANDING) or not re.search(sentence, told)), told  # and only once.
  elif mend is not None:
    mend(run)
    assert resumed(config, run, caplog)[0] == STEPS


@pytest.mark.parametrize('name', tiers.cases(UNREAD, default=('altered spelling',), slow=UNREAD))
def test_verify_says_that_a_resume_goes_on_without_what_it_does_not_read(config, whole, tmp_path, caplog, name):
  damage, sentence = UNREAD[name]
  run = pathlib.Path(shutil.copytree(whole, tmp_path / 'run'))
  damage(run)
  code, said = verified(run)
  damaged = [text for text in said if text.startswith(verify.DAMAGE)]
  assert code == verify.SOME_DAMAGED and [bool(re.search(sentence, text)) for text in damaged] == [True], said
  assert resumed(config, run, caplog)[0] == STEPS


@pytest.mark.parametrize('name', ['only checkpoint', 'no checkpoint', 'no checkpoint and no config.json'])
def test_a_run_without_a_whole_checkpoint_begins_again_as_it_is_told(config, whole, tmp_path, name):
  run = epath.Path(shutil.copytree(whole, tmp_path / 'run'))
  DAMAGES[name][0](pathlib.Path(run))
  if (run / 'checkpoints').exists():
    (run / 'checkpoints').rename(tmp_path / 'away')
  said: list[str] = []
  check_workdir(config, run, restart=True)
  with sole_user(run, said.append) as ownership:
    lost_checkpoints.settle(run, ownership, restart=True, say=said.append)
  assert 'The run begins again at step 0' in said[-1] and (run / 'before_restart' / '1' / 'metrics.jsonl').exists()
