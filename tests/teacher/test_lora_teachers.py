"""Every teacher of a student with an adapter, through the session and the update of a run, against merged matrices."""

from __future__ import annotations

import signal

import chex
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from sdpo_jax.config import LoraConfig, MeshConfig, ModelConfig
from sdpo_jax.distributed.mesh import parameter_sharding
from sdpo_jax.learning.update import abstract_state, place_state
from sdpo_jax.models import parameters
from sdpo_jax.models.adapters import lora
from sdpo_jax.models.forward import forward
from sdpo_jax.teacher.signal import Teacher, teacher_signal
from sdpo_jax.training import step
from sdpo_jax.training.checkpoint.checkpoints import Checkpoints
from sdpo_jax.training.opening import make_session
from sdpo_jax.training.specs import teacher_spec, update_spec
from sdpo_jax.types import TokenRows
from tests import tiers, tiny
from tests.generation_batches import make_samples
from tests.models.adapters.lora_policies import deltas, merged
from tests.resumed_runs import KILLED, MOMENTS, STEPS, assert_same_run, final_state
from tests.updates import assert_entropy, settings

ADAPTER = dict(rank=2, alpha=4.0, target_modules=('attention', 'mlp.down'), alpha_pattern={'layers.1': 2.0})
RATE = 0.25
MESHES = {1: MeshConfig(fsdp=1, tensor=1), 4: MeshConfig(fsdp=2, tensor=2), 8: MeshConfig(fsdp=4, tensor=2)}


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  return tiny.make_model(tmp_path_factory.mktemp('lora') / 'model')


def make_config(model, regularization, devices=4, dtype='float32', optimizer='adamw'):
  config = settings(actor__ppo_micro_batch_size=8)
  config.model = ModelConfig(path=str(model), dtype=dtype, remat='none', lora=LoraConfig(**ADAPTER))
  config.mesh = MESHES[devices]
  sd = config.actor.self_distillation
  sd.teacher_regularization, sd.teacher_update_rate = regularization, RATE
  sd.teacher_restart_interval = 2 if regularization == 'restart' else None
  config.optimizer.name = optimizer
  if optimizer == 'adamw':
    config.optimizer.weight_decay = 0.0
  return config.validate()


def random_factors(session, seed=1):
  """Factors of which none is zero, as of an adapter that was trained before."""
  draw = np.random.default_rng(seed)

  def place(parameter):
    value = 0.2 * draw.standard_normal(parameter.shape, np.float32)
    return jax.device_put(value, parameter_sharding(session.mesh, parameter.axes, parameter.shape))

  return parameters.map_table(place, lora.factors(session.policy.parameter_table()))


def start(config, workdir, monkeypatch, fresh=False):
  """(session, state) of a run's start; the adapter is random unless it is to be `fresh`."""
  few = jax.devices()[: config.mesh.fsdp * config.mesh.tensor]
  monkeypatch.setattr(jax, 'devices', lambda *backend: few)
  session, trainable = make_session(config, workdir)
  trainable = trainable if fresh else random_factors(session)
  return session, place_state(update_spec(config), trainable, session.mesh, session.policy.parameter_table())


def updates(session, state, batch, count):
  """(states before and after each of `count` updates on the same samples, reports)."""
  states, reports = [jax.device_get(state.replace(rng=None))], []
  for _ in range(count):
    state, report = step.run_update(session, state, batch)
    states.append(jax.device_get(state.replace(rng=None)))
    reports.append(report)
  return states, reports


def merged_log_probs(session, base, factors, batch, sample):
  """Log-probs [length, V] of the model without adapter whose matrices are W + scale · A · B, in the teacher's
  context.
  """
  params = base if factors is None else merged(session.policy, base, factors)
  length = int(batch.rollouts.completion_mask[sample].sum())
  tokens = np.array([[*batch.teacher_prompts[sample], *batch.rollouts.completion_tokens[sample, :length]]], np.int32)
  positions = np.arange(tokens.shape[1], dtype=np.int32)[None]
  plain = session.policy.base_policy().on(None)
  hidden, unembedding, _ = jax.jit(plain.apply)({}, params, tokens, positions, np.ones_like(tokens))
  logits = hidden[0, -length - 1 : -1] @ unembedding[: plain.vocab_size].T
  return jax.nn.log_softmax(logits / session.config.rollout.temperature)


def averaged(teacher, student):
  return jax.tree.map(lambda t, s: (1 - RATE) * np.float64(t) + RATE * np.float64(s), teacher, student)


def expected_teachers(regularization, states):
  """Return the factors that teach in each update, by the definition; None: the model without adapter."""
  students = [state.trainable for state in states]
  first = students[0]
  if regularization in ('ema', 'lora_ema'):
    found = [first]
    for student in students[1:]:
      found.append(averaged(found[-1], student))
    return found
  return {
    'live': students,
    'base': [None] * len(students),
    'restart': [first, first, students[2], students[2]],  # Every two batches.
  }.get(regularization, [first] * len(students))


