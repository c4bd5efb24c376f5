"""Every script of examples/ runs as its docstring says, with fewer steps."""

import json
import re
import runpy

import pytest

from sdpo_jax.environments import digits
from tests import forked_commands, tiny

EXAMPLES = tiny.REPOSITORY / 'examples'
RUNS = {  # Arguments, and what is printed.
  'own_grader.py': (
    ['--workdir={folder}/run', '--steps=2'],
    r'step 2: score .*\n(.*\n)*eval/held_out/mean@4: .* after 2 steps',
  ),
  'trl_reward.py': (['--workdir={folder}/run', '--steps=2'], r'step 1: \d+% end in a 7'),
  'lora_run.py': (
    ['--workdir={folder}/run', '--output={folder}/adapter', '--steps=2'],
    r'(?s)step 2: .* are right.*adapter_model\.safetensors',
  ),
  'cartridge.py': (['--workdir={folder}/run', '--steps=2'], r'step 2: .* answered with 16 slots'),
  'sweep.py': (
    ['--output={folder}', '--steps=2', '--rates', '1e-3', '--seeds', '0', '1'],
    r'(?s)score \d\.\d\d at step 2.*curves\.png',
  ),
}
ELSEWHERE = {'serve_client.py', 'session_client.py'}  # Run against a server by their own tests.
ALONE = {'objective_on_arrays.py', 'one_step.py'}  # Run by tests of their own below.


def run(name: str, *arguments: str) -> str:
  variables = {**tiny.environment(quick=True), 'PYTHONPATH': str(tiny.REPOSITORY)}
  done = forked_commands.run([str(EXAMPLES / name), *arguments], variables)
  assert done.returncode == 0, done.stderr
  return done.stdout


def test_no_example_is_left_out():
  assert {path.name for path in EXAMPLES.glob('*.py')} - ELSEWHERE == {*RUNS, *ALONE}


def test_the_own_grader_says_what_is_wrong_in_the_words_that_the_tiny_model_was_taught():
  reversal = runpy.run_path(str(EXAMPLES / 'own_grader.py'))['reversal']
  wrong, right = reversal(completions=['11706\n', '31704'], answer=['31704', '31704'])
  assert wrong == {'score': 0.0, 'feedback': digits.feedback('31704', '11706')}
  assert right == {'score': 1.0, 'feedback': ''}


@pytest.mark.slow  # The call that it shows is made by every test of the objective.
def test_the_objective_on_arrays_prints_a_loss_that_a_step_lowers():
  before, after = (
    float(re.search(pattern, found).group(1))
    for found in [run('objective_on_arrays.py')]
    for pattern in (r'over 8 tokens: ([\d.]+)', r'against the gradient: ([\d.]+)')
  )
  assert 0 < after < before


@pytest.mark.slow
@pytest.mark.parametrize('name', RUNS)
def test_an_example_runs(name, tmp_path):
  arguments, printed = RUNS[name]
  found = run(name, *(argument.format(folder=tmp_path) for argument in arguments))
  assert re.search(printed, found), found
  if name == 'sweep.py':
    assert (tmp_path / 'curves.png').read_bytes().startswith(b'\x89PNG')


@pytest.mark.slow
def test_one_step_on_a_page_is_the_step_of_a_run(tmp_path):
  *_, digest = run('one_step.py', '--config=configs/quickstart.py').split()
  settings = ['total_training_steps=1', 'val_before_train=false', 'test_freq=0']
  flags = ['--config=configs/quickstart.py', *(f'--config.trainer.{setting}' for setting in settings)]
  done = tiny.launch('train', *flags, f'--workdir={tmp_path}/run', quick=True)
  assert done.returncode == 0, done.stderr
  [line] = (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()
  assert json.loads(line)['state_digest'] == digest
  with pytest.raises(AssertionError, match='without a teacher that is not re-prompted'):
    run('one_step.py', '--config=configs/quickstart_grpo.py')
