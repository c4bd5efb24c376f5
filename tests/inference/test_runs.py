"""Using a run: the weights of its checkpoints, and nothing else of them."""

import json

import chex
import jax
import pytest
from safetensors.numpy import load_file
import transformers

from sdpo_jax.config import Config, MeshConfig, SamplingConfig
from sdpo_jax.distributed import accelerators
from sdpo_jax.errors import UserError
from sdpo_jax.inference import generate, runs
from sdpo_jax.learning.update import place_state
from sdpo_jax.models import checksums, huggingface
from sdpo_jax.models.stored_tensors import WEIGHTS
from sdpo_jax.training.checkpoint.checkpoints import SKIPPED, Checkpoints
from sdpo_jax.training.opening import make_session
from sdpo_jax.training.specs import update_spec
from tests import tiny


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  return tiny.make_model(tmp_path_factory.mktemp('inference') / 'model')


def make_run(workdir, model, teacher: str, chat_template=None, mesh=None):
  """Return a run of one checkpoint, whose student and teacher are the model's weights halved and doubled; its state."""
  config = Config()
  config.model.path, config.model.chat_template = str(model), chat_template
  config.mesh = mesh or config.mesh
  config.actor.self_distillation.teacher_regularization = teacher
  workdir.mkdir()
  (workdir / 'config.json').write_text(config.to_json())
  session, parameters = make_session(config, workdir)
  state = place_state(update_spec(config), parameters, session.mesh)

  def scale(tree, factor):
    return jax.tree.map(lambda leaf: leaf * factor, tree)

  state = state.replace(trainable=scale(state.trainable, 0.5), teacher=scale(state.teacher, 2.0))
  checkpoints = Checkpoints(workdir)
  checkpoints.save(1, state, {}, {})
  checkpoints.wait()
  checkpoints.close()
  return state


@pytest.fixture(scope='module')
def run(model, tmp_path_factory):
  workdir = tmp_path_factory.mktemp('runs') / 'ema'
  return workdir, make_run(workdir, model, 'ema')


@pytest.mark.parametrize('weights, field', [('student', 'trainable'), ('teacher', 'teacher')])
@pytest.mark.parametrize('step', [None, 1])
def test_a_run_opens_with_one_copy_of_the_weights(run, weights, field, step, monkeypatch):
  """Of the checkpoint those that are asked for; the model directory's, which give the layout, are gone by then."""
  workdir, state = run

  def live():
    return sum(array.nbytes for array in jax.live_arrays())

  name, before, during, restored = 'restore' if step is None else 'restore_step', live(), [], []
  restore = getattr(Checkpoints, name)

  def watched(*arguments):
    during.append(live() - before)
    found = restore(*arguments)
    restored.append(found[1] if step is None else found)
    return found

  monkeypatch.setattr(Checkpoints, name, watched)
  _, parameters, found = runs.open_run(workdir, weights, step=step)
  assert found == 1
  chex.assert_trees_all_equal(parameters, getattr(state, field))
  [held], [whole] = during, restored
  assert held < 0.1 * sum(leaf.nbytes for leaf in jax.tree.leaves(parameters))
  assert {leaf is SKIPPED for leaf in jax.tree.leaves(whole.replace(**{field: {}}))} == {True}


@pytest.mark.parametrize('weights, factor', [('student', 0.5), ('teacher', 2.0)])
def test_an_export_holds_the_weights_that_are_asked_for(run, model, weights, factor, tmp_path):
  assert runs.export(run[0], tmp_path / 'out', weights) == 1
  original, exported = (load_file(folder / WEIGHTS) for folder in (model, tmp_path / 'out'))
  chex.assert_trees_all_equal(exported, {name: factor * tensor for name, tensor in original.items()})


def test_a_template_of_ones_own_is_that_of_the_run_and_of_its_exports(tmp_path, caplog):
  """Of a base model, whose tokenizer has none."""
  model, path = tiny.make_model(tmp_path / 'model'), tmp_path / 'bare.jinja'
  tiny.make_tokenizer(model, chat_template=None)
  checksums.write(model)
  with pytest.raises(UserError, match=r'has no chat template: name a file with one in model\.chat_template'):
    make_run(tmp_path / 'without', model, 'live')
  path.write_text('{% for m in messages %}Q{{ m.content }}{% endfor %}')
  make_run(tmp_path / 'run', model, 'live', str(path))
  runs.export(tmp_path / 'run', tmp_path / 'out', 'student')
  exported = transformers.AutoTokenizer.from_pretrained(tmp_path / 'out')
  assert exported.apply_chat_template([{'role': 'user', 'content': '1'}], tokenize=False) == 'Q1'
  assert huggingface.check_files(tmp_path / 'out') >= 5

  def prompt(chat_template=None):
    options = generate.GenerationOptions(SamplingConfig(n=1), 4, max_prompt_length=32, chat_template=chat_template)
    generator = generate.open_generator(runs.RunOrModel(str(tmp_path / 'run')), options)
    tokens = generator.prompt_tokens([{'role': 'user', 'content': '1'}], '--prompt')
    return generator.session.tokenizer.decode(tokens)

  path.rename(tmp_path / 'moved.jinja')
  with pytest.raises(UserError, match=r'model\.chat_template=.*bare\.jinja cannot be read'):
    prompt()
  assert prompt(str(tmp_path / 'moved.jinja')) == 'Q1' and 'completions' not in caplog.text
  path.write_text('{% for m in messages %}{{ m.content }}<|im_start|>{% endfor %}')
  assert prompt() == '1<|im_start|>'
  assert "The chat template ends an answer with '<|im_start|>'" in caplog.text  # Said, as no run would go on.


