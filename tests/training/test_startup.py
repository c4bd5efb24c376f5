"""The start of a run: every program is compiled before the first step, whatever lengths come; none is left to a
step.
"""

import dataclasses
import itertools
import json
import re
import types

from etils import epath
import jax
import pytest

from sdpo_jax.config import Config, MeshConfig
from sdpo_jax.distributed import mesh as meshes
from sdpo_jax.distributed import programs as registered
from sdpo_jax.errors import UserError
from sdpo_jax.models import huggingface
from sdpo_jax.models.attention.backend import AttentionBackend
from sdpo_jax.rollout import sizes
from sdpo_jax.training import loop, opening, run_programs, startup
from sdpo_jax.training.checkpoint.manifest import read_manifest
from tests.training.many_lengths import experiment
from tests.updates import MODEL, make_model


@pytest.fixture
def devices(monkeypatch):
  """Set how many devices a run finds."""

  def restrict(count: int) -> None:
    found = jax.devices()[:count]
    monkeypatch.setattr(
      opening, 'make_mesh', lambda config, devices, described: meshes.make_mesh(config, found, described)
    )

  return restrict


def lines(folder) -> list[dict]:
  return [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]


@pytest.mark.parametrize(
  'count, changes',
  [
    # By default test_commands.py and test_divergence.py find that their runs compile nothing late.
    pytest.param(1, {}, marks=pytest.mark.campaign),  # Below on eight devices, and on one with more lengths.
    pytest.param(1, {'data__prompt_buckets': (64, 100), 'data__response_buckets': (16, 64)}, marks=pytest.mark.slow),
    pytest.param(1, {'actor__pack_sequences': True, 'rollout__max_batch_rows': 256}, marks=pytest.mark.slow),
    pytest.param(
      1, {'actor__policy_loss__loss_mode': 'vanilla', 'model__dtype': 'bfloat16'}, marks=pytest.mark.campaign
    ),
    pytest.param(8, {}, marks=pytest.mark.slow),
  ],
)
def test_nothing_is_compiled_after_the_start_and_what_is_compiled_is_registered(
  tmp_path, monkeypatch, devices, count, changes
):
  monkeypatch.setattr(sizes, 'SMALLEST_CACHE', 16)
  devices(count)
  config, said = experiment(tmp_path, **changes), []
  result = loop.train(config, tmp_path / 'run', announce=said.append)
  written = read_manifest(epath.Path(tmp_path / 'run' / 'checkpoints' / '3'))
  assert lines(tmp_path / 'run')[-1]['state_digest'] == written.state_digest
  assert result.step == 3 and [line['programs/compiled'] for line in lines(tmp_path / 'run')] == [0.0] * 4
  named = [match for line in said if (match := re.fullmatch(r' +(\d+)/(\d+) (\S+)  [\d.]+ s', line))]
  assert [int(match[1]) for match in named] == list(range(1, len(named) + 1))
  assert int(named[0][2]) == len(named)
  kinds = [match[3].removeprefix('evaluation/').partition('/')[0] for match in named]
  updates = kinds.count('update')
  assert updates <= 6 and len(kinds) - updates - kinds.count('score') - 4 <= 12 + 6 * (
    'data__prompt_buckets' in changes
  )
  assert kinds.count('decode') == {1: 4, 8: 2}[count] - ('data__prompt_buckets' in changes)
  lengths = {line['rollout/completion_length_mean'] for line in lines(tmp_path / 'run')[1:]}
  assert len(lengths) > 1


@pytest.mark.slow
def test_what_is_compiled_late_is_counted(tmp_path, monkeypatch, devices):
  """A registry that leaves a program out is found out."""
  jax.clear_caches()  # Another test may have compiled the same.
  devices(1)
  found = run_programs.run_programs

  def without_admit(*arguments, **settings):
    return {name: program for name, program in found(*arguments, **settings).items() if program.kind != 'admit'}

  monkeypatch.setattr(startup, 'run_programs', without_admit)
  short = {'data__max_response_length': 4, 'data__response_buckets': (4,)}
  config = experiment(tmp_path, trainer__total_training_steps=1, trainer__test_freq=0, **short)
  loop.train(config, tmp_path / 'run')
  assert [line['programs/compiled'] for line in lines(tmp_path / 'run')] == [1.0]


