"""Runs of adapters: what is exported of them, what starts from an adapter, and that a base is never taken for
another.
"""

import dataclasses
import json
import os
import shutil

from absl import flags
from etils import epath
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
import torch
import transformers

from sdpo_jax import command
from sdpo_jax.config import Config, LoraConfig
from sdpo_jax.environments.grading import Graders
from sdpo_jax.errors import UserError
from sdpo_jax.inference import probe, runs
from sdpo_jax.learning.update import place_state
from sdpo_jax.models import checksums, identity
from sdpo_jax.models.adapters import peft_config, peft_files
from sdpo_jax.training import loop, opening
from sdpo_jax.training.checkpoint.checkpoints import Checkpoints
from sdpo_jax.training.directory import fingerprint
from sdpo_jax.training.directory.ownership import sole_user
from sdpo_jax.training.directory.workdir import write_settings
from sdpo_jax.training.questions import training_questions
from sdpo_jax.training.specs import update_spec
from tests import exported_cards, hub_server, tiny

torch.set_num_threads(1)
ROWS = '{"prompt": "a?", "answer": "1"}\n{"prompt": "b?", "answer": "2"}\n'
TOKENS = np.random.default_rng(0).integers(1, 256, (1, 12)).astype(np.int32)


def begin(config, workdir):
  """Return what a run of one step leaves, but for the training: random factors, other ones of the teacher."""
  with Graders(config.environments) as graders:
    tokenizer = opening.load_tokenizer(config)
    iterator = training_questions(config, tokenizer)
    parts = fingerprint.take(config, tokenizer, iterator, [], graders)
  made, factors = opening.make_session(config, workdir, tokenizer)
  with sole_user(workdir, print) as ownership:
    fingerprint.start(workdir, config, fingerprint.compare(workdir, config, parts), 0, ownership, [])
    write_settings(config, workdir)
  state = place_state(update_spec(config), factors, made.mesh, made.policy.parameter_table())
  draw = np.random.default_rng(1)

  def drawn(tree):
    return jax.tree.map(
      lambda leaf: jax.device_put(0.2 * draw.standard_normal(leaf.shape, np.float32), leaf.sharding), tree
    )

  state = state.replace(
    step=jax.device_put(np.int32(1), state.step.sharding),
    trainable=drawn(state.trainable),
    teacher=drawn(state.teacher),
  )
  checkpoints = Checkpoints(workdir)
  checkpoints.save(1, state, {'iterator': iterator.get_state()}, {})
  checkpoints.close()
  (workdir / 'metrics.jsonl').write_text('{"step": 1}\n')
  return made, state


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """Return (settings, workdir, session, state) of a run of a rank-stabilised adapter, some layers without factors."""
  folder = tmp_path_factory.mktemp('adapter_runs')
  (folder / 'rules.py').write_text(
    'from sdpo_jax.environments import registry\nfrom sdpo_jax.types import Outcome\n\n'
    "@registry.register('adapter_rules')\n"
    'def grade(examples, completions, *, truncated):\n'
    '  return [Outcome(float(len(text) % 2)) for text in completions]\n'
  )
  (folder / 'rows.jsonl').write_text(ROWS)
  config = Config(name='adapter')
  config.model.path = str(tiny.make_model(folder / 'model'))
  config.model.dtype, config.model.remat = 'float32', 'none'
  config.model.lora = LoraConfig(rank=4, alpha=6.0, use_rslora=True, target_modules=('attention', 'layers.1.mlp'))
  config.environments.modules = (str(folder / 'rules.py'),)
  config.data.train_files, config.data.environment = (str(folder / 'rows.jsonl'),), 'adapter_rules'
  config.data.val_files = config.data.train_files
  config.data.train_batch_size = 2
  config.data.max_prompt_length, config.data.max_response_length = 32, 4
  config.data.response_buckets, config.data.reprompt_buckets = (4,), (256,)
  config.rollout.n = config.val_kwargs.n = 2
  config.actor.ppo_mini_batch_size, config.actor.ppo_micro_batch_size = 2, 4
  config.actor.self_distillation.max_reprompt_len = 256
  config.actor.self_distillation.distillation_topk = 8
  config.algorithm.rollout_correction.rollout_is = None
  config.trainer.total_training_steps, config.trainer.test_freq, config.trainer.tensorboard = 1, 0, False
  workdir = epath.Path(folder / 'run')
  return config, workdir, *begin(config, workdir)