@pytest.mark.parametrize(
  'kind',
  tiers.cases(
    ('lora_ema', 'base', 'ema', 'trust-region', 'restart', 'frozen', 'live'),
    default=('lora_ema',),
    slow=('base', 'trust-region', 'restart'),
  ),
)
def test_every_teacher_of_an_adapter(model, tmp_path, monkeypatch, kind):
  config = make_config(model, kind)
  session, state = start(config, tmp_path, monkeypatch)
  before = jax.device_get(session.base)
  batch = make_samples(config)
  states, reports = updates(session, state, batch, 3)
  assert all(abs(report.loss) > 1e-6 for report in reports)
  moved = jax.tree.map(lambda new, old: float(np.abs(new - old).max()), states[3].trainable, states[0].trainable)
  assert min(jax.tree.leaves(moved)) > 1e-6  # All factors learn,
  chex.assert_trees_all_equal(jax.device_get(session.base), before)  # and nothing else.
  assert 'embedding' not in states[3].trainable

  sample = int(np.flatnonzero(batch.taught)[0])
  teachers = expected_teachers(kind, states)
  for number, report in enumerate(reports):
    said = merged_log_probs(session, before, teachers[number], batch, sample)
    if kind == 'trust-region':
      student = merged_log_probs(session, before, states[number].trainable, batch, sample)
      said = jax.nn.log_softmax((1 - RATE) * said + RATE * student)
    assert_entropy(report, said, sample)
  kept = [state.teacher for state in states]
  if kind in ('live', 'base'):
    assert kept == [{}] * 4
  else:
    for found, expected in zip(kept, teachers, strict=True):
      chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-7)


def test_the_average_of_factors_begins_as_a_copy_and_not_at_zero(model, tmp_path, monkeypatch):
  """From zero both factors of a product lag, and what the teacher has learnt is of the order of the rate's square."""
  config = make_config(model, 'lora_ema')
  session, state = start(config, tmp_path, monkeypatch, fresh=True)
  states, _ = updates(session, state, make_samples(config), 1)
  chex.assert_trees_all_equal(states[0].teacher, states[0].trainable)
  students, teachers = (deltas(session.policy, tree) for tree in (states[1].trainable, states[1].teacher))
  for path, change in students.items():
    assert np.abs(change).max() > 0
    # B has moved from zero and A, whose gradient B is, has not: the product of the averages is RATE times the product.
    np.testing.assert_allclose(teachers[path], RATE * change, rtol=1e-5, atol=1e-6 * np.abs(change).max())


def test_the_model_without_its_adapter_is_that_of_peft_with_the_adapter_disabled(model, tmp_path, monkeypatch):
  torch, transformers = pytest.importorskip('torch'), pytest.importorskip('transformers')
  peft = pytest.importorskip('peft')
  config = make_config(model, 'base')
  session, state = start(config, tmp_path, monkeypatch)
  theirs = peft.get_peft_model(
    transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
    peft.LoraConfig(
      r=ADAPTER['rank'],
      lora_alpha=ADAPTER['alpha'],
      target_modules=['q_proj', 'k_proj', 'v_proj', 'o_proj', 'down_proj'],
      alpha_pattern={f'layers.1.{module}': 2.0 for module in ('self_attn.*', 'mlp.down_proj')},
    ),
  ).eval()
  own = {name: parameter for name, parameter in theirs.named_parameters() if 'lora_' in name}
  for parameter in lora.factors(session.policy.parameter_table()):
    values = np.asarray(parameters.get(state.trainable, parameter.path))
    for layer in range(parameter.layers):
      name = parameter.huggingface_name(layer).replace('.weight', '.default.weight')
      flat = values[layer].reshape(parameter.huggingface_shape[::-1])
      own.pop(name).data.copy_(torch.from_numpy(flat.T.copy()))
  assert not own

  tokens = np.random.default_rng(0).integers(1, 200, (4, 12)).astype(np.int32)
  rows = TokenRows(
    tokens,
    np.tile(np.arange(12, dtype=np.int32), (4, 1)),
    np.ones_like(tokens),
    np.tile(np.arange(4, 11, dtype=np.int32), (4, 1)),
  )

  def say(state):
    signal = teacher_signal(
      Teacher(session.teacher.policy.on(None), session.base),
      session.policy,
      session.base,
      state,
      rows,
      teacher_spec(config),
    )
    return signal.hidden @ signal.unembedding.T

  def they_say():
    with torch.no_grad():
      return theirs(torch.tensor(tokens.astype(np.int64))).logits[:, 4:11].numpy()

  with theirs.disable_adapter():
    off = they_say()
  on = they_say()
  assert np.abs(on - off).max() > 0.1
  np.testing.assert_allclose(jax.jit(say)(state), off, atol=2e-4)
  # Ours with the adapter is theirs with it: what was switched off is this adapter.
  hidden, unembedding = jax.jit(lambda trainable: forward(session.policy.on(None), session.base, trainable, rows))(
    state.trainable
  )
  np.testing.assert_allclose(hidden @ unembedding.T, on, atol=2e-4)


