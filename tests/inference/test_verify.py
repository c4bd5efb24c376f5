"""launch.verify: every damage to what a run has left is named, nothing is touched, and what would be lost is said."""

import json
import pathlib
import shutil

from etils import epath
import jax.numpy as jnp
import numpy as np
import pytest

from sdpo_jax.config import Config
from sdpo_jax.errors import UserError
from sdpo_jax.evaluation.evaluate import Evaluation
from sdpo_jax.inference import verify
from sdpo_jax.training import metrics, step_records
from sdpo_jax.training.checkpoint import checkpoints, digests
from sdpo_jax.training.checkpoint.stored_arrays import stored_digest
from sdpo_jax.training.directory import epochs, lock_owner, sealed
from sdpo_jax.training.directory.workdir import write_settings
from tests import tiny
from tests.training_states import files_below, flipped, make_state


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  """Return a run of five steps with checkpoints of two and four."""
  workdir = tmp_path_factory.mktemp('verify') / 'run'
  opened = checkpoints.Checkpoints(workdir)
  lines = []
  for step in range(1, 6):
    state = make_state(step)
    lines.append({'step': step, 'state_digest': digests.state_digest(digests.leaf_digests(state))})
    if step % 2 == 0:
      opened.save(step, state, {'iterator': {'position': step}}, {})
  opened.close()
  (workdir / 'config.json').write_text(Config(name='finished').to_json())
  (workdir / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
  for name in ('rollouts/4.jsonl', 'eval/4.json'):
    (workdir / name).parent.mkdir()
    (workdir / name).write_text('{"a": 1}\n')
  return workdir


@pytest.fixture
def run(finished, tmp_path):
  return pathlib.Path(shutil.copytree(finished, tmp_path / 'run'))


def verified(workdir) -> tuple[int, str]:
  said = []
  before = {path: path.read_bytes() for path in files_below(workdir)}
  code = verify.verify(str(workdir), None, said.append)
  assert {path: path.read_bytes() for path in files_below(workdir)} == before
  return code, '\n'.join(said)


def test_a_whole_run(run):
  code, said = verified(run)
  assert code == verify.ALL_WHOLE and 'damaged ' not in said
  assert 'ok       checkpoints/4: 12 arrays' in said and ', as in metrics.jsonl' in said
  assert said.endswith(
    'if it stopped now, step 5 since the last whole checkpoint (step 4) would be lost and computed again.'
  )
  lines = (run / 'metrics.jsonl').read_text().splitlines(keepends=True)
  (run / 'metrics.jsonl').write_text(''.join(lines[:4]))
  code, said = verified(run)
  assert code == verify.ALL_WHOLE and said.endswith('nothing would be lost: step 4 has a whole checkpoint.')


def damage_array(run):
  for path in (run / 'checkpoints' / '4' / 'state').glob('**/d/*'):  # One of them may hold what was written anew since.
    path.write_bytes(flipped(path.read_bytes(), 4 * path.stat().st_size))


def append(name, text):
  def act(run):
    with (run / name).open('a') as file:
      file.write(text)

  return act


def replace(name, old, new):
  def act(run):
    text = (run / name).read_text()
    assert old in text
    (run / name).write_text(text.replace(old, new, 1))

  return act


def add(name, text):
  return lambda run: (run / name).write_text(text)


def to_file(name):
  return lambda run: (shutil.rmtree(run / name), (run / name).write_text('x'))


def to_link(name, target):
  return lambda run: ((run / name).rename(run.parent / 'moved'), (run / name).symlink_to(target))


def publish(step):
  return lambda run: (run / 'epochs.json').write_text(epochs.Epochs(published=step).to_json())


@pytest.mark.parametrize(
  ('act', 'code', 'text'),
  [
    (damage_array, 1, 'damaged  checkpoints/4: the array '),
    (
      lambda run: (run / 'checkpoints/4/host/metadata').unlink(),
      1,
      'damaged  checkpoints/4: its file host/metadata is mis',
    ),
    (lambda run: (run / 'checkpoints/4/manifest.json').unlink(), 1, 'damaged  checkpoints/4: it has no manifest.json'),
    (replace('metrics.jsonl', '{"step": 3', '{"step": 2'), 1, '/run/metrics.jsonl has several lines of step 2.'),
    (replace('metrics.jsonl', '{"step": 3', '{"step": 2'), 1, '/run/metrics.jsonl has no line of step 3, whose n'),
    (replace('metrics.jsonl', '{"step": 3', '{"step"; 3'), 1, '/run/metrics.jsonl, line 3 is not JSON: the file was'),
    (append('metrics.jsonl', '{"ste'), 0, 'note     metrics.jsonl: line 6 is cut off'),
    (append('rollouts/4.jsonl', '{"ste\n'), 1, 'damaged  rollouts/4.jsonl: line 2 is not as it was'),
    (append('rollouts/4.jsonl', 'null\n'), 1, 'damaged  rollouts/4.jsonl: line 2 is not as it was'),
    (append('rollouts/4.jsonl', '7'), 1, 'damaged  rollouts/4.jsonl: its end is missing'),
    (append('eval/4.json', '}'), 1, 'damaged  eval/4.json: is not as it was written (Ex'),
    (lambda run: ((run / 'metrics.jsonl').unlink(), (run / 'metrics.jsonl').mkdir()), 1, 'damaged  metrics.jsonl: '),
    (lambda run: (run / '.lock').mkdir(), 1, 'damaged  .lock: '),
    (lambda run: (run / 'config.json').write_text('{'), 1, 'damaged  config.json: '),
    (lambda run: (run / 'config.json').unlink(), 1, 'earlier starts: config.json is missing.'),
    (lambda run: (run / 'metrics.jsonl').unlink(), 1, 'is missing, and with it the lines of steps 1–4, whose'),
    (publish(4), 0, 'ok       checkpoints/4'),
    (publish(4), 0, 'ok       epochs.json: fencing epoch 0; the checkpoint of step 4 was published last'),
    (publish(0), 0, 'ok       rollouts: 1 file\n'),
    (publish(6), 1, 'the checkpoint of step 6 was published and is no longer there'),
    (lambda run: (publish(4)(run), (run / 'metrics.jsonl').unlink()), 1, 'damaged  metrics.jsonl: '),
    (lambda run: (run / 'metrics.jsonl').write_text(''), 1, '/run/metrics.jsonl has no line of steps 1–4, whose'),
    (lambda run: (run / 'epochs.json').write_text('{}'), 1, 'damaged  epochs.json: '),
    (
      lambda run: (run / 'checkpoints/6.unfinished.1').mkdir(),
      0,
      'note     checkpoints/6.unfinished.1: is being written',
    ),
    (lambda run: (run / 'checkpoints_damaged/3').mkdir(parents=True), 0, 'note     checkpoints_damaged: 3: set aside'),
    (lambda run: (run / '.0123456789abcdef.partial').write_text(''), 0, 'note     .0123456789abcdef.partial: is being'),
    (lambda run: shutil.rmtree(run / 'checkpoints'), 2, 'no whole checkpoint to resume from: steps 1–5 would be lost'),
    (to_file('checkpoints'), 2, 'is a file where the run needs a folder: move it away or choose another --workdir.\n'),
    (to_file('checkpoints'), 2, 'is refused because of checkpoints, for which a way out is named above; there is no w'),
    (to_link('checkpoints', '../moved'), 1, 'damaged  checkpoints: /'),
    (to_link('checkpoints', '../moved'), 1, 'ok       checkpoints/4: 12 arrays'),
    (to_link('checkpoints', '/nowhere'), 2, '/run/checkpoints is a link, which a run does not write through: repl'),
    (to_link('metrics.jsonl', '../moved'), 1, '/run/metrics.jsonl is a link, which a run does not write through: re'),
    (to_link('eval', '../moved'), 1, '/run/eval is a link, which a run does not write through: replace it with its'),
    (to_link('checkpoints/4', '/nowhere'), 1, 'damaged  checkpoints/4: it has no manifest.json'),
    (lambda run: (run / '.lock').write_text(lock_owner.this_process(3).to_json()), 0, 'is training here now'),
    (add(f'rollouts/{"9" * 60}.jsonl', '{"a": 1}\n'), 0, 'if it stopped now, step 5 since the last whole'),
    (add('eval/999999999.json', '{"a": 1}'), 0, 'if it stopped now, step 5 since the last whole'),
    (append('metrics.jsonl', json.dumps({'step': 10**30}) + '\n'), 1, f'stopped now, steps 5, 1{"0" * 30} since the'),
  ],
)
def test_what_is_wrong_is_named(run, act, code, text):
  act(run)
  found, said = verified(run)
  assert text in said and found == code, said


@pytest.fixture(scope='module')
def written(tmp_path_factory):
  """Return a run of three steps as this version writes it, with a checkpoint of each and one evaluation."""
  workdir = tmp_path_factory.mktemp('verify') / 'run'
  workdir.mkdir()
  config = Config(name='written')
  config.trainer.tensorboard = False
  write_settings(config, epath.Path(workdir))
  writer, opened = metrics.MetricsWriter(workdir, config), checkpoints.Checkpoints(workdir, keep=3)
  (workdir / 'rollouts').mkdir()
  for step in range(1, 4):
    state, evaluated = make_state(step), {'eval/sums/mean@2': 0.5} if step == 2 else {}
    samples = [{'step': step, 'completion': text} for text in ('a', 'b', 'c')]
    (workdir / 'rollouts' / f'{step}.jsonl').write_text(sealed.seal_lines(samples, str(step)))
    if evaluated:
      step_records.write_evaluation(epath.Path(workdir), step, Evaluation({'sums': {'mean@2': 0.5}}, samples))
    digest = digests.state_digest(digests.leaf_digests(state))
    writer.write(step, {'rollout/recorded': 3, 'state_digest': digest, **evaluated})
    opened.save(step, state, {}, {}, None, writer.sync())
  opened.close()
  return workdir


def cut(name, count):
  def act(run):
    (run / name).write_text(''.join((run / name).read_text().splitlines(keepends=True)[:count]))

  return act


@pytest.mark.parametrize(
  ('act', 'text'),
  [
    (lambda run: None, '3 lines, 3 with a state_digest, up to step 3'),
    (cut('metrics.jsonl', 2), '/run/metrics.jsonl has no line of step 3, whose numbers'),
    (replace('metrics.jsonl', '"eval/sums/mean@2": 0.5', '"eval/sums/mean@2": 0.7'), 'metrics.jsonl, line 2 is not as'),
    (cut('rollouts/3.jsonl', 0), 'damaged  rollouts/3.jsonl: its end is missing'),
    (cut('rollouts/2.jsonl', 2), 'damaged  rollouts/2.jsonl: lines were removed, moved or altered before line 1'),
    (replace('rollouts/2.jsonl', '"b"', '"d"'), 'damaged  rollouts/2.jsonl: line 2 is not as it was'),
    (lambda run: (run / 'rollouts/1.jsonl').unlink(), '/run/rollouts has no file of step 1 any more'),
    (lambda run: shutil.rmtree(run / 'eval'), '/run/eval has no file of step 2 any more'),
    (replace('eval/2.json', '0.5', '0.6'), 'damaged  eval/2.json: '),
    (
      lambda run: shutil.copy(run / 'eval/2.json', run / 'eval/4.json'),
      'damaged  eval/4.json: is the file of another st',
    ),
    (replace('config.json', '"seed": 0', '"seed": 1'), 'damaged  config.json: '),
  ],
)
def test_what_is_sealed_is_compared(written, tmp_path, act, text):
  run = pathlib.Path(shutil.copytree(written, tmp_path / 'run'))
  act(run)
  code, said = verified(run)
  assert text in said and said.count('damaged  ') == code == (' with a state' not in text), said


def test_the_summary_names_what_a_resume_is_refused_for(written, tmp_path):
  run = pathlib.Path(shutil.copytree(written, tmp_path / 'run'))
  replace('metrics.jsonl', '"eval/sums/mean@2": 0.5', '"eval/sums/mean@2": 0.7')(run)
  replace('config.json', '"seed": 0', '"seed": 1')(run)
  _, said = verified(run)
  assert said.endswith(
    ': 2 damaged; a resume is refused because of config.json, metrics.jsonl, for which a way out is named above; after '
    'that, nothing would be lost: step 3 has a whole checkpoint.'
  )


def test_a_damaged_checkpoint_that_was_published_last_is_one_finding(run):
  damage_array(run)
  publish(4)(run)
  code, said = verified(run)
  assert code == verify.SOME_DAMAGED and said.count('damaged  ') == 1 and ': 1 damaged; if it stopped' in said, said


def test_another_state_than_the_line_of_the_step_is_damage(run):
  text = (run / 'metrics.jsonl').read_text().splitlines(keepends=True)
  other = json.loads(text[3]) | {'state_digest': 'f' * 64}
  (run / 'metrics.jsonl').write_text(''.join([*text[:3], json.dumps(other) + '\n', text[4]]))
  code, said = verified(run)
  assert code == verify.SOME_DAMAGED and 'metrics.jsonl and the checkpoint of step 4 are not of the same run' in said


def test_a_run_beside_the_working_directory_is_whole(run, tmp_path, monkeypatch):
  (tmp_path / 'beside').mkdir()
  monkeypatch.chdir(tmp_path / 'beside')
  code, said = verified(pathlib.Path('..') / run.name)
  assert code == verify.ALL_WHOLE and 'ok       checkpoints/4: 12 arrays' in said


def test_arrays_are_read_chunk_by_chunk_as_they_are_stored(tmp_path):
  """Of several devices, in dtypes that NumPy does not know."""
  import jax

  mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ('a', 'b'))
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('a', None, 'b'))
  whole = np.random.default_rng(0).normal(size=(4, 3, 8)).astype(jnp.bfloat16)
  state = make_state(1).replace(trainable={'w': jax.device_put(whole, sharding), 'b': jnp.zeros(3)})
  opened = checkpoints.Checkpoints(tmp_path)
  opened.save(1, state, {}, {})
  opened.close()
  expected = digests.leaf_digests(state)
  for name, digest in expected.items():
    assert stored_digest(opened.directory / '1', name) == digest, name


def test_a_model_directory_is_compared_with_its_sums(tmp_path):
  said = []
  folder = tiny.make_model(tmp_path / 'plain')
  assert verify.verify(None, str(folder), said.append) == verify.ALL_WHOLE and 'are as they were written' in said[-1]
  (folder / 'SHA256SUMS').unlink()
  assert verify.verify(None, str(folder), said.append) == verify.NOTHING_LEFT and 'nothing to compare with' in said[-1]
  for arguments in ((None, None), ('a', 'b')):
    with pytest.raises(UserError, match='Name one of --workdir'):
      verify.verify(*arguments, said.append)
  for path, what in (
    (tmp_path / 'new', 'there is no such'),
    (folder, r'its config\.json is not that of a run; a model'),
  ):
    with pytest.raises(UserError, match=f'is not a run: {what}'):
      verify.verify(str(path), None, said.append)


@pytest.mark.slow  # By default it is called, as above.
def test_the_command(run):
  damage_array(run)
  done = tiny.launch('verify', f'--workdir={run}')
  assert done.returncode == verify.SOME_DAMAGED and 'damaged  checkpoints/4' in done.stdout, done.stderr
  assert 'since the last whole checkpoint (step 2)' in done.stdout.splitlines()[-1]