@pytest.fixture
def kept(run):
  """`run`; its model and its directory are afterwards what they were."""
  config, workdir = run[:2]
  files = [*epath.Path(config.model.path).iterdir(), *(workdir / name for name in ('fingerprint.json', 'config.json'))]
  content = {file: file.read_bytes() for file in files}
  yield run
  for file, before in content.items():
    file.write_bytes(before)


def other_weights(model):
  """Write other weights into a model directory."""
  file = f'{model}/model.safetensors'
  save_file({name: tensor * np.float32(1.1) for name, tensor in load_file(file).items()}, file)
  checksums.write(epath.Path(model))


def our_logits(made, factors):
  positions = np.arange(TOKENS.shape[1], dtype=np.int32)[None]
  hidden, unembedding, _ = jax.jit(made.policy.apply)(made.base, factors, TOKENS, positions, np.ones_like(positions))
  return np.asarray(hidden @ unembedding.T)


def logits_of(folder, adapter=None):
  import peft  # Takes three seconds.

  model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
  model = model if adapter is None else peft.PeftModel.from_pretrained(model, adapter).eval()
  with torch.no_grad():
    return model(torch.tensor(TOKENS)).logits.numpy()


@pytest.fixture(scope='module')
def exported(run, tmp_path_factory):
  """Return the adapter of the run, by itself."""
  path = tmp_path_factory.mktemp('exported') / 'adapter'
  assert runs.export(str(run[1]), str(path), 'student') == 1
  return path


def test_student_and_teacher_are_exported_and_compute_the_same_elsewhere(run, exported, tmp_path):
  config, workdir, made, state = run
  ours = our_logits(made, state.trainable)
  np.testing.assert_allclose(logits_of(config.model.path, exported), ours, atol=1e-4)
  values = json.loads((exported / peft_config.FILE).read_text())
  assert (values['r'], values['lora_alpha'], values['use_rslora']) == (4, 6, True)
  assert values['base_model_name_or_path'] == config.model.path
  names = {path.name for path in exported.iterdir()}
  assert names == {
    'adapter_config.json',
    'adapter_model.safetensors',
    'base_fingerprint.json',
    'tokenizer.json',
    'tokenizer_config.json',
    'README.md',
    'SHA256SUMS',
  }
  card = exported_cards.read(exported, workdir.parent)
  assert card.data.get('library_name') == 'peft' and "PeftModel.from_pretrained(model, 'adapter')" in card.text
  runs.export(str(workdir), str(tmp_path / 'teacher'), 'teacher')
  theirs = our_logits(made, state.teacher)
  assert np.abs(theirs - ours).max() > 0.01
  np.testing.assert_allclose(logits_of(config.model.path, tmp_path / 'teacher'), theirs, atol=1e-4)
  for weights, expected in (('student', ours), ('teacher', theirs)):
    runs.export(str(workdir), str(tmp_path / f'merged_{weights}'), weights, form='merged')
    np.testing.assert_allclose(logits_of(tmp_path / f'merged_{weights}'), expected, atol=1e-4)
    card = exported_cards.read(tmp_path / f'merged_{weights}', workdir.parent)
    assert card.data.get('library_name') == 'transformers' and f'of the {weights}, in float32' in card.text


@pytest.mark.parametrize('process', [0, 1])
def test_an_adapter_is_pushed_by_process_0_and_names_no_folder(run, tmp_path, monkeypatch, process):
  workdir = run[1]
  with hub_server.reached(tmp_path, monkeypatch) as served:
    monkeypatch.setattr(jax, 'process_index', lambda *_: process)
    assert runs.export(str(workdir), str(tmp_path / 'out'), 'student', push='me/tuned') == 1
    if process:
      assert served.asked == [] and not (tmp_path / 'out').exists()
      return
    files = {path.name: path.read_bytes() for path in (tmp_path / 'out').iterdir()}
    assert served.models['me/tuned'].files == files and str(workdir.parent) not in str(files)
    assert json.loads(files[peft_config.FILE])['base_model_name_or_path'] == 'model'
    text = exported_cards.read(tmp_path / 'out', workdir.parent).text
    assert "from_pretrained('…/model')\nmodel = PeftModel.from_pretrained(model, 'me/tuned')" in text