def test_compilations_are_noted_once_with_their_names():
  with registered.noted_compilations() as compiled:
    jax.jit(lambda x: x * 3 + 1).lower(jax.ShapeDtypeStruct((3,), float)).compile()
    assert compiled() == ['jit(<lambda>)'] and compiled() == []
  with registered.noted_compilations() as later:
    jax.jit(lambda x: x * 5 + 1).lower(jax.ShapeDtypeStruct((3,), float)).compile()
    assert compiled() == [] and len(later()) == 1


def test_default_settings_compile_few_programs():
  """With lengths of thousands of tokens: 6 updates, and 12 programs of the sampler where prompts have two lengths."""
  config = Config()
  policy, _ = make_model()
  mesh = meshes.make_mesh(MeshConfig(), jax.devices()[:1])
  for held_out, kernels in itertools.product((None, 10, 500), (False, True)):
    reader = dataclasses.replace(policy, backend=AttentionBackend('splash', interpret=True)) if kernels else policy
    found = run_programs.run_programs(
      config, reader, *run_programs.abstract_parameters(reader, mesh), mesh, held_out=held_out
    )
    kinds = [program.kind for program in found.values()]
    assert kinds.count('update') == 6
    assert sum(kind not in ('update', 'score', 'zero', 'apply', 'finish', 'digest') for kind in kinds) <= 12, sorted(
      found
    )


def test_a_program_that_does_not_fit_is_named(tmp_path, monkeypatch):
  def refuse(found, names):
    yield 'update/8×16×6', jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.')

  monkeypatch.setattr(startup, 'run_programs', lambda *_, **__: {'update/8×16×6': None})
  monkeypatch.setattr(registered, 'compile_programs', refuse)
  fake = types.SimpleNamespace(
    config=None, policy=None, base=None, mesh=None, teacher=None, sampler=types.SimpleNamespace(stop_ids=1)
  )
  with pytest.raises(UserError, match='update/8×16×6 does not fit .*Out of memory.*ppo_micro_batch_size'):
    startup.compile_programs(fake, types.SimpleNamespace(trainable=None), 0, lambda text: None)


@pytest.mark.parametrize(
  'first, steps', [(0, 'steps 1 to 3'), (1, 'steps 2 to 3'), (2, 'step 3'), (3, 'no step left'), (5, 'no step left')]
)
def test_the_banner_names_the_steps_to_come(tmp_path, first, steps):
  config = experiment(tmp_path)
  config.trainer.total_training_steps, config.data.train_batch_size, config.rollout.n = 3, 1, 8
  described = types.SimpleNamespace(
    config=config,
    mesh=meshes.make_mesh(MeshConfig(), jax.devices()[:1], []),
    policy=types.SimpleNamespace(parameter_table=lambda: ()),
    workdir='here',
  )
  said = startup.describe(described, 0, None, 11, first)
  assert said[0] == f'startup: {steps} in here'
  assert said[3:] == [
    '  training   generated, 1 question × 8 completions per step',
    '  evaluation 11 questions × 2 completions',
  ]


@pytest.mark.parametrize('packed', [True, False])
@pytest.mark.parametrize('window', [None, 16])
def test_the_banner_says_that_layers_with_windows_share_no_prompt(tmp_path, packed, window):
  config = experiment(tmp_path)
  config.actor.pack_sequences = packed
  values = MODEL | dict(use_sliding_window=window is not None, sliding_window=window, max_window_layers=1)
  described = types.SimpleNamespace(
    config=config,
    mesh=meshes.make_mesh(MeshConfig(), jax.devices()[:1], []),
    policy=huggingface.describe(values, config.model),
    workdir='here',
  )
  said = '\n'.join(startup.describe(described, 0, None, 11, 0))
  assert ('own copy of the teacher prompt, as layers have windows' in said) == (packed and window is not None)
  assert ('samples share a row' in said) == packed