@pytest.mark.parametrize('dtype', ['float32', pytest.param('bfloat16', marks=pytest.mark.slow)])
def test_a_checkpoint_holds_no_base_and_a_run_goes_on_from_it_bit_for_bit(model, tmp_path, monkeypatch, dtype):
  config = make_config(model, 'lora_ema', dtype=dtype)
  session, state = start(config, tmp_path, monkeypatch)
  table, batch = session.policy.parameter_table(), make_samples(config)
  state, _ = step.run_update(session, state, batch)
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(1, state, {}, {})
  checkpoints.wait()
  checkpoints.close()
  whole, _ = step.run_update(session, state, batch)
  check_base(model, session, dtype)
  again, trainable = make_session(config, tmp_path)
  reader = Checkpoints(tmp_path)
  _, restored, _ = reader.restore(abstract_state(update_spec(config), trainable, again.mesh, table))
  reader.close()
  factors = sum(leaf.nbytes for leaf in jax.tree.leaves(trainable))
  held = sum(leaf.nbytes for leaf in jax.tree.leaves((restored.trainable, restored.opt_state, restored.teacher)))
  assert 4 * factors <= held < 4 * factors + 64  # Two moments, student and teacher; counters.
  resumed, _ = step.run_update(again, restored, batch)
  chex.assert_trees_all_equal(*(jax.device_get(found.replace(rng=None)) for found in (whole, resumed)))


def check_base(model, session, dtype):
  """Check that the base is what the file holds, to the bit."""
  stored = load_file(model / 'model.safetensors')
  for parameter in parameters.frozen(session.policy.parameter_table()):
    values = np.asarray(parameters.get(session.base, parameter.path))
    for layer in range(parameter.layers) if parameter.stacked else [None]:
      tensor = stored[parameter.huggingface if layer is None else parameter.huggingface_name(layer)]
      tensor = tensor.T if parameter.transpose else tensor
      found = values if layer is None else values[layer]
      assert found.dtype == (dtype if parameter.compute else 'float32')
      np.testing.assert_array_equal(found, tensor.reshape(found.shape).astype(found.dtype), err_msg=parameter.name)


@pytest.mark.slow
def test_eight_devices_do_what_one_does(model, tmp_path, monkeypatch):
  found = []
  for devices in (1, 8):
    config = make_config(model, 'lora_ema', devices, optimizer='sgd')  # AdamW's first steps amplify rounding.
    with monkeypatch.context() as patch:
      session, state = start(config, tmp_path, patch)
      assert session.mesh.size == devices
      found.append(updates(session, state, make_samples(config), 3))
  (one, reports), (eight, others) = found
  assert [report.loss for report in reports] == pytest.approx([report.loss for report in others], rel=1e-4)
  chex.assert_trees_all_close(one[3].trainable, eight[3].trainable, rtol=1e-4, atol=1e-6)
  chex.assert_trees_all_close(one[3].teacher, eight[3].teacher, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_run_with_an_adapter_that_is_killed_and_started_again_ends_as_the_run_that_is_left_in_peace(tmp_path):
  config = tiny.make_experiment(tmp_path)
  flags = {
    'trainer.total_training_steps': STEPS,
    'model.lora.rank': 2,
    'model.lora.target_modules': 'attention',
    'model.dtype': 'bfloat16',
    'actor.self_distillation.teacher_regularization': 'lora_ema',
    'optimizer.lr': 0.02,
  }
  moments = dict(list(MOMENTS.items())[1:])
  names = {'whole': config, **{moment: tmp_path / f'killed_{number}.py' for number, moment in enumerate(moments)}}
  for moment, where in moments.items():
    names[moment].write_text(config.read_text() + KILLED.format(where=where))
  names['killed'] = config
  commands = [
    (
      'train',
      [f'--config={path}', *(f'--config.{name}={value}' for name, value in flags.items())]
      + [f'--workdir={tmp_path / ("whole" if name == "whole" else "killed")}'],
    )
    for name, path in names.items()
  ]
  done = tiny.launch_many(commands, quick=True)
  assert [end.returncode for end in done] == [0, *[-signal.SIGKILL] * len(moments), 0], done[-1].stderr
  assert_same_run(tmp_path / 'whole', tmp_path / 'killed')
  _, state, _ = final_state(tmp_path / 'killed')
  assert set(state.trainable['layers']) == {'attention'}
  assert all(np.any(leaf) for leaf in jax.tree.leaves((state.trainable, state.teacher)))