def test_what_cannot_be_pushed_is_not_exported(run, tmp_path):
  with pytest.raises(UserError, match='--push=tuned: write it as OWNER/NAME; nothing was exported'):
    runs.export(str(run[1]), str(tmp_path / 'out'), 'student', push='tuned')
  with pytest.raises(UserError, match='--private is about the model on the hub: name it with --push=OWNER/NAME'):
    runs.export(str(run[1]), str(tmp_path / 'out'), 'student', private=True)
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('form', ['peft', 'merged'])
def test_an_export_that_fails_leaves_nothing(run, form, tmp_path, monkeypatch):
  monkeypatch.setattr(checksums, 'write', lambda *_: (_ for _ in ()).throw(OSError(28, 'No space left on device')))
  with pytest.raises(UserError, match='could not be written .*No space left.*nothing was left there'):
    runs.export(str(run[1]), str(tmp_path / 'out'), 'student', form=form)
  assert [path.name for path in tmp_path.iterdir() if not path.name.endswith('.lock')] == []


def test_a_form_that_a_run_does_not_have_is_refused(kept, tmp_path):
  config, workdir = kept[:2]
  with pytest.raises(
    UserError, match='--format=model: .* trained an adapter; export it with --format=peft or --format=merged'
  ):
    runs.export(str(workdir), str(tmp_path / 'out'), 'student', form='model')
  write_settings(dataclasses.replace(config, model=dataclasses.replace(config.model, lora=LoraConfig())), workdir)
  for form in ('peft', 'merged'):
    with pytest.raises(UserError, match=f'--format={form}: .* trained all parameters; export it with --format=model'):
      runs.export(str(workdir), str(tmp_path / 'out'), 'student', form=form)
  assert not list(tmp_path.iterdir())


def test_an_adapter_is_opened_with_its_model_and_not_with_a_run(run, exported):
  config, workdir, made, state = run
  alone = dataclasses.replace(config, model=dataclasses.replace(config.model, path='', lora=LoraConfig(rank=2)))
  opened, factors = runs.open_source(runs.RunOrModel(model=config.model.path, adapter=str(exported)), alone)
  np.testing.assert_array_equal(our_logits(opened, factors), our_logits(made, state.trainable))
  with pytest.raises(UserError, match='--adapter=.* goes with --model=HF_DIR: a run has its own'):
    runs.open_source(runs.RunOrModel(str(workdir), adapter=str(exported)), config)
  with pytest.raises(UserError, match='--adapter is empty'):
    runs.open_source(runs.RunOrModel(model=config.model.path, adapter=''), alone)
  with pytest.raises(UserError, match='--cartridge is empty'):
    runs.open_source(runs.RunOrModel(model=config.model.path, cartridge=''), alone)
  alone.model.lora = LoraConfig(path=str(exported))
  with pytest.raises(UserError, match='model.lora.path=.* of the config: name that as --adapter'):
    runs.open_source(runs.RunOrModel(model=config.model.path), alone)


def test_an_adapter_of_another_base_is_refused_by_its_fingerprint(run, exported, tmp_path, caplog):
  config = run[0]
  other = tmp_path / 'other'
  shutil.copytree(config.model.path, other)
  opened, _ = runs.open_source(runs.RunOrModel(model=str(other), adapter=str(exported)), None)
  assert opened.policy.adapter is not None and not caplog.records  # A copy of the base is the base.
  other_weights(other)
  with pytest.raises(UserError, match=r'belongs to another model than .*other: its base_fingerprint\.json says'):
    runs.open_source(runs.RunOrModel(model=str(other), adapter=str(exported)), None)
  adapter = tmp_path / 'adapter'
  shutil.copytree(exported, adapter)
  for damaged in ('{"format": 2}', '{"format": 1, "weights": {"values": "0"}, "architecture": [1]}'):
    (adapter / peft_files.BASE).write_text(damaged)
    with pytest.raises(UserError, match='is not a fingerprint in the format 1'):
      runs.open_source(runs.RunOrModel(model=str(other), adapter=str(adapter)), None)
  (adapter / peft_files.BASE).unlink()
  assert not identity.compare_base(adapter, os.path.relpath(config.model.path))  # The directory that it names.
  runs.open_source(runs.RunOrModel(model=str(other), adapter=str(adapter)), None)
  assert 'whether' in caplog.text and 'cannot be checked beyond its shapes' in caplog.text
  caplog.clear()
  values = json.loads((epath.Path(config.model.path) / 'config.json').read_text())
  shutil.copyfile(f'{config.model.path}/model.safetensors', other / 'model.safetensors')
  (other / 'config.json').write_text(json.dumps(values | {'rope_theta': 5000.0}))
  checksums.write(other)
  runs.open_source(runs.RunOrModel(model=str(other), adapter=str(exported)), None)
  assert 'rope_theta was 10000.0 and is now 5000.0' in caplog.text