def test_an_evaluation_of_answers_that_never_end_is_refused(tmp_path):
  model, config = tiny.make_model(tmp_path / 'model'), Config()
  tiny.make_tokenizer(model, '{% for m in messages %}{{ m.content }}<|im_start|>{% endfor %}')
  checksums.write(model)
  config.data.val_files = ('generator:digits',)
  with pytest.raises(
    UserError, match=r'add 257 to rollout\.stop_token_ids, or to eos_token_id in generation_config\.json'
  ):
    runs.evaluate_to_file(config, runs.RunOrModel(model=str(model)), output=str(tmp_path / 'out.json'))


def test_an_export_does_not_replace_a_file(run, tmp_path):
  (tmp_path / 'out').write_text('kept')
  with pytest.raises(UserError, match='out is a file: name a new directory'):
    runs.export(run[0], tmp_path / 'out', 'student')
  assert (tmp_path / 'out').read_text() == 'kept'


def test_a_teacher_without_weights_is_not_opened(model, tmp_path):
  make_run(tmp_path / 'live', model, 'live')
  with pytest.raises(UserError, match='the teacher of this run has no weights of its own; export --weights=student'):
    runs.open_run(tmp_path / 'live', 'teacher')
  assert runs.open_run(tmp_path / 'live', 'student')[2] == 1


@pytest.fixture(scope='module')
def sharded_run(model, tmp_path_factory):
  """Return a run over eight devices, and the digests of its export there."""
  folder = tmp_path_factory.mktemp('sharded')
  make_run(folder / 'run', model, 'live', mesh=MeshConfig(fsdp=8))
  runs.export(folder / 'run', folder / 'exported', 'student')
  return folder / 'run', (folder / 'exported' / checksums.SUMS).read_text()


@pytest.mark.parametrize('count', [1, 3])
def test_other_devices_than_those_of_the_run_export_the_same_bits(sharded_run, count, tmp_path, monkeypatch, caplog):
  workdir, sums = sharded_run
  monkeypatch.setattr(accelerators, 'devices', lambda: jax.devices()[:count])
  runs.export(workdir, tmp_path / 'exported', 'student')
  assert (tmp_path / 'exported' / checksums.SUMS).read_text() == sums and 'model.safetensors' in sums
  assert f'A mesh of fsdp={count} × tensor=1 is used' in caplog.text and 'mesh.fsdp=8 does not divide' in caplog.text
  with pytest.raises(UserError, match=r'mesh\.fsdp=8 does not divide the'):  # To train it on is another matter.
    make_session(runs.run_config(workdir), workdir)


@pytest.mark.slow
def test_a_run_on_eight_devices_is_used_on_one(sharded_run, tmp_path):
  workdir, sums = sharded_run
  options = generate.GenerationOptions(SamplingConfig(n=1, temperature=0.0), 8)
  [answer] = generate.open_generator(runs.RunOrModel(str(workdir)), options).generate('Hello')
  sizes = {'mesh.fsdp': 8, 'data.max_prompt_length': 256, 'data.val_max_samples': 4}
  small = ['--config=configs/quickstart.py', *(f'--config.{name}={size}' for name, size in sizes.items())]
  commands = [
    ('export', [f'--workdir={workdir}', f'--output={tmp_path}/exported']),
    ('sample', [f'--workdir={workdir}', '--prompt=Hello', '--temperature=0', '--max_tokens=8']),
    ('evaluate', [*small, f'--workdir={workdir}', f'--output={tmp_path}/results.json']),
  ]
  done = tiny.launch_many(commands, quick=True)
  assert [command.returncode for command in done] == [0, 0, 0], [command.stderr for command in done]
  assert (tmp_path / 'exported' / checksums.SUMS).read_text() == sums and done[1].stdout == answer + '\n'
  assert 'digits' in json.loads((tmp_path / 'results.json').read_text())


def test_a_model_that_is_not_there_is_named_by_its_flag():
  with pytest.raises(UserError, match='The model directory none does not exist: set --model to one that does'):
    runs.open_source(runs.RunOrModel(model='./none'), None)