@pytest.mark.slow
def test_a_run_whose_base_has_other_weights_is_neither_resumed_nor_opened(kept, tmp_path):
  config, workdir = kept[:2]
  said = []
  loop.train(config, workdir, announce=said.append)
  assert not [line for line in said if 'weights' in line]
  other_weights(config.model.path)
  with pytest.raises(UserError, match=r'weights/values was .*accept_changes=model'):
    loop.train(config, workdir)
  for use in (
    lambda: runs.open_run(workdir),
    lambda: runs.export(str(workdir), str(tmp_path / 'out'), 'student'),
    lambda: runs.export(str(workdir), str(tmp_path / 'out'), 'student', form='merged'),
  ):
    with pytest.raises(UserError, match=r'other weights than those with which the adapter of step 1 .*restore them'):
      use()
  assert not list(tmp_path.iterdir())
  accepting = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, accept_changes=('model',)))
  loop.train(accepting, workdir, announce=said.append)
  assert [line for line in said if line.startswith('Accepted') and 'weights/values' in line]


def test_a_run_that_started_from_an_adapter_is_not_opened_with_other_scales_or_ranks(kept, exported, tmp_path):
  config, workdir = kept[:2]
  adapter = shutil.copytree(exported, tmp_path / 'adapter')
  (workdir / 'config.json').write_text(from_adapter(config, adapter).to_json())
  runs.export(str(workdir), str(tmp_path / 'same'), 'student')
  values = json.loads((adapter / peft_config.FILE).read_text())
  tensors = load_file(adapter / peft_files.WEIGHTS)
  lower = {name: tensor[:3] if 'lora_A' in name else tensor[:, :3].copy() for name, tensor in tensors.items()}
  (adapter / checksums.SUMS).unlink()
  for changes, factors in (({'lora_alpha': 7}, tensors), ({'use_rslora': False}, tensors), ({'r': 3}, lower)):
    (adapter / peft_config.FILE).write_text(json.dumps(values | changes))
    save_file(factors, adapter / peft_files.WEIGHTS)
    for use in (
      lambda: runs.open_run(workdir),
      lambda: runs.export(str(workdir), str(tmp_path / 'out'), 'student'),
      lambda: runs.export(str(workdir), str(tmp_path / 'out'), 'student', form='merged'),
    ):
      with pytest.raises(UserError, match=r'/adapter describes another adapter than .*adapter/scales was .*restore it'):
        use()
  assert not (tmp_path / 'out').exists()


def from_adapter(config, adapter):
  return dataclasses.replace(config, model=dataclasses.replace(config.model, lora=LoraConfig(path=str(adapter))))


def test_training_starts_from_an_adapter(run, exported, tmp_path):
  """The state begins with its factors, also the teacher's."""
  config, _, _, state = run
  config = from_adapter(config, exported)
  made, factors = opening.make_session(config, tmp_path / 'run')
  np.testing.assert_array_equal(our_logits(made, factors), our_logits(made, state.trainable))
  begun = place_state(update_spec(config), factors, made.mesh, made.policy.parameter_table())
  jax.tree.map(np.testing.assert_array_equal, begun.teacher, factors)


@pytest.mark.slow
def test_a_run_that_has_begun_is_compared_with_its_own_base_and_not_with_that_of_its_adapter(kept, exported, tmp_path):
  """Other weights that were accepted are the run's from then on; evaluating it needs no `accept_changes`."""
  config, workdir = from_adapter(kept[0], exported), epath.Path(tmp_path / 'run')
  other_weights(config.model.path)
  with pytest.raises(UserError, match='belongs to another model'):
    loop.train(config, workdir)
  begin(dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, accept_changes=('model',))), workdir)
  opened, factors, step = runs.open_run(workdir, config=config)
  assert step == 1 and opened.policy.adapter is not None and np.any(jax.tree.leaves(factors)[1])
  said = []
  loop.train(config, workdir, announce=said.append)
  assert not [line for line in said if 'weights' in line]


@pytest.mark.slow
def test_a_resume_compares_the_adapter_from_which_a_run_started(run, exported, tmp_path):
  adapter, workdir = tmp_path / 'adapter', epath.Path(tmp_path / 'run')
  shutil.copytree(exported, adapter)
  config = from_adapter(run[0], adapter)
  begin(config, workdir)
  runs.export(str(workdir), str(tmp_path / 'more'), 'student')
  more = json.loads((tmp_path / 'more' / peft_config.FILE).read_text())
  assert (more['r'], more['lora_alpha'], more['use_rslora']) == (4, 6, True)
  file = adapter / peft_files.WEIGHTS
  save_file({name: tensor * np.float32(1.1) for name, tensor in load_file(file).items()}, file)
  (adapter / checksums.SUMS).unlink()
  said = []
  loop.train(config, workdir, announce=said.append)
  assert [line for line in said if line.startswith('model.lora.path holds other factors than at the start')]
  values = json.loads((adapter / peft_config.FILE).read_text())
  (adapter / peft_config.FILE).write_text(json.dumps(values | {'lora_alpha': 7}))
  with pytest.raises(UserError, match=r'adapter/scales was .*accept_changes=model'):
    loop.train(config, workdir)
  (adapter / peft_config.FILE).write_text(json.dumps(values))
  accepting = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, accept_changes=('model',)))
  accepting.model.lora = LoraConfig()
  with pytest.raises(UserError, match='was trained with another adapter .* choose another --workdir'):
    loop.train(accepting, workdir)


@pytest.fixture
def load_config(tmp_path, monkeypatch):
  """`command.load_config` of a config with an adapter of rank 3, for the flag --adapter and some overrides."""
  path = tmp_path / 'config.py'
  path.write_text(
    'from sdpo_jax.config import Config, LoraConfig\n\n\ndef get_config():\n  config = Config()\n'
    "  config.model.path, config.data.train_files = 'model', ('rows.jsonl',)\n"
    '  config.model.lora, config.trainer.test_freq = LoraConfig(rank=3, alpha=5.0), 0\n  return config\n'
  )

  def load(adapter, *given, defined=True):
    values = flags.FlagValues()
    flags.DEFINE_string('config', str(path), '', flag_values=values)
    if defined:
      flags.DEFINE_string('adapter', adapter, '', flag_values=values)
    values.mark_as_parsed()
    monkeypatch.setattr(flags, 'FLAGS', values)
    monkeypatch.setattr(command, 'overrides', lambda: list(given))
    return command.load_config()

  return load


def test_the_flag_replaces_what_the_config_says_of_an_adapter(load_config):
  assert load_config(None).model.lora == LoraConfig(rank=3, alpha=5.0)
  assert load_config(None, defined=False).model.lora == LoraConfig(rank=3, alpha=5.0)  # launch.plan, say.
  assert load_config('dir', ('trainer.save_freq', '7')).model.lora == LoraConfig(path='dir')
  with pytest.raises(UserError, match=r'--config\.model\.lora\.rank=8 has no effect with --adapter=dir, .*: omit one'):
    load_config('dir', ('model.lora.rank', '8'))
  with pytest.raises(UserError, match='rank=3 and .* have no effect with model.lora.path=.dir., which determines'):
    load_config(None, ('model.lora.path', 'dir'))
  with pytest.raises(UserError, match='--adapter is empty'):
    load_config('')


@pytest.mark.slow
def test_a_probe_reads_the_adapter(run, exported):
  config = dataclasses.replace(run[0], model=dataclasses.replace(run[0].model, lora=LoraConfig(path=str(exported))))
  numbers = probe.probe_model(config, max_questions=2)
  assert numbers['questions'] == 2


def test_a_resume_compares_all_matrices_and_what_they_count(run):
  config = run[0]

  def digest(**settings):
    lora = dataclasses.replace(config.model.lora, **settings)
    return fingerprint.adapter_layout(dataclasses.replace(config, model=dataclasses.replace(config.model, lora=lora)))

  assert digest() == digest(alpha_pattern={'attention': 6}) != {}
  changes = {}, {'alpha': 6.5}, {'rank': 3}, {'use_rslora': False}
  assert len({digest(**changed)['scales'] for changed in changes}) == 4
  for changed, other in (({'alpha': 6.5}, False), ({'rank': 3}, True), ({'target_modules': ('attention',)}, True)):
    assert (digest(**changed)['matrices'] != digest()['matrices']) == other
  whole = dataclasses.replace(config, model=dataclasses.replace(config.model, lora=LoraConfig()))
  assert fingerprint.adapter_layout(whole) == {}
